"""Which kernel runs: the only place that decides.

A *problem* is what is known of a call before it runs: operation, platform, shapes, dtypes. A
*kernel* says why it cannot run one (``can``), whether it is faster than those behind it (``pays``)
and how it runs it (``config``). ``KERNELS`` lists the kernels of each operation, the best first.
Lowering, ``implementation=``, error messages, ``info`` and the documentation's table use it.

A kernel for one architecture is chosen where it is named, or where every GPU of this process can
run it. A process without a GPU lowers for somebody else's: it chooses the generic kernel, "sm80",
and the handler takes Hopper's instead where it meets a Hopper GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

from . import extension, rows, tuned
from .kernel import PLATFORMS, Choice, Kernel
from .problems import FLOATS, HALVES, Fp8, Mm, Nvfp4, Problem, Qmm, Wgrad

#: Every name that ``implementation=`` takes, in order of preference.
IMPLEMENTATIONS = ("sm100", "sm90", "sm80", "cpu", "reference")
#: Activations that kernels have.
_GATED_ACTIVATIONS = ("swiglu", "geglu", "reglu", "swiglu_oai")
ACTIVATIONS = (
    None, "silu", "gelu", "gelu_erf", "relu", "relu2", "tanh", *_GATED_ACTIVATIONS,
)  # fmt: skip

_FLOATS, _HALVES = ", ".join(FLOATS), HALVES

# Thresholds, measured: docs/lab has the tables.

# gather_mm and gather_qmm: products of fewer rows than the first, if all together have more than
# the second, are sorted by matrix, so that a matrix is read once. The others come as they are.
# A quantized matrix is dequantized anew for each product that comes as it is.
SORT_BELOW_ROWS = {"mm": (32, 0), "qmm": (128, 8)}
# So many numbers, or fewer, are put in order by comparing each with each.
COMPARE_UP_TO = 512
# Rows per matrix up to which the kernel that takes lists of rows is faster than a permuted copy of
# x and the kernel that takes boxes of rows. On an H200, 128 matrices of 2048 x 1536: 4 rows each
# 208 and 214 us, 32 rows 249 and 278, 256 rows 581 and 576; 8 of 4096 x 4096: 16 rows 80 and 86,
# 128 rows 124 and 118, 1024 rows 654 and 552.
_LISTS_UP_TO_ROWS = 64
# Rows per matrix from which a product of weights as they are stored repacks them first: that costs
# the same for any number of rows, and each row gains what putting its columns in order costs. On an
# H100, 16 x 4096 x 4096, us as stored and repacked: nvfp4 with 512 rows 440 and 482, with 1024 870
# and 851, with 2048 1632 and 1525; 6 bits with 1024 921 and 974, with 2048 1720 and 1674.
_REPACK_FROM_ROWS, _REPACK_FROM_ROWS_WIDE = 1024, 2048  # wide: from 6 bits on
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


def choose(problem: Problem) -> Choice | None:
    """The kernel that runs a product or a conversion; None for the reference.

    Raises ValueError where a kernel was named that cannot run.
    """
    if problem.implementation == "reference":
        return None
    if problem.named:
        return _named(problem)
    if extension.BUILD.problem is not None:
        return None
    for kernel in KERNELS[problem.op]:
        if kernel.only_named or kernel.platform != problem.platform:
            continue
        if unsupported(problem) or _out_of_reach(kernel):
            continue
        if kernel.can(problem) is None and kernel.pays(problem):
            return configured(kernel, problem)
    return None


def fused(problem: Problem) -> Choice | None:
    """The kernel that runs a product and its options as one call; None for the composition.

    Raises ValueError where a kernel was named that cannot run the product itself. A name that this
    operation has no kernel of is left to the composition's products.
    """
    names = {kernel.name for kernel in KERNELS[problem.op]}
    if problem.implementation not in (None, *names):
        return None
    choice = choose(problem)
    if choice is None or choice.kernel.fuses(problem) is not None:
        return None
    return choice if problem.named or choice.kernel.fusing_pays(problem) else None


def _named(problem: Problem) -> Choice:
    name = str(problem.implementation)
    kernels = [k for k in KERNELS[problem.op] if k.name == name]
    reason = None
    if PLATFORMS[name] != problem.platform:
        where = PLATFORMS[name]
        reason = f"it runs on {where}, but this computation is lowered for another platform"
    elif not kernels:
        reason = missing(name, problem.op)
    for kernel in kernels if reason is None else ():
        why = unsupported(problem)
        capabilities = extension.live_capabilities()
        if why is None and (name == "cpu" or capabilities or extension.BUILD.problem):
            why = extension.unavailable(name, capabilities)
        why = why or kernel.can(problem)
        if why is None:
            return configured(kernel, problem)
        reason = reason or why
    raise ValueError(cannot_run(name, str(reason)))


def configured(kernel: Kernel, problem: Problem) -> Choice:
    return Choice(kernel, problem.implementation, kernel.config(problem))


def cannot_run(name: str, reason: str) -> str:
    return (
        f"jgg: implementation={name!r} cannot run: {reason}. "
        "Use implementation=None, or 'reference'."
    )


def unsupported(problem: Problem) -> str | None:
    """Why no kernel knows the dtypes of a problem."""
    for role, names in (("operand", problem.dtypes), ("result", (problem.out_dtype,))):
        for name in names:
            if name not in FLOATS:
                return f"{role} dtype {name} is not one of {_FLOATS}"
    return None


def missing(name: str, op: str) -> str | None:
    """Why an implementation has no kernel for an operation."""
    if any(kernel.name == name for kernel in KERNELS[op]):
        return None
    platform = PLATFORMS[name]
    targets = {kernel.target for kernel in KERNELS[op] if kernel.platform == platform}
    return f"there is no kernel jgg_{op} for {name if targets else platform}"


def _out_of_reach(kernel: Kernel) -> bool:
    """Whether a kernel that nobody named must not be chosen in this process."""
    if kernel.platform == "cpu":
        return extension.unavailable(kernel.name) is not None
    capabilities = extension.live_capabilities()
    if not capabilities:
        return not kernel.unseen
    reason = extension.unavailable(kernel.name, capabilities)
    if reason is not None and kernel.name == "sm80":
        _warn_once(
            "jax_groupgemm runs its reference lowering on this GPU, which is slow: "
            f"{reason}. Install with JGG_CUDA=ON, or see python -m jax_groupgemm.info"
        )
    return reason is not None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


# ---- mm ----------------------------------------------------------------------------------------


def lists_sm90(p: Mm) -> str | None:
    """Why Hopper's kernel does not take lists of rows."""
    if extension.BUILD.problem is not None:
        return extension.BUILD.problem
    if len(set(p.dtypes)) != 1 or p.dtypes[0] not in _HALVES:
        return f"operands must be {' or '.join(_HALVES)} alike"
    if p.empty:
        return "an operand is empty"
    return _mm_sm90(p)


