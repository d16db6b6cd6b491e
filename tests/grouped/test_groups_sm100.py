"""What Blackwell's kernels of mm and wgrad are told: shapes, addresses and lines of every product,
and the rows that none reaches. Compiled for the host, and with a GPU as kernels there."""

import ctypes
import os
import shutil
import subprocess

import host_program
import jax.numpy as jnp
import numpy as np
import pytest
from host_program import ROOT, pointer

from jax_groupgemm._core import segments
from jax_groupgemm._kernels import extension

pytestmark = host_program.needs_compiler

KINDS = ("sizes", "spans", "segments")
WIDTH = 256  # threads, and entries of a window


@pytest.fixture(scope="module")
def library():
    library = host_program.build_kernels("groups_sm100")
    for name in ("most_problems", "workspace", "scaled_workspace", "workspace_bytes", "base"):
        getattr(library, name).restype = ctypes.c_int64
    return library


class Call:
    """An mm of x (rows_x, k) and weights, or a wgrad of x (rows_x, m) and y (rows_y, n)."""

    def __init__(self, kind, data, *, weights, rows_x, rows_y=None, m=16, n=24, k=8, wgrad=False,
                 k_major=False, in_bytes=2, out_bytes=2, offset=None, swapped=False):  # fmt: skip
        self.kind, self.data = kind, np.ascontiguousarray(data, np.int32)
        self.weights, self.rows_x = weights, rows_x
        self.rows_y = rows_x if rows_y is None else rows_y
        self.m, self.n, self.k, self.wgrad = m, n, k, wgrad
        self.k_major, self.in_bytes, self.out_bytes = k_major, in_bytes, out_bytes
        self.offset = None if offset is None else np.array(offset, np.int32)
        self.swapped = swapped

    @property
    def fields(self):
        values = (
            self.wgrad, self.rows_x, self.rows_y, self.weights, self.m, self.n, self.k,
            self.k_major, self.in_bytes, self.out_bytes,
        )  # fmt: skip
        return pointer(np.array([int(value) for value in values], np.int64))

    def found(self, library):
        """Problems (P, 8), gaps, and the lines of A and B."""
        kind, count = KINDS.index(self.kind), ctypes.c_int64(len(self.data))
        problems = np.full((library.most_problems(self.fields, kind, count), 8), -1, np.int64)
        gaps = np.full((len(self.data) + 1, 2), -1, np.int32)
        gap_count = library.groups(
            self.fields, kind, pointer(self.data), pointer(self.offset), count, int(self.swapped),
            pointer(problems), pointer(gaps),
        )  # fmt: skip
        lines = np.zeros(2, np.int64)
        library.lines(self.fields, pointer(lines))
        return problems, gaps[: max(gap_count, 0)], lines

    def table(self):
        """(x_start, y_start, length, weight) as the package defines the metadata."""
        form = {"sizes": segments.SIZES, "spans": segments.SPANS}.get(self.kind)
        if form is None:
            form = segments.Form("segments", ordered_y=True, own_weight=self.wgrad,
                                 aligned=not self.swapped, swapped=self.swapped)  # fmt: skip
        offset = None if self.offset is None else jnp.asarray(self.offset)
        metadata = segments.Metadata(form, jnp.asarray(self.data), offset)
        return np.asarray(metadata.decode(self.rows_x, self.rows_y, self.weights))

    def check(self, library):
        """Against products of random numbers by the table."""
        rng = np.random.default_rng(len(self.data))
        problems, gaps, (a_line, b_line) = self.found(library)
        x = rng.integers(-4, 5, (self.rows_x, self.m if self.wgrad else self.k))
        if self.wgrad:
            b, out = rng.integers(-4, 5, (self.rows_y, self.n)), (self.weights, self.m, self.n)
        else:
            shape = (self.n, self.k) if self.k_major else (self.k, self.n)
            b, out = rng.integers(-4, 5, (self.weights, *shape)), (self.rows_y, self.n)
        got, want = np.full(out, 99), np.zeros(out, int)
        flat = got.reshape(-1)
        # As they are stored.
        a_lines, b_lines = (x.T, b.T) if self.wgrad and self.k_major else (x, b)
        a_lines, b_lines = map(np.ascontiguousarray, (a_lines, b_lines))

        def view(array, at, rows, line, columns):
            """(rows, columns) of lines of an array; it must hold them."""
            data, first = array.reshape(-1), at // self.in_bytes
            assert at % 16 == 0
            assert first + (rows - 1) * line + columns <= data.size
            return np.lib.stride_tricks.as_strided(
                data[first:], (rows, columns), (line * data.itemsize, data.itemsize)
            )

        for m, n, k, a_at, b_at, out_at, x_start, matrix in problems:
            if m == 0:
                assert (n, k) == (0, 0)
                continue
            assert min(m, n, k) > 0  # CUTLASS stores what no product has written
            if self.wgrad and not self.k_major:
                a_p = view(a_lines, a_at, k, a_line, m).T
            else:
                a_p = view(a_lines, a_at, m, a_line, k)
            if self.k_major:
                b_p = view(b_lines, b_at, n, b_line, k).T
            else:
                b_p = view(b_lines, b_at, k, b_line, n)
            begin = out_at // self.out_bytes
            assert out_at % 16 == 0
            # Where scales are.
            np.testing.assert_array_equal(a_p[:, 0] if self.wgrad else a_p[0], x[x_start])
            assert matrix == begin // (m * n) if self.wgrad else matrix < self.weights
            flat[begin : begin + m * n] = (a_p @ b_p).reshape(-1)
        for begin, end in gaps:
            assert begin < end
            assert not self.wgrad
            got[begin:end] = 0
        if self.wgrad:
            got[problems[:, 2] == 0] = 0
        for i, (x_start, y_start, length, weight) in enumerate(self.table()):
            rows_x, rows_y = x[x_start : x_start + length], slice(y_start, y_start + length)
            if self.wgrad and length:
                want[i if self.kind != "sizes" else weight] = rows_x.T @ b[rows_y]
            elif length:
                w = b[weight].T if self.k_major else b[weight]
                want[rows_y] = rows_x @ w
        np.testing.assert_array_equal(got, want)
        return problems, gaps


