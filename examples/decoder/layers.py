"""Layers that every part of the model is made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_groupgemm as jgg

from .weights import Weights


class Linear(nnx.Module):
    """``x @ w.T + bias`` of a weight (N, K) that may be quantized."""

    def __init__(self, weight: Any, bias: Any = None):
        self.weight = nnx.Param(weight)
        self.bias = None if bias is None else nnx.Param(bias)

    @classmethod
    def read(cls, weights: Weights, name: str, n: int, k: int, bias: bool = False) -> Linear:
        if not bias:
            weights.check_no_bias(name)
        return cls(weights.linear(name, n, k), weights.array(name + ".bias", n) if bias else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        w = self.weight.get_value()
        if isinstance(w, jgg.Quantized):
            y = jgg.quantized_matmul(x, w)
        else:  # float32 is multiplied as float32 on every device, as jgg does it
            # Not of w.T, of which XLA makes a copy on CPUs where x is one row.
            precision = "highest" if x.dtype == jnp.float32 else None
            y = jnp.tensordot(x, w, (-1, 1), precision=precision)
        return y if self.bias is None else y + self.bias.get_value()


class RMSNorm(nnx.Module):
    """A norm over the last axis, in float32."""

    def __init__(self, scale: Any, epsilon: float):
        self.scale, self.epsilon = nnx.Param(scale), epsilon

    @classmethod
    def read(cls, weights: Weights, name: str, width: int, epsilon: float) -> RMSNorm:
        return cls(weights.array(name + ".weight", width), epsilon)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        return wide.astype(x.dtype) * self.scale.get_value()


class GatedMLP(nnx.Module):
    """An expert that every token meets: a shared one, or the whole of a layer without experts."""

    def __init__(self, weights: Weights, width: int, hidden: int):
        if weights.has("input_linear.weight"):  # Granite: gate's rows, then up's
            weights.check_no_bias("input_linear")
            both = weights.dense("input_linear", 2 * hidden, width)
            self.gate, self.up = Linear(both[:hidden]), Linear(both[hidden:])
            self.down = Linear.read(weights, "output_linear", width, hidden)
            return
        self.gate = Linear.read(weights, "gate_proj", hidden, width)
        self.up = Linear.read(weights, "up_proj", hidden, width)
        self.down = Linear.read(weights, "down_proj", width, hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
