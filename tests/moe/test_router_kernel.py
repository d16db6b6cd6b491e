"""The kernel of a router of few tokens (ffi/moe/device/router_sm90.cuh), run on the host, clusters
and all, against the definition."""

import ctypes

import host_program
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from host_memory import GUARD, aligned, copied
from host_program import dtype_number, pointer
from test_top_k_kernel import OPTIONS, TopKArgs

from jax_groupgemm import router

pytestmark = host_program.needs_compiler


class RouterArgs(ctypes.Structure):
    _fields_ = [
        ("choice", TopKArgs),
        *[(n, ctypes.c_void_p) for n in ("x", "w", "logit_bias", "logits")],
        *[(n, ctypes.c_int32) for n in ("d", "part", "x_dtype")],
    ]


@pytest.fixture(scope="module")
def kernel():
    return host_program.build_kernels("router_kernel").router_kernel


def run(kernel, x, w, k, *, transposed=False, blocks=8, threads=64, logit_bias=None,
        bias=None, scores="softmax", renormalize=True, scale=1.0, groups=1,
        top_groups=None):  # fmt: skip
    (tokens, d), experts = x.shape, w.shape[0 if transposed else 1]
    expert, weight = (aligned(4 * tokens * k, GUARD) for _ in range(2))
    logits = aligned(4 * tokens * experts, GUARD)
    given = [None if a is None else copied(np.asarray(a)) for a in (bias, x, w, logit_bias)]
    bias, in_x, in_w, logit_bias = map(pointer, given)
    choice = TopKArgs(
        None, bias, pointer(expert), pointer(weight), tokens, experts, k, groups,
        groups if top_groups is None else top_groups, scale, False, scores == "sigmoid",
        renormalize,
    )  # fmt: skip
    part = -(-d // (8 * blocks)) * 8
    args = RouterArgs(
        choice, in_x, in_w, logit_bias, pointer(logits), d, part, dtype_number(x.dtype)
    )
    half = w.dtype == ml_dtypes.bfloat16
    kernel(ctypes.byref(args), int(half), int(transposed), blocks, threads)
    assert all((memory[-GUARD:] == 0xAB).all() for memory in (expert, weight, logits))
    values = lambda memory, dtype: memory[:-GUARD].view(dtype).reshape(tokens, -1)
    return values(expert, np.int32), values(weight, np.float32), values(logits, np.float32)


def compare(kernel, x, w, k, *, transposed=False, logit_bias=None, blocks=8,
            threads=64, **options):  # fmt: skip
    """Logits beside exact ones, and the choice beside that of these logits."""
    expert, weight, logits = run(
        kernel, x, w, k, transposed=transposed, logit_bias=logit_bias,
        blocks=blocks, threads=threads, **options,
    )  # fmt: skip
    wide = oracle.f64(w).T if transposed else oracle.f64(w)
    exact = oracle.f64(x) @ wide + (0 if logit_bias is None else oracle.f64(logit_bias))
    size = np.abs(oracle.f64(x)) @ np.abs(wide)
    assert (np.abs(logits - exact) <= 1e-6 * size + 1e-6).all()
    want = router.choose(jnp.asarray(logits), k, **options)
    np.testing.assert_array_equal(expert, want.expert)
    np.testing.assert_allclose(weight, want.weight, rtol=2e-6, atol=2e-38)


def operands(rng, tokens, d, experts, x_dtype="float32", w_dtype="float32", transposed=False):
    x = np.array(oracle.random(rng, (tokens, d), x_dtype))
    return x, np.asarray(oracle.random(rng, (experts, d) if transposed else (d, experts), w_dtype))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")],
)
def test_values(kernel, rng, x_dtype, w_dtype, transposed):
    """Experts that are no whole warps, and several clusters."""
    x, w = operands(rng, 2, 136, 60, x_dtype, w_dtype, transposed)
    bias = rng.normal(size=60).astype(np.float32)
    compare(kernel, x, w, 4, transposed=transposed, logit_bias=bias)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("d", "experts", "blocks"), [(8, 4, 8), (1200, 8, 4), (320, 260, 5), (72, 512, 4)]
)
def test_sizes(kernel, rng, d, experts, blocks, transposed):
    """Blocks without a part, parts longer than a warp or a batch takes, many experts."""
    x, w = operands(rng, 1, d, experts, transposed=transposed)
    compare(
        kernel, x, w, min(experts, 8), transposed=transposed, blocks=blocks, threads=128,
    )  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_choices(kernel, rng, name):
    options = dict(OPTIONS[name])
    if options.pop("bias", False):
        options["bias"] = rng.normal(size=32).astype(np.float32)
    compare(kernel, *operands(rng, 3, 64, 32), 6, **options)


def test_nan_stays_in_its_token_and_ties(kernel, rng):
    x, w = operands(rng, 9, 64, 40)
    x[2, 5] = np.nan
    expert, weight, logits = run(kernel, x, w, 4)
    assert np.isnan(logits[2]).all()
    assert expert[2].tolist() == [0, 1, 2, 3]
    assert np.isnan(weight[2]).all()
    others = np.arange(9) != 2
    assert np.isfinite(weight[others]).all()
    assert np.isfinite(logits[others]).all()
    expert, _, _ = run(kernel, x, np.ones_like(w), 4)
    assert (expert == [0, 1, 2, 3]).all()
