"""How a grouped product becomes a JAX primitive: binding, abstract values, sharding, lowering."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from . import partition
from .costs import COSTS


def bind(name, *operands, **params):
    explicit = partition.explicit_mesh(operands)
    if explicit is not None and not partition.maps_explicit_axes():
        return partition.explicit(name, explicit, operands, params, bind)
    manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
    primitive = (INNER if manual else OUTER)[name]
    return primitive.bind(*vary_alike(*operands), **params)


def vary_alike(*operands):
    """Let operands vary over the same manual mesh axes, as one opaque operation needs."""
    varying = [jax.typeof(a).manual_axis_type.varying for a in operands]
    union = frozenset().union(*varying)
    return [
        lax.pcast(a, tuple(sorted(union - v)), to="varying") if union - v else a
        for a, v in zip(operands, varying, strict=True)
    ]


def out_aval(shape, dtype, operands):
    varying = {a.manual_axis_type.varying for a in operands}
    if len(varying) != 1:
        raise ValueError(f"operands vary over different manual mesh axes: {varying}")
    mesh = next((a.sharding.mesh for a in operands if not a.sharding.mesh.empty), None)
    if mesh is None:
        return ShapedArray(shape, dtype)
    return ShapedArray(
        shape,
        dtype,
        sharding=NamedSharding(mesh, PartitionSpec(*[None] * len(shape))),
        manual_axis_type=ManualAxisType(varying=varying.pop()),
    )


def sum_of_tangents(out, terms):
    if not terms:
        return zero_tangent(out)
    return functools.reduce(lax.add, terms)


def zero_tangent(out):
    return ad.Zero(jax.typeof(out).to_tangent_aval())


def _outer_lowering(name, ctx, *operands, **params):
    def partitioned(*operands):
        shardable, known = SHARDABLE.get(name, lambda *a: a)(operands, params)
        return partition.auto(name, known, INNER[name].bind)(*shardable)

    def of_no_batch(*operands):
        return partition.explicit(name, explicit, operands, params, bind)

    per_device = functools.partial(INNER[name].bind, **params)
    # A vmap over an explicitly sharded axis leaves the product of operands that are not mapped.
    explicit = partition.explicit_mesh_of(ctx.avals_in)
    if explicit is not None:
        per_device = of_no_batch
    elif partition.may_be_partitioned(ctx):
        per_device = partitioned
    return mlir.lower_fun(per_device, multiple_results=False)(ctx, *operands)


def jitted(compiled):
    """A primitive outside of any program: it becomes one, also where the user has disabled ``jit``,
    which must not bind the primitive again."""

    def run(*operands, **params):
        with jax.disable_jit(False):
            return compiled(**params)(*operands)

    return run


def _batching(name, rule, args, dims, **params):
    mesh = partition.explicit_mesh(args)
    # Within a vmap over an explicitly sharded axis, only that one has the whole operands.
    if mesh is None or partition.maps_explicit_axes():
        return rule(args, dims, **params)
    return partition.explicit_batch(name, mesh, args, dims, params, bind), 0


def _make(name, level, abstract, jvp, transpose, batch, lowering):
    primitive = Primitive(f"jgg_{name}" + ("" if level == "inner" else "_outer"))

    def out_type(*types, **params):
        out, mesh = abstract(*types, **params), partition.explicit_mesh_of(types)
        return out if mesh is None else partition.explicit_type(name, mesh, types, params, out)

    primitive.def_abstract_eval(out_type)

    @functools.cache
    def compiled(**params):
        return jax.jit(functools.partial(primitive.bind, **params))

    primitive.def_impl(jitted(compiled))
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = functools.partial(_batching, name, batch)
    if level == "inner":
        for platform in ("cpu", "cuda", None):
            rule = functools.partial(lowering, platform or "other")
            mlir.register_lowering(
                primitive, mlir.lower_fun(rule, multiple_results=False), platform=platform
            )
    else:
        partition.needs_devices(primitive)
        mlir.register_lowering(primitive, functools.partial(_outer_lowering, name))
    return primitive


INNER: dict[str, Primitive] = {}
OUTER: dict[str, Primitive] = {}
# (operands, params) as others that can be divided among devices.
SHARDABLE: dict[str, Callable] = {}


def register(name, abstract, jvp, transpose, batch, lowering, cost) -> None:
    """Make both levels of a primitive, by its rules; ``lowering(platform, *operands, **params)``
    is what one device runs, ``cost`` an entry of ``COSTS``."""
    rules = abstract, jvp, transpose, batch, lowering
    INNER[name], OUTER[name] = (_make(name, level, *rules) for level in ("inner", "outer"))
    COSTS[INNER[name]] = COSTS[OUTER[name]] = cost
