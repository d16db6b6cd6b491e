"""The layers that benchmarks.moe times, in JAX: ``layer(x, router, up, down, k)``.

All of them have one router: the k largest logits of each token, and a softmax over those. It is
``jgg.router.choose`` in ours (``choose_for`` of few tokens), and XLA's operations in the others.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import jax_groupgemm as jgg


def routed(x, router, k: int):
    """Weights in float32 and experts of every token, (T, k)."""
    value, expert = lax.top_k(x @ router, k)
    return jax.nn.softmax(value.astype(jnp.float32)), expert


def chosen(x, router, k: int):
    choice = jgg.router.choose(x @ router, k)
    return choice.weight, choice.expert


def ours(x, router, up, down, k):
    weight, expert = chosen(x, router, k)
    return jgg.moe_mlp(x, up, down, expert, weight)


def few(x, router, up, down, k):
    """``ours`` as a decode step has it, with a router that is one kernel."""
    choice, _ = jgg.router.choose_for(x, router, k)
    return jgg.moe_mlp(x, up, down, choice.expert, choice.weight)


def fp8(x, router, up, down, k):
    """Rounded to nearest: a key for every call would be one more operand."""
    weight, expert = chosen(x, router, k)
    recipe = jgg.FP8Recipe(stochastic_rounding=False)
    return jgg.moe_mlp(x, up, down, expert, weight, recipe=recipe)


def fp8_tensor(x, router, up, down, k):
    """With a scale for each tensor, and fast sums."""
    weight, expert = chosen(x, router, k)
    recipe = jgg.FP8Recipe(scaling="tensor", accumulate="fast", stochastic_rounding=False)
    return jgg.moe_mlp(x, up, down, expert, weight, recipe=recipe)


def composed(x, router, up, down, k):
    weight, expert = routed(x, router, k)
    return jgg.moe_mlp(x, up, down, expert, weight, implementation="composed")


def readme_old(x, router, up, down, k):
    """The layer of the README before there was ``moe_mlp``: it scatters rows."""
    weight, expert = routed(x, router, k)
    order = jnp.argsort(expert.reshape(-1))
    sizes = jnp.bincount(expert.reshape(-1), length=router.shape[1])
    scale = weight.astype(x.dtype).reshape(-1)[order]
    h = jgg.grouped_mm(x[order // k], up, sizes, activation="swiglu")
    y = jgg.grouped_mm(h, down, sizes, row_scale=scale)
    return jnp.zeros_like(x).at[order // k].add(y)


# ---- a permutation's transpose is a gather -------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dispatched(x, order, inverse, k):
    del inverse
    return x[order // k]


def _dispatched_forward(x, order, inverse, k):
    return x[order // k], inverse


def _dispatched_backward(k, inverse, ct):
    return ct[inverse].reshape(-1, k, ct.shape[1]).sum(1), None, None


dispatched.defvjp(_dispatched_forward, _dispatched_backward)


@jax.custom_vjp
def combined(rows, weight, order, inverse):
    del order
    own = rows[inverse].reshape(*weight.shape, rows.shape[1])
    return jnp.einsum("tkd,tk->td", own, weight.astype(rows.dtype))


def _combined_forward(rows, weight, order, inverse):
    return combined(rows, weight, order, inverse), (rows, weight, order, inverse)


def _combined_backward(kept, ct):
    rows, weight, order, inverse = kept
    ct = ct[order // weight.shape[1]]
    of_weight = (ct.astype(jnp.float32) * rows.astype(jnp.float32)).sum(1)
    of_rows = ct * weight.astype(ct.dtype).reshape(-1)[order, None]
    return of_rows, of_weight[inverse].reshape(weight.shape).astype(weight.dtype), None, None


combined.defvjp(_combined_forward, _combined_backward)


def permutation(x, router, up, down, k, product=jgg.grouped_mm):
    weight, expert = routed(x, router, k)
    order = jnp.argsort(expert.reshape(-1))
    rows = jnp.arange(order.size, dtype=order.dtype)
    inverse = jnp.zeros_like(order).at[order].set(rows, unique_indices=True)
    sizes = jnp.bincount(expert.reshape(-1), length=router.shape[1])
    gate, value = jnp.split(product(dispatched(x, order, inverse, k), up, sizes), 2, axis=1)
    return combined(product(jax.nn.silu(gate) * value, down, sizes), weight, order, inverse)


def ragged_dot(x, router, up, down, k):
    return permutation(x, router, up, down, k, product=lax.ragged_dot)


LAYERS = {
    "ours": ours,
    "fp8": fp8,
    "fp8_tensor": fp8_tensor,
    "composed": composed,
    "readme_old": readme_old,
    "permutation": permutation,
    "ragged_dot": ragged_dot,
}


# ---- the products alone --------------------------------------------------------------------------


def _activated(h):
    gate, value = jnp.split(h.astype(jnp.float32), 2, axis=1)
    return (jax.nn.silu(gate) * value).astype(h.dtype)


def product_operands(x, router, up, down, dy, k):
    """Two dictionaries: what a layer's products read, and what combines their results."""
    weight, expert = routed(x, router, k)
    routing = jgg.route(expert, router.shape[1])
    rows, sizes = jgg.dispatch(x, routing), routing.group_sizes
    h = jgg.grouped_mm(rows, up, sizes)
    a, pull = jax.vjp(_activated, h)
    of_row = weight.reshape(-1)[routing.order][:, None]
    ct = (jgg.dispatch(dy, routing).astype(jnp.float32) * of_row).astype(dy.dtype)
    (dh,) = pull(jgg.grouped_mm(ct, down, sizes, transpose_w=True))
    read = {"rows": rows, "a": a, "ct": ct, "dh": dh, "sizes": sizes}
    return read, {"routing": routing, "weight": weight}


def forward_products(up, down, read):
    return {
        "h": jgg.grouped_mm(read["rows"], up, read["sizes"]),
        "y": jgg.grouped_mm(read["a"], down, read["sizes"]),
    }


def all_products(up, down, read):
    """Two forward, four back."""
    sizes, ends = read["sizes"], jnp.cumsum(read["sizes"])
    along = functools.partial(
        jgg.segmented_mm, segments=jnp.stack([ends - sizes, ends], 1), transpose_a=True
    )
    return forward_products(up, down, read) | {
        "da": jgg.grouped_mm(read["ct"], down, sizes, transpose_w=True),
        "dx": jgg.grouped_mm(read["dh"], up, sizes, transpose_w=True),
        "up": along(read["rows"], read["dh"]),
        "down": along(read["a"], read["ct"]),
    }
