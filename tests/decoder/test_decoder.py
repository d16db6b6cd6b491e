"""examples/generate.py computes the logits of transformers, with arrays and with quantized weights.

The fixtures are made by tools/make_decoder_fixtures.py; nothing here needs torch.
"""

import decoder_folders
import fp8_oracle
import numpy as np
import oracle
import pytest
from decoder_runs import CHUNK, NAMES, Run, agree, example

import jax_groupgemm as jgg


@pytest.mark.parametrize("name", [*NAMES, "qwen3_moe_fp8"])
def test_prompts_and_greedy_steps_have_the_logits_of_transformers(name):
    # A program of its own takes seconds to compile: others fill up that of the prompt.
    size = 1 if name == "gpt_oss" else CHUNK
    run, want = Run(decoder_folders.FIXTURES / name), decoder_folders.logits(name)
    agree(run(want["prompt"], CHUNK), want["logits"])
    last, steps = want["logits"][-1], []
    for token, logits in zip(want["tokens"], want["steps"], strict=True):
        assert last.argmax() == token
        steps.append(run([token], size)[0])
        last = logits
    agree(np.stack(steps), want["steps"])


def test_codes_of_transformers():
    """Are near the weights that its quantizer was given, and experts have their values."""
    tensors, plain = map(decoder_folders.tensors_of, ("qwen3_moe_fp8", "qwen3_moe"))
    stored = Run(decoder_folders.FIXTURES / "qwen3_moe_fp8").model.stacks[0].layers.mlp
    for name, leaf in (("gate_proj", stored.up), ("down_proj", stored.down)):
        q = leaf.get_value()
        assert (q.mode, q.block) == ("fp8", (16, 16))
        w = [plain[f"{EXPERT.format(i)}.{name}.weight"] for i in range(4)]
        codes, scales = (
            np.stack([tensors[f"{EXPERT.format(i)}.{name}.{key}"] for i in range(4)])
            for key in ("weight", "weight_scale_inv")
        )
        values = fp8_oracle.dequantize(codes, scales, (16, 16))
        assert 1e-3 < oracle.error(values, np.stack(w)) < 0.04
        got = jgg.dequantize(q)[0, :, : codes.shape[1]]  # gate, of the first layer
        np.testing.assert_array_equal(got, values.astype(np.float32))


EXPERT = "model.layers.0.mlp.experts.{}"


def agree_after(prompt, stored, plain, steps=2):
    """Logits of a prompt and of greedy steps after it, in the program of the prompt."""
    want, tokens = plain(prompt, CHUNK), prompt
    for _ in range(steps):
        agree(stored(tokens, CHUNK), want)
        tokens = [int(want[-1].argmax())]
        want = plain(tokens, CHUNK)
    agree(stored(tokens, CHUNK), want)


@pytest.mark.parametrize("format", decoder_folders.FORMATS)
@pytest.mark.one_in(2)
def test_quantized_folders_have_the_logits_of_their_values(format, tmp_path):
    name = decoder_folders.MODEL[format]
    folders = decoder_folders.quantized(name, format, tmp_path)
    prompt = decoder_folders.logits(name)["prompt"][:CHUNK]
    stored, plain = map(Run, folders)
    block = stored.model.stacks[-1].layers  # the first of DeepSeek's layers have no experts
    attention = block.attention
    queries = attention.latent if name == "deepseek_v3" else attention.joined or attention.query
    for weight in (block.mlp.up, block.mlp.down, queries.weight):
        assert isinstance(weight.get_value(), jgg.Quantized)
    agree_after(prompt, stored, plain)


def test_gpt_oss_has_the_logits_of_its_values(tmp_path):
    prompt = decoder_folders.logits("gpt_oss")["prompt"][:CHUNK]
    stored, plain = map(Run, decoder_folders.gpt_oss_mxfp4(tmp_path))
    assert stored.model.stacks[0].layers.mlp.up.get_value().mode == "mxfp4"
    agree_after(prompt, stored, plain)


@pytest.mark.parametrize("sinks", [False, True])
def test_heads_of_one_key_as_tokens(rng, sinks):
    """What cuDNN is asked for in a decode step is the same attention."""
    attend = example("decoder.attention").attend
    sequences, heads, kv_heads, size, slots = 3, 6, 2, 8, 11
    of = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    q, (keys, values) = of(sequences, 1, heads, size), of(2, sequences, slots, kv_heads, size)
    bias = of(1, heads, 1, slots) if sinks else None
    mask = (np.arange(slots) < 7)[None, None, None]
    want, got = (attend(q, keys, values, bias, mask, "xla", joins=j) for j in (False, True))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    two = np.concatenate([q, q], axis=1)  # a prompt's tokens stay as they are
    got = attend(two, keys, values, bias, mask, "xla", joins=True)
    np.testing.assert_allclose(got[:, :1], want, rtol=1e-5, atol=1e-6)
