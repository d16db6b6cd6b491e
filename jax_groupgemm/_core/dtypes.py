"""Dtypes of sums and results, and how sixteen-bit floats are stored in loops."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
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


def accumulator_dtype(*dtypes):
    """float32 for anything narrower, else the operands' own (float64, integers, complex)."""
    dtype = promoted(*dtypes)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(dtype)


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
