"""Files of adapters: which are read, and what is said of others."""

import json
import re

import decoder_folders
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_writers import save
from decoder_runs import Run, example

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
SAID = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
MERGE = "merge the adapters into their base with PEFT, or train plain ones"
CONVERT = (
    "which changes the base, too: save the adapters with PEFT's "
    "path_initial_model_for_weight_conversion, which makes plain ones"
)


@pytest.fixture(scope="module")
def peft():
    return example("decoder.peft")


def written(folder, rank=2, columns=32, dtype=np.float32, **said):
    """Adapters of one weight of Mixtral's fixture."""
    a, b = np.ones((rank, columns), dtype), np.ones((32, rank), dtype)
    save(
        folder / "adapter_model.safetensors",
        {f"{PREFIX}.lora_A.weight": a, f"{PREFIX}.lora_B.weight": b},
    )
    (folder / "adapter_config.json").write_text(json.dumps(SAID | said))
    return folder


@pytest.mark.parametrize(
    ("said", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True, "r": 4}, 2.0),
        ({"lora_alpha": 3.0, "init_lora_weights": "eva", "eva_config": {"rho": 2.0}}, 1.5),
        ({"init_lora_weights": "gaussian", "loftq_config": {}, "megatron_core": "megatron.core"},
         2.0),
        ({"init_lora_weights": False, "target_modules": ["q_proj"], "exclude_modules": "x",
          "layers_to_transform": [0], "qalora_group_size": 16, "bias": "none",
          "alora_invocation_tokens": None, "rank_pattern": {}, "corda_config": None}, 2.0),
    ],
)  # fmt: skip
def test_plain_adapters(peft, tmp_path, said, scale):
    rank = said.get("r", 2)
    assert peft.config_of(written(tmp_path, rank, **said)) == (rank, scale)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"init_lora_weights": "pissa"}, f"init_lora_weights is 'pissa', {CONVERT}"),
        ({"init_lora_weights": "pissa_niter_4"},
         f"init_lora_weights is 'pissa_niter_4', {CONVERT}"),
        ({"init_lora_weights": "OLoRA"}, f"init_lora_weights is 'OLoRA', {CONVERT}"),
        ({"init_lora_weights": "corda"}, f"init_lora_weights is 'corda', {CONVERT}"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
         f"init_lora_weights is 'loftq', which may change the base, too: {MERGE}"),
        ({"use_qalora": True}, f"use_qalora is True, which is not known here: {MERGE}"),
        ({"alora_invocation_tokens": [1, 2]},
         f"alora_invocation_tokens is [1, 2], which is not known here: {MERGE}"),
        ({"layer_replication": [[0, 1]]},
         f"layer_replication is [[0, 1]], which is not known here: {MERGE}"),
        ({"bias": "all"}, f"bias is 'all', which is not known here: {MERGE}"),
        ({"trainable_token_indices": [3]},
         f"trainable_token_indices is [3], which is not known here: {MERGE}"),
        ({"modules_to_save": ["lm_head"]},
         f"modules_to_save is ['lm_head'], which is not known here: {MERGE}"),
        ({"target_parameters": ["experts.down_proj"]},
         f"target_parameters is ['experts.down_proj'], which is not known here: {MERGE}"),
        ({"rank_pattern": {"q_proj": 4}},
         f"rank_pattern is {{'q_proj': 4}}, which is not known here: {MERGE}"),
        ({"of_next_year": 0.5}, f"of_next_year is 0.5, which is not known here: {MERGE}"),
        ({"use_rslora": "no"}, "use_rslora is 'no', expected true or false"),
        ({"lora_alpha": 2**60}, f"lora_alpha is {2**60}, expected a number below 2^31"),
        ({"lora_alpha": "16"}, "lora_alpha is '16', expected a number below 2^31"),
        ({"lora_alpha": True}, "lora_alpha is True, expected a number below 2^31"),
    ],
)  # fmt: skip
def test_another_function_of_the_same_tensors(peft, tmp_path, said, message):
    with pytest.raises(peft.Refused) as error:
        peft.config_of(written(tmp_path, **said))
    assert str(error.value) == f"{tmp_path / 'adapter_config.json'}: {message}"


@pytest.mark.parametrize("key", ["r", "lora_alpha"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", str(2**70), str(2**2000)])
def test_a_number_that_is_none(peft, tmp_path, key, number):
    path = written(tmp_path) / "adapter_config.json"
    path.write_text(path.read_text().replace(f'"{key}": {SAID[key]}', f'"{key}": {number}'))
    with pytest.raises(peft.Refused, match=f"{re.escape(str(path))}: {key} is "):
        peft.config_of(tmp_path)


@pytest.mark.parametrize("rank", [3, 2**30, 2**40])
def test_a_rank_that_no_tensor_has(peft, tmp_path, rank):
    """Nothing is allocated of it."""
    with pytest.raises(peft.Refused) as error:
        peft.config_of(written(tmp_path, r=rank))
    path = tmp_path / "adapter_config.json"
    assert str(error.value) == f"{PREFIX}.lora_A.weight has rank 2, but {path} says {rank}"


def test_tensors_of_other_shapes(peft, tmp_path):
    model = Run(decoder_folders.FIXTURES / "mixtral", joined=False).model
    with pytest.raises(peft.Refused, match=r"lora_A.weight has shape \(2, 16\), expected \(2, 32"):
        peft.read(written(tmp_path, columns=16), model)
    with pytest.raises(peft.Refused, match=r"lora_A.weight is no matrix of floats$"):
        peft.read(written(tmp_path, dtype=np.int8), model)
    save(tmp_path / "adapter_model.safetensors", {})
    with pytest.raises(peft.Refused, match=r"adapter_model.safetensors has no tensors$"):
        peft.read(tmp_path, model)
    sites = peft.read(written(tmp_path), model)
    held = {site.name: float(jnp.abs(site.pair.b.get_value()).sum()) for site in sites}
    assert held == {f"self_attn.{n}_proj": 64.0 * (n == "q") for n in "qkvo"}


def test_names_are_ends_that_experts_alone_have(peft, tmp_path):
    """PEFT finds these where experts are one tensor, as in transformers 5."""
    adapters = example("decoder.adapters")
    model = Run(decoder_folders.FIXTURES / "mixtral", joined=False).model
    peft.write(tmp_path, adapters.attach(model, adapters.TARGETS, 1, 1.0), 1, 1.0, "mixtral")
    said = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    experts = [f"experts.{e}.w{i}" for e in range(4) for i in (1, 2, 3)]
    assert said == [*experts, *(f"self_attn.{n}_proj" for n in "koqv")]
    assert peft.config_of(tmp_path) == (1, 1.0)
