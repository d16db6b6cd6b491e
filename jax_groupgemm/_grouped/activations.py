"""Activations that a product, or a mixture of experts, may have. All map 0 to 0, so a row of zeros
stays one."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def _below(y):
    """The part of a normal distribution that is below y. JAX's derivative of erfc is none within a
    ``shard_map`` that checks what varies (0.12.0)."""
    return 0.5 * lax.erfc(-y * math.sqrt(0.5))


@_below.defjvp
def _below_jvp(primals, tangents):
    (y,) = primals
    return _below(y), tangents[0] * jnp.exp(-0.5 * y * y) * (1 / math.sqrt(2 * math.pi))


def _gelu_erf(y):
    return y * _below(y)


#: Of one operand.
ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_erf": _gelu_erf,
    "relu": jax.nn.relu,
    "relu2": lambda y: jnp.square(jax.nn.relu(y)),
    "tanh": jnp.tanh,
}


def _swiglu_oai(gate, up):
    """gpt-oss's: both are clipped, the sigmoid is steeper, and 1 is added to up."""
    gate = jnp.minimum(gate, 7)
    return (jnp.clip(up, -7, 7) + 1) * gate * jax.nn.sigmoid(1.702 * gate)


#: Of gate and up, which are the halves of N.
GATED_ACTIVATIONS: dict[str, Callable] = {
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "geglu": lambda gate, up: jax.nn.gelu(gate) * up,
    "reglu": lambda gate, up: jax.nn.relu(gate) * up,
    "swiglu_oai": _swiglu_oai,
}


def activate(y, activation: str | None) -> jax.Array:
    """``y`` (T, N) after its activation; with a gated one N/2 columns."""
    if activation is None:
        return y
    if activation in ACTIVATIONS:
        return ACTIVATIONS[activation](y)
    half = y.shape[1] // 2
    return GATED_ACTIVATIONS[activation](y[:, :half], y[:, half:])


def columns(op: str, activation: str | None, n: int) -> int:
    """The columns that N become. Raises ValueError where there is no such activation."""
    named = isinstance(activation, str)
    if activation is None or (named and activation in ACTIVATIONS):
        return n
    if not named or activation not in GATED_ACTIVATIONS:
        known = ", ".join(map(repr, [*ACTIVATIONS, *GATED_ACTIVATIONS]))
        raise ValueError(f"jgg.{op}: activation={activation!r} is not one of None, {known}")
    if n % 2:
        raise ValueError(
            f"jgg.{op}: activation={activation!r} takes gate and up as the two halves of N, "
            f"but N is {n}"
        )
    return n // 2
