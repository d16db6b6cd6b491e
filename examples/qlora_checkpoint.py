"""Fine-tunes adapters over a Hugging Face checkpoint: what ``qlora_moe.py CHECKPOINT`` runs."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jax_groupgemm as jgg
import run_folder
import texts
from decoder import adapters, config, loading, peft, tokens
from decoder.errors import Refused, is_folder
from decoder.experts import formats
from decoder.training import cross_entropy
from decoder.weights import format_of, in_one_sentence
from options import count, positive

BASES = ("nvfp4", "affine4", "fp8", "as_stored")
EVALUATED = 64  # sequences of the held-out text, at most
#: Of the options that only these runs have, and of those with another default elsewhere.
DEFAULTS = {
    "base": None, "targets": "both", "alpha": 16.0, "batch": 4, "context": 256,
    "seed": 0, "eval_every": 50, "resume": False, "lr": 2e-4, "out": Path("runs/qlora"),
}  # fmt: skip


def add_options(group: argparse._ArgumentGroup) -> None:
    """Options that are None where they are not given."""
    add = group.add_argument
    add("--base", choices=BASES,
        help="format of frozen experts (default: as stored where they are quantized, else nvfp4)",
        )  # fmt: skip
    add("--targets", choices=("both", *adapters.TARGETS), help="what has adapters (default: both)")
    for name, kind, text in (
        ("alpha", positive, "adapters' products are multiplied by alpha / rank"),
        ("batch", count, "sequences per step"),
        ("context", count, "tokens per sequence"),
        ("seed", int, "seed of the first adapters and the batches"),
        ("eval-every", count, "steps between evaluations, each with a checkpoint"),
    ):
        default = DEFAULTS[name.replace("-", "_")]
        add(f"--{name}", type=kind, help=f"{text} (default: {default})")
    add("--resume", action="store_true", default=None, help="go on from the latest checkpoint")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that a run's result depends on, besides the checkpoint and the text."""

    steps: int
    batch: int
    context: int
    rank: int
    alpha: float
    lr: float
    seed: int
    base: str | None  # None: as the checkpoint is, or nvfp4
    targets: tuple[str, ...]


def optimizer_of(settings: Settings) -> optax.GradientTransformation:
    warmup, steps = settings.steps // 20, max(settings.steps, 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.lr, warmup, steps, settings.lr / 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))


def first_state(settings: Settings, trained: Any) -> dict:
    """A pytree, to be donated and saved."""
    optimizer = optimizer_of(settings).init(trained)
    return {"step": jnp.int32(0), "adapters": trained, "optimizer": optimizer}


# Models of the same structure share the programs.


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(graph: Any, settings: Settings, state: dict, frozen: Any, text: jax.Array):
    """The new state, and the batch's mean of nats per token."""
    # The batch follows from the seed and the step, so a resumed run sees the same ones.
    key = jax.random.fold_in(jax.random.key(settings.seed), state["step"])
    batch = texts.random_batch(text, settings.batch, settings.context, key)

    def loss(trained):
        return cross_entropy(nnx.merge(graph, trained, frozen), batch).mean()

    trained = state["adapters"]
    nats, gradients = jax.value_and_grad(loss)(trained)
    updates, optimizer = optimizer_of(settings).update(gradients, state["optimizer"], trained)
    trained = optax.apply_updates(trained, updates)
    return {"step": state["step"] + 1, "adapters": trained, "optimizer": optimizer}, nats


