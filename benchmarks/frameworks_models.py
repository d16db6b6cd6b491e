"""Language models of a few layers, written as users of Flax NNX, Equinox and haliax write them.

The experts' products are ``jax.lax.ragged_dot`` (haliax calls ``ragged_dot_general``). Everything
else is the same in all three: a block is attention and a mixture of experts with SwiGLU, parameters
are float32, products bfloat16, and AdamW is optax's.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_groupgemm as jgg

HEAD = 128  # width of a head of attention
VOCABULARY = 32000


@dataclasses.dataclass(frozen=True)
class Size:
    width: int
    hidden: int
    experts: int
    top_k: int
    layers: int
    batch: int
    context: int
    vocabulary: int = VOCABULARY
    head: int = HEAD


#: Qwen3-30B-A3B's experts.
QWEN = Size(2048, 768, 128, 8, layers=2, batch=4, context=1024)
TINY = Size(32, 24, 4, 2, layers=1, batch=2, context=16, vocabulary=64, head=16)

#: ``experts(x, gate, up, down, chosen, weight)`` of tokens (T, D), of weights (E, D, F) and
#: (E, F, D), and of choices (T, k).
Experts = Callable[..., jax.Array]


def with_ragged_dot(x, gate, up, down, chosen, weight):
    """As it is often written: pairs sorted by expert, three products, pairs put back."""
    order = jnp.argsort(chosen.reshape(-1))
    token = order // chosen.shape[1]
    sizes = jnp.bincount(chosen.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
    rows = x[token]
    h = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    y = jax.lax.ragged_dot(h, down, sizes) * weight.reshape(-1)[order, None].astype(x.dtype)
    return jnp.zeros_like(x).at[token].add(y)


def with_moe_mlp(x, gate, up, down, chosen, weight):
    return jgg.moe_mlp(x, jnp.stack([gate, up], axis=2), down, chosen, weight)


def choose(logits, k: int):
    scores, chosen = jax.lax.top_k(logits.astype(jnp.float32), k)
    return chosen, jax.nn.softmax(scores)


def normed(x, scale):
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + 1e-6)
    return (x32 * scale).astype(x.dtype)


def attended(x, qkv, out, head: int):
    """Causal attention of (batch, length, width)."""
    heads = x.shape[-1] // head
    q, k, v = (a.reshape(*x.shape[:2], heads, head) for a in jnp.split(x @ qkv, 3, axis=-1))
    on_gpu = jax.default_backend() == "gpu"
    implementation = "cudnn" if on_gpu else "xla"
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return y.reshape(x.shape) @ out


def cross_entropy(logits, tokens):
    logits = logits[:, :-1].astype(jnp.float32)
    at = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - at).mean()


def flax_nnx(size: Size, experts: Experts = with_ragged_dot) -> tuple[Any, Callable]:
    """The state of a model and its optimizer, and a training step of it: (state, tokens) -> (state,
    loss), which donates the state."""
    import optax
    from flax import nnx

    def matrix(rngs, *shape):
        return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[-2] ** -0.5)

    class Mixture(nnx.Module):
        def __init__(self, rngs):
            d, f, e = size.width, size.hidden, size.experts
            self.router = matrix(rngs, d, e)
            self.gate, self.up = matrix(rngs, e, d, f), matrix(rngs, e, d, f)
            self.down = matrix(rngs, e, f, d)

        def __call__(self, x):
            rows = x.reshape(-1, size.width)
            cast = lambda p: p[...].astype(x.dtype)
            chosen, weight = choose(rows @ cast(self.router), size.top_k)
            y = experts(rows, cast(self.gate), cast(self.up), cast(self.down), chosen, weight)
            return y.reshape(x.shape)

    class Block(nnx.Module):
        def __init__(self, rngs):
            d = size.width
            self.norms = nnx.Param(jnp.ones((2, d)))
            self.qkv, self.out = matrix(rngs, d, 3 * d), matrix(rngs, d, d)
            self.mixture = Mixture(rngs)

        def __call__(self, x):
            qkv, out = (p[...].astype(x.dtype) for p in (self.qkv, self.out))
            x = x + attended(normed(x, self.norms[0]), qkv, out, size.head)
            return x + self.mixture(normed(x, self.norms[1]))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = matrix(rngs, size.vocabulary, size.width)
            self.blocks = nnx.List([Block(rngs) for _ in range(size.layers)])
            self.head = matrix(rngs, size.width, size.vocabulary)

        def __call__(self, tokens):
            x = self.embed[...].astype(jnp.bfloat16)[tokens]
            for block in self.blocks:
                x = block(x)
            return x @ self.head[...].astype(x.dtype)

    def new():
        model = Model(nnx.Rngs(0))
        return nnx.split((model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)))[1]

    graph = nnx.graphdef(
        nnx.eval_shape(
            lambda: (lambda m: (m, nnx.Optimizer(m, optax.adamw(1e-4), wrt=nnx.Param)))(
                Model(nnx.Rngs(0))
            )
        )
    )

    def step(state, tokens):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(tokens), tokens))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return jax.jit(new)(), jax.jit(step, donate_argnums=0)


def equinox(size: Size, experts: Experts = with_ragged_dot, linear: Any = None):
    """As :func:`flax_nnx`. ``linear`` makes the experts' three layers, of haliax."""
    import equinox as eqx
    import optax

    normal = lambda key, *shape: jax.random.normal(key, shape) * shape[-2] ** -0.5

    class Mixture(eqx.Module):
        router: jax.Array
        gate: Any
        up: Any
        down: Any

        def __init__(self, key):
            d, f, e = size.width, size.hidden, size.experts
            keys = jax.random.split(key, 4)
            self.router = normal(keys[0], d, e)
            make = normal if linear is None else linear
            self.gate, self.up = make(keys[1], e, d, f), make(keys[2], e, d, f)
            self.down = make(keys[3], e, f, d)

        def __call__(self, x):
            rows = x.reshape(-1, size.width)
            chosen, weight = choose(rows @ self.router, size.top_k)
            return experts(rows, self.gate, self.up, self.down, chosen, weight).reshape(x.shape)

    class Block(eqx.Module):
        norms: jax.Array
        qkv: jax.Array
        out: jax.Array
        mixture: Mixture

        def __init__(self, key):
            keys, d = jax.random.split(key, 3), size.width
            self.norms = jnp.ones((2, d))
            self.qkv, self.out = normal(keys[0], d, 3 * d), normal(keys[1], d, d)
            self.mixture = Mixture(keys[2])

        def __call__(self, x):
            x = x + attended(normed(x, self.norms[0]), self.qkv, self.out, size.head)
            return x + self.mixture(normed(x, self.norms[1]))

    class Model(eqx.Module):
        embed: jax.Array
        blocks: list
        head: jax.Array

        def __init__(self, key):
            keys = jax.random.split(key, size.layers + 2)
            self.embed = normal(keys[0], size.vocabulary, size.width)
            self.blocks = [Block(k) for k in keys[2:]]
            self.head = normal(keys[1], size.width, size.vocabulary)

        def __call__(self, tokens):
            x = self.embed[tokens]
            for block in self.blocks:
                x = block(x)
            return x @ self.head

    optimizer = optax.adamw(1e-4)

    def new():
        model = Model(jax.random.key(0))
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def loss(model, tokens):
        cast = lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a
        return cross_entropy(jax.tree.map(cast, model)(tokens), tokens)

    def step(state, tokens):
        model, of_optimizer = state
        value, grads = eqx.filter_value_and_grad(loss)(model, tokens)
        updates, of_optimizer = optimizer.update(grads, of_optimizer, model)
        return (eqx.apply_updates(model, updates), of_optimizer), value

    return jax.jit(new)(), jax.jit(step, donate_argnums=0)


