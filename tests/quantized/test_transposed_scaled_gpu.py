"""x @ W with float32 x and affine and fp8 weights that are quantized along their columns, on
Hopper's kernels: what dx of float32 cotangents is. Nothing rounds the weight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import needs_hopper, run
from qmm_problems import SCALED, SCALED_LINES, TRANSPOSED

import jax_groupgemm as jgg

pytestmark = [pytest.mark.gpu, needs_hopper]

FORMATS = [
    ("fp8", 8, 128), *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
    ("affine", 4, 32), ("affine", 4, 128), ("affine", 3, 32), ("affine", 6, 128),
    ("affine", 8, 32), ("affine", 4, 16), ("affine", 6, 16),
]  # fmt: skip
# Groups of no row, of one, of a tile of few rows, of two, and one beside each; of a tile of many
# rows, of its parts, and one beside.
SIZES = {
    "few": np.array([1, 8, 0, 9, 16, 17, 3, 0, 2, 7, 5, 1, 25]),
    "many": np.array([128, 0, 129, 1, 257, 16, 17, 32, 33, 64, 65, 96, 97, 0, 3]),
}


def product(x, q, sizes, **options):
    return jgg.grouped_qmm(x, q, jnp.asarray(sizes), transpose_w=False, **options)


def assert_ran(
    kernels, count: int, rows: str | None = None, others: int = 0, lines: int = 0
) -> None:
    """So many products, all but ``others`` by these kernels: with few rows those of ``lines``
    weights by that of weights as they are stored."""
    as_stored = [name for name in kernels if TRANSPOSED in name and SCALED_LINES in name]
    assert len(as_stored) == (lines if rows == "few" else 0), kernels
    count -= len(as_stored)
    others += len(as_stored)
    ours = [name for name in kernels if TRANSPOSED in name and SCALED in name]
    assert len(ours) == count, kernels
    assert sum("Gemm" in name for name in kernels) <= count + others, kernels
    tile = {None: "", "few": "Rows8Sm90", "many": "Rows128Sm90"}[rows]
    assert all(f"TransposedScaled{tile}" in name for name in ours), kernels


def weight(rng, mode, bits, group, groups, n, k, scales="bfloat16"):
    return oracle.random_quantized(rng, (groups, n, k), mode, bits, group, scales)


def exact(x, q, sizes):
    """Nothing rounds the weight to x's dtype."""
    return oracle.grouped_qmm(x.astype("float32"), q, sizes, transpose_w=False)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
