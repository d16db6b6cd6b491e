"""Products in FP8, as training has them, and their casts: operands, our arms, peers, checks.

Arms of ours: fp8_grouped_mm and fp8_grouped_wgrad on operands as fp8_quantize gives them;
``[casts]``: from bfloat16 rows, both operands of wgrad, weights quantized before; ``[bfloat16]``:
the product in bfloat16. The peer quantizes with one scale for each row, which is not timed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg
from jax_groupgemm._core import segments
from jax_groupgemm._fp8 import convert
from jax_groupgemm._fp8.grouped_mm import of_gradient

from . import timing
from .fp8_shapes import Linear, Product, Quantize
from .nvfp4_quantize import differing, leaves_of, quantize
from .peers import Unsupported, tensor
from .products import ours_name
from .quantized import checker_of_codes
from .quantized_peers import tensor_of
from .timing import JaxArm, TorchArm, torch

LINES = 128  # rows or columns of fp8_quantize that are compared at either end


class Operands:
    """``a`` (T, A) and the weights ``b`` (G, N, K); of wgrad x (T, K) and dy (T, N)."""

    def __init__(self, case: Product):
        self.sizes = jnp.asarray(case.sizes())
        self.wgrad = case.direction == "wgrad"
        self.x = timing.random(0, (case.rows, case.n if case.direction == "dgrad" else case.k))
        if self.wgrad:
            timing.forget()
            self.y = timing.random(1, (case.rows, case.n))
            self.a, self.b = (along(v, self.sizes) for v in (self.x, self.y))
            return
        shape = (case.groups, case.n, case.k)
        w = timing.kept(shape, lambda: timing.random(1, shape))
        self.a = rows_of(self.x, self.sizes)
        self.b = of_weights(w)

    @functools.cached_property
    def dense(self) -> tuple[jax.Array, jax.Array]:
        """Both operands, dequantized to bfloat16."""
        return jax.block_until_ready(jax.jit(dequantized)(self.a, self.b))


@jax.jit
def rows_of(x, sizes) -> jgg.Quantized:
    return jgg.fp8_quantize(x, group_sizes=sizes)


@jax.jit
def along(x, sizes) -> jgg.Quantized:
    return jgg.fp8_quantize(x, axis=0, group_sizes=sizes)


@jax.jit
def of_weights(w) -> jgg.Quantized:
    return jgg.quantize(w, mode="fp8", contract=-1)


def dequantized(a: jgg.Quantized, b: jgg.Quantized) -> tuple[jax.Array, jax.Array]:
    return jgg.dequantize(a, "bfloat16"), jgg.dequantize(b, "bfloat16")


@dataclasses.dataclass
class Converted:
    x: jax.Array
    more: dict[str, jax.Array]  # group sizes and random words, where a call needs them


def operands(case: Product | Quantize) -> Operands | Converted:
    if isinstance(case, Product):
        return Operands(case)
    timing.forget()
    more = {}
    if "grouped" in case.options:
        more["sizes"] = jnp.asarray(case.sizes())
    if "stochastic" in case.options:
        more["words"] = jax.random.key_data(jax.random.key(7))
    return Converted(timing.random(0, case.shape), more)


def product(direction: str, implementation, a, b, sizes) -> jax.Array:
    if direction == "dgrad":
        return of_gradient("fp8_grouped_linear", a, b, segments.sizes(sizes), jnp.bfloat16)
    op = jgg.fp8_grouped_wgrad if direction == "wgrad" else jgg.fp8_grouped_mm
    return op(a, b, sizes, implementation=implementation)


def with_casts(direction: str, a, b, sizes) -> jax.Array:
    if direction == "wgrad":
        return product(direction, None, along(a, sizes), along(b, sizes), sizes)
    return product(direction, None, rows_of(a, sizes), b, sizes)


def quantized(options: dict, x, more) -> jgg.Quantized | tuple[jgg.Quantized, jgg.Quantized]:
    if "both" in options:
        return convert.quantized_lines(x, more["sizes"])
    return quantize(options, x, more, jgg.fp8_quantize)


def arms(case: Product | Quantize, v: Any, args) -> dict[str, Callable]:
    if isinstance(case, Quantize):
        f = functools.partial(quantized, case.options)
        return {"ours": lambda: JaxArm(f, (v.x, v.more), case.cold)}
    direction = case.direction
    arm = lambda f, a, b: functools.partial(JaxArm, f, (a, b, v.sizes), case.cold)
    out: dict[str, Callable] = {
        ours_name(i, None): arm(functools.partial(product, direction, i), v.a, v.b)
        for i in (args.implementation if direction != "dgrad" else [None])
    }
    wide = (v.x, v.y) if v.wgrad else (v.x, v.b)
    out["ours[casts]"] = arm(functools.partial(with_casts, direction), *wide)
    out["ours[bfloat16]"] = lambda: arm(functools.partial(dense, direction), *v.dense)()
    return out


def dense(direction: str, a, b, sizes) -> jax.Array:
    """The product in bfloat16; of wgrad with a bfloat16 result."""
    if direction != "wgrad":
        return jgg.grouped_mm(a, b, sizes, transpose_w=direction == "fprop")
    ends = jnp.cumsum(sizes)
    return jgg.segmented_mm(b, a, jnp.stack([ends - sizes, ends], 1), transpose_a=True)


def torch_arm(case: Product, v: Operands) -> TorchArm:
    """torch._scaled_grouped_mm: a scale for each row of both operands, fast accumulation."""
    if v.wgrad:
        raise Unsupported("its weight gradients need padded groups")
    a, b = map(tensor_of, v.dense)
    if case.direction == "dgrad":
        b = b.transpose(-2, -1)

    def scaled(t):
        scale = t.abs().amax(-1).float().clamp(min=1e-30) / 448
        return (t / scale[..., None]).to(torch().float8_e4m3fn).contiguous(), scale

    (a, a_scale), (b, b_scale) = scaled(a), scaled(b.contiguous())
    ends = tensor(np.cumsum(np.asarray(v.sizes)).astype(np.int32))
    run = lambda: torch()._scaled_grouped_mm(
        a, b.transpose(-2, -1), a_scale, b_scale, offs=ends, out_dtype=torch().bfloat16,
        use_fast_accum=True,
    )  # fmt: skip
    return TorchArm(run, case.cold)


PEERS = {"torch": torch_arm}


def complete(case: Product | Quantize | Linear) -> tuple[str, ...]:
    """Peers without which a record of such cases is partial."""
    return ("torch",) if isinstance(case, Product) and case.direction != "wgrad" else ()


def peer_arms(case: Product | Quantize | Linear, v: Any, args) -> dict[str, Callable]:
    if not isinstance(case, Product):
        return {}
    names = [name for name in args.peers if name in PEERS]
    return {name: functools.partial(PEERS[name], case, v) for name in names}


def checker(case: Product | Quantize, v: Any) -> Callable[[Any], float]:
    """A function from a result to its relative error: of some groups, against float32. Of
    ``fp8_quantize`` the share of bytes that differ from the CPU's."""
    if isinstance(case, Quantize):
        pairs = of_parts(case, v)
        return lambda out: max(differing(take(out), want) for take, want in pairs)
    return checker_of_codes(v, (lambda w: w.T) if case.direction == "fprop" else (lambda w: w))


