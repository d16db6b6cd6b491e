"""Train a byte-level mixture-of-experts language model with ``jax_groupgemm``.

    python examples/train_moe.py             # minutes on two CPU cores; uses a GPU if there is one
    python examples/train_moe.py --resume    # go on from the latest checkpoint
    python examples/train_moe.py --compare   # time the training step against jax.lax.ragged_dot

The text is the language reference that every CPython carries. The mixture of experts is *dropless*:
experts take as many tokens as the router sends them, with no capacity limit and no padding. See
:class:`MoE`; everything else is an ordinary small transformer.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

import jax_groupgemm as jgg

VOCABULARY = 256  # bytes
HEAD_SIZE = 32
BALANCE_WEIGHT = 0.01
HELD_OUT = 0.1  # the last part of the text, never trained on
SAMPLED_BYTES = 600


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run's result depends on, besides the text."""

    steps: int
    batch: int
    context: int
    layers: int
    width: int
    experts: int
    top_k: int
    expert_width: int
    lr: float
    seed: int
    dtype: str


# ---- model -----------------------------------------------------------------------------------


def jgg_experts(rows, w_up, w_down, sizes, scale):
    """Every expert's SwiGLU network on its own rows; ``rows`` are sorted by expert.

    rows (R, D), w_up (E, D, 2F) with gate and up side by side, w_down (E, F, D), sizes (E,) rows
    per expert, scale (R,) router weights. Returns (R, D).
    """
    hidden = jgg.grouped_mm(rows, w_up, sizes, activation="swiglu")
    return jgg.grouped_mm(hidden, w_down, sizes, row_scale=scale)


def ragged_dot_experts(rows, w_up, w_down, sizes, scale):
    """The same in plain JAX, for ``--compare``."""
    # grouped_mm multiplies float32 as float32 on every device; ask the same of ragged_dot.
    precision = "highest" if rows.dtype == jnp.float32 else None
    ragged_dot = functools.partial(jax.lax.ragged_dot, group_sizes=sizes, precision=precision)
    gate, up = jnp.split(ragged_dot(rows, w_up), 2, axis=1)
    return ragged_dot(jax.nn.silu(gate) * up, w_down) * scale.astype(rows.dtype)[:, None]


