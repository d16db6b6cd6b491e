"""FP8 with one scale for a tensor: codes, products, and the layer against float64."""

import functools
import re

import fp8_accumulator
import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import blocks, convert, tensors
from jax_groupgemm._fp8.grouped_linear import of_columns
from jax_groupgemm._fp8.grouped_wgrad import _in_lines
from jax_groupgemm._quantized.operands import seed_of

pytestmark = pytest.mark.default_device

T, G, N, K = 40, 3, 28, 20
SIZES = [12, 0, 21]
CLOSE = 2e-6 if jax.default_backend() == "cpu" else 2e-4
TENSOR = jgg.FP8Recipe(scaling="tensor")
# Less work for the compiler.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def bits(codes):
    return np.asarray(codes).view(np.uint8)


def extremes(rng):
    """Matrices whose largest numbers are where a range ends, and where float32 does."""
    largest = [
        1.75,
        np.nextafter(np.float32(1.75), np.float32(2)),
        1.0,
        448,
        1e-30,
        3e38,
        2.0**-126,
    ]
    x = rng.uniform(-1, 1, (len(largest), 5, 18)).astype(np.float32)
    x[:, 2, 3] = -1
    x *= np.float32(largest)[:, None, None]
    return np.concatenate([x, np.zeros((1, 5, 18), np.float32)])


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.one_in(2)
def test_codes(rng, element):
    """Those of fp8_quantize, to the last bit, rounded to nearest and at random."""
    x = extremes(rng)
    codes, scales = fp8_oracle.quantize(x, None, element, "e8m0")
    q = tensors.quantized(jnp.asarray(x), element=element)
    np.testing.assert_array_equal(q.scales, scales)
    np.testing.assert_array_equal(bits(q.weight), bits(codes))
    assert q.block is None
    key = jax.random.key(3)
    want = jgg.fp8_quantize(
        x[0], block=None, scale_format="e8m0", format=element, stochastic_rounding_key=key
    )
    got = tensors.quantized(jnp.asarray(x[0]), element=element, seed=seed_of("", key))
    np.testing.assert_array_equal(bits(got.weight), bits(want.weight))


def test_ranges(rng):
    """As FP8State says, and the largest number of each format is 1.75 times a power of two."""
    x = extremes(rng)
    for matrix in x:
        amax = abs(matrix).max()
        seen = np.asarray(tensors.seen(jnp.asarray(matrix), None))
        if amax == 0:
            assert not seen.any()
            continue
        (place,) = np.nonzero(seen)[0]
        assert place == np.ceil(np.log2(np.float64(amax) / 1.75)) + 127
        for element, more in (("e4m3", 8), ("e5m2", 15)):
            scale = float(tensors.quantized(jnp.asarray(matrix), element=element).scales)
            assert scale == max(2.0 ** (place - 127 - more), 2.0**-126)
            assert amax / scale <= blocks.ELEMENTS[element].largest


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.one_in(2)
def test_what_is_not_finite(rng, element):
    """Is NaN; scale and range are those of the other numbers."""
    x = oracle.host_random(rng, (4, 6), "float32")
    broken = x.copy()
    broken[1, 2], broken[2, 3], broken[3, 4] = np.nan, np.inf, -np.inf
    finite = np.where(np.isfinite(broken), broken, 0)
    q, want = (tensors.quantized(jnp.asarray(a), element=element) for a in (broken, finite))
    np.testing.assert_array_equal(q.scales, want.scales)
    values = np.asarray(jgg.dequantize(q))
    np.testing.assert_array_equal(np.isnan(values), ~np.isfinite(broken))
    clean = np.isfinite(broken)
    np.testing.assert_array_equal(values[clean], np.asarray(jgg.dequantize(want))[clean])
    ranges = [tensors.seen(jnp.asarray(a), None) for a in (broken, finite)]
    np.testing.assert_array_equal(*ranges)


def test_rows_of_no_group(rng):
    """Are zeros, and their numbers do not count."""
    x = oracle.random(rng, (8, 6)).at[5:].set(1e9)
    q = tensors.quantized(x, group_sizes=jnp.array([2, 3]))
    want = tensors.quantized(x[:5])
    np.testing.assert_array_equal(q.scales, want.scales)
    np.testing.assert_array_equal(bits(q.weight)[:5], bits(want.weight))
    assert not bits(q.weight)[5:].any()


# ---- products --------------------------------------------------------------------------------


