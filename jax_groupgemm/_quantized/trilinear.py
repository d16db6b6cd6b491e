"""The experts' linear layer whose products are quantized, and its gradients.

    out = x @ w.T + bias,  dx = dy @ w,  dw = dy.T @ x                         T (rows) is grouped

Result, dx and dw are the derivatives of one trilinear form, so each has the other two as its
derivatives, and quantizing is passed straight through: gradients of any order are products of these
three kinds.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._core import check, partition, primitive, segments
from .._core.operations import INLINE
from .._core.products import Wgrad
from .._grouped import primitives
from .array import Quantized
from .format import FLOATS


def checked(op: str, shape, group_sizes, bias, recipe, kind: type, key):
    """group_sizes, bias and key of a layer whose w has this shape, checked. There is no key where
    the recipe rounds to nearest."""
    groups, n, _ = shape
    why = f"because w is {shape}"
    group_sizes = check.group_sizes(op, group_sizes, groups, why)
    if bias is not None:
        bias = check.array(op, "bias", bias)
        check.shape(op, "bias", bias, (groups, n), "G, N", why)
        check.dtype(op, "bias", bias.dtype, FLOATS)
    if not isinstance(recipe, kind):
        raise TypeError(
            f"jgg.{op}: recipe must be a jgg.{kind.__name__}, got {type(recipe).__name__}"
        )
    key = key if recipe.stochastic_rounding else None
    if key is not None:
        check.key(op, key)
    return group_sizes, bias, key


class Products(abc.ABC):
    """The three products of a family; static, so instances are hashable.

    ``keys`` has one for each of the two operands that are not group sizes: a key where it is
    rounded at random, else None. ``q`` is a quantized copy of w, or None, and ``codes`` is one of x
    or dy as that product reads it: what :meth:`both` or :meth:`packed` has made already. A
    ``state`` says how x and dy are quantized, or is None.

    Attributes:
      op: of the public operation, for messages.
      keeps: what is kept of x between forward and backward, for messages; ``exact`` says how to
        keep x itself.
    """

    op = keeps = exact = ""

    @abc.abstractmethod
    def out(self, x, w, q, codes, bias, group_sizes, keys) -> jax.Array: ...

    def shared(self, w, moves: bool) -> tuple[Quantized | None, Quantized | None]:
        """``(q, kept)``: a quantized copy of w that serves the result and dx, or None; and what the
        backward pass keeps in place of q, or None. Nothing is kept unless x ``moves``: otherwise
        there is no dx. :meth:`exchanged` makes q of what is kept."""
        del w, moves
        return None, None

    def exchanged(self, q: Quantized) -> Quantized:
        """The q that :meth:`shared` made, of what it said is kept."""
        raise NotImplementedError(f"{type(self).__name__}.shared keeps something")

    @abc.abstractmethod
    def dx(self, dy, w, q, codes, group_sizes, keys) -> jax.Array: ...

    @abc.abstractmethod
    def dw(self, dy, x, codes, group_sizes, keys, groups: int, dtype) -> jax.Array:
        """``x`` may be what :meth:`packed` makes of it. ``codes`` are of dy."""

    def both(self, dy, group_sizes, keys, state) -> tuple[Quantized | None, Quantized | None, Any]:
        """dy as dx reads it, and as dw does, rounded with a key each; or twice None. And what a
        state learns of dy, or None."""
        del dy, group_sizes, keys, state
        return None, None, None

    @property
    @abc.abstractmethod
    def packs(self) -> bool:
        """Whether x is kept quantized, for dw."""

    @abc.abstractmethod
    def packed(self, x, group_sizes, state) -> tuple[Quantized | None, Quantized, Any]:
        """x as the result reads it, or None; what is kept for dw; and what a state learns of x, or
        None."""

    @abc.abstractmethod
    def unpacked(self, kept: Quantized, dtype) -> jax.Array:
        """Rows of x again."""

    def rows(self, x, group_sizes, state) -> Quantized:
        """x as the result reads it."""
        raise NotImplementedError(f"{type(self).__name__} has no state")

    def seen(self, a, group_sizes) -> Any:
        """What a state learns of x or of dy."""
        raise NotImplementedError(f"{type(self).__name__} has no state")

    def state_cotangent(self, x, dy) -> Any:
        """The news of both for a state."""
        raise NotImplementedError(f"{type(self).__name__} has no state")

    def sums(self, a, b, group_sizes, groups: int, dtype) -> jax.Array:
        """``a[rows g].T @ b[rows g]`` of arrays, summed in float32."""
        product = Wgrad(groups=groups, out_dtype=dtype, precision=check.precision(self.op, None))
        return primitives.wgrad(a, b, segments.sizes(group_sizes), product)


def linear(x, w, q, bias, group_sizes, key, products: Products, state=None) -> jax.Array:
    """The result. ``w`` is an array, or None where ``q`` is all there is: then it is constant."""
    # A gradient varies over the mesh axes that any operand varies over, so each operand has to.
    operands, tree = jax.tree.flatten((x, w, q, bias, group_sizes, key, state))
    operands = tree.unflatten(primitive.vary_alike(*operands))
    how = _How(packs=True, specs=_specs((operands[0], operands[1], operands[3])))
    x, w, q, *rest = operands
    return _out(x, w, q, None, *rest, products, how)


def _specs(operands) -> tuple | None:
    """How operands are sharded over an Explicit mesh, and so their gradients."""
    if partition.explicit_mesh(jax.tree.leaves(operands)) is None:
        return None
    return tuple(None if a is None else tuple(partition.entries_of(a)) for a in operands)


@dataclasses.dataclass(frozen=True)
class _How:
    """Static arguments of :func:`_out`.

    ``random`` says which of the two operands is a gradient, and so rounded at random where there is
    a key. ``packs``: x is kept quantized. ``specs``: how operands are sharded over an Explicit
    mesh.
    """

    random: tuple[bool, bool] = (False, False)
    packs: bool = False
    specs: tuple | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(8, 9))
def _out(x, w, q, codes, bias, group_sizes, key, state, products, how):
    if state is not None and codes is None:
        codes = products.rows(x, group_sizes, state)
    return products.out(x, w, q, codes, bias, group_sizes, _rounding(key, how.random))


def _out_forward(x, w, q, codes, bias, group_sizes, key, state, products, how):
    moves = w is not None and w.perturbed  # otherwise there is no dw, and nothing is kept for it
    x_moves = x.perturbed
    operands: Any = jax.tree.map(
        lambda a: a.value, (x, w, q, codes, bias, group_sizes, key, state),
        is_leaf=lambda a: hasattr(a, "perturbed"),
    )  # fmt: skip
    x, w, q, codes, bias, group_sizes, key, state = operands
    kept, seen = x if moves else None, None
    if moves and how.packs and products.packs:
        codes, kept, seen = packed(x, group_sizes, state, products)
    turned = None
    if q is None and w is not None and not how.random[1]:
        q, turned = products.shared(w, x_moves)
    out = _out(x, w, q, codes, bias, group_sizes, key, state, products, how)
    if state is not None and seen is None:
        seen = products.seen(x, group_sizes)
    q = q if turned is None else None
    return out, (kept, w, q, turned, bias, group_sizes, key, state, seen)


def _out_backward(products, how, kept, dy):
    if isinstance(dy, SymbolicZero):
        return (None,) * 8
    x, w, q, turned, bias, group_sizes, key, state, seen = kept
    if turned is not None:
        q = products.exchanged(turned)
    dx_key, dw_key = split(key)
    for_dx, for_dw, of_dy = None, None, None  # codes of dy
    if x is not None or state is not None:
        for_dx, for_dw, of_dy = products.both(dy, group_sizes, (dx_key, dw_key), state)
    random = (True, how.random[1]), (True, how.random[0])
    dx, dw, dbias = (
        rows_cotangent(dy, w, q, group_sizes, dx_key, products, random[0], for_dx),
        None
        if x is None
        else weight_cotangent(dy, x, w, group_sizes, dw_key, products, random[1], for_dw),
        None if bias is None else _dbias(dy, bias, group_sizes, products=products),
    )
    if how.specs is not None:
        dx, dw, dbias = (
            None if grad is None else partition.resharded(grad, list(spec))
            for grad, spec in zip((dx, dw, dbias), how.specs, strict=True)
        )
    dstate = None
    if state is not None:
        of_dy = products.seen(dy, group_sizes) if of_dy is None else of_dy
        dstate = products.state_cotangent(seen, of_dy)
    return dx, dw, None, None, dbias, None, None, dstate


_out.defvjp(_out_forward, _out_backward, symbolic_zeros=True)


def rows_cotangent(dy, w, q, group_sizes, key, products, random, codes=None):
    """``random``: which of dy and w are gradients."""
    return _rows_cotangent(dy, w, q, codes, group_sizes, key, products, random)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _rows_cotangent(dy, w, q, codes, group_sizes, key, products, random):
    return products.dx(dy, w, q, codes, group_sizes, _rounding(key, random))


def _rows_forward(dy, w, q, codes, group_sizes, key, products, random):
    out = _rows_cotangent(dy, w, q, codes, group_sizes, key, products, random)
    return out, (dy, w, q, group_sizes, key)


def _rows_backward(products, random, kept, ct):
    dy, w, q, group_sizes, key = kept
    dy_key, w_key = split(key)
    how = _How((True, random[1]), specs=_specs((ct, w, None)))
    ddy = _out(ct, w, q, None, None, group_sizes, dy_key, None, products, how)
    dw = None
    if w is not None:
        dw = _sharded_as(
            w, weight_cotangent(dy, ct, w, group_sizes, w_key, products, (random[0], True))
        )
    return _sharded_as(dy, ddy), dw, None, None, None, None


_rows_cotangent.defvjp(_rows_forward, _rows_backward)


def weight_cotangent(dy, x, w, group_sizes, key, products, random, codes=None):
    """``x`` may be what :meth:`Products.packed` keeps of it. ``random`` says which of dy and x are
    gradients."""
    shape = w.shape[0], jnp.dtype(w.dtype)
    return _sums_of_products(dy, x, codes, group_sizes, key, products, random, shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _sums_of_products(dy, x, codes, group_sizes, key, products, random, shape):
    return products.dw(dy, x, codes, group_sizes, _rounding(key, random), *shape)


def _dw_forward(dy, x, codes, group_sizes, key, products, random, shape):
    out = _sums_of_products(dy, x, codes, group_sizes, key, products, random, shape)
    return out, (dy, x, group_sizes, key)


def _dw_backward(products, random, shape, kept, ct):
    del shape
    dy, x, group_sizes, key = kept
    dy_key, x_key = split(key)
    packed = isinstance(x, Quantized)
    rows = products.unpacked(x, dy.dtype) if packed else x
    how = _How((random[1], True), specs=_specs((rows, ct, None)))
    ddy = _out(rows, ct, None, None, None, group_sizes, dy_key, None, products, how)
    dx = None
    if not packed:
        dx = rows_cotangent(dy, ct, None, group_sizes, x_key, products, (random[0], True))
        dx = _sharded_as(x, dx)
    return _sharded_as(dy, ddy), dx, None, None, None


_sums_of_products.defvjp(_dw_forward, _dw_backward)


def split(key):
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def packed(x, group_sizes, state, products):
    """Codes of x, for two uses: the result, whose derivative uses x itself; and dw, which keeps
    them. No derivative of dw reaches x through the codes."""
    return products.packed(x, group_sizes, state)


@packed.defjvp
def _(products, primals, tangents):
    del primals, tangents
    raise NotImplementedError(
        f"jgg.{products.op}: the gradient of w keeps x in {products.keeps}, so it cannot be "
        f"differentiated in x. {products.exact} keeps x, for gradients of any order"
    )


@functools.partial(jax.jit, static_argnames="products", inline=INLINE)
def _dbias(dy, bias, group_sizes, products):
    ones = jnp.ones((dy.shape[0], 1), dy.dtype)
    return products.sums(ones, dy, group_sizes, bias.shape[0], bias.dtype)[:, 0]
