"""The whole mixture-of-experts layer on one GPU, router included: ours and other ways to write it.

python -m benchmarks.moe [--shapes Qwen3 ...] [--arms ours torch ...] [--quick] [--json FILE]
python -m benchmarks.moe --records A.json B.json --plots docs/plots

Forward, and forward with the gradients of x, router, up and down, in bfloat16, at random routing.
``products`` are the layer's two (and back four more) products alone, on operands that are ready.
``ms``: as in benchmarks.timing, all kernels of a call (JAX) or a CUDA graph (torch), a cold L2
cache, the arms of a shape in turns after rests. ``wall``: calls in a row, from outside, so that
gaps and copies count too. Temporaries: what XLA's memory analysis or torch's allocator says,
besides operands and results. Each arm's result and gradients are compared with ``composed``'s.

The shape ``decode``: few tokens, ten layers of Qwen3-30B-A3B one after the other in one program,
each with weights of its own and added to its x; times are those of one layer.

Each token's logits are distinct numbers that bfloat16 holds, in random order: x begins with them,
and the router is an identity on them. So no arm finds a tie, and all take the same experts.
"""

import argparse
import dataclasses
import functools
import math
import os
import statistics
import time
import traceback
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

from . import moe_cases, moe_layers, moe_peers, timing
from .moe_cases import DECODE, SHAPES, Arm, Compiler, Program, Shape, made, plan, unsupported
from .options import new_parser, record_options
from .records import rows, run_header, write_record
from .report import table

