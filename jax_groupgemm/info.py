"""Versions, what this build can do, and which kernel runs each operation here.

``python -m jax_groupgemm.info`` prints it; ``--json`` also says why the others do not run. It
always exits with 0: a machine without a GPU, or without a compiled extension, is not an error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import warnings
from typing import Any

# Lowest versions that work, and what for.
FLOOR = {"jax": "0.11.0", "jaxlib": "0.11.0"}
# The names of what runs where no kernel does.
_WITHOUT_A_KERNEL = {
    "reference": "a tiled XLA program",
    "composed": "made of other operations of this table, or of plain XLA operations",
}
_CHECK = "python -m jax_groupgemm.check"
_OPTIONAL = ("jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def _devices() -> dict[str, Any]:
    from ._kernels import extension

    devices, problem = extension.devices()
    found = [
        {
            "platform": d.platform,
            "kind": d.device_kind,
            "compute_capability": getattr(d, "compute_capability", None),
        }
        for d in devices
    ]
    return {"found": found, "problem": problem}


def _tiles() -> dict[str, Any]:
    """The table of measured tiles that this machine's GPU takes, and how many products it has."""
    from ._kernels import tuned

    kind = tuned.device_kind()
    table = None if kind is None else tuned.path(kind)
    if kind is None or table is None:
        return {"table": None, "products": 0, "problem": None}
    with warnings.catch_warnings(record=True) as problems:
        warnings.simplefilter("always")
        products = len(tuned.entries(kind))
    problem = str(problems[0].message) if problems else None
    return {"table": str(table), "products": products, "problem": problem}


def _proof() -> dict[str, Any]:
    """The kernels that ``python -m jax_groupgemm.check`` has proven on this GPU."""
    from ._kernels import proven

    if (where := proven.place()) is None:
        return {"file": None, "kernels": [], "problem": None}
    path = proven.path(where.gpu)
    kernels, problem = proven.found(path, where)
    return {"file": str(path), "kernels": sorted(kernels), "problem": problem}


def _operations() -> dict[str, dict[str, Any]]:
    """Per operation and dtype what runs here, and why the other kernels do not."""
    from ._kernels import extension, samples

    platform = "cuda" if extension.live_capabilities() else "cpu"
    table: dict[str, dict[str, Any]] = {}
    for op, sample in (samples.SAMPLES | samples.PRODUCTS).items():
        table[op] = {}
        for dtype in sample.dtypes:
            plan = sample.plan(platform, dtype)
            table[op][dtype] = {
                "runs": sample.otherwise if plan is None else plan.kernel.name,
                "call": None if plan is None else plan.target,
                "plan": None if plan is None else dict(plan.config),
                "others": sample.others(platform, dtype),
            }
    return table


def _next_steps(info: dict[str, Any]) -> list[str]:
    """Advice where something is missing."""
    build, devices = info["build"], info["devices"]
    gpus = [d for d in devices["found"] if d["compute_capability"]]
    too_old = [name for name, v in info["versions"].items() if not v["ok"]]
    steps = []
    if too_old:
        needs = ", ".join(f"{name} >= {info['versions'][name]['needs']}" for name in too_old)
        steps.append(f"pip install --upgrade {' '.join(too_old)} (needs {needs}).")
    if build["problem"]:
        steps.append(f"Install the package again: {build['problem']}.")
    elif gpus and not build["cuda"]:
        steps.append("Install with JGG_CUDA=ON in the environment: this build has no GPU kernels.")
    elif build["cuda"] and not gpus:
        steps.append('pip install "jax[cuda13]", where there is an NVIDIA GPU: JAX sees none.')
    if devices["problem"]:
        steps.append(f"JAX found no device: {devices['problem']}.")
    runs = {answer["runs"] for dtypes in info["ops"].values() for answer in dtypes.values()}
    if gpus and build["cuda"] and "sm80" not in runs and "sm90" not in runs:
        reason = next(iter(info["ops"]["grouped_mm"].values()))["others"]["sm80"]
        steps.append(f"This build does not serve this GPU: {reason}.")
    if waits := _unproven(info["ops"]):
        steps.append(
            f"Kernels for this GPU ({', '.join(waits)}) are not yet proven on this GPU: run "
            f"{_CHECK}, which takes minutes."
        )
    return steps


