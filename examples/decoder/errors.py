"""How a folder that cannot be read is refused."""

from __future__ import annotations

import re
from pathlib import Path


class Refused(Exception):
    """One sentence about what is wrong with a checkpoint, and what would be right."""


def sentence(folder: Path, error: Refused) -> str:
    """The folder and what is wrong with it. Files in it are named without it."""
    text = re.sub(r"^jgg\.[\w.]+: ", "", str(error))
    for name in (str(folder.resolve()), str(folder)):  # it may be given from where one is
        text = re.sub(rf"(?<![\w./-]){re.escape(name)}/", "", text.removeprefix(f"{name}: "))
    return f"{folder}: {text}"


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
