"""The experts of each token and their weights, of a router's logits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import costs, dtypes
from .._core.composed import Composed
from .._kernels import choose, problems


@dataclasses.dataclass(frozen=True)
class Rule:
    """How experts are chosen and weighed: see ``router.choose``."""

    top_k: int
    scores: Literal["softmax", "sigmoid"]
    renormalize: bool
    scale: float
    groups: int
    top_groups: int

    def score(self, logits):
        """Of all experts, (..., E)."""
        return jax.nn.softmax(logits) if self.scores == "softmax" else jax.nn.sigmoid(logits)

    def probabilities(self, logits):
        """Scores of all experts that add up to 1, (..., E)."""
        return jax.nn.softmax(logits) if self.scores == "softmax" else sigmoid_shares(logits)

    @property
    def of_chosen(self) -> bool:
        """Weights are made of the chosen logits alone: a softmax over all is not needed."""
        return self.scores == "sigmoid" or self.renormalize

    def weights(self, chosen):
        """(..., k), of the chosen logits or, where weights need all logits, of chosen scores."""
        weight = chosen
        if self.renormalize:
            weight = self.probabilities(chosen)
        elif self.scores == "sigmoid":
            weight = self.score(chosen)
        return weight if self.scale == 1.0 else weight * jnp.asarray(self.scale, weight.dtype)


def top_k(logits, bias, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """Experts, int32, and their weights, both (..., k); logits are (..., E)."""
    return _TOP_K(logits, bias, rule=rule)


def sigmoid_shares(logits) -> jax.Array:
    """``s / sum(s)``, where ``s = sigmoid(logits)``, exact however small all of s are. Where
    all are below the smallest normal number the shares are 0, and so are gradients."""
    most = lax.stop_gradient(logits.max(axis=-1, keepdims=True, initial=-jnp.inf))
    low, there = most <= 0, ~(most < math.log(jnp.finfo(logits.dtype).tiny))
    # sigmoid(a) is exp(a) * sigmoid(-a), and a factor exp(most) of all of them cancels.
    relative = jnp.exp(jnp.where(low & there, logits - most, 0)) * jax.nn.sigmoid(-logits)
    score = jnp.where(low, relative, jax.nn.sigmoid(logits))
    total = jnp.where(there, score.sum(axis=-1, keepdims=True), 1)
    return jnp.where(there, score / total, 0)


def _wide(logits):
    return logits.astype(dtypes.accumulator_dtype(logits.dtype))


def _composed(logits, bias, *, rule: Rule):
    logits = _wide(logits)
    expert = _experts(lax.stop_gradient(logits), bias, rule)
    of = logits if rule.of_chosen else rule.score(logits)
    return expert, rule.weights(jnp.take_along_axis(of, expert, axis=-1))


def _experts(logits, bias, rule: Rule):
    """Without a bias by logits, which are in the order of exact scores; otherwise by the sums of
    scores and biases, scores as if logits of NaN were not there."""
    wanted = logits
    if bias is not None:
        nan = jnp.isnan(logits)
        score = rule.score(jnp.where(nan, -jnp.inf, logits))
        wanted = score + lax.stop_gradient(bias).astype(score.dtype)
        wanted = jnp.where(nan, logits, wanted)
    wanted = _ranking(wanted)
    if rule.top_groups < rule.groups:
        wanted = _of_best_groups(wanted, rule, best=1 if bias is None else 2)
    return lax.top_k(wanted, rule.top_k)[1]


def _ranking(a):
    """Without the signs of NaN and zero: XLA sorts -NaN below all numbers, and -0 below 0."""
    return jnp.where(a < 0, a, jnp.abs(a))


def _of_best_groups(score, rule: Rule, best: int) -> jax.Array:
    """Scores of the best groups' experts, and -inf for the others, below all of these."""
    lead, experts = score.shape[:-1], score.shape[-1]
    of_group = score.reshape(*lead, rule.groups, experts // rule.groups)
    mark = lax.top_k(of_group, min(best, experts // rule.groups))[0].sum(axis=-1)
    best_groups = lax.top_k(_ranking(mark), rule.top_groups)[1]
    kept = jax.nn.one_hot(best_groups, rule.groups, dtype=bool).any(axis=-2)
    least = jnp.finfo(score.dtype).min
    of_group = jnp.where(of_group < least, least, of_group)
    return jnp.where(kept[..., None], of_group, -jnp.inf).reshape(score.shape)


# ---- reverse mode: a scatter to chosen experts is a sum over k of comparisons ------------------


def _forward(logits, bias, *, rule: Rule):
    expert, weight = _TOP_K(logits, bias, rule=rule)
    return (expert, weight), expert


def _backward(expert, operands, cts, *, rule: Rule):
    (logits, _), (_, ct) = operands, cts
    score = (lambda a: a) if rule.of_chosen else rule.score
    of, to_logits = jax.vjp(lambda a: score(_wide(a)), logits)
    (dchosen,) = jax.vjp(rule.weights, jnp.take_along_axis(of, expert, axis=-1))[1](ct)
    all_experts = lax.broadcasted_iota(jnp.int32, (*expert.shape, of.shape[-1]), expert.ndim)
    each = jnp.where(expert[..., None] == all_experts, dchosen[..., None], 0)
    return to_logits(each.sum(-2))[0], None


# ---- the kernel ----------------------------------------------------------------------------------


def _call(platform: str, logits, bias, *, rule: Rule):
    """Custom call ``jgg_moe_top_k``: logits[, bias] -> expert, weight."""
    *lead, experts = logits.shape
    if logits.dtype == jnp.float16:
        logits = _wide(logits)
    problem = problems.TopK(
        op="top_k", platform=platform, dtypes=(logits.dtype.name,), experts=experts, k=rule.top_k,
        groups=rule.groups, empty=0 in (*logits.shape, rule.top_k),
    )  # fmt: skip
    if choose.choose(problem) is None:
        return None
    flags, more = flags_of(rule, bias)
    call = jax.ffi.ffi_call("jgg_moe_top_k", results(math.prod(lead), rule))
    outs = call(logits.reshape(-1, experts), *more, top_k=flags)
    return tuple(out.reshape(*lead, rule.top_k) for out in outs)


def results(tokens: int, rule: Rule) -> list[jax.ShapeDtypeStruct]:
    """Of a custom call that chooses: experts, and their weights."""
    shape = tokens, rule.top_k
    return [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)]


def flags_of(rule: Rule, bias) -> tuple[dict[str, Any], list[jax.Array]]:
    """The attributes of its choice, and an operand for a bias."""
    flags = {
        "bias": np.bool_(bias is not None),
        "sigmoid": np.bool_(rule.scores == "sigmoid"),
        "renormalize": np.bool_(rule.renormalize),
        "scale": np.float32(rule.scale),
        "groups": np.int32(rule.groups),
        "top_groups": np.int32(rule.top_groups),
    }
    return flags, [] if bias is None else [bias.astype(jnp.float32)]


_TOP_K = Composed("jgg_top_k", _composed, _call, cost=costs.conversion, vjp=(_forward, _backward))
