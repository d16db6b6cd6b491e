"""What a training run leaves in its folder: checkpoints, results, and a plot of its losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import matplotlib.figure
import orbax.checkpoint as ocp


class Checkpoints:
    """States of a run, each saved with its history and with what makes it that run."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.folder = folder
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def begin(self, run: dict, resume: bool) -> None:
        """Refuse to mix runs: a new one needs an empty folder, a resumed one its own."""
        self.run = run
        step = self.manager.latest_step()
        if not resume and step is not None:
            raise SystemExit(
                f"{self.folder} is not empty: pass --resume to go on, or another --out"
            )
        if resume and step is None:
            raise SystemExit(f"--resume: there is no checkpoint in {self.folder}")
        if resume:
            saved = self.about()["run"]
            was = {k: saved.get(k, "absent") for k in run}
            changed = [f"{k} was {was[k]}, is {v}" for k, v in run.items() if was[k] != v]
            if changed:
                raise SystemExit(f"--resume: {self.folder} is of another run: {'; '.join(changed)}")

    def save(self, step: int, state, history: dict) -> None:
        about = ocp.args.JsonSave({"run": self.run, "history": history})
        state = ocp.args.StandardSave(state)
        self.manager.save(step, args=ocp.args.Composite(state=state, about=about))

    def about(self) -> dict:
        """``run`` and ``history`` of the latest."""
        return self._restore(about=ocp.args.JsonRestore())["about"]

    def state(self, shapes, shardings=None) -> Any:
        """The latest, on one device unless there are ``shardings``; ``shapes`` as of
        ``jax.eval_shape``."""
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if shardings is None:
            shardings = jax.tree.map(lambda _: here, shapes)
        like = jax.tree.map(lambda leaf, at: leaf.update(sharding=at), shapes, shardings)
        return self._restore(state=ocp.args.StandardRestore(like))["state"]

    def _restore(self, **args):
        step = self.manager.latest_step()
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**args))
        except Exception as error:  # orbax, TensorStore and JSON have nothing narrower in common
            raise SystemExit(
                f"{self.folder / str(step)} cannot be read: delete that folder to go on from the "
                "checkpoint before it, if there is one"
            ) from error


def finished(out: Path) -> Checkpoints:
    """Those of a run in ``out``."""
    folder = (out / "checkpoints").absolute()
    if not folder.is_dir() or not any(folder.iterdir()):
        raise SystemExit(f"no checkpoint in {folder}: python examples/train_moe.py --out {out}")
    return Checkpoints(folder)


def write(out: Path, results: dict, beside: list[Path]) -> None:
    (out / "metrics.json").write_text(json.dumps(results, indent=1))
    plot(results, beside, out / "loss.png")


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
