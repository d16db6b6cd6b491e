"""Programs of other libraries, with stand-ins for them; tests/lib/other_libraries.py has the real
ones."""

import runpy
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from jax_groupgemm.integrations import maxtext

CALL = (jnp.ones((4, 3)), jnp.ones((2, 3, 5)), jnp.array([1, 3]))


@pytest.fixture
def trainer(monkeypatch):
    """MaxText's program: it keeps its arguments, and the primitives of a product."""
    module = types.ModuleType(maxtext.TRAINER)
    module.seen = []

    def main(argv):
        text = str(jax.make_jaxpr(lambda *args: jax.lax.ragged_dot(*args))(*CALL))
        module.seen.append((list(argv), "jgg_mm" in text))

    module.main = main
    parts = maxtext.TRAINER.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
    monkeypatch.setitem(sys.modules, maxtext.TRAINER, module)
    return module


def test_maxtext(trainer):
    """Its products are ours while it runs, and it has the settings that call them."""
    maxtext.train(["base.yml", "steps=3", "megablox=False"])
    trainer.main([])
    (argv, ours), (_, afterwards) = trainer.seen
    assert ours
    assert not afterwards
    added = ["sparse_matmul=true", "use_tokamax_gmm=false"]
    assert argv == [maxtext.TRAINER, "base.yml", "steps=3", "megablox=False", *added]


def test_maxtext_with_a_setting_that_is_said_twice(trainer):
    maxtext.train(["base.yml", "megablox=false", "megablox=False"])
    assert trainer.seen[0][0][2:4] == ["megablox=false", "megablox=False"]


def test_maxtext_as_a_program(trainer, monkeypatch):
    run_as_a_program(monkeypatch, "base.yml")
    assert trainer.seen[0][0][1] == "base.yml"


def run_as_a_program(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["maxtext", *arguments])
    monkeypatch.delitem(sys.modules, maxtext.__name__)
    runpy.run_module(maxtext.__name__, run_name="__main__")


@pytest.mark.parametrize("argument", ["megablox=true", "use_tokamax_gmm=True", "sparse_matmul="])
def test_maxtext_with_another_kernel(trainer, argument):
    with pytest.raises(ValueError, match=f"{argument} chooses a kernel of MaxText's own"):
        maxtext.train(["base.yml", argument])
    assert not trainer.seen


def test_without_maxtext(monkeypatch):
    monkeypatch.setitem(sys.modules, "maxtext", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"but maxtext.* is not installed: pip install 'maxtext\[tpu\]>"
    ):
        maxtext.train(["base.yml"])


def test_the_program_without_maxtext(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "maxtext", None)
    with pytest.raises(SystemExit) as error:
        run_as_a_program(monkeypatch, "base.yml")
    assert error.value.code == (
        "jax_groupgemm.integrations.maxtext needs maxtext.trainers.pre_train.train, but "
        "maxtext.trainers is not installed: pip install 'maxtext[tpu]>=0.2.5', which runs on CPUs, "
        "too"
    )


def test_the_program_says_what_it_is(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "maxtext", None)
    run_as_a_program(monkeypatch, "--help")
    assert capsys.readouterr().out == f"{maxtext.__doc__}\n"
