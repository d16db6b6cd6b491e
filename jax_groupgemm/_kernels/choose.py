"""Which kernel runs: this folder alone decides.

A *problem* is what is known of a call before it runs: operation, platform, shapes, dtypes. A
*kernel* says why it cannot run one (``can``), whether it is faster than those behind it (``pays``)
and how it runs it (``config``). ``KERNELS`` lists the kernels of each operation, the best first.
Lowering, ``implementation=``, error messages, ``info`` and the documentation's table use it.
``dense``, ``fp8``, ``rows`` and ``lists`` say what the kernels of a kind need, and when they pay.
``rows`` lists those that multiply nothing.

A kernel for one architecture is chosen where it is named, or where every GPU of this process can
run it. ``proven`` says which of them are off until they have been checked there. A process without
a GPU lowers for somebody else's: it chooses the generic kernel, "sm80", and the handler takes
Hopper's instead where it meets a Hopper GPU.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

from . import dense, extension, fp8, lists, lora, proven, rows
from .kernel import PLATFORMS, Kernel, Plan, noted
from .problems import FLOATS, Mm, Nvfp4, Problem, Qmm, Wgrad

#: Every name that ``implementation=`` takes, in order of preference.
IMPLEMENTATIONS = ("sm100", "sm90", "sm89", "sm80", "cpu", "reference")


# Thresholds, measured (docs/lab has the tables) where they do not say otherwise.

# So many numbers, or fewer, are put in order by comparing each with each.
COMPARE_UP_TO = 512
# Rows per matrix from which a product of weights as they are stored repacks them first: that costs
# the same for any number of rows, and each row gains what putting its columns in order costs. On an
# H100, 16 x 4096 x 4096, us as stored and repacked: nvfp4 with 512 rows 440 and 482, with 1024 870
# and 851, with 2048 1632 and 1525; 6 bits with 1024 921 and 974, with 2048 1720 and 1674.
_REPACK_FROM_ROWS, _REPACK_FROM_ROWS_WIDE = 1024, 2048  # wide: from 6 bits on
# ... of x beside lines that no kernel of Hopper takes. Measured on an H200, as the next three
# (docs/lab).
_REPACK_HALF_FROM_ROWS = 1
# ... beside lines whose scales multiply sums or x, and of 16-bit x beside groups of 16, which the
# generic kernel of few rows takes.
_REPACK_SCALED_FROM_ROWS = 9
# ... of 16-bit x and a weight of few bits that is quantized along N.
_REPACK_TRANSPOSED_FROM_ROWS = 512
# Rows per matrix up to which Hopper's kernel of stored weights, with x in two bfloat16 parts, is
# faster than packing the weight.
_PLANES_UP_TO_ROWS = 32


def choose(problem: Problem) -> Plan | None:
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
        if against(kernel, problem) is None:
            return configured(kernel, problem)
    return None


def against(kernel: Kernel, problem: Problem) -> str | None:
    """Why a kernel is not chosen where nobody names one; None where it is, unless one before it
    is."""
    if kernel.only_named:
        return f"only on request, implementation={kernel.name!r}"
    if kernel.platform != problem.platform:
        there = "no CUDA device" if kernel.platform == "cuda" else "JAX runs on another device"
        return extension.unavailable(kernel.name) or there
    why = unsupported(problem) or _out_of_reach(kernel) or cannot(kernel, problem)
    slow = "another kernel is faster, or takes shapes that this one does not"
    return why or (None if kernel.pays(problem) else slow)


def fused(problem: Problem) -> Plan | None:
    """The kernel that runs a product and its options as one call; None for the composition.

    Raises ValueError where a kernel was named that cannot run the product itself. A name that this
    operation has no kernel of is left to the composition's products.
    """
    names = {kernel.name for kernel in KERNELS[problem.op]}
    if problem.implementation not in (None, *names):
        return None
    plan = choose(problem)
    if plan is None or plan.kernel.fuses(problem) is not None:
        return None
    return plan if problem.named or plan.kernel.fusing_pays(problem) else None


def by_list(problem: Mm | Wgrad) -> Plan | None:
    """The kernel that takes tokens by list; None where their rows are copied first. A name is that
    of the kernel either way, so it decides nothing here.

    Raises ValueError where a kernel was named that cannot run the product itself.
    """
    plan = choose(problem) if isinstance(problem, Wgrad) else fused(problem)
    return plan if plan is not None and plan.kernel.lists_pay(problem, plan.config) else None


def _named(problem: Problem) -> Plan:
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
        if why is None and capabilities:
            why = proven.against(kernel)
        why = why or cannot(kernel, problem)
        if why is None:
            return configured(kernel, problem)
        reason = reason or why
    raise ValueError(cannot_run(name, str(reason)))


def configured(kernel: Kernel, problem: Problem) -> Plan:
    return noted(Plan(kernel, problem.implementation, kernel.config(problem)))


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
                return f"{role} dtype {name} is not one of {dense.ALL_FLOATS}"
    return None


def cannot(kernel: Kernel, problem: Problem) -> str | None:
    """Why a kernel cannot run a call of dtypes that it knows."""
    if problem.calls is not None and kernel.target not in problem.calls:
        return f"reads no codes of mode {problem.mode!r}"
    return kernel.can(problem)


def missing(name: str, op: str) -> str:
    """That an implementation has no kernel for an operation."""
    platform = PLATFORMS[name]
    targets = {kernel.target for kernel in KERNELS[op] if kernel.platform == platform}
    return f"there is no kernel jgg_{op} for {name if targets else platform}"


def _out_of_reach(kernel: Kernel) -> str | None:
    """Why a kernel that nobody named must not be chosen in this process."""
    if kernel.platform == "cpu":
        return extension.unavailable(kernel.name)
    capabilities = extension.live_capabilities()
    if not capabilities:
        return None if kernel.unseen else "no CUDA device of this process has it"
    reason = extension.unavailable(kernel.name, capabilities)
    if reason is not None and kernel.name == "sm80":
        _warn_once(
            "jax_groupgemm runs its reference lowering on this GPU, which is slow: "
            f"{reason}. Install with JGG_CUDA=ON, or see python -m jax_groupgemm.info"
        )
    return reason or proven.against(kernel)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


# ---- qmm ---------------------------------------------------------------------------------------


def _packed_operands(p: Qmm) -> str | None:
    if not dense.qmm_planes(p, packed=True):
        return f"needs 16-bit x, or a mode that bfloat16 holds exactly, got {p.dtypes[0]}"
    if not p.transpose_w and p.gated:
        return "a gated activation needs transpose_w=True"
    return None if p.in_order else "needs segments in order"


def _packed(p: Qmm) -> str | None:
    if not p.in_groups and (why := dense.in_parts(p, dense.qmm_planes(p, packed=True))):
        return why
    if why := _packed_operands(p):
        return why
    if p.layout != "sm90":
        if p.empty or not p.packable:
            why = _fp8_as_stored(p) if "jgg_qmm_fp8" in (p.calls or ()) else None
            return why or "prepack has no kernel for this weight"
        # Where no kernel reads codes as they are stored, any number of rows repacks.
        if p.as_stored and p.rows < p.all_groups * (least := _repack_from(p)):
            return f"repacks a weight from {least} rows per matrix on"
        if not p.named and not extension.live_capabilities():
            return "repacks for a GPU that this process has"
    return extension.rules().qmm_packed_problem(n=p.n, gated=p.gated)


def _planes_pay(p: Qmm) -> bool:
    """float16 rows in two bfloat16 parts, beside the generic kernel, which takes them whole."""
    few = p.rows <= _PLANES_UP_TO_ROWS * p.all_groups
    return dense.qmm_planes(p) != 2 or few


def _repack_from(p: Qmm) -> int:
    if not p.transpose_w:
        if as_stored_sm90(p):
            return 1
        if dense.qmm_scaled(p, packed=False):
            return _REPACK_SCALED_FROM_ROWS
        if dense.qmm_planes(p) == 2:
            return _PLANES_UP_TO_ROWS
        return _REPACK_TRANSPOSED_FROM_ROWS if p.bits < 6 else _REPACK_FROM_ROWS_WIDE
    if p.dtypes[0] != "float32" and dense.qmm_scaled(p, packed=True):
        return _REPACK_SCALED_FROM_ROWS
    if p.dtypes[0] != "bfloat16" and not p.exact_in_bfloat16:
        if as_stored_sm90(p):
            return _REPACK_HALF_FROM_ROWS
        if dense.qmm_scaled(p, packed=False):
            return _REPACK_SCALED_FROM_ROWS
    return _REPACK_FROM_ROWS if p.bits < 6 else _REPACK_FROM_ROWS_WIDE


def as_stored_sm90(p: Qmm) -> str | None:
    """Why Hopper's kernel does not take a weight as it is stored."""
    if p.layout != "linear":
        return f"needs layout 'linear', got {p.layout!r}"
    if why := dense.groups_sm90(p.mode, p.group_size):
        return why
    scaled = dense.qmm_scaled(p, packed=False)
    return extension.rules().qmm_sm90_problem(
        line=p.k if p.transpose_w else p.n, bits=p.bits, bfloat16_x=dense.qmm_planes(p) > 0,
        bfloat16_scales=p.bfloat16_scales, half=dense.lines_of_halves(p), scaled=scaled,
        transpose_w=p.transpose_w, in_order=p.in_order,
        has_options=p.has_options and not scaled,  # _qmm_fuses_sm90 says what becomes of those
    )  # fmt: skip


