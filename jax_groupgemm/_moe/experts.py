"""The experts of a mixture as one operation with a backward pass of its own.

    out[t] = sum_j weight[t, j] * (activation(x[t] @ up[e] + up_bias[e]) @ down[e] + down_bias[e])

It means the composition of ``dispatch``, two grouped products and ``combine``. The backward pass
keeps x, h (the preactivation) and the routing, and makes everything else of R rows anew. Rows of
the cotangent are gathered without their weights: those come in with the activation's derivative,
which has what a weight's own cotangent needs, too.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .._core import dtypes
from .._core.composed import Composed
from . import listed
from .permute import combined, dispatched
from .products import Options, Products
from .routing import Routing


def experts(x, up, down, up_bias, down_bias, routing: Routing, weight, options: Options):
    """All of it; x is (T, D) and weight (T, k)."""
    return _EXPERTS(x, up, down, up_bias, down_bias, routing, weight, options=options)


def _composed(x, up, down, up_bias, down_bias, routing, weight, *, options: Options):
    products = Products(routing, options)
    a = listed.up_alone(x.astype(options.dtype), up, up_bias, routing, options)
    return combined(products.down(a, down, down_bias), routing, weight, options.out_dtype)


def _forward(x, up, down, up_bias, down_bias, routing, weight, *, options: Options):
    products = Products(routing, options)
    a, h = listed.up(x.astype(options.dtype), up, up_bias, routing, options)
    h = checkpoint_name(h, "moe_h")
    out = combined(products.down(a, down, down_bias), routing, weight, options.out_dtype)
    return out, h


def _backward(h, operands, cts, *, options: Options):
    x, up, down, up_bias, down_bias, routing, weight = operands
    products = Products(routing, options)
    # The rows of x that the forward pass made are not kept for this one.
    x_again, ct = lax.optimization_barrier((x, cts[0]))
    ct = ct.astype(options.dtype)
    row_weight = _of_rows(weight, routing)
    dh, a, dweight = listed.down_backward(ct, h, down, row_weight, routing, options)
    ddown = listed.weight_cotangent(down, ct, a, routing, options, first=False)
    ddown_bias = None
    if down_bias is not None:
        ct = dispatched(ct, routing)
        wide = dtypes.accumulator_dtype(ct.dtype)
        scaled = ct.astype(wide) * row_weight[:, None].astype(wide)
        ddown_bias = products.bias_cotangent(down_bias, scaled)
        dweight = dweight + (ct.astype(wide) * _of_experts(down_bias, routing).astype(wide)).sum(1)
    there = routing.place >= 0
    dweight = jnp.where(there, dweight[jnp.where(there, routing.place, 0)], 0)
    x_again = x_again.astype(options.dtype)
    dup = listed.weight_cotangent(up, x_again, dh, routing, options, first=True)
    dup_bias = products.bias_cotangent(up_bias, dh)
    dx = combined(products.rows_cotangent(up, dh), routing, None, x.dtype)
    return dx, dup, ddown, dup_bias, ddown_bias, None, dweight.astype(weight.dtype)


def _of_rows(weight, routing: Routing):
    """The weight of each row, zero where it has none."""
    of_row = weight.reshape(-1)[jnp.maximum(routing.order, 0)]
    return jnp.where(routing.order >= 0, of_row, jnp.zeros((), weight.dtype))


def _of_experts(bias, routing: Routing):
    """The bias of each row."""
    rows = routing.order.shape[0]
    return bias[
        jnp.repeat(jnp.arange(bias.shape[0]), routing.group_sizes, total_repeat_length=rows)
    ]


_no_kernel: Callable = lambda *_, **__: None
_EXPERTS = Composed("jgg_experts", _composed, _no_kernel, vjp=(_forward, _backward))
