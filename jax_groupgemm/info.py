"""What is installed, what this build can do, and which implementation each op would run.

``python -m jax_groupgemm.info`` prints it; ``--json`` prints it for programs. It always exits
with 0: a machine without a GPU, or without a compiled extension, is not an error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import warnings
from typing import Any

# Lowest versions that work, and what for.
FLOOR = {"jax": "0.11.0", "jaxlib": "0.11.0"}
_OPTIONAL = ("jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy")
# Public operations by the custom calls they need, and the dtypes whose answers may differ.
_OPS = {
    "jgg_mm": ("segmented_mm", "grouped_mm", "gather_mm", "ragged_dot", "ragged_dot_general"),
    "jgg_qmm": ("grouped_qmm", "gather_qmm", "quantized_matmul"),
}
_DTYPES = {
    "jgg_mm": ("float32", "bfloat16", "float16", "float64"),
    "jgg_qmm": ("float32", "bfloat16", "float16"),
}
# Operations that are one custom call on "sm100", the custom call that multiplies where they are
# composed, what comes before it, and dtypes of results.
_NVFP4 = {
    "nvfp4_grouped_mm": ("jgg_qmm", "x is decoded to bfloat16, then", _DTYPES["jgg_qmm"]),
    "nvfp4_grouped_wgrad": ("jgg_wgrad", "both are decoded to bfloat16, then", ("float32",)),
}
# What that call needs; otherwise it is composed there, too.
_SM100_LIMITS = {
    "nvfp4_grouped_mm": "K % 32 == 0 and N % 8 == 0 (but N % 4 of float32 and float16)",
    "nvfp4_grouped_wgrad": "K % 4 == 0",
}
# Operations that a kernel of any GPU runs, and no other; what they convert.
_CONVERSIONS = {
    "quantize": _DTYPES["jgg_qmm"],
    "dequantize": _DTYPES["jgg_qmm"],
    "nvfp4_quantize": _DTYPES["jgg_qmm"],
    "prepack": ("codes",),
}
# Those that "sm90" takes at any size where it is not named (large float32 products, too).
_SM90_DTYPES = {
    "jgg_mm": ("bfloat16", "float16"),
    "jgg_wgrad": ("bfloat16", "float16"),
    "jgg_qmm": ("bfloat16",),
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def _devices() -> dict[str, Any]:
    import jax

    try:
        found = [
            {
                "platform": d.platform,
                "kind": d.device_kind,
                "compute_capability": getattr(d, "compute_capability", None),
            }
            for d in jax.local_devices()
        ]
    except RuntimeError as error:
        return {"found": [], "problem": str(error).splitlines()[0]}
    return {"found": found, "problem": None}


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


def _why_not(implementation: str, target: str, dtype: str) -> str | None:
    """Why an implementation would not run here; None where it would."""
    from ._kernels import choose, extension

    if implementation == "reference":
        return None
    capabilities = extension.live_capabilities()
    if choose.PLATFORMS[implementation] == "cpu":
        reason = "JAX runs on another device" if capabilities else None
    else:
        reason = None if capabilities else "no CUDA device"
    if implementation == "sm90" and dtype not in _SM90_DTYPES[target]:
        reason = reason or f"its products are of {' and '.join(_SM90_DTYPES[target])}, not {dtype}"
    return (
        choose.unavailable(implementation, capabilities)
        or choose.missing(implementation, target)
        or reason
        or choose.unsupported(implementation, [dtype], dtype)
    )


def _answer(reasons: dict[str, str | None]) -> dict[str, Any]:
    """The first that nothing keeps from running, and why not the others."""
    runs = next(name for name, reason in reasons.items() if reason is None)
    others = {
        name: reason or f"only on request, implementation={name!r}"
        for name, reason in reasons.items()
        if name != runs
    }
    return {"runs": runs, "others": others, "how": None}


def _nvfp4_answer(op: str, dtype: str) -> dict[str, Any]:
    from ._kernels import choose

    target, before, _ = _NVFP4[op]
    reasons = {name: _why_not(name, target, "bfloat16") for name in choose.IMPLEMENTATIONS}
    reasons["sm100"] = _why_not("sm100", f"jgg_{op}", dtype)
    composed = f"composed: {before} {target}"
    answer = _answer(reasons)
    answer["how"] = composed
    if answer["runs"] == "sm100":
        answer["how"] = f"jgg_{op} where {_SM100_LIMITS[op]}, on one device; otherwise {composed}"
    return answer


def _conversion_answer(op: str) -> dict[str, Any]:
    from ._kernels import choose

    target = f"jgg_{op}"
    reasons = {name: _why_not(name, target, "float32") for name in ("sm80", "reference")}
    kernel = reasons["sm80"] is None
    for name in ("sm100", "sm90", "cpu"):
        reasons[name] = f"there is no {target} for {name}"
    if kernel:
        reasons["reference"] = "only where the kernel cannot run"
    return _answer({name: reasons[name] for name in choose.IMPLEMENTATIONS})


def collect() -> dict[str, Any]:
    """Everything that ``python -m jax_groupgemm.info`` prints, as plain data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they would say is part of the answer
        from ._kernels import choose, extension
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
    ops: dict[str, Any] = {}
    for target, op in ((target, op) for target, names in _OPS.items() for op in names):
        ops[op] = {}
        for dtype in _DTYPES[target]:
            reasons = {name: _why_not(name, target, dtype) for name in choose.IMPLEMENTATIONS}
            ops[op][dtype] = _answer(reasons)
    for op, (*_, dtypes) in _NVFP4.items():
        ops[op] = {dtype: _nvfp4_answer(op, dtype) for dtype in dtypes}
    for op, dtypes in _CONVERSIONS.items():
        ops[op] = {dtype: _conversion_answer(op) for dtype in dtypes}
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
    lines += ["", "Implementation that runs (the others, and why not)"]
    for op, dtypes in info["ops"].items():
        for answer in {json.dumps(a): a for a in dtypes.values()}.values():
            names = ", ".join(d for d, a in dtypes.items() if a == answer)
            why = "; ".join(f"{name}: {reason}" for name, reason in answer["others"].items())
            names += f"; {answer['how']}" if answer["how"] else ""
            lines.append(f"  {op:19} {answer['runs']:10} {names}" + (f"  ({why})" if why else ""))
    return "\n".join(lines)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_groupgemm.info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    info = collect()
    print(json.dumps(info, indent=2) if args.json else _text(info))


if __name__ == "__main__":
    main()
