"""gather_mm: indices of any shape and order, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.test_util import check_grads

import jax_groupgemm as jgg


@pytest.mark.parametrize("m", [1, 5, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("lhs_shape", "rhs_shape"),
    [((), (6,)), ((6,), (6,)), ((2, 1), (1, 3)), ((4, 1, 2), (3, 1)), ((1,), ())],
)
@pytest.mark.one_in(14)
def test_values(rng, implementation, m, dtype, lhs_shape, rhs_shape):
    a, b = oracle.random(rng, (2, 3, m, 16), dtype), oracle.random(rng, (5, 16, 12), dtype)
    lhs, rhs = rng.integers(0, 6, lhs_shape), rng.integers(0, 5, rhs_shape)
    out = jgg.gather_mm(a, b, lhs, rhs, implementation=implementation)
    assert out.dtype == dtype
    oracle.assert_close(out, oracle.gather_mm(a, b, lhs, rhs))


@pytest.mark.parametrize("m", [1, 40])
def test_missing_indices(rng, implementation, m):
    a, b = oracle.random(rng, (2, 3, m, 8)), oracle.random(rng, (2, 3, 8, 4))
    rhs = rng.integers(0, 6, (2, 3))
    run = lambda *i, **k: jgg.gather_mm(a, b, *i, implementation=implementation, **k)
    oracle.assert_close(run(), oracle.gather_mm(a, b))
    oracle.assert_close(run(None, rhs), oracle.gather_mm(a, b, None, rhs))
    oracle.assert_close(run(rhs), oracle.gather_mm(a, b, rhs))
    oracle.assert_close(run(sorted_indices=True), oracle.gather_mm(a, b))


@pytest.mark.parametrize("m", [1, 40])
def test_out_of_range_indices_give_zeros(rng, implementation, m):
    a = oracle.random(rng, (4, m, 8))
    b = oracle.random(rng, (3, 8, 6)).at[2].set(jnp.nan)
    lhs = np.array([0, -1, 4, 2**31 - 1, 3, 2, -(2**31)], np.int32)
    rhs = np.array([0, 2, 2, 1, 3, -7, 1], np.int32)
    f = lambda a, b: jgg.gather_mm(a, b, lhs, rhs, implementation=implementation)
    out, vjp = jax.vjp(f, a, b)
    oracle.assert_close(out, oracle.gather_mm(a, b, lhs, rhs))
    assert not np.asarray(out)[1:].any()
    da, db = map(np.asarray, vjp(jnp.full_like(out, jnp.nan).at[0].set(1.0)))
    assert np.isfinite(da).all()
    assert np.isfinite(db).all()
    assert not da[1:].any()
    assert not db[1:].any()


def test_gradients_of_many_uses_are_summed_in_float32(rng):
    """A thousand positive terms, of which bfloat16 would lose half; also of quantized weights."""
    a = jnp.asarray(rng.random((2, 1, 32)), "bfloat16")
    b = jnp.asarray(rng.random((4, 32, 8)), "bfloat16")
    lhs, rhs = np.arange(2000) % 2, rng.integers(0, 4, 2000)
    ct = jnp.asarray(rng.random((2000, 1, 8)), "bfloat16")
    q = jgg.quantize(b.swapaxes(1, 2), group_size=32)
    for f, w in (
        (lambda a: jgg.gather_mm(a, b, lhs, rhs), b.swapaxes(1, 2)),
        (lambda a: jgg.gather_qmm(a, q, lhs, rhs), jgg.dequantize(q)),
    ):
        terms = np.einsum("imn,ink->imk", oracle.f64(ct), oracle.f64(w)[rhs])
        want = np.stack([terms[lhs == i].sum(0) for i in range(2)])
        oracle.assert_close(jax.vjp(f, a)[1](ct)[0], want)


def test_integers_have_no_nan_for_a_broken_promise(rng):
    a, b = rng.integers(-9, 9, (6, 1, 4), np.int32), rng.integers(-9, 9, (3, 4, 5), np.int32)
    rhs = np.array([2, 0, 1, 1, 0, 2])
    out = jgg.gather_mm(a, b, None, rhs, sorted_indices=True)
    np.testing.assert_array_equal(out, a @ b[rhs])


@pytest.mark.parametrize("index", [2**32, 2**32 + 1, -(2**32), np.iinfo(np.int64).min])
def test_indices_of_the_host_do_not_wrap(rng, index):
    a, b = oracle.random(rng, (2, 1, 8)), oracle.random(rng, (3, 8, 6))
    assert not np.asarray(jgg.gather_mm(a, b, None, np.array([index, index]))).any()
    assert not np.asarray(jgg.gather_mm(a, b, [index, index], [0, 1])).any()


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int64"])
def test_wide_and_unsigned_indices(rng, dtype):
    with jax.enable_x64(True):
        a, b = oracle.random(rng, (4, 1, 8)), oracle.random(rng, (3, 8, 6))
        top = np.iinfo(dtype).max
        lhs, rhs = np.array([0, 3, 1, top], dtype), np.array([2, top, 1, 0], dtype)
        out = jgg.gather_mm(a, b, lhs, rhs)
        oracle.assert_close(out, oracle.gather_mm(a, b, lhs.astype(object), rhs.astype(object)))


@pytest.mark.parametrize("m", [1, 40])
def test_sorted_is_a_hint_and_a_checked_promise(rng, implementation, m):
    a, b = oracle.random(rng, (9, m, 8)), oracle.random(rng, (4, 8, 6))
    rhs = np.array([-1, 0, 0, 1, 1, 1, 3, 3, 4], np.int32)
    run = lambda a, b, rhs, ordered: jgg.gather_mm(
        a, b, None, rhs, sorted_indices=ordered, implementation=implementation
    )
    np.testing.assert_array_equal(run(a, b, rhs, True), run(a, b, rhs, False))
    shuffled = rhs[::-1].copy()
    oracle.assert_close(run(a, b, shuffled, False), oracle.gather_mm(a, b, None, shuffled))
    out, vjp = jax.vjp(lambda a, b: run(a, b, shuffled, True), a, b)
    assert np.isnan(out).all()
    da, db = vjp(jnp.ones_like(out))
    assert np.isnan(np.asarray(da)[1:8]).all()
    assert np.isnan(db).any()


def test_sorted_promise_is_about_the_given_indices(rng, implementation):
    """Sorted as given, but not once broadcast."""
    a, b = oracle.random(rng, (2, 1, 8)), oracle.random(rng, (4, 8, 6))
    lhs, rhs = np.array([[1], [0]]), np.array([0, 2, 3])
    out = jgg.gather_mm(a, b, lhs, rhs, sorted_indices=True, implementation=implementation)
    oracle.assert_close(out, oracle.gather_mm(a, b, lhs, rhs))


@pytest.mark.parametrize("m", [1, 40])
def test_gradients_of_repeated_operands_accumulate(rng, implementation, m):
    a, b = oracle.random(rng, (3, m, 8)), oracle.random(rng, (4, 8, 6))
    lhs, rhs = np.array([0, 2, 2, 0, 2]), np.array([3, 1, 1, 0, 3])
    f = lambda a, b: jgg.gather_mm(a, b, lhs, rhs, implementation=implementation)
    out, vjp = jax.vjp(f, a, b)
    ct = oracle.random(rng, out.shape)
    da, db = np.zeros(a.shape), np.zeros(b.shape)
    for i, (p, q) in enumerate(zip(lhs, rhs, strict=True)):
        da[p] += oracle.f64(ct[i]) @ oracle.f64(b[q]).T
        db[q] += oracle.f64(a[p]).T @ oracle.f64(ct[i])
    for got, want in zip(vjp(ct), (da, db), strict=True):
        oracle.assert_close(got, want)


@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.one_in(2)
def test_second_order_and_vmap(rng, m):
    a, b = oracle.random(rng, (3, m, 4)), oracle.random(rng, (4, 4, 3))
    lhs, rhs = np.array([0, 2, 1]), np.array([3, 1, 3])
    f = lambda a, b: jnp.sin(jgg.gather_mm(a, b, lhs, rhs))
    check_grads(f, (a, b), order=2, modes=("fwd", "rev"), atol=5e-2, rtol=5e-2)
    batch = np.stack([rhs, rhs[::-1], rhs * 0])
    out = jax.vmap(lambda i: jgg.gather_mm(a, b, lhs, i))(batch)
    for got, i in zip(out, batch, strict=True):
        oracle.assert_close(got, oracle.gather_mm(a, b, lhs, i))


@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("zero", ["A", "B", "M", "K", "N", "I"])
@pytest.mark.one_in(10)
def test_zero_sized(implementation, zero, m):
    size = {letter: 0 if letter == zero else 3 for letter in "ABKNI"} | {
        "M": 0 if zero == "M" else m
    }
    a = jnp.ones((size["A"], size["M"], size["K"]))
    b = jnp.ones((size["B"], size["K"], size["N"]))
    index = jnp.zeros((size["I"],), jnp.int32)
    f = lambda a, b: jgg.gather_mm(a, b, index, index, implementation=implementation)
    out, vjp = jax.vjp(f, a, b)
    assert out.shape == (size["I"], size["M"], size["N"])
    assert not np.asarray(out).any() or zero not in "ABK"
    assert [g.shape for g in vjp(out)] == [a.shape, b.shape]


def test_many_pairs(rng, implementation):
    a, b = oracle.random(rng, (70_000, 1, 8)), oracle.random(rng, (64, 8, 4))
    rhs = rng.integers(-2, 70, 70_000)
    out = jgg.gather_mm(a, b, None, rhs, implementation=implementation)
    oracle.assert_close(out, oracle.gather_mm(a, b, None, rhs))


@pytest.mark.parametrize("k", [0, 3])
def test_a_broken_promise_of_nothing(k):
    """Sums over no K are zeros, and NaN where the promise was broken."""
    a, b = jnp.ones((2, 1, k)), jnp.ones((2, k, 4))
    for given, broken in (([0, 1], False), ([1, 0], True)):
        out = jgg.gather_mm(a, b, None, jnp.array(given), sorted_indices=True)
        assert np.isnan(out).all() == broken
        assert np.isnan(out).any() == broken
