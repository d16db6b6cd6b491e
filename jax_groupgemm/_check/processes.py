"""Child processes with a time limit: what hangs or crashes there ends neither this process nor the
command. This process starts no backend, so the device is the children's alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
START = 120.0  # seconds for importing and for starting a backend
_POLL = 0.05
_LIVE: set[subprocess.Popen[bytes]] = set()
_STOPPED = threading.Event()


def stopped() -> bool:
    return _STOPPED.is_set()


def stop() -> None:
    """Ends all children; nothing starts another one."""
    _STOPPED.set()
    for child in list(_LIVE):
        _end(child)


@dataclasses.dataclass
class Result:
    """The outcome of a line.

    Attributes:
      state: "ok", "wrong", "hung", "crashed", "failed" (it raised), or "none": it has no kernel.
      problem: a sentence, where it is not right.
      case: the last one that began.
      error, share: the largest error, of the size of sums and of what is allowed.
    """

    key: str
    state: str
    problem: str | None = None
    case: str | None = None
    cases: int = 0
    kernels: tuple[str, ...] = ()
    error: float | None = None
    share: float | None = None
    us: float | None = None
    floor_us: float | None = None
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def right(self) -> bool:
        return self.state in ("ok", "none")


def environment() -> dict[str, str]:
    """That of children: one device, no memory before it is needed, and the package's own defaults
    instead of the user's settings of JAX."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms and "cpu" not in platforms.split(","):
        platforms += ",cpu"  # which makes what some results are compared with
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    # Several children multiply in numpy at a time.
    threads = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return threads | kept | ({"JAX_PLATFORMS": platforms} if platforms else {}) | {
        "CUDA_VISIBLE_DEVICES": gpus[0],
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip


@dataclasses.dataclass
class Ended:
    """How a child ended: its exit status, or None where it was killed for its time."""

    status: int | None
    stderr: str

    @property
    def says(self) -> str:
        """In words, with the last line of its stderr."""
        if self.status is None:
            return "it took too long"
        how = f"it ended with status {self.status}"
        if self.status < 0:
            with contextlib.suppress(ValueError):
                how = f"it ended with {signal.Signals(-self.status).name}"
        lines = self.stderr.strip().splitlines()
        return f"{how}: {lines[-1].strip()[:200]}" if lines and self.status > 0 else how


def events(asked: dict[str, Any], limit: float) -> Iterator[dict[str, Any] | Ended]:
    """Yields what a child reports, as it does, and at last how it ended. It is killed if it
    reports nothing for ``limit`` seconds, or ``START`` before the first event."""
    with tempfile.TemporaryDirectory(prefix="jgg-check-") as folder:
        report, errors = Path(folder, "report"), Path(folder, "stderr")
        report.touch()
        command = [sys.executable, "-m", "jax_groupgemm._check.child"]
        command.append(json.dumps(asked | {"report": str(report)}))
        with errors.open("wb") as stderr:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
                env=environment(), start_new_session=True,
            )  # fmt: skip
        _LIVE.add(child)
        try:
            with report.open(encoding="utf-8") as read:
                yield from _followed(child, read, limit)
        finally:
            _end(child)
            _LIVE.discard(child)
        status = child.returncode
        killed = status == -signal.SIGKILL and getattr(child, "timed_out", False)
        text = errors.read_text(errors="replace")[-20_000:]
        yield Ended(None if killed else status, text)


def _followed(child, read, limit: float) -> Iterator[dict[str, Any]]:
    waits, rest = max(START, limit), ""
    deadline = time.monotonic() + waits
    while True:
        ended = child.poll() is not None  # before reading: then all that it wrote is there
        while text := read.read():
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # a process that breaks may write anything
                    yield dict(json.loads(line))
                deadline = time.monotonic() + limit
        if ended:
            return
        if time.monotonic() > deadline:
            child.timed_out = True
            return
        time.sleep(_POLL)


def _end(child) -> None:
    """It and what it started; one that the driver holds is left after some seconds."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)


def run(
    keys: Sequence[str], asked: dict[str, Any], limit: float,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:  # fmt: skip
    """Results of lines, which share a process until one of them ends it: then the next process has
    the rest."""
    left = list(keys)
    while left and not stopped():
        found, ended = yield from _once(left, asked, limit, say)
        if not found:  # it never began a line
            for key in left:
                state = "hung" if ended.status is None else "crashed"
                yield Result(key, state, f"its process did not start: {ended.says}")
            return
        left = left[len(found) :]


def _once(left, asked, limit, say):
    """Lines that were begun, and how the process ended."""
    begun: list[str] = []
    case, kernels, open_line, ended, raised = None, (), None, Ended(None, ""), False
    for event in events(asked | {"lines": left}, limit):
        if isinstance(event, Ended):
            ended = event
            break
        kind = event.pop("event")
        if kind == "line":
            open_line, case, kernels = event["key"], None, ()
            begun.append(open_line)
            say(open_line)
        elif kind == "case":
            case = event["label"]
        elif kind == "kernels":
            kernels = tuple(event["kernels"])
        elif kind == "failed":
            yield Result(event["key"], "failed", event["problem"], case, kernels=kernels)
            open_line, raised = None, True
        elif kind in ("done", "timed"):
            open_line = None
            yield _result(kind, event)
    if open_line is not None:
        state = "hung" if ended.status is None else "crashed"
        seconds = f"it took longer than {limit:g} s" if ended.status is None else ended.says
        yield Result(open_line, state, seconds, case, kernels=kernels)
    elif begun and not raised and ended.status != 0:
        yield Result(begun[-1], "crashed", f"after its last case, {ended.says}", kernels=kernels)
    return begun, ended


def _result(kind: str, event: dict[str, Any]) -> Result:
    key = event.pop("key")
    if kind == "timed":
        return Result(key, "ok", us=event.get("us"), floor_us=event.get("floor_us"))
    event["kernels"] = tuple(event["kernels"])
    state = "wrong" if event["problem"] else "ok" if event["kernels"] else "none"
    return Result(key, state, **event)
