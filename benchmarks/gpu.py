"""Grouped products on one GPU: device time, share of the floor, ratio to peers.

python -m benchmarks [--ops forward ...] [--peers torch quack ...] [--cases Qwen3] [--json FILE]

The floor of a case is max(bytes / B, flops / C): each operand read once, only weights of groups
that have rows, the result written once; B (a copy, bytes read plus written) and C (a dense product
of the case's precision) are measured in the same run. Operands are random, and the result of every
arm is checked. The arms of a case take turns; medians of repetitions. Grouped cases find nothing in
the L2 cache; segmented ones are warm, as in MLX's benchmark. An arm that fails is reported, and is
never fatal.
"""

import argparse
import csv
import datetime
import functools
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_groupgemm as jgg

from . import shapes, timing
from .peers import COMPLETE, PEERS, Operands, Unsupported, quack_arm, unavailable
from .shapes import Case, Grouped, Segmented
from .summary import line, ours, totals

TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5, "tf32": 2e-3}


_kept: dict[tuple[int, ...], jax.Array] = {}


def weights(shape: tuple[int, ...]) -> jax.Array:
    """Those of the last case, where this one's have the same shape: they take longest to make."""
    if shape not in _kept:
        _kept.clear()
        _kept[shape] = timing.random(1, shape)
    return _kept[shape]


def operands(case: Case) -> Operands:
    sizes = case.sizes()
    if isinstance(case, Segmented):
        a = timing.random(0, (case.k, case.m) if case.transpose_a else (case.m, case.k), case.dtype)
        return Operands(a, timing.random(1, (case.k, case.n), case.dtype), sizes)
    x = timing.random(0, (case.rows, case.n if case.op == "dgrad" else case.k))
    if case.op == "wgrad":
        _kept.clear()
        return Operands(x, timing.random(1, (case.rows, case.n)), sizes)
    shape = (case.n, case.k) if case.transposed else (case.k, case.n)
    last = case.transposed or case.op == "dgrad"
    return Operands(x, weights((case.groups, *shape)), sizes, last)


def ours_arm(case: Case, v: Operands, implementation: str | None) -> timing.JaxArm:
    if isinstance(case, Grouped) and case.op != "wgrad":
        options = {"transpose_w": v.last, "implementation": implementation}
        f = lambda x, w, s: jgg.grouped_mm(x, w, s, **options)
        return timing.JaxArm(f, (v.a, v.b, jnp.asarray(v.sizes)), case.cold)
    ends = np.cumsum(v.sizes)
    spans = jnp.asarray(np.stack([ends - v.sizes, ends], 1), jnp.int32)
    options = {
        "transpose_a": not isinstance(case, Segmented) or case.transpose_a,
        "precision": getattr(case, "precision", None),
        "implementation": implementation,
    }
    f = lambda a, b, s: jgg.segmented_mm(a, b, s, **options)
    return timing.JaxArm(f, (v.a, v.b, spans), case.cold)


@functools.partial(jax.jit, static_argnames="last")
def rows_error(out, x, w, start, end, g, last: bool):
    """Relative error of up to 64 rows of group g, against float32."""
    count = min(64, len(x))
    first = jnp.minimum(start, len(x) - count)
    rows = lax.dynamic_slice_in_dim(x, first, count).astype("float32")
    got = lax.dynamic_slice_in_dim(out, first, count).astype("float32")
    weight = lax.dynamic_index_in_dim(w, g, keepdims=False).astype("float32")
    want = jnp.matmul(rows, weight.T if last else weight, precision="highest")
    inside = (jnp.arange(count) + first >= start) & (jnp.arange(count) + first < end)
    norm = lambda v: jnp.sqrt(jnp.sum(v * v, where=inside[:, None]))
    return norm(got - want) / norm(want)


@jax.jit
def columns_error(out, x, y, start, end, g):
    """Relative error of 256 rows and columns of matrix g, against float32."""
    inside = (jnp.arange(len(x)) >= start) & (jnp.arange(len(x)) < end)
    left = jnp.where(inside[:, None], x[:, :256], 0).astype("float32")
    want = jnp.matmul(left.T, y[:, :256].astype("float32"), precision="highest")
    got = lax.dynamic_index_in_dim(out, g, keepdims=False)[:256, :256].astype("float32")
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


