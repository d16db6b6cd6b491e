"""How a folder that cannot be read is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


class Refused(Exception):
    """One sentence about what is wrong with a checkpoint, and what would be right."""


def sentence(folder: Path, error: Refused) -> str:
    """The folder and what is wrong with it. Files in it are named without it."""
    text = re.sub(r"^jgg\.[\w.]+: ", "", str(error))
    # It may be given from where one is.
    for name in map(str, (folder.resolve(), folder.absolute(), folder)):
        text = re.sub(rf"(?<![\w./-]){re.escape(name)}/", "", text.removeprefix(f"{name}: "))
    return f"{folder}: {text}"


@contextmanager
def in_sentences(folder: Path, remedy: str) -> Iterator[None]:
    """Ends the program with one sentence, where the folder is refused or where memory runs out."""
    try:
        yield
    except Refused as error:
        raise SystemExit(sentence(folder, error)) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise SystemExit(
            f"{folder}: the device ran out of memory, which others use too, or which is in pieces: "
            f"use {remedy}"
        ) from error


def is_folder(folder: Path) -> None:
    """Raises :class:`Refused` where there is none."""
    if folder.is_dir():
        return
    if folder.exists():
        raise Refused("a file, but a checkpoint is a folder: give the one that holds config.json")
    raise Refused(
        "there is no such folder: huggingface_hub.snapshot_download(name) returns the one that it "
        "downloads a model to"
    )
