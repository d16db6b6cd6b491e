"""When one kernel makes both products of a low rank: elsewhere they are two grouped products."""

from __future__ import annotations

from . import extension
from .problems import HALVES, Lora

# Up to so many rows for each pair of factors. With 64 two grouped products are faster.
MOST_ROWS = 32
# Rows from which they are put in order of their pairs first: fewer are multiplied as they come.
SORT_FROM_ROWS = 2048


def can(p: Lora) -> str | None:
    if p.empty:
        return "an operand is empty"
    if p.dtypes[0] not in HALVES or len(set(p.dtypes)) != 1:
        return f"needs {' or '.join(HALVES)} alike"
    return extension.rules().lora_problem(rank=p.rank, k=p.k, n=p.n)


def pays(p: Lora) -> bool:
    return p.rows <= MOST_ROWS * p.pairs
