"""Tensors of GGUF files, which llama.cpp reads: codes in blocks as ``Quantized`` weights.

Each type's value is ``q * scale + bias`` or a small float times a scale. Scales and biases are
products of a float16 and an integer, which float32 holds exactly, and so are products of scales and
codes: only the sum rounds, once, as llama.cpp's own float32 arithmetic does.

https://github.com/ggml-org/ggml (ggml-common.h: the blocks; ggml-quants.c: ``dequantize_row_*``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._quantized.array import Quantized
from .bits import F32, pack
from .gguf_types import BY_NAME, FLOATS, Blocks
from .layer import Format, Kind, Layer, Read
from .messages import brief
from .nvfp4 import multiplier

F16 = np.float16
CHUNK = 2**21  # elements that are decoded at a time
OF_FLOATS = ("float32", "float16", "bfloat16")

# Decoders. Of blocks (B, bytes): uint8 codes (B, elements), and floats (B, groups).


def _float16(blocks, at: int):
    """float32 ``(B, 1)`` of a float16 in each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(F32)


def _shifted(x, shifts: tuple[int, ...], mask: int):
    """``(B, n)`` as ``(B, len(shifts), n)``: parts of each byte."""
    return (x[:, None] >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)


def _nibbles(x):
    """Low nibbles of all bytes, then high ones."""
    return _shifted(x, (0, 4), 15).reshape(len(x), -1)


def _by_parts(x, size: int, shifts: tuple[int, ...], mask: int):
    """The parts of each ``size`` bytes at the first shift, then those at the next."""
    parts = x.reshape(-1, size)
    return _shifted(parts, shifts, mask).reshape(len(x), -1)


