"""A process that runs lines, one after the other, and says in a file how far it is.

A kernel that writes where it should not, or never ends, ends this process, not its parent, which
reads that file: a JSON object each line. The first argument is what is asked, as JSON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .. import _formats
from .._kernels import kernel, proven
from . import clock, device
from .line import Line, Trial, Verdict, judge
from .lines import lines

REPETITIONS = 20
#: XLA captures as many thunks as this or more into a graph.
_IN_GRAPH = {"xla_gpu_graph_min_graph_size": 1}
#: For maintainers: a line's key, ": ", and a fault of ``FAULTS``; "; " before another one.
PLANT = "JGG_CHECK_PLANT"
FAULTS = ("wrong", "unsteady", "hang", "crash", "raise")

assert _formats  # modes of weights are registered


class Reporter:
    """Writes events, each at once."""

    def __init__(self, path: str):
        self._path, self._parent = path, os.getppid()

    def __call__(self, event: str, **fields: Any) -> None:
        if os.getppid() != self._parent:  # nobody reads it any more
            os._exit(1)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")


def main(asked: dict[str, Any]) -> None:
    report = Reporter(asked["report"])
    with proven.trusted():
        if asked["do"] == "device":
            report("device", **device.here().encoded())
            return
        here = device.Device.of(asked["device"])
        by_key = {line.key: line for line in lines(here)}
        jax.block_until_ready(jax.numpy.zeros(1) + 1)
        report("started")
        for key in asked["lines"]:
            report("line", key=key)
            line = by_key[key]
            try:
                if asked["do"] == "time":
                    report("timed", key=key, **clock.timed(line, here))
                else:
                    report("done", key=key, **_checked(line, here, asked["quick"], report))
            except Exception as error:  # the device may be lost: the parent starts another process
                traceback.print_exc()
                says = (str(error).strip().splitlines() or [""])[0]
                report("failed", key=key, problem=f"{type(error).__name__}: {says}"[:300])
                return


def _checked(line: Line, here: device.Device, quick: bool, report: Reporter) -> dict[str, Any]:
    """Cases, kernels, the worst error, and the first problem."""
    rng = np.random.default_rng(list(line.key.encode()))
    kernels: dict[str, None] = {}
    cases, wrong, worst, problem = 0, 0, Verdict(), None
    fault = _planted(line.key)
    for number, trial in enumerate(line.trials(rng, quick)):
        report("case", label=trial.label)
        lowered, found = _lowered(trial)
        if not found:
            continue
        kernels |= dict.fromkeys(found)
        report("kernels", kernels=list(kernels))
        graph = here.platform == "cuda" and number % 2 == 1
        call = _faulty(lowered.compile(_IN_GRAPH if graph else None), fault)
        for label, verdict in _runs(trial, call, report):
            cases += 1
            worst = Verdict(max(worst.error, verdict.error), max(worst.share, verdict.share), None)
            wrong += verdict.problem is not None
            if verdict.problem and problem is None:
                problem = f"{label}: {verdict.problem}"
    if wrong > 1:
        problem = f"{problem}; {wrong} of {cases} cases are wrong"
    return {
        "cases": cases, "kernels": list(kernels), "error": _number(worst.error),
        "share": _number(worst.share), "problem": problem,
    }  # fmt: skip


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _lowered(trial: Trial) -> tuple[Any, list[str]]:
    """The program, and the kernels that it calls."""
    with kernel.watched() as plans:
        lowered = jax.jit(trial.function).lower(*trial.runs[0].operands)
    targets = dict.fromkeys(re.findall(r"custom_call @(jgg_\w+)", lowered.as_text()))
    planned = [proven.key(p.kernel) for p in plans if p.target in targets]
    unplanned = targets.keys() - {p.target for p in plans}
    return lowered, [*dict.fromkeys(planned), *sorted(unplanned)]


def _runs(trial: Trial, call: Callable[..., Any], report: Reporter):
    """Verdicts of all runs; of the first one again after the others, and many times."""
    first, same = None, None
    for run in trial.runs:
        label = f"{trial.label}, {run.label}"
        report("case", label=label)
        operands = jax.device_put(run.operands)
        got = _fetched(call(*operands))
        if first is None:
            first, same = got, run
        verdict = judge(got, run.wants())
        yield label, verdict
        del operands
    if first is None or same is None:
        return
    label = f"{trial.label}, {same.label}, {REPETITIONS} times"
    report("case", label=label)
    operands = jax.device_put(same.operands)
    differ = sum(not _same_bits(_fetched(call(*operands)), first) for _ in range(REPETITIONS))
    problem = f"{differ} of {REPETITIONS} repetitions have other bits" if differ else None
    yield label, Verdict(0.0, np.inf if differ else 0.0, problem)


def _fetched(out) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.device_get(jax.tree.leaves(out))]


def _same_bits(got: list[np.ndarray], want: list[np.ndarray]) -> bool:
    return all(g.tobytes() == w.tobytes() for g, w in zip(got, want, strict=True))


# ---- planted faults ----------------------------------------------------------------------------


def _planted(key: str) -> str | None:
    """The fault that a line is to have, for tests of this command."""
    for plant in os.environ.get(PLANT, "").split("; "):
        where, _, fault = plant.rpartition(": ")
        if where == key:
            return fault
    return None


def _faulty(call: Callable[..., Any], fault: str | None) -> Callable[..., Any]:
    if fault is None:
        return call
    if fault not in FAULTS:
        raise ValueError(f"{PLANT}: {fault!r} is not one of {', '.join(FAULTS)}")
    calls = 0

    def faulty(*operands):
        nonlocal calls
        calls += 1
        if fault == "hang":
            time.sleep(1e6)
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "raise":
            raise RuntimeError("planted")
        out = call(*operands)
        if fault == "wrong" or calls % 7 == 0:
            leaves, tree = jax.tree.flatten(out)
            last = leaves[0].reshape(-1)[:1]
            leaves[0] = leaves[0].reshape(-1).at[:1].set(last + 1).reshape(leaves[0].shape)
            out = jax.tree.unflatten(tree, leaves)
        return out

    return faulty


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
