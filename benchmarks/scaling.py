"""How ``moe_mlp`` scales with GPUs: what H200s and H100s measured, and a model for more.

python -m benchmarks.scaling                # prints the tables, writes them and the plot to docs
python -m benchmarks.scaling --check        # only says whether the pages have these tables

docs/scaling.md has what was measured, docs/internals/scaling_model.md what the model predicts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path

from jax_groupgemm._moe.expert_parallel import share_of_devices

from . import expert_parallel, train_devices
from .expert_memory import MODELS, Memory, Model, filled
from .records import rows
from .scaling_model import NODE, Layer, total

DOCS = Path(__file__).parents[1] / "docs"
PAGE, MODEL_PAGE = DOCS / "scaling.md", DOCS / "internals/scaling_model.md"
PLOT = DOCS / "plots/scaling.svg"
RESULTS = Path(__file__).parent / "results"
H100S = RESULTS / "h100/moe/expert_parallel.json"
STEPS = RESULTS / "h200/training/devices.json"
DECODE = RESULTS / "h200/moe/expert_parallel.json"
TWO = RESULTS / "h200/moe/expert_parallel_two.json"
COMMAND = "python -m benchmarks.scaling"
BOUND = 0.15
QWEN, DEEPSEEK = MODELS[1], MODELS[2]
TRANSPORTS = ("gather", "all_to_all")


@dataclasses.dataclass(frozen=True)
class Point:
    """Milliseconds that were measured.

    Attributes:
      tokens: of all GPUs.
      transport: None on one GPU.
      forward: of the layer.
      gradients: of a program that returns all gradients. It does not return the result, so XLA
        drops the forward pass behind h: the down product, and the way back of sums.
    """

    gpus: int
    tokens: int
    transport: str | None
    forward: float
    gradients: float


# NVIDIA H200, NVLink, jax 0.11.2, one run: the least of three times ten calls from outside.
POINTS = (
    Point(1, 8192, None, 1.163, 3.189),
    Point(1, 32768, None, 4.163, 11.969),
    Point(4, 32768, "gather", 1.939, 4.577),
    Point(4, 32768, "all_to_all", 2.995, 5.903),
    Point(4, 131072, "gather", 7.072, 17.474),
    Point(4, 131072, "all_to_all", 9.098, 20.471),
)
# Kernels of the forward pass at 131072 tokens and "gather", of the same run.
KERNELS = {
    "up": 2.489, "all-gather": 2.383, "all-to-all": 1.294, "down": 1.145, "combine": 0.553,
    "sum": 0.155,
}  # fmt: skip


# ---- arrangements ----------------------------------------------------------------------------


def arranged(model: Model, gpus: int, tokens: int, transport: str, group: int, **options) -> Layer:
    """``tokens`` of each GPU."""
    group = min(gpus, group, model.experts)
    of_group = None if group == 1 else transport
    return Layer(model, tokens, group, of_group, gpus // group, **options)


@dataclasses.dataclass(frozen=True)
class Arm:
    """Experts over all GPUs, or over those of a node with copies in the others."""

    name: str
    transport: str
    group: int


ARMS = (
    Arm("all GPUs, gather", "gather", 1 << 20),
    Arm("all GPUs, all_to_all", "all_to_all", 1 << 20),
    Arm("a node, gather", "gather", NODE),
    Arm("a node, all_to_all", "all_to_all", NODE),
)
GPUS = (1, 2, 4, 8, 64, 512)
TOKENS = 32768
SLACK = 2.0


def predicted(point: Point) -> Layer:
    return Layer(QWEN, point.tokens // point.gpus, point.gpus, point.transport)


def errors() -> list[tuple[Point, str, float, float]]:
    """Each point, what it timed, measured and predicted."""
    out = []
    for point in POINTS:
        layer = predicted(point)
        out.append((point, "forward", point.forward, total(layer.forward())))
        out.append((point, "gradients", point.gradients, total(layer.gradients())))
    return out


@functools.cache
def on_h100s() -> dict[tuple[int, str, str], tuple[float, float]]:
    """Measured and predicted, by tokens of each GPU, direction ("forward" or "both") and arm, at an
    even routing. The model has the H200's rates."""
    out = {}
    for r in rows([H100S]):
        if r["part"] == "layer" and r["routing"] == "even":
            layer = Layer(QWEN, r["tokens"], r["devices"], r["transport"])
            direction = "forward" if r["direction"] == "forward" else "both"
            model = total(getattr(layer, direction)())
            out[r["tokens"], direction, r["arm"]] = r["ms"]["median"], model
    return out


