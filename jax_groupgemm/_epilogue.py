"""``mm`` or ``qmm`` with an epilogue: bias, activation, row scale and an existing result, fused
where a kernel can, and otherwise the very composition that ``composed`` spells out.

The fused form is one primitive (``_composed.py``). Sharded operands (Auto, Explicit) are composed
because a sum over devices has to come before an activation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _call, _composed, _prepack, _primitives, _qmm, _reference
from ._quantized import Quantized
from ._segments import SIZES, covered_rows

#: All map 0 to 0, so a row of zeros stays one.
ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}

#: Gated forms: the halves of N are gate and up; ``activation(gate) * up``.
GATED_ACTIVATIONS: dict[str, Callable] = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}


@dataclasses.dataclass(frozen=True)
class _Operands:
    """Which operands there are: x, the weight's leaves, the group sizes, and then, in this order,
    those options that are present."""

    weight: Any  # the weight's tree: one array, or a Quantized
    group_offset: bool
    bias: bool
    row_scale: bool
    existing_out: bool

    def split(self, operands) -> tuple[Any, Any, tuple, Any, Any, Any]:
        """x, w, (sizes[, offset]), bias, row_scale and existing_out; None where absent."""
        values = iter(operands)
        x = next(values)
        w = self.weight.unflatten([next(values) for _ in range(self.weight.num_leaves)])
        meta = tuple(next(values) for _ in range(2 if self.group_offset else 1))
        bias, row_scale, existing = (
            next(values) if has else None for has in (self.bias, self.row_scale, self.existing_out)
        )
        return x, w, meta, bias, row_scale, existing


def mm(x, w, meta, bias, row_scale, existing_out, *, activation, transpose_w, dtype, precision,
       implementation):  # fmt: skip
    """``existing_out + row_scale * activation(x @ w + bias)`` for consecutive groups of rows.

    w is an array or a Quantized. The result has ``dtype`` and is rounded once. Rows of no group
    keep existing_out, or are zeros.
    """
    options = (bias, row_scale, existing_out)
    if activation is None and all(value is None for value in options):
        return product(
            x, w, meta, form=SIZES, rows=x.shape[0], out_dtype=dtype, transpose_w=transpose_w,
            precision=precision, implementation=implementation,
        )  # fmt: skip
    leaves, tree = jax.tree.flatten(w)
    present = _Operands(tree, len(meta) == 2, *(value is not None for value in options))
    operands = (x, *leaves, *meta, *(value for value in options if value is not None))
    params = {
        "present": present, "activation": activation, "transpose_w": transpose_w,
        "dtype": jnp.dtype(dtype), "precision": precision, "implementation": implementation,
    }  # fmt: skip
    return _MM(*operands, **params)


def product(x, w, meta, **params):
    return (_qmm.qmm if isinstance(w, Quantized) else _primitives.mm)(x, w, meta, **params)


def composed(*operands, present: _Operands, activation, transpose_w, dtype, precision,
             implementation, product=product):  # fmt: skip
    """What the primitive means, in terms of grouped products and elementwise operations."""
    x, w, meta, bias, row_scale, existing = present.split(operands)
    rows, groups = x.shape[0], w.shape[0]
    sum_dtype = _reference.accumulator_dtype(dtype)
    same: dict[str, Any] = {
        "form": SIZES, "rows": rows, "out_dtype": sum_dtype, "implementation": implementation,
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


def _abstract(*operands, present, activation, transpose_w, dtype, **_):
    x, w, *_ = present.split(operands)
    n = w.shape[1 if transpose_w else 2]
    columns = n // 2 if activation in GATED_ACTIVATIONS else n
    return _primitives.out_aval((x.shape[0], columns), dtype, operands)


# ---- lowering --------------------------------------------------------------------------------


def _inner_product(x, w, meta, **params):
    leaves, tree = jax.tree.flatten(w)
    if isinstance(w, Quantized):
        name, params = "qmm", params | {"tree": tree}
    else:
        name, params = "mm", params | {"transpose_x": False, "transpose_out": False}
    operands = _primitives.vary_alike(x, *leaves, *meta)
    return _primitives.INNER[name].bind(*operands, cotangent_dtype=None, **params)


def _lowering(platform, *operands, **params):
    x, w, meta, bias, row_scale, existing = params["present"].split(operands)
    implementation, dtype = params["implementation"], params["dtype"]
    quantized = isinstance(w, Quantized)
    known, target = (x, w), "jgg_mm"
    if quantized:
        gated = params["activation"] in GATED_ACTIVATIONS
        w = _prepack.readable(
            w, platform, implementation, x.dtype, SIZES, params["transpose_w"], gated
        )
        known, target = (x,), _prepack.target(w)
    others = [v for v in (bias, row_scale) if v is not None]
    runs = _call.chosen(platform, known, implementation, dtype, target)
    fusable = (
        _call.PLATFORMS.get(runs, runs) == "cuda"
        and _call.unsupported(runs, [v.dtype for v in others], dtype) is None
        and (existing is None or existing.dtype == dtype)
        and 0 not in (*x.shape, *w.shape)  # K = 0 still has a bias
    )
    if not fusable:
        return composed(*operands, **params, product=_inner_product)
    same: dict[str, Any] = {
        "form": SIZES, "rows": x.shape[0], "out_dtype": dtype,
        "transpose_w": params["transpose_w"], "precision": params["precision"],
        "epilogue": _call.Epilogue(bias, params["activation"], row_scale, existing),
    }  # fmt: skip
    if quantized:
        return _call.qmm(runs, x, w, meta, **same)
    return _call.mm(runs, x, w, *meta, transpose_x=False, transpose_out=False, **same)


_MM = _composed.make("jgg_mm_epilogue", _abstract, composed, _lowering)
