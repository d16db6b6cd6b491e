"""GGUF files of other programs: transformers' logits of them, llama.cpp's tokens, chat templates.

The fixtures are made by tools/make_gguf_fixtures.py; nothing here needs torch or llama.cpp.
"""

import functools
import json
from pathlib import Path

import decoder_folders
import numpy as np
import pytest
from decoder_runs import CHUNK, Run, agree, example, refused
from gguf_writers import ARRAY, BOOL, F32, I32, STRING, U32, field, save

import jax_groupgemm as jgg

FIXTURES = Path(__file__).parent / "fixtures_gguf"
FILES = sorted(path.name for path in FIXTURES.glob("*.gguf"))


def logits(name):
    with np.load((FIXTURES / name).with_suffix(".npz")) as arrays:
        return arrays["prompt"], arrays["logits"]


def test_they_are_small():
    assert len(FILES) == 6
    assert sum(path.stat().st_size for path in FIXTURES.iterdir()) < 1e6


WEEKLY = ("llama-Q8_0.gguf", "qwen3-Q5_1.gguf")  # what others have, too


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.weekly] * (n in WEEKLY)) for n in FILES]
)
def test_logits(name):
    """Those of transformers. llama.cpp itself has quantized one of the files."""
    prompt, want = logits(name)
    run = Run(FIXTURES / name)
    agree(run(prompt, CHUNK), want)
    experts = "moe" in name
    assert any(run.about.moe_layers) == experts
    assert run.about.architecture == {
        "llama": "llama", "llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
        "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
    }[name.partition("-")[0]]  # fmt: skip
    block = run.model.stacks[0].layers
    weight = (block.mlp.up if experts else block.mlp.up.weight).get_value()
    assert isinstance(weight, jgg.Quantized) == ("F16" not in name)


def test_types_that_llama_cpp_mixes():
    """Some tensors have more bits, and Q5_0 those whose rows are no blocks of 256."""
    tensors = jgg.checkpoints.open(FIXTURES / "qwen3moe-Q4_K_M.gguf")
    kinds = {tensors.dtype(tensor) for tensor in tensors}
    assert kinds == {"float32", "Q4_K", "Q5_0", "Q6_K"}
    assert tensors.metadata["general.quantization_version"] == 2


def test_a_model_without_experts(generate, capsys):
    """A message in the file's chat template."""
    path = FIXTURES / "llama3-Q4_0.gguf"
    text = example("decoder.chat").written(path, " hello ")
    assert text == "[user] hello\n[assistant]"
    args = ["--tokens", "4", "--chunk", "16", "--dtype", "float32", "--prompt", " hello ", "--chat"]
    got = generate.main([str(path), *args])["tokens"]
    ids = generate.tokens.encode(generate.tokens.read(path, 257), text)
    assert got[0] == Run(path)(ids, CHUNK)[-1].argmax()
    out = capsys.readouterr().out
    assert "llama, 2 layers, in float32" in out
    assert "experts" not in out
    assert "\n hello \n\n" in out
    said = refused(generate, path, "--quantize", "nvfp4")
    assert said == "--quantize is for experts, and it has none"
    with pytest.raises(generate.Refused, match="llama has no experts, and adapters are for models"):
        example("decoder.adapters").check(generate.config.read(path), ["attention"])
    said = refused(generate, path, "--memory", "0.00001")
    assert said.endswith("has free; use fewer --tokens, or a quantized checkpoint")


# Tokens.


@functools.cache
def llama_cpp():
    return json.loads((FIXTURES / "tokens.json").read_text())


