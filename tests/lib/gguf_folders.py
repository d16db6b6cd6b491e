"""The decoder's fixtures as GGUF files, with the names and the permutation of llama.cpp's
converter, and beside each a folder whose weights are the values of its codes."""

import json
import re

import decoder_folders
import numpy as np
from checkpoint_writers import F16, F32
from gguf_writers import ARRAY, BOOL, I32, STRING, U32, field
from gguf_writers import F32 as FLOAT
from gguf_writers import save as save_gguf

ARCHITECTURES = {
    "mixtral": "llama", "olmoe": "olmoe", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe", "minimax_m2": "minimax-m2",
    "ernie4_5_moe": "ernie4_5-moe", "granitemoeshared": "granitemoe",
}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}  # fmt: skip
NAMES |= {
    f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp"
    for shared in ("shared_expert", "shared_experts") for part in ("gate", "up", "down")
}  # fmt: skip
#: Gate's rows, then up's, of the shared expert and of the others.
HALVES = {"shared_mlp.input_linear": "shexp", "block_sparse_moe.input_linear": "exps"}
PERMUTED = ("mixtral", "granitemoeshared")
POST_NORM = ("gpt_oss", "glm4_moe")
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight":
         "output_norm.weight", "lm_head.weight": "output.weight"}  # fmt: skip
PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up",
         "w2": "down"}  # fmt: skip
EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")


