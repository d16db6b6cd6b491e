"""Products of two operands in FP8 or NVFP4, and their weight gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from .._fp8.grouped_mm import fp8_grouped_mm
from .._fp8.grouped_wgrad import fp8_grouped_wgrad
from .._nvfp4.grouped_mm import nvfp4_grouped_mm
from .._nvfp4.grouped_wgrad import nvfp4_grouped_wgrad
from .._quantized.array import Quantized
from . import oracle, sizes
from .line import Line, Run, Trial
from .oracle import E4M3
from .products import FLOATS, G, K, N, T, label
from .quantized import random

_E4M3 = ml_dtypes.float8_e4m3fn
# Tensor cores add products of FP8 with fewer digits: each of 32 may lose 2^-13 of the largest. That
# is 2^-8 where one is all of the sum (1.3e-3 was seen on an H200). Nobody has measured Blackwell's
# sums of NVFP4.
_FP8_ERROR, _NVFP4_ERROR = 2.0**-8, 1e-4
# T, G, N, K.
_SHAPES = (
    (70, 4, 128, 256), (300, 3, 384, 128), (33, 5, 64, 128), (1000, 8, 256, 512),
    (130, 2, 200, 384), (2048, 4, 512, 1024), (9, 8, 128, 640),
)  # fmt: skip


def lines() -> list[Line]:
    found = []
    for dtype in FLOATS:
        found += [
            Line("fp8_grouped_mm", dtype, _bound(_fp8_mm, dtype), _timed_fp8(dtype)),
            Line("nvfp4_grouped_mm", dtype, _bound(_nvfp4_mm, dtype), _timed_nvfp4(dtype)),
        ]
    return [
        *found,
        Line("fp8_grouped_mm fast", "bfloat16", _fp8_fast),
        Line("fp8_grouped_wgrad", "float32", _fp8_wgrad),
        Line("fp8_grouped_wgrad fast", "float32", _fp8_fast_wgrad),
        Line("nvfp4_grouped_wgrad", "float32", _nvfp4_wgrad),
    ]


def _bound(function, dtype: str):
    return lambda rng, quick: function(dtype, rng, quick)


def _shapes(quick: bool):
    return _SHAPES[: 2 if quick else None]


def fp8_rows(rng, rows: int, k: int) -> Quantized:
    """Rows in blocks of 128."""
    codes = rng.integers(0, 256, (rows, k)).astype(np.uint8)
    codes[codes % 128 == 127] -= 1
    scales = rng.uniform(1, 4, (rows, -(-k // 128))).astype(np.float32) / 256
    return Quantized(codes.view(_E4M3), scales, mode="fp8", bits=8, group_size=128, block=(1, 128))


def _fp8_mm(dtype, rng, quick) -> Iterator[Trial]:
    for rows, groups, n, k in _shapes(quick):
        x, w, runs = fp8_rows(rng, rows, k), random(rng, (groups, n, k), "fp8"), []
        for name, s in sizes.variants(rng, rows, groups, quick):
            given = x
            if name == sizes.NAN:
                given = dataclasses.replace(x, scales=sizes.with_nan(x.scales, s))
            want = lambda x=given, w=w, s=s, k=k: [[
                oracle.grouped_mm(_wide(x), _wide(w), s, transpose_w=True).want(
                    dtype, k, _FP8_ERROR
                )
            ]]  # fmt: skip
            runs.append(Run(name, (given, w, s), want))
        function = functools.partial(fp8_grouped_mm, preferred_element_type=dtype)
        yield Trial(label(rows, groups, k, n), function, runs)


def _of_one_scale(q: Quantized) -> Quantized:
    """The same codes with a scale for each matrix."""
    return dataclasses.replace(q, scales=q.scales[..., 0, 0], block=None, group_size=None)


def _fp8_fast(rng, quick) -> Iterator[Trial]:
    """NaN is not among the cases: it would be the scale of all rows."""
    function = functools.partial(fp8_grouped_mm, accumulate="fast")
    for rows, groups, n, k in _shapes(quick):
        x, w = fp8_rows(rng, rows, k), random(rng, (groups, n, k), "fp8")
        (x, w), runs = map(_of_one_scale, (x, w)), []
        for name, s in sizes.variants(rng, rows, groups, quick):
            if name == sizes.NAN:
                continue
            want = lambda x=x, w=w, s=s, k=k: [[
                oracle.grouped_mm(_wide(x), _wide(w), s, transpose_w=True).want(
                    "bfloat16", k, _FP8_ERROR
                )
            ]]  # fmt: skip
            runs.append(Run(name, (x, w, s), want))
        yield Trial(label(rows, groups, k, n), function, runs)


def _wide(q: Quantized) -> np.ndarray:
    """Values of fp8, of which scales are float32 numbers of any kind, in float64."""
    if q.block is None:
        return E4M3[oracle.codes(q)] * oracle.f64(q.scales)[..., None, None]
    scales = oracle.f64(q.scales).repeat(q.block[0], -2).repeat(q.block[1], -1)
    codes = E4M3[oracle.codes(q)]
    return codes * scales[..., : codes.shape[-2], : codes.shape[-1]]


def _nvfp4_mm(dtype, rng, quick) -> Iterator[Trial]:
    for rows, groups, n, k in _shapes(quick):
        x = random(rng, (rows, k), "nvfp4", global_scale=np.float32(0.75))
        factor = rng.uniform(0.5, 2, groups).astype(np.float32)
        w, runs = random(rng, (groups, n, k), "nvfp4", global_scale=factor), []
        for name, s in sizes.variants(rng, rows, groups, quick):
            given = x
            if name == sizes.NAN:
                given = dataclasses.replace(x, scales=_nan_scales(x.scales, s))
            want = lambda x=given, w=w, s=s, k=k, f=factor: [[
                oracle.grouped_mm(
                    0.75 * oracle.decoded(x), oracle.decoded(w) * oracle.f64(f)[:, None, None], s,
                    transpose_w=True,
                ).want(dtype, k, _NVFP4_ERROR)
            ]]  # fmt: skip
            runs.append(Run(name, (given, w, s), want))
        function = functools.partial(nvfp4_grouped_mm, preferred_element_type=dtype)
        yield Trial(label(rows, groups, k, n), function, runs)


def _nan_scales(scales: np.ndarray, s: np.ndarray) -> np.ndarray:
    spoiled = scales.copy()
    spoiled[: min(max(int(s[0]), 0), 1)] = 0x7F
    spoiled[max(int(s.sum()), 0) :] = 0x7F
    return spoiled


# ---- weight gradients: T is contracted, each group padded ----------------------------------------


def padded(s: np.ndarray, rows: int, unit: int) -> tuple[np.ndarray, int]:
    """The padded row of each row, -1 of rows of no group, and how many padded rows there can be."""
    positions, start = np.full(rows, -1, np.int32), 0
    for first, last in oracle.bounds(s, rows):
        positions[first:last] = start + np.arange(last - first)
        start += -(-(last - first) // unit) * unit
    return positions, (rows + (unit - 1) * min(len(s), rows)) // unit * unit


def _along_rows(rng, mode: str, columns: int, s, rows: int) -> Quantized:
    """Random codes of ``(rows, columns)`` in blocks along grouped rows; zeros are padded."""
    positions, length = padded(s, rows, 64 if mode == "nvfp4" else 128)
    rest = np.setdiff1d(np.arange(length), positions)
    if mode == "fp8":
        q = fp8_rows(rng, columns, length)
        codes = np.array(q.weight).view(np.uint8)
        codes[:, rest] = 0
        weight, factor = codes.view(_E4M3), None
    else:
        q = random(rng, (columns, length), mode)
        codes = oracle.codes(q).astype(np.uint8)
        codes[:, rest] = 0
        weight = np.ascontiguousarray(codes[:, ::2] | codes[:, 1::2] << 4).view(np.uint32)
        factor = np.float32(1.25)
    return dataclasses.replace(
        q, weight=weight, global_scale=factor, positions=positions, axis=-2, layout="grouped"
    )


def _fp8_wgrad(rng, quick) -> Iterator[Trial]:
    yield from _wgrad(rng, quick, "fp8", fp8_grouped_wgrad, _FP8_ERROR)


def _fp8_fast_wgrad(rng, quick) -> Iterator[Trial]:
    function = functools.partial(fp8_grouped_wgrad, accumulate="fast")
    yield from _wgrad(rng, quick, "fp8", function, _FP8_ERROR, _of_one_scale)


def _nvfp4_wgrad(rng, quick) -> Iterator[Trial]:
    yield from _wgrad(rng, quick, "nvfp4", nvfp4_grouped_wgrad, _NVFP4_ERROR)


def _wgrad(rng, quick, mode, function, least, of=lambda q: q) -> Iterator[Trial]:
    for rows, groups, n, k in _shapes(quick):
        runs = []
        for name, s in sizes.variants(rng, rows, groups, quick):
            if name == sizes.NAN:
                continue
            x, dy = (of(_along_rows(rng, mode, columns, s, rows)) for columns in (k, n))
            want = lambda x=x, dy=dy, s=s, r=rows: [
                [oracle.grouped_wgrad(_rows(dy), _rows(x), s).want("float32", r, least)]
            ]
            runs.append(Run(name, (x, dy, s), want))
        yield Trial(label(rows, groups, k, n), function, runs)


def _rows(q: Quantized) -> np.ndarray:
    """The rows that an operand stands for."""
    if q.mode == "nvfp4":
        return oracle.rows_of(q)
    positions = np.asarray(q.positions)
    return np.where(positions[:, None] >= 0, _wide(q).T[positions], 0.0)


# ---- what is timed -----------------------------------------------------------------------------


def _timed_fp8(dtype):
    def timed(rng):
        x, w = fp8_rows(rng, T, K), random(rng, (G, N, K), "fp8")
        f = functools.partial(fp8_grouped_mm, preferred_element_type=dtype)
        return f, (x, w, np.full(G, T // G, np.int32))

    return timed


def _timed_nvfp4(dtype):
    def timed(rng):
        one = np.float32(1)
        x = random(rng, (T, K), "nvfp4", global_scale=one)
        w = random(rng, (G, N, K), "nvfp4", global_scale=np.ones(G, np.float32))
        f = functools.partial(nvfp4_grouped_mm, preferred_element_type=dtype)
        return f, (x, w, np.full(G, T // G, np.int32))

    return timed
