"""Tokens to the devices that hold their experts, and sums back: ``send`` and ``collect``.

Each is the other's transpose, as ``dispatch`` and ``combine`` are. A plan says how tokens travel:

===========  =====================================================================================
plan         a token goes
===========  =====================================================================================
Gather       to every device of the axis: one all-gather, and one all-to-all of sums back
Exchange     once to each device that holds one of its experts, in rounds of all-to-alls
===========  =====================================================================================

Rows travel in the dtype that they have, or in FP8 with a scale for each 128 numbers: then they are
what those codes stand for. What comes back to a token is added in float32 in the order
of devices and rounded once. So results are the same in every run. Both plans give
the same ones, unless XLA contracts multiply-adds of one of them, as it does on CPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._core import batching, costs, dtypes
from .._core.composed import Composed
from .._core.primitive import vary_alike
from .._fp8.quantize import fp8_quantize
from .._quantized import convert
from .permute import combined, dispatched
from .routing import Routing, route


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=(), meta_fields=("axis", "devices")
)
@dataclasses.dataclass(frozen=True)
class Gather:
    """All tokens of the axis on each of its devices, in the order of devices."""

    axis: Hashable
    devices: int

    def send(self, tokens):
        return tuple(lax.all_gather(x, self.axis, tiled=True) for x in tokens)

    def collect(self, rows, out_dtypes):
        return tuple(map(self._sum, rows, out_dtypes))

    def _sum(self, rows, dtype):
        # psum_scatter moves the same bytes, but adds in the dtype of rows.
        parts = rows.reshape(self.devices, rows.shape[0] // self.devices, *rows.shape[1:])
        parts = lax.all_to_all(parts, self.axis, 0, 0)
        total = parts[0].astype(dtypes.accumulator_dtype(rows.dtype))
        for device in range(1, self.devices):
            total = total + parts[device].astype(total.dtype)
        return total.astype(dtype)

    @property
    def missing(self):
        """How many tokens a device had no room for."""
        return jnp.int32(0)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("routing", "counts", "rounds"),
    meta_fields=("axis", "chunk", "room"),
)
@dataclasses.dataclass(frozen=True)
class Exchange:
    """Tokens on the devices of their experts; those of one device lie together, in its order.

    Attributes:
      routing: of this device's tokens to devices, whose groups are devices.
      counts: int32 (source, destination), the tokens that go from one device to another.
      rounds: int32 (), as many as the fullest pair of devices needs.
      chunk: tokens that each pair of devices exchanges in a round.
      room: rows to receive.
    """

    routing: Routing
    counts: jax.Array
    rounds: jax.Array
    axis: Hashable
    chunk: int
    room: int

    def send(self, tokens):
        rows = [dispatched(x, self.routing) for x in tokens]
        return self._move(rows, self.counts, self.room)

    def collect(self, rows, out_dtypes):
        back = self._move(rows, self.counts.T, self.routing.order.shape[0])
        return tuple(
            combined(of, self.routing, None, dtype)
            for of, dtype in zip(back, out_dtypes, strict=True)
        )

    @property
    def missing(self):
        arriving = self.counts[:, lax.axis_index(self.axis)].sum(dtype=jnp.int32)
        return jnp.maximum(arriving - self.room, 0)

    def _move(self, arrays, counts, size: int):
        """``arrays``, whose rows are sorted by destination, as arrays of ``size`` rows that are
        sorted by source. Rows that nobody sent are zeros."""
        here = lax.axis_index(self.axis)
        leaving, arriving = counts[here], counts[:, here]
        first = lambda of: (jnp.cumsum(of, dtype=jnp.int32) - of)[:, None]
        start, landing = first(leaving), first(arriving)
        devices = counts.shape[0]
        # A row that is not there is read behind the last, and one that is nobody's written there.
        behind = size + lax.iota(jnp.int32, devices * self.chunk).reshape(devices, self.chunk)

        def one_round(number, received):
            place = (number * self.chunk + lax.iota(jnp.int32, self.chunk))[None]
            there = jnp.where(place < arriving[:, None], landing + place, behind)
            moved = []
            for rows, to in zip(arrays, received, strict=True):
                source = jnp.where(place < leaving[:, None], start + place, rows.shape[0])
                block = rows.at[source].get(mode="fill", fill_value=0)
                block = lax.all_to_all(block, self.axis, 0, 0)
                moved.append(to.at[there].set(block, mode="drop", unique_indices=True))
            return tuple(moved)

        empty = [jnp.zeros((size, *rows.shape[1:]), rows.dtype) for rows in arrays]
        received = vary_alike(*empty, *arrays)[: len(empty)]
        # The first round is no loop, so that XLA may run something else beside it.
        state = jnp.int32(1), one_round(jnp.int32(0), received)
        return lax.while_loop(
            lambda state: state[0] < self.rounds,
            lambda state: (state[0] + 1, one_round(*state)),
            state,
        )[1]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("plan",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of plans, along the first axis of each of its arrays, and of rows."""

    plan: Plan

    def send(self, tokens):
        return jax.vmap(lambda tokens, plan: plan.send(tokens))(tokens, self.plan)

    def collect(self, rows, out_dtypes):
        return jax.vmap(lambda rows, plan: plan.collect(rows, out_dtypes))(rows, self.plan)


