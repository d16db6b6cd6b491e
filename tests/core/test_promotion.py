"""With JAX's strictest rules for users' own expressions, of dtypes (tests/conftest.py has that for
all tests) and of ranks; with floats of eight bits; where JAX looks for NaN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

SIZES = jnp.array([3, 5])
X, W = jnp.ones((8, 64)), jnp.ones((2, 64, 32))
KEY = jax.random.key(0)
HALVES = jnp.array([0.5, 2.0])


def total(f, argnums=0):
    return lambda *args: jax.grad(lambda *args: f(*args).sum(), argnums)(*args)


def formats():
    for bits, group_size in ((2, 32), (3, 32), (4, 64), (8, 32)):
        yield {"mode": "affine", "bits": bits, "group_size": group_size}
    for mode in ("nvfp4", "mxfp4", "mxfp8"):
        yield {"mode": mode}


def full_precision():
    fused = lambda x, w: jgg.grouped_mm(
        x, w, SIZES, bias=jnp.ones((2, 32)), activation="swiglu", row_scale=jnp.ones(8),
        existing_out=jnp.ones((8, 16)),
    )  # fmt: skip
    yield total(fused, (0, 1))(X, W)
    yield jax.vmap(lambda x, w: jgg.grouped_mm(x, w, SIZES))(jnp.stack([X] * 3), jnp.stack([W] * 3))
    yield total(lambda x: jgg.segmented_mm(x.T, x, jnp.array([[0, 3], [3, 8]])))(X)
    for count in (2, 100):
        index = jnp.arange(count)
        yield total(lambda x, i=index: jgg.gather_mm(x[:, None], W, i % 8, i % 2))(X)
    yield jgg.ragged_dot(X, W, SIZES)


def quantized(given):
    w = jnp.ones((2, 64, 64), jnp.bfloat16)
    q = jgg.quantize(w, **given, contract=-1)
    yield jgg.dequantize(q)
    x = jnp.ones((8, 64), jnp.bfloat16)
    for weight in (q, jgg.prepack(q)):
        yield total(lambda x, weight=weight: jgg.grouped_qmm(x, weight, SIZES))(x)
    yield jgg.grouped_qmm(x, q, SIZES, transpose_w=False)
    yield jgg.gather_qmm(x[:, None], q, None, jnp.arange(8) % 2)
    yield jgg.quantized_matmul(x, jax.tree.map(lambda leaf: leaf[0], q))
    if q.mode == "affine":
        of = lambda scales: jgg.grouped_qmm(x, dataclasses.replace(q, scales=scales), SIZES)
        yield total(of)(q.scales)
    if q.mode == "nvfp4":
        for scale in (2.0, HALVES, jnp.ones((2, 64))):
            yield jgg.grouped_qmm(
                x, jgg.quantize(w, **given, global_scale=scale, contract=-1), SIZES
            )


def nvfp4():
    x = jnp.ones((16, 64))
    for options in ({}, {"hadamard": True, "stochastic_rounding_key": KEY}):
        yield jgg.dequantize(jgg.nvfp4_quantize(x, group_sizes=SIZES, **options))
        q = jgg.nvfp4_quantize(x, group_sizes=SIZES, axis=0, **options)
        old = jnp.ones((2, 64, 64))
        yield jgg.nvfp4_grouped_wgrad(q, q, SIZES, alpha=HALVES, beta=2.0, existing_out=old)
    yield jgg.dequantize(jgg.nvfp4_quantize(x, layout="swizzled"))
    w = jgg.nvfp4_quantize(W.swapaxes(1, 2), scale_2d=True)
    yield jgg.nvfp4_grouped_mm(
        jgg.nvfp4_quantize(x), w, SIZES, alpha=HALVES, bias=jnp.ones((2, 32))
    )
    layer = lambda x, w: jgg.nvfp4_grouped_linear(x, w, SIZES, key=KEY, bias=jnp.ones((2, 32)))
    yield total(layer, (0, 1))(X, W.swapaxes(1, 2))


# By default one affine format and one other.
FEW = {"affine": 4, "nvfp4": None}
FORMATS = [
    f if FEW.get(f["mode"], 0) == f.get("bits") else pytest.param(f, marks=pytest.mark.weekly)
    for f in formats()
]
CASES = [full_precision, *FORMATS, nvfp4]


@pytest.mark.parametrize("case", CASES, ids=lambda case: getattr(case, "__name__", None))
def test_no_promotion_of_ranks(case):
    """Neither where operations are traced nor where they are lowered, of which nothing runs."""
    results = lambda: [*(case() if callable(case) else quantized(case))]
    with jax.numpy_rank_promotion("raise"):
        assert jax.jit(results).lower().as_text()


@pytest.mark.parametrize("case", [full_precision, pytest.param(nvfp4, marks=pytest.mark.weekly)])
def test_debug_nans(case):
    """None arises on the way to a result that has none."""
    with jax.debug_nans(True):
        assert list(case())


@pytest.mark.parametrize("preferred", ["float32", "bfloat16", None])
@pytest.mark.one_in(3)
def test_float8(rng, preferred):
    """Operands of eight bits, a result that is wider, or not."""
    x = oracle.random(rng, (8, 16)).astype("float8_e4m3fn")
    w = oracle.random(rng, (2, 16, 4)).astype("float8_e4m3fn")
    f = lambda x, w: jgg.grouped_mm(x, w, SIZES, preferred_element_type=preferred)
    want = oracle.grouped_mm(x, w, SIZES)
    out = f(x, w)
    assert out.dtype == (preferred or "bfloat16")
    oracle.assert_close(out, want)
    dx, dw = jax.vjp(f, x, w)[1](jnp.ones_like(out))
    assert dx.dtype == dw.dtype == x.dtype
    ct = np.ones((8, 4))
    for got, expected in zip((dx, dw), oracle.grouped_mm_grads(x, w, SIZES, ct), strict=True):
        oracle.assert_close(got.astype("float32"), expected, tolerance=0.04)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
@pytest.mark.one_in(3)
def test_default_result_of_eight_bits(dtype):
    """Sums of unscaled products do not fit in so few bits: 1600 is more than e4m3 holds."""
    x, w = jnp.full((8, 400), 2, dtype), jnp.full((2, 400, 4), 2, dtype)
    for out in (
        jgg.grouped_mm(x, w, SIZES),
        jgg.segmented_mm(x, w[0], [[0, 400]]),
        jgg.gather_mm(x, w[:, :, :1], None, [0, 1]),
    ):
        assert out.dtype == "bfloat16"
        assert (oracle.f64(out) == 1600).all()
    asked = jgg.grouped_mm(x, w, SIZES, preferred_element_type=dtype)
    assert asked.dtype == dtype
    assert jgg.ragged_dot(x, w, SIZES).dtype == dtype  # as JAX's own


def test_a_dtype_without_zero():
    """float8_e8m0fnu: what masks and padding would add is not a number in it."""
    a = jnp.full((3, 8), 2, "float8_e8m0fnu")
    b = jnp.full((8, 4), 4, "float8_e8m0fnu")
    out = jgg.segmented_mm(a, b, [[0, 3], [2, 2], [3, 8]])
    assert out.dtype == "bfloat16"
    np.testing.assert_array_equal(oracle.f64(out)[:, 0, 0], [24, 0, 40])
    out = jgg.grouped_mm(a, jnp.stack([b, b]), [1, 1], bias=jnp.ones((2, 4), "float8_e8m0fnu"))
    np.testing.assert_array_equal(oracle.f64(out)[:, 0], [65, 65, 0])
    says = (
        "a result of dtype float8_e8m0fnu has no zeros for rows of no group. Pass "
        "preferred_element_type=jnp.bfloat16"
    )
    for call in (
        lambda: jgg.ragged_dot(a, b[None], [1]),
        lambda: jgg.ragged_dot(a, b[None], [1], preferred_element_type="float8_e8m0fnu"),
    ):
        oracle.assert_raises(call, TypeError, f"jgg.ragged_dot: {says}")
    out = jgg.ragged_dot(a, b[None], [1], preferred_element_type="float32")
    np.testing.assert_array_equal(oracle.f64(out)[:, 0], [64, 0, 0])


def test_debug_nans_of_a_kept_promise():
    """The NaN of a broken one is chosen by its bits, also where every operation runs alone."""
    x, index = X[:, None], jnp.array([0, 0, 1])
    q = jgg.quantize(W.swapaxes(1, 2))
    for f in (
        lambda x: jgg.gather_mm(x, W, index, index, sorted_indices=True),
        lambda x: jgg.gather_qmm(x, q, index, index, sorted_indices=True),
    ):
        with jax.debug_nans(True), jax.disable_jit():
            grad = jax.grad(lambda x, f=f: f(x).sum())(x)
        assert np.isfinite(grad).all()


def test_debug_nans_of_rows_that_fit():
    """The NaN of a layer with too few rows is chosen by its bits, too."""
    x, index = X[:2], jnp.array([[0], [1]])
    up, down = jnp.ones((2, x.shape[1], 4)), jnp.ones((2, 2, x.shape[1]))
    run = lambda rows: jgg.moe_mlp(x, up, down, index, jnp.ones((2, 1)), max_rows=rows)
    with jax.debug_nans(True), jax.disable_jit():
        out = run(2)
    assert np.isfinite(out).all()
    assert np.isnan(run(1)).all()


@pytest.mark.parametrize(
    ("left", "right", "dtype"),
    [
        ("float8_e4m3fn", "bfloat16", "bfloat16"),
        ("float32", "float8_e5m2", "float32"),
        ("float8_e4m3fn", "float8_e5m2", "bfloat16"),
    ],
)
@pytest.mark.one_in(3)
def test_float8_with_others(rng, left, right, dtype):
    """JAX has no common dtype of these; eight bits count as bfloat16."""
    x, w = oracle.random(rng, (8, 16)).astype(left), oracle.random(rng, (2, 16, 4)).astype(right)
    ct = np.ones((8, 4))
    with jax.numpy_dtype_promotion("standard"):
        out, vjp = jax.vjp(lambda x, w: jgg.grouped_mm(x, w, SIZES), x, w)
        grads = vjp(jnp.ones_like(out))
        segmented = jgg.segmented_mm(x[:3, :8], w[0, :8], [[0, 8]])
        general = jgg.ragged_dot(x, w, SIZES)
    assert out.dtype == segmented.dtype == dtype
    assert general.dtype == (right if left == "float8_e4m3fn" else dtype)  # as JAX's own
    oracle.assert_close(out, oracle.grouped_mm(x, w, SIZES))
    if general.dtype == "float8_e5m2":
        general = general.astype(out.dtype)
    tolerance = 0.2 if general.dtype != dtype or right == "float8_e5m2" else None
    oracle.assert_close(general, oracle.grouped_mm(x, w, SIZES), tolerance=tolerance)
    oracle.assert_close(segmented, oracle.segmented_mm(x[:3, :8], w[0, :8], [[0, 8]]))
    wants = oracle.grouped_mm_grads(x, w, SIZES, ct)
    for got, want, of in zip(grads, wants, (x, w), strict=True):
        assert got.dtype == of.dtype
        tolerance = {"float8_e4m3fn": 0.04, "float8_e5m2": 0.08}.get(of.dtype.name)
        got = got if tolerance is None else got.astype("float32")
        oracle.assert_close(got, want, tolerance=tolerance)


def test_numbers_with_64_bits():
    """Those of Python are float64 then."""
    with jax.enable_x64(True):
        w = jnp.full((2, 64, 64), 6, jnp.float32)
        q = jgg.quantize(w, mode="nvfp4", global_scale=2.0, contract=-1)
        assert q.global_scale.dtype == jnp.float32
        np.testing.assert_array_equal(jgg.dequantize(q, jnp.float32), w)
