"""Train a bank of LoRA adapters at once: every row of a batch names its own adapter.

    python examples/lora_bank.py

Fine-tuned variants of one layer share its frozen matrix and differ by a low-rank product each, so
a batch of mixed requests is two grouped products. The step also takes each adapter's Gram matrix
of its inputs, x^T x, which second-order and quantization methods need: a product of ragged groups
along its *contracted* axis.
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
    """A random adapter of rank RANK for each index: x @ down @ up."""
    down_key, up_key = jax.random.split(key)
    return {
        "down": jax.random.normal(down_key, (ADAPTERS, WIDTH, RANK)) / WIDTH**0.5,
        "up": jax.random.normal(up_key, (ADAPTERS, RANK, WIDTH)) / RANK**0.5,
    }


def apply(bank, frozen, x, sizes):
    """The layer with each row's own adapter; rows are sorted by adapter."""
    low_rank = jgg.grouped_mm(x, bank["down"], sizes)
    return jgg.grouped_mm(low_rank, bank["up"], sizes, existing_out=x @ frozen)


def gram_matrices(x, sizes):
    """``x_a^T x_a`` over the rows of each adapter a: (ADAPTERS, WIDTH, WIDTH)."""
    ends = jnp.cumsum(sizes)
    spans = jnp.stack([ends - sizes, ends], axis=1)
    return jgg.segmented_mm(x, x, spans, transpose_a=True)


def sample_rows(key):
    """Random rows, and how many each adapter has: few for most of them, as in real traffic."""
    x_key, adapter_key = jax.random.split(key)
    popularity = -jnp.log(jnp.arange(1.0, ADAPTERS + 1))
    adapter = jax.random.categorical(adapter_key, popularity, shape=(ROWS,))
    return jax.random.normal(x_key, (ROWS, WIDTH)), jnp.bincount(adapter, length=ADAPTERS)


def distance(bank, target):
    """How far the adapters' products are from the target's, relative to them."""
    products = [np.asarray(b["down"] @ b["up"]) for b in (bank, target)]
    return float(np.linalg.norm(products[0] - products[1]) / np.linalg.norm(products[1]))


def main(argv=None) -> dict:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    steps = parser.parse_args(argv).steps

    frozen_key, target_key, bank_key, data_key = jax.random.split(jax.random.key(0), 4)
    frozen = jax.random.normal(frozen_key, (WIDTH, WIDTH)) / WIDTH**0.5
    target = new_bank(target_key)
    bank = new_bank(bank_key)
    bank["up"] = jnp.zeros_like(bank["up"])  # as in LoRA: start from the frozen layer
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, steps))

    @jax.jit
    def step(bank, state, key):
        x, sizes = sample_rows(key)
        wanted = apply(target, frozen, x, sizes)

        def loss(bank):
            return jnp.mean((apply(bank, frozen, x, sizes) - wanted) ** 2)

        value, gradients = jax.value_and_grad(loss)(bank)
        with jax.numpy_dtype_promotion("standard"):  # optax does not run under "strict"
            updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(bank, updates), state, value, gram_matrices(x, sizes)

    before = distance(bank, target)
    state, losses, gram = optimizer.init(bank), [], jnp.empty(())  # gram is the last batch's
    for i in range(steps):
        bank, state, loss, gram = step(bank, state, jax.random.fold_in(data_key, i))
        losses.append(loss)
    after = distance(bank, target)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.2e} in {steps} steps")
    print(f"distance of the adapters from the target {before:.4f} -> {after:.4f}")

    x, sizes = jax.device_get(sample_rows(jax.random.fold_in(data_key, steps - 1)))
    adapter = 3
    start = sizes[:adapter].sum()
    rows = x[start : start + sizes[adapter]]
    np.testing.assert_allclose(gram[adapter], rows.T @ rows, rtol=1e-4, atol=1e-3)
    print(f"Gram matrix of adapter {adapter}, of {len(rows)} rows, agrees with numpy")
    return {"losses": [float(loss) for loss in losses], "before": before, "after": after}


if __name__ == "__main__":
    main()
