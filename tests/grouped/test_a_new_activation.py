"""An activation is an entry of the list: everything else asks it."""

import re

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import activation as fp8_activation
from jax_groupgemm._grouped import activations
from jax_groupgemm._grouped.activations import Definition

GROUPS, K, N, T = 3, 16, 24, 17
SIZES = np.array([5, 0, 9])
NEW = {
    "hat": Definition(lambda y: y * jnp.exp(-y * y)),
    "hat_glu": Definition(lambda gate, up: gate * jnp.exp(-gate * gate) * up, gated=True),
}
EACH = pytest.mark.parametrize("name", NEW)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, definition in NEW.items():
        monkeypatch.setitem(activations.ACTIVATIONS, name, definition)


def apply(y, name):
    if not NEW[name].gated:
        return y * np.exp(-y * y)
    gate, up = np.split(y, 2, axis=-1)
    return gate * np.exp(-gate * gate) * up


def operands(rng, dtype="float32"):
    return oracle.random(rng, (T, K), dtype), oracle.random(rng, (GROUPS, K, N), dtype)


@EACH
def test_products_and_gradients(rng, name):
    x, w = operands(rng)
    f = lambda x, w: jgg.grouped_mm(x, w, SIZES, activation=name)
    oracle.assert_close(f(x, w), apply(oracle.grouped_mm(x, w, SIZES), name))
    composed = lambda x, w: activations.activate(jgg.grouped_mm(x, w, SIZES), name)
    got, want = (
        jax.grad(lambda x, w, of=of: (of(x, w) ** 2).sum(), (0, 1))(x, w) for of in (f, composed)
    )
    jax.tree.map(oracle.assert_close, got, want)


@EACH
def test_a_layer_and_its_gradients(rng, name):
    x, up = operands(rng)
    down = oracle.random(rng, (GROUPS, N // (2 if NEW[name].gated else 1), K))
    index = jnp.asarray(rng.integers(0, GROUPS, (T, 2)))
    weight = oracle.random(rng, (T, 2))
    layer = lambda x, up, down: jgg.moe_mlp(x, up, down, index, weight, activation=name)

    def want(x, up, down):
        each = [activations.activate(x @ up[e], name) @ down[e] for e in range(GROUPS)]
        chosen = jnp.stack(each)[index, jnp.arange(T)[:, None]]
        return (chosen * weight[..., None]).sum(1)

    oracle.assert_close(layer(x, up, down), want(x, up, down))
    got, wanted = (
        jax.grad(lambda *a, of=of: (of(*a) ** 2).sum(), (0, 1, 2))(x, up, down)
        for of in (layer, want)
    )
    jax.tree.map(oracle.assert_close, got, wanted)


def calls(f, *args):
    """Names of custom calls for CUDA, of which none has the activation's name."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    lines = [line for line in text.splitlines() if "custom_call @jgg_" in line]
    assert not any("hat" in line for line in lines)
    return [re.search(r"@(jgg_\w+)", line)[1] for line in lines]  # pyright: ignore


@EACH
@pytest.mark.parametrize("implementation", [None, "sm80"])
def test_products_are_kernels(rng, name, implementation):
    """The activation is a program behind them, and so is its backward pass."""
    x, w = operands(rng, "bfloat16")
    f = lambda x, w: jgg.grouped_mm(x, w, SIZES, activation=name, implementation=implementation)
    assert calls(f, x, w) == ["jgg_mm"]
    backward = calls(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)), x, w)
    assert sorted(backward) == ["jgg_mm", "jgg_mm", "jgg_wgrad"]


@EACH
def test_quantized_products_are_kernels(rng, name):
    q = jgg.quantize(oracle.random(rng, (GROUPS, 32, 64)), contract=-1)
    x = oracle.random(rng, (T, 64), "bfloat16")
    assert calls(lambda x: jgg.grouped_qmm(x, q, SIZES, activation=name), x) == ["jgg_qmm"]


@EACH
def test_no_kernel_has_a_whole_layer(name):
    """Neither that of a few tokens, nor those that quantize an activation to FP8."""
    d, f = 192, 128
    columns = f * (2 if NEW[name].gated else 1)
    up, down = (
        jgg.prepack(jgg.quantize(jnp.ones(s), mode="nvfp4"))
        for s in ((GROUPS, columns, d), (GROUPS, d, f))
    )
    x, index, weight = jnp.ones((2, d), jnp.bfloat16), jnp.ones((2, 2), jnp.int32), jnp.ones((2, 2))
    layer = lambda x: jgg.moe_mlp(x, up, down, index, weight, activation=name)
    found = calls(layer, x)
    assert found.count("jgg_qmm_packed") == 2
    assert "jgg_moe_few_tokens" not in found
    h = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    assert not fp8_activation.takes("cuda", h, name)


def test_messages(rng):
    x, w = operands(rng)
    with pytest.raises(ValueError, match=f"{moe_oracle.NAMES}, 'hat', 'hat_glu'"):
        jgg.grouped_mm(x, w, SIZES, activation="hut")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="activation='hat_glu' takes gate and up as the two halve"):
        jgg.grouped_mm(x, w[..., :-1], SIZES, activation="hat_glu")  # pyright: ignore
