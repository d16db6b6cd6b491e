"""``grouped_mm``: every group of rows times its own matrix, with the usual epilogues."""

from __future__ import annotations

import jax
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from .._core import check, dtypes, segments
from .._core.operations import operation
from .._core.products import Caller, Mm
from .._core.segments import Metadata
from .._core.types import Activation, Implementation, Integers
from . import activations, fused
from .call import Epilogue


@operation
def grouped_mm(
    x: ArrayLike,
    w: ArrayLike,
    group_sizes: Integers,
    *,
    group_offset: ArrayLike | None = None,
    transpose_w: bool = False,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    row_scale: ArrayLike | None = None,
    existing_out: ArrayLike | None = None,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``out[t] = x[t] @ w[group(t)]``; **T (rows) is grouped**.

    Rows of one group are consecutive, in group order. With every option::

        out = existing_out + row_scale * activation(x @ w + bias)

    computed in float32 and rounded once. Rows past ``sum(group_sizes)``, and rows of groups that
    are not computed here, are exact zeros (or keep ``existing_out``) and get zero gradient,
    whatever they hold. Group sizes are data: any sizes, without alignment, and the host reads none.

    Args:
      x: ``(T, K)``.
      w: ``(G, K, N)``, or ``(G, N, K)`` with ``transpose_w=True``, as torch and MLX store weights.
        Neither costs a copy. A square weight fits both ways, so no error says which it is.
      group_sizes: integers ``(G,)`` of any integer dtype. Negative sizes count as 0; where the sum
        exceeds T, later groups are cut off at the last row.
      group_offset: integer of shape ``()`` or ``(1,)``, may be traced. ``w`` then holds groups
        ``[group_offset, group_offset + G)`` of the longer ``group_sizes`` (expert parallelism).
      bias: ``(G, N)``, added to the rows of its group.
      activation: ``"silu"``, ``"gelu"`` (tanh form), ``"gelu_erf"``, ``"relu"``, ``"relu2"`` (its
        square), ``"tanh"``, or a gated form, a result of ``N/2`` columns: ``"swiglu"``, which is
        ``silu(y[:, :N/2]) * y[:, N/2:]``, ``"geglu"``, ``"reglu"``, or gpt-oss's ``"swiglu_oai"``,
        ``(clip(up, -7, 7) + 1) * g * sigmoid(1.702 * g)`` with ``g = min(gate, 7)``.
      row_scale: ``(T,)``.
      existing_out: the result's shape, accumulated into (in place where it is donated).
      precision: for float32 operands, as in :func:`jax.lax.dot`; ``None`` follows
        ``jax.default_matmul_precision`` and means true float32 where that is unset.
      preferred_element_type: dtype of the result; by default the promoted dtype of x and w, or
        bfloat16 where that is a float of 8 bits or fewer.
      implementation: ``None`` for the best one, ``"reference"``, or a kernel's name.

    Returns:
      ``(T, N)``, or ``(T, N/2)`` with a gated activation.

    Raises:
      ValueError: shapes do not fit, or a name is unknown, or ``implementation`` cannot run, or
        ``precision`` is more than float32 of operands that are not float64.
      TypeError: sizes are not integers, or the dtypes cannot be multiplied.

    Differentiable to any order in every floating operand, closed under ``vmap`` over any operand.
    Under Explicit sharding an N-sharded ``w`` gives an N-sharded result without communication, a
    K-sharded one an all-reduce. The operation of ``jax.lax.ragged_dot`` with the epilogues of
    CUTLASS's grouped GEMM.

    Examples:
      >>> x, w = jnp.ones((5, 8)), jnp.stack([jnp.full((8, 4), g) for g in (1.0, 2.0, 3.0)])
      >>> y = jgg.grouped_mm(x, w, jnp.array([2, 0, 3]))  # two rows by w[0], three by w[2]
      >>> y.shape, y[:, 0].tolist()
      ((5, 4), [8.0, 8.0, 24.0, 24.0, 24.0])
    """
    op = "grouped_mm"
    x, w = (check.array(op, n, v) for n, v in (("x", x), ("w", w)))
    for name, value in (("x", x), ("w", w)):
        check.numeric(op, name, value)
    check.shape(op, "x", x, (None, None), "T, K")
    check.flag(op, "transpose_w", transpose_w)
    t, k = x.shape
    letters, other = ("G, N, K", "(G, K, N)") if transpose_w else ("G, K, N", "(G, N, K)")
    check.shape(
        op, "w", w, (None, None, k) if transpose_w else (None, k, None), letters,
        f"because x is {x.shape}. Pass transpose_w={not transpose_w} if w is {other}.",
    )  # fmt: skip
    groups = metadata(op, group_sizes, group_offset, w)
    check.rows(op, "x", t)
    check.implementation(op, implementation)
    dtype = check.result_dtype(op, preferred_element_type, x=x, w=w)
    product = Mm(
        rows=t, transpose_w=transpose_w, precision=check.precision(op, precision, x, w),
        out_dtype=dtypes.computed(dtype), implementation=implementation,
        caller=Caller(op, ("x", "w")),
    )  # fmt: skip
    x, w = check.multiplied(x, w)
    options = epilogue(op, product, x, w, bias, activation, row_scale, existing_out)
    return fused.MM(x, w, groups, product, options).astype(dtype)


def metadata(op: str, group_sizes, group_offset, w, name: str = "w",
             letter: str = "G") -> Metadata:  # fmt: skip
    """Sizes and offset, checked."""
    if group_offset is None:
        why = (
            f"because {name} is {w.shape}. Pass group_offset if {name} holds only some of the "
            "groups."
        )
        return segments.sizes(check.group_sizes(op, group_sizes, w.shape[0], why, letter))
    group_sizes = check.group_sizes(op, group_sizes, letter=letter)
    return segments.sizes(group_sizes, offset(op, group_offset))


def offset(op: str, group_offset) -> jax.Array:
    """The first group that is here, checked."""
    group_offset = check.integers(op, "group_offset", group_offset)
    if group_offset.shape not in ((), (1,)):
        raise ValueError(
            f"jgg.{op}: group_offset has shape {group_offset.shape}, expected () or (1,)"
        )
    return group_offset.reshape(())


def epilogue(op: str, product: Mm, x, w, bias, activation, row_scale,
             existing_out=None) -> Epilogue:  # fmt: skip
    """The options of a product, checked."""
    t, dtype, (groups, _, n) = x.shape[0], product.out_dtype, product.sizes(w)
    columns = activations.columns(op, activation, n)
    if bias is not None:
        bias = check.array(op, "bias", bias)
        check.shape(op, "bias", bias, (groups, n), "G, N", f"because w is {w.shape}")
        check.holds(op, "bias", bias, dtype)
        (bias,) = check.multiplied(bias)
    if row_scale is not None:
        row_scale = check.array(op, "row_scale", row_scale)
        check.shape(op, "row_scale", row_scale, (t,), "T", f"because x is {x.shape}")
        check.holds(op, "row_scale", row_scale, dtype)
    if existing_out is not None:
        existing_out = check.array(op, "existing_out", existing_out)
        check.shape(
            op, "existing_out", existing_out, (t, columns), "T, N",
            "because the result has this shape",
        )  # fmt: skip
        check.holds(op, "existing_out", existing_out, dtype)
    return Epilogue(bias, activation, row_scale, existing_out)
