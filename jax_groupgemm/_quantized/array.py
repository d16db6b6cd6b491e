"""``Quantized``, ``quantize``, ``dequantize``: weights in blocks along their last axis."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import check
from .._core.check import describe
from .._nvfp4 import layouts
from . import formats
from .formats import FLOATS, MODES

# Of the leaves of a Quantized: as its docstring says, or as _prepack.py or _nvfp4_layouts.py does.
LAYOUTS = ("linear", "sm90", "grouped", "swizzled")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("weight", "scales", "biases", "global_scale", "positions"),
    meta_fields=("mode", "bits", "group_size", "axis", "layout"),
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Quantized:
    """A quantized array ``(..., K)``, in blocks of ``group_size`` along K. A pytree.

    =========  ============  ==================  ===================  =========================
    mode       group_size    bits                scales               value of code ``q``
    =========  ============  ==================  ===================  =========================
    affine     32, 64, 128   2, 3, 4, 5, 6, 8    floating             ``q * scale + bias``
    mxfp4      32            4                   uint8, E8M0          ``e2m1 * scale``
    mxfp8      32            8                   uint8, E8M0          ``e4m3 * scale``
    nvfp4      16            4                   uint8, E4M3          ``e2m1 * scale * global``
    =========  ============  ==================  ===================  =========================

    The sign bit of an E4M3 scale is ignored. e2m1 codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6;
    8 to 15 are their negatives.

    Args:
      weight: uint32 ``(..., K*bits/32)``: one little-endian bit stream along the last axis, element
        i in bits ``[i*bits, (i+1)*bits)``.
      scales: ``(..., K/group_size)``.
      biases: the shape and dtype of scales in mode ``"affine"``, otherwise None.
      global_scale: float32, a multiplier; mode ``"nvfp4"`` only, or None. A scalar, or one per
        index of the leading axes: ``(G,)`` for a weight of shape ``(G, ...)``.
      positions: int32 ``(T,)``, where :func:`nvfp4_quantize` has padded rows per group: the padded
        row of each row, -1 of rows of no group. Otherwise None.
      mode, bits, group_size: static, as in the table; None: the first of the mode.
      axis: static; the axis along which blocks run: -1, or -2 of an array that is stored with its
        last two axes exchanged, as the leaves here describe it.
      layout: static; ``"linear"`` is the layout described here; :func:`prepack` makes ``"sm90"``,
        :func:`nvfp4_quantize` ``"grouped"`` and ``"swizzled"``.

    Raises:
      ValueError: mode, bits, group_size, axis or layout is not one of those. Shapes are compared
        where the array is used, so that a tree of anything (shardings, tracers) may be built.

    The formats of the same names of MLX, bit for bit.
    """

    weight: Any
    scales: Any
    biases: Any = None
    global_scale: Any = None
    _: dataclasses.KW_ONLY
    positions: Any = None
    mode: str
    bits: int
    group_size: int
    axis: int = -1
    layout: str = "linear"

    def __post_init__(self):
        bits, group_size = static("Quantized", self.mode, self.bits, self.group_size)
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "group_size", group_size)
        if self.axis not in (-1, -2):
            raise ValueError(f"jgg.Quantized: axis={self.axis} is not -1 or -2")
        if self.layout not in LAYOUTS:
            known = ", ".join(map(repr, LAYOUTS))
            raise ValueError(f"jgg.Quantized: layout={self.layout!r} is not one of {known}")
        axes = {"sm90": (-1,), "grouped": (-2,)}.get(self.layout, (-1, -2))
        padded = self.layout in ("grouped", "swizzled")
        if self.axis not in axes or (padded and self.mode != "nvfp4"):
            raise ValueError(
                f"jgg.Quantized: layout={self.layout!r} does not exist in mode {self.mode!r} with "
                f"axis={self.axis}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array it stands for, ``(..., K)``, as stored: the last two axes are
        exchanged where ``axis`` is -2, K is padded in layout "grouped"."""
        if self.layout == "sm90":  # tiles of 64 x 64
            *lead, rows, columns, _ = self.weight.shape
            return (*lead, 64 * rows, 64 * columns)
        *lead, words = self.weight.shape
        return (*lead, words * 32 // self.bits)

    def __repr__(self) -> str:
        static = f"mode={self.mode!r}, bits={self.bits}, group_size={self.group_size}"
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


# So that exported functions may take one.
jax.export.register_pytree_node_serialization(
    Quantized,
    serialized_name="jax_groupgemm.Quantized",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(bytes(data))),
)


def static(op: str, mode: str, bits: int | None, group_size: int | None) -> tuple[int, int]:
    """bits and group_size, checked; by default the mode's first."""
    if not isinstance(mode, str) or mode not in MODES:
        known = ", ".join(map(repr, MODES))
        raise ValueError(f"jgg.{op}: mode={mode!r} is not one of {known}")
    out = []
    given = (("bits", bits), ("group_size", group_size))
    for (name, value), known in zip(given, MODES[mode], strict=True):
        if value is not None and value not in known:
            values = " or ".join(map(str, sorted(known)))
            raise ValueError(f"jgg.{op}: {name}={value!r}, expected {values} in mode {mode!r}")
        out.append(known[0] if value is None else int(value))
    return out[0], out[1]