def matrices(rng, *shape, element="e4m3"):
    q = fp8_oracle.quantize(oracle.host_random(rng, shape, "float32"), None, element)
    codes, scales = map(jnp.asarray, q)
    return convert.made(codes, scales, block=None)


@pytest.mark.parametrize("options", ["none", "all"])
@pytest.mark.one_in(2)
def test_grouped_mm(rng, options):
    """A scale for each matrix, of any value."""
    x, w = matrices(rng, T, K), matrices(rng, G, N, K)
    want = oracle.grouped_mm(fp8_oracle.values(x), fp8_oracle.values(w), SIZES, transpose_w=True)
    given = {}
    if options == "all":
        bias, scale = oracle.random(rng, (G, N)), oracle.random(rng, (T,))
        given = {"bias": bias, "activation": "relu", "row_scale": scale}
        for g, (first, last) in enumerate(oracle.bounds(SIZES, T)):
            want[first:last] += oracle.f64(bias)[g]
        want = np.maximum(want, 0) * oracle.f64(scale)[:, None]
        want[sum(SIZES) :] = 0
    run = functools.partial(jgg.fp8_grouped_mm, preferred_element_type=jnp.float32, **given)
    oracle.assert_close(jit(run)(x, w, jnp.array(SIZES)), want, tolerance=CLOSE)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.one_in(2)
def test_grouped_wgrad(rng, existing):
    """Of codes by rows; and the lines that a kernel gets stand for the same."""
    x, dy = matrices(rng, T, K), matrices(rng, T, N, element="e5m2")
    sizes, old = jnp.array(SIZES), oracle.random(rng, (G, N, K)) if existing else None
    want = np.zeros((G, N, K)) if old is None else oracle.f64(old).copy()
    for g, (first, last) in enumerate(oracle.bounds(SIZES, T)):
        want[g] += fp8_oracle.values(dy)[first:last].T @ fp8_oracle.values(x)[first:last]

    @jit
    def both(x, dy):
        lines = _in_lines(x, dy, sizes)
        run = functools.partial(jgg.fp8_grouped_wgrad, group_sizes=sizes, existing_out=old)
        return run(x, dy), run(*lines)

    for got in both(x, dy):
        oracle.assert_close(got, want, tolerance=CLOSE)
        empty = want[1] if old is None else old[1]
        np.testing.assert_array_equal(got[1], empty)


def test_kernels_get_the_scale_as_that_of_each_block(rng):
    """Which changes no value."""
    for q, block in (
        (matrices(rng, 5, 300), blocks.LINE),
        (matrices(rng, 2, 130, 140), blocks.TILE),
    ):
        cut = blocks.cut(q, block)
        assert cut.block == block
        assert cut.scales.shape == blocks.scales_shape(q.shape, block)
        np.testing.assert_array_equal(jgg.dequantize(cut), jgg.dequantize(q))


@pytest.mark.weekly
def test_derivative_in_scales(rng):
    """A product is linear in each of them."""
    x, w = matrices(rng, T, K), matrices(rng, G, N, K)
    dy = matrices(rng, T, N)
    sizes = jnp.array(SIZES)

    @jit
    def run(sx, sw, sdy):
        x_, w_, dy_ = (
            convert.made(q.weight, s, block=None) for q, s in ((x, sx), (w, sw), (dy, sdy))
        )
        mm = functools.partial(jgg.fp8_grouped_mm, preferred_element_type=jnp.float32)
        found = []
        for f, *args in ((mm, x_, w_), (jgg.fp8_grouped_wgrad, x_, dy_)):
            total = lambda *of, f=f: (f(*of, sizes) ** 2).sum()
            value, grads = jax.value_and_grad(total, (0, 1), allow_int=True)(*args)
            found.append((value, *(g.scales for g in grads)))
        return found

    for (value, *grads), of in zip(
        run(x.scales, w.scales, dy.scales), ((x, w), (x, dy)), strict=True
    ):
        for grad, q in zip(grads, of, strict=True):
            np.testing.assert_allclose((grad * q.scales).sum(), 2 * value, rtol=1e-4)


def test_accumulator_of_the_tensor_cores(rng):
    """Kernels add each 128 of K in float32. One chain of sums in about 14 bits, as other libraries
    have for a scale for each tensor, errs more, and by far less than codes do."""
    x, w = (oracle.f64(matrices(rng, 8, 1024).weight) for _ in range(2))
    error = lambda every: oracle.error(fp8_accumulator.product(x, w, every), x @ w.T)
    assert error(128) < 2e-4 < error(None) < 2e-3


# ---- the layer -------------------------------------------------------------------------------


