"""Mode "mxfp4": e2m1 codes times a power of two."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._core.float_bits import u32
from . import codes, packed_codes
from .array import Quantized
from .format import PRODUCTS
from .in_groups import CONVERSIONS
from .microscaling import Microscaling


class Mxfp4(Microscaling):
    name, bits = "mxfp4", (4,)
    element, largest, sign = codes.E2M1, (0xC00000, 2), 3
    rows_per_word = 2
    calls = PRODUCTS | CONVERSIONS | {"jgg_prepack"}

    def magnitude(self, code) -> tuple[jax.Array, jax.Array]:
        return codes.e2m1(code)

    def packed_scales(self, group_size: int, k_tiles: int) -> tuple[int, int]:
        return k_tiles, 32

    def packed(self, code, q: Quantized) -> tuple[jax.Array, jax.Array]:
        return code, u32(q.scales)[..., ::2] | u32(q.scales)[..., 1::2] << 8

    def of_codes_and_words(self, w: Quantized, code, words, reshape) -> Quantized:
        both = jnp.stack([words & u32(0xFF), words >> 8], axis=-1)
        scales = reshape(both, *code.shape[:-1], code.shape[-1] // w.group_size)
        return self.unpacked(w, code, scales.astype(jnp.uint8))

    def interleave(self, codes, bits: int) -> jax.Array:
        return packed_codes.interleave_e2m1(codes)

    def separate(self, words, bits: int) -> jax.Array:
        return packed_codes.separate_e2m1(words)
