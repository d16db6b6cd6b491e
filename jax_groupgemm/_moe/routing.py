"""``route``: which row each pair of token and expert has, where rows are sorted by expert."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._core import check, costs
from .._core.composed import Composed
from .._core.operations import operation
from .._core.primitive import vary_alike
from .._core.types import Integers
from .._grouped import fused
from . import call


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("order", "place", "group_sizes", "overflow"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Routing:
    """Where the pairs of ``expert_index``, (T, k), stand among R rows that are sorted by expert.

    Attributes:
      order: int32 ``(R,)``: the pair ``t * k + j`` of each row, -1 in rows behind the last.
      place: int32 ``(T, k)``: the row of each pair, -1 where the pair does not exist.
      group_sizes: int32 ``(E,)``: the rows of each expert.
      overflow: int32 ``()``: how many pairs have no row, because of ``max_rows``.

    Examples:
      >>> routing = jgg.route(jnp.array([[1, 0], [1, 2]]), 3)
      >>> routing.place.tolist()  # rows of each token
      [[1, 0], [2, 3]]
    """

    order: jax.Array
    place: jax.Array
    group_sizes: jax.Array
    overflow: jax.Array


@operation
def route(
    expert_index: Integers,
    num_experts: int,
    *,
    expert_offset: ArrayLike | None = None,
    max_rows: int | None = None,
) -> Routing:
    """``order = argsort(expert_index)``, stable; **pairs of token and expert are grouped** by
    expert.

    A pair whose index names no expert does not exist: it has no row. So give padding tokens,
    dropped tokens and missing choices of a token an index outside of the range. The same expert
    twice counts twice.

    Args:
      expert_index: integers ``(T, k)``, of any integer dtype.
      num_experts: E.
      expert_offset: integer of shape ``()`` or ``(1,)``, may be traced: the first of the E experts
        that are here, of a longer list (expert parallelism).
      max_rows: R, at most. By default, and at most, ``T * k``, which is enough for any routing.

    Returns:
      A :class:`Routing`. Tokens of one expert keep their order.

    Raises:
      ValueError: shapes do not fit, or ``num_experts`` or ``max_rows`` is negative.
      TypeError: ``expert_index`` or ``expert_offset`` are not integers.

    Examples:
      >>> routing = jgg.route(jnp.array([[1, 0], [1, 2]]), 3)  # two tokens, two experts each
      >>> routing.group_sizes.tolist(), routing.order.tolist()
      ([1, 2, 1], [1, 0, 2, 3])
    """
    op = "route"
    index = check.integers(op, "expert_index", expert_index)
    check.shape(op, "expert_index", index, (None, None), "T, k")
    for name, value in (("num_experts", num_experts), ("max_rows", max_rows)):
        if value is not None or name == "num_experts":
            check.count(op, name, value)
    rows = index.size if max_rows is None else min(max_rows, index.size)
    offset = None if expert_offset is None else first_expert(op, expert_offset)
    return _ROUTE(index, offset, rows=rows, experts=num_experts)


def first_expert(op: str, offset: ArrayLike) -> jax.Array:
    offset = check.integers(op, "expert_offset", offset)
    if offset.shape not in ((), (1,)):
        raise ValueError(f"jgg.{op}: expert_offset has shape {offset.shape}, expected () or (1,)")
    wider = jnp.iinfo(offset.dtype).max > jnp.iinfo(jnp.int32).max
    return offset.reshape(()) if wider else offset.reshape(()).astype(jnp.int32)


def _routed(index, offset, *, rows: int, experts: int) -> Routing:
    key = local_experts(index, offset, experts).reshape(-1)
    order, place = lax.platform_dependent(key, cpu=_sorted, default=_ordered)
    sizes = jnp.zeros((experts + 1,), jnp.int32).at[key].add(1)[:experts]
    total = sizes.sum(dtype=jnp.int32)
    order = jnp.where(lax.iota(jnp.int32, rows) < total, order[:rows], -1)
    place = jnp.where((key < experts) & (place < rows), place, -1)
    overflow = jnp.maximum(total - jnp.int32(rows), 0)
    return Routing(order, place.reshape(index.shape), sizes, overflow)


def _sorted(key) -> tuple[jax.Array, jax.Array]:
    """The order of pairs, and its inverse."""
    # Not argsort, whose indices would not vary over the mesh axes that the keys vary over.
    key, rows = vary_alike(key, lax.iota(jnp.int32, key.size))
    _, order = lax.sort((key, rows), num_keys=1, is_stable=True)
    return order, jnp.zeros_like(order).at[order].set(rows, unique_indices=True)


def _ordered(key) -> tuple[jax.Array, jax.Array]:
    """The same; few are compared, which is slower than sorting on CPUs."""
    order, place = fused.order(key)
    if place is None or not key.size:  # sums of nothing do not vary as the keys do
        return _sorted(key)
    return order.astype(jnp.int32), place.astype(jnp.int32)


def _routed_by_kernel(platform: str, index, offset, *, rows: int, experts: int) -> Routing | None:
    if not call.takes_route(platform, index.size, rows, experts):
        return None
    index, offset = as_int32(index, offset, experts)
    return Routing(*call.route(index, offset, rows=rows, experts=experts))


def local_experts(index, first, experts: int) -> jax.Array:
    """The experts as int32 in [0, E), and E for those that are not here: exact for integers of any
    dtypes."""
    first = jnp.zeros((), index.dtype) if first is None else first
    wide = jnp.uint64 if 8 in (index.dtype.itemsize, first.dtype.itemsize) else jnp.uint32
    here, start = index.astype(wide), first.astype(wide)
    local = here - start
    # Numbers of one sign compare as unsigned ones do. A difference of two signs may not fit.
    outside = jnp.where((index < 0) == (first < 0), here < start, (index < 0) | (local < here))
    return jnp.where(outside | (local >= experts), experts, local).astype(jnp.int32)


def tokens_of_rows(routing: Routing) -> jax.Array:
    """The token of each row, -1 where it has none."""
    k = routing.place.shape[1]
    return jnp.where(routing.order >= 0, routing.order // k, -1).astype(jnp.int32)


def weight_of_rows(weight, routing: Routing) -> jax.Array:
    """The weight of each row, zero where it has none."""
    of_row = weight.reshape(-1)[jnp.maximum(routing.order, 0)]
    return jnp.where(routing.order >= 0, of_row, jnp.zeros((), weight.dtype))


def as_int32(index, offset, experts: int) -> tuple[jax.Array, jax.Array | None]:
    """The same pairs for a kernel."""
    if index.dtype == jnp.int32 and (offset is None or offset.dtype == jnp.int32):
        return index, offset
    return local_experts(index, offset, experts), None


_ROUTE = Composed("jgg_route", _routed, _routed_by_kernel, cost=costs.conversion)
