"""FP8 layers of every writer, written from their definitions, with blocks that are cut."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_writers import BF16, E4M3, F32, F64, named, same, save

import jax_groupgemm as jgg

ck = jgg.checkpoints
N, K = 576, 200  # four blocks of rows and a half, one of columns and a part
FINE = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def codes(rng, n=N, k=K):
    bits = rng.integers(0, 256, (n, k)).astype(np.uint8)
    return np.where(bits & 0x7F == 0x7F, np.uint8(0), bits).view(E4M3)


def fine(rng, n=N, k=K):
    """A fine-grained layer, and its values."""
    q = codes(rng, n, k)
    s = rng.uniform(0.5, 2, (-(-n // 128), -(-k // 128))).astype(F32)
    spread = np.repeat(np.repeat(s, 128, 0), 128, 1)[:n, :k]
    return {"weight": q, "weight_scale_inv": s}, q.astype(F64) * spread


def check(q, value):
    assert q.mode == "fp8"
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(q))
    assert q.scales.dtype == F32
    same(np.asarray(jgg.dequantize(q)), value.astype(F32))


def test_fine_grained(rng, tmp_path):
    leaves, value = fine(rng)
    path = save(tmp_path / "a.safetensors", named("l", leaves))
    for config in (None, FINE, {"quantization_config": FINE, "hidden_size": 3}):
        q = ck.linear(ck.open(path), "l", format="fp8", config=config)
        check(q, value)
        assert q.block == (128, 128)
        assert q.scales.shape == (5, 2)
    powers = leaves["weight_scale_inv"].astype(ml_dtypes.float8_e8m0fnu)
    leaves = {"weight": leaves["weight"], "weight_scale_inv": powers}
    config = FINE | {"scale_fmt": "ue8m0"}
    q = ck.linear(named("l", leaves), "l", format="fp8", config=config)
    same(q.scales, powers.astype(F32))
    x = jnp.ones((3, K), jnp.float32)
    out = jgg.quantized_matmul(x, jax.tree.map(jnp.asarray, q))
    want = np.ones((3, K)) @ np.asarray(jgg.dequantize(q)).astype(F64).T
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-4 * abs(want).max())


def test_another_block_size(rng):
    q = codes(rng)
    s = rng.uniform(0.5, 2, (9, 4)).astype(F32)
    tensors = named("l", {"weight": q, "weight_scale_inv": s})
    got = ck.linear(tensors, "l", format="fp8", config=FINE | {"weight_block_size": [64, 64]})
    check(got, q.astype(F64) * np.repeat(np.repeat(s, 64, 0), 64, 1)[:, :K])


def test_gate_and_up_keep_their_scales(rng):
    (gate, gate_value), (up, up_value) = fine(rng, 256), fine(rng, 200)
    tensors = named("gate", gate) | named("up", up)
    q = ck.linear(tensors, ("gate", "up"), format="fp8", config=FINE)
    check(q, np.concatenate([gate_value, up_value]))
    assert q.scales.shape == (4, 2)
    several = ck.experts(tensors, [("gate", "up")] * 2, format="fp8", config=FINE)
    check(several, np.stack([np.concatenate([gate_value, up_value])] * 2))
    with pytest.raises(ValueError, match=r"^jgg\.checkpoints\.linear") as error:
        ck.linear(tensors, ("up", "gate"), format="fp8", config=FINE)
    assert str(error.value) == (
        "jgg.checkpoints.linear: up has 200 rows, which are not a multiple of 128: gate, joined to "
        "it, would begin within a block of scales. Read them one by one"
    )


def of_a_layer(rng, shape, dtype=F32):
    q, s = codes(rng), rng.uniform(0.5, 2, shape).astype(dtype)
    spread = s.astype(F64).reshape(-1, 1) if s.ndim else s.astype(F64)
    return {"weight": q, "weight_scale": s, "input_scale": F32(1)}, q.astype(F64) * spread


CHANNEL, TENSOR = {"strategy": "channel"}, {"strategy": "tensor"}


def groups(weights):
    weights = {"num_bits": 8, "type": "float", **weights}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"g": group}}  # fmt: skip


# Format, shape of scales, their dtype, config, and the block.
LAYERS = [
    ("compressed-tensors", (N, 1), BF16, groups(CHANNEL), (1, K)),
    ("compressed-tensors", (N, 1), F32, None, (1, K)),
    ("compressed-tensors", (1,), F32, groups(TENSOR), None),
    ("modelopt", (), F32, {"quant_algo": "FP8"}, None),
    ("modelopt", (N,), F32, {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, (1, K)),
    ("modelopt", (1,), F32, {"quant_algo": "MIXED_PRECISION",
                             "quantized_layers": {"l": {"quant_algo": "FP8"}}}, None),
    ("modelopt", (), F32, None, None),
    ("fp8", (), F32, {"quant_method": "fp8"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("format", "shape", "dtype", "config", "block"), LAYERS)
def test_a_scale_for_a_layer_or_a_row(rng, format, shape, dtype, config, block):
    leaves, value = of_a_layer(rng, shape, dtype)
    tensors = named("l", leaves)
    q = ck.linear(tensors, "l", format=format, config=config)
    check(q, value)
    assert q.block == block
    config = None if config and "quantized_layers" in config else config
    other, other_value = of_a_layer(rng, shape, dtype)
    tensors |= named("m", other)
    both = ck.linear(tensors, ("l", "m"), format=format, config=config)
    assert both.block == (1, K)
    check(both, np.concatenate([value, other_value]))
    stacked = ck.experts(tensors, ["l", "m"], format=format, config=config)
    assert stacked.block == block
    check(stacked, np.stack([value, other_value]))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("config", [None, FINE | {"weight_block_size": None}])
def test_a_scale_for_a_layer_under_the_name_of_blocks(rng, shape, config):
    """As transformers writes it without ``weight_block_size``, with its input's scale or none."""
    q, s = codes(rng), rng.uniform(0.5, 2, shape).astype(F32)
    leaves = {"weight": q, "weight_scale_inv": s}
    static = None if config is None else config | {"activation_scheme": "static"}
    for more, said in (({}, config), ({"activation_scale": F32(2)}, static)):
        got = ck.linear(named("l", leaves | more), "l", format="fp8", config=said)
        check(got, q.astype(F64) * s.astype(F64))
        assert got.block is None


