"""``nvfp4_grouped_mm`` against numpy: values and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import BEST, GPU_KERNELS
from nvfp4_grouped_problems import (
    FAR,
    SIZES,
    G,
    K,
    N,
    T,
    large,
    mm_oracle,
    positive,
    random,
    splits,
)
from qmm_problems import needs

import jax_groupgemm as jgg


@pytest.fixture(params=["reference", *GPU_KERNELS])
def kernel(request) -> str:
    return needs(request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mm(rng, kernel, dtype):
    x, w = random(rng, T, K, scale=positive(rng)), random(rng, G, N, K, scale=positive(rng, G))
    alpha, bias = positive(rng, G), oracle.random(rng, (G, N), "bfloat16")
    f = functools.partial(
        jgg.nvfp4_grouped_mm, alpha=alpha, bias=bias, preferred_element_type=dtype,
        implementation=kernel,
    )  # fmt: skip
    f = jax.jit(f)
    for name, sizes in SIZES.items():
        out = f(x, w, np.array(sizes, np.int16))
        assert out.dtype == dtype
        oracle.assert_close(out, mm_oracle(x, w, sizes, alpha, bias)), name
        assert not np.asarray(out)[max(last for _, last in oracle.bounds(sizes, T)) :].any()


def test_mm_of_three_groups(rng):
    x, w = random(rng, 768, K), random(rng, 3, N, K)
    for sizes in ([256] * 3, [256, 128, 384]):
        out = jax.jit(jgg.nvfp4_grouped_mm)(x, w, np.array(sizes))
        assert out.dtype == "bfloat16"
        oracle.assert_close(out, mm_oracle(x, w, sizes))


@pytest.mark.parametrize("choice", ["reference", *GPU_KERNELS, BEST])
def test_mm_of_named_splits(rng, choice):
    """One program of each kernel; of the best one on a GPU each split's own, and prepacked too."""
    needs(choice)
    f = functools.partial(
        jgg.nvfp4_grouped_mm, preferred_element_type="float32", implementation=choice
    )
    f = jax.jit(f)
    for sizes, rows in splits(one_shape=choice is not None):
        x, w = random(rng, rows, 64), random(rng, len(sizes), 64, 64)
        want = mm_oracle(x, w, sizes)
        assert want.any() == sizes.any()
        for weight in (w,) if choice else (w, jgg.prepack(w)):
            out = f(x, weight, sizes)
            oracle.assert_close(out, want, tolerance=1e-5)
            assert not np.asarray(out)[sizes.sum() :].any()


SCALES = [(None, None), (None, (3,)), ((), ()), ((40,), None), ((40,), (3,))]


