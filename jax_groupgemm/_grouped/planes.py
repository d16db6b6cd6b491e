"""float32 operands as bfloat16 planes, for tensor cores that multiply those.

The significand of a float32 has 24 bits, that of a bfloat16 8: so a float32 is the sum of three
bfloat16, exactly, and a product of two float32 the sum of nine products, of which the three
smallest (2^-24 of it) are left out. With two planes, three of four products are left: 2^-16.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def as_planes(a, count: int, multiple: int = 1, axis: int | None = None):
    """``(..., n)`` as bfloat16 ``(..., count, n)`` that sum to it in float32, the largest first.

    ``axis``, from the end, is padded with zeros to a multiple. Of Inf and NaN every plane is that.
    A plane that would be zero is 2^-60 of the first, which no float32 sum holds beside the first:
    so an Inf in the other operand meets no zero but that of a number that is zero (or below 2^-60).
    """
    a = a.astype(jnp.float32)
    if axis is not None:
        padding = [(0, 0)] * a.ndim
        padding[axis] = (0, -a.shape[axis] % multiple)
        a = jnp.pad(a, padding)
    finite = jnp.isfinite(a)
    # Cut off: rounding might overflow, and planes of two signs would meet an Inf.
    cut = lambda a: lax.bitcast_convert_type(
        lax.bitcast_convert_type(a, jnp.uint32) & jnp.uint32(0xFFFF0000), jnp.float32
    )
    first = cut(a)
    least = jnp.where(jnp.abs(first) > 2.0**-60, first * 2.0**-60, 0)
    parts, rest = [first], a - first
    for _ in range(count - 1):
        part = cut(rest)
        parts.append(jnp.where(part == 0, least, part))
        rest = rest - part
    return jnp.stack([jnp.where(finite, p, a).astype(jnp.bfloat16) for p in parts], axis=-2)
