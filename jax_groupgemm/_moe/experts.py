"""The experts of a mixture, behind their router, over any ``Products``.

    out[t] = sum_j weight[t, j] * (activation(x[t] @ up[e] + up_bias[e]) @ down[e] + down_bias[e])

It means the composition of ``dispatch``, two grouped products and ``combine``. Where products have
a backward pass it is one operation, whose backward pass keeps x, h (the preactivation) and the
routing. Rows of the cotangent are gathered without their weights: those come in with the
activation's derivative, which has what a weight's own cotangent needs, too.

With a plan, tokens of several devices are sent here first, and their sums go back. The backward
pass sends them again, and their cotangents.

Three things run it in another way, and the folder of kernels chooses each: one kernel for all of it
(``few_tokens.py``), kernels for a whole pass (``fp8.py``), and kernels that take tokens by list for
a step (``dense.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .._core import batching, dtypes, partition, segments
from .._core.composed import Composed
from .._quantized import trilinear
from .permute import at_places, combined, dispatched
from .products import Products, ProductsWithBackward, Weights
from .routing import Routing, local_experts, route, weight_of_rows
from .transport import Plan, collect, send


def experts(x, weights: Weights, routing: Routing, pairs, weight, plan: Plan | None, key,
            products: Products):  # fmt: skip
    """The layer: x is (T, D), weight (T, k). ``routing`` is that of tokens that were sent, and of
    ``pairs``: their expert_index and expert_offset."""
    weights = products.prepared(weights)
    if not isinstance(products, ProductsWithBackward):
        return _composed(x, weights, routing, None, weight, plan, key, products=products)
    if products.by_pass:
        pairs = None  # biases, few tokens and batches are what they are for
    return _EXPERTS(x, weights, routing, pairs, weight, plan, key, products=products)


def _composed(x, weights, routing, pairs, weight, plan, key, *, products: Products):
    del pairs
    x, weight = send(plan, x, weight)
    sums, *_ = _pass_forward(x, weights, routing, weight, key, products=products, keeps=False)
    return collect(plan, sums, out_dtypes=(products.out_dtype,))[0]


# ---- both passes, of tokens that are here -------------------------------------------------------


def _pass_forward(x, weights: Weights, routing: Routing, weight, key, *, products: Products,
                  keeps: bool = True):  # fmt: skip
    """The sums of tokens; h, or None unless it ``keeps`` that; and what states learn, or None."""
    (up, down), (up_key, down_key) = weights, products.forward_keys(key)
    rows = products.rows(x, routing)
    a, h = products.up(rows, up, routing, up_key, keeps)
    y = products.down(a, down, routing, down_key)
    seen = products.seen_forward(rows, a, weights, routing) if keeps else None
    return combined(y, routing, weight, products.sum_dtype), h, seen


def _pass_backward(x, weights: Weights, routing: Routing, ct, h, pairs, weight, key, *,
                   products: ProductsWithBackward):  # fmt: skip
    """The cotangents of x, of w and bias of both products, and of weight; and what states learn,
    or None."""
    up, down = weights
    up_keys, down_keys = map(trilinear.split, trilinear.split(key))
    ct_rows, x_rows = products.rows(ct, routing), products.rows(x, routing)
    row_weight, dup_bias, ddown_bias = weight_of_rows(weight, routing), None, None
    dh, a, sums = products.down_backward(
        ct_rows, h, down, row_weight, routing, down_keys[0], up_keys
    )
    ddown = products.weight_cotangent(down, ct_rows, a, routing, down_keys[1], first=False)
    dweight = at_places(sums, routing.place)
    if down.bias is not None:
        scaled = dispatched(ct, routing, weight, clears_rest=False)
        ddown_bias = products.bias_cotangent(down.bias, scaled, routing)
        dweight = dweight + _of_biases(ct, down.bias, routing, pairs)
    dup = products.weight_cotangent(up, x_rows, dh, routing, up_keys[1], first=True)
    if up.bias is not None:
        dup_bias = products.bias_cotangent(up.bias, dh, routing)
    drows = products.rows_cotangent(dh, up, routing, up_keys[0])
    dx = combined(drows, routing, None, x.dtype)
    seen = products.seen_backward(ct_rows, dh, weights, routing)
    return dx, (dup, dup_bias), (ddown, ddown_bias), dweight.astype(weight.dtype), seen


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


def _by_kernels(run: Callable) -> Callable:
    """A pass of the kernels that are chosen for all of it; None where none are."""

    def call(platform, x, weights, routing, *more, products: ProductsWithBackward, **static):
        found = products.on(platform, x, weights, routing)
        if found is None:
            return None
        kernels, weights = found
        return run(x, weights, routing, *more, products=kernels, **static)

    return call


_FORWARD = Composed("jgg_experts_forward", _pass_forward, _by_kernels(_pass_forward), each=True)
_BACKWARD = Composed("jgg_experts_backward", _pass_backward, _by_kernels(_pass_backward), each=True)


# ---- one operation ------------------------------------------------------------------------------


def _forward(
    x, weights, routing, pairs, weight, plan, key, *, moves, products: ProductsWithBackward
):
    del pairs
    x_moves, up_moves, weight_moves = (
        any(jax.tree.leaves(moved)) for moved in (moves[0], moves[1].up, moves[4])
    )
    # Up's weight meets a cotangent if its rows need one, and so does down's.
    multiplied = x_moves, x_moves or up_moves or weight_moves
    weights, kept = products.kept(weights, multiplied)
    x, weight = send(plan, x, weight)
    run = _FORWARD if products.by_pass else _pass_forward
    sums, h, seen = run(x, weights, routing, weight, key, products=products)
    (out,) = collect(plan, sums, out_dtypes=(products.out_dtype,))
    return out, (checkpoint_name(h, "moe_h"), weight, kept, seen)


def _backward(saved, operands, cts, *, products: ProductsWithBackward):
    (h, sent_weight, kept, seen), (ct,) = saved, cts
    x, weights, routing, pairs, weight, plan, key = operands
    x_again = x
    if products.makes_rows_again:
        # The rows of x that the forward pass made are not kept for this one.
        x_again, ct = lax.optimization_barrier((x, ct))
    ct, x_again = send(plan, ct.astype(products.dtype), x_again)
    run = _BACKWARD if products.by_pass else _pass_backward
    dx, dup, ddown, dweight, more = run(
        x_again, products.restored(weights, kept), routing, ct, h, pairs, sent_weight, key,
        products=products,
    )  # fmt: skip
    of_states = products.state_cotangents(seen, more)
    dweights = Weights(
        *(
            of.cotangent(*d, state)
            for of, d, state in zip(weights, (dup, ddown), of_states, strict=True)
        )
    )
    # A pair is on one device, so its weight's gradient is not rounded on its way.
    dx, dweight = collect(plan, dx, dweight, out_dtypes=(x.dtype, weight.dtype))
    return dx, dweights, None, None, dweight, None, None


def _call(
    platform, x, weights, routing, pairs, weight, plan, key, *, products: ProductsWithBackward
):
    if plan is not None:
        return None
    out = products.in_one_call(platform, x, weights, pairs, weight)
    if out is None:
        found = _by_kernels(_pass_forward)(
            platform, x, weights, routing, weight, key, products=products, keeps=False
        )
        out = None if found is None else found[0]
    return out


def _batched(size: int, operands, axes, *, products: ProductsWithBackward):
    """A batch that shares its experts is one layer of more tokens. None where it does not, where
    there is not a row for each of its pairs, and where kernels are chosen for a whole pass."""
    x, weights, routing, pairs, weight, plan, key = operands
    if products.by_pass or plan is not None:
        return None
    index, offset = pairs
    tokens, k = (batching.extent(index, axes[3][0], axis) for axis in (0, 1))
    count = lambda name: batching.extent(getattr(routing, name), getattr(axes[2], name), 0)
    rows = count("order")
    mapped = jax.tree.leaves((axes[1], axes[3][1]))
    if mapped or rows != tokens * k or size * rows > segments.MAX_ROWS:
        return None
    x, index, weight = (
        partition.merge(batching.first(a, axis, size), (2, 1))
        for a, axis in ((x, axes[0]), (index, axes[3][0]), (weight, axes[4]))
    )
    of_all = route(index, count("group_sizes"), expert_offset=offset)
    out = _EXPERTS(x, weights, of_all, (index, offset), weight, plan, key, products=products)
    return out.reshape(size, tokens, out.shape[-1])


_EXPERTS = Composed("jgg_experts", _composed, _call, batch=_batched, vjp=(_forward, _backward))
