"""Needs of the kernels of FP8's products: those of Hopper and of Blackwell take the same blocks.
"sm89" takes gradients of e5m2, too, and so does Hopper's where operands have a scale for each
matrix."""

from __future__ import annotations

from typing import Any

from . import extension, proven
from .problems import Fp8

_TILE, _LINE = (128, 128), (1, 128)
_MATRICES = None, None  # a scale for each


def mm(p: Fp8) -> str | None:
    """Why no kernel takes it. Lines that are no whole 16 bytes are padded."""
    return _codes(p, (_LINE, _TILE))


def mm_sm89(p: Fp8) -> str | None:
    """Why no kernel takes it."""
    return _codes(p, (_LINE, _TILE), e5m2=0)


def pays_sm89(p: Fp8) -> bool:
    """Where the instruction is one: Hopper's code makes 16-bit products of it."""
    del p
    return not proven.for_tests("sm89", extension.live_capabilities())


def mm_sm90(p: Fp8) -> str | None:
    """Why no kernel takes it."""
    if p.blocks == _MATRICES:
        return _codes(p, _MATRICES, e5m2=0)
    return mm(p)


def mm_config(p: Fp8) -> dict[str, Any]:
    """Hopper's, where rows may be the instruction's M."""
    first = extension.rules().fp8_rows_first_sm90
    return {"rows_first": first(rows=p.rows, segments=p.segments)} | fast_config(p)


def fast_config(p: Fp8) -> dict[str, Any]:
    return {"fast": True} if p.blocks == _MATRICES else {}


def wgrad(p: Fp8) -> str | None:
    """Why no kernel takes it."""
    return _codes(p, (_LINE, _LINE)) or _existing(p)


def wgrad_sm90(p: Fp8) -> str | None:
    """Why no kernel takes it."""
    if p.blocks == _MATRICES:
        either = 0 if p.elements[0] == "e5m2" else 1
        return _codes(p, _MATRICES, e5m2=either) or _existing(p)
    return wgrad(p)


def wgrad_sm89(p: Fp8) -> str | None:
    """Why no kernel takes it."""
    return _codes(p, (_LINE, _LINE), e5m2=1) or _existing(p)


def _existing(p: Fp8) -> str | None:
    if p.more_options and p.out_dtype != "float32":
        return "existing_out needs a float32 result"
    return None


def _codes(p: Fp8, blocks, e5m2: int | None = None) -> str | None:
    """``e5m2``: the operand whose codes may be of it."""
    if p.empty:
        return "an operand is empty"
    elements = ["e4m3" if i == e5m2 else name for i, name in enumerate(p.elements)]
    if e5m2 is not None and p.elements[e5m2] not in ("e4m3", "e5m2"):
        return "needs codes of e4m3 or e5m2"
    if elements != ["e4m3", "e4m3"]:
        return "needs codes of e4m3"
    return None if p.blocks == blocks else f"needs blocks of {blocks[0]} and {blocks[1]}"
