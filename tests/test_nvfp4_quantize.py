"""``nvfp4_quantize`` byte for byte against numpy, in every option and transformation."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import nvfp4_oracle
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_groupgemm as jgg
from jax_groupgemm import _nvfp4_layouts as layouts
from jax_groupgemm import _philox

F32 = np.float32
SHAPE = (48, 64)
KEY = jax.random.key(7)


def cast(x, dtype):
    return np.asarray(x).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def tensors(rng, dtype):
    """Tensors of every kind, of SHAPE."""
    x = rng.standard_normal(SHAPE)
    small, large = {"float32": (1e-43, 1e38), "bfloat16": (1e-39, 1e38), "float16": (1e-7, 6e4)}[
        dtype
    ]
    rows = x * 10.0 ** rng.integers(-8, 4, (SHAPE[0], 1))
    rows[3], rows[4, 1::2], rows[5, 16:32] = 0, -0.0, 0
    outlier, ties = x.copy(), rng.integers(-12, 13, SHAPE) / 4
    outlier[17, 33], ties[0, 0], ties[1, 0] = 1e4, 2688, 1536
    bad = x.copy()
    bad[2, 3], bad[9, 40], bad[30, 63], bad[30, 1] = np.nan, np.inf, -np.inf, 1e4
    nothing = np.full(SHAPE, np.nan)
    yield from (cast(v, dtype) for v in (x, 0 * x, rows, outlier, ties, bad, nothing))
    yield cast(small * rng.integers(-9, 10, SHAPE), dtype)
    with np.errstate(over="ignore"):
        yield cast(np.clip(large * x, *np.array([-1, 1]) * large * 3.3), dtype)


def same(q, want):
    codes, scales, positions, global_scale = want
    np.testing.assert_array_equal(np.asarray(q.global_scale).view(np.uint32),
                                  global_scale.view(np.uint32))  # fmt: skip
    np.testing.assert_array_equal(q.scales, scales)
    np.testing.assert_array_equal(oracle.codes(q), codes)
    assert q.mode == "nvfp4"
    if positions is None:
        assert q.positions is None
    else:
        np.testing.assert_array_equal(q.positions, positions)


def leaves_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def values(q):
    """What the leaves mean, float64, in stored order."""
    scales = np.repeat(oracle.E4M3[np.asarray(q.scales)], 16, -1)
    scale = np.asarray(q.global_scale).astype(np.float64)
    return oracle.E2M1[oracle.codes(q)] * scales * scale.reshape(*scale.shape, *[1] * 2)


@pytest.mark.parametrize(
    ("dtype", "axis"), [("float32", -1), ("float32", -2), ("bfloat16", -1), ("float16", -2)]
)
def test_formula(rng, dtype, axis):
    for x in tensors(rng, dtype):
        q = jgg.nvfp4_quantize(x, axis=axis)
        assert (q.axis, q.layout, q.shape) == (axis, "linear", x.shape[:: -1 if axis == -2 else 1])
        same(q, nvfp4_oracle.quantize(x, axis=axis))
        got = np.asarray(jgg.dequantize(q))
        want = values(q)
        np.testing.assert_allclose(got, want.T if axis == -2 else want, rtol=1e-6, atol=1e-38)


OPTIONS = {
    "scale_2d": {"scale_2d": True},
    "hadamard": {"hadamard": True},
    "stochastic": {"stochastic_rounding_key": KEY},
    "both": {"hadamard": True, "stochastic_rounding_key": KEY},
}


def want_of(x, axis=-1, sizes=None, stochastic_rounding_key=None, **options):
    key = None
    if stochastic_rounding_key is not None:
        key = np.asarray(jax.random.bits(stochastic_rounding_key, (2,), "uint32")).tolist()
    return nvfp4_oracle.quantize(x, axis=axis, sizes=sizes, key=key, **options)


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


T, K, G = 768, 32, 6
SIZES = {
    "balanced": [128] * 6,
    "uneven": [256, 128, 384],
    "holes": [0, 300, 0, 0, 400, 68],
    "none": [0] * 6,
    "one": [0, 0, 768],
    "odd": [1, 15, 16, 17, 127, 64],
    "tail": [100, 0, 3, 65],
    "over": [500, 100, 300, 5],
    "negative": [-5, 40, -1, 700],
}


def grouped_rows(rng, sizes):
    """(T, K), with a tail that must not matter, and sizes (G,)."""
    x = rng.standard_normal((T, K)).astype(F32)
    sizes = np.array([*sizes, *[0] * (G - len(sizes))], np.int32)
    end = oracle.bounds(sizes, T)[-1][1]
    x[end:], x[end + 1 :: 3] = np.nan, 1e30
    return x, sizes


@pytest.mark.parametrize("options", [{}, OPTIONS["both"]], ids=["plain", "hadamard stochastic"])
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
    leaves_equal(narrow, want)


@pytest.mark.parametrize(("t", "groups"), [(0, 3), (40, 0), (5, 9)])  # P is 0, 0 and 320
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
    # Of the quantizer: what groups' padding holds belongs to the sum.
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


# ---- Stochastic rounding -----------------------------------------------------------------------


def test_philox():
    """Random123's known answers, and Python's integers."""
    ones = 0xFFFFFFFF
    for counter, key, want in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):  # fmt: skip
        got = _philox.philox(*(tuple(map(np.uint32, v)) for v in (counter, key)))
        assert tuple(map(int, got)) == tuple(nvfp4_oracle.philox(counter, key)) == want


def test_random_bits_and_block_numbers(rng):
    key = rng.integers(0, 2**32, 2, np.uint32)
    got = np.asarray(jax.jit(_philox.sixteen_bits, static_argnums=0)((5, 3, 7), tuple(key)))
    want = [nvfp4_oracle.sixteen_bits(b, key.tolist()) for b in range(105)]
    np.testing.assert_array_equal(got.reshape(105, 16), want)
    row, column = rng.integers(0, 2**32, (2, 99), np.uint32)
    for columns in (1, 7, 2**20 + 3, 2**32 - 1):
        low, high = _philox.number(row, columns, column)
        got = [int(a) << 32 | int(b) for a, b in zip(high, low, strict=True)]
        assert got == [int(r) * columns + int(c) for r, c in zip(row, column, strict=True)]


def test_stochastic_rounding_is_unbiased():
    """Blocks whose scale is 256: elements are 256 times a number between two of e2m1."""
    constants = np.array([6, 0.01, 0.25, 0.3, 0.7, 1.2, 1.9, 2.1, 2.75, 3.3, 3.9, 4.2, 5, 5.9, -2.5,
                          -0.05])  # fmt: skip
    exact = np.array([6, 0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
    x = np.tile(np.stack([constants, exact]), (2048, 1)) * 256
    x[0, 0] = 2688  # so that the global scale is 1
    x = x.astype(F32)
    draws = [jgg.nvfp4_quantize(x, stochastic_rounding_key=jax.random.key(i)) for i in range(4)]
    values = np.stack([oracle.f64(jgg.dequantize(q)) for q in draws])[:, 2:] / 256
    np.testing.assert_array_equal(values[:, 1::2], np.broadcast_to(exact, values[:, 1::2].shape))
    values = values[:, ::2].reshape(-1, 16)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for value, drawn in zip(constants[1:], values.T[1:], strict=True):
        low, high = grid[grid <= abs(value)][-1], grid[grid > abs(value)][0]
        assert set(np.unique(abs(drawn))) == {low, high}
        error = np.sqrt((abs(value) - low) * (high - abs(value)) / len(drawn))
        assert abs(drawn.mean() - value) < 4.5 * error, value
    # Neighbours are independent: as often both up as their chances say.
    up = values[:, 8] == 3
    for other, value in ((values[:, 9] == 4, 0.3), (values[:, 7] == 3, 0.1)):
        both = 0.75 * value
        assert abs((up & other).mean() - both) < 4.5 * np.sqrt(both * (1 - both) / len(up))


def test_keys(rng):
    x = rng.standard_normal(SHAPE).astype(F32)
    quantize = lambda key: jgg.nvfp4_quantize(x, axis=0, stochastic_rounding_key=key).weight
    one, two = (np.asarray(quantize(jax.random.key(i))) for i in (1, 2))
    np.testing.assert_array_equal(one, quantize(jax.random.key(1)))
    np.testing.assert_array_equal(one, quantize(jax.random.PRNGKey(1)))
    assert (one != two).mean() > 0.5
    keys = jnp.stack([jax.random.key(1), jax.random.key(2)])
    np.testing.assert_array_equal(jax.vmap(quantize)(keys), np.stack([one, two]))


# ---- Layout "swizzled" -------------------------------------------------------------------------


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
        padded, positions = nvfp4_oracle.pad_groups(np.asarray(linear.scales), sizes, 128)
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
    assert jgg.prepack(stored).layout == "linear"
    stored_order = jgg.dequantize(dataclasses.replace(stored, axis=-1))
    np.testing.assert_allclose(stored_order, values(stored), rtol=1e-6)


# ---- Transformations ---------------------------------------------------------------------------


def both_axes(x, sizes):
    """Grouped, and swizzled groups."""
    return (
        jgg.nvfp4_quantize(x, axis=0, group_sizes=sizes, hadamard=True),
        jgg.nvfp4_quantize(x, group_sizes=sizes, layout="swizzled"),
    )


BATCH = np.array([[5, 0, 20], [32, 0, 0], [1, 17, 3]], np.int32)


@pytest.fixture
def batch(rng):
    x = rng.standard_normal((3, 32, 64)).astype(F32)
    return x, BATCH, [both_axes(x[i], BATCH[i]) for i in range(3)]


def test_jit_vmap_scan_checkpoint(batch):
    x, sizes, want = batch
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *want)
    leaves_equal(jax.jit(jax.vmap(both_axes))(x, sizes), stacked)
    run = jax.checkpoint(both_axes)
    _, scanned = jax.jit(lambda *a: jax.lax.scan(lambda c, b: (c, run(*b)), None, a))(x, sizes)
    leaves_equal(scanned, stacked)
    grouped = jax.vmap(jgg.dequantize)(stacked[0])
    for i in range(3):
        np.testing.assert_array_equal(grouped[i], jgg.dequantize(want[i][0]))


def test_gradients_are_zero(rng):
    x, sizes = rng.standard_normal((32, 64)).astype(F32), jnp.array([5, 0, 20])

    def loss(x, factor):
        q = jgg.nvfp4_quantize(x, axis=0, group_sizes=sizes, hadamard=True)
        return jnp.sum(jgg.dequantize(dataclasses.replace(q, global_scale=q.global_scale * factor)))

    dx, dfactor = jax.grad(loss, (0, 1))(x, F32(1))
    np.testing.assert_array_equal(dx, np.zeros_like(x))
    np.testing.assert_allclose(dfactor, loss(x, F32(1)), rtol=1e-4)
    assert not np.asarray(jax.jvp(lambda x: loss(x, F32(1)), (x,), (x,))[1]).any()


def test_pytree(batch):
    x, sizes, want = batch
    grouped = want[0][0]
    assert jax.tree.structure(grouped).num_leaves == 4
    linear = dataclasses.replace(grouped, positions=None, layout="linear")
    assert jax.tree.structure(linear).num_leaves == 3
    assert repr(grouped) == (
        "Quantized(mode='nvfp4', bits=4, group_size=16, axis=-2, layout='grouped', "
        "weight=uint32[64,24], scales=uint8[64,12], global_scale=float32[], positions=int32[32])"
    )
    exported = jax.export.export(jax.jit(both_axes))(x[0], sizes[0])
    back = jax.export.deserialize(exported.serialize())
    leaves_equal(back.call(x[0], sizes[0]), want[0])


def mesh_of(kind):
    return jax.make_mesh((2, len(jax.devices()) // 2), ("a", "b"), axis_types=(kind,) * 2)


def test_shard_map(rng):
    """Each device has rows and sizes of its own."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    x, sizes = rng.standard_normal((64, 64)).astype(F32), jnp.array([[5, 20, 0], [1, 2, 29]])

    def run(x, sizes):
        return jax.tree.map(lambda a: a[None], both_axes(x, sizes[0]))

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"))
    got = jax.jit(mapped)(x, sizes)
    for i in range(2):
        want = both_axes(x[32 * i : 32 * i + 32], sizes[i])
        leaves_equal(jax.tree.map(lambda a, i=i: a[i], got), want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded(batch, kind):
    (x, *_), (sizes, *_), (want, *_) = batch
    mesh = mesh_of(kind)
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    args = put(x, P("a", "b")), put(sizes, P())
    with jax.set_mesh(mesh):
        got = jax.jit(both_axes)(*args)
    leaves_equal(got, want)
    np.testing.assert_array_equal(jgg.dequantize(got[0]), jgg.dequantize(want[0]))
    if kind == AxisType.Explicit:
        kept = [str(jax.typeof(q.weight)) for q in got]
        assert kept == ["uint32[64@b,24]", "uint32[32@a,8@b]"]


@pytest.mark.parametrize("spec", [P("a"), P(None, ("a", "b"))])
def test_explicit_without_jit(batch, spec):
    (x, *_), (sizes, *_), (want, *_) = batch
    mesh = mesh_of(AxisType.Explicit)
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, spec), (sizes, P()))]
    q = jgg.nvfp4_quantize(args[0], axis=0, group_sizes=args[1], hadamard=True)
    leaves_equal(q, want[0])
    np.testing.assert_array_equal(jgg.dequantize(q), jgg.dequantize(want[0]))


