"""Test configuration: eight virtual CPU devices, strict dtype promotion, tests by marker."""

import collections
import functools
import gc
import os
import shutil
import tempfile
from pathlib import Path

# XLA's own optimizations of CPU code take longer than most of these programs run. Those of GPU code
# are what a GPU's tests are about. Of two flags the last counts.
os.environ["XLA_FLAGS"] = (
    ("" if Path("/proc/driver/nvidia").exists() else "--xla_backend_optimization_level=0 ")
    + os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
)

import hypothesis
import jax
import numpy as np
import pytest

from jax_groupgemm._kernels import extension

pytest_plugins = ["decoder_fixtures"]
pytest.register_assert_rewrite(
    "checkpoint_writers",
    "decoder_runs",
    "device_runs",
    "fuzz",
    "host_program",
    "fp8_quantize_cases",
    "nvfp4_quantize_cases",
    "random_calls",
    "replays",
)
jax.config.update("jax_numpy_dtype_promotion", "strict")
FOLDER = pytest.StashKey[str]()


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, help="random cases of each of tests/*/test_fuzz*.py")
    parser.addoption("--weekly", action="store_true", help="also tests that are marked weekly")


def pytest_configure(config):
    """A folder for what processes share in this run: host_program.py."""
    hypothesis.settings.register_profile("weekly", max_examples=150)
    hypothesis.settings.register_profile("daily", max_examples=20)
    hypothesis.settings.load_profile("weekly" if config.getoption("--weekly") else "daily")
    if not hasattr(config, "workerinput"):
        config.stash[FOLDER] = tempfile.mkdtemp(prefix="jgg-tests-")
        os.environ["JGG_TESTS_FOLDER"] = config.stash[FOLDER]


def pytest_unconfigure(config):
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


def pytest_collection_finish(session):
    """JAX's traces are many short-lived objects: what is here to stay is looked through no more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 10, 10)


def pytest_ignore_collect(collection_path, config):
    """For -m smoke files that smoke.txt does not name are not even imported: half a minute for each
    process."""
    if config.getoption("-m") != "smoke" or not collection_path.match("test_*.py"):
        return None
    name = collection_path.relative_to(Path(__file__).parent).as_posix()
    return True if name not in {line.partition("::")[0] for line in smoke_names()} else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Neighbours run in one process, where what they have in common is compiled once; a process
    that has nothing left takes tests from the end of another's list."""
    if config.getvalue("dist") == "load":
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)
    return None


def has_gpu() -> bool:
    try:
        return bool(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return False


@pytest.hookimpl(tryfirst=True)  # before -m asks for markers
def pytest_collection_modifyitems(config, items):
    """Without a GPU its tests do not exist: they are deselected, not skipped. With one, those of
    what JAX runs on by default are tests for it, and all of a GPU's are selected."""
    mark_smoke(items, strict="smoke" in config.getoption("-m"))
    mark_weekly(items)
    gpu = has_gpu()
    if gpu:
        for item in items:
            if item.get_closest_marker("default_device"):
                item.add_marker("gpu")

    def is_left_out(item) -> bool:
        if item.get_closest_marker("gpu"):
            return not gpu
        return bool(item.get_closest_marker("weekly")) and not config.getoption("--weekly")

    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_left_out(item)]


@functools.cache
def smoke_names() -> list[str]:
    lines = (Path(__file__).parent / "smoke.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def mark_smoke(items, strict: bool) -> None:
    """Those of smoke.txt: tests with their parameters, or with all of them."""
    missing = {f"tests/{name}" for name in smoke_names()}
    names = frozenset(missing)
    for item in items:
        for name in {item.nodeid, item.nodeid.partition("[")[0]} & names:
            item.add_marker("smoke")
            missing.discard(name)
    if strict and missing:
        raise pytest.UsageError(f"tests/smoke.txt names no tests: {sorted(missing)}")


def mark_weekly(items) -> None:
    """What one_in leaves out. A GPU's parameters do not count: it runs all of them."""
    places = collections.Counter()
    for item in items:
        one_in = item.get_closest_marker("one_in")
        if one_in is not None and not item.get_closest_marker("gpu"):
            test = item.nodeid.partition("[")[0]
            if places[test] % one_in.args[0] and not item.get_closest_marker("smoke"):
                item.add_marker("weekly")
            places[test] += 1


@pytest.fixture
def hopper(monkeypatch):
    """The machine seems to have one Hopper GPU, and this build code for it."""
    build = extension.Build(cuda="13.0", architectures=("80", "90a"))
    monkeypatch.setattr(extension, "BUILD", build)
    monkeypatch.setattr(extension, "live_capabilities", lambda: (90,))


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers of this test's own: the same in every run, different between tests."""
    return np.random.default_rng(list(request.node.name.encode()))


GPU_KERNELS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("sm80", "sm90")]
BEST = pytest.param(None, marks=pytest.mark.gpu, id="best")


@pytest.fixture(params=["reference", "cpu", *GPU_KERNELS, BEST])
def implementation(request) -> str | None:
    """Every implementation that value tests run through, and whatever is chosen on a GPU."""
    if request.param == "sm90" and 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    return request.param
