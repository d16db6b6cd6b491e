"""``jgg.cost``: numbers worked out by hand, for operations and for what is made of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_groupgemm as jgg
from jax_groupgemm.cost import Cost

T, K, N, G = 16, 8, 6, 3
SIZES = np.array([4, 0, 9], np.int32)  # 13 rows, 2 matrices


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


X, W, ANY_SIZES = shape(T, K), shape(G, K, N), shape(G, dtype="int32")
# FLOPs of one product: of all rows, and of those that SIZES holds.
FULL, PART = 2 * T * K * N, 2 * 13 * K * N


def test_grouped_mm():
    metadata = 4 * G
    assert jgg.cost.grouped_mm(X, W, ANY_SIZES) == Cost(
        FULL, 4 * (T * K + G * K * N + T * N) + metadata
    )
    # Rows and matrices that are not needed are not read; the result is written in full.
    part = Cost(PART, 4 * (13 * K + 2 * K * N + T * N) + metadata)
    assert jgg.cost.grouped_mm(X, W, SIZES) == part
    assert jgg.cost.grouped_mm(X, W, jnp.asarray(SIZES)) == part
    assert jgg.cost.of(lambda x, w: jgg.grouped_mm(x, w, SIZES), X, W) == part
    # No more matrices than rows, no rows past the last, in other dtypes and layouts.
    cost = jgg.cost.grouped_mm(
        shape(2, K, dtype="bfloat16"), shape(G, N, K, dtype="bfloat16"), ANY_SIZES,
        transpose_w=True, preferred_element_type=jnp.float32,
    )  # fmt: skip
    assert cost == Cost(2 * 2 * K * N, 2 * (2 * K + 2 * K * N) + 4 * 2 * N + metadata)
    assert jgg.cost.grouped_mm(X, W, np.array([9, 9, 9])).flops == FULL
    # Groups [1, 4) of five: 0 + 9 + 1 rows.
    sizes = np.array([4, 0, 9, 1, 2])
    want = Cost(2 * 10 * K * N, 4 * (10 * K + 2 * K * N + T * N) + 4 * 5 + 4)
    for offset in (1, np.int32(1), np.array([1]), jnp.array(1)):
        assert jgg.cost.grouped_mm(X, W, sizes, group_offset=offset) == want
    assert jgg.cost.grouped_mm(X, W, sizes, group_offset=shape(dtype="int32")).flops == FULL


def test_epilogue():
    """A bias counts as a product with K = 1, fused as well as composed."""
    bias, scale, old = shape(G, N), shape(T), shape(T, N // 2, dtype="bfloat16")
    f = functools.partial(jgg.grouped_mm, activation="swiglu", preferred_element_type=jnp.bfloat16)
    cost = jgg.cost.of(f, X, W, SIZES, bias=bias, row_scale=scale, existing_out=old)
    read = 4 * (13 * K + 2 * K * N + 2 * N + T) + 2 * T * N // 2
    assert cost == Cost(PART + 2 * 13 * N, read + 4 * G + 2 * T * N // 2)
    grad = jax.grad(lambda w: f(X0, w, SIZES, bias=jnp.ones((G, N))).sum())
    # Forward, what the bias is, and the gradient of w.
    assert jgg.cost.of(grad, W).flops == 2 * PART + 2 * 13 * N


def test_segmented_mm():
    a, b = shape(5, 20), shape(20, 4)
    out = 4 * 2 * 5 * 4 + 4 * 2 * 2
    assert jgg.cost.segmented_mm(a, b, shape(2, 2, dtype="int32")) == Cost(
        2 * 20 * 5 * 4, 4 * 20 * (5 + 4) + out
    )
    # 9 + 6 rows, of which [5, 9) are in both segments.
    spans = np.array([[0, 9], [5, 11]])
    assert jgg.cost.segmented_mm(a, b, spans) == Cost(2 * 15 * 5 * 4, 4 * 11 * (5 + 4) + out)
    assert jgg.cost.segmented_mm(a, b, np.array([[7, 3], [2, 2]])) == Cost(0, out)


def test_gather_mm():
    a, b, index = shape(4, 64, K), shape(G, K, N), np.array([2, 0, 9, 2])
    flops, table = 2 * 64 * K * N, 4 * 4 * 4
    cost = jgg.cost.gather_mm(a, b, None, shape(4, dtype="int32"))
    assert cost == Cost(4 * flops, 4 * (4 * 64 * (K + N) + G * K * N) + table)
    # Index 9 does not exist, and matrix 1 is not read.
    cost = jgg.cost.gather_mm(a, b, None, index)
    assert cost == Cost(3 * flops, 4 * (3 * 64 * K + 2 * K * N + 4 * 64 * N) + table)
    # Short products may be sorted by matrix first.
    assert jgg.cost.gather_mm(shape(4, 1, K), b, None, index).flops == 3 * 2 * K * N


def test_ragged_dot():
    assert jgg.cost.ragged_dot(X, W, SIZES) == jgg.cost.grouped_mm(X, W, SIZES)
    numbers = functools.partial(jax.lax.RaggedDotDimensionNumbers, lhs_ragged_dimensions=[0])
    rows = numbers((([1], [1]), ([], [])), rhs_group_dimensions=[0])
    assert jgg.cost.ragged_dot_general(X, W, SIZES, rows) == jgg.cost.ragged_dot(X, W, SIZES)
    contracted = numbers((([0], [0]), ([], [])), rhs_group_dimensions=[])
    cost = jgg.cost.ragged_dot_general(X, shape(T, N), SIZES, contracted)
    assert cost == Cost(PART, 4 * 13 * (K + N) + 4 * G * K * N + 4 * G)


def moe(params, x, sizes):
    h = jgg.grouped_mm(x, params["up"], sizes, activation="swiglu")
    return jgg.grouped_mm(h, params["down"], sizes)


PARAMS = {"up": shape(G, K, 10), "down": shape(G, 5, K)}
X0 = jnp.ones((T, K))


def test_gradient_of_a_moe_layer():
    layer = 2 * 13 * (K * 10 + 5 * K)
    loss = lambda params, x, sizes: (moe(params, x, sizes) ** 2).sum()
    assert jgg.cost.of(moe, PARAMS, X, SIZES).flops == layer
    assert jgg.cost.of(jax.value_and_grad(loss, (0, 1)), PARAMS, X, SIZES).flops == 3 * layer
    # Without the gradient of x, and with what is computed again.
    once = 3 * layer - 2 * 13 * K * 10
    assert jgg.cost.of(jax.value_and_grad(loss), PARAMS, X, SIZES).flops == once
    again = jax.jit(jax.value_and_grad(jax.checkpoint(loss)))
    assert jgg.cost.of(again, PARAMS, X, SIZES).flops == once + layer
    # Bytes, of a gradient that is two products: w and the cotangent of each product of x and w.
    linear = lambda x, w: jgg.grouped_mm(x, w, SIZES).sum()
    dx = 4 * (13 * N + 2 * K * N + T * K) + 4 * G
    dw = 4 * (13 * K + 13 * N + G * K * N) + 4 * G
    assert jgg.cost.of(jax.grad(linear, (0, 1)), X, W) == Cost(2 * PART, dx + dw)


def test_sizes_that_are_computed():
    def routed(x, w, expert):
        return jgg.grouped_mm(x, w, jnp.bincount(expert, length=G))

    expert = np.array([0] * 4 + [2] * 9)
    for f in (routed, jax.jit(routed), jax.checkpoint(routed)):
        assert jgg.cost.of(f, X, W, expert).flops == PART
    assert jgg.cost.of(routed, X, W, shape(13, dtype="int32")).flops == FULL
    by_values = lambda x, w: jgg.grouped_mm(x, w, (x.sum(1) > 0)[:G].astype(jnp.int32))
    assert jgg.cost.of(by_values, X0, W).flops == FULL
    inside = lambda x, w: jgg.cost.grouped_mm(x, w, SIZES).flops * jnp.ones(())
    assert jax.jit(inside)(X0, jnp.ones(W.shape)) == PART


def test_vmap():
    """A batch folds into segments; shared matrices are read once."""
    xs, sizes = shape(5, T, K), np.stack([SIZES, SIZES, SIZES * 0, SIZES, SIZES])
    assert (
        jgg.cost.of(jax.vmap(jgg.grouped_mm, (0, None, None)), xs, W, ANY_SIZES).flops == 5 * FULL
    )
    cost = jgg.cost.of(jax.vmap(jgg.grouped_mm, (0, None, 0)), xs, W, sizes)
    table = 4 * 4 * 5 * G
    assert cost == Cost(4 * PART, 4 * (4 * 13 * K + 2 * K * N + 5 * T * N) + table)
    cost = jgg.cost.of(jax.vmap(jgg.grouped_mm, (None, 0, None)), X, shape(5, G, K, N), SIZES)
    assert cost == Cost(5 * PART, 4 * (13 * K + 10 * K * N + 5 * T * N) + table)


def test_control_flow():
    w, one = shape(G, K, K), 2 * T * K * K
    product = lambda x, w: jgg.grouped_mm(x, w, SIZES)
    scan = lambda x, w: jax.lax.scan(lambda x, _: (product(x, w), None), x, None, length=7)[0]
    assert jgg.cost.of(scan, X, w).flops == 7 * one
    assert jgg.cost.of(jax.grad(lambda *v: scan(*v).sum()), X, w).flops == 7 * one
    loop = lambda x, w, n: jax.lax.fori_loop(0, n, lambda _, x: product(x, w), x)
    assert jgg.cost.of(loop, X, w, shape(dtype="int32")).flops == one
    twice = lambda x, w: product(product(x, w), w)
    branch = lambda x, w, p: jax.lax.cond(p, twice, product, x, w)
    assert jgg.cost.of(branch, X, w, shape(dtype="bool")).flops == 2 * one
    assert jgg.cost.of(lambda x: x @ x.T, X) == Cost()


def test_sharding():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    put = lambda spec: NamedSharding(mesh, spec)
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((T, K), "float32", sharding=put(P(None, None)))
        w = jax.ShapeDtypeStruct((G, K, N), "float32", sharding=put(P(None, None, "d")))
        cost = jgg.cost.grouped_mm(x, w, SIZES)
    # Each device has half of the columns and reads all of x.
    assert cost == Cost(FULL, 4 * (2 * T * K + G * K * N + T * N) + 2 * 4 * G)
