"""Products on a CPU: of arrays, and with quantized weights beside other libraries' products.

python -m benchmarks.cpu                # both
python -m benchmarks.cpu arrays         # [--groups 16] [--json FILE] ...
python -m benchmarks.cpu quantized      # benchmarks.cpu_quantized, and its options

For arrays it prints, per case, milliseconds (median of repetitions, arms interleaved) of ours, of
``jax.lax.ragged_dot`` and of one dense product of the same FLOPs, and the time to write the
result; then whether ours is within max(2 x dense, 1.5 x floor) and how much faster it is. The floor
is bytes (each operand read once, the result written once) over the bandwidth of a copy of the
same buffers, measured in the same run.
"""

import argparse
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_groupgemm as jgg

from . import cpu_quantized

WGRAD = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])


def wgrad(x, dy, sizes):
    ends = jnp.cumsum(sizes)
    spans = jnp.stack([ends - sizes, ends], axis=1)
    return jgg.segmented_mm(x, dy, spans, transpose_a=True)


def arms(m, k, n, groups, dtype, rng):
    """Per direction: name -> (function, arguments)."""
    x, dy = (jnp.asarray(rng.standard_normal(s)).astype(dtype) for s in ((m, k), (m, n)))
    w = jnp.asarray(rng.standard_normal((groups, k, n))).astype(dtype)
    sizes = jnp.asarray(rng.multinomial(m, np.full(groups, 1 / groups)), jnp.int32)
    copy = lambda *arrays: [a + 1 for a in arrays]
    forward = {
        "ours": (jgg.grouped_mm, (x, w, sizes)),
        "lax": (lax.ragged_dot, (x, w, sizes)),
        "dense": (lambda x, w: jnp.dot(x, w), (x, w[0])),
        "write": (lambda v: jnp.full((m, n), v), (x[0, 0],)),
        "copy": (copy, (x, w)),
    }
    backward = {
        "ours": (wgrad, (x, dy, sizes)),
        "lax": (lambda x, y, s: lax.ragged_dot_general(x, y, s, WGRAD), (x, dy, sizes)),
        "dense": (lambda x, y: jnp.dot(x.T, y), (x, dy)),
        "write": (lambda v: jnp.full((groups, k, n), v), (x[0, 0],)),
        "copy": (copy, (x, w)),
    }
    return {"forward": forward, "wgrad": backward}


def measure(functions, repetitions) -> dict[str, float]:
    compiled = {name: jax.jit(f) for name, (f, _) in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repetition in range(repetitions + 2):
        for name, (_, args) in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled[name](*args))
            if repetition >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(t) for name, t in times.items()}


def check(direction, functions, dtype) -> None:
    got, want = (
        np.asarray(jax.jit(functions[arm][0])(*functions[arm][1])).astype(np.float64)
        for arm in ("ours", "lax")
    )
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    limit = 1e-2 if dtype == "bfloat16" else 1e-6
    if not error <= limit:
        raise SystemExit(f"{direction} {dtype}: relative error {error:.2e} > {limit}")


def of_arrays(argv=None) -> list[dict]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu arrays", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--groups", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    args = parser.parse_args(argv)
    m, k, n = 1024, 512, 512
    print(f"jax {jax.__version__}, CPU, m={m} k={k} n={n}, ms (median of {args.repetitions})")
    head = "direction dtype     groups   ours    lax  dense  write  floor  limit ok?   vs lax"
    print(head)
    rows = []
    for dtype in args.dtypes:
        for groups in args.groups:
            rng = np.random.default_rng(groups)
            for direction, functions in arms(m, k, n, groups, dtype, rng).items():
                check(direction, functions, dtype)
                t = measure(functions, args.repetitions)
                size = jnp.dtype(dtype).itemsize
                x, w, y = m * k * size, groups * k * n * size, m * n * size
                floor = t["copy"] * (x + w + y) / (2 * (x + w))
                limit = max(2 * t["dense"], 1.5 * floor, 1.5 * t["write"])
                row = {
                    "direction": direction, "dtype": dtype, "groups": groups, **t,
                    "floor": floor, "limit": limit, "speedup": t["lax"] / t["ours"],
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{direction:9} {dtype:9} {groups:6} {t['ours']:6.2f} {t['lax']:6.1f} "
                    f"{t['dense']:6.2f} {t['write']:6.2f} {floor:6.2f} {limit:6.2f} "
                    f"{'yes' if t['ours'] <= limit else 'NO ':3} {row['speedup']:7.1f}x"
                )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    return rows


PARTS = {"arrays": of_arrays, "quantized": cpu_quantized.main}


def main(argv=None) -> list[dict]:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in PARTS:
        return PARTS[argv[0]](argv[1:])
    rows = of_arrays(argv)  # as "arrays", or --help
    return rows if argv else rows + cpu_quantized.main([])


if __name__ == "__main__":
    main()
