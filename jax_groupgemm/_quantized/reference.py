"""``qmm`` in plain JAX: its definition, and what runs on every backend.

    out[y_start_s + i] += x[x_start_s + i] @ W[weight_s]                       T (rows) is grouped

where W is the weight dequantized and rounded once to x's dtype. Where a format does not round to
it, W is float32, and x is widened to that. Sums are float32; a global scale multiplies them. One
loop over the segments that exist: of each, some columns of its weight are dequantized at a time and
meet all of its rows, so no more of a weight than that is ever in memory.
"""

from __future__ import annotations

import abc
import functools

import jax
import jax.numpy as jnp
from jax import lax

from .._core import dtypes
from .._core.products import Mm
from .._core.segments import LENGTH, WEIGHT, X_START, Y_START, Metadata
from .._grouped import reference as grouped_reference
from . import format
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
    kind = format.of(q)
    if not kind.rounds_to_x:
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
        parts = kind.parts(q, x.dtype, k, n, product.transpose_w)
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


class Parts(abc.ABC):
    """Some columns of W at a time: all that is dequantized at once. Columns are counted in blocks
    of ``block``, which may be cut apart."""

    def __init__(self, q: Quantized, dtype, k: int, n: int, transpose_w: bool, *, block: int = 1):
        self.q, self.dtype, self.transpose_w, self.block = q, dtype, transpose_w, block
        self.blocks = n // block
        self.count = max(1, min(self.blocks, n // _COLUMNS, round(k * n / _PART)))
        self.width = -(-self.blocks // self.count)

    def __call__(self, weight, j):
        """Part j of a weight, its first column, and which of its columns no part before had."""
        first = jnp.minimum(j * self.width, self.blocks - self.width)
        column = lax.iota(jnp.int32, self.width * self.block)
        fresh = column >= (j * self.width - first) * self.block
        return self.values(weight, first), first * self.block, fresh

    @abc.abstractmethod
    def values(self, weight, first) -> jax.Array:
        """The ``width`` blocks of a weight from block ``first`` on."""

    def cut(self, leaf, weight, first, per_block):
        """Those of a leaf, which has so many numbers for each block."""
        zero = jnp.int32(0)
        if self.transpose_w:
            start, shape = (weight, first, zero), (1, self.width, leaf.shape[2])
        else:
            start = (weight, zero, first * per_block)
            shape = (1, leaf.shape[1], self.width * per_block)
        part = lax.dynamic_slice(dtypes.storage(leaf), start, shape)[0]
        return dtypes.load(part, leaf.dtype)
