"""Mode "fp8": codes of 8 bits, and one float32 scale that multiplies a block of them.

    x[..., r, c] ≈ code[..., r, c] * scale[..., r // rows, c // columns]

for a block of ``(rows, columns)``; the last block of either axis may be cut. A block of None is a
whole matrix, whose scales have the leading axes alone. ``quantize`` and ``dequantize`` here define,
bit for bit, what kernels return.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import float_bits as fb
from .._core import partition
from .._core.float_bits import i32, u32
from .._quantized import codes, format
from .._quantized.philox import sixteen_bits

#: The blocks of weights, and of rows that are multiplied with them.
TILE, LINE = format.TILE, (1, 128)
#: Rows to which each group is padded where blocks run along grouped rows.
GROUPED = 128
_LEAST_SCALE = 0x00800000  # 2**-126
_ONE = 0x3F800000


class Element(NamedTuple):
    """A format of codes: mantissa bits, least normal exponent, last finite code and its value."""

    mantissa: int
    emin: int
    limit: int
    largest: float
    dtype: Any


ELEMENTS = {
    "e4m3": Element(3, -6, 0x7E, 448.0, jnp.float8_e4m3fn),
    "e5m2": Element(2, -14, 0x7B, 57344.0, jnp.float8_e5m2),
}
DTYPES = {jnp.dtype(element.dtype).name: name for name, element in ELEMENTS.items()}
#: What ``Quantized.weight`` may be; bytes are e4m3.
CODES = (*DTYPES, "uint8")


# ---- blocks ----------------------------------------------------------------------------------


def scales_shape(shape, block) -> tuple[int, ...]:
    """The scales of an array of that shape."""
    if block is None:
        return tuple(shape[:-2])
    sizes = block[-min(len(shape), 2) :]
    lead = tuple(shape[: len(shape) - len(sizes)])
    return (*lead, *(-(-n // size) for n, size in zip(shape[-len(sizes) :], sizes, strict=True)))


def largest_of_blocks(a, block):
    """The largest number of each block of uint32 ``(..., R, C)``."""
    if block is None:
        return jnp.max(a, axis=(-2, -1), initial=np.uint32(0))
    for axis, size in _axes(a.shape, block):
        largest = jnp.max(_in_blocks(a, axis, size), axis=-1, initial=np.uint32(0))
        a = jnp.moveaxis(largest, -1, axis)
    return a


def spread(scales, shape, block):
    """The scale of each element."""
    if block is None:
        return jnp.broadcast_to(scales[..., None, None], shape)
    for axis, size in _axes(shape, block):
        n = shape[axis]
        if scales.shape[axis] != 1:
            scales = _repeated(scales, size, axis)
            if scales.shape[axis] != n:
                scales = lax.slice_in_dim(scales, 0, n, axis=axis)
    return jnp.broadcast_to(scales, shape)


def sums_of_blocks(a, block):
    """The sum over each block of float32 ``(..., R, C)``."""
    for axis, size in _axes(a.shape, block):
        a = jnp.moveaxis(_in_blocks(a, axis, size).sum(-1), -1, axis)
    return a


def _repeated(a, size: int, axis: int):
    """``jnp.repeat``, also along an axis that is explicitly sharded."""
    at = a.ndim + axis
    a = jnp.broadcast_to(jnp.expand_dims(a, at + 1), (*a.shape[: at + 1], size, *a.shape[at + 1 :]))
    return partition.merge(a, [2 if i == at else 1 for i in range(a.ndim - 1)])


def _axes(shape, block):
    """The axes that are cut into blocks, and the sizes of those."""
    sizes = [(axis, min(block[axis], max(shape[axis], 1))) for axis in (-1, -2)[: len(shape)]]
    return [(axis, size) for axis, size in sizes if size > 1]


def _in_blocks(a, axis: int, size: int):
    """``a`` with an axis at its end, in blocks; what is missing of the last one is zeros."""
    a = jnp.moveaxis(a, axis, -1)
    cut = -a.shape[-1] % size
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, cut)]) if cut else a
    return codes.blocks(a, size)


def taken(scales, index, axis: int):
    """Some of an axis, which may be explicitly sharded: still, where its parts divide."""
    given = partition.entries_of(scales)
    whole = [() if i == scales.ndim + axis else entry for i, entry in enumerate(given)]
    scales = jnp.take(partition.resharded(scales, whole), index, axis=axis)
    if not given[axis]:
        return scales
    mesh = jax.typeof(scales).sharding.mesh
    parts = math.prod(mesh.shape[name] for name in given[axis])
    return scales if len(index) % parts else partition.resharded(scales, given)


def covers(block, shape) -> bool:
    """Whether a matrix is one block."""
    return block is None or (block[0] >= shape[-2] and block[1] >= shape[-1])


def cut(q, block):
    """A ``Quantized`` in smaller blocks of the same scale, where each of its matrices is one."""
    if q.block == block or not covers(q.block, q.shape):
        return q
    lead = q.shape[:-2]
    scales = q.scales.reshape(*lead, 1, 1)
    scales = jnp.broadcast_to(scales, scales_shape(q.shape, block))
    return dataclasses.replace(q, scales=scales, block=block, group_size=None)


# ---- codes -----------------------------------------------------------------------------------


def quantize(x, seed, *, block, scale_format: str, element: str):
    """``(codes, scales)`` of x ``(..., R, C)``; without a ``seed`` of two words to nearest."""
    kind = ELEMENTS[element]
    b = fb.bits(x)
    scale = scale_of(largest_of_blocks(fb.magnitude(b), block), scale_format, element)
    scale = lax.optimization_barrier(scale)  # once per block
    q = fb.divide(b, spread(scale, x.shape, block))
    if seed is None:
        code = fb.encode(*fb.split(q), mantissa=kind.mantissa, emin=kind.emin, limit=kind.limit)
    else:
        code = stochastic(*fb.split(q), random(x.shape, seed), kind)
    nan = fb.magnitude(q) > u32(fb.INF)
    code = jnp.where(nan, u32(0), code | ((b >> 31) << 7))
    return lax.bitcast_convert_type(code.astype(jnp.uint8), kind.dtype), fb.value(scale)


def scale_of(amax, scale_format: str, element: str):
    """Bits of scales, of those of largest magnitudes."""
    largest = fb.bits(jnp.full(amax.shape, ELEMENTS[element].largest, jnp.float32))
    scale = fb.divide(amax, largest)
    if scale_format == "e8m0":
        scale = (scale + u32(0x007FFFFF)) & u32(0x7F800000)
    scale = jnp.maximum(scale, u32(_LEAST_SCALE))
    return jnp.where(amax == 0, u32(_ONE), jnp.where(amax < u32(fb.INF), scale, u32(fb.NAN)))


def random(shape, seed):
    """16 random bits for each element: of elements 16i to 16i + 15 of a line, those of its i-th
    block of 16 as :mod:`philox` counts them."""
    *lead, n = shape
    bits = sixteen_bits((*lead, -(-n // 16)) if lead else (1, -(-n // 16)), (seed[0], seed[1]))
    bits = codes.flat(bits)
    return (bits if lead else bits[0])[..., :n]


def stochastic(m, e, r, kind: Element):
    """Codes of ``q = m * 2**e``, where m has bit 23 set or is 0: ``floor`` on the grid of ``q + u``
    steps, with ``u = (r + 0.5) / 2**16``, in integers."""
    top = jnp.where(m == 0, kind.emin, e + 23)
    base = jnp.maximum(top, kind.emin)
    drop = 23 - kind.mantissa + (base - top)  # bits of m below the grid
    short = u32(jnp.minimum(drop, 31))
    m = m >> u32(jnp.clip(drop - 31, 0, 31))
    u = (r << (short - u32(16))) + (u32(1) << (short - u32(17)))
    up = (m + u) >> short
    code = (u32(jnp.clip(base - kind.emin, 0, 31)) << kind.mantissa) + up
    return jnp.minimum(jnp.where(m == 0, u32(0), code), u32(kind.limit))


def decoded(stored):
    """float32 of codes, exactly."""
    code = u32(lax.bitcast_convert_type(stored, jnp.uint8))
    if DTYPES[stored.dtype.name] == "e4m3":
        b = fb.bits(codes.exact(*codes.e4m3(code)))
        b = jnp.where(code & u32(0x7F) == 0x7F, u32(fb.NAN), b)
    else:
        exponent, mantissa = (code >> 2) & u32(31), code & u32(3)
        m = jnp.where(exponent == 0, mantissa, mantissa | u32(4))
        b = fb.bits(codes.exact(m, i32(jnp.maximum(exponent, u32(1))) - 17))
        endless = jnp.where(mantissa == 0, u32(fb.INF), u32(fb.NAN))
        b = jnp.where(exponent == 31, endless, b)
    return fb.value(b | ((code >> 7) << 31))


def dequantize(stored, scales, *, block, dtype):
    """``code * scale``, rounded to float32 and then to ``dtype``."""
    return codes.times(fb.bits(decoded(stored)), spread(scales, stored.shape, block), dtype)
