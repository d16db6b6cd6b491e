"""examples/generate.py with GGUF files: logits of the same weights in a folder, and tokenizers."""

import dataclasses

import decoder_folders
import gguf_folders
import jax
import numpy as np
import pytest
from decoder_runs import CHUNK, Run, agree, example, refused
from gguf_writers import ARRAY, BOOL, I32, STRING, U16, U32, field, save
from gguf_writers import F32 as FLOAT

import jax_groupgemm as jgg

MODELS = tuple(gguf_folders.ARCHITECTURES)


def config_of(name):
    """Without what GGUF does not say: factors of positions, windows of Mixtral."""
    config = decoder_folders.config_of(name)
    if name == "qwen2_moe":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    return config


# Older files have a tensor for each expert.
OLDER = [(name, False) for name in MODELS]
OLDER += [(name, True) for name in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")]


@pytest.mark.parametrize(("name", "older"), OLDER)
def test_weights(name, older, tmp_path):
    """The same bits, in the same places, as of a folder. Its logits are those of transformers."""
    path, folder = gguf_folders.convert(name, tmp_path, older=older, config=config_of(name))
    (_, got), (_, want) = (Run(path).parts for path in (path, folder))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_parts_of_a_model(tmp_path):
    """Any of them stands for the model."""
    path, folder = gguf_folders.convert("mixtral", tmp_path, config=config_of("mixtral"))
    tensors, want = [*example("decoder.gguf").opened(path).items()], Run(folder).parts[1]
    about = gguf_folders.metadata(
        "mixtral", config_of("mixtral"), gguf_folders.tokens_of("mixtral")
    )
    for i in range(2):
        part = [field("split.no", U16, i), field("split.count", U16, 2),
                field("split.tensors.count", I32, len(tensors))]  # fmt: skip
        part += about if i == 0 else []
        save(tmp_path / f"m-0000{i + 1}-of-00002.gguf", dict(tensors[i::2]), part)
    for i in (1, 2):
        got = Run(tmp_path / f"m-0000{i}-of-00002.gguf").parts[1]
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("name", MODELS)
def test_values_of_codes(name, tmp_path):
    path, folder = gguf_folders.convert(name, tmp_path, gguf_folders.q8_0, config=config_of(name))
    stored, plain = (Run(path) for path in (path, folder))
    is_weight = lambda leaf: isinstance(leaf, jgg.Quantized)
    codes = jax.tree.leaves(stored.parts[1], is_leaf=is_weight)
    values = jax.tree.leaves(plain.parts[1])
    moe = next(s.layers.mlp for s in stored.model.stacks if hasattr(s.layers.mlp, "router"))
    assert moe.up.get_value().bits == 8
    assert sum(map(is_weight, codes)) > 4
    for got, want in zip(codes, values, strict=True):
        value = jgg.dequantize(got, np.float32) if is_weight(got) else got
        np.testing.assert_array_equal(value, want)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="GPUs read rows of numbers")
def test_rows_of_the_embedding(tmp_path):
    """Codes stay codes on a CPU; in another dtype they are rounded as before."""
    path, folder = gguf_folders.convert("olmoe", tmp_path, gguf_folders.q8_0)
    tokens = np.array([5, 0, 5, 2], np.int32)
    for dtype in ("float32", "bfloat16"):
        stored, plain = (Run(p, dtype).model for p in (path, folder))
        assert isinstance(stored.embedding.get_value(), jgg.Quantized)
        got, want = stored.embedded(tokens), plain.embedded(tokens)
        assert got.dtype == want.dtype == stored.dtype == dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "fp8"])
def test_a_table_whose_rows_share_scales_is_dequantized(mode, rng, monkeypatch):
    Weights = example("decoder.weights").Weights
    scale = np.float32(0.5) if mode == "nvfp4" else None
    q = jgg.quantize(rng.normal(size=(256, 128)).astype(np.float32), mode=mode, global_scale=scale)
    monkeypatch.setattr(Weights, "linear", lambda *_: q)
    weights = Weights({}, {}, {}, "gguf", np.float32)
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        table = weights.table("embed_tokens", 256, 128)
        assert isinstance(table, jgg.Quantized) == (mode == "mxfp4" and platform == "cpu")
        if table is not q:
            np.testing.assert_array_equal(table, jgg.dequantize(q, np.float32))


