"""Products that are public operations, each with its own backward pass: ``Composition``, which
``implementation="composed"`` means, and ``NVFP4``."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from .._grouped.activation_backward import rounded_activation
from .._grouped.grouped_mm import grouped_mm
from .._nvfp4.grouped_linear import NVFP4Recipe, nvfp4_grouped_linear
from .._quantized.array import Quantized
from .._quantized.grouped_qmm import grouped_qmm
from .permute import dispatched
from .products import Linear, Products
from .routing import Routing


class Operations(Products):
    """A linear layer of rows, twice, and the activation between."""

    @abc.abstractmethod
    def linear(self, rows, linear: Linear, group_sizes, key) -> jax.Array: ...

    def rows(self, x, routing: Routing):
        return dispatched(x, routing).astype(self.dtype)

    def up(self, x, up, routing, key, keeps):
        h = checkpoint_name(self.linear(x, up, routing.group_sizes, key), "moe_h")
        return rounded_activation(h, self.activation), h

    def down(self, a, down, routing, key):
        return self.linear(a, down, routing.group_sizes, key)


@dataclasses.dataclass(frozen=True)
class Composition(Operations):
    """Of arrays and of quantized weights."""

    precision: Any = None
    implementation: str | None = None

    def linear(self, rows, linear, group_sizes, key):
        del key
        product: Callable = grouped_qmm
        same: dict[str, Any] = {"bias": linear.bias, "preferred_element_type": self.dtype}
        if not isinstance(linear.w, Quantized):
            product, same["precision"] = grouped_mm, self.precision
        with jax.numpy_dtype_promotion("standard"):  # dtypes have been accepted
            return product(
                rows, linear.w, group_sizes, transpose_w=self.transpose_w,
                implementation=self.implementation, **same,
            )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class NVFP4(Operations):
    """Of weights that are quantized as a recipe says."""

    recipe: NVFP4Recipe

    def linear(self, rows, linear, group_sizes, key):
        w = linear.w.astype(self.dtype)
        return nvfp4_grouped_linear(
            rows, w if self.transpose_w else w.swapaxes(1, 2), group_sizes, bias=linear.bias,
            recipe=self.recipe, key=key,
        )  # fmt: skip
