"""``qmm`` in plain JAX: its definition, and what runs on every backend.

    out[y_start_s + i] += x[x_start_s + i] @ W[weight_s]                       T (rows) is grouped

where W is the weight dequantized and rounded once to x's dtype (in mode "fp8" to float32, as which
x is multiplied, too). Sums are float32; a global scale multiplies them. One loop over the segments
that exist: of each, some columns of its weight are dequantized at a time and meet all of its rows,
so no more of a weight than that is ever in memory.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from .._core import dtypes
from .._core.float_bits import u32
from .._core.products import Mm
from .._core.segments import LENGTH, WEIGHT, X_START, Y_START, Metadata
from .._grouped import reference as grouped_reference
from . import formats, fp8
from .array import Quantized

# Rows per tile. A segment is cut into as many tiles of the largest size as it has, then of the
# next; the last tile of the smallest size may be part empty.
_TILES = (8, 32, 128)
# Elements of a weight that are dequantized at a time, and the fewest columns. XLA's CPU backend
# sums a product with one column as a product of vectors, whose error grows with K.
_PART = 2**20
_COLUMNS = 8


def qmm(x, q: Quantized, metadata: Metadata, product: Mm) -> jax.Array:
    """See the module's docstring. x (T, K); out (rows, N); q stands for (G, N, K) with
    ``transpose_w``, else (G, K, N)."""
    (groups, k, n), rows, form = product.sizes(q), product.rows, metadata.form
    segments = metadata.decode(x.shape[0], rows, groups)
    leaves = jax.tree.leaves(q)
    if q.mode == "fp8":  # else scales would have to be rounded
        x = x.astype(jnp.float32)
        product = product.replace(precision=lax.Precision.HIGHEST)
    # Where segments may meet in one row, their sum is kept as float32.
    sum_dtype = product.out_dtype if form.ordered_y else jnp.dtype(jnp.float32)
    out = grouped_reference.zeros_like_varying(
        (rows + _TILES[0], n), sum_dtype, x, *leaves, segments
    )
    if rows and k and n and groups and segments.shape[0]:
        x_padded = dtypes.storage(jnp.pad(x, ((0, _TILES[0]), (0, 0))))
        contracted = 1 if product.transpose_w else 0
        dot = grouped_reference.Dot(x, x, product, (((1,), (contracted,)), ((), ())))
        of_format = _Fp8Parts if q.mode == "fp8" else _Parts
        parts = of_format(q, x.dtype, k, n, product.transpose_w)
        longest = min(rows, x.shape[0])
        add = functools.partial(
            _add_segment, x_padded, parts, q.global_scale, dot=dot, dtype=sum_dtype,
            accumulate=not form.ordered_y, tiles=[t for t in _TILES if t < longest] or _TILES[:1],
        )  # fmt: skip
        length = segments[:, LENGTH]
        order = jnp.argsort(length == 0, stable=True)
        count = jnp.sum(length > 0, dtype=jnp.int32)
        out = lax.fori_loop(0, count, lambda i, out: add(segments[order[i]], out), out)
    return dtypes.load(out, sum_dtype).astype(product.out_dtype)[:rows]


def _add_segment(x, parts, global_scale, segment, out, *, dot, dtype, accumulate, tiles):
    x_start, y_start, length = segment[X_START], segment[Y_START], segment[LENGTH]
    scale = global_scale
    if scale is not None and scale.ndim:
        scale = lax.dynamic_index_in_dim(scale, segment[WEIGHT], keepdims=False)

    def add_part(j, out):
        w, column, fresh = parts(segment[WEIGHT], j)

        def add_tile(done, out, *, tile):
            x_tile = lax.dynamic_slice(x, (x_start + done, jnp.int32(0)), (tile, x.shape[1]))
            new = dot(x_tile, w)
            new = (new if scale is None else new * scale).astype(dtype)
            at = (y_start + done, column)
            old = dtypes.load(lax.dynamic_slice(out, at, new.shape), dtype)
            mine = (lax.iota(jnp.int32, tile) < length - done)[:, None] & fresh[None]
            new = jnp.where(mine, old + new if accumulate else new, old)
            return lax.dynamic_update_slice(out, dtypes.storage(new), at)

        def add_tiles(done, out, *, tile):
            rest = length - done + (tile - 1 if tile == tiles[0] else 0)
            count = rest // tile
            step = lambda i, out: add_tile(done + i * tile, out, tile=tile)
            return done + count * tile, lax.fori_loop(0, count, step, out)

        done = jnp.int32(0)
        for tile in reversed(tiles):
            done, out = add_tiles(done, out, tile=tile)
        return out

    return lax.fori_loop(jnp.int32(0), jnp.int32(parts.count), add_part, out)


class _Parts:
    """Some columns of W at a time: all that is dequantized at once."""

    def __init__(self, q: Quantized, dtype, k: int, n: int, transpose_w: bool):
        self.q, self.dtype, self.transpose_w = q, dtype, transpose_w
        # Columns are counted in blocks that may be cut apart: quantization groups, or single ones.
        self.block = self._width(q)
        self.blocks = n // self.block
        self.count = max(1, min(self.blocks, n // _COLUMNS, round(k * n / _PART)))
        self.width = -(-self.blocks // self.count)
        self.table = None
        if q.mode not in ("affine", "fp8") and k * n > 4 * 256 << q.bits:
            self.table = dtypes.storage(_value_table(q, dtype))

    def _width(self, q: Quantized) -> int:
        return 1 if self.transpose_w else q.group_size

    def __call__(self, weight, j):
        """Part j of a weight, its first column, and which of its columns no part before had."""
        first = jnp.minimum(j * self.width, self.blocks - self.width)
        column = lax.iota(jnp.int32, self.width * self.block)
        fresh = column >= (j * self.width - first) * self.block
        return self._part(weight, first), first * self.block, fresh

    def _part(self, weight, first):
        q = self.q
        part = dataclasses.replace(
            q,
            weight=self._cut(q.weight, weight, first, q.group_size * q.bits // 32),
            scales=self._cut(q.scales, weight, first, 1),
            biases=None if q.biases is None else self._cut(q.biases, weight, first, 1),
            global_scale=None,
        )
        return self._values(part)

    def _values(self, part: Quantized):
        if self.table is None:
            values = formats.values_in_groups(
                part.weight, part.scales, part.biases, None,
                mode=part.mode, bits=part.bits, group_size=part.group_size, dtype=self.dtype,
            )  # fmt: skip
            values = dtypes.storage(values)
        else:
            codes = formats.codes_in_groups(part.weight, part.bits, part.group_size)
            index = u32(part.scales)[..., None, None] << u32(part.bits) | codes
            values = self.table.at[index].get(mode="promise_in_bounds")
        return dtypes.load(formats.flatten_groups(values), self.dtype)

    def _cut(self, leaf, weight, first, per_group):
        zero = jnp.int32(0)
        if self.transpose_w:
            start, shape = (weight, first, zero), (1, self.width, leaf.shape[2])
        else:
            start = (weight, zero, first * per_group)
            shape = (1, leaf.shape[1], self.width * per_group)
        part = lax.dynamic_slice(dtypes.storage(leaf), start, shape)[0]
        return dtypes.load(part, leaf.dtype)


class _Fp8Parts(_Parts):
    """The same of codes that are not packed, in blocks that may be cut."""

    def __init__(self, q: Quantized, *more):
        super().__init__(q, *more)
        # XLA's CPU backend widens floats of 8 bits around slices: all of them, to 16 bits.
        self.codes = lax.bitcast_convert_type(q.weight, jnp.uint8)

    def _width(self, q: Quantized) -> int:
        return 1

    def _part(self, weight, first):
        q, axis = self.q, 0 if self.transpose_w else 1
        rows, columns = q.block or (1, 1)
        codes = self._cut(self.codes, weight, first, 1)
        codes = lax.bitcast_convert_type(codes, q.weight.dtype)
        scales = lax.dynamic_index_in_dim(q.scales, weight, keepdims=False)
        block = (first + lax.iota(jnp.int32, self.width)) // (rows, columns)[axis]
        scales = jnp.take(scales, block, axis=axis, mode="clip")
        own = (1, columns) if self.transpose_w else (rows, 1)
        return fp8.decoded(codes) * fp8.spread(scales, codes.shape, own)


def _value_table(q: Quantized, dtype):
    """Every value of a mode without biases: of code c under scale byte b at ``b << bits | c``."""
    count = 1 << q.bits
    columns = max(count, q.group_size)
    codes = jnp.broadcast_to(lax.iota(jnp.uint32, columns) % u32(count), (256, columns))
    scales = lax.broadcasted_iota(jnp.uint8, (256, columns // q.group_size), 0)
    values = formats.dequantize(
        formats.pack(codes, q.bits), scales, None, None,
        mode=q.mode, bits=q.bits, group_size=q.group_size, dtype=dtype,
    )  # fmt: skip
    return values[:, :count].reshape(-1)
