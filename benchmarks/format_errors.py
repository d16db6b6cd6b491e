"""Bits and errors of every format: weights that are normally distributed, quantized and read back.

python -m benchmarks.format_errors
python -m benchmarks.format_errors --json FILE

The weights are bfloat16 numbers. The error is the root mean square of the difference, as a part of
the weights' own. Formats of GGUF are quantized by llama.cpp (``xllamacpp``, or ``JGG_LIBLLAMA``),
without an importance matrix, and read by ``jgg.checkpoints``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg
from jax_groupgemm.checkpoints.gguf_types import TYPES

N, K = 1024, 2048
OURS = {
    **{f"affine {bits}, groups of {size}": {"bits": bits, "group_size": size}
       for bits in (2, 3, 4, 5, 6, 8) for size in (16, 32, 64, 128)},
    "mxfp4": {"mode": "mxfp4"}, "nvfp4": {"mode": "nvfp4"}, "mxfp8": {"mode": "mxfp8"},
    "fp8, blocks of 128 x 128": {"mode": "fp8"},
}  # fmt: skip
GGUF = ("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "MXFP4")


def bits(q: jgg.Quantized) -> float:
    return 8 * sum(leaf.nbytes for leaf in jax.tree.leaves(q)) / np.prod(q.shape)


def error(q: jgg.Quantized, w: np.ndarray) -> float:
    value = np.asarray(jgg.dequantize(q, jnp.float32), np.float64)
    return float(np.linalg.norm(value - w) / np.linalg.norm(w))


def of_llama_cpp(w: np.ndarray, kind: str, calls: ctypes.CDLL) -> np.ndarray:
    """The blocks of a type."""
    number = next(n for n, about in TYPES.items() if about.name == kind)
    row = w.shape[1] // TYPES[number].elements * TYPES[number].nbytes
    out = np.empty((len(w), row), np.uint8)
    quantize = calls.ggml_quantize_chunk
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    quantize.argtypes = [ctypes.c_int, pointer, pointer, i64, i64, i64, pointer]
    quantize.restype = ctypes.c_size_t
    assert quantize(number, w.ctypes.data, out.ctypes.data, 0, *w.shape, None) == out.nbytes
    return out


def weight(tensors: dict, scales_dtype=None) -> jgg.Quantized:
    q = jgg.checkpoints.linear(tensors, "w", format="gguf", scales_dtype=scales_dtype)
    assert isinstance(q, jgg.Quantized)
    return q


def rows(w: np.ndarray) -> Iterator[dict]:
    for name, options in OURS.items():
        q = jgg.quantize(jnp.asarray(w, jnp.bfloat16), contract=-1, **options)
        yield {"format": name, "bits": bits(q), "error": error(q, w)}
    from . import llama_cpp

    calls = llama_cpp.Library().calls
    for kind in GGUF:
        raw = of_llama_cpp(w, kind, calls)
        blocks = jgg.checkpoints.Blocks(kind, w.shape, lambda a, b, raw=raw: raw[a:b])
        tensors = {"w.weight": blocks}
        q = weight(tensors)
        row = {"format": f"GGUF {kind}", "file_bits": 8 * raw.nbytes / w.size}
        yield row | {"bits": bits(q), "error": error(q, w)}
        if q.mode == "affine":
            q = weight(tensors, jnp.bfloat16)
            name = f"GGUF {kind}, bfloat16 scales"
            yield row | {"format": name, "bits": bits(q), "error": error(q, w)}


def main(argv: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    args = parser.parse_args(argv)
    w = np.random.default_rng(0).standard_normal((N, K))
    w = np.asarray(jnp.asarray(w, jnp.bfloat16), np.float32)  # affine scales then are bfloat16
    out = []
    for row in rows(w):
        out.append(row)
        print(f"{row['format']:34} {row['bits']:6.2f} bits {100 * row['error']:7.3f} %", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(out, indent=1) + "\n")
    return out


if __name__ == "__main__":
    main()