def test_the_dtype_to_compute_in(tmp_path, monkeypatch):
    generate = example("generate")

    read = generate.config.read
    kinds = {"codes": gguf_folders.q8_0, "halves": lambda w: (w.astype(np.float16), w)}
    files = []
    for kind, quantize in kinds.items():
        (tmp_path / kind).mkdir()
        files.append(read(gguf_folders.convert("olmoe", tmp_path / kind, quantize)[0]))
    wide = dataclasses.replace(files[1], dtype="float32")
    folder = read(decoder_folders.FIXTURES / "qwen3_moe_fp8")
    for platform, want in (("cpu", "float32"), ("gpu", "bfloat16")):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        got = [generate.dtype_for(about) for about in (*files, wide, folder)]
        assert got == [want, "bfloat16", "float32", "bfloat16"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.weekly
def test_logits(name, tmp_path):
    prompt, quantize = decoder_folders.logits(name)["prompt"], gguf_folders.q8_0
    path, folder = gguf_folders.convert(name, tmp_path, quantize, config=config_of(name))
    agree(Run(path)(prompt, CHUNK), Run(folder)(prompt, CHUNK))


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


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-4o", "gpt-2", "default"])
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
    digits = {"qwen2": ["1", "2", "3", "4"], "gpt-2": ["1234"]}.get(pre, ["12", "3", "4"])
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
        field("tokenizer.ggml.scores", ARRAY, (FLOAT, [*pieces.values()])),
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


def test_scores_that_say_nothing(tmp_path):
    names = ["<unk>", "a", "b", "aa", "ab", "bb"]
    about = metadata_of(
        tmp_path, field("tokenizer.ggml.model", STRING, "llama"),
        field("tokenizer.ggml.tokens", ARRAY, (STRING, names)),
        field("tokenizer.ggml.scores", ARRAY, (FLOAT, [-1000.0] * 6)),
    )  # fmt: skip
    with pytest.raises(example("decoder.errors").Refused) as error:
        example("decoder.gguf_tokens").read(about)
    assert str(error.value) == (
        "tokenizer.ggml.scores has 1 different scores for 3 tokens: which are merged first is not "
        "known"
    )


# Refusals.

REFUSED = {
    "general.architecture": ((STRING, "gemma3"), "general.architecture 'gemma3' is not one of "
                             "llama, olmoe, qwen2moe, qwen3moe, gpt-oss, glm4moe, minimax-m2, "
                             "ernie4_5-moe, granitemoe, qwen2, qwen3"),
    "olmoe.attention.sliding_window": ((U32, 4), "attention.sliding_window is 4, which olmoe is "
                                       "not known to have"),
    "olmoe.attention.sliding_window_pattern": ((U32, 3), "attention.sliding_window_pattern is 3, "
                                               "which olmoe is not known to have"),
    "olmoe.expert_weights_norm": ((BOOL, 1), "expert_weights_norm is True, expected False"),
    "olmoe.expert_weights_scale": ((FLOAT, 2.5), "expert_weights_scale is 2.5, expected 1"),
    "olmoe.expert_count": ((U32, 0), "general.architecture is 'olmoe', and there are no experts"),
    "olmoe.block_count": ((U32, 10**6), "metadata: num_hidden_layers is 1000000, more than 1000"),
    "olmoe.rope.dimension_count": ((U32, 4), "rope.dimension_count is 4, but heads have 8 numbers"),
    "olmoe.attention.value_length": ((U32, 9), "attention.value_length is 9, but heads have 8 "
                                     "numbers"),
    "olmoe.rope.scaling.type": ((STRING, "longrope"), "rope.scaling.type is 'longrope', expected "
                                "'none', 'linear' or 'yarn'"),
    "olmoe.attention.head_count": ((ARRAY, (I32, [4, 4])), "olmoe.attention.head_count "
                                   "is a list of 2, expected one value for all layers"),
    "tokenizer.ggml.model": ((STRING, "bert"), "tokenizer.ggml.model is 'bert', expected 'gpt2' or "
                             "'llama'"),
    "tokenizer.ggml.pre": ((STRING, "x"), "tokenizer.ggml.pre is 'x', expected one of 'default', "
                           "'gpt-2', 'olmo', 'qwen2', 'deepseek-r1-qwen', 'llama-bpe', 'llama3', "
                           "'llama-v3', 'dbrx', 'smaug-bpe', 'gpt-4o', 'tekken', 'glm4', "
                           "'chatglm-bpe', 'minimax-m2', 'refact'"),
    "tokenizer.ggml.tokens": ((ARRAY, (STRING, ["a", "b", "a"])), "tokenizer.ggml.tokens: 'a' "
                              "appears twice"),
    "tokenizer.ggml.merges": ((ARRAY, (STRING, ["ab"])), "tokenizer.ggml.merges: 'ab' is no pair "
                              "of tokens"),
    "tokenizer.ggml.add_bos_token": ((U32, 1), "tokenizer.ggml.add_bos_token is 1, expected a "
                                     "bool"),
    "tokenizer.ggml.bos_token_id": ((I32, -1), "tokenizer.ggml.bos_token_id is -1, expected a "
                                    "number from 0 on"),
    "tokenizer.ggml.token_type": ((ARRAY, (I32, [1])), "tokenizer.ggml.token_type has 1 types of "
                                  "256 tokens"),
}  # fmt: skip


UNKNOWN = [
    "blk.0.attn_sinks.weight", "blk.1.ffn_gate_inp.bias", "blk.0.ffn_norm.bias", "output.x",
    "blk.0.ffn_up_shexp.weight", "blk.0.attn_q.scale", "blk.0.exp_probs_b.bias", "mtp.weight",
    "blk.0.ffn_up_exps.bias", "token_embd.bias",
]  # fmt: skip


def test_tensors_that_would_be_left_out(generate, tmp_path):
    path, _ = gguf_folders.convert("olmoe", tmp_path)
    about, gguf = example("decoder.config").read(path), example("decoder.gguf")
    tensors = dict(gguf.opened(path))
    for name in UNKNOWN:
        metadata = gguf_folders.metadata("olmoe", decoder_folders.config_of("olmoe"), [])
        save(path, tensors | {name: np.ones(4, np.float32)}, metadata)
        with pytest.raises(gguf.Refused) as error:
            gguf.Renamed(path, about)
        assert str(error.value) == f"there is a tensor {name!r}, which olmoe is not known to have"
    save(path, tensors | {"blk.0.attn_rot_embd": np.ones(4, np.float32)}, metadata)
    assert len(gguf.Renamed(path, about)) == len(tensors)


ROPES = [
    ({"scaling.factor": (FLOAT, 4.0)}, "linear"),  # llama.cpp's type where there is none
    ({"scale_linear": (FLOAT, 4.0)}, "linear"),
    ({"scaling.type": (STRING, "linear"), "scaling.factor": (FLOAT, 4.0)}, "linear"),
    ({"scaling.type": (STRING, "none"), "scaling.factor": (FLOAT, 4.0)}, "none"),
    ({"scaling.type": (STRING, "yarn"), "scaling.factor": (FLOAT, 4.0),
      "scaling.original_context_length": (U32, 64), "scaling.yarn_beta_fast": (FLOAT, 8.0),
      "scaling.yarn_attn_factor": (FLOAT, 1.5)}, "yarn"),
    ({"scaling.type": (STRING, "yarn"), "scaling.factor": (FLOAT, 4.0),
      "scaling.yarn_ext_factor": (FLOAT, 0.5)}, "rope.scaling.yarn_ext_factor is 0.5, expected 1"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "want"), ROPES)
def test_positions(tmp_path, said, want):
    more = {f"olmoe.rope.{key}": value for key, value in said.items()}
    path, _ = gguf_folders.convert("olmoe", tmp_path, **more)
    read, plain = example("decoder.config").read, 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    if want.startswith("rope"):
        with pytest.raises(example("decoder.errors").Refused, match=want):
            read(path)
        return
    rope = read(path).rope
    if want == "yarn":
        assert rope.factor == 1.5
        assert rope.angles[-1] == plain[-1] / 4
    else:
        np.testing.assert_allclose(rope.angles, plain / (4 if want == "linear" else 1))


def test_factors_of_positions(tmp_path):
    """Llama 3 has them as a tensor."""
    path, _ = gguf_folders.convert("olmoe", tmp_path)
    read, refused = example("decoder.config").read, example("decoder.errors").Refused
    tensors = dict(example("decoder.gguf").opened(path))
    name = "rope_freqs.weight"

    def of(factors, **more):
        config = decoder_folders.config_of("olmoe")
        metadata = gguf_folders.metadata("olmoe", config, [], **more)
        return read(save(path, tensors | {name: np.array(factors, np.float32)}, metadata))

    angles = 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(of([1, 2, 4, 8]).rope.angles, angles / [1, 2, 4, 8])
    for factors in ([1, 2, 4], [1, 2, 4, 0], [1, 2, 4, np.nan]):
        with pytest.raises(refused, match=name):
            of(factors)
    with pytest.raises(refused, match=r"there are both rope\.scaling and a tensor"):
        of([1, 2, 4, 8], **{"olmoe.rope.scaling.factor": (FLOAT, 2.0)})


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
