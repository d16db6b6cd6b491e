"""Options of a grouped product: bias, activation, row scale and an existing result, fused where a
kernel can, and otherwise the very composition that ``Options.composed`` spells out.

The fused form is one primitive (``_core/composed.py``). Sharded operands (Auto, Explicit) are
composed because a sum over devices has to come before an activation.
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


class Options:
    """A grouped product with options, as one primitive.

    Args:
      name: of the primitive.
      product: ``product(x, w, meta, form=, rows=, out_dtype=, transpose_w=, precision=,
        implementation=, cotangent_dtype=)``.
      call: ``call(platform, x, w, meta, epilogue=, ...)``, product and options as one custom call,
        or None where no kernel takes them.
    """

    def __init__(self, name: str, product: Callable, call: Callable):
        self._product, self._call = product, call
        self.fused = Composed(name, self.composed, self._one_call, cost=_cost)

    def __call__(self, x, w, meta, bias, row_scale, existing_out, *, activation, transpose_w,
                 dtype, precision, implementation, fused: bool = True):  # fmt: skip
        """``existing_out + row_scale * activation(x @ w + bias)`` for consecutive groups of rows.

        The result has ``dtype`` and is rounded once. Rows of no group keep existing_out, or are
        zeros. Without ``fused`` it is composed.
        """
        same = {
            "transpose_w": transpose_w, "precision": precision, "implementation": implementation,
        }  # fmt: skip
        if activation is None and all(v is None for v in (bias, row_scale, existing_out)):
            return self._product(x, w, meta, form=SIZES, rows=x.shape[0], out_dtype=dtype, **same)
        run = self.fused if fused else self.composed
        return run(
            x, w, meta, bias, row_scale, existing_out, activation=activation,
            dtype=jnp.dtype(dtype), **same,
        )  # fmt: skip

    def composed(self, x, w, meta, bias, row_scale, existing, *, activation, transpose_w, dtype,
                 precision, implementation):  # fmt: skip
        """Its meaning in terms of grouped products and elementwise operations."""
        rows, groups = x.shape[0], w.shape[0]
        sum_dtype = dtypes.accumulator_dtype(dtype)
        same: dict[str, Any] = {
            "form": SIZES, "rows": rows, "out_dtype": sum_dtype, "implementation": implementation,
            "cotangent_dtype": dtypes.cotangent_dtype(dtype),
        }  # fmt: skip
        y = self._product(x, w, meta, transpose_w=transpose_w, precision=precision, **same)
        if bias is not None:
            # bias[group(t)] is itself a grouped product, with K = 1.
            ones = jnp.ones((rows, 1), bias.dtype)
            y = y + primitives.mm(
                ones, bias[:, None, :], meta, precision=lax.Precision.HIGHEST, **same
            )
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

    def _one_call(self, platform, x, w, meta, bias, row_scale, existing, *, activation, dtype,
                  **same):  # fmt: skip
        return self._call(
            platform, x, w, meta, form=SIZES, rows=x.shape[0], out_dtype=dtype,
            epilogue=call.Epilogue(bias, activation, row_scale, existing), **same,
        )  # fmt: skip


def _mm_call(platform, x, w, meta, *, implementation, **params):
    choice = choose.fused(
        call.mm_problem(platform, x, w, meta, implementation=implementation, **params)
    )
    if choice is None:
        return None
    return call.mm(choice, x, w, *meta, transpose_x=False, transpose_out=False, **params)


def _cost(operands, values, outs, *, transpose_w, **_) -> Cost:
    x, w, meta, bias, row_scale, existing_out = operands
    cost, rows, weights = costs.product(
        x, w, meta, values[2], outs[0], form=SIZES, rows=x.shape[0], transpose_x=False,
        transpose_w=transpose_w,
    )  # fmt: skip
    more = Cost(0, costs.bytes_of((row_scale, existing_out)))
    return cost + costs.bias_cost(bias, rows, weights) + more


MM = Options("jgg_mm_epilogue", primitives.mm, _mm_call)
