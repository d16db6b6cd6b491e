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
from .quantized import fp8_codes, random

_E4M3 = ml_dtypes.float8_e4m3fn
# Tensor cores add products of FP8 with fewer digits: each of 32 may lose 2^-13 of the largest. That
# is 2^-8 where one is all of the sum (1.3e-3 was seen on an H200). Nobody has measured Blackwell's
# sums of NVFP4.
_FP8_ERROR, _NVFP4_ERROR = 2.0**-8, 1e-4
# Without promotion that comes once more for each 32 of K: up to K = 1024 another 2^-8.
_FAST_ERROR = 2 * _FP8_ERROR
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
            Line("fp8_grouped_mm fast", dtype, _bound(_fp8_fast, dtype)),
            Line("nvfp4_grouped_mm", dtype, _bound(_nvfp4_mm, dtype), _timed_nvfp4(dtype)),
        ]
    return [
        *found,
        Line("fp8_grouped_wgrad", "float32", _fp8_wgrad),
        Line("nvfp4_grouped_wgrad", "float32", _nvfp4_wgrad),
    ]


def _bound(function, dtype: str):
    return lambda rng, quick: function(dtype, rng, quick)


def _shapes(quick: bool):
    return _SHAPES[: 2 if quick else None]


def fp8_rows(rng, rows: int, k: int) -> Quantized:
    """Rows in blocks of 128."""
    codes = fp8_codes(rng, (rows, k))
    scales = rng.uniform(1, 4, (rows, -(-k // 128))).astype(np.float32) / 256
    return Quantized(codes, scales, mode="fp8", bits=8, group_size=128, block=(1, 128))


def _fp8_mm(dtype, rng, quick) -> Iterator[Trial]:
    function = functools.partial(fp8_grouped_mm, preferred_element_type=dtype)
    for rows, groups, n, k in _shapes(quick):
        x, w = fp8_rows(rng, rows, k), random(rng, (groups, n, k), "fp8")
        yield _fp8_trial(function, x, w, dtype, _FP8_ERROR, rng, quick)


def _fp8_fast(dtype, rng, quick) -> Iterator[Trial]:
    """A scale for all rows, and for each matrix of w."""
    function = functools.partial(fp8_grouped_mm, preferred_element_type=dtype, accumulate="fast")
    for rows, groups, n, k in _shapes(quick):
        x = dataclasses.replace(
            fp8_rows(rng, rows, k), scales=np.float32(2**-8), block=None, group_size=0
        )
        w = random(rng, (groups, n, k), "fp8")
        scales = (2.0 ** rng.integers(-9, -6, groups)).astype(np.float32)
        w = dataclasses.replace(w, scales=scales, block=None, group_size=0)
        yield _fp8_trial(function, x, w, dtype, _FAST_ERROR, rng, quick)


def _fp8_trial(function, x: Quantized, w: Quantized, dtype, least: float, rng, quick) -> Trial:
    (rows, k), (groups, n, _), runs = x.weight.shape, w.weight.shape, []
    for name, s in sizes.variants(rng, rows, groups, quick):
        given = x
        if name == sizes.NAN:
            if x.block is None:  # its scale is that of all rows
                continue
            given = dataclasses.replace(x, scales=sizes.with_nan(x.scales, s))
        want = lambda x=given, s=s: [[
            oracle.grouped_mm(_wide(x), _wide(w), s, transpose_w=True).want(dtype, k, least)
        ]]  # fmt: skip
        runs.append(Run(name, (given, w, s), want))
    return Trial(label(rows, groups, k, n), function, runs)


def _wide(q: Quantized) -> np.ndarray:
    """Values of fp8, of which scales are float32 numbers of any kind, in float64."""
    codes = E4M3[oracle.codes(q)]
    return codes * oracle.spread(oracle.f64(q.scales), codes.shape, q.block)


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


def along_rows(rng, mode: str, columns: int, s, rows: int) -> Quantized:
    """Random codes of ``(rows, columns)`` in blocks along grouped rows; zeros are padded."""
    positions, length = oracle.padded(s, rows, 64 if mode == "nvfp4" else 128)
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


def _nvfp4_wgrad(rng, quick) -> Iterator[Trial]:
    yield from _wgrad(rng, quick, "nvfp4", nvfp4_grouped_wgrad, _NVFP4_ERROR)


def _wgrad(rng, quick, mode, function, least) -> Iterator[Trial]:
    for rows, groups, n, k in _shapes(quick):
        runs = []
        for name, s in sizes.variants(rng, rows, groups, quick):
            if name == sizes.NAN:
                continue
            x, dy = (along_rows(rng, mode, columns, s, rows) for columns in (k, n))
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
