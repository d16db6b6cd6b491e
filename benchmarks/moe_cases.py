"""The cases of benchmarks.moe: shapes, their operands, and JAX's programs, which are compiled
beside each other."""

import concurrent.futures
import functools
import math
import time
import traceback
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_groupgemm as jgg

from . import moe_layers, timing

DIRECTIONS = {"forward": False, "forward+backward": True}
GIB = 2**30
COPIED = 2**33  # elements: more rows than this, copied for each expert, do not fit


@dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    width: int
    hidden: int
    experts: int
    k: int

    def flops(self, back: bool) -> int:
        """Those of the layer's products."""
        return 6 * self.tokens * self.k * self.width * self.hidden * (3 if back else 1)


SHAPES = (
    Shape("Qwen3-30B", 32768, 2048, 768, 128, 8),
    Shape("SonicMoE 7B n256", 24576, 1536, 256, 128, 8),
    Shape("SonicMoE 30B n1024", 32768, 4096, 1024, 64, 4),
    Shape("OLMoE", 16384, 2048, 1024, 64, 8),
    Shape("Mixtral", 8192, 4096, 14336, 8, 2),
    Shape("DeepSeek-V3", 4096, 7168, 2048, 256, 8),
    Shape("SonicMoE 30B n256", 32768, 4096, 256, 256, 16),
    Shape("SonicMoE 7B n1024", 24576, 1536, 1024, 32, 2),
)
DECODE = SHAPES[0]


# ---- data ----------------------------------------------------------------------------------------


