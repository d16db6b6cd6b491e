"""``moe_mlp`` against float64 numpy: values and every gradient; its errors."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device

T, K, E, D, F = 19, 2, 4, 13, 11


def problem(rng, *, tokens=T, k=K, experts=E, d=D, f=F, gated=True, dtype="float32"):
    x = oracle.random(rng, (tokens, d), dtype)
    up = oracle.random(rng, (experts, d, f * (2 if gated else 1)), dtype) / d**0.5
    down = oracle.random(rng, (experts, f, d), dtype) / f**0.5
    index = jnp.asarray(rng.integers(-1, experts + 1, (tokens, k)), jnp.int32)
    return x, up.astype(dtype), down.astype(dtype), index, oracle.random(rng, (tokens, k))


def check(args, rng, tolerance=None, **options):
    """Values and gradients."""
    x, up, down, index, weight = args
    names = [n for n in ("up_bias", "down_bias") if n in options]
    biases = [options.pop(n) for n in names]
    transposed = options.get("transpose_w", False)

    def f(x, up, down, weight, *biases):
        given = dict(zip(names, biases, strict=True))
        return jgg.moe_mlp(x, up, down, index, weight, **given, **options)

    ct = oracle.random(rng, x.shape, x.dtype)
    given = (x, up, down, weight, *biases)
    got, pull = jax.vjp(jax.jit(f), *given)
    swapped = (lambda w: w.swapaxes(1, 2)) if transposed else (lambda w: w)
    y, grads = moe_oracle.moe_mlp(
        x, swapped(up), swapped(down), index, weight, oracle.f64(ct),
        activation=options.get("activation", "swiglu"), **dict(zip(names, biases, strict=True)),
        offset=options.get("expert_offset", 0),
    )  # fmt: skip
    assert got.dtype == x.dtype
    oracle.assert_close(got, y, tolerance=tolerance)
    wanted = [
        *grads[:4],
        *(grads[4 + i] for i, n in enumerate(("up_bias", "down_bias")) if n in names),
    ]
    wanted[1], wanted[2] = swapped(wanted[1]), swapped(wanted[2])
    for value, grad, want in zip(given, pull(ct), wanted, strict=True):
        assert grad.dtype == value.dtype
        oracle.assert_close(grad, want, tolerance=tolerance)


@pytest.mark.parametrize("activation", [*moe_oracle.ACTIVATIONS, *moe_oracle.GATED])
@pytest.mark.one_in(3)
def test_activations(rng, activation):
    check(problem(rng, gated=activation in moe_oracle.GATED), rng, activation=activation)


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("experts", [1, E])
@pytest.mark.one_in(3)
def test_top_k(rng, experts, k):
    check(problem(rng, experts=experts, k=k), rng)


@pytest.mark.parametrize("transpose_w", [False, True])
def test_biases_and_layouts(rng, transpose_w):
    x, up, down, *rest = problem(rng)
    biases = {
        "up_bias": oracle.random(rng, (E, 2 * F)), "down_bias": oracle.random(rng, (E, D))
    }  # fmt: skip
    if transpose_w:
        up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
    check((x, up, down, *rest), rng, transpose_w=transpose_w, **biases)


def test_halves(rng):
    """Every rounding is of 2^-8: of h, the activation, y's rows and the result."""
    check(problem(rng, dtype="bfloat16"), rng, tolerance=0.03)


def test_every_pattern_of_experts(rng):
    """Experts with and without tokens; one with all of them."""
    x, up, down, _, weight = problem(rng, experts=5, tokens=6)
    run = jax.jit(jgg.moe_mlp)
    for used in itertools.chain.from_iterable(
        itertools.combinations(range(5), count) for count in range(6)
    ):
        choices = np.array(used or (-1,))
        index = choices[rng.integers(0, len(choices), (6, K))].astype(np.int32)
        got = run(x, up, down, index, weight)
        oracle.assert_close(got, moe_oracle.moe_mlp(x, up, down, index, weight))


