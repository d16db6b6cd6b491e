"""Training steps of other libraries' models, as they are and with this library's products.

python -m benchmarks.frameworks --json benchmarks/results/h200/training/frameworks.json
python -m benchmarks.frameworks --only maxtext           # cases whose name has this word
python -m benchmarks.frameworks --tiny                   # small sizes, which CPUs run
python -m benchmarks.frameworks --records FILE           # measures nothing: its table
python -m benchmarks.frameworks --page                   # writes the table of the guide

Each arm is a process of its own, so that the peak of its memory is its own. Processes import while
another one runs, and run one after the other. Times are medians of steps, without the first ones,
from the end of one step to the end of the next; MaxText's are those that it reports.

MaxText's arms: "dense" has ``sparse_matmul=false megablox=false``, as MaxText's own configurations
for GPUs have: every expert multiplies every token. "lax.ragged_dot" has ``sparse_matmul=true
megablox=false``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from . import records
from .expert_memory import filled
from .options import new_parser, record_options
from .records import command_output, commit, version, write_record
from .report import table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guides/other_libraries.md"
RECORD = ROOT / "benchmarks/results/h200/training/frameworks.json"
STEPS, WARM_UP = 12, 4
#: Of libraries and models, in the table.
NAMES = {
    "flax_nnx": "Flax NNX", "equinox": "Equinox", "maxtext": "MaxText", "mixtral": "Mixtral-8x7B",
    "qwen3": "Qwen3-30B-A3B",
}  # fmt: skip
VERSIONS = ("jaxlib", "flax", "equinox", "haliax", "optax", "maxtext")
#: What takes the place of ``jax.lax.ragged_dot``, by arm.
OURS = {"replace_ragged_dot", "moe_mlp", "moe_mlp FP8"}

MAXTEXT = (
    "run_name=bench skip_jax_distributed_system=true dataset_type=synthetic "
    "enable_checkpointing=false log_config=false enable_goodput_recording=false "
    "mlp_activations=['silu','linear'] enable_dropout=false gradient_clipping_threshold=1.0 "
    "max_target_length=2048 per_device_batch_size=4"
)
MIXTRAL = (
    "decoder_block=mixtral base_emb_dim=4096 base_num_query_heads=32 base_num_kv_heads=8 "
    "base_mlp_dim=14336 base_moe_mlp_dim=14336 head_dim=128 vocab_size=32000 num_experts=8 "
    "num_experts_per_tok=2 base_num_decoder_layers=2"
)
QWEN3 = (
    "decoder_block=qwen3_moe base_emb_dim=2048 base_num_query_heads=32 base_num_kv_heads=4 "
    "base_mlp_dim=768 base_moe_mlp_dim=768 head_dim=128 vocab_size=151936 num_experts=128 "
    "num_experts_per_tok=8 norm_topk_prob=true use_qk_norm=true base_num_decoder_layers=2 "
    "per_device_batch_size=2"
)
TINY = (
    "base_emb_dim=64 base_mlp_dim=64 base_moe_mlp_dim=64 base_num_query_heads=4 "
    "base_num_kv_heads=2 head_dim=16 vocab_size=256 max_target_length=64 per_device_batch_size=2 "
    "num_experts=8 num_experts_per_tok=2 base_num_decoder_layers=2"
)
MODELS = {"mixtral": MIXTRAL, "qwen3": QWEN3}
KERNELS = {
    "dense": "sparse_matmul=false megablox=false",
    "lax.ragged_dot": "sparse_matmul=true megablox=false use_tokamax_gmm=false",
}
LAYERS = ("lax.ragged_dot", "replace_ragged_dot", "moe_mlp")
#: Library, model, arm.
CASES = (
    *(("flax_nnx", "qwen3", arm) for arm in LAYERS),
    *(("equinox", "qwen3", arm) for arm in LAYERS),
    *(("haliax", "qwen3", arm) for arm in LAYERS[:2]),
    *(
        ("maxtext", model, arm)
        for model in MODELS
        for arm in ("dense", "lax.ragged_dot", "replace_ragged_dot", "moe_mlp", "moe_mlp FP8")
    ),
)


def settings(model: str, arm: str, tiny: bool, attention: str) -> list[str]:
    """MaxText's arguments; where a key is there twice, the last one counts."""
    kernel = KERNELS["dense" if arm == "dense" else "lax.ragged_dot"]
    words = [*MAXTEXT.split(), *MODELS[model].split(), *kernel.split(), f"attention={attention}"]
    words += [f"hardware={'cpu' if tiny else 'gpu'}", f"steps={STEPS}"]
    words += TINY.split() if tiny else []
    return [f"{k}={v}" for k, v in dict(word.split("=", 1) for word in words).items()]


