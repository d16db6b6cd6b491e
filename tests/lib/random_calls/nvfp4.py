"""Random calls of NVFP4's operations: quantizing, products, training."""

import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import nvfp4_grouped_problems as nv
import nvfp4_oracle
import oracle
from oracle import f64

import jax_groupgemm as jgg

from .call import FLOATS, Call, fixed_dtype, floats_of, pick, size
from .grouped import epilogue


def nvfp4_quantize(rng) -> Call:
    """The same bytes as in numpy."""
    axis = pick(rng, [-1, -2])
    grouped, layout = bool(rng.integers(2)), "linear"
    shape = (size(rng), 16 * int(rng.integers(1, 5)))
    if not grouped and rng.integers(2):
        shape = (int(rng.integers(1, 4)), *shape)
    if axis == -2 and not grouped:
        shape = (*shape[:-2], shape[-1], shape[-2])
    dtype, g = pick(rng, FLOATS), int(rng.integers(1, 6))
    scale_2d = not grouped and rng.integers(3) == 0
    hadamard = not scale_2d and rng.integers(2) == 0
    if axis == -1 and rng.integers(4) == 0:
        layout = "swizzled"
    seeded = rng.integers(3) == 0
    key = jnp.asarray(rng.integers(0, 2**32, 2, np.uint32)) if seeded else None

    def run(p, m):
        sizes = m[1] if grouped else None
        q = jgg.nvfp4_quantize(
            m[0], axis=axis, group_sizes=sizes, scale_2d=bool(scale_2d), hadamard=bool(hadamard),
            layout=layout, stochastic_rounding_key=key,
        )  # fmt: skip
        if layout == "swizzled":
            values = jgg.dequantize(q)
            return [q.weight, values, q.global_scale]
        out = [q.weight, q.scales, q.global_scale]
        return out if q.positions is None else [*out, q.positions]

    def check(got, p, m):
        words = None
        if seeded:
            words = [int(v) for v in np.asarray(jax.random.bits(key, (2,), np.uint32))]
        code, scales, positions, global_scale = nvfp4_oracle.quantize(
            m[0], axis=axis, sizes=m[1] if grouped else None, scale_2d=scale_2d, key=words,
            hadamard=hadamard,
        )  # fmt: skip
        code = np.ascontiguousarray(code, np.uint8)
        weight = (code[..., ::2] | code[..., 1::2] << 4).view(np.uint32)
        np.testing.assert_array_equal(got[0], weight)
        np.testing.assert_array_equal(got[2], global_scale)
        if layout == "swizzled":
            q = jgg.Quantized(weight, scales, mode="nvfp4", bits=4, group_size=16)
            spread = f64(global_scale).reshape(np.shape(global_scale) + (1, 1))
            values = (oracle.dequantize(q) * spread).astype(np.float32)
            np.testing.assert_array_equal(got[1], values)
            return
        np.testing.assert_array_equal(got[1], scales)
        if grouped and axis == -2:
            np.testing.assert_array_equal(got[3], positions)

    cast = fixed_dtype(rng)

    def draw(alone):
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)
        x = x.astype(np.float32).astype(jnp.dtype(dtype))
        if rng.integers(4) == 0:
            x[tuple(rng.integers(0, n) for n in shape)] = pick(rng, [np.nan, np.inf, 0, -np.inf])
        data = [x]
        if grouped:
            data.append(cast(fuzz.some_sizes(rng, g, shape[0])))
        return [], data

    name = (
        f"nvfp4_quantize {dtype} {shape} {axis} {grouped} {scale_2d} {hadamard} {layout} {seeded}"
    )
    # Blocks are not cut; sizes are data.
    letters = ["." * (len(shape) - 2) + ("T." if axis == -1 else ".N"), ""][: 1 + grouped]
    return Call(
        name, run, check, draw, transforms="checked" if not seeded else "alone",
        letters=None if grouped else letters,
    )  # fmt: skip