class MoE(nnx.Module):
    """Dropless mixture of SwiGLU experts: every token meets its ``top_k`` experts."""

    def __init__(self, config: Config, experts_fn: Callable, rngs: nnx.Rngs):
        d, e, f = config.width, config.experts, config.expert_width
        init = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        self.router = nnx.Linear(d, e, use_bias=False, dtype=jnp.float32, rngs=rngs)
        self.w_up = nnx.Param(init(rngs.params(), (e, d, 2 * f), jnp.float32))
        self.w_down = nnx.Param(init(rngs.params(), (e, f, d), jnp.float32))
        self.experts, self.top_k, self.experts_fn = e, config.top_k, experts_fn

    def __call__(self, x):
        """``(tokens, D) -> (tokens, D)``, and the load-balancing loss."""
        # Route: each token chooses k experts.
        probabilities = jax.nn.softmax(self.router(x))
        weights, chosen = jax.lax.top_k(probabilities, self.top_k)
        weights = weights / weights.sum(axis=1, keepdims=True)

        # Dispatch: one row per (token, choice), sorted by expert. Row r is of token order[r] // k.
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=self.experts)
        rows = x[order // self.top_k]

        # Compute: two grouped products, whatever the sizes are.
        w_up, w_down = self.w_up[...].astype(x.dtype), self.w_down[...].astype(x.dtype)
        rows = self.experts_fn(rows, w_up, w_down, sizes, weights.reshape(-1)[order])

        # Combine: add each token's k rows up.
        y = jnp.zeros_like(x).at[order // self.top_k].add(rows)

        # 1 where both the choices and the probabilities are spread evenly, else larger.
        load = sizes.astype(jnp.float32) / expert.size
        balance = self.experts * jnp.sum(load * probabilities.mean(axis=0))
        return y, balance


class Attention(nnx.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.qkv = linear(config.width, 3 * config.width)
        self.out = linear(config.width, config.width)

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


class Block(nnx.Module):
    def __init__(self, config: Config, experts_fn: Callable, rngs: nnx.Rngs):
        norm = functools.partial(nnx.RMSNorm, config.width, dtype=config.dtype, rngs=rngs)
        self.attention_norm, self.attention = norm(), Attention(config, rngs)
        self.moe_norm, self.moe = norm(), MoE(config, experts_fn, rngs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        y, balance = self.moe(self.moe_norm(x).reshape(-1, x.shape[-1]))
        return x + y.reshape(x.shape), balance


class LanguageModel(nnx.Module):
    """Bytes ``(batch, length)`` to next-byte logits, and the mean load-balancing loss."""

    def __init__(self, config: Config, experts_fn: Callable, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, experts_fn, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(config.width, VOCABULARY, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x)).astype(jnp.float32), jnp.stack(balances).mean()


# ---- training --------------------------------------------------------------------------------


class Trainer:
    """The compiled functions of one model, and its state: a pytree, to be donated and saved."""

    def __init__(self, config: Config, experts_fn: Callable = jgg_experts):
        def new_model():
            return LanguageModel(config, experts_fn, nnx.Rngs(config.seed))

        def new_state():
            params = nnx.state(new_model(), nnx.Param)
            return {"step": jnp.int32(0), "params": params, "optimizer": self.optimizer.init(params)}

        self.config = config
        self.graph = nnx.graphdef(nnx.eval_shape(new_model))
        self.optimizer = make_optimizer(config)
        self.state: Any = jax.jit(new_state)()
        self.train_step = jax.jit(self._train_step, donate_argnums=0)
        self.bits_per_byte = jax.jit(self._bits_per_byte)
        self.sample = jax.jit(self._sample)

    def _train_step(self, state, text):
        """Returns the new state and the batch's mean bits per byte."""
        # The batch follows from the seed and the step, so a resumed run sees the same ones.
        key = jax.random.fold_in(jax.random.key(self.config.seed), state["step"])
        span = self.config.context + 1
        starts = jax.random.randint(key, (self.config.batch, 1), 0, text.size - span + 1)
        tokens = text[starts + jnp.arange(span)]

        def loss(params):
            nats, balance = self._cross_entropy(params, tokens)
            return nats.mean() + BALANCE_WEIGHT * balance, nats.mean()

        (_, nats), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
        with jax.numpy_dtype_promotion("standard"):  # optax does not run under "strict"
            updates, optimizer = self.optimizer.update(
                gradients, state["optimizer"], state["params"]
            )
        params = optax.apply_updates(state["params"], updates)
        state = {"step": state["step"] + 1, "params": params, "optimizer": optimizer}
        return state, nats / jnp.log(2.0)

    def _cross_entropy(self, params, tokens):
        """Nats of every byte of ``(batch, length)`` but the first, and the balancing loss."""
        logits, balance = nnx.merge(self.graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]), balance

    def _bits_per_byte(self, params, text):
        """Mean over a text, read in windows of ``context`` bytes that know nothing before them."""
        batch, context = self.config.batch, self.config.context
        windows = (text.size - 1) // context
        # The last batch is filled up with the last window, which counts once.
        window = jnp.minimum(jnp.arange(-(-windows // batch) * batch), windows - 1)
        tokens = text[window[:, None] * context + jnp.arange(context + 1)]
        nats = jax.lax.map(
            lambda batch_of_tokens: self._cross_entropy(params, batch_of_tokens)[0],
            tokens.reshape(-1, batch, context + 1),
        )
        return nats.reshape(-1, context)[:windows].mean() / jnp.log(2.0)

    def _sample(self, params, prompt, key):
        """``SAMPLED_BYTES`` bytes that follow ``prompt``, which has ``context`` bytes."""
        model = nnx.merge(self.graph, params)

        def next_byte(window, key):
            logits, _ = model(window[None])
            byte = jax.random.categorical(key, logits[0, -1] / TEMPERATURE).astype(window.dtype)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(next_byte, prompt, jax.random.split(key, SAMPLED_BYTES))[1]


def make_optimizer(config: Config) -> optax.GradientTransformation:
    warmup = config.steps // 20
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.lr, warmup, config.steps, end_value=config.lr / 20
    )
    decayed = functools.partial(jax.tree.map, lambda p: p.ndim > 1)  # all but norms and biases
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def bigram_bits_per_byte(train, held_out, smoothing=0.1) -> float:
    """What counting pairs of bytes achieves: the baseline to beat."""
    counts = np.full((VOCABULARY, VOCABULARY), smoothing)
    np.add.at(counts, (train[:-1], train[1:]), 1)
    probabilities = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log2(probabilities[held_out[:-1], held_out[1:]]).mean())


def run(config: Config, text: np.ndarray, out: Path, eval_every: int, resume: bool) -> dict:
    """Train from the start or the latest checkpoint. Files go to ``out``, results are returned."""
    train_text, held_out = split(text)
    bigram = bigram_bits_per_byte(train_text, held_out)
    identity = dataclasses.asdict(config) | {"text checksum": zlib.crc32(text.tobytes())}
    history = {"training": [], "held_out": []}  # bits per byte: of each step; (step, mean) pairs
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager((out / "checkpoints").absolute(), options=options) as checkpoints:
        if not resume and checkpoints.latest_step() is not None:
            raise SystemExit(f"{out} holds a run: pass --resume to go on, or another --out")
        if resume:
            check_resumable(checkpoints, identity, out)
        trainer = Trainer(config)
        if resume:
            trainer.state, history = restore(checkpoints, trainer.state)
        seconds = ...

