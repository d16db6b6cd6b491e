"""Where a training step of examples/train_moe.py goes, by precision, at a size that fills a GPU.

python -m benchmarks.train_step --json benchmarks/results/h200/training/train_step.json
python -m benchmarks.train_step --tiny --precisions bfloat16   # small sizes, which CPUs run
python -m benchmarks.train_step --records FILE           # measures nothing: its tables

The model has two layers with Qwen3-30B-A3B's experts, and bytes of real text. A time is a chain of
steps, from outside, and the median of chains. After that, steps are profiled: microseconds of a
step by kind of kernel, and how long nothing ran. "dense" is the time in which the same products of
the experts would run at the rate of one large product, which is measured beside it.
"""

from __future__ import annotations

import importlib
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from . import trace
from .options import new_parser, record_options
from .records import commit, version, write_record
from .report import table

EXAMPLES = Path(__file__).parents[1] / "examples"
PRECISIONS = ("bfloat16", "fp8", "nvfp4")
STEPS, CHAINS = 5, 4
SIZE = {
    "layers": 2, "width": 2048, "experts": 128, "top_k": 8, "expert_width": 768, "context": 256,
}  # fmt: skip
TINY = {"layers": 1, "width": 32, "experts": 4, "top_k": 2, "expert_width": 24, "context": 16}
#: Kinds of kernels: the first whose words a name has.
KINDS = {
    "our products": r"jgg|gmm|wgrad|grouped|Jgg",
    "other products": r"gemm|cutlass|nvjet|cublas|triton_gemm|dot",
    "attention": r"cudnn|fmha|flash|softmax",
    "sort, gather, scatter": r"sort|gather|scatter|Sort|Radix",
    "copies": r"[Mm]emcpy|[Mm]emset|copy",
    "reductions": r"reduce",
    "fusions": r"fusion|loop|wrapped|input_",
}


def kind(name: str) -> str:
    return next((k for k, words in KINDS.items() if re.search(words, name)), "others")


def dense_rate(n: int) -> float:
    """TFLOP/s of a product of n x n matrices in bfloat16, in a chain."""
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    product = jax.jit(lambda a, b: (a @ b) * jnp.bfloat16(0.01))
    b = jax.block_until_ready(product(a, a))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(10):
            b = product(a, b)
        jax.block_until_ready(b)
        times.append((time.perf_counter() - began) / 10)
    return 2 * n**3 / statistics.median(times) / 1e12


def flops(size: dict, tokens: int) -> float:
    """Operations of the experts' products, forward and backward."""
    one = 3 * 2 * size["width"] * size["expert_width"]
    return 3 * size["layers"] * tokens * size["top_k"] * one


def parts(names_and_intervals, steps: int) -> tuple[dict, list]:
    """Microseconds of a step by kind of kernel, and the kernels that take longest."""
    by_kind: dict[str, float] = {}
    by_name: dict[str, list[float]] = {}
    for name, (begin, end) in names_and_intervals:
        us = (end - begin) / 1e3 / steps
        by_kind[kind(name)] = by_kind.get(kind(name), 0.0) + us
        of = by_name.setdefault(name, [0.0, 0.0])
        of[0] += us
        of[1] += 1 / steps
    intervals = [interval for _, interval in names_and_intervals]
    if intervals:
        span = max(end for _, end in intervals) - min(begin for begin, _ in intervals)
        by_kind["nothing"] = (span - trace.length(intervals)) / 1e3 / steps
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:25]
    return by_kind, [[name, us, calls] for name, (us, calls) in longest]


