"""Layers of other libraries within replace_ragged_dot: docs/guides/other_libraries.md."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "lib/other_libraries.py"


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("library", ["haliax", "ejkernel", "qwix", "maxtext"])
def test_it_computes_the_same(library):
    """Where it is installed, which no extra of ours does."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "XLA_FLAGS": ""}
    run = [sys.executable, str(PROGRAM), library]
    done = subprocess.run(run, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
