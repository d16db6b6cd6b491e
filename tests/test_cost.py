"""``jgg.cost``: numbers worked out by hand, for operations and for what is made of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_groupgemm as jgg
from jax_groupgemm._core import composed
from jax_groupgemm._core.costs import COSTS, Cost
from jax_groupgemm._core.operations import OPERATIONS

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


def test_lora_mm():
    """Pairs that no row has are not read, nor are rows of no pair."""
    a, b, adapter, expert = shape(4, 2, 5, K), shape(4, 2, N, 5), *[shape(T, dtype="int32")] * 2
    pair = 4 * 5 * (K + N)
    cost = jgg.cost.lora_mm(X, a, b, adapter, expert)
    assert cost == Cost(2 * T * 5 * (K + N), 4 * T * (K + N) + 8 * pair + 4 * T)
    of = lambda adapter: jgg.lora_mm(X0, A0, B0, adapter, existing_out=jnp.ones((T, N)))
    A0, B0 = jnp.ones((4, 5, K)), jnp.ones((4, N, 5))
    known = np.array([3, 3, -1, 0, 4, *[0] * 11])
    some = Cost(2 * 14 * 5 * (K + N), 4 * (14 * K + 2 * T * N) + 2 * pair + 4 * T)
    assert jgg.cost.of(lambda: of(known)) == some


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


def test_conversions():
    """No FLOPs; every byte of operands and results once."""
    w, half = shape(G, 32, 128), shape(G, 32, 128, dtype="bfloat16")
    count = G * 32 * 128
    groups = count // 64
    assert jgg.cost.quantize(w) == Cost(0, 4 * count + count // 2 + 2 * 4 * groups)
    assert jgg.cost.quantize(half, bits=3) == Cost(0, 2 * count + count * 3 // 8 + 2 * 2 * groups)
    assert jgg.cost.quantize(half, mode="mxfp8") == Cost(0, 2 * count + count + count // 32)
    packed = count // 2 + count // 16
    scaled = functools.partial(jgg.cost.quantize, half, mode="nvfp4")
    assert scaled() == Cost(0, 2 * count + packed)
    assert scaled(global_scale=shape(G)) == Cost(0, 2 * count + packed + 4 * G)
    q = jax.eval_shape(functools.partial(jgg.quantize, mode="nvfp4"), half)
    assert jgg.cost.dequantize(q) == Cost(0, packed + 2 * count)
    assert jgg.cost.dequantize(q, "float32") == Cost(0, packed + 4 * count)
    # Scales and biases of bfloat16 become one word; there is a tile of 64 x 64 in each matrix.
    tiles = jax.eval_shape(jgg.quantize, shape(G, 64, 128, dtype="bfloat16"))
    assert jgg.cost.prepack(tiles) == Cost(0, 2 * (G * 64 * 128 // 2 + 2 * 2 * G * 64 * 2))
    with pytest.warns(UserWarning, match="N and K are not multiples of 64"):
        assert jgg.cost.prepack(q) == Cost()  # 32 rows stay as they are
    # One batch is one call; what XLA does itself does not count.
    assert jgg.cost.of(jax.vmap(jgg.quantize), w) == jgg.cost.quantize(w)
    assert jgg.cost.of(lambda w: jgg.dequantize(jgg.quantize(w)), w) == Cost(
        0, 2 * (4 * count + count // 2 + 2 * 4 * groups)
    )


def test_nvfp4_quantize():
    x = shape(128, 48, dtype="bfloat16")
    packed = 128 * 48 // 2 + 128 * 48 // 16
    plain = Cost(0, 2 * 128 * 48 + packed + 4)
    for options in ({}, {"axis": 0}, {"scale_2d": True}, {"hadamard": True}):
        assert jgg.cost.nvfp4_quantize(x, **options) == plain
    # Two words of random bits, sizes, and three groups padded to 64 rows.
    key = jax.random.key(0)
    assert jgg.cost.nvfp4_quantize(x, stochastic_rounding_key=key) == plain + Cost(0, 8)
    assert jgg.cost.nvfp4_quantize(x, group_sizes=ANY_SIZES) == plain + Cost(0, 4 * G)
    stored = (128 + 3 * 63) // 64 * 64
    grouped = jgg.cost.nvfp4_quantize(x, axis=0, group_sizes=ANY_SIZES, hadamard=True)
    assert grouped == Cost(0, 2 * 128 * 48 + 48 * stored * 9 // 16 + 4 + 4 * G)


def nvfp4(*sizes, **options):
    """A quantized array of that shape, of shapes only."""
    x = shape(*sizes, dtype="bfloat16")
    return jax.eval_shape(functools.partial(jgg.nvfp4_quantize, **options), x)


def test_nvfp4_products():
    """Packed operands, not what their definition dequantizes them to."""
    t, k, n, g = 128, 512, 256, 4
    x, w, sizes = nvfp4(t, k), nvfp4(g, n, k), shape(g, dtype="int32")
    packed = lambda elements: elements // 2 + elements // 16
    cost = jgg.cost.nvfp4_grouped_mm(x, w, sizes)
    small = 4 * g + 4 * g  # sizes, and the product of global scales
    assert cost == Cost(2 * t * k * n, packed(t * k) + packed(g * n * k) + 2 * t * n + small)
    assert cost.bytes_accessed == 397312 + small
    # 100 rows of two groups; a bias of theirs, one scale per row, float32.
    some, of_rows = np.array([60, 0, 40, 0]), dataclasses.replace(x, global_scale=shape(t))
    cost = jgg.cost.nvfp4_grouped_mm(
        of_rows, w, some, bias=shape(g, n), preferred_element_type=jnp.float32
    )
    read = packed(100 * k) + 4 * 100 + 2 * (packed(n * k) + 4 * n)
    assert cost == Cost(2 * 100 * (k + 1) * n, read + 4 * t * n + small)
    # Prepacked weights have as many bytes.
    assert jgg.cost.nvfp4_grouped_mm(x, jax.eval_shape(jgg.prepack, w), some) == (
        jgg.cost.nvfp4_grouped_mm(x, w, some)
    )


def test_nvfp4_wgrad():
    t, k, n, g = 128, 48, 32, 4
    stored = (t + 63 * g) // 64 * 64
    x, dy = (nvfp4(t, c, axis=0, group_sizes=np.zeros(g, np.int32)) for c in (k, n))
    packed = lambda rows: (k + n) * rows * 9 // 16
    rest = 4 * g * n * k + 4 * g + 4  # the result, sizes, global scales
    cost = jgg.cost.nvfp4_grouped_wgrad(x, dy, shape(g, dtype="int32"))
    assert cost == Cost(2 * stored * k * n, packed(stored) + rest)
    sizes = np.array([60, 0, 65, 1])  # padded to 64, 0, 128 and 64
    cost = jgg.cost.nvfp4_grouped_wgrad(x, dy, sizes)
    assert cost == Cost(2 * 256 * k * n, packed(256) + rest)
    old = shape(g, n, k)
    assert jgg.cost.nvfp4_grouped_wgrad(
        x, dy, sizes, alpha=shape(g), beta=shape(g), existing_out=old
    ) == cost + Cost(0, 4 * g * n * k + 4 * g + 4 * g - 4)


def test_nvfp4_linear():
    """Conversions and products of a training step are each counted once."""
    t, k, n = 128, 64, 32
    x, w, sizes = shape(t, k), shape(G, n, k), np.array([60, 0, 65])
    q = lambda *v, **options: jgg.cost.nvfp4_quantize(*v, **options)
    mm = lambda *s: jgg.cost.nvfp4_grouped_mm(*s, sizes, preferred_element_type=jnp.float32)
    forward = q(x, group_sizes=sizes) + q(w, scale_2d=True) + mm(nvfp4(t, k), nvfp4(G, n, k))
    assert jgg.cost.nvfp4_grouped_linear(x, w, sizes) == forward
    assert forward.flops == 2 * 125 * k * n
    grad = jax.grad(lambda x, w: jgg.nvfp4_grouped_linear(x, w, sizes).sum(), (0, 1))
    dy = shape(t, n)
    along = {"axis": 0, "group_sizes": sizes}
    backward = (
        q(dy, group_sizes=sizes) + q(w, axis=-2) + mm(nvfp4(t, n), nvfp4(G, k, n))
        + q(x, **along) + q(dy, **along)
        + jgg.cost.nvfp4_grouped_wgrad(nvfp4(t, k, **along), nvfp4(t, n, **along), sizes)
    )  # fmt: skip
    assert jgg.cost.of(grad, x, w) == backward


def test_every_call_has_its_cost():
    # All of what experts cost is that of their parts; jgg_test is test_composed.py's.
    experts = {f"jgg_experts{of}" for of in ("", "_forward", "_backward")}
    ours = {p for p in composed.PRIMITIVES if p.name not in {"jgg_test", *experts}}
    assert set(COSTS) >= ours


def test_every_operation_costs_something():
    """Products have FLOPs; an operation that is not in this list fails."""
    x, w, sizes, pairs = (
        shape(128, 128),
        shape(G, 128, 128),
        ANY_SIZES,
        shape(128, 2, dtype="int32"),
    )
    made = lambda f, *a, **options: jax.eval_shape(functools.partial(f, **options), *a)
    along = {"axis": 0, "group_sizes": np.zeros(G, np.int32)}
    q, q8 = (made(jgg.quantize, w, mode=mode, contract=-1) for mode in ("nvfp4", "fp8"))
    x4, rows4 = nvfp4(128, 128), nvfp4(128, 128, **along)
    x8, rows8 = made(jgg.fp8_quantize, x), made(jgg.fp8_quantize, x, **along)
    routing, of_pairs = made(jgg.route, pairs, num_experts=G), shape(256, 128)
    blocks, lists = shape(8, 16, 128), (shape(8, dtype="int32"),) * 2
    ragged = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    products = {
        "grouped_mm": (x, w, sizes), "ragged_dot": (x, w, sizes), "grouped_qmm": (x, q, sizes),
        "ragged_dot_general": (x, w, sizes, ragged), "gather_mm": (blocks, w, *lists),
        "gather_qmm": (blocks, q, *lists), "segmented_mm": (x, x, shape(G, 2, dtype="int32")),
        "quantized_matmul": (x, q), "nvfp4_grouped_mm": (x4, nvfp4(G, 128, 128), sizes),
        "nvfp4_grouped_wgrad": (rows4, rows4, sizes), "nvfp4_grouped_linear": (x, w, sizes),
        "fp8_grouped_mm": (x8, q8, sizes), "fp8_grouped_wgrad": (rows8, rows8, sizes),
        "fp8_grouped_linear": (x, w, sizes),
        "moe_mlp": (x, shape(G, 128, 256), w, pairs, shape(128, 2)),
        "lora_mm": (x, shape(G, 8, 128), shape(G, 128, 8), shape(128, dtype="int32")),
    }  # fmt: skip
    others = {
        "quantize": (w,), "dequantize": (q,), "prepack": (q,), "nvfp4_quantize": (x,),
        "fp8_quantize": (x,), "route": (pairs, G), "dispatch": (x, routing),
        "combine": (of_pairs, routing, shape(128, 2)),
    }  # fmt: skip
    assert {*products, *others} == set(OPERATIONS)
    for op, operands in (products | others).items():
        contract = {"contract": -1} if op == "quantize" else {}
        cost = getattr(jgg.cost, op)(*operands, **contract)
        assert cost.bytes_accessed > 0, op
        assert (cost.flops > 0) == (op in products), op


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
