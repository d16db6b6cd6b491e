"""``nvfp4_quantize`` in numpy, whose float32 operations are rounded to nearest even one by one."""

import ml_dtypes
import numpy as np
from oracle import bounds, pad_groups

F32 = np.float32
LARGEST = np.finfo(F32).max
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def flush(v):
    return np.where(abs(v) < F32(2**-126), F32(0), v).astype(F32)


def rotate(blocks):
    """The Hadamard transform of blocks ``(..., 16)``, one butterfly at a time."""
    y = flush(blocks) * np.array(SIGNS, F32)
    for stride in (1, 2, 4, 8):
        new = np.empty_like(y)
        for i in range(16):
            a, b = y[..., i & ~stride], y[..., i | stride]
            new[..., i] = flush(a - b if i & stride else a + b)
        y = new
    zero = np.where(y < 0, F32(-0.0), F32(0))
    return np.where(abs(y) < F32(2**-124), zero, y * F32(0.25))


def philox(counter, key):
    """Python integers of any size, cut to words."""
    c, k = list(counter), list(key)
    for _ in range(7):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k[0], q & 0xFFFFFFFF, p >> 32 ^ c[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def sixteen_bits(block: int, key):
    low, high = block & 0xFFFFFFFF, block >> 32
    words = [*philox((low, high, 0, 0), key), *philox((low, high, 1, 0), key)]
    return [words[i // 2] >> 16 * (i % 2) & 0xFFFF for i in range(16)]


def stochastic(t, key):
    """e2m1 values of ``|t|``, exactly: float64 holds ``t + u * step``."""
    t = np.minimum(t, F32(6)).astype(np.float64)
    bits = [sixteen_bits(b, key) for b in range(t[..., 0].size)]
    u = (np.array(bits).reshape(t.shape) + 0.5) / 65536
    step = np.where(t < 2, 0.5, np.where(t < 4, 1.0, 2.0))
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return grid[np.searchsorted(grid, t + u * step, side="right") - 1]


def quantize(x, *, axis=-1, sizes=None, scale_2d=False, key=None, hadamard=False):
    """Codes, scale bytes and positions as stored, and global scales."""
    x, positions, rank = np.asarray(x).astype(F32), None, x.ndim
    if sizes is not None and axis == -2:
        x, positions = pad_groups(x, sizes, 64)
    elif sizes is not None:
        x = np.where(np.arange(len(x))[:, None] < bounds(sizes, len(x))[-1][1], x, F32(0))
    if axis == -2:
        x = x.swapaxes(-1, -2)
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    with np.errstate(all="ignore"):
        if hadamard:
            blocks = rotate(blocks)
        finite = np.where(np.isfinite(blocks), abs(blocks), F32(0))
        lead = x.shape[:-2]
        amax = finite.reshape(*lead, -1).max(-1) if x.size else np.zeros(lead, F32)
        spread = amax.reshape(*lead, *[1] * (blocks.ndim - 1 - len(lead)))
        encode = np.minimum(F32(2688) / spread, LARGEST)
        encode = np.where(spread == 0, F32(1), encode)
        block_amax = abs(blocks).max(-1)
        if scale_2d:
            block_amax = block_amax.copy()
            for r in range(0, block_amax.shape[-2], 16):
                tile = block_amax[..., r : r + 16, :]
                tile[...] = tile.max(-2, keepdims=True)
        scale = np.minimum(block_amax * (encode * (F32(1) / F32(6))), F32(448))
        scale = scale.astype(ml_dtypes.float8_e4m3fn)
        inverse = np.minimum(F32(1) / (scale.astype(F32) * (F32(1) / encode)), LARGEST)
        t = blocks * inverse[..., None]
        value = np.minimum(abs(t), F32(6)) if key is None else stochastic(abs(t), key)
        code = value.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) | np.signbit(blocks) << 3
    dead = ~np.isfinite(block_amax)
    code = np.where(dead[..., None], 0, code).reshape(x.shape)
    scales = np.where(dead, 0x7F, scale.view(np.uint8)).astype(np.uint8)
    assert encode.dtype == inverse.dtype == t.dtype == F32
    assert rank == x.ndim
    return code, scales, positions, (amax / F32(2688)).astype(F32)
