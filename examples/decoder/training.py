"""The decoder as it is trained: whole sequences, many at once, and no cache that outlives them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .attention import Place
from .experts import Expert
from .layers import GatedMLP
from .model import Block, Decoder, Stack, attention_of


def cross_entropy(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Nats (B, T) of every token of ``(B, T + 1)`` but the first."""
    length = tokens.shape[1] - 1
    positions = jnp.arange(length, dtype=jnp.int32)
    every = jnp.ones(length, bool)
    at = Place(jnp.int32(0), positions, every, *model.config.rope.turns(positions))
    x = model.embedding.get_value()[tokens[:, :-1]]
    for stack in model.stacks:
        x = layers(model, stack, x, at)
    return optax.softmax_cross_entropy_with_integer_labels(
        model.logits(model.norm(x)), tokens[:, 1:]
    )


def layers(model: Decoder, stack: Stack, x: jax.Array, at: Place) -> jax.Array:
    """A backward pass computes each layer again, so that only their inputs (B, T, D) are kept."""
    graph, experts, others = nnx.split(stack.layers, Expert, ...)

    @jax.checkpoint
    def one(x, layer):
        number, window, params = layer
        return sequences(nnx.merge(graph, experts, params), model, x, number, window, at), None

    numbers = np.arange(len(stack.windows), dtype=np.int32)
    return jax.lax.scan(one, x, (numbers, np.array(stack.windows, np.int32), others))[0]


def sequences(block: Block, model: Decoder, x: jax.Array, number: Any, window: Any, at: Place):
    """One layer. Sequences attend to themselves; experts take the tokens of all."""
    attention = attention_of(model.config)
    slots = attention.first(model.config) + x.shape[1]
    cache = {
        name: jnp.zeros((1, slots, *shape), x.dtype)
        for name, shape in attention.cache(model.config).items()
    }

    def attend(one):
        return block.attention(block.attention_norm(one), cache, jnp.int32(0), window, at)[0]

    x += jax.vmap(attend)(x)
    y = block.mlp_norm(x).reshape(-1, x.shape[-1])
    if isinstance(block.mlp, GatedMLP):
        y = block.mlp(y)
    else:
        y = block.mlp(y, number, jnp.ones(len(y), bool), None)
    return x + y.reshape(x.shape)
