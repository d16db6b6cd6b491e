"""``nvfp4_grouped_mm``: every group of rows times its own matrix, both in NVFP4."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._core import check, segments
from .._core import float_bits as fb
from .._core.operations import operation
from .._core.products import Mm
from .._core.types import Implementation, Integers
from .._grouped import fused
from .._grouped.call import Epilogue
from .._kernels import problems
from .._quantized import array, convert, prepack
from .._quantized import call as quantized_call
from .._quantized import product as quantized_product
from .._quantized.array import Quantized
from .._quantized.format import FLOATS
from .._quantized.operands import one_owner
from . import sm100
from .sm100 import folded


@operation
def nvfp4_grouped_mm(
    x: Quantized,
    w: Quantized,
    group_sizes: Integers,
    *,
    alpha: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    preferred_element_type: DTypeLike | None = jnp.bfloat16,
    implementation: Implementation | None = None,
) -> jax.Array:
    """``out[t] = alpha[g] * x[t] @ w[g].T + bias[g]``, ``g = group(t)``; **T (rows) is grouped**.

    Codes times block scales are exact in bfloat16. Their products are summed in float32; the sums
    are multiplied by ``alpha[g] * w.global_scale[g] * x.global_scale``, also float32 (a GPU needs a
    normal number), get the bias and are rounded once. Rows of no group are exact zeros.

    Args:
      x: mode ``"nvfp4"``, ``(T, K)``, blocks along K. Its ``global_scale`` is a scalar, ``(T,)`` or
        None, which means 1.
      w: mode ``"nvfp4"``, ``(G, N, K)``, blocks along K; :func:`prepack` may have laid it out.
        Its ``global_scale`` is a scalar, ``(G,)`` or None.
      group_sizes: as in :func:`grouped_mm`.
      alpha: a scalar or ``(G,)``; None means 1.
      bias: ``(G, N)``, added to the rows of its group.
      preferred_element_type: bfloat16, float16 or float32.
      implementation: ``None`` for the best one, ``"reference"``, or a kernel's name.

    Returns:
      ``(T, N)``.

    Raises:
      ValueError: a mode, axis or shape does not fit, or a sharding over an Explicit mesh, or
        ``implementation`` cannot run.
      TypeError: x or w is not a :class:`Quantized`, or a dtype is none of these.

    The gradient of x in ``x @ w[g].T`` is this operation too: of dy and of w quantized along N.
    ``nvfp4_quantize(w, axis=-2)`` stores that as the array ``(G, K, N)``, which is what
    ``dataclasses.replace(q, axis=-1)`` stands for.

    Range: a GPU takes the factor of the sums as one float32 number. Below 2^-126 it loses bits,
    below 2^-149 it is 0, from 2^128 on infinite. Without alpha, for operands of
    :func:`nvfp4_quantize`, ``amax(x) * amax(w)`` has to be at least 8.5e-32. On CPUs only each
    global scale (amax 3.2e-35) and ``alpha * w.global_scale`` have to be normal numbers: a power
    of two of x's scale, within 2^±64, multiplies the values of x instead, which is exact.

    Memory: except on Blackwell, x is first written as bfloat16, ``2 * T * K`` bytes of scratch. On
    Blackwell a swizzled operand is first put back in order, and its scales are swizzled again,
    group by group.

    Differentiable in alpha, bias and global scales; codes and block scales are integers. Closed
    under ``vmap``. Shards like :func:`grouped_qmm`. The grouped NVFP4 product of Transformer Engine
    with its two-level scales, ``global_scale`` in the form that multiplies.

    Examples:
      >>> x, w = jnp.ones((5, 64)), jnp.ones((2, 128, 64))  # w: experts, N, K
      >>> y = jgg.nvfp4_grouped_mm(jgg.nvfp4_quantize(x), jgg.nvfp4_quantize(w), jnp.array([2, 3]))
      >>> y.dtype, float(y[0, 0])
      (dtype(bfloat16), 64.0)
    """
    op = "nvfp4_grouped_mm"
    x = array.along_last(op, "x", x, "nvfp4", "T, K")
    w = array.along_last(op, "w", w, "nvfp4", "G, N, K")
    (t, k), (groups, n, _) = x.shape, w.shape
    if w.shape[2] != k:
        raise ValueError(
            f"jgg.{op}: w has shape {w.shape}, expected (G, N, K) = {(groups, n, k)} because x is "
            f"{x.shape}"
        )
    why = f"because w is {w.shape}"
    group_sizes = check.group_sizes(op, group_sizes, groups, why)
    alpha = factor(op, "alpha", alpha, groups, why)
    if bias is not None:
        bias = check.array(op, "bias", bias)
        check.shape(op, "bias", bias, (groups, n), "G, N", why)
    if w.global_scale is not None and w.global_scale.ndim > 1:
        raise ValueError(
            f"jgg.{op}: w.global_scale has shape {w.global_scale.shape}, expected () or (G,) = "
            f"({groups},) {why}"
        )
    preferred = jnp.bfloat16 if preferred_element_type is None else preferred_element_type
    dtype = check.of_dtype(op, "preferred_element_type", preferred)
    check.dtype(op, "preferred_element_type", dtype, FLOATS)
    check.rows(op, "x", t)
    check.implementation(op, implementation)
    one_owner(op, (("x", x.weight, "TK"), ("w", w.weight, "GNK")))
    scale, w = folded(alpha, w.global_scale), dataclasses.replace(w, global_scale=None)
    return _MM(x, w, group_sizes, scale, bias, dtype=dtype, implementation=implementation)


def _composed(x, w, group_sizes, scale, bias, *, dtype, implementation):
    """In terms of other products. ``scale`` has w's global scale."""
    product = _product(x, dtype, implementation)
    groups = segments.sizes(group_sizes)
    rows, row_scale = exact(x, implementation), x.global_scale
    if row_scale is not None and row_scale.ndim == 0:
        rest, power = apart(row_scale)
        rows, scale, row_scale = rows * power, folded(scale, rest), None
    w = dataclasses.replace(w, global_scale=scale)
    multiplied = functools.partial(quantized_product.FUSED, rows, w, groups)
    if row_scale is None or bias is None:
        return multiplied(product, Epilogue(bias, row_scale=row_scale))
    # An epilogue scales rows after it has added a bias, which here is a product of its own.
    out = multiplied(product.replace(out_dtype=jnp.float32), Epilogue(row_scale=row_scale))
    ones = jnp.ones((rows.shape[0], 1), bias.dtype)
    return fused.MM(ones, bias[:, :, None], groups, product, Epilogue(existing_out=out))


