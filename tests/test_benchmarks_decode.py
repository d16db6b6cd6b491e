"""benchmarks.decode without a GPU: its steps are those of examples/decoder, one by one."""

import contextlib
import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_groupgemm as jgg

for needed in ("flax", "tokenizers", "tqdm"):
    pytest.importorskip(needed)
ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: an installed jax_groupgemm comes first

from benchmarks import decode, decode_generate, decode_models, decode_steps, pauses  # noqa: E402
from examples.decoder.memory import Need  # noqa: E402

CONTEXT, BATCH = 12, 3
CASES = {case.name: case for case in decode_models.CASES}


def of_case(case, scanned, layers):
    args = SimpleNamespace(attention="xla", dtype="float32", scanned=scanned)
    return decode_models.Model(case, case.config(layers, tiny=True), args, BATCH * 16)


def compare(case, scanned, layers=2):
    """A step of a batch, and the steps of its sequences in a model whose layers are scanned."""
    made = of_case(case, scanned, layers)
    program = decode_steps.compiled(made.shapes, [BATCH], 16)[BATCH].result()
    model = made.made()
    need = made.announced(decode_steps.empty_cache(model, 16, BATCH), program)
    steps = decode_steps.Steps(model, program, BATCH, 16, CONTEXT)
    tokens, cache = np.asarray(steps.tokens), jax.tree.map(np.asarray, steps.cache)
    steps.run(1)
    alone = model if scanned else of_case(case, True, layers).made()
    step = jax.jit(lambda token, cache: alone(token, jnp.int32(CONTEXT), jnp.int32(1), cache))
    if not scanned:  # one stack of what were several
        cache = [jax.tree.map(lambda *a: np.concatenate(a), *cache)]
    stacked = [jax.tree.map(lambda *a: np.concatenate(a), *steps.cache)]
    for i, token in enumerate(tokens):
        x, after = step(token[None], jax.tree.map(lambda a, i=i: a[:, i : i + 1], cache))
        assert int(alone.logits(x[0]).argmax()) == int(steps.tokens[i])
        got = jax.tree.leaves(jax.tree.map(lambda a, i=i: a[:, i : i + 1], stacked))
        for a, b in zip(got, jax.tree.leaves(after), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    return model, need, steps


def test_a_step_of_a_batch_is_that_of_its_sequences():
    case = dataclasses.replace(CASES["Mixtral-8x7B affine4"], format=None, dense=None, head=None)
    model, need, steps = compare(case, scanned=True, layers=1)
    # What was announced is what there is, and all of it is read where all experts are met.
    bytes_ = decode_steps.bytes_of_step(model, BATCH, CONTEXT, met=8)
    assert bytes_["experts"] == need.experts
    embedding = model.embedding.get_value().nbytes
    assert bytes_["others"] == need.others - embedding + BATCH * 64 * 4
    assert bytes_["cache"] == BATCH * 2 * 2 * 16 * 4 * (CONTEXT + 1)
    assert need.cache == steps.cache_bytes == bytes_["cache"] / (CONTEXT + 1) * 16
    of = steps.step.memory_analysis()
    peak = of.argument_size_in_bytes + of.output_size_in_bytes + of.temp_size_in_bytes
    assert need.total == max(peak - of.alias_size_in_bytes, need.experts + need.others + need.layer)


@pytest.mark.weekly
@pytest.mark.parametrize("name", CASES)
def test_layers_that_follow_each_other_compute_what_scanned_ones_do(name):
    _, _, steps = compare(CASES[name], scanned=False)
    met, finite = steps.experts_met()
    assert finite
    assert 2 <= met <= 6


@pytest.mark.weekly
@pytest.mark.parametrize("name", CASES)
def test_the_command(name, tmp_path, capsys):
    path = tmp_path / "record.json"
    sizes = ["--batches", "2", "--context", "12", "--steps", "4", "--quick", "--json", str(path)]
    command = ["--tiny", "--models", *name.split(), *sizes]
    assert decode.main(command) == 0
    assert decode.main([*command, "--scanned", "--layers", "1", "--no-parts"]) == 0
    whole, part = json.loads(path.read_text())["records"]
    assert (whole["form"], part["form"]) == ("unrolled", "scanned")
    assert whole["bytes"]["experts"] > part["bytes"]["experts"]
    assert set(whole["parts_ms"]) == {"moe", "attention", "head"}
    assert "1 of 2 layers" in capsys.readouterr().out


@pytest.mark.weekly
def test_generating(capsys, monkeypatch):
    """What is drawn comes from the host, and the example's own programs run."""
    command = ["--tiny", "--models", "gpt-oss", "--generate", "20", "--context", "140"]
    command += ["--scanned"]
    assert decode.main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpt-oss-120b mxfp4: 2 layers, scanned\ncompiling\nneeds ")
    assert re.search(r"tokens/s, [0-9.,]+ after the first 17\n", out)
    assert "\nthe platform does not say how much was held\n" in out
    monkeypatch.setattr(decode_generate, "most_held", lambda: 10**9)
    assert decode.main(command) == 1
    assert "held 1.00 GB at most, " in capsys.readouterr().out


@pytest.mark.weekly
def test_generating_few_tokens(capsys):
    """Says nothing of those after the first 17."""
    command = ["--tiny", "--models", "gpt-oss", "--generate", "8", "--context", "20", "--scanned"]
    assert decode.main(command) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"\nfirst token after .* tokens/s of the prompt\), then [0-9.,]+ tokens/s\n", out
    )


