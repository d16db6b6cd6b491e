"""``nvfp4_grouped_wgrad`` against numpy: values and gradients."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import BEST, GPU_KERNELS
from nvfp4_grouped_problems import (
    FAR,
    ODD,
    ROWS,
    SIZES,
    K,
    N,
    T,
    along_t,
    large,
    positive,
    splits,
    wgrad_oracle,
    wgrad_problem,
)
from qmm_problems import needs
from test_prepack_call import live
from test_quantize_call import calls, lowered

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension
from jax_groupgemm.tune import timing


def test_wgrad(rng, implementation):
    f = jax.jit(functools.partial(jgg.nvfp4_grouped_wgrad, implementation=implementation))
    for sizes in SIZES.values():
        x = along_t(rng, K, sizes, scale=positive(rng))
        dy = along_t(rng, N, sizes, scale=positive(rng))
        out = f(x, dy, np.array(sizes, np.int16))
        assert out.dtype == "float32"
        oracle.assert_close(out, wgrad_oracle(x, dy, sizes))
        empty = [first == last for first, last in oracle.bounds(sizes, T)]
        assert not np.asarray(out)[empty].any()


def test_wgrad_of_three_groups(rng):
    for sizes in ([256] * 3, [256, 128, 384]):
        x, dy = along_t(rng, K, sizes, 768), along_t(rng, N, sizes, 768)
        out = jax.jit(jgg.nvfp4_grouped_wgrad)(x, dy, np.array(sizes))
        oracle.assert_close(out, wgrad_oracle(x, dy, sizes))


@pytest.mark.parametrize("choice", ["reference", "cpu", *GPU_KERNELS, BEST])
def test_wgrad_of_named_splits(rng, choice):
    """One program of each kernel; of the best one on a GPU each split's own."""
    f = jax.jit(functools.partial(jgg.nvfp4_grouped_wgrad, implementation=needs(choice)))
    for sizes, rows in splits(one_shape=choice is not None):
        x, dy = along_t(rng, 24, sizes, rows), along_t(rng, 40, sizes, rows)
        want, out = wgrad_oracle(x, dy, sizes), f(x, dy, sizes)
        assert want.any() == sizes.any()
        oracle.assert_close(out, want, tolerance=1e-5)
        assert not np.asarray(out)[sizes == 0].any()


ALPHA = np.array([1, np.inf, 3, np.nan, 0.5], np.float32)
BETA = np.array([1, 1, 0, -2, 0.5], np.float32)


@pytest.mark.parametrize(("alpha", "beta"), [(None, None), (2, BETA), (ALPHA, 3), (ALPHA, None)])
@pytest.mark.one_in(3)
def test_wgrad_scales_and_accumulates(rng, alpha, beta):
    """Empty groups keep what there was, -0 and NaN too; with beta 0 NaN does not count."""
    x, dy, old = wgrad_problem(rng)
    sizes = jnp.array(ODD)
    wide = lambda v: np.broadcast_to(1.0 if v is None else v, 5)[:, None, None].astype(float)
    with np.errstate(invalid="ignore"):
        product = np.where(wide(ODD) > 0, wgrad_oracle(x, dy, ODD) * wide(alpha), 0)
    np.testing.assert_array_equal(
        np.isfinite(jgg.nvfp4_grouped_wgrad(x, dy, sizes, alpha=alpha)), True
    )
    want = product + wide(beta) * oracle.f64(old)
    if isinstance(beta, np.ndarray):
        old = old.at[2, 1].set(np.nan)
    old = old.at[1, 0].set(-0.0).at[1, 1].set(np.nan)
    got = jax.jit(jgg.nvfp4_grouped_wgrad)(x, dy, sizes, alpha=alpha, beta=beta, existing_out=old)
    got, old = np.asarray(got), np.asarray(old)
    if beta is None:
        np.testing.assert_array_equal(got[1].view(np.int32), old[1].view(np.int32))
    assert np.isnan(got[1, 1]).all()
    assert np.signbit(got[1, 0]).all()
    live = [0, 2, 3, 4]
    oracle.assert_close(got[live], want[live])


