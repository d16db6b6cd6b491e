"""``nvfp4_grouped_wgrad``: weight gradients of a grouped product, both operands in NVFP4."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._core import check, segments
from .._core.operations import operation
from .._core.products import Wgrad
from .._core.types import Implementation, Integers
from .._grouped import call as grouped_call
from .._grouped import primitives
from .._kernels import problems
from .._quantized import array, padding
from .._quantized.array import Quantized
from .._quantized.operands import as_promised, check_padded, existing
from . import layouts, sm100
from .grouped_mm import apart, exact, factor
from .sm100 import folded


@operation
def nvfp4_grouped_wgrad(
    x: Quantized,
    dy: Quantized,
    group_sizes: Integers,
    *,
    alpha: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    existing_out: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``out[g] = alpha[g] * dy[rows g].T @ x[rows g] + beta[g] * existing_out[g]``;
    **T (contracted) is grouped**.

    Codes times block scales are exact in bfloat16. Their products are summed in float32, and so is
    everything else: the sums are multiplied by ``alpha[g] * dy.global_scale * x.global_scale`` (a
    GPU needs a normal number) and added to ``beta[g] * existing_out[g]``.

    An empty group gives exact zeros, or ``beta[g] * existing_out[g]``: the bits of the latter
    without beta. If beta is 0, NaN and Inf in ``existing_out`` do not count.

    Args:
      x: ``nvfp4_quantize(x, axis=0, group_sizes=group_sizes)`` of ``(T, K)``.
      dy: ``nvfp4_quantize(dy, axis=0, group_sizes=group_sizes)`` of ``(T, N)``. Both with
        ``hadamard=True``, or neither: the transformation cancels in the product.
      group_sizes: ``(G,)``, those that x and dy were quantized with; the result is NaN otherwise.
      alpha: a scalar or ``(G,)``; None means 1.
      beta: a scalar or ``(G,)``, with existing_out only; None means 1.
      existing_out: float32 ``(G, N, K)``, accumulated into (in place where it is donated).
      implementation: ``None`` for the best one, ``"reference"``, or a kernel's name.

    Returns:
      float32 ``(G, N, K)``.

    Raises:
      ValueError: a mode, layout, axis or shape does not fit, beta is given without existing_out, or
        ``implementation`` cannot run.
      TypeError: x or dy is not a :class:`Quantized`, or a dtype is none of these.

    Memory: except on Blackwell, both operands are first written as bfloat16, ``2 * P * (N + K)``
    bytes of scratch for P padded rows. The range of the factor is that of :func:`nvfp4_grouped_mm`,
    with dy for w.

    In an empty group alpha does not count. On Hopper, in other groups, subnormal
    numbers of ``existing_out`` and subnormal sums may count as zeros. A program that is lowered
    where every GPU of the process is a Hopper one, or for ``implementation="sm90"``, runs on such
    GPUs only.

    Differentiable in alpha, beta, existing_out and global scales. Closed under ``vmap``. Shards
    along N and K. The weight gradient of Transformer Engine's NVFP4 recipe.

    Examples:
      >>> sizes = jnp.array([2, 3])
      >>> x, dy = jnp.ones((5, 64)), jnp.ones((5, 32))
      >>> q = [jgg.nvfp4_quantize(v, axis=0, group_sizes=sizes) for v in (x, dy)]
      >>> dw = jgg.nvfp4_grouped_wgrad(*q, sizes)
      >>> dw.shape, dw[:, 0, 0].tolist()
      ((2, 32, 64), [2.0, 3.0])
    """
    return grouped_wgrad(
        x, dy, group_sizes, alpha=alpha, beta=beta, existing_out=existing_out, dtype=jnp.float32,
        implementation=implementation,
    )  # fmt: skip


def grouped_wgrad(x, dy, group_sizes, *, dtype, alpha=None, beta=None, existing_out=None,
                  implementation=None) -> jax.Array:  # fmt: skip
    """The same, rounded to ``dtype``."""
    assert existing_out is None or dtype == jnp.float32
    op = "nvfp4_grouped_wgrad"
    x, dy = _along_t(op, "x", x), _along_t(op, "dy", dy)
    (k, _), (n, _), (t,) = x.shape, dy.shape, x.positions.shape
    if dy.positions.shape != (t,):
        raise ValueError(f"jgg.{op}: dy has {dy.positions.shape[0]} rows, expected T = {t} as x")
    group_sizes = check.group_sizes(op, group_sizes)
    groups = group_sizes.shape[0]
    check_padded(op, "x", x, t, groups, layouts.GROUPED)
    check_padded(op, "dy", dy, t, groups, layouts.GROUPED)
    why = f"because group_sizes is {group_sizes.shape}"
    alpha, beta = factor(op, "alpha", alpha, groups, why), factor(op, "beta", beta, groups, why)
    if existing_out is not None:
        existing_out = existing(op, existing_out, (groups, n, k))
    elif beta is not None:
        raise ValueError(f"jgg.{op}: beta needs existing_out, which it multiplies")
    check.implementation(op, implementation)
    promised = as_promised(group_sizes, layouts.GROUPED, x, dy)
    scale = folded(promised, alpha, dy.global_scale)
    dy = dataclasses.replace(dy, global_scale=None)
    return _WGRAD(
        x, dy, group_sizes, scale, beta, existing_out, dtype=jnp.dtype(dtype),
        implementation=implementation,
    )  # fmt: skip


