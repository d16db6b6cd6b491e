"""Whole training steps of one mixture of experts: bfloat16, NVFP4 and FP8, eager and captured.

python -m benchmarks.step --json benchmarks/results/h200/training/step.json

A step routes every token to two experts, sorts, multiplies by gate, up and down projection, goes
back through all of it and updates the parameters (momentum; float32, cast in the step). Routing
follows from the parameters, and so changes with every step. Captured: XLA makes one CUDA graph of
as much of the step as it can, and replays it; eager: it launches each kernel. Times are of a chain
of steps, from the first's launch to the last's end, so gaps between kernels are in them; medians of
chains, which both take in turns. The last shape is so small that launching is what it takes.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp

import jax_groupgemm as jgg

from .quantized_shapes import NVFP4
from .records import commit

SHAPES = (*NVFP4, (8, 256, 512, 512))
TOP_K = 2
CAPTURE = {"captured": 1, "eager": 2**30}  # the fewest kernels that XLA makes a graph of


def bfloat16(x, w, sizes, key):
    del key
    return jgg.grouped_mm(x, w, sizes, transpose_w=True)


def nvfp4(x, w, sizes, key):
    return jgg.nvfp4_grouped_linear(x, w, sizes, key=key)


def fp8(x, w, sizes, key):
    return jgg.fp8_grouped_linear(x, w, sizes, key=key)


PRECISIONS = {"bfloat16": bfloat16, "nvfp4": nvfp4, "fp8": fp8}


def mixture(params, x, key, linear):
    """(tokens, width) -> the same: each token's experts, weighted by the router."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x.astype(jnp.float32) @ params["router"]), TOP_K)
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=params["gate"].shape[0])
    token = order // TOP_K
    rows = x[token]
    keys = jax.random.split(key, 3)
    product = lambda rows, name, key: linear(rows, params[name].astype(x.dtype), sizes, key)
    gate, up = product(rows, "gate", keys[0]), product(rows, "up", keys[1])
    y = product(jax.nn.silu(gate) * up, "down", keys[2])
    return jnp.zeros_like(x).at[token].add(y * weights.reshape(-1)[order, None].astype(y.dtype))


def train_step(state, x, target, *, linear):
    """The new state, and the loss: a mean square."""

    def loss(params):
        y = mixture(params, x, jax.random.fold_in(jax.random.key(0), state["step"]), linear)
        return jnp.square(y.astype(jnp.float32) - target).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"step": state["step"] + 1, "params": params, "momentum": momentum}, value


def new_state(experts: int, width: int, hidden: int):
    keys = jax.random.split(jax.random.key(1), 4)
    normal = lambda key, *shape: jax.random.normal(key, shape) * shape[-1] ** -0.5
    params = {
        "router": normal(keys[0], width, experts),
        "gate": normal(keys[1], experts, hidden, width),
        "up": normal(keys[2], experts, hidden, width),
        "down": normal(keys[3], experts, width, hidden),
    }
    return {
        "step": jnp.int32(0),
        "params": params,
        "momentum": jax.tree.map(jnp.zeros_like, params),
    }


class Arm:
    def __init__(self, precision: str, graph_size: int, state, data):
        self.state, self.data = state, data
        self.losses: list[float] = []
        f = functools.partial(train_step, linear=PRECISIONS[precision])
        options = {}
        if jax.default_backend() == "gpu":
            options = {"xla_gpu_graph_min_graph_size": graph_size}
        lowered = jax.jit(f, donate_argnums=0).lower(state, *data)
        self.step = lowered.compile(compiler_options=options)

    def run(self, steps: int) -> float:
        """Milliseconds of a step."""
        began = time.perf_counter()
        for _ in range(steps - 1):
            self.state, _ = self.step(self.state, *self.data)
        self.state, loss = self.step(self.state, *self.data)
        self.losses.append(float(loss))
        return 1e3 * (time.perf_counter() - began) / steps


def measure(shape, precision: str, steps: int, repetitions: int) -> dict:
    experts, tokens, width, hidden = shape
    x, target = (jax.random.normal(jax.random.key(i), (tokens, width)) for i in (2, 3))
    data = x.astype(jnp.bfloat16), target
    arms = {}
    for name, graph_size in CAPTURE.items():
        state = jax.jit(functools.partial(new_state, experts, width, hidden))()
        arms[name] = Arm(precision, graph_size, state, data)
        arms[name].run(3)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repetition in range(repetitions):
        for name in reversed(arms) if repetition % 2 else arms:
            times[name].append(arms[name].run(steps))
    return {
        "shape": shape, "precision": precision,
        "ms": {name: statistics.median(values) for name, values in times.items()},
        "losses": {name: arm.losses for name, arm in arms.items()},
    }  # fmt: skip


def main(argv=None) -> list[dict]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="*", type=int, default=range(len(SHAPES)), help="which")
    parser.add_argument("--shape", nargs=4, type=int, help="experts, tokens, width, hidden width")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--commit", help="recorded; by default what git says")
    args = parser.parse_args(argv)
    shapes = [tuple(args.shape)] if args.shape else [SHAPES[i] for i in args.shapes]
    records = []
    about = {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"), "commit": args.commit or commit(),
    }  # fmt: skip
    print("experts tokens width hidden  precision  captured ms  eager ms  losses agree")
    for shape in shapes:
        for precision in PRECISIONS:
            record = measure(shape, precision, args.steps, args.repetitions)
            records.append(record)
            same = record["losses"]["captured"] == record["losses"]["eager"]
            times = "  ".join(f"{record['ms'][name]:9.2f}" for name in CAPTURE)
            print(*shape, f" {precision:9}", times, f"  {'bitwise' if same else 'no'}", flush=True)
            if args.json:
                with open(args.json, "w") as file:
                    json.dump(about | {"records": records}, file, indent=1)
    return records


if __name__ == "__main__":
    main()
