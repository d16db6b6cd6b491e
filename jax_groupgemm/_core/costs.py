"""What one call of a primitive costs: the least FLOPs and bytes, and who counts them.

Every primitive that a kernel may run as one call has an entry in ``COSTS``. ``jgg.cost`` walks a
program and adds them up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from . import segments
from .products import Mm

#: How to compute the value of an operand, or None where it is not known.
Value = Callable[[], Any] | None


@dataclasses.dataclass(frozen=True)
class Cost:
    """The least that products and conversions take, whatever computes them.

    Attributes:
      flops: ``2 * rows * K * N`` per product (2 per multiply-add), where ``rows`` are those that
        meet a matrix; a bias counts as a product with K = 1. Activations, scales and additions
        are not counted, and conversions (quantize, dequantize, prepack) have none.
      bytes_accessed: per product, each operand read once, as it is stored, and the result written
        once. Read are the rows that meet a matrix, the matrices that meet a row, metadata, bias,
        scales and an existing result; written is all of the result, its zeros too. Per conversion,
        all of its operands and results, once.

    Examples:
      >>> cost = jgg.cost.grouped_mm(jnp.ones((4, 8)), jnp.ones((2, 8, 4)), jnp.array([3, 1]))
      >>> cost.flops
      256
    """

    flops: int = 0
    bytes_accessed: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes_accessed + other.bytes_accessed)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes_accessed * times)


#: ``cost(operands, values, outs, **params)`` of each primitive: abstract values of its operands and
#: results, and the values of its operands where they are known.
COSTS: dict[Any, Callable[..., Cost]] = {}


def conversion(operands, values, outs, **_) -> Cost:
    """All operands and results, once."""
    del values
    return Cost(0, bytes_of((operands, outs)))


def product(x, w, metadata, values, out, product: Mm):
    """The cost, the rows that meet a matrix, and the matrices that meet a row. ``values`` are those
    of metadata."""
    rows_x, groups = product.rows_x(x), w.shape[0]
    _, k, n = product.sizes(w)
    count, in_x, _, weights = counts(metadata, values, rows_x, product.rows, groups)
    # Every leaf of a quantized weight is read; one global scale belongs to all.
    leaves = jax.tree.leaves(w)
    read = bytes_of(x) // max(rows_x, 1) * in_x
    read += sum(bytes_of(a) // max(groups, 1) * weights if a.ndim else bytes_of(a) for a in leaves)
    return Cost(2 * count * k * n, read + bytes_of((metadata, out))), count, weights


def bias_cost(bias, rows: int, weights: int) -> Cost:
    if bias is None:
        return Cost()
    n = bias.shape[1]
    return Cost(2 * rows * n, weights * n * bias.dtype.itemsize)


def bytes_of(avals) -> int:
    """The bytes of all leaves of a tree."""
    return sum(aval.size * aval.dtype.itemsize for aval in jax.tree.leaves(avals))


def counts(metadata, values: Sequence[Any], rows_x: int, rows_y: int, groups: int):
    """Pairs of rows that meet; the different rows of x, rows of y and weights among them."""
    form = metadata.form
    if None in values:
        once = [rows for rows, ordered in ((rows_x, form.ordered_x), (rows_y, form.ordered_y))
                if ordered]  # fmt: skip
        count = min(once, default=max(rows_x, rows_y))
        return count, *(min(count, size) for size in (rows_x, rows_y, groups))
    with jax.ensure_compile_time_eval():
        known = segments.Metadata(form, *(value() for value in values))
        table = np.asarray(known.decode(rows_x, rows_y, groups), np.int64)
    x_start, y_start, length, weight = table[table[:, segments.LENGTH] > 0].T
    rows = int(length.sum()), _covered(x_start, length), _covered(y_start, length)
    return *rows, len(np.unique(weight))


def _covered(start: np.ndarray, length: np.ndarray) -> int:
    """How many rows lie in any segment."""
    order = np.argsort(start)
    start, end = start[order], (start + length)[order]
    before = np.maximum.accumulate(np.concatenate([[0], end]))[:-1]
    return int(np.maximum(end - np.maximum(start, before), 0).sum())
