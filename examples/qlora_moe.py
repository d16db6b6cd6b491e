"""Fine-tune low-rank adapters over the frozen, quantized experts of a model (QLoRA).

    python examples/train_moe.py             # first: makes a checkpoint, of English
    python examples/qlora_moe.py             # teach it Python, minutes on two CPU cores
    python examples/qlora_moe.py CHECKPOINT --text FILE      # a Hugging Face folder instead
    python examples/qlora_moe.py CHECKPOINT --base fp8 --targets attention --resume

CHECKPOINT is a folder that generate.py reads. qlora_checkpoint.py has that run: adapters on experts
and on attention, checkpoints to resume from, a loss curve, and adapters in PEFT's files. The rest
of this file is about train_moe.py's model.

Every expert keeps its 4-bit weights and gets two thin matrices of its own. Its product is then one
``grouped_qmm`` with an adapter, on rows sorted by expert: ``route``, ``dispatch`` and ``combine``
are the rest of the layer. Gradients flow through the quantized product to
activations, and stop at its weights.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tqdm import tqdm

import jax_groupgemm as jgg
import qlora_checkpoint
import quantized_moe
import texts
import train_moe
from decoder.adapters import TARGETS
from decoder.errors import in_sentences
from options import Parser, count, positive, settings


class Adapted(NamedTuple):
    """A weight (E, K, N) of every expert: frozen (quantized, as (E, N, K)) + down @ up."""

    frozen: jgg.Quantized
    down: jax.Array  # (E, K, r)
    up: jax.Array  # (E, r, N)


def product(x, w: Adapted, sizes):
    """``out[t] = x[t] @ w[group(t)]``; x (R, K) is sorted by expert."""
    return jgg.grouped_qmm(x, w.frozen, sizes, adapter=(w.down, w.up))


def adapted_layer(x, w_up: Adapted, w_down: Adapted, expert, weight, key=None):
    """``jgg.moe_mlp`` for adapted weights."""
    routing = jgg.route(expert, w_up.down.shape[0])
    sizes = routing.group_sizes
    gate, up = jnp.split(product(jgg.dispatch(x, routing), w_up, sizes), 2, axis=1)
    rows = product(jax.nn.silu(gate) * up, w_down, sizes)
    return jgg.combine(rows, routing, weight)


def new_adapters(params, rank: int, key) -> dict:
    """``{path of a weight: {"down", "up"}}``; their products are 0, as in LoRA."""
    adapters = {}

    def add(path, w):
        experts, k, n = w.shape
        down_key = jax.random.fold_in(key, len(adapters))
        down = jax.random.normal(down_key, (experts, k, rank)) / k**0.5
        adapters[path] = {"down": down, "up": jnp.zeros((experts, rank, n))}

    quantized_moe.map_experts(add, params)
    return adapters


def adapt(frozen, adapters: dict):
    """The parameters of the model with ``adapted_layer``."""
    return quantized_moe.map_experts(lambda path, w: Adapted(w, **adapters[path]), frozen)


def fine_tune(trainer, frozen, adapters, text, steps: int, lr: float):
    """The trained adapters; nothing else has gradients or optimizer state."""
    config = trainer.config
    optimizer = optax.adam(optax.cosine_decay_schedule(lr, steps))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(adapters, state, frozen, step):
        key = jax.random.fold_in(jax.random.key(config.seed), step)
        tokens = texts.random_batch(text, config.batch, config.context, key)

        def loss(adapters):
            nats, balance = trainer.cross_entropy(adapt(frozen, adapters), tokens)
            return nats.mean() + train_moe.BALANCE_WEIGHT * balance, nats.mean()

        (_, nats), gradients = jax.value_and_grad(loss, has_aux=True)(adapters)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(adapters, updates), state, nats / jnp.log(2.0)

    state, losses = optimizer.init(adapters), []
    compiled = train_step.lower(adapters, state, frozen, 0).compile()
    bar = tqdm(range(steps), unit="step", disable=None)
    for step in bar:
        adapters, state, bits = compiled(adapters, state, frozen, step)
        losses.append(bits)
        if step % 10 == 0:
            bar.set_postfix_str(f"loss {float(bits):.3f}")  # waits for the device
    return adapters, [float(bits) for bits in losses]


def read_text(name: str | None, context: int) -> np.ndarray:
    """A file's bytes as tokens; by default the source of the standard library's asyncio."""
    if name is not None:
        return texts.read(name, context)
    return texts.as_tokens(texts.source_of_asyncio())


#: Options of a run without a checkpoint that the other has not, or with another default.
DEFAULTS = {
    "run": Path("runs/train_moe"), "mode": "nvfp4", "lr": 5e-3, "out": Path("runs/qlora_moe"),
}  # fmt: skip


def parse(argv) -> argparse.Namespace:
    own, theirs = DEFAULTS, qlora_checkpoint.DEFAULTS
    parser = Parser(__doc__)
    add = parser.add_argument
    add("checkpoint", nargs="?", type=Path, help="folder of a model (default: train_moe.py's)")
    add("--text", help="file to train on (default: the source of asyncio)")
    parser.option("--rank", 8, "columns of an adapter", type=count)
    parser.option("--steps", 300, "steps of training", type=count)
    both = lambda name: f"(default: {own[name]}; with a checkpoint {theirs[name]})"
    add("--lr", type=positive, help=f"peak learning rate {both('lr')}")
    add("--out", type=Path, help=f"folder for adapters and results {both('out')}")
    add = parser.add_argument_group("without a checkpoint").add_argument
    add("--run", type=Path, help=f"folder of the trained model (default: {own['run']})")
    modes = quantized_moe.MODES
    add("--mode", choices=modes, help=f"format of the frozen experts (default: {own['mode']})")
    qlora_checkpoint.add_options(parser.add_argument_group("with a checkpoint"))
    args = parser.parse_args(argv)
    if args.checkpoint is None:
        settle(parser, args, own, theirs, "with")
    else:
        settle(parser, args, theirs, own, "without")
    return args


def settle(parser: Parser, args: argparse.Namespace, own: dict, others: dict, which: str) -> None:
    """Sets defaults, and refuses options of runs ``which`` have a checkpoint or have none."""
    for name in others.keys() - own.keys():
        if getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} is for runs {which} a checkpoint")
        delattr(args, name)
    for name, default in own.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def main(argv=None) -> dict:
    args = parse(argv)
    with jax.numpy_dtype_promotion("standard"):  # flax and optax do not run under "strict"
        if args.checkpoint is None:
            return run(args)
        args.targets = TARGETS if args.targets == "both" else (args.targets,)
        tuning = settings(qlora_checkpoint.Settings, args)
        with in_sentences(args.checkpoint, "a smaller --batch, --context or --rank"):
            return qlora_checkpoint.run(
                args.checkpoint, args.out, args.text, tuning, args.eval_every, args.resume
            )


def run(args: argparse.Namespace) -> dict:
    config, params, _ = quantized_moe.trained(args.run)
    training, held_out = map(jnp.asarray, texts.split(read_text(args.text, config.context)))
    adapters = new_adapters(params, args.rank, jax.random.key(config.seed))
    frozen = quantized_moe.map_experts(
        lambda _, w: quantized_moe.quantize(w.astype(config.dtype), args.mode), params
    )
    trainer = train_moe.Trainer(config, adapted_layer)

    def evaluate():
        return float(trainer.bits_per_byte(adapt(frozen, adapters), held_out))

    trained, total = (sum(p.size for p in jax.tree.leaves(t)) for t in (adapters, params))
    trained_bytes, frozen_bytes, original_bytes = (
        sum(p.nbytes for p in jax.tree.leaves(t)) for t in (adapters, frozen, params)
    )
    print(
        f"{training.size:,} bytes to train on, {held_out.size:,} held out\n"
        f"trained: {trained:,} parameters, {trained_bytes / 1e3:,.0f} kB, and their optimizer's "
        f"{2 * trained_bytes / 1e3:,.0f} kB\n"
        f"frozen: {total:,} parameters, {frozen_bytes / 1e3:,.0f} kB with experts in {args.mode} "
        f"({original_bytes / 1e3:,.0f} kB before)"
    )
    before = evaluate()
    adapters, losses = fine_tune(trainer, frozen, adapters, training, args.steps, args.lr)
    after = evaluate()
    print(f"held out {before:.3f} -> {after:.3f} bits per byte in {args.steps} steps")

    prompt, key = training[-config.context :], jax.random.key(config.seed)
    sample = texts.as_text(trainer.sample(adapt(frozen, adapters), prompt, key))
    print(f"\nIt writes now:\n\n{sample}")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((args.out / "adapters").absolute(), adapters, force=True)
    results = {
        "before": before,
        "after": after,
        "losses": losses,
        "trained_parameters": trained,
        "trained_bytes": trained_bytes,
        "frozen_parameters": total,
        "frozen_bytes": frozen_bytes,
        "sample": sample,
    }
    (args.out / "metrics.json").write_text(json.dumps(vars(args) | results, indent=1, default=str))
    print(f"\nsee {args.out}")
    return results


if __name__ == "__main__":
    main()
