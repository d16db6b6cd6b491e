"""examples/generate.py: one sentence about what cannot work, with the folder in it once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import decoder_folders
import numpy as np
import pytest
from decoder_runs import EXAMPLES, Run, refused

import jax_groupgemm as jgg


def test_a_folder_that_is_none(generate, tmp_path):
    assert refused(generate, tmp_path / "absent").startswith("there is no such folder: hugging")
    assert refused(generate, tmp_path).startswith("there is no config.json: a checkpoint is a Hug")


def test_a_file(generate, folder):
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        assert refused(generate, folder / name) == (
            "a file, but a checkpoint is a folder: give the one that holds config.json"
        )


def test_the_command_prints_the_sentence_and_nothing_else(tmp_path):
    command = [sys.executable, str(EXAMPLES / "generate.py"), str(tmp_path)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert done.stdout == ""
    said = "there is no config.json: a checkpoint is a Hugging Face folder"
    assert done.stderr == f"{tmp_path}: {said}\n"


def test_a_missing_shard(generate, folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert re.fullmatch(
        r"model\.safetensors\.index\.json: file 'model-00002-of-00002\.safetensors' is missing, "
        r"which the index names for \d+ tensors, 'model\.\S+' among them",
        refused(generate, folder),
    )
    (folder / "model.safetensors.index.json").unlink()
    assert re.fullmatch(
        r"there is no tensor model\.\S+: a shard is missing, or the model is another",
        refused(generate, folder),
    )
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert refused(generate, folder) == "no .safetensors files"


def test_a_folder_that_is_named_from_where_one_is(generate, folder, monkeypatch):
    """Its files are named without it, and without what is above it."""
    (folder / "model-00002-of-00002.safetensors").unlink()
    monkeypatch.chdir(folder.parent)
    text = refused(generate, Path(folder.name))
    assert text.startswith("model.safetensors.index.json: file 'model-00002-of-00002.safetensors'")
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit, match=r"^\.: model\.safetensors\.index\.json: file 'model-0"):
        generate.main(["."])


def test_a_truncated_shard(generate, folder):
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert refused(generate, folder) == (
        f"{path.name}: truncated: tensors end at byte 60768, the file at 60668"
    )


def test_a_truncated_tokenizer(generate, folder):
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-100])
    assert refused(generate, folder).startswith("tokenizer.json is truncated, or no tokenizer: ")
    path.unlink()
    assert refused(generate, folder) == "there is no tokenizer.json"


def test_a_truncated_config(generate, folder):
    path = folder / "config.json"
    path.write_bytes(path.read_bytes()[:-100])
    assert refused(generate, folder).startswith("config.json: malformed JSON: ")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": 1001}, "num_hidden_layers is 1001, more than 1000"),
        ({"num_hidden_layers": 2**31}, "is 2147483648, expected a number below 2^31"),
        ({"rms_norm_eps": 1e300}, "config.json: rms_norm_eps is no number of a usual size"),
        ({"rms_norm_eps": float("nan")}, "config.json: rms_norm_eps is NaN, expected a finite"),
        ({"head_dim": 2**17}, "heads of 131072 numbers, more than 65536"),
        ({"rope_parameters": {"rope_type": [1]}}, "rope_type [1] is not one of"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8', expected an object"),
        ({"quantization_config": {"quant_method": []}}, "quant_method [] is not one of"),
        ({"random_weights": 1}, "random_weights is 1, expected bool"),
        ({"model_type": "gemma"}, "model_type 'gemma' is not one of mixtral, qwen2_moe, qwen3_moe, "
                                  "olmoe, gpt_oss, deepseek_v3, glm4_moe, minimax_m2, "
                                  "ernie4_5_moe, granitemoe, granitemoeshared, granitemoehybrid, "
                                  "llama, qwen2, qwen3"),
        ({"model_type": None}, "config.json has no model_type"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"hidden_size": "32"}, "hidden_size is '32', expected int"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"dtype": "int8"}, "config.json: dtype 'int8' is not one of bfloat16, float16, float32"),
        ({"dtype": None, "torch_dtype": "f32"}, "config.json: torch_dtype 'f32' is not one of"),
        ({"dtype": 16}, "config.json: dtype is 16, expected str"),
        ({"num_attention_heads": 3}, "3 heads are no multiple of 2 key-value heads"),
        ({"num_experts_per_tok": 5}, "5 experts for each token, of 4 experts"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic' is not one of"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' needs factor"),
        ({"vocab_size": 100}, "token 'Ń' is number 255, but config.json says vocab_size 100"),
        ({"intermediate_size": 64}, r"w1.weight has shape (32, 32), but config.json says (64, 32)"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes' is not one of"),
        ({"num_hidden_layers": 3}, "there is no tensor model.layers.2."),
        ({"num_hidden_layers": 1}, "there is a tensor model.layers.1.block_sparse_moe.experts.0.w1."
                                   "weight, but config.json says num_hidden_layers 1"),
        ({"sliding_window": 0}, "config.json: sliding_window is 0, expected a number above it"),
    ],
)  # fmt: skip
def test_a_config_of_another_model(generate, folder, values, said):
    decoder_folders.change(folder, **values)
    assert said in refused(generate, folder)


def test_layers_that_predict_several_tokens_are_left_out(generate, tmp_path):
    folder = decoder_folders.copied("deepseek_v3", tmp_path)
    decoder_folders.change(folder, num_hidden_layers=2)
    about, options = generate.config.read(folder), generate.loading.Options("float32")
    weights = generate.loading.weights_of(folder, about, options)
    assert weights.at("model.layers.2").has("input_layernorm.weight")
    assert sum(len(s.windows) for s in generate.loading.placed(about, weights, options).stacks) == 2


def test_a_window_of_nothing_in_gpt_oss(generate, tmp_path):
    folder = decoder_folders.copied("gpt_oss", tmp_path)
    decoder_folders.change(folder, sliding_window=0)
    assert refused(generate, folder) == (
        "config.json: sliding_window is 0, expected a number above it"
    )


def test_biases_that_would_be_left_out(generate, tmp_path):
    folder = decoder_folders.copied("qwen2_moe", tmp_path)
    decoder_folders.change(folder, qkv_bias=False)
    name = "model.layers.0.self_attn.q_proj.bias"
    assert refused(generate, folder) == (
        f"{name} is not zero, but config.json says that there is no bias"
    )
    tensors, config = (
        decoder_folders.tensors_of("qwen2_moe"),
        decoder_folders.config_of("qwen2_moe"),
    )
    zeros = {key: 0 * value for key, value in tensors.items() if key.endswith(".bias")}
    assert name in zeros  # as GPTQ's files have them
    folder = decoder_folders.write(
        tmp_path / "zeros", tensors | zeros, config | {"qkv_bias": False}
    )
    assert Run(folder).model.stacks[0].layers.attention.joined.bias is None


def test_experts_that_are_quantized_already(generate, tmp_path):
    folder = decoder_folders.FIXTURES / "qwen3_moe_fp8"
    text = refused(generate, folder, "--quantize", "nvfp4")
    assert text == "its experts are quantized already (fp8): leave --quantize nvfp4 out"
    # Other layers may be: its format leaves experts out.
    stored, _ = decoder_folders.quantized("qwen3_moe", "fp8", tmp_path)
    tensors = dict(jgg.checkpoints.open(stored))
    for name, value in decoder_folders.tensors_of("qwen3_moe").items():
        if ".experts." in name:
            tensors[name] = value
            tensors.pop(f"{name}_scale_inv")
    decoder_folders.save(stored / "model.safetensors", tensors)
    mlp = Run(stored, quantize="nvfp4").model.stacks[0].layers.mlp
    assert mlp.up.get_value().mode == "nvfp4"


def test_attention_of_a_library_that_is_not_there(generate, folder, monkeypatch):
    said = "--attention cudnn needs an NVIDIA GPU and bfloat16"
    for backend, dtype in (("cpu", "bfloat16"), ("gpu", "float32")):
        monkeypatch.setattr(generate.jax, "default_backend", lambda backend=backend: backend)
        assert refused(generate, folder, "--attention", "cudnn", "--dtype", dtype) == said


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompt", ""], "--prompt is empty: there is nothing to go on from"),
        (["--top-k", "5"], "--top-k and --top-p are of samples: give a --temperature above 0"),
        (["--top-p", "0.9"], "--top-k and --top-p are of samples: give a --temperature above 0"),
        (["--top-k", "-1"], "argument --top-k: -1 is not in [0, 2^31)"),
        (["--top-k", "two"], "argument --top-k: invalid whole value: 'two'"),
        (["--top-p", "1.5"], "argument --top-p: 1.5 is not in (0, 1]"),
        (["--top-p", "0"], "argument --top-p: 0 is not in (0, 1]"),
        (["--temperature", "-1"], "argument --temperature: -1 is negative, or no finite number"),
        (["--temperature", "nan"], "argument --temperature: nan is negative, or no finite number"),
        (["--tokens", "-5"], "argument --tokens: -5 is not positive"),
        (["--tokens", "0"], "argument --tokens: 0 is not positive"),
        (["--seed", "-1"], "argument --seed: -1 is not in [0, 2^31)"),
        (["--seed", str(2**31)], "argument --seed: 2147483648 is not in [0, 2^31)"),
        (["--chunk", "0"], "argument --chunk: 0 is not positive"),
        (["--devices", "0"], "argument --devices: 0 is not positive"),
        (["--memory", "-1"], "argument --memory: -1 is negative"),
        (["--quantize", "int3"], "argument --quantize: invalid choice: 'int3'"),
    ],
)
def test_an_option_that_cannot_be(generate, folder, options, said, capsys):
    with pytest.raises(SystemExit) as error:
        generate.main([str(folder), *options])
    assert error.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert f"error: {said}" in line


def test_a_prompt_that_is_too_long(generate, folder):
    text = refused(generate, folder, "--prompt", "x" * 509)
    assert text == (
        "the 509 tokens of --prompt and --tokens 4 are more than config.json's "
        "max_position_embeddings, 512"
    )
    decoder_folders.change(folder, max_position_embeddings=None)  # then nothing says how many
    text = refused(generate, folder, "--prompt", "x" * 509, "--memory", "0")
    assert "do not fit into the 0 B that the device has free" in text


def test_a_prompt_without_tokens(generate, folder):
    """A tokenizer may leave out what it does not know."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"Ā"', '"other"').replace('"Ġ"', '"Ā"'))
    said = generate.tokens.read(folder, 256)
    assert said.encode(" ").ids == []
    assert refused(generate, folder, "--prompt", " ") == "--prompt has no token"
