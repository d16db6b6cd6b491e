"""Hopper's sums of FP8 products, in numpy: about 14 bits, and what promotion to float32 saves.

An instruction adds 32 products to its accumulator. All 33 are aligned to the largest of them, and
bits behind the 14th of that one are dropped, toward zero; so are those of the sum. That is how
https://arxiv.org/abs/2412.19437 (DeepSeek-V3, section 3.5.2) describes it; how the accumulator
itself is rounded is not published.
"""

import numpy as np

BITS = 14
PRODUCTS = 32  # of one instruction
F32 = np.float32


def added(addends, bits: int = BITS) -> np.ndarray:
    """The sum along the last axis, and ``bits`` of it."""
    return truncated(truncated(addends, addends, bits).sum(-1, keepdims=True), None, bits)[..., 0]


def truncated(values, among, bits: int) -> np.ndarray:
    """Toward zero, to ``bits`` of the largest along the last axis."""
    largest = np.abs(values if among is None else among).max(-1, keepdims=True)
    unit = np.ldexp(1.0, np.frexp(largest)[1] - bits)
    return np.trunc(values / unit) * unit


def summed(a, b, bits: int = BITS) -> np.ndarray:
    """``(..., M, N)`` of codes ``(..., M, K)`` and ``(..., N, K)``: one chain of instructions. K is
    whole instructions."""
    k = a.shape[-1]
    assert k % PRODUCTS == 0
    out = np.zeros((*a.shape[:-1], b.shape[-2]))
    for first in range(0, k, PRODUCTS):
        part = slice(first, first + PRODUCTS)
        products = a[..., :, None, part] * b[..., None, :, part]
        out = added(np.concatenate([out[..., None], products], -1), bits)
    return out


def product(a, b, every: int | None, scales=1.0, bits: int = BITS) -> np.ndarray:
    """``a @ b.T`` of codes ``(M, K)`` and ``(N, K)`` in float32. A chain is ``every`` of k long, or
    all of it; each of them times its scales, ``(K/every, M, N)``, is added in float32."""
    every = a.shape[1] if every is None else every
    cut = lambda codes: codes.reshape(len(codes), -1, every).swapaxes(0, 1)
    parts = summed(cut(a), cut(b), bits).astype(F32) * np.asarray(scales, F32)
    out = np.zeros(parts.shape[1:], F32)
    for part in parts:
        out = out + part
    return out
