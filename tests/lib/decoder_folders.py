"""Checkpoint folders of the decoder's fixtures, with their linear layers quantized, and beside each
one whose weights are the values that the quantized ones stand for."""

import json
import re
import shutil
from pathlib import Path

import fp8_oracle
import numpy as np
from checkpoint_writers import (
    BF16,
    E2M1,
    E4M3,
    F16,
    F32,
    F64,
    named,
    pairs,
    save,
    write_awq,
    write_gptq,
    write_mlx,
    write_pack_quantized,
)  # fmt: skip

import jax_groupgemm as jgg

FIXTURES = Path(__file__).parents[1] / "decoder" / "fixtures"
GROUP = 32
LAYER = re.compile(r"model\.layers\.\d+\..*(_proj|_proj_with_mqa|\.w[123])$")


def integers(w, z=None):
    """4-bit codes, zero points and scales of (N, K) weights, in groups of 32, and their values."""
    rows = w.reshape(len(w), -1, GROUP)
    low, high = rows.min(-1), rows.max(-1)
    s = ((high - low) / 14).astype(F16)
    z = np.clip(np.round(-low / s.astype(F32)), 1, 15).astype(int) if z is None else 0 * low + z
    z = z.astype(int)
    codes = np.clip(np.round(rows / s.astype(F32)[..., None]) + z[..., None], 0, 15).astype(int)
    value = ((codes - z[..., None]) * s.astype(F64)[..., None]).reshape(w.shape)
    return codes.reshape(w.shape), z, s, value


def mlx(w):
    codes, z, s, value = integers(w)
    s = s.astype(F32)
    return write_mlx(codes, 4, s, (-z * s).astype(F32)), value


def awq(w):
    codes, z, s, value = integers(w)
    return write_awq(codes, z, s), value


def gptq(w):
    codes, z, s, value = integers(w)
    return write_gptq(codes, z, s, 4, v2=False), value


def pack_quantized(w):
    codes, _, s, value = integers(w, z=8)
    return write_pack_quantized(codes, None, s, 4), value


def nearest(w, s):
    """Codes of e2m1 numbers, each a multiple of the scale of its group, and values."""
    scales = np.repeat(s, w.shape[-1] // s.shape[-1], axis=-1)
    codes = np.abs(w[..., None] - E2M1 * scales[..., None]).argmin(-1)
    return codes, E2M1[codes] * scales


def nvfp4(w):
    """Bytes of codes, scales, the global scale, a power of two, and values."""
    scale = F32(2.0 ** np.ceil(np.log2(np.abs(w).max() / 2688)))
    s = (np.abs(w.reshape(len(w), -1, 16)).max(-1) / 6 / scale).astype(E4M3)
    codes, value = nearest(w, s.astype(F64) * scale)
    return pairs(codes), s, scale, value


def modelopt(w):
    codes, scales, scale, value = nvfp4(w)
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": scale}, value


def nvfp4_pack_quantized(w):
    codes, scales, scale, value = nvfp4(w)
    leaves = {"weight_packed": codes, "weight_scale": scales}
    return leaves | {"weight_global_scale": np.array([1 / scale], F32)}, value


def fp8(w, block=(32, 32)):
    codes, s = fp8_oracle.quantize(w, block)
    return {"weight": codes, "weight_scale_inv": s}, fp8_oracle.dequantize(codes, s, block)


def fp8_cut(w):
    """No axis of a layer is whole blocks along K, and some have cut ones along N."""
    return fp8(w, CUT)


def float_quantized(w):
    """A scale for each row, in bfloat16."""
    s = (np.abs(w).max(-1, keepdims=True) / 448).astype(BF16)
    codes = np.clip(w / s.astype(F32), -448, 448).astype(E4M3)
    return {"weight": codes, "weight_scale": s}, codes.astype(F64) * s.astype(F64)


CUT = (32, 24)
_INTEGERS = {"num_bits": 4, "type": "int", "group_size": GROUP, "strategy": "group",
             "symmetric": True}  # fmt: skip
_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
#: A writer of one layer, and what config.json says.
FORMATS = {
    "mlx": (mlx, {"quantization": {"bits": 4, "group_size": GROUP}}),
    "awq": (awq, {"quantization_config": {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
        "version": "gemm",
    }}),
    "gptq": (gptq, {"quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False,
    }}),
    "pack-quantized": (pack_quantized, {"quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INTEGERS}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }}),
    "nvfp4-pack-quantized": (nvfp4_pack_quantized, {"quantization_config": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }}),
    "modelopt": (modelopt, {"quantization_config": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
        "exclude_modules": ["lm_head", "*mlp.gate"],
    }}),
    "fp8": (fp8, {"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [32, 32],
        "modules_to_not_convert": ["lm_head", "gate", "e_score_correction_bias"],
    }}),
    "float-quantized": (float_quantized, {"quantization_config": {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _ROWS}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }}),
    "fp8-cut": (fp8_cut, {"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [*CUT], "fmt": "e4m3",
        "activation_scheme": "dynamic",
    }}),
}  # fmt: skip
#: The fixture that is quantized.
MODEL = dict.fromkeys(FORMATS, "qwen3_moe") | {
    "fp8-cut": "deepseek_v3", "fp8": "minimax_m2", "float-quantized": "glm4_moe",
}  # fmt: skip


