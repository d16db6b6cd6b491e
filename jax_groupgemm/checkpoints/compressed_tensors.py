"""compressed-tensors' layers, as llm-compressor writes them.

https://github.com/vllm-project/compressed-tensors: compressors/pack_quantized (codes ``q +
2**(bits - 1)`` in one bit stream along K; zero points in one along N), compressors/naive_quantized
(int8, float8), compressors/nvfp4, mxfp4 and mxfp8, quantization/quant_args.py (``strategy``,
``block_structure``, ``actorder``), quantization/lifecycle/initialize.py (shapes of scales) and
forward.py (``(q - z) * scale``; a ``g_idx`` that holds -1 says nothing).
"""

from __future__ import annotations

import numpy as np

from .._quantized.format import FLOATS
from . import auto_round, fp8, nvfp4
from .bits import F32, affine, pack, sorted_groups, unpack, words
from .layer import Format, Kind, Layer, Read, one, spellings

SAID = "'group_size': {} in the weights of its config_groups"
BITS = (2, 3, 4, 5, 6, 8)
E8M0 = ("uint8", "float8_e8m0fnu")
BY_GROUP = ("group", "dynamic", True)  # values of actorder that give each channel its group


def _is_named(t: Layer, key: str, entry: str) -> bool:
    return (
        t.match(key, entry, ("re:",)) if entry.startswith("re:") else entry in spellings(t.prefix)
    )


def _group(t: Layer) -> Layer | None:
    """With the one of ``config_groups`` that names a layer; if none does, the one of all linear
    layers, or of all."""
    groups = {
        key: t._replace(config=t.mapping(f"config_groups[{key!r}]", group))
        for key, group in t.parts("config_groups").items()
    }
    if not groups:
        return None
    targets = {key: group.names("targets") for key, group in groups.items()}
    ways = (
        lambda entry: not entry.startswith("re:") and _is_named(t, "targets", entry),
        lambda entry: entry.startswith("re:") and _is_named(t, "targets", entry),
        lambda entry: entry == "Linear",
    )
    found = [[key for key in groups if any(map(way, targets[key]))] for way in ways]
    found += [[key for key in groups if not targets[key]], [*groups] if len(groups) == 1 else []]
    chosen = next(filter(None, found), None)
    if chosen is None:
        raise t.error(f"config_groups {', '.join(map(repr, groups))} do not name it")
    first = groups[chosen[0]]
    for key in chosen[1:]:
        if any(groups[key].config.get(k) != first.config.get(k) for k in ("format", "weights")):
            raise t.error(f"config_groups {chosen[0]!r} and {key!r} both name it, and differ")
    return first


def _choose(t: Layer, kinds) -> tuple[Layer, Kind]:
    t.refuse("ignore", lambda entry: _is_named(t, "ignore", entry))
    t, layout = auto_round.settled(t, auto_round.COMPRESSED)
    if layout is not None:  # no config_groups: the tensors say which kind it is
        return one(t, [kind for kind in kinds if kind.read in (_nvfp4, _mxfp4, _mxfp8)])
    known = {kind.name: kind for kind in kinds}
    said = t.option("format", (*known, "mixed-precision"))
    group = _group(t)
    own = None if group is None else group.option("format", tuple(known))
    if own is not None and said not in (None, own, "mixed-precision"):
        raise t.error(f"config contradicts itself: format={said!r}, and {own!r} of its group")
    said = own or said
    weights = {} if group is None else group.parts("weights")
    t = t._replace(config=weights)
    return (t, known[said]) if said in known else one(t, kinds)


def _is_float(t: Layer, bits: int, size: int) -> None:
    """Raise where config says other codes or groups."""
    t.option(("num_bits", "bits"), (bits,))
    t.option("type", ("float",))
    t.option("group_size", (size,))


def _nvfp4(t: Layer) -> Read:
    _is_float(t, 4, 16)
    value = t.scalar(".weight_global_scale")
    with np.errstate(divide="ignore", over="ignore"):
        inverse = F32(1) / value if value > 0 else F32(np.nan)
    return nvfp4.read(t, ".weight_packed", ".weight_global_scale", inverse)


