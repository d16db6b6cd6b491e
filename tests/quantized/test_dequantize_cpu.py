"""The CPU kernel of dequantize against its definition, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from qmm_problems import every_scale_and_code
from test_quantized import bits_of

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension
from jax_groupgemm._quantized import convert

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="a kernel of CPUs"),
    pytest.mark.skipif(extension.BUILD.problem is not None, reason="needs the extension module"),
]
DTYPES = ("float32", "bfloat16", "float16")
# Mode, bits, group size and K.
MODES = [
    ("affine", 2, 16, 80), ("affine", 3, 32, 4160), ("affine", 4, 64, 128), ("affine", 5, 128, 256),
    ("affine", 6, 16, 48), ("affine", 8, 64, 192), ("mxfp4", 4, 32, 96), ("nvfp4", 4, 16, 4112),
]  # fmt: skip


def assert_same(q, dtype):
    """The call's bits are those of the XLA program that defines them."""
    assert "jgg_dequantize" in jax.jit(lambda q: jgg.dequantize(q, dtype)).lower(q).as_text()
    want = jax.jit(lambda q: convert._dequantize(q, jnp.dtype(dtype), "reference"))(q)
    np.testing.assert_array_equal(bits_of(jgg.dequantize(q, dtype)), bits_of(want))


@pytest.mark.parametrize(("mode", "bits", "group", "k"), MODES)
@pytest.mark.parametrize("scales", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.one_in(9)
def test_values(rng, mode, bits, group, k, scales, dtype):
    scale = jnp.array([0.5, -3, 1e-30], jnp.float32) if mode == "nvfp4" else None
    assert_same(oracle.random_quantized(rng, (3, 5, k), mode, bits, group, scales, scale), dtype)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.one_in(3)
def test_every_scale_and_code(mode, dtype):
    assert_same(every_scale_and_code(mode, 256), dtype)


@pytest.mark.parametrize("scales", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.one_in(3)
def test_odd_scales_and_biases(rng, scales, dtype):
    """Zeros of either sign, Inf, NaN and the largest."""
    q = oracle.random_quantized(rng, (8, 8, 64), "affine", 3, 32, scales)
    odd = np.array([0, -0.0, np.inf, -np.inf, np.nan, jnp.finfo(scales).max, 1, -2], np.float32)
    values = np.broadcast_to(odd[:, None, None], (8, 8, 2)).astype(jnp.dtype(scales))
    q = dataclasses.replace(
        q, scales=jnp.asarray(values), biases=jnp.asarray(values.swapaxes(0, 1))
    )
    assert_same(q, dtype)


def test_codes_that_are_nan(rng):
    q = oracle.random_quantized(rng, (4, 96), "mxfp8")
    q = dataclasses.replace(q, weight=q.weight | np.uint32(0xFF00007F))
    for dtype in DTYPES:
        assert_same(q, dtype)