def nvfp4_grouped_mm(rng) -> Call:
    t, g, n, k = size(rng), int(rng.integers(1, 6)), size(rng, 16), 16 * int(rng.integers(1, 6))
    x_scale = pick(rng, [None, (), (t,)])
    w_scale = pick(rng, [None, (), (g,)])
    alpha = pick(rng, [None, (), (g,)])
    bias, out, packs = bool(rng.integers(2)), pick(rng, [None, *FLOATS]), rng.integers(4) == 0
    if packs:
        n, k = 64, 64 * int(rng.integers(1, 3))
    cast = fixed_dtype(rng)
    named = {"x": x_scale, "w": w_scale, "alpha": alpha, "bias": (g, n) if bias else None}
    named = {name: shape for name, shape in named.items() if shape is not None}

    def split(p):
        return dict(zip(named, p, strict=True))

    def quantized(weight, scales, scale):
        return jgg.Quantized(weight, scales, None, scale, mode="nvfp4", bits=4, group_size=16)

    def run(p, m):
        o = split(p)
        w = quantized(m[2], m[3], o.get("w"))
        return jgg.nvfp4_grouped_mm(
            quantized(m[0], m[1], o.get("x")), jgg.prepack(w, strict=True) if packs else w, m[4],
            alpha=o.get("alpha"), bias=o.get("bias"), preferred_element_type=out,
        )  # fmt: skip

    def want(p, m):
        o = split(p)
        x, w = (oracle.dequantize(quantized(*m[i : i + 2], None)) for i in (0, 2))
        x = x * np.broadcast_to(f64(o.get("x", 1.0)), (t,))[:, None]
        factor = np.broadcast_to(f64(o.get("w", 1.0)), (g,)) * f64(o.get("alpha", 1.0))
        y = oracle.grouped_mm(x, w * np.broadcast_to(factor, (g,))[:, None, None], m[4],
                              transpose_w=True)  # fmt: skip
        return epilogue(y, oracle.bounds(m[4], t), {"bias": o["bias"]} if bias else {}, None)

    def draw(alone):
        p = [np.asarray(rng.uniform(0.5, 2, shape), np.float32) for shape in named.values()]
        x, w = (oracle.random_quantized(rng, s, "nvfp4") for s in ((t, k), (g, n, k)))
        sizes = cast(fuzz.some_sizes(rng, g, t))
        return p, [*map(np.asarray, (x.weight, x.scales, w.weight, w.scales)), sizes]

    name = f"nvfp4_grouped_mm {out} {named}{' packed' if packs else ''}"
    words = {"x": "T", "w": "G", "alpha": "G", "bias": "GN"}
    return Call(
        name, run, want, draw, k * t, out or "bfloat16", tolerance=2.0,
        letters=[*(words[name] for name in named), "TK", "TK", "GNK", "GNK"],
        units={"N": n // 64, "K": k // 64} if packs else {},
    )  # fmt: skip


def nvfp4_grouped_wgrad(rng) -> Call:
    t, g, n, k = size(rng), int(rng.integers(1, 5)), size(rng, 16), size(rng, 16)
    named = {
        "x": pick(rng, [None, ()]), "dy": pick(rng, [None, ()]),
        "alpha": pick(rng, [None, (), (g,)]),
        "existing_out": pick(rng, [None, (g, n, k)]),
    }  # fmt: skip
    if named["existing_out"] is not None:
        named["beta"] = pick(rng, [None, (), (g,)])
    named = {name: shape for name, shape in named.items() if shape is not None}

    def split(p):
        return dict(zip(named, p, strict=True))

    def quantized(weight, scales, positions, scale):
        return jgg.Quantized(
            weight, scales, None, scale, positions=positions, mode="nvfp4", bits=4, group_size=16,
            axis=-2, layout="grouped",
        )  # fmt: skip

    def run(p, m):
        o = split(p)
        more = {name: o[name] for name in ("alpha", "beta", "existing_out") if name in o}
        return jgg.nvfp4_grouped_wgrad(
            quantized(m[0], m[1], m[4], o.get("x")), quantized(m[2], m[3], m[4], o.get("dy")), m[5],
            **more,
        )  # fmt: skip

    def want(p, m):
        o = split(p)
        x, dy = (nv.rows_of(quantized(*m[i : i + 2], m[4], None)) for i in (0, 2))
        factor = f64(o.get("x", 1.0)) * f64(o.get("dy", 1.0)) * f64(o.get("alpha", 1.0))
        factor = np.broadcast_to(factor, (g,))
        beta = np.broadcast_to(f64(o.get("beta", 1.0)), (g,))
        out = np.zeros((g, n, k))
        for i, (start, end) in enumerate(oracle.bounds(m[5], t)):
            if end > start:
                out[i] = factor[i] * (dy[start:end].T @ x[start:end])
        if "existing_out" in o:
            out = out + beta[:, None, None] * f64(o["existing_out"])
        return out

    def draw(alone):
        p = [np.asarray(rng.uniform(0.5, 2, shape), np.float32) for shape in named.values()]
        sizes = np.asarray(fuzz.some_sizes(rng, g, t), np.int32)
        x, dy = (nv.along_t(rng, c, sizes, t) for c in (k, n))
        return p, [*map(np.asarray, (x.weight, x.scales, dy.weight, dy.scales, x.positions)), sizes]

    name = f"nvfp4_grouped_wgrad {named}"
    words = {"existing_out": "GNK"}
    return Call(
        name, run, want, draw, t * k, "float32", tolerance=2.0, tied=True,
        letters=[*(words.get(name, "G") for name in named), "K.", "K.", "N.", "N."],
    )  # fmt: skip


def nvfp4_grouped_linear(rng) -> Call:
    """Forward, of numpy's quantized operands; the gradient of bias."""
    t, g, n, k = size(rng), int(rng.integers(1, 5)), size(rng, 16), size(rng)
    dtype, bias, scale_2d = (
        pick(rng, ["float32", "bfloat16"]),
        bool(rng.integers(2)),
        bool(rng.integers(2)),
    )
    exact = rng.integers(4) == 0
    recipe = jgg.NVFP4Recipe(
        scale_2d=scale_2d,
        hadamard=bool(rng.integers(2)),
        high_precision=("fprop",) if exact else (),
    )
    cast = fixed_dtype(rng)

    def run(p, m):
        return jgg.nvfp4_grouped_linear(
            m[0], m[1], m[2], bias=p[0] if bias else None, recipe=recipe
        )

    def values(a, **options):
        pad = [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % 16)]
        if a.ndim == 3:
            pad[1] = (0, -a.shape[1] % 16)
        code, scales, _, scale = nvfp4_oracle.quantize(np.pad(a, pad), **options)
        spread = f64(scale).reshape(np.shape(scale) + (1, 1))
        return oracle.E2M1[code] * np.repeat(oracle.E4M3[scales & 0x7F], 16, -1) * spread

    def want(p, m):
        x, w, sizes = m
        if exact:
            y = oracle.grouped_mm(x, w, sizes, transpose_w=True)
        else:
            x, w = values(x, sizes=sizes), values(w, scale_2d=scale_2d)
            y = oracle.grouped_mm(x, w, sizes, transpose_w=True)[:, :n]
        return epilogue(y, oracle.bounds(sizes, t), {"bias": p[0]} if bias else {}, None)

    def draw(alone):
        x, w, *rest = floats_of(
            rng, [(t, k), (g, n, k), *[(g, n)] * bias], [dtype, dtype, *[dtype] * bias]
        )
        return rest, [x, w, cast(fuzz.some_sizes(rng, g, t))]

    name = f"nvfp4_grouped_linear {dtype} {bias} {recipe}"
    return Call(
        name, run, want, draw, k * t, dtype, tolerance=2.0, transforms="reverse",
        letters=[*["GN"] * bias, "TK", "GNK"],
    )  # fmt: skip
