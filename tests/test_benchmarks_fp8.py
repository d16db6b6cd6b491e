"""The benchmark of FP8 without a GPU: its lists, floors, arms and checks."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from benchmark_cases import check_lists

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: an installed jax_groupgemm comes first

from benchmarks import fp8, fp8_linear, gpu, report, summary, timing  # noqa: E402
from benchmarks import fp8_shapes as shapes  # noqa: E402
from benchmarks.fp8_shapes import Linear, Product, Quantize  # noqa: E402
from benchmarks.shapes import MODELS  # noqa: E402

ARGS = SimpleNamespace(peers=[], implementation=[None], repetitions=2, turns=2, in_situ=False)


@pytest.fixture(autouse=True)
def _fake_times(monkeypatch):
    monkeypatch.setattr(timing.JaxArm, "time", lambda self, n: [2.0] * n)
    timing.forget()


@pytest.mark.parametrize("op", shapes.OPS)
def test_lists(op):
    check_lists(gpu.cases, op)


def test_products_of_the_list():
    """DeepGEMM's shapes, and the models' from decode to training."""
    found = gpu.cases("fp8")
    deep = {(c.groups, c.rows // c.groups, c.n, c.k) for c in found if c.name == "DeepGEMM"}
    assert deep == set(shapes.PUBLISHED) | {(*g, *w) for g in shapes.GROUPS for w in shapes.WIDTHS}
    assert {c.regime for c in found} == {"<= 32", "64-512", ">= 1024"}
    assert {c.op for c in found} == {"fp8 fprop", "fp8 dgrad", "fp8 wgrad"}
    for case in found:
        assert case.sizes().sum() == case.rows
    assert any((c.sizes() % 128).any() for c in found if c.name == "DeepGEMM")


def test_layers_of_the_list():
    """Every model's, with the fewest tokens that give an expert 1024 rows; a small one at first."""
    found = gpu.cases("fp8_linear")
    assert {c.name.split()[0] for c in found} == set(MODELS)
    assert len(found) == 2 * len(MODELS)
    for case in found:
        assert case.regime == ">= 1024"
        assert case.rows // 2 < 1024 * case.groups <= case.rows == case.sizes().sum()
        assert case.tokens & (case.tokens - 1) == 0
    assert [c.name for c in gpu.cases("fp8_linear", "quick")] == ["Qwen3-30B up"]


def test_floors():
    case = Product("", 4, 256, 128, 384, direction="fprop")
    lines = 256 * 128 + 4 * 256
    assert case.bytes == lines + 4 * (128 * 384 + 3 * 4) + 2 * 256 * 384
    assert case.flops == 2 * 256 * 128 * 384
    wgrad = dataclasses.replace(case, direction="wgrad")
    assert wgrad.bytes == 256 * 512 + 4 * 256 * 4 + 4 * 4 * 128 * 384
    linear = Linear("", 4, 256, 128, 384)
    assert linear.bytes == 2 * (2 * 256 * (128 + 384) + 2 * 4 * 128 * 384)
    assert linear.flops == 3 * case.flops
    assert Quantize("rows", 3, 256, 128).bytes == 256 * 128 * 3 + 4 * 256
    assert Quantize("weights", 3, 128, 256).bytes == 3 * (128 * 256 * 3 + 4 * 2)


@pytest.mark.parametrize("direction", shapes.DIRECTIONS)
@pytest.mark.one_in(3)
def test_products_run_and_are_checked(direction, monkeypatch):
    monkeypatch.setitem(shapes.PUBLISHED, (3, 20, 160, 128), 7.0)
    case = Product("small", 3, 60, 128, 160, direction=direction)
    record = gpu.run_case(case, ARGS, 1e12, 1e12)
    assert record.get("published_tflops") == (7.0 if direction == "fprop" else None)
    assert record["notes"] == {}
    assert list(record["us"]) == ["ours", "ours[casts]", "ours[bfloat16]"]
    assert max(record["errors"].values()) <= case.tolerance
    json.dumps(record)
    v = fp8.operands(case)
    error, arm = fp8.checker(case, v), fp8.arms(case, v, ARGS)["ours"]()
    assert error(arm.result() * 1.1) > case.tolerance


def test_layer_runs_and_is_checked():
    case = Linear("small", 3, 60, 128, 160)
    record = gpu.run_case(case, ARGS, 1e12, 1e12)
    assert record["notes"] == {}
    assert list(record["us"]) == ["ours", "ours[quantized]", "ours[bfloat16]"]
    errors = record["errors"]
    assert errors["ours"] == errors["ours[quantized]"]
    assert 1e-2 < errors["ours"] < 0.8 * case.tolerance
    assert errors["ours[bfloat16]"] < 5e-3
    assert "ours[quantized] 2.0 (1.00x)" in summary.line(record)
    assert "ours[quantized] / ours | ours[bfloat16] / ours" in report.text([], [record])
    v = fp8_linear.operands(case)
    error = fp8_linear.checker(case, v)
    right = fp8_linear.arms(case, v, ARGS)["ours[bfloat16]"]().result()
    for i in range(3):
        wrong = [out * 1.1 if i == j else out for j, out in enumerate(right)]
        assert error(wrong) > case.tolerance
        assert np.isnan(error([out * np.nan if i == j else out for j, out in enumerate(right)]))


def drawn(paths, folder: Path) -> dict[str, str]:
    report.draw(report.load(paths)[1], folder)
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_plots_are_their_own(tmp_path):
    """Beside the ceiling of FP8, with bfloat16 as the peer; no other plot has these cases."""
    pytest.importorskip("matplotlib")
    folder = ROOT / "benchmarks" / "results" / "h100"
    plots = drawn([folder / "fp8.json"], tmp_path / "fp8")
    assert set(plots) == {"speedup_fp8.svg", "means_fp8.svg", "roofline_fp8.svg"}
    assert "ours, bfloat16" in plots["means_fp8.svg"]
    assert "ours[casts]" not in plots["means_fp8.svg"]
    assert "1537-1563 TFLOP/s" in plots["roofline_fp8.svg"]
    assert drawn([folder / "conversions.json"], tmp_path / "conversions") == {}


def test_published_figures_are_in_the_table():
    """Beside ours, and only where a record has one."""
    record = {
        "op": "fp8 fprop", "case": "small", "us": {"ours": 2.0}, "floor_us": 1.0,
        "floor_share": 0.5, "tflops": 3.0, "tbytes": 4.0,
    }  # fmt: skip
    header, _, one, other = report.grouped([record | {"published_tflops": 7.0}, record]).split("\n")
    assert header.split(" | ")[4:6] == ["TFLOP/s", "published (DeepGEMM, H800)"]
    assert one == "| fp8 fprop small | 2 | 1 | 50% | 3 | 7 | 4.00 |"
    assert other == "| fp8 fprop small | 2 | 1 | 50% | 3 |  | 4.00 |"
    assert "published" not in report.grouped([record])


@pytest.mark.parametrize("what", ["rows grouped", "along T stochastic", "weights transposed"])
@pytest.mark.one_in(3)
def test_quantize_runs_and_is_checked(what):
    case = Quantize(what, 3, 96, 256)
    v = fp8.operands(case)
    (arm,) = fp8.arms(case, v, ARGS).values()
    out = arm().result()
    error = fp8.checker(case, v)
    assert error(out) == 0
    first = (0,) * out.scales.ndim
    assert error(dataclasses.replace(out, scales=out.scales.at[first].mul(2))) > 0
    assert error(jax.tree.map(np.zeros_like, out)) > 0.5
