"""Kernels that nobody has run on a kind of GPU are off until there is a proof; what a proof is."""

import json
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm import info
from jax_groupgemm._kernels import choose, extension, kernel, problems, proven, samples

BLACKWELL = proven.Place("NVIDIA B200", "10.0", "580.65.06", "1.2.3", 4, "13.0")
KEYS = ("jgg_nvfp4_grouped_mm sm100", "jgg_nvfp4_grouped_wgrad sm100")
OTHERS = (
    "jgg_mm sm100", "jgg_wgrad sm100", "jgg_fp8_grouped_mm_sm100 sm100",
    "jgg_fp8_grouped_wgrad_sm100 sm100",
)  # fmt: skip


@pytest.fixture
def blackwell(monkeypatch, tmp_path):
    """A process with such a GPU, and a cache without a proof."""
    build = extension.Build(cuda="13.0", architectures=("80", "90a", "100a", "80-virtual"))
    monkeypatch.setattr(extension, "BUILD", build)
    monkeypatch.setattr(extension, "live_capabilities", lambda: (100,))
    monkeypatch.setattr(proven, "place", lambda: BLACKWELL)
    monkeypatch.setenv("JGG_PROVEN", str(tmp_path))
    proven._proven.cache_clear()
    return tmp_path


def chosen(implementation=None) -> str | None:
    sample = samples.SAMPLES["nvfp4_grouped_mm"].make("cuda", "bfloat16")
    plan = choose.fused(samples.dataclasses.replace(sample, implementation=implementation))
    return None if plan is None else plan.kernel.name


def test_off_until_there_is_a_proof(blackwell):
    assert chosen() is None
    oracle.assert_raises(
        lambda: chosen("sm100"), ValueError,
        "jgg: implementation='sm100' cannot run: it is not yet proven on this GPU: run "
        "python -m jax_groupgemm.check. Use implementation=None, or 'reference'.",
    )  # fmt: skip
    proven.write(BLACKWELL, KEYS, {})
    proven._proven.cache_clear()
    assert chosen() == chosen("sm100") == "sm100"


def test_each_kernel_needs_its_own(blackwell):
    proven.write(BLACKWELL, KEYS[1:], {})
    assert chosen() is None
    wgrad = samples.SAMPLES["nvfp4_grouped_wgrad"].plan("cuda", "float32")
    assert wgrad is not None
    assert wgrad.kernel.name == "sm100"


def test_what_proves_trusts_them(blackwell):
    with proven.trusted():
        assert chosen() == "sm100"
    assert chosen() is None


def test_generic_kernels_and_hoppers_need_none(blackwell, monkeypatch):
    plan = samples.SAMPLES["grouped_mm"].plan("cuda", "bfloat16")
    assert plan is not None
    assert plan.kernel.name == "sm80"
    monkeypatch.setattr(extension, "live_capabilities", lambda: (90,))
    monkeypatch.setattr(proven, "place", lambda: pytest.fail("it asks for no proof"))
    plan = samples.SAMPLES["grouped_mm"].plan("cuda", "bfloat16")
    assert plan is not None
    assert plan.kernel.name == "sm90"
    assert proven.proven() == frozenset()


def test_every_name_is_generic_or_run_or_gated():
    """A new architecture's kernels are gated until this project has run them."""
    assert set(proven.UNRUN) <= set(kernel.PLATFORMS)
    assert set(kernel.PLATFORMS) - set(proven.UNRUN) == {"cpu", "sm80", "sm90"}
    for name, run in proven.UNRUN.items():
        assert set(run) <= set(extension._CAPABILITIES[name])


def test_somebody_elses_gpu(monkeypatch):
    """A process without a GPU lowers what is named: whose GPU it is for is not known."""
    monkeypatch.setattr(extension, "live_capabilities", lambda: ())
    build = extension.Build(cuda="13.0", architectures=("80", "100a"))
    monkeypatch.setattr(extension, "BUILD", build)
    assert chosen() is None
    assert chosen("sm100") == "sm100"


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("gpu", "NVIDIA B300", "it is for GPU NVIDIA B300, here is NVIDIA B200"),
        ("compute_capability", "10.3", "it is for compute capability 10.3, here is 10.0"),
        ("driver", "590.1", "it is for driver 590.1, here is 580.65.06"),
        ("jax_groupgemm", "1.2.4", "it is for jax_groupgemm 1.2.4, here is 1.2.3"),
        ("calls", 5, "it is for calls 5, here is 4"),
        ("cuda", "13.1", "it is for CUDA 13.1, here is 13.0"),
    ],
)
def test_what_changed_makes_it_stale(blackwell, field, value, says):
    path = proven.write(BLACKWELL, KEYS, {})
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.warns(UserWarning, match=f"ignores the proof .*: {says}. Kernels that need one"):
        assert chosen() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert chosen() is None


