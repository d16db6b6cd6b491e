"""The Hopper kernel's own shapes: every tile, rests of every length, cuts at every residue."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_segmented_mm
from device_runs import (
    assert_on_sm90,
    names,
    needs_hopper,
    run,
)
from nvfp4_grouped_problems import along_t, wgrad_oracle
from test_grouped_mm import SHAPES

import jax_groupgemm as jgg
from jax_groupgemm._kernels import dense, tuned

pytestmark = [
    pytest.mark.gpu,
    needs_hopper,
]


def product(x, w, sizes, **options):
    return jax.jit(lambda x, w, s: jgg.grouped_mm(x, w, s, implementation="sm90", **options))(
        x, w, jnp.asarray(sizes, jnp.int32)
    )


@pytest.mark.parametrize("implementation", [None, "sm90"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_this_kernel_runs(rng, monkeypatch, dtype, implementation):
    """What it cannot do would run on sm80, and be as right."""
    monkeypatch.setattr(dense, "_splitting_pays", lambda *_, **__: True)
    x, w = oracle.random(rng, (1024, 128), dtype), oracle.random(rng, (4, 128, 256), dtype)
    sizes = jnp.array([300, 0, 500, 200])
    spans = jnp.array([[0, 77], [77, 1000]])
    for f, *args in (
        (lambda x, w, s: jgg.grouped_mm(x, w, s, implementation=implementation), x, w, sizes),
        (lambda x, s: jgg.segmented_mm(x, x, s, transpose_a=True, implementation=implementation),
         jnp.concatenate([x, x], 1), spans),
    ):  # fmt: skip
        ran = names(f, *args)
        assert any("GemmSm90Kernel" in name for name in ran), ran
        assert not any("GemmSm80" in name for name in ran), ran


def test_this_kernel_runs_shapes_of_the_value_tests(rng):
    """In either dtype and all layouts, by name and by itself."""
    shapes = [(t, k, n, g) for t, k, n, g in SHAPES if k % 8 == n % 8 == 0]
    cuts = [shape for shape in test_segmented_mm.SHAPES if not any(size % 8 for size in shape)]
    assert len(shapes) >= 3
    assert len(cuts) >= 2
    products, wants = [], []
    for dtype, transpose in itertools.product(("bfloat16", "float16"), (False, True)):
        for t, k, n, g in shapes:
            x, w = (oracle.host_random(rng, shape, dtype) for shape in ((t, k), (g, k, n)))
            sizes = oracle.random_sizes(rng, g, t)
            f = functools.partial(jgg.grouped_mm, transpose_w=transpose)
            products.append((f, x, w.swapaxes(1, 2) if transpose else w, sizes))
            wants.append(oracle.grouped_mm(x, w, sizes))
        for (m, n, k), transpose_b in itertools.product(cuts, (False, True)):
            a, b = oracle.host_random(rng, (m, k), dtype), oracle.host_random(rng, (k, n), dtype)
            spans = test_segmented_mm.spans(k)
            f = functools.partial(jgg.segmented_mm, transpose_a=transpose, transpose_b=transpose_b)
            products.append((f, a.T if transpose else a, b.T if transpose_b else b, spans))
            wants.append(oracle.segmented_mm(a, b, spans))
    functions, operands = [p[0] for p in products], [p[1:] for p in products]
    for implementation in (None, "sm90"):
        f = lambda operands, i=implementation: [
            f(*args, implementation=i) for f, args in zip(functions, operands, strict=True)
        ]
        out, kernels = run(jax.jit(f), operands)
        assert_on_sm90(kernels, len(wants))
        for got, want in zip(out, wants, strict=True):
            oracle.assert_close(got, want, k=512)


# Sums of tensor cores are truncated.
SUMS = 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("mean", [8, 30, 70, 130, 300, 700])
def test_tiles(rng, dtype, transpose_w, mean):
    """Tiles are chosen by the mean number of rows; narrow ones of 8 to 144 rows by each group."""
    for k, n in ((64, 128), (72, 136), (200, 520)):
        sizes = np.append(rng.integers(0, 2 * mean, 11), [0, mean])
        t = int(sizes.sum()) + 37
        x, w = oracle.random(rng, (t, k), dtype), oracle.random(rng, (len(sizes), k, n), dtype)
        want = oracle.grouped_mm(x, w, sizes)
        stored = w.swapaxes(1, 2) if transpose_w else w
        for result in ("float32", dtype):
            got = product(x, stored, sizes, transpose_w=transpose_w, preferred_element_type=result)
            oracle.assert_close(got, want, tolerance=SUMS if result == "float32" else None)
            assert not np.asarray(got[-37:]).any()


@pytest.mark.parametrize("tile", [256, 288])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_many_tiles(rng, tile, transpose_w):
    """Several for every cluster, of which one's last rows are stored while the next is multiplied:
    groups of none to 300 rows, one to three slices of k, the last 8 columns of two alone."""
    sizes = rng.integers(0, 300, 150)
    sizes[rng.integers(0, 150, 30)] = 0
    for k, n in ((40, 264), (136, 136)):
        x = oracle.random(rng, (int(sizes.sum()) + 5, k), "bfloat16")
        w = oracle.random(rng, (len(sizes), k, n), "bfloat16")
        with tuned.forced(tile):
            out = product(x, w.swapaxes(1, 2) if transpose_w else w, sizes, transpose_w=transpose_w)
        oracle.assert_close(out, oracle.grouped_mm(x, w, sizes), k=k)


@pytest.mark.parametrize("tile", [128, 256, 288])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bands_of_rows(rng, tile, dtype):
    """Groups of one to thirteen tiles of rows, and a rest of zeros of as many. Of an odd number of
    columns of tiles the last one's are a pair's, one above the other; of an odd number of rows the
    last has no other."""
    sizes = np.array([3300, 0, 300, 1, 1500, 700, 2050, 256])
    for n in (264, 384, 520):
        x = oracle.random(rng, (int(sizes.sum()) + 1800, 72), dtype)
        w = oracle.random(rng, (len(sizes), 72, n), dtype)
        with tuned.forced(tile):
            out = product(x, w, sizes)
        oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))
        assert not np.asarray(out[-1800:]).any()


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize(("m", "n"), [(2888, 264), (1032, 384), (320, 520), (456, 136)])
def test_rows_of_matrices_shared_out(rng, transpose_a, m, n):
    """Not a multiple of 256 of them, so that tiles have 64 less, here and there; bands of twelve
    tiles, pairs as above."""
    cuts = np.array([0, 70, 70, 200, 201, 400])
    spans = np.stack([cuts[:-1], cuts[1:]], 1).astype(np.int32)
    a, b = oracle.random(rng, (m, 400), "bfloat16"), oracle.random(rng, (400, n), "bfloat16")
    for result in ("bfloat16", "float32"):
        f = functools.partial(
            jgg.segmented_mm,
            transpose_a=transpose_a,
            preferred_element_type=result,
            implementation="sm90",
        )
        with tuned.forced(256):
            out = jax.jit(f)(a.T if transpose_a else a, b, spans)
        tolerance = SUMS if result == "float32" else None
        oracle.assert_close(out, oracle.segmented_mm(a, b, spans), tolerance=tolerance, k=200)


def ragged_k(rng):
    """Sizes of none to 200, so of up to four slices, of enough matrices for large tiles."""
    sizes = rng.integers(0, 200, 330)
    sizes[rng.integers(0, 330, 30)] = 0
    return sizes


@pytest.mark.parametrize("result", [None, "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_many_tiles_of_ragged_k(rng, dtype, transpose_a, result):
    """Likewise, along k; float32 results leave by another way."""
    cuts = np.append(0, np.cumsum(ragged_k(rng)))
    spans = np.stack([cuts[:-1], cuts[1:]], 1).astype(np.int32)
    rows = int(cuts[-1])
    a, b = oracle.random(rng, (130, rows), dtype), oracle.random(rng, (rows, 200), dtype)
    f = jax.jit(
        lambda a, b, s: jgg.segmented_mm(
            a, b, s, transpose_a=transpose_a, preferred_element_type=result, implementation="sm90"
        )
    )
    out = f(a.T if transpose_a else a, b, spans)
    want = oracle.segmented_mm(a, b, spans)
    oracle.assert_close(out, want, tolerance=SUMS if result else None, k=200)


@pytest.mark.parametrize("columns", [200, 198])
def test_many_scaled_and_accumulated_tiles(rng, columns):
    """float32 results, which TMA adds to what is there, or warps where it cannot. A matrix without
    rows keeps its bits."""
    sizes = ragged_k(rng)
    rows = int(sizes.sum()) + 9
    x, dy = along_t(rng, columns, sizes, rows), along_t(rng, 130, sizes, rows)
    alpha = jnp.asarray(rng.uniform(0.5, 2, len(sizes)), jnp.float32)
    old = np.array(oracle.random(rng, (len(sizes), 130, columns)))
    empty = sizes == 0
    old[empty, 0], old[empty, 1] = -0.0, np.nan
    f = jax.jit(functools.partial(jgg.nvfp4_grouped_wgrad, implementation="sm90"))
    want = wgrad_oracle(x, dy, sizes) * oracle.f64(alpha)[:, None, None]
    got = f(x, dy, jnp.asarray(sizes), alpha=alpha)
    oracle.assert_close(got, want, tolerance=SUMS)
    assert not np.asarray(got)[empty].any()
    got = np.asarray(f(x, dy, jnp.asarray(sizes), alpha=alpha, existing_out=jnp.asarray(old)))
    oracle.assert_close(got[~empty], (want + old)[~empty], tolerance=SUMS)
    np.testing.assert_array_equal(got[empty].view(np.int32), old[empty].view(np.int32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rests_of_every_length(rng, bad):
    """Groups of 1 to 160 rows between rows of garbage, which must not leak."""
    sizes = np.arange(1, 161)
    weight = np.arange(161) % 2 == 0
    rows = np.concatenate([sizes, [50]])
    x = np.array(oracle.random(rng, (int(rows.sum()), 64)))
    garbage = np.repeat(~weight, rows)
    w = oracle.random(rng, (len(rows), 64, 72), "bfloat16")
    clean = product(jnp.asarray(np.where(garbage[:, None], 0, x), "bfloat16"), w, rows)
    dirty = product(jnp.asarray(np.where(garbage[:, None], bad, x), "bfloat16"), w, rows)
    np.testing.assert_array_equal(oracle.f64(clean)[~garbage], oracle.f64(dirty)[~garbage])
    want = oracle.grouped_mm(np.where(garbage[:, None], 0, x).astype("bfloat16"), w, rows)
    oracle.assert_close(clean, want)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("m", "n"), [(40, 72), (128, 136), (264, 520)])
def test_cuts_at_every_residue(rng, dtype, transpose_a, m, n):
    """Segments that begin and end at every residue of 16, some empty, with NaN just outside."""
    k = 1024
    cuts = np.cumsum(rng.integers(1, 32, 33))
    cuts = cuts[cuts < k]
    spans = np.stack([cuts[:-1], cuts[1:]], 1)
    spans = np.concatenate([[[0, 0]], spans, [[7, 7], [100, 40], [3, 700], [k - 5, k + 9]]])
    a, b = oracle.random(rng, (m, k), dtype), oracle.random(rng, (k, n), dtype)
    f = jax.jit(
        lambda a, b, s: jgg.segmented_mm(
            a, b, s, transpose_a=transpose_a, preferred_element_type="float32",
            implementation="sm90",
        )
    )  # fmt: skip
    stored = a.T if transpose_a else a
    oracle.assert_close(
        f(stored, b, spans.astype(np.int32)), oracle.segmented_mm(a, b, spans), tolerance=SUMS
    )
    for start, end in ((161, 200), (33, 97), (512, 1000)):
        inside = (np.arange(k) >= start) & (np.arange(k) < end)
        poisoned = jnp.where(inside, a, jnp.nan), jnp.where(inside[:, None], b, jnp.nan)
        got = f(poisoned[0].T if transpose_a else poisoned[0], poisoned[1],
                np.array([[start, end]], np.int32))  # fmt: skip
        want = oracle.segmented_mm(a, b, [[start, end]])
        oracle.assert_close(got, want, tolerance=SUMS)


def segments_of_all_residues(rng) -> tuple[np.ndarray, int]:
    """256 segments, of all residues of start and end mod 16, with rows before, between and behind
    them, and K, a multiple of 8. Many are shorter than 16 rows, some longer than two slices."""
    spans, end = [], 0
    for first, last in rng.permutation(list(itertools.product(range(16), repeat=2))):
        start = end + 1 + (first - end - 1) % 16
        length = (last - first) % 16 + 16 * rng.choice([0, 0, 1, 4, 8])
        end = start + (length or 16)
        spans.append((start, end))
    return np.array(spans, np.int32), int(end) // 8 * 8 + 8


# M, N, and in how many calls: tiles of 32 rows, 64, 128 and 256; of float32 of 64 and 128, in pairs
# and alone.
AROUND_NAN = [(16, 72, 1), (40, 72, 4), (104, 120, 1), (264, 136, 1)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", SUMS), ("float32", 1.5e-6)])
def test_nan_around_cuts_at_all_residues(rng, dtype, tolerance):
    """NaN in every row that is in no segment, of both operands, in every layout."""
    spans, k = segments_of_all_residues(rng)
    assert len({(start, end) for start, end in (spans % 16).tolist()}) == 256
    assert (np.diff([0, *spans.ravel(), k]) > 0).all()
    assert (np.diff(spans) < 16).sum() > 64
    a, b = (oracle.host_random(rng, (k, size), dtype) for size in (264, 136))
    want = oracle.segmented_mm(a.T, b, spans)
    outside = np.ones(k, bool)
    for start, end in spans:
        outside[start:end] = False
    a[outside] = b[outside] = np.nan
    cases = list(itertools.product(AROUND_NAN, (False, True), (False, True)))
    operands = [
        (a[:, :m] if transpose_a else a[:, :m].T, b[:, :n].T if transpose_b else b[:, :n])
        for (m, n, _), transpose_a, transpose_b in cases
    ]

    def f(operands, spans):
        return [
            jgg.segmented_mm(
                left, right, spans[i::calls], transpose_a=transpose_a, transpose_b=transpose_b,
                preferred_element_type="float32", implementation="sm90",
            )
            for (left, right), ((_, _, calls), transpose_a, transpose_b) in zip(
                operands, cases, strict=True
            )
            for i in range(calls)
        ]  # fmt: skip

    out, kernels = run(jax.jit(f), operands, spans)
    assert_on_sm90(kernels, len(out))
    wants = [want[i::calls, :m, :n] for (m, n, calls), _, _ in cases for i in range(calls)]
    for got, expected in zip(out, wants, strict=True):
        oracle.assert_close(got, expected, tolerance=tolerance)


FLOAT32 = [("highest", 1e-6), ("tensorfloat32", 5e-5)]


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), FLOAT32)
def test_float32_rows(rng, precision, tolerance, transpose_w):
    """Operands split into bfloat16 planes; K is padded to whole slices."""
    for k, n, mean in ((64, 128, 20), (72, 136, 70), (200, 520, 130), (2048, 64, 300)):
        sizes = np.append(rng.integers(0, 2 * mean, 11), [0, mean])
        t = int(sizes.sum()) + 37
        x, w = oracle.random(rng, (t, k)), oracle.random(rng, (len(sizes), k, n))
        x = x.at[-37:].set(jnp.nan)
        want = oracle.grouped_mm(x.at[-37:].set(0), w, sizes)
        stored = w.swapaxes(1, 2) if transpose_w else w
        got = product(x, stored, sizes, transpose_w=transpose_w, precision=precision)
        oracle.assert_close(got, want, tolerance=tolerance * max(1, k / 512) ** 0.5)
        assert not np.asarray(got[-37:]).any()


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), FLOAT32)
def test_float32_cuts(rng, precision, tolerance, transpose_a, transpose_b):
    k, m, n = 1027, 136, 264
    cuts = np.cumsum(rng.integers(1, 60, 40))
    cuts = cuts[cuts < k]
    spans = np.stack([cuts[:-1], cuts[1:]], 1)
    spans = np.concatenate([[[0, 0]], spans, [[7, 7], [100, 40], [3, 700], [k - 5, k + 9]]])
    a, b = oracle.random(rng, (m, k)), oracle.random(rng, (k, n))
    f = jax.jit(
        lambda a, b, s: jgg.segmented_mm(
            a, b, s, transpose_a=transpose_a, transpose_b=transpose_b, precision=precision,
            implementation="sm90",
        )
    )  # fmt: skip
    for start, end in [(0, k), (161, 200), (33, 97), (512, 1000), (960, k)]:
        inside = (np.arange(k) >= start) & (np.arange(k) < end)
        bad = jnp.where(inside, a, jnp.nan), jnp.where(inside[:, None], b, jnp.nan)
        here = np.clip(spans, start, end).astype(np.int32)
        got = f(bad[0].T if transpose_a else bad[0], bad[1].T if transpose_b else bad[1], here)
        oracle.assert_close(got, oracle.segmented_mm(a, b, here), tolerance=1.5 * tolerance)


def test_float32_of_long_k(rng):
    """Sums over K = 7168, and over a segment of 65 536 rows: taken whole, and in parts."""
    k, rows = 7168, 65_536
    sizes = [170, 0, 100]
    shapes = (300, k), (3, k, 264), (rows, 136), (rows, 264)
    x, w, a, b = (oracle.host_random(rng, shape, "float32") for shape in shapes)
    one = np.array([[0, rows]], np.int32)
    many = np.concatenate([one, 100 * np.arange(11)[:, None] + [[3, 70]]]).astype(np.int32)

    # Sizes are operands: of constants XLA would see that some products are the same.
    def f(x, w, w_t, a, a_t, b, sizes, all_rows, one, many, precision):
        same = {"precision": precision, "implementation": "sm90"}
        product = functools.partial(jgg.grouped_mm, x, group_sizes=sizes, **same)
        of_rows = lambda w: jgg.grouped_mm(a, w, all_rows, **same)
        segmented = functools.partial(jgg.segmented_mm, **same)
        return [
            product(w),
            product(w_t, transpose_w=True),
            jax.vjp(of_rows, jnp.zeros((1, 136, 264)))[1](b)[0],
            segmented(a, b, one, transpose_a=True),
            segmented(a_t, b, one),
            segmented(a, b, many, transpose_a=True),
            segmented(a_t, b, many),
        ]

    operands = x, w, w.swapaxes(1, 2), a, a.T, b, np.array(sizes), np.array([rows]), one, many
    exact, sums = oracle.grouped_mm(x, w, sizes), oracle.segmented_mm(a.T, b, many)
    for precision, tolerance in FLOAT32:
        out, kernels = run(jax.jit(functools.partial(f, precision=precision)), *operands)
        assert_on_sm90(kernels, 7)
        for got in out[:2]:
            oracle.assert_close(got, exact, tolerance=tolerance * (k / 512) ** 0.5)
        for got in out[2:]:
            oracle.assert_close(got[0], sums[0], tolerance=tolerance * (rows / 512) ** 0.5)
            oracle.assert_close(got[1:], sums[1 : len(got)], tolerance=1.5 * tolerance)
        assert [len(got) for got in out[2:]] == [1, 1, 1, 12, 12]


def test_same_bits(rng):
    sizes = jnp.asarray(rng.multinomial(4096, np.ones(16) / 16), jnp.int32)
    x, w = (
        oracle.random(rng, (4096, 512), "bfloat16"),
        oracle.random(rng, (16, 512, 384), "bfloat16"),
    )

    def spread(x, w):
        return jgg.grouped_mm(x, w, sizes, implementation="sm90").astype("float32").std()

    f = jax.jit(jax.value_and_grad(spread, (0, 1)))
    first = jax.tree.leaves(f(x, w))
    for _ in range(50):
        for one, other in zip(first, jax.tree.leaves(f(x, w)), strict=True):
            np.testing.assert_array_equal(oracle.f64(one), oracle.f64(other))
