"""The custom calls of FP8's products: operands, results and attributes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .._core.products import Mm
from .._grouped.call import attributes, metadata_flags
from .._kernels import choose
from .._nvfp4.grouped_wgrad import as_promised
from .._quantized import fp8, padding
from .._quantized import product as quantized_product


def grouped_mm(choice: choose.Choice, x, w, groups, options, *, product: Mm):
    """Custom call ``jgg_fp8_grouped_mm``: x, its scales, w, its scales, metadata[, group_offset] ->
    out. Options are done to float32 sums behind it."""
    del choice
    if not product.transpose_w:  # eight bits are multiplied as they lie, along K
        w = dataclasses.replace(w, weight=w.weight.swapaxes(1, 2), scales=w.scales.swapaxes(1, 2))
    rest = groups.narrow(x.shape[0], w.shape[0])
    flags = {
        "metadata": metadata_flags(groups),
        "rows": {"x_rows": False, "y_rows": False},
        "clears_rest": product.clears_rest,
    }

    def run(of: Mm):
        out = jax.ShapeDtypeStruct((of.rows, w.shape[1]), of.out_dtype)
        call = jax.ffi.ffi_call("jgg_fp8_grouped_mm", out)
        return call(x.weight, x.scales, w.weight, w.scales, *rest, **attributes(flags))

    if options.nothing:
        return run(product)
    return quantized_product.FUSED.with_options(run, groups, w, options, product)


def grouped_wgrad(choice: choose.Choice, x, dy, group_sizes, existing_out, *, dtype):
    """Custom call ``jgg_fp8_grouped_wgrad``: dy, its scales, x, its scales, pairs of rows[,
    existing_out] -> out."""
    del choice
    rows, groups = x.positions.shape[0], group_sizes.shape[0]
    # So that the result is NaN where sizes are not those of the operands.
    scales = dy.scales * as_promised(group_sizes, fp8.GROUPED, x, dy)
    pairs = padding.padded_sizes(group_sizes, rows, fp8.GROUPED) // 2
    out = jax.ShapeDtypeStruct((groups, dy.shape[0], x.shape[0]), dtype)
    more = [] if existing_out is None else [existing_out]
    aliases = {5: 0} if more else None
    call = jax.ffi.ffi_call("jgg_fp8_grouped_wgrad", out, input_output_aliases=aliases)
    return call(
        dy.weight, scales, x.weight, x.scales, pairs.astype(jnp.int32), *more,
        **attributes({"existing_out": bool(more)}),
    )  # fmt: skip
