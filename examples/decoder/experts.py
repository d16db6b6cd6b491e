"""A mixture of experts: the routers of several architectures, and ``jgg.moe_mlp``."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_groupgemm as jgg

from .architectures import Names
from .config import Config
from .layers import GatedMLP, Linear
from .weights import Weights, joined

AXIS = "devices"  # of the mesh: experts and heads are divided along it


class Expert(nnx.Param):
    """A parameter of all experts of a layer, (E, ...)."""


class MixtureOfExperts(nnx.Module):
    """(T, D) to the same.

    While layers are scanned, their experts are not sliced: those of all layers are one list, of
    which a layer's tokens meet some. So no step copies the weights of a layer.
    """

    def __init__(self, config: Config, layer: Weights):
        names, d, f = config.names, config.width, config.expert_width
        e, gpt_oss = config.router.experts, config.sinks
        # transformers 5 calls Mixtral's like the others', unless it saves the original names.
        newer = layer.has(f"mlp.{names.router}.weight")
        weights = layer.at("mlp" if newer else names.moe)
        self.router = Linear(
            weights.as_stored(names.router, e, d),
            weights.array(names.router + ".bias", e, dtype=np.float32) if gpt_oss else None,
        )
        name = names.correction
        self.correction = nnx.Param(weights.vector(name, e, np.float32)) if name else None
        self.up, self.down = (Expert(w) for w in read_experts(weights, names, e, d, f))
        biases = read_biases(weights, names, e, d, f) if gpt_oss else (None, None)
        self.up_bias, self.down_bias = (None if b is None else Expert(b) for b in biases)
        self.shared = (
            GatedMLP(layer.at(names.shared), d, config.shared_width) if names.shared else None
        )
        self.shared_gate = (
            Linear(weights.dense("shared_expert_gate", 1, d)) if config.shared_gate else None
        )
        self.adapted: Any = nnx.data(None)  # what runs instead of moe_mlp, if there are adapters
        self.routing = config.router
        self.activation: Literal["swiglu", "swiglu_oai"] = config.activation

    def __call__(self, x: jax.Array, layer: Any, exists: jax.Array, mesh: Any):
        index, weight = self.choices(x)
        index = jnp.where(exists[:, None], index, -1)  # no expert: nothing is computed
        names = "up", "down", "up_bias", "down_bias"
        parts = {name: getattr(self, name) for name in names}
        parts = {name: p.get_value() for name, p in parts.items() if p is not None}
        if self.adapted is None:
            y = self._experts(x, parts, index, weight, layer, mesh)
        else:
            y = self.adapted(x, parts, index, weight, layer)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared *= jax.nn.sigmoid(self.shared_gate(x))
            y += shared
        return y

    def choices(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts of each token, and their weights."""
        correction = None if self.correction is None else self.correction.get_value()
        # Weights are multiplied as they are stored, and no product is rounded.
        w, bias, rule = self.router.weight.get_value(), self.router.bias, self.routing
        x = x if w.dtype == jnp.float32 else x.astype(w.dtype)
        choice, _ = jgg.router.choose_for(
            x, w, rule.top_k, transpose_w=True,
            logit_bias=None if bias is None else bias.get_value(), scores=rule.score,
            bias=correction, renormalize=rule.normalized, scale=rule.scale, groups=rule.groups,
            top_groups=rule.chosen_groups,
        )  # fmt: skip
        return choice.expert, choice.weight

    def _experts(self, x, parts: dict[str, Any], index, weight, layer, mesh):
        def here(x, parts, index, weight, layer, device):
            each = jax.tree.leaves(parts["down"])[0].shape[1]  # experts of a layer that are here
            index -= device * each
            index = jnp.where((index >= 0) & (index < each), index + layer * each, -1)
            one_list = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), parts)
            return jgg.moe_mlp(
                x, expert_index=index, expert_weight=weight, activation=self.activation,
                transpose_w=True, **one_list,
            )  # fmt: skip

        if mesh is None:
            return here(x, parts, index, weight, layer, 0)

        def share(x, parts, index, weight, layer):
            y = here(x, parts, index, weight, layer, jax.lax.axis_index(AXIS))
            return jax.lax.psum(y.astype(jnp.float32), AXIS).astype(y.dtype)

        specs = P(), P(None, AXIS), P(), P(), P()
        run = jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=P())
        return run(x, parts, index, weight, layer)


