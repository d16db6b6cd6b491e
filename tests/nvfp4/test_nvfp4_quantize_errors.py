"""What ``nvfp4_quantize`` and the users of its results refuse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from nvfp4_quantize_cases import KEY

import jax_groupgemm as jgg

X, W = jnp.ones((48, 64)), jnp.ones((2, 32, 32))
STATIC = {"mode": "nvfp4", "bits": 4, "group_size": 16}


def zeros(q, **leaves):
    """What ``q`` gives of shapes as an array, with other leaves."""
    return dataclasses.replace(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), q()), **leaves)


@functools.cache
def grouped():
    return jax.eval_shape(lambda: jgg.nvfp4_quantize(X, axis=0, group_sizes=jnp.array([48])))


@functools.cache
def swizzled():
    return jax.eval_shape(lambda: jgg.nvfp4_quantize(X, layout="swizzled"))


ERRORS = [
    (
        lambda: jgg.nvfp4_quantize(X.astype(jnp.int32)), TypeError,
        "jgg.nvfp4_quantize: x must be float32, bfloat16 or float16, got dtype int32",
    ),
    (
        lambda: jgg.nvfp4_quantize(W, axis=0), ValueError,
        "jgg.nvfp4_quantize: axis=0, expected the last axis of x or the one before it, and x has "
        "shape (2, 32, 32)",
    ),
    (
        lambda: jgg.nvfp4_quantize(X[0], axis=-2), ValueError,
        "jgg.nvfp4_quantize: axis=-2, expected the last axis of x or the one before it, and x has "
        "shape (64,)",
    ),
    (
        lambda: jgg.nvfp4_quantize(X[:, :40]), ValueError,
        "jgg.nvfp4_quantize: x has shape (48, 40), expected a multiple of 16 along axis -1, got 40",
    ),
    (
        lambda: jgg.nvfp4_quantize(X[:40], axis=0), ValueError,
        "jgg.nvfp4_quantize: x has shape (40, 64), expected a multiple of 16 along axis -2, got 40."
        " Pass group_sizes to pad rows",
    ),
    (
        lambda: jgg.nvfp4_quantize(X[:, :40], group_sizes=jnp.array([3])), ValueError,
        "jgg.nvfp4_quantize: x has shape (48, 40), expected a multiple of 16 along axis -1, got 40",
    ),
    (
        lambda: jgg.nvfp4_quantize(W, group_sizes=jnp.array([3])), ValueError,
        "jgg.nvfp4_quantize: x has shape (2, 32, 32), expected 2 axes (T, K): group_sizes are of "
        "its rows",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, group_sizes=jnp.ones(3)), TypeError,
        "jgg.nvfp4_quantize: group_sizes must hold integers, got dtype float32",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, group_sizes=jnp.ones((1, 3), jnp.int32)), ValueError,
        "jgg.nvfp4_quantize: group_sizes has shape (1, 3), expected 1 axis (G,)",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, group_sizes=jnp.array([3]), scale_2d=True), ValueError,
        "jgg.nvfp4_quantize: scale_2d with group_sizes: blocks of 16 x 16 would span groups. It is "
        "for weights",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, scale_2d=True, hadamard=True), ValueError,
        "jgg.nvfp4_quantize: scale_2d with hadamard: the transform along one axis would make the "
        "values of either axis different. Choose one",
    ),
    (
        lambda: jgg.nvfp4_quantize(X[0], scale_2d=True), ValueError,
        "jgg.nvfp4_quantize: scale_2d needs two axes, and x has shape (64,)",
    ),
    (
        lambda: jgg.nvfp4_quantize(X[0], layout="swizzled"), ValueError,
        "jgg.nvfp4_quantize: layout='swizzled' needs two axes, and x has shape (64,)",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, layout="grouped"), ValueError,
        "jgg.nvfp4_quantize: layout='grouped' is not one of 'linear', 'swizzled'",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, axis=0, group_sizes=jnp.array([3]), layout="swizzled"),
        ValueError,
        "jgg.nvfp4_quantize: layout='swizzled' with group_sizes needs axis=-1: along T, blocks of "
        "grouped rows have layout 'grouped' only",
    ),
    (
        lambda: jax.eval_shape(
            lambda x, sizes: jgg.nvfp4_quantize(x, axis=0, group_sizes=sizes),
            jax.ShapeDtypeStruct((2**31 - 2000, 16), jnp.bfloat16),
            jax.ShapeDtypeStruct((128,), jnp.int32),
        ), ValueError,
        "jgg.nvfp4_quantize: x, padded, has 2147489664 rows; row indices are int32, at most "
        "2147482623",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, stochastic_rounding_key=jax.random.split(KEY, 3)), TypeError,
        "jgg.nvfp4_quantize: stochastic_rounding_key must be one key of jax.random, got "
        "key<fry>[3]",
    ),
    (
        lambda: jgg.nvfp4_quantize(X, stochastic_rounding_key=0), TypeError,
        "jgg.nvfp4_quantize: stochastic_rounding_key must be one key of jax.random, got 0",
    ),
    (
        lambda: jgg.Quantized(X, X, axis=-2, layout="sm90", **STATIC), ValueError,
        "jgg.Quantized: layout='sm90' does not exist in mode 'nvfp4' with axis=-2",
    ),
    (
        lambda: jgg.Quantized(X, X, layout="grouped", **STATIC), ValueError,
        "jgg.Quantized: layout='grouped' does not exist in mode 'nvfp4' with axis=-1",
    ),
    (
        lambda: jgg.Quantized(
            X, X, layout="swizzled", mode="mxfp4", bits=4, group_size=32
        ), ValueError,
        "jgg.Quantized: layout='swizzled' does not exist in mode 'mxfp4' with axis=-1",
    ),
    (
        lambda: jgg.dequantize(zeros(grouped, positions=None)), ValueError,
        "jgg.dequantize: q.positions is None, expected int32 (T,) in layout 'grouped'",
    ),
    (
        lambda: jgg.dequantize(zeros(grouped, layout="linear")), ValueError,
        "jgg.dequantize: q.positions is int32[48], expected None in layout 'linear'",
    ),
    (
        lambda: jgg.dequantize(zeros(grouped, weight=jnp.zeros((2, 64, 12), "uint32"))), ValueError,
        "jgg.dequantize: q.weight has shape (2, 64, 12), expected 2 axes (C, P/8): layout "
        "'grouped'",
    ),
    (
        lambda: jgg.dequantize(zeros(swizzled, scales=jnp.zeros((48, 4), jnp.uint8))), ValueError,
        "jgg.dequantize: q.scales has shape (48, 4), expected (1, 1, 512) in layout 'swizzled' "
        "because q.weight is (48, 8)",
    ),
    (
        lambda: jgg.dequantize(zeros(swizzled, positions=jnp.zeros(48))), ValueError,
        "jgg.dequantize: q.positions is float32[48], expected int32 (T,) or None in layout "
        "'swizzled'",
    ),
    (
        lambda: jgg.grouped_qmm(X[:, :32], jgg.nvfp4_quantize(W, axis=1), jnp.array([3, 4])),
        ValueError,
        "jgg.grouped_qmm: w has axis=-2, expected -1. dataclasses.replace(w, axis=-1) is what it "
        "stores, (2, 32, 32)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
