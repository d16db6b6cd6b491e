"""Training steps of a whole model on several GPUs of one process: weak and strong scaling.

python -m benchmarks.train_devices [--devices 1 2 4] [--json FILE]
python -m benchmarks.train_devices --tiny               # small sizes, which CPU devices run
python -m benchmarks.train_devices --records FILE       # measures nothing: its table

Model and step are those of examples/train_moe.py: attention, experts as wide as Qwen3-30B-A3B's in
bfloat16, AdamW in float32 on parameters in float32. Experts, and what the optimizer knows of them,
are divided among the devices; the rest is on each. Each device has ``--tokens``, and one device
alone also has all that several have. Each number of devices also divides what the most have.

A time is a chain of steps, from outside, and the median of chains; programs are measured one after
the other. Where two programs have the same tokens in all, their batches are the same, so losses of
the first steps are compared.
"""

import argparse
import dataclasses
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_groupgemm._moe.expert_parallel import default_transport

from .expert_memory import BFLOAT16, FLOAT32, Model
from .expert_parallel import VERSIONS
from .options import device_options, devices_of, new_parser, record_options
from .records import run_header, write_record
from .report import table
from .scaling_model import H200, Layer, total

EXAMPLES = Path(__file__).parents[1] / "examples"
#: Bits per byte by which losses of the same batches may differ. Sums are rounded to bfloat16.
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and the tokens of each device."""

    model: Model
    layers: int
    context: int
    tokens: int
    steps: int  # of a chain
    chains: int


QWEN = Size(Model("Qwen3-30B-A3B", 2048, 768, 128, 8), 2, 256, 8192, steps=5, chains=8)
TINY = Size(Model("tiny", 32, 1040, 8, 2), 1, 16, 64, steps=2, chains=2)


def cases(devices: list[int], tokens: int) -> list[tuple[int, int]]:
    """Devices, and tokens of each."""
    most = max(devices)
    weak = [(n, tokens) for n in devices]
    strong = [(n, tokens * most // n) for n in devices]
    alone = [(1, tokens * most // n) for n in devices]
    return list(dict.fromkeys([*weak, *strong, *alone]))


def measure(size: Size, devices: int, tokens: int) -> dict:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # its scripts import each other
    train_moe: Any = importlib.import_module("train_moe")
    several = train_moe.several_devices
    model = size.model
    config = train_moe.Config(
        steps=1000, batch=devices * tokens // size.context, context=size.context,
        layers=size.layers, width=model.width, experts=model.experts, top_k=model.k,
        expert_width=model.hidden, precision="bfloat16", lr=1e-4,
    )  # fmt: skip
    mesh = several.start(argparse.Namespace(devices=devices, data=1, processes=1))
    text = train_moe.texts.read(train_moe.texts.DEFAULT, size.context)
    text = several.on_every_device(mesh, train_moe.texts.split(text)[0])
    trainer = train_moe.Trainer(config, mesh=mesh)
    step = trainer.train_step.lower(trainer.state, text).compile()
    memory = step.memory_analysis()
    state, losses, times = trainer.state, [], []
    del trainer.state  # is donated
    for _ in range(1 + size.chains):
        begin = time.perf_counter()
        for _ in range(size.steps):
            state, bits = step(state, text)
            losses.append(bits)
        jax.block_until_ready(state)
        times.append(1e3 * (time.perf_counter() - begin) / size.steps)
    times = times[1:]  # the first chain warms up
    experts = 3 * size.layers * model.experts * model.width * model.hidden
    parameters = sum(p.size for p in jax.tree.leaves(state["params"]))
    return {
        "devices": devices, "tokens": tokens,
        "ms": {"min": min(times), "median": statistics.median(times)},
        "tokens_per_s": 1e3 * devices * tokens / statistics.median(times),
        "temporaries_gib": memory.temp_size_in_bytes / 2**30 if memory else None,
        "parameters": {"experts": experts, "others": parameters - experts},
        "losses": [float(bits) for bits in losses[: size.steps]],
    }  # fmt: skip


def off(records: list[dict]) -> list[tuple[int, int, float]]:
    """By how much a loss differs from one device's of the same batches, where that is too much."""
    of_all = lambda r: r["devices"] * r["tokens"]
    alone = {of_all(r): r["losses"] for r in records if r["devices"] == 1}
    out = []
    for r in records:
        worst = np.abs(np.subtract(r["losses"], alone.get(of_all(r), r["losses"]))).max()
        if not worst <= TOLERANCE:  # NaN is not
            out.append((r["devices"], r["tokens"], float(worst)))
    return out


