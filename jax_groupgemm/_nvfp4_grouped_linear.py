"""``nvfp4_grouped_linear``: the experts of a mixture, trained in NVFP4, and its recipe."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from . import _check, _formats, _partition, _primitives
from ._grouped_mm import grouped_mm
from ._nvfp4_grouped_mm import nvfp4_grouped_mm
from ._nvfp4_grouped_wgrad import grouped_wgrad
from ._nvfp4_quantize import nvfp4_quantize
from ._segments import SIZES

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
      TypeError: a switch is not a bool.
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
        given = self.high_precision
        names = [given] if isinstance(given, str) else list(given)
        for name in names:
            if name not in _PRODUCTS:
                known = ", ".join(map(repr, _PRODUCTS))
                raise ValueError(
                    f"jgg.NVFP4Recipe: high_precision has {name!r}, expected some of {known}"
                )
        in_order = tuple(name for name in _PRODUCTS if name in names)
        object.__setattr__(self, "high_precision", in_order)


_DEFAULT = NVFP4Recipe()


def nvfp4_grouped_linear(
    x, w, group_sizes, *, bias=None, recipe: NVFP4Recipe = _DEFAULT, key=None
) -> jax.Array:
    """``out[t] = x[t] @ w[group(t)].T + bias[group(t)]``; **T (rows) is grouped**; trains in NVFP4.

    x and w are quantized here, and so is dy, the cotangent of the result. With ``q`` for
    :func:`nvfp4_quantize`::

        out = nvfp4_grouped_mm(q(x), q(w), group_sizes, bias=bias)
        dx  = nvfp4_grouped_mm(q(dy), q(w along N), group_sizes)
        dw  = nvfp4_grouped_wgrad(q(x along T), q(dy along T), group_sizes)

    Between forward and backward the 4-bit copy of x along T is kept, not x. Rows of no group are
    exact zeros and get zero gradient, whatever they hold.

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
      ValueError: shapes do not fit.
      TypeError: a dtype is none of these, or recipe or key is not one.

    Gradients have the dtypes of x, w and bias; that of bias is a float32 sum. Reverse mode, first
    order: the gradient is the recipe's, not the derivative of rounding. K and N may be any numbers;
    those that are not multiples of 16 cost a padded copy. Closed under ``vmap``. What Transformer
    Engine's ``GroupedLinear`` does under ``NVFP4BlockScaling``.
    """
    op = "nvfp4_grouped_linear"
    x, w = _check.array(op, "x", x), _check.array(op, "w", w)
    for name, value in (("x", x), ("w", w)):
        _check.dtype(op, name, value.dtype, ("bfloat16", "float32"))
    _check.shape(op, "x", x, (None, None), "T, K")
    _check.shape(op, "w", w, (None, None, x.shape[1]), "G, N, K", f"because x is {x.shape}")
    groups, n, k = w.shape
    why = f"because w is {w.shape}"
    group_sizes = _check.group_sizes(op, group_sizes, groups, why)
    if bias is not None:
        bias = _check.array(op, "bias", bias)
        _check.shape(op, "bias", bias, (groups, n), "G, N", why)
        _check.dtype(op, "bias", bias.dtype, _formats.FLOATS)
    if not isinstance(recipe, NVFP4Recipe):
        raise TypeError(f"jgg.{op}: recipe must be a jgg.NVFP4Recipe, got {type(recipe).__name__}")
    keys = None if key is None or not recipe.stochastic_rounding else _split(op, key)
    x, w = _blocks(x, 0, k), _blocks(w, n, k)
    bias = None if bias is None else _blocks(bias, n)
    # A gradient varies over the mesh axes that any operand varies over, so each operand has to.
    operands, tree = jax.tree.flatten((x, w, bias, group_sizes, keys))
    operands = tree.unflatten(_primitives.vary_alike(*operands))
    return _linear(*operands, recipe, _specs(operands[:3]))[:, :n]


def _split(op: str, key) -> jax.Array:
    """Of dx, of dw."""
    try:
        return jax.random.split(key)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"jgg.{op}: key must be one key of jax.random, got {_check.describe(key)}"
        ) from error


def _blocks(a, *sizes: int):
    """``a`` with its last axes padded to whole blocks; 0 where the axis is not to be."""
    pad = [(0, 0)] * (a.ndim - len(sizes)) + [(0, -size % _BLOCK) for size in sizes]
    return jnp.pad(a, pad) if any(high for _, high in pad) else a


def _specs(operands) -> tuple | None:
    """How operands are sharded over an Explicit mesh, and so their gradients."""
    if _partition.explicit_mesh(jax.tree.leaves(operands)) is None:
        return None
    return tuple(None if a is None else jax.typeof(a).sharding.spec for a in operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _linear(x, w, bias, group_sizes, keys, recipe, specs):
    del keys, specs
    if "fprop" in recipe.high_precision:
        return grouped_mm(
            x, w.astype(x.dtype), group_sizes, transpose_w=True, bias=bias,
            preferred_element_type=x.dtype,
        )  # fmt: skip
    return nvfp4_grouped_mm(
        nvfp4_quantize(x, group_sizes=group_sizes), nvfp4_quantize(w, scale_2d=recipe.scale_2d),
        group_sizes, bias=bias, preferred_element_type=x.dtype,
    )  # fmt: skip


def _forward(x, w, bias, group_sizes, keys, recipe, specs):
    kept = x
    if "wgrad" not in recipe.high_precision:
        kept = _along_t(x, group_sizes, recipe, None)
    out = _linear(x, w, bias, group_sizes, keys, recipe, specs)
    return out, (kept, w, bias, group_sizes, keys)


def _backward(recipe, specs, kept, dy):
    x, w, bias, group_sizes, keys = kept
    dx_key, dw_key = (None, None) if keys is None else keys
    grads = (
        _dx(dy, w, group_sizes, recipe, dx_key),
        _dw(dy, x, w, group_sizes, recipe, dw_key),
        None if bias is None else _dbias(dy, bias, group_sizes),
    )
    if specs is not None:
        grads = (
            None if grad is None else jax.sharding.reshard(grad, spec)
            for grad, spec in zip(grads, specs, strict=True)
        )
    return *grads, None, None


_linear.defvjp(_forward, _backward)


def _dx(dy, w, group_sizes, recipe, key):
    if "dgrad" in recipe.high_precision:
        return grouped_mm(dy, w.astype(dy.dtype), group_sizes)
    q = nvfp4_quantize(dy, group_sizes=group_sizes, stochastic_rounding_key=key)
    along_n = nvfp4_quantize(w, axis=-2, scale_2d=recipe.scale_2d)
    stored = dataclasses.replace(along_n, axis=-1)  # (G, K, N)
    return nvfp4_grouped_mm(q, stored, group_sizes, preferred_element_type=dy.dtype)


def _dw(dy, x, w, group_sizes, recipe, key):
    if "wgrad" in recipe.high_precision:
        return _sums(dy, x, group_sizes, w.shape[0], w.dtype)
    q = _along_t(dy, group_sizes, recipe, key)
    return grouped_wgrad(x, q, group_sizes, dtype=w.dtype)


def _along_t(a, group_sizes, recipe, key):
    return nvfp4_quantize(
        a, axis=0, group_sizes=group_sizes, hadamard=recipe.hadamard, stochastic_rounding_key=key
    )


def _dbias(dy, bias, group_sizes):
    ones = jnp.ones((dy.shape[0], 1), dy.dtype)
    return _sums(ones, dy, group_sizes, bias.shape[0], bias.dtype)[:, 0]


def _sums(a, b, group_sizes, groups: int, dtype):
    """``a[rows g].T @ b[rows g]``, summed in float32."""
    precision = _check.precision("nvfp4_grouped_linear", None)
    return _primitives.wgrad(
        a, b, (group_sizes,), form=SIZES, groups=groups, out_dtype=dtype, precision=precision
    )
