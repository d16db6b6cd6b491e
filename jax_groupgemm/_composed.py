"""Primitives that mean a composition of others, and that a kernel may run as one call.

One has no rules of its own: differentiating or batching it goes back to the composition, whose
parts have theirs. Sharded operands (Auto, Explicit) are composed too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _partition, _primitives


class Composed(NamedTuple):
    """The two levels of such a primitive, as those of ``_primitives``."""

    composed: Callable
    inner: Primitive
    outer: Primitive

    def __call__(self, *operands, **params):
        if _partition.explicit_mesh(operands) is not None:
            return self.composed(*operands, **params)
        manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
        primitive = self.inner if manual else self.outer
        return primitive.bind(*_primitives.vary_alike(*operands), **params)


def make(name: str, abstract: Callable, composed: Callable, lowering: Callable) -> Composed:
    """``composed(*operands, **params)`` is the meaning, ``lowering(platform, *operands, **params)``
    what one device runs."""
    levels = (_make(name, level, abstract, composed) for level in ("inner", "outer"))
    made = Composed(composed, *levels)
    for platform in ("cpu", "cuda", None):
        rule = mlir.lower_fun(
            functools.partial(lowering, platform or "other"), multiple_results=False
        )
        mlir.register_lowering(made.inner, rule, platform=platform)

    def outer_lowering(ctx, *operands, **params):
        per_device = composed if _partition.may_be_partitioned(ctx) else made.inner.bind
        rule = functools.partial(per_device, **params)
        return mlir.lower_fun(rule, multiple_results=False)(ctx, *operands)

    _partition.needs_devices(made.outer)
    mlir.register_lowering(made.outer, outer_lowering)
    return made


def _make(name: str, level: str, abstract: Callable, composed: Callable) -> Primitive:
    primitive = Primitive(name + ("" if level == "inner" else "_outer"))
    primitive.def_abstract_eval(abstract)

    @functools.cache
    def compiled(**params):
        return jax.jit(functools.partial(primitive.bind, **params))

    primitive.def_impl(lambda *operands, **params: compiled(**params)(*operands))
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive, composed)
    batching.primitive_batchers[primitive] = functools.partial(_batch, composed)
    return primitive


def _jvp(primitive, composed, primals, tangents, **params):
    active = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if not active:
        out = primitive.bind(*primals, **params)
        return out, ad.Zero.from_primal_value(out)  # pyright: ignore[reportAttributeAccessIssue]

    def f(*values):
        operands = list(primals)
        for i, value in zip(active, values, strict=True):
            operands[i] = value
        return composed(*operands, **params)

    return jax.jvp(f, [primals[i] for i in active], [tangents[i] for i in active])


def _batch(composed, args, dims, **params):
    return jax.vmap(functools.partial(composed, **params), in_axes=tuple(dims))(*args), 0
