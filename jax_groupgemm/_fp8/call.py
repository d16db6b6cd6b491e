"""The custom calls of FP8's products: operands, results and attributes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from .._core.products import Mm
from .._grouped.call import attributes, metadata_flags
from .._kernels import choose, extension
from .._quantized import padding
from .._quantized import product as quantized_product
from .._quantized.operands import as_promised
from . import blocks


def grouped_mm(plan: choose.Plan, x, w, groups, options, *, product: Mm):
    """Custom call ``jgg_fp8_grouped_mm``: x, its scales, w, its scales, metadata[, group_offset] ->
    out. Options are done to float32 sums behind it. Lines of codes, and of the result, are padded
    to whole 16 bytes. Where w has a scale for each matrix, so does x, and the call is a fast one.
    ``jgg_fp8_grouped_mm_sm89`` is the same; ``jgg_fp8_grouped_mm_sm100`` has a
    workspace, and no float16 results."""
    fast = w.block is None
    if not product.transpose_w:  # eight bits are multiplied as they lie, along K
        scales = w.scales if fast else w.scales.swapaxes(1, 2)
        w = dataclasses.replace(w, weight=w.weight.swapaxes(1, 2), scales=scales)
    rest, n = groups.narrow(x.shape[0], w.shape[0]), w.shape[1]
    # Blocks of 128 have whole pieces of 16 and 8, so there are no more scales.
    rows, weight = _padded(x.weight, 1, 16), _padded(_padded(w.weight, 2, 16), 1, 8)
    operands = rows, x.scales.reshape(1) if fast else x.scales, weight, w.scales, *rest
    flags = {
        "metadata": metadata_flags(groups),
        "clears_rest": product.clears_rest,
    }

    def run_sm90(of: Mm):
        dtype = _of_fast(of.out_dtype) if fast else of.out_dtype
        first = not fast and plan.config["rows_first"] and dtype.name != "float32"
        out = jax.ShapeDtypeStruct((of.rows, weight.shape[1]), dtype)
        call = jax.ffi.ffi_call("jgg_fp8_grouped_mm", out)
        more = {"rows_first": first, "fast": fast}
        return _cut(call(*operands, **attributes(flags | more)), 1, n).astype(of.out_dtype)

    def run_sm89(of: Mm):
        out = jax.ShapeDtypeStruct((of.rows, weight.shape[1]), of.out_dtype)
        call = jax.ffi.ffi_call("jgg_fp8_grouped_mm_sm89", out)
        return _cut(call(*operands, **attributes(flags)), 1, n)

    def run_sm100(of: Mm):
        dtype = jnp.float32 if of.out_dtype.name == "float16" else of.out_dtype
        out = jax.ShapeDtypeStruct((of.rows, weight.shape[1]), dtype)
        results = out, _workspace(w.shape[0], groups.count)
        call = jax.ffi.ffi_call("jgg_fp8_grouped_mm_sm100", results)
        return _cut(call(*operands, **attributes(flags))[0], 1, n).astype(of.out_dtype)

    run = {"sm90": run_sm90, "sm89": run_sm89, "sm100": run_sm100}[plan.kernel.name]

    if options.nothing:
        return run(product)
    return quantized_product.FUSED.with_options(run, groups, w, options, product)


def grouped_wgrad(plan: choose.Plan, x, dy, group_sizes, existing_out, *, dtype):
    """Custom call ``jgg_fp8_grouped_wgrad``: dy, its scales, x, its scales, pairs of rows[,
    existing_out] -> out. Lines of the result are padded to pieces of 8 columns. Scales come block
    by block, so that the kernel copies those of a tile at once; where there is one for each
    operand, the call is a fast one."""
    del plan
    rows, groups, fast = x.positions.shape[0], group_sizes.shape[0], x.block is None
    # So that the result is NaN where sizes are not those of the operands.
    scales = dy.scales * as_promised(group_sizes, blocks.GROUPED, x, dy)
    pairs = padding.padded_sizes(group_sizes, rows, blocks.GROUPED) // 2
    weight = _padded(x.weight, 0, 8)
    if fast:
        of_dy, of_x = scales.reshape(1), x.scales.reshape(1)
    else:
        of_dy, of_x = _staged(scales), _padded(x.scales, 0, 8).T
    made = _of_fast(dtype) if fast else dtype
    out = jax.ShapeDtypeStruct((groups, dy.shape[0], weight.shape[0]), made)
    more = [] if existing_out is None else [_padded(existing_out, 2, 8)]
    aliases = {5: 0} if more else None
    call = jax.ffi.ffi_call("jgg_fp8_grouped_wgrad", out, input_output_aliases=aliases)
    sums = call(
        dy.weight, of_dy, weight, of_x, pairs.astype(jnp.int32), *more,
        **attributes({"existing_out": bool(more), "fast": fast}),
    )  # fmt: skip
    return _cut(sums, 2, x.shape[0]).astype(dtype)


def _of_fast(dtype):
    """The dtype of a fast kernel's result, none of which is float16."""
    return jnp.dtype(jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype)


