"""The kernels of a few tokens' experts (ffi/moe/device/few_tokens_sm90.cuh), run on the host lane
by lane."""

import ctypes
import dataclasses

import few_experts
import host_program
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from few_experts import check
from host_memory import copied
from host_program import mode_number, pointer

import jax_groupgemm as jgg

pytestmark = host_program.needs_compiler
POINTERS = (
    "x", "a", "out", "index", "offset", "weight", "codes", "scales", "global_scale", "bias",
    "terms",
)  # fmt: skip
NUMBERS = (
    "tokens", "k", "experts", "d", "f", "columns", "inner", "tile_scales", "gated", "up", "blocks",
    "groups", "rows_shift",
)  # fmt: skip


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int32) for name in NUMBERS),
    ]


@pytest.fixture(scope="module")
def kernel():
    return host_program.build_kernels("few_tokens_kernel").few_tokens_kernel


def run(kernel, w, *, up, **of):
    """One of the kernels, with ``of`` by the names above."""
    packed = jgg.prepack(w)
    assert packed.layout == "sm90"
    experts, columns, inner = w.shape
    scale = None if w.global_scale is None else np.asarray(w.global_scale, np.float32)
    of |= {
        "codes": copied(np.asarray(packed.weight)), "scales": copied(np.asarray(packed.scales)),
        "global_scale": scale, "columns": columns, "inner": inner, "up": up, "experts": experts,
        "tile_scales": packed.scales.nbytes // (experts * columns * inner // 4096),
    }  # fmt: skip
    arrays = [pointer(of[name]) for name in POINTERS]
    problem = Problem(*arrays, *(int(of[name]) for name in NUMBERS))
    assert kernel(ctypes.byref(problem), mode_number(w.mode), w.bits) == 0


def layer(kernel, x, up, down, index, weight, *, gated=True, offset=None, biases=(None, None)):
    """Both kernels: the (T * k, F) activations, 7 where there are none, and the result."""
    (tokens, k), d, f = index.shape, x.shape[1], down.shape[2]
    a = copied(np.full((tokens * k, f), 7, ml_dtypes.bfloat16)).view(ml_dtypes.bfloat16)
    out = np.full((tokens, d), 7, np.float32)
    same = {
        "x": copied(np.asarray(x)), "a": a, "out": out, "index": np.array(index, np.int32),
        "offset": None if offset is None else np.array([offset], np.int32),
        "weight": np.array(weight, np.float32), "tokens": tokens, "k": k, "d": d, "f": f,
        "gated": gated, "terms": None, "blocks": 0, "groups": 0, "rows_shift": 0,
    }  # fmt: skip
    run(kernel, up, up=True, bias=biases[0], **same)
    run(kernel, down, up=False, bias=biases[1], **same)
    return a.reshape(-1, f), out


def wanted(x, up, down, index, weight, **options):
    up, down = (oracle.scaled(w, "bfloat16").swapaxes(1, 2) for w in (up, down))
    return few_experts.wanted(x, up, down, index, weight, **options)


def weights(rng, mode, bits, group_size, *shape):
    scale = jnp.asarray(rng.uniform(0.5, 2, shape[:1]), jnp.float32) if mode == "nvfp4" else None
    return oracle.random_quantized(rng, shape, mode, bits, group_size, "bfloat16", scale=scale)


@pytest.mark.parametrize(
    ("formats", "gated"),
    [
        ((("nvfp4", 4, 16), ("nvfp4", 4, 16)), True),
        ((("affine", 4, 64), ("mxfp8", 8, 32)), True),
        ((("mxfp4", 4, 32), ("affine", 4, 32)), False),
        ((("fp8", 8, 128), ("fp8", 8, 128)), True),
    ],
)
def test_values(kernel, rng, formats, gated):
    """Experts that several tokens chose, one more often than a block has rows; the same one twice
    for a token; indices outside, of which one token has no other; biases."""
    d, f, experts = 128, 128 if formats[1][0] == "fp8" else 64, 4
    up = weights(rng, *formats[0], experts, f * (1 + gated), d)
    down = weights(rng, *formats[1], experts, d, f)
    index = np.array([[0, 3, 9], [3, 3, 1], [-1, 4, 2**30], [3, 3, 3], [3, -5, 3], [3, 3, 3]])
    x, weight = oracle.random(rng, (len(index), d), "bfloat16"), rng.standard_normal(index.shape)
    biases = tuple(
        rng.standard_normal((experts, n)).astype(np.float32) for n in (f * (1 + gated), d)
    )
    options = {"gated": gated, "biases": biases}
    check(
        layer(kernel, x, up, down, index, weight, **options),
        wanted(x, up, down, index, weight.astype(np.float32), **options),
    )


