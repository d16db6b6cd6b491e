"""benchmarks.frameworks and benchmarks.train_step: what they run and say, and one small run."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # last: an installed jax_groupgemm comes first

from benchmarks import frameworks, train_step

ROOT = Path(__file__).parents[1]


def record(arm, ms, library="maxtext", **more):
    done = {"ms": ms, "times": [ms] * 2, "losses": [2.0, 1.5], "peak_gib": 10.0}
    return {"case": library, "model": "qwen3", "arm": arm} | (more or done)


def test_table():
    """A gain is that over lax.ragged_dot of the same model."""
    rows = [
        record("lax.ragged_dot", 100.0), record("moe_mlp", 20.0),
        record("moe_mlp", 20.0, "equinox"), record("dense", 0, failed="does not fit", why=""),
    ]  # fmt: skip
    text = frameworks.text_of(rows)
    assert "| MaxText, Qwen3-30B-A3B | moe_mlp | 20.0 | 5.00x | 10.0 | 1.5000 |" in text
    assert "| Equinox, Qwen3-30B-A3B | moe_mlp | 20.0 |  | 10.0 | 1.5000 |" in text
    assert "| MaxText, Qwen3-30B-A3B | dense | does not fit |  |  |  |" in text
    assert frameworks.line_of(rows[0]).startswith("maxtext qwen3 lax.ragged_dot: 100.00 ms, 10.0")
    assert frameworks.line_of(rows[3]) == "maxtext qwen3 dense: does not fit "


def test_the_guide_has_the_table_of_the_record():
    page = frameworks.PAGE.read_text()
    assert frameworks.written(page) == page


def test_settings():
    """Later settings count, once each."""
    words = frameworks.settings("qwen3", "moe_mlp", False, "cudnn_flash_jax")
    of = dict(word.split("=", 1) for word in words)
    assert len(of) == len(words)
    assert (of["per_device_batch_size"], of["sparse_matmul"], of["hardware"]) == (
        "2",
        "true",
        "gpu",
    )
    dense = frameworks.settings("mixtral", "dense", True, "dot_product")
    assert {"sparse_matmul=false", "hardware=cpu", "base_emb_dim=64", "decoder_block=mixtral"} < {
        *dense
    }


def test_outcomes():
    assert frameworks.outcome('x\nRESULT {"ms": 1}\n', "noise") == {"ms": 1}
    error = "Traceback\nValueError: this\n  File\njax.errors.JaxRuntimeError: that\nmore"
    found = frameworks.outcome("", error)
    assert found == {"failed": "error", "why": "jax.errors.JaxRuntimeError: that"}
    assert frameworks.outcome("", "killed")["why"] == "killed"


def test_kinds_of_kernels():
    kinds = {
        "void jgg::device::GemmSm90Kernel<x>": "our products",
        "nvjet_sm90_tst_128x160": "other products", "input_scatter_fusion": "sort, gather, scatter",
        "loop_add_fusion": "fusions", "memcpy128": "copies", "abc": "others",
    }  # fmt: skip
    assert {name: train_step.kind(name) for name in kinds} == kinds


def test_parts_of_a_step():
    """Two steps: 1 us of our kernel each, 2 us of nothing in all."""
    runs = [
        ("jgg", (0.0, 1e3)),
        ("jgg", (2e3, 3e3)),
        ("fusion", (4e3, 5e3)),
        ("fusion", (4e3, 5e3)),
    ]
    by_kind, longest = train_step.parts(runs, 2)
    assert by_kind == {"our products": 1.0, "fusions": 1.0, "nothing": 1.0}
    assert longest == [["jgg", 1.0, 1.0], ["fusion", 1.0, 1.0]]
    assert train_step.parts([], 2) == ({}, [])


def test_rates():
    size = {"layers": 1, "width": 1000, "expert_width": 1000, "top_k": 1}
    assert train_step.flops(size, 1000) == 18e9


@pytest.mark.slow
@pytest.mark.weekly
def test_train_step(tmp_path, capsys):
    for name in ("flax", "matplotlib", "optax", "orbax.checkpoint", "tqdm"):
        pytest.importorskip(name)
    path = tmp_path / "record.json"
    assert train_step.main(["--tiny", "--precisions", "bfloat16", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["records"][0]["tokens"] == 64
    printed = capsys.readouterr().out
    assert train_step.main(["--records", str(path)]) == 0
    assert printed.endswith(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.weekly
def test_frameworks(tmp_path, capsys, monkeypatch):
    """Each arm in a process: both learn, and as much."""
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    monkeypatch.chdir(ROOT)
    path = tmp_path / "record.json"
    arguments = ["--tiny", "--libraries", "flax_nnx", "--json", str(path)]
    assert frameworks.main(arguments) == 0
    made = json.loads(path.read_text())["records"]
    assert [r["arm"] for r in made] == [*frameworks.LAYERS]
    ends = [r["losses"][-1] for r in made]
    assert max(ends) < made[0]["losses"][0]
    assert max(ends) - min(ends) < 0.01
    printed = capsys.readouterr().out
    assert frameworks.main(["--records", str(path)]) == 0
    assert printed.endswith(capsys.readouterr().out)
