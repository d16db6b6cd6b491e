"""Products of one row on CPUs, whose kernels meet codes in another order than they have."""

import jax.numpy as jnp
import numpy as np
import pytest

import jax_groupgemm as jgg

FORMATS = {
    "affine4": {"mode": "affine", "bits": 4, "group_size": 32},
    "affine4 in groups of 16": {"mode": "affine", "bits": 4, "group_size": 16},
    "affine4 in groups of 128": {"mode": "affine", "bits": 4, "group_size": 128},
    "affine6 in groups of 16": {"mode": "affine", "bits": 6, "group_size": 16},
    "mxfp4": {"mode": "mxfp4"},
    "nvfp4": {"mode": "nvfp4"},
}


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
# Other formats than affine have scales of one type.
@pytest.mark.parametrize(
    ("name", "scales"),
    [
        (name, scales)
        for name in FORMATS
        for scales in ("float32", "bfloat16")
        if name.startswith("affine") or scales == "float32"
    ],
)
# One group, an odd number of groups, more than the kernel puts in order at a time.
@pytest.mark.parametrize("k", [128, 3 * 128, 2048 + 128, 16384 + 384])
@pytest.mark.one_in(3)
def test_one_row(k, name, scales, x_dtype, rng):
    n = 131  # more lines than a task has
    w = jnp.asarray(rng.normal(size=(n, k)), scales)
    q = jgg.quantize(w, **FORMATS[name])
    x = jnp.asarray(rng.normal(size=(1, k)), x_dtype)
    wide = np.asarray(jgg.dequantize(q, x_dtype), np.float64)
    a = np.asarray(x, np.float64)
    want, most = a @ wide.T, abs(a) @ abs(wide.T)
    last = 2**-8 if x_dtype == "bfloat16" else 0
    got = np.asarray(jgg.quantized_matmul(x, q), np.float64)
    assert (abs(got - want) <= most * 2.0**-16 + abs(want) * last).all()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.one_in(3)
def test_few_rows_along_n(name, rows, rng):
    """Tasks have parts of all lines: whole ones here, and what is left of them."""
    n, k = 131, 2048 + 128
    q = jgg.quantize(jnp.asarray(rng.normal(size=(2, n, k)), jnp.float32), **FORMATS[name])
    x = jnp.asarray(rng.normal(size=(2 * rows, n)), jnp.float32)
    got = jgg.grouped_qmm(x, q, jnp.full(2, rows, jnp.int32), transpose_w=False)
    wide = np.asarray(jgg.dequantize(q, "float32"), np.float64)
    a = np.asarray(x, np.float64).reshape(2, rows, n)
    want, most = (a @ wide).reshape(-1, k), (abs(a) @ abs(wide)).reshape(-1, k)
    assert (abs(np.asarray(got, np.float64) - want) <= most * 2.0**-16).all()


def test_each_number_meets_its_code():
    """One code is not zero, and one number of x."""
    k = 256
    at = np.arange(k)
    weight = np.zeros((k, k // 8), np.uint32)
    weight[at, at // 8] = 5 << (4 * (at % 8))
    q = jgg.Quantized(
        jnp.asarray(weight),
        jnp.ones((k, k // 32)),
        jnp.zeros((k, k // 32)),
        mode="affine",
        bits=4,
        group_size=32,
    )
    x = jnp.arange(1, k + 1, dtype=jnp.float32)[None]
    np.testing.assert_array_equal(jgg.quantized_matmul(x, q)[0], 5 * x[0])
    down = jgg.quantized_matmul(x, q, transpose_w=False)
    np.testing.assert_array_equal(down[0], 5 * x[0])


@pytest.mark.parametrize("bits", [5, 6])
def test_lower_biases(bits, rng):
    """Numbers that are ``2**bits`` larger have biases as much lower, where those are exact."""
    kinds, each, k, group = 9, 4, 256, 16 if bits == 6 else 32
    middle = np.float32(2 ** (bits - 1))
    scale = np.full((kinds, each, k // group), 0.37109375, np.float32)
    scale *= rng.choice([-1, 1], scale.shape)
    scale[1] = 2.0**127 / middle  # a lower bias is beyond float32
    scale[2] = 0.3  # of 24 bits
    scale[3] = 2.0**-110
    scale[4, 0, 3] = np.nan
    bias = -middle * scale
    bias[5] = 0.1  # of 24 bits
    bias[6, 3, 1] = 2.0**-30
    bias[7, 2, 2] = np.inf
    bias[8] = 0
    codes = rng.integers(0, 2**32, (kinds * each, k * bits // 32), np.uint32)
    of = lambda a: jnp.asarray(a.reshape(kinds * each, -1))
    q = jgg.Quantized(
        jnp.asarray(codes), of(scale), of(bias), mode="affine", bits=bits, group_size=group
    )
    want = np.array(jgg.dequantize(q, "float32"))
    want[~np.isfinite(want).all(1)] = np.nan
    for i in (0, 17, 100, 255):
        got = jgg.quantized_matmul(jnp.zeros((1, k)).at[0, i].set(1.0), q)
        np.testing.assert_array_equal(got[0], want[:, i])
