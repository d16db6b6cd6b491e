"""Products of full precision: ``grouped_mm`` and its gradients, ``segmented_mm``, ``gather_mm``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._grouped.gather_mm import gather_mm
from .._grouped.grouped_mm import grouped_mm
from .._grouped.segmented_mm import segmented_mm
from . import oracle, sizes
from .line import Line, Run, Trial, Want
from .oracle import normal

FLOATS = ("bfloat16", "float16", "float32")
#: What is timed: 8 groups of 512 rows.
T, G, K, N = 4096, 8, 2048, 2048


def lines(implementation: str | None = None) -> list[Line]:
    """Lines of the kernels that are chosen, or in fewer shapes of the one that is named."""
    named = f" {implementation}" if implementation else ""
    few = bool(implementation)

    def of(function: Callable) -> Callable:
        return lambda dtype, rng, quick: function(implementation, dtype, rng, quick or few)

    time = lambda function: None if implementation else function
    return [
        line
        for dtype in FLOATS
        for line in (
            Line(f"grouped_mm{named}", dtype, _bound(of(_mm), dtype), time(_timed_mm(dtype))),
            Line(f"grouped_mm dx{named}", dtype, _bound(of(_dx), dtype), time(_timed_dx(dtype))),
            Line(f"grouped_mm dw{named}", dtype, _bound(of(_dw), dtype), time(_timed_dw(dtype))),
            Line(f"segmented_mm{named}", dtype, _bound(of(_segmented), dtype)),
            Line(f"gather_mm{named}", dtype, _bound(of(_gather), dtype)),
            *([] if named else [Line("grouped_mm options", dtype, _bound(_options, dtype))]),
        )
    ]


def _bound(function: Callable, dtype: str) -> Callable:
    return lambda rng, quick: function(dtype, rng, quick)


def shapes(quick: bool) -> Sequence[tuple[int, int, int, int, bool]]:
    return sizes.QUICK_SHAPES if quick else sizes.SHAPES


def label(rows, groups, k, n, transposed: bool = False) -> str:
    return f"T={rows} G={groups} K={k} N={n}{' transposed' * transposed}"


def _operands(rng, dtype, rows, groups, k, n, transpose_w):
    w = normal(rng, (groups, n, k) if transpose_w else (groups, k, n), dtype)
    return normal(rng, (rows, k), dtype), w, normal(rng, (rows, n), dtype)


class Direction(NamedTuple):
    """A product of ``grouped_mm``: of x, w, and ct, which is as large as the result."""

    function: Callable
    oracle: Callable
    terms: str  #: how many products are added up for a number of the result


def _grouped(direction: Direction, implementation, dtype, rng, quick) -> Iterator[Trial]:
    for rows, groups, k, n, transposed in shapes(quick):
        operands = _operands(rng, dtype, rows, groups, k, n, transposed)
        mm = functools.partial(grouped_mm, transpose_w=transposed, implementation=implementation)
        terms = {"rows": rows, "k": k, "n": n}[direction.terms]
        runs = []
        for name, group_sizes in sizes.variants(rng, rows, groups, quick):
            x, w, ct = operands
            if name == sizes.NAN:
                x, ct = (sizes.with_nan(rows_of, group_sizes) for rows_of in (x, ct))
                w = sizes.empty_nan(w, group_sizes)
            want = lambda o=(x, w, ct, group_sizes), t=transposed, terms=terms: [
                [direction.oracle(*o, t).want(dtype, terms)]
            ]
            runs.append(Run(name, (x, w, ct, group_sizes), want))
        function = functools.partial(direction.function, mm)
        yield Trial(label(rows, groups, k, n, transposed), function, runs)


_mm = functools.partial(_grouped, Direction(
    lambda mm, x, w, ct, s: mm(x, w, s),
    lambda x, w, ct, s, t: oracle.grouped_mm(x, w, s, transpose_w=t),
    "k",
))  # fmt: skip
_dx = functools.partial(_grouped, Direction(
    lambda mm, x, w, ct, s: jax.vjp(lambda x: mm(x, w, s), x)[1](ct)[0],
    lambda x, w, ct, s, t: oracle.grouped_mm(ct, w, s, transpose_w=not t),
    "n",
))  # fmt: skip
_dw = functools.partial(_grouped, Direction(
    lambda mm, x, w, ct, s: jax.vjp(lambda w: mm(x, w, s), w)[1](ct)[0],
    lambda x, w, ct, s, t: oracle.grouped_wgrad(*((ct, x) if t else (x, ct)), s),
    "rows",
))  # fmt: skip


def _segmented(implementation, dtype, rng, quick) -> Iterator[Trial]:
    for rows, groups, m, n, _ in shapes(quick):
        a, b = normal(rng, (m, rows), dtype), normal(rng, (rows, n), dtype)
        ends = np.linspace(0, rows, groups + 1).astype(np.int32)
        in_order = np.stack([ends[:-1], ends[1:]], axis=-1)
        overlap = np.sort(rng.integers(-3, rows + 4, (groups, 2)), axis=-1).astype(np.int32)
        overlap[0] = overlap[0][::-1]  # reversed: empty
        spoiled = a.copy()
        spoiled[:, in_order[-1, 0] :] = np.nan  # what belongs to the last segment
        cases = {
            "in order": (a, in_order), "overlapping": (a, overlap), sizes.NAN: (spoiled, in_order)
        }  # fmt: skip
        runs = [
            Run(name, (x, b, s), lambda x=x, s=s, b=b, r=rows: [
                [oracle.segmented_mm(x, b, s).want(dtype, r)]
            ])
            for name, (x, s) in cases.items()
        ]  # fmt: skip
        function = functools.partial(segmented_mm, implementation=implementation)
        yield Trial(f"M={m} K={rows} N={n} S={groups}", function, runs)


def _gather(implementation, dtype, rng, quick) -> Iterator[Trial]:
    shapes_of = [(20, 1, 64, 96, 4), (7, 5, 40, 24, 3), (6, 70, 128, 64, 5)]
    if not quick:
        shapes_of += [(150, 1, 256, 320, 16), (40, 33, 136, 72, 8), (12, 130, 512, 128, 4)]
    for count, m, k, n, matrices in shapes_of:
        a, b = normal(rng, (count, m, k), dtype), normal(rng, (matrices, k, n), dtype)
        runs = []
        for name in ("random", "few matrices", "out of range"):
            lhs = rng.permutation(count).astype(np.int32)
            rhs = rng.integers(0, 2 if name == "few matrices" else matrices, count, np.int32)
            if name == "out of range":
                lhs[::3], rhs[1::4] = -1, matrices
            want = lambda a=a, b=b, p=lhs, q=rhs, k=k: [
                [oracle.gather_mm(a, b, p, q).want(dtype, k)]
            ]
            runs.append(Run(name, (a, b, lhs, rhs), want))
        function = functools.partial(gather_mm, implementation=implementation)
        yield Trial(f"{count} of M={m} K={k} N={n}", function, runs)


def _options(dtype, rng, quick) -> Iterator[Trial]:
    """Bias, activation, row scales, and a sum with what there is."""
    for rows, groups, k, n, transposed in shapes(quick)[: 3 if quick else 6]:
        x, w, _ = _operands(rng, dtype, rows, groups, k, n, transposed)
        x = (x.astype(np.float32) / np.float32(k**0.5)).astype(x.dtype)
        bias, scale = normal(rng, (groups, n), dtype), normal(rng, (rows,), dtype)
        old = normal(rng, (rows, n), dtype)
        mm = functools.partial(grouped_mm, transpose_w=transposed)
        programs = {
            "swiglu": lambda x, w, s, bias, scale, old, mm=mm: mm(x, w, s, activation="swiglu"),
            "bias, silu": lambda x, w, s, bias, scale, old, mm=mm: mm(
                x, w, s, bias=bias, activation="silu"
            ),
            "bias, scale, sum": lambda x, w, s, bias, scale, old, mm=mm: mm(
                x, w, s, bias=bias, row_scale=scale, existing_out=old
            ),
        }
        for option, function in programs.items():
            runs = [
                Run(name, (x, w, s, bias, scale, old), functools.partial(
                    _with_options, option, dtype, x, w, s, bias, scale, old, transposed
                ))
                for name, s in sizes.variants(rng, rows, groups, True) if name != sizes.NAN
            ]  # fmt: skip
            yield Trial(f"{label(rows, groups, k, n, transposed)} {option}", function, runs)


def _with_options(option, dtype, x, w, group_sizes, bias, scale, old, transposed):
    y = oracle.grouped_mm(x, w, group_sizes, transpose_w=transposed)
    near = 2e-5 * y.size + 1e-6  # of sums; every activation's slope is below 1.2
    inside = np.zeros(len(x), bool)
    for g, (start, end) in enumerate(oracle.bounds(group_sizes, len(x))):
        inside[start:end] = True
        if option != "swiglu":
            y.value[start:end] += oracle.f64(bias)[g]
    if option == "swiglu":
        (gate, up), (far, also) = np.split(y.value, 2, -1), np.split(near, 2, -1)
        value = oracle.silu(gate) * up
        allowed = 1.2 * far * np.abs(up) + np.abs(oracle.silu(gate)) * also + far * also
    elif option == "bias, silu":
        value, allowed = oracle.silu(y.value), 1.2 * near
    else:
        wide = oracle.f64(scale)[:, None]
        value, allowed = wide * y.value, np.abs(wide) * near
    value = np.where(inside[:, None], value, 0.0)
    if option == "bias, scale, sum":
        value = value + oracle.f64(old)
    allowed = allowed + 1e-6 + 1.02 * oracle.ROUNDING[dtype] * np.abs(value)
    return [[Want(value, allowed, max(np.abs(value).max(initial=0.0), 1e-9))]]


# ---- what is timed -----------------------------------------------------------------------------


def _timed_mm(dtype):
    def timed(rng):
        x, w, _ = _operands(rng, dtype, T, G, K, N, False)
        return grouped_mm, (x, w, np.full(G, T // G, np.int32))

    return timed


def _timed_dx(dtype):
    def timed(rng):
        x, w, ct = _operands(rng, dtype, T, G, K, N, False)
        f = lambda x, w, s, ct: jax.vjp(lambda x: grouped_mm(x, w, s), x)[1](ct)[0]
        return f, (x, w, np.full(G, T // G, np.int32), ct)

    return timed


def _timed_dw(dtype):
    def timed(rng):
        x, _, ct = _operands(rng, dtype, T, G, K, N, False)
        like = jnp.dtype(dtype)

        def f(x, s, ct):
            w = jnp.zeros((G, K, N), like)
            return jax.vjp(lambda w: grouped_mm(x, w, s), w)[1](ct)[0]

        return f, (x, np.full(G, T // G, np.int32), ct)

    return timed
