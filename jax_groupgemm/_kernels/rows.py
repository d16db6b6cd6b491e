"""Kernels that are no products: a table of them, and why one of them cannot take a call."""

from __future__ import annotations

from . import dense, extension
from .kernel import Kernel
from .problems import (
    FLOATS,
    HALVES,
    Conversion,
    Fp8Activation,
    Fp8Conversion,
    Moe,
    Router,
    Rows,
    TopK,
)


def routes(p: Moe) -> str | None:
    if p.empty:
        return "an operand is empty"
    return extension.rules().moe_route_problem(pairs=p.pairs, experts=p.experts)


def chooses(p: TopK) -> str | None:
    if p.empty:
        return "an operand is empty"
    return extension.rules().moe_top_k_problem(experts=p.experts, k=p.k, groups=p.groups)


def chooses_for(p: Router) -> str | None:
    if p.empty:
        return "an operand is empty"
    x, w = p.dtypes
    if x not in FLOATS or w not in ("float32", "bfloat16"):
        return f"x is {x}, w is {w}"
    return extension.rules().moe_router_problem(
        tokens=p.tokens, d=p.d, experts=p.experts, k=p.k, groups=p.groups
    )


def choosing_for_pays(p: Router) -> bool:
    """A cluster alone reads larger weights longer than a product of the whole GPU takes."""
    return p.d * p.experts * (4 if p.dtypes[1] == "float32" else 2) <= 2**21


def takes_rows(p: Moe) -> str | None:
    if p.empty:
        return "an operand is empty"
    if p.codes:
        return extension.rules().moe_rows_problem(pairs=p.pairs, d=p.d, element_bytes=1)
    rows = p.dtypes[0]
    for name in (*p.dtypes[1:], p.out_dtype):
        if name not in (rows, "float32"):
            return f"rows are {rows}, what tokens have is {name}"
    width = 4 if rows == "float32" else 2
    return extension.rules().moe_rows_problem(pairs=p.pairs, d=p.d, element_bytes=width)


def takes_few(p: Moe) -> str | None:
    if p.empty:
        return "an operand is empty"
    if p.dtypes != ("bfloat16",):
        return "needs bfloat16 x"
    if why := dense.unknown_activation(p.activation):
        return why
    for mode, group_size in p.formats:
        if why := dense.groups_sm90(mode, group_size):
            return why
    return extension.rules().moe_few_tokens_problem(
        pairs=p.pairs, choices=p.choices, width=p.d, packed=p.packed
    )


def few_pay(p: Moe) -> bool:
    """With more weights to read, the kernels of tiles are faster (docs/lab)."""
    return p.pairs * p.matrix <= 2**27


def _needs_arrays(p: Moe) -> str | None:
    if p.empty:
        return "an operand is empty"
    if not p.dense:
        return "needs weights that are arrays"
    if p.dtypes[0] not in HALVES or len(set(p.dtypes)) != 1:
        return f"needs {' or '.join(HALVES)} alike"
    return None


def takes_few_dense(p: Moe) -> str | None:
    if why := _needs_arrays(p) or dense.unknown_activation(p.activation):
        return why
    return extension.rules().moe_few_dense_problem(pairs=p.pairs, choices=p.choices, d=p.d, f=p.f)


def few_dense_pays(p: Moe) -> bool:
    """Down is read once for each pair, from L2 where another has read it. So with more weights the
    kernels of tiles are faster: gpt-oss-20b's layer from 16 pairs on (docs/lab)."""
    return p.pairs * p.matrix <= 3 * 2**25


def takes_some(p: Moe) -> str | None:
    if p.empty:
        return "an operand is empty"
    if not p.packed:
        return "needs prepacked weights"
    if p.dtypes != ("bfloat16",):
        return "needs bfloat16 x"
    for mode, group_size in p.formats:
        if why := dense.groups_sm90(mode, group_size):
            return why
    return _takes_some(p)


def takes_some_dense(p: Moe) -> str | None:
    return _needs_arrays(p) or _takes_some(p)


