"""Where a layer of some tokens is lowered to one call for a Hopper GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_few_dense_lowering import arguments
from test_few_tokens_lowering import weights
from test_moe_lowering import array, calls, names

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension

pytestmark = pytest.mark.usefixtures("hopper")
E, D, F = 64, 192, 128
DENSE, PACKED = "jgg_moe_some_dense", "jgg_moe_some_tokens"


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_operands(dtype, transpose_w):
    """Index and offset as they are; weights of pairs in float32; six workspaces."""
    layer = lambda *a: jgg.moe_mlp(
        *a, expert_offset=jnp.int32(2), transpose_w=transpose_w, preferred_element_type="float32"
    )
    found = calls(layer, *arguments(32, 4, dtype=dtype, transpose_w=transpose_w))
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    up, down = ("256x192", "192x128") if transpose_w else ("192x256", "128x192")
    operands = [f"32x192x{short}", f"64x{up}x{short}", f"64x{down}x{short}"]
    operands += ["32x4xi32", "32x4xf32", "i32"]
    handed = [f"128x{columns}x{short}" for columns in (128, 192, 192)]
    assert found[-1] == (DENSE, operands, ["32x192xf32", *handed, "32x4xi32", "64xi32", "129xi32"])


def test_packed_operands():
    x, index = array(20, D, dtype="bfloat16"), array(20, 4, dtype="int32")
    *_, (name, operands, results) = calls(jgg.moe_mlp, x, *weights(), index, array(20, 4))
    assert name == PACKED
    assert [operands[0], *operands[5:7]] == ["20x192xbf16", "20x4xi32", "20x4xf32"]
    assert len(operands) == 7
    assert [results[0], results[-1]] == ["20x192xbf16", "81xi32"]


def test_some_tokens():
    some: list[dict[str, Any]] = [
        {"tokens": 64, "k": 8}, {"tokens": 13, "k": 5}, {"tokens": 1024, "k": 1},
        {"tokens": 32, "k": 32}, {"tokens": 16, "k": 5, "index": "uint8"},
    ]  # fmt: skip
    for of in some:
        assert names(jgg.moe_mlp, *arguments(**of)) == ["jgg_moe_route", DENSE]
    others: list[dict[str, Any]] = [
        {"tokens": 8, "k": 8}, {"tokens": 205, "k": 5}, {"tokens": 16, "k": 33},
        {"tokens": 64, "k": 8, "dtype": "float32"}, {"tokens": 64, "k": 8, "e": 31},
        {"tokens": 64, "k": 8, "d": 188},
    ]  # fmt: skip
    for of in others:
        assert DENSE not in names(jgg.moe_mlp, *arguments(**of))


def test_other_layers():
    """Biases, plain activations and other kernels are left to products and steps."""
    some = arguments(64, 8)
    bias = {"down_bias": jnp.ones((E, D))}
    assert DENSE not in names(lambda *a: jgg.moe_mlp(*a, **bias), *some)
    plain = arguments(64, 8, gated=False)
    assert DENSE not in names(lambda *a: jgg.moe_mlp(*a, activation="relu2"), *plain)
    layer = lambda name: names(lambda *a: jgg.moe_mlp(*a, implementation=name), *some)
    assert layer("sm90")[-1] == DENSE
    for name in ("sm80", "reference", "composed"):
        assert DENSE not in layer(name)
    loss = lambda x, up, weight, down, index: jgg.moe_mlp(x, up, down, index, weight).sum()
    x, up, down, index, weight = some
    assert DENSE not in names(jax.grad(loss, (0, 1, 2)), x, up, weight, down, index)


def test_other_gpus(monkeypatch):
    monkeypatch.setattr(extension, "live_capabilities", lambda: (80,))
    assert DENSE not in names(lambda *a: jgg.moe_mlp(*a), *arguments(64, 8))


def test_why_not():
    problem = extension.rules().moe_some_tokens_problem
    some = {"pairs": 1024, "choices": 32, "experts": 1024, "d": 2048, "f": 768}
    assert problem(**some) is None
    for more in (
        {"pairs": 1025},
        {"choices": 33},
        {"experts": 1025},
        {"d": 100},
        {"f": 100},
    ):
        assert problem(**some | more).startswith("needs ")
