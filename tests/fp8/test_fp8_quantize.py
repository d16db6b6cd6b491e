"""fp8_quantize and mode "fp8" bit for bit against numpy's arithmetic, block by block."""

import functools
import pickle

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device

T, K = 300, 200
SIZES = [140, 0, -3, 129, 7]


def inputs(rng, dtype, shape=(T, K)):
    """Rows of every kind: random, zero, constant, subnormal, huge, with outliers, not finite."""
    x = rng.standard_normal(shape)
    rows = x.reshape(-1, shape[-1])
    rows[:2] = 0
    rows[2, 5:] = -0.0
    rows[3], rows[4] = 0.37, -2.5
    tiny, huge = (1e-41, 1e36) if dtype != "float16" else (6e-8, 1e4)
    rows[5:8] *= tiny
    rows[8:10] *= huge
    rows[10, ::37] *= 1e4
    rows[11] *= 2.0 ** rng.integers(-40, 40, shape[-1]) if dtype != "float16" else 1
    rows[12] = rng.integers(-448, 449, shape[-1])  # ties
    rows[13] = rng.integers(-448, 449, shape[-1]) / 16
    rows[14, 3], rows[15, -1], rows[16, 130 % shape[-1]] = np.nan, np.inf, -np.inf
    rows[20:] *= 2.0 ** rng.integers(-10, 10, (len(rows) - 20, 1))
    return x.astype(np.float32).astype(jnp.dtype(dtype))


