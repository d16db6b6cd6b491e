"""A step of QLoRA: one MoE layer of Qwen3-30B-A3B, adapters of rank 16 on frozen experts.

    python -m benchmarks.qlora [--formats nvfp4 fp8 affine4] [--tokens 4096]

Times are those of a program that returns the loss and the gradients of the adapters and of x,
called from outside, and beside them the time of its kernels, and of those that multiply base
weights. Temporaries are what the compiled program takes beside arguments and results.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp

import jax_groupgemm as jgg

from . import quantized, timing
from .options import new_parser, record_options
from .quantized_shapes import FORMATS
from .records import commit, write_record

EXPERTS, TOP_K, WIDTH, HIDDEN, RANK = 128, 8, 2048, 768, 16
BASES = ("nvfp4", "mxfp4", "affine4", "mxfp8", "fp8")
# Parts of names of the kernels of products with quantized weights, and of those that pack them.
QUANTIZED = ("LinearWeights", "PackedWeights", "TransposedGemm", "QuantizedGemm", "FewRowsSm80",
             "Prepack")  # fmt: skip


def layer(x, frozen, adapters, expert, weight):
    plan = jgg.route(expert, EXPERTS)
    rows = jgg.dispatch(x, plan)
    product = functools.partial(jgg.grouped_qmm, group_sizes=plan.group_sizes)
    gate, up = jnp.split(product(rows, frozen[0], adapter=adapters[0]), 2, axis=1)
    out = product(jax.nn.silu(gate) * up, frozen[1], adapter=adapters[1])
    return jgg.combine(out, plan, weight)


def loss(adapters, x, frozen, expert, weight):
    return jnp.square(layer(x, frozen, adapters, expert, weight).astype("float32")).mean()


def operands(name: str, tokens: int, packed: bool, dtype: str):
    form, frozen = FORMATS[name], []
    for n, k in ((2 * HIDDEN, WIDTH), (WIDTH, HIDDEN)):
        w = quantized.Weights(form, EXPERTS, n, k, dtype)
        frozen.append(w.packed if packed else w.linear)
    shapes = ((WIDTH, RANK), (RANK, 2 * HIDDEN)), ((HIDDEN, RANK), (RANK, WIDTH))
    adapters = tuple(
        tuple(timing.random(i, (EXPERTS, *shape), dtype) / 32 for i, shape in enumerate(pair))
        for pair in shapes
    )
    x = timing.random(7, (tokens, WIDTH), dtype) / 64
    scores = timing.random(8, (tokens, EXPERTS), "float32")
    weight, expert = jax.lax.top_k(jax.nn.softmax(scores), TOP_K)
    return adapters, x, tuple(frozen), expert, weight


def measure(name: str, tokens: int, packed: bool, dtype: str, repetitions: int) -> dict:
    args = operands(name, tokens, packed, dtype)
    record = {"format": name, "layout": args[2][0].layout, "dtype": dtype, "tokens": tokens}
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*args).compile()
    value, grads = jax.block_until_ready(step(*args))
    assert jnp.isfinite(value), value
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        jax.block_until_ready([step(*args) for _ in range(4)])
        times.append((time.perf_counter() - begin) / 4)
    with timing.kernels() as found:
        jax.block_until_ready(step(*args))
    base = sum(ms for kernel, ms in found if any(part in kernel for part in QUANTIZED))
    memory = step.memory_analysis()
    assert memory is not None
    return record | {
        "ms": 1e3 * statistics.median(times), "kernels_ms": sum(ms for _, ms in found),
        "base_ms": base, "temporaries_gib": memory.temp_size_in_bytes / 2**30,
    }  # fmt: skip


def main(argv=None) -> None:
    parser = new_parser("qlora")
    add = parser.add_argument
    add("--formats", nargs="+", default=list(BASES), choices=FORMATS)
    add("--layouts", nargs="+", default=["linear", "sm90"], choices=["linear", "sm90"])
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    add("--tokens", type=int, default=4096)
    add("--repetitions", type=int, default=7)
    record_options(add)
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        raise SystemExit(f"benchmarks.qlora needs an NVIDIA GPU, and jax sees {jax.devices()}")
    head = {"gpu": jax.devices()[0].device_kind, "jax": jax.__version__}
    head |= {"commit": args.commit or commit()}
    records = []
    print("format   layout   dtype        ms  kernels     base  temporaries GiB")
    for name in args.formats:
        for layout in args.layouts:
            r = measure(name, args.tokens, layout == "sm90", args.dtype, args.repetitions)
            records.append(r)
            print(
                f"{name:8} {r['layout']:8} {args.dtype:8} {r['ms']:6.2f} {r['kernels_ms']:8.2f} "
                f"{r['base_ms']:8.2f} {r['temporaries_gib']:8.2f}",
                flush=True,
            )
            write_record(args.json, head | {"records": records})


if __name__ == "__main__":
    main()
