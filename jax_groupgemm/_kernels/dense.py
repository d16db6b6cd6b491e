"""Which kernels can run products of full precision, which pay, and how they run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from . import extension, tuned
from .problems import FLOATS, HALVES, Mm, Qmm, Wgrad

ALL_FLOATS = ", ".join(FLOATS)

# Thresholds, measured: docs/lab has the tables.

# gather_mm and gather_qmm: products of fewer rows than the first, if all together have more than
# the second, are sorted by matrix, so that a matrix is read once. The others come as they are.
# A quantized matrix is dequantized anew for each product that comes as it is.
SORT_BELOW_ROWS = {"mm": (32, 0), "qmm": (128, 8)}
# Rows per matrix up to which the kernel that takes lists of rows is faster than a permuted copy of
# x and the kernel that takes boxes of rows. On an H200, 128 matrices of 2048 x 1536: 4 rows each
# 208 and 214 us, 32 rows 249 and 278, 256 rows 581 and 576; 8 of 4096 x 4096: 16 rows 80 and 86,
# 128 rows 124 and 118, 1024 rows 654 and 552.
_LISTS_UP_TO_ROWS = 64
# K up to which one sum is as good as a result of this dtype deserves. Tensor cores cut sums off, by
# 4.3e-9 of the products' absolute sum for each k; sums by FMA are rounded to nearest.
_LONGEST_SUM = {"float32": 2**14, "float16": 2**15, "bfloat16": 2**17}
_LONGEST_FMA_SUM = 2**16
# Rows up to which one sum is one matrix of a weight gradient; of more, float32 sums over ranges of
# rows are added up. How many rows a matrix has is data, so a limit is what all calls of more rows
# pay for, of many short segments too: a launch, and a matrix cut in two. Beside the products of
# 2**20 rows that is nothing. Without a limit an error would grow on: by 4.3e-9 a row, or faster
# where float32 sums are rounded (2e-4 after 2**20, where a number is 2**-20 of the sum).
_LONGEST_SEGMENT = 2**20


# ---- mm ----------------------------------------------------------------------------------------


def lists_sm90(p: Mm) -> str | None:
    """Why Hopper's kernel does not take lists of rows."""
    if extension.BUILD.problem is not None:
        return extension.BUILD.problem
    if len(set(p.dtypes)) != 1 or p.dtypes[0] not in HALVES:
        return f"operands must be {' or '.join(HALVES)} alike"
    if p.empty:
        return "an operand is empty"
    return mm_sm90(p)


def mm_sm90(p: Mm, **more) -> str | None:
    """Why the handler would leave the call to the generic kernel."""
    return extension.rules().mm_sm90_problem(
        **({"k": p.k, "n": p.n, "gated": p.gated, "by_list": p.lists} | more),
        preactivation=p.preactivation, more_options=p.more_options,
        same_dtype=p.out_dtype == p.operand_dtype, transpose_x=p.transpose_x,
        transpose_w=p.transpose_w, transpose_out=p.transpose_out, in_order=p.in_order,
    )  # fmt: skip


def mm_sm100(p: Mm) -> str | None:
    """Why Blackwell's kernel does not run the product itself."""
    return _operands_sm100(p) or extension.rules().mm_sm100_problem(
        k=p.k, n=p.n, transpose_x=p.transpose_x, transpose_out=p.transpose_out,
        in_order=p.in_order,
    )  # fmt: skip


def _operands_sm100(p: Mm | Wgrad) -> str | None:
    if len(set(p.dtypes)) != 1 or p.dtypes[0] not in HALVES:
        return f"operands must be {' or '.join(HALVES)} alike"
    if p.out_dtype not in (p.dtypes[0], "float32"):
        return f"the result is {p.out_dtype}, neither that nor float32"
    return "an operand is empty" if p.empty or 0 in (p.groups, p.segments) else None


def mm_fuses_sm100(p: Mm) -> str | None:
    if p.lists:
        return "it takes no lists of rows"
    options = p.preactivation or p.has_options or p.more_options
    return "it has no options" if options else None


def _plan_sm100() -> dict[str, Any]:
    return {"rows": "in order", "tile": 128, "pairs": False, "planes": 1}


def mm_config_sm100(p: Mm) -> dict[str, Any]:
    return _plan_sm100() | {"sum_parts": sum_parts(p)}


