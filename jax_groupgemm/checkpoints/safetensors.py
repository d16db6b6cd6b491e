"""Safetensors files as one lazy mapping from names to numpy arrays.

A file is an 8-byte little-endian length, a JSON header of that many bytes, and the tensors' bytes,
which the header's offsets must cover without gaps or overlaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

HEADER_LIMIT = 100_000_000  # bytes, the format's own
DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "BF16": jnp.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
}
INDEX = ".safetensors.index.json"


class _Entry(NamedTuple):
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # in the file


class Tensors(Mapping[str, np.ndarray]):
    """Each access maps that tensor's bytes anew, so nothing is held that the caller does not."""

    def __init__(self, entries: dict[str, _Entry]):
        self._entries = {name: entries[name] for name in sorted(entries)}

    def __getitem__(self, name: str) -> np.ndarray:
        path, dtype, shape, offset = self._entries[name]
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.asarray(np.memmap(path, dtype, "r", offset, shape))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        files = {entry.path for entry in self._entries.values()}
        return f"<{len(self)} tensors in {len(files)} safetensors files>"


def read(path: str | os.PathLike[str]) -> Tensors:
    path = Path(path).absolute()
    if path.name.endswith(".json"):
        return Tensors(_indexed(path))
    if not path.is_dir():
        return Tensors(_file(path))
    indices = sorted(path.glob("*" + INDEX))
    if len(indices) > 1:
        raise _error(path, f"several indices, {indices[0].name} and {indices[1].name}: open one")
    if indices:
        return Tensors(_indexed(indices[0]))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"jgg.checkpoints.open: {path}: no .safetensors files")
    return Tensors(_union(path, files))


def _error(path: Path, text: str) -> ValueError:
    return ValueError(f"jgg.checkpoints.open: {path}: {text}")


def _union(path: Path, files: list[Path]) -> dict[str, _Entry]:
    out: dict[str, _Entry] = {}
    for file in files:
        for name, entry in _file(file).items():
            if name in out:
                raise _error(path, f"tensor {name!r} is in {out[name].path.name} and {file.name}")
            out[name] = entry
    return out


def _indexed(path: Path) -> dict[str, _Entry]:
    """The tensors of the files that an index lists; index and files must agree."""
    index = _json(path, path.read_bytes())
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
        raise _error(path, "no 'weight_map' from tensor names to files")
    for name in where.values():
        if Path(name).name != name:
            raise _error(path, f"file {name!r} is not beside the index")
    out = _union(path, [path.parent / name for name in sorted(set(where.values()))])
    for name, entry in out.items():
        if where.get(name) != entry.path.name:
            listed = f"in {where[name]}" if name in where else "nowhere"
            raise _error(path, f"tensor {name!r} is in {entry.path.name}, by the index {listed}")
    for name in where:
        if name not in out:
            raise _error(path, f"tensor {name!r} is not in {where[name]}")
    return out


def _json(path: Path, data: bytes) -> dict[str, Any]:
    def unique(pairs):
        out = {}
        for name, value in pairs:
            if name in out:
                raise ValueError(f"{name!r} appears twice")
            out[name] = value
        return out

    try:
        out = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise _error(path, f"malformed JSON: {error}") from error
    if not isinstance(out, dict):
        raise _error(path, "malformed JSON: not an object")
    return out


def _file(path: Path) -> dict[str, _Entry]:
    """The tensors of one file, its header checked."""
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise _error(path, f"not a safetensors file: a header of {length} bytes in {size}")
        header = _json(path, f.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    out, spans = {}, []
    for name, info in header.items():
        dtype, shape, begin, end = _info(path, name, info)
        out[name] = _Entry(path, dtype, shape, start + begin)
        spans.append((begin, end, name))
    last = 0
    for begin, end, name in sorted(spans):
        if begin != last:
            what = "overlaps another" if begin < last else "follows a gap"
            raise _error(path, f"tensor {name!r} at bytes {begin} to {end} {what}")
        last = end
    if last != size - start:
        what = "truncated" if last > size - start else "bytes past the last tensor"
        raise _error(path, f"{what}: tensors end at byte {start + last}, the file at {size}")
    return out


def _info(path: Path, name: str, info) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """``(dtype, shape, begin, end)`` of a tensor's entry."""
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise _error(path, f"tensor {name!r}: expected dtype, shape and data_offsets, got {info!r}")
    kind, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise _error(path, f"tensor {name!r}: dtype {kind!r} is not one of {', '.join(DTYPES)}")
    for what, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise _error(path, f"tensor {name!r}: {what} {value!r} is not a list of sizes")
    dtype = np.dtype(DTYPES[kind])
    expected = prod(shape) * dtype.itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != expected:
        raise _error(
            path,
            f"tensor {name!r}: data_offsets {offsets}, but {kind} of shape {shape} takes "
            f"{expected} bytes",
        )
    return dtype, tuple(shape), offsets[0], offsets[1]