def _fp8_as_stored(p: Qmm) -> str | None:
    if not p.as_stored:
        return "needs codes e4m3 in blocks of whole 128 columns"
    return as_stored_sm90(p) or dense.in_parts(p)


def _qmm_config(p: Qmm) -> dict[str, Any]:
    return {"sum_parts": dense.sum_parts(p)}


def _qmm_config_sm90(p: Qmm, *, packed: bool) -> dict[str, Any]:
    """Who multiplies, and in which tiles: ffi/quantized/plan.h."""
    planes, scaled = dense.qmm_planes(p, packed=packed), dense.qmm_scaled(p, packed=packed)
    rows_each = 1 if scaled else planes
    plan = extension.rules().plan_qmm_sm90(
        mode=p.mode, bits=p.bits, packed=packed, rows_x=rows_each * p.rows_x,
        rows=rows_each * p.rows, segments=p.segments, k=p.k, n=p.n, gated=p.gated,
        transposed=not p.transpose_w, half=planes == 1 and p.dtypes[0] == "float16",
        scaled=planes if scaled else 0, sizes=p.sizes, offset=p.offset,
    )  # fmt: skip
    named: dict[str, Any] = dict(zip(("way", "tile", "parts", "pairs"), plan, strict=True))
    sum_parts = dense.sum_parts(p, planes)
    if scaled and not packed and p.transpose_w and planes > 1:
        named["beside"], planes = True, 1  # float32 as it is
    elif scaled and not p.transpose_w:
        named["beside"], planes = True, 3 if named["tile"] > 8 else 1  # 1: float32 as it is
    elif scaled and named["tile"] > 32:
        named["beside"], planes = True, 3 if planes == 2 else planes
    return named | {"of_lines": not packed, "planes": planes, "sum_parts": sum_parts}


