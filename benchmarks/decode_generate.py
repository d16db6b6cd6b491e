"""python -m benchmarks.decode --generate: examples/generate.py with whole models of random weights.

It prints the memory that was held beside what was announced, and tokens per second.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from examples.decoder.generation import Generator, Watch
from examples.decoder.loading import Options
from examples.decoder.memory import Need, most_held
from examples.decoder.ready import ready
from examples.decoder.sampling import Sampling

from .decode_models import Case, weights_of

CHUNK = 128  # tokens of the prompt in a step, unless --chunk says otherwise, as of generate.py
SETTLED = 16  # tokens, in the first of which XLA captures and tunes
MARGIN = 0.05  # of what is announced


def measured(case: Case, args: Any) -> bool:
    """Generates after a random prompt and prints what it took. False where the memory is another
    than announced, by more than :data:`MARGIN`."""
    config = dataclasses.replace(case.config(args.layers, args.tiny), attention=args.attention)
    tokens = -(-(args.context + args.generate) // args.chunk) * args.chunk
    options = Options(args.dtype, tokens=tokens, unrolled=not args.scanned)
    print(f"{case.name}: {config.layers} layers, {'scanned' if args.scanned else 'unrolled'}")
    weights = weights_of(case, config, args.dtype, on_host=True)
    generator, need = ready(config, weights, options, Sampling(), args.chunk)
    prompt = np.random.default_rng(0).integers(0, config.vocabulary, args.context).tolist()
    watch, rate = generated(generator, prompt, args.generate)
    settled = "" if rate is None else f", {rate:,.1f} after the first {SETTLED}"
    print(watch.said(len(prompt)) + settled)
    again, _ = generated(generator, prompt, 2)
    print(f"the next prompt, as long: {again.said(len(prompt))}")
    return fits(need, most_held())


def generated(generator: Generator, prompt: list[int], count: int) -> tuple[Watch, float | None]:
    """When tokens come, and how many a second after the first :data:`SETTLED`; None where there are
    no more."""
    watch, began = Watch(), 0.0
    for _ in watch(generator(prompt, count)):
        if len(watch.tokens) == SETTLED:
            began = watch.last
    more = len(watch.tokens) - SETTLED
    return watch, more / (watch.last - began) if more > 0 else None


def fits(need: Need, most: int | None) -> bool:
    if most is None:
        print("the platform does not say how much was held")
        return True
    print(need.compared(most))
    near = abs(most / need.total - 1) <= MARGIN
    if not near:
        print(f"that differs by more than {MARGIN:.0%}: what is announced is wrong")
    return near
