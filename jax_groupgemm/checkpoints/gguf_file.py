"""GGUF files as one lazy mapping, their headers read with bounds of our own.

A file is ``GGUF``, a version, two counts, so many named values (the metadata), so many entries of
tensors, padding, and the tensors' bytes. Numbers are little-endian. No number of a file decides how
much is allocated or how long a loop runs before it was compared with the bytes that are there.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import files, gguf_types
from .files import File
from .gguf_types import PLAIN, Blocks
from .messages import brief
from .safetensors import MAX_SIZE, OP, Entry, Tensors

MAGIC = b"GGUF"
OLDER = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # of files before GGUF
VERSIONS = (2, 3)
MAX_AXES = 4  # ggml's
# Far more than any model has: what a header makes in memory is a few times its own bytes.
MAX_VALUES, MAX_TENSORS, MAX_STRINGS, MAX_ARRAYS, MAX_DEPTH = 2**16, 2**18, 2**22, 2**18, 4
ALIGNMENT = 32  # where metadata says none
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[gG][gG][uU][fF])")
STRING, ARRAY, BOOL, UINT32 = 8, 9, 7, 4
NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
SIZES = {kind: np.dtype(name).itemsize for kind, name in NUMBERS.items()}

_error = partial(files.error, OP)


class Metadata(Mapping[str, Any]):
    """The named values of a GGUF file: numbers, bool, str; arrays of numbers as numpy arrays,
    others as lists. Each is made when it is asked for."""

    def __init__(self, path: Path, data: bytes, found: dict[str, tuple[int, int]]) -> None:
        self._path, self._data, self._found = path, data, found

    def __getitem__(self, key: str) -> Any:
        if key not in self._found:
            raise KeyError(f"jgg.checkpoints.open: no metadata {brief(key)}")
        kind, at = self._found[key]
        return self._value(key, kind, at)[0]

    def _value(self, key: str, kind: int, at: int) -> tuple[Any, int]:
        """A value, and where it ends. That it is within the header has been seen."""
        if kind == STRING:
            return self._string(key, at)
        if kind != ARRAY:
            end = at + SIZES[kind]
            return self._numbers(key, kind, at, end)[0].item(), end
        inner, count = struct.unpack_from("<IQ", self._data, at)
        at += 12
        if inner in SIZES:
            end = at + count * SIZES[inner]
            return self._numbers(key, inner, at, end), end
        out = []
        for _ in range(count):
            value, at = self._value(key, inner, at)
            out.append(value)
        return out, at

    def _string(self, key: str, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._data, at)
        at, end = at + 8, at + 8 + length
        try:
            return self._data[at:end].decode(), end
        except UnicodeDecodeError as error:  # whose text has all of the bytes
            text = f"metadata {brief(key)}: byte {error.start} of a string is not UTF-8"
            raise _error(self._path, text) from None

    def _numbers(self, key: str, kind: int, at: int, end: int) -> np.ndarray:
        raw = np.frombuffer(self._data[at:end], np.uint8)
        if kind == BOOL and np.any(raw > 1):
            raise _error(self._path, f"metadata {brief(key)}: {raw.max()} is not a bool, 0 or 1")
        return raw.view(NUMBERS[kind])

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"<{len(self)} values of metadata>"


class GGUF(Tensors):
    """The tensors of GGUF files, as :func:`open` returns them: numpy arrays, or :class:`Blocks`.

    ``.metadata`` has the named values of the file, of the first of several.
    """

    def __init__(self, entries: dict[str, Entry], metadata: Metadata) -> None:
        super().__init__(entries)
        self.metadata = metadata

    def __getitem__(self, name: str) -> Any:
        file, kind, shape, offset, nbytes = self._entry(name)
        if kind in PLAIN:
            return super().__getitem__(name)
        rows = math.prod(shape[:-1])
        row = nbytes // rows if rows else 0

        def read(start: int, stop: int) -> np.ndarray:
            what, begin = f"tensor {brief(name)}", offset + start * row
            return files.read_array(OP, file, begin, (stop - start, row), np.uint8, what, kind)

        return Blocks(kind, shape, read)

    def __repr__(self) -> str:
        paths = {entry.file.path for entry in self._entries.values()}
        return f"<{len(self)} tensors in {len(paths)} GGUF files>"


def is_one(path: Path) -> bool:
    """Whether a file's name or its first bytes say GGUF. Ollama's files have no such name."""
    suffix = path.suffix.lower()
    if suffix in (".gguf", ".json", ".safetensors"):
        return suffix == ".gguf"
    try:
        if not path.is_file():
            return False
        with files.regular(OP, path) as (descriptor, _):
            return os.pread(descriptor, 4, 0) == MAGIC
    except (OSError, ValueError):  # whoever opens it says so
        return False


def read(path: Path, limit: int) -> GGUF:
    """A file, or all of those that it is one of."""
    first, said = _file(path, limit), PART.fullmatch(path.name)
    count = first.part("split.count", 1)
    if said is None or count <= 1:
        if count > 1:
            no = first.part("split.no", 0) + 1
            raise _error(
                path,
                f"part {no} of {count} of a model: name it ...-{no:05}-of-{count:05}.gguf, beside "
                "the others",
            )
        if said is not None and int(said[3]) > 1:
            raise _error(path, f"its name says one of {int(said[3])} parts, its metadata does not")
        return GGUF(first.entries, first.metadata)
    stem, suffix = said[1], said[4]
    if int(said[3]) != count:
        raise _error(path, f"its name says {int(said[3])} parts, its metadata split.count={count}")
    begin, entries = None, {}
    for no in range(count):
        where = path.with_name(f"{stem}-{no + 1:05}-of-{count:05}{suffix}")
        try:
            part = first if where == path else _file(where, limit)
        except FileNotFoundError as error:
            text = f"{where.name} is missing, part {no + 1} of {count}"
            raise FileNotFoundError(str(_error(path, text))) from error
        have = part.part("split.no", 0), part.part("split.count", 1)
        if have != (no, count):
            text = f"metadata says split.no={have[0]}, split.count={have[1]}"
            raise _error(where, f"{text}, expected {no} and {count}")
        begin = begin or part
        twice = next((name for name in part.entries if name in entries), None)
        if twice is not None:
            other = entries[twice].file.path.name
            raise _error(path, f"tensor {brief(twice)} is in {other} and {where.name}")
        entries |= part.entries
    assert begin is not None
    total = begin.part("split.tensors.count", len(entries))
    if total != len(entries):
        text = f"metadata says split.tensors.count={total}, but the {count} parts have"
        raise _error(path, f"{text} {len(entries)} tensors")
    return GGUF(entries, begin.metadata)


class _Part(NamedTuple):
    """One file."""

    path: Path
    entries: dict[str, Entry]
    metadata: Metadata

    def part(self, key: str, default: int) -> int:
        value = self.metadata.get(key, default)
        if type(value) is not int or not 0 <= value < 2**31:
            raise _error(self.path, f"metadata says {key}={brief(value)}, expected a number")
        return value


class _Reader:
    """A header, read on as it is asked for; ``at`` is where it has been read up to."""

    def __init__(self, path: Path, descriptor: int, size: int, limit: int) -> None:
        self.path, self.descriptor, self.size, self.limit = path, descriptor, size, limit
        self.data, self.at, self.arrays = bytearray(), 0, 0

    def take(self, count: int, what: str) -> int:
        """The place of the next bytes, read if they were not."""
        begin, end = self.at, self.at + count
        if end > len(self.data):
            self._read(end, what)
        self.at = end
        return begin

    def _read(self, end: int, what: str) -> None:
        if end > self.size:
            at = f"byte {end}, the file at {self.size}"
            raise _error(self.path, f"malformed GGUF: {what} ends at {at}")
        if end > self.limit:
            raise _error(
                self.path,
                f"a header of more than {self.limit} bytes, which is the limit: "
                "open(..., max_header_bytes=) sets another",
            )
        wanted = min(max(end, 2 * len(self.data), 2**16), self.size, self.limit)
        while len(self.data) < wanted:
            with files.about(OP, self.path):
                more = os.pread(self.descriptor, wanted - len(self.data), len(self.data))
            if not more:
                at = len(self.data)
                raise _error(self.path, f"the file has changed while it was read: ends at {at}")
            self.data += more

    def number(self, form: str, what: str) -> int:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]

    def many(self, count: int, least: int, most: int, what: str) -> int:
        """A count of things that take so many bytes at least, which may be there."""
        if count * least > self.size - self.at:
            text = f"{count} {what}, in a file of {self.size} bytes"
            raise _error(self.path, f"malformed GGUF: {text}")
        if count > most:
            raise _error(self.path, f"{count} {what}, more than {most}")
        return count

    def name(self, what: str) -> str:
        begin = self.take(self.number("<Q", f"the name of {what}"), f"the name of {what}")
        try:
            return self.data[begin : self.at].decode()
        except UnicodeDecodeError:
            raise _error(self.path, f"malformed GGUF: the name of {what} is not UTF-8") from None

    def skip(self, kind: int, what: str, depth: int = 0) -> None:
        """Go past a value of metadata."""
        if kind in SIZES:
            self.take(SIZES[kind], what)
        elif kind == STRING:
            self.take(self.number("<Q", what), what)
        elif kind == ARRAY:
            if depth == MAX_DEPTH:
                raise _error(self.path, f"{what}: arrays are nested more than {MAX_DEPTH} deep")
            inner, count = self.number("<I", what), self.number("<Q", what)
            if inner in SIZES:
                self.take(count * SIZES[inner], what)
            elif inner == STRING:
                self._strings(self.many(count, 8, MAX_STRINGS, f"strings of {what}"), what)
            elif inner == ARRAY:
                self.arrays += count
                self.many(count, 12, MAX_ARRAYS, f"arrays of {what}")
                self.many(self.arrays, 0, MAX_ARRAYS, "arrays in arrays")
                for _ in range(count):
                    self.skip(ARRAY, what, depth + 1)
            else:
                self._unknown(inner, what)
        else:
            self._unknown(kind, what)

    def _strings(self, count: int, what: str) -> None:
        """As ``skip`` of each. Vocabularies have hundreds of thousands."""
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            at = self.at + 8
            if at <= len(self.data) and (end := at + length(self.data, at - 8)[0]) <= len(
                self.data
            ):
                self.at = end
            else:
                self.skip(STRING, what)

    def _unknown(self, kind: int, what: str) -> None:
        raise _error(self.path, f"malformed GGUF: {what} has values of the unknown type {kind}")


def _file(path: Path, limit: int) -> _Part:
    """The tensors and the metadata of one file, its header checked."""
    with files.regular(OP, path) as (descriptor, stamp):
        files.settle(stamp)
        size, file = stamp[2], File(path, stamp)
        begin = files.first_bytes(OP, path, descriptor, min(size, 64))
        _is_gguf(path, begin)
        header = _Reader(path, descriptor, size, limit)
        header.take(8, "the version")
        tensors = header.number("<Q", "the number of tensors")
        values = header.number("<Q", "the number of values")
        header.many(values, 13, MAX_VALUES, "values of metadata")
        header.many(tensors, 24, MAX_TENSORS, "tensors")
        found: dict[str, tuple[int, int]] = {}
        for i in range(values):
            key = header.name(f"value {i} of metadata")
            what = f"metadata {brief(key)}"
            if key in found:
                raise _error(path, f"{what} appears twice")
            kind = header.number("<I", what)
            found[key] = kind, header.at
            header.skip(kind, what)
        metadata = Metadata(path, bytes(header.data[: header.at]), found)
        infos = [_info(header, i) for i in range(tensors)]
        with files.about(OP, path):
            status = os.fstat(descriptor)
        files.same(OP, file, files.stamp_of(status))
    unit = _alignment(path, metadata)
    start = -(-header.at // unit) * unit
    return _Part(path, _placed(file, start, unit, infos), metadata)


def _is_gguf(path: Path, begin: bytes) -> None:
    if begin[:4] in OLDER:
        raise _error(path, "a file of ggml before GGUF, which llama.cpp no longer reads either")
    if begin[:4] != MAGIC or len(begin) < 8:
        raise _error(path, f"not a GGUF file: it begins with {brief(begin[:8])}")
    version = int.from_bytes(begin[4:8], "little")
    if version not in VERSIONS:
        if int.from_bytes(begin[4:8], "big") in (1, *VERSIONS):
            raise _error(path, "a big-endian GGUF file, which is not read")
        raise _error(path, f"GGUF version {version} is not read, expected 2 or 3")


class _Info(NamedTuple):
    name: str
    kind: gguf_types.Type
    shape: tuple[int, ...]
    nbytes: int
    offset: int


def _info(header: _Reader, i: int) -> _Info:
    """A tensor's entry. Its axes are stored from the innermost to the outermost."""
    name = header.name(f"tensor {i}")
    what = f"tensor {brief(name)}"
    axes = header.number("<I", what)
    if axes > MAX_AXES:
        raise _error(header.path, f"{what} has {axes} axes, more than {MAX_AXES}")
    shape = tuple(header.number("<Q", what) for _ in range(axes))[::-1]
    kind = gguf_types.of_number(header.number("<I", what))
    offset = header.number("<Q", what)
    size = max(kind.nbytes, 1)
    for n in shape:
        size *= max(n, 1)
        if size > MAX_SIZE:
            raise _error(header.path, f"{what}: shape {shape} is too large")
    if (shape or (1,))[-1] % kind.elements:
        raise _error(
            header.path,
            f"{what}: shape {shape} of {kind.name}, whose rows are multiples of {kind.elements}",
        )
    nbytes = 0 if 0 in shape else size // max(kind.nbytes, 1) // kind.elements * kind.nbytes
    return _Info(name, kind, shape, nbytes, offset)


