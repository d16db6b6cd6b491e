"""Segments: the one form of grouping metadata that every primitive understands.

A segment says that ``length`` consecutive rows of one operand meet ``length`` consecutive rows
of another and one weight.  Every grouped product is a sum over segments ``s`` and rows ``i``::

    F(x, y, w) = sum_s sum_{i < length_s}  x[x_start_s + i] . w[weight_s] . y[y_start_s + i]

``mm`` is its derivative in ``y`` (or, with the roles exchanged, in ``x``) and ``wgrad`` its
derivative in ``w``.  Nothing here ever leaves the device: sizes are data, never shapes.

The metadata reaches a primitive in the form its user gave it (``Form.kind``) and is decoded to
the canonical ``(S, 4)`` int32 table ``[x_start, y_start, length, weight]`` as late as possible,
so that a kernel may read the raw form itself:

=========== ============================== =====================================================
kind        operands                       meaning
=========== ============================== =====================================================
"sizes"     (G',) sizes[, () offset]       consecutive groups of rows, in order
"spans"     (S, 2) [start, end)            arbitrary row ranges; segment s has weight s
"segments"  (S, 4) table                   anything
=========== ============================== =====================================================

Decoding upholds, for whatever it was given: ``0 <= start``, ``start + length <= rows``,
``length >= 0``, and ``length == 0`` where the weight index is outside ``[0, groups)``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

X_START, Y_START, LENGTH, WEIGHT = range(4)

# Row indices are int32 on the device, and kernels may count to the end of a tile past the last.
MAX_ROWS = 2**31 - 1 - 2**10


@dataclasses.dataclass(frozen=True)
class Form:
    """What is known about a primitive's metadata before it runs."""

    kind: Literal["sizes", "spans", "segments"]
    ordered_x: bool = False  # segments' row ranges in x are ascending and disjoint
    ordered_y: bool = False  # likewise in y
    own_weight: bool = False  # segment s names weight s, and there are as many as weights
    aligned: bool = True  # x_start == y_start in every segment
    swapped: bool = False  # the table's columns 0 and 1 are (y_start, x_start)

    def swap(self) -> Form:
        """The same metadata with the roles of x and y exchanged."""
        return dataclasses.replace(
            self,
            ordered_x=self.ordered_y,
            ordered_y=self.ordered_x,
            swapped=not self.swapped and not self.aligned,
        )


SIZES = Form("sizes", ordered_x=True, ordered_y=True, own_weight=True)
SPANS = Form("spans", own_weight=True)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "group_offset"),
    meta_fields=("form",),
)
@dataclasses.dataclass(frozen=True)
class Metadata:
    """Which rows meet which weights, in the form its user gave it.

    Attributes:
      form: what is known of it before it runs.
      values: integers; group sizes, spans or a table, as ``form.kind`` says.
      group_offset: of sizes, ``()``: the group that the first weight belongs to; None for 0.
    """

    form: Form
    values: Any
    group_offset: Any = None

    @property
    def arrays(self) -> list:
        return [self.values] if self.group_offset is None else [self.values, self.group_offset]

    @property
    def count(self) -> int:
        """How many groups, spans or segments it has."""
        return self.values.shape[0]

    def swap(self) -> Metadata:
        return dataclasses.replace(self, form=self.form.swap())

    def decode(self, rows_x: int, rows_y: int, groups: int) -> jax.Array:
        """The canonical (S, 4) int32 table of any form."""
        form, values = self.form, self.values
        if form.kind == "sizes":
            starts, ends = _group_bounds(values, rows_x)
            if self.group_offset is not None:
                starts, ends = _local_groups(starts, ends, self.group_offset, groups)
            return _table(starts, starts, ends - starts, lax.iota(jnp.int32, groups))
        if form.kind == "spans":
            bounds = _saturate(values, rows_x)
            starts, ends = bounds[:, 0], bounds[:, 1]
            lengths = jnp.maximum(ends - starts, 0)
            return _table(starts, starts, lengths, lax.iota(jnp.int32, starts.shape[0]))
        if not form.swapped:
            return values
        return jnp.stack(
            [values[:, Y_START], values[:, X_START], values[:, LENGTH], values[:, WEIGHT]], axis=1
        )

    def narrow(self, rows: int, groups: int) -> list[jax.Array]:
        """As int32, for kernels that decode it themselves.

        They clamp on their own; here a wide integer must only not wrap while it is narrowed.
        """
        if self.form.kind == "segments":
            return [self.values]
        limits = rows, self.count + groups
        return [_int32(v, limit) for v, limit in zip(self.arrays, limits, strict=False)]

    def times(self, count: int, rows_x: int) -> Metadata:
        """The metadata where each row has become ``count`` rows, in order."""
        if self.form.kind == "segments":
            starts_and_length = jnp.array([count, count, count, 1], self.values.dtype)
            return dataclasses.replace(self, values=self.values * starts_and_length)
        return dataclasses.replace(self, values=_saturate(self.values, rows_x) * count)

    def covered(self, rows: int, groups: int) -> jax.Array:
        """Whether a row is one of a group's, bool (rows,); groups are given by sizes."""
        starts, ends = _group_bounds(self.values, rows)
        if self.group_offset is not None:
            starts, ends = _local_groups(starts, ends, self.group_offset, groups)
        if groups == 0:
            return jnp.zeros((rows,), bool)
        live = ends > starts
        first = jnp.min(jnp.where(live, starts, rows))
        last = jnp.max(jnp.where(live, ends, 0))
        row = lax.iota(jnp.int32, rows)
        return (row >= first) & (row < last)


