"""The decoder of examples/ on folders of weights, and what generate.py says of those it refuses."""

import functools
import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
CHUNK, ROOM = 8, 40  # the last step of a text fills up its chunk
NAMES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe",
    "minimax_m2", "ernie4_5_moe", "granitemoeshared",
)  # fmt: skip


def example(name):
    for needed in ("flax", "tokenizers", "tqdm"):
        pytest.importorskip(needed)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module(name)


@functools.cache
def step():
    """Logits of tokens and the cache after them. Models of the same structure share programs."""
    nnx = importlib.import_module("flax.nnx")

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def run(graph, params, cache, tokens, start, count):
        model = nnx.merge(graph, params)
        x, cache = model(tokens, start, count, cache)
        return model.logits(x), cache

    return run


class Run:
    """A model of a folder, and what it remembers."""

    def __init__(self, folder, dtype="float32", **options):
        self.about = example("decoder.config").read(folder)
        loading = example("decoder.loading")
        options = loading.Options(dtype, tokens=ROOM, **options)
        self.model = loading.load(folder, self.about, options)
        self.split()
        self.cache = self.model.empty_cache(ROOM)
        self.at = 0

    def split(self):
        """Once more where the model was changed."""
        self.parts = importlib.import_module("flax.nnx").split(self.model)

    def __call__(self, tokens, size):
        """Logits of tokens, a step's ``size`` at a time, the last of them filled up."""
        out = []
        for i in range(0, len(tokens), size):
            some = tokens[i : i + size]
            part = np.zeros(size, np.int32)
            part[: len(some)] = some
            numbers = np.int32(self.at), np.int32(len(some))
            logits, self.cache = step()(*self.parts, self.cache, part, *numbers)
            out.append(np.asarray(logits)[: len(some)])
            self.at += len(some)
        return np.concatenate(out)


def generator(model, room, chunk, each=None, **sampling):
    """That of generate.py, with room for so many tokens."""
    sampling = example("decoder.sampling").Sampling(**sampling)
    return example("decoder.generation").Generator(model, room, sampling, chunk, each)


def agree(got, want, relative=1e-5):
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=relative * np.abs(want).max())


def refused(generate, folder, *args):
    """What follows the folder in the one sentence that generate.py ends with."""
    with pytest.raises(SystemExit) as error:
        generate.main([str(folder), "--tokens", "4", "--chunk", "16", *args])
    text = error.value.code  # Python prints it and ends with status 1
    assert text.startswith(f"{folder}: ")
    assert text.count(str(folder)) == 1
    assert "\n" not in text
    return text.removeprefix(f"{folder}: ")
