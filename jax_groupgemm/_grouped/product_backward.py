"""A product whose rows are the cotangent of an activation, with the activation's backward pass, as
one primitive."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .._core import costs, dtypes
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.products import Mm
from .._core.segments import Metadata
from .._kernels import choose
from . import call, primitives
from .activation_backward import scaled_activation_backward


def product_activation_backward(x, w, metadata: Metadata, h, row_scale, product: Mm,
                                activation: str):  # fmt: skip
    """``scaled_activation_backward(h, x @ w[group], row_scale, activation)``."""
    scale = row_scale.astype(dtypes.accumulator_dtype(h.dtype))
    return _BACKWARD(x, w, metadata, h, scale, product=product, activation=activation)


def _composed(x, w, metadata, h, row_scale, *, product: Mm, activation: str):
    d = primitives.mm(x, w, metadata, product)
    return scaled_activation_backward(h, d, row_scale, activation)


def _call(platform, x, w, metadata, h, row_scale, *, product: Mm, activation: str):
    problem = call.mm_problem(platform, x, w, metadata, product)
    problem = dataclasses.replace(problem, op="mm_activation_backward", activation=activation)
    if problem.named or h.dtype != x.dtype or choose.choose(problem) is None:
        return None
    groups, _, n = product.sizes(w)
    rows = product.rows
    flags = {
        "metadata": call.metadata_flags(metadata),
        "mm": call.mm_flags(metadata, product),
        "activation": activation,
    }
    out = jax.ShapeDtypeStruct((rows, n), product.out_dtype)
    dh = jax.ShapeDtypeStruct(h.shape, h.dtype)
    sums = jax.ShapeDtypeStruct((-(-n // 64), rows), jnp.float32)
    run = jax.ffi.ffi_call("jgg_mm_activation_backward", [out, dh, sums])
    (table,) = metadata.narrow(x.shape[0], groups)
    a, dh, sums = run(x, w, table, h, row_scale, **call.attributes(flags))
    return dh, a, sums.sum(0)


def _cost(operands, values, outs, *, product: Mm, activation: str) -> Cost:
    del activation
    x, w, metadata, h, row_scale = operands
    known = [values[2].values, values[2].group_offset][: len(metadata.arrays)]
    cost = costs.product(x, w, metadata, known, outs[1], product)[0]
    return cost + Cost(0, costs.bytes_of((h, row_scale, outs[0], outs[2])))


_BACKWARD = Composed("jgg_mm_activation_backward", _composed, _call, cost=_cost)
