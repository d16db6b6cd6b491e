"""prepack of mode "fp8": every block becomes one layout, whose kernels round values to bfloat16."""

import dataclasses
import functools
import re

import fp8_oracle
import host_program
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from host_program import pointer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from qmm_problems import needs
from test_direct_kernel import product

import jax_groupgemm as jgg
from jax_groupgemm._quantized import prepack

BLOCKS = [(128, 128), (1, 128), (1, 512), None, (128, 512), (48, 256), (7, 1000)]


def made(codes, scales, block, **options) -> jgg.Quantized:
    return jgg.Quantized(codes, scales, mode="fp8", bits=8, group_size=None, block=block, **options)  # pyright: ignore


def weight(rng, shape, block, nan: float = 0.0) -> jgg.Quantized:
    """Any codes, a share of which is NaN, and scales of all sizes that people use."""
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[codes % 128 == 127] -= 1
    codes[rng.random(shape) < nan] |= 0x7F
    size = lambda n, of: -(-n // of)
    scales: tuple = shape[:-2]
    if block is not None:
        scales = (*scales, *(size(n, of) for n, of in zip(shape[-2:], block, strict=True)))
    values = np.exp(rng.normal(size=scales) * 3 - 6).astype(np.float32)
    return made(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(values), block)


def raw(q) -> np.ndarray:
    return np.asarray(q.weight).view(np.uint8)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(192, 512), (2, 128, 512), (2, 1, 64, 512)])
@pytest.mark.one_in(3)
def test_round_trip(rng, block, shape):
    """Codes come back bit for bit, NaN too, and scales to 16 bits, or 15 where a code is NaN."""
    for nan in (0.0, 0.002):
        q = weight(rng, shape, block, nan)
        packed = jgg.prepack(q, strict=True)
        assert (packed.layout, packed.shape, packed.block) == ("sm90", q.shape, block)
        assert {packed.weight.dtype, packed.scales.dtype} == {jnp.dtype("uint32")}
        assert packed.weight.nbytes == q.weight.nbytes
        assert packed.scales.nbytes * 32 == packed.weight.nbytes
        got = prepack.unpacked(packed)
        assert (got.layout, got.block, got.group_size) == ("linear", block, q.group_size)
        np.testing.assert_array_equal(raw(got), raw(q))
        limit = 2.0 ** (-17 if nan == 0 else -15)
        np.testing.assert_allclose(got.scales, q.scales, rtol=limit)
        values, wanted = jgg.dequantize(packed), fp8_oracle.values(q)
        np.testing.assert_allclose(values, wanted, rtol=limit + 2.0**-23)
        if nan == 0:
            again = prepack.unpacked(jgg.prepack(got))
            np.testing.assert_array_equal(again.scales, got.scales)


def test_extreme_scales():
    """Small ones keep their bits, subnormals too; those from 2^40 on become infinite. NaN, zero and
    signs stay."""
    small = np.ldexp(np.float32(1.2345), [-126, -120, -60, -1, 20, 39]).astype(np.float32)
    special = np.array([0, np.inf, -np.inf, np.nan, -0.75, 2.0**40, 3e38], np.float32)
    scales = np.concatenate([small, special, np.ldexp(np.float32(1), [-127, -149])])
    scales = np.resize(scales.astype(np.float32), (64, 2))
    codes = np.full((64, 256), 0x38, np.uint8)
    for code in (0x38, 0x7F):
        codes[:, 3] = code
        got = prepack.unpacked(jgg.prepack(made(codes, scales, (1, 128)))).scales
        want = np.where(abs(scales) >= 2.0**40, np.copysign(np.inf, scales), scales)
        np.testing.assert_allclose(got, want, rtol=2.0**-15, atol=0)


STAY = [
    ((2, 60, 256), (1, 128), "e4m3fn",
     "its shape is (2, 60, 256), in which N is not a multiple of 64, or K of 128"),
    ((2, 64, 192), (1, 128), "e4m3fn",
     "its shape is (2, 64, 192), in which N is not a multiple of 64, or K of 128"),
    ((64, 256), (16, 64), "e4m3fn",
     "its blocks are (16, 64), whose columns are not a multiple of 128"),
    ((64, 256), (1, 128), "e5m2", "its codes are float8_e5m2, not float8_e4m3fn"),
    ((128,), (1, 128), "e4m3fn", "its shape is (128,) with axis=-1, not (..., N, K) with axis=-1"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "block", "element", "why"), STAY)
