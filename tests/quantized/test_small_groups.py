"""Affine groups of 16 and float32 scales: what other files do not try by their parameters."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import GPU_KERNELS
from device_runs import run
from meshes import mesh_of, put
from qmm_problems import ANY, FEW, HOPPER, SCALED, needs

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose, samples

BITS = (2, 3, 4, 5, 6, 8)
SIZES = np.array([7, 0, 9, 3], np.int32)
# Bits, group size, dtype of scales, and of x.
CASES = [
    (bits, group, scales, x)
    for i, bits in enumerate(BITS)
    for j, (group, scales) in enumerate(
        ((16, "bfloat16"), (16, "float32"), (32, "float32"), (128, "float32"), (16, "float16"))
    )
    for x in (("bfloat16", "float16", "float32")[(i + j) % 3],)
]


@pytest.fixture(params=["reference", "cpu", *GPU_KERNELS])
def implementation(request) -> str:
    return needs(request.param)


def units(w, dtype, count):
    """``count`` rows of ones in places of K, and their columns of ``w``, rounded once."""
    columns = np.linspace(0, w.shape[-1] - 1, count).astype(int)
    x = jnp.asarray(np.eye(w.shape[-1])[columns], dtype)
    return x, oracle.dequantize(w, jnp.dtype(dtype))[:, columns].T


@pytest.mark.parametrize(("bits", "group", "scales", "x_dtype"), CASES)
@pytest.mark.one_in(8)
def test_the_weight_is_rounded_once(rng, implementation, bits, group, scales, x_dtype):
    """To x's dtype, from the float32 value that its scales and biases give."""
    q = oracle.random_quantized(rng, (24, 256), "affine", bits, group, scales)
    x, want = units(q, x_dtype, 12)
    f = functools.partial(jgg.quantized_matmul, implementation=implementation)
    np.testing.assert_array_equal(oracle.f64(f(x, q)), oracle.f64(want))


def test_float32_scales_have_gradients(rng):
    """Beside bfloat16 x, in float32: against float64 sums over the rows of each group."""
    q = oracle.random_quantized(rng, (4, 8, 96), "affine", 3, 16, "float32")
    x = oracle.random(rng, (19, 96), "bfloat16")
    y = oracle.random(rng, (19, 8), "float32")

    def loss(scales, biases):
        w = dataclasses.replace(q, scales=scales, biases=biases)
        out = jgg.grouped_qmm(x, w, jnp.asarray(SIZES), preferred_element_type="float32")
        return (out * y).sum()

    ds, db = jax.jit(jax.grad(loss, (0, 1)))(q.scales, q.biases)
    assert ds.dtype == db.dtype == jnp.float32
    ends = np.cumsum(SIZES)
    rows = [slice(end - size, end) for size, end in zip(SIZES, ends, strict=True)]
    dw = np.stack([oracle.f64(y)[of].T @ oracle.f64(x)[of] for of in rows])
    in_groups = (4, 8, 6, 16)
    oracle.assert_close(db, dw.reshape(in_groups).sum(-1), tolerance=1e-5)
    codes = oracle.codes(q).reshape(in_groups)
    oracle.assert_close(ds, (dw.reshape(in_groups) * codes).sum(-1), tolerance=1e-5)


def test_vmap(rng):
    """Of weights, and of products, quantized along either axis."""
    w = oracle.random(rng, (2, 16, 32), "bfloat16")
    q = jgg.quantize(w, bits=5, group_size=16)
    mapped = jax.vmap(lambda w: jgg.quantize(w, bits=5, group_size=16))(w)
    jax.tree.map(np.testing.assert_array_equal, mapped, q)
    np.testing.assert_array_equal(jax.vmap(jgg.dequantize)(q), jgg.dequantize(q))
    for transpose_w, k in ((True, 32), (False, 16)):
        x = oracle.random(rng, (2, 5, k), "bfloat16")
        f = functools.partial(jgg.quantized_matmul, transpose_w=transpose_w)
        values = oracle.f64(jgg.dequantize(q))
        values = values.swapaxes(-1, -2) if transpose_w else values
        oracle.assert_close(jax.vmap(f)(x, q), oracle.f64(x) @ values)


