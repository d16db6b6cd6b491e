"""``fp8_grouped_linear``, forward and backward in one program: operands, our arms, checks.

Timed is what gives the result and the gradients of x and w, from x, w and dy in bfloat16; dy is
rounded to nearest. Arms of ours: w quantized in the call; ``[quantized]``: its codes are given,
made before; ``[bfloat16]``: grouped_mm and its gradients. There are no peers.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

from . import timing
from .fp8 import of_weights
from .fp8_shapes import Linear
from .products import columns_error, rows_error, some_groups
from .timing import JaxArm


class Operands:
    """x (T, K), the weights w (G, N, K), and dy (T, N), the cotangent of the result."""

    def __init__(self, case: Linear):
        shape = (case.groups, case.n, case.k)
        self.w = timing.kept(shape, lambda: timing.random(1, shape))
        self.x = timing.random(0, (case.rows, case.k))
        self.dy = timing.random(2, (case.rows, case.n))
        self.sizes = jnp.asarray(case.sizes())


def operands(case: Linear) -> Operands:
    return Operands(case)


def with_gradients(linear: Callable, x, w, dy, *more) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The result, and the gradients of x and w."""
    out, backward = jax.vjp(lambda x, w: linear(x, w, *more), x, w)
    return out, *backward(dy)


def given(x, w, sizes, codes) -> jax.Array:
    return jgg.fp8_grouped_linear(x, w, sizes, quantized=codes)


def arms(case: Linear, v: Operands, args) -> dict[str, Callable]:
    del args  # the kernels are chosen inside

    def arm(linear: Callable, *more) -> JaxArm:
        f = functools.partial(with_gradients, linear)
        return JaxArm(f, (v.x, v.w, v.dy, v.sizes, *more), case.cold)

    return {
        "ours": lambda: arm(jgg.fp8_grouped_linear),
        "ours[quantized]": lambda: arm(given, of_weights(v.w)),
        "ours[bfloat16]": lambda: arm(functools.partial(jgg.grouped_mm, transpose_w=True)),
    }


def checker(case: Linear, v: Operands) -> Callable[[Any], float]:
    """A function from the result and both gradients to their largest relative error: of some
    groups, against float32 products of what was not quantized."""
    del case
    sizes = np.asarray(v.sizes)
    ends = np.cumsum(sizes).astype(np.int32)

    def errors(result, g: int) -> Iterator[jax.Array]:
        (out, dx, dw), span = result, (ends[g] - sizes[g], ends[g], g)
        yield rows_error(out, v.x, v.w, *span, last=True)
        yield rows_error(dx, v.dy, v.w, *span, last=False)
        yield columns_error(dw, v.dy, v.x, *span)

    # NaN is the largest
    return lambda out: float(np.max([float(e) for g in some_groups(sizes) for e in errors(out, g)]))
