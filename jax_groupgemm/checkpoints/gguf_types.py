"""The types of GGUF tensors, by the numbers that files have: sizes of their blocks, and blocks.

https://github.com/ggml-org/ggml (ggml.h: ``enum ggml_type``; ggml-common.h: the blocks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Type(NamedTuple):
    """A type of tensors.

    Attributes:
      name: as ggml has it.
      elements, nbytes: of a block. No bytes: they are not known.
    """

    name: str
    elements: int
    nbytes: int


#: Those that are arrays, by names that safetensors files have too.
PLAIN = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")
FLOATS = ("F32", "F16", "BF16")

TYPES: dict[int, Type] = {
    number: Type(*about)
    for number, about in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
        2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
        29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
        # Of older versions of ggml, which later ones removed.
        4: ("Q4_2", 1, 0), 5: ("Q4_3", 1, 0), 31: ("Q4_0_4_4", 1, 0), 32: ("Q4_0_4_8", 1, 0),
        33: ("Q4_0_8_8", 1, 0), 36: ("IQ4_NL_4_4", 1, 0), 37: ("IQ4_NL_4_8", 1, 0),
        38: ("IQ4_NL_8_8", 1, 0),
    }.items()
}  # fmt: skip
BY_NAME = {kind.name: kind for kind in TYPES.values()}


def of_number(number: int) -> Type:
    """The type, also one that is not known."""
    return TYPES.get(number) or Type(f"type {number}", 1, 0)


class Blocks:
    """A tensor of a GGUF file whose elements are codes, in blocks; read when asked for.

    ``jgg.checkpoints.linear`` and ``experts``, with ``format="gguf"``, make weights of it.

    Attributes:
      type: ggml's name, such as ``"Q4_K"``.
      shape: in elements, ``(..., N, K)``; blocks run along the last axis.
    """

    def __init__(
        self, type: str, shape: tuple[int, ...], read: Callable[[int, int], np.ndarray]
    ) -> None:
        self.type, self.shape, self._read = type, shape, read

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The bytes of some rows, uint8 ``(rows, bytes of a row)``; leading axes are one."""
        return self._read(start, stop)

    def __array__(self, dtype=None, copy=None):
        raise TypeError(
            f"it has blocks of {self.type}, which "
            "jgg.checkpoints.linear(tensors, prefix, format='gguf') reads"
        )

    def __repr__(self) -> str:
        return f"Blocks({self.type}, shape={self.shape})"
