"""What is timed with quantized weights: formats, shapes, routing, floors and regimes.

qmm         (R, K) x a quantized (G, N, K): the experts of benchmarks.shapes.MODELS
gather_qmm  one row per product with a quantized matrix that an index names
quantize    a stack of matrices to codes and scales; dequantize: back
nvfp4_quantize
            NVFP4 with two-level scales, as training quantizes activations, gradients and weights
nvfp4       both operands quantized: fprop (T, K) x (G, N, K), dgrad (T, N) x (G, N, K), and
            wgrad (T, N) x (T, K) over the rows of each group
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .shapes import MODELS, SKEWED, TOKENS, TOLERANCE, TOP_K

# N, K, experts, pairs of a row and an expert: MLX's cases of gather_qmm
GATHER = ((4096, 4096, 8, 2), (4096, 4096, 8, 8), (4096, 4096, 8, 32), (11008, 4096, 8, 32))
# Experts, tokens, hidden width, width out: Transformer Engine's cases of NVFP4
NVFP4 = (
    (8, 8192, 4096, 4096),
    (8, 16384, 7168, 2048),
    (16, 16384, 4096, 4096),
    (32, 16384, 2048, 2048),
    (8, 65536, 7168, 2048),
)
# Experts, width, width out: of 1 to 16 rows each
NVFP4_DECODE = ((128, 2048, 1536), (16, 4096, 4096))
STACK = (64, 1024, 2048)  # G, N, K of quantize: 256 MiB of bfloat16
ROWS, WIDTH, GROUPS = 65536, 2048, 8  # of nvfp4_quantize: as many
OPS = ("qmm", "gather_qmm", "quantize", "nvfp4_quantize", "nvfp4")
FP8_MODELS = ("Qwen3-30B", "Qwen3-235B", "DeepSeek-V3")  # whose checkpoints come in it
SMALL = 64 * 2**20  # bytes of weights that are read


@dataclass(frozen=True)
class Format:
    name: str
    mode: str
    bits: int
    group_size: int

    def bytes(self, elements: int, itemsize: int = 2) -> int:
        """Codes, scales and biases (affine ones of so many bytes) of so many elements."""
        if self.mode == "fp8":  # float32 scales of 128 x 128
            return elements + 4 * (elements // self.group_size**2)
        scales = elements // self.group_size
        return elements * self.bits // 8 + scales * (2 * itemsize if self.mode == "affine" else 1)


FORMATS = {
    f.name: f
    for f in (
        Format("nvfp4", "nvfp4", 4, 16),
        Format("mxfp4", "mxfp4", 4, 32),
        Format("affine4", "affine", 4, 64),
        Format("affine4 g128", "affine", 4, 128),  # as Humming's int4 usually is
        Format("mxfp8", "mxfp8", 8, 32),
        Format("affine8", "affine", 8, 64),
        *(Format(f"affine{bits}", "affine", bits, 64) for bits in (2, 3, 5, 6)),
        Format("fp8", "fp8", 8, 128),  # in blocks of 128 x 128
    )
}
MAIN = tuple(FORMATS)[:6]


@dataclass(frozen=True)
class Case:
    kind = "bfloat16"
    tolerance = TOLERANCE[kind]
    peer_tolerance = 3e-2  # some round values or sums to bfloat16 on the way
    cold = True
    mlx = None
    regime = ""


@functools.cache
def routed(tokens: int, groups: int, top_k: int, skew: bool) -> np.ndarray:
    rng = np.random.default_rng(tokens)
    likely = np.log(rng.pareto(1.0, groups)) if skew else np.zeros(groups)
    scores = likely + rng.gumbel(size=(tokens, groups))
    chosen = np.argpartition(scores, -top_k, axis=1)[:, -top_k:]
    return np.bincount(chosen.ravel(), minlength=groups).astype(np.int32)


@dataclass(frozen=True)
class Qmm(Case):
    format: Format
    model: str
    groups: int
    k: int
    n: int
    tokens: int
    top_k: int
    skew: bool = False

    @property
    def op(self) -> str:
        return f"qmm {self.format.name}"

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def label(self) -> str:
        name = f"{self.model} G{self.groups} K{self.k} N{self.n} R{self.rows}".strip()
        return name + (SKEWED if self.skew else "")

    @property
    def regime(self) -> str:
        if self.tokens > 64:
            return "prefill"
        return "decode" if self.weight_bytes >= SMALL else "decode, small"

    def sizes(self) -> np.ndarray:
        """Rows of each group: every token goes to ``top_k`` different ones."""
        return routed(self.tokens, self.groups, self.top_k, self.skew).copy()

    @property
    def weight_bytes(self) -> int:
        return int(np.count_nonzero(self.sizes())) * self.format.bytes(self.n * self.k)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.k * self.n

    @property
    def bytes(self) -> int:
        """x and the result once, packed weights of groups that have rows."""
        return 2 * self.rows * (self.k + self.n) + self.weight_bytes


@dataclass(frozen=True)
class Gather(Case):
    n: int
    k: int
    groups: int
    pairs: int
    format: Format = FORMATS["affine4"]

    op = "gather_qmm"

    @property
    def label(self) -> str:
        return f"{self.format.name} G{self.groups} K{self.k} N{self.n} pairs {self.pairs}"

    def indices(self) -> np.ndarray:
        return np.random.default_rng(self.pairs).integers(0, self.groups, self.pairs, np.int32)

    @property
    def flops(self) -> int:
        return 2 * self.pairs * self.k * self.n

    @property
    def bytes(self) -> int:
        weights = len(np.unique(self.indices())) * self.format.bytes(self.n * self.k)
        return 2 * self.pairs * (self.k + self.n) + weights


@dataclass(frozen=True)
class Convert(Case):
    op: str  # quantize or dequantize
    format: Format
    groups: int
    n: int
    k: int
    dtype: str = "bfloat16"  # of what is quantized, or made
    global_scale: bool = False  # one per matrix

    flops = 0

    @property
    def tolerance(self) -> float:
        """Codes have the same bits everywhere; values are rounded."""
        return 1e-3 if self.op == "quantize" else TOLERANCE[self.dtype]

    @property
    def label(self) -> str:
        name = self.format.name + (" global scale" if self.global_scale else "")
        size = f"G{self.groups} N{self.n} K{self.k}"
        return f"{name} {size}" + ("" if self.dtype == "bfloat16" else f" {self.dtype}")

    @property
    def bytes(self) -> int:
        elements, itemsize = self.groups * self.n * self.k, 4 if self.dtype == "float32" else 2
        # Weights that are drawn have bfloat16 scales, whatever they become.
        packed = self.format.bytes(elements, itemsize if self.op == "quantize" else 2)
        return itemsize * elements + packed + (4 * self.groups if self.global_scale else 0)


@dataclass(frozen=True)
class Nvfp4Quantize(Case):
    """``nvfp4_quantize`` of x (T, K) in groups of rows, or of weights (G, N, K).

    The largest magnitude has to be known before anything can be scaled, so what is larger than the
    L2 cache is read twice; the floor has one read, as every floor does.
    """

    what: str  # a key of NVFP4_QUANTIZE
    groups: int
    n: int  # rows in all, or of one matrix of weights
    k: int

    op = "nvfp4_quantize"
    flops = 0
    tolerance = 0.0  # the bytes are those of the CPU

    @property
    def label(self) -> str:
        rows = "N" if self.is_weights else "T"
        return f"{self.what} G{self.groups} {rows}{self.n} K{self.k}"

    @property
    def calls(self) -> tuple[dict, ...]:
        """The options of each call; together they are one program."""
        return NVFP4_QUANTIZE[self.what]

    @property
    def is_weights(self) -> bool:
        return any("scale_2d" in options for options in self.calls)

    def sizes(self) -> np.ndarray:
        """Rows of each group, random: they are multiples of nothing. Every row is in one."""
        likely = np.full(self.groups, 1 / self.groups)
        return np.random.default_rng(self.n).multinomial(self.n, likely).astype(np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.groups, self.n, self.k) if self.is_weights else (self.n, self.k)

    @property
    def bytes(self) -> int:
        """x once, and each result, with the rows that groups are padded with."""
        elements = int(np.prod(self.shape))
        padded = (self.n + 63 * min(self.groups, self.n)) // 64 * 64 * self.k
        sizes = [
            padded if options.get("grouped") and options.get("axis") == 0 else elements
            for options in self.calls
        ]
        return 2 * elements + sum(map(FORMATS["nvfp4"].bytes, sizes))


# Options of nvfp4_quantize. "grouped": with group_sizes; "stochastic": with a key. Training's are
# rows of x and dy, columns for weight gradients, and weights along either axis.
_COLUMNS = {"axis": 0, "grouped": True, "hadamard": True}
NVFP4_QUANTIZE: dict[str, tuple[dict, ...]] = {
    "rows": ({},),
    "rows grouped": ({"grouped": True},),
    "rows stochastic": ({"stochastic": True},),
    "columns grouped hadamard": (_COLUMNS,),
    "columns grouped hadamard stochastic": (_COLUMNS | {"stochastic": True},),
    "rows + columns grouped hadamard": ({"grouped": True}, _COLUMNS),
    "weights 2D": ({"scale_2d": True},),
    "weights 2D columns": ({"scale_2d": True, "axis": -2},),
}
QUICK_NVFP4_QUANTIZE = (
    "rows",
    "rows stochastic",
    "rows + columns grouped hadamard",
    "weights 2D",
)


@dataclass(frozen=True)
class Nvfp4(Case):
    direction: str  # fprop, dgrad or wgrad
    groups: int
    tokens: int
    k: int
    n: int
    balanced: bool
    decode: bool = False  # few rows, weights prepacked

    @property
    def op(self) -> str:
        return f"nvfp4 {self.direction}"

    @property
    def regime(self) -> str:
        return "decode" if self.decode else "balanced" if self.balanced else "imbalanced"

    @property
    def label(self) -> str:
        size = f"G{self.groups} T{self.tokens} K{self.k} N{self.n}"
        return size if self.balanced else f"{size} {self.regime}"

    def sizes(self) -> np.ndarray:
        """Equal, or 0.25 to 1.75 times the mean; then they are odd numbers. 1 to 16 of decode."""
        mean = self.tokens // self.groups
        if self.decode:
            few = np.arange(self.groups, dtype=np.int32) % 16 + 1
            return np.random.default_rng(self.tokens).permutation(few)
        if self.balanced:
            return np.full(self.groups, mean, np.int32)
        rng = np.random.default_rng(self.tokens)
        sizes = 2 * np.rint(np.linspace(0.125 * mean, 0.875 * mean, self.groups)).astype(np.int32)
        sizes[-1] += self.tokens - sizes.sum()
        odd = 2 * rng.integers(0, 8, self.groups // 2) + 1
        return rng.permutation(sizes + np.concatenate([odd, -odd])).astype(np.int32)

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.k * self.n

    @property
    def bytes(self) -> int:
        """Both operands packed; a bfloat16 result, a float32 one of wgrad."""
        t, k, n, packed = self.tokens, self.k, self.n, FORMATS["nvfp4"].bytes
        weights = self.groups * k * n
        if self.direction == "wgrad":
            return packed(t * (k + n)) + 4 * weights
        a, out = (k, n) if self.direction == "fprop" else (n, k)
        return packed(t * a + weights) + 2 * t * out


def cases(op: str, level: str = "default", skew: bool = False) -> list[Case]:
    """``level`` is "quick", "default" or "full"."""
    if op == "qmm":
        return list(dict.fromkeys(qmm_cases(level, skew)))
    if op == "gather_qmm":
        return [Gather(*shape) for shape in (GATHER[1:3] if level == "quick" else GATHER)]
    if op == "quantize":
        return list(convert_cases(level))
    if op == "nvfp4_quantize":
        names = QUICK_NVFP4_QUANTIZE if level == "quick" else NVFP4_QUANTIZE
        return [
            Nvfp4Quantize(name, *(STACK if "weights" in name else (GROUPS, ROWS, WIDTH)))
            for name in names
        ]
    shapes = NVFP4[2:3] if level == "quick" else NVFP4
    few = NVFP4_DECODE[:1] if level == "quick" else NVFP4_DECODE
    found: list[Case] = [
        Nvfp4(direction, *shape, balanced=balanced)
        for shape in shapes
        for balanced in ((False,) if level == "quick" else (True, False))
        for direction in ("fprop", "dgrad", "wgrad")
    ]
    decode = functools.partial(Nvfp4, "fprop", balanced=False, decode=True)
    return found + [decode(groups, groups // 16 * 136, k, n) for groups, k, n in few]


def convert_cases(level: str) -> Iterable[Convert]:
    """Conversions of bfloat16, and of other types in one format of each mode, at "full" in all."""
    names = ("nvfp4", "affine4", "affine4 g128", "mxfp8") if level == "quick" else FORMATS
    for name in (name for name in names if name != "fp8"):  # fp8_shapes has it
        others = level == "full" or (level == "default" and name in (*MAIN[:3], "mxfp8"))
        for global_scale in (False, True) if name == "nvfp4" and level != "quick" else (False,):
            for dtype in ("bfloat16", "float32", "float16") if others else ("bfloat16",):
                for op in ("quantize", "dequantize"):
                    if dtype == "bfloat16" or op == "quantize" or level == "full":
                        yield Convert(op, FORMATS[name], *STACK, dtype, global_scale)


def qmm_cases(level: str, skew: bool) -> Iterable[Qmm]:
    """Cases of the same weights follow each other."""
    for model, (groups, hidden, inter) in MODELS.items():
        for part, k, n in (("up", hidden, 2 * inter), ("down", inter, hidden)):
            name = f"{model} {part}"
            for weights in FORMATS.values():
                for tokens in qmm_tokens(level, name, weights.name):
                    if k % weights.group_size == 0:
                        yield Qmm(weights, name, groups, k, n, tokens, TOP_K[model], skew)


def qmm_tokens(level: str, name: str, weights: str) -> tuple[int, ...]:
    first = name == "Qwen3-30B up"  # which has every format
    if level == "full":
        return TOKENS if first or weights in (*MAIN, "fp8") else ()
    if level == "quick":
        quick = {
            ("Qwen3-30B up", "nvfp4"): (1, 64, 4096),
            ("Qwen3-30B up", "affine4 g128"): (64, 4096),
            ("Mixtral-8x7B up", "nvfp4"): (8, 4096),
        }
        return quick.get((name, weights), ())
    if first:
        return TOKENS[:-1] if weights == "nvfp4" else (8, 64, 4096)
    if weights == "fp8" and name.split()[0] in FP8_MODELS:  # 64 to 512 rows
        return (8, 64)
    if weights == ("mxfp4" if name == "gpt-oss-120b up" else "nvfp4"):
        if name.endswith("up"):
            return (8, 64, 4096)
        return (64, 4096) if name in ("Qwen3-30B down", "Mixtral-8x7B down") else ()
    return ()
