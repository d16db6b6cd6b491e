"""The mixture-of-experts layer with experts on several GPUs of one process, and what it is made of.

python -m benchmarks.expert_parallel [--devices 1 2 4] [--tokens 8192 32768] [--json FILE]
python -m benchmarks.expert_parallel --parts collectives decode
python -m benchmarks.expert_parallel --records A.json B.json

``layer``: ``moe_mlp`` with Qwen3-30B-A3B's experts, forward, and forward with all gradients, of
which the result is returned, too. ``--precisions`` has bfloat16 and fp8, where tokens travel as
codes. ``--tokens`` are those of each device. Routing is "even", random experts of each token, all
different, with room for the worst case; or "hot", where half of all pairs are of one expert, with
``max_rows`` of the fullest device. There is no router.
``collectives``: XLA's. "ragged_all_to_all" has even shares, as "all_to_all" has. The rate is that
of bytes that arrive at a device from others.
``decode``: few tokens of all devices together, ten layers in one program, each with weights of its
own in nvfp4, prepacked and sharded by expert. Times are those of one layer. "all-reduce" has all
tokens on every device, and adds up what their experts give.

Times are from outside, of calls in a row: kernels of several devices run at the same time. All arms
of a case, of any number of devices, take turns after rests. The first device has the same tokens
whatever the number of devices, so y and the gradients of x and weight are compared there with those
of one device, and gradients of up and down between the transports.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import traceback

import jax
import jax.numpy as jnp
import numpy as np

from jax_groupgemm._core.types import Transport

from . import moe, timing
from .expert_parallel_cases import (
    COLLECTIVES,
    EACH,
    PRECISIONS,
    QWEN,
    RAGGED,
    TINY,
    TRANSPORTS,
    P,
    collective_call,
    compiled,
    decode_call,
    fullest,
    layer_call,
    made,
    name_of,
    packed,
    tokens,
    weights,
)
from .moe_cases import DIRECTIONS, Shape
from .options import device_options, devices_of, new_parser, record_options
from .records import rows, run_header, write_record
from .report import table

TOKENS = (8192, 16384, 32768)
DECODE_TOKENS = (8, 16, 32, 64, 128, 256, 512)
ROUTINGS = ("even", "hot")
PARTS = ("layer", "collectives", "decode")
LAYERS = 10
VERSIONS = ("jaxlib", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


# ---- comparing -----------------------------------------------------------------------------------


def first(a: jax.Array) -> jax.Array:
    """The first device's part."""
    return min(a.addressable_shards, key=lambda shard: shard.index[0].start or 0).data


def errors(parts: dict, alone: dict, gather: dict | None) -> dict[str, float]:
    """Relative errors of what can be compared; NaN for what is not finite."""
    wanted = {n: alone[n] for n in ("y", "x", "weight") if n in parts and n in alone}
    if gather is not None:
        wanted |= {n: gather[n] for n in ("up", "down") if n in parts}
    found = {n: float(e) for n, e in moe.relative({n: parts[n] for n in wanted}, wanted).items()}
    for n in parts.keys() - found.keys():
        if not np.isfinite(jnp.sum(jnp.abs(parts[n]), dtype=jnp.float32)):
            found[n] = math.nan
    return found


def right(found: dict[str, float]) -> bool:
    return bool(found) and all(e <= moe.TOLERANCE for e in found.values())  # NaN is not


def kept(record: dict) -> dict:
    """The record, which is printed, too."""
    print(described(record), flush=True)
    return record


def described(r: dict) -> str:
    ms = r["ms"]
    text = f"{r['part']:11} {label(r):32} {r['arm']:14} {ms['median']:9.4f} ms (min {ms['min']:.4f}"
    text += f"), {r['gbytes_s']:.0f} GB/s" if r["part"] == "collectives" else ")"
    if r["part"] != "collectives":
        worst = max(r["errors"].values(), default=math.nan, key=lambda e: (math.isnan(e), e))
        text += f", {r['temporaries_gib']:.2f} GiB, error {worst:.1e}"
    return text + ("" if r["right"] else "  WRONG: " + str(r.get("errors")))


def label(r: dict) -> str:
    """What a case of the part is."""
    if r["part"] == "layer":
        fp8 = ", fp8" if r.get("precision") == "fp8" else ""
        return f"{r['tokens']} a device, {r['routing']}, {r['direction']}{fp8}"
    return f"{r['mib']} MiB" if r["part"] == "collectives" else f"T={r['tokens']} of all"


# ---- measuring -----------------------------------------------------------------------------------


