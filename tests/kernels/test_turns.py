"""In which order clusters take tiles, compiled for the host: of a matrix, first those that have had
least to do; of matrices in order of their length, in turns."""

import itertools

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
@pytest.mark.one_in(7)
def test_least_first(library, most, clusters):
    rng = np.random.default_rng(clusters)
    count = 12 if clusters < 100 else 4
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


def ranked(library, rows, clusters, slices, tiles, halves, rounds=60):
    """The members of RankedTurns, and (rounds, clusters) tiles, -1 where a cluster takes none."""
    slices = np.asarray(slices, np.int32)
    assert (np.diff(slices) <= 0).all()
    turns, found = np.zeros(4, np.int32), np.full((rounds, clusters), -1, np.int32)
    in_any_order = np.random.default_rng(0).permutation(slices)
    library.ranked_tiles(
        rows, clusters, len(slices), pointer(in_any_order), tiles, halves, rounds, pointer(turns),
        pointer(found),
    )  # fmt: skip
    return turns.tolist(), found


@pytest.mark.parametrize(
    ("rows", "clusters", "slices", "tiles", "halves", "want"),
    [
        (256, 66, [115, *[1] * 63], 16, 32, (1, 32, 1)),  # 90 % of k in one of 64 matrices
        (256, 66, [60, 55, *[2] * 62], 8, 16, (2, 32, 1)),  # in two
        (256, 66, [115, *[1] * 63], 24, 48, (1, 24, 0)),  # too many halves
        (128, 132, [58, *[1] * 31], 16, 32, (1, 32, 1)),
        (256, 66, [10, 8, 7, 6, 5, 4, *[2] * 58], 16, 32, (0, 0, 0)),  # nothing stands out
        (256, 66, [115] * 8, 4, 8, (0, 0, 0)),
        (256, 66, [0] * 8, 16, 32, (0, 0, 0)),
        (256, 66, [115, *[1] * 63], 40, 80, (0, 0, 0)),  # more tiles than half of the clusters
    ],
)
def test_ranked_turns(library, rows, clusters, slices, tiles, halves, want):
    (matrices, held, halved, skipped), found = ranked(
        library, rows, clusters, slices, tiles, halves
    )
    assert (matrices, held, halved) == want
    # Every tile once, in this order but for who takes which within a round.
    taken = np.sort(found[found >= 0])
    np.testing.assert_array_equal(taken, np.arange(len(taken)))
    for before, after in itertools.pairwise(found):
        assert before.max() < after[after >= 0].min()
    assert skipped == 0 or held
    assert (found[1 : 1 + skipped, :held] == -1).all()
    assert (found[1 : 1 + skipped, held:] >= 0).all()
    assert (found[1 + skipped :] >= 0).all()
    if held == 0:
        return
    # About what the others do in the meantime.
    each, one = rows // 32, rows // 64 + 1
    longest = one * slices[0] + 10 if halved else each * slices[0] + 10
    others = np.mean([each * s + 10 for s in slices[matrices:]])
    assert 0.8 * longest - 2 * others < (1 + skipped) * others <= 1.2 * longest


def test_ranked_makespan(library):
    """What it is for: 64 matrices of 16 pairs of tiles, one with 90 % of k, on 66 pairs."""
    slices = [115, *[2] * 63]
    (_, held, _, _), found = ranked(library, 256, 66, slices, 16, 32)
    work = np.concatenate([np.full(held, 5 * 115 + 10), np.full(63 * 16, 8 * 2 + 10)])
    work = np.append(work, np.zeros(found.max() + 1))
    had = np.where((found >= 0) & (found < held + 63 * 16), work[np.maximum(found, 0)], 0).sum(0)
    assert had.max() < 1.25 * had.mean()
    in_turn = np.append(np.full(16, 8 * 115 + 10), np.full(63 * 16, 26))
    rounds = np.append(in_turn, np.zeros(-len(in_turn) % 66)).reshape(-1, 66)
    rounds[1::2] = rounds[1::2, ::-1]
    assert rounds.sum(0).max() > 1.8 * had.max()
