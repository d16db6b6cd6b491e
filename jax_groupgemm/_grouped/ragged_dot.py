"""``ragged_dot`` and ``ragged_dot_general``: drop-in replacements for JAX's own."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from .._core import check, dtypes, partition, segments
from .._core.operations import operation
from .._core.products import Caller, Mm, Wgrad
from .._core.segments import Form, Metadata
from .._core.types import Integers
from . import primitives
from .grouped_mm import metadata, offset

#: What axes are called here, for messages, where the ragged one is which.
_AXES = {
    "kept": {"t": "m", "k": "k", "g": "g", "n": "n"},
    "contracted": {"t": "k", "a": "m", "b": "n", "g": "g"},
    "batch": {},
}


@operation
def ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: Integers,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """``out[m] = lhs[m] @ rhs[group(m)]``; **rows of lhs are grouped**. Drop-in for JAX's.

    The signature, values and tails of :func:`jax.lax.ragged_dot`; unlike there, ``group_offset``
    works, as do ``vmap`` with shared weights, second derivatives and Explicit sharding.

    Args:
      lhs: ``(m, k)``.
      rhs: ``(g, k, n)``.
      group_sizes: integers ``(g,)``.
      precision: as in :func:`grouped_mm`.
      preferred_element_type: dtype of the result; by default that of JAX's own.
      group_offset: integer of shape ``()`` or ``(1,)``: the first of the ``g`` groups that rhs
        holds, of a longer ``group_sizes``.
      out_sharding: where the result goes, under Explicit sharding.

    Returns:
      ``(m, n)``.

    Raises:
      ValueError, TypeError: shapes or dtypes do not fit.

    Examples:
      >>> lhs, rhs = jnp.ones((5, 8)), jnp.ones((2, 8, 4))
      >>> jgg.ragged_dot(lhs, rhs, jnp.array([2, 3])).shape  # as jax.lax.ragged_dot
      (5, 4)
    """
    op = "ragged_dot"
    _check_out_sharding(op, out_sharding)
    lhs, rhs = _operands(op, lhs, rhs)
    check.shape(op, "lhs", lhs, (None, None), "m, k")
    why = f"because lhs is {lhs.shape}"
    check.shape(op, "rhs", rhs, (None, lhs.shape[1], None), "g, k, n", why)
    groups = metadata(op, group_sizes, group_offset, rhs, name="rhs", letter="g")
    check.rows(op, "lhs", lhs.shape[0])
    dtype = _result_dtype(op, preferred_element_type, lhs, rhs)
    product = Mm(
        rows=lhs.shape[0], out_dtype=dtypes.computed(dtype),
        precision=check.precision(op, precision, lhs, rhs),
        caller=Caller(op, ("lhs", "rhs"), _AXES["kept"]),
    )  # fmt: skip
    lhs, rhs = check.multiplied(lhs, rhs)
    return _placed(op, primitives.mm(lhs, rhs, groups, product).astype(dtype), out_sharding)


@operation
def ragged_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: Integers,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """``out = lhs · rhs``, group by group; **one axis of lhs is grouped**. Drop-in for JAX's.

    The three modes of :func:`jax.lax.ragged_dot_general`.

    ==================  =========================================================  ==========
    ragged axis of lhs  shapes                                                     result
    ==================  =========================================================  ==========
    kept (m)            ``[b,x,m,k] [g,b,k,n] [b,x,g]``: a matrix per row group    [b,x,m,n]
    contracted (k)      ``[b,m,x,k] [b,x,k,n] [b,x,g]``: a product per group       [g,b,m,n]
    batch (b)           ``[b,m,k] [b,k,n] [x,g]``: a plain batched product         [b,m,n]
    ==================  =========================================================  ==========

    Letters stand for any number of axes; ``group_sizes`` may also be ``[g]``, for all alike.

    Args:
      lhs, rhs, group_sizes: as above.
      ragged_dot_dimension_numbers: a :class:`jax.lax.RaggedDotDimensionNumbers`.
      precision, preferred_element_type: as in :func:`ragged_dot`.
      group_offset: in the first mode, the first of the groups that rhs holds. In the second mode
        the result begins with group ``group_offset``; where no group is left it has zeros.
      out_sharding: where the result goes, under Explicit sharding.

    Returns:
      The axes of the table above.

    Raises:
      ValueError, TypeError: shapes, dtypes or dimension numbers do not fit.

    Examples:
      >>> numbers = jax.lax.RaggedDotDimensionNumbers(  # weight gradients: rows of both are grouped
      ...     dot_dimension_numbers=(((0,), (0,)), ((), ())),
      ...     lhs_ragged_dimensions=[0],
      ...     rhs_group_dimensions=[],
      ... )
      >>> lhs, rhs = jnp.ones((5, 8)), jnp.ones((5, 4))
      >>> y = jgg.ragged_dot_general(lhs, rhs, jnp.array([2, 3]), numbers)
      >>> y.shape, y[:, 0, 0].tolist()
      ((2, 8, 4), [2.0, 3.0])
    """
    op = "ragged_dot_general"
    _check_out_sharding(op, out_sharding)
    lhs, rhs = _operands(op, lhs, rhs)
    group_sizes = partition.replicated(check.integers(op, "group_sizes", group_sizes))
    dn = _Dimensions(op, lhs, rhs, ragged_dot_dimension_numbers)
    dtype = _result_dtype(op, preferred_element_type, lhs, rhs)
    same = {
        "out_dtype": dtypes.computed(dtype),
        "precision": check.precision(op, precision, lhs, rhs),
        "caller": Caller(op, ("lhs", "rhs"), _AXES[dn.mode]),
    }
    lhs, rhs = check.multiplied(lhs, rhs)
    if group_offset is not None:
        group_offset = offset(op, group_offset)
    if dn.mode == "batch":
        # Sizes have no effect here: every batch is multiplied by its own partner.
        x, y = lhs, rhs
        for i, j in zip(dn.lhs_batch, dn.rhs_batch, strict=True):
            entry = _common_entry(op, lhs, rhs, x, y, i, j)
            x, y = _with_entry(x, i, entry), _with_entry(y, j, entry)
        explicit = partition.explicit_mesh((x, y)) is not None
        if explicit and out_sharding is None:
            out_sharding = _of_whole_sums(dn, x, y)
        sums, common = same["out_dtype"], dtypes.promoted(x.dtype, y.dtype)
        if not jnp.issubdtype(common, jnp.floating):
            sums = dtypes.summed(common, sums)
        with _naming(op, out_sharding):
            out = jax.lax.dot_general(
                x, y, dn.dot_dimension_numbers, precision=same["precision"],
                preferred_element_type=sums,
                out_sharding=out_sharding if explicit else None,
            )  # fmt: skip
    elif dn.mode == "kept":
        out = _kept(op, dn, lhs, rhs, group_sizes, group_offset, same)
    else:
        out = _contracted(op, dn, lhs, rhs, group_sizes, group_offset, same)
    return _placed(op, out.astype(dtype), out_sharding)


def _operands(op: str, lhs, rhs) -> tuple[jax.Array, jax.Array]:
    lhs, rhs = check.array(op, "lhs", lhs), check.array(op, "rhs", rhs)
    for name, value in (("lhs", lhs), ("rhs", rhs)):
        if value.dtype != bool:  # which JAX's take, too
            check.numeric(op, name, value)
    return lhs, rhs


def _result_dtype(op: str, preferred, lhs, rhs):
    """That of JAX's own; by our rules of operands that JAX's refuse."""
    return check.result_dtype(op, preferred, _of_jax(lhs.dtype, rhs.dtype), lhs=lhs, rhs=rhs)


@functools.cache
def _of_jax(*dtypes):
    vectors = (jax.ShapeDtypeStruct((1,), dtype) for dtype in dtypes)
    try:
        return jax.eval_shape(lambda a, b: jax.lax.dot(a, b), *vectors).dtype
    except TypeError:
        return None


class _Dimensions:
    """Dimension numbers, sorted out: which axes of which operand play which part."""

    def __init__(self, op: str, lhs, rhs, numbers):
        if not isinstance(numbers, jax.lax.RaggedDotDimensionNumbers):
            raise TypeError(
                f"jgg.{op}: ragged_dot_dimension_numbers must be a "
                f"jax.lax.RaggedDotDimensionNumbers, got {check.describe(numbers)}"
            )
        self.dot_dimension_numbers = numbers.dot_dimension_numbers
        parts = (*numbers.dot_dimension_numbers, (numbers.lhs_ragged_dimensions,),
                 (numbers.rhs_group_dimensions,))  # fmt: skip
        axes = [axis for of in parts for one in of for axis in one]
        is_pair = [len(of) for of in parts] == [2, 2, 1, 1]
        if not is_pair or not all(isinstance(axis, (int, np.integer)) for axis in axes):
            raise TypeError(
                f"jgg.{op}: ragged_dot_dimension_numbers must hold axes, two lists contracted and "
                f"two of batches, got {numbers}"
            )
        (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
        self.lhs_contracting, self.rhs_contracting = tuple(lc), tuple(rc)
        self.lhs_batch, self.rhs_batch = tuple(lb), tuple(rb)
        if len(numbers.lhs_ragged_dimensions) != 1:
            raise TypeError(f"jgg.{op}: expects exactly one lhs ragged dimension")
        (self.ragged,) = numbers.lhs_ragged_dimensions
        if not 0 <= self.ragged < lhs.ndim:
            raise TypeError(f"jgg.{op}: lhs ragged dimension {self.ragged} is not an axis of lhs")
        group = tuple(numbers.rhs_group_dimensions)
        _check_axes(op, "lhs", lhs, (*self.lhs_contracting, *self.lhs_batch))
        _check_axes(op, "rhs", rhs, (*self.rhs_contracting, *self.rhs_batch, *group))
        if self.ragged in self.lhs_batch:
            self.mode = "batch"
        else:
            self.mode = "contracted" if self.ragged in self.lhs_contracting else "kept"
        if len(group) != (1 if self.mode == "kept" else 0):
            raise TypeError(
                f"jgg.{op}: expects {'one rhs group dimension' if self.mode == 'kept' else 'no'}"
                f"{'' if self.mode == 'kept' else ' rhs group dimension'} where the ragged axis "
                f"of lhs is {self.mode}, got {group}"
            )
        self.group = group
        used = {*self.lhs_contracting, *self.lhs_batch}
        self.lhs_kept = tuple(i for i in range(lhs.ndim) if i not in used)
        used = {*self.rhs_contracting, *self.rhs_batch, *group}
        self.rhs_kept = tuple(i for i in range(rhs.ndim) if i not in used)
        for kind, left, right in (
            ("contracting", self.lhs_contracting, self.rhs_contracting),
            ("batch", self.lhs_batch, self.rhs_batch),
        ):
            if [lhs.shape[i] for i in left] != [rhs.shape[i] for i in right]:
                raise TypeError(
                    f"jgg.{op}: {kind} axes differ: lhs {lhs.shape} at {left}, "
                    f"rhs {rhs.shape} at {right}"
                )


def _check_axes(op: str, name: str, operand, axes: tuple[int, ...]) -> None:
    for axis in axes:
        if not 0 <= axis < operand.ndim:
            raise TypeError(
                f"jgg.{op}: dimension number {axis} is not an axis of {name}, {operand.shape}"
            )
    if len(set(axes)) != len(axes):
        raise TypeError(f"jgg.{op}: {name} dimension numbers are not distinct: {axes}")


def _sizes_per_problem(op, group_sizes, prefix: tuple[int, ...]):
    """group_sizes as (problems, g), with a given or broadcast prefix."""
    g = group_sizes.shape[-1] if group_sizes.ndim else 0
    if group_sizes.ndim != 1 and group_sizes.shape != (*prefix, g):
        raise TypeError(
            f"jgg.{op}: group_sizes has shape {group_sizes.shape}, expected (g,) or {(*prefix, g)}"
        )
    return jnp.broadcast_to(group_sizes, (*prefix, g)).reshape(math.prod(prefix), g)


def _kept(op, dn: _Dimensions, lhs, rhs, group_sizes, group_offset, same):
    outer = tuple(i for i in dn.lhs_kept if i < dn.ragged)
    inner = tuple(i for i in dn.lhs_kept if i > dn.ragged)
    sizes_of = lambda axes: tuple(lhs.shape[i] for i in axes)
    rows = sizes_of((dn.ragged, *inner))
    t, inners = rows[0], math.prod(rows[1:])
    x = lhs.transpose(*dn.lhs_batch, *outer, dn.ragged, *inner, *dn.lhs_contracting)
    x = partition.merge(x, tuple(map(len, (dn.lhs_batch, outer, rows, dn.lhs_contracting))))
    (group,) = dn.group
    w = rhs.transpose(*dn.rhs_batch, group, *dn.rhs_contracting, *dn.rhs_kept)
    w = partition.merge(w, (len(dn.rhs_batch), 1, len(dn.rhs_contracting), len(dn.rhs_kept)))
    groups, columns = rhs.shape[group], tuple(rhs.shape[i] for i in dn.rhs_kept)
    batches, outers = x.shape[:2]
    result = sizes_of(dn.lhs_batch), sizes_of(outer), rows, columns
    sizes = _sizes_per_problem(op, group_sizes, sizes_of((*dn.lhs_batch, *outer)))
    if group_offset is None and sizes.shape[1] != groups:
        raise TypeError(
            f"jgg.{op}: rhs {rhs.shape} has {groups} groups at axis {group}, group_sizes has "
            f"{sizes.shape[1]}"
        )
    check.rows(op, "lhs", t * inners)
    if 0 in (batches, outers):  # there is nothing to map
        return jnp.zeros(sum(result, ()), same["out_dtype"])
    sizes = _scaled(sizes, t, inners).reshape(batches, outers, -1)
    x, w, sizes = _batched_alike(op, lhs, rhs, x, w, sizes)
    # An outer axis of one is not mapped.
    over = partition.entries_of(x)[1] if outers > 1 else ()
    x, sizes = _with_entry(x, 1, over), _with_entry(sizes, 1, over)

    def product(x, w, sizes):
        metadata = segments.sizes(sizes, group_offset)
        return primitives.mm(x, w, metadata, Mm(rows=t * inners, **same))

    over_outer = _vmap(product, outers, (0, None, 0))
    out = _vmap(over_outer, batches, (0, 0, 0))(x, w, sizes)
    # The result's axes: batch, then lhs's kept axes in lhs's order, which is this one.
    return partition.split(out, result)


def _contracted(op, dn: _Dimensions, lhs, rhs, group_sizes, group_offset, same):
    ragged = dn.lhs_contracting.index(dn.ragged)
    # Outer and inner are told by the order in which the contracted axes are listed.
    contracting = tuple(lhs.shape[i] for i in dn.lhs_contracting)
    outer, t = contracting[:ragged], contracting[ragged]
    outers, inners = math.prod(outer), math.prod(contracting[ragged + 1 :])
    batch = tuple(lhs.shape[i] for i in dn.lhs_batch)
    left = tuple(lhs.shape[i] for i in dn.lhs_kept)
    right = tuple(rhs.shape[i] for i in dn.rhs_kept)
    rows = math.prod(contracting)
    check.rows(op, "lhs", rows, "elements in its contracted axes")
    counts = len(batch), len(contracting)
    x = lhs.transpose(*dn.lhs_batch, *dn.lhs_contracting, *dn.lhs_kept)
    x = partition.merge(x, (*counts, len(left)))
    y = rhs.transpose(*dn.rhs_batch, *dn.rhs_contracting, *dn.rhs_kept)
    y = partition.merge(y, (*counts, len(right)))
    batches = x.shape[0]
    sizes = _sizes_per_problem(op, group_sizes, (*batch, *outer))
    groups = sizes.shape[1]
    sizes = _scaled(sizes, t, inners).reshape(batches, outers, groups)
    x, y, sizes = _batched_alike(op, lhs, rhs, x, y, sizes)

    def product(x, y, sizes):
        wgrad = Wgrad(groups=groups, **same)
        if outers == 1:
            return primitives.wgrad(x, y, segments.sizes(sizes[0], group_offset), wgrad)

        # Every outer index adds to the same groups: several segments name one weight.
        def decode(s):
            return segments.sizes(s, group_offset).decode(t * inners, t * inners, groups)

        table = segments.fold(jax.vmap(decode)(sizes), outers, t * inners, t * inners, 0)
        form = Form("segments", ordered_x=True, ordered_y=True)
        return primitives.wgrad(x, y, Metadata(form, table), wgrad)

    out = _vmap(product, batches, (0, 0, 0), out_axes=1)(x, y, sizes)
    return partition.split(out, ((groups,), batch, left, right))


def _batched_alike(op, lhs, rhs, x, y, sizes):
    """x, y (made of lhs and rhs) and sizes with one sharding of their first axis, the batch."""
    # A batch of one is not mapped.
    batch = _common_entry(op, lhs, rhs, x, y, 0, 0) if x.shape[0] > 1 else ()
    return _with_entry(x, 0, batch), _with_entry(y, 0, batch), _with_entry(sizes, 0, batch)


def _common_entry(op, lhs, rhs, x, y, x_axis: int, y_axis: int):
    """The mesh axes that shard a batch axis of x or of y: to cut the other to match costs
    nothing."""
    entries = {"lhs": partition.entries_of(x), "rhs": partition.entries_of(y)}
    owns = {"lhs": entries["lhs"].pop(x_axis), "rhs": entries["rhs"].pop(y_axis)}
    common = owns["lhs"] or owns["rhs"]
    for name, own in owns.items():
        if own == common:
            continue
        if own:
            why = f"{name} shards it over {own}"
        elif any(set(common) & set(other) for other in entries[name]):
            why = f"that mesh axis already shards another axis of {name}"
        else:
            continue
        raise ValueError(
            f"jgg.{op}: the batch of lhs {jax.typeof(lhs)} and rhs {jax.typeof(rhs)} is sharded "
            f"over {common}, but {why}. Use jax.sharding.reshard first."
        )
    return common


def _with_entry(a, axis: int, entry):
    """``a`` with one axis sharded over these mesh axes."""
    entries = partition.entries_of(a)
    entries[axis] = entry
    return partition.resharded(a, entries)


def _scaled(sizes, limit: int, factor: int):
    """Sizes in units of ``factor`` rows, without overflow in a narrow dtype."""
    return segments._saturate(sizes, limit) * jnp.int32(factor)


def _vmap(function, size: int, in_axes: tuple, out_axes: int = 0):
    """``vmap``; over an axis of size 1 without it, so that metadata keeps its raw form."""
    if size != 1:
        return jax.vmap(function, in_axes, out_axes)

    def wrapped(*args):
        out = function(*(a if d is None else a[0] for a, d in zip(args, in_axes, strict=True)))
        return jnp.expand_dims(out, out_axes)

    return wrapped


def _of_whole_sums(dn: _Dimensions, x, y):
    """Where a plain product goes, of operands whose contracted axes are sharded alike: its other
    axes are sharded as theirs are. None where JAX knows, or nobody does."""
    left, right = partition.entries_of(x), partition.entries_of(y)
    contracted = [left[i] for i in dn.lhs_contracting]
    if not any(contracted) or contracted != [right[i] for i in dn.rhs_contracting]:
        return None
    entries = [left[i] for i in (*dn.lhs_batch, *dn.lhs_kept)] + [right[i] for i in dn.rhs_kept]
    names = [name for entry in entries for name in entry]
    mesh = partition.explicit_mesh((x, y))
    if mesh is None or len({*names}) < len(names):
        return None
    spec = jax.sharding.PartitionSpec(*(entry or None for entry in entries))
    return jax.sharding.NamedSharding(mesh, spec)


def _check_out_sharding(op: str, out_sharding) -> None:
    known = jax.sharding.NamedSharding | jax.sharding.PartitionSpec | None
    if not isinstance(out_sharding, known):
        raise TypeError(
            f"jgg.{op}: out_sharding must be a jax.sharding.NamedSharding, a PartitionSpec or "
            f"None, got {check.describe(out_sharding)}"
        )


@contextlib.contextmanager
def _naming(op: str, out_sharding):
    """Whatever JAX finds wrong with ``out_sharding``, as an error of this operation."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if out_sharding is None:
            raise
        raise ValueError(
            f"jgg.{op}: out_sharding={out_sharding} does not fit the result: {error}"
        ) from error


def _placed(op: str, out, out_sharding):
    """``out``, resharded. Where there is no mesh but that of ``out_sharding``, the result is on one
    device and stays there, as JAX's own does."""
    if out_sharding is None:
        return out
    to_mesh = lambda out: jax.sharding.reshard(out, out_sharding)
    nowhere = jax.typeof(out).sharding.mesh.empty
    with _naming(op, out_sharding):
        if nowhere and isinstance(out_sharding, jax.sharding.NamedSharding):
            jax.eval_shape(to_mesh, out)  # an error where it does not fit
            return out
        return to_mesh(out)
