"""The custom calls: operands, results, attributes and aliases of each handler."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _call, _formats, _ordered, _reference, _segments, _split, _tuned
from . import _nvfp4_layouts as layouts


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What a kernel of ``mm`` does to its float32 sums ``y`` before it rounds them::

        existing_out + row_scale * activation(y + bias[weight])

    Operands are (G, N), (T,) and the result's shape; None leaves a step out.
    """

    bias: Any = None
    activation: str | None = None
    row_scale: Any = None
    existing_out: Any = None


def mm(implementation, x, w, *meta, form, rows, out_dtype, transpose_x, transpose_w,
       transpose_out, precision, epilogue: Epilogue | None = None, x_rows=None,
       y_rows=None):  # fmt: skip
    """Custom call ``jgg_mm``: x, w, metadata[, options] -> out.

    With lists of rows, int32 (T,), row t of x is its row ``x_rows[t]`` (zeros where it has none),
    and row t of the result its row ``y_rows[t]``, a permutation.
    """
    n = w.shape[1 if transpose_w else 2]
    lists = [rows for rows in (x_rows, y_rows) if rows is not None]
    rows_x = x.shape[1 if transpose_x else 0] if x_rows is None else x_rows.shape[0]
    flags: dict[str, Any] = {
        "mm": {
            "transpose_x": transpose_x,
            "transpose_w": transpose_w,
            "transpose_out": transpose_out,
            "in_order": form.ordered_y,
        }
    }
    if implementation == "cpu":
        assert epilogue is None
        assert not lists
        table = _segments.decode(form, meta, rows_x, rows, w.shape[0])
        shape = (n, rows) if transpose_out else (rows, n)
        return _product("jgg_mm", x, w, [table], shape, out_dtype, flags)
    epilogue = epilogue or Epilogue()
    flags |= {
        "metadata": _metadata_flags(form, meta),
        "rows": {"x_rows": x_rows is not None, "y_rows": y_rows is not None},
        "epilogue": _epilogue_flags(epilogue),
    }
    rest = [*_segments.narrow(form, meta, rows_x, w.shape[0]), *lists]
    options = (epilogue.bias, epilogue.row_scale, epilogue.existing_out)
    rest += [value for value in options if value is not None]
    gated = epilogue.activation in ("swiglu", "geglu")
    columns = n // 2 if gated else n
    shape = (columns, rows) if transpose_out else (rows, columns)
    mean_rows = rows / max(rest[0].shape[0], 1)
    tile = 0 if lists else _tuned.mm(x, w, mean_rows, out_dtype, transpose_w, gated)
    whole = gated or transpose_x or transpose_out
    planes = 1 if whole else mm_planes(implementation, x, w, form, rows, transpose_w, precision)
    if planes > 1:
        x, w = in_planes(planes, 64, (x, -1), (w, -1 if transpose_w else -2))
    flags["choice"] = _choice_flags(implementation, precision, planes, tile)
    # The result takes the place of existing_out: XLA copies it first where it is needed later.
    aliases = None if epilogue.existing_out is None else {1 + len(rest): 0}
    return _product("jgg_mm", x, w, rest, shape, out_dtype, flags, aliases)


def mm_planes(implementation, x, w, form, rows: int, transpose_w: bool, precision) -> int:
    """The bfloat16 planes in which a CUDA kernel takes float32 operands of ``mm``; 1: as they are.
    A gated activation is then left to XLA (``_epilogue``)."""
    runs = form.ordered_y and (transpose_w or w.shape[2] % 8 == 0)
    pays = _splitting_pays(rows * math.prod(w.shape[1:]), x.size + w.size)
    return _planes(implementation, x, w, precision, runs=runs, pays=pays)


