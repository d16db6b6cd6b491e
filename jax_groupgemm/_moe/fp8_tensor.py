"""``FP8Tensor``: the layer with one scale for each tensor, as ``fp8.py`` has that of blocks.

Its kernels, ``FP8TensorKernels``, find a scale in one pass and cast in another; with delayed
scaling the first pass ends at once. Tokens are cast before they are copied to their rows, as bytes,
and before weight gradients transpose them by list. The activation and its backward pass are made in
both passes, which read h and d and store no array of them. An activation times its rows' weights,
which weight gradients contract, has the delayed scale of the activation.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from .._core import segments
from .._fp8 import activation_cast, grouped_mm, tensors
from .._fp8.grouped_linear import TensorProducts
from .._fp8.grouped_wgrad import grouped_wgrad
from .._fp8.grouped_wgrad import takes as takes_wgrad
from .._fp8.recipe import accumulates
from .._fp8.state import FP8State
from .._quantized import trilinear
from .._quantized.array import Quantized
from .fp8 import FP8, OP, CodesOfKernels, dispatched_codes, seed_of_key
from .products import Linear
from .routing import Routing, tokens_of_rows


@dataclasses.dataclass(frozen=True)
class FP8Tensor(FP8):
    """The backward pass in terms of products that have derivatives, where no kernels run all."""

    def on(self, platform, x, weights, routing) -> tuple | None:
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
        states = States(*(of.state for of in weights))  # each step has both
        return kernels, weights.map(lambda of: dataclasses.replace(of, state=states))

    def _takes(self, platform: str, w: Quantized, rows: int) -> bool:
        """Whether kernels multiply rows by w, gradients by the same codes, and both by each
        other."""
        format, how = self.recipe.gradient_format, accumulates(self.recipe)
        elements = ("e4m3", format) if self.transpose_w else (format, "e4m3")
        of = platform, w, rows, self.dtype
        return (
            grouped_mm.takes_matrices(*of, "e4m3", how[0], transposed=False)
            and grouped_mm.takes_matrices(*of, format, how[1], transposed=True)
            and takes_wgrad(*of, elements, how[2])
        )

    @property
    def _products(self) -> TensorProducts:
        return TensorProducts(self.recipe, columns=not self.transpose_w)

    def rows_cotangent(self, dh, up, routing, key):
        products, sizes, codes = self._products, routing.group_sizes, None
        if up.state is not None and self.recipe.dgrad == "fp8":
            codes, *_ = products.both(dh, sizes, (key, key), up.state)
        w, is_gradient = self._across(up.w), (True, False)
        return trilinear.rows_cotangent(dh, w, up.codes, sizes, key, products, is_gradient, codes)

    def weight_cotangent(self, linear, tokens, rows, routing, key, *, first):
        if linear.state is None or self.recipe.wgrad != "fp8":
            return super().weight_cotangent(linear, tokens, rows, routing, key, first=first)
        products, sizes = self._products, routing.group_sizes
        dy, x = (rows, tokens) if first else (tokens, rows)
        _, x, _ = trilinear.packed(x, sizes, linear.state, products)
        _, codes, _ = products.both(dy, sizes, (key, key), linear.state)
        w, is_gradient = self._across(linear.w), (True, False)
        return self._across(
            trilinear.weight_cotangent(dy, x, w, sizes, key, products, is_gradient, codes)
        )

    def seen_forward(self, rows, a, weights, routing):
        return self._seen(rows, a, weights, routing)

    def seen_backward(self, ct, dh, weights, routing):
        return self._seen(dh, ct, weights, routing)

    def _seen(self, of_up, of_down, weights, routing: Routing):
        if weights.up.state is None:
            return None
        return tuple(tensors.seen(of, routing.group_sizes) for of in (of_up, of_down))

    def state_cotangents(self, forward, backward):
        if forward is None:
            return None, None
        (x, a), (dh, ct) = forward, backward
        return FP8State(x, dh), FP8State(a, ct)


class States(NamedTuple):
    """Those of up and of down, in place of either's; twice None without delayed scaling."""

    up: FP8State | None
    down: FP8State | None

    def ages(self, linear: str, operand: str):
        state = getattr(self, linear)
        return None if state is None else getattr(state, operand)


