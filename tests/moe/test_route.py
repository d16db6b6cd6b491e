"""``route``, ``dispatch`` and ``combine`` against numpy."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device

T, K, E, D = 37, 3, 5, 7


def random_index(rng, tokens=T, k=K, experts=E):
    return rng.integers(-2, experts + 2, (tokens, k))


def expected(index, experts, offset=0, max_rows=None):
    """Order, place, sizes and overflow, with Python's own sort."""
    flat = [int(e) - offset for e in index.reshape(-1)]
    pairs = sorted((p for p, e in enumerate(flat) if 0 <= e < experts), key=lambda p: flat[p])
    rows = len(flat) if max_rows is None else min(max_rows, len(flat))
    place = np.full(len(flat), -1)
    for row, pair in enumerate(pairs[:rows]):
        place[pair] = row
    order = (pairs + [-1] * len(flat))[:rows]
    order = [p if i < len(pairs) else -1 for i, p in enumerate(order)]
    sizes = np.bincount([flat[p] for p in pairs], minlength=experts)
    return order, place.reshape(index.shape), sizes, max(len(pairs) - rows, 0)


def check(routing, want):
    for got, value in zip(jax.tree.leaves(routing), want, strict=True):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint16"])
@pytest.mark.parametrize("tokens", [0, 1, T, 400])
def test_route(rng, tokens, dtype):
    index = random_index(rng, tokens)
    given = index.astype(dtype)
    routing = jax.jit(functools.partial(jgg.route, num_experts=E))(given)
    check(routing, expected(given.astype(np.int64), E))


@pytest.mark.parametrize("max_rows", [0, 10, T * K, 10**6])
def test_max_rows(rng, max_rows):
    index = random_index(rng)
    check(jgg.route(index, E, max_rows=max_rows), expected(index, E, max_rows=max_rows))


