"""Checkpoint formats, written bit by bit from their definitions, against their own formulas."""

import tracemalloc

import jax
import numpy as np
import pytest
from checkpoint_writers import (
    BF16,
    E2M1,
    E4M3,
    F16,
    F32,
    F64,
    K,
    N,
    affine,
    check,
    integers,
    named,
    nvfp4,
    pairs,
    same,
    same_leaves,
    write_awq,
    write_gptq,
    write_mlx,
)

import jax_groupgemm as jgg

ck = jgg.checkpoints


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


def test_gptq_static_groups(rng):
    """In act order too, groups that are static, or only one, are those of K as it is stored."""
    for groups, config in ((4, {"static_groups": True, "group_size": 64}), (1, {"group_size": -1})):
        q, z, s, value = integers(rng, 4, groups)
        tensors = named("a", write_gptq(q, z, s, 4, v2=False))
        config |= {"bits": 4, "desc_act": True}
        check(ck.linear(tensors, "a", format="gptq", config=config), value)
        assert np.array_equal(ck.act_order(tensors, "a", config=config)[1], np.arange(K))


def test_awq_modules_to_not_convert(rng):
    """Whole names of modules: a router's is not that of the gate projections."""
    q, z, s, value = integers(rng, 4, K // 64, low=0)
    tensors = named("l.0.mlp.gate_proj", write_awq(q, z, s))
    read = lambda *names: ck.linear(
        tensors, "l.0.mlp.gate_proj", format="awq", config={"modules_to_not_convert": [*names]}
    )
    check(read("gate", "mlp.gate.", "l.0.mlp.up_proj"), value)
    for name in ("gate_proj", "mlp", "l.0.", "l.0.mlp.gate_proj"):
        with pytest.raises(ValueError, match="config says it is not quantized: modules_to_not"):
            read(name)


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


NVFP4_CONFIGS = {
    "modelopt": [
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quantization": {"quant_algo": "NVFP4", "group_size": 16}},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "NVFP4"}}},
        {"quant_algo": "NVFP4", "exclude_modules": ["b", "a.c", "a.b.*", "lm_head"]},
    ],
    "compressed-tensors": [
        {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        },
        {"format": "mixed-precision"},
        {"ignore": ["a", "a.b.c", "lm_head", "re:.*c$"]},
        {
            "format": "mixed-precision",
            "config_groups": {
                "g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}},
                "h": {"targets": ["re:.*[.]b"], "weights": {"num_bits": 4, "type": "float"}},
            },
        },
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


def test_nan_scale_stays_in_its_group(rng):
    q, z, s, _ = integers(rng, 4, K // 64)
    s[0, 0] = s[1, 3] = np.nan
    got = jgg.dequantize(ck.linear(named("a", write_awq(q, z, s)), "a", format="awq"))
    np.testing.assert_array_equal(np.isnan(got), np.repeat(np.isnan(s), 64, 1))


def test_stacked_experts_are_joined(rng):
    """MLX's gate and up, each of all experts, as one weight."""
    gate, up = (jgg.quantize(rng.standard_normal((3, n, 64)).astype(F32), bits=4, group_size=32)
                for n in (4, 6))  # fmt: skip
    tensors = {}
    for name, q in (("gate", gate), ("up", up)):
        tensors |= named(name, {"weight": q.weight, "scales": q.scales, "biases": q.biases})
    config = {"bits": 4, "group_size": 32}
    w = ck.experts(tensors, [["gate", "up"]], format="mlx", config=config, shape=(3, 10, 64))
    want = np.concatenate([jgg.dequantize(gate), jgg.dequantize(up)], axis=1)
    np.testing.assert_array_equal(jgg.dequantize(w), want)
    w = ck.experts(tensors, "up", format="mlx", config=config, scales_dtype=np.dtype("bfloat16"))
    assert w.scales.dtype == w.biases.dtype == BF16
