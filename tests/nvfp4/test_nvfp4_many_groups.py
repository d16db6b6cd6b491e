"""NVFP4 operations of 4096 groups, of which most are empty or all have very few rows."""

import functools

import jax
import numpy as np
import oracle
import pytest
from nvfp4_grouped_problems import along_t, mm_oracle, positive, random, wgrad_oracle
from nvfp4_quantize_cases import same, want_of
from test_nvfp4_linear import composition, run

import jax_groupgemm as jgg

G, T = 4096, 8400
ON_GPU = pytest.param("gpu", marks=pytest.mark.gpu)
everywhere = pytest.mark.parametrize("on", ["cpu", ON_GPU])
SUMS = 1e-5


def routings(rng):
    few = np.zeros(G, np.int32)
    few[rng.choice(G, 8, replace=False)] = rng.integers(900, 1050, 8)
    return few, rng.integers(0, 4, G).astype(np.int32), rng.integers(1, 4, G).astype(np.int32)


@everywhere
def test_mm(rng, on):
    """Weights as stored, and on a GPU prepacked."""
    n = 64 if on == "gpu" else 8
    x, w, alpha = random(rng, T, 64), random(rng, G, n, 64, scale=positive(rng, G)), positive(rng)
    f = jax.jit(functools.partial(jgg.nvfp4_grouped_mm, preferred_element_type="float32"))
    for weight in (w, jgg.prepack(w)) if on == "gpu" else (w,):
        for sizes in routings(rng):
            out = f(x, weight, sizes, alpha=alpha)
            oracle.assert_close(out, mm_oracle(x, w, sizes, alpha), tolerance=SUMS)
            assert not np.asarray(out)[min(sizes.sum(), T) :].any()


@everywhere
def test_wgrad(rng, on):
    f, alpha = jax.jit(jgg.nvfp4_grouped_wgrad), positive(rng, G)
    for sizes in routings(rng):
        x, dy = (along_t(rng, n, sizes, T, positive(rng)) for n in (16, 8))
        want = wgrad_oracle(x, dy, sizes) * oracle.f64(alpha)[:, None, None]
        out = f(x, dy, sizes, alpha=alpha)
        oracle.assert_close(out, want, tolerance=SUMS)
        assert not np.asarray(out)[sizes == 0].any()


@everywhere
@pytest.mark.parametrize("options", [{"axis": -2, "hadamard": True}, {}])
@pytest.mark.one_in(2)
def test_quantize(rng, on, options):
    """Byte for byte: in blocks along rows, each group padded to 64, and along columns."""
    x = rng.standard_normal((T, 16)).astype(np.float32)
    f = jax.jit(functools.partial(jgg.nvfp4_quantize, **options))
    for sizes in routings(rng):
        same(f(x, group_sizes=sizes), want_of(x, sizes=sizes, **options))


@pytest.mark.parametrize("on", [pytest.param("cpu", marks=pytest.mark.weekly), ON_GPU])
def test_linear(rng, on):
    k = 32 if on == "gpu" else 16
    x, ct = oracle.random(rng, (T, k)), oracle.random(rng, (T, 32))
    w, bias = oracle.random(rng, (G, 32, k)), oracle.random(rng, (G, 32))
    f = jax.jit(run)
    for sizes in routings(rng)[:2]:
        want = composition(x, w, bias, ct, sizes)
        for value, expected in zip(f(x, w, bias, ct, sizes), want, strict=True):
            oracle.assert_close(value, expected, tolerance=SUMS)
