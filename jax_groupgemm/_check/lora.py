"""``lora_mm``: products of low rank, and the gradients of their factors."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import numpy as np

from .._grouped.lora_mm import lora_mm
from . import oracle
from .line import Line, Run, Trial, Want
from .oracle import normal

# Rows, adapters, experts, rank, K, N: few rows, as they come; many, which are sorted; a rank that
# no kernel takes.
_QUICK = [(70, 3, 5, 16, 96, 72), (9, 2, 1, 8, 64, 40)]
_SHAPES = [*_QUICK, (300, 4, 30, 32, 328, 296), (2500, 8, 40, 64, 128, 64), (40, 3, 2, 24, 64, 64)]


def lines() -> list[Line]:
    found = []
    for dtype in ("bfloat16", "float16", "float32"):
        trials, timed = functools.partial(_trials, dtype), functools.partial(_timed, dtype)
        found.append(Line("lora_mm", dtype, trials, timed))
        found.append(Line("lora_mm gradients", dtype, functools.partial(_gradients, dtype)))
    return found


def _trials(dtype: str, rng, quick: bool) -> Iterator[Trial]:
    for rows, adapters, experts, rank, k, n in _QUICK if quick else _SHAPES:
        x, a = normal(rng, (rows, k), dtype), normal(rng, (adapters, experts, rank, k), dtype)
        a = (a.astype(np.float32) / np.float32(k**0.5)).astype(a.dtype)
        b, old = normal(rng, (adapters, experts, n, rank), dtype), normal(rng, (rows, n), dtype)
        runs = []
        for name, adapter, expert in _indices(rng, rows, adapters, experts):
            operands = x, a, b, adapter, expert, old
            runs.append(Run(name, operands, functools.partial(_wants, dtype, operands)))
        label = f"T={rows} A={adapters} E={experts} R={rank} K={k} N={n}"
        yield Trial(label, lambda *v: lora_mm(*v[:5], existing_out=v[5]), runs)


def _indices(rng, rows: int, adapters: int, experts: int):
    for name in ("random", "one adapter", "out of range"):
        adapter = rng.integers(0, 1 if name == "one adapter" else adapters, rows, np.int32)
        expert = np.sort(rng.integers(0, experts, rows, np.int32))
        if name == "out of range":
            adapter[::3], expert[1::4] = -1, experts
        yield name, adapter, expert


def _wants(dtype: str, operands) -> list[list[Want]]:
    x, a, b, adapter, expert, old = operands
    x, a, b = (oracle.f64(v) for v in (x, a, b))
    value, allowed = oracle.f64(old).copy(), np.zeros(old.shape)
    for t, (i, e) in enumerate(zip(adapter, expert, strict=True)):
        if not (0 <= i < a.shape[0] and 0 <= e < a.shape[1]):
            continue
        h = oracle.Sums.of(a[i, e], x[t])
        # h is rounded between the products.
        far = 1.02 * oracle.ROUNDING[dtype] * np.abs(h.value) + 2e-5 * h.size
        value[t] += b[i, e] @ h.value
        allowed[t] = np.abs(b[i, e]) @ (far + 2e-5 * np.abs(h.value))
    allowed = allowed + 1e-6 + 1.02 * oracle.ROUNDING[dtype] * np.abs(value)
    return [[Want(value, allowed, np.abs(value).max())]]


def _gradients(dtype: str, rng, quick: bool) -> Iterator[Trial]:
    for rows, adapters, experts, rank, k, n in _QUICK if quick else _SHAPES:
        x, ct = normal(rng, (rows, k), dtype), normal(rng, (rows, n), dtype)
        a, b = (
            (v.astype(np.float32) / np.float32(v.shape[length] ** 0.5)).astype(v.dtype)
            for v, length in (
                (normal(rng, (adapters, experts, rank, k), dtype), 3),
                (normal(rng, (adapters, experts, n, rank), dtype), 2),
            )
        )
        runs = []
        for name, adapter, expert in _indices(rng, rows, adapters, experts):
            operands = x, a, b, adapter, expert, ct
            runs.append(Run(name, operands, functools.partial(_gradient_wants, dtype, operands)))
        yield Trial(f"T={rows} A={adapters} E={experts} R={rank} K={k} N={n}", _backward, runs)


def _backward(x, a, b, adapter, expert, ct):
    return jax.vjp(lambda a, b: lora_mm(x, a, b, adapter, expert), a, b)[1](ct)


def _gradient_wants(dtype: str, operands) -> list[list[Want]]:
    x, a, b, adapter, expert, ct = operands
    x, a, b, ct = (oracle.f64(v) for v in (x, a, b, ct))
    values = [np.zeros(v.shape) for v in (a, b)]
    sizes, allowed = ([np.zeros(v.shape) for v in (a, b)] for _ in range(2))
    for t, pair in enumerate(zip(adapter, expert, strict=True)):
        if not (0 <= pair[0] < a.shape[0] and 0 <= pair[1] < a.shape[1]):
            continue
        # h and dh are rounded before they are multiplied.
        h, dh = oracle.Sums.of(a[pair], x[t]), oracle.Sums.of(ct[t], b[pair])
        for i, (low, of) in enumerate(((dh, x[t]), (h, ct[t]))):
            outer = np.outer if i == 0 else lambda low, of: np.outer(of, low)
            far = 1.02 * oracle.ROUNDING[dtype] * np.abs(low.value) + 2e-5 * low.size
            values[i][pair] += outer(low.value, of)
            sizes[i][pair] += outer(np.abs(low.value), np.abs(of))
            allowed[i][pair] += outer(far, np.abs(of))
    return [
        [
            Want(value, far + 2e-5 * size + 1e-6 + 1.02 * oracle.ROUNDING[dtype] * np.abs(value),
                 max(np.abs(value).max(), 1.0))
            for value, size, far in zip(values, sizes, allowed, strict=True)
        ]
    ]  # fmt: skip


def _timed(dtype: str, rng):
    """512 rows, a decode step of 64 tokens: 1024 pairs."""
    of = lambda *shape: normal(rng, shape, dtype)
    expert = np.sort(rng.integers(0, 128, 512, np.int32))
    adapter = rng.integers(0, 8, 512, np.int32)
    return lora_mm, (of(512, 2048), of(8, 128, 16, 2048), of(8, 128, 1536, 16), adapter, expert)
