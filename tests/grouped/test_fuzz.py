"""Random shapes, groupings, layouts and dtypes against float64, through whatever implementation
``None`` picks. ``pytest tests/grouped/test_fuzz.py --fuzz N`` runs N cases."""

import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from fuzz import PATTERNS, check, dimension, perhaps, some_sizes

import jax_groupgemm as jgg


def pytest_generate_tests(metafunc):
    fuzz.parametrize(metafunc, default=200)


def some_spans(rng, count: int, rows: int) -> np.ndarray:
    kind = rng.integers(4)
    if kind == 0:  # a partition
        cuts = np.sort(rng.integers(0, rows + 1, count - 1))
        return np.stack([np.append(0, cuts), np.append(cuts, rows)], 1).astype(np.int32)
    if kind == 1:  # out of bounds, reversed, overlapping
        return rng.integers(-5, rows + 6, (count, 2)).astype(np.int32)
    starts = rng.integers(0, rows + 1, count)
    return np.stack([starts, starts + rng.integers(0, 1 + rows // 2, count)], 1).astype(np.int32)


def grouped_case(rng, dtype, out_dtype, precision, tf32):
    t, k, n, g = dimension(rng), dimension(rng), dimension(rng), int(rng.integers(1, 12))
    transpose_w = bool(rng.integers(2))
    total, offset = fuzz.some_offset(rng, g)
    x = oracle.random(rng, (t, k), dtype)
    w = oracle.random(rng, (g, n, k) if transpose_w else (g, k, n), dtype)
    ct = oracle.random(rng, (t, n), out_dtype or dtype)

    @jax.jit
    def run(x, w, sizes, ct, offset):
        f = lambda x, w: jgg.grouped_mm(
            x, w, sizes, transpose_w=transpose_w, group_offset=offset, precision=precision,
            preferred_element_type=out_dtype,
        )  # fmt: skip
        out, vjp = jax.vjp(f, x, w)
        return out, *vjp(ct)

    plain = oracle.f64(w).swapaxes(1, 2) if transpose_w else oracle.f64(w)
    for _ in range(PATTERNS):
        sizes = some_sizes(rng, total, t)
        out, dx, dw = run(x, w, sizes, ct, None if offset is None else jnp.int32(offset))
        padded = np.zeros((total, k, n))
        here = [i for i in range(g) if 0 <= i + (offset or 0) < total]
        for i in here:
            padded[i + (offset or 0)] = plain[i]
        want_dx, all_dw = oracle.grouped_mm_grads(x, padded, sizes, ct)
        want_dw = np.zeros((g, k, n))
        for i in here:
            want_dw[i] = all_dw[i + (offset or 0)]
        want = oracle.grouped_mm(x, plain, sizes, offset=offset)
        check(out, want, k, tf32)
        check(dx, want_dx, n, tf32)
        check(dw, want_dw.swapaxes(1, 2) if transpose_w else want_dw, t, tf32)


def segmented_case(rng, dtype, out_dtype, precision, tf32):
    m, k, n, s = dimension(rng), dimension(rng), dimension(rng), int(rng.integers(1, 12))
    ta, tb = bool(rng.integers(2)), bool(rng.integers(2))
    a, b = oracle.random(rng, (k, m) if ta else (m, k), dtype), None
    b = oracle.random(rng, (n, k) if tb else (k, n), dtype)
    ct = oracle.random(rng, (s, m, n), out_dtype or dtype)

    @jax.jit
    def run(a, b, spans, ct):
        f = lambda a, b: jgg.segmented_mm(
            a, b, spans, transpose_a=ta, transpose_b=tb, precision=precision,
            preferred_element_type=out_dtype,
        )  # fmt: skip
        out, vjp = jax.vjp(f, a, b)
        return out, *vjp(ct)

    plain_a, plain_b = (a.T if ta else a), (b.T if tb else b)
    for _ in range(PATTERNS):
        spans = some_spans(rng, s, k)
        out, da, db = run(a, b, spans, ct)
        want_da, want_db = oracle.segmented_mm_grads(plain_a, plain_b, spans, ct)
        check(out, oracle.segmented_mm(plain_a, plain_b, spans), k, tf32)
        check(da.T if ta else da, want_da, s * n, tf32)
        check(db.T if tb else db, want_db, s * m, tf32)


def gather_case(rng, dtype, out_dtype, precision, tf32):
    m, k, n = int(rng.choice([1, 2, 5, 33, 70])), dimension(rng), dimension(rng)
    count, matrices, pairs = (int(v) for v in rng.integers(1, 9, 3))
    a, b = oracle.random(rng, (count, m, k), dtype), oracle.random(rng, (matrices, k, n), dtype)

    @jax.jit
    def run(a, b, lhs, rhs):
        return jgg.gather_mm(a, b, lhs, rhs, precision=precision, preferred_element_type=out_dtype)

    for _ in range(PATTERNS):
        lhs = rng.integers(-1, count + 1, pairs).astype(np.int32)
        rhs = rng.integers(-1, matrices + 1, pairs).astype(np.int32)
        check(run(a, b, lhs, rhs), oracle.gather_mm(a, b, lhs, rhs), k, tf32)


def epilogue_case(rng, dtype, out_dtype, precision, tf32):
    t, k, n, g = dimension(rng), dimension(rng), 2 * dimension(rng), int(rng.integers(1, 8))
    activation = rng.choice(["", "silu", "relu", "swiglu"]) or None
    columns = n // 2 if activation == "swiglu" else n
    transpose_w = bool(rng.integers(2))
    x = oracle.random(rng, (t, k), dtype)
    w = oracle.random(rng, (g, n, k) if transpose_w else (g, k, n), dtype) / k**0.5
    bias, scale = perhaps(rng, (g, n), dtype), perhaps(rng, (t,), dtype)
    old = perhaps(rng, (t, columns), out_dtype or dtype)

    @jax.jit
    def run(x, w, sizes, bias, scale, old):
        return jgg.grouped_mm(
            x, w, sizes, transpose_w=transpose_w, bias=bias, row_scale=scale, existing_out=old,
            activation=activation, precision=precision, preferred_element_type=out_dtype,
        )  # fmt: skip

    for _ in range(PATTERNS):
        sizes = some_sizes(rng, g, t)
        y = oracle.grouped_mm(x, w, sizes, transpose_w=transpose_w)
        want = fuzz.epilogue(y, oracle.bounds(sizes, t), bias, activation, scale, old)
        check(run(x, w, sizes, bias, scale, old), want, k, tf32, operands=k**-0.5)


CASES = (grouped_case, segmented_case, gather_case, epilogue_case)


def test_random_cases(seed, where):
    fuzz.run(CASES, seed, where)
