"""Train a byte-level mixture-of-experts language model with ``jax_groupgemm``.

    python examples/train_moe.py             # minutes on two CPU cores; uses a GPU if there is one
    python examples/train_moe.py --resume    # go on from the latest checkpoint
    python examples/train_moe.py --compare   # time the training step against jax.lax.ragged_dot
    python examples/train_moe.py --precision nvfp4 --out runs/nvfp4 --beside runs/train_moe
    python examples/train_moe.py --precision fp8 --out runs/fp8 --beside runs/train_moe
    python examples/train_moe.py --precision fp8-delayed --out runs/fp8-delayed
    python examples/train_moe.py --devices 8 --data 2   # experts on 4 devices, twice

On several machines, or in two processes of one, start each with its --process-id:

    python examples/train_moe.py --devices 4 --processes 2 --coordinator HOST:PORT --process-id 0

The text is the language reference that every CPython carries. The mixture of experts,
:class:`jax_groupgemm.nnx.MoE`, is *dropless*: experts take as many tokens as the router sends them,
with no capacity limit and no padding. Everything else is an ordinary small transformer.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jax_groupgemm as jgg
import run_folder
import several_devices
import texts
from attention import HEAD_SIZE, Attention
from jax_groupgemm.nnx import MoE
from options import Parser, count, option, settings
from timing import in_turns

BALANCE_WEIGHT = 0.01
SAMPLED_BYTES = 600
TEMPERATURE = 0.7
#: Precisions in which the products of experts are quantized.
RECIPES = {
    "nvfp4": jgg.NVFP4Recipe(),
    "fp8": jgg.FP8Recipe(),
    "fp8-tensor": jgg.FP8Recipe(scaling="tensor"),
    "fp8-delayed": jgg.FP8Recipe(scaling="delayed"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run's result depends on, besides the text."""

    steps: int = option(800, "training steps", type=count)
    batch: int = option(16, "sequences per step", type=count)
    context: int = option(128, "bytes per sequence", type=count)
    layers: int = option(2, "transformer blocks", type=count)
    width: int = option(128, f"model width, a multiple of {HEAD_SIZE}", type=count)
    experts: int = option(8, "experts per block", type=count)
    top_k: int = option(2, "experts per token", type=count)
    expert_width: int = option(128, "hidden width of one expert", type=count)
    lr: float = option(3e-3, "peak learning rate", type=float)
    seed: int = option(0, "of the initial weights, the batches and the sample", type=int)
    precision: str = option(
        "float32", "to compute in; nvfp4 and fp8: the experts' products, else bfloat16",
        choices=["float32", "bfloat16", *RECIPES],
    )  # fmt: skip

    @property
    def dtype(self) -> str:
        """The dtype of everything but the products of experts in NVFP4 or FP8."""
        return "bfloat16" if self.precision in RECIPES else self.precision


# ---- model -----------------------------------------------------------------------------------


def ragged_dot_layer(x, w_up, w_down, expert, weight, key=None, state=None):
    """:func:`jgg.moe_mlp` in plain JAX, for ``--compare``: every token's sum of the SwiGLU networks
    of its experts.

    x (T, D), w_up (E, D, 2F) with gate and up side by side, w_down (E, F, D), expert and weight
    (T, k) from the router. Returns (T, D). A key and a state are for layers that round.
    """
    order = jnp.argsort(expert.reshape(-1))  # one row for each token and expert, sorted by expert
    token = order // expert.shape[1]
    sizes = jnp.bincount(expert.reshape(-1), length=w_up.shape[0])
    # moe_mlp multiplies float32 as float32 on every device; ask the same of ragged_dot.
    precision = "highest" if x.dtype == jnp.float32 else None
    ragged_dot = functools.partial(jax.lax.ragged_dot, group_sizes=sizes, precision=precision)
    gate, up = jnp.split(ragged_dot(x[token], w_up), 2, axis=1)
    rows = ragged_dot(jax.nn.silu(gate) * up, w_down)
    return jnp.zeros_like(x).at[token].add(rows * weight.reshape(-1)[order, None].astype(x.dtype))


