"""How one grouped product is divided among devices: one plan, for every sharding mode.

Every axis of every operand may be sharded, because segments are data:

=================  ======================================================================
sharded axis       each device
=================  ======================================================================
N (of mm)          computes its own columns; no communication
K (contracted)     computes a partial product; one all-reduce
T (rows)           keeps the part of each segment that lies in its rows; mm needs no
                   communication, wgrad one all-reduce
G (weights)        skips the segments of other devices' weights; mm needs one all-reduce,
                   wgrad none
=================  ======================================================================

A quantized weight is sharded in whole quantization groups: every operand of ``qmm`` that has the
axis along which they run has it in its own unit (elements, uint32 words, groups).

Under Auto sharding the plan answers XLA's partitioner (``partitioner.py``); under Explicit sharding
it becomes a ``shard_map`` around the operation (``explicit``). Metadata is always replicated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from . import segments
from .products import Mm, Product, Wgrad
from .segments import WEIGHT, X_START, Y_START, Metadata

#: The letter of axes that are on every device.
WHOLE = "."


@dataclasses.dataclass(frozen=True)
class Call:
    """A grouped product that is to be divided; ``tree`` makes (a, b, metadata) of its operands."""

    name: str
    tree: Any
    product: Product

    def letters(self, operands: Sequence) -> tuple[str, ...]:
        """Axis letters of each operand that is not metadata, and of the result."""
        _, b, metadata = self.tree.unflatten(operands)
        return self.product.letters(jax.tree.leaves(b), metadata.form.aligned)

    def out_shape(self, operands: Sequence) -> tuple[int, ...]:
        a, b, _ = self.tree.unflatten(operands)
        return self.product.out_shape(a, b)

    def out_shapes(self, operands: Sequence) -> list[tuple[int, ...]]:
        """A shape for every result; a product has one."""
        return [self.out_shape(operands)]

    def plan(self, *fields) -> Plan:
        return Plan(self, *fields)

    def alone(self, bind: Callable, operands: Sequence) -> list:
        """The results where one device has all."""
        return [bind(*self.tree.unflatten(operands), self.product)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which mesh axes divide which axis letter."""

    call: Any
    letters: tuple[str, ...]  # of the operands and the results
    mesh_axes: dict[str, tuple[str, ...]]
    mesh: Any  # what those axes are, as ``Named``
    units: dict[str, int]  # of each axis letter: its size, or whole quantization groups and words

    def in_specs(self, operands) -> list[P]:
        """A spec for every operand; metadata is replicated."""
        count = len(self.letters) - len(self.call.out_shapes(operands))
        meta = operands[count:]
        words = self.letters[:count]
        return [*map(self._spec, words), *(P(*[None] * len(m.shape)) for m in meta)]

    def out_specs(self, operands) -> list[P]:
        """A spec for every result."""
        return [*map(self._spec, self.letters[-len(self.call.out_shapes(operands)) :])]

    def out_spec(self) -> P:
        return self._spec(self.letters[-1])

    def _spec(self, letters: str) -> P:
        return P(*(self.mesh_axes.get(letter) or None for letter in letters))

    def per_device(self, bind: Callable, *operands):
        """The operation on one device's shards, including its communication; ``bind(a, b, metadata,
        product)`` is that of one device."""
        *in_letters, out_letters = self.letters
        rows = {
            letter: size
            for letters, tensor in zip(in_letters, operands, strict=False)
            for letter, size in zip(letters, tensor.shape, strict=True)
        }
        a, b, metadata = self.call.tree.unflatten(operands)
        product = self.call.product
        if isinstance(product, Wgrad):
            rows["g"] = self._shard(product.groups, "g")
            product = product.replace(groups=rows["g"])
        elif isinstance(product, Mm):
            rows["t"] = self._shard(product.rows, "t")
            product = product.replace(rows=rows["t"])
            if self.mesh_axes.get("g"):  # rows of other devices' weights are added to theirs
                product = product.replace(clears_rest=True)
        metadata = self._local_segments(metadata, rows)
        summed = [
            axis
            for letter, axes in self.mesh_axes.items()
            if letter not in out_letters
            for axis in axes
        ]
        if not summed:
            return bind(a, b, metadata, product)
        # Partial sums travel as float32 and are rounded once. What flows back through that
        # rounding is exact in the result's own dtype, so the gradient may stay in it.
        dtype = product.out_dtype
        if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
            product = product.replace(out_dtype=jnp.float32, cotangent_dtype=dtype)
        return self.mesh.total(bind(a, b, metadata, product), tuple(summed)).astype(dtype)

    def _local_segments(self, metadata: Metadata, rows: dict[str, int]) -> Metadata:
        """Metadata of this device's part: segments cut to its rows and weights."""
        form = metadata.form
        cut = [letter for letter in "tug" if self.mesh_axes.get(letter)]
        if not cut:
            return metadata
        groups = rows["g"] * self._count("g")
        rows_t, rows_u = (rows.get(c, 0) * self._count(c) for c in "tu")
        rows_u = rows_t if form.aligned else rows_u
        # wgrad: x has rows t, y rows u; the others: x has rows u, the result (y) rows t.
        contracted = isinstance(self.call.product, Wgrad)
        at_t, at_u = (X_START, Y_START) if contracted else (Y_START, X_START)
        rows_x, rows_y = (rows_t, rows_u) if contracted else (rows_u, rows_t)
        table = metadata.decode(rows_x, rows_y, groups)
        for letter, column in (("t", at_t), ("u", at_u), ("g", WEIGHT)):
            if letter in cut:
                start = self._index(letter) * rows[letter]
                table = segments.restrict(table, column, start, rows[letter], aligned=form.aligned)
        own_weight = form.own_weight and "g" not in cut
        form = dataclasses.replace(form, kind="segments", own_weight=own_weight, swapped=False)
        return Metadata(form, table)

    def _count(self, letter: str) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.mesh_axes.get(letter, ()))

    def _shard(self, size: int, letter: str) -> int:
        return size // self._count(letter)

    def _index(self, letter: str):
        return self.mesh.index(self.mesh_axes[letter]).astype(jnp.int32)


