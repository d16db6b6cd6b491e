"""Codes as bits: streams of them, and the values of small floats as integers."""

from __future__ import annotations

from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import float_bits as fb
from .._core.float_bits import i32, u32

# Element formats: mantissa bits, least normal exponent, last finite code.
E2M1 = {"mantissa": 1, "emin": 0, "limit": 7}
E4M3 = {"mantissa": 3, "emin": -6, "limit": 0x7E}


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
    together = min(count, group_size)
    return code.reshape(*lead, chunks * count // group_size, group_size // together, together)


def blocks(x, size: int):
    """``(..., K)`` as ``(..., K/size, size)``."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def flat(x):
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def e2m1(code):
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


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def times(b, factor, dtype):
    """``factor`` times numbers given as float32 bits, rounded to float32 and then to ``dtype``."""
    return fb.narrow(fb.multiply(b, fb.bits(factor)), dtype)


@times.defjvp
def _(dtype, primals, tangents):
    return times(*primals, dtype), (fb.value(primals[0]) * tangents[1]).astype(dtype)


def of_leading_axes(a, shape):
    """``a``, one number per index of leading axes, for every element of ``shape``."""
    return jnp.broadcast_to(a[(..., *[None] * (len(shape) - a.ndim))], shape)