def sizes(group_sizes, group_offset=None) -> Metadata:
    """Consecutive groups of so many rows."""
    return Metadata(SIZES, group_sizes, group_offset)


def pieces(table: jax.Array, count: int) -> jax.Array:
    """Spans (S * count, 2): every segment's rows of x in ``count`` parts that are about as long.

    But for the last ones, they are multiples of 64 rows long.
    """
    start, length = table[:, X_START, None], table[:, LENGTH, None]
    units = -(-length // 64)  # of 64 rows, so that nothing wraps
    step = (units + count - 1) // count
    cut = jnp.minimum(step * lax.iota(jnp.int32, count + 1), units)
    cuts = start + jnp.minimum(64 * cut, length)
    return jnp.stack([cuts[:, :-1], cuts[:, 1:]], axis=2).reshape(-1, 2)


def table(x_start, y_start, length, weight, *, rows_x: int, rows_y: int, groups: int):
    """A canonical table from raw columns of one shape: clamped, never out of bounds.

    A segment that starts outside its rows, or names no weight, is empty.
    """
    ok = (x_start >= 0) & (x_start <= rows_x) & (y_start >= 0) & (y_start <= rows_y)
    ok &= (weight >= 0) & (weight < groups)
    x_start, y_start = _saturate(x_start, rows_x), _saturate(y_start, rows_y)
    room = jnp.minimum(jnp.int32(rows_x) - x_start, jnp.int32(rows_y) - y_start)
    length = jnp.where(ok, jnp.minimum(_saturate(length, MAX_ROWS), room), 0)
    return _table(x_start, y_start, length, jnp.where(ok, weight, 0))


def fold(table: jax.Array, size: int, x_step: int, y_step: int, weight_step: int) -> jax.Array:
    """Fold a batch of ``size`` problems into segments: problem b is shifted by b steps.

    ``table`` is (S, 4), shared by the batch, or (size, S, 4).  A step of 0 means that the
    operand is shared: its rows, or weights, are named again by every problem, not copied.
    """
    batch = lax.iota(jnp.int32, size)
    zero = jnp.zeros_like(batch)
    steps = jnp.stack([batch * x_step, batch * y_step, zero, batch * weight_step], axis=1)
    table = jnp.broadcast_to(table, (size, *table.shape[-2:]))
    return (table + steps[:, None, :]).reshape(-1, 4)


def restrict(table: jax.Array, column: int, start, size: int, *, aligned: bool) -> jax.Array:
    """The part of every segment that lies in rows (or weights) ``[start, start + size)``.

    ``column`` says of which operand; positions come out relative to ``start``.  With ``aligned``
    the rows of x and y are one and the same, so both positions move.
    """
    x_start, y_start, length, weight = (table[:, i] for i in range(4))
    start = jnp.int32(start)
    if column == WEIGHT:
        weight = weight - start
        ok = (weight >= 0) & (weight < size)
        return _table(x_start, y_start, jnp.where(ok, length, 0), jnp.where(ok, weight, 0))
    inside = within(table, column, start, start + jnp.int32(size))
    x_start, y_start, length, _ = (inside[:, i] for i in range(4))
    # Empty parts keep their place in the order, inside the bounds.
    if aligned or column == X_START:
        x_start = jnp.clip(x_start - start, 0, size)
    if aligned or column == Y_START:
        y_start = jnp.clip(y_start - start, 0, size)
    return _table(x_start, y_start, length, weight)


def within(table: jax.Array, column: int, start, stop) -> jax.Array:
    """The part of every segment that lies in rows ``[start, stop)`` of the operand that ``column``
    says. Positions stay as they are; empty parts keep their place in the order."""
    position, length = table[:, column], table[:, LENGTH]
    skipped = jnp.clip(start - position, 0, length)
    kept = jnp.clip(stop - position, skipped, length) - skipped
    x_start, y_start = table[:, X_START] + skipped, table[:, Y_START] + skipped
    return _table(x_start, y_start, kept, table[:, WEIGHT])


def _table(*columns) -> jax.Array:
    # Selected, not concatenated: of operands of which a vmap over an explicitly sharded axis maps
    # some, JAX does not concatenate.
    first, *others = (jnp.asarray(c).astype(jnp.int32)[:, None] for c in columns)
    index = lax.iota(jnp.int32, len(columns))[None]
    return functools.reduce(
        lambda table, i: jnp.where(index == i, others[i - 1], table),
        range(1, len(columns)),
        jnp.broadcast_to(first, (first.shape[0], len(columns))),
    )


def _int32(values, limit: int) -> jax.Array:
    """Integers of any dtype as int32; those that do not fit become -limit or limit."""
    values = jnp.asarray(values)
    info = jnp.iinfo(values.dtype)
    if info.max > jnp.iinfo(jnp.int32).max:
        values = jnp.clip(values, -limit if info.min < 0 else None, limit)
    return values.astype(jnp.int32)


def _saturate(values, limit: int) -> jax.Array:
    """Integers of any dtype, clamped to [0, limit] before they are narrowed to int32."""
    values = jnp.asarray(values)
    info = jnp.iinfo(values.dtype)
    low = 0 if info.min < 0 else None
    high = limit if info.max > limit else None
    if low is not None or high is not None:
        values = jnp.clip(values, low, high)
    return values.astype(jnp.int32)


def _group_bounds(group_sizes, rows: int) -> tuple[jax.Array, jax.Array]:
    """Row bounds of consecutive groups; negative sizes count as 0, the last row is the limit."""
    sizes = _saturate(group_sizes, rows)
    ends = _prefix_sum(sizes.astype(jnp.uint32))
    if sizes.shape[0] * rows >= 2**32:
        # The sum may wrap. Where a rounded sum is far above the limit, it is the limit;
        # elsewhere the true sum is below 2**32 and did not wrap.
        rough = _prefix_sum(sizes.astype(jnp.float32))
        ends = jnp.where(rough > 3e9, jnp.uint32(rows), ends)
    ends = jnp.minimum(ends, jnp.uint32(rows)).astype(jnp.int32)
    starts = lax.pad(ends[:-1], jnp.int32(0), ((1, 0, 0),)) if ends.size else ends
    return starts, ends


def _prefix_sum(values):
    """``jnp.cumsum`` as a window sum: XLA's CPU backend of jaxlib 0.12.0 aborts on the form that
    cumsum itself takes in an exported multi-platform module."""
    count = values.shape[0]
    if count == 0:
        return values
    zero = np.zeros((), values.dtype)
    return lax.reduce_window(values, zero, lax.add, (count,), (1,), [(count - 1, 0)])


def _local_groups(starts, ends, offset, groups: int):
    """Bounds of groups [offset, offset + groups) of a longer list; absent ones are empty."""
    offset = jnp.asarray(offset).reshape(())
    total = starts.shape[0]
    info = jnp.iinfo(offset.dtype)
    if info.bits < 32:
        offset = offset.astype(jnp.int32)
    # Clamp before narrowing: a wide offset must not wrap into the valid range.
    offset = jnp.clip(offset, -groups if info.min < 0 else 0, total)
    index = offset.astype(jnp.int32) + lax.iota(jnp.int32, groups)
    ok = (index >= 0) & (index < total)
    if total == 0:
        zeros = jnp.zeros((groups,), jnp.int32)
        return zeros, zeros
    index = jnp.where(ok, index, 0)
    return jnp.where(ok, _taken(starts, index), 0), jnp.where(ok, _taken(ends, index), 0)


def _taken(values, index) -> jax.Array:
    """``values[index]``; a sum over all of them where a mesh has Explicit axes: JAX has no gather
    by an index that a vmap maps over one."""
    if not jax.typeof(index).sharding.mesh.explicit_axes:
        return values[index]
    here = index[:, None] == lax.iota(jnp.int32, values.shape[0])[None]
    return (here.astype(jnp.int32) * values[None]).sum(1, dtype=jnp.int32)
