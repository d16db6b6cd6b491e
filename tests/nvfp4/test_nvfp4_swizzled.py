"""``nvfp4_quantize`` with scales in layout "swizzled", and products of what it makes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import nvfp4_oracle
import oracle
import pytest
from nvfp4_quantize_cases import F32, SIZES, G, T, grouped_rows, same, values

import jax_groupgemm as jgg
from jax_groupgemm._nvfp4 import layouts


@pytest.mark.parametrize("shape", [(7, 3), (128, 4), (200, 9), (384, 8)])
def test_swizzle(rng, shape):
    rows, columns = shape
    scales = rng.integers(1, 255, shape, np.uint8)
    tiles = np.asarray(layouts.swizzle(scales)).reshape(-1)
    r, s = np.indices(shape)
    at = (r // 128 * -(-columns // 4) + s // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + s % 4
    want = np.zeros(-(-rows // 128) * 128 * -(-columns // 4) * 4, np.uint8)
    want[at] = scales
    np.testing.assert_array_equal(tiles, want)
    both = np.stack([scales, scales[::-1]])
    back = layouts.unswizzle(layouts.swizzle(both), rows, columns)
    np.testing.assert_array_equal(back, both)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.one_in(2)
def test_matrices_swizzled_and_not(rng, axis):
    """A global scale per matrix; the layouts differ in the order of the scales only."""
    w = (rng.standard_normal((2, 48, 80)) * np.array([1e-5, 300])[:, None, None]).astype(F32)
    linear, q = (jgg.nvfp4_quantize(w, axis=axis, layout=name) for name in ("linear", "swizzled"))
    same(linear, nvfp4_oracle.quantize(w, axis=axis))
    for g in range(2):
        one = jax.tree.map(lambda a, g=g: a[g], linear)
        same(one, nvfp4_oracle.quantize(w[g], axis=axis))
    assert (q.layout, q.shape, q.positions) == ("swizzled", linear.shape, None)
    np.testing.assert_array_equal(q.scales, layouts.swizzle(linear.scales))
    np.testing.assert_array_equal(q.weight, linear.weight)
    got = jgg.dequantize(q)
    want = values(linear)
    np.testing.assert_allclose(got, want.swapaxes(1, 2) if axis == -2 else want, rtol=1e-6)


def test_swizzled_groups(rng):
    """Every group starts a tile of 128 rows."""
    for sizes in SIZES.values():
        x, sizes = grouped_rows(rng, sizes)
        q = jgg.nvfp4_quantize(x, group_sizes=sizes, layout="swizzled")
        linear = jgg.nvfp4_quantize(x, group_sizes=sizes)
        padded, positions = oracle.pad_groups(np.asarray(linear.scales), sizes, 128)
        np.testing.assert_array_equal(q.positions, positions)
        np.testing.assert_array_equal(q.scales, layouts.swizzle(padded))
        assert q.scales.shape == ((T + 127 * G) // 128, 1, 512)
        np.testing.assert_array_equal(q.weight, linear.weight)
        np.testing.assert_array_equal(jgg.dequantize(q), jgg.dequantize(linear))


def test_products_and_prepack(rng):
    """They take swizzled scales, and what is stored along -2 only as what it stores."""
    x = rng.standard_normal((9, 64)).astype(F32)
    w = rng.standard_normal((2, 64, 64)).astype(F32)
    linear, q = (jgg.nvfp4_quantize(w, layout=name) for name in ("linear", "swizzled"))
    sizes = jnp.array([4, 3])
    want = oracle.grouped_mm(x, values(linear), sizes, transpose_w=True)
    oracle.assert_close(jgg.grouped_qmm(x, q, sizes), want)
    assert jgg.prepack(q).layout == "sm90"
    np.testing.assert_array_equal(jgg.dequantize(jgg.prepack(q)), jgg.dequantize(linear))
    stored = jgg.nvfp4_quantize(w, axis=1)
    with pytest.warns(UserWarning, match="with axis=-2, not"):
        assert jgg.prepack(stored).layout == "linear"
    stored_order = jgg.dequantize(dataclasses.replace(stored, axis=-1))
    np.testing.assert_allclose(stored_order, values(stored), rtol=1e-6)
