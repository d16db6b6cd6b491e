"""MaxText's training with this library's products, in place of ``python -m
maxtext.trainers.pre_train.train``:

    python -m jax_groupgemm.integrations.maxtext [--layer [fp8]] [CONFIG.yml] KEY=VALUE ...

With --layer, experts are one moe_mlp; with --layer fp8, its products are FP8.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Sequence

from .._fp8.recipe import FP8Recipe
from .._grouped.replace import replace_ragged_dot
from . import _maxtext_moe

#: MaxText's settings with which ``RoutedMoE`` calls ``jax.lax.ragged_dot``.
SETTINGS = {"sparse_matmul": "true", "megablox": "false", "use_tokamax_gmm": "false"}
TRAINER = "maxtext.trainers.pre_train.train"


def train(
    arguments: Sequence[str], *, layer: bool = False, recipe: FP8Recipe | None = None
) -> None:
    """Trains a model as MaxText does; its experts' products are :func:`ragged_dot`.

    With ``layer=True`` the experts of its ``RoutedMoE`` are one :func:`moe_mlp`, with expert
    parallelism along MaxText's mesh axis ``expert``. Routing stays MaxText's. The layer drops no
    token.

    Args:
      arguments: those of MaxText's own program: a configuration's path, which may be left out, and
        then ``"key=value"``. The settings of ``SETTINGS`` are added.
      layer: experts are :func:`moe_mlp`.
      recipe: the layer's; not of ``scaling="delayed"``, whose state MaxText does not keep. Without
        a key, rounding is to nearest.

    Raises:
      ValueError: an argument asks for another kernel than those settings do, or there is a recipe
        and no layer, or the recipe has a state.
      TypeError: the recipe is no :class:`FP8Recipe`.
      NotImplementedError: with ``layer=True``, the configuration asks for something that
        :func:`moe_mlp` does not do, such as biases, capacity or tensor parallelism.
      ModuleNotFoundError: MaxText is not installed.
    """
    _check_recipe(layer, recipe)
    added = dict(SETTINGS)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in SETTINGS:
            if value.lower() != SETTINGS[key]:
                raise ValueError(
                    f"jax_groupgemm.integrations.maxtext: {argument} chooses a kernel of MaxText's "
                    f"own; leave it out, or say {key}={SETTINGS[key]}"
                )
            added.pop(key, None)
    trainer = _trainer()
    settings = [f"{key}={value}" for key, value in added.items()]
    within = _maxtext_moe.replaced(recipe) if layer else contextlib.nullcontext()
    with replace_ragged_dot(), within:
        trainer.main([TRAINER, *arguments, *settings])


def _check_recipe(layer: bool, recipe: FP8Recipe | None) -> None:
    if recipe is None:
        return
    if not isinstance(recipe, FP8Recipe):
        raise TypeError(
            "jax_groupgemm.integrations.maxtext: recipe must be an FP8Recipe, got "
            f"{type(recipe).__name__}"
        )
    if not layer:
        raise ValueError("jax_groupgemm.integrations.maxtext: a recipe is of layer=True")
    if recipe.scaling == "delayed":
        raise ValueError(
            'jax_groupgemm.integrations.maxtext: MaxText keeps no state of scaling="delayed"; use '
            '"block" or "tensor"'
        )


def _trainer() -> types.ModuleType:
    """MaxText's own program. Raises ``ModuleNotFoundError``."""
    try:
        return importlib.import_module(TRAINER)
    except ModuleNotFoundError as why:
        raise ModuleNotFoundError(
            f"jax_groupgemm.integrations.maxtext needs {TRAINER}, but {why.name} is not installed: "
            "pip install 'maxtext[tpu]>=0.2.5', which runs on CPUs, too",
            name=why.name,
        ) from why


def _main(arguments: Sequence[str]) -> None:
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return
    try:
        _trainer()
    except ModuleNotFoundError as why:  # what training itself does not find keeps its traceback
        raise SystemExit(str(why)) from why
    arguments, layer, recipe = [*arguments], False, None
    if arguments[:1] == ["--layer"]:
        layer, arguments = True, arguments[1:]
        if arguments[:1] == ["fp8"]:
            recipe, arguments = FP8Recipe(), arguments[1:]
    train(arguments, layer=layer, recipe=recipe)


if __name__ == "__main__":
    _main(sys.argv[1:])
