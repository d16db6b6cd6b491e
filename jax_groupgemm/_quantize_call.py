"""``quantize`` and ``dequantize`` of leaves, as one custom call each where a GPU takes it.

    weight (..., K*bits/32), scales, biases (..., K/group_size)  <->  w (..., K)

A global scale has the shape of leading axes, or none.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from . import _call
from ._either import either


def quantize(definition: Callable, w, global_scale, **static):
    """``definition(w, global_scale, *, mode, bits, group_size)``: weight, scales[, biases]."""
    return either(
        "jgg_quantize", definition, _call.quantize, (w, global_scale), batch=_batch, **static
    )


def dequantize(definition: Callable, weight, scales, biases, global_scale, **static):
    """``definition(weight, scales, biases, global_scale, *, mode, bits, group_size, dtype)``: w."""
    operands = weight, scales, biases, global_scale
    (out,) = either(
        "jgg_dequantize", definition, _call.dequantize, operands, batch=_batch, **static
    )
    return out


def _batch(size: int, operands, axes):
    """A batch becomes the first leading axis. One global scale for all may stay as it is."""

    def first(a, axis):
        if axis is not None:
            return jnp.moveaxis(a, axis, 0)
        return jnp.broadcast_to(a, (size, *a.shape))

    *arrays, scale = operands
    *axes, scale_axis = axes
    arrays = [None if a is None else first(a, d) for a, d in zip(arrays, axes, strict=True)]
    if scale is not None and not (scale_axis is None and scale.ndim == 0):
        scale = first(scale, scale_axis)
    return *arrays, scale
