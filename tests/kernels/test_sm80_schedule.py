"""The tiles of the generic kernel's blocks (ffi/grouped_mm/device/schedule_sm80.cuh), made on the
host: every element of the result is written once, as the products of its own segments."""

import ctypes

import host_program
import numpy as np
import pytest
from host_program import pointer

pytestmark = host_program.needs_compiler
SIZES, SPANS, SEGMENTS = range(3)
IN_ORDER, DETECT, BY_RESULT, MATRICES = range(4)
TILES = {"wide": 0, "square": 1, "medium": 2}
POINTERS = ("data", "offset")
NUMBERS = ("kind", "count", "order", "wgrad", "gated", "run_bits")
SHAPE = ("rows_x", "rows_y", "m", "n", "groups")


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int32) for name in NUMBERS),
        *((name, ctypes.c_int64) for name in SHAPE),
    ]


WRITTEN = np.dtype(
    [(name, np.int32) for name in ("block", "weight", "x_row", "length")]
    + [(name, np.int64) for name in ("row", "rows", "column", "columns")]
)


@pytest.fixture(scope="module")
def program():
    program = host_program.build_kernels("schedule_sm80", "-Itests/lib/stand_in")
    program.tiles_of_blocks.restype = ctypes.c_int64
    return program


def tiles(program, tile, blocks, data, offset=None, **of):
    data = np.ascontiguousarray(data, np.int32)
    offset = None if offset is None else np.array([offset], np.int32)
    of = {"count": len(data), "gated": 0, "run_bits": 0, "m": 0, **of}
    problem = Problem(pointer(data), pointer(offset), *(int(of[name]) for name in NUMBERS + SHAPE))
    written = np.zeros(1 << 14, WRITTEN)
    count = program.tiles_of_blocks(
        ctypes.byref(problem), TILES[tile], blocks, pointer(written), ctypes.c_int64(len(written))
    )
    assert count < len(written)
    return written[:count]


def mm_by_element(written, rows, columns):
    """For each row and column of the result: the weight and the row of x of its segments."""
    found = [[[] for _ in range(columns)] for _ in range(rows)]
    for w in written:
        for i in range(w["rows"]):
            for c in range(w["column"], w["column"] + w["columns"]):
                one = (int(w["weight"]), int(w["x_row"] + i) if w["weight"] >= 0 else 0)
                found[w["row"] + i][c].append(one)
    return found


# Columns count as one, or as few: what is checked is where tiles begin and end.
def narrow(written, unit):
    assert not (written["column"] % unit).any()
    written = written.copy()
    written["columns"] = -(-written["columns"] // unit)
    written["column"] //= unit
    return written


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("groups", "mean"), [(9, 90), (9, 200), (300, 2), (1100, 1), (1, 640)])
@pytest.mark.parametrize("run_bits", [0, 2])
def test_groups_in_order(program, rng, tile, groups, mean, run_bits):
    """Windows of segments, empty groups, and rows behind the last group, which are zeros."""
    sizes = rng.integers(0, 2 * mean + 1, groups) * rng.integers(0, 2, groups)
    sizes[0] = max(mean, 1)
    ends = np.cumsum(sizes)
    rows, n = int(ends[-1]) + 41, 1100
    written = tiles(
        program, tile, 5, sizes, kind=SIZES, order=IN_ORDER, wgrad=0, run_bits=run_bits,
        rows_x=rows, rows_y=rows, n=n, groups=groups,
    )  # fmt: skip
    unit = {"wide": 256, "square": 128, "medium": 128}[tile] << run_bits
    columns = -(-n // unit)
    found = mm_by_element(narrow(written, unit), rows, columns)
    for row in range(rows):
        group = int(np.searchsorted(ends, row, side="right"))
        assert found[row] == [[(group, row) if group < groups else (-1, 0)]] * columns


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("length", [1, 96, 128, 129, 192, 193, 256, 257, 288, 289, 384, 385, 1000])
def test_rows_of_tiles(program, tile, length):
    """As many tiles as rows need, of which no one has very few where they share the rows."""
    written = tiles(
        program, tile, 2, [length], kind=SIZES, order=IN_ORDER, wgrad=0,
        rows_x=length, rows_y=length, n=64, groups=1,
    )  # fmt: skip
    high = 64 if tile == "medium" else 128
    assert len(written) == -(-length // high)
    assert written["rows"].sum() == length
    if high == 128 and len(written) in (2, 3) and length <= 96 * len(written):
        assert written["rows"].max() == 96


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("overlapping", [False, True])
def test_segments(program, rng, tile, overlapping):
    """Segments with gaps between them; or in any order, some over others."""
    count, rows = 12, 900
    lengths = rng.integers(0, 110, count)
    if overlapping:
        y = rng.integers(0, rows - 110, count)
    else:
        y = np.cumsum(lengths + rng.integers(0, 20, count)) - lengths
        rows = int(y[-1] + lengths[-1]) + 30
    x = rng.integers(0, rows - lengths)
    weights = rng.integers(0, 5, count)
    table = np.stack([x, y, lengths, weights], 1)
    written = tiles(
        program, tile, 3, table, kind=SEGMENTS, order=DETECT, wgrad=0,
        rows_x=rows, rows_y=rows, n=64, groups=5,
    )  # fmt: skip
    found = mm_by_element(narrow(written, 256), rows, 1)
    for row in range(rows):
        want = [
            (int(w), int(a + row - b)) for a, b, size, w in table if size and b <= row < b + size
        ]
        assert found[row][0] == (want or [(-1, 0)])


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("order", [IN_ORDER, MATRICES])
@pytest.mark.parametrize("run_bits", [0, 1, 2])
@pytest.mark.parametrize("m", [72, 300, 2200])
def test_matrices(program, rng, tile, order, run_bits, m):
    """wgrad: each matrix has its own rows, or none. Bands of 16 rows of tiles, and less."""
    groups, n = 7, 648
    sizes = rng.integers(0, 50, groups) * rng.integers(0, 2, groups)
    ends = np.cumsum(sizes)
    rows = int(ends[-1]) + 9
    data = sizes if order == IN_ORDER else np.stack([ends - sizes, ends], 1)
    written = tiles(
        program, tile, 4, data, kind=SIZES if order == IN_ORDER else SPANS, order=order, wgrad=1,
        run_bits=run_bits, rows_x=rows, rows_y=rows, m=m, n=n, groups=groups,
    )  # fmt: skip
    area = np.zeros((groups, m, n), np.int8)
    for w in written:
        group = int(w["weight"])
        assert w["length"] == sizes[group]
        assert w["length"] == 0 or w["x_row"] == ends[group] - sizes[group]
        area[group, w["row"] : w["row"] + w["rows"], w["column"] : w["column"] + w["columns"]] += 1
    assert (area == 1).all()


def test_gated_columns(program):
    """A tile of 256 columns of w is 128 of the result."""
    written = tiles(
        program, "wide", 2, [70], kind=SIZES, order=IN_ORDER, wgrad=0, gated=1,
        rows_x=70, rows_y=70, n=600, groups=1,
    )  # fmt: skip
    assert sorted(written["column"]) == [0, 128, 256]
    assert written["columns"].sum() == 300
