"""GPTQ layers, as AutoGPTQ, GPTQModel and AutoRound write them.

https://github.com/ModelCloud/GPTQModel: gptqmodel/nn_modules/qlinear/__init__.py (the last group of
K may be shorter: ``ceil(in_features / group_size)``), gptqmodel/quantization/config.py (names of
its config; ``dynamic``, the first pattern that matches; ``gptq_v2``, which stores z, not z - 1).
"""

from __future__ import annotations

import numpy as np

from .._quantized.format import FLOATS
from . import auto_round
from .bits import affine, pack, sorted_groups, unpack, words
from .layer import Format, Kind, Layer, Read

BITS = (2, 3, 4, 8)


def _own(t: Layer) -> Layer:
    """With what GPTQModel's ``dynamic`` says of this layer."""
    for pattern, override in t.parts("dynamic").items():
        match = t.match("dynamic", pattern, ("+:", "-:"))
        if match and pattern.startswith("-:"):
            raise t.error(f"config says it is not quantized: dynamic pattern {pattern!r}")
        if match:
            override = t.mapping(f"dynamic[{pattern!r}]", override)
            return t._replace(config={**t.config, **override})
    return t


def _read(t: Layer) -> Read:
    t, layout = auto_round.settled(_own(t), auto_round.GPTQ)
    bits = t.option(("bits", "wbits", "w_bit"), BITS)
    if bits is None:
        zeros, scales = t.shape_of(t.prefix + ".qzeros"), t.shape_of(t.prefix + ".scales")
        fits = [b for b in BITS if zeros and scales and zeros[-1] * 32 == scales[-1] * b]
        such = f", or config={{..., 'bits': {fits[0]}}}, which fits .qzeros" if fits else ""
        raise t.error(f"config says no bits: pass the checkpoint's config.json{such}")
    said = t.option(("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    v2 = (layout or said) == "gptq_v2"
    t.option("is_marlin_format", (False,))
    t.option("pack_dtype", ("int32",))
    scales = t.get(".scales", FLOATS, "K/group_size, N", (None, None))
    groups, n = scales.shape
    if n * bits % 32:
        raise t.error(f".scales has {n} columns: at {bits} bits not whole words of zero points")
    qzeros = t.get(".qzeros", ("int32",), "K/group_size, N*bits/32", (groups, n * bits // 32))
    packed = t.get(".qweight", ("int32",), "K*bits/32, N", (None, n))
    k, rest = divmod(len(packed) * 32, bits)
    # Static groups are those of K as it is stored.
    ordered = t.option("desc_act", (True, False)) and not t.option("static_groups", (True, False))
    if ordered and groups > 1 and not t.has(".g_idx"):
        raise t.error(
            f"config says desc_act=True, but there is no tensor {t.prefix + '.g_idx'!r} that gives "
            "each channel its group"
        )
    g_idx = t.get(".g_idx", ("int32",), "K", (k,)) if t.has(".g_idx") and not rest else None
    if g_idx is not None and t.option(("group_size", "q_group_size")) is None:
        size = max(int(np.count_nonzero(g_idx == 0)), 1)
    else:
        size = t.group_size(k, groups, needed="config={{..., 'group_size': {}}}")
    if rest or size % 32 or k % 32:
        raise t.error(f"group_size={size} of K={k} is not a multiple of 32")
    packed, order = words(packed.T), None
    if g_idx is not None:
        order = sorted_groups(t, ".g_idx", g_idx, groups, size)
        if order is not None:
            packed = pack(unpack(packed, bits)[:, order], bits)
    zeros = unpack(words(qzeros), bits)
    if not v2:
        if np.any(zeros == 2**bits - 1):
            raise t.error(
                f".qzeros of format v1 holds {2**bits - 1}, which libraries read as a zero point "
                f"of 0, of {2**bits}, or as a borrow from its neighbour: convert it to gptq_v2"
            )
        zeros += np.uint8(1)
    sym = t.option("sym", (True, False)) is True
    if sym and np.any(zeros != 2**bits // 2):
        raise t.error(
            f"config says sym=True, but .qzeros gives zero points other than {2**bits // 2}: is "
            "checkpoint_format right?"
        )
    q = affine(t, packed, scales.T, np.ascontiguousarray(zeros.T), bits, size, keep=sym)
    if not t.reorder:
        return q, None
    return q, np.arange(k, dtype=np.int32) if order is None else order


FORMAT = Format(
    kinds=(
        Kind(
            "2, 3, 4, 8 bits, v1 and v2",
            (".qweight", ".qzeros", ".scales"),
            (".g_idx", ".bias"),
            _read,
        ),
    ),
    methods=("gptq", *auto_round.METHODS),
    needs="its bits, group_size and checkpoint_format",
)