def efficiency(model: Model, gpus: int, arm: Arm, direction: str) -> float:
    """One GPU's time of as many tokens, over that of each of several."""
    alone = Layer(model, TOKENS)
    layer = arranged(model, gpus, TOKENS, arm.transport, arm.group, slack=SLACK)
    return total(getattr(alone, direction)()) / total(getattr(layer, direction)())


# ---- tables ----------------------------------------------------------------------------------


def table(head: list[str], lines: list[list[str]], words: int = 1) -> str:
    """The first columns are words, the others numbers."""
    rule = ["---"] * words + ["--:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])


def measured_table() -> str:
    lines = [
        [str(p.gpus), str(p.tokens), p.transport or "", f"{p.forward:.2f}", f"{p.gradients:.2f}"]
        for p in POINTS
    ]
    return table(["GPUs", "tokens in all", "transport", "forward, ms", "gradients, ms"], lines, 3)


def predicted_table() -> str:
    lines = []
    for point, what, measured, model in errors():
        of = [str(point.gpus), str(point.tokens), point.transport or "", what]
        lines.append(
            [*of, f"{measured:.2f}", f"{model:.2f}", f"{100 * (model / measured - 1):+.0f} %"]
        )
    return table(
        ["GPUs", "tokens in all", "transport", "", "measured", "predicted", "off"], lines, 4
    )


def h100_table() -> str:
    points = on_h100s()
    arms = list(dict.fromkeys(arm for _, _, arm in points))
    lines = []
    for tokens, direction in dict.fromkeys((t, d) for t, d, _ in points):
        line = [str(tokens), direction]
        for arm in arms:
            measured, model = points[tokens, direction, arm]
            line.append(f"{measured:.2f}, {model:.2f} ({100 * (model / measured - 1):+.0f} %)")
        lines.append(line)
    return table(["tokens of each", "", *arms], lines, 2)


def parts_table() -> str:
    layers = [predicted(point) for point in POINTS if point.tokens == 131072]
    forward = [layer.forward() for layer in layers]
    back = [layer.gradients() for layer in layers]
    names = list(dict.fromkeys(name for parts in (*forward, *back) for name in parts))
    shown = lambda parts, name: f"{parts[name]:.2f}" if name in parts else ""
    lines = []
    for name in names:
        kernel = f"{KERNELS[name]:.2f}" if name in KERNELS else ""
        lines.append([name, kernel, *(shown(parts, name) for parts in (*forward, *back))])
    head = ["", "profile", *(f"{w}, {t}" for w in ("forward", "gradients") for t in TRANSPORTS)]
    return table(head, lines)


def scaling_table(model: Model, tokens_of) -> str:
    """Forward, and forward with gradients, of each arm."""
    head = ["GPUs", *(arm.name for arm in ARMS)]
    lines = []
    for gpus in GPUS:
        line = [str(gpus)]
        for arm in ARMS:
            inside = arm.group == NODE
            if (inside and gpus <= NODE) or (gpus == 1 and arm.transport != "gather"):
                line.append("")
                continue
            layer = arranged(model, gpus, tokens_of(gpus), arm.transport, arm.group, slack=SLACK)
            line.append(f"{total(layer.forward()):.2f}, {total(layer.both()):.2f}")
        lines.append(line)
    return table(head, lines)


def weak(model: Model) -> str:
    return scaling_table(model, lambda gpus: TOKENS)


def strong(model: Model) -> str:
    return scaling_table(model, lambda gpus: TOKENS // gpus)


def efficiency_table() -> str:
    """The best arm of each number of GPUs."""
    lines = []
    for model in (QWEN, DEEPSEEK):
        for direction in ("forward", "both"):
            line = [model.name, {"both": "forward and gradients"}.get(direction, direction)]
            for gpus in GPUS[1:]:
                best = max(ARMS, key=lambda arm: efficiency(model, gpus, arm, direction))
                line.append(f"{100 * efficiency(model, gpus, best, direction):.0f} %")
            lines.append(line)
    return table(["model", "", *map(str, GPUS[1:])], lines, 2)


def wins_table() -> str:
    """From how many tokens a GPU on "all_to_all" is faster, forward with gradients."""
    groups, tokens = (2, 4, 8, 16, 32, 64, 128), [2**i for i in range(6, 16)]
    lines = []
    for model in (QWEN, DEEPSEEK):
        line = [model.name]
        for group in groups:
            gather, exchange = (
                [total(Layer(model, t, group, name, slack=SLACK).both()) for t in tokens]
                for name in TRANSPORTS
            )
            fewest = None
            for t, one, other in reversed([*zip(tokens, gather, exchange, strict=True)]):
                if one <= other:
                    break
                fewest = t
            line.append("never" if fewest is None else str(fewest))
        lines.append(line)
    return table(["model", *map(str, groups)], lines)


def network_table() -> str:
    """Milliseconds that a GPU's link to other nodes is busy, in the forward pass."""
    lines = []
    for model in (QWEN, DEEPSEEK):
        for gpus in (16, 64):
            layer = Layer(model, TOKENS, gpus, "all_to_all")
            of = layer.tokens * layer.of_token / layer.machine.network
            nodes = gpus // NODE
            twice = 2 * (nodes - 1) * share_of_devices(model.k, model.experts // nodes, nodes)
            times = (
                (layer.far / NODE + layer.far) * of,
                2 * layer.far * layer.chunk / layer.tokens * of,
                twice * of,
            )
            lines.append([model.name, str(gpus), *(f"{time:.1f}" for time in times)])
    return table(["model", "GPUs", "gather", "all_to_all", "a token to a node once"], lines)


def memory_table() -> str:
    """GiB of one layer, kept + passing."""
    groups = (2, 4, 8, 16, 64)
    lines = []
    for model in (QWEN, DEEPSEEK):
        for slack, what in ((None, "worst case"), (SLACK, "`max_rows`, twice an even routing")):
            line = [model.name, what]
            for group in groups:
                rows = None if slack is None else round(slack * TOKENS * model.k)
                of = Memory(model, group, TOKENS, rows)
                line.append(f"{of.kept / 2**30:.1f} + {of.passing / 2**30:.1f}")
            lines.append(line)
    return table(["model", "", *map(str, groups)], lines, 2)


def measured_tables() -> dict[str, str]:
    layers = [r for r in rows([H100S]) if r["part"] == "layer" and r["tokens"] == TOKENS]
    return {
        "measured": measured_table(),
        "two H200s": expert_parallel.text(expert_parallel.load([TWO])),
        "H100": expert_parallel.text(layers),
        "decode": expert_parallel.text(expert_parallel.load([DECODE])),
        "steps": train_devices.text_of(json.loads(STEPS.read_text()), predictions=False),
    }


def model_tables() -> dict[str, str]:
    return {
        "predicted": predicted_table(),
        "steps": train_devices.text_of(json.loads(STEPS.read_text())),
        "H100": h100_table(),
        "parts": parts_table(),
        "efficiency": efficiency_table(),
        "weak Qwen3-30B-A3B": weak(QWEN),
        "weak DeepSeek-V3": weak(DEEPSEEK),
        "strong Qwen3-30B-A3B": strong(QWEN),
        "wins": wins_table(),
        "network": network_table(),
        "memory": memory_table(),
    }


PAGES = {PAGE: measured_tables, MODEL_PAGE: model_tables}


def written(path: Path, text: str) -> str:
    """A page with its tables."""
    return filled(text, COMMAND, PAGES[path]())


def draw(path: Path) -> None:
    """Weak scaling: a line for each arm, and what was measured."""
    from . import plots

    gpus = [2**i for i in range(10)]
    panels = {}
    for direction, title in (("forward", "forward"), ("both", "forward and gradients")):
        for model in (QWEN, DEEPSEEK):
            panels[f"{model.name}, {title}"] = {
                arm.name: [
                    (n, 100 * efficiency(model, n, arm, direction))
                    for n in gpus
                    if arm.group != NODE or n >= NODE
                ]
                for arm in ARMS
            }
    some = [p for p in POINTS if p.tokens == p.gpus * TOKENS]
    alone = next(p for p in some if p.gpus == 1)
    h200s = [(p.gpus, 100 * alone.forward / p.forward) for p in some]
    both = {arm: ms for (t, d, arm), (ms, _) in on_h100s().items() if (t, d) == (TOKENS, "both")}
    h100s = [(int(arm.split()[0]), 100 * both["1"] / ms) for arm, ms in both.items()]
    measured = {f"{QWEN.name}, forward": h200s, f"{QWEN.name}, forward and gradients": h100s}
    plots.scaling(panels, measured, path)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is old")
    args = parser.parse_args(argv)
    pages = {path: path.read_text() for path in PAGES}
    if args.check:
        return int(any(written(path, text) != text for path, text in pages.items()))
    for path, text in pages.items():
        for name, shown in PAGES[path]().items():
            print(f"{name}\n\n{shown}\n")
        path.write_text(written(path, text))
    draw(PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
