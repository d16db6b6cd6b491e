"""Whether transfers of a sharded layer run beside its products: from a trace of every GPU.

python -m benchmarks.overlap [--devices 4] [--tokens 8192 32768] [--json FILE]
python -m benchmarks.overlap --records FILE         # measures nothing: its table

The layer is that of ``benchmarks.expert_parallel``: Qwen3-30B-A3B's experts in bfloat16, even
routing. "halves" is "gather" of half of the tokens, twice. A row has milliseconds of a call on a
GPU, as means over GPUs. ``wall`` is from the first kernel's begin to the last one's end;
``transfers``, in which a kernel of NCCL runs, which also waits there for the other GPUs;
``others``, in which any other kernel runs; ``both``, in which one of each runs; ``idle``, in which
none runs.

XLA_FLAGS is recorded: --xla_gpu_enable_latency_hiding_scheduler=true and others are given there.
"""

import dataclasses
import functools
import os
import statistics
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import jax_groupgemm as jgg

from . import trace
from .expert_parallel import header
from .expert_parallel_cases import AXIS, EACH, QWEN, made, mesh_of, tokens, weights
from .moe_cases import DIRECTIONS
from .options import new_parser, record_options
from .records import runs, write_record
from .report import table

WAYS = ("gather", "halves", "all_to_all")
PARTS = ("wall", "transfers", "others", "both", "idle")
CALLS = 4  # of a trace


def layer_call(devices: int, way: str, back: bool):
    """A function of x, up, down, experts, weights and dy: the result, and all gradients."""
    transport = "all_to_all" if way == "all_to_all" else "gather"
    run = functools.partial(jgg.moe_mlp, axis_name=AXIS, transport=transport)

    def layer(x, up, down, index, weight):
        parts = 2 if way == "halves" else 1
        cut = zip(*(jnp.split(a, parts) for a in (x, index, weight)), strict=True)
        return jnp.concatenate([run(x, up, down, index, weight) for x, index, weight in cut])

    sharded = jax.shard_map(layer, mesh=mesh_of(devices), in_specs=(EACH,) * 5, out_specs=EACH)

    def forward(x, up, down, index, weight, dy):
        del dy
        return sharded(x, up, down, index, weight)

    def both(x, up, down, index, weight, dy):
        of = lambda x, up, down, weight: sharded(x, up, down, index, weight)
        y, pull = jax.vjp(of, x, up, down, weight)
        return y, *pull(dy)

    return jax.jit(both if back else forward)


def parts_of(runs: list[tuple[str, trace.Interval]], calls: int) -> dict[str, float]:
    """Milliseconds of a call, by :data:`PARTS`."""
    transfers = [interval for name, interval in runs if "nccl" in name.lower()]
    others = [interval for name, interval in runs if "nccl" not in name.lower()]
    every = [*transfers, *others]
    wall = max(end for _, end in every) - min(begin for begin, _ in every)
    found = {
        "wall": wall,
        "transfers": trace.length(transfers),
        "others": trace.length(others),
        "both": trace.shared(transfers, others),
        "idle": wall - trace.length(every),
    }
    return {name: ns / 1e6 / calls for name, ns in found.items()}


def measured(call, args, devices: int) -> dict[str, float]:
    """Parts of a call, as means over the GPUs."""
    for _ in range(2):  # the second one of a program is recorded as a command buffer
        jax.block_until_ready(call(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            outs = [call(*args) for _ in range(CALLS)]
            jax.block_until_ready(outs)
        planes = [*trace.planes_of(Path(folder))]
        found = [parts_of(trace.runs(planes, gpu), CALLS) for gpu in range(devices)]
    return {name: statistics.mean(of[name] for of in found) for name in PARTS}


def text(records: list[dict]) -> str:
    rows = [
        [f"{r['tokens']}, {r['direction']}, {r['way']}", *(f"{r[part]:.2f}" for part in PARTS)]
        for r in records
    ]
    return table(["tokens of each, ms", *PARTS], rows)


def main(argv=None) -> int:
    parser = new_parser("overlap", __doc__)
    add = parser.add_argument
    add("--devices", type=int, default=4)
    add("--tokens", nargs="+", type=int, default=[8192, 32768], help="of each device")
    record_options(add, show="show these")
    args = parser.parse_args(argv)
    if args.records:
        for run in runs(args.records):
            print(run["xla_flags"] or "no flags", text(run["records"]), sep="\n\n", end="\n\n")
        return 0
    given = os.environ.get("XLA_FLAGS", "")
    trace.keep_command_buffers()
    if jax.default_backend() != "gpu" or jax.local_device_count() < args.devices:
        raise SystemExit(
            f"python -m benchmarks.overlap needs {args.devices} NVIDIA GPUs, and jax sees only "
            f"{jax.devices()}."
        )
    args.repetitions = args.calls = CALLS
    head = header(args) | {"xla_flags": given}
    n, records = args.devices, []
    up, down = made(n, functools.partial(weights, QWEN))
    for count in args.tokens:
        shape = dataclasses.replace(QWEN, tokens=count)
        x, index, weight, dy = made(n, functools.partial(tokens, shape, count, n, "even"))
        for direction, back in DIRECTIONS.items():
            for way in WAYS:
                call = layer_call(n, way, back)
                found = measured(call, (x, up, down, index, weight, dy), n)
                records.append({"tokens": count, "direction": direction, "way": way} | found)
                print(text(records[-1:]).splitlines()[-1], flush=True)
    write_record(args.json, head | {"records": records})
    print(f"{head['gpu']}, {n} GPUs\n\n{text(records)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
