"""Codes in words, and integers with a zero point as affine weights."""

from __future__ import annotations

from math import gcd

import numpy as np

from .._quantized.array import Quantized
from .layer import Layer

F32 = np.float32


def words(x) -> np.ndarray:
    """The bytes along the last axis as uint32."""
    return np.ascontiguousarray(x).view(np.uint32)


def unpack(words, bits: int) -> np.ndarray:
    """uint8 codes of a bit stream along the last axis."""
    count, width = 32 // gcd(bits, 32), bits // gcd(bits, 32)
    chunk = words.reshape(*words.shape[:-1], -1, width)
    out = np.empty((*chunk.shape[:-1], count), np.uint8)
    for i in range(count):
        word, offset = divmod(i * bits, 32)
        code = chunk[..., word] >> np.uint32(offset)
        if offset + bits > 32:
            code |= chunk[..., word + 1] << np.uint32(32 - offset)
        out[..., i] = code & np.uint32(2**bits - 1)
    return out.reshape(*words.shape[:-1], -1)


def pack(codes, bits: int) -> np.ndarray:
    """The inverse of :func:`unpack`, of uint8 codes: words of whole groups of eight."""
    codes = np.ascontiguousarray(codes, np.uint8)
    if bits == 8:
        return codes.view(np.uint32)
    x = codes.view("<u8")  # eight codes become as many bytes as one has bits
    for width, low in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)):
        empty = np.uint64((width // 8) * (8 - bits))
        x = (x & np.uint64(low)) | ((x & ~np.uint64(low)) >> empty)
    packed = np.ascontiguousarray(x[..., None].view(np.uint8)[..., :bits])
    return packed.reshape(*codes.shape[:-1], -1).view(np.uint32)


def sorted_groups(t: Layer, leaf: str, g_idx, groups: int, size: int) -> np.ndarray | None:
    """The order of K in which groups are contiguous; None where they are as K is stored."""
    k = g_idx.shape[0]
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if not np.array_equal(g_idx[order], np.arange(k) // size):
        raise t.error(f"{leaf} does not give each of {groups} groups {size} channels")
    if np.array_equal(order, np.arange(k)):
        return None
    if not t.reorder:
        raise t.error(
            f"{leaf} is not in order (desc_act), so K would be permuted: use "
            "jgg.checkpoints.act_order, which also returns the order"
        )
    return order


def affine(
    t: Layer, words, scales, zeros, bits: int, group_size: int, *, leaf: str = ".scales",
    keep: bool = False, exact: bool = True,
) -> Quantized:  # fmt: skip
    """``(q - z) * s`` as ``q * s + (-z * s)``; scales and zeros are ``(N, groups)``.

    With at most 24 - bits significant bits in s, the products and their sum are exact in float32;
    ``exact`` refuses other scales. ``keep``: scales keep their dtype, in which ``-z * s`` is exact
    because z is a power of two; otherwise they become float32.
    """
    scales = np.ascontiguousarray(scales)
    wide, levels = scales.astype(F32), 1 << bits
    magnitude = np.abs(wide)
    inexact = (wide.view(np.uint32) & np.uint32(levels - 1)) != 0
    inexact |= magnitude > np.finfo(F32).max / levels
    inexact |= (magnitude > 0) & (magnitude < F32(2.0**-100))  # no part of s is subnormal
    if exact and inexact.any():
        raise t.error(
            f"{leaf} hold values whose products with {bits}-bit codes are not exact in float32"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        biases = -(np.asarray(zeros, F32) * wide)
        if keep:
            biases = biases.astype(scales.dtype)
    if keep and np.any(np.isinf(biases.astype(F32)) & ~np.isinf(wide)):
        raise t.error(f"{leaf} hold values too large for zero points in {scales.dtype.name}")
    scales = scales if keep else wide
    k = words.shape[-1] * 32 // bits
    fits = [s for s in (32, 64, 128) if group_size % s == 0 and k % s == 0]
    if not fits:
        raise t.error(f"group_size={group_size} of K={k} is not a multiple of 32")
    part = max(fits)  # a last group that is shorter has fewer parts
    scales, biases = (
        np.repeat(x, group_size // part, axis=-1)[:, : k // part] for x in (scales, biases)
    )
    return t.quantized(words, scales, biases, mode="affine", bits=bits, group_size=part)