def _unproven(ops: dict[str, Any]) -> list[str]:
    """The implementations that would run something if they were proven."""
    from ._kernels import proven

    others = [answer["others"] for dtypes in ops.values() for answer in dtypes.values()]
    return [name for name in proven.UNRUN if proven.REASON in {o.get(name) for o in others}]


def collect() -> dict[str, Any]:
    """Everything that ``python -m jax_groupgemm.info`` prints, as plain data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they would say is part of the answer
        from ._kernels import extension
    build, devices = extension.BUILD, _devices()
    versions = {}
    for package, floor in FLOOR.items():
        have = _version(package)
        versions[package] = {
            "version": have,
            "needs": floor,
            "ok": have is not None and _numbers(have) >= _numbers(floor),
        }
    for package in _OPTIONAL:
        versions[package] = {"version": _version(package), "needs": None, "ok": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ops = _operations()
    return {
        "jax_groupgemm": _version("jax_groupgemm"),
        "versions": versions,
        "build": {
            "cuda": build.cuda,
            "architectures": list(build.architectures),
            "cutlass": build.cutlass,
            "ffi_api": _dotted(build.ffi_api),
            "runtime_ffi_api": _dotted(build.runtime_ffi_api),
            "registered": list(build.registered),
            "problem": build.problem,
        },
        "devices": devices,
        "tiles": _tiles(),
        "proof": _proof(),
        "ops": ops,
    }


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else f"{version[0]}.{version[1]}"


def _text(info: dict[str, Any]) -> str:
    lines = [f"jax_groupgemm {info['jax_groupgemm']}", "", "Versions"]
    for package, v in info["versions"].items():
        note = f"  (needs >= {v['needs']})" if v["needs"] else ""
        note += "" if v["ok"] else "  TOO OLD OR MISSING"
        lines.append(f"  {package:20} {v['version'] or 'not installed'}{note}")
    b = info["build"]
    lines += ["", "Build"]
    if b["cuda"]:
        lines.append(f"  CUDA {b['cuda']} for {', '.join(b['architectures'])}; needs driver >= 580")
        lines.append(f"  CUTLASS {b['cutlass']}")
    lines.append(f"  XLA FFI API {b['ffi_api']}, the installed jaxlib has {b['runtime_ffi_api']}")
    lines.append(f"  handlers: {', '.join(b['registered']) or b['problem']}")
    lines += ["", "Devices"]
    lines += [
        f"  {d['platform']}: {d['kind']}"
        + (f", compute capability {d['compute_capability']}" if d["compute_capability"] else "")
        for d in info["devices"]["found"]
    ] or [f"  none: {info['devices']['problem']}"]
    tiles = info["tiles"]
    if tiles["table"]:
        lines += ["", "Measured tiles"]
        lines.append("  " + (tiles["problem"] or f"{tiles['table']}: {tiles['products']} products"))
    proof = info["proof"]
    if proof["file"]:
        says = f"{len(proof['kernels'])} kernels passed {_CHECK}"
        says = proof["problem"] or (says if proof["kernels"] else f"none yet: run {_CHECK}")
        lines += ["", "Proof on this GPU", f"  {proof['file']}: {says}"]
    lines += ["", *_table(info["ops"])]
    lines += [f"  {name}: {text}" for name, text in _WITHOUT_A_KERNEL.items()]
    if steps := _next_steps(info):
        lines += ["", "Next steps", *(f"  {step}" for step in steps)]
    return "\n".join(lines)


def _table(ops: dict[str, Any]) -> list[str]:
    """The kernel of each operation and dtype, a line each."""
    dtypes = list(dict.fromkeys(dtype for row in ops.values() for dtype in row))
    width = max(len(op) for op in ops)
    head = "  ".join(f"{dtype:9}" for dtype in dtypes)
    lines = ["What runs", f"  {'':{width}}  {head}".rstrip()]
    for op, row in ops.items():
        cells = (row[dtype]["runs"] if dtype in row else "" for dtype in dtypes)
        lines.append(f"  {op:{width}}  {'  '.join(f'{cell:9}' for cell in cells)}".rstrip())
    return lines


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_groupgemm.info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    info = collect()
    print(json.dumps(info, indent=2) if args.json else _text(info))


if __name__ == "__main__":
    main()
