"""Train a bank of LoRA adapters at once: every row of a batch names its own adapter.

    python examples/lora_bank.py

Fine-tuned variants of one layer share its frozen matrix and differ by a low-rank product each.
``lora_mm`` multiplies every row by its own one. The step also takes each adapter's Gram matrix of
its inputs, x^T x, which second-order and quantization methods need: a product of ragged groups
along its *contracted* axis, for which rows are sorted by adapter.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_groupgemm as jgg

ADAPTERS, RANK, WIDTH, ROWS = 32, 8, 64, 2048


def new_bank(key):
    """A random adapter of rank RANK for each index: x @ a.T @ b.T."""
    a_key, b_key = jax.random.split(key)
    return {
        "a": jax.random.normal(a_key, (ADAPTERS, RANK, WIDTH)) / WIDTH**0.5,
        "b": jax.random.normal(b_key, (ADAPTERS, WIDTH, RANK)) / RANK**0.5,
    }


def apply(bank, frozen, x, adapter):
    """The layer with each row's own adapter."""
    return jgg.lora_mm(x, bank["a"], bank["b"], adapter, existing_out=x @ frozen)


def gram_matrices(x, adapter):
    """``x_a^T x_a`` over the rows of each adapter a: (ADAPTERS, WIDTH, WIDTH)."""
    order, sizes = jnp.argsort(adapter), jnp.bincount(adapter, length=ADAPTERS)
    ends = jnp.cumsum(sizes)
    spans = jnp.stack([ends - sizes, ends], axis=1)
    return jgg.segmented_mm(x[order], x[order], spans, transpose_a=True)


def sample_rows(key):
    """Random rows and their adapters: few for most of them, as in real traffic."""
    x_key, adapter_key = jax.random.split(key)
    popularity = -jnp.log(jnp.arange(1.0, ADAPTERS + 1))
    adapter = jax.random.categorical(adapter_key, popularity, shape=(ROWS,))
    return jax.random.normal(x_key, (ROWS, WIDTH)), adapter


def distance(bank, target):
    """How far the adapters' products are from the target's, relative to them."""
    products = [np.asarray(b["b"] @ b["a"]) for b in (bank, target)]
    return float(np.linalg.norm(products[0] - products[1]) / np.linalg.norm(products[1]))


def main(argv=None) -> dict:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    steps = parser.parse_args(argv).steps

    frozen_key, target_key, bank_key, data_key = jax.random.split(jax.random.key(0), 4)
    frozen = jax.random.normal(frozen_key, (WIDTH, WIDTH)) / WIDTH**0.5
    target = new_bank(target_key)
    bank = new_bank(bank_key)
    bank["b"] = jnp.zeros_like(bank["b"])  # as in LoRA: start from the frozen layer
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, steps))

    @jax.jit
    def step(bank, state, key):
        x, adapter = sample_rows(key)
        wanted = apply(target, frozen, x, adapter)

        def loss(bank):
            return jnp.mean((apply(bank, frozen, x, adapter) - wanted) ** 2)

        value, gradients = jax.value_and_grad(loss)(bank)
        with jax.numpy_dtype_promotion("standard"):  # optax does not run under "strict"
            updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(bank, updates), state, value, gram_matrices(x, adapter)

    before = distance(bank, target)
    state, losses, gram = optimizer.init(bank), [], jnp.empty(())  # gram is the last batch's
    for i in range(steps):
        bank, state, loss, gram = step(bank, state, jax.random.fold_in(data_key, i))
        losses.append(loss)
    after = distance(bank, target)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.2e} in {steps} steps")
    print(f"distance of the adapters from the target {before:.4f} -> {after:.4f}")

    x, adapter = jax.device_get(sample_rows(jax.random.fold_in(data_key, steps - 1)))
    rows = x[adapter == 3]
    np.testing.assert_allclose(gram[3], rows.T @ rows, rtol=1e-4, atol=1e-3)
    print(f"Gram matrix of adapter 3, of {len(rows)} rows, agrees with numpy")
    return {"losses": [float(loss) for loss in losses], "before": before, "after": after}


if __name__ == "__main__":
    main()
