"""One mixture of experts of two products, forward and all gradients, in bfloat16 and in FP8.

python -m benchmarks.layer

"options": SwiGLU and the rows' scales are options of ``grouped_mm``, which differentiates them with
float32 sums; "by hand": both are written out, in bfloat16; "fp8": the same with products that
quantize their operands, weights too, and round to nearest. Milliseconds of a call from its launch
to its end, so gaps between kernels are in them; medians of calls, which all take in turns, after
rests.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp

import jax_groupgemm as jgg

SHAPES = ((128, 32768, 2048, 768), (8, 8192, 4096, 14336), (32, 32768, 2048, 1024))


def options(x, up, down, scale, sizes):
    h = jgg.grouped_mm(x, up, sizes, activation="swiglu")
    return jgg.grouped_mm(h, down, sizes, row_scale=scale)


def by_hand(x, up, down, scale, sizes):
    gate, value = jnp.split(jgg.grouped_mm(x, up, sizes), 2, axis=1)
    return jgg.grouped_mm(jax.nn.silu(gate) * value, down, sizes) * scale[:, None]


def fp8(x, up, down, scale, sizes):
    gate, value = jnp.split(jgg.fp8_grouped_linear(x, up, sizes), 2, axis=1)
    return jgg.fp8_grouped_linear(jax.nn.silu(gate) * value, down, sizes) * scale[:, None]


ARMS = {"options": options, "by hand": by_hand, "fp8": fp8}
TRANSPOSED = ("fp8",)  # whose weights are (experts, N, K)


@jax.jit
def transposed(x, up, down, scale):
    return x, up.swapaxes(1, 2), down.swapaxes(1, 2), scale


def operands(experts: int, rows: int, width: int, hidden: int):
    """x, both weights, the rows' scales; and sizes, of uniformly random routing."""
    keys = jax.random.split(jax.random.key(0), 5)
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    x = normal(keys[0], (rows, width))
    up = normal(keys[1], (experts, width, 2 * hidden)) / width**0.5
    down = normal(keys[2], (experts, hidden, width)) / hidden**0.5
    scale = jax.random.uniform(keys[3], (rows,), jnp.bfloat16)
    expert = jax.random.randint(keys[4], (rows,), 0, experts)
    return (x, up, down, scale), jnp.bincount(expert, length=experts)


def measure(shape, repetitions: int, arms=tuple(ARMS)) -> dict:
    """Milliseconds and gradients of arms."""
    normal, sizes = operands(*shape)
    calls, given, grads = {}, {}, {}
    for name in arms:
        loss = lambda *args, f=ARMS[name]: (f(*args, sizes).astype(jnp.float32) ** 2).mean()
        calls[name] = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
        given[name] = transposed(*normal) if name in TRANSPOSED else normal
        found = calls[name](*given[name])
        grads[name] = jax.block_until_ready(transposed(*found) if name in TRANSPOSED else found)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call(*given[name]))
            times[name].append(1e3 * (time.perf_counter() - begin))
            time.sleep(3e-3 * times[name][-1])
    ms = {name: statistics.median(of) for name, of in times.items()}
    return {"shape": shape, "ms": ms, "grads": grads}


def main(argv=None) -> list[dict]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", type=int, nargs=4, help="experts, rows, width, hidden width")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM",
                        help=", ".join(ARMS))  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=12)
    args = parser.parse_args(argv)
    shapes = [tuple(args.shape)] if args.shape else SHAPES
    print(f"{'experts rows width hidden':28}", *(f"{name:>12} ms" for name in args.arms))
    results = []
    for shape in shapes:
        results.append(measure(shape, args.repetitions, args.arms))
        columns = (f"{ms:15.3f}" for ms in results[-1]["ms"].values())
        print(f"{' '.join(map(str, shape)):28}", *columns, flush=True)
    return results


if __name__ == "__main__":
    main()
