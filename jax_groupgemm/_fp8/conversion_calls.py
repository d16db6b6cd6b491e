"""The custom calls of conversions to and from mode "fp8": operands, results and attributes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from .._core import segments
from .._core.segments import Metadata
from .._grouped.call import attributes, metadata_flags
from .._quantized import padding
from . import blocks
from .prepack import packed_scales


def quantize(x, group_sizes, seed, row_index, *, block, axis, scale_format, element):
    """Custom call ``jgg_fp8_quantize``: x (M, R, C), sizes, seed, list of rows -> codes, scales,
    workspace. All but x may be empty. The kernel of square blocks takes no sizes: rows that no
    group has become zeros before it."""
    *lead, stored, columns = (1, *x.shape)[-max(x.ndim, 2) :]
    rows = stored if row_index is None else row_index.shape[0]
    lines, along = (rows, columns) if axis == -1 else (columns, rows)
    sizes, words = jnp.zeros((0,), jnp.int32), 0
    if group_sizes is not None and block == blocks.TILE:
        inside = padding.covered(group_sizes, rows)
        x = jnp.where(inside[:, None], x, jnp.zeros((), x.dtype))
    elif group_sizes is not None:
        (groups,) = group_sizes.shape
        sizes, *_ = segments.sizes(group_sizes).narrow(rows, groups)
        words = 2 * (groups + 1)
        if axis == -2:
            along = padding.padded_rows(rows, groups, blocks.GROUPED)
            words += 2 * (along // blocks.GROUPED)
    matrices, dtype = math.prod(lead), blocks.ELEMENTS[element].dtype
    results = (
        jax.ShapeDtypeStruct((matrices, lines, along), dtype),
        jax.ShapeDtypeStruct(blocks.scales_shape((matrices, lines, along), block), jnp.float32),
        jax.ShapeDtypeStruct((words,), jnp.int32),
    )
    flags = {
        "along_rows": axis == -2,
        "square": block == blocks.TILE,
        "power_of_two": scale_format == "e8m0",
    }
    seed = jnp.zeros((0,), jnp.uint32) if seed is None else seed
    listed = jnp.zeros((0,), jnp.int32) if row_index is None else row_index
    operands = x.reshape(matrices, stored, columns), sizes, seed, listed
    codes, scales, _ = jax.ffi.ffi_call("jgg_fp8_quantize", results)(*operands, **attributes(flags))
    shape = (*x.shape[:-2], lines, along)[-x.ndim :]
    return codes.reshape(shape), scales.reshape(blocks.scales_shape(shape, block))


def quantize_both(x, *, block, axis):
    """Custom call ``jgg_fp8_quantize_both``: x (M, R, C) -> codes, scales, and those of its
    transpose. Blocks along ``axis`` come first."""
    assert block == blocks.TILE
    *lead, rows, columns = x.shape
    matrices = math.prod(lead)
    results = []
    for shape in ((rows, columns), (columns, rows)):
        codes = jax.ShapeDtypeStruct((matrices, *shape), jnp.float8_e4m3fn)
        scales = jax.ShapeDtypeStruct(blocks.scales_shape(codes.shape, block), jnp.float32)
        results += codes, scales
    found = jax.ffi.ffi_call("jgg_fp8_quantize_both", results)(x.reshape(matrices, rows, columns))
    found = [a.reshape(*lead, *a.shape[1:]) for a in found]
    return found if axis == -1 else found[2:] + found[:2]


def quantize_lines(x, group_sizes):
    """Custom call ``jgg_fp8_quantize_lines``: x (R, C), sizes -> codes and scales in blocks along
    C, those along R, workspace."""
    rows, columns = x.shape
    sizes, *_ = segments.sizes(group_sizes).narrow(rows, group_sizes.shape[0])
    along = padding.padded_rows(rows, sizes.shape[0], blocks.GROUPED)
    results = []
    for shape in ((rows, columns), (columns, along)):
        results.append(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn))
        results.append(jax.ShapeDtypeStruct(blocks.scales_shape(shape, blocks.LINE), jnp.float32))
    words = 2 * (sizes.shape[0] + 1) + 2 * (along // blocks.GROUPED)
    results.append(jax.ShapeDtypeStruct((words,), jnp.int32))
    return tuple(jax.ffi.ffi_call("jgg_fp8_quantize_lines", results)(x, sizes)[:4])


def dequantize(codes, scales, *, block, dtype):
    """Custom call ``jgg_fp8_dequantize``: codes (M, R, C), scales -> values."""
    matrices = math.prod(codes.shape[:-2])
    shape = (matrices, *(1, *codes.shape)[-2:])
    out = jax.ShapeDtypeStruct(shape, dtype)
    scales = scales.reshape(blocks.scales_shape(shape, block))
    call = jax.ffi.ffi_call("jgg_fp8_dequantize", out)
    return call(codes.reshape(shape), scales, square=block == blocks.TILE).reshape(codes.shape)


def prepack(weight, scales, *, block, metadata: Metadata | None = None, rows: int = 0):
    """Custom call ``jgg_prepack_fp8``: weight (G, N, K), scales of blocks[, metadata]
    [, group_offset] -> weight, scales. With metadata, of matrices that have rows; what others are
    is not said."""
    *lead, n, k = weight.shape
    groups = math.prod(lead)
    results = [
        jax.ShapeDtypeStruct((groups, n // 64, *shape), jnp.uint32)
        for shape in ((k // 64, 1024), packed_scales(k // 64))
    ]
    flags: dict[str, Any] = {"block": dict(zip(("rows", "columns"), block, strict=True))}
    flags["metadata"] = {"kind": "", "swapped": False, "group_offset": False}
    operands = [a.reshape(groups, *a.shape[-2:]) for a in (weight, scales)]
    if metadata is not None:
        flags["metadata"] = metadata_flags(metadata)
        operands += metadata.narrow(rows, groups)
    out = jax.ffi.ffi_call("jgg_prepack_fp8", results)(*operands, **attributes(flags))
    return tuple(a.reshape(*lead, *a.shape[1:]) for a in out)