def read_experts(weights: Weights, names: Names, e: int, d: int, f: int) -> tuple[Any, Any]:
    """``up`` (E, 2F, D) and ``down`` (E, D, F), however a checkpoint stores them."""
    if weights.has("experts.gate_up_proj"):  # all experts of a layer in one tensor
        return _one_tensor(weights, e, d, f)
    if weights.has("experts.gate_up_proj_blocks"):  # gpt-oss in MXFP4
        return (
            weights.stacked("experts.gate_up_proj", (e, 2 * f, d)),
            weights.stacked("experts.down_proj", (e, d, f)),
        )
    if weights.has("input_linear.weight"):  # Granite
        return (
            weights.array("input_linear.weight", e, 2 * f, d),
            weights.array("output_linear.weight", e, d, f),
        )
    for stacked in ("switch_mlp", "experts"):  # MLX
        if weights.has(f"{stacked}.gate_proj.weight"):
            return _three_tensors(weights.at(stacked), e, d, f)
    rows = lambda *parts: [tuple(f"experts.{i}.{part}" for part in parts) for i in range(e)]
    up = weights.expert_rows(rows(names.gate, names.up), (e, 2 * f, d))
    return up, weights.expert_rows([name for (name,) in rows(names.down)], (e, d, f))


def _one_tensor(weights: Weights, e: int, d: int, f: int):
    if weights.has("experts.gate_up_proj_weight_scale"):  # ModelOpt
        return (
            weights.stacked("experts.gate_up_proj", (e, 2 * f, d)),
            weights.stacked("experts.down_proj", (e, d, f)),
        )
    if weights.has("router.weight"):  # gpt-oss: transposed, and gate and up by turns
        up = weights.array("experts.gate_up_proj", e, d, 2 * f).swapaxes(1, 2)
        down = weights.array("experts.down_proj", e, f, d).swapaxes(1, 2)
        return by_halves(up), np.ascontiguousarray(down)
    return (
        weights.array("experts.gate_up_proj", e, 2 * f, d),
        weights.array("experts.down_proj", e, d, f),
    )


def _three_tensors(weights: Weights, e: int, d: int, f: int):
    read = lambda name, *shape: (
        weights.stacked(name, shape)
        if weights.format is not None
        else weights.array(name + ".weight", *shape)
    )
    up = joined(read("gate_proj", e, f, d), read("up_proj", e, f, d))
    return up, read("down_proj", e, d, f)


def read_biases(weights: Weights, names: Names, e: int, d: int, f: int):
    """(E, 2F) and (E, D), in the order of :func:`read_experts`' rows."""
    if weights.has("experts.gate_up_proj_bias"):
        up = by_halves(weights.array("experts.gate_up_proj_bias", e, 2 * f))
        return up, weights.array("experts.down_proj_bias", e, d)
    if weights.has("experts.gate_proj.bias"):  # MLX
        parts = [weights.array(f"experts.{name}.bias", e, f) for name in ("gate_proj", "up_proj")]
        return np.concatenate(parts, axis=1), weights.array("experts.down_proj.bias", e, d)
    of = lambda name, n: np.stack([weights.array(f"experts.{i}.{name}.bias", n) for i in range(e)])
    up = np.concatenate([of(names.gate, f), of(names.up, f)], axis=1)
    return up, of(names.down, d)


def formats(model: nnx.Module) -> str:
    """The formats of a model's experts."""
    values = jax.tree.leaves(
        nnx.state(model, Expert), is_leaf=lambda leaf: isinstance(leaf, jgg.Quantized)
    )
    weights = [v for v in values if v.ndim > 3]  # biases have an axis less
    return ", ".join(
        sorted({v.mode if isinstance(v, jgg.Quantized) else v.dtype.name for v in weights})
    )


def by_halves(a: np.ndarray) -> np.ndarray:
    """Rows that take turns, gate and up, as all of gate's and then all of up's."""
    return np.concatenate([a[:, ::2], a[:, 1::2]], axis=1)
