"""``prepack``: a quantized weight in the order in which a kernel reads it, once, when it is loaded.

Layout "sm90" is for Hopper's tensor cores, which take a tile of 64 rows (N) x 64 k of a weight
from registers. Thread ``t = 32 * warp + 4 * g + j`` of 128 has rows ``16 * warp + g`` and ``+ 8``,
and of every 16 k (a step) ``2 * j``, its neighbour, and the two 8 further on. So a tile is

    weight  (128 threads, bits)  a thread's 32 codes
    scales  (words, 32 pairs (warp, g), 2 rows)  what decodes the row's codes

of uint32, and leaves have shapes (..., N/64, K/64, 128 * bits) and (..., N/64, K/64, 64 * words);
but of mxfp4 the scales of two rows are one word, (..., N/64, K/64, 32), and two tiles share affine
scales of 128 k, and those of mode "fp8" (``prepack_fp8``): (..., N/64, K/128, 64). Of a weight's
words all threads' first four (or two, or one, as ``packed_codes`` says) come before all threads'
next.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .._core import check, conversion, partition
from .._core.check import describe
from .._core.float_bits import u32
from .._core.operations import INLINE, listed
from .._core.segments import Metadata
from . import array, call, formats, packed_codes, prepack_fp8
from .array import Quantized
from .layouts import Layout, checked_global_scale, register

_TILE = 64


@listed
def prepack(
    w: Quantized, *, scales_dtype: DTypeLike | None = None, strict: bool = False
) -> Quantized:
    """``dequantize(prepack(w)) == dequantize(w)``; **K, the last axis, is grouped**.

    The same values in the layout that the fast kernels read. For Hopper: all modes, ``"affine"``
    with bfloat16 scales; N and K multiples of 64; products with bfloat16 activations and
    ``transpose_w=True``. Mode ``"fp8"`` needs codes of float8_e4m3fn, K a multiple of 128, and
    blocks of as many columns or of whole rows. Such a weight gets layout ``"sm90"``; any other is
    returned as it is, with a warning that says why. Everything accepts both: what has no kernel for
    a layout puts the codes (not the values) back in order first. On Hopper products of many rows
    (1024 per matrix, 2048 with 6 and 8 bits) pack weights that are not packed, each time anew (but
    mxfp8, ``nvfp4_grouped_mm`` where K is a multiple of 128, and with ``implementation="sm80"``).
    In mode ``"fp8"``, which has no other kernels, products of any number of rows do: with few rows
    they take about three times as long as with a prepacked weight (a prediction), and memory for a
    copy of it. The layout may change with this package's version: store the weight as it was.

    Args:
      w: a :class:`Quantized` ``(..., N, K)``.
      scales_dtype: bfloat16 rounds the scales and biases of mode ``"affine"`` to it first, which
        changes values: those of AWQ and GPTQ checkpoints, and of weights that were quantized from
        float32, are float32. None leaves them. Other modes have no such scales.
      strict: raise, instead of a warning, where ``w`` has no such layout.

    Returns:
      A :class:`Quantized` that stands for the same array, bit for bit (zeros of nvfp4 groups whose
      scale is 0 lose their sign; an mxfp8 group of scale 2^127 that has a NaN becomes all NaN), but
      for ``scales_dtype``, and for the scales of mode ``"fp8"``: they keep 16 bits (15 where one of
      128 codes is NaN), and those of 2^40 or more become infinite. Its global scale has a gradient,
      its other scales none. Under Explicit sharding it is sharded as ``w.weight`` is.

    Raises:
      ValueError, TypeError: as :func:`dequantize`; ``scales_dtype`` is neither None nor bfloat16;
        with ``strict``, w has no such layout; or w is explicitly sharded in parts of N or K that
        are not whole tiles of 64 (and quantization groups).

    Warns:
      UserWarning: w is returned as it is.
    """
    w = array.checked("prepack", "w", w)
    check.flag("prepack", "strict", strict)
    given = jnp.bfloat16 if scales_dtype is None else scales_dtype
    if (dtype := check.of_dtype("prepack", "scales_dtype", given)) != jnp.bfloat16:
        raise ValueError(f"jgg.prepack: scales_dtype={dtype.name} is not None or bfloat16")
    if w.layout == "linear" and w.mode == "affine" and scales_dtype is not None:
        scales, biases = (leaf.astype(scales_dtype) for leaf in (w.scales, w.biases))
        w = dataclasses.replace(w, scales=scales, biases=biases)
    if w.layout == "sm90" or 0 in w.shape:
        return w
    why = _unpackable(w) if w.layout == "linear" else f"its layout is {w.layout!r}, not 'linear'"
    if why is not None:
        if strict:
            raise ValueError(f"jgg.prepack: w has no layout for the fast kernels: {why}")
        warnings.warn(f"jgg.prepack: w is returned as it is: {why}", stacklevel=3)
        return w
    mesh = partition.explicit_mesh(jax.tree.leaves((w.weight, w.scales, w.biases)))
    if mesh is None:
        return _packed_alone(w)
    if partition.maps_explicit_axes():
        raise ValueError(
            "jgg.prepack: within a vmap over an axis that is explicitly sharded. Call it outside: "
            "w may have any leading axes."
        )
    spec, block, group_size = _spec(w), w.block, w.group_size
    w = prepack_fp8.by_rows(w) if w.mode == "fp8" else w
    for name, axis, unit in (("N", -2, _TILE), ("K", -1, max(_TILE, w.group_size))):
        axes, parts = _axes(w, axis)
        if w.shape[axis] % (parts * unit):
            raise ValueError(
                f"jgg.prepack: w {w.shape} shards axis {name} over {axes}, in {parts} parts that "
                f"are not multiples of {unit}. Use jax.sharding.reshard first."
            )
    pack = lambda w: _packed(w, _PREPACK)
    out = _on_each_device(pack, w, mesh, spec, PartitionSpec(*spec, None))
    return dataclasses.replace(out, block=block, group_size=group_size)


def _packed(w: Quantized, pack) -> Quantized:
    q = prepack_fp8.in_two_axes(w) if w.mode == "fp8" else w
    weight, scales = pack(
        q.weight, q.scales, q.biases, mode=q.mode, bits=q.bits, group_size=q.group_size,
        block=q.block,
    )  # fmt: skip
    return dataclasses.replace(w, weight=weight, scales=scales, biases=None, layout="sm90")


# One program, also where the user's code is none: see ``operations.operation``.
_packed_alone = jax.jit(lambda w: _packed(w, _PREPACK), inline=INLINE)


def packable(w: Quantized) -> bool:
    """Whether there is a packed layout for it."""
    return _unpackable(w) is None


def _unpackable(w: Quantized) -> str | None:
    """Why there is no packed layout for it."""
    if len(w.shape) < 2 or w.axis != -1:
        return f"its shape is {w.shape} with axis={w.axis}, not (..., N, K) with axis=-1"
    if w.mode == "fp8":
        return prepack_fp8.unpackable(w)
    if any(size % _TILE for size in w.shape[-2:]):
        return f"its shape is {w.shape}, in which N and K are not multiples of {_TILE}"
    if w.mode == "affine" and w.scales.dtype != jnp.bfloat16:
        return (
            f"its scales are {w.scales.dtype.name}, not bfloat16. scales_dtype=jnp.bfloat16 rounds "
            "them"
        )
    return None


def unpacked(w: Quantized) -> Quantized:
    """``w`` in layout "linear". Where it is explicitly sharded, each device unpacks its tiles."""
    q = by_rows(w)
    return prepack_fp8.in_blocks(q, w.block) if w.mode == "fp8" and w is not q else q


def by_rows(w: Quantized) -> Quantized:
    """The same, but that mode "fp8" keeps scales for each row, as products may take them."""
    if w.layout == "linear":
        return w
    mesh = partition.explicit_mesh((w.weight, w.scales))
    if mesh is None or partition.maps_explicit_axes():
        return _unpack(w, mapped=mesh is not None)
    spec, group = _spec(w), formats.FP8_GROUP if w.mode == "fp8" else w.group_size
    axes, parts = _axes(w, -2)
    if group > _TILE and w.shape[-1] % (parts * group):
        raise ValueError(
            f"jgg: a prepacked weight {w.shape} shards axis K over {axes}, but its "
            f"{w.shape[-1] // group} quantization groups do not divide into {parts}. "
            "Use jax.sharding.reshard first."
        )
    tiles = PartitionSpec(*spec[:-1], None)
    return _on_each_device(_unpack, w, mesh, tiles, PartitionSpec(*spec[:-1]))


def _spec(w: Quantized) -> PartitionSpec:
    """How the weight is sharded; its other leaves follow."""
    return jax.typeof(w.weight).sharding.spec


def _axes(w: Quantized, axis: int) -> tuple[tuple[str, ...], int]:
    """The mesh axes that shard an axis of the weight, and into how many parts they divide it."""
    axes = partition.entries_of(w.weight)[axis]
    mesh = jax.typeof(w.weight).sharding.mesh
    return axes, math.prod(mesh.shape[name] for name in axes)


def _on_each_device(function, w: Quantized, mesh, spec, out_spec) -> Quantized:
    """``function`` of each device's part of ``w``. A global scale stays as it is."""
    arrays = dataclasses.replace(w, global_scale=None)
    out = jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=out_spec,
            axis_names=set(mesh.explicit_axes),
        )
    )(jax.sharding.reshard(arrays, NamedSharding(mesh, spec)))  # fmt: skip
    return dataclasses.replace(out, global_scale=w.global_scale)


