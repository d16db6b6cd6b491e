"""FP8 with one scale for a tensor on Hopper: casts against their definition, products against
float64 and against a model of the tensor cores' sums, the layer against its composition."""

import functools

import fp8_accumulator
import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import error

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import cast, convert, tensors

pytestmark = pytest.mark.gpu
SIZES = {
    "around tiles": [128, 129, 127, 0, 255, 256, 257, 384, 1],
    "few": [0, 1, 7, 8, 9, 0, 64, 65],
    "many": [600 + 7 * i % 100 for i in range(8)],
}
CASES = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
ELEMENTS = pytest.mark.parametrize("element", ["e4m3", "e5m2"])
ROUNDING = {"float32": 0, "bfloat16": 2**-9, "float16": 2**-12}


def compiled(f, target, *args):
    call = jax.jit(f)
    assert target in call.lower(*args).as_text()
    out = call(*args)
    again = call(*args)
    same(out, again)
    return out


def on_host(f, *args):
    """The definition, on a CPU."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.jit(f)(*jax.device_get(args))


def same(got, want):
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert one.dtype == other.dtype
        one, other = (np.atleast_1d(np.asarray(a)).view(np.uint8) for a in (one, other))
        np.testing.assert_array_equal(one, other)


@ELEMENTS
@pytest.mark.parametrize("scale_format", ["float32", "e8m0"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(300, 256), (3, 144, 400), (4096, 2048)])
def test_quantize(shape, axis, scale_format, element):
    """Bits, with numbers that are not finite in one matrix."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-20, 20, shape[-1])
    if len(shape) > 2:
        x[1, 3, 5], x[1, 4, 6] = np.inf, np.nan
    if axis == -2 and shape[0] == 300:
        x = x[:288]
    f = functools.partial(
        jgg.fp8_quantize, block=None, axis=axis, scale_format=scale_format, format=element
    )
    for dtype in ("bfloat16", "float16", "float32"):
        a = jnp.asarray(np.clip(x, -3e4, 3e4) if dtype == "float16" else x, dtype)
        q, want = compiled(f, "jgg_fp8_cast", a), on_host(f, a)
        same((q.weight, q.scales), (want.weight, want.scales))


@ELEMENTS
@CASES
def test_lines(sizes, element):
    """Bits of both orders, with a scale that is known and too small, with numbers that are not
    finite; what a state sees; and lines by list, of x and of its codes."""
    rng = np.random.default_rng(2)
    rows = sum(sizes) + 21
    x = rng.normal(size=(rows, 400))
    x[0, :3] = np.inf, -np.inf, np.nan
    x[3, 4] = 1e20
    x, sizes = jnp.asarray(x, "bfloat16"), jnp.asarray(sizes, jnp.int32)
    ages = jnp.full(256, jnp.inf).at[125].set(1)

    def run(x, sizes, ages):
        rows, lines, seen = tensors.quantized_lines(x, sizes, ages=ages, history=4, element=element)
        index = jnp.arange(x.shape[0])[::-1] % 40 - 1
        (listed,) = cast.codes(
            x, rows.scales, group_sizes=sizes, row_index=index, axes=(-2,), element=element
        )
        again = cast.reordered(rows.weight, sizes, index, (-2,))
        return rows.weight, rows.scales, lines.weight, seen, listed, *again

    same(compiled(run, "jgg_fp8_cast", x, sizes, ages), on_host(run, x, sizes, ages))


def matrices(rng, *shape, element="e4m3", dtype="float32"):
    draw = rng.normal(size=shape).astype(dtype)
    return convert.made(*map(jnp.asarray, fp8_oracle.quantize(draw, None, element)), block=None)


@ELEMENTS
@CASES
@pytest.mark.parametrize(("n", "k"), [(256, 128), (577, 1040), (8, 17), (2048, 144)])
def test_grouped_mm(sizes, n, k, element):
    """Fast sums of random codes are within what 14 bits keep of them."""
    rng = np.random.default_rng(3)
    x = matrices(rng, sum(sizes) + 33, k, element=element)
    w = matrices(rng, len(sizes), n, k)
    want = oracle.grouped_mm(fp8_oracle.values(x), fp8_oracle.values(w), sizes, transpose_w=True)
    for dtype, rounding in ROUNDING.items():
        f = functools.partial(jgg.fp8_grouped_mm, preferred_element_type=dtype, accumulate="fast")
        got = compiled(f, "fast = true", x, w, jnp.asarray(sizes))
        assert error(got, want) <= 1e-3 + rounding
        assert not np.asarray(got)[sum(sizes) :].any()


