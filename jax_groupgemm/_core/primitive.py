"""How a grouped product becomes a JAX primitive: binding, abstract values, sharding, lowering."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.interpreters import batching as jax_batching
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from . import batching, partition, partitioner, remat
from .costs import COSTS
from .products import Product
from .segments import Metadata


def bind(name: str, a, b, metadata: Metadata, product: Product):
    """The product of that name."""
    explicit = partition.explicit_mesh(jax.tree.leaves((a, b, metadata)))
    if explicit is not None:
        a, b, metadata = SHARDABLE[name](a, b, metadata)
    leaves, tree = jax.tree.flatten((a, b, metadata))
    if explicit is not None and not partition.maps_explicit_axes():
        call = partition.Call(name, tree, product)
        return partition.explicit(call, explicit, leaves, functools.partial(bind, name))
    primitive = (INNER if partition.is_local() else OUTER)[name]
    return primitive.bind(*vary_alike(*leaves), tree=tree, product=product)


def _bind_inner(name: str, a, b, metadata: Metadata, product: Product):
    leaves, tree = jax.tree.flatten((a, b, metadata))
    return INNER[name].bind(*leaves, tree=tree, product=product)


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


def zero_tangent(out):
    return ad.Zero(jax.typeof(out).to_tangent_aval())


def _outer_lowering(name, ctx, *leaves, tree, product):
    context = ctx.module_context.axis_context

    def partitioned(*leaves):
        leaves, own = jax.tree.flatten(SHARDABLE[name](*tree.unflatten(leaves)))
        call = partition.Call(name, own, product)
        operands = vary_alike(*partitioner.anchored(context, leaves))
        shape, types = call.out_shape(leaves), [*map(jax.typeof, operands)]
        out = out_aval(shape, product.out_dtype, types)
        return partitioner.divided(call, context, operands, [out])[0]

    def of_no_batch(*leaves):
        call = partition.Call(name, tree, product)
        return partition.explicit(call, explicit, leaves, functools.partial(bind, name))

    per_device = functools.partial(INNER[name].bind, tree=tree, product=product)
    # A vmap over an explicitly sharded axis leaves the product of operands that are not mapped.
    explicit = partition.explicit_mesh_of(ctx.avals_in)
    if explicit is not None:
        per_device = of_no_batch
    elif partitioner.may_be_partitioned(ctx):
        per_device = partitioned
    return mlir.lower_fun(per_device, multiple_results=False)(ctx, *leaves)


def runs_alone(primitive: Primitive) -> None:
    """A primitive outside of any program: it becomes one, also where the user has disabled ``jit``,
    which must not bind the primitive again."""

    @functools.cache
    def compiled(**params):
        return jax.jit(functools.partial(primitive.bind, **params))

    def run(*operands, **params):
        with jax.disable_jit(False):
            return compiled(**params)(*operands)

    primitive.def_impl(run)


def _abstract(name, *types, tree, product):
    a, b, _ = tree.unflatten(types)
    out = out_aval(product.out_shape(a, b), product.out_dtype, types)
    mesh = partition.explicit_mesh_of(types)
    if mesh is None:
        return out
    return partition.explicit_type(partition.Call(name, tree, product), mesh, types, out)


def _jvp(name, rule, primals, tangents, *, tree, product):
    a, b, metadata = tree.unflatten(primals)
    terms = rule((a, b, metadata), tree.unflatten(tangents), product)
    out = bind(name, a, b, metadata, product)
    if not terms:
        return out, zero_tangent(out)
    dots = [bind(name, a, b, metadata, product) for a, b, metadata in terms]
    return out, functools.reduce(lax.add, dots)


def _transpose(rule, ct, *leaves, tree, product):
    none = [None] * len(leaves)
    if type(ct) is ad.Zero:
        return none
    if product.cotangent_dtype is not None:
        ct = ct.astype(product.cotangent_dtype)
    cts = rule(ct, tree.unflatten(leaves), product)
    skeleton = tree.unflatten(none)
    return tree.flatten_up_to(
        tuple(s if c is None else c for s, c in zip(skeleton, (*cts, None), strict=True))
    )


def _batching(name, rule, leaves, dims, *, tree, product):
    mesh = partition.explicit_mesh(leaves)
    # Within a vmap over an explicitly sharded axis, only that one has the whole operands.
    if mesh is None or partition.maps_explicit_axes():
        size = batching.batch_size(leaves, dims)
        if mesh is not None and name != "wgrad":
            leaves = _with_one_sharded_batch(leaves, dims)
        return rule(size, tree.unflatten(leaves), tree.unflatten(dims), product)
    call = partition.Call(name, tree, product)
    return partition.explicit_batch(call, mesh, leaves, dims, functools.partial(bind, name)), 0


def _with_one_sharded_batch(leaves, dims):
    """Where rows of the first operand are sharded, because a batch of it is, weights are not."""
    first, dim = leaves[0], dims[0]
    if dim is None or not partition.entries_of(first)[dim]:
        return leaves
    return [first, *(_whole(leaf, d) for leaf, d in zip(leaves[1:], dims[1:], strict=True))]


def _whole(a, dim):
    """``a`` with all of an axis on every device."""
    if dim is None:
        return a
    entries = partition.entries_of(a)
    entries[dim] = ()
    return partition.resharded(a, entries)


def _cost(rule, operands, values, outs, *, tree, product):
    a, b, metadata = tree.unflatten(operands)
    values = values[len(values) - len(metadata.arrays) :]
    return rule(a, b, metadata, values, outs[0], product)


INNER: dict[str, Primitive] = {}
OUTER: dict[str, Primitive] = {}
#: ``shardable`` of :func:`register`.
SHARDABLE: dict[str, Callable] = {}


def register(name: str, *, jvp: Callable, transpose: Callable, batch: Callable, lowering: Callable,
             cost: Callable, shardable: Callable = lambda *operands: operands) -> None:  # fmt: skip
    """Make both levels of a primitive, by its rules. ``operands`` are (a, b, metadata).

    Args:
      name: of the primitive; without "jgg_".
      jvp: ``jvp(operands, tangents, product)`` lists operands of products whose sum is the tangent;
        a tangent that is zero is an ``ad.Zero``.
      transpose: ``transpose(ct, operands, product)`` returns cotangents of a and b, None where one
        is not asked for.
      batch: ``batch(size, operands, dims, product)`` returns the result and its batch axis.
      lowering: ``lowering(platform, a, b, metadata, product)`` is what one device runs; platform is
        "cpu", "cuda" or "other".
      cost: ``cost(a, b, metadata, values, out, product)``; ``values`` are those of metadata, as in
        ``COSTS``.
      shardable: ``shardable(a, b, metadata)`` returns operands that can be divided among devices.
    """
    SHARDABLE[name] = shardable
    partitioner.PER_DEVICE[name] = functools.partial(_bind_inner, name)
    for level, primitives in (("inner", INNER), ("outer", OUTER)):
        primitive = primitives[name] = Primitive(f"jgg_{name}" + "_outer" * (level == "outer"))
        primitive.def_abstract_eval(functools.partial(_abstract, name))
        runs_alone(primitive)
        ad.primitive_jvps[primitive] = functools.partial(_jvp, name, jvp)
        ad.primitive_transposes[primitive] = functools.partial(_transpose, transpose)
        jax_batching.primitive_batchers[primitive] = functools.partial(_batching, name, batch)
        COSTS[primitive] = functools.partial(_cost, cost)
        remat.has_rule(primitive)

    def inner_lowering(platform, *leaves, tree, product):
        return lowering(platform, *tree.unflatten(leaves), product)

    for platform in ("cpu", "cuda", None):
        rule = functools.partial(inner_lowering, platform or "other")
        mlir.register_lowering(
            INNER[name], mlir.lower_fun(rule, multiple_results=False), platform=platform
        )
    mlir.register_lowering(OUTER[name], functools.partial(_outer_lowering, name))
