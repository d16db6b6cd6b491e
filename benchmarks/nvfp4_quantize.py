"""nvfp4_quantize: operands, our arm, checks. There are no peers.

One element of activations is far larger than the others, and in their first block: so a part of
them that has it has the scale of all, and the CPU can make the same bytes from the part.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

from . import timing
from .quantized_shapes import Nvfp4Quantize

LARGEST = 64.0  # of normal numbers, which a block of 16 cannot sum to
LINES = {-1: 256, -2: 16}  # rows or columns that are compared at either end
NORM = 0.05  # how much that of a row or column may change


@dataclass
class Operands:
    x: jax.Array
    more: dict[str, jax.Array]  # group sizes and random words, where a call needs them


def operands(case: Nvfp4Quantize) -> Operands:
    timing.forget()
    x, more = timing.random(0, case.shape), {}
    if not case.is_weights:
        x = jax.jit(lambda x: x.at[0, 0].set(LARGEST), donate_argnums=0)(x)
    if any("grouped" in options for options in case.calls):
        more["sizes"] = jnp.asarray(case.sizes())
    if any("stochastic" in options for options in case.calls):
        more["words"] = jax.random.key_data(jax.random.key(7))
    return Operands(x, more)


def quantize(options: dict, x, more, op: Callable = jgg.nvfp4_quantize) -> jgg.Quantized:
    """A call of ``op`` with options of quantized_shapes.NVFP4_QUANTIZE, or of another's list."""
    given = {n: value for n, value in options.items() if n not in ("grouped", "stochastic")}
    if "grouped" in options:
        given["group_sizes"] = more["sizes"]
    if "stochastic" in options:
        given["stochastic_rounding_key"] = jax.random.wrap_key_data(more["words"])
    return op(x, **given)


def all_calls(case: Nvfp4Quantize, x, more) -> list[jgg.Quantized]:
    return [quantize(options, x, more) for options in case.calls]


def arms(case: Nvfp4Quantize, v: Operands, args) -> dict[str, Callable]:
    del args  # one kernel
    f = functools.partial(all_calls, case)
    return {"ours": lambda: timing.JaxArm(f, (v.x, v.more), case.cold)}


def complete(case: Nvfp4Quantize) -> tuple[str, ...]:
    """Peers without which a record of such cases is partial."""
    del case
    return ()


PEERS: dict[str, Callable] = {}


def peer_arms(case: Nvfp4Quantize, v: Operands, args) -> dict[str, Callable]:
    del case, v, args
    return {}


def checker(case: Nvfp4Quantize, v: Operands) -> Callable[[Any], float]:
    """A function from results to the largest share of bytes that are not the CPU's, of some
    matrices, rows or columns; 1 where any row or column has another norm than what it was."""
    checks = [
        (of_matrices if case.is_weights else of_lines)(case, options, v) for options in case.calls
    ]

    def error(out) -> float:
        shares = [
            differing(part(q), want)
            for q, wants in zip(out, checks, strict=True)
            for part, want in wants
        ]
        norms = all(
            bool(change_of_norms(q, v.x, axis_of(options)) <= NORM)
            for q, options in zip(out, case.calls, strict=True)
        )
        return max(shares) if norms else 1.0

    return error


def axis_of(options: dict) -> int:
    return -2 if options.get("axis") in (0, -2) else -1


@functools.cache
def compiled(*options) -> Callable:
    return jax.jit(functools.partial(quantize, dict(options)))


def on_cpu(options: dict, x, more) -> list[np.ndarray]:
    x, more = jax.device_get((x, more))
    with jax.default_device(jax.devices("cpu")[0]):
        return leaves_of(compiled(*options.items())(jnp.asarray(x), more))


def leaves_of(q: jgg.Quantized) -> list[np.ndarray]:
    leaves = q.weight, q.scales, q.global_scale, q.positions
    return [np.asarray(leaf) for leaf in leaves if leaf is not None]


def of_matrices(case: Nvfp4Quantize, options: dict, v: Operands):
    """Functions that take a matrix from a result, and what the CPU makes of it."""
    matrix = lambda g: lambda q: leaves_of(jax.tree.map(lambda leaf: leaf[g], q))
    some = sorted({0, case.groups // 2, case.groups - 1})
    return [(matrix(g), on_cpu(options, v.x[g], v.more)) for g in some]


def of_lines(case: Nvfp4Quantize, options: dict, v: Operands):
    """The same of the first and the last rows or columns: those along which blocks run."""
    axis = axis_of(options)
    total = v.x.shape[-3 - axis]
    count = min(LINES[axis], total // 2)
    take = lambda some: v.x[some] if axis == -1 else v.x[:, some]

    def part(some):
        more = dict(v.more)
        if "grouped" in options and axis == -1:  # all rows are in one group or another
            more["sizes"] = jnp.full(1, count, jnp.int32)
        taken = lambda q: [np.asarray(leaf[some]) for leaf in (q.weight, q.scales)]
        return lambda q: taken(q) + leaves_of(q)[2:], on_cpu(options, take(some), more)

    first, last = np.arange(count), np.arange(total - count, total)
    last[0] = 0  # with the largest element
    # The random bits of a line follow from its number.
    return [part(first)] if "stochastic" in options else [part(first), part(last)]


def differing(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """The share of bytes."""
    as_bytes = lambda leaves: [np.frombuffer(leaf.tobytes(), np.uint8) for leaf in leaves]
    pairs = zip(as_bytes(got), as_bytes(want), strict=True)
    return max(float(np.mean(a != b)) if len(a) == len(b) else 1.0 for a, b in pairs)


@functools.partial(jax.jit, static_argnums=2)
def change_of_norms(q: jgg.Quantized, x, axis: int):
    """The largest of any line of blocks: where something is missing it is large."""
    norm = lambda values: jnp.linalg.norm(values.astype("float32"), axis=axis)
    return jnp.max(jnp.abs(norm(jgg.dequantize(q)) / norm(x) - 1))
