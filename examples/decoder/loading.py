"""A folder onto the device, layer by layer, and whether there is room for it."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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

from . import gguf
from .attention import Attention
from .config import Config
from .errors import Refused, is_gguf
from .experts import AXIS, Expert
from .layers import Linear, RMSNorm
from .memory import Need, free, on_one_device
from .model import Block, Decoder, Stack, divides_heads
from .weights import Header, Weights, check_shape, format_of, headers, in_one_sentence
from .weights import quantize as quantize_experts

LAYER = r"model\.layers\.(\d+)\."  # what names of a layer's tensors begin with


@dataclasses.dataclass(frozen=True)
class Options:
    """How a checkpoint is loaded."""

    dtype: str = "bfloat16"
    quantize: str | None = None  # a mode for experts that are not quantized
    devices: int = 1
    tokens: int = 4096  # that the cache has room for
    memory: float | None = None  # GB of a device, instead of what is free
    exact: bool = False  # affine scales of experts stay as they are, whatever kernels take
    unrolled: bool = False  # each layer has arrays of its own, and a step a part for each
    joined: bool = True  # queries, keys and values are one product; adapters want three


def load(folder: Path, config: Config, options: Options) -> Decoder:
    """The model of a folder. Raises :class:`Refused`."""
    return placed(config, weights_of(folder, config, options), options)


def weights_of(folder: Path, config: Config, options: Options) -> Weights:
    """The tensors of a folder, none of which is read yet. Raises :class:`Refused`."""
    with in_one_sentence():
        is_file = is_gguf(folder)
        tensors = gguf.Renamed(folder, config) if is_file else jgg.checkpoints.open(folder)
        said = headers(tensors)
    check_layers(config, said)
    check_sizes(config, said)
    dtype, form = jnp.dtype(options.dtype), format_of(config.quantization)
    return Weights(tensors, said, config.quantization, form, dtype)


def check_layers(config: Config, said: Mapping[str, Header]) -> None:
    """Refuse files of more layers than config.json says."""
    if config.predicts_more:
        return
    for name in sorted(said):
        found = re.match(LAYER, name)
        if found and int(found[1]) >= config.layers:
            raise Refused(
                f"there is a tensor {name}, but config.json says num_hidden_layers {config.layers}"
            )


def check_sizes(config: Config, said: Mapping[str, Header]) -> None:
    """Refuse sizes that are not those of the files, before it is asked whether they fit."""
    d, f, e, names = config.width, config.expert_width, config.router.experts, config.names
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary, d)}
    attention = "model.layers.0.self_attn."
    if config.latent is None:
        shapes[f"{attention}k_proj.weight"] = config.kv_heads * config.head_size, d
    else:
        rank = config.latent.rank + config.latent.rotated
        shapes[f"{attention}kv_a_proj_with_mqa.weight"] = rank, d
    if True in config.moe_layers:
        for moe in (names.moe, "mlp"):
            prefix = f"model.layers.{config.moe_layers.index(True)}.{moe}."
            shapes[f"{prefix}{names.router}.weight"] = e, d
            shapes[f"{prefix}experts.0.{names.gate}.weight"] = f, d
            fused = (e, d, 2 * f) if config.sinks else (e, 2 * f, d)
            shapes[f"{prefix}experts.gate_up_proj"] = fused
            shapes[f"{prefix}input_linear.weight"] = e, 2 * f, d
    for name, shape in shapes.items():
        if name in said and said[name].plain:
            check_shape(name, said[name], shape)


def placed(config: Config, weights: Weights, options: Options) -> Decoder:
    """The model of such weights on the device. Raises :class:`Refused`."""
    put = Placing(config, options, mesh_of(config, options))
    Need.of(config, weights.headers, options).check(free(options), options.devices)
    return assembled(config, weights, options, put)


def shapes(config: Config, weights: Weights, options: Options) -> tuple[Decoder, int]:
    """The model that :func:`placed` makes, with shapes in place of arrays: programs compile for it.
    And the bytes on a device that a layer needs besides, while it is loaded.

    One layer of each kind is read, because tensors decide how they are laid out. Nothing is put on
    a device. Raises :class:`Refused`.
    """
    put = Shapes(config, options, mesh_of(config, options))
    return assembled(config, weights, options, put), put.layer


def assembled(config: Config, weights: Weights, options: Options, put: Placing) -> Decoder:
    if options.quantize and not any(config.moe_layers):
        raise Refused("--quantize is for experts, and it has none")
    root, kinds = weights.at("model"), kinds_of(config, weights.headers)
    embedding = root.table("embed_tokens", config.vocabulary, config.width)
    embedding = put.array(embedding, P())
    norm = RMSNorm.read(root, "norm", config.width, config.norm_epsilon)
    head = None
    if not config.tied:
        head = put.module(Linear.read(weights, "lm_head", config.vocabulary, config.width))
    groups = [[i] for i in range(config.layers)] if options.unrolled else alike(kinds)
    stacks = []
    with put.progress(config.layers) as bar:
        for layers in groups:
            blocks = (Block(config, root.at(f"layers.{i}"), i) for i in layers)
            if options.joined and put.mesh is None:  # devices divide heads: rows of three weights
                blocks = map(with_joined_rows, blocks)
            stacked = put.stacked(counted(blocks, bar), layers, kinds[layers[0]])
            stacks.append(Stack(stacked, [config.windows[i] for i in layers]))
    if options.quantize and put.quantized == {True}:
        raise Refused(
            f"its experts are quantized already ({weights.format}): leave --quantize "
            f"{options.quantize} out"
        )
    return Decoder(config, embedding, stacks, put.module(norm), head, put.mesh)


def with_joined_rows(block: Block) -> Block:
    """One product for queries, keys and values: at a token a step, few kernels are fast ones."""
    if isinstance(block.attention, Attention):
        block.attention.join()
    return block


def counted(blocks: Iterable[Block], bar: tqdm) -> Iterator[Block]:
    for block in blocks:
        yield block
        bar.update()


def kinds_of(config: Config, said: Mapping[str, Header]) -> list[Hashable]:
    """A key for each layer: the same where tensors have the same names, dtypes and shapes."""
    own: list[list] = [[] for _ in range(config.layers)]
    for name, header in said.items():
        found = re.fullmatch(LAYER + "(.*)", name)
        if found and int(found[1]) < config.layers:
            own[int(found[1])].append((found[2], header.dtype, header.shape))
    return [(config.moe_layers[i], frozenset(tensors)) for i, tensors in enumerate(own)]


def alike(kinds: Sequence[Hashable]) -> list[list[int]]:
    """Layers in succession that are of one kind."""
    return [[*group] for _, group in groupby(range(len(kinds)), key=lambda i: kinds[i])]


class Placing:
    """Puts parameters where they belong, in the layout that kernels read."""

    def __init__(self, config: Config, options: Options, mesh: Any):
        self.options, self.mesh = options, mesh
        self.heads = divides_heads(config, mesh)
        self.quantized: set[bool] = set()  # whether experts are, as they are stored
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

    def array(self, value: Any, spec: P) -> Any:
        """On the devices: an array, or those of a quantized weight."""
        return jax.device_put(value, self.at(spec))

    def laid_out(self, value: Any, expert: bool) -> Any:
        """A parameter on the devices, in the format and the layout that it is to have."""
        mode = self.options.quantize
        if expert and mode and value.ndim == 3 and not isinstance(value, jgg.Quantized):
            value = quantize_experts(jnp.asarray(value), mode)
        if self.packs and isinstance(value, jgg.Quantized):
            value = packed(value, self.options.exact)
        return value

    def one(self, path: tuple, param: nnx.Variable) -> nnx.Variable:
        spec, value = self.spec(path, param), param.get_value()
        if isinstance(param, Expert) and value.ndim == 3:
            self.quantized.add(isinstance(value, jgg.Quantized))
        value = self.array(value, spec)
        value = self.laid_out(value, isinstance(param, Expert))
        return param.replace(self.array(value, spec))

    def module(self, module: Any) -> Any:
        graph, state = nnx.split(module)
        return nnx.merge(graph, nnx.map_state(self.one, state))

    def progress(self, layers: int) -> tqdm:
        return tqdm(total=layers, desc="loading", unit="layer", disable=None)

    def stacked(self, blocks: Iterator[Block], layers: list[int], kind: Hashable) -> Block:
        """One block whose parameters are those of all: each is copied to its place, so that the
        host holds one layer at a time and the device hardly more than the model."""
        whole = first = None
        for i, block in enumerate(blocks):
            graph, state = nnx.split(block)
            jax.block_until_ready(whole)  # or the device holds layers that are not copied yet
            state = nnx.map_state(self.one, state)
            if whole is None:
                zeros = lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding)
                first, whole = graph, jax.tree.map(zeros, self._whole(state, len(layers)))
            if jax.tree.structure(state) != jax.tree.structure(whole):
                raise Refused(
                    f"layer {layers[i]} is quantized otherwise than layer {layers[0]}, though its "
                    "tensors look alike"
                )
            whole = _into(whole, state, np.int32(i))
        assert first is not None
        return nnx.merge(first, whole)

    def _whole(self, state: Any, count: int) -> Any:
        """The shapes of so many layers like this one."""

        def of(leaf):
            where = leaf.sharding if self.mesh is None else self.at(P(None, *leaf.sharding.spec))
            return jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype, sharding=where)

        return jax.tree.map(of, state)


class Shapes(Placing):
    """Gives parameters the shapes that they would have there."""

    def __init__(self, config: Config, options: Options, mesh: Any):
        super().__init__(config, options, mesh)
        self.known: dict[Hashable, tuple[Any, Any]] = {}  # a layer of each kind
        self.layer = 0  # bytes of the largest, and of its largest tensor as it is stored

    def array(self, value: Any, spec: P) -> Any:
        of = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.at(spec))
        return jax.tree.map(of, value)

    def laid_out(self, value: Any, expert: bool) -> Any:
        return jax.eval_shape(lambda value: Placing.laid_out(self, value, expert), value)

    def progress(self, layers: int) -> tqdm:
        return tqdm(disable=True)

    def stacked(self, blocks: Iterator[Block], layers: list[int], kind: Hashable) -> Block:
        if kind not in self.known:
            graph, stored = nnx.split(next(blocks))
            state = nnx.map_state(self.one, stored)
            largest = max(map(on_one_device, jax.tree.leaves(stored)))
            changes = self.packs or self.options.quantize is not None
            self.layer = max(self.layer, on_one_device(state) + largest * changes)
            self.known[kind] = graph, state
        graph, state = self.known[kind]
        return nnx.merge(graph, self._whole(state, len(layers)))


@jax.jit(donate_argnums=0)
def _into(whole: Any, part: Any, i: jax.Array) -> Any:
    write = lambda w, p: jax.lax.dynamic_update_index_in_dim(w, p, i, 0)
    return jax.tree.map(write, whole, part)


def packed(q: jgg.Quantized, exact: bool) -> jgg.Quantized:
    """As Hopper's kernels read it; as it is where they cannot, or where affine scales would be
    rounded. Scales of fp8 become 16 bits there in any case: products of what is not packed pack
    it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return jgg.prepack(q, scales_dtype=None if exact else jnp.bfloat16)


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