def _alignment(path: Path, metadata: Metadata) -> int:
    unit = metadata.get("general.alignment", ALIGNMENT)
    if type(unit) is not int or unit <= 0 or unit & (unit - 1):
        raise _error(path, f"general.alignment is {brief(unit)}, expected a power of two")
    return unit


def _placed(file: File, start: int, unit: int, infos: list[_Info]) -> dict[str, Entry]:
    """Entries by name: within the file, aligned, none over another."""
    out: dict[str, Entry] = {}
    size = file.stamp[2]
    for name, kind, shape, nbytes, offset in infos:
        what, begin = f"tensor {brief(name)}", start + offset
        if name in out:
            raise _error(file.path, f"{what} appears twice")
        if offset % unit:
            raise _error(file.path, f"{what}: offset {offset} is not a multiple of {unit}")
        if begin + nbytes > size and nbytes:
            at = f"byte {begin + nbytes}, the file at {size}"
            raise _error(file.path, f"truncated: {what} ends at {at}")
        out[name] = Entry(file, kind.name, shape, begin, nbytes)
    last, before = 0, ""
    for name, entry in sorted(out.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.nbytes:
            if entry.offset < last:
                raise _error(file.path, f"tensor {brief(name)} overlaps tensor {brief(before)}")
            last, before = entry.offset + entry.nbytes, name
    return out
