"""The two primitives of every full-precision grouped product, and all their transformations.

``mm`` and ``wgrad`` (see ``_reference.py`` for their equations, ``_segments.py`` for their
metadata) are the three derivatives of one trilinear form, so together they are closed under
jvp, transpose and batching: every rule below is a call of one of the two. A product of another
kind (``_qmm.py``) adds itself with ``register``.

Each exists twice. The *outer* primitive is what user code binds: under Auto sharding its lowering
asks the partitioner how its operands are sharded (``_partition.py``). The *inner* one is what one
device runs; it is bound directly where the code is already per-device (inside ``shard_map``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from . import _call, _custom_calls, _partition, _reference, _segments
from ._segments import MAX_ROWS, Form

# ---- binding -------------------------------------------------------------------------------


def mm(x, w, meta, *, form: Form, rows: int, out_dtype, transpose_x=False, transpose_w=False,
       transpose_out=False, precision=None, implementation=None, cotangent_dtype=None):  # fmt: skip
    """``out[y_start_s + i] += x[x_start_s + i] @ w[weight_s]``; T (rows) is grouped.

    x is (T, K), w (G, K, N), the result (rows, N); ``transpose_*`` says that an operand, or the
    result, is stored with its last two axes exchanged.
    """
    return bind(
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
    return bind(
        "wgrad", x, y, *meta, form=form, groups=groups, out_dtype=jnp.dtype(out_dtype),
        transpose_x=transpose_x, transpose_y=transpose_y,
        precision=precision, implementation=implementation, cotangent_dtype=cotangent_dtype,
    )  # fmt: skip


def bind(name, *operands, **params):
    explicit = _partition.explicit_mesh(operands)
    if explicit is not None and not _partition.maps_explicit_axes():
        return _partition.explicit(name, explicit, operands, params, bind)
    manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
    primitive = (INNER if manual else OUTER)[name]
    return primitive.bind(*vary_alike(*operands), **params)


def vary_alike(*operands):
    """Let operands vary over the same manual mesh axes, as one opaque operation needs."""
    varying = [jax.typeof(a).manual_axis_type.varying for a in operands]
    union = frozenset().union(*varying)
    return [
        lax.pcast(a, tuple(sorted(union - v)), to="varying") if union - v else a
        for a, v in zip(operands, varying, strict=True)
    ]


# ---- abstract evaluation ---------------------------------------------------------------------


def _mm_abstract(x, w, *meta, rows, transpose_w, transpose_out, out_dtype, **_):
    n = w.shape[1 if transpose_w else 2]
    return out_aval((n, rows) if transpose_out else (rows, n), out_dtype, (x, w, *meta))


def _wgrad_abstract(x, y, *meta, groups, transpose_x, transpose_y, out_dtype, **_):
    shape = (groups, x.shape[0 if transpose_x else 1], y.shape[0 if transpose_y else 1])
    return out_aval(shape, out_dtype, (x, y, *meta))


def out_aval(shape, dtype, operands):
    varying = {a.manual_axis_type.varying for a in operands}
    if len(varying) != 1:
        raise ValueError(f"operands vary over different manual mesh axes: {varying}")
    mesh = next((a.sharding.mesh for a in operands if not a.sharding.mesh.empty), None)
    if mesh is None:
        return ShapedArray(shape, dtype)
    return ShapedArray(
        shape,
        dtype,
        sharding=NamedSharding(mesh, PartitionSpec(*[None] * len(shape))),
        manual_axis_type=ManualAxisType(varying=varying.pop()),
    )


# ---- differentiation -------------------------------------------------------------------------


def _bilinear_jvp(name, primals, tangents, **params):
    """Both primitives are linear in each of their first two operands."""
    (a, b, *meta), (da, db, *_) = primals, tangents
    out = bind(name, a, b, *meta, **params)
    terms = []
    if type(da) is not ad.Zero:
        terms.append(bind(name, da, b, *meta, **params))
    if type(db) is not ad.Zero:
        terms.append(bind(name, a, db, *meta, **params))
    return out, sum_of_tangents(out, terms)


def sum_of_tangents(out, terms):
    if not terms:
        return zero_tangent(out)
    return functools.reduce(lax.add, terms)


def zero_tangent(out):
    return ad.Zero(jax.typeof(out).to_tangent_aval())


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
    size = batch_size(args, dims)
    x, table, form = fold_product(
        "mm", size, x, x_dim, meta, dims[2:], form=form, rows=rows, transpose_x=transpose_x,
        groups=extent(w, w_dim, 0), own_weights=w_dim is not None,
    )  # fmt: skip
    out = mm(
        x, fold_leading(w, w_dim), (table,), form=form, rows=size * rows, transpose_x=transpose_x,
        transpose_w=transpose_w, transpose_out=transpose_out, **same,
    )  # fmt: skip
    if transpose_out:
        return _partition.split(out, ((out.shape[0],), (size, rows))), 1
    return _partition.split(out, ((size, rows), (out.shape[1],))), 0


def fold_product(name, size, x, x_dim, meta, meta_dims, *, form, rows, groups, own_weights,
                 transpose_x=False):  # fmt: skip
    """x, table and form of a batch of products as one; every problem has weights of its own, or
    all have the same."""
    rows_x = extent(x, x_dim, 1 if transpose_x else 0)
    table = _batched_table(form, meta, meta_dims, rows_x, rows, groups)
    x, x_step = _fold_rows(x, x_dim, transpose_x, rows_x)
    _check_rows(name, size, max(rows_x, rows))
    folded = _segments.fold(table, size, x_step, rows, groups if own_weights else 0)
    form = Form(
        "segments",
        ordered_x=form.ordered_x and x_dim is not None,
        ordered_y=form.ordered_y,
        own_weight=form.own_weight and own_weights,
        aligned=form.aligned and x_dim is not None and rows_x == rows,
    )
    return x, folded, form


def _wgrad_batch(args, dims, *, form, groups, transpose_x, transpose_y, **same):
    (x, y, *meta), (x_dim, y_dim, *meta_dims) = args, dims
    size = batch_size(args, dims)
    shared_meta = all(d is None for d in meta_dims)
    # An operand stored with its columns first takes the batch there: no copy, longer rows.
    if shared_meta and y_dim is None and transpose_x:
        x, columns = fold_leading(x, x_dim), x.shape[0 if x_dim else 1]
        out = wgrad(
            x, y, meta, form=form, groups=groups, transpose_x=True, transpose_y=transpose_y, **same
        )
        return _partition.split(out, ((groups,), (size, columns), (out.shape[2],))), 1
    if shared_meta and x_dim is None and transpose_y:
        y, columns = fold_leading(y, y_dim), y.shape[0 if y_dim else 1]
        out = wgrad(
            x, y, meta, form=form, groups=groups, transpose_x=transpose_x, transpose_y=True, **same
        )
        return _partition.split(out, ((groups,), (out.shape[1],), (size, columns))), 2
    rows_x = extent(x, x_dim, 1 if transpose_x else 0)
    rows_y = extent(y, y_dim, 1 if transpose_y else 0)
    table = _batched_table(form, meta, meta_dims, rows_x, rows_y, groups)
    x, x_step = _fold_rows(x, x_dim, transpose_x, rows_x)
    y, y_step = _fold_rows(y, y_dim, transpose_y, rows_y)
    _check_rows("wgrad", size, max(rows_x, rows_y))
    folded = _segments.fold(table, size, x_step, y_step, groups)
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
    return _partition.split(out, ((size, groups), (out.shape[1],), (out.shape[2],))), 0


def batch_size(args, dims):
    return next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)


def extent(a, dim, axis):
    """The size of an unbatched operand's axis."""
    return a.shape[axis + (dim is not None and dim <= axis)]