def timed(programs: dict, arms: dict, args) -> dict[str, dict]:
    """Milliseconds by arm; ``args.failed`` grows by the programs that have none."""
    times, failed = timing.interleaved(arms, args.repetitions, args.turns)
    for name, why in failed.items():
        print(f"{name} failed: {why}", flush=True)
    args.failed += [name for name in programs if name not in times]
    return {
        name: {"min": 1e-3 * min(us), "median": 1e-3 * statistics.median(us)}
        for name, us in times.items()
    }


def measure_layer(shape: Shape, args) -> list[dict]:
    """Of each direction and arm, of as many tokens a device as ``shape`` has."""
    records = []
    every = {n: made(n, functools.partial(weights, shape)) for n in args.devices}
    for routing in args.routings:
        rows: dict[int, int | None] = {}
        given = {}
        for n in args.devices:
            of_tokens = functools.partial(tokens, shape, shape.tokens, n, routing)
            x, index, weight, dy = made(n, of_tokens)
            given[n] = (x, *every[n], index, weight, dy)
            rows[n] = fullest(index, shape.experts, n) if routing == "hot" else None
        for precision, direction in itertools.product(args.precisions, DIRECTIONS):
            back = DIRECTIONS[direction]
            ways: list[tuple[int, Transport | None]] = [
                (n, way) for n in args.devices for way in (TRANSPORTS if n > 1 else (None,))
            ]
            programs = {
                name_of(n, way): (layer_call(n, way, back, rows[n], precision), given[n])
                for n, way in ways
            }
            arms = compiled(programs, args.calls)
            parts = {name: jax.tree.map(first, arm.result()) for name, arm in arms.items()}
            times = timed(programs, arms, args)
            for n, way in ways:
                name = name_of(n, way)
                if name not in times:
                    continue
                gather = parts.get(name_of(n, "gather")) if way == "all_to_all" else None
                found = errors(parts[name], parts.get("1", {}), gather)
                records.append(kept({
                    "part": "layer", "shape": dataclasses.asdict(shape), "devices": n,
                    "transport": way, "arm": name, "tokens": shape.tokens, "routing": routing,
                    "precision": precision, "direction": direction, "max_rows": rows[n],
                    "ms": times[name],
                    "tokens_per_s": 1e3 * n * shape.tokens / times[name]["median"],
                    "temporaries_gib": arms[name].temporaries, "errors": found,
                    "right": right(found),
                }))  # fmt: skip
            del arms, parts
    return records


def measure_collectives(mib: int, args) -> list[dict]:
    records = []
    width = 2048
    height = mib * 2**20 // (2 * width)
    for n in [n for n in args.devices if n > 1]:
        size = height // n * n
        whole, part = (
            made(n, lambda rows=rows: jnp.ones((rows, width), jnp.bfloat16))
            for rows in (n * size, size)
        )
        programs = {
            name_of(n, name): (collective_call(n, name), (part if name == "all_gather" else whole,))
            for name in (*COLLECTIVES, *([] if args.tiny else [RAGGED]))
        }
        arms = compiled(programs, args.calls)
        arriving = 2 * width * size * (n - 1) / n
        for name, ms in timed(programs, arms, args).items():
            collective = name.split()[1]
            want = n if collective == "psum_scatter" else 1
            records.append(kept({
                "part": "collectives", "devices": n, "arm": name, "collective": collective,
                "mib": mib, "ms": ms, "gbytes_s": arriving / ms["median"] / 1e6,
                "right": bool((arms[name].result() == want).all()),
            }))  # fmt: skip
    return records


def measure_decode(shape: Shape, args) -> list[dict]:
    records = []
    stacks = {n: packed(shape, args.layers, n) for n in args.devices}
    for count in args.decode_tokens:
        programs, about = {}, {}
        for n in args.devices:
            for way in (*TRANSPORTS, "all-reduce") if n > 1 else (None,):
                if way in TRANSPORTS and count % n:
                    continue
                spec = EACH if way in TRANSPORTS else P()
                of_tokens = functools.partial(tokens, shape, count, 1, "even")
                x, index, weight, _ = made(n, of_tokens, spec)
                args_ = (x, stacks[n], index, weight)
                programs[name_of(n, way)] = (decode_call(shape, n, way), args_)
                about[name_of(n, way)] = n, way, x
        arms = compiled(programs, args.calls)
        parts = {
            name: {"y": np.asarray(arm.result()["y"] - about[name][2].astype(jnp.float32))}
            for name, arm in arms.items()
        }
        for name, ms in timed(programs, arms, args).items():
            n, way, _ = about[name]
            found = errors(parts[name], parts.get("1", {}), None)
            records.append(kept({
                "part": "decode", "shape": dataclasses.asdict(shape), "devices": n, "way": way,
                "arm": name, "tokens": count, "layers": args.layers,
                "ms": {key: value / args.layers for key, value in ms.items()},
                "temporaries_gib": arms[name].temporaries, "errors": found, "right": right(found),
            }))  # fmt: skip
    return records


