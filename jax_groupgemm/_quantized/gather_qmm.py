"""``gather_qmm``: a batch of products with quantized matrices that are named by index."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._core import check, partition
from .._core.operations import operation
from .._core.products import Caller, Mm
from .._core.types import Implementation, Integers
from .._grouped.gather_mm import AXES, gathered
from . import product as quantized_product
from .array import Quantized


@operation
def gather_qmm(
    x: ArrayLike,
    w: Quantized,
    lhs_indices: Integers | None = None,
    rhs_indices: Integers | None = None,
    *,
    transpose_w: bool = True,
    sorted_indices: bool = False,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``out[i] = x[lhs_indices[i]] @ w[rhs_indices[i]].T``; **the batch of w is grouped**.

    :func:`gather_mm` with a :class:`Quantized` weight. Indices are flat over the batch axes of
    their operand; a missing one is ``arange`` in that batch shape. Only the two index arrays
    broadcast against each other. An index outside its range gives zeros and contributes to no
    gradient. Values are those of :func:`grouped_qmm`.

    Args:
      x: ``(A..., M, K)``, float32, bfloat16 or float16.
      w: ``(B..., N, K)``, quantized along K; with ``transpose_w=False`` ``(B..., K, N)``, quantized
        along N. A ``global_scale`` is a scalar, or has leading axes of ``B...``, or is
        ``(B..., N)`` (not with ``transpose_w=False``).
      lhs_indices: integers, into the flattened ``A...``.
      rhs_indices: integers, into the flattened ``B...``.
      sorted_indices: a promise that ``rhs_indices``, as given, are in ascending order: a speed
        hint that changes no value. A broken promise is detected on the device, and the result
        (and gradients) are NaN.
      preferred_element_type: float32, bfloat16 or float16; by default the dtype of x.
      implementation: ``None`` for the best one, ``"reference"``, or a kernel's name.

    Returns:
      ``broadcast(lhs_indices, rhs_indices).shape + (M, N)``.

    Raises:
      ValueError: shapes do not fit, or ``implementation`` is unknown or cannot run.
      TypeError: w is not a :class:`Quantized`, indices are not integers, or a dtype is none of
        these.

    Differentiable and closed under ``vmap`` as :func:`grouped_qmm` is. The operation of MLX's
    ``gather_qmm``.

    Examples:
      >>> w = jax.random.normal(jax.random.key(0), (2, 64, 128))
      >>> q = jgg.quantize(w, bits=4, group_size=64, contract=-1)
      >>> x, lhs, rhs = jnp.ones((3, 1, 128)), jnp.array([0, 2, 2]), jnp.array([1, 0, 1])
      >>> jgg.gather_qmm(x, q, lhs, rhs).shape
      (3, 1, 64)
    """
    op = "gather_qmm"
    x = check.array(op, "x", x)
    if x.ndim < 2:
        raise ValueError(f"jgg.{op}: x has shape {x.shape}, expected (A..., M, K)")
    w, dtype = quantized_product.checked(op, x, w, transpose_w, preferred_element_type)
    check.implementation(op, implementation)
    check.flag(op, "sorted_indices", sorted_indices)
    return batched(
        op, x, w, lhs_indices, rhs_indices, sorted_indices, transpose_w, dtype, implementation
    )


def batched(op, x, w, lhs, rhs, sorted_indices, transpose_w, dtype, implementation):
    """``gather_qmm`` of checked operands."""
    *batch, first, second = w.shape
    product = Mm(
        rows=0, out_dtype=dtype, transpose_w=transpose_w, precision=check.precision(op, None),
        implementation=implementation, caller=Caller(op, ("x", "w"), AXES),
    )  # fmt: skip
    return gathered(
        op, "x", x, _flatten(w, batch), (*batch, first if transpose_w else second), lhs, rhs,
        sorted_indices, product, quantized_product.FUSED, kind="qmm",
    )  # fmt: skip


def _flatten(w: Quantized, batch) -> Quantized:
    """The batch axes of w as one; a global scale of some of them as one of all."""

    def fold(leaf):
        if leaf is None or (leaf is w.global_scale and leaf.ndim == 0):
            return leaf
        if leaf is w.global_scale and leaf.ndim <= len(batch):
            missing = (1,) * (len(batch) - leaf.ndim)
            leaf = jnp.broadcast_to(leaf.reshape(*leaf.shape, *missing), batch)
        return partition.merge(leaf, (len(batch), *[1] * (leaf.ndim - len(batch))))

    return jax.tree.map(fold, w)
