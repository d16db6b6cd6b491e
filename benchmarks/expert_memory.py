"""How much memory ``moe_mlp`` takes with experts on several devices: computed, not measured.

python -m benchmarks.expert_memory        # writes the table of docs/guides/several_gpus.md
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from jax_groupgemm._moe.expert_parallel import share_of_devices

PAGE = Path(__file__).parents[1] / "docs/guides/several_gpus.md"
TOKENS = 4096  # of each device
DEVICES = (2, 8, 64)
BFLOAT16, INT32, FLOAT32 = 2, 4, 4


@dataclasses.dataclass(frozen=True)
class Model:
    """A layer of experts: their widths, how many there are, and those of a token."""

    name: str
    width: int
    hidden: int
    experts: int
    k: int


MODELS = (
    Model("Mixtral-8x22B", 6144, 16384, 8, 2),
    Model("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Model("DeepSeek-V3", 7168, 2048, 256, 8),
    Model("GLM-4.5-Air", 4096, 1408, 128, 8),
    Model("Qwen3-235B-A22B", 4096, 1536, 128, 8),
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """A layer's memory on one of several devices, in bfloat16, beside weights and its own tokens.

    Attributes:
      tokens: of each device.
      max_rows: None for the worst case, in which all tokens choose experts of one device.
    """

    model: Model
    devices: int
    tokens: int
    max_rows: int | None = None

    @property
    def rows(self) -> int:
        """Pairs of token and expert that there is room for."""
        pairs = self.devices * self.tokens * self.model.k
        return pairs if self.max_rows is None else min(pairs, self.max_rows)

    @property
    def arriving(self) -> int:
        """Tokens that there is room for."""
        every = self.devices * self.tokens
        share = share_of_devices(self.model.k, self.model.experts // self.devices, self.devices)
        return every if share > 0.5 else min(every, self.rows)

    @property
    def kept(self) -> int:
        """Bytes for the backward pass: h and the pair of each row, and of the tokens that arrived
        where each pair stands and its weight."""
        of_row = 2 * self.model.hidden * BFLOAT16 + INT32
        return self.rows * of_row + self.arriving * self.model.k * (INT32 + FLOAT32)

    @property
    def passing(self) -> int:
        """Bytes that the backward pass makes and drops, where they are most: the cotangents of each
        row, of its activation and of h, and the activation times its weight."""
        return self.rows * (self.model.width + 4 * self.model.hidden) * BFLOAT16


def memory(model: Model, devices: int, slack: float | None) -> Memory:
    """With room for ``slack`` times the rows of an even routing."""
    rows = None if slack is None else round(slack * TOKENS * model.k)
    return Memory(model, devices, TOKENS, rows)


def shown(model: Model, devices: int, slack: float | None) -> str:
    """GiB, kept + passing."""
    of = memory(model, devices, slack)
    return f"{of.kept / 2**30:.1f} + {of.passing / 2**30:.1f}"


def table() -> str:
    """The memory of the worst case, which is proportional to the number of devices, as Markdown."""
    lines = [["model", *map(str, DEVICES)], ["---", *["--:"] * len(DEVICES)]]
    for model in MODELS:
        fits = [shown(model, n, None) if n <= model.experts else "" for n in DEVICES]
        lines.append([model.name, *fits])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(page: str, command: str, tables: dict[str, str]) -> str:
    """The page with ``tables`` between the comments that name them."""
    for name, text in tables.items():
        begin = f"<!-- {command}: {name} -->"
        page, count = re.subn(
            rf"{re.escape(begin)}\n.*?<!-- end -->",
            lambda _, b=begin, t=text: f"{b}\n\n{t}\n\n<!-- end -->",
            page,
            flags=re.DOTALL,
        )
        if count != 1:
            raise ValueError(f"the page has {count} times {begin}")
    return page


def written(page: str) -> str:
    """The page with its table."""
    return filled(page, "python -m benchmarks.expert_memory", {"worst": table()})


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
