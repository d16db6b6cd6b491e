"""What ``route``, ``dispatch`` and ``combine`` are lowered to for CUDA, and where not."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

T, K, E, D = 37, 3, 5, 16
ROUTING = ["111xi32", "37x3xi32", "5xi32", "i32"]


def cuda_text(function, *args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls(function, *args) -> list[tuple[str, list[str], list[str]]]:
    """Of each custom call its target, and the types of its operands and results."""
    found = []
    for line in cuda_text(function, *args).splitlines():
        if name := re.search(r"custom_call @(jgg_\w+)\(", line):
            operands, results = line.rsplit(" : (", 1)[1].split(" -> ")
            types = (re.findall(r"tensor<([^>]*)>", part) for part in (operands, results))
            found.append((name[1], *types))
    return found


def names(function, *args) -> list[str]:
    return [call[0] for call in calls(function, *args)]


def routing(tokens=T, k=K, experts=E, max_rows=None):
    index = jax.ShapeDtypeStruct((tokens, k), jnp.int32)
    route = functools.partial(jgg.route, num_experts=experts, max_rows=max_rows)
    return jax.eval_shape(route, index)


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("offset", [None, jnp.int32(3), jnp.array([3], jnp.int32)])
def test_route(offset):
    """An int32 index reaches the kernel as it is."""
    route = lambda index, offset: jgg.route(index, E, expert_offset=offset)
    index = array(T, K, dtype="int32")
    operands = ["111xi32", *([] if offset is None else ["i32"])]
    results = ["111xi32", "111xi32", "5xi32", "i32", "5x1xi32"]
    assert calls(route, index, offset) == [("jgg_moe_route", operands, results)]
    found = set(re.findall(r"stablehlo\.(\w+)", cuda_text(route, index, offset)))
    assert found == {"custom_call", "reshape"}


def test_route_of_other_integers_and_of_many():
    route = lambda index: jgg.route(index, E, max_rows=4096)
    ((_, operands, results),) = calls(route, array(2049, 2, dtype="uint8"))
    assert operands == ["4098xi32"]
    assert results == ["4096xi32", "4098xi32", "5xi32", "i32", "5x3xi32"]


@pytest.mark.parametrize(
    ("tokens", "experts", "max_rows"), [(0, E, None), (T, 0, None), (T, E, 0), (T, 1025, None)]
)
def test_no_kernel_routes(tokens, experts, max_rows):
    route = lambda index: jgg.route(index, experts, max_rows=max_rows)
    assert names(route, array(tokens, K, dtype="int32")) == []


def test_dispatch_and_combine():
    x, rows, weight = array(T, D), array(T * K, D), array(T, K, dtype="float16")
    lists = ["111xi32", "37x3xi32"]
    assert calls(jgg.dispatch, x, routing()) == [
        ("jgg_moe_dispatch", ["37x16xbf16", *lists], ["111x16xbf16"])
    ]
    assert calls(jgg.combine, rows, routing()) == [
        ("jgg_moe_combine", ["111x16xbf16", *lists], ["37x16xbf16"])
    ]
    assert calls(jgg.combine, rows, routing(), weight) == [
        ("jgg_moe_combine", ["111x16xbf16", *lists, "37x3xf32"], ["37x16xbf16"])
    ]


@pytest.mark.parametrize(
    ("d", "dtype", "runs"),
    [(12, "bfloat16", False), (8, "float16", True), (4, "float32", True), (6, "float32", False),
     (16, "int32", False), (0, "bfloat16", False)],
)  # fmt: skip
def test_rows_of_whole_pieces(d, dtype, runs):
    found = names(jgg.dispatch, array(T, d, dtype=dtype), routing())
    assert found == (["jgg_moe_dispatch"] if runs else [])
    found = names(jgg.combine, array(T * K, d, dtype=dtype), routing())
    assert found == (["jgg_moe_combine"] if runs else [])


def test_reverse_mode():
    """One call each, and nothing of R rows beside them."""
    x, rows, weight = array(T, D), array(T * K, D), array(T, K, dtype="float32")
    back = lambda f: lambda ct, *args: jax.vjp(f, *args)[1](ct)
    dispatch = lambda x, r: jax.vjp(lambda x: jgg.dispatch(x, r), x)[1]
    assert names(lambda ct, x, r: dispatch(x, r)(ct), rows, x, routing()) == ["jgg_moe_combine"]
    plain = lambda ct, rows, r: back(lambda rows: jgg.combine(rows, r))(ct, rows)
    assert names(plain, x, rows, routing()) == ["jgg_moe_dispatch"]
    both = lambda ct, rows, w, r: back(lambda rows, w: jgg.combine(rows, r, w))(ct, rows, w)
    assert calls(both, x, rows, weight, routing()) == [
        (
            "jgg_moe_combine_backward",
            ["37x16xbf16", "111x16xbf16", "111xi32", "37x3xi32", "37x3xf32"],
            ["111x16xbf16", "37x3xf32"],
        )
    ]
    assert "gather" not in cuda_text(both, x, rows, weight, routing())


def test_a_layer():
    """Route, dispatch and combine, and of its gradient only what it needs."""
    up, down = jnp.zeros((E, D, 32), "bfloat16"), jnp.zeros((E, 16, D), "bfloat16")
    x, index, weight = array(T, D), array(T, K, dtype="int32"), array(T, K, dtype="float32")
    layer = lambda x, index, weight: jgg.moe_mlp(x, up, down, index, weight)
    ours = ["jgg_moe_route", "jgg_moe_dispatch", "jgg_mm", "jgg_mm", "jgg_moe_combine"]
    assert names(layer, x, index, weight) == ours
    grad = jax.grad(lambda *args: layer(*args).astype("float32").sum(), (0, 2))
    found = names(grad, x, index, weight)
    assert found.count("jgg_moe_route") == 1
    assert found.count("jgg_activation_backward") == 1
    assert found.count("jgg_moe_dispatch") == 2  # of x and of the cotangent
    assert found.count("jgg_moe_combine") == 1  # of x's cotangent: nobody asked for the value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_choices_of_a_router(dtype):
    """One call: logits as they are, any leading axes; its backward pass scatters nothing."""
    choose = functools.partial(jgg.router.choose, top_k=K)
    of = lambda logits: choose(logits)[:2]
    x, of_token = f"x{'bf16' if dtype == 'bfloat16' else 'f32'}", ["6x3xi32", "6x3xf32"]
    assert calls(of, array(2, 3, 8, dtype=dtype)) == [("jgg_moe_top_k", [f"6x8{x}"], of_token)]
    assert calls(of, array(6, 8, dtype="float16")) == [("jgg_moe_top_k", ["6x8xf32"], of_token)]
    bias = lambda logits, bias: choose(logits, bias=bias, scores="sigmoid")[:2]
    operands = array(6, 8, dtype=dtype), array(8, dtype="float16")
    assert calls(bias, *operands) == [("jgg_moe_top_k", [f"6x8{x}", "8xf32"], of_token)]
    for options in ({}, {"renormalize": False}, {"scores": "sigmoid"}):
        weight = functools.partial(choose, **options)
        loss = lambda logits, ct, weight=weight: (weight(logits).weight * ct).sum()
        operands = array(6, 8, dtype=dtype), array(6, K, dtype="float32")
        assert names(jax.grad(loss), *operands) == ["jgg_moe_top_k"]
        assert "scatter" not in cuda_text(jax.grad(loss), *operands)


@pytest.mark.parametrize(
    ("experts", "k", "groups", "dtype"),
    [(2048, 3, 1, "float32"), (64, 33, 1, "float32"), (80, 3, 40, "float32"), (8, 3, 1, "float64")],
)
def test_no_kernel_chooses(experts, k, groups, dtype):
    with jax.enable_x64(dtype == "float64"):
        of = lambda logits: jgg.router.choose(logits, k, groups=groups)[:2]
        assert names(of, array(6, experts, dtype=dtype)) == []


def test_cpu_products_gather_their_rows():
    """No copy of the tokens' rows: all products take x, or the cotangent, as it is."""
    tokens, d, f = 37, 24, 16  # so that no other array is of these shapes
    up, down = jnp.zeros((E, d, 2 * f)), jnp.zeros((E, f, d))
    args = (array(tokens, d, dtype="float32"), array(tokens, K, dtype="int32"),
            array(tokens, K, dtype="float32"))  # fmt: skip

    def grads(x, index, weight):
        layer = lambda x, up, down: jgg.moe_mlp(x, up, down, index, weight)
        out, pull = jax.vjp(layer, x, up, down)
        return pull(out)

    text = jax.jit(grads).trace(*args).lower(lowering_platforms=("cpu",)).as_text()
    found = re.findall(r"custom_call @(jgg_\w+)\(.* : \((.*)\) -> (.*)", text)
    rows = f"{tokens * K}x{d}xf32"  # y, and the rows of dx, which are products of their own
    assert sorted(name for name, *_ in found) == ["jgg_mm"] * 4 + ["jgg_wgrad"] * 2
    assert sum(f"tensor<{tokens}x{d}xf32>" in operands for _, operands, _ in found) == 4
    assert not any(rows in operands for _, operands, _ in found)
    assert sum(rows in results for *_, results in found) == 2


