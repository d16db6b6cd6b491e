"""Quantized weights against formulas and bit streams written down again in numpy."""

import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

FP = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
DTYPES = ["float32", "bfloat16", "float16"]
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (16, 32, 64, 128)
# Every width with every group size and with every dtype.
AFFINE = [(b, g, DTYPES[(i + j) % 3]) for i, b in enumerate(BITS) for j, g in enumerate(GROUPS)]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3 = np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
F32 = np.float32


def stream(codes, bits):
    """uint32 words from one Python integer per row: element i in bits [i*bits, (i+1)*bits)."""
    rows = codes.reshape(-1, codes.shape[-1])
    words = []
    for row in rows:
        number = sum(int(c) << (i * bits) for i, c in enumerate(row))
        words.append(np.frombuffer(number.to_bytes(len(row) * bits // 8, "little"), "<u4"))
    return np.array(words, np.uint32).reshape(*codes.shape[:-1], -1)


def bits_of(x):
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def same(got, want):
    """Equal bits; NaN is NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    nan = np.isnan(want.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), nan)
    np.testing.assert_array_equal(np.where(nan, 0, bits_of(got)), np.where(nan, 0, bits_of(want)))


def numpy_affine(w, bits, group):
    """Codes, scales and biases by the documented formulas."""
    blocks = w.astype(F32).reshape(*w.shape[:-1], -1, group)
    levels = F32(2**bits - 1)
    low, high = blocks.min(-1), blocks.max(-1)
    s = np.maximum((high - low) / levels, F32(1e-7))
    s = np.where(abs(high) >= abs(low), -s, s)
    edge = np.where(abs(high) >= abs(low), high, low)
    q0 = np.rint(edge / s)
    s = np.where(q0 != 0, edge / np.where(q0 != 0, q0, F32(1)), s).astype(F32)
    bias = np.where(q0 != 0, edge, F32(0))
    q = np.rint((blocks - bias[..., None]) / s[..., None])
    q = np.clip(np.nan_to_num(q, nan=0), 0, levels).astype(np.uint32)
    return q.reshape(w.shape), s.astype(w.dtype), bias.astype(w.dtype)


def nearest(x, table):
    """Codes of the nearest of ascending ``table`` in float64; ties to the even code; saturating."""
    x = np.minimum(abs(x.astype(np.float64)), table[-1])
    upper = np.clip(np.searchsorted(table, x), 1, len(table) - 1)
    below, above = x - table[upper - 1], table[upper] - x
    up = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.where(up, upper, upper - 1).astype(np.uint32)


def numpy_fp(w, mode, global_scale=None):
    """Codes and scale bytes by the documented formulas."""
    bits, group = FP[mode]
    table = E4M3[:127].astype(np.float64) if mode == "mxfp8" else E2M1.astype(np.float64)
    blocks = w.astype(F32).reshape(*w.shape[:-1], -1, group)
    amax = abs(blocks).max(-1)
    if mode == "nvfp4":
        s, t = amax / F32(6), blocks
        if global_scale is not None:
            with np.errstate(all="ignore"):
                inverse = np.minimum(F32(1) / global_scale, np.finfo(F32).max)
            inverse = inverse.reshape(inverse.shape + (1,) * (amax.ndim - inverse.ndim))
            s, t = s * inverse, t * inverse[..., None]
        byte = nearest(np.nan_to_num(s), E4M3[:127].astype(np.float64))
        byte = np.where(np.isfinite(amax), byte, 0x7F)
        y = t / np.where(byte == 0, F32(1), E4M3[byte])[..., None]
        dead = (byte == 0) | (byte == 0x7F)
    else:
        largest = 6 if mode == "mxfp4" else 448
        mantissa, exponent = np.frexp(np.nan_to_num(amax.astype(np.float64)) / largest)
        exponent = np.clip(exponent - (mantissa == 0.5), -127, 127)
        exponent = np.where(amax == 0, 0, exponent)
        dead = ~np.isfinite(amax)
        byte = np.where(dead, 255, exponent + 127)
        y = np.ldexp(blocks.astype(np.float64), -exponent[..., None])
    y = np.where(dead[..., None], 0, y)
    code = nearest(y, table) | (np.signbit(y).astype(np.uint32) << (bits - 1))
    return code.reshape(w.shape), byte.astype(np.uint8)


def inputs(rng, dtype, k=256):
    """Rows of every kind: random, zero, constant, tiny, huge, with outliers, on ties."""
    x = rng.standard_normal((24, k))
    x[1], x[2], x[3] = 0, 0.37, -2.5
    x[4:6] *= 1e-7
    x[6:8] *= 1e-38 if dtype == "float32" else 1e-6
    x[8] *= 1e-42
    x[9] *= 1e37 if dtype == "float32" else 1e4
    x[10, ::37] *= 1000
    x[11], x[12] = abs(x[11]), -abs(x[12])
    x[13] = rng.integers(-12, 13, k) / 4
    x[14] = rng.integers(-448, 449, k)
    x[15, 1::2] = -0.0
    x[16] = 2.0 ** rng.integers(-14, 15, k)
    x[17:] *= 2.0 ** rng.integers(-10, 8, (7, 1))
    return np.ascontiguousarray(x.astype(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.one_in(3)
def test_packing_is_one_bit_stream(rng, bits):
    codes = rng.integers(0, 2**bits, (3, 5, 128)).astype(np.uint32)
    q = jgg.Quantized(
        stream(codes, bits), np.ones((3, 5, 4), F32), np.zeros((3, 5, 4), F32),
        mode="affine", bits=bits, group_size=32,
    )  # fmt: skip
    assert q.shape == (3, 5, 128)
    np.testing.assert_array_equal(jgg.dequantize(q), codes.astype(F32))
    ones, halves = np.ones((3, 5, 8), F32), np.arange(8, dtype=F32) * np.ones((3, 5, 1), F32)
    q = jgg.Quantized(q.weight, ones, halves, mode="affine", bits=bits, group_size=16)
    want = codes.astype(F32) + np.repeat(halves, 16, -1)
    np.testing.assert_array_equal(jgg.dequantize(q), want)
    # Every code once, quantized back to itself.
    w = np.tile(np.arange(2**bits), 128)[:128].astype(F32)
    q = jgg.quantize(w, bits=bits, group_size=128)
    if bits < 8:
        np.testing.assert_array_equal(jgg.dequantize(q), w)


@pytest.mark.parametrize(("bits", "group", "dtype"), AFFINE)
@pytest.mark.one_in(8)
def test_affine(rng, bits, group, dtype):
    w = inputs(rng, dtype)
    codes, scales, biases = numpy_affine(w, bits, group)
    q = jgg.quantize(w, bits=bits, group_size=group)
    same(q.scales, scales)
    same(q.biases, biases)
    np.testing.assert_array_equal(q.weight, stream(codes, bits))
    blocks = codes.reshape(24, -1, group).astype(F32)
    value = blocks * scales.astype(F32)[..., None] + biases.astype(F32)[..., None]
    for out in {dtype, DTYPES[bits % 3]}:
        with np.errstate(all="ignore"):
            want = value.reshape(w.shape).astype(jnp.dtype(out))
        same(jgg.dequantize(q, out), want)
    assert jgg.dequantize(q).dtype == dtype


@pytest.mark.parametrize("mode", FP)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.one_in(6)
def test_fp(rng, mode, dtype):
    w = inputs(rng, dtype)
    codes, scales = numpy_fp(w, mode)
    q = jgg.quantize(w, mode=mode)
    np.testing.assert_array_equal(q.scales, scales)
    np.testing.assert_array_equal(q.weight, stream(codes, q.bits))
    assert (q.bits, q.group_size) == FP[mode]


@pytest.mark.parametrize("shape", [(), (4,), (4, 6)])
@pytest.mark.one_in(3)
def test_nvfp4_global_scale(rng, shape):
    w = inputs(rng, "float32").reshape(4, 6, 256)
    amax = abs(w).max(axis=tuple(range(len(shape), 3)))
    for scale in (amax / F32(2688), F32(0.37) * np.ones(shape, F32), np.full(shape, 3e-40, F32)):
        scale = np.asarray(scale, F32)
        with np.errstate(all="ignore"):
            codes, scales = numpy_fp(w, "nvfp4", scale)
        q = jgg.quantize(w, mode="nvfp4", global_scale=scale)
        np.testing.assert_array_equal(q.scales, scales)
        np.testing.assert_array_equal(q.weight, stream(codes, 4))
        value = np.where(codes < 8, E2M1[codes & 7], -E2M1[codes & 7]) * np.repeat(
            E4M3[scales], 16, -1
        )
        value = value * scale.reshape(scale.shape + (1,) * (3 - scale.ndim))
        for out in DTYPES:
            with np.errstate(all="ignore"):
                same(jgg.dequantize(q, out), value.astype(jnp.dtype(out)))
    zero = jgg.quantize(np.zeros((4, 6, 32), F32), mode="nvfp4", global_scale=np.zeros(shape, F32))
    np.testing.assert_array_equal(jgg.dequantize(zero), 0)


def test_nvfp4_random_scales(rng):
    """Scale bytes and codes on many random blocks, where a last bit would tip a tie."""
    w = (rng.integers(-96, 97, (256, 1024)) * 2.0 ** rng.integers(-8, 8, (256, 1))).astype(F32)
    for scale in (None, F32(0.1), F32(1 / 3)):
        codes, scales = numpy_fp(w, "nvfp4", scale)
        q = jgg.quantize(w, mode="nvfp4", global_scale=scale)
        np.testing.assert_array_equal(q.scales, scales)
        np.testing.assert_array_equal(jax.jit(lambda q: q.weight)(q), stream(codes, 4))


@pytest.mark.parametrize("mode", FP)
def test_every_scale_and_code(mode):
    bits, group = FP[mode]
    codes = np.arange(2**bits).reshape(-1, group) if bits == 8 else np.arange(32)[None] % 16
    codes = np.broadcast_to(codes.reshape(1, -1), (256, codes.size)).astype(np.uint32)
    scales = np.repeat(np.arange(256).astype(np.uint8)[:, None], codes.shape[1] // group, 1)
    element = E4M3 if mode == "mxfp8" else np.concatenate([E2M1, -E2M1])
    if mode == "nvfp4":
        scale = E4M3[scales & 0x7F].astype(np.float64)
    else:
        scale = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
    exact = element[codes].astype(np.float64) * np.repeat(scale, group, 1)
    q = jgg.Quantized(stream(codes, bits), scales, mode=mode, bits=bits, group_size=group)
    assert jgg.dequantize(q).dtype == jnp.bfloat16
    for out in DTYPES:
        with np.errstate(all="ignore"):
            want = exact.astype(F32)
            want = want.astype(jnp.dtype(out))
        same(jgg.dequantize(q, out), want)


@pytest.mark.parametrize("mode", ["affine", *FP])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.one_in(8)
def test_non_finite_stays_in_its_group(rng, mode, bad):
    w = rng.standard_normal((4, 256)).astype(F32)
    clean = jgg.quantize(w, mode=mode)
    w[1, 70] = bad
    q = jgg.quantize(w, mode=mode)
    hit = np.zeros((4, 256), bool)
    start = 70 // q.group_size * q.group_size
    hit[1, start : start + q.group_size] = True
    out, before = np.asarray(jgg.dequantize(q)), np.asarray(jgg.dequantize(clean))
    assert not np.isfinite(out[hit].astype(F32)).any()
    np.testing.assert_array_equal(out[~hit], before[~hit])
    if mode != "affine":
        assert np.asarray(q.scales)[1, 70 // q.group_size] == (0x7F if mode == "nvfp4" else 255)


def make(rng, mode, lead=(3, 8)):
    w = jnp.asarray(rng.standard_normal((*lead, 128)), jnp.float32)
    scale = jnp.full(lead[:1], 0.5, jnp.float32) if mode == "nvfp4" else None
    return w, jgg.quantize(w, mode=mode, global_scale=scale)


@pytest.mark.parametrize("mode", ["affine", *FP])
@pytest.mark.one_in(5)
def test_pytree(rng, mode):
    w, q = make(rng, mode)
    value = jgg.dequantize(q)
    oracle.assert_leaves_equal(pickle.loads(pickle.dumps(q)), q)
    oracle.assert_leaves_equal(jax.tree.map(lambda x: x, q), q)
    oracle.assert_leaves_equal(jax.device_put(q, jax.devices()[1]), q)
    oracle.assert_leaves_equal(
        jax.jit(lambda w: jgg.quantize(w, mode=mode, global_scale=q.global_scale))(w), q
    )
    np.testing.assert_array_equal(jax.jit(jgg.dequantize)(q), value)
    np.testing.assert_array_equal(jax.vmap(jgg.dequantize)(q), value)
    _, scanned = jax.lax.scan(lambda c, q: (c, jgg.dequantize(q)), None, q)
    np.testing.assert_array_equal(scanned, value)
    scale = q.global_scale
    mapped = jax.vmap(lambda w, s: jgg.quantize(w, mode=mode, global_scale=s))(w, scale)
    oracle.assert_leaves_equal(mapped, q)
    shapes = jax.eval_shape(lambda w: jgg.quantize(w, mode=mode), w)
    assert shapes.shape == w.shape
    jax.tree.map(lambda _: None, q)  # a tree of anything
    donated = jax.jit(lambda q: jax.tree.map(lambda x: x + x.dtype.type(0), q), donate_argnums=0)
    np.testing.assert_array_equal(jgg.dequantize(donated(q)), value)


SIZES = np.array([20, 0, 31])
LAYOUTS = {
    "linear": lambda w: jgg.quantize(w, bits=3),
    "sm90": lambda w: jgg.prepack(jgg.quantize(w, mode="nvfp4", global_scale=np.ones(2, F32) / 9)),
    "grouped": lambda w: jgg.nvfp4_quantize(w[0], axis=-2, group_sizes=SIZES),
    "swizzled": lambda w: jgg.nvfp4_quantize(w[0], group_sizes=SIZES, layout="swizzled"),
}


def in_every_layout(rng):
    w = jnp.asarray(rng.standard_normal((2, 64, 128)), jnp.bfloat16)
    made = {layout: make(w) for layout, make in LAYOUTS.items()}
    assert all(q.layout == layout for layout, q in made.items())
    assert made["grouped"].positions is not None
    assert made["swizzled"].positions is not None
    return made


def test_layouts_survive_pickle(rng):
    made = in_every_layout(rng)
    back = pickle.loads(pickle.dumps(made))
    oracle.assert_leaves_equal(back, made)
    for layout, q in made.items():
        assert repr(back[layout]) == repr(q)
        same(jgg.dequantize(back[layout]), jgg.dequantize(q))


def test_checkpoint(rng, tmp_path):
    """Orbax stores the leaves; what is static comes from the tree that is to be restored."""
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = {"layers": in_every_layout(rng), "norm": jnp.arange(5.0)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        checkpointer.wait_until_finished()
        for target in (jax.tree.map(ocp.utils.to_shape_dtype_struct, tree), tree):
            back = checkpointer.restore(tmp_path / "saved", target)
            oracle.assert_leaves_equal(back, tree)
            for layout, q in tree["layers"].items():
                same(jgg.dequantize(back["layers"][layout]), jgg.dequantize(q))


def test_gradients(rng):
    _, q = make(rng, "affine")
    ct = rng.standard_normal((3, 8, 128)).astype(F32)

    def loss(scales, biases):
        new = jgg.Quantized(q.weight, scales, biases, mode="affine", bits=4, group_size=64)
        return jnp.sum(jgg.dequantize(new) * ct)

    ds, db = jax.grad(loss, (0, 1))(q.scales, q.biases)
    one = jgg.Quantized(
        q.weight, jnp.ones_like(q.scales), jnp.zeros_like(q.biases),
        mode="affine", bits=4, group_size=64,
    )  # fmt: skip
    codes = np.asarray(jgg.dequantize(one)).reshape(3, 8, 2, 64)
    np.testing.assert_allclose(ds, (codes * ct.reshape(codes.shape)).sum(-1), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(db, ct.reshape(codes.shape).sum(-1), rtol=1e-4, atol=1e-3)

    _, q = make(rng, "nvfp4")
    weight, scales = q.weight, q.scales

    def total(s):
        new = jgg.Quantized(weight, scales, None, s, mode="nvfp4", bits=4, group_size=16)
        return jnp.sum(jgg.dequantize(new) * ct)

    want = (np.asarray(jgg.dequantize(q)) / 0.5 * ct).sum((1, 2))
    np.testing.assert_allclose(jax.grad(total)(q.global_scale), want, rtol=1e-4, atol=1e-3)


def test_repr(rng):
    _, q = make(rng, "nvfp4")
    assert repr(q) == (
        "Quantized(mode='nvfp4', bits=4, group_size=16, weight=uint32[3,8,16], "
        "scales=uint8[3,8,8], global_scale=float32[3])"
    )
