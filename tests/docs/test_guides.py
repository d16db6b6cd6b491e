"""Every Python block of the users' pages runs, as it stands, on a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# These and those that need more packages run weekly.
SLOW = ("guides/nvfp4_training.md", "guides/quantized_inference.md", "guides/several_gpus.md")
# A page without a block that runs says so here.
WITHOUT = (
    "guides/check_gpu.md", "guides/finetune.md", "guides/generate.md", "guides/tune_tiles.md",
    "guides/which_format.md",
)  # fmt: skip
# Packages of the extras of examples and tests.
NEEDS = {"guides/flax_and_equinox.md": ("equinox", "flax", "optax")}
# Compiling takes longer than these programs run. Devices are the page's own business.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "PYTHONWARNINGS": "error",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def pages():
    found = [DOCS / "index.md", *sorted(DOCS.glob("guides/*.md"))]
    found += [DOCS / "getting_started.md", DOCS / "migration.md"]
    for page in found:
        name = page.relative_to(DOCS).as_posix()
        if name not in WITHOUT:
            marks = [pytest.mark.weekly] if name in (*SLOW, *NEEDS) else []
            yield pytest.param(page, id=name, marks=marks)


@pytest.mark.parametrize("page", list(pages()))
def test_blocks_run_one_after_the_other(page, tmp_path):
    for package in NEEDS.get(page.relative_to(DOCS).as_posix(), ()):
        pytest.importorskip(package)
    code = blocks(page)
    assert code
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_block_of_the_docs_belongs_to_one_of_these_pages():
    tested = {page.values[0] for page in pages()}
    lab = DOCS / "lab"
    for page in DOCS.rglob("*.md"):
        # `import jax_groupgemm as jgg` alone needs no test.
        code = [block for block in blocks(page) if len(block.strip().splitlines()) > 1]
        assert page in tested or lab in page.parents or not code, page