class Block(nnx.Module):
    """One transformer block, with a mixture of experts as its feed-forward network."""

    def __init__(self, config: Config, layer_fn: Callable, rngs: nnx.Rngs):
        norm = functools.partial(nnx.RMSNorm, config.width, dtype=config.dtype, rngs=rngs)
        self.attention_norm, self.attention = norm(), Attention(config.width, config.dtype, rngs)
        self.moe_norm = norm()
        self.moe = MoE(
            config.width, config.expert_width, config.experts, config.top_k, experts_fn=layer_fn,
            rngs=rngs,
        )  # fmt: skip

    def __call__(self, x, key=None, scales=None):
        x = x + self.attention(self.attention_norm(x))
        y, report = self.moe(self.moe_norm(x).reshape(-1, x.shape[-1]), key, state=scales)
        return x + y.reshape(x.shape), report.balance_loss


def looked_up(embed: nnx.Embed, inputs):
    """``embed(inputs)`` by a product with ones and zeros. The gradient of a lookup adds rows of
    tokens at random places; there are few bytes, so on a GPU most of these additions wait for
    another."""
    rows = jax.nn.one_hot(inputs, embed.num_embeddings, dtype=embed.dtype)
    return jnp.matmul(rows, embed.embedding[...].astype(embed.dtype), precision="highest")


