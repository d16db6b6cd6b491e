"""``check_sizes``: group sizes that mean what their user thinks."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.core import Tracer

from .._core import check
from .._core.types import Integers


def check_sizes(group_sizes: Integers, rows: int) -> jax.Array:
    """``group_sizes``, after a check that none is negative and ``sum(group_sizes) <= rows``.

    Products take any sizes, because the host does not look at them. This check is for debugging: it
    reads the sizes. In ``jax.jit`` it is a callback on the host, whose error ends the program::

        y = jgg.grouped_mm(x, w, jgg.check_sizes(sizes, x.shape[0]))

    Args:
      group_sizes: integers ``(G,)`` of any integer dtype; may be traced.
      rows: T, of the grouped operand. Fewer rows may belong to groups: the others come last.

    Returns:
      ``group_sizes``, as an array.

    Raises:
      ValueError: a size is negative, or the sum is more than ``rows``. Where sizes are traced, it
        is a ``jax.errors.JaxRuntimeError`` with the same sentence, when the program runs.
      TypeError: sizes are not integers, or ``rows`` is no int.

    Examples:
      >>> jgg.check_sizes(jnp.array([2, 3]), 5).tolist()
      [2, 3]
      >>> jgg.check_sizes(jnp.array([2, 4]), 5)
      Traceback (most recent call last):
      ...
      ValueError: ...
    """
    op = "check_sizes"
    check.count(op, "rows", rows)
    sizes = check.group_sizes(op, group_sizes)
    refuse = functools.partial(_refuse, rows=rows)
    if isinstance(sizes, Tracer):
        jax.debug.callback(refuse, sizes)
    else:
        refuse(sizes)
    return sizes


def _refuse(sizes, *, rows: int) -> None:
    each = np.asarray(sizes).tolist()
    for group, size in enumerate(each):
        if size < 0:
            raise ValueError(f"jgg.check_sizes: group_sizes[{group}] is {size}, a number of rows")
    if sum(each) > rows:
        raise ValueError(
            f"jgg.check_sizes: group_sizes add up to {sum(each)}, more than the {rows} rows"
        )
