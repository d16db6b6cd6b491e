"""``mm`` of rows that are named by index: the kernel that multiplies them gathers and scatters them
itself where there is one; otherwise it is the composition that ``gather`` spells out.

    out[y_index[t]] = x[x_index[t]] @ w[group(t)]                  T (blocks of M rows) is grouped
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from . import _call, _composed, _primitives
from ._segments import SIZES


def mm(x, w, meta, x_index, y_index, *, out_dtype, transpose_w=False, precision=None,
       implementation=None):  # fmt: skip
    """x (A, M, K), w (G, K, N) or its transpose, the result (T, M, N).

    ``meta`` is (group_sizes, group_offset), of T * M rows. x_index, int32 (T,): where it is outside
    of [0, A) the products are zeros, whatever w holds. y_index is a permutation, or None.
    """
    indices = (x_index,) if y_index is None else (x_index, y_index)
    return MM(
        x, w, *meta, *indices, out_dtype=jnp.dtype(out_dtype), transpose_w=transpose_w,
        precision=precision, implementation=implementation,
    )  # fmt: skip


def gather(x, meta, x_index, y_index, product: Callable):
    """The same with ``product(a, meta, form=, rows=)`` of a, the rows that have been gathered."""
    count, m, k = x.shape
    pairs = x_index.shape[0]
    valid = (x_index >= 0) & (x_index < count)
    zero = jnp.zeros((), x.dtype)
    rows = jnp.where(valid[:, None, None], x[jnp.where(valid, x_index, 0)], zero)
    y = product(rows.reshape(pairs * m, k), meta, form=SIZES, rows=pairs * m)
    y = y.reshape(pairs, m, y.shape[1])
    # Rows that were not gathered are zeros, but zeros times an infinite matrix are not.
    y = jnp.where(valid[:, None, None], y, jnp.zeros((), y.dtype))
    return y if y_index is None else y[jnp.argsort(y_index)]


def split(operands):
    """x, w, (group_sizes, group_offset), x_index and y_index, which may be None."""
    x, w, sizes, offset, x_index, *y_index = operands
    return x, w, (sizes, offset), x_index, y_index[0] if y_index else None


def composed(*operands, **params):
    """What the primitive means."""
    x, w, meta, x_index, y_index = split(operands)
    product = lambda a, meta, **same: _primitives.mm(a, w, meta, **params, **same)
    return gather(x, meta, x_index, y_index, product)


def _abstract(*operands, out_dtype, transpose_w, **_):
    x, w, _, x_index, _ = split(operands)
    n = w.shape[1 if transpose_w else 2]
    return _primitives.out_aval((x_index.shape[0], x.shape[1], n), out_dtype, operands)


def _lowering(platform, *operands, out_dtype, transpose_w, precision, implementation):
    x, w, meta, x_index, y_index = split(operands)
    if not _call.takes_lists(platform, x, w, out_dtype, implementation, transpose_w):

        def product(a, meta, **same):
            return _primitives.INNER["mm"].bind(
                a, w, *meta, out_dtype=out_dtype, transpose_x=False, transpose_w=transpose_w,
                transpose_out=False, precision=precision, implementation=implementation,
                cotangent_dtype=None, **same,
            )  # fmt: skip

        return gather(x, meta, x_index, y_index, product)
    count, m, k = x.shape
    pairs = x_index.shape[0]
    valid = (x_index >= 0) & (x_index < count)
    out = _call.mm(
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
    rows = index[:, None] * m + lax.iota(jnp.int32, m)
    return jnp.where(index[:, None] < 0, -1, rows).reshape(-1)


MM = _composed.make("jgg_gathered_mm", _abstract, composed, _lowering)