def test_generating_nothing_is_refused(capsys):
    with pytest.raises(SystemExit):
        decode.main(["--tiny", "--generate", "0"])
    assert "error: argument --generate: 0 is not positive\n" in capsys.readouterr().err


def test_memory_is_near_what_was_announced(capsys):
    need = Need(6e9, 2e9, 1e9, 3e9, False, temporaries=1e9)
    fits = [decode_generate.fits(need, most) for most in (None, 9.4e9, 9.6e9, 10.4e9, 10.6e9)]
    assert fits == [True, False, True, True, False]
    out = capsys.readouterr().out
    assert "held 9.60 GB at most, 0.960 of what was announced\n" in out
    assert out.count("that differs by more than 5%: what is announced is wrong\n") == 2


@pytest.mark.parametrize("format", ["nvfp4", "affine4", "mxfp4", "fp8"])
@pytest.mark.one_in(4)
def test_drawn_weights_have_the_variance_of_layers(format):
    q = decode_models.drawn(3, (2, 128, 256), format, "float32")
    w = np.asarray(jgg.dequantize(q, "float32"))
    assert w.shape == (2, 128, 256)
    assert 0.6 < w.std() * 16 < 1.6
    assert abs(w.mean()) * 16 < 0.1


def record(**values):
    r = {
        "model": "Qwen3-30B-A3B", "format": "fp8", "batch": 1, "dense": "fp8", "layers": 48,
        "of_layers": 48, "form": "unrolled", "attention": "xla", "steps": 256, "finite": True,
        "ms": {"wall": 2.0, "kernels": 1.5}, "tokens_per_s": 500.0, "experts_met": 8.0,
        "bytes": {"total": 4e9}, "memory": {"announced": 3e10, "peak": 3.03e10, "ratio": 1.01},
        "compiled_s": 20.0, "parts_ms": {"moe": 0.96, "attention": 0.48, "head": 0.1},
    }  # fmt: skip
    return r | values


