"""Which rows a block of the kernel of few rows has (ffi/quantized/device/direct_rows.cuh), on the
host."""

import ctypes

import host_program
import numpy as np
import pytest
from host_program import pointer

pytestmark = host_program.needs_compiler


@pytest.fixture(scope="module")
def direct_rows():
    return host_program.build_kernels("direct_rows").direct_rows


def blocks_of(sizes, rows, offset, groups):
    """From the definition: (first, loaded, inside, weight) for the block of every row."""
    group_of, begin_of, begin = {}, {}, 0
    for g, size in enumerate(sizes):
        end = min(begin + max(int(size), 0), rows)
        for row in range(begin, end):
            group_of[row], begin_of[row] = g, begin
        begin = end
    blocks = []
    for row in range(rows):
        weight = group_of.get(row, -1) - offset
        if row not in group_of or not 0 <= weight < groups:
            blocks.append((row, 1, 0, -1))
            continue
        rest = sum(group_of.get(r) == group_of[row] for r in range(row, rows))
        some = min(rest, 8) if (row - begin_of[row]) % 8 == 0 else 0
        blocks.append((row, some, some, weight))
    return blocks


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ([0, 3, 0, 9, 4], 16),
        ([16], 16),
        ([20], 16),
        ([3, -5, 2**31 - 1, 1], 12),
        ([0] * 300, 3),
        ([0] * 130 + [2, 0, 7] + [0] * 200, 10),
        ([1] * 140, 16),
        ([0] * 127 + [1, 1], 2),
        ([5], 0),
    ],
)
@pytest.mark.parametrize("offset", [None, 0, 1, -3, 2**31 - 1])
def test_every_row_has_a_block(direct_rows, sizes, rows, offset):
    """Sizes that are too large, negative or of many windows; weights that are some of the
    groups."""
    groups = len(sizes) if offset is None else max(len(sizes) // 2, 1)
    sizes = np.array(sizes, np.int32)
    first = None if offset is None else np.array([offset], np.int32)
    found = np.full((rows + 1, 4), -7, np.int32)
    direct_rows(
        pointer(sizes), ctypes.c_int(len(sizes)), pointer(first), ctypes.c_int(groups),
        ctypes.c_int(rows), pointer(found),
    )  # fmt: skip
    want = blocks_of(sizes, rows, offset or 0, groups)
    assert [tuple(row) for row in found[:rows].tolist()] == [
        # Without rows, nothing else is looked at.
        w if w[1] else (w[0], 0, 0, w[3])
        for w in want
    ]
    assert (found[rows] == -7).all()
    covered = np.zeros(rows, int)
    for begin, loaded, _, _ in want:
        covered[begin : begin + loaded] += 1
    assert (covered == 1).all()
