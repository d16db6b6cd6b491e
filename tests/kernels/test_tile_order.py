"""Which tiles the Hopper kernels take, compiled for the host: each of them once, in bands, and the
rows of weight gradients shared out."""

import host_program
import numpy as np
import pytest
from host_program import pointer

pytestmark = host_program.needs_compiler


@pytest.fixture(scope="module")
def library():
    return host_program.build("tile_order")


def places(library, cluster, rows, columns, wgrad):
    """(turns, cluster, 4): row, column, whether L is shared, whether the tile exists."""
    count = library.order(cluster, rows, columns, wgrad, None)
    found = np.full((count, cluster, 4), -1, np.int32)
    library.order(cluster, rows, columns, wgrad, pointer(found))
    return found


@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("cluster", [1, 2])
def test_every_tile_once(library, cluster, wgrad):
    for rows in range(41):
        for columns in range(1, 14):
            found = places(library, cluster, rows, columns, wgrad)
            tiles = [tuple(p[:2]) for p in found.reshape(-1, 4) if p[3]]
            assert sorted(tiles) == [(r, c) for r in range(rows) for c in range(columns)]
            # No more turns than it takes, but for one row of an odd last column.
            assert len(found) * cluster - rows * columns == (cluster == 2) * (rows & columns & 1)


@pytest.mark.parametrize("wgrad", [False, True])
def test_blocks_that_share_rows(library, wgrad):
    for rows in range(1, 41):
        for columns in range(1, 14):
            for first, second in places(library, 2, rows, columns, wgrad):
                shares = bool(first[2])
                assert shares == bool(second[2])
                if shares:
                    assert first[0] == second[0]
                    assert first[1] + 1 == second[1]
                else:  # a block without a tile has another's place, of which it stores nothing
                    assert first[1] == second[1] == columns - 1
                    assert first[3]
                    assert 0 <= second[0] < rows
                    assert second[0] - first[0] == second[3]


@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("rows", range(1, 41))
def test_bands(library, rows, wgrad):
    """Down a band, then on to the next columns; a band has 4 rows, or 8 of a weight gradient, and
    the last one up to two more, or as few as three if there are others."""
    columns, most = 6, 8 if wgrad else 4
    found = places(library, 1, rows, columns, wgrad)[:, 0, :2]
    begin = 0
    while begin < rows:
        left = rows - begin
        band = most if left > most + 2 else left
        assert begin == 0 or band >= 3
        want = [(begin + i, c) for c in range(columns) for i in range(band)]
        assert found[columns * begin : columns * (begin + band)].tolist() == [list(w) for w in want]
        begin += band


@pytest.mark.parametrize("most", [32, 64, 128, 256])
def test_rows_shared_out(library, most):
    unit = min(most, 64)
    for rows in [*range(1, 1300), 2880, 5760, 14336, 2**31 - 256]:
        count = library.shares(most, rows, None)
        assert count == -(-rows // most)
        if count > 10**6:
            continue
        first = np.full(count + 1, -1, np.int32)
        library.shares(most, rows, pointer(first))
        ends = np.minimum(first[1:], rows)
        assert first[0] == 0
        assert first[-1] >= rows
        assert (first % unit == 0).all()
        sizes = ends - first[:-1]
        assert sizes.sum() == rows
        assert (sizes > 0).all()
        assert (sizes <= most).all()
        whole = -(-sizes // unit)  # in units
        assert whole.max() - whole.min() <= 1
