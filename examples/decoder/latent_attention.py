"""DeepSeek's multi-head latent attention.

A token is remembered as one vector of ``rank`` numbers, from which the keys and values of all heads
are made, and one rotated key that all heads share. The products that make them are moved to the
other side: queries are multiplied by the keys' matrix and sums by the values', so that a step reads
the cache as it is, like attention with a single key-value head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .architectures import Latent
from .attention import Cache, Place, remember, seen
from .config import Config
from .layers import Linear, RMSNorm
from .rotary import rotate
from .weights import Weights


class LatentAttention(nnx.Module):
    """(rows, D) to the same."""

    def __init__(self, config: Config, weights: Weights):
        assert config.latent is not None
        of, heads, d = config.latent, config.heads, config.width
        n, bias = heads * (of.unrotated + of.rotated), config.qkv_bias
        # Norms of latent vectors have an epsilon of their own in the released model's code.
        norm = lambda name, width: RMSNorm.read(weights, name, width, 1e-6)
        r = of.query_rank
        self.query_down = None if r is None else Linear.read(weights, "q_a_proj", r, d, bias)
        self.query_norm = None if r is None else norm("q_a_layernorm", r)
        name = "q_proj" if r is None else "q_b_proj"
        self.query = Linear.read(weights, name, n, d if r is None else r)
        rank = of.rank + of.rotated
        self.latent = Linear.read(weights, "kv_a_proj_with_mqa", rank, d, bias)
        self.latent_norm = norm("kv_a_layernorm", of.rank)
        each = of.unrotated + of.value
        up = weights.dense("kv_b_proj", heads * each, of.rank).reshape(heads, each, of.rank)
        self.keys = nnx.Param(up[:, : of.unrotated])
        self.values = nnx.Param(up[:, of.unrotated :])
        self.out = Linear.read(weights, "o_proj", d, heads * of.value, config.out_bias)
        self.sizes, self.heads, self.by_turns = of, heads, config.rope_by_turns
        self.scale = (of.unrotated + of.rotated) ** -0.5 * config.rope.correction

    @staticmethod
    def cache(config: Config) -> dict[str, tuple[int, ...]]:
        assert config.latent is not None
        return {"latent": (1, config.latent.rank + config.latent.rotated)}

    @staticmethod
    def first(config: Config) -> int:
        return 0

    def __call__(self, x: jax.Array, cache: Cache, layer: Any, window: Any, at: Place):
        of: Latent = self.sizes
        queries = x
        if self.query_down is not None and self.query_norm is not None:
            queries = self.query_norm(self.query_down(x))
        q = self.query(queries).reshape(len(x), self.heads, -1)
        turn = lambda y: rotate(y, at.cos, at.sin, self.by_turns)
        q = jnp.concatenate(
            [
                jnp.einsum("thn,hnr->thr", q[..., : of.unrotated], self.keys.get_value()),
                turn(q[..., of.unrotated :]),
            ],
            axis=-1,
        )
        latent, rotated = jnp.split(self.latent(x), [of.rank], axis=-1)
        token = [self.latent_norm(latent)[:, None], turn(rotated[:, None])]
        batched = lambda y: y.reshape(cache["latent"].shape[1], -1, *y.shape[1:])
        new = batched(jnp.concatenate(token, axis=-1))
        cache, keys = remember(cache, layer, at.start, False, latent=new)
        # Values are the keys without their rotated part, which the sum drops.
        y = jax.nn.dot_product_attention(
            batched(q), keys, keys, mask=seen(at, window, keys.shape[1], 0)[None], scale=self.scale
        ).reshape(q.shape)[..., : of.rank]
        y = jnp.einsum("thr,hvr->thv", y, self.values.get_value())
        return self.out(y.reshape(len(x), -1)), cache
