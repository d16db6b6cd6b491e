"""The command on this machine's CPU kernels, with planted faults, and what it makes of results."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jax_groupgemm._check import child, command, device, lines, processes, table
from jax_groupgemm._check.processes import Result
from jax_groupgemm._kernels import extension, proven

CPU = device.Device("cpu", "CPU", 0, None, ("jgg_mm cpu", "jgg_wgrad cpu", "jgg_qmm cpu"))
PLACE = proven.Place("NVIDIA B200", "10.0", "580.1", "1.2.3", 4, "13.0")
B200 = device.Device(
    "cuda", "NVIDIA B200", 100, PLACE, ("jgg_mm sm80", "jgg_nvfp4_grouped_mm sm100")
)


def environment(platforms: str | None = "cpu") -> dict[str, str]:
    """XLA need not optimize."""
    return os.environ | ({"JAX_PLATFORMS": platforms} if platforms else {}) | {
        "XLA_FLAGS": "--xla_backend_optimization_level=0" if platforms == "cpu" else "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip


def check(*options, plant=None, timeout=120, platforms: str | None = "cpu"):
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "jax_groupgemm.check", "--quick", *options],
        capture_output=True, text=True, check=False, timeout=timeout,
        env=environment(platforms) | ({} if plant is None else {child.PLANT: plant}),
    )  # fmt: skip


def row(text: str, key: str) -> str:
    """A line of the table, and the one below it."""
    words, rows = key.replace(",", "").split(), text.splitlines()
    at = next(i for i, r in enumerate(rows) if r.split()[: len(words)] == words)
    return "\n".join(rows[at : at + 2])


def test_what_is_right(tmp_path):
    file = tmp_path / "table.json"
    done = check("--only", "grouped_mm, float32", "segmented_mm, bfloat16", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lines are right" in done.stdout
    assert " mm cpu " in row(done.stdout, "grouped_mm, float32")
    assert row(done.stdout, "segmented_mm, bfloat16").splitlines()[0].endswith("ok")
    data = json.loads(file.read_text())
    assert data["exit"] == 0
    found = {line["key"]: line for line in data["lines"]}
    line = found["grouped_mm, float32"]
    assert line["state"] == "ok"
    assert line["kernels"] == ["jgg_mm cpu"]
    assert line["cases"] > 10
    assert 0 < line["share"] < 1
    assert list(found) == ["grouped_mm, float32", "segmented_mm, bfloat16"]


def test_the_parent_starts_no_backend():
    """A GPU is the children's, and what they do to it."""
    program = (
        "from jax_groupgemm._check import command\n"
        "assert command.main(['--quick', '--only', 'gather_mm, float32']) == 0\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=environment())


@pytest.mark.gpu
def test_a_gpu(monkeypatch):
    """With kernels that are right, and one that is planted."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    names = ("grouped_mm", "grouped_qmm nvfp4", "dispatch, combine", "route")
    for plant, status in ((None, 0), ("grouped_mm, float16: hang", 1)):
        options = ("--only", *names[: 1 if plant else None], "--timeout", "60")
        done = check(*options, plant=plant, platforms=None, timeout=500)
        assert done.returncode == status, done.stdout + done.stderr
        assert row(done.stdout, "grouped_mm, bfloat16").splitlines()[0].endswith("ok")
        assert " mm sm" in row(done.stdout, "grouped_mm, bfloat16")


PLANTED = {
    "grouped_mm dw, bfloat16": ("wrong", "WRONG", "of 15 cases are wrong"),
    "grouped_mm dw, float16": (
        "hang", "HUNG", "it took longer than 15 s. In T=70 G=4 K=64 N=96, uneven."
    ),
    "segmented_mm, float16": ("crash", "CRASHED", "it ended with SIGSEGV. In M=64 K=70 N=96 S=4,"),
    "gather_mm, bfloat16": ("unsteady", "WRONG", "of 20 repetitions have other bits"),
    "gather_mm, float16": ("raise", "FAILED", "RuntimeError: planted. In 20 of M=1 K=64 N=96,"),
    "gather_mm, float32": ("burn", "FAILED", "'burn' is not one of wrong, unsteady, hang, crash"),
}  # fmt: skip
RIGHT_BESIDE = ("grouped_mm dw, float32", "segmented_mm, bfloat16", "segmented_mm, float32")


def test_a_planted_fault_is_a_line():
    """Lines before and behind it are right, in other processes."""
    plant = "; ".join(f"{key}: {fault}" for key, (fault, *_) in PLANTED.items())
    names = ("grouped_mm dw", "segmented_mm", "gather_mm")
    done = check("--only", *names, "--timeout", "15", plant=plant, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    for key, (_, state, says) in PLANTED.items():
        first, why = row(done.stdout, key).splitlines()
        assert first.endswith(f"  {state}")
        assert says in why
    for key in RIGHT_BESIDE:
        assert row(done.stdout, key).splitlines()[0].endswith("ok")
    assert "3 of 9 lines are right" in done.stdout
    assert "Not right: grouped_mm dw, bfloat16; grouped_mm dw, float16; seg" in done.stdout


def test_interrupted(tmp_path):
    """The table so far is printed, and no child is left."""
    of_run = environment() | {
        child.PLANT: "grouped_mm dw, float16: hang", "TMPDIR": str(tmp_path)
    }  # fmt: skip
    command = [sys.executable, "-m", "jax_groupgemm.check", "--quick", "--only", "grouped_mm dw"]
    with subprocess.Popen(command, env=of_run, stdout=subprocess.PIPE, text=True) as running:
        reports = lambda: [path.read_text() for path in tmp_path.glob("jgg-check-*/report")]
        deadline = time.monotonic() + 100
        while not any('dw, float16"' in text for text in reports()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(2)  # until the command has read it, too
        running.terminate()
        text, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    assert row(text, "grouped_mm dw bfloat16").splitlines()[0].endswith("ok")
    assert "It was interrupted: 2 lines did not run, and nothing is remembered." in text
    assert not reports()


def test_lists_and_names(capsys, monkeypatch):
    monkeypatch.setattr(command, "find_device", lambda limit: CPU)
    named = lambda *only: [line.key for line in lines.selected(CPU, list(only))]
    assert named("route") == ["route, int32"]  # and no router's
    assert named("grouped_mm, float32", "fp8_grouped_w") == [
        "grouped_mm, float32", "fp8_grouped_wgrad, float32"
    ]  # fmt: skip
    assert {"gather_qmm nvfp4, float16", "nvfp4_quantize, float32"} <= set(named("nvfp4"))
    assert command.main(["--list", "--only", "grouped_mm dx"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == [
        "grouped_mm dx, bfloat16", "grouped_mm dx, float16", "grouped_mm dx, float32"
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="no line has nothing; see --list"):
        command.main(["--only", "nothing"])
    with pytest.raises(SystemExit):
        command.main(["--timeout", "0"])


def test_a_build_without_kernels(capsys, monkeypatch):
    broken = dataclasses.replace(CPU, problem="the extension module cannot be imported")
    monkeypatch.setattr(command, "find_device", lambda limit: broken)
    assert command.main([]) == 1
    assert "no kernel to check: the extension module cannot be imported" in capsys.readouterr().out


def test_a_device_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(processes, "environment", lambda: {"PATH": ""})
    monkeypatch.setattr(processes.sys, "executable", "/bin/false")
    with pytest.raises(SystemExit, match="no device: it ended with status 1"):
        command.find_device(5)


def test_a_process_that_never_starts(monkeypatch):
    """Every line says so, and no process is started again and again."""
    monkeypatch.setattr(processes.sys, "executable", "/bin/false")
    found = list(processes.run(["a, b", "c, d"], {}, 5))
    assert [r.state for r in found] == ["crashed", "crashed"]
    assert found[0].problem == "its process did not start: it ended with status 1"


def script(monkeypatch, tmp_path, text: str):
    """Children run this instead, with the path of their report as ``report``."""
    program = tmp_path / "child.sh"
    program.write_text(
        f'#!/bin/sh\nreport=$(echo "$3" | sed \'s/.*"report": "\\([^"]*\\)".*/\\1/\')\n{text}'
    )
    program.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(program))


BEGIN = """
say() { echo "$1" >> "$report"; }
say '{"event": "line", "key": "a, b"}'
"""
RIGHT = {"cases": 1, "kernels": ["k"], "error": 0, "share": 0, "problem": None}
DONE = f"say '{json.dumps({'event': 'done', 'key': 'a, b', **RIGHT})}'\n"


def test_a_crash_after_the_last_case(monkeypatch, tmp_path):
    """A kernel that wrote where it should not may end so: it is that line's."""
    script(monkeypatch, tmp_path, BEGIN + DONE + "kill -11 $$\n")
    *_, last = processes.run(["a, b"], {}, 5)
    assert last.state == "crashed"
    assert last.problem == "after its last case, it ended with SIGSEGV"


def test_a_process_that_ignores_signals_is_killed(monkeypatch, tmp_path):
    script(monkeypatch, tmp_path, "trap '' TERM INT HUP\n" + BEGIN + "sleep 1000\n")
    (only,) = processes.run(["a, b"], {}, 0.5)
    assert (only.state, only.problem) == ("hung", "it took longer than 0.5 s")


def test_half_an_event_is_none(monkeypatch, tmp_path):
    script(monkeypatch, tmp_path, BEGIN + 'printf \'{"event": "do\' >> "$report"; exit 3\n')
    (only,) = processes.run(["a, b"], {}, 5)
    assert (only.state, only.problem) == ("crashed", "it ended with status 3")


# ---- what is remembered ------------------------------------------------------------------------


def ok(key, *kernels):
    return Result(key, "ok", cases=3, kernels=kernels)


def test_a_kernel_is_proven_by_lines_that_are_right():
    right = [ok("a, x", "jgg_mm sm80"), ok("b, x", "jgg_mm sm80", "jgg_q sm100")]
    assert table.proved(right) == ["jgg_mm sm80", "jgg_q sm100"]
    wrong = Result("c, x", "wrong", "off", kernels=("jgg_q sm100",))
    assert table.proved([*right, wrong]) == ["jgg_mm sm80"]
    assert table.proved([*right, Result("c, x", "hung", "slow")]) == []
    assert table.proved([Result("d, x", "none")]) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [([], "are proven on this GPU"), (["--quick"], "Nothing is remembered"),
     (["--only", "grouped"], "Nothing is remembered")],
)  # fmt: skip
def test_whole_runs_are_remembered(monkeypatch, tmp_path, options, says):
    monkeypatch.setenv("JGG_PROVEN", str(tmp_path))
    results = [ok("a, x", "jgg_nvfp4_grouped_mm sm100")]
    said = command.remembered(B200, results, command.arguments(options))
    assert said is not None
    assert says in said
    files = list(tmp_path.iterdir())
    assert len(files) == (not options)
    for file in files:
        assert proven.read(file) == (PLACE, {"jgg_nvfp4_grouped_mm sm100"})