def _composed(x, dy, group_sizes, scale, beta, existing_out, *, dtype, implementation):
    """In terms of other products. ``scale`` has that of dy."""
    padded = layouts.padded_sizes(group_sizes, x.positions.shape[0])
    of_x = x.global_scale
    dy, x = (exact(_stored(q), implementation) for q in (dy, x))
    if of_x is not None:
        rest, power = apart(of_x)
        x, scale = x * power, scale * rest
    product = _product(group_sizes, jnp.float32, implementation)
    out = primitives.wgrad(dy, x, segments.sizes(padded), product)
    live = padded > 0
    out = out * jnp.where(live, scale, jnp.float32(0))[:, None, None]
    if existing_out is not None:
        old = existing_out if beta is None else _times(beta, existing_out)
        out = padding.accumulated(live, out, old)
    return out.astype(dtype)


def _problem(platform, x, dy, group_sizes, scale, beta, existing_out, *, dtype,
             implementation) -> problems.Nvfp4:  # fmt: skip
    decoded = grouped_call.wgrad_problem(
        platform, _decoded(dy), _decoded(x), segments.sizes(group_sizes),
        _product(group_sizes, dtype, implementation),
    )  # fmt: skip
    return problems.Nvfp4(
        op="nvfp4_grouped_wgrad", platform=platform, implementation=implementation,
        out_dtype=jnp.dtype(dtype).name, k=x.shape[0], n=dy.shape[0], inner=decoded,
    )  # fmt: skip


def _decoded(q: Quantized) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(q.shape, jnp.dtype(jnp.bfloat16))


def _sm90(plan, x, dy, group_sizes, scale, beta, existing_out, *, dtype):
    """One kernel multiplies, scales and accumulates. ``scale`` has every global scale."""
    padded = layouts.padded_sizes(group_sizes, x.positions.shape[0])
    dy, x = (exact(_stored(q), None) for q in (dy, x))
    if existing_out is not None and beta is not None:
        existing_out = _times(beta, existing_out)
    return grouped_call.wgrad(
        plan, dy, x, segments.sizes(padded), _product(group_sizes, dtype, plan.named),
        scale=jnp.where(padded > 0, scale, jnp.float32(0)), existing_out=existing_out,
    )  # fmt: skip


def _product(group_sizes, dtype, implementation) -> Wgrad:
    """Operands whose grouped axis is their last."""
    return Wgrad(
        groups=group_sizes.shape[0], out_dtype=dtype, transpose_x=True, transpose_y=True,
        precision=jax.lax.Precision.HIGHEST, implementation=implementation,
    )  # fmt: skip


_WGRAD = sm100.grouped_wgrad(_composed, _problem, _sm90)


def _along_t(op: str, name: str, q) -> Quantized:
    """``q``, checked: in blocks along grouped rows."""
    q = array.of_mode(op, name, q, "nvfp4")
    if q.layout != "grouped":
        raise ValueError(
            f"jgg.{op}: {name} has layout {q.layout!r}, expected 'grouped': "
            f"nvfp4_quantize({name}, axis=0, group_sizes=group_sizes)"
        )
    if q.global_scale is not None and q.global_scale.ndim:
        raise ValueError(
            f"jgg.{op}: {name}.global_scale has shape {q.global_scale.shape}, expected ()"
        )
    return q


def _stored(q: Quantized) -> Quantized:
    """The array that the leaves hold, rows last and padded."""
    return dataclasses.replace(q, axis=-1, layout="linear", positions=None)


def _times(beta, existing_out):
    beta = jnp.broadcast_to(beta, existing_out.shape[:1])[:, None, None]
    unread = (beta == 0) & ~jnp.isfinite(existing_out)
    return beta * jnp.where(unread, jnp.float32(0), existing_out)
