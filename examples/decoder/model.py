"""The decoder: its layers are scanned where they are alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_groupgemm as jgg

from .attention import Attention, Cache, Place
from .config import Config
from .experts import Expert, MixtureOfExperts
from .latent_attention import LatentAttention
from .layers import GatedMLP, Linear, RMSNorm
from .weights import Weights


def attention_of(config: Config) -> type[Attention | LatentAttention]:
    return Attention if config.latent is None else LatentAttention


def divides_heads(config: Config, mesh: Any) -> bool:
    """Whether each device of a mesh has some of the heads, and the cache of those."""
    return mesh is not None and config.latent is None and config.kv_heads % mesh.size == 0


def heads_axis(config: Config) -> int:
    """Of a cache."""
    return 3 if config.attention == "cudnn" and config.latent is None else 2


class Block(nnx.Module):
    """One layer: attention, then a mixture of experts or an ordinary network."""

    def __init__(self, config: Config, weights: Weights, layer: int):
        norm = lambda name: RMSNorm.read(weights, name, config.width, config.norm_epsilon)
        self.attention_norm = norm("input_layernorm")
        self.mlp_norm = norm("post_attention_layernorm")
        self.attention = attention_of(config)(config, weights.at("self_attn"))
        if config.moe_layers[layer]:
            self.mlp = MixtureOfExperts(config, weights)
        else:
            self.mlp = GatedMLP(weights.at(config.names.dense), config.width, config.dense_width)
        self.scale = config.residual_scale

    def __call__(self, x: jax.Array, cache: Cache, layer: Any, window: Any, at: Place, mesh: Any):
        x, cache = self.attend(x, cache, layer, window, at)
        return self.feed(x, layer, at.exists, mesh), cache

    def attend(self, x: jax.Array, cache: Cache, layer: Any, window: Any, at: Place):
        y, cache = self.attention(self.attention_norm(x), cache, layer, window, at)
        return self.added(x, y), cache

    def added(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return x + (y if self.scale == 1 else y * self.scale)

    def feed(self, x: jax.Array, layer: Any, exists: jax.Array, mesh: Any):
        y = self.mlp_norm(x)
        if isinstance(self.mlp, GatedMLP):
            return self.added(x, self.mlp(y))
        return self.added(x, self.mlp(y, layer, exists, mesh))


class Stack(nnx.Module):
    """Layers that are alike, as one whose parameters have an axis more. They are scanned. A layer
    that is alone is not: nothing is cut out of a stack then, which takes a copy for a product."""

    def __init__(self, layers: Block, windows: Sequence[int]):
        self.layers, self.windows = layers, tuple(windows)

    def __call__(self, x: jax.Array, cache: Cache, at: Place, mesh: Any):
        if len(self.windows) == 1:
            return _one_layer(*nnx.split(self), x, cache, at, mesh)
        call = lambda block, carry, number, window: block(*carry, number, window, at, mesh)
        return self.fold(call, (x, cache))

    def fold(self, call: Callable[[Block, Any, Any, Any], Any], carry: Any) -> Any:
        """``carry = call(block, carry, number, window)`` of each layer in turn."""
        graph, experts, others = nnx.split(self.layers, Expert, ...)

        def one(carry, layer):
            number, window, params = layer
            return call(nnx.merge(graph, experts, params), carry, number, window), None

        windows = np.array(self.windows, np.int32)
        layers = np.arange(len(windows), dtype=np.int32), windows, others
        if len(windows) == 1:
            return one(carry, jax.tree.map(lambda a: a[0], layers))[0]
        return jax.lax.scan(one, carry, layers)[0]


@functools.partial(jax.jit, static_argnums=(0, 5))
def _one_layer(graph: Any, params: Any, x: jax.Array, cache: Cache, at: Place, mesh: Any):
    """Traced once for all layers that are alike."""
    call = lambda block, carry, number, window: block(*carry, number, window, at, mesh)
    return nnx.merge(graph, params).fold(call, (x, cache))


class Decoder(nnx.Module):
    """Tokens to logits. A cache is a list with a :data:`Cache` for each stack."""

    def __init__(self, config: Config, embedding: Any, stacks: list[Stack], norm: RMSNorm,
                 head: Linear | None, mesh: Any = None):  # fmt: skip
        self.config, self.mesh = config, mesh
        self.embedding, self.norm, self.head = nnx.Param(embedding), norm, head
        self.stacks = nnx.List(stacks)

    @property
    def dtype(self) -> Any:
        """The dtype of its activations."""
        return self.norm.scale.get_value().dtype

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """(T, D) of tokens (T,)."""
        table, scale = self.embedding.get_value(), self.config.embedding_scale
        if isinstance(table, jgg.Quantized):
            x = jgg.dequantize(jax.tree.map(lambda leaf: leaf[tokens], table), self.dtype)
        else:
            x = table[tokens]
        return x if scale == 1 else x * scale

    def empty_cache(self, tokens: int, sequences: int = 1) -> list[Cache]:
        """With room for so many tokens of each sequence."""
        attention, dtype = attention_of(self.config), self.dtype
        slots = -(-(attention.first(self.config) + tokens) // 8) * 8  # rows that begin aligned

        def zeros(stack: Stack, heads: int, size: int):
            axes = (slots, heads) if heads_axis(self.config) == 3 else (heads, slots)
            return jnp.zeros((len(stack.windows), sequences, *axes, size), dtype)

        shapes = attention.cache(self.config)
        return [{n: zeros(stack, *shape) for n, shape in shapes.items()} for stack in self.stacks]

    def __call__(self, tokens: jax.Array, start: jax.Array, count: jax.Array, cache: list[Cache]):
        """Hidden states (..., T, D) of tokens (T,) or (sequences, T) at positions from ``start``
        on, and the cache with them. Those behind the first ``count`` are padding."""
        at = self.place(tokens, start, count)
        x = self.embedded(tokens.reshape(-1))
        caches = []
        for stack, part in zip(self.stacks, cache, strict=True):
            x, part = stack(x, part, at, self.mesh)
            caches.append(part)
        return self.norm(x).reshape(*tokens.shape, -1), caches

    def place(self, tokens: jax.Array, start: jax.Array, count: jax.Array) -> Place:
        """Where tokens (T,) or (sequences, T) are."""
        steps = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
        positions = start + steps
        each = steps < count, *self.config.rope.turns(positions)
        sequences = tokens.size // len(steps)
        if sequences > 1:
            each = (jnp.tile(a, (sequences, *(1 for _ in a.shape[1:]))) for a in each)
        return Place(start, positions, *each)

    def logits(self, x: jax.Array) -> jax.Array:
        """(..., vocabulary), in float32."""
        head = Linear(self.embedding.get_value()) if self.head is None else self.head
        logits, divisor = head(x).astype(jnp.float32), self.config.logits_divisor
        return logits if divisor == 1 else logits / divisor
