"""A router: logits of tokens and a weight, and the choice that ``top_k`` makes of them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import costs, dtypes
from .._core.composed import Composed
from .._kernels import choose, problems
from . import top_k
from .top_k import Rule


def choose_for(
    x, w, logit_bias, bias, rule: Rule, *, transpose_w: bool, precision: lax.PrecisionLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Experts, int32, and their weights, both (..., k), and logits (..., E); x is (..., D), w (D,
    E), or (E, D) with ``transpose_w``."""
    return _CHOOSE_FOR(
        x, w, logit_bias, bias, rule=rule, transpose_w=transpose_w, precision=precision
    )


def _composed(x, w, logit_bias, bias, *, rule: Rule, transpose_w: bool, precision):
    logits = _product(x, w, transpose_w, precision)
    if logit_bias is not None:
        logits += logit_bias.astype(logits.dtype)
    return *top_k.top_k(logits, bias, rule), logits


def _product(x, w, transpose_w: bool, precision):
    wide = dtypes.accumulator_dtype(x.dtype, w.dtype)
    if x.dtype != w.dtype or not dtypes.is_half(x.dtype):  # products of halves are exact
        x, w = x.astype(wide), w.astype(wide)
    # Not of w.T, of which XLA makes a copy on CPUs where there is one token.
    axes = -1, 1 if transpose_w else 0
    return jnp.tensordot(x, w, axes, precision=precision, preferred_element_type=wide)


def _batch(size, operands, axes, **static):
    """A batch of tokens is as many more tokens. Other operands have no batch."""
    x, *others = operands
    if any(axis is not None for axis in axes[1:]):
        return None
    del size
    return _CHOOSE_FOR(jnp.moveaxis(x, axes[0], 0), *others, **static)


def _cost(operands, values, outs, **_) -> costs.Cost:
    x, w, *_ = operands
    read = costs.conversion(operands, values, outs)
    return read + costs.Cost(2 * math.prod(x.shape[:-1]) * math.prod(w.shape), 0)


# ---- the kernel ----------------------------------------------------------------------------------


def _call(platform: str, x, w, logit_bias, bias, *, rule: Rule, transpose_w: bool, precision):
    """Custom call ``jgg_moe_router``: x, w[, logit_bias][, bias] -> expert, weight, logits. It
    multiplies in float32, whatever ``precision`` would allow."""
    del precision
    *lead, d = x.shape
    tokens, experts = math.prod(lead), w.shape[0 if transpose_w else 1]
    problem = problems.Router(
        op="router", platform=platform, dtypes=(x.dtype.name, w.dtype.name), tokens=tokens, d=d,
        experts=experts, k=rule.top_k, groups=rule.groups,
        empty=0 in (*x.shape, *w.shape, rule.top_k),
    )  # fmt: skip
    if choose.choose(problem) is None:
        return None
    logits = jax.ShapeDtypeStruct((tokens, experts), jnp.float32)
    flags, more = top_k.flags_of(rule, bias)
    if logit_bias is not None:
        more = [logit_bias.astype(jnp.float32), *more]
    router = {"transpose_w": np.bool_(transpose_w), "logit_bias": np.bool_(logit_bias is not None)}
    call = jax.ffi.ffi_call("jgg_moe_router", [*top_k.results(tokens, rule), logits])
    outs = call(x.reshape(tokens, d), w, *more, router=router, top_k=flags)
    return tuple(out.reshape(*lead, out.shape[1]) for out in outs)


_CHOOSE_FOR = Composed("jgg_router", _composed, _call, batch=_batch, cost=_cost)
