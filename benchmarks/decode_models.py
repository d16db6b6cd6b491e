"""The models of benchmarks.decode: public configurations, and weights that are drawn on the device.

Quantized weights are random codes with scales that make an element's variance 1 / K, as trained
layers roughly have, so hidden states and logits stay finite. Each tensor has a seed of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_groupgemm as jgg
from examples.decoder import config as configs
from examples.decoder.config import Config
from examples.decoder.loading import Options, placed, shapes
from examples.decoder.memory import Need, Use, free
from examples.decoder.model import Block, Decoder
from examples.decoder.weights import Header, Weights

QWEN3 = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "moe_intermediate_size": 768,
    "intermediate_size": 6144, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
    "num_experts_per_tok": 4, "intermediate_size": 2880, "vocab_size": 201088,
    "rms_norm_eps": 1e-5, "sliding_window": 128, "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "intermediate_size": 14336, "vocab_size": 32000,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "moe_intermediate_size": 64, "intermediate_size": 64, "vocab_size": 256,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and which of its layers a checkpoint in that format has quantized."""

    model: str
    values: Mapping[str, Any]
    format: str | None  # of experts
    dense: str | None = None  # the format of attention's layers
    head: str | None = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.format or 'bfloat16'}"

    def config(self, layers: int | None = None, tiny: bool = False) -> Config:
        values = dict(self.values) | (TINY if tiny else {})
        if tiny:
            number = "num_experts" if "num_experts" in values else "num_local_experts"
            values |= {number: 8, "num_experts_per_tok": 2}
        if layers is not None:
            values["num_hidden_layers"] = layers
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(values))
            return configs.read(Path(folder))


#: Dense layers as the released checkpoints have them: MLX quantizes the head too, gpt-oss experts
#: alone.
CASES = (
    Case("Qwen3-30B-A3B", QWEN3, "nvfp4", "nvfp4"),
    Case("Qwen3-30B-A3B", QWEN3, "affine4", "affine4", "affine4"),
    Case("Qwen3-30B-A3B", QWEN3, "fp8", "fp8"),
    Case("gpt-oss-120b", GPT_OSS, "mxfp4"),
    Case("Mixtral-8x7B", MIXTRAL, "affine4", "affine4", "affine4"),
)


# ---- drawing -------------------------------------------------------------------------------------

_E2M1_SPREAD = 2.93  # of codes that are all equally likely
_AFFINE_SPREAD = 4.61  # of 0 to 15
_E4M3_SPREAD = 0.60  # of codes below 2


