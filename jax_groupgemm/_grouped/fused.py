"""A grouped product with all that a kernel may do beside it, as one primitive: rows named by index,
bias, activation, row scale and an existing result.

    out[j] = existing_out[j] + row_scale[t] * activation(x[i] @ w[group(t)] + bias[group(t)])

for every row t of the product, where i = x_index[t] and j = y_index[t]. It means the composition
that ``Fused.composed`` spells out (``_core/composed.py``). Sharded operands (Auto, Explicit) are
composed because a sum over devices has to come before an activation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import costs, dtypes, partition
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.products import Mm
from .._core.segments import Metadata
from .._kernels import choose
from . import call, primitives
from .activation_backward import activation_backward
from .activations import activate
from .call import NO_EPILOGUE, Epilogue


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("x_index", "y_index", "place"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Lists:
    """Rows that are named by index, in blocks of M: x is (A, M, K) and the result (T, M, N).

    Attributes:
      x_index: int32 (T,), the block of x. Where it is outside of [0, A) the products are zeros,
        whatever w holds.
      y_index: int32 (T,), a permutation: the block of the result. None for the same order.
      place: its inverse, where that is known.
    """

    x_index: Any
    y_index: Any = None
    place: Any = None

    @property
    def count(self) -> int:
        return self.x_index.shape[0]

    def valid(self, x) -> jax.Array:
        return (self.x_index >= 0) & (self.x_index < x.shape[0])

    def take(self, x) -> jax.Array:
        """The rows that are multiplied, (T * M, K)."""
        valid = self.valid(x)
        # In the dtype of sums, for the sake of the derivative: rows may be gathered more than once.
        wide = x.astype(dtypes.accumulator_dtype(x.dtype))
        wide = partition.take(wide, jnp.where(valid, self.x_index, 0))
        rows = jnp.where(valid[:, None, None], wide.astype(x.dtype), jnp.zeros((), x.dtype))
        return partition.merge(rows, (2, 1))

    def put(self, y) -> jax.Array:
        """``y``, (T, M, N), in the order of the result."""
        if self.y_index is None:
            return y
        return partition.take(y, inverse(self.y_index) if self.place is None else self.place)

    def rows(self, x) -> dict[str, Any]:
        """As lists of rows; -1 for those that x has not."""
        x_index = jnp.where(self.valid(x), self.x_index, -1)
        lists = {"x_rows": x_index, "y_rows": self.y_index}
        return {name: _rows(index, x.shape[1]) for name, index in lists.items()}


def _rows(index, m: int):
    if m == 1 or index is None:
        return index
    rows = index[:, None] * m + lax.iota(jnp.int32, m)[None]
    return jnp.where(index[:, None] < 0, -1, rows).reshape(-1)


class Fused:
    """A grouped product and what a kernel may do beside it.

    Args:
      name: of the primitive.
      product: ``product(x, w, metadata, product)``.
      call: ``call(platform, x, w, metadata, product, epilogue, lists)`` is all of it as one custom
        call, or None where no kernel takes it.
      takes_lists: ``takes_lists(x, w, product)``, whether a kernel may take lists.
    """

    def __init__(self, name: str, product: Callable, call: Callable,
                 takes_lists: Callable = lambda *_: False):  # fmt: skip
        self.product, self.takes_lists = product, takes_lists
        self._call = call
        self._as_one = Composed(
            name, self.composed, self._one_call, cost=_cost, vjp=(self._forward, self._backward)
        )
        self._as_two = Composed(
            f"{name}_preactivation", self._composed_preactivated, self._two_calls, cost=_two_costs
        )

    def __call__(self, x, w, metadata: Metadata, product: Mm, epilogue: Epilogue = NO_EPILOGUE,
                 lists: Lists | None = None, *, fused: bool = True):  # fmt: skip
        """The result is rounded once. Rows of no group keep existing_out, or are zeros. Without
        ``fused`` it is composed."""
        if lists is None and epilogue.nothing:
            return self.product(x, w, metadata, product)
        run = self._as_one if fused else self.composed
        return run(x, w, metadata, epilogue, lists, product=product)

    def preactivated(self, x, w, metadata: Metadata, epilogue: Epilogue, product: Mm):
        """The result, and what its activation is of, (rows, N), in the result's dtype. The epilogue
        is an activation and perhaps a bias."""
        return self._as_two(x, w, metadata, epilogue, product=product)

    def _composed_preactivated(self, x, w, metadata, epilogue: Epilogue, *, product: Mm):
        run = lambda p: self.product(x, w, metadata, p)
        return self.activated(run, metadata, epilogue, product)

    def activated(self, run: Callable, metadata, epilogue: Epilogue, product: Mm):
        """As :meth:`preactivated`, of ``run(product)``."""
        y = self._preactivation(run, metadata, epilogue, product)
        wide = y.astype(dtypes.accumulator_dtype(product.out_dtype))
        out = activate(wide, epilogue.activation).astype(product.out_dtype)
        return out, y.astype(product.out_dtype)

    # Where a gradient is taken, the operand of an activation or of a scale is kept, rounded to half
    # the bytes. The value is made from that one, which is the faster kernel.

    def _forward(self, x, w, metadata, epilogue: Epilogue, lists, *, product: Mm, moves):
        if lists is not None or not jnp.issubdtype(product.out_dtype, jnp.floating):
            return None
        if epilogue.activation is not None:
            if epilogue.row_scale is not None or epilogue.existing_out is not None:
                return None
            rounded = dataclasses.replace(epilogue, rounds=True)
            return self.preactivated(x, w, metadata, rounded, product)
        if epilogue.row_scale is None or epilogue.bias is not None:
            return None
        y = self.product(x, w, metadata, product)
        out = self.with_options(lambda _: y, metadata, w, epilogue, product)
        return out, y if moves[3].row_scale else None

    def _backward(self, kept, operands, cts, *, product: Mm):
        """``kept`` is the operand of the activation or of the scale."""
        x, w, metadata, epilogue, _ = operands
        (ct,) = cts
        if epilogue.row_scale is not None:
            return self._scale_backward(kept, x, w, metadata, epilogue, ct, product)
        dh = activation_backward(kept, ct, epilogue.activation)
        of_sums = product.replace(out_dtype=kept.dtype)
        (dx, dw), dbias = product_cotangents(self.product, x, w, metadata, of_sums, dh), None
        if epilogue.bias is not None:
            dbias = bias_cotangent(epilogue.bias, metadata, product, dh)
        return dx, dw, None, dataclasses.replace(epilogue, bias=dbias), None

    def _scale_backward(self, y, x, w, metadata, epilogue: Epilogue, ct, product: Mm):
        covered = metadata.covered(product.rows, product.sizes(w)[0])
        wide = dtypes.accumulator_dtype(product.out_dtype)
        # Rows of no group may hold anything, and so may their scales.
        scale = jnp.where(covered, epilogue.row_scale.astype(wide), 0)[:, None]
        scaled = (ct.astype(wide) * scale).astype(ct.dtype)
        dx, dw = product_cotangents(self.product, x, w, metadata, product, scaled)
        dscale, old = None, epilogue.existing_out
        if y is not None:
            dots = (ct.astype(wide) * y.astype(wide)).sum(1)
            dscale = jnp.where(covered, dots, 0).astype(epilogue.row_scale.dtype)
        more = dataclasses.replace(
            epilogue, row_scale=dscale, existing_out=None if old is None else ct.astype(old.dtype)
        )
        return dx, dw, None, more, None

    def composed(self, x, w, metadata: Metadata, epilogue: Epilogue, lists: Lists | None, *,
                 product: Mm):  # fmt: skip
        """Its meaning in terms of grouped products and elementwise operations."""
        if lists is None:
            return self.with_options(
                lambda p: self.product(x, w, metadata, p), metadata, w, epilogue, product
            )

        def blocks(p: Mm):
            y = self.product(lists.take(x), w, metadata, p)
            y = partition.split(y, ((lists.count, x.shape[1]), y.shape[1:]))
            # Rows that x has not are zeros, but zeros times an infinite matrix are not.
            return jnp.where(lists.valid(x)[:, None, None], y, jnp.zeros((), y.dtype))

        if epilogue.nothing:
            return lists.put(blocks(product))
        return self.with_options(
            lambda p: partition.merge(blocks(p), (2, 1)), metadata, w, epilogue, product,
            lambda y: lists.put(partition.split(y, ((lists.count, x.shape[1]), y.shape[1:]))),
        )  # fmt: skip

    def with_options(self, run: Callable, metadata, w, epilogue: Epilogue, product: Mm,
                      put: Callable = lambda y: y):  # fmt: skip
        """``run(product)``, (rows, N), with its options; ``put`` gives them the result's order."""
        rows = product.rows
        sum_dtype = dtypes.accumulator_dtype(product.out_dtype)
        y = self._preactivation(run, metadata, epilogue, product)
        y = activate(y.astype(sum_dtype), epilogue.activation)
        if epilogue.row_scale is not None:
            # Rows of no group are zeros whatever their scale.
            covered = metadata.covered(rows, w.shape[0])
            scale = jnp.where(covered, epilogue.row_scale.astype(sum_dtype), 0)
            y = y * scale[:, None]
        y = put(y)
        if epilogue.existing_out is not None:
            y = y + epilogue.existing_out.astype(sum_dtype)
        return y.astype(product.out_dtype)

    def _preactivation(self, run: Callable, metadata, epilogue: Epilogue, product: Mm):
        """``run(product)`` with its bias: float32, or rounded."""
        sum_dtype = dtypes.accumulator_dtype(product.out_dtype)
        if epilogue.rounds and epilogue.bias is None:
            return run(product)
        summed = product.replace(
            out_dtype=sum_dtype, cotangent_dtype=dtypes.cotangent_dtype(product.out_dtype)
        )
        y = run(summed)
        if epilogue.bias is not None:
            # bias[group(t)] is itself a grouped product, with K = 1.
            ones = jnp.ones((product.rows, 1), epilogue.bias.dtype)
            caller = dataclasses.replace(product.caller, operands=("x", "bias"))
            exact = of_any_shape(summed).replace(
                transpose_w=False, precision=lax.Precision.HIGHEST, caller=caller
            )
            y = y + primitives.mm(ones, epilogue.bias[:, None, :], metadata, exact)
        return y.astype(product.out_dtype) if epilogue.rounds else y

    def _two_calls(self, platform, x, w, metadata, epilogue, *, product):
        return self._call(platform, x, w, metadata, product, epilogue, None, preactivation=True)

    def _one_call(self, platform, x, w, metadata, epilogue, lists, *, product):
        return self._call(platform, x, w, metadata, product, epilogue, lists)


