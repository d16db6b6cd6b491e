"""Modes "mxfp4" and "mxfp8": small floats times a power of two, E8M0, for each group of 32."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp

from .._core import float_bits as fb
from .._core.float_bits import i32, u32
from .in_groups import PackedInGroups


class Microscaling(PackedInGroups):
    """``scale = 2**ceil(log2(amax / largest))``, ``q = round(w / scale)``.

    Attributes:
      element: the format of codes.
      largest: of the largest code 1.5 * 2**2 or 1.75 * 2**8, its 24 bits and exponent.
      sign: the place of a code's sign.
    """

    group_sizes = (32,)
    exact_in_bfloat16 = True
    element: dict[str, int]
    largest: tuple[int, int]
    sign: int

    def encode(self, groups, global_scale, bits: int) -> tuple:
        b = fb.bits(groups)
        sign = b >> 31
        amax = jnp.max(fb.magnitude(b), axis=-1)
        fraction, top = self.largest
        m, e = fb.split(amax)
        exponent = jnp.clip(e + 23 - top + i32(m > u32(fraction)), -127, 127)
        exponent = jnp.where(amax == 0, 0, exponent)
        dead = amax >= u32(fb.INF)
        byte = jnp.where(dead, u32(255), u32(exponent + 127))
        m, e = fb.split(b)
        e = e - exponent[..., None]
        code = fb.encode(m, e, **self.element) | (sign << self.sign)
        return jnp.where(dead[..., None], u32(0), code), byte.astype(jnp.uint8)

    def decode(self, code, scales, biases, global_scale, dtype) -> jax.Array:
        scale = u32(scales[..., None, None])
        m, e = self.magnitude(code)
        nan = self.is_nan(code)
        b = fb.float32(m, e + i32(scale) - 127)
        nan = nan | (scale == 255)
        b = jnp.where(nan, u32(fb.NAN), b | ((code >> self.sign) << 31))
        return fb.narrow(b, dtype)

    @abc.abstractmethod
    def magnitude(self, code) -> tuple[jax.Array, jax.Array]:
        """``(m, e)`` of the magnitude ``m * 2**e``."""

    def is_nan(self, code):
        return jnp.zeros((), bool)
