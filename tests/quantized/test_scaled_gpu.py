"""float32 x, and float16 x beside bfloat16 scales, with affine and fp8 weights on Hopper's kernels
that multiply sums over codes by float32 scales."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import needs_hopper, run
from qmm_problems import LINEAR, SCALED, SCALED_LINES

import jax_groupgemm as jgg

pytestmark = [pytest.mark.gpu, needs_hopper]

FORMATS = [
    ("fp8", 8, 128), *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
    ("affine", 4, 32), ("affine", 4, 128), ("affine", 3, 32), ("affine", 6, 128), ("affine", 8, 32),
    ("affine", 4, 16), ("affine", 6, 16),
]  # fmt: skip
# One row at most in most groups, 5 on average, 30 and 100.
SIZES = {
    "one": (1, 0, 1, 1, 0, 2, 1, 0),
    "rows": (2, 4, 7, 8, 9, 0, 16, 10, 1, 3, 3, 0),
    "tiles": (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 0, 1),
    "more": (1, 0, 127, 128, 129, 191, 192, 193, 33),
}


def weight(rng, mode, bits, group, groups, n, k, scales="bfloat16"):
    return oracle.random_quantized(rng, (groups, n, k), mode, bits, group, scales)


def exact(x, q, sizes):
    """Nothing rounds the weight."""
    return oracle.grouped_qmm(x.astype("float32"), q, sizes)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
def test_values(rng, mode, bits, group, sizes):
    """Prepacked, with bfloat16 and with float16 scales, and as stored: blocks, and few rows in
    groups of 32 and more of lines of whole 16 bytes, have kernels of lines, and for others a call
    packs."""
    as_stored = LINEAR if mode == "fp8" else SCALED_LINES
    n, k = 320, 9 * (128 if group == 128 else 64)
    few = sizes in ("one", "rows") and group > 16 and k * bits % 128 == 0
    lines, sizes = mode == "fp8" or few, np.array(SIZES[sizes])
    q = weight(rng, mode, bits, group, len(sizes), n, k)
    weights = [jgg.prepack(q), q]
    if mode == "affine":
        weights.append(jgg.prepack(q, scales_dtype=jnp.float16))
    x = oracle.random(rng, (sizes.sum() + 3, k), "float32")
    f = lambda x, *weights: [jgg.grouped_qmm(x, w, jnp.asarray(sizes)) for w in weights]
    found, kernels = run(jax.jit(f), x, *weights)
    assert sum(SCALED in name for name in kernels) == len(weights) - lines, kernels
    assert sum(as_stored in name for name in kernels) == lines, kernels
    want = oracle.grouped_qmm(x[:-3], q, sizes)
    for out in found:
        assert out.dtype == jnp.float32
        oracle.assert_close(out[:-3], want, k=k)
        assert not np.asarray(out)[-3:].any()


@pytest.mark.parametrize("sizes", ["one", "rows", "more"])
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_float32_scales(rng, bits, group, x_dtype, sizes):
    """Every group size beside every x, prepacked and as stored. A weight as stored in groups of
    16, or of lines that are no whole 16 bytes, has the generic kernels for few rows."""
    sizes = np.array(SIZES[sizes])
    k = 5 * (128 if group == 128 else 64)
    q = weight(rng, "affine", bits, group, len(sizes), 192, k, "float32")
    x = oracle.random(rng, (sizes.sum() + 1, k), x_dtype)
    f = lambda x, w: jgg.grouped_qmm(x, w, jnp.asarray(sizes), preferred_element_type="float32")
    for w in (jgg.prepack(q), q):
        out, kernels = run(jax.jit(f), x, w)
        scaled = any(SCALED in name or SCALED_LINES in name for name in kernels)
        assert scaled or (w is q and (group == 16 or k * bits % 128 != 0)), kernels
        want = exact if scaled else oracle.grouped_qmm
        oracle.assert_close(out[:-1], want(x[:-1], q, sizes), k=k)


@pytest.mark.parametrize("scales", ["bfloat16", "float16"])
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", ["one", "rows", "more"])
def test_groups_of_16(rng, scales, x_dtype, sizes):
    sizes = np.array(SIZES[sizes])
    q = weight(rng, "affine", 4, 16, len(sizes), 192, 320, scales)
    x = oracle.random(rng, (sizes.sum(), 320), x_dtype)
    f = lambda x, q: jgg.grouped_qmm(x, q, jnp.asarray(sizes), preferred_element_type="float32")
    out, kernels = run(jax.jit(f), x, jgg.prepack(q))
    assert sum(SCALED in name for name in kernels) == 1, kernels
    oracle.assert_close(out, exact(x, q, sizes), k=320)


@pytest.mark.parametrize("sizes", ["rows", "more"])
@pytest.mark.parametrize("precision", ["float16", "tf32"])
def test_two_planes(rng, precision, sizes):
    sizes = np.array(SIZES[sizes])
    q = weight(rng, "affine", 4, 64, len(sizes), 192, 704)
    dtype = "float16" if precision == "float16" else "float32"
    x = oracle.random(rng, (sizes.sum(), 704), dtype)

    @jax.jit
    def f(x, q):
        with jax.default_matmul_precision("highest" if dtype == "float16" else "tensorfloat32"):
            return jgg.grouped_qmm(x, q, jnp.asarray(sizes), preferred_element_type="float32")

    out, kernels = run(f, x, jgg.prepack(q))
    assert sum(SCALED in name for name in kernels) == 1, kernels
    tolerance = None if precision == "float16" else 1e-4
    oracle.assert_close(out, exact(x, q, sizes), k=704, tolerance=tolerance)


@pytest.mark.parametrize("kernel", [SCALED, SCALED_LINES])
def test_parts_of_k(rng, kernel):
    """Few tiles of a long K: two blocks share it out."""
    q = weight(rng, "affine", 4, 64, 2, 192, 4160 + 64)
    x = oracle.random(rng, (5, 4224), "float32")
    f = jax.jit(lambda x, q: jgg.grouped_qmm(x, q, jnp.array([2, 3])))
    out, kernels = run(f, x, q if kernel == SCALED_LINES else jgg.prepack(q))
    assert sum(kernel in name for name in kernels) == 1
    oracle.assert_close(out, oracle.grouped_qmm(x, q, [2, 3]), k=4224)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("rows", "x_dtype"), [(4, "float32"), (8, "float16"), (8, "bfloat16")])
def test_lines_of_few_rows(rng, rows, x_dtype, bits):
    """Tiles that are full, empty groups, N and K that tiles do not divide, an offset, rows whose
    groups are elsewhere, and the same bits each time."""
    sizes = np.array([rows, 0, 1, 2 * rows, 3, 0, rows - 1, 1])
    n, k = 200, 384 if bits % 2 else 320
    q = weight(rng, "affine", bits, 32 if bits == 4 else 64, 5, n, k, "float32")
    x = oracle.random(rng, (sizes.sum() + 2, k), x_dtype)
    f = jax.jit(lambda x, q: jgg.grouped_qmm(
        x, q, jnp.asarray(sizes), group_offset=jnp.int32(2), preferred_element_type="float32"
    ))  # fmt: skip
    out, kernels = run(f, x, q)
    assert sum(SCALED_LINES in name for name in kernels) == 1, kernels
    begin, end = sizes[:2].sum(), sizes[:7].sum()
    oracle.assert_close(out[begin:end], exact(x[begin:end], q, sizes[2:7]), k=k)
    assert not np.asarray(out)[:begin].any()
    assert not np.asarray(out)[end:].any()
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(f(x, q)), np.asarray(out))


@pytest.mark.parametrize(("sizes", "packs"), [("rows", True), ("more", True), ("rows", False)])
@pytest.mark.parametrize("mode", ["affine", "fp8"])
def test_nan_stays_in_its_row_and_column(rng, mode, sizes, packs):
    sizes = np.array(SIZES[sizes])
    q = weight(rng, mode, 8, {"affine": 64, "fp8": 128}[mode], len(sizes), 128, 512)
    at = (3, 70 // (128 if mode == "fp8" else 1), 1)
    q = jgg.Quantized(
        q.weight, q.scales.at[at].set(jnp.nan), q.biases, mode=mode, bits=8,
        group_size=q.group_size, block=q.block,
    )  # fmt: skip
    x = oracle.random(rng, (sizes.sum(), 512), "float32").at[5, 3].set(jnp.nan)
    f = jax.jit(lambda x, q: jgg.grouped_qmm(x, q, jnp.asarray(sizes)))
    out = np.asarray(f(x, jgg.prepack(q) if packs else q))
    nan = np.zeros(out.shape, bool)
    nan[5] = True
    rows = slice(sizes[:3].sum(), sizes[:4].sum())
    nan[rows, slice(None) if mode == "fp8" else 70] = True
    assert (np.isnan(out) == nan).all()


def test_options_and_offset(rng):
    """Bias, activation, a scale of rows, and groups of a longer list."""
    sizes = np.array(SIZES["tiles"])
    q = weight(rng, "affine", 4, 64, len(sizes) - 3, 192, 320)
    x = oracle.random(rng, (sizes.sum(), 320), "float32")
    bias = oracle.random(rng, (len(sizes) - 3, 192), "float32")
    scale = oracle.random(rng, len(x), "float32")
    f = lambda x, q, bias, scale, offset: jgg.grouped_qmm(
        x, q, jnp.asarray(sizes), group_offset=offset, bias=bias, activation="silu",
        row_scale=scale,
    )  # fmt: skip
    out, kernels = run(jax.jit(f), x, jgg.prepack(q), bias, scale, jnp.int32(2))
    assert sum(SCALED in name for name in kernels) == 1
    ends = np.cumsum(sizes)
    there = slice(ends[1], ends[-2])
    want = oracle.grouped_qmm(x[there], q, sizes[2:-1])
    want = want + np.repeat(oracle.f64(bias), sizes[2:-1], axis=0)
    want = want / (1 + np.exp(-want)) * oracle.f64(scale)[there, None]
    oracle.assert_close(out[there], want, tolerance=2e-6)
    assert not np.asarray(out)[: there.start].any()
    assert not np.asarray(out)[there.stop :].any()


@pytest.mark.parametrize("sizes", ["rows", "more"])
def test_bit_for_bit(rng, sizes):
    sizes = np.array(SIZES[sizes])
    q = jgg.prepack(weight(rng, "affine", 4, 64, len(sizes), 192, 704))
    x = oracle.random(rng, (sizes.sum(), 704), "float32")
    f = jax.jit(lambda x, q: jgg.grouped_qmm(x, q, jnp.asarray(sizes)))
    first = np.asarray(f(x, q))
    for _ in range(50):
        assert (np.asarray(f(x, q)) == first).all()
