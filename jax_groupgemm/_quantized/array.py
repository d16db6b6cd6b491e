"""``Quantized``, ``quantize``, ``dequantize``: weights in blocks along their last axis."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import jax
import numpy as np

from .._core import check
from .._core.check import describe
from .._core.types import LayoutName, Mode
from . import format, layouts
from .format import FORMATS
from .layouts import LAYOUTS


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("weight", "scales", "biases", "global_scale", "positions"),
    meta_fields=("mode", "bits", "group_size", "axis", "layout", "block"),
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Quantized:
    """A quantized array ``(..., K)``, in blocks of ``group_size`` along K. A pytree.

    =========  ================  ================  ==========  =========================
    mode       group_size        bits              scales      value of code ``q``
    =========  ================  ================  ==========  =========================
    affine     16, 32, 64, 128   2, 3, 4, 5, 6, 8  floating    ``q * scale + bias``
    mxfp4      32                4                 uint8 E8M0  ``e2m1 * scale``
    mxfp8      32                8                 uint8 E8M0  ``e4m3 * scale``
    nvfp4      16                4                 uint8 E4M3  ``e2m1 * scale * global``
    fp8        ``block``         8                 float32     ``e4m3 * scale``
    =========  ================  ================  ==========  =========================

    The sign bit of an E4M3 scale is ignored. e2m1 codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6;
    8 to 15 are their negatives. Mode ``"fp8"`` has one scale for each block of rows and columns,
    ``block``; the last block of an axis may be cut. ``(1, 128)`` is one for 128 elements of a row,
    ``(128, 128)`` a square tile, ``(1, K)`` a row, None a matrix.

    Args:
      weight: uint32 ``(..., K*bits/32)``: one little-endian bit stream along the last axis, element
        i in bits ``[i*bits, (i+1)*bits)``. Mode ``"fp8"``: float8_e4m3fn ``(..., K)``, or its bits
        as uint8, or float8_e5m2.
      scales: ``(..., K/group_size)``; in mode ``"affine"`` float32, bfloat16 or float16, whatever
        x is. Mode ``"fp8"``: ``(..., ceil(N/block[0]),
        ceil(K/block[1]))``, or those of leading axes alone where ``block`` is None.
      biases: the shape and dtype of scales in mode ``"affine"``, otherwise None.
      global_scale: float32, a multiplier; mode ``"nvfp4"`` only, or None. A scalar, or one per
        index of the leading axes: ``(G,)`` for a weight of shape ``(G, ...)``.
      positions: int32 ``(T,)``, where :func:`nvfp4_quantize` has padded rows per group: the padded
        row of each row, -1 of rows of no group. Otherwise None.
      mode, bits, group_size: static, as in the table; None: the first of the mode.
      axis: static; the axis along which blocks run: -1, or -2 of an array that is stored with its
        last two axes exchanged, as the leaves here describe it.
      layout: static; ``"linear"`` is the layout described here; :func:`prepack` makes ``"sm90"``,
        :func:`nvfp4_quantize` ``"grouped"`` and ``"swizzled"``, :func:`fp8_quantize` ``"grouped"``.
      block: static; mode ``"fp8"`` only: rows and columns of a block, or None. ``group_size`` is
        then its columns, 0 where it is None.

    Raises:
      ValueError: mode, bits, group_size, axis, layout or block is not one of those. Shapes are
        compared where the array is used, so that a tree of anything (shardings, tracers) may be
        built.

    The formats of the same names of MLX, bit for bit; MLX has no fp8 of that kind, and no affine
    groups of 16.

    Examples:
      >>> q = jgg.quantize(jnp.ones((4, 64, 128)), bits=4, group_size=64, contract=-1)
      >>> q.mode, q.bits, q.group_size, q.shape
      ('affine', 4, 64, (4, 64, 128))
    """

    weight: Any
    scales: Any
    biases: Any = None
    global_scale: Any = None
    _: dataclasses.KW_ONLY
    positions: Any = None
    mode: Mode
    bits: int
    group_size: int
    axis: int = -1
    layout: LayoutName = "linear"
    block: tuple[int, int] | None = None

    def __post_init__(self):
        names = ("bits", "group_size", "block")
        for name, value in zip(names, _fields("Quantized", self), strict=True):
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array it stands for, ``(..., K)``, as stored: the last two axes are
        exchanged where ``axis`` is -2, K is padded in layout "grouped"."""
        if self.weight is None:
            raise AttributeError(f"jgg.Quantized: {_without(['weight'])}")
        return layouts.of(self).shape(self)

    @property
    def ndim(self) -> int:
        """The number of axes of the array it stands for."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves together, as they are stored."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def __getitem__(self, index) -> Quantized:
        """Some of the matrices: ``index`` is of the leading axes, all but the last two.

        Raises:
          IndexError: there are fewer leading axes, or a number is out of range.
        """
        lead = self.shape[:-2]
        at = index if isinstance(index, tuple) else (index,)
        if len(at) > len(lead) or any(i is None or i is Ellipsis for i in at):
            raise IndexError(f"jgg.Quantized: {index!r} is no index of the leading axes {lead}")
        for i, size in zip(at, lead, strict=False):
            if isinstance(i, (int, np.integer)) and not -size <= i < size:
                raise IndexError(f"jgg.Quantized: index {i} is out of range for an axis of {size}")
        return jax.tree.map(lambda leaf: leaf[at[: leaf.ndim]], self)

    def __repr__(self) -> str:
        absent = [name for name in _NEEDED if not hasattr(self, name)]
        if absent:
            return f"Quantized(without {', '.join(absent)})"
        static = format.of(self).described(self)
        leaves = (
            f"{name}={describe(value)}"
            for name in ("weight", "scales", "biases", "global_scale", "positions")
            if (value := getattr(self, name)) is not None
        )
        if self.axis != -1:
            static += f", axis={self.axis}"
        if self.layout != "linear":
            static += f", layout={self.layout!r}"
        return f"Quantized({static}, {', '.join(leaves)})"


class _Absent:
    """What stands for a field that an object does not have, and says so."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, q, owner):
        raise AttributeError(f"jgg.Quantized: {_without([self.name])}")


