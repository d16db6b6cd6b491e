"""The formats of quantized weights: modes and widths, codes as bits, values as formulas.

``quantize`` and ``dequantize`` here define, bit for bit, what kernels return.
"""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import float_bits as fb
from .._core.float_bits import i32, u32


class _Mode(NamedTuple):
    """The bits and group sizes of a mode, its default first."""

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]


MODES = {
    "affine": _Mode((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": _Mode((4,), (32,)),
    "mxfp8": _Mode((8,), (32,)),
    "nvfp4": _Mode((4,), (16,)),
    "fp8": _Mode((8,), ()),  # what is in its blocks: fp8.py
}
FLOATS = ("float32", "bfloat16", "float16")
# Element formats: mantissa bits, least normal exponent, last finite code.
#: Codes that share a word of scales in layout "sm90", of mode "fp8".
FP8_GROUP = 128
E2M1 = {"mantissa": 1, "emin": 0, "limit": 7}
E4M3 = {"mantissa": 3, "emin": -6, "limit": 0x7E}


def quantize(w, global_scale, *, mode: str, bits: int, group_size: int) -> tuple:
    """The leaves of w ``(..., K)``: weight, scales[, biases]."""
    groups, biases = blocks(w, group_size), ()
    if mode == "affine":
        codes, scales, *biases = _affine_codes(groups.astype(jnp.float32), bits, w.dtype)
    else:
        codes, scales = _fp_codes(fb.bits(groups), mode, global_scale)
    codes = lax.optimization_barrier(codes)  # else XLA computes them once for every bit field
    return pack(flat(codes), bits), scales, *biases


def _affine_codes(w, bits: int, dtype):
    # By bits: backends differ in whether subnormals compare as zeros.
    key = _ordered(lax.bitcast_convert_type(w, jnp.int32))
    low, high = (fb.value(_ordered(end(key, axis=-1))) for end in (jnp.min, jnp.max))
    levels = jnp.float32(2**bits - 1)
    s = jnp.maximum(_divide(high - low, levels), jnp.float32(1e-7))
    top = fb.magnitude(fb.bits(high)) >= fb.magnitude(fb.bits(low))
    s, edge = jnp.where(top, -s, s), jnp.where(top, high, low)
    q0 = jnp.round(_divide(edge, s))
    zero = q0 == 0
    s = jnp.where(zero, s, _divide(edge, jnp.where(zero, jnp.float32(1), q0)))
    bias = jnp.where(zero, jnp.float32(0), edge)
    q = jnp.round(_divide(w - bias[..., None], s[..., None]))
    q = jnp.where(jnp.isnan(q), jnp.float32(0), jnp.clip(q, jnp.float32(0), levels))
    return u32(q), fb.narrow(fb.bits(s), dtype), fb.narrow(fb.bits(bias), dtype)


def _ordered(i):
    """Integers that order as the floats of int32 patterns do; and, again, the patterns of those."""
    return jnp.where(i < 0, i ^ i32(0x7FFFFFFF), i)


def _divide(a, b):
    """Correctly rounded float32 quotient."""
    a, b = jnp.broadcast_arrays(a, b)
    return fb.value(fb.divide(fb.bits(a), fb.bits(b)))


def _fp_codes(b, mode: str, global_scale):
    """Codes and scale bytes of blocks of float32 bits."""
    sign = b >> 31
    amax = jnp.max(fb.magnitude(b), axis=-1)
    element = E4M3 if mode == "mxfp8" else E2M1
    if mode == "nvfp4":
        t, s = b, fb.divide(amax, fb.bits(jnp.float32(6)))
        if global_scale is not None:
            inverse = fb.divide(fb.bits(jnp.ones_like(global_scale)), fb.bits(global_scale))
            overflow = fb.magnitude(inverse) == fb.INF
            inverse = jnp.where(overflow, inverse - u32(1), inverse)  # the largest float32
            inverse = _of_leading_axes(inverse, amax.shape)
            t, s = fb.multiply(b, inverse[..., None]), fb.multiply(s, inverse)
        nan = (amax >= u32(fb.INF)) | (fb.magnitude(s) > u32(fb.INF))
        byte = fb.encode(*fb.split(s), **E4M3)
        byte = jnp.where(nan, u32(0x7F), byte)
        dead = nan | (byte == 0)
        divisor = fb.float32(*e4m3(jnp.where(dead, u32(0x38), byte)))
        t = fb.divide(t, jnp.broadcast_to(divisor[..., None], t.shape))
        sign, (m, e) = t >> 31, fb.split(t)
    else:
        # ceil(log2(amax / largest)): largest is 1.5 * 2**2 or 1.75 * 2**8.
        fraction, top = (0xC00000, 2) if mode == "mxfp4" else (0xE00000, 8)
        m, e = fb.split(amax)
        exponent = jnp.clip(e + 23 - top + i32(m > u32(fraction)), -127, 127)
        exponent = jnp.where(amax == 0, 0, exponent)
        dead = amax >= u32(fb.INF)
        byte = jnp.where(dead, u32(255), u32(exponent + 127))
        m, e = fb.split(b)
        e = e - exponent[..., None]
    code = fb.encode(m, e, **element) | (sign << (7 if mode == "mxfp8" else 3))
    return jnp.where(dead[..., None], u32(0), code), byte.astype(jnp.uint8)


def dequantize(*leaves, **static):
    """w ``(..., K)``; takes what :func:`values_in_groups` takes."""
    return flatten_groups(values_in_groups(*leaves, **static))


def values_in_groups(weight, scales, biases, global_scale, *, mode: str, bits: int, group_size: int,
                     dtype):  # fmt: skip
    """The values of leaves, ``(..., groups, chunks, count)``."""
    codes, scale = codes_in_groups(weight, bits, group_size), scales[..., None, None]
    if mode == "affine":
        return _affine_values(codes, scale, biases[..., None, None], dtype)
    scale = u32(scale)
    wide = mode == "mxfp8"
    m, e = e4m3(codes) if wide else _e2m1(codes)
    nan = (codes & u32(0x7F) == 0x7F) if wide else jnp.zeros((), bool)
    if mode == "nvfp4":
        b = fb.bits(exact(m, e) * exact(*e4m3(scale)))
        nan = scale & u32(0x7F) == 0x7F
    else:
        b = fb.float32(m, e + i32(scale) - 127)
        nan = nan | (scale == 255)
    b = jnp.where(nan, u32(fb.NAN), b | ((codes >> (7 if wide else 3)) << 31))
    if global_scale is None:
        return fb.narrow(b, dtype)
    return times(b, _of_leading_axes(global_scale, b.shape), dtype)


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _affine_values(codes, scales, biases, dtype):
    # Products with either part of s are exact, so that no fused multiply-add changes their sum.
    b = fb.bits(scales)
    finite = fb.magnitude(b) < u32(fb.INF)
    high = fb.value(jnp.where(finite, b & u32(0xFFFFFF00), b))
    low = jnp.where(finite, fb.value(b) - high, jnp.float32(0))
    q = codes.astype(jnp.float32)
    product = q * high + q * low
    return fb.narrow(fb.bits(product + fb.value(fb.bits(biases))), dtype)


@_affine_values.defjvp
def _(dtype, primals, tangents):
    codes, _, _ = primals
    _, ds, db = tangents
    f32 = jnp.float32
    out = codes.astype(f32) * ds.astype(f32) + db.astype(f32)
    return _affine_values(*primals, dtype), out.astype(dtype)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def times(b, factor, dtype):
    """``factor`` times numbers given as float32 bits, rounded to float32 and then to ``dtype``."""
    return fb.narrow(fb.multiply(b, fb.bits(factor)), dtype)


@times.defjvp
def _(dtype, primals, tangents):
    return times(*primals, dtype), (fb.value(primals[0]) * tangents[1]).astype(dtype)


def _of_leading_axes(a, shape):
    """``a``, one number per index of leading axes, for every element of ``shape``."""
    return jnp.broadcast_to(a[(..., *[None] * (len(shape) - a.ndim))], shape)


def flatten_groups(values):
    """``(..., groups, chunks, count)`` as ``(..., K)``; XLA's CPU backend makes vector instructions
    of a loop over the former, not of one over K."""
    return flat(flat(lax.optimization_barrier(values)))


def pack(codes, bits: int):
    """uint32 codes ``(..., K)`` as a bit stream, uint32 ``(..., K*bits/32)``."""
    count, words = 32 // gcd(bits, 32), bits // gcd(bits, 32)
    chunk, out = blocks(codes, count), [u32(0)] * words
    for i in range(count):
        word, offset = divmod(i * bits, 32)
        out[word] = out[word] | (chunk[..., i] << offset)
        if offset + bits > 32:
            out[word + 1] = out[word + 1] | (chunk[..., i] >> (32 - offset))
    return flat(jnp.stack(out, axis=-1))


def codes_in_groups(weight, bits: int, group_size: int):
    """The codes of :func:`pack`, ``(..., groups, chunks, count)``.

    A chunk is as few words as hold whole codes.
    """
    count, words = 32 // gcd(bits, 32), bits // gcd(bits, 32)
    chunk, code = blocks(weight, words), u32(0)
    along_last = (1,) * (chunk.ndim - 1) + (count,)
    for word in range(words):
        # The place of each code's first bit in this word.
        offset = (np.arange(count) * bits - 32 * word).reshape(along_last)
        part = chunk[..., word, None] >> np.clip(offset, 0, 31).astype(np.uint32)
        if word:
            part = part << np.clip(-offset, 0, bits).astype(np.uint32)
        inside = (-bits < offset) & (offset < 32)
        code = code | (part & np.where(inside, 2**bits - 1, 0).astype(np.uint32))
    *lead, chunks, _ = code.shape
    return code.reshape(*lead, chunks * count // group_size, group_size // count, count)


def blocks(x, size: int):
    """``(..., K)`` as ``(..., K/size, size)``."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def flat(x):
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _e2m1(code):
    """``(m, e)`` of the magnitude."""
    exponent, mantissa = (code >> 1) & u32(3), code & u32(1)
    normal = (mantissa | u32(2)) << (jnp.maximum(exponent, u32(1)) - u32(1))
    m = jnp.where(exponent == 0, mantissa, normal)
    return m, jnp.full_like(m, -1, jnp.int32)


def e4m3(code):
    """``(m, e)`` of the magnitude of a code that is not NaN."""
    exponent, mantissa = (code >> 3) & u32(15), code & u32(7)
    m = jnp.where(exponent == 0, mantissa, mantissa | u32(8))
    return m, i32(jnp.maximum(exponent, u32(1))) - 10


def exact(m, e):
    """float32 of ``m * 2**e``, m below 2**24, where nothing is subnormal."""
    return i32(m).astype(jnp.float32) * fb.value(u32(e + 127) << 23)


def packed_scales(mode: str, group_size: int, k_tiles: int) -> tuple[int, int]:
    """The last two axes of the scales of layout "sm90": K / 64 (K / 128 with affine groups of 128,
    and in mode "fp8"), and words."""
    if mode == "fp8":
        return k_tiles // 2, 64
    if mode == "affine":
        return (k_tiles // 2, 64) if group_size == 128 else (k_tiles, 4096 // group_size)
    return k_tiles, 32 if mode == "mxfp4" else 64
