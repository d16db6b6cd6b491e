"""NVFP4 layers: e2m1 codes in bytes, e4m3 scales, and a float32 multiplier."""

from __future__ import annotations

import numpy as np

from .bits import F32, words
from .layer import Layer, Read


def multiplier(t: Layer, leaf: str, value) -> np.ndarray:
    value = np.asarray(value, F32)
    if not np.all(np.isfinite(value) & (value >= 0)):
        shown = np.asarray(t.array(leaf, ("float32",))).reshape(-1)
        shown = shown[0] if shown.size == 1 else f"of {shown.size} numbers"
        raise t.error(f"{leaf} = {shown} gives no finite scale")
    return value


def leaves(t: Layer, weight, scales, scale_leaf: str, global_scale) -> Read:
    """The layer of bytes ``(..., N, K/2)`` and e4m3 ``(..., N, K/16)``, whose shapes fit."""
    scales = np.ascontiguousarray(scales).view(np.uint8)
    if np.any(scales >= 0x80):
        raise t.error(f"{scale_leaf} holds negative scales")
    q = t.quantized(words(weight), scales, None, global_scale, mode="nvfp4", bits=4, group_size=16)
    return q, None


def read(t: Layer, weight: str, global_leaf: str, global_scale) -> Read:
    """One layer, with one multiplier."""
    packed = t.get(weight, ("uint8",), "N, K/2", (None, None))
    n, half = packed.shape
    if half % 8:
        raise t.error(f"{weight} has K = {2 * half}, not a multiple of 16")
    scales = t.get(".weight_scale", ("float8_e4m3fn",), "N, K/16", (n, half // 8))
    scale = multiplier(t, global_leaf, global_scale)
    return leaves(t, packed, scales, ".weight_scale", scale)
