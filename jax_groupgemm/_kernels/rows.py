"""Why a kernel cannot do what is done to rows or arrays without a product."""

from __future__ import annotations

from . import dense, extension
from .problems import HALVES, Conversion, Fp8Activation, Fp8Conversion, Moe, Rows, TopK


def routes(p: Moe) -> str | None:
    if p.empty:
        return "an operand is empty"
    return extension.rules().moe_route_problem(pairs=p.pairs, experts=p.experts)


def chooses(p: TopK) -> str | None:
    if p.empty:
        return "an operand is empty"
    return extension.rules().moe_top_k_problem(experts=p.experts, k=p.k, groups=p.groups)


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
    return extension.rules().moe_few_tokens_problem(
        pairs=p.pairs, choices=p.choices, width=p.d, packed=p.packed
    )


def few_pay(p: Moe) -> bool:
    """With more weights to read, the kernels of tiles are faster (docs/lab)."""
    return p.pairs * p.matrix <= 2**26


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
    along_rows = p.op == "fp8_activation_backward"
    can = extension.rules().fp8_activation_problem
    if why := can(columns=p.columns, along_rows=along_rows):
        return why
    return "an operand is empty" if p.empty else None


def quantizes_fp8(p: Fp8Conversion) -> str | None:
    if p.empty:
        return "an operand is empty"
    if p.block not in ((1, 128), (128, 128)):
        return "needs blocks of (1, 128) or (128, 128)"
    return extension.rules().fp8_quantize_problem(rows=p.rows, columns=p.columns, along=p.along)


def quantizes_lines(p: Fp8Conversion) -> str | None:
    if p.dtypes != ("bfloat16",):
        return f"needs bfloat16, got {p.dtypes[0]}"
    return _both_ways(p, (1, 128))


def dequantizes_fp8(p: Fp8Conversion) -> str | None:
    if why := quantizes_fp8(p):
        return why
    return extension.rules().fp8_dequantize_problem(rows=p.rows, columns=p.columns)


def quantizes_both(p: Fp8Conversion) -> str | None:
    return _both_ways(p, (128, 128))


def _both_ways(p: Fp8Conversion, block: tuple[int, int]) -> str | None:
    if p.empty:
        return "an operand is empty"
    if p.block != block:
        return f"needs blocks of {block}"
    can = extension.rules().fp8_quantize_problem
    why = can(rows=p.rows, columns=p.columns, along=p.along)
    if why is None and (why := can(rows=p.along, columns=p.along, along=p.columns)):
        why = f"transposed, {why}"
    return why


def converts(p: Conversion) -> str | None:
    return "an operand is empty" if p.empty else None
