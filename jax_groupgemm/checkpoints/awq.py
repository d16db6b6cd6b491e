"""AutoAWQ's ``gemm`` layers, also as GPTQModel and AutoRound write them.

https://github.com/casper-hansen/AutoAWQ (awq/modules/linear/gemm.py),
https://github.com/ModelCloud/GPTQModel (gptqmodel/quantization/config.py: names of its config),
https://github.com/intel/auto-round (auto_round/inference/backend.py: ``packing_format``).
"""

from __future__ import annotations

import numpy as np

from .._quantized.format import FLOATS
from . import auto_round
from .bits import affine, words
from .layer import Format, Kind, Layer, Read

LANES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds column j


def _codes(packed) -> np.ndarray:
    """uint8 codes ``(8 * W, R)`` of words ``(R, W)``."""
    packed = words(packed.T)
    out = np.empty((packed.shape[0], 8, packed.shape[1]), np.uint8)
    for column, lane in enumerate(LANES):
        out[:, column] = (packed >> np.uint32(4 * lane)) & np.uint32(15)
    return out.reshape(-1, packed.shape[1])


def _read(t: Layer) -> Read:
    # Names of layers, or of modules at any depth: "mlp.gate" is not in "mlp.gate_proj".
    inside = lambda entry: f".{entry.strip('.')}." in f".{t.prefix}."
    t.refuse("modules_to_not_convert", inside)
    t, _ = auto_round.settled(t, auto_round.AWQ)
    t.option(("bits", "w_bit", "wbits"), (4,))
    t.option("zero_point", (True,))
    t.option(("version", "format", "checkpoint_format"), ("gemm", "GEMM"))
    t.option("pack_dtype", ("int32",))
    if t.option("backend") == "llm-awq":
        raise t.error("config says backend='llm-awq', expected 'autoawq'")
    scales = t.get(".scales", FLOATS, "K/group_size, N", (None, None))
    groups, n = scales.shape
    if n % 8:
        raise t.error(f".scales has {n} columns, not a multiple of 8")
    qweight = t.get(".qweight", ("int32",), "K, N/8", (None, n // 8))
    qzeros = t.get(".qzeros", ("int32",), "K/group_size, N/8", (groups, n // 8))
    # AutoAWQ takes no K that is not a multiple of the group size.
    size = t.group_size(len(qweight), groups)
    if size % 32 or len(qweight) % 32:
        raise t.error(f"group_size={size} is not a multiple of 32")
    codes = _codes(qweight)
    packed = words(codes[:, ::2] | codes[:, 1::2] << np.uint8(4))
    return affine(t, packed, scales.T, _codes(qzeros), 4, size), None


FORMAT = Format(
    kinds=(Kind("gemm, 4 bits", (".qweight", ".qzeros", ".scales"), (".bias",), _read),),
    methods=("awq", *auto_round.METHODS),
)
