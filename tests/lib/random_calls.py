"""Random calls of every operation, each with its meaning in float64 numpy.

A :class:`Call` has operands that are differentiated, operands that are data, and a function of both
in numpy that knows nothing of the package. ``tests/random_cases`` tries it under transformations.
"""

import dataclasses
import math
from collections.abc import Callable

import fp8_oracle
import fuzz
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import nvfp4_grouped_problems as nv
import nvfp4_oracle
import oracle
from oracle import f64

import jax_groupgemm as jgg

FLOATS = ["float32", "bfloat16", "float16"]
GATED = list(moe_oracle.GATED)
ACTIVATIONS = [*moe_oracle.ACTIVATIONS, *GATED]
KINKED = {"relu", "relu2", "reglu", "swiglu_oai"}


@dataclasses.dataclass
class Call:
    """One operation with one set of shapes.

    Attributes:
      name: of the operation, and what is special.
      run: ``run(floats, data)``, of the package.
      want: the same in float64 numpy, of whatever is in ``floats``, rounded or not.
      draw: ``draw(alone)`` gives floats and data; ``alone``: where no other data meets these
        floats, so that what they hold for nobody may be NaN.
      k: the longest sum.
      dtype: of the result; None where want is not in numbers of one dtype, but compared as it is.
      tolerance: of the result, in units of the dtype's own.
      tied: data that belong together, so that a batch maps all of them or none.
      transforms: whether it is differentiated and mapped, only mapped, or neither.
    """

    name: str
    run: Callable
    want: Callable
    draw: Callable
    k: int = 1
    dtype: str | None = None
    tolerance: float = 1.0
    transforms: str = "all"
    smooth: bool = True
    tied: bool = False


def pick(rng, options):
    return options[int(rng.integers(len(options)))]