def _takes_some(p: Moe) -> str | None:
    if why := dense.unknown_activation(p.activation):
        return why
    if not p.gated:
        return "needs a gated activation"
    if p.biased:
        return "needs products without biases"
    if p.out_dtype not in (p.dtypes[0], "float32"):
        return f"rows are {p.dtypes[0]}, the result is {p.out_dtype}"
    return extension.rules().moe_some_tokens_problem(
        pairs=p.pairs, choices=p.choices, experts=p.experts, d=p.d, f=p.f
    )


def some_pay(p: Moe) -> bool:
    """More rows of an expert are faster by list, or in larger tiles that wait for each other."""
    return p.pairs <= 16 * p.experts


def differentiates(p: Rows) -> str | None:
    if p.dtypes[0] not in HALVES or len(set(p.dtypes)) != 1:
        return f"needs {' or '.join(HALVES)} alike"
    if why := dense.unknown_activation(p.activation):
        return why
    if why := extension.rules().activation_backward_problem(columns=p.columns):
        return why
    return "an operand is empty" if p.empty else None


def quantizes_activations(p: Fp8Activation) -> str | None:
    if p.dtypes != ("bfloat16",):
        return "needs h in bfloat16"
    if not extension.rules().ACTIVATIONS.get(p.activation):
        return "needs a gated activation"
    along_rows = p.op in ("fp8_activation_backward", "fp8_activation_cast_backward")
    can = extension.rules().fp8_activation_problem
    if why := can(columns=p.columns, along_rows=along_rows):
        return why
    if p.op.startswith("fp8_activation_cast") and p.rows * p.columns >= 2**34:
        return "needs R * F below 2^34"
    if p.op == "fp8_activation_backward":
        needed = extension.rules().FP8_ACTIVATION_BACKWARD_BYTES
        if why := extension.lacks_shared_memory(needed):
            return why
    return "an operand is empty" if p.empty else None


def quantizes_fp8(p: Fp8Conversion) -> str | None:
    if p.empty:
        return "an operand is empty"
    if p.block not in ((1, 128), (128, 128)):
        return "needs blocks of (1, 128) or (128, 128)"
    can = extension.rules().fp8_quantize_problem
    why = can(rows=p.rows, columns=p.columns, along=p.along)
    if why is not None or not p.both:
        return why
    if p.block == (1, 128) and p.dtypes != ("bfloat16",):
        return f"along both axes needs bfloat16, got {p.dtypes[0]}"
    why = can(rows=p.along, columns=p.along, along=p.columns)
    return None if why is None else f"transposed, {why}"


def casts_fp8(p: Fp8Conversion) -> str | None:
    if p.empty:
        return "an operand is empty"
    if p.dtypes == ("float32",) and not p.power_of_two:
        return "float32 x needs scales that are powers of two"
    return extension.rules().fp8_cast_problem(columns=p.columns, along=p.along)


def dequantizes_fp8(p: Fp8Conversion) -> str | None:
    if why := quantizes_fp8(p):
        return why
    return extension.rules().fp8_dequantize_problem(rows=p.rows, columns=p.columns)


def converts(p: Conversion) -> str | None:
    return "an operand is empty" if p.empty else None