def maxtext(model: str, arm: str, tiny: bool, attention: str) -> dict:
    """A run of MaxText's own training."""
    package = importlib.import_module("maxtext")
    train = importlib.import_module("maxtext.trainers.pre_train.train")
    import jax_groupgemm as jgg
    from jax_groupgemm.integrations import maxtext as hook

    config = Path(str(package.__file__)).parent / "configs/base.yml"
    arguments = [str(config), *settings(model, arm, tiny, attention)]
    with running(), tempfile.TemporaryDirectory() as folder:
        arguments += [f"base_output_directory={folder}", f"metrics_file={folder}/m.jsonl"]
        if arm in OURS:
            recipe = jgg.FP8Recipe() if "FP8" in arm else None
            hook.train(arguments, layer=arm.startswith("moe_mlp"), recipe=recipe)
        else:
            train.main(["train", *arguments])
        lines = [json.loads(line) for line in Path(folder, "m.jsonl").read_text().splitlines()]
        times = [1e3 * line["perf/step_time_seconds"] for line in lines]
        return result(times, [line["learning/loss"] for line in lines])


def of_module(library: str, model: str, arm: str, tiny: bool, attention: str) -> dict:
    """Steps of a model of :mod:`benchmarks.frameworks_models`."""
    del model, attention
    import jax_groupgemm as jgg

    from . import frameworks_models as models

    size = models.TINY if tiny else models.QWEN
    more = {"experts": models.with_moe_mlp} if arm == "moe_mlp" else {}
    context = jgg.replace_ragged_dot() if arm in OURS else contextlib.nullcontext()
    with running(), context:
        state, step = getattr(models, library)(size, **more)
        key = jax.random.key(1)
        tokens = jax.random.randint(key, (size.batch, size.context), 0, size.vocabulary)
        times, losses = [], []
        for _ in range(STEPS):
            began = time.perf_counter()
            state, loss = step(state, tokens)
            losses.append(float(loss))
            times.append(1e3 * (time.perf_counter() - began))
        return result(times, losses)


def result(times: list[float], losses: list[float]) -> dict:
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return {
        "ms": statistics.median(times[WARM_UP:]), "times": times, "losses": losses,
        "peak_gib": None if peak is None else peak / 2**30,
    }  # fmt: skip


@contextlib.contextmanager
def running():
    """In its turn, alone on the device."""
    while not Path(os.environ["JGG_FRAMEWORKS_TURN"]).exists():
        time.sleep(0.05)
    yield


def one(library: str, model: str, arm: str, tiny: bool, attention: str) -> dict:
    try:
        if library == "maxtext":
            return maxtext(model, arm, tiny, attention)
        return of_module(library, model, arm, tiny, attention)
    except Exception as why:
        text = f"{type(why).__name__}: {why}"
        no_memory = "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
        return {"failed": "does not fit" if no_memory else "error", "why": text[:600]}


