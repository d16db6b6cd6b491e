"""Segment tables against brute force: decoding, folding, cutting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_groupgemm._core import segments
from jax_groupgemm._core.segments import (
    LENGTH,
    SIZES,
    SPANS,
    WEIGHT,
    X_START,
    Y_START,
    Form,
    Metadata,
)

sizes_lists = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 30), max_size=8)


def triples(table) -> list[tuple[int, int, int]]:
    """Every (x row, y row, weight) that a table pairs."""
    out = []
    for x, y, length, weight in np.asarray(table).tolist():
        out += [(x + i, y + i, weight) for i in range(length)]
    return out


def check_invariants(table, rows_x, rows_y, groups):
    for x, y, length, weight in np.asarray(table).tolist():
        assert length >= 0
        assert 0 <= x <= x + length <= rows_x
        assert 0 <= y <= y + length <= rows_y
        assert length == 0 or 0 <= weight < groups


@settings(deadline=None)
@given(sizes=sizes_lists, rows=st.integers(0, 60))
def test_sizes(sizes, rows):
    table = segments.sizes(jnp.array(sizes, jnp.int32)).decode(rows, rows, len(sizes))
    check_invariants(table, rows, rows, len(sizes))
    row, want = 0, []
    for group, size in enumerate(sizes):
        for _ in range(min(max(size, 0), rows - row)):
            want.append((row, row, group))
            row += 1
    assert triples(table) == want


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8), rows=st.integers(0, 40),
    offset=st.integers(-9, 12), groups=st.integers(0, 5),
)  # fmt: skip
def test_sizes_with_offset(sizes, rows, offset, groups):
    group_sizes = jnp.array(sizes, jnp.int32)
    table = segments.sizes(group_sizes, jnp.int32(offset)).decode(rows, rows, groups)
    assert table.shape == (groups, 4)
    check_invariants(table, rows, rows, groups)
    whole = triples(segments.sizes(group_sizes).decode(rows, rows, len(sizes)))
    want = [(x, y, g - offset) for x, y, g in whole if 0 <= g - offset < groups]
    assert triples(table) == want


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_offsets_of_other_dtypes(dtype):
    """A narrow one does not wrap where it is added to the groups at hand."""
    sizes = jnp.full(200, 1, jnp.int32)
    offset, groups = np.array(100, dtype), 60
    table = segments.sizes(sizes, jnp.asarray(offset)).decode(200, 200, groups)
    want = segments.sizes(sizes, jnp.int32(100)).decode(200, 200, groups)
    np.testing.assert_array_equal(table, want)
    assert triples(table)[-1] == (159, 159, 59)


def test_no_groups_with_an_offset():
    table = segments.sizes(jnp.zeros(0, jnp.int32), jnp.int32(1)).decode(9, 9, 3)
    assert table.shape == (3, 4)
    assert triples(table) == []


def test_wide_integers_saturate():
    """Those that int32 cannot hold are the limit, not something negative."""
    values = np.array([0, 5, 2**31, 2**32 - 1], np.uint32)
    np.testing.assert_array_equal(segments._int32(values, 99), [0, 5, 99, 99])


@settings(deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(-50, 90), st.integers(-50, 90)), max_size=8),
    rows=st.integers(0, 60),
)
def test_spans(spans, rows):
    metadata = Metadata(SPANS, jnp.array(spans, jnp.int32).reshape(-1, 2))
    table = metadata.decode(rows, rows, len(spans))
    check_invariants(table, rows, rows, len(spans))
    want = [(r, r, s) for s, (a, b) in enumerate(spans) for r in range(max(a, 0), min(b, rows))]
    assert triples(table) == want


def random_table(rng, count, rows_x, rows_y, groups):
    columns = (
        rng.integers(-5, rows_x + 5, count), rng.integers(-5, rows_y + 5, count),
        rng.integers(-3, 12, count), rng.integers(-2, groups + 2, count),
    )  # fmt: skip
    return columns, segments.table(
        *(jnp.asarray(c, jnp.int32) for c in columns), rows_x=rows_x, rows_y=rows_y, groups=groups
    )


@pytest.mark.parametrize("seed", range(10))
def test_raw_tables_are_clamped(seed):
    rng = np.random.default_rng(seed)
    columns, table = random_table(rng, 30, 20, 25, 4)
    check_invariants(table, 20, 25, 4)
    want = []
    for x, y, length, weight in zip(*columns, strict=True):
        if x >= 0 and y >= 0 and 0 <= weight < 4:
            want += [(x + i, y + i, weight) for i in range(length) if x + i < 20 and y + i < 25]
    assert triples(table) == want


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("steps", [(20, 25, 4), (0, 25, 4), (20, 25, 0), (0, 25, 0)])
def test_fold(steps, shared):
    rng = np.random.default_rng(0)
    tables = [random_table(rng, 6, 20, 25, 4)[1] for _ in range(3)]
    tables = [tables[0]] * 3 if shared else tables
    folded = segments.fold(tables[0] if shared else jnp.stack(tables), 3, *steps)
    want = []
    for b, table in enumerate(tables):
        want += [
            tuple(v + b * step for v, step in zip(t, steps, strict=True)) for t in triples(table)
        ]
    assert triples(folded) == want


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("column", [X_START, Y_START, WEIGHT])
def test_restrict_cuts_without_losing_or_repeating(seed, column):
    """The parts for all shards together are the whole, each in its own shard's coordinates."""
    rng = np.random.default_rng(seed)
    rows_x, rows_y, groups = 24, 36, 6
    table = random_table(rng, 30, rows_x, rows_y, groups)[1]
    total = {X_START: rows_x, Y_START: rows_y, WEIGHT: groups}[column]
    size, parts = total // 3, []
    bounds = [rows_x, rows_y, groups]
    bounds[{X_START: 0, Y_START: 1, WEIGHT: 2}[column]] = size
    for shard in range(3):
        part = segments.restrict(table, column, shard * size, size, aligned=False)
        check_invariants(part, *bounds)
        shift = {X_START: (1, 0, 0), Y_START: (0, 1, 0), WEIGHT: (0, 0, 1)}[column]
        parts += [
            tuple(v + shard * size * s for v, s in zip(t, shift, strict=True))
            for t in triples(part)
        ]
    assert sorted(parts) == sorted(triples(table))


