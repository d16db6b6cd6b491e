"""benchmarks.train_devices: which programs it times, what it says of them, and one small run."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from meshes import needs

sys.path.append(str(Path(__file__).parents[1]))  # last: an installed jax_groupgemm comes first

from benchmarks import train_devices
from benchmarks.train_devices import QWEN


def record(gpu="NVIDIA H200"):
    """Weak scaling is perfect, and one GPU takes as long for each token."""
    experts = 3 * QWEN.layers * 128 * 2048 * 768
    records = [
        {
            "devices": n, "tokens": tokens, "ms": {"median": 40 * tokens / 8192},
            "tokens_per_s": n * 204800.0, "losses": [8.0, 7.5],
            "parameters": {"experts": experts, "others": 35_000_000},
        }
        for n, tokens in train_devices.cases([1, 2, 4], 8192)
    ]  # fmt: skip
    return {"gpu": gpu, "size": dataclasses.asdict(QWEN), "records": records}


def test_cases():
    """Weak, strong, and one device with the tokens of each."""
    assert train_devices.cases([1, 2, 4], 8) == [(1, 8), (2, 8), (4, 8), (1, 32), (2, 16), (1, 16)]
    assert train_devices.cases([1], 8) == [(1, 8)]


def test_table():
    text = train_devices.text_of(record())
    assert "| 1 | 32768 | 32768 | 160.0 | 204,800 |  |  |  |" in text
    assert "| 2 | 16384 | 32768 | 80.0 | 409,600 | 2.00x | 2.00x | " in text
    assert "| 4 | 8192 | 32768 | 40.0 | 819,200 | 4.00x | 4.00x | " in text
    assert text.count(" %)") == 3
    assert " %)" not in train_devices.text_of(record("cpu"))


def test_prediction():
    """What tokens travel for is added; the part of the optimizer that others do is not there."""
    of = record()
    by = {(r["devices"], r["tokens"]): r for r in of["records"]}
    two, four = (train_devices.predicted(by[n, 8192], by[1, 8192], of["size"]) - 40 for n in (2, 4))
    no_experts = {"experts": 0, "others": 0}
    layers = [
        train_devices.predicted(
            {**by[n, 8192], "parameters": no_experts}, by[1, 8192], of["size"]
        ) - 40
        for n in (2, 4)
    ]  # fmt: skip
    assert 0 < layers[0] < layers[1]
    assert two < layers[0]
    assert four < layers[1]


def test_losses_that_differ():
    records = record()["records"]
    assert train_devices.off(records) == []
    records[2]["losses"] = [8.0, 7.6]
    records[4]["losses"] = [8.0, float("nan")]
    assert [of[:2] for of in train_devices.off(records)] == [(4, 8192), (2, 16384)]


@pytest.mark.slow
@pytest.mark.weekly
def test_the_command(tmp_path, capsys):
    for name in ("flax", "matplotlib", "optax", "orbax.checkpoint", "tqdm"):
        pytest.importorskip(name)
    needs(2)
    path = tmp_path / "record.json"
    assert train_devices.main(["--tiny", "--devices", "2", "--json", str(path)]) == 0
    made = json.loads(path.read_text())
    assert [(r["devices"], r["tokens"]) for r in made["records"]] == [(1, 64), (2, 64), (1, 128)]
    printed = capsys.readouterr().out
    assert train_devices.main(["--records", str(path)]) == 0
    assert printed.endswith(capsys.readouterr().out)


def test_what_cannot_run(monkeypatch):
    with pytest.raises(SystemExit, match="--devices 1000: there are"):
        train_devices.main(["--tiny", "--devices", "1000"])
    monkeypatch.setattr(train_devices.jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit, match="needs NVIDIA GPUs, and jax sees only"):
        train_devices.main([])
