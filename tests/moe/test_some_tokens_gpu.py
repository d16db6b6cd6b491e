"""A layer of some tokens, by four kernels, or by three where both products are in one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import needs_hopper, run
from replays import CAPTURED, EAGER, assert_chained
from test_few_dense_gpu import problem

import jax_groupgemm as jgg

pytestmark = [pytest.mark.gpu, needs_hopper]
E, D, F = 64, 512, 256
MANY: dict[str, Any] = {
    "e": 128,
    "d": 1152,
    "f": 576,
}  # tiles of both products, which do not divide these sizes


def packed(mode, *weights, **options):
    """(E, K, N) in layout "sm90"."""
    quantized = (jgg.quantize(w, mode=mode, contract=-2, **options) for w in weights)
    return [jgg.prepack(q, strict=True) for q in quantized]


def check(problem, count=4, **options):
    """Against the composition of other kernels, and that it is so many kernels."""
    layer = lambda *a: jgg.moe_mlp(*a, **options)
    out, kernels = run(jax.jit(layer), *problem)
    assert [sum(name in k for k in kernels) for name in ("SomeRows", "Combine")] == [1, 1]
    assert len(kernels) == count, kernels
    want = jax.jit(lambda *a: jgg.moe_mlp(*a, **options, implementation="composed"))(*problem)
    assert out.dtype == want.dtype
    oracle.assert_close_but_nan(out, want, 5e-3)
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("tokens", "k"), [(64, 8), (13, 5), (65, 1), (32, 32)])
def test_arrays(rng, dtype, tokens, k):
    check(problem(rng, dtype, tokens, k, e=E, d=D, f=F))


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4", "affine", "mxfp8", "fp8"])
@pytest.mark.parametrize(("tokens", "k"), [(64, 8), (17, 4)])
def test_quantized(rng, mode, tokens, k):
    x, up, down, *pairs = problem(rng, "bfloat16", tokens, k, e=E, d=D, f=F)
    check((x, *packed(mode, up, down), *pairs))


def test_shapes_and_options(rng):
    """Sizes that no tile divides, weights along K, experts elsewhere, one expert of all tokens."""
    check(problem(rng, "bfloat16", 40, 4, e=24, d=200, f=104))
    x, up, down, index, weight = problem(rng, "bfloat16", 24, 4, e=E, d=D, f=F)
    transposed = x, up.swapaxes(1, 2), down.swapaxes(1, 2), index, weight
    check(transposed, transpose_w=True)
    index = index.at[3].set(-1).at[4, 1].set(E + 20).at[5:20].set(7)
    some = x, up, down, index, weight
    check(some, expert_offset=jnp.int32(5))
    check(some, activation="geglu", preferred_element_type=jnp.float32)
    check((x, *packed("nvfp4", up, down), index, weight))


def test_nan(rng):
    """A NaN stays in its token, and in its column."""
    x, up, down, _, weight = problem(rng, "bfloat16", 40, 2, e=E, d=D, f=F)
    index = jnp.arange(80, dtype=jnp.int32).reshape(40, 2) % E
    out = check((x.at[1, 7].set(jnp.nan), up, down, index, weight))
    np.testing.assert_array_equal(np.isnan(oracle.f64(out)).all(1), np.arange(40) == 1)


def of_both(rng, kind) -> tuple[Any, ...]:
    """Many experts, of which one has more rows than a tile, and some have none."""
    x, up, down, index, weight = problem(
        rng, "bfloat16" if kind == "nvfp4" else kind, 64, 8, **MANY
    )
    index = index.at[:40, 0].set(3)
    return x, *(packed("nvfp4", up, down) if kind == "nvfp4" else (up, down)), index, weight


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "nvfp4"])
def test_both_products_in_one_kernel(rng, kind):
    """... and the same bits in each run, whoever takes a tile."""
    problem = of_both(rng, kind)
    out = check(problem, count=3)
    f = jax.jit(jgg.moe_mlp)
    assert all((f(*problem) == out).all() for _ in range(50))
    x, up, down, index, weight = problem
    check((x, up, down, index, weight), count=3, expert_offset=jnp.int32(40))
    if kind != "nvfp4":
        transposed = x, up.swapaxes(1, 2), down.swapaxes(1, 2), index, weight
        check(transposed, count=3, transpose_w=True)


def test_nan_where_both_products_are_one_kernel(rng):
    for kind in ("bfloat16", "nvfp4"):
        x, *others = of_both(rng, kind)
        out = check((x.at[1, 7].set(jnp.nan), *others), count=3)
        np.testing.assert_array_equal(np.isnan(oracle.f64(out)).all(1), np.arange(64) == 1)


@pytest.mark.parametrize("kind", ["bfloat16", "nvfp4"])
def test_both_products_replayed(rng, kind):
    assert_chained(of_both(rng, kind), 6, CAPTURED)


@pytest.mark.parametrize("options", [EAGER, CAPTURED], ids=["eager", "captured"])
@pytest.mark.parametrize("quantized", [False, True])
def test_replayed(rng, quantized, options):
    x, up, down, index, weight = problem(rng, "bfloat16", 64, 8, e=E, d=D, f=F)
    if quantized:
        up, down = packed("nvfp4", up, down)
    assert_chained((x, up, down, index, weight), 6, options)