def test_float32_w_has_float32_scales(rng):
    """And the same codes, whatever dtype scales are stored in."""
    w = oracle.random(rng, (8, 64), "bfloat16")
    narrow = jgg.quantize(w, group_size=16, bits=2)
    wide = jgg.quantize(w.astype("float32"), group_size=16, bits=2)
    assert (narrow.scales.dtype, wide.scales.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(narrow.weight, wide.weight)
    np.testing.assert_array_equal(narrow.scales, wide.scales.astype("bfloat16"))
    np.testing.assert_array_equal(narrow.biases, wide.biases.astype("bfloat16"))


def test_words_are_whole():
    """Sixteen codes of 3 or 5 bits end within a word."""
    w = np.zeros((4, 48), np.float32)
    assert jgg.quantize(w, bits=6, group_size=16).shape == (4, 48)
    why = r"K a multiple of group_size=16, and of 32 for whole words"
    with pytest.raises(ValueError, match=why):
        jgg.quantize(w, bits=3, group_size=16)
    zeros = np.zeros((4, 3), np.float32)
    q = jgg.Quantized(np.zeros((4, 5), np.uint32), zeros, zeros, mode="affine", bits=3,
                      group_size=16)  # fmt: skip
    why = r"K a multiple of group_size=16, of 32 for whole words, and bits=3"
    with pytest.raises(ValueError, match=why):
        jgg.dequantize(q)


@pytest.mark.parametrize("k", [128, 192])
def test_words_stay_whole_on_each_device(rng, k):
    """Two groups of 3 bits share a word: 12 of them are divided in 2 or 3, not in 4."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    q = oracle.random_quantized(rng, (4, 8, k), "affine", 3, 16)
    x = oracle.random(rng, (19, k))
    mesh = mesh_of((4,), ("d",), jax.sharding.AxisType.Auto)
    scales, biases = put(mesh, (q.scales, q.biases), None, None, "d")
    whole = put(mesh, q)
    sharded = dataclasses.replace(whole, scales=scales, biases=biases)
    got = jax.jit(jgg.grouped_qmm)(put(mesh, x), sharded, put(mesh, jnp.asarray(SIZES)))
    oracle.assert_close(got, oracle.grouped_qmm(x, q, SIZES))


def test_prepacked_float32_scales(rng):
    """Values stay, and so do products."""
    q = oracle.random_quantized(rng, (4, 64, 128), "affine", 4, 16, "bfloat16")
    packed = jgg.prepack(q, scales_dtype=jnp.float32, strict=True)
    assert (packed.layout, packed.scales.dtype) == ("sm90", jnp.uint32)
    np.testing.assert_array_equal(jgg.dequantize(packed), jgg.dequantize(q, "float32"))
    x = oracle.random(rng, (19, 128), "bfloat16")
    oracle.assert_close(
        jgg.grouped_qmm(x, packed, jnp.asarray(SIZES)), oracle.grouped_qmm(x, q, SIZES)
    )
    # bfloat16 words are half as many.
    wrong = dataclasses.replace(packed, scales=packed.scales[..., :-64])
    with pytest.raises(ValueError, match=r"which jgg\.prepack did not make"):
        jgg.dequantize(wrong)


def problem(**changes):
    return dataclasses.replace(samples.SAMPLES["grouped_qmm"].make("cuda", "bfloat16"), **changes)


def test_hopper_says_what_it_lacks():
    p, why = problem(group_size=16), "has no groups of 16 codes in mode 'affine'"
    found = [choose.cannot(k, p) for k in choose.KERNELS["qmm"] if k.name == "sm90"]
    assert any(re.search(re.escape(why), str(reason)) for reason in found), found
    sm80 = [choose.cannot(k, p) for k in choose.KERNELS["qmm"] if k.name == "sm80"]
    assert None in sm80  # that of linear weights


# ---- kernels -----------------------------------------------------------------------------------


def biases_far_from(q, factors):
    """The biases of ``q`` times ``factors``: of every size beside the scales."""
    biases = np.asarray(q.biases).astype(np.float64) * factors / 2**20
    return jnp.asarray(biases.astype(np.float32).astype(q.biases.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "scales"),  # test_qmm.py has bfloat16 scales of more codes
    [(16, "bfloat16"), *((g, s) for g in (16, 32, 64, 128) for s in ("float32", "float16"))],
)
@pytest.mark.parametrize("bits", BITS)
def test_every_kernel(rng, bits, group, scales):
    """Few rows and many, K of every remainder, halves of a gate that begin anywhere, either axis,
    and scales so far apart that no fused multiply-add does."""
    unit = max(group, 32 if bits % 2 else 16)
    of_gate = lambda halves: halves[0] / (1 + np.exp(-halves[0])) * halves[1]
    for k, n in ((unit, 3 * unit), (3 * unit, 6 * unit), (640, 5 * unit)):
        q = oracle.random_quantized(rng, (5, 96, k), "affine", bits, group, scales)
        along = oracle.random_quantized(rng, (5, 24, n), "affine", bits, group, scales)
        exponents = 2.0 ** rng.integers(-30, 30, q.scales.shape[-1])
        far = dataclasses.replace(q, biases=biases_far_from(q, exponents))
        for x_dtype in ("bfloat16", "float16", "float32"):
            for sizes in ((5, 0, 8, 1, 2), (70, 3, 0, 129, 40)):
                sizes = np.array(sizes)
                x = oracle.random(rng, (sizes.sum() + 3, k), x_dtype)
                y = oracle.random(rng, (sizes.sum() + 3, 24), x_dtype)
                f = functools.partial(
                    jgg.grouped_qmm, preferred_element_type="float32", implementation="sm80"
                )

                @jax.jit
                def products(x, y, q, far, along, sizes, f=f):
                    gated = f(y, along, sizes, transpose_w=False, activation="swiglu")
                    return (f(x, q, sizes), f(x, far, sizes), f(x, q, sizes, activation="swiglu"),
                            f(y, along, sizes, transpose_w=False), gated)  # fmt: skip

                found, kernels = run(products, x, y, q, far, along, jnp.asarray(sizes))
                few = sizes.sum() < 20 and x_dtype == "bfloat16" and scales != "float16"
                few = few and k % (32 if bits == 8 else 64) == 0
                assert sum(FEW in name for name in kernels) == (3 if few else 0), kernels
                assert sum(ANY in name for name in kernels) == (2 if few else 5), kernels
                want = oracle.grouped_qmm(x, q, sizes)
                turned = oracle.grouped_qmm(y, along, sizes, transpose_w=False)
                oracle.assert_close(found[0], want, k=k)
                oracle.assert_close(
                    found[1], oracle.grouped_qmm(x, far, sizes), k=k, tolerance=3e-6
                )
                oracle.assert_close(found[2], of_gate(np.split(want, 2, 1)), tolerance=1e-4)
                oracle.assert_close(found[3], turned, k=24)
                oracle.assert_close(found[4], of_gate(np.split(turned, 2, 1)), tolerance=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("packs", [False, True])
def test_on_hopper(rng, packs):
    """Scales multiply sums, but for few rows of a weight as it is stored. The gradient comes from
    the generic kernels."""
    q = oracle.random_quantized(rng, (4, 128, 256), "affine", 4, 16, "float32")
    w = jgg.prepack(q) if packs else q
    x = oracle.random(rng, (19, 256), "bfloat16")
    out, kernels = run(jax.jit(jgg.grouped_qmm), x, w, jnp.asarray(SIZES))
    assert any((SCALED if packs else FEW) in name for name in kernels), kernels
    oracle.assert_close(out, oracle.grouped_qmm(x, q, SIZES))
    f = lambda x: jgg.grouped_qmm(x, w, jnp.asarray(SIZES)).astype("float32").sum()
    dx = jax.jit(jax.grad(f))(x)
    ones = np.ones((19, 128))
    oracle.assert_close(dx, oracle.grouped_qmm(ones, q, SIZES, transpose_w=False))


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "scales"), [
    (16, "bfloat16"), (16, "float16"), (16, "float32"), (32, "float32"), (64, "float32"),
    (128, "float32"),
])  # fmt: skip
@pytest.mark.parametrize("bits", BITS)
def test_prepack_kernel(rng, bits, group, scales):
    """Bit for bit, as defined; and back."""
    from jax_groupgemm._quantized import prepack

    q = oracle.random_quantized(rng, (3, 128, 384), "affine", bits, group, scales)
    got, want = (f(q) for f in (prepack._packed_alone, prepack._prepack))
    scales = np.asarray(got.scales)
    np.testing.assert_array_equal(got.weight, want.weight)
    np.testing.assert_array_equal(scales.view(np.uint32), np.asarray(want.scales).view(np.uint32))
    back = prepack.unpacked(got)
    for leaf in ("weight", "scales", "biases"):
        np.testing.assert_array_equal(getattr(back, leaf), getattr(q, leaf))
