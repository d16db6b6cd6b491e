"""The cases of benchmarks.expert_parallel: tokens, weights and programs, on some of the devices."""

import concurrent.futures
import dataclasses
import functools
import math
import time
import traceback
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_groupgemm as jgg
from jax_groupgemm._core.types import Transport

from . import moe_cases
from .moe_cases import GIB, Shape

AXIS = "expert"
EACH = P(AXIS)
QWEN = dataclasses.replace(moe_cases.SHAPES[0], name="Qwen3-30B-A3B")
TINY = Shape("tiny", 16, 64, 64, 8, 2)
TRANSPORTS: tuple[Transport, ...] = ("gather", "all_to_all")
COLLECTIVES = ("all_gather", "psum_scatter", "all_to_all")
RAGGED = "ragged_all_to_all"  # not on CPUs
PRECISIONS = ("bfloat16", "fp8")
HOT = 0  # an expert of the first device


# ---- data ----------------------------------------------------------------------------------------


@functools.cache
def mesh_of(devices: int) -> jax.sharding.Mesh:
    chosen = jax.local_devices()[:devices]
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=chosen)


def made(devices: int, f, spec=EACH) -> Any:
    """``f()``, made where it stays."""
    return jax.block_until_ready(jax.jit(f, out_shardings=NamedSharding(mesh_of(devices), spec))())


