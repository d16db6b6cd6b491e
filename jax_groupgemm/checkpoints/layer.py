"""One layer of a checkpoint: its tensors, what config says of it, and what a format is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from .._core import check
from .._quantized.array import Quantized
from .._quantized.format import FORMATS
from .gguf_types import Blocks
from .messages import brief, cut
from .safetensors import Tensors

#: Modules that hold a language model's layers in some releases of it, and not in others.
WRAPPERS = ("model", "language_model", "text_model")
WRAPPED = ("layers", "lm_head", "embed_tokens")
AROUND = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
USUAL_GROUPS = (128, 64, 32, 256, 512, 1024)
SECTIONS = ("quantization_config", "quantization")  # of config.json


def spellings(name: str) -> tuple[str, ...]:
    """The names by which a config may call a layer, its own first."""
    bare = name
    while (head := bare.partition("."))[0] in WRAPPERS and head[2]:
        bare = head[2]
    if bare.partition(".")[0] not in WRAPPED:  # of a vision tower, say
        return (name,)
    return tuple(dict.fromkeys([name, *(around + bare for around in AROUND)]))


def section(config: Mapping[str, Any], keys: Sequence[str] = SECTIONS) -> Mapping[str, Any]:
    """The part of a config that is about quantization: under one of ``keys``, there or in a part
    such as ``text_config``; else all of it.

    Raises:
      ValueError: there are several that differ, or one is no dict.
    """

    def of(part: Mapping[str, Any]):
        return next(((key, part[key]) for key in keys if part.get(key) is not None), None)

    found = of(config)
    if found is None:
        parts = [v for k, v in config.items() if str(k).endswith("_config")]
        inner = [item for v in parts if isinstance(v, Mapping) and (item := of(v))]
        if any(item[1] != inner[0][1] for item in inner):
            raise ValueError(f"config has several {inner[0][0]}, which differ: pass one of them")
        found = inner[0] if inner else None
    if found is None:
        return config
    if not isinstance(found[1], Mapping):
        raise ValueError(f"config says {found[0]}={brief(found[1])}, expected a dict")
    return found[1]


class Layer(NamedTuple):
    """The tensors under one prefix. Every error names the prefix or a tensor."""

    op: str
    prefix: str
    tensors: Mapping[str, Any]
    config: Mapping[str, Any]  # what it says of quantization
    model: Mapping[str, Any]  # all of it
    stacked: bool
    reorder: bool
    expected: tuple[int | None, ...] = ()  # the shape, None: any size; (): any shape
    scales_dtype: Any = None  # of affine scales and biases, None: those that hold them

    def error(self, text: str) -> ValueError:
        text = cut(text, 1500)
        return ValueError(f"jgg.checkpoints.{self.op}: {cut(self.prefix)}: {text}")

    def has(self, leaf: str) -> bool:
        return self.prefix + leaf in self.tensors

    def dtype(self, leaf: str) -> str:
        """A tensor's dtype; files are not read for it."""
        name = self.prefix + leaf
        if isinstance(self.tensors, Tensors):
            return self.tensors.header(name).dtype
        value = self.tensors[name]
        return value.type if isinstance(value, Blocks) else np.asarray(value).dtype.name

    def shape_of(self, name: str) -> Any:
        """The shape of any tensor of the checkpoint, None where there is none; files are not read
        for it."""
        if name not in self.tensors:
            return None
        if isinstance(self.tensors, Tensors):
            return self.tensors.header(name).shape
        try:
            return np.shape(self.tensors[name])
        except ValueError:  # ragged
            return None

    def array(self, leaf: str, dtypes: Sequence[str]) -> np.ndarray:
        value = self.tensors[self.prefix + leaf]
        try:
            value = np.asarray(value)
        except (TypeError, ValueError) as error:  # ragged, or of a dtype that numpy has not
            raise TypeError(
                f"jgg.checkpoints.{self.op}: {cut(self.prefix)}{leaf} must be an array, got "
                f"{type(value).__name__}: {cut(str(error))}"
            ) from error
        if value.dtype.name not in dtypes:
            raise TypeError(
                f"jgg.checkpoints.{self.op}: {cut(self.prefix)}{leaf} must be "
                f"{' or '.join(dtypes)}, got dtype {value.dtype.name}"
            )
        if value.size == 0:
            raise self.error(f"{leaf} of shape {value.shape} is empty")
        return value

    def get(
        self, leaf: str, dtypes: Sequence[str], letters: str, expected: Sequence, why: str = ""
    ) -> np.ndarray:
        """The array ``prefix + leaf``, of the shape ``expected`` (None: any size)."""
        value = self.array(leaf, dtypes)
        letters = f"G, {letters}" if self.stacked else letters
        name = cut(self.prefix) + leaf
        check.shape(f"checkpoints.{self.op}", name, value, expected, letters, why)
        return value

    def check_shape(self, got: tuple[int, ...], why: str = "", instead: str = "") -> None:
        """Raise where the caller expects another shape than the layer's."""
        sizes = zip(self.expected, got, strict=True) if self.expected else ()
        want = tuple(have if size is None else size for size, have in sizes)
        if self.expected and want != got:
            instead = instead or ": is it another layer's prefix, or another model's config?"
            raise self.error(f"has shape {got}{why}, expected shape={want}{instead}")

    def scalar(self, leaf: str) -> Any:
        value = self.array(leaf, ("float32",))
        if value.shape not in ((), (1,)):
            raise self.error(f"{leaf} has shape {value.shape}, expected one number")
        return value.reshape(())[()]

    def option(self, keys: str | tuple[str, ...], known: tuple | None = None):
        """The value that config has under any of ``keys``; None where it has none."""
        keys = (keys,) if isinstance(keys, str) else keys
        found = {key: self.config[key] for key in keys if self.config.get(key) is not None}
        out = next(iter(found.values()), None)
        for key, value in found.items():
            if known is not None and value not in known:
                expected = " or ".join(map(repr, known)) or "nothing"
                raise self.error(f"config says {key}={brief(value)}, expected {expected}")
            if value is not out and value != out:
                said = ", ".join(f"{k}={brief(v)}" for k, v in found.items())
                raise self.error(f"config contradicts itself: {said}")
        return out if known is None or out is None else known[known.index(out)]  # 4, not 4.0

    def mapping(self, said: str, value) -> Mapping[str, Any]:
        """A part of config, which must be a dict."""
        if not isinstance(value, Mapping):
            raise self.error(f"config says {cut(said)}={brief(value)}, expected a dict")
        return value

    def parts(self, key: str) -> Mapping[str, Any]:
        value = self.config.get(key)
        value = {} if value is None else self.mapping(key, value)
        if not all(isinstance(name, str) for name in value):
            raise self.error(f"config says {key}={brief(value)}, expected names")
        return value

    def own(self, parts: Mapping[str, Any]) -> str | None:
        """The name under which a dict of layers has this one."""
        return next((name for name in spellings(self.prefix) if name in parts), None)

    def match(self, key: str, entry: str, marks: tuple[str, ...] = (), find=re.match) -> bool:
        """Whether the layer's name begins as the regular expression after a mark says."""
        pattern = entry[len(marks[0]) * entry.startswith(marks) :] if marks else entry
        # What a pattern must not find, another release's name may not have.
        own = "(?!" in pattern or "(?<!" in pattern
        names = (self.prefix,) if own else spellings(self.prefix)
        try:
            return any(find(pattern, name) is not None for name in names)
        except re.error as error:
            raise self.error(f"config's {key} pattern {brief(entry)}: {error}") from error

    def names(self, key: str) -> Sequence[str]:
        """A list of names, or of patterns of them."""
        value = self.config.get(key)
        value = [] if value is None else value
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise self.error(f"config says {key}={brief(value)}, expected a list of names")
        return value

    def refuse(self, key: str, names: Callable[[str], bool]) -> None:
        """Raise where ``key`` lists what is not quantized, and an entry names this layer."""
        for entry in self.names(key):
            if names(entry):
                raise self.error(f"config says it is not quantized: {key} {brief(entry)}")

    def and_outer(self) -> Iterator[str]:
        """The layer's name, and those of the modules that it is in, from the inside out."""
        for name in spellings(self.prefix):
            while name:
                yield name
                name = name.rpartition(".")[0]

    def fnmatch(self, entry: str) -> bool:
        """Whether a pattern is that of the layer, or of a module that it is in."""
        return any(fnmatchcase(name, entry) for name in self.and_outer())

    def group_size(self, k: int, groups: int, needed: str = "") -> int:
        """The channels of a group; the last group may be shorter.

        ``needed``: config must say it, where there are several groups, and how it does. Their
        number alone does not say whether 192 channels are 96 and 96 or 128 and 64.
        """
        said = self.option(("group_size", "q_group_size"))
        if said is None:
            if needed and groups > 1:
                low, high = -(-k // groups), -(-k // (groups - 1)) - 1
                if low > high:
                    raise self.error(f"scales have {groups} groups, but K is {k}")
                usual = next((n for n in USUAL_GROUPS if low <= n <= high), low)
                sizes = f"{low} to {high}" if low < high else f"{low}"
                raise self.error(
                    f"config says no group_size, and {groups} groups of K={k} may be of {sizes} "
                    f"channels: pass the size that the layer was quantized with, such as "
                    f"{needed.format(usual)}"
                )
            if k % groups:
                raise self.error(f"scales have {groups} groups, but K is {k}")
            return k // groups
        number = isinstance(said, (int, float)) and not isinstance(said, bool) and said == said // 1
        if not number or (said < 1 and said != -1):
            raise self.error(f"config says group_size={brief(said)}, expected a size or -1")
        size = k if said == -1 else min(int(said), k)
        if -(-k // size) != groups:
            raise self.error(
                f"scales have {groups} groups, but K is {k} and config says group_size={said}"
            )
        return size

    def quantized(self, weight, scales, biases=None, global_scale=None, *, mode, bits, group_size):
        known = FORMATS[mode]
        if bits not in known.bits or group_size not in known.group_sizes:
            raise self.error(f"{bits} bits in groups of {group_size} are not of mode {mode!r}")
        return Quantized(
            weight, scales, biases, global_scale, mode=mode, bits=bits, group_size=group_size
        )


#: A ``Quantized``, in format "gguf" also an array; and, where K was reordered, its order.
Read = tuple[Any, np.ndarray | None]


class Kind(NamedTuple):
    """One way in which a format stores a layer.

    Attributes:
      name: as its writers call it.
      needed, optional: the tensors under a prefix.
      read: makes a ``Quantized`` of them.
      stacked: experts are stacked in one tensor: never, always, or either.
      dtype: a tensor and its dtypes, where another kind has tensors of the same names.
    """

    name: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Layer], Read]
    stacked: tuple[bool, ...] = (False,)
    dtype: tuple[str, tuple[str, ...]] | None = None

    def fits(self, t: Layer) -> bool:
        """Whether a layer has its tensors."""
        if not all(map(t.has, self.needed)):
            return False
        return self.dtype is None or t.dtype(self.dtype[0]) in self.dtype[1]


def one(t: Layer, kinds: Sequence[Kind]) -> tuple[Layer, Kind]:
    """The kind whose tensors a layer has, of those that are stacked as the call says."""
    kinds = [kind for kind in kinds if t.stacked in kind.stacked]
    return t, next((kind for kind in kinds if kind.fits(t)), kinds[0])


class Format(NamedTuple):
    """A format that is read.

    Attributes:
      kinds: the ways in which it stores a layer.
      methods: ``quant_method`` of its configs.
      choose: the layer, with what config says of it, and the kind that it is of.
      needs: what config is needed for, if it is.
      sections: where config has it.
    """

    kinds: tuple[Kind, ...]
    methods: tuple[str, ...]
    choose: Callable[[Layer, Sequence[Kind]], tuple[Layer, Kind]] = one
    needs: str = ""
    sections: tuple[str, ...] = SECTIONS
