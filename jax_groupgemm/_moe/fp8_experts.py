"""The experts of a mixture in FP8 as one operation with a backward pass of its own.

It means ``dispatch``, two :func:`fp8_grouped_linear` and ``combine``. The backward pass keeps x, h
(the preactivation), the routing and the transposed codes of weights. As in :mod:`.experts`, rows of
the cotangent have no weights: those come in with the activation's derivative.

On one GPU of a kind that has the products, tokens are quantized before they are copied to their
rows, as bytes; the activation and its backward pass are quantized as they are made; and what weight
gradients contract is quantized from tokens by list. So no array of R rows and D columns is stored
in x's dtype but the results of products.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .._core import segments
from .._core.composed import Composed
from .._fp8 import activation as fp8_activation
from .._fp8 import blocks, convert, grouped_mm
from .._fp8.grouped_linear import (
    FP8Recipe,
    LinearProducts,
    codes_of,
    codes_of_both,
    grouped_linear,
    shares_codes,
)
from .._fp8.grouped_wgrad import grouped_wgrad
from .._fp8.quantize import fp8_quantize
from .._grouped.activation_backward import rounded_activation, scaled_activation_backward
from .._quantized import trilinear
from .._quantized.array import Quantized
from .._quantized.operands import seed_of
from .experts import of_rows, weight_cotangents
from .listed import tokens
from .permute import combined, dispatched

OP = "moe_mlp"


@dataclasses.dataclass(frozen=True)
class Fp8Options:
    """What is static: as :class:`.products.Options`, and the recipe."""

    activation: str
    dtype: Any
    out_dtype: Any
    transpose_w: bool
    recipe: FP8Recipe

    @property
    def products(self) -> LinearProducts:
        return LinearProducts(self.recipe, columns=not self.transpose_w)

    @property
    def fusible(self) -> bool:
        """Whether the fused kernels do what the recipe says."""
        r = self.recipe
        return (
            {r.forward, r.dgrad, r.wgrad} == {"fp8"}
            and (r.activation_block, r.weight_block) == (blocks.LINE, blocks.TILE)
            and r.gradient_format == "e4m3"
        )

    def of(self, w):
        """(E, N, K)."""
        return w if self.transpose_w else w.swapaxes(1, 2)


def experts(x, up, down, codes, routing, weight, key, options: Fp8Options):
    """All of it; x is (T, D) and weight (T, k). Codes of up and down may be None: not made yet."""
    if not shares_codes(options.recipe):
        codes = _codes(up, down, codes, options)
    codes = jax.tree.map(lax.stop_gradient, codes)
    return _EXPERTS(x, up, down, codes, routing, weight, key, options=options)


def _codes(up, down, given, options: Fp8Options) -> tuple[Quantized | None, Quantized | None]:
    """Those of both weights: what is not given is made."""
    up_codes, down_codes = (
        codes_of(w, options.recipe, columns=not options.transpose_w) if q is None else q
        for w, q in zip((up, down), given, strict=True)
    )
    return up_codes, down_codes


def _keys(key) -> tuple:
    """One for each of the two linear layers."""
    return trilinear.split(key)


# ---- what they mean --------------------------------------------------------------------------


def _linear(rows, w, codes, sizes, key, options: Fp8Options):
    return grouped_linear(
        rows, options.of(w), sizes, bias=None, recipe=options.recipe, key=key, quantized=codes,
        columns=not options.transpose_w,
    )  # fmt: skip


def _forward_composed(x, up, down, codes, routing, weight, key, *, options: Fp8Options):
    """The result, and h."""
    sizes, (up_key, down_key) = routing.group_sizes, _keys(key)
    rows = dispatched(x.astype(options.dtype), routing)
    h = _linear(rows, up, codes[0], sizes, up_key, options)
    a = rounded_activation(h, options.activation)
    y = _linear(a, down, codes[1], sizes, down_key, options)
    return combined(y, routing, weight, options.out_dtype), h


def _composed(x, up, down, codes, routing, weight, key, *, options: Fp8Options):
    out, _ = _forward_composed(x, up, down, codes, routing, weight, key, options=options)
    return out


def _backward_composed(ct, h, x, up, down, codes, routing, weight, key, *, options: Fp8Options):
    """The cotangents of x, up, down and weight, in terms of products that have derivatives."""
    sizes, products = routing.group_sizes, options.products
    (rows_key, down_key), (up_rows_key, up_key) = _backward_keys(key)
    of, dtype = options.of, options.dtype
    ct_rows, rows = (dispatched(a.astype(dtype), routing) for a in (ct, x))
    is_gradient = True, False
    d = trilinear.rows_cotangent(
        ct_rows, of(down), codes[1], sizes, rows_key, products, is_gradient
    )
    dh, a, sums = scaled_activation_backward(
        h, d, of_rows(weight, routing), options.activation, routing.group_sizes.sum(dtype="int32")
    )
    ddown = trilinear.weight_cotangent(ct_rows, a, of(down), sizes, down_key, products, is_gradient)
    dup = trilinear.weight_cotangent(dh, rows, of(up), sizes, up_key, products, is_gradient)
    drows = trilinear.rows_cotangent(
        dh, of(up), codes[0], sizes, up_rows_key, products, is_gradient
    )
    dweight = weight_cotangents(sums, routing).astype(weight.dtype)
    return combined(drows, routing, None, x.dtype), of(dup), of(ddown), dweight


def _backward_keys(key) -> list[tuple]:
    """For each linear layer, of the cotangent of its rows and of its weights."""
    return [trilinear.split(of_layer) for of_layer in reversed(_keys(key))]


# ---- fused ------------------------------------------------------------------------------------


def _runs_fused(platform: str, x, codes, routing, options: Fp8Options) -> bool:
    if not options.fusible:
        return False  # where no product has codes there are none
    rows = routing.order.shape[0]
    h = jax.ShapeDtypeStruct((rows, codes[0].shape[1]), options.dtype)
    return (
        fp8_activation.takes(platform, h, options.activation)
        and x.shape[1] % 16 == 0
        and all(grouped_mm.takes(platform, w, rows, options.dtype) for w in codes)
    )


def _dispatched_codes(x, routing, key=None):
    """Quantized tokens, copied to their rows."""
    q = fp8_quantize(x, stochastic_rounding_key=key)
    to_rows = lambda a: dispatched(a, routing, clears_rest=False)
    return dataclasses.replace(q, weight=to_rows(q.weight), scales=to_rows(q.scales))


def _forward_fused(x, up, down, codes, routing, weight, key, *, options: Fp8Options):
    del up, down, key
    sizes = routing.group_sizes
    metadata = segments.sizes(sizes)
    rows = _dispatched_codes(x.astype(options.dtype), routing)
    # Rows of no expert are left as they are: nobody reads them.
    h = grouped_mm.of_rows(OP, rows, codes[0], metadata, options.dtype, clears_rest=False)
    a = fp8_activation.quantized_activation(h, sizes, options.activation)
    y = grouped_mm.of_rows(OP, a, codes[1], metadata, options.dtype, clears_rest=False)
    return combined(y, routing, weight, options.out_dtype), h


def _backward_fused(ct, h, x, up, down, codes, routing, weight, key, *, options: Fp8Options):
    sizes, dtype = routing.group_sizes, options.dtype
    metadata, token = segments.sizes(sizes), tokens(routing)
    (rows_key, down_key), (up_rows_key, up_key) = _backward_keys(key)
    seed = lambda key: None if key is None else seed_of(OP, key)
    ct, x_rows = ct.astype(dtype), x.astype(dtype)
    ct_codes = _dispatched_codes(ct, routing, rows_key)
    d = grouped_mm.of_gradient(OP, ct_codes, codes[1], metadata, dtype, clears_rest=False)
    dh, dh_columns, a_columns, sums = fp8_activation.quantized_backward(
        h, d, of_rows(weight, routing), sizes, (seed(up_rows_key), seed(up_key)),
        options.activation,
    )  # fmt: skip
    ct_columns = convert.quantized_rows(ct, token, sizes, seed(down_key))
    x_columns = convert.quantized_rows(x_rows, token, sizes, None)
    ddown = _weight_gradient(ct_columns, a_columns, sizes, down.dtype, options)
    dup = _weight_gradient(dh_columns, x_columns, sizes, up.dtype, options)
    drows = grouped_mm.of_gradient(OP, dh, codes[0], metadata, dtype, clears_rest=False)
    dweight = weight_cotangents(sums, routing).astype(weight.dtype)
    return combined(drows, routing, None, x.dtype), dup, ddown, dweight


def _weight_gradient(dy, x, sizes, dtype, options: Fp8Options):
    """As weights are stored."""
    first, second = (x, dy) if options.transpose_w else (dy, x)
    return grouped_wgrad(first, second, sizes, dtype=dtype)


def _forward_call(platform, x, up, down, codes, routing, weight, key, *, options: Fp8Options):
    if not _runs_fused(platform, x, codes, routing, options):
        return None
    return _forward_fused(x, up, down, codes, routing, weight, key, options=options)


def _call(platform, x, up, down, codes, *more, options: Fp8Options):
    if not options.fusible:
        return None
    codes = _codes(up, down, codes, options)
    found = _forward_call(platform, x, up, down, codes, *more, options=options)
    return None if found is None else found[0]


def _backward_call(platform, ct, h, x, up, down, codes, routing, weight, key, *,
                   options: Fp8Options):  # fmt: skip
    if not _runs_fused(platform, x, codes, routing, options):
        return None
    return _backward_fused(ct, h, x, up, down, codes, routing, weight, key, options=options)


# ---- reverse mode ------------------------------------------------------------------------------


def _forward(x, up, down, codes, *more, moves, options: Fp8Options):
    """Codes that are made here are made both ways, from one read of a weight. The transposed ones
    are kept: the backward pass multiplies by those."""
    moving = [any(jax.tree.leaves(operand)) for operand in moves]
    x_moves, up_moves, _, _, _, weight_moves, _ = moving
    # Up's weight meets a cotangent if its rows need one, and so does down's.
    multiplied = x_moves, x_moves or up_moves or weight_moves
    made = [*codes]
    kept: list[Quantized | None] = [None, None]
    for i, w in enumerate((up, down)):
        if made[i] is None and multiplied[i] and shares_codes(options.recipe):
            made[i], kept[i] = codes_of_both(w, options.recipe, columns=not options.transpose_w)
    made = _codes(up, down, made, options)
    out, h = _FORWARD(x, up, down, made, *more, options=options)
    given = [q if turned is None else None for q, turned in zip(made, kept, strict=True)]
    return out, (checkpoint_name(h, "moe_h"), given, kept)


def _backward(saved, operands, cts, *, options: Fp8Options):
    h, codes, kept = saved
    x, up, down, _, *more = operands
    codes = tuple(
        q if turned is None else convert.exchanged(turned)
        for q, turned in zip(codes, kept, strict=True)
    )
    dx, dup, ddown, dweight = _BACKWARD(cts[0], h, x, up, down, codes, *more, options=options)
    return dx, dup, ddown, None, None, dweight, None


_FORWARD = Composed("jgg_fp8_experts_forward", _forward_composed, _forward_call)
_BACKWARD = Composed("jgg_fp8_experts_backward", _backward_composed, _backward_call)
_EXPERTS = Composed("jgg_fp8_experts", _composed, _call, vjp=(_forward, _backward))