def product_cotangents(run: Callable, x, w, metadata, product: Mm, ct):
    """Those of x and w, of ``run(x, w, metadata, product)``."""
    (dx,) = jax.linear_transpose(lambda x: run(x, w, metadata, product), x)(ct)
    return dx, weight_cotangent(run, x, w, metadata, product, ct)


def weight_cotangent(run: Callable, x, w, metadata, product: Mm, ct):
    """That of w alone, an array or quantized."""
    of_w = lambda w: run(x, w, metadata, product)
    if isinstance(w, jax.Array):
        return jax.linear_transpose(of_w, w)(ct)[0]
    return jax.vjp(of_w, w)[1](ct)[0]


def of_any_shape(product: Mm) -> Mm:
    """Without the name of a kernel that has no generic one behind it."""
    alone = product.implementation in ("sm100", "sm89")
    return product.replace(implementation=None) if alone else product


def bias_cotangent(bias, metadata, product: Mm, ct):
    """That of a bias whose rows are added to groups of rows."""
    ones = jnp.ones((product.rows, 1), ct.dtype)
    exact = of_any_shape(product).replace(
        transpose_w=False, precision=lax.Precision.HIGHEST, out_dtype=ct.dtype
    )
    to = lambda bias: primitives.mm(ones, bias.astype(ct.dtype)[:, None, :], metadata, exact)
    return jax.vjp(to, bias)[1](ct)[0]