def wgrad(implementation, x, y, *meta, form, groups, out_dtype, transpose_x, transpose_y,
          precision, scale=None, existing_out=None):  # fmt: skip
    """Custom call ``jgg_wgrad``: x, y, metadata[, group_offset][, scale][, existing_out] -> out.

    "sm90" also does ``out[g] = scale[g] * sums[g] + existing_out[g]``, of matrices that it takes
    whole (``wgrad_parts``); one whose segment is empty keeps existing_out.
    """
    shape, rows = _wgrad_shape(x, y, groups, transpose_x, transpose_y)
    flags: dict[str, Any] = {"wgrad": {"transpose_x": transpose_x, "transpose_y": transpose_y}}
    options = [value for value in (scale, existing_out) if value is not None]
    parts = 1 if implementation == "cpu" else _parts(form, meta, groups, rows[0], shape)
    if parts > 1:
        assert not options
        spans = _segments.pieces(_segments.decode(form, meta, *rows, groups), parts)
        out = wgrad(implementation, x, y, spans, form=_segments.SPANS, groups=groups * parts,
                    out_dtype=jnp.float32, transpose_x=transpose_x, transpose_y=transpose_y,
                    precision=precision)  # fmt: skip
        return out.reshape(groups, parts, *shape[1:]).sum(1).astype(out_dtype)
    if implementation == "cpu":
        assert not options
        rest = [_segments.decode(form, meta, *rows, groups)]
    else:
        rest = _segments.narrow(form, meta, rows[0], groups)
        flags |= {
            "metadata": _metadata_flags(form, meta),
            "own_weight": form.own_weight,
            "epilogue": {"scale": scale is not None, "existing_out": existing_out is not None},
        }
        mean_rows = rows[0] / max(rest[0].shape[0], 1)
        tile = _tuned.wgrad(x, y, mean_rows, out_dtype, shape, transpose_x, transpose_y)
        contiguous = transpose_x and transpose_y  # along the contracted axis, both
        a, b = shape[1:]
        planes = _planes(
            implementation, x, y, precision,
            runs=form.own_weight and not (contiguous and form.kind == "segments")
            and (transpose_x or a % 8 == 0) and (transpose_y or b % 8 == 0),
            pays=_splitting_pays(rows[0] * a * b, x.size + y.size, few=_tiles(shape) <= 264),
        )  # fmt: skip
        if planes > 1:
            axes = (-1 if transpose else None for transpose in (transpose_x, transpose_y))
            x, y = in_planes(planes, 8, *zip((x, y), axes, strict=True))
        flags["choice"] = _choice_flags(implementation, precision, planes, tile)
    rest += options
    aliases = None if existing_out is None else {1 + len(rest): 0}
    return _product("jgg_wgrad", x, y, rest, shape, out_dtype, flags, aliases)


def wgrad_parts(x, y, meta, *, form, groups, transpose_x, transpose_y, **_) -> int:
    """In how many parts ``wgrad`` of a CUDA kernel takes each matrix."""
    shape, rows = _wgrad_shape(x, y, groups, transpose_x, transpose_y)
    return _parts(form, meta, groups, rows[0], shape)


def _wgrad_shape(x, y, groups: int, transpose_x: bool, transpose_y: bool):
    """That of the result, and the rows of either operand."""
    (a, x_rows), (b, y_rows) = (
        (v.shape if transpose else v.shape[::-1])
        for v, transpose in ((x, transpose_x), (y, transpose_y))
    )
    return (groups, a, b), (x_rows, y_rows)


