"""GGUF's types as weights: values bit for bit those of the package ``gguf``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_writers import HALVES, TYPES, random_blocks, save

import jax_groupgemm as jgg

gguf = pytest.importorskip("gguf")
ck = jgg.checkpoints
F16, F32 = np.float16, np.float32
CODES = [kind for kind in HALVES if kind != "IQ4_NL"]
G, N, K = 3, 8, 512
SCALES = dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), "float16") | {
    "MXFP4": "uint8", "NVFP4": "uint8"
}  # fmt: skip


def truth(kind: str, raw) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


def same_bits(got, want, kind) -> None:
    """But the signs of affine zeros: ``q * scale + bias`` has no -0.0 where ``q - z`` has."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype == F32
    if "FP4" not in kind:
        got, want = got + F32(0), want + F32(0)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("kind", CODES)
def test_values(rng, tmp_path, kind):
    raw = random_blocks(rng, kind, N, K)
    tensors = ck.open(save(tmp_path / "m.gguf", {"l.weight": (kind, raw)}))
    w = ck.linear(tensors, "l", format="gguf", shape=(N, K))
    assert (w.mode, w.scales.dtype) == (kind.lower() if "FP4" in kind else "affine",
                                        SCALES.get(kind, "float32"))  # fmt: skip
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(w))
    same_bits(jgg.dequantize(w, F32), truth(kind, raw), kind)


def every_scale(kind: str, step: int) -> np.ndarray:
    """Blocks with every finite float16, or one of ``step``, beside random bits."""
    halves = np.arange(2**16, dtype=np.uint16)
    ends = np.array([0, 1, 2, 0x3FF, 0x400, 0x7BFF], np.uint16)  # of subnormals, and of all
    halves = np.concatenate([ends, ends | 0x8000, halves[::step]]).view(F16)
    halves = halves[np.isfinite(halves)]
    small = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}.get(kind, 1)
    halves = halves[np.abs(halves.astype(F32)) <= 65504 / small]
    rng = np.random.default_rng(2)
    raw = random_blocks(rng, kind, len(halves), TYPES[kind][1])
    for i, at in enumerate(HALVES[kind]):
        raw[:, at : at + 2] = np.roll(halves, 7919 * i)[:, None].view(np.uint8)
    return raw


@pytest.mark.parametrize("kind", [kind for kind in CODES if HALVES[kind]])
def test_values_of_every_scale(tmp_path, kind, request):
    raw = every_scale(kind, 1 if request.config.getoption("--weekly") else 37)
    tensors = ck.open(save(tmp_path / "m.gguf", {"l.weight": (kind, raw)}))
    w = ck.linear(tensors, "l", format="gguf")
    same_bits(jgg.dequantize(w, F32), truth(kind, raw), kind)


@pytest.mark.parametrize(("kind", "count"), [("MXFP4", 255), ("NVFP4", 128)])
def test_values_of_every_float8(tmp_path, kind, count):
    """A scale of 0x7F, NaN in E4M3, is ggml's zero."""
    raw = random_blocks(np.random.default_rng(3), kind, count, 64)
    blocks = raw.reshape(count, -1, TYPES[kind][2])
    blocks[..., : 4 if kind == "NVFP4" else 1] = np.arange(count)[:, None, None]
    tensors = ck.open(save(tmp_path / "m.gguf", {"l.weight": (kind, raw)}))
    w = ck.linear(tensors, "l", format="gguf")
    same_bits(jgg.dequantize(w, F32), truth(kind, raw), kind)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_what_the_package_quantizes(rng, tmp_path, kind):
    """A file that it writes, with metadata of its own; zeros and a row's ends among the values."""
    x = rng.standard_normal((G, N, K)).astype(F32)
    x[0, 0, :64] = 0
    raw = gguf.quants.quantize(x, number := gguf.GGMLQuantizationType[kind])
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_name("a model")
    writer.add_custom_alignment(64)
    writer.add_token_list(["<s>", "é", "▁the"])
    writer.add_token_scores([0.0, -1.5, 2.0])
    writer.add_add_bos_token(True)
    writer.add_tensor("blk.0.ffn_down_exps.weight", raw, raw_dtype=number)
    writer.add_tensor("output_norm.weight", x[0, 0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = ck.open(tmp_path / "m.gguf")
    about = dict(tensors.metadata)
    assert (about["general.architecture"], about["general.alignment"]) == ("llama", 64)
    assert about["tokenizer.ggml.tokens"] == ["<s>", "é", "▁the"]
    assert about["tokenizer.ggml.add_bos_token"] is True
    np.testing.assert_array_equal(about["tokenizer.ggml.scores"], F32([0, -1.5, 2]))
    np.testing.assert_array_equal(tensors["output_norm.weight"], x[0, 0])
    w = ck.experts(tensors, "blk.0.ffn_down_exps", format="gguf", shape=(G, N, K))
    assert w.shape == (G, N, K)
    same_bits(jgg.dequantize(w, F32), truth(kind, raw), kind)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_are_arrays(rng, tmp_path, kind):
    x = rng.standard_normal((G, N, K)).astype({"F32": F32, "F16": F16, "BF16": jnp.bfloat16}[kind])
    tensors = ck.open(save(tmp_path / "m.gguf", {"l.weight": x[0], "e.weight": x}))
    for got, want in (
        (ck.linear(tensors, "l", format="gguf"), x[0]),
        (ck.linear(tensors, ["l", "l"], format="gguf"), np.concatenate([x[0], x[0]])),
        (ck.experts(tensors, "e", format="gguf", shape=x.shape), x),
        (ck.experts(tensors, [["e", "e"]], format="gguf"), np.concatenate([x, x], 1)),
        (ck.experts(tensors, ["l", "l"], format="gguf"), np.stack([x[0], x[0]])),
    ):
        assert isinstance(got, np.ndarray)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "MXFP4", "NVFP4"])