class Codes(NamedTuple):
    """Codes in place of the activation, and of dh, in passes of kernels: by rows, and dh's along
    rows, too; and what states see of both products' operands, or of dh and ct."""

    by_rows: Quantized
    along_rows: Quantized | None
    seen: tuple[Any, Any]


class Contracted(NamedTuple):
    """What down's weight gradients contract: the activation, along rows, and the cotangents of
    tokens."""

    activation: Quantized
    ct: Quantized


@dataclasses.dataclass(frozen=True)
class FP8TensorKernels(CodesOfKernels, FP8Tensor):
    def up(self, x, up, routing, key, keeps):
        history = self.recipe.history
        codes, of_x = tensors.measured(x, ages=up.state.ages("up", "x"), history=history)
        h = self._result(dispatched_codes(codes, routing), up, routing)
        a, of_a = activation_cast.quantized_activation(
            h, routing.group_sizes, self.activation, ages=up.state.ages("down", "x"),
            history=history,
        )  # fmt: skip
        return Codes(a, None, (of_x, of_a)), h

    def down(self, a, down, routing, key):
        return self._result(a.by_rows, down, routing)

    def _result(self, codes: Quantized, linear: Linear, routing: Routing):
        metadata, how = segments.sizes(routing.group_sizes), accumulates(self.recipe)[0]
        assert linear.codes is not None
        return grouped_mm.of_rows(
            OP, codes, linear.codes, metadata, self.dtype, accumulate=how, clears_rest=False
        )

    def down_backward(self, ct, h, down, row_weight, routing, key, up_keys):
        element, states = self.recipe.gradient_format, down.state
        same = {"element": element, "history": self.recipe.history}
        ages = states.ages("down", "dy")
        codes, of_ct = tensors.measured(ct, seed=seed_of_key(key), ages=ages, **same)
        d = self._gradient(dispatched_codes(codes, routing), down, routing)
        by_rows, along_rows, a, sums, of_dh = activation_cast.quantized_backward(
            h, d, row_weight, routing.group_sizes, self.activation, seed=seed_of_key(up_keys[0]),
            ages=(states.ages("up", "dy"), states.ages("down", "x")), **same,
        )  # fmt: skip
        return Codes(by_rows, along_rows, (of_dh, of_ct)), Contracted(a, codes), sums

    def weight_cotangent(self, linear, tokens, rows, routing, key, *, first):
        if first:
            # The forward pass made them, too: in one program XLA makes them once.
            ages, history = linear.state.ages("up", "x"), self.recipe.history
            codes, _ = tensors.measured(tokens, ages=ages, history=history)
        else:
            rows, codes = rows
        of_tokens = tensors.listed_lines(codes, tokens_of_rows(routing), routing.group_sizes)
        dy, x = (rows.along_rows, of_tokens) if first else (of_tokens, rows)
        pair = (x, dy) if self.transpose_w else (dy, x)
        how = accumulates(self.recipe)[2]
        return grouped_wgrad(*pair, routing.group_sizes, dtype=linear.w.dtype, accumulate=how)

    def rows_cotangent(self, dh, up, routing, key):
        return self._gradient(dh.by_rows, up, routing)

    def _gradient(self, dy, linear: Linear, routing: Routing):
        metadata, how = segments.sizes(routing.group_sizes), accumulates(self.recipe)[1]
        assert linear.codes is not None
        return grouped_mm.of_gradient(
            OP, dy, linear.codes, metadata, self.dtype, accumulate=how, clears_rest=False
        )

    def seen_forward(self, rows, a, weights, routing):
        return None if weights.up.state.up is None else a.seen

    def seen_backward(self, ct, dh, weights, routing):
        return None if weights.up.state.up is None else dh.seen
