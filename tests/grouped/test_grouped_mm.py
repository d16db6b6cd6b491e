"""grouped_mm: values, tails, epilogues, gradients, against float64 numpy."""

import itertools

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jax_groupgemm as jgg

SHAPES = [  # T, K, N, G; those of which K and N are multiples of 8 TMA can take
    (64, 32, 48, 4),
    (1, 1, 1, 1),
    (7, 3, 5, 2),
    (129, 33, 65, 3),
    (300, 128, 96, 16),
    (515, 70, 130, 7),
    (700, 512, 96, 5),
]


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.one_in(11)
def test_values(rng, implementation, shape, dtype, transpose_w):
    t, k, n, g = shape
    x = oracle.random(rng, (t, k), dtype)
    w = oracle.random(rng, (g, n, k) if transpose_w else (g, k, n), dtype)
    sizes = oracle.random_sizes(rng, g, t)
    out = jgg.grouped_mm(x, w, sizes, transpose_w=transpose_w, implementation=implementation)
    assert out.dtype == dtype
    oracle.assert_close(out, oracle.grouped_mm(x, w, sizes, transpose_w=transpose_w), k=k)
    assert not np.asarray(out)[sizes.sum() :].any()


@pytest.mark.parametrize(
    ("left", "right", "preferred"),
    [
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "float16"),
        ("float16", "float16", "float32"),
        ("float32", "float32", "bfloat16"),
        ("float32", "float32", "float16"),
        ("float16", "float16", "bfloat16"),
    ],
)
@pytest.mark.one_in(7)
def test_preferred_element_type(rng, implementation, left, right, preferred):
    x, w = oracle.random(rng, (50, 40), left), oracle.random(rng, (3, 40, 24), right)
    sizes = jnp.array([20, 0, 25])
    out = jgg.grouped_mm(
        x, w, sizes, preferred_element_type=preferred, implementation=implementation
    )
    assert out.dtype == preferred
    oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))


def test_mixed_dtypes(rng, implementation):
    x, w = oracle.random(rng, (50, 40), "bfloat16"), oracle.random(rng, (3, 40, 24), "float32")
    sizes = jnp.array([20, 0, 25])
    with jax.numpy_dtype_promotion("standard"):
        out = jgg.grouped_mm(x, w, sizes, implementation=implementation)
    assert out.dtype == "float32"
    oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))


def test_float64(rng):
    with jax.enable_x64(True):
        x, w = oracle.random(rng, (50, 40), "float64"), oracle.random(rng, (3, 40, 24), "float64")
        sizes = jnp.array([20, 0, 25], jnp.int64)
        out = jgg.grouped_mm(x, w, sizes)
        assert out.dtype == "float64"
        oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))


def test_integers_and_complex(rng):
    sizes = jnp.array([3, 0, 4])
    x, w = (jnp.asarray(rng.integers(-9, 9, s), jnp.int32) for s in ((8, 5), (3, 5, 4)))
    np.testing.assert_array_equal(jgg.grouped_mm(x, w, sizes), oracle.grouped_mm(x, w, sizes))
    x8, w8 = x.astype(jnp.int8), w.astype(jnp.int8)
    wide = jgg.grouped_mm(x8, w8, sizes, preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(wide, oracle.grouped_mm(x, w, sizes))
    xc = jax.lax.complex(oracle.random(rng, (8, 5)), oracle.random(rng, (8, 5)))
    wc = oracle.random(rng, (3, 5, 4)).astype(jnp.complex64)
    out = np.asarray(jgg.grouped_mm(xc, wc, sizes))
    want = oracle.grouped_mm(xc.real, wc.real, sizes) + 1j * oracle.grouped_mm(
        xc.imag, wc.real, sizes
    )
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", range(256))
@pytest.mark.one_in(19)
def test_empty_group_patterns(implementation, pattern):
    """Every pattern of empty groups among eight, forward and backward."""
    rng = np.random.default_rng(pattern)
    sizes = np.array([rng.integers(1, 9) if pattern >> g & 1 else 0 for g in range(8)], np.int32)
    t = int(sizes.sum()) + 3
    x, w, ct = (oracle.random(rng, s) for s in ((t, 12), (8, 12, 10), (t, 10)))
    out, vjp = _vjp_of(implementation, x, w, sizes, ct)
    oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))
    for got, want in zip(vjp, oracle.grouped_mm_grads(x, w, sizes, ct), strict=True):
        oracle.assert_close(got, want)
    dx, dw = map(np.asarray, vjp)
    assert not dx[sizes.sum() :].any()
    assert not dw[sizes == 0].any()


