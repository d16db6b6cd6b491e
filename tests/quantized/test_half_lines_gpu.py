"""float16 x with weights as they are stored, on Hopper's kernels of lines."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import needs_hopper, run
from qmm_problems import (
    ANY,
    BYTE_SCALES,
    LINEAR,
    PACKED,
    assert_values,
    every_scale_and_code,
)

import jax_groupgemm as jgg
from jax_groupgemm._quantized.codes import pack

pytestmark = [pytest.mark.gpu, needs_hopper]

BITS = (2, 3, 4, 5, 6, 8)
# Warps, tiles of 64 rows and of 192.
SIZES = {
    "few": (2, 4, 0, 8, 9, 0, 17, 1), "some": (15, 33, 64, 0, 65, 20, 1, 50),
    "many": (192, 193, 0, 97, 1, 385, 129, 33),
}  # fmt: skip
NEAR = 4e-6  # values are rounded to float16 once, not to float32 first


def weight(rng, bits, group, n, k, groups=8):
    return oracle.random_quantized(rng, (groups, n, k), "affine", bits, group, "float16")


def product(x, q, sizes, **more):
    sizes = jnp.asarray(sizes)
    return jgg.grouped_qmm(x, q, sizes, preferred_element_type="float32", **more)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("n", "columns"), [(384, 9), (100, 7), (6, 1)])
@pytest.mark.parametrize("bits", BITS)
def test_values(rng, bits, n, columns, group, sizes):
    """N and K that tiles do not divide, empty groups, rows of none; plain and gated."""
    sizes = np.array(SIZES[sizes])
    k = columns * max(group, 128 if bits % 2 else 64 if bits in (2, 6) else 32)
    q, x = weight(rng, bits, group, n, k), oracle.random(rng, (sizes.sum() + 3, k), "float16")
    x = x.at[-3:].set(jnp.nan)
    f = jax.jit(lambda x, q: (product(x, q, sizes), product(x, q, sizes, activation="swiglu")))
    (out, gated), kernels = run(f, x, q)
    assert sum(LINEAR in name for name in kernels) == 2, kernels
    want = oracle.grouped_qmm(x[:-3], q, sizes)
    gate, value = np.split(want, 2, axis=1)
    oracle.assert_close(out[:-3], want, k=k, tolerance=NEAR * max(1, k / 512) ** 0.5)
    oracle.assert_close(gated[:-3], gate / (1 + np.exp(-gate)) * value, tolerance=1.5e-5)
    assert not np.asarray(out)[-3:].any()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("n", "k"), [(384, 1152), (100, 352)])
@pytest.mark.parametrize("mode", BYTE_SCALES)
def test_values_beside_bytes(rng, mode, n, k, sizes):
    sizes, (bits, group) = np.array(SIZES[sizes]), BYTE_SCALES[mode]
    q = oracle.random_quantized(rng, (8, n, k), mode, bits, group)
    x = oracle.random(rng, (sizes.sum() + 3, k), "float16").at[-3:].set(jnp.nan)
    f = jax.jit(lambda x, q: (product(x, q, sizes), product(x, q, sizes, activation="swiglu")))
    (out, gated), kernels = run(f, x, q)
    assert sum(LINEAR in name for name in kernels) == 2, kernels
    want = oracle.grouped_qmm(x[:-3], q, sizes)
    gate, value = np.split(want, 2, axis=1)
    oracle.assert_close(out[:-3], want, k=k)
    oracle.assert_close(gated[:-3], gate / (1 + np.exp(-gate)) * value, tolerance=1.5e-5)
    assert not np.asarray(out)[-3:].any()


@pytest.mark.parametrize("layout", ["linear", "sm90"])
@pytest.mark.parametrize("rows", [8, 32, 64, 256])
@pytest.mark.parametrize("mode", BYTE_SCALES)
def test_every_scale_and_code(mode, rows, layout):
    """As ``dequantize`` rounds them, prepacked, too. NaN stays in its column."""
    q = every_scale_and_code(mode, 320)
    many = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (256 // rows, *leaf.shape)), q)
    many = many if layout == "linear" else jgg.prepack(many)
    f = jax.jit(lambda x, q: jgg.grouped_qmm(x, q, jnp.full(256 // rows, rows)))
    out, kernels = run(f, jnp.eye(256, 320, dtype="float16"), many)
    kernel = LINEAR if layout == "linear" else PACKED
    assert sum(kernel in name for name in kernels) == 1, kernels
    assert_values(out.T, oracle.dequantize(q, "float16"))


@pytest.mark.parametrize("bits", BITS)
def test_every_value(rng, bits):
    """Rows of a unit matrix give the values themselves: every code at every place, beside scales of
    all sizes, subnormal ones too."""
    n, k, group = 256, 512, 32
    q = weight(rng, bits, group, n, k, groups=1)
    codes = (np.arange(n)[:, None] * 37 + np.arange(k)) % 2**bits
    scales = np.ldexp(rng.uniform(0.5, 1, q.scales.shape), rng.integers(-20, 8, q.scales.shape))
    q = dataclasses.replace(
        q, weight=pack(jnp.asarray(codes[None], "uint32"), bits),
        scales=jnp.asarray(scales, "float16"),
    )  # fmt: skip
    want = oracle.dequantize(q, "float16")[0].astype(np.float64)
    assert np.isfinite(want).all()
    # A value is rounded once; dequantize rounds to float32 first.
    for rows in (8, 32, 512):
        x = jnp.eye(k, dtype="float16")
        f = jax.jit(lambda x, q: jgg.grouped_qmm(x, q, jnp.array([len(x)])))
        out = np.concatenate([f(part, q) for part in jnp.split(x, k // rows)]).T
        apart = np.asarray(out, np.float64) - want
        unit = np.spacing(np.abs(want).astype(np.float16)).astype(np.float64)
        assert (abs(apart) <= unit).all()
        assert (apart != 0).mean() < 1e-3


def test_products_that_float16_does_not_hold(rng):
    """Code times scale exceeds it; with its bias it fits, and nothing rounds between."""
    q = weight(rng, 8, 64, 128, 256, groups=3)
    q = dataclasses.replace(
        q, weight=q.weight | jnp.uint32(0x80808080), scales=jnp.full_like(q.scales, 400),
        biases=jnp.full_like(q.biases, -60000),
    )  # fmt: skip
    assert np.isfinite(oracle.dequantize(q, "float16")).all()
    for rows in (3, 40, 150):
        x = oracle.random(rng, (3 * rows, 256), "float16") / 64
        out, kernels = run(jax.jit(lambda x, q, r=rows: product(x, q, [r, r, r])), x, q)
        assert sum(LINEAR in name for name in kernels) == 1
        oracle.assert_close(out, oracle.grouped_qmm(x, q, [rows] * 3), k=256)


@pytest.mark.parametrize("leaf", ["scales", "biases"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_stays_in_its_column(rng, leaf, value):
    q = weight(rng, 4, 64, 200, 320)
    bad = dataclasses.replace(q, **{leaf: getattr(q, leaf).at[3, 7, 2].set(value)})
    for rows in (5, 40, 100):
        x = oracle.random(rng, (8 * rows, 320), "float16")
        f = jax.jit(lambda x, q, r=rows: product(x, q, [r] * 8))
        good, got = oracle.f64(f(x, q)), oracle.f64(f(x, bad))
        hit = np.zeros(got.shape, bool)
        hit[3 * rows : 4 * rows, 7] = True
        assert not np.isfinite(got[hit]).any()
        np.testing.assert_array_equal(got[~hit], good[~hit])


def test_parts_of_k_offset_and_options(rng):
    """Few tiles of a long K, which two blocks share out; weights of some of the groups; and what is
    done to sums."""
    q = weight(rng, 4, 64, 192, 4224, groups=2)
    x = oracle.random(rng, (20, 4224), "float16")
    out, kernels = run(jax.jit(lambda x, q: product(x[:7], q, [3, 4])), x, q)
    assert sum(LINEAR in name for name in kernels) == 1
    oracle.assert_close(out, oracle.grouped_qmm(x[:7], q, [3, 4]), k=4224)
    sizes = [4, 3, 0, 9]
    f = jax.jit(lambda x, q: product(x, q, sizes, group_offset=jnp.int32(1)))
    oracle.assert_close(f(x, q), oracle.grouped_qmm(x, q, sizes, offset=1), k=4224)
    bias, scale = oracle.random(rng, (2, 192), "float16"), oracle.random(rng, 20)
    f = lambda x, q: jgg.grouped_qmm(
        x / 64, q, jnp.array([8, 12]), bias=bias, activation="silu", row_scale=scale
    )
    out, kernels = run(jax.jit(f), x, q)
    assert sum(LINEAR in name for name in kernels) == 1
    want = oracle.grouped_qmm(x / 64, q, [8, 12]) + np.repeat(oracle.f64(bias), [8, 12], axis=0)
    want = want / (1 + np.exp(-want)) * oracle.f64(scale)[:, None]
    assert out.dtype == jnp.float16
    oracle.assert_close(out, want)


@pytest.mark.parametrize("sizes", SIZES)
def test_same_bits(rng, sizes):
    sizes = np.array(SIZES[sizes])
    q, x = weight(rng, 4, 64, 320, 512), oracle.random(rng, (sizes.sum(), 512), "float16")
    f = jax.jit(lambda x, q: product(x, q, sizes))
    first = np.asarray(f(x, q))
    for _ in range(50):
        np.testing.assert_array_equal(np.asarray(f(x, q)), first)


def test_who_runs(rng):
    """Many rows pack the weight. Groups of 16 have the generic kernel."""
    q = weight(rng, 4, 64, 128, 256, groups=2)
    ran = lambda f, *args: [
        sum(of in name for name in run(jax.jit(f), *args)[1]) for of in (LINEAR, PACKED, ANY)
    ]
    x = oracle.random(rng, (2 * 1024, 256), "float16")
    assert ran(lambda x, q: product(x, q, [1024, 1024]), x, q) == [0, 1, 0]
    assert ran(lambda x, q: product(x, q, [1023, 1023]), x[:2046], q) == [1, 0, 0]
    small = weight(rng, 4, 16, 128, 256, groups=2)
    assert ran(lambda x, q: product(x, q, [2, 2]), x[:4], small)[0] == 0
    dx = lambda x, q: product(x, q, [2, 2], transpose_w=False)
    assert ran(dx, x[:4, :128], q) == [0, 0, 0]  # tests/quantized/test_transposed_gpu.py
