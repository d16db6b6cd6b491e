"""The Hopper kernel with lists of rows: out[y_rows[t]] = x[x_rows[t]] @ w[group(t)]."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import needs_hopper

import jax_groupgemm as jgg
from jax_groupgemm._core import segments
from jax_groupgemm._core.products import Mm
from jax_groupgemm._grouped import call as grouped_call
from jax_groupgemm._kernels import choose
from jax_groupgemm.tune import timing

pytestmark = [
    pytest.mark.gpu,
    needs_hopper,
]

# Sums of tensor cores are truncated.
SUMS = 1e-5


@functools.partial(jax.jit, static_argnames=("transpose_w", "dtype", "activation"))
def product(x, w, sizes, x_rows=None, y_rows=None, offset=None, *, transpose_w=False, dtype=None,
            activation=None, **options):  # fmt: skip
    rows = next(len(v) for v in (x_rows, y_rows, x) if v is not None)
    mm = Mm(rows=rows, out_dtype=dtype or x.dtype, transpose_w=transpose_w, implementation="sm90")
    epilogue = grouped_call.Epilogue(activation=activation, **options)
    return call(x, w, segments.sizes(sizes, offset), mm, epilogue, x_rows=x_rows, y_rows=y_rows)


def call(x, w, metadata, mm, epilogue=grouped_call.NO_EPILOGUE, **lists):
    by_list = any(rows is not None for rows in lists.values())
    problem = grouped_call.mm_problem(
        "cuda", x, w, metadata, mm, epilogue, lists=by_list,
        y_list=lists.get("y_rows") is not None,
    )  # fmt: skip
    plan = choose.choose(problem)
    return grouped_call.mm(plan, x, w, metadata, mm, epilogue, **lists)


def silu(a):
    return a / (1 + np.exp(-a))


ACTIVATIONS = {
    None: lambda y: y,
    "silu": silu,
    "swiglu": lambda y: silu(y[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :],
}


def expected(x, w, sizes, x_rows=None, y_rows=None, offset=0, *, bias=None, activation=None,
             row_scale=None, existing_out=None):  # fmt: skip
    x, w = oracle.f64(x), oracle.f64(w)
    x_rows = np.arange(len(x)) if x_rows is None else np.asarray(x_rows)
    y_rows = np.arange(len(x_rows)) if y_rows is None else np.asarray(y_rows)
    there = (x_rows >= 0) & (x_rows < len(x))
    columns = w.shape[2] // (2 if activation == "swiglu" else 1)
    rows = np.zeros((len(x_rows), columns))
    for g, (start, end) in enumerate(oracle.bounds(sizes, len(x_rows))):
        if not 0 <= g - offset < len(w):
            continue
        part = np.arange(start, end)
        y = np.zeros((len(part), w.shape[2]))
        y[there[part]] = x[x_rows[part[there[part]]]] @ w[g - offset]
        y = y + (0 if bias is None else oracle.f64(bias)[g - offset])
        scale = 1 if row_scale is None else oracle.f64(row_scale)[part, None]
        rows[part] = scale * ACTIVATIONS[activation](y)
    out = np.zeros_like(rows) if existing_out is None else oracle.f64(existing_out).copy()
    stored = (y_rows >= 0) & (y_rows < len(out))
    out[y_rows[stored]] += rows[stored]
    return out


def lists(rng, rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of x that repeat and are out of range, and a permutation."""
    x_rows = rng.integers(-3, count + 3, rows).astype(np.int32)
    return x_rows, rng.permutation(rows).astype(np.int32)


def operands(rng, sizes, k, n, dtype="bfloat16", tail=37, count=500):
    """x, whose rows that nothing names are NaN, w, sizes and lists."""
    x_rows, y_rows = lists(rng, int(np.sum(sizes)) + tail, count)
    x = oracle.random(rng, (count, k), dtype)
    x = x.at[np.setdiff1d(np.arange(count), x_rows)].set(jnp.nan)
    w = oracle.random(rng, (len(sizes), k, n), dtype)
    return x, w, jnp.asarray(sizes, jnp.int32), x_rows, y_rows


