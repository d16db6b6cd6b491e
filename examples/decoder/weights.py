"""The tensors of a checkpoint, as what the model computes with: arrays, or ``jgg.Quantized``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

from . import gguf
from .errors import Refused

FLOATS: tuple[str, ...] = ("bfloat16", "float16", "float32")
FLOAT_HEADERS: tuple[str, ...] = ("BF16", "F16", "F32")  # as safetensors files name them
#: ``format=`` of jgg.checkpoints, by config's ``quant_method``.
FORMATS = {
    "awq": "awq", "gptq": "gptq", "compressed-tensors": "compressed-tensors",
    "modelopt": "modelopt", "modelopt_fp4": "modelopt", "mxfp4": "gpt-oss", "fp8": "fp8",
    "gguf": "gguf",
}  # fmt: skip
#: What experts may be quantized to while they are loaded. Affine groups have 32 elements, because
#: the width of an expert may be a multiple of no more.
MODES: dict[str, dict[str, Any]] = {
    "mxfp4": {"mode": "mxfp4"},
    "nvfp4": {"mode": "nvfp4"},
    "affine4": {"mode": "affine", "bits": 4, "group_size": 32},
    "affine6": {"mode": "affine", "bits": 6, "group_size": 32},
    "fp8": {"mode": "fp8"},
    "mxfp8": {"mode": "mxfp8"},
    "affine8": {"mode": "affine", "bits": 8, "group_size": 32},
}
#: Bits of a weight, with its part of the scales.
BITS = {
    "mxfp4": 4.25, "nvfp4": 4.5, "affine4": 5, "affine6": 7, "fp8": 8.01, "mxfp8": 8.25,
    "affine8": 9,
}  # fmt: skip
_NVFP4_RANGE = 2688.0  # 6 * 448: the largest code times the largest scale


def quantize(w: jax.Array, mode: str) -> jgg.Quantized:
    """(E, N, K) in blocks along K."""
    scale = None
    if mode == "nvfp4":  # one for each expert, so that its scales use the whole range of e4m3
        scale = jnp.maximum(jnp.abs(w).max(axis=(1, 2)), 1e-30).astype(jnp.float32) / _NVFP4_RANGE
    return jgg.quantize(w, **MODES[mode], global_scale=scale, contract=-1)


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """Errors of jgg.checkpoints already say what is wrong with which tensor."""
    try:
        yield
    except (ValueError, TypeError, KeyError, OSError) as error:
        text = error.args[0] if isinstance(error, KeyError) else str(error)
        raise Refused(text) from error


def format_of(config: Mapping[str, Any]) -> str | None:
    """``format=`` of jgg.checkpoints, or None where nothing is quantized."""
    said = config.get("quantization_config") or config.get("quantization")
    if not said:
        return None
    if not isinstance(said, dict):
        raise Refused(f"config.json: quantization_config is {said!r}, expected an object")
    method = said.get("quant_method", "modelopt" if "quant_algo" in said else "mlx")
    if method == "auto-round":
        packing = str(said.get("packing_format", ""))
        method = next((name for name in ("awq", "gptq") if name in packing), "compressed-tensors")
    known = "mlx", *FORMATS
    if method not in known:
        raise Refused(f"config.json: quant_method {method!r} is not one of {', '.join(known)}")
    return FORMATS.get(method, method)


class Header(NamedTuple):
    """A tensor as its file describes it; nothing of it is read."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def plain(self) -> bool:
        """Whether it has floats, and not codes of them."""
        return self.dtype in FLOAT_HEADERS


def headers(tensors: Any) -> dict[str, Header]:
    """Those of what jgg.checkpoints.open returns. A dtype that it does not read counts as bytes."""
    names: dict[str, str] = dict(zip(FLOATS, FLOAT_HEADERS, strict=True))
    out = {}
    for name in tensors:
        dtype: str = tensors.dtype(name)
        shape = tensors.shape(name)
        try:
            itemsize = jnp.dtype(dtype).itemsize
        except TypeError:
            itemsize = 1
        nbytes = math.prod(shape) * itemsize
        if isinstance(tensors, gguf.Renamed):
            nbytes = tensors.nbytes(name) or nbytes
        out[name] = Header(names.get(dtype, dtype), shape, nbytes)
    return out


