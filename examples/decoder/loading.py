"""A folder onto the device, layer by layer, and whether there is room for it."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jax_groupgemm as jgg

from .attention import Attention
from .config import Config
from .errors import Refused
from .experts import AXIS, Expert
from .layers import Linear, RMSNorm
from .model import Block, Decoder, Stack, attention_of, divides_heads
from .weights import BITS, FLOAT_HEADERS, Header, Weights, format_of, headers, in_one_sentence
from .weights import quantize as quantize_experts

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Options:
    """How a checkpoint is loaded."""

    dtype: str = "bfloat16"
    quantize: str | None = None  # a mode for experts that are not quantized
    devices: int = 1
    tokens: int = 4096  # that the cache has room for
    memory: float | None = None  # GB of a device, instead of what is free
    exact: bool = False  # scales of affine experts stay as they are, whatever kernels take
    unrolled: bool = False  # each layer has arrays of its own, and a step a part for each
    joined: bool = True  # queries, keys and values are one product; adapters want three


def load(folder: Path, config: Config, options: Options) -> Decoder:
    """The model of a folder. Raises :class:`Refused`."""
    with in_one_sentence():
        tensors = jgg.checkpoints.open(folder)
        said = headers(folder, tensors)
    dtype, form = jnp.dtype(options.dtype), format_of(config.quantization)
    return placed(config, Weights(tensors, said, config.quantization, form, dtype), options)


def placed(config: Config, weights: Weights, options: Options) -> Decoder:
    """The model of such weights on the device. Raises :class:`Refused`."""
    said, mesh = weights.headers, mesh_of(config, options)
    Need.of(config, said, options).check(free(options), mesh)
    put = Placing(config, options, mesh)
    root = weights.at("model")
    embedding = root.dense("embed_tokens", config.vocabulary, config.width)
    embedding = jax.device_put(embedding, put.at(P()))
    norm = RMSNorm.read(root, "norm", config.width, config.norm_epsilon)
    head = None
    if not config.tied:
        head = put.module(Linear.read(weights, "lm_head", config.vocabulary, config.width))
    stacks, bar = [], tqdm(total=config.layers, desc="loading", unit="layer", disable=None)
    with bar:
        groups = [[i] for i in range(config.layers)] if options.unrolled else alike(config, said)
        for layers in groups:
            blocks = (Block(config, root.at(f"layers.{i}"), i) for i in layers)
            if options.joined and mesh is None:  # devices divide heads: rows of three weights
                blocks = map(with_joined_rows, blocks)
            stacked = put.stacked(counted(blocks, bar), layers)
            stacks.append(Stack(stacked, [config.windows[i] for i in layers]))
    return Decoder(config, embedding, stacks, put.module(norm), head, mesh)


def with_joined_rows(block: Block) -> Block:
    """One product for queries, keys and values: at a token a step, few kernels are fast ones."""
    if isinstance(block.attention, Attention):
        block.attention.join()
    return block


def counted(blocks: Iterable[Block], bar: tqdm) -> Iterator[Block]:
    for block in blocks:
        yield block
        bar.update()


def alike(config: Config, said: Mapping[str, Header]) -> list[list[int]]:
    """Layers in succession whose tensors have the same names, dtypes and shapes."""
    own: list[list] = [[] for _ in range(config.layers)]
    for name, header in said.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if found and int(found[1]) < config.layers:
            own[int(found[1])].append((found[2], header.dtype, header.shape))
    kinds = [(config.moe_layers[i], frozenset(tensors)) for i, tensors in enumerate(own)]
    return [[*group] for _, group in groupby(range(config.layers), key=lambda i: kinds[i])]


class Placing:
    """Puts parameters where they belong, in the layout that kernels read."""

    def __init__(self, config: Config, options: Options, mesh: Any):
        self.options, self.mesh = options, mesh
        self.heads = divides_heads(config, mesh)
        # Only Hopper's kernels have a layout of their own, and it is for bfloat16 products.
        capability = getattr(jax.devices()[0], "compute_capability", "")
        self.packs = capability == "9.0" and options.dtype == "bfloat16"

    def spec(self, path: tuple, param: nnx.Variable) -> P:
        """The sharding of a parameter: experts are divided, and heads of plain weights."""
        if isinstance(param, Expert):
            return P(AXIS)
        if not self.heads or isinstance(param.get_value(), jgg.Quantized):
            return P()
        heads = {("out", "weight"): P(None, AXIS)}  # its rows are summed over heads
        heads |= {(name, "weight"): P(AXIS) for name in ("query", "key", "value")}
        return heads.get(path[-2:], P())

    def at(self, spec: P) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def one(self, path: tuple, param: nnx.Variable) -> nnx.Variable:
        value: Any = param.get_value()
        value = jax.device_put(value, self.at(self.spec(path, param)))
        mode = self.options.quantize
        matrix = isinstance(param, Expert) and not isinstance(value, jgg.Quantized)
        if mode is not None and matrix and value.ndim == 3:
            value = quantize_experts(jnp.asarray(value), mode)
        if self.packs and isinstance(value, jgg.Quantized):
            value = packed(value, self.options.exact)
        return param.replace(value)

    def module(self, module: Any) -> Any:
        graph, state = nnx.split(module)
        return nnx.merge(graph, nnx.map_state(self.one, state))

    def stacked(self, blocks: Iterator[Block], layers: list[int]) -> Block:
        """One block whose parameters are those of all: each is copied to its place, so that the
        host holds one layer at a time and the device hardly more than the model."""
        whole = first = None
        for i, block in enumerate(blocks):
            graph, state = nnx.split(block)
            state = nnx.map_state(self.one, state)
            if whole is None:
                first, whole = graph, self._empty(state, len(layers))
            if jax.tree.structure(state) != jax.tree.structure(whole):
                raise Refused(
                    f"layer {layers[i]} is quantized otherwise than layer {layers[0]}, though its "
                    "tensors look alike"
                )
            whole = _into(whole, state, np.int32(i))
        assert first is not None
        return nnx.merge(first, whole)

    def _empty(self, state: Any, count: int) -> Any:
        def zeros(leaf):
            where = leaf.sharding
            if self.mesh is not None:
                where = NamedSharding(self.mesh, P(None, *where.spec))
            return jnp.zeros((count, *leaf.shape), leaf.dtype, device=where)

        return jax.tree.map(zeros, state)


@jax.jit(donate_argnums=0)
def _into(whole: Any, part: Any, i: jax.Array) -> Any:
    write = lambda w, p: jax.lax.dynamic_update_index_in_dim(w, p, i, 0)
    return jax.tree.map(write, whole, part)


def packed(q: jgg.Quantized, exact: bool) -> jgg.Quantized:
    """As Hopper's kernels read it; as it is where they cannot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return jgg.prepack(q, scales_dtype=None if exact else jnp.bfloat16)


