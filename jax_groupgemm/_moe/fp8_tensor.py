"""``FP8Tensor``: the layer with one scale for each tensor, as ``fp8.py`` has that of blocks.

Its kernels, ``FP8TensorKernels``, find a scale in one pass and cast in another. Tokens are cast
before they are copied to their rows, as bytes, and for weight gradients by list. The activation and
its backward pass are made in both passes, which read h and d and store no array of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .._core import segments
from .._fp8 import activation_cast, grouped_mm, tensors
from .._fp8.grouped_linear import TensorProducts
from .._fp8.grouped_wgrad import grouped_wgrad
from .._fp8.grouped_wgrad import takes as takes_wgrad
from .._fp8.recipe import accumulates
from .._quantized.array import Quantized
from .fp8 import FP8, OP, dispatched_codes, seed_of_key
from .products import Linear
from .routing import Routing, tokens_of_rows


@dataclasses.dataclass(frozen=True)
class FP8Tensor(FP8):
    """The backward pass in terms of products that have derivatives, where no kernels run all."""

    def on(self, platform, x, weights, routing):
        r = self.recipe
        if {r.forward, r.dgrad, r.wgrad} != {"fp8"}:
            return None
        weights = self._coded(weights, (False, False))[0]
        codes: list[Any] = [of.codes for of in weights]
        rows, tokens = routing.order.shape[0], (x.shape[0], x.shape[1])
        if not (
            activation_cast.takes(platform, self._h(rows, codes[0]), self.activation)
            and tensors.takes(platform, tokens, rows, self.dtype)
            and all(self._takes(platform, w, rows) for w in codes)
        ):
            return None
        kernels = FP8TensorKernels(*(getattr(self, f.name) for f in dataclasses.fields(self)))
        return kernels, weights

    def _takes(self, platform: str, w: Quantized, rows: int) -> bool:
        """Whether kernels multiply rows by w, gradients by the same codes, and both by each
        other."""
        format, how = self.recipe.gradient_format, accumulates(self.recipe)
        forward, dgrad = (
            grouped_mm.takes_matrices(platform, w, rows, self.dtype, element, accumulate, moved)
            for element, accumulate, moved in (("e4m3", how[0], False), (format, how[1], True))
        )
        elements = ("e4m3", format) if self.transpose_w else (format, "e4m3")
        return forward and dgrad and takes_wgrad(platform, w, rows, self.dtype, elements, how[2])

    @property
    def _products(self) -> TensorProducts:
        return TensorProducts(self.recipe, columns=not self.transpose_w)


@dataclasses.dataclass(frozen=True)
class FP8TensorKernels(FP8Tensor):
    """The same passes of kernels. The activation is its codes, and forward by rows, backward along
    rows; dh is the codes of both. Rows of no expert are left as they are: nobody reads them."""

    def rows(self, x, routing):
        return x.astype(self.dtype)

    def forward_keys(self, key):
        return None, None

    def up(self, x, up, routing, key, keeps):
        h = self.down(dispatched_codes(tensors.quantized(x), routing), up, routing, key)
        codes = activation_cast.quantized_activation(h, routing.group_sizes, self.activation)
        return codes, h

    def down(self, a, down, routing, key):
        metadata, how = segments.sizes(routing.group_sizes), accumulates(self.recipe)[0]
        return grouped_mm.of_rows(
            OP, a, down.codes, metadata, self.dtype, accumulate=how, clears_rest=False
        )

    def down_backward(self, ct, h, down, row_weight, routing, key, up_keys):
        codes = tensors.quantized(ct, seed=seed_of_key(key), element=self.recipe.gradient_format)
        d = self._gradient(dispatched_codes(codes, routing), down, routing)
        by_rows, along_rows, a, sums = activation_cast.quantized_backward(
            h, d, row_weight, routing.group_sizes, self.activation, self.recipe.gradient_format,
            seed_of_key(up_keys[0]),
        )  # fmt: skip
        return (by_rows, along_rows), a, sums

    def weight_cotangent(self, linear, tokens, rows, routing, key, *, first):
        element = "e4m3" if first else self.recipe.gradient_format
        of_tokens = tensors.quantized_rows(
            tokens, tokens_of_rows(routing), routing.group_sizes, element=element,
            seed=None if first else seed_of_key(key),
        )  # fmt: skip
        dy, x = (rows[1], of_tokens) if first else (of_tokens, rows)
        pair = (x, dy) if self.transpose_w else (dy, x)
        how = accumulates(self.recipe)[2]
        return grouped_wgrad(*pair, routing.group_sizes, dtype=linear.w.dtype, accumulate=how)

    def rows_cotangent(self, dh, up, routing, key):
        return self._gradient(dh[0], up, routing)

    def _gradient(self, dy, linear: Linear, routing: Routing):
        metadata, codes = segments.sizes(routing.group_sizes), linear.codes
        assert codes is not None
        how = accumulates(self.recipe)[1]
        return grouped_mm.of_gradient(
            OP, dy, codes, metadata, self.dtype, accumulate=how, clears_rest=False
        )
