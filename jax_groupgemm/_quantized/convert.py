"""``quantize`` and ``dequantize``."""

from __future__ import annotations

import os
import warnings
from functools import partial

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._core import check
from .._core.check import either
from .._core.operations import operation
from .._core.types import Mode
from . import format, layouts
from .array import Quantized, checked, static
from .format import FLOATS, FORMATS, TILE
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
    block: tuple[int, int] | None = TILE,
) -> Quantized:
    """``w ≈ dequantize(quantize(w))``; **K, the last axis, is cut into groups of ``group_size``**.

    K is the axis that products sum over, and ``contract`` says where it is. A square weight fits
    either way, so pass ``contract``. ``contract=-2`` takes ``(G, K, N)``, the weight of
    ``grouped_mm``, for :func:`grouped_qmm`.

    Affine, in float32, every operation rounded to nearest even::

        s = max((wmax - wmin) / (2**bits - 1), 1e-7), negated where |wmax| >= |wmin|
        edge = whichever of wmax and wmin is larger in magnitude (wmax if equal)
        q0 = round(edge / s);  s, bias = (edge / q0, edge) if q0 != 0 else (s, 0)
        q = clip(round((w - bias) / s), 0, 2**bits - 1)

    then s and bias are rounded to w's dtype: for float32 scales pass w as float32, which changes no
    code. The other modes, with ``amax = max |w|``::

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
      ValueError: K is not a multiple of ``group_size`` (of 32 codes of 3 and 5 bits, for whole
        words), or a name or number is not known.
      TypeError: w is not floating, or global_scale not float32.

    A non-finite element turns its own group into NaN (affine: into NaN or Inf), and no other. The
    same bits on every backend. Not differentiable: gradients are zero. MLX's ``quantize``.

    Examples:
      >>> w = jax.random.normal(jax.random.key(0), (2, 32, 128))  # K last
      >>> q = jgg.quantize(w, mode="nvfp4", contract=-1)
      >>> q.weight.shape, q.weight.dtype, q.scales.shape  # eight codes in a word
      ((2, 32, 16), dtype('uint32'), (2, 32, 8))
    """
    op = "quantize"
    kind = FORMATS.get(mode) if isinstance(mode, str) else None
    if block is TILE and not (kind and kind.takes_block):
        block = None
    bits, group_size, block = static(op, mode, bits, group_size, block)
    kind = FORMATS[mode]
    w = check.array(op, "w", w)
    check.dtype(op, "w", w.dtype, FLOATS)
    said, contract = contract, -1 if contract is None else contract
    if not isinstance(contract, (int, np.integer)) or contract not in (-1, -2):
        raise ValueError(f"jgg.{op}: contract={check.describe(contract)} is not -1 or -2")
    kind.check_operand(op, w, contract, bits, group_size, block)
    if said is None:
        _warn_if_square(op, w)
    shape = w.shape if contract == -1 else (*w.shape[:-2], w.shape[-1], w.shape[-2])
    global_scale = checked_global_scale(op, mode, global_scale, shape)
    return kind.quantized(op, w, contract, global_scale, bits, group_size, block)


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

    Examples:
      >>> w = jnp.linspace(-1, 1, 256).reshape(2, 128)
      >>> q = jgg.quantize(w, bits=8, group_size=32, contract=-1)
      >>> bool(jnp.max(jnp.abs(jgg.dequantize(q) - w)) < 1e-3)
      True
    """
    op = "dequantize"
    q = checked(op, "q", q)
    q = layouts.of(q).to_linear(q)
    if dtype is None:
        dtype = format.of(q).dequantized_dtype(q)
    dtype = check.of_dtype(op, "dtype", dtype)
    if dtype.name not in FLOATS:
        raise TypeError(f"jgg.{op}: dtype={dtype.name} is not {either(FLOATS)}")
    return _dequantize(q, dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _dequantize(q: Quantized, dtype, implementation: str | None = None):
    values = format.of(q).values(q, dtype, implementation)
    if q.axis == -2:
        values = values.swapaxes(-1, -2)
    return layouts.of(q).restored(values, q)
