"""What a precision has to say of a layer: ``Products``, of which the pipeline (``experts.py``) is
made, and ``ProductsWithBackward``, of which its backward pass is made, too."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._core import segments
from .._core.products import Mm
from .._grouped import fused
from .._quantized import trilinear
from .._quantized.array import Quantized
from .routing import Routing


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("w", "bias", "codes", "state"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Linear:
    """The weights of the up product, or of the down product.

    Attributes:
      w: an array or a :class:`Quantized`, (E, N, K) with ``transpose_w``, else (E, K, N).
      bias: (E, N), or None.
      codes: (E, N, K), of w in FP8, or None.
      state: an ``FP8State``, or None.
    """

    w: Any
    bias: Any = None
    codes: Quantized | None = None
    state: Any = None

    def cotangent(self, dw, dbias, dstate) -> Linear:
        """The record of cotangents. Codes are constant."""
        return Linear(dw, dbias, jax.tree.map(lambda _: None, self.codes), dstate)


class Weights(NamedTuple):
    """Those of both products."""

    up: Linear
    down: Linear

    def map(self, f: Callable[..., Linear], *more) -> Weights:
        return Weights(*map(f, self, *more))


#: For the cotangent of rows, and for that of weights; None rounds to nearest.
Keys = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Products(abc.ABC):
    """Both products of a mixture's experts and the activation between them; static, so instances
    are hashable.

    ``rows`` are sorted by expert, and those behind the last expert's may hold anything. What stands
    for tokens is what :meth:`rows` returns. What stands for the activation and for the cotangent of
    h is the implementation's own.

    Attributes:
      activation: between the two products.
      dtype: of the rows that are multiplied, and of both products.
      sum_dtype: of tokens' sums where they are made, and on their way.
      out_dtype: the result's.
      transpose_w: up is (E, 2F, D) and down (E, D, F).
      makes_rows_again: whether the backward pass makes the rows of x again, and sends tokens again.
        Otherwise what arrived is kept.
    """

    activation: str
    dtype: Any
    sum_dtype: Any
    out_dtype: Any
    transpose_w: bool

    makes_rows_again = False

    @property
    def tokens_in_fp8(self) -> bool:
        """Whether tokens travel in FP8."""
        return False

    def prepared(self, weights: Weights) -> Weights:
        """Weights as the products take them."""
        return weights

    @abc.abstractmethod
    def rows(self, x, routing: Routing) -> Any:
        """Tokens, (T, D), as the products take them: themselves, or copies in the order of rows."""

    def forward_keys(self, key) -> Keys:
        """A key for each of the two products."""
        return trilinear.split(key)

    @abc.abstractmethod
    def up(self, x, up: Linear, routing: Routing, key, keeps: bool) -> tuple[Any, Any]:
        """The activation, and h, the preactivation; it may be None unless that is kept."""

    @abc.abstractmethod
    def down(self, a, down: Linear, routing: Routing, key) -> jax.Array: ...

    def seen_forward(self, rows, a, weights: Weights, routing: Routing) -> Any:
        """The states' news of both products' operands; None where there are no states."""
        del rows, a, weights, routing


@dataclasses.dataclass(frozen=True)
class ProductsWithBackward(Products):
    """Products whose layer is one operation. JAX derives the backward pass of others from those of
    their parts.

    Attributes:
      by_pass: whether kernels are chosen for a whole pass, by :meth:`on`, and not for each step.
    """

    by_pass = False

    def on(self, platform: str, x, weights: Weights, routing: Routing) -> tuple | None:
        """The products, and weights, of kernels that a whole pass consists of; or None."""
        del platform, x, weights, routing

    def in_one_call(self, platform: str, x, weights: Weights, pairs, weight) -> jax.Array | None:
        """The result, where one kernel is the whole layer of one device; or None."""
        del platform, x, weights, pairs, weight

    def mm(self, rows) -> Mm:
        """The product that gives these rows, or takes them."""
        return Mm(
            rows=rows.shape[0], out_dtype=self.dtype, transpose_w=self.transpose_w,
            clears_rest=False,
        )  # fmt: skip

    def kept(self, weights: Weights, multiplied: tuple[bool, bool]) -> tuple[Weights, Any]:
        """Weights for the forward pass, and what of them is kept, where the backward pass
        multiplies by up and by down or not."""
        del multiplied
        return weights, None

    def restored(self, weights: Weights, kept) -> Weights:
        """Weights for the backward pass, of what :meth:`kept` kept."""
        del kept
        return weights

    @abc.abstractmethod
    def down_backward(self, ct, h, down: Linear, row_weight, routing: Routing, key,
                      up_keys: Keys) -> tuple[Any, Any, jax.Array]:  # fmt: skip
        """Of the tokens' cotangents, which have no weights yet: the cotangent of h, and the
        activation, both times ``row_weight``; and the cotangent of ``row_weight``."""

    @abc.abstractmethod
    def weight_cotangent(self, linear: Linear, tokens, rows, routing: Routing, key, *,
                         first: bool) -> Any:  # fmt: skip
        """The cotangent of w. If ``first``, w multiplies the tokens' rows and ``rows`` is the
        cotangent of what it gives; otherwise tokens are the cotangents of what it gives."""

    def seen_backward(self, ct, dh, weights: Weights, routing: Routing) -> Any:
        """The states' news of the cotangents of both products; or None."""
        del ct, dh, weights, routing

    def state_cotangents(self, forward, backward) -> tuple[Any, Any]:
        """Those of up's and of down's state, of what both passes have seen."""
        del forward, backward
        return None, None

    def bias_cotangent(self, bias, rows, routing: Routing) -> Any:
        return fused.bias_cotangent(bias, segments.sizes(routing.group_sizes), self.mm(rows), rows)

    @abc.abstractmethod
    def rows_cotangent(self, dh, up: Linear, routing: Routing, key) -> jax.Array:
        """The cotangent of the rows that up multiplies, in the order of rows."""
