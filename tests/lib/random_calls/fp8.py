"""Random calls of FP8's operations: quantizing, products, training."""

import fp8_oracle
import fuzz
import jax.numpy as jnp
import numpy as np
import oracle
from oracle import f64

import jax_groupgemm as jgg

from .call import FLOATS, KINKED, Call, fixed_dtype, floats_of, group_data, pick, size
from .grouped import epilogue, options_of


def some_codes(rng, shape) -> np.ndarray:
    """Bytes of e4m3 numbers, none of them NaN."""
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    return np.where(codes & 0x7F == 0x7F, np.uint8(0), codes)


def fp8_of(codes, scales, block, **more) -> jgg.Quantized:
    return jgg.Quantized(codes, scales, mode="fp8", bits=8, group_size=None, block=block, **more)  # pyright: ignore


def fp8_values(codes, scales, block) -> np.ndarray:
    """float64."""
    codes = np.asarray(codes).view(fp8_oracle.DTYPES["e4m3"])
    return fp8_oracle.dequantize(codes, f64(scales), block)


def fp8_quantize(rng) -> Call:
    """The same bits as in numpy."""
    axis, grouped = pick(rng, [-1, -2]), bool(rng.integers(2))
    shape = (size(rng), pick(rng, [1, 7, 128, 129, 200]))
    if not grouped and rng.integers(2):
        shape = (int(rng.integers(1, 4)), *shape)
    block = (1, 128)
    if not (grouped and axis == -2):
        block = pick(rng, [(1, 128), (128, 128), (1, 300), (3, 50), None])
    dtype, g = pick(rng, FLOATS), int(rng.integers(1, 6))
    options = {
        "scale_format": pick(rng, ["float32", "e8m0"]),
        "format": pick(rng, ["e4m3", "e5m2"]),
    }
    cast = fixed_dtype(rng)

    def run(p, m):
        q = jgg.fp8_quantize(
            m[0], axis=axis, block=block, group_sizes=m[1] if grouped else None, **options
        )
        out = [q.weight, q.scales]
        return out if q.positions is None else [*out, q.positions]

    def check(got, p, m):
        x = m[0]
        if grouped and axis == -2:
            x, positions = fp8_oracle.padded(x, m[1])
            np.testing.assert_array_equal(got[2], positions)
        elif grouped:
            covered = oracle.bounds(m[1], len(x))[-1][1]
            x = np.where(np.arange(len(x))[:, None] < covered, x, x.dtype.type(0))
        x = x.swapaxes(-1, -2) if axis == -2 else x
        codes, scales = fp8_oracle.quantize(x, block, options["format"], options["scale_format"])
        np.testing.assert_array_equal(got[0].view(np.uint8), codes.view(np.uint8))
        np.testing.assert_array_equal(got[1], scales)

    def draw(alone):
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, shape)
        x = x.astype(np.float32).astype(jnp.dtype(dtype))
        if rng.integers(4) == 0:
            x[tuple(rng.integers(0, n) for n in shape)] = pick(rng, [np.nan, np.inf, 0, -np.inf])
        return [], [x, cast(fuzz.some_sizes(rng, g, shape[0]))] if grouped else [x]

    name = f"fp8_quantize {dtype} {shape} {axis} {grouped} {block} {options}"
    return Call(name, run, check, draw, transforms="checked")


def fp8_grouped_mm(rng) -> Call:
    t, g, n, k = size(rng), int(rng.integers(1, 6)), size(rng), pick(rng, [1, 24, 128, 200])
    x_block = pick(rng, [(1, 128), (1, 300), (1, 32)])
    w_block = pick(rng, [(128, 128), (1, 128), (16, 48), None])
    out = pick(rng, FLOATS)
    names, shapes, dtypes, activation = options_of(rng, t, g, n, "float32", None, existing=False)
    data, has_offset = group_data(rng, g, t)
    scales = [
        fp8_oracle.quantize(np.zeros(s, np.float32), b)[1].shape
        for s, b in (((t, k), x_block), ((g, n, k), w_block))
    ]

    def run(p, m):
        return jgg.fp8_grouped_mm(
            fp8_of(m[0], p[0], x_block), fp8_of(m[1], p[1], w_block), m[2],
            group_offset=m[3] if has_offset else None, activation=activation,
            preferred_element_type=out, **dict(zip(names, p[2:], strict=True)),
        )  # fmt: skip

    def want(p, m):
        offset = m[3] if has_offset else None
        x, w = fp8_values(m[0], p[0], x_block), fp8_values(m[1], p[1], w_block)
        y = oracle.grouped_mm(x, w, m[2], offset=offset, transpose_w=True)
        ranges = oracle.local_bounds(m[2], t, g, offset)
        return epilogue(y, ranges, dict(zip(names, p[2:], strict=True)), activation)

    def draw(alone):
        p = [np.asarray(rng.uniform(1e-3, 2e-3, s), np.float32) for s in scales]
        p += floats_of(rng, list(shapes.values()), [dtypes[n] for n in names])
        return p, [some_codes(rng, (t, k)), some_codes(rng, (g, n, k)), *data()]

    name = f"fp8_grouped_mm {out} {x_block} {w_block} {names} {activation}"
    return Call(name, run, want, draw, k * t, out, tolerance=4.0,
                smooth=activation not in KINKED)  # fmt: skip


