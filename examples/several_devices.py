"""A training run on several devices, of one process or of several: its mesh, and what is where.

Tokens are sharded over all devices. Each group of ``expert`` devices has all experts, a part on
each; ``data`` groups have the same ones. Everything else is on every device.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from options import Parser, count

TOKENS = P(("data", "expert"))
#: Seconds: how long a process waits for the others to start, and after how many without a sign of
#: life one counts as dead, which ends the others.
START, ALIVE = 120, 20


def add_options(parser: Parser) -> None:
    parser.option("--devices", 1, "of all processes, to train on", type=count)
    parser.option("--data", 1, "groups of devices that each have all experts", type=count)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of the first of --processes")
    parser.option("--processes", 1, "that train together", type=count)
    parser.option("--process-id", 0, "of this one: 0 is the first", type=int)


def check(parser: Parser, args: argparse.Namespace) -> None:
    """Refuse what cannot be divided."""
    groups = args.devices // args.data
    if args.devices % args.data or args.experts % groups:
        parser.error(
            f"--devices {args.devices} in {args.data} groups (--data) do not divide "
            f"--experts {args.experts}"
        )
    if args.batch % args.devices:
        parser.error(f"--batch {args.batch} is no multiple of --devices {args.devices}")
    if args.devices % args.processes:
        parser.error(f"--devices {args.devices} is no multiple of --processes {args.processes}")
    if (args.processes > 1) != (args.coordinator is not None):
        parser.error("--processes and --coordinator go together")
    if not 0 <= args.process_id < args.processes:
        parser.error(f"--process-id {args.process_id} is none of {args.processes} processes")


def start(args: argparse.Namespace) -> jax.sharding.Mesh | None:
    """The mesh, or None on one device. Without GPUs, devices are made of this machine's cores."""
    if args.devices == 1:
        return None
    here = args.devices // args.processes
    with contextlib.suppress(RuntimeError):  # there are devices already
        jax.config.update("jax_num_cpu_devices", here)
    if args.processes > 1:
        jax.distributed.initialize(
            args.coordinator, args.processes, args.process_id, initialization_timeout=START,
            heartbeat_timeout_seconds=ALIVE,
        )  # fmt: skip
    if len(jax.local_devices()) < here:
        raise SystemExit(f"--devices: each process needs {here}, has {len(jax.local_devices())}")
    devices = [
        device
        for process in range(args.processes)
        for device in [d for d in jax.devices() if d.process_index == process][:here]
    ]
    return jax.make_mesh(
        (args.data, args.devices // args.data), ("data", "expert"),
        axis_types=(AxisType.Auto,) * 2, devices=devices,
    )  # fmt: skip


def is_first() -> bool:
    """Whether this process prints and writes."""
    return jax.process_index() == 0


def shardings(mesh: jax.sharding.Mesh | None, shapes):
    """Each leaf of a state: experts, and what the optimizer knows of them, along "expert"."""
    if mesh is None:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(lambda _: here, shapes)

    def of(path, leaf):
        name = jax.tree_util.keystr(path)
        experts = leaf.ndim == 3 and ("w_up" in name or "w_down" in name)
        return NamedSharding(mesh, P("expert") if experts else P())

    return jax.tree_util.tree_map_with_path(of, shapes)


def on_every_device(mesh: jax.sharding.Mesh | None, a) -> jax.Array:
    return jnp.asarray(a) if mesh is None else jax.device_put(a, NamedSharding(mesh, P()))


def divided(mesh: jax.sharding.Mesh | None, sequences):
    """Sequences, each on one device."""
    if mesh is None or sequences.shape[0] % mesh.size:
        return sequences
    return jax.lax.with_sharding_constraint(sequences, NamedSharding(mesh, TOKENS))


def across(layer: Callable, mesh: jax.sharding.Mesh | None) -> Callable:
    """``layer(x, w_up, w_down, expert, weight, key=, axis_name=)``, of all devices' tokens; with
    ``state=`` where there is one, which all devices share."""
    if mesh is None:
        return layer

    def local(x, w_up, w_down, expert, weight, key, state):
        if key is not None:  # each device has random numbers of its own
            key = jax.random.fold_in(key, jax.lax.axis_index(("data", "expert")))
        more = {} if state is None else {"state": state}
        return layer(x, w_up, w_down, expert, weight, key=key, axis_name="expert", **more)

    def run(x, w_up, w_down, expert, weight, key=None, state=None):
        more = -x.shape[0] % math.prod(mesh.shape.values())
        add = lambda a, value: jnp.pad(a, ((0, more), (0, 0)), constant_values=value)
        # Tokens that are added meet no expert.
        operands = add(x, 0), w_up, w_down, add(expert, -1), add(weight, 0), key, state
        y = jax.shard_map(
            local, mesh=mesh, out_specs=TOKENS,
            in_specs=(TOKENS, P("expert"), P("expert"), TOKENS, TOKENS, P(), P()),
        )(*operands)  # fmt: skip
        return y[: x.shape[0]]

    return run
