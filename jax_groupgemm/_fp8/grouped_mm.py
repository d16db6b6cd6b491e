"""``fp8_grouped_mm``: every group of rows times its own matrix, both in FP8."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._core import check, costs, parts, segments
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.operations import operation
from .._core.products import Caller, Mm
from .._core.segments import Metadata
from .._core.types import Activation, Implementation, Integers
from .._grouped import fused, primitives
from .._grouped.call import Epilogue
from .._grouped.fused import of_any_shape
from .._grouped.grouped_mm import epilogue, metadata
from .._kernels import choose, problems
from .._quantized import array, format, layouts
from .._quantized import convert as quantized_convert
from .._quantized import product as quantized_product
from .._quantized.array import Quantized
from .._quantized.format import FLOATS
from . import blocks, call
from .recipe import ACCUMULATE, Accumulate


@operation
def fp8_grouped_mm(
    x: Quantized,
    w: Quantized,
    group_sizes: Integers,
    *,
    group_offset: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    row_scale: ArrayLike | None = None,
    preferred_element_type: DTypeLike | None = jnp.bfloat16,
    accumulate: Accumulate = "exact",
    implementation: Implementation | None = None,
) -> jax.Array:
    """``out[t] = x[t] @ w[group(t)].T``; **T (rows) is grouped**, and x and w are in FP8.

    With every option, in float32 and rounded once::

        out = row_scale * activation(x @ w + bias)

    Products of codes are summed over each block of K, and each sum times both scales is added in
    float32. Of quantized normal data the result is within 2e-4 (relative Frobenius error, before it
    is rounded) of the product of what ``dequantize`` gives, of numbers of one sign within 1e-3.
    Where x and w have a scale for each matrix, ``accumulate="fast"`` lets tensor cores add up all
    of K, and scales multiply the result. Hopper keeps about 14 bits of such a sum, so errors grow
    with K: quantized normal data are within 1e-3 at K = 2048, numbers of one sign within 0.05.
    Rows of no group are exact zeros, whatever they hold.

    Kernels take codes of e4m3 ("sm89" also x of e5m2), x in blocks of ``(1, 128)`` and w in blocks
    of ``(128, 128)``, or either with a scale for each matrix. Of sharded operands they run on each
    device's part, and under ``vmap`` where each of the batch has an operand of 2^20 numbers. Where
    x and w have a scale for each matrix, kernels of bfloat16 multiply the codes otherwise, which
    bfloat16 holds. Everything else is the XLA program, which multiplies float32 values and is
    closer to the exact product.

    Args:
      x: mode ``"fp8"``, ``(T, K)``, as :func:`fp8_quantize` makes it: blocks of ``(1, 128)``,
        ``(1, K)`` or others.
      w: mode ``"fp8"``, ``(G, N, K)``, blocks of ``(128, 128)``, ``(1, 128)``, ``(1, K)``, None or
        others.
      group_sizes, group_offset: as in :func:`grouped_mm`.
      bias: ``(G, N)``, added to the rows of its group.
      activation: as in :func:`grouped_mm`; gated forms have ``N/2`` columns.
      row_scale: ``(T,)``.
      preferred_element_type: bfloat16, float16 or float32.
      accumulate: ``"exact"``, or ``"fast"``, which changes nothing where another kernel, or none,
        runs.
      implementation: ``None`` for the best one, ``"reference"``, or a kernel's name.

    Returns:
      ``(T, N)``, or ``(T, N/2)`` with a gated activation.

    Raises:
      ValueError: a mode, axis or shape does not fit, or a sharding over an Explicit mesh, or
        ``implementation`` cannot run, or ``accumulate`` is none of those.
      TypeError: x or w is not a :class:`Quantized`, or a dtype is none of these.

    Differentiable in scales, bias and row_scale; codes are constant. Closed under ``vmap``. Shards
    like :func:`grouped_qmm`, in whole blocks. The product of DeepGEMM's
    ``m_grouped_fp8_gemm_nt_contiguous``, with groups of any size.

    Examples:
      >>> x, w = jnp.ones((5, 128)), jnp.ones((2, 128, 128))  # w: experts, N, K
      >>> q = jgg.fp8_quantize(x), jgg.fp8_quantize(w, block=(128, 128))
      >>> y = jgg.fp8_grouped_mm(*q, jnp.array([2, 3]))
      >>> y.dtype, float(y[0, 0])
      (dtype(bfloat16), 128.0)
    """
    op = "fp8_grouped_mm"
    x = along_last(op, "x", x, "T, K")
    w = along_last(op, "w", w, "G, N, K")
    check.rows(op, "x", x.shape[0])
    if w.shape[2] != x.shape[1]:
        raise ValueError(
            f"jgg.{op}: w has shape {w.shape}, expected (G, N, K) = "
            f"{(*w.shape[:2], x.shape[1])} because x is {x.shape}"
        )
    groups = metadata(op, group_sizes, group_offset, w)
    preferred = jnp.bfloat16 if preferred_element_type is None else preferred_element_type
    dtype = check.of_dtype(op, "preferred_element_type", preferred)
    check.dtype(op, "preferred_element_type", dtype, FLOATS)
    check.implementation(op, implementation)
    check_accumulate(op, accumulate)
    product = _product(op, x, dtype, implementation=implementation)
    options = epilogue(op, product, x, w, bias, activation, row_scale)
    weight, fast = format.of(w).of_product(w), accumulate == "fast"
    return _MM(x, weight, groups, options, product=product, fast=fast)


def check_accumulate(op: str, accumulate) -> None:
    if not isinstance(accumulate, str) or accumulate not in ACCUMULATE:
        said = " or ".join(map(repr, ACCUMULATE))
        raise ValueError(f"jgg.{op}: accumulate={check.describe(accumulate)}, expected {said}")


def of_rows(op: str, x: Quantized, w: Quantized, groups: Metadata, dtype, *,
            accumulate: Accumulate = "exact", **flags) -> jax.Array:  # fmt: skip
    """:func:`fp8_grouped_mm` of checked operands. Flags: ``clears_rest`` of :class:`Mm`."""
    product, weight = _product(op, x, dtype, **flags), format.of(w).of_product(w)
    return _MM(x, weight, groups, Epilogue(), product=product, fast=accumulate == "fast")


def takes(platform: str, w: Quantized, rows: int, dtype) -> bool:
    """Whether a kernel multiplies rows by w, and gradients by the same codes."""
    groups, n, k = w.shape
    known = {
        "op": "fp8_grouped_mm", "platform": platform, "out_dtype": jnp.dtype(dtype).name,
        "empty": 0 in (rows, groups, n, k), "rows": rows, "segments": groups, "groups": groups,
        "elements": ("e4m3", blocks.DTYPES[w.weight.dtype.name]), "blocks": (blocks.LINE, w.block),
    }  # fmt: skip
    both = (problems.Fp8(**known, k=k, n=n), problems.Fp8(**known, k=n, n=k, transpose_w=False))
    return all(choose.fused(problem) is not None for problem in both)


def takes_matrices(platform: str, w: Quantized, rows: int, dtype, element: str,
                   accumulate: Accumulate, *, transposed: bool) -> bool:  # fmt: skip
    """Whether a kernel multiplies rows in ``element`` by w, both with a scale for each matrix; by
    the transpose of w with ``transposed``."""
    groups, n, k = w.shape
    n, k = (k, n) if transposed else (n, k)
    blocks_ = (None, None) if accumulate == "fast" else (blocks.LINE, blocks.TILE)
    problem = problems.Fp8(
        op="fp8_grouped_mm", platform=platform, out_dtype=jnp.dtype(dtype).name,
        empty=0 in (rows, groups, n, k), rows=rows, segments=groups, groups=groups, k=k, n=n,
        elements=(element, "e4m3"), blocks=blocks_, transpose_w=not transposed,
    )  # fmt: skip
    return choose.fused(problem) is not None


def of_gradient(op: str, x: Quantized, w: Quantized, groups: Metadata, dtype, **flags):
    """``x[t] @ w[group(t)]`` of x ``(T, N)`` and w ``(G, N, K)``, whose blocks are square: the same
    codes serve both products. Flags as of :func:`of_rows`."""
    return of_rows(op, x, w, groups, dtype, transpose_w=False, **flags)


def _product(op: str, x, dtype, *, implementation=None, **flags) -> Mm:
    return Mm(
        rows=x.shape[0], out_dtype=dtype, **{"transpose_w": True, **flags},
        precision=lax.Precision.HIGHEST, implementation=implementation,
        caller=Caller(op, ("x", "w")),
    )  # fmt: skip


def _composed(x, w, groups, options, *, product: Mm, fast: bool):
    """In terms of another product: rows are dequantized, w is not."""
    del fast
    product = of_any_shape(product)
    if x.block is None and blocks.covers(w.block, w.shape):
        return _of_matrices(x, w, groups, options, product)
    rows = decoded(x, product.implementation)
    return quantized_product.FUSED(rows, w, groups, product, options)


def _of_matrices(x, w, groups, options: Epilogue, product: Mm):
    """The same where every matrix has one scale: sums of codes, which bfloat16 holds, times both
    scales."""
    rows, weights = (lax.stop_gradient(q.weight).astype(jnp.bfloat16) for q in (x, w))
    # scales[group(t)] is itself a grouped product, with K = 1.
    ones = jnp.ones((product.rows, 1), jnp.float32)
    of_group = product.replace(
        out_dtype=jnp.float32, transpose_w=False, clears_rest=True, cotangent_dtype=None
    )
    of_weights = w.scales.reshape(w.shape[0], 1, 1)
    scales = primitives.mm(ones, of_weights, groups, of_group)[:, 0] * x.scales
    scaled = lambda of: fused.MM(rows, weights, groups, of, Epilogue(row_scale=scales))
    if options.nothing:
        return scaled(product)
    return fused.MM.with_options(scaled, groups, w, options, product)


def _call(platform, x, w, groups, options, *, product: Mm, fast: bool):
    """One custom call; None where there is no kernel for it."""
    if fast_fits(product.implementation, fast, x) and blocks.covers(w.block, w.shape):
        scales = w.scales.reshape(w.shape[0])
        whole = dataclasses.replace(w, scales=scales, block=None, group_size=None)
        problem = _problem(platform, x, whole, groups, options, product)
        if (plan := choose.fused(problem)) is not None:
            return _CALLS[plan.kernel.name](plan, x, whole, groups, options, product=product)
    x, w = blocks.cut(x, blocks.LINE), blocks.cut(w, blocks.TILE)
    plan = choose.fused(_problem(platform, x, w, groups, options, product))
    if plan is None:
        return None
    return _CALLS[plan.kernel.name](plan, x, w, groups, options, product=product)


def _parts(part, x, w, groups: Metadata, options: Epilogue, *, product: Mm, fast: bool):
    """Rows, columns, K and matrices may be divided, in whole blocks."""
    if groups.form.kind != "sizes":
        return None
    words, whole = _words(x, w, groups, product)

    def run(of: Mm):
        out = jax.ShapeDtypeStruct(of.out_shape(x, w), of.out_dtype)
        results = [(parts.with_whole("tn", whole), out)]
        (made,) = part(words, results, x, w, groups, product=of, fast=fast)
        return made

    if options.nothing:
        return (run(product),)
    product = of_any_shape(product)
    return (quantized_product.FUSED.with_options(run, groups, w, options, product),)


def _words(x: Quantized, w: Quantized, groups: Metadata, product: Mm):
    """Those of the operands, and the letters of axes that blocks do not divide."""
    of_x, of_w = "tk", "gnk" if product.transpose_w else "gkn"
    blocked = [
        (word, q.shape, (1, *q.block)[-len(word) :])
        for word, q in ((of_x, x), (of_w, w))
        if q.block is not None
    ]
    whole = set().union(*(parts.cut_blocks(*of) for of in blocked))
    scales: dict[str, str] = {word: parts.of_scales(word, *of) for word, *of in blocked}

    def of(q: Quantized, word: str, alone: str) -> Quantized:
        codes, of_scales = (parts.with_whole(a, whole) for a in (word, scales.get(word, alone)))
        return dataclasses.replace(q, weight=codes, scales=of_scales)

    offset = None if groups.group_offset is None else ""
    sizes = dataclasses.replace(groups, values=parts.WHOLE, group_offset=offset)
    return (of(x, of_x, ""), of(w, of_w, "g"), sizes), whole


def _local(cut, x, w, groups: Metadata, *, product: Mm, fast: bool):
    """Sums over devices are float32, as those of ``partition``."""
    sizes, offset = cut.sizes(groups.values, "t", x.shape[0]), groups.group_offset
    if cut.divides("g"):
        first = cut.index("g") * w.shape[0]
        offset = first if offset is None else offset.reshape(()) + first.astype(offset.dtype)
        product = product.replace(clears_rest=True)
    dtype, product = product.out_dtype, product.replace(rows=x.shape[0])
    if cut.divides("gk") and jnp.finfo(dtype).bits < 32:
        product = product.replace(out_dtype=jnp.float32, cotangent_dtype=dtype)
    here = segments.sizes(sizes, offset)
    out = _MM(x, w, here, Epilogue(), product=product, fast=fast)
    return (cut.total(out, "gk").astype(dtype),)


def fast_fits(implementation: str | None, fast: bool, x: Quantized) -> bool:
    """Whether a fast kernel may run a product of x."""
    return fast and x.block is None and implementation in (None, "sm90")


#: By kernel: ``call(plan, x, w, groups, options, *, product)``.
_CALLS: dict[str, Callable] = dict.fromkeys(("sm100", "sm90", "sm89"), call.grouped_mm)


def _problem(platform, x, w, groups: Metadata, options: Epilogue, product: Mm) -> problems.Fp8:
    count, k, n = product.sizes(w)
    return problems.Fp8(
        op="fp8_grouped_mm", platform=platform, implementation=product.implementation,
        out_dtype=product.out_dtype.name, empty=0 in (*x.shape, *w.shape), rows=product.rows,
        segments=groups.count, groups=count, k=k, n=n, elements=elements(x, w),
        blocks=(x.block, w.block), transpose_w=product.transpose_w, **options.facts(),
    )  # fmt: skip


def elements(a: Quantized, b: Quantized) -> tuple[str, str]:
    return blocks.DTYPES[a.weight.dtype.name], blocks.DTYPES[b.weight.dtype.name]


def _cost(operands, values, outs, *, product: Mm, **_) -> Cost:
    x, w, groups, options = operands
    known = [values[2].values, values[2].group_offset][: len(groups.arrays)]
    cost, rows, weights = costs.product(x.weight, w, groups, known, outs[0], product)
    scales = costs.bytes_of(x.scales)
    if x.scales.ndim == 2:
        scales = scales // max(x.scales.shape[0], 1) * min(rows, x.scales.shape[0])
    more = Cost(0, scales + costs.bytes_of(options.row_scale))
    return cost + costs.bias_cost(options.bias, rows, weights) + more


_MM = Composed(
    "jgg_fp8_grouped_mm", _composed, _call, each=True, keeps_call=True, cost=_cost, parts=_parts,
    local=_local,
)  # fmt: skip


def decoded(q: Quantized, implementation: str | None) -> jax.Array:
    """Values in float32."""
    return quantized_convert._dequantize(q, jnp.float32, implementation)


def along_last(op: str, name: str, q, letters: str) -> Quantized:
    """``q``, checked, in layout "linear": in blocks along its last axis, of an axis a letter."""
    q = array.along_last(op, name, q, "fp8", letters)
    return layouts.of(q).to_linear(q)
