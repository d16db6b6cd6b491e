"""How NVFP4 operands are padded and their scales ordered: layouts "grouped" and "swizzled".

grouped   blocks run along grouped rows: every group starts at a multiple of 64 padded rows
swizzled  scales in the order of Blackwell's block-scaled instructions: tiles of 128 rows x 4
          scales, where ``(r, s)`` is byte ``r % 32 * 16 + r // 32 * 4 + s``; where rows are
          grouped, every group starts a tile
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._core import check
from .._quantized import padding as padding_of
from .._quantized.layouts import Layout, register
from .._quantized.padding import covered as covered
from .._quantized.padding import group_of as group_of
from .._quantized.padding import padded_rows as padded_rows
from .._quantized.padding import padding as padding
from .._quantized.padding import take_rows as take_rows

# Rows to which each group is padded.
GROUPED, SWIZZLED = 64, 128


def padded_sizes(group_sizes, rows: int) -> jax.Array:
    """int32 ``(G,)``: rows of each group, cut at the last row, in multiples of 64."""
    return padding_of.padded_sizes(group_sizes, rows, GROUPED)


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
