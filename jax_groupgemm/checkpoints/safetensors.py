"""Safetensors files as one lazy mapping from names to numpy arrays.

A file is an 8-byte little-endian length, a JSON header of that many bytes, and the tensors' bytes,
which the header's offsets must cover without gaps or overlaps.

No file stays open or mapped. Each access opens the tensor's file, compares its device, inode, size
and times with those that it had when its header was read, and reads the tensor's bytes: what was
truncated or replaced in between is an error, not a signal, and never other bytes.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .messages import brief, cut

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
LFS = b"version https://git-lfs.github.com/spec/"  # how a pointer begins
SECOND = 1_000_000_000  # ns
CLOCK = SECOND // 50  # the clock of file times ticks at least as often


class _File(NamedTuple):
    path: Path
    stamp: tuple[int, ...]  # what changes when the file does


class _Entry(NamedTuple):
    file: _File
    kind: str  # the header's dtype, known or not
    shape: tuple[int, ...]
    offset: int  # in the file


class Tensors(Mapping[str, np.ndarray]):
    """Each access reads that tensor's bytes anew, so nothing is held that the caller does not."""

    def __init__(self, entries: dict[str, _Entry]):
        self._entries = {name: entries[name] for name in sorted(entries)}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._entries:
            raise KeyError(f"jgg.checkpoints.open: no tensor {brief(name)}")
        file, kind, shape, offset = self._entries[name]
        if kind not in DTYPES:
            raise _error(file.path, f"tensor {brief(name)}: {_unknown(kind)}")
        with _regular(file.path) as (descriptor, stamp):
            _same(file, stamp)
            try:
                out = np.empty(shape, DTYPES[kind])
            except MemoryError as error:
                text = f"tensor {brief(name)}: no memory for {kind} of shape {shape}"
                raise MemoryError(str(_error(file.path, text))) from error
            view = memoryview(out.reshape(-1).view(np.uint8))
            while view:
                with _about(file.path):
                    count = os.preadv(descriptor, [view], offset)
                if not count:
                    break
                view, offset = view[count:], offset + count
            _same(file, _stamp(os.fstat(descriptor)))
            if view:
                raise _error(file.path, f"tensor {brief(name)}: the file ends at byte {offset}")
        out.flags.writeable = False
        return out

    def dtype(self, name: str) -> str:
        """The name of a tensor's dtype, of which nothing is read."""
        kind = self._entries[name].kind
        return np.dtype(DTYPES[kind]).name if kind in DTYPES else kind

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, of which nothing is read."""
        return self._entries[name].shape

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        files = {entry.file.path for entry in self._entries.values()}
        return f"<{len(self)} tensors in {len(files)} safetensors files>"


def read(path: str | os.PathLike[str], header_limit: int) -> Tensors:
    try:
        path = Path(path).expanduser().absolute()
    except TypeError as error:
        raise TypeError(
            f"jgg.checkpoints.open: path must be a path, got {type(path).__name__}"
        ) from error
    except RuntimeError as error:  # no such user
        raise ValueError(f"jgg.checkpoints.open: {cut(str(path))}: {error}") from error
    if path.name.endswith(".json"):
        return Tensors(_indexed(path, header_limit))
    with _about(path):
        folder = path.is_dir()
        indices = sorted(path.glob("*" + INDEX)) if folder else []
        files = sorted(path.glob("*.safetensors")) if folder else [path]
    if len(indices) > 1:
        raise _error(path, f"several indices, {indices[0].name} and {indices[1].name}: open one")
    if indices:
        return Tensors(_indexed(indices[0], header_limit))
    if not files:
        raise FileNotFoundError(str(_error(path, "no .safetensors files")))
    out: dict[str, _Entry] = {}
    for file in files:
        for name, entry in _file(file, header_limit).items():
            if name in out:
                other = out[name].file.path.name
                raise _error(path, f"tensor {brief(name)} is in {other} and {file.name}")
            out[name] = entry
    return Tensors(out)


def _error(path: Path, text: str) -> ValueError:
    return ValueError(f"jgg.checkpoints.open: {cut(str(path))}: {text}")


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """The system's errors with the path in front."""
    try:
        yield
    except OSError as error:
        raise type(error)(str(_error(path, error.strerror or str(error)))) from error
    except ValueError as error:  # a NUL, or what is no character of the file system
        raise _error(path, str(error)) from error