def test_this_kernel_runs(rng):
    """And nothing permutes what it reads or writes."""
    a, b = (
        oracle.random(rng, (300, 1, 128), "bfloat16"),
        oracle.random(rng, (4, 128, 256), "bfloat16"),
    )
    rhs = jnp.asarray(rng.integers(0, 4, 1000), jnp.int32)
    lhs = jnp.asarray(rng.integers(0, 300, 1000), jnp.int32)
    f = jax.jit(lambda a, b, i, j: jgg.gather_mm(a, b, i, j, implementation="sm90"))
    jax.block_until_ready(f(a, b, lhs, rhs))
    with timing.kernels() as found:
        jax.block_until_ready(f(a, b, lhs, rhs))
    ran = {name for name, _ in found}
    assert any("RowsByListSm90Kernel" in name for name in ran), ran
    assert not any("GemmSm80" in name for name in ran), ran


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("tile", [32, 128, 256])
def test_groups_of_every_size(rng, dtype, transpose_w, tile):
    """0 to 300 rows; the tile is chosen by their average, and by N."""
    sizes = np.concatenate([np.arange(301), np.zeros(2600 if tile == 32 else 0, int)])
    sizes = rng.permutation(sizes)
    for k, n in ((64, 128 if tile < 256 else 264), (72, 120 if tile < 256 else 136)):
        x, w, *rest = operands(rng, sizes, k, n, dtype)
        want = expected(x, w, *rest)
        stored = w.swapaxes(1, 2) if transpose_w else w
        for result in ("float32", dtype):
            got = product(x, stored, *rest, transpose_w=transpose_w, dtype=result)
            oracle.assert_close(got, want, tolerance=SUMS if result == "float32" else None)
            assert not np.asarray(got)[rest[-1][-37:]].any()  # rows behind the last group


@pytest.mark.parametrize("given", ["x", "y", "neither of the rows"])
def test_one_list(rng, given):
    sizes = np.array([70, 0, 300, 9])
    x, w, sizes, x_rows, y_rows = operands(rng, sizes, 200, 136)
    if given == "x":
        oracle.assert_close(product(x, w, sizes, x_rows), expected(x, w, sizes, x_rows))
    else:
        x = oracle.random(rng, (len(y_rows), 200), "bfloat16")
        if given == "y":
            oracle.assert_close(
                product(x, w, sizes, None, y_rows), expected(x, w, sizes, None, y_rows)
            )
        else:
            far = jnp.full_like(y_rows, 2**31 - 1)
            assert not np.asarray(product(x, w, sizes, far)).any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mean", [12, 70, 200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_epilogue(rng, activation, mean, dtype):
    """Bias by group, scale by the row of the product, accumulation into the row of the result."""
    sizes = np.append(rng.integers(0, 2 * mean, 7), 0)
    x, w, sizes, x_rows, y_rows = operands(rng, sizes, 72, 272)
    columns = 136 if activation == "swiglu" else 272
    options = {"bias": oracle.random(rng, (8, 272), "bfloat16"),
               "row_scale": oracle.random(rng, x_rows.shape)}  # fmt: skip
    for old in (None, oracle.random(rng, (len(y_rows), columns), dtype)):
        options["existing_out"] = old
        got = product(
            x, w / 8, sizes, x_rows, y_rows, activation=activation, dtype=dtype, **options
        )
        want = expected(x, w / 8, sizes, x_rows, y_rows, activation=activation, **options)
        oracle.assert_close(got, want, tolerance=SUMS if dtype == "float32" else None)
    alone = product(x, w / 8, sizes, x_rows, y_rows, activation=activation, dtype=dtype)
    want = expected(x, w / 8, sizes, x_rows, y_rows, activation=activation)
    oracle.assert_close(alone, want, tolerance=SUMS if dtype == "float32" else None)


