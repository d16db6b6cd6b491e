"""The meaning of every operation in float64 numpy, one row or segment at a time.

``python -m jax_groupgemm.check`` has the meaning of codes and scales, and these tests take it from
there.
"""

import dataclasses

import jax
import numpy as np
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._check import quantized
from jax_groupgemm._check.oracle import E2M1 as E2M1
from jax_groupgemm._check.oracle import E4M3 as E4M3
from jax_groupgemm._check.oracle import bounds, decoded, f64, padded, rounded
from jax_groupgemm._check.oracle import codes as codes


def assert_raises(call, kind, message: str) -> None:
    """This very message, not one that has it somewhere."""
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def zeros_of(f, *args, **options):
    """Zeros of the shapes and dtypes that ``f`` returns: nothing is compiled."""
    shapes = jax.eval_shape(lambda: f(*args, **options))
    return jax.tree.map(lambda a: jax.numpy.asarray(np.zeros(a.shape, a.dtype)), shapes)


def pad_groups(x, sizes, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows, each group's at a multiple of ``unit``, as many as any sizes need; and where they went,
    -1 of rows of no group."""
    positions, count = padded(np.asarray(sizes), len(x), unit)
    out, there = np.zeros((count, *x.shape[1:]), x.dtype), positions >= 0
    out[positions[there]] = x[there]
    return out, positions


def local_bounds(sizes, rows, groups, offset=None) -> list[tuple[int, int]]:
    """Row ranges of the groups ``[offset, offset + groups)``, empty ones of those not in sizes."""
    ranges = bounds(sizes, rows)
    first = 0 if offset is None else int(np.asarray(offset).reshape(()))
    here = range(first, first + groups)
    return [ranges[i] if 0 <= i < len(ranges) else (0, 0) for i in here]


def grouped_mm(x, w, sizes, *, offset=None, transpose_w=False) -> np.ndarray:
    x, w = f64(x), f64(w)
    w = w.swapaxes(1, 2) if transpose_w else w
    out = np.zeros((x.shape[0], w.shape[2]))
    for g, (start, end) in enumerate(local_bounds(sizes, len(x), len(w), offset)):
        out[start:end] = x[start:end] @ w[g]
    return out


def grouped_mm_grads(x, w, sizes, ct) -> tuple[np.ndarray, np.ndarray]:
    x, w, ct = f64(x), f64(w), f64(ct)
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for g, (start, end) in enumerate(bounds(sizes, x.shape[0])):
        dx[start:end] = ct[start:end] @ w[g].T
        dw[g] = x[start:end].T @ ct[start:end]
    return dx, dw


def clamp(segments, k) -> list[tuple[int, int]]:
    clamped = [tuple(min(max(int(v), 0), k) for v in s) for s in np.asarray(segments).tolist()]
    return [(s, max(s, e)) for s, e in clamped]


def segmented_mm(a, b, segments) -> np.ndarray:
    a, b, segments = f64(a), f64(b), np.asarray(segments)
    flat = segments.reshape(-1, 2)
    out = np.zeros((len(flat), a.shape[0], b.shape[1]))
    for i, (start, end) in enumerate(clamp(flat, a.shape[1])):
        out[i] = a[:, start:end] @ b[start:end]
    return out.reshape(*segments.shape[:-1], a.shape[0], b.shape[1])


def segmented_mm_grads(a, b, segments, ct) -> tuple[np.ndarray, np.ndarray]:
    a, b = f64(a), f64(b)
    flat = np.asarray(segments).reshape(-1, 2)
    ct = f64(ct).reshape(len(flat), a.shape[0], b.shape[1])
    da, db = np.zeros_like(a), np.zeros_like(b)
    for g, (start, end) in zip(ct, clamp(flat, a.shape[1]), strict=True):
        da[:, start:end] += g @ b[start:end].T
        db[start:end] += a[:, start:end].T @ g
    return da, db


def gather_mm(a, b, lhs=None, rhs=None) -> np.ndarray:
    a, b = f64(a), f64(b)
    lhs = np.arange(np.prod(a.shape[:-2], dtype=int)).reshape(a.shape[:-2]) if lhs is None else lhs
    rhs = np.arange(np.prod(b.shape[:-2], dtype=int)).reshape(b.shape[:-2]) if rhs is None else rhs
    lhs, rhs = np.broadcast_arrays(np.asarray(lhs), np.asarray(rhs))
    x, w = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    out = np.zeros((lhs.size, a.shape[-2], b.shape[-1]))
    for i, (p, q) in enumerate(zip(lhs.ravel().tolist(), rhs.ravel().tolist(), strict=True)):
        if 0 <= p < len(x) and 0 <= q < len(w):
            out[i] = x[p] @ w[q]
    return out.reshape(*lhs.shape, *out.shape[1:])


def host_random(rng, shape, dtype) -> np.ndarray:
    """Made on the host: nothing has to be compiled for casts and transposes of it."""
    return rng.standard_normal(shape, np.float32).astype(jax.numpy.dtype(dtype))


def dequantize(q: jgg.Quantized, dtype="float32") -> np.ndarray:
    """The values, rounded once to ``dtype``, without a global scale."""
    return rounded(decoded(q), dtype)


def scaled(q: jgg.Quantized, dtype) -> np.ndarray:
    """What products multiply with: the values, rounded once to ``dtype``, times a global scale."""
    return quantized.values(q, dtype)[0]


def grouped_qmm(x, q, sizes, *, offset=None, transpose_w=True) -> np.ndarray:
    return grouped_mm(x, scaled(q, x.dtype), sizes, offset=offset, transpose_w=transpose_w)


def random_quantized(rng, shape, mode, bits=None, group_size=None, dtype="float32", scale=None):
    """Random codes and scales, none of them NaN; values of order one."""
    q = quantized.random(rng, shape, mode, bits, group_size, dtype)
    return dataclasses.replace(jax.tree.map(jax.numpy.asarray, q), global_scale=scale)


# Relative Frobenius error allowed per dtype of the result: its own rounding, or float32 sums.
TOLERANCE = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-3, "bfloat16": 6e-3}


def error(got, want) -> float:
    got, want = f64(got), f64(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    scale = np.linalg.norm(want)
    distance = np.linalg.norm(got - want)
    return float(distance / scale) if scale else float(distance)


def assert_close(got, want, *, k: int = 1, tolerance: float | None = None) -> None:
    """``k`` is the contracted length: float32 sums may err as sqrt(k / 512) beyond 512."""
    if tolerance is None:
        tolerance = TOLERANCE[np.asarray(got).dtype.name] * max(1.0, (k / 512) ** 0.5)
    assert error(got, want) <= tolerance, (error(got, want), tolerance)


def assert_close_but_nan(got, want, tolerance: float) -> None:
    """NaN where it should be, and close elsewhere."""
    got, want = f64(got), f64(want)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    assert_close(np.where(nan, 0, got), np.where(nan, 0, want), tolerance=tolerance)


def assert_trees_close(got, want, tolerance: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, tolerance=tolerance)


def assert_leaves_equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def random(rng, shape, dtype="float32") -> jax.Array:
    """Rounded on the host, where no shape has to be compiled for."""
    values = np.asarray(rng.standard_normal(shape))
    if dtype != "float64":
        values = values.astype(np.float32)
    return jax.numpy.asarray(values.astype(jax.numpy.dtype(dtype)))


def random_sizes(rng, groups, rows, *, empty=0.3) -> np.ndarray:
    """Sizes with sum <= rows: some empty, some tail left over."""
    share = rng.random(groups) * (rng.random(groups) >= empty)
    share = share / max(share.sum(), 1e-9) * rng.uniform(0.6, 1.0)
    return np.floor(share * rows).astype(np.int32)
