"""``config.json`` of each architecture, as one :class:`Config`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax_groupgemm as jgg

from . import gguf
from .architectures import (
    ARCHITECTURES,
    NO_WINDOW,
    PARTIAL_ROTARY,
    ROPE_THETA,
    Json,
    Latent,
    Names,
    Router,
)
from .errors import Refused, is_gguf
from .rotary import Rope

MAX_LAYERS = 1000  # more are a damaged config
DTYPES = ("bfloat16", "float16", "float32")


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
    names: Names = dataclasses.field(default_factory=Names)
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["", "head", "width"] = ""
    qkv_limit: float | None = None
    sinks: bool = False
    activation: Literal["swiglu", "swiglu_oai"] = "swiglu"
    shared_gate: bool = False
    latent: Latent | None = None
    rope_by_turns: bool = False  # pairs to rotate are neighbours, not halves
    attention_scale: float | None = None  # of logits, instead of 1 / sqrt(head_size)
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer's halves add
    logits_divisor: float = 1.0
    predicts_more: bool = False  # layers behind the last predict several tokens; none is loaded
    attention: Literal["xla", "cudnn"] = "xla"  # what computes it; latent attention is XLA's
    quantization: dict[str, Any] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )


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
    of = Json(values)
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
    said = _rope(of, name)
    rope = Rope.of(said, _rotated(of, name, said, values_of_all["head_size"]))
    if is_file and (factors := gguf.factors_of(folder, len(rope.angles))) is not None:
        rope = rope.divided(factors)
    config = Config(**values_of_all, rope=rope)
    if config.heads % max(config.kv_heads, 1):
        raise Refused(
            f"config.json: {config.heads} heads are no multiple of {config.kv_heads} key-value "
            "heads"
        )
    if config.logits_divisor == 0:
        raise Refused("config.json: logits_scaling is 0, expected another number")
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


def _dtype(of: Json) -> str:
    key = "dtype" if of("dtype", str, None) else "torch_dtype"
    name = of(key, str, "bfloat16")
    if name not in DTYPES:
        raise Refused(f"config.json: {key} {name!r} is not one of {', '.join(DTYPES)}")
    return name


def _rope(of: Json, name: str) -> dict[str, Any]:
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
    if (original := of("original_max_position_embeddings", int, None)) is not None:
        rope["original_max_position_embeddings"] = original
    elif (longest := of("max_position_embeddings", int, None)) is not None:
        rope.setdefault("original_max_position_embeddings", longest)
    return rope


def _rotated(of: Json, name: str, rope: dict[str, Any], size: int) -> int:
    """How many numbers of a head have positions: those in front."""
    key = "partial_rotary_factor"
    said = [part for part in (rope.get(key), of(key, float, None)) if part is not None]
    if name not in PARTIAL_ROTARY:
        if odd := [part for part in said if part != 1]:
            raise Refused(f"config.json: {key} is {odd[0]}, expected 1")
        return size
    part = said[0] if said else PARTIAL_ROTARY[name]
    if type(part) not in (int, float) or not 0 < part <= 1:
        raise Refused(f"config.json: {key} is {part!r}, expected a number up to 1")
    rotated = int(size * part)
    if not said:  # as MiniMax's files and GGUF say it
        rotated = of("rotary_dim", int, rotated)
    if rotated % 2 or not 0 < rotated <= size:
        raise Refused(f"config.json: {rotated} numbers of heads of {size} have positions")
    return rotated


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