def of_parts(case: Quantize, v: Converted) -> list[tuple[Callable, list[np.ndarray]]]:
    """Functions that take a part of a result, and what the CPU makes of that part: matrices, or
    lines of blocks. Random bits follow from a line's number, so only the first ones are alike."""
    if "both" in case.options:
        return _parts_of_both(case, v)
    if case.is_weights:
        some = sorted({0, case.groups // 2, case.groups - 1})
        take = lambda g: lambda q: leaves_of(jax.tree.map(lambda leaf: leaf[g], q))
        return [(take(g), leaves_of(on_cpu(case, v.x[g], v.more))) for g in some]
    columns = case.options.get("axis") == 0
    total = case.k if columns else case.n
    count = min(LINES, total)
    parts = [slice(0, count)]
    if "stochastic" not in case.options:
        parts.append(slice(total - count, total))

    def part(some: slice):
        more = dict(v.more)
        if "sizes" in more and not columns:  # all rows are in one group or another
            more["sizes"] = jnp.full(1, count, jnp.int32)
        taken = lambda q: [np.asarray(leaf[some]) for leaf in (q.weight, q.scales)]
        x = v.x[:, some] if columns else v.x[some]
        return taken, leaves_of(on_cpu(case, x, more))[:2]

    return [part(some) for some in parts]


def _parts_of_both(case: Quantize, v: Converted) -> list[tuple[Callable, list[np.ndarray]]]:
    """The first lines of either result."""
    count = min(LINES, case.k)
    of_rows, _ = on_cpu(case, v.x[:count], v.more | {"sizes": jnp.full(1, count, jnp.int32)})
    _, of_columns = on_cpu(case, v.x[:, :count], v.more)
    first = lambda q: [np.asarray(leaf[:count]) for leaf in (q.weight, q.scales)]
    return [
        (lambda out: first(out[0]), first(of_rows)),
        (lambda out: first(out[1]), first(of_columns)),
    ]


def on_cpu(case: Quantize, x, more) -> Any:
    x, more = jax.device_get((x, more))
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(functools.partial(quantized, case.options))(jnp.asarray(x), more)