def test_vmap_is_composed():
    x = array(2, T, D)
    assert names(jax.vmap(jgg.dispatch, (0, None)), x, routing()) == []


def test_weights_of_dispatch(rng):
    """As rows times weights; the derivatives are those of that."""
    from jax_groupgemm._moe.permute import dispatched

    r = jgg.route(jnp.asarray(rng.integers(-1, E + 1, (T, K)), jnp.int32), E)
    x, weight = oracle.random(rng, (T, D)), oracle.random(rng, (T, K))
    pair = np.maximum(np.asarray(r.order), 0)

    def plain(x, weight):
        rows = x[pair // K] * weight.reshape(-1)[pair][:, None]
        return jnp.where(r.order[:, None] >= 0, rows, 0)

    ct = oracle.random(rng, (T * K, D))
    got, pull = jax.vjp(lambda x, w: dispatched(x, r, w), x, weight)
    want, reference = jax.vjp(plain, x, weight)
    np.testing.assert_array_equal(got, want)
    for one, other in zip(pull(ct), reference(ct), strict=True):
        oracle.assert_close(one, other)


def test_the_cost_of_known_routings(rng):
    """Sizes that follow from a concrete index are known."""
    index = np.full((T, K), -1, np.int32)
    index[:5] = 1
    x, up = array(T, D, dtype="float32"), array(E, D, 8, dtype="float32")

    def product(x, up):
        r = jgg.route(index, E)
        return jgg.grouped_mm(jgg.dispatch(x, r), up, r.group_sizes)

    assert jgg.cost.of(product, x, up).flops == 2 * 5 * K * D * 8


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("transpose_w", [False, True])
def test_a_router_of_few_tokens(transpose_w):
    """One call: operands as they are, any leading axes, one batch; gradients are those of parts."""
    choose = functools.partial(jgg.router.choose_for, top_k=K, transpose_w=transpose_w)
    w, of_w = (array(8, 16), "8x16xbf16") if transpose_w else (array(16, 8), "16x8xbf16")
    results = ["6x3xi32", "6x3xf32", "6x8xf32"]
    for x, of_x in ((array(2, 3, 16), "bf16"), (array(6, 16, dtype="float16"), "f16")):
        assert calls(choose, x, w) == [("jgg_moe_router", [f"6x16x{of_x}", of_w], results)]
    biased = lambda x, w, a, b: choose(x, w, logit_bias=a, bias=b, scores="sigmoid")[0][:2]
    both = array(8, dtype="float16"), array(8, dtype="float32")
    operands = ["6x16xf32", of_w, "8xf32", "8xf32"]
    x = array(6, 16, dtype="float32")
    assert calls(biased, x, w, *both) == [("jgg_moe_router", operands, results)]
    batch = jax.vmap(choose, (1, None))
    assert calls(batch, array(2, 3, 16), w) == [("jgg_moe_router", ["6x16xbf16", of_w], results)]
    loss = lambda x, w: choose(x, w)[0].weight.sum()
    assert names(jax.grad(loss, (0, 1)), x, w) == ["jgg_moe_top_k"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("tokens", "d", "experts", "w_dtype"),
    [(9, 16, 8, "float32"), (3, 12, 8, "float32"), (3, 16, 6, "float32"), (3, 16, 8, "float16"),
     (3, 16384, 128, "float32"), (3, 64, 516, "float32")],
)  # fmt: skip
def test_no_kernel_has_the_router(tokens, d, experts, w_dtype):
    operands = array(tokens, d), array(d, experts, dtype=w_dtype)
    choose = functools.partial(jgg.router.choose_for, top_k=K)
    assert names(choose, *operands) == ["jgg_moe_top_k"]


def test_a_router_for_gpus_that_are_not_here():
    choose = functools.partial(jgg.router.choose_for, top_k=K)
    assert names(choose, array(3, 16), array(16, 8)) == ["jgg_moe_top_k"]
