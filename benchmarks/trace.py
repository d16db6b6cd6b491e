"""Kernels and copies in a trace of JAX's profiler, as intervals of time."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

Interval = tuple[float, float]  # begin and end, ns


def keep_command_buffers() -> None:
    """While something is profiled XLA runs the kernels of a command buffer one by one, unless this
    has been called before JAX sees a device."""
    flag = "--xla_enable_command_buffers_during_profiling=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def planes_of(folder: Path) -> Any:
    """Planes of the newest trace in the folder."""
    file = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return jax.profiler.ProfileData.from_file(str(file)).planes


def runs(planes: Iterable[Any], gpu: int = 0) -> list[tuple[str, Interval]]:
    """Name and interval of what runs on the streams of a GPU."""
    return [
        (event.name, (event.start_ns, event.end_ns))
        for plane in planes
        if plane.name == f"/device:GPU:{gpu}"
        for line in plane.lines
        if line.name.startswith("Stream #")
        for event in line.events
    ]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union, in order."""
    out: list[Interval] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def length(intervals: Iterable[Interval]) -> float:
    """Nanoseconds that at least one of them covers."""
    return sum(end - begin for begin, end in merged(intervals))


def shared(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """Nanoseconds that both cover."""
    a, b = [*a], [*b]
    return length(a) + length(b) - length([*a, *b])
