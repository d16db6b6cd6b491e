"""A checkpoint of random numbers, small enough for any machine: a Qwen3 mixture of experts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .safetensors import save

LAYERS, EXPERTS, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE = 2, 8, 64, 64, 4, 2, 16
CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE,
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True, "hidden_act": "silu",
    "moe_intermediate_size": HIDDEN, "intermediate_size": HIDDEN, "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "torch_dtype": "float32", "random_weights": True,
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (256, WIDTH), "model.norm.weight": (WIDTH,),
    }  # fmt: skip
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        n, k = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
        heads = {"q_proj": (n, WIDTH), "k_proj": (k, WIDTH), "v_proj": (k, WIDTH)}
        heads |= {"o_proj": (WIDTH, n), "q_norm": (HEAD_SIZE,), "k_norm": (HEAD_SIZE,)}
        out |= {f"{layer}self_attn.{name}.weight": shape for name, shape in heads.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{layer}{name}.weight"] = (WIDTH,)
        out[f"{layer}mlp.gate.weight"] = (EXPERTS, WIDTH)
        for e in range(EXPERTS):
            expert = f"{layer}mlp.experts.{e}."
            out |= {f"{expert}{name}.weight": (HIDDEN, WIDTH) for name in ("gate_proj", "up_proj")}
            out[f"{expert}down_proj.weight"] = (WIDTH, HIDDEN)
    return out


def write(folder: Path) -> Path:
    """The folder, with config.json, tokenizer.json (of bytes) and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in shapes().items():
        spread = 0.02 if "embed" in name else shape[-1] ** -0.5
        values = rng.normal(0, spread, shape) if len(shape) > 1 else np.ones(shape)
        tensors[name] = values.astype(np.float32)
    save(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    out = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    out.decoder = decoders.ByteLevel()
    return out
