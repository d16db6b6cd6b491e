"""``prepack``: a quantized weight in the order in which a kernel reads it, once, when it is loaded.

Layout "sm90" is for Hopper's tensor cores, which take a tile of 64 rows (N) x 64 k of a weight
from registers. Thread ``t = 32 * warp + 4 * g + j`` of 128 has rows ``16 * warp + g`` and ``+ 8``,
and of every 16 k (a step) ``2 * j``, its neighbour, and the two 8 further on. So a tile is

    weight  (128 threads, bits)  a thread's 32 codes
    scales  (words, 32 pairs (warp, g), 2 rows)  what decodes the row's codes

of uint32, and leaves have shapes (..., N/64, K/64, 128 * bits) and (..., N/64, K/64, 64 * words);
but of mxfp4 the scales of two rows are one word, (..., N/64, K/64, 32), and two tiles share affine
scales of 128 k, and those of mode "fp8" (``prepack_fp8``): (..., N/64, K/128, 64). Scales and
biases that are float16 are pairs of uint16 instead of words; those that are float32 are two words,
the scale and the bias, so that there are twice as many: (words, 32 pairs, 2 rows, 2). Of a weight's
words all threads' first
four (or two, or one, as ``packed_codes`` says) come before all threads' next.
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
from . import array, format, in_groups, packed_codes
from .array import Quantized
from .layouts import Layout, checked_global_scale, register

_TILE = 64
_SCALES = (jnp.bfloat16, jnp.float16, jnp.float32)


@listed
def prepack(
    w: Quantized, *, scales_dtype: DTypeLike | None = None, strict: bool = False
) -> Quantized:
    """``dequantize(prepack(w)) == dequantize(w)``; **K, the last axis, is grouped**.

    The same values in the layout that the fast kernels read. For Hopper: all modes; N and K
    multiples of 64; activations of any dtype, and their gradients. For other GPUs: codes of 4 bits,
    in affine groups of 32 or more, whose scales have the 16-bit dtype of the activations; the
    product, not its gradients. Mode ``"fp8"`` needs codes
    of float8_e4m3fn, K a multiple of 128, and blocks of as many columns or of whole rows. Such
    a weight gets layout ``"sm90"``; any other is returned as it is, with a warning that says
    why. Every function accepts both layouts: one without a kernel for a layout puts the codes
    (not the values) back in order first, which takes longer than the product. On Hopper these
    products pack a weight that is not packed, each time anew: of many rows (1024 per matrix,
    2048 with 6 and 8 bits); of float16 x (nvfp4 and mxfp4 from 32 rows per matrix on, ``"affine"``
    with scales of another dtype from one); of float32 x beside ``"affine"`` and ``"fp8"`` (from one
    row per matrix on); of ``"affine"`` weights with float32 scales or groups of 16 (from 9, ``dx``
    from one on); ``dx`` of 16-bit cotangents (from 512 per matrix, 2048 with 6 and 8 bits). They
    need memory for a copy of the weight. Exceptions are mxfp8, ``nvfp4_grouped_mm`` if K is a
    multiple of 128, and ``implementation="sm80"``. The layout may change with this package's
    version: store the weight as it was.

    Args:
      w: a :class:`Quantized` ``(..., N, K)``.
      scales_dtype: bfloat16 or float16, the dtype of the activations: the scales and biases of mode
        ``"affine"`` are rounded to it first, which changes values: those of AWQ and GPTQ
        checkpoints, and of weights that were quantized from float32, are float32. Products are
        faster then. None leaves them. Other modes have no such scales.
      strict: raise an error, instead of a warning, if ``w`` has no such layout.

    Returns:
      A :class:`Quantized` that stands for the same array, bit for bit (zeros of nvfp4 groups whose
      scale is 0 lose their sign; an mxfp8 group of scale 2^127 that has a NaN becomes all NaN), but
      for ``scales_dtype``, and for the scales of mode ``"fp8"``: they keep 16 bits (15 where one of
      128 codes is NaN), and those of 2^40 or more become infinite. Its global scale has a gradient,
      its other scales none. Under Explicit sharding it is sharded as ``w.weight`` is.

    Raises:
      ValueError, TypeError: as :func:`dequantize`; ``scales_dtype`` is none of those;
        with ``strict``, w has no such layout; or w is explicitly sharded in parts of N or K that
        are not whole tiles of 64 (and quantization groups).

    Warns:
      UserWarning: w is returned as it is.

    Examples:
      >>> w = jax.random.normal(jax.random.key(0), (2, 64, 128), jnp.bfloat16)
      >>> packed = jgg.prepack(jgg.quantize(w, mode="nvfp4", contract=-1))
      >>> packed.layout
      'sm90'
      >>> jgg.grouped_qmm(jnp.ones((5, 128), jnp.bfloat16), packed, jnp.array([2, 3])).shape
      (5, 64)
    """
    w = array.checked("prepack", "w", w)
    check.flag("prepack", "strict", strict)
    given = jnp.bfloat16 if scales_dtype is None else scales_dtype
    if (dtype := check.of_dtype("prepack", "scales_dtype", given)) not in _SCALES:
        raise ValueError(
            f"jgg.prepack: scales_dtype={dtype.name} is not None, bfloat16, float16 or float32"
        )
    kind = format.of(w)
    if w.layout == "linear" and scales_dtype is not None:
        w = kind.with_scales_of(w, scales_dtype)
    if w.layout == "sm90" or 0 in w.shape:
        return w
    why = f"its layout is {w.layout!r}, not 'linear'"
    if w.layout == "linear":
        why = _unpackable(w)
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
    w = format.packed_of(w.mode).by_rows(w)
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
    q = format.packed_of(w.mode).prepack_operand(w)
    weight, scales = pack(
        q.weight, q.scales, q.biases, mode=q.mode, bits=q.bits, group_size=q.group_size,
        block=q.block,
    )  # fmt: skip
    if q.scales.dtype == jnp.float16:
        scales = _halves(scales)
    return dataclasses.replace(w, weight=weight, scales=scales, biases=None, layout="sm90")


def _halves(words):
    """uint16 (..., 2 n) of uint32 (..., n), the lower half of each first."""
    pairs = lax.bitcast_convert_type(words, jnp.uint16)
    return pairs.reshape(*words.shape[:-1], -1)


# One program, also where the user's code is none: see ``operations.operation``.
_packed_alone = jax.jit(lambda w: _packed(w, _PREPACK), inline=INLINE)


def packable(w: Quantized) -> bool:
    """Whether there is a packed layout for it."""
    return _unpackable(w) is None


def _unpackable(w: Quantized) -> str | None:
    """Why there is no packed layout for it."""
    if len(w.shape) < 2 or w.axis != -1:
        return f"its shape is {w.shape} with axis={w.axis}, not (..., N, K) with axis=-1"
    return format.of(w).unpackable(w, _TILE)


def unpacked(w: Quantized) -> Quantized:
    """``w`` in layout "linear". Where it is explicitly sharded, each device unpacks its tiles."""
    q = by_rows(w)
    return q if w is q else format.packed_of(w.mode).in_blocks_of(q, w)


def by_rows(w: Quantized) -> Quantized:
    """The same with scales for each row, as the packed layout has them and products may take
    them."""
    if w.layout == "linear":
        return w
    mesh = partition.explicit_mesh((w.weight, w.scales))
    if mesh is None or partition.maps_explicit_axes():
        return _unpack(w, mapped=mesh is not None)
    spec, group = _spec(w), format.packed_of(w.mode).codes_per_word(w.group_size)
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
    return _packed(w, functools.partial(_call, metadata=metadata, rows=rows))


@jax.jit
def _prepack(w: Quantized) -> Quantized:
    return _in_tiles(w, *format.packed_of(w.mode).codes_and_words(w))


def _in_tiles(w: Quantized, codes, words) -> Quantized:
    *lead, n, k = w.shape
    # (..., tile of n, warp, h, g, tile of k, step, i, j, e), see the module's docstring.
    codes = codes.reshape(*lead, n // _TILE, 4, 2, 8, k // _TILE, 4, 2, 4, 2)
    codes = _permute(codes, (0, 4, 1, 3, 7, 5, 6, 2, 8))  # ..., warp, g, j, step, i, h, e
    codes = codes.reshape(*lead, n // _TILE, k // _TILE, 128, 16, 2)
    kind = format.packed_of(w.mode)
    scale_tiles, count = kind.packed_scales(w.group_size, k // _TILE)
    each = 1 if words.ndim == len(lead) + 2 else words.shape[-1]  # of a scale
    words = words.reshape(*lead, n // _TILE, 4, 2, 8, scale_tiles, -1, each)
    words = _permute(words, (0, 4, 5, 1, 3, 2, 6))
    if kind.rows_per_word == 2:
        words = words[..., 0, :] | words[..., 1, :] << 16
    weight = kind.interleave(codes, w.bits)
    return dataclasses.replace(
        w,
        weight=packed_codes.in_pieces(weight),
        scales=words.reshape(*lead, n // _TILE, scale_tiles, count * each),
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


def _call(weight, scales, biases, *, mode: str, **static):
    return format.packed_of(mode).prepack_call(weight, scales, biases, **static)


_PREPACK = conversion.composed("prepack", _leaves, _call, in_groups.problem, _in_batch)


@functools.partial(jax.jit, static_argnames="mapped")
def _unpack(w: Quantized, mapped: bool = False) -> Quantized:
    """``mapped``: by a vmap over an axis that is explicitly sharded. JAX does not see that several
    splits at once leave that axis alone, unless it is told that no other one is sharded."""

    def reshape(a, *shape):
        whole = partition._in_own_mesh(a, [()] * len(shape)) if mapped else None
        return lax.reshape(a, shape, out_sharding=whole)

    *lead, n, k = w.shape
    words = packed_codes.from_pieces(w.weight, w.bits)
    kind = format.packed_of(w.mode)
    codes = kind.separate(words, w.bits)
    tiles = (*lead, n // _TILE, k // _TILE)
    codes = reshape(codes, *tiles, 4, 8, 4, 4, 2, 2, 2)
    codes = reshape(_permute(codes, (0, 2, 7, 3, 1, 5, 6, 4, 8)), *lead, n, k)
    words = w.scales
    if words.dtype == jnp.uint16:
        pairs = reshape(words, *words.shape[:-1], words.shape[-1] // 2, 2)
        words = lax.bitcast_convert_type(pairs, jnp.uint32)
    *tiles, count = words.shape
    if kind.rows_per_word == 2:
        words = jnp.stack([words & u32(0xFFFF), words >> 16], axis=-1)
    each = kind.words_of_scale(w)
    count = max(count // (_TILE * each), 1)  # of a line
    words = reshape(words, *tiles, count, 4, 8, 2, each)
    of_scale = (each,) if each > 1 else ()
    words = _permute(words, (0, 3, 5, 4, 1, 2, 6))
    words = reshape(words, *lead, n, tiles[-1] * count, *of_scale)
    return kind.of_codes_and_words(w, codes, words, reshape)


def _permute(a, last):
    """Transpose the last axes only."""
    lead = a.ndim - len(last)
    return a.transpose(*range(lead), *(lead + i for i in last))


class _Sm90(Layout):
    """Tiles of 64 x 64, as this file's docstring describes them."""

    name, axes = "sm90", (-1,)

    def shape(self, q) -> tuple[int, ...]:
        *lead, rows, columns, _ = q.weight.shape
        return (*lead, _TILE * rows, _TILE * columns)

    def checked(self, op: str, name: str, q: Quantized) -> Quantized:
        *lead, rows, columns, _ = (1, 1, 1, *q.weight.shape)[-max(q.weight.ndim, 3) :]
        kind = format.packed_of(q.mode)
        scale_tiles, words = kind.packed_scales(q.group_size, columns)
        words *= 2 if q.scales.dtype == jnp.uint16 else kind.words_of_scale(q)
        expected = (*lead, rows, columns, 128 * q.bits), (*lead, rows, scale_tiles, words)
        if (q.weight.shape, q.scales.shape) != expected or q.biases is not None:
            raise ValueError(
                f"jgg.{op}: {name} has weight {describe(q.weight)} and scales "
                f"{describe(q.scales)}, which jgg.prepack did not make: layout {q.layout!r} has "
                f"shapes {expected}"
            )
        for leaf, dtypes in ((q.weight, ("uint32",)), (q.scales, kind.words)):
            if leaf.dtype.name not in dtypes:
                raise TypeError(
                    f"jgg.{op}: {name} in layout {q.layout!r} is {' or '.join(dtypes)}, got "
                    f"{leaf.dtype}"
                )
        global_scale = checked_global_scale(op, q.mode, q.global_scale, q.shape, f"{name}.")
        return dataclasses.replace(q, global_scale=global_scale)

    def to_linear(self, q: Quantized) -> Quantized:
        return unpacked(q)


register(_Sm90())
