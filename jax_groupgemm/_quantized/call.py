"""The custom calls of quantized weights: operands, results and attributes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from .._core import float_bits as fb
from .._core.products import Mm
from .._core.segments import Metadata
from .._grouped.call import NO_EPILOGUE, Epilogue, attributes, epilogue_flags, metadata_flags
from .._grouped.planes import as_planes
from .._kernels import choose, extension, problems
from . import format, ordered


def qmm_problem(
    platform, x, q, metadata: Metadata, product: Mm, epilogue: Epilogue = NO_EPILOGUE, *,
    packable: bool = False,
) -> problems.Qmm:  # fmt: skip
    """``qmm`` of these operands, as kernels see it; ``packable``: ``prepack`` takes the weight."""
    kind, (groups, k, n) = format.of(q), product.sizes(q)
    return problems.Qmm(
        op="qmm", platform=platform, implementation=product.implementation, dtypes=(x.dtype.name,),
        out_dtype=product.out_dtype.name, empty=0 in (*x.shape, *q.shape), rows=product.rows,
        rows_x=x.shape[0], segments=metadata.count, sizes=metadata.form.kind == "sizes",
        offset=metadata.group_offset is not None, groups=groups,
        # Rows may be of groups that are not here.
        all_groups=groups if metadata.group_offset is None else metadata.count,
        k=k, n=n, mode=q.mode, bits=q.bits, layout=q.layout, calls=kind.calls,
        group_size=kind.attribute_group_size(q.group_size),
        bfloat16_scales=kind.scales_fit(q, "bfloat16"),
        float16_scales=kind.scales_fit(q, "float16"),
        exact_in_bfloat16=kind.exact_in_bfloat16, scalable=kind.scalable, tf32=product.tf32,
        lines=q.layout != "linear" or kind.has_lines(q),
        packable=packable and bool(kind.calls & format.PREPACKS),
        in_order=metadata.form.ordered_y, transpose_w=product.transpose_w, **epilogue.facts(),
    )  # fmt: skip


def qmm(plan: choose.Plan, x, q, metadata: Metadata, product: Mm,
        epilogue: Epilogue = NO_EPILOGUE, *, x_is_ordered: bool = False,
        adapter=None):  # fmt: skip
    """Custom call ``jgg_qmm``: x, weight, scales, metadata[, x_sums][, biases][, global_scale]
    [, group_offset][, bias][, row_scale][, rows, weights] -> out; ``jgg_qmm_packed`` for a
    prepacked weight, ``jgg_qmm_fp8`` for one of mode "fp8" that is not.

    ``x_is_ordered``: x has its columns as :func:`ordered.of_lines` puts them, for this plan.
    ``adapter``: rows and weights of :func:`takes_adapter`, whose product is added.
    """
    if plan.kernel.name == "cpu":
        assert epilogue.nothing
        return _on_cpu(plan, x, q, metadata, product)
    planes, x_sums = plan.config.get("planes", 1), None
    of_lines = plan.config.get("of_lines", False)
    if plan.config.get("beside") and of_lines:
        x = x.astype(jnp.float32)
    elif plan.config.get("beside"):
        x, x_sums = _planes_beside(planes, x, q, product.transpose_w)
    elif planes > 1:
        assert epilogue.nothing
        return _in_planes(planes, plan, x, q, metadata, product)
    rows, (groups, _, n) = product.rows, product.sizes(q)
    assert epilogue.existing_out is None
    columns = n // 2 if epilogue.gated else n
    groups_of_rows, *offset = metadata.narrow(x.shape[0], groups)
    if 0 in (rows, columns, *x.shape, *q.weight.shape, *groups_of_rows.shape):
        return jnp.zeros((rows, columns), product.out_dtype)
    flags: dict[str, Any] = {
        "quantized": flags_of(q),
        "metadata": metadata_flags(metadata),
        "epilogue": epilogue_flags(epilogue),
        "plan": {name: plan.config.get(name, no) for name, no in _NO_PLAN.items()}
        | ({} if plan.config.get("beside") else {"planes": 1}),
    }
    scaled_lines = of_lines and plan.config["way"] == "scaled"
    of_floats = scaled_lines and product.transpose_w and x.dtype == jnp.float32
    if scaled_lines and product.transpose_w and not of_floats:
        x_sums = _sums_of(x, 32)
    if of_lines and not x_is_ordered and not of_floats:
        x = ordered.of_lines(x, q.bits, product.transpose_w, by_threads=scaled_lines)
    assert of_lines or not x_is_ordered
    if plan.target == "jgg_qmm":
        flags["qmm"] = _qmm_flags(metadata, product) | {"planned": of_lines}
    else:
        flags["transpose_w"] = product.transpose_w
    if plan.target == "jgg_qmm_fp8":
        del flags["quantized"]
        flags["block"] = _block_flags(q)
    if plan.target == "jgg_qmm_packed":
        flags["adapter"] = adapter is not None
    options = [a for a in (x_sums, q.biases, q.global_scale, *offset) if a is not None]
    call = jax.ffi.ffi_call(plan.target, jax.ShapeDtypeStruct((rows, columns), product.out_dtype))
    options += [*epilogue.arrays, *(adapter or ())]
    return call(x, q.weight, q.scales, groups_of_rows, *options, **attributes(flags))


def takes_adapter(plan: choose.Plan, x, rows, weights) -> bool:
    """Whether the kernel of a plan adds the product of rows (T, r) and weights (G, r, N)."""
    config = plan.config
    if plan.target != "jgg_qmm_packed" or config["planes"] > 1 or config["sum_parts"] > 1:
        return False
    if not x.dtype == rows.dtype == weights.dtype:
        return False
    return extension.rules().takes_adapter(
        way=config["way"], tile=config["tile"], rank=rows.shape[1]
    )


def _on_cpu(plan: choose.Plan, x, q, metadata: Metadata, product: Mm):
    """The same on a CPU: the table of segments in place of metadata, and no options."""
    rows, (groups, _, n) = product.rows, product.sizes(q)
    table = metadata.decode(x.shape[0], rows, groups)
    out = jax.ShapeDtypeStruct((rows, n), product.out_dtype)
    if 0 in (*out.shape, *x.shape, *q.weight.shape, *table.shape):
        return jnp.zeros(out.shape, out.dtype)
    flags: dict[str, Any] = {"qmm": _qmm_flags(metadata, product)}
    options = []
    if plan.target == "jgg_qmm":
        flags["quantized"] = flags_of(q)
        options = [a for a in (q.biases, q.global_scale) if a is not None]
    else:
        flags["block"] = _block_flags(q)
    call = jax.ffi.ffi_call(plan.target, out)
    return call(x, q.weight, q.scales, table, *options, **attributes(flags))


def _qmm_flags(metadata: Metadata, product: Mm) -> dict[str, Any]:
    return {
        "transpose_w": product.transpose_w,
        "planned": False,
        "in_order": metadata.form.ordered_y,
        "tf32": product.tf32,
    }


def _block_flags(q) -> dict[str, Any]:
    sizes = (min(size, max(axis, 1)) for size, axis in zip(q.block, q.shape[-2:], strict=True))
    return dict(zip(("rows", "columns"), sizes, strict=True))


def _in_planes(count: int, plan: choose.Plan, x, q, metadata: Metadata, product: Mm):
    """:func:`qmm` of a bfloat16 kernel, which takes x as ``count`` rows for each that sum to it."""
    parts = as_planes(x, count).reshape(count * x.shape[0], x.shape[1])
    of_parts = product.replace(rows=count * product.rows, out_dtype=jnp.dtype(jnp.float32))
    config = {name: value for name, value in plan.config.items() if name != "planes"}
    plan = dataclasses.replace(plan, config=config)
    sums = qmm(plan, parts, q, metadata.times(count, x.shape[0]), of_parts)
    of_rows = sums.reshape(product.rows, count, sums.shape[1])
    # The smallest first.
    out = functools.reduce(jnp.add, [of_rows[:, i] for i in reversed(range(count))])
    return out.astype(product.out_dtype)


def _planes_beside(count: int, x, q, transpose_w: bool):
    """x as ``count`` bfloat16 numbers beside each other that sum to it, (T, count * K), and, if the
    format has biases, what those multiply: sums of 32 k, (K / 128, T, 4), or of 16 where groups
    have 16, (K / 64, T, 4). Of a weight that is quantized along N, one number is float32, and there
    are no sums."""
    rows, k = x.shape
    parts = x if count == 1 else as_planes(x, count).reshape(rows, count * k)
    if not transpose_w:
        return parts.astype(jnp.float32) if count == 1 else parts, None
    if not format.of(q).has_biases:
        return parts, None
    return parts, _sums_of(x, min(q.group_size, 32))


def _sums_of(x, count: int):
    """Sums of ``count`` columns of x (T, K), filled up to whole 128: (K / 4 / count, T, 4)."""
    whole = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -x.shape[1] % 128)))
    return whole.reshape(x.shape[0], -1, 4, count).sum(-1).transpose(1, 0, 2)


#: Of kernels that have no plan.
_NO_PLAN = {"way": "tiles", "tile": 0, "parts": 1, "pairs": False, "planes": 1}


def quantize(w, global_scale, *, mode, bits, group_size):
    """Custom call ``jgg_quantize``: w (R, K)[, global_scale (L,)] -> weight, scales[, biases]."""
    *lead, k = w.shape
    rows = math.prod(lead)
    has_biases = format.FORMATS[mode].has_biases
    if has_biases and group_size < 32 and w.dtype != jnp.float32:
        # A lane has 32 numbers of 16 bits, of one group; of float32 it has 16, and the same bits.
        weight, *floats = quantize(
            w.astype(jnp.float32), global_scale, mode=mode, bits=bits, group_size=group_size
        )
        return weight, *(fb.narrow(fb.bits(a), w.dtype) for a in floats)
    return _quantize(w.reshape(rows, k), global_scale, (*lead, k), mode, bits, group_size)


def quantize_across(w, global_scale, *, mode, bits, group_size):
    """Custom call ``jgg_quantize`` on a CPU: w (B, K, N)[, global_scale (L,)] -> weight, scales
    [, biases] of (B * N, K)."""
    *lead, k, n = w.shape
    matrices = w.reshape(math.prod(lead), k, n)
    return _quantize(matrices, global_scale, (*lead, n, k), mode, bits, group_size)


def _quantize(w, global_scale, shape, mode, bits, group_size):
    """The leaves of an array of this shape, which is in w."""
    *lead, k = shape
    rows, has_biases = math.prod(lead), format.FORMATS[mode].has_biases
    scales = jax.ShapeDtypeStruct((rows, k // group_size), w.dtype if has_biases else jnp.uint8)
    results = jax.ShapeDtypeStruct((rows, k * bits // 32), jnp.uint32), scales
    results += (scales,) if has_biases else ()
    biases = True if has_biases else None  # a result
    flags = {"quantized": _quantized_flags(mode, bits, group_size, biases, global_scale)}
    more = [] if global_scale is None else [global_scale.reshape(-1)]
    call = jax.ffi.ffi_call("jgg_quantize", results)
    out = call(w, *more, **attributes(flags))
    return tuple(a.reshape(*lead, a.shape[1]) for a in out)


def dequantize(weight, scales, biases, global_scale, *, mode, bits, group_size, dtype,
               ordered=False):  # fmt: skip
    """Custom call ``jgg_dequantize``: weight, scales[, biases], all (R, ...)[, global_scale (L,)]
    -> w. ``ordered``: with columns as :func:`ordered.ordered` puts them."""
    *lead, words = weight.shape
    rows, k = math.prod(lead), words * 32 // bits
    operands = [a.reshape(rows, a.shape[-1]) for a in (weight, scales, biases) if a is not None]
    if global_scale is not None:
        operands.append(global_scale.reshape(-1))
    flags: dict[str, Any] = {
        "quantized": _quantized_flags(mode, bits, group_size, biases, global_scale),
        "ordered": ordered,
    }
    call = jax.ffi.ffi_call("jgg_dequantize", jax.ShapeDtypeStruct((rows, k), dtype))
    return call(*operands, **attributes(flags)).reshape(*lead, k)


def prepack(weight, scales, biases, *, mode, bits, group_size):
    """Custom call ``jgg_prepack``: weight, scales[, biases], all (R, ...) -> weight, scales, in
    tiles of 64 rows x 64 k."""
    *lead, n, words = weight.shape
    rows, k_tiles = math.prod((*lead, n)), words * 32 // bits // 64
    operands = [a.reshape(rows, a.shape[-1]) for a in (weight, scales, biases) if a is not None]
    scale_tiles, scale_words = format.packed_of(mode).packed_scales(group_size, k_tiles)
    if scales.dtype == jnp.float32:
        scale_words *= 2
    results = [
        jax.ShapeDtypeStruct((rows // 64, *shape), jnp.uint32)
        for shape in ((k_tiles, 128 * bits), (scale_tiles, scale_words))
    ]
    flags = {"quantized": _quantized_flags(mode, bits, group_size, biases, None)}
    out = jax.ffi.ffi_call("jgg_prepack", results)(*operands, **attributes(flags))
    return tuple(a.reshape(*lead, n // 64, *a.shape[1:]) for a in out)


def flags_of(q) -> dict[str, Any]:
    """Those of an array of any layout."""
    group_size = format.of(q).attribute_group_size(q.group_size)
    flags = _quantized_flags(q.mode, q.bits, group_size, q.biases, q.global_scale)
    return flags | {"layout": q.layout}


def _quantized_flags(mode, bits, group_size, biases, global_scale) -> dict[str, Any]:
    """A dictionary of attributes that handlers share: ffi/quantized/attributes.h."""
    return {
        "mode": mode,
        "bits": bits,
        "group_size": group_size,
        "layout": "linear",
        "biases": biases is not None,
        "global_scale": global_scale is not None,
    }
