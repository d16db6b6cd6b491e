"""The custom calls of ``mm`` and ``wgrad``: operands, results, attributes and aliases."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import dtypes, segments
from .._core.products import Mm, Product, Wgrad
from .._core.segments import Metadata
from .._kernels import choose, dense, extension, problems
from .activations import is_gated
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
        return is_gated(self.activation)

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
            "bias": self.bias is not None,
            "rounds": self.rounds,
            "preactivation": self.rounds,
            "more_options": self.row_scale is not None or self.existing_out is not None,
        }


NO_EPILOGUE = Epilogue()


def mm_problem(
    platform, x, w, metadata: Metadata, product: Mm, epilogue: Epilogue = NO_EPILOGUE, *,
    lists: bool = False, x_list_alone: bool = False, y_list: bool = False,
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
        elements=x.size + w.size, in_order=metadata.form.ordered_y,
        transpose_x=product.transpose_x, transpose_w=product.transpose_w,
        transpose_out=product.transpose_out, tf32=product.tf32, lists=lists,
        x_list_alone=x_list_alone, y_list=y_list,
        existing_dtype=None if existing is None else existing.dtype.name, **facts,
    )  # fmt: skip


def may_take_lists(x, w, product: Mm) -> bool:
    """Whether a kernel may be what runs ``mm`` with lists of rows of x, (A, M, K)."""
    rows = jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], x.shape[2]), x.dtype)
    metadata = segments.sizes(jax.ShapeDtypeStruct(w.shape[:1], jnp.int32))
    problem = mm_problem("cuda", rows, w, metadata, product, lists=True)
    return product.implementation in (None, "sm90") and dense.lists_sm90(problem) is None


def mm(plan: choose.Plan, x, w, metadata: Metadata, product: Mm,
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
    if plan.config.get("sum_parts", 1) > 1:
        assert epilogue.nothing
        assert not lists
        return _mm_in_parts(plan, x, w, metadata, product)
    flags["rows"] = {"x_rows": x_rows is not None, "y_rows": y_rows is not None}
    if plan.kernel.name == "cpu":
        assert epilogue.nothing
        table = metadata.decode(rows_x, rows, groups)
        shape = (n, rows) if product.transpose_out else (rows, n)
        return _call("jgg_mm", x, w, [table, *lists], shape, product, flags)
    flags |= {
        "metadata": metadata_flags(metadata),
        "epilogue": epilogue_flags(epilogue, preactivation),
        "plan": _plan_flags(plan, product),
    }
    rest = [*metadata.narrow(rows_x, groups), *lists, *epilogue.arrays]
    columns = n // 2 if epilogue.gated else n
    shape = (columns, rows) if product.transpose_out else (rows, columns)
    planes = plan.config["planes"]
    if planes > 1:
        x, w = in_planes(planes, 64, (x, -1), (w, -1 if product.transpose_w else -2))
    # The result takes the place of existing_out: XLA copies it first where it is needed later.
    aliases = None if epilogue.existing_out is None else {1 + len(rest): 0}
    if plan.kernel.name == "sm100":
        more = [_workspace(groups, metadata)]
        return _call("jgg_mm", x, w, rest, shape, product, flags, aliases, more)[0]
    more = [jax.ShapeDtypeStruct((rows, n), product.out_dtype)] if preactivation else []
    return _call("jgg_mm", x, w, rest, shape, product, flags, aliases, more)


def _workspace(groups: int, metadata: Metadata) -> jax.ShapeDtypeStruct:
    """That of a Blackwell kernel."""
    size = extension.rules().sm100_workspace(weights=groups, count=metadata.count)
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def _mm_in_parts(plan: choose.Plan, x, w, metadata: Metadata, product: Mm):
    axis_x, axis_w = 0 if product.transpose_x else 1, 2 if product.transpose_w else 1

    def run(begin: int, end: int):
        a, b = (lax.slice_in_dim(v, begin, end, axis=i) for v, i in ((x, axis_x), (w, axis_w)))
        problem = mm_problem("cuda", a, b, metadata, summed)
        return mm(choose.configured(plan.kernel, problem), a, b, metadata, summed)

    summed = product.replace(out_dtype=jnp.float32)
    return sum_of_parts(run, x.shape[axis_x], plan, product)


def sum_of_parts(run, k: int, plan: choose.Plan, product: Mm) -> jax.Array:
    """Sums over parts of K, added up in float32: ``run(begin, end)`` is a product of some of it."""
    step = -(-k // plan.config["sum_parts"])
    step += -step % 512  # whole lines of 16 bytes, words and quantization groups
    sums = [run(begin, min(begin + step, k)) for begin in range(0, k, step)]
    return functools.reduce(jnp.add, sums).astype(product.out_dtype)


def wgrad_problem(platform, x, y, metadata: Metadata, product: Wgrad, *, x_list: bool = False,
                  y_list: bool = False) -> problems.Wgrad:  # fmt: skip
    """``wgrad`` of these operands, as kernels see it; rows of one of them may come by list."""
    groups, a, b = product.out_shape(x, y)
    all_rows = product.rows(x, y)
    rows = all_rows[1 if x_list else 0]
    longest = rows if x_list or y_list else all_rows[_range_column(all_rows, metadata)]
    return problems.Wgrad(
        op="wgrad", platform=platform, implementation=product.implementation,
        dtypes=(x.dtype.name, y.dtype.name), out_dtype=product.out_dtype.name,
        operand_dtype=dtypes.promoted(x.dtype, y.dtype).name, rows=rows, longest=longest,
        x_list=x_list, y_list=y_list,
        groups=groups, a=a, b=b, kind=metadata.form.kind, segments=metadata.count,
        elements=x.size + y.size, own_weight=metadata.form.own_weight,
        whole=metadata.group_offset is not None, tf32=product.tf32,
        # One row lies as one column does.
        transpose_x=product.transpose_x and all_rows[0] != 1,
        transpose_y=product.transpose_y and all_rows[1] != 1,
    )  # fmt: skip


def wgrad(plan: choose.Plan, x, y, metadata: Metadata, product: Wgrad, *, x_rows=None,
          y_rows=None, scale=None, existing_out=None):  # fmt: skip
    """Custom call ``jgg_wgrad``: x, y, metadata[, group_offset][, list][, scale][, existing_out] ->
    out.

    With a list of rows, int32 (T,), row t of that operand is its row ``list[t]``, or zeros. Long
    sums are several calls, of ranges of rows.

    "sm90" also does ``out[g] = scale[g] * sums[g] + existing_out[g]``, of matrices that it takes
    whole; one whose segment is empty keeps existing_out.
    """
    rows: tuple[int, int] = product.rows(x, y)
    shape, groups = product.out_shape(x, y), product.groups
    options: dict[str, Any] = {
        "x_rows": x_rows, "y_rows": y_rows, "scale": scale, "existing_out": existing_out,
    }  # fmt: skip
    given = [name for name, value in options.items() if value is not None]
    named = x_rows if y_rows is None else y_rows
    if named is not None:
        length: int = named.shape[0]
        rows = length, length
    if plan.kernel.name == "cpu":
        assert scale is None
        assert existing_out is None
        rest = [metadata.decode(*rows, groups), *(options[name] for name in given)]
        flags = _wgrad_flags(product) | {"rows": _given(options, "x_rows", "y_rows")}
        return _call("jgg_wgrad", x, y, rest, shape, product, flags)
    config, tables = plan.config, []
    if config["ranges"] > 1 or config["parts"] > 1:
        column, table = _range_column(rows, metadata), metadata.decode(*rows, groups)
        tables = _tables_of_ranges(table, column, rows[column], config["ranges"])
    if config["parts"] > 1:
        assert not given
        spans = [segments.pieces(table, config["parts"]) for table in tables]
        spans = Metadata(segments.SPANS, jnp.concatenate(spans))
        of_parts = product.replace(groups=spans.count, out_dtype=jnp.float32)
        problem = dataclasses.replace(wgrad_problem("cuda", x, y, spans, of_parts), longest=0)
        out = wgrad(choose.configured(plan.kernel, problem), x, y, spans, of_parts)
        sums = out.reshape(len(tables), groups, config["parts"], *shape[1:]).sum((0, 2))
        return sums.astype(product.out_dtype)
    if config["planes"] > 1:
        transposes = product.transpose_x, product.transpose_y
        axes = (-1 if transpose else None for transpose in transposes)
        x, y = in_planes(config["planes"], 8, *zip((x, y), axes, strict=True))
    call = functools.partial(_wgrad_call, plan, x, y, shape=shape, rows=rows[0])
    if not tables:
        return call(metadata, product, **options)
    assert not {"x_rows", "y_rows"} & {*given}
    return _sum_of_ranges(call, tables, metadata, product, config["adds"], scale, existing_out)


def _wgrad_call(plan, x, y, metadata: Metadata, product: Wgrad, *, shape, rows: int,
                **options):  # fmt: skip
    """One call, of operands in planes if the kernel takes them so; ``shape`` is the result's."""
    flags = _wgrad_flags(product) | {
        "metadata": metadata_flags(metadata),
        "own_weight": metadata.form.own_weight,
        "rows": _given(options, "x_rows", "y_rows"),
        "epilogue": _given(options, "scale", "existing_out"),
        "plan": _plan_flags(plan, product),
    }
    values = [value for value in options.values() if value is not None]
    rest = [*metadata.narrow(rows, shape[0]), *values]
    if plan.kernel.name == "sm100":
        more = [_workspace(shape[0], metadata)]
        return _call("jgg_wgrad", x, y, rest, shape, product, flags, more=more)[0]
    aliases = None if options.get("existing_out") is None else {1 + len(rest): 0}
    return _call("jgg_wgrad", x, y, rest, shape, product, flags, aliases)


