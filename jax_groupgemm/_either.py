"""A function that is one custom call on CUDA where XLA does not partition it, else its definition.

One primitive for all of them. Its derivative is the definition's; a batch is one array more, or the
definition's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _call, _partition, _primitives


def either(target: str, definition: Callable, call: Callable, operands, *,
           batch: Callable | None = None, **static) -> tuple:  # fmt: skip
    """``definition(*operands, **static)``, a tuple of arrays; by ``call`` of the same arguments,
    which is the custom call ``target``, where a GPU takes it.

    Operands are arrays or None. ``batch`` adds a leading axis to all: given a size, the operands
    and the axis of each that is batched, or None, it returns operands; without it a batch is the
    definition's.
    """
    if _call.missing("sm80", target) is not None:
        return definition(*operands, **static)
    leaves, tree = jax.tree.flatten(tuple(operands))
    leaves = _primitives.vary_alike(*leaves)
    avals = jax.jit(functools.partial(definition, **static)).trace(*tree.unflatten(leaves))
    return tuple(_PRIMITIVE.bind(
        *leaves, target=target, definition=definition, call=call, batch=batch, tree=tree,
        avals=tuple(avals.jaxpr.out_avals), static=tuple(sorted(static.items())),
        manual=bool(jax.sharding.get_abstract_mesh().manual_axes),
    ))  # fmt: skip


def _abstract(*_, avals, **params):
    return list(avals)


def _defined(*leaves, definition: Callable, tree, static, **_):
    return definition(*tree.unflatten(leaves), **dict(static))


def _jvp(primals, tangents, **params):
    outs = _PRIMITIVE.bind(*primals, **params)
    zeros = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if not moving:
        return outs, zeros

    def of_moving(*values):
        given = dict(zip(moving, values, strict=True))
        return _defined(*(given.get(i, p) for i, p in enumerate(primals)), **params)

    points, rates = (tuple(v[i] for i in moving) for v in (primals, tangents))
    _, dots = jax.jvp(of_moving, points, rates)
    return outs, [
        z if jnp.issubdtype(out.dtype, jnp.integer) else dot
        for z, out, dot in zip(zeros, outs, dots, strict=True)
    ]


def _batch(args, dims, *, batch, tree, **params):
    if batch is None:
        defined = functools.partial(_defined, tree=tree, **params)
        outs = jax.vmap(defined, in_axes=tuple(dims))(*args)
    else:
        size = _primitives.batch_size(args, dims)
        axes = iter(dims)
        axes = [None if a is None else next(axes) for a in tree.unflatten(args)]
        operands = batch(size, tree.unflatten(args), axes)
        outs = either(
            params["target"], params["definition"], params["call"], operands, batch=batch,
            **dict(params["static"]),
        )  # fmt: skip
    return outs, [0] * len(outs)


def _lowering(platform, ctx, *values, **params):
    partitioned = not params["manual"] and _partition.may_be_partitioned(ctx)
    rule = functools.partial(_one_device, platform, partitioned, **params)
    return mlir.lower_fun(rule, multiple_results=True)(ctx, *values)


def _one_device(platform, partitioned, *leaves, target, call, tree, static, avals, **params):
    whole = platform == "cuda" and not partitioned
    whole = whole and not any(0 in a.shape for a in (*leaves, *avals))
    if whole and _call.chosen(platform, (), None, jnp.float32, target) != "reference":
        return call(*tree.unflatten(leaves), **dict(static))
    return _defined(*leaves, tree=tree, static=static, **params)


_PRIMITIVE = Primitive("jgg_either")
_PRIMITIVE.multiple_results = True
_PRIMITIVE.def_abstract_eval(_abstract)
ad.primitive_jvps[_PRIMITIVE] = _jvp
batching.primitive_batchers[_PRIMITIVE] = _batch
for _platform in ("cpu", "cuda", None):
    mlir.register_lowering(
        _PRIMITIVE, functools.partial(_lowering, _platform or "other"), platform=_platform
    )


@functools.cache
def _compiled(**params):
    return jax.jit(functools.partial(_PRIMITIVE.bind, **params))


_PRIMITIVE.def_impl(lambda *leaves, **params: _compiled(**params)(*leaves))
