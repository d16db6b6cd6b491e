"""Products with quantized weights, in each mode and direction."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np

from .._quantized.array import Quantized
from .._quantized.gather_qmm import gather_qmm
from .._quantized.grouped_qmm import grouped_qmm
from .._quantized.prepack import prepack
from . import oracle, sizes
from .line import Line, Run, Trial
from .oracle import normal
from .products import FLOATS, G, K, N, label

MODES = ("affine", "mxfp4", "mxfp8", "nvfp4", "fp8")
# T, G, N, K; bits and group size of mode "affine"; the dtype of its scales, None for that of x.
_SHAPES = (
    (40, 3, 128, 256, 4, 64, None), (9, 4, 64, 128, 8, 32, None), (150, 2, 192, 128, 3, 32, None),
    (300, 5, 128, 512, 4, 128, None), (64, 16, 256, 256, 2, 64, None),
    (500, 3, 64, 384, 6, 64, None), (2200, 2, 128, 256, 4, 64, None),
    (700, 3, 320, 256, 5, 64, "float32"), (40, 2, 128, 128, 4, 16, None),
)  # fmt: skip

# Those of four bits, for the generic kernel's tiles: of 8 rows, of 64 and of 128.
_PACKED_SHAPES = (
    (20, 6, 128, 192, 4, 32, None), (1600, 40, 256, 128, 4, 64, None),
    (1300, 2, 512, 256, 4, 128, None), (300, 5, 128, 512, 4, 128, None),
)  # fmt: skip


def lines(packs: bool, implementation: str | None = None) -> list[Line]:
    """``packs``: also of prepacked weights."""
    named = f" {implementation}" if implementation else ""
    found = []
    for mode in MODES if not implementation else MODES[:-1]:
        for dtype in FLOATS:
            at = mode, dtype, implementation
            timed = None if implementation else _timed(mode, dtype, packs)
            of = functools.partial(_bound, few=bool(implementation))
            found += [
                Line(f"grouped_qmm {mode}{named}", dtype, of(_forward, *at, False), timed),
                Line(f"grouped_qmm {mode} dx{named}", dtype, of(_dx, *at, False)),
            ]
            if packs and not implementation:
                found += [
                    Line(f"grouped_qmm {mode} prepacked", dtype, _bound(_forward, *at, True)),
                    Line(f"grouped_qmm {mode} prepacked dx", dtype, _bound(_dx, *at, True)),
                ]
    if not implementation:
        found += [
            Line(f"gather_qmm {mode}", dtype, _bound(_gather, mode, dtype))
            for mode in ("affine", "nvfp4") for dtype in FLOATS
        ]  # fmt: skip
    return found


def packed_lines(implementation: str | None = None) -> list[Line]:
    """Products of prepacked weights that the generic kernel takes."""
    named = f" {implementation}" if implementation else ""
    run = functools.partial(_forward, shapes=_PACKED_SHAPES)
    return [
        Line(
            f"grouped_qmm {mode} prepacked{named}", dtype,
            _bound(run, mode, dtype, implementation, True),
        )
        for mode in ("affine", "mxfp4", "nvfp4") for dtype in ("bfloat16", "float16")
    ]  # fmt: skip


def _bound(function, *given, few: bool = False):
    return lambda rng, quick: function(*given, rng, quick or few)


def random(rng, shape, mode: Any, bits: int | None = None, group_size: int | None = None,
           dtype: Any = "float32", global_scale=None) -> Quantized:  # fmt: skip
    """Random codes and scales without NaN; values of order one. Affine weights have four bits in
    groups of 64 where nothing else is said. Blocks of fp8 have 128 rows, and its scales are
    bfloat16 numbers, which no kernel rounds."""
    if mode == "fp8":
        return _random_fp8(rng, shape, group_size or 128)
    bits = bits or (8 if mode == "mxfp8" else 4)
    group_size = group_size or {"affine": 64, "nvfp4": 16}.get(mode, 32)
    *lead, k = shape
    weight = rng.integers(0, 2**32, (*lead, k * bits // 32), np.uint32)
    groups, biases = (*lead, k // group_size), None
    if mode == "affine":
        given = lambda a: a.astype(np.float32).astype(np.dtype(dtype))
        scales = given(rng.standard_normal(groups) / 2**bits)
        biases = given(rng.standard_normal(groups))
    elif mode == "nvfp4":
        scales = rng.integers(0x20, 0x38, groups, np.uint8)
    else:
        scales = rng.integers(120, 128, groups, np.uint8) - np.uint8(7 if mode == "mxfp8" else 2)
    if mode == "mxfp8":  # neither of the NaN codes
        weight &= ~np.uint32(0x01010101)
    return Quantized(
        weight, scales, biases, global_scale, mode=mode, bits=bits, group_size=group_size
    )


def fp8_codes(rng, shape) -> np.ndarray:
    """Random ones of e4m3, without NaN."""
    given = rng.integers(0, 256, shape).astype(np.uint8)
    given[given % 128 == 127] -= 1
    return given.view(ml_dtypes.float8_e4m3fn)


def _random_fp8(rng, shape, columns: int) -> Quantized:
    codes, (*lead, n, k) = fp8_codes(rng, shape), shape
    scales = rng.uniform(1, 4, (*lead, -(-n // 128), -(-k // columns))) / 256
    scales = scales.astype(ml_dtypes.bfloat16).astype(np.float32)
    return Quantized(codes, scales, mode="fp8", bits=8, group_size=columns, block=(128, columns))


def values(q: Quantized, dtype) -> list[np.ndarray]:
    """The values that products may multiply with: rounded once to x's dtype, or not at all."""
    value = oracle.decoded(q)
    scale = oracle.f64(1 if q.global_scale is None else q.global_scale)
    scale = scale.reshape(scale.shape + (1,) * (value.ndim - scale.ndim))
    return [oracle.rounded(value, dtype) * scale, value * scale]