@pytest.mark.parametrize("mean", [10, 200])
def test_rows_that_are_not_stored(rng, mean):
    x, w, sizes, x_rows, y_rows = operands(rng, rng.integers(0, 2 * mean, 9), 64, 136)
    old = oracle.random(rng, (len(y_rows), 136), "bfloat16")
    left = rng.random(len(y_rows)) < 0.3
    y_rows[left] = rng.choice([-1, len(y_rows), -(2**31), 2**31 - 1], left.sum())
    got = product(x, w, sizes, x_rows, y_rows, existing_out=old)
    oracle.assert_close(got, expected(x, w, sizes, x_rows, y_rows, existing_out=old))
    untouched = np.setdiff1d(np.arange(len(y_rows)), y_rows)
    np.testing.assert_array_equal(oracle.f64(got)[untouched], oracle.f64(old)[untouched])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_missing_rows_are_zeros_whatever_the_matrix(rng, bad, dtype):
    sizes = np.array([5, 130, 300, 60])
    x, w, sizes, x_rows, y_rows = operands(rng, sizes, 64, 136)
    w = w.at[1].set(bad)
    got = oracle.f64(product(x, w, sizes, x_rows, y_rows, dtype=dtype))[y_rows]
    there = (x_rows >= 0) & (x_rows < len(x))
    assert not got[~there].any()
    assert not np.isfinite(got[5:135][there[5:135]]).any()
    assert np.isfinite(got[:5]).all()
    assert np.isfinite(got[135:]).all()


def test_columns_at_any_alignment(rng):
    for n in (8, 100, 133, 257):
        x, w, *rest = operands(rng, np.array([40, 3, 0, 170]), 72, n)
        for result in ("float32", "bfloat16"):
            got = product(x, w.swapaxes(1, 2), *rest, transpose_w=True, dtype=result)
            oracle.assert_close(got, expected(x, w, *rest))


def test_some_of_the_groups(rng):
    sizes = rng.integers(0, 90, 12)
    x, w, sizes, x_rows, y_rows = operands(rng, sizes, 64, 72)
    for offset in (-2, 3, 10):
        got = product(x, w[:4], sizes, x_rows, y_rows, jnp.int32(offset))
        oracle.assert_close(got, expected(x, w[:4], sizes, x_rows, y_rows, offset))


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pairs", [7, 900, 5000])
def test_gather_mm(rng, m, dtype, pairs):
    a, b = oracle.random(rng, (80, m, 72), dtype), oracle.random(rng, (6, 72, 136), dtype)
    lhs, rhs = rng.integers(-2, 82, pairs), rng.integers(-1, 7, pairs)
    a = a.at[np.setdiff1d(np.arange(80), lhs)].set(jnp.nan)
    for ordered in (False, True):
        rhs = np.sort(rhs) if ordered else rhs
        f = lambda a, b, o=ordered, j=rhs, **k: jgg.gather_mm(a, b, lhs, j, sorted_indices=o, **k)
        got = jax.jit(functools.partial(f, implementation="sm90"))(a, b)
        oracle.assert_close(got, oracle.gather_mm(jnp.nan_to_num(a), b, lhs, rhs))
        loss = lambda a, b, f=f, **k: jnp.sin(f(a, b, **k).astype("float32") / 9).sum()
        grads = jax.jit(jax.grad(functools.partial(loss, implementation="sm90"), (0, 1)))(a, b)
        wants = jax.grad(functools.partial(loss, implementation="reference"), (0, 1))(a, b)
        for one, want in zip(grads, wants, strict=True):
            oracle.assert_close(one, want, tolerance=1e-2)


def test_vmap(rng):
    a, b = (
        oracle.random(rng, (3, 40, 1, 64), "bfloat16"),
        oracle.random(rng, (6, 64, 72), "bfloat16"),
    )
    rhs = rng.integers(-1, 7, (3, 40))
    f = lambda a, i: jgg.gather_mm(a, b, None, i, implementation="sm90")
    for got, x, i in zip(jax.jit(jax.vmap(f))(a, rhs), a, rhs, strict=True):
        oracle.assert_close(got, oracle.gather_mm(x, b, None, i))


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_recycled_memory(rng, garbage):
    """Every row of the result is written, and nothing is left in shared memory by other kernels."""
    x, w, *rest = operands(rng, np.array([1, 0, 70, 9]), 72, 136)
    want = expected(x, w, *rest)
    for _ in range(5):
        blocks = [jnp.full((len(rest[-1]) * 136 + i,), garbage, "bfloat16") for i in range(64)]
        bad = [jnp.full_like(v, garbage) for v in (x, w)]
        jax.block_until_ready((blocks, product(*bad, *rest)))
        del blocks
        oracle.assert_close(product(x, w, *rest), want)


