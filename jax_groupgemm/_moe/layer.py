"""``Layer``: what is static of ``moe_mlp``, checked against weights, and its choice of products."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .._core import check, dtypes
from .._fp8.grouped_linear import state_of_recipe
from .._fp8.grouped_mm import along_last
from .._fp8.recipe import FP8Recipe, by_tensor
from .._fp8.state import FP8State
from .._grouped.activations import check_name, is_gated
from .._nvfp4.grouped_linear import NVFP4Recipe
from .._quantized import array
from .._quantized import product as quantized_product
from .._quantized.array import Quantized
from .._quantized.format import FLOATS
from .dense import Dense, QuantizedWeights
from .fp8 import FP8, FP8Operations
from .fp8_tensor import FP8Tensor
from .operations import NVFP4, Composition
from .products import Linear, Products, Weights


@dataclasses.dataclass(frozen=True)
class Layer:
    """The layer without its operands.

    Attributes:
      dtype: of rows that are multiplied, and of h.
      composed: whether it is made of other public operations, with their own backward passes.
      activation, transpose_w, recipe, precision, implementation: as arguments of ``moe_mlp``.
    """

    activation: str
    dtype: Any
    transpose_w: bool
    recipe: NVFP4Recipe | FP8Recipe | None
    composed: bool = False
    precision: Any = None
    implementation: str | None = None

    @property
    def gated(self) -> bool:
        return is_gated(self.activation)

    @property
    def rounds_at_random(self) -> bool:
        """Whether a key is of use."""
        return self.recipe is not None and self.recipe.stochastic_rounding

    def weights(self, operands: dict[str, Any]) -> Weights:
        """Those of one device, with gate and up in one axis."""
        up, up_bias = operands["up"], operands["up_bias"]
        if not isinstance(up, Quantized) and up.ndim == 4:
            e, a, b, c = up.shape
            up = up.reshape((e, a * b, c) if self.transpose_w else (e, a, b * c))
        if up_bias is not None:
            up_bias = up_bias.reshape(up_bias.shape[0], math.prod(up_bias.shape[1:]))
        return Weights(
            Linear(up, up_bias, operands["up_codes"], operands["up_state"]),
            Linear(*(operands[f"down{of}"] for of in ("", "_bias", "_codes", "_state"))),
        )

    def products(self, weights: Weights, sum_dtype, out_dtype) -> Products:
        """Those that the layer is made of. A dtype that no kernel knows is left to operations."""
        results = jnp.dtype(sum_dtype), jnp.dtype(out_dtype)
        same = self.activation, self.dtype, *results, self.transpose_w
        if isinstance(self.recipe, FP8Recipe):
            biased = any(of.bias is not None for of in weights)
            of_kernels = FP8Tensor if by_tensor(self.recipe) else FP8
            kind = FP8Operations if self.composed or biased else of_kernels
            return kind(*same, self.recipe)
        if self.recipe is not None:
            return NVFP4(*same, self.recipe)
        quantized = isinstance(weights[0].w, Quantized)
        dtypes_ = {self.dtype.name, *(() if quantized else (of.w.dtype.name for of in weights))}
        kind = QuantizedWeights if quantized else Dense
        if self.composed or not dtypes_ <= {"float64", "float32", "bfloat16", "float16"}:
            kind = Composition
        return kind(*same, self.precision, self.implementation)


def checked(op: str, x, up, down, activation, up_bias, down_bias, transpose_w, recipe,
            codes, state) -> tuple[Layer, dict[str, Any]]:  # fmt: skip
    """The layer, and the operands that these are."""
    x = check.array(op, "x", x)
    if x.ndim < 1:
        raise ValueError(f"jgg.{op}: x has shape {x.shape}, expected (..., D)")
    quantized = isinstance(up, Quantized)
    if quantized != isinstance(down, Quantized):
        raise TypeError(f"jgg.{op}: up and down must both be a jgg.Quantized, or neither")
    transpose_w = quantized if transpose_w is None else transpose_w
    check.flag(op, "transpose_w", transpose_w)
    of = array.checked if quantized else check.array
    up, down = of(op, "up", up), of(op, "down", down)
    if not isinstance(recipe, NVFP4Recipe | FP8Recipe | None):
        what, known = type(recipe).__name__, "a jgg.NVFP4Recipe, a jgg.FP8Recipe or None"
        raise TypeError(f"jgg.{op}: recipe must be {known}, got {what}")
    if recipe is not None and quantized:
        raise ValueError(f"jgg.{op}: recipe quantizes weights that are arrays")
    check_name(op, activation)
    parts = 2 if is_gated(activation) else 1
    d = x.shape[-1]
    names = {False: ("E, D, 2F", "E, F, D"), True: ("E, 2F, D", "E, D, F")}[transpose_w]
    remedy = f"Pass transpose_w={not transpose_w} if they are stored the other way."
    axis_d, axis_f = (2, 1) if transpose_w else (1, 2)
    expected: list[int | None] = [None, None, None]
    expected[axis_d] = d
    why = f"because x is {x.shape}. {remedy}"
    flat = _with_flat_columns(op, "up", up, axis_f) if parts == 2 else up
    check.shape(
        op, "up", flat, expected, names[0] if parts == 2 else names[0].replace("2", ""), why
    )
    f, rest = divmod(flat.shape[axis_f], parts)
    if rest:
        raise ValueError(
            f"jgg.{op}: up has shape {up.shape}, but activation={activation!r} takes gate and "
            "up as two halves"
        )
    shape = (up.shape[0], d, f) if transpose_w else (up.shape[0], f, d)
    check.shape(op, "down", down, shape, names[1], f"because up is {up.shape}. {remedy}")
    if quantized:
        for name, w, k in (("up", up, d), ("down", down, f)):
            rows = jax.ShapeDtypeStruct((1, k), x.dtype)
            quantized_product.fitting(op, name, rows, w, transpose_w, None, rank=3)
    up_bias = _bias(op, "up_bias", up_bias, up, f * parts, parts == 2)
    down_bias = _bias(op, "down_bias", down_bias, up, d)
    dtype = _dtype(op, x, up, down, recipe)
    for name, bias in (("up_bias", up_bias), ("down_bias", down_bias)):
        if bias is not None:
            check.holds(op, name, bias, dtype)
            if recipe is not None:
                check.dtype(op, name, bias.dtype, FLOATS, " where there is a recipe")
    up_codes, down_codes = _codes(
        op, codes, recipe, (up.shape[0], f * parts, d), (up.shape[0], d, f)
    )
    up_state, down_state = _states(op, state, recipe)
    operands = {
        "x": x, "up": up, "down": down, "up_bias": up_bias, "down_bias": down_bias,
        "up_codes": up_codes, "down_codes": down_codes, "up_state": up_state,
        "down_state": down_state,
    }  # fmt: skip
    return Layer(activation, jnp.dtype(dtype), transpose_w, recipe), operands


def _dtype(op: str, x, up, down, recipe):
    """The operands' common dtype: of rows that are multiplied, and of h."""
    if isinstance(up, Quantized):
        return x.dtype
    for name, value in (("x", x), ("up", up), ("down", down)):
        check.numeric(op, name, value)
    try:
        dtype, _ = dtypes.promoted(x.dtype, up.dtype), dtypes.promoted(x.dtype, down.dtype)
    except ValueError as error:
        what = f"x of dtype {x.dtype.name}, up of {up.dtype.name} and down of {down.dtype.name}"
        raise TypeError(f"jgg.{op}: {what} have no common dtype. Convert them") from error
    dtype = dtypes.default_result(dtype)
    floating = jnp.issubdtype(dtype, jnp.floating)
    allowed = ("bfloat16", "float32") if recipe is not None else (dtype.name,) if floating else ()
    if dtype.name not in allowed:
        want = "bfloat16 or float32 where there is a recipe" if recipe is not None else "floats"
        raise TypeError(
            f"jgg.{op}: x and up must be {want}, got {x.dtype.name} and {up.dtype.name}"
        )
    check.holds(op, "down", down, dtype)
    return dtype


