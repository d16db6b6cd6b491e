"""Scales of mode "fp8" in layout "sm90": a word for each row and 128 k, whatever their blocks were.

A word is two bfloat16 numbers. The lower half is 2^88 times the scale, rounded; the upper half is
what that lacks, rounded: together 16 bits or more. Kernels take code 127, which is NaN, for 480. So
where 128 codes of a row have one, the lower half is NaN, and the word holds the first 15 bits of
2^88 times the scale: 16 of its bits in the upper half, the next 7 in the lower one's last 6 and
sign.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import float_bits as fb
from .._core.float_bits import u32
from .._quantized import codes as of_codes
from .._quantized.array import Quantized
from . import blocks

#: Blocks of a row that share a word.
BLOCK = blocks.LINE
_UP, _DOWN = (np.float32(2.0**e) for e in (88, -88))
_NAN = 0x7FC0


def unpackable(w: Quantized, tile: int) -> str | None:
    """Why there is no packed layout for ``w`` (..., N, K), of this mode."""
    if w.layout == "linear" and blocks.DTYPES[w.weight.dtype.name] != "e4m3":
        return "its codes are float8_e5m2, not float8_e4m3fn"
    if w.shape[-2] % tile or w.shape[-1] % BLOCK[1]:
        return f"its shape is {w.shape}, in which N is not a multiple of {tile}, or K of {BLOCK[1]}"
    if w.block is not None and w.block[1] % BLOCK[1] and w.block[1] < w.shape[-1]:
        return f"its blocks are {w.block}, whose columns are not a multiple of {BLOCK[1]}"
    return None


def has_lines(w: Quantized) -> bool:
    """Whether the kernel of lines reads ``w``, in layout "linear" and of a product."""
    _, columns = w.block or (1, 1)
    whole = columns % BLOCK[1] == 0 or columns >= w.shape[-1]
    return whole and blocks.DTYPES[w.weight.dtype.name] == "e4m3"


def packed_scales(k_tiles: int) -> tuple[int, int]:
    """The last two axes of the scales of so many tiles of 64 k: two share words, and words."""
    return k_tiles // 2, 64


def in_two_axes(w: Quantized) -> Quantized:
    """``w``, in layout "linear", with scales along N and K, and a block no larger than either."""
    n, k = w.shape[-2:]
    if w.block is None:
        return _with(w, w.scales[..., None, None], (n, k))
    return _with(w, w.scales, (min(w.block[0], n), min(w.block[1], k)))


def by_rows(w: Quantized) -> Quantized:
    """``w``, in layout "linear", with a scale for every row and 128 k."""
    w, (n, k) = in_two_axes(w), w.shape[-2:]
    rows, columns = w.block or (n, k)
    index = np.arange(n) // rows, np.arange(0, k, BLOCK[1]) // columns
    return _with(w, _taken(w.scales, *index), BLOCK)


def in_blocks(w: Quantized, block) -> Quantized:
    """The inverse: the first of each block has its scale."""
    n, k = w.shape[-2:]
    rows, columns = block or (n, k)
    index = np.arange(0, n, rows), np.arange(0, k, columns) // BLOCK[1]
    scales = _taken(w.scales, *index)
    return _with(w, scales if block else scales[..., 0, 0], block)


def _with(w: Quantized, scales, block) -> Quantized:
    return dataclasses.replace(w, scales=scales, block=block, group_size=None)


def _taken(scales, *indices):
    for axis, index in zip((-2, -1), indices, strict=True):
        if len(index) != scales.shape[axis]:
            scales = blocks.taken(scales, index, axis)
    return scales


def codes_and_words(w: Quantized):
    """uint32 ``(..., N, K)`` and ``(..., N, K/128)`` of :func:`by_rows`."""
    codes = u32(lax.bitcast_convert_type(w.weight, jnp.uint8))
    b = fb.multiply(fb.bits(w.scales), fb.bits(jnp.full_like(w.scales, _UP)))
    high = _bf16(b)
    rest = jnp.where(fb.magnitude(high << 16) < u32(fb.INF), fb.value(b) - fb.value(high << 16), 0)
    words = high | _bf16(fb.bits(rest)) << 16
    b = jnp.where(fb.magnitude(b) > u32(fb.INF), u32(fb.NAN), b)
    b = b + u32(0xFF) + (b >> 9 & u32(1))
    marked = b & u32(0xFFFF8000) | u32(_NAN) | (b >> 9 & u32(0x3F))
    return codes, jnp.where(_has_nan(codes), marked, words)


def scales_of(codes, words):
    """The scales of :func:`codes_and_words`."""
    high, low = fb.value(words << 16), fb.value(words & u32(0xFFFF0000))
    marked = fb.value(words & u32(0xFFFF8000) | (words & u32(0x3F)) << 9)
    b = fb.bits(jnp.where(_has_nan(codes), marked, high + low))
    return fb.value(fb.multiply(b, fb.bits(jnp.full_like(high, _DOWN))))


def _has_nan(codes):
    return (of_codes.blocks(codes, BLOCK[1]) & u32(0x7F) == u32(0x7F)).any(-1)


def _bf16(b):
    """Bits of float32, rounded to bfloat16."""
    return u32(lax.bitcast_convert_type(fb.narrow(b, jnp.bfloat16), jnp.uint16))
