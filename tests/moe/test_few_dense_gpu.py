"""A layer of a few tokens with 16-bit weights, by the kernels that sort nothing."""

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
from device_runs import run
from replays import CAPTURED, EAGER, assert_chained, same_bits

import jax_groupgemm as jgg

pytestmark = pytest.mark.gpu
E, D, F = 64, 2048, 768


def problem(rng, dtype, tokens, k, *, gated=True, e=E, d=D, f=F):
    """x, up, down, expert_index, expert_weight; weights are made where they are used."""
    keys = iter(jax.random.split(jax.random.key(int(rng.integers(2**31))), 3))
    of = lambda *shape: jax.random.normal(next(keys), shape, dtype)
    up, down = of(e, d, f * (1 + gated)) / d**0.5, of(e, f, d) / f**0.5
    index = jnp.asarray(rng.integers(0, e, (tokens, k)), jnp.int32)
    weight = jnp.asarray(rng.random((tokens, k)), jnp.float32)
    return of(tokens, d), up, down, index, weight


def check(problem, **options):
    """Against the composition of other kernels, and that it is two kernels."""
    layer = lambda *a: jgg.moe_mlp(*a, **options)
    out, kernels = run(jax.jit(layer), *problem)
    names = "FewDenseUpSm80Kernel", "FewDenseDownSm80Kernel"
    assert [sum(name in k for k in kernels) for name in names] == [1, 1]
    assert not any("Route" in name or "Combine" in name for name in kernels), kernels
    want = jax.jit(lambda *a: jgg.moe_mlp(*a, **options, implementation="composed"))(*problem)
    assert out.dtype == want.dtype
    oracle.assert_close_but_nan(out, want, 1e-2)
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 8])
def test_tokens(rng, dtype, tokens):
    """8 tokens have 64 pairs; blocks of the second kernel have 16, 32 or 64 columns."""
    check(problem(rng, dtype, tokens, 8))


@pytest.mark.parametrize(("tokens", "k"), [(64, 1), (32, 2), (16, 4), (9, 7), (1, 1), (2, 3)])
def test_pairs(rng, tokens, k):
    check(problem(rng, "bfloat16", tokens, k))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("tokens", "d", "f"), [(1, 2880, 2880), (3, 200, 104), (8, 8, 8), (4, 6144, 40)]
)
def test_shapes(rng, dtype, tokens, d, f):
    """Neither columns nor k are whole steps."""
    check(problem(rng, dtype, tokens, 4, e=8, d=d, f=f))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_transposed_weights(rng, dtype, tokens):
    x, up, down, *pairs = problem(rng, dtype, tokens, 8)
    check((x, up.swapaxes(1, 2), down.swapaxes(1, 2), *pairs), transpose_w=True)


@pytest.mark.parametrize("activation", [*moe_oracle.ACTIVATIONS, *moe_oracle.GATED])
def test_activations(rng, activation):
    gated = activation in moe_oracle.GATED
    check(problem(rng, "bfloat16", 3, 4, gated=gated), activation=activation)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_options(rng, dtype):
    """Biases, weights of some of the experts, indices outside, one expert of all tokens, the same
    one twice for a token."""
    x, up, down, index, weight = problem(rng, dtype, 8, 4)
    biases = {"up_bias": oracle.random(rng, (E, 2 * F)), "down_bias": oracle.random(rng, (E, D))}
    index = index.at[3].set(-1).at[4, 1].set(E + 20).at[5:].set(7)
    check((x, up, down, index, weight), **biases)
    check((x, up, down, index, weight), expert_offset=jnp.int32(5), **biases)
    check((x, up, down, index.astype(jnp.int8), weight), preferred_element_type=jnp.float32)
    half = {name: bias.astype(dtype) for name, bias in biases.items()}
    more = [jnp.concatenate([a, a]) for a in (x, index, weight)]
    check((more[0], up, down, *more[1:]), **half)


def test_nan(rng):
    x, up, down, _, weight = problem(rng, "bfloat16", 4, 2)
    index = jnp.array([[0, 1], [2, 3], [0, 2], [4, 5]])
    out = check((x.at[1, 7].set(jnp.nan), up, down, index, weight))
    np.testing.assert_array_equal(np.isnan(out).all(1), [False, True, False, False])
    out = check((x, up, down.at[4, 9, 100].set(jnp.nan), index, weight))
    np.testing.assert_array_equal(np.argwhere(np.isnan(out)), [[3, 100]])


def test_replayed(rng):
    """50 steps in one program, each with another routing."""
    x, up, down, index, weight = problem(rng, "bfloat16", 2, 8)

    def steps(x, *weights):
        def one(x, i):
            y = jgg.moe_mlp(x, *weights, (index + i) % E, weight)
            return (y / jnp.sqrt(jnp.square(y).mean())).astype(x.dtype), (x, y)

        return jax.lax.scan(one, x, jnp.arange(50))[1]

    xs, found = jax.jit(steps)(x, up, down)
    again = jax.jit(steps)(x, up, down)[1]
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (found, again)))
    layer = jax.jit(lambda x, i: jgg.moe_mlp(x, up, down, (index + i) % E, weight))
    for i in (0, 1, 49):
        assert same_bits(layer(xs[i], i), found[i])


@pytest.mark.parametrize("options", [EAGER, CAPTURED], ids=["eager", "captured"])
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_the_second_kernel_begins_early(rng, tokens, options):
    assert_chained(problem(rng, "bfloat16", tokens, 8), 4, options)
