"""What ``python -m jax_groupgemm.tune`` measures: products of models' expert layers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from .._core import segments
from .._core.products import Wgrad
from .._grouped import primitives
from .._grouped.grouped_mm import grouped_mm
from .._kernels import tuned
from . import timing

#: Experts, hidden width, width of one expert, experts per token.
MODELS = {
    "Mixtral-8x7B": (8, 4096, 14336, 2),
    "Qwen3-30B-A3B": (128, 2048, 768, 8),
    "Qwen3-235B-A22B": (128, 4096, 1536, 8),
    "DeepSeek-V3": (256, 7168, 2048, 8),
    "gpt-oss-120b": (128, 2880, 2880, 4),
}
OPS = ("forward", "dgrad", "wgrad")
TOKENS = tuple(2**i for i in range(3, 15))
QUICK = {"forward": (32, 512, 8192), "dgrad": (512, 8192), "wgrad": (512, 8192)}

# For the estimate alone: bytes/s and FLOP/s of an H200 in round numbers, and seconds that were
# assumed, not measured, for a compilation, a case's operands and comparison, and a call's launch.
_BYTES, _FLOPS, _COMPILE, _CASE, _CALL = 4e12, 7e14, 0.15, 0.4, 4e-4


@dataclasses.dataclass(frozen=True)
class Layer:
    """One projection of an expert layer: weights (groups, k, n), or (groups, n, k)."""

    name: str
    groups: int
    k: int
    n: int
    top_k: int = 1
    gated: bool = False  # forward also with a gated activation
    transpose_w: bool = False


def model_layers(name: str) -> tuple[Layer, Layer]:
    """The gate with the up projection, and the down projection."""
    experts, hidden, inter, top_k = MODELS[name]
    return (
        Layer(f"{name} up", experts, hidden, 2 * inter, top_k, gated=True),
        Layer(f"{name} down", experts, inter, hidden, top_k),
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """One product: ``grouped_mm``, or its derivative in x (dgrad) or w (wgrad)."""

    op: str
    layer: Layer
    rows: int
    dtype: str
    gated: bool = False

    @property
    def label(self) -> str:
        v = self.layer
        shape = f"{v.name} G{v.groups} K{v.k} N{v.n} R{self.rows}".strip()
        words = ["NK"] * v.transpose_w + ["gated"] * self.gated
        words += [self.dtype] * (self.dtype != "bfloat16")
        return " ".join([f"{self.op:7}", shape, *words])

    @property
    def tiles(self) -> tuple[int, ...]:
        return tuned.tiles("wgrad" if self.op == "wgrad" else "mm", self.gated)

    def sizes(self) -> np.ndarray:
        """Rows of each group under uniform routing: multiples of nothing."""
        rng = np.random.default_rng(self.rows)
        groups = self.layer.groups
        return rng.multinomial(self.rows, np.ones(groups) / groups).astype(np.int32)

    def function(self):
        """A new function of the operands: one that was traced before keeps its tile."""
        v = self.layer
        if self.op == "wgrad":
            product = Wgrad(groups=v.groups, out_dtype=self.dtype)
            return lambda x, y, sizes: primitives.wgrad(x, y, segments.sizes(sizes), product)
        transposed = v.transpose_w != (self.op == "dgrad")
        activation = "swiglu" if self.gated else None
        return lambda x, w, sizes: grouped_mm(
            x, w, sizes, transpose_w=transposed, activation=activation, implementation="sm90"
        )

    def seconds(self, repetitions: int) -> float:
        """A rough estimate of how long measuring it takes."""
        v = self.layer
        bytes_ = 2 * (self.rows * (v.k + v.n) + v.groups * v.k * v.n)
        floor = max(bytes_ / _BYTES, 2 * self.rows * v.k * v.n / _FLOPS)
        calls = (len(self.tiles) + 1) * (repetitions + 2)
        return _CASE + (len(self.tiles) + 1) * _COMPILE + calls * (1.5 * floor + _CALL)


class Operands:
    """Random operands of cases, one after the other; weights are made once for neighbours."""

    def __init__(self):
        self._key, self._weights = None, None

    def of(self, case: Case) -> tuple:
        v, sizes = case.layer, jnp.asarray(case.sizes())
        x = timing.random(0, (case.rows, v.n if case.op == "dgrad" else v.k), case.dtype)
        if case.op == "wgrad":
            self._key, self._weights = None, None
            y = timing.random(1, (case.rows, v.n), case.dtype)
            return (y, x, sizes) if v.transpose_w else (x, y, sizes)
        shape = (v.groups, v.n, v.k) if v.transpose_w else (v.groups, v.k, v.n)
        if self._key != (shape, case.dtype):
            self._weights = None  # before others take their place
            self._key, self._weights = (shape, case.dtype), timing.random(1, shape, case.dtype)
        return x, self._weights, sizes


def cases(layers, tokens: dict[str, Sequence[int]], dtypes) -> Iterator[Case]:
    """Tokens are given by operation. Cases of the same weights follow each other."""
    for layer, dtype in itertools.product(layers, dtypes):
        for op, count in ((op, count) for op, counts in tokens.items() for count in counts):
            case = Case(op, layer, layer.top_k * count, dtype)
            yield case
            if layer.gated and op == "forward":
                yield dataclasses.replace(case, gated=True)
