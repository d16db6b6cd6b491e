"""What a mode of ``Quantized`` is: an object per format, registered by name.

A format decides what codes and scales mean, which sizes they have, and in what order kernels read
them. Everything else asks the object and compares no name.
"""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.check import describe

#: A ``Quantized``. Its module imports this one.
type Quantized = Any

FLOATS = ("float32", "bfloat16", "float16")
#: Rows and columns of a block of weights, by default.
TILE = (128, 128)

#: The custom calls of products and layers. ``jgg_qmm`` reads codes as they are stored.
PRODUCTS = frozenset({"jgg_qmm", "jgg_qmm_packed", "jgg_moe_few_tokens", "jgg_moe_some_tokens"})
#: Those that make layout "sm90".
PREPACKS = frozenset({"jgg_prepack", "jgg_prepack_fp8"})

#: By name, as ``Quantized.mode`` has it, in the order in which messages name them.
FORMATS: dict[str, Format] = {}


class Format(abc.ABC):
    """A format of quantized arrays ``(..., K)``.

    Attributes:
      name: as ``Quantized.mode`` has it.
      bits, group_sizes: those that it takes, its default first. A format in blocks has no group
        sizes.
      scales: names of the dtypes of scales.
      has_biases: whether each group has a bias.
      takes_global_scale: whether a float32 may multiply all.
      takes_block: whether ``Quantized.block`` says which elements share a scale.
      rounds_to_x: whether a product rounds the weight to the dtype of x. Otherwise x is widened to
        float32.
      exact_in_bfloat16: whether bfloat16 holds every value, as kernels decode it: then products of
        bfloat16 parts of x are those of x.
      scalable: whether a kernel may multiply sums over codes by its scales.
      calls: the custom calls that take it. A format without any runs as an XLA program.
    """

    name: str
    bits: tuple[int, ...]
    group_sizes: tuple[int, ...] = ()
    scales: tuple[str, ...] = ("uint8",)
    has_biases = False
    takes_global_scale = False
    takes_block = False
    rounds_to_x = True
    exact_in_bfloat16 = scalable = False
    calls: frozenset[str] = frozenset()

    # ---- an array in this format

    def fields(self, op: str, bits, group_size, block) -> tuple[int, int, Any]:
        """bits, group_size and block, checked; defaults for None."""
        if block is not None:
            known = " or ".join(repr(f.name) for f in FORMATS.values() if f.takes_block)
            raise ValueError(
                f"jgg.{op}: block={describe(block)} is for mode {known}, not {self.name!r}"
            )
        bits = self._one_of(op, "bits", bits, self.bits)
        return bits, self._one_of(op, "group_size", group_size, self.group_sizes), None

    def _one_of(self, op: str, name: str, value, known: tuple[int, ...]) -> int:
        is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        if value is not None and not (is_number and value in known):
            values = " or ".join(map(str, sorted(known)))
            raise ValueError(
                f"jgg.{op}: {name}={describe(value)}, expected {values} in mode {self.name!r}"
            )
        return known[0] if value is None else int(value)

    def described(self, q: Quantized) -> str:
        """The static fields, as ``repr`` shows them."""
        return f"mode={q.mode!r}, bits={q.bits}, group_size={q.group_size}"

    def codes_together(self, bits: int, group_size: int) -> int:
        """Codes that nothing cuts apart: whole groups, in whole words."""
        return group_size

    @abc.abstractmethod
    def dequantized_dtype(self, q: Quantized) -> Any:
        """The dtype of ``dequantize(q)``."""

    # ---- conversions

    @abc.abstractmethod
    def check_operand(self, op: str, w, contract: int, bits: int, group_size: int, block) -> None:
        """Raise where w, contracted over axis -1 or -2, cannot be quantized."""

    @abc.abstractmethod
    def quantized(self, op: str, w, contract: int, global_scale, bits: int, group_size: int,
                  block) -> Quantized:  # fmt: skip
        """``w (..., K)``, or ``(..., K, N)`` contracted over axis -2, of checked arguments."""

    @abc.abstractmethod
    def values(self, q: Quantized, dtype, implementation: str | None) -> jax.Array:
        """The values that are stored, of layout "linear"."""

    # ---- a weight of a product

    def of_product(self, q: Quantized) -> Quantized:
        """``q``, checked, with leaves as products take them."""
        return q

    @abc.abstractmethod
    def parts(self, q: Quantized, dtype, k: int, n: int, transpose_w: bool) -> Any:
        """What dequantizes some columns of a weight at a time: ``reference.Parts``."""

    @abc.abstractmethod
    def scale_cotangents(self, q: Quantized, dw) -> dict[str, jax.Array]:
        """Cotangents of scales and biases that are undefined; ``dw`` is that of the weight."""

    def in_parts_of(self, q: Quantized, x) -> Quantized:
        """``q``, of a product with x, whose leaves may be sharded along any axis."""
        return q

    def in_whole_blocks(self, q: Quantized, halves: int | None = None) -> Quantized:
        """``q`` in blocks that no part of an axis cuts, nor halves of the axis ``halves``."""
        return q

    # ---- layout "sm90"

    def with_scales_of(self, q: Quantized, dtype) -> Quantized:
        """``q`` with scales rounded to ``dtype``, where they are floats that may be rounded."""
        return q

    def unpackable(self, q: Quantized, tile: int) -> str | None:
        """Why there is no layout "sm90" of ``q (..., N, K)``, of tiles of ``tile`` rows and k."""
        return f"mode {self.name!r} has none"

    # ---- what kernels are told

    def has_lines(self, q: Quantized) -> bool:
        """Whether the kernels of layout "linear" that take the format take ``q``."""
        return True

    def attribute_group_size(self, group_size: int) -> int:
        """``group_size`` as handlers take it."""
        return group_size

    def scales_fit(self, q: Quantized, x_dtype) -> bool:
        """Whether ``x_dtype`` holds the scales exactly, as kernels read them."""
        dtype = q.scales.dtype
        return not jnp.issubdtype(dtype, jnp.floating) or dtype == x_dtype


