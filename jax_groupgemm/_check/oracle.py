"""The operations in float64 numpy. No code of theirs is used here.

Tests take from here what codes and scales mean, and where rows of groups are. Their products are
written apart from these.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from .line import Want

# Half of a result's last digit.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_TINY = {"float32": 1e-37, "float16": 6e-8, "bfloat16": 1e-37}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def f64(a) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


def normal(rng: np.random.Generator, shape, dtype: str) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


class Sums(NamedTuple):
    """Sums of products, and of their magnitudes."""

    value: np.ndarray
    size: np.ndarray

    @classmethod
    def of(cls, a, b) -> Sums:
        with np.errstate(all="ignore"):
            return cls(a @ b, np.abs(a) @ np.abs(b))

    def want(self, dtype: str, terms: int, least: float = 2e-5) -> Want:
        """As a result of a dtype, of sums of so many terms: docs/semantics.md, "Errors of long
        sums"."""
        allowed = 1.02 * ROUNDING[dtype] * np.abs(self.value) + _TINY[dtype]
        allowed = allowed + (least + 1e-8 * terms) * self.size
        largest = np.abs(self.size[np.isfinite(self.size)]).max(initial=0.0)
        return Want(self.value, allowed, np.where(self.size > 0, self.size, largest or 1.0))

    def times(self, factor) -> Sums:
        with np.errstate(all="ignore"):
            return Sums(self.value * factor, self.size * np.abs(factor))


def bounds(sizes, rows: int) -> list[tuple[int, int]]:
    """Rows of consecutive groups: negative sizes are 0, the last row is the limit."""
    start, out = 0, []
    for size in np.asarray(sizes).tolist():
        end = min(start + max(int(size), 0), rows)
        out.append((start, end))
        start = end
    return out


def padded(sizes, rows: int, unit: int) -> tuple[np.ndarray, int]:
    """The padded row of each row, -1 of rows of no group, and how many padded rows there can be."""
    positions, start = np.full(rows, -1, np.int32), 0
    for first, last in bounds(sizes, rows):
        positions[first:last] = start + np.arange(last - first)
        start += -(-(last - first) // unit) * unit
    return positions, (rows + (unit - 1) * min(len(sizes), rows)) // unit * unit


def grouped_mm(x, w, sizes, *, transpose_w: bool = False) -> Sums:
    """``x[t] @ w[group(t)]``, zeros behind the last group."""
    x, w = f64(x), f64(w)
    w = w.swapaxes(1, 2) if transpose_w else w
    out = Sums(*(np.zeros((len(x), w.shape[2])) for _ in "vs"))
    for g, (start, end) in enumerate(bounds(sizes, len(x))):
        part = Sums.of(x[start:end], w[g])
        out.value[start:end], out.size[start:end] = part
    return out


def grouped_wgrad(x, y, sizes) -> Sums:
    """``x[rows g].T @ y[rows g]``."""
    x, y = f64(x), f64(y)
    parts = [Sums.of(x[a:b].T, y[a:b]) for a, b in bounds(sizes, len(x))]
    return Sums(*map(np.stack, zip(*parts, strict=True)))


def segmented_mm(a, b, segments) -> Sums:
    a, b, k = f64(a), f64(b), np.asarray(a).shape[1]
    parts = []
    for start, end in np.clip(np.asarray(segments), 0, k).tolist():
        end = max(start, end)
        parts.append(Sums.of(a[:, start:end], b[start:end]))
    return Sums(*map(np.stack, zip(*parts, strict=True)))


def gather_mm(a, b, lhs, rhs) -> Sums:
    a, b, (count,) = f64(a), f64(b), np.shape(lhs)
    out = Sums(*(np.zeros((count, a.shape[1], b.shape[2])) for _ in "vs"))
    for i, (p, q) in enumerate(zip(lhs, rhs, strict=True)):
        if 0 <= p < len(a) and 0 <= q < len(b):
            out.value[i], out.size[i] = Sums.of(a[p], b[q])
    return out


# ---- activations -------------------------------------------------------------------------------


def silu(a):
    with np.errstate(all="ignore"):
        return a / (1 + np.exp(-a))


def silu_slope(a):
    with np.errstate(all="ignore"):
        s = 1 / (1 + np.exp(-a))
        return s * (1 + a * (1 - s))


# ---- quantized weights -------------------------------------------------------------------------


def codes(q) -> np.ndarray:
    """Codes of a bit stream, read one bit at a time; those of fp8 are bytes."""
    weight = np.asarray(q.weight)
    if q.mode == "fp8":
        return weight.view(np.uint8)
    *lead, words = weight.shape
    stream = np.unpackbits(weight.view(np.uint8), axis=-1, bitorder="little")
    of_codes = stream.reshape(*lead, words * 32 // q.bits, q.bits)
    return of_codes @ (1 << np.arange(q.bits))


def spread(scales: np.ndarray, shape, block: tuple[int, int] | None) -> np.ndarray:
    """The scale of each element of fp8."""
    if block is None:
        return np.broadcast_to(scales[..., None, None], shape)
    for axis, size in ((-1, block[1]), (-2, block[0])):
        scales = np.repeat(scales, size, axis).take(range(shape[axis]), axis)
    return scales


def decoded(q) -> np.ndarray:
    """The values in float64, without a global scale."""
    element, scales = codes(q), np.asarray(q.scales)
    with np.errstate(all="ignore"):
        if q.mode == "fp8":
            scales = spread(scales, element.shape, q.block)
            return f64(E4M3[element].astype(np.float32) * scales.astype(np.float32))
        scales = np.repeat(scales, q.group_size, -1)
        if q.mode == "affine":
            biases = np.repeat(np.asarray(q.biases), q.group_size, -1).astype(np.float32)
            return f64(element.astype(np.float32) * scales.astype(np.float32) + biases)
        values = (E4M3 if q.mode == "mxfp8" else E2M1)[element]
        if q.mode == "nvfp4":
            return values * E4M3[scales & 0x7F]
        return values * np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))


def rounded(a, dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        return f64(np.asarray(a).astype(np.dtype(dtype)))


def rows_of(q) -> np.ndarray:
    """The rows that an operand in layout "grouped" stands for, ``(T, columns)``."""
    values, positions = decoded(q).T, np.asarray(q.positions)
    scale = 1.0 if q.global_scale is None else f64(q.global_scale)
    return np.where(positions[:, None] >= 0, values[positions], 0.0) * scale
