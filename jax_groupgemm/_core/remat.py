"""What ``jax.checkpoint`` keeps under ``jax_remat3``, a setting of JAX that is off by default.

Without it a program is differentiated first, and then policies see what derivatives are made of.
With it policies see the program itself, and a primitive without a rule is computed once more. JAX
has no public way to give one a rule; where its own way is not that of jax 0.12, primitives have
none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable, Saveable
from jax.extend.core import Jaxpr, Primitive, jaxpr_as_fun

try:
    if jax.__version_info__ < (0, 12):
        raise ImportError("rules of jax 0.11 are of another form")
    from jax._src import ad_checkpoint as _checkpoint
    from jax._src.interpreters import remat as _remat

    _RULES: dict[Primitive, Callable] | None = _remat.rules
    _primal_left: Callable = _checkpoint.primal_left_tangent_right
    _halves: Callable = _remat.remat_jaxpr
    _rounded: Callable = _remat.reduce_precision  # else XLA may keep more than was computed
except (ImportError, AttributeError):
    _RULES = None


def has_rule(primitive: Primitive, parts: Callable | None = None) -> None:
    """A policy is asked about the results of this primitive. Before that ``parts(divide, *operands,
    **params)`` may return what a rule of JAX does, or None; ``divide`` is :func:`_divided`."""
    if _RULES is not None:
        _RULES[primitive] = functools.partial(_rule, primitive, parts)


def _rule(primitive: Primitive, parts, trace, *operands, **params):
    """The results; what is kept of them; and how they come of that, and of operands, again."""
    run = functools.partial(primitive.bind, **params)
    if trace.policy is not None:
        divide = functools.partial(_divided, trace, primitive)
        found = None if parts is None else parts(divide, *operands, **params)
        if found is not None:
            return found
        case = trace.policy(primitive, *map(jax.typeof, operands), **params)
        if case is True or isinstance(case, type(Saveable)):
            out = jax.tree.map(_rounded, run(*operands))
            return out, out, lambda out, *again: _with_tangent_of(out, run(*again))
        if isinstance(case, Offloadable):
            out, spaces = jax.tree.map(_rounded, run(*operands)), jax.memory.Space
            to = lambda kind: spaces.Host if kind == "pinned_host" else spaces.Device
            away = jax.device_put(out, to(case.dst), may_alias=False)
            back = lambda away: jax.device_put(away, to(case.src), may_alias=False)
            return out, away, lambda away, *again: _with_tangent_of(back(away), run(*again))
    return run(*operands), (), lambda _, *again: run(*again)


def _with_tangent_of(kept, again):
    """``kept``, with the derivative of ``again``, whose value is then dead code."""
    moves = lambda a: jnp.issubdtype(a.dtype, jnp.inexact)
    return jax.tree.map(lambda a, b: _primal_left(a, b) if moves(a) else a, kept, again)


def _divided(trace, primitive: Primitive, jaxpr: Jaxpr, operands):
    """``(results, kept, again)`` of a jaxpr: ``kept`` is what the policy keeps of its parts, and
    ``again(kept, *operands)`` are the results once more. None where it keeps nothing, and where the
    primitive is one of the parts."""
    if any(eqn.primitive is primitive for eqn in jaxpr.eqns):
        return None
    forward, backward, places = _halves(jaxpr, trace.policy, trace.custom_vjp_rules, True)
    if not places:
        return None
    found = jaxpr_as_fun(forward)(*operands)
    outs, more = found[: len(jaxpr.outvars)], iter(found[len(jaxpr.outvars) :])
    kept = [next(more) if place is None else outs[place] for place in places]
    return outs, kept, lambda kept, *operands: jaxpr_as_fun(backward)(*kept, *operands)