def _mm_sm90(p: Mm, **more) -> str | None:
    """Why the handler would leave the call to the generic kernel."""
    return extension.rules().mm_sm90_problem(
        **({"k": p.k, "n": p.n, "gated": p.gated, "by_list": p.lists} | more),
        preactivation=p.preactivation, more_options=p.more_options,
        same_dtype=p.out_dtype == p.operand_dtype, transpose_x=p.transpose_x,
        transpose_w=p.transpose_w, transpose_out=p.transpose_out, in_order=p.ordered,
    )  # fmt: skip


def sum_parts(p: Mm | Qmm) -> int:
    """In how many float32 parts a CUDA kernel makes the sums over K."""
    if p.dtypes[0] == "float32" and not (isinstance(p, Mm) and p.tf32):
        if isinstance(p, Mm) and mm_planes(p) > 1:  # those are summed apart, and promoted
            return 1
        return -(-p.k // _LONGEST_FMA_SUM)
    return -(-p.k // _LONGEST_SUM[p.out_dtype])


def _in_parts(p: Mm | Qmm) -> str | None:
    return f"sums over K={p.k} are made in parts" if sum_parts(p) > 1 else None


def _mm_fuses(p: Mm) -> str | None:
    if p.lists and p.implementation == "sm80":
        return "it takes no lists of rows"
    if why := (lists_sm90(p) if p.lists else None) or _option_dtypes(p) or _in_parts(p):
        return why
    if p.existing_dtype not in (None, p.out_dtype):
        return f"existing_out is {p.existing_dtype}, the result {p.out_dtype}"
    if p.preactivation and (why := _mm_sm90(p)):
        return why
    if p.empty:
        return "an operand is empty"  # K = 0 still has a bias
    if p.gated and mm_planes(dataclasses.replace(p, gated=False)) > 1:
        return "it does not split float32 operands of a gated activation"
    return None


def _option_dtypes(p: Mm | Qmm) -> str | None:
    if p.activation not in ACTIVATIONS:
        return f"it has no activation {p.activation!r}"
    unknown = [name for name in p.option_dtypes if name not in FLOATS]
    return f"option dtype {unknown[0]} is not one of {_FLOATS}" if unknown else None


def _mm_fuses_generic(p: Mm) -> str | None:
    if p.preactivation:
        return "it has no preactivation"
    return "it takes no lists of rows" if p.lists else _mm_fuses(p)


def _mm_pays(p: Mm) -> bool:
    """float32 operands run on "sm80" where they are not split, and so do lines that are not whole
    16 bytes."""
    return mm_planes(p) > 1 if p.operand_dtype == "float32" else _mm_sm90(p) is None


def _lists_pay(p: Mm) -> bool:
    if not p.lists or p.rows <= _LISTS_UP_TO_ROWS * p.groups:
        return True
    return p.x_list_alone


def listed(p: Mm) -> Choice | None:
    """Hopper's kernel for products of which x comes by list, of many rows; None for a copy of the
    rows that are named."""
    choice = fused(p)
    many = choice is not None and choice.kernel.name == "sm90"
    many = many and extension.rules().lists_many_rows_sm90(
        rows=p.rows // max(p.segments, 1), k=p.k, n=p.n, gated=p.gated,
        preactivation=p.preactivation,
    )  # fmt: skip
    return choice if many and set(extension.live_capabilities()) in ({90}, set()) else None


def _mm_config(p: Mm) -> dict[str, Any]:
    tile = 0
    if not p.lists and p.segments:
        dtypes = (*p.dtypes, p.out_dtype)
        mean = p.rows / p.segments
        tile = tuned.mm(dtypes, p.groups, p.k, p.n, mean, p.transpose_w, p.gated)
    return {"planes": mm_planes(p), "tile": tile, "sum_parts": sum_parts(p)}


def mm_planes(p: Mm) -> int:
    """The bfloat16 planes in which a kernel takes float32 operands; 1: as they are."""
    runs = not p.gated and _mm_sm90(p, k=_up(p.k, 64), planes=3, by_list=False) is None
    return _planes(p, runs, _splitting_pays(p.rows * p.k * p.n, p.elements))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _planes(p: Mm | Wgrad, runs: bool, pays: bool) -> int:
    """``runs`` where there is a kernel for them, ``pays`` where making three is worth it. Two are
    no faster than tf32 on "sm80"."""
    if p.operand_dtype != "float32" or not runs or p.implementation == "sm80":
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


def _wgrad_config(p: Wgrad, *, hopper: bool = False) -> dict[str, Any]:
    """``ranges`` of rows are summed apart, and so are ``parts`` of each segment in them. Hopper's
    kernel ``adds`` to what the result holds."""
    parts, ranges = wgrad_parts(p), wgrad_ranges(p)
    if parts > 1:  # each part is a problem of its own
        return {"parts": parts, "ranges": ranges}
    few = _tiles(p) <= 2 * extension.rules().H200_PROCESSORS
    pays = _splitting_pays(p.rows * p.a * p.b, p.elements, few)
    runs = _wgrad_sm90(p, rows=_up(p.rows, 8)) is None
    mean = p.rows / max(p.segments, 1)
    tile = tuned.wgrad(
        (*p.dtypes, p.out_dtype), p.groups, p.a, p.b, mean, p.transpose_x, p.transpose_y
    )
    planes = _planes(p, runs, pays)
    if planes == 1:
        runs = p.operand_dtype in HALVES and _wgrad_sm90(p) is None
    return {
        "parts": 1, "ranges": ranges, "adds": hopper and runs, "planes": planes, "tile": tile,
    }  # fmt: skip


def _wgrad_pays(p: Wgrad) -> bool:
    if p.operand_dtype == "float32":
        return _wgrad_config(p).get("planes", 1) > 1
    return _wgrad_sm90(p) is None


def _wgrad_sm90(p: Wgrad, rows: int | None = None) -> str | None:
    """Why the handler would leave the call to the generic kernel."""
    rows = p.rows if rows is None else rows
    return extension.rules().wgrad_sm90_problem(
        rows_x=rows, rows_y=rows, a=p.a, b=p.b, transpose_x=p.transpose_x,
        transpose_y=p.transpose_y, own_weight=p.own_weight, segments=p.kind == "segments",
        x_by_list=p.x_list, y_by_list=p.y_list, same_dtype=p.out_dtype == p.operand_dtype,
    )  # fmt: skip


def listed_wgrad(p: Wgrad) -> Choice | None:
    """The same of weight gradients, of which one operand comes by list."""
    choice = choose(p)
    if choice is None or choice.kernel.name != "sm90":
        return None
    if choice.config["parts"] > 1 or choice.config["ranges"] > 1:
        return None
    whole = p.operand_dtype in HALVES and min(p.a, p.b) > 128 and p.rows > 64 * p.groups
    return choice if whole and set(extension.live_capabilities()) in ({90}, set()) else None


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


# ---- qmm ---------------------------------------------------------------------------------------


def _packed_operands(p: Qmm) -> str | None:
    if p.dtypes[0] != "bfloat16":
        return f"needs bfloat16 x, got {p.dtypes[0]}"
    if not p.transpose_w:
        return "needs transpose_w=True"
    return None if p.ordered else "needs segments in order"


def _packed(p: Qmm) -> str | None:
    if any(capability != 90 for capability in extension.live_capabilities()):
        return "needs a Hopper GPU"
    if p.layout != "sm90":
        if p.empty or not p.packable or p.mode in ("mxfp8", "fp8"):
            return "prepack has no kernel for this weight"
        if p.rows < p.all_groups * _repack_from(p.bits):
            return f"repacks a weight from {_repack_from(p.bits)} rows per matrix on"
        if not p.named and not extension.live_capabilities():
            return "repacks for a GPU that this process has"
    if p.gated and p.n // 2 % 64:
        return f"needs N / 2 % 64 == 0 with a gated activation, got N={p.n}"
    return _packed_operands(p)


def _decodes(p: Qmm) -> str | None:
    return "it has no codes of mode 'fp8'" if p.mode == "fp8" else None


def _repack_from(bits: int) -> int:
    return _REPACK_FROM_ROWS if bits < 6 else _REPACK_FROM_ROWS_WIDE


def as_stored_sm90(p: Qmm) -> str | None:
    """Why Hopper's kernel does not take a weight as it is stored."""
    if p.layout != "linear":
        return f"needs layout 'linear', got {p.layout!r}"
    return _decodes(p) or extension.rules().qmm_sm90_problem(
        k=p.k, bits=p.bits, bfloat16_x=p.dtypes[0] == "bfloat16",
        bfloat16_scales=p.mode != "affine" or p.scales_dtype == "bfloat16",
        transpose_w=p.transpose_w, in_order=p.ordered,
    )  # fmt: skip


def _qmm_config(p: Qmm, **more) -> dict[str, Any]:
    return {"sum_parts": sum_parts(p)} | more


def _qmm_fuses(p: Qmm) -> str | None:
    if p.preactivation:
        return "it has no preactivation"
    return _option_dtypes(p) or ("an operand is empty" if p.empty else None) or _in_parts(p)


# ---- NVFP4 -------------------------------------------------------------------------------------


def _nvfp4_mm_sm100(p: Nvfp4) -> str | None:
    out_bytes = 2 if p.out_dtype == "bfloat16" else 4  # float16 is rounded from float32
    return extension.rules().nvfp4_mm_sm100_problem(k=p.k, n=p.n, out_bytes=out_bytes)


def _nvfp4_wgrad_sm100(p: Nvfp4) -> str | None:
    return extension.rules().nvfp4_wgrad_sm100_problem(k=p.k)


def _nvfp4_mm_sm90(p: Nvfp4) -> str | None:
    """x is decoded to the order of columns that the kernel takes, and w is read as it is."""
    assert isinstance(p.inner, Qmm)
    if not p.linear or p.row_scales:
        return "needs layout 'linear' and no scale for each row"
    if p.k % 128:
        return f"needs K % 128 == 0, got K={p.k}"
    return as_stored_sm90(p.inner) or _qmm_fuses(p.inner)


def _nvfp4_wgrad_sm90(p: Nvfp4) -> str | None:
    assert isinstance(p.inner, Wgrad)
    return "its segments are cut into parts" if wgrad_parts(p.inner) > 1 else None


# ---- FP8 ---------------------------------------------------------------------------------------

_TILE, _LINE = (128, 128), (1, 128)


def _fp8_mm_sm90(p: Fp8) -> str | None:
    if why := _fp8_codes(p, (_LINE, _TILE)):
        return why
    return extension.rules().fp8_mm_sm90_problem(k=p.k, n=p.n)


def _fp8_wgrad_sm90(p: Fp8) -> str | None:
    if why := _fp8_codes(p, (_LINE, _LINE)):
        return why
    if p.more_options and p.out_dtype != "float32":
        return "existing_out needs a float32 result"
    return extension.rules().fp8_wgrad_sm90_problem(k=p.k)


def _fp8_codes(p: Fp8, blocks) -> str | None:
    if p.empty:
        return "an operand is empty"
    if p.elements != ("e4m3", "e4m3"):
        return "needs codes of e4m3"
    return None if p.blocks == blocks else f"needs blocks of {blocks[0]} and {blocks[1]}"


# ---- the kernels of each operation ---------------------------------------------------------------

KERNELS: dict[str, Sequence[Kernel]] = {
    "mm": (
        Kernel(
            "sm90", "jgg_mm", fuses=_mm_fuses, pays=_mm_pays, fusing_pays=_lists_pay,
            config=_mm_config,
            needs="bfloat16, float16; float32 in bfloat16 planes",
        ),
        Kernel("sm80", "jgg_mm", fuses=_mm_fuses_generic, config=_mm_config, unseen=True),
        Kernel("cpu", "jgg_mm", fuses=lambda p: "it has no options", unseen=True, needs=_FLOATS),
    ),
    "wgrad": (
        Kernel(
            "sm90", "jgg_wgrad", pays=_wgrad_pays,
            config=functools.partial(_wgrad_config, hopper=True),
            needs="bfloat16, float16; float32 in bfloat16 planes",
        ),
        Kernel("sm80", "jgg_wgrad", config=_wgrad_config, unseen=True),
        Kernel("cpu", "jgg_wgrad", unseen=True, needs=_FLOATS),
    ),
    "qmm": (
        Kernel(
            "sm90", "jgg_qmm_packed", _packed, _qmm_fuses, config=_qmm_config, unseen=True,
            needs="bfloat16 x, transpose_w; prepacked weights, or many rows",
        ),
        Kernel(
            "sm90", "jgg_qmm", as_stored_sm90, _qmm_fuses,
            config=functools.partial(_qmm_config, x_ordered=True),
            needs="bfloat16 x, transpose_w; weights as stored, K * bits % 128 == 0",
        ),
        # Named, "sm90" also takes what only the generic kernel runs.
        Kernel("sm90", "jgg_qmm", _decodes, _qmm_fuses, config=_qmm_config, only_named=True),
        Kernel("sm80", "jgg_qmm", _decodes, _qmm_fuses, config=_qmm_config, unseen=True),
    ),
    "nvfp4_grouped_mm": (
        Kernel(
            "sm100", "jgg_nvfp4_grouped_mm", _nvfp4_mm_sm100,
            needs="K % 32 == 0, N % 8 == 0 (N % 4 with float32 and float16)",
        ),
        Kernel(
            "sm90", "jgg_qmm", fuses=_nvfp4_mm_sm90, config=lambda p: {"x_ordered": True},
            needs="K % 128 == 0, w as stored",
        ),
    ),
    "nvfp4_grouped_wgrad": (
        Kernel("sm100", "jgg_nvfp4_grouped_wgrad", _nvfp4_wgrad_sm100, needs="K % 4 == 0"),
        Kernel(
            "sm90", "jgg_wgrad", fuses=_nvfp4_wgrad_sm90,
            config=lambda p: _wgrad_config(p.inner, hopper=True),
            needs="groups that are not cut into parts",
        ),
    ),
    # These have a definition and no kernel yet.
    "fp8_grouped_mm": (
        Kernel(
            "sm90", "jgg_fp8_grouped_mm", _fp8_mm_sm90,
            needs="e4m3, blocks of 128 along K and of 128 x 128, K % 16 == 0, N % 8 == 0",
        ),
    ),
    "fp8_grouped_wgrad": (
        Kernel(
            "sm90", "jgg_fp8_grouped_wgrad", _fp8_wgrad_sm90,
            needs="e4m3, blocks of 128 rows, K % 8 == 0",
        ),
    ),
    **dict.fromkeys(("fp8_quantize", "fp8_dequantize"), ()),
    "activation_backward": (
        Kernel("sm80", "jgg_activation_backward", rows.differentiates, unseen=True),
    ),
    "route": (
        Kernel("sm80", "jgg_moe_route", rows.routes, unseen=True, needs="1 to 1024 experts"),
    ),
    **{
        op: (
            Kernel(
                "sm80", f"jgg_moe_{op}", rows.takes_rows, unseen=True,
                needs="rows of whole 16 bytes: D % 8 == 0 (D % 4 with float32)",
            ),
        )
        for op in ("dispatch", "combine", "combine_backward")
    },
    **{
        op: (Kernel("sm80", f"jgg_{op}", rows.converts, unseen=True),)
        for op in ("quantize", "dequantize", "prepack", "nvfp4_quantize")
    },
}  # fmt: skip
