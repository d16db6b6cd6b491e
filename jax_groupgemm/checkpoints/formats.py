"""Formats of quantized checkpoints: the tensors of one layer to a ``Quantized``.

A new format is a function here and a line in ``FORMATS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from .._core import check
from .._quantized.array import Quantized
from .._quantized.formats import FLOATS, MODES

F32 = np.float32


class Layer(NamedTuple):
    """The tensors under one prefix. Every error names the prefix or a tensor."""

    op: str
    prefix: str
    tensors: Mapping[str, Any]
    config: Mapping[str, Any]
    stacked: bool
    reorder: bool

    def error(self, text: str) -> ValueError:
        return ValueError(f"jgg.checkpoints.{self.op}: {self.prefix}: {text}")

    def has(self, leaf: str) -> bool:
        return self.prefix + leaf in self.tensors

    def array(self, leaf: str, dtypes: Sequence[str]) -> np.ndarray:
        value = np.asarray(self.tensors[self.prefix + leaf])
        if value.dtype.name not in dtypes:
            raise TypeError(
                f"jgg.checkpoints.{self.op}: {self.prefix}{leaf} must be {' or '.join(dtypes)}, "
                f"got dtype {value.dtype.name}"
            )
        if value.size == 0:
            raise self.error(f"{leaf} of shape {value.shape} is empty")
        return value

    def get(self, leaf: str, dtypes: Sequence[str], letters: str, expected: Sequence) -> np.ndarray:
        """The array ``prefix + leaf``, of the shape ``expected`` (None: any size)."""
        value = self.array(leaf, dtypes)
        letters = f"G, {letters}" if self.stacked else letters
        check.shape(f"checkpoints.{self.op}", self.prefix + leaf, value, expected, letters)
        return value

    def scalar(self, leaf: str) -> Any:
        value = self.array(leaf, ("float32",))
        if value.shape not in ((), (1,)):
            raise self.error(f"{leaf} has shape {value.shape}, expected one number")
        return value.reshape(())[()]

    def option(self, keys: str | tuple[str, ...], known: tuple | None = None):
        """What config says under any of ``keys``; None where it says nothing."""
        keys = (keys,) if isinstance(keys, str) else keys
        found = {key: self.config[key] for key in keys if self.config.get(key) is not None}
        out = next(iter(found.values()), None)
        for key, value in found.items():
            if known is not None and value not in known:
                expected = " or ".join(map(repr, known)) or "nothing"
                raise self.error(f"config says {key}={value!r}, expected {expected}")
            if value != out:
                said = ", ".join(f"{k}={v!r}" for k, v in found.items())
                raise self.error(f"config contradicts itself: {said}")
        return out if known is None or out is None else known[known.index(out)]  # 4, not 4.0

    def mapping(self, said: str, value) -> Mapping[str, Any]:
        """A part of config, which must be a dict."""
        if not isinstance(value, Mapping):
            raise self.error(f"config says {said}={value!r}, expected a dict")
        return value

    def parts(self, key: str) -> Mapping[str, Any]:
        value = self.config.get(key)
        return {} if value is None else self.mapping(key, value)

    def match(self, key: str, entry: str, marks: tuple[str, ...]) -> bool:
        """Whether the layer's name begins as the regular expression after a mark says."""
        pattern = entry[len(marks[0]) * entry.startswith(marks) :]
        try:
            return re.match(pattern, self.prefix) is not None
        except re.error as error:
            raise self.error(f"config's {key} pattern {entry!r}: {error}") from error

    def names(self, key: str) -> Sequence[str]:
        """A list of names, or of patterns of them."""
        value = self.config.get(key)
        value = [] if value is None else value
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise self.error(f"config says {key}={value!r}, expected a list of names")
        return value

    def refuse(self, key: str, names: Callable[[str], bool]) -> None:
        """Raise where ``key`` lists what is not quantized, and an entry names this layer."""
        for entry in self.names(key):
            if names(entry):
                raise self.error(f"config says it is not quantized: {key} {entry!r}")

    def and_outer(self) -> Iterator[str]:
        """The layer's name, and those of the modules that it is in, from the inside out."""
        name = self.prefix
        while name:
            yield name
            name = name.rpartition(".")[0]

    def group_size(self, k: int, groups: int) -> int:
        said = self.option(("group_size", "q_group_size"))
        size = k // groups
        if k % groups or (said not in (None, size) and (said, groups) != (-1, 1)):
            stated = "" if said is None else f" and config says group_size={said}"
            raise self.error(f"scales have {groups} groups, but K is {k}{stated}")
        return size

    def quantized(self, weight, scales, biases=None, global_scale=None, *, mode, bits, group_size):
        known = MODES[mode]
        if bits not in known.bits or group_size not in known.group_sizes:
            raise self.error(f"{bits} bits in groups of {group_size} are not of mode {mode!r}")
        return Quantized(
            weight, scales, biases, global_scale, mode=mode, bits=bits, group_size=group_size
        )


