"""``Quantized`` as an array: axes, bytes, some of its matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

FORMS = [("affine", None), ("mxfp8", None), ("nvfp4", ()), ("nvfp4", (3,)), ("nvfp4", (3, 2))]


def weight(rng, mode, scale):
    w = oracle.random(rng, (3, 2, 64, 64), "bfloat16")
    given = None if scale is None else jnp.asarray(rng.uniform(0.5, 2, scale), jnp.float32)
    return jgg.quantize(w, mode=mode, global_scale=given, contract=-1)


@pytest.mark.parametrize(("mode", "scale"), FORMS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.one_in(3)
def test_indexing_is_of_the_array_it_stands_for(rng, mode, scale, packed):
    q = weight(rng, mode, scale)
    q = jgg.prepack(q) if packed else q
    whole = np.asarray(jgg.dequantize(q, jnp.float32))
    assert (q.ndim, q.shape) == (4, whole.shape)
    for index in (0, -1, (2, 1), slice(1, 3), (slice(None), 0), np.array([2, 0])):
        got = q[index]
        np.testing.assert_array_equal(jgg.dequantize(got, jnp.float32), whole[index])
        assert got.layout == q.layout
    assert len(list(q)) == 3  # by index, until there are no more


def test_under_jit(rng):
    q = weight(rng, "affine", None)
    got = jax.jit(lambda q, i: jgg.dequantize(q[i]))(q, 1)
    np.testing.assert_array_equal(got, jgg.dequantize(q)[1])


@pytest.mark.parametrize("index", [3, -4, (0, 2), (0, 0, 0), (..., 0), None])
def test_indices_that_are_none(rng, index):
    with pytest.raises(IndexError, match=r"jgg\.Quantized"):
        weight(rng, "mxfp8", None)[index]


def test_bytes(rng):
    q = weight(rng, "affine", None)
    codes = 3 * 2 * 64 * 64 // 2
    assert q.nbytes == codes + 2 * 2 * 3 * 2 * 64
    assert jax.eval_shape(lambda: q).nbytes == q.nbytes