@pytest.mark.parametrize("offset", [0, 3, -4, 100, 2**31 - 1, -(2**31)])
def test_offset(rng, offset):
    index = rng.integers(-9, 9, (T, K)).astype(np.int32)
    index[0] = [2**31 - 1, -(2**31), offset]
    route = jax.jit(lambda index, offset: jgg.route(index, E, expert_offset=offset))
    check(route(index, jnp.int32(offset)), expected(index.astype(np.int64), E, offset))
    check(route(index, jnp.array([offset], jnp.int32)), expected(index.astype(np.int64), E, offset))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dispatch_and_combine(rng, dtype):
    index = random_index(rng)
    routing = jgg.route(index, E)
    x = oracle.random(rng, (T, D), dtype).at[3].set(jnp.nan)
    rows = jgg.dispatch(x, routing)
    order = np.asarray(routing.order)
    want = np.where((order >= 0)[:, None], oracle.f64(x)[np.maximum(order, 0) // K], 0)
    np.testing.assert_array_equal(oracle.f64(rows), want)
    weight = oracle.random(rng, (T, K))
    y = oracle.random(rng, (T * K, D), dtype)
    place = np.asarray(routing.place)
    picked = np.where((place >= 0)[..., None], oracle.f64(y)[place], 0)
    got = jgg.combine(y, routing, weight)
    assert got.dtype == y.dtype
    oracle.assert_close(got, (picked * oracle.f64(weight)[..., None]).sum(1))
    oracle.assert_close(jgg.combine(y, routing), picked.sum(1))


def test_each_is_the_others_transpose(rng):
    routing = jgg.route(random_index(rng), E)
    x, rows = oracle.random(rng, (T, D)), oracle.random(rng, (T * K, D))
    dispatch = lambda x: jgg.dispatch(x, routing)
    combine = lambda rows: jgg.combine(rows, routing)
    for f, v, transpose, ct in ((dispatch, x, combine, rows), (combine, rows, dispatch, x)):
        want = transpose(ct)
        np.testing.assert_allclose(jax.vjp(f, v)[1](ct)[0], want, rtol=1e-6)
        np.testing.assert_allclose(jax.linear_transpose(f, v)(ct)[0], want, rtol=1e-6, atol=1e-6)


def test_a_weights_gradient_is_a_product_of_rows(rng):
    index, rows = random_index(rng), oracle.random(rng, (T * K, D))
    routing, ct = jgg.route(index, E), oracle.random(rng, (T, D))
    rows = rows.at[int(routing.group_sizes.sum()) :].set(jnp.nan)  # nobody's
    weight = oracle.random(rng, (T, K), "bfloat16")
    drows, dweight = jax.vjp(lambda r, w: jgg.combine(r, routing, w), rows, weight)[1](ct)
    assert dweight.dtype == weight.dtype
    place, order = np.asarray(routing.place), np.asarray(routing.order)
    picked = np.where((place >= 0)[..., None], oracle.f64(rows)[place], 0)
    oracle.assert_close(dweight, np.einsum("td,tkd->tk", oracle.f64(ct), picked))
    of_row = oracle.f64(weight).reshape(-1)[np.maximum(order, 0)][:, None]
    want = np.where((order >= 0)[:, None], oracle.f64(ct)[np.maximum(order, 0) // K] * of_row, 0)
    oracle.assert_close(drows, want)


@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_no_rows_of_a_batch_are_scattered(rng, name):
    """Routing or rows may be those of a batch, or both."""
    index = np.stack([random_index(rng), random_index(rng)])
    rows = oracle.random(rng, (2, T if name == "dispatch" else T * K, D))

    def f(rows, index):
        routing = jgg.route(index, E)
        return getattr(jgg, name)(rows, routing)

    for axes in ((0, None), (None, 0), (0, 0)):
        given = [a if axis == 0 else a[0] for a, axis in zip((rows, index), axes, strict=True)]
        loss = lambda rows, index, axes=axes: jnp.sin(jax.vmap(f, axes)(rows, index)).sum()
        grad = jax.jit(jax.grad(loss))
        assert not re.findall(r"scatter.*xf32>", grad.lower(*given).as_text())
        looped = lambda rows, index, axes=axes: sum(
            jnp.sin(f(*(a[b] if d == 0 else a for a, d in zip((rows, index), axes, strict=True))))
            for b in range(2)
        ).sum()
        np.testing.assert_allclose(grad(*given), jax.grad(looped)(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wide", [False, True])
def test_offsets_of_any_dtype(wide):
    """At the ends of every dtype, where int32 would hold no difference."""
    with jax.enable_x64(wide):
        kinds = [f"{u}int{8 * size}" for size in ((1, 4, 8) if wide else (1, 4)) for u in ("", "u")]
        for i, j in itertools.product(range(len(kinds)), repeat=2):
            if i != j and (i + j) % 2 == 0:  # each with itself, and with all of the other sign
                continue
            of_index, of_offset = kinds[i], kinds[j]
            ends = np.iinfo(of_index), np.iinfo(of_offset)
            for offset in (ends[1].min, -3, 0, ends[1].max - 3):
                if not ends[1].min <= offset <= ends[1].max:
                    continue
                near = {offset + d for d in range(-2, E + 2)} | {ends[0].min, ends[0].max}
                index = [i for i in sorted(near) if ends[0].min <= i <= ends[0].max]
                found = jgg.route(
                    np.array([index], of_index), E, expert_offset=np.array(offset, of_offset)
                )
                here = [i - offset for i in index if 0 <= i - offset < E]
                np.testing.assert_array_equal(found.group_sizes, np.bincount(here, minlength=E))


def test_no_rows_are_scattered(rng):
    routing = jgg.route(random_index(rng), E)
    x, weight = oracle.random(rng, (T, D)), oracle.random(rng, (T, K))
    f = lambda x, w: (jgg.combine(jgg.dispatch(x, routing), routing, w) ** 2).sum()
    text = jax.jit(jax.grad(f, (0, 1))).lower(x, weight).as_text()
    assert "stablehlo.gather" in text
    assert "stablehlo.scatter" not in text


def test_errors(rng):
    index, routing = random_index(rng), jgg.route(random_index(rng), E)
    x = jnp.zeros((T, D))
    cases = [
        (lambda: jgg.route(index[0], E), ValueError, "expert_index has shape"),
        (lambda: jgg.route(index * 1.0, E), TypeError, "expert_index"),
        (lambda: jgg.route(index, -1), ValueError, "num_experts=-1 is negative"),
        (lambda: jgg.route(index, E, max_rows=-2), ValueError, "max_rows=-2 is negative"),
        (lambda: jgg.route(index, E, expert_offset=[1, 2]), ValueError, "expected () or (1,)"),
        (lambda: jgg.dispatch(x[1:], routing), ValueError, "because routing is of 37 tokens"),
        (lambda: jgg.dispatch(x, index), TypeError, "routing must be a jgg.Routing"),
        (lambda: jgg.combine(x, routing), ValueError, "because routing has 111 rows"),
        (lambda: jgg.dispatch(x, jgg.Routing(1, index, x, x)), ValueError,
         "routing.order has shape (), expected 1 axis (R,): as jgg.route makes it"),
        (lambda: jgg.dispatch(x, jgg.Routing(index[0], x, x, x)), TypeError, "routing.place"),
        (
            lambda: jgg.combine(jnp.zeros((T * K, D)), routing, jnp.zeros((T,))),
            ValueError, "because routing.place is (37, 3)",
        ),
    ]  # fmt: skip
    for call, kind, message in cases:
        with pytest.raises(kind) as caught:
            call()
        assert message in str(caught.value)
        assert str(caught.value).startswith("jgg.")


def test_integer_rows_hold_no_sums_with_float_weights():
    routing = jgg.route(jnp.array([[0], [1], [0], [1]]), 2)
    rows, weight = jnp.array([[-3], [2], [1], [3]]), jnp.array([[0.9], [0.9], [-0.7], [0.4]])
    with pytest.raises(TypeError) as raised:
        jgg.combine(rows, routing, weight)
    assert str(raised.value) == (
        "jgg.combine: rows are int32, which holds no sums with weights of dtype float32. Convert "
        "rows to floats"
    )
    np.testing.assert_array_equal(
        jgg.combine(rows, routing, jnp.full((4, 1), 2)).ravel(), [-6, 2, 4, 6]
    )
    got = jgg.combine(rows.astype(jnp.float32), routing, weight).ravel()
    np.testing.assert_allclose(got, [-2.7, 0.9, -1.4, 1.2], rtol=1e-6)
