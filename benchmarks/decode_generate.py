"""python -m benchmarks.decode --generate: examples/generate.py with whole models of random weights.

It prints the memory that was held beside what was announced, and counts gaps between kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.decoder.generation import Generator, Watch
from examples.decoder.loading import Options
from examples.decoder.memory import Need, most_held
from examples.decoder.ready import ready
from examples.decoder.sampling import Sampling

from . import trace
from .decode_models import Case, weights_of

CHUNK = 128  # tokens of the prompt in a step, unless --chunk says otherwise, as of generate.py
SETTLED = 16  # tokens before a trace begins: XLA captures and tunes in the first ones
GAP_US = 20.0
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
    folder = args.trace and args.trace / case.name.replace(" ", "-")
    watch, rate = generated(generator, prompt, args.generate, folder)
    print(
        f"first token after {watch.first:.3f} s ({len(prompt) / watch.first:,.0f} tokens/s of the "
        f"prompt), then {watch.rate:,.1f} tokens/s, {rate:,.1f} after the first {SETTLED}"
        f"{'' if folder is None else ', while traced'}"
    )
    again, _ = generated(generator, prompt, 2, None)
    print(f"first token of the next prompt, as long, after {again.first:.3f} s")
    if folder is not None:
        steps = len(watch.tokens) - SETTLED
        print(described(gaps(trace.planes_of(folder)) if steps > 0 else [], steps))
    return fits(need, most_held())


def generated(
    generator: Generator, prompt: list[int], count: int, folder: Path | None
) -> tuple[Watch, float]:
    """When tokens come, and how many a second after the first :data:`SETTLED`, which a trace is
    of."""
    watch, began = Watch(), 0.0
    with contextlib.ExitStack() as stack:
        for _ in watch(generator(prompt, count)):
            if len(watch.tokens) == SETTLED:
                if folder is not None:
                    stack.enter_context(jax.profiler.trace(str(folder)))
                began = time.perf_counter()
    more = len(watch.tokens) - SETTLED
    return watch, more / (watch.last - began) if more > 0 else 0.0


def fits(need: Need, most: int | None) -> bool:
    if most is None:
        print("the platform does not say how much was held")
        return True
    print(need.compared(most))
    return abs(most / need.total - 1) <= MARGIN


def gaps(planes: Iterable[Any]) -> list[float]:
    """Microseconds in which nothing runs on the first GPU of a trace, between what runs."""
    return [ns / 1e3 for ns in trace.idle(interval for _, interval in trace.runs(planes))]


def described(gaps: list[float], steps: int) -> str:
    if not gaps:
        return "the trace has no kernels"
    long = sum(gap > GAP_US for gap in gaps)
    usual = sorted(gaps, reverse=True)[min(steps // 2, len(gaps) - 1)]
    return (
        f"{steps} steps have {long} gaps of more than {GAP_US:.0f} us between kernels; the longest "
        f"takes {max(gaps):.1f} us, the longest of a usual step {usual:.1f} us"
    )
