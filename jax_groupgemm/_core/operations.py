"""The public operations by name, and how one is called."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from . import partition

#: For whoever lists them: ``jgg.cost``, ``info`` and the tests.
OPERATIONS: dict[str, Callable] = {}

#: Within another program there is none of our own. jax 0.12 has several ways to put one into
#: another, and takes True for one that keeps it until it is lowered.
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)

#: Arguments that are numbers and no operands.
_NUMBERS = (
    "axis", "bits", "block", "group_size", "contract", "num_experts", "max_rows", "top_k", "scale",
    "groups", "top_groups", "rate",
)  # fmt: skip


def listed[F: Callable](function: F) -> F:
    """A public operation that is not one program: it warns, or returns an operand."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if "flax.nnx" in sys.modules:
            args, kwargs = [*map(_value, args)], {name: _value(a) for name, a in kwargs.items()}
        if not partition.maps_explicit_axes():
            return function(*args, **kwargs)
        with partition.mesh_of_mapped((args, kwargs)):
            return function(*args, **kwargs)

    OPERATIONS[function.__name__] = call
    return call  # pyright: ignore[reportReturnType]


def operation[F: Callable](function: F) -> F:
    """A public operation. Outside of any program it is one of its own: operations of JAX that run
    alone bring each constant to the device, which ``jax.transfer_guard`` counts as a transfer."""
    return listed(one_program(function))


def operation_of_its_own_gradient[F: Callable](function: F) -> F:
    """The same of an operation whose gradient is a ``custom_vjp``: JAX transforms one in a program
    otherwise, without zeros that are symbolic, and not under ``vmap``. So it is one where nothing
    is transformed."""
    traced = lambda a: isinstance(a, Tracer)
    may = lambda arrays: not any(map(traced, jax.tree.leaves(arrays)))
    return listed(one_program(function, may))


def one_program[F: Callable](function: F, may: Callable[[dict], bool] = lambda arrays: True) -> F:
    """A function that is one program, as :func:`operation` says, where ``may`` is true of its
    arrays, and that is in no list."""
    parameters = _Parameters.of(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        parts = None if _directly() else _parts(parameters, args, kwargs)
        if parts is None or not may(parts[0]):
            return function(*args, **kwargs)
        arrays, static = parts
        return _program(function, static)(arrays)

    return call  # pyright: ignore[reportReturnType]


def _value(a):
    """The value of a variable of flax's nnx; anything else as it is."""
    return a.get_value() if isinstance(a, sys.modules["flax.nnx"].Variable) else a


def _directly() -> bool:
    """Where the parts of an operation look at the mesh that they run in, or where the user wants no
    programs."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty or jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


class _Parameters(NamedTuple):
    """Names of a function's parameters: ``inspect.Signature.bind`` takes longer than a program."""

    positional: tuple[str, ...]
    names: frozenset[str]
    required: frozenset[str]

    @classmethod
    def of(cls, function: Callable) -> _Parameters:
        found = inspect.signature(function).parameters.values()
        return cls(
            tuple(p.name for p in found if p.kind is not p.KEYWORD_ONLY),
            frozenset(p.name for p in found),
            frozenset(p.name for p in found if p.default is p.empty),
        )

    def bound(self, args, kwargs) -> dict[str, Any] | None:
        """Arguments by name; None where they are not those of the function."""
        given = dict(zip(self.positional, args, strict=False))
        if len(given) != len(args) or not given.keys().isdisjoint(kwargs):
            return None
        given |= kwargs
        return given if self.required <= given.keys() <= self.names else None


def _parts(parameters: _Parameters, args, kwargs):
    """Operands that are arrays, by name, and the other arguments; None where others than arrays, as
    lists and numbers, are operands, or where something is wrong: the operation says what."""
    arrays, static, all_leaves = {}, {}, []
    given = parameters.bound(args, kwargs)
    if given is None:
        return None
    try:
        for name, value in given.items():
            if isinstance(value, jax.Array):
                leaves = [value]
            elif value is None or isinstance(value, (bool, str)):
                static[name] = value
                continue
            else:
                leaves, tree = jax.tree.flatten(value)
                if jax.tree.structure(tree.unflatten(leaves)) != tree:
                    return None  # a record that its constructor did not make
            if leaves and all(isinstance(leaf, jax.Array) for leaf in leaves):
                if name in _NUMBERS:
                    return None  # its value is asked for
                arrays[name] = value
                all_leaves += leaves
            elif name not in _NUMBERS and any(map(_is_number, leaves)):
                return None
            else:
                static[name] = value
        # With types: 2.0 is equal to 2, for which there may be a program already.
        key = frozenset((name, type(value), value) for name, value in static.items())
    except (AttributeError, TypeError, ValueError):
        return None
    return None if any(map(_has_explicit_axes, all_leaves)) else (arrays, key)


def _has_explicit_axes(a: jax.Array) -> bool:
    if not isinstance(a, Tracer) and isinstance(a.sharding, SingleDeviceSharding):
        return False
    return bool(jax.typeof(a).sharding.mesh.explicit_axes)


def _is_number(leaf: Any) -> bool:
    known = (int, float, complex, np.generic, np.ndarray, jax.Array)
    return isinstance(leaf, known) and not isinstance(leaf, bool)


@functools.lru_cache(4096)
def _program(function: Callable, static: frozenset) -> Callable:
    def program(arrays: dict):
        return function(**arrays, **{name: value for name, _, value in static})

    program.__name__ = function.__name__
    return jax.jit(program, inline=INLINE)
