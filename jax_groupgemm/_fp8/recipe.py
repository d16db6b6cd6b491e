"""``FP8Recipe``: how the layers of this family quantize."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from .._core import check
from . import blocks

Precision = Literal["fp8", "bfloat16"]
Accumulate = Literal["fast", "exact"]
SCALINGS = ("block", "tensor", "delayed")
ACCUMULATE: tuple[Accumulate, ...] = ("fast", "exact")
BLOCKS = blocks.LINE, blocks.TILE


@dataclasses.dataclass(frozen=True)
class FP8Recipe:
    """How :func:`fp8_grouped_linear` quantizes. Hashable; the defaults are DeepSeek-V3's recipe.

    Hopper's FP8 kernels run with the defaults of both blocks and of ``gradient_format``. Another
    block makes the result and dx an XLA program of float32 values, and ``"e5m2"`` dx and dw. With
    ``scaling="tensor"`` or ``"delayed"`` fast kernels take ``"e5m2"``, too; where no kernel of FP8
    runs, kernels of bfloat16 multiply the same codes.

    Args:
      activation_block: of x and dy along the contracted axis: ``(1, 128)``, or ``(1, n)`` of
        another n.
      weight_block: ``(128, 128)``, or another square, whose codes serve the result and dx alike.
      gradient_format: of dy, ``"e4m3"`` or ``"e5m2"``.
      stochastic_rounding: gradients are rounded at random where there is a key.
      forward, dgrad, wgrad: ``"fp8"``, or ``"bfloat16"`` for a product that is done in x's dtype.
      dispatch: how :func:`moe_mlp` sends tokens to experts on other devices, and back the
        cotangents of their results: ``"bfloat16"``, which stands for their own dtype, or
        ``"fp8"``, a byte for each number and a scale for 128, rounded to nearest. Then x is what
        those stand for.
      scaling: ``"block"``: a scale for each block. ``"tensor"``: x and dy have one scale each, and
        w has one for each group, powers of two that are made of the tensor's largest number, as
        :class:`FP8State` says. ``"delayed"``: x and dy have the scales that the last steps needed,
        which an :class:`FP8State` knows; w has its own.
      accumulate: with ``scaling="tensor"`` or ``"delayed"``, how products are summed, which is that
        of :func:`fp8_grouped_mm`; or three of them, of the result, dx and dw.
      history: with ``scaling="delayed"``, the number of steps whose largest number counts.

    Raises:
      ValueError: an argument is none of those.
      TypeError: a switch is not a bool.

    Examples:
      >>> recipe = jgg.FP8Recipe(scaling="tensor", gradient_format="e5m2")
      >>> x, w, sizes = jnp.ones((5, 128)), jnp.ones((2, 128, 128)), jnp.array([2, 3])
      >>> jgg.fp8_grouped_linear(x, w, sizes, recipe=recipe).shape
      (5, 128)
    """

    activation_block: tuple[int, int] = blocks.LINE
    weight_block: tuple[int, int] = blocks.TILE
    gradient_format: Literal["e4m3", "e5m2"] = "e4m3"
    stochastic_rounding: bool = True
    forward: Precision = "fp8"
    dgrad: Precision = "fp8"
    wgrad: Precision = "fp8"
    dispatch: Precision = "bfloat16"
    scaling: Literal["block", "tensor", "delayed"] = "block"
    history: int = 16
    accumulate: Accumulate | tuple[Accumulate, Accumulate, Accumulate] = ("fast", "exact", "exact")

    def __post_init__(self):
        op = "FP8Recipe"
        for name, needs in (
            ("activation_block", "one row, as (1, 128)"),
            ("weight_block", "a square, as (128, 128)"),
        ):
            block = check.two_sizes(getattr(self, name))
            if block is None or block[0] != (1 if name == "activation_block" else block[1]):
                given = check.describe(getattr(self, name))
                raise ValueError(f"jgg.{op}: {name}={given}, expected {needs}")
            object.__setattr__(self, name, block)
        if not isinstance(self.stochastic_rounding, bool):
            value = self.stochastic_rounding
            raise TypeError(f"jgg.{op}: stochastic_rounding={value!r} is not a bool")
        known = {"gradient_format": tuple(blocks.ELEMENTS), "scaling": SCALINGS} | dict.fromkeys(
            ("forward", "dgrad", "wgrad", "dispatch"), ("fp8", "bfloat16")
        )
        for name, values in known.items():
            if getattr(self, name) not in values:
                said = " or ".join(map(repr, values))
                raise ValueError(f"jgg.{op}: {name}={getattr(self, name)!r}, expected {said}")
        each = accumulates(self)
        if len(each) != 3 or not all(isinstance(a, str) and a in ACCUMULATE for a in each):
            said = " or ".join(map(repr, ACCUMULATE))
            raise ValueError(
                f"jgg.{op}: accumulate={check.describe(self.accumulate)}, expected {said}, or "
                "three of those"
            )
        object.__setattr__(self, "accumulate", each)
        check.count(op, "history", self.history)
        if not self.history:
            raise ValueError(f"jgg.{op}: history=0, expected 1 or more")
        if by_tensor(self) and (self.activation_block, self.weight_block) != BLOCKS:
            raise ValueError(
                f"jgg.{op}: scaling={self.scaling!r} has a scale for each tensor. Leave "
                "activation_block and weight_block out"
            )


def accumulates(recipe: FP8Recipe) -> tuple[Accumulate, ...]:
    """The words of the result, dx and dw."""
    of: Any = recipe.accumulate
    return tuple(of) if isinstance(of, tuple | list) else (of,) * 3


def by_tensor(recipe: FP8Recipe) -> bool:
    """Whether operands have one scale each, and not one for each block."""
    return recipe.scaling != "block"
