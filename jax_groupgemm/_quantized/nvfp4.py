"""Mode "nvfp4": e2m1 codes times an e4m3 scale, and a float32 for all."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._core import float_bits as fb
from .._core.float_bits import u32
from . import codes, packed_codes
from .array import Quantized
from .format import PRODUCTS
from .in_groups import CONVERSIONS, PackedInGroups


class Nvfp4(PackedInGroups):
    name, bits, group_sizes = "nvfp4", (4,), (16,)
    takes_global_scale = exact_in_bfloat16 = True
    calls = PRODUCTS | CONVERSIONS | {"jgg_prepack"}

    def encode(self, groups, global_scale, bits: int) -> tuple:
        b = fb.bits(groups)
        amax = jnp.max(fb.magnitude(b), axis=-1)
        t, s = b, fb.divide(amax, fb.bits(jnp.float32(6)))
        if global_scale is not None:
            inverse = fb.divide(fb.bits(jnp.ones_like(global_scale)), fb.bits(global_scale))
            overflow = fb.magnitude(inverse) == fb.INF
            inverse = jnp.where(overflow, inverse - u32(1), inverse)  # the largest float32
            inverse = codes.of_leading_axes(inverse, amax.shape)
            t, s = fb.multiply(b, inverse[..., None]), fb.multiply(s, inverse)
        nan = (amax >= u32(fb.INF)) | (fb.magnitude(s) > u32(fb.INF))
        byte = fb.encode(*fb.split(s), **codes.E4M3)
        byte = jnp.where(nan, u32(0x7F), byte)
        dead = nan | (byte == 0)
        divisor = fb.float32(*codes.e4m3(jnp.where(dead, u32(0x38), byte)))
        t = fb.divide(t, jnp.broadcast_to(divisor[..., None], t.shape))
        code = fb.encode(*fb.split(t), **codes.E2M1) | (t >> 31 << 3)
        return jnp.where(dead[..., None], u32(0), code), byte.astype(jnp.uint8)

    def decode(self, code, scales, biases, global_scale, dtype) -> jax.Array:
        scale = u32(scales[..., None, None])
        b = fb.bits(codes.exact(*codes.e2m1(code)) * codes.exact(*codes.e4m3(scale)))
        nan = scale & u32(0x7F) == 0x7F
        b = jnp.where(nan, u32(fb.NAN), b | ((code >> 3) << 31))
        if global_scale is None:
            return fb.narrow(b, dtype)
        return codes.times(b, codes.of_leading_axes(global_scale, b.shape), dtype)

    def packed(self, code, q: Quantized) -> tuple[jax.Array, jax.Array]:
        scales = _wide_e4m3(u32(q.scales) & u32(0x7F))
        code = jnp.where((scales == 0)[..., None, None], u32(0), code)
        return code, packed_codes.words_of(scales, 8)

    def of_codes_and_words(self, w: Quantized, code, words, reshape) -> Quantized:
        scales = _e4m3_of_wide(packed_codes.parts_of(words, 8))
        return self.unpacked(w, code, scales.astype(jnp.uint8))

    def interleave(self, codes, bits: int) -> jax.Array:
        return packed_codes.interleave_e2m1(codes)

    def separate(self, words, bits: int) -> jax.Array:
        return packed_codes.separate_e2m1(words)


def _wide_e4m3(byte):
    """e4m3 as (exponent + 10) * 8 + mantissa, without subnormals; NaN is 255."""
    mantissa, exponent = byte & u32(7), byte >> 3
    shift = jnp.where(mantissa >= 4, u32(1), jnp.where(mantissa >= 2, u32(2), u32(3)))
    small = ((u32(4) - shift) << 3) | ((mantissa << shift) & u32(7))
    wide = jnp.where(exponent == 0, jnp.where(mantissa == 0, u32(0), small), byte + u32(24))
    return jnp.where(byte == 0x7F, u32(255), wide)


def _e4m3_of_wide(wide):
    exponent, mantissa = wide >> 3, wide & u32(7)
    small = (mantissa | u32(8)) >> (u32(4) - jnp.minimum(exponent, u32(3)))
    byte = jnp.where(exponent > 3, wide - u32(24), jnp.where(wide == 0, u32(0), small))
    return jnp.where(wide == 255, u32(0x7F), byte)
