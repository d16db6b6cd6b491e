"""How NVFP4 operands are padded and their scales ordered: layouts "grouped" and "swizzled".

grouped   blocks run along grouped rows: every group starts at a multiple of 64 padded rows
swizzled  scales in the order of Blackwell's block-scaled instructions: tiles of 128 rows x 4
          scales, where ``(r, s)`` is byte ``r % 32 * 16 + r // 32 * 4 + s``; where rows are
          grouped, every group starts a tile
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core import check, partition, segments
from .._core.segments import LENGTH, X_START, _prefix_sum
from .._quantized.layouts import Layout, register

# Rows to which each group is padded.
GROUPED, SWIZZLED = 64, 128


class Padding(NamedTuple):
    """Where rows go, and where padded rows come from; -1 is nowhere."""

    positions: jax.Array  # int32 (T,)
    source: jax.Array  # int32 (P,)


def padded_rows(rows: int, groups: int, unit: int) -> int:
    """P: what any sizes of that many groups need at most, a multiple of ``unit``."""
    return (rows + (unit - 1) * min(groups, rows)) // unit * unit


def padded_sizes(group_sizes, rows: int, unit: int = GROUPED) -> jax.Array:
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
    # shard_map over some axes only, everything but a sort fails in jnp.searchsorted itself. In a
    # vmap over an axis that is explicitly sharded that does, too.
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


def tiles(rows: int, columns: int) -> tuple[int, int, int]:
    """The shape of the swizzled scales of that many rows and blocks."""
    return -(-rows // 128), -(-columns // 4), 512


def swizzle(scales):
    """uint8 ``(..., R, S)`` as ``(..., ceil(R/128), ceil(S/4), 512)``, padded with zeros."""
    *lead, rows, columns = scales.shape
    r, s, _ = tiles(rows, columns)
    pad = [(0, 0)] * len(lead) + [(0, 128 * r - rows), (0, 4 * s - columns)]
    split = jnp.pad(scales, pad).reshape(*lead, r, 4, 32, s, 4)
    n = len(lead)
    return split.transpose(*range(n), n, n + 3, n + 2, n + 1, n + 4).reshape(*lead, r, s, 512)


def unswizzle(scales, rows: int, columns: int):
    """uint8 ``(..., rows, columns)`` of :func:`swizzle`."""
    *lead, r, s, _ = scales.shape
    n = len(lead)
    split = scales.reshape(*lead, r, s, 32, 4, 4)
    split = split.transpose(*range(n), n, n + 3, n + 2, n + 1, n + 4)
    return split.reshape(*lead, 128 * r, 4 * s)[..., :rows, :columns]


class _Padded(Layout):
    """A layout with rows that are padded group by group."""

    modes = ("nvfp4",)

    def takes_positions(self, value) -> bool:
        return value is not None and value.ndim == 1 and value.dtype == jnp.int32


class _Grouped(_Padded):
    """Blocks run along grouped rows, which are padded group by group."""

    name, axes, positions = "grouped", (-2,), "int32 (T,)"

    def checked(self, op: str, name: str, q) -> Any:
        check.shape(op, f"{name}.weight", q.weight, (None, None), "C, P/8", "layout 'grouped'")
        return super().checked(op, name, q)

    def restored(self, values, q) -> Any:
        return take_rows(values, q.positions)


class _Swizzled(_Padded):
    """Scales are in the order of Blackwell's instructions."""

    name, positions = "swizzled", "int32 (T,) or None"

    def takes_positions(self, value) -> bool:
        return value is None or super().takes_positions(value)

    def in_order(self, op: str, name: str, q) -> Any:
        every_axis = (1, *q.shape[:-1], q.shape[-1] // q.group_size)
        *lead, rows, columns = every_axis[-max(q.weight.ndim, 2) :]
        scales, expected = q.scales, (*lead, *tiles(rows, columns))
        if q.positions is not None:
            expected = (scales.shape[0] if scales.ndim else 0, *expected[-2:])
        if scales.shape != expected:
            raise ValueError(
                f"jgg.{op}: {name}.scales has shape {scales.shape}, expected {expected} in layout "
                f"'swizzled' because {name}.weight is {q.weight.shape}"
            )
        if q.positions is None:
            scales = unswizzle(scales, rows, columns)
        else:
            scales = unswizzle(scales, 128 * scales.shape[0], columns)
            scales = take_rows(scales, q.positions)
        return dataclasses.replace(q, scales=scales, positions=None, layout="linear")


register(_Grouped())
register(_Swizzled())
