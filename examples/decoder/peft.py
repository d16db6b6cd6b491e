"""Adapters in the files of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

The names are those of PEFT's page "PEFT checkpoint format", for models in which every expert is a
module, as in transformers 4. PEFT from 0.19 on makes of them what transformers 5 needs, whose
experts are one tensor: 0.21.2 over transformers 5.24 and 0.20 over 4.57 were compared. What PEFT
itself writes over transformers 5, or of gpt-oss' experts, has names of its own, and is not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

from . import safetensors
from .adapters import TARGETS, Place, Site, attach, places
from .config import read_json
from .errors import Refused
from .model import Decoder
from .weights import Header, headers, in_one_sentence

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: What says where adapters are, how they were trained, or what they are of. All else that is not
#: empty may make another function of the same tensors.
PLAIN = {
    "peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version",
    "inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights", "eva_config",
    "corda_config", "loftq_config", "lora_ga_config", "megatron_core", "qalora_group_size",
    "runtime_config", "ensure_weight_tying",
}  # fmt: skip
#: Values of ``init_lora_weights`` that leave the base as it is; true and false do so, too.
INITIAL = ("gaussian", "eva", "orthogonal", "mica")
CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga")
LARGEST = 2**31  # a factor beyond it is a damaged config
MERGE = "merge the adapters into their base with PEFT, or train plain ones"


def modules(site: Place) -> Iterator[tuple[tuple[int, ...], str]]:
    """The index in a site's arrays, and the name, of each module."""
    for i, layer in enumerate(site.layers):
        prefix = f"base_model.model.model.layers.{layer}."
        if not site.experts:
            yield (i,), prefix + site.name
        for e in range(site.experts):
            yield (i, e), prefix + site.name.format(e)


def write(folder: Path, sites: Sequence[Site], rank: int, alpha: float, base: str) -> None:
    tensors = {}
    for site in sites:
        for letter, value in (("A", site.pair.a), ("B", site.pair.b)):
            array = np.asarray(value.get_value())
            for at, name in modules(site):
                tensors[f"{name}.lora_{letter}.weight"] = array[at]
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save(folder / WEIGHTS, dict(sorted(tensors.items())))
    # Ends of names: PEFT finds those of experts by their last part where they are one tensor, which
    # it does not in a pattern, and the last part alone would also be that of shared experts.
    ends = {site.name.partition(".")[2].format(e) for site in sites for e in range(site.experts)}
    ends |= {site.name for site in sites if not site.experts}
    said = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "init_lora_weights": True, "inference_mode": True, "modules_to_save": None,
        "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "use_dora": False,
        "target_modules": sorted(ends),
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(said, indent=1))


def config_of(folder: Path) -> tuple[int, float]:
    """Rank and scale of a folder's adapters. Raises :class:`Refused`."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).exists():
            raise Refused(f"--adapters: there is no {folder / name}")
    path = folder / CONFIG
    said = read_json(path)
    rank, alpha = said.get("r"), said.get("lora_alpha")
    if said.get("peft_type") != "LORA" or type(rank) is not int or rank < 1:
        raise Refused(f"{path} is not of LoRA adapters with a rank")
    if alpha is None:
        raise Refused(f"{path} has no lora_alpha")
    if type(alpha) not in (int, float) or not abs(alpha) < LARGEST:
        raise Refused(f"{path}: lora_alpha is {_brief(alpha)}, expected a number below 2^31")
    _check_plain(path, said)
    for name, header in _headers(folder).items():
        axis = name.endswith(".lora_B.weight")  # (r, K) and (N, r)
        if len(header.shape) != 2 or not header.plain:
            raise Refused(f"{folder / WEIGHTS}: {name} is no matrix of floats")
        if header.shape[axis] != rank:
            raise Refused(f"{name} has rank {header.shape[axis]}, but {path} says {_brief(rank)}")
    return rank, alpha / (rank**0.5 if said.get("use_rslora") else rank)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _check_plain(path: Path, said: dict[str, Any]) -> None:
    """Refuse what makes another function of the same tensors."""
    if said.get("use_rslora") not in (None, True, False):
        raise Refused(f"{path}: use_rslora is {_brief(said['use_rslora'])}, expected true or false")
    first = said.get("init_lora_weights")
    name = first.lower() if isinstance(first, str) else ""
    if name.startswith(CHANGES_BASE):
        raise Refused(
            f"{path}: init_lora_weights is {_brief(first)}, which changes the base, too: save the "
            "adapters with PEFT's path_initial_model_for_weight_conversion, which makes plain ones"
        )
    if first not in (None, True, False) and name not in INITIAL:
        raise Refused(
            f"{path}: init_lora_weights is {_brief(first)}, which may change the base, too: {MERGE}"
        )
    for name, value in said.items():
        empty = value is None or value is False or value in ({}, [])
        if name in PLAIN or empty or (name == "bias" and value == "none"):
            continue
        raise Refused(f"{path}: {name} is {_brief(value)}, which is not known here: {MERGE}")


def _headers(folder: Path) -> dict[str, Header]:
    with in_one_sentence():
        found = headers(jgg.checkpoints.open(folder / WEIGHTS))
    if not found:
        raise Refused(f"{folder / WEIGHTS} has no tensors")
    return found


def read(folder: Path, model: Decoder) -> list[Site]:
    """Gives the model the adapters of a folder. Raises :class:`Refused`."""
    rank, scale = config_of(folder)
    said = _headers(folder)
    targets = [t for t in TARGETS if any((".experts." in n) == (t == "experts") for n in said)]
    for *_, place in places(model, targets):
        shapes = {"A": (rank, place.k), "B": (place.n, rank)}
        for (_, module), letter in ((m, letter) for m in modules(place) for letter in "AB"):
            name = f"{module}.lora_{letter}.weight"
            header = said.pop(name, None)
            if header is not None and header.shape != shapes[letter]:
                raise Refused(f"{name} has shape {header.shape}, expected {shapes[letter]}")
    if said:
        raise Refused(f"{folder / WEIGHTS}: {min(said)} belongs to no weight that has adapters")
    with in_one_sentence():
        tensors = dict(jgg.checkpoints.open(folder / WEIGHTS))
    dtype = model.dtype
    sites = attach(model, targets, rank, scale, dtype=dtype)
    for site in sites:
        for letter, param in (("A", site.pair.a), ("B", site.pair.b)):
            out = np.zeros(param.get_value().shape, np.float32)
            for at, module in modules(site):  # those without a tensor have zeros
                out[at] = tensors.get(f"{module}.lora_{letter}.weight", 0)
            param.set_value(jnp.asarray(out, dtype))
    return sites