def sum_parts(p: Mm | Qmm, planes: int = 1) -> int:
    """In how many float32 parts a CUDA kernel makes the sums over K."""
    if planes > 1:
        return -(-p.k // _LONGEST_SUM["float32"])
    if p.dtypes[0] == "float32" and not (isinstance(p, Mm) and p.tf32):
        if isinstance(p, Mm) and mm_planes(p) > 1:  # those are summed apart, and promoted
            return 1
        return -(-p.k // _LONGEST_FMA_SUM)
    return -(-p.k // _LONGEST_SUM[p.out_dtype])


def qmm_planes(p: Qmm, *, packed: bool = False) -> int:
    """The planes in which Hopper's kernels take x; 0 where they do not. They take planes where
    bfloat16 holds the weight, or scales multiply sums."""
    if p.dtypes[0] == "bfloat16" or (_decodes_halves(p) if packed else lines_of_halves(p)):
        return 1
    planes = 2 if p.dtypes[0] == "float16" or p.tf32 else 3
    fits = planes * max(p.rows, p.rows_x) < 2**31 - 2**10
    exact = p.exact_in_bfloat16 or (p.scalable and (packed or lines_of_sums(p)))
    return planes if exact and fits else 0


def _decodes_halves(p: Qmm) -> bool:
    small = p.scalable and groups_sm90(p.mode, p.group_size) is not None
    return p.dtypes[0] == "float16" and p.float16_scales and not small


def lines_of_halves(p: Qmm) -> bool:
    """Whether Hopper's kernel of weights as they are stored takes float16 x as it is."""
    return p.as_stored and _decodes_halves(p)


def lines_of_sums(p: Qmm) -> bool:
    """Whether scales multiply sums in Hopper's kernels of weights as they are stored, or x, where
    these are quantized along N."""
    affine = p.in_groups and groups_sm90(p.mode, p.group_size) is None
    return p.layout == "linear" and p.as_stored and (affine or not p.in_groups)


def qmm_scaled(p: Qmm, *, packed: bool) -> bool:
    """Whether the weight is not rounded, because x's dtype does not hold its values, or its scales,
    or these are of too few codes to decode them so: scales multiply sums, or where it is quantized
    along N, x, or codes in float32."""
    if not p.scalable:
        return False
    if not packed:  # of mode "fp8" sums they always do
        if not lines_of_sums(p) or (p.transpose_w and not p.in_groups):
            return False
        rounded = p.dtypes[0] == "bfloat16" and (p.bfloat16_scales or not p.in_groups)
        return not rounded and not lines_of_halves(p)
    if qmm_planes(p, packed=True) > 1:
        return not p.exact_in_bfloat16
    if p.dtypes[0] == "bfloat16":
        return not p.bfloat16_scales or groups_sm90(p.mode, p.group_size) is not None
    return False


def groups_sm90(mode: str, group_size: int) -> str | None:
    """Why Hopper's kernels do not take weights of a mode in such groups."""
    return extension.rules().groups_sm90_problem(mode=mode, group_size=group_size)


def packed_sm80(p: Qmm) -> str | None:
    """Why the generic kernel does not take a prepacked weight as it is."""
    if not p.in_groups:
        return f"reads no codes of mode {p.mode!r}"
    if p.layout != "sm90":
        return f"needs layout 'sm90', got {p.layout!r}"
    if p.dtypes[0] == "float32" and not (p.exact_in_bfloat16 and qmm_planes(p, packed=True)):
        return "needs 16-bit x, or a mode that bfloat16 holds exactly"
    if not {"bfloat16": p.bfloat16_scales, "float16": p.float16_scales}.get(p.dtypes[0], True):
        return f"scales are not {p.dtypes[0]}"
    if not p.transpose_w:
        return "needs transpose_w=True"
    if not p.in_order:
        return "needs segments in order"
    return extension.rules().qmm_packed_sm80_problem(
        mode=p.mode, bits=p.bits, group_size=p.group_size, n=p.n, gated=p.gated
    )


def packed_config_sm80(p: Qmm) -> dict[str, Any]:
    planes = qmm_planes(p, packed=True)
    return {"way": "generic", "tile": 0, "planes": planes, "sum_parts": sum_parts(p, planes)}


def in_parts(p: Mm | Qmm, planes: int = 1) -> str | None:
    return f"sums over K={p.k} are made in parts" if sum_parts(p, planes) > 1 else None


def mm_fuses(p: Mm) -> str | None:
    if why := (lists_sm90(p) if p.lists else None) or option_dtypes(p) or in_parts(p):
        return why
    if p.existing_dtype not in (None, p.out_dtype):
        return f"existing_out is {p.existing_dtype}, the result {p.out_dtype}"
    if p.preactivation and (why := mm_sm90(p)):
        return why
    if p.empty:
        return "an operand is empty"  # K = 0 still has a bias
    if p.gated and mm_planes(dataclasses.replace(p, gated=False)) > 1:
        return "it does not split float32 operands of a gated activation"
    return None


def unknown_activation(activation: str | None) -> str | None:
    """Why no kernel has it. What they have is a list of theirs (ffi/grouped_mm/activations.h)."""
    if activation is None or activation in extension.rules().ACTIVATIONS:
        return None
    return f"it has no activation {activation!r}"


def option_dtypes(p: Mm | Qmm) -> str | None:
    if why := unknown_activation(p.activation):
        return why
    unknown = [name for name in p.option_dtypes if name not in FLOATS]
    return f"option dtype {unknown[0]} is not one of {ALL_FLOATS}" if unknown else None


def mm_fuses_generic(p: Mm) -> str | None:
    if p.preactivation:
        return "it has no preactivation"
    return "it takes no lists of rows" if p.lists else mm_fuses(p)


def mm_fuses_cpu(p: Mm) -> str | None:
    options = p.activation, p.existing_dtype, *p.option_dtypes
    if p.preactivation or any(options):
        return "it has no options"
    return None if p.x_list_alone or not p.lists else "it takes no lists of rows of the result"


def mm_pays(p: Mm) -> bool:
    """float32 operands run on "sm80" where they are not split, and so do lines that are not whole
    16 bytes."""
    return mm_planes(p) > 1 if p.operand_dtype == "float32" else mm_sm90(p) is None


def lists_pay(p: Mm) -> bool:
    if not p.lists or p.rows <= _LISTS_UP_TO_ROWS * p.groups:
        return True
    return p.x_list_alone


def fusing_pays(p: Mm) -> bool:
    """Many rows are added to 16-bit ones faster by XLA: 156 us instead of 606 of 32768 x 2048 with
    K = 16, where a kernel waits for each row that it reads (docs/lab)."""
    adds = p.existing_dtype in HALVES and not p.lists and p.rows > 96 * p.groups
    return not adds and lists_pay(p)


def mm_config(p: Mm) -> dict[str, Any]:
    planes = mm_planes(p)
    plan = mm_plan(p, planes)
    if not p.lists and p.segments and planes == 1:
        dtypes, mean = (*p.dtypes, p.out_dtype), p.rows / p.segments
        measured = tuned.mm(dtypes, p.groups, p.k, p.n, mean, p.transpose_w, p.gated)
        plan["tile"] = _measured(measured, plan["tile"], "mm", p.gated)
    return plan | {"planes": planes, "sum_parts": sum_parts(p)}


def mm_plan(p: Mm, planes: int = 1) -> dict[str, Any]:
    """How Hopper's kernels find rows, and their tile: ffi/grouped_mm/plan.h."""
    # The kernel of "down_backward" has the activation's derivative in place of the activation.
    activation = p.activation is not None and not p.gated and p.op == "mm"
    return _plan(extension.rules().plan_mm_sm90(
        rows=p.rows, segments=p.segments, k=p.k, n=p.n, planes=planes, gated=p.gated,
        by_list=p.lists, y_by_list=p.y_list,
        preactivation=p.preactivation, more_options=p.more_options,
        same_dtype=p.out_dtype == p.operand_dtype, bias=p.bias, activation=activation,
        rounds=p.rounds, float32_out=p.out_dtype == "float32",
    ))  # fmt: skip


def _plan(plan: tuple[str, int, bool]) -> dict[str, Any]:
    return dict(zip(("rows", "tile", "pairs"), plan, strict=True))


def _measured(measured: int, planned: int, op: str, gated: bool, transposed: str = "") -> int:
    """The tile that was measured to be faster than the planned one, if there is one."""
    if gated and (measured, planned) == (128, 256):  # measured of sums that are not rounded
        return planned
    return measured if measured and measured in tuned.tiles(op, gated, transposed) else planned


def mm_planes(p: Mm) -> int:
    """The bfloat16 planes in which a kernel takes float32 operands; 1: as they are."""
    if p.operand_dtype != "float32":
        return 1
    runs = not p.gated and mm_sm90(p, k=_up(p.k, 64), planes=3, by_list=False) is None
    return _planes(p, runs, _splitting_pays(p.rows * p.k * p.n, p.elements))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _planes(p: Mm | Wgrad, runs: bool, pays: bool) -> int:
    """``runs`` where there is a kernel for them, ``pays`` where making three is worth it. Two are
    no faster than tf32 on "sm80"."""
    if not runs or p.implementation == "sm80":
        return 1
    if p.implementation != "sm90" and (
        p.tf32 or not pays or set(extension.live_capabilities()) != {90}
    ):
        return 1
    if extension.live_capabilities() and "90a" not in extension.BUILD.architectures:
        return 1
    return 2 if p.tf32 else 3


def _splitting_pays(multiplications: int, elements: int, few: bool = False) -> bool:
    """Whether three planes are faster than float32 arithmetic. An H200 does 21e12 multiplications a
    second in float32, or 10e12 where tiles are few; 40e12 in planes, 2.5 ps to make those of an
    element, and 5 us are a fit that chooses the faster in the cases measured."""
    planes = multiplications / 40e12 + 2.5e-12 * elements + 5e-6
    return planes < multiplications / (10e12 if few else 21e12)


def sorting_pays(kind: str, pairs: int, rows: int) -> bool:
    """Whether ``pairs`` products of so many rows, named by index, are sorted by matrix first."""
    below, above_total = SORT_BELOW_ROWS[kind]
    return rows < below and pairs > 1 and pairs * rows > above_total


# ---- wgrad -------------------------------------------------------------------------------------


def wgrad_config(p: Wgrad, *, hopper: bool = False) -> dict[str, Any]:
    """``ranges`` of rows are summed apart, and so are ``parts`` of each segment in them. Hopper's
    kernel ``adds`` to what the result holds."""
    parts, ranges = wgrad_parts(p), wgrad_ranges(p)
    if parts > 1:  # each part is a problem of its own
        return {"parts": parts, "ranges": ranges}
    planes, listed = wgrad_planes(p), p.x_list or p.y_list
    plan = _plan(extension.rules().plan_wgrad_sm90(
        rows=p.rows, groups=p.groups, a=p.a, b=p.b, planes=planes, transpose_x=p.transpose_x,
        by_list=listed,
    ))  # fmt: skip
    if planes == 1 and not listed:
        dtypes, mean = (*p.dtypes, p.out_dtype), p.rows / max(p.segments, 1)
        measured = tuned.wgrad(dtypes, p.groups, p.a, p.b, mean, p.transpose_x, p.transpose_y)
        transposed = "x" * p.transpose_x
        plan["tile"] = _measured(measured, plan["tile"], "wgrad", False, transposed)
    adds = hopper and (planes > 1 or (p.operand_dtype in HALVES and wgrad_sm90(p) is None))
    return plan | {"parts": 1, "ranges": ranges, "adds": adds, "planes": planes}


def wgrad_sm100(p: Wgrad) -> str | None:
    """Why Blackwell's kernel does not run it."""
    return _operands_sm100(p) or extension.rules().wgrad_sm100_problem(
        a=p.a, b=p.b, transpose_x=p.transpose_x, transpose_y=p.transpose_y, own_weight=p.own_weight
    )


def wgrad_config_sm100(p: Wgrad) -> dict[str, Any]:
    parts = {"parts": wgrad_parts(p), "ranges": wgrad_ranges(p)}
    return _plan_sm100() | parts | {"adds": False}


def wgrad_planes(p: Wgrad) -> int:
    """Those of :func:`mm_planes`, of operands whose rows are filled up."""
    if p.operand_dtype != "float32":
        return 1
    few = _tiles(p) <= 2 * extension.rules().H200_PROCESSORS
    pays = _splitting_pays(p.rows * p.a * p.b, p.elements, few)
    return _planes(p, wgrad_sm90(p, rows=_up(p.rows, 8)) is None, pays)


def wgrad_pays(p: Wgrad) -> bool:
    if p.operand_dtype == "float32":
        return wgrad_parts(p) == 1 and wgrad_planes(p) > 1
    return wgrad_sm90(p) is None


def wgrad_sm90(p: Wgrad, rows: int | None = None) -> str | None:
    """Why the handler would leave the call to the generic kernel."""
    rows = p.rows if rows is None else rows
    return extension.rules().wgrad_sm90_problem(
        rows_x=rows, rows_y=rows, a=p.a, b=p.b, transpose_x=p.transpose_x,
        transpose_y=p.transpose_y, own_weight=p.own_weight, segments=p.kind == "segments",
        x_by_list=p.x_list, y_by_list=p.y_list, same_dtype=p.out_dtype == p.operand_dtype,
    )  # fmt: skip


def wgrad_parts(p: Wgrad) -> int:
    """In how many parts a kernel takes each segment, so that few and small results keep an H200
    busy: a tile of 128 x 128 for each processor, of 512 rows or more on average. 1: whole, also
    where it would be less than 4, since adding the parts up takes time, too."""
    if p.kind == "segments" or p.whole or 0 in (p.groups, p.a, p.b):
        return 1
    parts = min(extension.rules().H200_PROCESSORS // _tiles(p), p.rows // (512 * p.groups))
    return parts if parts >= 4 else 1


def wgrad_ranges(p: Wgrad) -> int:
    """In how many ranges of rows a CUDA kernel makes the sums over rows."""
    return 1 if 0 in (p.groups, p.a, p.b) else max(-(-p.longest // _LONGEST_SEGMENT), 1)


def _tiles(p: Wgrad) -> int:
    """Tiles of 128 x 128 in a stack of matrices."""
    return p.groups * math.prod(-(-size // 128) for size in (p.a, p.b))
