"""A decode step of whole models on one GPU: Qwen3-30B-A3B, gpt-oss-120b, Mixtral-8x7B, quantized.

python -m benchmarks.decode [--models Qwen3 nvfp4 ...] [--batches 1 8 64] [--json FILE]
python -m benchmarks.decode --records A.json B.json
python -m benchmarks.decode --generate 256 [--pauses] [--models Qwen3 nvfp4]

The decoder is that of examples/generate.py, and so are loading, prepacking and what is announced of
memory, which stands beside the peak of the process. ``--generate`` runs that example's own programs
instead of measuring steps, and loads what it draws from the host, as from files.

Weights are random, drawn on the device in the format. A step reads the last token of each sequence
and gives the next (greedy); tokens and the cache stay on the device, and the cache is donated. The
cache begins with ``--context`` random tokens of each sequence.

``wall``: steps in a row, from outside. ``kernels``: the time of all kernels of a step (CUPTI). The
bound is the bytes that a step has to read / B: the experts that the batch really meets, all other
weights, the cache as far as windows see it, and the logits. B is a copy's, measured in the same
process. Shares are of wall time. Parts are one layer's program after the other: only kernels count.

Every case has a process of its own, so that the peak of memory is its own. Records of other cases
that a file of --json holds stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from concurrent.futures import wait
from pathlib import Path

import jax

from examples.decoder.generation import TOKENS_OF_A_CALL
from examples.options import count

from . import decode_generate, decode_models, decode_steps, timing
from .decode_models import CASES, Case
from .decode_steps import Parts, Steps
from .options import new_parser, record_options
from .records import rows, run_header, write_record
from .report import table

BATCHES = (1, 8, 64)
GOALS = {1: 0.40, 8: 0.55, 64: 0.70}  # of the bound; of the models below
GOALS_OF = ("Qwen3-30B-A3B", "gpt-oss-120b")
#: us of vLLM's fused MoE kernel, by batch: published, for Qwen3-30B-A3B in FP8 on an H100. Nothing
#: here measures it.
PUBLISHED_VLLM_US = {1: 40.4, 8: 119.0, 64: 237.0}
VERSIONS = ("jaxlib", "flax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
GB = 1e9


# ---- measuring -----------------------------------------------------------------------------------


def measure(case: Case, args) -> list[dict]:
    """Records of a case, one for each batch."""
    config = case.config(args.layers, args.tiny)
    of_layers = case.config(None, args.tiny).layers
    began = time.perf_counter()
    room = args.context + args.steps
    made = decode_models.Model(case, config, args, room * max(args.batches))
    programs = decode_steps.compiled(made.shapes, sorted(args.batches), room)
    wait(programs.values())
    compiled, began = time.perf_counter() - began, time.perf_counter()
    model = made.made()
    loaded = time.perf_counter() - began
    print(
        f"{case.name}: {config.layers} of {of_layers} layers, compiled in {compiled:.1f} s, made "
        f"in {loaded:.1f} s",
        flush=True,
    )
    records = []
    for batch in sorted(args.batches):
        try:
            program = programs[batch].result()
            need = made.announced(decode_steps.empty_cache(model, room, batch), program)
            print(f"batch {batch} {need.announced(made.room)}", flush=True)
            found = _of_batch(model, program, need, batch, room, args)
        except Exception:
            traceback.print_exc()
            print(f"{case.name} batch {batch} failed", flush=True)
            continue
        about = {
            "model": case.model, "format": case.format, "batch": batch,
            "dense": case.dense or args.dtype, "head": case.head or args.dtype,
            "layers": config.layers, "of_layers": of_layers, "context": args.context,
            "form": "scanned" if args.scanned else "unrolled", "attention": args.attention,
            "loaded_s": loaded, "compiled_s": compiled,
        }  # fmt: skip
        records.append(about | found)
        print(described(records[-1]), flush=True)
    return records


def _of_batch(model, program, need, batch: int, room: int, args) -> dict:
    steps = Steps(model, program, batch, room, args.context)
    met, finite = steps.experts_met()
    bytes_ = decode_steps.bytes_of_step(model, batch, args.context, met)
    steps.run(3)
    walls = [steps.wall(args.chain) for _ in range(args.repetitions)]
    many = steps.wall(args.steps)
    kernels, by_name = _kernels(steps, args.kernel_steps)
    memory = decode_steps.memory(need.total)
    out = {
        "ms": {"wall": statistics.median(walls), "kernels": kernels},
        "steps": args.steps, "ms_of_steps": many, "tokens_per_s": 1e3 * batch / many,
        "bytes": bytes_ | {"total": sum(bytes_.values())}, "experts_met": met,
        "memory": memory, "kernels": by_name,
        "finite": finite,
    }  # fmt: skip
    steps.close()
    if args.parts:
        try:
            out["parts_ms"] = Parts(model, batch, room, args.context).ms(args.kernel_steps)
        except Exception:  # the step's own times stay
            traceback.print_exc()
    return out


def _kernels(steps: Steps, n: int) -> tuple[float | None, list]:
    """Milliseconds of a step's kernels, and [name, how many, us] of those that take longest."""
    found = decode_steps.kernels_of(lambda: steps.run(n))
    if found is None:
        return None, []
    by: dict[str, list[float]] = {}
    for name, ms in found:
        by.setdefault(name, []).append(1e3 * ms)
    rows = [[name[:120], len(us) / n, sum(us) / n] for name, us in by.items()]
    return sum(ms for _, ms in found) / n, sorted(rows, key=lambda row: -row[2])[:20]


