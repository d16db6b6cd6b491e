"""Products with quantized weights: every format, layout, dtype and direction, on one GPU.

    python -m benchmarks.matrix [--formats nvfp4 affine4] [--dtypes float16] [--rows 64 8192]
    python -m benchmarks.matrix --plot RECORD.json

64 experts of K 2048 and N 1536, the same rows for each expert. "forward" is x (T, K) with w
(G, N, K), "dx" the product that its gradient is, x (T, N) with the same w. Times are those of all
kernels of a call (CUPTI), with nothing in the L2 cache. Every result is checked against float32.
Affine weights have scales of x's dtype, as ``quantize`` makes them.
"""

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

from . import quantized, timing
from .options import new_parser, record_options
from .products import matrix_error
from .quantized_shapes import FORMATS
from .records import commit, write_record

GROUPS, K, N = 64, 2048, 1536
DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ("linear", "sm90")
DIRECTIONS = ("forward", "dx")
ROWS = (64, 8192)
KEYS = "format", "dtype", "layout", "direction", "rows"
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}


def weights(name: str, dtype: str) -> quantized.Weights:
    make = lambda: quantized.Weights(FORMATS[name], GROUPS, N, K, dtype)
    return timing.kept((name, dtype), make)


def measure(name: str, dtype: str, layout: str, direction: str, rows: int, repetitions: int):
    """The record of a cell."""
    w = weights(name, dtype)
    q = w.linear if layout == "linear" else w.packed
    record: dict[str, Any] = dict(zip(KEYS, (name, dtype, layout, direction, rows), strict=True))
    record |= {"us": None, "error": np.nan, "note": ""}
    if q.layout != layout:
        return record | {"note": "has no such layout"}
    forward = direction == "forward"
    x = timing.random(0, (rows, K if forward else N), dtype)
    sizes = jnp.full(GROUPS, rows // GROUPS, jnp.int32)
    f = lambda x, q, sizes: jgg.grouped_qmm(x, q, sizes, transpose_w=forward)
    arm = timing.JaxArm(f, (x, q, sizes), cold=True)
    times = arm.time(repetitions)
    out, error = arm.result(), 0.0
    for g in (0, GROUPS - 1):
        one = quantized.matrix(w.linear, g)
        begin = g * (rows // GROUPS)
        end = begin + rows // GROUPS
        error = max(error, float(matrix_error(out, x, one.T if forward else one, begin, end)))
    record |= {"us": statistics.median(times), "error": error}
    arm.close()
    return record | ({} if error < TOLERANCE[dtype] else {"note": "WRONG"})


def table(records: list[dict]) -> str:
    """Rows are formats, columns dtypes and layouts; a cell is "forward / dx" in microseconds."""
    found = {(r["format"], r["rows"], r["dtype"], r["layout"], r["direction"]): r for r in records}
    columns = [(d, layout) for d in DTYPES for layout in LAYOUTS]
    lines = ["| weight | rows | " + " | ".join(f"{d} {layout}" for d, layout in columns) + " |"]
    lines.append("|---|--:|" + "--:|" * len(columns))

    def cell(*key) -> str:
        r = found.get(key)
        return "-" if r is None or r["us"] is None else f"{r['us']:.0f}"

    for rows in dict.fromkeys(r["rows"] for r in records):
        for name in dict.fromkeys(r["format"] for r in records):
            cells = [
                " / ".join(cell(name, rows, *column, way) for way in DIRECTIONS)
                for column in columns
            ]
            lines.append(f"| {name} | {rows} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv=None) -> int:
    parser = new_parser("matrix")
    add = parser.add_argument
    add("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    add("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    add("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    add("--directions", nargs="+", default=list(DIRECTIONS), choices=DIRECTIONS)
    add("--rows", nargs="+", type=int, default=list(ROWS))
    add("--repetitions", type=int, default=10)
    record_options(add, "cell")
    add("--plot", type=Path, metavar="RECORD", help="draw it to docs/plots/matrix.svg, and stop")
    args = parser.parse_args(argv)
    if args.plot is not None:
        from . import plots

        records = json.loads(args.plot.read_text())["records"]
        plots.matrix(records, Path("docs/plots/matrix.svg"))
        print(table(records))
        return 0
    if jax.default_backend() != "gpu":
        raise SystemExit(f"benchmarks.matrix needs an NVIDIA GPU, and jax sees {jax.devices()}")
    gpu = jax.devices()[0].device_kind
    head = {"gpu": gpu, "jax": jax.__version__, "commit": args.commit or commit()}
    head |= {"date": time.strftime("%Y-%m-%d"), "groups": GROUPS, "k": K, "n": N}
    records: list[dict] = []
    for key in itertools.product(
        args.formats, args.dtypes, args.layouts, args.directions, args.rows
    ):
        try:
            record = measure(*key, args.repetitions)
        except Exception as why:
            record = dict(zip(KEYS, key, strict=True))
            record |= {"us": None, "error": np.nan, "note": f"failed: {timing.reason(why)}"}
        us = "-" if record["us"] is None else f"{record['us']:8.1f}"
        print(*key, us, f"{record['error']:.1e}", record["note"], flush=True)
        records.append(record)
        write_record(args.json, head | {"records": records})
    print(table(records))
    return 1 if any(r["note"].startswith(("WRONG", "failed")) for r in records) else 0


if __name__ == "__main__":
    raise SystemExit(main())
