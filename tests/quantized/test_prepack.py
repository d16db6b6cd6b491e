"""prepack: the same values in another layout, wherever a Quantized may go."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import GPU_KERNELS
from qmm_problems import needs

import jax_groupgemm as jgg
from jax_groupgemm._quantized import array, prepack

# Mode, bits, group size.
AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = [("nvfp4", 4, 16), ("mxfp4", 4, 32), ("mxfp8", 8, 32), *AFFINE]
#: Not bit for bit: test_prepack_fp8.py.
FP8 = ("fp8", 8, 128)
KERNELS = [f for f in FORMATS if f[0] != "mxfp8"]  # that prepack has a kernel for


@pytest.fixture(params=["reference", *(k for k in GPU_KERNELS if k.values[0] == "sm90")])
def implementation(request) -> str:
    return needs(request.param)


def weight(rng, mode, bits, group_size, shape=(3, 128, 256)):
    """Every code and every scale byte, NaN included; but mxfp8 groups of scale 2^127 have no NaN
    code."""
    if mode == "affine":
        return oracle.random_quantized(rng, shape, mode, bits, group_size, jnp.bfloat16)
    scales = rng.integers(0, 256, (*shape[:-1], shape[-1] // group_size), dtype=np.uint8)
    codes = rng.integers(0, 256, (*scales.shape, group_size * bits // 8), dtype=np.uint8)
    if mode == "mxfp8":
        nan = codes % 128 == 127
        none = (scales == 254) | (rng.integers(2, size=scales.shape) > 0)
        codes[nan & none[..., None]] = 5
    weight = codes.view(np.uint32).reshape(*shape[:-1], -1)
    return jgg.Quantized(
        jnp.asarray(weight), jnp.asarray(scales), mode=mode, bits=bits, group_size=group_size
    )


def ordinary(rng, mode, bits, group_size, shape):
    w = oracle.random(rng, shape, jnp.bfloat16)
    return jgg.quantize(w, mode=mode, bits=bits, group_size=group_size, contract=-1)


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
@pytest.mark.one_in(8)
def test_same_values(rng, mode, bits, group_size):
    w = weight(rng, mode, bits, group_size)
    packed = jgg.prepack(w)
    assert (packed.layout, packed.shape) == ("sm90", w.shape)
    assert packed.weight.size == w.weight.size
    expected, got = oracle.f64(jgg.dequantize(w)), oracle.f64(jgg.dequantize(packed))
    np.testing.assert_array_equal(got, expected)
    assert jgg.prepack(packed) is not None
    assert jgg.prepack(packed).layout == "sm90"


def test_nan_of_mxfp8(rng):
    """Scales come back, of groups with NaN codes too; one of 2^127 then is NaN."""
    w = weight(rng, "mxfp8", 8, 32, (1, 256, 64))
    codes = np.array(w.weight).view(np.uint8).reshape(256, 2, 32)
    codes[:, :, 7] = 0x7F
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 2))
    w = dataclasses.replace(
        w, weight=jnp.asarray(codes.reshape(1, 256, 64).view(np.uint32)), scales=scales[None]
    )
    got = prepack.unpacked(jgg.prepack(w))
    want = np.where(scales == 254, 255, scales)
    np.testing.assert_array_equal(np.asarray(got.scales)[0], want)
    whole = np.asarray(got.weight).view(np.uint8).reshape(256, 2, 32)
    np.testing.assert_array_equal(whole[:254], codes[:254])
    values = np.asarray(jgg.dequantize(got, "float32"))[0]
    assert np.isnan(values[254:]).all()
    assert np.isnan(values[:, 7::32]).all()


@pytest.mark.parametrize("which", ["code", "scale"])
@pytest.mark.one_in(2)
def test_nan_spreads(rng, implementation, which):
    """Over its column of the product, and no further."""
    w = ordinary(rng, "mxfp8", 8, 32, (2, 128, 256))
    leaf = np.array(w.weight if which == "code" else w.scales)
    leaf.view(np.uint8)[1, 70, 100 if which == "code" else 3] = 0x7F if which == "code" else 0xFF
    name = "weight" if which == "code" else "scales"
    w = dataclasses.replace(w, **{name: jnp.asarray(leaf)})
    for sizes in ([5, 3], [90, 200]):
        x = oracle.random(rng, (sum(sizes), 256), jnp.bfloat16)
        f = jax.jit(functools.partial(jgg.grouped_qmm, implementation=implementation))
        out = oracle.f64(f(x, jgg.prepack(w), jnp.array(sizes)))
        expected = np.zeros(out.shape, bool)
        expected[sizes[0] :, 70] = True
        np.testing.assert_array_equal(np.isnan(out), expected)


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"), [*AFFINE, *(("affine", bits, 16) for bits in (2, 3, 6))]
)
@pytest.mark.one_in(8)
def test_round_trip(rng, mode, bits, group_size):
    """Words, not only values: any codes, scales of any bits, NaN included."""
    w = weight(rng, mode, bits, group_size)
    any_words = rng.integers(0, 2**32, w.weight.shape, dtype=np.uint32)
    for dtype in ("bfloat16", "float16", "float32"):
        word = np.uint32 if dtype == "float32" else np.uint16
        any_scales = rng.integers(0, 2**16, (2, *w.scales.shape), word) * word(40503)
        scales, biases = jax.lax.bitcast_convert_type(jnp.asarray(any_scales), jnp.dtype(dtype))
        w = dataclasses.replace(w, weight=jnp.asarray(any_words), scales=scales, biases=biases)
        if dtype == "float32":
            packed = jgg.prepack(w, scales_dtype=dtype)
            assert packed.scales.size == 2 * w.scales.size
        else:
            packed = prepack._packed(w, prepack._PREPACK)
        assert packed.layout == "sm90"
        got = prepack.unpacked(array.checked("test", "w", packed))
        for leaf in ("weight", "scales", "biases"):
            bits_of = lambda q, name=leaf: np.asarray(getattr(q, name)).view(np.uint8)
            np.testing.assert_array_equal(bits_of(got), bits_of(w), leaf)
        assert (got.layout, got.bits, got.group_size) == ("linear", bits, group_size)


OTHERS = [
    ((2, 60, 64), "bfloat16", {"mode": "mxfp8"},
     "its shape is (2, 60, 64), in which N and K are not multiples of 64"),
    ((2, 60, 64), "bfloat16", {},
     "its shape is (2, 60, 64), in which N and K are not multiples of 64"),
    ((2, 64, 96), "bfloat16", {"mode": "mxfp4"},
     "its shape is (2, 64, 96), in which N and K are not multiples of 64"),
    ((64,), "bfloat16", {"mode": "nvfp4"},
     "its shape is (64,) with axis=-1, not (..., N, K) with axis=-1"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype", "form", "why"), OTHERS)
def test_others_stay(rng, shape, dtype, form, why):
    """And it says why."""
    w = jgg.quantize(oracle.random(rng, shape, dtype), **form, contract=-1)
    with pytest.warns(UserWarning, match=re.escape(f"jgg.prepack: w is returned as it is: {why}")):
        same = jgg.prepack(w)
    assert same.layout == "linear"
    jax.tree.map(np.testing.assert_array_equal, same, w)
    with pytest.raises(ValueError, match=re.escape(f"has no layout for the fast kernels: {why}")):
        jgg.prepack(w, strict=True)


def test_other_layouts_stay(rng):
    x = oracle.random(rng, (64, 64), "bfloat16")
    grouped = jgg.nvfp4_quantize(x, axis=0, group_sizes=jnp.array([40, 24]))
    with pytest.warns(UserWarning, match="its layout is 'grouped', not 'linear'"):
        assert jgg.prepack(grouped).layout == "grouped"
    rows = dataclasses.replace(jgg.quantize(x, mode="nvfp4", contract=-1), axis=-2)
    with pytest.warns(UserWarning, match=r"with axis=-2, not \(\.\.\., N, K\) with axis=-1"):
        assert jgg.prepack(rows) is not None
    # There is nothing to lay out.
    for w in (jgg.quantize(x[:0]), jgg.prepack(jgg.quantize(x, contract=-1))):
        assert jgg.prepack(w, strict=True).layout == w.layout


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scales_dtype", [jnp.bfloat16, "bfloat16", jnp.float16])
@pytest.mark.one_in(4)
def test_scales_dtype(rng, dtype, scales_dtype):
    """Scales and biases are rounded once, codes are the same."""
    w = jgg.quantize(oracle.random(rng, (2, 64, 128), dtype))
    packed = jgg.prepack(w, scales_dtype=scales_dtype, strict=True)
    rounded = dataclasses.replace(
        w, scales=w.scales.astype(scales_dtype), biases=w.biases.astype(scales_dtype)
    )
    assert packed.layout == "sm90"
    jax.tree.map(np.testing.assert_array_equal, packed, jgg.prepack(rounded))
    np.testing.assert_array_equal(
        jgg.dequantize(packed, "float32"), jgg.dequantize(rounded, "float32")
    )
    # It says nothing of other modes, nor of what is packed.
    for other in (packed, jgg.quantize(oracle.random(rng, (64, 64)), mode="mxfp4", contract=-1)):
        again = jgg.prepack(other, scales_dtype=scales_dtype)
        jax.tree.map(np.testing.assert_array_equal, again, jgg.prepack(other))
    why = "scales_dtype=int32 is not None, bfloat16, float16 or float32"
    with pytest.raises(ValueError, match=why):
        jgg.prepack(w, scales_dtype="int32")


def test_scales_dtype_of_a_checkpoint():
    """AWQ's scales, numpy arrays of float32."""
    ones = np.ones((2, 64), np.float16)
    words = np.zeros((128, 8), np.int32)
    tensors = {"a.qweight": words, "a.qzeros": words[:2], "a.scales": ones}
    w = jgg.checkpoints.linear(tensors, "a", format="awq")
    for dtype in (None, jnp.bfloat16, jnp.float16):
        assert jgg.prepack(w, scales_dtype=dtype, strict=True).layout == "sm90"


