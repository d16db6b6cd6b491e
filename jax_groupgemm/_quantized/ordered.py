"""x for the Hopper kernel of weights as they are stored.

Which k a tensor core multiplies does not matter, as long as both operands agree. So a thread of
four takes 32 codes of 128 that are neighbours, in whole words, and x comes with its columns in the
order of the pairs that it makes of them: two that have the same place in the halves of a word, or,
where words have no whole number of codes, in the halves of the 32 (ffi/quantized/gemm_sm90.h).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_BLOCK = 128


def of_lines(x: jax.Array, bits: int, transpose_w: bool, by_threads: bool = False) -> jax.Array:
    """``x``, (T, K), as the kernel takes it: :func:`ordered`, or, where lines lie along N, as many
    columns as make whole 64: more are zeros."""
    if transpose_w:
        return ordered(x, bits, by_threads)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 64)))


def ordered(x: jax.Array, bits: int, by_threads: bool = False) -> jax.Array:
    """``x``, (T, K), with its columns in that order, as many as make whole 128: more are zeros.
    ``by_threads``: the pairs of each thread lie together.

    By XLA, which does it in one kernel with what makes x.
    """
    rows, k = x.shape
    x = jnp.pad(x, ((0, 0), (0, -k % _BLOCK)))
    apart = 16 if 16 % bits else 16 // bits
    x = x.reshape(rows, -(-k // _BLOCK), 4, 16 // apart, 2, apart)
    axes = (0, 1, 2, 3, 5, 4) if by_threads else (0, 1, 3, 5, 2, 4)
    return x.transpose(axes).reshape(rows, -1)