Read = tuple[Quantized, np.ndarray | None]  # and, where K was reordered, its order


def _words(x) -> np.ndarray:
    """The bytes along the last axis as uint32."""
    return np.ascontiguousarray(x).view(np.uint32)


def _unpack(words, bits: int) -> np.ndarray:
    """uint8 codes of a bit stream along the last axis."""
    count, width = 32 // gcd(bits, 32), bits // gcd(bits, 32)
    chunk = words.reshape(*words.shape[:-1], -1, width)
    out = np.empty((*chunk.shape[:-1], count), np.uint8)
    for i in range(count):
        word, offset = divmod(i * bits, 32)
        code = chunk[..., word] >> np.uint32(offset)
        if offset + bits > 32:
            code |= chunk[..., word + 1] << np.uint32(32 - offset)
        out[..., i] = code & np.uint32(2**bits - 1)
    return out.reshape(*words.shape[:-1], -1)


def _pack(codes, bits: int) -> np.ndarray:
    """The inverse of :func:`_unpack`."""
    count, width = 32 // gcd(bits, 32), bits // gcd(bits, 32)
    chunk = codes.reshape(*codes.shape[:-1], -1, count)
    out = np.zeros((*chunk.shape[:-1], width), np.uint32)
    for i in range(count):
        word, offset = divmod(i * bits, 32)
        code = chunk[..., i].astype(np.uint32)
        out[..., word] |= code << np.uint32(offset)
        if offset + bits > 32:
            out[..., word + 1] |= code >> np.uint32(32 - offset)
    return out.reshape(*codes.shape[:-1], -1)


