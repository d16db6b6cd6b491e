"""How much memory ``moe_mlp`` takes with experts on several devices: computed, not measured.

python -m benchmarks.expert_parallel        # the tables of docs/guides/several_gpus.md
"""

from __future__ import annotations

import dataclasses

TOKENS = 4096  # of each device
DEVICES = (2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Model:
    """A layer of experts: those of a token, of all, and their widths."""

    name: str
    width: int
    hidden: int
    experts: int
    top_k: int


MODELS = (
    Model("Mixtral-8x22B", 6144, 16384, 8, 2),
    Model("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Model("DeepSeek-V3", 7168, 2048, 256, 8),
    Model("GLM-4.5-Air", 4096, 1408, 128, 8),
    Model("Qwen3-235B-A22B", 4096, 1536, 128, 8),
)


def rows(model: Model, devices: int, tokens: int, slack: float | None = None) -> int:
    """Pairs that a device has room for: all of them, or ``slack`` times those of an even
    routing."""
    pairs = devices * tokens * model.top_k
    return pairs if slack is None else min(pairs, round(slack * pairs / devices))


def kept(model: Model, devices: int, tokens: int, slack: float | None = None) -> int:
    """Bytes of a device that the backward pass needs, in bfloat16, beside its weights and tokens:
    h, and of each pair its row, its place and its weight."""
    room = rows(model, devices, tokens, slack)
    pairs = devices * tokens * model.top_k
    return room * (2 * 2 * model.hidden + 4) + pairs * (4 + 4)


def passing(model: Model, devices: int, tokens: int, slack: float | None = None) -> int:
    """Bytes of tokens that arrived and of their rows, sorted by expert: the largest arrays that a
    pass makes and drops."""
    room = rows(model, devices, tokens, slack)
    return 2 * model.width * (room + devices * tokens)


def table(slack: float | None) -> str:
    """GiB kept + passing."""
    head = ["model", *(f"{devices} devices" for devices in DEVICES)]
    lines = [head, ["---", *["--:"] * len(DEVICES)]]
    for model in MODELS:
        line = [model.name]
        for devices in DEVICES:
            of = [part(model, devices, TOKENS, slack) / 2**30 for part in (kept, passing)]
            fits = devices <= model.experts
            line.append(f"{of[0]:.2f} + {of[1]:.2f}" if fits else "")
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    print(table(None), table(2.0), sep="\n\n")


if __name__ == "__main__":
    main()