@jax.jit
def whole_error(out, want):
    return jnp.linalg.norm(out.astype("float32") - want) / jnp.linalg.norm(want)


def checker(case: Case, v: Operands):
    """A function from a result to its relative error: of some groups, or of all against float64."""
    if isinstance(case, Segmented):
        a, b = (np.asarray(u).astype(np.float64) for u in (v.a, v.b))
        a, bounds = a.T if case.transpose_a else a, case.bounds()
        want = np.empty((case.count, case.m, case.n), np.float32)
        for g, (i, j) in enumerate(itertools.pairwise(bounds)):
            want[g] = a[:, i:j] @ b[i:j]  # float64, rounded
        want = jnp.asarray(want)
        return lambda out: float(whole_error(out, want))
    ends = np.cumsum(v.sizes).astype(np.int32)
    groups = np.flatnonzero(v.sizes)
    some = {int(groups[0]), int(groups[-1]), int(np.argmax(v.sizes))}
    if case.op == "wgrad":
        one = lambda out, g: columns_error(out, v.a, v.b, ends[g] - v.sizes[g], ends[g], g)
    else:
        one = lambda out, g: rows_error(out, v.a, v.b, ends[g] - v.sizes[g], ends[g], g, v.last)
    # NaN is the largest
    return lambda out: float(np.max([float(one(out, g)) for g in sorted(some)]))


def run_case(case: Case, args, c: float, b: float) -> dict:
    v = operands(case)
    quack = functools.partial(quack_arm, everything=args.level != "quick")
    makers = {
        ("ours" if i is None else f"ours[{i}]"): functools.partial(ours_arm, implementation=i)
        for i in args.implementation
    }
    if case.op != "scan":
        names = [p for p in args.peers if p != "loop" or isinstance(case, Segmented)]
        makers |= {name: quack if name == "quack" else PEERS[name] for name in names}
    arms, errors, notes = {}, {}, {}
    for name, make in makers.items():
        try:
            arms[name] = make(case, v)
        except Unsupported as why:
            notes[name] = str(why)
        except Exception as why:
            notes[name] = f"failed: {timing.reason(why)}"
    times, failed = timing.interleaved(arms, args.repetitions, args.turns)
    notes |= {name: f"failed: {why}" for name, why in failed.items()}
    error = checker(case, v)
    for name in list(times):
        try:
            errors[name] = error(arms[name].result())
        except Exception as why:
            errors[name] = float("nan")
            notes[name] = f"failed: {timing.reason(why)}"
        if not errors[name] <= TOLERANCE[case.kind]:
            notes.setdefault(name, f"WRONG: relative error {errors[name]:.1e}")
            if not name.startswith("ours"):
                del times[name]
    for arm in arms.values():
        arm.close()
    us = {name: statistics.median(t) for name, t in times.items()}
    record = {
        "op": case.op, "case": case.label, "regime": case.regime, "us": us,
        "floor_us": shapes.floor_us(case.flops, case.bytes, c, b), "flops": case.flops,
        "bytes": case.bytes, "l2": "cold" if case.cold else "warm", "errors": errors,
        "notes": notes,
    }  # fmt: skip
    mine = ours(record)
    if mine is not None:
        record |= {
            "floor_share": record["floor_us"] / us[mine], "tflops": case.flops / us[mine] / 1e6,
            "tbytes": case.bytes / us[mine] / 1e6, "error": errors[mine],
            "spread": (max(times[mine]) - min(times[mine])) / us[mine],
        }  # fmt: skip
    return record | ({"mlx_us": case.mlx} if case.mlx else {})


def command_output(*command: str) -> str:
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def header(args, flops: dict[str, float], bytes_: float) -> dict:
    command = ["python -m benchmarks", "--ops", *args.ops, "--peers", *args.peers]
    command += [f"--{args.level}"] if args.level != "default" else []
    command += ["--cases", *args.cases] if args.cases else []
    command += ["--skew"] if args.skew else []
    if args.implementation != [None]:
        command += ["--implementation", *map(str, args.implementation)]
    driver = command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or command_output("git", "describe", "--always", "--dirty")
        or jgg.__version__,
        "gpu": jax.devices()[0].device_kind, "driver": driver.split("\n")[0],
        "jax": jax.__version__,
        "versions": {p: version(p) for p in ("jaxlib", "torch", "quack-kernels")},
        "command": " ".join(command), "repetitions": args.repetitions,
        "C_tflops": flops["bfloat16"] / 1e12, "B_tbytes": bytes_ / 1e12,
        "ceilings_tflops": {kind: value / 1e12 for kind, value in flops.items()},
    }  # fmt: skip