# ---- what the model of one layer says of a step --------------------------------------------------

#: Bytes of each parameter in a step. The gradient's norm and AdamW read the gradient in bfloat16;
#: AdamW reads and writes three arrays in float32; the next step's forward pass makes bfloat16.
OPTIMIZER = 2 * BFLOAT16 + 6 * FLOAT32 + FLOAT32 + BFLOAT16


def predicted(r: dict, alone: dict, size: dict) -> float:
    """Milliseconds: those that one device took for as many tokens, with the layers, the optimizer
    and an all-reduce that several have in place of its own."""
    n, model = r["devices"], Model(**size["model"])
    way = default_transport(r["tokens"], model.k, model.experts // n, n)
    layer = lambda n: total(Layer(model, r["tokens"], n, way if n > 1 else None).both())
    spared = (1 - 1 / n) * r["parameters"]["experts"] * OPTIMIZER / H200.memory
    reduced = 2 * (1 - 1 / n) * r["parameters"]["others"] * FLOAT32 / H200.all_gather
    return alone["ms"]["median"] + size["layers"] * (layer(n) - layer(1)) - spared + reduced


def text_of(record: dict, predictions: bool = True) -> str:
    records = record["records"]
    by = {(r["devices"], r["tokens"]): r for r in records}
    rows = []
    for r in sorted(records, key=lambda r: (r["devices"], r["tokens"])):
        n, tokens, ms = r["devices"], r["tokens"], r["ms"]["median"]
        each, every = by.get((1, tokens)), by.get((1, n * tokens))
        row = [str(n), str(tokens), str(n * tokens), f"{ms:.1f}", f"{r['tokens_per_s']:,.0f}"]
        row.append(f"{n * each['ms']['median'] / ms:.2f}x" if each and n > 1 else "")
        row.append(f"{every['ms']['median'] / ms:.2f}x" if every and n > 1 else "")
        if predictions:
            row.append("")
            if each and n > 1 and "NVIDIA" in record["gpu"]:
                model = predicted(r, each, record["size"])
                row[-1] = f"{model:.1f} ({100 * (model / ms - 1):+.0f} %)"
        rows.append(row)
    head = ["GPUs", "tokens of each", "of all", "ms", "tokens/s", "weak", "strong"]
    return table([*head, *(["predicted"] if predictions else [])], rows)


def main(argv=None) -> int:
    parser = new_parser("train_devices", __doc__)
    add = parser.add_argument
    device_options(add)
    add("--tokens", type=int, help=f"of each device, {QWEN.tokens} by default")
    add("--layers", type=int, help=f"{QWEN.layers} by default")
    record_options(add, "program", "show this")
    args = parser.parse_args(argv)
    if args.records:
        print(text_of(json.loads(args.records.read_text())))
        return 0
    devices = devices_of("train_devices", args)
    size = TINY if args.tiny else QWEN
    size = dataclasses.replace(
        size, tokens=args.tokens or size.tokens, layers=args.layers or size.layers
    )
    record = run_header(args, VERSIONS) | {
        "size": dataclasses.asdict(size), "records": [],
    }  # fmt: skip
    with jax.numpy_dtype_promotion("standard"):  # flax and optax do not run under "strict"
        for n, tokens in cases(devices, size.tokens):
            r = measure(size, n, tokens)
            record["records"].append(r)
            print(f"{n} x {tokens} tokens: {r['ms']['median']:.2f} ms a step", flush=True)
            write_record(args.json, record)
    print(f"{record['gpu']}\n\n{text_of(record)}")
    wrong = off(record["records"])
    for n, tokens, worst in wrong:
        print(f"{n} x {tokens} tokens: a loss is {worst:.3f} off")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
