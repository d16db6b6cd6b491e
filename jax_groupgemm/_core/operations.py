"""The public operations by name, for whoever lists them: ``jgg.cost``, ``info`` and the tests."""

from __future__ import annotations

from collections.abc import Callable

OPERATIONS: dict[str, Callable] = {}


def operation[F: Callable](function: F) -> F:
    """A public operation."""
    OPERATIONS[function.__name__] = function
    return function
