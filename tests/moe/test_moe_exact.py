"""``moe_mlp`` at its edges: every pattern of experts with all gradients, NaN in gradients, float64,
no tokens, donated operands, weights in every format."""

import functools

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
from test_moe_mlp import D, problem

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device


def pulled(x, up, down, index, weight, ct, **options):
    """The result and all gradients."""
    layer = lambda x, up, down, weight: jgg.moe_mlp(x, up, down, index, weight, **options)
    out, pull = jax.vjp(layer, x, up, down, weight)
    return out, *pull(ct)


def assert_like_float64(got, args, ct, tolerance=None):
    x, up, down, index, weight = args
    y, grads = moe_oracle.moe_mlp(x, up, down, index, weight, oracle.f64(ct))
    for one, want in zip(got, (y, *grads[:4]), strict=True):
        oracle.assert_close(one, want, tolerance=tolerance)


def test_every_pattern_of_eight_experts_with_gradients(rng):
    """256 patterns of experts with and without tokens, as one program."""
    x, up, down, _, weight = problem(rng, tokens=4, experts=8, d=5, f=3)
    ct = oracle.random(rng, x.shape)
    patterns = []
    for used in range(256):
        choices = [e for e in range(8) if used >> e & 1] or [-1]
        # All of them if they fit, in any order.
        picked = rng.permutation(np.resize(choices, 8))
        patterns.append(picked.reshape(4, 2).astype(np.int32))
    run = lambda index: pulled(x, up, down, index, weight, ct)
    got = jax.jit(lambda indices: jax.lax.map(run, indices))(jnp.asarray(patterns))
    for i, index in enumerate(patterns):
        each = [value[i] for value in got]
        assert_like_float64(each, (x, up, down, index, weight), ct)
        empty = np.setdiff1d(np.arange(8), index)
        assert not np.asarray(each[2])[empty].any()


def test_sixteen_experts_of_a_token(rng):
    """More than there are, so that some come twice."""
    args, ct = problem(rng, k=16, tokens=7), oracle.random(rng, (7, D))
    assert_like_float64(jax.jit(pulled)(*args, ct), args, ct)


@pytest.mark.parametrize("where", ["token", "expert"])
def test_nan_stays_in_gradients_that_meet_it(rng, where):
    """That of a token reaches its experts' gradients and its own; that of an expert's weights its
    tokens'."""
    x, up, down, index, weight = problem(rng, tokens=9)
    ct, index = oracle.random(rng, x.shape), np.array(index)
    index[3] = 1, 1
    index[np.arange(9) != 3] = np.where(index == 1, 2, index)[np.arange(9) != 3]
    index[5] = 0, 0
    index[np.arange(9) != 5] = np.where(index == 0, 3, index)[np.arange(9) != 5]
    if where == "token":
        x = x.at[3].set(jnp.nan)
    else:
        up = up.at[1].set(jnp.nan)
    out, dx, dup, ddown, dweight = jax.jit(pulled)(x, up, down, jnp.asarray(index), weight, ct)
    bad = lambda a: set(np.flatnonzero(np.isnan(np.asarray(a)).reshape(len(a), -1).any(1)))
    assert bad(out) == bad(dx) == bad(dweight) == {3}
    assert bad(dup) | bad(ddown) == {1}


def test_gradients_of_no_tokens(rng):
    x, up, down, index, weight = problem(rng)
    got = pulled(x[:0], up, down, index[:0], weight[:0], x[:0])
    assert [a.shape for a in got] == [(0, D), (0, D), up.shape, down.shape, (0, 2)]
    assert not any(np.asarray(a).any() for a in got)


def test_gradient_of_weights_in_float64(rng):
    """By differences, of a float64 layer: the layer is linear in them, so a step of any size will
    do."""
    with jax.enable_x64(True):
        x, up, down, index, weight = problem(rng, tokens=5)
        x, up, down, weight = (jnp.asarray(np.asarray(a), "float64") for a in (x, up, down, weight))
        ct = jnp.asarray(rng.standard_normal(x.shape))
        got = jax.jit(pulled)(x, up, down, index, weight, ct)
        assert {a.dtype.name for a in got} == {"float64"}
        f = jax.jit(lambda weight: jnp.vdot(jgg.moe_mlp(x, up, down, index, weight), ct))
        for t, j in np.ndindex(weight.shape):
            difference = f(weight.at[t, j].add(0.5)) - f(weight.at[t, j].add(-0.5))
            assert abs(got[4][t, j] - difference) <= 1e-12 * max(1, abs(difference))


def test_halves_of_ieee(rng):
    args = problem(rng, dtype="float16")
    ct = oracle.random(rng, args[0].shape, "float16")
    assert_like_float64(jax.jit(pulled)(*args, ct), args, ct, tolerance=0.005)


def test_donated_operands(rng):
    """Their memory may be used again, their values are not needed after."""
    args = problem(rng)
    ct = oracle.random(rng, args[0].shape)
    want = jax.jit(pulled)(*args, ct)
    copies = [jnp.array(a) for a in (*args, ct)]
    got = jax.jit(pulled, donate_argnums=(0, 1, 2, 5))(*copies)
    assert copies[1].is_deleted()
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


FORMATS = {
    "nvfp4": {}, "mxfp4": {}, "mxfp8": {}, "fp8": {}, "affine4": {"bits": 4, "group_size": 32},
    "affine8": {"bits": 8, "group_size": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.one_in(2)
def test_weights_in_every_format(rng, name):
    """Values and dx are those of the values that codes stand for; so are the gradients of an affine
    format's scales and biases."""
    x, up, down, index, weight = problem(rng, d=64, f=32)
    quantize = functools.partial(
        jgg.quantize, mode=name.rstrip("48") if "affine" in name else name, contract=-1,
        **FORMATS[name],
    )  # fmt: skip
    quantized = tuple(quantize(w.swapaxes(1, 2)) for w in (up, down))
    ct = oracle.random(rng, x.shape)
    values = lambda q: tuple(jgg.dequantize(w, dtype="float32") for w in q)

    def layer(x, up, down):
        return jgg.moe_mlp(x, up, down, index, weight, transpose_w=True)

    moving = lambda w: (w.scales, w.biases) if "affine" in name else ()
    put = lambda w, of: w if not of else jgg.Quantized(
        w.weight, *of, mode="affine", bits=w.bits, group_size=w.group_size
    )  # fmt: skip  # pyright: ignore

    def run(x, leaves, dequantized):
        q = tuple(map(put, quantized, leaves))
        return layer(x, *(values(q) if dequantized else q))

    leaves = tuple(map(moving, quantized))
    got, want = (
        jax.jit(lambda x, leaves, d=d: _out_and_pull(run, x, leaves, d, ct))(x, leaves)
        for d in (False, True)
    )
    assert len(jax.tree.leaves(got)) == (2 if not leaves[0] else 6)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.assert_close(one, other, tolerance=2e-5)


def _out_and_pull(run, x, leaves, dequantized, ct):
    out, pull = jax.vjp(lambda x, leaves: run(x, leaves, dequantized), x, leaves)
    return out, pull(ct)