def test_damage_is_noticed(rng):
    w = jgg.prepack(ordinary(rng, "nvfp4", 4, 16, (2, 64, 64)))
    with pytest.raises(ValueError, match=r"which jgg\.prepack did not make"):
        jgg.dequantize(dataclasses.replace(w, scales=w.scales[..., :-1]))
    wide = jgg.prepack(ordinary(rng, "affine", 5, 64, (2, 64, 64)))
    with pytest.raises(ValueError, match=r"has shapes \(\(2, 1, 1, 768\), \(2, 1, 1, 64\)\)"):
        jgg.dequantize(dataclasses.replace(wide, bits=6))
    with pytest.raises(TypeError, match="is uint32"):
        jgg.dequantize(dataclasses.replace(w, scales=w.scales.astype(jnp.int32)))


# Kernels take every format and tile; the reference, which does not know the layout, one.
PRODUCTS = [
    ("reference", "nvfp4", 4, 16, 20),
    ("reference", "mxfp8", 8, 32, 20),
    ("reference", *FP8, 20),
    *(("reference", "affine", bits, 64, 20) for bits in (2, 3, 5, 6, 8)),
    *(
        pytest.param("sm90", *form, mean, marks=kernel.marks)
        for kernel in GPU_KERNELS
        if kernel.values[0] == "sm90"
        for form in (*FORMATS, FP8)
        for mean in (1, 8, 20, 40, 130, 200, 400)
    ),
]


