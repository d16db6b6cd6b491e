"""What this package's calls cost: ``jgg.cost.of(function, *arguments)`` in FLOPs and bytes.

XLA's cost analysis cannot see into a custom call (it counts -1 for each). Add the costs of this
module to what XLA says of the rest. If no kernel runs a call, as with
``implementation="reference"``, XLA sees the operations that the call stands for.

Every operation has a function of its name with its own arguments:
``jgg.cost.grouped_mm(x, w, group_sizes, ...)``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params
from jax.interpreters import partial_eval

from ._core.costs import COSTS, Cost, Value
from ._core.operations import OPERATIONS

__all__ = ["Cost", "of"]


def __getattr__(name: str) -> Callable[..., Cost]:
    if name in OPERATIONS:
        return functools.partial(of, OPERATIONS[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *OPERATIONS])


def of(function: Callable, *args, **kwargs) -> Cost:
    """The cost of this package's calls in ``function(*args, **kwargs)``, which does not run.

    Gradients are functions like others: ``of(jax.grad(loss), params)``. Only this package's
    products and conversions count. Other operations do not, such as ``dot_general`` (and so
    ``ragged_dot_general`` with a ragged batch axis), nor does what XLA always does: transposing,
    ``positions`` and swizzled scales. With sharded arrays the cost is the sum over all devices.

    Args:
      function: anything that JAX can trace.
      *args, **kwargs: its arguments; arrays, at any depth, may be :class:`jax.ShapeDtypeStruct`.

    The cost uses the values of group sizes, segments and indices if these follow from integers:
    concrete arrays among the arguments, and constants. Otherwise (they depend on other arguments,
    are ``ShapeDtypeStruct``, or lie in a loop, a branch or a ``shard_map``) shapes decide: every
    row is in a group or segment, and every matrix is read, as far as there are rows.

    The body of a ``scan`` counts for each iteration, that of a ``while_loop`` once, the most
    expensive branch of a ``cond``, and what ``shard_map`` maps for each device.

    Returns:
      The :class:`Cost`. What XLA removes because no result needs it does not count.

    Raises:
      What ``function`` raises where it is traced with these arguments.

    Examples:
      >>> shape = jax.ShapeDtypeStruct
      >>> x, w = shape((32, 64), jnp.bfloat16), shape((4, 64, 16), jnp.bfloat16)
      >>> jgg.cost.of(jgg.grouped_mm, x, w, shape((4,), jnp.int32)).flops  # 2 * 32 * 64 * 16
      65536
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]

    def traced(*arrays):
        given = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            given[i] = array
        args, kwargs = tree.unflatten(given)
        return function(*args, **kwargs)

    arrays = [leaves[i] for i in places]
    jaxpr = jax.make_jaxpr(traced)(*arrays)
    # Without what no result needs, as XLA will run it.
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, True, instantiate=True)
    return _walk(jaxpr, [_given(a) for a in arrays])[0]


# ---- jaxprs ----------------------------------------------------------------------------------

# Primitives that call their one jaxpr with their own operands, and those that cannot be run from
# their parameters.
_CALLS = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2")
_OPAQUE = ("core_call", "shard_map")


def _given(array) -> Value:
    """The value of an argument or constant: of concrete integers only."""
    if isinstance(array, (Tracer, jax.ShapeDtypeStruct)):
        return None
    return (lambda: jnp.asarray(array)) if jnp.issubdtype(array.dtype, jnp.integer) else None


def _walk(jaxpr: Jaxpr, given: Sequence[Value] | None) -> tuple[Cost, list[Value]]:
    """The cost of a jaxpr and the values of its results; with None no value in it is known."""
    known: dict[Any, Value] = {}
    if given is not None:
        known.update(zip(jaxpr.constvars, map(_given, jaxpr.consts), strict=True))
        known.update(zip(jaxpr.invars, given, strict=True))

    def read(atom) -> Value:
        if given is None:
            return None
        return (lambda: atom.val) if isinstance(atom, Literal) else known.get(atom)

    total = Cost()
    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if eqn.primitive in COSTS:
            operands, outs = ([atom.aval for atom in v] for v in (eqn.invars, eqn.outvars))
            total += COSTS[eqn.primitive](operands, values, outs, **eqn.params)
            if None not in values and given is not None:  # a routing's sizes
                known.update(zip(eqn.outvars, _results(eqn, values), strict=True))
            continue
        inner, name = list(jaxprs_in_params(eqn.params)), eqn.primitive.name
        if name in _CALLS and given is not None:
            cost, results = _walk(inner[0], values)
        else:
            cost, results = _inner_cost(name, eqn.params, inner), []
            if None not in values and not eqn.effects and not (given is None or name in _OPAQUE):
                results = _results(eqn, values)
        total += cost
        known.update(zip(eqn.outvars, results, strict=False))
    return total, [read(atom) for atom in jaxpr.outvars]


def _inner_cost(name: str, params, inner: Sequence[Jaxpr]) -> Cost:
    costs = [_walk(jaxpr, None)[0] for jaxpr in inner]
    if name == "cond" and costs:
        flops, bytes_accessed = zip(*map(dataclasses.astuple, costs), strict=True)
        return Cost(max(flops), max(bytes_accessed))
    total = sum(costs, Cost())
    if name == "scan":
        return total * params["length"]
    if name == "shard_map":
        return total * math.prod(params["mesh"].shape[a] for a in params["newly_manual_axes"])
    return total


def _results(eqn, values: Sequence[Any]) -> list[Value]:
    @functools.cache
    def run():
        out = eqn.primitive.bind(*(value() for value in values), **eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    return [lambda i=i: run()[i] for i in range(len(eqn.outvars))]
