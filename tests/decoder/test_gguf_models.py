"""examples/generate.py with GGUF files: logits of the same weights in a folder, and tokenizers."""

import decoder_folders
import gguf_folders
import numpy as np
import pytest
from decoder_runs import CHUNK, Run, agree, example, refused
from gguf_writers import ARRAY, BOOL, F32, I32, STRING, U32, field, save

import jax_groupgemm as jgg

MODELS = tuple(gguf_folders.ARCHITECTURES)


def config_of(name):
    """Without what GGUF does not say: factors of positions, windows of Mixtral."""
    config = decoder_folders.config_of(name)
    if name == "qwen2_moe":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    return config


# Older files have a tensor for each expert; gpt-oss has none of those.
OLDER = [
    (name, older) for name in MODELS for older in (False, True) if name != "gpt_oss" or not older
]


@pytest.mark.parametrize(("name", "older"), OLDER)
def test_logits(name, older, tmp_path):
    """They are those of transformers. Weights are stored as they are."""
    config, want = config_of(name), decoder_folders.logits(name)
    path, folder = gguf_folders.convert(name, tmp_path, older=older, config=config)
    got = Run(path)(want["prompt"], CHUNK)
    if name != "qwen2_moe":
        agree(got, want["logits"])
    np.testing.assert_array_equal(got, Run(folder)(want["prompt"], CHUNK))


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_codes(name, tmp_path):
    prompt = decoder_folders.logits(name)["prompt"]
    path, folder = gguf_folders.convert(name, tmp_path, gguf_folders.q8_0, config=config_of(name))
    stored = Run(path)
    assert stored.model.stacks[0].layers.mlp.up.get_value().bits == 8
    agree(stored(prompt, CHUNK), Run(folder)(prompt, CHUNK))


@pytest.mark.parametrize("name", MODELS)
def test_config(name, tmp_path):
    config = config_of(name)
    path, folder = gguf_folders.convert(name, tmp_path, config=config)
    read = example("decoder.config").read
    got, want = read(path), read(folder)
    # float32 has no 1e-5; whether weights are random is said nowhere.
    assert np.float32(got.norm_epsilon) == np.float32(want.norm_epsilon)
    same = {"norm_epsilon": 0, "random": False, "quantization": {}, "dense_width": 0}
    replace = example("decoder.config").dataclasses.replace
    assert replace(got, **same) == replace(want, **same)


def test_it_generates(generate, tmp_path, capsys):
    path, folder = gguf_folders.convert("olmoe", tmp_path, gguf_folders.q8_0)
    source = decoder_folders.FIXTURES / "olmoe" / "tokenizer.json"
    (folder / "tokenizer.json").write_text(source.read_text())
    args = ["--tokens", "6", "--chunk", "16", "--prompt", "A mixture"]
    got, want = (generate.main([str(p), *args, "--dtype", "float32"]) for p in (path, folder))
    assert got["tokens"] == want["tokens"]
    assert got["text"] == want["text"]
    assert "A mixture" in capsys.readouterr().out


# Tokenizers.


def metadata_of(tmp_path, *values):
    return jgg.checkpoints.open(save(tmp_path / "t.gguf", {}, list(values))).metadata


def test_byte_pairs(tmp_path):
    """The tokens of tokenizer.json, which has the same vocabulary."""
    about = metadata_of(tmp_path, *gguf_folders.tokens_of("olmoe"))
    tokens = example("decoder.gguf_tokens")
    got = tokens.read(about)
    want = example("decoder.tokens").read(decoder_folders.FIXTURES / "olmoe", 256)
    for text in ("A mixture of experts is", "It's 12 é\n\n  ▁ok", ""):
        assert got.encode(text).ids == want.encode(text).ids
        assert got.decode(got.encode(text).ids) == text
    assert tokens.begin(about) is None


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-4o", "default"])
def test_splits(tmp_path, pre):
    letters = sorted(example("decoder.gguf_tokens").pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*letters, "12", "34", "1234", "<|end|>", "<tool>"]
    about = metadata_of(
        tmp_path, field("tokenizer.ggml.model", STRING, "gpt2"),
        field("tokenizer.ggml.pre", STRING, pre),
        field("tokenizer.ggml.tokens", ARRAY, (STRING, vocabulary)),
        field("tokenizer.ggml.token_type", ARRAY, (I32, [1] * (len(letters) + 3) + [3, 4])),
        field("tokenizer.ggml.merges", ARRAY, (STRING, ["1 2", "3 4", "12 34"])),
        field("tokenizer.ggml.bos_token_id", U32, 3),
        field("tokenizer.ggml.add_bos_token", BOOL, 1),
    )  # fmt: skip
    tokenizer = example("decoder.gguf_tokens").read(about)
    digits = {"qwen2": ["1", "2", "3", "4"], "default": ["1234"]}.get(pre, ["12", "3", "4"])
    assert tokenizer.encode("1234<|end|><tool>").tokens == [*digits, "<|end|>", "<tool>"]
    assert tokenizer.decode(tokenizer.encode("don't é\n1234<|end|>").ids) == "don't é\n1234"
    assert example("decoder.gguf_tokens").begin(about) == 3


