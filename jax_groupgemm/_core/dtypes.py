"""Dtypes of sums and results, and how sixteen-bit floats are stored in loops."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def promoted(*dtypes):
    """The dtype that holds all of these, whatever ``jax_numpy_dtype_promotion`` says of users'
    own expressions: operands' dtypes have been accepted by then. JAX has no such dtype for floats
    of 8 bits and others; bfloat16 holds each of them."""
    if len({jnp.dtype(dtype) for dtype in dtypes}) > 1:
        dtypes = [jnp.bfloat16 if _is_float8(dtype) else dtype for dtype in dtypes]
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(functools.reduce(jnp.promote_types, dtypes))


def _is_float8(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8


#: float8_e8m0fnu has no zero for masks and padding, and XLA has no arithmetic of float4_e2m1fn.
_SCALES_AND_CODES = ("float8_e8m0fnu", "float4_e2m1fn")


def multiplied(dtype):
    """The dtype as which operands of this one are multiplied, which holds all of their numbers."""
    dtype = jnp.dtype(dtype)
    if dtype.name in _SCALES_AND_CODES:
        return jnp.dtype(jnp.bfloat16)
    if dtype.kind == "b":
        return jnp.dtype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.dtype(jnp.int8 if jnp.iinfo(dtype).min < 0 else jnp.uint8)
    return dtype


def computed(dtype):
    """The dtype in which a result of this one is computed, before it is converted."""
    if multiplied(dtype) == dtype:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32)


def default_result(common):
    """A product's dtype where none was asked for, of operands with this one in common. Floats of
    8 bits and fewer hold no product that was not scaled for it."""
    return jnp.dtype(jnp.bfloat16) if _is_float8(common) else jnp.dtype(common)


def has_nan(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).name != "float4_e2m1fn"


def accumulator_dtype(*dtypes):
    """float32 for anything narrower, else the operands' own (float64, integers, complex)."""
    dtype = promoted(*dtypes)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(dtype)


def summed(operand, result):
    """The dtype in which products are added up. JAX wants one at least as wide as integers are."""
    dtype = accumulator_dtype(operand, result)
    integers = jnp.issubdtype(operand, jnp.integer) and jnp.issubdtype(dtype, jnp.inexact)
    if integers and jnp.finfo(dtype).bits < jnp.iinfo(operand).bits:
        return promoted(dtype, jnp.float64)
    return dtype


def converted(a, dtype) -> jax.Array:
    """``a`` in ``dtype``: of complex numbers the real part where that is real, as the gradient of
    a real operand is."""
    real = not jnp.issubdtype(dtype, jnp.complexfloating)
    return (a.real if jnp.iscomplexobj(a) and real else a).astype(dtype)


def one_or_nan(right) -> jax.Array:
    """float32: 1 where ``right``. It is made of bits, since jax.debug_nans takes any NaN for a
    mistake, and by a product, since JAX maps no selection from numbers of no mesh."""
    one, nan = (jnp.uint32(v) for v in np.array([1, np.nan], np.float32).view(np.uint32))
    bits = one + (nan - one) * (~right).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits, jnp.float32)


def cotangent_dtype(dtype):
    """The dtype to which a product's cotangent is rounded; None for no rounding.

    The product's sums stay float32 while more is done to them, and then the result is rounded to
    ``dtype``. Its cotangent is rounded to that dtype where it has 16 bits, as if nothing more were
    done. A float32 cotangent would make float32 products of both gradients."""
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 16
    return jnp.dtype(dtype) if half else None


def storage(a):
    """Sixteen-bit floats as their bits: XLA's CPU backend widens them around slices and updates
    (in jaxlib 0.11.0 the whole buffer, in every iteration of a loop)."""
    return lax.bitcast_convert_type(a, jnp.uint16) if is_half(a.dtype) else a


def load(a, dtype):
    return lax.bitcast_convert_type(a, dtype) if is_half(dtype) else a


def is_half(dtype):
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2