def _codes(op: str, codes, recipe, *shapes) -> tuple[Quantized | None, Quantized | None]:
    if codes is None:
        return None, None
    if not isinstance(recipe, FP8Recipe):
        raise ValueError(f"jgg.{op}: quantized are FP8 codes of up and down, for a jgg.FP8Recipe")
    if not isinstance(codes, tuple | list) or len(codes) != 2:
        raise TypeError(f"jgg.{op}: quantized must be two jgg.Quantized, of up and down")
    checked = []
    for name, q, shape in zip(("up", "down"), codes, shapes, strict=True):
        q = along_last(op, f"quantized {name}", q, "E, N, K")
        if tuple(q.shape) != shape:
            raise ValueError(
                f"jgg.{op}: quantized {name} has shape {q.shape}, expected {shape}: what products "
                "sum over comes last"
            )
        checked.append(q)
    return tuple(checked)


def _states(op: str, state, recipe) -> tuple[FP8State | None, FP8State | None]:
    if not isinstance(recipe, FP8Recipe):
        if state is None:
            return None, None
        raise ValueError(f"jgg.{op}: state is of a jgg.FP8Recipe(scaling='delayed')")
    if state is not None and (not isinstance(state, tuple | list) or len(state) != 2):
        raise TypeError(f"jgg.{op}: state must be two jgg.FP8State, of up and down")
    up, down = (None, None) if state is None else state
    of_recipe = lambda name, of: state_of_recipe(
        op, name, recipe, of, "a pair of jgg.FP8State.new()"
    )
    return of_recipe("state of up", up), of_recipe("state of down", down)


def _bias(op: str, name: str, bias, up, n: int, gated: bool = False):
    if bias is None:
        return None
    bias = check.array(op, name, bias)
    flat = _with_flat_columns(op, name, bias, 1) if gated and bias.ndim == 3 else bias
    check.shape(op, name, flat, (up.shape[0], n), "E, N", f"because up is {up.shape}")
    return bias


def _with_flat_columns(op: str, name: str, a, axis: int):
    """The type of ``a`` with gate and up in one axis, where it has two for them."""
    if isinstance(a, Quantized) or a.ndim != (4 if name == "up" else 3):
        return a
    if a.shape[axis] != 2:
        raise ValueError(f"jgg.{op}: {name} has shape {a.shape}, expected 2 in axis {axis}")
    shape = (*a.shape[:axis], 2 * a.shape[axis + 1], *a.shape[axis + 2 :])
    return jax.ShapeDtypeStruct(shape, a.dtype)
