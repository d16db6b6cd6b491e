"""Command lines: what every script's looks like, and dataclasses whose fields are options."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any


class Parser(argparse.ArgumentParser):
    """Its help is the script's docstring, and every option with its default."""

    def __init__(self, doc: str | None):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def option(self, name: str, default, text: str, **kwargs) -> None:
        self.add_argument(name, default=default, help=f"{text} (default: {default})", **kwargs)

    def options_of(self, settings: type) -> None:
        """One for each field of a dataclass of :func:`option` fields."""
        for field in dataclasses.fields(settings):
            self.option("--" + field.name.replace("_", "-"), field.default, **field.metadata)


def option(default, text: str, **kwargs) -> Any:
    """A field of a dataclass, and what :meth:`Parser.option` makes of it."""
    return dataclasses.field(default=default, metadata={"text": text, **kwargs})


def settings(kind: type, args: argparse.Namespace) -> Any:
    """The dataclass ``kind`` from parsed arguments, which may hold others too."""
    return kind(**{field.name: getattr(args, field.name) for field in dataclasses.fields(kind)})


def count(value: str) -> int:
    if int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return int(value)


def positive(value: str) -> float:
    if not 0 < float(value) < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return float(value)
