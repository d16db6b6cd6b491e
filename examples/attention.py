"""Causal multi-head attention with rotary positions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

HEAD_SIZE = 32


class Attention(nnx.Module):
    """``(batch, length, width)`` to the same; width is a multiple of ``HEAD_SIZE``."""

    def __init__(self, width: int, dtype: str, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)

    def __call__(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, -1, HEAD_SIZE)
        q, k, v = rotate(qkv[:, :, 0]), rotate(qkv[:, :, 1]), qkv[:, :, 2]
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


def rotate(x):
    """Rotary position embedding of ``(batch, length, heads, HEAD_SIZE)``."""
    frequency = 10_000.0 ** -jnp.linspace(0, 1, HEAD_SIZE // 2, endpoint=False)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