def _given(options: dict[str, Any], *names: str) -> dict[str, bool]:
    return {name: options.get(name) is not None for name in names}


def _wgrad_flags(product: Wgrad) -> dict[str, Any]:
    return {"wgrad": {"transpose_x": product.transpose_x, "transpose_y": product.transpose_y}}


def _range_column(rows: tuple[int, int], metadata: Metadata) -> int:
    """The operand by whose rows long sums are divided: as many of them as a matrix may sum over.
    A segment is as long as the shorter operand at most, and several of one matrix, where they do
    not overlap, as long as the longer one."""
    return rows.index(min(rows) if metadata.form.own_weight else max(rows))


def _tables_of_ranges(table, column: int, rows: int, count: int) -> list[jax.Array]:
    """The segments of each of ``count`` ranges of an operand's rows. Operands stay whole: a slice
    in front of a custom call is a copy."""
    if count == 1:
        return [table]
    step = -(-rows // count)
    step += -step % 64  # whole slices
    cuts = [min(i * step, rows) for i in range(count + 1)]
    return [segments.within(table, column, *ends) for ends in itertools.pairwise(cuts)]


def _sum_of_ranges(call, tables, metadata: Metadata, product: Wgrad, adds: bool, scale,
                   existing_out):  # fmt: skip
    """Sums over ranges of rows, added up in float32; by the kernel, where it can, which passes over
    matrices that a range has no rows of."""
    assert adds or (scale is None and existing_out is None)
    summed = product.replace(out_dtype=jnp.float32)
    form, out = metadata.form, existing_out
    for table in tables:
        if form.kind == "segments":
            part = Metadata(dataclasses.replace(form, swapped=False), table)
        else:
            first, length = table[:, segments.X_START], table[:, segments.LENGTH]
            part = Metadata(segments.SPANS, jnp.stack([first, first + length], axis=1))
        # A matrix without rows here may have a scale that is not finite.
        here = None if scale is None else jnp.where(table[:, segments.LENGTH] > 0, scale, 0)
        sums = call(part, summed, scale=here, existing_out=out if adds else None)
        out = sums if adds or out is None else out + sums
    assert out is not None
    return out.astype(product.out_dtype)


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
        "clears_rest": product.clears_rest,
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


def _plan_flags(plan: choose.Plan, product: Product) -> dict[str, Any]:
    config = plan.config
    parts = {name: config[name] for name in ("rows", "tile", "pairs", "planes")}
    # Blackwell's kernel has a workspace, which others lack.
    kernel = plan.kernel.name if plan.kernel.name == "sm100" else plan.named or ""
    return parts | {"kernel": kernel, "tf32": product.tf32}


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
