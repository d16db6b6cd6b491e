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

from .._core import costs
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.segments import LENGTH, SIZES, X_START, decode
from .._kernels import choose
from .._quantized import prepack
from . import call
from .layouts import group_of, padded_sizes


def grouped_mm(composed: Callable, fused: Callable) -> Composed:
    """``composed(x, w, group_sizes, alpha, bias, *, dtype, implementation)``, of Quantized x and w;
    ``alpha`` has that of w.
    ``fused(platform, ...)`` is the same, or None where no other kernel takes them either."""
    return _either("nvfp4_grouped_mm", composed, _mm_call, _mm_problem, fused, _mm_cost)


def grouped_wgrad(composed: Callable, fused: Callable) -> Composed:
    """``composed(x, dy, group_sizes, alpha, beta, existing_out, *, dtype, implementation)``, of
    Quantized x and dy in layout "grouped"; ``alpha`` has that of dy. ``fused`` likewise."""
    return _either("nvfp4_grouped_wgrad", composed, _wgrad_call, _wgrad_problem, fused, _wgrad_cost)


def _either(name: str, composed: Callable, call: Callable, problem: Callable,
            fused: Callable, cost: Callable) -> Composed:  # fmt: skip
    """``problem(*operands, **static)`` says why ``call`` of the same, the custom call
    ``jgg_<name>``, cannot be: ffi/nvfp4/layout.h has the reasons.

    Kernels on a GPU take one factor of each group, so there x's global scale, too, becomes part of
    ``alpha`` where it is a scalar.
    """

    def where_possible(platform, *operands, implementation, **static):
        if any(0 in a.shape for a in operands[:3]):
            return None
        one = _one_factor(*operands)
        out = in_one_call(platform, *one, implementation=implementation, **static)
        if out is None and platform == "cuda":
            return of_others(*one, implementation=implementation, **static)
        return out

    def in_one_call(platform, *operands, implementation, **static):
        own = implementation in (None, _OWN)
        if not (own and choose.takes_sm100(platform, implementation, f"jgg_{name}")):
            return fused(platform, *operands, **static, implementation=implementation)
        why = problem(*operands, **static)
        if why is None:
            return call(*operands, **static)
        if implementation is not None:
            raise ValueError(_cannot_run(why + ". Use implementation=None, or 'reference'"))
        return None

    def of_others(*operands, implementation, **static):
        implementation = None if implementation == _OWN else implementation
        return composed(*operands, **static, implementation=implementation)

    def sharded(*, implementation, **_):
        if implementation == _OWN:
            why = "its operands are sharded. Use implementation=None, or jax.shard_map"
            raise ValueError(_cannot_run(why))

    return Composed(
        f"jgg_{name}", of_others, where_possible, keeps_call=True, sharded=sharded, cost=cost
    )


_OWN = "sm100"


def folded(*factors) -> jax.Array | None:
    """The product of those that are there."""
    present = [value for value in factors if value is not None]
    return functools.reduce(jnp.multiply, present) if present else None


def _one_factor(x, w, group_sizes, alpha, *rest):
    if x.global_scale is not None and x.global_scale.ndim == 0:
        alpha, x = folded(alpha, x.global_scale), dataclasses.replace(x, global_scale=None)
    return x, w, group_sizes, alpha, *rest


def _cannot_run(why: str) -> str:
    return f"jgg: implementation={_OWN!r} cannot run: {why}."


def _mm_call(x, w, group_sizes, alpha, bias, *, dtype):
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
    table = decode(SIZES, (group_sizes,), rows, rows, groups)
    ends = table[:, X_START] + table[:, LENGTH]
    group = group_of(ends, lax.iota(jnp.int32, rows))
    inside = (group < groups)[:, None]
    if x.global_scale is not None:
        out = jnp.where(inside, out * x.global_scale[:, None], jnp.float32(0))
    if bias is not None:
        own = bias.astype(jnp.float32)[jnp.minimum(group, groups - 1)]
        out = out + jnp.where(inside, own, jnp.float32(0))
    return out.astype(dtype)


def _mm_problem(x, w, *_, dtype) -> str | None:
    columns = 8 if dtype == jnp.bfloat16 else 4
    return _multiple("K", x.shape[1], 32) or _multiple("N", w.shape[1], columns)


def _wgrad_call(x, dy, group_sizes, alpha, beta, existing_out, *, dtype):
    groups = group_sizes.shape[0]
    beta = None if existing_out is None else _per_group(beta, groups)
    out = call.nvfp4_grouped_wgrad(
        x, dy, group_sizes, _per_group(alpha, groups), beta, existing_out
    )
    return out.astype(dtype)


def _wgrad_problem(x, *_, **__) -> str | None:
    return _multiple("K", x.shape[0], 4)  # lines of the result, four columns of float32 to 16 bytes


def _per_group(factor, groups: int):
    """float32 (G,) of a scalar, (G,) or None."""
    return jnp.broadcast_to(jnp.float32(1) if factor is None else factor, (groups,))


def _multiple(name: str, size: int, unit: int) -> str | None:
    return f"needs {name} % {unit} == 0, got {name}={size}" if size % unit else None


def _mm_cost(operands, values, outs, **_) -> Cost:
    x, w, sizes, scale, bias = operands
    cost, rows, weights = costs.product(
        x, w, [sizes], [values[2]], outs[0], form=SIZES, rows=x.shape[0], transpose_x=False,
        transpose_w=True,
    )  # fmt: skip
    return cost + costs.bias_cost(bias, rows, weights) + Cost(0, costs.bytes_of(scale))


def _wgrad_cost(operands, values, outs, **_) -> Cost:
    """Rows are those of the operands, padded group by group."""
    (x, dy, sizes, *rest), value = operands, values[2]
    (k, stored), (n, _), (rows,) = x.shape, dy.shape, x.positions.shape
    padded = None if value is None else lambda: padded_sizes(value(), rows)
    count, read, *_ = costs.counts(SIZES, [padded], stored, stored, sizes.shape[0])
    packed = costs.bytes_of((x.weight, x.scales, dy.weight, dy.scales)) // max(stored, 1) * read
    return Cost(2 * count * k * n, packed + costs.bytes_of((sizes, rest, outs)))
