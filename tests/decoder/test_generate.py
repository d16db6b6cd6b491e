"""examples/generate.py: what it prints, and how it samples."""

import json
import re

import decoder_folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_runs import CHUNK, NAMES, Run, example, generator


def test_without_arguments_it_makes_a_model_and_generates(generate, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    results = generate.main(["--tokens", "8", "--chunk", "16"])
    assert len(results["tokens"]) == 8
    out = capsys.readouterr().out
    assert re.match(
        r"made runs/generate, a model of random weights\n"
        r"qwen3_moe, 2 layers of 8 experts, in float32 on cpu\n"
        r"weights are random: the text means nothing\n"
        r"compiling\n"
        r"needs 1\.\d\d MB of \S+ [GT]B: 956 kB of weights.* \S+ kB of cache and \S+ kB of "
        r"temporaries; experts are in float32\ncompiled in \S+ s, loaded in \S+ s\n\n",
        out,
    )
    assert generate.PROMPT + results["text"] in out
    assert re.search(r"first token after \S+ s \(.* tokens/s of the prompt\), then .* tok", out)
    # The same model, in steps of another size.
    run, want = Run(tmp_path / "runs" / "generate"), []
    last = run(generate.tokens.encode(generate.tiny.tokenizer(), generate.PROMPT), CHUNK)[-1]
    for _ in range(4):
        want.append(int(last.argmax()))
        last = run(want[-1:], CHUNK)[-1]
    assert results["tokens"][:4] == want


FIXTURES = sorted(path.name for path in decoder_folders.FIXTURES.iterdir())


WEEKLY = NAMES[6:]  # how they are different is in their logits


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.weekly] * (n in WEEKLY)) for n in FIXTURES]
)
def test_every_fixture_goes_on_from_a_prompt(name, generate, capsys):
    folder = decoder_folders.FIXTURES / name
    options = ("--prompt", "Grüße: ", "--tokens", "12", "--chunk", "16", "--dtype", "float32")
    results = generate.main([str(folder), *options])
    tokenizer = generate.tiny.tokenizer()
    assert len(results["tokens"]) == 12
    assert results["text"] == tokenizer.decode(results["tokens"]) != ""
    out = capsys.readouterr().out
    assert f"\n\nGrüße: {results['text']}\n\nfirst token after" in out
    assert out.count("weights are random: the text means nothing\n") == 1
    form = "fp8" if name == "qwen3_moe_fp8" else "float32"
    assert f" of temporaries; experts are in {form}\n" in out
    prompt = generate.tokens.encode(tokenizer, "Grüße: ")
    assert results["tokens"][0] == Run(folder)(prompt, CHUNK)[-1].argmax()


def test_fixtures_are_what_their_script_makes(generate):
    assert {*NAMES} < {*FIXTURES}
    for name in FIXTURES:
        folder = decoder_folders.FIXTURES / name
        said = json.loads((folder / "tokenizer.json").read_text())
        assert said == json.loads(generate.tiny.tokenizer().to_str())
        assert len(said["model"]["vocab"]) == decoder_folders.config_of(name)["vocab_size"]
        assert generate.config.read(folder).random
        assert sum(path.stat().st_size for path in folder.iterdir()) < 1e6


def test_a_text_that_ends_at_once_has_no_times(generate, folder, capsys):
    """And one token has no rate."""
    options = [str(folder), "--prompt", "Hello", "--tokens", "1", "--chunk", "16"]
    (token,) = generate.main(options)["tokens"]
    first = r"\nfirst token after \S+ s \([0-9,]+ tokens/s of the prompt\)\n"
    assert re.search(first, capsys.readouterr().out)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    results = generate.main(options)
    assert results == {"text": "", "tokens": [], "first": None, "rate": None}
    assert capsys.readouterr().out.endswith(
        "\n\nHello\n\nthe text ends at once: the first token ends it\n"
    )


def test_what_was_held_stands_beside_what_was_announced(generate, tiny, monkeypatch, capsys):
    """Where the platform says it, as GPUs do."""
    for most, want in ((None, 0), (2_000_000, 1)):
        monkeypatch.setattr(generate.memory, "most_held", lambda most=most: most)
        generate.main([str(tiny), "--tokens", "2", "--chunk", "16"])
        found = re.findall(r"\nheld 2\.00 MB at most, (1\.\d{3}) of what", capsys.readouterr().out)
        assert len(found) == want