def size(rng, most: int = 40) -> int:
    return int(pick(rng, [1, 2, 3, 5, 8, 16, 17, 24, 32, 33, 40, 64, 65][: 3 + most // 4]))


def sometimes(rng, value, one_in: int = 2):
    return value if rng.integers(one_in) == 0 else None


def fixed_dtype(rng):
    """Integers of one dtype in all draws, clipped to it."""
    dtype = np.dtype(pick(rng, ["int32", "int32", "int32", "int16", "int8", "uint8", "uint32"]))
    info = np.iinfo(dtype)
    return lambda values: np.clip(values, info.min, info.max).astype(dtype)


def activated(y, activation):
    if activation is None:
        return y
    if activation in moe_oracle.ACTIVATIONS:
        return moe_oracle.ACTIVATIONS[activation](y) if activation != "gelu_erf" else erf_gelu(y)
    gate, up = np.split(y, 2, axis=-1)
    return moe_oracle.GATED[activation](gate, up)


def erf_gelu(y):
    flat = moe_oracle.gelu_erf(y.reshape(-1)) if y.size else y.reshape(-1)
    return flat.reshape(y.shape)


def options_of(rng, t, g, n, dtype, out, existing=True):
    """Names, shapes and dtypes of options, the activation and the columns of the result."""
    activation = sometimes(rng, pick(rng, ACTIVATIONS))
    if activation in GATED and n % 2:
        activation = None
    columns = n // 2 if activation in GATED else n
    given = {"bias": (g, n), "row_scale": (t,)}
    if existing:
        given["existing_out"] = (t, columns)
    names = [name for name in given if rng.integers(2)]
    dtypes = {"bias": dtype, "row_scale": dtype, "existing_out": out}
    return names, {n: given[n] for n in names}, dtypes, activation


def epilogue(y, ranges, options, activation):
    y = y.copy()
    if "bias" in options:
        for (start, end), b in zip(ranges, f64(options["bias"]), strict=True):
            y[start:end] += b
    with np.errstate(over="ignore"):
        y = activated(y, activation)
    if "row_scale" in options:
        covered = np.zeros(len(y), bool)
        for start, end in ranges:
            covered[start:end] = True
        y = y * np.where(covered, f64(options["row_scale"]), 0)[:, None]
    return y + f64(options["existing_out"]) if "existing_out" in options else y


def group_data(rng, g, t):
    """Draws of sizes and an offset, or none."""
    total, offset = fuzz.some_offset(rng, g)
    cast = fixed_dtype(rng)

    def draw():
        sizes = cast(fuzz.some_sizes(rng, total, t))
        if offset is None:
            return [sizes]
        return [sizes, np.int32(rng.integers(-4, g + 6))]

    return draw, offset is not None


def poison_rows(x, ranges):
    """NaN in rows of no group."""
    x = np.array(x)
    covered = np.zeros(len(x), bool)
    for start, end in ranges:
        covered[start:end] = True
    x[~covered] = np.nan
    return x


def poison_groups(w, ranges):
    """NaN in matrices without rows."""
    w = np.array(w)
    w[[end <= start for start, end in ranges]] = np.nan
    return w


def some_precision(rng):
    return pick(rng, [None, None, "highest", "float32", "F32_F32_F32"])


def floats_of(rng, shapes, dtypes, scales=None):
    scales = scales or [1.0] * len(shapes)
    return [
        (rng.standard_normal(s) * c).astype(np.float32).astype(jnp.dtype(d))
        for s, d, c in zip(shapes, dtypes, scales, strict=True)
    ]


def grouped_mm(rng) -> Call:
    t, k, n, g = size(rng), size(rng), size(rng), int(rng.integers(1, 7))
    dtype, out = pick(rng, FLOATS), pick(rng, [None, None, *FLOATS])
    transpose_w, precision = bool(rng.integers(2)), some_precision(rng)
    names, shapes, dtypes, activation = options_of(rng, t, g, n, dtype, out or dtype)
    w_shape = (g, n, k) if transpose_w else (g, k, n)
    data, has_offset = group_data(rng, g, t)

    def run(p, m):
        x, w, *rest = p
        return jgg.grouped_mm(
            x, w, m[0], group_offset=m[1] if has_offset else None, transpose_w=transpose_w,
            activation=activation, precision=precision, preferred_element_type=out,
            **dict(zip(names, rest, strict=True)),
        )  # fmt: skip

    def ranges_of(m):
        return oracle.local_bounds(m[0], t, g, m[1] if has_offset else None)

    def want(p, m):
        x, w, *rest = p
        offset = m[1] if has_offset else None
        y = oracle.grouped_mm(x, w, m[0], offset=offset, transpose_w=transpose_w)
        return epilogue(y, ranges_of(m), dict(zip(names, rest, strict=True)), activation)

    def draw(alone):
        m = data()
        p = floats_of(
            rng, [(t, k), w_shape, *shapes.values()], [dtype, dtype, *(dtypes[n] for n in names)],
            [1, k**-0.5, *[1] * len(names)],
        )  # fmt: skip
        if alone and rng.integers(2):
            p[0], p[1] = poison_rows(p[0], ranges_of(m)), poison_groups(p[1], ranges_of(m))
            if "row_scale" in names:
                i = 2 + names.index("row_scale")
                p[i] = poison_rows(p[i], ranges_of(m))
        return p, m

    return Call(
        f"grouped_mm {dtype} {out} {names} {activation}", run, want, draw, k, out or dtype,
        tolerance=3.0 if names or activation else 1.0, smooth=activation not in KINKED,
    )  # fmt: skip


def segmented_mm(rng) -> Call:
    m_, k, n = size(rng), size(rng), size(rng)
    lead = pick(rng, [(1,), (3,), (7,), (2, 3), (), (0,)])
    ta, tb = bool(rng.integers(2)), bool(rng.integers(2))
    dtype, out = pick(rng, FLOATS), pick(rng, [None, None, *FLOATS])
    cast, precision = fixed_dtype(rng), some_precision(rng)

    def spans():
        kind = rng.integers(4)
        if kind == 0:
            s = rng.integers(-5, k + 6, (*lead, 2))
        elif kind == 1:
            s = np.sort(rng.integers(0, k + 1, (*lead, 2)), axis=-1)
        elif kind == 2:
            s = np.broadcast_to(np.sort(rng.integers(0, k + 1, 2)), (*lead, 2))
        else:
            s = rng.integers(0, k + 1, (*lead, 1)) + np.array([0, 0])
        return cast(s)

    def run(p, m):
        return jgg.segmented_mm(
            p[0], p[1], m[0], transpose_a=ta, transpose_b=tb, precision=precision,
            preferred_element_type=out,
        )  # fmt: skip

    def want(p, m):
        a, b = (f64(p[0]).T if ta else p[0]), (f64(p[1]).T if tb else p[1])
        return oracle.segmented_mm(a, b, m[0])

    def draw(alone):
        m = [spans()]
        p = floats_of(rng, [(k, m_) if ta else (m_, k), (n, k) if tb else (k, n)], [dtype] * 2)
        if alone and rng.integers(2):
            inside = oracle.clamp(m[0].reshape(-1, 2), k)
            a, b = (p[0] if ta else p[0].T), (p[1].T if tb else p[1])
            a, b = poison_rows(a, inside), poison_rows(b, inside)
            p = [a if ta else a.T.copy(), b.T.copy() if tb else b]
        return p, m

    return Call(f"segmented_mm {dtype} {out} {lead} {ta} {tb}", run, want, draw,
                k * max(1, math.prod(lead)), out or dtype)  # fmt: skip


def index_data(rng, count, matrices, lead, batch):
    """Draws of two lists of indices, of shapes that broadcast, one of which may be missing."""
    missing, promised = pick(rng, ["", "", "", "lhs", "rhs"]), rng.integers(3) == 0
    pairs = int(rng.integers(0, 14))
    shapes = {
        "": pick(rng, [((pairs,), (pairs,)), ((3, 1), (2,)), ((), (4,)), ((2, 3), (2, 3))]),
        "lhs": (lead, pick(rng, [lead, (2, *lead)])),
        "rhs": (pick(rng, [batch, (2, *batch)]), batch),
    }[missing]
    casts = fixed_dtype(rng), fixed_dtype(rng)

    def draw():
        out = []
        for name, shape, most, cast in zip(
            ("lhs", "rhs"), shapes, (count, matrices), casts, strict=True
        ):
            if name == missing:
                continue
            low = pick(rng, [0, -1, -3])
            index = rng.integers(low, most + (2 if low else 0), shape)
            if name == "rhs" and promised:
                index = np.sort(index, axis=None).reshape(shape)
            out.append(cast(np.asarray(index)))
        return out

    def both(m):
        m = list(m)
        return (None if missing == "lhs" else m.pop(0)), (None if missing == "rhs" else m.pop(0))

    return draw, both, promised


def gather_mm(rng) -> Call:
    lead = pick(rng, [(3,), (1,), (2, 2), (), (5,)])
    batch = pick(rng, [(3,), (1,), (2, 2), (), (5,)])
    m_, k, n = size(rng, 12), size(rng), size(rng)
    dtype, out = pick(rng, FLOATS), pick(rng, [None, None, *FLOATS])
    data, both, promised = index_data(rng, math.prod(lead), math.prod(batch), lead, batch)

    def run(p, m):
        lhs, rhs = both(m)
        return jgg.gather_mm(
            p[0], p[1], lhs, rhs, sorted_indices=promised, preferred_element_type=out
        )

    def want(p, m):
        return oracle.gather_mm(p[0], p[1], *both(m))

    def draw(alone):
        p = floats_of(rng, [(*lead, m_, k), (*batch, k, n)], [dtype] * 2)
        return p, data()

    name = f"gather_mm {dtype} {out} {lead} {batch} m={m_} {promised}"
    return Call(name, run, want, draw, k * 14, out or dtype)


def ragged_dot(rng) -> Call:
    t, k, n, g = size(rng), size(rng), size(rng), int(rng.integers(1, 7))
    dtype, out = pick(rng, FLOATS), pick(rng, [None, None, *FLOATS])
    data, has_offset = group_data(rng, g, t)

    def run(p, m):
        return jgg.ragged_dot(
            p[0], p[1], m[0], group_offset=m[1] if has_offset else None, preferred_element_type=out
        )

    def want(p, m):
        return oracle.grouped_mm(p[0], p[1], m[0], offset=m[1] if has_offset else None)

    def draw(alone):
        return floats_of(rng, [(t, k), (g, k, n)], [dtype] * 2), data()

    return Call(f"ragged_dot {dtype} {out}", run, want, draw, max(k, t), out or dtype)


# ---- quantized weights --------------------------------------------------------------------------

AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = AFFINE + 4 * [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


class Weight:
    """A quantized weight as arrays: leaves that are differentiated, and data."""

    def __init__(self, rng, batch, n=None, column_scale=False):
        self.mode, self.bits, self.group = pick(rng, FORMATS)
        self.transpose_w = bool(rng.integers(3))
        self.inner = self.group * int(rng.integers(1, 1 + max(1, 96 // self.group)))
        self.outer = size(rng, 16) if n is None else n
        self.shape = (*batch, self.outer, self.inner)
        self.dtype = pick(rng, FLOATS)
        self.scale_shape = None
        if self.mode == "nvfp4" and rng.integers(3):
            axes = int(rng.integers(len(batch) + 1 + (column_scale and self.transpose_w)))
            self.scale_shape = self.shape[:axes]
        self.rng, self.drawn = rng, []

    @property
    def leaves(self) -> list[str]:
        if self.mode == "affine":
            return ["scales", "biases"]
        return [] if self.scale_shape is None else ["global_scale"]

    @property
    def k(self) -> int:
        return self.inner if self.transpose_w else self.outer

    @property
    def n(self) -> int:
        return self.outer if self.transpose_w else self.inner

    def draw(self):
        """Leaves, and the codes (with their scales)."""
        q = oracle.random_quantized(self.rng, self.shape, self.mode, self.bits, self.group,
                                    self.dtype)  # fmt: skip
        if self.mode == "affine":
            scales, biases = (np.asarray(a) for a in (q.scales, q.biases))
            self.drawn.append((scales, biases))
            return [scales, biases], [np.asarray(q.weight)]
        leaves = []
        if self.scale_shape is not None:
            scale = np.asarray(self.rng.uniform(0.5, 2, self.scale_shape), np.float32)
            leaves = [scale]
        return leaves, [np.asarray(q.weight), np.asarray(q.scales)]

    def make(self, leaves, data) -> jgg.Quantized:
        of = {"mode": self.mode, "bits": self.bits, "group_size": self.group}
        if self.mode == "affine":
            return jgg.Quantized(data[0], leaves[0], leaves[1], **of)
        return jgg.Quantized(data[0], data[1], None, *leaves, **of)

    def values(self, leaves, data, dtype) -> np.ndarray:
        """(..., K, N) in float64, of leaves near some that were drawn: what they add to those is
        not rounded, as roundings have derivative 1."""
        if self.mode == "affine":
            rounded = [
                min((of[i] for of in self.drawn), key=lambda b, a=a: abs(f64(a) - f64(b)).sum())
                for i, a in enumerate(leaves)
            ]
            q = self.make(rounded, data)
            w = oracle.dequantize(q, dtype)
            codes = oracle.codes(q)
            ds, db = (f64(a) - f64(b) for a, b in zip(leaves, rounded, strict=True))
            w = w + codes * np.repeat(ds, self.group, -1) + np.repeat(db, self.group, -1)
        else:
            w = oracle.dequantize(self.make([], data), dtype)
            if leaves:
                scale = f64(leaves[0])
                w = w * scale.reshape(scale.shape + (1,) * (w.ndim - scale.ndim))
        return w.swapaxes(-1, -2) if self.transpose_w else w


def grouped_qmm(rng) -> Call:
    t, g = size(rng), int(rng.integers(1, 6))
    w = Weight(rng, (g,), column_scale=True)
    dtype, out = pick(rng, FLOATS), pick(rng, [None, None, *FLOATS])
    names, shapes, dtypes, activation = options_of(rng, t, g, w.n, dtype, None, existing=False)
    data, has_offset = group_data(rng, g, t)
    count = len(w.leaves)

    def parts(p):
        return p[0], p[1 : 1 + count], dict(zip(names, p[1 + count :], strict=True))

    def run(p, m):
        x, leaves, options = parts(p)
        codes, meta = m[: len(m) - 1 - has_offset], m[len(m) - 1 - has_offset :]
        return jgg.grouped_qmm(
            x, w.make(leaves, codes), meta[0], group_offset=meta[1] if has_offset else None,
            transpose_w=w.transpose_w, activation=activation, preferred_element_type=out, **options,
        )  # fmt: skip

    def ranges_of(meta):
        return oracle.local_bounds(meta[0], t, g, meta[1] if has_offset else None)

    def want(p, m):
        x, leaves, options = parts(p)
        codes, meta = m[: len(m) - 1 - has_offset], m[len(m) - 1 - has_offset :]
        values = w.values(leaves, codes, dtype)
        y = oracle.grouped_mm(x, values, meta[0], offset=meta[1] if has_offset else None)
        return epilogue(y, ranges_of(meta), options, activation)

    def draw(alone):
        leaves, codes = w.draw()
        meta = data()
        x, *rest = floats_of(
            rng, [(t, w.k), *shapes.values()], [dtype, *(dtypes[n] for n in names)],
            [w.k**-0.5, *[1] * len(names)],
        )  # fmt: skip
        if alone and rng.integers(2):
            x = poison_rows(x, ranges_of(meta))
        return [x, *leaves, *rest], [*codes, *meta]

    name = f"grouped_qmm {w.mode} {w.bits} {w.group} {dtype} {out} {names} {activation}"
    return Call(name, run, want, draw, w.k, out or dtype, tolerance=4.0,
                smooth=activation not in KINKED)  # fmt: skip


def gather_qmm(rng) -> Call:
    lead = pick(rng, [(3,), (1,), (2, 2), (), (5,)])
    batch = pick(rng, [(3,), (1,), (2, 2), (), (5,)])
    w, m_ = Weight(rng, batch), size(rng, 8)
    dtype, out = pick(rng, FLOATS), pick(rng, [None, None, *FLOATS])
    data, both, promised = index_data(rng, math.prod(lead), math.prod(batch), lead, batch)

    def run(p, m):
        codes = 1 if w.mode == "affine" else 2
        lhs, rhs = both(m[codes:])
        return jgg.gather_qmm(
            p[0], w.make(p[1:], m[:codes]), lhs, rhs, transpose_w=w.transpose_w,
            sorted_indices=promised, preferred_element_type=out,
        )  # fmt: skip

    def want(p, m):
        codes = 1 if w.mode == "affine" else 2
        return oracle.gather_mm(p[0], w.values(p[1:], m[:codes], dtype), *both(m[codes:]))

    def draw(alone):
        leaves, codes = w.draw()
        (x,) = floats_of(rng, [(*lead, m_, w.k)], [dtype], [w.k**-0.5])
        return [x, *leaves], [*codes, *data()]

    name = f"gather_qmm {w.mode} {w.bits} {w.group} {dtype} {out} {lead} {batch}"
    return Call(name, run, want, draw, w.k * 14, out or dtype, tolerance=3.0)


def quantized_matmul(rng) -> Call:
    batch = pick(rng, [(), (), (3,), (2, 3), (1, 3)])
    w = Weight(rng, batch)
    lead = pick(rng, [(), (7,), (2, 5)]) if not batch else pick(
        rng, [(5,), (*batch, 4), (2, *batch, 3), (*(1 for _ in batch), 2)]
    )  # fmt: skip
    dtype, out = pick(rng, FLOATS), pick(rng, [None, None, *FLOATS])

    def run(p, m):
        return jgg.quantized_matmul(
            p[0], w.make(p[1:], m), transpose_w=w.transpose_w, preferred_element_type=out
        )

    def want(p, m):
        return np.matmul(f64(p[0]), w.values(p[1:], m, dtype))

    def draw(alone):
        leaves, codes = w.draw()
        (x,) = floats_of(rng, [(*lead, w.k)], [dtype], [w.k**-0.5])
        return [x, *leaves], codes

    name = f"quantized_matmul {w.mode} {w.bits} {w.group} {dtype} {out} {lead} {batch}"
    return Call(name, run, want, draw, w.k * 16, out or dtype, tolerance=3.0)


def dequantize(rng) -> Call:
    batch = pick(rng, [(), (2,), (2, 3)])
    w = Weight(rng, batch)
    w.transpose_w = False
    to = pick(rng, FLOATS)

    def run(p, m):
        return jgg.dequantize(w.make(p, m), to)

    def want(p, m):
        return w.values(p, m, "float32")

    name = f"dequantize {w.mode} {w.bits} {w.group} {to} {batch}"
    return Call(name, run, want, lambda alone: w.draw(), 1, to)


def quantize(rng) -> Call:
    """Compared by what is promised: every value is the nearest that its scale has."""
    mode, bits, group = pick(rng, FORMATS)
    lead, k = pick(rng, [(3,), (2, 5), ()]), group * int(rng.integers(1, 4))
    dtype, contract = pick(rng, FLOATS), pick(rng, [-1, -2])
    scale = mode == "nvfp4" and bool(rng.integers(2))
    kind = int(rng.integers(3))

    def run(p, m):
        w = m[0].swapaxes(-1, -2) if contract == -2 else m[0]
        q = jgg.quantize(
            w, mode=mode, bits=bits, group_size=group, contract=contract,
            global_scale=m[1] if scale else None,
        )  # fmt: skip
        return [a for a in (q.weight, q.scales, q.biases) if a is not None]

    def check(got, p, m):
        q = jgg.Quantized(
            *map(np.asarray, got[:2]), np.asarray(got[2]) if len(got) > 2 else None,
            mode=mode, bits=bits, group_size=group,
        )  # fmt: skip
        w, back = f64(m[0]), oracle.dequantize(q) * (f64(m[1]) if scale else 1.0)
        blocks = w.reshape(*w.shape[:-1], -1, group)
        error = abs(w - back).reshape(blocks.shape)
        amax = abs(blocks).max(-1, keepdims=True)
        assert q.shape == w.shape
        if mode == "affine":
            spread = blocks.max(-1, keepdims=True) - blocks.min(-1, keepdims=True)
            # Its own rounding, that of the edge to a whole number of steps, and scale's to a dtype.
            step = spread / (2**bits - 1)
            eps = float(jnp.finfo(dtype).eps)
            assert (error <= 1.01 * step + 3 * eps * amax + 1e-6).all(), error.max()
            return
        # Half a step of the element format at amax, or of the smallest; scales are rounded up,
        # but nvfp4's, to nearest.
        half = {"mxfp4": 1 / 4, "mxfp8": 1 / 16, "nvfp4": 1 / 6 + 1 / 8}[mode]
        assert (error <= half * amax + 1e-30).all(), (error / amax).max()
        if mode != "nvfp4":
            largest = 6 if mode == "mxfp4" else 448
            exponent = np.ceil(np.log2(np.where(amax > 0, amax, largest) / largest))
            expected = np.clip(exponent, -127, 127)[..., 0] + 127
            near = abs(np.log2(np.where(amax > 0, amax, largest) / largest) % 1) < 1e-9
            same = expected == q.scales
            assert (same | near[..., 0]).all()

    def draw(alone):
        shape = (*lead, k) if contract == -1 else (*(lead or (1,)), k)
        w = rng.standard_normal(shape)
        if kind == 1:
            w = w * 2.0 ** rng.integers(-12, 12, shape)
        elif kind == 2:
            w = np.round(w) * (rng.random(shape) < 0.5)
        w = w.astype(np.float32).astype(jnp.dtype(dtype))
        amax = max(float(abs(f64(w)).max()), 1e-3)
        return [], [w, np.float32(amax / 2688)] if scale else [w]

    return Call(f"quantize {mode} {bits} {group} {dtype} {contract}", run, check, draw,
                transforms="checked")  # fmt: skip


# ---- nvfp4 --------------------------------------------------------------------------------------


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
    return Call(name, run, check, draw, transforms="checked" if not seeded else "alone")


def nvfp4_grouped_mm(rng) -> Call:
    t, g, n, k = size(rng), int(rng.integers(1, 6)), size(rng, 16), 16 * int(rng.integers(1, 6))
    x_scale = pick(rng, [None, (), (t,)])
    w_scale = pick(rng, [None, (), (g,)])
    alpha = pick(rng, [None, (), (g,)])
    bias, out = bool(rng.integers(2)), pick(rng, [None, *FLOATS])
    cast = fixed_dtype(rng)
    named = {"x": x_scale, "w": w_scale, "alpha": alpha, "bias": (g, n) if bias else None}
    named = {name: shape for name, shape in named.items() if shape is not None}

    def split(p):
        return dict(zip(named, p, strict=True))

    def quantized(weight, scales, scale):
        return jgg.Quantized(weight, scales, None, scale, mode="nvfp4", bits=4, group_size=16)

    def run(p, m):
        o = split(p)
        return jgg.nvfp4_grouped_mm(
            quantized(m[0], m[1], o.get("x")), quantized(m[2], m[3], o.get("w")), m[4],
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

    name = f"nvfp4_grouped_mm {out} {named}"
    return Call(name, run, want, draw, k * t, out or "bfloat16", tolerance=2.0)


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
    return Call(name, run, want, draw, t * k, "float32", tolerance=2.0, tied=True)


# ---- mixtures of experts ------------------------------------------------------------------------


def routed(index, experts, offset=0, max_rows=None):
    """order, place, sizes and overflow, pair by pair."""
    index = np.asarray(index).astype(np.int64) - offset
    pairs = index.size
    rows = pairs if max_rows is None else min(max_rows, pairs)
    order, sizes = [], np.zeros(experts, np.int32)
    for e in range(experts):
        mine = np.flatnonzero(index.reshape(-1) == e)
        sizes[e] = len(mine)
        order += mine.tolist()
    place = np.full(pairs, -1, np.int32)
    place[order[:rows]] = np.arange(min(rows, len(order)))
    filled = np.full(rows, -1, np.int32)
    filled[: len(order)] = order[:rows]
    return filled, place.reshape(index.shape), sizes, np.int32(max(len(order) - rows, 0))


def some_index(rng, tokens, k, experts, cast):
    low, high = pick(rng, [(0, experts), (-2, experts + 3), (0, 1), (0, experts)])
    return cast(rng.integers(low, max(high, low + 1), (tokens, k)))


def route(rng) -> Call:
    tokens, k, experts = size(rng), int(rng.integers(1, 5)), int(rng.integers(1, 9))
    offset = pick(rng, [None, None, 2, -1])
    max_rows = pick(rng, [None, 0, 3, tokens * k + 5])
    cast = fixed_dtype(rng)

    def run(p, m):
        r = jgg.route(m[0], experts, expert_offset=offset, max_rows=max_rows)
        return [r.order, r.place, r.group_sizes, r.overflow]

    def check(got, p, m):
        for a, b in zip(got, routed(m[0], experts, offset or 0, max_rows), strict=True):
            np.testing.assert_array_equal(a, b)

    draw = lambda alone: ([], [some_index(rng, tokens, k, experts, cast)])
    return Call(f"route {tokens} {k} {experts} {offset} {max_rows}", run, check, draw,
                transforms="checked")  # fmt: skip


def dispatch_and_combine(rng) -> Call:
    tokens, k, experts, d = size(rng), int(rng.integers(1, 5)), int(rng.integers(1, 9)), size(rng)
    max_rows, dtype = pick(rng, [None, 5]), pick(rng, FLOATS)
    weighted, which = bool(rng.integers(2)), pick(rng, ["dispatch", "combine", "both"])
    rows = tokens * k if max_rows is None else min(max_rows, tokens * k)
    cast = fixed_dtype(rng)
    weighted = weighted and which != "dispatch"

    def run(p, m):
        r = jgg.route(m[0], experts, max_rows=max_rows)
        y = p[0] if which == "combine" else jgg.dispatch(p[0], r)
        return y if which == "dispatch" else jgg.combine(y, r, *p[1:])

    def want(p, m):
        order, place, _, _ = routed(m[0], experts, 0, max_rows)
        y = f64(p[0])
        if which != "combine":
            y = np.stack([y[o // k] if o >= 0 else np.zeros(d) for o in order] or [np.zeros(d)])
            y = y[: len(order)]
        if which == "dispatch":
            return y
        out = np.zeros((tokens, d))
        for t in range(tokens):
            for j in range(k):
                if place[t, j] >= 0:
                    out[t] += y[place[t, j]] * (f64(p[1])[t, j] if weighted else 1)
        return out

    def draw(alone):
        m = [some_index(rng, tokens, k, experts, cast)]
        shapes = [(rows if which == "combine" else tokens, d)] + [(tokens, k)] * weighted
        p = floats_of(rng, shapes, [dtype, pick(rng, ["float32", dtype])][: len(shapes)])
        return p, m

    # The weights' dtype is that of the first draw.
    dtypes = [a.dtype for a in draw(False)[0]]
    cast_all = lambda drawn: ([a.astype(d) for a, d in zip(drawn[0], dtypes)], drawn[1])  # noqa: B905
    return Call(f"{which} {dtype} {dtypes} {max_rows}", run, want,
                lambda alone: cast_all(draw(alone)), max(k, d), dtype, tolerance=2.0)  # fmt: skip


def moe_mlp(rng) -> Call:
    tokens, k, experts = size(rng, 16), int(rng.integers(1, 4)), int(rng.integers(1, 6))
    d, f = size(rng, 16), size(rng, 16)
    activation = pick(rng, ACTIVATIONS)
    wide = 2 * f if activation in GATED else f
    dtype, transpose_w = pick(rng, ["float32", "float32", "bfloat16"]), bool(rng.integers(2))
    biases = [name for name in ("up_bias", "down_bias") if rng.integers(2)]
    offset, max_rows = pick(rng, [None, 1, -2]), pick(rng, [None, None, tokens * k, 4])
    lead = (tokens,) if rng.integers(2) else (1, tokens)
    shapes = {"up_bias": (experts, wide), "down_bias": (experts, d)}
    cast = fixed_dtype(rng)

    def run(p, m):
        x, up, down, weight, *rest = p
        if transpose_w:
            up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
        return jgg.moe_mlp(
            x, up, down, m[0], weight, activation=activation, expert_offset=offset,
            transpose_w=transpose_w, max_rows=max_rows, **dict(zip(biases, rest, strict=True)),
        )  # fmt: skip

    def want(p, m):
        x, up, down, weight, *rest = p
        index = np.asarray(m[0]).reshape(tokens, k)
        given = dict(zip(biases, rest, strict=True))
        y = moe_oracle.moe_mlp(
            f64(x).reshape(tokens, d), up, down, index, f64(weight).reshape(tokens, k),
            activation=activation, offset=offset or 0, **given,
        )  # fmt: skip
        if max_rows is not None and routed(index, experts, offset or 0, max_rows)[3]:
            y = np.full_like(y, np.nan)
        return y.reshape(*lead, d)

    def draw(alone):
        p = floats_of(
            rng,
            [(*lead, d), (experts, d, wide), (experts, f, d), (*lead, k),
             *(shapes[b] for b in biases)],
            [dtype, dtype, dtype, "float32", *[dtype] * len(biases)],
            [1, d**-0.5, f**-0.5, 1, *[1] * len(biases)],
        )  # fmt: skip
        m = [some_index(rng, tokens, k, experts, cast).reshape(*lead, k)]
        return p, m

    name = f"moe_mlp {dtype} {activation} {biases} {offset} {max_rows} {transpose_w}"
    return Call(name, run, want, draw, max(d, f) * k, dtype,
                tolerance=6.0, smooth=activation not in KINKED)  # fmt: skip


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
    return Call(name, run, want, draw, k * t, dtype, tolerance=2.0, transforms="reverse")


# ---- fp8 ----------------------------------------------------------------------------------------


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
    recipe = jgg.FP8Recipe(forward=forward, gradient_format=pick(rng, ["e4m3", "e5m2"]))
    cast = fixed_dtype(rng)

    def run(p, m):
        return jgg.fp8_grouped_linear(m[0], m[1], m[2], bias=p[0] if bias else None, recipe=recipe)

    def want(p, m):
        x, w, sizes = m
        if forward == "fp8":
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


CALLS = {
    f.__name__: f
    for f in (
        grouped_mm, segmented_mm, gather_mm, ragged_dot, grouped_qmm, gather_qmm, quantized_matmul,
        quantize, dequantize, nvfp4_quantize, nvfp4_grouped_mm, nvfp4_grouped_wgrad,
        nvfp4_grouped_linear, fp8_quantize, fp8_grouped_mm, fp8_grouped_wgrad, fp8_grouped_linear,
        route, dispatch_and_combine, moe_mlp,
    )
}  # fmt: skip
