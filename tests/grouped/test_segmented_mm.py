"""segmented_mm: any set of segments, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jax_groupgemm as jgg

# Over K = 100: overlapping, repeated, unordered, reversed, out of range, empty, odd cuts.
SEGMENTS = np.array(
    [[0, 40], [30, 70], [30, 70], [90, 100], [13, 17], [50, 20], [60, 60], [95, 130], [-20, 5],
     [0, 100], [-9, -2], [100, 100], [200, 300], [99, 100]], np.int32,
)  # fmt: skip
SHAPES = [  # M, N, K; those that are multiples of 8 TMA can take
    (24, 40, 96),
    (1, 1, 100),
    (65, 33, 100),
    (130, 7, 100),
    (136, 64, 512),
]


def spans(k) -> np.ndarray:
    """The same, over another K."""
    return SEGMENTS * k // 100


def stored(a, transpose):
    return a.T if transpose else a


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.one_in(14)
def test_values(rng, implementation, shape, dtype, transpose_a, transpose_b):
    m, n, k = shape
    a, b, segments = oracle.random(rng, (m, k), dtype), oracle.random(rng, (k, n), dtype), spans(k)
    out = jgg.segmented_mm(
        stored(a, transpose_a), stored(b, transpose_b), segments,
        transpose_a=transpose_a, transpose_b=transpose_b, implementation=implementation,
    )  # fmt: skip
    assert out.dtype == dtype
    oracle.assert_close(out, oracle.segmented_mm(a, b, segments))


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.one_in(3)
def test_gradients_accumulate_overlaps(rng, implementation, transpose_a, transpose_b):
    a, b = oracle.random(rng, (24, 100)), oracle.random(rng, (100, 20))
    ct = oracle.random(rng, (len(SEGMENTS), 24, 20))

    def f(a, b):
        return jgg.segmented_mm(
            a, b, SEGMENTS, transpose_a=transpose_a, transpose_b=transpose_b,
            implementation=implementation,
        )  # fmt: skip

    da, db = jax.vjp(f, stored(a, transpose_a), stored(b, transpose_b))[1](ct)
    want_da, want_db = oracle.segmented_mm_grads(a, b, SEGMENTS, ct)
    oracle.assert_close(stored(da, transpose_a), want_da)
    oracle.assert_close(stored(db, transpose_b), want_db)


def test_bfloat16_gradients_sum_in_float32(rng, implementation):
    """Sixty-four equal segments: sums of bfloat16 would stop growing."""
    a, b = oracle.random(rng, (8, 16), "bfloat16"), oracle.random(rng, (16, 8), "bfloat16")
    segments = np.tile([[2, 14]], (64, 1))
    ct = oracle.random(rng, (64, 8, 8), "bfloat16")
    f = lambda a, b: jgg.segmented_mm(a, b, segments, implementation=implementation)
    da, db = jax.vjp(f, a, b)[1](ct)
    want_da, want_db = oracle.segmented_mm_grads(a, b, segments, ct)
    oracle.assert_close(da, want_da)
    oracle.assert_close(db, want_db)


def test_gaps_get_zero_gradient(rng, implementation):
    a, b = oracle.random(rng, (6, 50)), oracle.random(rng, (50, 5))
    segments = np.array([[3, 10], [20, 31]])
    f = lambda a, b: jgg.segmented_mm(a, b, segments, implementation=implementation)
    da, db = map(np.asarray, jax.vjp(f, a, b)[1](jnp.ones((2, 6, 5))))
    gap = np.r_[0:3, 10:20, 31:50]
    assert not da[:, gap].any()
    assert not db[gap].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_outside_a_segment_stays_outside(rng, implementation, bad):
    a, b = oracle.random(rng, (20, 64)), oracle.random(rng, (64, 20))
    segments = np.array([[0, 17], [18, 33], [40, 64]])
    f = lambda a, b: jgg.segmented_mm(a, b, segments, implementation=implementation)
    clean = np.asarray(f(a, b))
    for column in (17, 33, 39):  # just past an end, just before a start
        np.testing.assert_array_equal(f(a.at[:, column].set(bad), b), clean)
        np.testing.assert_array_equal(f(a, b.at[column].set(bad)), clean)
    out = np.asarray(f(a.at[:, 20].set(bad), b))
    np.testing.assert_array_equal(out[[0, 2]], clean[[0, 2]])
    assert not np.isfinite(out[1]).any()


@pytest.mark.parametrize("leading", [(), (3,), (2, 4), (2, 0)])
@pytest.mark.one_in(3)
def test_leading_axes(rng, implementation, leading):
    a, b = oracle.random(rng, (5, 30)), oracle.random(rng, (30, 4))
    segments = rng.integers(-5, 40, (*leading, 2))
    out = jgg.segmented_mm(a, b, segments, implementation=implementation)
    assert out.shape == (*leading, 5, 4)
    oracle.assert_close(out, oracle.segmented_mm(a, b, segments))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32", "int32"])
@pytest.mark.one_in(3)
def test_segment_dtypes(rng, implementation, dtype):
    a, b = oracle.random(rng, (5, 120)), oracle.random(rng, (120, 4))
    segments = np.array([[0, 100], [100, 120], [120, 127], [5, 3]], dtype)
    out = jgg.segmented_mm(a, b, segments, implementation=implementation)
    oracle.assert_close(out, oracle.segmented_mm(a, b, segments))


def test_int64_segments_and_float64(rng):
    with jax.enable_x64(True):
        a, b = oracle.random(rng, (5, 30), "float64"), oracle.random(rng, (30, 4), "float64")
        segments = np.array([[0, 2**40], [-(2**40), 20], [2**33, 2**34]])
        out = jgg.segmented_mm(a, b, segments)
        assert out.dtype == "float64"
        oracle.assert_close(out, oracle.segmented_mm(a, b, segments))


@pytest.mark.parametrize("zero", ["M", "K", "N", "S"])
@pytest.mark.one_in(6)
def test_zero_sized(implementation, zero):
    m, k, n, s = (0 if letter == zero else 5 for letter in "MKNS")
    segments = np.tile([[0, 3]], (s, 1))
    f = lambda a, b: jgg.segmented_mm(a, b, segments, implementation=implementation)
    out, vjp = jax.vjp(f, jnp.ones((m, k)), jnp.ones((k, n)))
    assert out.shape == (s, m, n)
    assert not np.asarray(out).any()
    assert [g.shape for g in vjp(out)] == [(m, k), (k, n)]


def test_second_order(rng):
    a, b = oracle.random(rng, (3, 12)), oracle.random(rng, (12, 4))
    segments = np.array([[0, 7], [5, 12], [5, 5]])
    f = lambda a, b: jnp.sin(jgg.segmented_mm(a, b, segments))
    check_grads(f, (a, b), order=2, modes=("fwd", "rev"), atol=5e-2, rtol=5e-2)


def test_is_the_weight_gradient_of_grouped_mm(rng, implementation):
    x, w, ct = (oracle.random(rng, s) for s in ((40, 9), (3, 9, 7), (40, 7)))
    sizes = jnp.array([10, 0, 25])
    f = lambda w: jgg.grouped_mm(x, w, sizes, implementation=implementation)
    ends = jnp.cumsum(sizes)
    spans = jnp.stack([ends - sizes, ends], axis=1)
    dw = jgg.segmented_mm(x, ct, spans, transpose_a=True, implementation=implementation)
    oracle.assert_close(dw, jax.vjp(f, w)[1](ct)[0])


def test_long_segments(rng, implementation):
    """More rows than 65 535, in one segment and in many."""
    k = 70_000
    a, b = oracle.random(rng, (4, k)), oracle.random(rng, (k, 4))
    segments = np.array([[0, k], [65_000, 66_001], [1, k - 1]])
    out = jgg.segmented_mm(a, b, segments, implementation=implementation)
    oracle.assert_close(out, oracle.segmented_mm(a, b, segments), k=k)


def test_many_segments(rng, implementation):
    segments = rng.integers(0, 300, (4096, 2))
    a, b = oracle.random(rng, (4, 300)), oracle.random(rng, (300, 4))
    f = lambda a, b: jgg.segmented_mm(a, b, segments, implementation=implementation)
    out, vjp = jax.vjp(f, a, b)
    oracle.assert_close(out, oracle.segmented_mm(a, b, segments))
    ct = oracle.random(rng, (4096, 4, 4))
    for got, want in zip(vjp(ct), oracle.segmented_mm_grads(a, b, segments, ct), strict=True):
        oracle.assert_close(got, want, tolerance=3e-6)


@settings(deadline=None)
@given(
    segments=st.lists(st.tuples(st.integers(-5, 60), st.integers(-5, 60)), min_size=1, max_size=6),
    k=st.sampled_from([0, 1, 17, 50]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_segments(segments, k, seed):
    rng = np.random.default_rng(seed)
    a, b = oracle.random(rng, (6, k)), oracle.random(rng, (k, 5))
    out = jgg.segmented_mm(a, b, np.array(segments))
    oracle.assert_close(out, oracle.segmented_mm(a, b, segments))


@pytest.mark.parametrize("which", ["a", "b"])
def test_batch_of_one_operand(rng, which):
    """Stored with its columns first it is folded into them: one product, and no copy."""
    a, b, spans = (
        oracle.random(rng, (3, 20)),
        oracle.random(rng, (4, 20)),
        np.array([[0, 9], [5, 20]]),
    )
    f = lambda a, b: jgg.segmented_mm(a, b, spans, transpose_b=True)
    many = oracle.random(rng, (2, *(a if which == "a" else b).shape))
    axes, args = ((0, None), (many, b)) if which == "a" else ((None, 0), (a, many))
    mapped = jax.vmap(f, axes)
    assert str(jax.make_jaxpr(mapped)(*args)).count("jgg_wgrad") == 1
    got = mapped(*args)
    for i in range(2):
        pair = (many[i], b) if which == "a" else (a, many[i])
        oracle.assert_close(got[i], f(*pair))