def test_wgrad_in_place(rng):
    x, dy, old = wgrad_problem(rng)
    f = jax.jit(
        lambda old, x, dy: jgg.nvfp4_grouped_wgrad(x, dy, jnp.array(ODD), existing_out=old),
        donate_argnums=0,
    )
    text = f.lower(old, x, dy).compile().as_text()
    assert re.search(r"input_output_alias=\{ \{\}: \(0, ", text), text[:300]
    want = oracle.f64(old) + wgrad_oracle(x, dy, ODD)
    oracle.assert_close(f(old, x, dy), want)
    assert old.is_deleted()


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [None, 0.5])
def test_wgrad_in_place_on_a_gpu(rng, beta):
    """At the address of what is donated, without a copy of it; matrices of groups without rows keep
    every byte. On Hopper one kernel does all."""
    sizes = np.array([0, 15, 127, 0, 1, 200, 17, 0], np.int32)
    x, dy = along_t(rng, 512, sizes, 400, positive(rng)), along_t(rng, 1024, sizes, 400)
    alpha = positive(rng, 8)
    values = np.array(oracle.random(rng, (8, 1024, 512)))
    scaled = (1 if beta is None else beta) * oracle.f64(values)
    want = wgrad_oracle(x, dy, sizes) * oracle.f64(alpha)[:, None, None] + scaled
    if beta is None:
        values[0] = rng.integers(0, 2**32, values[0].shape, np.uint32).view(np.float32)
        values[3], values[7] = -0.0, np.nan

    def accumulate(old, x, dy, sizes, alpha):
        return jgg.nvfp4_grouped_wgrad(x, dy, sizes, alpha=alpha, beta=beta, existing_out=old)

    old, given = jnp.asarray(values), (x, dy, jnp.asarray(sizes), alpha)
    compiled = jax.jit(accumulate, donate_argnums=0).lower(old, *given).compile()
    hopper = 90 in extension.live_capabilities()
    if hopper and beta is None:
        assert compiled.memory_analysis().temp_size_in_bytes < old.nbytes // 2
    address = old.unsafe_buffer_pointer()
    out = compiled(old, *given)
    assert out.unsafe_buffer_pointer() == address
    assert old.is_deleted()
    assert out.dtype == "float32"
    again = jnp.asarray(values)
    with timing.kernels() as found:
        jax.block_until_ready(compiled(again, *given))
    products = [name for name, _ in found if "GemmSm" in name]
    assert len(products) == 1, found
    assert "GemmSm90Kernel" in products[0] or not hopper, found
    got, empty = np.asarray(out), sizes == 0
    oracle.assert_close(got[~empty], want[~empty], tolerance=1e-5)
    if beta is None:
        np.testing.assert_array_equal(got[empty].view(np.int32), values[empty].view(np.int32))
    else:
        np.testing.assert_array_equal(got[empty], beta * values[empty])


def test_wgrad_of_other_sizes_is_nan(rng):
    """Sizes that operands were not padded for give no plausible numbers."""
    x, dy, _ = wgrad_problem(rng)
    other = along_t(rng, 6, [19, 0, 34, 0, 7], ROWS)
    f = jax.jit(jgg.nvfp4_grouped_wgrad)
    assert np.isfinite(f(x, dy, jnp.array(ODD))).all()
    for args in ((x, other, jnp.array(ODD)), (x, dy, jnp.array([19, 0, 34, 0, 7]))):
        out = np.asarray(f(*args))
        np.testing.assert_array_equal(np.isnan(out).any((1, 2)), [True, False, True, False, True])


def test_wgrad_nan_stays_in_its_group(rng):
    """A block's NaN scale: in the columns of its group, and nowhere from padding."""
    x, dy, _ = wgrad_problem(rng)
    scales = np.array(x.scales)
    scales[3, 4] = 0x7F  # rows 64 to 79: the first of group 2
    scales[5, -1] = 0x7F  # past every group
    x = dataclasses.replace(x, scales=jnp.asarray(scales))
    bad = np.zeros((5, 6, 8), bool)
    bad[2, :, 3] = True
    np.testing.assert_array_equal(np.isnan(jgg.nvfp4_grouped_wgrad(x, dy, jnp.array(ODD))), bad)


def test_wgrad_of_what_is_quantized(rng):
    """Of nvfp4_quantize's operands: near the exact product, whatever garbage the tail holds."""
    x, dy = oracle.random(rng, (ROWS, 8)), oracle.random(rng, (ROWS, 8))
    sizes = jnp.array(ODD)

    def f(x, dy):
        q = functools.partial(
            jgg.nvfp4_quantize, axis=0, group_sizes=sizes, hadamard=True
        )  # fmt: skip
        return jgg.nvfp4_grouped_wgrad(q(x), q(dy), sizes)

    out = f(x, dy)
    parts = [oracle.f64(dy)[a:b].T @ oracle.f64(x)[a:b] for a, b in oracle.bounds(ODD, ROWS)]
    assert 0.05 < oracle.error(out, np.stack(parts)) < 0.2
    assert not np.asarray(out)[[1, 3]].any()
    np.testing.assert_array_equal(f(x.at[60:].set(np.nan), dy.at[60:].set(np.inf)), out)
    assert not np.asarray(f(jnp.zeros_like(x), dy)).any()


