"""``moe_mlp`` where experts are empty, pairs many, numbers not finite, tokens none, dtypes wide or
narrow: values and every gradient against float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
from test_moe_mlp import E, K, T, check, problem

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device

BOTH = pytest.mark.parametrize("implementation", [None, "composed"])


@functools.partial(jax.jit, static_argnames="implementation")
def step(x, up, down, weight, up_bias, down_bias, index, ct, implementation=None):
    """The layer and all gradients."""

    def layer(x, up, down, weight, up_bias, down_bias):
        biases = {"up_bias": up_bias, "down_bias": down_bias}
        return jgg.moe_mlp(x, up, down, index, weight, **biases, implementation=implementation)

    out, pull = jax.vjp(layer, x, up, down, weight, up_bias, down_bias)
    return out, *pull(ct)


def expected(x, up, down, weight, up_bias, down_bias, index, ct):
    biases = {"up_bias": up_bias, "down_bias": down_bias}
    with np.errstate(invalid="ignore"):
        out, grads = moe_oracle.moe_mlp(x, up, down, index, weight, oracle.f64(ct), **biases)
    return out, *grads


def arguments(rng, dtype="float32", **sizes):
    """The operands of ``step``, and a cotangent."""
    x, up, down, index, weight = problem(rng, dtype=dtype, **sizes)
    of = lambda *shape: oracle.random(rng, shape, dtype)
    biases = of(len(up), up.shape[2]), of(len(up), down.shape[2])
    return [x, up, down, weight, *biases, index, of(*x.shape)]


def assert_as_expected(got, want):
    """The same elements are NaN, and the others close."""
    for one, other in zip(got, want, strict=True):
        bad = np.isnan(oracle.f64(one))
        np.testing.assert_array_equal(bad, np.isnan(other))
        oracle.assert_close(jnp.where(bad, 0, one), np.where(bad, 0, other))


# ---- experts that are empty ----------------------------------------------------------------------


def every_pattern(rng, experts, tokens, k):
    """For each set of experts, indices of all of them and of no other, and a few of none."""
    for pattern in range(2**experts):
        used = np.flatnonzero([pattern >> e & 1 for e in range(experts)])
        more = rng.choice([-1, experts, *used], tokens * k - len(used))
        index = rng.permutation([*used, *more]).reshape(tokens, k)
        yield used, jnp.asarray(index, jnp.int32)


@BOTH
def test_every_pattern_of_eight_experts(rng, implementation):
    """One program for all. Weights of experts without tokens are NaN, and their gradients zero."""
    experts = 8
    *floats, _, ct = arguments(rng, experts=experts, tokens=8, d=5, f=3)
    seen = set()
    for used, index in every_pattern(rng, experts, 8, K):
        empty = np.setdiff1d(np.arange(experts), used)
        given = [np.array(a) for a in floats]
        for i in (1, 2, 4, 5):
            given[i][empty] = np.nan
        args = *given, index, ct
        got = step(*args, implementation=implementation)
        assert_as_expected(got, expected(*args))
        for i in (2, 3, 5, 6):
            assert not np.asarray(got[i])[empty].any()
        seen.add(tuple(used))
    assert len(seen) == 256


# ---- many pairs of a token -----------------------------------------------------------------------


@pytest.mark.parametrize("experts", [1, E, 24])
def test_sixteen_experts_of_a_token(rng, experts):
    """A token has k = 16 experts: 16 different ones of 24, and repeated ones of 1 and of 4."""
    x, up, down, index, weight = problem(rng, experts=experts, k=16)
    if experts > 16:
        index = rng.permuted(np.tile(np.arange(experts), (T, 1)), axis=1)[:, :16]
    check((x, up, down, jnp.asarray(index, jnp.int32), weight), rng)


# ---- numbers that are not finite -----------------------------------------------------------------


def bad_token(args):
    return args | {"x": args["x"].at[7].set(jnp.nan)}


def bad_expert(args):
    return args | {name: args[name].at[2].set(jnp.nan) for name in ("up", "down")}


def bad_weight(args):
    return args | {"weight": args["weight"].at[7, 1].set(jnp.nan)}


def bad_cotangent(args):
    return args | {"ct": args["ct"].at[7].set(jnp.nan)}


NAMES = ("x", "up", "down", "weight", "up_bias", "down_bias", "index", "ct")


@BOTH
@pytest.mark.parametrize("spoil", [bad_token, bad_expert, bad_weight, bad_cotangent])
def test_nan_stays_with_those_that_meet_it(rng, spoil, implementation):
    """Tokens and experts, in the result and in every gradient; the others keep their bits. One
    token meets nobody, and is NaN as well."""
    args = dict(zip(NAMES, arguments(rng), strict=True))
    index = jnp.where(args["index"] == 2, 1, args["index"]).at[3:6].set(jnp.array([2, 0]))
    args["index"] = index.at[7].set(jnp.array([0, 3])).at[4].set(E)
    args["x"] = args["x"].at[4].set(jnp.nan)
    run = functools.partial(step, implementation=implementation)
    before = run(*args.values())
    spoiled = spoil(args)
    got = run(*spoiled.values())
    assert_as_expected(got, expected(*spoiled.values()))
    for clean, one in zip(before, got, strict=True):
        assert np.isfinite(clean).all()
        bad = np.isnan(one)
        assert not bad.all()
        np.testing.assert_array_equal(np.where(bad, 0, one), np.where(bad, 0, clean))


# ---- nothing to do -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("tokens", "k"), [(0, K), (5, 0), (0, 0)])
def test_no_pairs(rng, tokens, k, implementation):
    """Zeros of each operand's shape and dtype."""
    args = arguments(rng, "bfloat16", tokens=tokens, k=k)
    got = step(*args, implementation=implementation)
    for out, like in zip(got, (args[0], *args[:6]), strict=True):
        assert (out.shape, out.dtype) == (like.shape, like.dtype)
        assert not np.asarray(out).any()


