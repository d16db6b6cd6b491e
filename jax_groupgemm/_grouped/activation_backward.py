"""The backward pass of an activation, as one primitive: the cotangent of its operand, and what the
backward pass of a product behind it needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._core import costs, dtypes
from .._core.composed import Composed
from .._kernels import choose, problems
from .activations import GATED_ACTIVATIONS, activate
from .call import attributes


def activation_backward(h, d, activation: str):
    """The cotangent of ``h``, (T, N), where ``d`` is that of ``activate(h, activation)``, which is
    rounded to h's dtype; made in float32, and in h's dtype."""
    return _BACKWARD(h, d.astype(h.dtype), None, activation=activation)[0]


def scaled_activation_backward(h, d, row_scale, activation: str):
    """The same where rows are multiplied by ``row_scale``, (T,), behind the activation and what
    ``d`` is the cotangent of.

    Returns:
      ``row_scale * dh``; ``row_scale * a``, where a is the rounded activation; and the float32
      sums over columns of ``d * a``, (T,), which are the cotangent of ``row_scale``.
    """
    scale = row_scale.astype(dtypes.accumulator_dtype(h.dtype))
    return _BACKWARD(h, d.astype(h.dtype), scale, activation=activation)


def _composed(h, d, row_scale, *, activation: str):
    wide = dtypes.accumulator_dtype(h.dtype)
    d = d.astype(wide)
    a, pull = jax.vjp(lambda h: activate(h, activation), h.astype(wide))
    if row_scale is None:
        return (pull(d)[0].astype(h.dtype),)
    a = a.astype(h.dtype).astype(wide)
    scale = row_scale[:, None]
    return pull(d * scale)[0].astype(h.dtype), (a * scale).astype(h.dtype), (d * a).sum(1)


def _call(platform, h, d, row_scale, *, activation: str):
    columns = h.shape[1] // (2 if activation in GATED_ACTIVATIONS else 1)
    problem = problems.Rows(
        op="activation_backward", platform=platform, dtypes=(h.dtype.name, d.dtype.name),
        out_dtype=h.dtype.name, empty=0 in (*h.shape, *d.shape), columns=columns,
    )  # fmt: skip
    if activation not in choose.ACTIVATIONS or choose.choose(problem) is None:
        return None
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    results, operands = [like(h)], [h, d]
    if row_scale is not None:
        results += [like(d), jax.ShapeDtypeStruct(row_scale.shape, jnp.float32)]
        operands.append(row_scale)
    call = jax.ffi.ffi_call("jgg_activation_backward", results)
    return tuple(call(*operands, **attributes({"activation": activation})))


_BACKWARD = Composed("jgg_activation_backward", _composed, _call, cost=costs.conversion)
