"""benchmarks.scaling: its model predicts what was measured, and two pages have its tables."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: an installed jax_groupgemm comes first

from benchmarks import scaling, scaling_model, train_devices  # noqa: E402
from benchmarks.scaling_model import Layer, total  # noqa: E402


def test_predictions_are_within_the_bound():
    off = [abs(model / measured - 1) for _, _, measured, model in scaling.errors()]
    assert max(off) < scaling.BOUND
    said = re.findall(r"layer on H200s at most (\d+) %", scaling.MODEL_PAGE.read_text())
    assert [*map(int, said)] == [round(100 * max(off))]


def test_predictions_for_h100s_are_within_the_bound():
    """1, 2 and 4 devices, each transport, forward and with gradients, three numbers of tokens."""
    points = scaling.on_h100s()
    assert len(points) == 3 * 2 * 5
    *most, largest = sorted(abs(model / measured - 1) for measured, model in points.values())
    assert largest < scaling.BOUND
    said = re.search(
        r"at most (\d+) % off, and at most (\d+) % but for", scaling.MODEL_PAGE.read_text()
    )
    assert said is not None
    assert [*map(int, said.groups())] == [round(100 * largest), round(100 * most[-1])]


def test_what_the_page_says_of_training_steps():
    """Predictions are within the bound, and losses are those of one device."""
    record = json.loads(scaling.STEPS.read_text())
    assert train_devices.off(record["records"]) == []
    by = {(r["devices"], r["tokens"]): r for r in record["records"]}
    page, model_page = (" ".join(p.read_text().split()) for p in scaling.PAGES)
    several = ((2, 8192), (2, 16384), (4, 8192))
    ms = {case: by[case]["ms"]["median"] for case in by}
    models = [train_devices.predicted(by[n, t], by[1, t], record["size"]) for n, t in several]
    low = [1 - model / ms[case] for model, case in zip(models, several, strict=True)]
    assert max(map(abs, low)) < scaling.BOUND
    said = [f"{100 * part:.0f}" for part in low]
    assert f"It is {said[0]}, {said[1]} and {said[2]} % too low" in model_page
    one, other, four = (ms[1, n * tokens] / ms[n, tokens] for n, tokens in several)
    assert f"{one:.2f} and {other:.2f} times on two, {four:.2f} times on four" in page


def test_the_pages_have_these_tables():
    assert scaling.main(["--check"]) == 0
    path, page = scaling.MODEL_PAGE, scaling.MODEL_PAGE.read_text()
    assert scaling.written(path, page.replace("| Qwen3-30B-A3B | 16 |", "| Qwen3 | 16 |")) == page


def test_the_pages_have_the_machine_and_the_ratios():
    page, lab = scaling.PAGE.read_text(), (ROOT / "docs/lab/moe_layer.md").read_text()
    machine = scaling_model.H200
    for said in (
        f"{machine.products / 1e9:.0f} TFLOP/s", f"{machine.memory / 1e9:.1f} TB/s",
        f"{machine.gathering / 1e9:.1f} TB/s", f"{machine.network / 1e6:.0f} GB/s",
        f"{machine.all_gather / 1e6:.0f} and {machine.all_to_all / 1e6:.0f} GB/s",
        f"{machine.latency} ms", f"{machine.peer} ms", f"{machine.loop} ms", f"{machine.call} ms",
    ):  # fmt: skip
        assert said in scaling.MODEL_PAGE.read_text()
    by = {(p.gpus, p.tokens, p.transport): p for p in scaling.POINTS}
    one, four = by[1, 32768, None], by[4, 131072, "gather"]
    for before, after in ((one.forward, four.forward), (one.gradients, four.gradients)):
        assert f"{4 * before / after:.2f} times" in page
        assert f"{4 * before / after:.2f}" in lab


def test_shares_of_the_floor_are_those_of_the_performance_page():
    page = (ROOT / "docs/performance.md").read_text()
    for op, shares in scaling_model.SHARES.items():
        for regime, share in zip(("<= 32", "64-512", ">= 1024"), shares, strict=True):
            assert re.search(rf"^\| {op} {regime} \| \d+ \| {100 * share:.0f}% \|", page, re.M)


def test_a_call_is_the_difference_that_the_record_has():
    record = json.loads((ROOT / "benchmarks/results/h200/moe/layer_jax.json").read_text())
    first = record["records"][0]
    assert (first["shape"], first["direction"], first["arm"]) == ("Qwen3-30B", "forward", "ours")
    call = first["wall_ms"] - first["ms"]["median"]
    assert call == pytest.approx(scaling_model.H200.call, abs=0.005)


@pytest.mark.parametrize("model", [scaling.QWEN, scaling.DEEPSEEK], ids=lambda m: m.name)
@pytest.mark.parametrize("arm", scaling.ARMS, ids=lambda arm: arm.name)
def test_more_takes_longer(model, arm):
    def both(gpus, tokens, **options):
        layer = scaling.arranged(model, gpus, tokens, arm.transport, arm.group, **options)
        assert all(part >= 0 for part in layer.both().values())
        assert total(layer.forward()) < total(layer.gradients()) < total(layer.both())
        return total(layer.both())

    for gpus in (2, 8, 64, 512):
        times = [both(gpus, tokens, slack=2.0) for tokens in (2048, 8192, 32768)]
        assert times == sorted(times)
        assert both(gpus, 8192) >= times[1]  # room for the worst case
        slower = dataclasses.replace(scaling_model.H200, network=25e6, memory=2.1e9)
        assert both(gpus, 8192, slack=2.0, machine=slower) > times[1]
    each = [scaling.efficiency(model, gpus, arm, "both") for gpus in (1, 2, 4, 8, 64)]
    assert each == sorted(each, reverse=True)
    assert each[0] == 1


def test_rounds():
    """Few tokens are uneven; where every token meets every device, one round is enough."""
    few, many = (Layer(scaling.QWEN, tokens, 64, "all_to_all") for tokens in (64, 32768))
    assert few.rounds > many.rounds == 1
    assert Layer(scaling.QWEN, 64, 2, "all_to_all").rounds == 1
    assert scaling_model.fullest(100, 1.0, 4) == 100
    assert scaling_model.fullest(100, 0.5, 1) < scaling_model.fullest(100, 0.5, 10**6) <= 100


@pytest.mark.weekly
def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    scaling.draw(tmp_path / "plot.svg")
    for text in ((tmp_path / "plot.svg").read_text(), scaling.PLOT.read_text()):
        assert all(arm.name in text for arm in scaling.ARMS)
        assert "measured" in text
