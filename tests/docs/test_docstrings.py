"""Every public name has an example, and it gives what it says."""

import contextlib
import doctest
import inspect
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_groupgemm as jgg
from jax_groupgemm import checkpoint_policies, checkpoints, cost, nnx, router

CONSTANTS = {"EXPORT_DISABLED_CHECKS", "__version__"}
#: What is passed on, not made: the example is that of the function which returns it.
RETURNED = {"checkpoints.Blocks", "checkpoints.Header", "checkpoints.Tensors"}
NAMES = {name: getattr(jgg, name) for name in jgg.__all__ if name not in CONSTANTS}
NAMES = {name: value for name, value in NAMES.items() if not inspect.ismodule(value)}
for module in (checkpoint_policies, checkpoints, cost, router):
    short = module.__name__.partition(".")[2]
    NAMES |= {f"{short}.{name}": getattr(module, name) for name in module.__all__}
NAMES["nnx.MoE"] = nnx.MoE
GLOBALS = {"jax": jax, "jnp": jnp, "np": np, "jgg": jgg}


def failures(name: str, docstring: str) -> tuple[int, str]:
    """How many examples there are, and what doctest says of those that fail."""
    test = doctest.DocTestParser().get_doctest(docstring, dict(GLOBALS), name, None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        result = runner.run(test)
    return result.attempted, said.getvalue() if result.failed else ""


@pytest.mark.parametrize("name", sorted(NAMES.keys() - RETURNED))
def test_examples_run(name):
    count, said = failures(name, inspect.getdoc(NAMES[name]) or "")
    assert count, f"{name} has no example"
    assert not said, said


def test_an_example_can_fail():
    count, said = failures("one", ">>> 1 + 1\n3\n")
    assert count == 1
    assert "Got:\n    2" in said
