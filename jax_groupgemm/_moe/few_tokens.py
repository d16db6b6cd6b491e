"""All of a layer but its router in one call, of a few tokens. Nothing is sorted: each kernel finds
its experts from ``expert_index``."""

from __future__ import annotations

from typing import Any

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
    problem = _problem(
        platform, index, products, up, down, d=max(d, f), matrix=d * f,
        dtypes=(products.dtype.name,),
        packed=products.transpose_w and all(
            w.layout == "sm90" and format.of(w).scales_fit(w, "bfloat16")
            for w in (up, down)
        ),
        formats=tuple(
            (w.mode, format.of(w).attribute_group_size(w.group_size)) for w in (up, down)
        ),
    )  # fmt: skip
    if choose.choose(problem) is None:
        return None
    columns = up.shape[1] // (2 if is_gated(products.activation) else 1)
    flags = {"up": flags_of(up), "down": flags_of(down)}
    return _call(
        "few_tokens", x.astype(jnp.bfloat16), [up.weight, up.scales, down.weight, down.scales],
        weights, pairs, weight, products, columns, flags,
        scales=(up.global_scale, down.global_scale),
        terms=extension.rules().moe_few_term_rows(
            pairs=index.size, experts=down.shape[0], matrix=d * f
        ),
    )  # fmt: skip


def dense_experts(platform: str, x, weights: Weights, pairs, weight, products) -> jax.Array | None:
    """Likewise with weights that are arrays, as the custom call ``jgg_moe_few_dense``: x, up, down,
    expert_index, expert_weight[, expert_offset][, up_bias][, down_bias] -> out, workspace."""
    index, (up, down) = pairs[0], (of.w for of in weights)
    if products.implementation not in (None, "sm80"):
        return None
    d, f = x.shape[1], down.shape[2 if products.transpose_w else 1]
    problem = _problem(
        platform, index, products, up, down, d=d, f=f, matrix=d * f, dense=True,
        dtypes=(products.dtype.name, up.dtype.name, down.dtype.name),
    )  # fmt: skip
    if choose.choose(problem) is None:
        return None
    return _call(
        "few_dense", x.astype(products.dtype), [up, down], weights, pairs, weight, products, f,
        transpose_w=products.transpose_w,
    )  # fmt: skip


def _problem(platform: str, index, products, up, down, **of) -> problems.Moe:
    tokens, k = index.shape
    return problems.Moe(
        op="few_tokens", platform=platform, pairs=tokens * k, experts=down.shape[0], choices=k,
        out_dtype=products.out_dtype.name, activation=products.activation,
        empty=0 in (tokens, k, *up.shape, *down.shape), **of,
    )  # fmt: skip


def _call(name: str, x, arrays, weights: Weights, pairs, weight, products, columns: int,
          flags: dict[str, Any] | None = None, *, scales=(None, None), terms: int = 0,
          **options):  # fmt: skip
    """The custom call ``jgg_moe_<name>`` of x and weights' ``arrays``. ``flags`` are those of
    formats; ``columns`` are of the rows between the products; there are ``terms`` rows of what
    pairs add, where any."""
    index, offset = pairs
    index, offset = as_int32(index, offset, weights.down.w.shape[0])
    results = [
        jax.ShapeDtypeStruct((x.shape[0], x.shape[1]), products.out_dtype),
        jax.ShapeDtypeStruct((index.size, columns), x.dtype),
    ]
    if terms:
        results.append(jax.ShapeDtypeStruct((terms, x.shape[1]), jnp.float32))
    biases = [of.bias for of in weights]
    more = [offset, *(a for pair in zip(scales, biases, strict=True) for a in pair)]
    own = {
        "activation": products.activation,
        "up_bias": biases[0] is not None,
        "down_bias": biases[1] is not None,
        "expert_offset": offset is not None,
    }
    out, *_ = jax.ffi.ffi_call(f"jgg_moe_{name}", results)(
        x, *arrays, index, weight.astype(jnp.float32), *(a for a in more if a is not None),
        **attributes({**(flags or {}), name: own | options}),
    )  # fmt: skip
    return out
