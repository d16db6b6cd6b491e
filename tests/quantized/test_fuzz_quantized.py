"""Random modes, shapes, groupings and options of products with quantized weights against float64,
through whatever implementation ``None`` picks. ``pytest tests/quantized/test_fuzz_quantized.py
--fuzz N`` runs N cases."""

import dataclasses
import math

import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from fuzz import PATTERNS, check, dimension, perhaps
from qmm_problems import HOPPER

import jax_groupgemm as jgg

# Mode, bits and group size.
AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (16, 32, 64, 128)]
FORMATS = AFFINE + 4 * [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


def pytest_generate_tests(metafunc):
    fuzz.parametrize(metafunc, default=50)


def some_weight(rng, batch, even=False):
    """A weight; the same as it is stored, perhaps prepacked; and ``transpose_w``. ``even`` is what
    N has to be for a gated activation."""
    packed = rng.integers(3) == 0
    mode, bits, group = FORMATS[rng.integers(len(FORMATS))]
    tiles = packed or rng.integers(4) == 0
    unit = max(group, 64 if tiles else 32 if bits % 2 else 0)  # whole words
    quantized = unit * int(rng.integers(1, 2 + 512 // unit))
    if tiles:
        other = 64 * int(rng.integers(1, 6))
    else:
        other = 1 if rng.integers(4) == 0 else dimension(rng)
        other += other % 2 if even else 0
    scale = None
    if mode == "nvfp4" and rng.integers(3):  # a scalar, or one per index of leading axes
        axes = rng.integers(len(batch) + 1)
        scale = jnp.asarray(rng.uniform(0.5, 2, batch[:axes]), jnp.float32)
    dtype = "bfloat16" if packed else str(rng.choice(["float32", "bfloat16", "float16"]))
    w = oracle.random_quantized(rng, (*batch, other, quantized), mode, bits, group, dtype, scale)
    if mode == "nvfp4" and rng.integers(2):  # zeros, subnormals, and signs that do not count
        scales = rng.integers(0, 0x38, w.scales.shape) | rng.choice([0, 0x80], w.scales.shape)
        w = dataclasses.replace(w, scales=jnp.asarray(scales, jnp.uint8))
    if mode == "affine" and HOPPER:
        w = of_short_values(rng, w)
    stored = jgg.prepack(w) if packed else w
    assert stored.layout == ("sm90" if packed else "linear")
    return w, stored, bool(rng.integers(4 if packed else 2))


def of_short_values(rng, w):
    """``w`` with scales that are powers of two, and biases that are multiples of them: every dtype
    holds its values. Hopper's kernels may round them to x's dtype, or multiply sums by scales."""
    scales = np.asarray(w.scales).astype(np.float32)
    powers = np.sign(scales) * np.exp2(np.round(np.log2(np.clip(abs(scales), 2.0**-12, 1))))
    zeros = rng.integers(0, 2**w.bits, scales.shape)
    leaves = (jnp.asarray(a.astype(np.float32), w.scales.dtype) for a in (powers, -powers * zeros))
    return dataclasses.replace(w, **dict(zip(("scales", "biases"), leaves, strict=True)))


def plain(w, transpose_w, dtype) -> np.ndarray:
    """The (..., K, N) that activations of a dtype are multiplied with."""
    values = oracle.scaled(w, dtype)
    return values.swapaxes(-1, -2) if transpose_w else values


def some_rows(rng, lead, values, dtype):
    """(*lead, K), of a size that gives products of order one with (..., K, N)."""
    k = values.shape[-2]
    usual = np.linalg.norm(values) * math.sqrt(k / values.size)
    return (oracle.random(rng, (*lead, k)) / max(usual, 1e-3)).astype(dtype)


def check_rows(got, want, rows, k, tf32):
    """As ``check``; where ``rows``, a mask of the leading axes, is False there are exact zeros."""
    check(got, want, k, tf32, operands=k**-0.5)
    assert not np.asarray(got)[~rows].any()


def grouped_case(rng, dtype, out_dtype, precision, tf32):
    t, g, fused = dimension(rng), int(rng.integers(1, 9)), bool(rng.integers(2))
    activation = rng.choice(["", "silu", "relu", "swiglu"]) if fused else ""
    w, stored, transpose_w = some_weight(rng, (g,), even=activation == "swiglu")
    total, offset = fuzz.some_offset(rng, g)
    values = plain(w, transpose_w, dtype)
    k, n = values.shape[1:]
    x, ct = some_rows(rng, (t,), values, dtype), None
    back = plain(w, not transpose_w, out_dtype or dtype)  # the cotangent meets w in its own dtype
    if not fused and rng.integers(2):
        ct = some_rows(rng, (t,), back, out_dtype or dtype)
    bias = perhaps(rng, (g, n), dtype) if fused else None
    scale = perhaps(rng, (t,), dtype) if fused else None

    @jax.jit
    def run(x, ct, w, sizes, offset, bias, scale):
        f = lambda x: jgg.grouped_qmm(
            x, w, sizes, group_offset=offset, transpose_w=transpose_w, bias=bias,
            activation=activation or None, row_scale=scale, preferred_element_type=out_dtype,
        )  # fmt: skip
        if ct is None:
            return f(x), None
        out, vjp = jax.vjp(f, x)
        return out, *vjp(ct)

    for _ in range(PATTERNS):
        sizes = fuzz.some_sizes(rng, total, t)
        ranges = oracle.local_bounds(sizes, t, g, offset)
        mine = np.zeros(t, bool)
        for start, end in ranges:
            mine[start:end] = True
        y = oracle.grouped_mm(x, values, sizes, offset=offset)
        want = fuzz.epilogue(y, ranges, bias, activation, scale)
        first = None if offset is None else jnp.int32(offset)
        # What other rows hold does not matter.
        rows = [None if a is None else jnp.where(mine[:, None], a, jnp.nan) for a in (x, ct)]
        with jax.default_matmul_precision(precision):
            out, dx = run(*rows, stored, sizes, first, bias, scale)
        check_rows(out, want, mine, k, tf32)
        if ct is not None:
            check_rows(dx, oracle.grouped_mm(ct, back, sizes, offset=offset), mine, n, tf32)


def gather_case(rng, dtype, out_dtype, precision, tf32):
    batch, lead = (tuple(int(v) for v in rng.integers(1, 5, rng.integers(1, 3))) for _ in range(2))
    w, stored, transpose_w = some_weight(rng, batch)
    m = int(rng.choice([1, 1, 2, 5, 33, 70]))
    values = plain(w, transpose_w, dtype)
    x = some_rows(rng, (*lead, m), values, dtype)
    missing, promised = rng.choice(["", "", "lhs", "rhs"]), bool(rng.integers(2))
    pairs = int(rng.integers(1, 40))
    lhs_shape, rhs_shape = {
        "": ((pairs,), (int(rng.integers(1, 4)), pairs)),
        "lhs": (lead, lead),
        "rhs": (batch, batch),
    }[missing]

    @jax.jit
    def run(x, w, lhs, rhs):
        return jgg.gather_qmm(
            x, w, lhs, rhs, transpose_w=transpose_w, sorted_indices=promised,
            preferred_element_type=out_dtype,
        )  # fmt: skip

    for _ in range(PATTERNS):
        lhs = rng.integers(-1, math.prod(lead) + 1, lhs_shape).astype(np.int32)
        rhs = rng.integers(-1, math.prod(batch) + 1, rhs_shape).astype(np.int32)
        if promised:
            rhs = np.sort(rhs, axis=None).reshape(rhs_shape)
        lhs, rhs = (None if missing == name else i for name, i in (("lhs", lhs), ("rhs", rhs)))
        want = oracle.gather_mm(x, values, lhs, rhs)
        with jax.default_matmul_precision(precision):
            out = run(x, stored, lhs, rhs)
        exists = [
            np.bool_(True) if i is None else (i >= 0) & (i < math.prod(of))
            for i, of in ((lhs, lead), (rhs, batch))
        ]
        exists = np.broadcast_to(exists[0] & exists[1], want.shape[:-2])
        check_rows(out, want, exists, values.shape[-2], tf32)


def matmul_case(rng, dtype, out_dtype, precision, tf32):
    batch = tuple(int(v) for v in rng.integers(1, 5, max(0, rng.integers(-2, 3))))
    w, stored, transpose_w = some_weight(rng, batch)
    lead = (dimension(rng),)
    if batch:  # which broadcasts
        lead = (*(1 if rng.integers(3) == 0 else size for size in batch), *lead)
    kind = rng.integers(4)
    lead = () if kind == 0 else (2, *lead) if kind == 1 else lead
    values = plain(w, transpose_w, dtype)
    x = some_rows(rng, lead, values, dtype)
    run = jax.jit(
        lambda x, w: jgg.quantized_matmul(
            x, w, transpose_w=transpose_w, preferred_element_type=out_dtype
        )
    )
    with jax.default_matmul_precision(precision):
        out = run(x, stored)
    k = values.shape[-2]
    check(out, np.matmul(oracle.f64(x), values), k, tf32, operands=k**-0.5)


CASES = (grouped_case, grouped_case, gather_case, matmul_case)


def test_random_cases(seed, where):
    fuzz.run(CASES, seed, where)