def _vjp_of(implementation, x, w, sizes, ct):
    # The number of rows differs between patterns; padding to one shape compiles once.
    pad = 72 - x.shape[0]
    x, ct = (np.pad(a, ((0, pad), (0, 0))) for a in (x, ct))
    out, (dx, dw) = jax.tree.map(np.asarray, _compiled_vjp(implementation)(x, w, sizes, ct))
    rows = 72 - pad
    assert not out[rows:].any()
    return out[:rows], (dx[:rows], dw)


_CACHE = {}


def _compiled_vjp(implementation):
    def both(x, w, sizes, ct):
        f = lambda x, w: jgg.grouped_mm(x, w, sizes, implementation=implementation)
        out, vjp = jax.vjp(f, x, w)
        return out, vjp(ct)

    return _CACHE.setdefault(implementation, jax.jit(both))


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.one_in(5)
def test_gradients(rng, implementation, dtype, transpose_w):
    t, k, n, g = 130, 40, 36, 5
    x, ct = oracle.random(rng, (t, k), dtype), oracle.random(rng, (t, n), dtype)
    w = oracle.random(rng, (g, k, n), dtype)
    sizes = jnp.array([50, 0, 1, 64, 7])
    stored = w.swapaxes(1, 2) if transpose_w else w

    def f(x, w):
        return jgg.grouped_mm(x, w, sizes, transpose_w=transpose_w, implementation=implementation)

    dx, dw = jax.vjp(f, x, stored)[1](ct)
    assert dx.dtype == dw.dtype == dtype
    want_dx, want_dw = oracle.grouped_mm_grads(x, w, sizes, ct)
    oracle.assert_close(dx, want_dx)
    oracle.assert_close(dw.swapaxes(1, 2) if transpose_w else dw, want_dw)


@pytest.mark.parametrize(
    "options", ["all", *(pytest.param(o, marks=pytest.mark.weekly) for o in ("plain", "swiglu"))]
)
def test_second_order(rng, options):
    t, k, n, g = 9, 4, 6, 3
    x, w = oracle.random(rng, (t, k)), oracle.random(rng, (g, k, n))
    bias, scale, old = (oracle.random(rng, s) for s in ((g, n), (t,), (t, n)))
    sizes = jnp.array([4, 0, 3])
    if options == "plain":
        f, args = (lambda x, w: jnp.sin(jgg.grouped_mm(x, w, sizes))), (x, w)
    elif options == "all":

        def f(x, w, bias, scale, old):
            return jgg.grouped_mm(
                x, w, sizes, bias=bias, row_scale=scale, existing_out=old, activation="gelu"
            )

        args = (x, w, bias, scale, old)
    else:
        f = lambda x, w: jgg.grouped_mm(x, w, sizes, activation="swiglu")
        args = (x, w)
    with jax.default_matmul_precision("float32"):
        check_grads(f, args, order=2, modes=("fwd", "rev"), atol=5e-2, rtol=5e-2)


def epilogue_oracle(x, w, sizes, bias, activation, scale, old):
    y = oracle.grouped_mm(x, w, sizes)
    for g, (start, end) in enumerate(oracle.bounds(sizes, y.shape[0])):
        y[start:end] += oracle.f64(bias)[g]
    y = moe_oracle.activate(y, activation)
    total = oracle.bounds(sizes, y.shape[0])[-1][1]
    y = y * oracle.f64(scale)[:, None]
    y[total:] = 0
    return y + oracle.f64(old)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [None, *moe_oracle.ACTIVATIONS, *moe_oracle.GATED])
