"""The programs that benchmarks.decode times: steps of a model, and its parts."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.decoder.attention import Cache
from examples.decoder.experts import Expert, MixtureOfExperts
from examples.decoder.generation import following, key_of
from examples.decoder.layers import Linear
from examples.decoder.memory import most_held
from examples.decoder.model import Decoder, Stack, attention_of, heads_axis
from examples.decoder.sampling import Sampling

from .timing import kernels

GREEDY = Sampling()


def options() -> dict[str, Any]:
    """Options of the compiler: it makes one CUDA graph of whatever can be one."""
    return {"xla_gpu_graph_min_graph_size": 1} if jax.default_backend() == "gpu" else {}


@functools.partial(jax.jit, static_argnames=("kind", "axis", "zeros"))
def _filled(seed: int, kind, axis: int, zeros: int) -> jax.Array:
    """Random numbers, layer by layer, but for the first slots."""

    def one(key):
        slot = jax.lax.broadcasted_iota(jnp.int32, kind.shape[1:], axis - 1)
        return jnp.where(slot < zeros, 0, jax.random.normal(key, kind.shape[1:], kind.dtype))

    return jax.lax.map(one, jax.random.split(jax.random.key(seed), kind.shape[0]))


def filled_cache(model: Decoder, room: int, batch: int) -> list[Cache]:
    """Random keys and values of every token that there is room for."""
    kinds = empty_cache(model, room, batch)
    first = attention_of(model.config).first(model.config)
    leaves, tree = jax.tree.flatten(kinds)
    axis = 5 - heads_axis(model.config)  # of slots
    return tree.unflatten([_filled(i, kind, axis, first) for i, kind in enumerate(leaves)])


def some_tokens(batch: int, vocabulary: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(batch).integers(0, vocabulary, batch, np.int32))


def empty_cache(model: Decoder, room: int, batch: int) -> list[Cache]:
    """Its shapes."""
    return jax.eval_shape(lambda: model.empty_cache(room, batch))


def compiled(model: Decoder, batches: Sequence[int], room: int) -> dict[int, Future[Any]]:
    """A step's program for each batch, compiled beside each other. One may have failed. The model
    may be of shapes."""
    graph, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)

    def step(params, cache, tokens, position, key):
        model = nnx.merge(graph, tree.unflatten(params))
        return following(model, cache, tokens, position, key, GREEDY)

    def lowered(batch: int) -> Any:
        cache = empty_cache(model, room, batch)
        others = some_tokens(batch, 2), jnp.int32(0), key_of(0)
        # Whatever is fed back keeps its address, so that CUDA graphs need no update.
        return jax.jit(step, donate_argnums=(1, 2, 3)).lower(leaves, cache, *others)

    compile_ = lambda lowered: lowered.compile(compiler_options=options())
    with ThreadPoolExecutor() as pool:
        return {batch: pool.submit(compile_, lowered(batch)) for batch in batches}


class Steps:
    """Steps of a batch, of which each feeds its tokens to the next."""

    def __init__(self, model: Decoder, step: Any, batch: int, room: int, context: int):
        self.model, self.step, self.context = model, step, context
        self.params = jax.tree.leaves(nnx.state(model))
        self.cache = jax.block_until_ready(filled_cache(model, room, batch))
        self.cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))
        self.tokens, self.key = some_tokens(batch, model.config.vocabulary), key_of(0)

    def run(self, n: int) -> None:
        """n steps from the context on."""
        tokens, position, cache = self.tokens, jnp.int32(self.context), self.cache
        for _ in range(n):
            tokens, position, cache = self.step(self.params, cache, tokens, position, self.key)
        self.cache = cache
        self.tokens = jax.block_until_ready(tokens)

    def wall(self, n: int) -> float:
        """Milliseconds of one of n steps in a row, from outside."""
        began = time.perf_counter()
        self.run(n)
        return 1e3 * (time.perf_counter() - began) / n

    def experts_met(self) -> tuple[float, bool]:
        """How many experts of a layer the batch meets in the next step, in the mean, and whether
        the hidden states at its end are finite."""
        at = self.model.place(self.tokens[:, None], jnp.int32(self.context), jnp.int32(1))
        x, caches, met = self.model.embedding.get_value()[self.tokens], [], []
        for stack, cache in zip(self.model.stacks, self.cache, strict=True):
            graph, params = nnx.split(stack)
            x, cache, found = _meet(graph, params, x, cache, at)
            caches.append(cache)
            met.append(found)
        self.cache = caches
        layers = sum(self.model.config.moe_layers)
        mean = float(np.sum([np.asarray(found) for found in met])) / max(layers, 1)
        return mean, bool(jnp.isfinite(x).all())

    def close(self) -> None:
        self.cache, self.params = [], []


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _meet(graph, params, x, cache, at):
    """The layers of a stack, and how many experts all of them meet."""
    stack: Stack = nnx.merge(graph, params)

    def call(block, carry, number, window):
        x, cache, found = carry
        x, cache = block.attend(x, cache, number, window, at)
        if isinstance(block.mlp, MixtureOfExperts):
            index, _ = block.mlp.choices(block.mlp_norm(x))
            hit = jnp.zeros(block.mlp.routing.experts, jnp.int32).at[index.reshape(-1)].set(1)
            found += hit.sum()
        return block.feed(x, number, at.exists, None), cache, found

    return stack.fold(call, (x, cache, jnp.int32(0)))


def bytes_of_step(model: Decoder, batch: int, context: int, met: float) -> dict[str, float]:
    """The bytes that a step has to read. ``met`` counts the experts that tokens of a layer meet."""
    config, sizes = model.config, lambda state: sum(x.nbytes for x in jax.tree.leaves(state))
    experts, others = nnx.state(model, Expert, ...)
    embedding = model.embedding.get_value()
    rest = sizes(others) - (0 if config.tied else embedding.nbytes)
    shapes = attention_of(config).cache(config).values()
    token = embedding.dtype.itemsize * sum(int(np.prod(shape)) for shape in shapes)
    return {
        "experts": sizes(experts) * met / config.router.experts,
        "others": rest + batch * config.width * embedding.dtype.itemsize,
        "cache": float(batch * token * sum(min(w, context + 1) for w in config.windows)),
        "logits": 4.0 * batch * config.vocabulary,
    }


def memory(announced: float) -> dict[str, float | None]:
    """Bytes: what was announced, and the peak of this process so far."""
    peak = most_held()
    return {"announced": announced, "peak": peak, "ratio": peak / announced if peak else None}


def kernels_of(run: Callable[[], Any]) -> list[tuple[str, float]] | None:
    """Names and milliseconds of what runs; None where no kernels can be seen."""
    if jax.default_backend() != "gpu":
        run()
        return None
    with kernels() as found:
        run()
    return found


class Parts:
    """Attention, experts and head alone, each of all layers. Layers that are alike share a program;
    gaps between those do not count, because only kernels do."""

    def __init__(self, model: Decoder, batch: int, room: int, context: int):
        self.model = model
        self.cache = filled_cache(model, room, batch)
        tokens = some_tokens(batch, model.config.vocabulary)
        self.at = model.place(tokens[:, None], jnp.int32(context), jnp.int32(1))
        self.x = model.embedding.get_value()[tokens]
        self.head = nnx.split(_Head(model))
        self.stacks = [nnx.split(stack) for stack in model.stacks]

    def moe(self) -> Any:
        x = self.x
        for graph, params in self.stacks:
            x = _feed(graph, params, x, self.at.exists)
        return x

    def attention(self) -> Any:
        x, caches = self.x, []
        for (graph, params), cache in zip(self.stacks, self.cache, strict=True):
            x, cache = _attend(graph, params, x, cache, self.at)
            caches.append(cache)
        self.cache = caches
        return x

    def last(self) -> Any:
        return _choose(*self.head, self.x)

    def ms(self, n: int) -> dict[str, float | None]:
        """Milliseconds of kernels; of a step's norms each is with what it precedes."""
        out = {}
        for name, run in (("moe", self.moe), ("attention", self.attention), ("head", self.last)):
            jax.block_until_ready(run())
            found = kernels_of(lambda run=run: jax.block_until_ready([run() for _ in range(n)]))
            out[name] = None if found is None else sum(ms for _, ms in found) / n
        return out


class _Head(nnx.Module):
    """The last norm, the head and the choice of a token."""

    def __init__(self, model: Decoder):
        self.norm = model.norm
        self.head = Linear(model.embedding.get_value()) if model.head is None else model.head

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.argmax(self.head(self.norm(x)).astype(jnp.float32), axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def _choose(graph, params, x):
    return nnx.merge(graph, params)(x)


@functools.partial(jax.jit, static_argnums=0)
def _feed(graph, params, x, exists):
    call = lambda block, x, number, window: block.feed(x, number, exists, None)
    return nnx.merge(graph, params).fold(call, x)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _attend(graph, params, x, cache, at):
    call = lambda block, carry, number, window: block.attend(*carry, number, window, at)
    return nnx.merge(graph, params).fold(call, (x, cache))