Plan = Gather | Exchange | Batch


def exchange(index, experts: int, axis: Hashable, *, chunk: int, room: int) -> Exchange:
    """The plan for tokens with these experts, (T, k). Each device of the axis has some of the
    experts."""
    devices = lax.axis_size(axis)
    owner = jnp.where((index >= 0) & (index < devices * experts), index // experts, devices)
    routing = route(_once(owner, devices), devices)
    counts = lax.all_gather(routing.group_sizes, axis)
    fullest = lax.pmax(routing.group_sizes.max(), axis)
    return Exchange(routing, counts, -(-fullest // chunk), axis, chunk, room)


def _once(owner, devices: int):
    """The devices of each token, each of them once, in their order."""
    owner = jnp.sort(owner, axis=1)
    again = jnp.pad(owner[:, 1:] == owner[:, :-1], ((0, 0), (1, 0)))
    owner = jnp.where(again, devices, owner)
    if owner.shape[1] > devices:
        owner = jnp.sort(owner, axis=1)[:, :devices]
    return owner


def send(plan: Plan | None, *tokens, in_fp8: int = 0):
    """Arrays with a row for each token, on the devices that its experts are on; they travel in one
    loop, and the first ``in_fp8`` of them in FP8."""
    return tokens if plan is None else _SEND(tokens, plan, in_fp8=in_fp8)


def collect(plan: Plan | None, *rows, out_dtypes: Sequence[DTypeLike], in_fp8: int = 0):
    """Rows of tokens that were sent, added up where the tokens are. ``in_fp8`` is how their
    cotangents are sent."""
    if plan is None:
        return tuple(of.astype(dtype) for of, dtype in zip(rows, out_dtypes, strict=True))
    return _COLLECT(rows, plan, out_dtypes=tuple(jnp.dtype(d) for d in out_dtypes), in_fp8=in_fp8)


@jax.custom_jvp
def _rounded(x):
    """What codes of x stand for; its derivative is passed straight through."""
    return convert._dequantize(fp8_quantize(x), x.dtype)


@_rounded.defjvp
def _(primals, tangents):
    return _rounded(*primals), tangents[0]


def _sent(tokens, plan, *, in_fp8: int):
    return plan.send((*map(_rounded, tokens[:in_fp8]), *tokens[in_fp8:]))


def _sent_as_codes(_, tokens, plan, *, in_fp8: int):
    """The same, but codes and scales travel; None if nothing is in FP8."""
    if not in_fp8:
        return None
    codes = [fp8_quantize(x) for x in tokens[:in_fp8]]
    leaves, tree = jax.tree.flatten(codes)
    bytes_of = lambda a: lax.bitcast_convert_type(a, jnp.uint8) if a.dtype.itemsize == 1 else a
    moved = plan.send((*map(bytes_of, leaves), *tokens[in_fp8:]))
    arrived = [
        lax.bitcast_convert_type(a, leaf.dtype) if leaf.dtype.itemsize == 1 else a
        for a, leaf in zip(moved, leaves, strict=False)
    ]
    values = [
        convert._dequantize(q, x.dtype)
        for q, x in zip(tree.unflatten(arrived), tokens, strict=False)
    ]
    return (*values, *moved[len(leaves) :])


def _batched(size: int, operands, axes):
    """The operands of a batch: it is still one operation, or it could not be transposed."""
    first = functools.partial(batching.first, size=size)
    rows, plan = jax.tree.map(first, operands, axes)
    return rows, Batch(plan)


def _types(arrays) -> tuple:
    return tuple(a.dtype for a in arrays)


_SEND = Composed(
    "jgg_send",
    _sent,
    _sent_as_codes,
    batch=lambda *given, **static: _SEND(*_batched(*given), **static),
    cost=costs.conversion,
    vjp=(
        lambda tokens, plan, *, in_fp8: (_SEND(tokens, plan, in_fp8=in_fp8), ()),
        lambda _, operands, cts, *, in_fp8: (
            _COLLECT(tuple(cts), operands[1], out_dtypes=_types(operands[0]), in_fp8=in_fp8), None,
        ),
    ),
)  # fmt: skip
_COLLECT = Composed(
    "jgg_collect",
    lambda rows, plan, *, out_dtypes, in_fp8: plan.collect(rows, out_dtypes),
    lambda *_, **__: None,
    batch=lambda *given, **static: _COLLECT(*_batched(*given), **static),
    cost=costs.conversion,
    vjp=(
        lambda rows, plan, **static: (_COLLECT(rows, plan, **static), ()),
        lambda _, operands, cts, *, in_fp8, **__: (
            _SEND(
                tuple(map(lax.convert_element_type, cts, _types(operands[0]))),
                operands[1],
                in_fp8=in_fp8,
            ),
            None,
        ),
    ),
)
