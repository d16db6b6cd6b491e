"""Configs and tensors that say which format a layer is of, in the words of each writer."""

import numpy as np
import pytest
from checkpoint_writers import (
    E2M1,
    E4M3,
    F16,
    F32,
    F64,
    K,
    N,
    check,
    integers,
    named,
    nvfp4,
    pairs,
    same,
    save,
    write_awq,
    write_gptq,
    write_mlx,
)

import jax_groupgemm as jgg

ck = jgg.checkpoints
LAYER = "model.layers.0.mlp.down_proj"
SPELLINGS = [
    LAYER, "layers.0.mlp.down_proj", "model.language_model.layers.0.mlp.down_proj",
    "language_model.model.layers.0.mlp.down_proj", "language_model.layers.0.mlp.down_proj",
]  # fmt: skip
READ = (
    "Formats that are read: 'mlx' (affine, mxfp4, mxfp8, nvfp4); 'awq' (gemm, 4 bits); 'gptq' (2, "
    "3, 4, 8 bits, v1 and v2); 'compressed-tensors' (nvfp4-pack-quantized, pack-quantized, "
    "int-quantized, mxfp4-pack-quantized, mxfp8-quantized, float-quantized); 'modelopt' (NVFP4, "
    "NVFP4 experts, stacked, FP8); 'gpt-oss' (MXFP4); 'fp8' (fine-grained, a scale for each layer "
    "or row); 'gguf' (F16, Q4_0 to Q8_0, Q2_K to Q6_K, MXFP4, NVFP4)"
)


def refused(tensors, prefix, format, config, what="linear") -> str:
    with pytest.raises(ValueError, match=r"^jgg\.checkpoints\.") as error:
        getattr(ck, what)(tensors, prefix, format=format, config=config)
    where = f"jgg.checkpoints.{what}: "
    return str(error.value).removeprefix(where).removeprefix(f"{prefix}: ")


# Where config has it.


