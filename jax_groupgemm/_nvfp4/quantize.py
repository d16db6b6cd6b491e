"""``nvfp4_quantize``: arrays in NVFP4 with a scale per tensor and one per 16 elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from .._core import check, conversion, dtypes, partition
from .._core import float_bits as fb
from .._core.float_bits import i32, u32
from .._core.operations import operation
from .._core.types import Integers
from .._quantized import codes
from .._quantized.array import Quantized
from .._quantized.format import FLOATS
from .._quantized.operands import blocked_axis, seed_of
from .._quantized.philox import sixteen_bits
from . import call, layouts
from .layouts import padded_sizes as padded_sizes

_BLOCK = 16
_ONE, _SIX = np.float32(1), np.float32(6)
_RANGE = np.float32(6 * 448)  # the largest element times the largest scale
_LARGEST = np.uint32(0x7F7FFFFF)
# Signs of the Hadamard transform: Transformer Engine's.
_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


@operation
def nvfp4_quantize(
    x: ArrayLike,
    *,
    axis: int = -1,
    group_sizes: Integers | None = None,
    scale_2d: bool = False,
    stochastic_rounding_key: jax.Array | None = None,
    hadamard: bool = False,
    layout: Literal["linear", "swizzled"] = "linear",
) -> Quantized:
    """``x ≈ e2m1 * e4m3 * global_scale``; **blocks of 16 run along ``axis``; T may be grouped**.

    In float32, every operation rounded to nearest even, ``amax`` over the finite values of x, and
    of each matrix if x has more than two axes::

        global_scale = amax / 2688
        S     = min(2688 / amax, largest), or 1 where amax is 0
        scale = e4m3(amax_of_block * (S * (1 / 6)))
        q     = e2m1(x * min(1 / (scale * (1 / S)), largest))

    Roundings saturate; ``largest`` is the largest float32. What Transformer Engine computes.

    Args:
      x: float32, bfloat16 or float16, ``(T, K)``, ``(G, N, K)`` or any ``(..., R, C)``.
      axis: the last one, or the one before it. Then the result is stored transposed, as it is
        multiplied: its leaves are those of ``(..., C, R)``, and its ``axis`` is -2.
      group_sizes: integers ``(G,)``, of x ``(T, K)``: the rows of each group. Rows past their sum
        take no part in amax and become zeros. With ``axis=0`` no block spans two groups: each is
        padded with zeros to a multiple of 64 rows, and the result has layout ``"grouped"``.
      scale_2d: one scale for 16 x 16 elements, repeated for each of the 16 rows, so that either
        axis gives the same values. The axis that is not ``axis`` may end in a part of a block.
      stochastic_rounding_key: a key of ``jax.random``. Then q is one of the two neighbours of
        ``x * ...`` with probabilities that make it right in expectation, up to saturation at 6.
      hadamard: multiply each block by ``diag(signs) @ H / 4`` first, orthogonal, H being the
        Walsh-Hadamard matrix in Sylvester's order. It cancels in the product of two operands
        contracted along ``axis``.
      layout: ``"linear"``, or ``"swizzled"``: scales in the order of Blackwell's instructions.

    Returns:
      A :class:`Quantized` in mode ``"nvfp4"`` with a ``global_scale`` of shape ``x.shape[:-2]``.
      With ``hadamard`` it stands for the transformed array.

    Raises:
      ValueError: the length of ``axis`` is not a multiple of 16 and there are no ``group_sizes``,
        or options do not go together.
      TypeError: x is not floating, group_sizes are not integers, or the key is none.

    A non-finite element turns its own block into NaN, and no other. The same bits on every backend.
    Not differentiable: gradients are zero.

    Examples:
      >>> q = jgg.nvfp4_quantize(jnp.linspace(0, 1, 128).reshape(2, 64))
      >>> q.scales.shape, q.global_scale.shape  # a scale for 16 elements
      ((2, 4), ())
    """
    op = "nvfp4_quantize"
    x = check.array(op, "x", x)
    check.dtype(op, "x", x.dtype, FLOATS)
    axis = blocked_axis(op, x, axis)
    _options(op, x, axis, group_sizes, scale_2d, hadamard, layout)
    if group_sizes is not None:
        group_sizes = check.group_sizes(op, group_sizes)
        check.rows(op, "x", x.shape[0])
        check.rows(op, "x, padded,", _padded_rows(x, axis, group_sizes, layout))
    if (group_sizes is None or axis == -1) and x.shape[axis] % _BLOCK:
        remedy = ". Pass group_sizes to pad rows" if axis == -2 and x.ndim == 2 else ""
        raise ValueError(
            f"jgg.{op}: x has shape {x.shape}, expected a multiple of {_BLOCK} along axis {axis}, "
            f"got {x.shape[axis]}{remedy}"
        )
    seed = None if stochastic_rounding_key is None else seed_of(op, stochastic_rounding_key)
    run: Callable = partial(
        _quantize, axis=axis, scale_2d=bool(scale_2d), hadamard=bool(hadamard), layout=layout
    )
    x = lax.stop_gradient(x)
    mesh = partition.explicit_mesh([x] if group_sizes is None else [x, group_sizes])
    if mesh is not None:
        specs = _specs(x, mesh, axis, group_sizes is not None, layout)
        run = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=specs)
    weight, scales, global_scale, positions = run(x, group_sizes, seed)
    return Quantized(
        weight, scales, None, global_scale, positions=positions, mode="nvfp4", bits=4,
        group_size=_BLOCK, axis=axis,
        layout="grouped" if group_sizes is not None and axis == -2 else layout,
    )  # fmt: skip


def _options(op: str, x, axis, group_sizes, scale_2d, hadamard, layout) -> None:
    """Those that do not go together."""
    check.flag(op, "scale_2d", scale_2d)
    check.flag(op, "hadamard", hadamard)
    if not isinstance(layout, str) or layout not in ("linear", "swizzled"):
        layout = check.describe(layout)
        raise ValueError(f"jgg.{op}: layout={layout} is not one of 'linear', 'swizzled'")
    if x.ndim < 2 and (scale_2d or layout == "swizzled"):
        what = "scale_2d" if scale_2d else "layout='swizzled'"
        raise ValueError(f"jgg.{op}: {what} needs two axes, and x has shape {x.shape}")
    if scale_2d and hadamard:
        raise ValueError(
            f"jgg.{op}: scale_2d with hadamard: the transform along one axis would make the values "
            "of either axis different. Choose one"
        )
    if group_sizes is None:
        return
    check.shape(op, "x", x, (None, None), "T, K", "group_sizes are of its rows")
    if scale_2d:
        raise ValueError(
            f"jgg.{op}: scale_2d with group_sizes: blocks of 16 x 16 would span groups. It is for "
            "weights"
        )
    if axis == -2 and layout == "swizzled":
        raise ValueError(
            f"jgg.{op}: layout='swizzled' with group_sizes needs axis=-1: along T, blocks of "
            "grouped rows have layout 'grouped' only"
        )


def _padded_rows(x, axis: int, group_sizes, layout: str) -> int:
    unit = layouts.GROUPED if axis == -2 else layouts.SWIZZLED if layout == "swizzled" else 1
    return layouts.padded_rows(x.shape[0], group_sizes.shape[0], unit)


def _specs(x, mesh, axis: int, grouped: bool, layout: str):
    """How results are sharded on a mesh with Explicit axes: as x is. Blocks are not cut, and padded
    axes and swizzled scales are replicated."""
    entries = [entry or None for entry in partition._entries(jax.typeof(x).sharding.spec, x.ndim)]
    lead, blocked = entries[:-2], entries[axis]
    parts = math.prod(mesh.shape[name] for name in blocked or ())
    if x.shape[axis] // _BLOCK % parts or (grouped and axis == -2):
        blocked = None
    stored = [*lead, *([entries[-3 - axis]] if x.ndim > 1 else []), blocked]
    scales = [*lead, None, None, None] if layout == "swizzled" else stored
    positions = [None] if grouped and (axis == -2 or layout == "swizzled") else None
    return tuple(
        None if spec is None else NamedSharding(mesh, P(*spec))
        for spec in (stored, scales, lead, positions)
    )


@partial(jax.jit, static_argnames=("axis", "scale_2d", "hadamard", "layout"))
def _quantize(x, group_sizes, seed, *, axis: int, scale_2d: bool, hadamard: bool, layout: str):
    """``(weight, scales, global_scale, positions)``."""
    weight, scales, global_scale = _QUANTIZE(
        x, group_sizes, seed, axis=axis, scale_2d=scale_2d, hadamard=hadamard
    )
    padding = None
    if group_sizes is not None and (axis == -2 or layout == "swizzled"):
        unit = layouts.GROUPED if axis == -2 else layouts.SWIZZLED
        padding = layouts.padding(group_sizes, x.shape[0], unit)
    if layout == "swizzled":
        if padding is not None:
            scales = layouts.take_rows(scales, padding.source)
        scales = layouts.swizzle(scales)
    return weight, scales, global_scale, None if padding is None else padding.positions


def _definition(x, group_sizes, seed, *, axis: int, scale_2d: bool, hadamard: bool):
    """``(weight, scales, global_scale)``, scales line by line."""
    if group_sizes is not None and axis == -2:
        padding = layouts.padding(group_sizes, x.shape[0], layouts.GROUPED)
        x = dtypes.load(layouts.take_rows(dtypes.storage(x), padding.source), x.dtype)
    elif group_sizes is not None:
        inside = layouts.covered(group_sizes, x.shape[0])
        x = jnp.where(inside[:, None], x, jnp.zeros((), x.dtype))
    if axis == -2:
        x = x.swapaxes(-1, -2)
    b = fb.bits(codes.blocks(x, _BLOCK))
    if hadamard:
        b = _rotated(b)
    magnitude = fb.magnitude(b)
    matrix = tuple(range(max(x.ndim - 2, 0), b.ndim))
    finite = jnp.where(magnitude < u32(fb.INF), magnitude, u32(0))
    amax = jnp.max(finite, axis=matrix, initial=np.uint32(0))
    scales, inverse = _scales(jnp.max(magnitude, axis=-1), amax, scale_2d)
    scales, inverse = lax.optimization_barrier((scales, inverse))  # once per block
    q = fb.multiply(b, inverse[..., None])
    if seed is None:
        code = fb.encode(*fb.split(q), **codes.E2M1)
    else:
        code = _stochastic(q, sixteen_bits(b.shape[:-1], (seed[0], seed[1])))
    code = jnp.where((scales == 0x7F)[..., None], u32(0), code | b >> 31 << 3)
    code = lax.optimization_barrier(code)  # else XLA computes them once for every bit field
    weight = codes.pack(codes.flat(code), 4)
    global_scale = fb.value(fb.divide(amax, fb.bits(jnp.full_like(amax, _RANGE, jnp.float32))))
    return weight, scales.astype(jnp.uint8), global_scale


_QUANTIZE = conversion.composed("nvfp4_quantize", _definition, call.nvfp4_quantize)


def _scales(block, amax, scale_2d: bool):
    """Scale bytes, and the bits by which elements are multiplied, of the largest magnitudes of
    blocks ``(..., R, S)`` and matrices ``(...)``, all codes."""
    constant = lambda value, like: fb.bits(jnp.full(like.shape, value, jnp.float32))
    rows = block.shape[-2:-1]
    if scale_2d:
        pad = [(0, 0)] * (block.ndim - 2) + [(0, -rows[0] % _BLOCK), (0, 0)]
        block = jnp.pad(block, pad)
        tiles = block.shape[-2] // _BLOCK
        block = block.reshape(*block.shape[:-2], tiles, _BLOCK, block.shape[-1]).max(axis=-2)
    encode = jnp.minimum(fb.divide(constant(_RANGE, amax), amax), u32(_LARGEST))
    encode = jnp.where(amax == 0, fb.bits(_ONE), encode)
    sixth = fb.multiply(encode, constant(_ONE / _SIX, amax))
    decode = fb.divide(constant(_ONE, amax), encode)
    sixth, decode = lax.optimization_barrier((sixth, decode))  # once per matrix
    matrix = (..., *[None] * (block.ndim - amax.ndim))
    byte = fb.encode(*fb.split(fb.multiply(block, sixth[matrix])), **codes.E4M3)
    byte = jnp.where(block < u32(fb.INF), byte, u32(0x7F))
    scale = fb.multiply(fb.bits(codes.exact(*codes.e4m3(byte))), decode[matrix])
    inverse = jnp.minimum(fb.divide(constant(_ONE, scale), scale), u32(_LARGEST))
    if scale_2d:
        byte, inverse = (jnp.repeat(a, _BLOCK, axis=-2)[..., : rows[0], :] for a in (byte, inverse))
    return byte, inverse


def _stochastic(q, r):
    """Codes of magnitudes of float32 bits: floor to the grid of ``|q| + u * step``, which is not
    rounded: ``v - u * step`` is exact for every v of the grid."""
    t = jnp.minimum(fb.value(fb.magnitude(q)), _SIX)
    step = jnp.where(t < 2, np.float32(0.5), jnp.where(t < 4, np.float32(1), np.float32(2)))
    u = (i32(r).astype(jnp.float32) + np.float32(0.5)) * np.float32(2**-16)
    values = (0.5, 1, 1.5, 2, 3, 4, 6)
    return sum(u32(t >= np.float32(value) - u * step) for value in values)


def _rotated(b):
    """Bits of ``x @ diag(signs) @ H / 4`` of blocks of float32 bits: butterflies of strides 1, 2,
    4 and 8, then the quarter. Everything below the least normal number, here and between, is +0,
    and at the end a zero of its sign: backends differ in whether they flush it."""
    y = _flushed(fb.value(b)) * _SIGNS.reshape((1,) * (b.ndim - 1) + (-1,))
    for stride in (1, 2, 4, 8):
        pairs = y.reshape(*y.shape[:-1], _BLOCK // (2 * stride), 2, stride)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = _flushed(jnp.stack([low + high, low - high], axis=-2)).reshape(y.shape)
    small = fb.magnitude(fb.bits(y)) < u32(0x01800000)  # 4 * 2**-126
    zero = jnp.where(y < 0, u32(0x80000000), u32(0))
    return jnp.where(small, zero, fb.bits(y * np.float32(0.25)))


def hadamard() -> np.ndarray:
    """``diag(signs) @ H / 4``, ``(16, 16)``: orthogonal."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < _BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return _SIGNS[:, None] * matrix / np.float32(4)


def _flushed(y):
    return jnp.where(fb.magnitude(fb.bits(y)) < u32(0x00800000), np.float32(0), y)
