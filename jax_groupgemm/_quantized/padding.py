"""Rows that are padded group by group, so that blocks along them span no two groups."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core import partition, segments
from .._core.segments import LENGTH, X_START, _prefix_sum


class Padding(NamedTuple):
    """Where rows go, and where padded rows come from; -1 is nowhere."""

    positions: jax.Array  # int32 (T,)
    source: jax.Array  # int32 (P,)


def padded_rows(rows: int, groups: int, unit: int) -> int:
    """P: what any sizes of that many groups need at most, a multiple of ``unit``."""
    return (rows + (unit - 1) * min(groups, rows)) // unit * unit


def padded_sizes(group_sizes, rows: int, unit: int) -> jax.Array:
    """int32 ``(G,)``: rows of each group, cut at the last row, in multiples of ``unit``."""
    return _bounds(group_sizes, rows, unit)[2]


def covered(group_sizes, rows: int) -> jax.Array:
    """bool ``(rows,)``: whether a row is in a group."""
    total = jnp.sum(_bounds(group_sizes, rows, 1)[1], dtype=jnp.int32)
    return lax.iota(jnp.int32, rows) < total


def padding(group_sizes, rows: int, unit: int) -> Padding:
    groups, row = group_sizes.shape[0], lax.iota(jnp.int32, rows)
    nowhere = jnp.full((padded_rows(rows, groups, unit),), -1, jnp.int32)
    if groups == 0 or rows == 0:
        return Padding(jnp.full_like(row, -1), nowhere)
    starts, sizes, padded = _bounds(group_sizes, rows, unit)
    shift = _prefix_sum(padded) - padded - starts
    group = group_of(starts + sizes, row)
    inside = group < groups
    positions = jnp.where(inside, row + shift[jnp.where(inside, group, 0)], -1)
    at = nowhere.at[positions]
    return Padding(positions, at.set(row, mode="drop", wrap_negative_indices=False))


def group_of(ends, row) -> jax.Array:
    """The first group that ends after each row."""
    # Unrolled: a loop would have to be told over which axes of a mesh its carry varies. In a
    # shard_map over some axes only, everything but a sort fails in jnp.searchsorted itself, and in
    # a vmap over an axis that is explicitly sharded that does, too.
    if partition.maps_explicit_axes():
        return (ends[None] <= row[:, None]).sum(1, dtype=jnp.int32)
    mesh = jax.sharding.get_abstract_mesh()
    partial = 0 < len(mesh.manual_axes) < len(mesh.axis_names)
    method = "sort" if partial else "scan_unrolled"
    return jnp.searchsorted(ends, row, side="right", method=method)


def _bounds(group_sizes, rows: int, unit: int):
    table = segments.sizes(group_sizes).decode(rows, rows, group_sizes.shape[0])
    sizes = table[:, LENGTH]
    return table[:, X_START], sizes, (sizes + (unit - 1)) // unit * unit


def take_rows(a, index):
    """``a[index]``; zeros where the index is -1."""
    if a.shape[0] == 0:  # then every index is -1
        return jnp.zeros((*index.shape, *a.shape[1:]), a.dtype)
    return a.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def accumulated(live, out, existing_out) -> jax.Array:
    """``out + existing_out`` of groups that are live, bool ``(G,)``; of the others it stays as it
    is, bit for bit."""
    # JAX wants a condition of the same shape to be sharded as what it chooses from.
    live = partition.resharded(live, partition.entries_of(existing_out)[:1])
    return jnp.where(live[:, None, None], out + existing_out, existing_out)