def with_tokens(path, kind, pre, *more):
    said = llama_cpp()[kind]
    fields = [
        field("tokenizer.ggml.model", STRING, kind),
        field("tokenizer.ggml.tokens", ARRAY, (STRING, said["tokens"])),
        field("tokenizer.ggml.token_type", ARRAY, (I32, said["types"])),
    ]
    if kind == "llama":
        fields += [field("tokenizer.ggml.scores", ARRAY, (F32, said["scores"])),
                   field("tokenizer.ggml.unknown_token_id", U32, 0)]  # fmt: skip
    else:
        fields += [field("tokenizer.ggml.merges", ARRAY, (STRING, said["merges"])),
                   field("tokenizer.ggml.pre", STRING, pre)]  # fmt: skip
    return jgg.checkpoints.open(save(path, {}, [*fields, *more])).metadata


@pytest.mark.parametrize("pre", [*llama_cpp()["ids"]])
def test_tokens_of_llama_cpp(pre, tmp_path):
    kind, said = "llama" if pre == "llama" else "gpt2", llama_cpp()
    tokenizer = example("decoder.gguf_tokens").read(with_tokens(tmp_path / "t.gguf", kind, pre))
    names = said[kind]["tokens"]
    for text, ids in zip(said["texts"], said["ids"][pre], strict=True):
        got = tokenizer.encode(text).ids
        assert [names[i] for i in got] == [names[i] for i in ids], text
        if not set(text) & set("<>"):
            assert tokenizer.decode(got) == text


def test_every_split_has_tokens():
    assert {*example("decoder.gguf_tokens").SPLITS, "llama"} == {*llama_cpp()["ids"]}


# Folders without experts.

FOLDERS = {
    "llama-Q8_0.gguf": {"model_type": "llama", "head_dim": 16, "tie_word_embeddings": False},
    "llama3-Q4_0.gguf": {
        "model_type": "llama", "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "qwen2-F16.gguf": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3-Q5_1.gguf": {"model_type": "qwen3", "head_dim": 16, "attention_bias": False},
}  # fmt: skip


OF_FOLDERS = {
    "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_configs_without_experts(name, tmp_path):
    """As transformers writes them."""
    config = example("decoder.config")
    (tmp_path / "config.json").write_text(json.dumps(OF_FOLDERS | FOLDERS[name]))
    got, want = (config.read(path) for path in (FIXTURES / name, tmp_path))
    np.testing.assert_allclose(got.rope.angles, want.rope.angles, rtol=1e-6)
    same = {"norm_epsilon": 0, "quantization": {}, "rope": want.rope, "dtype": "float32"}
    replace = config.dataclasses.replace
    assert replace(got, **same) == replace(want, **same)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.weekly] * ("F16" not in n)) for n in FOLDERS]
)
def test_folders_without_experts(name, tmp_path):
    """Folders of Hugging Face that have the values of the codes."""
    about = example("decoder.config").read(FIXTURES / name)
    file, values = example("decoder.gguf").Renamed(FIXTURES / name, about), {}
    for key in file:
        value = file[key]
        if isinstance(value, jgg.checkpoints.Blocks):
            prefix = key.removesuffix(".weight")
            value = jgg.checkpoints.linear(dict(file), prefix, format="gguf")
            value = np.asarray(jgg.dequantize(value, np.float32))
        values[key] = value
    folder = decoder_folders.write(tmp_path / "model", values, OF_FOLDERS | FOLDERS[name])
    prompt, want = logits(name)
    agree(Run(folder)(prompt, CHUNK), want)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mlp_bias": True}, "config.json: mlp_bias is true, which is not known here"),
        ({"use_sliding_window": True}, "config.json: use_sliding_window is true, which no released "
         "Qwen model has"),
        ({"intermediate_size": None}, "config.json has no intermediate_size"),
    ],
)  # fmt: skip
def test_folders_that_are_refused(generate, folder, values, said):
    decoder_folders.change(folder, **({"model_type": "llama"} | values))
    assert refused(generate, folder) == said


# Chat templates.

PLAIN = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m.content }}{% endfor %}<bot>"


