"""``dispatch`` and ``combine``: rows to their experts, and back. Each is the other's transpose.

A permutation's transpose is a gather, so neither they nor their reverse mode scatter rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._core import check, costs, dtypes, partition
from .._core.composed import Composed
from .._core.operations import operation
from .._core.primitive import vary_alike
from . import call
from .routing import Routing


@operation
def dispatch(x: ArrayLike, routing: Routing) -> jax.Array:
    """``out[r] = x[order[r] // k]``; **rows are grouped** by expert.

    Rows behind the last are zeros.

    Args:
      x: ``(T, D)``, a token each.
      routing: of those tokens, from :func:`route`.

    Returns:
      ``(R, D)``, in x's dtype.

    Raises:
      ValueError: shapes do not fit.

    Differentiable to any order in x. Reverse mode adds up each token's rows in float32, as
    :func:`combine` does.

    Examples:
      >>> routing = jgg.route(jnp.array([[1, 0], [1, 2]]), 3)
      >>> jgg.dispatch(jnp.array([[10.0], [20.0]]), routing)[:, 0].tolist()
      [10.0, 10.0, 20.0, 20.0]
    """
    op = "dispatch"
    x = check.array(op, "x", x)
    tokens = _checked(op, routing).place.shape[0]
    check.shape(op, "x", x, (tokens, None), "T, D", f"because routing is of {tokens} tokens")
    return dispatched(x, routing)


@operation
def combine(rows: ArrayLike, routing: Routing, expert_weight: ArrayLike | None = None) -> jax.Array:
    """``out[t] = sum_j expert_weight[t, j] * rows[place[t, j]]``; **rows are grouped** by expert.

    Sums are float32 (float64 for float64), in the order of j, and rounded once. A pair that does
    not exist adds nothing. Without weights, rows are added as they are.

    Args:
      rows: ``(R, D)``, sorted by expert.
      routing: from :func:`route`.
      expert_weight: ``(T, k)``, floats of any dtype, where rows are floats.

    Returns:
      ``(T, D)``, in the dtype of rows.

    Raises:
      ValueError: shapes do not fit.
      TypeError: ``expert_weight`` holds floats and rows are integers, which cannot hold the sums.

    Differentiable to any order in rows and ``expert_weight``; reverse mode gathers.

    Examples:
      >>> routing = jgg.route(jnp.array([[1, 0], [1, 2]]), 3)
      >>> rows = jnp.array([[1.0], [2.0], [3.0], [4.0]])  # of experts 0, 1, 1, 2
      >>> jgg.combine(rows, routing, jnp.array([[0.5, 1.0], [1.0, 1.0]]))[:, 0].tolist()
      [2.0, 7.0]
    """
    op = "combine"
    rows = check.array(op, "rows", rows)
    check.numeric(op, "rows", rows)
    place = _checked(op, routing).place
    count = routing.order.shape[0]
    check.shape(op, "rows", rows, (count, None), "R, D", f"because routing has {count} rows")
    if expert_weight is not None:
        expert_weight = check.array(op, "expert_weight", expert_weight)
        why = f"because routing.place is {place.shape}"
        check.shape(op, "expert_weight", expert_weight, place.shape, "T, k", why)
        weight_dtype = expert_weight.dtype
        if jnp.iscomplexobj(expert_weight) and not jnp.iscomplexobj(rows):
            given = weight_dtype.name
            raise TypeError(f"jgg.{op}: expert_weight must hold floats as rows do, got {given}")
        if jnp.issubdtype(rows.dtype, jnp.integer) and jnp.issubdtype(weight_dtype, jnp.floating):
            raise TypeError(
                f"jgg.{op}: rows are {rows.dtype.name}, which holds no sums with weights of dtype "
                f"{weight_dtype.name}. Convert rows to floats"
            )
    return combined(rows, routing, expert_weight)


def dispatched(x, routing: Routing, weight=None, *, clears_rest: bool = True) -> jax.Array:
    """:func:`dispatch` of checked operands: ``weight.reshape(-1)[order[r]] * x[order[r] // k]``,
    rounded once. Without ``clears_rest`` rows behind the last may hold anything."""
    return _DISPATCH(x, routing, weight, clears_rest=clears_rest)


def combined(rows, routing: Routing, weight, dtype: DTypeLike | None = None) -> jax.Array:
    """:func:`combine` of checked operands, with a result of another dtype."""
    return _COMBINE(rows, routing, weight, dtype=jnp.dtype(rows.dtype if dtype is None else dtype))


def _checked(op: str, routing) -> Routing:
    if not isinstance(routing, Routing):
        raise TypeError(f"jgg.{op}: routing must be a jgg.Routing, got {check.describe(routing)}")
    for name, letters in (("order", "R"), ("place", "T, k"), ("group_sizes", "E")):
        value = check.integers(op, f"routing.{name}", getattr(routing, name))
        axes = (None,) * (1 + letters.count(","))
        check.shape(op, f"routing.{name}", value, axes, letters, "as jgg.route makes it")
    return routing


# ---- what they mean --------------------------------------------------------------------------


def at_places(of_rows, place):
    """The row of each place, zeros where it is -1. There may be no row at all."""
    if not of_rows.shape[0]:
        zeros = jnp.zeros((*place.shape, *of_rows.shape[1:]), of_rows.dtype)
        return vary_alike(zeros, of_rows, place)[0]
    there = place >= 0
    found = of_rows[jnp.where(there, place, 0)]
    return jnp.where(there.reshape(*there.shape, *[1] * (found.ndim - there.ndim)), found, 0)


def _tokens_of(routing: Routing):
    """The token of each row, 0 where it has none, and whether it has one."""
    valid = routing.order >= 0
    return jnp.where(valid, routing.order // routing.place.shape[1], 0), valid[:, None]


def _of_rows(weight, routing: Routing, wide):
    """The weight of each row, (R, 1)."""
    return weight.reshape(-1)[jnp.maximum(routing.order, 0)].astype(wide)[:, None]


def _dispatched(x, routing: Routing, weight, dtype=None):
    """In another dtype if one is given."""
    dtype = x.dtype if dtype is None else dtype
    token, valid = _tokens_of(routing)
    rows = partition.shared(x, token)
    if weight is not None:
        wide = dtypes.accumulator_dtype(dtype)
        rows = rows.astype(wide) * _of_rows(weight, routing, wide)
    return jnp.where(valid, rows, jnp.zeros((), rows.dtype)).astype(dtype)


def _sum_of_rows(rows, routing: Routing, weight, dtype):
    """One gather for each j, so that the order of the sum is that of j, and no array has all."""
    wide = dtypes.accumulator_dtype(rows.dtype)
    tokens, k = routing.place.shape
    out = jnp.zeros((tokens, rows.shape[1]), wide)
    for j in range(k):
        place = routing.place[:, j]
        row = at_places(rows, place).astype(wide)
        if weight is not None:
            row = jnp.where((place >= 0)[:, None], row * weight[:, j, None].astype(wide), 0)
        out = out + row
    return out.astype(dtype)


def _combine_cotangents(ct, rows, routing: Routing, weight):
    """All of a row's cotangent is its token's, and a weight's is a row's product with it."""
    token, valid = _tokens_of(routing)
    wide = dtypes.accumulator_dtype(rows.dtype)
    # A row that no token has may hold anything.
    each = partition.shared(ct, token).astype(wide)
    products = jnp.where(valid, each * rows.astype(wide), 0).sum(1)
    return _dispatched(ct, routing, weight, rows.dtype), at_places(products, routing.place)


# ---- reverse mode ------------------------------------------------------------------------------


def _dispatch_forward(x, routing: Routing, weight, *, clears_rest):
    return _DISPATCH(x, routing, weight, clears_rest=clears_rest), ()


def _dispatch_backward(_, operands, cts, *, clears_rest):
    del clears_rest
    (x, routing, weight), (ct,) = operands, cts
    dx = _COMBINE(ct, routing, weight, dtype=x.dtype)
    if weight is None:
        return dx, None, None
    return dx, None, _COMBINE_BACKWARD(x, ct, routing, weight)[1].astype(weight.dtype)


def _combine_forward(rows, routing: Routing, weight, *, dtype):
    return _COMBINE(rows, routing, weight, dtype=dtype), ()


def _combine_backward(_, operands, cts, *, dtype):
    del dtype
    (rows, routing, weight), (ct,) = operands, cts
    if weight is None:
        return _DISPATCH(ct, routing, None, clears_rest=True).astype(rows.dtype), None, None
    drows, dweight = _COMBINE_BACKWARD(ct, rows, routing, weight)
    return drows, None, dweight.astype(weight.dtype)


_DISPATCH = Composed(
    "jgg_dispatch",
    lambda x, routing, weight, *, clears_rest: _dispatched(x, routing, weight),
    call.dispatch,
    cost=costs.conversion,
    vjp=(_dispatch_forward, _dispatch_backward),
    batches_backward=True,
)  # fmt: skip
_COMBINE = Composed(
    "jgg_combine",
    lambda rows, routing, weight, *, dtype: _sum_of_rows(rows, routing, weight, dtype),
    call.combine,
    cost=costs.conversion,
    vjp=(_combine_forward, _combine_backward),
    batches_backward=True,
)
_COMBINE_BACKWARD = Composed(
    "jgg_combine_backward", _combine_cotangents, call.combine_backward, cost=costs.conversion
)