def test_same_bits(rng):
    x, w, *rest = operands(rng, rng.multinomial(4096, np.ones(16) / 16), 512, 384)
    first = oracle.f64(product(x, w, *rest))
    for _ in range(50):
        np.testing.assert_array_equal(oracle.f64(product(x, w, *rest)), first)


def test_command_buffer_replay_with_other_indices(rng):
    a, b = oracle.random(rng, (80, 1, 72), "bfloat16"), oracle.random(rng, (6, 72, 136), "bfloat16")

    def twice(a, b, lhs, rhs):
        out = jgg.gather_mm(a, b, lhs, rhs, implementation="sm90")
        return jnp.tanh(out), jgg.gather_mm(a, b, rhs, rhs, implementation="sm90")

    index = lambda: jnp.asarray(rng.integers(-1, 7, 300), jnp.int32)
    options = {"xla_gpu_graph_min_graph_size": 1}
    compiled = jax.jit(twice).lower(a, b, index(), index()).compile(compiler_options=options)
    for _ in range(5):
        lhs, rhs = index(), index()
        first, second = compiled(a, b, lhs, rhs)
        oracle.assert_close(first, np.tanh(oracle.gather_mm(a, b, lhs, rhs)), tolerance=1e-2)
        oracle.assert_close(second, oracle.gather_mm(a, b, rhs, rhs))


def test_rows_beyond_four_gib(rng):
    """Rows of x, and of the result, that begin beyond 2**32 bytes."""
    count, k, n = 2**19 + 77, 4096, 8
    x = jax.random.normal(jax.random.key(0), (count, k), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (2, k, n), jnp.bfloat16)
    x_rows = np.array([count - 1, 5, 2**19, count, 0], np.int32)
    y_rows, sizes = np.array([4, 0, 3, 1, 2], np.int32), jnp.array([2, 2])
    got = product(x, w, sizes, x_rows, y_rows)
    near = np.zeros((5, k))
    near[[0, 1, 2]] = oracle.f64(x[x_rows[:3]])
    want = np.zeros((5, n))
    want[y_rows] = oracle.grouped_mm(near, w, [2, 2])
    oracle.assert_close(got, want, k=k)
    t, n = 2**19 + 77, 4096
    x, w = oracle.random(rng, (9, 64), "bfloat16"), oracle.random(rng, (1, 64, n), "bfloat16")
    to = jnp.arange(t, dtype="int32")[::-1]
    got = product(x, w, jnp.array([t]), jnp.arange(t, dtype="int32") % 9, to)
    for t_row in (0, 1, t // 2, t - 1):
        oracle.assert_close(got[t - 1 - t_row], oracle.f64(x[t_row % 9]) @ oracle.f64(w[0]))


@pytest.mark.parametrize(
    ("dtype", "kernel", "rows", "message"),
    [
        ("float32", "sm90", 6, "x_rows and y_rows need sm90: rows by list of split operands"),
        ("bfloat16", "sm80", 6, "x_rows and y_rows need sm90: kernel is 'sm80'"),
        ("bfloat16", "sm90", 5, "groups are of 6 rows of x and 5 of the result, expected as many"),
    ],
)
def test_errors(dtype, kernel, rows, message):
    x, w = jnp.ones((4, 64), dtype), jnp.ones((2, 64, 72), dtype)
    x_rows, sizes = jnp.zeros((6,), "int32"), jnp.array([1, 2])
    mm = Mm(rows=rows, out_dtype=dtype, implementation=kernel)
    f = lambda x, w: call(x, w, segments.sizes(sizes), mm, x_rows=x_rows)
    with pytest.raises((RuntimeError, ValueError), match=f"jgg.mm: {message}"):
        jax.block_until_ready(jax.jit(f)(x, w))
