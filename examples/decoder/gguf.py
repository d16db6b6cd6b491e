"""A GGUF file as a folder of Hugging Face: config.json's values, and tensors by their names there.

Metadata and names: https://github.com/ggml-org/llama.cpp (gguf-py/gguf/constants.py,
conversion in convert_hf_to_gguf.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jax_groupgemm as jgg

from .errors import Refused
from .gguf_tokens import value

#: ``model_type`` of config.json, by ``general.architecture``: without experts, and with them.
DENSE = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
EXPERTS = {
    "llama": "mixtral", "olmoe": "olmoe", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss", "glm4moe": "glm4_moe", "minimax-m2": "minimax_m2",
    "ernie4_5-moe": "ernie4_5_moe", "granitemoe": "granitemoeshared",
}  # fmt: skip
PERMUTED = ("llama", "granitemoe")  # whose queries and keys are stored for a rotation of neighbours
#: Architectures whose chosen experts' weights do; files say it of others.
SUMS_TO_ONE = ("llama", "qwen3moe", "gpt-oss", "minimax-m2", "ernie4_5-moe", "granitemoe")
SAYS_WEIGHTS = ("glm4moe",)  # files say how experts' weights are made, and groups
GATES = {"glm4moe": 2, "minimax-m2": 2, "ernie4_5-moe": 1, "granitemoe": 1}  # expert_gating_func
PARTIAL = ("glm4moe", "minimax-m2")  # a part of a head may be rotated
HAVE_DENSE = ("qwen2moe", "qwen3moe", "glm4moe", "ernie4_5-moe")  # layers without experts
WINDOWS = ("mixtral", "gpt_oss")  # models whose layers, or half of them, have a sliding window
#: Names in a file and in a folder; what follows, such as ".weight", is the same.
WHOLE = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "{moe}.{router}", "ffn_gate_exps": "{moe}.experts.gate_proj",
    "ffn_up_exps": "{moe}.experts.up_proj", "ffn_down_exps": "{moe}.experts.down_proj",
    "ffn_gate_inp_shexp": "{moe}.shared_expert_gate", "ffn_gate_shexp": "{shared}.gate_proj",
    "ffn_up_shexp": "{shared}.up_proj", "ffn_down_shexp": "{shared}.down_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")  # of older files: a tensor for each
SCALES = ("scale", "input_scale")  # beside a weight in NVFP4
#: Architectures that have a tensor; others have all of :data:`LAYER`.
ONLY = {
    "post_attention_norm": ("gpt-oss", "glm4moe"), "attn_sinks": ("gpt-oss",),
    "exp_probs_b": ("glm4moe", "minimax-m2", "ernie4_5-moe"), "ffn_gate_inp_shexp": ("qwen2moe",),
}  # fmt: skip
ONLY |= dict.fromkeys(
    ("attn_q_norm", "attn_k_norm"), ("olmoe", "qwen3", "qwen3moe", "glm4moe", "minimax-m2")
)
ONLY |= dict.fromkeys(
    ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    ("qwen2moe", "glm4moe", "ernie4_5-moe", "granitemoe"),
)
BIASES_OF_EXPERTS = ("gpt-oss",)
#: Tensors that are read elsewhere, or that llama.cpp does not read either.
OTHERS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
#: Bits of a number as it is read, with its part of the scales.
BITS = {
    "Q4_0": 5, "Q4_1": 5, "Q5_0": 6, "Q5_1": 6, "Q8_0": 9, "Q2_K": 6, "Q3_K": 7, "Q4_K": 6,
    "Q5_K": 7, "Q6_K": 10, "MXFP4": 4.25, "NVFP4": 4.5,
}  # fmt: skip
FLOATS = ("float32", "float16", "bfloat16")
ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>",
        "<|eom_id|>", "<end_of_turn>")  # fmt: skip
FACTORS = "rope_freqs.weight"  # of Llama 3: what frequencies are divided by
THETA = 10_000.0  # where a file has none
YARN = {"yarn_ext_factor": 1, "attn_factor": 1, "yarn_log_multiplier": 0}


def opened(path: Path) -> Any:
    """The file. Raises :class:`Refused`."""
    try:
        return jgg.checkpoints.open(path)
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from error


class _Said:
    """The metadata of a file."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def __call__(self, key: str, default: Any = None) -> Any:
        try:
            value = self.values.get(key, default)
        except ValueError as error:
            raise Refused(str(error)) from error
        if isinstance(value, (list, np.ndarray)) and value is not default:
            raise Refused(f"{key} is a list of {len(value)}, expected one value for all layers")
        return value


