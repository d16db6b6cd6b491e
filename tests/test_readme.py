"""README's code runs, and README stays short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_groupgemm as jgg

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_code_blocks_run(block):
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=True)
    assert done.stdout.strip()


def test_the_first_block_is_the_quickstart():
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    assert block.group(1) == (ROOT / "examples/quickstart.py").read_text()


def test_is_short():
    assert len(README.splitlines()) <= 120


def test_commands_are_single_lines():
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    assert all(len(b.strip().splitlines()) == 1 for b in blocks)


def test_every_operation_is_listed():
    for name in (
        "segmented_mm", "grouped_mm", "gather_mm", "ragged_dot", "ragged_dot_general",
        "grouped_qmm", "gather_qmm", "quantized_matmul",
        "nvfp4_grouped_linear", "nvfp4_grouped_mm", "nvfp4_grouped_wgrad", "moe_mlp", "route",
    ):  # fmt: skip
        assert f"| `{name}(" in README
        assert hasattr(jgg, name)


def test_links_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