def _mm_call(platform, x, w, metadata, product: Mm, epilogue: Epilogue, lists: Lists | None,
             preactivation: bool = False):  # fmt: skip
    flat = x
    if lists is not None:
        flat = jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], x.shape[2]), x.dtype)
    problem = call.mm_problem(
        platform, flat, w, metadata, product, epilogue, lists=lists is not None,
        y_list=lists is not None and lists.y_index is not None,
    )  # fmt: skip
    if preactivation:
        problem = dataclasses.replace(problem, preactivation=True)
    plan = choose.fused(problem)
    if plan is None:
        return None
    if lists is None:
        return call.mm(plan, x, w, metadata, product, epilogue, preactivation=preactivation)
    out = call.mm(
        plan, x.reshape(flat.shape), w, metadata, product, _flat(epilogue), **lists.rows(x)
    )
    return out.reshape(lists.count, x.shape[1], out.shape[1])


def _flat(epilogue: Epilogue) -> Epilogue:
    old = epilogue.existing_out
    if old is None:
        return epilogue
    return dataclasses.replace(epilogue, existing_out=old.reshape(-1, old.shape[2]))


def _cost(operands, values, outs, *, product: Mm) -> Cost:
    x, w, metadata, epilogue, lists = operands
    known = [values[2].values, values[2].group_offset][: len(metadata.arrays)]
    if lists is not None:
        x = jax.ShapeDtypeStruct((product.rows, x.shape[2]), x.dtype)
    cost, rows, weights = costs.product(x, w, metadata, known, outs[0], product)
    indices = () if lists is None else (lists.x_index, lists.y_index)
    more = Cost(0, costs.bytes_of((epilogue.row_scale, epilogue.existing_out, indices)))
    return cost + costs.bias_cost(epilogue.bias, rows, weights) + more


def _two_costs(operands, values, outs, *, product: Mm) -> Cost:
    cost = _cost((*operands, None), [*values, None], outs, product=product)
    return cost + Cost(0, costs.bytes_of((outs[1],)))


def order(values) -> tuple[jax.Array, jax.Array | None]:
    """``argsort(values, stable=True)``, and its inverse where that comes with it: of few values,
    where both are sums, which is faster than sorting."""
    if values.size > choose.COMPARE_UP_TO:
        return jnp.argsort(values, stable=True), None
    i = lax.iota(jnp.int32, values.size)
    before = values[None] < values[:, None]
    same = (values[None] == values[:, None]) & (i[None] < i[:, None])
    place = (before | same).sum(1, dtype=jnp.int32)
    return inverse(place), place


def inverse(permutation) -> jax.Array:
    """``argsort`` of a permutation."""
    if permutation.size > choose.COMPARE_UP_TO:
        return jnp.argsort(permutation)
    i = lax.iota(jnp.int32, permutation.size)
    # Under a vmap over a mesh axis, JAX cannot select from an array that has no mesh. It can
    # multiply one.
    here = (permutation[None] == i[:, None]).astype(jnp.int32)
    return (here * i[None]).sum(1, dtype=jnp.int32)


MM = Fused("jgg_fused_mm", primitives.mm, _mm_call, call.may_take_lists)
