"""Products with quantized weights on a CPU, beside arrays and beside other libraries' products.

python -m benchmarks.cpu_quantized [--formats affine4 mxfp4] [--dtypes bfloat16] [--json FILE]
python -m benchmarks.cpu_quantized --plot RECORD

8 experts, as many rows for each; forward (x is (rows, K), w (8, N, K)), "dx", the product that the
gradient of the rows is, and ``gather_qmm``, where each expert has a row, in any order. Prints, per
case and arm, milliseconds: the least of the repetitions. All arms run in this process on the same
numbers with the same threads, in turns, and each call finds its weight in memory, not in a cache:
before it ``--flush`` MiB of something else are read. No result counts that differs from float64.

Peers (benchmarks/cpu_peers.py) are ONNX Runtime (``pip install onnxruntime onnx``), MLX
(``pip install "mlx[cpu]"``), and llama.cpp's library, if JGG_LIBLLAMA names one. One that is not
there is left out, with a line that says so. "8-bit x": the activations are rounded to 8 bits.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

from . import cpu_peers
from .cpu_peers import Arm, Case
from .options import new_parser, record_options
from .records import commit, version, write_record

FORMATS: dict[str, dict[str, Any]] = {
    "affine4": {"mode": "affine", "bits": 4, "group_size": 32},
    "affine8": {"mode": "affine", "bits": 8, "group_size": 32},
    "mxfp4": {"mode": "mxfp4"},
    "mxfp8": {"mode": "mxfp8"},
    "nvfp4": {"mode": "nvfp4"},
}
OPS = ("grouped_qmm", "dx", "gather_qmm")
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
TOLERANCE_8_BIT = 2e-2
FLAGS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
         "amx_int8", "amx_bf16")  # fmt: skip


# ---- arms --------------------------------------------------------------------------------------


def jax_arm(f: Callable, *args) -> Arm:
    run = jax.jit(f)
    kept: list[Any] = []

    def once() -> None:
        kept[:] = [jax.block_until_ready(run(*args))]

    return Arm(once, lambda: np.asarray(kept[0].astype(jnp.float32)).reshape(len(args[0]), -1))


def ours(case: Case) -> Arm:
    x, q = jnp.asarray(case.x, case.dtype), case.weight.q
    if case.op == "gather_qmm":
        order = jnp.asarray(case.order, jnp.int32)
        return jax_arm(lambda x, q, order: jgg.gather_qmm(x[:, None], q, None, order), x, q, order)
    forward = case.op == "grouped_qmm"
    of = lambda x, q, sizes: jgg.grouped_qmm(x, q, sizes, transpose_w=forward)
    return jax_arm(of, x, q, sizes_of(case))


def ours_of_arrays(case: Case) -> Arm:
    """The product of the same values as an array of x's dtype."""
    if case.op == "gather_qmm":
        raise cpu_peers.Skip("is grouped_qmm's with as many rows")
    forward = case.op == "grouped_qmm"
    of = lambda x, w, sizes: jgg.grouped_mm(x, w, sizes, transpose_w=forward)
    w = jnp.asarray(case.weight.values, case.dtype)
    return jax_arm(of, jnp.asarray(case.x, case.dtype), w, sizes_of(case))


