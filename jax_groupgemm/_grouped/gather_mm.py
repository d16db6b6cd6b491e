"""``gather_mm``: a batch of products whose operands are named by index."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from .._core import check, dtypes, partition, segments
from .._core.operations import operation
from .._core.products import Caller, Mm
from .._core.segments import Form, Metadata
from .._core.types import Implementation, Integers
from .._kernels import choose, dense
from . import fused

#: What axes are called here, for messages: rows of a, and of the result, and matrices.
AXES = {"u": "(A..., M)", "t": "(..., M)", "g": "(B...)"}


@operation
def gather_mm(
    a: ArrayLike,
    b: ArrayLike,
    lhs_indices: Integers | None = None,
    rhs_indices: Integers | None = None,
    *,
    sorted_indices: bool = False,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``out[i] = a[lhs_indices[i]] @ b[rhs_indices[i]]``; **the batch of b is grouped**.

    Indices are flat over the batch axes of their operand; a missing one is ``arange`` in that
    batch shape. Only the two index arrays broadcast against each other. An index outside its
    range gives zeros and contributes to no gradient.

    Args:
      a: ``(A..., M, K)``.
      b: ``(B..., K, N)``.
      lhs_indices: integers, into the flattened ``A...``.
      rhs_indices: integers, into the flattened ``B...``.
      sorted_indices: a promise that ``rhs_indices``, as given, are in ascending order: a speed
        hint that changes no value. A broken promise is detected on the device, and the result
        (and gradients) are NaN.
      precision, preferred_element_type, implementation: as in :func:`grouped_mm`.

    Returns:
      ``broadcast(lhs_indices, rhs_indices).shape + (M, N)``.

    Raises:
      ValueError: shapes do not fit, or ``implementation`` is unknown or cannot run.
      TypeError: indices are not integers, or the dtypes cannot be multiplied.

    Differentiable to any order in ``a`` and ``b``, closed under ``vmap`` over any operand. The
    operation of MLX's ``gather_mm``. For the tokens of a mixture of experts, call
    ``gather_mm(x[:, None], w, token_of_pair, expert_of_pair)[:, 0]``.

    Examples:
      >>> a, b = jnp.ones((3, 1, 8)), jnp.stack([jnp.full((8, 2), g) for g in (1.0, 2.0)])
      >>> y = jgg.gather_mm(a, b, jnp.array([0, 2]), jnp.array([1, 0]))  # a[0] @ b[1], a[2] @ b[0]
      >>> y.shape, y[:, 0, 0].tolist()
      ((2, 1, 2), [16.0, 8.0])
    """
    op = "gather_mm"
    a, b = (check.array(op, n, v) for n, v in (("a", a), ("b", b)))
    for name, value, letters in (("a", a, "(A..., M, K)"), ("b", b, "(B..., K, N)")):
        check.numeric(op, name, value)
        if value.ndim < 2:
            raise ValueError(f"jgg.{op}: {name} has shape {value.shape}, expected {letters}")
    k = a.shape[-1]
    if b.shape[-2] != k:
        raise ValueError(
            f"jgg.{op}: b has shape {b.shape}, expected (B..., K, N) with K = {k} because a is "
            f"{a.shape}"
        )
    check.implementation(op, implementation)
    check.flag(op, "sorted_indices", sorted_indices)
    dtype = check.result_dtype(op, preferred_element_type, a=a, b=b)
    precision = check.precision(op, precision, a, b)
    a, b = check.multiplied(a, b)
    batch, n = b.shape[:-2], b.shape[-1]
    w = partition.merge(b, (len(batch), 1, 1))
    product = Mm(
        rows=0, out_dtype=dtypes.computed(dtype), precision=precision,
        implementation=implementation, caller=Caller(op, ("a", "b"), AXES),
    )  # fmt: skip
    # A dtype without NaN cannot say that the promise was broken.
    sorted_indices = sorted_indices and dtypes.has_nan(dtype)
    out = gathered(
        op, "a", a, w, (*batch, n), lhs_indices, rhs_indices, sorted_indices, product, fused.MM,
        kind="mm",
    )  # fmt: skip
    return out.astype(dtype)