def packed_for(w: Quantized, metadata: Metadata, rows: int) -> Quantized:
    """``w`` as "sm90" reads it in a product of so many rows, by the kernel of the GPU. In mode
    "fp8" matrices without rows may hold anything."""
    if w.layout == "sm90":
        return w
    return _packed(w, functools.partial(call.prepack, metadata=metadata, rows=rows))


@jax.jit
def _prepack(w: Quantized) -> Quantized:
    if w.mode == "fp8":
        w = prepack_fp8.by_rows(w)
        return _in_tiles(w, *prepack_fp8.codes_and_words(w))
    codes, scales = formats.codes_in_groups(w.weight, w.bits, w.group_size), w.scales
    if w.mode == "nvfp4":
        scales = _wide_e4m3(u32(scales) & u32(0x7F))
        codes = jnp.where((scales == 0)[..., None, None], u32(0), codes)
        words = _words(scales, 8)
    elif w.mode == "mxfp4":
        words = u32(scales)[..., ::2] | u32(scales)[..., 1::2] << 8
    elif w.mode == "mxfp8":
        codes, scales = _marked_nan(codes, u32(scales))
        words = _words(scales, 16)
    else:
        scale, bias = (u32(lax.bitcast_convert_type(v, jnp.uint16)) for v in (scales, w.biases))
        words = scale | bias << 16
    return _in_tiles(w, codes, words)