SIZES = {
    "uneven": [5, 0, 130, 64, 1, 0, 200],
    "negative and too many": [-3, 100, 2**31 - 1, -(2**31), 2**31 - 1, 7, 1],
    "no rows": [0] * 7,
    "one group": [0, 0, 0, 0, 300, 0, 0],
    "the last": [0, 0, 0, 0, 0, 0, 1000],
}
EITHER = pytest.mark.parametrize("wgrad", [False, True])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@EITHER
def test_sizes(library, sizes, wgrad):
    for k_major in (False, True)[: 1 if wgrad else 2]:
        for out_bytes in (2, 4):
            call = Call("sizes", sizes, weights=7, rows_x=1000, rows_y=1100, wgrad=wgrad,
                        k_major=k_major, out_bytes=out_bytes)  # fmt: skip
            _, gaps = call.check(library)
            assert len(gaps) == (0 if wgrad else 1)


@pytest.mark.parametrize("offset", [-3, 0, 2, 6, 9, 2**31 - 1, -(2**31)])
@EITHER
def test_some_of_the_groups(library, offset, wgrad):
    sizes = [5, 0, 13, 6, 1, 0, 20, 4, 0]
    call = Call("sizes", sizes, weights=4, rows_x=60, wgrad=wgrad, offset=offset)
    _, gaps = call.check(library)
    assert len(gaps) <= 2


