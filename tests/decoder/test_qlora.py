"""examples/qlora_moe.py with a checkpoint: what it trains, how it resumes, and PEFT's files."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import decoder_folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_runs import CHUNK, NAMES, Run, agree, example
from test_other_libraries import demanded, need

import jax_groupgemm as jgg

PEFT = Path(decoder_folders.__file__).with_name("peft_logits.py")
RANK, ALPHA = 2, 6.0
WITH_PEFT = NAMES[:6]
TINY = [
    *("--steps", "8", "--eval-every", "4", "--batch", "2", "--context", "16", "--lr", "3e-2"),
    *("--rank", str(RANK), "--alpha", str(ALPHA)),
]
TOKENS = np.arange(2 * (CHUNK + 1), dtype=np.int32).reshape(2, -1) * 7 % 100


@pytest.fixture(scope="module")
def qlora():
    for name in ("matplotlib", "optax", "orbax.checkpoint"):
        pytest.importorskip(name)
    return example("qlora_moe")


def with_tokenizer(folder):
    example("decoder.tiny").tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(100)))
    return ["--text", str(path)]


@pytest.fixture(scope="module")
def tuned(qlora, tiny, text, tmp_path_factory):
    """The folder and the results of one uninterrupted run, and what it last evaluated."""
    out, calls = tmp_path_factory.mktemp("run"), []
    evaluate = qlora.qlora_checkpoint.evaluate
    with pytest.MonkeyPatch.context() as patch:
        keep = lambda *args: calls.append(args) or evaluate(*args)
        patch.setattr(qlora.qlora_checkpoint, "evaluate", keep)
        results = qlora.main([str(tiny), *text, *TINY, "--out", str(out)])
    return out, results, calls[-1]


@pytest.fixture(scope="module")
def again(qlora, tuned, tiny):
    """Graph, adapters and frozen weights of the folder with the adapters that the run wrote."""
    of = qlora.qlora_checkpoint
    with jax.numpy_dtype_promotion("standard"):
        options = of.loading.Options("float32", "nvfp4", joined=False)
        model = of.loading.load(tiny, of.config.read(tiny), options)
        of.peft.read(tuned[0] / "adapters", model)
    parts = of.nnx.split(model, of.adapters.Adapter, ...)
    return parts[0], *jax.device_put(parts[1:], jax.devices()[0])


def adapters_of(out):
    return jgg.checkpoints.open(out / "adapters" / "adapter_model.safetensors")


@pytest.mark.slow  # it compiles for all of them
def test_it_learns_and_writes_its_files(tuned):
    out, results, _ = tuned
    history = results["history"]
    assert len(history["training"]) == 8
    assert [step for step, _ in history["held_out"]] == [0, 4, 8]
    assert results["after"] < results["before"] - 0.3
    assert history["training"][-1] < history["training"][0] - 0.3
    assert (
        json.loads((out / "metrics.json").read_text())["history"]["training"]
        == (history["training"])
    )
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_it_resumes_as_if_never_interrupted(qlora, tiny, text, tuned, tmp_path, capsys):
    out, results, _ = tuned
    shutil.copytree(out / "checkpoints" / "4", tmp_path / "checkpoints" / "4")
    resumed = qlora.main([str(tiny), *text, *TINY, "--out", str(tmp_path), "--resume"])
    assert "\nweights are random: adapters over them mean nothing\n" in capsys.readouterr().out
    assert resumed["history"]["training"] == results["history"]["training"]
    assert [*map(tuple, resumed["history"]["held_out"])] == results["history"]["held_out"]
    got, want = adapters_of(tmp_path), adapters_of(out)
    assert sorted(got) == sorted(want)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def test_the_base_stays_as_it_was(tuned, again):
    _, _, trained, frozen, _ = tuned[2]
    got, want = map(jax.tree.leaves, (frozen, again[2]))
    assert len(got) == len(want)
    assert {leaf.dtype for leaf in got} >= {np.dtype(np.uint32)}
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    for leaf in jax.tree.leaves(trained):
        assert float(jnp.abs(leaf).max()) > 1e-3


def test_adapters_are_read_again(qlora, tuned, again):
    _, results, (_, settings, _, _, text) = tuned
    graph, trained, frozen = again
    with jax.numpy_dtype_promotion("standard"):
        got = qlora.qlora_checkpoint.evaluate(graph, settings, trained, frozen, text)
    assert float(got) == results["after"]


def test_adapters_have_the_names_and_shapes_of_peft(qlora, tiny, tuned):
    out = tuned[0]
    about, tensors = qlora.qlora_checkpoint.config.read(tiny), adapters_of(out)
    said = json.loads((out / "adapters" / "adapter_config.json").read_text())
    assert (said["peft_type"], said["r"], said["lora_alpha"]) == ("LORA", RANK, ALPHA)
    d, f, n = about.width, about.expert_width, about.heads * about.head_size
    k = about.kv_heads * about.head_size
    want = {}
    for layer in range(about.layers):
        prefix = f"base_model.model.model.layers.{layer}"
        shapes = {"q_proj": (n, d), "k_proj": (k, d), "v_proj": (k, d), "o_proj": (d, n)}
        shapes = {f"{prefix}.self_attn.{name}": shape for name, shape in shapes.items()}
        if about.moe_layers[layer]:
            for e in range(about.router.experts):
                expert = f"{prefix}.mlp.experts.{e}"
                shapes |= {f"{expert}.{name}": (f, d) for name in ("gate_proj", "up_proj")}
                shapes[f"{expert}.down_proj"] = (d, f)
        for name, (rows, columns) in shapes.items():
            assert name.endswith(tuple(f".{end}" for end in said["target_modules"]))
            want |= {f"{name}.lora_A.weight": (RANK, columns)}
            want |= {f"{name}.lora_B.weight": (rows, RANK)}
    assert {name: tensors[name].shape for name in tensors} == want
    # Others of the same last names have none.
    assert not "model.layers.0.mlp.gate_proj".endswith(tuple(said["target_modules"]))


def with_adapters(name, folder):
    """A fixture's model with random adapters, which are written to the folder."""
    adapters, rng = example("decoder.adapters"), np.random.default_rng(0)
    targets = [*adapters.TARGETS[name == "gpt_oss" :]]
    model = Run(decoder_folders.FIXTURES / name, joined=False).model
    sites = adapters.attach(model, targets, RANK, ALPHA / RANK)
    for site in sites:
        shape = site.pair.b.get_value().shape
        site.pair.b.set_value(jnp.asarray(rng.normal(0, 0.1, shape), jnp.float32))
    example("decoder.peft").write(folder, sites, RANK, ALPHA, name)
    return model


