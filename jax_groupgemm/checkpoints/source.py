"""The arguments of ``linear``, ``experts`` and ``act_order``: layers of one or several prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._core import check
from .._quantized.array import Quantized
from .._quantized.format import FLOATS
from .._quantized.format import FORMATS as MODES
from . import fp8
from .formats import FORMATS, read
from .layer import Layer, Read, section
from .messages import brief, cut

Expected = tuple[int | None, ...]  # a shape, None: any size; (): any shape


class Source:
    """The arguments of a call; the names are sorted once for all its prefixes."""

    def __init__(
        self, op: str, tensors, format: str, config, reorder: bool = False, scales_dtype=None
    ):
        if not isinstance(format, str) or format not in FORMATS:
            known = ", ".join(map(repr, FORMATS))
            raise ValueError(f"jgg.checkpoints.{op}: format={brief(format)} is not one of {known}")
        if not isinstance(tensors, Mapping):
            raise TypeError(
                f"jgg.checkpoints.{op}: tensors must be a mapping of names to arrays, got "
                f"{type(tensors).__name__}"
            )
        self.op, self.tensors, self.reorder, self.format = op, tensors, reorder, format
        self.scales_dtype = _scales_dtype(op, scales_dtype)
        other = next((name for name in tensors if not isinstance(name, str)), None)
        if other is not None:
            raise TypeError(
                f"jgg.checkpoints.{op}: names of tensors must be str, got {brief(other)}"
            )
        self.names = sorted(tensors)
        form = FORMATS[format]
        if config is None:
            if form.needs:
                raise ValueError(
                    f"jgg.checkpoints.{op}: format {format!r} needs config for {form.needs}: pass "
                    "config=jgg.checkpoints.read_json(path), of the checkpoint's config.json"
                )
            config = {}
        if not isinstance(config, Mapping):
            raise TypeError(f"jgg.checkpoints.{op}: config must be a dict, got {brief(config)}")
        self.model = config
        try:
            self.config = section(config, form.sections)
        except ValueError as error:
            raise ValueError(f"jgg.checkpoints.{op}: {error}") from error

    def several(self, prefixes) -> list:
        """The layers of one or more prefixes."""
        if not isinstance(prefixes, Iterable):
            raise TypeError(
                f"jgg.checkpoints.{self.op}: a prefix must be a name or a sequence of names, got "
                f"{brief(prefixes)}"
            )
        out = [*prefixes]
        if not out:
            raise ValueError(f"jgg.checkpoints.{self.op}: no prefixes")
        return out

    def read(self, prefix: str, expected: Expected = (), stacked: bool = False) -> Read:
        if not isinstance(prefix, str):
            raise TypeError(
                f"jgg.checkpoints.{self.op}: a prefix must be a name, got {brief(prefix)}"
            )
        layer = Layer(
            self.op, prefix, self.tensors, self.config, self.model, stacked, self.reorder, expected,
            self.scales_dtype,
        )  # fmt: skip
        weight, order = read(layer, self.format, self.names)
        return _with_scales(layer, weight), order

    def are_stacked(self, prefixes: list) -> bool:
        """Whether one list of names is of tensors that have all experts."""
        form, first = FORMATS[self.format], prefixes[0]
        if len(prefixes) > 1 or not any(len(kind.stacked) > 1 for kind in form.kinds):
            return False
        first = first if isinstance(first, str) else next(iter(self.several(first)))
        shape = None
        if isinstance(first, str):
            shape = Layer(self.op, first, self.tensors, {}, {}, True, False).shape_of(
                f"{first}.weight"
            )
        return shape is not None and len(shape) == 3


def _scales_dtype(op: str, value) -> Any:
    """The dtype that affine scales are rounded to, or None."""
    if value is None:
        return None
    dtype = check.of_dtype(f"checkpoints.{op}", "scales_dtype", value)
    if dtype.name not in FLOATS:
        known = ", ".join(FLOATS)
        raise ValueError(
            f"jgg.checkpoints.{op}: scales_dtype={dtype.name} is not one of None, {known}"
        )
    return dtype


def _with_scales(t: Layer, w: Any) -> Any:
    """A weight, its scales and biases rounded as was asked."""
    if t.scales_dtype is None or not isinstance(w, Quantized) or w.mode != "affine":
        return w
    if w.scales.dtype == t.scales_dtype:
        return w
    with np.errstate(over="ignore"):
        out = MODES[w.mode].with_scales_of(w, t.scales_dtype)
    for leaf, was in zip((out.scales, out.biases), (w.scales, w.biases), strict=True):
        if np.any(np.isinf(leaf.astype(np.float32)) & ~np.isinf(was.astype(np.float32))):
            raise t.error(f"has scales or biases too large for {t.scales_dtype.name}")
    return out


def sizes(op: str, shape: Sequence[int] | None, letters: str) -> Expected:
    """The shape that a caller expects; () where any will do."""
    if shape is None:
        return ()
    text = f"jgg.checkpoints.{op}: shape={brief(shape)} is not ({letters}), the sizes of a weight"
    if not isinstance(shape, (tuple, list)):
        raise TypeError(text)
    if not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in shape):
        raise TypeError(text)
    if len(shape) != len(letters.split(",")) or min(shape) < 1:
        raise ValueError(text)
    return tuple(map(int, shape))


def rows(
    source: Source, prefix: str | Sequence[str], expected: Expected, stacked: bool = False
) -> Any:
    """One layer, or several, row after row; ``stacked``: of each expert."""
    if isinstance(prefix, str):
        return source.read(prefix, expected, stacked)
    prefix, axis = source.several(prefix), int(stacked)
    each = expected
    if expected and len(prefix) > 1:
        each = (*expected[:axis], None, *expected[axis + 1 :])
    parts = [source.read(name, each, stacked) for name in prefix]
    count = sum(q.shape[axis] for q, _ in parts)
    if expected and count != expected[axis]:
        names = " and ".join(map(cut, prefix[:2])) + (" and others" if len(prefix) > 2 else "")
        raise ValueError(
            f"jgg.checkpoints.{source.op}: {names} have {count} rows together, expected "
            f"shape={expected}: are these the layers to be joined?"
        )
    modes = {q.mode if isinstance(q, Quantized) else None for q, _ in parts}
    if modes == {"fp8"} and len(parts) > 1:
        joined = fp8.rows_to_join(source.op, prefix, [q for q, _ in parts])
        parts = [(q, None) for q in joined]
    (first, order), lead = parts[0], parts[0][0].shape[:axis]
    for name, part in zip(prefix, parts, strict=True):
        _same_kind(source.op, prefix[0], parts[0], name, part, slice(-1, None))
        if part[0].shape[:axis] != lead:
            raise ValueError(
                f"jgg.checkpoints.{source.op}: {cut(prefix[0])} has {lead[0]} experts, but "
                f"{cut(name)} has {part[0].shape[0]}"
            )
        if order is not None and np.any(order != part[1]):
            names = f"{cut(prefix[0])} and {cut(name)}"
            raise ValueError(
                f"jgg.checkpoints.{source.op}: {names} differ in order: read them one by one"
            )

    def join(*leaves):
        if leaves[0].ndim <= axis:  # a global scale
            rows = [q.shape[axis] for q, _ in parts]
            scales = [np.broadcast_to(leaf, lead) for leaf in leaves]
            return np.repeat(np.stack(scales, axis=-1), rows, axis=-1)
        return np.concatenate(leaves, axis=axis)

    return jax.tree.map(join, first, *(q for q, _ in parts[1:])), order


def stack(source: Source, prefixes: Sequence[str | Sequence[str]], expected: Expected) -> Any:
    """One layer per prefix, each read into its place."""
    prefixes = source.several(prefixes)
    if expected and len(prefixes) != expected[0]:
        raise ValueError(
            f"jgg.checkpoints.{source.op}: {len(prefixes)} prefixes, expected shape={expected}: "
            "pass one for each expert"
        )
    first = rows(source, prefixes[0], expected[1:])
    out = jax.tree.map(lambda x: np.empty((len(prefixes), *x.shape), x.dtype), first)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first)
    del first
    for g, prefix in enumerate(prefixes):
        layer = rows(source, prefix, expected[1:])
        _same_kind(source.op, prefixes[0], like, prefix, layer, slice(None))
        for whole, leaf in zip(jax.tree.leaves(out), jax.tree.leaves(layer), strict=True):
            whole[g] = leaf
        layer = leaf = None  # freed before the next is read
    return out


def _same_kind(op: str, name_a, a, name_b, b, axes: slice) -> None:
    def kind(x):
        shapes = [(leaf.shape[axes], leaf.dtype) for leaf in jax.tree.leaves(x)]
        return jax.tree.structure(x), shapes

    if kind(a) != kind(b):
        name_a, name_b = cut(str(name_a)), cut(str(name_b))
        raise ValueError(
            f"jgg.checkpoints.{op}: {name_a} is {a[0]}, but {name_b} is {b[0]}: they are no one "
            "weight, read them one by one"
        )