@pytest.mark.parametrize("count", [1, WIDTH - 1, WIDTH, WIDTH + 1, 5 * WIDTH])
@EITHER
def test_many_groups(library, rng, count, wgrad):
    sizes = rng.integers(-2, 9, count) * (rng.random(count) < 0.7)
    rows = max(int(np.maximum(sizes, 0).sum()) - 3, 5)
    Call("sizes", sizes, weights=count, rows_x=rows, wgrad=wgrad, m=8, n=8).check(library)
    if count > WIDTH:
        call = Call("sizes", sizes, weights=9, rows_x=rows, wgrad=wgrad, n=8, offset=WIDTH - 4)
        call.check(library)


def test_a_sum_of_sizes_does_not_wrap(library):
    """2**12 groups of 2**31 - 1 rows."""
    call = Call("sizes", [3, *[2**31 - 1] * 2**12, 5], weights=2**12 + 2, rows_x=10, n=8)
    problems, _ = call.check(library)
    np.testing.assert_array_equal(problems[:3, 0], [3, 7, 0])


@pytest.mark.parametrize("weights", [3, 300])
def test_weight_gradients_of_lines_along_rows(library, rng, weights):
    """FP8's: groups are whole blocks of 128 rows."""
    sizes = 128 * rng.integers(0, 3, weights)
    Call("sizes", sizes, weights=weights, rows_x=int(sizes.sum()) + 256, wgrad=True, k_major=True,
         in_bytes=1, out_bytes=4, n=8, m=5).check(library)  # fmt: skip


def test_spans_of_a_weight_gradient(library):
    spans = [(0, 7), (5, 5), (9, 4), (-4, 3), (20, 99), (2**31 - 1, 3), (3, 12)]
    Call("spans", spans, weights=7, rows_x=30, wgrad=True).check(library)


@pytest.mark.parametrize("swapped", [False, True])
def test_segments_in_order(library, swapped):
    """With gaps before, between and behind them. Empty ones keep a place of their own."""
    table = [
        (40, 3, 5, 2),
        (0, 8, 0, 1),
        (7, 8, 1, 0),
        (9, 20, 11, 2),
        (2, 31, 0, 0),
        (0, 35, 4, 1),
    ]
    table = np.array(table)
    if swapped:
        table = table[:, [1, 0, 2, 3]]
    _, gaps = Call("segments", table, weights=3, rows_x=50, rows_y=44, swapped=swapped).check(
        library
    )
    np.testing.assert_array_equal(gaps, [(0, 3), (9, 20), (31, 35), (39, 44)])


def test_segments_that_name_what_is_not_there(library):
    """They have no rows, whoever made the table."""
    bad = [(0, 0, 5, 3), (0, 0, 5, -1), (-1, 0, 5, 0), (0, 8, 5, 0), (48, 0, 5, 1), (0, 3, -2, 1)]
    problems, gaps, _ = Call("segments", bad, weights=3, rows_x=50, rows_y=12).found(library)
    assert not problems[:, :3].any()
    np.testing.assert_array_equal(gaps, [(0, 12)])


def test_many_gaps(library, rng):
    count = 3 * WIDTH
    length, skipped = rng.integers(0, 3, (2, count))
    y_start = np.cumsum(length + skipped) - length
    rows = int(y_start[-1] + length[-1])
    x_start = rng.integers(0, 50, count)
    table = np.stack([x_start, y_start, length, rng.integers(0, 5, count)], axis=1)
    _, gaps = Call("segments", table, weights=5, rows_x=60, rows_y=rows, n=8).check(library)
    assert len(gaps) > WIDTH


def test_segments_of_a_weight_gradient(library):
    """Each has the matrix of its own place, also where an empty one says another."""
    table = [(40, 3, 5, 0), (0, 8, 0, 0), (7, 8, 1, 2), (9, 20, 11, 3)]
    Call("segments", table, weights=4, rows_x=50, rows_y=44, wgrad=True).check(library)


