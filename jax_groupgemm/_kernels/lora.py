"""When one kernel makes both products of a low rank, or the gradients of both factors: elsewhere
they are two grouped products."""

from __future__ import annotations

from . import extension
from .problems import HALVES, Lora

# Up to so many rows for each pair of factors: with 64, 128 and 256 the kernel takes a half of the
# time of two grouped products, or less. With more nothing was measured.
MOST_ROWS = 256
# Rows from which they are put in order of their pairs first: fewer are multiplied as they come.
SORT_FROM_ROWS = 2048
NEEDS = "bfloat16, float16; rank 8, 16, 32 or 64, K % 8 == 0, N % 8 == 0; up to 256 rows of a pair"


def can(p: Lora) -> str | None:
    if p.empty:
        return "an operand is empty"
    if p.dtypes[0] not in HALVES or len(set(p.dtypes)) != 1:
        return f"needs {' or '.join(HALVES)} alike"
    return extension.rules().lora_problem(rank=p.rank, k=p.k, n=p.n)


def pays(p: Lora) -> bool:
    return p.rows <= MOST_ROWS * p.pairs
