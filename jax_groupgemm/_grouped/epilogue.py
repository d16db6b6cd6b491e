"""``mm`` or ``qmm`` with an epilogue: bias, activation, row scale and an existing result, fused
where a kernel can, and otherwise the very composition that ``composed`` spells out.

The fused form is one primitive (``_composed.py``). Sharded operands (Auto, Explicit) are composed
because a sum over devices has to come before an activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import costs, dtypes
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.segments import SIZES, covered_rows
from .._kernels import choose
from .._quantized import call as quantized_call
from .._quantized import prepack
from .._quantized import product as quantized_product
from .._quantized.array import Quantized
from . import call, primitives

#: All map 0 to 0, so a row of zeros stays one.
ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}

#: Gated forms: the halves of N are gate and up; ``activation(gate) * up``.
GATED_ACTIVATIONS: dict[str, Callable] = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}


def mm(x, w, meta, bias, row_scale, existing_out, *, activation, transpose_w, dtype, precision,
       implementation):  # fmt: skip
    """``existing_out + row_scale * activation(x @ w + bias)`` for consecutive groups of rows.

    w is an array or a Quantized. The result has ``dtype`` and is rounded once. Rows of no group
    keep existing_out, or are zeros.
    """
    same = {
        "transpose_w": transpose_w, "precision": precision, "implementation": implementation,
    }  # fmt: skip
    if activation is None and all(v is None for v in (bias, row_scale, existing_out)):
        return product(x, w, meta, form=SIZES, rows=x.shape[0], out_dtype=dtype, **same)
    scales = w.global_scale if isinstance(w, Quantized) else None
    fused = composed if scales is not None and scales.ndim > 1 else MM
    return fused(
        x, w, meta, bias, row_scale, existing_out, activation=activation, dtype=jnp.dtype(dtype),
        **same,
    )  # fmt: skip


def product(x, w, meta, **params):
    return (quantized_product.product if isinstance(w, Quantized) else primitives.mm)(
        x, w, meta, **params
    )


def composed(x, w, meta, bias, row_scale, existing, *, activation, transpose_w, dtype, precision,
             implementation):  # fmt: skip
    """What the primitive means, in terms of grouped products and elementwise operations."""
    rows, groups = x.shape[0], w.shape[0]
    sum_dtype = dtypes.accumulator_dtype(dtype)
    same: dict[str, Any] = {
        "form": SIZES, "rows": rows, "out_dtype": sum_dtype, "implementation": implementation,
        "cotangent_dtype": dtypes.cotangent_dtype(dtype),
    }  # fmt: skip
    y = product(x, w, meta, transpose_w=transpose_w, precision=precision, **same)
    if bias is not None:
        # bias[group(t)] is itself a grouped product, with K = 1.
        ones = jnp.ones((rows, 1), bias.dtype)
        highest = lax.Precision.HIGHEST
        y = y + product(ones, bias[:, None, :], meta, transpose_w=False, precision=highest, **same)
    if activation in ACTIVATIONS:
        y = ACTIVATIONS[activation](y)
    elif activation is not None:
        half = y.shape[1] // 2
        y = GATED_ACTIVATIONS[activation](y[:, :half]) * y[:, half:]
    if row_scale is not None:
        # Rows of no group are zeros whatever their scale.
        first, last = covered_rows(meta[0], meta[1] if len(meta) == 2 else None, rows, groups)
        row = lax.iota(jnp.int32, rows)
        scale = jnp.where((row >= first) & (row < last), row_scale.astype(sum_dtype), 0)
        y = y * scale[:, None]
    if existing is not None:
        y = y + existing.astype(sum_dtype)
    return y.astype(dtype)


def _call_of(platform, x, w, meta, bias, row_scale, existing, *, activation, transpose_w, dtype,
             precision, implementation):  # fmt: skip
    quantized, gated = isinstance(w, Quantized), activation in GATED_ACTIVATIONS
    known, target = (x, w), "jgg_mm"
    if quantized:
        w = prepack.readable(
            w, platform, implementation, x.dtype, SIZES, transpose_w, gated, x.shape[0], meta
        )
        known, target = (x,), prepack.target(w)
    others = [v for v in (bias, row_scale) if v is not None]
    runs = choose.chosen(platform, known, implementation, dtype, target)
    fusable = (
        choose.PLATFORMS.get(runs, runs) == "cuda"
        and choose.unsupported(runs, [v.dtype for v in others], dtype) is None
        and (existing is None or existing.dtype == dtype)
        and 0 not in (*x.shape, *w.shape)  # K = 0 still has a bias
    )
    if not fusable:
        return None
    if gated and not quantized:
        planes = call.mm_planes(runs, x, w, SIZES, x.shape[0], transpose_w, precision)
        if planes > 1:  # much faster than a kernel that takes float32 as it is, and the activation
            return None
    same: dict[str, Any] = {
        "form": SIZES, "rows": x.shape[0], "out_dtype": dtype, "transpose_w": transpose_w,
        "precision": precision,
        "epilogue": call.Epilogue(bias, activation, row_scale, existing),
    }  # fmt: skip
    if quantized:
        return quantized_call.qmm(runs, x, w, meta, **same)
    return call.mm(runs, x, w, *meta, transpose_x=False, transpose_out=False, **same)


def _cost(operands, values, outs, *, transpose_w, **_) -> Cost:
    x, w, meta, bias, row_scale, existing_out = operands
    cost, rows, weights = costs.product(
        x, w, meta, values[2], outs[0], form=SIZES, rows=x.shape[0], transpose_x=False,
        transpose_w=transpose_w,
    )  # fmt: skip
    more = Cost(0, costs.bytes_of((row_scale, existing_out)))
    return cost + costs.bias_cost(bias, rows, weights) + more


MM = Composed("jgg_mm_epilogue", composed, _call_of, cost=_cost)
