"""``moe_mlp`` with weights of every quantized format, against float64 numpy on what they stand
for."""

import dataclasses

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device

T, K, E, D, F = 23, 3, 5, 64, 96

FORMATS = {  # mode, bits and the size of a group
    "nvfp4": ("nvfp4", 4, 16),
    "mxfp4": ("mxfp4", 4, 32),
    "mxfp8": ("mxfp8", 8, 32),
    "affine 4": ("affine", 4, 32),
    "affine 8": ("affine", 8, 32),
    "fp8": ("fp8", 8, (32, 32)),
}
BOTH = pytest.mark.parametrize("implementation", [None, "composed"])


def quantized(rng, shape, name, dtype):
    """Random codes and scales; of nvfp4 a scale for each expert besides."""
    mode, bits, size = FORMATS[name]
    if mode == "fp8":
        values = oracle.random(rng, shape, dtype)
        return jgg.quantize(values, mode=mode, block=size, contract=-1)
    scale = jnp.asarray(rng.uniform(0.5, 2, E), "float32") if mode == "nvfp4" else None
    return oracle.random_quantized(rng, shape, mode, bits, size, dtype, scale)


def values(q, dtype):
    """What products multiply with."""
    return oracle.f64(jgg.dequantize(q, dtype)) if q.mode == "fp8" else oracle.scaled(q, dtype)


def problem(rng, name, *, dtype="float32", transpose_w=True):
    """x, both weights, index, expert_weight, both biases and a cotangent."""
    of = lambda *shape: oracle.random(rng, shape, dtype)
    shapes = ((E, 2 * F, D), (E, D, F)) if transpose_w else ((E, D, 2 * F), (E, F, D))
    up, down = (quantized(rng, shape, name, dtype) for shape in shapes)
    index = rng.integers(-1, E + 1, (T, K))
    index = jnp.asarray(np.where(index == 3, 1, index), jnp.int32)  # an expert without tokens
    return of(T, D), up, down, index, oracle.random(rng, (T, K)), of(E, 2 * F), of(E, D), of(T, D)


def expected(x, up, down, index, weight, up_bias, down_bias, ct, *, transpose_w=True):
    """The result and all gradients, those of weights in the layout of the weights."""
    turned = lambda w: w.swapaxes(1, 2) if transpose_w else w
    plain = [turned(values(q, x.dtype)) for q in (up, down)]
    biases = {"up_bias": up_bias, "down_bias": down_bias}
    out, grads = moe_oracle.moe_mlp(x, *plain, index, weight, oracle.f64(ct), **biases)
    dx, dup, ddown, *others = grads
    return out, dx, turned(dup), turned(ddown), *others


@BOTH
@pytest.mark.parametrize("transpose_w", [True, False])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.one_in(4)
def test_values_and_gradients(rng, name, transpose_w, implementation):
    """Of tokens, ``expert_weight`` and biases."""
    args = problem(rng, name, transpose_w=transpose_w)
    x, up, down, index, weight, *biases, ct = args

    @jax.jit
    def step(x, up, down, weight, up_bias, down_bias):
        def layer(x, weight, up_bias, down_bias):
            given = {"up_bias": up_bias, "down_bias": down_bias, "transpose_w": transpose_w}
            return jgg.moe_mlp(x, up, down, index, weight, implementation=implementation, **given)

        out, pull = jax.vjp(layer, x, weight, up_bias, down_bias)
        return out, *pull(ct)

    got = step(x, up, down, weight, *biases)
    want = expected(*args, transpose_w=transpose_w)
    for one, other in zip(got, (*want[:2], *want[4:]), strict=True):
        oracle.assert_close(one, other, tolerance=2e-6)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.weekly
def test_halves(rng, name):
    """Every rounding is of 2^-8: of h, the activation, y's rows and the result."""
    x, up, down, index, weight, *biases, ct = args = problem(rng, name, dtype="bfloat16")
    given = dict(zip(("up_bias", "down_bias"), biases, strict=True))

    @jax.jit
    def step(x, up, down):
        out, pull = jax.vjp(lambda x: jgg.moe_mlp(x, up, down, index, weight, **given), x)
        return out, *pull(ct)

    for one, other in zip(step(x, up, down), expected(*args), strict=False):
        assert one.dtype == "bfloat16"
        oracle.assert_close(one, other, tolerance=0.02)


def of_leaves(q, dw):
    """The gradients of scales and biases, of that of the values ``code * scale + bias``."""
    groups = (*q.scales.shape, q.group_size)
    dw, codes = dw.reshape(groups), oracle.codes(q).reshape(groups)
    return (dw * codes).sum(-1), dw.sum(-1)


@BOTH
@pytest.mark.parametrize("transpose_w", [True, False])
@pytest.mark.parametrize("name", ["affine 4", "affine 8"])
@pytest.mark.one_in(4)
def test_gradients_of_scales_and_biases(rng, name, transpose_w, implementation):
    """Of both weights; an expert without tokens has zeros."""
    args = problem(rng, name, transpose_w=transpose_w)
    x, up, down, index, weight, up_bias, down_bias, ct = args

    @jax.jit
    def gradients(*leaves):
        def layer(*leaves):
            halves = zip((up, down), (leaves[:2], leaves[2:]), strict=True)
            weights = (dataclasses.replace(q, scales=s, biases=b) for q, (s, b) in halves)
            return jgg.moe_mlp(
                x, *weights, index, weight, up_bias=up_bias, down_bias=down_bias,
                transpose_w=transpose_w, implementation=implementation,
            )  # fmt: skip

        return jax.vjp(layer, *leaves)[1](ct)

    got = gradients(up.scales, up.biases, down.scales, down.biases)
    dup, ddown = expected(*args, transpose_w=transpose_w)[2:4]
    for one, want in zip(got, (*of_leaves(up, dup), *of_leaves(down, ddown)), strict=True):
        assert one.dtype == "float32"
        assert not np.asarray(one)[3].any()
        oracle.assert_close(one, want, tolerance=3e-6)
