"""Two compiled programs, one for a prompt and one for each token after it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .experts import AXIS
from .model import Decoder, divides_heads
from .sampling import Sampling


class Generator:
    """Generates after a prompt. Both programs are compiled here.

    A prompt is read in steps of ``chunk`` tokens, the last of which is filled up: one program reads
    prompts of every length, and attention's logits are bounded. The cache is donated, so each step
    writes into it.
    """

    def __init__(self, model: Decoder, room: int, sampling: Sampling, chunk: int):
        self.model, self.chunk, self.room = model, chunk, -(-room // chunk) * chunk
        self.graph, self.params = nnx.split(model)
        mesh, heads = model.mesh, divides_heads(model.config, model.mesh)
        at = lambda *axes: None if mesh is None else NamedSharding(mesh, P(*axes))
        # A cache stays where it is: heads are divided where the weights' are.
        in_cache = at(None, None, AXIS) if heads else at()
        empty = jax.jit(lambda: model.empty_cache(self.room), out_shardings=in_cache)

        def read(params, cache, tokens, start, count, key):
            """The token after the first ``count`` of these, its position, and the cache."""
            model = nnx.merge(self.graph, params)
            x, cache = model(tokens, start, count, cache)
            key = jax.random.fold_in(key, start)
            return sampling(model.logits(x[count - 1]), key), start + count, cache

        def write(params, cache, token, position, key):
            """The token after this one, its position, and the cache."""
            model = nnx.merge(self.graph, params)
            x, cache = model(token[None], position, jnp.int32(1), cache)
            key = jax.random.fold_in(key, position)
            return sampling(model.logits(x[0]), key), position + 1, cache

        began = time.perf_counter()
        like = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=at())
        cache = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=in_cache),
            jax.eval_shape(empty),
        )
        key, number = jax.eval_shape(lambda: jax.random.key(0)), like((), jnp.int32)
        key = like(key.shape, key.dtype)
        compiled = lambda step, *args: (
            jax.jit(step, donate_argnums=1, out_shardings=mesh and (at(), at(), in_cache))
            .lower(self.params, cache, *args)
            .compile()
        )
        self.new_cache = empty.lower().compile()
        self.read = compiled(read, like((chunk,), jnp.int32), number, number, key)
        self.write = compiled(write, number, number, key)
        self.on_devices = lambda a: a if mesh is None else jax.device_put(a, at())
        self.on_devices(jax.random.key(0))  # compiles what makes a key
        self.compiled_in = time.perf_counter() - began

    def __call__(
        self, prompt: Sequence[int], count: int, ends: Sequence[int] = (), seed: int = 0
    ) -> Iterator[int]:
        """At most ``count`` tokens. The device works on the next one while this one is used."""
        if len(prompt) + count > self.room:
            raise ValueError(f"{len(prompt)} + {count} tokens are more than {self.room}")
        key, cache = self.on_devices(jax.random.key(seed)), self.new_cache()
        token = position = jnp.int32(0)
        for start in range(0, len(prompt), self.chunk):
            part = np.zeros(self.chunk, np.int32)
            some = prompt[start : start + self.chunk]
            part[: len(some)] = some
            numbers = (self.on_devices(jnp.int32(n)) for n in (start, len(some)))
            token, position, cache = self.read(
                self.params, cache, self.on_devices(jnp.asarray(part)), *numbers, key
            )
        for left in reversed(range(count)):
            before = token
            if left:
                token, position, cache = self.write(self.params, cache, token, position, key)
            out = int(before)
            if out in ends:
                return
            yield out
