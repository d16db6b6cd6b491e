"""``nvfp4_quantize`` on CUDA: one custom call where XLA does not partition it, else its definition.

One primitive without derivative rules, since nothing is differentiated; batching it goes back to
the definition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from . import _call, _partition, _primitives

_TARGET = "jgg_nvfp4_quantize"


def either(definition: Callable, x, group_sizes, seed, **static):
    """``definition(x, group_sizes, seed, **static)``: weight, scales and global_scale; by the
    custom call of the same operands and options where a GPU takes it."""
    if _call.missing("sm80", _TARGET) is not None:
        return definition(x, group_sizes, seed, **static)
    leaves, tree = jax.tree.flatten((x, group_sizes, seed))
    leaves = _primitives.vary_alike(*leaves)
    rule = functools.partial(definition, **static)
    avals = jax.jit(rule).trace(*tree.unflatten(leaves)).jaxpr.out_avals
    return _PRIMITIVE.bind(
        *leaves, definition=definition, tree=tree, avals=tuple(avals),
        static=tuple(sorted(static.items())),
        manual=bool(jax.sharding.get_abstract_mesh().manual_axes),
    )  # fmt: skip


def _abstract(*_, avals, **params):
    return list(avals)


def _defined(*leaves, definition: Callable, tree, static, **_):
    return definition(*tree.unflatten(leaves), **dict(static))


def _batch(args, dims, **params):
    outs = jax.vmap(functools.partial(_defined, **params), in_axes=tuple(dims))(*args)
    return outs, [0] * len(outs)


def _lowering(platform, ctx, *values, **params):
    partitioned = not params["manual"] and _partition.may_be_partitioned(ctx)
    rule = functools.partial(_one_device, platform, partitioned, **params)
    return mlir.lower_fun(rule, multiple_results=True)(ctx, *values)


def _one_device(platform, partitioned, *leaves, tree, static, **params):
    x, group_sizes, seed = tree.unflatten(leaves)
    sizes = () if group_sizes is None else group_sizes.shape
    whole = not partitioned and platform == "cuda" and 0 not in (*x.shape, *sizes)
    if whole and _call.chosen(platform, (x,), None, jnp.float32, _TARGET) != "reference":
        return _call.nvfp4_quantize(x, group_sizes, seed, **dict(static))
    return _defined(*leaves, tree=tree, static=static, **params)


_PRIMITIVE = Primitive("jgg_nvfp4_quantize")
_PRIMITIVE.multiple_results = True
_PRIMITIVE.def_abstract_eval(_abstract)
batching.primitive_batchers[_PRIMITIVE] = _batch
for _platform in ("cpu", "cuda", None):
    mlir.register_lowering(
        _PRIMITIVE, functools.partial(_lowering, _platform or "other"), platform=_platform
    )


@functools.cache
def _compiled(**params):
    return jax.jit(functools.partial(_PRIMITIVE.bind, **params))


_PRIMITIVE.def_impl(lambda *leaves, **params: _compiled(**params)(*leaves))