def sentencepiece(tmp_path, *more):
    pieces = {"<unk>": 0, "<s>": 0, "</s>": 0, **{f"<0x{i:02X}>": 0 for i in range(256)},
              "▁": -9, "a": -8, "b": -8, "c": -8, "ab": -2, "bc": -1, "▁a": -3, "▁abc": -4,
              "abc": -5}  # fmt: skip
    types = [2, 3, 3, *[6] * 256, *[1] * 9]
    return metadata_of(
        tmp_path, field("tokenizer.ggml.model", STRING, "llama"),
        field("tokenizer.ggml.tokens", ARRAY, (STRING, [*pieces])),
        field("tokenizer.ggml.scores", ARRAY, (F32, [*pieces.values()])),
        field("tokenizer.ggml.token_type", ARRAY, (I32, types)),
        field("tokenizer.ggml.bos_token_id", U32, 1),
        field("tokenizer.ggml.unknown_token_id", U32, 0), *more,
    )  # fmt: skip


def test_sentencepiece(tmp_path):
    """The pair of the largest score first; bytes of what has no token."""
    tokens = example("decoder.gguf_tokens")
    tokenizer = tokens.read(about := sentencepiece(tmp_path))
    assert tokenizer.encode("abc").tokens == ["▁abc"]  # of "▁a" and "bc"
    assert tokenizer.encode("abb").tokens == ["▁", "ab", "b"]  # "ab" goes before "▁a"
    assert tokenizer.encode("aab").tokens == ["▁a", "ab"]
    assert tokenizer.encode("é</s>").tokens == ["▁", "<0xC3>", "<0xA9>", "</s>"]
    for text in ("abc aab", "é b", "a  c"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokens.begin(about) == 1
    about = sentencepiece(tmp_path, field("tokenizer.ggml.add_space_prefix", BOOL, 0))
    assert tokens.read(about).encode("abc aa").tokens == ["abc", "▁a", "a"]


# Refusals.

REFUSED = {
    "general.architecture": ((STRING, "gemma3"), "general.architecture 'gemma3' is not one of "
                             "llama, olmoe, qwen2moe, qwen3moe, gpt-oss"),
    "olmoe.expert_count": ((U32, 0), "general.architecture is 'olmoe', and there are no experts"),
    "olmoe.block_count": ((U32, 10**6), "metadata: num_hidden_layers is 1000000, more than 1000"),
    "olmoe.rope.dimension_count": ((U32, 4), "rope.dimension_count is 4, but heads have 8 numbers"),
    "olmoe.rope.scaling.type": ((STRING, "longrope"), "rope.scaling.type is 'longrope', expected "
                                "'none', 'linear' or 'yarn'"),
    "olmoe.attention.head_count": ((ARRAY, (I32, [4, 4])), "olmoe.attention.head_count "
                                   "is a list of 2, expected one value for all layers"),
    "tokenizer.ggml.model": ((STRING, "bert"), "tokenizer.ggml.model is 'bert', expected 'gpt2' or "
                             "'llama'"),
    "tokenizer.ggml.pre": ((STRING, "x"), "tokenizer.ggml.pre is 'x', expected one of 'default', "
                           "'gpt-2', 'olmo', 'qwen2', 'llama-bpe', 'gpt-4o'"),
    "tokenizer.ggml.tokens": ((ARRAY, (STRING, ["a", "b", "a"])), "tokenizer.ggml.tokens: 'a' "
                              "appears twice"),
    "tokenizer.ggml.merges": ((ARRAY, (STRING, ["ab"])), "tokenizer.ggml.merges: 'ab' is no pair "
                              "of tokens"),
    "tokenizer.ggml.token_type": ((ARRAY, (I32, [1])), "tokenizer.ggml.token_type has 1 types of "
                                  "256 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_files_that_are_refused(generate, tmp_path, key, monkeypatch):
    value, message = REFUSED[key]
    whole = gguf_folders.metadata

    def changed(*args, **more):
        start = field(key, *value)[: 8 + len(key)]
        kept = [one for one in whole(*args) if not one.startswith(start)]
        return [*kept, field(key, *value)]

    monkeypatch.setattr(gguf_folders, "metadata", changed)
    path, _ = gguf_folders.convert("olmoe", tmp_path)
    assert refused(generate, path) == message


def test_other_files_are_refused(generate, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    assert refused(generate, path) == (
        "malformed GGUF: the number of tensors ends at byte 16, the file at 8"
    )
