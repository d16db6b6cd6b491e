"""Formats that are known and not read, by what their layers look like, so that refusals name them.

Names of tensors: https://github.com/vllm-project/compressed-tensors (marlin_24.py),
https://github.com/bitsandbytes-foundation/bitsandbytes (``quant_state``),
https://github.com/mobiusml/hqq (hqq/core/quantize.py), https://github.com/Vahe1994/AQLM
(inference.py), https://github.com/IST-DASLab/marlin (marlin/__init__.py),
https://github.com/turboderp-org/exllamav2 and exllamav3, https://github.com/ModelCloud/GPTQModel
(qqq.py).
"""

from __future__ import annotations

from typing import NamedTuple

from .layer import Layer

E4M3 = ("float8_e4m3fn", "float8_e5m2")


class Unread(NamedTuple):
    name: str
    leaves: tuple[str, ...]
    dtypes: tuple[tuple[str, tuple[str, ...]], ...] = ()


UNREAD = (
    Unread("fine-grained FP8 experts, stacked (_scale_inv)", ("", "_scale_inv")),
    Unread("FP8 experts, stacked (_weight_scale)", ("", "_weight_scale"), (("", E4M3),)),
    Unread("marlin-24", (".weight_packed", ".meta")),
    Unread("bitsandbytes, 4 bits", (".weight", ".weight.absmax")),
    Unread("bitsandbytes, 8 bits", (".weight", ".SCB")),
    Unread("HQQ", (".W_q",)),
    Unread("AQLM", (".codes", ".codebooks")),
    Unread("EXL2", (".q_weight", ".q_scale")),
    Unread("EXL3", (".trellis", ".suh")),
    Unread("Marlin", (".B", ".s")),
    Unread("QQQ", (".B", ".s_channel")),
)
#: Values of ``quant_method``, which otherwise name their format.
METHODS = {"fbgemm_fp8": "FBGEMM FP8"}


def found(t: Layer) -> str | None:
    """The name of the format that a layer has, if it is one of these."""
    for unread in UNREAD:
        if all(map(t.has, unread.leaves)) and all(
            t.dtype(leaf) in names for leaf, names in unread.dtypes
        ):
            return unread.name
    return None
