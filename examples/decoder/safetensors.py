"""Writes a safetensors file. ``jgg.checkpoints.open`` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .weights import FLOAT_HEADERS, FLOATS

_NAMES: dict[str, str] = dict(zip(FLOATS, FLOAT_HEADERS, strict=True))


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Tensors of floats, as PyTorch's libraries expect them."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, a in tensors.items():
        header[name] = {
            "dtype": _NAMES[a.dtype.name], "shape": a.shape, "data_offsets": (end, end + a.nbytes),
        }  # fmt: skip
        end += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for a in tensors.values():
            file.write(a.tobytes())
