"""Needs of the kernels of FP8's products: those of Hopper and of Blackwell take the same."""

from __future__ import annotations

from typing import Any

from . import extension
from .problems import Fp8

_TILE, _LINE = (128, 128), (1, 128)


def mm(p: Fp8) -> str | None:
    """Why no kernel takes it. Lines that are no whole 16 bytes are padded."""
    return _codes(p, (_LINE, _TILE))


def mm_config(p: Fp8) -> dict[str, Any]:
    """Hopper's, where rows may be the instruction's M."""
    first = extension.rules().fp8_rows_first_sm90
    return {"rows_first": first(rows=p.rows, segments=p.segments)}


def wgrad(p: Fp8) -> str | None:
    """Why no kernel takes it."""
    if why := _codes(p, (_LINE, _LINE)):
        return why
    if p.more_options and p.out_dtype != "float32":
        return "existing_out needs a float32 result"
    return None


def _codes(p: Fp8, blocks) -> str | None:
    if p.empty:
        return "an operand is empty"
    if p.elements != ("e4m3", "e4m3"):
        return "needs codes of e4m3"
    return None if p.blocks == blocks else f"needs blocks of {blocks[0]} and {blocks[1]}"
