"""benchmarks.overlap: what it says of a trace, and that its programs compute the same."""

import functools

import jax
import numpy as np
import pytest
from meshes import needs_two_devices

from benchmarks import overlap, trace
from benchmarks.expert_parallel_cases import TINY, made, tokens, weights


def test_parts_of_a_trace():
    ms = lambda *at: tuple(1e6 * t for t in at)
    runs = [
        ("ncclDevKernel_AllGather_RING_LL", ms(0, 4)),
        ("gemm", ms(3, 7)),
        ("fusion", ms(3, 5)),
        ("ncclDevKernel_ReduceScatter", ms(9, 10)),
    ]
    found = overlap.parts_of(runs, calls=2)
    assert found == {"wall": 5.0, "transfers": 2.5, "others": 2.0, "both": 0.5, "idle": 1.0}


def test_intervals():
    assert trace.merged([(4, 5), (0, 2), (1, 3), (3, 3.5)]) == [(0, 3.5), (4, 5)]
    assert trace.shared([(0, 4), (6, 8)], [(3, 7)]) == 2


@needs_two_devices
@pytest.mark.parametrize("way", ["halves", "all_to_all"])
def test_ways_agree(way):
    up, down = made(2, functools.partial(weights, TINY))
    x, index, weight, dy = made(2, functools.partial(tokens, TINY, TINY.tokens, 2, "even"))
    args = x, up, down, index, weight, dy
    want = overlap.layer_call(2, "gather", back=True)(*args)
    for got, other in zip(overlap.layer_call(2, way, back=True)(*args), want, strict=True):
        got, other = (np.asarray(jax.device_get(a), np.float32) for a in (got, other))
        assert np.linalg.norm(got - other) <= 0.02 * np.linalg.norm(other)
