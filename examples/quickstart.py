import jax

import jax_groupgemm as jgg


def moe(x, router, up, down, top_k=2):
    weight, expert = jax.lax.top_k(jax.nn.softmax(x @ router), top_k)
    return jgg.moe_mlp(x, up, down, expert, weight)  # no token is dropped, nothing is padded


shapes = (256, 64), (64, 8), (8, 64, 256), (8, 128, 64)  # tokens, router, experts' up and down
args = [jax.random.normal(jax.random.key(i), shape) / 4 for i, shape in enumerate(shapes)]
loss, grads = jax.jit(jax.value_and_grad(lambda args: (moe(*args) ** 2).mean()))(args)
print(loss, [g.shape for g in grads])
