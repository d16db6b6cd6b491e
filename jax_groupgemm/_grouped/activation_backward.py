"""The backward pass of an activation, as one primitive: the cotangent of its operand, and what the
backward pass of a product behind it needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._core import costs, dtypes
from .._core.composed import Composed
from .._kernels import choose, problems
from .activations import ACTIVATIONS, activate, is_gated
from .call import attributes


def activation_backward(h, d, activation: str):
    """The cotangent of ``h``, (T, N), where ``d`` is that of ``activate(h, activation)``, which is
    rounded to h's dtype; made in float32, and in h's dtype."""
    return _BACKWARD(h, d.astype(h.dtype), None, None, activation=activation)[0]


def scaled_activation_backward(h, d, row_scale, activation: str, live_rows=None):
    """The same where rows are multiplied by ``row_scale``, (T,), behind the activation and what
    ``d`` is the cotangent of. Rows from ``live_rows`` on, int32 (), may hold anything.

    Returns:
      ``row_scale * dh``; ``row_scale * a``, where a is the rounded activation; and the float32
      sums over columns of ``d * a``, (T,), which are the cotangent of ``row_scale``.
    """
    scale = row_scale.astype(dtypes.accumulator_dtype(h.dtype))
    return _BACKWARD(h, d.astype(h.dtype), scale, live_rows, activation=activation)


def _composed(h, d, row_scale, live_rows, *, activation: str):
    del live_rows
    wide = dtypes.accumulator_dtype(h.dtype)
    d, h_wide = d.astype(wide), h.astype(wide)
    function = ACTIVATIONS[activation].function
    if is_gated(activation):
        a, pull = jax.vjp(function, *jnp.split(h_wide, 2, axis=1))
        # Beside each other, in one pass: neither is filled up with zeros and added.
        join = lambda halves: jnp.stack([v.astype(h.dtype) for v in halves], 1).reshape(h.shape)
    else:
        a, pull = jax.vjp(function, h_wide)
        join = lambda parts: parts[0].astype(h.dtype)
    if row_scale is None:
        return (join(pull(d)),)
    a = a.astype(h.dtype).astype(wide)
    scale = row_scale[:, None]
    return join(pull(d * scale)), (a * scale).astype(h.dtype), (d * a).sum(1)


def _call(platform, h, d, row_scale, live_rows, *, activation: str):
    columns = h.shape[1] // (2 if is_gated(activation) else 1)
    problem = problems.Rows(
        op="activation_backward", platform=platform, dtypes=(h.dtype.name, d.dtype.name),
        out_dtype=h.dtype.name, empty=0 in (*h.shape, *d.shape), columns=columns,
        activation=activation,
    )  # fmt: skip
    if choose.choose(problem) is None:
        return None
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    results, operands, aliases = [like(h)], [h, d], {}
    if row_scale is not None:
        aliases = {0: 0, 1: 1}  # each thread writes where it has read
        results += [like(d), jax.ShapeDtypeStruct(row_scale.shape, jnp.float32)]
        operands.append(row_scale)
        if live_rows is not None:
            operands.append(live_rows)
    call = jax.ffi.ffi_call("jgg_activation_backward", results, input_output_aliases=aliases)
    return tuple(call(*operands, **attributes({"activation": activation})))


_BACKWARD = Composed("jgg_activation_backward", _composed, _call, cost=costs.conversion)


def rounded_activation(h, activation: str):
    """The activation of h, made in float32 and rounded to h's dtype."""
    return _ROUNDED(h, activation=activation)


def _rounded(h, *, activation: str):
    return activate(h.astype(dtypes.accumulator_dtype(h.dtype)), activation).astype(h.dtype)


_ROUNDED = Composed(
    "jgg_activation", _rounded, lambda *_, **__: None, cost=costs.conversion,
    vjp=(
        lambda h, *, activation: (rounded_activation(h, activation), ()),
        lambda _, operands, cts, *, activation: (
            activation_backward(operands[0], cts[0], activation),
        ),
    ),
)  # fmt: skip