def config_of(path: Path) -> dict[str, Any]:
    """The model's ``config.json``, made of the metadata. Raises :class:`Refused`."""
    tensors = opened(path)
    said = _Said(tensors.metadata)
    name = said("general.architecture")
    known = {**EXPERTS, **DENSE}
    if not isinstance(name, str) or name not in known:
        raise Refused(f"general.architecture {name!r} is not one of {', '.join(known)}")
    of = lambda key, default=None: said(f"{name}.{key}", default)
    experts = of("expert_count")
    model = (EXPERTS if experts else DENSE).get(name)
    if model is None:
        has = "are experts" if experts else "are no experts"
        raise Refused(f"general.architecture is {name!r}, and there {has}")
    pattern = of("attention.sliding_window_pattern", 2)
    if pattern != 2 or (model not in WINDOWS and of("attention.sliding_window")):
        what = "sliding_window_pattern" if pattern != 2 else "sliding_window"
        value = of(f"attention.{what}")
        raise Refused(f"attention.{what} is {value!r}, which {name} is not known to have")
    layers, size = of("block_count"), _last(tensors, "ffn_down_exps")
    if type(layers) is int and type(more := of("nextn_predict_layers", 0)) is int:
        layers -= more  # they predict several tokens, and are not loaded
    shared = _last(tensors, "ffn_down_shexp")
    count = layers if type(layers) is int and layers <= 1000 else 0  # else it is refused
    dense = [i for i in range(count) if f"blk.{i}.ffn_gate_inp.weight" not in tensors]
    width, heads = of("embedding_length"), of("attention.head_count")
    shape = tensors.shape("token_embd.weight") if "token_embd.weight" in tensors else ()
    plain = {tensors.dtype(tensor) for tensor in tensors if len(tensors.shape(tensor)) > 1}
    bias = "blk.0.attn_q.bias" in tensors
    values = {
        "model_type": model, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("attention.key_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": of("context_length"),
        "vocab_size": shape[0] if len(shape) == 2 else None,
        "num_experts": experts, "num_local_experts": experts,
        "num_experts_per_tok": of("expert_used_count"),
        "intermediate_size": size if experts else of("feed_forward_length"),
        "moe_intermediate_size": size, "norm_topk_prob": name in SUMS_TO_ONE,
        "mlp_only_layers": dense, "attention_bias": bias, "qkv_bias": bias,
        "tie_word_embeddings": "output.weight" not in tensors,
        "clip_qkv": of("attention.clamp_kqv"),
        "sliding_window": of("attention.sliding_window") or None,
        "shared_expert_intermediate_size": shared, "shared_intermediate_size": shared,
        "dtype": "float32" if plain == {"float32"} else "bfloat16",
        "gguf_has_codes": not plain <= {*FLOATS},
        "eos_token_id": _ends(said), "rope_theta": of("rope.freq_base", THETA),
        "quantization_config": {"quant_method": "gguf"},
    }  # fmt: skip
    if experts and dense and name in HAVE_DENSE:
        values["intermediate_size"] = of("feed_forward_length")
    if name in GATES:
        values |= _newer(of, tensors, name, size, shared)
    if model in ("llama", "qwen2"):  # whose sums of heads have a bias of their own
        values["out_bias"] = "blk.0.attn_output.bias" in tensors
    values["rope_scaling"] = _rope(of, name)
    if values["rope_scaling"] and FACTORS in tensors:
        raise Refused(f"there are both rope.scaling and a tensor {FACTORS}, expected one")
    usual = {"expert_weights_norm": values["norm_topk_prob"], "expert_weights_scale": (0, 1),
             "expert_group_count": (0, 1)}  # fmt: skip
    for key, want in () if name in SAYS_WEIGHTS or not experts else usual.items():
        wanted = want if isinstance(want, tuple) else (want,)
        if (value := of(key)) not in (None, *wanted):
            raise Refused(f"{key} is {value!r}, expected {wanted[-1]}")
    number = all(type(n) is int and n > 0 for n in (width, heads))
    head = values["head_dim"] or (width // heads if number else None)
    for key in ("rope.dimension_count", "attention.value_length"):
        if key.startswith("rope") and name in PARTIAL:
            values |= {"rotary_dim": of(key, head), "head_dim": head}
        elif (size := of(key, head)) != head:
            raise Refused(f"{key} is {size!r}, but heads have {head} numbers")
    if name == "granitemoe" and not values["attention_multiplier"] and type(head) is int:
        values["attention_multiplier"] = max(head, 1) ** -0.5  # llama.cpp's where a file has none
    return {key: value for key, value in values.items() if value is not None}


def _newer(of: Any, tensors: Any, name: str, size: Any, shared: Any) -> dict[str, Any]:
    """The part of ``config.json`` that only some architectures have."""
    gate, usual = of("expert_gating_func"), GATES[name]
    if gate not in (None, 0, usual):
        raise Refused(f"expert_gating_func is {gate!r}, expected {usual}")
    if name == "granitemoe" and of("rope.scaling.finetuned") is False:
        raise Refused("rope.scaling.finetuned is False: positions are not rotated")
    dense, count = of("leading_dense_block_count", 0), shared // size if shared and size else 0
    out = {
        "first_k_dense_replace": dense, "moe_layer_start_index": dense,
        "moe_layer_interval": of("interleave_moe_layer_step", 1),
        "n_routed_experts": of("expert_count"), "moe_num_experts": of("expert_count"),
        "moe_k": of("expert_used_count"), "n_shared_experts": count,
        "moe_num_shared_experts": count,
        "use_qk_norm": any(tensor.endswith("attn_q_norm.weight") for tensor in tensors),
        "embedding_multiplier": of("embedding_scale") or None,
        "residual_multiplier": of("residual_scale") or None,
        "attention_multiplier": of("attention.scale"), "logits_scaling": of("logit_scale") or None,
    }  # fmt: skip
    if name in SAYS_WEIGHTS:
        out |= {
            "norm_topk_prob": of("expert_weights_norm", False),
            "routed_scaling_factor": of("expert_weights_scale") or 1.0,
            "n_group": of("expert_group_count") or 1,
            "topk_group": of("expert_group_used_count") or 1,
        }
    return out


def _last(tensors: Any, name: str) -> int | None:
    """The length of rows of a tensor that some layer has."""
    whole = re.compile(rf"blk\.\d+\.{name}\.weight")
    found = next((tensor for tensor in tensors if whole.fullmatch(tensor)), None)
    if found is None and name == "ffn_down_exps":
        older = re.compile(r"blk\.\d+\.ffn_down\.\d+\.weight")
        found = next((tensor for tensor in tensors if older.fullmatch(tensor)), None)
    return None if found is None or not tensors.shape(found) else tensors.shape(found)[-1]


def _rope(of: Any, name: str) -> dict[str, Any] | None:
    """``rope_scaling`` as llama.cpp reads the file: without a type it is linear."""
    factor = of("rope.scaling.factor", of("rope.scale_linear"))
    kind = of("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return None
    if kind not in ("linear", "yarn"):
        raise Refused(f"rope.scaling.type is {kind!r}, expected 'none', 'linear' or 'yarn'")
    out = {"rope_type": kind, "factor": factor, "rope_theta": of("rope.freq_base", THETA)}
    if kind == "yarn":
        for key, usual in YARN.items():
            if (value := of(f"rope.scaling.{key}", usual)) != usual:
                raise Refused(f"rope.scaling.{key} is {value!r}, expected {usual}")
        keys = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast",
                "yarn_beta_slow": "beta_slow", "original_context_length":
                "original_max_position_embeddings"}  # fmt: skip
        said = {new: of(f"rope.scaling.{key}") for key, new in keys.items()}
        out |= {key: value for key, value in said.items() if value is not None}
    if name == "gpt-oss":
        out["truncate"] = False
    return out


def _ends(said: _Said) -> list[int]:
    """The tokens that end a text: those that are named, and those that llama.cpp knows."""
    keys = (f"tokenizer.ggml.{which}_token_id" for which in ("eos", "eot", "eom"))
    out = {end for key in keys if isinstance(end := said(key), int)}
    tokens = value(said.values, "tokenizer.ggml.tokens")
    found = [t for t in tokens if t in ENDS] if isinstance(tokens, list) else []
    if {"<|return|>", "<|call|>"} <= set(found):  # of gpt-oss, where it ends a part of an answer
        found = [token for token in found if token != "<|end|>"]
    return sorted(out | {tokens.index(token) for token in found})


def factors_of(path: Path, pairs: int) -> np.ndarray | None:
    """The numbers that divide the frequencies of so many pairs. Raises :class:`Refused`."""
    tensors = opened(path)
    if FACTORS not in tensors:
        return None
    shape, dtype = tensors.shape(FACTORS), tensors.dtype(FACTORS)
    if shape != (pairs,) or dtype != "float32":
        raise Refused(f"{FACTORS} has {dtype} {shape}, expected float32 ({pairs},)")
    factors = tensors[FACTORS].astype(np.float64)
    if not np.all((factors > 0) & np.isfinite(factors)):
        raise Refused(f"{FACTORS} has numbers that are not positive")
    return factors


class _Place(NamedTuple):
    """Where a tensor is, and how it differs from that of a folder."""

    name: str
    heads: int = 0  # whose rows are permuted
    row: bool = False  # it is one row, stored as a vector


class Renamed(Mapping[str, Any]):
    """The tensors of a file, with the names and the rows that a folder has."""

    def __init__(self, path: Path, config: Any):
        self.tensors, self.places = opened(path), {}
        names, name = config.names, self.tensors.metadata["general.architecture"]
        parts = {"moe": names.moe, "router": names.router, "shared": names.shared}
        for tensor in self.tensors:
            head, _, leaf = tensor.rpartition(".")
            if OTHERS.fullmatch(tensor):
                continue
            found = re.fullmatch(r"blk\.(\d+)\.(.+)", head)
            if found and config.predicts_more and int(found[1]) >= config.layers:
                continue
            if not self._known(head if found is None else found[2], leaf, head, name):
                raise Refused(f"there is a tensor {tensor!r}, which {name} is not known to have")
            if found is None:
                self.places[f"{WHOLE[head]}.{leaf}"] = _Place(tensor)
                continue
            layer, own = f"model.layers.{found[1]}.", found[2]
            if own == "attn_sinks":
                self.places[f"{layer}self_attn.sinks"] = _Place(tensor)
            elif own == "exp_probs_b":
                self.places[f"{layer}{names.moe}.{names.correction}"] = _Place(tensor)
            elif older := EXPERT.fullmatch(own):
                which = getattr(names, older[1])
                new = f"{layer}{names.moe}.experts.{older[2]}.{which}.{leaf}"
                self.places[new] = _Place(tensor)
            else:
                heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(own, 0)
                place = _Place(tensor, heads * (name in PERMUTED), own == "ffn_gate_inp_shexp")
                self.places[f"{layer}{LAYER[own].format(**parts)}.{leaf}"] = place

    def _known(self, own: str, leaf: str, head: str, name: str) -> bool:
        """Whether an architecture's model uses such a tensor: others would be left out."""
        if own in ONLY and name not in ONLY[own]:
            return False
        expert = EXPERT.fullmatch(own) is not None
        if own not in (*WHOLE, *LAYER, *ONLY) and not expert:
            return False
        if own == "exp_probs_b":
            return leaf == "bias"
        if leaf in SCALES:  # of codes: of floats nobody asks for it
            weight = f"{head}.weight"
            return weight in self.tensors and self.tensors.dtype(weight) not in FLOATS
        if leaf == "bias" and (expert or own.endswith(("_exps", "ffn_gate_inp"))):
            return name in BIASES_OF_EXPERTS
        vector = own.endswith(("norm", "sinks", "gate_inp_shexp", "token_embd"))
        return leaf == "weight" or (leaf == "bias" and not vector)

    def __getitem__(self, name: str) -> Any:
        place = self.places[name]
        value = self.tensors[place.name]
        if place.row and len(value.shape) == 1:
            value = value[None]
        if not place.heads:
            return value
        order = _order(value.shape[0], place.heads, place.name)
        if not isinstance(value, jgg.checkpoints.Blocks):
            return value[order]
        rows = value.rows(0, len(order))[order]
        take = lambda start, stop: rows[start:stop]
        return jgg.checkpoints.Blocks(value.type, value.shape, take)

    def dtype(self, name: str) -> str:
        return self.tensors.dtype(self.places[name].name)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self.places[name]
        shape = self.tensors.shape(place.name)
        return (1, *shape) if place.row and len(shape) == 1 else shape

    def nbytes(self, name: str) -> int | None:
        """As it is read, of what has codes."""
        shape, bits = self.shape(name), BITS.get(self.dtype(name))
        return None if bits is None else int(np.prod(shape) * bits / 8)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _order(rows: int, heads: int, name: str) -> np.ndarray:
    """Rows of a head stored by turns, of its first half and its second, as halves again."""
    if rows % (2 * heads):
        raise Refused(f"{name} has {rows} rows, for {heads} heads")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