def check_shape(name: str, header: Header, shape: tuple[int, ...]) -> None:
    """Refuse another one. Nothing is allocated of a size that no file has."""
    if header.shape != shape:
        raise Refused(f"{name} has shape {header.shape}, but config.json says {shape}")


@dataclasses.dataclass(frozen=True)
class Weights:
    """Those under a prefix. Every method returns arrays on the host, of ``dtype`` where they are
    not quantized. Raises :class:`Refused`."""

    tensors: Mapping[str, np.ndarray]
    headers: Mapping[str, Header]
    config: Mapping[str, Any]
    format: str | None
    dtype: Any
    prefix: str = ""

    def at(self, name: str) -> Weights:
        return dataclasses.replace(self, prefix=self.prefix + name + ".")

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def array(self, name: str, *shape: int, dtype: Any = None) -> np.ndarray:
        """A tensor of floats."""
        self._check(name, shape)
        with in_one_sentence():
            value = self.tensors[self.prefix + name]
        return value.astype(self.dtype if dtype is None else dtype, copy=False)

    def vector(self, name: str, n: int, dtype: Any) -> np.ndarray:
        """(N,) of a tensor that may be one row."""
        header = self.headers.get(self.prefix + name)
        is_row = header is not None and header.shape == (1, n)
        return self.array(name, *((1, n) if is_row else (n,)), dtype=dtype).reshape(n)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse what is no tensor of floats of that shape. Nothing of it is read."""
        full = self.prefix + name
        header = self.headers.get(full)
        if header is None:
            raise Refused(f"there is no tensor {full}: a shard is missing, or the model is another")
        if not header.plain:
            how = "is quantized otherwise" if self.format else "does not say how it is quantized"
            raise Refused(f"{full} is {header.dtype}, but config.json {how}")
        check_shape(full, header, shape)

    def check_no_bias(self, name: str) -> None:
        """Refuse a layer's bias that would be left out. GPTQ stores zeros for layers without."""
        full = f"{self.prefix}{name}.bias"
        if full not in self.tensors:
            return
        with in_one_sentence():
            value = self.tensors[full]
        if value.any():
            raise Refused(f"{full} is not zero, but config.json says that there is no bias")

    def linear(self, name: str, n: int, k: int) -> Any:
        """A layer's weight (N, K)."""
        if not self._quantized(name):
            return self.array(name + ".weight", n, k)
        return self._checked(name, (n, k), jgg.checkpoints.linear)

    def dense(self, name: str, n: int, k: int, dtype: Any = None) -> np.ndarray:
        """The same as an array, for what is small or not used in a product."""
        dtype = self.dtype if dtype is None else dtype
        w = self.linear(name, n, k)
        if isinstance(w, jgg.Quantized):
            w = np.asarray(jgg.dequantize(w, dtype))
        return w.astype(dtype, copy=False)

    def table(self, name: str, n: int, k: int) -> Any:
        """A weight (N, K) of which rows are read. On CPUs codes stay codes where each row has its
        own: a GPU reads a row of numbers in less time."""
        w = self.linear(name, n, k)
        if not isinstance(w, jgg.Quantized):
            return w
        of_rows = w.axis == -1 and all(leaf.shape[:1] == (n,) for leaf in jax.tree.leaves(w))
        if of_rows and jax.default_backend() == "cpu":
            return w
        return np.asarray(jgg.dequantize(w, self.dtype))

    def as_stored(self, name: str, n: int, k: int) -> np.ndarray:
        """As :meth:`dense`: in the model's dtype if that is how it is stored, else in float32."""
        header = self.headers.get(f"{self.prefix}{name}.weight")
        stored = dict(zip(FLOAT_HEADERS, FLOATS, strict=True)).get(header.dtype) if header else None
        same = stored == jnp.dtype(self.dtype).name
        return self.dense(name, n, k, self.dtype if same else np.float32)

    def expert_rows(self, prefixes: list, shape: tuple[int, int, int]) -> Any:
        """(E, N, K) of a layer for each expert, or of several whose rows follow each other."""
        several = isinstance(prefixes[0], tuple)
        if self._quantized(prefixes[0][0] if several else prefixes[0]):
            return self._checked(prefixes, shape, jgg.checkpoints.experts)
        _, n, k = shape
        listed = [names if several else (names,) for names in prefixes]
        for names in listed:
            for name in names:
                self._check(name + ".weight", (n // len(names), k))
        out = np.empty(shape, self.dtype)
        for expert, names in zip(out, listed, strict=True):
            parts = np.split(expert, len(names))
            for part, name in zip(parts, names, strict=True):
                part[...] = self.array(name + ".weight", *part.shape)
        return out

    def stacked(self, name: str, shape: tuple[int, int, int]) -> Any:
        """(E, N, K) of one quantized tensor for all experts."""
        return self._checked(name, shape, jgg.checkpoints.experts)

    def _quantized(self, name: str) -> bool:
        """Whether a layer is: formats leave out some layers."""
        full = self.prefix + name + ".weight"
        if self.format is None:
            return False
        return full not in self.headers or not self.headers[full].plain

    def _checked(self, names, shape: tuple[int, ...], read: Callable) -> Any:
        if self.format is None:
            raise Refused(f"there is no tensor {self._full(names)[0]}.weight")
        with in_one_sentence():
            out = read(
                self.tensors, self._full(names), format=self.format, config=self.config, shape=shape
            )
        if isinstance(out, np.ndarray):  # what GGUF has not quantized
            return out.astype(self.dtype, copy=False)
        return _scales_of_experts(out)

    def _full(self, names):
        if isinstance(names, str):
            return self.prefix + names
        return type(names)(self._full(name) for name in names)


def _scales_of_experts(q: jgg.Quantized) -> jgg.Quantized:
    """One global scale for each expert where there is one for all: leaves have leading axes then
    that can be cut."""
    if q.global_scale is None or q.ndim < 3 or np.ndim(q.global_scale):
        return q
    return dataclasses.replace(q, global_scale=np.full(q.shape[:1], q.global_scale, np.float32))


def rows_joined(parts: Sequence[Any]) -> Any:
    """Weights (N, K) as one, whose rows follow each other; None where a product of it would be
    another, or would take more kernels."""
    first = parts[0]
    if not all(isinstance(part, type(first)) for part in parts):
        return None
    if isinstance(first, jgg.Quantized):
        if first.mode == "fp8":
            cut = first.block is None or any(q.shape[0] % first.block[0] for q in parts[:-1])
            if cut:
                return None
        if first.global_scale is not None:
            if any(np.asarray(q.global_scale != first.global_scale).any() for q in parts):
                return None
            scale = first.global_scale
            parts = [dataclasses.replace(q, global_scale=None) for q in parts]
            return dataclasses.replace(rows_joined(parts), global_scale=scale)
    if len({jax.tree.structure(part) for part in parts}) > 1:
        return None
    return jax.tree.map(_in_rows, *parts)


def _in_rows(*leaves):
    on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    return (np if on_host else jnp).concatenate(leaves)


def joined(gate: Any, up: Any) -> Any:
    """(E, 2F, K): gate's rows, then up's."""
    codes = isinstance(gate, jgg.Quantized)
    if codes != isinstance(up, jgg.Quantized):
        raise Refused("of a layer's experts, gate and up, one has codes and the other has not")
    if not codes:
        return np.concatenate([gate, up], axis=1)
    rows = gate.shape[1]
    if gate.global_scale is not None:
        gate, up = (
            dataclasses.replace(q, global_scale=np.repeat(q.global_scale[:, None], rows, axis=1))
            for q in (gate, up)
        )
    if jax.tree.structure(gate) != jax.tree.structure(up):
        raise Refused(f"gate's experts are {gate}, but up's are {up}")
    return jax.tree.map(lambda a, b: np.concatenate([a, b], axis=1), gate, up)