def bounded(records: list[dict], b: float | None) -> None:
    """Adds the bound and the share of it, once B is known."""
    for r in records:
        r["bound_ms"] = 1e3 * r["bytes"]["total"] / b if b else None
        r["share"] = r["bound_ms"] / r["ms"]["wall"] if b else None
        r["goal"] = GOALS.get(r["batch"]) if r["model"] in GOALS_OF else None
        same = (r["model"], r["format"]) == ("Qwen3-30B-A3B", "fp8")
        published = PUBLISHED_VLLM_US.get(r["batch"]) if same else None
        r["published_vllm_h100_moe_us_a_layer"] = published


# ---- what is shown -------------------------------------------------------------------------------


def described(r: dict) -> str:
    kernels, memory = r["ms"]["kernels"], r["memory"]
    text = f"{r['model']} {r['format']} batch {r['batch']}: {r['ms']['wall']:.3f} ms a step"
    text += (
        f" (kernels {_number(kernels)}), {r['tokens_per_s']:,.0f} tokens/s in {r['steps']} steps"
    )
    text += f", {r['bytes']['total'] / GB:.2f} GB"
    if memory["ratio"]:
        text += f", peak {memory['peak'] / GB:.2f} GB, {memory['ratio']:.3f} of announced"
    return text + ("" if r["finite"] else "  NOT FINITE")


def text(records: list[dict]) -> str:
    """A line for each case and batch. ``MoE`` is us a layer."""
    header = [
        "case, batch", "ms a step", "kernels", "bound", "of bound", "goal", "tokens/s", "GB read",
        "experts met", "MoE", "vLLM's MoE on H100, published", "attention", "head",
        "peak / announced",
    ]  # fmt: skip
    rows = []
    for r in records:
        parts, layers = r.get("parts_ms") or {}, r["layers"]
        part = f", {layers} of {r['of_layers']} layers" if layers != r["of_layers"] else ""
        share, goal, ratio = r["share"], r["goal"], r["memory"]["ratio"]
        each = lambda name, parts=parts, layers=layers: (
            None if parts.get(name) is None else 1e3 * parts[name] / layers
        )
        rows.append([
            f"{r['model']} {r['format']}, {r['batch']}{part}", f"{r['ms']['wall']:.3f}",
            _number(r["ms"]["kernels"]), _number(r["bound_ms"]),
            "" if share is None else f"{share:.0%}", "" if goal is None else f"{goal:.0%}",
            f"{r['tokens_per_s']:,.0f}", f"{r['bytes']['total'] / GB:.2f}",
            f"{r['experts_met']:.1f}", _number(each("moe"), 1),
            _number(r["published_vllm_h100_moe_us_a_layer"], 1), _number(each("attention"), 1),
            _number(parts.get("head")), _number(ratio),
        ])  # fmt: skip
    return table(header, rows)


def _number(value: float | None, decimals: int = 3) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.{decimals}f}"


# ---- records -------------------------------------------------------------------------------------


def key(r: dict) -> tuple:
    return tuple(r[n] for n in ("model", "format", "batch", "layers", "form", "attention", "dense"))