def sizes_of(case: Case):
    groups = len(case.weight.codes)
    return jnp.full(groups, case.rows // groups, jnp.int32)


#: Name, how it is made, and whether x is rounded to 8 bits.
ARMS: dict[str, tuple[Callable[[Case], Arm], bool]] = {
    "ours": (ours, False),
    "ours, no quantization": (ours_of_arrays, False),
    **cpu_peers.PEERS,
}


def exact(case: Case) -> np.ndarray:
    """The result in float64."""
    groups = len(case.weight.codes)
    each = case.rows // groups
    x = case.x.astype(np.float64)
    out = []
    for part in range(groups):
        w = case.weight.values[case.experts[part * each]].astype(np.float64)
        out.append(x[part * each : (part + 1) * each] @ (w if case.op == "dx" else w.T))
    return np.concatenate(out)


def arms_of(case: Case, names, skipped: dict[str, str]) -> tuple[dict[str, Arm], dict[str, float]]:
    """Those that exist and are right, and their errors; a line for each other, once."""
    want = exact(case)
    found, errors = {}, {}

    def without(name: str, why: str) -> None:
        key = f"{name}: {case.op} of {case.dtype} by {case.weight.name}"
        if key not in skipped:
            print(f"no {key}: {why}")
        skipped[key] = why

    for name in names:
        make, of_8_bits = ARMS[name]
        try:
            arm = make(case)
            arm.run()
        except cpu_peers.Skip as why:
            without(name, str(why))
            continue
        except Exception as error:
            without(name, f"failed: {error}".splitlines()[0])
            continue
        error = float(np.linalg.norm(arm.result() - want) / np.linalg.norm(want))
        if not error <= (TOLERANCE_8_BIT if of_8_bits else TOLERANCE[case.dtype]):
            without(name, f"WRONG, by {error:.1e}")
            continue
        found[name], errors[name] = arm, error
    return found, errors


# ---- times -------------------------------------------------------------------------------------


class Flush:
    """Reads so many MiB with all threads."""

    def __init__(self, mib: int, threads: int):
        self.parts = [np.ones(mib * 2**18 // threads, np.float32) for _ in range(threads)]
        self.pool = ThreadPoolExecutor(threads)

    def __call__(self) -> None:
        list(self.pool.map(np.sum, self.parts))


def times_of(arms: dict[str, Arm], flush, repetitions: int, budget: float):
    """Milliseconds of each call. Arms take turns, and each repetition begins with another. An arm
    that has used ``budget`` seconds stops after three."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    names = [*arms]
    for i in range(repetitions):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            if len(times[name]) >= 3 and sum(times[name]) > 1e3 * budget:
                continue
            flush()
            start = time.perf_counter()
            arms[name].run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def case_of(op: str, weight, dtype: str, rows: int, threads: int) -> Case:
    groups, n, k = weight.codes.shape
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, n if op == "dx" else k), np.float32)
    x = np.asarray(jnp.asarray(x, dtype).astype(jnp.float32))  # the same numbers for all
    return Case(op, weight, x, dtype, rng.permutation(groups), threads)


def measure(case: Case, names, args, flush, skipped) -> dict[str, Any]:
    arms, errors = arms_of(case, names, skipped)
    times = times_of(arms, flush, args.repetitions, args.budget)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(case.weight.q))
    least = {name: min(of) for name, of in times.items()}
    return {
        "op": case.op,
        "case": f"{case.weight.name}, {case.dtype} x, {case.rows} rows",
        "format": case.weight.name,
        "dtype": case.dtype,
        "rows": case.rows,
        "ms": least,
        "median_ms": {name: statistics.median(of) for name, of in times.items()},
        "errors": errors,
        "gb_per_s": size / least["ours"] / 1e6 if "ours" in least else None,
    }


# ---- where -------------------------------------------------------------------------------------


def processor() -> dict[str, Any]:
    """This CPU, as /proc describes it on Linux."""
    facts = {"cpu": platform.processor() or platform.machine(), "flags": []}
    path = Path("/proc/cpuinfo")
    if path.exists():
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        lines = {key.strip(): value.strip() for key, value in lines.items()}
        facts["cpu"] = lines.get("model name", facts["cpu"])
        facts["flags"] = [flag for flag in FLAGS if flag in lines.get("flags", "").split()]
    return facts


def header(args) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": args.commit or commit(),
        **processor(),
        "machine": args.machine,
        "load": os.getloadavg()[0],
        "threads": args.threads,
        "jax": jax.__version__,
        "versions": {
            name: version(name) for name in ("jaxlib", "numpy", "onnxruntime", "mlx", "mlx-cpu")
        }
        | {"libllama": os.path.basename(os.environ.get("JGG_LIBLLAMA", "")) or None},
        "shape": args.shape,
        "repetitions": args.repetitions,
        "flush_mib": args.flush,
    }


def table(records: list[dict], names: list[str]) -> list[str]:
    """A line for each case, a column for each arm that any has."""
    shown = [name for name in names if any(name in row["ms"] for row in records)]
    lines = ["op           rows " + " ".join(f"{name:>10}" for name in map(short, shown))]
    for row in records:
        cells = [
            f"{row['ms'][name]:10.2f}" if name in row["ms"] else f"{'-':>10}" for name in shown
        ]
        lines.append(f"{row['op']:11} {row['rows']:5} " + " ".join(cells))
    return lines


def short(name: str) -> str:
    for long, few in (
        ("ours, no quantization", "array"), ("ONNX Runtime", "ORT"), (", 8-bit x", " x8"),
        ("llama.cpp", "ggml"), (" mul_mat", "[mm]"),
    ):  # fmt: skip
        name = name.replace(long, few)
    return name


def main(argv=None) -> list[dict]:
    parser = new_parser("cpu_quantized")
    add = parser.add_argument
    add("--repetitions", type=int, default=15)
    add("--budget", type=float, default=6, help="seconds of an arm's calls of one case")
    add("--shape", type=int, nargs=3, default=[8, 1536, 2048], metavar="SIZE", help="G, N, K")
    add("--rows", type=int, nargs="+", default=[8, 64, 512, 4096])
    add("--ops", nargs="+", choices=OPS, default=list(OPS))
    add("--formats", nargs="+", choices=FORMATS, default=["affine4"])
    add("--dtypes", nargs="+", choices=TOLERANCE, default=["float32"], help="of rows")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--threads", type=int, help="by default all cores of this process")
    add("--flush", type=int, default=512, help="MiB read before each call; more than caches hold")
    add("--machine", default="unknown", help="recorded: idle, or shared with what")
    record_options(add)
    add("--plot", type=Path, metavar="RECORD", help="draw it to docs/plots/cpu.svg, and stop")
    args = parser.parse_args(argv)
    if args.plot is not None:
        from . import plots
        from .records import rows

        shown = [row for row in rows([args.plot]) if row["dtype"] in args.dtypes]
        plots.cpu(shown, Path("docs/plots/cpu.svg"))
        return []
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        args.threads = args.threads or len(cores)
        if args.threads < len(cores):  # before JAX makes its threads
            os.sched_setaffinity(0, cores[: args.threads])
    args.threads = args.threads or os.cpu_count() or 1
    groups = args.shape[0]
    head = header(args)
    print(
        f"jax {jax.__version__}, {head['cpu']}, {args.threads} threads, {args.shape}, ms, "
        f"the least of {args.repetitions}"
    )
    flush = Flush(args.flush, args.threads)
    records, skipped = [], {}
    for name in args.formats:
        weight = cpu_peers.weight_of(name, FORMATS[name], args.shape, np.random.default_rng(0))
        for dtype in args.dtypes:
            part = []
            for op in args.ops:
                for rows in args.rows:
                    if rows % groups or (op == "gather_qmm" and rows != groups):
                        continue
                    case = case_of(op, weight, dtype, rows, args.threads)
                    part.append(measure(case, args.arms, args, flush, skipped))
            print(f"{name}, {dtype} x")
            print("\n".join(table(part, args.arms)), flush=True)
            records += part
    if args.json:
        head |= {"load_after": os.getloadavg()[0], "skipped": skipped, "records": records}
        write_record(args.json, head)
    return records


if __name__ == "__main__":
    main()
