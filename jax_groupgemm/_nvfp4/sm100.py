"""NVFP4 grouped products on Blackwell: one custom call where a GPU has the instructions. Otherwise
a product that another kernel does at once, or the composition of others that says what they mean.

    out[t] = alpha[g] * x[t] @ w[g].T + bias[g]                            T (rows) is grouped
    out[g] = alpha[g] * dy_g.T @ x_g + beta[g] * existing_out[g]           T (contracted) is grouped
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .._core import costs, segments
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.products import Mm
from .._core.segments import LENGTH, X_START
from .._kernels import choose
from .._quantized import prepack
from . import call
from .layouts import group_of, padded_sizes


def grouped_mm(composed: Callable, problem: Callable, sm90: Callable) -> Composed:
    """``composed(x, w, group_sizes, alpha, bias, *, dtype, implementation)``, of Quantized x and w;
    ``alpha`` has that of w. ``problem(platform, ...)`` of the same says what kernels see, and
    ``sm90(plan, ...)`` runs it on Hopper."""
    return _either("nvfp4_grouped_mm", composed, problem, {"sm100": _mm, "sm90": sm90}, _mm_cost)


def grouped_wgrad(composed: Callable, problem: Callable, sm90: Callable) -> Composed:
    """``composed(x, dy, group_sizes, alpha, beta, existing_out, *, dtype, implementation)``, of
    Quantized x and dy in layout "grouped"; ``alpha`` has that of dy. The others likewise."""
    calls = {"sm100": _wgrad, "sm90": sm90}
    return _either("nvfp4_grouped_wgrad", composed, problem, calls, _wgrad_cost)


def _either(name: str, composed: Callable, problem: Callable, calls: dict[str, Callable],
            cost: Callable) -> Composed:  # fmt: skip
    """One of ``calls``, or the composition.

    Kernels on a GPU take one factor of each group, so there x's global scale, too, becomes part of
    ``alpha`` where it is a scalar.
    """

    def where_possible(platform, *operands, implementation, **static):
        if any(0 in a.shape for a in operands[:3]):
            return None
        one = _one_factor(*operands)
        seen = problem(platform, *one, implementation=implementation, **static)
        if (plan := choose.fused(seen)) is not None:
            return calls[plan.kernel.name](plan, *one, **static)
        if platform == "cuda":
            return of_others(*one, implementation=implementation, **static)
        return None

    def of_others(*operands, implementation, **static):
        implementation = None if implementation == "sm100" else implementation
        return composed(*operands, **static, implementation=implementation)

    def sharded(*, implementation, **_):
        if implementation == "sm100":
            raise ValueError(
                "jgg: implementation='sm100' cannot run: its operands are sharded. "
                "Use implementation=None, or jax.shard_map over every mesh axis."
            )

    return Composed(
        f"jgg_{name}", of_others, where_possible, keeps_call=True, sharded=sharded, cost=cost
    )


def folded(*factors) -> jax.Array | None:
    """The product of those that are there."""
    present = [value for value in factors if value is not None]
    return functools.reduce(jnp.multiply, present) if present else None


def _one_factor(x, w, group_sizes, alpha, *rest):
    if x.global_scale is not None and x.global_scale.ndim == 0:
        alpha, x = folded(alpha, x.global_scale), dataclasses.replace(x, global_scale=None)
    return x, w, group_sizes, alpha, *rest


def _mm(plan, x, w, group_sizes, alpha, bias, *, dtype):
    (rows, _), groups = x.shape, w.shape[0]
    dtype = jnp.dtype(dtype)
    whole = bias is None and x.global_scale is None and dtype.name in ("bfloat16", "float32")
    out = call.nvfp4_grouped_mm(
        x, prepack.unpacked(w), group_sizes, _per_group(alpha, groups),
        out_dtype=dtype if whole else jnp.float32,
    )  # fmt: skip
    if whole:
        return out
    # XLA does the rest in one loop, but for the group of each row.
    table = segments.sizes(group_sizes).decode(rows, rows, groups)
    ends = table[:, X_START] + table[:, LENGTH]
    group = group_of(ends, lax.iota(jnp.int32, rows))
    inside = (group < groups)[:, None]
    if x.global_scale is not None:
        out = jnp.where(inside, out * x.global_scale[:, None], jnp.float32(0))
    if bias is not None:
        own = bias.astype(jnp.float32)[jnp.minimum(group, groups - 1)]
        out = out + jnp.where(inside, own, jnp.float32(0))
    return out.astype(dtype)


def _wgrad(plan, x, dy, group_sizes, alpha, beta, existing_out, *, dtype):
    groups = group_sizes.shape[0]
    beta = None if existing_out is None else _per_group(beta, groups)
    out = call.nvfp4_grouped_wgrad(
        x, dy, group_sizes, _per_group(alpha, groups), beta, existing_out
    )
    return out.astype(dtype)


def _per_group(factor, groups: int):
    """float32 (G,) of a scalar, (G,) or None."""
    return jnp.broadcast_to(jnp.float32(1) if factor is None else factor, (groups,))


def _mm_cost(operands, values, outs, **_) -> Cost:
    x, w, sizes, scale, bias = operands
    product = Mm(rows=x.shape[0], out_dtype=outs[0].dtype, transpose_w=True)
    cost, rows, weights = costs.product(
        x, w, segments.sizes(sizes), [values[2]], outs[0], product
    )  # fmt: skip
    return cost + costs.bias_cost(bias, rows, weights) + Cost(0, costs.bytes_of(scale))


def _wgrad_cost(operands, values, outs, **_) -> Cost:
    """Rows are those of the operands, padded group by group."""
    (x, dy, sizes, *rest), value = operands, values[2]
    (k, stored), (n, _), (rows,) = x.shape, dy.shape, x.positions.shape
    padded = None if value is None else lambda: padded_sizes(value(), rows)
    count, read, *_ = costs.counts(segments.sizes(sizes), [padded], stored, stored, sizes.shape[0])
    packed = costs.bytes_of((x.weight, x.scales, dy.weight, dy.scales)) // max(stored, 1) * read
    return Cost(2 * count * k * n, packed + costs.bytes_of((sizes, rest, outs)))
