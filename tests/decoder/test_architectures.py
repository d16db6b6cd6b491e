"""config.json of GLM-4.5, MiniMax-M2, ERNIE-4.5 and Granite: defaults, and refusals."""

import json

import decoder_folders
import gguf_folders
import numpy as np
import pytest
from decoder_runs import CHUNK, Run, agree, example
from gguf_writers import save


def read(tmp_path, name, **changes):
    """The config of a fixture with other values; None leaves a key out."""
    (tmp_path / "config.json").write_text(json.dumps(decoder_folders.config_of(name, **changes)))
    return example("decoder.config").read(tmp_path)


HYBRID = {
    "model_type": "granitemoehybrid", "position_embedding_type": "rope",
    "layer_types": ["attention"],
}  # fmt: skip
NO_ROPE = {"rope_parameters": None}
REFUSED = [
    ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is "
     "1.5, expected a number up to 1"),
    ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": "x"}}, "partial_rotary_factor is "
     "'x', expected a number up to 1"),
    ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "3 numbers of heads of 16 "
     "have positions"),
    ("minimax_m2", NO_ROPE | {"rotary_dim": 18}, "18 numbers of heads of 16 have positions"),
    ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected 1"),
    ("minimax_m2", {"attn_type_list": [0]}, "attn_type_list has layers whose attention is linear"),
    ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm is False, expected True"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias is False, expected True"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
    ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size is 8, expected 0"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias is True, expected False"),
    ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval is 0, expected a number above"),
    ("granitemoeshared", {"logits_scaling": 0}, "logits_scaling is 0, expected another number"),
    ("granitemoeshared", HYBRID | {"layer_types": ["mamba"]}, "layer_types has 'mamba', expected "
     "'attention' alone"),
    ("granitemoeshared", HYBRID | {"layer_types": None}, "layer_types has 'mamba', expected"),
    ("granitemoeshared", HYBRID | {"layer_types": ["attention"] * 2}, "names 2 layers of 1"),
    ("granitemoeshared", HYBRID | {"position_embedding_type": None}, "position_embedding_type is "
     "'nope', expected 'rope'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "said"), REFUSED)
def test_refused(tmp_path, name, changes, said):
    with pytest.raises(example("decoder.errors").Refused) as error:
        read(tmp_path, name, **changes)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "theta", "rotated"),
    [
        ("glm4_moe", NO_ROPE, 10_000.0, 8),
        ("glm4_moe", NO_ROPE | {"partial_rotary_factor": 1.0, "rope_theta": 1e6}, 1e6, 16),
        ("minimax_m2", NO_ROPE, 5e6, 8),  # as rotary_dim says
        ("minimax_m2", NO_ROPE | {"rotary_dim": None}, 5e6, 16),
        ("minimax_m2", NO_ROPE | {"partial_rotary_factor": 0.25}, 5e6, 4),
        ("ernie4_5_moe", NO_ROPE, 500_000.0, 8),
        ("granitemoeshared", NO_ROPE, 10_000.0, 8),
    ],
)
def test_positions_that_are_not_said(tmp_path, name, changes, theta, rotated):
    """Are those of transformers."""
    angles = read(tmp_path, name, **changes).rope.angles
    np.testing.assert_allclose(angles, theta ** (-np.arange(0, rotated, 2) / rotated), rtol=1e-12)


def test_layers_with_experts(tmp_path):
    def of(name, **changes):
        return read(tmp_path, name, num_hidden_layers=5, **changes).moe_layers

    assert of("glm4_moe", first_k_dense_replace=None) == (False, True, True, True, True)
    said = {"moe_layer_start_index": None, "moe_layer_end_index": None}
    assert of("ernie4_5_moe", **said) == (False, True, True, True, True)
    said = {"moe_layer_start_index": 2, "moe_layer_end_index": -1, "moe_layer_interval": 2}
    assert of("ernie4_5_moe", **said) == (False, False, False, True, False)
    assert of("ernie4_5_moe", moe_layer_start_index=1, moe_layer_end_index=2) == (
        False, True, True, False, False,
    )  # fmt: skip


def test_ernie_has_its_embedding_as_head_if_nothing_is_said(tmp_path):
    assert read(tmp_path, "ernie4_5_moe", tie_word_embeddings=None).tied
    assert not read(tmp_path, "glm4_moe", tie_word_embeddings=None).tied


@pytest.mark.parametrize("experts", [True, False])
def test_granite_of_attention_alone(tmp_path, experts):
    """Granite-4 is Granite-MoE with a shared expert, which may be all that it has."""
    name = "granitemoeshared"
    tensors, want = decoder_folders.tensors_of(name), decoder_folders.logits(name)
    prompt, of = want["prompt"][:CHUNK], "block_sparse_moe"
    config = decoder_folders.config_of(name, **HYBRID)
    if experts:
        want = want["logits"][:CHUNK]
    else:  # the same as with experts that add nothing
        zeros = {k: v * (0 if "moe.output_linear" in k else 1) for k, v in tensors.items()}
        plain = decoder_folders.config_of(name)
        want = Run(decoder_folders.write(tmp_path / "zeros", zeros, plain))(prompt, CHUNK)
        config["num_local_experts"] = 0
        tensors = {key: value for key, value in tensors.items() if of not in key}
    agree(Run(decoder_folders.write(tmp_path / "model", tensors, config))(prompt, CHUNK), want)


def test_experts_in_one_tensor(generate):
    """They count as experts, and are quantized while they are loaded."""
    folder = decoder_folders.FIXTURES / "granitemoeshared"
    about, options = generate.config.read(folder), generate.loading.Options("bfloat16")
    weights = generate.loading.weights_of(folder, about, options)
    need = generate.memory.Need.of(about, weights.headers, options)
    assert need.experts == 2 * need.weights_of_experts == 2 * 4 * 3 * 32 * 32
    mlp = Run(folder, quantize="mxfp8").model.stacks[0].layers.mlp
    assert mlp.up.get_value().mode == mlp.down.get_value().mode == "mxfp8"
    with pytest.raises(generate.Refused, match="granitemoeshared keeps all experts of a layer in"):
        example("decoder.adapters").check(about, ["experts"])


def test_layers_behind_the_last_are_left_out(tmp_path):
    """Those of GLM's files predict several tokens; llama.cpp counts them as layers."""
    path, folder = gguf_folders.convert("glm4_moe", tmp_path)
    gguf, config = example("decoder.gguf"), decoder_folders.config_of("glm4_moe")
    tensors = dict(gguf.opened(path))
    more = {"blk.2.nextn.eh_proj.weight", "blk.2.attn_norm.weight"}
    said = config | {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    metadata = gguf_folders.metadata("glm4_moe", said, [])
    save(path, tensors | dict.fromkeys(more, np.ones(4, np.float32)), metadata)
    about = example("decoder.config").read(path)
    assert about.moe_layers == example("decoder.config").read(folder).moe_layers == (False, True)
    assert len(gguf.Renamed(path, about)) == len(tensors)