def test_explicit_keeps_what_divides(rng):
    mesh = mesh_of(AxisType.Explicit)
    w = rng.standard_normal((2, 32, 48)).astype(F32)
    sharded = jax.device_put(w, NamedSharding(mesh, P("a", None, "b")))
    specs = lambda q: [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(q)]
    parts = mesh.shape["b"]
    q = jgg.nvfp4_quantize(sharded)  # three blocks do not divide among two devices
    last = "" if 3 % parts else "@b"
    assert specs(q) == [f"uint32[2@a,32,6{last}]", f"uint8[2@a,32,3{last}]", "float32[2@a]"]
    leaves_equal(q, jgg.nvfp4_quantize(w))


# ---- Errors ------------------------------------------------------------------------------------

X, W = jnp.ones((48, 64)), jnp.ones((2, 32, 32))
Q = jax.eval_shape(lambda: jgg.nvfp4_quantize(X, axis=0, group_sizes=jnp.array([48])))
STATIC = {"mode": "nvfp4", "bits": 4, "group_size": 16}


def zeros(q, **leaves):
    """q of eval_shape as an array, with other leaves."""
    return dataclasses.replace(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), q), **leaves)


SWIZZLED = jax.eval_shape(lambda: jgg.nvfp4_quantize(X, layout="swizzled"))

