"""examples/generate.py: what it prints, how it samples, and what it says of a broken folder."""

import dataclasses
import json
import re

import decoder_folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_decoder import CHUNK, NAMES, Run, example

import jax_groupgemm as jgg


@pytest.fixture(scope="module")
def generate():
    return example("generate")


@pytest.fixture(scope="module")
def tiny(generate, tmp_path_factory):
    return generate.tiny.write(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def folder(generate, tmp_path):
    """Mixtral's fixture with a tokenizer."""
    out = decoder_folders.copied("mixtral", tmp_path)
    generate.tiny.tokenizer().save(str(out / "tokenizer.json"))
    return out


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# ---- what it does


def test_without_arguments_it_makes_a_model_and_generates(generate, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    results = generate.main(["--tokens", "8", "--chunk", "16"])
    assert len(results["tokens"]) == 8
    out = capsys.readouterr().out
    assert out.startswith("qwen3_moe, 2 layers of 8 experts, in float32 on cpu: loaded in")
    assert generate.PROMPT + results["text"] in out
    assert re.search(r"first token after \S+ s \(.* tokens/s of the prompt\), then .* tok", out)
    # The same model, in steps of another size.
    run, want = Run(tmp_path / "runs" / "generate"), []
    last = run(generate.tokens.encode(generate.tiny.tokenizer(), generate.PROMPT), CHUNK)[-1]
    for _ in range(4):
        want.append(int(last.argmax()))
        last = run(want[-1:], CHUNK)[-1]
    assert results["tokens"][:4] == want


@pytest.fixture(scope="module")
def generated(generate, tiny):
    """Samples after nine tokens, of a model that has room for 32."""
    model = Run(tiny).model
    generator = generate.Generator(model, 32, generate.Sampling(temperature=2.0, top_k=50), 8)
    return lambda count, **kwargs: [*generator(range(1, 10), count, **kwargs)]


def test_it_ends_at_the_end_of_a_text(generated):
    tokens = generated(12)
    end = tokens[5]
    assert generated(12, ends=(end, 1000)) == tokens[: tokens.index(end)]


def test_a_seed_decides_and_there_is_room_for_so_many(generated):
    first = generated(20, seed=1)
    assert len(first) == 20
    assert generated(20, seed=1) == first
    assert generated(20, seed=2) != first
    with pytest.raises(ValueError, match=r"9 \+ 24 tokens are more than 32"):
        generated(24)


@pytest.mark.parametrize(
    ("settings", "possible"),
    [
        ({"temperature": 0.0}, {3}),
        ({"temperature": 1.0, "top_k": 2}, {3, 1}),
        ({"temperature": 1.0, "top_p": 0.5}, {3}),  # it alone has more
        ({"temperature": 1.0, "top_p": 0.9}, {3, 1}),
        ({"temperature": 5.0}, {0, 1, 2, 3}),
        ({"temperature": 0.1, "top_k": 3, "top_p": 1.0}, {3}),
    ],
)
def test_samples_are_of_the_tokens_that_options_leave(generate, settings, possible):
    logits = jnp.log(jnp.array([0.03, 0.3, 0.05, 0.62]))
    keys = jax.random.split(jax.random.key(0), 400)
    tokens = jax.vmap(lambda key: generate.Sampling(**settings)(logits, key))(keys)
    assert {*tokens.tolist()} == possible


def test_samples_have_the_probabilities_of_the_model(generate):
    probabilities = jnp.array([0.1, 0.2, 0.3, 0.4])
    keys = jax.random.split(jax.random.key(0), 4000)
    sample = generate.Sampling(temperature=1.0, top_p=0.999)
    tokens = jax.vmap(lambda key: sample(jnp.log(probabilities), key))(keys)
    found = np.bincount(tokens, minlength=4) / 4000
    np.testing.assert_allclose(found, probabilities, atol=0.03)


def test_a_letter_of_several_tokens_is_printed_once_it_is_whole(generate):
    tokenizer = generate.tiny.tokenizer()
    text = "Größe: 3 µm — 好"
    ids = generate.tokens.encode(tokenizer, text)
    assert len(ids) == len(text.encode())
    parts = [*generate.tokens.streamed(tokenizer, ids)]
    assert "".join(parts) == text
    assert len(parts) == len(text)


@pytest.mark.parametrize("begins", [True, False])
def test_a_text_begins_as_its_tokenizer_says(begins, generate, tmp_path):
    said = {"add_bos_token": begins, "bos_token": {"content": "B"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    tokenizer = generate.tiny.tokenizer()
    begin = generate.tokens.begin(tmp_path, tokenizer)
    tokens = generate.tokens.encode(tokenizer, "text", begin)
    assert tokenizer.decode(tokens) == ("Btext" if begins else "text")
    assert generate.tokens.encode(tokenizer, "Btext", begin) == tokenizer.encode("Btext").ids


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["mxfp8", "nvfp4"])
def test_experts_are_quantized_while_they_are_loaded(mode, tiny):
    plain, quantized = Run(tiny), Run(tiny, quantize=mode)
    mlp = quantized.model.stacks[0].layers.mlp
    assert mlp.up.get_value().mode == mlp.down.get_value().mode == mode
    want, got = (run(np.arange(CHUNK), CHUNK) for run in (plain, quantized))
    error = np.abs(got - want).max() / np.abs(want).max()
    assert 0 < error < (0.5 if mode == "nvfp4" else 0.2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_devices_share_experts_and_heads(name, generate):
    want = decoder_folders.logits(name)
    run = Run(decoder_folders.FIXTURES / name, devices=2)
    block = run.model.stacks[0].layers
    assert block.mlp.up.get_value().sharding.spec[:2] == (None, "devices")
    assert "devices" in block.attention.query.weight.get_value().sharding.spec
    generator = generate.Generator(run.model, 32, generate.Sampling(), 8)
    assert [*generator(want["prompt"], 12)] == want["tokens"][:12].tolist()


@pytest.mark.weekly
@pytest.mark.parametrize(("name", "devices"), [("mixtral", 2), ("gpt_oss", 1)])
def test_layers_that_are_not_scanned_give_the_same(name, devices, generate):
    want = decoder_folders.logits(name)
    run = Run(decoder_folders.FIXTURES / name, devices=devices, unrolled=True)
    generator = generate.Generator(run.model, 32, generate.Sampling(), 8)
    assert [*generator(want["prompt"], 12)] == want["tokens"][:12].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_older_configs_say_the_same(name, generate, tmp_path):
    """Those of released models: transformers renamed some keys since."""
    folder = decoder_folders.copied(name, tmp_path)
    new, values = generate.config.read(folder), decoder_folders.config_of(name)
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": values.pop("dtype")}
    kind = rope.pop("rope_type")
    values["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
    if name in ("qwen2_moe", "qwen3_moe", "olmoe") and "num_local_experts" in values:
        values["num_experts"] = values.pop("num_local_experts")
    for key in ("layer_types", "head_dim"):  # what follows from others
        if name in ("gpt_oss", "mixtral") and (key, name) != ("head_dim", "gpt_oss"):
            values.pop(key, None)
    (folder / "config.json").write_text(json.dumps(values))
    assert generate.config.read(folder) == new


# ---- what it refuses


def refused(generate, folder, *args):
    with pytest.raises(SystemExit) as error:
        generate.main([str(folder), "--tokens", "4", "--chunk", "16", *args])
    text = str(error.value)
    assert text.startswith(f"{folder}: ")
    assert "\n" not in text
    return text.removeprefix(f"{folder}: ")


def test_a_folder_that_is_none(generate, tmp_path):
    assert refused(generate, tmp_path / "absent") == "there is no such folder"
    assert refused(generate, tmp_path).startswith("there is no config.json: a checkpoint is a Hug")


def test_a_missing_shard(generate, folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refused(generate, folder)
    (folder / "model.safetensors.index.json").unlink()
    assert re.fullmatch(
        r"there is no tensor model\.\S+: a shard is missing, or the model is another",
        refused(generate, folder),
    )


def test_a_truncated_shard(generate, folder):
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert path.name in refused(generate, folder)


def test_a_truncated_tokenizer(generate, folder):
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-100])
    assert refused(generate, folder).startswith("tokenizer.json is truncated, or no tokenizer: ")
    path.unlink()
    assert refused(generate, folder) == "there is no tokenizer.json"


def test_a_truncated_config(generate, folder):
    path = folder / "config.json"
    path.write_bytes(path.read_bytes()[:-100])
    assert refused(generate, folder).startswith("config.json cannot be read: ")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not one of mixtral, qwen2_moe, qwen3_moe, "
                                  "olmoe, gpt_oss, deepseek_v3"),
        ({"model_type": None}, "config.json has no model_type"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"hidden_size": "32"}, "hidden_size is '32', expected int"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"num_attention_heads": 3}, "3 heads are no multiple of 2 key-value heads"),
        ({"num_experts_per_tok": 5}, "5 experts for each token, of 4 experts"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic' is not one of"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' needs factor"),
        ({"vocab_size": 100}, "tokenizer.json has 256 tokens, but config.json says vocab_size 100"),
        ({"intermediate_size": 64}, r"w1.weight has shape (32, 32), but config.json says (64, 32)"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes' is not one of"),
        ({"num_hidden_layers": 3}, "there is no tensor model.layers.2."),
    ],
)  # fmt: skip
def test_a_config_of_another_model(generate, folder, values, said):
    change(folder, **values)
    assert said in refused(generate, folder)


def test_weights_in_act_order(generate, tmp_path):
    folder, _ = decoder_folders.quantized("qwen3_moe", "gptq", tmp_path)
    tensors = dict(jgg.checkpoints.open(folder))
    prefix = "model.layers.0.self_attn.q_proj"
    shape = tensors[f"{prefix}.qweight"].shape
    tensors[f"{prefix}.g_idx"] = np.arange(8 * shape[0], dtype=np.int32)[::-1] // 16
    decoder_folders.save(folder / "model.safetensors", tensors)
    generate.tiny.tokenizer().save(str(folder / "tokenizer.json"))
    assert prefix in refused(generate, folder)


def test_a_tensor_of_another_dtype(generate, tmp_path):
    tensors = decoder_folders.tensors_of("mixtral")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].astype(np.int8)
    config = decoder_folders.config_of("mixtral")
    folder = decoder_folders.write(tmp_path / "model", tensors, config)
    generate.tiny.tokenizer().save(str(folder / "tokenizer.json"))
    want = f"{name} is int8, but config.json does not say how it is quantized"
    assert refused(generate, folder) == want


