"""``fp8_grouped_wgrad``: weight gradients of a grouped product, both operands in FP8."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._core import check, costs, parts, segments
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.operations import operation
from .._core.products import Wgrad
from .._core.types import Implementation, Integers
from .._grouped import primitives
from .._kernels import choose, problems
from .._quantized import array, padding
from .._quantized.array import Quantized
from .._quantized.operands import as_promised, check_padded, existing
from . import blocks, call, convert
from .grouped_mm import along_last, check_accumulate, decoded, elements, fast_fits
from .recipe import Accumulate


@operation
def fp8_grouped_wgrad(
    x: Quantized,
    dy: Quantized,
    group_sizes: Integers,
    *,
    existing_out: ArrayLike | None = None,
    accumulate: Accumulate = "exact",
    implementation: Implementation | None = None,
) -> jax.Array:
    """``out[g] = dy[rows g].T @ x[rows g]``; **T (contracted) is grouped**, x and dy are in FP8.

    Products of codes are summed over each block of T, and each sum times both scales is added in
    float32, to ``existing_out`` where there is one. An empty group gives exact zeros, or
    ``existing_out[g]``, bit for bit. Precision is that of :func:`fp8_grouped_mm`.

    Args:
      x: ``fp8_quantize(x, axis=0, group_sizes=group_sizes)`` of ``(T, K)``. Or
        ``fp8_quantize(x, block=None)``: then dy is of this kind, too, and each has one scale.
      dy: ``fp8_quantize(dy, axis=0, group_sizes=group_sizes)`` of ``(T, N)``.
      group_sizes: ``(G,)``, those that x and dy were quantized with; the result is NaN otherwise.
        Codes with one scale may have any.
      existing_out: float32 ``(G, N, K)``, accumulated into.
      accumulate: as in :func:`fp8_grouped_mm`.
      implementation: ``None`` for the best one, ``"reference"``, or a kernel's name.

    Returns:
      float32 ``(G, N, K)``.

    Raises:
      ValueError: a mode, layout or shape does not fit, or ``implementation`` cannot run, or
        ``accumulate`` is none of those.
      TypeError: x or dy is not a :class:`Quantized`, or a dtype is none of these.

    Differentiable in scales and existing_out. Closed under ``vmap``. Shards along N and K. The
    weight gradient of DeepSeek-V3's recipe.

    Examples:
      >>> sizes = jnp.array([2, 3])
      >>> x, dy = jnp.ones((5, 128)), jnp.ones((5, 64))
      >>> q = [jgg.fp8_quantize(v, axis=0, group_sizes=sizes) for v in (x, dy)]
      >>> dw = jgg.fp8_grouped_wgrad(*q, sizes)
      >>> dw.shape, dw[:, 0, 0].tolist()
      ((2, 64, 128), [2.0, 3.0])
    """
    return grouped_wgrad(
        x, dy, group_sizes, dtype=jnp.float32, existing_out=existing_out,
        accumulate=accumulate, implementation=implementation,
    )  # fmt: skip


def grouped_wgrad(x, dy, group_sizes, *, dtype, existing_out=None,
                  accumulate: Accumulate = "exact", implementation=None):  # fmt: skip
    """The same, rounded to ``dtype``."""
    op = "fp8_grouped_wgrad"
    check_accumulate(op, accumulate)
    fast = accumulate == "fast"
    if all(isinstance(q, Quantized) and q.layout == "linear" for q in (x, dy)):
        return _of_matrices(
            op, x, dy, group_sizes, existing_out, fast=fast, dtype=jnp.dtype(dtype),
            implementation=implementation,
        )  # fmt: skip
    x, dy = _along_t(op, "x", x), _along_t(op, "dy", dy)
    (k, _), (n, _), (t,) = x.shape, dy.shape, x.positions.shape
    if dy.positions.shape != (t,):
        raise ValueError(f"jgg.{op}: dy has {dy.positions.shape[0]} rows, expected T = {t} as x")
    group_sizes = check.group_sizes(op, group_sizes)
    groups = group_sizes.shape[0]
    for name, q in (("x", x), ("dy", dy)):
        check_padded(op, name, q, t, groups, blocks.GROUPED)
    if existing_out is not None:
        existing_out = existing(op, existing_out, (groups, n, k))
    check.implementation(op, implementation)
    if (x.block is None) != (dy.block is None):
        raise ValueError(
            f"jgg.{op}: x has block={x.block} and dy has block={dy.block}, expected two blocks or "
            "twice None"
        )
    static = {"dtype": jnp.dtype(dtype), "fast": fast, "implementation": implementation}
    return _WGRAD(x, dy, group_sizes, existing_out, **static)


def takes(platform: str, w: Quantized, rows: int, dtype, elements: tuple[str, str],
          accumulate: Accumulate) -> bool:  # fmt: skip
    """Whether a kernel makes the gradient of w, of operands with one scale each."""
    groups, n, k = w.shape
    line = None if accumulate == "fast" else blocks.LINE
    problem = problems.Fp8(
        op="fp8_grouped_wgrad", platform=platform, out_dtype=jnp.dtype(dtype).name,
        empty=0 in (rows, groups, n, k), rows=rows, segments=groups, groups=groups, k=k, n=n,
        elements=elements, blocks=(line, line),
    )  # fmt: skip
    return choose.fused(problem) is not None


def _of_matrices(op: str, x, dy, group_sizes, existing_out, *, implementation, **static):
    """The same of codes that are stored by rows, with one scale each."""
    x, dy = _by_rows(op, "x", x), _by_rows(op, "dy", dy)
    check.rows(op, "x", x.shape[0])
    if dy.shape[0] != x.shape[0]:
        raise ValueError(f"jgg.{op}: dy has {dy.shape[0]} rows, expected T = {x.shape[0]} as x")
    group_sizes = check.group_sizes(op, group_sizes)
    if existing_out is not None:
        existing_out = existing(op, existing_out, (group_sizes.shape[0], dy.shape[1], x.shape[1]))
    check.implementation(op, implementation)
    return _OF_MATRICES(x, dy, group_sizes, existing_out, implementation=implementation, **static)


def _matrices_composed(x, dy, group_sizes, existing_out, *, dtype, fast, implementation):
    """Sums of codes, which bfloat16 holds, times both scales."""
    del fast
    lines, columns = (lax.stop_gradient(q.weight).astype(jnp.bfloat16) for q in (dy, x))
    product = Wgrad(
        groups=group_sizes.shape[0], out_dtype=jnp.float32, precision=lax.Precision.HIGHEST,
        implementation=_of_arrays(implementation),
    )  # fmt: skip
    out = primitives.wgrad(lines, columns, segments.sizes(group_sizes), product)
    live = padding.padded_sizes(group_sizes, x.shape[0], 1) > 0
    out = jnp.where(live[:, None, None], out * (dy.scales * x.scales), jnp.float32(0))
    if existing_out is not None:
        out = padding.accumulated(live, out, existing_out)
    return out.astype(dtype)


def _matrices_call(platform, x, dy, group_sizes, existing_out, **static):
    """A kernel of blocks along rows takes a transposed copy of the codes, which is padded group by
    group; None where there is no kernel."""
    types = jax.eval_shape(_in_lines, x, dy, group_sizes)
    if _planned(platform, *types, group_sizes, existing_out, **static) is None:
        return None
    lines = _in_lines(x, dy, group_sizes)
    return _call(platform, *lines, group_sizes, existing_out, **static)


def _of_arrays(implementation: str | None) -> str | None:
    """That of products of arrays, which have no kernel of some names."""
    return None if implementation in ("sm100", "sm89") else implementation


def _in_lines(x, dy, group_sizes):
    positions, source = padding.padding(group_sizes, x.shape[0], blocks.GROUPED)

    def along_rows(q):
        stored = lax.bitcast_convert_type(q.weight, jnp.uint8)
        codes = lax.bitcast_convert_type(padding.take_rows(stored, source).T, q.weight.dtype)
        return convert.made(codes, q.scales, positions, block=None, axis=-2)

    return along_rows(x), along_rows(dy)


def _composed(x, dy, group_sizes, existing_out, *, dtype, fast, implementation):
    """In terms of another product: of codes, which bfloat16 holds, where each operand has one
    scale."""
    del fast
    implementation = _of_arrays(implementation)
    padded = padding.padded_sizes(group_sizes, x.positions.shape[0], blocks.GROUPED)
    product = Wgrad(
        groups=group_sizes.shape[0], out_dtype=jnp.float32, transpose_x=True, transpose_y=True,
        precision=lax.Precision.HIGHEST, implementation=implementation,
    )  # fmt: skip
    promised = as_promised(group_sizes, blocks.GROUPED, x, dy)
    if x.block is None:
        lines, columns = (lax.stop_gradient(q.weight).astype(jnp.bfloat16) for q in (dy, x))
        promised = promised * (dy.scales * x.scales)
    else:
        lines, columns = (decoded(_stored(q), implementation) for q in (dy, x))
    out = primitives.wgrad(lines, columns, segments.sizes(padded), product)
    live = padded > 0
    out = jnp.where(live[:, None, None], out * promised, jnp.float32(0))
    if existing_out is not None:
        out = padding.accumulated(live, out, existing_out)
    return out.astype(dtype)


def _call(platform, x, dy, group_sizes, existing_out, *, dtype, fast, implementation):
    """One custom call; None where there is no kernel for it."""
    operands = x, dy, group_sizes, existing_out
    static = {"dtype": dtype, "fast": fast, "implementation": implementation}
    plan = _planned(platform, *operands, **static)
    if plan is None:
        return None
    if x.block is None and "fast" not in plan.config:
        operands = _in_blocks(x), _in_blocks(dy), group_sizes, existing_out
    return _CALLS[plan.kernel.name](plan, *operands, dtype=dtype)


def _planned(platform, x, dy, *operands, fast, **static) -> choose.Plan | None:
    """A fast kernel, or one of blocks, which have the scale of the matrix."""
    if fast_fits(static["implementation"], fast, x):
        plan = choose.fused(_problem(platform, x, dy, *operands, **static))
        if plan is not None:
            return plan
    x, dy = (jax.eval_shape(_in_blocks, q) if q.block is None else q for q in (x, dy))
    return choose.fused(_problem(platform, x, dy, *operands, **static))


def _in_blocks(q: Quantized) -> Quantized:
    shape = blocks.scales_shape(q.weight.shape, blocks.LINE)
    scales = jnp.broadcast_to(q.scales, shape)
    return dataclasses.replace(q, scales=scales, block=blocks.LINE, group_size=None)


#: By kernel: ``call(plan, x, dy, group_sizes, existing_out, *, dtype)``.
_CALLS: dict[str, Callable] = {
    "sm100": call.grouped_wgrad_sm100,
    "sm90": call.grouped_wgrad,
    "sm89": call.grouped_wgrad_sm89,
}


def _problem(platform, x, dy, group_sizes, existing_out, *, dtype, implementation) -> problems.Fp8:
    return problems.Fp8(
        op="fp8_grouped_wgrad", platform=platform, implementation=implementation,
        out_dtype=jnp.dtype(dtype).name, empty=0 in (*x.shape, *dy.shape),
        rows=x.positions.shape[0], segments=group_sizes.shape[0], groups=group_sizes.shape[0],
        k=x.shape[0], n=dy.shape[0], elements=elements(x, dy), blocks=(x.block, dy.block),
        more_options=existing_out is not None,
    )  # fmt: skip


def _matrices_cost(operands, values, outs, **_) -> Cost:
    x, dy, sizes, existing_out = operands
    rows = x.shape[0]
    count, read, *_ = costs.counts(segments.sizes(sizes), [values[2]], rows, rows, sizes.shape[0])
    codes = (x.shape[1] + dy.shape[1]) * read
    more = costs.bytes_of((x.scales, dy.scales, sizes, existing_out, outs))
    return Cost(2 * count * x.shape[1] * dy.shape[1], codes + more)


def _cost(operands, values, outs, **_) -> Cost:
    """Rows are those of the operands, padded group by group."""
    (x, dy, sizes, existing_out), value = operands, values[2]
    (k, stored), (n, _), (rows,) = x.shape, dy.shape, x.positions.shape
    padded = None if value is None else lambda: padding.padded_sizes(value(), rows, blocks.GROUPED)
    count, read, *_ = costs.counts(segments.sizes(sizes), [padded], stored, stored, sizes.shape[0])
    codes = costs.bytes_of((x.weight, x.scales, dy.weight, dy.scales)) // max(stored, 1) * read
    return Cost(2 * count * k * n, codes + costs.bytes_of((sizes, existing_out, outs)))


def _parts(part, x, dy, group_sizes, existing_out, *, dtype, **static):
    """Columns of both may be divided. Rows are padded group by group, and each device has all."""
    w = parts.WHOLE
    lines = lambda q, letter: dataclasses.replace(
        q, weight=letter + w, scales="" if q.block is None else letter + w, positions=w
    )
    words = lines(x, "k"), lines(dy, "n"), w, None if existing_out is None else f"{w}nk"
    out = _type(group_sizes, dy.shape[0], x.shape[0], dtype)
    run = functools.partial(part, words, [(f"{w}nk", out)], x, dy, group_sizes, existing_out)
    return tuple(run(dtype=dtype, **static))


def _local(cut, *operands, **static):
    del cut
    return (_WGRAD(*operands, **static),)


def _matrices_parts(part, x, dy, group_sizes, existing_out, *, dtype, **static):
    """Rows may be divided, too."""
    w = parts.WHOLE
    rows = lambda q, letter: dataclasses.replace(q, weight=f"t{letter}", scales="")
    words = rows(x, "k"), rows(dy, "n"), w, None if existing_out is None else f"{w}nk"
    out = _type(group_sizes, dy.shape[1], x.shape[1], dtype)
    run = functools.partial(part, words, [(f"{w}nk", out)], x, dy, group_sizes, existing_out)
    return tuple(run(dtype=dtype, **static))


def _matrices_local(cut, x, dy, group_sizes, existing_out, *, dtype, **static):
    """Sums over devices are float32."""
    if not cut.divides("t"):
        return (_OF_MATRICES(x, dy, group_sizes, existing_out, dtype=dtype, **static),)
    rows = x.shape[0]
    here = cut.sizes(group_sizes, "t", rows)
    out = cut.total(_OF_MATRICES(x, dy, here, None, dtype=jnp.dtype("float32"), **static), "t")
    if existing_out is not None:
        live = cut.total(here, "t") > 0
        out = padding.accumulated(live, out, existing_out)
    return (out.astype(dtype),)


def _type(group_sizes, n: int, k: int, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((group_sizes.shape[0], n, k), dtype)


_WGRAD = Composed(
    "jgg_fp8_grouped_wgrad", _composed, _call, each=True, keeps_call=True, cost=_cost, parts=_parts,
    local=_local,
)  # fmt: skip
_OF_MATRICES = Composed(
    "jgg_fp8_grouped_wgrad_of_matrices", _matrices_composed, _matrices_call, each=True,
    keeps_call=True, cost=_matrices_cost, parts=_matrices_parts, local=_matrices_local,
)  # fmt: skip


def _along_t(op: str, name: str, q) -> Quantized:
    """``q``, checked: in blocks along grouped rows."""
    q = array.of_mode(op, name, q, "fp8")
    if q.layout != "grouped":
        raise ValueError(
            f"jgg.{op}: {name} has layout {q.layout!r}, expected 'grouped': "
            f"fp8_quantize({name}, axis=0, group_sizes=group_sizes)"
        )
    return q


def _by_rows(op: str, name: str, q) -> Quantized:
    """``q``, checked: with one scale."""
    q = along_last(op, name, q, "T, C")
    if q.block is not None:
        raise ValueError(
            f"jgg.{op}: {name} has layout 'linear' and block={q.block}, expected layout 'grouped', "
            f"fp8_quantize({name}, axis=0, group_sizes=group_sizes), or block=None"
        )
    return q


def _stored(q: Quantized) -> Quantized:
    """The array that the leaves hold, rows last and padded."""
    return dataclasses.replace(q, axis=-1, layout="linear", positions=None)