class Named:
    """Mesh axes by their names, as ``shard_map`` knows them."""

    def __init__(self, shape: dict[str, int]):
        self.shape = shape

    def independent(self, axes: Sequence[str]) -> bool:
        """Whether these may divide one product: each divides one letter."""
        return len(set(axes)) == len(axes)

    def index(self, axes: tuple[str, ...]):
        """Which part this device has of what they divide."""
        return lax.axis_index(axes)

    def total(self, a, axes: tuple[str, ...]):
        """The sum over them."""
        return lax.psum(a, axes)

    def largest(self, a, axes: tuple[str, ...]):
        return lax.pmax(a, axes)


def plan_by(call: Any, mesh, specs, shapes, operands, allowed=None) -> Plan:
    """Give each axis letter the mesh axes of the first operand that shards it.

    ``specs``, ``shapes``: of the operands that are not metadata, and of the results. A mesh axis
    divides one letter only, and only where it divides evenly; ``allowed`` restricts to some mesh
    axes. Nothing divides an axis of letter ``WHOLE``.
    """
    words = call.letters(operands)
    units: dict[str, int] = {}
    for letters, shape in zip(words, shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            units[letter] = math.gcd(units.setdefault(letter, size), size)
    mesh_axes: dict[str, tuple[str, ...]] = {}
    used: list[str] = []
    for letters, spec in zip(words, specs, strict=True):
        for letter, entry in zip(letters, _entries(spec, len(letters)), strict=True):
            axes = tuple(a for a in entry if allowed is None or a in allowed)
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if letter == WHOLE or letter in mesh_axes or not axes or units[letter] % parts:
                continue
            if mesh.independent([*used, *axes]):
                mesh_axes[letter] = axes
                used += axes
    return call.plan(words, mesh_axes, mesh, units)


def _entries(spec, rank: int) -> list[tuple[str, ...]]:
    """A PartitionSpec as one tuple of mesh axis names per dimension."""
    entries = []
    for entry in (*spec, *[None] * (rank - len(spec))):
        if entry is None or entry is P.UNCONSTRAINED:
            entries.append(())
        else:
            entries.append((entry,) if isinstance(entry, str) else tuple(entry))
    return entries


# ---- Explicit sharding -----------------------------------------------------------------------


def explicit_mesh(operands: Sequence):
    """The mesh of the operands, where it has Explicit axes; else None."""
    return explicit_mesh_of([jax.typeof(a) for a in operands])


def explicit_mesh_of(types: Sequence):
    for of in types:
        mesh = of.sharding.mesh
        if not mesh.empty and mesh.explicit_axes:
            return mesh
    return None


def maps_explicit_axes() -> bool:
    """Whether this is the function of a ``vmap`` over an axis that is explicitly sharded: shard_map
    may not name that mesh axis there, only where the batching rule has the whole operands.

    There is no public way to know; where the private one is gone, shard_map says what it misses.
    """
    try:
        from jax._src import core

        return bool(core.get_axis_env().explicit_mesh_axis_names)
    except (ImportError, AttributeError):  # pragma: no cover
        return False


def mesh_of_mapped(operands):
    """Within a vmap over an axis that is explicitly sharded: the context in which operands' mesh is
    set. Without one JAX gives a selection between what is mapped and what is not, or a reshape, a
    mesh of no axes there. Outside of any program it does not, and arrays know their devices."""
    nowhere = maps_explicit_axes() and jax.sharding.get_abstract_mesh().empty
    if nowhere and isinstance(lax.iota(jnp.int32, 1), Tracer):
        leaves = [a for a in jax.tree.leaves(operands) if isinstance(a, jax.Array)]
        if (mesh := explicit_mesh(leaves)) is not None:
            return jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh))
    return contextlib.nullcontext()