class LanguageModel(nnx.Module):
    """Bytes ``(batch, length)`` to next-byte logits, and the mean load-balancing loss. ``scales``
    are states of delayed scaling, as :meth:`Trainer.new_scales` makes them."""

    def __init__(self, config: Config, layer_fn: Callable, rngs: nnx.Rngs):
        self.embed = nnx.Embed(texts.VOCABULARY, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, layer_fn, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(config.width, texts.VOCABULARY, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens, key=None, scales=None):
        x = looked_up(self.embed, tokens)
        balances = []
        for i, block in enumerate(self.blocks):
            own = jax.tree.map(lambda a, i=i: a[i], scales)
            x, balance = block(x, None if key is None else jax.random.fold_in(key, i), own)
            balances.append(balance)
        return self.head(self.norm(x)).astype(jnp.float32), jnp.stack(balances).mean()


# ---- training --------------------------------------------------------------------------------


class Trainer:
    """The compiled functions of one model, and its state: a pytree, to be donated and saved."""

    def __init__(self, config: Config, layer_fn: Callable | None = None,
                 mesh: jax.sharding.Mesh | None = None):  # fmt: skip
        # In NVFP4 and FP8 a recipe quantizes all six products, forward and backward.
        ours = functools.partial(jgg.moe_mlp, recipe=RECIPES.get(config.precision))
        self.config, self.mesh = config, mesh
        self.layer_fn = several_devices.across(layer_fn or ours, mesh)
        self.optimizer = make_optimizer(config)
        self.graph = nnx.graphdef(nnx.eval_shape(self.new_model))
        # Where the state is, and that results are on every device.
        places, whole = (None, None) if mesh is None else (self.places, self.whole)
        self.train_step = jax.jit(
            self._train_step, donate_argnums=0, out_shardings=mesh and (places, whole)
        )
        self.bits_per_byte = jax.jit(self._bits_per_byte, out_shardings=whole)
        self.sample = jax.jit(self._sample, out_shardings=whole)

    def new_model(self) -> LanguageModel:
        return LanguageModel(self.config, self.layer_fn, nnx.Rngs(self.config.seed))

    def new_state(self) -> dict:
        params = nnx.state(self.new_model(), nnx.Param)
        state = {"step": jnp.int32(0), "params": params, "optimizer": self.optimizer.init(params)}
        return state | self.new_scales()

    def new_scales(self) -> dict:
        """States of every block's two products, if scales are delayed."""
        if self.config.precision != "fp8-delayed":
            return {}
        new = jgg.FP8State.new(self.config.layers)
        return {"scales": (new, new)}

    @functools.cached_property
    def places(self) -> Any:
        return several_devices.shardings(self.mesh, jax.eval_shape(self.new_state))

    @property
    def whole(self) -> Any:
        return several_devices.shardings(self.mesh, jax.ShapeDtypeStruct((), jnp.float32))

    @functools.cached_property
    def state(self) -> Any:
        return jax.jit(self.new_state, out_shardings=self.mesh and self.places)()

    def _train_step(self, state, text):
        """Returns the new state and the batch's mean bits per byte."""
        # The batch follows from the seed and the step, so a resumed run sees the same ones.
        key = jax.random.fold_in(jax.random.key(self.config.seed), state["step"])
        tokens = texts.random_batch(text, self.config.batch, self.config.context, key)

        def loss(params, scales):
            key_of_rounding = jax.random.fold_in(key, 1)
            nats, balance = self.cross_entropy(params, tokens, key_of_rounding, scales)
            return nats.mean() + BALANCE_WEIGHT * balance, nats.mean()

        params, optimizer, scales = state["params"], state["optimizer"], state.get("scales")
        gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
        (_, nats), (gradients, seen) = gradient(params, scales)
        updates, optimizer = self.optimizer.update(gradients, optimizer, params)
        params = optax.apply_updates(params, updates)
        new = {"step": state["step"] + 1, "params": params, "optimizer": optimizer}
        if scales is not None:
            new["scales"] = tuple(old.updated(of) for old, of in zip(scales, seen, strict=True))
        return new, nats / jnp.log(2.0)

    def cross_entropy(self, params, tokens, key=None, scales=None):
        """Nats of every byte of ``(batch, length)`` but the first, and the balancing loss."""
        tokens = several_devices.divided(self.mesh, tokens)
        logits, balance = nnx.merge(self.graph, params)(tokens[:, :-1], key, scales)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]), balance

    def _bits_per_byte(self, params, text, scales=None):
        """Mean over a text, read in windows of ``context`` bytes that know nothing before them."""
        batch, context = self.config.batch, self.config.context
        windows = (text.size - 1) // context
        # The last batch is filled up with the last window, which counts once.
        window = jnp.minimum(jnp.arange(-(-windows // batch) * batch), windows - 1)
        tokens = text[window[:, None] * context + jnp.arange(context + 1)]
        nats = jax.lax.map(
            lambda batch_of_tokens: self.cross_entropy(params, batch_of_tokens, None, scales)[0],
            tokens.reshape(-1, batch, context + 1),
        )
        return nats.reshape(-1, context)[:windows].mean() / jnp.log(2.0)

    def _sample(self, params, prompt, key, scales=None):
        """``SAMPLED_BYTES`` bytes that follow ``prompt``, which has ``context`` bytes."""
        model = nnx.merge(self.graph, params)

        def next_byte(window, key):
            logits, _ = model(window[None], None, scales)
            byte = jax.random.categorical(key, logits[0, -1] / TEMPERATURE).astype(window.dtype)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(next_byte, prompt, jax.random.split(key, SAMPLED_BYTES))[1]


def make_optimizer(config: Config) -> optax.GradientTransformation:
    warmup, end = config.steps // 20, config.lr / 20
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.lr, warmup, config.steps, end)
    decayed = functools.partial(jax.tree.map, lambda p: p.ndim > 1)  # all but norms and biases
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def run(config: Config, text: np.ndarray, out: Path, eval_every: int, resume: bool,
        beside: list[Path], mesh: jax.sharding.Mesh | None = None) -> dict:  # fmt: skip
    """Train from the start or from the latest checkpoint; files go to ``out``. A checkpoint may be
    of another number of devices."""
    checkpoints = run_folder.Checkpoints(out / "checkpoints")
    about = dataclasses.asdict(config) | {"text_crc32": zlib.crc32(text.tobytes())}
    checkpoints.begin(about, resume)
    trainer, first = Trainer(config, mesh=mesh), several_devices.is_first()
    say = print if first else lambda *_: None
    # Bits per byte: of each step's batch; of the held-out part, as pairs (step, mean).
    history = {"training": [], "held_out": []}
    if resume:
        trainer.state = checkpoints.state(jax.eval_shape(trainer.new_state), trainer.places)
        history = checkpoints.about()["history"]

    bigram = texts.bigram_bits_per_byte(*texts.split(text))
    everywhere = functools.partial(several_devices.on_every_device, mesh)
    training, held_out = map(everywhere, texts.split(text))
    parameters = sum(p.size for p in jax.tree.leaves(trainer.state["params"]))
    devices = "" if mesh is None else f"{mesh.size} x "
    say(
        f"{parameters:,} parameters on {devices}{jax.devices()[0].device_kind}; "
        f"{training.size:,} bytes to train on, {held_out.size:,} held out"
    )

    # Compiled ahead, so that tokens/s is the speed of training alone.
    train_step = trainer.train_step.lower(trainer.state, training).compile()
    tokens = config.batch * config.context
    done, speeds = len(history["training"]), []
    bar = tqdm(unit="tokens", unit_scale=tokens, total=config.steps, initial=done,
               disable=None if first else True)  # fmt: skip
    while done < config.steps:
        stop = min(done - done % eval_every + eval_every, config.steps)
        losses, began = [], time.perf_counter()
        for step in range(done, stop):
            trainer.state, bits = train_step(trainer.state, training)
            losses.append(bits)
            bar.update()
            if step % 10 == 0:
                bar.set_postfix_str(f"loss {float(bits):.3f}")  # waits for the device
        losses = [float(bits) for bits in losses]
        speeds.append(len(losses) * tokens / (time.perf_counter() - began))
        done = stop
        params, scales = trainer.state["params"], trainer.state.get("scales")
        mean = float(trainer.bits_per_byte(params, held_out, scales))
        history["training"] += losses
        history["held_out"].append((done, mean))
        checkpoints.save(done, trainer.state, history)
        (bar.write if first else say)(
            f"step {done}: loss {losses[-1]:.3f}, held out {mean:.3f}, bigram {bigram:.3f} bits "
            f"per byte; {speeds[-1]:,.0f} tokens/s"
        )
    bar.close()

    prompt = training[-config.context :]
    # Made where it is used: of several processes, none can send another a key.
    key = jax.jit(lambda: jax.random.key(config.seed), out_shardings=mesh and trainer.whole)()
    params, scales = trainer.state["params"], trainer.state.get("scales")
    sample = trainer.sample(params, prompt, key, scales)
    results = {
        "held_out": history["held_out"][-1][1],
        "bigram": bigram,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "sample": texts.as_text(sample),
        "history": history,
    }
    if first:
        run_folder.write(out, dataclasses.asdict(config) | results, beside)
    say(f"\nSampled after {texts.as_text(prompt)[-50:]!r}:\n\n{results['sample']}\n")
    say(f"held out {results['held_out']:.3f}, bigram {bigram:.3f} bits per byte; see {out}")
    return results


# ---- command line ----------------------------------------------------------------------------


def parse(argv) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.option("--text", texts.DEFAULT, "file to train on")
    parser.option("--out", Path("runs/train_moe"), "folder for checkpoints and results", type=Path)
    parser.options_of(Config)
    parser.option("--eval-every", 100, "steps between evaluations, each with a checkpoint",
                  type=count)  # fmt: skip
    several_devices.add_options(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    parser.add_argument("--compare", action="store_true", help="only time the step, see above")
    parser.add_argument("--beside", nargs="*", default=[], type=Path, metavar="OUT",
                        help="folders of finished runs whose curves are drawn in this one's plot",
                        )  # fmt: skip
    args = parser.parse_args(argv)
    if args.width % HEAD_SIZE:
        parser.error(f"--width {args.width} is not a multiple of {HEAD_SIZE}")
    if args.top_k > args.experts:
        parser.error(f"--top-k {args.top_k} is more than --experts {args.experts}")
    several_devices.check(parser, args)
    if args.compare and args.devices > 1:
        parser.error("--compare is of one device")
    for folder in args.beside:
        if not (folder / "metrics.json").is_file():
            parser.error(f"--beside {folder} holds no finished run")
    return args


def main(argv=None) -> dict:
    args = parse(argv)
    config = settings(Config, args)
    text = texts.read(args.text, config.context)
    with jax.numpy_dtype_promotion("standard"):  # flax and optax do not run under "strict"
        if args.compare:
            trainers = {
                "jax_groupgemm": Trainer(config),
                "jax.lax.ragged_dot": Trainer(config, ragged_dot_layer),
            }
            return in_turns(trainers, jnp.asarray(text))
        mesh = several_devices.start(args)
        return run(config, text, args.out, args.eval_every, args.resume, args.beside, mesh)


if __name__ == "__main__":
    main()
