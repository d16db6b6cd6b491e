"""The custom calls of FP8's products: operands, results and attributes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from .._core.products import Mm
from .._grouped.call import attributes, metadata_flags
from .._kernels import choose
from .._quantized import padding
from .._quantized import product as quantized_product
from .._quantized.operands import as_promised
from . import blocks


def grouped_mm(plan: choose.Plan, x, w, groups, options, *, product: Mm):
    """Custom call ``jgg_fp8_grouped_mm``: x, its scales, w, its scales, metadata[, group_offset] ->
    out. Options are done to float32 sums behind it. Lines of codes, and of the result, are padded
    to whole 16 bytes."""
    if not product.transpose_w:  # eight bits are multiplied as they lie, along K
        w = dataclasses.replace(w, weight=w.weight.swapaxes(1, 2), scales=w.scales.swapaxes(1, 2))
    rest, n = groups.narrow(x.shape[0], w.shape[0]), w.shape[1]
    # Blocks of 128 have whole pieces of 16 and 8, so there are no more scales.
    rows, weight = _padded(x.weight, 1, 16), _padded(_padded(w.weight, 2, 16), 1, 8)
    flags = {
        "metadata": metadata_flags(groups),
        "clears_rest": product.clears_rest,
    }

    def run(of: Mm):
        first = plan.config["rows_first"] and of.out_dtype.name != "float32"
        out = jax.ShapeDtypeStruct((of.rows, weight.shape[1]), of.out_dtype)
        call = jax.ffi.ffi_call("jgg_fp8_grouped_mm", out)
        out = call(
            rows, x.scales, weight, w.scales, *rest, **attributes(flags | {"rows_first": first})
        )
        return _cut(out, 1, n)

    if options.nothing:
        return run(product)
    return quantized_product.FUSED.with_options(run, groups, w, options, product)


def grouped_wgrad(plan: choose.Plan, x, dy, group_sizes, existing_out, *, dtype):
    """Custom call ``jgg_fp8_grouped_wgrad``: dy, its scales, x, its scales, pairs of rows[,
    existing_out] -> out. Lines of the result are padded to pieces of 8 columns. Scales come block
    by block, so that the kernel copies those of a tile at once."""
    del plan
    rows, groups = x.positions.shape[0], group_sizes.shape[0]
    # So that the result is NaN where sizes are not those of the operands.
    scales = dy.scales * as_promised(group_sizes, blocks.GROUPED, x, dy)
    pairs = padding.padded_sizes(group_sizes, rows, blocks.GROUPED) // 2
    weight, x_scales = (_padded(a, 0, 8) for a in (x.weight, x.scales))
    out = jax.ShapeDtypeStruct((groups, dy.shape[0], weight.shape[0]), dtype)
    more = [] if existing_out is None else [_padded(existing_out, 2, 8)]
    aliases = {5: 0} if more else None
    call = jax.ffi.ffi_call("jgg_fp8_grouped_wgrad", out, input_output_aliases=aliases)
    sums = call(
        dy.weight, _staged(scales), weight, x_scales.T, pairs.astype(jnp.int32), *more,
        **attributes({"existing_out": bool(more)}),
    )  # fmt: skip
    return _cut(sums, 2, x.shape[0])


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
