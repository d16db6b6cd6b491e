"""The two primitives of every full-precision grouped product, and all their transformations.

``mm`` and ``wgrad`` (see ``reference.py`` for their equations, ``_segments.py`` for their
metadata) are the three derivatives of one trilinear form, so together they are closed under
jvp, transpose and batching: every rule below is a call of one of the two. A product of another
kind (``_qmm.py``) adds itself with ``register``.

Each exists twice. The *outer* primitive is what user code binds: under Auto sharding its lowering
asks the partitioner how its operands are sharded (``_partition.py``). The *inner* one is what one
device runs; it is bound directly where the code is already per-device (inside ``shard_map``).
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.interpreters import ad

from .._core import batching, costs, partition, primitive, segments
from .._core.costs import Cost
from .._core.segments import Form
from .._kernels import choose
from . import call, reference

# ---- binding -------------------------------------------------------------------------------


def mm(x, w, meta, *, form: Form, rows: int, out_dtype, transpose_x=False, transpose_w=False,
       transpose_out=False, precision=None, implementation=None, cotangent_dtype=None):  # fmt: skip
    """``out[y_start_s + i] += x[x_start_s + i] @ w[weight_s]``; T (rows) is grouped.

    x is (T, K), w (G, K, N), the result (rows, N); ``transpose_*`` says that an operand, or the
    result, is stored with its last two axes exchanged.
    """
    return primitive.bind(
        "mm", x, w, *meta, form=form, rows=rows, out_dtype=jnp.dtype(out_dtype),
        transpose_x=transpose_x, transpose_w=transpose_w, transpose_out=transpose_out,
        precision=precision, implementation=implementation, cotangent_dtype=cotangent_dtype,
    )  # fmt: skip


def wgrad(x, y, meta, *, form: Form, groups: int, out_dtype, transpose_x=False, transpose_y=False,
          precision=None, implementation=None, cotangent_dtype=None):  # fmt: skip
    """``out[weight_s] += x_s^T @ y_s`` over the rows of segment s; T (contracted) is grouped.

    x is (T, A), y (T, B), the result (groups, A, B); ``transpose_*`` says that an operand is
    stored with its axes exchanged.
    """
    return primitive.bind(
        "wgrad", x, y, *meta, form=form, groups=groups, out_dtype=jnp.dtype(out_dtype),
        transpose_x=transpose_x, transpose_y=transpose_y,
        precision=precision, implementation=implementation, cotangent_dtype=cotangent_dtype,
    )  # fmt: skip


# ---- abstract evaluation ---------------------------------------------------------------------


def _mm_abstract(x, w, *meta, rows, transpose_w, transpose_out, out_dtype, **_):
    n = w.shape[1 if transpose_w else 2]
    return primitive.out_aval((n, rows) if transpose_out else (rows, n), out_dtype, (x, w, *meta))


def _wgrad_abstract(x, y, *meta, groups, transpose_x, transpose_y, out_dtype, **_):
    shape = (groups, x.shape[0 if transpose_x else 1], y.shape[0 if transpose_y else 1])
    return primitive.out_aval(shape, out_dtype, (x, y, *meta))


# ---- differentiation -------------------------------------------------------------------------


def _bilinear_jvp(name, primals, tangents, **params):
    """Both primitives are linear in each of their first two operands."""
    (a, b, *meta), (da, db, *_) = primals, tangents
    out = primitive.bind(name, a, b, *meta, **params)
    terms = []
    if type(da) is not ad.Zero:
        terms.append(primitive.bind(name, da, b, *meta, **params))
    if type(db) is not ad.Zero:
        terms.append(primitive.bind(name, a, db, *meta, **params))
    return out, primitive.sum_of_tangents(out, terms)


def _mm_transpose(ct, x, w, *meta, form, rows, out_dtype, transpose_x, transpose_w, transpose_out,
                  cotangent_dtype, **same):  # fmt: skip
    none = [None] * len(meta)
    if type(ct) is ad.Zero:
        return None, None, *none
    ct = ct if cotangent_dtype is None else ct.astype(cotangent_dtype)
    if ad.is_undefined_primal(x):
        dx = mm(
            ct, w, meta, form=form.swap(), rows=x.aval.shape[1 if transpose_x else 0],
            out_dtype=x.aval.dtype, transpose_x=transpose_out, transpose_w=not transpose_w,
            transpose_out=transpose_x, **same,
        )  # fmt: skip
        return dx, None, *none
    groups = w.aval.shape[0]
    if transpose_w:
        dw = wgrad(
            ct, x, meta, form=form.swap(), groups=groups, out_dtype=w.aval.dtype,
            transpose_x=transpose_out, transpose_y=transpose_x, **same,
        )  # fmt: skip
    else:
        dw = wgrad(
            x, ct, meta, form=form, groups=groups, out_dtype=w.aval.dtype,
            transpose_x=transpose_x, transpose_y=transpose_out, **same,
        )  # fmt: skip
    return None, dw, *none


def _wgrad_transpose(ct, x, y, *meta, form, groups, out_dtype, transpose_x, transpose_y,
                     cotangent_dtype, **same):  # fmt: skip
    none = [None] * len(meta)
    if type(ct) is ad.Zero:
        return None, None, *none
    ct = ct if cotangent_dtype is None else ct.astype(cotangent_dtype)
    if ad.is_undefined_primal(x):
        dx = mm(
            y, ct, meta, form=form.swap(), rows=x.aval.shape[1 if transpose_x else 0],
            out_dtype=x.aval.dtype, transpose_x=transpose_y, transpose_w=True,
            transpose_out=transpose_x, **same,
        )  # fmt: skip
        return dx, None, *none
    dy = mm(
        x, ct, meta, form=form, rows=y.aval.shape[1 if transpose_y else 0],
        out_dtype=y.aval.dtype, transpose_x=transpose_x, transpose_w=False,
        transpose_out=transpose_y, **same,
    )  # fmt: skip
    return None, dy, *none


# ---- batching --------------------------------------------------------------------------------


def _mm_batch(args, dims, *, form, rows, transpose_x, transpose_w, transpose_out, **same):
    (x, w, *meta), (x_dim, w_dim, *_) = args, dims
    size = batching.batch_size(args, dims)
    x, table, form = batching.fold_product(
        "mm", size, x, x_dim, meta, dims[2:], form=form, rows=rows, transpose_x=transpose_x,
        groups=batching.extent(w, w_dim, 0), own_weights=w_dim is not None,
    )  # fmt: skip
    out = mm(
        x, batching.fold_leading(w, w_dim), (table,), form=form, rows=size * rows,
        transpose_x=transpose_x, transpose_w=transpose_w, transpose_out=transpose_out, **same,
    )  # fmt: skip
    if transpose_out:
        return partition.split(out, ((out.shape[0],), (size, rows))), 1
    return partition.split(out, ((size, rows), (out.shape[1],))), 0


def _wgrad_batch(args, dims, *, form, groups, transpose_x, transpose_y, **same):
    (x, y, *meta), (x_dim, y_dim, *meta_dims) = args, dims
    size = batching.batch_size(args, dims)
    shared_meta = all(d is None for d in meta_dims)
    # An operand stored with its columns first takes the batch there: no copy, longer rows.
    if shared_meta and y_dim is None and transpose_x:
        x, columns = batching.fold_leading(x, x_dim), x.shape[0 if x_dim else 1]
        out = wgrad(
            x, y, meta, form=form, groups=groups, transpose_x=True, transpose_y=transpose_y, **same
        )
        return partition.split(out, ((groups,), (size, columns), (out.shape[2],))), 1
    if shared_meta and x_dim is None and transpose_y:
        y, columns = batching.fold_leading(y, y_dim), y.shape[0 if y_dim else 1]
        out = wgrad(
            x, y, meta, form=form, groups=groups, transpose_x=transpose_x, transpose_y=True, **same
        )
        return partition.split(out, ((groups,), (out.shape[1],), (size, columns))), 2
    rows_x = batching.extent(x, x_dim, 1 if transpose_x else 0)
    rows_y = batching.extent(y, y_dim, 1 if transpose_y else 0)
    table = batching.batched_table(form, meta, meta_dims, rows_x, rows_y, groups)
    x, x_step = batching.fold_rows(x, x_dim, transpose_x, rows_x)
    y, y_step = batching.fold_rows(y, y_dim, transpose_y, rows_y)
    batching.check_rows("wgrad", size, max(rows_x, rows_y))
    folded = segments.fold(table, size, x_step, y_step, groups)
    form = Form(
        "segments",
        ordered_x=form.ordered_x and x_dim is not None,
        ordered_y=form.ordered_y and y_dim is not None,
        own_weight=form.own_weight,
        aligned=form.aligned and (x_dim is None) == (y_dim is None) and rows_x == rows_y,
    )
    out = wgrad(
        x, y, (folded,), form=form, groups=size * groups, transpose_x=transpose_x,
        transpose_y=transpose_y, **same,
    )  # fmt: skip
    return partition.split(out, ((size, groups), (out.shape[1],), (out.shape[2],))), 0


# ---- lowering --------------------------------------------------------------------------------


def _mm_lowering(platform, x, w, *meta, cotangent_dtype, implementation, **params):
    del cotangent_dtype
    problem = call.mm_problem(platform, x, w, meta, implementation=implementation, **params)
    choice = choose.choose(problem)
    if choice is None:
        return reference.mm(x, w, *meta, **params)
    return call.mm(choice, x, w, *meta, **params)


def _wgrad_lowering(platform, x, y, *meta, cotangent_dtype, implementation, **params):
    del cotangent_dtype
    problem = call.wgrad_problem(platform, x, y, meta, implementation=implementation, **params)
    choice = choose.choose(problem)
    if choice is None:
        return reference.wgrad(x, y, *meta, **params)
    return call.wgrad(choice, x, y, *meta, **params)


# ---- cost ------------------------------------------------------------------------------------


def _mm_cost(operands, values, outs, **params) -> Cost:
    x, w, *meta = operands
    return costs.product(x, w, meta, values[2:], outs[0], **params)[0]


def _wgrad_cost(operands, values, outs, *, form, transpose_x, transpose_y, **_) -> Cost:
    (x, y, *meta), (out,) = operands, outs
    groups, a, b = out.shape
    rows_x, rows_y = x.shape[1 if transpose_x else 0], y.shape[1 if transpose_y else 0]
    count, in_x, in_y, _ = costs.counts(form, values[2:], rows_x, rows_y, groups)
    read = in_x * a * x.dtype.itemsize + in_y * b * y.dtype.itemsize
    return Cost(2 * count * a * b, read + costs.bytes_of((meta, out)))


primitive.register(
    "mm", _mm_abstract, functools.partial(_bilinear_jvp, "mm"), _mm_transpose, _mm_batch,
    _mm_lowering, _mm_cost,
)  # fmt: skip
primitive.register(
    "wgrad", _wgrad_abstract, functools.partial(_bilinear_jvp, "wgrad"), _wgrad_transpose,
    _wgrad_batch, _wgrad_lowering, _wgrad_cost,
)  # fmt: skip
