"""Adapters in the files of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

The names are those of PEFT 0.20 (its page "PEFT checkpoint format"), for models in which every
expert is a module, as in transformers 4. Architectures whose experts are one tensor (gpt-oss, and
what transformers 5 makes of others) have names of their own there, and no experts' adapters here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

from . import safetensors
from .adapters import TARGETS, Site, attach
from .config import read_json
from .errors import Refused
from .model import Decoder
from .weights import in_one_sentence

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Options that make another function of the same tensors.
OTHERS = ("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias")


def modules(site: Site) -> Iterator[tuple[tuple[int, ...], str]]:
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
    # A pattern, because a list of names would also match shared experts and layers without experts.
    names = sorted({re.escape(site.name).replace(r"\{\}", r"\d+") for site in sites})
    said = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "init_lora_weights": True, "inference_mode": True, "modules_to_save": None,
        "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "use_dora": False,
        "target_modules": rf".*\.layers\.\d+\.({'|'.join(names)})",
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(said, indent=1))


def config_of(folder: Path) -> tuple[int, float]:
    """Rank and scale of a folder's adapters. Raises :class:`Refused`."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise Refused(f"--adapters: there is no {folder / name}")
    said = read_json(folder / CONFIG)
    rank, alpha = said.get("r"), said.get("lora_alpha")
    if said.get("peft_type") != "LORA" or not isinstance(rank, int) or rank < 1:
        raise Refused(f"{folder / CONFIG} is not of LoRA adapters with a rank")
    if not isinstance(alpha, (int, float)):
        raise Refused(f"{folder / CONFIG} has no lora_alpha")
    for name in OTHERS:
        if said.get(name):
            raise Refused(f"{folder / CONFIG}: {name} is {said[name]!r}, which is not known here")
    return rank, alpha / (rank**0.5 if said.get("use_rslora") else rank)


def read(folder: Path, model: Decoder) -> list[Site]:
    """Gives the model the adapters of a folder. Raises :class:`Refused`."""
    rank, scale = config_of(folder)
    with in_one_sentence():
        tensors = dict(jgg.checkpoints.open(folder / WEIGHTS))
    targets = [t for t in TARGETS if any((".experts." in n) == (t == "experts") for n in tensors)]
    dtype = model.embedding.get_value().dtype
    sites = attach(model, targets, rank, scale, dtype=dtype)
    for site in sites:
        for letter, param in (("A", site.pair.a), ("B", site.pair.b)):
            param.set_value(_filled(param.get_value(), site, letter, tensors, dtype))
    if tensors:
        raise Refused(f"{folder / WEIGHTS}: {min(tensors)} belongs to no weight that has adapters")
    return sites


def _filled(like: Any, site: Site, letter: str, tensors: dict[str, np.ndarray], dtype: Any):
    """The array of a site. Modules without a tensor have zeros."""
    out = np.zeros(like.shape, np.float32)
    for at, module in modules(site):
        name = f"{module}.lora_{letter}.weight"
        value = tensors.pop(name, None)
        if value is None:
            continue
        if value.shape != out[at].shape:
            raise Refused(f"{name} has shape {value.shape}, expected {out[at].shape}")
        out[at] = value
    return jnp.asarray(out, dtype)
