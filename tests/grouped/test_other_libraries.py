"""Layers of other libraries within replace_ragged_dot: docs/guides/other_libraries.md."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/lib/other_libraries.py"
WORKFLOW = ROOT / ".github/workflows/weekly.yml"
LIBRARIES = ("haliax", "ejkernel", "qwix", "maxtext")
PEFT = "peft"  # which tests/decoder/test_qlora.py runs
#: Names, with commas between them, of libraries without which their test fails.
DEMANDED = "JGG_DEMAND_LIBRARIES"


def demanded() -> set[str]:
    return {*filter(None, os.environ.get(DEMANDED, "").replace(" ", "").split(","))}


def need(library: str) -> None:
    """Skips where it is not installed, which no extra of ours does, and fails where it must be."""
    if importlib.util.find_spec(library) is not None:
        return
    if library in demanded():
        pytest.fail(f"{library} is not installed, but {DEMANDED} names it")
    pytest.skip(f"needs {library}")


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("library", LIBRARIES)
def test_it_computes_the_same(library):
    need(library)
    env = os.environ | {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "XLA_FLAGS": ""}
    run = [sys.executable, str(PROGRAM), library]
    done = subprocess.run(run, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_is_demanded_exists():
    """A misspelt name would demand nothing."""
    assert demanded() <= {*LIBRARIES, PEFT}


def test_a_library_that_is_demanded_must_be_there(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for value, fails in (("", False), ("qwix", False), ("qwix, maxtext", True), ("maxtext", True)):
        monkeypatch.setenv(DEMANDED, value)
        outcome = pytest.fail.Exception if fails else pytest.skip.Exception
        with pytest.raises(outcome, match="maxtext"):
            need("maxtext")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
    need("maxtext")


@pytest.mark.skipif(not WORKFLOW.exists(), reason="needs the sources")
def test_each_library_has_a_job():
    text = WORKFLOW.read_text()
    assert f"{DEMANDED}: ${{{{ matrix.library }}}}" in text
    jobs = re.findall(r"^ +- \{ library: (\w+), install: .+ \}$", text, re.MULTILINE)
    assert sorted(jobs) == sorted([*LIBRARIES, PEFT])
