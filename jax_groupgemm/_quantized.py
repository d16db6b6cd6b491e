"""``Quantized``, ``quantize``, ``dequantize``: weights in blocks along their last axis."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _check, _custom_calls, _formats, _quantize_call
from . import _nvfp4_layouts as layouts
from ._check import describe, either
from ._formats import FLOATS, MODES

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
        bits, group_size = _static("Quantized", self.mode, self.bits, self.group_size)
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


def _static(op: str, mode: str, bits: int | None, group_size: int | None) -> tuple[int, int]:
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


def quantize(
    w,
    *,
    mode: str = "affine",
    bits: int | None = None,
    group_size: int | None = None,
    global_scale=None,
) -> Quantized:
    """``w ≈ dequantize(quantize(w))``; **K, the last axis, is cut into groups of ``group_size``**.

    Affine, in float32, every operation rounded to nearest even::

        s = max((wmax - wmin) / (2**bits - 1), 1e-7), negated where |wmax| >= |wmin|
        edge = whichever of wmax and wmin is larger in magnitude (wmax if equal)
        q0 = round(edge / s);  s, bias = (edge / q0, edge) if q0 != 0 else (s, 0)
        q = clip(round((w - bias) / s), 0, 2**bits - 1)

    then s and bias are rounded to w's dtype. Of the others, with ``amax = max |w|``::

        mxfp4, mxfp8:  scale = 2**ceil(log2(amax / 6)), amax / 448 for mxfp8;  q = round(w / scale)
        nvfp4:         scale = e4m3(amax / 6 * S);  q = e2m1(w * S / scale)

    with ``S = 1 / global_scale``, at most the largest float32, or 1 without a global scale;
    products and quotients are rounded to float32, one after another. Roundings saturate. Exponents
    of mx scales are clamped to [-127, 127]; where amax is 0 the scale is 1. Where an nvfp4 scale is
    0, so are codes.

    Args:
      w: float32, bfloat16 or float16 ``(..., K)``.
      mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` or ``"nvfp4"``.
      bits, group_size: by default 4 and 64 in mode ``"affine"``; fixed in the others.
      global_scale: float32, mode ``"nvfp4"`` only: a multiplier, ``amax_of_w / 2688`` to use the
        whole range. A scalar, or one per index of the leading axes, as ``(G,)``.

    Returns:
      A :class:`Quantized`; affine scales and biases have w's dtype.

    Raises:
      ValueError: K is not a multiple of ``group_size``, or a name or number is not known.
      TypeError: w is not floating, or global_scale not float32.

    A non-finite element turns its own group into NaN (affine: into NaN or Inf), and no other. The
    same bits on every backend. Not differentiable: gradients are zero. MLX's ``quantize``.
    """
    op = "quantize"
    bits, group_size = _static(op, mode, bits, group_size)
    w = _check.array(op, "w", w)
    _check.dtype(op, "w", w.dtype, FLOATS)
    if w.ndim == 0 or w.shape[-1] % group_size:
        raise ValueError(
            f"jgg.{op}: w has shape {w.shape}, expected (..., K) with K a multiple of "
            f"group_size={group_size}"
        )
    global_scale = _global_scale(op, mode, global_scale, w.shape)
    weight, scales, biases = _quantize(
        lax.stop_gradient(w), lax.stop_gradient(global_scale), mode, bits, group_size
    )
    return Quantized(
        weight, scales, biases, global_scale, mode=mode, bits=bits, group_size=group_size
    )


def dequantize(q: Quantized, dtype=None) -> jax.Array:
    """``w[..., k] = value(q[..., k])``; **K, the last axis, is grouped**.

    Affine: the float32 product ``q * scale`` plus bias, in float32, rounded once to ``dtype``.
    mxfp4, mxfp8, nvfp4: the exact product, subnormals included, rounded once to ``dtype``; with a
    ``global_scale``, ``(element * scale) * global_scale`` is rounded to float32 first.

    Args:
      q: a :class:`Quantized`.
      dtype: float32, bfloat16 or float16; by default the dtype of affine scales, bfloat16 for the
        other modes (which holds nvfp4 without a global scale exactly), float32 with a global scale.

    Returns:
      ``(..., K)``. Where ``q.axis`` is -2 and where rows were padded, the array that was quantized,
      not what is stored; its rows of no group are zeros.

    Raises:
      ValueError: the shapes in ``q`` do not fit each other.
      TypeError: a dtype does not fit the mode, or ``q`` is not a :class:`Quantized`.

    The same bits on every backend (NaN has one pattern), but that on CPUs an affine scale, bias or
    value that is subnormal in float32 counts as zero. Differentiable in affine scales and biases
    (not of a prepacked weight) and in global_scale. MLX's ``dequantize``.
    """
    op = "dequantize"
    q = check(op, "q", q)
    if q.layout == "sm90":
        from ._prepack import unpacked  # which imports this module

        q = unpacked(q)
    if dtype is None:
        if q.mode == "affine":
            dtype = q.scales.dtype
        else:
            dtype = jnp.bfloat16 if q.global_scale is None else jnp.float32
    dtype = jnp.dtype(dtype)
    if dtype.name not in FLOATS:
        raise TypeError(f"jgg.{op}: dtype={dtype.name} is not {either(FLOATS)}")
    return _dequantize(q, dtype)


def check(op: str, name: str, q) -> Quantized:
    """``q`` with its leaves as arrays; raises where they do not fit each other. Swizzled scales are
    put in order: layout "swizzled" becomes "linear"."""
    if not isinstance(q, Quantized):
        raise TypeError(f"jgg.{op}: {name} must be a jgg.Quantized, got {type(q).__name__}")
    weight = _check.array(op, f"{name}.weight", q.weight)
    scales = _check.array(op, f"{name}.scales", q.scales)
    if q.layout == "sm90":
        return _check_packed(op, name, dataclasses.replace(q, weight=weight, scales=scales))
    _check.dtype(op, f"{name}.weight", weight.dtype, ("uint32",))
    allowed = FLOATS if q.mode == "affine" else ("uint8",)
    _check.dtype(op, f"{name}.scales", scales.dtype, allowed, f" in mode {q.mode!r}")
    if weight.ndim == 0 or weight.shape[-1] * 32 % (q.bits * q.group_size):
        raise ValueError(
            f"jgg.{op}: {name}.weight has shape {weight.shape}, expected (..., K*bits/32) with K a "
            f"multiple of group_size={q.group_size} and bits={q.bits}"
        )
    if q.layout == "grouped":
        _check.shape(op, f"{name}.weight", weight, (None, None), "C, P/8", "layout 'grouped'")
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
        biases = _check.array(op, f"{name}.biases", biases)
        if biases.shape != expected or biases.dtype != scales.dtype:
            raise ValueError(
                f"jgg.{op}: {name}.biases is {describe(biases)}, expected {describe(scales)} as "
                f"{name}.scales"
            )
    global_scale = _global_scale(op, q.mode, q.global_scale, q.shape, f"{name}.")
    return dataclasses.replace(
        q, weight=weight, scales=scales, biases=biases, global_scale=global_scale
    )


def _check_packed(op: str, name: str, q: Quantized) -> Quantized:
    *lead, rows, columns, _ = (1, 1, 1, *q.weight.shape)[-max(q.weight.ndim, 3) :]
    scales = _formats.packed_scales(q.mode, q.group_size, columns)
    expected = (*lead, rows, columns, 128 * q.bits), (*lead, rows, *scales)
    if (q.weight.shape, q.scales.shape) != expected or q.biases is not None:
        raise ValueError(
            f"jgg.{op}: {name} has weight {describe(q.weight)} and scales {describe(q.scales)}, "
            f"which jgg.prepack did not make: layout {q.layout!r} has shapes {expected}"
        )
    for leaf in (q.weight, q.scales):
        if leaf.dtype != jnp.uint32:
            raise TypeError(f"jgg.{op}: {name} in layout {q.layout!r} is uint32, got {leaf.dtype}")
    global_scale = _global_scale(op, q.mode, q.global_scale, q.shape, f"{name}.")
    return dataclasses.replace(q, global_scale=global_scale)


def _check_positions(op: str, name: str, q: Quantized):
    expected = {"grouped": "int32 (T,)", "swizzled": "int32 (T,) or None"}.get(q.layout, "None")
    value = q.positions
    if value is None:
        fits = q.layout != "grouped"
    else:
        value = _check.array(op, f"{name}.positions", value)
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


def _global_scale(op: str, mode: str, value, shape: tuple[int, ...], prefix: str = ""):
    if value is None:
        return None
    name = f"{prefix}global_scale"
    if mode != "nvfp4":
        raise ValueError(f"jgg.{op}: {name} is for mode 'nvfp4', not {mode!r}")
    if isinstance(value, (int, float)):
        value = np.float32(value)
    value = _check.array(op, name, value)
    _check.dtype(op, name, value.dtype, ("float32",))
    if value.ndim >= len(shape) or value.shape != shape[: value.ndim]:
        raise ValueError(
            f"jgg.{op}: {name} has shape {value.shape}, expected () or the leading axes of {shape}"
        )
    return value


@partial(jax.jit, static_argnums=(2, 3, 4))
def _quantize(w, global_scale, mode: str, bits: int, group_size: int):
    """``(weight, scales, biases)``."""
    static = {"mode": mode, "bits": bits, "group_size": group_size}
    weight, scales, *biases = _QUANTIZE(w, global_scale, **static)
    return weight, scales, biases[0] if biases else None


_QUANTIZE = _quantize_call.composed(
    "jgg_quantize", _formats.quantize, _custom_calls.quantize, batch=_quantize_call.in_batch
)


@partial(jax.jit, static_argnums=(1, 2))
def _dequantize(q: Quantized, dtype, implementation: str | None = None):
    values = (_formats.dequantize if implementation == "reference" else _DEQUANTIZE)(
        q.weight, q.scales, q.biases, q.global_scale,
        mode=q.mode, bits=q.bits, group_size=q.group_size, dtype=dtype,
    )  # fmt: skip
    if q.axis == -2:
        values = values.swapaxes(-1, -2)
    return values if q.positions is None else layouts.take_rows(values, q.positions)


_DEQUANTIZE = _quantize_call.composed(
    "jgg_dequantize", _formats.dequantize, _custom_calls.dequantize, batch=_quantize_call.in_batch
)
