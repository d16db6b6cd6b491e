"""Safetensors files as one lazy mapping from names to numpy arrays.

A file is an 8-byte little-endian length, a JSON header of that many bytes, and the tensors' bytes,
which the header's offsets must cover without gaps or overlaps.

No file stays open or mapped. Each access opens the tensor's file, compares its device, inode, size
and times with those that it had when its header was read, and reads the tensor's bytes: what was
truncated or replaced in between is an error, not a signal, and never other bytes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from . import files
from .files import File
from .json_file import parse
from .messages import brief

HEADER_LIMIT = 100_000_000  # bytes, the format's own
MAX_RANK = 64  # numpy's
MAX_SIZE = 2**63 - 1
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
HUB, MISTRAL = "model", "consolidated"  # how files of either format begin that stand side by side
OP = "open"

_error, _about = partial(files.error, OP), partial(files.about, OP)
_regular, _bytes = partial(files.regular, OP), partial(files.first_bytes, OP)


class Entry(NamedTuple):
    file: File
    kind: str  # the header's dtype, known or not
    shape: tuple[int, ...]
    offset: int  # in the file
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Header:
    """A tensor as its file describes it.

    Attributes:
      dtype: numpy's or JAX's name of it, such as ``"bfloat16"``; the file's, where the dtype is
        none that is read (``"F4"``).
      shape: in elements.
      nbytes: what it takes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Tensors(Mapping[str, np.ndarray]):
    """What :func:`open` returns: names, in order, to numpy arrays that cannot be written to.

    Each access reads that tensor's bytes anew, so nothing is held that the caller does not.
    ``.header(name)`` says what a tensor is, and reads nothing.
    """

    metadata: Mapping[str, Any] = MappingProxyType({})  # a GGUF file has some

    def __init__(self, entries: dict[str, Entry]) -> None:
        self._entries = {name: entries[name] for name in sorted(entries)}

    def __getitem__(self, name: str) -> np.ndarray:
        file, kind, shape, offset, _ = self._entry(name)
        what = f"tensor {brief(name)}"
        if kind not in DTYPES:
            raise _error(file.path, f"{what}: {_unknown(kind)}")
        return files.read_array(OP, file, offset, shape, DTYPES[kind], what, kind)

    def header(self, name: str) -> Header:
        """A tensor's dtype, shape and bytes; nothing is read. KeyError where there is none."""
        entry = self._entry(name)
        kind = np.dtype(DTYPES[entry.kind]).name if entry.kind in DTYPES else entry.kind
        return Header(kind, entry.shape, entry.nbytes)

    def dtype(self, name: str) -> str:
        return self.header(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self.header(name).shape

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise KeyError(f"jgg.checkpoints.open: no tensor {brief(name)}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        paths = {entry.file.path for entry in self._entries.values()}
        return f"<{len(self)} tensors in {len(paths)} safetensors files>"


def read(path: str | os.PathLike[str], header_limit: int) -> Tensors:
    path = files.absolute(OP, path)
    if path.name.endswith(".json"):
        return Tensors(_indexed(path, header_limit))
    with _about(path):
        folder = path.is_dir()
        indices = sorted(path.glob("*" + INDEX)) if folder else []
        shards = sorted(path.glob("*.safetensors")) if folder else [path]
    names, hub = [shard.name for shard in shards], f"{HUB}.safetensors"
    index = path / (HUB + INDEX)
    if len(indices) > 1 and index not in indices:
        listed = f"{indices[0].name} and {indices[1].name}"
        raise _error(path, f"several indices, {listed}: pass the path of the one to open")
    if indices:
        return Tensors(_indexed(index if index in indices else indices[0], header_limit))
    if names == [f"{MISTRAL}.safetensors", hub]:  # the same weights under other names
        shards = [path / hub]
    if not shards:
        other = next(path.glob("*.gguf"), None)
        instead = f", but {other.name}: pass the path of a GGUF file" if other else ""
        raise FileNotFoundError(str(_error(path, f"no .safetensors files{instead}")))
    out: dict[str, Entry] = {}
    for file in shards:
        for name, entry in _file(file, header_limit).items():
            if name in out:
                other = out[name].file.path.name
                text = f"tensor {brief(name)} is in {other} and {file.name}"
                raise _error(path, f"{text}, and no index says which counts: open one of them")
            out[name] = entry
    return Tensors(out)


def _indexed(path: Path, limit: int) -> dict[str, Entry]:
    """The tensors that an index names, each from the file that it names. Others are left out."""
    with _regular(path) as (descriptor, stamp):
        if stamp[2] > limit:
            raise _error(path, f"an index of {stamp[2]} bytes: {_limit(limit)}")
        data = _bytes(path, descriptor, stamp[2])
    where = parse(OP, path, data).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
        raise _error(path, "no 'weight_map' from tensor names to files")
    names: dict[str, list[str]] = {}
    for name, file in where.items():
        names.setdefault(file, []).append(name)
    out: dict[str, Entry] = {}
    for file in sorted(names):
        if file in ("", ".", "..") or "\0" in file or Path(file).name != file:
            raise _error(path, f"file {brief(file)} is not beside the index")
        try:
            entries = _file(path.parent / file, limit)
        except FileNotFoundError as error:
            first = f"{len(names[file])} tensors, {brief(names[file][0])} among them"
            text = f"file {brief(file)} is missing, which the index names for {first}"
            raise FileNotFoundError(str(_error(path, text))) from error
        for name in names[file]:
            if name not in entries:
                raise _error(path, f"tensor {brief(name)} is not in {file}")
            out[name] = entries[name]
    return out


def _limit(limit: int) -> str:
    return f"the limit is {limit}, open(..., max_header_bytes=) sets another"


def _file(path: Path, limit: int) -> dict[str, Entry]:
    """The tensors of one file, its header checked."""
    with _regular(path) as (descriptor, stamp):
        files.settle(stamp)
        size, file = stamp[2], File(path, stamp)
        length = int.from_bytes(_bytes(path, descriptor, min(size, 64))[:8], "little")
        if size < 8 or length > size - 8:
            raise _error(path, f"not a safetensors file: a header of {length} bytes in {size}")
        if length > limit:
            raise _error(path, f"a header of {length} bytes: {_limit(limit)}")
        header = parse(OP, path, _bytes(path, descriptor, 8 + length)[8:])
        files.same(OP, file, files.stamp_of(os.fstat(descriptor)))
    header.pop("__metadata__", None)
    start = 8 + length
    out, spans = {}, []
    for name, info in header.items():
        kind, shape, begin, end = _info(path, name, info)
        out[name] = Entry(file, kind, shape, start + begin, end - begin)
        spans.append((begin, end, name))
    last = 0
    for begin, end, name in sorted(spans):
        if begin != last:
            what = "overlaps another" if begin < last else "follows a gap"
            raise _error(path, f"tensor {brief(name)} at bytes {begin} to {end} {what}")
        last = end
    if last != size - start:
        what = "truncated" if last > size - start else "bytes past the last tensor"
        raise _error(path, f"{what}: tensors end at byte {start + last}, the file at {size}")
    return out


def _info(path: Path, name: str, info) -> tuple[str, tuple[int, ...], int, int]:
    """``(dtype, shape, begin, end)`` of a tensor's entry."""

    def error(text: str) -> ValueError:
        return _error(path, f"tensor {brief(name)}: {text}")

    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise error(f"expected dtype, shape and data_offsets, got {brief(info)}")
    kind, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(kind, str):
        raise error(_unknown(kind))
    for what, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise error(f"{what} {brief(value)} is not a list of sizes")
    if len(shape) > MAX_RANK:
        raise error(f"shape {brief(shape)} has {len(shape)} axes, more than {MAX_RANK}")
    # An element of a dtype that is not known may have less than a byte.
    size = np.dtype(DTYPES[kind]).itemsize if kind in DTYPES else 1
    taken = size
    for n in shape:
        taken *= max(n, 1)
        if taken > MAX_SIZE:
            raise error(f"shape {brief(shape)} is too large")
    expected = 0 if 0 in shape else taken
    if len(offsets) != 2 or (kind not in DTYPES and offsets[0] > offsets[1]):
        raise error(f"data_offsets {brief(offsets)} are not a beginning and an end")
    if kind in DTYPES and offsets[1] - offsets[0] != expected:
        raise error(
            f"data_offsets {offsets}, but {kind} of shape {brief(shape)} takes {expected} bytes"
        )
    return kind, tuple(shape), offsets[0], offsets[1]


def _unknown(kind) -> str:
    return f"dtype {brief(kind)} is not one of {', '.join(DTYPES)}"