def grouped_wgrad_sm89(plan: choose.Plan, x, dy, group_sizes, existing_out, *, dtype):
    """Custom call ``jgg_fp8_grouped_wgrad_sm89``: dy, its scales, x, its scales, pairs of rows[,
    existing_out] -> out."""
    del plan
    groups = group_sizes.shape[0]
    operands, aliases = _wgrad_operands(x, dy, group_sizes, existing_out, unit=2)
    out = jax.ShapeDtypeStruct((groups, dy.shape[0], operands[2].shape[0]), dtype)
    call = jax.ffi.ffi_call("jgg_fp8_grouped_wgrad_sm89", out, input_output_aliases=aliases)
    sums = call(*operands, **attributes({"existing_out": aliases is not None}))
    return _cut(sums, 2, x.shape[0])


def grouped_wgrad_sm100(plan: choose.Plan, x, dy, group_sizes, existing_out, *, dtype):
    """Custom call ``jgg_fp8_grouped_wgrad_sm100``: dy, its scales, x, its scales, sizes[,
    existing_out] -> out, workspace. Sizes are those of padded groups."""
    del plan
    groups = group_sizes.shape[0]
    operands, aliases = _wgrad_operands(x, dy, group_sizes, existing_out, unit=1)
    out = jax.ShapeDtypeStruct((groups, dy.shape[0], operands[2].shape[0]), jnp.float32)
    results = out, _workspace(groups, groups)
    call = jax.ffi.ffi_call("jgg_fp8_grouped_wgrad_sm100", results, input_output_aliases=aliases)
    sums, _ = call(*operands, **attributes({"existing_out": aliases is not None}))
    return _cut(sums, 2, x.shape[0]).astype(dtype)


def _wgrad_operands(x, dy, group_sizes, existing_out, *, unit: int):
    """Those of a kernel that reads scales as they are stored, and which of them are results. Sizes
    are those of padded groups, in so many rows."""
    scales = dy.scales * as_promised(group_sizes, blocks.GROUPED, x, dy)
    sizes = padding.padded_sizes(group_sizes, x.positions.shape[0], blocks.GROUPED) // unit
    weight, x_scales = (_padded(a, 0, 8) for a in (x.weight, x.scales))
    more = [] if existing_out is None else [_padded(existing_out, 2, 8)]
    operands = dy.weight, scales, weight, x_scales, sizes.astype(jnp.int32), *more
    return operands, {5: 0} if more else None


def _workspace(groups: int, count: int) -> jax.ShapeDtypeStruct:
    """That of a Blackwell kernel."""
    size = extension.rules().sm100_workspace(weights=groups, count=count, scaled=True)
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def _staged(scales):
    """(N, blocks) -> (blocks, ceil(N / 64) * 80): of every 64 scales those that a lane of four
    reads, 2 q and 2 q + 1 of each 8, and 4 floats that nothing reads (ffi/fp8/gemm_sm90.h)."""
    n, blocks = scales.shape
    pieces = -(-n // 64)
    lanes = _padded(scales, 0, 64).T.reshape(blocks, pieces, 8, 4, 2).swapaxes(2, 3)
    lanes = lanes.reshape(blocks, pieces, 4, 16)
    return jnp.pad(lanes, [(0, 0)] * 3 + [(0, 4)]).reshape(blocks, 80 * pieces)


def _padded(a, axis: int, unit: int):
    """Zeros behind an axis, up to a multiple of ``unit``. Codes of 0 are the number 0."""
    more = -a.shape[axis] % unit
    if not more:
        return a
    return jnp.pad(a, [(0, more if i == axis else 0) for i in range(a.ndim)])


def _cut(a, axis: int, size: int):
    """Without what :func:`_padded` added."""
    return a if a.shape[axis] == size else lax.slice_in_dim(a, 0, size, axis=axis)