def test_blocks_and_groups_of_compressed_tensors(rng):
    q = codes(rng)
    s = rng.uniform(0.5, 2, (5, 2)).astype(BF16)
    tensors = named("l", {"weight": q, "weight_scale": s})
    blocks = {"strategy": "block", "block_structure": [128, 128]}
    got = ck.linear(tensors, "l", format="compressed-tensors", config=groups(blocks))
    check(got, q.astype(F64) * np.repeat(np.repeat(s.astype(F64), 128, 0), 128, 1)[:N, :K])
    s = rng.uniform(0.5, 2, (N, 2)).astype(BF16)
    tensors = named("l", {"weight": q, "weight_scale": s})
    config = groups({"strategy": "group", "group_size": 100})
    got = ck.linear(tensors, "l", format="compressed-tensors", config=config)
    check(got, q.astype(F64) * np.repeat(s.astype(F64), 100, 1))
    assert got.block == (1, 100)


CODES, GRID = np.ones((8, 32), E4M3), np.ones((1, 1), F32)
ERRORS = [
    ("fp8", {"weight": CODES, "weight_scale_inv": np.ones((2, 1), F32)}, FINE,
     "l.weight_scale_inv has shape (2, 1), expected (N/128, K/128) = (1, 1)"),
    ("fp8", {"weight": CODES, "weight_scale_inv": np.ones((), F32)}, FINE,
     "l.weight_scale_inv has shape (), expected 2 axes (N/128, K/128)"),
    ("fp8", {"weight": CODES.astype(BF16), "weight_scale_inv": GRID}, FINE,
     "l.weight must be float8_e4m3fn, got dtype bfloat16"),
    ("fp8", {"weight": CODES, "weight_scale_inv": GRID}, FINE | {"modules_to_not_convert": ["l"]},
     "l: config says it is not quantized: modules_to_not_convert 'l'"),
    ("fp8", {"weight": CODES, "weight_scale_inv": GRID}, FINE | {"weight_block_size": 128},
     "l: config says weight_block_size=128, expected two sizes"),
    ("fp8", {"weight": CODES, "weight_scale_inv": GRID}, FINE | {"fmt": "e5m2"},
     "l: config says fmt='e5m2', expected 'e4m3' or 'float8_e4m3fn'"),
    ("fp8", {"weight": CODES}, FINE,
     "l: no tensor 'l.weight_scale_inv', which format 'fp8' (fine-grained) needs"),
    ("awq", {"weight": CODES, "weight_scale_inv": GRID}, None,
     "l: no tensor 'l.qweight', 'l.qzeros', 'l.scales', which format 'awq' needs: its tensors are "
     "those of 'fp8' (fine-grained)"),
    ("compressed-tensors", {"weight": CODES, "weight_scale": np.ones((8, 2), F32)}, groups(CHANNEL),
     "l: .weight_scale has shape (8, 2), expected (N, 1) = (8, 1)"),
    ("compressed-tensors", {"weight": CODES, "weight_scale": np.ones((8, 1), F32)}, groups(TENSOR),
     "l: .weight_scale has shape (8, 1), expected one number"),
    ("compressed-tensors", {"weight": CODES, "weight_scale": GRID}, groups({"strategy": "block"}),
     "l: config says strategy='block', and no block_structure, expected two sizes"),
    ("modelopt", {"weight": CODES, "weight_scale": np.ones((8, 2), F32)}, None,
     "l: .weight_scale has shape (8, 2), expected one number, or (N, 1) = (8, 1)"),
    ("modelopt", {"weight": CODES, "weight_scale": F32(1)}, {"quant_algo": "NVFP4"},
     "l: no tensor 'l.weight_scale_2', which format 'modelopt' (NVFP4) needs: its tensors are "
     "those of 'compressed-tensors' (float-quantized)"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "leaves", "config", "message"), ERRORS)
def test_errors(format, leaves, config, message):
    with pytest.raises((ValueError, TypeError)) as error:
        ck.linear(named("l", leaves), "l", format=format, config=config)
    assert str(error.value) == f"jgg.checkpoints.linear: {message}"
