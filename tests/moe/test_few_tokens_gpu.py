"""A layer of a few tokens with prepacked weights, by the kernels that sort nothing."""

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
from device_runs import run
from qmm_problems import HOPPER
from replays import CAPTURED, EAGER, refill, same_bits

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
FORMATS = [
    ("nvfp4", 4, 16), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("fp8", 8, 128),
    *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)), ("affine", 4, 32), ("affine", 4, 128),
]  # fmt: skip
E, D, F = 16, 2048, 768


def problem(rng, mode, bits, group_size, tokens, k, gated=True):
    """x, up, down, expert_index, expert_weight."""
    of = lambda *shape: oracle.random_quantized(rng, shape, mode, bits, group_size, "bfloat16")
    up, down = of(E, F * (1 + gated), D), of(E, D, F)
    index = jnp.asarray(rng.integers(0, E, (tokens, k)), jnp.int32)
    weight = jnp.asarray(rng.random((tokens, k)), jnp.float32)
    return oracle.random(rng, (tokens, D), "bfloat16"), up, down, index, weight


def check(problem, **options):
    """Against the composition of other kernels, and that it is two kernels."""
    x, up, down, *choices = problem
    packed = [jgg.prepack(w) for w in (up, down)]
    layer = lambda x, up, down, *choices: jgg.moe_mlp(x, up, down, *choices, **options)
    out, kernels = run(jax.jit(layer), x, *packed, *choices)
    assert [sum(name in k for k in kernels) for name in ("UpSm90Kernel", "DownSm90Kernel")] == [
        1,
        1,
    ]
    assert not any("Route" in name or "Combine" in name for name in kernels), kernels
    want = jax.jit(layer)(x, up, down, *choices)
    assert out.dtype == want.dtype
    oracle.assert_close_but_nan(out, want, 1e-2)
    return out


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_formats(rng, mode, bits, group_size, tokens):
    check(problem(rng, mode, bits, group_size, tokens, 8))


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
@pytest.mark.parametrize(("tokens", "k"), [(8, 6), (16, 3)])
def test_down_by_groups(rng, mode, bits, group_size, tokens, k):
    """Several pairs of each expert; some of tokens that are not here, one expert of more than eight
    pairs, biases."""
    x, up, down, index, weight = problem(rng, mode, bits, group_size, tokens, k)
    index = index.at[3].set(-1).at[4:12:2].set(5)
    biases = {"up_bias": oracle.random(rng, (E, 2 * F)), "down_bias": oracle.random(rng, (E, D))}
    terms = extension.rules().moe_few_term_rows(pairs=tokens * k, experts=E, matrix=D * F)
    assert terms == tokens * k
    check((x, up, down, index, weight), **biases)
    check((x, up, down, index, weight), expert_offset=jnp.int32(3), **biases)


@pytest.mark.parametrize(("d", "f"), [(192, 3072), (4096, 1536), (2880, 2816)])
def test_down_by_groups_of_other_sizes(rng, d, f):
    """Rows of which a block has room for fewer, and 48 KiB of rows of a token's activations."""
    of = lambda *shape: jgg.prepack(
        oracle.random_quantized(rng, shape, "nvfp4", 4, 16, "bfloat16"), strict=True
    )
    up, down = of(8, 2 * f, d), of(8, d, f)
    x = oracle.random(rng, (8, d), "bfloat16")
    index = jnp.asarray(rng.integers(0, 8, (8, 8)), jnp.int32)
    weight = jnp.asarray(rng.random((8, 8)), jnp.float32)
    for tokens in (1, 2, 8):
        given = x[:tokens], up, down, index[:tokens], weight[:tokens]
        out, _ = run(jax.jit(jgg.moe_mlp), *given)
        want = jax.jit(lambda *a: jgg.moe_mlp(*a, implementation="reference"))(*given)
        assert oracle.error(out, oracle.f64(want)) < 1e-2


