"""Regular files, read with bounds; errors begin with the function and the path."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .messages import cut

SECOND = 1_000_000_000  # ns
CLOCK = SECOND // 50  # the clock of file times ticks at least as often
LFS = b"version https://git-lfs.github.com/spec/"  # how a pointer begins


def error(op: str, path: Path, text: str) -> ValueError:
    return ValueError(f"jgg.checkpoints.{op}: {cut(str(path))}: {text}")


def absolute(op: str, path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except TypeError as caught:
        raise TypeError(
            f"jgg.checkpoints.{op}: path must be a path, got {type(path).__name__}"
        ) from caught
    except RuntimeError as caught:  # no such user
        raise error(op, Path(path), str(caught)) from caught


@contextmanager
def about(op: str, path: Path) -> Iterator[None]:
    """The system's errors with the path in front."""
    try:
        yield
    except OSError as caught:
        raise type(caught)(str(error(op, path, caught.strerror or str(caught)))) from caught
    except ValueError as caught:  # a NUL, or what is no character of the file system
        raise error(op, path, str(caught)) from caught


@contextmanager
def regular(op: str, path: Path) -> Iterator[tuple[int, tuple[int, ...]]]:
    """A descriptor of a regular file, and its stamp."""
    with about(op, path):  # without O_NONBLOCK a named pipe waits for its writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with about(op, path):
            status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise error(op, path, "not a regular file")
        yield descriptor, stamp_of(status)
    finally:
        os.close(descriptor)


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Numbers that differ once a file has changed. The third is its size."""
    return (
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )  # fmt: skip


def first_bytes(op: str, path: Path, descriptor: int, size: int) -> bytes:
    """Those of a file that is not a pointer to another."""
    parts, offset = [], 0
    with about(op, path):
        while offset < size and (part := os.pread(descriptor, size - offset, offset)):
            parts.append(part)
            offset += len(part)
    data = b"".join(parts)
    if data.startswith(LFS):
        raise error(
            op,
            path,
            "a Git LFS pointer, not the file that it stands for. Fetch that: git lfs install && "
            "git lfs pull, in the repository that it is in",
        )
    return data


class File(NamedTuple):
    path: Path
    stamp: tuple[int, ...]  # what changes when the file does


def same(op: str, file: File, stamp: tuple[int, ...]) -> None:
    if stamp != file.stamp:
        sizes = f" from {file.stamp[2]} to {stamp[2]} bytes" if stamp[2] != file.stamp[2] else ""
        text = f"the file has changed{sizes} since it was opened: open it again"
        raise error(op, file.path, text)


def settle(stamp: tuple[int, ...]) -> None:
    """Until a change of the file would give it another time than it has."""
    last = max(stamp[3:])
    tick = CLOCK if last % SECOND else 2 * SECOND  # some file systems know even seconds only
    age = time.time_ns() - last
    if 0 <= age < tick:
        time.sleep((tick - age) / SECOND)


def read_array(op: str, file: File, offset: int, shape, dtype, what: str, kind: str) -> np.ndarray:
    """An array that lies at an offset of a file, which has not changed. It cannot be written to.

    ``what``, ``kind``: whose bytes they are, and of which type, for messages.
    """
    with regular(op, file.path) as (descriptor, stamp):
        same(op, file, stamp)
        try:
            out = np.empty(shape, dtype)
        except MemoryError as caught:
            text = f"{what}: no memory for {kind} of shape {shape}"
            raise MemoryError(str(error(op, file.path, text))) from caught
        view = memoryview(out.reshape(-1).view(np.uint8))
        while view:
            with about(op, file.path):
                count = os.preadv(descriptor, [view], offset)
            if not count:
                break
            view, offset = view[count:], offset + count
        with about(op, file.path):
            status = os.fstat(descriptor)
        same(op, file, stamp_of(status))
        if view:
            raise error(op, file.path, f"{what}: the file ends at byte {offset}")
    out.flags.writeable = False
    return out
