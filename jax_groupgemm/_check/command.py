"""Check every kernel of this GPU, or CPU, against float64, and print a table.

python -m jax_groupgemm.check [--quick] [--only NAME ...] [--timeout SECONDS] [--json FILE] [--list]

Each operation has a process of its own. One that hangs or crashes is a line of the table. Ends with
0 where every line is right, else with 1. What passed on a GPU is remembered in the user's cache:
kernels that need a proof are then on, until GPU, driver or package is another.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._kernels import proven
from . import processes, table
from .device import Device
from .lines import selected
from .processes import Result

#: Set where a test plants a fault: then nothing is remembered.
PLANT = "JGG_CHECK_PLANT"


def arguments(argv=None) -> argparse.Namespace:
    about, *_ = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(prog=proven.COMMAND, description=about)
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="lines of these names, or parts")
    add("--quick", action="store_true", help="fewer cases, no times, and nothing is remembered")
    add("--timeout", type=float, default=60.0, metavar="SECONDS",
        help="for one case, its compilation included (60)")  # fmt: skip
    add("--jobs", type=int, metavar="N",
        help="processes at a time; by default one for two cores, at most 6")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the table for programs, too")
    add("--list", action="store_true", help="print the names of lines, and check nothing")
    args = parser.parse_args(argv)
    if not args.timeout > 0:
        parser.error("--timeout must be positive")
    return args


def find_device(limit: float) -> Device:
    """Asked of a child. SystemExit where it does not answer."""
    for event in processes.events({"do": "device"}, limit):
        if isinstance(event, processes.Ended):
            raise SystemExit(f"{proven.COMMAND}: no device: {event.says}\n{event.stderr[-2000:]}")
        if event.pop("event") == "device":
            return Device.of(event)
    raise AssertionError


class Checks:
    """Lines of one run, and what became of them."""

    def __init__(self, device: Device, args: argparse.Namespace):
        self.device, self.args = device, args
        self.lines = selected(device, args.only)
        self.keys = [line.key for line in self.lines]
        self._begun, self._lock = 0, threading.Lock()

    def _asked(self, do: str) -> dict[str, Any]:
        return {"do": do, "device": self.device.encoded(), "quick": self.args.quick}

    def _say(self, what: str) -> None:
        with self._lock:
            self._begun += 1
            print(f"\r\033[K{self._begun}/{len(self.keys)} {what}", end="", file=sys.stderr)

    def run(self) -> list[Result]:
        """All lines, those of several operations at a time; then, alone, those that are timed.
        Interrupted, it has those that are done."""
        found: dict[str, Result] = {}
        try:
            self._check(found)
            if self.device.platform == "cuda" and not self.args.quick:
                self._time(found)
        except KeyboardInterrupt:
            processes.stop()
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        return [found[key] for key in self.keys if key in found]

    def _check(self, found: dict[str, Result]) -> None:
        parts: dict[str, list[str]] = {}
        for line in self.lines:
            parts.setdefault(line.part(self.args.quick), []).append(line.key)
        say = self._say if sys.stderr.isatty() else lambda what: None
        most = 6 if self.device.platform == "cuda" else 2
        jobs = self.args.jobs or min(most, max((os.cpu_count() or 1) // 2, 2))

        def check(keys: list[str]) -> None:
            for result in processes.run(keys, self._asked("check"), self.args.timeout, say):
                if not processes.stopped():  # then it was ended
                    found[result.key] = result  # what came last: a crash after its last case

        pool = concurrent.futures.ThreadPoolExecutor(max(jobs, 1))
        try:
            for done in concurrent.futures.as_completed(
                [pool.submit(check, keys) for keys in parts.values()]
            ):
                done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _time(self, found: dict[str, Result]) -> None:
        """Times are of nobody else's work: one process. A line that cannot be timed has none."""
        keys = [
            line.key for line in self.lines
            if line.timed is not None and found[line.key].state == "ok"
        ]  # fmt: skip
        for timed in processes.run(keys, self._asked("time"), self.args.timeout):
            line = found[timed.key]
            if timed.right:
                line.us, line.floor_us = timed.us, timed.floor_us
            else:
                line.more["timing"] = f"{timed.state}: {timed.problem}"
                if timed.state in ("hung", "crashed"):
                    line.state, line.problem = timed.state, f"while it was timed, {timed.problem}"


def remembered(device: Device, results: Sequence[Result], args: argparse.Namespace) -> str | None:
    """Writes the proof, where there is one, and says so."""
    if device.platform != "cuda" or os.environ.get(PLANT):
        return None
    if args.quick or args.only:
        return "Nothing is remembered: that takes a run without --quick and --only."
    if device.place is None:
        return (
            "Nothing is remembered: the driver's version is unknown, or GPUs are of several kinds."
        )
    kernels = table.proved(results)
    right = sum(result.right for result in results)
    try:
        path = proven.write(device.place, kernels, {"lines": len(results), "right": right})
    except OSError as error:
        return f"Nothing is remembered: {error}. {proven.VARIABLE} names another folder."
    return f"{len(kernels)} kernels are proven on this GPU: {path}"


def main(argv=None) -> int:
    args = arguments(argv)
    device = find_device(args.timeout)
    if args.list:
        print("\n".join(line.key for line in selected(device, args.only)))
        return 0
    print("\n".join(table.head(device)), flush=True)
    if device.problem is not None:
        print(f"There is no kernel to check: {device.problem}.")
        return 1
    if threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # the table so far, and children end
    checks = Checks(device, args)
    if not checks.keys:
        raise SystemExit(f"{proven.COMMAND}: no line has {' or '.join(args.only)}; see --list")
    results = checks.run()
    missing = len(checks.keys) - len(results)
    whole = not (args.only or args.quick or missing)
    print("\n".join(["", *table.text(results), "", *table.summary(results, device, whole)]))
    if missing:
        print(f"It was interrupted: {missing} lines did not run, and nothing is remembered.")
    elif says := remembered(device, results, args):
        print(says)
    status = 0 if all(result.right for result in results) and not missing else 1
    if args.json is not None:
        args.json.write_text(json.dumps(table.data(device, results, status), indent=1) + "\n")
    return status
