"""Grouped products on one GPU: device time, share of the floor, ratio to peers.

python -m benchmarks.gpu [--ops forward ...] [--peers lax torch] [--json FILE]

Every kernel that a call launches is counted (CUPTI), helpers included; medians of repetitions; the
arms of a case run in turns. The floor of a case is max(bytes / B, flops / C): each operand read
once, only weights of groups that have rows, the result written once; B (a copy, bytes read plus
written) and C (a dense bfloat16 product of 8192^3) are measured in the same run. Operands are
random, and every timed result is checked against float32 products of some of its groups.
"""

import argparse
import datetime
import importlib
import json
import statistics
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import profiler

import jax_groupgemm as jgg

# groups, K, N, rows
GROUPED = [
    (128, 2048, 1536, 512),
    (128, 2048, 1536, 2048),
    (128, 2048, 1536, 4096),
    (128, 768, 2048, 4096),
    (128, 2048, 1536, 32768),
    (128, 2048, 1536, 131072),
    (8, 4096, 28672, 16),
    (8, 4096, 28672, 128),
    (8, 4096, 28672, 1024),
    (8, 4096, 28672, 8192),
    (8, 14336, 4096, 8192),
    (256, 7168, 4096, 4096),
    (256, 2048, 7168, 131072),
]
WGRAD = [(128, 2048, 1536, 32768), (8, 4096, 28672, 8192), (256, 2048, 1536, 4096)]
# M, N, K, segments: the cases of MLX's benchmark of segmented_mm
SEGMENTED = [
    (128, 128, 1024, 16),
    (128, 128, 1024, 32),
    (256, 256, 2048, 16),
    (512, 512, 4096, 32),
    (1024, 1024, 4096, 32),
    (1024, 1024, 8192, 64),
]
# Microseconds of MLX 0.32.4's CUDA kernels on an H200, cuts at multiples of 16.
MLX = {
    "bfloat16": [10.6, 13.0, 11.3, 39.1, 126, 223],
    "float32": [8.1, 7.5, 14.0, 82.7, 303, 596],
    "tf32": [11.1, 11.3, 13.1, 48.3, 177, 310],
}
REPETITIONS = 20


def device_us(f, *args) -> tuple:
    """The result, and microseconds of device time per call, one per repetition."""
    out, times = profiler.measure(jax.jit(f), iterations=REPETITIONS)(*args)
    assert times is not None, "CUPTI saw no kernel"
    return out, [1e3 * t for t in times]


def ceilings() -> tuple[float, float]:
    """C in FLOP/s and B in bytes/s."""
    a, b = (jax.random.normal(jax.random.key(i), (8192, 8192), jnp.bfloat16) for i in range(2))
    _, product = device_us(jnp.matmul, a, b)
    # A copy is no kernel, so it is timed from outside: large, many in a row.
    buffer = random(2, (2**31,))
    copy = jax.jit(lambda v: jnp.copy(v))
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        jax.block_until_ready([copy(buffer) for _ in range(8)])
        times.append((time.perf_counter() - begin) / 8)
    return 2 * 8192**3 / statistics.median(product) * 1e6, 2 * buffer.nbytes / min(times)


def random(seed: int, shape, dtype=jnp.bfloat16):
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, dtype))()


def routed(groups: int, rows: int, skew: bool = False):
    rng = np.random.default_rng(rows)
    weights = rng.pareto(1.0, groups) if skew else np.ones(groups)
    return rng.multinomial(rows, weights / weights.sum()).astype(np.int32)


def check_rows(out, x, w, sizes, transposed: bool) -> float:
    """The largest relative error of some groups' rows, and whether the tail is zero."""
    ends = np.cumsum(sizes)
    worst = 0.0
    for g in np.flatnonzero(sizes)[:: max(1, np.count_nonzero(sizes) // 3)]:
        rows = slice(int(ends[g] - sizes[g]), int(min(ends[g], ends[g] - sizes[g] + 64)))
        weight = w[g].T if transposed else w[g]
        want = jnp.dot(x[rows].astype(jnp.float32), weight.astype(jnp.float32), precision="highest")
        got = out[rows].astype(jnp.float32)
        worst = max(worst, float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)))
    assert not np.asarray(out[int(ends[-1]) :]).any()
    return worst


