"""A product with a quantized weight, and an adapter of low rank beside it, as LoRA has them.

    out[t] = x[t] @ W[group(t)] + (x[t] @ down[group(t)]) @ up[group(t)]       T (rows) is grouped

The kernels of prepacked weights add the second term to the sums of the first. So nothing of the
result's size is written twice, neither here nor in the gradient of x, which has the same form.
"""

from __future__ import annotations

import jax

from .._core import check, costs
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.products import Mm, Wgrad
from .._core.segments import Metadata
from .._grouped import primitives
from . import product as quantized_product
from .array import Quantized
from .format import FLOATS


def checked(op: str, adapter, x, product: Mm, w: Quantized) -> tuple[jax.Array, jax.Array]:
    """``down`` (G, K, r) and ``up`` (G, r, N), checked."""
    if not isinstance(adapter, (tuple, list)) or len(adapter) != 2:
        raise TypeError(
            f"jgg.{op}: adapter must be two arrays, (G, K, r) and (G, r, N), got "
            f"{type(adapter).__name__}"
        )
    groups, k, n = product.sizes(w)
    why = f"because w is {w.shape} and x is {x.shape}"
    down, up = (check.array(op, f"adapter[{i}]", a) for i, a in enumerate(adapter))
    check.shape(op, "adapter[0]", down, (groups, k, None), "G, K, r", why)
    check.shape(op, "adapter[1]", up, (groups, down.shape[2], n), "G, r, N", why)
    for i, a in enumerate((down, up)):
        check.dtype(op, f"adapter[{i}]", a.dtype, FLOATS)
    return down, up


def product(x, q: Quantized, metadata: Metadata, adapter, product: Mm) -> jax.Array:
    """The sum. Factors of the adapter are rounded to x's dtype, and so is what x makes of the first
    one; the gradients of both are sums in float32, rounded to their dtypes."""
    return _ADAPTED(x, q, metadata, *adapter, product=product)


# ---- rows of low rank ----------------------------------------------------------------------------


def _of_rank(product: Mm, rows: int, dtype) -> Mm:
    return product.derived(Mm, rows=rows, out_dtype=dtype)


def _beside(x, q: Quantized, metadata, rows, weights, *, product: Mm):
    base = quantized_product.product(x, q, metadata, product)
    of_rank = _of_rank(product, product.rows, product.out_dtype)
    return base + primitives.mm(rows, weights, metadata, of_rank)


def _beside_call(platform, x, q: Quantized, metadata, rows, weights, *, product: Mm):
    if not quantized_product.fusible(q):
        return None
    return quantized_product.called(platform, x, q, metadata, product, adapter=(rows, weights))


def _beside_cost(operands, values, outs, *, product: Mm) -> Cost:
    x, q, metadata, rows, weights = operands
    known = [values[2].values, values[2].group_offset][: len(metadata.arrays)]
    base, count, used = costs.product(x, q, metadata, known, outs[0], product)
    groups, rank, n = weights.shape
    read = costs.bytes_of(rows) + costs.bytes_of(weights) // max(groups, 1) * used
    return base + Cost(2 * count * rank * n, read)


#: ``x @ W + rows @ weights``, of rows (T, r), which lie as those of x do, and weights (G, r, N).
_BESIDE = Composed("jgg_qmm_beside", _beside, _beside_call, cost=_beside_cost)


# ---- the adapter -------------------------------------------------------------------------------


def _rows(x, down, metadata, product: Mm):
    of_rank = _of_rank(product, product.rows, x.dtype)
    return primitives.mm(x, down.astype(x.dtype), metadata, of_rank)


def _adapted(x, q, metadata, down, up, *, product: Mm):
    return _forward(x, q, metadata, down, up, product=product)[0]


def _forward(x, q, metadata, down, up, *, product: Mm):
    rows = _rows(x, down, metadata, product)
    return _BESIDE(x, q, metadata, rows, up.astype(x.dtype), product=product), rows


def _backward(rows, operands, cts, *, product: Mm):
    (x, q, metadata, down, up), (ct,) = operands, cts
    if product.cotangent_dtype is not None:
        ct = ct.astype(product.cotangent_dtype)
    back, of_w = (
        metadata.swap(),
        lambda a: product.derived(Wgrad, groups=a.shape[0], out_dtype=a.dtype),
    )
    of_rows = product.derived(Mm, rows=rows.shape[0], out_dtype=rows.dtype, transpose_w=True)
    drows = primitives.mm(ct, up.astype(x.dtype), back, of_rows)
    of_x = product.derived(
        Mm, rows=x.shape[0], out_dtype=x.dtype, transpose_w=not product.transpose_w
    )
    dx = _BESIDE(ct, q, back, drows, down.astype(x.dtype).swapaxes(1, 2), product=of_x)
    ddown = primitives.wgrad(x, drows, metadata, of_w(down))
    dup = primitives.wgrad(rows, ct, metadata, of_w(up))
    of_q = lambda q: quantized_product.product(x, q, metadata, product)
    (dq,) = jax.vjp(of_q, q)[1](ct)
    return dx, dq, None, ddown, dup


def _cost(operands, values, outs, *, product: Mm) -> Cost:
    x, q, metadata, down, up = operands
    known = [values[2].values, values[2].group_offset][: len(metadata.arrays)]
    rows = jax.ShapeDtypeStruct((product.rows, down.shape[2]), x.dtype)
    of_rank = _of_rank(product, product.rows, x.dtype)
    low, *_ = costs.product(x, down, metadata, known, rows, of_rank)
    return low + _beside_cost((x, q, metadata, rows, up), values, outs, product=product)


_ADAPTED = Composed(
    "jgg_adapted_qmm", _adapted, lambda *_, **__: None, cost=_cost, vjp=(_forward, _backward)
)
