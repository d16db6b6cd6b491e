"""benchmarks.expert_parallel on CPU devices: its arms agree, and records and tables are made."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from meshes import needs

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: an installed jax_groupgemm comes first

from benchmarks import expert_parallel, timing  # noqa: E402
from benchmarks import expert_parallel_cases as cases  # noqa: E402

BACK = "forward+backward"


@pytest.fixture
def args(monkeypatch):
    """Small sizes on two devices, hot routing, gradients; no arm rests."""
    needs(2)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(expert_parallel, "DIRECTIONS", {BACK: True})
    args = expert_parallel.arguments(["--tiny", "--routings", "hot"])
    args.devices = [1, 2]
    return args


def test_layers_agree(args, capsys):
    records = expert_parallel.measure_layer(cases.TINY, args)
    assert [r["arm"] for r in records] == ["1", "2 gather", "2 all_to_all"]
    for r in records:
        assert r["right"]
        assert r["max_rows"] == 256
        assert r["ms"]["median"] >= r["ms"]["min"] > 0
        of_all = 1e3 * 16 * r["devices"] / r["ms"]["median"]
        assert r["tokens_per_s"] == pytest.approx(of_all)
    compared = [set(r["errors"]) for r in records[1:]]
    assert compared == [{"y", "x", "weight"}, {"y", "x", "weight", "up", "down"}]
    assert max(records[1]["errors"].values()) > 0  # partial sums are rounded
    case = f"| 16 a device, hot, {BACK} | "
    assert case in expert_parallel.text(records)
    assert "WRONG" not in capsys.readouterr().out


def test_what_is_wrong_is_said(args, monkeypatch, capsys):
    """A transport with too little room has NaN. The other one adds to a gradient."""
    real = cases.layer_call

    def broken(devices, transport, back, max_rows, precision):
        rows = 1 if transport == "all_to_all" else max_rows
        f = real(devices, transport, back, rows, precision)
        more = {"gather": 1}.get(transport, 0)
        return lambda *args: (out := f(*args)) | {"x": out["x"] + more}

    monkeypatch.setattr(expert_parallel, "layer_call", broken)
    records = expert_parallel.measure_layer(cases.TINY, args)
    assert [r["right"] for r in records] == [True, False, False]
    assert records[1]["errors"]["y"] < 0.01 < records[1]["errors"]["x"]
    assert all(np.isnan(e) for e in records[2]["errors"].values())
    assert capsys.readouterr().out.count("WRONG") == 2
    assert expert_parallel.text(records).count("wrong") == 2


@pytest.mark.weekly
def test_layers_in_fp8(args):
    args.precisions = ["fp8"]
    shape = dataclasses.replace(cases.TINY, width=128, hidden=128)
    records = expert_parallel.measure_layer(shape, args)
    assert [r["right"] for r in records] == [True] * 3
    assert expert_parallel.label(records[0]).endswith(", fp8")


@pytest.mark.slow
def test_decode(args, monkeypatch):
    """Experts in nvfp4 as tiles. Tokens that two devices do not divide do not travel."""
    found = []

    def packed(*given):
        found.extend(layers := cases.packed(*given))
        return layers

    monkeypatch.setattr(expert_parallel, "packed", packed)
    args.decode_tokens, args.layers = [4, 5], 1
    records = expert_parallel.measure_decode(cases.TINY, args)
    ways = ["1", "2 gather", "2 all_to_all", "2 all-reduce"]
    assert [(r["tokens"], r["arm"]) for r in records] == [
        *((4, way) for way in ways), (5, "1"), (5, "2 all-reduce"),
    ]  # fmt: skip
    assert all(r["right"] for r in records)
    assert {w.layout for layer in found for w in layer} == {"sm90"}
    assert "| T=5 of all |" in expert_parallel.text(records)


def test_collectives(args, monkeypatch, capsys):
    """Two of three, where the third fails."""

    def call(devices, name):
        if name != "all_to_all":
            return cases.collective_call(devices, name)
        return lambda a: a.no_such_method()

    monkeypatch.setattr(expert_parallel, "collective_call", call)
    records = expert_parallel.measure_collectives(1, args)
    assert [r["collective"] for r in records] == ["all_gather", "psum_scatter"]
    for r in records:
        assert r["right"]
        assert r["gbytes_s"] == pytest.approx(2**19 / r["ms"]["median"] / 1e6)  # half of a MiB
    assert args.failed == ["2 all_to_all"]
    assert "2 all_to_all failed" in capsys.readouterr().out


def test_tokens_of_a_device_do_not_depend_on_others():
    one, two = (cases.tokens(cases.TINY, 16, blocks, "even") for blocks in (1, 2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b[:16])
    index = np.asarray(two[1])
    assert all(len(set(row)) == cases.TINY.k for row in index)
    assert set(index.flat) == set(range(cases.TINY.experts))
    hot = np.asarray(cases.tokens(cases.TINY, 16, 2, "hot")[1])
    assert (hot == cases.HOT).mean() >= 0.5
    assert cases.fullest(hot, 8, 4) == 256
    assert cases.fullest(np.repeat(np.arange(8), 100), 8, 2) == 512


@pytest.mark.slow
@pytest.mark.weekly
def test_the_command(tmp_path, capsys):
    needs(4)
    path = tmp_path / "record.json"
    assert expert_parallel.main(["--tiny", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["devices"] == [1, 2, 4]
    assert len(record["records"]) == 2 * 2 * 5 + 2 * 3 + 7
    printed = capsys.readouterr().out
    assert expert_parallel.main(["--records", str(path), str(path)]) == 0
    assert printed.endswith(capsys.readouterr().out)


def test_what_cannot_run(monkeypatch):
    with pytest.raises(SystemExit, match="--devices 1000: there are"):
        expert_parallel.main(["--tiny", "--devices", "1000"])
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit, match="needs NVIDIA GPUs, and jax sees only"):
        expert_parallel.main([])
