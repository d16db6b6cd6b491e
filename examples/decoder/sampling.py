"""The next token of its logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0  # 0: the likeliest token
    top_k: int = 0  # of so many; 0: of all
    top_p: float = 1.0  # of the likeliest that together have this probability

    def __call__(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """A token of float32 logits (vocabulary,)."""
        if self.temperature == 0:
            return jnp.argmax(logits).astype(jnp.int32)
        if not self.top_k and self.top_p == 1:
            return jax.random.categorical(key, logits / self.temperature).astype(jnp.int32)
        count = min(self.top_k or logits.size, logits.size)
        logits, tokens = jax.lax.top_k(logits / self.temperature, count)
        # A token is left out where those before it have the probability already.
        probability = jax.nn.softmax(logits)
        before = jnp.cumsum(probability) - probability
        kept = jnp.where(before < self.top_p, logits, -jnp.inf)
        return tokens[jax.random.categorical(key, kept)].astype(jnp.int32)