# ---- dtypes --------------------------------------------------------------------------------------


def wide_arguments(rng, dtype):
    """A few tokens, with an ``expert_weight`` of float64."""
    args = arguments(rng, dtype, tokens=5)
    args[3] = jnp.asarray(rng.standard_normal((5, K)), "float64")
    return args


@BOTH
@pytest.mark.one_in(2)
def test_float64(rng, implementation):
    """Values and gradients against numpy, and gradients by finite differences."""
    with jax.enable_x64(True):
        args = wide_arguments(rng, "float64")
        run = functools.partial(step, implementation=implementation)
        got = run(*args)
        for one, want in zip(got, expected(*args), strict=True):
            assert one.dtype == "float64"
            oracle.assert_close(one, want, tolerance=1e-13)
        loss = lambda *floats: np.vdot(run(*floats, *args[6:])[0], args[7])
        width = 1e-5
        for i, gradient in enumerate(got[1:]):
            along = rng.standard_normal(args[i].shape)
            moved = [[*args[:i], args[i] + s * along, *args[i + 1 : 6]] for s in (width, -width)]
            slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * width)
            np.testing.assert_allclose(np.vdot(gradient, along), slope, rtol=1e-7)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-5)])
def test_each_weight_by_finite_differences(rng, dtype, tolerance):
    """The layer is linear in them, so a difference of any width is exact. Their float64 widens no
    token."""
    with jax.enable_x64(True):
        args = wide_arguments(rng, dtype)
        call = lambda weight: step(*args[:3], weight, *args[4:], implementation=None)
        out, *gradients = call(args[3])
        assert out.dtype == dtype
        assert gradients[3].dtype == "float64"
        slopes = np.zeros((5, K))
        for at in np.ndindex(5, K):
            moved = np.zeros((5, K))
            moved[at] = 0.5
            ends = [oracle.f64(call(args[3] + s * moved)[0]) for s in (1, -1)]
            slopes[at] = np.vdot(ends[0] - ends[1], oracle.f64(args[7]))
        oracle.assert_close(gradients[3], slopes, tolerance=tolerance)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_float16(rng, activation):
    """Every rounding is of 2^-11: of h, the activation, y's rows and the result."""
    gated = activation in moe_oracle.GATED
    args = problem(rng, gated=gated, dtype="float16")
    check(args, rng, tolerance=4e-3, activation=activation)


# ---- donation ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.one_in(4)
def test_donated_operands(rng, dtype, implementation):
    """A step that leaves new tokens and weights where the old ones were."""
    x, up, down, index, weight = problem(rng, dtype=dtype)

    def train(x, up, down):
        layer = lambda *floats: jgg.moe_mlp(*floats, index, weight, implementation=implementation)
        out, pull = jax.vjp(layer, x, up, down)
        moved = (a - g / 8 for a, g in zip((x, up, down), pull(out), strict=True))
        return out, *moved

    want = jax.jit(train)(x, up, down)
    given = [jnp.array(a) for a in (x, up, down)]
    got = jax.jit(train, donate_argnums=(0, 1, 2))(*given)
    assert all(a.is_deleted() for a in given)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, other)


