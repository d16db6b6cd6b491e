"""Operations that are no product of arrays, divided among devices as products are: the same plan,
and the same call under Auto sharding.

An operation says in words which axes of its operands and results belong together: a letter for each
axis, and ``WHOLE`` for one that every device has all of. Letters that no result has are contracted.
One device runs ``local(cut, *operands, **static)`` of its parts, whose communication is ``cut``'s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

from . import partition, partitioner, segments
from .partition import WHOLE
from .primitive import out_aval, vary_alike


@dataclasses.dataclass(frozen=True)
class Parts:
    """The words of an operation, its results and its static parameters."""

    words: tuple[str, ...]
    results: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    static: tuple[tuple[str, Any], ...]


class Cut(partition.Plan):
    """A plan, as the program of one device sees it."""

    def per_device(self, bind: Callable, *operands):
        given = self.call.tree.unflatten(operands)
        return list(bind(self, *given, **dict(self.call.product.static)))

    def divides(self, letters: str) -> bool:
        """Whether devices have parts of one of these axes."""
        return any(self.mesh_axes.get(letter) for letter in letters)

    def index(self, letter: str):
        """Which part of that axis this device has, int32."""
        return self._index(letter)

    def total(self, a, letters: str):
        """Sums over devices that have parts of these axes."""
        axes = self._axes(letters)
        return self.mesh.total(a, axes) if axes else a

    def largest(self, a, letters: str):
        """The largest numbers of those devices."""
        axes = self._axes(letters)
        return self.mesh.largest(a, axes) if axes else a

    def _axes(self, letters: str) -> tuple[str, ...]:
        return tuple(axis for letter in letters for axis in self.mesh_axes.get(letter, ()))

    def sizes(self, group_sizes, letter: str, rows: int):
        """Those of groups in this device's ``rows``, which are parts of that axis."""
        if group_sizes is None or not self.divides(letter):
            return group_sizes
        count = rows * self._count(letter)
        starts, _, lengths, _ = segments.sizes(group_sizes).decode(
            count, count, group_sizes.shape[0]
        ).T  # fmt: skip
        first = self.index(letter) * rows
        here = lambda bound: jnp.clip(bound - first, 0, rows)
        return here(starts + lengths) - here(starts)


@dataclasses.dataclass(frozen=True)
class Call:
    """As ``partition.Call``; ``tree`` makes the operands."""

    name: str
    tree: Any
    product: Parts

    def letters(self, operands: Sequence) -> tuple[str, ...]:
        del operands
        return *self.product.words, *self.product.results

    def out_shapes(self, operands: Sequence) -> list[tuple[int, ...]]:
        del operands
        return [*self.product.shapes]

    def plan(self, *fields) -> Cut:
        return Cut(self, *fields)

    def alone(self, bind: Callable, operands: Sequence) -> list:
        return self.plan(self.letters(operands), {}, None, {}).per_device(bind, *operands)


partitioner.describe(Parts)
partitioner.CALLS[Parts] = Call


class NotDivided(Exception):
    """An operation is not divided as its operands are."""


def described(name: str, words, results, operands, static) -> tuple[Call, list]:
    """The call of an operation, and its leaves. ``words`` are a tree as ``operands``; ``results``
    are pairs of a word and a type."""
    leaves, tree = jax.tree.flatten(tuple(operands))
    types = [of for _, of in results]
    parts = Parts(
        tuple(jax.tree.leaves(tuple(words))), tuple(word for word, _ in results),
        tuple(tuple(of.shape) for of in types), tuple(jnp.dtype(of.dtype) for of in types),
        tuple(sorted(static.items())),
    )  # fmt: skip
    return Call(name, tree, parts), leaves


def automatic(name: str, context, words, results, *operands, **static) -> list:
    """The results, where XLA divides the operands of a module that is lowered in that context."""
    call, leaves = described(name, words, results, operands, static)
    leaves = vary_alike(*partitioner.anchored(context, leaves))
    types = [*map(jax.typeof, leaves)]
    outs = [out_aval(of.shape, of.dtype, types) for _, of in results]
    return partitioner.divided(call, context, leaves, outs)


def divides(context) -> bool:
    """Whether operations are divided in such a module: not by GSPMD in a ``shard_map``."""
    of_mesh = isinstance(context, mlir.SPMDAxisContext)
    return jax.config.jax_use_shardy_partitioner or not of_mesh


def explicit(name: str, mesh, words, results, *operands, **static) -> list:
    """The results of explicitly sharded operands.

    Raises:
      NotDivided: some sharding would not be kept.
    """
    call, leaves = described(name, words, results, operands, static)
    types = [*map(jax.typeof, leaves)]
    given = [of.sharding.spec for of in types]
    outs = call.out_shapes(leaves)
    plan = partition.plan_by(
        call, partition.Named(dict(mesh.shape)), [*given, *(P() for _ in outs)],
        [*(of.shape for of in types), *outs], leaves, set(mesh.explicit_axes),
    )  # fmt: skip
    specs = plan.in_specs(leaves)
    if not all(map(partition.same_spec, given, specs, (of.ndim for of in types))):
        raise NotDivided
    run = functools.partial(plan.per_device, partitioner.PER_DEVICE[name])
    out_specs = plan.out_specs(leaves)
    return partition.by_device(run, mesh, leaves, specs, [*out_specs])


def letters(a) -> str:
    """Those of an array's leading axes, before rows "r" and columns "c"."""
    return "abdefghij"[: a.ndim - 2]


def cut_blocks(word: str, shape, block) -> set[str]:
    """The letters of axes whose last block is cut: parts of them would have other blocks."""
    return {of for of, size, n in zip(word, shape, block, strict=True) if n < size and size % n}


def with_whole(word: str, whole: set[str]) -> str:
    """A word where every device has all of some axes."""
    return "".join(WHOLE if letter in whole else letter for letter in word)


def of_scales(word: str, shape, block) -> str:
    """The word of an array's scales, of blocks of that shape. One block that is all of an axis is
    that of each part of it, too."""
    one = {of for of, size, n in zip(word, shape, block, strict=True) if n >= size}
    return with_whole(word, one)
