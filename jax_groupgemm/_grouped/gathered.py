"""``mm`` of rows that are named by index: the kernel that multiplies them gathers and scatters them
itself where there is one; otherwise it is the composition that ``gather`` spells out.

    out[y_index[t]] = x[x_index[t]] @ w[group(t)]                  T (blocks of M rows) is grouped
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .._core import costs, dtypes, partition
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.segments import SIZES
from .._kernels import choose
from . import call, primitives

# Rows per matrix up to which the kernel that takes lists is faster than a permuted copy of x and
# the kernel that takes boxes of rows. Measured on an H200, 128 matrices of 2048 x 1536: 4 rows each
# 208 and 214 us, 32 rows 249 and 278, 256 rows 581 and 576; 8 of 4096 x 4096: 16 rows 80 and 86,
# 128 rows 124 and 118, 1024 rows 654 and 552.
_LISTS_PAY_ROWS = 64


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


# Up to so many numbers are put in order by comparing each with each.
FEW = 512


def order(values) -> tuple[jax.Array, jax.Array | None]:
    """``argsort(values, stable=True)``, and its inverse where that comes with it: of few values,
    where both are sums, which is faster than sorting."""
    if values.size > FEW:
        return jnp.argsort(values, stable=True), None
    i = lax.iota(jnp.int32, values.size)
    before = values[None] < values[:, None]
    same = (values[None] == values[:, None]) & (i[None] < i[:, None])
    place = (before | same).sum(1, dtype=jnp.int32)
    return inverse(place), place


def inverse(permutation) -> jax.Array:
    """``argsort`` of a permutation."""
    if permutation.size > FEW:
        return jnp.argsort(permutation)
    i = lax.iota(jnp.int32, permutation.size)
    return jnp.where(permutation[None] == i[:, None], i[None], 0).sum(1, dtype=jnp.int32)


def composed(x, w, meta, x_index, y_index, **params):
    """What the primitive means."""
    product = lambda a, meta, **same: primitives.mm(a, w, meta, **params, **same)
    return gather(x, meta, x_index, y_index, None, product)


def _call_of(platform, x, w, meta, x_index, y_index, *, out_dtype, transpose_w, precision,
             implementation):  # fmt: skip
    count, m, k = x.shape
    pairs = x_index.shape[0]
    if implementation is None and pairs * m > _LISTS_PAY_ROWS * w.shape[0]:
        return None
    if not choose.takes_lists(platform, x, w, out_dtype, implementation, transpose_w):
        return None
    valid = (x_index >= 0) & (x_index < count)
    out = call.mm(
        "sm90", x.reshape(count * m, k), w, *meta, form=SIZES, rows=pairs * m, out_dtype=out_dtype,
        transpose_x=False, transpose_w=transpose_w, transpose_out=False, precision=precision,
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