def measure(precision: str, size: dict, tokens: int, ours: bool = True) -> dict:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # its scripts import each other
    train_moe: Any = importlib.import_module("train_moe")
    config = train_moe.Config(
        steps=1000, batch=tokens // size["context"], lr=1e-4, precision=precision, **size
    )
    text = train_moe.texts.read(train_moe.texts.DEFAULT, size["context"])
    text = jnp.asarray(train_moe.texts.split(text)[0])
    trainer = train_moe.Trainer(config, None if ours else train_moe.ragged_dot_layer)
    began = time.perf_counter()
    step = trainer.train_step.lower(trainer.state, text).compile()
    compiled = time.perf_counter() - began
    memory = step.memory_analysis()
    state, losses, times = trainer.state, [], []
    del trainer.state  # is donated
    for _ in range(1 + CHAINS):
        began = time.perf_counter()
        for _ in range(STEPS):
            state, bits = step(state, text)
            losses.append(bits)
        jax.block_until_ready(state)
        times.append(1e3 * (time.perf_counter() - began) / STEPS)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(2):
                state, bits = step(state, text)
            jax.block_until_ready(state)
        by_kind, longest = parts(trace.runs(trace.planes_of(Path(folder))), 2)
    ms = statistics.median(times[1:])
    return {
        "precision": precision, "ours": ours, "tokens": tokens, "ms": ms,
        "tokens_per_s": 1e3 * tokens / ms, "compile_s": compiled,
        "temporaries_gib": memory.temp_size_in_bytes / 2**30 if memory else None,
        "tflops": flops(size, tokens) / ms / 1e9,
        "losses": [float(bits) for bits in losses],
        "us": by_kind, "longest": longest,
    }  # fmt: skip


def text_of(record: dict) -> str:
    """Two tables: rates; and where a step goes."""
    rate, rows, kinds = record["dense_tflops"], [], []
    for r in record["records"]:
        name = f"{r['precision']}{'' if r['ours'] else ', lax.ragged_dot'}"
        dense = 100 * r["tflops"] / rate
        rows.append(
            [name, str(r["tokens"]), f"{r['ms']:.1f}", f"{r['tokens_per_s']:,.0f}",
             f"{dense:.0f} %", f"{r['losses'][-1]:.3f}"]
        )  # fmt: skip
        if r["us"]:
            shares = [f"{r['us'].get(k, 0.0) / 1e3:.2f}" for k in (*KINDS, "others", "nothing")]
            kinds.append([name, *shares])
    first = table(["precision", "tokens", "ms", "tokens/s", "of dense", "bits per byte"], rows)
    if not kinds:
        return first
    return first + "\n\n" + table(["ms of a step", *KINDS, "others", "nothing"], kinds)


def main(argv=None) -> int:
    parser = new_parser("train_step", __doc__)
    add = parser.add_argument
    add("--precisions", nargs="+", default=PRECISIONS, help="of examples/train_moe.py")
    add("--tokens", type=int, help="of a step, 32768 by default")
    add("--ragged-dot", action="store_true", help="also with jax.lax.ragged_dot, in bfloat16")
    add("--tiny", action="store_true", help="small sizes, which CPUs run")
    record_options(add, "precision", "show this")
    args = parser.parse_args(argv)
    if args.records:
        print(text_of(json.loads(args.records.read_text())))
        return 0
    size, tokens = (TINY, 64) if args.tiny else (SIZE, 32768)
    tokens = args.tokens or tokens
    trace.keep_command_buffers()
    record = {
        "date": time.strftime("%Y-%m-%d"), "commit": args.commit or commit(),
        "gpu": jax.devices()[0].device_kind, "jax": jax.__version__,
        "versions": {p: version(p) for p in ("jaxlib", "flax", "optax")},
        "size": size, "dense_tflops": dense_rate(256 if args.tiny else 8192), "records": [],
    }  # fmt: skip
    cases = [(p, True) for p in args.precisions]
    cases += [("bfloat16", False)] if args.ragged_dot else []
    with jax.numpy_dtype_promotion("standard"):  # flax and optax do not run under "strict"
        for precision, ours in cases:
            r = measure(precision, size, tokens, ours)
            record["records"].append(r)
            print(f"{precision} {ours}: {r['ms']:.2f} ms, compile {r['compile_s']:.0f} s "
                  f"{r['temporaries_gib']:.1f} GiB", flush=True)  # fmt: skip
            for name, us, calls in r["longest"]:
                print(f"  {us:9.1f} us {calls:5.1f} x {name[:110]}", flush=True)
            write_record(args.json, record)
    print(f"{record['gpu']}, dense {record['dense_tflops']:.0f} TFLOP/s\n\n{text_of(record)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
