"""python -m benchmarks.decode --generate: examples/generate.py with whole models of random weights.

It prints the memory that was held beside what was announced, and tokens per second; or, with
--pauses, how long the device has nothing to do between graphs.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

import numpy as np

from examples.decoder.generation import Generator, Watch
from examples.decoder.loading import Options
from examples.decoder.memory import Need, most_held
from examples.decoder.ready import ready
from examples.decoder.sampling import Sampling

from . import pauses
from .decode_models import Case, weights_of

CHUNK = 128  # tokens of the prompt in a step, unless --chunk says otherwise, as of generate.py
SETTLED = 17  # tokens, the end of a call, in the first of which XLA captures and tunes
LONG = 20  # us, of a pause
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
    if args.pauses:
        print(pauses_said(generator, prompt, args.generate))
        return True
    watch, rate = generated(generator, prompt, args.generate)
    settled = "" if rate is None else f", {rate:,.1f} after the first {SETTLED}"
    print(watch.said(len(prompt)) + settled)
    again, _ = generated(generator, prompt, 1)
    print(f"the next prompt, as long: {again.said(len(prompt))}")
    return fits(need, most_held())


def generated(generator: Generator, prompt: list[int], count: int) -> tuple[Watch, float | None]:
    """When tokens come, and how many a second after the first :data:`SETTLED`; None where there are
    no more."""
    watch, times = Watch(generator.each), []
    for _ in watch(generator(prompt, count)):
        times.append(watch.last)
    more = calls_after(len(times), generator)
    return watch, more / (times[SETTLED - 1 + more] - times[SETTLED - 1]) if more else None


def calls_after(count: int, generator: Generator) -> int:
    """Tokens of the whole calls after the first :data:`SETTLED` ones."""
    return max(count - SETTLED, 0) // generator.each * generator.each


def pauses_said(generator: Generator, prompt: list[int], count: int) -> str:
    """The device's pauses after the first :data:`SETTLED` tokens."""
    times: list[int] = []
    # CUPTI crashes at a graph that is older than its recording.
    with pauses.recorded() as recording:
        for _ in generator(prompt, count):
            times.append(recording.now())
    tokens = calls_after(len(times), generator)
    start, end = times[SETTLED - 1], times[SETTLED - 1 + tokens]
    activities = recording.between(start, end)
    found = sorted(pauses.pauses(activities), key=lambda p: -p.us)
    lines = [
        f"{tokens} tokens, {len(activities) / tokens:.1f} graphs, kernels and copies each, "
        f"{(end - start) / 1e3 / tokens:.1f} us each, of which "
        f"{sum(p.us for p in found) / tokens:.1f} idle; "
        f"{sum(p.us > LONG for p in found)} pauses of more than {LONG} us; the longest:"
    ]
    for p in found[:5]:
        at = bisect.bisect(times, p.start)
        lines.append(f"{p.us:8.2f} us at token {at}, {p.before[:40]} before, {p.after[:40]} after")
    return "\n".join(lines)


def fits(need: Need, most: int | None) -> bool:
    if most is None:
        print("the platform does not say how much was held")
        return True
    print(need.compared(most))
    near = abs(most / need.total - 1) <= MARGIN
    if not near:
        print(f"that differs by more than {MARGIN:.0%}: what is announced is wrong")
    return near