@pytest.mark.one_in(5)
def test_epilogue(rng, implementation, activation, dtype):
    t, k, n, g = 60, 24, 32, 4
    x, w = oracle.random(rng, (t, k), dtype), oracle.random(rng, (g, k, n), dtype)
    bias, scale = oracle.random(rng, (g, n)), oracle.random(rng, (t,))
    old = oracle.random(rng, (t, n // 2 if activation in moe_oracle.GATED else n), dtype)
    sizes = jnp.array([20, 0, 3, 30])
    with jax.numpy_dtype_promotion("standard"):
        out = jgg.grouped_mm(
            x, w, sizes, bias=bias, activation=activation, row_scale=scale, existing_out=old,
            implementation=implementation,
        )  # fmt: skip
    assert out.dtype == dtype
    oracle.assert_close(out, epilogue_oracle(x, w, sizes, bias, activation, scale, old))
    np.testing.assert_array_equal(np.asarray(out)[53:], np.asarray(old)[53:])


def test_epilogue_without_anything_to_contract(rng, implementation):
    """K = 0: the products are zeros, the rest of the epilogue is not."""
    t, n, g = 20, 8, 3
    x, w = jnp.zeros((t, 0)), jnp.zeros((g, 0, n))
    bias, scale = oracle.random(rng, (g, n)), oracle.random(rng, (t,))
    old, sizes = oracle.random(rng, (t, n)), jnp.array([5, 0, 7])
    out = jgg.grouped_mm(
        x, w, sizes, bias=bias, activation="silu", row_scale=scale, existing_out=old,
        implementation=implementation,
    )  # fmt: skip
    oracle.assert_close(out, epilogue_oracle(x, w, sizes, bias, "silu", scale, old))


def test_epilogue_keeps_nan_of_the_tail_out(rng, implementation):
    """row_scale, bias and x may hold anything in rows and groups that do not exist."""
    t, k, n, g = 20, 8, 6, 3
    x = oracle.random(rng, (t, k)).at[12:].set(jnp.nan)
    w = oracle.random(rng, (g, k, n)).at[1].set(jnp.inf)
    bias = oracle.random(rng, (g, n)).at[1].set(jnp.nan)
    scale = oracle.random(rng, (t,)).at[12:].set(jnp.nan)
    sizes = jnp.array([5, 0, 7])

    def f(x, w, bias, scale):
        return jgg.grouped_mm(
            x, w, sizes, bias=bias, activation="gelu", row_scale=scale,
            implementation=implementation,
        )  # fmt: skip

    out, vjp = jax.vjp(f, x, w, bias, scale)
    assert np.isfinite(out).all()
    assert not np.asarray(out)[12:].any()
    dx, dw, dbias, dscale = map(np.asarray, vjp(jnp.ones_like(out).at[12:].set(jnp.nan)))
    for grad in (dx, dw, dbias, dscale):
        assert np.isfinite(grad).all()
    assert not dx[12:].any()
    assert not dscale[12:].any()
    assert not dw[1].any()
    assert not dbias[1].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.one_in(3)
def test_nan_stays_in_its_group(rng, implementation, bad):
    t, k, n, g = 50, 16, 12, 4
    x, w = oracle.random(rng, (t, k)), oracle.random(rng, (g, k, n))
    sizes = jnp.array([13, 17, 0, 11])
    clean = np.asarray(jgg.grouped_mm(x, w, sizes, implementation=implementation))
    f = lambda x, w: jgg.grouped_mm(x, w, sizes, implementation=implementation)
    # In one row; in the tail; in the matrix of group 1; in the matrix of the empty group.
    out = np.asarray(f(x.at[15].set(bad), w))
    np.testing.assert_array_equal(np.delete(out, 15, 0), np.delete(clean, 15, 0))
    np.testing.assert_array_equal(f(x.at[41:].set(bad), w), clean)
    out = np.asarray(f(x, w.at[1].set(bad)))
    np.testing.assert_array_equal(
        np.delete(out, slice(13, 30), 0), np.delete(clean, slice(13, 30), 0)
    )
    assert not np.isfinite(out[13:30]).any()
    np.testing.assert_array_equal(f(x, w.at[2].set(bad)), clean)
    # Backward: a bad row reaches the gradient of its own matrix only.
    ct = oracle.random(rng, (t, n))
    dw = np.asarray(jax.vjp(f, x.at[15].set(bad), w)[1](ct)[1])
    assert not np.isfinite(dw[1]).any()
    assert np.isfinite(np.delete(dw, 1, 0)).all()
    dx, dw = map(np.asarray, jax.vjp(f, x.at[41:].set(bad), w)[1](ct.at[41:].set(bad)))
    assert np.isfinite(dx).all()
    assert np.isfinite(dw).all()
    dx = np.asarray(jax.vjp(f, x, w.at[2].set(bad))[1](ct)[0])
    assert np.isfinite(dx).all()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "uint32", "int32"])
@pytest.mark.one_in(5)
def test_size_dtypes(rng, implementation, dtype):
    x, w = oracle.random(rng, (700, 8)), oracle.random(rng, (6, 8, 4))
    sizes = np.array([120, 127, 0, 100, 90, 120], dtype)
    out = jgg.grouped_mm(x, w, sizes, implementation=implementation)
    oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))


