"""MaxText's ``RoutedMoE`` with :func:`moe_mlp` in place of its sort, products and sums."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._core.types import Activation
from .._fp8.recipe import FP8Recipe
from .._moe.moe_mlp import moe_mlp

MODULE = "maxtext.layers.moe"

#: MaxText's activation of gate, and ours of gate and up.
ACTIVATIONS: dict[str, Activation] = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}

#: Settings that ask for something which this layer does not do, and the only values that it takes.
#: Those of kernels that it replaces do not matter.
ONLY: dict[str, tuple] = {
    "quantization": ("", None),
    "mlp_bias": (False,),
    "ragged_buffer_factor": (-1.0, 0.0),
    "eval_ragged_buffer_factor": (-1.0, 0.0),
    "moe_dropless_fallback": (None, "", "None"),
    "use_ring_of_experts": (False,),
    "num_moe_token_chunks": (1,),
    "num_moe_emb_chunks": (0,),
    "use_random_routing": (False,),
    "shard_exp_on_fsdp": (False,),
    "use_2d_fsdp_sharding": (False,),
    "use_batch_split_schedule": (False,),
    "moe_fsdp_use_two_stage_all_gather": (False,),
    "using_pipeline_parallelism": (False,),
    "mlp_activations_limit": (0.0, -1.0, None),
}


@contextlib.contextmanager
def replaced(recipe: FP8Recipe | None = None) -> Iterator[None]:
    """Within the block, ``RoutedMoE.sparse_matmul`` runs :func:`moe_mlp`."""
    layer = importlib.import_module(MODULE).RoutedMoE
    theirs = layer.sparse_matmul
    # A function, and no partial: it becomes a method.
    layer.sparse_matmul = lambda self, *args, **kwargs: sparse_matmul(
        self, *args, recipe=recipe, **kwargs
    )
    try:
        yield
    finally:
        layer.sparse_matmul = theirs


def refuse(self: Any, kernels: list, biases: list, tokens: tuple[int, ...]) -> None:
    """Raises ``NotImplementedError`` for a layer that :func:`sparse_matmul` does not compute."""
    config = self.config
    why = [
        f"{name}={value!r}"
        for name, values in ONLY.items()
        if (value := getattr(config, name, values[0])) not in values
    ]
    block = str(getattr(config.decoder_block, "value", config.decoder_block))
    if block in ("gpt_oss", "llama4"):
        why.append(f"decoder_block={block}, whose experts are of another kind")
    if config.mlp_activations[0] not in ACTIVATIONS or list(config.mlp_activations[1:]) != [
        "linear"
    ]:
        why.append(f"mlp_activations={list(config.mlp_activations)}")
    if self.should_update_load_balance():
        why.append(f"routed_bias_update_rate={config.routed_bias_update_rate}")
    if config.load_balance_loss_weight and getattr(self, "is_hash_routing", False):
        why.append("the load-balancing loss of a layer with hash routing")
    if self.get_tensor_parallelism_size() > 1:
        why.append("experts divided by tensor parallelism")
    if any(bias is not None for bias in biases):
        why.append("biases of experts")
    if not all(isinstance(kernel, jax.Array) for kernel in kernels):
        why.append("quantized weights")
    if self.get_expert_parallelism_size() > 1 and tokens[0] == 1:
        why.append("expert parallelism with a batch of one")
    if why:
        raise NotImplementedError(
            f"jax_groupgemm.integrations.maxtext: with moe_mlp there is no {', no '.join(why)}. "
            "Train without the layer: MaxText's own layer then runs this package's products."
        )


def token_spec(self: Any, shape: tuple[int, ...]) -> P:
    """The spec of (batch, sequence, ...): as MaxText divides them, but the batch is whole where
    devices do not divide it."""
    batch, length = self._logical_to_mesh_axes(("activation_batch", "activation_norm_length"))
    named = (batch,) if isinstance(batch, str) else batch or ()
    devices = 1
    for name in named:
        devices *= self.mesh.shape.get(name, 1)
    return P(batch if shape[0] % devices == 0 else None, length)


def auxiliary_loss(self: Any, chosen, gate_logits, pre_bias_logits) -> Any:
    """MaxText's load-balancing loss, of the whole batch."""
    if not self.config.load_balance_loss_weight > 0.0:
        return None
    logits = gate_logits if pre_bias_logits is None else pre_bias_logits
    if importlib.import_module(MODULE).uses_megatron_seq_aux_loss(self.config):
        return self.megatron_seq_aux_loss(logits)
    scores = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(self.dtype)
    return self.load_balance_loss(chosen, scores)


def sparse_matmul(
    self: Any, inputs, gate_logits, pre_bias_logits, w0_kernel, w1_kernel, wo_kernel,
    w0_bias=None, w1_bias=None, wo_bias=None, input_ids=None, forced_routed_experts=None, *,
    recipe: FP8Recipe | None = None,
):  # fmt: skip
    """In place of ``RoutedMoE.sparse_matmul``: the same arguments and results.

    inputs (batch, sequence, D), logits (batch, sequence, experts), w0 and w1 (experts, D, F), wo
    (experts, F, D). Tokens are divided as MaxText divides them. Experts are divided along its mesh
    axis ``expert``, and tokens travel to them; along other axes the weights are whole.
    """
    kernels = [w0_kernel, w1_kernel, wo_kernel]
    refuse(self, kernels, [w0_bias, w1_bias, wo_bias], inputs.shape)
    weight, chosen = self.get_topk(
        gate_logits, pre_bias_logits, self.rngs, input_ids, forced_routed_experts
    )
    loss = auxiliary_loss(self, chosen, gate_logits, pre_bias_logits)
    axis = self._expert_parallelism_name if self.get_expert_parallelism_size() > 1 else None
    activation = ACTIVATIONS[self.config.mlp_activations[0]]

    def layer(x, chosen, weight, w0, w1, wo):
        up = jnp.stack([w0, w1], axis=2)
        y = moe_mlp(
            x.reshape(-1, x.shape[-1]), up, wo, chosen.reshape(-1, chosen.shape[-1]),
            weight.reshape(-1, weight.shape[-1]), activation=activation, axis_name=axis,
            recipe=recipe,
        )  # fmt: skip
        return y.reshape(x.shape)

    tokens = token_spec(self, inputs.shape)
    if self.mesh.size > 1:
        of_experts = P(axis)
        layer = jax.shard_map(
            layer,
            mesh=self.mesh,
            in_specs=(*[tokens] * 3, *[of_experts] * 3),
            out_specs=tokens,
        )
    cast = functools.partial(jnp.asarray, dtype=self.dtype)
    y = layer(inputs, chosen, weight, *map(cast, kernels))
    nnx = importlib.import_module("flax.nnx")
    self.sow(nnx.Intermediate, "moe_has_overflow", jnp.zeros((), jnp.bool_))
    return y.astype(self.dtype), loss, None