def explicit(call: Call, mesh, operands, bind: Callable):
    """The operation under ``shard_map`` over every Explicit axis of the mesh."""
    types = [jax.typeof(v) for v in operands]
    plan = _explicit_plan(call, mesh, types, set(mesh.explicit_axes))
    return by_device(
        functools.partial(plan.per_device, bind), mesh, operands, plan.in_specs(operands),
        plan.out_spec(),
    )  # fmt: skip


def explicit_type(call: Call, mesh, types, out: ShapedArray) -> ShapedArray:
    """The result's type, sharded as :func:`explicit` shards it."""
    plan = _explicit_plan(call, mesh, types, set(mesh.explicit_axes))
    return out.update(sharding=NamedSharding(mesh, plan.out_spec()))


def explicit_batch(call: Call, mesh, operands, dims, bind: Callable):
    """The same of a batch: where that is sharded, each device has the problems of its own. The
    batch is the first axis of the result."""
    types = [jax.typeof(v) for v in operands]
    first = next(i for i, dim in enumerate(dims) if dim is not None)
    axes = _entries(types[first].sharding.spec, types[first].ndim)[dims[first]]
    singles = [
        of if dim is None else _without(of, dim, mesh) for of, dim in zip(types, dims, strict=True)
    ]
    plan = _explicit_plan(call, mesh, singles, set(mesh.explicit_axes) - set(axes))
    batched = P(axes or None)
    in_specs = [
        spec if dim is None else P(*batched, *spec)
        for spec, dim in zip(plan.in_specs(singles), dims, strict=True)
    ]
    in_axes = tuple(None if dim is None else 0 for dim in dims)
    return by_device(
        jax.vmap(functools.partial(plan.per_device, bind), in_axes),
        mesh,
        [jnp.moveaxis(v, dim, 0) if dim else v for v, dim in zip(operands, dims, strict=True)],
        in_specs,
        P(*batched, *plan.out_spec()),
    )