ARMS = (*moe_layers.LAYERS, "products", *moe_peers.PEERS)
FP8 = ("fp8", "fp8_tensor")
DEFAULT = tuple(name for name in ARMS if name not in (*moe_peers.PEERS, *FP8))
DECODE_ARMS = ("ours", "composed", "readme_old", "permutation")  # of bfloat16; nvfp4: the first two
DECODE_TOKENS = (1, 8, 64)
LAYERS = 10
TOLERANCE = 3e-2  # relative, of bfloat16 against bfloat16
FP8_TOLERANCE = 0.12
VERSIONS = ("jaxlib", "torch", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")


# ---- comparing -----------------------------------------------------------------------------------


def _some_experts(w):
    """Three matrices of a weight's gradient."""
    return w[jnp.asarray([0, w.shape[0] // 2, w.shape[0] - 1])]


@jax.jit
def sampled(result: dict) -> tuple[dict, jax.Array]:
    """The values that are compared, and whether everything is finite."""
    parts = {n: _some_experts(v) if n in ("up", "down") else v for n, v in result.items()}
    return parts, jnp.stack([jnp.isfinite(v).all() for v in jax.tree.leaves(result)]).all()


@jax.jit
def relative(parts: dict, wanted: dict) -> dict:
    wide = lambda v: v.astype(jnp.float32)
    norm = lambda v: jnp.sqrt(jnp.sum(jnp.square(v)))
    return {n: norm(wide(v) - wide(wanted[n])) / norm(wide(wanted[n])) for n, v in parts.items()}


@jax.jit
def _combined(products: dict, routing, weight) -> dict:
    """Those results of the products that a layer has, too."""
    y = jgg.combine(products["y"], routing, weight)
    return {"y": y} | {n: v for n, v in products.items() if n in ("up", "down")}


def errors(arm, wanted: dict, combine=None) -> dict[str, float]:
    result = arm.result()
    if not isinstance(result, dict):
        result = dict(zip(("y", "x", "router", "up", "down"), result, strict=False))
    everything, finite = sampled(result)
    if combine is not None:
        everything, _ = sampled(combine(result))
    if not finite:
        return {"not finite": math.nan}
    return {n: float(e) for n, e in relative(arm.convert(everything), wanted).items()}


def reference(program: Program, args) -> dict:
    return jax.block_until_ready(sampled(made(program, *args))[0])


# ---- measuring -----------------------------------------------------------------------------------


def timed(arms: dict, args) -> dict[str, dict]:
    """Times of arms by name; None where one failed, which is printed."""
    times, failed = timing.interleaved(arms, args.repetitions, args.turns)
    for name, why in failed.items():
        print(f"{name} failed: {why}", flush=True)
    out = {}
    for name, us in times.items():
        try:
            wall = arms[name].wall(max(args.repetitions // 2, 2))
        except Exception:
            traceback.print_exc()
            wall = math.nan
        ms = {"min": 1e-3 * min(us), "median": 1e-3 * statistics.median(us)}
        out[name] = {"ms": ms, "wall_ms": wall}
    return out


def described(record: dict) -> str:
    ms, worst = record["ms"], max(record["errors"].values(), default=math.nan, key=_nan_last)
    text = f"{record['shape']:20} {record['direction']:17} {record['arm']:12}"
    text += f" {ms['median']:9.4f} ms (min {ms['min']:.4f}, wall {record['wall_ms']:.4f})"
    if record.get("tflops"):
        text += f" {record['tflops']:6.1f} TFLOP/s"
    if record.get("of_C"):
        text += f" {record['of_C']:4.0%} of C"
    if record.get("of_B"):
        text += f" {record['of_B']:4.0%} of B"
    text += f" {record['temporaries_gib']:6.2f} GiB, error {worst:.1e}"
    return text + ("" if record["right"] else "  WRONG: " + str(record["errors"]))


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def right(name: str, found: dict[str, float]) -> bool:
    limit = FP8_TOLERANCE if name in FP8 else TOLERANCE
    return bool(found) and all(e <= limit for e in found.values())  # NaN is not


def record(shape: Shape, direction: str, name: str, arm, found: dict, times: dict) -> dict:
    """An arm's entry in the record, which is printed, too."""
    known = {
        "shape": shape.name, "tokens": shape.tokens, "width": shape.width, "hidden": shape.hidden,
        "experts": shape.experts, "k": shape.k, "direction": direction, "arm": name, **times,
        "how": arm.how, "temporaries_gib": arm.temporaries, "errors": found,
        "right": right(name, found),
    }  # fmt: skip
    print(described(known), flush=True)
    return known


def close(arms: dict) -> None:
    for name, arm in arms.items():
        try:
            arm.close()
        except Exception:
            traceback.print_exc()
            print(f"{name} did not close", flush=True)


def measure(shape: Shape, compiler: Compiler, args, c: float | None) -> list[dict]:
    """Records of a shape, of every direction and arm."""
    records = []
    given = made(compiler[shape, "data"])
    up, down = given[2:4]
    ready = None
    if "products" in args.arms:
        try:
            ready = made(compiler[shape, "operands"], *given)
        except Exception:
            traceback.print_exc()
    for direction, back in moe_cases.DIRECTIONS.items():
        try:
            wanted = reference(compiler[shape, direction, "composed"], given)
        except Exception:
            traceback.print_exc()
            print(f"{shape.name} {direction}: composed failed; not compared", flush=True)
            wanted = None
        arms, found = {}, {}
        for name in args.arms:
            if (why := unsupported(name, shape)) is not None:
                print(f"{shape.name:20} {direction:17} {name:12} not run: {why}", flush=True)
                continue
            combine = None
            try:
                if name in moe_peers.PEERS:
                    arms[name] = moe_peers.PEERS[name](given, shape.k, back)
                elif name == "products":
                    if ready is None:
                        raise RuntimeError("its operands could not be made")
                    program = compiler[shape, direction, name]
                    arms[name] = Arm(program, (up, down, ready[0]))
                    combine = functools.partial(_combined, **ready[1])
                else:
                    arms[name] = Arm(compiler[shape, direction, name], given)
                found[name] = {} if wanted is None else errors(arms[name], wanted, combine)
            except Exception:
                traceback.print_exc()
                print(f"{shape.name} {direction} {name} failed", flush=True)
                if name in arms:
                    close({name: arms.pop(name)})
        for name, times in timed(arms, args).items():
            flops = shape.flops(back)
            rate = flops / times["ms"]["median"] / 1e9
            more = {"flops": flops, "tflops": rate, "of_C": c and rate * 1e12 / c}
            records.append(record(shape, direction, name, arms[name], found[name], times | more))
        close(arms)
    return records


# ---- decode --------------------------------------------------------------------------------------


def touched(x, layers, k: int) -> float:
    """Bytes of weights that a layer reads, in the mean."""
    total = 0.0
    for router, *weights in layers:
        chosen = np.unique(np.asarray(moe_layers.routed(x, router, k)[1])).size
        bytes_ = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        total += router.nbytes + bytes_ * chosen / router.shape[1]
    return total / len(layers)


def decode(shape: Shape, args, b: float | None, layers: int = LAYERS) -> list[dict]:
    records = []
    make = jax.jit(functools.partial(moe_cases.decode_weights, shape))
    pack = jax.jit(moe_cases.packed)
    for weights, names in (("bfloat16", DECODE_ARMS), ("nvfp4", DECODE_ARMS[:2])):
        names = [n for n in names if n in args.arms]
        if not names:
            continue
        stack = []
        for i in range(layers):
            router, up, down = make(i)
            if weights == "nvfp4":
                with warnings.catch_warnings(action="ignore"):  # what has no layout stays
                    up, down = pack(up), pack(down)
            stack.append(jax.block_until_ready((router, up, down)))
        compiler = Compiler()
        xs = {
            t: jax.jit(functools.partial(moe_cases.tokens, count=t, shape=shape))(jax.random.key(t))
            for t in DECODE_TOKENS
        }
        for t, x in xs.items():
            for name in dict.fromkeys(["composed", *names]):
                compiler.add((t, name), moe_cases.decode_call(name, shape.k), (x, stack))
        compiler.wait()
        for t, x in xs.items():
            direction = f"decode {weights}"
            bytes_ = touched(x, stack, shape.k)
            try:
                wanted = {"y": made(compiler[t, "composed"], x, stack)["y"] - x}
            except Exception:
                traceback.print_exc()
                wanted = None
            arms, found = {}, {}
            for name in names:
                try:
                    arms[name] = Arm(compiler[t, name], (x, stack))
                    added = lambda result, x=x: {"y": result["y"] - x}
                    found[name] = {} if wanted is None else errors(arms[name], wanted, added)
                except Exception:
                    traceback.print_exc()
                    print(f"{direction} T={t} {name} failed", flush=True)
                    arms.pop(name, None)
            for name, times in timed(arms, args).items():
                ms = {key: value / layers for key, value in times["ms"].items()}
                more = {"ms": ms, "wall_ms": times["wall_ms"] / layers, "layers": layers}
                more |= {"bytes": bytes_, "of_B": b and bytes_ / (1e-3 * ms["median"]) / b}
                few = dataclasses.replace(shape, name=f"{shape.name} T={t}", tokens=t)
                records.append(record(few, direction, name, arms[name], found[name], more))
            close(arms)
        del stack
    return records


# ---- what is shown -------------------------------------------------------------------------------


def text(records: list[dict]) -> str:
    """Medians, a line per shape and direction, a column per arm; decode in us a layer."""
    out = []
    for few, unit in ((False, "ms"), (True, "us a layer")):
        some = [r for r in records if r["direction"].startswith("decode") == few]
        if not some:
            continue
        arms = list(dict.fromkeys(r["arm"] for r in some))
        by = {(r["shape"], r["direction"], r["arm"]): r for r in some}
        rows = []
        for shape, direction in dict.fromkeys((r["shape"], r["direction"]) for r in some):
            cells = [by.get((shape, direction, arm)) for arm in arms]
            rows.append([f"{shape}, {direction}", *(_cell(r, few) for r in cells)])
        out.append(table([unit, *arms], rows))
    return "\n\n".join(out)


def _cell(record: dict | None, few: bool) -> str:
    """The median; by the wall for decode, and the temporaries in GiB otherwise, in parentheses."""
    if record is None:
        return ""
    median = record["ms"]["median"]
    if few:
        value = f"{1e3 * median:.1f} ({1e3 * record['wall_ms']:.1f})"
    else:
        value = f"{median:.2f} ({record['temporaries_gib']:.1f})"
    return value if record["right"] else value + " wrong"


def load(paths) -> list[dict]:
    """Several records as one; the last one's facts stand for all."""
    found = {}
    for r in rows(paths):
        found[r["shape"], r["direction"], r["arm"]] = r
    return list(found.values())


def draw(records: list[dict], folder: Path) -> None:
    from . import plots

    folder.mkdir(parents=True, exist_ok=True)
    plots.layers(records, folder / "moe.svg")


def arguments(argv=None) -> argparse.Namespace:
    parser = new_parser("moe", __doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", help="those whose name holds one of these; 'decode' is one")
    add("--arms", nargs="+", default=list(DEFAULT), choices=[*ARMS, "all"])
    add("--tokens", type=int, help="in place of those that the shapes have; not of 'decode'")
    add("--quick", action="store_true", help="few repetitions")
    add("--repetitions", type=int, help="20 by default, 6 with --quick")
    add("--turns", type=int, help="the arms' repetitions are cut into so many")
    add("--plots", type=Path, metavar="FOLDER", help="draws moe.svg there")
    record_options(add, "shape", "show and draw these", nargs="+")
    args = parser.parse_args(argv)
    args.arms = list(ARMS) if "all" in args.arms else list(dict.fromkeys(args.arms))
    args.repetitions = args.repetitions or (6 if args.quick else 20)
    args.turns = args.turns or (2 if args.quick else 4)
    return args


def selected(args) -> tuple[list[Shape], bool]:
    """Shapes, and whether decode is one."""
    names = args.shapes or ["", "decode"]
    shapes = [s for s in SHAPES if any(p in s.name for p in names)]
    if args.tokens:
        t = args.tokens
        shapes = [dataclasses.replace(s, name=f"{s.name} T={t}", tokens=t) for s in shapes]
    return shapes, "decode" in names


def header(args, c: float, b: float) -> dict:
    command = ["python -m benchmarks.moe", "--arms", *args.arms]
    command += ["--shapes", *args.shapes] if args.shapes else []
    command += ["--tokens", str(args.tokens)] if args.tokens else []
    return run_header(args, VERSIONS) | {
        "command": " ".join(command), "repetitions": args.repetitions,
        "C_tflops": c / 1e12, "B_tbytes": b / 1e12,
    }  # fmt: skip


def main(argv=None) -> int:
    args = arguments(argv)
    if args.records:
        records = load(args.records)
        print(text(records))
        if args.plots:
            draw(records, args.plots)
        return 0
    shapes, decoding = selected(args)
    if not shapes and not decoding:
        raise SystemExit("no such shape: " + ", ".join([*(s.name for s in SHAPES), "decode"]))
    # Torch takes what JAX leaves, so with torch JAX takes what it needs.
    if any(name in moe_peers.PEERS for name in args.arms):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if jax.default_backend() != "gpu":
        raise SystemExit(
            f"python -m benchmarks.moe needs an NVIDIA GPU, and jax sees only {jax.devices()}."
        )
    without = {
        name: why
        for name in args.arms
        if name in moe_peers.PEERS and (why := moe_peers.unavailable(name))
    }
    for name, why in without.items():
        print(f"without {name}: {why}", flush=True)
    args.arms = [name for name in args.arms if name not in without]
    if not args.arms:
        raise SystemExit("no arm is left")
    began = time.perf_counter()
    compiler = Compiler()
    for shape in shapes:
        plan(compiler, shape, args.arms)
    compiler.wait()
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    flops, b = timing.ceilings(["bfloat16"])
    c = flops["bfloat16"]
    head = header(args, c, b) | {"unavailable": without}
    print(f"{head['gpu']}: C = {c / 1e12:.0f} TFLOP/s, B = {b / 1e12:.2f} TB/s", flush=True)
    records, bad = [], 0

    def keep(more) -> None:
        records.extend(more())
        write_record(args.json, head | {"records": records})

    todo = {s.name: functools.partial(measure, s, compiler, args, c) for s in shapes}
    if decoding:
        todo["decode"] = functools.partial(decode, DECODE, args, b)
    for name, more in todo.items():
        try:
            keep(more)
        except Exception:
            traceback.print_exc()
            print(f"{name} failed", flush=True)
            bad += 1
    print(f"\n{text(records)}\n\n{time.perf_counter() - began:.0f} s in all")
    if args.plots:
        draw(records, args.plots)
    return 1 if bad or not records or not all(r["right"] for r in records) else 0


if __name__ == "__main__":
    raise SystemExit(main())
