"""The primitive of every product with a quantized weight, and all its transformations.

    out[y_start_s + i] += x[x_start_s + i] @ W[weight_s]                       T (rows) is grouped

W is the weight dequantized and rounded once to x's dtype (a format may leave that to the kernels of
prepacked weights, as mode "fp8" does); a global scale multiplies the float32 sums. The
product is linear in x, in the global scale and, because ``codes * dscale + dbias`` is an affine
weight too, in scales and biases together. Its derivatives in all but x go through ``wgrad``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from .._core import batching, check, costs, dtypes, partitioner, primitive
from .._core.products import Mm, Wgrad
from .._core.segments import Metadata
from .._grouped import primitives
from .._grouped.call import NO_EPILOGUE, Epilogue, sum_of_parts
from .._grouped.fused import Fused
from .._kernels import choose
from . import call, convert, format, prepack, reference
from .array import Quantized
from .array import checked as checked_array

#: x is (T, K), q stands for (G, N, K) with ``transpose_w``, else (G, K, N); out is (rows, N). A
#: global scale is a scalar or (G,).
qmm = functools.partial(primitive.bind, "qmm")


def checked(op: str, x, w, transpose_w: bool, preferred, rank: int | None = None):
    """w, checked against x, and the result's dtype. w has ``rank`` axes, or any batch axes."""
    w = fitting(op, "w", x, w, transpose_w, preferred, rank)
    return w, x.dtype if preferred is None else jnp.dtype(preferred)


def _linear(w: Quantized) -> Quantized:
    return format.of(w).of_product(prepack.by_rows(w))


def fitting(op: str, name: str, x, w, transpose_w: bool, preferred, rank: int | None = None):
    """w, the argument of this name, checked against x."""
    w = checked_array(op, name, w)
    check.flag(op, "transpose_w", transpose_w)
    if preferred is not None:
        preferred = check.of_dtype(op, "preferred_element_type", preferred)
    if w.axis != -1:
        raise ValueError(
            f"jgg.{op}: {name} has axis={w.axis}, expected -1. dataclasses.replace({name}, "
            f"axis=-1) is what it stores, {w.shape}"
        )
    for of, dtype in (("x", x.dtype), ("preferred_element_type", preferred)):
        if dtype is not None:
            check.dtype(op, of, jnp.dtype(dtype), format.FLOATS)
    shape, k = w.shape, x.shape[-1]
    lead = {2: "", 3: "G, "}.get(rank or len(shape), "B..., ")
    letters = f"({lead}N, K)" if transpose_w else f"({lead}K, N)"
    if len(shape) < 2 or len(shape) != (rank or len(shape)):
        raise ValueError(f"jgg.{op}: {name} has shape {shape}, expected {letters}")
    expected = (*shape[:-1], k) if transpose_w else (*shape[:-2], k, shape[-1])
    if shape != expected:
        hint = f"Pass transpose_w=True if {name} is ({lead}N, K)"
        if transpose_w:
            hint = f"Of ({lead}K, N), jgg.quantize(w, contract=-2) makes one"
        raise ValueError(
            f"jgg.{op}: {name} has shape {shape}, expected {letters} = {expected} because x is "
            f"{x.shape}. {hint}."
        )
    scale, batch = w.global_scale, shape[:-2]
    if scale is not None and scale.ndim > len(batch) and not transpose_w:
        raise ValueError(  # it would be along K
            f"jgg.{op}: {name}.global_scale has shape {scale.shape}, expected () or leading axes "
            f"of {batch} with transpose_w=False"
        )
    return format.of(w).of_product(w)