def test_int64_sizes(rng, implementation):
    with jax.enable_x64(True):
        x, w = oracle.random(rng, (30, 8)), oracle.random(rng, (3, 8, 4))
        sizes = np.array([5, 2**40, 3], np.int64)
        out = jgg.grouped_mm(x, w, sizes, implementation=implementation)
        oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))


@pytest.mark.parametrize(
    "sizes", [[-3, 4, -1, 5], [9, 9, 9, 9], [40, 1, 1, 1], [2**31 - 1] * 4, [-(2**31)] * 4]
)
def test_negative_and_excessive_sizes(rng, implementation, sizes):
    x, w = oracle.random(rng, (20, 8)), oracle.random(rng, (4, 8, 6))
    sizes = np.array(sizes, np.int32)
    out = jgg.grouped_mm(x, w, sizes, implementation=implementation)
    oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))


@pytest.mark.parametrize("offset", [-5, -1, 0, 1, 3, 6, 7, 100, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.one_in(9)
def test_group_offset(rng, implementation, offset, traced):
    x, w = oracle.random(rng, (40, 8)), oracle.random(rng, (3, 8, 6))
    sizes = np.array([4, 0, 7, 5, 9, 3, 2], np.int32)

    def f(x, w, offset):
        return jgg.grouped_mm(x, w, sizes, group_offset=offset, implementation=implementation)

    f = jax.jit(f) if traced else f
    out = f(x, w, jnp.array([offset], jnp.int32))
    oracle.assert_close(out, oracle.grouped_mm(x, w, sizes, offset=offset))
    ct = oracle.random(rng, (40, 6))
    dx, dw = jax.vjp(lambda x, w: f(x, w, jnp.int32(offset)), x, w)[1](ct)
    padded = np.zeros((7, 8, 6))
    for g in range(3):
        if 0 <= g + offset < 7:
            padded[g + offset] = np.asarray(w)[g]
    want_dx, want_dw = oracle.grouped_mm_grads(x, padded, sizes, ct)
    oracle.assert_close(dx, want_dx)
    for g in range(3):
        oracle.assert_close(dw[g], want_dw[g + offset] if 0 <= g + offset < 7 else np.zeros((8, 6)))


def test_shards_of_experts_add_up(rng, implementation):
    x, w = oracle.random(rng, (40, 8)), oracle.random(rng, (6, 8, 6))
    sizes = np.array([4, 0, 7, 5, 9, 3], np.int32)
    run = lambda w, offset: jgg.grouped_mm(
        x, w, sizes, group_offset=jnp.int32(offset), implementation=implementation
    )
    parts = sum(np.asarray(run(w[i : i + 2], i)) for i in (0, 2, 4))
    np.testing.assert_array_equal(parts, jgg.grouped_mm(x, w, sizes, implementation=implementation))


@pytest.mark.parametrize("zero", ["T", "K", "N", "G"])
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.one_in(5)
def test_zero_sized(implementation, zero, transpose_w):
    t, k, n, g = (0 if letter == zero else 5 for letter in "TKNG")
    x, w = jnp.ones((t, k)), jnp.ones((g, n, k) if transpose_w else (g, k, n))
    sizes = jnp.ones((g,), jnp.int32)
    f = lambda x, w: jgg.grouped_mm(
        x, w, sizes, transpose_w=transpose_w, implementation=implementation
    )
    out, vjp = jax.vjp(f, x, w)
    assert out.shape == (t, n)
    assert not np.asarray(out).any()
    dx, dw = vjp(jnp.ones((t, n)))
    assert dx.shape == x.shape
    assert dw.shape == w.shape
    assert not np.asarray(dx).any()
    jgg.grouped_mm(
        x, w, sizes, transpose_w=transpose_w, bias=jnp.ones((g, n)), row_scale=jnp.ones((t,))
    )


def test_many_rows(rng, implementation):
    t = 70_000
    x, w = oracle.random(rng, (t, 8)), oracle.random(rng, (5, 8, 8))
    sizes = np.array([1, 65_536, 0, 4_000, 400], np.int32)
    out = jgg.grouped_mm(x, w, sizes, implementation=implementation)
    oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))


