"""Mode "fp8" with one scale for a matrix, which is a power of two.

    range = ceil(log2(amax / 1.75)) + 127         scale = 2**(range - 127 - 8), of e4m3
    code  = e4m3(x / scale), saturated            NaN where x is not finite

448 is 1.75 * 2**8 and 57344, the largest number of e5m2, 1.75 * 2**15: so one range serves both
formats. ``amax`` is the largest finite magnitude. Codes are those of ``fp8_quantize(x, block=None,
scale_format="e8m0")`` where all of x is finite. Where it is not, a code is NaN and the scale is
not: other rows, and so other groups, keep their values.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._core import float_bits as fb
from .._core import partition
from .._core.float_bits import i32, u32
from .._kernels import choose, problems
from .._quantized import padding
from .._quantized.array import Quantized
from . import blocks, cast, convert

#: How many ranges there are: the exponents of float32.
RANGES = 256
_BIAS = 127
_ABOVE = 0x600000  # mantissa bits of 1.75


def quantized(x, *, group_sizes=None, seed=None, ages=None, history: int = 1,
              element: str = "e4m3") -> Quantized:  # fmt: skip
    """``x``, ``(..., R, C)``, with a scale for each matrix: its own, or that of the largest range
    whose age is less than ``history``, if there is one. Rows of no group become zeros."""
    static: Any = {"ages": ages, "history": history, "element": element}
    return _with_ranges(x, group_sizes, seed, **static)[0]


def _with_ranges(x, group_sizes, seed, *, ages, history: int, element: str):
    """The same, and what is seen of x where there are ``ages``."""
    run: Any = functools.partial(_quantize, history=history, element=element, axes=(-1,))
    x = lax.stop_gradient(x)
    mesh = partition.explicit_mesh([x] if group_sizes is None else [x, group_sizes])
    if mesh is not None:
        codes = [entry or None for entry in partition.entries_of(x)]
        of_codes, of_scales, whole = (
            NamedSharding(mesh, P(*spec)) for spec in (codes, codes[:-2], (None,))
        )
        specs = (of_codes,), of_scales, None if ages is None else whole
        run = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=specs)
    (codes,), scales, ranges = run(x, group_sizes, seed, ages)
    return convert.made(codes, scales, block=None), ranges


def quantized_both(x) -> tuple[Quantized, Quantized]:
    """Matrices ``(..., R, C)`` with scales of their own, and the transpose of that."""
    x = lax.stop_gradient(x)
    if partition.explicit_mesh([x]) is not None:
        q = quantized(x)
        return q, convert.exchanged(q)
    codes, scales, _ = _quantize(x, None, None, None, history=1, element="e4m3", axes=(-1, -2))
    one, other = (convert.made(of, scales, block=None) for of in codes)
    return one, other


def quantized_lines(x, group_sizes, *, seed=None, ages=None, history: int = 1,
                    element: str = "e4m3"):  # fmt: skip
    """``x`` (T, K), of grouped rows: ``(rows, lines, seen)``, as it is multiplied by weights, and
    as weight gradients contract it, padded group by group. ``seen`` is :func:`seen` of x where
    there are ``ages``."""
    x = lax.stop_gradient(x)
    if partition.explicit_mesh([x, group_sizes]) is not None:
        static: Any = {"ages": ages, "history": history, "element": element}
        q, ranges = _with_ranges(x, group_sizes, seed, **static)
        return q, q, ranges
    codes, scales, ranges = _quantize(
        x, group_sizes, seed, ages, history=history, element=element, axes=(-1, -2)
    )
    positions = padding.padding(group_sizes, x.shape[0], blocks.GROUPED).positions
    rows = convert.made(codes[0], scales, block=None)
    return rows, convert.made(codes[1], scales, positions, block=None, axis=-2), ranges


def measured(x, *, seed=None, ages=None, history: int = 1, element: str = "e4m3"):
    """``(q, seen)``: :func:`quantized` and, where there are ``ages``, :func:`seen` of a matrix."""
    static = {"history": history, "element": element, "axes": (-1,)}
    (codes,), scales, ranges = _quantize(lax.stop_gradient(x), None, seed, ages, **static)
    return convert.made(codes, scales, block=None), ranges


def listed_lines(q: Quantized, row_index, group_sizes) -> Quantized:
    """``q[row_index]`` as weight gradients contract it; rows are zeros where the index is
    negative."""
    (lines,) = cast.reordered(q.weight, group_sizes, row_index, (-2,))
    positions = padding.padding(group_sizes, row_index.shape[0], blocks.GROUPED).positions
    return convert.made(lines, q.scales, positions, block=None, axis=-2)


def scale_of(largest, ages, history: int, element: str):
    """That of the largest range whose age is less than ``history``, or else of what
    ``largest(wanted)`` finds, which may be anything where ``wanted`` is False. It is always wanted
    where there are no ages, and then None."""
    if ages is None:
        return scales_of(range_of(largest(None)), element)
    known = known_range(ages, history)
    return scales_of(jnp.where(known < 0, range_of(largest(known < 0)), known), element)


def takes(platform: str, shape: tuple[int, int], rows: int, dtype) -> bool:
    """Whether kernels cast an array of this shape, and so many rows of it by list."""
    known = {
        "platform": platform, "mode": "fp8", "dtypes": (jnp.dtype(dtype).name,), "block": None,
        "empty": 0 in (*shape, rows), "columns": shape[1],
    }  # fmt: skip
    return all(
        choose.choose(problems.Fp8Conversion(op=op, rows=count, **known)) is not None
        for op, count in (("fp8_largest", shape[0]), ("fp8_cast", rows))
    )


def seen(x, group_sizes):
    """float32 (256,): 1 at the range of a matrix x, or zeros where x has no finite number but 0."""
    run: Any = _seen
    x = lax.stop_gradient(x)
    mesh = partition.explicit_mesh([x] if group_sizes is None else [x, group_sizes])
    if mesh is not None:
        whole = NamedSharding(mesh, P(None))
        run = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=whole)
    return run(x, group_sizes)


@jax.jit
def _seen(x, group_sizes):
    return counted(cast.largest(x, group_sizes))


def counted(largest):
    """The same, of what ``cast.largest`` found."""
    return (lax.iota(jnp.int32, RANGES) == range_of(largest)).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("history", "element", "axes"))
def _quantize(x, group_sizes, seed, ages, *, history: int, element: str, axes: tuple[int, ...]):
    """Codes along each of ``axes``, scales, and what is seen of x where there are ``ages``."""
    largest = functools.partial(cast.largest, x, group_sizes)
    scales = scale_of(largest, ages, history, element)
    more = {"axes": axes, "measures": ages is not None, "element": element}
    found = cast.codes(x, scales, group_sizes=group_sizes, seed=seed, **more)
    if ages is None:
        return found, scales, None
    return found[:-1], scales, counted(found[-1])


def known_range(ages, history: int):
    """int32, the largest whose age is less than ``history``, or -1."""
    return jnp.where(ages < history, lax.iota(jnp.int32, RANGES), -1).max()


def scales_of(exponents, element: str):
    """float32, of ranges; -1 is that of zeros."""
    more = int(math.log2(blocks.ELEMENTS[element].largest / 1.75))
    power = jnp.maximum(exponents - _BIAS - more, -126)
    power = jnp.where(exponents < 0, 0, power)
    return fb.value(u32(power + _BIAS) << 23)


def range_of(largest):
    """int32, of what ``cast.largest`` found; -1 where there is no finite number but 0."""
    amax = largest[..., 1]
    above = (amax & u32(0x7FFFFF)) > u32(_ABOVE)
    return jnp.where(amax == 0, -1, i32(amax >> 23) + i32(above))
