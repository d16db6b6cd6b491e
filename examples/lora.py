"""Products of frozen, quantized experts and low-rank adapters, forward and backward.

    out[t] = x[t] @ (frozen[g] + down[g] @ up[g])      g = group(t)

Each sum of two products is made where the second one is stored (``existing_out``), so no program
reads both again to add them. JAX does not do that by itself for the gradient of x.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

import jax_groupgemm as jgg


class Adapted(NamedTuple):
    """A weight (E, K, N) of every expert: frozen (quantized, as (E, N, K)) + down @ up."""

    frozen: jgg.Quantized
    down: jax.Array  # (E, K, r)
    up: jax.Array  # (E, r, N)


@jax.custom_vjp
def product(x, w: Adapted, sizes):
    """``out[t] = x[t] @ w[group(t)]``; x (R, K) is sorted by expert. Frozen weights have no
    gradient."""
    return _forward(x, w, sizes)[0]


def _forward(x, w, sizes):
    down, up = w.down.astype(x.dtype), w.up.astype(x.dtype)
    low = jgg.grouped_mm(x, down, sizes)
    out = jgg.grouped_qmm(x, w.frozen, sizes)
    return jgg.grouped_mm(low, up, sizes, existing_out=out), (x, w, sizes, low)


def _backward(kept, dout):
    x, w, sizes, low = kept
    down, up = w.down.astype(x.dtype), w.up.astype(x.dtype)
    dlow = jgg.grouped_mm(dout, up, sizes, transpose_w=True)
    dx = jgg.grouped_qmm(dout, w.frozen, sizes, transpose_w=False)
    dx = jgg.grouped_mm(dlow, down, sizes, transpose_w=True, existing_out=dx)
    ends = jnp.cumsum(sizes)
    segments = jnp.stack([ends - sizes, ends], axis=1)
    ddown = jgg.segmented_mm(x, dlow, segments, transpose_a=True)
    dup = jgg.segmented_mm(low, dout, segments, transpose_a=True)
    return dx, Adapted(None, ddown.astype(w.down.dtype), dup.astype(w.up.dtype)), None


product.defvjp(_forward, _backward)
