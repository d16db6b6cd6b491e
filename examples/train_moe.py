"""Train a byte-level mixture-of-experts language model with ``jax_groupgemm``.

    python examples/train_moe.py             # minutes on two CPU cores; uses a GPU if there is one
    python examples/train_moe.py --resume    # go on from the latest checkpoint
    python examples/train_moe.py --compare   # time the training step against jax.lax.ragged_dot
    python examples/train_moe.py --precision nvfp4 --out runs/nvfp4 --beside runs/train_moe

The text is the language reference that every CPython carries. The mixture of experts is *dropless*:
experts take as many tokens as the router sends them, with no capacity limit and no padding. See
:class:`MoE`; everything else is an ordinary small transformer.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

import jax_groupgemm as jgg

VOCABULARY = 256  # bytes
HEAD_SIZE = 32
BALANCE_WEIGHT = 0.01
TEXT = "pydoc_data.topics"  # the language reference that CPython carries
HELD_OUT = 0.1  # of the text, at its end: never trained on
SAMPLED_BYTES = 600
TEMPERATURE = 0.7


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run's result depends on, besides the text."""

    steps: int
    batch: int
    context: int
    layers: int
    width: int
    experts: int
    top_k: int
    expert_width: int
    lr: float
    seed: int
    precision: str

    @property
    def dtype(self) -> str:
        """Of everything but the products of experts in NVFP4."""
        return "bfloat16" if self.precision == "nvfp4" else self.precision


# ---- model -----------------------------------------------------------------------------------


def jgg_experts(rows, w_up, w_down, sizes, scale, key=None):
    """Every expert's SwiGLU network on its own rows; ``rows`` are sorted by expert.

    rows (R, D), w_up (E, D, 2F) with gate and up side by side, w_down (E, F, D), sizes (E,) rows
    per expert, scale (R,) router weights; key, for whom it concerns, is another in every training
    step. Returns (R, D).
    """
    w_up, w_down = w_up.astype(rows.dtype), w_down.astype(rows.dtype)
    hidden = jgg.grouped_mm(rows, w_up, sizes, activation="swiglu")
    return jgg.grouped_mm(hidden, w_down, sizes, row_scale=scale)


def nvfp4_experts(rows, w_up, w_down, sizes, scale, key=None):
    """The same with all six products, forward and backward, in NVFP4."""
    keys = (None, None) if key is None else jax.random.split(key)
    linear = lambda x, w, key: jgg.nvfp4_grouped_linear(
        x, w.astype(x.dtype).swapaxes(1, 2), sizes, key=key
    )
    gate, up = jnp.split(linear(rows, w_up, keys[0]), 2, axis=1)
    hidden = jax.nn.silu(gate) * up
    return linear(hidden, w_down, keys[1]) * scale.astype(rows.dtype)[:, None]


def ragged_dot_experts(rows, w_up, w_down, sizes, scale, key=None):
    """The same in plain JAX, for ``--compare``."""
    w_up, w_down = w_up.astype(rows.dtype), w_down.astype(rows.dtype)
    # grouped_mm multiplies float32 as float32 on every device; ask the same of ragged_dot.
    precision = "highest" if rows.dtype == jnp.float32 else None
    ragged_dot = functools.partial(jax.lax.ragged_dot, group_sizes=sizes, precision=precision)
    gate, up = jnp.split(ragged_dot(rows, w_up), 2, axis=1)
    return ragged_dot(jax.nn.silu(gate) * up, w_down) * scale.astype(rows.dtype)[:, None]


