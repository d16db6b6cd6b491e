"""Grouped products on one GPU: device time, share of the floor, ratio to peers.

python -m benchmarks [--ops forward ...] [--peers torch quack ...] [--cases Qwen3] [--plots FOLDER]

The floor of a case is max(bytes / B, flops / C): each operand read once, as it is stored, only
weights of groups that have rows, the result written once; B (a copy, bytes read plus written) and
C (a dense product of the case's precision) are measured in the same run. Operands are random, and
the result of every arm is checked. The arms of a case take turns; medians of repetitions. Segmented
cases are warm, as in MLX's benchmark; all others find nothing in the L2 cache. An arm that fails is
reported, and is never fatal. With --plots one command measures, prints the tables, writes JSON and
CSV and draws the plots.
"""

import argparse
import contextlib
import csv
import importlib
import importlib.metadata
import importlib.util
import os
import shlex
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from . import (
    fp8,
    fp8_linear,
    fp8_shapes,
    nvfp4,
    nvfp4_quantize,
    peers,
    products,
    quantized,
    quantized_peers,
    quantized_shapes,
    shapes,
    timing,
)
from .options import new_parser, record_options
from .records import run_header, write_record
from .report import draw, load, show
from .summary import line, ours, totals


class Family(NamedTuple):
    """See benchmarks.products."""

    module: Any
    peers: Any


FAMILIES: dict[type, Family] = {
    shapes.Grouped: Family(products, peers),
    shapes.Segmented: Family(products, peers),
    quantized_shapes.Qmm: Family(quantized, quantized_peers),
    quantized_shapes.Gather: Family(quantized, quantized_peers),
    quantized_shapes.Convert: Family(quantized, quantized_peers),
    quantized_shapes.Nvfp4Quantize: Family(nvfp4_quantize, nvfp4_quantize),
    quantized_shapes.Nvfp4: Family(nvfp4, nvfp4),
    fp8_shapes.Product: Family(fp8, fp8),
    fp8_shapes.Quantize: Family(fp8, fp8),
    fp8_shapes.Linear: Family(fp8_linear, fp8),
}
LISTS = {op: module for module in (shapes, quantized_shapes, fp8_shapes) for op in module.OPS}
OPS = tuple(LISTS)
PEERS = tuple(dict.fromkeys(p for family in FAMILIES.values() for p in family.peers.PEERS))
DEFAULT = ("torch", "quack", "dequantize", "humming")
NEEDS = {
    "quack": "quack.gemm_interface",
    "mosaic": peers.MOSAIC + "ragged_dot_mgpu",
    "humming": "humming.forward",
    "mlx": "mlx.core",
}
VERSIONS = ("jaxlib", "torch", "quack-kernels", "humming-kernels", "mlx")


def cases(op: str, level: str = "default", skew: bool = False) -> list:
    return LISTS[op].cases(op, level, skew)


def unavailable(name: str) -> str | None:
    """Why no case can run this peer."""
    try:
        if name in ("torch", "quack", "loop", "humming"):
            timing.torch()
        if name == "mlx":  # which then finds the CUDA libraries that torch has loaded
            with contextlib.suppress(Exception):
                timing.torch()
        if name in NEEDS:
            module = importlib.import_module(NEEDS[name])
            if name == "mlx" and not module.cuda.is_available():
                return "its build has no CUDA, or it sees no GPU"
    except Exception as why:
        return timing.reason(why)
    return None


def run_case(case, args, c: float, b: float) -> dict:
    family = FAMILIES[type(case)]
    v = family.module.operands(case)
    makers = family.module.arms(case, v, args) | family.peers.peer_arms(case, v, args)
    arms, errors, notes = {}, {}, {}
    for name, make in makers.items():
        try:
            arms[name] = make()
        except peers.Unsupported as why:
            notes[name] = str(why)
        except Exception as why:
            notes[name] = f"failed: {timing.reason(why)}"
    times, failed = timing.interleaved(arms, args.repetitions, args.turns)
    notes |= {name: f"failed: {why}" for name, why in failed.items()}
    error = family.module.checker(case, v)

    def wrong(name: str, value: float) -> str | None:
        limit = case.tolerance if name.startswith("ours") else case.peer_tolerance
        return None if value <= limit else f"WRONG: relative error {value:.1e}"

    for name in list(times):
        try:
            errors[name] = error(arms[name].result())
            why = wrong(name, errors[name])
        except Exception as raised:
            errors[name], why = float("nan"), f"failed: {timing.reason(raised)}"
        if why:
            notes[name] = why
            if not name.startswith("ours"):
                del times[name]
    chained = None
    if args.in_situ:
        right = {name: arms[name] for name in times if name not in notes}
        last = lambda name, result: wrong(name, error(result))
        chained, failed = timing.in_situ(right, args.turns, last)
        notes |= failed
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
    record |= {} if chained is None else {"in_situ_us": chained}
    published = getattr(case, "published", None)
    record |= {} if published is None else {"published_tflops": published}
    return record | ({"mlx_us": case.mlx} if case.mlx else {})


