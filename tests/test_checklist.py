"""CONTRIBUTING's checklists: an operation or activation that is missing somewhere fails here."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import moe_oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._core import types
from jax_groupgemm._core.operations import OPERATIONS
from jax_groupgemm._grouped.activations import ACTIVATIONS
from jax_groupgemm._kernels import choose, extension, samples

ROOT = Path(__file__).parents[1]


def text(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text()


def test_operations_are_found():
    assert len(OPERATIONS) >= 15
    assert {"grouped_mm", "segmented_mm", "quantize", "prepack"} <= set(OPERATIONS)


def test_every_public_function_is_an_operation():
    """So that what follows asks for each of them. These multiply nothing."""
    functions = {name for name in jgg.__all__ if inspect.isfunction(getattr(jgg, name))}
    assert functions - set(OPERATIONS) == {"check_sizes", "replace_ragged_dot"}


@pytest.mark.parametrize("op", OPERATIONS)
def test_an_operation_is_everywhere(op):
    assert op in jgg.__all__
    assert op in samples.SAMPLES, "info has no line for it"
    assert op in dir(jgg.cost)
    reference = "".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md"))
    assert re.search(rf"^::: jax_groupgemm\.{op}$", reference, re.M), "docs/reference"
    assert f"`{op}`" in text("docs", "reference", "cost.md"), "docs/reference/cost.md"
    assert f"`{op}" in text("docs", "semantics.md"), "docs/semantics.md"
    assert re.search(rf"^\|.*`{op}\(.*\|", text("README.md"), re.M), "README"
    assert f"`{op}" in text("CHANGELOG.md"), "CHANGELOG"
    smoke = text("tests", "smoke.txt")
    files = {p for p in (ROOT / "tests").rglob("test_*.py") if f"jgg.{op}(" in p.read_text()}
    assert any(f"{p.relative_to(ROOT / 'tests')}::" in smoke for p in files), "tests/smoke.txt"


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_everywhere(name):
    assert name in get_args(types.Activation), "_core/types.py"
    assert f'``"{name}"``' in (jgg.grouped_mm.__doc__ or ""), "grouped_mm's docstring"
    tested = moe_oracle.GATED if ACTIVATIONS[name].gated else moe_oracle.ACTIVATIONS
    assert name in tested, "tests/lib/moe_oracle.py, from which tests take activations"


@pytest.mark.parametrize("op", OPERATIONS)
def test_docstrings_state_the_equation_and_what_they_need(op):
    doc = OPERATIONS[op].__doc__
    assert doc
    assert "``" in doc.splitlines()[0]
    for part in ("Args:", "Returns:", "Raises:"):
        assert part in doc, part


def test_the_table_of_options_is_what_signatures_say():
    page = text("docs", "reference", "index.md")
    options = re.search(r"^\| operation ((?:\| `\w+` )+)\|$", page, re.M)
    assert options
    names, found = re.findall(r"`(\w+)`", options[1]), {}
    for line in re.findall(r"^\| `.*\|$", page, re.M):
        ops, *answers = line.strip("| ").split(" | ")
        for op in re.findall(r"`(\w+)`", ops):
            found[op] = [answer.startswith("yes") for answer in answers]
    signatures = {op: inspect.signature(f).parameters for op, f in OPERATIONS.items()}
    assert found == {op: [name in of for name in names] for op, of in signatures.items()}


def test_every_kernel_has_a_target_that_may_be_exported():
    targets = {kernel.target for kernels in choose.KERNELS.values() for kernel in kernels}
    assert targets | {"jgg_planes"} == set(extension.TARGETS)
    assert len(jgg.EXPORT_DISABLED_CHECKS) == len({*extension.TARGETS, extension.DIVIDED})
    handlers = text("ffi", "handlers.inc") if (ROOT / "ffi").exists() else None
    for target in targets if handlers else ():
        name = "".join(part.capitalize() for part in target.split("_"))
        assert name in handlers, target
    for kernels in choose.KERNELS.values():
        for kernel in kernels:
            assert kernel.platform in extension.TARGETS[kernel.target]


def test_what_the_oldest_jax_runs_exists():
    """tests/smoke.txt names tests that there are, or nothing runs there."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "smoke", "--collect-only", "tests"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]


def test_the_table_of_kernels_is_current():
    page = text("docs", "internals", "kernels", "index.md")
    found = re.search(r"kernels\.samples -->\n\n(.*?)\n\n<!-- end -->", page, re.S)
    assert found, "the table is missing"
    assert found[1] == samples.table(), "run python -m jax_groupgemm._kernels.samples"