def logits(name):
    """Prompt, logits, tokens and steps as transformers computed them."""
    with np.load(FIXTURES / name / "logits.npz") as arrays:
        return {key: arrays[key] for key in arrays}


def tensors_of(name):
    read = jgg.checkpoints.open(FIXTURES / name)
    return {key: read[key] for key in read}


def write(folder, tensors, config):
    folder.mkdir()
    save(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def copied(name, folder):
    """A fixture, to be changed."""
    return Path(shutil.copytree(FIXTURES / name, folder / name))


def change(folder, **values):
    """Keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def config_of(name, **more):
    return json.loads((FIXTURES / name / "config.json").read_text()) | more


def older_config_of(name):
    """With the keys of transformers 4."""
    values = config_of(name)
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": values.pop("dtype")}
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if name in ("qwen2_moe", "qwen3_moe", "olmoe") and "num_local_experts" in values:
        values["num_experts"] = values.pop("num_local_experts")
    return values


def quantized(name, format, folder):
    """Two folders: a fixture in a format, and with that one's values in float32."""
    writer, said = FORMATS[format]
    stored, plain = {}, {}
    for key, value in tensors_of(name).items():
        prefix = key.removesuffix(".weight")
        embeds = format == "mlx" and prefix in ("lm_head", "model.embed_tokens")
        if not LAYER.fullmatch(prefix) and not embeds:
            stored[key] = plain[key] = value
            continue
        leaves, values = writer(value.astype(F32))
        stored |= named(prefix, leaves)
        plain[key] = values.astype(F32)
    if format == "mlx":
        stored = in_one_tensor(stored)
    config = config_of(name)
    return write(folder / "stored", stored, config | said), write(folder / "plain", plain, config)


def in_one_tensor(tensors):
    """MLX's names: all experts of a layer."""
    out, parts = {}, {}
    for key, value in tensors.items():
        found = re.fullmatch(r"(.*\.mlp)\.experts\.(\d+)\.(.*)", key)
        if found:
            parts.setdefault(f"{found[1]}.switch_mlp.{found[3]}", {})[int(found[2])] = value
        else:
            out[key] = value
    return out | {key: np.stack([of[e] for e in sorted(of)]) for key, of in parts.items()}


def gpt_oss_mxfp4(folder):
    """As OpenAI stores it: experts alone, transposed, their gate and up by turns."""
    stored, plain = {}, {}
    for key, value in tensors_of("gpt_oss").items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            stored[key] = plain[key] = value
            continue
        w = value.astype(F64).swapaxes(1, 2)
        largest = np.abs(w.reshape(*w.shape[:2], -1, GROUP)).max(-1)
        exponents = np.ceil(np.log2(largest / 6))
        codes, values = nearest(w, 2.0**exponents)
        stored[key + "_blocks"] = pairs(codes).reshape(*exponents.shape, 16)
        stored[key + "_scales"] = (exponents + 127).astype(np.uint8)
        plain[key] = values.astype(F32).swapaxes(1, 2)
    said = {"quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }}  # fmt: skip
    return (
        write(folder / "stored", stored, config_of("gpt_oss", **said)),
        write(folder / "plain", plain, config_of("gpt_oss")),
    )