def test_restrict_keeps_order():
    table = segments.sizes(jnp.array([3, 0, 9, 4, 0, 5])).decode(24, 24, 6)
    for shard in range(4):
        part = np.asarray(segments.restrict(table, Y_START, 6 * shard, 6, aligned=True))
        ends = part[:, Y_START] + part[:, LENGTH]
        assert (part[1:, Y_START] >= ends[:-1]).all()
        assert (part[:, X_START] == part[:, Y_START]).all()


@pytest.mark.parametrize("count", [1, 2, 7, 132])
def test_pieces(count):
    rows = 2**31 - 1 - 2**10
    spans = np.array([[0, 0], [3, 3 + 64 * 7], [500, 1001], [5, 2000], [2, rows], [0, rows]])
    table = Metadata(SPANS, jnp.asarray(spans)).decode(rows, rows, len(spans))
    got = np.asarray(segments.pieces(table, count), np.int64).reshape(len(spans), count, 2)
    np.testing.assert_array_equal(got[:, 0, 0], spans[:, 0])
    np.testing.assert_array_equal(got[:, -1, 1], spans[:, 1])
    np.testing.assert_array_equal(got[:, 1:, 0], got[:, :-1, 1])  # each begins where one ends
    for (start, end), lengths in zip(spans, got[:, :, 1] - got[:, :, 0], strict=True):
        step = -(-(end - start) // (64 * count)) * 64
        want = np.clip(end - start - step * np.arange(count), 0, step)
        np.testing.assert_array_equal(lengths, want)


def test_sums_that_would_wrap():
    """Many groups of many rows: the sum exceeds 2**32, the answer is the last row."""
    rows, groups = 2**21, 4096
    sizes = jnp.full((groups,), 2**31 - 1, jnp.int32).at[0].set(7)
    table = np.asarray(jax.jit(lambda s: segments.sizes(s).decode(rows, rows, groups))(sizes))
    assert table[0].tolist() == [0, 0, 7, 0]
    assert table[1].tolist() == [7, 7, rows - 7, 1]
    assert not table[2:, LENGTH].any()
    small = jnp.ones((groups,), jnp.int32)
    table = np.asarray(segments.sizes(small).decode(rows, rows, groups))
    assert (table[:, X_START] == np.arange(groups)).all()


def test_swap_exchanges_the_roles():
    form = Form("segments", ordered_x=True, aligned=False)
    table = jnp.array([[1, 2, 3, 4]], jnp.int32)
    assert form.swap().ordered_y
    assert not form.swap().ordered_x
    assert Metadata(form.swap(), table).decode(9, 9, 9).tolist() == [[2, 1, 3, 4]]
    assert form.swap().swap() == form
    assert SIZES.swap() == SIZES