def _batched_table(form, meta, dims, rows_x, rows_y, groups):
    """The canonical table: (S, 4), or (size, S, 4) where any metadata is batched."""
    decode = functools.partial(_segments.decode, form, rows_x=rows_x, rows_y=rows_y, groups=groups)
    if all(d is None for d in dims):
        return decode(meta)
    meta = map(_partition.replicated, meta)
    return jax.vmap(lambda *m: decode(m), in_axes=tuple(dims))(*meta)


def _fold_rows(a, dim, transposed, rows):
    """Lay a batch of row operands end to end; a shared one stays as it is (step 0)."""
    if dim is None:
        return a, 0
    a = jnp.moveaxis(a, dim, 1 if transposed else 0)
    if transposed:
        return _partition.merge(a, (1, 2)), rows
    return _partition.merge(a, (2, 1)), rows


def fold_leading(a, dim):
    """Fold a batch into the leading axis; a shared operand stays as it is."""
    if dim is None:
        return a
    a = jnp.moveaxis(a, dim, 0)
    return _partition.merge(a, (2, *[1] * (a.ndim - 2)))


def _check_rows(name, size, rows):
    if size * rows > MAX_ROWS:
        raise ValueError(
            f"jgg {name}: a batch of {size} problems of {rows} rows has {size * rows} rows; "
            f"row indices are int32, at most {MAX_ROWS}. Use jax.lax.map over part of the batch."
        )