def test_values(rng, mode, bits, group, rows):
    """Prepacked, with bfloat16 and with float16 scales, and as stored, which a call packs if rows
    are many, groups have 16, or lines are not whole 16 bytes. Odd
    numbers of tiles along both axes, so that stages of few rows are part empty; rows behind all
    groups are zeros."""
    sizes = SIZES[rows]
    n, k = (64 * 9, 128 * 3) if group == 128 else (64 * 11, 64 * 5)
    q = weight(rng, mode, bits, group, len(sizes), n, k)
    weights = [jgg.prepack(q), q]
    if mode == "affine":
        weights.append(jgg.prepack(q, scales_dtype=jnp.float16))
    x = oracle.random(rng, (sizes.sum() + 5, n), "float32")
    f = lambda x, *weights: [product(x, w, sizes) for w in weights]
    found, kernels = run(jax.jit(f), x, *weights)
    assert_ran(kernels, len(weights), rows, lines=group > 16 and k * bits % 128 == 0)
    want = exact(x, q, sizes)
    for out in found:
        assert out.dtype == jnp.float32
        oracle.assert_close(out, want, k=n)
        assert not np.asarray(out)[sizes.sum() :].any()


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_float32_scales(rng, bits, group, x_dtype, rows):
    """Every group size beside every x."""
    sizes = SIZES[rows]
    n, k = 192, 5 * (128 if group == 128 else 64)
    q = weight(rng, "affine", bits, group, len(sizes), n, k, "float32")
    x = oracle.random(rng, (sizes.sum(), n), x_dtype)
    f = lambda x, *weights: [
        product(x, w, sizes, preferred_element_type="float32") for w in weights
    ]
    found, kernels = run(jax.jit(f), x, jgg.prepack(q), q)
    assert_ran(kernels, 2, rows, lines=group > 16 and k * bits % 128 == 0)
    for out in found:
        oracle.assert_close(out, exact(x, q, sizes), k=n)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("scales", ["bfloat16", "float16"])
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_scales_of_another_dtype_and_groups_of_16(rng, x_dtype, scales, rows):
    sizes = SIZES[rows]
    for group in (16, 64):
        q = weight(rng, "affine", 4, group, len(sizes), 192, 320, scales)
        x = oracle.random(rng, (sizes.sum(), 192), x_dtype)
        f = lambda x, w: product(x, w, sizes, preferred_element_type="float32")
        out, kernels = run(jax.jit(f), x, jgg.prepack(q))
        if scales != x_dtype or group == 16:
            assert_ran(kernels, 1, rows)
            oracle.assert_close(out, exact(x, q, sizes), k=192)
        else:
            assert not any(SCALED in name for name in kernels), kernels


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("block", [(128, 128), (1, 128), (64, 128), (1, 384)])
def test_fp8_blocks(rng, block, rows):
    """Scales of squares, of lines, of another number of rows, and of whole rows."""
    sizes = SIZES[rows]
    n, k = 320, 384
    q = weight(rng, "fp8", 8, 128, len(sizes), n, k)
    shape = len(sizes), -(-n // block[0]), k // block[1]
    scales = (rng.uniform(1, 4, shape) / 256).astype(jnp.bfloat16).astype(np.float32)
    q = jgg.Quantized(
        q.weight, jnp.asarray(scales), mode="fp8", bits=8, group_size=block[1], block=block
    )
    x = oracle.random(rng, (sizes.sum(), n), "float32")
    f = lambda x, *weights: [product(x, w, sizes) for w in weights]
    found, kernels = run(jax.jit(f), x, q, jgg.prepack(q))
    assert_ran(kernels, 2, rows, lines=1)
    for out in found:
        oracle.assert_close(out, exact(x, q, sizes), k=n)


@pytest.mark.parametrize("rows", [8, 100])
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS[:7])
def test_long_sums(rng, mode, bits, group, rows):
    """Sums of one sign, which tensor cores would cut off."""
    n, k = 14336, 128
    q = weight(rng, mode, bits, group, 1, n, k)
    positive = {"scales": abs(q.scales)} | ({"biases": abs(q.biases)} if mode == "affine" else {})
    codes = q.weight if mode == "affine" else jnp.asarray(np.asarray(q.weight).view(np.uint8) & 127)
    q = dataclasses.replace(q, weight=codes, **positive)
    x = abs(oracle.random(rng, (rows, n), "float32"))
    out, kernels = run(jax.jit(lambda x, q: product(x, q, [rows])), x, jgg.prepack(q))
    assert_ran(kernels, 1)
    oracle.assert_close(out, exact(x, q, [rows]), tolerance=1.5e-6)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_options_and_offset(rng, rows, out_dtype):
    """Bias, activation and row scale; an offset leaves groups to others."""
    sizes = SIZES[rows]
    q = weight(rng, "affine", 4, 64, 5, 192, 320)
    x = oracle.random(rng, (sizes.sum(), 192), "float32")
    bias, scale = oracle.random(rng, (5, 320), "float32"), oracle.random(rng, len(x))
    f = lambda x, q, bias, scale: product(
        x, q, sizes, group_offset=4, bias=bias, activation="gelu", row_scale=scale,
        preferred_element_type=out_dtype,
    )  # fmt: skip
    out, kernels = run(jax.jit(f), x, jgg.prepack(q), bias, scale)
    assert_ran(kernels, 1, rows, others=1)  # which gives each row its group's bias
    begin, end = sizes[:4].sum(), sizes[:9].sum()
    want = exact(x[begin:end], q, sizes[4:9])
    want += np.repeat(oracle.f64(bias), sizes[4:9], axis=0)
    want = (
        oracle.f64(jax.nn.gelu(jnp.asarray(want, "float32"))) * oracle.f64(scale)[begin:end, None]
    )
    tolerance = {"float32": 1e-5}.get(out_dtype)
    oracle.assert_close(out[begin:end], want, tolerance=tolerance)
    assert not np.asarray(out)[:begin].any()
    assert not np.asarray(out)[end:].any()