@functools.partial(jax.jit, static_argnames=("shape", "format", "dtype"))
def drawn(seed: int, shape: tuple[int, ...], format: str | None, dtype: str) -> Any:
    """An array (..., N, K), or a Quantized that stands for one."""
    *lead, n, k = shape
    spread = k**-0.5
    key, other = jax.random.split(jax.random.key(seed))
    if format is None:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(spread, dtype)
    if format == "fp8":  # without the exponent's upper half, so that there is no NaN
        codes = jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(0xBF)
        blocks = (*lead, -(-n // 128), -(-k // 128))
        scales = _between(other, blocks) * (spread / _E4M3_SPREAD)
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        return _quantized(codes, scales, mode="fp8", bits=8, block=(128, 128))
    codes = jax.random.bits(key, (*lead, n, k // 8), jnp.uint32)
    if format == "affine4":
        group = 64 if k % 64 == 0 else 32
        scales = (_between(other, (*lead, n, k // group)) * (spread / _AFFINE_SPREAD)).astype(dtype)
        biases = scales * jnp.asarray(-7.5, dtype)
        return _quantized(codes, scales, biases, mode="affine", bits=4, group_size=group)
    if format == "mxfp4":
        power = 127 + math.floor(math.log2(spread / _E2M1_SPREAD))  # or one more
        scales = jax.random.randint(other, (*lead, n, k // 32), power, power + 2, jnp.uint8)
        return _quantized(codes, scales, mode="mxfp4", bits=4, group_size=32)
    if format != "nvfp4":
        raise ValueError(f"format {format!r}")
    scales = jax.random.randint(other, (*lead, n, k // 16), 0x34, 0x3C, jnp.uint8)  # around 1
    whole = jnp.full(lead, spread / _E2M1_SPREAD, jnp.float32)
    return _quantized(codes, scales, None, whole, mode="nvfp4", bits=4, group_size=16)


@functools.cache
def _kind(shape: tuple[int, ...], format: str | None, dtype: str) -> tuple[Any, int]:
    """Shapes and bytes of the parameters; nothing is drawn."""
    kind = jax.eval_shape(functools.partial(drawn, shape=shape, format=format, dtype=dtype), 0)
    return kind, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kind))


def _between(key, shape):
    return jax.random.uniform(key, shape, jnp.float32, 0.7, 1.3)


def _quantized(*leaves, **static) -> jgg.Quantized:
    return jgg.Quantized(*leaves, **({"group_size": 128} | static))


@dataclasses.dataclass(frozen=True)
class Drawn(Weights):
    """Weights that no file has. Matrices are drawn on the device, vectors on the host. ``headers``
    is filled in by what is asked for; where it is all that is wanted, nothing is drawn."""

    headers: dict[str, Header]
    case: Case = CASES[0]
    only_headers: bool = False
    on_host: bool = False  # what is drawn, as what a file gives is

    def has(self, name: str) -> bool:
        gpt_oss = self.case.values["model_type"] == "gpt_oss"
        return gpt_oss and name in ("experts.gate_up_proj_blocks", "experts.gate_up_proj_bias")

    def array(self, name: str, *shape: int, dtype: Any = None) -> Any:
        dtype = jnp.dtype(self.dtype if dtype is None else dtype)
        if len(shape) > 1 and not name.endswith("bias"):
            return self._drawn(name, shape, None, dtype)
        self._said(name, shape, dtype.itemsize * int(np.prod(shape)), plain=True)
        if self.only_headers or name.endswith("norm.weight"):
            return np.ones(shape, dtype)
        return np.random.default_rng(self._seed(name)).normal(0, 0.02, shape).astype(dtype)

    def linear(self, name: str, n: int, k: int) -> Any:
        format = self.case.head if name == "lm_head" else self.case.dense
        return self._drawn(name, (n, k), format)

    def dense(self, name: str, n: int, k: int, dtype: Any = None) -> Any:
        return self._drawn(name, (n, k), None, dtype)

    def as_stored(self, name: str, n: int, k: int) -> Any:
        return self.dense(name, n, k)

    def expert_rows(self, prefixes: list, shape: tuple[int, int, int]) -> Any:
        name = prefixes[0] if isinstance(prefixes[0], str) else "+".join(prefixes[0])
        return self._drawn(name, shape, self.case.format)

    def stacked(self, name: str, shape: tuple[int, int, int]) -> Any:
        return self._drawn(name, shape, self.case.format)

    def _drawn(self, name: str, shape, format: str | None, dtype: Any = None) -> Any:
        dtype = jnp.dtype(self.dtype if dtype is None else dtype).name
        kind, nbytes = _kind(tuple(shape), format, dtype)
        self._said(name, shape, nbytes, plain=format is None)
        if self.only_headers:
            return kind
        value = drawn(self._seed(name), tuple(shape), format, dtype)
        return jax.device_get(value) if self.on_host else value

    def _said(self, name: str, shape, nbytes: int, plain: bool) -> None:
        self.headers[self.prefix + name] = Header("BF16" if plain else "U8", tuple(shape), nbytes)

    def _seed(self, name: str) -> int:
        return zlib.crc32((self.prefix + name).encode()) >> 1


def headers(case: Case, config: Config, dtype: str) -> dict[str, Header]:
    """Every tensor of the model, none of which is made."""
    asked = Drawn({}, {}, {}, case.format, jnp.dtype(dtype), case=case, only_headers=True)
    root = asked.at("model")
    root.dense("embed_tokens", config.vocabulary, config.width)
    root.array("norm.weight", config.width)
    if not config.tied:
        asked.linear("lm_head", config.vocabulary, config.width)
    for i in range(config.layers):
        Block(config, root.at(f"layers.{i}"), i)
    return asked.headers


def weights_of(case: Case, config: Config, dtype: str, on_host: bool = False) -> Drawn:
    """In place of a folder's."""
    said = headers(case, config, dtype)
    return Drawn({}, said, {}, case.format, jnp.dtype(dtype), case=case, on_host=on_host)


class Model:
    """One with room for so many tokens of all sequences, that is not made yet."""

    def __init__(self, case: Case, config: Config, args, tokens: int):
        self.config = dataclasses.replace(config, attention=args.attention)
        self.options = Options(args.dtype, tokens=tokens, unrolled=not args.scanned)
        self.weights = weights_of(case, config, args.dtype)
        self.room = free(self.options)
        self.need = Need.of(self.config, self.weights.headers, self.options)
        #: Programs compile for its shapes.
        self.shapes, layer = shapes(self.config, self.weights, self.options)
        # Layers are drawn on the device, where the one before still is.
        self.layer = 2 * layer

    def announced(self, cache: Any, program: jax.stages.Compiled) -> Need:
        """As examples/generate.py announces it, for one program."""
        return self.need.compiled(Use.of(nnx.state(self.shapes), cache, [program]), self.layer)

    def made(self) -> Decoder:
        model = placed(self.config, self.weights, self.options)
        jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        return model
