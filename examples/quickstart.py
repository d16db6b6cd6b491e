"""One matrix per expert: the product, its gradient, and the loop over experts that it replaces."""

import jax
import jax.numpy as jnp

import jax_groupgemm as jgg

keys = jax.random.split(jax.random.key(0), 3)
expert = jnp.sort(jax.random.randint(keys[0], (1000,), 0, 8))  # of each row; rows are sorted
sizes = jnp.bincount(expert, length=8)  # data, not shapes: one compilation serves any routing
x = jax.random.normal(keys[1], (1000, 64))
w = jax.random.normal(keys[2], (8, 64, 128))


@jax.jit
def step(w, x, sizes):
    return jax.value_and_grad(lambda w: jnp.mean(jgg.grouped_mm(x, w, sizes) ** 2))(w)


def loop(w):
    return jnp.mean(jnp.concatenate([x[expert == e] @ w[e] for e in range(8)]) ** 2)


(loss, gradient), (loop_loss, loop_gradient) = step(w, x, sizes), jax.value_and_grad(loop)(w)
print(f"loss {loss:.4f}, by a loop over experts {loop_loss:.4f}")
print(f"largest difference of the gradients {jnp.abs(gradient - loop_gradient).max():.0e}")
