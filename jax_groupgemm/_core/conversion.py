"""``quantize`` and ``dequantize`` of leaves, as one custom call each.

    weight (..., K*bits/32), scales, biases (..., K/group_size)  <->  w (..., K)

A global scale has the shape of leading axes, or none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from .._kernels import choose, problems
from . import batching, costs
from .composed import Composed


def _any_problem(*_, mode: str = "", **__) -> Callable[..., problems.Conversion]:
    return functools.partial(problems.Conversion, mode=mode)


def composed(name: str, definition: Callable, call: Callable, problem_of: Callable = _any_problem,
             batch: Callable | None = None, each: bool = False, parts: Callable | None = None,
             local: Callable | None = None):  # fmt: skip
    """The conversion ``definition(*operands, **static)`` of that name in ``choose.KERNELS``, which
    ``call`` makes as a custom call. ``problem_of(*operands, **static)`` makes the problem that
    kernels see, of the fields that every conversion has. ``batch(size, operands, axes)`` returns
    the operands of a batch as those of one call, or None; with ``each`` a batch that has none is a
    call of each (``Composed``), as are ``parts`` and ``local``."""

    def by_kernel(platform, *operands, **static):
        problem = problem_of(*operands, **static)(
            op=name, platform=platform, empty=any(0 in a.shape for a in jax.tree.leaves(operands)),
        )  # fmt: skip
        return None if choose.choose(problem) is None else call(*operands, **static)

    def batched(*given, **static):
        as_one = None if batch is None else batch(*given)
        return None if as_one is None else out(*as_one, **static)

    out = Composed(
        f"jgg_{name}",
        definition,
        by_kernel,
        batch=batched,
        each=each,
        keeps_call=True,
        parts=parts,
        local=local,
        cost=costs.conversion,
    )
    return out


def in_batch(size: int, operands, axes):
    """A batch becomes the first leading axis. One global scale for all may stay as it is."""
    *arrays, scale = operands
    *axes, scale_axis = axes
    first = batching.first
    arrays = [None if a is None else first(a, d, size) for a, d in zip(arrays, axes, strict=True)]
    if scale is not None and not (scale_axis is None and scale.ndim == 0):
        scale = first(scale, scale_axis, size)
    return *arrays, scale


def of_matrices(count: int):
    """``batch`` of :func:`composed`, of operations whose first ``count`` operands are matrices
    ``(..., R, C)`` and what each has, ``(...)``: a batch is more of them, if no other operand is
    given."""

    def batch(size: int, operands, axes):
        if any(a is not None for a in operands[count:]):
            return None
        if operands[0].ndim - (axes[0] is not None) < 2:
            return None
        pairs = zip(operands[:count], axes[:count], strict=True)
        arrays = (None if a is None else batching.first(a, d, size) for a, d in pairs)
        return *arrays, *operands[count:]

    return batch
