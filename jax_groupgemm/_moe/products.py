"""Both products of a mixture's experts, of rows sorted by expert, and their derivatives."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._core import segments
from .._core.primitive import vary_alike
from .._core.products import Mm
from .._grouped import fused
from .._grouped.call import Epilogue
from .._quantized import product as quantized_product
from .._quantized.array import Quantized
from .routing import Routing


@dataclasses.dataclass(frozen=True)
class Options:
    """The experts' static options.

    Attributes:
      activation: between the two products.
      dtype: of the rows that are multiplied, and of both products.
      out_dtype: the result's.
      transpose_w: up is (E, 2F, D) and down (E, D, F).
    """

    activation: str
    dtype: Any
    out_dtype: Any
    transpose_w: bool = False
    precision: Any = None
    implementation: str | None = None

    def product(self, rows: int) -> Mm:
        return Mm(
            rows=rows, out_dtype=self.dtype, transpose_w=self.transpose_w,
            precision=self.precision, implementation=self.implementation, clears_rest=False,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Products:
    """Both products, of rows sorted by expert. Rows behind the last expert's may hold anything."""

    routing: Routing
    options: Options

    @property
    def product(self) -> Mm:
        return self.options.product(self.routing.order.shape[0])

    @property
    def metadata(self):
        return segments.sizes(self.routing.group_sizes)

    def up_epilogue(self, bias) -> Epilogue:
        return Epilogue(bias, self.options.activation, rounds=True)

    def up(self, rows, w, bias):
        """Its activation, and ``h = rows @ w + bias``."""
        epilogue = self.up_epilogue(bias)
        return _fused(w).preactivated(rows, w, self.metadata, epilogue, self.product)

    def up_alone(self, rows, w, bias):
        return self._run(rows, w, self.up_epilogue(bias))

    def down(self, a, w, bias):
        return self._run(a, w, Epilogue(bias))

    def _run(self, rows, w, epilogue: Epilogue):
        whole = not isinstance(w, Quantized) or quantized_product.fusible(w)
        return _fused(w)(rows, w, self.metadata, self.product, epilogue, fused=whole)

    def rows_cotangent(self, w, ct):
        """The cotangent of the rows that w multiplies; ``ct`` is that of the product."""
        columns = w.shape[2 if self.options.transpose_w else 1]
        # Varying over the mesh axes that ct does, or the transpose would be a sum over them.
        like = jnp.zeros((ct.shape[0], columns), self.options.dtype)
        like, ct = vary_alike(like, ct)
        (rows,) = jax.linear_transpose(lambda rows: self._multiply(rows, w), like)(ct)
        return rows

    def weight_cotangent(self, w, rows, ct):
        run = _fused(w).product
        return fused.weight_cotangent(run, rows, w, self.metadata, self.product, ct)

    def bias_cotangent(self, bias, ct):
        if bias is None:
            return None
        return fused.bias_cotangent(bias, self.metadata, self.product, ct)

    def _multiply(self, rows, w):
        return _fused(w).product(rows, w, self.metadata, self.product)


def _fused(w) -> fused.Fused:
    return quantized_product.FUSED if isinstance(w, Quantized) else fused.MM
