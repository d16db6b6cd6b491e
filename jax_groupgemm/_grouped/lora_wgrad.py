"""Gradients of the factors of ``lora_mm``: for each pair two sums over its rows, of low rank."""

from __future__ import annotations

import jax
import numpy as np

from .._core import partition, segments
from .._core.composed import Composed
from .._core.costs import Cost
from .._core.products import Wgrad
from .._kernels import choose, problems
from . import fused, primitives
from .gather_mm import counts


def lora_wgrad(dh, x, ct, h, pair, product: Wgrad):
    """``da[p] = sum dh[t]^T x[t]`` (R, K) and ``db[p] = sum ct[t]^T h[t]`` (N, R) over rows t whose
    ``pair`` is p. ``product.groups`` is how many pairs there are; -1 is none of them."""
    return _GRADS(dh, x, ct, h, pair, product=product)


def _composed(dh, x, ct, h, pair, *, product: Wgrad):
    order, _ = fused.order(pair)
    # Sentinels sort to the front: group 0 holds them, and has no matrix.
    metadata = segments.sizes(counts(pair, product.groups), np.int32(1))
    dh, x, ct, h = (partition.take(rows, order) for rows in (dh, x, ct, h))
    run = lambda left, right: primitives.wgrad(left, right, metadata, product)
    return run(dh, x), run(ct, h)


def _call(platform: str, dh, x, ct, h, pair, *, product: Wgrad):
    """Custom call ``jgg_lora_wgrad``: dh, x, ct, h, pair, row -> da, db, where rows of pairs begin;
    None where no kernel takes it. Pairs ascend, and row i of them is row ``row[i]``."""
    if product.implementation not in (None, "sm80"):
        return None
    (rows, k), n, rank, pairs = x.shape, ct.shape[1], h.shape[1], product.groups
    problem = problems.Lora(
        op="lora_wgrad", platform=platform, dtypes=tuple(v.dtype.name for v in (dh, x, ct, h)),
        out_dtype=product.out_dtype.name, rows=rows, pairs=pairs, rank=rank, k=k, n=n,
    )  # fmt: skip
    if choose.choose(problem) is None:
        return None
    order = fused.order(pair)[0].astype(np.int32)
    shapes = [(pairs, rank, k), (pairs, n, rank)]
    results = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes]
    results.append(jax.ShapeDtypeStruct((pairs + 1,), np.int32))
    da, db, _ = jax.ffi.ffi_call("jgg_lora_wgrad", results)(dh, x, ct, h, pair[order], order)
    return da, db


def _cost(operands, values, outs, *, product: Wgrad) -> Cost:
    *sides, pair = operands
    rows = pair.size
    if values[4] is not None:
        with jax.ensure_compile_time_eval():
            known = np.asarray(values[4]())
        rows = int((known >= 0).sum())
    dh, x, ct, h = (v.shape[1] for v in sides)
    read = rows * (dh + x + ct + h) * sides[1].dtype.itemsize + pair.size * pair.dtype.itemsize
    written = sum(out.size * out.dtype.itemsize for out in outs)
    return Cost(2 * rows * (dh * x + ct * h), read + written)


_GRADS = Composed("jgg_lora_wgrad", _composed, _call, cost=_cost)