def test_many_groups(rng, implementation):
    g = 4096
    sizes = rng.integers(0, 3, g).astype(np.int32)
    t = int(sizes.sum()) + 5
    x, w = oracle.random(rng, (t, 8)), oracle.random(rng, (g, 8, 8))
    f = lambda x, w: jgg.grouped_mm(x, w, sizes, implementation=implementation)
    out, vjp = jax.vjp(f, x, w)
    oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))
    ct = oracle.random(rng, (t, 8))
    for got, want in zip(vjp(ct), oracle.grouped_mm_grads(x, w, sizes, ct), strict=True):
        oracle.assert_close(got, want)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(-2, 40), min_size=1, max_size=6),
    t=st.integers(0, 90),
    k=st.sampled_from([1, 5, 16]),
    n=st.sampled_from([1, 7, 16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_sizes(sizes, t, k, n, seed):
    rng = np.random.default_rng(seed)
    x, w = oracle.random(rng, (t, k)), oracle.random(rng, (len(sizes), k, n))
    sizes = np.array(sizes, np.int32)
    oracle.assert_close(jgg.grouped_mm(x, w, sizes), oracle.grouped_mm(x, w, sizes))


def test_precision_is_true_float32_by_default(rng, implementation):
    x, w = oracle.random(rng, (256, 512)), oracle.random(rng, (2, 512, 64))
    sizes = jnp.array([100, 150])
    want = oracle.grouped_mm(x, w, sizes)
    for precision in (None, "highest", "float32", jax.lax.Precision.HIGHEST, "default"):
        out = jgg.grouped_mm(x, w, sizes, precision=precision, implementation=implementation)
        assert oracle.error(out, want) <= 1e-6
    for precision in ("tensorfloat32", "high", jax.lax.Precision.HIGH, ("high", "high")):
        out = jgg.grouped_mm(x, w, sizes, precision=precision, implementation=implementation)
        assert oracle.error(out, want) <= 1e-3


def test_default_matmul_precision_is_followed():
    x, w, sizes = jnp.ones((4, 4)), jnp.ones((1, 4, 4)), jnp.array([4])

    def precision_of(**kwargs):
        jaxpr = jax.make_jaxpr(lambda: jgg.grouped_mm(x, w, sizes, **kwargs))()
        return next(
            e.params["product"].precision for e in jaxpr.eqns if e.primitive.name.startswith("jgg")
        )

    assert precision_of() == jax.lax.Precision.HIGHEST
    with jax.default_matmul_precision("tensorfloat32"):
        assert precision_of() == jax.lax.Precision.HIGH
        assert precision_of(precision="highest") == jax.lax.Precision.HIGHEST
    assert precision_of(precision=("high", "tensorfloat32")) == jax.lax.Precision.HIGH
    assert precision_of(precision=("high", "default")) == jax.lax.Precision.HIGHEST
    message = (
        "jgg.grouped_mm: precision='best' is not a jax.lax.Precision, its name, or 'tensorfloat32'"
    )
    oracle.assert_raises(lambda: precision_of(precision=("high", "best")), ValueError, message)


def test_jit_does_not_retrace_for_other_sizes(rng, implementation):
    traces = 0

    @jax.jit
    def f(x, w, sizes):
        nonlocal traces
        traces += 1
        return jgg.grouped_mm(x, w, sizes, implementation=implementation)

    x, w = oracle.random(rng, (30, 8)), oracle.random(rng, (3, 8, 4))
    for sizes in itertools.islice(itertools.permutations([0, 7, 20]), 4):
        sizes = np.array(sizes, np.int32)
        oracle.assert_close(f(x, w, sizes), oracle.grouped_mm(x, w, sizes))
    assert traces == 1


@pytest.mark.parametrize("transpose_w", [False, True])
def test_infinities_are_those_of_float32(rng, implementation, transpose_w):
    """Also where a product is split: 0 * inf and inf - inf may only come from the operands."""
    t, k, n = 70, 40, 72
    x = np.array(oracle.random(rng, (t, k)))
    w = np.array(oracle.random(rng, (2, k, n)))
    x[3, 5], x[8, 0], x[9, 1:3] = np.inf, -np.inf, (np.inf, -np.inf)
    w[0, 7, 2], w[0, 5, 4], w[1, :, 6] = -np.inf, 0.0, np.inf
    x[20, 0], x[21, 7] = 3e38, 0.0
    w[0, 0] = np.where(np.arange(n) == 11, 2.0, 0.5)
    sizes = [50, 20]
    out = jgg.grouped_mm(
        x,
        w.swapaxes(1, 2) if transpose_w else w,
        jnp.array(sizes),
        transpose_w=transpose_w,
        precision="highest",
        implementation=implementation,
    )
    with np.errstate(invalid="ignore", over="ignore"):
        want = np.concatenate([x[:50] @ w[0], x[50:] @ w[1]])
    assert not np.isfinite(want).all()
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want))
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)
