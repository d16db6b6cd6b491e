"""Random metadata and tensors of a GGUF model: it is read, or refused in one sentence.

The first seed runs daily, the others weekly; ``--fuzz N`` runs N cases.
"""

import time

import decoder_folders
import gguf_folders
import numpy as np
import pytest
from decoder_runs import example
from gguf_writers import ARRAY, BOOL, F32, I32, STRING, U8, U32, U64, field, random_blocks, save

PER_TEST, SECONDS = 100, 20
NAMES = ("olmoe", "mixtral", "qwen2_moe", "gpt_oss", "glm4_moe", "granitemoeshared")
VALUES = [
    *[(U32, n) for n in (0, 1, 2, 3, 4, 5, 7, 16, 255, 1000, 2**31 - 1, 2**31, 2**32 - 1)],
    *[(F32, x) for x in (0.0, -1.0, 1e-6, 2.5, 1e38, float("nan"), float("inf"))],
    *[(STRING, s) for s in ("", "x", "yarn", "linear", "none", "llama", "gpt2", b"\xff")],
    (I32, -1), (U8, 1), (BOOL, 0), (BOOL, 1), (U64, 2**63), (ARRAY, (I32, [2, 2])),
    (ARRAY, (I32, [])), (ARRAY, (STRING, ["a", "b"])), (ARRAY, (STRING, ["a b"] * 3)),
    (ARRAY, (F32, [0.5] * 256)), (ARRAY, (ARRAY, [(I32, [1])])),
]  # fmt: skip
MORE = [  # keys that the writer leaves out
    "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_attn_factor", "attention.sliding_window_pattern", "attention.clamp_kqv",
    "attention.sliding_window", "attention.key_length", "expert_weights_norm",
    "expert_weights_scale", "expert_group_count", "expert_gating_func", "leading_dense_block_count",
    "nextn_predict_layers", "attention.scale", "logit_scale", "residual_scale",
]  # fmt: skip
OF_TOKENS = ["scores", "eos_token_id", "bos_token_id", "eot_token_id", "add_space_prefix",
             "unknown_token_id"]  # fmt: skip


def pytest_generate_tests(metafunc):
    count = metafunc.config.getoption("--fuzz")
    tests = 20 if count is None else -(-count // PER_TEST)
    marks = [pytest.mark.weekly] if count is None else []
    metafunc.parametrize("seed", [pytest.param(s, marks=marks if s else []) for s in range(tests)])


def pick(rng, options):
    return options[rng.integers(len(options))]


def key_of(one: bytes) -> str:
    return one[8 : 8 + int.from_bytes(one[:8], "little")].decode()


def metadata(rng, name):
    tokens = gguf_folders.tokens_of(name)
    out = {key_of(one): one for one in gguf_folders.metadata(name, CONFIGS[name], tokens)}
    arch = gguf_folders.ARCHITECTURES[name]
    known = [*out, *(f"{arch}.{key}" for key in MORE), *(f"tokenizer.ggml.{k}" for k in OF_TOKENS)]
    for _ in range(rng.integers(1, 4)):
        key = pick(rng, known)
        if rng.integers(4):
            out[key] = field(key, *pick(rng, VALUES))
        else:
            out.pop(key, None)
    return [*out.values()]


def changed(rng, tensors):
    out = dict(tensors)
    for _ in range(rng.integers(3)):
        name = pick(rng, [*out])
        x = out[name]
        if isinstance(x, tuple):
            continue
        match rng.integers(6):
            case 0:
                del out[name]
            case 1:
                out[name] = np.ascontiguousarray(x.T)
            case 2:
                out[name] = x[..., :1]
            case 3:
                out[name] = ("Q8_0", random_blocks(rng, "Q8_0", *x.shape[:-1], 32))
            case 4:
                out[pick(rng, ["rope_freqs.weight", "x.weight", "blk.9.attn_q.weight", "x"])] = x
            case 5:
                out[name] = x.astype(np.float16)
    return out


CONFIGS = {name: decoder_folders.config_of(name) for name in NAMES}


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Tensors of each model, by GGUF's names."""
    folder, opened = tmp_path_factory.mktemp("gguf"), example("decoder.gguf").opened
    return {
        name: dict(opened(gguf_folders.convert(name, folder, config=CONFIGS[name])[0]))
        for name in NAMES
    }


def read(path):
    """As generate.py does, up to the compiler."""
    of = lambda name: example(f"decoder.{name}")
    about, loading, tokens = of("config").read(path), of("loading"), of("tokens")
    tokenizer = tokens.read(path, about.vocabulary)
    tokens.encode(tokenizer, "A mixture of experts", tokens.begin(path, tokenizer))
    weights = loading.weights_of(path, about, options := loading.Options("float32", tokens=8))
    of("memory").Need.of(about, weights.headers, options)
    return loading.shapes(about, weights, options)


def test_models(seed, sources, tmp_path):
    rng, errors = np.random.default_rng([seed, 46]), example("decoder.errors")
    path, good = tmp_path / "m.gguf", 0
    for _ in range(PER_TEST):
        name = pick(rng, NAMES)
        save(path, changed(rng, sources[name]), metadata(rng, name))
        began = time.perf_counter()
        try:
            read(path)
            good += 1
        except errors.Refused as error:
            said = errors.sentence(path, error)
            assert "\n" not in said
            assert len(said) < 2000
        assert time.perf_counter() - began < SECONDS
    assert 0 < good < PER_TEST