@pytest.mark.parametrize(("implementation", "mode", "bits", "group_size", "mean"), PRODUCTS)
@pytest.mark.one_in(6)
def test_products(rng, implementation, mode, bits, group_size, mean):
    needs(implementation)
    sizes = np.array([0, mean, 2 * mean - 1, 1, 0])
    w = ordinary(rng, mode, bits, group_size, (len(sizes), 192, 384))
    x = oracle.random(rng, (int(sizes.sum()) + 5, 384), jnp.bfloat16)
    f = jax.jit(functools.partial(jgg.grouped_qmm, implementation=implementation))
    expected = oracle.grouped_mm(x, jgg.dequantize(w, jnp.bfloat16).swapaxes(1, 2), sizes)
    oracle.assert_close(f(x, jgg.prepack(w), jnp.array(sizes)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "bits", "group_size"), [*FORMATS, FP8])
@pytest.mark.parametrize("fused", [False, True])
def test_parts_of_k(rng, mode, bits, group_size, fused):
    """Few tiles of much k, which thread blocks share out: an odd number of slices of 64, and rows
    for boxes of 8, 16 and 32."""
    needs("sm90")
    k = 64 * (65 if group_size <= 64 else 66)
    sizes = np.array([20, 0, 1, 9, 0, 3, 0, 16])
    w = ordinary(rng, mode, bits, group_size, (len(sizes), 192, k))
    x = oracle.random(rng, (int(sizes.sum()) + 5, k), jnp.bfloat16)
    bias = oracle.random(rng, (len(sizes), 192), jnp.bfloat16) if fused else None
    f = jax.jit(
        lambda x, w, s: jgg.grouped_qmm(x, w, s, bias=bias, implementation="sm90"),
    )
    expected = oracle.grouped_mm(x, jgg.dequantize(w, jnp.bfloat16).swapaxes(1, 2), sizes)
    if fused:
        expected[: sizes.sum()] += np.repeat(oracle.f64(bias), sizes, axis=0)
    out = f(x, jgg.prepack(w), jnp.array(sizes))
    oracle.assert_close(out, expected)
    np.testing.assert_array_equal(out, f(x, jgg.prepack(w), jnp.array(sizes)))