ERRORS = [
    (
        lambda: jgg.nvfp4_quantize(X.astype(jnp.int32)), TypeError,
        "jgg.nvfp4_quantize: x must be float32, bfloat16 or float16, got dtype int32",
    ),
    (
        lambda: jgg.nvfp4_quantize(W, axis=0), ValueError,
        "jgg.nvfp4_quantize: axis=0, expected the last axis of x or the one before it, and x has "
        "shape (2, 32, 32)",
    ),
    (
        lambda: jgg.nvfp4_quantize(X[0], axis=-2), ValueError,
        "jgg.nvfp4_quantize: axis=-2, expected the last axis of x or the one before it, and x has "
        "shape (64,)",
    ),
    (
        lambda: jgg.nvfp4_quantize(X[:, :40]), ValueError,
        "jgg.nvfp4_quantize: x has shape (48, 40), expected a multiple of 16 along axis -1, got 40",
    ),
    (
        lambda: jgg.nvfp4_quantize(X[:40], axis=0), ValueError,
        "jgg.nvfp4_quantize: x has shape (40, 64), expected a multiple of 16 along axis -2, got 40."
        " Pass group_sizes to pad rows",
    ),
    (
        lambda: jgg.nvfp4_quantize(X[:, :40], group_sizes=jnp.array([3])), ValueError,
        "jgg.nvfp4_quantize: x has shape (48, 40), expected a multiple of 16 along axis -1, got 40",
    ),
    (
        lambda: jgg.nvfp4_quantize(W, group_sizes=jnp.array([3])), ValueError,
        "jgg.nvfp4_quantize: x has shape (2, 32, 32), expected 2 axes (T, K). group_sizes are of "
        "its rows",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, group_sizes=jnp.ones(3)), TypeError,
        "jgg.nvfp4_quantize: group_sizes must hold integers, got dtype float32",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, group_sizes=jnp.ones((1, 3), jnp.int32)), ValueError,
        "jgg.nvfp4_quantize: group_sizes has shape (1, 3), expected 1 axes (G,)",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, group_sizes=jnp.array([3]), scale_2d=True), ValueError,
        "jgg.nvfp4_quantize: scale_2d with group_sizes: blocks of 16 x 16 would span groups. It is "
        "for weights",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, scale_2d=True, hadamard=True), ValueError,
        "jgg.nvfp4_quantize: scale_2d with hadamard: the transform along one axis would make the "
        "values of either axis different. Choose one",
    ),
    (
        lambda: jgg.nvfp4_quantize(X[0], scale_2d=True), ValueError,
        "jgg.nvfp4_quantize: scale_2d needs two axes, and x has shape (64,)",
    ),
    (
        lambda: jgg.nvfp4_quantize(X[0], layout="swizzled"), ValueError,
        "jgg.nvfp4_quantize: layout='swizzled' needs two axes, and x has shape (64,)",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, layout="grouped"), ValueError,
        "jgg.nvfp4_quantize: layout='grouped' is not one of 'linear', 'swizzled'",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, axis=0, group_sizes=jnp.array([3]), layout="swizzled"),
        ValueError,
        "jgg.nvfp4_quantize: layout='swizzled' with group_sizes needs axis=-1: along T, blocks of "
        "grouped rows have layout 'grouped' only",
    ),
    (
        lambda: jax.eval_shape(
            lambda x, sizes: jgg.nvfp4_quantize(x, axis=0, group_sizes=sizes),
            jax.ShapeDtypeStruct((2**31 - 2000, 16), jnp.bfloat16),
            jax.ShapeDtypeStruct((128,), jnp.int32),
        ), ValueError,
        "jgg.nvfp4_quantize: x, padded, has 2147489664 rows; row indices are int32, at most "
        "2147482623",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, stochastic_rounding_key=jax.random.split(KEY, 3)), TypeError,
        "jgg.nvfp4_quantize: stochastic_rounding_key must be one key of jax.random, got "
        "key<fry>[3]",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, stochastic_rounding_key=0), TypeError,
        "jgg.nvfp4_quantize: stochastic_rounding_key must be one key of jax.random, got 0",
    ),
    (
        lambda: jgg.Quantized(X, X, axis=-2, layout="sm90", **STATIC), ValueError,
        "jgg.Quantized: layout='sm90' does not exist in mode 'nvfp4' with axis=-2",
    ),
    (
        lambda: jgg.Quantized(X, X, layout="grouped", **STATIC), ValueError,
        "jgg.Quantized: layout='grouped' does not exist in mode 'nvfp4' with axis=-1",
    ),
    (
        lambda: jgg.Quantized(
            X, X, layout="swizzled", mode="mxfp4", bits=4, group_size=32
        ), ValueError,
        "jgg.Quantized: layout='swizzled' does not exist in mode 'mxfp4' with axis=-1",
    ),
    (
        lambda: jgg.dequantize(zeros(Q, positions=None)), ValueError,
        "jgg.dequantize: q.positions is None, expected int32 (T,) in layout 'grouped'",
    ),
    (
        lambda: jgg.dequantize(zeros(Q, layout="linear")), ValueError,
        "jgg.dequantize: q.positions is int32[48], expected None in layout 'linear'",
    ),
    (
        lambda: jgg.dequantize(zeros(Q, weight=jnp.zeros((2, 64, 12), jnp.uint32))), ValueError,
        "jgg.dequantize: q.weight has shape (2, 64, 12), expected 2 axes (C, P/8). layout "
        "'grouped'",
    ),
    (
        lambda: jgg.dequantize(zeros(SWIZZLED, scales=jnp.zeros((48, 4), jnp.uint8))), ValueError,
        "jgg.dequantize: q.scales has shape (48, 4), expected (1, 1, 512) in layout 'swizzled' "
        "because q.weight is (48, 8)",
    ),
    (
        lambda: jgg.dequantize(zeros(SWIZZLED, positions=jnp.zeros(48))), ValueError,
        "jgg.dequantize: q.positions is float32[48], expected int32 (T,) or None in layout "
        "'swizzled'",
    ),
    (
        lambda: jgg.grouped_qmm(X[:, :32], jgg.nvfp4_quantize(W, axis=1), jnp.array([3, 4])),
        ValueError,
        "jgg.grouped_qmm: w has axis=-2, expected -1. dataclasses.replace(w, axis=-1) is what it "
        "stores, (2, 32, 32)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