class MoE(nnx.Module):
    """Dropless mixture of SwiGLU experts: every token meets all of its ``top_k`` experts.

    ``experts_fn`` is what multiplies: :func:`jgg_experts`, or another of the same signature, which
    gets whatever pytrees ``w_up`` and ``w_down`` hold.
    """

    def __init__(self, config: Config, experts_fn: Callable, rngs: nnx.Rngs):
        d, e, f = config.width, config.experts, config.expert_width
        init = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        self.router = nnx.Linear(d, e, use_bias=False, dtype=jnp.float32, rngs=rngs)
        self.w_up = nnx.Param(init(rngs.params(), (e, d, 2 * f), jnp.float32))
        self.w_down = nnx.Param(init(rngs.params(), (e, f, d), jnp.float32))
        self.experts, self.top_k, self.experts_fn = e, config.top_k, experts_fn

    def __call__(self, x, key=None):
        """``(tokens, D) -> (tokens, D)``, and the load-balancing loss."""
        # Route: each token chooses k experts.
        probabilities = jax.nn.softmax(self.router(x))
        weights, chosen = jax.lax.top_k(probabilities, self.top_k)
        weights = weights / weights.sum(axis=1, keepdims=True)

        # Dispatch: one row for each (token, choice), sorted by expert.
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert)
        token = order // self.top_k
        sizes = jnp.bincount(expert, length=self.experts)

        # Compute: each expert on its own rows, however many they are.
        w_up, w_down = self.w_up.get_value(), self.w_down.get_value()
        scale = weights.reshape(-1)[order]
        rows = self.experts_fn(x[token], w_up, w_down, sizes, scale, key)

        # Combine: the sum of each token's rows, which are weighted already.
        y = jnp.zeros_like(x).at[token].add(rows)

        # Load balancing: 1 where choices and probabilities are spread evenly, larger elsewhere.
        load = sizes.astype(jnp.float32) / expert.size
        balance = self.experts * jnp.sum(load * probabilities.mean(axis=0))
        return y, balance


