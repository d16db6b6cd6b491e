"""What every operation means, in float64 numpy, one row or segment at a time."""

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_groupgemm as jgg


def assert_raises(call, kind, message: str) -> None:
    """This very message, not one that has it somewhere."""
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def zeros_of(f, *args, **options):
    """Zeros of the shapes and dtypes that ``f`` returns: nothing is compiled."""
    shapes = jax.eval_shape(lambda: f(*args, **options))
    return jax.tree.map(lambda a: jax.numpy.asarray(np.zeros(a.shape, a.dtype)), shapes)


def f64(a) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


def bounds(sizes, rows) -> list[tuple[int, int]]:
    """Row ranges of consecutive groups: negative sizes are 0, the last row is the limit."""
    start, out = 0, []
    for size in np.asarray(sizes).tolist():
        end = min(start + max(int(size), 0), rows)
        out.append((start, end))
        start = end
    return out


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


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def codes(q: jgg.Quantized) -> np.ndarray:
    """Codes of a bit stream, one bit at a time; of fp8, bytes."""
    if q.mode == "fp8":
        return np.asarray(q.weight).view(np.uint8)
    stream = np.unpackbits(np.asarray(q.weight).view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(*q.shape, q.bits) @ (1 << np.arange(q.bits))


def dequantize(q: jgg.Quantized, dtype="float32") -> np.ndarray:
    """The values, rounded once to ``dtype``, without a global scale."""
    scales = np.asarray(q.scales)
    if q.mode == "fp8":
        assert q.block is not None
        scales = scales.repeat(q.block[0], -2)[..., : q.shape[-2], :]
    scales = np.repeat(scales, q.group_size, -1)[..., : q.shape[-1]]
    if q.mode == "fp8":
        values = E4M3[codes(q)].astype(np.float32) * scales
    elif q.mode == "affine":
        f32 = lambda a: np.asarray(a).astype(np.float32)
        biases = np.repeat(f32(q.biases), q.group_size, -1)
        values = f32(codes(q)) * f32(scales) + biases
    else:
        element = (E4M3 if q.mode == "mxfp8" else E2M1)[codes(q)]
        e8m0 = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
        values = element * (E4M3[scales & 0x7F] if q.mode == "nvfp4" else e8m0)
    with np.errstate(all="ignore"):
        return f64(values.astype(jax.numpy.dtype(dtype)))


def scaled(q: jgg.Quantized, dtype) -> np.ndarray:
    """What products multiply with: the values, rounded once to ``dtype``, times a global scale."""
    w = dequantize(q, dtype)
    scale = f64(1 if q.global_scale is None else q.global_scale)
    return w * scale.reshape(scale.shape + (1,) * (w.ndim - scale.ndim))


def grouped_qmm(x, q, sizes, *, offset=None, transpose_w=True) -> np.ndarray:
    return grouped_mm(x, scaled(q, x.dtype), sizes, offset=offset, transpose_w=transpose_w)


def random_quantized(rng, shape, mode, bits=None, group_size=None, dtype="float32", scale=None):
    """Random codes and scales, none of them NaN; values of order one. Blocks of fp8 have 128 rows,
    and its scales are bfloat16 numbers, which kernels decode exactly."""
    if mode == "fp8":
        return _random_fp8(rng, shape, group_size or 128)
    bits = bits or {"affine": 4, "mxfp8": 8}.get(mode, 4)
    group_size = group_size or {"affine": 64, "nvfp4": 16}.get(mode, 32)
    *lead, k = shape
    weight = rng.integers(0, 2**32, (*lead, k * bits // 32), np.uint32)
    groups, biases = (*lead, k // group_size), None
    if mode == "affine":
        scales = rng.standard_normal(groups) / 2**bits
        round_to = lambda a: a.astype(np.float32).astype(jax.numpy.dtype(dtype))
        biases = jax.numpy.asarray(round_to(rng.standard_normal(groups)))
        scales = round_to(scales)
    elif mode == "nvfp4":
        scales = rng.integers(0x20, 0x38, groups, np.uint8)
    else:
        scales = rng.integers(120, 128, groups, np.uint8) - np.uint8(7 if mode == "mxfp8" else 2)
    if mode == "mxfp8":  # neither of the NaN codes
        weight &= ~np.uint32(0x01010101)
    return jgg.Quantized(
        *map(jax.numpy.asarray, (weight, scales)), biases, scale,
        mode=mode, bits=bits, group_size=group_size,
    )  # fmt: skip


def _random_fp8(rng, shape, columns: int) -> jgg.Quantized:
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[codes % 128 == 127] -= 1
    *lead, n, k = shape
    scales = rng.uniform(1, 4, (*lead, -(-n // 128), -(-k // columns))) / 256
    scales = scales.astype(ml_dtypes.bfloat16).astype(np.float32)
    return jgg.Quantized(
        *map(jax.numpy.asarray, (codes, scales)), mode="fp8", bits=8, group_size=columns,
        block=(128, columns),
    )  # fmt: skip


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