def same_bits(got, want):
    """Equal bits; NaN is NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    bits = {1: np.uint8, 4: np.uint32}[got.dtype.itemsize]
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(
        np.where(nan, bits(0), got.view(bits)), np.where(nan, bits(0), want.view(bits))
    )


# dtype, block, options.
CASES = [
    ("float32", (1, 128), {}),
    ("bfloat16", (128, 128), {}),
    ("float16", (1, 128), {"scale_format": "e8m0"}),
    ("bfloat16", (1, K), {"format": "e5m2"}),
    ("float32", None, {}),
    ("float32", (128, 128), {"axis": 0, "scale_format": "e8m0", "format": "e5m2"}),
    ("bfloat16", (1, 128), {"axis": -2}),
    ("float16", (64, 32), {}),
    ("bfloat16", (1, 128), {}),
    ("float32", (128, 128), {}),
    ("float32", (1, K), {}),
]


def oracle_of(x, block, axis=-1, scale_format="float32", format="e4m3"):
    x = x if axis == -1 else x.swapaxes(-1, -2)
    return fp8_oracle.quantize(x, block, format, scale_format)


@pytest.mark.parametrize(("dtype", "block", "options"), CASES)
@pytest.mark.one_in(3)
def test_values(rng, dtype, block, options):
    """Codes, scales and values."""
    x = inputs(rng, dtype)
    if block in (None, (64, 32)):  # so that not all of it is NaN
        x = np.where(np.isfinite(x.astype(np.float32)), x, x.dtype.type(1))
    codes, scales = oracle_of(x, block, **options)
    q = jax.jit(functools.partial(jgg.fp8_quantize, block=block, **options))(x)
    same_bits(q.weight, codes)
    same_bits(q.scales, scales)
    assert (q.block, q.axis) == (block, -1 if options.get("axis") is None else -2)
    with np.errstate(all="ignore"):
        wide = codes.astype(np.float32) * fp8_oracle.spread(scales, codes.shape, block)
    same_bits(jgg.dequantize(q), wide.T if q.axis == -2 else wide)


def test_eager_jitted_batched_and_several_matrices(rng):
    """The same bits."""
    x = inputs(rng, "bfloat16", (2, 150, K))
    codes, scales = fp8_oracle.quantize(x, (128, 128))
    f = functools.partial(jgg.quantize, mode="fp8", contract=-1)
    for run in (f, jax.jit(f), jax.vmap(f)):
        q = run(jnp.asarray(x))
        same_bits(q.weight, codes)
        same_bits(q.scales, scales)
    q = jgg.quantize(jnp.asarray(x.swapaxes(1, 2)), mode="fp8", contract=-2)
    same_bits(q.weight, codes)


@pytest.mark.weekly
def test_one_operation_after_the_other(rng):
    x = inputs(rng, "bfloat16", (150, K))
    with jax.disable_jit():
        q = jgg.quantize(jnp.asarray(x), mode="fp8")
    codes, scales = fp8_oracle.quantize(x, (128, 128))
    same_bits(q.weight, codes)
    same_bits(q.scales, scales)


@pytest.mark.parametrize("sizes", [SIZES, [0, 0], [300], [128, 128, 1]])
@pytest.mark.one_in(4)
def test_along_groups(rng, sizes):
    """No block spans two groups; rows of no group are zeros, whatever they hold."""
    x = inputs(rng, "bfloat16")
    stored, positions = fp8_oracle.padded(x, sizes)
    codes, scales = fp8_oracle.quantize(stored.T, (1, 128))
    q = jax.jit(functools.partial(jgg.fp8_quantize, axis=0))(x, group_sizes=jnp.array(sizes))
    assert (q.layout, q.axis, q.shape) == ("grouped", -2, (K, len(stored)))
    same_bits(q.weight, codes)
    same_bits(q.scales, scales)
    np.testing.assert_array_equal(q.positions, positions)
    values = np.asarray(jgg.dequantize(q))
    with np.errstate(all="ignore"):
        wide = codes.astype(np.float32) * fp8_oracle.spread(scales, codes.shape, (1, 128))
    want = np.where(positions[:, None] >= 0, wide.T[positions], np.float32(0))
    same_bits(values, want)


def test_rows_of_groups(rng):
    x = inputs(rng, "float32")
    inside = np.arange(T)[:, None] < 276
    codes, scales = fp8_oracle.quantize(np.where(inside, x, np.float32(0)), (1, 128))
    q = jgg.fp8_quantize(jnp.asarray(x), group_sizes=jnp.array(SIZES))
    assert q.layout == "linear"
    same_bits(q.weight, codes)
    same_bits(q.scales, scales)


def test_not_finite_shows_in_its_own_blocks(rng):
    x = np.ones((4, 256), np.float32)
    x[1, 5], x[2, 200] = np.nan, np.inf
    bad = np.isnan(np.asarray(jgg.dequantize(jgg.fp8_quantize(jnp.asarray(x)))))
    assert bad[1, :128].all()
    assert bad[2, 128:].all()
    assert bad.sum() == 256


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.one_in(2)
def test_stochastic_rounding(rng, format):
    """One of two neighbours, right in expectation; the same key gives the same codes."""
    x = rng.standard_normal((2, 200)) * 2.0 ** rng.integers(-14, 1, (2, 200))
    x = jnp.asarray(x, jnp.float32)
    f = lambda key: jgg.fp8_quantize(x, stochastic_rounding_key=key, format=format)
    keys = jax.random.split(jax.random.key(0), 512)
    q = jax.jit(lambda keys: jax.lax.map(f, keys))(keys)
    same_bits(q.weight[3], f(keys[3]).weight)
    _, scales = fp8_oracle.quantize(x, (1, 128), format)
    scale = fp8_oracle.spread(scales, x.shape, (1, 128))
    target = oracle.f64(x) / scale
    got = oracle.f64(q.weight)
    # The grid around the target.
    grid = np.arange(128).astype(np.uint8).view(fp8_oracle.DTYPES[format]).astype(np.float64)
    grid = np.sort(np.concatenate([-grid[np.isfinite(grid)], grid[np.isfinite(grid)]]))
    low = grid[np.searchsorted(grid, target, "right") - 1]
    high = grid[np.minimum(np.searchsorted(grid, target, "left"), len(grid) - 1)]
    assert np.all((got == low) | (got == high))
    assert (got == low).any(axis=0).mean() > 0.9
    step = np.where(high > low, high - low, abs(target) / 4)
    error = (got.mean(0) - target) / step
    assert abs(error).max() < 5 * 0.5 / np.sqrt(len(keys))
    assert abs(error.mean()) < 5 * 0.5 / np.sqrt(got.size)


def test_gradients_are_zero(rng):
    x = oracle.random(rng, (4, 130))
    f = lambda x: jgg.dequantize(jgg.fp8_quantize(x)).sum()
    np.testing.assert_array_equal(jax.grad(f)(x), 0)


def test_scales_have_gradients(rng):
    """Values are codes times scales."""
    w = oracle.random(rng, (2, 150, 200))
    q = jgg.quantize(w, mode="fp8")
    ct = oracle.random(rng, w.shape)

    def f(scales):
        return jgg.dequantize(jgg.Quantized(q.weight, scales, mode="fp8", bits=8, group_size=None,  # pyright: ignore
                                            block=q.block))  # fmt: skip

    (got,) = jax.vjp(f, q.scales)[1](ct)
    terms = oracle.f64(ct) * oracle.f64(q.weight)
    want = np.zeros(q.scales.shape)
    for g in range(2):
        for part, at in fp8_oracle.blocks_of(w.shape[1:], q.block):
            want[g][at] = terms[g][part].sum()
    oracle.assert_close(got, want)


# ---- the array ---------------------------------------------------------------------------------


def test_quantized_is_a_tree(rng):
    w = oracle.random(rng, (3, 150, 200))
    q = jgg.quantize(w, mode="fp8")
    assert (q.shape, q.ndim, q.nbytes) == (w.shape, 3, 3 * (150 * 200 + 4 * 4))
    assert repr(q) == (
        "Quantized(mode='fp8', block=(128, 128), weight=float8_e4m3fn[3,150,200], "
        "scales=float32[3,2,2])"
    )
    for again in (
        pickle.loads(pickle.dumps(q)),
        jax.tree.map(lambda a: a, q),
        jax.jit(lambda q: q)(q),
        jax.vmap(lambda q: q)(q),
        jax.lax.scan(lambda c, q: (c, q), 0, q)[1],
        jax.tree.map(lambda *a: jnp.stack(a), q[0], q[1], q[2]),
    ):
        assert jax.tree.structure(again) == jax.tree.structure(q)
        same_bits(again.weight, q.weight)
        same_bits(again.scales, q.scales)
    same_bits(jgg.dequantize(q[1]), jgg.dequantize(q)[1])
    whole = jgg.quantize(w, mode="fp8", block=None)
    assert whole.scales.shape == (3,)
    same_bits(jgg.dequantize(whole[2]), jgg.dequantize(whole)[2])
    as_bytes = jax.lax.bitcast_convert_type(q.weight, jnp.uint8)
    q8 = jgg.Quantized(as_bytes, q.scales, mode="fp8", bits=8, group_size=128, block=(128, 128))
    same_bits(jgg.dequantize(q8), jgg.dequantize(q))
    with pytest.warns(UserWarning, match="in which N is not a multiple of 64, or K of 128"):
        assert jgg.prepack(q).layout == "linear"


def test_vectors(rng):
    x = oracle.random(rng, (200,))
    q = jgg.fp8_quantize(x)
    codes, scales = fp8_oracle.quantize(np.asarray(x)[None], (1, 128))
    same_bits(q.weight, codes[0])
    same_bits(q.scales, scales[0])


X, CODES = jnp.ones((4, 200)), jnp.ones((4, 200), jnp.float8_e4m3fn)


def fp8(weight, scales, block, **more):
    return jgg.Quantized(weight, scales, mode="fp8", bits=8, group_size=None, block=block, **more)  # pyright: ignore


ERRORS = [
    (
        lambda: jgg.fp8_quantize(X.astype(int)), TypeError,
        "jgg.fp8_quantize: x must be float32, bfloat16 or float16, got dtype int32",
    ),
    (
        lambda: jgg.fp8_quantize(X, block=(1, 0)), ValueError,
        "jgg.fp8_quantize: block=(1, 0), expected None or two numbers, of rows and of columns, as "
        "(1, 128)",
    ),
    (
        lambda: jgg.fp8_quantize(X[0], block=(128, 128)), ValueError,
        "jgg.fp8_quantize: block=(128, 128) needs two axes, and x has shape (200,)",
    ),
    (
        lambda: jgg.fp8_quantize(X, axis=1.5), TypeError,  # pyright: ignore
        "jgg.fp8_quantize: axis must be an int, got 1.5",
    ),
    (
        lambda: jgg.fp8_quantize(X, scale_format="e4m3"), ValueError,  # pyright: ignore
        "jgg.fp8_quantize: scale_format='e4m3', expected 'float32' or 'e8m0'",
    ),
    (
        lambda: jgg.fp8_quantize(X, format="e3m4"), ValueError,  # pyright: ignore
        "jgg.fp8_quantize: format='e3m4', expected 'e4m3' or 'e5m2'",
    ),
    (
        lambda: jgg.fp8_quantize(X, axis=0, block=(128, 128), group_sizes=[4]), ValueError,
        "jgg.fp8_quantize: axis=0 with group_sizes has block (1, 128), got (128, 128): groups are "
        "padded to whole blocks",
    ),
    (
        lambda: jgg.fp8_quantize(X[None], group_sizes=[4]), ValueError,
        "jgg.fp8_quantize: x has shape (1, 4, 200), expected 2 axes (T, K): group_sizes are of its "
        "rows",
    ),
    (
        lambda: jgg.fp8_quantize(X, stochastic_rounding_key=jnp.ones(3)), TypeError,
        "jgg.fp8_quantize: stochastic_rounding_key must be one key of jax.random, got float32[3]",
    ),
    (
        lambda: jgg.quantize(X, mode="fp8", bits=4), ValueError,
        "jgg.quantize: bits=4, expected 8 in mode 'fp8'",
    ),
    (
        lambda: jgg.quantize(X, mode="fp8", group_size=32), ValueError,
        "jgg.quantize: group_size=32, expected 128 in mode 'fp8'",
    ),
    (
        lambda: jgg.quantize(X, mode="mxfp8", block=(1, 32)), ValueError,
        "jgg.quantize: block=(1, 32) is for mode 'fp8', not 'mxfp8'",
    ),
    (
        lambda: jgg.quantize(X[0], mode="fp8"), ValueError,
        "jgg.quantize: w has shape (200,), expected (..., N, K) in mode 'fp8' with "
        "block=(128, 128)",
    ),
    (
        lambda: jgg.quantize(X, mode="fp8", global_scale=1.0), ValueError,
        "jgg.quantize: global_scale is for mode 'nvfp4', not 'fp8'",
    ),
    (
        lambda: jgg.dequantize(fp8(CODES, jnp.ones((4, 1)), (1, 128))), ValueError,
        "jgg.dequantize: q.scales has shape (4, 1), expected (4, 2) because q.weight is (4, 200) "
        "and block=(1, 128)",
    ),
    (
        lambda: jgg.dequantize(fp8(CODES, jnp.ones((4, 2), jnp.bfloat16), (1, 128))), TypeError,
        "jgg.dequantize: q.scales must be float32 in mode 'fp8', got dtype bfloat16",
    ),
    (
        lambda: jgg.dequantize(fp8(X, jnp.ones((4, 2)), (1, 128))), TypeError,
        "jgg.dequantize: q.weight must be float8_e4m3fn, float8_e5m2 or uint8 in mode 'fp8', got "
        "dtype float32",
    ),
    (
        lambda: jgg.dequantize(fp8(CODES[0], jnp.ones(()), None)), ValueError,
        "jgg.dequantize: q.weight has shape (200,), expected (..., N, K) in mode 'fp8' with "
        "block=None",
    ),
    (
        lambda: jgg.dequantize(fp8(CODES, jnp.ones((4, 2)), (1, 128), biases=X)), ValueError,
        "jgg.dequantize: q.biases: mode 'fp8' has none",
    ),
    (
        lambda: fp8(CODES, jnp.ones((4, 2)), (1, 128), layout="swizzled"), ValueError,
        "jgg.Quantized: layout='swizzled' does not exist in mode 'fp8' with axis=-1",
    ),
    (
        lambda: fp8(CODES, jnp.ones((4, 2)), (1, "128")), ValueError,
        "jgg.Quantized: block=(1, '128'), expected None or two numbers, of rows and of columns, as "
        "(1, 128)",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(ERRORS)))
def test_errors(case):
    oracle.assert_raises(*ERRORS[case])


def test_forged(rng):
    """What no constructor made, or another version pickled."""
    q = jgg.quantize(oracle.random(rng, (4, 200)), mode="fp8")
    for name, value, message in (
        ("block", (1, -1), "jgg.dequantize: block=(1, -1), expected None or two numbers"),
        ("group_size", 64, "jgg.dequantize: group_size=64, expected 128 in mode 'fp8'"),
        ("layout", "swizzled", "jgg.dequantize: layout='swizzled' does not exist in mode 'fp8'"),
        ("layout", "sm90", "jgg.dequantize: q has weight float8_e4m3fn[4,200]"),
        ("scales", None, "jgg.dequantize: q is a Quantized without scales"),
    ):
        forged = pickle.loads(pickle.dumps(q))
        object.__setattr__(forged, name, value)
        with pytest.raises(ValueError, match=r"^jgg\.dequantize") as error:
            jgg.dequantize(forged)
        assert str(error.value).startswith(message)
    old = pickle.loads(pickle.dumps(jgg.quantize(jnp.ones((4, 64)))))
    del old.__dict__["block"]  # as a version without it pickled one
    np.testing.assert_array_equal(jgg.dequantize(old), 1)
