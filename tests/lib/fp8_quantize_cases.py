"""``fp8_quantize`` in tests: what blocks may hold, and what a call says."""

import jax
import jax.numpy as jnp
import numpy as np

KEY = jax.random.key(11)

#: Attributes of a call that makes codes along both axes: of square blocks, and of blocks of 128.
SQUARES_BOTH, LINES_BOTH = (
    f"{{along_columns = true, along_rows = true, power_of_two = false, square = {square}}}"
    for square in ("true", "false")
)


def edges(rng, dtype, shape) -> np.ndarray:
    """Normal numbers, most rows of a scale of their own; rows and columns of zeros, ties, and of
    numbers that are tiny, huge, subnormal or not finite, one column and row of each kind."""
    *_, rows, columns = shape
    x = rng.standard_normal(shape)
    far = 10 if dtype == "float16" else 100
    x *= 2.0 ** rng.integers(-far, far, (rows, 1)) if dtype != "float16" else 1
    tiny, huge = (6e-8, 3e4) if dtype == "float16" else (1e-42, 1e38)
    kinds = [
        lambda v: 0 * v,
        lambda v: tiny * np.sign(v) * rng.integers(0, 9, v.shape),
        lambda v: huge * np.clip(v, -1, 1),
        lambda v: rng.integers(-448, 449, v.shape),  # ties
        lambda v: rng.integers(-448, 449, v.shape) / 2.0**12,
        lambda v: v * 2.0 ** rng.integers(-30, 1, v.shape),
        lambda v: v * 2.0**-90 if dtype != "float16" else v,
    ]
    for i, kind in enumerate(kinds):
        x[..., i % rows, :] = kind(x[..., i % rows, :])
    x[..., rows // 2 :, : columns // 2] *= 0.5
    for i, kind in enumerate(kinds):
        x[..., rows // 2 :, i % columns] = kind(x[..., rows // 2 :, i % columns])
    x[..., -1, -1], x[..., -2, columns // 2], x[..., 7, 0] = np.nan, np.inf, -np.inf
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(jnp.dtype(dtype))


def sums(d, activation) -> np.ndarray:
    """A row's sum of d * a, as kernels add: 16 lanes of eight columns, then pairs of lanes."""
    total = np.zeros((len(d), d.shape[1] // 8), np.float32)
    for i in range(8):
        total += d[:, i::8].astype(np.float32) * activation[:, i::8].astype(np.float32)
    for _ in range(4):
        total = total[:, ::2] + total[:, 1::2]
    return total.T


def any_codes(rng, element, shape, block):
    """Codes of all kinds, and scales of all magnitudes, zeros and such that are not finite."""
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[..., : shape[-1] // 2] &= 0xBF  # blocks without NaN
    blocks = [-(-n // size) for n, size in zip(shape[-2:], block, strict=True)]
    scales = rng.standard_normal((*shape[:-2], *blocks)).astype(np.float32)
    scales *= np.exp2(rng.integers(-20, 20, scales.shape)).astype(np.float32)
    flat = scales.reshape(-1)
    kinds = [0.0, -0.0, np.inf, np.nan, 1e-42, 2.0**-126, 3e38, 127.9, 128.0, 1e-36, 1.0]
    flat[: len(kinds)] = np.float32(kinds)[: flat.size]
    rng.shuffle(flat)
    return codes.view(element), scales