def test_wgrad_gradients(rng):
    x, dy, old = wgrad_problem(rng)
    alpha, beta, ct = positive(rng, 5), positive(rng, 5), oracle.random(rng, (5, 6, 8))

    def f(x, dy, alpha, beta, old, sizes):
        return jgg.nvfp4_grouped_wgrad(x, dy, sizes, alpha=alpha, beta=beta, existing_out=old)

    dx, ddy, dalpha, dbeta, dold, dsizes = jax.jit(lambda *a: jax.vjp(f, *a)[1](ct))(
        x, dy, alpha, beta, old, jnp.array(ODD)
    )
    sums = (wgrad_oracle(x, dy, ODD) * oracle.f64(ct)).sum((1, 2))
    oracle.assert_close(dalpha, sums, tolerance=1e-5)
    for grad, q in ((dx, x), (ddy, dy)):
        want = (sums * oracle.f64(alpha)).sum() / oracle.f64(q.global_scale)
        oracle.assert_close(grad.global_scale, want, tolerance=1e-5)
        for leaf in (grad.weight, grad.scales, grad.positions, dsizes):
            assert leaf.dtype == jax.dtypes.float0
    oracle.assert_close(dbeta, (oracle.f64(old) * oracle.f64(ct)).sum((1, 2)), tolerance=1e-5)
    oracle.assert_close(dold, oracle.f64(ct) * oracle.f64(beta)[:, None, None])


def product(function, *operands):
    """The custom call of the product: operands, results, attributes."""
    found = calls(lowered(function, *operands))
    assert sorted(call[0] for call in found) == ["jgg_dequantize", "jgg_dequantize", "jgg_wgrad"]
    return next(call[1:] for call in found if call[0] == "jgg_wgrad")


def test_one_kernel_scales_and_accumulates(rng, monkeypatch):
    """On Hopper, where matrices are not so few that several blocks share each."""
    x, dy, old = wgrad_problem(rng)
    f = functools.partial(jgg.nvfp4_grouped_wgrad, group_sizes=jnp.array(ODD))
    live(monkeypatch)  # no GPU
    assert "scale = false" in product(functools.partial(f, alpha=2), x, dy)[2]
    live(monkeypatch, 90)
    operands, results, static = product(functools.partial(f, alpha=3), x, dy)
    assert operands == ["6x384xbf16", "8x384xbf16", "5xi32", "5xf32"]
    assert results == ["5x6x8xf32"]
    assert "existing_out = false" in static
    assert "scale = true" in static
    accumulated = lambda x, dy, old: f(x, dy, beta=2.0, existing_out=old)
    assert product(accumulated, x, dy, old)[0][3:] == ["5xf32", "5x6x8xf32"]
    assert "operand_index = 4" in lowered(accumulated, x, dy, old)
    assert "scale = false" in product(functools.partial(f, implementation="sm80"), x, dy)[2]
    one = along_t(rng, 8, [4096], 4096), along_t(rng, 6, [4096], 4096)
    in_parts = lambda x, dy: jgg.nvfp4_grouped_wgrad(x, dy, jnp.array([4096]))
    assert "scale = false" in product(in_parts, *one)[2]


def test_linear_layer_rounds_once(monkeypatch):
    """The gradient of bfloat16 weights leaves the kernel as such."""
    live(monkeypatch, 90)
    x, w = jnp.ones((64, 32), jnp.bfloat16), jnp.ones((3, 48, 32), jnp.bfloat16)
    sizes = jnp.array([20, 30, 14])
    loss = lambda w: jgg.nvfp4_grouped_linear(x, w, sizes).astype(jnp.float32).sum()
    (out,) = (call[2] for call in calls(lowered(jax.grad(loss), w)) if call[0] == "jgg_wgrad")
    assert out == ["3x48x32xbf16"]


@pytest.mark.parametrize("exponents", FAR)
@pytest.mark.one_in(2)
def test_wgrad_of_far_scales(rng, exponents):
    """The product of scales is no normal number; what it multiplies makes it one."""
    x, dy = (
        large(along_t(rng, columns, ODD, ROWS, positive(rng) * 2.0**e))
        for columns, e in zip((8, 6), exponents, strict=True)
    )
    out = jax.jit(jgg.nvfp4_grouped_wgrad)(x, dy, jnp.array(ODD))
    oracle.assert_close(out, wgrad_oracle(x, dy, ODD))
