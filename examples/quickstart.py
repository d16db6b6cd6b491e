import jax
import jax.numpy as jnp

import jax_groupgemm as jgg


def moe(x, router, up, down, top_k=2):
    weight, expert = jax.lax.top_k(jax.nn.softmax(x @ router), top_k)
    order = jnp.argsort(expert.reshape(-1))  # rows sorted by expert; none is dropped
    sizes = jnp.bincount(expert.reshape(-1), length=router.shape[1])
    h = jgg.grouped_mm(x[order // top_k], up, sizes, activation="swiglu")
    y = jgg.grouped_mm(h, down, sizes, row_scale=weight.reshape(-1)[order])
    return jnp.zeros_like(x).at[order // top_k].add(y)


shapes = (256, 64), (64, 8), (8, 64, 256), (8, 128, 64)  # tokens, router, experts' up and down
args = [jax.random.normal(jax.random.key(i), shape) / 4 for i, shape in enumerate(shapes)]
loss, grads = jax.jit(jax.value_and_grad(lambda args: (moe(*args) ** 2).mean()))(args)
print(loss, [g.shape for g in grads])