class PackedFormat(Format):
    """A format that layout "sm90" exists for: tiles of 64 x 64, see ``prepack``.

    Attributes:
      rows_per_word: rows whose scales share a word of it.
      words: dtypes of scales there: uint32, or pairs of uint16 for those that float16 holds.
    """

    rows_per_word = 1
    words: tuple[str, ...] = ("uint32",)

    def unpackable(self, q: Quantized, tile: int) -> str | None:
        if any(size % tile for size in q.shape[-2:]):
            return f"its shape is {q.shape}, in which N and K are not multiples of {tile}"
        return None

    @abc.abstractmethod
    def packed_scales(self, group_size: int, k_tiles: int) -> tuple[int, int]:
        """The last two axes of the scales: tiles along K that share words, and words."""

    def words_of_scale(self, q: Quantized) -> int:
        """Words of a scale in layout "sm90", of ``q`` in that layout."""
        return 1

    def codes_per_word(self, group_size: int) -> int:
        """Codes of a row that share a scale there."""
        return group_size

    def by_rows(self, q: Quantized) -> Quantized:
        """``q``, in layout "linear", with the scales of each row that the layout has."""
        return q

    def in_blocks_of(self, q: Quantized, w: Quantized) -> Quantized:
        """The inverse: ``q`` with the blocks of ``w``."""
        return q

    def prepack_operand(self, q: Quantized) -> Quantized:
        """``q`` as :meth:`prepack_call` and the definition take it."""
        return q

    @abc.abstractmethod
    def prepack_call(
        self, weight, scales, biases, *, block=None, metadata=None, rows=0, **static
    ) -> tuple[jax.Array, ...]:
        """The custom call that makes the leaves. With ``metadata``, of ``rows`` that are multiplied
        by them, matrices without rows may hold anything."""

    @abc.abstractmethod
    def codes_and_words(self, q: Quantized) -> tuple[jax.Array, jax.Array]:
        """uint32 ``(..., N, K)``, and the words of each row's scales."""

    @abc.abstractmethod
    def of_codes_and_words(self, w: Quantized, code, words, reshape) -> Quantized:
        """The inverse, in layout "linear"; ``w`` has the static fields."""

    @abc.abstractmethod
    def interleave(self, codes, bits: int) -> jax.Array:
        """(..., 16 pairs, 2) codes as (..., bits) words."""

    @abc.abstractmethod
    def separate(self, words, bits: int) -> jax.Array:
        """The inverse."""


def register(kind: Format) -> None:
    FORMATS[kind.name] = kind


def of(q) -> Format:
    """The format of a ``Quantized``."""
    return FORMATS[q.mode]


def packed_of(mode: str) -> PackedFormat:
    """The format of a mode. Raises ValueError where it has no layout "sm90"."""
    kind = FORMATS[mode]
    if not isinstance(kind, PackedFormat):
        raise ValueError(f"jgg: layout 'sm90' does not exist in mode {mode!r}")
    return kind
