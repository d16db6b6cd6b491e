"""A mixture of experts whose operands are explicitly sharded: one ``shard_map`` around all of it.

=================  ======================================================================
sharded axis       each device
=================  ======================================================================
tokens             routes its own tokens; the gradient of each weight is one all-reduce
F (hidden)         has its columns of h; one all-reduce of the result, which is (tokens, D),
                   and backward one of x's gradient
E (experts)        multiplies the pairs of its experts; likewise
tokens and E       the same mesh axis shards both: tokens travel to the devices of their
                   experts, and sums back (``transport.py``)
=================  ======================================================================

Nothing that has a row for each pair travels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from .._core import partition
from .._quantized import format
from .._quantized.array import Quantized
from .expert_parallel import Axis

#: What an error calls axes that stay whole, by their letter.
_WHOLE = {"D": "D", "k": "k", "2": "gate and up", "r": "ranges", ".": "its only axis"}


def mesh_of(operands: dict[str, Any]):
    """The mesh that explicitly shards operands; None where there is none, or none to map."""
    mesh = partition.explicit_mesh(jax.tree.leaves(operands))
    return None if mesh is None or partition.maps_explicit_axes() else mesh


def explicit(run: Callable, mesh, operands: dict[str, Any], axis: Axis | None, *, gated: bool,
             transpose_w: bool, transport: str | None):  # fmt: skip
    """The layer, where ``run(operands, axis, total)`` is that of one device. ``axis`` has experts
    on several devices, and tokens: given where a ``shard_map`` maps it already. ``total`` sums
    results over the devices that have parts of them; it is None where none has."""
    halves = (-2 if transpose_w else -1) if gated else None
    operands = operands | {
        "up": _in_whole_blocks(operands["up"], halves),
        "down": _in_whole_blocks(operands["down"]),
        "up_codes": _in_whole_blocks(operands["up_codes"], -2 if gated else None),
        "down_codes": _in_whole_blocks(operands["down_codes"]),
    }
    given, tree = jax.tree.flatten_with_path(operands)
    words = _words(operands, gated, transpose_w)
    leaves = []
    for path, a in given:
        name = path[0].key
        # Tiles have axes of their own behind that of experts.
        word = "E" + "." * a.ndim if _layout_of_tiles(operands[name]) else words[name]
        leaves.append(_Leaf(name, word[: a.ndim], a))
    for leaf in leaves:
        _check_layout(leaf, operands[leaf.name])
    axes = _mesh_axes(leaves)
    hidden, experts = axes.get("F", ()), axes.get("E", ())
    if axis is not None and experts:
        raise ValueError(
            f"jgg.moe_mlp: axis_name={axis.name!r} says where experts are, but they are sharded "
            f"over {experts}, too. Leave one of them out."
        )
    if _with_tokens(axes):
        axis, experts = Axis(experts, transport), ()
    parts = math.prod(mesh.shape[axis] for axis in hidden)
    if hidden:
        for leaf in leaves:
            _check_no_tiles(leaf, operands[leaf.name], hidden)
        leaves = [leaf.with_halves() for leaf in leaves]
        for leaf in leaves:
            _check_size(leaf, parts)
    every = tuple(dict.fromkeys(name for of in axes.values() for name in of))

    def one_device(*shards):
        mine = tree.unflatten(
            _own_halves(a, leaf.word.index("H"), hidden, parts)
            if hidden and "H" in leaf.word
            else a
            for a, leaf in zip(shards, leaves, strict=True)
        )
        if experts:
            first = lax.axis_index(experts) * jax.tree.leaves(mine["down"])[0].shape[0]
            offset = mine["expert_offset"]
            mine["expert_offset"] = first if offset is None else offset + first.astype(offset.dtype)
        if hidden and mine["down_bias"] is not None:
            only = lax.axis_index(hidden) == 0  # of the devices whose results are added
            mine["down_bias"] = jnp.where(only, mine["down_bias"], 0)
        if every and mine["key"] is not None:
            mine["key"] = jax.random.fold_in(mine["key"], lax.axis_index(every))
        summed = (*hidden, *experts)
        return run(mine, axis, (lambda y: lax.psum(y, summed)) if summed else None)

    spec = lambda word: P(*(axes.get("F" if letter == "H" else letter) for letter in word))
    return partition.by_device(
        one_device, mesh, [leaf.array for leaf in leaves], [spec(leaf.word) for leaf in leaves],
        spec(words["x"]),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An array of an operand, and a letter for each of its axes: a digit is an axis of tokens, H
    are the columns of gate and up in one axis. A quantized weight has several."""

    name: str
    word: str
    array: Any

    def __str__(self) -> str:
        return f"jgg.moe_mlp: {self.name} {jax.typeof(self.array)}"

    def sharded(self):
        """Letters and the mesh axes that shard them."""
        return zip(self.word, partition.entries_of(self.array), strict=True)

    def with_halves(self) -> _Leaf:
        """With gate and up as an axis of its own where no device has a part of them yet: cut
        behind it, each device has the same columns of both."""
        at = self.word.find("H")
        if at < 0 or dict(self.sharded())["H"]:
            return self
        shapes: list[tuple[int, ...]] = [(size,) for size in self.array.shape]
        shapes[at] = 2, self.array.shape[at] // 2
        array = partition.split(self.array, shapes)
        return _Leaf(self.name, self.word.replace("H", "2F"), array)


