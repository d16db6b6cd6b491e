"""JSON objects of files that may hold anything: work and depth have bounds, numbers are usual."""

from __future__ import annotations

import codecs
import json
import math
import os
from pathlib import Path
from typing import Any

from . import files
from .messages import brief, cut

MAX_BYTES = 2**24  # config.json of any model has less than a thousandth
MAX_DEPTH = 100


def read(path: str | os.PathLike[str], max_bytes: int) -> dict[str, Any]:
    op = "read_json"
    path = files.absolute(op, path)
    with files.regular(op, path) as (descriptor, stamp):
        if stamp[2] > max_bytes:
            limit = f"the limit is {max_bytes}, read_json(..., max_bytes=) sets another"
            raise files.error(op, path, f"a file of {stamp[2]} bytes: {limit}")
        data = files.first_bytes(op, path, descriptor, stamp[2])
    return parse(op, path, data)


class _Unusual(str):
    """A number that is none to compute with, as it is written."""


def _whole(text: str) -> int | _Unusual:
    # Reading a long one takes quadratic time.
    if len(text) <= 20 and -(2**63) <= (out := int(text)) < 2**64:
        return out
    return _Unusual(text)


def _fraction(text: str) -> float | _Unusual:
    return out if len(text) <= 100 and math.isfinite(out := float(text)) else _Unusual(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{brief(name)} appears twice")
    return out


def parse(op: str, path: Path, data: bytes) -> dict[str, Any]:
    """In time linear in the bytes."""
    if data.startswith(codecs.BOM_UTF8):
        text = "malformed JSON: it begins with a byte order mark, save it without one"
        raise files.error(op, path, text)
    deep = f"malformed JSON: nested more than {MAX_DEPTH} deep"
    try:
        out = json.loads(
            data.decode(), object_pairs_hook=_unique, parse_int=_whole, parse_float=_fraction,
            parse_constant=_Unusual,
        )  # fmt: skip
    except UnicodeDecodeError as error:  # whose text has all of the bytes
        text = f"malformed JSON: byte {error.start} is not UTF-8"
        raise files.error(op, path, text) from None
    except RecursionError:  # whose frames are as many as Python takes
        raise files.error(op, path, deep) from None
    except ValueError as error:
        raise files.error(op, path, f"malformed JSON: {cut(str(error), 400)}") from error
    if not isinstance(out, dict):
        raise files.error(op, path, "malformed JSON: not an object")
    stack: list[tuple[Any, Any, int]] = [(out, None, 1)]  # with (the keys of what it is in, key)
    while stack:
        value, keys, depth = stack.pop()
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, (dict, list)):
                if depth == MAX_DEPTH:
                    raise files.error(op, path, deep)
                stack.append((item, (keys, key), depth + 1))
            elif isinstance(item, _Unusual):
                said = f"{_spelled((keys, key))} is {cut(item)}"
                text = f"{said}, expected a finite number of at most 64 bits"
                raise files.error(op, path, text)
    return out


def _spelled(keys: Any) -> str:
    """Such as ``text_config.limits[1]``."""
    parts = []
    while keys is not None:
        keys, key = keys
        parts.append(f".{cut(key)}" if isinstance(key, str) else f"[{key}]")
    return cut("".join(reversed(parts)).removeprefix("."))