def edit(**changes):
    def make(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return make


HOSTILE = [
    (lambda p: p.write_text(""), "Expecting value"),
    (lambda p: p.write_text("[]"), "it is not a proof"),
    (lambda p: p.write_text("[" * 100_000), "it is not a proof"),
    (lambda p: p.write_text(p.read_text()[:-20]), "Unterminated|Expecting|delimiter"),
    (lambda p: p.write_bytes(b"\xff\xfe" + bytes(range(200))), "codec can't decode|Expecting"),
    (lambda p: p.write_text(" " * (2**20 + 1)), "it has 1048577 bytes"),
    (lambda p: p.write_text('{"format": ' + "9" * 10_000 + "}"), "Exceeds the limit"),
    (edit(format=2), "its format is 2, expected 1"),
    (edit(driver=580), "it is not a proof .driver is '580'"),
    (edit(calls=True), "it is not a proof .calls is 'True'"),
    (edit(kernels="jgg_nvfp4_grouped_mm sm100"), "kernels are no list of names"),
    (edit(kernels=[["jgg_nvfp4_grouped_mm sm100"]]), "kernels are no list of names"),
    (lambda p: (p.unlink(), p.mkdir()), "it is not a file"),
    (lambda p: (p.unlink(), os.mkfifo(p)), "it is not a file"),
    (lambda p: (p.unlink(), p.symlink_to("/dev/zero")), "it is not a file"),
    (lambda p: p.chmod(0o666), "every user may write it"),
]


@pytest.mark.parametrize(("make", "says"), HOSTILE)
def test_what_is_no_proof(blackwell, make, says):
    """None of them raises, or hangs, in the user's lowering."""
    make(proven.write(BLACKWELL, KEYS, {}))
    with pytest.warns(UserWarning, match=f"ignores the proof .*{says}"):
        assert chosen() is None


def test_another_users_file(blackwell, monkeypatch):
    proven.write(BLACKWELL, KEYS, {})
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(proven.os, "stat", os.stat)
    found = os.stat_result((0o100644, 0, 0, 1, os.getuid() + 2, 0, 10, 0, 0, 0))
    monkeypatch.setattr(type(blackwell), "stat", lambda path: found)
    with pytest.warns(UserWarning, match="it belongs to another user"):
        assert chosen() is None


def test_the_file(blackwell):
    path = proven.write(BLACKWELL, KEYS, {"lines": 3})
    assert path == blackwell / "nvidia-b200.json"
    assert proven.read(path) == (BLACKWELL, frozenset(KEYS))
    assert list(blackwell.iterdir()) == [path]
    assert json.loads(path.read_text())["lines"] == 3


def test_where_files_are(monkeypatch, tmp_path):
    monkeypatch.delenv("JGG_PROVEN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert proven.path("NVIDIA B200") == tmp_path / "jax_groupgemm/proven/nvidia-b200.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert proven.folder() == tmp_path / ".cache/jax_groupgemm/proven"


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build",
        "NVRM version: NVIDIA UNIX aarch64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
    ],
)
def test_the_drivers_version(monkeypatch, tmp_path, text):
    monkeypatch.setattr(proven, "_NVIDIA", tmp_path / "version")
    (tmp_path / "version").write_text(text + "\nGCC version:  gcc version 12.3.0\n")
    assert proven.driver.__wrapped__() == "550.54.15"


def test_no_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(proven, "_NVIDIA", tmp_path / "none")
    monkeypatch.setattr(proven.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert proven.driver.__wrapped__() is None


class Gpu:
    device_kind, compute_capability = "NVIDIA B200", "10.0"


class Other(Gpu):
    device_kind = "NVIDIA B300"


@pytest.mark.parametrize(
    ("gpus", "version", "known"),
    [([Gpu], "580.1", True), ([Gpu, Gpu], "580.1", True), ([Gpu, Other], "580.1", False),
     ([], "580.1", False), ([Gpu], None, False)],
)  # fmt: skip
def test_what_a_proof_is_for(monkeypatch, gpus, version, known):
    monkeypatch.setattr(extension, "devices", lambda backend=None: (gpus, None))
    monkeypatch.setattr(proven, "driver", lambda: version)
    found = proven.place()
    assert (found is not None) == known
    assert found is None or found[:3] == ("NVIDIA B200", "10.0", "580.1")


# ---- who says so -------------------------------------------------------------------------------


def test_info_says_what_to_do(blackwell):
    data = info.collect()
    gpu = {"platform": "gpu", "kind": "NVIDIA B200", "compute_capability": "10.0"}
    data["devices"] = {"found": [gpu], "problem": None}
    (step,) = info._next_steps(data)
    assert step == (
        "Kernels for this GPU (sm100) are not yet proven on this GPU: run "
        "python -m jax_groupgemm.check, which takes minutes."
    )
    assert data["ops"]["nvfp4_grouped_mm"]["bfloat16"]["others"]["sm100"] == proven.REASON
    assert data["proof"]["kernels"] == []
    text = info._text(data)
    assert f"  {blackwell}/nvidia-b200.json: none yet: run python -m jax_groupgemm.check" in text
    proven.write(BLACKWELL, (*KEYS, *OTHERS), {})
    proven._proven.cache_clear()
    data = info.collect() | {"devices": data["devices"]}
    assert info._next_steps(data) == []
    assert "nvidia-b200.json: 6 kernels passed python -m jax_groupgemm.check" in info._text(data)
    proven.write(BLACKWELL._replace(driver="1.0"), KEYS, {})
    proven._proven.cache_clear()
    assert "it is for driver 1.0, here is 580.65.06" in info._text(info.collect())


def test_a_shape_that_it_cannot_take(blackwell):
    """A shape that the kernel cannot take is the reason that counts once it is proven."""
    proven.write(BLACKWELL, KEYS, {})
    sample = samples.SAMPLES["nvfp4_grouped_mm"].make("cuda", "bfloat16")
    assert isinstance(sample, problems.Nvfp4)
    odd = samples.dataclasses.replace(sample, k=2064, implementation="sm100")
    with pytest.raises(ValueError, match="needs K % 32 == 0, got K=2064"):
        choose.choose(odd)


def test_importing_reads_no_proof():
    """Nor does it start a backend, or load the command."""
    program = (
        "import sys, jax_groupgemm\n"
        "assert not any(m.startswith('jax_groupgemm._check') for m in sys.modules)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_cpu_reads_no_proof(monkeypatch):
    monkeypatch.setattr(proven, "read", lambda path: pytest.fail("it reads a proof"))
    x = jnp.ones((4, 32))
    jax.block_until_ready(jgg.grouped_mm(x, jnp.ones((1, 32, 8)), jnp.array([4])))
