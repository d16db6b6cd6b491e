"""Where a layer of a few tokens is lowered to one call for CUDA."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from test_moe_lowering import array, calls, names

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose, extension, problems

E, D, F = 6, 192, 128


def weights(gated=True, mode="nvfp4"):
    up, down = jnp.ones((E, F * (1 + gated), D)), jnp.ones((E, D, F))
    return [jgg.prepack(jgg.quantize(w, mode=mode)) for w in (up, down)]


def arguments(tokens=2, k=3, dtype="bfloat16", index="int32", packed=None):
    up, down = packed or weights()
    index, weight = array(tokens, k, dtype=index), array(tokens, k)
    return array(tokens, D, dtype=dtype), up, down, index, weight


def test_operands():
    """Index and offset as they are; weights in float32."""
    biases = {"up_bias": jnp.ones((E, 2 * F)), "down_bias": jnp.ones((E, D))}
    layer = lambda *a: jgg.moe_mlp(*a, expert_offset=jnp.int32(2), **biases)
    *_, (name, operands, results) = calls(layer, *arguments())
    assert name == "jgg_moe_few_tokens"
    assert operands[0] == "2x192xbf16"
    assert operands[5:8] == ["2x3xi32", "2x3xf32", "i32"]
    assert operands[8:] == ["6x256xf32", "6x192xf32"]
    assert results == ["2x192xbf16", "6x128xbf16", "1x192xf32"]


@pytest.mark.parametrize(
    ("activation", "gated"), [("swiglu", True), ("swiglu_oai", True), ("relu2", False)]
)
def test_few_tokens(activation, gated):
    layer = lambda *a: jgg.moe_mlp(*a, activation=activation)
    packed = weights(gated)
    assert names(layer, *arguments(packed=packed)) == ["jgg_moe_route", "jgg_moe_few_tokens"]
    for few in (
        {"tokens": 4, "k": 8}, {"tokens": 8, "k": 8}, {"tokens": 64, "k": 1}, {"index": "uint8"},
    ):  # fmt: skip
        assert names(layer, *arguments(packed=packed, **few))[-1] == "jgg_moe_few_tokens"
    for others in (
        {"tokens": 13, "k": 5}, {"tokens": 1, "k": 9}, {"tokens": 0}, {"dtype": "float32"},
    ):  # fmt: skip
        assert "jgg_moe_few_tokens" not in names(layer, *arguments(packed=packed, **others))


def test_fp8():
    """Blocks become scales of every row and 128 k. As they are stored they have no kernel."""
    down = jgg.quantize(jnp.ones((E, 256, 256)), mode="fp8", contract=-1)
    up = jgg.quantize(jnp.ones((E, 512, 256)), mode="fp8")
    packed = [jgg.prepack(w, strict=True) for w in (up, down)]
    *_, (name, operands, _) = calls(
        jgg.moe_mlp, array(2, 256), *packed, array(2, 3, dtype="int32"), array(2, 3)
    )
    assert name == "jgg_moe_few_tokens"
    assert operands[1:5] == ["6x8x4x1024xui32", "6x8x2x64xui32", "6x4x4x1024xui32", "6x4x2x64xui32"]
    stored = names(jgg.moe_mlp, array(2, 256), up, down, array(2, 3, dtype="int32"), array(2, 3))
    assert stored == ["jgg_moe_route", "jgg_moe_dispatch", "jgg_moe_combine"]


def test_neither_other_weights_nor_other_kernels():
    stored = [jgg.quantize(jnp.ones(s), mode="nvfp4") for s in ((E, 2 * F, D), (E, D, F))]
    assert "jgg_moe_few_tokens" not in names(jgg.moe_mlp, *arguments(packed=stored))
    mixed = [weights()[0], stored[1]]
    assert "jgg_moe_few_tokens" not in names(jgg.moe_mlp, *arguments(packed=mixed))
    layer = lambda *a: jgg.moe_mlp(*a, implementation="reference")
    assert "jgg_moe_few_tokens" not in names(layer, *arguments())


def test_its_scales_are_bfloat16():
    """Those of float16 are for float16 tokens, which the kernel does not take."""
    ones = jnp.ones((E, 2 * F, D)), jnp.ones((E, D, F))
    of = lambda dtype: [jgg.prepack(jgg.quantize(w.astype(dtype)), strict=True) for w in ones]
    (up, down), (half_up, half_down) = of("bfloat16"), of("float16")
    assert "jgg_moe_few_tokens" in names(jgg.moe_mlp, *arguments(packed=(up, down)))
    for packed in ((half_up, half_down), (up, half_down), (half_up, down)):
        for dtype in ("bfloat16", "float16"):
            found = names(jgg.moe_mlp, *arguments(packed=packed, dtype=dtype))
            assert "jgg_moe_few_tokens" not in found


def test_why_not():
    """Rows have to fit shared memory: as many as tokens, or as a token has choices, up to 8."""
    problem = extension.rules().moe_few_tokens_problem
    few = {"pairs": 64, "choices": 8, "width": 12288, "packed": True}
    assert problem(**few) is None
    assert problem(**few | {"pairs": 2, "choices": 2, "width": 49152}) is None
    assert problem(**few | {"pairs": 64, "choices": 1}) is None
    for more in (
        {"pairs": 65},
        {"choices": 9},
        {"width": 12352},
        {"pairs": 2, "choices": 2, "width": 49216},
        {"pairs": 64, "choices": 1, "width": 12352},
        {"packed": False},
    ):
        assert problem(**few | more).startswith("needs ")


def test_where_down_is_by_groups():
    """Where many pairs meet few experts, or large ones. The call has a workspace for it."""
    rows = extension.rules().moe_few_term_rows
    qwen, gpt_oss = {"experts": 128, "matrix": 2048 * 768}, {"experts": 32, "matrix": 2880**2}
    assert [rows(pairs=p, **qwen) for p in (8, 32, 64, 72)] == [1, 1, 64, 1]
    assert [rows(pairs=p, **gpt_oss) for p in (4, 8, 16, 64)] == [1, 1, 16, 64]
    assert rows(pairs=64, experts=2048, matrix=2**24) == 1
    down = jgg.quantize(jnp.ones((2, 1024, 1088)), mode="nvfp4")
    up = jgg.quantize(jnp.ones((2, 2176, 1024)), mode="nvfp4")
    packed = [jgg.prepack(w, strict=True) for w in (up, down)]
    index, weight = array(32, 2, dtype="int32"), array(32, 2)
    *_, (name, _, results) = calls(jgg.moe_mlp, array(32, 1024), *packed, index, weight)
    assert name == "jgg_moe_few_tokens"
    assert results == ["32x1024xbf16", "64x1088xbf16", "64x1024xf32"]


def test_large_weights_are_left_to_products():
    moe = problems.Moe(
        op="few_tokens", platform="cuda", dtypes=("bfloat16",), pairs=16, d=2048, matrix=2**22,
        packed=True,
    )  # fmt: skip
    assert choose.choose(moe) is not None
    assert choose.choose(dataclasses.replace(moe, matrix=2**23 + 64)) is None


def test_transformations():
    """A batch is a layer of more tokens, and gradients are composed."""
    x, up, down, index, weight = arguments()
    batch = lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype)
    layer = jax.vmap(lambda x, index, weight: jgg.moe_mlp(x, up, down, index, weight))
    assert "jgg_moe_few_tokens" in names(layer, batch(x), batch(index), batch(weight))
    each = jax.vmap(lambda x, up, *pairs: jgg.moe_mlp(x, up, down, *pairs), (0, 0, None, None))
    ups = jax.tree.map(batch, up)
    assert "jgg_moe_few_tokens" not in names(each, batch(x), ups, index, weight)
    loss = lambda x, weight, index: jgg.moe_mlp(x, up, down, index, weight).sum()
    assert "jgg_moe_few_tokens" not in names(jax.grad(loss, (0, 1)), x, weight, index)
