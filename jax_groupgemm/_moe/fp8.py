"""``FP8Operations``: products as an :class:`FP8Recipe` has them.

``FP8``: those without biases. Their backward pass is that of the pipeline, which keeps x, h, the
routing and the transposed codes of weights.

On one GPU of a kind that has the products, each pass is made of kernels, ``FP8Kernels``: tokens are
quantized before they are copied to their rows, as bytes; the activation and its backward pass are
quantized as they are made; and what weight gradients contract is quantized from tokens by list. So
no array of R rows and D columns is stored in x's dtype but the results of products.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import lax

from .._core import segments
from .._fp8 import activation as fp8_activation
from .._fp8 import blocks, convert, grouped_mm
from .._fp8.grouped_linear import (
    LinearProducts,
    codes_of,
    codes_of_both,
    fp8_grouped_linear,
    of_columns,
    shares_codes,
)
from .._fp8.grouped_wgrad import grouped_wgrad
from .._fp8.quantize import fp8_quantize
from .._fp8.recipe import FP8Recipe
from .._grouped.activation_backward import scaled_activation_backward
from .._quantized import trilinear
from .._quantized.array import Quantized
from .._quantized.operands import seed_of
from .operations import Operations
from .permute import dispatched
from .products import Linear, ProductsWithBackward
from .routing import Routing, tokens_of_rows

OP = "moe_mlp"


@dataclasses.dataclass(frozen=True)
class FP8Operations(Operations):
    """Of weights that are quantized as a recipe says."""

    recipe: FP8Recipe

    @property
    def tokens_in_fp8(self):
        return self.recipe.dispatch == "fp8"

    def prepared(self, weights):
        """In the products' dtype, with codes. Those that the result and dx share are made later:
        for both at once, where a gradient is taken."""
        weights = weights.map(lambda of: dataclasses.replace(of, w=of.w.astype(self.dtype)))
        if not shares_codes(self.recipe):
            weights = self._coded(weights, (False, False))[0]
        constant = functools.partial(jax.tree.map, lax.stop_gradient)
        return weights.map(lambda of: dataclasses.replace(of, codes=constant(of.codes)))

    def _codes(self, of: Linear, both: bool) -> tuple[Quantized | None, Quantized | None]:
        """Those that are given, or are made here; then also their transpose if ``both``."""
        if of.codes is not None:
            return of.codes, None
        if both and shares_codes(self.recipe):
            return codes_of_both(of.w, self.recipe, columns=not self.transpose_w)
        return codes_of(of.w, self.recipe, columns=not self.transpose_w), None

    def _coded(self, weights, multiplied):
        """With codes; and those, with their transposes, if the backward pass multiplies by them."""
        codes = [self._codes(of, both) for of, both in zip(weights, multiplied, strict=True)]
        return weights.map(lambda of, made: dataclasses.replace(of, codes=made[0]), codes), codes

    def linear(self, rows, linear, group_sizes, key):
        run = fp8_grouped_linear if self.transpose_w else of_columns
        return run(
            rows, linear.w, group_sizes, bias=linear.bias, recipe=self.recipe, key=key,
            quantized=linear.codes, state=linear.state,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FP8(FP8Operations, ProductsWithBackward):
    """The backward pass in terms of products that have derivatives, where no kernels run all."""

    by_pass = True

    def on(self, platform, x, weights, routing) -> tuple | None:
        if not self._fusible:
            return None
        weights = self._coded(weights, (False, False))[0]
        codes: list[Any] = [of.codes for of in weights]
        rows = routing.order.shape[0]
        if not (
            fp8_activation.takes(platform, self._h(rows, codes[0]), self.activation)
            and x.shape[1] % 16 == 0
            and all(grouped_mm.takes(platform, w, rows, self.dtype) for w in codes)
        ):
            return None
        kernels = FP8Kernels(*(getattr(self, field.name) for field in dataclasses.fields(self)))
        return kernels, weights

    def _h(self, rows: int, up: Quantized) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, up.shape[1]), self.dtype)

    @property
    def _fusible(self) -> bool:
        """Whether the kernels do what the recipe says."""
        r = self.recipe
        return (
            {r.forward, r.dgrad, r.wgrad} == {"fp8"}
            and (r.activation_block, r.weight_block) == (blocks.LINE, blocks.TILE)
            and r.gradient_format == "e4m3"
        )

    def rows(self, x, routing):
        return dispatched(x.astype(self.dtype), routing)

    def kept(self, weights, multiplied):
        """Codes that are made here are made both ways, from one read of a weight. The transposed
        ones are kept: the backward pass multiplies by those."""
        weights, codes = self._coded(weights, multiplied)
        return weights, [(q, None) if turned is None else (None, turned) for q, turned in codes]

    def restored(self, weights, kept):
        codes = (q if turned is None else convert.exchanged(turned) for q, turned in kept)
        return weights.map(lambda of, q: dataclasses.replace(of, codes=q), codes)

    def down_backward(self, ct, h, down, row_weight, routing, key, up_keys):
        d = self.rows_cotangent(ct, down, routing, key)
        live_rows = routing.group_sizes.sum(dtype="int32")
        return scaled_activation_backward(h, d, row_weight, self.activation, live_rows)

    def weight_cotangent(self, linear, tokens, rows, routing, key, *, first):
        dy, x = (rows, tokens) if first else (tokens, rows)
        w, is_gradient = self._across(linear.w), (True, False)
        dw = trilinear.weight_cotangent(
            dy, x, w, routing.group_sizes, key, self._products, is_gradient
        )
        return self._across(dw)

    def rows_cotangent(self, dh, up, routing, key):
        w, is_gradient = self._across(up.w), (True, False)
        return trilinear.rows_cotangent(
            dh, w, up.codes, routing.group_sizes, key, self._products, is_gradient
        )

    @property
    def _products(self) -> LinearProducts:
        return LinearProducts(self.recipe, columns=not self.transpose_w)

    def _across(self, w):
        """(E, N, K), of a weight as it is stored; and back."""
        return w if self.transpose_w else w.swapaxes(1, 2)


class CodesOfKernels:
    """Passes of kernels. The activation is its codes, and forward by rows, backward along rows; dh
    is the codes of both. Rows of no expert are left as they are: nobody reads them."""

    dtype: Any

    def rows(self, x, routing):
        return x.astype(self.dtype)

    def forward_keys(self, key):
        return None, None


@dataclasses.dataclass(frozen=True)
class FP8Kernels(CodesOfKernels, FP8):
    def up(self, x, up, routing, key, keeps):
        h = self.down(dispatched_codes(fp8_quantize(x), routing), up, routing, key)
        return fp8_activation.quantized_activation(h, routing.group_sizes, self.activation), h

    def down(self, a, down, routing, key):
        metadata = segments.sizes(routing.group_sizes)
        return grouped_mm.of_rows(OP, a, down.codes, metadata, self.dtype, clears_rest=False)

    def down_backward(self, ct, h, down, row_weight, routing, key, up_keys):
        codes = fp8_quantize(ct, stochastic_rounding_key=key)
        d = self._gradient(dispatched_codes(codes, routing), down, routing)
        seeds = seed_of_key(up_keys[0]), seed_of_key(up_keys[1])
        by_rows, along_rows, a, sums = fp8_activation.quantized_backward(
            h, d, row_weight, routing.group_sizes, seeds, self.activation
        )
        return (by_rows, along_rows), a, sums

    def weight_cotangent(self, linear, tokens, rows, routing, key, *, first):
        sizes, seed = routing.group_sizes, None if first else seed_of_key(key)
        of_tokens = convert.quantized_rows(tokens, tokens_of_rows(routing), sizes, seed)
        dy, x = (rows[1], of_tokens) if first else (of_tokens, rows)
        pair = (x, dy) if self.transpose_w else (dy, x)
        return grouped_wgrad(*pair, sizes, dtype=linear.w.dtype)

    def rows_cotangent(self, dh, up, routing, key):
        return self._gradient(dh[0], up, routing)

    def _gradient(self, dy, linear: Linear, routing: Routing):
        metadata, codes = segments.sizes(routing.group_sizes), linear.codes
        assert codes is not None
        return grouped_mm.of_gradient(OP, dy, codes, metadata, self.dtype, clears_rest=False)


def seed_of_key(key):
    return None if key is None else seed_of(OP, key)


def dispatched_codes(q: Quantized, routing: Routing) -> Quantized:
    """Quantized tokens, copied to their rows."""
    to_rows = lambda a: dispatched(a, routing, clears_rest=False)
    scales = q.scales if q.block is None else to_rows(q.scales)
    return dataclasses.replace(q, weight=to_rows(q.weight), scales=scales)
