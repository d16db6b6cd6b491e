"""How long training steps take, beside each other."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np
from tqdm import tqdm


def in_turns(trainers: dict, text, repeats: int = 15, warm_up: int = 3) -> dict:
    """Time the steps of two trainers by turns, so that both meet the same machine."""
    seconds, losses = {name: [] for name in trainers}, {name: [] for name in trainers}
    for _ in tqdm(range(warm_up + repeats), unit="step", disable=None):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            trainer.state, bits = trainer.train_step(trainer.state, text)
            jax.block_until_ready((trainer.state, bits))
            seconds[name].append(time.perf_counter() - began)
            losses[name].append(float(bits))
    medians = {name: statistics.median(times[warm_up:]) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"training step with {name}: {1e3 * median:.2f} ms, median of {repeats}")
    ours, theirs = medians.values()
    difference = float(np.ptp([*losses.values()], axis=0).max())
    print(f"ratio {theirs / ours:.2f} on {jax.devices()[0].device_kind}")
    print(f"their losses differ by at most {difference:.1e} bits per byte")
    return {"seconds": medians, "ratio": theirs / ours, "difference": difference}
