"""Random shapes, groupings, layouts and dtypes against float64, through whatever implementation
``None`` picks. ``pytest tests/test_fuzz.py --fuzz N`` runs N cases."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

PER_TEST = 50  # cases of one test
PATTERNS = 5  # groupings that one compiled program is tried with


def pytest_generate_tests(metafunc):
    count = metafunc.config.getoption("--fuzz")
    metafunc.parametrize("seed", range(-(-count // PER_TEST)))


def dimension(rng) -> int:
    """Often small or next to a multiple of what kernels like."""
    kind = rng.integers(7)
    if kind == 0:
        return int(rng.integers(1, 20))
    if kind == 1:
        return int(rng.integers(1, 200))
    if kind < 5:  # lines of whole 16 bytes, without which TMA is out
        return 8 * int(rng.integers(1, 60))
    return max(
        1, int(rng.choice([16, 32, 64, 128, 256]) * rng.integers(1, 3) + rng.integers(-2, 3))
    )


def some_sizes(rng, groups: int, rows: int) -> np.ndarray:
    kind = rng.integers(6)
    if kind == 0:
        return np.zeros(groups, np.int32)
    if kind == 1:  # everything in one group, perhaps more than there is
        sizes = np.zeros(groups, np.int32)
        sizes[rng.integers(groups)] = rows + rng.integers(0, 3)
        return sizes
    if kind == 2:  # negative and excessive sizes
        return rng.integers(-rows, rows + 1, groups).astype(np.int32)
    if kind == 3:
        return rng.multinomial(rows, np.full(groups, 1 / groups)).astype(np.int32)
    return oracle.random_sizes(rng, groups, rows, empty=rng.random())


def some_spans(rng, count: int, rows: int) -> np.ndarray:
    kind = rng.integers(4)
    if kind == 0:  # a partition
        cuts = np.sort(rng.integers(0, rows + 1, count - 1))
        return np.stack([np.append(0, cuts), np.append(cuts, rows)], 1).astype(np.int32)
    if kind == 1:  # out of bounds, reversed, overlapping
        return rng.integers(-5, rows + 6, (count, 2)).astype(np.int32)
    starts = rng.integers(0, rows + 1, count)
    return np.stack([starts, starts + rng.integers(0, 1 + rows // 2, count)], 1).astype(np.int32)


def check(got, want, k, tf32, operands=1.0):
    """Few sums, or one, may happen to cancel: errors are measured against what sums of k products
    of random ``operands`` usually are, where that is more."""
    assert got.shape == want.shape
    usual = operands * np.sqrt(np.count_nonzero(want) * k)
    allowed = oracle.TOLERANCE[got.dtype.name] * max(1.0, (k / 512) ** 0.5) + (2e-3 if tf32 else 0)
    error = np.linalg.norm(oracle.f64(got) - want) / max(np.linalg.norm(want), usual, 1e-30)
    assert error <= allowed, (error, allowed)


def grouped_case(rng, dtype, out_dtype, precision, tf32):
    t, k, n, g = dimension(rng), dimension(rng), dimension(rng), int(rng.integers(1, 12))
    transpose_w, offset = bool(rng.integers(2)), None
    total = g
    if rng.integers(3) == 0:
        total, offset = g + int(rng.integers(0, 6)), int(rng.integers(-4, g + 6))
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
    out_type = out_dtype or dtype
    bias, scale, old = (
        oracle.random(rng, shape, of) if rng.integers(2) else None
        for shape, of in (((g, n), dtype), ((t,), dtype), ((t, columns), out_type))
    )

    @jax.jit
    def run(x, w, sizes, bias, scale, old):
        return jgg.grouped_mm(
            x, w, sizes, transpose_w=transpose_w, bias=bias, row_scale=scale, existing_out=old,
            activation=activation, precision=precision, preferred_element_type=out_dtype,
        )  # fmt: skip

    for _ in range(PATTERNS):
        sizes = some_sizes(rng, g, t)
        ends = oracle.bounds(sizes, t)
        y = oracle.grouped_mm(x, oracle.f64(w).swapaxes(1, 2) if transpose_w else w, sizes)
        for i, (start, end) in enumerate(ends):
            if bias is not None:
                y[start:end] += oracle.f64(bias)[i]
        with np.errstate(over="ignore"):
            if activation == "silu":
                y = y / (1 + np.exp(-y))
            elif activation == "swiglu":
                y = y[:, :columns] / (1 + np.exp(-y[:, :columns])) * y[:, columns:]
            elif activation == "relu":
                y = np.maximum(y, 0)
        if scale is not None:
            y = y * oracle.f64(scale)[:, None]
        y[ends[-1][1] :] = 0
        if old is not None:
            y = y + oracle.f64(old)
        check(run(x, w, sizes, bias, scale, old), y, k, tf32, operands=k**-0.5)


CASES = (grouped_case, segmented_case, gather_case, epilogue_case)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_cases(seed, where):
    rng = np.random.default_rng([seed, 20])
    with jax.default_device(jax.local_devices(backend=where)[0]):
        for _ in range(PER_TEST // PATTERNS):
            case = CASES[rng.integers(len(CASES))]
            dtype = str(rng.choice(["float32", "bfloat16", "float16"]))
            out_dtype = rng.choice([None, None, "float32", "bfloat16", "float16"])
            tf32 = dtype == "float32" and where == "cuda" and bool(rng.integers(2))
            state = rng.bit_generator.state
            try:
                with jax.numpy_dtype_promotion("standard"):
                    case(rng, dtype, out_dtype, "tensorfloat32" if tf32 else None, tf32)
            except AssertionError as error:
                raise AssertionError(f"{case.__name__} {dtype} {out_dtype} {state}") from error