def test_offset(rng):
    x, up, down, index, weight = problem(rng)
    check((x, up, down, index + 7, weight), rng, expert_offset=7)


def test_leading_axes_and_dtypes(rng):
    x, up, down, index, weight = problem(rng, tokens=12, dtype="bfloat16")
    split = lambda a: a.reshape(3, 4, *a.shape[1:])
    got = jgg.moe_mlp(split(x), up, down, split(index), split(weight))
    np.testing.assert_array_equal(got.reshape(12, D), jgg.moe_mlp(x, up, down, index, weight))
    assert got.dtype == jnp.bfloat16  # a float32 weight widens nothing
    wide = jgg.moe_mlp(x, up, down, index, weight, preferred_element_type="float32")
    assert wide.dtype == jnp.float32
    one = jgg.moe_mlp(x[0], up, down, index[0], weight[0])
    np.testing.assert_array_equal(one, got[0, 0])


def test_nothing_to_do(rng):
    x, up, down, index, weight = problem(rng)
    assert jgg.moe_mlp(x[:0], up, down, index[:0], weight[:0]).shape == (0, D)
    nothing = jgg.moe_mlp(x, up, down, jnp.full_like(index, -1), weight)
    assert not np.asarray(nothing).any()
    biases = {"up_bias": jnp.ones((0, 2 * F)), "down_bias": jnp.ones((0, D))}
    without = lambda x: jgg.moe_mlp(x, up[:0], down[:0], index, weight, **biases)
    assert not np.asarray(without(x)).any()
    assert not np.asarray(jax.grad(lambda x: without(x).sum())(x)).any()


def test_nan_stays_in_the_tokens_that_meet_it(rng):
    x, up, down, index, weight = problem(rng)
    index = index.at[4].set(E)  # a token that meets no expert
    met = (np.asarray(index) == 2).any(1) | (np.arange(T) == 7)
    assert met.any()
    assert not met.all()
    up, x = up.at[2].set(jnp.nan), x.at[jnp.array([4, 7])].set(jnp.nan)
    met[7] = ((index[7] >= 0) & (index[7] < E)).any()
    got = jax.jit(jgg.moe_mlp)(x, up, down, index, weight)
    np.testing.assert_array_equal(np.isnan(np.asarray(got)).any(1), met)


def test_max_rows(rng):
    """Where there is room, nothing changes; where there is none, everything says so."""
    args = problem(rng)
    x, up, down, index, weight = args
    pairs = int(((index >= 0) & (index < E)).sum())
    f = jax.jit(jgg.moe_mlp, static_argnames="max_rows")
    np.testing.assert_array_equal(f(*args, max_rows=pairs), f(*args))
    assert np.isnan(f(*args, max_rows=pairs - 1)).all()
    grad = jax.grad(lambda x: jgg.moe_mlp(x, up, down, index, weight, max_rows=pairs - 1).sum())(x)
    assert np.isnan(grad).any()
    assert jgg.route(index, E, max_rows=pairs - 1).overflow == 1


@pytest.mark.parametrize("implementation", [None, "composed"])
def test_no_room_at_all(rng, implementation):
    x, up, down, index, weight = problem(rng)
    f = lambda x, up, weight, index: jgg.moe_mlp(
        x, up, down, index, weight, max_rows=0, implementation=implementation
    )
    assert np.isnan(f(x, up, weight, index)).all()
    none = jnp.full_like(index, -1)
    out, grads = jax.jit(
        jax.value_and_grad(lambda *args: f(*args, none).sum(), (0, 1, 2))
    )(x, up, weight)  # fmt: skip
    assert out == 0
    for grad, of in zip(grads, (x, up, weight), strict=True):
        np.testing.assert_array_equal(grad, np.zeros(of.shape))
    routing = jgg.route(index, E, max_rows=0)
    np.testing.assert_array_equal(jgg.combine(jnp.ones((0, D)), routing, weight), np.zeros((19, D)))
    assert not jax.grad(lambda x: jgg.dispatch(x, routing).sum())(x).any()


