"""MaxText's training with this library's products, in place of ``python -m
maxtext.trainers.pre_train.train``:

    python -m jax_groupgemm.integrations.maxtext [CONFIG.yml] KEY=VALUE ...
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence

from .._grouped.replace import replace_ragged_dot

#: MaxText's settings with which ``RoutedMoE`` calls ``jax.lax.ragged_dot``.
SETTINGS = {"sparse_matmul": "true", "megablox": "false", "use_tokamax_gmm": "false"}
TRAINER = "maxtext.trainers.pre_train.train"


def train(arguments: Sequence[str]) -> None:
    """Trains a model as MaxText does; its experts' products are :func:`ragged_dot`.

    Args:
      arguments: those of MaxText's own program: a configuration's path, which may be left out, and
        then ``"key=value"``. The settings of ``SETTINGS`` are added.

    Raises:
      ValueError: an argument asks for another kernel than those settings do.
      ModuleNotFoundError: MaxText is not installed.
    """
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
    with replace_ragged_dot():
        trainer.main([TRAINER, *arguments, *settings])


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
    train(arguments)


if __name__ == "__main__":
    _main(sys.argv[1:])