@ELEMENTS
@CASES
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(("n", "k"), [(256, 128), (577, 264), (1001, 511)])
def test_grouped_wgrad(sizes, n, k, existing, element):
    rng = np.random.default_rng(4)
    rows = sum(sizes) + 33
    of_sizes = jnp.asarray(sizes, jnp.int32)
    old = oracle.random(rng, (len(sizes), n, k)) if existing else None
    values = [jnp.asarray(rng.normal(size=(rows, m)), "bfloat16") for m in (k, n)]
    for elements in {("e4m3", element), (element, "e4m3")}:
        x, dy = (
            tensors.quantized_lines(a, of_sizes, element=of)
            for a, of in zip(values, elements, strict=True)
        )
        want = np.zeros((len(sizes), n, k)) if old is None else oracle.f64(old).copy()
        for g, (first, last) in enumerate(oracle.bounds(sizes, rows)):
            want[g] += fp8_oracle.values(dy[0])[first:last].T @ fp8_oracle.values(x[0])[first:last]

        def run(x, dy, sizes, old):
            return jgg.fp8_grouped_wgrad(x, dy, sizes, existing_out=old, accumulate="fast")

        got = np.asarray(compiled(run, "fast = true", x[1], dy[1], of_sizes, old))
        assert error(got, want) <= 1e-3
        empty = np.asarray(sizes) == 0
        np.testing.assert_array_equal(got[empty], np.float32(want[empty]))


@pytest.mark.parametrize("k", [256, 2048, 8192])
def test_fast_sums_are_those_of_the_model(k):
    """Sums of numbers of one sign, which feel what is cut off, are no further from float64 than
    twice what the model says; and exact ones are nearer at length."""
    rng = np.random.default_rng(5)
    draw = lambda *shape: np.abs(rng.normal(size=shape)).astype("float32")
    x, w = (
        convert.made(*map(jnp.asarray, fp8_oracle.quantize(a, None, "e4m3")), block=None)
        for a in (draw(64, k), draw(1, 64, k))
    )
    codes = [np.float64(np.asarray(q.weight).astype("float32")) for q in (x, w)]
    want = codes[0] @ codes[1][0].T
    model = error(fp8_accumulator.product(codes[0], codes[1][0], None), want)
    errors = {}
    for accumulate in ("fast", "exact"):
        f = functools.partial(
            jgg.fp8_grouped_mm, preferred_element_type="float32", accumulate=accumulate
        )
        got = np.float64(compiled(f, "jgg_fp8_grouped_mm", x, w, jnp.asarray([64])))
        errors[accumulate] = error(got / float(x.scales) / float(w.scales[0]), want)
    assert model / 10 < errors["fast"] < 2 * model
    assert k == 256 or errors["exact"] < errors["fast"] / 2


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": "fast", "scaling": "delayed"},
        {"accumulate": "fast", "gradient_format": "e5m2"},
    ],
    ids=["default", "fast, delayed", "e5m2"],
)
def test_layer(options, transpose_w):
    """Kernels against the composition: as far from each other as FP8's own error, which both
    have."""
    rng = np.random.default_rng(6)
    tokens, d, f, e, k = 700, 256, 384, 5, 2
    of = lambda *shape: oracle.random(rng, shape, "bfloat16")
    up, down = of(e, d, 2 * f) / d**0.5, of(e, f, d) / f**0.5
    if transpose_w:
        up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
    index = jnp.asarray(rng.integers(-1, e - 1, (tokens, k)), jnp.int32)
    weight = jnp.asarray(rng.random((tokens, k)), "float32")
    args, ct = (of(tokens, d), up, down, weight), of(tokens, d)
    recipe = jgg.FP8Recipe(**{"scaling": "tensor", **options})
    delayed = recipe.scaling == "delayed"
    state = (jgg.FP8State.new(), jgg.FP8State.new()) if delayed else None

    def step(args, ct, state, recipe=recipe):
        layer = lambda args, state: jgg.moe_mlp(
            *args[:3], index, args[3], recipe=recipe, transpose_w=transpose_w, state=state
        )
        out, pull = jax.vjp(layer, args, state)
        grads, seen = pull(ct)
        return (out, *grads), seen

    got, seen = compiled(step, "jgg_fp8_activation_cast_backward", args, ct, state)
    if delayed:  # the second step has the scales of the first one, which are its own
        assert [int((np.asarray(a) > 0).sum()) for a in jax.tree.leaves(seen)] == [1] * 4
        state = tuple(s.updated(new) for s, new in zip(state, seen, strict=True))
        again, _ = compiled(step, "jgg_fp8_activation_cast_backward", args, ct, state)
        np.testing.assert_array_equal(np.asarray(again[0]), np.asarray(got[0]))
        got = again
    exact, _ = jax.jit(functools.partial(step, recipe=None))(args, ct, None)
    limit = 0.12 if "gradient_format" in options else 0.08
    for one, want in zip(got, exact, strict=True):
        assert oracle.error(one, want) < limit
    assert not np.asarray(got[2])[-1].any()  # no token chose this expert
