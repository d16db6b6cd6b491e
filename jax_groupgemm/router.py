"""Routers of mixtures of experts: which experts a token meets, how much each counts, and what keeps
their loads even.

Plain functions of JAX arrays, for layers in any framework, around :func:`moe_mlp`.
They compute in float32 at least. Axes have letters: E for experts, k for those that a token meets.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ._core import check, dtypes, partition
from ._core.operations import one_program
from ._core.types import Integers
from ._moe.choose_for import choose_for as routed_for
from ._moe.routing import local_experts
from ._moe.top_k import Rule
from ._moe.top_k import top_k as routed

__all__ = [
    "Choice",
    "Report",
    "balance_loss",
    "choose",
    "choose_for",
    "load",
    "report",
    "shifted_bias",
    "z_loss",
]


class Choice(NamedTuple):
    """The experts of each token.

    Attributes:
      expert: int32 ``(..., k)``, the best one first; -1 where the token does not exist.
      weight: ``(..., k)``, what each expert's result counts; 0 where the token does not exist.
      probabilities: ``(..., E)``, scores of all experts, which add up to 1.

    Examples:
      >>> choice = jgg.router.choose(jnp.array([[0.0, 2.0, 1.0]]), top_k=2)
      >>> choice.expert.tolist(), choice.probabilities.shape
      ([[1, 2]], (1, 3))
    """

    expert: jax.Array
    weight: jax.Array
    probabilities: jax.Array


class Report(NamedTuple):
    """A router's additions to the loss, and the load that moves its bias.

    Attributes:
      balance_loss: :func:`balance_loss`, a scalar.
      z_loss: :func:`z_loss`, a scalar.
      load: int32 ``(E,)``, :func:`load`.

    Examples:
      >>> logits = jnp.zeros((4, 3))
      >>> jgg.router.report(logits, jgg.router.choose(logits, top_k=1)).load.tolist()
      [4, 0, 0]
    """

    balance_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array


@one_program
def choose(
    logits: ArrayLike,
    top_k: int,
    *,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    bias: ArrayLike | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int | None = None,
    where: ArrayLike | None = None,
) -> Choice:
    """``expert = argtop_k(s + bias)``, ``weight = scale * s[expert] / sum(s[expert])``, where
    ``s = softmax(logits)`` or ``sigmoid(logits)``; **each token chooses experts**.

    ==================================  =========================================================
    model                               arguments
    ==================================  =========================================================
    Mixtral, Qwen3, gpt-oss             none; a softmax over the chosen logits is the same
    OLMoE, Qwen1.5                      ``renormalize=False``
    DeepSeek-V2                         ``renormalize=False, scale=16, groups=8, top_groups=3``
    DeepSeek-V3                         ``scores="sigmoid", bias=bias, scale=2.5, groups=8,
                                        top_groups=4``
    GLM-4.5, Kimi K2                    ``scores="sigmoid", bias=bias``, and the model's scale
    ==================================  =========================================================

    Args:
      logits: ``(..., E)``.
      top_k: k.
      scores: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
      bias: ``(E,)``, added to scores for choosing experts, but not for their weights. So it has no
        gradient. See :func:`shifted_bias`.
      renormalize: whether the weights of a token add up to ``scale``.
      scale: a factor of all weights.
      groups: the number of groups of neighbouring experts; a token meets some of the groups.
      top_groups: how many groups a token meets; None stands for all. A group's score is its best
        expert's or, with a bias, the sum of its two best experts' scores.
      where: bool ``(...)``: False for tokens that do not exist, such as padding.

    Returns:
      A :class:`Choice`. Without a bias experts come in the order of their logits, which is the
      order of exact scores; with a bias in the order of ``s + bias`` in float32. Among equal
      experts the first is chosen; 0.0 and -0.0 are equal. NaN counts as the largest and stays in
      the token's weights. Small sigmoids have exact shares; if all of them are below the smallest
      normal float32, weights are 0.

    Raises:
      ValueError: shapes do not fit, or ``scores`` is unknown, or there are fewer experts to choose
        from than ``top_k``.
      TypeError: logits are no floats, ``where`` is not bool, or a number is no int, ``scale`` no
        finite number.

    Groups and biases follow DeepSeek-V3, arXiv 2412.19437.

    Examples:
      >>> logits = jnp.log(jnp.array([[1.0, 6.0, 2.0, 1.0]]))
      >>> expert, weight, _ = jgg.router.choose(logits, top_k=2)
      >>> expert.tolist(), np.asarray(weight).round(2).tolist()
      ([[1, 2]], [[0.75, 0.25]])
    """
    op = "router.choose"
    logits = _existing(op, _logits(op, logits), where)
    rule = _rule(op, logits.shape[-1], top_k, scores, renormalize, scale, groups, top_groups)
    bias = _per_expert(op, "bias", bias, logits.shape[-1], f"because logits are {logits.shape}")
    return _choice(*routed(logits, bias, rule), logits, rule, where)


@one_program
def choose_for(
    x: ArrayLike,
    w: ArrayLike,
    top_k: int,
    *,
    logit_bias: ArrayLike | None = None,
    transpose_w: bool = False,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    bias: ArrayLike | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int | None = None,
    where: ArrayLike | None = None,
    precision: lax.PrecisionLike = None,
) -> tuple[Choice, jax.Array]:
    """``choose(logits, top_k, ...)`` and ``logits = x @ w + logit_bias`` themselves; **each token
    chooses experts**.

    x and w count as float32 (float64 where either is), and so do their products and sums. Tokens
    of a decode step have one kernel for all of it on Hopper, gradients those of the parts.

    Args:
      x: floats ``(..., D)``, tokens.
      w: floats ``(D, E)``, the router's weight; ``(E, D)`` with ``transpose_w``.
      top_k: k.
      logit_bias: floats ``(E,)``, added to logits; it has a gradient.
      transpose_w: whether w is ``(E, D)``, as checkpoints have it.
      scores, bias, renormalize, scale, groups, top_groups: as in :func:`choose`.
      where: bool ``(...)``: False for tokens that do not exist. Their logits are 0, and what x
        holds for them is in no gradient.
      precision: of the product, as of :func:`grouped_mm`: None for float32; ``"tensorfloat32"``
        lets XLA round float32 operands to tensorfloat32.

    Returns:
      A :class:`Choice`, and logits ``(..., E)``, float32 or float64, for :func:`report` and
      :func:`z_loss`.

    Raises:
      ValueError: shapes do not fit, or as in :func:`choose`.
      TypeError: x, w or a bias hold no floats, or as in :func:`choose`.

    Examples:
      >>> x, w = jnp.ones((5, 8)), jax.random.normal(jax.random.key(0), (8, 4))
      >>> choice, logits = jgg.router.choose_for(x, w, top_k=2)
      >>> choice.expert.shape, logits.shape
      ((5, 2), (5, 4))
    """
    op = "router.choose_for"
    check.flag(op, "transpose_w", transpose_w)
    x, w = check.array(op, "x", x), check.array(op, "w", w)
    for name, value in (("x", x), ("w", w)):
        _floats(op, name, value)
    if not x.ndim:
        raise ValueError(f"jgg.{op}: x has shape (), expected (..., D)")
    shape = (None, x.shape[-1]) if transpose_w else (x.shape[-1], None)
    check.shape(op, "w", w, shape, "E, D" if transpose_w else "D, E", f"because x is {x.shape}")
    x, experts = _existing(op, x, where), w.shape[0 if transpose_w else 1]
    why = f"because w is {w.shape}"
    rule = _rule(op, experts, top_k, scores, renormalize, scale, groups, top_groups)
    logit_bias = _per_expert(op, "logit_bias", logit_bias, experts, why)
    if logit_bias is not None:
        _floats(op, "logit_bias", logit_bias)
    bias = _per_expert(op, "bias", bias, experts, why)
    exact = check.precision(op, precision, x, w)
    expert, weight, logits = routed_for(
        x, w, logit_bias, bias, rule, transpose_w=transpose_w, precision=exact
    )
    logits = _existing(op, logits, where)
    return _choice(expert, weight, logits, rule, where), logits


@one_program
def load(expert: Integers, num_experts: int) -> jax.Array:
    """``load[e] = sum(expert == e)``; **pairs of token and expert are counted**.

    Args:
      expert: integers of any shape. A pair whose expert is not in ``[0, num_experts)`` does not
        exist.
      num_experts: E.

    Returns:
      int32 ``(E,)``. In ``jax.shard_map`` each device has tokens of its own: add up their loads
      with ``jax.lax.psum``.

    Raises:
      ValueError: ``num_experts`` is negative.
      TypeError: ``expert`` are not integers.

    Examples:
      >>> jgg.router.load(jnp.array([[1, 0], [1, 2]]), 4).tolist()
      [1, 2, 1, 0]
    """
    op = "router.load"
    expert = check.integers(op, "expert", expert)
    check.count(op, "num_experts", num_experts)
    place = local_experts(expert, None, num_experts).reshape(-1)
    place = partition.replicated(place)  # under Explicit sharding: JAX adds to no other places
    return jnp.zeros((num_experts + 1,), jnp.int32).at[place].add(1)[:num_experts]


@one_program
def balance_loss(
    probabilities: ArrayLike, load: ArrayLike, *, where: ArrayLike | None = None
) -> jax.Array:
    """``E * sum_e(load[e] / sum(load) * mean_t(probabilities[t, e]))``; **means over tokens**.

    The loss is 1 if choices or probabilities are spread evenly, and E if one expert has all. The
    load has no gradient.

    Args:
      probabilities: ``(..., E)``, of :func:`choose`.
      load: ``(E,)``, of :func:`load`.
      where: bool ``(...)``: False for tokens that do not exist.

    Returns:
      A scalar.

    Raises:
      ValueError: shapes do not fit.
      TypeError: probabilities are no floats, or ``where`` is not bool.

    As in Switch Transformers, arXiv 2101.03961, for k experts of a token. For DeepSeek-V3's loss of
    each sequence, ``jax.vmap`` it over sequences.

    Examples:
      >>> load = jnp.array([4, 0])  # the first expert has all tokens
      >>> float(jgg.router.balance_loss(jnp.array([[1.0, 0.0]] * 4), load))
      2.0
    """
    op = "router.balance_loss"
    probabilities = _existing(op, _wide(_logits(op, probabilities, "probabilities")), where)
    counts = check.array(op, "load", load)
    experts = probabilities.shape[-1]
    why = f"because probabilities are {probabilities.shape}"
    check.shape(op, "load", counts, (experts,), "E", why)
    counts = lax.stop_gradient(counts.astype(probabilities.dtype))
    share = counts / jnp.maximum(counts.sum(), 1)
    return experts * jnp.sum(share * _mean(probabilities, where, probabilities))


@one_program
def z_loss(logits: ArrayLike, *, where: ArrayLike | None = None) -> jax.Array:
    """``mean_t(logsumexp(logits[t])**2)``, which keeps logits small; **a mean over tokens**.

    Args:
      logits: ``(..., E)``.
      where: bool ``(...)``: False for tokens that do not exist.

    Returns:
      A scalar.

    Raises:
      ValueError: shapes do not fit.
      TypeError: logits are no floats, or ``where`` is not bool.

    As in ST-MoE, arXiv 2202.08906.

    Examples:
      >>> float(jgg.router.z_loss(jnp.array([[0.0, -jnp.inf], [2.0, -jnp.inf]])))
      2.0
    """
    op = "router.z_loss"
    logits = _existing(op, _wide(_logits(op, logits)), where)
    return _mean(jax.nn.logsumexp(logits, axis=-1) ** 2, where, logits)


@one_program
def report(logits: ArrayLike, choice: Choice, *, where: ArrayLike | None = None) -> Report:
    """``(balance_loss, z_loss, load)`` of a choice; **means and counts over tokens**.

    Args:
      logits: ``(..., E)``.
      choice: what :func:`choose` made of them.
      where: bool ``(...)``: False for tokens that do not exist, as for :func:`choose`.

    Returns:
      A :class:`Report`.

    Raises:
      ValueError, TypeError: as in :func:`balance_loss`, :func:`z_loss` and :func:`load`.

    Examples:
      >>> logits = jax.random.normal(jax.random.key(0), (6, 4))
      >>> report = jgg.router.report(logits, jgg.router.choose(logits, top_k=2))
      >>> report.balance_loss.shape, int(report.load.sum())
      ((), 12)
    """
    counts = load(choice.expert, choice.probabilities.shape[-1])
    return Report(
        balance_loss(choice.probabilities, counts, where=where), z_loss(logits, where=where), counts
    )


@one_program
def shifted_bias(bias: ArrayLike, load: ArrayLike, *, rate: float = 1e-3) -> jax.Array:
    """``bias[e] + rate * sign(mean(load) - load[e])``; **experts, each by its load**.

    Balance without a loss: after each step, experts with less than the mean load become likelier.

    Args:
      bias: floats ``(E,)``, of :func:`choose`.
      load: ``(E,)``, of the step's tokens on all devices.
      rate: of the change, a number.

    Returns:
      ``(E,)``, in the dtype of bias.

    Raises:
      ValueError: shapes do not fit.
      TypeError: bias are no floats.

    As in Loss-Free Balancing, arXiv 2408.15664.

    Examples:
      >>> jgg.router.shifted_bias(jnp.zeros(3), jnp.array([5, 3, 1]), rate=0.5).tolist()
      [-0.5, 0.0, 0.5]
    """
    op = "router.shifted_bias"
    bias = check.array(op, "bias", bias)
    check.shape(op, "bias", bias, (None,), "E")
    _floats(op, "bias", bias)
    counts = check.array(op, "load", load)
    check.shape(op, "load", counts, bias.shape, "E", f"because bias is {bias.shape}")
    check.numeric(op, "load", counts)
    return bias + check.scalar(op, "rate", rate).astype(bias.dtype) * _missing(counts, bias.dtype)


def _missing(load, dtype) -> jax.Array:
    """``sign(mean(load) - load)``, which is exact for integers: 0 where the load is the mean."""
    if not jnp.issubdtype(load.dtype, jnp.integer):
        load = _wide(load)
        above = load - load.min(
            initial=jnp.inf
        )  # 0 where all are alike, whatever the sum rounds to
        return jnp.sign(above.mean() - above).astype(dtype)
    # sum(load) - E * load, digit by digit of 8 bits: nothing wraps for fewer than 2^23 experts.
    experts, carry = load.shape[0], jnp.zeros(load.shape, jnp.int32)
    rest = carry
    for shift in range(0, jnp.iinfo(load.dtype).bits, 8):
        digit = load >> shift
        if shift + 8 < jnp.iinfo(load.dtype).bits:
            digit = digit & 0xFF
        digit = digit.astype(jnp.int32)
        carry = carry + (digit.sum(dtype=jnp.int32) - experts * digit)
        rest, carry = rest | (carry & 0xFF), carry >> 8
    return jnp.where(carry == 0, jnp.sign(rest), jnp.sign(carry)).astype(dtype)


def _rule(op: str, experts: int, top_k, scores, renormalize, scale, groups, top_groups) -> Rule:
    for name, value in (("top_k", top_k), ("groups", groups), ("top_groups", top_groups)):
        if value is not None or name != "top_groups":
            check.count(op, name, value)
    check.flag(op, "renormalize", renormalize)
    top_groups = groups if top_groups is None else top_groups
    if not groups or experts % groups or not top_groups <= groups:
        raise ValueError(
            f"jgg.{op}: {experts} experts cannot be in groups={groups} groups of one size, of "
            f"which a token meets top_groups={top_groups}"
        )
    if top_k > experts // groups * top_groups:
        raise ValueError(
            f"jgg.{op}: top_k={top_k} is more than the {experts // groups * top_groups} experts in "
            f"{top_groups} of {groups} groups"
        )
    if scores not in ("softmax", "sigmoid"):
        raise ValueError(f"jgg.{op}: scores={check.describe(scores)} is not 'softmax' or 'sigmoid'")
    return Rule(top_k, scores, renormalize, check.number(op, "scale", scale), groups, top_groups)


def _per_expert(op: str, name: str, value, experts: int, why: str) -> jax.Array | None:
    if value is None:
        return None
    value = check.array(op, name, value)
    check.shape(op, name, value, (experts,), "E", why)
    return value


def _choice(expert, weight, logits, rule: Rule, where) -> Choice:
    if where is not None:
        exists = jnp.asarray(where)[..., None]
        expert, weight = jnp.where(exists, expert, -1), jnp.where(exists, weight, 0)
    return Choice(expert, weight, rule.probabilities(_wide(logits)))


def _logits(op: str, logits, name: str = "logits") -> jax.Array:
    logits = check.array(op, name, logits)
    _floats(op, name, logits)
    if not logits.ndim:
        raise ValueError(f"jgg.{op}: {name} has shape (), expected (..., E)")
    return logits


def _wide(a) -> jax.Array:
    return a.astype(dtypes.accumulator_dtype(a.dtype))


def _floats(op: str, name: str, value) -> None:
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"jgg.{op}: {name} must hold floats, got {value.dtype.name}")


def _existing(op: str, a, where) -> jax.Array:
    """Zeros for tokens that do not exist: a mask that comes later leaves gradients of NaN."""
    if where is None:
        return a
    where = check.array(op, "where", where)
    if where.dtype != bool:
        raise TypeError(f"jgg.{op}: where must be bool, got {where.dtype.name}")
    if where.shape != a.shape[:-1]:
        raise ValueError(
            f"jgg.{op}: where has shape {where.shape}, expected {a.shape[:-1]} for tokens of "
            f"{a.shape}"
        )
    return jnp.where(where[..., None], a, 0)


def _mean(values, where, logits) -> jax.Array:
    """Over tokens, which ``logits`` have an axis more than; later axes of ``values`` are kept."""
    lead = logits.ndim - 1
    axes, count = tuple(range(lead)), math.prod(logits.shape[:-1])
    if where is not None:
        where = jnp.asarray(where)
        count = where.sum().astype(values.dtype)
        values = jnp.where(where.reshape(*where.shape, *(1,) * (values.ndim - lead)), values, 0)
    return values.sum(axis=axes) / jnp.maximum(count, 1)


def __dir__() -> list[str]:
    return sorted(__all__)
