"""Make tests/decoder/fixtures: tiny random models of transformers, and the logits that it computes.

    python tools/make_decoder_fixtures.py    # needs torch and transformers; the tests need neither

Each folder is what ``save_pretrained`` writes, in bfloat16. ``logits.npz`` has a prompt, and the
float32 logits of its tokens and of 16 greedy steps after it, computed with the same weights.
``tokenizer.json`` has a token for each byte, and config.json says that weights are random.

In ``qwen3_moe_fp8`` linear layers are what ``Fp8Quantize`` of transformers makes of each, in files
like those of Qwen3-30B-A3B-FP8; transformers reads them, dequantizes and computes the logits. Its
own ``save_pretrained`` of such a model has codes of each expert beside scales of all of them, which
it does not read again (5.24).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))

from decoder import tiny  # noqa: E402

FIXTURES = ROOT / "tests" / "decoder" / "fixtures"
PROMPT, STEPS = 13, 16
COMMON = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "num_experts_per_tok": 2,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
MODELS = {
    "mixtral": ("Mixtral", {
        "intermediate_size": 32, "num_local_experts": 4, "sliding_window": 7,
    }),
    "qwen2_moe": ("Qwen2Moe", {  # a layer of each kind: with experts, and without
        "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "intermediate_size": 64, "mlp_only_layers": [1], "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    }),
    "qwen3_moe": ("Qwen3Moe", {
        "num_experts": 4, "moe_intermediate_size": 32, "intermediate_size": 64, "head_dim": 16,
        "norm_topk_prob": True,
    }),
    "olmoe": ("Olmoe", {
        "num_experts": 4, "intermediate_size": 32, "norm_topk_prob": False, "clip_qkv": 1.5,
        "num_key_value_heads": 4,
    }),
    "gpt_oss": ("GptOss", {
        "num_local_experts": 4, "intermediate_size": 32, "head_dim": 16, "sliding_window": 6,
        "rope_parameters": YARN | {"rope_theta": 1_000.0, "truncate": False},
    }),
    "deepseek_v3": ("DeepseekV3", {
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 32, "intermediate_size": 64,
        "n_shared_experts": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
        "num_experts_per_tok": 3, "routed_scaling_factor": 1.7,
        "rope_parameters": YARN | {"rope_theta": 1_000.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    }),
    "glm4_moe": ("Glm4Moe", {
        "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 32, "intermediate_size": 64, "n_shared_experts": 1,
        "head_dim": 16, "num_experts_per_tok": 3, "routed_scaling_factor": 1.75,
        "attention_bias": True, "use_qk_norm": True, "num_mtp_layers": 0,
        "rope_parameters": YARN | {"rope_theta": 1_000.0, "partial_rotary_factor": 0.5},
    }),
    "minimax_m2": ("MiniMaxM2", {
        "num_hidden_layers": 1, "num_local_experts": 8, "intermediate_size": 32, "head_dim": 16,
        "rotary_dim": 8,
    }),
    "granitemoeshared": ("GraniteMoeShared", {
        "num_hidden_layers": 1, "num_local_experts": 4, "intermediate_size": 32,
        "shared_intermediate_size": 64, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.625, "attention_multiplier": 0.25, "logits_scaling": 1.75,
    }),
    "ernie4_5_moe": ("Ernie4_5_Moe", {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "intermediate_size": 64,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }),
}  # fmt: skip
MODELS["qwen3_moe_fp8"] = MODELS["qwen3_moe"]
FP8 = {"qwen3_moe_fp8": transformers.FineGrainedFP8Config(weight_block_size=[16, 16])}


def fill(model: torch.nn.Module) -> None:
    """Random numbers of bfloat16 everywhere, also where models begin with ones and zeros."""
    generator = torch.Generator().manual_seed(0)
    tensors = dict(model.named_parameters()) | {
        name: b for name, b in model.named_buffers() if name.endswith("correction_bias")
    }
    for name, tensor in sorted(tensors.items()):
        values = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif tensor.ndim == 1 or "bias" in name:
            values = 0.3 * values
        elif "embed" not in name:  # inputs of a product are as many as its last axis, about
            values = values / tensor.shape[-1] ** 0.5
        with torch.no_grad():
            tensor.copy_(values.to(torch.bfloat16))


def logits(model: torch.nn.Module, prompt: torch.Tensor) -> dict[str, np.ndarray]:
    """Those of the prompt, of each step after it, and the tokens that were chosen."""
    out = model(prompt, use_cache=True)
    first, steps, tokens = out.logits[0], [], []
    for _ in range(STEPS):
        token = out.logits[:, -1:].argmax(-1)
        tokens.append(int(token))
        out = model(token, use_cache=True, past_key_values=out.past_key_values)
        steps.append(out.logits[0, -1])
    return {
        "prompt": prompt[0].numpy().astype(np.int32), "logits": first.numpy(),
        "tokens": np.array(tokens, np.int32), "steps": torch.stack(steps).numpy(),
    }  # fmt: skip


def quantize(folder: Path, config: transformers.FineGrainedFP8Config) -> None:
    """Rewrite the folder's linear layers, and say so in config.json."""
    to_fp8 = Fp8Quantize(FineGrainedFP8HfQuantizer(config)).convert
    weights, size = {}, 0
    for path in sorted(folder.glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(path).items():
            is_linear = re.search(r"_proj\.weight$", name)
            tensors |= to_fp8({name: tensor}) if is_linear else {name: tensor}
        save_file(tensors, path, metadata={"format": "pt"})
        weights |= dict.fromkeys(tensors, path.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index, about = folder / "model.safetensors.index.json", folder / "config.json"
    said = json.loads(index.read_text())
    said["metadata"]["total_size"] = size
    said["weight_map"] = dict(sorted(weights.items()))
    index.write_text(json.dumps(said, indent=2) + "\n")
    said = json.loads(about.read_text()) | {"quantization_config": config.to_dict()}
    about.write_text(json.dumps(said, indent=2) + "\n")


def complete(folder: Path) -> None:
    """What generate.py reads besides: a tokenizer, and that the text will mean nothing."""
    tiny.tokenizer().save(str(folder / "tokenizer.json"))
    path = folder / "config.json"
    said = json.loads(path.read_text()) | {"random_weights": True}
    path.write_text(json.dumps(said, indent=2) + "\n")


def main(names: list[str]) -> None:
    torch.set_grad_enabled(False)
    for name in names or MODELS:
        kind, own = MODELS[name]
        config = getattr(transformers, f"{kind}Config")(**(COMMON | own))
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
        fill(model)
        prompt = torch.randint(256, (1, PROMPT), generator=torch.Generator().manual_seed(1))
        folder = FIXTURES / name
        shutil.rmtree(folder, ignore_errors=True)
        if name not in FP8:
            values = logits(model, prompt)
        # Several files and an index, as real checkpoints have them.
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
        if name in FP8:  # on a CPU transformers dequantizes what it reads
            quantize(folder, FP8[name])
            load = transformers.AutoModelForCausalLM.from_pretrained
            read = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
            assert all(p.dtype == torch.float32 for p in read.parameters())
            values = logits(read, prompt)
        complete(folder)
        np.savez_compressed(folder / "logits.npz", **values)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name}: {size / 1e3:.0f} kB, tokens {values['tokens'].tolist()}")


if __name__ == "__main__":
    main(sys.argv[1:])
