"""How long the device has nothing to do between graphs, kernels and copies (CUPTI's timestamps).

JAX's profiler cannot say: while it runs, XLA replays no graphs. A graph counts as one here: to have
the times of its kernels, CUPTI takes 4 ms to launch a thousand of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path

NAMES = {1: "copy", 2: "memset", 51: "graph"}
KERNEL = 10  # outside of graphs
BUFFER, BUFFERS = 2**20, 16  # bytes of one, for some thousand records; made before
START, NAME = 16, 104  # bytes of a record before these; the end follows
START_OF_GRAPH = 8


@dataclasses.dataclass(frozen=True)
class Activity:
    start: int  # ns
    end: int
    name: str


@dataclasses.dataclass(frozen=True)
class Pause:
    """Between the end of all that ran before and the start of what follows."""

    start: int  # ns
    us: float
    before: str
    after: str


def pauses(activities: list[Activity]) -> list[Pause]:
    """All of them, in order of time; activities may overlap and come in any order."""
    found, last = [], None
    for activity in sorted(activities, key=lambda a: a.start):
        if last is not None and activity.start > last.end:
            us = (activity.start - last.end) / 1e3
            found.append(Pause(last.end, us, last.name, activity.name))
        if last is None or activity.end > last.end:
            last = activity
    return found


class Recording:
    """What the device did. Activities are there once the block of :func:`recorded` has ended."""

    def __init__(self, cupti: ctypes.CDLL):
        self._cupti = cupti
        self.activities: list[Activity] = []

    def now(self) -> int:
        """The time on the clock of activities, in ns."""
        time = ctypes.c_uint64()
        _checked(self._cupti.cuptiGetTimestamp(ctypes.byref(time)))
        return time.value

    def between(self, start: int, end: int) -> list[Activity]:
        """Those of this time, and of a part of it: what runs on is no pause."""
        return [a for a in self.activities if start < a.end and a.start < end]


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    cupti = _library()
    buffers = [ctypes.create_string_buffer(BUFFER) for _ in range(BUFFERS)]
    unused = list(buffers)
    filled: list[tuple[int, int]] = []

    def requested(buffer, size, most):
        if not unused:
            buffers.append(ctypes.create_string_buffer(BUFFER))
            unused.append(buffers[-1])
        buffer[0], size[0], most[0] = ctypes.addressof(unused.pop()), BUFFER, 0

    # Read afterwards: meanwhile it would hold up the threads that launch.
    def completed(context, stream, buffer, size, valid):
        filled.append((buffer, valid))

    size = ctypes.POINTER(ctypes.c_size_t)
    requested_type = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p), size, size)
    completed_type = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
    )
    callbacks = requested_type(requested), completed_type(completed)
    recording = Recording(cupti)
    _checked(cupti.cuptiActivityRegisterCallbacks(*callbacks))
    for kind in (*NAMES, KERNEL):
        _checked(cupti.cuptiActivityEnable(kind))
    try:
        yield recording
    finally:
        for kind in (*NAMES, KERNEL):
            _checked(cupti.cuptiActivityDisable(kind))
        _checked(cupti.cuptiActivityFlushAll(1))
        for buffer, valid in filled:
            recording.activities += _read(cupti, buffer, valid)
        _checked(cupti.cuptiFinalize())


def _read(cupti: ctypes.CDLL, buffer: int, valid: int) -> Iterator[Activity]:
    record = ctypes.c_void_p()
    while not cupti.cuptiActivityGetNextRecord(
        ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)
    ):
        at = record.value
        assert at is not None
        kind = ctypes.c_uint32.from_address(at).value
        if kind != KERNEL and kind not in NAMES:
            continue
        first = at + (START_OF_GRAPH if NAMES.get(kind) == "graph" else START)
        start, end = (ctypes.c_uint64.from_address(i).value for i in (first, first + 8))
        name = NAMES.get(kind)
        if name is None:
            name = (ctypes.c_char_p.from_address(at + NAME).value or b"?").decode()
        if start:  # 0 where CUPTI could not tell
            yield Activity(start, end, name)


def _library() -> ctypes.CDLL:
    """The one that this process has loaded."""
    with Path("/proc/self/maps").open() as maps:
        found = {line.split()[-1] for line in maps if "libcupti.so" in line}
    if not found:
        raise RuntimeError("no libcupti is loaded: initialize JAX on an NVIDIA GPU first")
    return ctypes.CDLL(sorted(found)[0])


def _checked(result: int) -> None:
    if result:
        raise RuntimeError(f"CUPTI returned error {result}")
