"""float32 operands as bfloat16 planes, for tensor cores that multiply those.

The significand of a float32 has 24 bits, that of a bfloat16 8: so a float32 is the sum of three
bfloat16, exactly, and a product of two float32 the sum of nine products, of which the three
smallest (2^-24 of it) are left out. With two planes, three of four products are left: 2^-16.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def planes(a, count: int, multiple: int = 1, axis: int | None = None):
    """``(..., n)`` as bfloat16 ``(..., count, n)`` that sum to it in float32, the largest first.

    ``axis``, from the end, is padded with zeros to a multiple. Of Inf and NaN there is one plane.
    """
    a = a.astype(jnp.float32)
    if axis is not None:
        padding = [(0, 0)] * a.ndim
        padding[axis] = (0, -a.shape[axis] % multiple)
        a = jnp.pad(a, padding)
    finite = jnp.isfinite(a)
    parts, rest = [], a
    for _ in range(count - 1):
        bits = lax.bitcast_convert_type(rest, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = lax.bitcast_convert_type(bits, jnp.float32)  # cut off: rounding might overflow
        parts.append(jnp.where(finite, part, 0 if parts else a).astype(jnp.bfloat16))
        rest = rest - part
    parts.append(jnp.where(finite, rest, 0).astype(jnp.bfloat16))
    return jnp.stack(parts, axis=-2)
