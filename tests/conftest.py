"""Test configuration: four virtual CPU devices, strict dtype promotion, GPU tests by marker."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import numpy as np
import pytest

from jax_groupgemm import _call

pytest.register_assert_rewrite(
    "checkpoint_writers", "device_runs", "fuzz", "host_program", "nvfp4_quantize_cases"
)
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, help="random cases of each of tests/*/test_fuzz*.py")
    parser.addoption("--few", action="store_true", help="first and last parameters of each test")


def has_gpu() -> bool:
    try:
        return bool(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return False


def pytest_collection_modifyitems(config, items):
    """Without a GPU its tests do not exist: they are deselected, not skipped. With one, those of
    what JAX runs on by default are tests for it."""
    left_out = set()
    if has_gpu():
        for item in items:
            if item.get_closest_marker("default_device"):
                item.add_marker("gpu")
    else:
        left_out = {item for item in items if item.get_closest_marker("gpu")}
    if config.getoption("--few"):
        left_out |= set(items) - first_and_last([i for i in items if i not in left_out])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def first_and_last(items):
    """Of the parameters of every test: mostly the reference with the first of them, and a kernel
    with the last."""
    tests = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {item for of_one in tests.values() for item in (of_one[0], of_one[-1])}


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers of this test's own: the same in every run, different between tests."""
    return np.random.default_rng(list(request.node.name.encode()))


GPU_KERNELS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("sm80", "sm90")]
BEST = pytest.param(None, marks=pytest.mark.gpu, id="best")


@pytest.fixture(params=["reference", "cpu", *GPU_KERNELS, BEST])
def implementation(request) -> str | None:
    """Every implementation that value tests run through, and whatever is chosen on a GPU."""
    if request.param == "sm90" and 90 not in _call.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    return request.param
