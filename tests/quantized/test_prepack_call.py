"""The custom call of ``prepack``: where it is taken, also by products, what it is given, and on a
GPU what it makes, byte for byte."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered_calls import pretend_gpus
from test_prepack import KERNELS, ordinary
from test_prepack_host import any_bits
from test_quantize_call import calls, lowered, on_cpu, same_bytes

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose, extension


def spec(mode, group_size, *shape, bits=None):
    f = functools.partial(jgg.quantize, mode=mode, bits=bits, group_size=group_size, contract=-1)
    return jax.eval_shape(f, jnp.zeros(shape, jnp.bfloat16))


def names(function, *operands, **options) -> list[str]:
    return [call[0] for call in calls(lowered(functools.partial(function, **options), *operands))]


BUILT = ("80", "90a", "100a")


def live(monkeypatch, *capabilities):
    pretend_gpus(monkeypatch, capabilities, BUILT)


def test_operands_and_results():
    (call,) = calls(lowered(jgg.prepack, spec("nvfp4", 16, 2, 3, 128, 192)))
    static = (
        "quantized = {biases = false, bits = 4 : i32, global_scale = false, "
        'group_size = 16 : i32, layout = "linear", mode = "nvfp4"}'
    )
    results = ["12x3x512xui32", "12x3x64xui32"]
    assert call == ("jgg_prepack", ["768x24xui32", "768x12xui8"], results, static)
    (call,) = calls(lowered(jgg.prepack, spec("affine", 32, 64, 64)))
    assert call[1:3] == (
        ["64x8xui32", "64x2xbf16", "64x2xbf16"], ["1x1x512xui32", "1x1x128xui32"],
    )  # fmt: skip
    assert "biases = true" in call[3]
    (call,) = calls(lowered(jgg.prepack, spec("affine", 128, 64, 128, bits=5)))
    assert call[2] == ["1x2x640xui32", "1x1x64xui32"]
    (call,) = calls(lowered(jgg.prepack, spec("mxfp4", 32, 64, 128)))
    assert call[2] == ["1x2x512xui32", "1x2x32xui32"]


def test_batch(rng):
    """One call of more rows."""
    q = jax.eval_shape(lambda q: jax.tree.map(lambda a: a[None], q), spec("mxfp4", 32, 5, 64, 128))
    for axis in (0, 1):
        ((_, operands, _, _),) = calls(lowered(jax.vmap(jgg.prepack, axis), q))
        assert operands == ["320x16xui32", "320x4xui8"]
    w = ordinary(rng, "nvfp4", 4, 16, (2, 64, 128))
    same_bytes(jax.vmap(jgg.prepack)(w), jgg.prepack(w))


def test_not_taken():
    """Elsewhere, of nothing, and where XLA cuts arrays."""
    assert jgg.prepack(jgg.quantize(jnp.ones((0, 64, 64)), mode="nvfp4")).layout == "linear"
    q = jgg.quantize(jnp.ones((4, 64, 64), jnp.bfloat16), mode="nvfp4", contract=-1)
    assert not calls(lowered(jgg.prepack, q, platform="cpu"))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:2])
    sharded = jax.device_put(q, NamedSharding(mesh, P("x")))
    assert not names(jgg.prepack, sharded)
    same_bytes(jax.device_get(jax.jit(jgg.prepack)(sharded)), jax.device_get(jgg.prepack(q)))


MANY, PACKED = 3 * choose._REPACK_FROM_ROWS, ["jgg_prepack", "jgg_qmm_packed"]


def grouped_qmm(x, w, **options):
    return jgg.grouped_qmm(x, w, jnp.array([2, 3, 4]), **options)


@pytest.mark.parametrize(("mode", "bits", "group_size"), KERNELS)
@pytest.mark.one_in(7)
def test_products_of_many_rows_repack(monkeypatch, mode, bits, group_size):
    live(monkeypatch, 90)
    x = lambda t: jnp.ones((t, 384), jnp.bfloat16)
    w = spec(mode, group_size, 3, 128, 384, bits=bits)
    many = MANY if bits < 6 else 3 * choose._REPACK_FROM_ROWS_WIDE
    assert names(grouped_qmm, x(many), w) == PACKED
    assert names(grouped_qmm, x(many), w, activation="swiglu") == PACKED
    assert names(grouped_qmm, x(many - 1), w) == ["jgg_qmm"]
    assert names(grouped_qmm, x(many).astype("float32"), w) == PACKED  # in bfloat16 parts
    # What the kernel of packed weights does not take, and who asks for another.
    assert names(grouped_qmm, x(many), w, implementation="sm80") == ["jgg_qmm"]
    assert names(grouped_qmm, x(many), w, implementation="sm90") == PACKED
    assert names(grouped_qmm, x(many), w, implementation="reference") == []
    wide = spec(mode, group_size, 3, 192, 384, bits=bits)  # a gate of 96 columns
    assert names(grouped_qmm, x(many), wide, activation="swiglu") == ["jgg_qmm"]
    narrow = spec(mode, group_size, 3, 96, 384, bits=bits)
    assert names(grouped_qmm, x(many), narrow) == ["jgg_qmm"]


def test_rows_that_count(monkeypatch):
    """Each matrix of a batch has its own; with an offset, other groups have their part."""
    live(monkeypatch, 90)
    x, w = jnp.ones((2, MANY // 2, 128), jnp.bfloat16), spec("nvfp4", 16, 3, 64, 128)
    assert names(jax.vmap(grouped_qmm, (0, None)), x, w) == PACKED
    many = jax.eval_shape(lambda q: jax.tree.map(lambda a: jnp.stack([a, a]), q), w)
    assert names(jax.vmap(grouped_qmm), x, many) == ["jgg_qmm"]
    offset = lambda x, w: jgg.grouped_qmm(x, w, jnp.ones(6, jnp.int32), group_offset=jnp.int32(3))
    assert names(offset, x[0], w) == ["jgg_qmm"]
    assert names(offset, jnp.ones((2 * MANY, 128), jnp.bfloat16), w) == PACKED
    assert names(jgg.quantized_matmul, x[0], spec("nvfp4", 16, 64, 128)) == PACKED


@pytest.mark.parametrize("capabilities", [(), (80,), (80, 90), (100,)])
def test_on_hopper_only(monkeypatch, capabilities):
    live(monkeypatch, *capabilities)
    x, w = jnp.ones((MANY, 128), jnp.bfloat16), spec("nvfp4", 16, 3, 64, 128)
    assert names(grouped_qmm, x, w) == ["jgg_qmm"]


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize(("mode", "group_size"), [("affine", 64), ("nvfp4", 16), ("mxfp4", 32)])
def test_every_gpu_reads_packed_weights_of_four_bits(monkeypatch, capability, mode, group_size):
    """On Hopper, where that kernel is named."""
    live(monkeypatch, capability)
    generic = {"implementation": "sm80"} if capability == 90 else {}
    packed = functools.partial(jax.eval_shape, jgg.prepack)
    x, w = jnp.ones((9, 128), jnp.bfloat16), packed(spec(mode, group_size, 3, 128, 128))
    found = lambda x, w, f=grouped_qmm, **options: calls(
        lowered(functools.partial(f, **options, **generic), x, w)
    )
    for options in ({}, {"activation": "swiglu", "bias": jnp.ones((3, 128))}):
        (call,) = found(x, w, **options)
        assert call[0] == "jgg_qmm_packed"
        assert 'way = "generic"' in call[3]
    unpacked = lambda *args, **options: [c[0] for c in found(*args, **options)] == ["jgg_qmm"]
    assert unpacked(x, packed(spec("affine", 64, 3, 128, 128, bits=8)))
    assert unpacked(x.astype(jnp.float16), w) == (mode == "affine")  # whose scales are bfloat16
    dx = lambda x, w, **options: jax.grad(lambda x: grouped_qmm(x, w, **options).sum())(x)
    assert found(x, w, dx)[-1][0] == "jgg_qmm"
    rows = x.astype(jnp.float32)
    assert found(rows, w)[-1][0] == ("jgg_qmm" if mode == "affine" else "jgg_qmm_packed")


def nvfp4_product(x, w, **options):
    return jgg.nvfp4_grouped_mm(x, w, jnp.array([2, 3, 4]), **options)


@pytest.mark.parametrize("bias", [None, (3, 64)])
def test_nvfp4_grouped_mm(monkeypatch, bias):
    live(monkeypatch, 90)
    options = {} if bias is None else {"bias": jnp.ones(bias)}
    x, w = (lambda t: spec("nvfp4", 16, t, 128)), spec("nvfp4", 16, 3, 64, 128)
    found = lambda x, **more: sorted(names(nvfp4_product, x, w, **options, **more))
    ordered = lambda x, **options: (
        "{ordered = true" in lowered(lambda x, w: nvfp4_product(x, w, **options), x, w)
    )
    assert found(x(MANY)) == ["jgg_dequantize", "jgg_qmm"]
    assert found(x(MANY), implementation="sm80") == ["jgg_dequantize", "jgg_qmm"]
    assert found(x(MANY), implementation="reference") == []
    # The columns of x are put in order as they are decoded, if they are whole 128.
    assert ordered(x(9))
    assert ordered(x(9), implementation="sm90")
    assert not ordered(x(9), implementation="sm80")
    x, w = (lambda t: spec("nvfp4", 16, t, 192)), spec("nvfp4", 16, 3, 64, 192)
    assert not ordered(x(9))
    assert found(x(MANY)) == ["jgg_dequantize", *PACKED]
    assert found(x(MANY - 1)) == ["jgg_dequantize", "jgg_qmm"]


def test_gradients_of_repacked_weights(monkeypatch):
    """Differentiated is the product as it was written: its transpose packs what is stored."""
    live(monkeypatch, 90)
    x, w = jnp.ones((MANY, 128), jnp.bfloat16), spec("affine", 64, 3, 64, 128)
    loss = lambda x, w: grouped_qmm(x, w).astype(jnp.float32).sum()
    found = names(jax.value_and_grad(loss, (0, 1), allow_int=True), x, w)
    assert [name for name in found if "wgrad" not in name] == 2 * PACKED


# ---- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "bits", "group_size"), KERNELS)
def test_bytes(rng, mode, bits, group_size):
    for n, k in ((64, 64), (64, 128), (192, 640), (2880, 2880), (4096, 1408)):
        if k % group_size == 0:
            q = any_bits(rng, mode, bits, group_size, n, k)
            assert names(jgg.prepack, q) == ["jgg_prepack"]
            same_bytes(jax.device_get(jgg.prepack(q)), on_cpu(jgg.prepack, q))


@pytest.mark.gpu
def test_over_four_gib_of_elements(rng):
    """More than 2^32 elements and 65535 blocks."""
    rows, k = 65_664, 65_600
    q = any_bits(rng, "mxfp4", 4, 32, 128, k)
    several = jax.jit(lambda q: jax.tree.map(lambda a: jnp.tile(a, (rows // 128, 1)), q))(q)
    assert rows * k > 2**32
    got = jax.jit(jgg.prepack)(several)
    want = on_cpu(jgg.prepack, q)
    for at in (0, rows // 64 - 2):
        same_bytes(jax.device_get(jax.tree.map(lambda a, at=at: a[at : at + 2], got)), want)


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "bits", "group_size"), KERNELS)
def test_repacked_products(rng, mode, bits, group_size):
    if 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    sizes = jnp.array([2700, 3, 3400])
    w = ordinary(rng, mode, bits, group_size, (3, 192, 384))
    x = oracle.random(rng, (6200, 384), jnp.bfloat16)
    f = lambda x, w: jgg.grouped_qmm(x, w, sizes)
    assert names(f, x, w) == PACKED
    out = jax.jit(f)(x, w)
    expected = oracle.grouped_mm(x, jgg.dequantize(w, jnp.bfloat16).swapaxes(1, 2), sizes)
    oracle.assert_close(out, expected)
    np.testing.assert_array_equal(out, jax.jit(f)(x, jgg.prepack(w)))
