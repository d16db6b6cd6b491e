"""A training step of a mixture of experts, with batches whose routing differs, and its definition.

    y[t] = sum_e weight[t, e] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))

T (tokens, once for each of their experts) is grouped. Adam on the mean of (y - target)^2.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

TOKENS, WIDTH, EXPERTS, TOP_K = 100, 64, 5, 2
LEAST = 0.01  # of a choice's weight: those of less are dropped, and their rows belong to no group


def nvfp4(x, w, sizes, key):
    return jgg.nvfp4_grouped_linear(x, w.astype(x.dtype), sizes, key=key)


def fp8(x, w, sizes, key):
    return jgg.fp8_grouped_linear(x, w.astype(x.dtype), sizes, key=key)


def bfloat16(x, w, sizes, key):
    del key
    return jgg.grouped_mm(x, w.astype(x.dtype), sizes, transpose_w=True)


LINEAR = {"bfloat16": bfloat16, "nvfp4": nvfp4, "fp8": fp8}


def mixture(params, tokens, key, linear):
    """(tokens, width) -> the same, and the rows of each expert."""
    logits = jnp.dot(tokens, params["router"], precision="highest")
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), TOP_K)
    expert = jnp.where(weights > LEAST, chosen, EXPERTS).reshape(-1)
    order = jnp.argsort(expert)
    sizes = (expert[:, None] == jnp.arange(EXPERTS)).sum(0)
    x = jnp.repeat((tokens * params["gain"]).astype(jnp.bfloat16), TOP_K, axis=0)[order]
    up_key, gate_key, down_key = jax.random.split(key, 3)
    # In float32, which every backend rounds where it is told to.
    up = linear(x, params["up"], sizes, up_key).astype(jnp.float32)
    gate = linear(x, params["gate"], sizes, gate_key).astype(jnp.float32)
    hidden = (jax.nn.silu(gate) * up).astype(jnp.bfloat16)
    y = linear(hidden, params["down"], sizes, down_key)[jnp.argsort(order)]
    y = y.astype(jnp.float32).reshape(TOKENS, TOP_K, WIDTH) * weights[:, :, None]
    return y.sum(1), sizes


def step(state, tokens, target, seed, precision):
    """One step of Adam: the new state, and loss, gradients and group sizes."""

    def loss(params):
        y, sizes = mixture(params, tokens, jax.random.key(seed), LINEAR[precision])
        return ((y - target) ** 2).mean(), sizes

    params, mean, square, count = state
    (value, sizes), grads = jax.value_and_grad(loss, has_aux=True)(params)
    count = count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, square, grads)
    rate = 2e-3 * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, mean, square)
    return (params, mean, square, count), (value, grads, sizes)


def routings(rng) -> list[tuple[np.ndarray, np.ndarray]]:
    """First and second expert of each token, -1 for none: sizes differ in every batch."""
    first = rng.integers(0, EXPERTS, (6, TOKENS))
    second = (first + rng.integers(1, EXPERTS, first.shape)) % EXPERTS
    first[1], second[1] = 2, -1  # all to one
    first[2], second[2] = 0, 3  # all to two
    second[3, ::2] = -1
    first[4], second[4], second[4, 7] = 1, -1, 4  # and one row to another
    first[5], second[5] = np.where(np.arange(TOKENS) < 17, 0, 4), -1
    return list(zip(first, second, strict=True))


def problem():
    """A state and batches (tokens, target, seed) of numpy, and their routing."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    shape = (EXPERTS, WIDTH, WIDTH)
    params = {name: normal(*shape) / np.float32(WIDTH**0.5) for name in ("up", "gate", "down")}
    params["router"] = 4 * np.eye(WIDTH, EXPERTS, dtype=np.float32)
    params["gain"] = np.ones(WIDTH, np.float32)
    zeros = jax.tree.map(np.zeros_like, params)
    state = params, zeros, zeros, np.float32(0)
    teacher, plans, batches = normal(WIDTH, WIDTH) / 8, routings(rng), []
    marks = np.append(np.eye(EXPERTS, dtype=np.float32), np.zeros((1, EXPERTS), np.float32), 0)
    for i, (first, second) in enumerate(plans):
        tokens = normal(TOKENS, WIDTH)
        # What the router reads: no rounding changes whom it chooses, or drops.
        tokens[:, :EXPERTS] = 3 * marks[first] + np.float32(2.5) * marks[second]
        batches.append((tokens, np.tanh(tokens @ teacher), np.uint32(i)))
    return state, batches, plans


jitted = jax.jit(step, static_argnames="precision")


def dense(params, tokens, target, first, second):
    """The loss where every expert sees every token, in float32: nothing is sorted or grouped."""
    dot = functools.partial(jnp.einsum, precision="highest")
    probabilities = jax.nn.softmax(dot("td,de->te", tokens, params["router"]))
    chosen = (jnp.stack([first, second])[:, :, None] == np.arange(EXPERTS)).any(0)
    x = tokens * params["gain"]
    gate, up = (dot("td,efd->tef", x, params[name]) for name in ("gate", "up"))
    y = dot("tef,edf->ted", jax.nn.silu(gate) * up, params["down"])
    y = (jnp.where(chosen, probabilities, jnp.float32(0))[:, :, None] * y).sum(1)
    return ((y - target) ** 2).mean()
