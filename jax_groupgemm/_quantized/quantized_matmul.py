"""``quantized_matmul``: a product with one quantized matrix, or a batch that broadcasts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._core import check, segments
from .._core.operations import operation
from .._core.products import Caller, Mm
from .._core.types import Implementation
from . import product as quantized_product
from .array import Quantized
from .gather_qmm import batched


@operation
def quantized_matmul(
    x: ArrayLike,
    w: Quantized,
    *,
    transpose_w: bool = True,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``out[...] = x[...] @ w.T``; **nothing is grouped**: one :class:`Quantized` matrix.

    If w has batch axes, it broadcasts against x as in :func:`jax.numpy.matmul`, without copies of
    matrices that are used more than once. Values are those of :func:`grouped_qmm`.

    Args:
      x: ``(..., K)``, or ``(A..., M, K)`` where w has batch axes; float32, bfloat16 or float16.
      w: ``(N, K)``, quantized along K; with ``transpose_w=False`` ``(K, N)``, quantized along N.
        Or ``(B..., N, K)``, ``(B..., K, N)``. A ``global_scale`` is a scalar or has leading axes
        of ``B...``, or is ``(B..., N)`` (as of fused layers; not with ``transpose_w=False``).
      preferred_element_type: float32, bfloat16 or float16; by default the dtype of x.
      implementation: ``None`` for the best one, ``"reference"``, or a kernel's name.

    Returns:
      ``(..., N)``, or ``broadcast(A, B) + (M, N)``.

    Raises:
      ValueError: shapes do not fit, or ``implementation`` is unknown or cannot run.
      TypeError: w is not a :class:`Quantized`, or a dtype is none of these.

    Differentiable and closed under ``vmap`` as :func:`grouped_qmm` is. MLX's ``quantized_matmul``.

    Examples:
      >>> w = jax.random.normal(jax.random.key(0), (64, 128))
      >>> jgg.quantized_matmul(jnp.ones((5, 128)), jgg.quantize(w, mode="mxfp4", contract=-1)).shape
      (5, 64)
    """
    op = "quantized_matmul"
    x = check.array(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"jgg.{op}: x has shape (), expected (..., K)")
    w, dtype = quantized_product.checked(op, x, w, transpose_w, preferred_element_type)
    check.implementation(op, implementation)
    *batch, k = x.shape
    if len(w.shape) > 2:
        rows = x if batch else x[None]
        out = _broadcast(op, rows, w, transpose_w, dtype, implementation)
        return out if batch else out[..., 0, :]
    rows = math.prod(batch)
    check.rows(op, "x", rows)
    one = jax.tree.map(lambda leaf: leaf[None] if leaf.ndim else leaf, w)
    product = Mm(
        rows=rows, out_dtype=dtype, transpose_w=transpose_w, precision=check.precision(op, None),
        implementation=implementation, caller=Caller(op, ("x", "w")),
    )  # fmt: skip
    all_rows = segments.sizes(jnp.full((1,), rows, jnp.int32))
    out = quantized_product.product(x.reshape(rows, k), one, all_rows, product)
    return out.reshape(*batch, out.shape[1])


def _broadcast(op, x, w, transpose_w, dtype, implementation):
    """Batch axes broadcast: each product names its own operands."""
    batches = x.shape[:-2], w.shape[:-2]
    try:
        batch = jnp.broadcast_shapes(*batches)
    except ValueError as error:
        raise ValueError(
            f"jgg.{op}: the batch axes of x {x.shape} and w {w.shape} do not broadcast"
        ) from error
    lhs, rhs = (
        jnp.broadcast_to(jnp.arange(math.prod(b), dtype=jnp.int32).reshape(b), batch)
        for b in batches
    )
    return batched(op, x, w, lhs, rhs, False, transpose_w, dtype, implementation)