def run_with(name, folder):
    run = Run(decoder_folders.FIXTURES / name, joined=False)
    example("decoder.peft").read(folder, run.model)
    run.split()
    return run


@pytest.mark.weekly
@pytest.mark.parametrize("name", WITH_PEFT)
def test_peft_computes_the_same(name, tmp_path):
    """PEFT takes every tensor by its name. Over transformers 5 it makes others of experts'."""
    need("peft")
    newer = int(importlib.metadata.version("transformers").split(".")[0]) > 4
    if newer and "peft" in demanded():
        pytest.fail("needs transformers 4, whose experts are modules")
    if newer and name == "qwen2_moe":
        pytest.skip("PEFT 0.21 leaves its experts out over transformers 5")
    with_adapters(name, tmp_path / "adapters")
    folder = decoder_folders.copied(name, tmp_path).rename(tmp_path / "model")
    config = decoder_folders.older_config_of(name)
    (folder / "config.json").write_text(json.dumps(config))
    tokens = TOKENS[0, :CHUNK]
    np.save(tmp_path / "tokens.npy", tokens)
    subprocess.run([sys.executable, str(PEFT), str(tmp_path)], check=True)
    theirs = np.load(tmp_path / "theirs.npz")
    if not newer:
        assert sorted(adapters_of(tmp_path)) == theirs["names"].tolist()
    run = run_with(name, tmp_path / "adapters")
    agree(run(tokens, CHUNK), theirs["adapted"])
    assert np.abs(theirs["adapted"] - theirs["plain"]).max() > 0.1 * np.abs(theirs["plain"]).max()


