"""Variables of flax's nnx, as operands."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

nnx = pytest.importorskip("flax.nnx")
SIZES = jnp.array([3, 5])


def test_variables_of_arrays_and_of_quantized(rng):
    x, w = oracle.random(rng, (8, 64)), oracle.random(rng, (2, 64, 64))
    q = jgg.quantize(w, contract=-1)
    held, bias = nnx.Param(q), nnx.Param(jnp.ones((2, 64)))
    calls = {
        "grouped_mm": lambda w, q, b: jgg.grouped_mm(x, w, SIZES, bias=b),
        "grouped_qmm": lambda w, q, b: jgg.grouped_qmm(x, q, SIZES, bias=b),
        "gather_qmm": lambda w, q, b: jgg.gather_qmm(x[:, None], q, None, jnp.arange(8) % 2),
        "quantized_matmul": lambda w, q, b: jgg.quantized_matmul(x, w=q),
        "dequantize": lambda w, q, b: jgg.dequantize(q),
        "prepack": lambda w, q, b: jgg.dequantize(jgg.prepack(q, scales_dtype="bfloat16")),
        "quantize": lambda w, q, b: jgg.quantize(w, contract=-1).scales,
    }
    for f in calls.values():
        want = f(w, q, jnp.ones((2, 64)))
        np.testing.assert_array_equal(f(nnx.Param(w), held, bias), want)


def test_gradient_in_a_module(rng):
    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(oracle.random(rng, (2, 64, 32)))
            self.frozen = nnx.Variable(jgg.quantize(oracle.random(rng, (2, 48, 32)), group_size=32))

        def __call__(self, x):
            return jgg.grouped_qmm(jgg.grouped_mm(x, self.w, SIZES), self.frozen, SIZES)

    x, layer = jnp.ones((8, 64)), Layer()
    grads = nnx.grad(lambda layer: layer(x).sum())(layer)
    f = lambda w: jgg.grouped_qmm(jgg.grouped_mm(x, w, SIZES), layer.frozen.get_value(), SIZES)
    want = jax.grad(lambda w: f(w).sum())(layer.w.get_value())
    oracle.assert_close(grads["w"].get_value(), want)
