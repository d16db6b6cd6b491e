"""All of a layer but its router in one call, of some tokens: more than ``few_tokens.py`` takes, and
few of each expert. Rows are sorted and copied, multiplied twice and added up, by three or four
kernels: arrays and NVFP4 have both products in one, if tiles are many and their rows few."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._grouped.activations import is_gated
from .._kernels import choose
from . import few_tokens
from .products import Weights


def experts(platform: str, x, weights: Weights, pairs, weight, products) -> jax.Array | None:
    """The experts of one device, with prepacked weights, as the custom call
    ``jgg_moe_some_tokens``: x, up, its scales, down, its scales, expert_index, expert_weight
    [, expert_offset][, global_scale of up][, of down] -> out, and six workspaces. None where no
    kernel takes it."""
    up, down = (of.w for of in weights)
    problem = few_tokens.problem_of_packed(
        "some_tokens", platform, pairs[0], products, up, down, **_facts(weights, products)
    )
    if products.implementation not in (None, "sm90") or choose.choose(problem) is None:
        return None
    return few_tokens.call_of_packed(
        "some_tokens", x, weights, pairs, weight, products, (None, None), _flags(products),
        _workspaces(problem, jnp.bfloat16),
    )  # fmt: skip


def dense_experts(platform: str, x, weights: Weights, pairs, weight, products) -> jax.Array | None:
    """Likewise with weights that are arrays, as the custom call ``jgg_moe_some_dense``: x, up,
    down, expert_index, expert_weight[, expert_offset] -> out, and six workspaces."""
    up, down = (of.w for of in weights)
    problem = few_tokens.problem_of_dense(
        "some_tokens", platform, pairs[0], products, up, down, **_facts(weights, products)
    )
    if products.implementation not in (None, "sm90") or choose.choose(problem) is None:
        return None
    return few_tokens.call(
        "some_dense", x.astype(products.dtype), [up, down], down.shape[0], pairs, weight, products,
        (), {"some_dense": _flags(products)}, _workspaces(problem, products.dtype),
    )  # fmt: skip


def _facts(weights: Weights, products) -> dict[str, bool]:
    biased = any(of.bias is not None for of in weights)
    return {"gated": is_gated(products.activation), "biased": biased}


def _flags(products) -> dict:
    return {"activation": products.activation, "transpose_w": products.transpose_w}


def _workspaces(problem, dtype) -> list[jax.ShapeDtypeStruct]:
    """The activation, x in the order of experts, rows behind the down product, the row of each
    pair, sizes of experts, and what blocks of both products count."""
    pairs, k = problem.pairs, problem.choices
    shapes = (pairs, problem.f), (pairs, problem.d), (pairs, problem.d)
    return [
        *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes),
        jax.ShapeDtypeStruct((pairs // k, k), jnp.int32),
        jax.ShapeDtypeStruct((problem.experts,), jnp.int32),
        jax.ShapeDtypeStruct((pairs + 1,), jnp.int32),
    ]
