"""x @ W with W quantized along its columns, on Hopper's kernels: what dx of a product is."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import needs_hopper, run
from qmm_problems import (
    ANY,
    FEW,
    LINEAR,
    PACKED,
    TRANSPOSED,
    every_scale_and_code,
)

import jax_groupgemm as jgg

pytestmark = [pytest.mark.gpu, needs_hopper]

FORMATS = [
    ("fp8", 8, 128), ("nvfp4", 4, 16), ("mxfp4", 4, 32), ("mxfp8", 8, 32),
    *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
    ("affine", 4, 32), ("affine", 4, 128), ("affine", 5, 32), ("affine", 6, 128),
]  # fmt: skip
EXACT = FORMATS[1:4]
# Groups of no row, of one, of 8 and 16 and one beside, of a tile and one beside.
FEW_ROWS = [1, 8, 0, 9, 16, 17, 3, 0, 40, 2, 7, 5, 1]
MANY_ROWS = [192, 0, 193, 1, 385, 16, 17, 160, 96, 97, 33, 64, 129]
SIZES = {"few": np.array(FEW_ROWS), "many": np.array(MANY_ROWS)}


def product(x, q, sizes, **options):
    return jgg.grouped_qmm(x, q, jnp.asarray(sizes), transpose_w=False, **options)


def assert_ran(kernels, count: int) -> None:
    found = collections.Counter(
        kind for name in kernels for kind in (TRANSPOSED, LINEAR, PACKED, FEW, ANY) if kind in name
    )
    assert found == {TRANSPOSED: count}, kernels


def weight(rng, mode, bits, group, groups, n, k, dtype="bfloat16"):
    scale = jnp.asarray(rng.uniform(0.5, 2, groups), "float32") if mode == "nvfp4" else None
    return oracle.random_quantized(rng, (groups, n, k), mode, bits, group, dtype, scale)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
def test_values(rng, mode, bits, group, rows):
    """Odd numbers of tiles along both axes; rows behind all groups are zeros. Few rows have stages
    that are part empty."""
    sizes = SIZES[rows]
    n, k = (64 * 9, 128 * 3) if group == 128 else (64 * 11, 64 * 5)
    q = weight(rng, mode, bits, group, len(sizes), n, k)
    x = oracle.random(rng, (sizes.sum() + 5, n), "bfloat16")
    f = lambda x, q: product(x, q, sizes, preferred_element_type="float32")
    (out, packed), kernels = run(jax.jit(lambda x, q, p: (f(x, q), f(x, p))), x, q, jgg.prepack(q))
    assert_ran(kernels, 2)
    want = oracle.grouped_qmm(x, q, sizes, transpose_w=False)
    oracle.assert_close(packed, want, k=n)
    oracle.assert_close(out, want, k=n)
    assert not np.asarray(packed)[sizes.sum() :].any()


AFFINE = [form for form in FORMATS if form[0] == "affine"]
HALVES = [("float16", *form) for form in FORMATS]


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(
    ("dtype", "mode", "bits", "group"), [*(("bfloat16", *form) for form in FORMATS), *HALVES]
)
def test_lines_of_any_size(rng, mode, bits, group, dtype, rows):
    """Weights as they are stored have lines that are no whole 64, of codes that are no whole 128;
    a global scale, an offset, and rows whose groups are elsewhere."""
    sizes, n = SIZES[rows], 200
    k = {128: 640, 64: 448}.get(group, 352)
    if bits % 4:
        k = 384
    q = weight(rng, mode, bits, group, 6, n, k, dtype)
    x = oracle.random(rng, (sizes.sum() + 5, n), dtype)
    f = lambda x, q: product(x, q, sizes, group_offset=3, preferred_element_type="float32")
    out, kernels = run(jax.jit(f), x, q)
    assert_ran(kernels, 1)
    begin, end = sizes[:3].sum(), sizes[:9].sum()
    want = oracle.grouped_qmm(x[begin:end], q, sizes[3:9], transpose_w=False)
    oracle.assert_close(out[begin:end], want, k=n)
    assert not np.asarray(out)[:begin].any()
    assert not np.asarray(out)[end:].any()


@pytest.mark.parametrize(
    ("group", "k"), [(64, 512), (128, 640), (128, 512), (64, 320), (32, 352), (32, 256)]
)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_affine_scales_of_groups(rng, dtype, bits, group, k):
    """A NaN scale or bias reaches the columns of its group alone."""
    if k * bits % 128:
        k = 640 if group == 128 else 384
    sizes, n = SIZES["few"], 200
    q = weight(rng, "affine", bits, group, len(sizes), n, k, dtype)
    x = oracle.random(rng, (sizes.sum(), n), dtype)
    f = jax.jit(lambda x, q: product(x, q, sizes, preferred_element_type="float32"))
    out, kernels = run(f, x, q)
    assert_ran(kernels, 1)
    # Sums of codes of 8 bits are large beside the result, which biases bring back.
    near = 2e-6 if bits == 8 else None
    oracle.assert_close(out, oracle.grouped_qmm(x, q, sizes, transpose_w=False), tolerance=near)
    good, begin = oracle.f64(out), sizes[:5].sum()
    for leaf, line, of in (("scales", 199, 1), ("biases", 64, 2), ("scales", 73, k // group - 1)):
        bad = dataclasses.replace(q, **{leaf: getattr(q, leaf).at[5, line, of].set(jnp.nan)})
        got, hit = oracle.f64(f(x, bad)), np.zeros(good.shape, bool)
        hit[begin : begin + sizes[5], of * group : (of + 1) * group] = True
        assert np.isnan(got[hit]).all()
        np.testing.assert_array_equal(got[~hit], good[~hit])


@pytest.mark.parametrize("rows", [40, 7])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_blocks_of_one_line(rng, dtype, rows):
    """Mode fp8 with a scale for each line and 128 codes; a NaN stays in its column."""
    w = oracle.random(rng, (3, 200, 384))
    q = jgg.fp8_quantize(jnp.asarray(w), block=(1, 128))
    sizes = np.array([rows, 0, 5])
    x = oracle.random(rng, (rows + 5, 200), dtype)
    f = lambda x, q: product(x, q, sizes, preferred_element_type="float32")
    out, kernels = run(jax.jit(f), x, q)
    assert_ran(kernels, 1)
    # Weights are rounded to 16 bits.
    tolerance = 4e-3 if dtype == "bfloat16" else 5e-4
    want = oracle.grouped_qmm(x, q, sizes, transpose_w=False)
    oracle.assert_close(out, want, tolerance=tolerance)
    codes = jax.lax.bitcast_convert_type(q.weight, jnp.uint8).at[2, 7, 101].set(0xFF)
    bad = dataclasses.replace(q, weight=jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn))
    good, got = (oracle.f64(jax.jit(f)(x, w)) for w in (q, bad))
    hit = (np.arange(rows + 5) >= rows)[:, None] & (np.arange(384) == 101)
    assert np.isnan(got[hit]).all()
    np.testing.assert_array_equal(got[~hit], good[~hit])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("mode", "bits", "group"), EXACT)
def test_lines_of_other_rows(rng, mode, bits, group, dtype):
    """Of a weight as it is stored; float32 rows in bfloat16 parts."""
    sizes = SIZES["few"]
    q = weight(rng, mode, bits, group, len(sizes), 192, 352)
    x = oracle.random(rng, (sizes.sum(), 192), dtype)
    out, kernels = run(jax.jit(lambda x, q: product(x, q, sizes)), x, q)
    assert_ran(kernels, 1)
    assert out.dtype == dtype
    oracle.assert_close(out, oracle.grouped_qmm(x, q, sizes, transpose_w=False), k=192)


OTHERS = [("float16", *form) for form in FORMATS] + [("float32", *form) for form in EXACT]


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(("dtype", "mode", "bits", "group"), OTHERS)
def test_other_rows(rng, mode, bits, group, dtype, rows):
    sizes = SIZES[rows]
    q = weight(rng, mode, bits, group, len(sizes), 320, 384, dtype)
    x = oracle.random(rng, (sizes.sum(), 320), dtype)
    out, kernels = run(jax.jit(lambda x, q: product(x, q, sizes)), x, jgg.prepack(q))
    assert_ran(kernels, 1)
    assert out.dtype == dtype
    oracle.assert_close(out, oracle.grouped_qmm(x, q, sizes, transpose_w=False), k=320)


@pytest.mark.parametrize("rows", SIZES)
def test_options(rng, rows):
    """Bias, activation and row scale are done to sums; an offset leaves groups to others."""
    sizes = SIZES[rows]
    q = weight(rng, "affine", 4, 64, 5, 192, 320)
    x = oracle.random(rng, (sizes.sum(), 192), "bfloat16")
    bias, scale = oracle.random(rng, (5, 320), "bfloat16"), oracle.random(rng, len(x))
    f = lambda x, q, bias, scale: product(
        x, q, sizes, group_offset=4, bias=bias, activation="gelu", row_scale=scale,
        preferred_element_type="float32",
    )  # fmt: skip
    out, kernels = run(jax.jit(f), x, jgg.prepack(q), bias, scale)
    assert_ran(kernels, 1)
    begin, end = sizes[:4].sum(), sizes[:9].sum()
    want = oracle.grouped_qmm(x[begin:end], q, sizes[4:9], transpose_w=False)
    want += np.repeat(oracle.f64(bias), sizes[4:9], axis=0)
    want = (
        oracle.f64(jax.nn.gelu(jnp.asarray(want, "float32"))) * oracle.f64(scale)[begin:end, None]
    )
    oracle.assert_close(out[begin:end], want, tolerance=1e-5)
    assert not np.asarray(out)[:begin].any()
    assert not np.asarray(out)[end:].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["linear", "sm90"])
@pytest.mark.parametrize("rows", [8, 256])
@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_every_scale_and_code(mode, rows, layout, dtype):
    """Row n of w has scale byte n: rows of a unit matrix give the values themselves. A value that
    is not finite would meet zeros of all others, so those rows have another scale."""
    q = every_scale_and_code(mode, 320)
    finite = np.isfinite(oracle.dequantize(q, dtype)).all(1)
    assert finite.sum() > (240 if dtype == "bfloat16" else 130)
    q = dataclasses.replace(q, scales=jnp.where(finite[:, None], q.scales, 100))
    x = jnp.eye(256, dtype=dtype)
    many = jax.tree.map(lambda a: jnp.broadcast_to(a, (256 // rows, *a.shape)), q)
    sizes = np.full(256 // rows, rows)
    many = many if layout == "linear" else jgg.prepack(many)
    out, kernels = run(jax.jit(lambda x, q: product(x, q, sizes)), x, many)
    assert_ran(kernels, 1)
    want = oracle.dequantize(q, dtype)
    tiny = abs(want) < 2e-38  # may be flushed
    np.testing.assert_array_equal(np.where(tiny, 0, oracle.f64(out)), np.where(tiny, 0, want))


@pytest.mark.parametrize("layout", ["linear", "sm90"])
@pytest.mark.parametrize("rows", SIZES)
def test_a_nan_stays_in_its_column(rng, rows, layout):
    """... of its group."""
    sizes = SIZES[rows]
    q = weight(rng, "affine", 4, 64, len(sizes), 192, 320)
    bad = dataclasses.replace(q, scales=q.scales.at[4, 7, 1].set(jnp.nan))
    x = oracle.random(rng, (sizes.sum(), 192), "bfloat16")
    f = jax.jit(lambda x, q: product(x, q, sizes))
    laid = (lambda w: w) if layout == "linear" else jgg.prepack
    good, got = (oracle.f64(f(x, laid(w))) for w in (q, bad))
    mine = np.repeat(np.arange(len(sizes)), sizes) == 4
    hit = mine[:, None] & (np.arange(320) // 64 == 1)
    assert np.isnan(got[hit]).all()
    np.testing.assert_array_equal(got[~hit], good[~hit])


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(("mode", "of"), [("nvfp4", (4, 16)), ("fp8", (8, 128))])
def test_gradients(rng, mode, of, rows):
    """dx of a product with a prepacked weight, runs on them."""
    sizes = SIZES[rows]
    q = jgg.prepack(weight(rng, mode, *of, len(sizes), 256, 384))
    x = oracle.random(rng, (sizes.sum(), 384), "bfloat16")
    f = lambda x, q: jgg.grouped_qmm(x, q, jnp.asarray(sizes))
    loss = lambda x, q: jnp.square(f(x, q).astype("float32")).sum()
    dx, kernels = run(jax.jit(jax.grad(loss)), x, q)
    assert sum(TRANSPOSED in name for name in kernels) == 1, kernels
    y = oracle.f64(f(x, q))
    w = oracle.f64(jgg.dequantize(q, "float32"))
    starts = np.cumsum([0, *sizes])
    ends = zip(starts, starts[1:], w, strict=False)
    want = np.concatenate([2 * y[a:b] @ one for a, b, one in ends])
    oracle.assert_close(dx, want, tolerance=1e-2)


@pytest.mark.parametrize("layout", ["linear", "sm90"])
@pytest.mark.parametrize("rows", SIZES)
def test_the_same_bits(rng, rows, layout):
    sizes = SIZES[rows]
    q = weight(rng, "nvfp4", 4, 16, len(sizes), 704, 640)
    q = q if layout == "linear" else jgg.prepack(q)
    x = oracle.random(rng, (sizes.sum(), 704), "bfloat16")
    f = jax.jit(lambda x, q: product(x, q, sizes))
    first = np.asarray(f(x, q))
    for _ in range(50):
        assert np.asarray(f(x, q)).tobytes() == first.tobytes()