def _qmm_fuses_sm90(p: Qmm, packed: bool = False) -> str | None:
    if dense.qmm_planes(p, packed=packed) != 1:
        return "options are done to sums of bfloat16 parts"
    if dense.qmm_scaled(p, packed=packed) and (p.gated or not packed):
        return "scales multiply sums, which has no gated activation, or of lines no option"
    return _qmm_fuses(p)


def _packed_fuses_sm80(p: Qmm) -> str | None:
    parts = "options are done to sums of bfloat16 parts"
    return parts if p.dtypes[0] == "float32" else _qmm_fuses(p)


def _qmm_fuses_cpu(p: Qmm) -> str | None:
    return "it has no options" if p.activation or p.option_dtypes else None


def _fp8_cpu(p: Qmm) -> str | None:
    return None if p.lines else "needs codes e4m3 in blocks of whole 128 columns"


def _qmm_packed_fuses(p: Qmm) -> str | None:
    return _qmm_fuses_sm90(p, packed=True)


def _qmm_fuses(p: Qmm) -> str | None:
    if p.preactivation:
        return "it has no preactivation"
    empty = "an operand is empty" if p.empty else None
    return dense.option_dtypes(p) or empty or dense.in_parts(p)


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
    return "its segments are cut into parts" if dense.wgrad_parts(p.inner) > 1 else None