@pytest.fixture
def problem(rng):
    """x, w, bias and a cotangent."""
    x, ct = oracle.random(rng, (T, K)), oracle.random(rng, (T, N))
    return x, oracle.random(rng, (G, N, K)), oracle.random(rng, (G, N)), ct


def step(x, w, bias, ct, sizes, recipe=TENSOR, key=None, layer=jgg.fp8_grouped_linear):
    f = lambda x, w, bias: layer(x, w, sizes, bias=bias, recipe=recipe, key=key)
    out, vjp = jax.vjp(f, x, w, bias)
    return out, *vjp(ct)


run = jit(step, static_argnames=("recipe", "layer"))


def rounded(a, sizes, element="e4m3"):
    """What codes of the rows that have a group stand for."""
    a = np.array(a)
    a[oracle.bounds(sizes, T)[-1][1] :] = 0
    return fp8_oracle.dequantize(*fp8_oracle.quantize(a, None, element, "e8m0"), None)


def products(x, w, bias, ct, sizes):
    """out, dx, dw and dbias in float64. ``ct`` is a pair, of what dx and dw read, and dbias."""
    (ct, ct_of_bias), (_, *shape) = ct, w.shape
    out = oracle.grouped_mm(x, w, sizes, transpose_w=True)
    dx, _ = oracle.grouped_mm_grads(x, w.swapaxes(1, 2), sizes, ct)
    dw, dbias = np.zeros((G, *shape)), np.zeros(bias.shape)
    for g, (first, last) in enumerate(oracle.bounds(sizes, T)):
        out[first:last] += oracle.f64(bias)[g]
        dw[g] = ct[first:last].T @ x[first:last]
        dbias[g] = oracle.f64(ct_of_bias)[first:last].sum(0)
    return out, dx, dw, dbias


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.one_in(2)
def test_against_float64(problem, format):
    """The products of what codes stand for; sizes are data."""
    x, w, bias, ct = problem
    values = fp8_oracle.dequantize(*fp8_oracle.quantize(w, None, "e4m3", "e8m0"), None)
    recipe = jgg.FP8Recipe(scaling="tensor", gradient_format=format)
    for sizes in (SIZES, [0, 0, 0], [0, 40, 0], [60, -3, 9]):
        got = run(*problem, jnp.array(sizes), recipe=recipe)
        operands = rounded(x, sizes), values, bias, (rounded(ct, sizes, format), ct)
        for value, want in zip(got, products(*operands, sizes), strict=True):
            oracle.assert_close(value, want, tolerance=CLOSE)
        covered = oracle.bounds(sizes, T)[-1][1]
        assert not np.asarray(got[0])[covered:].any()
        assert not np.asarray(got[1])[covered:].any()


def test_of_columns(problem):
    """w (G, K, N) means its transpose."""
    x, w, bias, ct = problem
    out, dx, dw, dbias = run(x, w.swapaxes(1, 2), bias, ct, jnp.array(SIZES), layer=of_columns)
    for got, want in zip(
        (out, dx, dw.swapaxes(1, 2), dbias), run(*problem, jnp.array(SIZES)), strict=True
    ):
        oracle.assert_close(got, want, tolerance=CLOSE)


@pytest.mark.weekly
def test_switches(problem):
    """A product in the operands' dtype is exact, and the others have the error of eight bits; a key
    rounds gradients at random, and dx and dw read the same codes."""
    sizes = jnp.array(SIZES)
    base = run(*problem, sizes)
    exact = products(*map(oracle.f64, problem[:3]), (oracle.f64(problem[3]),) * 2, SIZES)
    for names in (("forward", "wgrad"), ("dgrad",)):
        recipe = jgg.FP8Recipe(scaling="tensor", **dict.fromkeys(names, "bfloat16"))
        got = run(*problem, sizes, recipe=recipe)
        for name, value, before, want in zip(
            ("forward", "dgrad", "wgrad"), got, base, exact, strict=False
        ):
            if name in names:
                oracle.assert_close(value, want, tolerance=CLOSE)
            else:
                np.testing.assert_array_equal(value, before)
                assert 0.02 < oracle.error(value, want) < 0.045
    keyed = run(*problem, sizes, key=jax.random.key(1))
    np.testing.assert_array_equal(keyed[0], base[0])
    for value, before, want in zip(keyed[1:3], base[1:3], exact[1:3], strict=True):
        assert (value != before).any()
        assert 0.02 < oracle.error(value, want) < 0.06


