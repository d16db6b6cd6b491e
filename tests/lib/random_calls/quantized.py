"""Random calls of operations of ``Quantized`` weights, prepacked ones among them."""

import math

import jax.numpy as jnp
import numpy as np
import oracle
from oracle import f64

import jax_groupgemm as jgg

from .call import (
    FLOATS,
    GATED,
    KINKED,
    Call,
    floats_of,
    group_data,
    index_data,
    pick,
    poison_rows,
    size,
)
from .grouped import epilogue, option_letters, options_of

AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (16, 32, 64, 128)]
FORMATS = AFFINE + 4 * [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


def whole_words(bits: int, group: int) -> int:
    """Codes in whole groups and words."""
    return max(group, 32) if bits % 2 else group


class Weight:
    """A quantized weight as arrays: leaves that are differentiated, and data.

    Attributes:
      packed: "" for a weight as it is stored, "before" for one that was prepacked before it is an
        operand, "within" for one that the program packs.
    """

    def __init__(self, rng, batch, column_scale=False):
        self.packed = pick(rng, [*[""] * 4, "before", "within"])
        self.mode, self.bits, self.group = pick(rng, FORMATS)
        self.transpose_w = bool(rng.integers(3))
        unit = whole_words(self.bits, self.group)
        self.inner = unit * int(rng.integers(1, 1 + max(1, 96 // unit)))
        self.outer, self.dtype = size(rng, 16), pick(rng, FLOATS)
        if self.packed:
            self.inner, self.outer = max(self.group, 64), 64 * int(rng.integers(1, 3))
            self.dtype = "bfloat16"
        self.batch, self.shape = len(batch), (*batch, self.outer, self.inner)
        self.scale_shape = None
        if self.mode == "nvfp4" and rng.integers(3):
            axes = int(rng.integers(len(batch) + 1 + (column_scale and self.transpose_w)))
            self.scale_shape = self.shape[:axes]
        self.rng, self.drawn, self.linear = rng, [], {}

    @property
    def affine_leaves(self) -> bool:
        """Whether scales and biases are differentiated, which a packed weight's are not."""
        return self.mode == "affine" and not self.packed

    @property
    def count(self) -> int:
        """How many leaves are differentiated."""
        return 2 if self.affine_leaves else int(self.scale_shape is not None)

    @property
    def data(self) -> int:
        """How many are data."""
        if self.mode == "affine" and self.packed != "before":
            return 3 if self.packed else 1
        return 2

    @property
    def k(self) -> int:
        return self.inner if self.transpose_w else self.outer

    @property
    def n(self) -> int:
        return self.outer if self.transpose_w else self.inner

    def letters(self, batch: str, n: str = "N") -> tuple[list[str], list[str]]:
        """Of leaves and data. Words and scales have their own units of the inner axis."""
        word = batch + (f"{n}K" if self.transpose_w else f"K{n}")
        return [word] * self.count, [word] * self.data

    def __str__(self) -> str:
        packed = f" packed {self.packed}" if self.packed else ""
        return f"{self.mode} {self.bits} {self.group} {self.shape} {self.transpose_w}{packed}"

    @property
    def options(self) -> dict:
        """Of a ``Call``: arrays of one packed weight belong together, and tiles are not cut."""
        if not self.packed:
            return {}
        outer, inner = self.outer // 64, self.inner // max(64, self.group)
        letters = ("N", "K") if self.transpose_w else ("K", "N")
        return {"tied": True, "units": dict(zip(letters, (outer, inner), strict=True))}

    def draw(self):
        """Leaves, and the codes (with their scales)."""
        q = oracle.random_quantized(self.rng, self.shape, self.mode, self.bits, self.group,
                                    self.dtype)  # fmt: skip
        stored = [np.asarray(a) for a in (q.weight, q.scales, q.biases) if a is not None]
        if self.affine_leaves:
            self.drawn.append(tuple(stored[1:]))
            return stored[1:], stored[:1]
        leaves = []
        if self.scale_shape is not None:
            leaves = [np.asarray(self.rng.uniform(0.5, 2, self.scale_shape), np.float32)]
        if self.packed == "before":
            packed = self.prepacked(q)
            arrays = [np.asarray(packed.weight), np.asarray(packed.scales)]
            self.linear[arrays[0].tobytes() + arrays[1].tobytes()] = stored
            return leaves, arrays
        return leaves, stored

    def make(self, leaves, data) -> jgg.Quantized:
        of = {"mode": self.mode, "bits": self.bits, "group_size": self.group}
        if self.affine_leaves:
            return jgg.Quantized(data[0], leaves[0], leaves[1], **of)
        if self.packed == "before":
            return jgg.Quantized(data[0], data[1], None, *leaves, layout="sm90", **of)
        q = jgg.Quantized(data[0], data[1], *(data[2:] or [None]), *leaves, **of)
        return self.prepacked(q) if self.packed else q

    def prepacked(self, q) -> jgg.Quantized:
        floats = self.mode == "affine" and self.group == 16  # which are packed on request only
        return jgg.prepack(q, scales_dtype="float32" if floats else None, strict=True)

    def stored(self, scales, data) -> jgg.Quantized:
        """The weight in layout "linear", without a global scale."""
        if self.packed == "before":
            data = self.linear[np.asarray(data[0]).tobytes() + np.asarray(data[1]).tobytes()]
        of = {"mode": self.mode, "bits": self.bits, "group_size": self.group}
        return jgg.Quantized(*data, *scales, **of)

    def values(self, leaves, data, dtype) -> np.ndarray:
        """(..., K, N) in float64, of leaves near some that were drawn: what they add to those is
        not rounded, as roundings have derivative 1."""
        if self.affine_leaves:
            rounded = [
                min((of[i] for of in self.drawn), key=lambda b, a=a: abs(f64(a) - f64(b)).sum())
                for i, a in enumerate(leaves)
            ]
            q = self.stored(rounded, data)
            w = oracle.dequantize(q, dtype)
            codes = oracle.codes(q)
            ds, db = (f64(a) - f64(b) for a, b in zip(leaves, rounded, strict=True))
            w = w + codes * np.repeat(ds, self.group, -1) + np.repeat(db, self.group, -1)
        else:
            w = oracle.dequantize(self.stored([], data), dtype)
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

    def parts(p):
        return p[0], p[1 : 1 + w.count], dict(zip(names, p[1 + w.count :], strict=True))

    def run(p, m):
        x, leaves, options = parts(p)
        codes, meta = m[: w.data], m[w.data :]
        return jgg.grouped_qmm(
            x, w.make(leaves, codes), meta[0], group_offset=meta[1] if has_offset else None,
            transpose_w=w.transpose_w, activation=activation, preferred_element_type=out, **options,
        )  # fmt: skip

    def ranges_of(meta):
        return oracle.local_bounds(meta[0], t, g, meta[1] if has_offset else None)

    def want(p, m):
        x, leaves, options = parts(p)
        codes, meta = m[: w.data], m[w.data :]
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

    leaves, codes = w.letters("G", "." if activation in GATED else "N")
    return Call(
        f"grouped_qmm {w} {dtype} {out} {names} {activation}", run, want, draw, w.k, out or dtype,
        tolerance=4.0, smooth=activation not in KINKED,
        letters=["TK", *leaves, *option_letters(names, activation), *codes], **w.options,
    )  # fmt: skip


def gather_qmm(rng) -> Call:
    lead = pick(rng, [(3,), (1,), (2, 2), (), (5,), (8,)])
    batch = pick(rng, [(3,), (1,), (2, 2), (), (5,), (8,)])
    w, m_ = Weight(rng, batch), size(rng, 8)
    dtype, out = pick(rng, FLOATS), pick(rng, [None, None, *FLOATS])
    data, both, promised = index_data(rng, math.prod(lead), math.prod(batch), lead, batch)

    def run(p, m):
        lhs, rhs = both(m[w.data :])
        return jgg.gather_qmm(
            p[0], w.make(p[1:], m[: w.data]), lhs, rhs, transpose_w=w.transpose_w,
            sorted_indices=promised, preferred_element_type=out,
        )  # fmt: skip

    def want(p, m):
        return oracle.gather_mm(p[0], w.values(p[1:], m[: w.data], dtype), *both(m[w.data :]))

    def draw(alone):
        leaves, codes = w.draw()
        (x,) = floats_of(rng, [(*lead, m_, w.k)], [dtype], [w.k**-0.5])
        return [x, *leaves], [*codes, *data()]

    leaves, codes = w.letters("CD"[: len(batch)])
    return Call(
        f"gather_qmm {w} {dtype} {out} {lead} {batch}", run, want, draw, w.k * 14, out or dtype,
        tolerance=3.0, letters=["AB"[: len(lead)] + "MK", *leaves, *codes], **w.options,
    )  # fmt: skip


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

    leaves, codes = w.letters("." * len(batch))
    rows = "." * max(len(lead) - 1, 0) + "T" * bool(lead)
    return Call(
        f"quantized_matmul {w} {dtype} {out} {lead} {batch}", run, want, draw, w.k * 16,
        out or dtype, tolerance=3.0, letters=[f"{rows}K", *leaves, *codes], **w.options,
    )  # fmt: skip


def dequantize(rng) -> Call:
    batch = pick(rng, [(), (2,), (2, 3)])
    w = Weight(rng, batch)
    w.transpose_w = False
    to = pick(rng, FLOATS)

    def run(p, m):
        return jgg.dequantize(w.make(p, m), to)

    def want(p, m):
        return w.values(p, m, "float32")

    leaves, codes = w.letters("AB"[: len(batch)])
    return Call(
        f"dequantize {w} {to} {batch}", run, want, lambda alone: w.draw(), 1, to,
        letters=[*leaves, *codes], **w.options,
    )  # fmt: skip


def quantize(rng) -> Call:
    """Compared by what is promised: every value is the nearest that its scale has."""
    mode, bits, group = pick(rng, FORMATS)
    lead = pick(rng, [(3,), (2, 5), ()])
    k = whole_words(bits, group) * int(rng.integers(1, 4))
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
        factor = f64(m[1]) if scale else 1.0
        w, back = f64(m[0]), oracle.dequantize(q) * factor
        if mode == "nvfp4":  # the largest number that it has
            w = np.clip(w, -6 * 448 * factor, 6 * 448 * factor)
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
        smallest = 6 * 2.0**-10 * factor if mode == "nvfp4" else 1e-30  # half a step of scales
        assert (error <= half * amax + smallest).all(), (error / amax).max()
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

    letters = ["AB"[: len(lead or (1,) * (contract == -2))] + "K", ""]
    return Call(
        f"quantize {mode} {bits} {group} {dtype} {contract}", run, check, draw,
        transforms="checked", letters=letters[: 1 + scale], units={"K": k // group},
    )  # fmt: skip
