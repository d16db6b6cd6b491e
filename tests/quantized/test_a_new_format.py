"""A format is a class and an entry of the list: everything else asks it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._core.float_bits import u32
from jax_groupgemm._quantized import format
from jax_groupgemm._quantized.in_groups import InGroups

GROUPS, N, K = 3, 24, 96


class Centered(InGroups):
    """``(q - 128) * scale``, with a float32 scale for each group of 16 or 48."""

    name, bits, group_sizes, scales = "centered", (8,), (16, 48), ("float32",)

    def dequantized_dtype(self, q):
        return jnp.float32

    def encode(self, groups, global_scale, bits):
        w = groups.astype(jnp.float32)
        scale = jnp.abs(w).max(-1) / 127
        return u32(jnp.round(w / scale[..., None]) + 128), scale

    def decode(self, code, scales, biases, global_scale, dtype):
        return ((code.astype(jnp.float32) - 128) * scales[..., None, None]).astype(dtype)

    def scale_cotangents(self, q, dw):
        found = super().scale_cotangents(q, dw)
        if "scales" in found:
            in_groups = dw.reshape(*dw.shape[:-1], -1, q.group_size)
            found["scales"] = found["scales"] - 128 * in_groups.sum(-1)
        return found


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(format.FORMATS, Centered.name, Centered())


@pytest.fixture
def w(rng):
    return rng.normal(size=(GROUPS, N, K)).astype(np.float32)


def quantized(w, **options):
    return jgg.quantize(jnp.asarray(w), mode="centered", contract=-1, **options)


def test_conversions(w):
    q = quantized(w)
    assert repr(q).startswith("Quantized(mode='centered', bits=8, group_size=16,")
    assert (q.shape, q.scales.shape) == (w.shape, (GROUPS, N, K // 16))
    values = jgg.dequantize(q)
    error = np.abs(values - w).reshape(*q.scales.shape, 16).max(-1)
    assert (error <= 0.51 * q.scales).all()
    by_formula = (np.asarray(q.weight).view(np.uint8).astype(np.float32) - 128).reshape(
        *q.scales.shape, 16
    ) * np.asarray(q.scales)[..., None]
    np.testing.assert_array_equal(values, by_formula.reshape(w.shape))
    assert quantized(w, group_size=48).scales.shape == (GROUPS, N, 2)


@pytest.mark.parametrize("group_size", [16, 48])
def test_products_and_gradients(rng, w, group_size):
    q, sizes = quantized(w, group_size=group_size), jnp.array([5, 0, 9])
    x = jnp.asarray(rng.normal(size=(17, K)), jnp.float32)
    dense = lambda x, values: jgg.grouped_mm(x, values, sizes, transpose_w=True)
    got, want = jgg.grouped_qmm(x, q, sizes), dense(x, jgg.dequantize(q))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

    def loss(x, scales, product):
        w = jgg.Quantized(q.weight, scales, mode="centered", bits=8, group_size=group_size)  # pyright: ignore
        return (product(x, w) ** 2).sum()

    by_codes = lambda x, w: jgg.grouped_qmm(x, w, sizes)
    by_values = lambda x, w: dense(x, jgg.dequantize(w))
    found, expected = (
        jax.grad(loss, (0, 1))(x, q.scales, product) for product in (by_codes, by_values)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
    pairs = jgg.gather_qmm(x[:, None], q, None, jnp.arange(17) % GROUPS)[:, 0]
    one = jax.vmap(lambda x, i: x @ jgg.dequantize(q)[i].T)(x, jnp.arange(17) % GROUPS)
    np.testing.assert_allclose(pairs, one, rtol=1e-5, atol=1e-5)


def test_a_layer(rng):
    up, down = (
        quantized(rng.normal(size=s).astype(np.float32))
        for s in ((GROUPS, 2 * 32, 48), (GROUPS, 48, 32))
    )
    x, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((11, 48), (11, 2)))
    index = jnp.asarray(rng.integers(0, GROUPS, (11, 2)))
    layer = lambda up, down: jgg.moe_mlp(x, up, down, index, weight, transpose_w=True)
    want = layer(jgg.dequantize(up), jgg.dequantize(down))
    np.testing.assert_allclose(layer(up, down), want, rtol=1e-4, atol=1e-4)


def test_no_kernel_is_chosen(w):
    """Handlers that know nothing of a format are not called."""
    x, sizes = jnp.ones((4, K), jnp.bfloat16), jnp.array([1, 2, 1])
    run = lambda w, x: jgg.grouped_qmm(x, quantized(w), sizes)
    text = jax.jit(run).trace(w, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "jgg_q" not in text
    assert "jgg_dequantize" not in text
    q = quantized(w)
    traced = jax.jit(lambda x: jgg.grouped_qmm(x, q, sizes, implementation="sm80")).trace(x)
    with pytest.raises(ValueError, match="reads no codes of mode 'centered'"):
        traced.lower(lowering_platforms=("cuda",))


def test_it_has_no_packed_layout(w):
    q = quantized(w)
    with pytest.warns(UserWarning, match="mode 'centered' has none"):
        assert jgg.prepack(q).layout == "linear"
    words = jnp.zeros((GROUPS, 1, 1, 1024), jnp.uint32)
    by_hand = dataclasses.replace(q, weight=words, scales=words, layout="sm90")
    with pytest.raises(ValueError, match="layout 'sm90' does not exist in mode 'centered'"):
        jgg.dequantize(by_hand)


def test_what_a_packed_format_must_have():
    class Unfinished(Centered, format.PackedFormat):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Unfinished()


def test_messages(w):
    with pytest.raises(ValueError, match="'fp8', 'centered'"):
        jgg.quantize(jnp.asarray(w), mode="centred", contract=-1)
    with pytest.raises(ValueError, match="group_size=32, expected 16 or 48 in mode 'centered'"):
        quantized(w, group_size=32)
    with pytest.raises(ValueError, match="global_scale is for mode 'nvfp4', not 'centered'"):
        quantized(w, global_scale=1.0)
    with pytest.raises(ValueError, match="is for mode 'fp8', not 'centered'"):
        quantized(w, block=(1, 16))