def _words(operands: dict[str, Any], gated: bool, transpose_w: bool) -> dict[str, str]:
    tokens = "".join(map(str, range(operands["x"].ndim - 1)))
    columns = lambda a, rank: ("2F" if a is not None and a.ndim > rank else "H") if gated else "F"
    up, bias = columns(operands["up"], 3), columns(operands["up_bias"], 2)
    return {
        "x": f"{tokens}D",
        "expert_index": f"{tokens}k",
        "expert_weight": f"{tokens}k",
        "up": f"E{up}D" if transpose_w else f"ED{up}",
        "down": "EDF" if transpose_w else "EFD",
        "up_bias": f"E{bias}",
        "down_bias": "ED",
        "up_codes": "EHD" if gated else "EFD",
        "down_codes": "EDF",
        "up_state": "r",
        "down_state": "r",
        "expert_offset": ".",
        "key": ".",
    }


def _mesh_axes(leaves: Sequence[_Leaf]) -> dict[str, tuple[str, ...]]:
    """The mesh axes that divide each letter; H counts as F."""
    axes: dict[str, tuple[str, ...]] = {}
    leaves = sorted(leaves, key=lambda leaf: not leaf.word[:1].isdigit())  # tokens decide
    for leaf in leaves:
        for letter, entry in leaf.sharded():
            if not entry:
                continue
            divided = "F" if letter == "H" else letter
            if letter in _WHOLE:
                _refuse(leaf, _WHOLE[letter], entry, "this layer has that axis on every device")
            if axes.setdefault(divided, entry) != entry:
                other = f"another operand shards it over {axes[divided]}"
                _refuse(leaf, _named(divided), entry, other)
    by_mesh_axis: dict[str, str] = {}
    for leaf in leaves:
        for letter, entry in leaf.sharded():
            divided = "F" if letter == "H" else letter
            for axis in entry:
                first = by_mesh_axis.setdefault(axis, divided)
                if first != divided and not (divided == "E" and first.isdigit()):
                    other = f"that mesh axis shards {_named(first)}, too"
                    _refuse(leaf, _named(divided), entry, other)
    return axes


def _with_tokens(axes: dict[str, tuple[str, ...]]) -> bool:
    """Whether what shards experts shards tokens, too."""
    tokens = {name for letter, of in axes.items() if letter.isdigit() for name in of}
    experts = axes.get("E", ())
    both = [name for name in experts if name in tokens]
    if both and len(both) < len(experts):
        raise ValueError(
            f"jgg.moe_mlp: experts are sharded over {experts}, but tokens over {tuple(both)} of "
            "them only. Shard tokens over all of them, or over none, with jax.sharding.reshard."
        )
    return bool(both)


def _named(letter: str) -> str:
    return "tokens" if letter.isdigit() else letter


def _refuse(leaf: _Leaf, letter: str, entry, why: str) -> None:
    raise ValueError(
        f"{leaf} shards {letter} over {entry}, but {why}. Use jax.sharding.reshard first."
    )


def _in_whole_blocks(w, halves: int | None = None):
    """A weight with blocks that no device's part cuts, if it has whole ones."""
    if not isinstance(w, Quantized) or w.layout != "linear":
        return w
    return format.of(w).in_whole_blocks(w, halves)


def _layout_of_tiles(operand) -> str | None:
    tiles = isinstance(operand, Quantized) and operand.layout != "linear"
    return operand.layout if tiles else None


_REMEDY = "Shard the linear layout, or prepack in jax.shard_map."


def _check_layout(leaf: _Leaf, operand) -> None:
    layout = _layout_of_tiles(operand)
    if layout and any(entry for letter, entry in leaf.sharded() if letter != "E"):
        raise ValueError(
            f"{leaf} is sharded, but tiles of layout {layout!r} are not cut here. {_REMEDY}"
        )


def _check_no_tiles(leaf: _Leaf, operand, hidden) -> None:
    if layout := _layout_of_tiles(operand):
        raise ValueError(
            f"{leaf} has tiles of layout {layout!r}, which are not cut here, but another operand "
            f"shards F over {hidden}. {_REMEDY}"
        )


def _check_size(leaf: _Leaf, parts: int) -> None:
    """An axis of words or scales may not divide where the axis that it stands for does."""
    for letter, size in zip(leaf.word, leaf.array.shape, strict=True):
        unit = {"F": parts, "H": 2 * parts}.get(letter, 1)
        if size % unit:
            whole = "gate and up of every device" if letter == "H" else "one part for each device"
            raise ValueError(
                f"{leaf}: F is sharded into {parts}, but {size} of it do not divide into {whole}"
            )


def _own_halves(a, axis: int, axes: tuple[str, ...], parts: int):
    """The gate and the up of this device, which has a part of both in one axis, as device i has
    blocks 2i and 2i + 1 of 2 * parts. It wants block i, and block i + parts: each of two rounds
    brings one of them, and takes one away."""

    def swaps(device):  # so that no two devices send to the same one
        return (parts % 2 == 0) & (2 * device >= parts)

    here = lax.axis_index(axes)
    own = jnp.split(a, 2, axis)
    got = []
    for i in range(2):
        block = jnp.where(swaps(here), own[1 - i], own[i])
        to = [(d, (2 * d + (i ^ int(swaps(d)))) % parts) for d in range(parts)]
        got.append(lax.ppermute(block, axes, to))
    even = here % 2 == 0
    return jnp.concatenate([jnp.where(even, got[0], got[1]), jnp.where(even, got[1], got[0])], axis)
