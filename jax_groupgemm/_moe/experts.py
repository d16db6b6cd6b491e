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

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .._core import batching, dtypes, partition, segments
from .._core.composed import Composed
from . import few_tokens, listed
from .permute import at_places, combined, dispatched
from .products import Options, Products
from .routing import Routing, local_experts, route
from .transport import Plan, collect, send


def experts(x, up, down, up_bias, down_bias, routing: Routing, pairs, weight, plan: Plan | None,
            options: Options):  # fmt: skip
    """The layer behind its router: x is (T, D), weight (T, k). ``routing`` is that of tokens that
    were sent, and of ``pairs``: their expert_index and expert_offset."""
    return _EXPERTS(x, up, down, up_bias, down_bias, routing, pairs, weight, plan, options=options)


def summed(rows, routing: Routing, weight, plan: Plan | None, *, wire, dtype, in_fp8: int = 0):
    """The sums of tokens, which travel in the dtype ``wire``; ``in_fp8`` as of ``collect``."""
    sums = combined(rows, routing, weight, dtype if plan is None else wire)
    return collect(plan, sums, out_dtypes=(dtype,), in_fp8=in_fp8)[0]


def _composed(x, up, down, up_bias, down_bias, routing, _, weight, plan, *, options: Options):
    products = Products(routing, options)
    x, weight = send(plan, x, weight)
    a = listed.up_alone(x.astype(options.dtype), up, up_bias, routing, options)
    y = products.down(a, down, down_bias)
    return summed(y, routing, weight, plan, wire=options.dtype, dtype=options.out_dtype)


def _forward(x, up, down, up_bias, down_bias, routing, _, weight, plan, *, options: Options):
    products = Products(routing, options)
    x, weight = send(plan, x, weight)
    a, h = listed.up(x.astype(options.dtype), up, up_bias, routing, options)
    h = checkpoint_name(h, "moe_h")
    y = products.down(a, down, down_bias)
    out = summed(y, routing, weight, plan, wire=options.dtype, dtype=options.out_dtype)
    return out, (h, weight)


def _backward(saved, operands, cts, *, options: Options):
    x, up, down, up_bias, down_bias, routing, pairs, weight, plan = operands
    h, sent_weight = saved
    products = Products(routing, options)
    # The rows of x that the forward pass made are not kept for this one.
    x_again, ct = lax.optimization_barrier((x, cts[0]))
    ct, x_again = send(plan, ct.astype(options.dtype), x_again)
    row_weight = of_rows(sent_weight, routing)
    dh, a, dweight = listed.down_backward(ct, h, down, row_weight, routing, options)
    ddown = listed.weight_cotangent(down, ct, a, routing, options, first=False)
    ddown_bias = None
    dweight = weight_cotangents(dweight, routing)
    if down_bias is not None:
        scaled = dispatched(ct, routing, sent_weight, clears_rest=False)
        ddown_bias = products.bias_cotangent(down_bias, scaled)
        dweight = dweight + _of_biases(ct, down_bias, routing, pairs)
    x_again = x_again.astype(options.dtype)
    dup = listed.weight_cotangent(up, x_again, dh, routing, options, first=True)
    dup_bias = products.bias_cotangent(up_bias, dh)
    dx = combined(products.rows_cotangent(up, dh), routing, None, x.dtype)
    # A pair is on one device, so its weight's gradient is not rounded on its way.
    dx, dweight = collect(
        plan, dx, dweight.astype(weight.dtype), out_dtypes=(x.dtype, weight.dtype)
    )
    return dx, dup, ddown, dup_bias, ddown_bias, None, None, dweight, None


def _call(platform, x, up, down, up_bias, down_bias, _, pairs, weight, plan, *, options: Options):
    if plan is not None:
        return None
    return few_tokens.experts(platform, x, up, down, up_bias, down_bias, weight, pairs, options)


def _batched(size: int, operands, axes, *, options: Options):
    """A batch that shares its experts is one layer of more tokens. None where it does not, and
    where there is not a row for each of its pairs."""
    x, up, down, up_bias, down_bias, routing, (index, offset), weight, plan = operands
    tokens, k = (batching.extent(index, axes[6][0], axis) for axis in (0, 1))
    rows, experts = (
        batching.extent(a, axis, 0)
        for a, axis in (
            (routing.order, axes[5].order), (routing.group_sizes, axes[5].group_sizes),
        )
    )  # fmt: skip
    mapped = jax.tree.leaves((axes[1:5], axes[6][1]))
    if plan is not None or mapped or rows != tokens * k or size * rows > segments.MAX_ROWS:
        return None
    x, index, weight = (
        partition.merge(batching.first(a, axis, size), (2, 1))
        for a, axis in ((x, axes[0]), (index, axes[6][0]), (weight, axes[7]))
    )
    routing = route(index, experts, expert_offset=offset)
    out = _EXPERTS(
        x, up, down, up_bias, down_bias, routing, (index, offset), weight, plan, options=options
    )
    return out.reshape(size, tokens, out.shape[-1])


def of_rows(weight, routing: Routing):
    """The weight of each row, zero where it has none."""
    of_row = weight.reshape(-1)[jnp.maximum(routing.order, 0)]
    return jnp.where(routing.order >= 0, of_row, jnp.zeros((), weight.dtype))


def weight_cotangents(of_rows, routing: Routing):
    """That of each pair's weight, of those of rows."""
    return at_places(of_rows, routing.place)


def _of_biases(ct, bias, routing: Routing, pairs):
    """The part of weights' cotangents, (T, k), that experts' biases make. A product gives it for
    each token and expert, and a pair takes one of them."""
    wide = dtypes.accumulator_dtype(ct.dtype)
    if not bias.shape[0]:
        return jnp.zeros(routing.place.shape, wide)
    each = jnp.matmul(ct.astype(wide), bias.astype(wide).T, precision="highest")
    index, offset = pairs
    expert = local_experts(index, offset, bias.shape[0])
    found = jnp.take_along_axis(each, jnp.minimum(expert, bias.shape[0] - 1), 1)
    return jnp.where(routing.place >= 0, found, 0)


_EXPERTS = Composed("jgg_experts", _composed, _call, batch=_batched, vjp=(_forward, _backward))
