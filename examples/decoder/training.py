"""The decoder as it is trained: whole sequences, many at once, and no cache that outlives them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .attention import Cache, Place
from .experts import Expert
from .model import Block, Decoder, Stack, attention_of, heads_axis


def cross_entropy(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Nats (B, T) of every token of ``(B, T + 1)`` but the first."""
    given = tokens[:, :-1]
    at = model.place(given, jnp.int32(0), jnp.int32(given.shape[1]))
    x = model.embedded(given.reshape(-1))
    for stack in model.stacks:
        x = layers(model, stack, x, at, len(given))
    logits = model.logits(model.norm(x)).reshape(*given.shape, -1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def layers(model: Decoder, stack: Stack, x: jax.Array, at: Place, sequences: int) -> jax.Array:
    """A backward pass computes each layer again, so that only their inputs (B T, D) are kept."""
    graph, experts, others = nnx.split(stack.layers, Expert, ...)
    cache = empty_cache(model, x, sequences)

    @jax.checkpoint
    def one(x, layer):
        number, window, params = layer
        block: Block = nnx.merge(graph, experts, params)
        x, _ = block.attend(x, cache, jnp.int32(0), window, at)
        return block.feed(x, number, at.exists, None), None

    numbers = np.arange(len(stack.windows), dtype=np.int32)
    return jax.lax.scan(one, x, (numbers, np.array(stack.windows, np.int32), others))[0]


def empty_cache(model: Decoder, x: jax.Array, sequences: int) -> Cache:
    """Of one layer, with room for the tokens that x has."""
    attention = attention_of(model.config)
    slots = attention.first(model.config) + len(x) // sequences

    def zeros(heads: int, size: int):
        axes = (slots, heads) if heads_axis(model.config) == 3 else (heads, slots)
        return jnp.zeros((1, sequences, *axes, size), x.dtype)

    return {name: zeros(*shape) for name, shape in attention.cache(model.config).items()}
