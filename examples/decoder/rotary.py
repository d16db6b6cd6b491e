"""Rotary positions: the frequencies of each ``rope_type``, and the rotation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import Refused

MAX_SIZE = 2**16  # of a head: more is a damaged config


@dataclasses.dataclass(frozen=True)
class Rope:
    """Frequencies and a scale, which a ``rope_type`` comes to.

    Attributes:
      angles: radians for each position, of each pair of numbers.
      factor: rotated vectors are multiplied by it.
      correction: of logits, in DeepSeek's attention.
    """

    angles: tuple[float, ...]
    factor: float = 1.0
    correction: float = 1.0

    @classmethod
    def of(cls, said: dict[str, Any], size: int) -> Rope:
        """Made of config.json's dict, for heads that have so many numbers."""
        kind, correction = said["rope_type"], 1.0
        if size > MAX_SIZE:
            raise Refused(f"config.json: heads of {size} numbers, more than {MAX_SIZE}")
        if not isinstance(kind, str) or kind not in _KINDS:
            known = ", ".join(_KINDS)
            raise Refused(f"config.json: rope_type {kind!r} is not one of {known}")
        try:
            with np.errstate(divide="raise", over="raise", invalid="raise"):
                base = float(said["rope_theta"]) ** (-np.arange(0, size, 2) / size)
                angles, factor = _KINDS[kind](base, said, size)
            if kind != "default" and said.get("mscale_all_dim"):
                correction = mscale(said["factor"], said["mscale_all_dim"]) ** 2
            return cls(tuple(map(float, angles)), float(factor), float(correction))
        except KeyError as error:
            raise Refused(f"config.json: rope_type {kind!r} needs {error.args[0]}") from error
        except (TypeError, ValueError, ArithmeticError) as error:
            raise Refused(f"config.json: rope_parameters are {said}: {error}") from error

    def divided(self, factors: np.ndarray) -> Rope:
        """With frequencies that are divided by so much each."""
        angles = tuple(map(float, np.array(self.angles) / factors))
        return dataclasses.replace(self, angles=angles)

    def turns(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines ``(T, size / 2)`` at positions ``(T,)``, in float32."""
        angle = positions.astype(jnp.float32)[:, None] * np.array(self.angles, np.float32)
        return jnp.cos(angle) * self.factor, jnp.sin(angle) * self.factor


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


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, by_turns: bool = False) -> jax.Array:
    """``(T, heads, size)``, of which so many numbers in front are rotated as there are angles: in
    pairs of their halves, or of neighbours, which come out as halves. Scores of queries and keys do
    not depend on the order."""
    size = 2 * cos.shape[-1]
    wide, rest = x[..., :size].astype(jnp.float32), x[..., size:]
    a, b = (wide[..., ::2], wide[..., 1::2]) if by_turns else jnp.split(wide, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    y = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
    return jnp.concatenate([y, rest], axis=-1) if rest.shape[-1] else y
