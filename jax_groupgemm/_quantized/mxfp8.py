"""Mode "mxfp8": e4m3 codes times a power of two."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._core.float_bits import u32
from . import codes, packed_codes
from .array import Quantized
from .format import PRODUCTS
from .in_groups import CONVERSIONS
from .microscaling import Microscaling


class Mxfp8(Microscaling):
    name, bits = "mxfp8", (8,)
    element, largest, sign = codes.E4M3, (0xE00000, 8), 7
    calls = PRODUCTS | CONVERSIONS

    def magnitude(self, code) -> tuple[jax.Array, jax.Array]:
        return codes.e4m3(code)

    def is_nan(self, code):
        return code & u32(0x7F) == 0x7F

    def packed(self, code, q: Quantized) -> tuple[jax.Array, jax.Array]:
        code, scales = _marked_nan(code, u32(q.scales))
        return code, packed_codes.words_of(scales, 16)

    def of_codes_and_words(self, w: Quantized, code, words, reshape) -> Quantized:
        scales = _unmarked(code, packed_codes.parts_of(words, 16))
        return self.unpacked(w, code, scales.astype(jnp.uint8))

    def interleave(self, codes, bits: int) -> jax.Array:
        return packed_codes.interleave_e4m3(codes)

    def separate(self, words, bits: int) -> jax.Array:
        return packed_codes.separate_e4m3(words)


def _marked_nan(codes, scales):
    """mxfp8: e4m3 codes, and E8M0 scales as bfloat16. Kernels take code 127 for 480, so the scale
    of a group that has a NaN is one: of the 254 that bfloat16 has, the scale's own."""
    groups = codes.reshape(*scales.shape, -1)
    nan = (groups & u32(0x7F)) == 0x7F
    marked = nan.any(-1)
    # There is none for 2^127: where that meets a NaN the whole group is NaN.
    all_nan = marked & (scales >= 254)
    mark = u32(0x7F80) | (scales // 127) << 15 | (1 + scales % 127)
    codes = jnp.where(all_nan[..., None] & nan, u32(0), groups).reshape(codes.shape)
    bits = _bf16_of_e8m0(jnp.where(all_nan, u32(255), scales))
    return codes, jnp.where(marked & ~all_nan, mark, bits)


def _unmarked(codes, bits):
    """The E8M0 scales."""
    marked = ((codes.reshape(*bits.shape, -1) & u32(0x7F)) == 0x7F).any(-1)
    mark = 127 * (bits >> 15) + (bits & u32(0x7F)) - 1
    return jnp.where(marked, mark, _e8m0_of_bf16(bits))


def _bf16_of_e8m0(byte):
    bits = jnp.where(byte == 0, u32(0x40), byte << 7)
    return jnp.where(byte == 255, u32(0x7FC0), bits)


def _e8m0_of_bf16(bits):
    return jnp.where(bits == 0x7FC0, u32(255), bits >> 7)