# ---- room ------------------------------------------------------------------------------------


def mesh_of(config: Config, options: Options) -> Any:
    if options.devices == 1:
        return None
    if config.router.experts % options.devices:
        raise Refused(
            f"{config.router.experts} experts cannot be divided among {options.devices} devices"
        )
    if len(jax.devices()) < options.devices:
        raise Refused(f"there are {len(jax.devices())} devices, not {options.devices}")
    return jax.make_mesh(
        (options.devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[: options.devices],
    )  # fmt: skip


def free(options: Options) -> float:
    """Bytes of one device that are not in use."""
    if options.memory is not None:
        return options.memory * GB
    device = jax.devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    # Devices that are made of this machine's cores share its memory.
    found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    return float(found[1]) * 1024 / options.devices if found else float("inf")


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of a device."""

    experts: float
    others: float
    cache: float
    weights_of_experts: float  # how many numbers
    quantized: bool  # the experts of the checkpoint are

    @classmethod
    def of(cls, config: Config, said: Mapping[str, Header], options: Options) -> Need:
        itemsize = jnp.dtype(options.dtype).itemsize
        experts = others = 0.0
        quantized = False
        for name, header in said.items():
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            if layer and int(layer[1]) >= config.layers:
                continue  # it predicts several tokens, and is not loaded
            plain = header.dtype in FLOAT_HEADERS
            # Scales of AWQ and GPTQ are read as two float32 for each.
            scales = name.endswith((".scales", "qzeros"))
            nbytes = header.size * (4 if scales else itemsize) if plain else header.nbytes
            if ".experts." in name or ".switch_mlp." in name:
                experts += nbytes
                quantized |= not plain
            else:
                others += nbytes
        layers = sum(config.moe_layers) * config.router.experts
        numbers = 3.0 * layers * config.width * config.expert_width
        if options.quantize is not None and not quantized:
            experts = numbers * BITS[options.quantize] / 8
        shapes = attention_of(config).cache(config).values()
        token = sum(int(np.prod(shape)) for shape in shapes) * itemsize * config.layers
        return cls(
            experts / options.devices, others, token * options.tokens,
            numbers / options.devices, quantized,
        )  # fmt: skip

    @property
    def total(self) -> float:
        return self.experts + self.others + self.cache

    def check(self, room: float, mesh: Any) -> None:
        """Refuse what does not fit, with the formats that would."""
        rest = self.others + self.cache
        # A step's own arrays, and a layer that is being loaded.
        margin = 1.05
        if self.total * margin <= room:
            return
        sizes = {mode: self.weights_of_experts * bits / 8 for mode, bits in BITS.items()}
        fitting = [
            f"{mode} ({size / GB:.2f} GB)"
            for mode, size in sizes.items()
            if size < self.experts and (size + rest) * margin <= room
        ]
        text = (
            f"{self.experts / GB:.2f} GB of experts, {self.others / GB:.2f} GB of other weights "
            f"and {self.cache / GB:.2f} GB of cache do not fit into the {room / GB:.2f} GB that "
            f"{'a device' if mesh is not None else 'the device'} has free"
        )
        if not fitting:
            more = "no format of experts makes them fit: use more --devices, or fewer --tokens"
        elif self.quantized:
            more = f"a checkpoint would fit whose experts are in {', '.join(fitting)}"
        else:
            more = f"experts would fit with --quantize {' or '.join(fitting)}"
        raise Refused(f"{text}; {more}")