def test_addresses_past_four_gigabytes(library):
    mm = Call("sizes", [2**20, 7], weights=2, rows_x=2**21, n=4096, k=8192, out_bytes=4)
    (problems, *_) = mm.found(library)
    assert problems[1, 3:6].tolist() == [2**20 * 8192 * 2, 8192 * 4096 * 2, 2**20 * 4096 * 4]
    wgrad = Call("sizes", [2**20, 7], weights=2, rows_x=2**21, m=2**17, n=2**15, wgrad=True)
    (problems, *_) = wgrad.found(library)
    assert problems[1, :6].tolist() == [2**17, 2**15, 7, 2**38, 2**36, 2**33]


@pytest.mark.parametrize("problems", [1, 7, 1000])
@pytest.mark.parametrize("count", [1, 64, 5000])
def test_workspace(library, problems, count):
    """Parts follow each other, each at a multiple of 256."""
    offsets, at = np.zeros(10, np.int64), np.zeros(4, np.int64)
    size = library.workspace(ctypes.c_int64(problems), ctypes.c_int64(count), pointer(offsets))
    sizes = [12 * problems, *[8 * problems] * 6, 8 * (count + 1), 4, 160 * 6 * 128]
    ends = np.cumsum([-(-part // 256) * 256 for part in sizes])
    np.testing.assert_array_equal(offsets, [0, *ends[:-1]])
    assert size == 256 + ends[-1]
    scaled = library.scaled_workspace(ctypes.c_int64(problems), ctypes.c_int64(count), pointer(at))
    more = np.cumsum([-(-part * problems // 256) * 256 for part in (8, 8, 20, 20)])
    np.testing.assert_array_equal(at, ends[-1] + np.array([0, *more[:-1]]))
    assert scaled == size + more[-1]
    for of, least in ((0, size), (1, scaled)):
        whole = library.workspace_bytes(ctypes.c_int64(problems), ctypes.c_int64(count), of)
        assert whole >= least
        if extension.BUILD.problem is None:
            rules = extension.rules()
            assert rules.sm100_workspace(weights=problems, count=count, scaled=bool(of)) == whole
    for address in (0, 1, 16, 255, 256, 2**40 + 3):
        assert library.base(ctypes.c_int64(address)) == -address % 256


def test_a_workspace_has_room_for_every_product(library):
    """Whatever its metadata is."""
    for weights, count in ((1, 1), (8, 1), (8, 8), (8, 300), (300, 8)):
        whole = library.workspace_bytes(ctypes.c_int64(weights), ctypes.c_int64(count), 0)
        for kind in range(len(KINDS)):
            for wgrad in (False, True):
                fields = Call("sizes", [0], weights=weights, rows_x=8, wgrad=wgrad).fields
                problems = library.most_problems(fields, kind, ctypes.c_int64(count))
                at = np.zeros(10, np.int64)
                size = library.workspace(
                    ctypes.c_int64(problems), ctypes.c_int64(count), pointer(at)
                )
                assert size <= whole


PREPARE = "JGG_PREPARE_SM100"


@pytest.mark.gpu
def test_kernels_that_prepare(tmp_path):
    """JGG_PREPARE_SM100 may name a program that was built of this tree where there is nvcc: see
    tests/lib/prepare_sm100.cu for the command."""
    program, nvcc = os.environ.get(PREPARE), shutil.which("nvcc")
    if program is None:
        found = host_program.cutlass_headers()
        if nvcc is None or found is None:
            pytest.skip(f"needs nvcc and the headers of CUTLASS, or {PREPARE}")
        program = tmp_path / "prepare"
        flags = ["-std=c++17", "-arch=native", "--expt-relaxed-constexpr", *found, "-I", "ffi"]
        subprocess.run(
            [nvcc, *flags, "tests/lib/prepare_sm100.cu", "-o", program], check=True, cwd=ROOT
        )
    done = subprocess.run([program], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert (done.returncode, done.stdout) == (0, "300 cases of either kind\n"), said
