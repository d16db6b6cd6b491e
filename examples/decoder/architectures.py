"""Reads ``config.json`` of each architecture into the values of a ``Config``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from .errors import Refused

NO_WINDOW = 2**30  # more than any context
#: What transformers takes where config.json names no rope_theta; else it is 10,000.
ROPE_THETA = {
    "mixtral": 1e6, "gpt_oss": 150_000.0, "minimax_m2": 5e6, "ernie4_5_moe": 500_000.0,
}  # fmt: skip
#: The part of a head that is rotated where config.json says none; of others it is all of it.
PARTIAL_ROTARY = {"glm4_moe": 0.5, "minimax_m2": 1.0}


@dataclasses.dataclass(frozen=True)
class Names:
    """How an architecture names the tensors of a layer's feed-forward network."""

    dense: str = "mlp"  # of a layer without experts
    moe: str = "mlp"
    router: str = "gate"  # in moe, as what follows
    correction: str = ""  # of scores, before experts are chosen, if there is one
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""  # in a layer: the expert that every token meets, if there is one


@dataclasses.dataclass(frozen=True)
class Router:
    """How a token's scores become its experts and their weights."""

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = False  # the chosen weights sum to 1: of a softmax, one of chosen logits
    groups: int = 1  # of experts, of which a token chooses some first
    chosen_groups: int = 1
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Latent:
    """DeepSeek's attention: keys and values are made of one short vector for each token."""

    query_rank: int | None
    rank: int
    unrotated: int  # parts of a head
    rotated: int
    value: int


class Json:
    """A dict of config.json; what is missing or of another type is named."""

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def __call__(self, key: str, kind: type, default: Any = ...) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is ...:
                raise Refused(f"config.json has no {key}")
            return default
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise Refused(f"config.json: {key} is {value!r}, expected {kind.__name__}")
        if kind is float and not abs(value) < 2**63:
            raise Refused(f"config.json: {key} is no number of a usual size")
        if kind is int and value < 0:
            raise Refused(f"config.json: {key} is {value}, expected a number that is not negative")
        if kind is int and value >= 2**31:
            raise Refused(f"config.json: {key} is {value}, expected a number below 2^31")
        return value


NO_EXPERTS = Router(0, 0)


def _dense(of: Json) -> dict[str, Any]:
    """The values that models without experts share."""
    if of("use_sliding_window", bool, False):
        raise Refused("config.json: use_sliding_window is true, which no released Qwen model has")
    if of("mlp_bias", bool, False):
        raise Refused("config.json: mlp_bias is true, which is not known here")
    return {
        "router": NO_EXPERTS,
        "expert_width": 0,
        "dense_width": of("intermediate_size", int),
        "moe_layers": (False,) * of("num_hidden_layers", int),
    }


def _llama(of: Json) -> dict[str, Any]:
    bias = of("attention_bias", bool, False)
    return _dense(of) | {"qkv_bias": bias, "out_bias": of("out_bias", bool, bias)}


def _dense_qwen2(of: Json) -> dict[str, Any]:
    bias = of("qkv_bias", bool, True)
    return _dense(of) | {"qkv_bias": bias, "out_bias": of("out_bias", bool, False)}


def _dense_qwen3(of: Json) -> dict[str, Any]:
    bias = of("attention_bias", bool, False)
    return _dense(of) | {"qk_norm": "head", "qkv_bias": bias, "out_bias": bias}


def _mixtral(of: Json) -> dict[str, Any]:
    return {
        "names": Names(moe="block_sparse_moe", gate="w1", up="w3", down="w2"),
        "router": Router(of("num_local_experts", int), of("num_experts_per_tok", int),
                         normalized=True),
        "expert_width": of("intermediate_size", int),
        "windows": _window(of),
    }  # fmt: skip


