"""The two primitives of every full-precision grouped product, and all their transformations.

``mm`` and ``wgrad`` (``_core/products.py`` has their equations, ``_core/segments.py`` their
metadata) are the three derivatives of one trilinear form, so together they are closed under jvp,
transpose and batching: every rule below is a call of one of the two. A product of another kind
adds itself with ``primitive.register``, as ``_quantized/product.py`` does.

Each exists twice. The *outer* primitive is what user code binds: under Auto sharding it becomes
what XLA's partitioner can divide (``_core/partitioner.py``). The *inner* one is what one device
runs; it is bound directly where the code is already per-device (inside ``shard_map`` over every
mesh axis).
"""

from __future__ import annotations

import functools

from jax.interpreters import ad

from .._core import batching, costs, partition, primitive, segments
from .._core.costs import Cost
from .._core.products import Mm, Wgrad
from .._core.segments import Form, Metadata
from .._kernels import choose
from . import call, reference

mm = functools.partial(primitive.bind, "mm")
wgrad = functools.partial(primitive.bind, "wgrad")


# ---- differentiation -------------------------------------------------------------------------


def _bilinear(operands, tangents, _):
    """Both primitives are linear in each of their first two operands."""
    (a, b, metadata), (da, db, _) = operands, tangents
    terms = []
    if type(da) is not ad.Zero:
        terms.append((da, b, metadata))
    if type(db) is not ad.Zero:
        terms.append((a, db, metadata))
    return terms


def _mm_transpose(ct, operands, product: Mm):
    x, w, metadata = operands
    if ad.is_undefined_primal(x):
        of_x = product.derived(
            Mm, rows=product.rows_x(x.aval), out_dtype=x.aval.dtype,
            transpose_x=product.transpose_out, transpose_w=not product.transpose_w,
            transpose_out=product.transpose_x, clears_rest=product.clears_rest,
        )  # fmt: skip
        return mm(ct, w, metadata.swap(), of_x), None
    (a, transpose_a), (b, transpose_b) = (x, product.transpose_x), (ct, product.transpose_out)
    if product.transpose_w:
        (a, transpose_a), (b, transpose_b) = (b, transpose_b), (a, transpose_a)
        metadata = metadata.swap()
    of_w = product.derived(
        Wgrad, groups=w.aval.shape[0], out_dtype=w.aval.dtype, transpose_x=transpose_a,
        transpose_y=transpose_b,
    )  # fmt: skip
    return None, wgrad(a, b, metadata, of_w)


def _wgrad_transpose(ct, operands, product: Wgrad):
    x, y, metadata = operands
    if ad.is_undefined_primal(x):
        of_x = product.derived(
            Mm, rows=x.aval.shape[1 if product.transpose_x else 0], out_dtype=x.aval.dtype,
            transpose_x=product.transpose_y, transpose_w=True, transpose_out=product.transpose_x,
        )  # fmt: skip
        return mm(y, ct, metadata.swap(), of_x), None
    of_y = product.derived(
        Mm, rows=y.aval.shape[1 if product.transpose_y else 0], out_dtype=y.aval.dtype,
        transpose_x=product.transpose_x, transpose_out=product.transpose_y,
    )  # fmt: skip
    return None, mm(x, ct, metadata, of_y)


# ---- batching --------------------------------------------------------------------------------


def _mm_batch(size, operands, dims, product: Mm):
    (x, w, metadata), (x_dim, w_dim, meta_dims) = operands, dims
    x, metadata = batching.fold_product(
        product, size, x, x_dim, metadata, meta_dims, rows=product.rows,
        transpose_x=product.transpose_x, groups=batching.extent(w, w_dim, 0),
        own_weights=w_dim is not None,
    )  # fmt: skip
    folded = product.replace(rows=size * product.rows)
    out = mm(x, batching.fold_leading(w, w_dim), metadata, folded)
    if product.transpose_out:
        return partition.split(out, ((out.shape[0],), (size, product.rows))), 1
    return partition.split(out, ((size, product.rows), (out.shape[1],))), 0


def _wgrad_batch(size, operands, dims, product: Wgrad):
    (x, y, metadata), (x_dim, y_dim, meta_dims) = operands, dims
    groups = product.groups
    shared_meta = meta_dims.values is None and meta_dims.group_offset is None
    # An operand stored with its columns first takes the batch there: no copy, longer rows.
    if shared_meta and y_dim is None and product.transpose_x:
        x, columns = batching.fold_leading(x, x_dim), x.shape[0 if x_dim else 1]
        out = wgrad(x, y, metadata, product)
        return partition.split(out, ((groups,), (size, columns), (out.shape[2],))), 1
    if shared_meta and x_dim is None and product.transpose_y:
        y, columns = batching.fold_leading(y, y_dim), y.shape[0 if y_dim else 1]
        out = wgrad(x, y, metadata, product)
        return partition.split(out, ((groups,), (out.shape[1],), (size, columns))), 2
    rows_x = batching.extent(x, x_dim, 1 if product.transpose_x else 0)
    rows_y = batching.extent(y, y_dim, 1 if product.transpose_y else 0)
    table = batching.batched_table(metadata, meta_dims, rows_x, rows_y, groups)
    x, x_step = batching.fold_rows(x, x_dim, product.transpose_x, rows_x)
    y, y_step = batching.fold_rows(y, y_dim, product.transpose_y, rows_y)
    batching.check_rows(product, size, max(rows_x, rows_y))
    form = metadata.form
    form = Form(
        "segments",
        ordered_x=form.ordered_x and x_dim is not None,
        ordered_y=form.ordered_y and y_dim is not None,
        own_weight=form.own_weight,
        aligned=form.aligned and (x_dim is None) == (y_dim is None) and rows_x == rows_y,
    )
    folded = Metadata(form, segments.fold(table, size, x_step, y_step, groups))
    out = wgrad(x, y, folded, product.replace(groups=size * groups))
    return partition.split(out, ((size, groups), (out.shape[1],), (out.shape[2],))), 0


# ---- lowering --------------------------------------------------------------------------------


def _mm_lowering(platform, x, w, metadata, product: Mm):
    plan = choose.choose(call.mm_problem(platform, x, w, metadata, product))
    if plan is None:
        return reference.mm(x, w, metadata, product)
    return call.mm(plan, x, w, metadata, product)


def _wgrad_lowering(platform, x, y, metadata, product: Wgrad):
    plan = choose.choose(call.wgrad_problem(platform, x, y, metadata, product))
    if plan is None:
        return reference.wgrad(x, y, metadata, product)
    return call.wgrad(plan, x, y, metadata, product)


# ---- cost ------------------------------------------------------------------------------------


def _mm_cost(x, w, metadata, values, out, product: Mm) -> Cost:
    return costs.product(x, w, metadata, values, out, product)[0]


def _wgrad_cost(x, y, metadata, values, out, product: Wgrad) -> Cost:
    groups, a, b = out.shape
    count, in_x, in_y, _ = costs.counts(metadata, values, *product.rows(x, y), groups)
    read = in_x * a * x.dtype.itemsize + in_y * b * y.dtype.itemsize
    return Cost(2 * count * a * b, read + costs.bytes_of((metadata, out)))


primitive.register(
    "mm", jvp=_bilinear, transpose=_mm_transpose, batch=_mm_batch, lowering=_mm_lowering,
    cost=_mm_cost,
)  # fmt: skip
primitive.register(
    "wgrad", jvp=_bilinear, transpose=_wgrad_transpose, batch=_wgrad_batch,
    lowering=_wgrad_lowering, cost=_wgrad_cost,
)  # fmt: skip