def tokens(key, count: int, shape: Shape):
    """(T, D), whose first E columns are logits without a tie."""
    width, experts = shape.width, shape.experts
    if not experts <= min(width, 256):
        raise ValueError(f"{experts} experts: logits are distinct for up to {min(width, 256)}")
    first, second = jax.random.split(key)
    place = jnp.argsort(jax.random.uniform(first, (count, experts)), axis=1)
    step = 2.0 ** -round(math.log2(max(experts / 4, 1)))
    logits = (place - experts // 2).astype(jnp.bfloat16) * step
    rest = jax.random.normal(second, (count, width - experts), jnp.bfloat16)
    return jnp.concatenate([logits, rest], 1)


def _matrices(key, count: int, rows: int, columns: int):
    """(count, rows, columns), matrix by matrix, so that no more memory is needed than theirs."""
    one = lambda key: jax.random.normal(key, (rows, columns), jnp.bfloat16) * rows**-0.5
    return lax.map(one, jax.random.split(key, count))


def data(shape: Shape):
    """x, router, up, down and the result's cotangent."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = tokens(keys[0], shape.tokens, shape)
    router = jnp.eye(shape.width, shape.experts, dtype=jnp.bfloat16)
    up = _matrices(keys[1], shape.experts, shape.width, 2 * shape.hidden)
    down = _matrices(keys[2], shape.experts, shape.hidden, shape.width)
    return x, router, up, down, jax.random.normal(keys[3], x.shape, jnp.bfloat16)


def decode_weights(shape: Shape, layer):
    """Router, up and down of a layer. ``down`` leaves the logits in x as they are."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), layer), 3)
    router = jnp.eye(shape.width, shape.experts, dtype=jnp.bfloat16)
    router = router[:, jax.random.permutation(keys[0], shape.experts)]
    up = _matrices(keys[1], shape.experts, shape.width, 2 * shape.hidden)
    down = _matrices(keys[2], shape.experts, shape.hidden, shape.width)
    return router, up, down * (jnp.arange(shape.width) >= shape.experts).astype(down.dtype)


def packed(w):
    """nvfp4, as decode wants it."""
    return jgg.prepack(jgg.quantize(w, mode="nvfp4", contract=-2))


# ---- arms ----------------------------------------------------------------------------------------


def layer_call(name: str, k: int, back: bool):
    """A function of x, router, up, down and dy: the result and, with ``back``, all gradients."""
    layer = functools.partial(moe_layers.LAYERS[name], k=k)

    def forward(x, router, up, down, dy):
        del dy
        return {"y": layer(x, router, up, down)}

    def both(x, router, up, down, dy):
        y, pull = jax.vjp(layer, x, router, up, down)
        return {"y": y, **dict(zip(("x", "router", "up", "down"), pull(dy), strict=True))}

    return both if back else forward


class Program:
    """A call that is compiled, before there are operands; see timing.JaxArm."""

    def __init__(self, f, args):
        self.kind = jax.eval_shape(f, *args)
        into = lambda out, *args: f(*args)
        call = jax.jit(into, donate_argnums=0, keep_unused=True)
        self.lowered = call.lower(self.kind, *args)

    def compile(self) -> "Program":
        self.call = self.lowered.compile()
        memory = self.call.memory_analysis()
        self.temporaries = memory.temp_size_in_bytes / GIB if memory else math.nan
        del self.lowered
        return self


class Arm(timing.JaxArm):
    how = "kernels"

    def __init__(self, program: Program, args, cold: bool = True):
        self.call, self.kind, self.temporaries = program.call, program.kind, program.temporaries
        self.args, self.cold = args, cold

    def wall(self, n: int) -> float:
        """Milliseconds of one of n calls in a row, from outside."""
        out = self.result()
        begin = time.perf_counter()
        for _ in range(n):
            out = self.call(out, *self.args)
        jax.block_until_ready(out)
        return 1e3 * (time.perf_counter() - begin) / n

    convert = staticmethod(lambda parts: parts)


class Compiler:
    """Programs by key, compiled beside each other; those that fail say so when asked for."""

    def __init__(self, threads: int = 8):
        self.pool = concurrent.futures.ThreadPoolExecutor(threads)
        self.found: dict[Any, Any] = {}

    def add(self, key, f, args) -> None:
        if key in self.found:
            return
        try:
            self.found[key] = self.pool.submit(Program(f, args).compile)
        except Exception as why:
            traceback.print_exc()
            self.found[key] = why

    def wait(self) -> None:
        concurrent.futures.wait([v for v in self.found.values() if not isinstance(v, Exception)])
        self.pool.shutdown()

    def __getitem__(self, key) -> Program:
        value = self.found[key]
        if isinstance(value, Exception):
            raise value
        return value.result()


def unsupported(name: str, shape: Shape) -> str | None:
    if name == "ragged_dot":
        largest = shape.experts * shape.tokens * shape.k * max(shape.width, 2 * shape.hidden)
        if largest > COPIED:
            return f"copies rows for each expert, {2 * largest / GIB:.0f} GiB"
    return None


def plan(compiler: Compiler, shape: Shape, arms) -> None:
    """Everything of a shape that JAX compiles."""
    args = jax.eval_shape(functools.partial(data, shape))
    compiler.add((shape, "data"), functools.partial(data, shape), ())
    names = [n for n in moe_layers.LAYERS if n == "composed" or n in arms]
    for name in names:
        for direction, back in DIRECTIONS.items():
            if unsupported(name, shape) is None:
                compiler.add((shape, direction, name), layer_call(name, shape.k, back), args)
    if "products" in arms:
        operands = functools.partial(moe_layers.product_operands, k=shape.k)
        compiler.add((shape, "operands"), operands, args)
        read, _ = jax.eval_shape(operands, *args)
        for direction, back in DIRECTIONS.items():
            f = moe_layers.all_products if back else moe_layers.forward_products
            compiler.add((shape, direction, "products"), f, (args[2], args[3], read))


def made(program: Program, *args) -> Any:
    """The result of a program that is run once."""
    return jax.block_until_ready(program.call(timing.poison(program.kind), *args))


def decode_call(name: str, k: int):
    """The program of ten layers, as a function of x and their weights."""

    layer: Any = moe_layers.few if name == "ours" else moe_layers.LAYERS[name]

    def f(x, layers):
        for weights in layers:
            x = x + layer(x, *weights, k).astype(x.dtype)
        return {"y": x}

    return f
