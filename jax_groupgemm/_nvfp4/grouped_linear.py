"""``nvfp4_grouped_linear``: the experts of a mixture, trained in NVFP4, and its recipe."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from .._core import check, partition
from .._core.operations import INLINE, operation_of_its_own_gradient
from .._core.types import Integers
from .._grouped.grouped_mm import grouped_mm
from .._quantized import trilinear
from .._quantized.array import Quantized
from .._quantized.convert import dequantize
from .._quantized.operands import one_owner
from .._quantized.trilinear import Products, linear
from . import layouts
from .grouped_mm import nvfp4_grouped_mm
from .grouped_wgrad import grouped_wgrad
from .quantize import hadamard, nvfp4_quantize

Product = Literal["fprop", "dgrad", "wgrad"]
_PRODUCTS = get_args(Product)
_BLOCK = 16


@dataclasses.dataclass(frozen=True)
class NVFP4Recipe:
    """How :func:`nvfp4_grouped_linear` quantizes. Hashable; the defaults are NVIDIA's recipe.

    Args:
      scale_2d: weights have one scale per 16 x 16 elements, so that forward and backward products
        see the same values; otherwise one per 16 along the contracted axis.
      hadamard: operands of the weight gradient are multiplied by an orthogonal matrix along T
        first, which spreads outliers and cancels in the product.
      stochastic_rounding: gradients are rounded at random where there is a key.
      high_precision: those of ``"fprop"``, ``"dgrad"`` and ``"wgrad"`` that are not done in NVFP4
        but in x's dtype.

    Raises:
      ValueError: high_precision names another product.
      TypeError: a switch is not a bool, or high_precision holds no names.

    Examples:
      >>> recipe = jgg.NVFP4Recipe(hadamard=False, stochastic_rounding=False)
      >>> x, w, sizes = jnp.ones((5, 64)), jnp.ones((2, 128, 64)), jnp.array([2, 3])
      >>> jgg.nvfp4_grouped_linear(x, w, sizes, recipe=recipe).shape
      (5, 128)
    """

    scale_2d: bool = True
    hadamard: bool = True
    stochastic_rounding: bool = True
    high_precision: Product | Iterable[Product] = ()

    def __post_init__(self):
        for name in ("scale_2d", "hadamard", "stochastic_rounding"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"jgg.NVFP4Recipe: {name}={value!r} is not a bool")
        given, known = self.high_precision, ", ".join(map(repr, _PRODUCTS))
        if not isinstance(given, Iterable):
            raise TypeError(
                f"jgg.NVFP4Recipe: high_precision={given!r} is not a tuple of names, some of "
                f"{known}"
            )
        names = [given] if isinstance(given, str) else list(given)
        for name in names:
            if name not in _PRODUCTS:
                raise ValueError(
                    f"jgg.NVFP4Recipe: high_precision has {name!r}, expected some of {known}"
                )
        in_order = tuple(name for name in _PRODUCTS if name in names)
        object.__setattr__(self, "high_precision", in_order)


_DEFAULT = NVFP4Recipe()


@operation_of_its_own_gradient
def nvfp4_grouped_linear(
    x: ArrayLike,
    w: ArrayLike,
    group_sizes: Integers,
    *,
    bias: ArrayLike | None = None,
    recipe: NVFP4Recipe = _DEFAULT,
    key: jax.Array | None = None,
) -> jax.Array:
    """``out[t] = x[t] @ w[group(t)].T + bias[group(t)]``; **T (rows) is grouped**; trains in NVFP4.

    x and w are quantized here, and so is dy, the cotangent of the result. With ``q`` for
    :func:`nvfp4_quantize`::

        out = nvfp4_grouped_mm(q(x), q(w), group_sizes, bias=bias)
        dx  = nvfp4_grouped_mm(q(dy), q(w along N), group_sizes)
        dw  = nvfp4_grouped_wgrad(q(x along T), q(dy along T), group_sizes)

    Each has the other two as its derivatives, so gradients of any order are products of these three
    kinds. Between forward and backward the 4-bit copy of x along T is kept, not x. Rows of no group
    are exact zeros and get zero gradient, whatever they hold.

    Args:
      x: bfloat16 or float32 ``(T, K)``.
      w: bfloat16 or float32 ``(G, N, K)``.
      group_sizes: as in :func:`grouped_mm`.
      bias: floating ``(G, N)``, added to the rows of its group.
      recipe: a :class:`NVFP4Recipe`.
      key: a key of ``jax.random``, for the stochastic rounding of gradients: another one for each
        call and step. Without one they are rounded to nearest.

    Returns:
      ``(T, N)`` in x's dtype.

    Raises:
      ValueError: shapes do not fit, or shardings over an Explicit mesh.
      TypeError: a dtype is none of these, or recipe or key is not one.
      NotImplementedError: dw is differentiated in x, and x was kept in four bits.

    Gradients have the dtypes of x, w and bias; that of bias is a float32 sum. They are the
    recipe's, not the derivative of rounding. Reverse mode, of any order; but dw cannot be
    differentiated in x where x is kept in four bits, which is an error and needs a recipe with
    ``"wgrad"`` in high precision. K and N may be any numbers; those that are not multiples of 16
    cost a padded copy. Closed under ``vmap``. What Transformer Engine's ``GroupedLinear`` does
    under ``NVFP4BlockScaling``.

    In a derivative, an array that takes the place of x, w or dy is quantized as that operand is,
    with keys of its own for stochastic rounding. The derivative of dw in dy uses the quantized x.

    Errors relative to the exact products, for normal numbers (Frobenius, measured): 0.13 to 0.15
    for the result, dx and dw; with a key 0.16 to 0.18 for dx and dw.

    Examples:
      >>> x, w, sizes = jnp.ones((5, 64)), jnp.ones((2, 128, 64)), jnp.array([2, 3])
      >>> loss = lambda w: jgg.nvfp4_grouped_linear(x, w, sizes, key=jax.random.key(0)).sum()
      >>> jax.grad(loss)(w).shape
      (2, 128, 64)
    """
    op = "nvfp4_grouped_linear"
    x, w = check.array(op, "x", x), check.array(op, "w", w)
    for name, value in (("x", x), ("w", w)):
        check.dtype(op, name, value.dtype, ("bfloat16", "float32"))
    check.shape(op, "x", x, (None, None), "T, K")
    check.shape(op, "w", w, (None, None, x.shape[1]), "G, N, K", f"because x is {x.shape}")
    _, n, k = w.shape
    group_sizes, bias, key = trilinear.checked(
        op, w.shape, group_sizes, bias, recipe, NVFP4Recipe, key
    )
    sharded = [("x", x, "TK"), ("w", w, "GNK")]
    one_owner(op, sharded if bias is None else [*sharded, ("bias", bias, "GN")])
    x, w = _blocks(x, 0, k), _blocks(w, n, k)
    bias = None if bias is None else _blocks(bias, n)
    out = linear(x, w, None, bias, group_sizes, key, _Products(recipe))
    # So that policies of jax.checkpoint know it, which see a custom_vjp_call here.
    out = checkpoint_name(out, "jgg_nvfp4_grouped_linear")
    return out if out.shape[1] == n else _columns(out, n=n)


def _blocks(a, *sizes: int):
    """``a`` with its last axes padded to whole blocks; 0 where the axis is not to be."""
    pad = [(0, 0)] * (a.ndim - len(sizes)) + [(0, -size % _BLOCK) for size in sizes]
    return _padded(a, pad=tuple(pad)) if any(high for _, high in pad) else a


# Each is a program of its own. Outside of ``jit`` JAX would run a gradient's operations one by one,
# and bring the zero of a padding to the device.
_wgrad = jax.jit(grouped_wgrad, static_argnames="dtype", inline=INLINE)


@functools.partial(jax.jit, static_argnames="pad", inline=INLINE)
def _padded(a, *, pad):
    return jnp.pad(a, pad)


@functools.partial(jax.jit, static_argnames="n", inline=INLINE)
def _columns(a, *, n):
    return a[:, :n]


@dataclasses.dataclass(frozen=True)
class _Products(Products):
    """As a recipe has them."""

    recipe: NVFP4Recipe

    op, keeps = "nvfp4_grouped_linear", "four bits"
    exact = "recipe=jgg.NVFP4Recipe(high_precision=('wgrad',))"

    def out(self, x, w, q, codes, bias, group_sizes, keys):
        if "fprop" in self.recipe.high_precision:
            return grouped_mm(
                x, w.astype(x.dtype), group_sizes, transpose_w=True, bias=bias,
                preferred_element_type=x.dtype,
            )  # fmt: skip
        rows = nvfp4_quantize(x, group_sizes=group_sizes, stochastic_rounding_key=keys[0])
        along_k = nvfp4_quantize(w, scale_2d=self.recipe.scale_2d, stochastic_rounding_key=keys[1])
        return nvfp4_grouped_mm(
            rows, along_k, group_sizes, bias=bias, preferred_element_type=x.dtype
        )

    def dx(self, dy, w, q, codes, group_sizes, keys):
        if "dgrad" in self.recipe.high_precision:
            return grouped_mm(dy, w.astype(dy.dtype), group_sizes)
        rows = nvfp4_quantize(dy, group_sizes=group_sizes, stochastic_rounding_key=keys[0])
        along_n = nvfp4_quantize(
            w, axis=-2, scale_2d=self.recipe.scale_2d, stochastic_rounding_key=keys[1]
        )
        stored = dataclasses.replace(along_n, axis=-1)  # (G, K, N)
        return nvfp4_grouped_mm(rows, stored, group_sizes, preferred_element_type=dy.dtype)

    def dw(self, dy, x, codes, group_sizes, keys, groups, dtype):
        if not self.packs:
            return self.sums(dy, x, group_sizes, groups, dtype)
        if not isinstance(x, Quantized):
            x = self._along_t(x, group_sizes, keys[1])
        return _wgrad(x, self._along_t(dy, group_sizes, keys[0]), group_sizes, dtype=dtype)

    @property
    def packs(self):
        return "wgrad" not in self.recipe.high_precision

    def packed(self, x, group_sizes, state):
        return None, self._along_t(x, group_sizes, None), None

    def unpacked(self, kept, dtype):
        def rows(q):
            values = dequantize(dataclasses.replace(q, axis=-1, layout="linear", positions=None))
            if self.recipe.hadamard:
                blocks = values.reshape(*values.shape[:-1], -1, _BLOCK)
                back = jnp.matmul(blocks, hadamard().T, precision=jax.lax.Precision.HIGHEST)
                values = back.reshape(values.shape)
            return layouts.take_rows(values.T, q.positions).astype(dtype)

        run: Callable = rows
        mesh = partition.explicit_mesh(jax.tree.leaves(kept))
        if mesh is not None:
            spec = jax.sharding.PartitionSpec(None, jax.typeof(kept.weight).sharding.spec[0])
            run = jax.sharding.auto_axes(rows, axes=mesh.explicit_axes, out_sharding=spec)
        return run(kept)

    def _along_t(self, a, group_sizes, key):
        return nvfp4_quantize(
            a, axis=0, group_sizes=group_sizes, hadamard=self.recipe.hadamard,
            stochastic_rounding_key=key,
        )  # fmt: skip
