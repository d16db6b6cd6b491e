"""``nvfp4_quantize`` in tests: inputs, options, and the comparison with numpy."""

import jax
import ml_dtypes
import numpy as np
import nvfp4_oracle
import oracle

F32 = np.float32
SHAPE = (48, 64)
KEY = jax.random.key(7)
OPTIONS = {
    "scale_2d": {"scale_2d": True},
    "hadamard": {"hadamard": True},
    "stochastic": {"stochastic_rounding_key": KEY},
    "both": {"hadamard": True, "stochastic_rounding_key": KEY},
}
T, K, G = 768, 32, 6
SIZES = {
    "balanced": [128] * 6,
    "uneven": [256, 128, 384],
    "holes": [0, 300, 0, 0, 400, 68],
    "none": [0] * 6,
    "one": [0, 0, 768],
    "odd": [1, 15, 16, 17, 127, 64],
    "tail": [100, 0, 3, 65],
    "over": [500, 100, 300, 5],
    "negative": [-5, 40, -1, 700],
}


def cast(x, dtype):
    return np.asarray(x).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def tensors(rng, dtype):
    """Tensors of every kind, of SHAPE."""
    x = rng.standard_normal(SHAPE)
    small, large = {"float32": (1e-43, 1e38), "bfloat16": (1e-39, 1e38), "float16": (1e-7, 6e4)}[
        dtype
    ]
    rows = x * 10.0 ** rng.integers(-8, 4, (SHAPE[0], 1))
    rows[3], rows[4, 1::2], rows[5, 16:32] = 0, -0.0, 0
    outlier, ties = x.copy(), rng.integers(-12, 13, SHAPE) / 4
    outlier[17, 33], ties[0, 0], ties[1, 0] = 1e4, 2688, 1536
    bad = x.copy()
    bad[2, 3], bad[9, 40], bad[30, 63], bad[30, 1] = np.nan, np.inf, -np.inf, 1e4
    nothing = np.full(SHAPE, np.nan)
    yield from (cast(v, dtype) for v in (x, 0 * x, rows, outlier, ties, bad, nothing))
    yield cast(small * rng.integers(-9, 10, SHAPE), dtype)
    with np.errstate(over="ignore"):
        yield cast(np.clip(large * x, *np.array([-1, 1]) * large * 3.3), dtype)


def grouped_rows(rng, sizes):
    """(T, K), with a tail that must not matter, and sizes (G,)."""
    x = rng.standard_normal((T, K)).astype(F32)
    sizes = np.array([*sizes, *[0] * (G - len(sizes))], np.int32)
    end = oracle.bounds(sizes, T)[-1][1]
    x[end:], x[end + 1 :: 3] = np.nan, 1e30
    return x, sizes


def want_of(x, axis=-1, sizes=None, stochastic_rounding_key=None, **options):
    key = None
    if stochastic_rounding_key is not None:
        key = np.asarray(jax.random.bits(stochastic_rounding_key, (2,), "uint32")).tolist()
    return nvfp4_oracle.quantize(x, axis=axis, sizes=sizes, key=key, **options)


def same(q, want):
    codes, scales, positions, global_scale = want
    np.testing.assert_array_equal(np.asarray(q.global_scale).view(np.uint32),
                                  global_scale.view(np.uint32))  # fmt: skip
    np.testing.assert_array_equal(q.scales, scales)
    np.testing.assert_array_equal(oracle.codes(q), codes)
    assert q.mode == "nvfp4"
    if positions is None:
        assert q.positions is None
    else:
        np.testing.assert_array_equal(q.positions, positions)


def values(q):
    """What the leaves mean, float64, in stored order."""
    scales = np.repeat(oracle.E4M3[np.asarray(q.scales)], 16, -1)
    scale = np.asarray(q.global_scale).astype(np.float64)
    return oracle.E2M1[oracle.codes(q)] * scales * scale.reshape(*scale.shape, *[1] * 2)
