"""The custom calls of ``mm`` and ``wgrad``: operands, results, attributes and aliases."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import dtypes, segments
from .._core.products import Mm, Product, Wgrad
from .._core.segments import Metadata
from .._kernels import choose, problems
from .activations import GATED_ACTIVATIONS
from .planes import as_planes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("bias", "row_scale", "existing_out"),
    meta_fields=("activation", "rounds"),
)
@dataclasses.dataclass(frozen=True)
class Epilogue:
    """Steps that a kernel of ``mm`` does to its float32 sums ``y`` before it rounds them::

        existing_out + row_scale * activation(y + bias[weight])

    Operands are (G, N), (T,) and the result's shape; None leaves a step out. With ``rounds`` the
    activation is of ``y + bias`` rounded to the result's dtype.
    """

    bias: Any = None
    activation: str | None = None
    row_scale: Any = None
    existing_out: Any = None
    rounds: bool = False

    @property
    def gated(self) -> bool:
        return self.activation in GATED_ACTIVATIONS

    @property
    def arrays(self) -> list:
        """In the order in which kernels take them."""
        return [v for v in (self.bias, self.row_scale, self.existing_out) if v is not None]

    @property
    def nothing(self) -> bool:
        return self.activation is None and not self.arrays

    def facts(self) -> dict[str, Any]:
        """Fields of a problem."""
        options = [v for v in (self.bias, self.row_scale) if v is not None]
        return {
            "gated": self.gated,
            "activation": self.activation,
            "option_dtypes": tuple(v.dtype.name for v in options),
            "preactivation": self.rounds,
            "more_options": self.row_scale is not None or self.existing_out is not None,
        }


NO_EPILOGUE = Epilogue()


def mm_problem(
    platform, x, w, metadata: Metadata, product: Mm, epilogue: Epilogue = NO_EPILOGUE, *,
    lists: bool = False, x_list_alone: bool = False,
) -> problems.Mm:  # fmt: skip
    """``mm`` of these operands, as kernels see it; with an ``epilogue``, or lists of rows."""
    groups, k, n = product.sizes(w)
    existing, facts = epilogue.existing_out, epilogue.facts()
    facts["more_options"] |= lists and epilogue.bias is not None
    return problems.Mm(
        op="mm", platform=platform, implementation=product.implementation,
        dtypes=(x.dtype.name, w.dtype.name), out_dtype=product.out_dtype.name,
        operand_dtype=dtypes.promoted(x.dtype, w.dtype).name, empty=0 in (*x.shape, *w.shape),
        rows=product.rows, groups=groups, k=k, n=n, segments=metadata.count,
        elements=x.size + w.size, ordered=metadata.form.ordered_y,
        transpose_x=product.transpose_x, transpose_w=product.transpose_w,
        transpose_out=product.transpose_out, tf32=product.tf32, lists=lists,
        x_list_alone=x_list_alone,
        existing_dtype=None if existing is None else existing.dtype.name, **facts,
    )  # fmt: skip


def may_take_lists(x, w, product: Mm) -> bool:
    """Whether a kernel may be what runs ``mm`` with lists of rows of x, (A, M, K)."""
    rows = jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], x.shape[2]), x.dtype)
    metadata = segments.sizes(jax.ShapeDtypeStruct(w.shape[:1], jnp.int32))
    problem = mm_problem("cuda", rows, w, metadata, product, lists=True)
    return product.implementation in (None, "sm90") and choose.lists_sm90(problem) is None


def mm(choice: choose.Choice, x, w, metadata: Metadata, product: Mm,
       epilogue: Epilogue = NO_EPILOGUE, *, x_rows=None, y_rows=None,
       preactivation: bool = False):  # fmt: skip
    """Custom call ``jgg_mm``: x, w, metadata[, lists][, options] -> out[, preactivation].

    With lists of rows, int32 (T,), row t of x is its row ``x_rows[t]`` (zeros where it has none),
    and row t of the result its row ``y_rows[t]``, a permutation.
    """
    rows, (groups, _, n) = product.rows, product.sizes(w)
    lists = [rows for rows in (x_rows, y_rows) if rows is not None]
    rows_x = product.rows_x(x) if x_rows is None else x_rows.shape[0]
    flags: dict[str, Any] = {"mm": mm_flags(metadata, product)}
    if choice.config.get("sum_parts", 1) > 1:
        assert epilogue.nothing
        assert not lists
        return _mm_in_parts(choice, x, w, metadata, product)
    if choice.kernel.name == "cpu":
        assert epilogue.nothing
        assert not lists
        table = metadata.decode(rows_x, rows, groups)
        return _call("jgg_mm", x, w, [table], product.out_shape(x, w), product, flags)
    flags |= {
        "metadata": metadata_flags(metadata),
        "rows": {"x_rows": x_rows is not None, "y_rows": y_rows is not None},
        "epilogue": epilogue_flags(epilogue, preactivation),
        "choice": _choice_flags(choice, product),
    }
    rest = [*metadata.narrow(rows_x, groups), *lists, *epilogue.arrays]
    columns = n // 2 if epilogue.gated else n
    shape = (columns, rows) if product.transpose_out else (rows, columns)
    planes = choice.config["planes"]
    if planes > 1:
        x, w = in_planes(planes, 64, (x, -1), (w, -1 if product.transpose_w else -2))
    # The result takes the place of existing_out: XLA copies it first where it is needed later.
    aliases = None if epilogue.existing_out is None else {1 + len(rest): 0}
    more = [jax.ShapeDtypeStruct((rows, n), product.out_dtype)] if preactivation else []
    return _call("jgg_mm", x, w, rest, shape, product, flags, aliases, more)


def _mm_in_parts(choice: choose.Choice, x, w, metadata: Metadata, product: Mm):
    axis_x, axis_w = 0 if product.transpose_x else 1, 2 if product.transpose_w else 1

    def run(begin: int, end: int):
        a, b = (lax.slice_in_dim(v, begin, end, axis=i) for v, i in ((x, axis_x), (w, axis_w)))
        problem = mm_problem("cuda", a, b, metadata, summed)
        return mm(choose.configured(choice.kernel, problem), a, b, metadata, summed)

    summed = product.replace(out_dtype=jnp.float32)
    return sum_of_parts(run, x.shape[axis_x], choice, product)


def sum_of_parts(run, k: int, choice: choose.Choice, product: Mm) -> jax.Array:
    """Sums over parts of K, added up in float32: ``run(begin, end)`` is a product of some of it."""
    step = -(-k // choice.config["sum_parts"])
    step += -step % 512  # whole lines of 16 bytes, words and quantization groups
    sums = [run(begin, min(begin + step, k)) for begin in range(0, k, step)]
    return functools.reduce(jnp.add, sums).astype(product.out_dtype)


def wgrad_problem(platform, x, y, metadata: Metadata, product: Wgrad, *, x_list: bool = False,
                  y_list: bool = False) -> problems.Wgrad:  # fmt: skip
    """``wgrad`` of these operands, as kernels see it; rows of one of them may come by list."""
    groups, a, b = product.out_shape(x, y)
    rows = product.rows(x, y)[1 if x_list else 0]
    return problems.Wgrad(
        op="wgrad", platform=platform, implementation=product.implementation,
        dtypes=(x.dtype.name, y.dtype.name), out_dtype=product.out_dtype.name,
        operand_dtype=dtypes.promoted(x.dtype, y.dtype).name, rows=rows,
        x_list=x_list, y_list=y_list,
        groups=groups, a=a, b=b, kind=metadata.form.kind, segments=metadata.count,
        elements=x.size + y.size, own_weight=metadata.form.own_weight,
        whole=metadata.group_offset is not None, transpose_x=product.transpose_x,
        transpose_y=product.transpose_y, tf32=product.tf32,
    )  # fmt: skip


def wgrad(choice: choose.Choice, x, y, metadata: Metadata, product: Wgrad, *, x_rows=None,
          y_rows=None, scale=None, existing_out=None):  # fmt: skip
    """Custom call ``jgg_wgrad``: x, y, metadata[, group_offset][, list][, scale][, existing_out] ->
    out.

    With a list of rows, int32 (T,), row t of that operand is its row ``list[t]``, or zeros.

    "sm90" also does ``out[g] = scale[g] * sums[g] + existing_out[g]``, of matrices that it takes
    whole; one whose segment is empty keeps existing_out.
    """
    shape, rows, groups = product.out_shape(x, y), product.rows(x, y), product.groups
    transposes = {"transpose_x": product.transpose_x, "transpose_y": product.transpose_y}
    flags: dict[str, Any] = {"wgrad": transposes}
    options = [value for value in (x_rows, y_rows, scale, existing_out) if value is not None]
    if x_rows is not None or y_rows is not None:
        rows = 2 * (x_rows if y_rows is None else y_rows).shape
    if choice.kernel.name == "cpu":
        assert not options
        rest = [metadata.decode(*rows, groups)]
        return _call("jgg_wgrad", x, y, rest, shape, product, flags)
    parts = choice.config["parts"]
    if parts > 1:
        assert not options
        spans = segments.pieces(metadata.decode(*rows, groups), parts)
        spans = Metadata(segments.SPANS, spans)
        of_parts = product.replace(groups=groups * parts, out_dtype=jnp.float32)
        problem = wgrad_problem("cuda", x, y, spans, of_parts)
        out = wgrad(choose.configured(choice.kernel, problem), x, y, spans, of_parts)
        return out.reshape(groups, parts, *shape[1:]).sum(1).astype(product.out_dtype)
    planes = choice.config["planes"]
    flags |= {
        "metadata": metadata_flags(metadata),
        "own_weight": metadata.form.own_weight,
        "rows": {"x_rows": x_rows is not None, "y_rows": y_rows is not None},
        "epilogue": {"scale": scale is not None, "existing_out": existing_out is not None},
        "choice": _choice_flags(choice, product),
    }
    rest = [*metadata.narrow(rows[0], groups), *options]
    if planes > 1:
        axes = (-1 if transpose else None for transpose in transposes.values())
        x, y = in_planes(planes, 8, *zip((x, y), axes, strict=True))
    aliases = None if existing_out is None else {1 + len(rest): 0}
    return _call("jgg_wgrad", x, y, rest, shape, product, flags, aliases)


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


def mm_flags(metadata: Metadata, product: Mm) -> dict[str, Any]:
    return {
        "transpose_x": product.transpose_x,
        "transpose_w": product.transpose_w,
        "transpose_out": product.transpose_out,
        "in_order": metadata.form.ordered_y,
    }


def metadata_flags(metadata: Metadata) -> dict[str, Any]:
    return {
        "kind": metadata.form.kind,
        "swapped": metadata.form.swapped,
        "group_offset": metadata.group_offset is not None,
    }


def epilogue_flags(epilogue: Epilogue, preactivation: bool = False) -> dict[str, Any]:
    return {
        "bias": epilogue.bias is not None,
        "activation": epilogue.activation or "",
        "row_scale": epilogue.row_scale is not None,
        "existing_out": epilogue.existing_out is not None,
        "preactivation": preactivation,
        "rounds_preactivation": epilogue.rounds,
    }


def _choice_flags(choice: choose.Choice, product: Product) -> dict[str, Any]:
    return {
        "kernel": choice.named or "",
        "tile": choice.config["tile"],
        "planes": choice.config["planes"],
        "tf32": product.tf32,
    }


def _call(target, a, b, rest, shape, product: Product, flags: dict[str, Any], aliases=None,
          more=()) -> Any:  # fmt: skip
    """The result; with ``more`` results all of them."""
    if 0 in (*shape, *a.shape, *b.shape, *rest[0].shape):
        assert not more
        return jnp.zeros(shape, product.out_dtype) if aliases is None else rest[-1]
    dtype = dtypes.promoted(a.dtype, b.dtype)
    out = jax.ShapeDtypeStruct(shape, product.out_dtype)
    results = [out, *more] if more else out
    call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
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
