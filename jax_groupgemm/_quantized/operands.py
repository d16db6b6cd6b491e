"""What operations of NVFP4 and FP8 check alike, of operands in blocks along rows or columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .._core import check, dtypes, partition
from . import padding
from .array import Quantized


def blocked_axis(op: str, x, axis: int) -> int:
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise TypeError(f"jgg.{op}: axis must be an int, got {check.describe(axis)}")
    if x.ndim and axis in (-1, x.ndim - 1):
        return -1
    if x.ndim > 1 and axis in (-2, x.ndim - 2):
        return -2
    raise ValueError(
        f"jgg.{op}: axis={axis}, expected the last axis of x or the one before it, and x has shape "
        f"{x.shape}"
    )


def seed_of(op: str, key):
    """Two words."""
    try:
        return jax.random.bits(key, (2,), jnp.uint32)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"jgg.{op}: stochastic_rounding_key must be one key of jax.random, got "
            f"{check.describe(key)}"
        ) from error


def one_owner(op: str, operands) -> None:
    """Under Explicit sharding a mesh axis divides one axis of a product, in every operand alike.

    ``operands``: names, arrays and the letters of their axes.
    """
    if partition.explicit_mesh([a for _, a, _ in operands]) is None:
        return
    owners: dict[str, tuple[str, str]] = {}
    divided: dict[str, tuple[str, tuple]] = {}
    for name, a, letters in operands:
        for letter, axes in zip(letters, partition.entries_of(a), strict=False):
            if not axes:
                continue
            other, others = divided.setdefault(letter, (name, axes))
            first = [owners.setdefault(axis, (name, letter)) for axis in axes]
            clash = next((owner for owner in first if owner[1] != letter), None)
            if clash is not None:
                why = f"{clash[0]} shards {clash[1]} over it"
            elif axes != others:
                why = f"{other} shards it over {others}"
            else:
                continue
            instead = "use jax.sharding.reshard first"
            if clash is not None and {clash[1], letter} == {"T", "G"}:
                instead = (
                    "jgg.moe_mlp with a recipe is the layer for that. Its tokens and experts may "
                    "share a mesh axis, and tokens travel to their experts. With "
                    "jax.sharding.reshard every device gets all rows, or all groups"
                )
            raise ValueError(
                f"jgg.{op}: {name} shards {letter} over {axes}, but {why}. Under Explicit sharding "
                f"nothing is gathered silently: {instead}"
            )


def check_padded(op: str, name: str, q: Quantized, rows: int, groups: int, unit: int) -> None:
    expected = (q.shape[0], padding.padded_rows(rows, groups, unit))
    if q.shape != expected:
        raise ValueError(
            f"jgg.{op}: {name} is stored as {q.shape}, expected {expected} because it has {rows} "
            f"rows and group_sizes is ({groups},)"
        )


def existing(op: str, value, shape: tuple[int, ...]) -> jax.Array:
    value = check.array(op, "existing_out", value)
    why = "because the result has this shape"
    check.shape(op, "existing_out", value, shape, "G, N, K", why)
    check.dtype(op, "existing_out", value.dtype, ("float32",))
    return value


def as_promised(group_sizes, unit: int, *operands: Quantized):
    """1, or NaN where operands were not padded for these sizes."""
    rows = operands[0].positions.shape[0]
    positions = padding.padding(group_sizes, rows, unit).positions
    same = [jnp.all(q.positions == positions) for q in operands]
    return dtypes.one_or_nan(jnp.stack(same).all())
