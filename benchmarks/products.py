"""Grouped and segmented products: operands, our arms, checks.

What every family of cases has, for benchmarks.gpu: ``operands`` of a case, our ``arms`` by name
(functions that make one of benchmarks.timing, or raise where they cannot), and a ``checker``, which
makes a function from an arm's result to its relative error. Peers have their own module.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_groupgemm as jgg

from . import timing
from .peers import Operands
from .shapes import Case, Grouped, Segmented


def operands(case: Case) -> Operands:
    sizes = case.sizes()
    if isinstance(case, Segmented):
        a = timing.random(0, (case.k, case.m) if case.transpose_a else (case.m, case.k), case.dtype)
        return Operands(a, timing.random(1, (case.k, case.n), case.dtype), sizes)
    x = timing.random(0, (case.rows, case.n if case.op == "dgrad" else case.k))
    if case.op == "wgrad":
        timing.forget()
        return Operands(x, timing.random(1, (case.rows, case.n)), sizes)
    shape = (case.n, case.k) if case.transposed else (case.k, case.n)
    last = case.transposed or case.op == "dgrad"
    weights = (case.groups, *shape)
    w = timing.kept(weights, lambda: timing.random(1, weights))
    return Operands(x, w, sizes, last)


def ours_arm(case: Case, v: Operands, implementation: str | None) -> timing.JaxArm:
    if isinstance(case, Grouped) and case.op != "wgrad":
        options = {"transpose_w": v.last, "implementation": implementation}
        f = lambda x, w, s: jgg.grouped_mm(x, w, s, **options)
        return timing.JaxArm(f, (v.a, v.b, jnp.asarray(v.sizes)), case.cold)
    ends = np.cumsum(v.sizes)
    spans = jnp.asarray(np.stack([ends - v.sizes, ends], 1), jnp.int32)
    options = {
        "transpose_a": not isinstance(case, Segmented) or case.transpose_a,
        "precision": getattr(case, "precision", None),
        "implementation": implementation,
    }
    f = lambda a, b, s: jgg.segmented_mm(a, b, s, **options)
    return timing.JaxArm(f, (v.a, v.b, spans), case.cold)


def arms(case: Case, v: Operands, args) -> dict[str, Callable]:
    return {ours_name(i): functools.partial(ours_arm, case, v, i) for i in args.implementation}


def ours_name(*options: str | None) -> str:
    """``ours``, and what is not the default."""
    given = ", ".join(option for option in options if option)
    return f"ours[{given}]" if given else "ours"


@functools.partial(jax.jit, static_argnames="last")
def rows_error(out, x, w, start, end, g, last: bool):
    """Relative error of up to 64 rows of group g, against float32."""
    weight = lax.dynamic_index_in_dim(w, g, keepdims=False).astype("float32")
    return matrix_error(out, x, weight.T if last else weight, start, end)


@jax.jit
def matrix_error(out, x, weight, start, end):
    """Relative error of up to 64 rows from start to end, against their float32 product."""
    count = min(64, len(x))
    first = jnp.minimum(start, len(x) - count)
    rows = lax.dynamic_slice_in_dim(x, first, count).astype("float32")
    got = lax.dynamic_slice_in_dim(out, first, count).astype("float32")
    want = jnp.matmul(rows, weight, precision="highest")
    inside = (jnp.arange(count) + first >= start) & (jnp.arange(count) + first < end)
    norm = lambda v: jnp.sqrt(jnp.sum(v * v, where=inside[:, None]))
    return norm(got - want) / norm(want)


@jax.jit
def columns_error(out, x, y, start, end, g):
    """Relative error of 256 rows and columns of matrix g, against float32."""
    inside = (jnp.arange(len(x)) >= start) & (jnp.arange(len(x)) < end)
    left = jnp.where(inside[:, None], x[:, :256], 0).astype("float32")
    want = jnp.matmul(left.T, y[:, :256].astype("float32"), precision="highest")
    got = lax.dynamic_index_in_dim(out, g, keepdims=False)[:256, :256].astype("float32")
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


@jax.jit
def whole_error(out, want):
    return jnp.linalg.norm(out.astype("float32") - want) / jnp.linalg.norm(want)


def some_groups(sizes: np.ndarray) -> list[int]:
    """The first and the last that has rows, and the largest."""
    groups = np.flatnonzero(sizes)
    return sorted({int(groups[0]), int(groups[-1]), int(np.argmax(sizes))})


def worst_of_groups(one, sizes) -> Callable[[Any], float]:
    """A function from a result to the largest ``one(out, g, start, end)`` of some groups."""
    sizes = np.asarray(sizes)
    ends = np.cumsum(sizes).astype(np.int32)
    rows = {g: (ends[g] - sizes[g], ends[g]) for g in some_groups(sizes)}
    # NaN is the largest
    return lambda out: float(np.max([float(one(out, g, *at)) for g, at in rows.items()]))


def checker(case: Case, v: Operands):
    """A function from a result to its relative error: of some groups, or of all against float64."""
    if isinstance(case, Segmented):
        a, b = (np.asarray(u).astype(np.float64) for u in (v.a, v.b))
        a, bounds = a.T if case.transpose_a else a, case.bounds()
        want = np.empty((case.count, case.m, case.n), np.float32)
        for g, (i, j) in enumerate(itertools.pairwise(bounds)):
            want[g] = a[:, i:j] @ b[i:j]  # float64, rounded
        want = jnp.asarray(want)
        return lambda out: float(whole_error(out, want))
    if case.op == "wgrad":
        one = lambda out, g, *rows: columns_error(out, v.a, v.b, *rows, g)
    else:
        one = lambda out, g, *rows: rows_error(out, v.a, v.b, *rows, g, v.last)
    return worst_of_groups(one, v.sizes)
