"""Float arithmetic on bit patterns, so that every backend gives the same bits.

XLA divides approximately on some backends, turns division by a constant into multiplication,
contracts ``a*b + c`` and flushes subnormals. Here only integers decide. A magnitude is held as
``m * 2**e`` with uint32 ``m`` and int32 ``e``; all rounding is to nearest, ties to even.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

INF, NAN, SIGN = 0x7F800000, 0x7FC00000, 0x80000000


def u32(x):
    return jnp.asarray(x, jnp.uint32)


def i32(x):
    return jnp.asarray(x, jnp.int32)


def bits(x):
    """uint32 pattern of a float32, of bfloat16 and float16 after the exact widening."""
    if x.dtype == jnp.bfloat16:
        return u32(lax.bitcast_convert_type(x, jnp.uint16)) << 16
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def value(b):
    """The float32 of a uint32 pattern."""
    return lax.bitcast_convert_type(b, jnp.float32)


def magnitude(b):
    """Bits without the sign; they order as the magnitudes do, NaN last."""
    return b & u32(0x7FFFFFFF)


def split(b):
    """``(m, e)`` of the magnitude of finite float32 bits; m is 0 or has bit 23 set."""
    b = magnitude(b)
    exponent, m = i32(b >> 23), b & u32(0x7FFFFF)
    up = jnp.maximum(i32(lax.clz(m)) - 8, 0)  # of a subnormal
    m = jnp.where(exponent == 0, m << u32(up), m | u32(1 << 23))
    return m, jnp.where(exponent == 0, -149 - up, exponent - 150)


def encode(m, e, *, mantissa: int, emin: int, limit: int):
    """Code, without sign, of ``m * 2**e`` (m < 2**31) in the format with that many mantissa bits
    and least normal exponent ``emin``. Codes past ``limit`` become ``limit``."""
    up = lax.clz(m) - u32(1)
    m, top = m << up, e + 30 - i32(up)  # m has bit 30 set, or is 0
    base = jnp.maximum(top, emin)
    shift = base - mantissa - top + 30  # at least 30 - mantissa
    s = u32(jnp.minimum(shift, 31))
    r = m >> s
    half, rest = u32(1) << (s - u32(1)), m & ((u32(1) << s) - u32(1))
    r = r + u32((rest > half) | ((rest == half) & (r & u32(1) == 1)))
    small = (shift > 31) | (m == 0)
    span = jnp.minimum(base - emin, limit >> mantissa)  # keeps the shift below in range
    code = (u32(span) << mantissa) + r
    return jnp.where(small, u32(0), jnp.minimum(code, u32(limit)))


def float32(m, e):
    """float32 bits of ``m * 2**e``, m < 2**31."""
    return encode(m, e, mantissa=23, emin=-126, limit=INF)


def narrow(b, dtype):
    """float32 bits rounded once to a float32, bfloat16 or float16 array; NaN is canonical."""
    nan = magnitude(b) > u32(INF)
    if dtype == jnp.float32:
        return lax.bitcast_convert_type(jnp.where(nan, u32(NAN), b), jnp.float32)
    if dtype == jnp.bfloat16:
        out, quiet = (b + u32(0x7FFF) + ((b >> 16) & u32(1))) >> 16, 0x7FC0
    else:
        out = encode(*split(b), mantissa=10, emin=-14, limit=0x7C00) | ((b & u32(SIGN)) >> 16)
        quiet = 0x7E00
    out = jnp.where(nan, u32(quiet), out).astype(jnp.uint16)
    return lax.bitcast_convert_type(out, dtype)


def multiply(a, b):
    """float32 bits of the product of two float32 bit patterns."""
    (m, e), (n, f) = split(a), split(b)
    mh, ml, nh, nl = m >> 12, m & u32(0xFFF), n >> 12, n & u32(0xFFF)
    cross = mh * nl + ml * nh
    low = ml * nl + ((cross & u32(0xFFF)) << 12)
    high = mh * nh + (cross >> 12) + (low >> 24)
    low = low & u32(0xFFFFFF)
    p = (high << 6) | (low >> 18) | u32(low & u32(0x3FFFF) != 0)
    a0, b0 = magnitude(a), magnitude(b)
    out = jnp.where((a0 == INF) | (b0 == INF), u32(INF), float32(p, e + f + 18))
    nan = (a0 > INF) | (b0 > INF) | ((a0 == INF) & (b0 == 0)) | ((a0 == 0) & (b0 == INF))
    return jnp.where(nan, u32(NAN), out | ((a ^ b) & u32(SIGN)))


def divide(a, b):
    """float32 bits of the quotient of two float32 bit patterns."""
    (m, e), (n, f) = split(a), split(b)
    n = jnp.maximum(n, u32(1))
    less = u32(m < n)
    m, e = m << less, e - i32(less)  # now 1 <= m/n < 2
    # An estimate within 8 units; its remainder, small, is exact modulo 2**32.
    q = u32(m.astype(jnp.float32) / n.astype(jnp.float32) * jnp.float32(1 << 24)) - u32(8)
    q = jnp.where(m == 0, u32(0), q)
    rest = (m << 24) - q * n
    q, rest = q + lax.div(rest, n), lax.rem(rest, n)
    out = float32((q << 1) | u32(rest != 0), e - f - 25)
    a0, b0 = magnitude(a), magnitude(b)
    out = jnp.where((a0 == INF) | (b0 == 0), u32(INF), jnp.where(b0 == INF, u32(0), out))
    nan = (a0 > INF) | (b0 > INF) | ((a0 == INF) & (b0 == INF)) | ((a0 == 0) & (b0 == 0))
    return jnp.where(nan, u32(NAN), out | ((a ^ b) & u32(SIGN)))
