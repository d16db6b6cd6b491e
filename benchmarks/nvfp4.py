"""Products of two NVFP4 operands, as training has them: operands, our arms, peers, checks.

Arms of ours: nvfp4_grouped_mm and nvfp4_grouped_wgrad on operands as nvfp4_quantize gives them;
``[prepacked]`` with prepacked weights, which decode has by default, ``[linear]`` being as they are;
``[qmm]``: grouped_qmm, rows in bfloat16; ``[bfloat16]``: both in bfloat16. Quantizing is not timed,
dequantizing by a peer is.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

from . import timing
from .peers import tensor
from .products import ours_name
from .quantized import checker_of_codes
from .quantized_peers import tensor_of
from .quantized_shapes import Nvfp4
from .timing import JaxArm, SumArm, TorchArm, torch


class Operands:
    """``a`` (T, A) and the weights ``b`` (G, B, A); of wgrad x (T, K) and dy (T, N)."""

    def __init__(self, case: Nvfp4):
        self.sizes = jnp.asarray(case.sizes())
        self.wgrad = case.direction == "wgrad"
        x = timing.random(0, (case.tokens, case.n if case.direction == "dgrad" else case.k))
        if self.wgrad:
            timing.forget()
            along = jax.jit(functools.partial(jgg.nvfp4_quantize, axis=0))
            y = timing.random(1, (case.tokens, case.n))
            self.a, self.b = (along(v, group_sizes=self.sizes) for v in (x, y))
            return
        shape = (case.groups, case.n, case.k)
        w = timing.kept(shape, lambda: timing.random(1, shape))
        axis = -1 if case.direction == "fprop" else -2
        self.a = jax.jit(jgg.nvfp4_quantize)(x)
        quantize = functools.partial(jgg.nvfp4_quantize, axis=axis, scale_2d=True)
        self.b = dataclasses.replace(jax.jit(quantize)(w), axis=-1)

    @functools.cached_property
    def packed(self) -> jgg.Quantized:
        with warnings.catch_warnings(action="ignore"):  # what has no layout is timed as it is
            return jax.jit(jgg.prepack)(self.b)

    @functools.cached_property
    def dense(self) -> tuple[jax.Array, jax.Array]:
        return jax.block_until_ready(jax.jit(dequantized)(self.a, self.b))


def dequantized(a: jgg.Quantized, b: jgg.Quantized) -> tuple[jax.Array, jax.Array]:
    return jgg.dequantize(a, "bfloat16"), jgg.dequantize(b, "bfloat16")


def operands(case: Nvfp4) -> Operands:
    return Operands(case)


def arms(case: Nvfp4, v: Operands, args) -> dict[str, Callable]:
    op = jgg.nvfp4_grouped_wgrad if v.wgrad else jgg.nvfp4_grouped_mm
    arm = lambda f, a, b: functools.partial(JaxArm, f, (a, b, v.sizes), case.cold)
    out = {}
    for i in args.implementation:
        f = functools.partial(op, implementation=i)
        layouts: dict[str | None, jgg.Quantized] = {None: v.b}
        if not v.wgrad and v.packed.layout != v.b.layout:
            layouts["prepacked"] = v.packed
            if case.decode:
                layouts = {None: v.packed, "linear": v.b}
        for layout, b in layouts.items():
            out[ours_name(i, layout)] = arm(f, v.a, b)
    if not v.wgrad:
        out["ours[qmm]"] = lambda: arm(jgg.grouped_qmm, v.dense[0], v.packed)()
    out["ours[bfloat16]"] = lambda: arm(functools.partial(dense, case), *v.dense)()
    return out


def dense(case: Nvfp4, a, b, sizes) -> jax.Array:
    """The product of dequantized operands."""
    if case.direction != "wgrad":
        return jgg.grouped_mm(a, b, sizes, transpose_w=True)
    ends = jnp.cumsum(sizes)
    return jgg.segmented_mm(b, a, jnp.stack([ends - sizes, ends], 1), transpose_a=True)


def dequantize_arm(case: Nvfp4, v: Operands) -> JaxArm:
    f = lambda a, b, sizes: dense(case, *dequantized(a, b), sizes)
    return JaxArm(f, (v.a, v.b, v.sizes), case.cold)


def torch_arm(case: Nvfp4, v: Operands) -> SumArm:
    a, b, ends = *map(tensor_of, v.dense), tensor(np.cumsum(np.asarray(v.sizes)))
    left, right = (b.t(), a) if v.wgrad else (a, b.transpose(-2, -1))
    return SumArm(
        JaxArm(dequantized, (v.a, v.b), case.cold),
        TorchArm(lambda: torch()._grouped_mm(left, right, offs=ends), case.cold),
    )


PEERS = {"dequantize": dequantize_arm, "torch": torch_arm}


def complete(case: Nvfp4) -> tuple[str, ...]:
    """Peers without which a record of such cases is partial."""
    del case
    return tuple(PEERS)


def peer_arms(case: Nvfp4, v: Operands, args) -> dict[str, Callable]:
    names = [name for name in args.peers if name in PEERS]
    return {name: functools.partial(PEERS[name], case, v) for name in names}


def checker(case: Nvfp4, v: Operands) -> Callable[[Any], float]:
    """A function from a result to its relative error: of some groups, against float32."""
    return checker_of_codes(v, lambda w: w.T)
