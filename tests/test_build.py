"""The extension module, its version check, and jax_groupgemm.info."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from importlib.machinery import SourceFileLoader
from importlib.metadata import PackageNotFoundError, PackagePath, PathDistribution, version

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_groupgemm as jgg
from jax_groupgemm import info
from jax_groupgemm._kernels import choose, extension


def run(code: str, **env) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr


def test_version():
    assert jgg.__version__ == version("jax_groupgemm")


def test_build_info():
    build = extension.BUILD
    assert build.ffi_api == (0, 3), "handlers must be built against jaxlib 0.11.0's headers"
    assert build.runtime_ffi_api is not None
    assert build.runtime_ffi_api >= build.ffi_api
    assert build.problem is None
    assert build.registered == (("cpu",) if build.cuda is None else ("cpu", "cuda"))


def test_import_touches_no_backend():
    out = run(
        "import jax_groupgemm, jax\n"
        "from jax._src import xla_bridge\n"
        "print('started' if xla_bridge._backends else 'not started')"
    )
    assert out.strip().endswith("not started")


def test_targets_match_the_handlers():
    registered = extension._extension().registrations()
    assert set(registered) == ({"cpu", "CUDA"} if extension.BUILD.cuda else {"cpu"})
    for platform, handlers in registered.items():
        targets = {name for name, on in extension.TARGETS.items() if platform.lower() in on}
        assert set(handlers) == targets


@pytest.mark.parametrize("runtime", [(0, 2), (0, 1), (1, 3), None])
def test_incompatible_runtimes(runtime):
    problem = extension._incompatible((0, 3), runtime)
    assert problem is not None
    assert "need XLA FFI API 0.3 (jaxlib >= 0.11.0)" in problem
    assert ("unknown" if runtime is None else f"has {runtime[0]}.{runtime[1]}") in problem


@pytest.mark.parametrize("runtime", [(0, 3), (0, 4), (0, 17)])
def test_compatible_runtimes(runtime):
    assert extension._incompatible((0, 3), runtime) is None


class FakeExtension:
    """An extension that counts how often its handlers are asked for."""

    offered = 0

    @classmethod
    def registrations(cls):
        cls.offered += 1
        return {}

    @staticmethod
    def build_info():
        return {"cuda": "13.0", "architectures": ("80",), "cutlass": "4.2.0", "ffi_api": (0, 3)}


def test_old_runtime_warns_and_registers_nothing(monkeypatch):
    monkeypatch.setattr(extension, "_extension", lambda: FakeExtension)
    monkeypatch.setattr(extension, "_runtime_ffi_api", lambda: (0, 2))
    FakeExtension.offered = 0
    with pytest.warns(
        UserWarning, match=r"need XLA FFI API 0\.3 \(jaxlib >= 0\.11\.0\).* has 0\.2"
    ):
        build = extension.load()
    assert not build.registered
    assert FakeExtension.offered == 0
    monkeypatch.setattr(extension, "_runtime_ffi_api", lambda: (0, 3))
    assert extension.load().registered
    assert FakeExtension.offered == 1


def test_missing_extension_warns_and_falls_back(monkeypatch):
    def missing():
        raise ImportError("no such file")

    monkeypatch.setattr(extension, "_extension", missing)
    with pytest.warns(UserWarning, match="cannot be imported.*reference lowering"):
        build = extension.load()
    assert not build.registered
    monkeypatch.setattr(extension, "BUILD", build)
    monkeypatch.setattr(extension, "live_capabilities", lambda: ())
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        product = jax.jit(lambda x, w: jgg.grouped_mm(x, w, jnp.array([2, 1])))
        x, w = jnp.ones((4, 4)), jnp.ones((2, 4, 4))
        text = product.trace(x, w).lower(lowering_platforms=("cpu",)).as_text()
        assert "custom_call @jgg" not in text
        np.testing.assert_array_equal(product(x, w).sum(1), [16, 16, 16, 0])


class NoKeys(FakeExtension):
    @staticmethod
    def build_info():
        return {"cuda": None, "architectures": (), "cutlass": "4.2.0"}


class NoRegistrations(FakeExtension):
    @classmethod
    def registrations(cls):
        raise RuntimeError("no handlers")


@pytest.mark.parametrize("module", [NoKeys, NoRegistrations, object()])
def test_an_extension_of_another_version_falls_back(monkeypatch, module):
    monkeypatch.setattr(extension, "_extension", lambda: module)
    monkeypatch.setattr(extension, "_runtime_ffi_api", lambda: (0, 3))
    with pytest.warns(UserWarning, match=r"not of this version \(.*Install the package again"):
        build = extension.load()
    assert build.problem
    assert not build.registered


@pytest.fixture
def no_module_beside(monkeypatch):
    """The files are a checkout's: there is no extension module among them."""
    importing = importlib.import_module

    def import_module(name):
        if name == "jax_groupgemm._ffi":
            raise ModuleNotFoundError(name)
        return importing(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setitem(sys.modules, "jax_groupgemm._ffi", None)  # restored afterwards


def test_a_checkout_takes_the_installed_module(no_module_beside, monkeypatch, tmp_path):
    name = "jax_groupgemm/_ffi.abi3.so"
    (tmp_path / "jax_groupgemm").mkdir()
    (tmp_path / name).write_text("FOUND = True\n")  # a program instead of a library
    load = importlib.util.spec_from_file_location
    monkeypatch.setattr(
        importlib.util, "spec_from_file_location",
        lambda name, path: load(name, loader=SourceFileLoader(name, str(path))),
    )  # fmt: skip
    files = [PackagePath("jax_groupgemm/info.py"), PackagePath(name)]
    for file in files:
        file.dist = PathDistribution(tmp_path / "jax_groupgemm-1.dist-info")
    monkeypatch.setattr(importlib.metadata, "files", lambda package: files)
    assert extension._extension().FOUND
    assert sys.modules["jax_groupgemm._ffi"].FOUND


@pytest.mark.parametrize("installed", [False, True])
def test_no_module_is_installed(no_module_beside, monkeypatch, installed):
    """Nor is the package, or it has no such file: that is the error of the import."""

    def files(package):
        if not installed:
            raise PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(ModuleNotFoundError, match=r"jax_groupgemm\._ffi"):
        extension._extension()


def test_headers_without_a_version(monkeypatch, tmp_path):
    """The runtime's FFI API is then unknown."""
    header = tmp_path / "xla/ffi/api/c_api.h"
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert extension._runtime_ffi_api() is None
    header.parent.mkdir(parents=True)
    for text, want in (
        (b"#define XLA_FFI_API_MAJOR 1\n", None),
        (b"#define XLA_FFI_API_MAJOR 1\n#define XLA_FFI_API_MINOR 7\n", (1, 7)),
        (b"\xff", None),  # no text
    ):
        header.write_bytes(text)
        assert extension._runtime_ffi_api() == want


def test_packages_that_are_not_installed():
    assert extension.version("jax") == jax.__version__
    assert extension.version("jax_groupgemm_of_nobody") is None


def test_where_warnings_are_errors_it_is_printed(capsys):
    """An import does not fail of what it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extension._say("no handlers")
    assert capsys.readouterr().err == "no handlers\n"


def test_import_where_warnings_are_errors_and_metadata_is_missing():
    """The reference needs neither the extension nor the package's metadata."""
    code = """
import importlib.metadata as metadata, sys, warnings
import jax
def missing(name):
    raise metadata.PackageNotFoundError(name)
metadata.version = metadata.files = missing
sys.modules["jax_groupgemm._ffi"] = None  # an ImportError
warnings.simplefilter("error")
import jax_groupgemm as jgg
import jax.numpy as jnp
print(jgg.__version__, jgg.grouped_mm(jnp.ones((2, 3)), jnp.ones((1, 3, 1)), jnp.array([1])).sum())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0+unknown", "3.0"]
    assert "the extension module cannot be imported" in done.stderr


@pytest.mark.parametrize("command", ["info", "tune"])
def test_commands_without_the_plugin_that_was_named(command):
    done = subprocess.run(
        [sys.executable, "-m", f"jax_groupgemm.{command}"], capture_output=True, text=True,
        check=False, env=os.environ | {"JAX_PLATFORMS": "rocm"},
    )  # fmt: skip
    assert done.returncode == (0 if command == "info" else 1), done.stderr
    assert "Traceback" not in done.stderr
    assert "rocm" in done.stdout + done.stderr


def test_backend_starts_with_the_handlers_registered():
    """A handler that XLA refuses would keep the backend from starting at all."""
    out = run("import jax_groupgemm, jax; print(jax.devices()[0].platform)", JAX_PLATFORMS="")
    assert re.search(r"cpu|gpu|cuda", out)


def test_info_as_text(capsys):
    info.main([])
    text = capsys.readouterr().out
    assert f"jax_groupgemm {jgg.__version__}" in text
    for word in ("Versions", "Build", "Devices", "grouped_mm", "segmented_mm", jax.__version__):
        assert word in text


def test_info_as_json():
    done = subprocess.run(
        [sys.executable, "-m", "jax_groupgemm.info", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    data = json.loads(done.stdout)
    assert data["versions"]["jax"]["ok"]
    assert data["build"]["ffi_api"] == "0.3"
    for op, dtypes in data["ops"].items():
        assert hasattr(jgg, op.split(",")[0])
        for answer in dtypes.values():
            names = {answer["runs"], *answer["others"]}
            assert names >= set(choose.PLATFORMS)
            assert all(answer["others"].values())
    assert data["ops"]["grouped_mm"]["float64"]["runs"] == "reference"


def test_info_of_a_hopper_gpu(monkeypatch):
    build = extension.Build(cuda="13.0", architectures=("80", "90a"))
    monkeypatch.setattr(extension, "BUILD", build)
    monkeypatch.setattr(extension, "live_capabilities", lambda: (90,))
    ops = info.collect()["ops"]
    runs = lambda op: {dtype: answer["runs"] for dtype, answer in ops[op].items()}
    all_dtypes = {"float32": "sm90", "bfloat16": "sm90", "float16": "sm90", "float64": "reference"}
    assert runs("grouped_mm") == all_dtypes
    for op in ("grouped_qmm", "grouped_qmm, dx"):
        assert runs(op) == dict.fromkeys(("float32", "bfloat16", "float16"), "sm90")
    assert ops["grouped_qmm"]["bfloat16"]["call"] == "jgg_qmm"
    assert ops["grouped_qmm, dx"]["bfloat16"]["call"] == "jgg_qmm_packed"
    others = ops["grouped_qmm"]["float32"]["others"]
    assert others["sm80"] == "only on request, implementation='sm80'"
    assert others["sm100"] == "there is no kernel jgg_qmm for sm100"
    assert others["cpu"] == "JAX runs on another device"


def test_info_survives_a_broken_installation(monkeypatch):
    build = extension.Build(problem="the extension module cannot be imported")
    monkeypatch.setattr(extension, "BUILD", build)
    data = info.collect()
    assert data["ops"]["grouped_mm"]["float32"]["runs"] == "reference"
    assert "cannot be imported" in data["ops"]["grouped_mm"]["float32"]["others"]["sm80"]
    assert "cannot be imported" in info._text(data)


def test_public_names_have_docstrings_that_state_the_equation():
    grouped = ("segmented_mm", "grouped_mm", "gather_mm", "ragged_dot", "grouped_qmm", "gather_qmm")
    for name in grouped:
        first = getattr(jgg, name).__doc__.splitlines()[0]
        assert first.startswith("``out["), name
        assert "grouped" in first, name
