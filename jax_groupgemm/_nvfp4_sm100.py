"""NVFP4 grouped products on Blackwell: one custom call where a GPU has the instructions, and
otherwise the composition of other products that says what they mean.

    out[t] = alpha[g] * x[t] @ w[g].T + bias[g]                            T (rows) is grouped
    out[g] = alpha[g] * dy_g.T @ x_g + beta[g] * existing_out[g]           T (contracted) is grouped

Both are one primitive without derivative rules of its own: differentiating or batching it goes back
to the composition, whose parts have theirs. Sharded operands (Auto, Explicit) are composed too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from . import _call, _partition, _prepack, _primitives
from ._segments import LENGTH, SIZES, X_START, decode


def grouped_mm(composed: Callable, x, w, group_sizes, alpha, bias, *, dtype, implementation):
    """``composed(x, w, group_sizes, alpha, bias, dtype=, implementation=)``, of Quantized x and w.

    ``alpha`` has w's global scale, and x's where that is a scalar; x's is one per row, or None.
    """
    return _either(
        "nvfp4_grouped_mm", composed, (x, w, group_sizes, alpha, bias), implementation, dtype=dtype
    )


def grouped_wgrad(composed: Callable, x, dy, group_sizes, alpha, beta, existing_out, *,
                  implementation):  # fmt: skip
    """``composed(x, dy, group_sizes, alpha, beta, existing_out, implementation=)``, of Quantized x
    and dy in layout "grouped"; ``alpha`` has their global scales."""
    operands = (x, dy, group_sizes, alpha, beta, existing_out)
    return _either("nvfp4_grouped_wgrad", composed, operands, implementation)


# ---- the custom calls ------------------------------------------------------------------------


def _mm_call(x, w, group_sizes, alpha, bias, *, dtype):
    (rows, _), groups = x.shape, w.shape[0]
    dtype = jnp.dtype(dtype)
    whole = bias is None and x.global_scale is None and dtype.name in ("bfloat16", "float32")
    out = _call.nvfp4_grouped_mm(
        x, _prepack.unpacked(w), group_sizes, _per_group(alpha, groups),
        out_dtype=dtype if whole else jnp.float32,
    )  # fmt: skip
    if whole:
        return out
    # XLA does the rest in one loop, but for the group of each row.
    table = decode(SIZES, (group_sizes,), rows, rows, groups)
    ends = table[:, X_START] + table[:, LENGTH]
    group = jnp.searchsorted(ends, lax.iota(jnp.int32, rows), side="right", method="scan_unrolled")
    inside = (group < groups)[:, None]
    if x.global_scale is not None:
        out = jnp.where(inside, out * x.global_scale[:, None], jnp.float32(0))
    if bias is not None:
        own = bias.astype(jnp.float32)[jnp.minimum(group, groups - 1)]
        out = out + jnp.where(inside, own, jnp.float32(0))
    return out.astype(dtype)


def _wgrad_call(x, dy, group_sizes, alpha, beta, existing_out):
    groups = group_sizes.shape[0]
    beta = None if existing_out is None else _per_group(beta, groups)
    return _call.nvfp4_grouped_wgrad(
        x, dy, group_sizes, _per_group(alpha, groups), beta, existing_out
    )


def _per_group(factor, groups: int):
    """float32 (G,) of a scalar, (G,) or None."""
    return jnp.broadcast_to(jnp.float32(1) if factor is None else factor, (groups,))


_CALLS = {"nvfp4_grouped_mm": _mm_call, "nvfp4_grouped_wgrad": _wgrad_call}


def _problem(call: str, operands, dtype) -> str | None:
    """Why the kernel cannot take operands of this shape: what ffi/nvfp4/layout.h says."""
    x, other, *_ = operands
    if call == "nvfp4_grouped_wgrad":
        # Lines of the result, four columns of float32 to 16 bytes.
        return _multiple("K", x.shape[0], 4)
    columns = 8 if dtype == jnp.bfloat16 else 4
    return _multiple("K", x.shape[1], 32) or _multiple("N", other.shape[1], columns)


def _multiple(name: str, size: int, unit: int) -> str | None:
    return f"needs {name} % {unit} == 0, got {name}={size}" if size % unit else None


# ---- the primitive ---------------------------------------------------------------------------


def _either(call: str, composed: Callable, operands, implementation, **static):
    """``composed(*operands, ...)`` or the custom call ``jgg_<call>``."""
    if implementation not in (None, "sm100"):
        return composed(*operands, **static, implementation=implementation)
    leaves, tree = jax.tree.flatten(operands)
    if _partition.explicit_mesh(leaves) is not None:
        _not_sharded(implementation)
        return composed(*operands, **static, implementation=None)
    leaves = _primitives.vary_alike(*leaves)
    traced = _traceable(composed, **static).trace(*tree.unflatten(leaves))
    return _PRIMITIVE.bind(
        *leaves, call=call, tree=tree, jaxpr=traced.jaxpr, implementation=implementation,
        manual=bool(jax.sharding.get_abstract_mesh().manual_axes),
    )  # fmt: skip


@functools.cache
def _traceable(composed: Callable, **static):
    return jax.jit(functools.partial(composed, **static, implementation=None))


def _not_sharded(implementation) -> None:
    if implementation is not None:
        raise ValueError(
            f"jgg: implementation={implementation!r} cannot run: its operands are sharded. "
            "Use implementation=None, or jax.shard_map."
        )


def _abstract(*_, jaxpr: Jaxpr, **params):
    return jaxpr.out_avals[0]


def _composed(*leaves, jaxpr: Jaxpr, **_):
    return jaxpr_as_fun(jaxpr)(*leaves)[0]


def _jvp(primals, tangents, **params):
    out = _PRIMITIVE.bind(*primals, **params)
    active = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if not active:
        return out, ad.Zero.from_primal_value(out)  # pyright: ignore[reportAttributeAccessIssue]

    def f(*values):
        leaves = list(primals)
        for i, value in zip(active, values, strict=True):
            leaves[i] = value
        return _composed(*leaves, **params)

    # What only its value needs is dead code.
    _, tangent = jax.jvp(f, [primals[i] for i in active], [tangents[i] for i in active])
    return out, tangent


def _batch(args, dims, **params):
    return jax.vmap(functools.partial(_composed, **params), in_axes=tuple(dims))(*args), 0


def _lowering(platform, ctx, *values, **params):
    partitioned = not params["manual"] and _partition.may_be_partitioned(ctx)
    rule = functools.partial(_one_device, platform, partitioned, **params)
    return mlir.lower_fun(rule, multiple_results=False)(ctx, *values)


def _one_device(platform, partitioned, *leaves, call, tree, jaxpr, implementation, manual):
    del manual
    operands, (out,) = tree.unflatten(leaves), jaxpr.out_avals
    empty = 0 in (*out.shape, *operands[0].shape)
    if partitioned:
        _not_sharded(implementation)
    elif not empty and _call.takes_sm100(platform, implementation, f"jgg_{call}"):
        static = {"dtype": out.dtype} if call == "nvfp4_grouped_mm" else {}
        problem = _problem(call, operands, out.dtype)
        if problem is None:
            return _CALLS[call](*operands, **static)
        if implementation is not None:
            raise ValueError(
                f"jgg: implementation={implementation!r} cannot run: {problem}. "
                "Use implementation=None, or 'reference'."
            )
    return _composed(*leaves, jaxpr=jaxpr)


_PRIMITIVE = Primitive("jgg_nvfp4")
_PRIMITIVE.def_abstract_eval(_abstract)
ad.primitive_jvps[_PRIMITIVE] = _jvp
batching.primitive_batchers[_PRIMITIVE] = _batch
_partition.needs_devices(_PRIMITIVE)
for _platform in ("cpu", "cuda", None):
    mlir.register_lowering(
        _PRIMITIVE, functools.partial(_lowering, _platform or "other"), platform=_platform
    )


@functools.cache
def _compiled(**params):
    return jax.jit(functools.partial(_PRIMITIVE.bind, **params))


_PRIMITIVE.def_impl(lambda *leaves, **params: _compiled(**params)(*leaves))
