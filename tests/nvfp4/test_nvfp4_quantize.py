"""``nvfp4_quantize`` byte for byte against numpy: formulas, groups, the Hadamard transform."""

import jax.numpy as jnp
import numpy as np
import nvfp4_oracle
import oracle
import pytest
from nvfp4_quantize_cases import (
    F32,
    KEY,
    OPTIONS,
    SHAPE,
    SIZES,
    G,
    K,
    T,
    grouped_rows,
    same,
    tensors,
    values,
    want_of,
)

import jax_groupgemm as jgg
from jax_groupgemm._nvfp4 import layouts


@pytest.mark.parametrize(
    ("dtype", "axis"), [("float32", -1), ("float32", -2), ("bfloat16", -1), ("float16", -2)]
)
@pytest.mark.one_in(2)
def test_formula(rng, dtype, axis):
    for x in tensors(rng, dtype):
        q = jgg.nvfp4_quantize(x, axis=axis)
        assert (q.axis, q.layout, q.shape) == (axis, "linear", x.shape[:: -1 if axis == -2 else 1])
        same(q, nvfp4_oracle.quantize(x, axis=axis))
        got = np.asarray(jgg.dequantize(q))
        want = values(q)
        np.testing.assert_allclose(got, want.T if axis == -2 else want, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(rng, name):
    for x in tensors(rng, "float32"):
        q = jgg.nvfp4_quantize(x, axis=0, **OPTIONS[name])
        same(q, want_of(x, axis=-2, **OPTIONS[name]))


def test_error_of_the_value(rng):
    """Half a step of the block's scale, or a whole one of a stochastic rounding."""
    x = rng.standard_normal(SHAPE)
    for options, steps in (({}, 0.5), ({"stochastic_rounding_key": KEY}, 1)):
        got = oracle.f64(jgg.dequantize(jgg.nvfp4_quantize(x.astype(F32), axis=-2, **options)))
        amax = abs(x.reshape(3, 16, 64)).max(1, keepdims=True)
        # A step is at most 2 of 6; the scale may be 1/16 off, and e4m3's least is absolute.
        limit = steps * 2 / 6 * amax * 1.07 + 1e-3
        assert (abs(got - x).reshape(3, 16, 64) <= limit).all()
        assert oracle.error(got, x) < 0.2


def test_one_axis(rng):
    x = rng.standard_normal(64).astype(F32)
    q = jgg.nvfp4_quantize(x)
    same(q, nvfp4_oracle.quantize(x))
    assert (q.scales.shape, q.global_scale.shape, jgg.dequantize(q).shape) == ((4,), (), (64,))


def test_scale_2d(rng):
    """Either axis gives the same values; blocks at the edge may be partial."""
    w = rng.standard_normal((2, *SHAPE)).astype(F32)
    w[0, 20, 20] = np.nan
    options = {"scale_2d": True}
    across, down = (jgg.nvfp4_quantize(w, axis=axis, **options) for axis in (-1, -2))
    values = np.asarray(jgg.dequantize(across))
    np.testing.assert_array_equal(values, jgg.dequantize(down))
    bad = np.zeros(w.shape, bool)
    bad[0, 16:32, 16:32] = True
    np.testing.assert_array_equal(np.isnan(values), bad)
    options["stochastic_rounding_key"] = KEY
    same(jgg.nvfp4_quantize(w[:, :40], **options), want_of(w[:, :40], **options))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.weekly),
        pytest.param(OPTIONS["both"], id="hadamard stochastic"),
    ],
)
def test_groups_along_rows(rng, options):
    """No block spans two groups, and each starts at a multiple of 64 padded rows."""
    for sizes in SIZES.values():
        x, sizes = grouped_rows(rng, sizes)
        q = jgg.nvfp4_quantize(x, axis=0, group_sizes=sizes, **options)
        assert (q.axis, q.layout) == (-2, "grouped")
        assert q.weight.shape == (K, (T + 63 * G) // 64 * 8)
        same(q, want_of(x, axis=-2, sizes=sizes, **options))
        positions = np.asarray(q.positions)
        inside = positions >= 0
        want = np.where(inside[:, None], values(q).T[positions], 0)
        np.testing.assert_allclose(jgg.dequantize(q), want, rtol=1e-6)
        padded = np.asarray(layouts.padded_sizes(jnp.asarray(sizes), T))
        lengths = np.array([end - start for start, end in oracle.bounds(sizes, T)])
        np.testing.assert_array_equal(padded, -(-lengths // 64) * 64)
        # One group at a time, in the scale of all of them.
        starts = np.cumsum(padded) - padded
        for g, (start, end) in enumerate(oracle.bounds(sizes, T)):
            np.testing.assert_array_equal(positions[start:end], starts[g] + np.arange(end - start))


def test_groups_of_rows(rng):
    """Blocks along K: rows of no group are zeros and count for nothing."""
    for sizes in SIZES.values():
        x, sizes = grouped_rows(rng, sizes)
        q = jgg.nvfp4_quantize(x, group_sizes=sizes)
        assert (q.axis, q.layout) == (-1, "linear")
        same(q, nvfp4_oracle.quantize(x, sizes=sizes))
        end = oracle.bounds(sizes, T)[-1][1]
        assert not np.asarray(q.weight)[end:].any()
        assert not np.asarray(q.scales)[end:].any()
        assert not np.isnan(np.asarray(jgg.dequantize(q))).any()


def test_wide_and_narrow_sizes(rng):
    x, sizes = grouped_rows(rng, [250, 250, 250])
    want = jgg.nvfp4_quantize(x, axis=0, group_sizes=sizes)
    narrow = jgg.nvfp4_quantize(x, axis=0, group_sizes=sizes.astype(np.uint8))
    oracle.assert_leaves_equal(narrow, want)


@pytest.mark.parametrize(("t", "groups"), [(0, 3), (40, 0), (5, 9)])  # P is 0, 0 and 320
@pytest.mark.one_in(2)
def test_few_rows(t, groups):
    sizes = np.ones(groups, np.int32)
    q = jgg.nvfp4_quantize(np.ones((t, 32), F32), axis=0, group_sizes=sizes)
    assert q.weight.shape == (32, 64 * ((t + 63 * min(groups, t)) // 64) // 8)
    want = np.zeros((t, 32))
    want[:groups] = 1
    np.testing.assert_allclose(jgg.dequantize(q), want, rtol=1e-6)


def test_non_finite_stays_in_its_block(rng):
    x, sizes = grouped_rows(rng, [17, 100, 31])
    clean = np.asarray(jgg.dequantize(jgg.nvfp4_quantize(x, axis=0, group_sizes=sizes)))
    x[16, 3], x[40, 5], x[140, 5] = np.nan, np.inf, -np.inf
    got = np.asarray(jgg.dequantize(jgg.nvfp4_quantize(x, axis=0, group_sizes=sizes)))
    bad = np.zeros(x.shape, bool)
    bad[16, 3] = bad[33:49, 5] = bad[133:148, 5] = True  # blocks start with groups
    np.testing.assert_array_equal(np.isnan(got), bad)
    np.testing.assert_array_equal(got[~bad], clean[~bad])


# ---- Hadamard ----------------------------------------------------------------------------------


def test_hadamard_cancels(rng):
    """Transformed operands of a product contracted along blocks give the same product."""
    x, dy = rng.standard_normal((64, 32)), rng.standard_normal((64, 24))
    blocks = lambda a: a.T.reshape(-1, 4, 16).astype(F32)
    hx, hy = (nvfp4_oracle.rotate(blocks(a)).reshape(-1, 64) for a in (x, dy))
    oracle.assert_close(hx.astype(F32) @ hy.T, x.T @ dy, tolerance=2e-6)
    matrix = nvfp4_oracle.rotate(np.eye(16, dtype=F32))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(16))
    assert set(np.unique(matrix)) == {-0.25, 0.25}
    # The same with what the quantizer makes: what groups' padding holds belongs to the sum.
    sizes = np.array([1, 40, 23, 0, 300, 0], np.int32)
    operands = [rng.standard_normal((T, K)).astype(F32) for _ in range(2)]
    stored = [
        values(jgg.nvfp4_quantize(a, axis=0, group_sizes=sizes, **OPTIONS["both"]))
        for a in operands
    ]
    starts = np.cumsum([0, *layouts.padded_sizes(jnp.asarray(sizes), T).tolist()])
    for g, (start, end) in enumerate(oracle.bounds(sizes, T)):
        part = slice(starts[g], starts[g + 1])
        got = stored[0][:, part] @ stored[1][:, part].T
        assert oracle.error(got, operands[0][start:end].T @ operands[1][start:end]) < 0.3


def test_hadamard_spreads_an_outlier():
    x = np.zeros((16, 32), F32)
    x[0, 5], x[1, 20] = 64, -1
    q = jgg.nvfp4_quantize(x, hadamard=True)
    np.testing.assert_allclose(abs(np.asarray(jgg.dequantize(q)))[0, :16], 16, rtol=1e-6)
    np.testing.assert_allclose(abs(np.asarray(jgg.dequantize(q)))[1, 16:], 0.25, rtol=0.07)
