"""Sums over many k on a GPU, of positive numbers: an error of one sign is not lost in a random one.

docs/semantics.md states the bounds that are tested here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension

SIZES = np.array([5, 11], np.int32)
#: Relative errors: what tensor cores cut off in 2**14 k, and what FMA rounds in 2**16.
TENSOR_CORES, FMA = 1.2e-4, 1.2e-5
HALF = {"bfloat16": 2**-8, "float16": 2**-11}


def problem(rng, k, dtype, n=16):
    x = jnp.asarray(np.abs(rng.standard_normal((16, k))), dtype)
    return x, jnp.asarray(rng.random((2, k, n)), dtype)


def calls(f, *args) -> int:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text().count("@jgg_")


@pytest.mark.parametrize(
    ("k", "dtype", "out", "count"),
    [
        (2**14, "bfloat16", "float32", 1), (2**14 + 512, "bfloat16", "float32", 2),
        (2**17, "bfloat16", "bfloat16", 1), (2**15, "float16", "float16", 1),
        (2**16, "float32", "float32", 1), (2**18, "float32", "float32", 4),
    ],
)  # fmt: skip
def test_parts(k, dtype, out, count):
    """Products of models' K are one call. Longer ones are as many as their dtype needs."""
    x, w = jax.ShapeDtypeStruct((16, k), dtype), jax.ShapeDtypeStruct((2, k, 16), dtype)
    f = lambda x, w: jgg.grouped_mm(x, w, SIZES, preferred_element_type=out, implementation="sm80")
    assert calls(f, x, w) == count


def relative(got, want) -> float:
    return float(np.max(np.abs(oracle.f64(got) - want) / want))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [7168, 2**14, 2**17, 2**20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_mm(rng, kernel, dtype, k):
    if kernel == "sm90" and 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    x, w = problem(rng, k, dtype)
    want = oracle.grouped_mm(x, w, SIZES)
    bound = TENSOR_CORES if dtype != "float32" else FMA
    got = jgg.grouped_mm(x, w, SIZES, preferred_element_type="float32", implementation=kernel)
    assert relative(got, want) <= bound
    if dtype == "bfloat16":
        got = jgg.grouped_mm(x, w, SIZES, implementation=kernel)
        assert relative(got, want) <= HALF[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("k", [7168, 2**14, 3 * 2**14])
@pytest.mark.parametrize("mode", ["nvfp4", "affine"])
def test_quantized(rng, mode, k):
    x, w = problem(rng, k, "bfloat16", 64)
    q = jgg.quantize(w.swapaxes(1, 2), mode=mode)
    want = oracle.grouped_mm(x, jgg.dequantize(q, dtype="bfloat16").swapaxes(1, 2), SIZES)
    for weight in (q, jgg.prepack(q)):
        got = jgg.grouped_qmm(x, weight, SIZES, preferred_element_type="float32")
        assert relative(got, want) <= TENSOR_CORES