def product(x, q: Quantized, metadata: Metadata, product: Mm) -> jax.Array:
    """:func:`qmm`, also with a global scale for every column, ``(G, N)``: column_scale[group(t)] is
    itself a grouped product, with K = 1. No row of the result is of two segments."""
    if q.global_scale is None or q.global_scale.ndim < 2:
        return qmm(x, q, metadata, product)
    codes_and_scales = dataclasses.replace(q, global_scale=None)
    cotangent_dtype = product.cotangent_dtype or dtypes.cotangent_dtype(product.out_dtype)
    summed = product.replace(out_dtype=jnp.float32, cotangent_dtype=cotangent_dtype)
    out = qmm(x, codes_and_scales, metadata, summed)
    ones, columns = jnp.ones((x.shape[0], 1), jnp.float32), q.global_scale[:, None, :]
    exact = Mm(
        rows=product.rows, out_dtype=jnp.float32, precision=lax.Precision.HIGHEST,
        implementation=product.implementation,
        caller=dataclasses.replace(product.caller, operands=("x", "w.global_scale")),
    )  # fmt: skip
    return (out * primitives.mm(ones, columns, metadata, exact)).astype(product.out_dtype)


def _jvp(operands, tangents, _):
    (x, q, metadata), (dx, dq, _) = operands, tangents
    zero = lambda tangent: tangent is None or type(tangent) is ad.Zero
    terms = []
    if not zero(dx):
        terms.append((dx, q, metadata))
    if not (zero(dq.scales) and zero(dq.biases)):
        ds, db = (None if t is None else ad.instantiate_zeros(t) for t in (dq.scales, dq.biases))
        terms.append((x, dataclasses.replace(q, scales=ds, biases=db), metadata))
    if not zero(dq.global_scale):
        terms.append((x, dataclasses.replace(q, global_scale=dq.global_scale), metadata))
    return terms


def _transpose(ct, operands, product: Mm):
    x, q, metadata = operands
    if ad.is_undefined_primal(x):
        of_x = product.derived(
            Mm, rows=x.aval.shape[0], out_dtype=x.aval.dtype, transpose_w=not product.transpose_w
        )
        return qmm(ct, q, metadata.swap(), of_x), None
    a, b = (ct, x) if product.transpose_w else (x, ct)
    of_w = product.derived(Wgrad, groups=q.shape[0], out_dtype=jnp.float32)
    dw = primitives.wgrad(a, b, metadata.swap() if product.transpose_w else metadata, of_w)
    return None, _weight_cotangent(q, dw, x.dtype, product.implementation)


def _weight_cotangent(q: Quantized, dw, dtype, implementation) -> Quantized:
    """q with the cotangents of its undefined leaves, and None elsewhere; ``dw`` is that of the
    weight it stands for."""
    grads: dict[str, Any] = dict.fromkeys(("weight", "scales", "biases", "global_scale"))
    grads |= format.of(q).scale_cotangents(q, dw)
    if ad.is_undefined_primal(q.global_scale):
        codes_and_scales = dataclasses.replace(q, global_scale=None)
        w = convert._dequantize(prepack.unpacked(codes_and_scales), dtype, implementation)
        # A weight that no row met does not count, NaN or not.
        terms = jnp.where(dw == 0, jnp.float32(0), dw * w.astype(jnp.float32))
        grads["global_scale"] = terms.sum(tuple(range(q.global_scale.aval.ndim, 3)))
    return dataclasses.replace(q, **grads)


def _batch(size, operands, dims, product: Mm):
    (x, q, metadata), (x_dim, q_dims, meta_dims) = operands, dims
    leaves, tree = jax.tree.flatten(q)
    leaf_dims = tree.flatten_up_to(q_dims)
    groups = batching.extent(q.weight, q_dims.weight, 0)
    own_weights = any(d is not None for d in leaf_dims)
    if own_weights:
        folded = [
            _fold(leaf, dim, size, groups) for leaf, dim in zip(leaves, leaf_dims, strict=True)
        ]
        q = tree.unflatten(folded)
    x, metadata = batching.fold_product(
        product, size, x, x_dim, metadata, meta_dims, rows=product.rows, groups=groups,
        own_weights=own_weights,
    )  # fmt: skip
    out = qmm(x, q, metadata, product.replace(rows=size * product.rows))
    return out.reshape(size, product.rows, out.shape[1]), 0