def test_weights_that_are_not_random_are_not_called_so(generate, folder, capsys):
    decoder_folders.change(folder, random_weights=None)
    generate.main([str(folder), "--tokens", "1", "--chunk", "16"])
    out = capsys.readouterr().out
    assert "needs" in out
    assert "random" not in out


@pytest.fixture(scope="module")
def generated(generate, tiny):
    """Samples after nine tokens, of a model that has room for 32."""
    model = Run(tiny).model
    run = generator(model, 32, 8, each=1, temperature=2.0, top_k=50)
    return lambda count, **kwargs: [*run(range(1, 10), count, **kwargs)]


def test_it_ends_at_the_end_of_a_text(generated):
    tokens = generated(12)
    end = tokens[5]
    assert generated(12, ends=(end, 1000)) == tokens[: tokens.index(end)]


def test_tokens_of_a_call(generated, tiny):
    """As a GPU makes them, several in a call: the same, whatever ends them."""
    run = generator(Run(tiny).model, 32, 8, each=4, temperature=2.0, top_k=50)
    want = generated(23)
    for count in (1, 2, 5, 8, 23):  # the last call's steps go behind the room for 32
        assert [*run(range(1, 10), count)] == want[:count]
    end = want[6]
    assert [*run(range(1, 10), 23, ends=(end,))] == want[: want.index(end)]


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_calls_are_made_ahead(generated, tiny, ahead):
    """So many before the first token is given, one more for each whose tokens are used, and no more
    than the text needs."""
    run = generator(Run(tiny).model, 32, 8, each=4, temperature=2.0, top_k=50)
    calls, write = [], run.write
    run.ahead, run.write = ahead, lambda *args: calls.append(0) or write(*args)
    made = [(token, len(calls)) for token in run(range(1, 10), 23)]
    of_token = [min(ahead + (i + 3) // 4, 6) for i in range(23)]
    assert made == list(zip(generated(23), of_token, strict=True))


@pytest.mark.parametrize(("count", "rate"), [(1, None), (2, 400.0), (5, 400.0), (6, 400.0)])
def test_rate_is_of_whole_calls(generate, monkeypatch, count, rate):
    """Four tokens come of a call of 10 ms, however many of them are wanted."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def stream():
        for i in range(count):
            clock[0] = 1.0 + 0.01 * (-(-i // 4))
            yield i

    watch = generate.Watch(each=4)
    assert [*watch(stream())] == [*range(count)]
    assert (watch.first, watch.rate) == (1.0, rate and pytest.approx(rate))


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


def test_what_is_no_letter_is_printed_at_the_end(generate):
    tokenizer = generate.tiny.tokenizer()
    ids = generate.tokens.encode(tokenizer, "好好")
    assert [*generate.tokens.streamed(tokenizer, ids[:-1])] == ["好", "\ufffd"]
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(0, 256, 20).tolist()
        assert "".join(generate.tokens.streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("token", [5, None, {"content": 5}])
def test_a_beginning_that_is_no_text(token, generate, tmp_path):
    said = {"add_bos_token": True, "bos_token": token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    assert generate.tokens.begin(tmp_path, generate.tiny.tokenizer()) is None


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
    assert example("decoder.experts").formats(quantized.model) == mode
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
    generated = generator(run.model, 32, 8)(want["prompt"], 12)
    assert [*generated] == want["tokens"][:12].tolist()


@pytest.mark.weekly
@pytest.mark.parametrize(("name", "devices"), [("mixtral", 2), ("gpt_oss", 1)])
def test_layers_that_are_not_scanned_give_the_same(name, devices, generate):
    want = decoder_folders.logits(name)
    run = Run(decoder_folders.FIXTURES / name, devices=devices, unrolled=True)
    generated = generator(run.model, 32, 8)(want["prompt"], 12)
    assert [*generated] == want["tokens"][:12].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_older_configs_say_the_same(name, generate, tmp_path):
    """Those of released models: transformers renamed some keys since."""
    folder = decoder_folders.copied(name, tmp_path)
    new, values = generate.config.read(folder), decoder_folders.older_config_of(name)
    if values["rope_scaling"] is not None:
        values["rope_scaling"]["type"] = values["rope_scaling"].pop("rope_type")
    for key in ("layer_types", "head_dim"):  # what follows from others
        if name in ("gpt_oss", "mixtral") and (key, name) != ("head_dim", "gpt_oss"):
            values.pop(key, None)
    (folder / "config.json").write_text(json.dumps(values))
    assert generate.config.read(folder) == new