# ---- derivatives with a recipe -------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [jgg.NVFP4Recipe(), jgg.FP8Recipe()], ids=["nvfp4", "fp8"])
def test_a_recipe_has_reverse_mode_only(rng, recipe):
    """Second order works, but the gradient of NVFP4's weights has no derivative in x."""
    x, up, down, index, weight = problem(rng, dtype="bfloat16")

    def loss(x, down):
        out = jgg.moe_mlp(x, up, down, index, weight, recipe=recipe)
        return (out.astype("float32") ** 2).sum()

    def of_gradient(x, down, which):
        return (jax.grad(loss, which)(x, down).astype("float32") ** 2).sum()

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda x: jax.jvp(lambda x: loss(x, down), (x,), (x,)))(x)
    second = jax.jit(jax.grad(of_gradient, 1), static_argnums=2)(x, down, 1)
    assert jnp.isfinite(second).all()
    assert (second != 0).any()
    if isinstance(recipe, jgg.NVFP4Recipe):
        with pytest.raises(NotImplementedError, match="keeps x in four bits"):
            jax.jit(jax.grad(of_gradient), static_argnums=2)(x, down, 1)


# ---- activations that are functions --------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (jax.nn.silu, "silu, and {why}: write activation='silu'"),
        (jax.nn.swish, "silu, and {why}: write activation='silu'"),
        (jax.nn.gelu, "gelu, and {why}: write activation='gelu'"),
        (
            functools.partial(jax.nn.gelu, approximate=False),
            "gelu, and {why}: write activation='gelu_erf'",
        ),
        (jax.nn.relu, "relu, and {why}: write activation='relu'"),
        (jnp.tanh, "tanh, and {why}: write activation='tanh'"),
        (lambda h: h, "<lambda>, and {why}: write one of {known}"),
        (jax.nn.celu, "celu, and {why}: write one of {known}"),
    ],
)
def test_activations_have_names(rng, function, said):
    x, up, down, index, weight = problem(rng)
    known = moe_oracle.NAMES
    why = "kernels know activations by name"
    run = lambda: jgg.moe_mlp(x, up, down, index, weight, activation=function)
    message = f"jgg.moe_mlp: activation is the function {said.format(why=why, known=known)}"
    oracle.assert_raises(run, ValueError, message)
    run = lambda: jgg.grouped_mm(x, up, jnp.array([1, 1, 1, 1]), activation=function)
    message = said.format(why=why, known=f"None, {known}")
    message = f"jgg.grouped_mm: activation is the function {message}"
    oracle.assert_raises(run, ValueError, message)


# ---- what is NaN, and what is read ---------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_too_few_rows_where_no_unit_is_active(activation):
    """The result is NaN, and gradients are but where the activation's slope is zero."""
    ones = jnp.ones((4, 8)), -jnp.ones((2, 8, 4)), jnp.ones((2, 4, 8)), jnp.ones((4, 1))
    index = jnp.array([[0], [0], [1], [1]])
    run = lambda *a: jgg.moe_mlp(*a[:3], index, a[3], activation=activation, max_rows=3)
    y, pull = jax.vjp(run, *ones)
    dx, dup, ddown, dweight = pull(jnp.ones_like(y))
    assert np.isnan(y).all()
    assert np.isnan(ddown).all()
    assert np.isnan(dweight[:3]).all()
    for grads in (dx[:3], dup):
        assert (np.isnan(grads) if activation == "silu" else grads == 0).all()


@pytest.mark.parametrize("product", ["forward", "dgrad", "wgrad", None])
def test_who_reads_a_weight_that_has_codes(rng, product):
    """Only the result or dx in bfloat16."""
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((8, 128), (2, 128, 128)))
    recipe = jgg.FP8Recipe(**({} if product is None else {product: "bfloat16"}))
    codes = jgg.quantize(w, mode="fp8", contract=-1)
    run = lambda x, w: jgg.fp8_grouped_linear(
        x, w, jnp.array([3, 5]), recipe=recipe, quantized=codes
    )
    out, pull = jax.vjp(run, x, jnp.full_like(w, jnp.nan))
    dx, dw = pull(jnp.ones_like(out))
    read = [name for name, a in (("forward", out), ("dgrad", dx), ("dw", dw)) if np.isnan(a).any()]
    assert read == ([product] if product in ("forward", "dgrad") else [])