def test_gate_and_up(rng, tmp_path, kind):
    """Joined, of stacked experts and of tensors for each; rows one after the other of a layer."""
    gate, up = random_blocks(rng, kind, G, N, K), random_blocks(rng, kind, G, 2 * N, K)
    tensors = {"b.ffn_gate_exps.weight": (kind, gate), "b.ffn_up_exps.weight": (kind, up)}
    for g in range(G):
        tensors[f"b.ffn_gate.{g}.weight"] = kind, gate[g]
        tensors[f"b.ffn_up.{g}.weight"] = kind, up[g]
    tensors = ck.open(save(tmp_path / "m.gguf", tensors))
    want = np.concatenate([truth(kind, gate), truth(kind, up)], 1)
    shape = (G, 3 * N, K)
    stacked = ck.experts(
        tensors, [["b.ffn_gate_exps", "b.ffn_up_exps"]], format="gguf", shape=shape
    )
    each = ck.experts(
        tensors, [[f"b.ffn_gate.{g}", f"b.ffn_up.{g}"] for g in range(G)], format="gguf",
        shape=shape,
    )  # fmt: skip
    for w in (stacked, each):
        assert w.shape == shape
        same_bits(jgg.dequantize(w, F32), want, kind)
    one = ck.experts(tensors, ["b.ffn_up_exps"], format="gguf")
    same_bits(jgg.dequantize(one, F32), truth(kind, up), kind)
    rows = ck.linear(tensors, ["b.ffn_gate.0", "b.ffn_up.1"], format="gguf", shape=(3 * N, K))
    same_bits(
        jgg.dequantize(rows, F32), np.concatenate([truth(kind, gate[0]), truth(kind, up[1])]), kind
    )


def test_a_scale_beside_nvfp4(rng, tmp_path):
    raw, scales = random_blocks(rng, "NVFP4", G, N, K), F32([0.5, 3, 0.7])
    other = random_blocks(rng, "NVFP4", G, N, K)
    tensors = {
        "e.weight": ("NVFP4", raw), "e.scale": scales, "f.weight": ("NVFP4", other),
        "f.scale": F32([2]), "l.weight": ("NVFP4", raw[1]), "l.scale": F32([0.7]),
        "l.input_scale": F32([9]), "l.bias": F32([1] * N),
    }  # fmt: skip
    tensors = ck.open(save(tmp_path / "m.gguf", tensors))
    want = truth("NVFP4", raw) * scales[:, None, None]
    np.testing.assert_array_equal(
        jgg.dequantize(ck.experts(tensors, "e", format="gguf"), F32), want
    )
    both = ck.experts(tensors, [["e", "f"]], format="gguf")
    assert both.global_scale.shape == (G, 2 * N)
    np.testing.assert_array_equal(
        jgg.dequantize(both, F32), np.concatenate([want, truth("NVFP4", other) * F32(2)], 1)
    )
    w = ck.linear(tensors, "l", format="gguf")
    np.testing.assert_array_equal(jgg.dequantize(w, F32), truth("NVFP4", raw[1]) * F32(0.7))


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, F16, F32])
def test_scales_dtype(rng, tmp_path, kind, dtype):
    raw = random_blocks(rng, kind, N, K)
    tensors = ck.open(save(tmp_path / "m.gguf", {"l.weight": (kind, raw)}))
    exact = ck.linear(tensors, "l", format="gguf")
    w = ck.linear(tensors, "l", format="gguf", scales_dtype=dtype)
    if exact.mode != "affine":
        assert w.scales.dtype == np.uint8
        return
    assert w.scales.dtype == w.biases.dtype == dtype
    np.testing.assert_array_equal(w.scales, exact.scales.astype(dtype))
    np.testing.assert_array_equal(w.biases, exact.biases.astype(dtype))
    q = (truth(kind, raw) - np.repeat(exact.biases.astype(F32), w.group_size, 1)).astype(np.float64)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0}[np.dtype(dtype).name]
    # Scales that are subnormal in float16 lose bits.
    lost = 2.0**-25 * 2**w.bits if dtype == F16 else 0
    bound = unit * (np.abs(q) + np.repeat(np.abs(exact.biases.astype(F32)), w.group_size, 1)) + lost
    value = truth(kind, raw)
    if kind in ("Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K") and dtype != F16:
        bound = unit * np.abs(value)
    error = np.abs(np.asarray(jgg.dequantize(w, F32)) - value.astype(np.float64))
    assert np.all(error <= bound * 1.001 + np.abs(value) * 2.0**-23)


def test_a_product(rng, tmp_path):
    raw = random_blocks(rng, "Q4_K", N, K)
    tensors = ck.open(save(tmp_path / "m.gguf", {"l.weight": ("Q4_K", raw)}))
    x = rng.standard_normal((5, K)).astype(F32)
    got = jgg.quantized_matmul(x, ck.linear(tensors, "l", format="gguf"))
    np.testing.assert_allclose(got, x @ truth("Q4_K", raw).T, rtol=2e-5, atol=2e-5)


def test_parts_of_a_tensor(rng, tmp_path, monkeypatch):
    """What is decoded in several parts is the same."""
    raw = random_blocks(rng, "Q5_K", G, N, K)
    tensors = ck.open(save(tmp_path / "m.gguf", {"e.weight": ("Q5_K", raw)}))
    whole = ck.experts(tensors, "e", format="gguf")
    monkeypatch.setattr("jax_groupgemm.checkpoints.gguf.CHUNK", 5 * K)
    jax.tree.map(np.testing.assert_array_equal, ck.experts(tensors, "e", format="gguf"), whole)
