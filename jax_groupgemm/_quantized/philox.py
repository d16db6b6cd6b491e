"""Philox4x32-7, a counter-based generator (Salmon et al., SC11), in uint32 arithmetic. Seven rounds
are the fewest that pass BigCrush.

Random bits are a function of a key and a counter alone, so that any program, in any order and on
any backend, draws the same ones for the same block of an array.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from .._core.float_bits import u32

_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter, key):
    """Four uint32 words of a counter of four words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(_ROUNDS):
        if i:
            k0, k1 = k0 + u32(_WEYL[0]), k1 + u32(_WEYL[1])
        (high0, low0), (high1, low1) = wide(c0, _MULTIPLIERS[0]), wide(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def wide(a, b: int):
    """The high and the low word of a product with a constant below 2**32."""
    low, high = u32(b & 0xFFFF), u32(b >> 16)
    a0, a1 = a & u32(0xFFFF), a >> 16
    middle = a0 * high + ((a0 * low) >> 16)
    carry = a1 * low + (middle & u32(0xFFFF))
    return a1 * high + (middle >> 16) + (carry >> 16), a * u32(b)


def sixteen_bits(shape, key):
    """16 numbers of 16 bits for each of ``shape`` blocks, uint32 ``(*shape, 16)``.

    Block b, in row-major order, has those of counters (b, 0) and (b, 1), b in two words: its
    number i is in bits ``[16 * (i % 2), 16 * (i % 2) + 16)`` of word i // 2 of these eight.
    """
    *lead, columns = shape
    rows = math.prod(lead)
    row = lax.broadcasted_iota(jnp.uint32, (rows, columns, 2), 0)
    column, half = (lax.broadcasted_iota(jnp.uint32, (rows, columns, 2), i) for i in (1, 2))
    low, high = number(row, columns, column)
    words = lax.optimization_barrier(philox((low, high, half, jnp.zeros_like(half)), key))
    words = jnp.stack(words, axis=-1)
    return jnp.stack([words & u32(0xFFFF), words >> 16], axis=-1).reshape(*shape, 16)


def number(row, columns: int, column):
    """``row * columns + column`` as a low and a high word."""
    high, low = wide(row, columns)
    total = low + column
    return total, high + u32(total < low)
