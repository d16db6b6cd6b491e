"""The CUDA kernels' decoding of quantized weights, compiled for the host: every code and scale."""

import ctypes
import dataclasses

import host_program
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from host_program import DTYPES, MODES, dtype_number, mode_number, pointer

import jax_groupgemm as jgg
from jax_groupgemm._quantized.codes import pack

pytestmark = host_program.needs_compiler
# Bits of affine codes, and whether codes are numbers as they are, with scales that are small.
AFFINE = [*((bits, 0) for bits in (2, 3, 4, 5, 6, 8)), *((bits, 1) for bits in (2, 3, 4, 5, 6))]


@pytest.fixture(scope="module")
def decode():
    function = host_program.build("decode").decode
    function.restype = ctypes.c_long

    def call(mode, bits, scale_dtype, to, packed, first, second, fast):
        """Values of units of 32 codes, and how many of those were not decoded one by one. A unit
        has one scale, or two."""
        arrays = [np.ascontiguousarray(a, np.uint32) for a in (packed, first, second)]
        units, halves = len(packed), first.size // len(packed) - 1
        assert arrays[0].shape == (units, bits)
        out = np.empty((units, 32), DTYPES[to])
        count = function(
            mode_number(mode), bits, dtype_number(scale_dtype), dtype_number(to),
            *map(pointer, arrays), halves, ctypes.c_long(units), int(fast), pointer(out),
        )  # fmt: skip
        return out, count

    return call


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("mode", MODES[1:4])
@pytest.mark.one_in(5)
def test_every_code_and_scale(decode, rng, mode, to, fast):
    q = host_program.every_code_and_scale(rng, mode)
    packed, scales = np.asarray(q.weight), np.asarray(q.scales)
    want = np.asarray(jgg.dequantize(q, to)).reshape(-1, 32)
    first, second = scales.reshape(-1, 32 // q.group_size)[:, [0, -1]].T
    units = packed.reshape(-1, q.bits)
    got, count = decode(mode, q.bits, "float32", to, units, first, second, fast)
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    bits_of = lambda x: np.where(nan, 0, x.view({2: np.uint16, 4: np.uint32}[x.itemsize]))
    np.testing.assert_array_equal(bits_of(got), bits_of(want))
    assert count == 0 or count > first.size * (0.4 if mode == "mxfp8" else 0.99)
    assert fast == (count > 0)


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.one_in(5)
def test_affine(decode, rng, bits, scale_dtype):
    dtype = np.dtype(DTYPES[scale_dtype])
    count, word = 16384, {2: np.uint16, 4: np.uint32}[dtype.itemsize]
    scales, biases = host_program.affine_parameters(rng, dtype, count)
    codes = rng.integers(0, 2**bits, (count, 32)).astype(np.uint32)
    group = int(rng.choice([16, 32]))
    count = count * group // 32
    codes = codes[:count]
    packed = np.asarray(pack(jnp.asarray(codes), bits))
    in_groups = codes.astype(np.float32).reshape(-1, group)
    with np.errstate(all="ignore"):
        product = in_groups * scales.astype(np.float32)[:, None]
        exact = (product + biases.astype(np.float32)[:, None]).reshape(count, 32)
    for to in DTYPES:
        with np.errstate(all="ignore"):
            want = exact.astype(DTYPES[to]).astype(np.float32)
        for fast in (False, True):
            got, decoded = decode(
                "affine", bits, scale_dtype, to, packed, scales.view(word), biases.view(word), fast
            )
            np.testing.assert_array_equal(got.astype(np.float32), want)
            assert (decoded > 0.8 * count) == fast


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("bits", "alone"), AFFINE)
@pytest.mark.one_in(5)
def test_prepacked(rng, bits, alone, group_size):
    """Tile by tile, what threads read of a prepacked weight: the values of ``dequantize``."""
    w = jgg.quantize(oracle.random(rng, (128, 256), jnp.bfloat16), bits=bits, group_size=group_size)
    codes = rng.integers(0, 2**32, w.weight.shape, dtype=np.uint32)
    w = dataclasses.replace(w, weight=jnp.asarray(codes))
    packed, want = jgg.prepack(w), np.asarray(jgg.dequantize(w)).astype(np.float32)
    decode_tile = host_program.build("decode").decode_tile
    got = np.empty((2, 64, 4, 64), DTYPES["bfloat16"])
    for n, k in np.ndindex(2, 4):
        scales = packed.scales[n, k * packed.scales.shape[1] // 4]
        leaves = [np.ascontiguousarray(leaf) for leaf in (packed.weight[n, k], scales)]
        tile = np.empty((64, 64), got.dtype)
        decode_tile(bits, *map(pointer, leaves), leaves[1].size // 64, alone, pointer(tile))
        got[n, :, k] = tile * (256 if alone else 1)
    np.testing.assert_array_equal(got.reshape(want.shape).astype(np.float32), want)


@pytest.mark.parametrize(("mode", "bits", "alone", "power"), [
    *(("affine", *case, -8 * case[1]) for case in AFFINE),
    ("mxfp4", 4, 0, -126), ("mxfp8", 8, 0, -120),
])  # fmt: skip
@pytest.mark.one_in(3)
def test_streams(rng, mode, bits, alone, power):
    """Codes as they are stored, two by two: every code in every place. NaN codes of e4m3 are left
    to the caller."""
    each = (np.arange(256)[:, None] + np.arange(32)) % 2**bits
    codes = np.concatenate([each, rng.integers(0, 2**bits, (2048, 32))]).astype(np.uint32)
    if mode == "mxfp8":
        codes[codes % 128 == 127] = 5
    packed = np.ascontiguousarray(pack(jnp.asarray(codes), bits), np.uint32)
    out = np.empty((len(codes), 16, 2), DTYPES["bfloat16"])
    host_program.build("decode").decode_streams(
        mode_number(mode), bits, pointer(packed), ctypes.c_long(len(codes)), alone, pointer(out)
    )
    values = codes.astype(np.float64)
    if mode != "affine":
        scales = np.full((len(codes), 1), 127, np.uint8)
        q = jgg.Quantized(packed, scales, mode=mode, bits=bits, group_size=32)
        values = np.asarray(jgg.dequantize(q, "float32"), np.float64)
    want = values.reshape(-1, 2, 16).swapaxes(1, 2) * 2.0**power
    np.testing.assert_array_equal(out.astype(np.float64), want)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_streams_in_float16(rng, bits):
    each = (np.arange(256)[:, None] + np.arange(32)) % 2**bits
    codes = np.concatenate([each, rng.integers(0, 2**bits, (2048, 32))]).astype(np.uint32)
    packed = np.ascontiguousarray(pack(jnp.asarray(codes), bits), np.uint32)
    out = np.empty((len(codes), 16, 2), np.float16)
    host_program.build("decode").decode_half_streams(
        bits, pointer(packed), ctypes.c_long(len(codes)), pointer(out)
    )
    np.testing.assert_array_equal(out, codes.reshape(-1, 2, 16).swapaxes(1, 2))


def test_e4m3_in_float16():
    """Every code in every place; NaN stays NaN."""
    codes = np.stack([np.roll(np.arange(256, dtype=np.uint8), i) for i in range(4)], axis=1)
    out = np.empty(codes.shape, np.float16)
    host_program.build("decode").halves_of_e4m3(
        pointer(np.ascontiguousarray(codes)), ctypes.c_long(256), pointer(out)
    )
    np.testing.assert_array_equal(out, codes.view(jnp.float8_e4m3fn).astype(np.float16))


def test_small_affine_scales():
    """Which scales and biases stay numbers, and sums with them, in the unit of codes alone."""
    word = np.arange(2**16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        size = np.abs(word.astype(np.uint16).view(DTYPES["bfloat16"]).astype(np.float64))
    function = host_program.build("decode").are_small
    for shift, most, other in ((0, 2.0**3, 0x3F80 << 16), (16, 2.0**100, 0x3C80)):
        words = np.ascontiguousarray(word << shift | other)
        out = np.empty(words.size, np.uint8)
        function(pointer(words), ctypes.c_long(words.size), pointer(out))
        want = (size >= 2.0**-100) & (size < most)
        np.testing.assert_array_equal(out, want)


def test_planes_of_values(rng):
    """Three bfloat16 numbers of one sign are a float32. The first is cut off. What the host may
    take for zero is left out, subnormal parts."""
    exponents = rng.integers(26, 255, 2**15, np.uint32)
    bits = rng.integers(0, 2**32, 2**15, np.uint32) & ~np.uint32(255 << 23) | exponents << 23
    bits[:2] = 0, 1 << 31
    planes = np.empty((3, len(bits)), np.uint16)
    function = host_program.build("decode").planes_of_pairs
    function(pointer(bits), ctypes.c_long(len(bits)), pointer(planes))
    np.testing.assert_array_equal(planes[0], bits >> 16)
    assert ((planes >> 15 == planes[0] >> 15) | (planes & 0x7FFF == 0)).all()
    total = planes.view(DTYPES["bfloat16"]).astype(np.float64).sum(0)
    np.testing.assert_array_equal(total, bits.view(np.float32).astype(np.float64))