def grouped_cases(op: str, cases, peers):
    """Forward or gradient of x, for both layouts of the weights where memory allows."""
    for groups, k, n, rows in cases:
        k, n = (n, k) if op == "dgrad" else (k, n)
        sizes = routed(groups, rows)
        x, w = random(0, (rows, k)), random(1, (groups, n, k) if op == "dgrad" else (groups, k, n))
        transposed = op == "dgrad"
        ours = lambda x, w, s, t=transposed: jgg.grouped_mm(x, w, s, transpose_w=t)
        arms: dict[str, tuple] = {"ours": (ours, (x, w, jnp.asarray(sizes)))}
        if "lax" in peers and not transposed and rows * groups * k < 2**33:
            arms["lax"] = (lax.ragged_dot, (x, w, jnp.asarray(sizes)))
        if "torch" in peers:
            arms["torch"] = torch_arm("forward", x, w, sizes, transposed)
        active = int(np.count_nonzero(sizes))
        yield {
            "op": op,
            "case": f"G{groups} K{k} N{n} R{rows}",
            "arms": arms,
            "flops": 2 * rows * k * n,
            "bytes": 2 * (rows * (k + n) + active * k * n),
            "error": lambda out, x=x, w=w, s=sizes, t=transposed: check_rows(out, x, w, s, t),
        }


def wgrad_cases(cases, peers):
    for groups, a, b, rows in cases:
        sizes = routed(groups, rows)
        ends = np.cumsum(sizes)
        x, y = random(0, (rows, a)), random(1, (rows, b))
        spans = jnp.asarray(np.stack([ends - sizes, ends], 1), jnp.int32)
        ours = lambda x, y, s: jgg.segmented_mm(x, y, s, transpose_a=True)
        arms: dict[str, tuple] = {"ours": (ours, (x, y, spans))}
        if "torch" in peers:
            arms["torch"] = torch_arm("wgrad", x, y, sizes, False)

        def error(out, x=x, y=y, sizes=sizes, ends=ends):
            g = int(np.argmax(sizes))
            rows = slice(int(ends[g] - sizes[g]), int(ends[g]))
            want = jnp.dot(
                x[rows].astype("float32").T, y[rows].astype("float32"), precision="highest"
            )
            return float(jnp.linalg.norm(out[g].astype("float32") - want) / jnp.linalg.norm(want))

        yield {
            "op": "wgrad",
            "case": f"G{groups} {a}x{b} R{rows}",
            "arms": arms,
            "flops": 2 * rows * a * b,
            "bytes": 2 * (rows * (a + b) + groups * a * b),
            "error": error,
        }


def segmented_cases(peers):
    """MLX's cases, cut anywhere and, like MLX's own, at multiples of 16."""
    del peers
    for dtype, precision in (
        ("bfloat16", None), ("float16", None), ("float32", "highest"), ("float32", "tensorfloat32")
    ):  # fmt: skip
        name = "tf32" if precision == "tensorfloat32" else dtype
        published = MLX.get(name, [None] * len(SEGMENTED))
        for shape, mlx in zip(SEGMENTED, published, strict=True):
            for unit in (1, 16):
                yield segmented_case(name, dtype, precision, shape, unit) | {"mlx_us": mlx}