def permuted(w, heads):
    """As convert_hf_to_gguf.py permutes queries and keys of Llama."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def q8_0(w):
    """Blocks, and their values."""
    groups = w.astype(F32).reshape(*w.shape[:-1], -1, 32)
    d = (np.abs(groups).max(-1, keepdims=True) / 127).astype(F16)
    q = np.round(groups / np.maximum(d.astype(F32), F32(1e-20))).astype(np.int8)
    raw = np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=-1)
    return ("Q8_0", raw.reshape(*w.shape[:-1], -1)), (q * d.astype(F32)).reshape(w.shape)


def plain(w):
    return w, w


#: Keys of a file that only some architectures have, and those of config.json.
MORE = {
    "leading_dense_block_count": (U32, "first_k_dense_replace", "moe_layer_start_index"),
    "interleave_moe_layer_step": (U32, "moe_layer_interval"),
    "nextn_predict_layers": (U32, "num_nextn_predict_layers"),
    "expert_weights_scale": (FLOAT, "routed_scaling_factor"),
    "expert_group_count": (U32, "n_group"), "expert_group_used_count": (U32, "topk_group"),
    "embedding_scale": (FLOAT, "embedding_multiplier"),
    "residual_scale": (FLOAT, "residual_multiplier"),
    "attention.scale": (FLOAT, "attention_multiplier"), "logit_scale": (FLOAT, "logits_scaling"),
    "expert_shared_count": (U32, "n_shared_experts", "moe_num_shared_experts"),
    "expert_feed_forward_length": (U32, "moe_intermediate_size", "intermediate_size"),
}  # fmt: skip


def first(config, *names):
    """The value of the first key that there is."""
    return next(config[name] for name in names if name in config)


def metadata(name, config, tokens, **more):
    arch = ARCHITECTURES[name]
    key = lambda key, kind, value: field(f"{arch}.{key}", kind, value)
    rope = config["rope_parameters"]
    out = [
        field("general.architecture", STRING, arch),
        key("embedding_length", U32, config["hidden_size"]),
        key("block_count", U32, config["num_hidden_layers"]),
        key("context_length", U32, config["max_position_embeddings"]),
        key("attention.head_count", U32, config["num_attention_heads"]),
        key("attention.head_count_kv", U32, config["num_key_value_heads"]),
        key("attention.layer_norm_rms_epsilon", FLOAT, config["rms_norm_eps"]),
        key("feed_forward_length", U32, config["intermediate_size"]),
        key("rope.freq_base", FLOAT, rope["rope_theta"]),
        key("expert_count", U32, first(config, "num_local_experts", "num_experts",
                                       "n_routed_experts", "moe_num_experts")),
        key("expert_used_count", U32, first(config, "num_experts_per_tok", "moe_k")),
    ]  # fmt: skip
    out += [key(k, kind, first(config, *names)) for k, (kind, *names) in MORE.items()
            if any(n in config for n in names)]  # fmt: skip
    if "partial_rotary_factor" in rope:
        part = config["head_dim"] * rope["partial_rotary_factor"]
        out += [key("rope.dimension_count", U32, int(part)), key("expert_gating_func", U32, 2)]
    shared = config.get("shared_intermediate_size") or (
        config.get("moe_num_shared_experts", 0) * config.get("moe_intermediate_size", 0)
    )
    if shared:
        out.append(key("expert_shared_feed_forward_length", U32, shared))
    if name == "glm4_moe":
        out.append(key("expert_weights_norm", BOOL, config["norm_topk_prob"]))
    if config.get("head_dim"):
        out += [key(f"attention.{k}_length", U32, config["head_dim"]) for k in ("key", "value")]
    if config.get("clip_qkv"):
        out.append(key("attention.clamp_kqv", FLOAT, config["clip_qkv"]))
    if config.get("sliding_window"):
        out.append(key("attention.sliding_window", U32, config["sliding_window"]))
    if rope["rope_type"] == "yarn":
        out += [key("rope.scaling.type", STRING, "yarn"),
                key("rope.scaling.factor", FLOAT, rope["factor"]),
                key("rope.scaling.original_context_length", U32,
                    rope["original_max_position_embeddings"])]  # fmt: skip
    return out + tokens + [field(k, *v) for k, v in more.items()]


def tokens_of(name):
    """The fixtures' tokenizer: byte pairs."""
    said = json.loads((decoder_folders.FIXTURES / name / "tokenizer.json").read_text())["model"]
    tokens = sorted(said["vocab"], key=said["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in said["merges"]]
    return [
        field("tokenizer.ggml.model", STRING, "gpt2"), field("tokenizer.ggml.pre", STRING, "gpt-2"),
        field("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        field("tokenizer.ggml.token_type", ARRAY, (I32, [1] * len(tokens))),
        field("tokenizer.ggml.merges", ARRAY, (STRING, merges)),
        field("tokenizer.ggml.add_bos_token", BOOL, 0),
    ]  # fmt: skip


def convert(name, folder, quantize=plain, *, older=False, config=None, **more):
    """A GGUF file of a fixture, and a folder with its values. ``older``: experts one by one."""
    config, source = config or decoder_folders.config_of(name), decoder_folders.tensors_of(name)
    heads = {"self_attn.q_proj": config["num_attention_heads"],
             "self_attn.k_proj": config["num_key_value_heads"]}  # fmt: skip
    out, values, experts = {}, {}, {}
    for tensor, w in source.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", tensor)
        vector = w.ndim < 2 or tensor.endswith(("norm.weight", "bias"))
        put = quantize if not vector and "gate.weight" not in tensor else plain
        if found is None:
            out[WHOLE[tensor]], values[tensor] = put(w)
            continue
        prefix, own = f"blk.{found[1]}.", found[2]
        base, _, leaf = own.rpartition(".")
        if own.startswith("mlp.experts.") and name == "gpt_oss":
            part = own.removeprefix("mlp.experts.").removesuffix("_bias")
            leaf = "bias" if own.endswith("_bias") else "weight"
            wide = np.ascontiguousarray(w.swapaxes(1, 2)) if leaf == "weight" else w
            names = ("gate", "up") if part == "gate_up_proj" else ("down",)
            stored = []
            for i, half in enumerate(names):
                rows = wide[:, i :: len(names)]
                raw, value = (quantize if leaf == "weight" else plain)(np.ascontiguousarray(rows))
                out[f"{prefix}ffn_{half}_exps.{leaf}"] = raw
                stored.append(value)
            both = np.stack(stored, 2).reshape(wide.shape) if len(stored) > 1 else stored[0]
            values[tensor] = both.swapaxes(1, 2) if leaf == "weight" else both
        elif expert := EXPERT.fullmatch(own):
            key = f"{prefix}ffn_{PARTS[expert[2]]}"
            raw, values[tensor] = put(w)
            if older:
                out[f"{key}.{expert[1]}.weight"] = raw
            else:
                experts.setdefault(f"{key}_exps.weight", {})[int(expert[1])] = raw
        elif own.endswith("e_score_correction_bias"):
            out[f"{prefix}exp_probs_b.bias"], values[tensor] = w.astype(F32).reshape(-1), w
        elif half := HALVES.get(base):
            stored = [put(rows) for rows in np.split(w, 2, axis=-2)]
            for part, (raw, _) in zip(("gate", "up"), stored, strict=True):
                out[f"{prefix}ffn_{part}_{half}.weight"] = raw
            values[tensor] = np.concatenate([value for _, value in stored], axis=-2)
        elif own == "self_attn.sinks":
            out[f"{prefix}attn_sinks.weight"], values[tensor] = w, w
        else:
            new = NAMES[base]
            if name in POST_NORM and new == "ffn_norm":
                new = "post_attention_norm"
            raw, values[tensor] = put(w)
            if name in PERMUTED and base in heads:
                kind, rows = raw if isinstance(raw, tuple) else (None, raw)
                rows = permuted(rows, heads[base])
                raw = (kind, rows) if kind else rows
            out[f"{prefix}{new}.{leaf}"] = raw[0] if new == "ffn_gate_inp_shexp" else raw
    for key, of in experts.items():
        parts = [of[i] for i in range(len(of))]
        if isinstance(parts[0], tuple):
            out[key] = parts[0][0], np.stack([raw for _, raw in parts])
        else:
            out[key] = np.stack(parts)
    path = save_gguf(folder / f"{name}.gguf", out, metadata(name, config, tokens_of(name), **more))
    values = {key: np.ascontiguousarray(w) for key, w in values.items()}
    return path, decoder_folders.write(folder / name, values, config)
