"""``moe_mlp``: a mixture of experts, whose experts are two products with an activation between."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from .._core import check, dtypes
from .._core.operations import INLINE, operation_of_its_own_gradient
from .._core.primitive import vary_alike
from .._core.types import Activation, Implementation, Integers, Transport
from .._fp8.recipe import FP8Recipe
from .._fp8.state import FP8State, across_devices
from .._nvfp4.grouped_linear import NVFP4Recipe
from .._quantized.array import Quantized
from . import expert_parallel, sharding
from .experts import experts
from .layer import Layer, checked
from .routing import first_expert, route
from .transport import collect, send


@operation_of_its_own_gradient
def moe_mlp(
    x: ArrayLike,
    up: ArrayLike | Quantized,
    down: ArrayLike | Quantized,
    expert_index: Integers,
    expert_weight: ArrayLike,
    *,
    activation: Activation = "swiglu",
    up_bias: ArrayLike | None = None,
    down_bias: ArrayLike | None = None,
    transpose_w: bool | None = None,
    expert_offset: ArrayLike | None = None,
    axis_name: Hashable | None = None,
    transport: Transport | None = None,
    max_rows: int | None = None,
    recipe: NVFP4Recipe | FP8Recipe | None = None,
    quantized: tuple[Quantized, Quantized] | None = None,
    key: jax.Array | None = None,
    state: tuple[FP8State, FP8State] | None = None,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation | Literal["composed"] | None = None,
) -> jax.Array:
    """``y[t] = sum_j weight[t, j] * (act(x[t] @ up[e] + up_bias[e]) @ down[e] + down_bias[e])``,
    where ``e = expert_index[t, j]``; **pairs of token and expert are grouped** by expert.

    A pair whose index names no expert does not exist: it adds nothing, has no gradient and reads
    nothing. So you need no other argument for padding tokens, dropped tokens or a variable number
    of experts for each token. The layer drops no token, and pads nothing.

    ``h = x @ up + up_bias`` is rounded to the operands' dtype, and so is the activation of the
    rounded h. Sums are float32; sums over j add in the order of j and are rounded once.

    Args:
      x: ``(..., D)``, a token each.
      up: ``(E, D, 2F)`` for a gated activation, gate and up as the halves of the last axis, or
        ``(E, D, F)``; with ``transpose_w=True`` ``(E, 2F, D)`` or ``(E, F, D)``. An array, or a
        :class:`Quantized` of any format. An array may have gate and up as an axis of its own,
        ``(E, D, 2, F)`` or ``(E, 2, F, D)``, and F may be sharded then without an exchange.
      down: ``(E, F, D)``; with ``transpose_w=True`` ``(E, D, F)``. An array or a
        :class:`Quantized`.
      expert_index: integers ``(..., k)``.
      expert_weight: ``(..., k)``, floats of any dtype; the result's dtype does not depend on it.
      activation: as in :func:`grouped_mm`.
      up_bias: ``(E, 2F)``, which may be ``(E, 2, F)``, or ``(E, F)``.
      down_bias: ``(E, D)``.
      transpose_w: None stands for False where up is an array, and True where it is quantized.
      expert_offset: integer of shape ``()`` or ``(1,)``, may be traced. ``up`` and ``down`` then
        hold experts ``[expert_offset, expert_offset + E)`` of a longer list.
      axis_name: of the mesh axis, or a tuple of axes, that a ``jax.shard_map`` around this call
        maps. Each device along the axis holds E experts, the first device the first ones, and
        tokens of its own. ``expert_index`` counts the experts of all devices; every other argument
        is this device's. There is no ``expert_offset`` then.
      transport: how tokens travel to experts of other devices, see below; None chooses. Sums have
        the same order with both transports, but XLA may contract multiply-adds of one of them, as
        it does on CPUs: results then differ by float32 roundings. ``transport`` has no effect if
        tokens need not travel.
      max_rows: rows to make room for, if fewer pairs than ``T * k`` are here. If there are more
        pairs than ``max_rows``, the whole result is NaN. So are the gradients of tokens and experts
        whose pairs have rows, except zeros where an activation's slope is zero (an inactive relu, a
        clipped swiglu_oai). ``route(...).overflow`` says how many pairs have no row. If tokens are
        sharded, each device has so many rows, and only its own result becomes NaN; if tokens
        travel, the results of all devices that they travel between.
      recipe: makes the products, forward and backward, those of :func:`nvfp4_grouped_linear` or
        :func:`fp8_grouped_linear`.
      quantized: with an :class:`FP8Recipe`, up and down in mode ``"fp8"``, ``(E, 2F, D)`` and
        ``(E, D, F)``, made once per step for several calls: ``quantize(up, mode="fp8",
        contract=-2)``, or ``contract=-1`` with ``transpose_w=True``. Then up and down have the
        gradients, and only a product that the recipe does in bfloat16 reads them.
      key: for the stochastic rounding of a recipe.
      state: with ``FP8Recipe(scaling="delayed")``, an :class:`FP8State` of up, and one of down.
      precision: as in :func:`grouped_mm`.
      preferred_element_type: dtype of the result; by default the promoted dtype of x and up, or
        bfloat16 where that has 8 bits or fewer.
      implementation: of the products, as in :func:`grouped_mm`, where there is no recipe; or
        ``"composed"``: the layer is made of other public operations, each with its own backward
        pass and kernels.

    Returns:
      ``(..., D)``.

    Raises:
      ValueError: shapes do not fit, or a name is unknown, or ``implementation`` cannot run.
      TypeError: ``expert_index`` are not integers, or dtypes cannot be multiplied.

    Differentiable to any order in every floating operand, ``expert_weight`` included. With a recipe
    it has reverse mode only, and the gradient of up or down may have no derivative in x
    (:func:`nvfp4_grouped_linear` and :func:`fp8_grouped_linear` say where). No derivative scatters
    rows. The layer keeps x, h and the routing for the backward pass. With a recipe it keeps codes
    as well; with an :class:`NVFP4Recipe`, or an :class:`FP8Recipe` and biases or a scale for each
    tensor, also the rows that it sums up. Policies of ``jax.checkpoint`` know h as ``"moe_h"``.
    Under ``vmap`` a batch that shares its experts becomes more tokens of one layer, except with a
    recipe, ``axis_name`` or fewer ``max_rows``. Under Explicit sharding tokens, F and E may be
    sharded. Under Auto sharding values are right, but the layer sees no sharding: XLA moves a row
    for each pair and sends no token to its experts. So use Explicit sharding, or put
    ``jax.shard_map`` around this layer alone.

    **Experts on several devices**: with ``axis_name``, or where one mesh axis explicitly shards
    tokens and E, tokens travel and weights do not. Of N devices with T tokens each,

    - ``"gather"`` brings every token to every device, with its indices and weights, in one
      all-gather each. One all-to-all brings N partial sums of each token back.
    - ``"all_to_all"`` brings a token once to each device that has one of its experts, and as many
      partial sums back. Each pair of devices exchanges a fixed number of tokens in a round, and
      there are as many rounds as the fullest pair needs: no token is dropped.

    ``"gather"`` is chosen where a token is expected to meet more than half of the devices,
    ``1 - (1 - 1 / N) ** k`` of them if many experts are on each, and where "all_to_all" would spare
    a device fewer than 8192 tokens. Tokens, and backward their gradients, travel in their own
    dtype. Partial sums are float32 on a device, travel in the promoted dtype of x and up, and are
    added in float32 in the order of devices: one rounding more for each device that a token meets.
    The backward pass sends tokens again and keeps h, with room for ``N * T * k`` rows, or
    ``max_rows``. The gradient of ``expert_weight`` equals that on one device.

    **Sharded in other ways**, devices add partial results in float32, and gradients travel in their
    own dtype. No sharding may cut D, k or tiles of prepacked weights. Each device has scales and
    random numbers of its own for a recipe. A state sees the largest numbers of all devices.

    **With an** :class:`FP8Recipe` the layer has the values of :func:`dispatch`,
    :func:`fp8_grouped_linear` twice and :func:`combine`. The backward pass quantizes a token's
    cotangent as it comes, and multiplies by ``expert_weight`` together with the activation's
    derivative. With biases, a scale for each tensor, or ``implementation="composed"``, it
    differentiates these parts one by one. With ``dispatch="fp8"`` and experts on several devices,
    the layer rounds x and the result's cotangent to FP8; that rounding has derivative 1.

    Examples:
      >>> keys = jax.random.split(jax.random.key(0), 4)
      >>> x = jax.random.normal(keys[0], (6, 16))
      >>> up = jax.random.normal(keys[1], (4, 16, 2 * 8))  # four experts; gate and up
      >>> down = jax.random.normal(keys[2], (4, 8, 16))
      >>> scores = jax.nn.softmax(jax.random.normal(keys[3], (6, 4)))
      >>> weight, index = jax.lax.top_k(scores, 2)
      >>> jgg.moe_mlp(x, up, down, index, weight).shape
      (6, 16)
    """
    op = "moe_mlp"
    layer, operands = checked(
        op, x, up, down, activation, up_bias, down_bias, transpose_w, recipe, quantized, state
    )
    x = check.array(op, "x", operands["x"])
    index = check.integers(op, "expert_index", expert_index)
    weight = check.array(op, "expert_weight", expert_weight)
    lead = x.shape[:-1]
    if index.ndim != x.ndim or index.shape[:-1] != lead:
        letters = "..., k"
        raise ValueError(
            f"jgg.{op}: expert_index has shape {index.shape}, expected ({letters}) = "
            f"{(*lead, 'k')} because x is {x.shape}"
        )
    why = f"because expert_index is {index.shape}"
    check.shape(op, "expert_weight", weight, index.shape, "..., k", why)
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise TypeError(f"jgg.{op}: expert_weight must hold floats, got {weight.dtype.name}")
    composed = isinstance(implementation, str) and implementation == "composed"
    if composed:
        implementation = None
    check.implementation(op, implementation, "composed")
    if recipe is not None and implementation is not None:
        raise ValueError(
            f"jgg.{op}: implementation={implementation!r} names a kernel, and a recipe chooses its "
            "own. Leave it out, or use implementation='composed'."
        )
    precision = check.precision(op, precision, x)
    dtype = check.result_dtype(op, preferred_element_type, layer.dtype)
    if max_rows is not None:
        check.count(op, "max_rows", max_rows)
    axis = expert_parallel.checked_axis(op, axis_name, transport, expert_offset)
    if expert_offset is not None:
        expert_offset = first_expert(op, expert_offset)
    if key is not None:
        check.key(op, key)
    layer = dataclasses.replace(
        layer, composed=composed, precision=precision, implementation=implementation
    )
    operands |= {
        "expert_index": index, "expert_weight": weight, "expert_offset": expert_offset, "key": key,
    }  # fmt: skip
    run = functools.partial(_one_device, layer, dtype, max_rows)
    mesh = sharding.mesh_of(operands)
    if mesh is None:
        return run(operands, axis, None)
    return sharding.explicit(
        run, mesh, operands, axis, gated=layer.gated, transpose_w=layer.transpose_w,
        transport=transport,
    )  # fmt: skip


def _one_device(layer: Layer, dtype, max_rows, operands: dict[str, Any], axis, total):
    """The layer of one device's operands. Experts are on several devices along ``axis``; ``total``
    sums results of several devices, where they are parts."""
    index, offset = operands["expert_index"], operands["expert_offset"]
    tokens, k = math.prod(index.shape[:-1]), index.shape[-1]
    experts_here = jax.tree.leaves(operands["down"])[0].shape[0]
    come = expert_parallel.arrive(index.reshape(tokens, k), offset, experts_here, axis, max_rows)
    # Operands vary over the mesh before anything is made of them. So JAX sums gradients of operands
    # over devices, and not gradients of R rows.
    names = ("x", "expert_weight", "up", "down", "up_bias", "down_bias")
    floats, tree = jax.tree.flatten({name: operands[name] for name in names})
    floats = vary_alike(*floats, come.index)[:-1]
    operands = operands | tree.unflatten(floats)
    states = {name: operands[name] for name in ("up_state", "down_state")}
    operands |= across_devices(states, floats)
    routing = route(come.index, experts_here, expert_offset=come.expert_offset, max_rows=max_rows)
    wide = dtype if total is None else dtypes.accumulator_dtype(dtype)
    weights, plan = layer.weights(operands), come.plan
    products = layer.products(weights, wide if plan is None else layer.dtype, wide)
    x, weight = operands["x"], operands["expert_weight"].reshape(tokens, k)
    *lead, columns = x.shape
    x = x.reshape(tokens, columns)
    key = operands["key"] if layer.rounds_at_random else None
    pairs, in_fp8 = (come.index, come.expert_offset), int(products.tokens_in_fp8)
    outer, inner = (None, plan) if products.makes_rows_again else (plan, None)
    if outer is not None:
        products = dataclasses.replace(products, out_dtype=products.sum_dtype)
    x, weight = send(outer, x, weight, in_fp8=in_fp8)
    sums = experts(x, weights, routing, pairs, weight, inner, key, products)
    (out,) = collect(outer, sums, out_dtypes=(wide,), in_fp8=in_fp8)
    if max_rows is not None:
        # A product and not a selection, so that the gradients are NaN too.
        out = out * _one_if_none(expert_parallel.overflow(routing, plan, axis), dtype=wide)
    if total is not None:
        out = total(out).astype(dtype)
    return out.reshape(*lead, out.shape[-1])


@functools.partial(jax.jit, static_argnames="dtype", inline=INLINE)  # its numbers are no transfers
def _one_if_none(missing, dtype):
    return dtypes.one_or_nan(missing <= 0).astype(dtype)
