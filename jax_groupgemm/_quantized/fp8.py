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

from .._core import check, partition
from .._core import float_bits as fb
from .._core.float_bits import i32, u32
from . import formats
from .layouts import Layout, register_of_mode
from .padding import take_rows
from .philox import sixteen_bits

#: The blocks of weights, and of rows that are multiplied with them.
TILE, LINE = (128, 128), (1, 128)
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
    return formats.blocks(a, size)


# ---- codes -----------------------------------------------------------------------------------


def quantize(x, seed, *, block, scale_format: str, element: str):
    """``(codes, scales)`` of x ``(..., R, C)``; without a ``seed`` of two words to nearest."""
    kind = ELEMENTS[element]
    b = fb.bits(x)
    amax = largest_of_blocks(fb.magnitude(b), block)
    scale = fb.divide(amax, fb.bits(jnp.full(amax.shape, kind.largest, jnp.float32)))
    if scale_format == "e8m0":
        scale = (scale + u32(0x007FFFFF)) & u32(0x7F800000)
    scale = jnp.maximum(scale, u32(_LEAST_SCALE))
    scale = jnp.where(amax == 0, u32(_ONE), jnp.where(amax < u32(fb.INF), scale, u32(fb.NAN)))
    scale = lax.optimization_barrier(scale)  # once per block
    q = fb.divide(b, spread(scale, x.shape, block))
    if seed is None:
        code = fb.encode(*fb.split(q), mantissa=kind.mantissa, emin=kind.emin, limit=kind.limit)
    else:
        code = _stochastic(q, _random(x.shape, seed), kind)
    nan = fb.magnitude(q) > u32(fb.INF)
    code = jnp.where(nan, u32(0), code | ((b >> 31) << 7))
    return lax.bitcast_convert_type(code.astype(jnp.uint8), kind.dtype), fb.value(scale)


