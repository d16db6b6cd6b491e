"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any


def new_parser(name: str, doc: str | None = None) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.name``, with the first line of its docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks{name and '.'}{name}",
        description=doc.splitlines()[0] if doc else None,
    )


def record_options(add, each: str = "", show: str = "", **several: Any) -> None:
    """``--json`` and ``--commit``, and ``--records`` where it says what to ``show``.

    Args:
      add: a parser's ``add_argument``.
      each: the record is written again after each of these.
      several: ``nargs`` of ``--records``.
    """
    add("--json", type=Path, help="the record" + (each and f", rewritten after every {each}"))
    if show:
        add("--records", type=Path, help=f"measure nothing: {show}", **several)
    add("--commit", help="recorded; by default what git says")


def device_options(add) -> None:
    """``--devices`` and ``--tiny``, for :func:`devices_of`."""
    add("--devices", nargs="+", type=int, help="beside one; 2 and 4 where there are so many")
    add("--tiny", action="store_true", help="small sizes, which CPU devices run")


def devices_of(name: str, args) -> list[int]:
    """The numbers of devices to measure. One device is what others are compared with."""
    import jax

    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if jax.default_backend() != "gpu" and not args.tiny:
        raise SystemExit(
            f"python -m benchmarks.{name} needs NVIDIA GPUs, and jax sees only {jax.devices()}. "
            "--tiny runs on any machine."
        )
    there = jax.local_device_count()
    found = sorted({1, *(args.devices or [n for n in (1, 2, 4) if n <= there])})
    if found[-1] > there:
        raise SystemExit(f"--devices {found[-1]}: there are {there}")
    return found
