"""The table, and the same for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .._kernels import extension, proven
from .device import Device
from .processes import Result

_HEAD = ("operation", "dtype", "kernels", "cases", "error", "of allowed", "us", "floor", "")


def head(device: Device) -> list[str]:
    """The machine and versions, for whoever reads the table elsewhere."""
    where = device.kind
    if device.capability:
        driver = device.place.driver if device.place else "unknown"
        where += f", compute capability {device.capability / 10:.1f}, driver {driver}"
    build = f"CUDA {extension.BUILD.cuda}" if extension.BUILD.cuda else "no CUDA"
    versions = ", ".join(f"{name} {extension.version(name)}" for name in ("jax", "jaxlib"))
    return [where, f"jax_groupgemm {extension.VERSION} ({build}), {versions}"]


def text(results: Sequence[Result]) -> list[str]:
    """A row for each line that has a kernel, and below one that is not right why."""
    shown = [result for result in results if result.state != "none"]
    rows = [_HEAD, *map(_row, shown)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    right = range(3, 8)
    lines = []
    for row, result in zip(rows, [None, *shown], strict=True):
        cells = (
            f"{cell:>{width}}" if i in right else f"{cell:{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
        if result is not None and not result.right:
            at = f" In {result.case}." if result.case else ""
            lines.append(f"    {result.problem}.{at}")
    return lines


def _share(share: float | None) -> str:
    if share is None:
        return ""
    return ">999%" if share > 9.99 else format(share, ".0%")


def _row(result: Result) -> tuple[str, ...]:
    operation, dtype = result.key.rsplit(", ", 1)
    number = lambda value, spec: "" if value is None else format(value, spec)
    return (
        operation, dtype, _kernels(result.kernels), str(result.cases or ""),
        number(result.error, ".1e"), _share(result.share), number(result.us, ".1f"),
        number(result.floor_us, ".1f"), "ok" if result.right else result.state.upper(),
    )  # fmt: skip


def _kernels(names: Sequence[str]) -> str:
    """``mm sm90``; of several, each call once, with all that ran it, and not more than two."""
    by_target: dict[str, list[str]] = {}
    for name in names:
        target, _, implementation = name.partition(" ")
        by_target.setdefault(target.removeprefix("jgg_"), []).append(implementation)
    of = [f"{target} {'/'.join(filter(None, ran))}".strip() for target, ran in by_target.items()]
    return ", ".join(of[:2] + ([f"{len(of) - 2} more"] if len(of) > 2 else []))


def summary(results: Sequence[Result], device: Device, whole: bool) -> list[str]:
    """Counts, and the kernels that no case reached."""
    shown = [result for result in results if result.state != "none"]
    wrong = [result.key for result in shown if not result.right]
    cases = sum(result.cases for result in shown)
    lines = [f"{len(shown) - len(wrong)} of {len(shown)} lines are right, of {cases} cases."]
    if not shown:
        return ["Nothing here has a kernel."]
    if wrong:
        lines.append(f"Not right: {'; '.join(wrong)}.")
    ran = {kernel for result in shown for kernel in result.kernels}
    if whole and (rest := [kernel for kernel in device.kernels if kernel not in ran]):
        lines.append(f"Kernels that no case reached: {', '.join(rest)}.")
    return lines


def proved(results: Sequence[Result]) -> list[str]:
    """The kernels that ran in lines that are right, and in no other. Nothing, where a line was not
    right before anybody knew its kernels."""
    wrong = [result for result in results if not result.right]
    if any(not result.kernels for result in wrong):
        return []
    spoiled = {kernel for result in wrong for kernel in result.kernels}
    ran = {kernel for result in results if result.right for kernel in result.kernels}
    return sorted(ran - spoiled)


def data(device: Device, results: Sequence[Result], exit_status: int) -> dict[str, Any]:
    """The same for programs."""
    return {
        "device": device.encoded(),
        "jax_groupgemm": extension.VERSION,
        "jax": extension.version("jax"),
        "jaxlib": extension.version("jaxlib"),
        "command": proven.COMMAND,
        "exit": exit_status,
        "lines": [dataclasses.asdict(result) for result in results],
    }
