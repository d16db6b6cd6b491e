"""``lora_mm``: a product of low rank for each row, of the factors that the row names."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.typing import ArrayLike

from .._core import check, costs, dtypes, partition
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.operations import operation
from .._core.products import Caller, Mm, Wgrad
from .._core.types import Implementation, Integers
from .._kernels import choose, lora, problems
from . import fused
from .call import attributes
from .gather_mm import gathered, indices
from .lora_wgrad import lora_wgrad

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

    Examples:
      >>> x = jnp.ones((3, 8))
      >>> a, b = jnp.ones((2, 4, 8)), jnp.stack([jnp.ones((6, 4)), jnp.zeros((6, 4))])
      >>> y = jgg.lora_mm(x, a, b, jnp.array([0, 1, 0]), scale=0.5)  # an adapter for each row
      >>> y.shape, y[:, 0].tolist()
      ((3, 6), [16.0, 0.0, 16.0])
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
        rows=0, out_dtype=x.dtype, precision=check.precision(op, precision, x),
        implementation=implementation, caller=Caller(op, ("x", "a"), _AXES),
    )  # fmt: skip
    a, b = (partition.merge(f.astype(x.dtype), (len(batch), 1, 1)) for f in (a, b))
    if 0 in (*a.shape, *b.shape, *x.shape):
        zeros = jnp.zeros((t, n), x.dtype)
        return zeros if existing_out is None else existing_out.astype(x.dtype)
    return _LORA(
        x, a, b, pair, row_scale, existing_out, form=_Form(product, factor, bool(sorted_rows))
    )


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


@dataclasses.dataclass(frozen=True)
class _Form:
    """The static part of a call.

    Attributes:
      product: transposes, precision and kernel; it has no rows.
      scale: of all rows.
      in_runs: rows of one pair are said to follow each other.
      turned: a is (P, K, R) and b (P, R, N), as the gradient of x has them: it is the same of its
        cotangent, b and a.
    """

    product: Mm
    scale: float
    in_runs: bool
    turned: bool = False


def _composed(x, a, b, pair, row_scale, existing, *, form: _Form):
    return _composed_kept(x, a, b, pair, row_scale, existing, form=form)[0]


def _composed_kept(x, a, b, pair, row_scale, existing, *, form: _Form):
    """The result, and what is between the products, (T, R), in x's dtype."""
    wide = dtypes.accumulator_dtype(x.dtype)
    product = form.product.replace(
        transpose_w=not form.turned, out_dtype=wide,
        cotangent_dtype=dtypes.cotangent_dtype(x.dtype),
    )  # fmt: skip

    def run(rows, factors, name: str):
        caller = dataclasses.replace(product.caller, operands=("x", name))
        columns = (factors.shape[0], product.sizes(factors)[2])
        of = product.replace(caller=caller)
        return gathered(
            caller.op, "x", rows[:, None], factors, columns, None, pair, False, of, fused.MM,
            kind="mm",
        )[:, 0]  # fmt: skip

    h = run(x, a, "a")
    if row_scale is not None:
        # Rows of no pair are zeros whatever their scale.
        scales = row_scale.astype(wide)
        h = h * jnp.where(pair >= 0, scales, jnp.zeros_like(scales))[:, None]
    if form.scale != 1.0:
        h = h * jnp.asarray(form.scale, wide)
    h = h.astype(x.dtype)
    out = run(h, b, "b")
    if existing is not None:
        out = out + existing.astype(wide)
    return out.astype(x.dtype), h


# ---- one kernel --------------------------------------------------------------------------------


def _call(platform: str, *operands, form: _Form):
    out = _call_kept(platform, *operands, form=form, keeps=False)
    return None if out is None else out[0]


def _call_kept(platform: str, x, a, b, pair, row_scale, existing, *, form: _Form,
               keeps: bool = True):  # fmt: skip
    """Custom call ``jgg_lora_mm``: x, a, b, pair[, row][, row_scale][, existing_out] -> out[, h];
    None where no kernel takes it."""
    if form.product.implementation not in (None, "sm80"):
        return None
    (rows, k), (pairs, rank, n) = x.shape, _sizes(a, b, form)
    given = [v for v in (x, a, b, existing) if v is not None]
    problem = problems.Lora(
        op="lora_mm", platform=platform, dtypes=tuple(v.dtype.name for v in given),
        out_dtype=x.dtype.name, rows=rows, pairs=pairs, rank=rank, k=k, n=n,
    )  # fmt: skip
    if choose.choose(problem) is None:
        return None
    order = None
    if rows >= lora.SORT_FROM_ROWS and not form.in_runs:
        order = jnp.argsort(pair).astype(jnp.int32)
        pair = pair[order]
    scales = None if row_scale is None else row_scale.astype(jnp.float32)
    more = {"row_of": order, "row_scale": scales, "existing_out": existing}
    operands = [x, a, b, pair, *(v for v in more.values() if v is not None)]
    # The result takes the place of existing_out: XLA copies it first where it is needed later.
    aliases = None if existing is None else {len(operands) - 1: 0}
    results = [jax.ShapeDtypeStruct((rows, c), x.dtype) for c in (n, *[rank] * keeps)]
    flags = {name: v is not None for name, v in more.items()} | {"turned": form.turned}
    call = jax.ffi.ffi_call("jgg_lora_mm", results, input_output_aliases=aliases)
    return call(*operands, scale=np.float32(form.scale), **attributes({"lora_mm": flags}))


def _sizes(a, b, form: _Form) -> tuple[int, int, int]:
    """Pairs, rank and columns of the result."""
    return a.shape[0], a.shape[2 if form.turned else 1], b.shape[2 if form.turned else 1]


# ---- gradients ---------------------------------------------------------------------------------


def _forward(*operands, form: _Form, moves):
    return None if moves[4] else _KEPT(*operands, form=form)


def _backward(h, operands, cts, *, form: _Form):
    (x, a, b, pair, row_scale, existing), (ct,) = operands, cts
    back = dataclasses.replace(form, turned=not form.turned)
    dx, dh = _KEPT(ct, b, a, pair, row_scale, None, form=back)
    product = form.product.derived(Wgrad, groups=a.shape[0], out_dtype=x.dtype)
    if form.turned:
        db, da = lora_wgrad(h, ct, x, dh, pair, product)
    else:
        da, db = lora_wgrad(dh, x, ct, h, pair, product)
    old = None if existing is None else ct.astype(existing.dtype)
    return dx, da, db, None, None, old


def _cost(operands, values, outs, *, form: _Form) -> Cost:
    x, a, b, pair, *more = operands
    (rows, k), (pairs, rank, n) = x.shape, _sizes(a, b, form)
    used = min(rows, pairs)
    if values[3] is not None:
        with jax.ensure_compile_time_eval():
            known = np.asarray(values[3]())
        known = known[known >= 0]
        rows, used = known.size, np.unique(known).size
    factors = costs.bytes_of((a, b)) // max(pairs, 1) * used
    read = rows * k * x.dtype.itemsize + factors + costs.bytes_of((pair, more))
    return Cost(2 * rows * rank * (k + n), read + costs.bytes_of(outs))


_KEPT = Composed("jgg_lora_mm_kept", _composed_kept, _call_kept, cost=_cost)
_LORA = Composed("jgg_lora_mm", _composed, _call, cost=_cost, vjp=(_forward, _backward))
