"""``segmented_mm``: products over ranges of the contracted axis."""

from __future__ import annotations

import jax
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from .._core import check, dtypes
from .._core.operations import operation
from .._core.products import Caller, Wgrad
from .._core.segments import SPANS, Metadata
from .._core.types import Implementation, Integers
from . import primitives

#: What axes of the product are called here, for messages.
_AXES = {"t": "K", "a": "M", "b": "N"}


@operation
def segmented_mm(
    a: ArrayLike,
    b: ArrayLike,
    segments: Integers,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``out[s] = a[:, start_s:end_s] @ b[start_s:end_s, :]``; **K (contracted) is grouped**.

    Segments are independent of each other: they may overlap, repeat, come in any order and leave
    gaps. Bounds are clamped to ``[0, K]``; an empty or reversed segment gives exact zeros. NaN
    and Inf outside a segment do not reach it. Everything is decided on the device: ``segments``
    may be traced, and the cost follows the rows that the segments hold.

    Weight gradients of ``grouped_mm`` are ``segmented_mm(x, dy, bounds, transpose_a=True)``.

    Args:
      a: ``(M, K)``, or ``(K, M)`` with ``transpose_a=True``. Neither costs a copy.
      b: ``(K, N)``, or ``(N, K)`` with ``transpose_b=True``.
      segments: integers ``(..., 2)``, half-open ``[start, end)`` along K.
      precision: for float32 operands, as in :func:`jax.lax.dot`; ``None`` follows
        ``jax.default_matmul_precision`` and means true float32 where that is unset.
      preferred_element_type: dtype of the result; by default the operands' promoted dtype, or
        bfloat16 where that is a float of 8 bits or fewer. Sums are kept in
        float32 (float64 for float64) whatever it is.
      implementation: ``None`` for the best one, ``"reference"``, or a kernel's name.

    Returns:
      ``segments.shape[:-1] + (M, N)``.

    Raises:
      ValueError: shapes do not fit, or ``implementation`` is unknown or cannot run.
      TypeError: ``segments`` are not integers, or the dtypes cannot be multiplied.

    Differentiable to any order in ``a`` and ``b`` (overlaps accumulate, gaps get zeros), closed
    under ``vmap`` over any operand. The operation of MLX's ``segmented_mm``.

    Examples:
      >>> a, b = jnp.ones((2, 10)), jnp.ones((10, 3))
      >>> y = jgg.segmented_mm(a, b, jnp.array([[0, 4], [4, 10]]))  # k of 0 to 3, and of 4 to 9
      >>> y.shape, y[:, 0, 0].tolist()
      ((2, 2, 3), [4.0, 6.0])
    """
    op = "segmented_mm"
    a, b = (check.array(op, n, v) for n, v in (("a", a), ("b", b)))
    segments = check.integers(op, "segments", segments)
    for name, value in (("a", a), ("b", b)):
        check.numeric(op, name, value)
    check.flag(op, "transpose_a", transpose_a)
    check.flag(op, "transpose_b", transpose_b)
    check.shape(op, "a", a, (None, None), "K, M" if transpose_a else "M, K")
    k = a.shape[0 if transpose_a else 1]
    check.shape(
        op, "b", b, (None, k) if transpose_b else (k, None), "N, K" if transpose_b else "K, N",
        f"because a is {a.shape}. Pass transpose_{'b=False' if transpose_b else 'b=True'} if b is "
        f"{'(K, N)' if transpose_b else '(N, K)'}.",
    )  # fmt: skip
    if segments.ndim < 1 or segments.shape[-1] != 2:
        raise ValueError(
            f"jgg.{op}: segments has shape {segments.shape}, expected (..., 2): "
            "half-open [start, end) along K"
        )
    check.rows(op, "a", k, "elements along K")
    check.implementation(op, implementation)
    dtype = check.result_dtype(op, preferred_element_type, a=a, b=b)
    spans = segments.reshape(-1, 2)
    product = Wgrad(
        groups=spans.shape[0], out_dtype=dtypes.computed(dtype), transpose_x=not transpose_a,
        transpose_y=transpose_b, precision=check.precision(op, precision, a, b),
        implementation=implementation, caller=Caller(op, ("a", "b"), _AXES),
    )  # fmt: skip
    a, b = check.multiplied(a, b)
    out = primitives.wgrad(a, b, Metadata(SPANS, spans), product).astype(dtype)
    return out.reshape(*segments.shape[:-1], *out.shape[1:])