@functools.partial(jax.jit, static_argnums=(0, 1))
def evaluate(graph: Any, settings: Settings, trained: Any, frozen: Any, text: jax.Array):
    """Nats per token of a text, read in windows that know nothing before them."""
    batch, context = settings.batch, settings.context
    windows = min((text.size - 1) // context, EVALUATED)
    # The last batch is filled up with the last window, which counts once.
    window = jnp.minimum(jnp.arange(-(-windows // batch) * batch), windows - 1)
    spans = text[window[:, None] * context + jnp.arange(context + 1)]
    model = nnx.merge(graph, trained, frozen)
    nats = jax.lax.map(
        functools.partial(cross_entropy, model), spans.reshape(-1, batch, context + 1)
    )
    return nats.reshape(-1, context)[:windows].mean()


def read_text(name: str | None) -> tuple[str, str]:
    """A file's name and text; by default the source of the standard library's asyncio."""
    if name is None:
        return "the source of asyncio", texts.source_of_asyncio().decode()
    try:
        return name, Path(name).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise SystemExit(f"--text: {name} is no text in UTF-8") from error
    except OSError as error:
        raise SystemExit(f"--text: {name} cannot be read: {error.strerror}") from error


def tokens_of(folder: Path, about: config.Config, text: str | None, context: int) -> np.ndarray:
    tokenizer = tokens.read(folder, about.vocabulary)
    name, text = read_text(text)
    ids = tokenizer.encode(text).ids
    tokens.check(tokenizer, ids, about.vocabulary)
    least = round((context + 2) / texts.HELD_OUT)
    if len(ids) < least:
        raise SystemExit(
            f"--text: {name} has {len(ids)} tokens; the held-out tenth must hold --context "
            f"{context}, so at least {least} are needed"
        )
    return np.array(ids, np.int32)


def base_of(about: config.Config, asked: str | None) -> str:
    """What the frozen experts are in."""
    form = format_of(about.quantization)
    if form is not None and asked not in (None, "as_stored"):
        raise Refused(f"its weights are quantized already ({form}): leave --base {asked} out")
    return asked or ("nvfp4" if form is None else "as_stored")


def run(folder: Path, out: Path, text_name: str | None, settings: Settings, eval_every: int,
        resume: bool) -> dict:  # fmt: skip
    """Train from the start or from the latest checkpoint; files go to ``out``."""
    is_folder(folder)
    about = config.read(folder)
    settings = dataclasses.replace(settings, base=base_of(about, settings.base))
    if about.context is not None and settings.context > about.context:
        raise Refused(
            f"--context {settings.context} is more than config.json's max_position_embeddings, "
            f"{about.context}"
        )
    text = tokens_of(folder, about, text_name, settings.context)
    dtype = "float32" if about.dtype == "float32" else "bfloat16"
    mode = None if settings.base == "as_stored" else settings.base
    adapters.check(about, settings.targets)
    checkpoints = run_folder.Checkpoints(out / "checkpoints")
    of = {"checkpoint_crc32": fingerprint(folder), "text_crc32": zlib.crc32(text.tobytes())}
    of |= dataclasses.asdict(settings) | {"targets": [*settings.targets]}
    checkpoints.begin(of, resume)
    options = loading.Options(dtype, mode, tokens=settings.context, joined=False)
    model = loading.load(folder, about, options)
    scale = settings.alpha / settings.rank
    sites = adapters.attach(model, settings.targets, settings.rank, scale, seed=settings.seed)
    # Everything is bound to a device, as what a checkpoint gives is: there is one program then.
    here = jax.devices()[0]
    graph, trained, frozen = nnx.split(model, adapters.Adapter, ...)
    state, frozen = jax.device_put((first_state(settings, trained), frozen), here)
    training, held_out = jax.device_put(texts.split(text), here)
    held_out_loss = lambda: float(evaluate(graph, settings, state["adapters"], frozen, held_out))
    # Nats per token: of each step's batch; of the held-out part, as pairs (step, mean).
    if resume:
        state = checkpoints.state(jax.eval_shape(lambda: state))
        history = checkpoints.about()["history"]
    else:
        history = {"training": [], "held_out": [(0, held_out_loss())]}

    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    nbytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    trained = size(state["adapters"])
    print(
        f"{about.architecture} on {jax.devices()[0].device_kind}, experts in {formats(model)}: "
        f"{nbytes(frozen) / 1e6:,.1f} MB are frozen, {trained:,} parameters are trained\n"
        f"{training.size:,} tokens to train on, {held_out.size:,} held out"
    )
    if about.random:
        print("weights are random: adapters over them mean nothing")
    done = len(history["training"])
    bar = tqdm(range(done, settings.steps), unit="step", initial=done, total=settings.steps,
               disable=None)  # fmt: skip
    losses = []
    for step in bar:
        state, nats = train_step(graph, settings, state, frozen, training)
        losses.append(nats)
        if (step + 1) % eval_every and step + 1 < settings.steps:
            continue
        history["training"] += [float(nats) for nats in losses]
        history["held_out"].append((step + 1, held_out_loss()))
        losses = []
        checkpoints.save(step + 1, state, history)
        bar.write(
            f"step {step + 1}: loss {history['training'][-1]:.3f}, held out "
            f"{history['held_out'][-1][1]:.3f} nats per token"
        )

    nnx.update(model, state["adapters"])
    peft.write(out / "adapters", sites, settings.rank, settings.alpha, str(folder))
    results = {
        "before": history["held_out"][0][1],
        "after": history["held_out"][-1][1],
        "trained_parameters": trained,
        "frozen_bytes": nbytes(frozen),
        "history": history,
    }
    said = {"checkpoint": str(folder), "text": text_name} | dataclasses.asdict(settings) | results
    (out / "metrics.json").write_text(json.dumps(said, indent=1))
    plot(history, folder.name, out / "loss.png")
    quantize = "" if mode is None else f" --quantize {mode}"
    print(
        f"held out {results['before']:.3f} -> {results['after']:.3f} nats per token; see {out}\n"
        f"python examples/generate.py {folder}{quantize} --adapters {out / 'adapters'}"
    )
    return results


def fingerprint(folder: Path) -> int:
    """Of the configuration and of some weights."""
    with in_one_sentence():
        tensors = jgg.checkpoints.open(folder)
        norm = tensors["model.norm.weight"].tobytes() if "model.norm.weight" in tensors else b""
    return zlib.crc32(norm, zlib.crc32((folder / "config.json").read_bytes()))


def plot(history: dict, name: str, path: Path) -> None:
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    losses = history["training"]
    axes.plot(range(1, len(losses) + 1), losses, color="0.8", label="training batch")
    axes.plot(*zip(*history["held_out"], strict=True), "o-", label="held out")
    axes.set(xlabel="step", ylabel="nats per token", title=f"Adapters over {name}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
