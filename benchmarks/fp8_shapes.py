"""Cases of the FP8 benchmark: products of two operands in blocks of 128, and quantizing them.

fp8           fprop (T, K) x (G, N, K), dgrad (T, N) x (G, N, K), and wgrad (T, N) x (T, K) over the
              rows of each group
fp8_quantize  activations along either axis, and weights in tiles of 128 x 128
fp8_linear    those products and all casts between bfloat16 arrays, as a training step has them
"""

from dataclasses import dataclass, field

import numpy as np

from .quantized_shapes import Case, routed
from .shapes import ROWS_PER_GROUP, TOP_K, projections

OPS = ("fp8", "fp8_quantize", "fp8_linear")
DIRECTIONS = ("fprop", "dgrad", "wgrad")
# DeepGEMM's list of grouped products: groups and rows of each on average; N and K.
GROUPS = ((4, 8192), (8, 4096))
WIDTHS = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
# TFLOP/s that DeepGEMM has published of an H800 (not measured here): groups, rows each, N, K.
PUBLISHED = {(4, 8192, 4096, 7168): 1381.0, (4, 8192, 7168, 2048): 1262.0}
TOKENS = (64, 512, 4096, 16384)
ROWS, WIDTH, EXPERTS = 262144, 2048, 128  # of fp8_quantize
MEAN = 1024  # rows of an expert of fp8_linear, at least


@dataclass(frozen=True)
class Grouped(Case):
    """Rows in groups, each with a weight of (N, K)."""

    name: str
    groups: int
    rows: int
    k: int
    n: int
    tokens: int = 0  # of a model, whose tokens have several experts; 0: rows are drawn

    kind = "fp8"  # of C

    @property
    def label(self) -> str:
        return f"{self.name} G{self.groups} K{self.k} N{self.n} R{self.rows}"

    @property
    def regime(self) -> str:
        mean = self.rows / self.groups
        return ROWS_PER_GROUP[0 if mean <= 32 else 1 if mean <= 512 else 2]

    def sizes(self) -> np.ndarray:
        """Rows of each group, random: they are multiples of nothing."""
        if self.tokens:
            top_k = self.rows // self.tokens
            return routed(self.tokens, self.groups, top_k, False).copy()
        drawn = np.random.default_rng(self.rows).multinomial(
            self.rows, np.full(self.groups, 1 / self.groups)
        )
        return drawn.astype(np.int32)

    @property
    def flops(self) -> int:
        """A product has so many."""
        return 2 * self.rows * self.k * self.n

    @property
    def read(self) -> int:
        """Elements of the weights that have rows."""
        return int(np.count_nonzero(self.sizes())) * self.k * self.n


@dataclass(frozen=True)
class Product(Grouped):
    direction: str = field(kw_only=True)

    peer_tolerance = 8e-2  # a scale for each row has less precision than one for 128 elements

    @property
    def op(self) -> str:
        return f"fp8 {self.direction}"

    @property
    def published(self) -> float | None:
        """TFLOP/s of another library on another card."""
        shape = self.groups, self.rows // self.groups, self.n, self.k
        return PUBLISHED.get(shape) if self.direction == "fprop" else None

    @property
    def bytes(self) -> int:
        """Codes and scales of both operands; a bfloat16 result, a float32 one of wgrad."""
        lines = lambda elements: elements + 4 * elements // 128
        if self.direction == "wgrad":
            return lines(self.rows * (self.k + self.n)) + 4 * self.groups * self.k * self.n
        a, out = (self.k, self.n) if self.direction == "fprop" else (self.n, self.k)
        weights = self.read + 4 * self.read // 128**2
        return lines(self.rows * a) + weights + 2 * self.rows * out


@dataclass(frozen=True)
class Linear(Grouped):
    """``fp8_grouped_linear``: the result, and the gradients of x and of the weights."""

    op = "fp8_linear"
    tolerance = 5e-2  # to what was not quantized; rounding two operands to e4m3 gives 3.6e-2

    @property
    def flops(self) -> int:
        return 3 * super().flops

    @property
    def bytes(self) -> int:
        """x, weights and dy once, the result and both gradients once, all of them bfloat16."""
        gradient = self.groups * self.k * self.n
        return 2 * (2 * self.rows * (self.k + self.n) + self.read + gradient)