def test_parts_of_config(rng):
    q, z, s, value = integers(rng, 8, K // 32)
    about = {"quant_method": "gptq", "bits": 8, "group_size": 32}
    tensors = named("l", write_gptq(q, z, s, 8, v2=False))
    for config in (
        about,
        {"quantization_config": about},
        {"quantization": about},
        {"text_config": {"quantization_config": about}, "vision_config": {"hidden_size": 3}},
        {"quantization_config": about, "text_config": {"quantization_config": {"bits": 2}}},
        {"quantization": {"bits": 2}, "quantization_config": about},
        {"a_config": {"quantization_config": about}, "b_config": {"quantization_config": about}},
    ):
        check(ck.linear(tensors, "l", format="gptq", config=config), value)
    several = {"a_config": {"quantization": about}, "b_config": {"quantization": {"bits": 4}}}
    assert refused(tensors, "l", "gptq", several) == (
        "config has several quantization, which differ: pass one of them"
    )
    assert refused(tensors, "l", "gptq", {"quantization_config": [3]}) == (
        "config says quantization_config=[3], expected a dict"
    )
    # MLX leaves the config of what it converted beside its own.
    tensors = named("l", write_mlx(q, 8, s, s))
    config = {"quantization": {"bits": 8, "group_size": 32}, "quantization_config": {"bits": 2}}
    assert ck.linear(tensors, "l", format="mlx", config=config).bits == 8


@pytest.mark.parametrize("name", SPELLINGS)
def test_names_of_other_releases(rng, name):
    """Overrides, and layers that are left out, under a layer's name in another release."""
    q, z, s, value = integers(rng, 8, K // 32)
    four, eight = {"bits": 4, "group_size": 64}, {"bits": 8, "group_size": 32}
    mlx = named(LAYER, write_mlx(q, 8, s.astype(F32), (-z * s.astype(F32)).astype(F32)))
    gptq = named(LAYER, write_gptq(q, z, s, 8, v2=False))
    check(ck.linear(mlx, LAYER, format="mlx", config={**four, name: eight}), value)
    config = {**four, "dynamic": {f"+:{name.replace('.', '[.]')}$": eight}}
    check(ck.linear(gptq, LAYER, format="gptq", config=config), value)
    assert refused(mlx, LAYER, "mlx", {**four, name: False}) == "config says it is not quantized"
    config = {**four, "dynamic": {f"-:{name}$": {}}}
    assert "config says it is not quantized" in refused(gptq, LAYER, "gptq", config)
    leaves = named(LAYER, nvfp4(rng, "modelopt", 1.0)[0])
    for pattern in (name, name.rpartition(".")[0] + "*"):
        config = {"quant_algo": "NVFP4", "exclude_modules": [pattern]}
        assert "config says it is not quantized" in refused(leaves, LAYER, "modelopt", config)
    leaves = named(LAYER, nvfp4(rng, "compressed-tensors", 1.0)[0])
    for entry in (name, f"re:^{name}$"):
        config = {"ignore": ["lm_head", entry]}
        assert "config says it is not quant" in refused(leaves, LAYER, "compressed-tensors", config)


def test_patterns_of_what_a_name_has_not(rng):
    """They are of the layer's own name."""
    name = "model.language_model.layers.0.up"
    leaves = named(name, nvfp4(rng, "compressed-tensors", 1.0)[0])
    config = {"ignore": ["re:^(?!.*language_model).*$"]}
    assert ck.linear(leaves, name, format="compressed-tensors", config=config).shape == (N, K)
    leaves = named("visual.blocks.0.up", nvfp4(rng, "compressed-tensors", 1.0)[0])
    config = {"ignore": ["re:.*language_model.*", "model.visual.blocks.0.up"]}
    w = ck.linear(leaves, "visual.blocks.0.up", format="compressed-tensors", config=config)
    assert w.shape == (N, K)


def test_own_name_goes_first(rng):
    """And what is not the same layer does not count."""
    q, _, s, _ = integers(rng, 4, K // 64)
    tensors = named("model.layers.0.up", write_mlx(q, 4, s, s))
    four, other = {"bits": 4, "group_size": 64}, {"bits": 2, "group_size": 32}
    config = {
        "bits": 8, "group_size": 128, "layers.0.up": other, "vision_tower.layers.0.up": other,
        "layers.0.upper": other, "model.layers.0.up": four,
    }  # fmt: skip
    assert ck.linear(tensors, "model.layers.0.up", format="mlx", config=config).bits == 4
    config = {**four, "vision_tower.layers.0.up": other, "model.visual.layers.0.up": False}
    assert ck.linear(tensors, "model.layers.0.up", format="mlx", config=config).bits == 4


# Config and file against each other.


def test_mlx_hidden_size(rng):
    """The shapes of 8 bits by 32 are those of 4 bits by 64 and twice the K."""
    q, _, s, _ = integers(rng, 8, K // 32)
    names = ("up_proj", "o_proj", "down_proj", "shared_experts.down_proj")
    tensors = {k: v for n in names for k, v in named(f"l.{n}", write_mlx(q, 8, s, s)).items()}
    four, eight = {"bits": 4, "group_size": 64}, {"bits": 8, "group_size": 32}
    read = lambda name, **config: ck.linear(tensors, name, format="mlx", config=config)
    said = (
        "config says bits=4, group_size=64, by which K is 512, but {} is 256, as of bits=8, "
        "group_size=32"
    )
    for key in ("intermediate_size", "moe_intermediate_size"):
        config = {"quantization": four, key: K, "hidden_size": 3}
        assert refused(tensors, "l.down_proj", "mlx", config) == said.format(key)
        assert read("l.shared_experts.down_proj", **config).shape == (N, 2 * K)
    said = said.format("hidden_size")
    for sizes in ({"hidden_size": K}, {"text_config": {"hidden_size": K, "heads": 3}}):
        assert refused(tensors, "l.up_proj", "mlx", {"quantization": four, **sizes}) == said
        assert read("l.up_proj", quantization=eight, **sizes).shape == (N, K)
        # Other layers have any K; nor is it known where a config has it, or has no sizes.
        assert read("l.o_proj", quantization=four, **sizes).shape == (N, 2 * K)
        assert read("l.up_proj", quantization=four, latent=2 * K, **sizes).shape == (N, 2 * K)
    assert read("l.up_proj", **four).shape == (N, 2 * K)


def test_mlx_tensors_beside_the_layer(rng, tmp_path):
    """Without sizes in config: a norm is as long as K, and down_proj takes what up_proj gives."""
    q, _, s, _ = integers(rng, 8, K // 32)
    four, eight = {"bits": 4, "group_size": 64}, {"bits": 8, "group_size": 32}
    block = "model.layers.1"
    tensors = {f"{block}.input_layernorm.weight": np.ones(K, F16)}
    for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj"):
        tensors |= named(f"{block}.{name}", write_mlx(q, 8, s, s))
    said = "config says bits=4, group_size=64, by which K is 512, but {}, as of bits=8, "
    said += "group_size=32"
    norm = said.format(f"{block}.input_layernorm.weight has 256 elements")
    save(tmp_path / "model.safetensors", tensors)
    for source in (tensors, ck.open(tmp_path / "model.safetensors")):
        for name in ("mlp.up_proj", "self_attn.q_proj"):
            assert refused(source, f"{block}.{name}", "mlx", four) == norm
            assert ck.linear(source, f"{block}.{name}", format="mlx", config=eight).bits == 8
        # Nothing is known of these.
        for name in ("mlp.down_proj", "self_attn.o_proj"):
            w = ck.linear(source, f"{block}.{name}", format="mlx", config=four)
            assert w.shape == (N, 2 * K)
    rows = np.zeros((K, 8), np.uint32)
    tensors[f"{block}.mlp.up_proj.weight"] = rows
    up = said.format(f"{block}.mlp.up_proj.weight has 256 rows")
    assert refused(tensors, f"{block}.mlp.down_proj", "mlx", four) == up
    assert ck.linear(tensors, f"{block}.mlp.down_proj", format="mlx", config=eight).bits == 8
    tensors[f"{block}.post_attention_layernorm.weight"] = np.ones(2 * K, F16)
    assert ck.linear(tensors, f"{block}.self_attn.q_proj", format="mlx", config=four).bits == 4


@pytest.mark.parametrize("k", [192, 320, 96])
def test_gptq_short_last_group(rng, k):
    """K that is no multiple of the group size: only config or g_idx says how it is cut."""
    groups = -(-k // 128)
    group_of = np.arange(k) // 128
    q, z = rng.integers(0, 16, (N, k)), rng.integers(1, 16, (N, groups))
    s = rng.standard_normal((N, groups)).astype(F16)
    value = (q - z[:, group_of]) * s.astype(F64)[:, group_of]
    leaves = write_gptq(q, z, s, 4, v2=False)
    tensors, config = named("l", leaves), {"bits": 4, "group_size": 128}
    check(ck.linear(tensors, "l", format="gptq", config=config), value)
    if groups > 1:
        sizes = {192: "96 to 191", 320: "107 to 159"}[k]
        assert refused(tensors, "l", "gptq", {"bits": 4}) == (
            f"config says no group_size, and {groups} groups of K={k} may be of {sizes} channels: "
            "pass the size that the layer was quantized with, such as config={..., 'group_size': "
            "128}"
        )
        assert refused(tensors, "l", "gptq", {"bits": 4, "group_size": 64}) == (
            f"scales have {groups} groups, but K is {k} and config says group_size=64"
        )
    with_index = named("l", leaves | {"g_idx": group_of.astype(np.int32)})
    for about in ({"bits": 4}, config):
        check(ck.linear(with_index, "l", format="gptq", config=about), value)
    order = rng.permutation(k)
    shuffled = named("l", write_gptq(q[:, order], z, s, 4, v2=False, g_idx=group_of[order].astype(
        np.int32)))  # fmt: skip
    for about in ({"bits": 4}, config):
        w, found = ck.act_order(shuffled, "l", config=about)
        check(w, value[:, order][:, found])
    if groups > 1:
        bad = with_index["l.g_idx"].copy()
        bad[-1] += 1
        assert ".g_idx does not give each of" in refused(
            with_index | {"l.g_idx": bad}, "l", "gptq", {"bits": 4}
        )


@pytest.mark.parametrize("size", [True, 0, -2, 1.5, float("nan"), float("inf"), [128], "128"])
def test_group_sizes_that_are_none(rng, size):
    q, z, s, _ = integers(rng, 4, K // 64)
    tensors = named("l", write_gptq(q, z, s, 4, v2=False))
    assert refused(tensors, "l", "gptq", {"bits": 4, "group_size": size}) == (
        f"config says group_size={size!r}, expected a size or -1"
    )


# Writers of other names.

V1, V2 = ("auto_round:auto_gptq", "auto_round:gptq"), ("auto_round", "auto_round:gptqmodel")


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize("packing", V1 + V2)
def test_auto_round_gptq(rng, method, packing):
    """Whether it stores z or z - 1; bits of a layer, by name before patterns."""
    q, z, s, value = integers(rng, 8, K // 32, low=packing in V1)
    tensors = named("l.0.up", write_gptq(q, z, s, 8, v2=packing in V2))
    eight, base = {"bits": 8, "group_size": 32}, {"bits": 4, "group_size": 128, "sym": False}
    base |= {"quant_method": method, "packing_format": packing, "autoround_version": "0.8.0"}
    for extra in (
        {"l.0.up": eight},
        {r".*\.0\..*": eight},
        {"0.up": eight},
        {".*up": {"bits": 16}, "l.0.up": eight},
        {".*down": {"bits": 16}, ".*up": eight, ".*": {"bits": 2}},
    ):
        check(ck.linear(tensors, "l.0.up", format="gptq", config={**base, "extra_config": extra}),
              value)  # fmt: skip
    config = {**base, "extra_config": {"l.0.up": {"bits": 16, "data_type": "fp"}}}
    assert refused(tensors, "l.0.up", "gptq", config) == "config says it is not quantized: bits=16"


def test_auto_round_awq(rng):
    q, z, s, value = integers(rng, 4, K // 128, low=0)
    tensors = named("l", write_awq(q, z, s))
    base = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": False}
    for packing in ("auto_round:auto_awq", "auto_round:awq"):
        config = {**base, "packing_format": packing}
        check(ck.linear(tensors, "l", format="awq", config=config), value)
        assert refused(tensors, "l", "gptq", config) == (
            f"config says packing_format={packing!r}, expected 'auto_round:auto_gptq' or "
            "'auto_round:gptq' or 'auto_round' or 'auto_round:gptqmodel'"
        )
    assert refused(tensors, "l", "awq", base) == (
        "config says no packing_format, expected 'auto_round:auto_awq' or 'auto_round:awq'"
    )


def test_gptqmodel(rng):
    """Both names of the method and of the layout, and those of earlier versions."""
    q, z, s, value = integers(rng, 4, K // 128, low=0)
    config = {
        "bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "method": "gptq",
        "quant_method": "gptq", "format": "gptq_v2", "checkpoint_format": "gptq_v2",
        "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:7.0.0"]},
    }  # fmt: skip
    tensors = named("l", write_gptq(q, z, s, 4, v2=True, g_idx=np.arange(K, dtype=np.int32) // 128))
    check(ck.linear(tensors, "l", format="gptq", config=config), value)
    old = {"wbits": 4, "q_group_size": 128, "format": "gptq_v2"}
    check(ck.linear(tensors, "l", format="gptq", config=old), value)
    for changed, message in (
        ({"method": "awq"}, "config says method='awq', expected 'gptq' or"),
        ({"format": "gptq"}, "config contradicts itself: checkpoint_format='gptq_v2', format='gp"),
        ({"format": "gptq_p"}, "config says format='gptq_p', expected 'gptq' or 'gptq_v2'"),
        ({"wbits": 8}, "config contradicts itself: bits=4, wbits=8"),
        ({"pack_dtype": "int16"}, "config says pack_dtype='int16', expected 'int32'"),
    ):
        assert refused(tensors, "l", "gptq", config | changed).startswith(message)
    tensors = named("l", write_awq(q, z, s))
    config |= {"method": "awq", "quant_method": "awq", "zero_point": True}
    gemm = {"format": "gemm", "checkpoint_format": "gemm"}
    check(ck.linear(tensors, "l", format="awq", config=config | gemm), value)
    for name in ("gemv", "gemv_fast", "llm-awq", "marlin"):
        said = refused(tensors, "l", "awq", config | {"format": name, "checkpoint_format": name})
        assert said == f"config says format={name!r}, expected 'gemm' or 'GEMM'"
    said = refused(tensors, "l", "awq", config | gemm | {"backend": "llm-awq"})
    assert said == "config says backend='llm-awq', expected 'autoawq'"


# Experts that are stacked.


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1), (2, 1, 1), (2, 2), (2, 2, 1)])
def test_stacked_nvfp4(rng, transposed, shape):
    """With the axes of each kind of model, and scales of a tensor, an expert, and gate and up."""
    q = rng.integers(0, 16, (2, N, K))
    s = rng.integers(1, 0x7F, (2, N, K // 16)).astype(np.uint8).view(E4M3)
    scale = rng.uniform(1e-4, 1e-3, shape).astype(F32)
    per_row = scale.reshape(2, -1) if scale.size > 1 else np.full((2, 1), scale.reshape(()))
    per_row = np.repeat(per_row, N // per_row.shape[1], 1)
    value = E2M1[q] * np.repeat(s.astype(F64), 16, 2) * per_row[..., None]
    axes = (0, 2, 1) if transposed else (0, 1, 2)
    leaves = {
        "": pairs(q).transpose(axes), "_weight_scale": s.transpose(axes),
        "_weight_scale_2": scale, "_input_scale": F32(1), "_bias": np.ones((2, N)),
    }  # fmt: skip
    tensors = named("mlp.experts.gate_up_proj", leaves, "")
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    w = ck.experts(tensors, "mlp.experts.gate_up_proj", format="modelopt", config=config)
    check(w, value)
    same(w.weight, ck.experts(tensors, "mlp.experts.gate_up_proj", format="modelopt").weight)
    # gpt-oss' rows are gate's and up's by turns.
    whole = {"model_type": "gpt_oss", "quantization_config": config}
    if len(shape) > 1 and shape[1] == 2:
        assert "not gate and up by turns" in refused(
            tensors, "mlp.experts.gate_up_proj", "modelopt", whole, "experts"
        )
    else:
        w = ck.experts(tensors, "mlp.experts.gate_up_proj", format="modelopt", config=whole)
        check(w, np.concatenate([value[:, ::2], value[:, 1::2]], 1))
        tensors = named("experts.down_proj", leaves, "")
        check(ck.experts(tensors, "experts.down_proj", format="modelopt", config=whole), value)


def test_stacked_nvfp4_errors(rng):
    leaves = {
        "": np.zeros((2, 8, 16), np.uint8), "_weight_scale": np.ones((2, 8, 2), E4M3),
        "_weight_scale_2": F32(1),
    }  # fmt: skip

    def message(**changed):
        tensors = named("experts.down_proj", leaves | changed, "")
        tensors = {name: x for name, x in tensors.items() if x is not None}
        return refused(tensors, "experts.down_proj", "modelopt", None, "experts")

    assert message(_weight_scale=np.ones((2, 8, 3), E4M3)) == (
        "_weight_scale has shape (2, 8, 3), expected (G, N, K/16) = (2, 8, 2) of (G, N, K/2) = "
        "(2, 8, 16), or (G, K/16, N) = (2, 1, 16) of (G, K/2, N)"
    )
    assert message(_weight_scale_2=np.ones(3, F32)) == (
        "_weight_scale_2 has shape (3,), expected one number, or (G,) or (G, 2)"
    )
    assert message(_weight_scale_2=np.array([1, np.nan], F32)) == (
        "_weight_scale_2 = of 2 numbers gives no finite scale"
    )
    assert message(_weight_scale=-leaves["_weight_scale"]) == "_weight_scale holds negative scales"
    assert message(_pre_quant_scale=np.ones(3)) == (
        "tensor 'experts.down_proj_pre_quant_scale' is not known to format 'modelopt'"
    )
    assert message(_weight_scale_2=None) == (
        "no tensor 'experts.down_proj_weight_scale_2', which format 'modelopt' (NVFP4 experts, "
        "stacked) needs"
    )
    assert message(**{"": leaves[""].astype(np.int8).view(E4M3)}).startswith(
        "FP8 experts, stacked (_weight_scale) is not read. Formats that are read: 'mlx' ("
    )


# Formats that are not read.

FP8 = np.ones((8, 32), E4M3)
UNREAD = {
    "bitsandbytes, 4 bits": {".weight": FP8, ".weight.absmax": FP8, ".weight.quant_map": FP8},
    "bitsandbytes, 8 bits": {".weight": FP8, ".SCB": FP8},
    "HQQ": {".W_q": FP8, ".meta": FP8},
    "EXL2": {".q_weight": FP8, ".q_scale": FP8, ".q_groups": FP8},
    "EXL3": {".trellis": FP8, ".suh": FP8, ".svh": FP8},
    "marlin-24": {".weight_packed": FP8, ".meta": FP8, ".scale_packed": FP8},
    "AQLM": {".codes": FP8, ".codebooks": FP8, ".scales": FP8},
    "Marlin": {".B": FP8, ".s": FP8},
    "QQQ": {".B": FP8, ".s_channel": FP8, ".s_group": FP8},
}  # fmt: skip


@pytest.mark.parametrize("format", ["awq", "compressed-tensors", "modelopt"])
@pytest.mark.parametrize("name", UNREAD)
def test_unread_tensors(name, format):
    tensors = named("l", UNREAD[name], "")
    assert refused(tensors, "l", format, None) == f"{name} is not read. {READ}"


def test_unread_methods():
    tensors = named("l", UNREAD["HQQ"], "")
    config = {"quantization_config": {"quant_method": "fbgemm_fp8"}}
    assert refused(tensors, "l", "modelopt", config) == (
        f"config says quant_method='fbgemm_fp8': FBGEMM FP8 is not read. {READ}"
    )
    for method in ("hqq", "bitsandbytes", 3):
        assert refused(tensors, "l", "awq", {"quant_method": method}) == (
            f"config says quant_method={method!r}: a format that is not read. {READ}"
        )


def test_rotated_inputs(rng):
    """A weight that is one only together with a rotation of x is refused."""
    q, z, s, value = integers(rng, 4, K // 128)
    tensors = named("l", write_gptq(q, z, s, 4, v2=False))
    base = {"bits": 4, "group_size": 128}
    for key, said in (("rotation", "hadamard"), ("rotation_config", {"block_size": 32})):
        assert refused(tensors, "l", "gptq", {**base, key: said}) == (
            f"config says {key}={said!r}: inputs of layers are rotated, which is not read"
        )
        check(ck.linear(tensors, "l", format="gptq", config={**base, key: None}), value)
    tensors = named("l", nvfp4(rng, "compressed-tensors", 1.0)[0])

    def config(*places):
        apply = [{"targets": ["Linear"], "location": place} for place in places]
        groups = {"R": {"type": "hadamard", "apply": apply}}
        return {"format": "nvfp4-pack-quantized", "transform_config": {"config_groups": groups}}

    read = lambda about: ck.linear(tensors, "l", format="compressed-tensors", config=about)
    assert read(config("weight_input", "weight_output", "q_attn", "k_cache")).shape == (N, K)
    assert read({"transform_config": {"config_groups": {}}}).shape == (N, K)
    for place in ("input", "output", 3):
        said = refused(tensors, "l", "compressed-tensors", config("weight_input", place))
        assert said == (
            f"config says transform_config with location={place!r}: inputs or outputs of layers "
            "are transformed, which is not read"
        )
    for groups in ({"R": 3}, {"R": {"apply": 3}}, {"R": {"apply": [3]}}):
        config = {"transform_config": {"config_groups": groups}}
        assert "location=None" in refused(tensors, "l", "compressed-tensors", config)


def test_another_format_that_is_read(rng):
    """It is named."""
    leaves, _ = nvfp4(rng, "modelopt", 1.0)
    said = refused(named("l", leaves), "l", "compressed-tensors", None)
    assert said == (
        "no tensor 'l.weight_packed', 'l.weight_global_scale', which format 'compressed-tensors' "
        "(nvfp4-pack-quantized) needs: its tensors are those of 'modelopt' (NVFP4)"
    )
    q, z, s, _ = integers(rng, 4, K // 128)
    said = refused(named("l", write_awq(q, z, s)), "l", "modelopt", None)
    assert said.endswith("its tensors are those of 'awq'")


def test_messages_are_short(rng):
    long = "x" * 1_000_000
    leaves, _ = nvfp4(rng, "modelopt", 1.0)
    tensors = named(long, leaves) | named("l", leaves) | {f"l.{long}": np.ones(1)}
    for prefix, config in (
        (long, {"quant_algo": long}),
        ("l", {"ignore": long}),
        ("l", {"ignore": ["re:" + "(" * 100_000]}),
        ("l", {"quant_method": long}),
        ("l", {"group_size": 10**5000}),
        ("l", None),
        ("y" * 1_000_000, None),
        (long, {"quant_algo": "MIXED_PRECISION", "quantized_layers": {long: [long]}}),
    ):
        with pytest.raises(ValueError, match=r"^jgg\.checkpoints\.linear: ") as error:
            ck.linear(tensors, prefix, format="modelopt", config=config)
        assert len(str(error.value)) < 2000
