"""The kernel of products of low rank (ffi/grouped_mm/device/lora_sm80.cuh), run on the host lane by
lane."""

import ctypes

import host_program
import numpy as np
import oracle
import pytest
from host_memory import GUARD, aligned, copied
from host_program import DTYPES, pointer

pytestmark = host_program.needs_compiler
POINTERS = ("x", "a", "b", "pair_of", "row_of", "row_scale", "existing", "out", "h")
NUMBERS = ("rows", "k", "n", "rank", "pairs", "span", "half", "turned", "kind")
KINDS = ("short", "deep")  # LoraKind


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int32) for name in NUMBERS),
        ("scale", ctypes.c_float),
    ]


@pytest.fixture(scope="module")
def program():
    return host_program.build_kernels("lora_kernel")


def operands(rng, dtype, rows, pairs, rank, k, n):
    of = lambda *shape: rng.standard_normal(shape).astype(np.float32).astype(DTYPES[dtype])
    return of(rows, k), of(pairs, rank, k), of(pairs, n, rank)


def run(program, x, a, b, pair, *, order=None, row_scale=None, existing=None, in_place=False,
        scale=1.0, span=1, turned=False, kind="short"):  # fmt: skip
    """The result and h; ``pair`` is of the rows in their ``order``."""
    (rows, k), (pairs, rank, _), n = x.shape, a.shape, b.shape[1]
    as_int = lambda v: None if v is None else np.array(v, np.int32)
    out = aligned(rows * n * 2, GUARD)
    old = None if existing is None else copied(existing)
    if in_place:
        out[: rows * n * 2] = old
        old = out
    stored = lambda f: copied(np.ascontiguousarray(f.swapaxes(1, 2)) if turned else f)
    h = aligned(rows * rank * 2, GUARD)
    arrays = {
        "x": copied(x), "a": stored(a), "b": stored(b), "pair_of": as_int(pair),
        "row_of": as_int(order), "existing": old, "out": out, "h": h,
        "row_scale": None if row_scale is None else np.array(row_scale, np.float32),
    }  # fmt: skip
    half = x.dtype == np.float16
    numbers = rows, k, n, rank, pairs, span, half, turned, KINDS.index(kind)
    problem = Problem(*(pointer(arrays[p]) for p in POINTERS), *map(int, numbers), scale)
    program.lora_kernel(ctypes.byref(problem))
    assert (out[rows * n * 2 :] == 0xAB).all()
    assert (h[rows * rank * 2 :] == 0xAB).all()
    h = h[: rows * rank * 2].view(x.dtype).reshape(rows, rank)
    return out[: rows * n * 2].view(x.dtype).reshape(rows, n), h


def wanted(x, a, b, pair, *, order=None, row_scale=None, existing=None, scale=1.0):
    """Both in float64, but for the rounding of h."""
    rows, n = x.shape[0], b.shape[1]
    out = np.zeros((rows, n)) if existing is None else oracle.f64(existing)
    h = np.zeros((rows, a.shape[1]), x.dtype)
    for place, p in enumerate(pair):
        t = place if order is None else order[place]
        if 0 <= p < a.shape[0]:
            factor = scale * (1 if row_scale is None else row_scale[t])
            h[t] = factor * (oracle.f64(a[p]) @ oracle.f64(x[t]))
            out[t] += oracle.f64(b[p]) @ oracle.f64(h[t])
    return out, oracle.f64(h)


def check(got, want, dtype):
    bits = {"bfloat16": 8, "float16": 11}[dtype]
    for g, w in zip(got, want, strict=True):
        # h may be rounded the other way where sums differ.
        assert np.abs(oracle.f64(g) - w).max() <= 2.0**-bits * 2 * np.abs(w).max()
        assert ((w == 0) == (oracle.f64(g) == 0)).all()


@pytest.mark.parametrize(
    ("dtype", "rank", "k", "n", "span", "kind"),
    [
        ("bfloat16", 8, 72, 40, 1, "short"),
        ("float16", 16, 32 * 25, 32 * 19, 3, "deep"),
        ("bfloat16", 16, 8, 8, 16, "short"),
        ("float16", 32, 328, 296, 2, "short"),
        ("bfloat16", 64, 296, 328, 5, "deep"),
    ],
)
def test_values(program, rng, dtype, rank, k, n, span, kind):
    """Runs of one row, of more than a block has, and across multiples of 16; of 10, 21 and 50 rows
    of a pair; pairs outside, alone and several together; rows by list; factors stored either way;
    neither k nor n are whole steps of all warps."""
    pair = [0, 0, 9, -1, 2, 1, *[3] * 21, 5, -7, 2**30, 4, 4, *[2] * 10, *[0] * 50, 2]
    rows = len(pair)
    x, a, b = operands(rng, dtype, rows, 5, rank, k, n)
    of = {"span": span, "kind": kind}
    check(run(program, x, a, b, pair, **of), wanted(x, a, b, pair), dtype)
    order = rng.permutation(rows)
    options = {
        "order": order, "row_scale": rng.standard_normal(rows).astype(np.float32), "scale": 0.5,
        "existing": rng.standard_normal((rows, n)).astype(x.dtype),
    }  # fmt: skip
    got = run(program, x, a, b, pair, **options, in_place=span % 2 == 1, turned=True, **of)
    check(got, wanted(x, a, b, pair, **options), dtype)


@pytest.mark.parametrize("turned", [False, True])
def test_nan_stays_in_its_row(program, rng, turned):
    """That of a row of x, of another pair's factor, and of the rows of no pair."""
    pair = [0, 0, 1, 2, 9, 0]
    x, a, b = operands(rng, "bfloat16", 6, 3, 16, 40, 40)
    x[1, 5] = a[1, 3, 39] = x[4, 0] = np.nan
    b[2, 7, 15] = np.inf
    got, h = map(oracle.f64, run(program, x, a, b, pair, turned=turned))
    finite = np.isfinite(got)
    np.testing.assert_array_equal(finite.all(1), [True, False, False, False, True, True])
    assert not finite[1].any()
    assert not finite[2].any()
    np.testing.assert_array_equal(np.argwhere(~finite[3]), [[7]])
    assert (got[4] == 0).all()
    assert (h[4] == 0).all()


def test_rounding_to_float16_overflows_as_it_does(program):
    x, a, b = (np.full(shape, 200, np.float16) for shape in ((1, 32), (1, 16, 32), (1, 8, 16)))
    assert np.isinf(run(program, x, a, b, [0])[0]).all()
