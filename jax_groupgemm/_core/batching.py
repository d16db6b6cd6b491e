"""A batch of grouped products as one: problems become segments, weights are laid end to end."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from . import partition, segments
from .products import Product
from .segments import MAX_ROWS, Form, Metadata


def fold_product(product, size, x, x_dim, metadata, meta_dims, *, rows, groups, own_weights,
                 transpose_x=False):  # fmt: skip
    """x and metadata of a batch of products as one; every problem has weights of its own, or all
    have the same."""
    form = metadata.form
    rows_x = extent(x, x_dim, 1 if transpose_x else 0)
    table = batched_table(metadata, meta_dims, rows_x, rows, groups)
    x, x_step = fold_rows(x, x_dim, transpose_x, rows_x)
    check_rows(product, size, max(rows_x, rows))
    folded = segments.fold(table, size, x_step, rows, groups if own_weights else 0)
    form = Form(
        "segments",
        ordered_x=form.ordered_x and x_dim is not None,
        ordered_y=form.ordered_y,
        own_weight=form.own_weight and own_weights,
        aligned=form.aligned and x_dim is not None and rows_x == rows,
    )
    return x, Metadata(form, folded)


def batch_size(args, dims):
    return next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)


def first(a, dim, size):
    """The operand with its batch as the first axis; one that is shared, so many times."""
    return jnp.broadcast_to(a, (size, *a.shape)) if dim is None else jnp.moveaxis(a, dim, 0)


def extent(a, dim, axis):
    """The size of an unbatched operand's axis."""
    return a.shape[axis + (dim is not None and dim <= axis)]


def batched_table(metadata: Metadata, dims: Metadata, rows_x, rows_y, groups):
    """The canonical table: (S, 4), or (size, S, 4) where any metadata is batched."""
    decode = functools.partial(Metadata.decode, rows_x=rows_x, rows_y=rows_y, groups=groups)
    if dims.values is None and dims.group_offset is None:
        return decode(metadata)
    metadata = jax.tree.map(partition.replicated, metadata)
    leaves, tree = jax.tree.flatten(metadata)
    in_axes = (dims.values, dims.group_offset)[: len(leaves)]
    return jax.vmap(lambda *m: decode(tree.unflatten(m)), in_axes=in_axes)(*leaves)


def fold_rows(a, dim, transposed, rows):
    """Lay a batch of row operands end to end; a shared one stays as it is (step 0)."""
    if dim is None:
        return a, 0
    a = jnp.moveaxis(a, dim, 1 if transposed else 0)
    if transposed:
        return partition.merge(a, (1, 2)), rows
    return partition.merge(a, (2, 1)), rows


def fold_leading(a, dim):
    """Fold a batch into the leading axis; a shared operand stays as it is."""
    if dim is None:
        return a
    a = jnp.moveaxis(a, dim, 0)
    return partition.merge(a, (2, *[1] * (a.ndim - 2)))


def check_rows(product: Product, size: int, rows: int) -> None:
    if size * rows > MAX_ROWS:
        raise ValueError(
            f"{product.caller.says}: a batch of {size} problems of {rows} rows has "
            f"{size * rows} rows; row indices are int32, at most {MAX_ROWS}. Use jax.lax.map over "
            "part of the batch."
        )