@pytest.mark.parametrize("rows", [8, 24, 40, 256])
@pytest.mark.parametrize(
    ("implementation", "mode", "bits", "group_size"),
    [
        *(("reference", "affine", bits, 32) for bits in (3, 8)),
        *(pytest.param("sm90", *form, marks=pytest.mark.gpu) for form in FORMATS),
    ],
)
@pytest.mark.one_in(6)
def test_decoded_values(rng, implementation, mode, bits, group_size, rows):
    """Rows of the identity: the weight's values, bit for bit."""
    needs(implementation)
    w = ordinary(rng, mode, bits, group_size, (1, 128, 256))
    x = jnp.eye(256, dtype=jnp.bfloat16)[:rows]
    f = jax.jit(functools.partial(jgg.grouped_qmm, implementation=implementation))
    expected = oracle.f64(jgg.dequantize(w, jnp.bfloat16))[0].T[:rows]
    np.testing.assert_array_equal(oracle.f64(f(x, jgg.prepack(w), jnp.array([rows]))), expected)


@pytest.mark.parametrize("activation", [pytest.param("silu", marks=pytest.mark.weekly), "swiglu"])
def test_epilogue(rng, implementation, activation):
    sizes = jnp.array([3, 0, 70, 8])
    w = ordinary(rng, "nvfp4", 4, 16, (4, 256, 128))
    scale = jnp.array([0.5, 2.0, 1.0, 4.0], jnp.float32)
    w = jgg.Quantized(w.weight, w.scales, None, scale, mode="nvfp4", bits=4, group_size=16)
    x = oracle.random(rng, (90, 128), jnp.bfloat16)
    bias = oracle.random(rng, (4, 256), jnp.bfloat16)
    row_scale = oracle.random(rng, (90,), jnp.float32)
    f = lambda w, i: jax.jit(
        lambda x, w, s: jgg.grouped_qmm(
            x, w, s, bias=bias, activation=activation, row_scale=row_scale, implementation=i
        )
    )(x, w, sizes)
    oracle.assert_close(f(jgg.prepack(w), implementation), oracle.f64(f(w, "reference")))


def test_transformations(rng, implementation):
    sizes = jnp.array([5, 0, 9])
    w = ordinary(rng, "affine", 4, 64, (3, 128, 192))
    packed = jgg.prepack(w)
    x = oracle.random(rng, (4, 20, 192), jnp.bfloat16)
    f = lambda x, w: jgg.grouped_qmm(x, w, sizes, implementation=implementation)
    loss = lambda x, w: jnp.sum(f(x, w).astype(jnp.float32) ** 2)
    for transformed in (
        jax.vmap(f, (0, None)),
        jax.vmap(jax.grad(loss), (0, None)),
        lambda x, w: jax.vmap(f, (0, 0))(
            x, jax.tree.map(lambda a: jnp.broadcast_to(a, (4, *a.shape)), w)
        ),
    ):
        expected = oracle.f64(jax.jit(transformed)(x, w))
        oracle.assert_close(jax.jit(transformed)(x, packed), expected)


@pytest.mark.parametrize("shape", [pytest.param((), marks=pytest.mark.weekly), (3,)])
def test_gradient_of_global_scale(rng, implementation, shape):
    """That of the weight as it was."""
    sizes = jnp.array([5, 0, 9])
    w = ordinary(rng, "nvfp4", 4, 16, (3, 64, 128))
    packed = jgg.prepack(w)
    x = oracle.random(rng, (20, 128), jnp.bfloat16)
    scale = jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32)

    def loss(scale, w, **options):
        w = dataclasses.replace(w, global_scale=scale)
        out = jgg.grouped_qmm(
            x, w, sizes, preferred_element_type="float32", implementation=implementation, **options
        )
        return jnp.sin(out).sum()

    fused = functools.partial(loss, activation="gelu")
    for f, of in (
        (jax.grad(loss), scale),
        (jax.jit(jax.value_and_grad(fused)), scale),
        (jax.vmap(jax.grad(loss), (0, None)), jnp.stack([scale, 2 * scale])),
    ):
        got, want = (jax.tree.leaves(f(of, weight)) for weight in (packed, w))
        for g, e in zip(got, want, strict=True):
            oracle.assert_close(g, oracle.f64(e), tolerance=1e-5)  # other orders of sums


