"""The custom calls: operands, results, attributes and aliases of each handler."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import dtypes, segments
from .._kernels import choose, extension, tuned
from .planes import as_planes


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
        "transpose_x": transpose_x,
        "transpose_w": transpose_w,
        "transpose_out": transpose_out,
    }
    if implementation == "cpu":
        assert epilogue is None
        assert not lists
        table = segments.decode(form, meta, rows_x, rows, w.shape[0])
        shape = (n, rows) if transpose_out else (rows, n)
        return _product(
            "jgg_mm", x, w, [table], shape, out_dtype, flags | {"ordered": form.ordered_y}
        )
    epilogue = epilogue or Epilogue()
    flags |= metadata_flags(implementation, form, meta, precision) | {
        "in_order": form.ordered_y,
        "bias": epilogue.bias is not None,
        "activation": epilogue.activation or "",
        "row_scale": epilogue.row_scale is not None,
        "existing_out": epilogue.existing_out is not None,
        "x_rows": x_rows is not None,
        "y_rows": y_rows is not None,
    }
    rest = [*segments.narrow(form, meta, rows_x, w.shape[0]), *lists]
    options = (epilogue.bias, epilogue.row_scale, epilogue.existing_out)
    rest += [value for value in options if value is not None]
    gated = epilogue.activation in ("swiglu", "geglu")
    columns = n // 2 if gated else n
    shape = (columns, rows) if transpose_out else (rows, columns)
    mean_rows = rows / max(rest[0].shape[0], 1)
    tile = 0 if lists else tuned.mm(x, w, mean_rows, out_dtype, transpose_w, gated)
    whole = gated or transpose_x or transpose_out
    planes = 1 if whole else mm_planes(implementation, x, w, form, rows, transpose_w, precision)
    if planes > 1:
        x, w = in_planes(planes, 64, (x, -1), (w, -1 if transpose_w else -2))
    flags |= {"planes": planes, "tile": tile}
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
    flags: dict[str, Any] = {"transpose_x": transpose_x, "transpose_y": transpose_y}
    options = [value for value in (scale, existing_out) if value is not None]
    parts = 1 if implementation == "cpu" else _parts(form, meta, groups, rows[0], shape)
    if parts > 1:
        assert not options
        spans = segments.pieces(segments.decode(form, meta, *rows, groups), parts)
        out = wgrad(implementation, x, y, spans, form=segments.SPANS, groups=groups * parts,
                    out_dtype=jnp.float32, transpose_x=transpose_x, transpose_y=transpose_y,
                    precision=precision)  # fmt: skip
        return out.reshape(groups, parts, *shape[1:]).sum(1).astype(out_dtype)
    if implementation == "cpu":
        assert not options
        rest = [segments.decode(form, meta, *rows, groups)]
    else:
        rest = segments.narrow(form, meta, rows[0], groups)
        flags |= metadata_flags(implementation, form, meta, precision) | {
            "own_weight": form.own_weight,
            "scale": scale is not None,
            "existing_out": existing_out is not None,
        }
        mean_rows = rows[0] / max(rest[0].shape[0], 1)
        tile = tuned.wgrad(x, y, mean_rows, out_dtype, shape, transpose_x, transpose_y)
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
        flags |= {"planes": planes, "tile": tile}
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
    if dtypes.promoted(a.dtype, b.dtype) != jnp.float32 or not runs:
        return 1
    capabilities = extension.live_capabilities()
    two = precision == jax.lax.Precision.HIGH
    if implementation != "sm90":
        hopper = bool(capabilities) and all(capability == 90 for capability in capabilities)
        # Two planes are no faster than tf32 on "sm80".
        if implementation == "sm80" or two or not (hopper and pays):
            return 1
    if capabilities and "90a" not in extension.BUILD.architectures:
        return 1
    return 2 if two else 3


def in_planes(count: int, multiple: int, first, second):
    """Custom call ``jgg_planes``: ``_split.planes`` of two (operand, axis) at once."""
    planes = lambda: [as_planes(a, count, multiple, axis) for a, axis in (first, second)]
    arrays = first[0], second[0]
    if any(0 in a.shape for a in arrays):
        return planes()
    whole = [a.astype(jnp.float32).reshape(-1, *a.shape[-2:]) for a in arrays]
    shapes = [p.shape for p in jax.eval_shape(planes)]
    results = [
        jax.ShapeDtypeStruct((a.shape[0], *shape[-3:]), jnp.bfloat16)
        for a, shape in zip(whole, shapes, strict=True)
    ]
    out = jax.ffi.ffi_call("jgg_planes", results)(*whole, **attributes({"planes": count}))
    return [p.reshape(shape) for p, shape in zip(out, shapes, strict=True)]


def _splitting_pays(multiplications: int, elements: int, few: bool = False) -> bool:
    """Whether three planes are faster than float32 arithmetic. An H200 does 21e12 multiplications a
    second in float32, or 10e12 where tiles are few; 40e12 in planes, 2.5 ps to make those of an
    element, and 5 us are a fit that chooses the faster in the cases measured
    (docs/kernel_log.md)."""
    planes = multiplications / 40e12 + 2.5e-12 * elements + 5e-6
    return planes < multiplications / (10e12 if few else 21e12)


def metadata_flags(kernel, form, meta, precision) -> dict[str, Any]:
    return {
        "tf32": precision == jax.lax.Precision.HIGH,
        "kernel": kernel if kernel in choose.PLATFORMS else "",
        "kind": form.kind,
        "swapped": form.swapped,
        "group_offset": len(meta) == 2,
    }


def _product(target, a, b, rest, shape, out_dtype, flags: dict[str, Any], aliases=None):
    if 0 in (*shape, *a.shape, *b.shape, *rest[0].shape):
        return jnp.zeros(shape, out_dtype) if aliases is None else rest[-1]
    dtype = dtypes.promoted(a.dtype, b.dtype)
    out = jax.ShapeDtypeStruct(shape, out_dtype)
    call = jax.ffi.ffi_call(target, out, input_output_aliases=aliases)
    return call(a.astype(dtype), b.astype(dtype), *rest, **attributes(flags))


def attributes(flags: dict[str, Any]) -> dict[str, Any]:
    """Attributes are hashed by value: one type per attribute, always."""

    def typed(value):
        if isinstance(value, str):  # numpy's strings too
            return str(value)
        return np.bool_(value) if isinstance(value, bool) else np.int32(value)

    return {name: typed(value) for name, value in flags.items()}
