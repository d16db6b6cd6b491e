"""The decoder: its layers are scanned where they are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

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


class Block(nnx.Module):
    """One layer: attention, then a mixture of experts or an ordinary network."""

    def __init__(self, config: Config, weights: Weights, layer: int):
        norm = lambda name: RMSNorm.read(weights, name, config.width, config.norm_epsilon)
        self.attention_norm = norm("input_layernorm")
        self.mlp_norm = norm("post_attention_layernorm")
        self.attention = attention_of(config)(config, weights.at("self_attn"))
        if config.moe_layers[layer]:
            self.mlp = MixtureOfExperts(config, weights.at(config.names.moe))
        else:
            self.mlp = GatedMLP(weights.at("mlp"), config.width, config.dense_width)

    def __call__(self, x: jax.Array, cache: Cache, layer: Any, window: Any, at: Place, mesh: Any):
        y, cache = self.attention(self.attention_norm(x), cache, layer, window, at)
        x += y
        y = self.mlp_norm(x)
        if isinstance(self.mlp, GatedMLP):
            return x + self.mlp(y), cache
        return x + self.mlp(y, layer, at.exists, mesh), cache


class Stack(nnx.Module):
    """Layers that are alike, as one whose parameters have an axis more."""

    def __init__(self, layers: Block, windows: Sequence[int]):
        self.layers, self.windows = layers, tuple(windows)

    def __call__(self, x: jax.Array, cache: Cache, at: Place, mesh: Any):
        graph, experts, others = nnx.split(self.layers, Expert, ...)

        def one(carry, layer):
            number, window, params = layer
            block: Any = nnx.merge(graph, experts, params)
            return block(*carry, number, window, at, mesh), None

        windows = np.array(self.windows, np.int32)
        layers = np.arange(len(windows), dtype=np.int32), windows, others
        return jax.lax.scan(one, (x, cache), layers)[0]


class Decoder(nnx.Module):
    """Tokens to logits. A cache is a list with a :data:`Cache` for each stack."""

    def __init__(self, config: Config, embedding: Any, stacks: list[Stack], norm: RMSNorm,
                 head: Linear | None, mesh: Any = None):  # fmt: skip
        self.config, self.mesh = config, mesh
        self.embedding, self.norm, self.head = nnx.Param(embedding), norm, head
        self.stacks = nnx.List(stacks)

    def empty_cache(self, tokens: int) -> list[Cache]:
        """With room for so many tokens."""
        attention, dtype = attention_of(self.config), self.embedding.get_value().dtype
        slots = attention.first(self.config) + tokens
        return [
            {
                name: jnp.zeros((len(stack.windows), slots, *shape), dtype)
                for name, shape in attention.cache(self.config).items()
            }
            for stack in self.stacks
        ]

    def __call__(self, tokens: jax.Array, start: jax.Array, count: jax.Array, cache: list[Cache]):
        """Hidden states (T, D) of tokens (T,) at positions from ``start`` on, and the cache with
        them. Those behind the first ``count`` are padding."""
        steps = jnp.arange(len(tokens), dtype=jnp.int32)
        positions = start + steps
        at = Place(start, positions, steps < count, *self.config.rope.turns(positions))
        x = self.embedding.get_value()[tokens]
        caches = []
        for stack, part in zip(self.stacks, cache, strict=True):
            x, part = stack(x, part, at, self.mesh)
            caches.append(part)
        return self.norm(x), caches

    def logits(self, x: jax.Array) -> jax.Array:
        """(..., vocabulary), in float32."""
        head = Linear(self.embedding.get_value()) if self.head is None else self.head
        return head(x).astype(jnp.float32)
