"""The CUDA kernels of ``route``, ``dispatch`` and ``combine``, run on the host lane by lane, are
compared with numpy: where they read and write, blocks and slices, and lists that nobody trusts."""

import ctypes

import host_program
import ml_dtypes
import numpy as np
import oracle
import pytest
from host_program import pointer
from test_route import expected

pytestmark = host_program.needs_compiler

GUARD = 64  # bytes behind a result that must stay as they are
DTYPES = [
    (np.float32, np.float32), (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    (ml_dtypes.bfloat16, np.float32), (np.float16, np.float32),
]  # fmt: skip


class RouteArgs(ctypes.Structure):
    _fields_ = [
        *[
            (n, ctypes.c_void_p)
            for n in ("index", "offset", "order", "place", "sizes", "overflow", "counts")
        ],
        *[(n, ctypes.c_int32) for n in ("pairs", "rows", "experts", "blocks")],
    ]  # fmt: skip


class Operands(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("order", "place")],
        *[(n, ctypes.c_int32) for n in ("tokens", "k", "count", "pieces")],
        *[(n, ctypes.c_void_p) for n in ("x", "rows", "weight", "out", "drows", "dweight")],
        *[(n, ctypes.c_int64) for n in ("x_bytes", "rows_bytes")],
    ]  # fmt: skip


class SomeRows(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("x", "index", "offset", "rows", "place", "sizes")],
        *[(n, ctypes.c_int32) for n in ("tokens", "k", "experts", "pieces")],
        ("turns", ctypes.c_void_p),
        ("turns_count", ctypes.c_int32),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def kernels():
    return host_program.build_kernels("moe_kernels")


class Result:
    """An array from a multiple of 16 on, between bytes that must stay as they are."""

    def __init__(self, shape, dtype):
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._memory = np.full(nbytes + 2 * GUARD + 16, 0xAB, np.uint8)
        self._start = GUARD + -(self._memory.ctypes.data + GUARD) % 16
        self._end = self._start + nbytes
        self.array = self._memory[self._start : self._end].view(dtype).reshape(shape)

    def checked(self) -> np.ndarray:
        assert (self._memory[: self._start] == 0xAB).all()
        assert (self._memory[self._end :] == 0xAB).all()
        return self.array


def aligned(array):
    result = Result(array.shape, array.dtype)
    result.array[...] = array
    return result.array