@pytest.mark.parametrize(("d", "f"), [(64 * 17, 64), (64, 64 * 5)])
def test_one_token_and_more_k(kernel, rng, d, f):
    """Eight choices, and more k than the warps take at a time; weights of some of the experts."""
    up, down = weights(rng, "nvfp4", 4, 16, 2, 2 * f, d), weights(rng, "nvfp4", 4, 16, 2, d, f)
    index = np.array([[5, 6, 7, 4, 6, 0, 5, 5]])
    x, weight = oracle.random(rng, (1, d), "bfloat16"), rng.standard_normal((1, 8))
    check(
        layer(kernel, x, up, down, index, weight, offset=5),
        wanted(x, up, down, index, weight.astype(np.float32), offset=5),
    )


@pytest.mark.parametrize(("tokens", "k"), [(8, 4), (16, 2), (8, 8), (32, 2)])
def test_many_pairs_of_an_expert(kernel, rng, tokens, k):
    """Blocks of eight of its pairs, and of what is left; a token that has it twice; rows of x by
    token, and with more than 8 tokens by pair. 32 pairs are the most of the first shape."""
    up, down = weights(rng, "nvfp4", 4, 16, 3, 128, 64), weights(rng, "nvfp4", 4, 16, 3, 64, 64)
    index = np.where(rng.random((tokens, k)) < 0.8, 1, rng.integers(0, 3, (tokens, k)))
    x, weight = oracle.random(rng, (tokens, 64), "bfloat16"), rng.standard_normal((tokens, k))
    check(
        layer(kernel, x, up, down, index, weight),
        wanted(x, up, down, index, weight.astype(np.float32)),
    )


@pytest.mark.parametrize(
    ("formats", "gated", "d", "f", "tokens", "k"),
    [
        ((("nvfp4", 4, 16), ("nvfp4", 4, 16)), True, 64 * 5, 64, 8, 8),
        ((("affine", 4, 64), ("mxfp8", 8, 32)), True, 64, 192, 35, 1),
        ((("mxfp4", 4, 32), ("affine", 4, 32)), False, 64, 64, 12, 4),
        ((("fp8", 8, 128), ("fp8", 8, 128)), True, 128, 128, 11, 3),
    ],
)
def test_more_pairs(kernel, rng, formats, gated, d, f, tokens, k):
    """33 to 64 pairs, which have kernels of their own: one expert of more pairs than a block has,
    indices outside, a token without any, biases."""
    up = weights(rng, *formats[0], 4, f * (1 + gated), d)
    down = weights(rng, *formats[1], 4, d, f)
    index = np.where(rng.random((tokens, k)) < 0.4, 3, rng.integers(-1, 5, (tokens, k)))
    index[2] = -1
    x, weight = oracle.random(rng, (tokens, d), "bfloat16"), rng.standard_normal(index.shape)
    biases = tuple(rng.standard_normal((4, n)).astype(np.float32) for n in (f * (1 + gated), d))
    options = {"gated": gated, "biases": biases}
    check(
        layer(kernel, x, up, down, index, weight, **options),
        wanted(x, up, down, index, weight.astype(np.float32), **options),
    )