def haliax(size: Size):
    """Equinox' model with three ``haliax.nn.MoELinear`` in its mixture, as Levanter's Mixtral."""
    hax: Any = importlib.import_module("haliax")

    axes = lambda *of: [hax.Axis(*pair) for pair in of]

    def linear(key, e, fan_in, out):
        names = ("embed", "mlp") if fan_in == size.width else ("mlp", "embed")
        expert, inside, outside = axes(("expert", e), (names[0], fan_in), (names[1], out))
        return hax.nn.MoELinear.init(expert, inside, outside, key=key, use_bias=False)

    def experts(x, gate, up, down, chosen, weight):
        order = jnp.argsort(chosen.reshape(-1))
        token = order // chosen.shape[1]
        sizes = jnp.bincount(chosen.reshape(-1), length=size.experts).astype(jnp.int32)
        row, embed, expert = axes(
            ("row", token.size), ("embed", x.shape[1]), ("expert", sizes.size)
        )
        rows, groups = hax.named(x[token], (row, embed)), hax.named(sizes, expert)
        h = hax.nn.silu(gate(rows, groups)) * up(rows, groups)
        y = down(h, groups).array * weight.reshape(-1)[order, None].astype(x.dtype)
        return jnp.zeros_like(x).at[token].add(y)

    return equinox(size, experts, linear)
