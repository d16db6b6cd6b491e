"""All of a layer but its router in one call, of a few tokens with prepacked weights. Nothing is
sorted: each kernel finds its experts from ``expert_index``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._grouped.activations import is_gated
from .._grouped.call import attributes
from .._kernels import choose, problems
from .._quantized import format
from .._quantized.call import flags_of
from .products import Weights
from .routing import as_int32


def experts(platform: str, x, weights: Weights, pairs, weight, products) -> jax.Array | None:
    """The experts of one device, as the custom call ``jgg_moe_few_tokens``: x, up, its scales,
    down, its scales, expert_index, expert_weight[, expert_offset][, global_scale of up][, up_bias]
    [, global_scale of down][, down_bias] -> out, workspace. None where no kernel takes it."""
    (index, offset), (up, down) = pairs, (of.w for of in weights)
    (tokens, k), d = index.shape, x.shape[1]
    if products.implementation not in (None, "sm90"):
        return None
    problem = problems.Moe(
        op="few_tokens", platform=platform, dtypes=(products.dtype.name,), pairs=tokens * k,
        d=max(d, down.shape[2]), matrix=d * down.shape[2], experts=down.shape[0], choices=k,
        out_dtype=products.out_dtype.name, activation=products.activation,
        packed=products.transpose_w and all(
            w.layout == "sm90" and format.of(w).scales_fit(w, "bfloat16")
            for w in (up, down)
        ),
        formats=tuple(
            (w.mode, format.of(w).attribute_group_size(w.group_size)) for w in (up, down)
        ),
        empty=0 in (tokens, k, *up.shape, *down.shape),
    )  # fmt: skip
    if choose.choose(problem) is None:
        return None
    index, offset = as_int32(index, offset, down.shape[0])
    columns = up.shape[1] // (2 if is_gated(products.activation) else 1)
    results = [
        jax.ShapeDtypeStruct((tokens, d), products.out_dtype),
        jax.ShapeDtypeStruct((tokens * k, columns), jnp.bfloat16),
    ]
    up_bias, down_bias = (of.bias for of in weights)
    more = [offset, up.global_scale, up_bias, down.global_scale, down_bias]
    flags: dict[str, Any] = {
        "up": flags_of(up),
        "down": flags_of(down),
        "few_tokens": {
            "activation": products.activation,
            "up_bias": up_bias is not None,
            "down_bias": down_bias is not None,
            "expert_offset": offset is not None,
        },
    }
    out, _ = jax.ffi.ffi_call("jgg_moe_few_tokens", results)(
        x.astype(jnp.bfloat16), up.weight, up.scales, down.weight, down.scales, index,
        weight.astype(jnp.float32), *(a for a in more if a is not None), **attributes(flags),
    )  # fmt: skip
    return out
