"""MXFP4 experts of OpenAI's gpt-oss.

https://github.com/openai/gpt-oss (gpt_oss/torch/weights.py).
"""

from __future__ import annotations

import numpy as np

from .bits import words
from .layer import Format, Kind, Layer, Read


def _read(t: Layer) -> Read:
    interleaved = {"gate_up_proj": True, "down_proj": False}.get(t.prefix.rpartition(".")[2])
    if interleaved is None:
        raise t.error("neither 'gate_up_proj', whose rows are interleaved, nor 'down_proj'")
    blocks = t.get("_blocks", ("uint8",), "N, K/32, 16", (None, None, None, 16))
    scales = t.get("_scales", ("uint8",), "N, K/32", blocks.shape[:-1])
    t.check_shape((*blocks.shape[:2], blocks.shape[2] * 32))
    weight = words(blocks.reshape(*blocks.shape[:-2], -1))
    if interleaved:
        if weight.shape[1] % 2:
            raise t.error(f"_blocks has {weight.shape[1]} rows, not gate and up by turns")
        weight, scales = (np.concatenate([x[:, ::2], x[:, 1::2]], axis=1) for x in (weight, scales))
    return t.quantized(weight, scales, mode="mxfp4", bits=4, group_size=32), None


FORMAT = Format(
    kinds=(Kind("MXFP4", ("_blocks", "_scales"), ("_bias",), _read, stacked=(True,)),),
    methods=("mxfp4",),
)