def _parts(form, meta, groups: int, rows: int, shape) -> int:
    """In how many parts a kernel takes each segment, so that few and small results keep an H200's
    132 processors busy: a tile of 128 x 128 for each, of 512 rows or more on average. 1: whole,
    also where it would be less than 4, since adding the parts up takes time, too."""
    if form.kind == "segments" or len(meta) > 1 or 0 in shape:
        return 1
    parts = min(132 // _tiles(shape), rows // (512 * groups))
    return parts if parts >= 4 else 1


def _tiles(shape) -> int:
    """Of 128 x 128, in a stack of matrices."""
    return shape[0] * math.prod(-(-size // 128) for size in shape[1:])


def _planes(implementation, a, b, precision, *, runs: bool, pays: bool) -> int:
    """The bfloat16 planes in which a CUDA kernel takes each operand; 1: as they are.

    ``runs`` where there is a kernel for them, ``pays`` where making three is worth it.
    """
    if _reference.promoted(a.dtype, b.dtype) != jnp.float32 or not runs:
        return 1
    capabilities = _call.live_capabilities()
    two = precision == jax.lax.Precision.HIGH
    if implementation != "sm90":
        hopper = bool(capabilities) and all(capability == 90 for capability in capabilities)
        # Two planes are no faster than tf32 on "sm80".
        if implementation == "sm80" or two or not (hopper and pays):
            return 1
    if capabilities and "90a" not in _call.BUILD.architectures:
        return 1
    return 2 if two else 3


def in_planes(count: int, multiple: int, first, second):
    """Custom call ``jgg_planes``: ``_split.planes`` of two (operand, axis) at once."""
    planes = lambda: [_split.planes(a, count, multiple, axis) for a, axis in (first, second)]
    arrays = first[0], second[0]
    if any(0 in a.shape for a in arrays):
        return planes()
    whole = [a.astype(jnp.float32).reshape(-1, *a.shape[-2:]) for a in arrays]
    shapes = [p.shape for p in jax.eval_shape(planes)]
    results = [
        jax.ShapeDtypeStruct((a.shape[0], *shape[-3:]), jnp.bfloat16)
        for a, shape in zip(whole, shapes, strict=True)
    ]
    out = jax.ffi.ffi_call("jgg_planes", results)(*whole, **_attributes({"planes": count}))
    return [p.reshape(shape) for p, shape in zip(out, shapes, strict=True)]


def _splitting_pays(multiplications: int, elements: int, few: bool = False) -> bool:
    """Whether three planes are faster than float32 arithmetic. An H200 does 21e12 multiplications a
    second in float32, or 10e12 where tiles are few; 40e12 in planes, 2.5 ps to make those of an
    element, and 5 us are a fit that chooses the faster in the cases measured
    (docs/kernel_log.md)."""
    planes = multiplications / 40e12 + 2.5e-12 * elements + 5e-6
    return planes < multiplications / (10e12 if few else 21e12)


def qmm(implementation, x, q, meta, *, form, rows, out_dtype, transpose_w, precision,
        epilogue: Epilogue | None = None, x_is_ordered=False):  # fmt: skip
    """Custom call ``jgg_qmm``: x, weight, scales, metadata[, biases][, global_scale]
    [, group_offset][, bias][, row_scale] -> out; ``jgg_qmm_packed`` for a prepacked weight."""
    groups, n = q.shape[0], q.shape[1 if transpose_w else 2]
    epilogue = epilogue or Epilogue()
    assert epilogue.existing_out is None
    columns = n // 2 if epilogue.activation in ("swiglu", "geglu") else n
    metadata, *offset = _segments.narrow(form, meta, x.shape[0], groups)
    if 0 in (rows, columns, *x.shape, *q.weight.shape, *metadata.shape):
        return jnp.zeros((rows, columns), out_dtype)
    flags: dict[str, Any] = {
        "quantized": _quantized_flags(q.mode, q.bits, q.group_size, q.biases, q.global_scale)
        | {"layout": q.layout},
        "metadata": _metadata_flags(form, meta),
        "epilogue": _epilogue_flags(epilogue),
    }
    if q.layout == "linear":
        target = "jgg_qmm"
        x_ordered = _ordered.takes(implementation, x, q, form, transpose_w)
        if x_ordered and not x_is_ordered:
            x = _ordered.ordered(x, q.bits)
        assert x_ordered or not x_is_ordered
        flags["qmm"] = {
            "transpose_w": transpose_w,
            "x_ordered": x_ordered,
            "in_order": form.ordered_y,
            "tf32": _tf32(precision),
        }
    else:
        target = "jgg_qmm_packed"
    options = (q.biases, q.global_scale, *offset, epilogue.bias, epilogue.row_scale)
    given = [value for value in options if value is not None]
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((rows, columns), out_dtype))
    return call(x, q.weight, q.scales, metadata, *given, **_attributes(flags))


def nvfp4_grouped_mm(x, w, group_sizes, alpha, *, out_dtype):
    """Custom call ``jgg_nvfp4_grouped_mm``: x, its scales, w, its scales, sizes, alpha -> out,
    workspace."""
    (rows, k), (groups, n, _) = x.shape, w.shape
    sizes, *_ = _segments.narrow(_segments.SIZES, (group_sizes,), rows, groups)
    columns, scale_rows = _up(k // 16, 4), layouts.padded_rows(rows, groups, layouts.SWIZZLED)
    workspace = _nvfp4_workspace(groups, scale_rows * columns, groups * _up(n, 128) * columns)
    out = jax.ShapeDtypeStruct((rows, n), out_dtype)
    call = jax.ffi.ffi_call("jgg_nvfp4_grouped_mm", (out, workspace))
    return call(x.weight, x.scales, w.weight, w.scales, sizes, alpha)[0]


def nvfp4_grouped_wgrad(x, dy, group_sizes, alpha, beta=None, existing_out=None):
    """Custom call ``jgg_nvfp4_grouped_wgrad``: x, its scales, dy, its scales, sizes, alpha
    [, beta, existing_out] -> out, workspace."""
    (k, padded), (n, _), (rows,) = x.shape, dy.shape, x.positions.shape
    (groups,) = group_sizes.shape
    sizes, *_ = _segments.narrow(_segments.SIZES, (group_sizes,), rows, groups)
    workspace = _nvfp4_workspace(groups, _up(n, 128) * padded // 16, _up(k, 128) * padded // 16)
    out = jax.ShapeDtypeStruct((groups, n, k), jnp.float32)
    existing = () if existing_out is None else (beta, existing_out)
    call = jax.ffi.ffi_call(
        "jgg_nvfp4_grouped_wgrad",
        (out, workspace),
        input_output_aliases={7: 0} if existing else None,
    )
    operands = (x.weight, x.scales, dy.weight, dy.scales, sizes, alpha, *existing)
    return call(*operands, **_attributes({"tokens": rows}))[0]


def nvfp4_quantize(x, group_sizes, seed, *, axis, scale_2d, hadamard):
    """Custom call ``jgg_nvfp4_quantize``: x (M, R, C), sizes, seed -> weight, scales, global_scale,
    workspace. Sizes and seed may be empty."""
    *lead, rows, columns = (1, *x.shape)[-max(x.ndim, 2) :]
    matrices = math.prod(lead)
    lines, along = (rows, columns) if axis == -1 else (columns, rows)
    sizes, words = jnp.zeros((0,), jnp.int32), 3 * matrices
    if group_sizes is not None:
        (groups,) = group_sizes.shape
        sizes, *_ = _segments.narrow(_segments.SIZES, (group_sizes,), rows, groups)
        words += 2 * (groups + 1)
        if axis == -2:
            along = layouts.padded_rows(rows, groups, layouts.GROUPED)
    results = (
        jax.ShapeDtypeStruct((matrices, lines, along // 8), jnp.uint32),
        jax.ShapeDtypeStruct((matrices, lines, along // 16), jnp.uint8),
        jax.ShapeDtypeStruct((matrices,), jnp.float32),
        jax.ShapeDtypeStruct((words,), jnp.uint32),
    )
    call = jax.ffi.ffi_call("jgg_nvfp4_quantize", results)
    flags = {"along_rows": axis == -2, "scale_2d": scale_2d, "hadamard": hadamard}
    seed = jnp.zeros((0,), jnp.uint32) if seed is None else seed
    operands = x.reshape(matrices, rows, columns), sizes, seed
    weight, scales, global_scale, _ = call(*operands, **_attributes(flags))
    lead = x.shape[:-2] if x.ndim == 1 else (*x.shape[:-2], lines)
    weight, scales = (a.reshape(*lead, a.shape[-1]) for a in (weight, scales))
    return weight, scales, global_scale.reshape(x.shape[:-2])


def quantize(w, global_scale, *, mode, bits, group_size):
    """Custom call ``jgg_quantize``: w (R, K)[, global_scale (L,)] -> weight, scales[, biases]."""
    *lead, k = w.shape
    rows = math.prod(lead)
    scales = jax.ShapeDtypeStruct(
        (rows, k // group_size), w.dtype if mode == "affine" else jnp.uint8
    )
    results = jax.ShapeDtypeStruct((rows, k * bits // 32), jnp.uint32), scales
    results += (scales,) if mode == "affine" else ()
    biases = True if mode == "affine" else None  # a result
    flags = {"quantized": _quantized_flags(mode, bits, group_size, biases, global_scale)}
    more = [] if global_scale is None else [global_scale.reshape(-1)]
    call = jax.ffi.ffi_call("jgg_quantize", results)
    out = call(w.reshape(rows, k), *more, **_attributes(flags))
    return tuple(a.reshape(*lead, a.shape[1]) for a in out)


def dequantize(weight, scales, biases, global_scale, *, mode, bits, group_size, dtype,
               ordered=False):  # fmt: skip
    """Custom call ``jgg_dequantize``: weight, scales[, biases], all (R, ...)[, global_scale (L,)]
    -> w. ``ordered``: with columns as :func:`_ordered.ordered` puts them."""
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
    return call(*operands, **_attributes(flags)).reshape(*lead, k)


def prepack(weight, scales, biases, *, mode, bits, group_size):
    """Custom call ``jgg_prepack``: weight, scales[, biases], all (R, ...) -> weight, scales, in
    tiles of 64 rows x 64 k."""
    *lead, n, words = weight.shape
    rows, k_tiles = math.prod((*lead, n)), words * 32 // bits // 64
    operands = [a.reshape(rows, a.shape[-1]) for a in (weight, scales, biases) if a is not None]
    scale_tiles, scale_words = _formats.packed_scales(mode, group_size, k_tiles)
    results = [
        jax.ShapeDtypeStruct((rows // 64, *shape), jnp.uint32)
        for shape in ((k_tiles, 128 * bits), (scale_tiles, scale_words))
    ]
    flags = {"quantized": _quantized_flags(mode, bits, group_size, biases, None)}
    out = jax.ffi.ffi_call("jgg_prepack", results)(*operands, **_attributes(flags))
    return tuple(a.reshape(*lead, n // 64, *a.shape[1:]) for a in out)


def _nvfp4_workspace(groups: int, *scales: int):
    """As ffi/nvfp4/layout.h has it: arrays of shapes, addresses, strides and layouts, two prefix
    sums, tensor maps for 160 multiprocessors, and swizzled scales."""
    arrays = [groups * size for size in (12, *[8] * 8, 20, 20)]
    parts = [*arrays, *[4 * (groups + 1)] * 2, 160 * 6 * 128, *scales]
    return jax.ShapeDtypeStruct((256 + sum(_up(part, 256) for part in parts),), jnp.uint8)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


# Dictionaries of attributes that handlers share: ffi/grouped_mm/attributes.h and
# ffi/quantized/attributes.h.


def _metadata_flags(form, meta) -> dict[str, Any]:
    return {"kind": form.kind, "swapped": form.swapped, "group_offset": len(meta) == 2}


def _epilogue_flags(epilogue: Epilogue) -> dict[str, Any]:
    return {
        "bias": epilogue.bias is not None,
        "activation": epilogue.activation or "",
        "row_scale": epilogue.row_scale is not None,
        "existing_out": epilogue.existing_out is not None,
    }


def _choice_flags(kernel, precision, planes: int, tile: int) -> dict[str, Any]:
    return {
        "kernel": kernel if kernel in _call.PLATFORMS else "",
        "tile": tile,
        "planes": planes,
        "tf32": _tf32(precision),
    }


def _quantized_flags(mode, bits, group_size, biases, global_scale) -> dict[str, Any]:
    return {
        "mode": mode,
        "bits": bits,
        "group_size": group_size,
        "layout": "linear",
        "biases": biases is not None,
        "global_scale": global_scale is not None,
    }


def _tf32(precision) -> bool:
    return precision == jax.lax.Precision.HIGH


def _product(target, a, b, rest, shape, out_dtype, flags: dict[str, Any], aliases=None):
    if 0 in (*shape, *a.shape, *b.shape, *rest[0].shape):
        return jnp.zeros(shape, out_dtype) if aliases is None else rest[-1]
    dtype = _reference.promoted(a.dtype, b.dtype)
    out = jax.ShapeDtypeStruct(shape, out_dtype)
    call = jax.ffi.ffi_call(target, out, input_output_aliases=aliases)
    return call(a.astype(dtype), b.astype(dtype), *rest, **_attributes(flags))


def _attributes(flags: dict[str, Any]) -> dict[str, Any]:
    """Attributes are hashed by value: one type per attribute, always."""

    def typed(value):
        if isinstance(value, dict):
            return _attributes(value)
        if isinstance(value, str):  # numpy's strings too
            return str(value)
        return np.bool_(value) if isinstance(value, bool) else np.int32(value)

    return {name: typed(value) for name, value in flags.items()}
