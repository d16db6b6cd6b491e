"""Mode "affine": ``w ≈ q * scale + bias``, with floating scales and biases for each group."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import float_bits as fb
from .._core.float_bits import i32, u32
from . import packed_codes
from .array import Quantized
from .format import FLOATS, PRODUCTS
from .in_groups import CONVERSIONS, PackedInGroups, divide


class Affine(PackedInGroups):
    name, bits, group_sizes = "affine", (4, 2, 3, 5, 6, 8), (64, 16, 32, 128)
    scales, has_biases, scalable = FLOATS, True, True
    calls = PRODUCTS | CONVERSIONS | {"jgg_prepack"}
    words = ("uint32", "uint16")

    def codes_together(self, bits: int, group_size: int) -> int:
        return math.lcm(group_size, 32 // math.gcd(bits, 32))

    def dequantized_dtype(self, q: Quantized) -> Any:
        return q.scales.dtype

    def encode(self, groups, global_scale, bits: int) -> tuple:
        w = groups.astype(jnp.float32)
        # By bits: backends differ in whether subnormals compare as zeros.
        key = _ordered(lax.bitcast_convert_type(w, jnp.int32))
        low, high = (fb.value(_ordered(end(key, axis=-1))) for end in (jnp.min, jnp.max))
        levels = jnp.float32(2**bits - 1)
        s = jnp.maximum(divide(high - low, levels), jnp.float32(1e-7))
        top = fb.magnitude(fb.bits(high)) >= fb.magnitude(fb.bits(low))
        s, edge = jnp.where(top, -s, s), jnp.where(top, high, low)
        q0 = jnp.round(divide(edge, s))
        zero = q0 == 0
        s = jnp.where(zero, s, divide(edge, jnp.where(zero, jnp.float32(1), q0)))
        bias = jnp.where(zero, jnp.float32(0), edge)
        q = jnp.round(divide(w - bias[..., None], s[..., None]))
        q = jnp.where(jnp.isnan(q), jnp.float32(0), jnp.clip(q, jnp.float32(0), levels))
        narrow = lambda a: fb.narrow(fb.bits(a), groups.dtype)
        return u32(q), narrow(s), narrow(bias)

    def decode(self, code, scales, biases, global_scale, dtype) -> jax.Array:
        return _values(code, scales[..., None, None], biases[..., None, None], dtype)

    # Two tiles share the words of groups of 128.
    def packed_scales(self, group_size: int, k_tiles: int) -> tuple[int, int]:
        return (k_tiles // 2, 64) if group_size == 128 else (k_tiles, 4096 // group_size)

    def words_of_scale(self, q: Quantized) -> int:
        _, words = self.packed_scales(q.group_size, q.weight.shape[-2])
        return 2 if q.scales.dtype == jnp.uint32 and q.scales.shape[-1] == 2 * words else 1

    def scales_fit(self, q: Quantized, x_dtype) -> bool:
        name = q.scales.dtype.name
        if name == "uint32":
            name = "bfloat16" if self.words_of_scale(q) == 1 else "float32"
        return {"uint16": "float16"}.get(name, name) == x_dtype

    def with_scales_of(self, q: Quantized, dtype) -> Quantized:
        scales, biases = (leaf.astype(dtype) for leaf in (q.scales, q.biases))
        return dataclasses.replace(q, scales=scales, biases=biases)

    def packed(self, code, q: Quantized) -> tuple[jax.Array, jax.Array]:
        if q.scales.dtype == jnp.float32:
            words = [lax.bitcast_convert_type(v, jnp.uint32) for v in (q.scales, q.biases)]
            return code, jnp.stack(words, axis=-1)
        scale, bias = (u32(lax.bitcast_convert_type(v, jnp.uint16)) for v in (q.scales, q.biases))
        return code, scale | bias << 16

    def of_codes_and_words(self, w: Quantized, code, words, reshape) -> Quantized:
        if self.words_of_scale(w) == 2:
            parts = (lax.index_in_dim(words, i, -1, keepdims=False) for i in range(2))
            return self.unpacked(
                w, code, *(lax.bitcast_convert_type(v, jnp.float32) for v in parts)
            )
        of = jnp.float16 if w.scales.dtype == jnp.uint16 else jnp.bfloat16
        scales, biases = (
            lax.bitcast_convert_type(v.astype(jnp.uint16), of)
            for v in (words & u32(0xFFFF), words >> 16)
        )
        return self.unpacked(w, code, scales, biases)

    def interleave(self, codes, bits: int) -> jax.Array:
        return packed_codes.interleave(codes, bits)

    def separate(self, words, bits: int) -> jax.Array:
        return packed_codes.separate(words, bits)


def _ordered(i):
    """Integers that order as the floats of int32 patterns do; and, again, the patterns of those."""
    return jnp.where(i < 0, i ^ i32(0x7FFFFFFF), i)


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _values(codes, scales, biases, dtype):
    # Products with either part of s are exact, so that no fused multiply-add changes their sum.
    b = fb.bits(scales)
    finite = fb.magnitude(b) < u32(fb.INF)
    high = fb.value(jnp.where(finite, b & u32(0xFFFFFF00), b))
    low = jnp.where(finite, fb.value(b) - high, jnp.float32(0))
    q = codes.astype(jnp.float32)
    product = q * high + q * low
    return fb.narrow(fb.bits(product + fb.value(fb.bits(biases))), dtype)


@_values.defjvp
def _(dtype, primals, tangents):
    codes, _, _ = primals
    _, ds, db = tangents
    f32 = jnp.float32
    out = codes.astype(f32) * ds.astype(f32) + db.astype(f32)
    return _values(*primals, dtype), out.astype(dtype)
