"""Codes of weights for both products, of one read: where they are made, what is lowered to one
call, and on a GPU what it makes, byte for byte."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fp8_quantize_cases import SQUARES_BOTH, edges
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lowered_calls import text_of
from meshes import mesh_of, needs_two_devices

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import convert

TARGET = SQUARES_BOTH
ONE, BOTH = "along one axis", "along both"
TILE = (128, 128)
KINDS = pytest.mark.parametrize("axis", [-1, -2])


def both(x, axis=-1, block=TILE):
    return convert.quantized_both("test", x, block=block, axis=axis)


def in_two_steps(x, axis=-1, block=TILE):
    q = convert.quantized("test", x, block=block, axis=axis)
    q = convert.made(q.weight, q.scales, block=block)
    return q, convert.exchanged(q)


def counts(text: str) -> dict[str, int]:
    """How often weights are quantized: both ways, and one way; x has two axes."""
    weights = re.findall(r"custom_call @jgg_fp8_quantize\(.*?: \(tensor<[2-9]x", text)
    names = [BOTH if TARGET in call else ONE for call in weights]
    return {name: names.count(name) for name in sorted(set(names))}


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@KINDS
@pytest.mark.parametrize("block", [TILE, (32, 32)])
@pytest.mark.parametrize("shape", [(2, 144, 272), (3, 20, 41)])
def test_composition(rng, shape, block, axis):
    x = jnp.asarray(edges(rng, "bfloat16", shape))
    run = lambda f: jax.jit(functools.partial(f, axis=axis, block=block))(x)
    same(run(both), run(in_two_steps))


@needs_two_devices
@KINDS
def test_explicit_mesh(rng, axis):
    x = jnp.asarray(oracle.random(rng, (2, 256, 128)))
    want = jax.jit(functools.partial(both, axis=axis))(x)
    with jax.set_mesh(mesh_of((2,), ("m",), jax.sharding.AxisType.Explicit)) as mesh:
        for spec in (P("m"), P(None, "m"), P(None, None, "m")):
            placed = jax.device_put(x, NamedSharding(mesh or jax.sharding.get_mesh(), spec))
            same(jax.jit(functools.partial(both, axis=axis))(placed), want)


# ---- where it is taken ----


@KINDS
def test_call(axis):
    text = text_of(functools.partial(both, axis=axis), jnp.zeros((2, 3, 48, 208), jnp.float16))
    (line,) = [line for line in text.splitlines() if "@jgg_fp8_quantize(" in line]
    assert TARGET in line
    operands, results = line.rsplit(" : (", 1)[1].split(" -> ")
    operands = re.findall(r"tensor<([^>]*)>", operands)
    assert operands == ["6x48x208xf16", "0xi32", "0xui32", "0xi32"]
    assert re.findall(r"tensor<([^>]*)>", results) == [
        "6x48x208xf8E4M3FN", "6x1x2xf32", "6x208x48xf8E4M3FN", "6x2x1xf32",
        "0xi32",
    ]  # fmt: skip


def test_not_taken():
    """Elsewhere, of nothing, of other blocks and shapes, and where XLA cuts arrays."""
    x = jnp.zeros((2, 48, 64))
    assert TARGET in text_of(both, x)
    assert TARGET not in text_of(both, x, platform="cpu")
    assert TARGET not in text_of(both, x[:0])
    assert TARGET not in text_of(functools.partial(both, block=(64, 64)), x)
    for cut in (x[:, :40], x[:, :, :40], x[:, :, :60]):
        assert TARGET not in text_of(both, cut)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.local_devices()[:2])
    assert TARGET not in text_of(both, jax.device_put(x, NamedSharding(mesh, P("x"))))


def test_batches():
    """Matrices are one call, whichever axes vmap adds."""
    text = text_of(jax.vmap(jax.vmap(both)), jnp.zeros((2, 3, 48, 64)))
    (line,) = [line for line in text.splitlines() if "@jgg_fp8_quantize(" in line]
    assert TARGET in line
    assert "tensor<6x48x64xf32>" in line


def test_one_of_both():
    """What nobody reads is not made, in either of two passes."""
    x = jnp.zeros((2, 48, 64))
    first = jax.checkpoint(lambda x: both(x)[0].weight.astype("float32").sum() * x.sum())
    assert counts(text_of(jax.value_and_grad(first), x)) == {ONE: 2}


def linear(x, up, down):
    sizes, (tokens, _) = jnp.array([10, 0, 20, 2]), x.shape
    h = jgg.fp8_grouped_linear(x, up.swapaxes(1, 2), sizes)[:, : down.shape[1]]
    assert h.shape[0] == tokens
    return jgg.fp8_grouped_linear(h, down.swapaxes(1, 2), sizes)


def layer(x, up, down, **more):
    index, weight = jnp.zeros((x.shape[0], 2), int), jnp.ones((x.shape[0], 2))
    return jgg.moe_mlp(x, up, down, index, weight, recipe=jgg.FP8Recipe(), **more)


def biased(x, up, down):
    return layer(x, up, down, down_bias=jnp.zeros(down.shape[::2], x.dtype))


def weights(dtype="bfloat16"):
    shape = lambda *s: jax.ShapeDtypeStruct(s, dtype)
    return shape(32, 128), shape(4, 128, 512), shape(4, 256, 128)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("f", [linear, layer, biased])
def test_layers(f):
    """Without a gradient there is nothing to transpose; with one both come of one read. Where
    ``jax.checkpoint`` computes all twice, its first pass makes one."""
    loss = lambda f: lambda *args: jnp.sin(f(*args).astype("float32")).sum()
    step = lambda f, of: jax.value_and_grad(loss(f), of)
    assert counts(text_of(f, *weights())) == {ONE: 2}
    assert counts(text_of(step(f, (0, 1, 2)), *weights())) == {BOTH: 2}
    assert counts(text_of(step(f, (1, 2)), *weights())) == {ONE: 1, BOTH: 1}
    assert counts(text_of(step(f, 2), *weights())) == {ONE: 2}
    again = text_of(step(jax.checkpoint(f), (0, 1, 2)), *weights())
    assert counts(again) == {ONE: 2, BOTH: 2}


@pytest.mark.usefixtures("hopper")
def test_weights_that_are_given():
    """Their codes are transposed where they are read, as they were."""

    def step(x, up, down, codes):
        f = lambda *args: layer(*args, quantized=codes).astype("float32").sum()
        return jax.value_and_grad(f, (0, 1, 2))(x, up, down)

    quantize = lambda *ws: tuple(jgg.quantize(w, mode="fp8", contract=-2) for w in ws)
    x, up, down = weights()
    text = text_of(step, x, up, down, jax.eval_shape(quantize, up, down))
    assert counts(text) == {}
    assert len(re.findall(r"stablehlo.transpose.*f8E4M3FN", text)) == 2


def test_a_transpose_of_what_is_kept_costs_nothing(rng):
    """The product transposes codes that were transposed before: XLA removes both."""
    turned = in_two_steps(jnp.asarray(oracle.random(rng, (2, 256, 128))))[1]

    def read(turned):
        q = jax.jit(convert.exchanged)(turned)
        swap = jax.jit(lambda q: (q.weight.swapaxes(1, 2), q.scales.swapaxes(1, 2)))
        return swap(q)

    text = jax.jit(read).lower(turned).compile().as_text()
    assert "transpose(" not in text
    alone = jax.jit(convert.exchanged).lower(turned).compile().as_text()
    assert "transpose(" in alone or "copy(" in alone  # jax 0.11 transposes by a copy


# ---- on a GPU ----


def same_as_two_steps(x, axis):
    """Here, and on the CPU."""
    f = functools.partial(both, axis=axis)
    assert TARGET in text_of(f, x)
    got = jax.device_get(jax.jit(f)(x))
    same(got, jax.device_get(jax.jit(functools.partial(in_two_steps, axis=axis))(x)))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        same(got, jax.device_get(jax.jit(f)(jax.device_get(x))))


SHAPES = {
    "whole": (2, 256, 384),
    "cut": (3, 272, 400),
    "cut rows": (2, 144, 256),
    "cut columns": (2, 128, 208),
    "one expert": (1, 512, 128),
    "small": (5, 16, 16),
    "two axes": (176, 48),
    "more axes": (2, 2, 144, 48),
}


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes(rng, dtype, shape, axis):
    same_as_two_steps(jnp.asarray(edges(rng, dtype, shape)), axis)


@pytest.mark.gpu
def test_bytes_of_no_expert(rng):
    x = jnp.zeros((0, 128, 256), jnp.bfloat16)
    same(jax.device_get(jax.jit(both)(x)), jax.device_get(jax.jit(in_two_steps)(x)))


@pytest.mark.gpu
def test_bytes_of_many_matrices(rng):
    """More than a grid has along y, so that thread blocks take several."""
    same_as_two_steps(jnp.asarray(oracle.random(rng, (70000, 16, 16), "bfloat16")), -1)


@pytest.mark.gpu
def test_bytes_of_any_bits(rng):
    """Every pair of a bfloat16 and a scale is about as likely as any other."""
    bits = rng.integers(0, 2**16, (2, 1024, 1024)).astype(np.uint16)
    exponents = rng.integers(0, 240, (2, 8, 1, 8, 1)) + rng.integers(0, 15, (2, 8, 128, 8, 128))
    bits = bits & 0x807F | (exponents.reshape(bits.shape) << 7).astype(np.uint16)
    same_as_two_steps(jnp.asarray(bits.view(jnp.bfloat16)), -1)


@pytest.mark.gpu
@pytest.mark.parametrize("f", [linear, layer, biased])
def test_gradients(rng, f):
    """Those of codes that are given, which are transposed."""
    x = oracle.random(rng, (32, 128), "bfloat16")
    up, down = (oracle.random(rng, s, "bfloat16") / 10 for s in ((4, 128, 512), (4, 256, 128)))

    def step(x, up, down):
        out, pull = jax.vjp(f, x, up, down)
        return out, *pull(out)

    got = jax.jit(step)(x, up, down)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "quantized_both", two_steps_of)
        jax.clear_caches()
        want = jax.jit(lambda *args: step(*args))(x, up, down)
    jax.clear_caches()
    same(jax.device_get(got), jax.device_get(want))


def two_steps_of(op, x, *, block, axis):
    del op
    return in_two_steps(x, axis, block)