def _in_tiles(w: Quantized, codes, words) -> Quantized:
    *lead, n, k = w.shape
    # (..., tile of n, warp, h, g, tile of k, step, i, j, e), see the module's docstring.
    codes = codes.reshape(*lead, n // _TILE, 4, 2, 8, k // _TILE, 4, 2, 4, 2)
    codes = _permute(codes, (0, 4, 1, 3, 7, 5, 6, 2, 8))  # ..., warp, g, j, step, i, h, e
    codes = codes.reshape(*lead, n // _TILE, k // _TILE, 128, 16, 2)
    scale_tiles, count = formats.packed_scales(w.mode, w.group_size, k // _TILE)
    words = words.reshape(*lead, n // _TILE, 4, 2, 8, scale_tiles, -1)
    words = _permute(words, (0, 4, 5, 1, 3, 2))
    if w.mode == "mxfp4":
        words = words[..., 0] | words[..., 1] << 16
    weight = packed_codes.interleave(codes, w.mode, w.bits)
    return dataclasses.replace(
        w,
        weight=packed_codes.in_pieces(weight),
        scales=words.reshape(*lead, n // _TILE, scale_tiles, count),
        biases=None,
        layout="sm90",
    )


def _leaves(weight, scales, biases, **static):
    """``(weight, scales)``, by definition."""
    w = _prepack(Quantized(weight, scales, biases, **static))
    return w.weight, w.scales


def _in_batch(size: int, operands, axes):
    *arrays, _ = conversion.in_batch(size, (*operands, None), (*axes, None))
    return arrays


_PREPACK = conversion.composed("jgg_prepack", _leaves, call.prepack, batch=_in_batch)


@functools.partial(jax.jit, static_argnames="mapped")
def _unpack(w: Quantized, mapped: bool = False) -> Quantized:
    """``mapped``: by a vmap over an axis that is explicitly sharded. JAX does not see that several
    splits at once leave that axis alone, unless it is told that no other one is sharded."""

    def reshape(a, *shape):
        whole = partition._in_own_mesh(a, [()] * len(shape)) if mapped else None
        return lax.reshape(a, shape, out_sharding=whole)

    *lead, n, k = w.shape
    words = packed_codes.from_pieces(w.weight, w.bits)
    codes = packed_codes.separate(words, w.mode, w.bits)
    tiles = (*lead, n // _TILE, k // _TILE)
    codes = reshape(codes, *tiles, 4, 8, 4, 4, 2, 2, 2)
    codes = reshape(_permute(codes, (0, 2, 7, 3, 1, 5, 6, 4, 8)), *lead, n, k)
    words = w.scales
    if w.mode == "mxfp4":
        words = jnp.stack([words & u32(0xFFFF), words >> 16], axis=-1)
    *tiles, count = w.scales.shape
    count = max(count // _TILE, 1)  # of a line
    words = reshape(words, *tiles, count, 4, 8, 2)
    words = reshape(_permute(words, (0, 3, 5, 4, 1, 2)), *lead, n, tiles[-1] * count)
    biases = None
    if w.mode == "fp8":
        scales = prepack_fp8.scales_of(codes, words)
        weight = lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.float8_e4m3fn)
        return dataclasses.replace(
            w, weight=weight, scales=scales, layout="linear", block=prepack_fp8.BLOCK,
            group_size=None,
        )  # fmt: skip
    if w.mode == "nvfp4":
        scales = _e4m3_of_wide(_parts(words, 8)).astype(jnp.uint8)
    elif w.mode == "mxfp4":
        both = jnp.stack([words & u32(0xFF), words >> 8], axis=-1)
        scales = reshape(both, *lead, n, k // w.group_size).astype(jnp.uint8)
    elif w.mode == "mxfp8":
        scales = _unmarked(codes, _parts(words, 16)).astype(jnp.uint8)
    else:
        scales, biases = (
            lax.bitcast_convert_type(v.astype(jnp.uint16), jnp.bfloat16)
            for v in (words & u32(0xFFFF), words >> 16)
        )
    weight = formats.pack(codes, w.bits)
    return dataclasses.replace(w, weight=weight, scales=scales, biases=biases, layout="linear")


def _permute(a, last):
    """Transpose the last axes only."""
    lead = a.ndim - len(last)
    return a.transpose(*range(lead), *(lead + i for i in last))


def _words(parts, bits: int):
    """Numbers of 8 or 16 bits, the first lowest, as words."""
    count = 32 // bits
    parts = parts.reshape(*parts.shape[:-1], -1, count)
    return sum(parts[..., i] << (bits * i) for i in range(1, count)) | parts[..., 0]


def _parts(words, bits: int):
    parts = [words >> (bits * i) & u32((1 << bits) - 1) for i in range(32 // bits)]
    return jnp.stack(parts, axis=-1).reshape(*words.shape[:-1], -1)


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


def _bf16_of_e8m0(byte):
    bits = jnp.where(byte == 0, u32(0x40), byte << 7)
    return jnp.where(byte == 255, u32(0x7FC0), bits)


def _e8m0_of_bf16(bits):
    return jnp.where(bits == 0x7FC0, u32(255), bits >> 7)


class _Sm90(Layout):
    """Tiles of 64 x 64, as this file's docstring describes them."""

    name, axes, modes = "sm90", (-1,), ("affine", "mxfp4", "mxfp8", "nvfp4", "fp8")

    def shape(self, q) -> tuple[int, ...]:
        *lead, rows, columns, _ = q.weight.shape
        return (*lead, _TILE * rows, _TILE * columns)

    def checked(self, op: str, name: str, q: Quantized) -> Quantized:
        *lead, rows, columns, _ = (1, 1, 1, *q.weight.shape)[-max(q.weight.ndim, 3) :]
        scales = formats.packed_scales(q.mode, q.group_size, columns)
        expected = (*lead, rows, columns, 128 * q.bits), (*lead, rows, *scales)
        if (q.weight.shape, q.scales.shape) != expected or q.biases is not None:
            raise ValueError(
                f"jgg.{op}: {name} has weight {describe(q.weight)} and scales "
                f"{describe(q.scales)}, which jgg.prepack did not make: layout {q.layout!r} has "
                f"shapes {expected}"
            )
        for leaf in (q.weight, q.scales):
            if leaf.dtype != jnp.uint32:
                raise TypeError(
                    f"jgg.{op}: {name} in layout {q.layout!r} is uint32, got {leaf.dtype}"
                )
        global_scale = checked_global_scale(op, q.mode, q.global_scale, q.shape, f"{name}.")
        return dataclasses.replace(q, global_scale=global_scale)

    def to_linear(self, q: Quantized) -> Quantized:
        return unpacked(q)


register(_Sm90())