def measure(cases, tiny: bool, attention: str, limit: float) -> Iterator[dict]:
    """Every case in a process of its own, in order."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        env = os.environ | {"JGG_FRAMEWORKS_TURN": f"{folder}/turn", "DECOUPLE_GCLOUD": "TRUE"}
        env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")
        env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        started = []
        for i, case in enumerate(cases):
            command = [sys.executable, "-m", "benchmarks.frameworks", "--one", *case]
            command += ["--attention", attention, "--turn", str(i), *(["--tiny"] if tiny else [])]
            # Files, not pipes: a process that writes much does not wait for its reader.
            paths = (Path(f"{folder}/{i}.{end}") for end in ("out", "err"))
            out, err = (files.enter_context(path.open("w")) for path in paths)
            started.append((case, subprocess.Popen(command, env=env, stdout=out, stderr=err)))
        deadline = time.monotonic() + limit
        try:
            for i, (case, process) in enumerate(started):
                Path(f"{folder}/turn{i}").touch()
                record = dict(zip(("case", "model", "arm"), case, strict=True))
                late = None
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    late = {"failed": "no time left", "why": ""}
                    process.kill()
                    process.wait()
                error = Path(f"{folder}/{i}.err").read_text()
                yield record | (late or outcome(Path(f"{folder}/{i}.out").read_text(), error))
        finally:
            for _, process in started:
                process.kill()


def outcome(out: str, error: str) -> dict:
    """The record of a process that has ended, from its output."""
    found = [line[7:] for line in out.splitlines() if line.startswith("RESULT ")]
    if found:
        return json.loads(found[0])
    said = [line for line in error.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return {"failed": "error", "why": (said[-1] if said else error.strip()[-300:])[:600]}


def line_of(r: dict) -> str:
    if "failed" in r:
        return f"{r['case']} {r['model']} {r['arm']}: {r['failed']} {r['why']}"
    peak = "" if r["peak_gib"] is None else f"{r['peak_gib']:.1f} GiB, "
    losses = " ".join(f"{loss:.6f}" for loss in r["losses"][:: max(1, len(r["losses"]) // 4)])
    times = " ".join(f"{t:.0f}" for t in r["times"])
    about = f"{r['ms']:.2f} ms, {peak}losses {losses}, times {times}"
    return f"{r['case']} {r['model']} {r['arm']}: {about}"


def text_of(records: list[dict]) -> str:
    """The table. "gain" is the time of lax.ragged_dot by that of the arm."""
    by = {(r["case"], r["model"], r["arm"]): r for r in records}
    rows = []
    for (case, model, arm), r in by.items():
        row = [f"{NAMES.get(case, case)}, {NAMES.get(model, model)}", arm]
        if "failed" in r:
            rows.append([*row, r["failed"], "", "", ""])
            continue
        base = by.get((case, model, "lax.ragged_dot"), {}).get("ms")
        row += [f"{r['ms']:.1f}", f"{base / r['ms']:.2f}x" if base else ""]
        row += ["" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}", f"{r['losses'][-1]:.4f}"]
        rows.append(row)
    return table(["model", "products", "ms", "gain", "GiB", "last loss"], rows)


def written(page: str) -> str:
    """The guide with the table of the record."""
    return filled(
        page, "python -m benchmarks.frameworks", {"H200": text_of(records.rows([RECORD]))}
    )


def main(argv=None) -> int:
    parser = new_parser("frameworks", __doc__)
    add = parser.add_argument
    add("--only", nargs="*", default=[], help="words, all of which a case's name has")
    add("--arms", nargs="+", help="in this order; all by default")
    libraries = [*dict.fromkeys(case[0] for case in CASES)]
    add("--libraries", nargs="+", default=libraries, choices=libraries, help="all by default")
    add("--tiny", action="store_true", help="small sizes, which CPUs run")
    add("--attention", help="MaxText's; cudnn_flash_jax by default, dot_product if --tiny")
    add("--limit", type=float, default=1800, help="seconds for all")
    add("--page", action="store_true", help="measure nothing: write the guide's table")
    record_options(add, show="show this")
    add("--one", nargs=3, help=argparse.SUPPRESS)
    add("--turn", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    attention = args.attention or ("dot_product" if args.tiny else "cudnn_flash_jax")
    if args.records:
        print(text_of(records.rows([args.records])))
        return 0
    if args.page:
        PAGE.write_text(written(PAGE.read_text()))
        return 0
    if args.one:
        os.environ["JGG_FRAMEWORKS_TURN"] += args.turn
        with jax.numpy_dtype_promotion("standard"):
            case, model, arm = args.one
            print("RESULT", json.dumps(one(case, model, arm, args.tiny, attention)), flush=True)
        return 0
    there = lambda library: importlib.util.find_spec(library.split("_")[0]) is not None
    words = [word.lower() for word in args.only]
    cases = [c for c in CASES if c[0] in args.libraries and there(c[0])]
    cases = [c for c in cases if all(w in " ".join(c).lower() for w in words)]
    if args.arms:
        cases = sorted((c for c in cases if c[2] in args.arms), key=lambda c: args.arms.index(c[2]))
    query = "--query-gpu=name,driver_version"
    driver = command_output("nvidia-smi", query, "--format=csv,noheader").split("\n")[0]
    record = {
        "date": time.strftime("%Y-%m-%d"), "commit": args.commit or commit(),
        "gpu": driver.split(",")[0], "driver": driver.split(",")[-1].strip(),
        "jax": jax.__version__,
        "versions": {p: version(p) for p in VERSIONS}, "records": [],
    }  # fmt: skip
    for r in measure(cases, args.tiny, attention, args.limit):
        record["records"].append(r)
        print(line_of(r), flush=True)
        write_record(args.json, record)
    print(text_of(record["records"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
