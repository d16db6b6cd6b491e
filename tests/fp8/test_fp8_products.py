"""Products of FP8 operands against float64 products of what they stand for."""

import dataclasses
import functools

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device

T, G, N, K = 150, 3, 200, 264
SIZES = [64, 0, 70]
# The contract allows 2e-4. Sums on a CPU are closer. Tensor cores miss it by a tenth where codes
# are equally likely (docs/lab/fp8.md).
CONTRACT = 2e-4
CLOSE = 2e-6 if jax.default_backend() == "cpu" else 3e-4


def random_fp8(rng, shape, block, dtype=jnp.float8_e4m3fn):
    """Any codes and scales, none of them NaN."""
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes = np.where(codes & 0x7C == 0x7C, codes & 0x83, codes)
    of_matrix = (
        () if block is None else (-(-n // b) for n, b in zip(shape[-2:], block, strict=True))
    )
    scales = rng.uniform(0.5, 2, (*shape[:-2], *of_matrix))
    codes = jax.lax.bitcast_convert_type(jnp.asarray(codes), dtype)
    return quantized(codes, jnp.asarray(scales / 100, jnp.float32), block)


def quantized(codes, scales, block):
    return jgg.Quantized(codes, scales, mode="fp8", bits=8, group_size=None, block=block)  # pyright: ignore


BLOCKS = [(128, 128), None, (1, 128), (1, K), (64, 96)]


@pytest.mark.parametrize("w_block", BLOCKS)
@pytest.mark.parametrize("x_block", [(1, 128), (1, K)])
@pytest.mark.one_in(6)
def test_grouped_mm(rng, x_block, w_block):
    """Every block; one program of all sizes."""
    x, w = random_fp8(rng, (T, K), x_block), random_fp8(rng, (G, N, K), w_block)
    f = jax.jit(functools.partial(jgg.fp8_grouped_mm, preferred_element_type=jnp.float32))
    for sizes in (SIZES, [0, 0, 0], [1, 127, 3], [0, 150, 0], [60, -3, 99]):
        got = f(x, w, jnp.array(sizes))
        want = oracle.grouped_mm(fp8_oracle.values(x), fp8_oracle.values(w), sizes,
                                 transpose_w=True)  # fmt: skip
        oracle.assert_close(got, want, tolerance=CLOSE)
        covered = oracle.bounds(sizes, T)[-1][1]
        assert not np.asarray(got)[covered:].any()


def test_options(rng):
    """Bias, activation, row scale, offset and dtypes; x of e5m2."""
    x = random_fp8(rng, (T, K), (1, 128), jnp.float8_e5m2)
    x = dataclasses.replace(x, scales=x.scales * 1e-4, group_size=None)
    w = random_fp8(rng, (G, N, K), (128, 128))
    bias, row_scale = oracle.random(rng, (G, N)), oracle.random(rng, (T,))
    sizes = [5, 64, 0, 70]
    got = jgg.fp8_grouped_mm(
        x, w, jnp.array(sizes), group_offset=jnp.array([1]), bias=bias, activation="swiglu",
        row_scale=row_scale, preferred_element_type=jnp.float32,
    )  # fmt: skip
    y = oracle.grouped_mm(
        fp8_oracle.values(x), fp8_oracle.values(w), sizes, offset=1, transpose_w=True
    )
    ranges = oracle.local_bounds(sizes, T, G, 1)
    for (first, last), b in zip(ranges, oracle.f64(bias), strict=True):
        y[first:last] += b
    gate, up = np.split(y, 2, axis=1)
    want = gate / (1 + np.exp(-gate)) * up * oracle.f64(row_scale)[:, None]
    want[: ranges[0][0]] = want[ranges[-1][1] :] = 0
    oracle.assert_close(got, want, tolerance=2 * CLOSE)
    assert jgg.fp8_grouped_mm(x, w, jnp.array(sizes[1:])).dtype == jnp.bfloat16


def test_nan_stays_in_its_rows_and_groups(rng):
    x, w = oracle.random(rng, (T, K)), random_fp8(rng, (G, N, K), (128, 128))
    q = jgg.fp8_quantize(x.at[3, 5].set(jnp.nan).at[140:].set(jnp.inf))
    scales = w.scales.at[1].set(jnp.nan)  # of an empty group
    bad = quantized(w.weight, scales, w.block)
    out = np.asarray(jax.jit(jgg.fp8_grouped_mm)(q, bad, jnp.array(SIZES)))
    bad = np.isnan(out.astype(np.float32))
    assert bad[3].all()
    assert bad.sum() == N


@jax.jit
def wgrads(x, dy, sizes, existing, other_sizes):
    """Of rows that are quantized for these sizes, and what those stand for; alone, added to what
    exists, and with other sizes."""
    along_t = functools.partial(jgg.fp8_quantize, axis=0, group_sizes=sizes)
    x, dy = along_t(x), along_t(dy, format="e5m2")
    rows = jgg.dequantize(x), jgg.dequantize(dy)
    wgrad = functools.partial(jgg.fp8_grouped_wgrad, x, dy)
    return rows, wgrad(sizes), wgrad(sizes, existing_out=existing), wgrad(other_sizes)


def test_grouped_wgrad(rng):
    x, dy = oracle.random(rng, (T, K), "bfloat16"), oracle.random(rng, (T, N))
    existing = oracle.random(rng, (G, N, K))
    for sizes in (SIZES, [0, 0, 0], [1, 127, 3], [128, 0, 128]):
        others = jnp.array([sizes[0] + 1, *sizes[1:]])
        rows, got, more, bad = wgrads(x, dy, jnp.array(sizes), existing, others)
        rows, want = [oracle.f64(a) for a in rows], np.zeros((G, N, K))
        for g, (first, last) in enumerate(oracle.bounds(sizes, T)):
            want[g] = rows[1][first:last].T @ rows[0][first:last]
            if first == last:
                assert not np.asarray(got)[g].any()
                np.testing.assert_array_equal(more[g], existing[g])
        assert got.dtype == jnp.float32
        oracle.assert_close(got, want, tolerance=CLOSE)
        oracle.assert_close(more, want + oracle.f64(existing), tolerance=CLOSE)
        # Other sizes than those of the operands show in every group that has rows.
        for g, (first, last) in enumerate(oracle.bounds(others, T)):
            assert np.isnan(np.asarray(bad)[g]).all() == (first < last)


# ---- x is not quantized ------------------------------------------------------------------------


@pytest.mark.parametrize("transpose_w", [True, False])
@pytest.mark.parametrize("block", BLOCKS[:4])
@pytest.mark.one_in(7)
def test_grouped_qmm(rng, block, transpose_w):
    """Values, and gradients of x and of scales."""
    x = oracle.random(rng, (T, K), "bfloat16")
    w = random_fp8(rng, (G, N, K) if transpose_w else (G, K, N), block)
    ct = oracle.random(rng, (T, N))

    def f(x, scales):
        return jgg.grouped_qmm(
            x, quantized(w.weight, scales, block), jnp.array(SIZES), transpose_w=transpose_w,
            preferred_element_type=jnp.float32,
        )  # fmt: skip

    @jax.jit
    def derivatives(x, scales, tangent):
        got, vjp = jax.vjp(f, x, scales)
        return got, *vjp(ct), jax.jvp(lambda s: f(x, s), (scales,), (tangent,))[1]

    tangent = oracle.random(rng, w.scales.shape)
    got, dx, dscales, dot = derivatives(x, w.scales, tangent)
    values = fp8_oracle.values(w)
    values = values.swapaxes(1, 2) if transpose_w else values
    oracle.assert_close(got, oracle.grouped_mm(x, values, SIZES), tolerance=CLOSE)
    want_dx, dw = oracle.grouped_mm_grads(x, values, SIZES, ct)
    oracle.assert_close(dx, want_dx)
    terms = (dw.swapaxes(1, 2) if transpose_w else dw) * oracle.f64(w.weight)
    want = np.zeros(w.scales.shape)
    for g in range(G):
        for part, at in fp8_oracle.blocks_of(w.shape[1:], block):
            want[(g, *at)] = terms[g][part].sum()
    oracle.assert_close(dscales, want, tolerance=1e-5)
    moved = fp8_oracle.dequantize(np.asarray(w.weight), np.asarray(tangent), block)
    moved = moved.swapaxes(1, 2) if transpose_w else moved
    oracle.assert_close(dot, oracle.grouped_mm(x, moved, SIZES), tolerance=CLOSE)


@pytest.mark.parametrize("block", [(128, 128), None])
@pytest.mark.one_in(2)
def test_gather_qmm(rng, block):
    x, w = oracle.random(rng, (4, 3, K)), random_fp8(rng, (2, 2, N, K), block)
    lhs, rhs = jnp.array([0, 3, 1, 1, 9]), jnp.array([2, 0, 3, 2, 1])
    got = jgg.gather_qmm(x, w, lhs, rhs)
    want = oracle.gather_mm(x, fp8_oracle.values(w).swapaxes(-1, -2), lhs, rhs)
    oracle.assert_close(got, want, tolerance=CLOSE)


@pytest.mark.parametrize("block", [(1, 128), None])
@pytest.mark.one_in(2)
def test_quantized_matmul(rng, block):
    x, w = oracle.random(rng, (2, 5, K)), random_fp8(rng, (N, K), block)
    got = jgg.quantized_matmul(x, w)
    want = oracle.f64(x) @ fp8_oracle.values(w).T
    oracle.assert_close(got, want, tolerance=CLOSE)


@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.weekly)])
def test_moe_with_fp8_weights(rng, gradients):
    """The layer of dequantized weights, and its gradients."""
    tokens, experts, d, f = 40, 4, 136, 130
    x, weight = oracle.random(rng, (tokens, d)), oracle.random(rng, (tokens, 2))
    index = jnp.asarray(rng.integers(0, experts, (tokens, 2)))
    up, down = (
        fp8_oracle.stored(oracle.random(rng, s) / 12)
        for s in ((experts, 2 * f, d), (experts, d, f))
    )

    def layer(up, down):
        call = lambda x, weight: jgg.moe_mlp(x, up, down, index, weight, transpose_w=True)
        if not gradients:
            return [call(x, weight)]
        out, vjp = jax.vjp(call, x, weight)
        return out, *vjp(jnp.cos(out))

    got = jax.jit(layer)(up, down)
    want = jax.jit(layer)(*(jnp.asarray(fp8_oracle.values(q), jnp.float32) for q in (up, down)))
    for a, b in zip(got, want, strict=True):
        oracle.assert_close(a, b, tolerance=1e-5)


