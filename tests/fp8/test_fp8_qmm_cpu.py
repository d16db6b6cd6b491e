"""The CPU kernel of products with weights in mode "fp8": any rows to a block, and any K."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="a kernel of CPUs"),
    pytest.mark.skipif(extension.BUILD.problem is not None, reason="needs the extension module"),
]
SIZES = np.array([3, 0, 70, 40], np.int32)


def calls(f, *args) -> bool:
    return "@jgg_qmm_fp8" in jax.jit(f).lower(*args).as_text()


@pytest.mark.parametrize("k", [1, 130, 256, 401])
@pytest.mark.parametrize("block", [(128, 128), (1, 256), (7, 500), None])
@pytest.mark.parametrize("transpose_w", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.one_in(5)
def test_values(rng, k, block, transpose_w, dtype):
    """Few rows and many, along K and along N; NaN of one line stays in its group."""
    w = oracle.random(rng, (4, 19, k)) / 4
    q = jgg.quantize(w, mode="fp8", block=block, contract=-1)
    values = oracle.f64(jgg.dequantize(q))
    x = oracle.random(rng, (120, k if transpose_w else 19), dtype)
    f = lambda x, q: jgg.grouped_qmm(
        x, q, SIZES, transpose_w=transpose_w, preferred_element_type="float32"
    )
    assert calls(f, x, q)
    want = oracle.grouped_mm(x, values, SIZES, transpose_w=transpose_w)
    oracle.assert_close(jax.jit(f)(x, q), want)
    codes = np.asarray(q.weight).view(np.uint8).copy()
    codes[2, 5, k // 2] = 0x7F
    bad = jgg.Quantized(
        jnp.asarray(codes), q.scales, mode="fp8", bits=8, group_size=q.group_size, block=q.block
    )
    out = np.asarray(jax.jit(f)(x, bad))
    nan = np.zeros(out.shape, bool)
    nan[3:73, 5 if transpose_w else k // 2] = True
    np.testing.assert_array_equal(np.isnan(out), nan)


def test_what_it_does_not_take(rng):
    """Runs the XLA program, and a name says why."""
    x, w = oracle.random(rng, (9, 96)), oracle.random(rng, (2, 8, 96))
    q = jgg.quantize(w, mode="fp8", block=(8, 32), contract=-1)
    f = lambda x, q, **name: jgg.grouped_qmm(x, q, jnp.array([4, 5]), **name)
    assert not calls(f, x, q)
    want = oracle.grouped_mm(x, jgg.dequantize(q), [4, 5], transpose_w=True)
    oracle.assert_close(f(x, q), want)
    with pytest.raises(ValueError, match="needs codes e4m3 in blocks of whole 128 columns"):
        f(x, q, implementation="cpu")
