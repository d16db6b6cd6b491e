"""The experts of a mixture on Hopper, with rows enough for the kernel that has an activation beside
its product."""

import functools

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest

import jax_groupgemm as jgg

GATED = tuple(moe_oracle.GATED)


def operands(tokens, k, experts, d, f, dtype, transpose_w=False, seed=0):
    """Routing leaves expert 0 without rows, and gives the last one half of all."""
    rng = np.random.default_rng(seed)
    cast = lambda *shape, scale=1.0: jnp.asarray(scale * rng.normal(size=shape), dtype)
    x, ct = cast(tokens, d), cast(tokens, d)
    up, down = cast(experts, d, 2 * f, scale=d**-0.5), cast(experts, f, d, scale=f**-0.5)
    if transpose_w:
        up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
    index = rng.integers(1, experts, (tokens, k))
    index[: tokens // 2] = experts - 1
    index[5] = -1
    weight = jnp.asarray(rng.uniform(size=(tokens, k)), jnp.float32)
    return x, up, down, jnp.asarray(index), weight, ct


def both(x, up, down, index, weight, ct, **options):
    """The layer and all gradients, as kernels run it and as composition."""

    def run(implementation):
        layer = functools.partial(jgg.moe_mlp, implementation=implementation, **options)

        @jax.jit
        def call(x, up, down, weight, ct):
            y, pull = jax.vjp(lambda *a: layer(*a[:3], index, a[3]), x, up, down, weight)
            return y, pull(ct)

        return call

    given = (x, up, down, weight, ct)
    return run(None), run("composed"), given


def close(got, want, tolerance):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = np.float64(one), np.float64(other)
        assert np.abs(one - other).max() <= tolerance * max(np.abs(other).max(), 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(("d", "f"), [(192, 200), (64, 64), (512, 384), (136, 72)])
def test_values_and_gradients(d, f, transpose_w, activation, dtype):
    given = operands(1500, 2, 6, d, f, dtype, transpose_w)
    ours, composed, args = both(*given, transpose_w=transpose_w, activation=activation)
    text = ours.lower(*args).as_text()
    one_kernel = activation == "swiglu" and f > 128
    assert ("jgg_moe_down_backward" if one_kernel else "jgg_activation_backward") in text
    assert "rounds_preactivation = true" in text
    close(ours(*args), composed(*args), 2e-2 if dtype == "bfloat16" else 3e-3)


@pytest.mark.gpu
def test_many_tiles():
    given = operands(20000, 4, 12, 256, 448, "bfloat16")
    ours, composed, args = both(*given)
    got = ours(*args)
    close(got, composed(*args), 2e-2)
    for _ in range(20):
        again = ours(*args)
        assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (got, again)), strict=True))


@pytest.mark.gpu
def test_nan_stays_in_its_token():
    x, up, down, index, weight, ct = operands(1500, 2, 6, 192, 200, "bfloat16")
    ours, _, args = both(x, up, down, index, weight, ct)
    y, grads = ours(*args)
    bad_y, bad_grads = ours(x.at[700].set(jnp.nan), *args[1:])
    others = np.arange(1500) != 700
    assert np.isnan(np.float32(bad_y[700])).all()
    for one, other in ((y, bad_y), (grads[0], bad_grads[0]), (grads[3], bad_grads[3])):
        assert (np.asarray(one)[others] == np.asarray(other)[others]).all()


@pytest.mark.gpu
def test_fewer_rows_than_pairs():
    given = operands(1500, 2, 6, 192, 200, "bfloat16")
    x, up, down, index, weight, ct = given
    index = index.at[100:900].set(-1)
    ours, composed, args = both(x, up, down, index, weight, ct, max_rows=2000)
    close(ours(*args), composed(*args), 2e-2)
