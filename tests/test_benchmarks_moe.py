"""benchmarks.moe without a GPU: its JAX arms agree, and its records, tables and plot are made."""

import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: an installed jax_groupgemm comes first

from benchmarks import moe, moe_cases, moe_layers, moe_peers, timing  # noqa: E402

TOY = moe_cases.Shape("toy", 48, 32, 16, 4, 2)


BACK = "forward+backward"


@pytest.fixture
def no_device_times(monkeypatch):
    """Nor does an arm rest. Both directions have one layer, so one is enough."""
    monkeypatch.setattr(timing.JaxArm, "time", lambda self, n: [2.0] * n)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(moe_cases, "DIRECTIONS", {BACK: True})


@pytest.fixture(scope="module")
def programs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_cases, "DIRECTIONS", {BACK: True})
        compiler = moe_cases.Compiler(2)
        moe_cases.plan(compiler, TOY, moe.DEFAULT)
    compiler.wait()
    return compiler


def test_arms_agree(programs, no_device_times, tmp_path, capsys):
    """In value and in every gradient."""
    del no_device_times
    records = moe.measure(TOY, programs, moe.arguments(["--quick"]), 1e12)
    assert [r["arm"] for r in records] == list(moe.DEFAULT)
    for record in records:
        assert record["right"]
        assert record["direction"] == BACK
        assert record["flops"] == 3 * 6 * 96 * 32 * 16
        some = {"x", "router"} if record["arm"] == "products" else set()
        assert set(record["errors"]) == {"y", "x", "router", "up", "down"} - some
        if record["arm"] in ("readme_old", "permutation", "ragged_dot"):  # they round elsewhere
            assert max(record["errors"].values()) > 0
        assert record["wall_ms"] > 0
        assert record["temporaries_gib"] >= 0
        assert record["tflops"] == pytest.approx(record["flops"] / 2e-6 / 1e12)
        assert record["of_C"] == pytest.approx(record["tflops"])
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"records": records}))
    assert moe.main(["--records", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"| toy, {BACK} | 0.00 (" in shown
    assert "wrong" not in shown


def test_the_reference_is_right(programs):
    """Against float64, written as its definition."""
    given = moe_cases.made(programs[TOY, "data"])
    got = moe_cases.made(programs[TOY, BACK, "composed"], *given)["y"]
    x, router, up, down = (oracle.f64(v) for v in given[:4])
    logits = x @ router
    assert all(len(set(row)) == TOY.experts for row in logits)  # no ties
    expert = np.argsort(-logits, axis=1)[:, : TOY.k]
    assert len(set(map(tuple, expert))) > 4  # routing is random
    chosen = np.exp(np.take_along_axis(logits, expert, 1))
    weight = chosen / chosen.sum(1, keepdims=True)
    want = np.zeros(got.shape)
    for t, j in np.ndindex(*expert.shape):
        gate, value = np.split(x[t] @ up[expert[t, j]], 2)
        want[t] += weight[t, j] * ((gate / (1 + np.exp(-gate)) * value) @ down[expert[t, j]])
    assert oracle.error(got, want) < 1e-2


@pytest.mark.weekly
def test_fp8_is_right_within_its_own_error(programs, no_device_times):
    del no_device_times
    compiler = moe_cases.Compiler(2)
    compiler.found |= programs.found
    args = moe.arguments(["--quick", "--arms", *moe.FP8])
    moe_cases.plan(compiler, TOY, args.arms)
    compiler.wait()
    for record in moe.measure(TOY, compiler, args, 1e12):
        assert record["right"]
        assert moe.TOLERANCE < max(record["errors"].values()) < moe.FP8_TOLERANCE


def test_a_wrong_arm_is_reported(programs, no_device_times, monkeypatch, capsys):
    """A wrong gradient, NaN, and an arm that raises; the others are timed."""
    del no_device_times

    def wrong_gradient(x, router, up, down, k):
        return moe_layers.composed(x, router, 2 * up - jax.lax.stop_gradient(up), down, k)

    def broken(x, router, up, down, k):
        raise RuntimeError("no such layer")

    compiler = moe_cases.Compiler(2)
    bad = {"ours": wrong_gradient, "readme_old": lambda x, *_, k: x * jnp.nan, "ragged_dot": broken}
    for name, layer in bad.items():
        monkeypatch.setitem(moe_layers.LAYERS, name, layer)
    given = {key: value for key, value in programs.found.items() if key[-1] not in bad}
    compiler.found |= given
    args = moe.arguments(["--quick", "--arms", *bad, "permutation"])
    moe_cases.plan(compiler, TOY, args.arms)
    compiler.wait()
    records = {r["arm"]: r for r in moe.measure(TOY, compiler, args, 1e12)}
    assert set(records) == {"ours", "readme_old", "permutation"}
    assert not records["ours"]["right"]
    assert records["ours"]["errors"]["up"] > 0.5
    assert records["ours"]["errors"]["down"] < moe.TOLERANCE
    assert not records["readme_old"]["right"]
    assert records["permutation"]["right"]
    output = capsys.readouterr()
    assert "no such layer" in output.err
    assert "WRONG" in output.out
    assert moe.text(list(records.values())).count("wrong") == 2


@pytest.mark.slow
def test_decode(no_device_times, monkeypatch):
    del no_device_times
    monkeypatch.setattr(moe, "DECODE_TOKENS", (3,))
    records = moe.decode(TOY, moe.arguments(["--quick", "--arms", "ours"]), 1e12, layers=2)
    assert [r["direction"] for r in records] == ["decode bfloat16", "decode nvfp4"]
    for record in records:
        assert record["right"]
        assert record["ms"]["median"] == pytest.approx(1e-3)  # of two layers
        assert record["of_B"] == pytest.approx(record["bytes"] / 1e6)
    dense, quantized = (r["bytes"] for r in records)
    assert 2 < dense / quantized < 4


def test_what_sonic_gives_back_is_as_ours_lies():
    up = np.arange(2 * 3 * 8.0).reshape(2, 3, 8)
    gate, value = np.split(up, 2, axis=-1)
    theirs = np.stack([gate, value], -1).reshape(2, 3, 8).swapaxes(1, 2)
    parts = {"up": theirs, "down": np.ones((2, 5, 4)), "router": np.ones((4, 3)), "y": 1}
    ours = moe_peers.from_sonic({n: jnp.asarray(v) for n, v in parts.items()})
    np.testing.assert_array_equal(ours["up"], up)
    assert ours["down"].shape == (2, 4, 5)
    assert ours["router"].shape == (3, 4)


def test_the_list():
    assert [s.flops(False) for s in moe.SHAPES[:2]] == [2473901162496, 463856467968]
    shapes, decoding = moe.selected(moe.arguments(["--shapes", "Qwen3", "decode"]))
    assert [s.name for s in shapes] == ["Qwen3-30B"]
    assert decoding
    assert moe.selected(moe.arguments([])) == (list(moe.SHAPES), True)
    (shape,), _ = moe.selected(moe.arguments(["--shapes", "V3", "--tokens", "64"]))
    assert (shape.name, shape.tokens, shape.experts) == ("DeepSeek-V3 T=64", 64, 256)
    assert [s.name for s in moe.SHAPES if moe_cases.unsupported("ragged_dot", s) is None] == [
        "Mixtral", "SonicMoE 7B n1024",
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        moe.main(["--shapes", "nothing"])


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    records = [
        {"shape": shape, "direction": direction, "arm": arm, "of_C": share, "right": True}
        for shape in ("a", "b")
        for direction in moe_cases.DIRECTIONS
        for arm, share in (("ours", 0.8), ("torch", 0.5))
    ]
    records[-1]["of_C"] = math.nan
    for folder in ("first", "second"):
        moe.draw(records, tmp_path / folder)
    first, second = ((tmp_path / f / "moe.svg").read_bytes() for f in ("first", "second"))
    assert first == second
    assert b"<svg" in first
