"""The custom calls of ``mm`` and ``wgrad``: operands, results, attributes and aliases."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import dtypes, segments
from .._kernels import choose, problems
from .planes import as_planes


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """Steps that a kernel of ``mm`` does to its float32 sums ``y`` before it rounds them::

        existing_out + row_scale * activation(y + bias[weight])

    Operands are (G, N), (T,) and the result's shape; None leaves a step out.
    """

    bias: Any = None
    activation: str | None = None
    row_scale: Any = None
    existing_out: Any = None


def mm_problem(platform, x, w, meta, *, form, rows, out_dtype, transpose_x=False, transpose_w=False,
               transpose_out=False, precision=None, implementation=None, epilogue=None,
               lists=False) -> problems.Mm:  # fmt: skip
    """``mm`` of these operands, as kernels see it; with an ``epilogue``, or lists of rows."""
    groups, k, n = (w.shape[i] for i in ((0, 2, 1) if transpose_w else (0, 1, 2)))
    epilogue = epilogue or Epilogue()
    options = [v for v in (epilogue.bias, epilogue.row_scale) if v is not None]
    existing = epilogue.existing_out
    return problems.Mm(
        op="mm", platform=platform, implementation=implementation,
        dtypes=(x.dtype.name, w.dtype.name), out_dtype=jnp.dtype(out_dtype).name,
        operand_dtype=dtypes.promoted(x.dtype, w.dtype).name, empty=0 in (*x.shape, *w.shape),
        rows=rows, groups=groups, k=k, n=n, segments=meta[0].shape[0], elements=x.size + w.size,
        ordered=form.ordered_y, transpose_x=transpose_x, transpose_w=transpose_w,
        transpose_out=transpose_out, tf32=precision == jax.lax.Precision.HIGH, lists=lists,
        gated=epilogue.activation in choose.GATED,
        option_dtypes=tuple(v.dtype.name for v in options),
        existing_dtype=None if existing is None else existing.dtype.name,
    )  # fmt: skip


def may_take_lists(x, w, implementation) -> bool:
    """Whether a kernel may be what runs ``mm`` with lists of rows of x, (A, M, K)."""
    rows = jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], x.shape[2]), x.dtype)
    problem = mm_problem(
        "cuda", rows, w, (jax.ShapeDtypeStruct(w.shape[:1], jnp.int32),), form=segments.SIZES,
        rows=rows.shape[0], out_dtype=x.dtype, lists=True,
    )  # fmt: skip
    return implementation in (None, "sm90") and choose.lists_sm90(problem) is None


def mm(choice: choose.Choice, x, w, *meta, form, rows, out_dtype, transpose_x, transpose_w,
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
    if choice.kernel.name == "cpu":
        assert epilogue is None
        assert not lists
        table = segments.decode(form, meta, rows_x, rows, w.shape[0])
        shape = (n, rows) if transpose_out else (rows, n)
        return _product("jgg_mm", x, w, [table], shape, out_dtype, flags)
    epilogue = epilogue or Epilogue()
    flags |= {
        "metadata": metadata_flags(form, meta),
        "rows": {"x_rows": x_rows is not None, "y_rows": y_rows is not None},
        "epilogue": epilogue_flags(epilogue),
        "choice": _choice_flags(choice, precision),
    }
    rest = [*segments.narrow(form, meta, rows_x, w.shape[0]), *lists]
    options = (epilogue.bias, epilogue.row_scale, epilogue.existing_out)
    rest += [value for value in options if value is not None]
    columns = n // 2 if epilogue.activation in choose.GATED else n
    shape = (columns, rows) if transpose_out else (rows, columns)
    planes = choice.config["planes"]
    if planes > 1:
        x, w = in_planes(planes, 64, (x, -1), (w, -1 if transpose_w else -2))
    # The result takes the place of existing_out: XLA copies it first where it is needed later.
    aliases = None if epilogue.existing_out is None else {1 + len(rest): 0}
    return _product("jgg_mm", x, w, rest, shape, out_dtype, flags, aliases)


def wgrad_problem(
    platform, x, y, meta, *, form, groups, out_dtype, transpose_x=False, transpose_y=False,
    precision=None, implementation=None,
) -> problems.Wgrad:  # fmt: skip
    """``wgrad`` of these operands, as kernels see it."""
    (_, a, b), (rows, _) = _wgrad_shape(x, y, groups, transpose_x, transpose_y)
    return problems.Wgrad(
        op="wgrad", platform=platform, implementation=implementation,
        dtypes=(x.dtype.name, y.dtype.name), out_dtype=jnp.dtype(out_dtype).name,
        operand_dtype=dtypes.promoted(x.dtype, y.dtype).name, rows=rows, groups=groups, a=a, b=b,
        kind=form.kind, segments=meta[0].shape[0], elements=x.size + y.size,
        own_weight=form.own_weight, whole=len(meta) > 1, transpose_x=transpose_x,
        transpose_y=transpose_y, tf32=precision == jax.lax.Precision.HIGH,
    )  # fmt: skip


def wgrad(choice: choose.Choice, x, y, *meta, form, groups, out_dtype, transpose_x, transpose_y,
          precision, scale=None, existing_out=None):  # fmt: skip
    """Custom call ``jgg_wgrad``: x, y, metadata[, group_offset][, scale][, existing_out] -> out.

    "sm90" also does ``out[g] = scale[g] * sums[g] + existing_out[g]``, of matrices that it takes
    whole; one whose segment is empty keeps existing_out.
    """
    shape, rows = _wgrad_shape(x, y, groups, transpose_x, transpose_y)
    flags: dict[str, Any] = {"wgrad": {"transpose_x": transpose_x, "transpose_y": transpose_y}}
    options = [value for value in (scale, existing_out) if value is not None]
    if choice.kernel.name == "cpu":
        assert not options
        rest = [segments.decode(form, meta, *rows, groups)]
        return _product("jgg_wgrad", x, y, rest, shape, out_dtype, flags)
    parts = choice.config["parts"]
    if parts > 1:
        assert not options
        spans = segments.pieces(segments.decode(form, meta, *rows, groups), parts)
        same: dict[str, Any] = {
            "form": segments.SPANS, "groups": groups * parts, "out_dtype": jnp.float32,
            "transpose_x": transpose_x, "transpose_y": transpose_y, "precision": precision,
        }  # fmt: skip
        problem = wgrad_problem("cuda", x, y, (spans,), **same, implementation=choice.named)
        out = wgrad(choose.configured(choice.kernel, problem), x, y, spans, **same)
        return out.reshape(groups, parts, *shape[1:]).sum(1).astype(out_dtype)
    planes = choice.config["planes"]
    flags |= {
        "metadata": metadata_flags(form, meta),
        "own_weight": form.own_weight,
        "epilogue": {"scale": scale is not None, "existing_out": existing_out is not None},
        "choice": _choice_flags(choice, precision),
    }
    rest = [*segments.narrow(form, meta, rows[0], groups), *options]
    if planes > 1:
        axes = (-1 if transpose else None for transpose in (transpose_x, transpose_y))
        x, y = in_planes(planes, 8, *zip((x, y), axes, strict=True))
    aliases = None if existing_out is None else {1 + len(rest): 0}
    return _product("jgg_wgrad", x, y, rest, shape, out_dtype, flags, aliases)


def _wgrad_shape(x, y, groups: int, transpose_x: bool, transpose_y: bool):
    """That of the result, and the rows of either operand."""
    (a, x_rows), (b, y_rows) = (
        (v.shape if transpose else v.shape[::-1])
        for v, transpose in ((x, transpose_x), (y, transpose_y))
    )
    return (groups, a, b), (x_rows, y_rows)


def in_planes(count: int, multiple: int, first, second):
    """Custom call ``jgg_planes``: ``as_planes`` of two (operand, axis) at once."""
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


# Dictionaries of attributes that handlers share: ffi/grouped_mm/attributes.h.


def metadata_flags(form, meta) -> dict[str, Any]:
    return {"kind": form.kind, "swapped": form.swapped, "group_offset": len(meta) == 2}


def epilogue_flags(epilogue: Epilogue) -> dict[str, Any]:
    return {
        "bias": epilogue.bias is not None,
        "activation": epilogue.activation or "",
        "row_scale": epilogue.row_scale is not None,
        "existing_out": epilogue.existing_out is not None,
    }


def _choice_flags(choice: choose.Choice, precision) -> dict[str, Any]:
    return {
        "kernel": choice.named or "",
        "tile": choice.config["tile"],
        "planes": choice.config["planes"],
        "tf32": tf32(precision),
    }


def tf32(precision) -> bool:
    return precision == jax.lax.Precision.HIGH


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
        if isinstance(value, dict):
            return attributes(value)
        if isinstance(value, str):  # numpy's strings too
            return str(value)
        return np.bool_(value) if isinstance(value, bool) else np.int32(value)

    return {name: typed(value) for name, value in flags.items()}
