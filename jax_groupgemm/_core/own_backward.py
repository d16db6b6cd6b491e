"""A backward pass of one's own, for an operation that means a composition of others.

The derivative of such an operation is one more primitive, linear in the tangents. Forward mode,
batches and second derivatives take it for what it means, the derivative of the composition.
Reverse mode transposes it, and that is the operation's own backward pass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.interpreters import batching as jax_batching

from .costs import COSTS, Cost
from .primitive import runs_alone, zero_tangent


class OwnBackward:
    """The derivative of ``primitive`` in leaves that move.

    Args:
      name: of the primitive that is differentiated.
      forward: ``forward(*operands, **static)`` returns the result and what the backward pass needs,
        or None where the derivative of the composition is meant. If it has a parameter ``moves``,
        that is which leaves do, as a tree of the operands.
      backward: ``backward(saved, operands, cts, **static)`` returns a cotangent, or None, for every
        operand; ``cts`` are those of the results.
      meaning: ``meaning(moving, leaves, params)`` is the composition as a function of the leaves at
        some places.
    """

    def __init__(self, name: str, forward: Callable, backward: Callable, meaning: Callable):
        self._forward, self._backward, self._meaning = forward, backward, meaning
        self._asks = "moves" in inspect.signature(forward).parameters
        tangent = self._tangent = Primitive(f"{name}_tangent")
        tangent.multiple_results = True
        tangent.is_high = lambda *_, **__: False
        runs_alone(tangent)
        self._wanted = functools.cache(self._compiled)
        tangent.def_abstract_eval(
            lambda *_, jaxpr, **__: [out.to_tangent_aval() for out in jaxpr.out_avals]
        )
        ad.primitive_jvps[tangent] = self._jvp
        ad.primitive_transposes[tangent] = self._transpose
        jax_batching.primitive_batchers[tangent] = self._batch
        mlir.register_lowering(tangent, mlir.lower_fun(self._means, multiple_results=True))
        self._traceable = functools.cache(self._program_of_forward)
        again = self._again = Primitive(f"again_{name}")  # no product, by its name
        again.multiple_results = True
        again.is_high = lambda *_, **__: False
        again.def_impl(self._results)
        again.def_abstract_eval(self._results)
        COSTS[again] = lambda *_, **__: Cost()
        ad.primitive_jvps[again] = self._again_jvp
        jax_batching.primitive_batchers[again] = self._again_batch
        mlir.register_lowering(
            again, lambda _, *operands, **params: self._results(*operands, **params)
        )

    def differentiate(self, moving: list[int], leaves, rates, *, tree, static, **params):
        """Results and their tangents: leaves at ``moving`` have tangents ``rates``. None
        where ``forward`` gives None."""
        more = {}
        if self._asks:
            more["moves"] = tree.unflatten(i in moving for i in range(len(leaves)))
        found = self._forward(*tree.unflatten(leaves), **more, **dict(static))
        if found is None:
            return None
        out, saved = found
        saved, saved_tree = jax.tree.flatten(saved)
        outs = jax.tree.leaves(out)
        return outs, self._tangents(
            moving, leaves, saved, rates, outs, tree=tree, saved_tree=saved_tree, static=static,
            **params,
        )  # fmt: skip

    def _tangents(self, moving, leaves, saved, rates, outs, **params):
        dots = self._tangent.bind(*leaves, *saved, *rates, moving=tuple(moving), **params)
        return [
            zero_tangent(out) if dot.dtype == jax.dtypes.float0 else dot
            for out, dot in zip(outs, dots, strict=True)
        ]

    def _means(self, *operands, moving, tree, saved_tree, **params):
        leaves, rates = operands[: tree.num_leaves], operands[len(operands) - len(moving) :]
        points = [leaves[i] for i in moving]
        return jax.jvp(self._meaning(list(moving), leaves, params), points, list(rates))[1]

    def _jvp(self, primals, tangents, **params):
        places = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

        def of_some(*values):
            given = dict(zip(places, values, strict=True))
            return self._means(*(given.get(i, p) for i, p in enumerate(primals)), **params)

        return jax.jvp(of_some, [primals[i] for i in places], [tangents[i] for i in places])

    def _transpose(self, cts, *operands, moving, tree, saved_tree, static, **_):
        first = len(operands) - len(moving)
        cts = [ad.instantiate_zeros(ct) for ct in cts]
        run = self._wanted(moving, tree, saved_tree, static)
        return [*[None] * first, *run(operands[:first], cts)]

    def _compiled(self, moving, tree, saved_tree, static):
        """The cotangents of the leaves at some places, as one program, also where the user's code
        is none, so that nothing is computed for the others."""

        def run(operands, cts):
            leaves, saved = operands[: tree.num_leaves], operands[tree.num_leaves :]
            grads = self._backward(
                saved_tree.unflatten(saved), tree.unflatten(leaves), cts, **dict(static)
            )
            grads = tree.flatten_up_to(_of_structure(tree, grads))
            return [grads[i] for i in moving]

        return jax.jit(run)

    # What ``jax.checkpoint`` keeps: ``again`` is the operation once more, whose results and what
    # its backward pass needs were made of what was kept. Its operands are (leaves, results, saved).

    def kept(self, divide: Callable, *leaves, tree, static, **params):
        """As ``remat.has_rule`` takes it."""
        traced = self._traceable(tree, static).trace(leaves)
        if traced.out_info is None:  # the derivative is the composition's
            return divide(params["jaxpr"], leaves)
        found = divide(traced.jaxpr, leaves)
        if found is None:
            return None
        outs, kept, again = found
        saved_tree = jax.tree.structure(traced.out_info[1])
        params |= {"tree": tree, "static": static, "saved_tree": saved_tree}
        count = len(outs) - saved_tree.num_leaves

        def again_of(kept, *leaves):
            values = again(kept, *map(jax.lax.stop_gradient, leaves))
            return self._again.bind(*leaves, *values, **params)

        return outs[:count], kept, again_of

    def _program_of_forward(self, tree, static):
        def run(leaves):
            moves = tree.unflatten(jnp.issubdtype(a.dtype, jnp.inexact) for a in leaves)
            more = {"moves": moves} if self._asks else {}
            found = self._forward(*tree.unflatten(leaves), **more, **dict(static))
            return None if found is None else (jax.tree.leaves(found[0]), found[1])

        return jax.jit(run)

    @staticmethod
    def _results(*operands, tree, saved_tree, **_):
        return list(operands[tree.num_leaves : len(operands) - saved_tree.num_leaves])

    def _again_jvp(self, primals, tangents, *, tree, saved_tree, **params):
        outs = self._again.bind(*primals, tree=tree, saved_tree=saved_tree, **params)
        moving = [i for i, t in enumerate(tangents[: tree.num_leaves]) if type(t) is not ad.Zero]
        if not moving:
            return outs, [zero_tangent(out) for out in outs]
        saved = primals[len(primals) - saved_tree.num_leaves :]
        return outs, self._tangents(
            moving, primals[: tree.num_leaves], saved, [tangents[i] for i in moving], outs,
            tree=tree, saved_tree=saved_tree, **params,
        )  # fmt: skip

    def _again_batch(self, operands, dims, *, tree, saved_tree, **params):
        leaves, axes = operands[: tree.num_leaves], dims[: tree.num_leaves]
        every = [*range(tree.num_leaves)]
        run = lambda *leaves: self._meaning(every, leaves, {"tree": tree, **params})(*leaves)
        outs = jax.vmap(run, in_axes=tuple(axes))(*leaves)
        return outs, [0] * len(outs)

    def _batch(self, operands, dims, **params):
        outs = jax.vmap(functools.partial(self._means, **params), in_axes=tuple(dims))(*operands)
        return outs, [0] * len(outs)


def _of_structure(tree, grads):
    """``grads``, where None stands for no cotangent of a whole operand."""
    none = tree.unflatten([None] * tree.num_leaves)
    return tuple(n if g is None else g for n, g in zip(none, grads, strict=True))
