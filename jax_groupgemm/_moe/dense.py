"""``Dense``: products of arrays, of which tokens come by list where that is chosen. Elsewhere, and
where rows are few, the rows are copied first. ``QuantizedWeights``: of copied rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._core import costs, dtypes, segments
from .._core.composed import Composed
from .._core.primitive import vary_alike
from .._core.products import Wgrad
from .._grouped import call, fused
from .._grouped.activation_backward import scaled_activation_backward
from .._grouped.call import Epilogue
from .._kernels import choose
from .._quantized import product as quantized_product
from . import few_tokens, some_tokens
from .permute import dispatched
from .products import ProductsWithBackward
from .routing import Routing, tokens_of_rows


@dataclasses.dataclass(frozen=True)
class Dense(ProductsWithBackward):
    """Products of arrays."""

    precision: Any = None
    implementation: str | None = None

    makes_rows_again = True
    fused: ClassVar[fused.Fused] = fused.MM
    takes_lists = True

    def rows(self, x, routing):
        return x.astype(self.dtype)

    def up(self, x, up, routing, key, keeps):
        a, *h = _UP(x, up.w, up.bias, routing, products=self, keeps=keeps)
        return a, h[0] if keeps else None

    def down(self, a, down, routing, key):
        return self.multiplied(a, down.w, routing, Epilogue(down.bias))

    def down_backward(self, ct, h, down, row_weight, routing, key, up_keys):
        scale = row_weight.astype(dtypes.accumulator_dtype(h.dtype))
        return _DOWN(ct, h, down.w, scale, routing, products=self)

    def weight_cotangent(self, linear, tokens, rows, routing, key, *, first):
        return _WEIGHT(linear.w, tokens, rows, routing, products=self, first=first)

    def rows_cotangent(self, dh, up, routing, key):
        return self.transposed(dh, up.w, routing)

    def in_one_call(self, platform, x, weights, pairs, weight):
        operands = platform, x, weights, pairs, weight, self
        out = few_tokens.dense_experts(*operands)
        return some_tokens.dense_experts(*operands) if out is None else out

    # Of sorted rows.

    def mm(self, rows):
        how = {"precision": self.precision, "implementation": self.implementation}
        return super().mm(rows).replace(**how)

    def activates(self, bias) -> Epilogue:
        return Epilogue(bias, self.activation, rounds=True)

    def multiplied(self, rows, w, routing: Routing, epilogue: Epilogue):
        metadata = segments.sizes(routing.group_sizes)
        whole = isinstance(w, jax.Array) or quantized_product.fusible(w)
        return self.fused(rows, w, metadata, self.mm(rows), epilogue, fused=whole)

    def transposed(self, ct, w, routing: Routing):
        """The cotangent of the rows that w multiplies; ``ct`` is that of the product."""
        metadata, product = segments.sizes(routing.group_sizes), self.mm(ct)
        # Varying over the mesh axes that ct does, or the transpose would be a sum over them.
        like = jnp.zeros((ct.shape[0], product.sizes(w)[1]), self.dtype)
        like, ct = vary_alike(like, ct)
        run = lambda rows: self.fused.product(rows, w, metadata, product)
        (rows,) = jax.linear_transpose(run, like)(ct)
        return rows

    # Tokens by list.

    def by_list(self, platform: str, x, w, routing: Routing, *, back: bool = False,
                epilogue: Epilogue = call.NO_EPILOGUE, **facts):  # fmt: skip
        """The kernel that multiplies the tokens' rows, or with ``back`` rows of their cotangents,
        and its product; None where rows are copied first. ``facts`` replace the problem's."""
        product = self.mm(routing.order)
        if back:
            product = product.replace(transpose_w=not self.transpose_w)
        metadata = segments.sizes(routing.group_sizes)
        problem = call.mm_problem(
            platform, x, w, metadata, product, epilogue, lists=True, x_list_alone=True
        )
        return choose.by_list(dataclasses.replace(problem, **facts)), metadata, product

    def up_by_list(self, platform, x, w, bias, routing, *, keeps: bool):
        # XLA has the epilogue of a kernel of CPUs.
        epilogue = call.NO_EPILOGUE if platform == "cpu" else self.activates(bias)
        plan, metadata, product = self.by_list(platform, x, w, routing, epilogue=epilogue)
        if plan is None:
            return None
        run = functools.partial(call.mm, plan, x, w, metadata, x_rows=tokens_of_rows(routing))
        if platform == "cpu":
            return self.fused.activated(run, metadata, self.activates(bias), product)[: 1 + keeps]
        return run(product, epilogue, preactivation=keeps)

    def rows_cotangent_by_list(self, platform, ct, w, routing):
        plan, metadata, product = self.by_list(platform, ct, w, routing, back=True)
        if plan is None:
            return None
        return call.mm(plan, ct, w, metadata, product, x_rows=tokens_of_rows(routing))

    def down_backward_by_list(self, platform, ct, h, w, scale, routing):
        """Custom call ``jgg_moe_down_backward``: ct, w, sizes, tokens of rows, h, scale -> the
        activation, the cotangent of h, and sums of 16 columns each."""
        plan, metadata, product = self.by_list(
            platform, ct, w, routing, back=True, op="down_backward", activation=self.activation
        )
        if plan is None:
            return None
        rows, columns = h.shape[0], h.shape[1] // 2
        flags = {
            "metadata": call.metadata_flags(metadata), "mm": call.mm_flags(metadata, product),
        }  # fmt: skip
        like = lambda *shape: jax.ShapeDtypeStruct(shape, h.dtype)
        sums = jax.ShapeDtypeStruct((-(-columns // 16), rows), jnp.float32)
        run = jax.ffi.ffi_call(
            plan.target, [like(rows, columns), like(rows, 2 * columns), sums],
            input_output_aliases={4: 1},  # dh takes the place of h, tile by tile
        )  # fmt: skip
        (sizes,) = metadata.narrow(rows, w.shape[0])
        more = tokens_of_rows(routing), h, scale
        a, dh, sums = run(ct, w, sizes, *more, **call.attributes(flags))
        return dh, a, sums.sum(0)

    def weight_cotangent_by_list(self, platform, w, tokens, rows, routing, *, first: bool):
        x_list = first != self.transpose_w
        pair = (tokens, rows) if x_list else (rows, tokens)
        metadata = segments.sizes(routing.group_sizes)
        product = Wgrad(
            groups=w.shape[0], out_dtype=w.dtype, precision=self.precision,
            implementation=self.implementation,
        )  # fmt: skip
        plan = choose.by_list(
            call.wgrad_problem(platform, *pair, metadata, product, x_list=x_list, y_list=not x_list)
        )
        if plan is None:
            return None
        name = "x_rows" if x_list else "y_rows"
        return call.wgrad(plan, *pair, metadata, product, **{name: tokens_of_rows(routing)})


@dataclasses.dataclass(frozen=True)
class QuantizedWeights(Dense):
    """Products with quantized weights, of copied rows."""

    fused: ClassVar[fused.Fused] = quantized_product.FUSED
    takes_lists = False

    def prepared(self, weights):
        return weights.map(lambda of: dataclasses.replace(of, w=self._checked(of.w)))

    def _checked(self, w):
        rows = jax.ShapeDtypeStruct((1, w.shape[2 if self.transpose_w else 1]), self.dtype)
        return quantized_product.checked(
            "moe_mlp", rows, w, self.transpose_w, self.dtype, rank=3
        )[0]  # fmt: skip

    def in_one_call(self, platform, x, weights, pairs, weight):
        operands = platform, x, weights, pairs, weight, self
        out = few_tokens.experts(*operands)
        return some_tokens.experts(*operands) if out is None else out


# ---- the steps, of copies of the rows or by list -----------------------------------------------


def _copied(x, routing: Routing):
    return dispatched(x, routing, clears_rest=False)


def _up(x, w, bias, routing, *, products: Dense, keeps: bool):
    rows, epilogue = _copied(x, routing), products.activates(bias)
    if not keeps:
        return (products.multiplied(rows, w, routing, epilogue),)
    metadata = segments.sizes(routing.group_sizes)
    return products.fused.preactivated(rows, w, metadata, epilogue, products.mm(rows))


def _rows_cotangent(ct, w, routing, *, products: Dense):
    return products.transposed(_copied(ct, routing), w, routing)


def _down_backward(ct, h, w, scale, routing, *, products: Dense):
    d = _ROWS(ct, w, routing, products=products)
    live_rows = routing.group_sizes.sum(dtype=jnp.int32)
    return scaled_activation_backward(h, d, scale, products.activation, live_rows)


def _weight_cotangent(w, tokens, rows, routing, *, products: Dense, first: bool):
    of_tokens = _copied(tokens, routing)
    x, ct = (of_tokens, rows) if first else (rows, of_tokens)
    metadata = segments.sizes(routing.group_sizes)
    return fused.weight_cotangent(products.fused.product, x, w, metadata, products.mm(rows), ct)


def _step(name: str, copied: Callable, by_list: str) -> Composed:
    """The step of this name: ``copied(*operands, products, **static)``. The method ``by_list`` is
    the same of tokens by list, or returns None."""

    def run(platform, *operands, products: Dense, **static):
        if not products.takes_lists:
            return None
        return getattr(products, by_list)(platform, *operands, **static)

    return Composed(f"jgg_experts_{name}", copied, run, cost=costs.conversion)


_UP = _step("up", _up, "up_by_list")
_ROWS = _step("rows", _rows_cotangent, "rows_cotangent_by_list")
_DOWN = _step("down", _down_backward, "down_backward_by_list")
_WEIGHT = _step("weight", _weight_cotangent, "weight_cotangent_by_list")