@pytest.mark.parametrize("rows", SIZES)
def test_options_in_the_kernel(rng, rows):
    """Those of bfloat16 x beside float32 scales are done by the kernel itself."""
    sizes = SIZES[rows]
    q = weight(rng, "affine", 4, 64, len(sizes), 192, 320, "float32")
    x = oracle.random(rng, (sizes.sum(), 192), "bfloat16")
    bias = oracle.random(rng, (len(sizes), 320), "bfloat16")
    f = lambda x, q, bias: product(x, q, sizes, bias=bias, preferred_element_type="float32")
    out, kernels = run(jax.jit(f), x, jgg.prepack(q), bias)
    assert_ran(kernels, 1, rows)
    want = exact(x, q, sizes) + np.repeat(oracle.f64(bias), sizes, axis=0)
    oracle.assert_close(out, want, k=192)


@pytest.mark.parametrize(
    ("rows", "pack"), [*((r, jgg.prepack) for r in SIZES), ("few", lambda q: q)]
)
@pytest.mark.parametrize(("mode", "bits", "group"), [*FORMATS[:7], ("affine", 4, 32)])
def test_a_nan_stays_in_its_row_and_columns(rng, mode, bits, group, rows, pack):
    """A NaN of x, and one of a scale of group 4; all else has the same bits as without."""
    sizes = SIZES[rows]
    q = weight(rng, mode, bits, group, len(sizes), 192, 384)
    at = (4, 0 if mode == "fp8" else 70, 1)
    bad = dataclasses.replace(q, scales=q.scales.at[at].set(jnp.nan))
    x = oracle.random(rng, (sizes.sum(), 192), "float32")
    f = jax.jit(lambda x, q: product(x, q, sizes))
    good = np.asarray(f(x, pack(q)))
    got = np.asarray(f(x.at[9, 3].set(jnp.nan), pack(bad)))
    hit = (np.repeat(np.arange(len(sizes)), sizes) == 4)[:, None]
    hit = hit & (np.arange(384) // group == 1)
    hit[9] = True
    assert np.isnan(got[hit]).all()
    np.testing.assert_array_equal(got[~hit], good[~hit])


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("mode", "bits", "group"), [("affine", 4, 64), ("fp8", 8, 128)])
def test_gradients(rng, mode, bits, group, packed, x_dtype, rows):
    """dx of float32 x, and of bfloat16 x with a float32 result."""
    sizes = SIZES[rows]
    q = weight(rng, mode, bits, group, len(sizes), 256, 384)
    x = oracle.random(rng, (sizes.sum(), 384), x_dtype)
    ct = oracle.random(rng, (sizes.sum(), 256), "float32")

    def dx(x, q, ct):
        f = lambda x: jgg.grouped_qmm(x, q, jnp.asarray(sizes), preferred_element_type="float32")
        return jax.vjp(f, x)[1](ct)[0]

    out, kernels = run(jax.jit(dx), x, jgg.prepack(q) if packed else q, ct)
    assert_ran(kernels, 1, rows, lines=not packed)
    assert out.dtype == x_dtype
    oracle.assert_close(out, exact(ct, q, sizes), k=256)


@pytest.mark.parametrize(
    ("rows", "pack"), [*((r, jgg.prepack) for r in SIZES), ("few", lambda q: q)]
)
@pytest.mark.parametrize(("mode", "bits", "group"), [*FORMATS[:7], ("affine", 4, 16)])
def test_the_same_bits(rng, mode, bits, group, rows, pack):
    sizes = SIZES[rows]
    q = pack(weight(rng, mode, bits, group, len(sizes), 704, 640))
    x = oracle.random(rng, (sizes.sum(), 704), "float32")
    f = jax.jit(lambda x, q: product(x, q, sizes))
    first = np.asarray(f(x, q))
    for _ in range(20):
        assert np.asarray(f(x, q)).tobytes() == first.tobytes()
