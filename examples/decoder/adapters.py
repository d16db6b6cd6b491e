"""Low-rank adapters (LoRA) beside the frozen weights of a decoder.

An adapter of a weight (N, K) is ``a`` (r, K) and ``b`` (N, r), in PEFT's layout. It adds
``x @ a.T @ b.T * scale`` to the weight's product. Every expert has adapters of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jax_groupgemm as jgg

from .config import Config
from .errors import Refused
from .experts import MixtureOfExperts
from .layers import Linear
from .model import Decoder, Stack

TARGETS = ("experts", "attention")
#: Architectures whose checkpoints have one tensor for the experts of a layer.
IN_ONE_TENSOR = ("gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid")


class Adapter(nnx.Param):
    """A parameter that is trained. All others are frozen."""


class Pair(nnx.Module):
    """The two matrices of an adapter, with axes for layers and experts in front."""

    def __init__(self, a: jax.Array, b: jax.Array, scale: float):
        self.a, self.b, self.scale = Adapter(a), Adapter(b), scale

    def scaled(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """The matrices, with the scale in the second."""
        a, b = self.a.get_value(), self.b.get_value() * self.scale
        return a.astype(dtype), b.astype(dtype)


class AdaptedLinear(nnx.Module):
    """A frozen layer and its adapter."""

    def __init__(self, frozen: Linear, pair: Pair):
        self.frozen, self.pair = frozen, pair

    def __call__(self, x: jax.Array) -> jax.Array:
        a, b = self.pair.scaled(x.dtype)
        precision = "highest" if x.dtype == jnp.float32 else None
        low = jnp.matmul(x, a.T, precision=precision)
        return self.frozen(x) + jnp.matmul(low, b.T, precision=precision)


class AdaptedExperts(nnx.Module):
    """``jgg.moe_mlp`` for frozen experts and their adapters.

    The frozen experts of all layers stay one list. The adapters are a layer's own, so that their
    gradients are too.
    """

    def __init__(self, gate: Pair, up: Pair, down: Pair):
        self.gate, self.up, self.down = gate, up, down

    def __call__(self, x, parts: dict[str, Any], index, weight, layer):
        layers, each = jax.tree.leaves(parts["down"])[0].shape[:2]
        routing = jgg.route(index, each)
        sizes = routing.group_sizes
        listed = jnp.zeros((layers * each,), sizes.dtype)
        listed = lax.dynamic_update_slice(listed, sizes, (layer * each,))

        def frozen(rows, w):
            w = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), w)
            if isinstance(w, jgg.Quantized):
                return jgg.grouped_qmm(rows, w, listed)
            return jgg.grouped_mm(rows, w, listed, transpose_w=True)

        def adapted(rows, pair, out):
            a, b = pair.scaled(rows.dtype)
            low = jgg.grouped_mm(rows, a, sizes, transpose_w=True)
            return jgg.grouped_mm(low, b, sizes, transpose_w=True, existing_out=out)

        rows = jgg.dispatch(x, routing)
        gate, up = jnp.split(frozen(rows, parts["up"]), 2, axis=1)
        gate, up = adapted(rows, self.gate, gate), adapted(rows, self.up, up)
        hidden = jax.nn.silu(gate) * up
        rows = adapted(hidden, self.down, frozen(hidden, parts["down"]))
        return jgg.combine(rows, routing, weight)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where adapters may be: the same layer of the network in several layers of the model."""

    layers: range
    experts: int  # 0: there is one adapter for each layer
    name: str  # of the module in a layer, with {} for the expert
    n: int
    k: int

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes for layers and experts."""
        return (len(self.layers), self.experts)[: 1 + bool(self.experts)]


@dataclasses.dataclass(frozen=True)
class Site(Place):
    """Where adapters are."""

    pair: Pair


@dataclasses.dataclass
class Maker:
    """Makes pairs whose products are 0."""

    rank: int
    scale: float
    key: jax.Array
    dtype: Any
    made: int = 0

    def __call__(self, *lead: int, n: int, k: int) -> Pair:
        key, self.made = jax.random.fold_in(self.key, self.made), self.made + 1
        a = jax.random.uniform(key, (*lead, self.rank, k), minval=-1, maxval=1) / k**0.5
        return Pair(a.astype(self.dtype), jnp.zeros((*lead, n, self.rank), self.dtype), self.scale)


def attach(
    model: Decoder, targets: Sequence[str], rank: int, scale: float, *, seed: int = 0,
    dtype: Any = jnp.float32,
) -> list[Site]:  # fmt: skip
    """Gives the model adapters that do nothing yet. Raises :class:`Refused`."""
    if model.mesh is not None:
        raise Refused("adapters run on one device")
    make, sites, of_experts = Maker(rank, scale, jax.random.key(seed), dtype), [], []
    for stack, attribute, place in places(model, targets):
        pair = make(*place.lead, n=place.n, k=place.k)
        sites.append(Site(**vars(place), pair=pair))
        if not place.experts:
            attention = stack.layers.attention
            setattr(attention, attribute, AdaptedLinear(getattr(attention, attribute), pair))
            continue
        of_experts.append(pair)
        if attribute == "down":
            mlp = stack.layers.mlp
            assert isinstance(mlp, MixtureOfExperts)
            mlp.adapted, of_experts = AdaptedExperts(*of_experts), []
    return sites


def places(model: Decoder, targets: Sequence[str]) -> Iterator[tuple[Stack, str, Place]]:
    """Stacks, attributes of what they are made of, and what that is. Raises :class:`Refused`."""
    config, first = model.config, 0
    check(config, targets)
    for stack in model.stacks:
        layers = range(first, first + len(stack.windows))
        first = layers.stop
        if "attention" in targets:
            for attribute, name in attention_names(config):
                linear: Linear | None = getattr(stack.layers.attention, attribute)
                assert linear is not None, "loaded with joined=False"
                n, k = linear.weight.get_value().shape[-2:]
                yield stack, attribute, Place(layers, 0, f"self_attn.{name}", n, k)
        if "experts" in targets and isinstance(stack.layers.mlp, MixtureOfExperts):
            names, e, d, f = config.names, config.router.experts, config.width, config.expert_width
            for attribute, n, k in (("gate", f, d), ("up", f, d), ("down", d, f)):
                name = f"{names.moe}.experts.{{}}.{getattr(names, attribute)}"
                yield stack, attribute, Place(layers, e, name, n, k)


def check(config: Config, targets: Sequence[str]) -> None:
    """Whether a model can have such adapters, before it is loaded."""
    if not any(config.moe_layers):
        raise Refused(
            f"{config.architecture} has no experts, and adapters are for models with them"
        )
    if "experts" in targets and config.architecture in IN_ONE_TENSOR:
        raise Refused(
            f"{config.architecture} keeps all experts of a layer in one tensor, for which PEFT has "
            "another layout: use --targets attention"
        )


def attention_names(config: Config) -> Iterator[tuple[str, str]]:
    """Attributes of the decoder's attention, and what Hugging Face calls them. Latent attention's
    ``kv_b_proj`` is no product here, and has no adapter."""
    if config.latent is None:
        yield from (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
    elif config.latent.query_rank is None:
        yield from (("query", "q_proj"), ("latent", "kv_a_proj_with_mqa"))
    else:
        yield from (("query_down", "q_a_proj"), ("query", "q_b_proj"))
        yield "latent", "kv_a_proj_with_mqa"
    yield "out", "o_proj"