def save(args, head: dict, records: list[dict]) -> None:
    missing = [p for p in COMPLETE if not any(p in r["us"] for r in records)]
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(head | {"missing": missing, "records": records}, indent=1)
        args.json.write_text(text + "\n")
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            write = csv.writer(file, lineterminator="\n").writerow
            write(["op", "case", "rows/group", "L2", "arm", "us", "floor_us", "error"])
            for r in records:
                for arm, us in r["us"].items():
                    floor, error = f"{r['floor_us']:.3f}", f"{r['errors'].get(arm, np.nan):.2e}"
                    write(
                        [r["op"], r["case"], r["regime"], r["l2"], arm, f"{us:.3f}", floor, error]
                    )


def arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--ops", nargs="+", default=list(shapes.OPS), choices=shapes.OPS)
    add("--peers", nargs="*", default=["torch", "quack"], choices=[*PEERS, "all"])
    add("--cases", nargs="+", help="only cases of the list whose name holds one of these")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="level", action="store_const", const="quick")
    size.add_argument("--full", dest="level", action="store_const", const="full")
    add("--implementation", nargs="+", default=["None"], help="each is an arm; None: the default")
    add("--skew", action="store_true", help="a few groups hold most rows")
    add("--repetitions", type=int, default=20)
    add("--turns", type=int, default=4, help="the arms' repetitions are cut into so many")
    add("--json", type=Path, help="the record, rewritten after every case")
    add("--csv", type=Path, help="one line per case and arm")
    add("--commit", help="recorded; by default what git says")
    add("--list", action="store_true", help="print the cases and stop")
    args = parser.parse_args(argv)
    args.level = args.level or "default"
    args.peers = list(PEERS) if "all" in args.peers else args.peers
    args.implementation = [None if i == "None" else i for i in args.implementation]
    return args


def selected(args) -> list[Case]:
    found = [case for op in args.ops for case in shapes.cases(op, args.level, args.skew)]
    if args.cases:
        found = [c for c in found if any(part in f"{c.op} {c.label}" for part in args.cases)]
    return found


def main(argv=None) -> int:
    args = arguments(argv)
    todo = selected(args)
    if args.list:
        print("\n".join(f"{c.op:18} {c.label:44} {c.regime}" for c in todo))
        return 0
    # Torch needs memory too: its results, and a copy of nothing else.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    if jax.default_backend() != "gpu":
        raise SystemExit(
            f"python -m benchmarks needs an NVIDIA GPU, and jax sees only {jax.devices()}. "
            "python -m benchmarks.cpu times the CPU."
        )
    if not todo:
        raise SystemExit("no such case; --list prints them")
    without = {name: why for name in args.peers if (why := unavailable(name))}
    args.peers = [name for name in args.peers if name not in without]
    for name, why in without.items():
        print(f"without {name}: {why}")
    kinds = dict.fromkeys(["bfloat16", *(c.kind for c in todo if c.kind != "float16")])
    flops, bytes_ = timing.ceilings(kinds)
    flops["float16"] = flops["bfloat16"]
    head = header(args, flops, bytes_) | {"unavailable": without}
    print(
        f"{head['gpu']}: B = {bytes_ / 1e12:.2f} TB/s, C = "
        + ", ".join(f"{value / 1e12:.0f} ({kind})" for kind, value in flops.items())
        + " TFLOP/s"
    )
    records, bad = [], 0
    for case in todo:
        try:
            record = run_case(case, args, flops[case.kind], bytes_)
        except Exception as why:  # operands that do not fit, say
            print(f"{case.op:18} {case.label:44} failed: {timing.reason(why)}", flush=True)
            bad += 1
            continue
        print(line(record), flush=True)
        mine = ours(record)
        bad += mine is None or mine in record["notes"]
        records.append(record)
        save(args, head, records)
    print(totals(records))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
