"""FP8 layers: e4m3 codes and the float32 scales that multiply them.

Fine-grained, https://huggingface.co/deepseek-ai/DeepSeek-V3 (``README_WEIGHTS.md``, and
``inference/kernel.py``: ``weight_scale_inv`` multiplies, in spite of its name, one number for 128 x
128 codes; the last blocks of either axis are cut), https://github.com/huggingface/transformers
(``FineGrainedFP8Config``: ``weight_block_size``, ``modules_to_not_convert``). One scale for a
layer, https://github.com/vllm-project/vllm (``quantization/fp8.py``: ``ignored_layers``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._quantized.array import Quantized
from .._quantized.format import FLOATS
from .bits import F32
from .layer import Format, Kind, Layer, Read
from .messages import brief, cut

CODES = ("float8_e4m3fn",)
SCALES = (*FLOATS, "float8_e8m0fnu")
TILE = (128, 128)


def codes(t: Layer) -> np.ndarray:
    return t.get(".weight", CODES, "N, K", (None, None))


def weight(codes, scales, block: tuple[int, int] | None) -> Read:
    columns = 0 if block is None else block[1]
    scales = np.asarray(scales).astype(F32, copy=False)
    return Quantized(codes, scales, mode="fp8", bits=8, group_size=columns, block=block), None


def in_blocks(t: Layer, leaf: str, block: tuple[int, int]) -> Read:
    """One scale for each block of rows and columns, the last of which may be cut."""
    codes_ = codes(t)
    expected = tuple(-(-n // size) for n, size in zip(codes_.shape, block, strict=True))
    letters = f"N/{block[0]}, K/{block[1]}"
    return weight(codes_, t.get(leaf, SCALES, letters, expected), block)


def of_rows_or_all(t: Layer, leaf: str, strategy: str | None = None) -> Read:
    """One scale for each row, or for all; config may say "channel" or "tensor"."""
    codes_ = codes(t)
    n, k = codes_.shape
    scales = t.array(leaf, FLOATS)
    if scales.shape in ((), (1,)) and strategy in (None, "tensor"):
        return weight(codes_, scales.reshape(()), None)
    if scales.shape not in ((n,), (n, 1)) or strategy == "tensor":
        expected = {"tensor": "one number", "channel": f"(N, 1) = {(n, 1)}"}
        either = expected.get(strategy or "", f"one number, or (N, 1) = {(n, 1)}")
        raise t.error(f"{leaf} has shape {scales.shape}, expected {either}")
    return weight(codes_, scales.reshape(n, 1), (1, k))


def block_of(t: Layer, key: str) -> tuple[int, int] | None:
    """Rows and columns, of a config that has them."""
    said = t.config.get(key)
    if said is None:
        return None
    known = isinstance(said, (list, tuple)) and len(said) == 2
    if not known or not all(isinstance(n, int) and n > 0 for n in said):
        raise t.error(f"config says {key}={brief(said)}, expected two sizes")
    return said[0], said[1]


def rows_to_join(op: str, names: Sequence[str], parts: Sequence[Quantized]) -> list[Quantized]:
    """Layers whose rows may be joined, each with the scales that it has."""
    out = []
    for i, (name, q) in enumerate(zip(names, parts, strict=True)):
        (n, k), block, scales = q.shape, q.block, q.scales
        if block is None:  # each row has that of its layer
            block, scales = (1, k), np.full((n, 1), scales)
        if i + 1 < len(parts) and n % block[0]:
            raise ValueError(
                f"jgg.checkpoints.{op}: {cut(name)} has {n} rows, which are not a multiple of "
                f"{block[0]}: {cut(names[i + 1])}, joined to it, would begin within a block of "
                "scales. Read them one by one"
            )
        out.append(weight(q.weight, scales, block)[0])
    return out


def _is_converted(t: Layer) -> None:
    inside = lambda entry: f".{entry.strip('.')}." in f".{t.prefix}."
    for key in ("modules_to_not_convert", "ignored_layers"):
        t.refuse(key, inside)
    t.option("fmt", ("e4m3", "float8_e4m3fn"))


def _fine_grained(t: Layer) -> Read:
    _is_converted(t)
    t.option("scale_fmt", ("float", "ue8m0"))
    leaf, block = ".weight_scale_inv", block_of(t, "weight_block_size")
    # transformers stores one scale for a layer under this name, too.
    if block is None and t.array(leaf, SCALES).shape in ((), (1,)):
        return of_rows_or_all(t, leaf)
    return in_blocks(t, leaf, block or TILE)


def _of_a_layer(t: Layer) -> Read:
    _is_converted(t)
    return of_rows_or_all(t, ".weight_scale")


FORMAT = Format(
    kinds=(
        Kind(
            "fine-grained", (".weight", ".weight_scale_inv"),
            (".input_scale", ".activation_scale", ".bias"), _fine_grained,
        ),
        Kind(
            "a scale for each layer or row", (".weight", ".weight_scale"),
            (".input_scale", ".k_scale", ".v_scale", ".bias"), _of_a_layer,
            dtype=(".weight", CODES),
        ),
    ),
    methods=("fp8",),
)  # fmt: skip