def _mlx(t: Layer) -> Read:
    own = t.config.get(t.prefix)
    if own is False:
        raise t.error("config says it is not quantized")
    if own is not None and own is not True:
        t = t._replace(config=t.mapping(t.prefix, own))
    mode = t.option("mode", tuple(MODES)) or "affine"
    bits = t.option("bits", MODES[mode].bits) or MODES[mode].bits[0]
    size = t.option("group_size", MODES[mode].group_sizes) or MODES[mode].group_sizes[0]
    lead = (None,) * t.stacked
    weight = t.get(".weight", ("uint32",), "N, K*bits/32", (*lead, None, None))
    *lead, words = weight.shape
    if words * 32 % (bits * size):
        raise t.error(f".weight has {words} words a row, not a multiple of {bits} bits by {size}")
    expected = (*lead, words * 32 // bits // size)
    dtypes = FLOATS if mode == "affine" else ("uint8",)
    scales = t.get(".scales", dtypes, "N, K/group_size", expected)
    if t.has(".biases") != (mode == "affine"):
        has = "has" if t.has(".biases") else "has no"
        raise t.error(f"{has} .biases, but its mode is {mode!r}")
    biases = global_scale = None
    if mode == "affine":
        biases = t.get(".biases", (scales.dtype.name,), "N, K/group_size", expected)
    if t.has(".global_scale"):
        if mode != "nvfp4":
            raise t.error(f"has .global_scale, but its mode is {mode!r}")
        global_scale = _multiplier(t, ".global_scale", t.scalar(".global_scale") / F32(2688))
    q = t.quantized(weight, scales, biases, global_scale, mode=mode, bits=bits, group_size=size)
    return q, None


AWQ_LANES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds column j


def _awq_codes(words) -> np.ndarray:
    """uint8 codes ``(8 * W, R)`` of words ``(R, W)``."""
    words = _words(words.T)
    out = np.empty((words.shape[0], 8, words.shape[1]), np.uint8)
    for column, lane in enumerate(AWQ_LANES):
        out[:, column] = (words >> np.uint32(4 * lane)) & np.uint32(15)
    return out.reshape(-1, words.shape[1])


def _awq(t: Layer) -> Read:
    # Names of layers, or of modules at any depth: "mlp.gate" is not in "mlp.gate_proj".
    inside = lambda entry: f".{entry.strip('.')}." in f".{t.prefix}."
    t.refuse("modules_to_not_convert", inside)
    t.option(("bits", "w_bit"), (4,))
    t.option("zero_point", (True,))
    t.option(("version", "format", "checkpoint_format"), ("gemm", "GEMM"))
    scales = t.get(".scales", FLOATS, "K/group_size, N", (None, None))
    groups, n = scales.shape
    if n % 8:
        raise t.error(f".scales has {n} columns, not a multiple of 8")
    qweight = t.get(".qweight", ("int32",), "K, N/8", (None, n // 8))
    qzeros = t.get(".qzeros", ("int32",), "K/group_size, N/8", (groups, n // 8))
    size = t.group_size(len(qweight), groups)
    if size % 32:
        raise t.error(f"group_size={size} is not a multiple of 32")
    codes = _awq_codes(qweight)
    words = _words(codes[:, ::2] | codes[:, 1::2] << np.uint8(4))
    return _affine(t, words, scales, _awq_codes(qzeros), 4, size, sym=False), None


def _gptq(t: Layer) -> Read:
    for pattern, override in t.parts("dynamic").items():
        match = t.match("dynamic", pattern, ("+:", "-:"))
        if match and pattern.startswith("-:"):
            raise t.error(f"config says it is not quantized: dynamic pattern {pattern!r}")
        if match:
            override = t.mapping(f"dynamic[{pattern!r}]", override)
            t = t._replace(config={**t.config, **override})
            break
    bits = t.option("bits", (2, 3, 4, 8))
    if bits is None:
        raise t.error("config says no bits")
    v2 = t.option(("checkpoint_format", "format"), ("gptq", "gptq_v2")) == "gptq_v2"
    t.option("is_marlin_format", (False,))
    t.option("pack_dtype", ("int32",))
    scales = t.get(".scales", FLOATS, "K/group_size, N", (None, None))
    groups, n = scales.shape
    if n * bits % 32:
        raise t.error(f".scales has {n} columns: at {bits} bits not whole words of zero points")
    qzeros = t.get(".qzeros", ("int32",), "K/group_size, N*bits/32", (groups, n * bits // 32))
    words = t.get(".qweight", ("int32",), "K*bits/32, N", (None, n))
    k, rest = divmod(len(words) * 32, bits)
    size = t.group_size(k, groups)
    if rest or size % 32:
        raise t.error(f"group_size={size} of K={k} is not a multiple of 32")
    # Static groups are those of K as it is stored.
    ordered = t.option("desc_act", (True, False)) and not t.option("static_groups", (True, False))
    if ordered and groups > 1 and not t.has(".g_idx"):
        raise t.error(
            f"config says desc_act=True, but there is no tensor {t.prefix + '.g_idx'!r} that gives "
            "each channel its group"
        )
    words, order = _words(words.T), np.arange(k, dtype=np.int32)
    if t.has(".g_idx"):
        g_idx = t.get(".g_idx", ("int32",), "K", (k,))
        order = np.argsort(g_idx, kind="stable").astype(np.int32)
        if not np.array_equal(g_idx[order], np.arange(k) // size):
            raise t.error(f".g_idx does not give each of {groups} groups {size} channels")
        if not np.array_equal(order, np.arange(k)):
            if not t.reorder:
                raise t.error(
                    ".g_idx is not in order (desc_act), so K would be permuted: use "
                    "jgg.checkpoints.act_order, which also returns the order"
                )
            words = _pack(_unpack(words, bits)[:, order], bits)
    zeros = _unpack(_words(qzeros), bits)
    if not v2:
        if np.any(zeros == 2**bits - 1):
            raise t.error(
                f".qzeros of format v1 holds {2**bits - 1}, which libraries read as a zero point "
                f"of 0, of {2**bits}, or as a borrow from its neighbour: convert it to gptq_v2"
            )
        zeros += np.uint8(1)
    sym = t.option("sym", (True, False)) is True
    q = _affine(t, words, scales, np.ascontiguousarray(zeros.T), bits, size, sym)
    return q, order if t.reorder else None


def _affine(t: Layer, words, scales, zeros, bits: int, group_size: int, sym: bool) -> Quantized:
    """``(q - z) * s`` as ``q * s + (-z * s)``; scales ``(groups, N)``, zeros ``(N, groups)``.

    With at most 24 - bits significant bits in s, the products and their sum are exact in float32.
    """
    scales = np.ascontiguousarray(scales.T)
    wide, levels = scales.astype(F32), 1 << bits
    magnitude = np.abs(wide)
    inexact = (wide.view(np.uint32) & np.uint32(levels - 1)) != 0
    inexact |= magnitude > np.finfo(F32).max / levels
    inexact |= (magnitude > 0) & (magnitude < F32(2.0**-100))  # no part of s is subnormal
    if inexact.any():
        raise t.error(
            f".scales hold values whose products with {bits}-bit codes are not exact in float32"
        )
    biases = -(zeros.astype(F32) * wide)
    if sym:
        if np.any(zeros != levels // 2):
            raise t.error(
                f"config says sym=True, but .qzeros gives zero points other than {levels // 2}: "
                "is checkpoint_format right?"
            )
        with np.errstate(over="ignore"):
            biases = biases.astype(scales.dtype)
        if np.isinf(biases.astype(F32)).any():
            raise t.error(f".scales hold values too large for zero points in {scales.dtype.name}")
    else:
        scales = wide
    if group_size not in (known := MODES["affine"].group_sizes):
        fits = [size for size in known if group_size % size == 0]
        part = max(fits, default=group_size)
        scales, biases = (np.repeat(x, group_size // part, axis=-1) for x in (scales, biases))
        group_size = part
    return t.quantized(words, scales, biases, mode="affine", bits=bits, group_size=group_size)


def _multiplier(t: Layer, leaf: str, value) -> np.ndarray:
    if not (np.isfinite(value) and value >= 0):
        raise t.error(f"{leaf} = {t.scalar(leaf)} gives no finite scale")
    return np.asarray(value, F32)


def _nvfp4(t: Layer, weight: str, global_leaf: str, global_scale) -> Read:
    packed = t.get(weight, ("uint8",), "N, K/2", (None, None))
    n, half = packed.shape
    if half % 8:
        raise t.error(f"{weight} has K = {2 * half}, not a multiple of 16")
    scales = t.get(".weight_scale", ("float8_e4m3fn",), "N, K/16", (n, half // 8)).view(np.uint8)
    if np.any(scales >= 0x80):
        raise t.error(".weight_scale holds negative scales")
    scale = _multiplier(t, global_leaf, global_scale)
    q = t.quantized(_words(packed), scales, None, scale, mode="nvfp4", bits=4, group_size=16)
    return q, None


def _targets(t: Layer, key: str, entry: str) -> bool:
    """Whether an entry is the layer's name or a pattern of it."""
    return t.match(key, entry, ("re:",)) if entry.startswith("re:") else entry == t.prefix


def _groups_of(t: Layer, groups: list[Layer]) -> list[Layer]:
    """The groups that name a layer; if none does, those of all linear layers, or of all."""
    targets = [group.names("targets") for group in groups]
    named = [any(_targets(t, "targets", entry) for entry in entries) for entries in targets]
    linear = ["Linear" in entries for entries in targets]
    of_all = [not entries for entries in targets]
    chosen = next((kind for kind in (named, linear, of_all) if any(kind)), [])
    return [group for group, mine in zip(groups, chosen, strict=False) if mine]


def _compressed_tensors(t: Layer) -> Read:
    packed = "nvfp4-pack-quantized"
    t.refuse("ignore", lambda entry: _targets(t, "ignore", entry))
    groups = [
        t._replace(config=t.mapping(f"config_groups[{key!r}]", group))
        for key, group in t.parts("config_groups").items()
    ]
    if t.option("format", (packed, "mixed-precision")) != packed:  # then those of this layer
        groups = _groups_of(t, groups)
    for group in groups:
        group.option("format", (packed,))
        weights = group._replace(config=group.parts("weights"))
        weights.option("num_bits", (4,))
        weights.option("type", ("float",))
        weights.option("group_size", (16,))
    value = t.scalar(".weight_global_scale")
    with np.errstate(divide="ignore", over="ignore"):
        inverse = F32(1) / value if value > 0 else F32(np.nan)
    return _nvfp4(t, ".weight_packed", ".weight_global_scale", inverse)


def _modelopt(t: Layer) -> Read:
    known = ("NVFP4", "W4A16_NVFP4")
    for key in ("exclude_modules", "ignore"):  # of layers, or of the modules that they are in
        t.refuse(key, lambda entry: any(fnmatchcase(name, entry) for name in t.and_outer()))
    if t.option("quant_algo", (*known, "MIXED_PRECISION")) == "MIXED_PRECISION":
        layers = t.parts("quantized_layers")
        name = next((name for name in t.and_outer() if name in layers), None)
        if name is None:
            raise t.error("config says it is not quantized: quantized_layers do not name it")
        t = t._replace(config=t.mapping(f"quantized_layers[{name!r}]", layers[name]))
        t.option("quant_algo", known)
    t.option("group_size", (16,))
    return _nvfp4(t, ".weight", ".weight_scale_2", t.scalar(".weight_scale_2"))


def _gpt_oss(t: Layer) -> Read:
    interleaved = {"gate_up_proj": True, "down_proj": False}.get(t.prefix.rpartition(".")[2])
    if interleaved is None:
        raise t.error("neither 'gate_up_proj', whose rows are interleaved, nor 'down_proj'")
    blocks = t.get("_blocks", ("uint8",), "N, K/32, 16", (None, None, None, 16))
    scales = t.get("_scales", ("uint8",), "N, K/32", blocks.shape[:-1])
    weight = _words(blocks.reshape(*blocks.shape[:-2], -1))
    if interleaved:
        if weight.shape[1] % 2:
            raise t.error(f"_blocks has {weight.shape[1]} rows, not gate and up by turns")
        weight, scales = (np.concatenate([x[:, ::2], x[:, 1::2]], axis=1) for x in (weight, scales))
    return t.quantized(weight, scales, mode="mxfp4", bits=4, group_size=32), None


class Format(NamedTuple):
    read: Callable[[Layer], Read]
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    methods: tuple[str, ...]  # of config's quant_method
    needs: str = ""  # what config is needed for, if it is
    stacked: tuple[bool, ...] = (False,)


FORMATS = {
    "mlx": Format(
        _mlx,
        (".weight", ".scales"),
        (".biases", ".global_scale", ".bias"),
        (),
        needs="its bits, group_size and mode",
        stacked=(False, True),
    ),
    "awq": Format(_awq, (".qweight", ".qzeros", ".scales"), (".bias",), ("awq",)),
    "gptq": Format(
        _gptq,
        (".qweight", ".qzeros", ".scales"),
        (".g_idx", ".bias"),
        ("gptq",),
        needs="its bits and checkpoint_format",
    ),
    "compressed-tensors": Format(
        _compressed_tensors,
        (".weight_packed", ".weight_scale", ".weight_global_scale"),
        (".input_global_scale", ".bias"),
        ("compressed-tensors",),
    ),
    "modelopt": Format(
        _modelopt,
        (".weight", ".weight_scale", ".weight_scale_2"),
        (".input_scale", ".k_scale", ".v_scale", ".bias"),
        ("modelopt", "modelopt_fp4"),
    ),
    "gpt-oss": Format(_gpt_oss, ("_blocks", "_scales"), ("_bias",), ("mxfp4",), stacked=(True,)),
}
