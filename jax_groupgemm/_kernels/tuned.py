"""The Hopper kernel's tile by measurement: what ``python -m jax_groupgemm.tune`` found.

There is one table per kind of GPU, ``tuned/<kind>.json``; the environment variable ``JGG_TUNED``
names another one instead, or, when it is empty, none. An entry is the fastest tile of one product:
its shape, layout and dtype, and how many rows a group has on average. A product takes the entry of
the power of two that is nearest to its own average. Where there is none, the kernel's rule decides:
nothing is interpolated or extrapolated, and an absent table is not an error.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import extension

FORMAT = 1
#: Another number where custom calls' attributes, or plans (ffi/*/plan.h), change within a version:
#: programs that JAX keeps on disk hold both.
CALLS = 5
VARIABLE = "JGG_TUNED"

_DTYPES = ("bfloat16", "float16")  # float32 has one tile
_PACKAGED = Path(__file__).parent / "tuned"


class Product(NamedTuple):
    """The product that a tile is chosen for."""

    op: str  # "mm": (T, k) x (groups, k, n); "wgrad": groups of (k, T) x (T, n)
    dtype: str  # of operands and result
    groups: int  # matrices: of w, or of the result
    k: int
    n: int
    transposed: str  # operands stored with their last two axes exchanged: "", "w"; "x", "y", "xy"
    gated: bool
    rows: float  # per group, on average, as a power of two


class Entry(NamedTuple):
    """The fastest tile, and microseconds with it and with the rule's."""

    tile: int
    us: float
    rule_us: float


def tiles(op: str, gated: bool = False, transposed: str = "") -> tuple[int, ...]:
    """Rows of the tiles that the kernel has for a product, as ``Product`` describes it."""
    return tuple(
        extension.rules().tiles_sm90(
            wgrad=op == "wgrad", gated=gated, transpose_x=op == "wgrad" and "x" in transposed
        )
    )


# ---- the tile of a product --------------------------------------------------------------------


def mm(
    dtypes, groups: int, k: int, n: int, mean_rows: float, transpose_w: bool, gated: bool
) -> int:
    """The measured tile of ``x @ w[group]``, or 0. ``dtypes``: of operands and result."""
    return _tile("mm", dtypes, groups, k, n, "w" * transpose_w, gated, mean_rows)


def wgrad(dtypes, groups: int, k: int, n: int, mean_rows: float, transpose_x: bool,
          transpose_y: bool) -> int:  # fmt: skip
    """The measured tile of ``x_s^T @ y_s``, a result of shape (groups, k, n), or 0."""
    transposed = "x" * transpose_x + "y" * transpose_y
    return _tile("wgrad", dtypes, groups, k, n, transposed, False, mean_rows)


def _tile(op, dtypes, groups, k, n, transposed, gated, mean_rows) -> int:
    if len(set(dtypes)) > 1 or dtypes[0] not in _DTYPES or mean_rows <= 0:
        return 0
    rows = nearest_power_of_two(mean_rows)
    product = Product(op, dtypes[0], groups, k, n, transposed, gated, rows)
    if (forced_now := _forced.get()) is not None:
        tile, seen = forced_now
        seen.append(product)
        return tile
    kind = device_kind()
    entry = None if kind is None else entries(kind).get(product)
    return 0 if entry is None else entry.tile


def nearest_power_of_two(value: float) -> float:
    return 2 ** round(math.log2(value))


_forced: contextvars.ContextVar[tuple[int, list[Product]] | None] = contextvars.ContextVar(
    "jgg_forced_tile", default=None
)


@contextlib.contextmanager
def forced(tile: int) -> Iterator[list[Product]]:
    """Lower products with this tile (0: the rule's), whatever the tables say; yields a list of the
    products that were lowered. What is compiled already stays as it is."""
    seen: list[Product] = []
    token = _forced.set((tile, seen))
    try:
        yield seen
    finally:
        _forced.reset(token)


# ---- tables ----------------------------------------------------------------------------------


def device_kind() -> str | None:
    """The kind of this process's CUDA devices, such as "NVIDIA H200"; None for none, or several."""
    found, _ = extension.devices("cuda")
    kinds = {device.device_kind for device in found}
    return kinds.pop() if len(kinds) == 1 else None


def file_name(kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json"


def path(kind: str) -> Path | None:
    """The table that products on this kind of device use; None where there is none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    packaged = _PACKAGED / file_name(kind)
    return packaged if packaged.exists() else None


def entries(kind: str) -> dict[Product, Entry]:
    """The entries of that table. One that cannot be used is empty, with one warning."""
    found = path(kind)
    return {} if found is None else _entries(found, kind)


@functools.cache
def _entries(path: Path, kind: str) -> dict[Product, Entry]:
    try:
        document = read(path)
        if document["device"] != kind:
            raise ValueError(f"it was measured on {document['device']}, this GPU is {kind}")
        return document["entries"]
    except (OSError, ValueError) as error:
        warnings.warn(
            f"jax_groupgemm cannot use the table of tiles {path}: {error}. "
            "Using the kernels' own rule",
            stacklevel=2,
        )
        return {}


def fingerprint(platform: str) -> str:
    """A digest of all that kernels are chosen by, beside the product: two processes with the same
    one choose alike."""
    kind = device_kind() if platform == "cuda" else None
    return _fingerprint(kind, kind and path(kind), extension.live_capabilities() if kind else ())


@functools.cache
def _fingerprint(kind: str | None, table: Path | None, capabilities: tuple[int, ...]) -> str:
    measured = _entries(table, kind) if kind and table else {}
    try:
        version = importlib.metadata.version("jax_groupgemm")
    except importlib.metadata.PackageNotFoundError:  # it runs without having been installed
        version = None
    chosen_by = version, CALLS, extension.BUILD, kind, capabilities, sorted(measured.items())
    return hashlib.sha256(repr(chosen_by).encode()).hexdigest()[:16]


def read(path: Path) -> dict[str, Any]:
    """A table: "device", "runs", and "entries" by product. ValueError where it is none."""
    # Whatever else there is under that name may have no end.
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']}, expected {FORMAT}")
        found = dict(_entry(fields) for fields in document["entries"])
        return {"device": document["device"], "runs": document["runs"], "entries": found}
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is not a table of tiles ({error!r})") from error


def _entry(fields: dict[str, Any]) -> tuple[Product, Entry]:
    product = Product(**{name: fields[name] for name in Product._fields})
    entry = Entry(**{name: fields[name] for name in Entry._fields})
    if entry.tile not in (known := tiles(product.op, product.gated, product.transposed)):
        raise ValueError(f"tile {entry.tile} is not one of {', '.join(map(str, known))}")
    return product, entry


def write(path: Path, device: str, runs: list[dict], entries: dict[Product, Entry]) -> None:
    """A table; ``runs`` say when, with what and how it was measured."""
    lines = [
        json.dumps(product._asdict() | entry._asdict())
        for product, entry in sorted(entries.items())
    ]
    head = json.dumps({"format": FORMAT, "device": device, "runs": runs}, indent=1)
    body = ",\n  ".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")  # whoever reads never finds half a table
    partial.write_text(head[: head.rindex("\n}")] + f',\n "entries": [\n  {body}\n ]\n}}\n')
    partial.replace(path)
