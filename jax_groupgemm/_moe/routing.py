"""``route``: which row each pair of token and expert has, where rows are sorted by expert."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._core import check, segments
from .._core.operations import operation
from .._core.types import Integers
from .._grouped import fused


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
      overflow: int32 ``()``: how many pairs there was no row for, because of ``max_rows``.
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

    A pair whose index is not one of the experts' does not exist: it has no row. So padding tokens,
    dropped tokens and a variable number of experts for each token need no more than an index
    outside. The same expert twice counts twice.

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
    """
    op = "route"
    index = check.integers(op, "expert_index", expert_index)
    check.shape(op, "expert_index", index, (None, None), "T, k")
    for name, value in (("num_experts", num_experts), ("max_rows", max_rows)):
        if value is not None or name == "num_experts":
            check.count(op, name, value)
    pairs = index.size
    rows = pairs if max_rows is None else min(max_rows, pairs)
    expert = _local(op, index, expert_offset, num_experts)
    key = expert.reshape(-1)
    order, place = fused.order(key)
    if place is None:
        place = (
            jnp.zeros_like(order).at[order].set(lax.iota(order.dtype, pairs), unique_indices=True)
        )
    order, place = order.astype(jnp.int32), place.astype(jnp.int32)
    sizes = jnp.zeros((num_experts + 1,), jnp.int32).at[key].add(1)[:num_experts]
    total = sizes.sum(dtype=jnp.int32)
    order = jnp.where(lax.iota(jnp.int32, rows) < total, order[:rows], -1)
    place = jnp.where((key < num_experts) & (place < rows), place, -1)
    overflow = jnp.maximum(total - jnp.int32(rows), 0)
    return Routing(order, place.reshape(index.shape), sizes, overflow)


def _local(op: str, index, offset, experts: int) -> jax.Array:
    """The experts as int32 in [0, E), and E for those that are not here."""
    if offset is None:
        offset = jnp.int32(0)
    offset = check.integers(op, "expert_offset", offset)
    if offset.shape not in ((), (1,)):
        raise ValueError(f"jgg.{op}: expert_offset has shape {offset.shape}, expected () or (1,)")
    narrow = lambda a: segments._int32(a, 2**31 - 1)
    first, expert = narrow(offset.reshape(())), narrow(index)
    # Their difference may be as large as a uint32. What an int32 does not hold is no expert's.
    local = expert.astype(jnp.uint32) - first.astype(jnp.uint32)
    here = (expert >= first) & (local < experts) & (expert.astype(index.dtype) == index)
    return jnp.where(here, local.astype(jnp.int32), experts)
