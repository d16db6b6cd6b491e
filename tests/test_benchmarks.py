"""The benchmark without a GPU: its lists, its arithmetic, its checks and its report."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: an installed jax_groupgemm comes first

from benchmarks import gpu, layer, peers, report, shapes, step, summary, timing  # noqa: E402
from benchmarks.shapes import Grouped, Segmented  # noqa: E402

# No device times here: any time will do, and nothing is compared with another.
ARGS = SimpleNamespace(
    level="default", peers=["lax"], implementation=[None], repetitions=2, turns=2, in_situ=False
)


def run(*args):
    command = [sys.executable, "-m", "benchmarks", *args]
    env = {"PYTHONPATH": "", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)


@pytest.mark.slow
def test_command_line():
    assert "--implementation" in run("--help").stdout
    without = run("--quick")
    assert without.returncode == 1
    assert "needs an NVIDIA GPU" in without.stderr
    assert "Traceback" not in without.stderr


def test_arguments():
    args = gpu.arguments(
        ["--ops", "wgrad", "--cases", "Mixtral", "--implementation", "sm80", "None"]
    )
    assert args.implementation == ["sm80", None]
    assert args.peers == ["torch", "quack", "dequantize", "humming"]
    assert {(c.op, c.label.split()[0]) for c in gpu.selected(args)} == {("wgrad", "Mixtral-8x7B")}
    assert set(gpu.arguments(["--peers", "all"]).peers) > set(peers.PEERS)


@pytest.mark.parametrize("op", shapes.OPS)
def test_lists(op):
    quick, default, full = (shapes.cases(op, level) for level in ("quick", "default", "full"))
    assert len(quick) <= len(default) <= len(full)
    assert set(quick) <= set(default) <= set(full)
    for cases in (quick, default, full):
        assert len({(c.op, c.label) for c in cases}) == len(cases)
    assert {c.regime for c in full} <= set(shapes.REGIMES)


def test_every_model_and_regime_is_in_the_default_list():
    forward = shapes.cases("forward")
    for model in shapes.MODELS:
        regimes = {c.regime for c in forward if c.label.startswith(f"{model} up")}
        assert set(shapes.REGIMES[:2]) <= regimes
    full = {
        (c.groups, c.k, c.n, c.rows)
        for c in shapes.cases("forward", "full")
        if isinstance(c, Grouped)
    }
    assert {(128, 768, 2048, 4096), (8, 14336, 4096, 8192), (256, 7168, 4096, 16)} <= full


def test_quick_has_what_is_claimed():
    """Few rows, both directions; the scan; one long segment; skewed weight gradients elsewhere."""
    quick = [c for op in shapes.OPS for c in shapes.cases(op, "quick")]
    grouped = [c for c in quick if isinstance(c, Grouped)]
    least = {
        op: min(c.rows / c.groups for c in grouped if c.op == op) for op in ("forward", "dgrad")
    }
    assert least["forward"] <= 4
    assert least["dgrad"] <= 32
    assert [(c.groups, c.active) for c in grouped if c.op == "scan"] == [(8, 8), (4096, 8)]
    assert [c.label for c in quick if isinstance(c, Segmented) and c.dominant] == [
        "1024x1024x8192x64 one of 90% cut at 16s"
    ]
    assert [c.regime for c in shapes.cases("wgrad") if c.skew] == ["64-512 skewed"]
    args = gpu.arguments(["--quick", "--cases", "scan G4096", "--implementation", "sm90"])
    assert [c.label for c in gpu.selected(args)] == ["G4096 K2048 N1536 R1024 live 8"]


@pytest.mark.parametrize("model", shapes.MODELS)
def test_every_number_of_tokens_is_in_the_full_list(model):
    full = shapes.cases("forward", "full")
    rows = {c.rows for c in full if isinstance(c, Grouped) and c.model == f"{model} down"}
    assert rows >= {tokens * shapes.TOP_K[model] for tokens in (1, 8, 64, 512, 4096, 16384)}
    assert rows >= set(shapes.ROWS)


@pytest.mark.parametrize("skew", [False, True])
def test_sizes(skew):
    for case in (c for op in ("forward", "wgrad", "scan") for c in shapes.cases(op, skew=skew)):
        assert isinstance(case, Grouped)
        sizes = case.sizes()
        assert sizes.dtype == np.int32
        assert len(sizes) == case.groups
        assert sizes.sum() == case.rows
    scan = shapes.cases("scan")
    assert [np.count_nonzero(c.sizes()) for c in scan] == [8, 8]
    assert scan[0].flops == scan[1].flops
    assert scan[0].bytes == scan[1].bytes


def test_cuts():
    for case in shapes.cases("segmented", "full"):
        assert isinstance(case, Segmented)
        sizes = case.sizes()
        assert len(sizes) == case.count
        assert sizes.sum() == case.k
        assert (sizes.max() >= 0.9 * case.k) == case.dominant
        if case.unit == 16:
            assert not (sizes % 16).any()
            assert sizes.all() or case.dominant
        else:
            assert (sizes == 0).any()
            assert (sizes % 16).any()
    assert Segmented(*shapes.SEGMENTED[2], kind="tf32", unit=16).mlx == 13.1
    assert Segmented(*shapes.SEGMENTED[2], kind="float16", unit=16).mlx is None
    assert Segmented(*shapes.SEGMENTED[2], kind="tf32", unit=16, dominant=True).mlx is None
    skewed = shapes.cases("segmented", "quick", skew=True)
    assert len(skewed) == 8
    assert all(isinstance(c, Segmented) and c.dominant for c in skewed)


def test_floors():
    case = Grouped("forward", "", 2, 8, 16, 100)
    assert case.flops == 2 * 100 * 8 * 16
    assert case.bytes == 2 * (100 * 8 + 100 * 16 + 2 * 8 * 16)
    one_row = Grouped("forward", "", 2, 8, 16, 1)  # one of the two matrices is not read
    assert one_row.bytes == 2 * (8 + 16 + 8 * 16)
    assert Grouped("wgrad", "", 2, 8, 16, 1).bytes == 2 * (8 + 16 + 2 * 8 * 16)  # but both written
    assert Segmented(4, 8, 16, 2, kind="tf32", unit=1).bytes == 4 * (16 * 12 + 2 * 4 * 8)
    assert shapes.floor_us(3e6, 1e6, 1e12, 1e12) == 3.0
    assert shapes.floor_us(1e6, 4e6, 1e12, 1e12) == 4.0


def test_split():
    kernels = [("mark", 9.0), ("a", 1.0), ("b", 2.0), ("mark", 9.0), ("a", 3.0), ("b", 4.0)]
    assert timing.split(kernels, {"mark"}, 2) == [3000.0, 7000.0]
    for wrong in (kernels[1:], kernels[:-1], kernels[:3], []):
        with pytest.raises(RuntimeError):
            timing.split(wrong, {"mark"}, 2)


RECORD = {
    "date": "2026-01-01", "commit": "abc", "gpu": "GPU", "jax": "0.11", "missing": ["mosaic"],
    "C_tflops": 800.0, "B_tbytes": 4.0,
    "records": [
        {
            "op": op, "case": case, "regime": regime, "us": us, "floor_us": floor,
            "floor_share": floor / us.get("ours", 1.0), "tflops": 100.0, "tbytes": 1.0,
            "error": 1e-3, "notes": {},
        } | ({"mlx_us": 12.0} if op.startswith("segmented") else {})
        for op, case, regime, us, floor in (
            ("forward", "a", "<= 32", {"ours": 10.0, "torch": 20.0, "quack": 9.0}, 5.0),
            ("forward", "b", "<= 32", {"ours": 10.0, "torch": 5.0}, 20.0),
            ("forward", "c", "<= 32", {"torch": 5.0}, 20.0),  # ours failed
            ("segmented bfloat16", "8x8x8x2 cut at 16s", "small", {"ours": 4.0, "torch": 8.0}, 1.0),
        )
    ],
}  # fmt: skip


def test_summary():
    records = RECORD["records"]
    assert summary.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(summary.geomean([]))
    assert [summary.is_slow(r) for r in records] == [True, True, False, False]
    forward, segmented = summary.summary(records)
    assert forward["cases"] == 2
    assert forward["share"] == pytest.approx(1.0)
    assert forward["peers"]["torch"] == {"ratio": pytest.approx(1.0), "worst": 0.5, "cases": 2}
    assert forward["peers"]["quack"]["cases"] == 1
    assert segmented["peers"]["torch"]["ratio"] == pytest.approx(2.0)
    text = summary.totals(records)
    assert "2 of 3 cases with a peer below 0.95" in text
    assert "forward a: 0.90x of quack" in text
    assert "SLOWER than torch" in summary.line(records[1])
    assert "failed" in summary.line(records[2])


def test_report(tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RECORD))
    report.main([str(path)])
    text = capsys.readouterr().out
    assert "Partial: without mosaic." in text
    assert "| forward a | 10 | 5 | 50% | 100 | 1.00 | 2.00x | **0.90x** |" in text
    assert "| 8x8x8x2 cut at 16s | 4.0 (12) |" in text
    assert "| forward <= 32 | 2 | 100% | 1.00x | 0.90x |" in text
    assert text.endswith("\n\n2 of 3 cases with a peer run below 0.95 of the best peer's speed.\n")


def test_report_of_a_case_measured_again(tmp_path, capsys):
    first = RECORD["records"][0]
    paths = [tmp_path / name for name in ("record.json", "again.json")]
    paths[0].write_text(json.dumps(RECORD))
    again = {**first, "us": {**first["us"], "ours": 2 * first["us"]["ours"]}}
    paths[1].write_text(json.dumps(RECORD | {"records": [again]}))
    report.main([str(path) for path in paths])
    text = capsys.readouterr().out
    assert text.count("| forward a | ") == 1
    assert "| forward a | 20 | " in text


def test_report_of_times_in_situ(tmp_path, capsys):
    """A column of its own, where any case has them."""
    chained = {**RECORD["records"][0], "in_situ_us": {"ours": 12.5}}
    cut = {**RECORD["records"][3], "in_situ_us": {"ours": 6.25}}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RECORD | {"records": [chained, RECORD["records"][1], cut]}))
    report.main([str(path)])
    text = capsys.readouterr().out
    assert "| case | us | in situ | floor | of floor |" in text
    assert "| forward a | 10 | 12 | 5 | 50% |" in text
    assert "| forward b | 10 |  | 20 | 200% |" in text
    assert "| us in situ | bfloat16 |\n| --- | --: |\n| 8x8x8x2 cut at 16s | 6.2 |" in text
    assert summary.line(chained).endswith("in situ ours 12.5  SLOWER than quack")


def test_plots_do_not_change(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RECORD))
    for folder in ("first", "second"):
        report.main([str(path), "--plots", str(tmp_path / folder)])
    for name in ("speedup.svg", "roofline.svg"):
        first, second = ((tmp_path / folder / name).read_bytes() for folder in ("first", "second"))
        assert first == second
        assert b"<svg" in first
        assert len(first) < 60_000


def test_committed_record_is_readable(capsys):
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/*.json")):
        report.main([str(path)])
        assert "of floor" in capsys.readouterr().out


SMALL = [
    Grouped("forward", "", 4, 32, 48, 70),
    Grouped("forward", "", 4, 32, 48, 70, transposed=True),
    Grouped("forward", "", 4, 32, 48, 70, skew=True),
    Grouped("dgrad", "", 4, 32, 48, 70),
    Grouped("wgrad", "", 4, 32, 48, 70),
    Grouped("scan", "", 64, 32, 48, 70, active=8),
    *(Segmented(8, 16, 64, 4, kind=kind, unit=1) for kind in shapes.KINDS),
    Segmented(8, 16, 640, 4, kind="bfloat16", unit=16, dominant=True),
    Segmented(8, 16, 64, 3, kind="bfloat16", unit=16, transpose_a=True),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{c.op} {c.label}")
@pytest.mark.one_in(3)
def test_cases_run_and_are_checked(case, monkeypatch):
    monkeypatch.setattr(timing.JaxArm, "time", lambda self, n: [2.0] * n)
    record = gpu.run_case(case, ARGS, 1e12, 1e12)
    assert record["notes"] == {}
    assert set(record["us"]) == ({"ours"} if case.op == "scan" else {"ours", "lax"})
    assert record["error"] <= case.tolerance
    json.dumps(record)
    assert "of floor" in summary.totals([record])


def test_wrong_and_failing_arms_are_reported(monkeypatch):
    class Wrong(timing.JaxArm):
        def time(self, n):
            return [1.0] * n

        def result(self):
            return jnp.zeros((70, 48), "bfloat16")

    def broken(case, v):
        raise ImportError("no such peer")

    monkeypatch.setattr(timing.JaxArm, "time", lambda self, n: [2.0] * n)
    monkeypatch.setitem(peers.PEERS, "torch", lambda case, v: Wrong(lambda: 0, (), True))
    monkeypatch.setitem(peers.PEERS, "lax", broken)
    args = SimpleNamespace(**vars(ARGS) | {"peers": ["torch", "lax", "mosaic"]})
    record = gpu.run_case(SMALL[0], args, 1e12, 1e12)
    assert set(record["us"]) == {"ours"}
    assert record["notes"]["torch"] == "WRONG: relative error 1.0e+00"
    assert record["notes"]["lax"] == "failed: ImportError: no such peer"
    assert record["notes"]["mosaic"].startswith("failed: ")


def test_results_are_written_over_nan():
    """Into the buffer that is given, whatever the result is a tree of."""
    f = lambda x: (x * 2, {"codes": x.astype("uint32"), "scales": x.astype("uint8")})
    arm = timing.JaxArm(f, (jnp.ones((3, 5)),), True)
    nonsense = timing.poison(arm.kind)
    assert np.isnan(nonsense[0]).all()
    assert set(np.asarray(nonsense[1]["codes"]).ravel()) == {2**32 - 1}
    assert set(np.asarray(nonsense[1]["scales"]).ravel()) == {255}
    place = lambda tree: [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]
    before = place(nonsense)
    assert place(arm.call(nonsense, *arm.args)) == before
    np.testing.assert_array_equal(arm.result()[0], np.full((3, 5), 2))


def test_what_writes_nothing_is_wrong(monkeypatch):
    class Lazy(timing.JaxArm):
        def result(self):
            return timing.poison(self.kind)

    monkeypatch.setattr(timing.JaxArm, "time", lambda self, n: [2.0] * n)
    monkeypatch.setitem(
        peers.PEERS, "lax", lambda case, v: Lazy(lambda x: x @ v.b[0], (v.a,), True)
    )
    record = gpu.run_case(SMALL[0], ARGS, 1e12, 1e12)
    assert record["notes"] == {"lax": "WRONG: relative error nan"}


def counted(monkeypatch, chain: int):
    """Kernels as if a call had two, and a chain of calls so many."""
    monkeypatch.setattr(timing.JaxArm, "time", lambda self, n: [2.0] * n)
    monkeypatch.setattr(timing, "count", lambda run, *args: (2 if args else chain, run(*args)))


def test_arms_rest(monkeypatch):
    """Before a turn, as the turn before it asks for, whoever had it; not after a failure."""
    log = []
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: log.append(round(seconds, 6)))

    class Arm:
        def __init__(self, us):
            self.us = us

        def time(self, n):
            if self.us is None:
                raise RuntimeError("no")
            return [self.us] * n

    arms = {"a": Arm(1e3), "b": Arm(2e3), "bad": Arm(None), "long": Arm(1e6)}
    times, failed = timing.interleaved(arms, repetitions=4, turns=2)
    assert times == {"a": [1e3] * 4, "b": [2e3] * 4, "long": [1e6] * 4}
    assert failed == {"bad": "RuntimeError: no"}
    rests = [timing.REST * 1e-6 * us for us in (2e3, 4e3)]
    assert log == [0.0, rests[0], rests[1], 0.0, 0.5, rests[0], rests[1]]


def test_in_situ(monkeypatch):
    """Every call of a chain is there, though all have equal operands, and the last one is right."""
    chains = []
    run = timing.Chain.run
    monkeypatch.setattr(timing.Chain, "run", lambda self: chains.append(self) or run(self))
    counted(monkeypatch, 20)
    record = gpu.run_case(SMALL[0], SimpleNamespace(**vars(ARGS) | {"in_situ": True}), 1e12, 1e12)
    assert record["notes"] == {}
    assert set(record["in_situ_us"]) == {"ours", "lax"}
    assert min(record["in_situ_us"].values()) > 0
    chain = chains[0]
    assert chain.leaves[chain.place].dtype == jnp.int32  # the sizes are what each call changes
    others = [leaf for i, leaf in enumerate(chain.leaves) if i != chain.place]
    text = chain.program.lower(chain.leaves[chain.place], others).compile().as_text()
    assert text.count('custom_call_target="jgg_mm"') == timing.IN_SITU


def test_merged_calls_are_not_reported_in_situ(monkeypatch):
    counted(monkeypatch, 19)
    record = gpu.run_case(SMALL[0], SimpleNamespace(**vars(ARGS) | {"in_situ": True}), 1e12, 1e12)
    assert record["in_situ_us"] == {}
    why = "RuntimeError: 10 calls of 2 kernels became 19 kernels"
    assert record["notes"] == {"in situ ours": why, "in situ lax": why}
    assert set(record["us"]) == {"ours", "lax"}


LAYERS = list(layer.ARMS)
BOUNDS = (0, 3e-2), (1e-2, 0.12)  # "by hand" rounds more often than "options", "fp8" to eight bits


# FP8's layer takes seconds to compile.
@pytest.mark.parametrize("arms", [LAYERS[:2], pytest.param([], marks=pytest.mark.weekly)])
def test_layer(arms, capsys):
    """All arms, or those that are named."""
    argv = ["--shape", "4", "48", "64", "32", "--repetitions", "2"]
    (result,) = layer.main([*argv, *(["--arms", *arms] if arms else [])])
    assert list(result["ms"]) == (arms or LAYERS)
    heading, row = capsys.readouterr().out.splitlines()
    assert all(f"{name} ms" in heading for name in arms or LAYERS)
    assert len(row.split()) == 4 + len(arms or LAYERS)
    want, *others = result["grads"].values()
    for found, (least, most) in zip(others, BOUNDS, strict=False):
        for g, e in zip(found, want, strict=True):
            assert least < oracle.error(g, oracle.f64(e)) < most


def test_a_layer_that_there_is_not(capsys):
    with pytest.raises(SystemExit):
        layer.main(["--arms", "fp4"])
    assert "invalid choice: 'fp4'" in capsys.readouterr().err


ALL = "bfloat16", "nvfp4", "fp8"


# NVFP4's step takes most of a minute to compile.
@pytest.mark.parametrize("precisions", [ALL[:1], pytest.param(ALL, marks=pytest.mark.weekly)])
def test_training_steps(tmp_path, capsys, monkeypatch, precisions):
    monkeypatch.setattr(step, "PRECISIONS", {p: step.PRECISIONS[p] for p in precisions})
    path = tmp_path / "step.json"
    argv = ["--shape", "4", "48", "64", "32", "--steps", "2", "--repetitions", "2", "--json"]
    records = step.main([*argv, str(path)])
    assert json.loads(path.read_text())["records"] == json.loads(json.dumps(records))
    assert [r["precision"] for r in records] == list(precisions)
    for record in records:
        for losses in record["losses"].values():  # without a GPU both are of the same program
            assert losses[-1] < losses[0]
    assert len({tuple(r["losses"]["captured"]) for r in records}) == len(precisions)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(precisions)


def test_training_steps_take_turns(monkeypatch):
    """Captured and eager ones, from either side; times are medians."""
    order = []

    class Arm:
        def __init__(self, precision, graph_size, state, data):
            del precision, state, data
            self.name = {size: name for name, size in step.CAPTURE.items()}[graph_size]
            self.losses = []

        def run(self, steps):
            order.append((self.name, steps))
            return float(len(order))

    monkeypatch.setattr(step, "Arm", Arm)
    record = step.measure((2, 16, 16, 16), "nvfp4", 5, 3)
    one, other = ("captured", 5), ("eager", 5)
    assert order == [("captured", 3), ("eager", 3), one, other, other, one, one, other]
    assert record["ms"] == {"captured": 6, "eager": 5}
    assert (8, 256, 512, 512) in step.SHAPES
