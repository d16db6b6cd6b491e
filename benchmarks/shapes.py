"""What is timed: shapes, routing, floors and regimes. Nothing here touches a device.

A grouped case is named by its weights (groups, K, N), whatever the operation:
forward is (R, K) x (G, K, N), dgrad is (R, N) x (G, K, N) transposed, wgrad is (R, K) x (R, N).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

# Groups, hidden width, width of one expert.
MODELS = {
    "Mixtral-8x7B": (8, 4096, 14336),
    "Qwen3-30B": (128, 2048, 768),
    "Qwen3-235B": (128, 4096, 1536),
    "DeepSeek-V3": (256, 7168, 2048),
    "gpt-oss-120b": (128, 2880, 2880),
}
# Experts of each token.
TOP_K = {
    "Mixtral-8x7B": 2,
    "Qwen3-30B": 8,
    "Qwen3-235B": 8,
    "DeepSeek-V3": 8,
    "gpt-oss-120b": 4,
}
TOKENS = (1, 8, 64, 512, 4096, 16384)
# Rows for every model, besides those that so many tokens give it.
ROWS = (16, 128, 512, 1024, 2048, 4096, 8192, 32768, 131072)
# M, N, K, segments: the cases of MLX's benchmark of segmented_mm
SEGMENTED = (
    (128, 128, 1024, 16),
    (128, 128, 1024, 32),
    (256, 256, 2048, 16),
    (512, 512, 4096, 32),
    (1024, 1024, 4096, 32),
    (1024, 1024, 8192, 64),
)
# Microseconds of MLX 0.32.4's CUDA kernels on an H200, cuts at multiples of 16.
MLX = {
    "bfloat16": (10.6, 13.0, 11.3, 39.1, 126, 223),
    "float32": (8.1, 7.5, 14.0, 82.7, 303, 596),
    "tf32": (11.1, 11.3, 13.1, 48.3, 177, 310),
}
OPS = ("forward", "dgrad", "wgrad", "segmented", "scan")
ROWS_PER_GROUP = ("<= 32", "64-512", ">= 1024")
SKEWED = " skewed"
REGIMES = (
    *ROWS_PER_GROUP,
    *(name + SKEWED for name in ROWS_PER_GROUP),
    *("small", "large", "one of 90%", ""),
)
KINDS = ("bfloat16", "float16", "float32", "tf32")
# Relative errors of results against float32 or float64.
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5, "tf32": 2e-3}


@dataclass(frozen=True)
class Grouped:
    op: str
    model: str
    groups: int
    k: int
    n: int
    rows: int
    transposed: bool = False  # forward with weights (G, N, K)
    skew: bool = False  # a few groups hold most rows
    active: int = 0  # only so many groups have rows; 0: any may

    kind = "bfloat16"
    tolerance = peer_tolerance = TOLERANCE[kind]
    cold = True
    mlx = None

    @property
    def label(self) -> str:
        name = f"{self.model} G{self.groups} K{self.k} N{self.n} R{self.rows}".strip()
        name += f" live {self.active}" if self.active else ""
        return name + (" NK" if self.transposed else "") + (SKEWED if self.skew else "")

    @property
    def regime(self) -> str:
        if self.op == "scan":
            return ""
        mean = self.rows / self.groups
        which = 0 if mean <= 32 else 1 if mean <= 512 else 2
        return ROWS_PER_GROUP[which] + (SKEWED if self.skew else "")

    def sizes(self) -> np.ndarray:
        """Rows of each group, random: they are multiples of nothing."""
        rng = np.random.default_rng(self.rows)
        count = self.active or self.groups
        weights = rng.pareto(1.0, count) if self.skew else np.ones(count)
        drawn = rng.multinomial(self.rows, weights / weights.sum()).astype(np.int32)
        if not self.active:
            return drawn
        sizes = np.zeros(self.groups, np.int32)
        sizes[np.linspace(0, self.groups - 1, self.active).astype(int)] = drawn
        return sizes

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.k * self.n

    @property
    def bytes(self) -> int:
        """Each operand read once, only weights that have rows; the result written once."""
        matrices = self.groups if self.op == "wgrad" else int(np.count_nonzero(self.sizes()))
        return 2 * (self.rows * (self.k + self.n) + matrices * self.k * self.n)


@dataclass(frozen=True)
class Segmented:
    m: int
    n: int
    k: int
    count: int
    kind: str  # bfloat16, float16, float32 (true float32) or tf32
    unit: int  # cuts are multiples of it; with 1 a segment may be empty
    transpose_a: bool = False
    dominant: bool = False  # one segment holds 90 % of K

    cold = False  # as MLX measures

    @property
    def op(self) -> str:
        return f"segmented {self.kind}"

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.kind]

    peer_tolerance = tolerance

    @property
    def dtype(self) -> str:
        return "float32" if self.kind == "tf32" else self.kind

    @property
    def precision(self) -> str | None:
        return {"float32": "highest", "tf32": "tensorfloat32"}.get(self.kind)

    @property
    def label(self) -> str:
        name = f"{self.m}x{self.n}x{self.k}x{self.count}"
        name += " one of 90%" if self.dominant else ""
        name += " cut at 16s" if self.unit == 16 else ""
        return name + (" KM" if self.transpose_a else "")

    @property
    def regime(self) -> str:
        if self.dominant:
            return "one of 90%"
        return "small" if (self.m, self.n, self.k, self.count) in SEGMENTED[:3] else "large"

    @property
    def mlx(self) -> float | None:
        published = dict(zip(SEGMENTED, MLX.get(self.kind, ()), strict=False))
        other = self.transpose_a or self.dominant
        return None if other else published.get((self.m, self.n, self.k, self.count))

    def bounds(self) -> np.ndarray:
        """Where segments begin, and K."""
        rng = np.random.default_rng(self.k)
        if self.dominant:  # the others share the rest, and some are empty
            rest = self.k // 10 // self.unit
            cuts = rng.integers(0, rest + 1, self.count - 2)
            cuts[0] = cuts[1]
            cuts = self.unit * np.concatenate([[0], np.sort(cuts), [rest]])
            at = rng.integers(self.count)
            cuts = np.concatenate([cuts[: at + 1], cuts[at:] + self.k - cuts[-1]])
            return cuts.astype(np.int32)
        if self.unit > 1:
            cuts = self.unit * rng.choice(self.k // self.unit, self.count - 1, replace=False)
        else:
            cuts = rng.integers(0, self.k, self.count - 1)
            cuts[0] = cuts[1]  # an empty segment
        return np.concatenate([[0], np.sort(cuts), [self.k]]).astype(np.int32)

    def sizes(self) -> np.ndarray:
        return np.diff(self.bounds())

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        elements = self.k * (self.m + self.n) + self.count * self.m * self.n
        return np.dtype("float32" if self.dtype == "float32" else "float16").itemsize * elements


Case = Grouped | Segmented


def projections() -> list[tuple[str, int, int, int]]:
    """Name, groups, K and N of the gate with the up projection, and of the down projection."""
    out = []
    for model, (groups, hidden, inter) in MODELS.items():
        out.append((f"{model} up", groups, hidden, 2 * inter))
        out.append((f"{model} down", groups, inter, hidden))
    return out


def cases(op: str, level: str = "default", skew: bool = False) -> list[Case]:
    """``level`` is "quick", "default" or "full"."""
    if op == "segmented":
        return list(dict.fromkeys(segmented_cases(level, skew)))
    if op == "scan":
        return [Grouped(op, "", g, 2048, 1536, 1024, active=8) for g in (8, 4096)]
    return list(dict.fromkeys(grouped_cases(op, level, skew)))


def grouped_cases(op: str, level: str, skew: bool) -> Iterable[Grouped]:
    for name, groups, k, n in projections():
        for rows in rows_of(op, name, groups, level):
            yield Grouped(op, name, groups, k, n, rows, skew=skew)
        small, middle, large = common_rows(groups)
        other = {"Qwen3-30B up": (middle, large), "Mixtral-8x7B up": (small, large)}.get(name, ())
        if op == "forward" and level != "quick":
            for rows in every_rows(name) if level == "full" else other:
                yield Grouped(op, name, groups, k, n, rows, transposed=True, skew=skew)
    if op == "wgrad" and level != "quick":
        yield Grouped(op, "", 256, 2048, 1536, 4096, skew=skew)
        yield Grouped(op, "Qwen3-30B up", 128, 2048, 1536, 32768, skew=True)


def common_rows(groups: int) -> tuple[int, int, int]:
    return (128, 1024, 8192) if groups == 8 else (4096, 32768, 131072)


def every_rows(name: str) -> list[int]:
    """Rows of a projection at level "full"."""
    top_k = TOP_K[name.split()[0]]
    return sorted({*ROWS, *(tokens * top_k for tokens in TOKENS)})


def rows_of(op: str, name: str, groups: int, level: str) -> Iterable[int]:
    small, middle, large = common_rows(groups)
    if level == "full":
        return every_rows(name)
    few = {"Qwen3-30B up": (512, 2048), "Mixtral-8x7B up": (16,)}.get(name, ())
    if op == "forward" and level == "quick":
        return {
            "Qwen3-30B up": (small, middle, large, *few),
            "Mixtral-8x7B up": (middle, large, *few),
        }.get(name, ())
    if op == "forward":
        every = name.endswith("up") or name.startswith(("Qwen3-30B", "Mixtral"))
        return ((small, middle, large) if every else (large,)) + few
    first = (small,) if op == "dgrad" else ()
    if level == "quick":
        quick = {"Qwen3-30B up": (middle, large), "Mixtral-8x7B up": (large,)}
        return first + quick[name] if name in quick else ()
    return (*first, middle, large) if name.endswith("up") else ()


def segmented_cases(level: str, skew: bool) -> Iterable[Segmented]:
    if skew:
        for case in segmented_cases(level, False):
            yield replace(case, dominant=True)
        return
    for kind in KINDS:
        for shape in SEGMENTED:
            anywhere, at_16s, transposed = (
                Segmented(*shape, kind=kind, unit=1),
                Segmented(*shape, kind=kind, unit=16),
                Segmented(*shape, kind=kind, unit=1, transpose_a=True),
            )
            dominant = replace(anywhere, dominant=True), replace(at_16s, dominant=True)
            if level == "full":
                yield from (anywhere, at_16s, transposed, *dominant)
                yield Segmented(*shape, kind=kind, unit=16, transpose_a=True)
            elif level == "default":
                yield anywhere
                if kind != "float16":
                    yield at_16s
                if kind == "bfloat16":
                    yield transposed
                if kind == "bfloat16" and shape in SEGMENTED[3:]:
                    yield from dominant
            elif kind != "float16" and (kind == "bfloat16" or shape == SEGMENTED[-1]):
                yield at_16s
                if (kind, shape) == ("bfloat16", SEGMENTED[-1]):
                    yield dominant[1]


def floor_us(flops: float, bytes_: float, flops_per_s: float, bytes_per_s: float) -> float:
    return 1e6 * max(flops / flops_per_s, bytes_ / bytes_per_s)