def header(args, flops: dict[str, float], bytes_: float) -> dict:
    command = ["python -m benchmarks", "--ops", *args.ops, "--peers", *args.peers]
    command += [f"--{args.level}"] if args.level != "default" else []
    command += ["--cases", *map(shlex.quote, args.cases)] if args.cases else []
    command += ["--skew"] if args.skew else []
    command += ["--in-situ"] if args.in_situ else []
    if args.implementation != [None]:
        command += ["--implementation", *map(str, args.implementation)]
    return run_header(args, VERSIONS) | {
        "command": " ".join(command), "repetitions": args.repetitions,
        "C_tflops": flops["bfloat16"] / 1e12, "B_tbytes": bytes_ / 1e12,
        "ceilings_tflops": {kind: value / 1e12 for kind, value in flops.items()},
    }  # fmt: skip


def save(args, head: dict, records: list[dict], needed: Iterable[str]) -> None:
    """``needed``: the peers without which a record is partial."""
    missing = [p for p in needed if not any(p in r["us"] for r in records)]
    write_record(args.json, head | {"missing": missing, "records": records})
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            write = csv.writer(file, lineterminator="\n").writerow
            columns = ["op", "case", "rows/group", "L2", "arm", "us", "floor_us", "error"]
            write([*columns, "in_situ_us"])
            for r in records:
                for arm, us in r["us"].items():
                    floor, error = f"{r['floor_us']:.3f}", f"{r['errors'].get(arm, np.nan):.2e}"
                    chained = r.get("in_situ_us", {}).get(arm)
                    cells = [r["op"], r["case"], r["regime"], r["l2"], arm, f"{us:.3f}"]
                    write([*cells, floor, error, "" if chained is None else f"{chained:.3f}"])


def arguments(argv=None) -> argparse.Namespace:
    parser = new_parser("", __doc__)
    add = parser.add_argument
    add("--ops", nargs="+", default=list(OPS), choices=OPS)
    add("--peers", nargs="*", default=list(DEFAULT), choices=[*PEERS, "all"])
    add("--cases", nargs="+", help="only cases of the list whose name holds one of these")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="level", action="store_const", const="quick")
    size.add_argument("--full", dest="level", action="store_const", const="full")
    add("--implementation", nargs="+", default=["None"], help="each is an arm; None: the default")
    add("--skew", action="store_true", help="a few groups hold most rows, or one segment 90%%")
    add("--in-situ", action="store_true", help="also time chained calls, gaps between them too")
    add("--repetitions", type=int, default=20)
    add("--turns", type=int, default=4, help="the arms' repetitions are cut into so many")
    add("--csv", type=Path, help="one line per case and arm")
    drawn = "where plots go, and record.json and record.csv unless named; prints all tables too"
    add("--plots", type=Path, metavar="FOLDER", help=drawn)
    record_options(add, "case")
    add("--list", action="store_true", help="print the cases and stop")
    args = parser.parse_args(argv)
    args.level = args.level or "default"
    args.peers = list(PEERS) if "all" in args.peers else args.peers
    args.implementation = [None if i == "None" else i for i in args.implementation]
    if args.plots:
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plots needs matplotlib")
        args.json = args.json or args.plots / "record.json"
        args.csv = args.csv or args.plots / "record.csv"
    return args


def selected(args) -> list:
    found = [case for op in args.ops for case in cases(op, args.level, args.skew)]
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
    families = list(dict.fromkeys(FAMILIES[type(case)] for case in todo))
    asked = [p for p in args.peers if any(p in family.peers.PEERS for family in families)]
    without = {name: why for name in asked if (why := unavailable(name))}
    args.peers = [name for name in asked if name not in without]
    needed = dict.fromkeys(p for c in todo for p in FAMILIES[type(c)].peers.complete(c))
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
        bad += ours(record) is None or any(name.startswith("ours") for name in record["notes"])
        records.append(record)
        save(args, head, records, needed)
    print(totals(records))
    if args.plots and records:
        heads, shown = load([args.json])
        show(heads, shown)
        draw(shown, args.plots)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
