"""A line of the table: programs of one operation and dtype, their operands, what they must give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Want:
    """A result, and how far from it is right.

    Attributes:
      value: float64, or whole numbers, which must be the same.
      allowed: the largest right difference of each element, or of all.
      scale: what differences are divided by where they are printed.
    """

    value: np.ndarray
    allowed: Any = 0.0
    scale: Any = 1.0


@dataclasses.dataclass(frozen=True)
class Run:
    """Operands of a program, and ``wants()``: in turn, lists of results that are right."""

    label: str
    operands: tuple[Any, ...]
    wants: Callable[[], Iterable[Sequence[Want]]]


@dataclasses.dataclass(frozen=True)
class Trial:
    """A program, which is compiled once for several runs: sizes are data."""

    label: str
    function: Callable[..., Any]
    runs: Sequence[Run]


_FORMS = ("prepacked", "sm80")
_GRADIENTS = ("dx", "dw", "options", "gradients")


@dataclasses.dataclass(frozen=True)
class Line:
    """An operation and a dtype.

    Attributes:
      trials: ``trials(rng, quick)``.
      timed: ``timed(rng)``, a program and operands that are large enough to be timed, or None.
    """

    name: str
    dtype: str
    trials: Callable[[np.random.Generator, bool], Iterator[Trial]]
    timed: Callable[[np.random.Generator], tuple[Callable[..., Any], tuple[Any, ...]]] | None = None

    @property
    def key(self) -> str:
        return f"{self.name}, {self.dtype}"

    def part(self, quick: bool) -> str:
        """Lines of one part share a process, until one of them ends it: an operation in each of its
        layouts and kernels. Where there are few cases, its gradients, too: starting takes longer
        than they do."""
        words = self.name.split()
        return " ".join(w for w in words if w not in (_FORMS + _GRADIENTS if quick else _FORMS))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The largest difference, as a share of the scale and of what is allowed; and what is wrong."""

    error: float = 0.0
    share: float = 0.0
    problem: str | None = None


def judge(got: Sequence[np.ndarray], alternatives: Iterable[Sequence[Want]]) -> Verdict:
    """The verdict of the first alternative that the results fit, or else of the nearest."""
    best = None
    for wants in alternatives:
        verdict = _all(got, wants)
        if verdict.problem is None:
            return verdict
        if best is None or verdict.share < best.share:
            best = verdict
    assert best is not None
    return best


def _all(got: Sequence[np.ndarray], wants: Sequence[Want]) -> Verdict:
    if len(got) != len(wants):
        return Verdict(np.inf, np.inf, f"{len(got)} results, expected {len(wants)}")
    found = [_one(i, g, want) for i, (g, want) in enumerate(zip(got, wants, strict=True))]
    return Verdict(
        max(verdict.error for verdict in found),
        max(verdict.share for verdict in found),
        next((verdict.problem for verdict in found if verdict.problem), None),
    )


def _one(index: int, got: np.ndarray, want: Want) -> Verdict:
    if got.shape != want.value.shape:
        why = f"result {index} has shape {got.shape}, expected {want.value.shape}"
        return Verdict(np.inf, np.inf, why)
    if not got.size:
        return Verdict()
    if got.dtype.kind not in "iub":
        got = got.astype(np.float64)
    with np.errstate(all="ignore"):
        # Equal infinities differ by nothing, and so does NaN where it is expected.
        same = (got == want.value) | (np.isnan(got) & np.isnan(want.value))
        far = np.abs(got.astype(np.float64) - want.value.astype(np.float64))
        allowed = np.broadcast_to(np.asarray(want.allowed, np.float64), got.shape)
        share = np.where(same, 0.0, far / allowed)
        share = np.where(np.isnan(share), np.inf, share)
        error = np.where(same, 0.0, far / want.scale)
        error = np.where(np.isnan(error), np.inf, error)
    at = np.unravel_index(int(share.argmax()), share.shape)
    problem = None
    if share[at] > 1:
        place = ", ".join(map(str, at))
        count = int((share > 1).sum())
        also = f", and {count - 1} more of {got.size} are wrong" if count > 1 else ""
        problem = (
            f"result {index} at [{place}] is {got[at]:.6g}, expected {want.value[at]:.6g}, "
            f"right within {allowed[at]:.1e}{also}"
        )
    return Verdict(float(error.max()), float(share[at]), problem)
