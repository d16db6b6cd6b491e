"""Attention with grouped queries: what all architectures but DeepSeek's have in common.

They differ in biases, in norms of queries and keys (of each head, or of all heads together), in how
much of a head is rotated, in the scale of logits, and in gpt-oss' sinks: a logit for each head that
takes part in the softmax and stands for no token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from .config import Config
from .layers import Linear, RMSNorm
from .rotary import rotate
from .weights import Weights, rows_joined

# Each (layers, sequences, heads, slots, ...), a slot for each token: products over slots then read
# it as it lies. cuDNN reads slots before heads.
Cache = dict[str, jax.Array]


class Place(NamedTuple):
    """Where the tokens of a step are. All sequences of a batch are equally long."""

    start: jax.Array  # the position of the first
    positions: jax.Array  # (T,) of one sequence
    exists: jax.Array  # (rows,): others fill up the last step of a prompt
    cos: jax.Array  # (rows, pairs)
    sin: jax.Array


def seen(at: Place, window: jax.Array, slots: int, first: int) -> jax.Array:
    """(1, T, slots): which slots each token attends to. Those before ``first`` are for all."""
    token = jnp.arange(slots) - first
    back = at.positions[:, None] - token
    return (((back >= 0) & (back < window)) | (token < 0))[None]


def remember(cache: Cache, layer: Any, slot: jax.Array, slots_first: bool, **new: jax.Array):
    """The cache with the tokens of this step, which are (sequences, T, heads, size), and what it
    has of this layer, (sequences, slots, heads, size)."""
    in_order = lambda a: a if slots_first else a.swapaxes(1, 2)
    cache = dict(cache)
    for name, value in new.items():
        begin = (layer, 0, slot, 0, 0) if slots_first else (layer, 0, 0, slot, 0)
        cache[name] = lax.dynamic_update_slice(cache[name], in_order(value)[None], begin)
    if of_one_token(next(iter(new.values()))):  # or XLA writes the token twice, into copies
        cache = lax.optimization_barrier(cache)
    of_layer = (lax.dynamic_index_in_dim(cache[name], layer, keepdims=False) for name in new)
    return cache, *map(in_order, of_layer)


def attend(q: jax.Array, keys: jax.Array, values: jax.Array, bias: jax.Array | None,
           mask: jax.Array, by: Literal["xla", "cudnn"], *, joins: bool,
           scale: float | None = None):  # fmt: skip
    """Attention of (sequences, T, heads, size), whose logits are multiplied by ``scale``, by
    default ``size**-0.5``. With ``joins`` a single token's heads that have one
    key are so many tokens of one head: cuDNN then reads a key once for all of them."""
    if by == "xla" and of_one_token(q):
        return _attend(q, keys, values, bias, mask, q.shape[3] ** -0.5 if scale is None else scale)
    if not joins or q.shape[1] > 1:
        return jax.nn.dot_product_attention(
            q, keys, values, bias, mask, scale=scale, implementation=by
        )
    sequences, _, n, size = q.shape
    heads = keys.shape[2]
    each = n // heads
    as_tokens = lambda a: a.reshape(sequences, heads, each, size).swapaxes(1, 2)
    if bias is not None:  # (1, heads or 1, 1, slots)
        of_each = bias.shape[1] > 1
        bias = bias.reshape(1, heads, each, -1) if of_each else bias.repeat(each, axis=2)
    y = jax.nn.dot_product_attention(
        as_tokens(q), keys, values, bias, mask.repeat(each, axis=2), scale=scale, implementation=by
    )
    return y.swapaxes(1, 2).reshape(q.shape)


def of_one_token(a: jax.Array) -> bool:
    """Whether (sequences, T, heads, size) is a step of one token on a CPU."""
    return a.shape[1] == 1 and jax.default_backend() == "cpu"


def _attend(q, keys, values, bias, mask, scale):
    """The same of one token. Both products read the cache as it lies: on CPUs XLA would copy
    all of it for those of ``dot_product_attention``."""
    sequences, _, n, size = q.shape
    keys, values = (a.swapaxes(1, 2) for a in (keys, values))  # (sequences, heads, slots, size)
    heads = keys.shape[1]
    each = q.reshape(sequences, heads, n // heads, size)
    product = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)
    logits = product(keys, each, (((3,), (3,)), ((0, 1), (0, 1)))).swapaxes(2, 3) * scale
    if bias is not None:  # (1, heads or 1, 1, slots)
        logits += bias.reshape(1, *((heads, -1) if bias.shape[1] > 1 else (1, 1)), bias.shape[3])
    logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min / 2)
    share = jax.nn.softmax(logits).astype(values.dtype)
    y = product(share, values, (((3,), (2,)), ((0, 1), (0, 1))))
    return y.astype(q.dtype).reshape(q.shape)


class Attention(nnx.Module):
    """(rows, D) to the same. The rows of a sequence follow each other."""

    def __init__(self, config: Config, weights: Weights):
        d, size = config.width, config.head_size
        n, k = config.heads * size, config.kv_heads * size
        read = lambda name, rows: Linear.read(weights, name, rows, d, config.qkv_bias)
        self.query: Linear | None = read("q_proj", n)
        self.key: Linear | None = read("k_proj", k)
        self.value: Linear | None = read("v_proj", k)
        self.joined: Linear | None = nnx.data(None)  # or this instead
        self.out = Linear.read(weights, "o_proj", d, n, config.out_bias)
        norm = lambda name, width: (
            RMSNorm.read(weights, name, width, config.norm_epsilon) if config.qk_norm else None
        )
        widths = (n, k) if config.qk_norm == "width" else (size, size)
        self.query_norm, self.key_norm = norm("q_norm", widths[0]), norm("k_norm", widths[1])
        sinks = weights.array("sinks", config.heads, dtype=np.float32) if config.sinks else None
        self.sinks = None if sinks is None else nnx.Param(sinks)
        self.head_size, self.limit = size, config.qkv_limit
        self.scale, self.by_turns = config.attention_scale, config.rope_by_turns
        self.norm_of_heads = config.qk_norm == "head"
        self.rows = n, k
        self.by: Literal["xla", "cudnn"] = config.attention

    def join(self) -> None:
        """Queries, keys and values as one product, where their weights allow it."""
        layers = [layer for layer in (self.query, self.key, self.value) if layer is not None]
        weight = rows_joined([layer.weight.get_value() for layer in layers])
        if weight is None:
            return
        biases = [layer.bias.get_value() for layer in layers if layer.bias is not None]
        self.joined = Linear(weight, rows_joined(biases) if biases else None)
        self.query = self.key = self.value = nnx.data(None)

    def _products(self, x: jax.Array) -> Sequence[jax.Array]:
        """Queries, keys and values."""
        if self.joined is not None:
            n, k = self.rows
            return jnp.split(self.joined(x), (n, n + k), axis=-1)
        assert self.query is not None
        assert self.key is not None
        assert self.value is not None
        return self.query(x), self.key(x), self.value(x)

    @staticmethod
    def cache(config: Config) -> dict[str, tuple[int, ...]]:
        """The shapes of what a layer remembers of a token."""
        return dict.fromkeys(("key", "value"), (config.kv_heads, config.head_size))

    @staticmethod
    def first(config: Config) -> int:
        """The slot of the first token. With sinks slot 0 has a key and a value of zeros: its logit
        is a bias, so the softmax has one term more and the sum has not."""
        return int(config.sinks)

    def __call__(self, x: jax.Array, cache: Cache, layer: Any, window: Any, at: Place):
        q, k, v = self._products(x)
        heads = lambda y: y.reshape(len(x), -1, self.head_size)
        if self.norm_of_heads:
            q, k = heads(q), heads(k)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.limit is not None:
            q, k, v = (jnp.clip(y, -self.limit, self.limit) for y in (q, k, v))
        q, k = (rotate(heads(y), at.cos, at.sin, self.by_turns) for y in (q, k))
        first, bias = int(self.sinks is not None), None
        batched = lambda y: y.reshape(cache["key"].shape[1], -1, *y.shape[1:])
        new = {"key": batched(k), "value": batched(heads(v))}
        cache, keys, values = remember(cache, layer, at.start + first, self.by == "cudnn", **new)
        slots = keys.shape[1]
        if self.sinks is not None:
            sinks = self.sinks.get_value()[None, :, None, None]
            bias = jnp.where(jnp.arange(slots) == 0, sinks, jnp.float32(0))
            if self.by == "cudnn":  # it adds what has the dtype of queries
                bias = bias.astype(q.dtype)
        mask = seen(at, window, slots, first)[None]
        joins = self.by == "cudnn"  # XLA does so itself
        y = attend(batched(q), keys, values, bias, mask, self.by, joins=joins, scale=self.scale)
        return self.out(y.reshape(len(x), -1)), cache
