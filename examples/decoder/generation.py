"""Two compiled programs, one for a prompt and one for the tokens after it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .experts import AXIS
from .memory import Use
from .model import Cache, Decoder, divides_heads, heads_axis
from .sampling import Sampling

#: Tokens that one call of a program gives on a GPU. Hundreds of weights are passed in each call,
#: which takes a host about as long as a GPU takes for a token or two.
TOKENS_OF_A_CALL = 4
#: Calls that are made, on a GPU, before the tokens of one are used. The second keeps the GPU at
#: work while a slow host makes the next.
CALLS_AHEAD = 2


def following(model: Decoder, cache: list[Cache], tokens: jax.Array, position: jax.Array,
              key: jax.Array, sampling: Sampling):  # fmt: skip
    """The token of each sequence after these, (sequences,), its position, and the cache. ``key`` is
    the data of one: arrays of keys are slow to call a compiled program with."""
    x, cache = model(tokens[:, None], position, jnp.int32(1), cache)
    logits, key = model.logits(x[:, 0]), jax.random.fold_in(jax.random.wrap_key_data(key), position)
    if len(tokens) == 1:
        return sampling(logits[0], key)[None], position + 1, cache
    keys = jax.random.split(key, len(tokens))
    return jax.vmap(sampling)(logits, keys), position + 1, cache


def key_of(seed: int) -> jax.Array:
    return jax.random.key_data(jax.random.key(seed))


class Generator:
    """Generates after a prompt. Both programs are compiled here.

    A prompt is read in steps of ``chunk`` tokens, the last of which is filled up: one program reads
    prompts of every length, and attention's logits are bounded. The cache is donated, so each step
    writes into it. ``each`` tokens come of one call: those behind the end of a text are made, too.

    ``model`` may be :func:`loading.shapes`', so that :attr:`use` is known before anything is
    loaded. :meth:`fill` gives such a generator its weights.
    """

    def __init__(self, model: Decoder, room: int, sampling: Sampling, chunk: int,
                 each: int | None = None):  # fmt: skip
        self.sampling, self.chunk, self.room = sampling, chunk, -(-room // chunk) * chunk
        gpu = jax.default_backend() == "gpu"
        self.each = each or (TOKENS_OF_A_CALL if gpu else 1)
        self.ahead = CALLS_AHEAD if gpu else 1
        self.compiled_in = 0.0
        self._compile(model)

    def fill(self, model: Decoder) -> None:
        """Generate with these weights. Where layers turn out to be of another structure than the
        first of their kind, the programs are compiled again."""
        graph, params = nnx.split(model)
        params, tree = jax.tree.flatten(params)
        alike = [(a.shape, a.dtype) for a in params] == [(a.shape, a.dtype) for a in self.params]
        if (graph, tree) == (self.graph, self.tree) and alike:
            self.params = params
        else:
            self._compile(model)

    def _compile(self, model: Decoder) -> None:
        began = time.perf_counter()
        self.graph, params = nnx.split(model)
        # A list of arrays, because a tree of modules takes the host as long as the device a step.
        self.params, self.tree = jax.tree.flatten(params)
        graph, tree, sampling = self.graph, self.tree, self.sampling
        whole = lambda params: nnx.merge(graph, tree.unflatten(params))
        mesh, heads = model.mesh, divides_heads(model.config, model.mesh)
        at = lambda *axes: None if mesh is None else NamedSharding(mesh, P(*axes))
        # A cache stays where it is: heads are divided where the weights' are.
        in_cache = at(*[None] * heads_axis(model.config), AXIS) if heads else at()
        empty = jax.jit(lambda: model.empty_cache(self.room), out_shardings=in_cache)

        def read(params, cache, tokens, start, count, key):
            """The token after the first ``count`` of these, its position, and the cache."""
            model = whole(params)
            x, cache = model(tokens[None], start, count, cache)
            key = jax.random.fold_in(jax.random.wrap_key_data(key), start)
            return sampling(model.logits(x[0, count - 1]), key)[None], start + count, cache

        def write(params, cache, tokens, position, key):
            """The tokens that follow, the last of them, its position, and the cache."""
            model = whole(params)

            def step(carry, _):
                tokens, position, cache = carry
                carry = following(model, cache, tokens, position, key, sampling)
                return carry, carry[0]

            carry, found = jax.lax.scan(step, (tokens, position, cache), length=self.each)
            return found, *carry

        like = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=at())
        cache = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=in_cache),
            jax.eval_shape(empty),
        )
        key, number = jax.eval_shape(lambda: key_of(0)), like((), jnp.int32)
        key = like(key.shape, key.dtype)
        out = lambda small: mesh and (*[at()] * small, in_cache)
        compiled = lambda step, small, *args: (
            jax.jit(step, donate_argnums=1, out_shardings=out(small))
            .lower(self.params, cache, *args)
            .compile()
        )
        self.new_cache = empty.lower().compile()
        self.read = compiled(read, 2, like((self.chunk,), jnp.int32), number, number, key)
        self.write = compiled(write, 3, like((1,), jnp.int32), number, key)
        self.use = Use.of(self.params, cache, (self.read, self.write))
        self.on_devices = lambda a: a if mesh is None else jax.device_put(a, at())
        self.on_devices(key_of(0))  # compiles what makes a key
        self.compiled_in += time.perf_counter() - began

    def __call__(
        self, prompt: Sequence[int], count: int, ends: Sequence[int] = (), seed: int = 0
    ) -> Iterator[int]:
        """At most ``count`` tokens. The device works on the next ones while these are used."""
        if len(prompt) + count > self.room:
            raise ValueError(f"{len(prompt)} + {count} tokens are more than {self.room}")
        key, cache = self.on_devices(key_of(seed)), self.new_cache()
        token = position = jnp.int32(0)
        for start in range(0, len(prompt), self.chunk):
            part = np.zeros(self.chunk, np.int32)
            some = prompt[start : start + self.chunk]
            part[: len(some)] = some
            numbers = (self.on_devices(jnp.int32(n)) for n in (start, len(some)))
            token, position, cache = self.read(
                self.params, cache, self.on_devices(jnp.asarray(part)), *numbers, key
            )
        calls, left = deque([token]), count - 1
        while calls:
            while left > 0 and len(calls) <= self.ahead:
                found, token, position, cache = self.write(self.params, cache, token, position, key)
                calls.append(found)
                left -= self.each
            for out in np.asarray(calls.popleft()).reshape(-1)[:count].tolist():
                if out in ends:
                    return
                count -= 1
                yield out


class Watch:
    """When tokens come, ``each`` of them by a call after the first."""

    def __init__(self, each: int = 1):
        self.each = each
        self.tokens: list[int] = []
        self.first: float | None = None  # seconds; None where there is no token
        self.last = self.began = time.perf_counter()

    def __call__(self, stream):
        self.began = time.perf_counter()
        for token in stream:
            self.last = time.perf_counter()
            if not self.tokens:
                self.first = self.last - self.began
            self.tokens.append(token)
            yield token

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first, of whole calls; None where there are none."""
        if self.first is None or len(self.tokens) == 1:
            return None
        made = -(-(len(self.tokens) - 1) // self.each) * self.each
        return made / (self.last - self.began - self.first)

    def said(self, prompt: int) -> str:
        """One line about when tokens came, after a prompt of so many."""
        if self.first is None:
            return "the text ends at once: the first token ends it"
        each = f"{prompt / self.first:,.0f} tokens/s of the prompt"
        then = "" if self.rate is None else f", then {self.rate:,.1f} tokens/s"
        return f"first token after {self.first:.3f} s ({each}){then}"