def _random(shape, seed):
    """16 random bits for each element: of elements 16i to 16i + 15 of a line, those of its i-th
    block of 16 as :mod:`philox` counts them."""
    *lead, n = shape
    bits = sixteen_bits((*lead, -(-n // 16)) if lead else (1, -(-n // 16)), (seed[0], seed[1]))
    bits = formats.flat(bits)
    return (bits if lead else bits[0])[..., :n]


def _stochastic(q, r, kind: Element):
    """Codes of magnitudes of float32 bits: ``floor`` on the grid of ``|q| + u`` steps, with
    ``u = (r + 0.5) / 2**16``, in integers."""
    m, e = fb.split(q)  # m has bit 23 set, or is 0
    top = jnp.where(m == 0, kind.emin, e + 23)
    base = jnp.maximum(top, kind.emin)
    drop = 23 - kind.mantissa + (base - top)  # bits of m below the grid
    short = u32(jnp.minimum(drop, 31))
    m = m >> u32(jnp.clip(drop - 31, 0, 31))
    u = (r << (short - u32(16))) + (u32(1) << (short - u32(17)))
    up = (m + u) >> short
    code = (u32(jnp.clip(base - kind.emin, 0, 31)) << kind.mantissa) + up
    return jnp.minimum(jnp.where(m == 0, u32(0), code), u32(kind.limit))


def decoded(codes):
    """float32 of codes, exactly."""
    code = u32(lax.bitcast_convert_type(codes, jnp.uint8))
    if DTYPES[codes.dtype.name] == "e4m3":
        b = fb.bits(formats.exact(*formats.e4m3(code)))
        b = jnp.where(code & u32(0x7F) == 0x7F, u32(fb.NAN), b)
    else:
        exponent, mantissa = (code >> 2) & u32(31), code & u32(3)
        m = jnp.where(exponent == 0, mantissa, mantissa | u32(4))
        b = fb.bits(formats.exact(m, i32(jnp.maximum(exponent, u32(1))) - 17))
        endless = jnp.where(mantissa == 0, u32(fb.INF), u32(fb.NAN))
        b = jnp.where(exponent == 31, endless, b)
    return fb.value(b | ((code >> 7) << 31))


def dequantize(codes, scales, *, block, dtype):
    """``code * scale``, rounded to float32 and then to ``dtype``."""
    return formats.times(fb.bits(decoded(codes)), spread(scales, codes.shape, block), dtype)


# ---- a weight of a product ---------------------------------------------------------------------


def of_product(q):
    """``q``, checked, with scales of three axes, and codes that have no derivative; a prepacked one
    as it is."""
    if q.layout == "sm90":
        return q
    scales, block = q.scales, q.block
    if block is None:
        scales, block = scales[..., None, None], tuple(max(n, 1) for n in q.shape[-2:])
    return dataclasses.replace(
        q, weight=lax.stop_gradient(q.weight), scales=scales, block=block, group_size=None
    )


def in_whole_blocks(q, halves: int | None = None, parts: tuple[int, int] = (1, 1)):
    """``q``, of a product, in blocks that divide both axes, so that parts of either have whole
    blocks; of the axis ``halves``, -1 or -2, each half. ``parts`` are known ones, of rows and of
    columns. A scale of a block that is cut is repeated for smaller ones."""
    scales, block = q.scales, [*q.block]
    for axis in (-1, -2):
        n, size = q.shape[axis], q.block[axis]
        count = 2 if axis == halves else parts[axis]
        part = n if n % count else n // count
        if part % size == 0 and n > size:
            continue
        block[axis] = unit = math.gcd(part, min(size, 128)) or 1
        index = np.arange(n // unit) * unit // size
        if len(index) != scales.shape[axis]:
            scales = _taken(scales, index, axis)
    return dataclasses.replace(q, scales=scales, block=tuple(block), group_size=None)


def _taken(scales, index, axis: int):
    """Some of an axis, which may be explicitly sharded: still, where its parts divide."""
    given = partition.entries_of(scales)
    whole = [() if i == scales.ndim + axis else entry for i, entry in enumerate(given)]
    scales = jnp.take(partition.resharded(scales, whole), index, axis=axis)
    if not given[axis]:
        return scales
    mesh = jax.typeof(scales).sharding.mesh
    parts = math.prod(mesh.shape[name] for name in given[axis])
    return scales if len(index) % parts else partition.resharded(scales, given)


# ---- layouts ---------------------------------------------------------------------------------


class _Blocks(Layout):
    """Layout "linear": what the docstring of ``Quantized`` says of mode "fp8"."""

    modes = ("fp8",)

    def shape(self, q) -> tuple[int, ...]:
        return tuple(q.weight.shape)

    def checked(self, op: str, name: str, q) -> Any:
        check.dtype(op, f"{name}.weight", q.weight.dtype, CODES, " in mode 'fp8'")
        check.dtype(op, f"{name}.scales", q.scales.dtype, ("float32",), " in mode 'fp8'")
        rank = 1 if q.block is not None and q.block[0] == 1 else 2
        if q.weight.ndim < rank:
            letters = "(..., K)" if rank == 1 else f"(..., N, K) in mode 'fp8' with block={q.block}"
            raise ValueError(
                f"jgg.{op}: {name}.weight has shape {q.weight.shape}, expected {letters}"
            )
        expected = scales_shape(q.weight.shape, q.block)
        if q.scales.shape != expected:
            raise ValueError(
                f"jgg.{op}: {name}.scales has shape {q.scales.shape}, expected {expected} because "
                f"{name}.weight is {q.weight.shape} and block={q.block}"
            )
        for leaf in ("biases", "global_scale"):
            if getattr(q, leaf) is not None:
                raise ValueError(f"jgg.{op}: {name}.{leaf}: mode 'fp8' has none")
        weight = q.weight
        if weight.dtype == jnp.uint8:
            weight = lax.bitcast_convert_type(weight, jnp.float8_e4m3fn)
        return dataclasses.replace(q, weight=weight, positions=self._positions(op, name, q))


class _Grouped(_Blocks):
    """Blocks run along grouped rows, which are padded group by group."""

    name, axes, positions = "grouped", (-2,), "int32 (T,)"

    def takes_positions(self, value) -> bool:
        return value is not None and value.ndim == 1 and value.dtype == jnp.int32

    def checked(self, op: str, name: str, q) -> Any:
        check.shape(op, f"{name}.weight", q.weight, (None, None), "C, P", "layout 'grouped'")
        return super().checked(op, name, q)

    def restored(self, values, q) -> Any:
        return take_rows(values, q.positions)


register_of_mode("fp8", _Blocks())
register_of_mode("fp8", _Grouped())
