"""The custom calls of ``route``, ``dispatch`` and ``combine``: operands and results."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._fp8 import blocks
from .._kernels import choose, extension, problems


def takes_route(platform: str, pairs: int, rows: int, experts: int) -> bool:
    """Whether a kernel runs ``route``."""
    empty = 0 in (pairs, rows, experts)
    return _chosen("route", platform, pairs=pairs, experts=experts, empty=empty)


def route(index, offset, *, rows: int, experts: int) -> list[jax.Array]:
    """Custom call ``jgg_moe_route``: expert_index[, expert_offset] -> order, place, group_sizes,
    overflow, workspace. Both are int32, the offset of shape ``()``."""
    blocks = extension.rules().moe_route_blocks(pairs=index.size)
    shapes = [(rows,), (index.size,), (experts,), (), (experts, blocks)]
    results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    operands = [index.reshape(-1), *([] if offset is None else [offset])]
    order, place, sizes, overflow, _ = jax.ffi.ffi_call("jgg_moe_route", results)(*operands)
    return [order, place.reshape(index.shape), sizes, overflow]


def dispatch(platform: str, x, routing, weight, *, clears_rest: bool) -> jax.Array | None:
    """Custom call ``jgg_moe_dispatch``: x, order, place[, expert_weight] -> out, or None."""
    if x.dtype.name in blocks.DTYPES and weight is None:
        takes = _takes("dispatch", platform, x, routing, (), jnp.float32, codes=True)
    else:
        takes = _takes("dispatch", platform, x, routing, (x.dtype,), x.dtype)
    if not takes:
        return None
    out = jax.ShapeDtypeStruct((routing.order.shape[0], x.shape[1]), x.dtype)
    attributes = {"clears_rest": clears_rest}
    return _rows_call("jgg_moe_dispatch", out, x, routing=routing, weight=weight, **attributes)


def combine(platform: str, rows, routing, weight, *, dtype) -> jax.Array | None:
    """Custom call ``jgg_moe_combine``: rows, order, place[, expert_weight] -> out, or None."""
    if not _takes("combine", platform, rows, routing, (rows.dtype,), dtype):
        return None
    out = jax.ShapeDtypeStruct((routing.place.shape[0], rows.shape[1]), dtype)
    return _rows_call("jgg_moe_combine", out, rows, routing=routing, weight=weight)


def combine_backward(platform: str, ct, rows, routing, weight) -> list[jax.Array] | None:
    """Custom call ``jgg_moe_combine_backward``: ct, rows, order, place, expert_weight -> the
    cotangents of rows and, in float32, of the weights; or None."""
    dtypes = rows.dtype, ct.dtype
    if not _takes("combine_backward", platform, rows, routing, dtypes, rows.dtype):
        return None
    results = [
        jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        jax.ShapeDtypeStruct(weight.shape, jnp.float32),
    ]
    return _rows_call("jgg_moe_combine_backward", results, ct, rows, routing=routing, weight=weight)


def _rows_call(target: str, results, *operands, routing, weight, **attributes):
    weights = [] if weight is None else [weight.astype(jnp.float32)]
    call = jax.ffi.ffi_call(target, results)
    return call(*operands, routing.order, routing.place, *weights, **attributes)


def _takes(op: str, platform: str, rows, routing, dtypes, out_dtype, **facts) -> bool:
    return _chosen(
        op, platform, dtypes=tuple(dtype.name for dtype in dtypes),
        out_dtype=jnp.dtype(out_dtype).name, pairs=routing.place.size, d=rows.shape[1],
        empty=0 in (rows.size, routing.order.size, routing.place.size), **facts,
    )  # fmt: skip


def _chosen(op: str, platform: str, **facts) -> bool:
    return choose.choose(problems.Moe(op=op, platform=platform, **facts)) is not None
