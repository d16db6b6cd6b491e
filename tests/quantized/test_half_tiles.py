"""Prepacked weights as float16, tile by tile, by the decoders of Hopper's kernels on the host."""

import host_program
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from host_program import mode_number, pointer

import jax_groupgemm as jgg
from jax_groupgemm._quantized.codes import pack

pytestmark = host_program.needs_compiler
WAYS = ["any", "few rows", "small"]
ZERO = np.float16(0)  # the sum with - 0 is 0


@pytest.fixture(scope="module")
def half_tile():
    return host_program.build_kernels("half_tiles").half_tile


def decode(half_tile, packed: jgg.Quantized, way: str):
    """(N, K) float16, and whether scales are small, of each tile (N / 64, K / 64)."""
    column_tiles, k_tiles = packed.weight.shape[:2]
    out = np.empty((column_tiles, 64, k_tiles, 64), np.float16)
    small = np.empty((column_tiles, k_tiles), bool)
    scales = np.asarray(packed.scales)
    for n, k in np.ndindex(small.shape):
        places = (packed.weight, k), (scales, k * scales.shape[1] // k_tiles)  # tiles may share
        leaves = [np.ascontiguousarray(np.asarray(leaf)[n, at]) for leaf, at in places]
        tile = np.empty((64, 64), np.float16)
        small[n, k] = half_tile(
            mode_number(packed.mode), *map(pointer, leaves), leaves[1].nbytes, WAYS.index(way),
            pointer(tile),
        )  # fmt: skip
        out[n, :, k] = tile
    return out.reshape(column_tiles * 64, -1), small


def assert_same(got, want):
    """Bit for bit, signs of zeros included; any NaN is NaN."""
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    words = [np.where(nan, 0, a.view(np.uint16)) for a in (got, want)]
    np.testing.assert_array_equal(*words)


@pytest.mark.parametrize(("mode", "way"), [
    *(("mxfp4", way) for way in WAYS), *(("nvfp4", way) for way in WAYS[:2]),
])  # fmt: skip
def test_every_code_and_scale(half_tile, rng, mode, way):
    """Row n has scale byte n. float16 values of nvfp4 are 2^-7 of what they stand for, and zeros of
    its scale 0 have no sign."""
    every = host_program.every_code_and_scale(rng, mode)
    q = jgg.Quantized(every.weight[:, 0], every.scales[:, 0], mode=mode, bits=4,
                      group_size=every.group_size)  # fmt: skip
    bytes_ = np.asarray(q.scales)
    if way == "small":  # between two other rows' scales, some tiles have small ones alone
        bytes_ = np.where(np.arange(256)[:, None] < 192, 99 + bytes_ % 29, bytes_).astype(np.uint8)
        q = jgg.Quantized(q.weight, bytes_, mode=mode, bits=4, group_size=32)
    got, small = decode(half_tile, jgg.prepack(q), way)
    with np.errstate(over="ignore"):
        want = np.asarray(jgg.dequantize(q, "float32"), np.float32)
        want = (want / 128 if mode == "nvfp4" else want).astype(np.float16)
    if way == "small":
        assert small[:3].all()
        assert not small[3:].any()
        got, want = got[:192], want[:192]
    assert_same(got, want) if mode == "mxfp4" else assert_same(got + ZERO, want + ZERO)


def test_small_powers(half_tile):
    """Which bytes of exponents are small: one of a tile decides."""
    bytes_ = np.array([0, 98, 99, 127, 128, 255], np.uint8)
    scales = np.full((64, 6, 2), 110, np.uint8)
    scales[37, :, 1] = bytes_
    codes = pack(jnp.zeros((64, 64 * 6), jnp.uint32), 4)
    q = jgg.Quantized(codes, scales.reshape(64, 12), mode="mxfp4", bits=4, group_size=32)
    small = decode(half_tile, jgg.prepack(q), "any")[1]
    np.testing.assert_array_equal(small, [(bytes_ >= 99) & (bytes_ < 128)])


@pytest.mark.parametrize(("way", "group_size"), [
    *(("any", group) for group in (32, 64, 128)), ("few rows", 64), ("small", 64), ("small", 128),
])  # fmt: skip
def test_affine_codes_of_2_bits(half_tile, rng, way, group_size):
    """Scales of every size, subnormal ones too, up to 1/2 where they are small."""
    groups = 256 // group_size
    scales = rng.normal(size=(128, groups)) * 2.0 ** rng.integers(-24, -1, (128, groups))
    scales = np.clip(scales, -0.4995, 0.4995)
    if way != "small":
        scales[:64] *= 1000
    biases = (-scales * rng.integers(0, 4, scales.shape)).astype(np.float16)
    codes = rng.integers(0, 2**32, (128, 256 * 2 // 32), dtype=np.uint32)
    q = jgg.Quantized(codes, scales.astype(np.float16), biases, mode="affine", bits=2,
                      group_size=group_size)  # fmt: skip
    got, small = decode(half_tile, jgg.prepack(q), way)
    assert small.all() == (way == "small")
    want = oracle.dequantize(q, "float64").astype(np.float16)
    assert_same(got + ZERO, want + ZERO)


def test_small_scales_of_2_bits(half_tile):
    tried = np.array([0.4997, 0.5, -0.5, 6e-8, np.nan], np.float16)
    scales = np.full((64, 5), 0.01, np.float16)
    scales[5] = tried
    codes = jnp.zeros((64, 4 * 5), jnp.uint32)
    q = jgg.Quantized(codes, scales, np.zeros_like(scales), mode="affine", bits=2, group_size=64)
    small = decode(half_tile, jgg.prepack(q), "any")[1]
    np.testing.assert_array_equal(small, [[True, False, False, True, False]])
