"""Cases of the FP8 benchmark: products of two operands in blocks of 128, and quantizing them.

fp8           fprop (T, K) x (G, N, K), dgrad (T, N) x (G, N, K), and wgrad (T, N) x (T, K) over the
              rows of each group
fp8_quantize  activations along either axis, and weights in tiles of 128 x 128
"""

from dataclasses import dataclass

import numpy as np

from .quantized_shapes import Case, routed
from .shapes import MODELS, ROWS_PER_GROUP, TOP_K

OPS = ("fp8", "fp8_quantize")
DIRECTIONS = ("fprop", "dgrad", "wgrad")
# DeepGEMM's list of grouped products: groups and rows of each on average; N and K.
GROUPS = ((4, 8192), (8, 4096))
WIDTHS = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
# TFLOP/s that DeepGEMM has published of an H800 (not measured here): groups, rows each, N, K.
PUBLISHED = {(4, 8192, 4096, 7168): 1381.0, (4, 8192, 7168, 2048): 1262.0}
TOKENS = (64, 512, 4096, 16384)
ROWS, WIDTH, EXPERTS = 262144, 2048, 128  # of fp8_quantize


@dataclass(frozen=True)
class Product(Case):
    direction: str
    name: str
    groups: int
    rows: int
    k: int
    n: int
    tokens: int = 0  # of a model, whose tokens have several experts; 0: rows are drawn

    kind = "fp8"  # of C
    peer_tolerance = 8e-2  # a scale for each row has less precision than one for 128 elements

    @property
    def op(self) -> str:
        return f"fp8 {self.direction}"

    @property
    def label(self) -> str:
        return f"{self.name} G{self.groups} K{self.k} N{self.n} R{self.rows}"

    @property
    def regime(self) -> str:
        mean = self.rows / self.groups
        return ROWS_PER_GROUP[0 if mean <= 32 else 1 if mean <= 512 else 2]

    @property
    def published(self) -> float | None:
        """TFLOP/s of another library on another card."""
        shape = self.groups, self.rows // self.groups, self.n, self.k
        return PUBLISHED.get(shape) if self.direction == "fprop" else None

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
        return 2 * self.rows * self.k * self.n

    @property
    def bytes(self) -> int:
        """Codes and scales of both operands; a bfloat16 result, a float32 one of wgrad."""
        lines = lambda elements: elements + 4 * elements // 128
        if self.direction == "wgrad":
            return lines(self.rows * (self.k + self.n)) + 4 * self.groups * self.k * self.n
        a, out = (self.k, self.n) if self.direction == "fprop" else (self.n, self.k)
        read = int(np.count_nonzero(self.sizes())) * self.k * self.n
        return lines(self.rows * a) + read + 4 * read // 128**2 + 2 * self.rows * out


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
            stored = int((-(-self.sizes() // 128) * 128).sum()) * self.k
        return 2 * elements + stored + 4 * stored // (128**2 if self.is_weights else 128)


# Options of fp8_quantize; "grouped": with group_sizes, "stochastic": with a key.
QUANTIZE: dict[str, dict] = {
    "rows": {},
    "rows grouped": {"grouped": True},
    "rows grouped stochastic": {"grouped": True, "stochastic": True},
    "along T": {"axis": 0, "grouped": True},
    "along T stochastic": {"axis": 0, "grouped": True, "stochastic": True},
    "weights": {"block": (128, 128)},
    "weights transposed": {"block": (128, 128), "axis": -2},
}


def cases(op: str, level: str = "default", skew: bool = False) -> list[Case]:
    """``level`` is "quick", "default" or "full"."""
    del skew
    if op == "fp8_quantize":
        names = ("rows grouped", "along T", "weights") if level == "quick" else QUANTIZE
        return [
            Quantize(what, *((64, 1536, 2048) if "weights" in what else (EXPERTS, ROWS, WIDTH)))
            for what in names
        ]
    groups, widths = (GROUPS[:1], WIDTHS[:1]) if level == "quick" else (GROUPS, WIDTHS)
    found: list[Case] = [
        Product(direction, "DeepGEMM", g, g * rows, k, n)
        for g, rows in groups
        for n, k in widths
        for direction in DIRECTIONS
    ]
    if level != "quick":
        found += [Product("fprop", "DeepGEMM", g, g * m, k, n) for g, m, n, k in PUBLISHED]
    models = {"Qwen3-30B": MODELS["Qwen3-30B"]} if level == "quick" else MODELS
    for model, (experts, hidden, inter) in models.items():
        for part, k, n in (("up", hidden, 2 * inter), ("down", inter, hidden)):
            if part == "down" and level == "quick":
                continue
            for tokens in TOKENS if level != "quick" else (64, 16384):
                many = tokens == max(TOKENS)
                for direction in DIRECTIONS if many else DIRECTIONS[:1]:
                    if part == "up" or many or level == "full":
                        rows = tokens * TOP_K[model]
                        name = f"{model} {part}"
                        found.append(Product(direction, name, experts, rows, k, n, tokens))
    return list(dict.fromkeys(found))
