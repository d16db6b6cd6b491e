"""FP8 in numpy, block by block, from its definition."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from oracle import f64, pad_groups

import jax_groupgemm as jgg
from jax_groupgemm._check.oracle import spread

F32 = np.float32
DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3": F32(448), "e5m2": F32(57344)}
GROUPED = 128


def blocks_of(shape, block):
    """Slices of a matrix, and where their scale is."""
    if block is None:
        yield (slice(None), slice(None)), ()
        return
    (rows, columns), (a, b) = shape, block
    for i in range(-(-rows // a)):
        for j in range(-(-columns // b)):
            yield (slice(i * a, (i + 1) * a), slice(j * b, (j + 1) * b)), (i, j)


def scale_of(x, element="e4m3", scale_format="float32") -> np.float32:
    """That of one block."""
    amax = abs(x).max() if x.size else F32(0)
    if not np.isfinite(amax):
        return F32(np.nan)
    if amax == 0:
        return F32(1)
    scale = max(F32(amax) / LARGEST[element], F32(2.0**-126))
    if scale_format == "e8m0":
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(F32(1), exponent - (mantissa == 0.5))
    return F32(scale)


def quantize(x, block, element="e4m3", scale_format="float32"):
    """Codes and scales of ``(..., R, C)``."""
    x = np.asarray(x).astype(F32)
    if x.ndim > 2:
        both = [quantize(m, block, element, scale_format) for m in x]
        return tuple(map(np.stack, zip(*both, strict=True)))
    shape = () if block is None else tuple(
        -(-n // size) for n, size in zip(x.shape, block, strict=True)
    )  # fmt: skip
    codes, scales = np.zeros(x.shape, DTYPES[element]), np.zeros(shape, F32)
    for part, at in blocks_of(x.shape, block):
        scale = scales[at] = scale_of(x[part], element, scale_format)
        if np.isfinite(scale):
            q = np.clip(x[part] / scale, -LARGEST[element], LARGEST[element])
            codes[part] = q.astype(DTYPES[element])
    return codes, scales


def stored(x, block=(128, 128)) -> jgg.Quantized:
    """The codes and scales of jgg.quantize, for tests of other operations: nothing is compiled."""
    codes, scales = map(jnp.asarray, quantize(x, block))
    return jgg.Quantized(codes, scales, mode="fp8", bits=8, group_size=None, block=block)  # pyright: ignore


def padded(x, sizes):
    """Rows of ``(T, C)``, each group padded to whole blocks, as many as any sizes need; and where
    each row is."""
    return pad_groups(x, sizes, GROUPED)


def dequantize(codes, scales, block) -> np.ndarray:
    """float64."""
    return f64(codes) * spread(f64(scales), codes.shape, block)


def values(q) -> np.ndarray:
    """What a ``Quantized`` stores, in float64."""
    return dequantize(np.asarray(q.weight), np.asarray(q.scales), q.block)
