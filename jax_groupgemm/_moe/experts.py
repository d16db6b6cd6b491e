"""The experts of a mixture as one operation with a backward pass of its own.

    out[t] = sum_j weight[t, j] * (activation(x[t] @ up[e] + up_bias[e]) @ down[e] + down_bias[e])

It means the composition of ``dispatch``, two grouped products and ``combine``. The backward pass
keeps x, h (the preactivation) and the routing, and makes everything else of R rows anew. Rows of
the cotangent are gathered without their weights: those come in with the activation's derivative,
which has what a weight's own cotangent needs, too.

With a plan, tokens of several devices are sent here first, and their sums go back. The backward
pass sends them again, and their cotangents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .._core import dtypes, segments
from .._core.composed import Composed
from .._core.primitive import vary_alike
from .._core.products import Mm
from .._grouped import fused
from .._grouped.activation_backward import scaled_activation_backward
from .._grouped.call import Epilogue
from .._quantized import product as quantized_product
from .._quantized.array import Quantized
from .permute import combined, dispatched
from .routing import Routing
from .transport import Plan, collect, send


@dataclasses.dataclass(frozen=True)
class Options:
    """What is static of the experts.

    Attributes:
      activation: between the two products.
      dtype: of the rows that are multiplied, and of both products.
      out_dtype: the result's.
      transpose_w: up is (E, 2F, D) and down (E, D, F).
    """

    activation: str
    dtype: Any
    out_dtype: Any
    transpose_w: bool = False
    precision: Any = None
    implementation: str | None = None

    def product(self, rows: int) -> Mm:
        return Mm(
            rows=rows, out_dtype=self.dtype, transpose_w=self.transpose_w,
            precision=self.precision, implementation=self.implementation,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Products:
    """Both products, of rows sorted by expert."""

    routing: Routing
    options: Options

    @property
    def product(self) -> Mm:
        return self.options.product(self.routing.order.shape[0])

    @property
    def metadata(self):
        return segments.sizes(self.routing.group_sizes)

    def up(self, rows, w, bias):
        """The activation, and h."""
        epilogue = Epilogue(bias, self.options.activation, rounds=True)
        return _fused(w).preactivated(rows, w, self.metadata, epilogue, self.product)

    def up_alone(self, rows, w, bias):
        return self._run(rows, w, Epilogue(bias, self.options.activation, rounds=True))

    def down(self, a, w, bias):
        return self._run(a, w, Epilogue(bias))

    def _run(self, rows, w, epilogue: Epilogue):
        whole = not isinstance(w, Quantized) or quantized_product.fusible(w)
        return _fused(w)(rows, w, self.metadata, self.product, epilogue, fused=whole)

    def rows_cotangent(self, w, ct):
        """That of the rows that w multiplies."""
        columns = w.shape[2 if self.options.transpose_w else 1]
        # Varying over the mesh axes that ct does, or the transpose would be a sum over them.
        like = jnp.zeros((ct.shape[0], columns), self.options.dtype)
        like, ct = vary_alike(like, ct)
        (rows,) = jax.linear_transpose(lambda rows: self._multiply(rows, w), like)(ct)
        return rows

    def weight_cotangent(self, w, rows, ct):
        run = _fused(w).product
        return fused.weight_cotangent(run, rows, w, self.metadata, self.product, ct)

    def bias_cotangent(self, bias, ct):
        if bias is None:
            return None
        return fused.bias_cotangent(bias, self.metadata, self.product, ct)

    def _multiply(self, rows, w):
        return _fused(w).product(rows, w, self.metadata, self.product)


def _fused(w) -> fused.Fused:
    return quantized_product.FUSED if isinstance(w, Quantized) else fused.MM


def experts(x, up, down, up_bias, down_bias, routing: Routing, weight, plan: Plan | None,
            options: Options):  # fmt: skip
    """All of it; x is (T, D) and weight (T, k), and routing of the tokens that are sent."""
    return _EXPERTS(x, up, down, up_bias, down_bias, routing, weight, plan, options=options)


def summed(rows, routing: Routing, weight, plan: Plan | None, *, wire, dtype):
    """The sums of tokens, which travel in the dtype ``wire``."""
    sums = combined(rows, routing, weight, dtype if plan is None else wire)
    return collect(plan, sums, out_dtypes=(dtype,))[0]


def _composed(x, up, down, up_bias, down_bias, routing, weight, plan, *, options: Options):
    products = _Products(routing, options)
    x, weight = send(plan, x, weight)
    a = products.up_alone(dispatched(x.astype(options.dtype), routing), up, up_bias)
    y = products.down(a, down, down_bias)
    return summed(y, routing, weight, plan, wire=options.dtype, dtype=options.out_dtype)


def _forward(x, up, down, up_bias, down_bias, routing, weight, plan, *, options: Options):
    products = _Products(routing, options)
    x, weight = send(plan, x, weight)
    a, h = products.up(dispatched(x.astype(options.dtype), routing), up, up_bias)
    h = checkpoint_name(h, "moe_h")
    y = products.down(a, down, down_bias)
    out = summed(y, routing, weight, plan, wire=options.dtype, dtype=options.out_dtype)
    return out, (h, weight)


def _backward(saved, operands, cts, *, options: Options):
    x, up, down, up_bias, down_bias, routing, weight, plan = operands
    h, sent_weight = saved
    products = _Products(routing, options)
    # The rows of x that the forward pass made are not kept for this one.
    x_again, ct = lax.optimization_barrier((x, cts[0]))
    ct, x_again = send(plan, ct.astype(options.dtype), x_again)
    ct = dispatched(ct, routing)
    row_weight = _of_rows(sent_weight, routing)
    dh, a, dweight = scaled_activation_backward(
        h, products.rows_cotangent(down, ct), row_weight, options.activation
    )
    ddown = products.weight_cotangent(down, a, ct)
    ddown_bias = None
    if down_bias is not None:
        wide = dtypes.accumulator_dtype(ct.dtype)
        scaled = ct.astype(wide) * row_weight[:, None].astype(wide)
        ddown_bias = products.bias_cotangent(down_bias, scaled)
        dweight = dweight + (ct.astype(wide) * _of_experts(down_bias, routing).astype(wide)).sum(1)
    there = routing.place >= 0
    dweight = jnp.where(there, dweight[jnp.where(there, routing.place, 0)], 0)
    rows = dispatched(x_again.astype(options.dtype), routing)
    dup = products.weight_cotangent(up, rows, dh)
    dup_bias = products.bias_cotangent(up_bias, dh)
    dx = combined(products.rows_cotangent(up, dh), routing, None, x.dtype)
    # A pair is on one device, so its weight's gradient is not rounded on its way.
    dx, dweight = collect(
        plan, dx, dweight.astype(weight.dtype), out_dtypes=(x.dtype, weight.dtype)
    )
    return dx, dup, ddown, dup_bias, ddown_bias, None, dweight, None


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