def test_floats_of_eight_bits(rng):
    """A result in bfloat16, as of a product, and so is h."""
    x, up, down, index, weight = problem(rng)
    args = [a.astype("float8_e4m3fn") for a in (x, up, down)]
    got = jgg.moe_mlp(*args, index, weight)
    assert got.dtype == jnp.bfloat16
    want = jgg.moe_mlp(*(a.astype("bfloat16") for a in args), index, weight)
    oracle.assert_close(got, oracle.f64(want), tolerance=0.01)


@pytest.mark.parametrize("mode", ["nvfp4", "affine"])
@pytest.mark.one_in(2)
def test_quantized(rng, mode):
    x, up, down, index, weight = problem(rng, d=64, f=32, dtype="bfloat16")
    size = 16 if mode == "nvfp4" else 32
    q_up, q_down = (
        jgg.quantize(w.swapaxes(1, 2), mode=mode, group_size=size, contract=-1) for w in (up, down)
    )
    plain = [jgg.dequantize(q, dtype="bfloat16").swapaxes(1, 2) for q in (q_up, q_down)]
    f = jax.jit(lambda x, up, down: jgg.moe_mlp(x, up, down, index, weight).astype("float32"))
    oracle.assert_close(f(x, q_up, q_down), f(x, *plain), tolerance=0.02)
    loss = lambda x, up, down: (f(x, up, down) ** 2).sum()
    grad = jax.jit(jax.grad(loss))
    oracle.assert_close(grad(x, q_up, q_down), grad(x, *plain), tolerance=0.03)


def test_recipe(rng):
    x, up, down, index, weight = problem(rng, tokens=64, d=64, f=32, dtype="bfloat16")
    recipe = jgg.NVFP4Recipe(stochastic_rounding=False, hadamard=False)
    f = lambda x, **options: jgg.moe_mlp(x, up, down, index, weight, **options).astype("float32")
    plain, got = jax.jit(lambda x: (f(x), f(x, recipe=recipe)))(x)
    error = np.linalg.norm(got - plain) / np.linalg.norm(plain)
    assert 1e-3 < error < 0.3
    assert np.isfinite(
        jax.jit(jax.grad(lambda x: f(x, recipe=recipe, key=jax.random.key(0)).sum()))(x)
    ).all()


def test_fp8_recipe(rng):
    """Either layout of weights has the same codes, and gradients of its own layout."""
    x, up, down, index, weight = problem(rng, tokens=40, d=32, f=16, dtype="bfloat16")
    recipe = jgg.FP8Recipe(stochastic_rounding=False)
    ct = oracle.random(rng, x.shape, "bfloat16")

    def step(x, up, down, **options):
        f = lambda *args: jgg.moe_mlp(*args, index, weight, **options)
        out, pull = jax.vjp(f, x, up, down)
        return out, *pull(ct)

    turned = [w.swapaxes(1, 2) for w in (up, down)]
    got = jax.jit(functools.partial(step, recipe=recipe))(x, up, down)
    other = jax.jit(functools.partial(step, recipe=recipe, transpose_w=True))(x, *turned)
    other = *other[:2], *(w.swapaxes(1, 2) for w in other[2:])
    for one, same, exact in zip(got, other, jax.jit(step)(x, up, down), strict=True):
        assert oracle.error(one, same) < 1e-3
        assert 1e-3 < oracle.error(one, exact) < 0.1


