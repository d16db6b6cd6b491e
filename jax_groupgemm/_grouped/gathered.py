"""``mm`` of rows that are named by index: the kernel that multiplies them gathers and scatters them
itself where there is one; otherwise it is the composition that ``gather`` spells out.

    out[y_index[t]] = x[x_index[t]] @ w[group(t)]                  T (blocks of M rows) is grouped
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import costs, dtypes, partition
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.segments import SIZES
from .._kernels import choose
from . import call, primitives


def mm(x, w, meta, x_index, y_index, *, out_dtype, transpose_w=False, precision=None,
       implementation=None):  # fmt: skip
    """x (A, M, K), w (G, K, N) or its transpose, the result (T, M, N).

    ``meta`` is (group_sizes, group_offset), of T * M rows. x_index, int32 (T,): where it is outside
    of [0, A) the products are zeros, whatever w holds. y_index is a permutation, or None.
    """
    return MM(
        x, w, meta, x_index, y_index, out_dtype=jnp.dtype(out_dtype), transpose_w=transpose_w,
        precision=precision, implementation=implementation,
    )  # fmt: skip


def gather(x, meta, x_index, y_index, place, product: Callable):
    """The same with ``product(a, meta, form=, rows=)`` of a, the rows that have been gathered.
    ``place`` is the inverse of y_index, where it is known, or None."""
    count, m, _ = x.shape
    pairs = x_index.shape[0]
    valid = (x_index >= 0) & (x_index < count)
    # In the dtype of sums, for the sake of the derivative: rows may be gathered more than once.
    wide = x.astype(dtypes.accumulator_dtype(x.dtype))[jnp.where(valid, x_index, 0)]
    rows = jnp.where(valid[:, None, None], wide.astype(x.dtype), jnp.zeros((), x.dtype))
    y = product(partition.merge(rows, (2, 1)), meta, form=SIZES, rows=pairs * m)
    y = partition.split(y, ((pairs, m), y.shape[1:]))
    # Rows that were not gathered are zeros, but zeros times an infinite matrix are not.
    y = jnp.where(valid[:, None, None], y, jnp.zeros((), y.dtype))
    if y_index is None:
        return y
    return y[inverse(y_index) if place is None else place]


def order(values) -> tuple[jax.Array, jax.Array | None]:
    """``argsort(values, stable=True)``, and its inverse where that comes with it: of few values,
    where both are sums, which is faster than sorting."""
    if values.size > choose.COMPARE_UP_TO:
        return jnp.argsort(values, stable=True), None
    i = lax.iota(jnp.int32, values.size)
    before = values[None] < values[:, None]
    same = (values[None] == values[:, None]) & (i[None] < i[:, None])
    place = (before | same).sum(1, dtype=jnp.int32)
    return inverse(place), place


def inverse(permutation) -> jax.Array:
    """``argsort`` of a permutation."""
    if permutation.size > choose.COMPARE_UP_TO:
        return jnp.argsort(permutation)
    i = lax.iota(jnp.int32, permutation.size)
    return jnp.where(permutation[None] == i[:, None], i[None], 0).sum(1, dtype=jnp.int32)


def composed(x, w, meta, x_index, y_index, **params):
    """The meaning of the primitive."""
    product = lambda a, meta, **same: primitives.mm(a, w, meta, **params, **same)
    return gather(x, meta, x_index, y_index, None, product)


def _call_of(platform, x, w, meta, x_index, y_index, *, out_dtype, transpose_w, precision,
             implementation):  # fmt: skip
    count, m, k = x.shape
    pairs = x_index.shape[0]
    same: dict[str, Any] = {
        "form": SIZES, "rows": pairs * m, "out_dtype": out_dtype, "transpose_x": False,
        "transpose_w": transpose_w, "transpose_out": False, "precision": precision,
    }  # fmt: skip
    rows = jax.ShapeDtypeStruct((count * m, k), x.dtype)
    problem = call.mm_problem(
        platform, rows, w, meta, lists=True, implementation=implementation, **same
    )
    choice = choose.fused(problem)
    if choice is None:
        return None
    valid = (x_index >= 0) & (x_index < count)
    out = call.mm(
        choice, x.reshape(rows.shape), w, *meta, **same,
        x_rows=_rows(jnp.where(valid, x_index, -1), m),
        y_rows=None if y_index is None else _rows(y_index, m),
    )  # fmt: skip
    return out.reshape(pairs, m, out.shape[1])


def _rows(index, m: int):
    """The rows of blocks; -1 stays outside."""
    if m == 1:
        return index
    rows = index[:, None] * m + lax.iota(jnp.int32, m)[None]
    return jnp.where(index[:, None] < 0, -1, rows).reshape(-1)


def _cost(operands, values, outs, *, out_dtype, transpose_w, **_) -> Cost:
    (x, w, meta, *indices), (out,) = operands, outs
    pairs, m, n = out.shape
    rows = jax.ShapeDtypeStruct((pairs * m, x.shape[2]), x.dtype)
    flat = jax.ShapeDtypeStruct((pairs * m, n), out_dtype)
    cost, *_ = costs.product(
        rows, w, meta, values[2], flat, form=SIZES, rows=pairs * m, transpose_x=False,
        transpose_w=transpose_w,
    )  # fmt: skip
    return cost + Cost(0, costs.bytes_of(indices))


MM = Composed("jgg_gathered_mm", composed, _call_of, cost=_cost)
