"""``JGG_PRETEND_GPU``: what is chosen on another GPU, tried on this one."""

import os
import subprocess
import sys
import types

import pytest

from jax_groupgemm._kernels import extension

#: A10, RTX 4090, B200.
GPUS = {
    "A10": "capability=86,processors=72,shared_memory=101376",
    "4090": "capability=89,processors=128,shared_memory=101376",
    "B200": "capability=100,processors=148,shared_memory=232448",
}


@pytest.fixture
def h200(monkeypatch):
    gpu = types.SimpleNamespace(compute_capability="9.0")
    monkeypatch.setattr(extension, "devices", lambda backend=None: ([gpu], None))


@pytest.mark.parametrize(("gpu", "capability"), [("A10", 86), ("4090", 89), ("B200", 100)])
def test_the_capability_is_the_pretended_one(monkeypatch, h200, gpu, capability):
    assert extension.live_capabilities() == (90,)
    monkeypatch.setenv("JGG_PRETEND_GPU", GPUS[gpu])
    assert extension.live_capabilities() == (capability,)


def test_no_gpu_is_pretended_where_there_is_none(monkeypatch):
    monkeypatch.setattr(extension, "devices", lambda backend=None: ([], None))
    monkeypatch.setenv("JGG_PRETEND_GPU", GPUS["A10"])
    assert extension.live_capabilities() == ()


def test_blocks_that_need_more_shared_memory_than_there_is(monkeypatch, h200):
    needed = 112 << 10
    assert extension.lacks_shared_memory(needed) is None
    for gpu in ("A10", "4090"):
        monkeypatch.setenv("JGG_PRETEND_GPU", GPUS[gpu])
        assert extension.lacks_shared_memory(needed) == (
            "it needs 112 KiB of shared memory in a block, this GPU has 99"
        )
    monkeypatch.setenv("JGG_PRETEND_GPU", GPUS["B200"])
    assert extension.lacks_shared_memory(needed) is None
    monkeypatch.setenv("JGG_PRETEND_GPU", "shared_memory=65536")
    assert "this GPU has 64" in str(extension.lacks_shared_memory(needed))


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension
x, w = jnp.ones((300, 64), jnp.bfloat16), jnp.ones((8, 64, 128), jnp.bfloat16)
s = jnp.full((8,), 37)
run = lambda **kw: jax.jit(lambda *o: jgg.grouped_mm(*o, **kw))(x, w, s)
assert (np.asarray(run()).astype(int)[:296] == 64).all()
try:
    run(implementation="sm90")
except ValueError as error:
    print(error)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", GPUS)
def test_products_run_as_there(gpu):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | {"JGG_PRETEND_GPU": GPUS[gpu]},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "it needs compute capability 9.0" in ran.stdout


@pytest.mark.gpu
def test_a_block_may_not_have_more_than_the_pretended_gpu_gives():
    """The launch is refused, as the driver would there: as a value or as a configuration."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"JGG_PRETEND_GPU": "capability=80,shared_memory=20000"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode != 0
    assert "cudaErrorInvalid" in ran.stderr