def test_planted_faults_and_cpus_prove_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("JGG_PROVEN", str(tmp_path))
    args = command.arguments([])
    assert command.remembered(CPU, [ok("a, x", "jgg_mm cpu")], args) is None
    monkeypatch.setenv(child.PLANT, "a, x: wrong")
    assert command.remembered(B200, [ok("a, x", "jgg_mm sm80")], args) is None
    monkeypatch.delenv(child.PLANT)
    unknown = dataclasses.replace(B200, place=None)
    said = command.remembered(unknown, [ok("a, x", "jgg_mm sm80")], args)
    assert said is not None
    assert "the driver's version is unknown" in said
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JGG_PROVEN", str(tmp_path / "file" / "folder"))
    said = command.remembered(B200, [ok("a, x", "jgg_mm sm80")], command.arguments([]))
    assert said is not None
    assert "Nothing is remembered: " in said
    assert said.endswith("JGG_PROVEN names another folder.")


def test_the_summary_names_what_no_case_reached():
    said = table.summary([ok("a, x", "jgg_mm sm80")], B200, whole=True)
    assert said[-1] == "Kernels that no case reached: jgg_nvfp4_grouped_mm sm100."
    assert table.summary([ok("a, x", "jgg_mm sm80")], B200, whole=False) == [
        "1 of 1 lines are right, of 3 cases."
    ]


