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
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._core import float_bits as fb
from .._core import partition
from .._core.float_bits import i32, u32
from .._quantized import padding
from .._quantized.array import Quantized
from . import blocks, convert

#: How many ranges there are: the exponents of float32.
RANGES = 256
_BIAS = 127
_NAN = 0x7F  # of either format
_ABOVE = 0x600000  # mantissa bits of 1.75


def quantized(x, *, group_sizes=None, seed=None, ages=None, history: int = 1,
              element: str = "e4m3") -> Quantized:  # fmt: skip
    """``x``, ``(..., R, C)``, with a scale for each matrix: its own, or that of the largest range
    whose age is less than ``history``, if there is one. Rows of no group become zeros."""
    run: Any = functools.partial(_quantize, history=history, element=element)
    x = lax.stop_gradient(x)
    mesh = partition.explicit_mesh([x] if group_sizes is None else [x, group_sizes])
    if mesh is not None:
        codes = [entry or None for entry in partition.entries_of(x)]
        specs = tuple(NamedSharding(mesh, P(*spec)) for spec in (codes, codes[:-2]))
        run = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=specs)
    codes, scales = run(x, group_sizes, seed, ages)
    return convert.made(codes, scales, block=None)


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
    return (lax.iota(jnp.int32, RANGES) == _range(_inside(x, group_sizes))).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("history", "element"))
def _quantize(x, group_sizes, seed, ages, *, history: int, element: str):
    kind, x = blocks.ELEMENTS[element], _inside(x, group_sizes)
    exponents = _range(x)
    if ages is not None:
        recent = jnp.where(ages < history, lax.iota(jnp.int32, RANGES), -1).max()
        exponents = jnp.where(recent < 0, exponents, recent)
    power = jnp.maximum(exponents - _BIAS - int(math.log2(kind.largest / 1.75)), -126)
    power = jnp.where(exponents < 0, 0, power)
    codes = _codes(x, power[..., None, None], seed, kind)
    return codes, fb.value(u32(power + _BIAS) << 23)


def _inside(x, group_sizes):
    if group_sizes is None:
        return x
    inside = padding.covered(group_sizes, x.shape[0])
    return jnp.where(inside[:, None], x, jnp.zeros((), x.dtype))


def _range(x):
    """int32, that of each matrix; -1 where it has no finite number but 0."""
    b = fb.magnitude(fb.bits(x))
    amax = jnp.max(jnp.where(b < u32(fb.INF), b, 0), axis=(-2, -1), initial=np.uint32(0))
    above = (amax & u32(0x7FFFFF)) > u32(_ABOVE)
    return jnp.where(amax == 0, -1, i32(amax >> 23) + i32(above))


def _codes(x, power, seed, kind: blocks.Element):
    b = fb.bits(x)
    m, e = fb.split(b)
    if seed is None:
        code = fb.encode(m, e - power, mantissa=kind.mantissa, emin=kind.emin, limit=kind.limit)
    else:
        code = blocks.stochastic(m, e - power, blocks.random(x.shape, seed), kind)
    code = jnp.where(fb.magnitude(b) < u32(fb.INF), code, u32(_NAN)) | ((b >> 31) << 7)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), kind.dtype)