def test_weights_that_are_quantized(problem):
    """Where they are updated, by one line; the array has the gradient, and is not read."""
    x, w, bias, ct = problem
    sizes = jnp.array(SIZES)

    @jit
    def beforehand(x, w, ct):
        q = jgg.fp8_quantize(w, block=None, scale_format="e8m0")
        f = lambda x, w: jgg.fp8_grouped_linear(x, w, sizes, bias=bias, recipe=TENSOR, quantized=q)
        out, vjp = jax.vjp(f, x, jnp.full_like(w, jnp.nan))
        return out, *vjp(ct)

    for got, want in zip(beforehand(x, w, ct), run(*problem, sizes), strict=False):
        oracle.assert_close(got, want, tolerance=CLOSE)


@pytest.mark.parametrize("empty", ["rows", "columns", "groups", "contracted"])
@pytest.mark.one_in(4)
def test_nothing_to_multiply(empty):
    t, g, n, k = (0 if empty == e else size for e, size in
                  (("rows", 5), ("groups", 2), ("columns", 3), ("contracted", 7)))  # fmt: skip
    recipe = jgg.FP8Recipe(scaling="delayed")

    @jit
    def run(x, w, state):
        f = lambda *of: jgg.fp8_grouped_linear(*of[:2], jnp.full(g, 2), recipe=recipe, state=of[2])
        out, vjp = jax.vjp(f, x, w, state)
        return out, *vjp(out)

    got = run(jnp.ones((t, k)), jnp.ones((g, n, k)), jgg.FP8State.new())
    assert [a.shape for a in got[:3]] == [(t, n), (t, k), (g, n, k)]
    assert not any(np.asarray(a).any() for a in got[:3])


def test_nan_stays_in_its_group(problem):
    x, w, bias, ct = problem
    sizes = jnp.array(SIZES)
    want = run(x.at[3].set(0), w, bias, ct, sizes)
    out, dx, dw, dbias = run(x.at[3].set(jnp.inf), w, bias, ct, sizes)
    rows = np.arange(T) != 3
    np.testing.assert_array_equal(out[rows], want[0][rows])
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(dx, want[1])
    np.testing.assert_array_equal(dw[1:], want[2][1:])
    assert np.isnan(dw[0]).all()
    np.testing.assert_array_equal(dbias, want[3])


@pytest.mark.weekly
def test_higher_orders(problem, rng):
    """What takes the place of dy is quantized anew."""
    x, w, _, ct = problem
    sizes, back = jnp.array(SIZES), oracle.random(rng, (T, K))

    @jit
    def second(ct, w):
        def dx(ct, w):
            f = lambda x: jgg.fp8_grouped_linear(x, w, sizes, recipe=TENSOR)
            return jax.vjp(f, x)[1](ct)[0]

        return jax.vjp(dx, ct, w)[1](back)

    zero = jnp.zeros((G, N))
    want, _, want_dw, _ = products(*map(oracle.f64, (back, w, zero)), (oracle.f64(ct),) * 2, SIZES)
    dct, dw = second(ct, w)
    assert 0.02 < oracle.error(dct, want) < 0.045
    assert 0.02 < oracle.error(dw, want_dw) < 0.045


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scaling": 1}, ValueError, "scaling=1, expected 'block' or 'tensor' or 'delayed'"),
        ({"history": 0}, ValueError, "history=0, expected 1 or more"),
        ({"history": 1.5}, TypeError, "history must be an int, got 1.5"),
        (
            {"scaling": "tensor", "weight_block": (64, 64)}, ValueError,
            "scaling='tensor' has a scale for each tensor. Leave activation_block and weight_block "
            "out",
        ),
    ],
)  # fmt: skip
def test_recipes_that_are_wrong(options, error, message):
    with pytest.raises(error, match=re.escape(f"jgg.FP8Recipe: {message}")):
        jgg.FP8Recipe(**options)


def test_operands_that_do_not_fit(rng):
    x, lines = matrices(rng, T, K), jgg.fp8_quantize(jnp.ones((T, N)))
    sizes = jnp.array(SIZES)
    for f, message in (
        (
            lambda: jgg.fp8_grouped_wgrad(x, lines, sizes),
            "dy has layout 'linear' and block=(1, 128), expected layout 'grouped', "
            "fp8_quantize(dy, axis=0, group_sizes=group_sizes), or block=None",
        ),
        (
            lambda: jgg.fp8_grouped_wgrad(x, matrices(rng, T + 1, N), sizes),
            "dy has 41 rows, expected T = 40 as x",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(f"jgg.fp8_grouped_wgrad: {message}")):
            f()