@contextmanager
def _regular(path: Path) -> Iterator[tuple[int, tuple[int, ...]]]:
    """A descriptor of a regular file, and its stamp."""
    with _about(path):  # without O_NONBLOCK a named pipe waits for its writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with _about(path):
            status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _error(path, "not a regular file")
        yield descriptor, _stamp(status)
    finally:
        os.close(descriptor)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return (
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )  # fmt: skip


def _same(file: _File, stamp: tuple[int, ...]) -> None:
    if stamp != file.stamp:
        sizes = f" from {file.stamp[2]} to {stamp[2]} bytes" if stamp[2] != file.stamp[2] else ""
        raise _error(file.path, f"the file has changed{sizes} since it was opened: open it again")


def _settle(stamp: tuple[int, ...]) -> None:
    """Until a change of the file would give it another time than it has."""
    last = max(stamp[3:])
    tick = CLOCK if last % SECOND else 2 * SECOND  # some file systems know even seconds only
    age = time.time_ns() - last
    if 0 <= age < tick:
        time.sleep((tick - age) / SECOND)


def _indexed(path: Path, limit: int) -> dict[str, _Entry]:
    """The tensors that an index names, each from the file that it names. Others are left out."""
    with _regular(path) as (descriptor, stamp):
        if stamp[2] > limit:
            raise _error(path, f"an index of {stamp[2]} bytes: {_limit(limit)}")
        data = _bytes(path, descriptor, stamp[2])
    where = _json(path, data).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
        raise _error(path, "no 'weight_map' from tensor names to files")
    names: dict[str, list[str]] = {}
    for name, file in where.items():
        names.setdefault(file, []).append(name)
    out: dict[str, _Entry] = {}
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


def _bytes(path: Path, descriptor: int, size: int) -> bytes:
    """The first bytes of a file that is not a pointer to another."""
    parts, offset = [], 0
    with _about(path):
        while offset < size and (part := os.pread(descriptor, size - offset, offset)):
            parts.append(part)
            offset += len(part)
    data = b"".join(parts)
    if data.startswith(LFS):
        raise _error(
            path,
            "a Git LFS pointer, not the file that it stands for. Fetch that: git lfs install && "
            "git lfs pull, in the repository that it is in",
        )
    return data


def _number(text: str) -> int:
    if len(text) > 40:  # more than any size or offset has; reading it takes quadratic time
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _fraction(text: str) -> float:
    if len(text) > 100:
        raise ValueError(f"a number of {len(text)} digits")
    return float(text)


def _json(path: Path, data: bytes) -> dict[str, Any]:
    """In time linear in the bytes."""

    def unique(pairs):
        out = dict(pairs)
        if len(out) != len(pairs):
            seen = set()
            name = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise ValueError(f"{brief(name)} appears twice")
        return out

    try:
        out = json.loads(
            data.decode(), object_pairs_hook=unique, parse_int=_number, parse_float=_fraction
        )
    except UnicodeDecodeError as error:  # whose text has all of the bytes
        text = f"malformed JSON: byte {error.start} is not UTF-8"
        raise _error(path, text) from None
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
        raise _error(path, f"malformed JSON: {cut(str(error))}") from error
    if not isinstance(out, dict):
        raise _error(path, "malformed JSON: not an object")
    return out


def _file(path: Path, limit: int) -> dict[str, _Entry]:
    """The tensors of one file, its header checked."""
    with _regular(path) as (descriptor, stamp):
        _settle(stamp)
        size, file = stamp[2], _File(path, stamp)
        length = int.from_bytes(_bytes(path, descriptor, min(size, 64))[:8], "little")
        if size < 8 or length > size - 8:
            raise _error(path, f"not a safetensors file: a header of {length} bytes in {size}")
        if length > limit:
            raise _error(path, f"a header of {length} bytes: {_limit(limit)}")
        header = _json(path, _bytes(path, descriptor, 8 + length)[8:])
        _same(file, _stamp(os.fstat(descriptor)))
    header.pop("__metadata__", None)
    start = 8 + length
    out, spans = {}, []
    for name, info in header.items():
        kind, shape, begin, end = _info(path, name, info)
        out[name] = _Entry(file, kind, shape, start + begin)
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
