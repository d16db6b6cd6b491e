"""The custom calls of quantized weights: operands, results and attributes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from .._core import segments
from .._core.products import Mm
from .._core.segments import Metadata
from .._grouped.call import NO_EPILOGUE, Epilogue, attributes, epilogue_flags, metadata_flags
from .._kernels import choose, problems
from . import formats, fp8, ordered, padding


def qmm_problem(
    platform, x, q, metadata: Metadata, product: Mm, epilogue: Epilogue = NO_EPILOGUE, *,
    packable: bool = False,
) -> problems.Qmm:  # fmt: skip
    """``qmm`` of these operands, as kernels see it; ``packable``: ``prepack`` takes the weight."""
    groups, k, n = product.sizes(q)
    return problems.Qmm(
        op="qmm", platform=platform, implementation=product.implementation, dtypes=(x.dtype.name,),
        out_dtype=product.out_dtype.name, empty=0 in (*x.shape, *q.shape), rows=product.rows,
        groups=groups,
        # Rows may be of groups that are not here.
        all_groups=groups if metadata.group_offset is None else metadata.count,
        k=k, n=n, mode=q.mode, bits=q.bits, layout=q.layout, scales_dtype=q.scales.dtype.name,
        packable=packable, in_order=metadata.form.ordered_y, transpose_w=product.transpose_w,
        **epilogue.facts(),
    )  # fmt: skip


def qmm(choice: choose.Choice, x, q, metadata: Metadata, product: Mm,
        epilogue: Epilogue = NO_EPILOGUE, *, x_is_ordered: bool = False):  # fmt: skip
    """Custom call ``jgg_qmm``: x, weight, scales, metadata[, biases][, global_scale]
    [, group_offset][, bias][, row_scale] -> out; ``jgg_qmm_packed`` for a prepacked weight.

    ``x_is_ordered``: x has its columns as :func:`ordered.ordered` puts them, for this choice.
    """
    rows, (groups, _, n) = product.rows, product.sizes(q)
    assert epilogue.existing_out is None
    columns = n // 2 if epilogue.gated else n
    groups_of_rows, *offset = metadata.narrow(x.shape[0], groups)
    if 0 in (rows, columns, *x.shape, *q.weight.shape, *groups_of_rows.shape):
        return jnp.zeros((rows, columns), product.out_dtype)
    flags: dict[str, Any] = {
        "quantized": flags_of(q),
        "metadata": metadata_flags(metadata),
        "epilogue": epilogue_flags(epilogue),
    }
    if choice.target == "jgg_qmm":
        x_ordered = choice.config.get("x_ordered", False)
        if x_ordered and not x_is_ordered:
            x = ordered.ordered(x, q.bits)
        assert x_ordered or not x_is_ordered
        flags["qmm"] = {
            "transpose_w": product.transpose_w,
            "x_ordered": x_ordered,
            "in_order": metadata.form.ordered_y,
            "tf32": product.tf32,
        }
    options = [value for value in (q.biases, q.global_scale, *offset) if value is not None]
    call = jax.ffi.ffi_call(choice.target, jax.ShapeDtypeStruct((rows, columns), product.out_dtype))
    return call(
        x, q.weight, q.scales, groups_of_rows, *options, *epilogue.arrays, **attributes(flags)
    )


def quantize(w, global_scale, *, mode, bits, group_size):
    """Custom call ``jgg_quantize``: w (R, K)[, global_scale (L,)] -> weight, scales[, biases]."""
    *lead, k = w.shape
    rows = math.prod(lead)
    scales = jax.ShapeDtypeStruct(
        (rows, k // group_size), w.dtype if mode == "affine" else jnp.uint8
    )
    results = jax.ShapeDtypeStruct((rows, k * bits // 32), jnp.uint32), scales
    results += (scales,) if mode == "affine" else ()
    biases = True if mode == "affine" else None  # a result
    flags = {"quantized": _quantized_flags(mode, bits, group_size, biases, global_scale)}
    more = [] if global_scale is None else [global_scale.reshape(-1)]
    call = jax.ffi.ffi_call("jgg_quantize", results)
    out = call(w.reshape(rows, k), *more, **attributes(flags))
    return tuple(a.reshape(*lead, a.shape[1]) for a in out)


def fp8_quantize(x, group_sizes, seed, row_index, *, block, axis, scale_format, element):
    """Custom call ``jgg_fp8_quantize``: x (M, R, C), sizes, seed, list of rows -> codes, scales,
    workspace. All but x may be empty. The kernel of square blocks takes no sizes: rows that no
    group has become zeros before it."""
    *lead, stored, columns = (1, *x.shape)[-max(x.ndim, 2) :]
    rows = stored if row_index is None else row_index.shape[0]
    lines, along = (rows, columns) if axis == -1 else (columns, rows)
    sizes, words = jnp.zeros((0,), jnp.int32), 0
    if group_sizes is not None and block == fp8.TILE:
        inside = padding.covered(group_sizes, rows)
        x = jnp.where(inside[:, None], x, jnp.zeros((), x.dtype))
    elif group_sizes is not None:
        (groups,) = group_sizes.shape
        sizes, *_ = segments.sizes(group_sizes).narrow(rows, groups)
        words = 2 * (groups + 1)
        if axis == -2:
            along = padding.padded_rows(rows, groups, fp8.GROUPED)
            words += 2 * (along // fp8.GROUPED)
    matrices, dtype = math.prod(lead), fp8.ELEMENTS[element].dtype
    results = (
        jax.ShapeDtypeStruct((matrices, lines, along), dtype),
        jax.ShapeDtypeStruct(fp8.scales_shape((matrices, lines, along), block), jnp.float32),
        jax.ShapeDtypeStruct((words,), jnp.int32),
    )
    flags = {
        "along_rows": axis == -2,
        "square": block == fp8.TILE,
        "power_of_two": scale_format == "e8m0",
    }
    seed = jnp.zeros((0,), jnp.uint32) if seed is None else seed
    listed = jnp.zeros((0,), jnp.int32) if row_index is None else row_index
    operands = x.reshape(matrices, stored, columns), sizes, seed, listed
    codes, scales, _ = jax.ffi.ffi_call("jgg_fp8_quantize", results)(*operands, **attributes(flags))
    shape = (*x.shape[:-2], lines, along)[-x.ndim :]
    return codes.reshape(shape), scales.reshape(fp8.scales_shape(shape, block))


def fp8_quantize_both(x, *, block, axis):
    """Custom call ``jgg_fp8_quantize_both``: x (M, R, C) -> codes, scales, and those of its
    transpose. Blocks along ``axis`` come first."""
    assert block == fp8.TILE
    *lead, rows, columns = x.shape
    matrices = math.prod(lead)
    results = []
    for shape in ((rows, columns), (columns, rows)):
        codes = jax.ShapeDtypeStruct((matrices, *shape), jnp.float8_e4m3fn)
        scales = jax.ShapeDtypeStruct(fp8.scales_shape(codes.shape, block), jnp.float32)
        results += codes, scales
    found = jax.ffi.ffi_call("jgg_fp8_quantize_both", results)(x.reshape(matrices, rows, columns))
    found = [a.reshape(*lead, *a.shape[1:]) for a in found]
    return found if axis == -1 else found[2:] + found[:2]


def fp8_quantize_lines(x, group_sizes):
    """Custom call ``jgg_fp8_quantize_lines``: x (R, C), sizes -> codes and scales in blocks along
    C, those along R, workspace."""
    rows, columns = x.shape
    sizes, *_ = segments.sizes(group_sizes).narrow(rows, group_sizes.shape[0])
    along = padding.padded_rows(rows, sizes.shape[0], fp8.GROUPED)
    results = []
    for shape in ((rows, columns), (columns, along)):
        results.append(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn))
        results.append(jax.ShapeDtypeStruct(fp8.scales_shape(shape, fp8.LINE), jnp.float32))
    words = 2 * (sizes.shape[0] + 1) + 2 * (along // fp8.GROUPED)
    results.append(jax.ShapeDtypeStruct((words,), jnp.int32))
    return tuple(jax.ffi.ffi_call("jgg_fp8_quantize_lines", results)(x, sizes)[:4])


def fp8_dequantize(codes, scales, *, block, dtype):
    """Custom call ``jgg_fp8_dequantize``: codes (M, R, C), scales -> values."""
    matrices = math.prod(codes.shape[:-2])
    shape = (matrices, *(1, *codes.shape)[-2:])
    out = jax.ShapeDtypeStruct(shape, dtype)
    scales = scales.reshape(fp8.scales_shape(shape, block))
    call = jax.ffi.ffi_call("jgg_fp8_dequantize", out)
    return call(codes.reshape(shape), scales, square=block == fp8.TILE).reshape(codes.shape)


def dequantize(weight, scales, biases, global_scale, *, mode, bits, group_size, dtype,
               ordered=False):  # fmt: skip
    """Custom call ``jgg_dequantize``: weight, scales[, biases], all (R, ...)[, global_scale (L,)]
    -> w. ``ordered``: with columns as :func:`ordered.ordered` puts them."""
    *lead, words = weight.shape
    rows, k = math.prod(lead), words * 32 // bits
    operands = [a.reshape(rows, a.shape[-1]) for a in (weight, scales, biases) if a is not None]
    if global_scale is not None:
        operands.append(global_scale.reshape(-1))
    flags: dict[str, Any] = {
        "quantized": _quantized_flags(mode, bits, group_size, biases, global_scale),
        "ordered": ordered,
    }
    call = jax.ffi.ffi_call("jgg_dequantize", jax.ShapeDtypeStruct((rows, k), dtype))
    return call(*operands, **attributes(flags)).reshape(*lead, k)


def prepack(weight, scales, biases, *, mode, bits, group_size, block,
            metadata: Metadata | None = None, rows: int = 0):  # fmt: skip
    """Custom call ``jgg_prepack``: weight, scales[, biases], all (R, ...) -> weight, scales, in
    tiles of 64 rows x 64 k. ``metadata``, of ``rows``, tells who reads them: see
    :func:`_prepack_fp8`."""
    if mode == "fp8":
        return _prepack_fp8(weight, scales, block, metadata, rows)
    *lead, n, words = weight.shape
    rows, k_tiles = math.prod((*lead, n)), words * 32 // bits // 64
    operands = [a.reshape(rows, a.shape[-1]) for a in (weight, scales, biases) if a is not None]
    scale_tiles, scale_words = formats.packed_scales(mode, group_size, k_tiles)
    results = [
        jax.ShapeDtypeStruct((rows // 64, *shape), jnp.uint32)
        for shape in ((k_tiles, 128 * bits), (scale_tiles, scale_words))
    ]
    flags = {"quantized": _quantized_flags(mode, bits, group_size, biases, None)}
    out = jax.ffi.ffi_call("jgg_prepack", results)(*operands, **attributes(flags))
    return tuple(a.reshape(*lead, n // 64, *a.shape[1:]) for a in out)


def _prepack_fp8(weight, scales, block, metadata: Metadata | None, rows: int):
    """Custom call ``jgg_prepack_fp8``: weight (G, N, K), scales of blocks[, metadata]
    [, group_offset] -> weight, scales. With metadata, of matrices that have rows; what others are
    is not said."""
    *lead, n, k = weight.shape
    groups = math.prod(lead)
    results = [
        jax.ShapeDtypeStruct((groups, n // 64, *shape), jnp.uint32)
        for shape in ((k // 64, 1024), formats.packed_scales("fp8", formats.FP8_GROUP, k // 64))
    ]
    flags: dict[str, Any] = {"block": dict(zip(("rows", "columns"), block, strict=True))}
    flags["metadata"] = {"kind": "", "swapped": False, "group_offset": False}
    operands = [a.reshape(groups, *a.shape[-2:]) for a in (weight, scales)]
    if metadata is not None:
        flags["metadata"] = metadata_flags(metadata)
        operands += metadata.narrow(rows, groups)
    out = jax.ffi.ffi_call("jgg_prepack_fp8", results)(*operands, **attributes(flags))
    return tuple(a.reshape(*lead, *a.shape[1:]) for a in out)


def flags_of(q) -> dict[str, Any]:
    """Those of an array of any layout."""
    group_size = formats.FP8_GROUP if q.mode == "fp8" else q.group_size
    flags = _quantized_flags(q.mode, q.bits, group_size, q.biases, q.global_scale)
    return flags | {"layout": q.layout}


def _quantized_flags(mode, bits, group_size, biases, global_scale) -> dict[str, Any]:
    """A dictionary of attributes that handlers share: ffi/quantized/attributes.h."""
    return {
        "mode": mode,
        "bits": bits,
        "group_size": group_size,
        "layout": "linear",
        "biases": biases is not None,
        "global_scale": global_scale is not None,
    }