def gathered(op, name, a, w, batch_n, lhs_indices, rhs_indices, sorted_indices, product: Mm,
             of: fused.Fused, *, kind: str):  # fmt: skip
    """``out[i] = a[lhs_indices[i]] @ w[rhs_indices[i]]``, for weights of shape (B..., K, N) with
    (B..., N) = ``batch_n``, which are flat here: (B, K, N).

    Where it pays for a product of this ``kind`` ("mm" or "qmm"), pairs are sorted by weight first.
    ``product`` has no rows yet.
    """
    *batch_w, n = batch_n
    m = a.shape[-2]
    lhs = indices(op, "lhs_indices", lhs_indices, a.shape[:-2])
    rhs = indices(op, "rhs_indices", rhs_indices, tuple(batch_w))
    try:
        batch = jnp.broadcast_shapes(lhs.shape, rhs.shape)
    except ValueError as error:
        raise ValueError(
            f"jgg.{op}: lhs_indices {lhs.shape} and rhs_indices {rhs.shape} do not broadcast"
        ) from error
    matrices, pairs = math.prod(batch_w), math.prod(batch)
    check.rows(op, "the result", pairs * m)
    check.rows(op, name, math.prod(a.shape[:-1]))
    in_order = rhs_indices is None or sorted_indices
    ordered = in_order and rhs.shape == batch
    if 0 in (pairs, matrices, n, *a.shape):
        out = jnp.zeros((*batch, m, n), product.out_dtype)
        return _kept(out, rhs) if sorted_indices and rhs_indices is not None else out
    x = partition.merge(a, (a.ndim - 2, 1, 1))
    lhs, rhs_flat = (jnp.broadcast_to(i, batch).reshape(-1) for i in (lhs, rhs))
    if mapped := partition.maps_explicit_axes():
        # JAX maps no selection by a condition of a mesh from numbers of none.
        lhs, rhs_flat = lhs + 0 * rhs_flat, rhs_flat + 0 * lhs
    product = product.replace(rows=pairs * m)
    # JAX refuses to gather from an axis that is explicitly sharded, or by indices of such an axis
    # that is mapped; segments need no gather.
    sharded = mapped or jax.typeof(x).sharding.spec[:1] not in ((), (None,))
    if dense.sorting_pays(kind, pairs, m) and not sharded:
        out = _by_matrix(x, w, lhs, rhs_flat, product, of, ordered=ordered)
    else:
        out = _as_given(x, w, lhs, rhs_flat, product, of)
    if sorted_indices and rhs_indices is not None:
        out = _kept(out, rhs)
    return partition.split(out, (batch, (m,), (n,)))


def _kept(out, rhs):
    """``out``, or NaN where ``rhs`` do not ascend."""
    if rhs.size < 2:
        return out
    given = rhs.reshape(-1)
    kept = jnp.all(given[1:] >= given[:-1])
    # A product and not a selection, so that gradients are NaN too.
    factor = dtypes.one_or_nan(kept)
    return out * factor.astype(out.dtype)


def _as_given(x, w, lhs, rhs, product: Mm, of: fused.Fused):
    """One segment per product: no operand is gathered, no index sorted."""
    count, m, _ = x.shape
    pairs = lhs.shape[0]
    valid = (lhs >= 0) & (lhs < count)
    table = segments.table(
        jnp.where(valid, lhs, -1).astype(jnp.int32) * m,
        lax.iota(jnp.int32, pairs) * m,
        jnp.full((pairs,), m, jnp.int32),
        rhs,
        rows_x=count * m,
        rows_y=pairs * m,
        groups=w.shape[0],
    )
    metadata = Metadata(Form("segments", ordered_y=True, aligned=False), table)
    out = of(partition.merge(x, (2, 1)), w, metadata, product)
    return partition.split(out, ((pairs, m), (out.shape[1],)))


def _by_matrix(x, w, lhs, rhs, product: Mm, of: fused.Fused, *, ordered: bool):
    """Rows sorted by matrix, one group each; each matrix is read once for all its products. Indices
    are left to the kernel where one may take them."""
    (count, m, _), matrices = x.shape, w.shape[0]
    valid = (lhs >= 0) & (lhs < count) & (rhs >= 0) & (rhs < matrices)
    lhs = jnp.where(valid, lhs, -1)
    rhs = jnp.clip(rhs, -1, matrices)
    order = place = None
    if not ordered:
        order, place = fused.order(rhs)
        lhs = lhs[order]
    # Sentinels sort to both ends and have no matrix: group 0 holds the negative ones.
    metadata = segments.sizes(counts(rhs, matrices) * m, jnp.int32(1))
    lists = fused.Lists(lhs, order, place)
    return of(x, w, metadata, product, lists=lists, fused=of.takes_lists(x, w, product))


def counts(rhs, matrices: int) -> jax.Array:
    """How many indices, from -1 to ``matrices``, are -1, 0, 1, ...: (matrices + 1,)."""
    if (
        rhs.size * matrices <= choose.COMPARE_UP_TO**2
    ):  # a sum is less than the launches of a scatter
        group = lax.iota(jnp.int32, matrices + 1) - 1
        return (rhs[None] == group[:, None]).sum(1, dtype=jnp.int32)
    return jnp.zeros((matrices + 2,), jnp.int32).at[rhs + 1].add(1)[:-1]


def indices(op: str, name: str, indices, batch) -> jax.Array:
    count = math.prod(batch)
    if indices is None:
        return lax.iota(jnp.int32, count).reshape(batch)
    indices = partition.replicated(check.integers(op, name, indices))
    if jnp.iinfo(indices.dtype).bits > 32 or jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        # Clamp before narrowing: an index that is too large must stay out of range.
        low = -1 if jnp.issubdtype(indices.dtype, jnp.signedinteger) else None
        high = count if jnp.iinfo(indices.dtype).max > count else None
        indices = jnp.clip(indices, low, high)
    return indices.astype(jnp.int32)
