"""Command lines of benchmarks: what several of them have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def new_parser(name: str, doc: str | None = None) -> argparse.ArgumentParser:
    """That of ``python -m benchmarks.name``, with the first line of its docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks{name and '.'}{name}",
        description=doc.splitlines()[0] if doc else None,
    )


def record_options(add, each: str = "", show: str = "", **several: Any) -> None:
    """``--json`` and ``--commit``, and ``--records`` where it says what to ``show``.

    Args:
      add: a parser's ``add_argument``.
      each: after what the record is written again.
      several: ``nargs`` of ``--records``.
    """
    add("--json", type=Path, help="the record" + (each and f", rewritten after every {each}"))
    if show:
        add("--records", type=Path, help=f"measure nothing: {show}", **several)
    add("--commit", help="recorded; by default what git says")
