"""``nvfp4_grouped_linear``: the experts of a mixture, trained in NVFP4, and its recipe."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from .._core import check, partition, primitive, segments
from .._core.operations import operation_of_its_own_gradient
from .._core.products import Wgrad
from .._core.types import Integers
from .._grouped import primitives
from .._grouped.grouped_mm import grouped_mm
from .._quantized import formats
from .._quantized.array import Quantized
from .._quantized.convert import dequantize
from . import layouts
from .grouped_mm import nvfp4_grouped_mm, one_owner
from .grouped_wgrad import grouped_wgrad
from .quantize import hadamard, nvfp4_quantize

_PRODUCTS = ("fprop", "dgrad", "wgrad")
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
    """

    scale_2d: bool = True
    hadamard: bool = True
    stochastic_rounding: bool = True
    high_precision: tuple[str, ...] = ()

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
    """
    op = "nvfp4_grouped_linear"
    x, w = check.array(op, "x", x), check.array(op, "w", w)
    for name, value in (("x", x), ("w", w)):
        check.dtype(op, name, value.dtype, ("bfloat16", "float32"))
    check.shape(op, "x", x, (None, None), "T, K")
    check.shape(op, "w", w, (None, None, x.shape[1]), "G, N, K", f"because x is {x.shape}")
    groups, n, k = w.shape
    why = f"because w is {w.shape}"
    group_sizes = check.group_sizes(op, group_sizes, groups, why)
    if bias is not None:
        bias = check.array(op, "bias", bias)
        check.shape(op, "bias", bias, (groups, n), "G, N", why)
        check.dtype(op, "bias", bias.dtype, formats.FLOATS)
    if not isinstance(recipe, NVFP4Recipe):
        raise TypeError(f"jgg.{op}: recipe must be a jgg.NVFP4Recipe, got {type(recipe).__name__}")
    key = key if recipe.stochastic_rounding else None
    if key is not None:
        check.key(op, key)
    sharded = [("x", x, "TK"), ("w", w, "GNK")]
    one_owner(op, sharded if bias is None else [*sharded, ("bias", bias, "GN")])
    x, w = _blocks(x, 0, k), _blocks(w, n, k)
    bias = None if bias is None else _blocks(bias, n)
    # A gradient varies over the mesh axes that any operand varies over, so each operand has to.
    operands, tree = jax.tree.flatten((x, w, bias, group_sizes, key))
    operands = tree.unflatten(primitive.vary_alike(*operands))
    how = _How(packs=True, specs=_specs(operands[:3]))
    # So that policies of jax.checkpoint know it, which see a custom_vjp_call here.
    return checkpoint_name(_out(*operands, recipe, how), "jgg_nvfp4_grouped_linear")[:, :n]


def _blocks(a, *sizes: int):
    """``a`` with its last axes padded to whole blocks; 0 where the axis is not to be."""
    pad = [(0, 0)] * (a.ndim - len(sizes)) + [(0, -size % _BLOCK) for size in sizes]
    return jnp.pad(a, pad) if any(high for _, high in pad) else a


def _specs(operands) -> tuple | None:
    """How operands are sharded over an Explicit mesh, and so their gradients."""
    if partition.explicit_mesh(jax.tree.leaves(operands)) is None:
        return None
    return tuple(None if a is None else tuple(partition.entries_of(a)) for a in operands)


# Result, dx and dw are the derivatives of one trilinear form, so each has the other two as its
# derivatives, and quantizing is passed straight through: gradients of any order are products of
# these three kinds. ``random`` says which of the two operands is a gradient, and so rounded at
# random where there is a key.


@dataclasses.dataclass(frozen=True)
class _How:
    """Static arguments of :func:`_out`.

    ``packs``: x is kept in four bits. ``specs``: how operands are sharded over an Explicit mesh.
    """

    random: tuple[bool, bool] = (False, False)
    packs: bool = False
    specs: tuple | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _out(x, w, bias, group_sizes, key, recipe, how):
    if "fprop" in recipe.high_precision:
        return grouped_mm(
            x, w.astype(x.dtype), group_sizes, transpose_w=True, bias=bias,
            preferred_element_type=x.dtype,
        )  # fmt: skip
    x_key, w_key = _rounding(key, how.random)
    q = nvfp4_quantize(x, group_sizes=group_sizes, stochastic_rounding_key=x_key)
    along_k = nvfp4_quantize(w, scale_2d=recipe.scale_2d, stochastic_rounding_key=w_key)
    return nvfp4_grouped_mm(q, along_k, group_sizes, bias=bias, preferred_element_type=x.dtype)


def _out_forward(x, w, bias, group_sizes, key, recipe, how):
    moves = w.perturbed  # otherwise there is no dw, and nothing is kept for it
    x, w, bias, group_sizes, key = jax.tree.map(
        lambda a: a.value, (x, w, bias, group_sizes, key), is_leaf=lambda a: hasattr(a, "perturbed")
    )
    kept = x if moves else None
    if moves and how.packs and "wgrad" not in recipe.high_precision:
        kept = _packed(x, group_sizes, recipe)
    return _out(x, w, bias, group_sizes, key, recipe, how), (kept, w, bias, group_sizes, key)


def _out_backward(recipe, how, kept, dy):
    if isinstance(dy, SymbolicZero):
        return (None,) * 5
    x, w, bias, group_sizes, key = kept
    dx_key, dw_key = _split(key)
    grads = (
        _dx(dy, w, group_sizes, dx_key, recipe, (True, how.random[1])),
        None if x is None else _dw(dy, x, w, group_sizes, dw_key, recipe, (True, how.random[0])),
        None if bias is None else _dbias(dy, bias, group_sizes),
    )
    if how.specs is not None:
        grads = (
            None if grad is None else partition.resharded(grad, list(spec))
            for grad, spec in zip(grads, how.specs, strict=True)
        )
    return *grads, None, None


_out.defvjp(_out_forward, _out_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _dx(dy, w, group_sizes, key, recipe, random):
    if "dgrad" in recipe.high_precision:
        return grouped_mm(dy, w.astype(dy.dtype), group_sizes)
    dy_key, w_key = _rounding(key, random)
    q = nvfp4_quantize(dy, group_sizes=group_sizes, stochastic_rounding_key=dy_key)
    along_n = nvfp4_quantize(w, axis=-2, scale_2d=recipe.scale_2d, stochastic_rounding_key=w_key)
    stored = dataclasses.replace(along_n, axis=-1)  # (G, K, N)
    return nvfp4_grouped_mm(q, stored, group_sizes, preferred_element_type=dy.dtype)


def _dx_forward(dy, w, group_sizes, key, recipe, random):
    return _dx(dy, w, group_sizes, key, recipe, random), (dy, w, group_sizes, key)


def _dx_backward(recipe, random, kept, ct):
    dy, w, group_sizes, key = kept
    dy_key, w_key = _split(key)
    how = _How((True, random[1]), specs=_specs((ct, w, None)))
    ddy = _out(ct, w, None, group_sizes, dy_key, recipe, how)
    dw = _dw(dy, ct, w, group_sizes, w_key, recipe, (random[0], True))
    return _sharded_as(dy, ddy), _sharded_as(w, dw), None, None


_dx.defvjp(_dx_forward, _dx_backward)


def _dw(dy, x, w, group_sizes, key, recipe, random):
    """``x`` may be what :func:`_packed` makes of it."""
    shape = w.shape[0], jnp.dtype(w.dtype)
    return _sums_of_products(dy, x, group_sizes, key, recipe, random, shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _sums_of_products(dy, x, group_sizes, key, recipe, random, shape):
    groups, dtype = shape
    if "wgrad" in recipe.high_precision:
        return _sums(dy, x, group_sizes, groups, dtype)
    dy_key, x_key = _rounding(key, random)
    if not isinstance(x, Quantized):
        x = _along_t(x, group_sizes, recipe, x_key)
    return grouped_wgrad(x, _along_t(dy, group_sizes, recipe, dy_key), group_sizes, dtype=dtype)


def _dw_forward(dy, x, group_sizes, key, recipe, random, shape):
    out = _sums_of_products(dy, x, group_sizes, key, recipe, random, shape)
    return out, (dy, x, group_sizes, key)


def _dw_backward(recipe, random, shape, kept, ct):
    del shape
    dy, x, group_sizes, key = kept
    dy_key, x_key = _split(key)
    packed = isinstance(x, Quantized)
    rows = _unpacked(x, recipe, dy.dtype) if packed else x
    how = _How((random[1], True), specs=_specs((rows, ct, None)))
    ddy = _out(rows, ct, None, group_sizes, dy_key, recipe, how)
    dx = None
    if not packed:
        dx = _sharded_as(x, _dx(dy, ct, group_sizes, x_key, recipe, (random[0], True)))
    return _sharded_as(dy, ddy), dx, None, None


_sums_of_products.defvjp(_dw_forward, _dw_backward)


def _split(key):
    """A key for each of the two derivatives."""
    return (None, None) if key is None else tuple(jax.random.split(key))


def _rounding(key, random: tuple[bool, bool]):
    """A key for each of the two operands; None rounds to nearest."""
    if key is None:
        return None, None
    first, second = random
    return key if first else None, jax.random.fold_in(key, 2) if second else None


def _sharded_as(a, grad):
    """A gradient, as the operand is sharded over an Explicit mesh."""
    specs = _specs((a,))
    return grad if specs is None else partition.resharded(grad, list(specs[0]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _packed(x, group_sizes, recipe):
    """Codes of x, kept for dw; no derivative of dw finds x through them."""
    return _along_t(x, group_sizes, recipe, None)


@_packed.defjvp
def _(recipe, primals, tangents):
    del recipe, primals, tangents
    raise NotImplementedError(
        "jgg.nvfp4_grouped_linear: the gradient of w keeps x in four bits, so it cannot be "
        "differentiated in x. recipe=jgg.NVFP4Recipe(high_precision=('wgrad',)) keeps x, for "
        "gradients of any order"
    )


def _unpacked(q, recipe, dtype):
    """Rows of x again, from what :func:`_packed` made of it."""

    def rows(q):
        values = dequantize(dataclasses.replace(q, axis=-1, layout="linear", positions=None))
        if recipe.hadamard:
            blocks = values.reshape(*values.shape[:-1], -1, _BLOCK)
            back = jnp.matmul(blocks, hadamard().T, precision=jax.lax.Precision.HIGHEST)
            values = back.reshape(values.shape)
        return layouts.take_rows(values.T, q.positions).astype(dtype)

    run: Callable = rows
    mesh = partition.explicit_mesh(jax.tree.leaves(q))
    if mesh is not None:
        spec = jax.sharding.PartitionSpec(None, jax.typeof(q.weight).sharding.spec[0])
        run = jax.sharding.auto_axes(rows, axes=mesh.explicit_axes, out_sharding=spec)
    return run(q)


def _along_t(a, group_sizes, recipe, key):
    return nvfp4_quantize(
        a, axis=0, group_sizes=group_sizes, hadamard=recipe.hadamard, stochastic_rounding_key=key
    )


def _dbias(dy, bias, group_sizes):
    ones = jnp.ones((dy.shape[0], 1), dy.dtype)
    return _sums(ones, dy, group_sizes, bias.shape[0], bias.dtype)[:, 0]


def _sums(a, b, group_sizes, groups: int, dtype):
    """``a[rows g].T @ b[rows g]``, summed in float32."""
    precision = check.precision("nvfp4_grouped_linear", None)
    product = Wgrad(groups=groups, out_dtype=dtype, precision=precision)
    return primitives.wgrad(a, b, segments.sizes(group_sizes), product)