# ---- the kernels of each operation ---------------------------------------------------------------

KERNELS: dict[str, Sequence[Kernel]] = {
    "mm": (
        Kernel(
            "sm100", "jgg_mm", dense.mm_sm100, dense.mm_fuses_sm100, config=dense.mm_config_sm100,
            needs="bfloat16, float16, a result of that dtype or float32; K % 8 == 0, N % 8 == 0; "
            "x as it is stored; no options",
        ),
        Kernel(
            "sm90", "jgg_mm", fuses=dense.mm_fuses, pays=dense.mm_pays,
            fusing_pays=dense.fusing_pays, lists_pay=lists.mm_pays, config=dense.mm_config,
            needs="bfloat16, float16; float32 in bfloat16 planes",
        ),
        Kernel("sm80", "jgg_mm", fuses=dense.mm_fuses_generic, config=dense.mm_config, unseen=True),
        Kernel(
            "cpu", "jgg_mm", fuses=dense.mm_fuses_cpu, lists_pay=lists.cpu_packs, unseen=True,
            needs=dense.ALL_FLOATS,
        ),
    ),
    "wgrad": (
        Kernel(
            "sm100", "jgg_wgrad", dense.wgrad_sm100, config=dense.wgrad_config_sm100,
            needs="bfloat16, float16, a result of that dtype or float32; A % 8 == 0, B % 8 == 0; "
            "x and y as they are stored",
        ),
        Kernel(
            "sm90", "jgg_wgrad", pays=dense.wgrad_pays, lists_pay=lists.wgrad_pays,
            config=functools.partial(dense.wgrad_config, hopper=True),
            needs="bfloat16, float16; float32 in bfloat16 planes",
        ),
        Kernel("sm80", "jgg_wgrad", config=dense.wgrad_config, unseen=True),
        Kernel("cpu", "jgg_wgrad", lists_pay=lists.cpu_packs, unseen=True, needs=dense.ALL_FLOATS),
    ),
    "qmm": (
        Kernel(
            "sm90", "jgg_qmm_packed", _packed, _qmm_packed_fuses,
            config=functools.partial(_qmm_config_sm90, packed=True), unseen=True,
            needs="prepacked weights, or many rows, or transpose_w=False and options",
        ),
        Kernel(
            "sm90", "jgg_qmm", as_stored_sm90, _qmm_fuses_sm90,
            config=functools.partial(_qmm_config_sm90, packed=False), pays=_planes_pay,
            needs="weights as stored, affine groups of 32 or more; K * bits % 128 == 0 with "
            "transpose_w, else N * bits and no options",
        ),
        Kernel(
            "sm90", "jgg_qmm_fp8", _fp8_as_stored, _qmm_fuses_sm90,
            config=functools.partial(_qmm_config_sm90, packed=False),
            needs="mode fp8, codes e4m3 in blocks of whole 128 columns; K % 16 == 0 with "
            "transpose_w, else N % 16 == 0 and no options",
        ),
        # Named, "sm90" also takes what only the generic kernel runs.
        Kernel("sm90", "jgg_qmm", fuses=_qmm_fuses, config=_qmm_config, only_named=True),
        Kernel(
            "sm80", "jgg_qmm_packed", dense.packed_sm80, _packed_fuses_sm80,
            config=dense.packed_config_sm80, unseen=True,
            needs="prepacked weights, codes of 4 bits, affine groups of 32 or more; 16-bit x, or "
            "float32 beside nvfp4 and mxfp4; affine scales of its dtype; transpose_w=True, "
            "segments in order; N % 128 == 0 with a gated activation",
        ),
        Kernel(
            "sm80", "jgg_qmm", fuses=_qmm_fuses, config=_qmm_config, unseen=True,
            needs="no mode fp8",
        ),
        Kernel(
            "cpu", "jgg_qmm_fp8", _fp8_cpu, _qmm_fuses_cpu, unseen=True,
            needs=f"{dense.ALL_FLOATS}; mode fp8, codes e4m3 in blocks of whole 128 columns",
        ),
        Kernel(
            "cpu", "jgg_qmm", fuses=_qmm_fuses_cpu, unseen=True,
            needs=f"{dense.ALL_FLOATS}; no mode fp8",
        ),
    ),
    "nvfp4_grouped_mm": (
        Kernel(
            "sm100", "jgg_nvfp4_grouped_mm", _nvfp4_mm_sm100,
            needs="K % 32 == 0, N % 8 == 0 (N % 4 with float32 and float16)",
        ),
        Kernel(
            "sm90", "jgg_qmm", fuses=_nvfp4_mm_sm90,
            config=lambda p: _qmm_config_sm90(p.inner, packed=False),
            needs="K % 128 == 0, w as stored",
        ),
    ),
    "nvfp4_grouped_wgrad": (
        Kernel("sm100", "jgg_nvfp4_grouped_wgrad", _nvfp4_wgrad_sm100, needs="K % 4 == 0"),
        Kernel(
            "sm90", "jgg_wgrad", fuses=_nvfp4_wgrad_sm90,
            config=lambda p: dense.wgrad_config(p.inner, hopper=True),
            needs="groups that are not cut into parts",
        ),
    ),
    "fp8_grouped_mm": (
        Kernel(
            "sm100", "jgg_fp8_grouped_mm_sm100", fp8.mm,
            needs="e4m3, blocks of 128 along K and of 128 x 128",
        ),
        Kernel(
            "sm90", "jgg_fp8_grouped_mm", fp8.mm_sm90, config=fp8.mm_config,
            needs="e4m3, blocks of 128 along K and of 128 x 128; or a scale for each matrix, fast: "
            "x also e5m2",
        ),
        Kernel(
            "sm89", "jgg_fp8_grouped_mm_sm89", fp8.mm_sm89, pays=fp8.pays_sm89,
            needs="e4m3, x also e5m2, blocks of 128 along K and of 128 x 128",
        ),
    ),
    "fp8_grouped_wgrad": (
        Kernel(
            "sm100", "jgg_fp8_grouped_wgrad_sm100", fp8.wgrad,
            needs="e4m3, blocks of 128 rows",
        ),
        Kernel(
            "sm90", "jgg_fp8_grouped_wgrad", fp8.wgrad_sm90, config=fp8.fast_config,
            needs="e4m3, blocks of 128 rows; or a scale for each matrix, fast: one also e5m2",
        ),
        Kernel(
            "sm89", "jgg_fp8_grouped_wgrad_sm89", fp8.wgrad_sm89, pays=fp8.pays_sm89,
            needs="e4m3, dy also e5m2, blocks of 128 rows",
        ),
    ),
    "lora_mm": (
        Kernel("sm80", "jgg_lora_mm", lora.can, pays=lora.pays, unseen=True, needs=lora.NEEDS),
    ),
    "lora_wgrad": (
        Kernel("sm80", "jgg_lora_wgrad", lora.can, pays=lora.pays, unseen=True, needs=lora.NEEDS),
    ),
    # The kernel of "mm" where tokens come by list, with the activation's derivative.
    "down_backward": (
        Kernel(
            "sm90", "jgg_moe_down_backward", fuses=lists.down_backward_fuses, pays=dense.mm_pays,
            lists_pay=lists.mm_pays, config=dense.mm_config,
            needs="bfloat16, float16, SwiGLU; few columns",
        ),
    ),
    **rows.KERNELS,
}  # fmt: skip