@pytest.mark.parametrize(("x_shape", "w_shape"), SCALES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.one_in(3)
def test_mm_scales(rng, x_shape, w_shape, bias):
    """Absent ones are 1; alpha may be a number; rows may have their own."""
    scale = lambda shape: None if shape is None else positive(rng, *shape)
    x, w = random(rng, 40, 32, scale=scale(x_shape)), random(rng, 3, 8, 32, scale=scale(w_shape))
    bias = oracle.random(rng, (3, 8)) if bias else None
    sizes = np.array([7, 0, 20], np.uint8)
    f = functools.partial(jgg.nvfp4_grouped_mm, bias=bias, preferred_element_type="float32")
    for alpha in (None, 2):
        want = mm_oracle(x, w, sizes, alpha, bias)
        oracle.assert_close(f(x, w, sizes, alpha=alpha), want)
        assert not want[27:].any()


@pytest.mark.parametrize("layout", ["sm90", "swizzled"])
def test_mm_layouts(rng, layout):
    """Scales of x, or all of w, may be in the order that a kernel reads; the bits are the same."""
    x, w = random(rng, 150, 64, scale=positive(rng)), random(rng, 3, 64, 64)
    sizes = jnp.array([70, 0, 40])
    want = jgg.nvfp4_grouped_mm(x, w, sizes)
    if layout == "sm90":
        w = jgg.prepack(w)
        assert w.layout == "sm90"
    else:
        scales = np.zeros((2, 1, 512), np.uint8)
        for r, s in np.ndindex(150, 4):
            scales[r // 128, 0, r % 32 * 16 + r % 128 // 32 * 4 + s] = x.scales[r, s]
        x = dataclasses.replace(x, scales=jnp.asarray(scales), layout="swizzled")
    np.testing.assert_array_equal(jgg.nvfp4_grouped_mm(x, w, sizes), want)


def test_mm_of_the_transposed_copy(rng):
    """What is stored for axis -2 is the weight of the gradient's product."""
    w = oracle.random(rng, (3, 32, 40))
    q = jgg.nvfp4_quantize(w, axis=-2)
    dy, sizes = random(rng, 40, 32), jnp.array([7, 0, 20])
    stored = dataclasses.replace(q, axis=-1)
    out = jgg.nvfp4_grouped_mm(dy, stored, sizes, preferred_element_type="float32")
    scale = oracle.f64(q.global_scale)[:, None, None]
    want = oracle.grouped_mm(oracle.dequantize(dy), oracle.dequantize(stored) * scale, sizes,
                             transpose_w=True)  # fmt: skip
    oracle.assert_close(out, want)
    assert 0.03 < oracle.error(out, oracle.grouped_mm(oracle.dequantize(dy), w, sizes)) < 0.2


def test_dead_blocks_and_nan(rng):
    """A scale of 0 makes codes of +-6 zeros; NaN stays in its row of x, of w, and in its group."""
    x, w = random(rng, 40, 32, scale=positive(rng)), random(rng, 3, 8, 32, scale=positive(rng, 3))
    scales, codes = np.array(x.scales), np.array(x.weight)
    scales[3, 1], codes[3, 2:] = 0, 0xF7F7F7F7
    scales[5, 0] = scales[35, 1] = 0x7F
    x = dataclasses.replace(x, scales=jnp.asarray(scales), weight=jnp.asarray(codes))
    scales = np.array(w.scales)
    scales[2, 4, 0] = scales[1] = 0x7F
    w = dataclasses.replace(w, scales=jnp.asarray(scales))
    sizes = jnp.array([7, 0, 20])
    alpha = jnp.array([1, np.nan, 1], jnp.float32)
    out = np.asarray(
        jgg.nvfp4_grouped_mm(x, w, sizes, alpha=alpha, preferred_element_type="float32")
    )
    bad = np.zeros((40, 8), bool)
    bad[5] = bad[7:27, 4] = True
    np.testing.assert_array_equal(np.isnan(out), bad)
    oracle.assert_close(out[3:5], mm_oracle(x, w, sizes)[3:5])
    assert not out[27:].any()


def test_mm_gradients(rng):
    """Of alpha, bias and global scales, as their definitions say; integers get float0."""
    x, w = random(rng, 40, 32, scale=positive(rng)), random(rng, 3, 8, 32, scale=positive(rng, 3))
    alpha, bias, sizes = positive(rng, 3), oracle.random(rng, (3, 8)), jnp.array([7, 0, 20])
    ct = oracle.random(rng, (40, 8))

    def f(x, w, alpha, bias, sizes):
        return jgg.nvfp4_grouped_mm(
            x, w, sizes, alpha=alpha, bias=bias, preferred_element_type="float32"
        )

    dx, dw, dalpha, dbias, dsizes = jax.jit(lambda *a: jax.vjp(f, *a)[1](ct))(
        x, w, alpha, bias, sizes
    )
    terms = mm_oracle(x, w, sizes) * oracle.f64(ct)
    sums = np.stack([terms[first:last].sum() for first, last in oracle.bounds(sizes, 40)])
    oracle.assert_close(dalpha, sums, tolerance=1e-5)
    oracle.assert_close(
        dw.global_scale, sums * oracle.f64(alpha) / oracle.f64(w.global_scale), tolerance=1e-5
    )
    want = (sums * oracle.f64(alpha)).sum() / oracle.f64(x.global_scale)
    oracle.assert_close(dx.global_scale, want, tolerance=1e-5)
    rows = [oracle.f64(ct)[first:last].sum(0) for first, last in oracle.bounds(sizes, 40)]
    oracle.assert_close(dbias, np.stack(rows))
    for leaf in (dx.weight, dx.scales, dw.weight, dw.scales, dsizes):
        assert leaf.dtype == jax.dtypes.float0


@pytest.mark.parametrize("exponents", FAR)
@pytest.mark.one_in(2)
def test_mm_of_far_scales(rng, exponents):
    """The product of scales is no normal number; what it multiplies makes it one."""
    of_x, of_w = exponents
    x, w = (
        large(random(rng, 20, 64, scale=positive(rng) * 2.0**of_x)),
        large(random(rng, 3, 16, 64, scale=positive(rng, 3) * 2.0**of_w)),
    )
    f = functools.partial(jgg.nvfp4_grouped_mm, preferred_element_type="float32")
    sizes = np.array([9, 0, 8])
    oracle.assert_close(jax.jit(f)(x, w, sizes), mm_oracle(x, w, sizes))


def test_gradients_of_far_scales(rng):
    x = large(random(rng, 20, 64, scale=positive(rng) * 2.0**-66))
    w = large(random(rng, 3, 16, 64, scale=positive(rng, 3) * 2.0**-66))
    sizes, ct = np.array([9, 0, 8]), oracle.random(rng, (20, 16))

    def f(of_x, of_w):
        a = dataclasses.replace(x, global_scale=of_x)
        b = dataclasses.replace(w, global_scale=of_w)
        out = jgg.nvfp4_grouped_mm(a, b, sizes, preferred_element_type="float32")
        return jnp.vdot(out, ct)

    dx, dw = jax.jit(jax.grad(f, (0, 1)))(x.global_scale, w.global_scale)
    terms = mm_oracle(x, w, sizes) * oracle.f64(ct)
    sums = np.array([terms[a:b].sum() for a, b in oracle.bounds(sizes, 20)])
    oracle.assert_close(dx, sums.sum() / oracle.f64(x.global_scale), tolerance=1e-5)
    oracle.assert_close(dw, sums / oracle.f64(w.global_scale), tolerance=1e-5)
