"""``shape=``: layers that are not of the shape that a model has."""

from typing import Any

import numpy as np
import pytest
from checkpoint_writers import (
    BF16,
    E4M3,
    F16,
    F32,
    K,
    N,
    check,
    integers,
    named,
    nvfp4,
    save,
    write_awq,
    write_gptq,
    write_int_quantized,
    write_mlx,
)

import jax_groupgemm as jgg

ck = jgg.checkpoints
GENERAL = ": is it another layer's prefix, or another model's config?"


def refused(call, *args, error: type[Exception] = ValueError, **options) -> str:
    with pytest.raises(error) as caught:
        call(*args, **options)
    return str(caught.value).removeprefix(f"jgg.checkpoints.{call.__name__}: ")


def mlx(rng, name, bits, size):
    q, z, s, value = integers(rng, bits, K // size)
    s = s.astype(F32)
    return named(name, write_mlx(q, bits, s, (-z * s).astype(F32))), value


def test_mlx_entry_under_another_name(rng):
    """8 bits by 32 have the shapes of 4 bits by 64 and twice the K; only the model's shape says."""
    tensors, value = mlx(rng, "lm_head", 8, 32)
    config = {"bits": 4, "group_size": 64, "model.head": {"bits": 8, "group_size": 32}}
    linear = lambda **options: ck.linear(tensors, "lm_head", format="mlx", **options)
    linear.__name__ = "linear"
    assert linear(config=config).shape == (N, 2 * K)  # what the argument is for
    assert refused(linear, config=config, shape=(N, K)) == (
        "lm_head: has shape (32, 512) by config's bits=4, group_size=64, expected shape=(32, 256), "
        "as of bits=8, group_size=32: config may have them under another name of this layer. If it "
        "was quantized so, add 'lm_head': {'bits': 8, 'group_size': 32} to config's quantization"
    )
    own = {**config, "lm_head": {"bits": 8, "group_size": 32}}
    check(linear(config=own, shape=(N, K)), value)
    assert refused(linear, config=own, shape=(N, 2 * K)) == (
        "lm_head: has shape (32, 256) by config's bits=8, group_size=32, expected shape=(32, 512), "
        "as of bits=4, group_size=64: config may have them under another name of this layer. If it "
        "was quantized so, add 'lm_head': {'bits': 4, 'group_size': 64} to config's quantization"
    )
    # No bits give that K, and no bits give other rows.
    for shape in ((N, K + 32), (N + 8, 2 * K), (N + 8, K + 32)):
        assert refused(linear, config=config, shape=shape) == (
            f"lm_head: has shape (32, 512) by config's bits=4, group_size=64, expected {shape=}"
            + GENERAL
        )
    # Bits of another product: the shape says which of those that fit are the layer's.
    wrong = {"bits": 8, "group_size": 64}
    assert "as of bits=2, group_size=128 or bits=4" in refused(linear, config=wrong, shape=(N, K))
    assert refused(linear, config=wrong, shape=(N, 2 * K)).startswith(
        "lm_head: has shape (32, 256) by config's bits=8, group_size=64, expected shape=(32, 512), "
        "as of bits=4, group_size=64: "
    )
    three = {"bits": 6, "group_size": 128}
    assert "not a multiple of 6 bits by 128" in refused(linear, config=three, shape=(N, K))


def test_the_shape_says_more_than_other_tensors(rng):
    """A norm of another length does not count beside it."""
    name = "model.layers.0.mlp.up_proj"
    tensors, value = mlx(rng, name, 4, 64)
    tensors["model.layers.0.input_layernorm.weight"] = np.ones(K // 2, F16)
    config = {"bits": 4, "group_size": 64}
    assert "input_layernorm.weight has 128" in refused(
        ck.linear, tensors, name, format="mlx", config=config
    )
    check(ck.linear(tensors, name, format="mlx", config=config, shape=(N, K)), value)


def layers(rng):
    """Formats, the tensors of one layer and a config."""
    q, z, s, _ = integers(rng, 8, 2)
    q4, z4, s4, _ = integers(rng, 4, 2)
    group = {"weights": {"num_bits": 8, "type": "int", "group_size": 128}}
    return {
        "awq": (write_awq(q4, z4, s4), None),
        "gptq": (write_gptq(q4, z4, s4, 4, v2=True), {"bits": 4, "group_size": 128,
                                                      "checkpoint_format": "gptq_v2"}),
        "modelopt": (nvfp4(rng, "modelopt", 1.0)[0], None),
        "compressed-tensors": (write_int_quantized(q, z, s, 8), {"config_groups": {"g": group}}),
        "fp8": ({"weight": q.astype(E4M3), "weight_scale_inv": np.ones((1, 2), BF16)}, None),
    }  # fmt: skip


@pytest.mark.parametrize("format", ["awq", "gptq", "modelopt", "compressed-tensors", "fp8"])
def test_each_format(rng, format):
    leaves, config = layers(rng)[format]
    tensors = named("a", leaves) | named("b", leaves)
    about: dict[str, Any] = {"format": format, "config": config}
    assert ck.linear(tensors, "a", shape=(N, K), **about).shape == (N, K)
    assert ck.linear(tensors, ["a"], shape=list(np.array([N, K])), **about).shape == (N, K)
    assert ck.experts(tensors, ["a", "b"], shape=(2, N, K), **about).shape == (2, N, K)
    for prefix in ("a", ["a"]):
        for shape in ((N, 2 * K), (K, N)):
            said = refused(ck.linear, tensors, prefix, shape=shape, **about)
            assert said == f"a: has shape (32, 256), expected {shape=}{GENERAL}"
    said = refused(ck.experts, tensors, ["a", "b"], shape=(2, N, 64), **about)
    assert said == f"a: has shape (32, 256), expected shape=(32, 64){GENERAL}"
    said = refused(ck.experts, tensors, ["a", "b"], shape=(3, N, K), **about)
    assert said == "2 prefixes, expected shape=(3, 32, 256): pass one for each expert"


def test_joined_rows(rng):
    leaves, _ = nvfp4(rng, "modelopt", 1.0)
    tensors = {}
    for name in "abc":
        tensors |= named(name, leaves)
    about: dict[str, Any] = {"format": "modelopt"}
    assert ck.linear(tensors, ["a", "b"], shape=(2 * N, K), **about).shape == (2 * N, K)
    pairs = [("a", "b"), ("b", "c")]
    assert ck.experts(tensors, pairs, shape=(2, 2 * N, K), **about).shape == (2, 2 * N, K)
    assert refused(ck.linear, tensors, ["a", "b"], shape=(N, K), **about) == (
        "a and b have 64 rows together, expected shape=(32, 256): are these the layers to be "
        "joined?"
    )
    assert refused(ck.experts, tensors, [("a", "b", "c")], shape=(1, N, K), **about) == (
        "a and b and others have 96 rows together, expected shape=(32, 256): are these the layers "
        "to be joined?"
    )
    assert refused(ck.linear, tensors, ["a", "b"], shape=(2 * N, 64), **about) == (
        f"a: has shape (32, 256), expected shape=(32, 64){GENERAL}"
    )


def test_stacked_experts(rng, tmp_path):
    oss = {
        "down_proj_blocks": np.zeros((2, 8, 3, 16), np.uint8),
        "down_proj_scales": np.zeros((2, 8, 3), np.uint8),
    }
    modelopt = {
        "down_proj": np.zeros((2, 8, 48), np.uint8), "down_proj_weight_scale_2": F32(1),
        "down_proj_weight_scale": np.ones((2, 8, 6), E4M3),
    }  # fmt: skip
    one = write_mlx(rng.integers(0, 16, (8, 96)), 4, np.ones((8, 3), F16), np.ones((8, 3), F16))
    mlx = named("down_proj", {name: np.stack([x, x]) for name, x in one.items()})
    config = {"bits": 4, "group_size": 32}
    for format, tensors in (("gpt-oss", oss), ("modelopt", modelopt), ("mlx", mlx)):
        about: dict[str, Any] = {"format": format, "config": config if format == "mlx" else None}
        for source in (tensors, ck.open(save(tmp_path / "m.safetensors", tensors))):
            call = lambda shape, s=source, a=about: ck.experts(s, "down_proj", shape=shape, **a)
            assert call((2, 8, 96)).shape == (2, 8, 96)
            for shape in ((2, 8, 160), (2, 96, 8), (1, 8, 96)):
                by = " by config's bits=4, group_size=32" * (format == "mlx")
                with pytest.raises(ValueError, match="down_proj: has shape") as error:
                    call(shape)
                assert str(error.value) == (
                    f"jgg.checkpoints.experts: down_proj: has shape (2, 8, 96){by}, expected "
                    f"{shape=}{GENERAL}"
                )


def test_act_order(rng):
    q, z, s, _ = integers(rng, 4, 2)
    leaves = write_gptq(q, z, s, 4, v2=True, g_idx=np.arange(K, dtype=np.int32) % 2)
    tensors = named("a", leaves)
    about: dict[str, Any] = {
        "config": {"bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"}
    }
    assert ck.act_order(tensors, "a", shape=(N, K), **about)[0].shape == (N, K)
    assert ck.act_order(tensors, ["a"], shape=(1, N, K), **about)[0].shape == (1, N, K)
    for prefix, shape in (("a", (N, 64)), (["a"], (1, N, 64))):
        said = refused(ck.act_order, tensors, prefix, shape=shape, **about)
        assert said == f"a: has shape (32, 256), expected shape=(32, 64){GENERAL}"


def test_no_shape(rng):
    leaves, _ = nvfp4(rng, "modelopt", 1.0)
    tensors = named("a", leaves)
    for shape, error in (
        ((N,), ValueError), ((1, N, K), ValueError), ((N, 0), ValueError), ((), ValueError),
        (N, TypeError), ("NK", TypeError), ((N, float(K)), TypeError), ((True, K), TypeError),
    ):  # fmt: skip
        said = refused(ck.linear, tensors, "a", format="modelopt", shape=shape, error=error)
        assert said == f"shape={shape!r} is not (N, K), the sizes of a weight"
    said = refused(ck.experts, tensors, ["a"], format="modelopt", shape=(N, K))
    assert said == "shape=(32, 256) is not (G, N, K), the sizes of a weight"


def test_nothing_is_allocated_for_experts_of_another_shape(rng, monkeypatch):
    leaves, _ = nvfp4(rng, "modelopt", 1.0)
    tensors = named("a", leaves)
    monkeypatch.setattr(np, "empty", lambda *_: pytest.fail("allocated"))
    said = refused(ck.experts, tensors, ["a"] * 8, format="modelopt", shape=(8, N, 64))
    assert said.startswith("a: has shape (32, 256), expected shape=(32, 64)")
