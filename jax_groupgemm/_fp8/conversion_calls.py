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


def codes_of(*shape: int, block=blocks.LINE, dtype=jnp.float8_e4m3fn):
    """Results: codes of this shape, and their scales."""
    scales = jax.ShapeDtypeStruct(blocks.scales_shape(shape, block), jnp.float32)
    return jax.ShapeDtypeStruct(shape, dtype), scales


def groups_of(group_sizes, rows: int, along_rows: bool):
    """Operand sizes, the padded rows, and the workspace where kernels find out about groups:
    ``Fp8GroupsWords``."""
    sizes, *_ = segments.sizes(group_sizes).narrow(rows, group_sizes.shape[0])
    (groups,) = sizes.shape
    along = padding.padded_rows(rows, groups, blocks.GROUPED)
    words = 2 * (groups + 1) + (2 * (along // blocks.GROUPED) if along_rows else 0)
    return sizes, along, jax.ShapeDtypeStruct((words,), jnp.int32)


def quantize(x, group_sizes, seed, row_index, *, axes, block, scale_format, element):
    """Custom call ``jgg_fp8_quantize``: x (M, R, C), sizes, seed, list of rows -> codes and scales
    of blocks along C, the same along R, workspace. All operands but x may be empty. ``axes`` are
    those whose codes are results. The kernel of square blocks takes no sizes: rows that no group
    has become zeros before it."""
    *lead, stored, columns = (1, *x.shape)[-max(x.ndim, 2) :]
    rows = along = stored if row_index is None else row_index.shape[0]
    sizes, workspace = jnp.zeros((0,), jnp.int32), jax.ShapeDtypeStruct((0,), jnp.int32)
    if group_sizes is not None and block == blocks.TILE:
        inside = padding.covered(group_sizes, rows)
        x = jnp.where(inside[:, None], x, jnp.zeros((), x.dtype))
    elif group_sizes is not None:
        sizes, along, workspace = groups_of(group_sizes, rows, -2 in axes)
    matrices, dtype = math.prod(lead), blocks.ELEMENTS[element].dtype
    shapes = {-1: (rows, columns), -2: (columns, along)}
    stored_axes = sorted(axes, reverse=True)
    results = [codes_of(matrices, *shapes[a], block=block, dtype=dtype) for a in stored_axes]
    flags = {
        "along_columns": -1 in axes,
        "along_rows": -2 in axes,
        "square": block == blocks.TILE,
        "power_of_two": scale_format == "e8m0",
    }
    seed = jnp.zeros((0,), jnp.uint32) if seed is None else seed
    listed = jnp.zeros((0,), jnp.int32) if row_index is None else row_index
    operands = x.reshape(matrices, stored, columns), sizes, seed, listed
    call = jax.ffi.ffi_call("jgg_fp8_quantize", [*sum(results, ()), workspace])
    *found, _ = call(*operands, **attributes(flags))
    made = {}
    for axis, codes, scales in zip(stored_axes, found[::2], found[1::2], strict=True):
        shape = (*x.shape[:-2], *shapes[axis])[-x.ndim :]
        made[axis] = codes.reshape(shape), scales.reshape(blocks.scales_shape(shape, block))
    return sum((made[axis] for axis in axes), ())


def cast(x, scales, group_sizes, row_index, *, axes, measures, element, power_of_two):
    """Custom call ``jgg_fp8_cast``: x (M, R, C), scales (M,), sizes, list of rows, - -> codes along
    ``axes``, largest magnitudes of each thread block, workspace. Or x are codes, without scales."""
    del power_of_two
    *lead, stored, columns = x.shape
    matrices, rows = math.prod(lead), stored if row_index is None else row_index.shape[0]
    sizes, along, workspace = _groups(group_sizes, rows, -2 in axes)
    dtype = blocks.ELEMENTS[element].dtype
    shapes = {-1: (rows, columns), -2: (columns, along)}
    stored_axes = sorted(axes, reverse=True)
    results = [jax.ShapeDtypeStruct((matrices, *shapes[a]), dtype) for a in stored_axes]
    if measures:
        tiles = -(-(along if -2 in axes else rows) // 128)
        results.append(_parts(matrices, tiles * -(-columns // 128)))
    listed = _none() if row_index is None else row_index
    operands = (
        x.reshape(matrices, stored, columns),
        jnp.zeros((0,), jnp.float32) if scales is None else scales.reshape(matrices),
        sizes,
        listed,
        _none(),
    )
    call = jax.ffi.ffi_call("jgg_fp8_cast", [*results, workspace])
    flags = {"along_columns": -1 in axes, "along_rows": -2 in axes, "largest": measures}
    *found, _ = call(*operands, **attributes(flags))
    made = {a: of.reshape(*lead, *shapes[a]) for a, of in zip(stored_axes, found, strict=False)}
    out = tuple(made[axis] for axis in axes)
    return (*out, found[-1].max(1).reshape(*lead, 2)) if measures else out


def largest(x, group_sizes, wanted):
    """Custom call ``jgg_fp8_cast``, of no codes: x (M, R, C), -, sizes, -, wanted -> largest
    magnitudes of each thread block, workspace."""
    *lead, rows, columns = x.shape
    matrices = math.prod(lead)
    sizes, _, workspace = _groups(group_sizes, rows, False)
    asked = _none() if wanted is None else wanted.reshape(1).astype(jnp.int32)
    # As many thread blocks as run at a time, or fewer where each has little to read.
    parts = max(1, min(rows * columns >> 14, 1056 // matrices))
    call = jax.ffi.ffi_call("jgg_fp8_cast", [_parts(matrices, parts), workspace])
    operands = (
        x.reshape(matrices, rows, columns),
        jnp.zeros((0,), jnp.float32),
        sizes,
        _none(),
        asked,
    )
    flags = {"along_columns": False, "along_rows": False, "largest": True}
    found, _ = call(*operands, **attributes(flags))
    return found.max(1).reshape(*lead, 2)


def _none():
    return jnp.zeros((0,), jnp.int32)


def _parts(matrices: int, parts: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((matrices, parts, 2), jnp.uint32)


def _groups(group_sizes, rows: int, along_rows: bool):
    """As :func:`groups_of`, also of rows without groups."""
    if group_sizes is None:
        return _none(), rows, jax.ShapeDtypeStruct((0,), jnp.int32)
    return groups_of(group_sizes, rows, along_rows)


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
