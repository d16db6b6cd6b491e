"""A mixture of experts as a module of Flax NNX. Importing it imports flax; the package does not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from . import router
from ._core import check, dtypes
from ._core.operations import INLINE
from ._core.types import Activation
from ._fp8.state import FP8State
from ._grouped.activations import check_name, is_gated
from ._moe.moe_mlp import moe_mlp

__all__ = ["BalanceBias", "MoE"]

_INIT = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)


#: Arguments of ``moe_mlp`` that are no positions.
_OPTIONS = [
    name for name, of in inspect.signature(moe_mlp).parameters.items() if of.kind == of.KEYWORD_ONLY
]
_ACTIVATION = inspect.signature(moe_mlp).parameters["activation"].default
# One program, whose numbers are no transfers.
_existing = jax.jit(functools.partial(router._existing, "nnx.MoE"), inline=INLINE)


class BalanceBias(nnx.Variable):
    """A router's bias that balances loads. It has no gradient and is no ``nnx.Param``."""


class MoE(nnx.Module):
    """``y[t] = sum_j weight[t, j] * expert_of(index[t, j])(x[t])``, with the router's choice of
    index and weight; **pairs of token and expert are grouped** by expert.

    Every token meets all of its ``top_k`` experts: none is dropped, nothing is padded. The router
    computes in float32::

        layer = MoE(512, 1024, num_experts=8, top_k=2, rngs=nnx.Rngs(0))
        y, report = layer(x)
        loss = task_loss(y) + 0.01 * report.balance_loss + 0.001 * report.z_loss

    Args:
      features: D, of tokens and of the result.
      hidden_features: F, of one expert.
      num_experts: E.
      top_k: k, experts of a token.
      activation: of the experts, as in :func:`moe_mlp`. None leaves the activation to
        ``experts_fn``; ``w_up`` then has the shape for a gated one.
      scores, renormalize, scale, groups, top_groups: the router's, as in :func:`choose`.
      balance_bias: whether a bias balances loads, instead of a loss; see ``balance``.
      router_bias: whether logits have a bias that is trained.
      use_bias: whether experts have biases.
      dtype: to compute experts in; by default that of x. Weights that are arrays are converted.
      param_dtype: of the parameters.
      kernel_init: of ``w_up`` and ``w_down``.
      experts_fn: called as ``moe_mlp(x, w_up, w_down, index, weight, key=key)``, with up_bias,
        down_bias and state where there are any, and with ``options``. The weights are whatever
        pytrees ``w_up`` and ``w_down`` hold, such as :class:`Quantized`.
      rngs: for the initial parameters.
      options: further arguments of :func:`moe_mlp`: recipe, axis_name and so on.

    Raises:
      ValueError: a size is not positive, a name is unknown, or there are fewer experts to choose
        from than ``top_k``.
      TypeError: an argument is of another kind.

    Attributes:
      router: an ``nnx.Linear``, (D, E).
      w_up: ``(E, D, 2F)`` for a gated activation, gate and up as the halves, or ``(E, D, F)``.
      w_down: ``(E, F, D)``.
      up_bias: ``(E, 2F)`` or ``(E, F)``; None without ``use_bias``.
      down_bias: ``(E, D)``; None without ``use_bias``.
      bias: a :class:`BalanceBias` ``(E,)``; None without ``balance_bias``.

    Examples:
      >>> from flax import nnx
      >>> from jax_groupgemm.nnx import MoE
      >>> layer = MoE(16, 8, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
      >>> y, report = layer(jnp.ones((6, 16)))
      >>> y.shape, int(report.load.sum())
      ((6, 16), 12)
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        num_experts: int,
        top_k: int,
        *,
        activation: Activation | None = None,
        scores: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int | None = None,
        balance_bias: bool = False,
        router_bias: bool = False,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable = _INIT,
        experts_fn: Callable = moe_mlp,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        op = "nnx.MoE"
        for name, size in (
            ("features", features), ("hidden_features", hidden_features),
            ("num_experts", num_experts),
        ):  # fmt: skip
            check.count(op, name, size)
            if not size:
                raise ValueError(f"jgg.{op}: {name}=0, expected 1 or more")
        check_name(op, activation, None)
        for name, value in (
            ("balance_bias", balance_bias), ("router_bias", router_bias), ("use_bias", use_bias),
        ):  # fmt: skip
            check.flag(op, name, value)
        dtype = None if dtype is None else _floating(op, "dtype", dtype)
        param_dtype = _floating(op, "param_dtype", param_dtype)
        for name, function in (("kernel_init", kernel_init), ("experts_fn", experts_fn)):
            if not callable(function):
                what = check.describe(function)
                raise TypeError(f"jgg.{op}: {name} must be a function, got {what}")
        if not callable(getattr(rngs, "params", None)):
            raise TypeError(f"jgg.{op}: rngs must be an nnx.Rngs, got {check.describe(rngs)}")
        if experts_fn is moe_mlp:
            unknown = [name for name in options if name not in _OPTIONS]
            if unknown:
                raise TypeError(f"jgg.{op}: {unknown[0]} is no argument of it or of jgg.moe_mlp")
        choosing = {
            "scores": scores, "renormalize": renormalize, "scale": check.number(op, "scale", scale),
            "groups": groups, "top_groups": top_groups,
        }  # fmt: skip
        _chooses(op, num_experts, top_k, choosing)
        d, f, e = features, hidden_features, num_experts
        if activation is not None:
            options["activation"] = activation
        columns = 2 * f if is_gated(activation or _ACTIVATION) else f
        self.router = nnx.Linear(
            d, e, use_bias=router_bias, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs
        )
        self.w_up = nnx.Param(kernel_init(rngs.params(), (e, d, columns), param_dtype))
        self.w_down = nnx.Param(kernel_init(rngs.params(), (e, f, d), param_dtype))
        zeros = lambda *shape: nnx.Param(jnp.zeros(shape, param_dtype)) if use_bias else None
        self.up_bias, self.down_bias = zeros(e, columns), zeros(e, d)
        self.bias = BalanceBias(jnp.zeros((e,), jnp.float32)) if balance_bias else None
        self.top_k, self.dtype, self.experts_fn = top_k, dtype, experts_fn
        # Tuples, because what a module's graph holds is hashed.
        self.choosing, self.options = tuple(choosing.items()), tuple(options.items())

    def __call__(
        self, x: jax.Array, key: jax.Array | None = None, *, where: ArrayLike | None = None,
        state: tuple[FP8State, FP8State] | None = None,
    ) -> tuple[jax.Array, router.Report]:  # fmt: skip
        """The layer's result, and its losses and loads.

        Args:
          x: ``(..., D)``, a token each.
          key: for the stochastic rounding of a recipe.
          where: bool ``(...)``: False for tokens that do not exist, such as padding. They give
            zeros and count in no loss.
          state: with ``FP8Recipe(scaling="delayed")``, as in :func:`moe_mlp`.

        Returns:
          ``(..., D)``, and a :class:`Report`.

        Raises:
          ValueError, TypeError: as :func:`choose` and :func:`moe_mlp`.
        """
        value = lambda p: None if p is None else p.get_value()
        x = _existing(x, where)  # whatever padding holds, it is in no gradient
        choice, logits = self._choose(x, value(self.bias), where)
        x = x if self.dtype is None else x.astype(self.dtype)
        cast = lambda w: w.astype(x.dtype) if isinstance(w, jax.Array) else w
        w_up, w_down = cast(value(self.w_up)), cast(value(self.w_down))
        more = {"key": key, **dict(self.options)}
        if state is not None:
            more["state"] = state
        if self.up_bias is not None:
            more |= {"up_bias": cast(value(self.up_bias)), "down_bias": cast(value(self.down_bias))}
        y = self.experts_fn(x, w_up, w_down, choice.expert, choice.weight, **more)
        return y, router.report(logits, choice, where=where)

    def _choose(self, x, bias, where) -> tuple[router.Choice, jax.Array]:
        more = {"bias": bias, "where": where, **dict(self.choosing)}
        of = self.router
        if type(of) is not nnx.Linear or of.dtype != jnp.float32:  # a module that took its place
            logits = of(x)
            return router.choose(logits, self.top_k, **more), logits
        x = x if dtypes.is_half(x.dtype) else x.astype(jnp.float32)
        logit_bias = None if of.bias is None else of.bias.get_value()
        precision = of.precision
        if precision is None and jax.config.jax_default_matmul_precision is None:  # pyright: ignore[reportAttributeAccessIssue]
            precision = "tensorfloat32"  # as JAX multiplies where nobody asks for more
        w = of.kernel.get_value()
        return router.choose_for(
            x, w, self.top_k, logit_bias=logit_bias, precision=precision, **more
        )

    def balance(self, load: ArrayLike, rate: float = 1e-3) -> None:
        """Shift ``bias`` by the load of a step, after the step.

        Args:
          load: ``(E,)``, the report's, summed over all devices that made the step's gradient.
          rate: as in :func:`shifted_bias`.

        Raises:
          ValueError: there is no bias, or load has another shape.
        """
        if self.bias is None:
            raise ValueError("jgg.nnx.MoE.balance: there is no bias. Pass balance_bias=True")
        self.bias.set_value(router.shifted_bias(self.bias.get_value(), load, rate=rate))


def _floating(op: str, name: str, dtype):
    dtype = check.of_dtype(op, name, dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"jgg.{op}: {name} must be of floats, got {dtype.name}")
    return dtype


def _chooses(op: str, experts: int, top_k: int, choosing: dict) -> None:
    """Raises what ``choose`` does for these arguments."""
    logits = jax.ShapeDtypeStruct((1, experts), jnp.float32)
    try:
        jax.eval_shape(lambda logits: router.choose(logits, top_k, **choosing), logits)
    except (TypeError, ValueError) as error:
        text = str(error).replace("jgg.router.choose:", f"jgg.{op}:")
        raise type(error)(text) from None