# ---- lowering --------------------------------------------------------------------------------


def _lowering(name, platform, *operands, cotangent_dtype, implementation, **params):
    del cotangent_dtype
    runs = _call.chosen(platform, operands[:2], implementation, params["out_dtype"])
    if runs == "reference":
        return getattr(_reference, name)(*operands, **params)
    return getattr(_custom_calls, name)(runs, *operands, **params)


def _outer_lowering(name, ctx, *operands, **params):
    def partitioned(*operands):
        shardable, known = SHARDABLE.get(name, lambda *a: a)(operands, params)
        return _partition.auto(name, known, INNER[name].bind)(*shardable)

    def of_no_batch(*operands):
        return _partition.explicit(name, explicit, operands, params, bind)

    per_device = functools.partial(INNER[name].bind, **params)
    # Of a vmap over an explicitly sharded axis, the product of operands that are not mapped.
    explicit = _partition.explicit_mesh_of(ctx.avals_in)
    if explicit is not None:
        per_device = of_no_batch
    elif _partition.may_be_partitioned(ctx):
        per_device = partitioned
    return mlir.lower_fun(per_device, multiple_results=False)(ctx, *operands)


def jitted(compiled):
    """What a primitive does outside of any program: one, also where the user has disabled ``jit``,
    which must not bind the primitive again."""

    def run(*operands, **params):
        with jax.disable_jit(False):
            return compiled(**params)(*operands)

    return run


def _batching(name, rule, args, dims, **params):
    mesh = _partition.explicit_mesh(args)
    # Within a vmap over an explicitly sharded axis, only that one has the whole operands.
    if mesh is None or _partition.maps_explicit_axes():
        return rule(args, dims, **params)
    return _partition.explicit_batch(name, mesh, args, dims, params, bind), 0


def _make(name, level, abstract, jvp, transpose, batch, lowering):
    primitive = Primitive(f"jgg_{name}" + ("" if level == "inner" else "_outer"))

    def out_type(*types, **params):
        out, mesh = abstract(*types, **params), _partition.explicit_mesh_of(types)
        return out if mesh is None else _partition.explicit_type(name, mesh, types, params, out)

    primitive.def_abstract_eval(out_type)

    @functools.cache
    def compiled(**params):
        return jax.jit(functools.partial(primitive.bind, **params))

    primitive.def_impl(jitted(compiled))
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = functools.partial(_batching, name, batch)
    if level == "inner":
        for platform in ("cpu", "cuda", None):
            rule = functools.partial(lowering, platform or "other")
            mlir.register_lowering(
                primitive, mlir.lower_fun(rule, multiple_results=False), platform=platform
            )
    else:
        _partition.needs_devices(primitive)
        mlir.register_lowering(primitive, functools.partial(_outer_lowering, name))
    return primitive


INNER: dict[str, Primitive] = {}
OUTER: dict[str, Primitive] = {}
# (operands, params) as others that can be divided among devices.
SHARDABLE: dict[str, Callable] = {}


def register(name, abstract, jvp, transpose, batch, lowering) -> None:
    """Make both levels of a primitive, by its rules; ``lowering(platform, *operands, **params)``
    is what one device runs."""
    rules = abstract, jvp, transpose, batch, lowering
    INNER[name], OUTER[name] = (_make(name, level, *rules) for level in ("inner", "outer"))


for _name, _abstract, _transpose, _batch in (
    ("mm", _mm_abstract, _mm_transpose, _mm_batch),
    ("wgrad", _wgrad_abstract, _wgrad_transpose, _wgrad_batch),
):
    register(
        _name, _abstract, functools.partial(_bilinear_jvp, _name), _transpose, _batch,
        functools.partial(_lowering, _name),
    )  # fmt: skip