def test_a_model_that_does_not_fit(generate, tmp_path, tiny):
    assert re.fullmatch(
        r"\S+ GB of experts, \S+ GB of other weights and \S+ GB of cache do not fit into the "
        r"\S+ GB that the device has free; experts would fit with --quantize mxfp4 \(0\.00 GB\).*",
        refused(generate, tiny, "--memory", "0.0004"),
    )
    text = refused(generate, tiny, "--memory", "0.00001")
    assert "no format of experts makes them fit: use more --devices, or fewer --tokens" in text
    text = refused(generate, tiny, "--devices", "3")
    assert text == "8 experts cannot be divided among 3 devices"


def test_what_a_checkpoint_needs_is_counted(generate, tiny):
    about = generate.config.read(tiny)
    loading = generate.loading
    options = loading.Options("bfloat16", tokens=100)
    said = loading.headers(tiny, jgg.checkpoints.open(tiny))
    need = loading.Need.of(about, said, options)
    numbers = 2 * 8 * 3 * 64 * 64
    assert need.experts == 2 * numbers
    assert need.cache == 2 * 2 * 2 * 16 * 100 * 2
    quantized = loading.Need.of(about, said, dataclasses.replace(options, quantize="nvfp4"))
    assert quantized.experts == numbers * 4.5 / 8
    assert quantized.others == need.others
