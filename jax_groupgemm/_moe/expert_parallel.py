"""Experts on several devices: how many devices a token meets, and the plan of how it gets there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax

from .._core import check
from .._core.primitive import vary_alike
from .._core.types import Transport
from . import transport
from .routing import local_experts
from .transport import Exchange, Gather


@dataclasses.dataclass(frozen=True)
class Axis:
    """The mesh axis, or axes, along which experts are on several devices.

    Attributes:
      name: as ``jax.lax`` takes it in ``shard_map``.
      transport: "gather" or "all_to_all"; None is whichever moves less.
    """

    name: Hashable
    transport: str | None = None


def checked_axis(op: str, axis_name, transport, expert_offset) -> Axis | None:
    """None where nothing is on several devices."""
    known = get_args(Transport)
    if transport is not None and not (isinstance(transport, str) and transport in known):
        said = " or ".join(map(repr, known))
        raise ValueError(f"jgg.{op}: transport={check.describe(transport)} is not {said}")
    if axis_name is None:
        return None
    if expert_offset is not None:
        raise ValueError(
            f"jgg.{op}: with axis_name, expert_index holds experts of all devices and each device "
            "knows which are its own. Leave out expert_offset."
        )
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not all(isinstance(name, Hashable) and not isinstance(name, jax.Array) for name in names):
        raise TypeError(
            f"jgg.{op}: axis_name must be the name of a mesh axis, or a tuple of names, got "
            f"{check.describe(axis_name)}"
        )
    try:
        jax.lax.axis_size(axis_name)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(
            f"jgg.{op}: axis_name={axis_name!r} is no axis of a jax.shard_map around this call"
        ) from error
    if not {*names} <= {*jax.sharding.get_abstract_mesh().manual_axes}:
        raise ValueError(
            f"jgg.{op}: axis_name={axis_name!r} is an axis of a jax.vmap, and experts are on "
            "devices: name a mesh axis of a jax.shard_map around this call"
        )
    return Axis(axis_name, transport)


@dataclasses.dataclass(frozen=True)
class Arrived:
    """The tokens that a device multiplies.

    Attributes:
      index: int32 (N, k), the experts of all devices; -1 where there is none.
      expert_offset: the first expert of this device.
      plan: how they came; None where they were here.
    """

    index: jax.Array
    expert_offset: jax.Array | None
    plan: Gather | Exchange | None


def arrive(index, offset, experts: int, axis: Axis | None, max_rows: int | None) -> Arrived:
    """What arrives, where ``index``, (T, k), is of this device's tokens and each device has so many
    ``experts``."""
    devices = 1 if axis is None else lax.axis_size(axis.name)
    if axis is None or devices == 1 or 0 in (index.size, experts):
        return Arrived(index, offset, None)
    index = local_experts(index, offset, devices * experts)
    index, here = vary_alike(index, lax.axis_index(axis.name))
    plan = _plan(index, experts, devices, axis, max_rows)
    # A row that nobody sent is zeros.
    (index,) = plan.send((index + 1,))
    return Arrived(index - 1, here * experts, plan)


def _plan(index, experts: int, devices: int, axis: Axis, max_rows: int | None):
    tokens, k = index.shape
    share = share_of_devices(k, experts, devices)
    if (axis.transport or default_transport(tokens, k, experts, devices)) == "gather":
        return Gather(axis.name, devices)
    room = devices * tokens if max_rows is None else min(devices * tokens, max_rows)
    return transport.exchange(
        index, experts, axis.name, chunk=chunk_of(tokens, share), room=max(room, 1)
    )


#: Tokens that need not travel, from which "all_to_all" pays: four H100s took 0.25 ms more for its
#: rounds than for "gather", in which as many rows of 4 KiB travel, there and back.
_FEW = 8192


def default_transport(tokens: int, k: int, experts: int, devices: int) -> str:
    """The transport that a layer takes where each device has so many tokens."""
    share = share_of_devices(k, experts, devices)
    spared = (1 - share) * (devices - 1) * tokens
    return "gather" if share > 0.5 or spared < _FEW else "all_to_all"


def share_of_devices(k: int, experts: int, devices: int) -> float:
    """The share of devices that hold one of a token's k experts, if any k are as likely.

    It is about ``1 - (1 - 1 / devices) ** k``, and less where few experts are on a device."""
    every = experts * devices
    k = min(k, every)
    return 1 - math.comb(every - experts, k) / math.comb(every, k)


def chunk_of(tokens: int, share: float) -> int:
    """Tokens of each pair of devices in a round: those of an even routing, and a quarter more."""
    return min(tokens, max(1, math.ceil(1.25 * share * tokens)))


def overflow(routing, plan: Gather | Exchange | None, axis: Axis | None):
    """How much more than ``max_rows`` the fullest device has, at least; 0 if all have room."""
    if plan is None or axis is None:
        return routing.overflow
    return lax.pmax(jnp.maximum(routing.overflow, plan.missing), axis.name)
