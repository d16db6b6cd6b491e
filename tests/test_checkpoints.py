"""Checkpoint formats, written bit by bit from their definitions, against their own formulas."""

import json
import struct
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_groupgemm as jgg

ck = jgg.checkpoints
F16, F32, F64 = np.float16, np.float32, np.float64
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
N, K = 32, 256


# The writers. Codes are (N, K), scales and zero points (N, groups).


def stream(codes, bits):
    """uint32 words in which bit b of code i is bit ``i*bits + b``."""
    words = [0] * (len(codes) * bits // 32)
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


def named(prefix, leaves, separator="."):
    return {prefix + separator + name: value for name, value in leaves.items()}


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


def integers(rng, bits, groups, dtype=F16, low=1):
    """Codes, zero points and scales, and ``(q - z) * s``."""
    q = rng.integers(0, 2**bits, (N, K))
    z = rng.integers(low, 2**bits, (N, groups))
    s = (0.01 * rng.standard_normal((N, groups))).astype(dtype)
    return q, z, s, affine(q, z, s)


def affine(q, z, s, group_of=None):
    group_of = np.arange(K) // (K // s.shape[1]) if group_of is None else group_of
    return (q - z[:, group_of]) * s.astype(F64)[:, group_of]


# The formats.


@pytest.mark.parametrize(("bits", "group", "dtype"), [
    (2, 32, F16), (3, 64, BF16), (4, 64, F16), (4, 128, F32), (5, 32, F16), (6, 128, F16),
    (8, 64, BF16),
])  # fmt: skip
def test_mlx_affine(rng, bits, group, dtype):
    q, _, s, _ = integers(rng, bits, K // group, dtype)
    b = rng.standard_normal(s.shape).astype(dtype)
    tensors = named("up", {**write_mlx(q, bits, s, b), "bias": np.zeros(N)})
    config = {"bits": float(bits), "group_size": group}
    w = ck.linear(tensors, "up", format="mlx", config=config)
    s, b = (np.repeat(x.astype(F32), group, 1) for x in (s, b))
    check(w, (q.astype(F32) * s + b).astype(F64))
    assert w.scales.dtype == w.biases.dtype == dtype
    # Layers of their own, in any of the dicts that checkpoints have.
    other = {"bits": 8, "group_size": 32, "up": config, "down": False}
    for whole in (other, {"quantization": other}, {"quantization_config": other}):
        same(ck.linear(tensors, "up", format="mlx", config=whole).weight, w.weight)
    stacked = {name: np.stack([x, x[::-1]]) for name, x in tensors.items()}
    e = ck.experts(stacked, "up", format="mlx", config=config)
    same_leaves(e, w, jax.tree.map(lambda x: x[::-1], w))


@pytest.mark.parametrize(("mode", "bits", "group"), [
    ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16),
])  # fmt: skip
def test_mlx_fp(rng, mode, bits, group):
    q = rng.integers(0, 2**bits, (N, K)) & (0xBF if bits == 8 else 15)  # no NaN
    s = rng.integers(100, 120, (N, K // group)).astype(np.uint8)
    e4m3 = np.arange(256).astype(np.uint8).view(E4M3).astype(F64)
    element = e4m3 if bits == 8 else E2M1
    scale = e4m3[s] if mode == "nvfp4" else 2.0 ** (s.astype(int) - 127)
    value = element[q] * np.repeat(scale, group, 1)
    tensors = named("up", write_mlx(q, bits, s))
    check(ck.linear(tensors, "up", format="mlx", config={"mode": mode}), value)
    if mode == "nvfp4":
        tensors["up.global_scale"] = np.array([3.7], F32)  # MLX stores the amax
        w = ck.linear(tensors, "up", format="mlx", config={"mode": mode, "bits": 4})
        check(w, value * F64(F32(3.7) / F32(2688)))


@pytest.mark.parametrize(("group", "dtype"), [(32, F16), (128, BF16), (K, F16)])
def test_awq(rng, group, dtype):
    q, z, s, value = integers(rng, 4, K // group, dtype, low=0)
    tensors = named("a.b", {**write_awq(q, z, s), "bias": np.ones(N, F16)})
    config = {
        "quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm",
        "group_size": -1 if group == K else group,
    }  # fmt: skip
    w = ck.linear(tensors, "a.b", format="awq", config=config)
    check(w, value, (F32, F16, BF16) if group == 32 else (F32,))
    assert (w.mode, w.group_size, w.scales.dtype) == ("affine", min(group, 128), F32)
    jax.tree.map(same, ck.linear(tensors, "a.b", format="awq"), w)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(("bits", "group", "dtype"), [
    (2, 32, F16), (3, 64, F16), (4, 128, BF16), (4, K, F16), (8, 64, F16),
])  # fmt: skip
def test_gptq(rng, bits, group, dtype, v2):
    q, z, s, value = integers(rng, bits, K // group, dtype, low=not v2)
    g_idx = (np.arange(K) // group).astype(np.int32)
    config = {"bits": bits, "group_size": -1 if group == K else group}
    if v2:
        config["checkpoint_format"] = "gptq_v2"
    for index in (None, g_idx):
        tensors = named("l", write_gptq(q, z, s, bits, v2=v2, g_idx=index))
        w = ck.linear(tensors, "l", format="gptq", config=config)
        check(w, value)
        assert w.scales.dtype == F32
    # Symmetric: the stored dtype holds scales and biases.
    z = np.full_like(z, 2 ** (bits - 1))
    tensors = named("l", write_gptq(q, z, s, bits, v2=v2))
    w = ck.linear(tensors, "l", format="gptq", config={**config, "sym": True})
    check(w, affine(q, z, s))
    assert w.scales.dtype == w.biases.dtype == dtype


@pytest.mark.parametrize("bits", [3, 4])
def test_gptq_act_order(rng, bits):
    group, config = 64, {"bits": bits, "group_size": 64, "desc_act": True}
    tensors, values = {}, []
    for name in "abc":
        q, z, s, _ = integers(rng, bits, K // group)
        g_idx = rng.permutation(K).astype(np.int32) // group
        if name == "b":
            g_idx = (np.arange(K) // group).astype(np.int32)
        values.append(affine(q, z, s, g_idx))
        tensors |= named(name, write_gptq(q, z, s, bits, v2=False, g_idx=g_idx))
    for name, value in zip("abc", values, strict=True):
        w, order = ck.act_order(tensors, name, config=config)
        assert sorted(order) == list(range(K))
        check(w, value[:, order])
        assert (name == "b") == np.array_equal(order, np.arange(K))
    w, order = ck.act_order(tensors, list("abc"), config=config)
    for i, name in enumerate("abc"):
        one, own = ck.act_order(tensors, name, config=config)
        jax.tree.map(lambda x, y, i=i: same(x[i], y), (w, order), (one, own))
    x = rng.standard_normal((5, K))
    w, order = ck.act_order(tensors, "a", config=config)
    got = x[:, order] @ np.asarray(jgg.dequantize(w), F64).T
    np.testing.assert_allclose(got, x @ values[0].T, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"a: \.g_idx is not in order \(desc_act\), so K would be"):
        ck.experts(tensors, list("ba"), format="gptq", config=config)
    with pytest.raises(ValueError, match=r"jgg\.checkpoints\.act_order: a and c differ in order"):
        ck.act_order(tensors, [("a", "c")], config=config)
    tensors["a.g_idx"][0] += 1 if tensors["a.g_idx"][0] == 0 else -1
    with pytest.raises(ValueError, match=r"\.g_idx does not give each of 4 groups 64 channels"):
        ck.act_order(tensors, "a", config=config)


def test_gptq_dynamic(rng):
    """Bits, and whether it is quantized, by patterns of names."""
    q, z, s, value = integers(rng, 8, K // 64)
    config = {"bits": 4, "group_size": 64, "dynamic": {r"-:.*\.0\.": {}, r".*\.1\.": {"bits": 8}}}
    for layer in "01":
        tensors = named(f"l.{layer}.up", write_gptq(q, z, s, 8, v2=False))
        if layer == "1":
            check(ck.linear(tensors, "l.1.up", format="gptq", config=config), value)
        else:
            with pytest.raises(ValueError, match="config says it is not quantized: dynamic"):
                ck.linear(tensors, "l.0.up", format="gptq", config=config)


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


NVFP4_CONFIGS = {
    "modelopt": [
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quantization": {"quant_algo": "NVFP4", "group_size": 16}},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "NVFP4"}}},
    ],
    "compressed-tensors": [
        {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        },
        {"format": "mixed-precision"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("scale", [2.0**-12, 3e-4, 0.0, 1e-41])
def test_modelopt(rng, scale):
    leaves, value = nvfp4(rng, "modelopt", scale)
    for config in (None, *NVFP4_CONFIGS["modelopt"]):
        w = ck.linear(named("a.b", leaves), "a.b", format="modelopt", config=config)
        check(w, value, (F32, BF16))


@pytest.mark.parametrize("scale", [2.0**12, 3333.3, 49.0, np.inf])
def test_compressed_tensors(rng, scale):
    """``(e2m1 * s) * (1 / global)`` in float32, at most 3/2 ulp from ``e2m1 * s / global``."""
    leaves, exact = nvfp4(rng, "compressed-tensors", scale)
    for config in (None, *NVFP4_CONFIGS["compressed-tensors"]):
        w = ck.linear(named("a.b", leaves), "a.b", format="compressed-tensors", config=config)
        check(w, exact * F64(F32(1) / F32(scale)))
    got, want = np.asarray(jgg.dequantize(w), F64), exact / F64(F32(scale))
    np.testing.assert_allclose(got, want, rtol=1.5 * 2**-23, atol=0)
    if scale == 2.0**12:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_gpt_oss(rng, name):
    q = rng.integers(0, 16, (3, N, K))
    s = rng.integers(0, 255, (3, N, K // 32)).astype(np.uint8)
    with np.errstate(over="ignore"):
        value = np.ldexp(E2M1[q].reshape(3, N, -1, 32), s[..., None].astype(int) - 127)
    value = value.reshape(q.shape)
    leaves = {"blocks": pairs(q).reshape(3, N, K // 32, 16), "scales": s, "bias": np.ones((3, N))}
    tensors = named(f"mlp.experts.{name}", leaves, "_")
    if name == "gate_up_proj":
        value = np.concatenate([value[:, 0::2], value[:, 1::2]], 1)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    check(ck.experts(tensors, f"mlp.experts.{name}", format="gpt-oss", config=config), value)


def test_experts(rng):
    """Stacked in the given order; gate over up, each with its own global scale."""
    tensors, values = {}, {}
    for i, scale in enumerate([1e-3, 7e-4, 3e-3, 2e-5]):
        name = f"e.{i // 2}.{'gate' if i % 2 == 0 else 'up'}"
        leaves, values[name] = nvfp4(rng, "modelopt", scale)
        tensors |= named(name, leaves)
    w = ck.experts(tensors, ["e.1.up", "e.0.up"], format="modelopt")
    same_leaves(w, *(ck.linear(tensors, f"e.{i}.up", format="modelopt") for i in (1, 0)))
    assert w.global_scale.shape == (2,)
    fused = [(f"e.{i}.gate", f"e.{i}.up") for i in (1, 0)]
    value = np.stack([np.concatenate([values[name] for name in names]) for names in fused])
    w = ck.experts(tensors, fused, format="modelopt")
    check(w, value)
    assert w.global_scale.shape == (2, 2 * N)
    same_leaves(w, *(ck.linear(tensors, names, format="modelopt") for names in fused))
    q, z, s, _ = integers(rng, 4, K // 64)
    tensors = named("a", write_awq(q, z, s)) | named("b", write_awq(q[::-1], z[::-1], s[::-1]))
    w = ck.experts(tensors, ["b", "a"], format="awq")
    same_leaves(w, *(ck.linear(tensors, name, format="awq") for name in "ba"))


# Files.


def test_open(rng, tmp_path):
    kinds = [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64]
    kinds += [F16, BF16, F32, F64, np.complex64, E4M3, ml_dtypes.float8_e5m2]
    want = {np.dtype(kind).name: rng.integers(0, 100, (3, 5)).astype(kind) for kind in kinds}
    want |= {
        "e8m0": np.array([0, 127, 254], np.uint8).view(ml_dtypes.float8_e8m0fnu),
        "bool": np.array([True, False]),
        "empty": np.empty((3, 0, 2), np.int16),
        "scalar": np.array(-1.5, F32),
    }
    names = sorted(want)
    parts = [{n: want[n] for n in reversed(names[i::2])} for i in (0, 1)]
    one, many, index = tmp_path / "one.safetensors", tmp_path / "many", tmp_path / "indexed"
    save(one, want)
    for folder in (many, index):
        folder.mkdir()
        for i, part in enumerate(parts):
            save(folder / f"m-{i}.safetensors", part, align=8)
    where = {n: f"m-{i}.safetensors" for i, part in enumerate(parts) for n in part}
    path = index / "m.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    save(index / "other.safetensors", {"other": np.ones(3)})  # not in the index: not read
    for source in (one, str(one), many, index, path):
        tensors = ck.open(source)
        assert list(tensors) == names
        assert len(tensors) == len(names)
        assert "nothing" not in tensors
        for name, x in want.items():
            got = tensors[name]
            assert type(got) is np.ndarray
            assert (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes())
    assert repr(ck.open(many)) == f"<{len(names)} tensors in 2 safetensors files>"
    with pytest.raises(KeyError):
        tensors["nothing"]


@pytest.mark.parametrize("align", [1, 8])
def test_weights_of_a_file(rng, tmp_path, align):
    q, z, s, value = integers(rng, 4, K // 64)
    tensors = named("gptq", write_gptq(q, z, s, 4, v2=False)) | named("awq", write_awq(q, z, s))
    tensors |= named("mlx", write_mlx(q, 4, s.astype(F32), (-z * s.astype(F32)).astype(F32)))
    leaves, fp4 = nvfp4(rng, "modelopt", 0.01)
    tensors |= named("modelopt", leaves)
    path = save(tmp_path / "m.safetensors", {"odd": np.ones(align, np.int8)} | tensors, align=align)
    config = {"bits": 4, "group_size": 64}
    opened = ck.open(path)
    assert any(not x.flags.aligned for x in opened.values()) == (align == 1)
    for format in ("gptq", "awq", "mlx", "modelopt"):
        w = ck.linear(opened, format, format=format, config=config | {"group_size": 16}
                      if format == "modelopt" else config)  # fmt: skip
        check(w, fp4 if format == "modelopt" else value)
        on_device = jax.device_put(w)
        jax.tree.map(same, on_device, w)
    jaxes = {name: jnp.asarray(x) for name, x in opened.items()}
    check(ck.linear(jaxes, "modelopt", format="modelopt"), fp4)


def test_larger_than_memory(tmp_path):
    """One tensor of 64 GiB, in a sparse file, is mapped, not read; nothing stays mapped."""
    path, size = tmp_path / "huge.safetensors", 2**36
    big = {"dtype": "U8", "shape": [2**18, 2**18], "data_offsets": [0, size]}
    last = {"dtype": "I32", "shape": [2], "data_offsets": [size, size + 8]}
    header = json.dumps({"big": big, "last": last}).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        f.seek(size, 1)
        f.write(struct.pack("<ii", 5, -7))
    tensors = ck.open(path)
    np.testing.assert_array_equal(tensors["last"], [5, -7])
    x = tensors["big"]
    assert x[2**17, 2**17] == 0
    maps = Path("/proc/self/maps")
    assert not maps.exists() or path.name in maps.read_text()
    del x
    assert not maps.exists() or path.name not in maps.read_text()


def test_experts_one_at_a_time():
    """Of 32 experts, memory holds the result and the tensors of one."""

    class Made(dict):  # on access
        def __getitem__(self, name):
            shape, dtype = super().__getitem__(name)
            return np.ones(shape, dtype)

    shapes = {"weight": ((256, 512), np.uint8), "weight_scale": ((256, 64), E4M3)}
    shapes["weight_scale_2"] = (), F32
    names = [f"e.{i}" for i in range(32)]
    tensors = Made((f"{name}.{leaf}", made) for name in names for leaf, made in shapes.items())
    one = 256 * (512 + 64)
    tracemalloc.start()
    try:
        w = ck.experts(tensors, names, format="modelopt")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert w.shape == (32, 256, 1024)
    assert 32 * one < peak < 33.5 * one


def raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin, end, shape=None, dtype: object = "U8"):
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


MALFORMED = [
    ({"a": entry(0, 9)}, "truncated: tensors end at byte 77, the file at 76"),
    ({"a": entry(0, 7)}, "bytes past the last tensor: tensors end at byte 75, the file at 76"),
    ({"a": entry(0, 6), "b": entry(4, 8)}, "tensor 'b' at bytes 4 to 8 overlaps another"),
    ({"b": entry(0, 2), "a": entry(4, 8)}, "tensor 'a' at bytes 4 to 8 follows a gap"),
    (
        {"a": entry(0, 8, [3], "I16")},
        "tensor 'a': data_offsets [0, 8], but I16 of shape [3] takes 6 bytes",
    ),
    ({"a": entry(8, 0, [8])}, "tensor 'a': data_offsets [8, 0], but U8 of shape [8] takes 8 bytes"),
    ({"a": entry(0, 8, [-8])}, "tensor 'a': shape [-8] is not a list of sizes"),
    ({"a": entry(0, 8, [True, 8])}, "tensor 'a': shape [True, 8] is not a list of sizes"),
    ({"a": entry(0, 8, 8)}, "tensor 'a': shape 8 is not a list of sizes"),
    ({"a": entry(0, 8, dtype="F4")}, "tensor 'a': dtype 'F4' is not one of BOOL, U8, "),
    ({"a": entry(0, 8, dtype=[])}, "tensor 'a': dtype [] is not one of BOOL, U8, "),
    ({"a": 3}, "tensor 'a': expected dtype, shape and data_offsets, got 3"),
    (b'{"a": 1, "a": 2}', "malformed JSON: 'a' appears twice"),
    (b"[]", "malformed JSON: not an object"),
    (b"{", "malformed JSON: Expecting property name"),
    (b"\xff", "malformed JSON: 'utf-8' codec can't decode"),
    (b"[" * 100_000, "malformed JSON: "),
]


@pytest.mark.parametrize(("header", "message"), MALFORMED)
def test_malformed_file(tmp_path, header, message):
    path = raw(tmp_path / "m.safetensors", header, bytes(8))
    with pytest.raises(ValueError, match=r"^jgg\.checkpoints\.open: ") as error:
        ck.open(path)
    assert str(error.value).startswith(f"jgg.checkpoints.open: {path}: {message}")


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_no_safetensors_file(tmp_path, size):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\x80" * size)
    with pytest.raises(ValueError, match=f"not a safetensors file: a header of .* in {size}"):
        ck.open(path)


def test_malformed_at_random(rng, tmp_path):
    """Whatever the bytes are: a ValueError, or tensors inside the file."""
    tensors = {"a": np.arange(6, dtype=F32), "b": np.ones((2, 3), BF16), "c": np.array(3)}
    good = save(tmp_path / "good.safetensors", tensors).read_bytes()
    end = 8 + struct.unpack("<Q", good[:8])[0]
    path, refused, taken = tmp_path / "m.safetensors", 0, 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            at = rng.integers(0, end)
            new = rng.choice(list(b'0123456789[]{}":,-eE abIFU\x00\xff'))
            match rng.integers(3):
                case 0:
                    data[at] = new
                case 1:
                    data.insert(at, new)
                case 2:
                    del data[at]
        path.write_bytes(data)
        try:
            opened = ck.open(path)
        except ValueError as error:
            refused += str(error).startswith(f"jgg.checkpoints.open: {path}: ")
        else:
            taken += sum(x.nbytes for x in opened.values()) < len(data)
    assert refused + taken == 300
    assert refused > 200


def test_shards_disagree(tmp_path):
    def index(where):
        path = tmp_path / "m.safetensors.index.json"
        path.write_text(json.dumps(where))
        return path

    def message(path):
        with pytest.raises(ValueError, match=r"^jgg\.checkpoints\.open: ") as error:
            ck.open(path)
        return str(error.value).removeprefix(f"jgg.checkpoints.open: {path}: ")

    with pytest.raises(FileNotFoundError, match=r"no \.safetensors files"):
        ck.open(tmp_path)
    save(tmp_path / "1.safetensors", {"a": np.ones(2), "b": np.ones(2)})
    save(tmp_path / "2.safetensors", {"b": np.ones(2)})
    one, two = "1.safetensors", "2.safetensors"
    assert message(tmp_path) == f"tensor 'b' is in {one} and {two}"
    path = index({"weight_map": {"a": one, "b": two}})
    assert message(path) == f"tensor 'b' is in {one} and {two}"
    assert message(index({"weight_map": {"a": one}})) == (
        f"tensor 'b' is in {one}, by the index nowhere"
    )
    assert message(index({"weight_map": {"a": one, "b": one, "c": one}})) == (
        f"tensor 'c' is not in {one}"
    )
    assert message(index({"weight_map": {"a": two, "b": two, "c": one}})) == (
        f"tensor 'b' is in {one} and {two}"
    )
    assert message(index({"weight_map": {"a": "../1"}})) == "file '../1' is not beside the index"
    assert message(index({"weights": {}})) == "no 'weight_map' from tensor names to files"
    with pytest.raises(FileNotFoundError):
        ck.open(index({"weight_map": {"a": "3.safetensors"}}))
    index({}).rename(tmp_path / "n.safetensors.index.json")
    index({})
    assert message(tmp_path).startswith("several indices, m.safetensors.index.json and n.")


# Errors.


ONES, WORDS = np.ones((2, 32), F16), np.zeros((128, 4), np.int32)
AWQ = named("a", {"qweight": WORDS, "qzeros": WORDS[:2], "scales": ONES})
GPTQ = named("a", {"qweight": np.zeros((16, 32), np.int32), "qzeros": WORDS[:2], "scales": ONES})
MLX = named("a", {"weight": np.zeros((8, 16), np.uint32), "scales": ONES[:, :1].repeat(4, 0)})
MLX["a.scales"] = np.ones((8, 2), F16)
MLX["a.biases"] = np.ones((8, 2), F16)
MODELOPT = named("a", {
    "weight": np.zeros((8, 16), np.uint8), "weight_scale": np.ones((8, 2), E4M3),
    "weight_scale_2": F32(1),
})  # fmt: skip
PACKED = named("a", {
    "weight_packed": np.zeros((8, 16), np.uint8), "weight_scale": np.ones((8, 2), E4M3),
    "weight_global_scale": np.ones(1, F32),
})  # fmt: skip
OSS = named("gate_up_proj", {
    "blocks": np.zeros((2, 8, 3, 16), np.uint8), "scales": np.zeros((2, 8, 3), np.uint8),
}, "_")  # fmt: skip
TENSORS = {"awq": AWQ, "gptq": GPTQ, "mlx": MLX, "modelopt": MODELOPT, "compressed-tensors": PACKED}
FOUR = {"bits": 4}

# Format, changed tensors (None: removed), config, and the error.
ERRORS = [
    ("awq", {"qzeros": None}, None,
     "a: no tensor 'a.qzeros', which format 'awq' needs"),
    ("awq", {"g_idx": ONES}, None,
     "a: tensor 'a.g_idx' is not known to format 'awq'"),
    ("awq", {"scales": ONES.astype(F64)}, None,
     "a.scales must be float32 or bfloat16 or float16, got dtype float64"),
    ("awq", {"qzeros": WORDS[:4]}, None,
     "a.qzeros has shape (4, 4), expected (K/group_size, N/8) = (2, 4)"),
    ("awq", {"qweight": WORDS[:, :2]}, None,
     "a.qweight has shape (128, 2), expected (K, N/8) = (128, 4)"),
    ("awq", {"qweight": WORDS[:0]}, None,
     "a: .qweight of shape (0, 4) is empty"),
    ("awq", {"qweight": WORDS[:96]}, None,
     "a: group_size=48 is not a multiple of 32"),
    ("awq", {}, {"group_size": 128},
     "a: scales have 2 groups, but K is 128 and config says group_size=128"),
    ("awq", {}, {"group_size": 64, "q_group_size": 128},
     "a: config contradicts itself: group_size=64, q_group_size=128"),
    ("awq", {}, {"version": "gemv"},
     "a: config says version='gemv', expected 'gemm' or 'GEMM'"),
    ("awq", {}, {"quant_method": "gptq"},
     "a: config says quant_method='gptq', expected 'awq'"),
    ("awq", {}, {"quantization_config": {"zero_point": False}},
     "a: config says zero_point=False, expected True"),
    ("awq", {"scales": ONES.astype(F32) / 3}, None,
     "a: .scales hold values whose products with 4-bit codes are not exact in float32"),
    ("awq", {"scales": np.where(np.eye(2, 32), F16(np.inf), ONES)}, None,
     "a: .scales hold values whose products with 4-bit codes are not exact in float32"),
    ("awq", {"scales": ONES.astype(BF16) * BF16(1e-38)}, None,
     "a: .scales hold values whose products with 4-bit codes are not exact in float32"),
    ("gptq", {}, None,
     "format 'gptq' needs config for its bits and checkpoint_format"),
    ("gptq", {}, {},
     "a: config says no bits"),
    ("gptq", {}, {"bits": 5},
     "a: config says bits=5, expected 2 or 3 or 4 or 8"),
    ("gptq", {}, {"bits": 8},
     "a.qzeros has shape (2, 4), expected (K/group_size, N*bits/32) = (2, 8)"),
    ("gptq", {}, {**FOUR, "group_size": 32},
     "a: scales have 2 groups, but K is 128 and config says group_size=32"),
    ("gptq", {}, {**FOUR, "checkpoint_format": "gptq_p"},
     "a: config says checkpoint_format='gptq_p', expected 'gptq' or 'gptq_v2'"),
    ("gptq", {}, {**FOUR, "is_marlin_format": True},
     "a: config says is_marlin_format=True, expected False"),
    ("gptq", {}, {**FOUR, "dynamic": {"+:(": {}}},
     "a: config's dynamic pattern '+:(': missing ), unterminated subpattern at position 0"),
    ("gptq", {"qzeros": WORDS[:2] - 1}, FOUR,
     "a: .qzeros of format v1 holds 15, which libraries read as a zero point of 0, of 16, or as a "
     "borrow from its neighbour: convert it to gptq_v2"),
    ("gptq", {"qzeros": np.full((2, 4), 0x77777777, np.int32)},
     {**FOUR, "sym": True, "checkpoint_format": "gptq_v2"},
     "a: config says sym=True, but .qzeros gives zero points other than 8: is checkpoint_format "
     "right?"),
    ("gptq", {"qzeros": np.full((2, 4), 0x77777777, np.int32), "scales": ONES * F16(9000)},
     {**FOUR, "sym": True},
     "a: .scales hold values too large for zero points in float16"),
    ("mlx", {}, None,
     "format 'mlx' needs config for its bits, group_size and mode"),
    ("mlx", {}, {"a": False},
     "a: config says it is not quantized"),
    ("mlx", {}, {"quant_method": "awq"},
     "a: config says quant_method='awq', expected nothing"),
    ("mlx", {}, {"bits": 4, "group_size": 128},
     "a.scales has shape (8, 2), expected (N, K/group_size) = (8, 1)"),
    ("mlx", {}, {"bits": 6},
     "a: .weight has 16 words a row, not a multiple of 6 bits by 64"),
    ("mlx", {"biases": None}, FOUR,
     "a: has no .biases, but its mode is 'affine'"),
    ("mlx", {"scales": np.ones((8, 4), np.uint8)}, {"mode": "mxfp4"},
     "a: has .biases, but its mode is 'mxfp4'"),
    ("mlx", {"global_scale": np.ones(1, F32)}, FOUR,
     "a: has .global_scale, but its mode is 'affine'"),
    ("mlx", {"weight": np.zeros((8, 16), np.int32)}, FOUR,
     "a.weight must be uint32, got dtype int32"),
    ("mlx", {"biases": np.ones((8, 2), F32)}, FOUR,
     "a.biases must be float16, got dtype float32"),
    ("mlx", {"weight": np.zeros((2, 8, 16), np.uint32)}, FOUR,
     "a.weight has shape (2, 8, 16), expected 2 axes (N, K*bits/32)"),
    ("modelopt", {"pre_quant_scale": np.ones(32)}, None,
     "a: tensor 'a.pre_quant_scale' is not known to format 'modelopt'"),
    ("modelopt", {"weight_scale_2": np.ones(2, F32)}, None,
     "a: .weight_scale_2 has shape (2,), expected one number"),
    ("modelopt", {"weight_scale_2": F32(np.nan)}, None,
     "a: .weight_scale_2 = nan gives no finite scale"),
    ("modelopt", {"weight_scale": np.ones((8, 2), np.uint8)}, None,
     "a.weight_scale must be float8_e4m3fn, got dtype uint8"),
    ("modelopt", {"weight_scale": -np.ones((8, 2), E4M3)}, None,
     "a: .weight_scale holds negative scales"),
    ("modelopt", {"weight": np.zeros((8, 12), np.uint8)}, None,
     "a: .weight has K = 24, not a multiple of 16"),
    ("modelopt", {}, {"quant_algo": "FP8"},
     "a: config says quant_algo='FP8', expected 'NVFP4' or 'W4A16_NVFP4' or 'MIXED_PRECISION'"),
    ("modelopt", {},
     {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
     "a: config says quant_algo='FP8', expected 'NVFP4' or 'W4A16_NVFP4'"),
    ("compressed-tensors", {"weight_global_scale": np.zeros(1, F32)}, None,
     "a: .weight_global_scale = 0.0 gives no finite scale"),
    ("compressed-tensors", {}, {"format": "pack-quantized"},
     "a: config says format='pack-quantized', expected 'nvfp4-pack-quantized' or "
     "'mixed-precision'"),
    ("compressed-tensors", {},
     {"format": "nvfp4-pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
     "a: config says num_bits=8, expected 4"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "changed", "config", "message"), ERRORS)
def test_errors(format, changed, config, message):
    tensors = {**TENSORS[format], **named("a", changed)}
    tensors = {name: x for name, x in tensors.items() if x is not None}
    with pytest.raises((ValueError, TypeError)) as error:
        ck.linear(tensors, "a", format=format, config=config)
    assert str(error.value) == f"jgg.checkpoints.linear: {message}"
    assert isinstance(error.value, TypeError) == ("got dtype" in message)


CALLS = [
    (lambda: ck.linear(AWQ, "a", format="gguf"),
     "linear: format='gguf' is not one of 'mlx', 'awq', 'gptq', 'compressed-tensors', 'modelopt', "
     "'gpt-oss'"),
    (lambda: ck.linear(AWQ, "a", format="awq", config="gemm"),  # pyright: ignore
     "linear: config must be a dict, got 'gemm'"),
    (lambda: ck.linear(OSS, "gate_up_proj", format="gpt-oss"),
     "linear: gate_up_proj: format 'gpt-oss' stacks experts in one tensor: use "
     "jgg.checkpoints.experts(tensors, prefix)"),
    (lambda: ck.experts(AWQ, "a", format="awq"),
     "experts: a: format 'awq' has tensors of its own for each expert: prefixes must be a "
     "sequence"),
    (lambda: ck.experts(AWQ, [], format="awq"), "experts: no prefixes"),
    (lambda: ck.linear(AWQ, (), format="awq"), "linear: no prefixes"),
    (lambda: ck.experts(named("up_proj", {"blocks": 0, "scales": 0}, "_"), "up_proj",
                        format="gpt-oss"),
     "experts: up_proj: neither 'gate_up_proj', whose rows are interleaved, nor 'down_proj'"),
    (lambda: ck.experts({**OSS, "gate_up_proj_zeros": 0}, "gate_up_proj", format="gpt-oss"),
     "experts: gate_up_proj: tensor 'gate_up_proj_zeros' is not known to format 'gpt-oss'"),
    (lambda: ck.experts({n: x[:, :7] for n, x in OSS.items()}, "gate_up_proj", format="gpt-oss"),
     "experts: gate_up_proj: _blocks has 7 rows, not gate and up by turns"),
    (lambda: ck.experts({**MODELOPT, **named("b", {
        "weight": np.zeros((8, 32), np.uint8), "weight_scale": np.ones((8, 4), E4M3),
        "weight_scale_2": F32(1)})}, ["a", "b"], format="modelopt"),
     "experts: a is Quantized(mode='nvfp4', bits=4, group_size=16, weight=uint32[8,4], "
     "scales=uint8[8,2], global_scale=float32[]), but b is Quantized(mode='nvfp4', bits=4, "
     "group_size=16, weight=uint32[8,8], scales=uint8[8,4], global_scale=float32[])"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_call_errors(call, message):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert str(error.value) == f"jgg.checkpoints.{message}"


def test_nan_scale_stays_in_its_group():
    scales = np.where(np.eye(2, 32), F16(np.nan), ONES)
    got = jgg.dequantize(ck.linear({**AWQ, "a.scales": scales}, "a", format="awq"))
    nan = np.repeat(np.isnan(scales.T), 64, 1)
    np.testing.assert_array_equal(np.isnan(got), nan)