# ---- what is shown -------------------------------------------------------------------------------


def text(records: list[dict]) -> str:
    """A table of each part: medians, and in parentheses the throughput of all devices, of one's."""
    out = []
    for part, unit in zip(PARTS, ("ms", "GB/s", "us a layer"), strict=True):
        some = [r for r in records if r["part"] == part]
        if not some:
            continue
        arms = list(dict.fromkeys(r["arm"] for r in some))
        by = {(label(r), r["arm"]): r for r in some}
        rows = [
            [case, *(_cell(by.get((case, arm)), by.get((case, "1"))) for arm in arms)]
            for case in dict.fromkeys(map(label, some))
        ]
        out.append(table([f"{part}, {unit}", *arms], rows))
    return "\n\n".join(out)


def _cell(r: dict | None, one: dict | None) -> str:
    if r is None:
        return ""
    ms = r["ms"]["median"]
    if r["part"] == "collectives":
        value = f"{r['gbytes_s']:.0f}"
    elif r["part"] == "decode":
        value = f"{1e3 * ms:.1f}"
    else:
        value = f"{ms:.2f}"
        if one is not None and r["devices"] > 1:
            value += f" ({r['devices'] * one['ms']['median'] / ms:.2f}x)"
    return value if r["right"] else value + " wrong"


def load(paths) -> list[dict]:
    """Several records as one; of the same case the last one counts."""
    return list({(r["part"], label(r), r["arm"]): r for r in rows(paths)}.values())


def arguments(argv=None) -> argparse.Namespace:
    parser = new_parser("expert_parallel", __doc__)
    add = parser.add_argument
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    add("--precisions", nargs="+", default=["bfloat16"], choices=PRECISIONS, help="of layers")
    add("--routings", nargs="+", default=list(ROUTINGS), choices=ROUTINGS, help="of layers")
    device_options(add)
    add("--tokens", nargs="+", type=int, help="of each device")
    add("--decode-tokens", nargs="+", type=int, help="of all devices")
    add("--mib", type=int, help="of a collective's buffer on each device, 512 by default")
    add("--quick", action="store_true", help="few repetitions")
    add("--repetitions", type=int, help="6 by default, 2 with --quick or --tiny; of ten calls each")
    add("--turns", type=int, help="the arms' repetitions are cut into so many")
    record_options(add, "part", "show these", nargs="+")
    args = parser.parse_args(argv)
    few = args.quick or args.tiny
    args.repetitions = args.repetitions or (2 if few else 6)
    args.turns = args.turns or (1 if few else 3)
    args.tokens = args.tokens or ([TINY.tokens] if args.tiny else list(TOKENS))
    args.decode_tokens = args.decode_tokens or ([8] if args.tiny else list(DECODE_TOKENS))
    args.mib = args.mib or (1 if args.tiny else 512)
    args.layers = 2 if args.tiny else LAYERS
    # Programs that follow each other without a pause may lock CPU devices up.
    args.calls = 1 if args.tiny else 10
    args.failed = []
    return args


def header(args) -> dict:
    return run_header(args, VERSIONS) | {
        "devices": args.devices, "repetitions": args.repetitions, "calls": args.calls,
    }  # fmt: skip


def main(argv=None) -> int:
    args = arguments(argv)
    if args.records:
        print(text(load(args.records)))
        return 0
    args.devices = devices_of("expert_parallel", args)
    shape = TINY if args.tiny else QWEN
    head, records, bad = header(args), [], 0
    todo = {
        f"layer {count}": functools.partial(
            measure_layer, dataclasses.replace(shape, tokens=count), args
        )
        for count in (args.tokens if "layer" in args.parts else [])
    }
    if "collectives" in args.parts:
        todo["collectives"] = functools.partial(measure_collectives, args.mib, args)
    if "decode" in args.parts:
        todo["decode"] = functools.partial(measure_decode, shape, args)
    for name, more in todo.items():
        try:
            records += more()
        except Exception:
            traceback.print_exc()
            print(f"{name} failed", flush=True)
            bad += 1
        write_record(args.json, head | {"records": records})
    print(f"{head['gpu']}\n\n{text(records)}")
    wrong = [r["arm"] for r in records if not r["right"]]
    return 1 if bad or args.failed or wrong or not records else 0


if __name__ == "__main__":
    raise SystemExit(main())