def grouped_down(kernel, rng, down, index, blocks, *, a=None, rows_shift=3, offset=None, bias=None):
    """`down` by groups of up to 2^``rows_shift`` pairs, of activations ``a``, in so many blocks:
    the result, and what it should be."""
    (tokens, k), (experts, d, f) = index.shape, down.shape
    a = oracle.random(rng, (tokens * k, f), "bfloat16") if a is None else a
    weight = rng.standard_normal(index.shape).astype(np.float32)
    out = np.full((tokens, d), 7, np.float32)
    run(
        kernel, down, up=False, x=None, a=copied(np.asarray(a)), out=out, weight=weight, k=k, f=f,
        index=np.array(index, np.int32), bias=bias, tokens=tokens, d=d, gated=True, blocks=blocks,
        offset=None if offset is None else np.array([offset], np.int32), groups=16,
        rows_shift=rows_shift, terms=np.full((tokens * k, d), np.nan, np.float32),
    )  # fmt: skip
    w, want = oracle.f64(oracle.scaled(down, "bfloat16")), np.zeros((tokens, d))
    for t, j in np.ndindex(tokens, k):
        e = int(index[t, j]) - (offset or 0)
        if 0 <= e < experts:
            y = w[e] @ oracle.f64(a[t * k + j]) + (0 if bias is None else bias[e])
            want[t] += weight[t, j] * y
    return out, want


@pytest.mark.parametrize(("blocks", "rows_shift"), [(2, 3), (5, 3), (40, 3), (9, 1), (9, 0)])
@pytest.mark.parametrize(
    ("mode", "bits", "group_size", "d", "f"),
    [
        ("nvfp4", 4, 16, 128, 64 * 9), ("mxfp8", 8, 32, 64, 192), ("affine", 4, 32, 192, 64),
        ("affine", 4, 128, 64, 128), ("mxfp4", 4, 32, 64, 64 * 3), ("fp8", 8, 128, 128, 128),
    ],
)  # fmt: skip
def test_grouped_down(kernel, rng, mode, bits, group_size, d, f, blocks, rows_shift):
    """Blocks and warps with parts of a strip, with several strips, and with none; groups that begin
    in one block and end in another; an expert of more pairs than a group has, indices outside, a
    token without any, biases."""
    down = weights(rng, mode, bits, group_size, 4, d, f)
    index = np.where(rng.random((9, 4)) < 0.4, 8, rng.integers(4, 10, (9, 4)))
    index[2] = -1
    bias = rng.standard_normal((4, d)).astype(np.float32)
    out, want = grouped_down(
        kernel, rng, down, index, blocks, rows_shift=rows_shift, offset=5, bias=bias
    )
    assert np.linalg.norm(out - want) <= 1e-5 * np.linalg.norm(want)
    assert (out[2] == 0).all()


def test_nan_of_grouped_down(kernel, rng):
    """Of a row it stays in its token, and of an expert in its tokens."""
    down = weights(rng, "nvfp4", 4, 16, 3, 64, 128)
    index = np.array([[0, 1], [0, 2], [0, 1], [1, 1], [0, 9], [9, 9]])
    a = oracle.random(rng, (12, 128), "bfloat16").at[5, 7].set(np.nan)
    for blocks in (2, 9):
        out, _ = grouped_down(kernel, rng, down, index, blocks, a=a)
        np.testing.assert_array_equal(np.isnan(out).all(1), np.arange(6) == 2)
        assert np.isfinite(out[np.arange(6) != 2]).all()
    scale = jnp.asarray(np.array([1, 1, np.nan], np.float32))
    down = dataclasses.replace(down, global_scale=scale)
    out, _ = grouped_down(kernel, rng, down, index, 9)
    np.testing.assert_array_equal(np.isnan(out).all(1), np.arange(6) == 1)


def test_nan_stays_in_the_tokens_that_meet_it(kernel, rng):
    up, down = weights(rng, "nvfp4", 4, 16, 3, 128, 64), weights(rng, "nvfp4", 4, 16, 3, 64, 64)
    x = oracle.random(rng, (4, 64), "bfloat16").at[2, 5].set(np.nan)
    nan = np.array([1, 1, np.nan], np.float32)
    index = np.array([[0, 1], [0, 2], [0, 1], [1, 1]])
    weight = np.ones((4, 2))
    _, out = layer(kernel, x, up, down, index, weight)
    np.testing.assert_array_equal(np.isnan(out).all(1), [False, False, True, False])
    down = dataclasses.replace(down, global_scale=jnp.asarray(nan))
    _, out = layer(kernel, x, up, down, index, weight)
    np.testing.assert_array_equal(np.isnan(out).all(1), [False, True, True, False])
    assert np.isfinite(out[[0, 3]]).all()
