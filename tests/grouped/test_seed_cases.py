"""The shapes of MLX's benchmark of segmented_mm, cut anywhere, against float64 numpy."""

import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import assert_on_sm90, run

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension

sys.path.append(str(Path(__file__).parents[2]))  # last: an installed jax_groupgemm comes first

from benchmarks.shapes import SEGMENTED

HALVES = ("bfloat16", "float16")
# Results are rounded; float32 sums of a segment may err as sqrt(K / 512) beyond 512.
TOLERANCE = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 1.5e-6}


def cut_anywhere(rng, k, count) -> np.ndarray:
    """So many segments from 0 to k, cut at no multiple of 16; two are empty."""
    cuts = rng.choice(np.flatnonzero(np.arange(k) % 16), count - 3, replace=False)
    cuts = np.sort([0, *cuts, *rng.choice(cuts, 2, replace=False), k])
    return np.stack([cuts[:-1], cuts[1:]], 1).astype(np.int32)


def cases(dtypes) -> list:
    """Dtype, whether a is transposed, implementation."""
    implementations = (None, "sm90") if 90 in extension.live_capabilities() else (None,)
    return list(itertools.product(dtypes, (False, True), implementations))


@jax.jit
def products(stored, spans):
    """Of the operands (a, its transpose, b) of each dtype: all cases."""
    return [
        jgg.segmented_mm(
            stored[dtype][transpose_a], stored[dtype][2], spans, transpose_a=transpose_a,
            precision="highest", implementation=implementation,
        )
        for dtype, transpose_a, implementation in cases(stored)
    ]  # fmt: skip


@jax.jit
def distances(results, want):
    """Of every segment, on the device: how far results are from ``want``, and its norm."""
    norms = lambda a: jnp.sqrt((a * a).sum((1, 2)))
    return [norms(got.astype(want.dtype) - want) for got in results], norms(want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [HALVES, ("float32",)], ids=["halves", "float32"])
@pytest.mark.parametrize("shape", SEGMENTED, ids=lambda shape: "x".join(map(str, shape)))
def test_seed_cases(rng, shape, dtypes):
    m, n, k, count = shape
    spans = cut_anywhere(rng, k, count)
    lengths = np.diff(spans)[:, 0]
    assert (lengths == 0).sum() == 2
    assert lengths.sum() == k
    a, b = (oracle.host_random(rng, size, dtypes[0]) for size in ((m, k), (k, n)))
    for dtype in dtypes:  # numbers that all of them have
        a, b = (v.astype("float32").astype(jnp.dtype(dtype)) for v in (a, b))
    stored = jax.device_put(
        {dtype: [v.astype(jnp.dtype(dtype)) for v in (a, a.T, b)] for dtype in dtypes}
    )
    results, kernels = run(products, stored, spans)
    if 90 in extension.live_capabilities():
        if dtypes == HALVES:
            assert_on_sm90(kernels, len(results))
        else:  # the two by name, at least
            assert sum("GemmSm90Kernel" in name for name in kernels) >= 2
    with jax.enable_x64(True):
        found, norms = distances(results, oracle.segmented_mm(a, b, spans))
    for (dtype, *_), got, distance in zip(cases(dtypes), results, found, strict=True):
        assert got.dtype == dtype
        most = TOLERANCE[dtype] * np.maximum(1, lengths / 512) ** 0.5
        assert (np.asarray(distance) <= most * np.asarray(norms)).all()