def _fold(leaf, dim, size: int, groups: int):
    """A leaf of ``size`` weights, batched or shared, as one of a weight of ``size * groups``."""
    if dim is None:
        if leaf.ndim == 0:  # one global scale for all
            return leaf
        leaf, dim = jnp.broadcast_to(leaf, (size, *leaf.shape)), 0
    elif leaf.ndim == 1:  # a batch of global scales
        leaf, dim = jnp.broadcast_to(leaf[:, None], (size, groups)), 0
    return batching.fold_leading(leaf, dim)


def called(platform, x, q: Quantized, metadata, product: Mm, epilogue: Epilogue = NO_EPILOGUE,
           adapter=None):  # fmt: skip
    """One custom call; None where there is no kernel for it. ``adapter``: rows (T, r) and weights
    (G, r, N), whose product is added."""
    problem = call.qmm_problem(
        platform, x, q, metadata, product, epilogue, packable=prepack.packable(q)
    )
    plan = choose.choose(problem) if epilogue.nothing else choose.fused(problem)
    if plan is None or not (adapter is None or call.takes_adapter(plan, x, *adapter)):
        return None
    if plan.config.get("sum_parts", 1) > 1:
        return _in_parts(plan, platform, x, prepack.unpacked(q), metadata, product)
    if plan.kernel.name == "cpu":
        q = _linear(q)
    elif plan.target == "jgg_qmm_packed":
        q = prepack.packed_for(q, metadata, x.shape[0])
    else:
        q = prepack.unpacked(q)
    return call.qmm(plan, x, q, metadata, product, epilogue, adapter=adapter)


def _in_parts(plan, platform, x, q: Quantized, metadata, product: Mm):
    """:func:`called` with sums over parts of K, which are added up in float32."""
    k, axis = x.shape[1], 2 if product.transpose_w else 1

    def cut(leaf, begin: int, end: int):
        """Some of K; a leaf has it in words or groups."""
        size = leaf.shape[axis]
        return lax.slice_in_dim(leaf, begin * size // k, end * size // k, axis=axis)

    def run(begin: int, end: int):
        leaves = {
            name: cut(leaf, begin, end)
            for name in ("weight", "scales", "biases")
            if (leaf := getattr(q, name)) is not None
        }
        summed = product.replace(out_dtype=jnp.float32)
        return called(platform, x[:, begin:end], dataclasses.replace(q, **leaves), metadata, summed)

    return sum_of_parts(run, k, plan, product)


def _lowering(platform, x, q: Quantized, metadata, product: Mm):
    out = called(platform, x, q, metadata, product)
    return reference.qmm(x, _linear(q), metadata, product) if out is None else out


def _shardable(x, q: Quantized, metadata):
    """With the weight in layout "linear", whose axes are those of the array it stands for."""
    q = _linear(q)
    return x, format.of(q).in_parts_of(q, x), metadata


def _cost(x, q, metadata, values, out, product: Mm) -> costs.Cost:
    return costs.product(x, q, metadata, values, out, product)[0]


partitioner.describe(Quantized)
primitive.register(
    "qmm", jvp=_jvp, transpose=_transpose, batch=_batch, lowering=_lowering, cost=_cost,
    shardable=_shardable,
)  # fmt: skip


def _fused(platform, x, q: Quantized, metadata, product: Mm, epilogue: Epilogue, lists,
           preactivation: bool = False):  # fmt: skip
    if preactivation or lists is not None or epilogue.existing_out is not None:
        return None
    return called(platform, x, q, metadata, product, epilogue)


def fusible(q: Quantized) -> bool:
    """Whether a product with q may be one call."""
    return q.global_scale is None or q.global_scale.ndim < 2


#: The product and what a kernel may do beside it.
FUSED = Fused("jgg_fused_qmm", product, _fused)