def route(kernels, index, experts, offset=None, max_rows=None):
    pairs = index.size
    rows = pairs if max_rows is None else min(max_rows, pairs)
    blocks = -(-pairs // 2048)
    results = [Result(s, np.int32) for s in ((rows,), (pairs,), (experts,), (1,))]
    counts = Result((experts, blocks), np.int32)
    first = None if offset is None else np.array([offset], np.int32)
    flat = np.ascontiguousarray(index.reshape(-1))
    args = RouteArgs(
        pointer(flat), pointer(first), *(pointer(r.array) for r in (*results, counts)),
        pairs, rows, experts, blocks,
    )  # fmt: skip
    assert kernels.route_kernel(ctypes.byref(args)) == 0
    counts.checked()
    order, place, sizes, overflow = (r.checked() for r in results)
    want = expected(index.astype(np.int64), experts, offset or 0, max_rows)
    for got, value in zip(
        (order, place.reshape(index.shape), sizes, overflow[0]), want, strict=True
    ):
        np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("pairs", [1, 700, 2048, 2049])
@pytest.mark.parametrize("experts", [1, 5, 256, 300])
@pytest.mark.one_in(3)
def test_route(rng, kernels, pairs, experts):
    route(kernels, rng.integers(-2, experts + 2, (pairs, 1)).astype(np.int32), experts)


def test_route_with_many_experts(rng, kernels):
    route(kernels, rng.integers(0, 1024, (2048, 1)).astype(np.int32), 1024)


@pytest.mark.parametrize("blocks", [1, 31, 128, 129, 700])
def test_scan(rng, kernels, blocks):
    counts, sizes = rng.integers(0, 2049, (9, blocks)).astype(np.int32), Result((9,), np.int32)
    before = Result(counts.shape, np.int32)
    before.array[...] = counts
    args = RouteArgs(
        None, None, None, None, pointer(sizes.array), None, pointer(before.array), 0, 0, 9, blocks
    )
    kernels.scan_kernel(ctypes.byref(args))
    np.testing.assert_array_equal(sizes.checked(), counts.sum(1))
    np.testing.assert_array_equal(before.checked(), counts.cumsum(1) - counts)


@pytest.mark.parametrize("max_rows", [0, 1500])
def test_route_with_overflow_and_offset(rng, kernels, max_rows):
    index = rng.integers(-1, 12, (1030, 2)).astype(np.int32)
    route(kernels, index, 8, None, max_rows)
    route(kernels, index, 8, 2, max_rows)
    index[:3] = [[2**31 - 1, -(2**31)], [0, 1], [-1, 7]]
    for offset in (2**31 - 1, -(2**31)):
        route(kernels, index, 8, offset, max_rows)


def oracles(order, place, x, rows, weight):
    """dispatch, combine and the products of combine's backward pass, in float64."""
    tokens, k = place.shape
    pair = np.clip(order, 0, tokens * k - 1)
    by_pair = oracle.f64(weight).reshape(-1)[pair][:, None]
    there = (order >= 0)[:, None]
    copied = np.where(there, oracle.f64(x)[pair // k], 0)
    picked = np.where(
        (place >= 0)[..., None], oracle.f64(rows)[np.clip(place, 0, len(rows) - 1)], 0
    )
    return (
        copied, np.where(there, oracle.f64(x)[pair // k] * by_pair, 0), picked.sum(1),
        (picked * oracle.f64(weight)[..., None]).sum(1),
        np.einsum("td,tkd->tk", oracle.f64(x), picked),
    )  # fmt: skip


def check_rows(rng, kernels, order, place, d, dtypes, at_once):
    (tokens, k), count = place.shape, len(order)
    of, other = DTYPES[dtypes]
    random = lambda shape, dtype: aligned(rng.standard_normal(shape, np.float32).astype(dtype))
    x, ct, rows = random((tokens, d), of), random((tokens, d), other), random((count, d), of)
    weight = random((tokens, k), np.float32)
    order, place = (np.ascontiguousarray(a, np.int32) for a in (order, place))
    pieces = d * np.dtype(of).itemsize // 16

    def run(which, x, weight, *results):
        o = Operands(
            pointer(order), pointer(place), tokens, k, count, pieces, pointer(x), pointer(rows),
            pointer(weight), *(None if r is None else pointer(r.array) for r in results),
            x.nbytes, rows.nbytes,
        )  # fmt: skip
        assert kernels.rows_kernel(ctypes.byref(o), which, dtypes, at_once) == 0
        return [None if r is None else r.checked() for r in results]

    copied, scaled, added, weighted, _ = oracles(order, place, x, rows, weight)
    (got, *_) = run(0, x, None, Result((count, d), of), None, None)
    np.testing.assert_array_equal(oracle.f64(got), copied)
    (got, *_) = run(0, x, weight, Result((count, d), of), None, None)
    oracle.assert_close(got, scaled)
    (got, *_) = run(3, x, None, Result((count, d), of), None, None)
    np.testing.assert_array_equal(oracle.f64(got[order >= 0]), copied[order >= 0])
    assert (got[order < 0].view(np.uint8) == 0xAB).all(), "they may hold anything"
    (got, *_) = run(1, x, None, Result((tokens, d), other), None, None)
    oracle.assert_close(got, added)
    (got, *_) = run(1, x, weight, Result((tokens, d), other), None, None)
    oracle.assert_close(got, weighted)
    _, scaled, *_, products = oracles(order, place, ct, rows, weight)
    _, drows, dweight = run(
        2, ct, weight, None, Result((count, d), of), Result((tokens, k), np.float32)
    )
    oracle.assert_close(drows, scaled)
    oracle.assert_close(dweight, products)


def lists(rng, tokens, k, experts, max_rows=None):
    order, place, *_ = expected(rng.integers(-1, experts + 1, (tokens, k)), experts, 0, max_rows)
    return np.array(order, np.int32), np.array(place, np.int32)


@pytest.mark.parametrize("dtypes", range(4))
@pytest.mark.parametrize(("k", "at_once"), [(1, 2), (2, 2), (3, 4), (8, 8), (11, 8), (34, 8)])
@pytest.mark.one_in(5)
def test_rows(rng, kernels, k, at_once, dtypes):
    check_rows(rng, kernels, *lists(rng, 9, k, 4), 40, dtypes, at_once)


@pytest.mark.parametrize(
    ("d", "at_once"), [(8, 2), (1000, 4), (2048, 8), (2056, 8), (4104, 4), (8200, 2)]
)
@pytest.mark.one_in(2)
def test_widths(rng, kernels, d, at_once):
    """Warps, tokens of a block, slices, and threads with nothing to do."""
    check_rows(rng, kernels, *lists(rng, 3, 2, 4), d, 1, at_once)


@pytest.mark.parametrize("max_rows", [1, 10, 50])
def test_overflow(rng, kernels, max_rows):
    check_rows(rng, kernels, *lists(rng, 20, 4, 3, max_rows), 72, 0, 4)


@pytest.mark.parametrize("trial", range(4))
def test_forged_lists(rng, kernels, trial):
    """Rows are what ``order`` says, and nothing outside is read or written."""
    tokens, k, count = 12, 4, 40
    if trial % 2:
        edges = [-(2**31), -1, 0, count, count + 1, tokens * k, 2**30, 2**31 - 1]
        order, place = rng.choice(edges, count), rng.choice(edges, (tokens, k))
    else:
        order = rng.integers(-5, tokens * k + 5, count)
        place = rng.integers(-5, count + 5, (tokens, k))
    check_rows(rng, kernels, order, place, 24, 1, 4)


@pytest.mark.parametrize("offset", [None, 3])
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "pieces"), [(1, 8, 4, 3), (13, 5, 40, 257), (512, 2, 9, 1)]
)
def test_some_rows(rng, kernels, tokens, k, experts, pieces, offset):
    """Route and dispatch in one: as numpy sorts, experts that are not here left out. What products
    count becomes zeros."""
    index = rng.integers(-1, experts + 2, (tokens, k)).astype(np.int32)
    index[0, 0] = 2**31 - 1
    x = aligned(rng.integers(0, 2**31, (tokens, 4 * pieces)).astype(np.int32))
    shapes = (tokens * k, 4 * pieces), (tokens, k), (experts,)
    rows, place, sizes = results = [Result(shape, np.int32) for shape in shapes]
    turns = Result((tokens * k + 1,), np.int32)
    rows.array[...] = turns.array[...] = -7
    first = None if offset is None else np.array([offset], np.int32)
    args = SomeRows(
        pointer(x), pointer(index), pointer(first), *(pointer(r.array) for r in results), tokens, k,
        experts, pieces, pointer(turns.array), tokens * k + 1,
    )  # fmt: skip
    assert kernels.some_rows_kernel(ctypes.byref(args), ctypes.c_int64(x.nbytes)) == 0
    order, *want, _ = expected(index.astype(np.int64), experts, offset or 0, None)
    order = np.array(order)
    for got, value in zip((place, sizes), want, strict=True):
        np.testing.assert_array_equal(got.checked(), value)
    copied = np.where(order[:, None] >= 0, x[order // k], -7)
    np.testing.assert_array_equal(rows.checked(), copied)
    assert not turns.checked().any()
