"""Activations that a product, or a mixture of experts, may have. All map 0 to 0, so a row of zeros
stays one."""

from __future__ import annotations

import dataclasses
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


def _swiglu_oai(gate, up):
    """gpt-oss's: both are clipped, the sigmoid is steeper, and 1 is added to up."""
    gate = jnp.minimum(gate, 7)
    return (jnp.clip(up, -7, 7) + 1) * gate * jax.nn.sigmoid(1.702 * gate)


@dataclasses.dataclass(frozen=True)
class Definition:
    """The definition of an activation.

    Attributes:
      function: ``function(y)``, or ``function(gate, up)`` if it is gated.
      gated: whether it takes gate and up, which are the halves of N.
    """

    function: Callable
    gated: bool = False


#: By name, in the order in which messages name them.
ACTIVATIONS: dict[str, Definition] = {
    "silu": Definition(jax.nn.silu),
    "gelu": Definition(jax.nn.gelu),
    "gelu_erf": Definition(_gelu_erf),
    "relu": Definition(jax.nn.relu),
    "relu2": Definition(lambda y: jnp.square(jax.nn.relu(y))),
    "tanh": Definition(jnp.tanh),
    "swiglu": Definition(lambda gate, up: jax.nn.silu(gate) * up, gated=True),
    "geglu": Definition(lambda gate, up: jax.nn.gelu(gate) * up, gated=True),
    "reglu": Definition(lambda gate, up: jax.nn.relu(gate) * up, gated=True),
    "swiglu_oai": Definition(_swiglu_oai, gated=True),
}


def is_gated(activation: str | None) -> bool:
    """Whether an activation takes gate and up. None takes neither."""
    return activation is not None and ACTIVATIONS[activation].gated


def activate(y, activation: str | None) -> jax.Array:
    """``y`` (T, N) after its activation; with a gated one N/2 columns."""
    if activation is None:
        return y
    function = ACTIVATIONS[activation].function
    if not is_gated(activation):
        return function(y)
    half = y.shape[1] // 2
    return function(y[:, :half], y[:, half:])


#: Functions of JAX by ``__name__``, where that is none of ours.
_FUNCTIONS = {"swish": "silu"}


def check_name(op: str, activation, *others: None) -> None:
    """Raises ValueError where there is no such activation; ``others`` may be None."""
    if activation is None and others:
        return
    if isinstance(activation, str) and activation in ACTIVATIONS:
        return
    known = ", ".join(map(repr, (*others, *ACTIVATIONS)))
    if not callable(activation):
        raise ValueError(f"jgg.{op}: activation={activation!r} is not one of {known}")
    known = f"one of {known}"
    function = getattr(activation, "func", activation)  # of a functools.partial
    name = getattr(function, "__name__", type(function).__name__)
    ours = _FUNCTIONS.get(name, name)
    if ours == "gelu" and not getattr(activation, "keywords", {}).get("approximate", True):
        ours = "gelu_erf"
    raise ValueError(
        f"jgg.{op}: activation is the function {name}, and kernels know activations by name: write "
        f"{f'activation={ours!r}' if ours in ACTIVATIONS else known}"
    )


def columns(op: str, activation: str | None, n: int) -> int:
    """The columns that N become. Raises ValueError where there is no such activation."""
    check_name(op, activation, None)
    if not is_gated(activation):
        return n
    if n % 2:
        raise ValueError(
            f"jgg.{op}: activation={activation!r} takes gate and up as the two halves of N, "
            f"but N is {n}"
        )
    return n // 2
