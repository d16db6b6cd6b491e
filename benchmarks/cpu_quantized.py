"""Products with quantized weights on a CPU, beside the same product of arrays.

python -m benchmarks.cpu_quantized

Prints, per format and number of rows, milliseconds (the least of repetitions) of ``grouped_qmm``,
of the gradient of its rows, of ``gather_qmm`` where each expert has a row, and of ``grouped_mm``;
and the rate at which ``grouped_qmm`` reads the weight.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

FORMATS = {
    "affine4": {"mode": "affine", "bits": 4, "group_size": 32},
    "affine8": {"mode": "affine", "bits": 8, "group_size": 64},
    "mxfp4": {"mode": "mxfp4"},
    "mxfp8": {"mode": "mxfp8"},
    "nvfp4": {"mode": "nvfp4"},
}


def milliseconds(f, args, repetitions: int) -> float:
    run = jax.jit(f)
    times = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(1e3 * (time.perf_counter() - start))
    return min(times[1:])


def row(q, w, rows: int, dtype: str, repetitions: int) -> dict[str, float]:
    groups, n, k = w.shape
    rng = np.random.default_rng(rows)
    x, dy = (jnp.asarray(rng.standard_normal((rows, m)), dtype) for m in (k, n))
    sizes = jnp.full(groups, rows // groups, jnp.int32)
    order = jnp.asarray(rng.permutation(groups), jnp.int32)
    back = lambda dy, q, sizes: jgg.grouped_qmm(dy, q, sizes, transpose_w=False)
    forward = lambda x, w, sizes: jgg.grouped_mm(x, w, sizes, transpose_w=True)
    gathered = lambda x, q, order: jgg.gather_qmm(x[:, None], q, None, order)
    of = lambda f, *args: milliseconds(f, args, repetitions)
    return {
        "qmm": of(jgg.grouped_qmm, x, q, sizes),
        "dx": of(back, dy, q, sizes),
        "gather": of(gathered, x, q, order) if rows == groups else float("nan"),
        "arrays": of(forward, x, w, sizes),
    }


def main(argv=None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--shape", type=int, nargs=3, default=[8, 1536, 2048], metavar="SIZE")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["affine4"])
    parser.add_argument("--dtype", default="float32", help="of rows")
    args = parser.parse_args(argv)
    w = np.random.default_rng(0).standard_normal(args.shape, np.float32)
    print(f"jax {jax.__version__}, CPU, G, N, K = {args.shape}, {args.dtype}, ms, the least")
    print("format     rows     qmm      dx  gather  arrays    GB/s")
    found = []
    for name in args.formats:
        q = jgg.quantize(jnp.asarray(w, "bfloat16"), contract=-1, **FORMATS[name])
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(q))
        for rows in args.rows:
            t = row(q, jnp.asarray(w, args.dtype), rows, args.dtype, args.repetitions)
            rate = size / t["qmm"] / 1e6
            times = " ".join(f"{value:7.2f}" for value in t.values())
            print(f"{name:8} {rows:6} {times} {rate:7.1f}")
            found.append({"format": name, "rows": rows, **t, "rate": rate})
    return found


if __name__ == "__main__":
    main()
