"""benchmarks.cpu: arms with quantized weights, values that are checked, and the plot."""

import importlib.util
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jax_groupgemm as jgg

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: an installed jax_groupgemm comes first

from benchmarks import cpu, cpu_peers, cpu_quantized, ggml, plots, records  # noqa: E402

SMALL = ["--shape", "2", "16", "64", "--repetitions", "1", "--flush", "1"]
FORMATS = cpu_quantized.FORMATS


def weight(name, shape=(2, 8, 64)):
    return cpu_peers.weight_of(name, FORMATS[name], shape, np.random.default_rng(3))


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_a_weight(name):
    """Codes and scales that peers take are those of the array."""
    w = weight(name)
    np.testing.assert_array_equal(jgg.dequantize(w.q, jnp.float32), w.values)
    np.testing.assert_array_equal(cpu_peers.packed(w.codes, w.q.bits), w.q.weight)
    if w.symmetric:
        half = 1 << (w.q.bits - 1)
        wide = np.repeat(w.scales, w.q.group_size, axis=-1)
        np.testing.assert_array_equal((w.codes.astype(int) - half) * wide, w.values)
        np.testing.assert_array_equal(w.scales.astype(np.float16), w.scales)


def test_records(tmp_path, capsys):
    """A row for each case, of arms that are right; the record says where."""
    path = tmp_path / "out.json"
    options = ["--rows", "2", "6", "--formats", "affine4", "mxfp8", "--dtypes", "bfloat16"]
    options += ["--arms", "ours", "ours, no quantization", "--json", str(path)]
    found = cpu.main(["quantized", *SMALL, *options, "--machine", "idle"])
    ops = ["grouped_qmm", "grouped_qmm", "dx", "dx", "gather_qmm"]
    assert [row["op"] for row in found] == ops * 2
    assert [row["rows"] for row in found] == [2, 6, 2, 6, 2] * 2
    for row in found:
        assert row["ms"]["ours"] > 0
        assert ("ours, no quantization" in row["ms"]) == (row["op"] != "gather_qmm")
        assert max(row["errors"].values()) <= 1e-2
    (run,) = records.runs(path)
    assert run["records"] == json.loads(json.dumps(found))
    assert {"date", "commit", "jax", "cpu", "flags", "threads", "versions"} <= set(run)
    assert run["machine"] == "idle"
    assert len(records.merged([run])[0]["records"]) == len(found)
    assert capsys.readouterr().out.count("no ours, no quantization: gather_qmm") == 2


def test_peers_that_are_not_there(monkeypatch, capsys):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(cpu_peers.importlib, "import_module", missing)
    monkeypatch.setattr(ggml, "library", lambda: missing("xllamacpp"))
    options = [*SMALL, "--rows", "2", "4", "--ops", "grouped_qmm"]
    (few, more) = cpu_quantized.main(options)
    assert set(few["ms"]) == set(more["ms"]) == {"ours", "ours, no quantization"}
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no ")]
    assert len(lines) == len(cpu_peers.PEERS)  # one for each, not for each case
    assert "no MLX: grouped_qmm of float32 by affine4: mlx is not installed" in lines


def test_a_wrong_arm_is_not_timed(monkeypatch, capsys):
    wrong = cpu_peers.Arm(lambda: None, lambda: np.zeros((2, 16), np.float32))
    monkeypatch.setitem(cpu_quantized.ARMS, "MLX", (lambda case: wrong, False))
    options = [*SMALL, "--rows", "2", "--ops", "grouped_qmm", "--arms", "ours", "MLX"]
    (row,) = cpu_quantized.main(options)
    assert set(row["ms"]) == {"ours"}
    assert "MLX: grouped_qmm of float32 by affine4: WRONG, by 1.0e+00" in capsys.readouterr().out


def test_turns_and_budget():
    """Each repetition begins with another arm; one that is slow stops after three."""
    order = []
    arms = {
        name: cpu_peers.Arm(lambda name=name: order.append(name), lambda: None) for name in "ab"
    }
    flushes = []
    flush = lambda: flushes.append(len(order))
    times = cpu_quantized.times_of(arms, flush, 3, 1.0)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert flushes == [*range(6)]
    assert [len(of) for of in times.values()] == [3, 3]
    assert [len(of) for of in cpu_quantized.times_of(arms, flush, 9, 0).values()] == [3, 3]


@pytest.mark.parametrize(("kind", "name"), [("Q4_0", "affine4"), ("Q8_0", "affine8"),
                                            ("MXFP4", "mxfp4")])  # fmt: skip
def test_blocks_of_ggml(kind, name):
    """As the reader of GGUF files reads them."""
    w = weight(name)
    raw = ggml.blocks(kind, w.codes[0], w.scales[0])
    raw = raw.reshape(len(raw), -1)
    read = jgg.checkpoints.Blocks(kind, w.codes.shape[1:], lambda a, b: raw[a:b])
    q = jgg.checkpoints.linear({"w.weight": read}, "w", format="gguf")
    np.testing.assert_array_equal(jgg.dequantize(q, jnp.float32), w.values[0])


@pytest.mark.parametrize("name", ["ONNX Runtime", "ONNX Runtime, 8-bit x", "MLX"])
@pytest.mark.parametrize("op", cpu_quantized.OPS)
def test_peers(name, op, capsys):
    """Where they are installed, they are right."""
    for package in ("mlx",) if name == "MLX" else ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    options = [*SMALL, "--rows", "2", "--ops", op, "--arms", "ours", name]
    (row,) = cpu_quantized.main(options)
    assert (name in row["ms"]) == (op != "dx" or name == "MLX"), capsys.readouterr().out


def test_the_plot_does_not_change(tmp_path):
    pytest.importorskip("matplotlib")
    record = ROOT / "benchmarks/results/cpu/qmm/affine4.json"
    rows = records.rows([record])
    for name in ("first.svg", "second.svg"):
        plots.cpu(rows, tmp_path / name)
    first, second = (tmp_path / name for name in ("first.svg", "second.svg"))
    assert first.read_bytes() == second.read_bytes()
    assert "ONNX Runtime, 8-bit x" in first.read_text()
