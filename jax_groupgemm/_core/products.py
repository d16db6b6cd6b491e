"""Grouped products, as the records that primitives carry.

mm     out[y_start_s + i] += a[x_start_s + i] @ b[weight_s]                    T (rows) is grouped
wgrad  out[weight_s]      += a[x_start_s + i]^T b[y_start_s + i]  (outer)      T is contracted

for every segment s of the metadata (``segments.py``) and 0 <= i < length_s.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Caller:
    """The public operation that a product is of, for messages.

    Attributes:
      op: its name; "" where that is not known.
      operands: what it calls a and b; of its gradient, where the user wrote neither, None.
      axes: what it calls axes of other letters than the product's (``Product.letters``).
    """

    op: str = ""
    operands: tuple[str, str] | None = None
    axes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def says(self) -> str:
        """How a message begins."""
        return f"jgg.{self.op}" if self.op else "jgg"

    def axis(self, letter: str) -> str:
        """What the user calls an axis; those of the gradient have other letters than the user's."""
        if self.operands is None:
            return "an axis"
        return f"axis {self.axes.get(letter, letter.upper())}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product(abc.ABC):
    """Facts of a grouped product beside its operands.

    Attributes:
      out_dtype: the result's; sums are kept in float32 (float64 for float64) whatever it is.
      precision: a :class:`jax.lax.Precision` or None, for float32 operands.
      implementation: the kernel that the user named, "reference", or None.
      cotangent_dtype: what a cotangent is rounded to before it is multiplied, or None.
      caller: for messages alone: products that differ in it are the same.
    """

    out_dtype: Any
    precision: Any = None
    implementation: str | None = None
    cotangent_dtype: Any = None
    caller: Caller = dataclasses.field(default=Caller(), compare=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "out_dtype", jnp.dtype(self.out_dtype))

    @property
    def tf32(self) -> bool:
        return self.precision == jax.lax.Precision.HIGH

    def replace(self, **given) -> Any:
        return dataclasses.replace(self, **given)

    @abc.abstractmethod
    def out_shape(self, a, b) -> tuple[int, ...]: ...

    @abc.abstractmethod
    def letters(self, leaves: Sequence, aligned: bool) -> tuple[str, ...]:
        """The axes of a, of each leaf of b, and of the result; ``aligned`` as in the form."""

    def derived[P: Product](self, kind: type[P], **given) -> P:
        """Another product, with this one's precision and kernel: a part of its gradient."""
        return kind(
            precision=self.precision, implementation=self.implementation,
            caller=Caller(self.caller.op), **given,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mm(Product):
    """``mm``: a is (T, K), b (G, K, N), an array or quantized, and the result (rows, N).

    ``transpose_*`` says that an operand, or the result, is stored with its last two axes exchanged.
    Rows of no group are zeros. Without ``clears_rest`` they may hold anything, which is for whoever
    never reads them.
    """

    rows: int
    transpose_x: bool = False
    transpose_w: bool = False
    transpose_out: bool = False
    clears_rest: bool = True

    def sizes(self, w) -> tuple[int, int, int]:
        """G, K and N of the weights."""
        groups, k, n = w.shape
        return (groups, n, k) if self.transpose_w else (groups, k, n)

    def rows_x(self, x) -> int:
        return x.shape[1 if self.transpose_x else 0]

    def out_shape(self, a, b) -> tuple[int, ...]:
        n = self.sizes(b)[2]
        return (n, self.rows) if self.transpose_out else (self.rows, n)

    def letters(self, leaves: Sequence, aligned: bool) -> tuple[str, ...]:
        """t rows, k contracted, n columns, g weights. Rows of a that are not those of the result
        are u. A global scale of b has its leading axis, or none."""
        rows = "t" if aligned else "u"
        w = "gnk" if self.transpose_w else "gkn"
        return (
            f"k{rows}" if self.transpose_x else f"{rows}k",
            *(w[: len(leaf.shape)] for leaf in leaves),
            "nt" if self.transpose_out else "tn",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wgrad(Product):
    """``wgrad``: a is (T, A), b (T, B) and the result (groups, A, B).

    ``transpose_*`` says that an operand is stored with its axes exchanged.
    """

    groups: int
    transpose_x: bool = False
    transpose_y: bool = False

    def rows(self, x, y) -> tuple[int, int]:
        """T of either operand."""
        return x.shape[1 if self.transpose_x else 0], y.shape[1 if self.transpose_y else 0]

    def out_shape(self, a, b) -> tuple[int, ...]:
        columns = a.shape[0 if self.transpose_x else 1], b.shape[0 if self.transpose_y else 1]
        return (self.groups, *columns)

    def letters(self, leaves: Sequence, aligned: bool) -> tuple[str, ...]:
        """t rows, a and b columns, g weights. Rows of b that are not those of a are u."""
        rows = "t" if aligned else "u"
        x = "at" if self.transpose_x else "ta"
        return x, f"b{rows}" if self.transpose_y else f"{rows}b", "gab"
