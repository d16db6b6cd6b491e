"""Checkpoints that are refused: tensors, configs and arguments."""

import numpy as np
import pytest
from checkpoint_writers import BF16, E4M3, F16, F32, F64, named

import jax_groupgemm as jgg

ck = jgg.checkpoints
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
FOURS = {"bits": 4, "group_size": 64}
READ = (
    "'mlx' (affine, mxfp4, mxfp8, nvfp4); 'awq' (gemm, 4 bits); 'gptq' (2, 3, 4, 8 bits, v1 and "
    "v2); 'compressed-tensors' (nvfp4-pack-quantized, pack-quantized, int-quantized, "
    "mxfp4-pack-quantized, mxfp8-quantized, float-quantized); 'modelopt' (NVFP4, NVFP4 experts, "
    "stacked, FP8); 'gpt-oss' (MXFP4); 'fp8' (fine-grained, a scale for each layer or row)"
)
KINDS = (
    "'nvfp4-pack-quantized' or 'pack-quantized' or 'int-quantized' or 'mxfp4-pack-quantized' or "
    "'mxfp8-quantized' or 'float-quantized'"
)

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
    ("awq", {"scales": ONES[:1].repeat(3, 0), "qzeros": WORDS[:3]}, None,
     "a: scales have 3 groups, but K is 128"),
    ("gptq", {"scales": ONES[:1].repeat(3, 0), "qzeros": WORDS[:3]}, {"bits": 4, "group_size": 48},
     "a: group_size=48 of K=128 is not a multiple of 32"),
    ("awq", {}, {"group_size": 128},
     "a: scales have 2 groups, but K is 128 and config says group_size=128"),
    ("awq", {}, {"group_size": 64, "q_group_size": 128},
     "a: config contradicts itself: group_size=64, q_group_size=128"),
    ("awq", {}, {"version": "gemv"},
     "a: config says version='gemv', expected 'gemm' or 'GEMM'"),
    ("awq", {}, {"quant_method": "gptq"},
     "a: config says quant_method='gptq', expected 'awq' or 'auto-round' or 'intel/auto-round'"),
    ("awq", {}, {"quantization_config": {"zero_point": False}},
     "a: config says zero_point=False, expected True"),
    ("awq", {"scales": ONES.astype(F32) / 3}, None,
     "a: .scales hold values whose products with 4-bit codes are not exact in float32"),
    ("awq", {"scales": np.where(np.eye(2, 32), F16(np.inf), ONES)}, None,
     "a: .scales hold values whose products with 4-bit codes are not exact in float32"),
    ("awq", {"scales": ONES.astype(BF16) * BF16(1e-38)}, None,
     "a: .scales hold values whose products with 4-bit codes are not exact in float32"),
    ("gptq", {}, None,
     "format 'gptq' needs config for its bits, group_size and checkpoint_format: pass config="
     "jgg.checkpoints.read_json(path), of the checkpoint's config.json"),
    ("gptq", {}, {},
     "a: config says no bits: pass the checkpoint's config.json, or config={..., 'bits': 4}, which "
     "fits .qzeros"),
    ("gptq", {"qzeros": WORDS[:2, :1]}, {},
     "a: config says no bits: pass the checkpoint's config.json"),
    ("gptq", {}, FOUR,
     "a: config says no group_size, and 2 groups of K=128 may be of 64 to 127 channels: pass the "
     "size that the layer was quantized with, such as config={..., 'group_size': 64}"),
    ("gptq", {"scales": ONES[:1].repeat(100, 0), "qzeros": WORDS[:100]}, FOUR,
     "a: scales have 100 groups, but K is 128"),
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
    ("gptq", {"qzeros": WORDS[:2] - 1}, FOURS,
     "a: .qzeros of format v1 holds 15, which libraries read as a zero point of 0, of 16, or as a "
     "borrow from its neighbour: convert it to gptq_v2"),
    ("gptq", {"qzeros": np.full((2, 4), 0x77777777, np.int32)},
     {**FOURS, "sym": True, "checkpoint_format": "gptq_v2"},
     "a: config says sym=True, but .qzeros gives zero points other than 8: is checkpoint_format "
     "right?"),
    ("gptq", {"qzeros": np.full((2, 4), 0x77777777, np.int32), "scales": ONES * F16(9000)},
     {**FOURS, "sym": True},
     "a: .scales hold values too large for zero points in float16"),
    ("mlx", {}, None,
     "format 'mlx' needs config for its bits, group_size and mode: pass config="
     "jgg.checkpoints.read_json(path), of the checkpoint's config.json"),
    ("mlx", {}, {"a": False},
     "a: config says it is not quantized"),
    ("mlx", {}, {"quant_method": "awq"},
     "a: config says quant_method='awq', expected nothing"),
    ("mlx", {}, {"bits": 4, "group_size": 128},
     "a: config says bits=4, group_size=128, which is 512 bits a group, but .weight has 16 words "
     "for the 2 groups of .scales, 256 bits a group, as of bits=2, group_size=128 or bits=4, "
     "group_size=64 or bits=8, group_size=32"),
    ("mlx", {}, {"bits": 8},
     "a: config says bits=8, group_size=64, which is 512 bits a group, but .weight has 16 words "
     "for the 2 groups of .scales, 256 bits a group, as of bits=2, group_size=128 or bits=4, "
     "group_size=64 or bits=8, group_size=32"),
    ("mlx", {"scales": np.ones((8, 3), np.uint8), "biases": None}, {"mode": "mxfp4"},
     "a.scales has shape (8, 3), expected (N, K/group_size) = (8, 4) because .weight has 16 words "
     "a row, bits=4 and group_size=32"),
    ("mlx", {"scales": np.ones((8, 8), np.uint8), "biases": None}, {"mode": "mxfp4"},
     "a: config says bits=4, group_size=32, which is 128 bits a group, but .weight has 16 words "
     "for the 8 groups of .scales, 64 bits a group, as of no format of mode 'mxfp4'"),
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
    ("modelopt", {}, {"quant_algo": "FP8_PB_WO"},
     "a: config says quant_algo='FP8_PB_WO', expected 'NVFP4' or 'W4A16_NVFP4' or 'FP8' or "
     "'FP8_PER_CHANNEL_PER_TOKEN' or 'MIXED_PRECISION'"),
    ("modelopt", {}, {"quant_algo": "FP8"},
     "a: tensor 'a.weight_scale_2' is not known to format 'modelopt'"),
    ("modelopt", {},
     {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "MXFP8"}}},
     "a: config says quant_algo='MXFP8', expected 'NVFP4' or 'W4A16_NVFP4' or 'FP8' or "
     "'FP8_PER_CHANNEL_PER_TOKEN'"),
    ("compressed-tensors", {"weight_global_scale": np.zeros(1, F32)}, None,
     "a: .weight_global_scale = 0.0 gives no finite scale"),
    ("compressed-tensors", {}, {"format": "naive-quantized"},
     f"a: config says format='naive-quantized', expected {KINDS} or 'mixed-precision'"),
    ("compressed-tensors", {}, {"format": "float-quantized"},
     "a: no tensor 'a.weight', which format 'compressed-tensors' (float-quantized) needs: its "
     "tensors are those of 'compressed-tensors' (nvfp4-pack-quantized)"),
    ("compressed-tensors", {}, {"format": "pack-quantized"},
     "a: no tensor 'a.weight_shape', which format 'compressed-tensors' (pack-quantized) needs: its "
     "tensors are those of 'compressed-tensors' (nvfp4-pack-quantized)"),
    ("compressed-tensors", {},
     {"format": "nvfp4-pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
     "a: config says num_bits=8, expected 4"),
    # Configs that contradict the layer.
    ("gptq", {}, {**FOUR, "desc_act": True},
     "a: config says desc_act=True, but there is no tensor 'a.g_idx' that gives each channel its "
     "group"),
    ("gptq", {}, {**FOUR, "dynamic": {"+:a": {"desc_act": True, "static_groups": False}}},
     "a: config says desc_act=True, but there is no tensor 'a.g_idx' that gives each channel its "
     "group"),
    ("gptq", {}, {**FOUR, "desc_act": "yes"},
     "a: config says desc_act='yes', expected True or False"),
    ("compressed-tensors", {}, {"config_groups": {"g": {
        "weights": {"num_bits": 8, "type": "int", "group_size": 128}}}},
     "a: config says num_bits=8, expected 4"),
    ("compressed-tensors", {}, {"config_groups": {"g": {"targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int"}}}},
     "a: config says type='int', expected 'float'"),
    ("compressed-tensors", {}, {"format": "mixed-precision", "config_groups": {
        "g": {"targets": ["Linear"], "weights": {"num_bits": 4}},
        "h": {"targets": ["re:.*a$"], "weights": {"num_bits": 4, "group_size": 32}}}},
     "a: config says group_size=32, expected 16"),
    ("compressed-tensors", {}, {"format": "mixed-precision", "config_groups": {
        "g": {"targets": ["Linear"], "format": "naive-quantized"}}},
     f"a: config says format='naive-quantized', expected {KINDS}"),
    ("compressed-tensors", {}, {"ignore": ["lm_head", "a"]},
     "a: config says it is not quantized: ignore 'a'"),
    ("compressed-tensors", {}, {"ignore": ["re:[a-z]$"]},
     "a: config says it is not quantized: ignore 're:[a-z]$'"),
    ("modelopt", {}, {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "a"]},
     "a: config says it is not quantized: exclude_modules 'a'"),
    ("modelopt", {}, {"quant_algo": "NVFP4", "ignore": ["a*"]},
     "a: config says it is not quantized: ignore 'a*'"),
    ("modelopt", {}, {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"b": {}}},
     "a: config says it is not quantized: quantized_layers do not name it"),
    ("awq", {}, {"modules_to_not_convert": ["gate", "a"]},
     "a: config says it is not quantized: modules_to_not_convert 'a'"),
    # Configs that are malformed.
    ("gptq", {}, {**FOUR, "dynamic": [1]},
     "a: config says dynamic=[1], expected a dict"),
    ("gptq", {}, {**FOUR, "dynamic": {"+:a": None}},
     "a: config says dynamic['+:a']=None, expected a dict"),
    ("compressed-tensors", {}, {"config_groups": [3]},
     "a: config says config_groups=[3], expected a dict"),
    ("compressed-tensors", {}, {"config_groups": {"g": 3}},
     "a: config says config_groups['g']=3, expected a dict"),
    ("compressed-tensors", {}, {"config_groups": {"g": {"weights": [4]}}},
     "a: config says weights=[4], expected a dict"),
    ("compressed-tensors", {}, {"config_groups": {"g": {"targets": "Linear"}}},
     "a: config says targets='Linear', expected a list of names"),
    ("compressed-tensors", {}, {"ignore": "a"},
     "a: config says ignore='a', expected a list of names"),
    ("compressed-tensors", {}, {"ignore": ["re:("]},
     "a: config's ignore pattern 're:(': missing ), unterminated subpattern at position 0"),
    ("modelopt", {}, {"quant_algo": "MIXED_PRECISION", "quantized_layers": ["a"]},
     "a: config says quantized_layers=['a'], expected a dict"),
    ("modelopt", {}, {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": None}},
     "a: config says quantized_layers['a']=None, expected a dict"),
    ("modelopt", {}, {"exclude_modules": [3]},
     "a: config says exclude_modules=[3], expected a list of names"),
    ("awq", {}, {"modules_to_not_convert": {"a": True}},
     "a: config says modules_to_not_convert={'a': True}, expected a list of names"),
    ("mlx", {}, {"a": 3},
     "a: config says a=3, expected a dict"),
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
    (lambda: ck.linear(AWQ, "a", format="ggml"),
     "linear: format='ggml' is not one of 'mlx', 'awq', 'gptq', 'compressed-tensors', 'modelopt', "
     "'gpt-oss', 'fp8', 'gguf'"),
    (lambda: ck.linear(AWQ, "a", format="awq", config="gemm"),  # pyright: ignore
     "linear: config must be a dict, got 'gemm'"),
    (lambda: ck.linear(AWQ, "a", format=["awq"]),  # pyright: ignore
     "linear: format=['awq'] is not one of 'mlx', 'awq', 'gptq', 'compressed-tensors', 'modelopt', "
     "'gpt-oss', 'fp8', 'gguf'"),
    (lambda: ck.linear([AWQ], "a", format="awq"),  # pyright: ignore
     "linear: tensors must be a mapping of names to arrays, got list"),
    (lambda: ck.linear({**AWQ, 3: 1}, "a", format="awq"),  # pyright: ignore
     "linear: names of tensors must be str, got 3"),
    (lambda: ck.linear({**AWQ, "a.scales": [[1], [2, 3]]}, "a", format="awq"),
     "linear: a.scales must be an array, got list: setting an array element with a sequence. The "
     "requested array has an inhomogeneous shape after 1 dimensions. The detected shape was (2,) + "
     "inhomogeneous part."),
    (lambda: ck.linear({**MLX, "a.scales": [[1], [2, 3]]}, "a", format="mlx", config=FOURS),
     "linear: a.scales must be an array, got list: setting an array element with a sequence. The "
     "requested array has an inhomogeneous shape after 1 dimensions. The detected shape was (2,) + "
     "inhomogeneous part."),
    (lambda: ck.linear(GPTQ, "a", format="gptq", config={"dynamic": {3: {}}}),
     "linear: a: config says dynamic={3: {}}, expected names"),
    (lambda: ck.linear(AWQ, 3, format="awq"),  # pyright: ignore
     "linear: a prefix must be a name or a sequence of names, got 3"),
    (lambda: ck.linear(AWQ, [1], format="awq"),  # pyright: ignore
     "linear: a prefix must be a name, got 1"),
    (lambda: ck.experts(AWQ, [None], format="awq"),  # pyright: ignore
     "experts: a prefix must be a name or a sequence of names, got None"),
    (lambda: ck.act_order(GPTQ, 3, config=FOUR),  # pyright: ignore
     "act_order: a prefix must be a name or a sequence of names, got 3"),
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
     "group_size=16, weight=uint32[8,8], scales=uint8[8,4], global_scale=float32[]): they "
     "are no one weight, read them one by one"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_call_errors(call, message):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert str(error.value) == f"jgg.checkpoints.{message}"