def header(args, b: float | None) -> dict:
    return run_header(args, VERSIONS) | {
        "repetitions": args.repetitions, "B_tbytes": b and b / 1e12,
    }  # fmt: skip


def save(path: Path, head: dict, records: list[dict]) -> None:
    """Replaces those of the same case; every record names its run's B."""
    known = json.loads(path.read_text())["records"] if path.exists() else []
    new = {key(r): r | {"B_tbytes": head["B_tbytes"]} for r in records}
    kept = [r for r in known if key(r) not in new]
    write_record(path, head | {"records": [*kept, *new.values()]})


def load(paths) -> list[dict]:
    return rows(paths)


# ---- the command ---------------------------------------------------------------------------------


def arguments(argv=None) -> argparse.Namespace:
    parser = new_parser("decode", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", help="those whose name holds all of these, as Qwen3 nvfp4")
    add("--batches", nargs="+", type=int, default=list(BATCHES))
    add("--context", type=int, default=1024, help="tokens of each sequence before the first step")
    add("--steps", type=int, default=256, help="in a row, which give tokens/s")
    add("--layers", type=int, help="of a shorter model; its records say so")
    add("--tiny", action="store_true", help="a model that a CPU runs")
    add("--scanned", action="store_true", help="as examples/generate.py without --unrolled")
    add("--attention", choices=["xla", "cudnn"], default="xla")
    add("--dense", choices=["stored", "bfloat16"], default="stored",
        help="layers besides experts: as released, or not quantized")  # fmt: skip
    add("--no-parts", dest="parts", action="store_false", help="the whole step alone")
    add("--quick", action="store_true", help="few repetitions")
    add("--generate", type=count, metavar="TOKENS",
        help="as examples/generate.py: its memory beside what it announces")  # fmt: skip
    add("--pauses", action="store_true", help="of the device, under --generate")
    add("--chunk", type=count, default=decode_generate.CHUNK,
        help="tokens of the prompt in a step of --generate")  # fmt: skip
    record_options(add, "case", "show these", nargs="+")
    args = parser.parse_args(argv)
    if args.pauses and (args.generate or 0) < decode_generate.SETTLED + TOKENS_OF_A_CALL:
        least = decode_generate.SETTLED + TOKENS_OF_A_CALL
        parser.error(f"--pauses needs --generate {least} or more")
    args.repetitions, args.chain, args.kernel_steps = (2, 16, 4) if args.quick else (5, 32, 8)
    args.chain = min(args.chain, args.steps)
    args.dtype = "bfloat16"
    return args


def selected(args) -> list[Case]:
    found = [c for c in CASES if all(part in c.name for part in args.models or [])]
    if not found:
        raise SystemExit("no such case: " + ", ".join(c.name for c in CASES))
    plain = {"dense": None, "head": None} if args.dense == "bfloat16" else {}
    return [dataclasses.replace(c, **plain) for c in found]


def main(argv=None) -> int:
    args = arguments(argv)
    if args.records:
        print(text(load(args.records)))
        return 0
    cases = selected(args)
    if len(cases) > 1 and not args.tiny:
        return _each_alone(cases, sys.argv[1:] if argv is None else list(argv))
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if jax.default_backend() != "gpu" and not args.tiny:
        raise SystemExit(
            f"python -m benchmarks.decode needs an NVIDIA GPU, and jax sees only {jax.devices()}. "
            "--tiny runs on any machine."
        )
    with jax.numpy_dtype_promotion("standard"):  # as examples/generate.py
        if args.generate:
            return int(not all(decode_generate.measured(case, args) for case in cases))
        records = [r for case in cases for r in measure(case, args)]
    gc.collect()  # modules refer to each other
    b = timing.ceilings([])[1] if jax.default_backend() == "gpu" else None
    bounded(records, b)
    head = header(args, b)
    if args.json:
        save(args.json, head, records)
    print(f"{head['gpu']}" + (f": B = {b / 1e12:.2f} TB/s" if b else "") + f"\n\n{text(records)}")
    complete = len(records) == len(cases) * len(args.batches)
    return 0 if complete and all(r["finite"] for r in records) else 1


def _each_alone(cases: list[Case], argv: list[str]) -> int:
    """Each case in a process of its own; later options count."""
    bad = 0
    for case in cases:
        command = [sys.executable, "-m", "benchmarks.decode", *argv]
        bad += subprocess.run([*command, "--models", *case.name.split()]).returncode != 0
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
