"""examples/generate.py: files of odd kinds, sizes that no file has, and names of other releases."""

import json
import os

import decoder_folders
import numpy as np
import pytest
from decoder_runs import CHUNK, Run, agree, refused

MOST = 2**31 - 1


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "hf_quant_config.json",
             "tokenizer_config.json"]
)  # fmt: skip
def test_json_that_is_no_file_or_nested_too_deeply(generate, folder, name):
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert refused(generate, folder) == f"{name}: not a regular file"
    path.unlink()
    path.write_text(" " * (2**24 + 1))
    assert refused(generate, folder).startswith(f"{name}: a file of 16777217 bytes")
    path.write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert refused(generate, folder).startswith(f"{name}: ")
    path.write_text("[]")
    assert refused(generate, folder).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("key", "name", "stored", "said"),
    [
        ("intermediate_size", "layers.0.block_sparse_moe.experts.0.w1.weight", (32, 32),
         (MOST, 32)),
        ("num_local_experts", "layers.0.block_sparse_moe.gate.weight", (4, 32), (MOST, 32)),
        ("vocab_size", "embed_tokens.weight", (256, 32), (MOST, 32)),
        ("hidden_size", "embed_tokens.weight", (256, 32), (256, 2**30)),
        ("num_key_value_heads", "layers.0.self_attn.k_proj.weight", (16, 32), (2**33, 32)),
    ],
)  # fmt: skip
def test_sizes_that_no_tensor_has(generate, folder, key, name, stored, said):
    """Nothing is allocated of them, and memory is not to blame."""
    values = {key: said[0] if key.startswith(("int", "num_l", "voc")) else 2**30}
    if key.startswith("num_key"):
        values |= {"num_attention_heads": 2**30, "head_dim": 8}
    if key.startswith("hidden"):
        values |= {"head_dim": 8}
    decoder_folders.change(folder, **values)
    want = f"model.{name} has shape {stored}, but config.json says {said}"
    assert refused(generate, folder, "--quantize", "nvfp4") == want


def test_experts_are_compared_before_they_are_allocated(generate, folder):
    about, options = generate.config.read(folder), generate.loading.Options("float32")
    weights = generate.loading.weights_of(folder, about, options)
    of = weights.at("model.layers.1.block_sparse_moe.experts")
    with pytest.raises(generate.Refused, match=r"w1.weight has shape \(32, 32\), but config.json"):
        of.expert_rows([(f"{e}.w1", f"{e}.w3") for e in range(4)], (4, 2**45, 32))


def test_groups_of_experts_that_cannot_be(generate, tmp_path):
    folder = decoder_folders.copied("deepseek_v3", tmp_path)
    decoder_folders.change(folder, n_group=3)
    assert refused(generate, folder).startswith("config.json: 2 groups for each token, of 3 groups")


def test_mixtral_with_the_names_of_transformers_5(tmp_path):
    tensors, stored = {}, decoder_folders.tensors_of("mixtral")
    config = decoder_folders.config_of("mixtral")
    for layer in range(config["num_hidden_layers"]):
        moe = f"model.layers.{layer}.block_sparse_moe."
        of = lambda name, moe=moe: stored.pop(f"{moe}{name}.weight")
        each = [[of(f"experts.{e}.w{i}") for i in (1, 3, 2)] for e in range(4)]
        prefix = f"model.layers.{layer}.mlp."
        tensors[f"{prefix}experts.gate_up_proj"] = np.stack([np.concatenate(w[:2]) for w in each])
        tensors[f"{prefix}experts.down_proj"] = np.stack([w[2] for w in each])
        tensors[f"{prefix}gate.weight"] = of("gate")
    folder = decoder_folders.write(tmp_path / "model", stored | tensors, config)
    want = decoder_folders.logits("mixtral")
    prompt = want["prompt"]
    agree(Run(folder)(prompt, CHUNK), want["logits"][: len(prompt)])


# ---- rotary positions, said twice. The numbers are those of transformers 5.24

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
OUTER = [1, 0.12120172381, 0.0094015076756, 0.0018231662688, 3.5355336149e-4, 6.856204709e-5,
         1.3295739336e-5, 2.5783463115e-6]  # fmt: skip
INNER = [1, 0.11114246398, 0.0079056946560, 0.0014058533124, 2.5000001187e-4, 4.4456985051e-5,
         7.9056935646e-6, 1.4058533679e-6]  # fmt: skip
LONGER = [1, 0.13337095081, 0.015811389312, *INNER[3:]]


@pytest.mark.parametrize(
    ("values", "angles"),
    [
        ({"rope_parameters": PLAIN, "rope_scaling": YARN, "rope_theta": 5e5}, OUTER),
        ({"rope_parameters": PLAIN, "rope_scaling": YARN | {"rope_theta": 1e6}}, INNER),
        ({"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": None}, INNER),
        ({"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 1e6,
          "original_max_position_embeddings": 512}, LONGER),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0},
          "rope_theta": 1e6}, LONGER),
    ],
)  # fmt: skip
def test_yarn_beside_other_parameters(generate, tmp_path, values, angles):
    folder = decoder_folders.copied("qwen3_moe", tmp_path)
    decoder_folders.change(folder, **values)
    rope = generate.config.read(folder).rope
    np.testing.assert_allclose(rope.angles, angles, rtol=1e-6)
    assert abs(rope.factor - 1.138629436111989) < 1e-12


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rope_parameters": PLAIN, "rope_scaling": YARN},
         "rope_parameters has rope_theta 1000000.0, but rope_scaling, which goes before it, has "
         "none: write it there, too"),
        ({"rope_parameters": {"full_attention": PLAIN}},
         "positions of full_attention have parameters of their own, which is not known here"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected 1"),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": None},
          "max_position_embeddings": None}, "rope_parameters are"),
    ],
)  # fmt: skip
def test_positions_that_are_not_known(generate, folder, values, said):
    decoder_folders.change(folder, **values)
    assert refused(generate, folder).startswith(f"config.json: {said}")


# ---- tokens without a row


def test_numbers_of_tokens_count_and_not_how_many_there_are(generate, folder):
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    vocabulary = said["model"]["vocab"]
    least = min(vocabulary, key=vocabulary.get)
    vocabulary[least] = 5000
    path.write_text(json.dumps(said))
    assert refused(generate, folder) == (
        f"tokenizer.json: token {least!r} is number 5000, but config.json says vocab_size 256"
    )


def test_added_tokens_need_a_row_where_they_occur(generate, folder):
    tokenizer = generate.tiny.tokenizer()
    tokenizer.add_tokens(["<one>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    want = "tokenizer.json: token '<one>' is number 256, but config.json says vocab_size 256"
    assert refused(generate, folder, "--prompt", "one <one>") == want
    assert generate.tokens.read(folder, 256).encode("one").ids
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert refused(generate, folder) == want.replace("<one>", "<end>").replace("r 256", "r 257")