def test_others_stay(shape, block, element, why):
    """And it says why."""
    sizes = [-(-n // of) for n, of in zip(shape[-2:], block[-len(shape) :], strict=True)]
    scales = jnp.ones((*shape[:-2], *sizes))
    q = made(jnp.ones(shape, f"float8_{element}"), scales, block)
    with pytest.warns(UserWarning, match=re.escape(f"jgg.prepack: w is returned as it is: {why}")):
        same = jgg.prepack(q)
    assert same.layout == "linear"
    with pytest.raises(ValueError, match=re.escape(f"has no layout for the fast kernels: {why}")):
        jgg.prepack(q, strict=True)


def test_damage_is_noticed(rng):
    w = jgg.prepack(weight(rng, (2, 64, 256), (1, 128)))
    with pytest.raises(ValueError, match=r"has shapes \(\(2, 1, 4, 1024\), \(2, 1, 2, 64\)\)"):
        jgg.dequantize(dataclasses.replace(w, scales=w.scales[..., :-1]))


# ---- kernels, on the host ----------------------------------------------------------------------


def decoded(packed) -> np.ndarray:
    """What kernels make of a packed weight (N, K), in float32, by tiles."""
    decode = host_program.build_kernels("direct_kernel").decode_fp8_tile
    (n, k), out = packed.shape, np.empty(packed.shape, ml_dtypes.bfloat16)
    codes, scales = np.asarray(packed.weight), np.asarray(packed.scales)
    for i, j in np.ndindex(n // 64, k // 64):
        tile = np.empty((64, 64), out.dtype)
        leaves = map(np.ascontiguousarray, (codes[i, j], scales[i, j // 2]))
        decode(*map(pointer, leaves), pointer(tile))
        out[64 * i : 64 * (i + 1), 64 * j : 64 * (j + 1)] = tile
    return out.astype(np.float32) * np.float32(2.0**32)


def rounded(values) -> np.ndarray:
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


@host_program.needs_compiler
def test_decoded_values(rng):
    """Every code with many scales: float32 products rounded to bfloat16. Fewer than one in 1000 is
    the neighbour."""
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8), (1024, 256)).copy()
    codes[codes % 128 == 127] = 0x41
    scales = np.ldexp(rng.uniform(1, 2, (1024, 2)), rng.integers(-60, 30, (1024, 2)))
    q = made(codes, scales.astype(np.float32), (1, 128))
    got, want = decoded(jgg.prepack(q)), rounded(jgg.dequantize(q))
    place = lambda a: abs(a).view(np.int32) >> 16  # among bfloat16 numbers
    assert abs(place(got) - place(want)).max() <= 1
    assert (np.sign(got) == np.sign(want)).all()
    assert (got == want).mean() > 0.999
    # Scales that are bfloat16 numbers, as powers of two are, have no second part.
    exact = dataclasses.replace(q, scales=rounded(q.scales))
    np.testing.assert_array_equal(decoded(jgg.prepack(exact)), rounded(jgg.dequantize(exact)))


@host_program.needs_compiler
def test_decoded_nan():
    """A NaN makes all 128 codes of its row's block NaN, and so does a scale of NaN."""
    codes = np.full((64, 256), 0x3C, np.uint8)
    codes[5, 130], codes[6, 7] = 0x7F, 0xFF
    scales = np.ones((64, 2), np.float32)
    scales[9, 1] = np.nan
    got = np.isnan(decoded(jgg.prepack(made(codes, scales, (1, 128)))))
    want = np.zeros((64, 2), bool)
    want[[5, 6, 9], [1, 0, 1]] = True
    np.testing.assert_array_equal(got, want.repeat(128, 1))


@host_program.needs_compiler
@pytest.mark.parametrize("which", ["code", "scale"])
def test_nan_stays_in_its_column(rng, which):
    q, x = weight(rng, (2, 64, 256), (1, 128)), oracle.random(rng, (4, 256), "bfloat16")
    leaf = raw(q).copy() if which == "code" else np.array(q.scales)
    leaf[1, 7, 200 if which == "code" else 1] = 0xFF if which == "code" else np.nan
    q = dataclasses.replace(q, **{"weight" if which == "code" else "scales": leaf})
    kernel = host_program.build_kernels("direct_kernel").direct_kernel
    bad = np.zeros((4, 64), bool)
    bad[2:, 7] = True
    np.testing.assert_array_equal(np.isnan(product(kernel, x, q, (2, 2))), bad)
    out = jgg.grouped_qmm(x, jgg.prepack(q), jnp.array([2, 2]))
    np.testing.assert_array_equal(np.isnan(oracle.f64(out)), bad)


# ---- products ----------------------------------------------------------------------------------

SIZES = jnp.array([3, 0, 5])


def loss(x, w, **options):
    return jnp.square(jgg.grouped_qmm(x, w, SIZES, **options)).astype(jnp.float32).sum()


@pytest.mark.parametrize("block", [(128, 128), None, (1, 128)])
def test_products(rng, block):
    """All of them, and their derivatives, where no kernel runs."""
    q, x = weight(rng, (3, 64, 256), block), oracle.random(rng, (9, 256))
    index = jnp.array([2, 0, 2, 1, 7, 0, 1, 1, 0])
    for f in (
        lambda x, w: jgg.grouped_qmm(x, w, SIZES),
        lambda x, w: jgg.grouped_qmm(x[:, :64], w, SIZES, transpose_w=False),
        lambda x, w: jgg.gather_qmm(x[:, None], w, rhs_indices=index),
        lambda x, w: jgg.quantized_matmul(x, w[1]),
        jax.vmap(lambda x, w: jgg.quantized_matmul(x, w), (None, 0)),
        jax.grad(loss),
        lambda x, w: jax.jit(jax.vmap(jax.grad(loss), (0, None)))(x[None], w),
    ):
        oracle.assert_close(f(x, jgg.prepack(q)), oracle.f64(f(x, q)), tolerance=1e-4)


def test_fp8_products(rng):
    """What multiplies codes with codes puts them back in order."""
    q = weight(rng, (3, 64, 256), (128, 128))
    x = jgg.fp8_quantize(oracle.random(rng, (9, 256)))
    f = lambda w: jgg.fp8_grouped_mm(x, w, SIZES, preferred_element_type="float32")
    oracle.assert_close(f(jgg.prepack(q)), oracle.f64(f(q)), tolerance=1e-4)


def test_batches(rng):
    q = weight(rng, (3, 64, 256), (128, 128))
    want, got = jgg.prepack(q), jax.vmap(jgg.prepack)(q)
    for leaf in ("weight", "scales"):
        np.testing.assert_array_equal(getattr(got, leaf), getattr(want, leaf))


def names(f, *args) -> list[str]:
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @(jgg_\w+)\(", text)


def test_cuda_lowering(rng):
    """One custom call with scales of 128 k, also where blocks are others. Without a GPU no product
    packs: test_prepack_fp8_kernel.py has those with one."""
    x = jnp.ones((8, 256), jnp.bfloat16)
    for block in ((128, 128), None):
        q = weight(rng, (3, 128, 256), block)
        packed = jgg.prepack(q)
        f = lambda x, w: jgg.grouped_qmm(x, w, SIZES, activation="swiglu")
        text = jax.jit(f).trace(x, packed).lower(lowering_platforms=("cuda",)).as_text()
        (line,) = re.findall(r"custom_call @jgg_qmm_packed.*", text)
        assert "tensor<3x2x4x1024xui32>, tensor<3x2x2x64xui32>" in line
        for attribute in ('mode = "fp8"', "bits = 8 : i32", "group_size = 128 : i32"):
            assert attribute in line, attribute
        assert names(f, x, q) == []
        assert names(jgg.prepack, q) == ["jgg_prepack_fp8"]
    gathered = lambda x, w: jgg.gather_qmm(x[:, None], w, rhs_indices=jnp.arange(8))
    assert names(gathered, x, packed) == ["jgg_qmm_packed"]
    assert names(lambda x, w: jgg.quantized_matmul(x, w), x, packed[0]) == ["jgg_qmm_packed"]
    assert names(loss, x, packed) == ["jgg_qmm_packed"]
    assert names(loss, x.astype("float32"), packed) == ["jgg_qmm_packed"]
    # The kernel does not take these, and no other one does.
    long = jax.eval_shape(lambda: jgg.prepack(made(
        jnp.zeros((3, 64, 2**20), jnp.float8_e4m3fn), jnp.ones(3), None)))  # fmt: skip
    wide = jax.ShapeDtypeStruct((8, 2**20), jnp.bfloat16)
    assert names(loss, wide, long) == []


def test_why_not(rng):
    """Weights that no kernel packs or reads are multiplied by XLA."""
    q, x = weight(rng, (3, 64, 256), (128, 128)), jnp.ones((8, 256), jnp.bfloat16)
    for name, w, why in (
        (
            "sm90",
            weight(rng, (3, 60, 256), (1, 64)),
            "needs codes e4m3 in",
        ),
        ("sm80", q, "reads no codes of mode 'fp8'"),
        ("sm80", jgg.prepack(q), "reads no codes of mode 'fp8'"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"'{name}' cannot run: {why}")):
            names(functools.partial(loss, implementation=name), x, w)


@pytest.mark.parametrize("block", [(128, 128), (1, 128), None])
@pytest.mark.parametrize("spec", [("a",), (None, "a"), (None, None, "a"), ("a", "b", None), ()])
@pytest.mark.one_in(4)
def test_explicitly_sharded(rng, spec, block):
    """Packed where it is, and multiplied there; scales that cannot be cut come whole."""
    q = weight(rng, (4, 256, 512), block)
    want = jgg.prepack(q)
    mesh = jax.make_mesh((2, 2), ("a", "b"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    put = lambda a: jax.device_put(a, NamedSharding(mesh, P(*spec[: a.ndim])))
    sharded = jax.tree.map(put, q)
    x = oracle.random(rng, (9, 512))
    f = jax.jit(lambda x, w: jgg.grouped_qmm(x, w, jnp.array([3, 0, 5, 1])))
    with jax.set_mesh(mesh):
        packed = jax.jit(jgg.prepack)(sharded)
        assert tuple(packed.weight.sharding.spec)[: len(spec)] == spec
        out = f(jax.device_put(x, NamedSharding(mesh, P(None, *spec[2:]))), packed)
        values = jgg.dequantize(packed)
    for leaf in ("weight", "scales"):
        np.testing.assert_array_equal(getattr(packed, leaf), getattr(want, leaf))
    np.testing.assert_array_equal(values, jgg.dequantize(want))
    oracle.assert_close(out, oracle.f64(f(x, want)), tolerance=1e-5)


# ---- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_packed_on_a_gpu(rng):
    """The same words as on a CPU."""
    q = weight(rng, (2, 192, 512), (128, 128), 0.002)
    got = jax.device_get(jgg.prepack(q))
    with jax.default_device(jax.devices("cpu")[0]):
        want = jax.device_get(jgg.prepack(jax.device_put(jax.device_get(q))))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 16, 24, 40, 256])
def test_decoded_on_a_gpu(rng, rows):
    """Rows of the identity: values rounded once, but for few."""
    needs("sm90")
    q = weight(rng, (1, 192, 256), (128, 128))
    x = jnp.eye(256, dtype=jnp.bfloat16)[:rows]
    f = jax.jit(functools.partial(jgg.grouped_qmm, implementation="sm90"))
    got = np.asarray(f(x, jgg.prepack(q), jnp.array([rows])), np.float32)
    want = rounded(jgg.dequantize(q))[0].T[:rows]
    assert (abs(got - want) <= 2.0**-7 * abs(want)).all()
    assert (got == want).mean() > 0.998
