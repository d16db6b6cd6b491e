"""Operations that mean a composition of others, and that a kernel may run as one call.

Differentiating or batching one goes back to the composition, whose parts have their derivatives; it
may have a backward pass of its own. Operands that are divided among devices (Auto, Explicit) are
composed, too, unless the operation says how they are divided (``parts.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir
from jax.interpreters import batching as jax_batching

from . import batching, partition, partitioner, parts, remat
from .costs import COSTS
from .own_backward import OwnBackward
from .primitive import runs_alone, vary_alike, zero_tangent

#: What one stands for is its parameter ``jaxpr``.
PRIMITIVES: set[Primitive] = set()


class Composed:
    """``composed(*operands, **static)``, where operands are trees of arrays, the result is one
    array or a tuple, and static parameters are hashable.

    Args:
      name: of the primitive.
      composed: what it means.
      call: ``call(platform, *operands, **static)`` is the same as custom calls of one device, or
        None where no kernel takes the operands; ``platform`` is "cpu", "cuda" or "other".
      batch: ``batch(size, operands, axes, **static)`` returns the results of a batch, which have it
        as their first axis. ``axes`` are trees as the operands, with None where one is not
        batched. Where it returns None, and without it, a batch is composed.
      batches_backward: whether a batch that is composed has the backward pass of ``vjp``, which
        does not ask what ``moves``. What is not batched then has a cotangent of each of the batch,
        which are added: not for weights.
      each: whether a batch that would be composed is a call for each of it, one after the other,
        where kernels take one and one fills a GPU.
      keeps_call: whether the value of a differentiated call remains one call. Otherwise it is the
        composition's, which shares what the derivative needs.
      sharded: ``sharded(**static)`` raises what the user should know of sharded operands.
      parts: ``parts(part, *operands, **static)`` returns the results, as a tuple, where operands
        are divided among devices, or None where they are composed. ``part(words, results,
        *operands, **static)`` is ``local``, as ``parts.automatic`` says it, of each device's parts.
      local: ``local(cut, *operands, **static)``.
      cost: ``cost(operands, values, outs, **static)``, as in ``costs.COSTS``, of trees of operands.
      vjp: ``(forward, backward)`` as of :class:`OwnBackward`: reverse mode then runs those, unless
        ``forward`` returns None. Every other derivative is the composition's.
    """

    def __init__(self, name: str, composed: Callable, call: Callable, *,
                 batch: Callable | None = None, batches_backward: bool = False,
                 each: bool = False, keeps_call: bool = False, sharded: Callable | None = None,
                 parts: Callable | None = None, local: Callable | None = None,
                 cost: Callable | None = None,
                 vjp: tuple[Callable, Callable] | None = None):  # fmt: skip
        self._composed, self._call, self._batched = composed, call, batch
        self._keeps_call, self._sharded, self._parts = keeps_call, sharded, parts
        self._name = name
        if local is not None:
            partitioner.PER_DEVICE[name] = local
        self._own_backward = None if vjp is None else OwnBackward(name, *vjp, _meaning_of)
        of_batch = functools.partial(_of_batch, name, composed, vjp, cost)
        self._of_batch = functools.cache(of_batch) if batches_backward else None
        of_each = functools.partial(_of_each, name, composed, call)
        self._of_each = functools.cache(of_each) if each else None
        self._traceable = functools.cache(
            lambda **static: jax.jit(functools.partial(composed, **static))
        )
        primitive = self.primitive = Primitive(name)
        PRIMITIVES.add(primitive)
        if cost is not None:
            COSTS[primitive] = lambda operands, values, outs, *, tree, static, **_: cost(
                tree.unflatten(operands), tree.unflatten(values), outs, **dict(static)
            )
        primitive.multiple_results = True
        # Whatever its jaxpr holds, which only says what it means.
        primitive.is_high = lambda *_, **__: False
        runs_alone(primitive)
        primitive.def_abstract_eval(lambda *_, jaxpr, **__: list(jaxpr.out_avals))
        ad.primitive_jvps[primitive] = self._jvp
        ad.primitive_transposes[primitive] = self._transpose
        jax_batching.primitive_batchers[primitive] = self._batch
        own = self._own_backward
        remat.has_rule(primitive, None if own is None else own.kept)
        for platform in ("cpu", "cuda", None):
            rule = functools.partial(self._lowering, platform or "other")
            mlir.register_lowering(primitive, rule, platform=platform)

    def __call__(self, *operands, **static):
        leaves, tree = jax.tree.flatten(operands)
        if (mesh := partition.explicit_mesh(leaves)) is not None:
            self._is_sharded(static)
            found = self._in_parts(mesh, *operands, **static)
            return self._composed(*operands, **static) if found is None else found
        leaves = vary_alike(*leaves)
        traced = self._traceable(**static).trace(*tree.unflatten(leaves))
        outs = self.primitive.bind(
            *leaves, tree=tree, jaxpr=traced.jaxpr, static=tuple(sorted(static.items())),
            local=partition.is_local(),
        )  # fmt: skip
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), outs)

    def _in_parts(self, mesh, *operands, **static):
        """The result where operands are explicitly sharded as its parts are; else None."""
        if self._parts is None or partition.maps_explicit_axes():
            return None
        part = functools.partial(parts.explicit, self._name, mesh)
        try:
            found = self._parts(part, *operands, **static)
        except parts.NotDivided:
            return None
        return found if found is None or len(found) > 1 else found[0]

    def _is_divided(self, platform: str, context, operands, static) -> bool:
        """Whether it is divided as its parts are, where XLA may divide operands."""
        return parts.divides(context) and self._has_call(platform, operands, dict(static))

    def _has_call(self, platform: str, operands, static: dict) -> bool:
        """Whether a kernel takes operands of these shapes."""
        call = functools.partial(self._call, platform, **static)
        return jax.eval_shape(call, *operands) is not None

    def _is_sharded(self, static: dict) -> None:
        if self._sharded is not None:
            self._sharded(**static)

    def _jvp(self, primals, tangents, **params):
        moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
        if not moving:
            outs = self.primitive.bind(*primals, **params)
            return outs, [zero_tangent(out) for out in outs]

        points, rates = ([v[i] for i in moving] for v in (primals, tangents))
        if self._own_backward is not None:
            own = self._own_backward.differentiate(moving, primals, rates, **params)
            if own is not None:
                return own
        outs, dots = jax.jvp(_meaning_of(moving, primals, params), points, rates)
        dots = [
            zero_tangent(out) if dot.dtype == jax.dtypes.float0 else dot
            for out, dot in zip(outs, dots, strict=True)
        ]
        if self._keeps_call:  # then what only the composition's value needs is dead code
            outs = self.primitive.bind(*primals, **params)
        return outs, dots

    def _transpose(self, cts, *leaves, **params):
        """The transpose of a call that was not differentiated (``jax.linear_transpose``)."""
        wanted = [i for i, leaf in enumerate(leaves) if ad.is_undefined_primal(leaf)]
        cts = [ad.instantiate_zeros(ct) for ct in cts]
        of_wanted = _meaning_of(wanted, leaves, params)
        found = jax.linear_transpose(of_wanted, *(leaves[i].aval for i in wanted))(cts)
        by_place = dict(zip(wanted, found, strict=True))
        return [by_place.get(i) for i in range(len(leaves))]

    def _batch(self, leaves, dims, *, tree, static, **params):
        size, static = batching.batch_size(leaves, dims), dict(static)
        operands, axes = tree.unflatten(leaves), tree.unflatten(dims)
        outs = None if self._batched is None else self._batched(size, operands, axes, **static)
        if outs is None and self._of_batch is not None:
            outs = self._of_batch(tree, tuple(dims))(*operands, **static)
        if outs is None and self._of_each is not None and _fills_a_gpu(leaves, dims):
            outs = self._of_each(tree, tuple(dims))(*operands, **static)
        if outs is None:
            outs = jax.vmap(functools.partial(_meaning, **params), in_axes=tuple(dims))(*leaves)
        outs = jax.tree.leaves(outs)
        return outs, [0] * len(outs)

    def _lowering(self, platform: str, ctx, *leaves, tree, static, local, jaxpr):
        divided = not local and partitioner.may_be_partitioned(ctx)
        if divided:
            self._is_sharded(dict(static))

        def one_device(*leaves):
            out, operands, context = None, tree.unflatten(leaves), ctx.module_context.axis_context
            if not divided:
                out = self._call(platform, *operands, **dict(static))
            elif self._parts is not None and self._is_divided(platform, context, operands, static):
                part = functools.partial(parts.automatic, self._name, context)
                out = self._parts(part, *operands, **dict(static))
            return _meaning(*leaves, jaxpr=jaxpr) if out is None else jax.tree.leaves(out)

        return mlir.lower_fun(one_device, multiple_results=True)(ctx, *leaves)


def _meaning(*leaves, jaxpr: Jaxpr, **_):
    return jaxpr_as_fun(jaxpr)(*leaves)


def _meaning_of(places: list[int], leaves, params: dict) -> Callable:
    """As a function of the operands at some places."""

    def of_some(*values):
        given = dict(zip(places, values, strict=True))
        return _meaning(*(given.get(i, leaf) for i, leaf in enumerate(leaves)), **params)

    return of_some


def _of_batch(name: str, composed: Callable, vjp, cost, tree, dims) -> Composed:
    """The batch of an operation, whose operands have their batch at ``dims``."""
    axes = tree.unflatten(dims)

    def of_each(f, *more):
        return lambda *operands, **static: jax.vmap(
            functools.partial(f, **static), in_axes=(*more, *axes)
        )(*operands)

    forward, backward = vjp

    def batched_backward(saved, operands, cts, **static):
        run = lambda saved, cts, *operands: backward(saved, operands, cts, **static)
        grads = of_each(run, 0, 0)(saved, cts, *operands)
        return tuple(
            None if grad is None else _at(axis, grad)
            for axis, grad in zip(axes, grads, strict=True)
        )

    nothing = lambda *_, **__: None
    out = Composed(
        name, of_each(composed), nothing, batches_backward=True, cost=cost,
        vjp=(of_each(forward), batched_backward),
    )  # fmt: skip
    PRIMITIVES.discard(out.primitive)
    return out


#: So many numbers of an operand keep a GPU busy for longer than a turn of a loop takes.
_FILLS = 1 << 20


def _fills_a_gpu(leaves, dims) -> bool:
    """Whether one of the batch does."""
    sizes = (a.size // (1 if d is None else a.shape[d]) for a, d in zip(leaves, dims, strict=True))
    return max(sizes) >= _FILLS


def _of_each(name: str, composed: Callable, call: Callable, tree, dims) -> Composed:
    """The batch of an operation, whose operands have their batch at ``dims``: the composition's,
    or calls of each in a loop."""
    axes = tree.unflatten(dims)

    def composed_batch(*operands, **static):
        return jax.vmap(functools.partial(composed, **static), in_axes=axes)(*operands)

    def loop(platform, *operands, **static):
        leaves = jax.tree.leaves(operands)
        mapped = [jnp.moveaxis(a, d, 0) for a, d in zip(leaves, dims, strict=True) if d is not None]

        def one(mapped):
            own = iter(mapped)
            given = (leaf if d is None else next(own) for leaf, d in zip(leaves, dims, strict=True))
            return call(platform, *tree.unflatten(given), **static)

        shapes = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in mapped]
        return None if jax.eval_shape(one, shapes) is None else jax.lax.map(one, mapped)

    out = Composed(name, composed_batch, loop, keeps_call=True)
    PRIMITIVES.discard(out.primitive)
    return out


def _at(axis: int | None, grads: jax.Array) -> jax.Array:
    """The cotangent of an array whose batch is at ``axis``, of those of each."""
    return grads.sum(0) if axis is None else jnp.moveaxis(grads, 0, axis)
