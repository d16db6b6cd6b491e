"""``FP8State``: which scales operands needed in the last steps, for delayed scaling."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import check
from .._core.operations import INLINE
from . import tensors


@functools.partial(jax.tree_util.register_dataclass, data_fields=("x", "dy"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class FP8State:
    """What delayed scaling knows of x and of dy, the cotangent of the result, of one linear layer.
    A pytree of arrays that you carry from step to step and save with the parameters.

    Element b of an array counts the updates since a step whose tensor had ``range = b``; infinity
    stands for none. With ``amax`` the largest finite magnitude of a tensor::

        range = ceil(log2(amax / 1.75)) + 127, clipped to [0, 255]
        scale = 2**(range - 127 - 8), at least 2**-126

    Then ``amax / scale`` is between 224 and 448, the largest number of e4m3. With e5m2 the 8 is 15.
    A delayed scale is that of the largest range among the last ``FP8Recipe.history`` updates. If
    there is none, as in the first step, it is the tensor's own.

    The gradient of a state is no derivative. It says which ranges the step has seen: element b is
    positive if a tensor had range b. Sums keep that, so the gradient is right for several calls
    with one state, microbatches, ``scan``, ``vmap`` and ``jax.checkpoint``. Where devices have
    parts of a tensor, the range is that of the largest one, so the next state has the same bits on
    all devices and on one::

        gradients, seen = jax.grad(loss, argnums=(0, 1))(params, state)
        state = state.updated(seen)

    Args:
      x: float32 ``(..., 256)``, of x.
      dy: the same of dy.

    Use :meth:`new` for the first one. Numbers that are not finite do not count, so a step with
    infinite gradients leaves no trace. Saved and restored, a state gives the same bits.

    Examples:
      >>> recipe = jgg.FP8Recipe(scaling="delayed")
      >>> x, w, sizes = jnp.ones((5, 128)), jnp.ones((2, 128, 128)), jnp.array([2, 3])
      >>> loss = lambda w, s: jgg.fp8_grouped_linear(x, w, sizes, recipe=recipe, state=s).sum()
      >>> state = jgg.FP8State.new()
      >>> dw, seen = jax.grad(loss, argnums=(0, 1))(w, state)
      >>> state = state.updated(seen)  # for the next step
    """

    x: Any
    dy: Any

    @classmethod
    def new(cls, shape: int | Sequence[int] = ()) -> FP8State:
        """A state of no steps; with a shape, of as many layers, for ``jax.lax.scan`` or ``vmap``.

        Raises:
          ValueError: shape is none.
        """
        lead = (shape,) if isinstance(shape, int) else tuple(shape)
        for size in lead:
            check.count("FP8State.new", "shape", size)
        return cls(*(jnp.full((*lead, tensors.RANGES), jnp.inf, jnp.float32) for _ in range(2)))

    def updated(self, seen: FP8State) -> FP8State:
        """The state of the next step.

        Args:
          seen: the gradient of a loss with respect to this state, or a sum or mean of several.

        Raises:
          TypeError: seen is no FP8State.
          ValueError: its shapes are others.
        """
        op = "FP8State.updated"
        if not isinstance(seen, FP8State):
            raise TypeError(f"jgg.{op}: seen must be a jgg.FP8State, got {check.describe(seen)}")
        for name in ("x", "dy"):
            check.shape(
                op, f"seen.{name}", getattr(seen, name), getattr(self, name).shape, "..., 256"
            )
        return _updated(self, seen)


@functools.partial(jax.jit, inline=INLINE)  # its numbers are no transfers
def _updated(state: FP8State, seen: FP8State) -> FP8State:
    older = lambda ages, counts: jnp.where(counts > 0, jnp.zeros_like(ages), ages + 1)
    return jax.tree.map(older, state, seen)


def across_devices(states, operands):
    """``states`` that vary over the mesh axes that some of ``operands`` vary over, as operations of
    a ``shard_map`` need. Of all states the devices have seen the largest ranges: one all-reduce of
    a number for each tensor."""
    of = lambda tree: [jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(tree)]
    more = frozenset().union(*of(operands)) - frozenset().union(*of(states))
    return _varied(states, tuple(sorted(more))) if more else states


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _varied(states, axes):
    return jax.tree.map(lambda a: lax.pcast(a, axes, to="varying"), states)


def _largest_over(axes, _, seen):
    leaves, tree = jax.tree.flatten(seen)
    ranges = lax.iota(jnp.int32, tensors.RANGES)
    own = jnp.stack([jnp.where(leaf > 0, ranges, -1).max() for leaf in leaves])
    found = ranges == lax.pmax(own, axes)[:, None]
    return (tree.unflatten(found.astype(jnp.float32)),)


_varied.defvjp(lambda states, axes: (_varied(states, axes), None), _largest_over)


def checked(op: str, name: str, state) -> FP8State:
    """A state of one layer."""
    if not isinstance(state, FP8State):
        raise TypeError(f"jgg.{op}: {name} must be a jgg.FP8State, got {check.describe(state)}")
    leaves = []
    for field in ("x", "dy"):
        ages = check.array(op, f"{name}.{field}", getattr(state, field))
        check.dtype(op, f"{name}.{field}", ages.dtype, ("float32",))
        check.shape(op, f"{name}.{field}", ages, (tensors.RANGES,), "256", "of one layer")
        leaves.append(ages)
    return FP8State(*leaves)


# So that exported functions may take one.
jax.export.register_pytree_node_serialization(
    FP8State,
    serialized_name="jax_groupgemm.FP8State",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
)
