"""Codes of matrices with one scale each: a scale that is known, and what one is made of.

    code = e4m3(x / scale), saturated        NaN where x is not finite, 0 where the scale is not

Codes of one scale are the same along either axis, so both ways come of one read of x.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import conversion, dtypes, parts
from .._core import float_bits as fb
from .._core.float_bits import i32, u32
from .._kernels import problems
from .._quantized import padding
from . import blocks, conversion_calls

_BIAS = 127
_NAN = 0x7F  # of either format


def largest(x, group_sizes=None, wanted=None) -> jax.Array:
    """uint32 ``(..., 2)``: bits of each matrix' largest magnitude, NaN being the largest, and of
    the largest finite one. Rows of no group do not count. Where ``wanted`` is False nobody reads
    the result."""
    return _LARGEST(x, group_sizes, wanted)


def codes(x, scales, *, group_sizes=None, row_index=None, seed=None, axes=(-1,),
          measures: bool = False, element: str = "e4m3",
          power_of_two: bool = True) -> tuple[jax.Array, ...]:  # fmt: skip
    """Codes along each of ``axes``, and with ``measures`` :func:`largest` of x. Along -1 they are
    stored as x is, and rows of no group are zeros; along -2 stored transposed, groups padded to
    whole blocks.

    Args:
      x: ``(..., R, C)``. With a ``row_index`` (T,) row t is ``x[row_index[t]]``, or zeros where
        that is negative.
      scales: float32 ``(...,)``; ``power_of_two`` says that they are.
      group_sizes: ``(G,)``, of one matrix.
      seed: two words, to round at random.
    """
    static = {
        "axes": axes, "measures": measures, "element": element, "power_of_two": power_of_two
    }  # fmt: skip
    operands = x, scales, group_sizes, row_index
    if seed is not None:  # kernels round to nearest
        return _codes(*operands, seed=seed, **static)
    return _CAST(*operands, **static)


def reordered(q, group_sizes, row_index, axes) -> tuple[jax.Array, ...]:
    """Codes ``q`` (T, C) in another order: ``q[row_index]`` along each of ``axes``, as
    :func:`codes` stores them. Rows of no group may hold anything along -1."""
    static = {"element": blocks.DTYPES[q.dtype.name], "measures": False, "power_of_two": True}
    return _CAST(q, None, group_sizes, row_index, axes=axes, **static)


def _inside(x, group_sizes):
    if group_sizes is None:
        return x
    inside = padding.covered(group_sizes, x.shape[0])
    return jnp.where(inside[:, None], x, jnp.zeros((), x.dtype))


def _largest(x, group_sizes, wanted=None):
    del wanted
    b = fb.magnitude(fb.bits(_inside(x, group_sizes)))
    most = functools.partial(jnp.max, axis=(-2, -1), initial=np.uint32(0))
    every = most(b)
    every = jnp.where(every > u32(fb.INF), u32(fb.NAN), every)
    return jnp.stack([every, most(jnp.where(b < u32(fb.INF), b, 0))], -1)


def _codes(x, scales, group_sizes, row_index, *, axes, measures, element, power_of_two, seed=None):
    if scales is None:
        x = lax.bitcast_convert_type(x, jnp.uint8)
    if row_index is not None:
        x = dtypes.load(padding.take_rows(dtypes.storage(x), row_index), x.dtype)
    stored = x = _inside(x, group_sizes)
    if scales is not None:
        stored = _encoded(x, scales, seed, blocks.ELEMENTS[element], power_of_two)
    out = []
    for axis in axes:
        a = stored
        if axis == -2 and group_sizes is not None:
            source = padding.padding(group_sizes, x.shape[0], blocks.GROUPED).source
            a = padding.take_rows(a, source)
        a = a.swapaxes(-1, -2) if axis == -2 else a
        out.append(lax.bitcast_convert_type(a, blocks.ELEMENTS[element].dtype))
    return (*out, _largest(x, None)) if measures else (*out,)


def _encoded(x, scales, seed, kind: blocks.Element, power_of_two: bool):
    """uint8."""
    b, of = fb.bits(x), fb.bits(scales)[..., None, None]
    if power_of_two:
        m, e = fb.split(b)
        e = e - (i32(of >> 23) - _BIAS)
    else:
        m, e = fb.split(fb.divide(b, jnp.broadcast_to(of, b.shape)))
    if seed is None:
        code = fb.encode(m, e, mantissa=kind.mantissa, emin=kind.emin, limit=kind.limit)
    else:
        code = blocks.stochastic(m, e, blocks.random(x.shape, seed), kind)
    code = jnp.where(fb.magnitude(b) < u32(fb.INF), code | ((b >> 31) << 7), u32(_NAN))
    return jnp.where(fb.magnitude(of) < u32(fb.INF), code, u32(0)).astype(jnp.uint8)


def _problem(x, rows: int, along: int):
    of_codes = x.dtype.itemsize == 1
    return functools.partial(
        problems.Fp8Conversion, mode="fp8", dtypes=() if of_codes else (x.dtype.name,), rows=rows,
        columns=x.shape[-1], along=along, block=None,
    )  # fmt: skip


def _problem_of_codes(x, scales, group_sizes, row_index, *, axes, power_of_two, **_):
    del scales
    rows = x.shape[-2] if row_index is None else row_index.shape[0]
    along = 0
    if -2 in axes:
        groups = 0 if group_sizes is None else group_sizes.shape[0]
        along = rows if group_sizes is None else padding.padded_rows(rows, groups, blocks.GROUPED)
    problem = _problem(x, rows * math.prod(x.shape[:-2]), along)
    return functools.partial(problem, power_of_two=power_of_two)


def _problem_of_largest(x, group_sizes, wanted):
    del group_sizes, wanted
    return _problem(x, math.prod(x.shape[:-1]), 0)


# ---- on several devices -------------------------------------------------------------------------


def _parts_of_codes(part, x, scales, group_sizes, row_index, *, axes, measures, **static):
    """Matrices, rows and columns may be divided; not rows that are padded group by group. Codes are
    made before they are padded, so that nothing else is gathered."""
    if row_index is not None:
        return None
    static |= {"measures": measures}
    if -2 in axes and group_sizes is not None and scales is not None:
        by_rows, *found = _parts_of_codes(
            part, x, scales, group_sizes, None, axes=(-1,), **static
        )  # fmt: skip
        static["measures"] = False
        along = _parts_of_codes(part, by_rows, None, group_sizes, None, axes=(-2,), **static)
        made = {-1: by_rows, -2: along[0]}
        return *(made[axis] for axis in axes), *found
    run = functools.partial(_codes, axes=axes, **static)
    types = jax.eval_shape(run, x, scales, group_sizes, None)
    lead, rows = parts.letters(x), "r"
    if -2 in axes and group_sizes is not None:
        rows = parts.WHOLE
    words = [lead + (f"{rows}c" if axis == -1 else f"c{rows}") for axis in axes]
    words += [lead + parts.WHOLE] * measures
    of_scales = None if scales is None else lead
    given = f"{lead}{rows}c", of_scales, None if group_sizes is None else parts.WHOLE, None
    results = [*zip(words, types, strict=True)]
    return tuple(part(given, results, x, scales, group_sizes, None, axes=axes, **static))


def _local_codes(cut, x, scales, group_sizes, row_index, *, measures, **static):
    group_sizes = cut.sizes(group_sizes, "r", x.shape[-2])
    found = _CAST(x, scales, group_sizes, row_index, measures=measures, **static)
    return (*found[:-1], cut.largest(found[-1], "rc")) if measures else found


def _parts_of_largest(part, x, group_sizes, wanted):
    lead = parts.letters(x)
    given = f"{lead}rc", None if group_sizes is None else parts.WHOLE, None
    if wanted is not None:
        given = *given[:2], ""
    types = jax.eval_shape(_largest, x, group_sizes)
    return tuple(part(given, [(lead + parts.WHOLE, types)], x, group_sizes, wanted))


def _local_largest(cut, x, group_sizes, wanted):
    found = _LARGEST(x, cut.sizes(group_sizes, "r", x.shape[-2]), wanted)
    return (cut.largest(found, "rc"),)


_CAST = conversion.composed(
    "fp8_cast", _codes, conversion_calls.cast, _problem_of_codes,
    batch=conversion.of_matrices(2), each=True, parts=_parts_of_codes, local=_local_codes,
)  # fmt: skip
_LARGEST = conversion.composed(
    "fp8_largest", _largest, conversion_calls.largest, _problem_of_largest,
    batch=conversion.of_matrices(1), each=True, parts=_parts_of_largest, local=_local_largest,
)  # fmt: skip