def _qwen(of: Json) -> dict[str, Any]:
    """Options that Qwen2-MoE and Qwen3-MoE share."""
    if of("use_sliding_window", bool, False):
        raise Refused("config.json: use_sliding_window is true, which no released Qwen model has")
    experts, dense = _experts(of), of("mlp_only_layers", list, [])
    step, layers = of("decoder_sparse_step", int, 1), of("num_hidden_layers", int)
    if step == 0:
        raise Refused("config.json: decoder_sparse_step is 0, expected a number above it")
    return {
        "router": Router(experts, of("num_experts_per_tok", int),
                         normalized=of("norm_topk_prob", bool, False)),
        "expert_width": of("moe_intermediate_size", int),
        "dense_width": of("intermediate_size", int),
        "moe_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    }  # fmt: skip


def _qwen2(of: Json) -> dict[str, Any]:
    return _qwen(of) | {
        "names": Names(shared="mlp.shared_expert"),
        "qkv_bias": of("qkv_bias", bool, True),
        "shared_width": of("shared_expert_intermediate_size", int),
        "shared_gate": True,
    }


def _qwen3(of: Json) -> dict[str, Any]:
    bias = of("attention_bias", bool, False)
    return _qwen(of) | {"qk_norm": "head", "qkv_bias": bias, "out_bias": bias}


def _olmoe(of: Json) -> dict[str, Any]:
    bias = of("attention_bias", bool, False)
    return {
        "router": Router(_experts(of), of("num_experts_per_tok", int),
                         normalized=of("norm_topk_prob", bool, False)),
        "expert_width": of("intermediate_size", int),
        "qk_norm": "width",
        "qkv_bias": bias,
        "out_bias": bias,
        "qkv_limit": of("clip_qkv", float, None),
    }  # fmt: skip


def _gpt_oss(of: Json) -> dict[str, Any]:
    layers, window = of("num_hidden_layers", int), _window(of)
    kinds = of("layer_types", list, [])
    kinds = kinds or [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    if len(kinds) != layers:
        raise Refused(f"config.json: layer_types names {len(kinds)} layers of {layers}")
    if (of("swiglu_limit", float, 7.0), of("swiglu_alpha", float, 1.702)) != (7.0, 1.702):
        raise Refused("config.json: swiglu_limit and swiglu_alpha are not 7 and 1.702")
    bias = of("attention_bias", bool, True)
    return {
        "names": Names(router="router"),
        "router": Router(_experts(of), of("num_experts_per_tok", int), normalized=True),
        "expert_width": of("intermediate_size", int),
        "windows": tuple(window if kind == "sliding_attention" else NO_WINDOW for kind in kinds),
        "qkv_bias": bias,
        "out_bias": bias,
        "sinks": True,
        "activation": "swiglu_oai",
    }


def _sigmoid(of: Json, dense: int) -> dict[str, Any]:
    """DeepSeek's experts, which GLM has, too; ``dense`` layers have none by default."""
    layers, dense = of("num_hidden_layers", int), of("first_k_dense_replace", int, dense)
    router = Router(
        of("n_routed_experts", int), of("num_experts_per_tok", int), "sigmoid",
        of("norm_topk_prob", bool, True), of("n_group", int, 1), of("topk_group", int, 1),
        of("routed_scaling_factor", float, 1.0),
    )  # fmt: skip
    width, shared = of("moe_intermediate_size", int), of("n_shared_experts", int, 1)
    return {
        "names": Names(
            correction="gate.e_score_correction_bias", shared="mlp.shared_experts" if shared else ""
        ),
        "router": router,
        "expert_width": width,
        "dense_width": of("intermediate_size", int),
        "shared_width": width * shared,
        "moe_layers": tuple(i >= dense for i in range(layers)),
        "predicts_more": True,
    }


def _deepseek(of: Json) -> dict[str, Any]:
    latent = Latent(
        of("q_lora_rank", int, None), of("kv_lora_rank", int), of("qk_nope_head_dim", int),
        of("qk_rope_head_dim", int), of("v_head_dim", int),
    )  # fmt: skip
    bias = of("attention_bias", bool, False)
    return _sigmoid(of, 0) | {
        "latent": latent,
        "head_size": latent.rotated,
        "rope_by_turns": of("rope_interleave", bool, True),
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _glm4(of: Json) -> dict[str, Any]:
    return _sigmoid(of, 1) | {
        "qk_norm": "head" if of("use_qk_norm", bool, False) else "",
        "qkv_bias": of("attention_bias", bool, False),
        "norm_epsilon": of("rms_norm_eps", float, 1e-5),
    }


def _minimax(of: Json) -> dict[str, Any]:
    _expect(of, "use_qk_norm", bool, True)
    _expect(of, "use_routing_bias", bool, True)
    _expect(of, "scoring_func", str, "sigmoid")
    _expect(of, "shared_intermediate_size", int, 0)
    if any(kind != 1 for kind in of("attn_type_list", list, [])):
        raise Refused("config.json: attn_type_list has layers whose attention is linear")
    return {
        "names": Names(
            moe="block_sparse_moe", gate="w1", up="w3", down="w2",
            correction="e_score_correction_bias",
        ),
        "router": Router(_experts(of), of("num_experts_per_tok", int), "sigmoid", True),
        "expert_width": of("intermediate_size", int),
        "head_size": of("head_dim", int, 128),
        "qk_norm": "width",
    }  # fmt: skip


def _ernie(of: Json) -> dict[str, Any]:
    _expect(of, "use_bias", bool, False)
    layers, first = of("num_hidden_layers", int), of("moe_layer_start_index", int, 1)
    last, step = of("moe_layer_end_index", float, -1), of("moe_layer_interval", int, 1)
    if step == 0:
        raise Refused("config.json: moe_layer_interval is 0, expected a number above it")
    last = layers - 1 if last == -1 else last
    width, shared = of("moe_intermediate_size", int), of("moe_num_shared_experts", int, 2)
    return {
        "names": Names(
            correction="moe_statics.e_score_correction_bias",
            shared="mlp.shared_experts" if shared else "",
        ),
        "router": Router(of("moe_num_experts", int, 64), of("moe_k", int, 6), normalized=True),
        "expert_width": width,
        "dense_width": of("intermediate_size", int),
        "shared_width": width * shared,
        "moe_layers": tuple(first <= i <= last and (i + 1) % step == 0 for i in range(layers)),
        "norm_epsilon": of("rms_norm_eps", float, 1e-5),
        "tied": of("tie_word_embeddings", bool, True),
        "rope_by_turns": True,
    }


def _granite(of: Json) -> dict[str, Any]:
    """Granite's experts; the shared one is the whole network of models without experts."""
    layers, bias = of("num_hidden_layers", int), of("attention_bias", bool, False)
    experts, shared = of("num_local_experts", int, 8), of("shared_intermediate_size", int, 0)
    top_k = of("num_experts_per_tok", int, 2)
    return {
        "names": Names(
            dense="shared_mlp", moe="block_sparse_moe", router="router.layer",
            shared="shared_mlp" if shared else "",
        ),
        "router": Router(experts, top_k, normalized=True) if experts else NO_EXPERTS,
        "expert_width": of("intermediate_size", int),
        "dense_width": shared,
        "shared_width": shared,
        "moe_layers": (experts > 0,) * layers,
        "qkv_bias": bias,
        "out_bias": bias,
        "embedding_scale": of("embedding_multiplier", float, 1.0),
        "residual_scale": of("residual_multiplier", float, 1.0),
        "attention_scale": of("attention_multiplier", float, 1.0),
        "logits_divisor": of("logits_scaling", float, 1.0),
    }  # fmt: skip


def _granite_hybrid(of: Json) -> dict[str, Any]:
    layers = of("num_hidden_layers", int)
    kinds = of("layer_types", list, None) or of("layers_block_type", list, None) or ["mamba"]
    if others := [kind for kind in kinds if kind not in ("attention", "full_attention")]:
        raise Refused(f"config.json: layer_types has {others[0]!r}, expected 'attention' alone")
    if len(kinds) != layers:
        raise Refused(f"config.json: layer_types names {len(kinds)} layers of {layers}")
    if (kind := of("position_embedding_type", str, "nope")) != "rope":
        raise Refused(f"config.json: position_embedding_type is {kind!r}, expected 'rope'")
    return _granite(of)


def _expect(of: Json, key: str, kind: type, usual: Any) -> None:
    """Refuse what no released model of an architecture has."""
    if (value := of(key, kind, usual)) != usual:
        raise Refused(f"config.json: {key} is {value!r}, expected {usual!r}")


ARCHITECTURES: dict[str, Callable[[Json], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm4,
    "minimax_m2": _minimax,
    "ernie4_5_moe": _ernie,
    "granitemoe": _granite,
    "granitemoeshared": _granite,
    "granitemoehybrid": _granite_hybrid,
    "llama": _llama,
    "qwen2": _dense_qwen2,
    "qwen3": _dense_qwen3,
}


def _window(of: Json) -> int:
    window = of("sliding_window", int, NO_WINDOW)
    if window == 0:
        raise Refused("config.json: sliding_window is 0, expected a number above it")
    return window


def _experts(of: Json) -> int:
    """Both names are in use: the second is that of newer releases of transformers."""
    return of("num_experts", int, None) or of("num_local_experts", int)
