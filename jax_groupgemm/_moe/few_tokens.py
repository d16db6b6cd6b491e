"""All of a layer but its router in one call, of a few tokens. Nothing is sorted: each kernel finds
its experts from ``expert_index``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .._grouped.activations import is_gated
from .._grouped.call import attributes
from .._kernels import choose, extension, problems
from .._quantized import format
from .._quantized.call import flags_of
from .products import Weights
from .routing import as_int32


def experts(platform: str, x, weights: Weights, pairs, weight, products) -> jax.Array | None:
    """The experts of one device, with prepacked weights, as the custom call ``jgg_moe_few_tokens``:
    x, up, its scales, down, its scales, expert_index, expert_weight[, expert_offset]
    [, global_scale of up][, up_bias][, global_scale of down][, down_bias] -> out, and two
    workspaces. None where no kernel takes it."""
    index, (up, down) = pairs[0], (of.w for of in weights)
    if products.implementation not in (None, "sm90"):
        return None
    d, f = x.shape[1], down.shape[2]
    facts = problem_of_packed("few_tokens", platform, index, products, up, down)
    if choose.choose(dataclasses.replace(facts, d=max(d, f))) is None:
        return None
    columns = up.shape[1] // (2 if is_gated(products.activation) else 1)
    terms = extension.rules().moe_few_term_rows(
        pairs=index.size, experts=down.shape[0], matrix=d * f
    )
    workspaces = [
        jax.ShapeDtypeStruct((index.size, columns), jnp.bfloat16),
        jax.ShapeDtypeStruct((terms, d), jnp.float32),
    ]
    biases = _biases(weights)
    own = {"activation": products.activation, **_flags(biases)}
    return call_of_packed(
        "few_tokens", x, weights, pairs, weight, products, biases, own, workspaces
    )


def dense_experts(platform: str, x, weights: Weights, pairs, weight, products) -> jax.Array | None:
    """Likewise with weights that are arrays, as the custom call ``jgg_moe_few_dense``: x, up, down,
    expert_index, expert_weight[, expert_offset][, up_bias][, down_bias] -> out, workspace."""
    index, (up, down) = pairs[0], (of.w for of in weights)
    if products.implementation not in (None, "sm80"):
        return None
    f = down.shape[2 if products.transpose_w else 1]
    if choose.choose(problem_of_dense("few_tokens", platform, index, products, up, down)) is None:
        return None
    biases = _biases(weights)
    flags = _flags(biases) | {"transpose_w": products.transpose_w}
    workspaces = [jax.ShapeDtypeStruct((index.size, f), products.dtype)]
    return call(
        "few_dense", x.astype(products.dtype), [up, down], down.shape[0], pairs, weight, products,
        biases, {"few_dense": {"activation": products.activation, **flags}}, workspaces,
    )  # fmt: skip


def _biases(weights: Weights) -> list:
    return [of.bias for of in weights]


def _flags(biases) -> dict[str, bool]:
    return {"up_bias": biases[0] is not None, "down_bias": biases[1] is not None}


# ---- also of some tokens (some_tokens.py) --------------------------------------------------------


def problem_of_packed(op: str, platform: str, index, products, up, down, **of) -> problems.Moe:
    """The layer as kernels see it, with quantized weights."""
    d, f = down.shape[1], down.shape[2]
    return _problem(
        op, platform, index, products, up, down, d=d, f=f, matrix=d * f,
        dtypes=(products.dtype.name,),
        packed=products.transpose_w and all(
            w.layout == "sm90" and format.of(w).scales_fit(w, "bfloat16")
            for w in (up, down)
        ),
        formats=tuple(
            (w.mode, format.of(w).attribute_group_size(w.group_size)) for w in (up, down)
        ),
        **of,
    )  # fmt: skip


def problem_of_dense(op: str, platform: str, index, products, up, down, **of) -> problems.Moe:
    """Likewise with weights that are arrays."""
    d, f = down.shape[1:] if products.transpose_w else down.shape[:0:-1]
    return _problem(
        op, platform, index, products, up, down, d=d, f=f, matrix=d * f, dense=True,
        dtypes=(products.dtype.name, up.dtype.name, down.dtype.name), **of,
    )  # fmt: skip


def _problem(op: str, platform: str, index, products, up, down, **of) -> problems.Moe:
    tokens, k = index.shape
    return problems.Moe(
        op=op, platform=platform, pairs=tokens * k, experts=down.shape[0], choices=k,
        out_dtype=products.out_dtype.name, activation=products.activation,
        empty=0 in (tokens, k, *up.shape, *down.shape), **of,
    )  # fmt: skip


def call_of_packed(name: str, x, weights: Weights, pairs, weight, products, biases, own: dict,
                   workspaces):  # fmt: skip
    """:func:`call` with quantized weights: their codes and scales, and global scales, each before
    the bias of the same product."""
    up, down = (of.w for of in weights)
    flags = {"up": flags_of(up), "down": flags_of(down), name: own}
    scales = (up.global_scale, down.global_scale)
    more = [a for pair in zip(scales, biases, strict=True) for a in pair]
    arrays = [up.weight, up.scales, down.weight, down.scales]
    return call(
        name, x.astype(jnp.bfloat16), arrays, down.shape[0], pairs, weight, products, more, flags,
        workspaces,
    )  # fmt: skip


def call(name: str, x, arrays, experts_here: int, pairs, weight, products, more, flags: dict,
         workspaces):  # fmt: skip
    """The custom call ``jgg_moe_<name>`` of x, weights' ``arrays``, pairs and those of ``more``
    that are there: (T, D). ``workspaces`` are its further results."""
    index, offset = pairs
    index, offset = as_int32(index, offset, experts_here)
    flags[name]["expert_offset"] = offset is not None
    more = [offset, *more]
    results = [jax.ShapeDtypeStruct((x.shape[0], x.shape[1]), products.out_dtype), *workspaces]
    out, *_ = jax.ffi.ffi_call(f"jgg_moe_{name}", results)(
        x, *arrays, index, weight.astype(jnp.float32), *(a for a in more if a is not None),
        **attributes(flags),
    )  # fmt: skip
    return out