_OF_ROWS = "rows of whole 16 bytes: D % 8 == 0 (D % 4 with float32, D % 16 with codes)"
# For every GPU: operation, custom call, why it cannot run, and what it needs.
_TABLE = (
    (
        "fp8_quantize",
        "jgg_fp8_quantize",
        quantizes_fp8,
        "blocks of 128 or 128 x 128, C % 8 == 0; along R without groups R % 16 == 0; along both "
        "axes C % 16 == 0; blocks of 128 then need bfloat16 and groups",
    ),
    (
        "fp8_cast",
        "jgg_fp8_cast",
        casts_fp8,
        "C % 16 == 0; along R without groups R % 16 == 0; float32 x with powers of two",
    ),
    ("fp8_largest", "jgg_fp8_cast", casts_fp8, "C % 16 == 0"),
    (
        "fp8_activation",
        "jgg_fp8_activation",
        quantizes_activations,
        "bfloat16, a gated activation, F % 8 == 0",
    ),
    (
        "fp8_activation_backward",
        "jgg_fp8_activation_backward",
        quantizes_activations,
        "bfloat16, a gated activation, F % 128 == 0",
    ),
    (
        "fp8_activation_cast",
        "jgg_fp8_activation_cast",
        quantizes_activations,
        "bfloat16, a gated activation, F % 8 == 0; R * F below 2^34",
    ),
    (
        "fp8_activation_cast_backward",
        "jgg_fp8_activation_cast_backward",
        quantizes_activations,
        "bfloat16, a gated activation, F % 128 == 0; R * F below 2^34",
    ),
    (
        "fp8_dequantize",
        "jgg_fp8_dequantize",
        dequantizes_fp8,
        "blocks of 128 or 128 x 128, C % 8 == 0; fewer than 2^33 codes",
    ),
    (
        "activation_backward",
        "jgg_activation_backward",
        differentiates,
        "bfloat16, float16; columns % 8 == 0",
    ),
    ("top_k", "jgg_moe_top_k", chooses, "1 to 1024 experts in up to 32 groups, k up to 32"),
    ("route", "jgg_moe_route", routes, "1 to 1024 experts"),
    ("dispatch", "jgg_moe_dispatch", takes_rows, _OF_ROWS),
    ("combine", "jgg_moe_combine", takes_rows, _OF_ROWS),
    ("combine_backward", "jgg_moe_combine_backward", takes_rows, _OF_ROWS),
    ("quantize", "jgg_quantize", converts, ""),
    ("dequantize", "jgg_dequantize", converts, ""),
    ("nvfp4_quantize", "jgg_nvfp4_quantize", converts, ""),
    ("prepack", "jgg_prepack", converts, "no mxfp8, no fp8"),
    ("prepack", "jgg_prepack_fp8", converts, "mode fp8"),
)
_ON_CPU = {
    op: Kernel("cpu", f"jgg_{op}", converts, unseen=True) for op in ("quantize", "dequantize")
}
#: Elsewhere XLA exchanges the axes before the kernel of "quantize".
_ACROSS = Kernel("cpu", "jgg_quantize", converts, unseen=True)
# Layers of experts, and their router.
_LAYERS = {
    "few_tokens": (
        Kernel(
            "sm90", "jgg_moe_few_tokens", takes_few, unseen=True, pays=few_pay,
            needs="bfloat16, prepacked weights; up to 64 pairs of token and expert, 8 of a token; "
            "pairs * D * F up to 2^27; D and F up to 12288, more with less than 8 tokens and k",
        ),
        Kernel(
            "sm80", "jgg_moe_few_dense", takes_few_dense, unseen=True,
            pays=few_dense_pays,
            needs="bfloat16, float16, weights that are arrays; up to 64 pairs of token and expert, "
            "8 of a token; pairs * D * F up to 3 * 2^25; D % 8 == 0, F % 8 == 0; D and F up to "
            "6144, more with less than 8 tokens and k",
        ),
    ),
    "some_tokens": (
        Kernel(
            "sm90", "jgg_moe_some_tokens", takes_some, pays=some_pay,
            needs="bfloat16, prepacked weights; a gated activation, no biases; up to 1024 pairs of "
            "token and expert, 32 of a token; up to 1024 experts, few rows of each",
        ),
        Kernel(
            "sm90", "jgg_moe_some_dense", takes_some_dense, pays=some_pay,
            needs="bfloat16, float16, weights that are arrays; a gated activation, no biases; up "
            "to 1024 pairs of token and expert, 32 of a token; up to 1024 experts, few rows of "
            "each; D % 8 == 0, F % 8 == 0",
        ),
    ),
    "router": (
        Kernel(
            "sm90", "jgg_moe_router", chooses_for, pays=choosing_for_pays,
            needs="float32 or bfloat16 w of up to 2 MiB, D % 8 == 0, E % 4 == 0; up to 8 tokens, "
            "512 experts",
        ),
    ),
}  # fmt: skip
#: The kernels of each operation that multiplies nothing.
CONVERSIONS = {
    op: (
        *(
            Kernel("sm80", target, can, unseen=True, needs=needs)
            for name, target, can, needs in _TABLE
            if name == op
        ),
        *([_ON_CPU[op]] if op in _ON_CPU else []),
    )
    for op, *_ in _TABLE
} | {"quantize_across": (_ACROSS,)}
#: See ``choose.KERNELS``.
KERNELS = _LAYERS | CONVERSIONS