def _product(x: Quantized, dtype, implementation=None) -> Mm:
    """Rows of x times weights (G, N, K)."""
    return Mm(
        rows=x.shape[0], out_dtype=dtype, transpose_w=True, precision=lax.Precision.HIGHEST,
        implementation=implementation,
    )  # fmt: skip


def _problem(platform, x, w, group_sizes, scale, bias, *, dtype, implementation) -> problems.Nvfp4:
    del scale
    k, n = x.shape[1], w.shape[1]
    decoded = quantized_call.qmm_problem(
        platform, _decoded(x), w, segments.sizes(group_sizes), _product(x, dtype, implementation),
        Epilogue(bias),
    )  # fmt: skip
    return problems.Nvfp4(
        op="nvfp4_grouped_mm", platform=platform, implementation=implementation,
        out_dtype=jnp.dtype(dtype).name, k=k, n=n, inner=decoded,
        linear=x.layout == w.layout == "linear", row_scales=x.global_scale is not None,
    )  # fmt: skip


def _decoded(x: Quantized) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.bfloat16))


def _sm90(plan, x, w, group_sizes, scale, bias, *, dtype):
    """x is decoded to the columns' order that the kernel takes beside w as it is stored."""
    rows = quantized_call.dequantize(
        x.weight, x.scales, None, None, mode=x.mode, bits=x.bits, group_size=x.group_size,
        dtype=_decoded(x).dtype, ordered=True,
    )  # fmt: skip
    return quantized_call.qmm(
        plan, rows, dataclasses.replace(w, global_scale=scale), segments.sizes(group_sizes),
        _product(x, dtype, plan.named), Epilogue(bias), x_is_ordered=True,
    )  # fmt: skip


_MM = sm100.grouped_mm(_composed, _problem, _sm90)


def factor(op: str, name: str, value, groups: int, why: str) -> jax.Array | None:
    """A scalar or one number per group, as float32."""
    if value is None:
        return None
    value = check.array(op, name, value)
    real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    if not real:
        raise TypeError(f"jgg.{op}: {name} must hold real numbers, got dtype {value.dtype.name}")
    if value.shape not in ((), (groups,)):
        raise ValueError(
            f"jgg.{op}: {name} has shape {value.shape}, expected () or (G,) = ({groups},) {why}"
        )
    return value.astype(jnp.float32)


def apart(scale) -> tuple[jax.Array, jax.Array]:
    """``(rest, power)``: their product is ``scale``, and power, a bfloat16, is a power of two.

    It multiplies values before they are summed, which is exact; then what is left of small scales
    is a normal number, and their product is not flushed before it meets the sums.
    """
    exponent = fb.i32(fb.magnitude(fb.bits(lax.stop_gradient(scale))) >> 23)
    exponent = jnp.clip(exponent, 127 - 64, 127 + 64)
    of = lambda exponent: fb.value(fb.u32(exponent) << 23)
    return scale * of(254 - exponent), of(exponent).astype(jnp.bfloat16)


def exact(q: Quantized, implementation) -> jax.Array:
    """Codes times block scales, which bfloat16 holds."""
    q = prepack.unpacked(dataclasses.replace(q, global_scale=None))
    return convert._dequantize(q, jnp.bfloat16, implementation)