def _fifth(blocks, at: int):
    """The fifth bits of 32 codes, in place."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


def _q4_0(b):
    d = _float16(b, 0)
    return _nibbles(b[:, 2:]), d, d * F32(-8)


def _q4_1(b):
    return _nibbles(b[:, 4:]), _float16(b, 0), _float16(b, 2)


def _q5_0(b):
    d = _float16(b, 0)
    return _nibbles(b[:, 6:]) | _fifth(b, 2), d, d * F32(-16)


def _q5_1(b):
    return _nibbles(b[:, 8:]) | _fifth(b, 4), _float16(b, 0), _float16(b, 2)


def _q8_0(b):
    d = _float16(b, 0)
    return b[:, 2:] ^ np.uint8(0x80), d, d * F32(-128)


def _q2_k(b):
    scales, d, dmin = b[:, :16], _float16(b, 80), _float16(b, 82)
    codes = _by_parts(b[:, 16:80], 32, (0, 2, 4, 6), 3)
    return codes, d * (scales & np.uint8(15)).astype(F32), -(dmin * (scales >> 4).astype(F32))


def _q3_k(b):
    low, high = _nibbles(b[:, 96:104]), _by_parts(b[:, 104:108], 4, (0, 2, 4, 6), 3)
    scales = (low | high << np.uint8(4)).astype(F32) - F32(32)
    third = _shifted(b[:, :32], tuple(range(8)), 1).reshape(len(b), -1)
    codes = _by_parts(b[:, 32:96], 32, (0, 2, 4, 6), 3) | third << np.uint8(2)
    scales = _float16(b, 108) * scales
    return codes, scales, scales * F32(-4)


def _scales_and_minima(b):
    """Those of Q4_K and Q5_K. Each has six bits; the last four have their upper two in the first
    eight bytes."""
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    low, two = np.uint8(0x3F), np.uint8(0x30)
    sc = np.concatenate([first & low, (third & np.uint8(15)) | (first >> 2 & two)], axis=1)
    m = np.concatenate([second & low, (third >> 4) | (second >> 2 & two)], axis=1)
    return _float16(b, 0) * sc.astype(F32), -(_float16(b, 2) * m.astype(F32))


def _q4_k(b):
    return _by_parts(b[:, 16:], 32, (0, 4), 15), *_scales_and_minima(b)


def _q5_k(b):
    fifth = _shifted(b[:, 16:48], tuple(range(8)), 1).reshape(len(b), -1)
    codes = _by_parts(b[:, 48:], 32, (0, 4), 15) | fifth << np.uint8(4)
    return codes, *_scales_and_minima(b)


def _q6_k(b):
    low = _by_parts(b[:, :128], 64, (0, 4), 15)
    high = _by_parts(b[:, 128:192], 32, (0, 2, 4, 6), 3)
    scales = _float16(b, 208) * b[:, 192:208].view(np.int8).astype(F32)
    return low | high << np.uint8(4), scales, scales * F32(-32)


def _of_e2m1(codes):
    """A code of -0, which is 0 in tables of ggml, as 0."""
    return np.where(codes == 8, np.uint8(0), codes)


def _mxfp4(b):
    return _of_e2m1(_nibbles(b[:, 1:])), b[:, :1]


def _nvfp4(b):
    codes = _by_parts(b[:, 4:], 8, (0, 4), 15)
    scales = b[:, :4]  # E4M3; the NaN of it is ggml's zero
    return _of_e2m1(codes), np.where(scales == 0x7F, np.uint8(0), scales)


class _Decoder(NamedTuple):
    """How blocks of a type become leaves of a ``Quantized``."""

    decode: Callable
    bits: int
    group_size: int
    mode: str = "affine"
    scales: type = F32  # the narrowest dtype that holds them


DECODERS = {
    "Q4_0": _Decoder(_q4_0, 4, 32, scales=F16),
    "Q4_1": _Decoder(_q4_1, 4, 32, scales=F16),
    "Q5_0": _Decoder(_q5_0, 5, 32, scales=F16),
    "Q5_1": _Decoder(_q5_1, 5, 32, scales=F16),
    "Q8_0": _Decoder(_q8_0, 8, 32, scales=F16),
    "Q2_K": _Decoder(_q2_k, 2, 16),
    "Q3_K": _Decoder(_q3_k, 3, 16),
    "Q4_K": _Decoder(_q4_k, 4, 32),
    "Q5_K": _Decoder(_q5_k, 5, 32),
    "Q6_K": _Decoder(_q6_k, 6, 16),
    "MXFP4": _Decoder(_mxfp4, 4, 32, "mxfp4", np.uint8),
    "NVFP4": _Decoder(_nvfp4, 4, 16, "nvfp4", np.uint8),
}
READ = (*FLOATS, *DECODERS)


def _read(t: Layer) -> Read:
    kind, shape = t.dtype(".weight"), t.shape_of(t.prefix + ".weight")
    if kind not in (*DECODERS, *OF_FLOATS):
        known = ", ".join(READ)
        raise t.error(f".weight is {brief(kind)}, which is not read. Types that are read: {known}")
    if shape is None or len(shape) != 2 + t.stacked:
        letters = "(G, N, K)" if t.stacked else "(N, K)"
        instead = ""
        if len(shape or ()) == 3:
            instead = ": it stacks experts, use jgg.checkpoints.experts(tensors, prefix)"
        raise t.error(f".weight has shape {shape}, expected {letters}{instead}")
    if 0 in shape:
        raise t.error(f".weight of shape {shape} is empty")
    t.check_shape(shape)
    if kind in DECODERS:
        return _quantized(t, t.tensors[t.prefix + ".weight"]), None
    _no_scale(t, kind)
    return t.array(".weight", OF_FLOATS), None


def _no_scale(t: Layer, kind: str) -> None:
    if t.has(".scale"):
        raise t.error(f"has .scale, which is read beside NVFP4, and its .weight is {kind}")


def _quantized(t: Layer, blocks: Blocks) -> Quantized:
    how, (*lead, k) = DECODERS[blocks.type], blocks.shape
    affine, scale = how.mode == "affine", None
    if how.mode != "nvfp4":
        _no_scale(t, blocks.type)
    elif t.has(".scale"):
        scale = t.array(".scale", ("float32",))
        counts = ((), (1,), (lead[0],)) if t.stacked else ((), (1,))
        if scale.shape not in counts:
            expected = f"one number{f' or {lead[0]}' * t.stacked}"
            raise t.error(f".scale has shape {scale.shape}, expected {expected}")
        scale = scale.reshape(()) if scale.size == 1 else scale
        scale = multiplier(t, ".scale", np.broadcast_to(scale, lead[:-1]).copy())
    count, groups = math.prod(lead), k // how.group_size
    dtype = jnp.dtype(t.scales_dtype) if affine and t.scales_dtype else np.dtype(how.scales)
    weight = np.empty((count, k * how.bits // 32), np.uint32)
    floats = [np.empty((count, groups), dtype) for _ in range(1 + affine)]
    step = max(1, CHUNK // k)
    for start in range(0, count, step):
        stop = min(start + step, count)
        raw = blocks.rows(start, stop).reshape(-1, BY_NAME[blocks.type].nbytes)
        with np.errstate(invalid="ignore"):  # of what is refused below
            codes, *parts = how.decode(raw)
        weight[start:stop] = pack(codes.reshape(stop - start, k), how.bits)
        for out, part in zip(floats, parts, strict=True):
            with np.errstate(over="ignore"):
                out[start:stop] = part.reshape(stop - start, groups)
            _check(t, blocks.type, part, out[start:stop])
    leaves = (x.reshape(*lead, -1) for x in (weight, *floats))
    weight, scales, *biases = leaves
    return t.quantized(
        weight, scales, biases[0] if affine else None, scale, mode=how.mode, bits=how.bits,
        group_size=how.group_size,
    )  # fmt: skip


def _check(t: Layer, kind: str, part, out) -> None:
    """Raise where scales or biases are no numbers, or not in the dtype that was asked for."""
    if kind == "MXFP4":
        if np.any(part == 0xFF):
            raise t.error(f".weight is {kind} with scales of 255, which are not numbers")
    elif kind == "NVFP4":
        if np.any(part >= 0x80):
            raise t.error(f".weight is {kind} with negative scales")
    elif not np.all(np.isfinite(part)):
        raise t.error(f".weight is {kind} with scales that are not finite")
    elif not np.all(np.isfinite(out.astype(F32))):
        raise t.error(
            f".weight is {kind} with scales too large for {out.dtype.name}: pass "
            "scales_dtype=jnp.float32"
        )


FORMAT = Format(
    kinds=(
        Kind(
            "F16, Q4_0 to Q8_0, Q2_K to Q6_K, MXFP4, NVFP4",
            (".weight",), (".bias", ".scale", ".input_scale"), _read,
            stacked=(False, True), dtype=(".weight", tuple(DECODERS)),
        ),
    ),
    methods=("gguf",),
)  # fmt: skip
