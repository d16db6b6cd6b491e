"""Checkpoint formats, written bit by bit from their definitions, and the values they mean."""

import json
import struct

import jax
import ml_dtypes
import numpy as np

import jax_groupgemm as jgg
from jax_groupgemm._check.oracle import E2M1

F16, F32, F64 = np.float16, np.float32, np.float64
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
N, K = 32, 256

# The writers. Codes are (N, K), scales and zero points (N, groups).


def stream(codes, bits):
    """uint32 words in which bit b of code i is bit ``i*bits + b``."""
    words = [0] * -(-len(codes) * bits // 32)
    for i, code in enumerate(codes):
        for b in range(bits):
            word, bit = divmod(i * bits + b, 32)
            words[word] |= (int(code) >> b & 1) << bit
    return np.array(words, np.uint32)


def pairs(codes):
    """uint8: the even element in the low nibble."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def write_mlx(q, bits, scales, biases=None):
    out = {"weight": np.stack([stream(row, bits) for row in q]), "scales": scales}
    return out if biases is None else {**out, "biases": biases}


def write_awq(q, z, s):
    def pack(rows):  # along N: nibble i of a word is column order[i]
        out = np.zeros((rows.shape[0], rows.shape[1] // 8), np.uint32)
        for i, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            out |= rows[:, column::8].astype(np.uint32) << (4 * i)
        return out.view(np.int32)

    return {"qweight": pack(q.T), "qzeros": pack(z.T), "scales": s.T.copy()}


def write_gptq(q, z, s, bits, *, v2, g_idx=None):
    out = {
        "qweight": np.stack([stream(row, bits) for row in q], 1).view(np.int32),
        "qzeros": np.stack([stream(c, bits) for c in z.T - (not v2)]).view(np.int32),
        "scales": s.T.copy(),
    }
    return out if g_idx is None else {**out, "g_idx": g_idx}


def write_pack_quantized(q, z, s, bits, g_idx=None):
    """Codes and zero points (None: there are none) are those of unsigned integers."""
    out = {
        "weight_packed": np.stack([stream(row, bits) for row in q]).view(np.int32),
        "weight_scale": s,
        "weight_shape": np.array(q.shape, np.int64),
    }
    if z is not None:  # along N
        out["weight_zero_point"] = np.stack([stream(c, bits) for c in z.T], 1).view(np.int32)
    return out if g_idx is None else {**out, "weight_g_idx": g_idx}


def write_int_quantized(q, z, s, bits):
    half = 2 ** (bits - 1)
    out = {"weight": (q - half).astype(np.int8), "weight_scale": s}
    return out if z is None else {**out, "weight_zero_point": (z - half).astype(np.int8)}


def named(prefix, leaves, separator="."):
    return {prefix + separator + name: value for name, value in leaves.items()}


# Random weights.


def integers(rng, bits, groups, dtype=F16, low=1):
    """Codes, zero points and scales, and ``(q - z) * s``."""
    q = rng.integers(0, 2**bits, (N, K))
    z = rng.integers(low, 2**bits, (N, groups))
    s = (0.01 * rng.standard_normal((N, groups))).astype(dtype)
    return q, z, s, affine(q, z, s)


def affine(q, z, s, group_of=None):
    group_of = np.arange(K) // (K // s.shape[1]) if group_of is None else group_of
    return (q - z[:, group_of]) * s.astype(F64)[:, group_of]


def nvfp4(rng, format, scale):
    q = rng.integers(0, 16, (N, K))
    s = rng.integers(1, 0x7F, (N, K // 16)).astype(np.uint8).view(E4M3)
    exact = E2M1[q] * np.repeat(s.astype(F64), 16, 1)
    if format == "modelopt":
        leaves = {"weight": pairs(q), "weight_scale": s, "weight_scale_2": F32(scale)}
        leaves |= {"input_scale": F32(0.1), "k_scale": F32(1), "bias": np.ones(N, BF16)}
        return leaves, exact * F64(F32(scale))
    leaves = {"weight_packed": pairs(q), "weight_scale": s, "input_global_scale": np.ones(1, F32)}
    leaves["weight_global_scale"] = np.array([scale], F32)
    return leaves, exact


# Files.


def save(path, tensors, names=None, align=1):
    """A safetensors file."""
    codes = {
        "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16",
        "uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16",
        "bfloat16": "BF16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
    }  # fmt: skip
    header, data = {"__metadata__": {"format": "np"}}, b""
    for name, x in tensors.items():
        x = np.asarray(x)
        offsets = [len(data), len(data) + x.nbytes]
        header[name] = {
            "dtype": codes[x.dtype.name], "shape": list(x.shape), "data_offsets": offsets,
        }  # fmt: skip
        data += x.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % align)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def raw(path, header, data=b""):
    """A file of tensors with this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin, end, shape=None, dtype: object = "U8"):
    """A tensor of a header."""
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# The comparison.


def same(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def check(q, value, dtypes=(F32,)):
    """``q`` is numpy and dequantizes to float64 ``value`` rounded to float32, then to others."""
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(q))
    assert q.shape == value.shape
    for dtype in dtypes:
        with np.errstate(over="ignore"):
            same(jgg.dequantize(q, dtype), value.astype(F32).astype(dtype))


def same_leaves(got, *wants):
    """``got`` is ``wants``, stacked."""
    for leaf, *leaves in zip(*map(jax.tree.leaves, (got, *wants)), strict=True):
        same(leaf, np.stack(leaves))
