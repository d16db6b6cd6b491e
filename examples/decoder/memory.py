"""How many bytes a model takes of a device, and whether they are free."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config
from .errors import Refused
from .model import attention_of
from .weights import BITS, FLOAT_HEADERS, Header

if TYPE_CHECKING:
    from .loading import Options

GB = 1e9
EXPERTS = re.compile(r"\.(experts|switch_mlp|block_sparse_moe\.(in|out)put_linear)\.")


def amount(nbytes: float) -> str:
    """In the unit that needs no more than three digits before the point."""
    if nbytes == float("inf"):
        return "an unknown amount"
    units = ["B", "kB", "MB", "GB", "TB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes, units = nbytes / 1000, units[1:]
    unit = units[0]
    digits = 0 if unit == "B" or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
    return f"{nbytes:.{digits}f} {unit}"


def free(options: Options) -> float:
    """Bytes of one device that are not in use."""
    if options.memory is not None:
        return options.memory * GB
    device = jax.devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    # Devices that are made of this machine's cores share its memory.
    found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    return float(found[1]) * 1024 / options.devices if found else float("inf")


def most_held() -> int | None:
    """The most bytes that arrays of this process have had on one device; None where the platform
    does not say."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s), default=None)


def on_one_device(tree: Any) -> int:
    """Bytes of arrays, or of arrays of such shapes, on one of the devices that share them."""

    def nbytes(a: Any) -> int:
        shape, sharding = a.shape, getattr(a, "sharding", None)
        part = shape if sharding is None else sharding.shard_shape(shape)
        return int(np.prod(part)) * jnp.dtype(a.dtype).itemsize

    return sum(map(nbytes, jax.tree.leaves(tree)))


class Use(NamedTuple):
    """Bytes of a device that compiled programs use while they run, as XLA planned them."""

    weights: int
    cache: int
    temporaries: int

    @classmethod
    def of(cls, weights: Any, cache: Any, programs: Sequence[jax.stages.Compiled]) -> Use:
        """The use of programs that take these weights, and give the cache back in its place."""
        weights, cache = on_one_device(weights), on_one_device(cache)
        most = max(map(peak, programs))
        return cls(weights, cache, max(0, most - weights - cache))


def peak(program: jax.stages.Compiled) -> int:
    """Bytes of its arguments, results and temporaries; 0 where the platform does not say."""
    of = program.memory_analysis()
    if of is None:
        return 0
    return (
        of.argument_size_in_bytes + of.output_size_in_bytes + of.temp_size_in_bytes
        - of.alias_size_in_bytes
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of a device: those of a checkpoint as its files say, or of its programs."""

    experts: float
    others: float
    cache: float
    weights_of_experts: float  # how many numbers
    quantized: bool  # the experts of the checkpoint are
    temporaries: float | None = None  # None: nothing is compiled yet
    layer: float = 0.0  # a copy of a layer, while it is loaded

    @classmethod
    def of(cls, config: Config, said: Mapping[str, Header], options: Options) -> Need:
        itemsize = jnp.dtype(options.dtype).itemsize
        experts = others = 0.0
        quantized = False
        for name, header in said.items():
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            if layer and int(layer[1]) >= config.layers:
                continue  # it predicts several tokens, and is not loaded
            plain = header.dtype in FLOAT_HEADERS
            # Scales of AWQ and GPTQ are read as two float32 for each.
            scales = name.endswith((".scales", "qzeros"))
            nbytes = header.size * (4 if scales else itemsize) if plain else header.nbytes
            if EXPERTS.search(name):
                experts += nbytes
                quantized |= not plain
            else:
                others += nbytes
        layers = sum(config.moe_layers) * config.router.experts
        numbers = 3.0 * layers * config.width * config.expert_width
        if options.quantize is not None and not quantized:
            experts = numbers * BITS[options.quantize] / 8
        shapes = attention_of(config).cache(config).values()
        token = sum(int(np.prod(shape)) for shape in shapes) * itemsize * config.layers
        return cls(
            experts / options.devices, others, token * options.tokens,
            numbers / options.devices, quantized,
        )  # fmt: skip

    def compiled(self, use: Use, layer: float) -> Need:
        """The same of programs that are compiled, with the size of the largest layer."""
        others = max(0.0, use.weights - self.experts)
        experts = use.weights - others
        return dataclasses.replace(
            self, experts=experts, others=others, cache=use.cache,
            temporaries=use.temporaries, layer=layer,
        )  # fmt: skip

    @property
    def running(self) -> float:
        """Besides the weights."""
        return self.cache + (self.temporaries or 0.0)

    @property
    def total(self) -> float:
        """A layer is loaded before there is a cache."""
        return self.experts + self.others + max(self.running, self.layer)

    def fits(self, room: float) -> bool:
        margin = 1.05 if self.temporaries is None else 1.0  # a step's own arrays
        return self.total * margin <= room

    def announced(self, room: float) -> str:
        weights, cache = amount(self.experts + self.others), amount(self.cache)
        running = f"{cache} of cache and {amount(self.temporaries or 0)} of temporaries"
        if self.layer > self.running:
            parts = f"{weights} of weights and, while they are loaded, {amount(self.layer)} of a "
            parts += f"layer; then {running}"
        else:
            parts = f"{weights} of weights, {running}"
        return f"needs {amount(self.total)} of {amount(room)}: {parts}"

    def compared(self, most: float) -> str:
        """With the most that a device has held."""
        return f"held {amount(most)} at most, {most / self.total:.3f} of what was announced"

    def check(self, room: float, devices: int) -> None:
        """Refuse what does not fit, with the formats that would."""
        if self.fits(room):
            return
        sizes = {mode: self.weights_of_experts * bits / 8 for mode, bits in BITS.items()}
        fitting = [
            f"{mode} ({amount(size)})"
            for mode, size in sizes.items()
            if size < self.experts and dataclasses.replace(self, experts=size).fits(room)
        ]
        parts = [f"{amount(self.others)} of weights"]
        if self.weights_of_experts:
            others = f"{amount(self.others)} of other weights"
            parts = [f"{amount(self.experts)} of experts", others]
        if self.layer > self.running:
            parts.append(f"{amount(self.layer)} of a layer while it is loaded")
        else:
            parts.append(f"{amount(self.cache)} of cache")
            if self.temporaries is not None:
                parts.append(f"{amount(self.temporaries)} of temporaries")
        text = (
            f"{', '.join(parts[:-1])} and {parts[-1]} do not fit into the {amount(room)} that "
            f"{'a device' if devices > 1 else 'the device'} has free"
        )
        if not self.weights_of_experts:
            more = "use fewer --tokens, or a quantized checkpoint"
        elif not fitting:
            more = "no format of experts makes them fit: use more --devices, or fewer --tokens"
        elif self.quantized:
            more = f"a checkpoint would fit whose experts are in {', '.join(fitting)}"
        else:
            more = f"experts would fit with --quantize {' or '.join(fitting)}"
        raise Refused(f"{text}; {more}")