@pytest.mark.weekly
def test_gradient_of_leaves(rng):
    """Of a weight among parameters, whose other leaves are integers; exported likewise."""
    w = ordinary(rng, "nvfp4", 4, 16, (3, 64, 128))
    w = dataclasses.replace(w, global_scale=jnp.array([0.5, 2.0, 3.0], jnp.float32))
    packed = jgg.prepack(w)
    x, index = oracle.random(rng, (6, 128), jnp.bfloat16), jnp.array([2, 0, 2, 1, 7, 0])
    first = lambda w: jax.tree.map(lambda leaf: leaf[0], w)
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"jgg_{name}") for name in ("mm", "wgrad")]
    products = (
        lambda w: jgg.grouped_qmm(x, w, jnp.array([2, 0, 4])),
        lambda w: jgg.gather_qmm(x[:, None], w, rhs_indices=index),
        lambda w: jgg.quantized_matmul(x, first(w)),
    )
    for product in products:
        loss = lambda w, f=product: f(w).astype("float32").sum()
        gradient = jax.grad(loss, allow_int=True)
        want = gradient(w).global_scale
        got = gradient(packed)
        assert {got.weight.dtype, got.scales.dtype} == {jax.dtypes.float0}
        oracle.assert_close(got.global_scale, oracle.f64(want))
        exported = jax.export.export(jax.jit(loss), disabled_checks=checks)(packed)
        loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
        got = jax.grad(loaded.call, allow_int=True)(packed)
        oracle.assert_close(got.global_scale, oracle.f64(want))


def test_other_products(rng):
    w = ordinary(rng, "mxfp4", 4, 32, (3, 64, 128))
    packed = jgg.prepack(w)
    x = oracle.random(rng, (6, 128), jnp.bfloat16)
    index = jnp.array([2, 0, 2, 1, 7, 0])
    gathered = lambda w: jgg.gather_qmm(x[:, None, :], w, rhs_indices=index)
    oracle.assert_close(gathered(packed), oracle.f64(gathered(w)))
    one = jax.tree.map(lambda a: a[1], w)
    oracle.assert_close(
        jgg.quantized_matmul(x, jgg.prepack(one)), oracle.f64(jgg.quantized_matmul(x, one))
    )
    other = lambda w: jgg.grouped_qmm(x[:, :64], w, jnp.array([2, 2, 2]), transpose_w=False)
    oracle.assert_close(other(packed), oracle.f64(other(w)))


def test_cuda_lowering(rng):
    """One custom call; for what the kernel cannot read, the codes are put back in order."""
    w = jgg.prepack(ordinary(rng, "nvfp4", 4, 16, (3, 128, 192)))
    sizes, bias = jnp.array([2, 3, 1]), jnp.ones((3, 128), jnp.bfloat16)

    def calls(f, *args):
        text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        return re.findall(r"custom_call @(jgg_\w+)\(.*", text), text

    x = jnp.ones((8, 192), jnp.bfloat16)
    f = lambda x, w, b: jgg.grouped_qmm(x, w, sizes, bias=b, activation="swiglu")
    names, text = calls(f, x, w, bias)
    (line,) = re.findall(r"custom_call @jgg_qmm_packed.*", text)
    assert names == ["jgg_qmm_packed"]
    assert re.findall(r"tensor<(\w+)>", line)[-6:] == [
        "8x192xbf16", "3x2x3x512xui32", "3x2x3x64xui32", "3xi32", "3x128xbf16", "8x64xbf16",
    ]  # fmt: skip
    for attribute in ('mode = "nvfp4"', 'activation = "swiglu"', "bias = true", 'kind = "sizes"'):
        assert attribute in line, attribute
    plain = lambda x, w: jgg.grouped_qmm(x, w, sizes)
    five = jgg.prepack(ordinary(rng, "affine", 5, 32, (3, 128, 192)))
    names, text = calls(plain, x, five)
    assert names == ["jgg_qmm_packed"]
    assert "tensor<3x2x3x640xui32>, tensor<3x2x3x128xui32>" in text
    assert calls(plain, x.astype(jnp.float32), five)[0] == ["jgg_qmm_packed"]
    assert calls(plain, x.astype(jnp.float16), five)[0] == ["jgg_qmm_packed"]
    linear = jgg.quantize(jnp.ones((3, 128, 192), jnp.float16), bits=5, group_size=32)
    names, text = calls(plain, x.astype(jnp.float16), jgg.prepack(linear))
    assert names == ["jgg_qmm_packed"]
    assert "tensor<3x2x3x640xui32>, tensor<3x2x3x256xui16>" in text
    grad = jax.grad(lambda x, w: plain(x, w).astype(jnp.float32).sum())
    assert calls(grad, x, w)[0][-1] == "jgg_qmm_packed"
    wide = jgg.prepack(ordinary(rng, "nvfp4", 4, 16, (3, 192, 192)))  # a gate of 96 columns
    assert calls(f, x, wide, jnp.ones((3, 192), jnp.bfloat16))[0] == ["jgg_qmm"]