def tokens(shape: Shape, count: int, blocks: int, routing: str) -> tuple:
    """x, experts and weights of each token, and the result's cotangent: ``count`` tokens a block.
    A block's do not depend on how many there are."""

    def block(i):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), i), 4)
        x, dy = (jax.random.normal(key, (count, shape.width), jnp.bfloat16) for key in keys[:2])
        _, index = lax.top_k(jax.random.uniform(keys[2], (count, shape.experts)), shape.k)
        if routing == "hot":
            index = jnp.where(jnp.arange(shape.k) < shape.k // 2, HOT, index)
        weight = jax.nn.softmax(jax.random.normal(keys[3], index.shape))
        return x, index, weight, dy

    parts = jax.vmap(block)(jnp.arange(blocks))
    return tuple(a.reshape(blocks * count, a.shape[-1]) for a in parts)


def weights(shape: Shape, layer=0) -> tuple:
    """up and down, with gate and up as halves."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), layer))
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    up = normal(keys[0], (shape.experts, shape.width, 2 * shape.hidden)) * shape.width**-0.5
    return up, normal(keys[1], (shape.experts, shape.hidden, shape.width)) * shape.hidden**-0.5


def packed(shape: Shape, layers: int, devices: int) -> list[tuple]:
    """Those of several layers in nvfp4; each device packs the tiles of its experts."""
    run = jax.shard_map(
        lambda w: tuple(map(moe_cases.packed, w)), mesh=mesh_of(devices), in_specs=EACH,
        out_specs=EACH, check_vma=False,
    )  # fmt: skip
    pack = jax.jit(lambda layer: run(weights(shape, layer)))
    with warnings.catch_warnings(action="ignore"):  # what has no layout stays
        return [jax.block_until_ready(pack(i)) for i in range(layers)]


def fullest(index, experts: int, devices: int) -> int:
    """Pairs of the device that has most, rounded up to a multiple of 256."""
    of_device = np.asarray(index).reshape(-1) // (experts // devices)
    return -(-int(np.bincount(of_device).max()) // 256) * 256


# ---- programs ------------------------------------------------------------------------------------


class Arm:
    """A program of one of the meshes, and its operands."""

    how = "wall"

    def __init__(self, call, args, calls: int):
        memory = call.memory_analysis()
        self.temporaries = memory.temp_size_in_bytes / GIB if memory else math.nan
        self.call, self.args, self.calls = call, args, calls
        jax.block_until_ready(call(*args))

    def result(self) -> Any:
        return jax.block_until_ready(self.call(*self.args))

    def time(self, n: int) -> list[float]:
        """Microseconds of a call, n times of several calls in a row."""
        times, out = [], None
        for _ in range(n):
            begin = time.perf_counter()
            for _ in range(self.calls):
                out = self.call(*self.args)
            jax.block_until_ready(out)
            times.append(1e6 * (time.perf_counter() - begin) / self.calls)
        return times


def compiled(programs: dict, calls: int) -> dict[str, Arm]:
    """Arms of ``(f, args)`` by name, compiled beside each other. Those that fail are printed."""
    arms = {}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = {}
        for name, (f, args) in programs.items():
            try:
                running[name] = pool.submit(jax.jit(f).lower(*args).compile)
            except Exception:
                traceback.print_exc()
        for name, program in running.items():
            try:
                arms[name] = Arm(program.result(), programs[name][1], calls)
            except Exception:
                traceback.print_exc()
    for name in programs.keys() - arms.keys():
        print(f"{name} failed", flush=True)
    return arms


def name_of(devices: int, way: str | None) -> str:
    return f"{devices} {way}" if devices > 1 else "1"


def layer_call(
    devices: int, transport: Transport | None, back: bool, max_rows: int | None, precision: str
):
    """A function of x, up, down, experts, weights and dy: the result, and with ``back`` all
    gradients. In "fp8" tokens travel as codes, too."""
    recipe = None
    if precision == "fp8":
        recipe = jgg.FP8Recipe(dispatch="fp8" if devices > 1 else "bfloat16")
    layer = functools.partial(jgg.moe_mlp, max_rows=max_rows, recipe=recipe)
    if devices > 1:
        layer = jax.shard_map(
            functools.partial(layer, axis_name=AXIS, transport=transport), mesh=mesh_of(devices),
            in_specs=(EACH,) * 5, out_specs=EACH,
        )  # fmt: skip

    def forward(x, up, down, index, weight, dy):
        del dy
        return {"y": layer(x, up, down, index, weight)}

    def both(x, up, down, index, weight, dy):
        of = lambda x, up, down, weight: layer(x, up, down, index, weight)
        y, pull = jax.vjp(of, x, up, down, weight)
        return {"y": y, **dict(zip(("x", "up", "down", "weight"), pull(dy), strict=True))}

    return both if back else forward


def collective_call(devices: int, name: str):
    calls = {
        "all_gather": lambda a: lax.all_gather(a, AXIS, tiled=True),
        "psum_scatter": lambda a: lax.psum_scatter(a, AXIS, tiled=True),
        "all_to_all": lambda a: lax.all_to_all(a, AXIS, 0, 0, tiled=True),
        RAGGED: _even_shares,
    }
    return jax.shard_map(
        calls[name], mesh=mesh_of(devices), in_specs=EACH, out_specs=EACH, check_vma=False
    )


def _even_shares(a):
    """``all_to_all`` by ``ragged_all_to_all``."""
    devices = lax.axis_size(AXIS)
    share = jnp.full(devices, a.shape[0] // devices, jnp.int32)
    starts = jnp.arange(devices, dtype=jnp.int32) * share
    there = lax.axis_index(AXIS).astype(jnp.int32) * share
    return lax.ragged_all_to_all(a, jnp.zeros_like(a), starts, share, there, share, axis_name=AXIS)


def decode_call(shape: Shape, devices: int, way: str | None):
    """A function of x, layers of up and down, experts and weights."""

    def layer(x, up, down, index, weight):
        if devices == 1:
            return jgg.moe_mlp(x, up, down, index, weight)
        if way == "gather" or way == "all_to_all":
            return jgg.moe_mlp(x, up, down, index, weight, axis_name=AXIS, transport=way)
        first = lax.axis_index(AXIS) * (shape.experts // devices)
        y = jgg.moe_mlp(
            x, up, down, index, weight, expert_offset=first, preferred_element_type=jnp.float32
        )
        return lax.psum(y, AXIS).astype(x.dtype)

    def layers(x, stack, index, weight):
        # A quarter of a result, added in float32: else each layer would double what the one before
        # rounded, and ten of them would differ by 5 %.
        y = x.astype(jnp.float32)
        for i, (up, down) in enumerate(stack):
            of_layer = (index + 7 * i) % shape.experts
            y += 0.25 * layer(y.astype(x.dtype), up, down, of_layer, weight).astype(jnp.float32)
        return {"y": y}

    if devices == 1:
        return layers
    rows = EACH if way in TRANSPORTS else P()
    return jax.shard_map(
        layers, mesh=mesh_of(devices), in_specs=(rows, EACH, rows, rows), out_specs=rows
    )
