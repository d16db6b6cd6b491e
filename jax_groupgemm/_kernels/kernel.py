"""A kernel of an operation, as ``choose`` weighs it, and the plan of a call."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: Kernels, and the platform that each runs on.
PLATFORMS = {"sm100": "cuda", "sm90": "cuda", "sm89": "cuda", "sm80": "cuda", "cpu": "cpu"}

_always = lambda problem: True
_never = lambda problem, config: False
_nothing = lambda problem: None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of one operation.

    Attributes:
      name: as ``implementation=`` takes it.
      target: its custom call.
      can: ``can(problem)`` says why it cannot run the product, or None.
      fuses: ``fuses(problem)`` says why it cannot run the product and its options in one call.
      pays: ``pays(problem)`` tells whether it is faster than the kernels behind it.
      fusing_pays: likewise of options in one call.
      lists_pay: ``lists_pay(problem, config)``, likewise of tokens by list, against a copy of rows.
      config: ``config(problem)`` has attributes of the call.
      unseen: whether it is also chosen for GPUs that this process does not have.
      only_named: whether it runs only where it is named.
      needs: what ``can`` asks for, for tables.
    """

    name: str
    target: str
    can: Callable[[Any], str | None] = _nothing
    fuses: Callable[[Any], str | None] = _nothing
    pays: Callable[[Any], bool] = _always
    fusing_pays: Callable[[Any], bool] = _always
    lists_pay: Callable[[Any, Mapping[str, Any]], bool] = _never
    config: Callable[[Any], Mapping[str, Any]] = lambda problem: {}
    unseen: bool = False
    only_named: bool = False
    needs: str = ""

    @property
    def platform(self) -> str:
        return PLATFORMS[self.name]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a problem runs. It is made once, and the call carries it to the handler.

    Attributes:
      kernel: what runs it.
      named: the kernel that the user asked for, or None: then a CUDA handler takes the best one of
        the GPU it runs on.
      config: the rest of the plan, by name: tiles, and how rows are found.
    """

    kernel: Kernel
    named: str | None
    config: Mapping[str, Any]

    @property
    def target(self) -> str:
        return self.kernel.target


_watched: contextvars.ContextVar[list[Plan] | None] = contextvars.ContextVar(
    "jgg_watched", default=None
)


@contextlib.contextmanager
def watched() -> Iterator[list[Plan]]:
    """A list of the plans that are made within, those of questions that lead to no call, too."""
    seen: list[Plan] = []
    token = _watched.set(seen)
    try:
        yield seen
    finally:
        _watched.reset(token)


def noted(plan: Plan) -> Plan:
    """The plan itself, for whoever watches, too."""
    if (seen := _watched.get()) is not None:
        seen.append(plan)
    return plan