def _mxfp4(t: Layer) -> Read:
    _is_float(t, 4, 32)
    packed = t.get(".weight_packed", ("uint8",), "N, K/2", (None, None))
    n, half = packed.shape
    if half % 16:
        raise t.error(f".weight_packed has K = {2 * half}, not a multiple of 32")
    scales = t.get(".weight_scale", E8M0, "N, K/32", (n, half // 16)).view(np.uint8)
    return t.quantized(words(packed), scales, mode="mxfp4", bits=4, group_size=32), None


def _mxfp8(t: Layer) -> Read:
    _is_float(t, 8, 32)
    codes = t.get(".weight", ("float8_e4m3fn",), "N, K", (None, None))
    n, k = codes.shape
    if k % 32:
        raise t.error(f".weight has K = {k}, not a multiple of 32")
    scales = t.get(".weight_scale", E8M0, "N, K/32", (n, k // 32)).view(np.uint8)
    codes = words(codes.view(np.uint8))
    return t.quantized(codes, scales, mode="mxfp8", bits=8, group_size=32), None


def _float_quantized(t: Layer) -> Read:
    t.option("num_bits", (8,))
    t.option("type", ("float",))
    strategy = t.option("strategy", ("tensor", "channel", "group", "block"))
    if strategy == "block":
        block = fp8.block_of(t, "block_structure")
        if block is None:
            raise t.error(
                "config says strategy='block', and no block_structure, expected two sizes"
            )
        return fp8.in_blocks(t, ".weight_scale", block)
    if strategy == "group":
        codes = fp8.codes(t)
        scales = t.get(".weight_scale", FLOATS, "N, K/group_size", (len(codes), None))
        size = t.group_size(codes.shape[1], scales.shape[1], needed=SAID)
        return fp8.weight(codes, scales, (1, size))
    return fp8.of_rows_or_all(t, ".weight_scale", strategy)


def _bits(t: Layer) -> int:
    t.option("type", ("int",))
    bits = t.option("num_bits", BITS)
    if bits is None:
        raise t.error(
            "config says no num_bits, without which integers cannot be read: pass the checkpoint's "
            "config.json, whose config_groups say it"
        )
    return bits


def _pack_quantized(t: Layer) -> Read:
    bits = _bits(t)
    shape = t.get(".weight_shape", ("int64", "int32"), "2", (2,))
    packed = t.get(".weight_packed", ("int32",), "N, K*bits/32", (None, None))
    n, count = packed.shape
    k = int(shape[1])
    if shape[0] != n or not 0 < k <= count * 32 or -(-k * bits // 32) != count:
        raise t.error(
            f".weight_packed has shape {packed.shape}, but .weight_shape is {tuple(shape.tolist())}"
            f" and config says num_bits={bits}"
        )
    if k % 32:
        raise t.error(f".weight_shape has K = {k}, not a multiple of 32")
    zeros = None
    if t.has(".weight_zero_point"):
        dtypes, letters = ("int32",), "N*bits/32, K/group_size"
        zeros = t.get(".weight_zero_point", dtypes, letters, (-(-n * bits // 32), None))
        stream = words(zeros.T)  # along N, to whole 32 codes
        stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % bits)))
        zeros = unpack(stream, bits)[:, :n].T
    return _integers(t, words(packed), zeros, bits, n, k)


def _int_quantized(t: Layer) -> Read:
    bits = _bits(t)
    codes = t.get(".weight", ("int8",), "N, K", (None, None))
    n, k = codes.shape
    if k % 32:
        raise t.error(f".weight has K = {k}, not a multiple of 32")
    zeros = None
    if t.has(".weight_zero_point"):
        zeros = t.array(".weight_zero_point", ("int8",))
        zeros = _unsigned(t, ".weight_zero_point", zeros, bits)
        zeros = np.broadcast_to(zeros, (n, 1)) if zeros.shape in ((), (1,)) else zeros
    codes = _unsigned(t, ".weight", codes, bits)
    return _integers(t, words(codes) if bits == 8 else pack(codes, bits), zeros, bits, n, k)


def _unsigned(t: Layer, leaf: str, codes, bits: int) -> np.ndarray:
    """``q + 2**(bits - 1)`` of int8 codes, which have so many bits."""
    half = 2 ** (bits - 1)
    if bits < 8 and np.any((codes < -half) | (codes >= half)):
        raise t.error(f"{leaf} holds codes of more than {bits} bits")
    return codes.view(np.uint8) + np.uint8(half)


def _integers(t: Layer, packed, zeros, bits: int, n: int, k: int) -> Read:
    """The layer of codes and zero points that have 2**(bits - 1) added to them."""
    scales = t.array(".weight_scale", FLOATS)
    strategy = t.option("strategy", ("tensor", "channel", "group"))
    if scales.shape in ((), (1,)) and strategy in (None, "tensor"):
        scales = np.full((n, 1), scales.reshape(()), scales.dtype)
    if scales.ndim != 2 or len(scales) != n or (scales.shape[1] != 1 and strategy == "channel"):
        of = "" if strategy is None else f" of strategy={strategy!r}"
        raise t.error(f".weight_scale has shape {scales.shape}, expected (N, K/group_size){of}")
    groups = scales.shape[1]
    size = t.group_size(k, groups, needed=SAID)
    symmetric = t.option("symmetric", (True, False))
    if symmetric is not None and symmetric != (zeros is None):
        has = "no" if zeros is None else "a"
        raise t.error(f"config says symmetric={symmetric}, but there is {has} .weight_zero_point")
    if zeros is not None and zeros.shape != scales.shape:
        raise t.error(f".weight_zero_point has {zeros.shape[-1]} groups, but scales have {groups}")
    order = None
    if t.has(".weight_g_idx"):
        g_idx = t.get(".weight_g_idx", ("int32", "int64"), "K", (k,))
        if not np.any(g_idx == -1):
            order = sorted_groups(t, ".weight_g_idx", g_idx, groups, size)
    elif t.option("actorder") in BY_GROUP and groups > 1:
        raise t.error(
            "config says actorder, but there is no .weight_g_idx that gives each channel its group"
        )
    if order is not None:
        packed = pack(unpack(packed, bits)[:, order], bits)
    keep = zeros is None
    zeros = np.full((1, 1), 2 ** (bits - 1)) if zeros is None else zeros
    exact = scales.dtype != F32
    q = affine(t, packed, scales, zeros, bits, size, leaf=".weight_scale", keep=keep, exact=exact)
    if not t.reorder:
        return q, None
    return q, np.arange(k, dtype=np.int32) if order is None else order


ACTIVATIONS = (".input_scale", ".input_zero_point", ".input_global_scale", ".bias")
FORMAT = Format(
    kinds=(
        Kind(
            "nvfp4-pack-quantized",
            (".weight_packed", ".weight_scale", ".weight_global_scale"),
            ACTIVATIONS,
            _nvfp4,
        ),
        Kind(
            "pack-quantized",
            (".weight_packed", ".weight_scale", ".weight_shape"),
            (".weight_zero_point", ".weight_g_idx", *ACTIVATIONS),
            _pack_quantized,
        ),
        Kind(
            "int-quantized",
            (".weight", ".weight_scale"),
            (".weight_zero_point", ".weight_g_idx", *ACTIVATIONS),
            _int_quantized,
            dtype=(".weight", ("int8",)),
        ),
        Kind(
            "mxfp4-pack-quantized",
            (".weight_packed", ".weight_scale"),
            ACTIVATIONS,
            _mxfp4,
            dtype=(".weight_scale", E8M0),
        ),
        Kind(
            "mxfp8-quantized",
            (".weight", ".weight_scale"),
            ACTIVATIONS,
            _mxfp8,
            dtype=(".weight_scale", E8M0),
        ),
        Kind(
            "float-quantized",
            (".weight", ".weight_scale"),
            ACTIVATIONS,
            _float_quantized,
            dtype=(".weight", fp8.CODES),
        ),
    ),
    methods=("compressed-tensors", *auto_round.METHODS),
    choose=_choose,
)
