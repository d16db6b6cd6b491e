"""compressed-tensors' integers and mx floats, against their formulas in float64."""

import numpy as np
import pytest
from checkpoint_writers import (
    BF16,
    E2M1,
    E4M3,
    F16,
    F32,
    F64,
    K,
    N,
    affine,
    check,
    integers,
    named,
    pairs,
    same,
    write_int_quantized,
    write_pack_quantized,
)

import jax_groupgemm as jgg

ck = jgg.checkpoints
FORMAT = "compressed-tensors"


def config(format, bits, groups, *, symmetric, k=K, **others):
    strategy = "channel" if groups == 1 else "group"
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
        "group_size": None if groups == 1 else -(-k // groups), "actorder": None, "dynamic": False,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights | others, "input_activations": None}
    return {
        "model_type": "llama",
        "quantization_config": {
            "quant_method": FORMAT, "format": format, "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "kv_cache_scheme": None,
        },
    }  # fmt: skip


def close(w, value, s, bits):
    """Of float32 scales: within the bound of the docstring."""
    got = np.asarray(jgg.dequantize(w), F64)
    bound = 2.0 ** (bits - 23) * np.abs(np.repeat(s.astype(F64), K // s.shape[1], 1))
    assert np.all(np.abs(got - value) <= bound)


KINDS = ("pack-quantized", "int-quantized")


def written(kind, q, z, s, bits):
    write = write_pack_quantized if kind == "pack-quantized" else write_int_quantized
    return write(q, z, s, bits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("bits", [4, 8, *(pytest.param(b, marks=pytest.mark.weekly) for b in
                                          (2, 3, 5, 6))])  # fmt: skip
def test_integers(rng, kind, bits, groups, dtype):
    q, z, s, value = integers(rng, bits, groups, dtype, low=0)
    bias = {"bias": np.ones(N)}
    tensors = named("l", written(kind, q, z, s, bits) | bias)
    w = ck.linear(tensors, "l", format=FORMAT, config=config(kind, bits, groups, symmetric=False))
    assert (w.mode, w.bits, w.scales.dtype) == ("affine", bits, F32)
    assert w.group_size == (32 if groups == 8 else 128)
    if dtype is F32:
        close(w, value, s, bits)
    else:
        check(w, value, (F32, dtype))
    # Symmetric: the stored dtype holds scales and biases.
    half = np.full_like(z, 2 ** (bits - 1))
    tensors = named("l", written(kind, q, None, s, bits))
    w = ck.linear(tensors, "l", format=FORMAT, config=config(kind, bits, groups, symmetric=True))
    assert w.scales.dtype == w.biases.dtype == dtype
    if dtype is F32:
        close(w, affine(q, half, s), s, bits)
    else:
        check(w, affine(q, half, s), (F32, dtype))


@pytest.mark.parametrize("bits", [3, 4])
def test_zero_points_of_part_of_a_word(rng, bits):
    """N whose zero points end within a word."""
    q, z, s = rng.integers(0, 2**bits, (21, 64)), rng.integers(0, 2**bits, (21, 2)), None
    s = rng.standard_normal((21, 2)).astype(BF16)
    value = (q - np.repeat(z, 32, 1)) * np.repeat(s.astype(F64), 32, 1)
    tensors = named("l", write_pack_quantized(q, z, s, bits))
    about = config("pack-quantized", bits, 2, symmetric=False, k=64)
    check(ck.linear(tensors, "l", format=FORMAT, config=about), value)


def test_one_scale_of_a_tensor(rng):
    q, _, s, _ = integers(rng, 8, 1, BF16)
    value = (q - 128) * F64(s[0, 0])
    about = config("int-quantized", 8, 1, symmetric=True, strategy="tensor")
    for scale in (s[0], s[0, 0]):
        tensors = named("l", write_int_quantized(q, None, scale, 8))
        check(ck.linear(tensors, "l", format=FORMAT, config=about), value)


@pytest.mark.parametrize("k", [192, 320])
def test_short_last_group(rng, k):
    """Groups of 128, of which the last has 64."""
    q, s = rng.integers(0, 16, (N, k)), rng.standard_normal((N, -(-k // 128))).astype(BF16)
    value = (q - 8) * np.repeat(s.astype(F64), 128, 1)[:, :k]
    tensors = named("l", write_pack_quantized(q, None, s, 4))
    about = config("pack-quantized", 4, 2, symmetric=True, group_size=128)
    check(ck.linear(tensors, "l", format=FORMAT, config=about), value)


def test_act_order(rng):
    tensors, values = {}, []
    about = config("pack-quantized", 4, 4, symmetric=False, actorder="group")
    for name in "ab":
        q, z, s, _ = integers(rng, 4, 4, BF16)
        g_idx = rng.permutation(K).astype(np.int32) // 64
        values.append(affine(q, z, s, g_idx))
        tensors |= named(name, write_pack_quantized(q, z, s, 4, g_idx))
    w, order = ck.act_order(tensors, ["a", "b"], config=about, format=FORMAT)
    assert order.shape == (2, K)
    check(w, np.stack([v[:, o] for v, o in zip(values, order, strict=True)]))
    with pytest.raises(ValueError, match=r"a: \.weight_g_idx is not in order .*act_order, which"):
        ck.linear(tensors, "a", format=FORMAT, config=about)
    # It may say nothing, or be in order.
    q, z, s, value = integers(rng, 4, 4, BF16)
    for g_idx in (np.full(K, -1, np.int32), np.arange(K) // 64):
        tensors = named("a", write_pack_quantized(q, z, s, 4, g_idx))
        check(ck.linear(tensors, "a", format=FORMAT, config=about), value)
        w, order = ck.act_order(tensors, "a", config=about, format=FORMAT)
        check(w, value)
        same(order, np.arange(K, dtype=np.int32))
    del tensors["a.weight_g_idx"]
    with pytest.raises(ValueError, match=r"says actorder, but there is no \.weight_g_idx"):
        ck.linear(tensors, "a", format=FORMAT, config=about)
    with pytest.raises(ValueError, match=r"format='awq' is not one of 'gptq', 'compressed-tens"):
        ck.act_order(tensors, "a", config=about, format="awq")


def test_gate_and_up_of_experts(rng):
    tensors, values = {}, []
    about = config("pack-quantized", 4, 2, symmetric=True)
    prefixes = [(f"e.{i}.gate", f"e.{i}.up") for i in range(3)]
    for pair in prefixes:
        for name in pair:
            q, z, s, _ = integers(rng, 4, 2, BF16)
            values.append(affine(q, np.full_like(z, 8), s))
            tensors |= named(name, write_pack_quantized(q, None, s, 4))
    w = ck.experts(tensors, prefixes, format=FORMAT, config=about)
    check(w, np.stack(values).reshape(3, 2 * N, K))
    assert w.scales.dtype == BF16


def mx(rng, bits):
    """Tensors of one layer and its values."""
    q = rng.integers(0, 2**bits, (N, K)) & (0xBF if bits == 8 else 15)  # no NaN
    s = rng.integers(0, 255, (N, K // 32)).astype(np.uint8)
    e4m3 = np.arange(256).astype(np.uint8).view(E4M3).astype(F64)
    value = (e4m3 if bits == 8 else E2M1)[q] * np.repeat(2.0 ** (s.astype(int) - 127), 32, 1)
    if bits == 4:
        return {"weight_packed": pairs(q), "weight_scale": s}, value
    return {"weight": q.astype(np.uint8).view(E4M3), "weight_scale": s}, value


@pytest.mark.parametrize(("bits", "kind"), [(4, "mxfp4-pack-quantized"), (8, "mxfp8-quantized")])
def test_mx(rng, bits, kind):
    leaves, value = mx(rng, bits)
    weights = {"num_bits": bits, "type": "float", "group_size": 32, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": weights}
    named_by_config = {"format": kind, "config_groups": {"g": group}}
    mixed = {"format": "mixed-precision", "config_groups": {"g": group | {"format": kind}}}
    auto_round = {
        "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": bits,
        "group_size": 32, "data_type": "mx_fp",
    }  # fmt: skip
    with np.errstate(over="ignore"):
        for scale in (leaves["weight_scale"], leaves["weight_scale"].view("float8_e8m0fnu")):
            tensors = named("l", leaves | {"weight_scale": scale})
            for about in (None, {}, named_by_config, mixed, auto_round):
                w = ck.linear(tensors, "l", format=FORMAT, config=about)
                check(w, value)
                assert (w.mode, w.bits) == (f"mxfp{bits}", bits)


def test_which_group(rng):
    """A layer's own name goes before patterns, and those before all linear layers."""
    q, _, s, _ = integers(rng, 4, 2, BF16)
    value = (q - 8) * np.repeat(s.astype(F64), 128, 1)
    tensors = named("model.layers.0.up", write_pack_quantized(q, None, s, 4))
    right = config("pack-quantized", 4, 2, symmetric=True)["quantization_config"]["config_groups"]
    right, wrong = right["group_0"]["weights"], {"num_bits": 8, "group_size": 32}

    def read(**targets):
        groups = {
            name: {"targets": entries, "weights": right if name == "right" else wrong}
            for name, entries in targets.items()
        }
        about = {"format": "pack-quantized", "config_groups": groups}
        return ck.linear(tensors, "model.layers.0.up", format=FORMAT, config=about)

    check(read(wrong=["Linear"], right=["re:.*up$"]), value)
    check(read(wrong=["re:.*up$", "Linear"], right=["model.layers.0.up"]), value)
    check(read(wrong=["re:.*down$"], right=["Linear"]), value)
    # As other releases of the model call it.
    check(read(wrong=["Linear"], right=["model.language_model.layers.0.up"]), value)
    check(read(wrong=["Linear"], right=["re:language_model[.]model[.]layers"]), value)
    check(read(right=["QuantizedLinear"]), value)
    with pytest.raises(ValueError, match="config_groups 'right' and 'wrong' both name it, and dif"):
        read(right=["Linear"], wrong=["Linear"])
    with pytest.raises(ValueError, match="config_groups 'right', 'wrong' do not name it"):
        read(right=["a"], wrong=["b"])


Q, Z = np.zeros((32, 256), np.int64), np.full((32, 2), 8)
S = np.ones((32, 2), BF16)
PACKED, ZEROS = write_pack_quantized(Q, None, S, 4), write_pack_quantized(Q, Z, S, 4)
INT8 = write_int_quantized(Q, None, S, 8)
SYM = {"symmetric": True}
# Kind, tensors, changes of them and of the config's weights, and the error.
ERRORS = [
    ("pack-quantized", PACKED, {}, {"num_bits": None},
     "config says no num_bits, without which integers cannot be read: pass the checkpoint's "
     "config.json, whose config_groups say it"),
    ("pack-quantized", PACKED, {}, {"num_bits": 7},
     "config says num_bits=7, expected 2 or 3 or 4 or 5 or 6 or 8"),
    ("pack-quantized", PACKED, {}, {"num_bits": 8},
     ".weight_packed has shape (32, 32), but .weight_shape is (32, 256) and config says "
     "num_bits=8"),
    # Versions before packed 10 codes of 3 bits into a word, and left 2 bits of it.
    ("pack-quantized", PACKED, {"weight_packed": np.zeros((32, 26), np.int32)}, {"num_bits": 3},
     ".weight_packed has shape (32, 26), but .weight_shape is (32, 256) and config says "
     "num_bits=3"),
    ("pack-quantized", PACKED, {"weight_shape": np.array([32, 255])}, {},
     ".weight_shape has K = 255, not a multiple of 32"),
    ("pack-quantized", PACKED, {"weight_shape": np.array([31, 256])}, {},
     ".weight_packed has shape (32, 32), but .weight_shape is (31, 256) and config says "
     "num_bits=4"),
    ("pack-quantized", PACKED, {}, {"group_size": 64},
     "scales have 2 groups, but K is 256 and config says group_size=64"),
    ("pack-quantized", PACKED, {}, {"group_size": None},
     "config says no group_size, and 2 groups of K=256 may be of 128 to 255 channels: pass the "
     "size that the layer was quantized with, such as 'group_size': 128 in the weights of its "
     "config_groups"),
    ("pack-quantized", PACKED, {}, {"group_size": "128"},
     "config says group_size='128', expected a size or -1"),
    ("pack-quantized", PACKED, {}, {"strategy": "channel"},
     ".weight_scale has shape (32, 2), expected (N, K/group_size) of strategy='channel'"),
    ("pack-quantized", PACKED, {}, {"strategy": "block"},
     "config says strategy='block', expected 'tensor' or 'channel' or 'group'"),
    ("pack-quantized", PACKED, {}, {"type": "float"}, "config says type='float', expected 'int'"),
    ("pack-quantized", PACKED, {}, {"symmetric": False},
     "config says symmetric=False, but there is no .weight_zero_point"),
    ("pack-quantized", ZEROS, {}, SYM,
     "config says symmetric=True, but there is a .weight_zero_point"),
    ("pack-quantized", ZEROS, {"weight_zero_point": np.zeros((4, 1), np.int32)},
     {"symmetric": False}, ".weight_zero_point has 1 groups, but scales have 2"),
    ("pack-quantized", PACKED, {"weight_scale": S * BF16(np.inf)}, {},
     ".weight_scale hold values whose products with 4-bit codes are not exact in float32"),
    ("pack-quantized", PACKED, {"weight_scale": (S * 9000).astype(F16)}, {},
     ".weight_scale hold values too large for zero points in float16"),
    ("pack-quantized", PACKED, {"weight_scale": S.astype(F64)}, {},
     "l.weight_scale must be float32 or bfloat16 or float16, got dtype float64"),
    ("pack-quantized", PACKED, {"weight_shape": None}, {},
     "no tensor 'l.weight_shape', which format 'compressed-tensors' (pack-quantized) needs"),
    ("int-quantized", INT8, {"weight": INT8["weight"][:, :40]}, {"num_bits": 8},
     ".weight has K = 40, not a multiple of 32"),
    ("int-quantized", INT8, {}, {}, ".weight holds codes of more than 4 bits"),
    ("int-quantized", INT8, {"weight": INT8["weight"].astype(np.int16)}, {},
     "l.weight must be int8, got dtype int16"),
    ("int-quantized", PACKED, {}, {},
     "no tensor 'l.weight', which format 'compressed-tensors' (int-quantized) needs: its tensors "
     "are those of 'compressed-tensors' (pack-quantized)"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "tensors", "changed", "weights", "message"), ERRORS)
def test_errors(kind, tensors, changed, weights, message):
    tensors = {k: v for k, v in named("l", tensors | changed).items() if v is not None}
    about = config(kind, 4, 2, **{"symmetric": None, **weights})
    with pytest.raises((ValueError, TypeError)) as error:
        ck.linear(tensors, "l", format=FORMAT, config=about)
    where = "" if message.startswith("l.") else "l: "
    assert str(error.value) == f"jgg.checkpoints.linear: {where}{message}"


MX = {
    4: {"weight_packed": np.zeros((8, 24), np.uint8), "weight_scale": np.ones((8, 1), np.uint8)},
    8: {"weight": np.zeros((8, 40), E4M3), "weight_scale": np.ones((8, 1), np.uint8)},
}


@pytest.mark.parametrize(
    ("bits", "kind", "leaf", "k"),
    [(4, "mxfp4-pack-quantized", "weight_packed", 48), (8, "mxfp8-quantized", "weight", 40)],
)
def test_mx_of_no_whole_groups(bits, kind, leaf, k):
    weights = {"num_bits": bits, "type": "float", "group_size": 32}
    about = {"format": kind, "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    with pytest.raises(ValueError, match=rf"l: \.{leaf} has K = {k}, not a multiple of 32"):
        ck.linear(named("l", MX[bits]), "l", format=FORMAT, config=about)


def test_a_group_of_another_format():
    group = {"targets": ["Linear"], "format": "int-quantized", "weights": {"num_bits": 4}}
    about = {"format": "pack-quantized", "config_groups": {"g": group}}
    message = "config contradicts itself: format='pack-quantized', and 'int-quantized' of its group"
    with pytest.raises(ValueError, match=message):
        ck.linear(named("l", PACKED), "l", format=FORMAT, config=about)


def test_needs_config():
    for tensors in (PACKED, INT8):
        with pytest.raises(ValueError, match="config says no num_bits, without which integers"):
            ck.linear(named("l", tensors), "l", format=FORMAT)