def checked(op: str, name: str, q) -> Quantized:
    """``q`` with its leaves as arrays; raises where they do not fit each other. Swizzled scales are
    put in order: layout "swizzled" becomes "linear"."""
    if not isinstance(q, Quantized):
        raise TypeError(f"jgg.{op}: {name} must be a jgg.Quantized, got {type(q).__name__}")
    weight = check.array(op, f"{name}.weight", q.weight)
    scales = check.array(op, f"{name}.scales", q.scales)
    if q.layout == "sm90":
        return _check_packed(op, name, dataclasses.replace(q, weight=weight, scales=scales))
    check.dtype(op, f"{name}.weight", weight.dtype, ("uint32",))
    allowed = FLOATS if q.mode == "affine" else ("uint8",)
    check.dtype(op, f"{name}.scales", scales.dtype, allowed, f" in mode {q.mode!r}")
    if weight.ndim == 0 or weight.shape[-1] * 32 % (q.bits * q.group_size):
        raise ValueError(
            f"jgg.{op}: {name}.weight has shape {weight.shape}, expected (..., K*bits/32) with K a "
            f"multiple of group_size={q.group_size} and bits={q.bits}"
        )
    if q.layout == "grouped":
        check.shape(op, f"{name}.weight", weight, (None, None), "C, P/8", "layout 'grouped'")
    q = dataclasses.replace(q, weight=weight, positions=_check_positions(op, name, q))
    if q.layout == "swizzled":
        q = _unswizzled(op, name, q, scales)
        scales = q.scales
    *lead, k = q.shape
    expected = (*lead, k // q.group_size)
    why = f"because {name}.weight is {weight.shape}, bits={q.bits} and group_size={q.group_size}"
    if scales.shape != expected:
        raise ValueError(
            f"jgg.{op}: {name}.scales has shape {scales.shape}, expected (..., K/group_size) = "
            f"{expected} {why}"
        )
    biases = q.biases
    if (biases is not None) != (q.mode == "affine"):
        needs = "needs biases" if biases is None else "has no biases"
        raise ValueError(f"jgg.{op}: {name}.biases: mode {q.mode!r} {needs}")
    if biases is not None:
        biases = check.array(op, f"{name}.biases", biases)
        if biases.shape != expected or biases.dtype != scales.dtype:
            raise ValueError(
                f"jgg.{op}: {name}.biases is {describe(biases)}, expected {describe(scales)} as "
                f"{name}.scales"
            )
    global_scale = checked_global_scale(op, q.mode, q.global_scale, q.shape, f"{name}.")
    return dataclasses.replace(
        q, weight=weight, scales=scales, biases=biases, global_scale=global_scale
    )


def _check_packed(op: str, name: str, q: Quantized) -> Quantized:
    *lead, rows, columns, _ = (1, 1, 1, *q.weight.shape)[-max(q.weight.ndim, 3) :]
    scales = formats.packed_scales(q.mode, q.group_size, columns)
    expected = (*lead, rows, columns, 128 * q.bits), (*lead, rows, *scales)
    if (q.weight.shape, q.scales.shape) != expected or q.biases is not None:
        raise ValueError(
            f"jgg.{op}: {name} has weight {describe(q.weight)} and scales {describe(q.scales)}, "
            f"which jgg.prepack did not make: layout {q.layout!r} has shapes {expected}"
        )
    for leaf in (q.weight, q.scales):
        if leaf.dtype != jnp.uint32:
            raise TypeError(f"jgg.{op}: {name} in layout {q.layout!r} is uint32, got {leaf.dtype}")
    global_scale = checked_global_scale(op, q.mode, q.global_scale, q.shape, f"{name}.")
    return dataclasses.replace(q, global_scale=global_scale)


def _check_positions(op: str, name: str, q: Quantized):
    expected = {"grouped": "int32 (T,)", "swizzled": "int32 (T,) or None"}.get(q.layout, "None")
    value = q.positions
    if value is None:
        fits = q.layout != "grouped"
    else:
        value = check.array(op, f"{name}.positions", value)
        fits = q.layout in ("grouped", "swizzled") and value.ndim == 1 and value.dtype == jnp.int32
    if not fits:
        raise ValueError(
            f"jgg.{op}: {name}.positions is {describe(value)}, expected {expected} in layout "
            f"{q.layout!r}"
        )
    return value


def _unswizzled(op: str, name: str, q: Quantized, scales) -> Quantized:
    *lead, rows, columns = (1, *q.shape[:-1], q.shape[-1] // q.group_size)[-max(q.weight.ndim, 2) :]
    tiles = (*lead, *layouts.tiles(rows, columns))
    if q.positions is not None:
        tiles = (scales.shape[0] if scales.ndim else 0, *tiles[-2:])
    if scales.shape != tiles:
        raise ValueError(
            f"jgg.{op}: {name}.scales has shape {scales.shape}, expected {tiles} in layout "
            f"'swizzled' because {name}.weight is {q.weight.shape}"
        )
    if q.positions is None:
        scales = layouts.unswizzle(scales, rows, columns)
    else:
        scales = layouts.unswizzle(scales, 128 * scales.shape[0], columns)
        scales = layouts.take_rows(scales, q.positions)
    return dataclasses.replace(q, scales=scales, positions=None, layout="linear")


def checked_global_scale(op: str, mode: str, value, shape: tuple[int, ...], prefix: str = ""):
    if value is None:
        return None
    name = f"{prefix}global_scale"
    if mode != "nvfp4":
        raise ValueError(f"jgg.{op}: {name} is for mode 'nvfp4', not {mode!r}")
    if isinstance(value, (int, float)):
        value = np.float32(value)
    value = check.array(op, name, value)
    check.dtype(op, name, value.dtype, ("float32",))
    if value.ndim >= len(shape) or value.shape != shape[: value.ndim]:
        raise ValueError(
            f"jgg.{op}: {name} has shape {value.shape}, expected () or the leading axes of {shape}"
        )
    return value
