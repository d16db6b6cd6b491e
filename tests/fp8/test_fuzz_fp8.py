"""Random shapes, groupings, blocks and options of FP8's operations, against float64 of what codes
stand for, through whatever implementation ``None`` picks. ``pytest tests/fp8/test_fuzz_fp8.py
--fuzz N`` runs N cases of products, and N of quantizing and training."""

import fp8_oracle
import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from fuzz import PATTERNS, dimension, perhaps, some_sizes
from random_calls.fp8 import fp8_of, fp8_values, some_codes

import jax_groupgemm as jgg

LINE, TILE = (1, 128), (128, 128)
LINES = [LINE, LINE, LINE, (1, 32), (1, 300)]
TILES = [TILE, TILE, TILE, LINE, (1, 300), (16, 48), None]


def pytest_generate_tests(metafunc):
    fuzz.parametrize(metafunc, default=100, daily="products" in metafunc.function.__name__)


def pick(rng, options):
    return options[rng.integers(len(options))]


def width(rng, unit: int = 16) -> int:
    """Mostly whole lines of 16 bytes, without which there is no kernel."""
    most = int(rng.integers(1, 480)) if rng.integers(4) else dimension(rng)
    return unit * -(-most // unit)


def sums(rng) -> float:
    """What 14 bits of an accumulator cost: nothing on a CPU."""
    return 0 if jax.config.jax_default_device.platform == "cpu" else 4e-4


def operand(rng, shape, block):
    """Codes, scales, and values in float64."""
    codes = some_codes(rng, shape)
    scales = fp8_oracle.quantize(np.zeros(shape, np.float32), block)[1]
    scales = rng.uniform(1e-3, 2e-3, scales.shape).astype(np.float32)
    return codes, scales, fp8_values(codes, scales, block)


def usual(*values) -> float:
    """Of the product of two elements."""
    return float(np.prod([np.linalg.norm(v) / max(v.size, 1) ** 0.5 for v in values]))


def grouped_case(rng, dtype, out_dtype, precision, tf32):
    """Rows of no group have NaN for a scale."""
    t, k, n, g = (
        dimension(rng),
        pick(rng, [dimension, width])(rng),
        width(rng, 2),
        rng.integers(1, 9),
    )
    total, offset = fuzz.some_offset(rng, g)
    activation = pick(rng, [None, None, "silu", "relu", "swiglu"])
    x_block, w_block = pick(rng, LINES), pick(rng, TILES)
    x, x_scales, x_values = operand(rng, (t, k), x_block)
    w, w_scales, w_values = operand(rng, (g, n, k), w_block)
    size = usual(x_values, w_values)
    w_scales, w_values = w_scales / np.float32(size * k**0.5), w_values / (size * k**0.5)
    bias, scale = perhaps(rng, (g, n), dtype), perhaps(rng, (t,), dtype)

    @jax.jit
    def run(x, x_scales, w, w_scales, sizes, offset, bias, scale):
        return jgg.fp8_grouped_mm(
            fp8_of(x, x_scales, x_block), fp8_of(w, w_scales, w_block), sizes, bias=bias,
            group_offset=offset, activation=activation, row_scale=scale,
            preferred_element_type=out_dtype,
        )  # fmt: skip

    for _ in range(PATTERNS):
        sizes = some_sizes(rng, total, t)
        ranges = oracle.local_bounds(sizes, t, g, offset)
        mine = np.zeros(t, bool)
        for start, end in ranges:
            mine[start:end] = True
        scales = np.where(mine[:, None], x_scales, np.float32(np.nan))
        first = None if offset is None else jnp.int32(offset)
        got = run(x, scales, w, w_scales, sizes, first, bias, scale)
        y = oracle.grouped_mm(x_values, w_values, sizes, offset=offset, transpose_w=True)
        want = fuzz.epilogue(y, ranges, bias, activation, scale)
        assert got.dtype == (out_dtype or "bfloat16")
        fuzz.check(got, want, k, False, operands=k**-0.5, more=2 * sums(rng))
        assert not np.asarray(got)[~mine].any()


def along_t(x, sizes, scale_format="float32"):
    """Codes, scales and places of rows, each group padded to whole blocks; and their values."""
    stored, positions = fp8_oracle.padded(x, sizes)
    codes, scales = fp8_oracle.quantize(stored.T, LINE, scale_format=scale_format)
    return (codes, scales, positions), fp8_oracle.dequantize(codes, scales, LINE).T[positions]


def wgrad_case(rng, dtype, out_dtype, precision, tf32):
    t, k, n, g = dimension(rng), width(rng, 8), width(rng, 8), rng.integers(1, 9)
    x, dy = oracle.host_random(rng, (t, k), dtype), oracle.host_random(rng, (t, n), dtype)
    old = perhaps(rng, (g, n, k), "float32")

    @jax.jit
    def run(x, dy, sizes, old):
        of = lambda codes, scales, positions: fp8_of(
            codes, scales, LINE, positions=positions, axis=-2, layout="grouped"
        )
        return jgg.fp8_grouped_wgrad(of(*x), of(*dy), sizes, existing_out=old)

    for _ in range(PATTERNS):
        sizes = some_sizes(rng, g, t)
        (x_codes, x_values), (dy_codes, dy_values) = along_t(x, sizes), along_t(dy, sizes)
        got = run(x_codes, dy_codes, sizes, old)
        want = weight_gradient(x_values, dy_values, sizes, t)
        fuzz.check(got, want if old is None else want + oracle.f64(old), t, False, more=sums(rng))
        empty = [first == last for first, last in oracle.bounds(sizes, t)]
        kept = np.zeros((g, n, k)) if old is None else np.asarray(old)
        np.testing.assert_array_equal(np.asarray(got)[empty], kept[empty])


def weight_gradient(x, dy, sizes, rows):
    return np.stack([dy[a:b].T @ x[a:b] for a, b in oracle.bounds(sizes, rows)])


def qmm_case(rng, dtype, out_dtype, precision, tf32):
    """Weights in FP8, rows in ``dtype``."""
    t, k, n, g = dimension(rng), width(rng, 4), width(rng, 4), rng.integers(1, 9)
    block, transpose_w = pick(rng, TILES), bool(rng.integers(2))
    w, scales, values = operand(rng, (g, n, k), block)
    scales, values = scales / np.float32(usual(values)), values / usual(values)
    values = values.swapaxes(1, 2) if transpose_w else values
    k, n = values.shape[1:]
    x, ct = oracle.random(rng, (t, k), dtype), oracle.random(rng, (t, n), out_dtype or dtype)

    @jax.jit
    def run(x, ct, w, scales, sizes):
        f = lambda x: jgg.grouped_qmm(
            x, fp8_of(w, scales, block), sizes, transpose_w=transpose_w,
            preferred_element_type=out_dtype,
        )  # fmt: skip
        out, vjp = jax.vjp(f, x)
        return out, *vjp(ct)

    for _ in range(PATTERNS):
        sizes = some_sizes(rng, g, t)
        with jax.default_matmul_precision(precision):
            out, dx = run(x, ct, w, scales, sizes)
        fuzz.check(out, oracle.grouped_mm(x, values, sizes), k, tf32)
        fuzz.check(dx, oracle.grouped_mm(ct, values, sizes, transpose_w=True), n, tf32)


def quantize_case(rng, dtype, out_dtype, precision, tf32):
    """The same bits as in numpy."""
    t, k, g, axis = dimension(rng), dimension(rng), int(rng.integers(1, 9)), pick(rng, [-1, -2])
    how = {
        "scale_format": pick(rng, ["float32", "e8m0"]),
        "format": pick(rng, ["e4m3", "e5m2"]),
    }
    block = LINE if axis == -2 else pick(rng, [LINE, LINE, TILE, (1, 300), (3, 50), None])
    x = oracle.host_random(rng, (t, k), dtype)
    x = (x.astype(np.float32) * 2.0 ** rng.integers(-8, 8, (t, 1))).astype(x.dtype)
    x[rng.integers(t), rng.integers(k)] = pick(rng, [np.nan, np.inf, -np.inf, 0])

    @jax.jit
    def run(x, sizes):
        q = jgg.fp8_quantize(x, axis=axis, block=block, group_sizes=sizes, **how)
        return q.weight, q.scales

    for _ in range(PATTERNS):
        sizes = some_sizes(rng, g, t)
        if axis == -2:
            rows = fp8_oracle.padded(x, sizes)[0].T
        else:
            rows = np.array(x)
            rows[oracle.bounds(sizes, t)[-1][1] :] = 0
        want = fp8_oracle.quantize(rows, block, how["format"], how["scale_format"])
        codes, scales = run(x, sizes)
        np.testing.assert_array_equal(np.asarray(codes).view("u1"), want[0].view("u1"))
        np.testing.assert_array_equal(scales, want[1])


def linear_case(rng, dtype, out_dtype, precision, tf32):
    """The result and gradients are products of what numpy quantizes."""
    t, k, n, g = dimension(rng), width(rng), width(rng), int(rng.integers(1, 9))
    dtype = "bfloat16" if dtype == "float16" else dtype
    x, ct = oracle.host_random(rng, (t, k), dtype), oracle.host_random(rng, (t, n), dtype)
    w, bias = oracle.host_random(rng, (g, n, k), dtype), perhaps(rng, (g, n), dtype)

    @jax.jit
    def run(x, w, bias, ct, sizes):
        f = lambda x, w: jgg.fp8_grouped_linear(x, w, sizes, bias=bias)
        out, vjp = jax.vjp(f, x, w)
        return out, *vjp(ct)

    lines = lambda a, block=LINE: fp8_oracle.dequantize(*fp8_oracle.quantize(a, block), block)
    weights, rows, cotangents = lines(w, TILE), lines(x), lines(ct)
    more = sums(rng)
    for _ in range(PATTERNS):
        sizes = some_sizes(rng, g, t)
        out, dx, dw = run(x, w, bias, ct, sizes)
        want = oracle.grouped_mm(rows, weights, sizes, transpose_w=True)
        want = fuzz.epilogue(want, oracle.bounds(sizes, t), bias)
        fuzz.check(out, want, k, False, more=more)
        fuzz.check(dx, oracle.grouped_mm(cotangents, weights, sizes), n, False, more=more)
        columns = [along_t(a, sizes)[1] for a in (x, ct)]
        fuzz.check(dw, weight_gradient(*columns, sizes, t), t, False, more=more)


def layer_case(rng, dtype, out_dtype, precision, tf32):
    """``moe_mlp`` with a recipe, against the composition of public operations. Gradients are of
    other rows, without weights, so each of the two has errors of its own."""
    t, k, e = 8 + dimension(rng), int(rng.integers(1, 4)), int(rng.integers(3, 7))
    d, f = 16 * int(rng.integers(1, 17)), pick(rng, [16, 80, 128, 200, 256])
    dtype = "bfloat16" if dtype == "float16" else dtype
    x, ct = oracle.random(rng, (t, d), dtype), oracle.random(rng, (t, d), dtype)
    up = oracle.random(rng, (e, d, 2 * f), dtype) / d**0.5
    down = oracle.random(rng, (e, f, d), dtype) / f**0.5
    weight = jnp.asarray(rng.random((t, k)), "float32")

    def gradients(x, up, down, weight, index, implementation):
        def layer(*args):
            return jgg.moe_mlp(
                *args[:3], index, args[3], recipe=RECIPE, implementation=implementation
            )

        out, pull = jax.vjp(layer, x, up, down, weight)
        return out, *pull(ct)

    run = jax.jit(gradients, static_argnums=5)
    for _ in range(PATTERNS):
        index = rng.integers(-1, e, (t, k)).astype(np.int32)
        if rng.integers(3) == 0:
            index = np.minimum(index, 1)
        args = x, up, down, weight, index
        out, *gradients = zip(run(*args, None), run(*args, "composed"), strict=True)
        assert oracle.error(*out) < 0.01
        for both in gradients:
            assert oracle.error(*both) < 0.15


RECIPE = jgg.FP8Recipe(stochastic_rounding=False)
PRODUCTS = (grouped_case, grouped_case, wgrad_case, qmm_case)
TRAINING = (quantize_case, linear_case, layer_case)


def test_random_products(seed, where):
    fuzz.run(PRODUCTS, seed, where)


def test_random_training(seed, where):
    fuzz.run(TRAINING, seed, where)
