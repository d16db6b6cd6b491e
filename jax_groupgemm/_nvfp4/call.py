"""The custom calls of NVFP4: operands, results, attributes and aliases."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from .._core import segments
from .._grouped.call import attributes
from .._kernels import extension
from . import layouts


def nvfp4_grouped_mm(x, w, group_sizes, alpha, *, out_dtype):
    """Custom call ``jgg_nvfp4_grouped_mm``: x, its scales, w, its scales, sizes, alpha -> out,
    workspace."""
    (rows, k), (groups, n, _) = x.shape, w.shape
    sizes, *_ = segments.sizes(group_sizes).narrow(rows, groups)
    size = extension.rules().nvfp4_mm_workspace(tokens=rows, groups=groups, n=n, k=k)
    workspace = jax.ShapeDtypeStruct((size,), jnp.uint8)
    out = jax.ShapeDtypeStruct((rows, n), out_dtype)
    call = jax.ffi.ffi_call("jgg_nvfp4_grouped_mm", (out, workspace))
    return call(x.weight, x.scales, w.weight, w.scales, sizes, alpha)[0]


def nvfp4_grouped_wgrad(x, dy, group_sizes, alpha, beta=None, existing_out=None):
    """Custom call ``jgg_nvfp4_grouped_wgrad``: x, its scales, dy, its scales, sizes, alpha
    [, beta, existing_out] -> out, workspace."""
    (k, padded), (n, _), (rows,) = x.shape, dy.shape, x.positions.shape
    (groups,) = group_sizes.shape
    sizes, *_ = segments.sizes(group_sizes).narrow(rows, groups)
    size = extension.rules().nvfp4_wgrad_workspace(padded_tokens=padded, groups=groups, n=n, k=k)
    workspace = jax.ShapeDtypeStruct((size,), jnp.uint8)
    out = jax.ShapeDtypeStruct((groups, n, k), jnp.float32)
    existing = () if existing_out is None else (beta, existing_out)
    call = jax.ffi.ffi_call(
        "jgg_nvfp4_grouped_wgrad",
        (out, workspace),
        input_output_aliases={7: 0} if existing else None,
    )
    operands = (x.weight, x.scales, dy.weight, dy.scales, sizes, alpha, *existing)
    return call(*operands, **attributes({"tokens": rows}))[0]


def nvfp4_quantize(x, group_sizes, seed, *, axis, scale_2d, hadamard):
    """Custom call ``jgg_nvfp4_quantize``: x (M, R, C), sizes, seed -> weight, scales, global_scale,
    workspace. Sizes and seed may be empty."""
    *lead, rows, columns = (1, *x.shape)[-max(x.ndim, 2) :]
    matrices = math.prod(lead)
    lines, along = (rows, columns) if axis == -1 else (columns, rows)
    sizes, words = jnp.zeros((0,), jnp.int32), 3 * matrices
    if group_sizes is not None:
        (groups,) = group_sizes.shape
        sizes, *_ = segments.sizes(group_sizes).narrow(rows, groups)
        words += 2 * (groups + 1)
        if axis == -2:
            along = layouts.padded_rows(rows, groups, layouts.GROUPED)
    results = (
        jax.ShapeDtypeStruct((matrices, lines, along // 8), jnp.uint32),
        jax.ShapeDtypeStruct((matrices, lines, along // 16), jnp.uint8),
        jax.ShapeDtypeStruct((matrices,), jnp.float32),
        jax.ShapeDtypeStruct((words,), jnp.uint32),
    )
    call = jax.ffi.ffi_call("jgg_nvfp4_quantize", results)
    flags = {"along_rows": axis == -2, "scale_2d": scale_2d, "hadamard": hadamard}
    seed = jnp.zeros((0,), jnp.uint32) if seed is None else seed
    operands = x.reshape(matrices, rows, columns), sizes, seed
    weight, scales, global_scale, _ = call(*operands, **attributes(flags))
    lead = x.shape[:-2] if x.ndim == 1 else (*x.shape[:-2], lines)
    weight, scales = (a.reshape(*lead, a.shape[-1]) for a in (weight, scales))
    return weight, scales, global_scale.reshape(x.shape[:-2])
