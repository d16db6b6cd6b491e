"""How long a line's kernels take, beside the least that its bytes and products need."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

import jax
import numpy as np

from .. import cost
from ..tune import timing
from .device import Device
from .line import Line

# From data sheets: bytes a second, and 1e12 operations a second of products without sparsity, with
# float32 sums, of 16 bits, of 8 bits (None: it has none) and of float32. Names as JAX has them.
_RATES: dict[str, tuple[float, float, float | None, float]] = {
    "NVIDIA B200": (8.0e12, 2250, 4500, 75),
    "NVIDIA H200": (4.8e12, 989, 1979, 67),
    "NVIDIA H100 80GB HBM3": (3.35e12, 989, 1979, 67),
    "NVIDIA H100 PCIe": (2.0e12, 756, 1513, 51),
    "NVIDIA A100-SXM4-80GB": (2.04e12, 312, None, 19.5),
    "NVIDIA A100-SXM4-40GB": (1.56e12, 312, None, 19.5),
    "NVIDIA A100 80GB PCIe": (1.94e12, 312, None, 19.5),
    "NVIDIA A100-PCIE-40GB": (1.56e12, 312, None, 19.5),
    "NVIDIA A10": (0.6e12, 125, None, 31.2),
    "NVIDIA A40": (0.696e12, 149.7, None, 37.4),
    "NVIDIA L4": (0.3e12, 121, 242, 30.3),
    "NVIDIA L40S": (0.864e12, 362, 733, 91.6),
    "NVIDIA GeForce RTX 3090": (0.936e12, 71, None, 35.6),
    "NVIDIA GeForce RTX 4090": (1.008e12, 165.2, 330.3, 82.6),
    "NVIDIA GeForce RTX 5090": (1.792e12, 209.5, 419, 104.8),
}
_REPETITIONS = 10


def floor_us(kind: str, flops: float, bytes_: float, dtype: str, narrow: bool) -> float | None:
    """``max(bytes / bandwidth, operations / rate)``; None for a GPU that is not in the list."""
    if kind not in _RATES:
        return None
    bandwidth, halves, bytes_rate, floats = _RATES[kind]
    rate = bytes_rate if narrow else halves
    if dtype == "float32" and not narrow:  # or in six products of bfloat16 parts
        rate = max(floats, halves / 6)
    if rate is None:
        return None
    return 1e6 * max(bytes_ / bandwidth, flops / (1e12 * rate))


def timed(line: Line, here: Device) -> dict[str, Any]:
    """Microseconds of a call whose operands are in no cache, and the floor."""
    if line.timed is None:
        return {}
    function, operands = line.timed(np.random.default_rng(0))
    operands = jax.device_put(operands)
    compiled = jax.jit(function).lower(*operands).compile()
    run = lambda: compiled(*operands)
    us = None
    # Where CUPTI is missing, or not allowed, the host's clock has to do.
    with contextlib.suppress(ImportError, AttributeError, RuntimeError):
        us = statistics.median(timing.in_turns({0: run}, _REPETITIONS)[0])
    if us is None:
        us = _by_the_wall(run)
    of = cost.of(function, *operands)
    narrow = line.name.startswith("fp8")
    return {
        "us": round(us, 2),
        "floor_us": floor_us(here.kind, of.flops, of.bytes_accessed, line.dtype, narrow),
    }


def _by_the_wall(run) -> float:
    jax.block_until_ready(run())
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - begun)
    return 1e6 * min(found)