def fp8_grouped_wgrad(rng) -> Call:
    t, g, n, k = size(rng), int(rng.integers(1, 4)), size(rng, 16), size(rng, 16)
    existing, padded = bool(rng.integers(2)), (t + 127 * min(g, t)) // 128 * 128

    def run(p, m):
        x, dy = (
            fp8_of(m[i], p[i], (1, 128), positions=m[2], axis=-2, layout="grouped") for i in (0, 1)
        )
        return jgg.fp8_grouped_wgrad(x, dy, m[3], existing_out=p[2] if existing else None)

    def want(p, m):
        x, dy = (fp8_values(m[i], p[i], (1, 128)) for i in (0, 1))
        out, start = np.zeros((g, n, k)), 0
        for i, (first, last) in enumerate(oracle.bounds(m[3], t)):
            rows = slice(start, start := start + -(-(last - first) // 128) * 128)
            out[i] = dy[:, rows] @ x[:, rows].T
        return out + f64(p[2]) if existing else out

    def draw(alone):
        sizes = np.asarray(fuzz.some_sizes(rng, g, t), np.int32)
        _, positions = fp8_oracle.padded(np.zeros((t, 1)), sizes)
        p = [np.asarray(rng.uniform(1e-3, 2e-3, (c, padded // 128)), np.float32) for c in (k, n)]
        p += [rng.standard_normal((g, n, k)).astype(np.float32)] * existing
        return p, [*(some_codes(rng, (c, padded)) for c in (k, n)), positions, sizes]

    return Call(f"fp8_grouped_wgrad {existing}", run, want, draw, 128 * k, "float32",
                tolerance=2.0, tied=True)  # fmt: skip


def fp8_grouped_linear(rng) -> Call:
    """Forward, of numpy's quantized operands; the gradient of bias."""
    t, g, n, k = size(rng), int(rng.integers(1, 5)), size(rng, 16), pick(rng, [5, 130])
    dtype, bias = pick(rng, ["float32", "bfloat16"]), bool(rng.integers(2))
    forward = pick(rng, ["fp8", "fp8", "bfloat16"])
    scaling = pick(rng, ["block", "block", "tensor"])
    recipe = jgg.FP8Recipe(
        forward=forward, gradient_format=pick(rng, ["e4m3", "e5m2"]), scaling=scaling
    )
    cast = fixed_dtype(rng)

    def run(p, m):
        return jgg.fp8_grouped_linear(m[0], m[1], m[2], bias=p[0] if bias else None, recipe=recipe)

    def want(p, m):
        x, w, sizes = m
        if forward == "fp8" and scaling == "tensor":
            x = np.asarray(x)
            x = np.where(np.arange(t)[:, None] < oracle.bounds(sizes, t)[-1][1], x, x.dtype.type(0))
            of = lambda a: fp8_oracle.dequantize(
                *fp8_oracle.quantize(a, None, scale_format="e8m0"), None
            )
            x, w = of(x), of(w)
        elif forward == "fp8":
            x = fp8_oracle.dequantize(*fp8_oracle.quantize(x, (1, 128)), (1, 128))
            w = fp8_oracle.dequantize(*fp8_oracle.quantize(w, (128, 128)), (128, 128))
        y = oracle.grouped_mm(x, w, sizes, transpose_w=True)
        return epilogue(y, oracle.bounds(sizes, t), {"bias": p[0]} if bias else {}, None)

    def draw(alone):
        x, w, *rest = floats_of(
            rng, [(t, k), (g, n, k), *[(g, n)] * bias], [dtype, dtype, *[dtype] * bias]
        )
        return rest, [x, w, cast(fuzz.some_sizes(rng, g, t))]

    name = f"fp8_grouped_linear {dtype} {bias} {recipe}"
    return Call(name, run, want, draw, k * t, dtype, tolerance=2.0, transforms="reverse")