def test_errors(rng):
    x, up, down, index, weight = problem(rng)
    run = functools.partial(jgg.moe_mlp, x)
    q = jgg.quantize(jnp.zeros((E, D, 64)), contract=-1)
    cases = [
        (lambda: run(up, down, index[1:], weight), "expert_index has shape (18, 2)"),
        (lambda: run(up, down, index, weight[:, :1]), "because expert_index is (19, 2)"),
        (lambda: run(up.swapaxes(1, 2), down, index, weight), "Pass transpose_w=True"),
        (lambda: run(up, down[:, 1:], index, weight), "because up is (4, 13, 22)"),
        (lambda: run(up[..., 1:], down, index, weight), "two halves"),
        (lambda: run(up, down, index, weight, activation="swish"), "is not one of 'silu'"),
        (lambda: run(up, down, index, weight, up_bias=weight), "up_bias has shape"),
        (lambda: run(up, q, index, weight), "up and down must both be a jgg.Quantized"),
        (lambda: run(up, down, index, index), "expert_weight must hold floats"),
        (lambda: run(up, down, index, weight, implementation="sm70"),
         "implementation='sm70' is not one of None, 'sm100', 'sm90', 'sm89', 'sm80', 'cpu', "
         "'reference', 'composed'"),
        (lambda: run(up, down, index, weight, recipe=jgg.FP8Recipe(), implementation="sm90"),
         "jgg.moe_mlp: implementation='sm90' names a kernel, and a recipe chooses its own. Leave "
         "it out, or use implementation='composed'."),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        assert message in str(caught.value), str(caught.value)
        assert str(caught.value).startswith("jgg.moe_mlp: ")


NAMES = moe_oracle.NAMES


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"transpose_w": "x"}, TypeError, "transpose_w must be True or False, got 'x'"),
        (
            {"expert_offset": 1.5}, TypeError,
            "expert_offset must hold integers, got dtype float32",
        ),
        (
            {"expert_offset": jnp.zeros((2,), jnp.int32)}, ValueError,
            "expert_offset has shape (2,), expected () or (1,)",
        ),
        ({"max_rows": 2.0}, TypeError, "max_rows must be an int, got 2.0"),
        ({"max_rows": -1}, ValueError, "max_rows=-1 is negative"),
        (
            {"recipe": "x"}, TypeError,
            "recipe must be a jgg.NVFP4Recipe, a jgg.FP8Recipe or None, got str",
        ),
        ({"key": "x"}, TypeError, "key must be one key of jax.random, got 'x'"),
        (
            {"preferred_element_type": "x"}, TypeError,
            "preferred_element_type='x' is not a dtype",
        ),
        (
            {"preferred_element_type": jnp.int32}, TypeError,
            "preferred_element_type=int32 cannot hold a product of float32 operands",
        ),
        (
            {"activation": np.array(["x", "y"])}, ValueError,
            f"activation=array(['x', 'y'], dtype='<U1') is not one of {NAMES}",
        ),
        (
            {"precision": "x"}, ValueError,
            "precision='x' is not a jax.lax.Precision, its name, or 'tensorfloat32'",
        ),
        (
            {"up_bias": jnp.zeros((E, 2 * F), complex)}, TypeError,
            "up_bias has dtype complex64, which the result, float32, cannot hold",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("implementation", [None, "composed"])
def test_messages(rng, given, kind, message, implementation):
    """The same ones where the layer is made of other operations, which do not speak up."""
    args = problem(rng)
    call = lambda: jgg.moe_mlp(*args, implementation=implementation, **given)
    oracle.assert_raises(call, kind, f"jgg.moe_mlp: {message}")


@pytest.mark.parametrize("implementation", [None, "composed"])
def test_dtypes_without_a_layer(rng, implementation):
    x, up, down, index, weight = problem(rng)
    run = lambda x, up, down, **more: (
        lambda: jgg.moe_mlp(x, up, down, index, weight, implementation=implementation, **more)
    )
    for call, message in (
        (run(x.astype(complex), up, down), "x and up must be floats, got complex64 and float32"),
        (
            run(x.astype(int), up.astype(int), down),
            "x and up must be floats, got int32 and int32",
        ),
        (run(x, up > 0, down), "up must hold numbers, got dtype bool"),
        (
            run(x, up, down.astype("int4")),
            "x of dtype float32, up of float32 and down of int4 have no common dtype. Convert them",
        ),
        (
            run(x, up, down.astype(complex)),
            "down has dtype complex64, which the result, float32, cannot hold",
        ),
        (
            run(x.astype("float16"), up.astype("float16"), down, recipe=jgg.NVFP4Recipe()),
            "x and up must be bfloat16 or float32 where there is a recipe, got float16 and float16",
        ),
        (
            run(x, up, down, recipe=jgg.NVFP4Recipe(), up_bias=jnp.zeros((E, 2 * F), int)),
            "up_bias must be float32, bfloat16 or float16 where there is a recipe, got dtype int32",
        ),
    ):  # fmt: skip
        oracle.assert_raises(call, TypeError, f"jgg.moe_mlp: {message}")


def test_messages_of_shapes_and_names(rng):
    x, up, down, index, weight = problem(rng)
    of = lambda *shape: oracle.random_quantized(rng, shape, "affine", group_size=32)
    wide, three = jnp.ones((T, 32)), up.reshape(E, D, 2, F).repeat(2, 2)[:, :, :3]
    run = lambda x, up, **more: lambda: jgg.moe_mlp(x, up, down, index, weight, **more)
    recipe = lambda: jgg.moe_mlp(
        wide, of(E, 64, 32), of(E, 32, 32), index, weight, recipe=jgg.FP8Recipe()
    )
    for call, kind, message in (
        (run(jnp.float32(1), up), ValueError, "x has shape (), expected (..., D)"),
        (run(x, three), ValueError, f"up has shape {three.shape}, expected 2 in axis 2"),
        (recipe, ValueError, "recipe quantizes weights that are arrays"),
        (
            run(x, up, axis_name=jnp.ones(2)), TypeError,
            "axis_name must be the name of a mesh axis, or a tuple of names, got float32[2]",
        ),
    ):  # fmt: skip
        oracle.assert_raises(call, kind, f"jgg.moe_mlp: {message}")
    rows, routing = jnp.ones((T * K, D)), jgg.route(index, E)
    oracle.assert_raises(
        lambda: jgg.combine(rows, routing, weight.astype(complex)), TypeError,
        "jgg.combine: expert_weight must hold floats as rows do, got complex64",
    )  # fmt: skip


def test_quantized_weights_are_named(rng):
    x, _, _, index, weight = problem(rng)
    x = jnp.ones((len(x), 32))
    of = lambda *shape: oracle.random_quantized(rng, shape, "affine", group_size=32)
    q, down = of(E, 64, 32), of(E, 32, 32)
    other = dataclasses.replace(down, axis=-2)
    for implementation in (None, "composed"):
        oracle.assert_raises(
            lambda which=implementation: jgg.moe_mlp(
                x, q, other, index, weight, implementation=which
            ),
            ValueError,
            "jgg.moe_mlp: down has axis=-2, expected -1. dataclasses.replace(down, axis=-1) is "
            "what it stores, (4, 32, 32)",
        )


@pytest.mark.parametrize("dtype", ["float16", "int32", "float8_e4m3fn"])
@pytest.mark.one_in(3)
def test_other_dtypes_of_weights(rng, dtype):
    """However JAX promotes dtypes, which is strictly in tests."""
    x, up, down, index, weight = problem(rng)
    narrow = (4 * down).astype(dtype)
    got = jgg.moe_mlp(x, up, narrow, index, weight)
    want = jgg.moe_mlp(x, up, narrow.astype("float32"), index, weight)
    composed = jgg.moe_mlp(x, up, narrow, index, weight, implementation="composed")
    for out in (got, composed):
        assert out.dtype == "float32"
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
