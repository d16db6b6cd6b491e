"""How a folder that cannot be read is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


class Refused(Exception):
    """One sentence about what is wrong with a checkpoint, and what would be right."""


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name or its first bytes."""
    if path.suffix.lower() == ".gguf":
        return path.exists() and not path.is_dir()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def sentence(folder: Path, error: Refused) -> str:
    """The folder and what is wrong with it. Files in it are named without it."""
    text = re.sub(r"^jgg\.[\w.]+: ", "", str(error))
    # It may be given from where one is.
    for name in map(str, (folder.resolve(), folder.absolute(), folder)):
        text = re.sub(rf"(?<![\w./-]){re.escape(name)}/", "", text.removeprefix(f"{name}: "))
    if is_gguf(folder):  # whose metadata stands for the files of a folder
        text = text.replace("config.json", "metadata").replace("tokenizer.json", "metadata")
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