_NEEDED = ("weight", "scales", "mode", "bits", "group_size", "axis", "layout")
for _name in _NEEDED:
    if not hasattr(Quantized, _name):  # a class has the defaults of the others
        setattr(Quantized, _name, _Absent(_name))

# So that exported functions may take one.
jax.export.register_pytree_node_serialization(
    Quantized,
    serialized_name="jax_groupgemm.Quantized",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda data: _static_fields(json.loads(bytes(data))),
)


def _static_fields(written: list) -> tuple:
    """Modules that were exported before mode "fp8" have no block."""
    *others, block = written if len(written) == 6 else (*written, None)
    return (*others, None if block is None else tuple(block))


def static(
    op: str, mode: str, bits: int | None, group_size: int | None, block: Any = None
) -> tuple[int, int, Any]:
    """bits, group_size and block, checked; by default the mode's first."""
    if not isinstance(mode, str) or mode not in FORMATS:
        known = ", ".join(map(repr, FORMATS))
        raise ValueError(f"jgg.{op}: mode={mode!r} is not one of {known}")
    return FORMATS[mode].fields(op, bits, group_size, block)


def _without(missing: list[str]) -> str:
    return (
        f"a Quantized without {', '.join(missing)}: it was unpickled from another version, made "
        "without its constructor, or lost leaves in a tree"
    )


def _fields(op: str, q: Quantized) -> tuple[int, int, Any]:
    """bits, group_size and block; raises where static fields are not those of any format."""
    fields = static(op, q.mode, q.bits, q.group_size, q.block)
    if not isinstance(q.axis, (int, np.integer)) or q.axis not in (-1, -2):
        raise ValueError(f"jgg.{op}: axis={describe(q.axis)} is not -1 or -2")
    if not isinstance(q.layout, str) or q.layout not in LAYOUTS:
        known = ", ".join(map(repr, sorted(LAYOUTS)))
        raise ValueError(f"jgg.{op}: layout={q.layout!r} is not one of {known}")
    layout = layouts.of(q)
    if q.axis not in layout.axes or q.mode not in (layout.modes or FORMATS):
        raise ValueError(
            f"jgg.{op}: layout={q.layout!r} does not exist in mode {q.mode!r} with axis={q.axis}"
        )
    return fields


def along_last(op: str, name: str, q, mode: str, letters: str) -> Quantized:
    """``q``, checked: in this mode, with blocks along its last axis and an axis for each letter."""
    q = of_mode(op, name, q, mode)
    if q.axis != -1:
        remedy = f". dataclasses.replace({name}, axis=-1) is what it stores, {q.shape}"
        raise ValueError(
            f"jgg.{op}: {name} has axis={q.axis}, expected -1: blocks along K, the contracted axis "
            f"of ({letters}){remedy if q.layout == 'linear' else ''}"
        )
    axes = [None] * len(letters.split(", "))
    check.shape(op, name, jax.ShapeDtypeStruct(q.shape, np.float32), axes, letters)
    return q


def of_mode(op: str, name: str, q, mode: str) -> Quantized:
    """``q``, checked: in this mode."""
    q = checked(op, name, q)
    if q.mode != mode:
        raise ValueError(f"jgg.{op}: {name} has mode {q.mode!r}, expected {mode!r}")
    return q


def checked(op: str, name: str, q) -> Quantized:
    """``q`` with its leaves as arrays; raises where it lacks a part, as one may that its
    constructor did not make, or where they do not fit each other. Swizzled scales are put in order:
    layout "swizzled" becomes "linear"."""
    if not isinstance(q, Quantized):
        what = f"array {describe(q)}" if isinstance(q, jax.Array) else type(q).__name__
        raise TypeError(f"jgg.{op}: {name} must be a jgg.Quantized, got {what}")
    missing = [field for field in _NEEDED if getattr(q, field, None) is None]
    if missing:
        raise ValueError(f"jgg.{op}: {name} is {_without(missing)}")
    _fields(op, q)
    weight = check.array(op, f"{name}.weight", q.weight)
    scales = check.array(op, f"{name}.scales", q.scales)
    q = dataclasses.replace(q, weight=weight, scales=scales)
    return layouts.of(q).checked(op, name, q)
