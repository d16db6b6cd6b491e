"""Texts to train on, as bytes: where they come from, what is held out, how hard they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 256  # bytes
DEFAULT = "pydoc_data.topics"  # the language reference that CPython carries
HELD_OUT = 0.1  # of a text, at its end: never trained on


def read(name: str, context: int) -> np.ndarray:
    """The tokens of a file, or of :data:`DEFAULT`."""
    if name == DEFAULT:
        text = "\n".join(topics[topic] for topic in sorted(topics)).encode()
    elif Path(name).is_file():
        text = Path(name).read_bytes()
    else:
        raise SystemExit(f"--text: there is no file {name}")
    least = round((context + 2) / HELD_OUT)
    if len(text) < least:
        raise SystemExit(
            f"--text: {name} has {len(text)} bytes; the held-out tenth must hold --context "
            f"{context}, so at least {least} are needed"
        )
    return as_tokens(text)


def source_of_asyncio() -> bytes:
    """A text in Python: the package of the standard library."""
    files = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    return b"\n".join(file.read_bytes() for file in files)


def as_tokens(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8).astype(np.int32)


def as_text(tokens) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")


def split(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What to train on, and what is held out."""
    boundary = round(text.size * (1 - HELD_OUT))
    return text[:boundary], text[boundary:]


def random_batch(text, batch: int, context: int, key):
    """``batch`` spans of the text: ``context`` bytes and the next one."""
    span = context + 1
    starts = jax.random.randint(key, (batch, 1), 0, text.size - span + 1)
    return text[starts + jnp.arange(span)]


def bigram_bits_per_byte(train, held_out, smoothing=0.1) -> float:
    """What counting pairs of bytes achieves: the baseline to beat."""
    counts = np.full((VOCABULARY, VOCABULARY), smoothing)
    np.add.at(counts, (train[:-1], train[1:]), 1)
    probabilities = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log2(probabilities[held_out[:-1], held_out[1:]]).mean())
