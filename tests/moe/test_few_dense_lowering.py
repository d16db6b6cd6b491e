"""Where a layer of a few tokens with 16-bit weights is lowered to one call for CUDA."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_moe_lowering import array, calls, names

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose, extension, problems

E, D, F = 64, 192, 128
CALL = "jgg_moe_few_dense"


def arguments(tokens=2, k=3, dtype="bfloat16", *, gated=True, transpose_w=False, weights=None,
              index="int32", d=D, f=F, e=E):  # fmt: skip
    """x, up, down, expert_index, expert_weight."""
    up, down = (d, f * (1 + gated)), (f, d)
    of = lambda shape: array(e, *shape[:: -1 if transpose_w else 1], dtype=weights or dtype)
    pairs = array(tokens, k, dtype=index), array(tokens, k)
    return array(tokens, d, dtype=dtype), of(up), of(down), *pairs


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_operands(dtype, transpose_w):
    """Index and offset as they are; weights of pairs in float32."""
    biases = {"up_bias": jnp.ones((E, 2 * F)), "down_bias": jnp.ones((E, D))}
    layer = lambda *a: jgg.moe_mlp(
        *a, expert_offset=jnp.int32(2), transpose_w=transpose_w, **biases,
        preferred_element_type="float32",
    )  # fmt: skip
    found = calls(layer, *arguments(dtype=dtype, transpose_w=transpose_w))
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    up, down = ("256x192", "192x128") if transpose_w else ("192x256", "128x192")
    operands = [f"2x192x{short}", f"64x{up}x{short}", f"64x{down}x{short}"]
    operands += ["2x3xi32", "2x3xf32", "i32", "64x256xf32", "64x192xf32"]
    assert found[-1] == (CALL, operands, ["2x192xf32", f"6x128x{short}"])


@pytest.mark.parametrize(
    ("activation", "gated"), [("swiglu", True), ("swiglu_oai", True), ("relu2", False)]
)
def test_few_tokens(activation, gated):
    layer = lambda *a: jgg.moe_mlp(*a, activation=activation)
    few: list[dict[str, Any]] = [
        {}, {"tokens": 8, "k": 8}, {"tokens": 64, "k": 1}, {"index": "uint8"},
        {"d": 184, "f": 136},
    ]  # fmt: skip
    for of in few:
        assert names(layer, *arguments(gated=gated, **of)) == ["jgg_moe_route", CALL]
    others: list[dict[str, Any]] = [
        {"tokens": 13, "k": 5}, {"tokens": 1, "k": 9}, {"tokens": 0}, {"dtype": "float32"},
        {"weights": "float32"}, {"d": 188}, {"f": 132},
    ]  # fmt: skip
    for of in others:
        assert CALL not in names(layer, *arguments(gated=gated, **of))


def test_other_kernels():
    """A name is that of the products' kernel; this one has the name of those of every GPU."""
    layer = lambda name: names(lambda *a: jgg.moe_mlp(*a, implementation=name), *arguments())
    assert layer("sm80")[-1] == CALL
    for name in ("sm90", "reference", "composed"):
        assert CALL not in layer(name)


def test_gate_and_up_as_an_axis():
    x, up, down, *pairs = arguments()
    up = array(E, D, 2, F)
    assert names(jgg.moe_mlp, x, up, down, *pairs)[-1] == CALL


def test_why_not():
    """Rows have to fit shared memory: as many as tokens, or as a token has choices, up to 8."""
    problem = extension.rules().moe_few_dense_problem
    few = {"pairs": 64, "choices": 8, "d": 6144, "f": 6144}
    assert problem(**few) is None
    assert problem(**few | {"pairs": 2, "choices": 2, "d": 49152, "f": 24576}) is None
    assert problem(**few | {"choices": 1, "f": 49152}) is None
    for more in (
        {"pairs": 65},
        {"choices": 9},
        {"d": 6152},
        {"f": 6152},
        {"d": 100},
        {"f": 100},
        {"pairs": 2, "choices": 2, "d": 49160},
    ):
        assert problem(**few | more).startswith("needs ")


def test_larger_layers_are_left_to_products():
    moe = problems.Moe(
        op="few_tokens", platform="cuda", dtypes=("bfloat16",) * 3, pairs=8, choices=4, d=2880,
        f=2880, matrix=2880**2, experts=32, dense=True, activation="swiglu",
    )  # fmt: skip
    plan = choose.choose(moe)
    assert plan is not None
    assert plan.target == CALL
    assert choose.choose(dataclasses.replace(moe, pairs=16)) is None


def test_transformations():
    """A batch is a layer of more tokens, and gradients are composed."""
    x, up, down, index, weight = arguments()
    batch = lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype)
    layer = jax.vmap(jgg.moe_mlp, (0, None, None, 0, 0))
    found = calls(layer, batch(x), up, down, batch(index), batch(weight))
    assert found[-1][0] == CALL
    assert found[-1][1][0] == "6x192xbf16"
    each = jax.vmap(jgg.moe_mlp, (0, 0, None, None, None))
    assert CALL not in names(each, batch(x), batch(up), down, index, weight)
    loss = lambda x, up, weight, down, index: jgg.moe_mlp(x, up, down, index, weight).sum()
    assert CALL not in names(jax.grad(loss, (0, 1, 2)), x, up, weight, down, index)
