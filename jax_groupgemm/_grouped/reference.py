"""The two primitives (``_core/products.py``) in plain JAX: what runs on every backend.

Whatever no segment reaches is zero.  Sizes are data: loops run over the tiles that exist, so the
cost follows the rows, not rows x groups, and a tile reads no weight but its own, so a NaN stays in
its group.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .._core.dtypes import converted, is_half, load, promoted, storage, summed
from .._core.products import Mm, Product, Wgrad
from .._core.segments import LENGTH, WEIGHT, X_START, Y_START, Metadata

# Rows per tile. A segment is cut into tiles of the largest size and one last, smaller tile; every
# size costs compile time, so sizes are picked around the mean length of a segment.
_TILES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def mm(x, w, metadata: Metadata, product: Mm) -> jax.Array:
    x = x.T if product.transpose_x else x
    (groups, _, n), rows, form = product.sizes(w), product.rows, metadata.form
    segments = metadata.decode(x.shape[0], rows, groups)
    dot = Dot(x, w, product, (((1,), (1 if product.transpose_w else 0,)), ((), ())))
    # Where segments may meet in one row, their sum is kept in the accumulator's dtype.
    sum_dtype = product.out_dtype if form.ordered_y else dot.dtype
    tiles = _tile_sizes(rows, segments.shape[0], form.ordered_y)
    pad = 0 if form.aligned and tiles[-1] <= rows else tiles[-1]
    x = storage(jnp.pad(x, ((0, pad), (0, 0))) if pad else x)
    w = storage(w)
    out = zeros_like_varying((rows + pad, n), sum_dtype, x, w, segments)
    if rows and n and groups and x.shape[1] and segments.shape[0]:
        add = functools.partial(
            _mm_tile, x, w, dot=dot, dtype=sum_dtype, accumulate=not form.ordered_y,
            limit=None if pad else rows,
        )  # fmt: skip
        out = _for_each_tile(segments, tiles, add, out)
    out = converted(load(out, sum_dtype), product.out_dtype)[:rows]
    return out.T if product.transpose_out else out


def _mm_tile(x, w, segment, done, out, *, tile, dot, dtype, accumulate, limit):
    """Add rows [done, done + tile) of one segment, or as many of them as it has."""
    x_row, y_row = segment[X_START] + done, segment[Y_START] + done
    begin = jnp.int32(0)
    if limit is not None:  # aligned rows, not padded: slide the last tile back inside
        begin = jnp.maximum(y_row + tile - limit, 0)
        x_row, y_row = x_row - begin, y_row - begin
    row = lax.iota(jnp.int32, tile)
    mine = (row >= begin) & (row < begin + segment[LENGTH] - done)
    x_tile = lax.dynamic_slice(x, (x_row, jnp.int32(0)), (tile, x.shape[1]))
    new = dot(x_tile, lax.dynamic_index_in_dim(w, segment[WEIGHT], keepdims=False))
    new = converted(new, dtype)
    at = (y_row, jnp.int32(0))
    old = load(lax.dynamic_slice(out, at, (tile, out.shape[1])), dtype)
    new = jnp.where(mine[:, None], old + new if accumulate else new, old)
    return lax.dynamic_update_slice(out, storage(new), at)


def _for_each_tile(segments, tiles, visit, out):
    """``out = visit(segment, done, out, tile=)`` for every tile of every segment.

    A segment is cut into tiles of the largest size and one last tile of the smallest size that
    holds the rest. Segments are sorted by that size, so that each size has one plain loop: a
    branch inside a loop would copy ``out``.
    """
    big, length = tiles[-1], segments[:, LENGTH]
    full = length // big
    rest = length - full * big

    def whole_tiles(i, out):
        segment = segments[by_full[i]]
        step = lambda j, out: visit(segment, j * big, out, tile=big)
        return lax.fori_loop(0, segment[LENGTH] // big, step, out)

    by_full = jnp.argsort(full == 0, stable=True)
    out = lax.fori_loop(0, jnp.sum(full > 0, dtype=jnp.int32), whole_tiles, out)

    size = jnp.where(rest > 0, _smallest_tile(tiles, rest), -1)
    by_size = jnp.argsort(size, stable=True)

    def last_tile(i, out, *, tile):
        segment = segments[by_size[i]]
        return visit(segment, segment[LENGTH] // big * big, out, tile=tile)

    begin = jnp.sum(size < 0, dtype=jnp.int32)
    for index, tile in enumerate(tiles):
        end = begin + jnp.sum(size == index, dtype=jnp.int32)
        out = lax.fori_loop(begin, end, functools.partial(last_tile, tile=tile), out)
        begin = end
    return out


def wgrad(x, y, metadata: Metadata, product: Wgrad) -> jax.Array:
    x = x.T if product.transpose_x else x
    y = y.T if product.transpose_y else y
    groups, form, out_dtype = product.groups, metadata.form, product.out_dtype
    segments = metadata.decode(x.shape[0], y.shape[0], groups)
    dot = Dot(x, y, product, (((0,), (0,)), ((), ())))
    shape = (groups, x.shape[1], y.shape[1])
    if not (x.size and y.size and groups and segments.shape[0]):
        return zeros_like_varying(shape, out_dtype, x, y, segments, stored=False)
    rows = min(x.shape[0], y.shape[0])
    tiles = _tile_sizes(rows, segments.shape[0], form.ordered_x)
    x, y = (storage(jnp.pad(v, ((0, tiles[-1]), (0, 0)))) for v in (x, y))
    of_segment = functools.partial(_segment_product, x, y, tiles=tiles, dot=dot)
    if form.own_weight:
        # One segment per weight: each product is finished in one place and written once.
        def write(s, out):
            new = converted(of_segment(segments[s]), out_dtype)
            return lax.dynamic_update_index_in_dim(out, storage(new), s, 0)

        out = zeros_like_varying(shape, out_dtype, x, y, segments)
        return load(lax.fori_loop(0, groups, write, out), out_dtype)

    def add(s, out):
        weight = segments[s, WEIGHT]
        new = of_segment(segments[s]) + lax.dynamic_index_in_dim(out, weight, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, new, weight, 0)

    out = zeros_like_varying(shape, dot.dtype, x, y, segments, stored=False)
    return converted(lax.fori_loop(0, segments.shape[0], add, out), out_dtype)


def _segment_product(x, y, segment, *, tiles, dot):
    """x_s^T y_s of one segment; rows past its end are zeroed on both sides (NaN * 0 is NaN)."""
    length = segment[LENGTH]

    def part(tile, done):
        keep = (lax.iota(jnp.int32, tile) < length - done)[:, None]
        x_tile = lax.dynamic_slice(x, (segment[X_START] + done, jnp.int32(0)), (tile, x.shape[1]))
        y_tile = lax.dynamic_slice(y, (segment[Y_START] + done, jnp.int32(0)), (tile, y.shape[1]))
        zero = jnp.zeros((), x.dtype), jnp.zeros((), y.dtype)
        return dot(jnp.where(keep, x_tile, zero[0]), jnp.where(keep, y_tile, zero[1]))

    nothing = zeros_like_varying((x.shape[1], y.shape[1]), dot.dtype, x, y, segment, stored=False)
    big = tiles[-1]
    count = (length + big - 1) // big
    rest = length - (count - 1) * big
    size = _smallest_tile(tiles, rest) + 1
    last = lax.switch(
        jnp.where(length > 0, size, 0),
        [lambda done: nothing, *(functools.partial(part, tile) for tile in tiles)],
        (count - 1) * big,
    )
    return lax.fori_loop(0, count - 1, lambda i, acc: acc + part(big, i * big), last)


def _tile_sizes(rows, segments, ordered) -> list[int]:
    """Ascending tile sizes for ``rows`` rows cut into so many segments."""
    sizes = [t for t in _TILES if t < rows] + [t for t in _TILES if t >= rows][:1]
    if not ordered:  # segments may overlap: their number says nothing of their length
        return sizes[::3] if sizes[-1] in sizes[::3] else [*sizes[::3], sizes[-1]]
    mean = rows / max(segments, 1)
    near = [t for t in sizes if mean / 4 <= t <= 2 * mean]
    return near or (sizes[-1:] if mean > sizes[-1] else sizes[:1])


def _smallest_tile(tiles, rows):
    """The index of the smallest tile that holds so many rows."""
    return sum((rows > tile).astype(jnp.int32) for tile in tiles)


class Dot:
    """One tile's product: operands as stored in, accumulator out."""

    def __init__(self, a, b, product: Product, dimension_numbers):
        self.a, self.b = a.dtype, b.dtype
        self.operand = promoted(a.dtype, b.dtype)
        self.dtype = self.sum = summed(self.operand, product.out_dtype)
        if jnp.issubdtype(self.operand, jnp.integer):
            # XLA's compiler for GPUs (jax 0.11.2) crashes on products of integers of few bits, and
            # refuses those of integers whose sums are floats.
            if jnp.issubdtype(self.sum, jnp.inexact):
                self.operand = self.sum
            elif jnp.iinfo(self.operand).bits < 32:
                self.operand = jnp.dtype(jnp.int32)
                self.sum = promoted(self.dtype, jnp.int32)
        self.precision = product.precision
        self.dimension_numbers = dimension_numbers

    def __call__(self, a, b):
        return lax.dot_general(
            load(a, self.a).astype(self.operand),
            load(b, self.b).astype(self.operand),
            self.dimension_numbers,
            precision=self.precision,
            preferred_element_type=self.sum,
        ).astype(self.dtype)


def zeros_like_varying(shape, dtype, *like, stored=True):
    """Zeros that vary over the manual mesh axes that ``like`` vary over, for a loop's carry."""
    zeros = jnp.zeros(shape, jnp.uint16 if stored and is_half(dtype) else dtype)
    varying: frozenset = frozenset()
    for a in like:
        varying |= jax.typeof(a).manual_axis_type.varying
    return lax.pcast(zeros, tuple(sorted(varying)), to="varying") if varying else zeros