def _without(of, dim: int, mesh) -> ShapedArray:
    """The type of one of a batch."""
    entries = _entries(of.sharding.spec, of.ndim)
    spec = P(*(entry or None for i, entry in enumerate(entries) if i != dim))
    shape = (*of.shape[:dim], *of.shape[dim + 1 :])
    return ShapedArray(shape, of.dtype, sharding=NamedSharding(mesh, spec))


def _explicit_plan(call: Call, mesh, types, allowed) -> Plan:
    count = len(call.letters(types)) - 1
    specs = [of.sharding.spec for of in types[:count]]
    shapes = [*(of.shape for of in types[:count]), call.out_shape(types)]
    plan = plan_by(call, Named(dict(mesh.shape)), [*specs, P()], shapes, types, allowed)
    _check_explicit(plan, specs, types)
    return plan


def by_device(function, mesh, operands, in_specs, out_spec):
    # Outside of any program, an operand of no mesh goes to devices; the mesh of a type has none.
    placed = [a.sharding for a in operands if not isinstance(a, Tracer)]
    devices = next((of.mesh for of in placed if isinstance(of, NamedSharding)), mesh)
    operands = [
        v
        if same_spec(jax.typeof(v).sharding.spec, spec, v.ndim)
        else jax.sharding.reshard(v, NamedSharding(devices, spec))
        for v, spec in zip(operands, in_specs, strict=True)
    ]
    axes = set(mesh.explicit_axes)
    specs = {"in_specs": tuple(in_specs), "out_specs": out_spec}
    return jax.shard_map(function, mesh=mesh, axis_names=axes, **specs)(*operands)


def replicated(a) -> jax.Array:
    """On every device, as metadata is."""
    return resharded(a, [()] * a.ndim)


def take(a, index) -> jax.Array:
    """``a[index]``, blocks of the first axis. Each device takes its own part of them, because JAX
    finds no sharding for the derivative of its own indexing."""
    mesh, entries = explicit_mesh((a,)), entries_of(a)
    if mesh is None or entries[0] or not any(entries) or maps_explicit_axes():
        return a[index]
    spec = P(*(axes or None for axes in entries))
    return by_device(lambda a, i: a[i], mesh, [a, index], [spec, P(None)], spec)


def shared(a, index) -> jax.Array:
    """``a[index]``, where a vmap may map the index over an axis that is explicitly sharded, and not
    ``a``: JAX does not know then where the result goes."""
    mesh = explicit_mesh((index,))
    if mesh is None or not maps_explicit_axes():
        return a[index]
    spec = P(*[None] * (index.ndim + a.ndim - 1))
    return a.at[index].get(out_sharding=NamedSharding(mesh, spec))


def merge(a, counts: Sequence[int]) -> jax.Array:
    """``a`` with so many consecutive axes each as one. That is sharded as the first of them, and as
    those within one that is sharded to single indices; what shards others is gathered."""
    given = entries_of(a)
    shape, kept, merged = [], [], []
    begin = 0
    for count in counts:
        run = slice(begin, begin + count)
        begin += count
        entries = _divided(a, a.shape[run], [*given[run]])
        shape.append(math.prod(a.shape[run]))
        kept += entries
        merged.append(tuple(axis for entry in entries for axis in entry))
    return _reshaped(resharded(a, kept), shape, merged)


def split(a, shapes: Sequence[Sequence[int]]) -> jax.Array:
    """The inverse: every axis of ``a`` in the axes of a shape."""
    given = entries_of(a)
    kept, parts = [], []
    for entry, shape in zip(given, shapes, strict=True):
        entries = _divided(a, shape, [entry] * len(shape))
        parts += entries
        kept.append(tuple(axis for of in entries for axis in of))
    return _reshaped(resharded(a, kept), [size for shape in shapes for size in shape], parts)


