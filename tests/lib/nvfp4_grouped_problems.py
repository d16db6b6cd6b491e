"""Products of two NVFP4 operands for tests: operands, small problems, and numpy's results."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jax_groupgemm as jgg
from jax_groupgemm._check import narrow
from jax_groupgemm._check.oracle import rows_of
from jax_groupgemm.tune import timing

T, G, N, K = 1024, 8, 24, 48
# Balanced, imbalanced, most in few, nothing, everything in one, odd ones, a tail, too many rows.
SIZES = {
    "balanced": [128] * 8,
    "imbalanced": [64 * (i % 3 + 1) for i in range(8)],
    "three": [256, 128, 384, 0, 0, 0, 0, 0],
    "nothing": [0] * 8,
    "one": [0, 0, 0, 1024, 0, 0, 0, 0],
    "odd": [1, 15, 17, 127, 0, 0, 63, 65],
    "too many": [900, -5, 100, 300, 7, 0, 2, 1],
}
# Splits that users name, as they are.
SPLITS = {
    "3 of 256": [256] * 3,
    "8 of 256": [256] * 8,
    "128 to 384": [128 * (i % 3 + 1) for i in range(8)],
    "uneven": [256, 128, 384],
    "nothing": [0] * 8,
    "one": [0, 0, 0, 0, 0, 2048, 0, 0],
    "odd": [1, 15, 17, 127],
}
ODD = [20, 0, 33, -1, 7]
ROWS = 70
FAR = [(-70, -66), (-100, -36), (-36, -100), (50, 50)]  # exponents of global scales
FEW = np.array([[9, 0, 8], [0, 20, 0]], np.int32)


def splits(one_shape: bool):
    """Each of SPLITS as sizes and a number of rows. In one shape they are one program: groups
    without rows and rows without groups follow."""
    for sizes in SPLITS.values():
        rows = sum(sizes) or 2048
        if one_shape:
            sizes, rows = [*sizes, *[0] * (8 - len(sizes))], 2048
        yield np.array(sizes, np.int32), rows


def profiled(f, *args, **options):
    """What f returns, and the names of the kernels that ran, in order."""
    f = jax.jit(f)
    jax.block_until_ready(f(*args, **options))
    with timing.kernels() as found:
        out = jax.block_until_ready(f(*args, **options))
    return out, [name for name, _ in found]


def random(rng, *shape, scale=None):
    return oracle.random_quantized(rng, shape, "nvfp4", scale=scale)


def large(q):
    """q with the largest scale in every block."""
    return dataclasses.replace(q, scales=jnp.full_like(q.scales, 0x7E))


def positive(rng, *shape):
    return jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32)


def extreme(rng, q, *, nan, faint):
    """q with signs on scales, which do not count; blocks of scale 0 whose codes are 6 and -6;
    subnormal scales in the line ``faint``; and a NaN scale at each index of ``nan``."""
    scales, codes = np.array(q.scales), np.array(q.weight)
    scales[faint] = rng.integers(1, 8, scales[faint].shape)
    dead = rng.random(scales.shape) < 0.05
    scales[dead] = 0
    codes.reshape(*scales.shape, 2)[dead] = 0xF7F7F7F7
    for index in nan:
        scales[index] = 0x7F
    scales[rng.random(scales.shape) < 0.3] |= 0x80
    return dataclasses.replace(q, scales=jnp.asarray(scales), weight=jnp.asarray(codes))


def along_t(rng, columns, sizes, rows=T, scale=None):
    """Random codes in layout "grouped": zeros are padded."""
    q = narrow.along_rows(rng, "nvfp4", columns, np.asarray(sizes), rows)
    return dataclasses.replace(jax.tree.map(jnp.asarray, q), global_scale=scale)


def mm_oracle(x, w, sizes, alpha=None, bias=None):
    wide = lambda v, *shape: np.broadcast_to(1.0 if v is None else oracle.f64(v), shape)
    rows = oracle.dequantize(x) * wide(x.global_scale, len(x.scales))[:, None]
    groups = len(w.scales)
    scale = wide(w.global_scale, groups) * wide(alpha, groups)
    out = oracle.grouped_mm(rows, oracle.dequantize(w) * scale[:, None, None], sizes,
                            transpose_w=True)  # fmt: skip
    for g, (first, last) in enumerate(oracle.bounds(sizes, len(rows))):
        out[first:last] += 0 if bias is None else oracle.f64(bias)[g]
    return out


def wgrad_oracle(x, dy, sizes):
    x, dy = map(rows_of, (x, dy))
    parts = [dy[first:last].T @ x[first:last] for first, last in oracle.bounds(sizes, len(x))]
    return np.stack(parts)


def wgrad_problem(rng):
    x = along_t(rng, 8, ODD, ROWS, positive(rng))
    dy = along_t(rng, 6, ODD, ROWS, positive(rng))
    return x, dy, oracle.random(rng, (5, 6, 8))


def mm_case(rng):
    x = [random(rng, 20, 32, scale=positive(rng)) for _ in FEW]
    w = [random(rng, 3, 16, 32, scale=positive(rng, 3)) for _ in FEW]
    alpha = [positive(rng, 3) for _ in FEW]
    f = lambda x, w, sizes, alpha: jgg.nvfp4_grouped_mm(
        x, w, sizes, alpha=alpha, preferred_element_type="float32"
    )
    return f, (x, w, list(FEW), alpha)


def wgrad_case(rng):
    """Operands of all examples are padded for the sizes of theirs."""
    x, dy = ([along_t(rng, n, s, 20, positive(rng)) for s in FEW] for n in (8, 16))
    alpha = [positive(rng, 3) for _ in FEW]
    f = lambda x, dy, sizes, alpha: jgg.nvfp4_grouped_wgrad(x, dy, sizes, alpha=alpha)
    return f, (x, dy, list(FEW), alpha)