class Attention(nnx.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.qkv = linear(config.width, 3 * config.width)
        self.out = linear(config.width, config.width)

    def __call__(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, -1, HEAD_SIZE)
        q, k, v = rotate(qkv[:, :, 0]), rotate(qkv[:, :, 1]), qkv[:, :, 2]
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


def rotate(x):
    """Rotary position embedding of ``(batch, length, heads, HEAD_SIZE)``."""
    frequency = 10_000.0 ** -jnp.linspace(0, 1, HEAD_SIZE // 2, endpoint=False)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    """One transformer block, with a mixture of experts as its feed-forward network."""

    def __init__(self, config: Config, experts_fn: Callable, rngs: nnx.Rngs):
        norm = functools.partial(nnx.RMSNorm, config.width, dtype=config.dtype, rngs=rngs)
        self.attention_norm, self.attention = norm(), Attention(config, rngs)
        self.moe_norm, self.moe = norm(), MoE(config, experts_fn, rngs)

    def __call__(self, x, key=None):
        x = x + self.attention(self.attention_norm(x))
        y, balance = self.moe(self.moe_norm(x).reshape(-1, x.shape[-1]), key)
        return x + y.reshape(x.shape), balance


class LanguageModel(nnx.Module):
    """Bytes ``(batch, length)`` to next-byte logits, and the mean load-balancing loss."""

    def __init__(self, config: Config, experts_fn: Callable, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, experts_fn, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(config.width, VOCABULARY, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens, key=None):
        x = self.embed(tokens)
        balances = []
        for i, block in enumerate(self.blocks):
            x, balance = block(x, None if key is None else jax.random.fold_in(key, i))
            balances.append(balance)
        return self.head(self.norm(x)).astype(jnp.float32), jnp.stack(balances).mean()


# ---- training --------------------------------------------------------------------------------


class Trainer:
    """The compiled functions of one model, and its state: a pytree, to be donated and saved."""

    def __init__(self, config: Config, experts_fn: Callable | None = None):
        ours = nvfp4_experts if config.precision == "nvfp4" else jgg_experts
        self.config, self.experts_fn = config, experts_fn or ours
        self.optimizer = make_optimizer(config)
        self.graph = nnx.graphdef(nnx.eval_shape(self.new_model))
        self.train_step = jax.jit(self._train_step, donate_argnums=0)
        self.bits_per_byte = jax.jit(self._bits_per_byte)
        self.sample = jax.jit(self._sample)

    def new_model(self) -> LanguageModel:
        return LanguageModel(self.config, self.experts_fn, nnx.Rngs(self.config.seed))

    def new_state(self) -> dict:
        params = nnx.state(self.new_model(), nnx.Param)
        return {"step": jnp.int32(0), "params": params, "optimizer": self.optimizer.init(params)}

    @functools.cached_property
    def state(self) -> Any:
        return jax.jit(self.new_state)()

    def _train_step(self, state, text):
        """Returns the new state and the batch's mean bits per byte."""
        # The batch follows from the seed and the step, so a resumed run sees the same ones.
        key = jax.random.fold_in(jax.random.key(self.config.seed), state["step"])
        tokens = random_batch(self.config, text, key)

        def loss(params):
            nats, balance = self.cross_entropy(params, tokens, jax.random.fold_in(key, 1))
            return nats.mean() + BALANCE_WEIGHT * balance, nats.mean()

        (_, nats), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
        params, optimizer = state["params"], state["optimizer"]
        updates, optimizer = self.optimizer.update(gradients, optimizer, params)
        params = optax.apply_updates(params, updates)
        state = {"step": state["step"] + 1, "params": params, "optimizer": optimizer}
        return state, nats / jnp.log(2.0)

    def cross_entropy(self, params, tokens, key=None):
        """Nats of every byte of ``(batch, length)`` but the first, and the balancing loss."""
        logits, balance = nnx.merge(self.graph, params)(tokens[:, :-1], key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]), balance

    def _bits_per_byte(self, params, text):
        """Mean over a text, read in windows of ``context`` bytes that know nothing before them."""
        batch, context = self.config.batch, self.config.context
        windows = (text.size - 1) // context
        # The last batch is filled up with the last window, which counts once.
        window = jnp.minimum(jnp.arange(-(-windows // batch) * batch), windows - 1)
        tokens = text[window[:, None] * context + jnp.arange(context + 1)]
        nats = jax.lax.map(
            lambda batch_of_tokens: self.cross_entropy(params, batch_of_tokens)[0],
            tokens.reshape(-1, batch, context + 1),
        )
        return nats.reshape(-1, context)[:windows].mean() / jnp.log(2.0)

    def _sample(self, params, prompt, key):
        """``SAMPLED_BYTES`` bytes that follow ``prompt``, which has ``context`` bytes."""
        model = nnx.merge(self.graph, params)

        def next_byte(window, key):
            logits, _ = model(window[None])
            byte = jax.random.categorical(key, logits[0, -1] / TEMPERATURE).astype(window.dtype)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(next_byte, prompt, jax.random.split(key, SAMPLED_BYTES))[1]


def random_batch(config: Config, text, key):
    """``batch`` spans of the text: ``context`` bytes and the next one."""
    span = config.context + 1
    starts = jax.random.randint(key, (config.batch, 1), 0, text.size - span + 1)
    return text[starts + jnp.arange(span)]


def make_optimizer(config: Config) -> optax.GradientTransformation:
    warmup, end = config.steps // 20, config.lr / 20
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.lr, warmup, config.steps, end)
    decayed = functools.partial(jax.tree.map, lambda p: p.ndim > 1)  # all but norms and biases
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def split(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What to train on, and what is held out."""
    boundary = round(text.size * (1 - HELD_OUT))
    return text[:boundary], text[boundary:]


def bigram_bits_per_byte(train, held_out, smoothing=0.1) -> float:
    """What counting pairs of bytes achieves: the baseline to beat."""
    counts = np.full((VOCABULARY, VOCABULARY), smoothing)
    np.add.at(counts, (train[:-1], train[1:]), 1)
    probabilities = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log2(probabilities[held_out[:-1], held_out[1:]]).mean())


def run(config: Config, text: np.ndarray, out: Path, eval_every: int, resume: bool,
        beside: list[Path]) -> dict:  # fmt: skip
    """Train from the start or from the latest checkpoint; files go to ``out``."""
    checkpoints = Checkpoints(out / "checkpoints", config, text, resume)
    trainer = Trainer(config)
    # Bits per byte: of each step's batch; of the held-out part, as pairs (step, mean).
    history = {"training": [], "held_out": []}
    if resume:
        trainer.state, history = checkpoints.restore(trainer.state)

    bigram = bigram_bits_per_byte(*split(text))
    training, held_out = map(jnp.asarray, split(text))
    parameters = sum(p.size for p in jax.tree.leaves(trainer.state["params"]))
    print(
        f"{parameters:,} parameters on {jax.devices()[0].device_kind}; "
        f"{training.size:,} bytes to train on, {held_out.size:,} held out"
    )

    # Compiled ahead, so that tokens/s is the speed of training alone.
    train_step = trainer.train_step.lower(trainer.state, training).compile()
    tokens = config.batch * config.context
    done, speeds = len(history["training"]), []
    bar = tqdm(unit="tokens", unit_scale=tokens, total=config.steps, initial=done, disable=None)
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
        mean = float(trainer.bits_per_byte(trainer.state["params"], held_out))
        history["training"] += losses
        history["held_out"].append((done, mean))
        checkpoints.save(done, trainer.state, history)
        bar.write(
            f"step {done}: loss {losses[-1]:.3f}, held out {mean:.3f}, bigram {bigram:.3f} bits "
            f"per byte; {speeds[-1]:,.0f} tokens/s"
        )
    bar.close()

    prompt = training[-config.context :]
    sample = trainer.sample(trainer.state["params"], prompt, jax.random.key(config.seed))
    results = {
        "held_out": history["held_out"][-1][1],
        "bigram": bigram,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "sample": as_text(sample),
        "history": history,
    }
    (out / "metrics.json").write_text(json.dumps(dataclasses.asdict(config) | results, indent=1))
    plot(results | {"precision": config.precision}, beside, out / "loss.png")
    print(f"\nSampled after {as_text(prompt)[-50:]!r}:\n\n{results['sample']}\n")
    print(f"held out {results['held_out']:.3f}, bigram {bigram:.3f} bits per byte; see {out}")
    return results


class Checkpoints:
    """State and history of a run, saved as one, and what a run must have to go on from them."""

    def __init__(self, folder: Path, config: Config, text: np.ndarray, resume: bool):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self.run = dataclasses.asdict(config) | {"text_crc32": zlib.crc32(text.tobytes())}
        step = self.manager.latest_step()
        if not resume and step is not None:
            raise SystemExit(f"{folder} is not empty: pass --resume to go on, or another --out")
        if resume and step is None:
            raise SystemExit(f"--resume: there is no checkpoint in {folder}")
        if resume:
            saved = self._restore(about=ocp.args.JsonRestore())["about"]["run"]
            changed = [f"{k} was {saved[k]}, is {v}" for k, v in self.run.items() if saved[k] != v]
            if changed:
                raise SystemExit(f"--resume: {folder} is of another run: {'; '.join(changed)}")

    def save(self, step: int, state, history: dict) -> None:
        about = ocp.args.JsonSave({"run": self.run, "history": history})
        state = ocp.args.StandardSave(state)
        self.manager.save(step, args=ocp.args.Composite(state=state, about=about))

    def restore(self, like) -> tuple[Any, dict]:
        """The latest state, which has the structure of ``like``, and history."""
        state = ocp.args.StandardRestore(like)
        latest = self._restore(state=state, about=ocp.args.JsonRestore())
        return latest["state"], latest["about"]["history"]

    def _restore(self, **args):
        return self.manager.restore(self.manager.latest_step(), args=ocp.args.Composite(**args))


def load(out: Path) -> tuple[Config, Any, int]:
    """Configuration and parameters of the latest checkpoint in ``out``, and its text's CRC-32."""
    folder = (out / "checkpoints").absolute()
    if not folder.is_dir() or not any(folder.iterdir()):
        raise SystemExit(f"no checkpoint in {folder}: python examples/train_moe.py --out {out}")
    manager = ocp.CheckpointManager(folder)
    step = manager.latest_step()

    def restore(**args):
        return manager.restore(step, args=ocp.args.Composite(**args))

    run = restore(about=ocp.args.JsonRestore())["about"]["run"]
    text_crc32 = run.pop("text_crc32")
    config = Config(**run)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(Trainer(config).new_state)
    like = jax.tree.map(lambda leaf: leaf.update(sharding=here), shapes)
    state = restore(state=ocp.args.StandardRestore(like))["state"]
    return config, state["params"], text_crc32


def plot(results: dict, beside: list[Path], path: Path) -> None:
    """The run's losses, and those of the runs in other folders on held-out text."""
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    losses, bigram = results["history"]["training"], results["bigram"]
    axes.plot(range(1, len(losses) + 1), losses, color="0.8", label="training batch")
    others = [json.loads((folder / "metrics.json").read_text()) for folder in beside]
    for i, each in enumerate([results, *others]):
        steps, held_out = zip(*each["history"]["held_out"], strict=True)
        label = f"held out, {each['precision']}: {held_out[-1]:.3f} at the end"
        axes.plot(steps, held_out, "o-", color=f"C{i if i < 3 else i + 1}", label=label)
    axes.axhline(bigram, color="C3", linestyle="--", label=f"bigram counts, {bigram:.2f}")
    axes.set(xlabel="step", ylabel="bits per byte", title="Byte-level mixture of experts")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def as_text(tokens) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")


# ---- comparison ------------------------------------------------------------------------------


def compare(config: Config, text: np.ndarray, repeats: int = 15, warm_up: int = 3) -> dict:
    """Time the training step on both products, in turns, so that both meet the same machine."""
    trainers = {
        "jax_groupgemm": Trainer(config),
        "jax.lax.ragged_dot": Trainer(config, ragged_dot_experts),
    }
    training = jnp.asarray(text)
    seconds, losses = {name: [] for name in trainers}, {name: [] for name in trainers}
    for _ in tqdm(range(warm_up + repeats), unit="step", disable=None):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            trainer.state, bits = trainer.train_step(trainer.state, training)
            jax.block_until_ready((trainer.state, bits))
            seconds[name].append(time.perf_counter() - began)
            losses[name].append(float(bits))
    medians = {name: statistics.median(times[warm_up:]) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"training step with {name}: {1e3 * median:.2f} ms, median of {repeats}")
    ours, theirs = medians.values()
    difference = float(np.ptp([*losses.values()], axis=0).max())
    print(f"ratio {theirs / ours:.2f} on {jax.devices()[0].device_kind}")
    print(f"their losses differ by at most {difference:.1e} bits per byte")
    return {"seconds": medians, "ratio": theirs / ours, "difference": difference}


# ---- command line ----------------------------------------------------------------------------


def read_text(name: str, context: int) -> np.ndarray:
    """The text's bytes, as int32 tokens."""
    if name == TEXT:
        text = "\n".join(topics[topic] for topic in sorted(topics)).encode()
    elif Path(name).is_file():
        text = Path(name).read_bytes()
    else:
        raise SystemExit(f"--text: there is no file {name}")
    least = round((context + 2) / HELD_OUT)
    if len(text) < least:
        raise SystemExit(
            f"--text: {name} has {len(text)} bytes; the held-out tenth must hold --context "
            f"{context}, so at least {least} are needed"
        )
    return np.frombuffer(text, np.uint8).astype(np.int32)


def parse(argv) -> argparse.Namespace:
    def count(value):
        if int(value) < 1:
            raise argparse.ArgumentTypeError(f"{value} is not positive")
        return int(value)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def option(name, default, text, **kwargs):
        parser.add_argument(name, default=default, help=f"{text} (default: {default})", **kwargs)

    option("--text", TEXT, "file to train on")
    option("--out", Path("runs/train_moe"), "folder for checkpoints and results", type=Path)
    option("--steps", 800, "training steps", type=count)
    option("--batch", 16, "sequences per step", type=count)
    option("--context", 128, "bytes per sequence", type=count)
    option("--layers", 2, "transformer blocks", type=count)
    option("--width", 128, f"model width, a multiple of {HEAD_SIZE}", type=count)
    option("--experts", 8, "experts per block", type=count)
    option("--top-k", 2, "experts per token", type=count)
    option("--expert-width", 128, "hidden width of one expert", type=count)
    option("--lr", 3e-3, "peak learning rate", type=float)
    option("--seed", 0, "of the initial weights, the batches and the sample", type=int)
    option("--precision", "float32", "to compute in; nvfp4: the experts' products, else bfloat16",
           choices=["float32", "bfloat16", "nvfp4"])  # fmt: skip
    option("--eval-every", 100, "steps between evaluations, each with a checkpoint", type=count)
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
    for folder in args.beside:
        if not (folder / "metrics.json").is_file():
            parser.error(f"--beside {folder} holds no finished run")
    return args


def main(argv=None) -> dict:
    args = parse(argv)
    config = Config(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Config)})
    text = read_text(args.text, config.context)
    with jax.numpy_dtype_promotion("standard"):  # flax and optax do not run under "strict"
        if args.compare:
            return compare(config, text)
        return run(config, text, args.out, args.eval_every, args.resume, args.beside)


if __name__ == "__main__":
    main()