def _weights(
    mode, dtype, rng, quick, shapes=_SHAPES
) -> Iterator[tuple[int, int, int, int, Quantized]]:
    for rows, groups, n, k, bits, group_size, of_scales in shapes[: 3 if quick else None]:
        if mode != "affine" and (bits in (2, 6) or group_size == 16 or of_scales):
            continue
        scale = rng.uniform(0.5, 2, groups).astype(np.float32) if mode == "nvfp4" else None
        size = (bits, group_size) if mode == "affine" else (None, None)
        q = random(rng, (groups, n, k), mode, *size, of_scales or dtype, global_scale=scale)
        yield rows, groups, n, k, q


def _named(q: Quantized) -> str:
    return f"{q.bits} bits in groups of {q.group_size}" if q.mode == "affine" else ""


def _forward(mode, dtype, implementation, packed, rng, quick, shapes=_SHAPES) -> Iterator[Trial]:
    for rows, groups, n, k, q in _weights(mode, dtype, rng, quick, shapes):
        x, runs, ways = normal(rng, (rows, k), dtype), [], values(q, dtype)
        for name, s in sizes.variants(rng, rows, groups, quick):
            given = sizes.with_nan(x, s) if name == sizes.NAN else x
            want = lambda x=given, s=s, ways=ways, k=k: (
                [oracle.grouped_mm(x, w, s, transpose_w=True).want(dtype, k)] for w in ways
            )
            runs.append(Run(name, (given, q, s), want))

        def function(x, q, s):
            w = prepack(q) if packed else q
            return grouped_qmm(x, w, s, implementation=implementation)

        yield Trial(f"{label(rows, groups, k, n)} {_named(q)}".strip(), function, runs)


def _dx(mode, dtype, implementation, packed, rng, quick) -> Iterator[Trial]:
    for rows, groups, n, k, q in _weights(mode, dtype, rng, quick):
        x, ct = normal(rng, (rows, k), dtype), normal(rng, (rows, n), dtype)
        runs, ways = [], values(q, dtype)
        for name, s in sizes.variants(rng, rows, groups, quick):
            given = sizes.with_nan(ct, s) if name == sizes.NAN else ct
            want = lambda ct=given, s=s, ways=ways, n=n: (
                [oracle.grouped_mm(ct, w, s).want(dtype, n)] for w in ways
            )
            runs.append(Run(name, (x, q, s, given), want))

        def function(x, q, s, ct):
            w = prepack(q) if packed else q
            f = lambda x: grouped_qmm(x, w, s, implementation=implementation)
            return jax.vjp(f, x)[1](ct)[0]

        yield Trial(f"{label(rows, groups, k, n)} {_named(q)}".strip(), function, runs)


def _gather(mode, dtype, rng, quick) -> Iterator[Trial]:
    for count, m, k, n, matrices in [(12, 1, 128, 64, 4), (9, 20, 256, 128, 3)]:
        q = random(rng, (matrices, n, k), mode, dtype=dtype)
        x, runs, ways = normal(rng, (count, m, k), dtype), [], values(q, dtype)
        for name in ("random", "out of range"):
            lhs = rng.permutation(count).astype(np.int32)
            rhs = rng.integers(0, matrices, count, np.int32)
            if name == "out of range":
                lhs[::3], rhs[1::4] = -1, matrices
            want = lambda x=x, p=lhs, r=rhs, ways=ways, k=k: (
                [oracle.gather_mm(x, w.swapaxes(1, 2), p, r).want(dtype, k)] for w in ways
            )
            runs.append(Run(name, (x, q, lhs, rhs), want))
        yield Trial(f"{count} of M={m} K={k} N={n}", gather_qmm, runs)


def _timed(mode, dtype, packs):
    """A decode step of 64 rows, which reads every matrix. Where there is a layout for it, weights
    are prepacked, as users would have them."""

    def timed(rng):
        q = random(rng, (G, N, K), mode, dtype=dtype)
        x, s = normal(rng, (64, K), dtype), np.full(G, 64 // G, np.int32)
        return grouped_qmm, (x, jax.jit(prepack)(q) if packs else q, s)

    return timed
