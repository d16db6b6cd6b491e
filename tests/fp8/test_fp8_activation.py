"""Activations that are quantized as they are made, and rows that are quantized by list: the kernels
against their definitions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import lowered_calls
import moe_oracle
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import activation as fp8_activation
from jax_groupgemm._fp8 import blocks, convert
from jax_groupgemm._moe.permute import dispatched
from jax_groupgemm._moe.routing import route
from jax_groupgemm._quantized import convert as quantized_convert
from jax_groupgemm._quantized import padding

R = 700
SIZES = {
    "several": [130, 0, 1, 257, 128, 5], "all": [R], "none": [0, 0], "more than rows": [600, 600],
}  # fmt: skip
BY_SIZES = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
GATED = tuple(moe_oracle.GATED)
SEED = jnp.array([3, 5], jnp.uint32)


def values(q) -> np.ndarray:
    """Of what is stored."""
    stored = dataclasses.replace(q, axis=-1, layout="linear", positions=None)
    return oracle.f64(quantized_convert._dequantize(stored, jnp.float32))


def live(sizes) -> int:
    return min(sum(sizes), R)


def padded(sizes) -> np.ndarray:
    """Whether a padded row is of a group, or of its padding."""
    total = int(padding.padded_sizes(jnp.asarray(sizes), R, blocks.GROUPED).sum())
    return np.arange(padding.padded_rows(R, len(sizes), blocks.GROUPED)) < total


def close(got, want, columns):
    """Nearly all codes are the same: an activation may round otherwise here and there."""
    got, want = values(got)[..., columns], values(want)[..., columns]
    assert np.isfinite(got).all()
    assert oracle.error(got, want) < 2e-3
    if got.size:
        assert (got != want).mean() < 0.05


@pytest.mark.gpu
@BY_SIZES
@pytest.mark.parametrize("f", [128, 200, 768])
@pytest.mark.parametrize("activation", GATED)
def test_activation(rng, activation, f, sizes):
    h, sizes_ = oracle.random(rng, (R, 2 * f), "bfloat16"), jnp.asarray(sizes, jnp.int32)
    got = jax.jit(lambda h, s: fp8_activation.quantized_activation(h, s, activation))(h, sizes_)
    codes, scales = jax.jit(functools.partial(fp8_activation._activation, activation=activation))(
        h, sizes_
    )
    rows = live(sizes)  # others are left as they are
    of_groups = lambda codes, scales: convert.made(codes[:rows], scales[:rows])
    close(of_groups(got.weight, got.scales), of_groups(codes, scales), slice(None))


@pytest.mark.gpu
@BY_SIZES
@pytest.mark.parametrize("f", [128, 768])
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("random", [False, True])
def test_backward(rng, random, activation, f, sizes):
    h, d = oracle.random(rng, (R, 2 * f), "bfloat16"), oracle.random(rng, (R, f), "bfloat16")
    scale, sizes_ = oracle.random(rng, (R,)), jnp.asarray(sizes, jnp.int32)
    seeds = (SEED, SEED + 1) if random else (None, None)
    # Rows of no group hold anything.
    h, d, scale = (a.at[live(sizes) :].set(jnp.nan) for a in (h, d, scale))
    run = lambda *args: fp8_activation.quantized_backward(*args, sizes_, seeds, activation)
    dh, dh_columns, a, sums = jax.jit(run)(h, d, scale)
    *want, want_sums = jax.jit(functools.partial(fp8_activation._backward, activation=activation))(
        *(jnp.nan_to_num(v) for v in (h, d, scale)), sizes_, *seeds
    )
    rows, columns = slice(live(sizes)), padded(sizes)
    one = lambda i: convert.made(*want[2 * i : 2 * i + 2])
    cut = lambda q: dataclasses.replace(q, weight=q.weight[rows], scales=q.scales[rows])
    close(cut(dh), cut(one(0)), slice(None))
    close(dh_columns, one(1), columns)
    close(a, one(2), columns)
    np.testing.assert_allclose(sums[rows], want_sums[rows], rtol=1e-3, atol=1e-3)
    again = jax.jit(run)(h, d, scale)
    np.testing.assert_array_equal(values(again[1])[:, columns], values(dh_columns)[:, columns])


@pytest.mark.gpu
def test_nan_stays_in_its_blocks(rng):
    h, d = oracle.random(rng, (R, 512), "bfloat16"), oracle.random(rng, (R, 256), "bfloat16")
    scale, sizes = jnp.ones((R,)), jnp.array([300, 400], jnp.int32)
    run = jax.jit(lambda d: fp8_activation.quantized_backward(
        h, d, scale, sizes, (None, None), "swiglu"
    ))  # fmt: skip
    got, want = run(d.at[130, 200].set(jnp.nan)), run(d)
    rows = np.isnan(values(got[0]))
    assert rows[130, 128:256].all()
    assert rows[130, 384:].all()
    assert rows.sum() == 256
    columns = np.isnan(values(got[1]))
    assert columns[[200, 456], 128:256].all()
    assert columns.sum() == 256
    assert not np.isnan(values(got[2])).any()  # the activation has no part in it
    for one, other in zip(got[:2], want[:2], strict=True):
        one, other = values(one), values(other)
        np.testing.assert_array_equal(one[~np.isnan(one)], other[~np.isnan(one)])


@pytest.mark.default_device
@BY_SIZES
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("seed", [None, SEED])
def test_rows_by_list(rng, seed, dtype, sizes):
    """Are those of a copy, in every byte of a group, and so are positions. Kernels leave what is of
    no group as it is."""
    x, sizes = oracle.random(rng, (90, 136), dtype), jnp.asarray(sizes, jnp.int32)
    index = jnp.asarray(rng.integers(-3, 90, R), jnp.int32)
    rows = jnp.where((index < 0)[:, None], jnp.zeros((), x.dtype), x[index])
    got = jax.jit(convert.quantized_rows)(x, index, sizes, seed)
    want = jax.jit(
        lambda rows, sizes, seed: convert.quantized(
            "", rows, block=blocks.LINE, axis=-2, group_sizes=sizes, seed=seed
        )
    )(rows, sizes, seed)
    there = padded(sizes)
    leaves = lambda q: (q.weight[:, there], q.scales[:, there[::128]], q.positions)
    for one, other in zip(leaves(got), leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.gpu
@pytest.mark.parametrize("lines", [20000, 100000])
def test_columns_in_slices(rng, lines):
    """Several of a few spans, of which the last has fewer; and slices of one."""
    x = jnp.asarray(oracle.random(rng, (lines, 712), "bfloat16"))
    sizes = jnp.asarray([700, 0, 3000, 129, 1], jnp.int32)
    index = jnp.asarray(rng.integers(-1, lines, 3830), jnp.int32)
    got = jax.jit(convert.quantized_rows)(x, index, sizes, None)
    rows = jnp.where((index < 0)[:, None], jnp.zeros((), x.dtype), x[index])
    want = jax.jit(functools.partial(jgg.fp8_quantize, axis=0))(rows, group_sizes=sizes)
    padded = 128 * (6 + 0 + 24 + 2 + 1)  # what is behind is left as it is
    np.testing.assert_array_equal(values(got)[:, :padded], values(want)[:, :padded])


@pytest.mark.gpu
def test_a_list_that_names_no_row(rng):
    """Reads nothing outside of x."""
    x, sizes = oracle.random(rng, (90, 136), "bfloat16"), jnp.array([R], jnp.int32)
    index = jnp.asarray(rng.integers(0, 90, R), jnp.int32).at[::3].set(2**30)
    got = jax.jit(convert.quantized_rows)(x, index, sizes, None)
    want = jax.jit(convert.quantized_rows)(x, jnp.where(index > 90, -1, index), sizes, None)
    np.testing.assert_array_equal(values(got), values(want))


@pytest.mark.default_device
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_codes_are_copied_to_their_rows(rng, dtype):
    x = oracle.random(rng, (50, 64)).astype(dtype)
    index = jnp.asarray(rng.integers(-1, 4, (50, 3)), jnp.int32)
    routing = route(index, 4)
    got = jax.jit(lambda x, r: dispatched(x, r))(x, routing)
    order = np.asarray(routing.order)
    want = np.where((order < 0)[:, None], 0, oracle.f64(x)[order // 3])
    np.testing.assert_array_equal(oracle.f64(got), want)


def test_calls():
    h, d = jnp.zeros((R, 512), jnp.bfloat16), jnp.zeros((R, 256), jnp.bfloat16)
    sizes, scale = jnp.zeros((3,), jnp.int32), jnp.zeros((R,))
    lowered = lambda f, *args: jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    text = lowered(lambda h, s: fp8_activation.quantized_activation(h, s, "swiglu"), h, sizes)
    operands, results, attributes = lowered_calls.call("jgg_fp8_activation", text)
    assert operands == [f"{R}x512xbf16", "3xi32"]
    assert results == [f"{R}x256xf8E4M3FN", f"{R}x2xf32", "8xi32"]
    assert attributes == 'activation = "swiglu"'
    run = lambda *args: fp8_activation.quantized_backward(*args, (None, None), "swiglu")
    text = lowered(run, h, d, scale, sizes)
    operands, results, _ = lowered_calls.call("jgg_fp8_activation_backward", text)
    assert operands == [
        f"{R}x512xbf16", f"{R}x256xbf16", f"{R}xf32", "3xi32", "0xui32", "0xui32"
    ]  # fmt: skip
    along = padding.padded_rows(R, 3, 128)
    assert results == [
        f"{R}x512xf8E4M3FN", f"{R}x4xf32", f"512x{along}xf8E4M3FN", f"512x{along // 128}xf32",
        f"256x{along}xf8E4M3FN", f"256x{along // 128}xf32", f"2x{R}xf32",
        f"{8 + 2 * (along // 128)}xi32",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "f", "activation"),
    [("float32", 256, "swiglu"), ("bfloat16", 192, "swiglu"), ("bfloat16", 256, "silu")],
)
def test_other_layers_are_composed(dtype, f, activation):
    h = jax.ShapeDtypeStruct((R, 2 * f), dtype)
    assert fp8_activation.takes("cuda", jax.ShapeDtypeStruct((R, 512), "bfloat16"), "swiglu")
    assert not fp8_activation.takes("cuda", h, activation)
    assert not fp8_activation.takes("cpu", jax.ShapeDtypeStruct((R, 512), "bfloat16"), "swiglu")


def test_layers_gradients_are_finite_where_the_recipe_is_bfloat16(rng):
    """Recipes that the fused kernels do not know."""
    x, up, down = (oracle.random(rng, s, "bfloat16") for s in ((9, 16), (2, 16, 32), (2, 16, 16)))
    index, weight = jnp.zeros((9, 1), jnp.int32), jnp.ones((9, 1))
    recipe = jgg.FP8Recipe(dgrad="bfloat16", wgrad="bfloat16")
    f = lambda x: jgg.moe_mlp(x, up, down, index, weight, recipe=recipe).astype("float32").sum()
    assert np.isfinite(np.asarray(jax.jit(jax.grad(f))(x), np.float32)).all()