def test_records_and_tables(tmp_path, capsys):
    some = [record(), record(batch=64), record(model="Mixtral-8x7B", format="affine4", layers=32)]
    decode.bounded(some, 4e12)
    assert [r["goal"] for r in some] == [0.40, 0.70, None]
    assert [r["published_vllm_h100_moe_us_a_layer"] for r in some] == [40.4, 237.0, None]
    assert some[0]["share"] == pytest.approx(0.5)
    path = tmp_path / "record.json"
    decode.save(path, {"B_tbytes": 4.0}, some)
    newer = record(ms={"wall": 4.0, "kernels": None})
    decode.bounded([newer], 4e12)
    decode.save(path, {"B_tbytes": 4.1}, [newer])  # in place of the same case's
    found = decode.load([path])
    assert [(r["batch"], r["B_tbytes"]) for r in found] == [(64, 4.0), (1, 4.0), (1, 4.1)]
    assert decode.main(["--records", str(path)]) == 0
    out = capsys.readouterr().out
    assert (
        "| Qwen3-30B-A3B fp8, 1 | 4.000 |  | 1.000 | 25% | 40% | 500 | 4.00 | 8.0 | 20.0 |" in out
    )
    assert "32 of 48 layers" in out


def test_the_list():
    args = decode.arguments(["--models", "Qwen3", "nvfp4", "--dense", "bfloat16"])
    assert [(c.name, c.dense) for c in decode.selected(args)] == [("Qwen3-30B-A3B nvfp4", None)]
    sizes = {}
    for case in (decode_models.CASES[0], *decode_models.CASES[3:]):
        said = decode_models.headers(case, case.config(), "bfloat16")
        sizes[case.name] = round(sum(header.nbytes for header in said.values()) / 1e9)
    assert sizes == {
        "Qwen3-30B-A3B nvfp4": 18, "gpt-oss-120b mxfp4": 65, "Mixtral-8x7B affine4": 26,
    }  # fmt: skip
    with pytest.raises(SystemExit, match="no such case"):
        decode.main(["--models", "nothing"])


def test_pauses():
    """Between the last end so far and the next start, whatever overlaps."""
    of = lambda start, end, name: pauses.Activity(start, end, name)
    found = pauses.pauses([
        of(0, 10_000, "a"), of(5_000, 8_000, "b"), of(30_000, 40_000, "d"),
        of(12_000, 20_000, "c"), of(40_000, 41_000, "e"),
    ])  # fmt: skip
    assert found == [
        pauses.Pause(10_000, 2.0, "a", "c"),
        pauses.Pause(20_000, 10.0, "c", "d"),
    ]


def test_what_runs_on_is_no_pause():
    """A graph is longer than the time that is looked at, and a copy runs beside it."""
    recording = pauses.Recording(None)
    graphs = [pauses.Activity(0, 5000, "graph"), pauses.Activity(5002, 20_000, "graph")]
    copies = [pauses.Activity(i, i + 100, "copy") for i in (1500, 9000)]
    recording.activities = [*copies, *graphs]
    found = recording.between(1000, 10_000)
    assert pauses.pauses(found) == [pauses.Pause(5000, 0.002, "graph", "graph")]
    assert recording.between(5000, 5002) == []


def test_pauses_are_said(monkeypatch):
    """Only whole calls after the first tokens count. Each pause has the token at which it was."""

    class Recording(pauses.Recording):
        clock = 0

        def now(self):
            self.clock += 1_000_000
            return self.clock

    recording = Recording(None)
    ends = [(i * 1_000_000 + 100_000, (i + 1) * 1_000_000) for i in range(16, 40)]
    recording.activities = [pauses.Activity(start, end, "graph") for start, end in ends]
    monkeypatch.setattr(pauses, "recorded", lambda: contextlib.nullcontext(recording))
    generator = lambda prompt, count: iter(range(count))
    generator.each = 4
    said = decode_generate.pauses_said(generator, [], 26).splitlines()
    assert said[0].startswith("8 tokens, 1.0 graphs, kernels and copies each, 1000.0 us each, of")
    assert "7 pauses of more than 20 us" in said[0]
    assert said[1] == "  100.00 us at token 18, graph before, graph after"


@pytest.mark.parametrize("options", [["--generate", "20"], []])
def test_pauses_need_tokens(options, capsys):
    with pytest.raises(SystemExit):
        decode.arguments(["--pauses", *options])
    assert "--pauses needs --generate 21 or more" in capsys.readouterr().err
