"""Products with weights of mode "fp8" as they are stored, on Hopper's kernel of lines."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import needs_hopper, run
from qmm_problems import LINEAR, PACKED

import jax_groupgemm as jgg

pytestmark = [pytest.mark.gpu, needs_hopper]

DTYPES = ("bfloat16", "float16", "float32")
SIZES = {
    "few": (2, 4, 0, 8, 9, 0, 17, 1), "some": (15, 33, 64, 0, 65, 20, 1, 50),
    "many": (192, 193, 0, 97, 1, 385, 129, 33),
}  # fmt: skip


def weight(rng, n, k, block, groups=8):
    q = jgg.quantize(
        oracle.random(rng, (groups, n, k), "float32"), mode="fp8", block=block, contract=-1
    )
    # bfloat16 numbers, which the kernel decodes exactly, powers of two apart.
    powers = np.ldexp(np.float32(1), rng.integers(-9, -4, q.scales.shape))
    return dataclasses.replace(q, scales=jnp.asarray(powers, "float32"))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("block", [(128, 128), (1, 128), None, (48, 256), (7, 10**6), (64, 384)])
@pytest.mark.parametrize(("n", "k"), [(384, 1152), (100, 912), (6, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(rng, dtype, n, k, block, sizes):
    """N and K that tiles do not divide, blocks of any rows, plain and gated. Of float32 rows the
    activation is a step of its own, behind the one product of both."""
    sizes = np.array(SIZES[sizes])
    q, x = weight(rng, n, k, block), oracle.random(rng, (sizes.sum() + 3, k), dtype)
    f = lambda x, q, **more: jgg.grouped_qmm(
        x, q, jnp.asarray(sizes), preferred_element_type="float32", **more
    )
    (out, gated), kernels = run(jax.jit(lambda x, q: (f(x, q), f(x, q, activation="swiglu"))), x, q)
    assert sum(LINEAR in name for name in kernels) == (1 if dtype == "float32" else 2), kernels
    if block is None:
        q = dataclasses.replace(q, scales=q.scales[:, None, None], block=(n, k), group_size=k)
    want = oracle.grouped_qmm(x[:-3], q, sizes)
    gate, value = np.split(want, 2, axis=1)
    oracle.assert_close(out[:-3], want, k=k)
    oracle.assert_close(gated[:-3], gate / (1 + np.exp(-gate)) * value, tolerance=1e-5)
    assert not np.asarray(out)[-3:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 40, 100, 150])
def test_scales_of_any_bits(rng, dtype, rows):
    """Scales multiply sums, so neither their bits nor their sizes are lost."""
    q = weight(rng, 256, 512, (128, 128))
    q = dataclasses.replace(q, scales=q.scales * jnp.asarray(rng.uniform(1, 2, q.scales.shape)))
    scales = q.scales.astype("float32").at[1].set(2.0**45).at[2].multiply(2.0**-40)
    q = dataclasses.replace(q, scales=scales)
    x, sizes = oracle.random(rng, (8 * rows, 512), dtype), jnp.full(8, rows)
    f = jax.jit(lambda x, q: jgg.grouped_qmm(x, q, sizes, preferred_element_type="float32"))
    got, want = oracle.f64(f(x, q)), oracle.grouped_qmm(x.astype("float32"), q, np.asarray(sizes))
    for group in range(8):
        of = slice(group * rows, (group + 1) * rows)
        oracle.assert_close(got[of], want[of], tolerance=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code(dtype):
    """Rows of a unit matrix give codes times scales, each in its column, NaN too."""
    codes = np.stack([np.roll(np.arange(256, dtype=np.uint8), i) for i in range(128)])
    codes = jnp.asarray(codes)[None]
    q = jgg.Quantized(
        jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn),
        jnp.full((1, 1, 2), 0.375, "float32"), mode="fp8", bits=8, group_size=128,
        block=(128, 128),
    )  # fmt: skip
    want = 0.375 * oracle.f64(q.weight.astype("float32"))[0]
    finite = np.isfinite(want)
    zero = dataclasses.replace(
        q, weight=jnp.where(jnp.asarray(finite), q.weight, jnp.zeros_like(q.weight))
    )
    for rows in (8, 64, 256):
        x = jnp.eye(256, dtype=dtype)
        f = jax.jit(lambda x, q: jgg.grouped_qmm(x, q, jnp.array([len(x)])))
        out = np.concatenate([f(part, zero) for part in jnp.split(x, 256 // rows)]).T
        np.testing.assert_array_equal(oracle.f64(out), np.where(finite, want, 0))
        assert np.isnan(oracle.f64(f(x[:rows], q))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_column(rng, dtype):
    q = weight(rng, 256, 512, (128, 128))
    codes = jax.lax.bitcast_convert_type(q.weight, jnp.uint8).at[3, 7, 100].set(0x7F)
    bad = dataclasses.replace(q, weight=jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn))
    for rows in (5, 100, 150):
        x, sizes = oracle.random(rng, (8 * rows, 512), dtype), jnp.full(8, rows)
        f = jax.jit(lambda x, q, sizes=sizes: jgg.grouped_qmm(x, q, sizes))
        good, got = oracle.f64(f(x, q)), oracle.f64(f(x, bad))
        hit = np.zeros(got.shape, bool)
        hit[3 * rows : 4 * rows, 7] = True
        assert np.isnan(got[hit]).all()
        np.testing.assert_array_equal(got[~hit], good[~hit])


@pytest.mark.parametrize("dtype", DTYPES)
def test_who_runs(rng, dtype):
    """A product of many 16-bit rows packs the weight."""
    q = weight(rng, 256, 512, (128, 128), groups=2)
    x = oracle.random(rng, (5000, 512), dtype)
    f = lambda x, q, t=True: jgg.grouped_qmm(x, q, jnp.array([2500, 2500]), transpose_w=t)
    many, kernels = run(jax.jit(f), x, q)
    assert dtype == "float32" or sum(PACKED in name for name in kernels) == 1
    oracle.assert_close(many, oracle.grouped_qmm(x, q, [2500, 2500]))
    few = jax.jit(lambda x, q: jgg.grouped_qmm(x, q, jnp.array([2, 2])))
    _, kernels = run(few, x[:4], q)
    assert sum(LINEAR in name for name in kernels) == 1
