"""``quantize`` and ``dequantize``."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from .._core import check, conversion, partition
from .._core.check import either
from .._core.operations import operation
from .._core.types import Mode
from . import call, formats, fp8, fp8_convert, layouts
from .array import Quantized, checked, static
from .formats import FLOATS
from .layouts import checked_global_scale

#: Folders whose lines a warning is not about: this package, and JAX, which traces it.
_NOT_THE_CALLERS = tuple(
    os.path.join(os.path.dirname(path), "") for path in (os.path.dirname(__file__), jax.__file__)
)


@operation
def quantize(
    w: ArrayLike,
    *,
    mode: Mode = "affine",
    bits: int | None = None,
    group_size: int | None = None,
    global_scale: ArrayLike | None = None,
    contract: int | None = None,
    block: tuple[int, int] | None = fp8.TILE,
) -> Quantized:
    """``w ≈ dequantize(quantize(w))``; **K, the last axis, is cut into groups of ``group_size``**.

    K is the axis that products sum over, and ``contract`` says where it is: a square weight fits
    either way, and is another one. ``contract=-2`` takes ``(G, K, N)``, the weight of
    ``grouped_mm``, for :func:`grouped_qmm`.

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
    0, so are codes. Mode ``"fp8"`` is :func:`fp8_quantize` with ``block``.

    Args:
      w: float32, bfloat16 or float16 ``(..., K)``, or ``(..., K, N)`` with ``contract=-2``.
      mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"``, ``"nvfp4"`` or ``"fp8"``.
      bits, group_size: by default 4 and 64 in mode ``"affine"``; fixed in the others.
      global_scale: float32, mode ``"nvfp4"`` only: a multiplier, ``amax_of_w / 2688`` to use the
        whole range. A scalar, or one per index of the leading axes, as ``(G,)``.
      contract: -1, or -2: w is stored with its last two axes exchanged. None stands for -1, with a
        warning where the last two axes are equal.
      block: mode ``"fp8"`` only: rows (N) and columns (K) of the blocks that have a scale each, or
        None, for one scale of each matrix. K and N need not be multiples of them.

    Returns:
      A :class:`Quantized`, of ``w.swapaxes(-1, -2)`` with ``contract=-2``; affine scales and biases
      have w's dtype.

    Raises:
      ValueError: K is not a multiple of ``group_size``, or a name or number is not known.
      TypeError: w is not floating, or global_scale not float32.

    A non-finite element turns its own group into NaN (affine: into NaN or Inf), and no other. The
    same bits on every backend. Not differentiable: gradients are zero. MLX's ``quantize``.
    """
    op = "quantize"
    if not (isinstance(mode, str) and mode == "fp8") and block is fp8.TILE:
        block = None
    bits, group_size, block = static(op, mode, bits, group_size, block)
    w = check.array(op, "w", w)
    check.dtype(op, "w", w.dtype, FLOATS)
    said, contract = contract, -1 if contract is None else contract
    if not isinstance(contract, (int, np.integer)) or contract not in (-1, -2):
        raise ValueError(f"jgg.{op}: contract={check.describe(contract)} is not -1 or -2")
    if mode == "fp8":
        _check_rank(op, w, block, contract)
    elif w.ndim < -contract or w.shape[contract] % group_size:
        letters = "(..., K)" if contract == -1 else "(..., K, N)"
        other = 2 if contract == -1 else 1
        hint = ""
        if w.ndim >= 2 and w.shape[-other] % group_size == 0:
            hint = f". Pass contract={-other} if K is axis {-other}"
        raise ValueError(
            f"jgg.{op}: w has shape {w.shape}, expected {letters} with K a multiple of "
            f"group_size={group_size}{hint}"
        )
    if said is None:
        _warn_if_square(op, w)
    if contract == -2:
        w = w.swapaxes(-1, -2)
    global_scale = checked_global_scale(op, mode, global_scale, w.shape)
    if mode == "fp8":
        return fp8_convert.quantized(op, w, block=block)
    run: Callable = lambda w, scale: _quantize(w, scale, mode, bits, group_size)
    mesh = partition.explicit_mesh([w] if global_scale is None else [w, global_scale])
    if mesh is not None:  # leaves are sharded as w is, where groups are not cut
        *lead, last = partition.entries_of(w)
        parts = math.prod(mesh.shape[name] for name in last)
        last = () if w.shape[-1] // group_size % parts else last
        spec = NamedSharding(mesh, P(*(entry or None for entry in (*lead, last))))
        run = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=spec)
    weight, scales, biases = run(lax.stop_gradient(w), lax.stop_gradient(global_scale))
    return Quantized(
        weight, scales, biases, global_scale, mode=mode, bits=bits, group_size=group_size
    )


def _check_rank(op: str, w, block, contract: int) -> None:
    least = 2 if contract == -2 or block is None or block[0] > 1 else 1
    if w.ndim < least:
        letters = {1: "(..., K)", 2: "(..., N, K)" if contract == -1 else "(..., K, N)"}[least]
        raise ValueError(
            f"jgg.{op}: w has shape {w.shape}, expected {letters} in mode 'fp8' with block={block}"
        )


def _warn_if_square(op: str, w) -> None:
    """Where both sizes are equal, no product can tell that the wrong axis was quantized."""
    if w.ndim < 2 or w.shape[-1] != w.shape[-2] or not w.size:
        return
    warnings.warn(
        f"jgg.{op}: w has shape {w.shape}, whose last two axes are equal, so nothing tells which "
        "of them products sum over. It is taken for the last one. Pass contract=-1 if that is "
        "right, w being (..., N, K), or contract=-2 if w is (..., K, N), as grouped_mm takes it",
        skip_file_prefixes=_NOT_THE_CALLERS,
    )


@operation
def dequantize(q: Quantized, dtype: DTypeLike | None = None) -> jax.Array:
    """``w[..., k] = value(q[..., k])``; **K, the last axis, is grouped**.

    Affine: the float32 product ``q * scale`` plus bias, in float32, rounded once to ``dtype``.
    mxfp4, mxfp8, nvfp4: the exact product, subnormals included, rounded once to ``dtype``; with a
    ``global_scale``, ``(element * scale) * global_scale`` is rounded to float32 first, and so is
    ``element * scale`` of fp8.

    Args:
      q: a :class:`Quantized`.
      dtype: float32, bfloat16 or float16; by default the dtype of affine scales, bfloat16 for the
        other modes (which holds nvfp4 without a global scale exactly), float32 with a global scale
        and for fp8.

    Returns:
      ``(..., K)``. Where ``q.axis`` is -2 and where rows were padded, the array that was quantized,
      not what is stored; its rows of no group are zeros.

    Raises:
      ValueError: the shapes in ``q`` do not fit each other.
      TypeError: a dtype does not fit the mode, or ``q`` is not a :class:`Quantized`.

    The same bits on every backend (NaN has one pattern), but that on CPUs an affine scale, bias or
    value that is subnormal in float32 counts as zero. Differentiable in affine scales and biases
    (not of a prepacked weight), in fp8 scales and in global_scale. MLX's ``dequantize``.
    """
    op = "dequantize"
    q = checked(op, "q", q)
    q = layouts.of(q).to_linear(q)
    if dtype is None:
        if q.mode == "affine":
            dtype = q.scales.dtype
        else:
            exact = q.global_scale is None and q.mode != "fp8"
            dtype = jnp.bfloat16 if exact else jnp.float32
    dtype = check.of_dtype(op, "dtype", dtype)
    if dtype.name not in FLOATS:
        raise TypeError(f"jgg.{op}: dtype={dtype.name} is not {either(FLOATS)}")
    return _dequantize(q, dtype)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _quantize(w, global_scale, mode: str, bits: int, group_size: int):
    """``(weight, scales, biases)``."""
    static = {"mode": mode, "bits": bits, "group_size": group_size}
    weight, scales, *biases = _QUANTIZE(w, global_scale, **static)
    return weight, scales, biases[0] if biases else None


_QUANTIZE = conversion.composed(
    "jgg_quantize", formats.quantize, call.quantize, batch=conversion.in_batch
)


@partial(jax.jit, static_argnums=(1, 2))
def _dequantize(q: Quantized, dtype, implementation: str | None = None):
    if q.mode == "fp8":
        values = fp8_convert.dequantized(q, dtype, implementation)
    else:
        values = (formats.dequantize if implementation == "reference" else _DEQUANTIZE)(
            q.weight, q.scales, q.biases, q.global_scale,
            mode=q.mode, bits=q.bits, group_size=q.group_size, dtype=dtype,
        )  # fmt: skip
    if q.axis == -2:
        values = values.swapaxes(-1, -2)
    return layouts.of(q).restored(values, q)


_DEQUANTIZE = conversion.composed(
    "jgg_dequantize", formats.dequantize, call.dequantize, batch=conversion.in_batch
)