@pytest.mark.parametrize("activation", [*moe_oracle.ACTIVATIONS, *moe_oracle.GATED])
def test_activations(rng, activation):
    gated = activation in moe_oracle.GATED
    check(problem(rng, "nvfp4", 4, 16, 3, 4, gated), activation=activation)


def test_options(rng):
    """Biases, weights of some of the experts, indices outside, one expert of all tokens."""
    x, up, down, index, weight = problem(rng, "mxfp4", 4, 32, 8, 4)
    biases = {"up_bias": oracle.random(rng, (E, 2 * F)), "down_bias": oracle.random(rng, (E, D))}
    index = index.at[3].set(-1).at[4, 1].set(E + 20).at[5:].set(7)
    check((x, up, down, index, weight), **biases)
    check((x, up, down, index, weight), expert_offset=jnp.int32(5), **biases)
    check((x, up, down, index.astype(jnp.int8), weight), preferred_element_type=jnp.float32)
    more = [jnp.concatenate([a, a]) for a in (x, index, weight)]  # other kernels
    check((more[0], up, down, *more[1:]), **biases)
    check((more[0], up, down, *more[1:]), expert_offset=jnp.int32(5), **biases)


def test_nan(rng):
    x, up, down, index, weight = problem(rng, "nvfp4", 4, 16, 4, 2)
    index = jnp.array([[0, 1], [2, 3], [0, 2], [4, 5]])
    out = check((x.at[1, 7].set(jnp.nan), up, down, index, weight))
    np.testing.assert_array_equal(np.isnan(out).all(1), [False, True, False, False])


def test_replayed(rng):
    """50 steps in one program, each with another routing."""
    x, up, down, index, weight = problem(rng, "nvfp4", 4, 16, 2, 8)
    packed = [jgg.prepack(w) for w in (up, down)]

    def steps(x, *weights):
        def one(x, i):
            y = jgg.moe_mlp(x, *weights, (index + i) % E, weight)
            return (y / jnp.sqrt(jnp.square(y).mean())).astype(x.dtype), (x, y)

        return jax.lax.scan(one, x, jnp.arange(50))[1]

    xs, found = jax.jit(steps)(x, *packed)
    np.testing.assert_array_equal(*(np.asarray(a) for a in (found, jax.jit(steps)(x, *packed)[1])))
    layer = jax.jit(lambda x, i: jgg.moe_mlp(x, *packed, (index + i) % E, weight))
    for i in (0, 1, 49):
        np.testing.assert_array_equal(np.asarray(layer(xs[i], i)), np.asarray(found[i]))


@pytest.mark.parametrize("options", [EAGER, CAPTURED], ids=["eager", "captured"])
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_the_second_kernel_begins_early(rng, tokens, options):
    """Layers one after the other, which write where the ones before have read; 50 runs, and other
    operands at the same place between them."""
    x, up, down, index, weight = problem(rng, "nvfp4", 4, 16, tokens, 8)
    packed = [jgg.prepack(w) for w in (up, down)]

    def layers(x, index, weight, *weights):
        for i in range(4):
            y = jgg.moe_mlp(x, *weights, (index + i) % E, weight)
            x = (y / jnp.sqrt(jnp.square(y).mean())).astype(x.dtype)
        return x

    compiled = jax.jit(layers).lower(x, index, weight, *packed).compile(compiler_options=options)
    sets = [(x, index, weight), (jnp.roll(x, 3, 1), (index + 5) % E, weight[:, ::-1])]
    want = x, index, weight
    for i in range(4):  # each layer alone
        y = jax.jit(jgg.moe_mlp)(want[0], *packed, (index + i) % E, weight)
        want = (y / jnp.sqrt(jnp.square(y).mean())).astype(x.dtype), index, weight
    firsts = [compiled(*given, *packed) for given in sets]
    assert oracle.error(firsts[0], oracle.f64(want[0])) < 3e-2
    held = jax.tree.map(jnp.copy, sets[0])
    for i in range(50):
        held = refill(held, sets[i % 2])
        assert same_bits(compiled(*held, *packed), firsts[i % 2])