@pytest.mark.weekly
@pytest.mark.parametrize("name", WITH_PEFT)
def test_adapters_are_what_they_add_to_weights(name, tmp_path):
    """Logits and losses are those of a folder whose weights have PEFT's products added."""
    model = with_adapters(name, tmp_path / "adapters")
    tensors = decoder_folders.tensors_of(name)
    of_adapters = adapters_of(tmp_path)
    changed = [*tensors]
    for key in of_adapters:
        if "lora_A" in key:
            a, b = of_adapters[key], of_adapters[key.replace("lora_A", "lora_B")]
            weight = key.removeprefix("base_model.model.").replace(".lora_A", "")
            tensors[weight] = tensors[weight].astype(np.float32) + ALPHA / RANK * b @ a
            changed.remove(weight)
    assert len(changed) < len(tensors)
    merged = decoder_folders.write(tmp_path / "merged", tensors, decoder_folders.config_of(name))
    run = run_with(name, tmp_path / "adapters")
    want = Run(merged)(TOKENS[0, :CHUNK], CHUNK)
    agree(run(TOKENS[0, :CHUNK], CHUNK), want, relative=2e-5)
    loss = example("decoder.training").cross_entropy
    want = -np.take_along_axis(np.asarray(jax.nn.log_softmax(want)), TOKENS[0, 1:, None], axis=1)
    with jax.numpy_dtype_promotion("standard"):
        got = jax.jit(lambda tokens: loss(model, tokens))(TOKENS)[0]
    np.testing.assert_allclose(got, want[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.weekly
@pytest.mark.parametrize("base", ["affine4", "fp8", "as_stored"])
def test_bases(base, qlora, tiny, text, tmp_path, capsys):
    results = qlora.main([str(tiny), *text, *TINY, "--out", str(tmp_path), "--base", base])
    assert results["after"] < results["before"] - 0.3
    mode = {"affine4": "affine", "as_stored": "float32"}.get(base, base)
    assert f"experts in {mode}: " in capsys.readouterr().out


@pytest.mark.weekly
@pytest.mark.parametrize("format", ["awq", "fp8", "modelopt"])
def test_quantized_folders_stay_as_stored(format, qlora, text, tmp_path, capsys):
    stored, _ = decoder_folders.quantized("qwen3_moe", format, tmp_path)
    arguments = [str(with_tokenizer(stored)), *text, *TINY, "--out", str(tmp_path / "out")]
    results = qlora.main([*arguments, "--targets", "attention"])
    assert results["after"] < results["before"] - 0.1
    assert "nvfp4" in capsys.readouterr().out or format != "modelopt"
    with pytest.raises(SystemExit, match="quantized already"):
        qlora.main([*arguments, "--base", "affine4"])


def test_generate_reads_what_it_wrote(tuned, tiny, monkeypatch):
    """Its programs are compiled for shapes of adapters, too, and once."""
    generate, peft = example("generate"), example("decoder.peft")
    generator = example("decoder.generation").Generator
    compiled, compile = [], generator._compile
    counted = lambda self, model: compiled.append(model) or compile(self, model)
    monkeypatch.setattr(generator, "_compile", counted)
    options = [str(tiny), "--prompt", "7 squared", "--tokens", "8", "--chunk", "16"]
    options += ["--quantize", "nvfp4"]
    got = generate.main([*options, "--adapters", str(tuned[0] / "adapters")])["tokens"]
    assert len(compiled) == 1
    assert got != generate.main(options)["tokens"]
    run = Run(tiny, quantize="nvfp4", joined=False)
    with jax.numpy_dtype_promotion("standard"):
        peft.read(tuned[0] / "adapters", run.model)
    run.split()
    prompt = generate.tokens.encode(generate.tiny.tokenizer(), "7 squared")
    assert got[0] == run(prompt, CHUNK)[-1].argmax()


# ---- what it refuses


def test_it_refuses_what_cannot_work(qlora, tiny, text, tuned, tmp_path, capsys):
    run = lambda *args: qlora.main([str(tiny), *text, *TINY, "--out", str(tmp_path / "x"), *args])
    for arguments, message in (
        (["--rank", "0"], "--rank: 0 is not positive"),
        (["--targets", "router"], "invalid choice: 'router'"),
        (["--base", "int3"], "invalid choice: 'int3'"),
        (["--run", "runs/train_moe"], "--run is for runs without a checkpoint"),
    ):
        with pytest.raises(SystemExit):
            run(*arguments)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        qlora.main(["--base", "fp8"])
    assert "--base is for runs with a checkpoint" in capsys.readouterr().err

    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfd")
    other = decoder_folders.copied("gpt_oss", tmp_path)
    (other / "tokenizer.json").unlink()
    for arguments, message in (
        (["--text", str(tmp_path / "short.txt")], "has 9 tokens.*at least 180 are needed"),
        (["--text", str(tmp_path / "absent")], "cannot be read: No such file"),
        (["--text", str(tmp_path / "bytes")], "is no text in UTF-8"),
        (["--resume"], "--resume: there is no checkpoint in"),
        (["--resume", "--out", str(tuned[0]), "--rank", "3"], "another run: rank was 2, is 3$"),
        (["--out", str(tuned[0])], "is not empty: pass --resume"),
        (
            ["--context", "4097"],
            "tiny: --context 4097 is more than config.json's max_position_embeddings, 4096$",
        ),
    ):
        with pytest.raises(SystemExit, match=message):
            run(*arguments)
    for place, message in (
        (tmp_path / "absent", "there is no such folder: huggingface_hub.*"),
        (other, "there is no tokenizer.json"),
    ):
        with pytest.raises(SystemExit, match=f"^{re.escape(str(place))}: {message}$"):
            qlora.main([str(place), *text, *TINY, "--out", str(tmp_path / "x")])
    with_tokenizer(other)
    with pytest.raises(SystemExit, match=r"one tensor.*use --targets attention$"):
        qlora.main([str(other), *text, *TINY, "--out", str(tmp_path / "x")])


def test_a_folder_may_follow_the_targets(qlora, monkeypatch):
    seen, both = [], ("experts", "attention")
    keep = lambda *args: seen.append((str(args[0]), args[3].targets))
    monkeypatch.setattr(qlora.qlora_checkpoint, "run", keep)
    for targets in ([], ["both"], ["experts"], ["attention"]):
        qlora.main([*(["--targets", *targets] if targets else []), "folder"])
    wanted = both, both, ("experts",), ("attention",)
    assert seen == [("folder", targets) for targets in wanted]


def test_memory_that_runs_out(qlora, monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(qlora.qlora_checkpoint, "run", fails)
    text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."
    with pytest.raises(SystemExit) as error:
        qlora.main(["folder"])
    assert error.value.code == (
        "folder: the device ran out of memory, which others use too, or which is in pieces: use a "
        "smaller --batch, --context or --rank"
    )
    text = "INTERNAL: another error"
    with pytest.raises(jax.errors.JaxRuntimeError, match="another error"):
        qlora.main(["folder"])


def test_adapters_of_another_model_are_refused(tuned, tmp_path):
    generate = example("generate")
    model = decoder_folders.copied("mixtral", tmp_path)
    run = lambda adapters, *args: generate.main(
        [str(model), "--tokens", "1", "--adapters", str(adapters), *args]
    )
    with pytest.raises(SystemExit, match=r"--adapters: there is no \S+adapter_config.json$"):
        run(tmp_path)
    adapters = shutil.copytree(tuned[0] / "adapters", tmp_path / "adapters")
    with pytest.raises(SystemExit, match=r"belongs to no weight that has adapters|has shape"):
        run(adapters)
    with pytest.raises(SystemExit, match=r"--adapters are for one device$"):
        run(adapters, "--devices", "2")
    path = adapters / "adapter_config.json"
    said = json.loads(path.read_text())
    for change, message in (
        ({"use_dora": True}, "use_dora is True, which is not known here: merge the adapters"),
        ({"r": None}, "is not of LoRA adapters with a rank"),
        ({"lora_alpha": None}, "has no lora_alpha"),
    ):
        path.write_text(json.dumps(said | change))
        with pytest.raises(SystemExit, match=message):
            run(adapters)
    weights = adapters / "adapter_model.safetensors"
    weights.unlink()
    said = f"{model}: --adapters: there is no {weights}"
    with pytest.raises(SystemExit, match=f"^{re.escape(said)}$"):
        run(adapters)
