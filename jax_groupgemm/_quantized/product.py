"""The primitive of every product with a quantized weight, and all its transformations.

    out[y_start_s + i] += x[x_start_s + i] @ W[weight_s]                       T (rows) is grouped

W is the weight dequantized and rounded once to x's dtype; a global scale multiplies the float32
sums. The product is linear in x, in the global scale and, because ``codes * dscale + dbias`` is an
affine weight too, in scales and biases together. Its derivatives in all but x go through ``wgrad``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from .._core import batching, check, costs, dtypes, partition, primitive
from .._core.segments import Form
from .._grouped import primitives
from .._grouped.epilogue import Options
from .._kernels import choose
from . import call, convert, formats, prepack, reference
from .array import Quantized
from .array import checked as checked_array

_NAME = "qmm"


def qmm(x, q: Quantized, meta, *, form: Form, rows: int, out_dtype, transpose_w: bool,
        precision=None, implementation=None, cotangent_dtype=None):  # fmt: skip
    """x is (T, K), q stands for (G, N, K) with ``transpose_w``, else (G, K, N); out is (rows, N).

    A global scale is a scalar or (G,).
    """
    if partition.explicit_mesh((x, q.weight)) is not None:
        q = prepack.unpacked(q)
    leaves, tree = jax.tree.flatten(q)
    return primitive.bind(
        _NAME, x, *leaves, *meta, tree=tree, form=form, rows=rows, out_dtype=jnp.dtype(out_dtype),
        transpose_w=transpose_w, precision=precision, implementation=implementation,
        cotangent_dtype=cotangent_dtype,
    )  # fmt: skip


def checked(op: str, x, w, transpose_w: bool, preferred, rank: int | None = None):
    """w, checked against x, and the result's dtype. w has ``rank`` axes, or any batch axes."""
    w = checked_array(op, "w", w)
    if w.axis != -1:
        raise ValueError(
            f"jgg.{op}: w has axis={w.axis}, expected -1. dataclasses.replace(w, axis=-1) is what "
            f"it stores, {w.shape}"
        )
    if not transpose_w:
        w = prepack.unpacked(w)
    for name, dtype in (("x", x.dtype), ("preferred_element_type", preferred)):
        if dtype is not None:
            check.dtype(op, name, jnp.dtype(dtype), formats.FLOATS)
    shape, k = w.weight.shape, x.shape[-1]
    if w.layout != "linear":  # as if it were
        shape = (*w.shape[:-1], w.shape[-1] * w.bits // 32)
    lead = {2: "", 3: "G, "}.get(rank or len(shape), "B..., ")
    letters = f"({lead}N, K*bits/32)" if transpose_w else f"({lead}K, N*bits/32)"
    if len(shape) < 2 or len(shape) != (rank or len(shape)):
        raise ValueError(f"jgg.{op}: w has shape {shape}, expected {letters}")
    if transpose_w and k % w.group_size:
        raise ValueError(
            f"jgg.{op}: x has shape {x.shape}, expected K, its last axis, to be a multiple of "
            f"w.group_size={w.group_size}"
        )
    expected = (*shape[:-1], k * w.bits // 32) if transpose_w else (*shape[:-2], k, shape[-1])
    if shape != expected:
        bits = f" and bits={w.bits}" if transpose_w else ""
        other = f"({lead}K, N)" if transpose_w else f"({lead}N, K)"
        raise ValueError(
            f"jgg.{op}: w has shape {shape}, expected {letters} = {expected} because x is "
            f"{x.shape}{bits}. Pass transpose_w={not transpose_w} if w is {other}."
        )
    scale, batch = w.global_scale, shape[:-2]
    if scale is not None and scale.ndim > len(batch) and not transpose_w:
        raise ValueError(  # it would be along K
            f"jgg.{op}: w.global_scale has shape {scale.shape}, expected () or leading axes of "
            f"{batch} with transpose_w=False"
        )
    return w, x.dtype if preferred is None else jnp.dtype(preferred)


def product(x, q: Quantized, meta, *, out_dtype, **params):
    """:func:`qmm`, also with a global scale for every column, ``(G, N)``: column_scale[group(t)] is
    itself a grouped product, with K = 1. No row of the result is of two segments."""
    if q.global_scale is None or q.global_scale.ndim < 2:
        return qmm(x, q, meta, out_dtype=out_dtype, **params)
    codes_and_scales = dataclasses.replace(q, global_scale=None)
    params.setdefault("cotangent_dtype", dtypes.cotangent_dtype(out_dtype))
    out = qmm(x, codes_and_scales, meta, out_dtype=jnp.dtype("float32"), **params)
    params |= {"transpose_w": False, "precision": lax.Precision.HIGHEST, "cotangent_dtype": None}
    ones, columns = jnp.ones((x.shape[0], 1), jnp.float32), q.global_scale[:, None, :]
    scale = primitives.mm(ones, columns, meta, out_dtype=jnp.dtype("float32"), **params)
    return (out * scale).astype(out_dtype)


def split(tree, operands) -> tuple:
    """x, the Quantized and the metadata among the primitive's operands."""
    x, *rest = operands
    return x, tree.unflatten(rest[: tree.num_leaves]), rest[tree.num_leaves :]


def _abstract(*operands, tree, rows, out_dtype, transpose_w, **_):
    _, q, _ = split(tree, operands)
    n = q.shape[1 if transpose_w else 2]
    return primitive.out_aval((rows, n), out_dtype, operands)


def _jvp(primals, tangents, *, tree, **params):
    x, q, meta = split(tree, primals)
    dx, dq, _ = split(tree, tangents)
    out = qmm(x, q, meta, **params)
    zero = lambda tangent: tangent is None or type(tangent) is ad.Zero
    terms = []
    if not zero(dx):
        terms.append(qmm(dx, q, meta, **params))
    if not (zero(dq.scales) and zero(dq.biases)):
        ds, db = map(ad.instantiate_zeros, (dq.scales, dq.biases))
        terms.append(qmm(x, dataclasses.replace(q, scales=ds, biases=db), meta, **params))
    if not zero(dq.global_scale):
        dq = dataclasses.replace(q, global_scale=dq.global_scale)
        terms.append(qmm(x, dq, meta, **params))
    return out, primitive.sum_of_tangents(out, terms)


def _transpose(ct, *operands, tree, form, rows, out_dtype, transpose_w, cotangent_dtype, **same):
    x, q, meta = split(tree, operands)
    if type(ct) is ad.Zero:
        return [None] * len(operands)
    ct = ct if cotangent_dtype is None else ct.astype(cotangent_dtype)
    if ad.is_undefined_primal(x):
        dx = qmm(
            ct, q, meta, form=form.swap(), rows=x.aval.shape[0], out_dtype=x.aval.dtype,
            transpose_w=not transpose_w, **same,
        )  # fmt: skip
        return [dx, *[None] * (len(operands) - 1)]
    a, b, form = (ct, x, form.swap()) if transpose_w else (x, ct, form)
    dw = primitives.wgrad(a, b, meta, form=form, groups=q.shape[0], out_dtype=jnp.float32, **same)
    grads = tree.flatten_up_to(_weight_cotangent(q, dw, x.dtype, same["implementation"]))
    return [None, *grads, *[None] * len(meta)]


def _weight_cotangent(q: Quantized, dw, dtype, implementation) -> Quantized:
    """q with the cotangents of its undefined leaves, and None elsewhere; ``dw`` is that of the
    weight it stands for."""
    grads: dict[str, Any] = dict.fromkeys(("weight", "scales", "biases", "global_scale"))
    if ad.is_undefined_primal(q.scales) or ad.is_undefined_primal(q.biases):
        codes = formats.codes_in_groups(q.weight, q.bits, q.group_size)
        in_groups = dw.reshape(codes.shape)
        if ad.is_undefined_primal(q.scales):
            ds = (in_groups * codes.astype(jnp.float32)).sum((-2, -1))
            grads["scales"] = ds.astype(q.scales.aval.dtype)
        if ad.is_undefined_primal(q.biases):
            grads["biases"] = in_groups.sum((-2, -1)).astype(q.biases.aval.dtype)
    if ad.is_undefined_primal(q.global_scale):
        codes_and_scales = dataclasses.replace(q, global_scale=None)
        w = convert._dequantize(prepack.unpacked(codes_and_scales), dtype, implementation)
        # A weight that no row met does not count, NaN or not.
        terms = jnp.where(dw == 0, jnp.float32(0), dw * w.astype(jnp.float32))
        grads["global_scale"] = terms.sum(tuple(range(q.global_scale.aval.ndim, 3)))
    return dataclasses.replace(q, **grads)


def _batch(args, dims, *, tree, form, rows, **same):
    x, q, meta = split(tree, args)
    x_dim, *dims = dims
    leaf_dims, meta_dims = dims[: tree.num_leaves], dims[tree.num_leaves :]
    size = batching.batch_size(args, (x_dim, *dims))
    groups = batching.extent(q.weight, leaf_dims[0], 0)
    own_weights = any(d is not None for d in leaf_dims)
    if own_weights:
        leaves = [
            _fold(leaf, dim, size, groups)
            for leaf, dim in zip(jax.tree.leaves(q), leaf_dims, strict=True)
        ]
        q = tree.unflatten(leaves)
    x, table, form = batching.fold_product(
        _NAME, size, x, x_dim, meta, meta_dims, form=form, rows=rows, groups=groups,
        own_weights=own_weights,
    )  # fmt: skip
    out = qmm(x, q, (table,), form=form, rows=size * rows, **same)
    return out.reshape(size, rows, out.shape[1]), 0


def _fold(leaf, dim, size: int, groups: int):
    """A leaf of ``size`` weights, batched or shared, as one of a weight of ``size * groups``."""
    if dim is None:
        if leaf.ndim == 0:  # one global scale for all
            return leaf
        leaf, dim = jnp.broadcast_to(leaf, (size, *leaf.shape)), 0
    elif leaf.ndim == 1:  # a batch of global scales
        leaf, dim = jnp.broadcast_to(leaf[:, None], (size, groups)), 0
    return batching.fold_leading(leaf, dim)


def called(platform, x, q: Quantized, meta, *, implementation, epilogue=None, **params):
    """One custom call, with an ``epilogue`` or without; None where there is no kernel for it."""
    packable = prepack.packable(q)
    problem = call.qmm_problem(
        platform, x, q, meta, implementation=implementation, epilogue=epilogue, packable=packable,
        **params,
    )  # fmt: skip
    choice = choose.choose(problem) if epilogue is None else choose.fused(problem)
    if choice is None:
        return None
    packed = choice.target == "jgg_qmm_packed"
    q = prepack.packed_for(q) if packed else prepack.unpacked(q)
    return call.qmm(choice, x, q, meta, epilogue=epilogue, **params)


def _lowering(platform, *operands, tree, cotangent_dtype, implementation, **params):
    del cotangent_dtype
    x, q, meta = split(tree, operands)
    out = called(platform, x, q, meta, implementation=implementation, **params)
    return reference.qmm(x, prepack.unpacked(q), meta, **params) if out is None else out


def _shardable(operands, params):
    """With the weight in layout "linear", whose axes are those of the array it stands for."""
    x, q, meta = split(params["tree"], operands)
    leaves, tree = jax.tree.flatten(prepack.unpacked(q))
    return (x, *leaves, *meta), params | {"tree": tree}


primitive.SHARDABLE[_NAME] = _shardable


def _cost(operands, values, outs, *, tree, **params) -> costs.Cost:
    x, q, meta = split(tree, operands)
    values = values[len(values) - len(meta) :]
    return costs.product(x, q, meta, values, outs[0], transpose_x=False, **params)[0]


primitive.register(_NAME, _abstract, _jvp, _transpose, _batch, _lowering, _cost)


def _fused(platform, x, q: Quantized, meta, *, epilogue, **params):
    return (
        None
        if epilogue.existing_out is not None
        else called(platform, x, q, meta, epilogue=epilogue, **params)
    )


#: The product with options.
OPTIONS = Options("jgg_qmm_epilogue", product, _fused)
