"""Rotary positions: the frequencies of each ``rope_type``, and the rotation."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import Refused


def frequencies(rope: dict[str, Any], size: int) -> tuple[np.ndarray, float]:
    """``(size / 2,)`` radians for each position, and what rotated vectors are multiplied by."""
    kind = rope["rope_type"]
    if kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise Refused(f"config.json: rope_type {kind!r} is not one of {known}")
    try:
        base = float(rope["rope_theta"]) ** (-np.arange(0, size, 2) / size)
        out, factor = _KINDS[kind](base, rope, size)
    except KeyError as error:
        raise Refused(f"config.json: rope_type {kind!r} needs {error.args[0]}") from error
    return out.astype(np.float32), float(factor)


def _default(base, rope, size):
    return base, 1.0


def _linear(base, rope, size):
    return base / rope["factor"], 1.0


def _llama3(base, rope, size):
    """Long waves are stretched, short ones are not, and those between are interpolated."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * base / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return base * (kept + (1 - kept) / rope["factor"]), 1.0


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction of attention's logits, where a context is ``factor`` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(base, rope, size):
    factor, length = rope["factor"], rope["original_max_position_embeddings"]

    def dimension(turns: float) -> float:  # of the frequency that turns so often in the context
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    stretched = np.clip((np.arange(size // 2) - low) / (high - low or 0.001), 0, 1)
    scale = rope.get("attention_factor")
    if scale is None:
        weights = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = mscale(factor)
        if weights[0] and weights[1]:
            scale = mscale(factor, weights[0]) / mscale(factor, weights[1])
    return base * (1 - stretched + stretched / factor), scale


_KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}


def turns(rope: dict[str, Any], size: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines ``(T, size / 2)`` at positions ``(T,)``, in float32."""
    angles, factor = frequencies(rope, size)
    angle = positions.astype(jnp.float32)[:, None] * angles
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, by_turns: bool = False) -> jax.Array:
    """``(T, heads, size)``, rotated in pairs: of its halves, or of neighbours, which come out as
    halves: scores of queries and keys do not depend on the order."""
    wide = x.astype(jnp.float32)
    a, b = (wide[..., ::2], wide[..., 1::2]) if by_turns else jnp.split(wide, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
