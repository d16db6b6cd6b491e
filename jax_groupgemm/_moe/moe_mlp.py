"""``moe_mlp``: a mixture of experts, whose experts are two products with an activation between."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from .._core import check, dtypes
from .._core.operations import operation_of_its_own_gradient
from .._core.types import Activation, Integers
from .._grouped.activations import ACTIVATIONS, GATED_ACTIVATIONS, activate
from .._grouped.grouped_mm import grouped_mm
from .._nvfp4.grouped_linear import NVFP4Recipe, nvfp4_grouped_linear
from .._quantized.array import Quantized
from .._quantized.grouped_qmm import grouped_qmm
from .permute import combined, dispatch
from .routing import route


@operation_of_its_own_gradient
def moe_mlp(
    x: ArrayLike,
    up: ArrayLike | Quantized,
    down: ArrayLike | Quantized,
    expert_index: Integers,
    expert_weight: ArrayLike,
    *,
    activation: Activation = "swiglu",
    up_bias: ArrayLike | None = None,
    down_bias: ArrayLike | None = None,
    transpose_w: bool | None = None,
    expert_offset: ArrayLike | None = None,
    max_rows: int | None = None,
    recipe: NVFP4Recipe | None = None,
    key: jax.Array | None = None,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """``y[t] = sum_j weight[t, j] * (act(x[t] @ up[e] + up_bias[e]) @ down[e] + down_bias[e])``,
    where ``e = expert_index[t, j]``; **pairs of token and expert are grouped** by expert.

    A pair whose index is not one of the experts' does not exist: it adds nothing, has no gradient
    and reads nothing. So padding tokens, dropped tokens and a variable number of experts for each
    token need no other argument. No token is dropped, and nothing is padded.

    ``h = x @ up + up_bias`` and the activation, which is made of the rounded h, have the operands'
    dtype. Sums are float32; those over j are in the order of j and are rounded once.

    Args:
      x: ``(..., D)``, a token each.
      up: ``(E, D, 2F)`` for a gated activation, gate and up as the halves of the last axis, or
        ``(E, D, F)``; with ``transpose_w=True`` the last two axes are exchanged. An array, or a
        :class:`Quantized` of any format.
      down: ``(E, F, D)``, likewise.
      expert_index: integers ``(..., k)``.
      expert_weight: ``(..., k)``, floats of any dtype; the result's does not depend on it.
      activation: as in :func:`grouped_mm`.
      up_bias: ``(E, 2F)``, or ``(E, F)``.
      down_bias: ``(E, D)``.
      transpose_w: None stands for False where up is an array, and True where it is quantized.
      expert_offset: integer of shape ``()`` or ``(1,)``, may be traced. ``up`` and ``down`` then
        hold experts ``[expert_offset, expert_offset + E)`` of a longer list.
      max_rows: rows to make room for, where fewer pairs than ``T * k`` are here. If there are more
        pairs than that, the whole result is NaN, and ``route(...).overflow`` says how many.
      recipe: products in NVFP4, forward and backward, as :func:`nvfp4_grouped_linear` has it.
      key: for the stochastic rounding of a recipe.
      precision: as in :func:`grouped_mm`.
      preferred_element_type: dtype of the result; by default the promoted dtype of x and up.
      implementation: of the products, as in :func:`grouped_mm`; "composed" is None here.

    Returns:
      ``(..., D)``.

    Raises:
      ValueError: shapes do not fit, or a name is unknown, or ``implementation`` cannot run.
      TypeError: ``expert_index`` are not integers, or dtypes cannot be multiplied.

    Differentiable to any order in every floating operand, ``expert_weight`` included; with a recipe
    once, in reverse mode. No derivative scatters rows.
    """
    op = "moe_mlp"
    layer = _Layer.checked(op, x, up, down, activation, up_bias, down_bias, transpose_w, recipe)
    index = check.integers(op, "expert_index", expert_index)
    weight = check.array(op, "expert_weight", expert_weight)
    x = check.array(op, "x", x)
    lead = x.shape[:-1]
    if index.ndim != x.ndim or index.shape[:-1] != lead:
        letters = "..., k"
        raise ValueError(
            f"jgg.{op}: expert_index has shape {index.shape}, expected ({letters}) = "
            f"{(*lead, 'k')} because x is {x.shape}"
        )
    why = f"because expert_index is {index.shape}"
    check.shape(op, "expert_weight", weight, index.shape, "..., k", why)
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise TypeError(f"jgg.{op}: expert_weight must hold floats, got {weight.dtype.name}")
    if implementation == "composed":
        implementation = None
    check.implementation(op, implementation)
    tokens, k = math.prod(lead), index.shape[-1]
    routing = route(
        index.reshape(tokens, k), layer.experts, expert_offset=expert_offset, max_rows=max_rows
    )
    rows = dispatch(x.reshape(tokens, x.shape[-1]), routing)
    y = layer(rows, routing.group_sizes, key, precision, implementation)
    dtype = jnp.dtype(y.dtype if preferred_element_type is None else preferred_element_type)
    out = combined(y, routing, weight.reshape(tokens, k), dtype)
    if max_rows is not None:
        # A product and not a selection, so that the gradients are NaN too.
        out = out * jnp.where(routing.overflow > 0, jnp.nan, 1.0).astype(dtype)
    return out.reshape(*lead, out.shape[-1])


def _rounded(h, activation: str) -> jax.Array:
    """The activation of a rounded ``h``, made in float32 and rounded once."""
    return activate(h.astype(dtypes.accumulator_dtype(h.dtype)), activation).astype(h.dtype)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The experts: what multiplies sorted rows."""

    experts: int
    up: Any
    down: Any
    up_bias: Any
    down_bias: Any
    activation: str
    dtype: Any
    transpose_w: bool
    recipe: NVFP4Recipe | None

    @classmethod
    def checked(cls, op, x, up, down, activation, up_bias, down_bias, transpose_w, recipe):
        x = check.array(op, "x", x)
        if x.ndim < 1:
            raise ValueError(f"jgg.{op}: x has shape {x.shape}, expected (..., D)")
        quantized = isinstance(up, Quantized)
        if quantized != isinstance(down, Quantized):
            raise TypeError(f"jgg.{op}: up and down must both be a jgg.Quantized, or neither")
        transpose_w = quantized if transpose_w is None else transpose_w
        if not quantized:
            up, down = check.array(op, "up", up), check.array(op, "down", down)
        if recipe is not None and quantized:
            raise ValueError(f"jgg.{op}: recipe quantizes weights that are arrays")
        if activation not in (*ACTIVATIONS, *GATED_ACTIVATIONS):
            known = ", ".join(map(repr, [*ACTIVATIONS, *GATED_ACTIVATIONS]))
            raise ValueError(f"jgg.{op}: activation={activation!r} is not one of {known}")
        parts = 2 if activation in GATED_ACTIVATIONS else 1
        d = x.shape[-1]
        names = {False: ("E, D, 2F", "E, F, D"), True: ("E, 2F, D", "E, D, F")}[transpose_w]
        remedy = f"Pass transpose_w={not transpose_w} if they are stored the other way."
        axis_d, axis_f = (2, 1) if transpose_w else (1, 2)
        expected: list[int | None] = [None, None, None]
        expected[axis_d] = d
        why = f"because x is {x.shape}. {remedy}"
        check.shape(
            op, "up", up, expected, names[0] if parts == 2 else names[0].replace("2", ""), why
        )
        f, rest = divmod(up.shape[axis_f], parts)
        if rest:
            raise ValueError(
                f"jgg.{op}: up has shape {up.shape}, but activation={activation!r} takes gate and "
                "up as two halves"
            )
        shape = (up.shape[0], d, f) if transpose_w else (up.shape[0], f, d)
        check.shape(op, "down", down, shape, names[1], f"because up is {up.shape}. {remedy}")
        up_bias = _bias(op, "up_bias", up_bias, up, f * parts)
        down_bias = _bias(op, "down_bias", down_bias, up, d)
        dtype = x.dtype if isinstance(up, Quantized) else dtypes.promoted(x.dtype, up.dtype)
        return cls(
            up.shape[0], up, down, up_bias, down_bias, activation, jnp.dtype(dtype), transpose_w,
            recipe,
        )  # fmt: skip

    def __call__(self, rows, sizes, key, precision, implementation):
        run = functools.partial(self._product, sizes, precision, implementation)
        keys = (None, None) if key is None else jax.random.split(key)
        h = run(rows.astype(self.dtype), self.up, self.up_bias, keys[0])
        return run(_rounded(h, self.activation), self.down, self.down_bias, keys[1])

    def _product(self, sizes, precision, implementation, rows, w, bias, key):
        same: dict[str, Any] = {"bias": bias, "preferred_element_type": self.dtype}
        if self.recipe is not None:
            w = w if self.transpose_w else w.swapaxes(1, 2)
            return nvfp4_grouped_linear(
                rows, w.astype(self.dtype), sizes, bias=bias, key=key, recipe=self.recipe
            )
        product: Callable = grouped_qmm if isinstance(w, Quantized) else grouped_mm
        if product is grouped_mm:
            same["precision"] = precision
        return product(
            rows, w, sizes, transpose_w=self.transpose_w, implementation=implementation, **same
        )


def _bias(op: str, name: str, bias, up, n: int):
    if bias is None:
        return None
    bias = check.array(op, name, bias)
    check.shape(op, name, bias, (up.shape[0], n), "E, N", f"because up is {up.shape}")
    return bias
