"""MLX's quantized layers, as ``mlx.nn.QuantizedLinear`` and ``QuantizedSwitchLinear`` store them.

https://github.com/ml-explore/mlx-lm (mlx_lm/utils.py: ``config["quantization"]``, in which a layer
of other bits has an entry of its own).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .._quantized.format import FORMATS
from .bits import F32
from .layer import SECTIONS, Format, Kind, Layer, Read, spellings
from .nvfp4 import multiplier

#: The K of layers, by the last part of their names: what a model's config calls it.
HIDDEN = ("hidden_size", "dim", "d_model", "n_embd", "model_dim")
INNER = ("intermediate_size", "moe_intermediate_size", "intermediate_size_mlp", "ffn_dim")
#: Vectors of a block that are as long as the K of layers that read its residual stream.
NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "attention_norm",
    "ffn_norm",
)  # fmt: skip
SIZES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), HIDDEN),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), HIDDEN),
    "down_proj": INNER,
}


def _sizes(mode: str) -> tuple[int, ...]:
    """Group sizes that MLX has, the default first."""
    return (64, 32, 128) if mode == "affine" else FORMATS[mode].group_sizes


def _own(t: Layer) -> Layer:
    """With what config says of this layer, which also stands under the names of other releases."""
    found = [(name, t.config[name]) for name in spellings(t.prefix) if name in t.config]
    if not found:
        return t
    name, own = found[0]
    if own is False:
        raise t.error("config says it is not quantized")
    return t if own is None or own is True else t._replace(config=t.mapping(name, own))


def _read(t: Layer) -> Read:
    t = _own(t)
    mode = t.option("mode", ("affine", "mxfp4", "mxfp8", "nvfp4")) or "affine"
    kind = FORMATS[mode]
    bits = t.option("bits", kind.bits) or kind.bits[0]
    size = t.option("group_size", _sizes(mode)) or _sizes(mode)[0]
    lead = (None,) * t.stacked
    _is_of_the_shape(t, mode, bits, size)
    weight = t.get(".weight", ("uint32",), "N, K*bits/32", (*lead, None, None))
    *lead, words = weight.shape
    if words * 32 % (bits * size):
        raise t.error(f".weight has {words} words a row, not a multiple of {bits} bits by {size}")
    expected = (*lead, words * 32 // bits // size)
    _is_of_its_scales(t, words, mode, bits, size)
    of = f"because .weight has {words} words a row, bits={bits} and group_size={size}"
    scales = t.get(".scales", kind.scales, "N, K/group_size", expected, of)
    if t.has(".biases") != kind.has_biases:
        has = "has" if t.has(".biases") else "has no"
        raise t.error(f"{has} .biases, but its mode is {mode!r}")
    biases = global_scale = None
    if kind.has_biases:
        biases = t.get(".biases", (scales.dtype.name,), "N, K/group_size", expected, of)
        if not t.expected:  # which is checked, and says more
            _is_of_the_model(t, words, bits, size)
    if t.has(".global_scale"):
        if not kind.takes_global_scale:
            raise t.error(f"has .global_scale, but its mode is {mode!r}")
        global_scale = multiplier(t, ".global_scale", t.scalar(".global_scale") / F32(2688))
    q = t.quantized(weight, scales, biases, global_scale, mode=mode, bits=bits, group_size=size)
    return q, None


def _of_product(mode: str, product: int) -> list[tuple[int, int]]:
    """Bits and group sizes of a mode by which a group has so many bits."""
    known = FORMATS[mode]
    return [(b, s) for b in sorted(known.bits) for s in sorted(_sizes(mode)) if b * s == product]


def _is_of_the_shape(t: Layer, mode: str, bits: int, size: int) -> None:
    """Raise where the caller expects another shape. Nothing is read for it but shapes."""
    stored, groups = t.shape_of(t.prefix + ".weight"), t.shape_of(t.prefix + ".scales")
    if not t.expected or stored is None or len(stored) != len(t.expected) or not groups:
        return
    *lead, words = stored
    if words * 32 % bits:
        return  # the layer has no K
    k, instead = t.expected[-1], ""
    product = words * 32 // max(groups[-1], 1)
    fits = [(b, s) for b, s in _of_product(mode, product) if words * 32 == b * (k or 0)]
    if fits and words * 32 // bits != k:
        said = f"bits={fits[0][0]}, group_size={fits[0][1]}"
        entry = f"{t.prefix!r}: {{'bits': {fits[0][0]}, 'group_size': {fits[0][1]}}}"
        instead = (
            f", as of {said}: config may have them under another name of this layer. If it was "
            f"quantized so, add {entry} to config's quantization"
        )
    why = f" by config's bits={bits}, group_size={size}"
    t.check_shape((*lead, words * 32 // bits), why, instead)


def _is_of_its_scales(t: Layer, words: int, mode: str, bits: int, size: int) -> None:
    """Raise where weight and scales have another number of bits a group than config says."""
    groups = (t.shape_of(t.prefix + ".scales") or (0,))[-1:]
    if not groups or not groups[0] or words * 32 % groups[0]:
        return  # scales are of another shape, whatever config says
    stored = words * 32 // groups[0]
    if stored == bits * size:
        return
    fits = [f"bits={b}, group_size={s}" for b, s in _of_product(mode, stored)]
    raise t.error(
        f"config says bits={bits}, group_size={size}, which is {bits * size} bits a group, but "
        f".weight has {words} words for the {groups[0]} groups of .scales, {stored} bits a group, "
        f"as of {' or '.join(fits) or f'no format of mode {mode!r}'}"
    )


def _of_other_tensors(t: Layer) -> dict[int, str]:
    """The K of this layer by tensors that are not quantized along it, and which those are."""
    where, _, name = t.prefix.rpartition(".")
    found = {}
    if name == "down_proj":
        for other in ("up_proj", "gate_proj"):
            shape = t.shape_of(f"{where}.{other}.weight")
            if shape is not None and len(shape) >= 2:
                found[shape[-2]] = f"{where}.{other}.weight has {shape[-2]} rows"
    elif SIZES.get(name) is HIDDEN:
        match = re.match(r".*\blayers\.\d+\.", t.prefix)
        block = "" if match is None else match[0]
        for norm in NORMS if block else ():
            shape = t.shape_of(f"{block}{norm}.weight")
            if shape is not None and len(shape) == 1:
                found[shape[0]] = f"{block}{norm}.weight has {shape[0]} elements"
    return found


def _is_of_the_model(t: Layer, words: int, bits: int, size: int) -> None:
    """Raise where other bits would give the K that the model has, and these do not.

    The shapes of 8 bits by 32 are those of 4 bits by 64 and twice the K, so a layer's own tensors
    do not say. Of the usual layers, whole configs do, and the tensors beside them.
    """
    keys = SIZES.get(t.prefix.rpartition(".")[2], ())
    of_several = "shared" in t.prefix  # experts as one
    own, all_sizes = {}, set()
    for key, value in _numbers(t.model):
        all_sizes.add(value)
        if key in keys and not of_several:
            own[value] = key
    k = words * 32 // bits
    others = _of_other_tensors(t)
    for other in FORMATS["affine"].bits:
        by, rest = divmod(bits * size, other)
        if by in _sizes("affine") and not rest and other != bits:
            its = words * 32 // other
            if its in others and k not in others:
                raise t.error(
                    f"config says bits={bits}, group_size={size}, by which K is {k}, but "
                    f"{others[its]}, as of bits={other}, group_size={by}"
                )
            if its in own and k not in all_sizes:
                raise t.error(
                    f"config says bits={bits}, group_size={size}, by which K is {k}, but "
                    f"{own[its]} is {its}, as of bits={other}, group_size={by}"
                )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    parts = [config]
    while parts:
        for key, value in parts.pop().items():
            if isinstance(value, Mapping) and key not in SECTIONS:
                parts.append(value)
            elif isinstance(value, int):
                yield key, value


FORMAT = Format(
    kinds=(
        Kind(
            "affine, mxfp4, mxfp8, nvfp4",
            (".weight", ".scales"),
            (".biases", ".global_scale", ".bias"),
            _read,
            stacked=(False, True),
        ),
    ),
    methods=(),
    needs="its bits, group_size and mode",
    sections=("quantization", "quantization_config"),
)