@dataclass(frozen=True)
class Quantize(Case):
    """``fp8_quantize`` of bfloat16: x (T, K), in groups of rows, or weights (G, N, K)."""

    what: str  # a key of QUANTIZE
    groups: int
    n: int
    k: int

    op = "fp8_quantize"
    flops = 0
    tolerance = 0.0  # the bytes are those of the CPU

    @property
    def label(self) -> str:
        return f"{self.what} G{self.groups} {'N' if self.is_weights else 'T'}{self.n} K{self.k}"

    @property
    def options(self) -> dict:
        return QUANTIZE[self.what]

    @property
    def is_weights(self) -> bool:
        return "block" in self.options

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.groups, self.n, self.k) if self.is_weights else (self.n, self.k)

    def sizes(self) -> np.ndarray:
        drawn = np.random.default_rng(self.n).multinomial(
            self.n, np.full(self.groups, 1 / self.groups)
        )
        return drawn.astype(np.int32)

    @property
    def bytes(self) -> int:
        """x once, codes and scales once, with the rows that groups are padded with."""
        elements = stored = int(np.prod(self.shape))
        if self.options.get("grouped") and self.options.get("axis") == 0:
            stored = self.tiles * 128 * self.k
            if self.options.get("both"):
                stored += elements
        return 2 * elements + stored + 4 * stored // (128**2 if self.is_weights else 128)

    @property
    def tiles(self) -> int:
        """So many tiles of 128 rows hold all groups, each padded."""
        return int((-(-self.sizes() // 128)).sum())


# Options of fp8_quantize; "grouped": with group_sizes, "stochastic": with a key, "both": that and
# rows, from one read.
QUANTIZE: dict[str, dict] = {
    "rows": {},
    "rows grouped": {"grouped": True},
    "rows grouped stochastic": {"grouped": True, "stochastic": True},
    "along T": {"axis": 0, "grouped": True},
    "along T stochastic": {"axis": 0, "grouped": True, "stochastic": True},
    "both axes": {"axis": 0, "grouped": True, "both": True},
    "weights": {"block": (128, 128)},
    "weights transposed": {"block": (128, 128), "axis": -2},
}


def training(name: str, experts: int, k: int, n: int) -> Linear:
    """With the fewest tokens, a power of two, that give an expert ``MEAN`` rows."""
    top_k = TOP_K[name.split()[0]]
    tokens = 1 << (-(-MEAN * experts // top_k) - 1).bit_length()
    return Linear(name, experts, tokens * top_k, k, n, tokens)


def cases(op: str, level: str = "default", skew: bool = False) -> list[Case]:
    """``level`` is "quick", "default" or "full"."""
    del skew
    models = [p for p in projections() if level != "quick" or p[0] == "Qwen3-30B up"]
    if op == "fp8_quantize":
        names = ("rows grouped", "along T", "weights") if level == "quick" else QUANTIZE
        return [
            Quantize(what, *((64, 1536, 2048) if "weights" in what else (EXPERTS, ROWS, WIDTH)))
            for what in names
        ]
    if op == "fp8_linear":
        return [training(*projection) for projection in models]
    groups, widths = (GROUPS[:1], WIDTHS[:1]) if level == "quick" else (GROUPS, WIDTHS)
    found: list[Case] = [
        Product("DeepGEMM", g, g * rows, k, n, direction=direction)
        for g, rows in groups
        for n, k in widths
        for direction in DIRECTIONS
    ]
    if level != "quick":
        found += [
            Product("DeepGEMM", g, g * m, k, n, direction="fprop") for g, m, n, k in PUBLISHED
        ]
    for name, experts, k, n in models:
        for tokens in TOKENS if level != "quick" else (64, 16384):
            many = tokens == max(TOKENS)
            if name.endswith("up") or many or level == "full":
                of = name, experts, tokens * TOP_K[name.split()[0]], k, n, tokens
                directions = DIRECTIONS if many else DIRECTIONS[:1]
                found += [Product(*of, direction=direction) for direction in directions]
    return list(dict.fromkeys(found))