def test_the_head_says_where():
    where, what = table.head(B200)
    assert where == "NVIDIA B200, compute capability 10.0, driver 580.1"
    assert f"jax_groupgemm {extension.VERSION}" in what


def test_names_of_lines():
    """A crash names one line, and a process has the lines of one name."""
    for capability in (0, 80, 89, 90, 100, 120):
        found = lines.lines(dataclasses.replace(B200, capability=capability))
        keys = [line.key for line in found]
        assert len(keys) == len(set(keys))
    line = next(line for line in lines.lines(CPU) if line.name == "grouped_mm dx")
    assert (line.part(True), line.part(False)) == ("grouped_mm", "grouped_mm dx")
    hopper = lines.lines(dataclasses.replace(B200, capability=90, kernels=("jgg_mm sm90",)))
    assert {"grouped_mm sm80", "grouped_qmm nvfp4 prepacked dx"} <= {line.name for line in hopper}


def test_devices_travel_between_processes():
    for given in (CPU, B200):
        assert device.Device.of(json.loads(json.dumps(given.encoded()))) == given


def test_children_have_their_own_settings(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    found = processes.environment()
    assert "JAX_ENABLE_X64" not in found
    assert found["JAX_PLATFORMS"] == "cuda,cpu"
    assert found["CUDA_VISIBLE_DEVICES"] == "3"
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_issue_templates_ask_for_the_table():
    folder = Path(__file__).parents[2] / ".github/ISSUE_TEMPLATE"
    if not folder.exists():
        pytest.skip("needs the sources")
    for name in ("check_of_a_gpu.md", "wrong_result.md"):
        assert f"`{proven.COMMAND}`" in (folder / name).read_text()
