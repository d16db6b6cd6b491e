"""How long kernels take on the device (CUPTI), and operands to time them with: what the tuner and
the benchmarks share.

Before every timed call 128 MiB are read and 128 MiB written, so that it finds nothing in the L2
cache. The kernel that does so also marks, in CUPTI's list of kernels, where the call begins.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SCRATCH = 2**25  # float32 elements, 128 MiB


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(seed, shape, dtype):
    key = jax.random.key(seed)
    if len(shape) < 3:
        return jax.random.normal(key, shape, dtype)
    one = lambda key: jax.random.normal(key, shape[1:], dtype)
    return lax.map(one, jax.random.split(key, shape[0]))


def random(seed: int, shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.Array:
    """Normal numbers; matrix by matrix, so that no more memory is needed than the result's."""
    return jax.block_until_ready(_draw(seed, shape, dtype))


# This clears the cache before a call, or, on few elements, only marks where one begins. Nothing
# that is timed has a kernel of this name.
mark = jax.jit(jnp.tan)


@functools.cache
def scratch(cold: bool = True) -> jax.Array:
    return random(9, (SCRATCH if cold else 8,), "float32")


def extension() -> Any:
    """What jax.experimental.mosaic.gpu.profiler measures with: it keeps every result, we cannot."""
    profiler = importlib.import_module("jax.experimental.mosaic.gpu.profiler")
    if profiler.mosaic_gpu_lib is None:
        raise RuntimeError("this jaxlib has no CUPTI bindings")
    return profiler.mosaic_gpu_lib._mosaic_gpu_ext


@contextlib.contextmanager
def kernels() -> Iterator[list[tuple[str, float]]]:
    """Names and milliseconds of the kernels that run inside, in order; filled in at the end."""
    cupti, found = extension(), []
    cupti._cupti_init()
    try:
        yield found
    finally:
        found += cupti._cupti_get_timings(True)


@functools.cache
def mark_names() -> frozenset[str]:
    for cold in (True, False):
        jax.block_until_ready(mark(scratch(cold)))
    with kernels() as found:
        for cold in (True, False):
            jax.block_until_ready(mark(scratch(cold)))
    if len(found) != 2:
        raise RuntimeError(f"CUPTI saw {len(found)} kernels of 2: {found}")
    return frozenset(name for name, _ in found)


def split(kernels, marks, n: int) -> list[float]:
    """Microseconds of each of n calls, each of which begins with a mark that is not counted."""
    calls: list[list[float]] = []
    for name, ms in kernels:
        if name in marks:
            calls.append([])
        elif calls:
            calls[-1].append(ms)
        else:
            raise RuntimeError(f"kernel {name} ran before the first call")
    counts = [len(call) for call in calls]
    if len(calls) != n or not all(counts) or len(set(counts)) != 1:
        raise RuntimeError(f"CUPTI saw {counts} kernels in {n} calls")
    return [1e3 * sum(call) for call in calls]


def in_turns(runs: dict[int, Callable[[], Any]], repetitions: int) -> dict[int, list[float]]:
    """Microseconds of every repetition of every run, one after the other in turns."""
    cleared, marks = scratch(), mark_names()
    for run in runs.values():
        jax.block_until_ready(run())
    with kernels() as found:
        for _ in range(repetitions):
            for run in runs.values():
                mark(cleared)
                jax.block_until_ready(run())
    times = split(found, marks, repetitions * len(runs))
    return {name: times[i :: len(runs)] for i, name in enumerate(runs)}
