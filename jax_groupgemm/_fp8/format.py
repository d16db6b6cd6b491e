"""The format of mode "fp8": codes of 8 bits in blocks, and how it is stored."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from .._core import check, partition
from .._quantized import packed_codes, padding
from .._quantized.array import Quantized
from .._quantized.format import PRODUCTS, PackedFormat
from .._quantized.layouts import Layout, register_of_mode
from .._quantized.reference import Parts
from . import blocks, conversion_calls, convert, prepack


class Fp8(PackedFormat):
    name, bits, scales = "fp8", (8,), ("float32",)
    takes_block = scalable = True
    rounds_to_x = False  # else scales would have to be rounded
    calls = PRODUCTS - {"jgg_qmm"} | {"jgg_qmm_fp8", "jgg_prepack_fp8"}

    def fields(self, op: str, bits, group_size, block) -> tuple[int, int, Any]:
        block = _pair(op, block)
        columns = 0 if block is None else block[1]
        bits = self._one_of(op, "bits", bits, self.bits)
        return bits, self._one_of(op, "group_size", group_size, (columns,)), block

    def described(self, q: Quantized) -> str:
        return f"mode={q.mode!r}, block={q.block}"

    def dequantized_dtype(self, q: Quantized) -> Any:
        return jnp.float32

    def check_operand(self, op: str, w, contract: int, bits: int, group_size: int, block) -> None:
        least = 2 if contract == -2 or block is None or block[0] > 1 else 1
        if w.ndim < least:
            letters = {1: "(..., K)", 2: "(..., N, K)" if contract == -1 else "(..., K, N)"}[least]
            raise ValueError(
                f"jgg.{op}: w has shape {w.shape}, expected {letters} in mode {self.name!r} with "
                f"block={block}"
            )

    def quantized(self, op: str, w, contract: int, global_scale, bits: int, group_size: int,
                  block) -> Quantized:  # fmt: skip
        return convert.quantized(op, w if contract == -1 else w.swapaxes(-1, -2), block=block)

    def values(self, q: Quantized, dtype, implementation: str | None) -> jax.Array:
        return convert.dequantized(q, dtype, implementation)

    # ---- a weight of a product

    def of_product(self, q: Quantized) -> Quantized:
        """With scales of three axes, and codes that have no derivative; a prepacked one as it
        is."""
        if q.layout == "sm90":
            return q
        scales, block = q.scales, q.block
        if block is None:
            scales, block = scales[..., None, None], tuple(max(n, 1) for n in q.shape[-2:])
        return dataclasses.replace(
            q, weight=lax.stop_gradient(q.weight), scales=scales, block=block, group_size=None
        )

    def parts(self, q: Quantized, dtype, k: int, n: int, transpose_w: bool) -> Any:
        return _Parts(q, dtype, k, n, transpose_w)

    def scale_cotangents(self, q: Quantized, dw) -> dict[str, jax.Array]:
        if not ad.is_undefined_primal(q.scales):
            return {}
        return {"scales": blocks.sums_of_blocks(dw * blocks.decoded(q.weight), q.block)}

    def in_parts_of(self, q: Quantized, x) -> Quantized:
        # Parts are known under Explicit sharding, where x or q may have them. Axes of x are told by
        # their length: of a square q both axes get x's parts, which makes blocks smaller, no more.
        own = _parts(q.weight)[-2:]
        others = dict(zip(x.shape[1:], _parts(x)[1:], strict=True))
        known = (max(p, others.get(n, 1)) for p, n in zip(own, q.shape[-2:], strict=True))
        return _in_whole_blocks(q, parts=tuple(known))  # pyright: ignore[reportArgumentType]

    def in_whole_blocks(self, q: Quantized, halves: int | None = None) -> Quantized:
        return _in_whole_blocks(self.of_product(q), halves)

    # ---- layout "sm90"

    def packed_scales(self, group_size: int, k_tiles: int) -> tuple[int, int]:
        return prepack.packed_scales(k_tiles)

    def codes_per_word(self, group_size: int) -> int:
        return prepack.BLOCK[1]

    def unpackable(self, q: Quantized, tile: int) -> str | None:
        return prepack.unpackable(q, tile)

    def by_rows(self, q: Quantized) -> Quantized:
        return prepack.by_rows(q)

    def in_blocks_of(self, q: Quantized, w: Quantized) -> Quantized:
        return prepack.in_blocks(q, w.block)

    def prepack_operand(self, q: Quantized) -> Quantized:
        return prepack.in_two_axes(q)

    def prepack_call(
        self, weight, scales, biases, *, block=None, metadata=None, rows=0, **static
    ) -> tuple[jax.Array, ...]:
        return conversion_calls.prepack(weight, scales, block=block, metadata=metadata, rows=rows)

    def codes_and_words(self, q: Quantized) -> tuple[jax.Array, jax.Array]:
        return prepack.codes_and_words(prepack.by_rows(q))

    def of_codes_and_words(self, w: Quantized, code, words, reshape) -> Quantized:
        scales = prepack.scales_of(code, words)
        weight = lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e4m3fn)
        return dataclasses.replace(
            w, weight=weight, scales=scales, layout="linear", block=prepack.BLOCK, group_size=None,
            biases=None,
        )  # fmt: skip

    def interleave(self, codes, bits: int) -> jax.Array:
        return packed_codes.interleave_e4m3(codes)

    def separate(self, words, bits: int) -> jax.Array:
        return packed_codes.separate_e4m3(words)

    def scales_fit(self, q, x_dtype) -> bool:
        return True  # kernels make others of them

    def has_lines(self, q: Quantized) -> bool:
        return prepack.has_lines(q)

    def attribute_group_size(self, group_size: int) -> int:
        return prepack.BLOCK[1]


def _pair(op: str, block) -> tuple[int, int] | None:
    """Rows and columns."""
    if block is None:
        return None
    if pair := check.two_sizes(block):
        return pair
    raise ValueError(
        f"jgg.{op}: block={check.describe(block)}, expected None or two numbers, of rows and of "
        "columns, as (1, 128)"
    )


def _in_whole_blocks(q: Quantized, halves: int | None = None, parts: tuple[int, int] = (1, 1)):
    """``q``, of a product, in blocks that divide both axes, so that parts of either have whole
    blocks; of the axis ``halves``, -1 or -2, each half. ``parts`` are known ones, of rows and of
    columns. A scale of a block that is cut is repeated for smaller ones."""
    assert q.block is not None
    scales, block = q.scales, [*q.block]
    for axis in (-1, -2):
        n, size = q.shape[axis], q.block[axis]
        count = 2 if axis == halves else parts[axis]
        part = n if n % count else n // count
        if part % size == 0 and n > size:
            continue
        block[axis] = unit = math.gcd(part, min(size, 128)) or 1
        index = np.arange(n // unit) * unit // size
        if len(index) != scales.shape[axis]:
            scales = blocks.taken(scales, index, axis)
    return dataclasses.replace(q, scales=scales, block=tuple(block), group_size=None)


def _parts(a) -> list[int]:
    """Into how many parts each axis is divided, explicitly."""
    shape = jax.typeof(a).sharding.mesh.shape
    return [math.prod(shape[name] for name in axes) for axes in partition.entries_of(a)]


class _Parts(Parts):
    """Some columns of a weight in blocks, which may be cut."""

    def __init__(self, q: Quantized, dtype, k: int, n: int, transpose_w: bool):
        super().__init__(q, dtype, k, n, transpose_w)
        # XLA's CPU backend widens floats of 8 bits around slices: all of them, to 16 bits.
        self.codes = lax.bitcast_convert_type(q.weight, jnp.uint8)

    def values(self, weight, first):
        q, axis = self.q, 0 if self.transpose_w else 1
        rows, columns = q.block or (1, 1)
        codes = self.cut(self.codes, weight, first, 1)
        codes = lax.bitcast_convert_type(codes, q.weight.dtype)
        scales = lax.dynamic_index_in_dim(q.scales, weight, keepdims=False)
        block = (first + lax.iota(jnp.int32, self.width)) // (rows, columns)[axis]
        scales = jnp.take(scales, block, axis=axis, mode="clip")
        own = (1, columns) if self.transpose_w else (rows, 1)
        return blocks.decoded(codes) * blocks.spread(scales, codes.shape, own)


class _Blocks(Layout):
    """Layout "linear": what the docstring of ``Quantized`` says of mode "fp8"."""

    modes = (Fp8.name,)

    def shape(self, q) -> tuple[int, ...]:
        return tuple(q.weight.shape)

    def checked(self, op: str, name: str, q) -> Any:
        check.dtype(op, f"{name}.weight", q.weight.dtype, blocks.CODES, " in mode 'fp8'")
        check.dtype(op, f"{name}.scales", q.scales.dtype, ("float32",), " in mode 'fp8'")
        rank = 1 if q.block is not None and q.block[0] == 1 else 2
        if q.weight.ndim < rank:
            letters = "(..., K)" if rank == 1 else f"(..., N, K) in mode 'fp8' with block={q.block}"
            raise ValueError(
                f"jgg.{op}: {name}.weight has shape {q.weight.shape}, expected {letters}"
            )
        expected = blocks.scales_shape(q.weight.shape, q.block)
        if q.scales.shape != expected:
            raise ValueError(
                f"jgg.{op}: {name}.scales has shape {q.scales.shape}, expected {expected} because "
                f"{name}.weight is {q.weight.shape} and block={q.block}"
            )
        for leaf in ("biases", "global_scale"):
            if getattr(q, leaf) is not None:
                raise ValueError(f"jgg.{op}: {name}.{leaf}: mode 'fp8' has none")
        weight = q.weight
        if weight.dtype == jnp.uint8:
            weight = lax.bitcast_convert_type(weight, jnp.float8_e4m3fn)
        return dataclasses.replace(q, weight=weight, positions=self._positions(op, name, q))


class _Grouped(_Blocks):
    """Blocks run along grouped rows, which are padded group by group."""

    name, axes, positions = "grouped", (-2,), "int32 (T,)"

    def takes_positions(self, value) -> bool:
        return value is not None and value.ndim == 1 and value.dtype == jnp.int32

    def checked(self, op: str, name: str, q) -> Any:
        check.shape(op, f"{name}.weight", q.weight, (None, None), "C, P", "layout 'grouped'")
        return super().checked(op, name, q)

    def restored(self, values, q) -> Any:
        return padding.take_rows(values, q.positions)


for _layout in (_Blocks(), _Grouped()):
    register_of_mode(Fp8.name, _layout)
