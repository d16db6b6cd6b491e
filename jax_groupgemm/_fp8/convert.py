"""``quantize`` and ``dequantize`` of mode "fp8", and their custom calls.

    codes (..., C), scales  <->  x (..., C)

Blocks may run along the axis before the last: then what is stored is the array with its last two
axes exchanged. There rows may be grouped, and are padded group by group.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._core import conversion, dtypes, partition, parts
from .._core import float_bits as fb
from .._kernels import problems
from .._quantized import padding
from .._quantized.array import Quantized
from . import blocks, cast, conversion_calls


def quantized(op: str, x, *, block, axis: int = -1, group_sizes=None, seed=None,
              scale_format: str = "float32", element: str = "e4m3") -> Quantized:  # fmt: skip
    """``x`` in mode "fp8", of checked arguments."""
    run: Callable = functools.partial(
        _quantize, block=block, axis=axis, scale_format=scale_format, element=element
    )
    x = lax.stop_gradient(x)
    mesh = partition.explicit_mesh([x] if group_sizes is None else [x, group_sizes])
    if mesh is not None:
        specs = _specs(x, mesh, block, axis, group_sizes is not None)
        run = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=specs)
    weight, scales, positions = run(x, group_sizes, seed)
    return made(weight, scales, positions, block=block, axis=axis)


def made(codes, scales, positions=None, *, block=blocks.LINE, axis: int = -1) -> Quantized:
    """The array of these codes. With positions rows are grouped, and blocks lie along them."""
    return Quantized(
        codes, scales, positions=positions, mode="fp8", bits=8, group_size=None, axis=axis,  # pyright: ignore[reportArgumentType]
        layout="linear" if positions is None else "grouped", block=block,
    )  # fmt: skip


def _specs(x, mesh, block, axis: int, grouped: bool):
    """How results are sharded on a mesh with Explicit axes: as x is. Blocks are not cut, and padded
    axes are replicated."""
    stored = [entry or None for entry in partition.entries_of(x)]
    shape = [*x.shape]
    if axis == -2:
        stored[-2:], shape[-2:] = stored[:-3:-1], shape[:-3:-1]
        if grouped:
            stored[-1] = None
    lead = stored[:-2]
    scales: list | tuple = lead
    if block is not None:
        scales = [*stored]
        for at, size in zip((-1, -2)[: len(shape)], block[::-1], strict=False):
            parts = math.prod(mesh.shape[name] for name in stored[at] or ())
            if size > 1 and shape[at] % (parts * size):
                scales[at] = None
    positions = [None] if grouped and axis == -2 else None
    return tuple(
        None if spec is None else NamedSharding(mesh, P(*spec))
        for spec in (stored, scales, positions)
    )


@functools.partial(jax.jit, static_argnames=("block", "axis", "scale_format", "element"))
def _quantize(x, group_sizes, seed, *, block, axis: int, scale_format: str, element: str):
    """``(codes, scales, positions)``."""
    static = {"block": block, "scale_format": scale_format, "element": element}
    codes, scales = _QUANTIZE(x, group_sizes, seed, None, axes=(axis,), **static)
    positions = None
    if group_sizes is not None and axis == -2:
        positions = padding.padding(group_sizes, x.shape[0], blocks.GROUPED).positions
    return codes, scales, positions


def _e4m3(x, group_sizes=None, seed=None, row_index=None, *, axes, block=blocks.LINE):
    """Codes and scales of blocks along each of ``axes``."""
    static = {"block": block, "scale_format": "float32", "element": "e4m3"}
    return _QUANTIZE(x, group_sizes, seed, row_index, axes=axes, **static)


def quantized_rows(x, row_index, group_sizes, seed) -> Quantized:
    """``fp8_quantize(x[row_index], axis=0, group_sizes=group_sizes)``; rows are zeros where the
    index is negative."""
    codes, scales = _e4m3(x, group_sizes, seed, row_index, axes=(-2,))
    positions = padding.padding(group_sizes, row_index.shape[0], blocks.GROUPED).positions
    return made(codes, scales, positions, axis=-2)


def quantized_both(op: str, x, *, block, axis: int) -> tuple[Quantized, Quantized]:
    """``x`` in square blocks that run along ``axis``, as it is multiplied, with axis -1; and the
    transpose of that."""
    if partition.explicit_mesh([x]) is not None:
        q = dataclasses.replace(quantized(op, x, block=block, axis=axis), axis=-1)
        return q, exchanged(q)
    codes, scales, *other = _e4m3(lax.stop_gradient(x), axes=(axis, -3 - axis), block=block)
    return made(codes, scales, block=block), made(*other, block=block)


def quantized_lines(x, group_sizes) -> tuple[Quantized, Quantized]:
    """``x`` (T, K), of grouped rows, in blocks of 128 along K; and in such blocks along T. Rounded
    to nearest."""
    x = lax.stop_gradient(x)
    if partition.explicit_mesh([x, group_sizes]) is not None:
        of = functools.partial(quantized, "", x, block=blocks.LINE, group_sizes=group_sizes)
        return of(axis=-1), of(axis=-2)
    *rows, codes, scales, positions = _quantize_lines(x, group_sizes)
    return made(*rows), made(codes, scales, positions, axis=-2)


@jax.jit
def _quantize_lines(x, group_sizes):
    positions = padding.padding(group_sizes, x.shape[0], blocks.GROUPED).positions
    return *_e4m3(x, group_sizes, axes=(-1, -2)), positions


def exchanged(q: Quantized) -> Quantized:
    """The transpose of an array in square blocks, or with a scale for each matrix."""
    codes = q.weight.swapaxes(-1, -2)
    scales = q.scales if q.block is None else q.scales.swapaxes(-1, -2)
    return made(codes, scales, block=q.block)


def _definition(*operands, axes: tuple[int, ...], **static):
    """Codes and scales of blocks along each of ``axes``. Square blocks are those of the transpose,
    too."""
    if len(axes) == 1:
        return definition(*operands, axis=axes[0], **static)
    one, *others = axes if static["block"] == blocks.LINE else axes[:1]
    codes, scales = _QUANTIZE(*operands, axes=(one,), **static)
    if not others:
        return codes, scales, codes.swapaxes(-1, -2), scales.swapaxes(-1, -2)
    return codes, scales, *_QUANTIZE(*operands, axes=(*others,), **static)


def definition(x, group_sizes, seed, row_index=None, *, block, axis: int, scale_format: str,
               element: str):  # fmt: skip
    """``(codes, scales)``."""
    if row_index is not None:
        x = dtypes.load(padding.take_rows(dtypes.storage(x), row_index), x.dtype)
    if group_sizes is not None and axis == -2:
        source = padding.padding(group_sizes, x.shape[0], blocks.GROUPED).source
        x = dtypes.load(padding.take_rows(dtypes.storage(x), source), x.dtype)
    elif group_sizes is not None:
        inside = padding.covered(group_sizes, x.shape[0])
        x = jnp.where(inside[:, None], x, jnp.zeros((), x.dtype))
    if block is None and seed is None and x.ndim > 1:
        return _of_matrices(x, axis, scale_format, element)
    if axis == -2:
        x = x.swapaxes(-1, -2)
    return blocks.quantize(x, seed, block=block, scale_format=scale_format, element=element)


def _of_matrices(x, axis: int, scale_format: str, element: str):
    """The same with a scale for each matrix, rounded to nearest."""
    amax = cast.largest(x)[..., 0]
    scales = fb.value(blocks.scale_of(amax, scale_format, element))
    of_two = scale_format == "e8m0"
    (codes,) = cast.codes(x, scales, axes=(axis,), element=element, power_of_two=of_two)
    return codes, scales


def _problem(x, group_sizes, _, row_index, *, axes: tuple[int, ...], block, **__):
    rows, columns = (1, *x.shape)[-2:]
    rows = rows if row_index is None else row_index.shape[0]
    along = 0
    if -2 in axes:
        groups = 0 if group_sizes is None else group_sizes.shape[0]
        along = rows if group_sizes is None else padding.padded_rows(rows, groups, blocks.GROUPED)
    return functools.partial(
        problems.Fp8Conversion, mode="fp8", dtypes=(x.dtype.name,), both=len(axes) == 2,
        rows=rows * math.prod(x.shape[:-2]), columns=columns, along=along, block=block,
    )  # fmt: skip


def _problem_of_codes(codes, scales, *, block, **__):
    del scales
    *lead, columns = codes.shape
    return functools.partial(
        problems.Fp8Conversion, mode="fp8", rows=math.prod(lead), columns=columns, block=block
    )


def _parts(part, x, group_sizes, seed, row_index, *, axes: tuple[int, ...], **static):
    """Whole blocks may be divided; not rows that are padded group by group. Random numbers are
    those of places in all of x, so an array that is rounded at random is composed."""
    block = static["block"]
    if seed is not None or row_index is not None or block is None or x.ndim < 2:
        return None
    if len(axes) == 2 and group_sizes is not None:
        one = functools.partial(_parts, part, x, group_sizes, None, None, **static)
        return *one(axes=axes[:1]), *one(axes=axes[1:])
    run = functools.partial(_definition, axes=axes, **static)
    types = jax.eval_shape(run, x, group_sizes, None)
    places = {-1: "rc", -2: "cr"}
    sizes = dict(zip("rc", x.shape[-2:], strict=True))
    whole = {"r"} if -2 in axes and group_sizes is not None else set()
    for word in (places[axis] for axis in axes):  # parts of a block would have other scales
        whole |= {of for of, n in zip(word, block, strict=True) if sizes[of] % n}
    named = functools.partial(parts.with_whole, whole=whole)
    lead = parts.letters(x)
    words = [lead + named(places[axis]) for axis in axes for _ in range(2)]
    given = lead + named("rc"), None if group_sizes is None else parts.WHOLE, None, None
    results = [*zip(words, types, strict=True)]
    return tuple(part(given, results, x, group_sizes, None, None, axes=axes, **static))


def _local(cut, x, group_sizes, seed, row_index, **static):
    return _QUANTIZE(x, cut.sizes(group_sizes, "r", x.shape[-2]), seed, row_index, **static)


_QUANTIZE = conversion.composed(
    "fp8_quantize", _definition, conversion_calls.quantize, _problem,
    batch=conversion.of_matrices(1), each=True, parts=_parts, local=_local,
)  # fmt: skip
_DEQUANTIZE = conversion.composed(
    "fp8_dequantize", blocks.dequantize, conversion_calls.dequantize, _problem_of_codes,
    batch=conversion.of_matrices(2),
)  # fmt: skip


def _asked_for(used, eqn):
    """Codes along an axis that nobody reads are not made, where a call makes the others alone. The
    first of two forward passes of ``jax.checkpoint`` reads those of one axis."""
    wanted = [any(used[at : at + 2]) for at in range(0, len(used), 2)]
    if not any(wanted):
        return [False] * len(eqn.invars), None
    alone = [e for e in eqn.params["jaxpr"].eqns if e.primitive is _QUANTIZE.primitive]
    given = dict(zip(eqn.params["jaxpr"].invars, eqn.invars, strict=True))
    at = wanted.index(True)
    if all(wanted) or at >= len(alone) or not all(v in given for v in alone[at].invars):
        return [True] * len(eqn.invars), eqn
    one = alone[at]
    outs = eqn.outvars[2 * at : 2 * at + 2]
    made = eqn.replace(
        primitive=one.primitive, params=one.params, outvars=outs,
        invars=[given[v] for v in one.invars],
    )  # fmt: skip
    return [v in one.invars for v in given], made


partial_eval.dce_rules[_QUANTIZE.primitive] = lambda used, *more: _asked_for(used, more[-1])


def dequantized(q: Quantized, dtype, implementation: str | None = None):
    """The values that are stored, ``(..., C)``."""
    run = blocks.dequantize if implementation == "reference" else _DEQUANTIZE
    return run(q.weight, q.scales, block=q.block, dtype=jnp.dtype(dtype))