# ---- errors ------------------------------------------------------------------------------------

QX = quantized(jnp.ones((20, 40), "float8_e4m3fn"), jnp.ones((20, 1)), (1, 128))
QW = quantized(jnp.ones((3, 24, 40), "float8_e4m3fn"), jnp.ones((3, 1, 1)), (128, 128))
S = jnp.array([9, 0, 8])
ALONG_T = oracle.zeros_of(jgg.fp8_quantize, jnp.ones((20, 40)), axis=0, group_sizes=S)
ERRORS = [
    (
        lambda: jgg.fp8_grouped_mm(jnp.ones((20, 40)), QW, S), TypeError,  # pyright: ignore
        "jgg.fp8_grouped_mm: x must be a jgg.Quantized, got array float32[20,40]",
    ),
    (
        lambda: jgg.fp8_grouped_mm(QX, jgg.quantize(jnp.ones((3, 24, 64))), S), ValueError,
        "jgg.fp8_grouped_mm: w has mode 'affine', expected 'fp8'",
    ),
    (
        lambda: jgg.fp8_grouped_mm(ALONG_T, QW, S), ValueError,
        "jgg.fp8_grouped_mm: x has axis=-2, expected -1: blocks along K, the contracted axis of "
        "(T, K)",
    ),
    (
        lambda: jgg.fp8_grouped_mm(QX, QW[0], S), ValueError,
        "jgg.fp8_grouped_mm: w has shape (24, 40), expected 3 axes (G, N, K)",
    ),
    (
        lambda: jgg.fp8_grouped_mm(QX, jgg.quantize(jnp.ones((3, 40, 24)), mode="fp8"), S),
        ValueError,
        "jgg.fp8_grouped_mm: w has shape (3, 40, 24), expected (G, N, K) = (3, 40, 40) because x "
        "is (20, 40)",
    ),
    (
        lambda: jgg.fp8_grouped_mm(QX, QW, S, preferred_element_type=int), TypeError,
        "jgg.fp8_grouped_mm: preferred_element_type must be float32, bfloat16 or float16, got "
        "dtype int64",
    ),
    (
        lambda: jgg.fp8_grouped_mm(QX, QW, S, implementation="sm80"), ValueError,
        "jgg: implementation='sm80' cannot run: it runs on cuda, but this computation is lowered "
        "for another platform. Use implementation=None, or 'reference'.",
    ),
    (
        lambda: jgg.fp8_grouped_wgrad(QX, ALONG_T, S), ValueError,
        "jgg.fp8_grouped_wgrad: x has layout 'linear', expected 'grouped': fp8_quantize(x, axis=0, "
        "group_sizes=group_sizes)",
    ),
    (
        lambda: jgg.fp8_grouped_wgrad(
            ALONG_T, dataclasses.replace(ALONG_T, positions=jnp.arange(19)), S
        ),
        ValueError,
        "jgg.fp8_grouped_wgrad: dy has 19 rows, expected T = 20 as x",
    ),
    (
        lambda: jgg.fp8_grouped_wgrad(ALONG_T, ALONG_T, S[:2]), ValueError,
        "jgg.fp8_grouped_wgrad: x is stored as (40, 384), expected (40, 256) because it has 20 "
        "rows and group_sizes is (2,)",
    ),
    (
        lambda: jgg.fp8_grouped_wgrad(ALONG_T, ALONG_T, S, existing_out=jnp.ones((3, 40, 24))),
        ValueError,
        "jgg.fp8_grouped_wgrad: existing_out has shape (3, 40, 24), expected (G, N, K) = "
        "(3, 40, 40) because the result has this shape",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(ERRORS)))
def test_errors(case):
    if "sm80" in ERRORS[case][2] and jax.default_backend() != "cpu":
        pytest.skip("of a CPU")
    oracle.assert_raises(*ERRORS[case])