def in_folder(folder, template, **more):
    said = {"bos_token": {"content": "<s>"}, "chat_template": template} | more
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def test_templates_of_a_folder(folder):
    chat = example("decoder.chat")
    assert chat.written(in_folder(folder, PLAIN), "hi <b>") == "<s><user>hi <b><bot>"
    several = [{"name": "other", "template": "x"}, {"name": "default", "template": PLAIN}]
    assert chat.written(in_folder(folder, several), "hi") == "<s><user>hi<bot>"
    template = (
        "{%- for m in messages %}\n    {% generation %}\n{{ m | tojson }}{% endgeneration %}\n"
        "{%- if loop.first %}{% break %}{% endif %}{%- endfor %}\n"
        "{{ strftime_now('%Y') | length }}{% if not tools %}!{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)  # it goes before the other
    assert chat.written(folder, "é") == '{"role": "user", "content": "é"}4!'


HOSTILE = {
    "{{ messages.__class__.__mro__ }}": "access to attribute '__class__' of 'list' object is "
    "unsafe.",
    "{% for a in range(10**6) %}x{% endfor %}": "Range too big. The sandbox blocks ranges larger "
    "than MAX_RANGE (100000).",
    "{{ 'a' * 10**10 }}": "takes more than 1024 MiB",
    "{% for a in range(9**5) %}{{ 'a' * 999 }}{% endfor %}": "writes more than 1048576 characters",
    "{% if %}": "Expected an expression, got 'end of statement block'",
    "{{ raise_exception('no\nsystem') }}": "no system",
    "{{ messages.append(1) }}": "access to attribute 'append' of 'list' object is unsafe.",
    "{% include 'x' %}": "no loader for this environment specified",
}  # fmt: skip


@pytest.mark.parametrize("template", HOSTILE)
@pytest.mark.one_in(2)
def test_hostile_templates(generate, folder, template):
    said = refused(generate, in_folder(folder, template), "--chat")
    assert said == f"the chat template: {HOSTILE[template]}"


@pytest.mark.weekly
def test_a_template_that_does_not_end(generate, folder):
    loops = "".join(f"{{% for {a} in range(99999) %}}" for a in "abcd") + "{% endfor %}" * 4
    said = refused(generate, in_folder(folder, loops), "--chat")
    assert said == "the chat template takes more than 10 s, or too much memory"


def test_folders_without_a_template(generate, folder):
    assert refused(generate, folder, "--chat") == "there is no chat template: leave --chat out"
    said = "the chat template is no text of at most 1048576 characters"
    for other in (5, "x" * (2**20 + 1)):
        assert refused(generate, in_folder(folder, other), "--chat") == said


# Metadata.


def test_ends_and_the_first_token(tmp_path):
    gguf, tokens = example("decoder.gguf"), example("decoder.gguf_tokens")

    def of(names, *more):
        fields = [field("tokenizer.ggml.tokens", ARRAY, (STRING, names)), *more]
        return jgg.checkpoints.open(save(tmp_path / "m.gguf", {}, fields)).metadata

    ends = lambda *args: gguf._ends(gguf._Said(of(*args)))
    eos = field("tokenizer.ggml.eos_token_id", U32, 1)
    assert ends(["a", "b"], eos) == [1]
    assert ends(["<|im_end|>", "b", "<|end|>"], eos) == [0, 1, 2]
    assert ends(["<|return|>", "<|end|>", "<|call|>"]) == [0, 2]  # of gpt-oss
    bos = field("tokenizer.ggml.bos_token_id", U32, 1)
    for kind, pre, want in (("gpt2", "llama-bpe", 1), ("gpt2", "qwen2", None), ("llama", "", 1)):
        fields = [bos, field("tokenizer.ggml.model", STRING, kind),
                  field("tokenizer.ggml.pre", STRING, pre)]  # fmt: skip
        assert tokens.begin(of(["a"], *fields)) == want
        no = field("tokenizer.ggml.add_bos_token", BOOL, 0)
        assert tokens.begin(of(["a"], *fields, no)) is None
