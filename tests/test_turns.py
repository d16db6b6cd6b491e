"""In which order clusters take a matrix's tiles, compiled for the host: first those that have had
least to do."""

import host_program
import numpy as np
import pytest
from host_program import pointer

pytestmark = host_program.needs_compiler


@pytest.fixture(scope="module")
def library():
    return host_program.build_kernels("turns")


def found(library, most, clusters, more, work):
    more, work = np.asarray(more, np.int32), np.asarray(work, np.int32)
    places = np.full((len(more), clusters), -1, np.int32)
    library.turns(most, clusters, len(more), pointer(more), pointer(work), pointer(places))
    return places


def wanted(clusters, more, work):
    """A stable sort by work had, then by number: as keys break ties."""
    had, places = np.zeros(clusters, np.int64), []
    for count, one in zip(more, work, strict=True):
        order = np.lexsort((np.arange(clusters), had))
        place = np.empty(clusters, np.int64)
        place[order] = np.arange(clusters)
        places.append(place)
        had[order[:count]] += one
    return np.array(places), had


@pytest.mark.parametrize(
    ("most", "clusters"), [(72, 1), (72, 2), (72, 31), (72, 57), (72, 66), (72, 72), (144, 132)]
)
def test_least_first(library, most, clusters):
    rng = np.random.default_rng(clusters)
    count = 40
    more = rng.integers(0, clusters, count)
    work = (rng.pareto(1.0, count) * 20).astype(np.int32) + rng.integers(0, 2, count)
    want, _ = wanted(clusters, more, work)
    np.testing.assert_array_equal(found(library, most, clusters, more, work), want)


def test_much_work(library):
    """Work beyond what a value of the order can say counts as that."""
    more, work = [3, 5, 1, 6, 4] * 6, [2**31 - 1, 2**21, 7, 2**30, 2**21 - 1] * 6
    want, _ = wanted(7, more, np.minimum(work, 2**21))
    np.testing.assert_array_equal(found(library, 72, 7, more, work), want)


def test_balance():
    """What it is for: 128 matrices of 48 pairs of tiles, of very different lengths, on 66 pairs."""
    rng = np.random.default_rng(0)
    work = 2 * (rng.multinomial(32768, rng.dirichlet(np.full(128, 0.5))) // 64) + 5
    _, had = wanted(66, [48] * 128, work)
    in_turn = np.zeros(66)
    np.add.at(in_turn, np.arange(128 * 48) % 66, np.repeat(work, 48))
    assert had.max() < 1.02 * had.mean()
    assert in_turn.max() > 1.05 * in_turn.mean()
