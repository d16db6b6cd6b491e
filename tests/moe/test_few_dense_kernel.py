"""The kernels of a few tokens' experts with 16-bit weights (ffi/moe/device/few_dense_sm80.cuh), run
on the host lane by lane."""

import ctypes

import host_program
import numpy as np
import pytest
from few_experts import check, wanted
from host_memory import copied
from host_program import DTYPES, pointer

pytestmark = host_program.needs_compiler
POINTERS = ("x", "a", "out", "index", "offset", "weight", "w", "bias")
NUMBERS = (
    "tokens", "k", "experts", "d", "f", "gated", "half", "transposed", "columns", "up",
)  # fmt: skip


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int32) for name in NUMBERS),
    ]


@pytest.fixture(scope="module")
def program():
    return host_program.build_kernels("few_dense_kernel")


def run(program, **of):
    arrays = [pointer(of[name]) for name in POINTERS]
    problem = Problem(*arrays, *(int(of[name]) for name in NUMBERS))
    program.few_dense_kernel(ctypes.byref(problem))


def layer(program, x, up, down, index, weight, *, gated=True, offset=None, biases=(None, None),
          transposed=False, columns=64):  # fmt: skip
    """Both kernels, of up (E, D, 2F) and down (E, F, D): the (T * k, F) activations, 7 where there
    are none, and the result."""
    (tokens, k), (experts, f, d) = index.shape, down.shape
    a = copied(np.full((tokens * k, f), 7, x.dtype)).view(x.dtype)
    out = np.full((tokens, d), 7, np.float32)
    stored = lambda w: copied(np.ascontiguousarray(w.swapaxes(1, 2) if transposed else w))
    same = {
        "x": copied(x), "a": a, "out": out, "index": np.array(index, np.int32),
        "offset": None if offset is None else np.array([offset], np.int32),
        "weight": np.array(weight, np.float32), "tokens": tokens, "k": k, "experts": experts,
        "d": d, "f": f, "gated": gated, "half": x.dtype == np.float16, "transposed": transposed,
        "columns": columns,
    }  # fmt: skip
    run(program, w=stored(up), bias=biases[0], up=True, **same)
    run(program, w=stored(down), bias=biases[1], up=False, **same)
    return a.reshape(-1, f), out


def operands(rng, dtype, experts, d, f, tokens, k, gated=True):
    """x, up, down and weights of pairs."""
    of = lambda *shape: rng.standard_normal(shape).astype(np.float32).astype(DTYPES[dtype])
    weight = rng.standard_normal((tokens, k)).astype(np.float32)
    up = (of(experts, d, f * (1 + gated)) / np.sqrt(d)).astype(DTYPES[dtype])
    return of(tokens, d), up, of(experts, f, d), weight


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "gated", "columns"),
    [
        ("bfloat16", True, 64),
        ("float16", True, 16),
        ("bfloat16", False, 32),
        ("float16", False, 64),
    ],
)
def test_values(program, rng, dtype, gated, columns, transposed):
    """Experts that several tokens chose, one more often than a block has rows; the same one twice
    for a token; indices outside, of which one token has no other; biases. Neither columns nor k are
    whole steps."""
    d, f, experts = 152, 72, 4
    index = np.array([[0, 3, 9], [3, 3, 1], [-1, 4, 2**30], [3, 3, 3], [3, -5, 3], [3, 3, 3]])
    x, up, down, weight = operands(rng, dtype, experts, d, f, *index.shape, gated)
    biases = tuple(
        rng.standard_normal((experts, n)).astype(np.float32) for n in (f * (1 + gated), d)
    )
    options = {"gated": gated, "biases": biases}
    got = layer(
        program, x, up, down, index, weight, **options, transposed=transposed, columns=columns
    )
    check(got, wanted(x, up, down, index, weight, **options))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("d", "f", "columns"), [(32 * 19, 32, 64), (64, 32 * 37 + 8, 16)])
def test_one_token_and_more_k(program, rng, d, f, columns, transposed):
    """Eight choices, and more k than the warps take at a time; weights of some of the experts, so
    that warps share out the k of a pair."""
    index = np.array([[5, 6, 7, 4, 6, 0, 5, 5]])
    x, up, down, weight = operands(rng, "bfloat16", 2, d, f, *index.shape)
    for offset in (5, 7):
        got = layer(
            program, x, up, down, index, weight, offset=offset, transposed=transposed,
            columns=columns,
        )  # fmt: skip
        check(got, wanted(x, up, down, index, weight, offset=offset))


@pytest.mark.parametrize("columns", [64, 32, 16])
@pytest.mark.parametrize(("tokens", "k"), [(8, 8), (64, 1), (11, 3)])
def test_many_pairs_of_an_expert(program, rng, tokens, k, columns):
    """Blocks of eight of its pairs, and of what is left; a token that has it twice; rows of x by
    token, and with more than 8 tokens by pair; a token without any."""
    index = np.where(rng.random((tokens, k)) < 0.7, 1, rng.integers(-1, 4, (tokens, k)))
    index[2] = -1
    x, up, down, weight = operands(rng, "bfloat16", 3, 64, 64, tokens, k)
    got = layer(program, x, up, down, index, weight, columns=columns)
    check(got, wanted(x, up, down, index, weight))


@pytest.mark.parametrize("columns", [64, 16])
def test_nan_stays_where_it_is_met(program, rng, columns):
    """That of a token in its row; of a weight in the columns that it is of, and behind the last k
    none is read."""
    index, weight = np.array([[0, 1], [0, 2], [0, 1], [1, 1]]), np.ones((4, 2), np.float32)
    x, up, down, _ = operands(rng, "bfloat16", 3, 40, 40, 4, 2)
    x[2, 5] = np.nan
    _, out = layer(program, x, up, down, index, weight, columns=columns)
    np.testing.assert_array_equal(np.isnan(out).all(1), [False, False, True, False])
    assert np.isfinite(out[[0, 1, 3]]).all()
    x[2, 5], down[2, 3, 7] = 0, np.nan
    _, out = layer(program, x, up, down, index, weight, columns=columns)
    np.testing.assert_array_equal(np.argwhere(np.isnan(out)), [[1, 7]])


def test_rounding_to_float16_overflows_as_it_does(program, rng):
    x, up, down, weight = operands(rng, "float16", 1, 32, 32, 1, 1)
    up[:] = 60000
    x[:] = 1
    _, out = layer(program, x, up, down, np.zeros((1, 1), int), weight)
    assert not np.isfinite(out).any()


def test_columns_of_a_block(program):
    """One and a half blocks of each of 132 processors, where there are so many."""
    of = program.few_dense_columns
    of.argtypes = ctypes.c_int64, ctypes.c_int64
    assert [of(tokens, 2048) for tokens in (1, 2, 4, 8, 64)] == [16, 16, 32, 64, 64]
    assert [of(tokens, 2880) for tokens in (1, 2, 4, 8)] == [16, 16, 32, 64]
