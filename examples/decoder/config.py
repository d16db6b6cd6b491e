"""``config.json`` of nine architectures, as one :class:`Config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax_groupgemm as jgg

from . import gguf
from .errors import Refused, is_gguf
from .rotary import Rope

#: What transformers takes where config.json names no rope_theta; else it is 10,000.
ROPE_THETA = {"mixtral": 1e6, "gpt_oss": 150_000.0}
NO_WINDOW = 2**30  # more than any context
MAX_LAYERS = 1000  # more are a damaged config
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Names:
    """How an architecture names the tensors of a layer's feed-forward network."""

    moe: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""  # the expert that every token meets, if there is one


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


@dataclasses.dataclass(frozen=True)
class Config:
    architecture: str
    layers: int
    width: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    norm_epsilon: float
    rope: Rope
    windows: tuple[int, ...]  # of each layer: how many tokens back it sees, itself included
    moe_layers: tuple[bool, ...]
    router: Router
    expert_width: int
    dense_width: int  # of layers without experts
    shared_width: int  # of the shared expert
    tied: bool  # the head is the embedding
    ends: tuple[int, ...]  # tokens that end a text
    dtype: str
    context: int | None = None  # tokens that it was made for, at most
    random: bool = False  # its weights are random numbers, as config.json says of models for tests
    names: Names = Names()
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["", "head", "width"] = ""
    qkv_limit: float | None = None
    sinks: bool = False
    activation: Literal["swiglu", "swiglu_oai"] = "swiglu"
    shared_gate: bool = False
    latent: Latent | None = None
    rope_by_turns: bool = False  # pairs to rotate are neighbours, not halves
    attention: Literal["xla", "cudnn"] = "xla"  # what computes it; latent attention is XLA's
    quantization: dict[str, Any] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )


class _Json:
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


def _dense(of: _Json) -> dict[str, Any]:
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


def _llama(of: _Json) -> dict[str, Any]:
    bias = of("attention_bias", bool, False)
    return _dense(of) | {"qkv_bias": bias, "out_bias": of("out_bias", bool, bias)}


def _dense_qwen2(of: _Json) -> dict[str, Any]:
    bias = of("qkv_bias", bool, True)
    return _dense(of) | {"qkv_bias": bias, "out_bias": of("out_bias", bool, False)}


def _dense_qwen3(of: _Json) -> dict[str, Any]:
    bias = of("attention_bias", bool, False)
    return _dense(of) | {"qk_norm": "head", "qkv_bias": bias, "out_bias": bias}


def _mixtral(of: _Json) -> dict[str, Any]:
    return {
        "names": Names("block_sparse_moe", "gate", "w1", "w3", "w2"),
        "router": Router(of("num_local_experts", int), of("num_experts_per_tok", int),
                         normalized=True),
        "expert_width": of("intermediate_size", int),
        "windows": _window(of),
    }  # fmt: skip


def _qwen(of: _Json) -> dict[str, Any]:
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


def _qwen2(of: _Json) -> dict[str, Any]:
    return _qwen(of) | {
        "names": Names(shared="shared_expert"),
        "qkv_bias": of("qkv_bias", bool, True),
        "shared_width": of("shared_expert_intermediate_size", int),
        "shared_gate": True,
    }


def _qwen3(of: _Json) -> dict[str, Any]:
    bias = of("attention_bias", bool, False)
    return _qwen(of) | {"qk_norm": "head", "qkv_bias": bias, "out_bias": bias}


def _olmoe(of: _Json) -> dict[str, Any]:
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


def _gpt_oss(of: _Json) -> dict[str, Any]:
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


def _deepseek(of: _Json) -> dict[str, Any]:
    layers, dense = of("num_hidden_layers", int), of("first_k_dense_replace", int, 0)
    latent = Latent(
        of("q_lora_rank", int, None), of("kv_lora_rank", int), of("qk_nope_head_dim", int),
        of("qk_rope_head_dim", int), of("v_head_dim", int),
    )  # fmt: skip
    router = Router(
        of("n_routed_experts", int), of("num_experts_per_tok", int), "sigmoid",
        of("norm_topk_prob", bool, True), of("n_group", int, 1), of("topk_group", int, 1),
        of("routed_scaling_factor", float, 1.0),
    )  # fmt: skip
    width, bias = of("moe_intermediate_size", int), of("attention_bias", bool, False)
    return {
        "names": Names(shared="shared_experts"),
        "router": router,
        "expert_width": width,
        "dense_width": of("intermediate_size", int),
        "shared_width": width * of("n_shared_experts", int, 1),
        "moe_layers": tuple(i >= dense for i in range(layers)),
        "latent": latent,
        "head_size": latent.rotated,
        "rope_by_turns": of("rope_interleave", bool, True),
        "qkv_bias": bias,
        "out_bias": bias,
    }


