"""How the leaves of a ``Quantized`` are stored: an object per layout, registered by its family.

Layout "linear" is what the docstring of ``Quantized`` describes. Others differ from it in shape,
in order, or by rows that are padded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .._core import check
from .._core.check import describe
from . import format

#: By name, as ``Quantized.layout`` has it.
LAYOUTS: dict[str, Layout] = {}
#: Those of one mode, by mode and name, where its leaves are others than the name says elsewhere.
_OF_MODES: dict[tuple[str, str], Layout] = {}


class Layout:
    """Layout "linear", and the base of the others.

    Attributes:
      name: as ``Quantized.layout`` has it.
      axes: values of ``Quantized.axis`` that it exists for.
      modes: modes that it exists for; None for all.
      positions: what ``Quantized.positions`` is, for messages.
    """

    name = "linear"
    axes: tuple[int, ...] = (-1, -2)
    modes: tuple[str, ...] | None = None
    positions = "None"

    def shape(self, q) -> tuple[int, ...]:
        """The shape of the array that ``q`` stands for, as stored."""
        *lead, words = q.weight.shape
        return (*lead, words * 32 // q.bits)

    def checked(self, op: str, name: str, q) -> Any:
        """``q``, whose weight and scales are arrays; raises where its leaves do not fit each other.
        Scales may come out in order, in layout "linear"."""
        check.dtype(op, f"{name}.weight", q.weight.dtype, ("uint32",))
        kind = format.of(q)
        check.dtype(op, f"{name}.scales", q.scales.dtype, kind.scales, f" in mode {q.mode!r}")
        unit = kind.codes_together(q.bits, q.group_size)
        if q.weight.ndim == 0 or q.weight.shape[-1] * 32 % (q.bits * unit):
            whole = "" if unit == q.group_size else f", of {unit} for whole words,"
            raise ValueError(
                f"jgg.{op}: {name}.weight has shape {q.weight.shape}, expected (..., K*bits/32) "
                f"with K a multiple of group_size={q.group_size}{whole} and bits={q.bits}"
            )
        q = self.in_order(op, name, dataclasses.replace(q, positions=self._positions(op, name, q)))
        *lead, k = q.shape
        expected = (*lead, k // q.group_size)
        if q.scales.shape != expected:
            raise ValueError(
                f"jgg.{op}: {name}.scales has shape {q.scales.shape}, expected (..., K/group_size) "
                f"= {expected} because {name}.weight is {q.weight.shape}, bits={q.bits} and "
                f"group_size={q.group_size}"
            )
        biases = q.biases
        if (biases is not None) != kind.has_biases:
            needs = "needs biases" if biases is None else "has no biases"
            raise ValueError(f"jgg.{op}: {name}.biases: mode {q.mode!r} {needs}")
        if biases is not None:
            biases = check.array(op, f"{name}.biases", biases)
            if biases.shape != expected or biases.dtype != q.scales.dtype:
                raise ValueError(
                    f"jgg.{op}: {name}.biases is {describe(biases)}, expected {describe(q.scales)} "
                    f"as {name}.scales"
                )
        global_scale = checked_global_scale(op, q.mode, q.global_scale, q.shape, f"{name}.")
        return dataclasses.replace(q, biases=biases, global_scale=global_scale)

    def in_order(self, op: str, name: str, q) -> Any:
        """``q`` with the scales of layout "linear"."""
        return q

    def takes_positions(self, value) -> bool:
        """Whether ``Quantized.positions`` may be this."""
        return value is None

    def to_linear(self, q) -> Any:
        """``q`` in layout "linear", of checked leaves."""
        return q

    def restored(self, values, q) -> Any:
        """The array that was quantized, of the values that are stored."""
        return values

    def _positions(self, op: str, name: str, q):
        value = q.positions
        if value is not None:
            value = check.array(op, f"{name}.positions", value)
        if not self.takes_positions(value):
            raise ValueError(
                f"jgg.{op}: {name}.positions is {describe(value)}, expected {self.positions} in "
                f"layout {q.layout!r}"
            )
        return value


def register(layout: Layout) -> None:
    LAYOUTS[layout.name] = layout


def register_of_mode(mode: str, layout: Layout) -> None:
    _OF_MODES[mode, layout.name] = layout


def of(q) -> Layout:
    """The layout of a ``Quantized``."""
    return _OF_MODES.get((q.mode, q.layout)) or LAYOUTS[q.layout]


register(Layout())


def checked_global_scale(op: str, mode: str, value, shape: tuple[int, ...], prefix: str = ""):
    if value is None:
        return None
    name = f"{prefix}global_scale"
    if not format.FORMATS[mode].takes_global_scale:
        known = " or ".join(repr(f.name) for f in format.FORMATS.values() if f.takes_global_scale)
        raise ValueError(f"jgg.{op}: {name} is for mode {known}, not {mode!r}")
    if isinstance(value, (int, float)):
        value = np.float32(value)
    value = check.array(op, name, value)
    check.dtype(op, name, value.dtype, ("float32",))
    if value.ndim >= len(shape) or value.shape != shape[: value.ndim]:
        raise ValueError(
            f"jgg.{op}: {name} has shape {value.shape}, expected () or the leading axes of {shape}"
        )
    return value
