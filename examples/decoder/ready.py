"""From weights to a generator: what it needs is said before anything is loaded."""

from __future__ import annotations

import time
from pathlib import Path

import jax

from . import loading, peft
from .config import Config
from .experts import formats
from .generation import Generator
from .memory import Need, free
from .pages import enlarge
from .sampling import Sampling
from .weights import Weights


def ready(about: Config, weights: Weights, options: loading.Options, sampling: Sampling,
          chunk: int, adapters: Path | None = None) -> tuple[Generator, Need]:  # fmt: skip
    """Programs are compiled first: they say how much memory they take."""
    began = time.perf_counter()
    need, room = Need.of(about, weights.headers, options), free(options)
    need.check(room, options.devices)  # whether it is worth compiling
    print("compiling", flush=True)
    shapes, layer = loading.shapes(about, weights, options)
    if adapters is not None:
        peft.read(adapters, shapes)
    generator = Generator(shapes, options.tokens, sampling, chunk)
    need = need.compiled(generator.use, layer)
    need.check(room, options.devices)
    experts = f"; experts are in {said}" if (said := formats(shapes)) else ""
    print(f"{need.announced(room)}{experts}", flush=True)
    compiled_in, began = time.perf_counter() - began, time.perf_counter()
    model = loading.placed(about, weights, options)
    if adapters is not None:
        peft.read(adapters, model)
    generator.fill(model)
    enlarge(jax.block_until_ready(generator.params))
    loaded_in = time.perf_counter() - began
    print(f"compiled in {compiled_in:.1f} s, loaded in {loaded_in:.1f} s\n")
    return generator, need