ARCHITECTURES: dict[str, Callable[[_Json], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
    "llama": _llama,
    "qwen2": _dense_qwen2,
    "qwen3": _dense_qwen3,
}


def _window(of: _Json) -> int:
    window = of("sliding_window", int, NO_WINDOW)
    if window == 0:
        raise Refused("config.json: sliding_window is 0, expected a number above it")
    return window


def _experts(of: _Json) -> int:
    """Both names are in use: the second is that of newer releases of transformers."""
    return of("num_experts", int, None) or of("num_local_experts", int)


def read_json(path: Path) -> dict[str, Any]:
    """Any of a folder's JSON files, of a size and a depth that such files have."""
    try:
        return jgg.checkpoints.read_json(path)
    except FileNotFoundError as error:
        raise Refused(f"there is no {path.name}: a checkpoint is a Hugging Face folder") from error
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from error


def read(folder: Path) -> Config:
    """The configuration of a folder, or of a GGUF file. Raises :class:`Refused`."""
    is_file = is_gguf(folder)
    values = gguf.config_of(folder) if is_file else read_json(folder / "config.json")
    of = _Json(values)
    name = of("model_type", str)
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise Refused(f"config.json: model_type {name!r} is not one of {known}")
    if of("hidden_act", str, "silu") != "silu":
        raise Refused(f"config.json: hidden_act is {values['hidden_act']!r}, expected 'silu'")
    layers, heads, width = (
        of(key, int) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not layers or not heads:
        raise Refused("config.json: there are no layers, or no heads")
    if layers > MAX_LAYERS:
        raise Refused(f"config.json: num_hidden_layers is {layers}, more than {MAX_LAYERS}")
    own = ARCHITECTURES[name](of)
    if not isinstance(own.setdefault("windows", NO_WINDOW), tuple):
        own["windows"] = (own["windows"],) * layers
    common = {
        "architecture": name,
        "layers": layers,
        "width": width,
        "vocabulary": of("vocab_size", int),
        "heads": heads,
        "kv_heads": of("num_key_value_heads", int, heads),
        "head_size": of("head_dim", int, width // heads),
        "norm_epsilon": of("rms_norm_eps", float, 1e-6),
        "moe_layers": (True,) * layers,
        "dense_width": 0,
        "shared_width": 0,
        "tied": of("tie_word_embeddings", bool, False),
        "ends": _ends(folder, values),
        "dtype": _dtype(of),
        "context": of("max_position_embeddings", int, None),
        "random": of("random_weights", bool, False),
        "quantization": _quantization(folder, values),
    }
    values_of_all = common | own
    rope = Rope.of(_rope(of, name), values_of_all["head_size"])
    if is_file and (factors := gguf.factors_of(folder, len(rope.angles))) is not None:
        rope = rope.divided(factors)
    config = Config(**values_of_all, rope=rope)
    if config.heads % max(config.kv_heads, 1):
        raise Refused(
            f"config.json: {config.heads} heads are no multiple of {config.kv_heads} key-value "
            "heads"
        )
    if any(config.moe_layers) and not 1 <= config.router.top_k <= config.router.experts:
        raise Refused(
            f"config.json: {config.router.top_k} experts for each token, of "
            f"{config.router.experts} experts"
        )
    experts, groups, chosen = (
        config.router.experts, config.router.groups, config.router.chosen_groups
    )  # fmt: skip
    if not groups or experts % groups or not 1 <= chosen <= groups:
        raise Refused(
            f"config.json: {chosen} groups for each token, of {groups} groups of {experts} experts"
        )
    return config


def _dtype(of: _Json) -> str:
    key = "dtype" if of("dtype", str, None) else "torch_dtype"
    name = of(key, str, "bfloat16")
    if name not in DTYPES:
        raise Refused(f"config.json: {key} {name!r} is not one of {', '.join(DTYPES)}")
    return name


def _rope(of: _Json, name: str) -> dict[str, Any]:
    """One dict, as transformers 5 makes it: rope_scaling goes before rope_parameters, and the
    original length beside it before the one in it."""
    newer, older = of("rope_parameters", dict, {}), of("rope_scaling", dict, {})
    rope = dict(older or newer)
    theta = of("rope_theta", float, None)
    if older and "rope_theta" in newer and "rope_theta" not in older and theta is None:
        raise Refused(  # transformers takes its default, which nobody wrote
            f"config.json: rope_parameters has rope_theta {newer['rope_theta']}, but rope_scaling, "
            "which goes before it, has none: write it there, too"
        )
    rope.setdefault("rope_theta", ROPE_THETA.get(name, 10_000.0) if theta is None else theta)
    rope.setdefault("rope_type", rope.get("type", "default"))
    of_kinds = [key for key, value in rope.items() if isinstance(value, dict)]
    if of_kinds:
        raise Refused(
            f"config.json: positions of {of_kinds[0]} have parameters of their own, which is not "
            "known here"
        )
    for parts in (rope.get("partial_rotary_factor"), of("partial_rotary_factor", float, None)):
        if parts not in (None, 1):
            raise Refused(f"config.json: partial_rotary_factor is {parts}, expected 1")
    if (original := of("original_max_position_embeddings", int, None)) is not None:
        rope["original_max_position_embeddings"] = original
    elif (longest := of("max_position_embeddings", int, None)) is not None:
        rope.setdefault("original_max_position_embeddings", longest)
    return rope


def _ends(folder: Path, values: dict[str, Any]) -> tuple[int, ...]:
    """Those that no token has end no text."""
    path = folder / "generation_config.json"
    said = read_json(path).get("eos_token_id") if path.exists() else None
    said = values.get("eos_token_id") if said is None else said
    ends = said if isinstance(said, list) else [] if said is None else [said]
    return tuple(end for end in ends if isinstance(end, int))


def _quantization(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The config that jgg.checkpoints takes: config.json, or ModelOpt's own file."""
    path = folder / "hf_quant_config.json"
    if not values.get("quantization_config") and not values.get("quantization") and path.exists():
        return values | read_json(path)
    return values
