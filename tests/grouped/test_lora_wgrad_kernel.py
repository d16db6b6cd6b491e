"""The kernels of low rank's weight gradients (ffi/grouped_mm/device/lora_wgrad_sm80.cuh), run on
the host lane by lane."""

import ctypes

import host_program
import numpy as np
import oracle
import pytest
from host_memory import GUARD, aligned, copied
from host_program import DTYPES, pointer

pytestmark = host_program.needs_compiler
POINTERS = (
    "wide0", "wide1", "narrow0", "narrow1", "out0", "out1", "pair_of", "row_of", "begins",
)  # fmt: skip
NUMBERS = ("rows", "rank", "pairs", "length0", "length1")


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int32) for name in NUMBERS),
    ]


@pytest.fixture(scope="module")
def program():
    return host_program.build_kernels("lora_wgrad_kernel")


def run(program, wide, narrow, pair, pairs):
    """Both gradients, of rows in any order."""
    rows, rank = narrow[0].shape
    lengths = [w.shape[1] for w in wide]
    order = np.argsort(pair, kind="stable").astype(np.int32)
    outs = [aligned(pairs * rank * length * 2, GUARD) for length in lengths]
    begins = np.full(pairs + 2, -7, np.int32)
    arrays = {
        **{f"wide{i}": copied(wide[i]) for i in range(2)},
        **{f"narrow{i}": copied(narrow[i]) for i in range(2)},
        **{f"out{i}": outs[i] for i in range(2)},
        "pair_of": np.array(pair, np.int32)[order], "row_of": order, "begins": begins,
    }  # fmt: skip
    numbers = rows, rank, pairs, *lengths
    problem = Problem(*(pointer(arrays[p]) for p in POINTERS), *map(int, numbers))
    program.lora_wgrad_kernel(ctypes.byref(problem))
    assert begins[-1] == -7
    shapes = (pairs, rank, lengths[0]), (pairs, lengths[1], rank)
    gots = []
    for out, shape in zip(outs, shapes, strict=True):
        count = int(np.prod(shape)) * 2
        assert (out[count:] == 0xAB).all()
        gots.append(out[:count].view(wide[0].dtype).reshape(shape))
    return gots


def wanted(wide, narrow, pair, pairs):
    wide, narrow = [oracle.f64(w) for w in wide], [oracle.f64(v) for v in narrow]
    out = [
        np.zeros((pairs, narrow[0].shape[1], wide[0].shape[1])),
        np.zeros((pairs, wide[1].shape[1], narrow[1].shape[1])),
    ]
    for t, p in enumerate(pair):
        if 0 <= p < pairs:
            out[0][p] += np.outer(narrow[0][t], wide[0][t])
            out[1][p] += np.outer(wide[1][t], narrow[1][t])
    return out


@pytest.mark.parametrize(
    ("dtype", "rank", "lengths"),
    [
        ("bfloat16", 8, (72, 8)), ("float16", 16, (328, 1096)), ("bfloat16", 32, (64, 296)),
        ("bfloat16", 64, (40, 104)),
    ],
)  # fmt: skip
def test_values(program, rng, dtype, rank, lengths):
    """Pairs of 0, 1, 16, 17 and 150 rows, by list; rows of no pair, below all and above; more tiles
    than warps, and a part of one."""
    pair = np.array([*[1] * 16, 2, *[3] * 17, *[5] * 150, -1, -1, 7, 9])
    pair = rng.permutation(pair)
    of = lambda *shape: rng.standard_normal(shape).astype(np.float32).astype(DTYPES[dtype])
    wide = [of(len(pair), length) for length in lengths]
    narrow = [of(len(pair), rank) for _ in range(2)]
    gots = run(program, wide, narrow, pair, 7)
    for got, want in zip(gots, wanted(wide, narrow, pair, 7), strict=True):
        bits = {"bfloat16": 8, "float16": 11}[dtype]
        assert (np.abs(oracle.f64(got) - want) <= 2.0**-bits * np.abs(want) + 2e-5).all()
        assert not got[[0, 4, 6]].any()


def test_nan_stays_in_its_pair(program, rng):
    """In its column of the one operand, and its rank of the other; that of rows of no pair is
    nowhere."""
    pair = np.array([0, 0, -1, 2, 2, 9, 1])
    of = lambda *shape: rng.standard_normal(shape).astype(DTYPES["bfloat16"])
    wide, narrow = [of(7, 40), of(7, 48)], [of(7, 8), of(7, 8)]
    wide[0][0, 5] = narrow[1][3, 6] = np.nan
    wide[1][2], narrow[0][5] = np.nan, np.inf
    long, short = (~np.isfinite(oracle.f64(got)) for got in run(program, wide, narrow, pair, 4))
    np.testing.assert_array_equal(np.argwhere(long), [[0, rank, 5] for rank in range(8)])
    np.testing.assert_array_equal(np.argwhere(short), [[2, column, 6] for column in range(48)])
