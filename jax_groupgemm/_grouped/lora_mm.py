"""``lora_mm``: a product of low rank for each row, of the factors that the row names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.typing import ArrayLike

from .._core import check, costs, dtypes, partition
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.operations import operation
from .._core.products import Caller, Mm
from .._core.types import Implementation, Integers
from .._kernels import choose, lora, problems
from . import fused
from .call import attributes
from .gather_mm import gathered, indices

_DTYPES = ("float32", "bfloat16", "float16", "float64")
#: What axes are called here, for messages.
_AXES = {"t": "T", "u": "T", "g": "A..."}


@operation
def lora_mm(
    x: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    adapter: Integers,
    expert: Integers | None = None,
    *,
    scale: float = 1.0,
    row_scale: ArrayLike | None = None,
    existing_out: ArrayLike | None = None,
    sorted_rows: bool = False,
    precision: PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``out[t] = (x[t] @ a[p].T) @ b[p].T`` with ``p = adapter[t], expert[t]``; **T (rows) is
    grouped** by adapter and expert.

    LoRA where every row has an adapter of its own, and in a mixture of experts every expert has its
    part of each adapter. With every option::

        out = existing_out + round(scale * row_scale * (x @ a.T)) @ b.T

    Sums are float32 (float64 for float64). What x makes of ``a`` is rounded to x's dtype, and so is
    the result. A row whose adapter or expert is outside its range, as -1 is, gets zeros, or keeps
    ``existing_out``, whatever it holds, and has no gradient. Rows come in any order, and any number
    of pairs may have none.

    Args:
      x: ``(T, K)``, floats.
      a: ``(A, E, R, K)``, LoRA's A of each adapter and expert; without ``expert`` ``(A, R, K)``.
      b: ``(A, E, N, R)``, LoRA's B; without ``expert`` ``(A, N, R)``. Both are as PEFT stores them.
        Factors of another dtype are rounded to x's.
      adapter: integers ``(T,)``.
      expert: integers ``(T,)``.
      scale: a number, alpha / R in LoRA.
      row_scale: ``(T,)``, for example ``scales[adapter]``.
      existing_out: ``(T, N)``, accumulated into (in place where it is donated).
      sorted_rows: a hint that rows of one adapter and expert follow each other, which changes no
        value: the kernel then sorts no rows.
      precision, implementation: as in :func:`grouped_mm`.

    Returns:
      ``(T, N)``, in x's dtype.

    Raises:
      ValueError: shapes do not fit, or ``implementation`` is unknown or cannot run.
      TypeError: indices are not integers, or x, a or b hold no floats.

    Differentiable to any order in every floating operand, closed under ``vmap`` over any operand.
    The shrink and expand kernels of Punica, and of vLLM's and SGLang's LoRA over experts.
    """
    op = "lora_mm"
    x, a, b = (check.array(op, n, v) for n, v in (("x", x), ("a", a), ("b", b)))
    for name, value in (("x", x), ("a", a), ("b", b)):
        check.dtype(op, name, value.dtype, _DTYPES)
    check.shape(op, "x", x, (None, None), "T, K")
    t, k = x.shape
    one = "A" if expert is None else "A, E"
    axes = (None,) if expert is None else (None, None)
    what = "with" if expert is not None else "without"
    check.shape(
        op, "a", a, (*axes, None, k), f"{one}, R, K", f"because x is {x.shape}, {what} expert"
    )
    batch, rank = a.shape[:-2], a.shape[-2]
    check.shape(op, "b", b, (*batch, None, rank), f"{one}, N, R", f"because a is {a.shape}")
    n = b.shape[-2]
    check.rows(op, "x", t)
    check.rows(op, "a", a.size // max(rank * k, 1), "adapters and experts")
    pair = _of_rows(op, "adapter", adapter, t, batch[0])
    if expert is not None:
        pair = _joined(pair, _of_rows(op, "expert", expert, t, batch[1]), *batch)
    else:
        pair = _joined(pair, None, batch[0], 1)
    factor = check.number(op, "scale", scale)
    if row_scale is not None:
        row_scale = check.array(op, "row_scale", row_scale)
        check.shape(op, "row_scale", row_scale, (t,), "T", f"because x is {x.shape}")
        check.holds(op, "row_scale", row_scale, x.dtype)
    if existing_out is not None:
        existing_out = check.array(op, "existing_out", existing_out)
        why = "because the result has this shape"
        check.shape(op, "existing_out", existing_out, (t, n), "T, N", why)
        check.holds(op, "existing_out", existing_out, x.dtype)
    check.flag(op, "sorted_rows", sorted_rows)
    check.implementation(op, implementation)
    product = Mm(
        rows=0, transpose_w=True, out_dtype=x.dtype, precision=check.precision(op, precision, x),
        implementation=implementation, caller=Caller(op, ("x", "a"), _AXES),
    )  # fmt: skip
    a, b = (partition.merge(f.astype(x.dtype), (len(batch), 1, 1)) for f in (a, b))
    if 0 in (*a.shape, *b.shape, *x.shape):
        zeros = jnp.zeros((t, n), x.dtype)
        return zeros if existing_out is None else existing_out.astype(x.dtype)
    return _LORA(
        x, a, b, pair, row_scale, existing_out, scale=factor, sorted_rows=bool(sorted_rows),
        product=product,
    )  # fmt: skip


def _of_rows(op: str, name: str, value, rows: int, count: int):
    """Indices of rows, int32."""
    value = indices(op, name, value, (count,))
    check.shape(op, name, value, (rows,), "T", "because x has these rows")
    return value


def _joined(adapter, expert, adapters: int, experts: int):
    """The place of a pair among all, -1 where there is none."""
    # By arithmetic: JAX maps no selection by a condition of a mesh from numbers of none.
    there = (adapter >= 0) & (adapter < adapters)
    place = adapter
    if expert is not None:
        there &= (expert >= 0) & (expert < experts)
        place = adapter * experts + expert
    there = there.astype(jnp.int32)
    return place * there + there - 1


# ---- what it means -----------------------------------------------------------------------------


def _composed(x, a, b, pair, row_scale, existing, *, scale: float, sorted_rows: bool, product: Mm):
    del sorted_rows  # the order of rows makes no difference
    wide = dtypes.accumulator_dtype(x.dtype)
    summed = product.replace(out_dtype=wide, cotangent_dtype=dtypes.cotangent_dtype(x.dtype))

    def run(rows, factors, name: str):
        caller = Caller(product.caller.op, ("x", name), product.caller.axes)
        pairs, lines, _ = factors.shape
        out = gathered(
            caller.op, "x", rows[:, None], factors, (pairs, lines), None, pair, False,
            summed.replace(caller=caller), fused.MM, kind="mm",
        )  # fmt: skip
        return out[:, 0]

    h = run(x, a, "a")
    if row_scale is not None:
        # Rows of no pair are zeros whatever their scale.
        scales = row_scale.astype(wide)
        h = h * jnp.where(pair >= 0, scales, jnp.zeros_like(scales))[:, None]
    if scale != 1.0:
        h = h * jnp.asarray(scale, wide)
    out = run(h.astype(x.dtype), b, "b")
    if existing is not None:
        out = out + existing.astype(wide)
    return out.astype(x.dtype)


def _call(platform: str, x, a, b, pair, row_scale, existing, *, scale: float, sorted_rows: bool,
          product: Mm):  # fmt: skip
    """Custom call ``jgg_lora_mm``: x, a, b, pair[, row][, row_scale][, existing_out] -> out; None
    where no kernel takes it."""
    if product.implementation not in (None, "sm80"):
        return None
    (rows, k), (pairs, rank, _), n = x.shape, a.shape, b.shape[1]
    given = [v for v in (x, a, b, existing) if v is not None]
    problem = problems.Lora(
        op="lora_mm", platform=platform, dtypes=tuple(v.dtype.name for v in given),
        out_dtype=x.dtype.name, rows=rows, pairs=pairs, rank=rank, k=k, n=n,
    )  # fmt: skip
    if choose.choose(problem) is None:
        return None
    order = None
    if rows >= lora.SORT_FROM_ROWS and not sorted_rows:
        order = jnp.argsort(pair).astype(jnp.int32)
        pair = pair[order]
    scales = None if row_scale is None else row_scale.astype(jnp.float32)
    more = {"row_of": order, "row_scale": scales, "existing_out": existing}
    operands = [x, a, b, pair, *(v for v in more.values() if v is not None)]
    # The result takes the place of existing_out: XLA copies it first where it is needed later.
    aliases = None if existing is None else {len(operands) - 1: 0}
    out = jax.ShapeDtypeStruct((rows, n), x.dtype)
    flags = attributes({"lora_mm": {name: v is not None for name, v in more.items()}})
    call = jax.ffi.ffi_call("jgg_lora_mm", out, input_output_aliases=aliases)
    return call(*operands, scale=np.float32(scale), **flags)


def _cost(operands, values, outs, *, product: Mm, **_) -> Cost:
    x, a, b, pair, *more = operands
    (rows, _), (pairs, rank, k), n = x.shape, a.shape, b.shape[1]
    used = min(rows, pairs)
    if values[3] is not None:
        with jax.ensure_compile_time_eval():
            known = np.asarray(values[3]())
        known = known[known >= 0]
        rows, used = known.size, np.unique(known).size
    factors = costs.bytes_of((a, b)) // max(pairs, 1) * used
    read = rows * k * x.dtype.itemsize + factors + costs.bytes_of((pair, more))
    return Cost(2 * rows * rank * (k + n), read + costs.bytes_of(outs))


_LORA = Composed("jgg_lora_mm", _composed, _call, cost=_cost)
