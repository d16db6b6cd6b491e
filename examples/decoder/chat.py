"""A message as a model's chat template writes it.

A template is a program of whoever made the file. Jinja's sandbox keeps it from Python's objects,
and a process of its own from time and memory without end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import gguf, gguf_tokens, template_process
from .config import read_json
from .errors import Refused, is_gguf
from .template_process import SECONDS

LARGEST = 2**20  # characters of a template


def template_of(folder: Path) -> tuple[str, dict[str, str]]:
    """The template of a folder or of a GGUF file, and its special tokens. Raises
    :class:`Refused`."""
    template, special = (_of_file if is_gguf(folder) else _of_folder)(folder)
    if template is None:
        raise Refused("there is no chat template: leave --chat out")
    if not isinstance(template, str) or len(template) > LARGEST:
        raise Refused(f"the chat template is no text of at most {LARGEST} characters")
    return template, special


def _of_file(path: Path) -> tuple[Any, dict[str, str]]:
    metadata = gguf.opened(path).metadata
    said = lambda key: gguf_tokens.value(metadata, f"tokenizer.{key}")
    tokens, special = said("ggml.tokens"), {}
    for name in ("bos", "eos"):
        number = said(f"ggml.{name}_token_id")
        if isinstance(tokens, list) and isinstance(number, int) and 0 <= number < len(tokens):
            special[f"{name}_token"] = tokens[number]
    return said("chat_template"), special


def _of_folder(folder: Path) -> tuple[Any, dict[str, str]]:
    path = folder / "tokenizer_config.json"
    said, special = read_json(path) if path.exists() else {}, {}
    for name in ("bos_token", "eos_token"):
        token = said.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        special |= {name: token} if isinstance(token, str) else {}
    template, beside = said.get("chat_template"), folder / "chat_template.jinja"
    if beside.is_file():
        try:
            with beside.open(encoding="utf-8") as file:
                template = file.read(LARGEST + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"{beside.name}: {error}") from error
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template, special


def written(folder: Path, message: str) -> str:
    """A user's message, and the beginning of an answer. Raises :class:`Refused`."""
    template, special = template_of(folder)
    values = {
        "messages": [{"role": "user", "content": message}], "add_generation_prompt": True,
        "tools": None, "documents": None, **special,
    }  # fmt: skip
    job = json.dumps({"template": template, "values": values}).encode()
    command = [sys.executable, "-P", template_process.__file__]
    try:
        done = subprocess.run(command, input=job, capture_output=True, timeout=2 * SECONDS)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode < 0:
        raise Refused(f"the chat template takes more than {SECONDS} s, or too much memory")
    try:
        kind, text = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
        raise Refused(f"the chat template cannot be run: {last[:200]}") from None
    if kind != "text":
        raise Refused(f"the chat template: {text}")
    return text
