"""The file of random weights that python -m benchmarks.cpu_generate makes."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from decoder_runs import Run

import jax_groupgemm as jgg

sys.path.append(str(Path(__file__).parents[1]))  # last: an installed jax_groupgemm comes first

from benchmarks import cpu_generate


@pytest.mark.parametrize("kind", cpu_generate.BLOCKS)
def test_blocks(rng, kind):
    """Around zero, with the spread of a layer's weights."""
    raw = cpu_generate.blocks(rng, kind, 64, 1024)
    blocks = jgg.checkpoints.Blocks(kind, (64, 1024), lambda a, b: raw[a:b])
    w = jgg.dequantize(
        jgg.checkpoints.linear({"w.weight": blocks}, "w", format="gguf"), jnp.float32
    )
    w = np.asarray(w) * 32
    assert abs(w.mean()) < 0.05
    assert 0.8 < w.std() < 1.2


def test_a_file(tmp_path, monkeypatch):
    """generate.py reads it: sizes that are smaller, and the same code."""
    pytest.importorskip("gguf")
    small = {"WIDTH": 256, "HEADS": 4, "EXPERTS": 4, "CHOSEN": 2, "HIDDEN": 256, "VOCABULARY": 300}
    for name, value in small.items():
        monkeypatch.setattr(cpu_generate, name, value)
    cpu_generate.make(tmp_path / "m.gguf", 2)
    run = Run(tmp_path / "m.gguf")
    assert run.about.architecture == "olmoe"
    assert [*run.about.moe_layers] == [True, True]
    down = [stack.layers.mlp.down.get_value() for stack in run.model.stacks]
    assert [q.bits for q in down] == [4, 6]  # as Q4_K_M mixes them


def test_arms_take_turns(tmp_path, monkeypatch, capsys):
    calls = []

    def run(arm, args):
        calls.append(arm)
        return {"prompt": 10.0 * len(calls), "decode": 2.0, "peak_bytes": 3e9}

    monkeypatch.setattr(cpu_generate, "in_a_process", run)
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(10))
    options = ["--file", str(path), "--json", str(tmp_path / "out.json"), "--repetitions", "2"]
    rows = cpu_generate.main(options)
    assert calls == [*cpu_generate.ARMS] * 2
    assert [row["prompt"] for row in rows] == [25.0, 35.0, 45.0]
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["records"] == rows
    assert (record["file"], record["bytes"], record["threads"]) == ("m.gguf", 10, 2)
    assert "llama.cpp" in capsys.readouterr().out