def _divided(a, shape, entries) -> list[tuple[str, ...]]:
    """The mesh axes, among those that may divide each axis of a run, that divide the run as a whole
    into consecutive parts."""
    out, used = [], set()
    mesh = jax.typeof(a).sharding.mesh
    for i, (size, entry) in enumerate(zip(shape, entries, strict=True)):
        taken, parts = (), 1
        for axis in entry:
            if axis in used:
                continue
            if size % (parts * mesh.shape[axis]):
                break
            taken, parts = (*taken, axis), parts * mesh.shape[axis]
        out.append(taken)
        used |= set(taken)
        if parts != size:
            return out + [()] * (len(shape) - i - 1)
    return out


def entries_of(a) -> list[tuple[str, ...]]:
    """The mesh axes that explicitly shard each axis of an array."""
    return _entries(jax.typeof(a).sharding.spec, a.ndim)


def resharded(a, wanted) -> jax.Array:
    """``a`` with these entries."""
    if entries_of(a) == wanted:
        return a
    return jax.sharding.reshard(a, _in_own_mesh(a, wanted))


def _reshaped(a, shape, entries) -> jax.Array:
    # JAX does not see that several axes at once leave alone the one that a vmap maps.
    says = any(entries) or (maps_explicit_axes() and not jax.typeof(a).sharding.mesh.empty)
    return lax.reshape(a, shape, out_sharding=_in_own_mesh(a, entries) if says else None)


def _in_own_mesh(a, entries) -> NamedSharding:
    """Entries as a sharding over the mesh that the array has, whether or not the user set one."""
    return NamedSharding(jax.typeof(a).sharding.mesh, P(*(entry or None for entry in entries)))


def is_local() -> bool:
    """Whether this is one device's part: a ``shard_map`` maps all that could divide operands."""
    mesh = jax.sharding.get_abstract_mesh()
    left = [mesh.shape[name] for name in mesh.axis_names if name not in mesh.manual_axes]
    return bool(mesh.manual_axes) and math.prod(left) == 1


def same_spec(spec, wanted, rank) -> bool:
    return _entries(spec, rank) == _entries(wanted, rank)


def _check_explicit(plan: Plan, specs, types) -> None:
    """Every sharding the user wrote must be one the plan keeps: nothing is gathered silently."""
    caller, names = plan.call.product.caller, _names(plan.call)
    for name, word, spec, of in zip(names, plan.letters[:-1], specs, types, strict=False):
        for letter, entry in zip(word, _entries(spec, of.ndim), strict=True):
            kept = plan.mesh_axes.get(letter)
            if not entry or kept == entry:
                continue
            parts = math.prod(plan.mesh.shape[axis] for axis in entry)
            if kept:
                why = f"another operand shards it over {kept}"
            elif plan.units[letter] % parts:
                why = f"its {plan.units[letter]} quantization groups do not divide into {parts}"
            else:
                why = "that mesh axis already shards another axis of this product"
            instead = "Use jax.sharding.reshard first."
            if letter == "g" and any(set(entry) & set(plan.mesh_axes.get(r, ())) for r in "tu"):
                instead = (
                    "jgg.moe_mlp is the layer for that: its tokens and experts may share a mesh "
                    "axis, and tokens travel to their experts. Products alone take a "
                    "jax.shard_map, which gathers rows and passes group_offset; the guide "
                    "'Several GPUs' has both. With jax.sharding.reshard every device gets all "
                    "rows, or all groups."
                )
            raise ValueError(
                f"{caller.says}: {name} {of} shards {caller.axis(letter)} over {entry}, but "
                f"{why}. {instead}"
            )


def _names(call: Call) -> list[str]:
    """What the user calls each operand; parts of a quantized one are ``w.scales`` and so on."""
    _, b, _ = call.tree.unflatten(range(call.tree.num_leaves))
    parts = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(b)]
    if call.product.caller.operands is None:
        return ["an operand of the gradient"] * (1 + len(parts))
    of_a, of_b = call.product.caller.operands
    return [of_a, *(of_b + part for part in parts)]