def segmented_case(name, dtype, precision, shape, unit) -> dict:
    m, n, k, count = shape
    cuts = np.random.default_rng(k).choice(k // unit, count - 1, replace=False)
    bounds = np.concatenate([[0], unit * np.sort(cuts), [k]])
    spans = np.stack([bounds[:-1], bounds[1:]], 1).astype(np.int32)
    a, b = random(0, (m, k), dtype), random(1, (k, n), dtype)

    def error(out):
        wide_a, wide_b = (np.asarray(v, np.float64) for v in (a, b))
        want = np.stack([wide_a[:, i:j] @ wide_b[i:j] for i, j in spans])
        return float(np.linalg.norm(np.asarray(out, np.float64) - want) / np.linalg.norm(want))

    ours = lambda a, b, s: jgg.segmented_mm(a, b, s, precision=precision)
    return {
        "op": f"segmented {name}",
        "case": f"{m}x{n}x{k}x{count}" + (" cut at 16s" if unit == 16 else ""),
        "arms": {"ours": (ours, (a, b, jnp.asarray(spans)))},
        "flops": 2 * m * n * k,
        "bytes": a.dtype.itemsize * (k * (m + n) + count * m * n),
        "error": error,
    }


def scan_cases(peers):
    """4096 groups of which 8 have rows, against those 8 alone."""
    del peers
    k, n, rows = 2048, 1536, 1024
    x, w = random(0, (rows, k)), random(1, (4096, k, n))
    few = routed(8, rows)
    many = np.zeros(4096, np.int32)
    many[np.linspace(3, 4090, 8).astype(int)] = few
    for sizes, weights in ((few, w[:8]), (many, w)):
        yield {
            "op": "scan",
            "case": f"G{len(sizes)} K{k} N{n} R{rows}",
            "arms": {"ours": (jgg.grouped_mm, (x, weights, jnp.asarray(sizes)))},
            "flops": 2 * rows * k * n,
            "bytes": 2 * (rows * (k + n) + 8 * k * n),
            "error": lambda out, w=weights, s=sizes: check_rows(out, x, w, s, False),
        }


def torch_arm(kind, a, b, sizes, transposed):
    """A function that runs torch's grouped product and times itself by CUDA-graph replay."""
    torch = importlib.import_module("torch")

    to_torch = torch.utils.dlpack.from_dlpack
    a, b = to_torch(a), to_torch(b)
    ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
    if kind == "wgrad":
        f = lambda: torch._grouped_mm(a.t(), b, offs=ends)
    else:
        f = lambda: torch._grouped_mm(a, b.transpose(-2, -1) if transposed else b, offs=ends)
    return f, None


def torch_us(f) -> list[float]:
    torch = importlib.import_module("torch")

    f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    times = []
    for _ in range(REPETITIONS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return times[3:]


def commit() -> str:
    try:
        return subprocess.check_output(
            ["git", "describe", "--always", "--dirty"], text=True
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return jgg.__version__


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choices = ["forward", "dgrad", "wgrad", "segmented", "scan"]
    parser.add_argument("--ops", nargs="+", default=choices, choices=choices)
    parser.add_argument("--peers", nargs="*", default=[], choices=["lax", "torch"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="recorded; by default what git says")
    args = parser.parse_args()

    c, b = ceilings()
    print(f"{jax.devices()[0].device_kind}: C = {c / 1e12:.0f} TFLOP/s, B = {b / 1e12:.2f} TB/s")
    make = {
        "forward": lambda: grouped_cases("forward", GROUPED, args.peers),
        "dgrad": lambda: grouped_cases("dgrad", GROUPED[4:6] + GROUPED[9:11], args.peers),
        "wgrad": lambda: wgrad_cases(WGRAD, args.peers),
        "segmented": lambda: segmented_cases(args.peers),
        "scan": lambda: scan_cases(args.peers),
    }
    records = []
    for op in args.ops:
        for case in make[op]():
            times, error = {}, float("nan")
            for name, (f, operands) in case["arms"].items():
                if operands is None:
                    times[name] = torch_us(f)
                else:
                    out, times[name] = device_us(f, *operands)
                    if name == "ours":
                        error = case["error"](out)
                    del out
            us = {name: statistics.median(t) for name, t in times.items()}
            floor = 1e6 * max(case["flops"] / c, case["bytes"] / b)
            record = {
                "op": case["op"], "case": case["case"], "us": us, "floor_us": floor,
                "floor_share": floor / us["ours"], "tflops": case["flops"] / us["ours"] / 1e6,
                "tbytes": case["bytes"] / us["ours"] / 1e6, "error": error,
                "spread": (max(times["ours"]) - min(times["ours"])) / us["ours"],
            }  # fmt: skip
            line = (
                f"{case['op']:18} {case['case']:26} {us['ours']:9.1f} us  floor {floor:8.1f} "
                f"{record['floor_share']:5.0%}  {record['tflops']:6.1f} TFLOP/s "
                f"{record['tbytes']:5.2f} TB/s  error {error:.1e}"
            )
            for name, value in us.items():
                if name != "ours":
                    line += f"  {name} {value:.1f} ({value / us['ours']:.2f}x)"
            if case.get("mlx_us"):
                record["mlx_us"] = case["mlx_us"]
                line += f"  MLX {case['mlx_us']} ({case['mlx_us'] / us['ours']:.2f}x)"
            print(line, flush=True)
            records.append(record)
            del case
    if args.json:
        header = {
            "date": datetime.date.today().isoformat(), "commit": args.commit or commit(),
            "gpu": jax.devices()[0].device_kind, "jax": jax.__version__,
            "command": " ".join(
                ["python -m benchmarks.gpu", "--ops", *args.ops, "--peers", *args.peers]
            ),
            "C_tflops": c / 1e12, "B_tbytes": b / 1e12,
        }  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(header | {"records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
