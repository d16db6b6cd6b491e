"""``fp8_grouped_linear``: the experts of a mixture, trained in FP8, and its recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from .._core import check, partition, segments
from .._core.operations import operation_of_its_own_gradient
from .._core.types import Integers
from .._grouped.grouped_mm import grouped_mm
from .._quantized import convert as quantized_convert
from .._quantized import padding, trilinear
from .._quantized.array import Quantized
from .._quantized.grouped_qmm import grouped_qmm
from .._quantized.operands import one_owner, seed_of
from .._quantized.trilinear import Products, linear
from . import blocks, convert, tensors
from . import state as states
from .grouped_mm import along_last, fp8_grouped_mm, of_gradient
from .grouped_wgrad import grouped_wgrad
from .quantize import fp8_quantize
from .recipe import Accumulate, FP8Recipe, Precision, accumulates, by_tensor
from .state import FP8State

_DEFAULT = FP8Recipe()


@operation_of_its_own_gradient
def fp8_grouped_linear(
    x: ArrayLike,
    w: ArrayLike | Quantized,
    group_sizes: Integers,
    *,
    bias: ArrayLike | None = None,
    recipe: FP8Recipe = _DEFAULT,
    key: jax.Array | None = None,
    quantized: Quantized | None = None,
    state: FP8State | None = None,
) -> jax.Array:
    """``out[t] = x[t] @ w[group(t)].T + bias[group(t)]``; **T (rows) is grouped**; trains in FP8.

    x and w are quantized here, and so is dy, the cotangent of the result. With ``q`` for
    :func:`fp8_quantize`::

        out = fp8_grouped_mm(q(x), quantize(w, mode="fp8"), group_sizes, bias=bias)
        dx  = the product of q(dy) and the same codes of w, contracted along N
        dw  = fp8_grouped_wgrad(q(x along T), q(dy along T), group_sizes)

    Each has the other two as its derivatives, so gradients of any order are products of these three
    kinds. Between forward and backward the codes of w, which both products share, and those of x
    along T are kept, not x. Rows of no group are exact zeros and get zero gradient, whatever they
    hold.

    Args:
      x: bfloat16 or float32 ``(T, K)``.
      w: bfloat16 or float32 ``(G, N, K)``. Or a :class:`Quantized` in mode ``"fp8"``: then it is
        constant and has no gradient.
      group_sizes: as in :func:`grouped_mm`.
      bias: floating ``(G, N)``, added to the rows of its group.
      recipe: an :class:`FP8Recipe`.
      key: a key of ``jax.random``, for the stochastic rounding of gradients: another one for each
        call and step. Without one they are rounded to nearest.
      quantized: ``jgg.quantize(w, mode="fp8")`` of w, an array, made once per step for several
        calls. Then w has its gradient, and only a product that the recipe does in bfloat16,
        ``forward`` or ``dgrad``, reads w itself. With a scale for each tensor it is
        ``fp8_quantize(w, block=None, scale_format="e8m0")``.
      state: of this layer, with ``FP8Recipe(scaling="delayed")``. Its gradient is what
        :meth:`FP8State.updated` takes.

    Returns:
      ``(T, N)`` in x's dtype.

    Raises:
      ValueError: shapes do not fit, or shardings over an Explicit mesh.
      TypeError: a dtype is none of these, or recipe or key is not one.
      NotImplementedError: dw is differentiated in x, and x was kept in eight bits.

    Gradients have the dtypes of x, w and bias; that of bias is a float32 sum. They are the
    recipe's, not the derivative of rounding. Reverse mode, of any order; but dw cannot be
    differentiated in x where x is kept in eight bits, which is an error and needs a recipe with
    ``wgrad="bfloat16"``. T, K and N may be any numbers. Closed under ``vmap``. The linear layer of
    DeepSeek-V3's training, for groups of any size.

    In a derivative, an array that takes the place of x, w or dy is quantized as that operand is,
    with keys of its own for stochastic rounding. The derivative of dw in dy uses the quantized x.

    Errors relative to the exact products, for normal numbers (Frobenius, measured): 0.036 to 0.037
    for the result, dx and dw. For dx and dw 0.045 with a key, 0.058 with e5m2, and 0.071 to 0.077
    with both.

    Examples:
      >>> x, w, sizes = jnp.ones((5, 128)), jnp.ones((2, 128, 128)), jnp.array([2, 3])
      >>> loss = lambda w: jgg.fp8_grouped_linear(x, w, sizes).sum()
      >>> jax.grad(loss)(w)[:, 0, 0].tolist()
      [2.0, 3.0]
    """
    return grouped_linear(
        x, w, group_sizes, bias=bias, recipe=recipe, key=key, quantized=quantized, state=state
    )


def of_columns(x, w, group_sizes, *, bias, recipe: FP8Recipe, key, quantized=None,
               state=None) -> jax.Array:  # fmt: skip
    """The same of an array w ``(G, K, N)``, of which no transposed copy is made: its codes are
    stored transposed, and its gradient is (G, K, N) as it is made."""
    if quantized is None and not shares_codes(recipe):
        quantized = codes_of(w, recipe, columns=True)
    return grouped_linear(
        x, w.swapaxes(1, 2), group_sizes, bias=bias, recipe=recipe, key=key, quantized=quantized,
        state=state, columns=True,
    )  # fmt: skip


def codes_of(w, recipe: FP8Recipe, *, columns: bool) -> Quantized | None:
    """Those of (G, N, K) that products need, of w; of its transpose with ``columns``."""
    if "fp8" not in (recipe.forward, recipe.dgrad):
        return None
    if by_tensor(recipe):
        q = tensors.quantized(w)
        return convert.exchanged(q) if columns else q
    axis = -2 if columns else -1
    q = convert.quantized("fp8_grouped_linear", w, block=recipe.weight_block, axis=axis)
    return dataclasses.replace(q, axis=-1)


def shares_codes(recipe: FP8Recipe) -> bool:
    """Whether the result and dx are made of the same codes. Where a gradient is taken they are then
    made for both at once, by :func:`codes_of_both`."""
    return recipe.forward == recipe.dgrad == "fp8"


def codes_of_both(w, recipe: FP8Recipe, *, columns: bool) -> tuple[Quantized, Quantized]:
    """Codes as :func:`codes_of` makes them, and their transpose, (G, K, N), as dx contracts it."""
    if by_tensor(recipe):
        one, other = tensors.quantized_both(w)
        return (other, one) if columns else (one, other)
    axis = -2 if columns else -1
    return convert.quantized_both("fp8_grouped_linear", w, block=recipe.weight_block, axis=axis)


def grouped_linear(x, w, group_sizes, *, bias, recipe, key, quantized, state,
                   columns: bool = False):  # fmt: skip
    """:func:`fp8_grouped_linear`. With ``columns`` the gradient of w is made as that of its
    transpose."""
    op = "fp8_grouped_linear"
    x = check.array(op, "x", x)
    check.dtype(op, "x", x.dtype, ("bfloat16", "float32"))
    check.shape(op, "x", x, (None, None), "T, K")
    check.rows(op, "x", x.shape[0])
    array_w: Any = None  # there is none where w is constant
    if isinstance(w, Quantized):
        if quantized is not None:
            raise ValueError(f"jgg.{op}: quantized is of w, an array, and w is a jgg.Quantized")
        quantized = _checked(op, "w", w, x, None)
        shape, of_w = quantized.shape, quantized.weight
    else:
        array_w = check.array(op, "w", w)
        check.dtype(op, "w", array_w.dtype, ("bfloat16", "float32"))
        why = f"because x is {x.shape}"
        check.shape(op, "w", array_w, (None, None, x.shape[1]), "G, N, K", why)
        shape, of_w = array_w.shape, array_w
        if quantized is not None:
            quantized = _checked(op, "quantized", quantized, x, shape)
    group_sizes, bias, key = trilinear.checked(op, shape, group_sizes, bias, recipe, FP8Recipe, key)
    state = state_of_recipe(op, "state", recipe, state, "jgg.FP8State.new()")
    sharded = [("x", x, "TK"), ("w", of_w, "GNK")]
    one_owner(op, sharded if bias is None else [*sharded, ("bias", bias, "GN")])
    if array_w is not None and quantized is None and not shares_codes(recipe):
        quantized = codes_of(array_w, recipe, columns=False)
    if quantized is not None:
        quantized = jax.tree.map(jax.lax.stop_gradient, quantized)
    products = (TensorProducts if by_tensor(recipe) else LinearProducts)(recipe, columns)
    state = states.across_devices(state, (x, array_w, quantized, bias, group_sizes))
    out = linear(x, array_w, quantized, bias, group_sizes, key, products, state)
    # So that policies of jax.checkpoint know it, which see a custom_vjp_call here.
    return checkpoint_name(out, "jgg_fp8_grouped_linear")


def state_of_recipe(op: str, name: str, recipe: FP8Recipe, state, first: str) -> FP8State | None:
    """A state, checked: one with delayed scaling, whose ``first`` one is this, else none."""
    delayed = recipe.scaling == "delayed"
    if delayed and state is None:
        raise ValueError(
            f"jgg.{op}: FP8Recipe(scaling='delayed') needs a state. Begin with {first}"
        )
    if not delayed and state is not None:
        raise ValueError(
            f"jgg.{op}: {name} is of FP8Recipe(scaling='delayed'), and this recipe has "
            f"scaling={recipe.scaling!r}"
        )
    return states.checked(op, name, state) if delayed else None


def _checked(op: str, name: str, q: Quantized, x, shape) -> Quantized:
    """``q`` in layout "linear", as gradients read it, checked."""
    q = along_last(op, name, q, "G, N, K")
    expected = (*q.shape[:-1], x.shape[1]) if shape is None else tuple(shape)
    if q.shape != expected:
        why = f"because x is {x.shape}" if shape is None else "as w"
        raise ValueError(
            f"jgg.{op}: {name} has shape {q.shape}, expected (G, N, K) = {expected} {why}"
        )
    return q


@dataclasses.dataclass(frozen=True)
class LinearProducts(Products):
    """As a recipe has them; ``columns``: dw is made as (G, K, N)."""

    recipe: FP8Recipe
    columns: bool = False

    op, keeps = "fp8_grouped_linear", "eight bits"
    exact = "recipe=jgg.FP8Recipe(wgrad='bfloat16')"

    def out(self, x, w, q, codes, bias, group_sizes, keys):
        same: dict[str, Any] = {"bias": bias, "preferred_element_type": x.dtype}
        if self.recipe.forward != "fp8":
            if w is None:
                return grouped_qmm(x, q, group_sizes, **same)
            return grouped_mm(x, w.astype(x.dtype), group_sizes, transpose_w=True, **same)
        if codes is None:
            codes = self._rows(x, group_sizes, keys[0])
        weight = self._weight(w, q, keys[1])
        return fp8_grouped_mm(codes, weight, group_sizes, **same, accumulate=self._accumulate(0))

    def shared(self, w, moves):
        if not shares_codes(self.recipe):
            return None, None
        stored = w.swapaxes(1, 2) if self.columns else w
        if moves:
            return codes_of_both(stored, self.recipe, columns=self.columns)
        return codes_of(stored, self.recipe, columns=self.columns), None

    def exchanged(self, q):
        return convert.exchanged(q)

    def dx(self, dy, w, q, codes, group_sizes, keys):
        if self.recipe.dgrad != "fp8":
            if w is None:
                w = quantized_convert._dequantize(q, dy.dtype)
            return grouped_mm(dy, w.astype(dy.dtype), group_sizes)
        if codes is None:
            codes = self._rows(dy, group_sizes, keys[0], self.recipe.gradient_format)
        weight = self._weight(w, q, keys[1])
        metadata, how = segments.sizes(group_sizes), self._accumulate(1)
        return of_gradient(self.op, codes, weight, metadata, dy.dtype, accumulate=how)

    def dw(self, dy, x, codes, group_sizes, keys, groups, dtype):
        if not self.packs:
            if self.columns:
                return self.sums(x, dy, group_sizes, groups, dtype).swapaxes(1, 2)
            return self.sums(dy, x, group_sizes, groups, dtype)
        if not isinstance(x, Quantized):
            x = self._along_t(x, group_sizes, keys[1])
        if codes is None:
            codes = self._along_t(dy, group_sizes, keys[0], self.recipe.gradient_format)
        static: dict[str, Any] = {"dtype": dtype, "accumulate": self._accumulate(2)}
        if self.columns:
            return grouped_wgrad(codes, x, group_sizes, **static).swapaxes(1, 2)
        return grouped_wgrad(x, codes, group_sizes, **static)

    @property
    def packs(self):
        return self.recipe.wgrad == "fp8"

    def packed(self, x, group_sizes, state):
        if self._reads_once(self.recipe.forward):
            return *convert.quantized_lines(x, group_sizes), None
        return None, self._along_t(x, group_sizes, None), None

    def both(self, dy, group_sizes, keys, state):
        # Stochastic rounding is bound by instructions, so reading dy once saves nothing.
        if any(key is not None for key in keys) or self.recipe.gradient_format != "e4m3":
            return None, None, None
        if not self._reads_once(self.recipe.dgrad):
            return None, None, None
        return *convert.quantized_lines(dy, group_sizes), None

    def _accumulate(self, product: int) -> Accumulate:
        return accumulates(self.recipe)[product]

    def _reads_once(self, other: Precision) -> bool:
        """Whether dw and another product read the same array in eight bits, in lines of 128."""
        return other == self.recipe.wgrad == "fp8" and self.recipe.activation_block == blocks.LINE

    def unpacked(self, kept, dtype):
        def rows(q):
            stored = dataclasses.replace(q, axis=-1, layout="linear", positions=None)
            values = quantized_convert._dequantize(stored, dtype)
            return padding.take_rows(values.T, q.positions)

        run: Callable = rows
        mesh = partition.explicit_mesh(jax.tree.leaves(kept))
        if mesh is not None:
            spec = jax.sharding.PartitionSpec(None, jax.typeof(kept.weight).sharding.spec[0])
            run = jax.sharding.auto_axes(rows, axes=mesh.explicit_axes, out_sharding=spec)
        return run(kept)

    def _rows(self, a, group_sizes, key, format: Any = "e4m3"):
        return fp8_quantize(
            a, block=self.recipe.activation_block, group_sizes=group_sizes,
            stochastic_rounding_key=key, format=format,
        )  # fmt: skip

    def _weight(self, w, q, key):
        if q is not None:
            return q
        if key is None and self.columns:
            q = codes_of(w.swapaxes(1, 2), self.recipe, columns=True)
            if q is not None:
                return q
        return fp8_quantize(w, block=self.recipe.weight_block, stochastic_rounding_key=key)

    def _along_t(self, a, group_sizes, key, format: Any = "e4m3"):
        return fp8_quantize(
            a, axis=0, group_sizes=group_sizes, stochastic_rounding_key=key, format=format
        )


class TensorProducts(LinearProducts):
    """With one scale for x, one for dy, and one for each matrix of w. Codes of one scale are the
    same along either axis, so an array is quantized once for both of its products."""

    def rows(self, x, group_sizes, state):
        return self._rows(x, group_sizes, None, state=state, of="x")

    def packed(self, x, group_sizes, state):
        return self._lines(x, group_sizes, None, "e4m3", state, "x", self.recipe.forward)

    def both(self, dy, group_sizes, keys, state):
        format = self.recipe.gradient_format
        return self._lines(dy, group_sizes, keys[0], format, state, "dy", self.recipe.dgrad)

    def seen(self, a, group_sizes):
        return tensors.seen(a, group_sizes)

    def state_cotangent(self, x, dy):
        return FP8State(x, dy)

    def unpacked(self, kept, dtype):
        if kept.layout == "grouped":
            return super().unpacked(kept, dtype)
        return quantized_convert._dequantize(kept, dtype)

    def _options(self, key, format: Any, state, of: str) -> dict[str, Any]:
        seed = None if key is None else seed_of(self.op, key)
        ages = None if state is None else getattr(state, of)
        return {"seed": seed, "element": format, "ages": ages, "history": self.recipe.history}

    def _lines(self, a, group_sizes, key, format: Any, state, of: str, other: Precision):
        """As :meth:`packed` and :meth:`both` return it. ``other`` is how the product of rows is
        done."""
        options = self._options(key, format, state, of)
        if {other, self.recipe.wgrad} == {"fp8"}:
            return tensors.quantized_lines(a, group_sizes, **options)
        codes = tensors.quantized(a, group_sizes=group_sizes, **options)
        return codes, codes, None

    def _rows(self, a, group_sizes, key, format: Any = "e4m3", *, state=None, of: str = ""):
        options = self._options(key, format, state, of)
        return tensors.quantized(a, group_sizes=group_sizes, **options)

    def _along_t(self, a, group_sizes, key, format: Any = "e4m3"):
        options = self._options(key, format, None, "")
        return tensors.quantized_lines(a, group_sizes, **options)[1]

    def _weight(self, w, q, key):
        if q is not None:
            return q
        return tensors.quantized(w, seed=None if key is None else seed_of(self.op, key))
