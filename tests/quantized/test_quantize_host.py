"""The CUDA kernels' arithmetic of quantize, compiled for the host, against its definition."""

import ctypes

import host_program
import numpy as np
import pytest
from host_program import DTYPES, dtype_number, mode_number, pointer
from test_quantized import AFFINE, E4M3, FP, bits_of

import jax_groupgemm as jgg

F32 = np.float32

pytestmark = host_program.needs_compiler


@pytest.fixture(scope="module")
def library():
    library = host_program.build("quantize")
    for name in ("quantize", "wrong_quotients", "wrong_quotients_by_constants"):
        getattr(library, name).restype = ctypes.c_long
    return library


@pytest.fixture(scope="module")
def same(library):
    """Assert that the kernels' bytes are the definition's; the part of lanes in doubt."""

    def same(w, mode, bits=None, group=None, global_scale=None):
        q = jgg.quantize(w, mode=mode, bits=bits, group_size=group, global_scale=global_scale)
        want = [bits_of(a) for a in (q.weight, q.scales, q.biases) if a is not None]
        count = 1 if global_scale is None else global_scale.size
        for exactly in (False, True):
            got = [np.empty_like(a) for a in want]
            doubts = library.quantize(
                mode_number(mode), q.bits, dtype_number(w.dtype), pointer(w), pointer(global_scale),
                *map(ctypes.c_long, (w.size, q.group_size, w.size // count)), int(exactly),
                *map(pointer, (*got, *[None] * (3 - len(got)))),
            )  # fmt: skip
            for g, e in zip(got, want, strict=True):
                np.testing.assert_array_equal(g, e)
        return doubts * 16 / w.size

    return same


def inputs(rng, dtype, k=1024):
    """Rows of every kind."""
    small = dtype == "float16"
    x = rng.standard_normal((48, k)) * 2.0 ** rng.integers(-10, 10, (48, 1))
    x[1], x[2], x[3] = 0, 0.37, -2.5
    x[4] *= 1e-7
    x[5] *= 1e-6 if small else 1e-38
    x[6] *= 1e-8 if small else 1e-42
    x[7] *= 10 if small else 1e34
    x[8, ::37] *= 1000
    x[9], x[10] = abs(x[9]), -abs(x[10])
    x[11] = rng.integers(-12, 13, k) / 4
    x[12] = rng.integers(-448, 449, k)
    x[13, 1::2] = -0.0
    x[14] = 2.0 ** rng.integers(-14, 15, k)
    x[15] = 1 + rng.standard_normal(k) * 1e-3  # far from zero
    x[16] = -1000 + rng.standard_normal(k) * 1e-2
    x[17], x[18] = rng.integers(0, 16, k), rng.integers(-128, 128, k)
    x[19] = rng.integers(0, 2, k) * 0.3
    x[20] = rng.choice([-1, 1], k) * (6e4 if small else 3e38)  # whose range overflows
    x[21] = rng.integers(-96, 97, k)
    with np.errstate(all="ignore"):
        x = x.astype(DTYPES[dtype])
    word = bits_of(x).dtype
    x[22:28] = rng.integers(0, np.iinfo(word).max, (6, k), word, True).view(x.dtype)
    for i, bad in enumerate((np.nan, -np.nan, np.inf, -np.inf)):
        x[28 + i, rng.integers(0, k, 20)] = bad
    return x


@pytest.mark.parametrize(("bits", "group", "dtype"), AFFINE)
@pytest.mark.one_in(5)
def test_affine(rng, same, bits, group, dtype):
    # Kernels take 16-bit elements in groups of 16 as float32.
    dtype = "float32" if group == 16 else dtype
    assert same(inputs(rng, dtype), "affine", bits, group) < 0.25


def test_affine_ties(rng, same):
    """Quotients that are whole numbers and a half, and float32 neighbours of those."""
    bits, group = 4, 32
    low = -rng.random((256, 1)) - 0.5
    step = rng.random((256, 1)) / 8 + 1e-3
    w = (low + (rng.integers(0, 15, (256, 1024)) + 0.5) * step).astype(F32)
    w[:, ::group], w[:, 1::group] = low.astype(F32), (low + 15 * step).astype(F32)
    w = w.view(np.int32) + rng.integers(-2, 3, w.shape, np.int32)
    same(w.view(F32), "affine", bits, group)


@pytest.mark.parametrize("mode", FP)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.one_in(4)
def test_fp(rng, same, mode, dtype):
    assert same(inputs(rng, dtype), mode) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.one_in(3)
def test_nvfp4_global_scale(rng, same, dtype):
    w = inputs(rng, dtype)
    amax = abs(w.astype(F32)).max(axis=-1)
    rows = np.where(np.isfinite(amax), amax, 1).astype(F32) / F32(2688)
    rows[-12:] = -0.37, 3e-40, 0, np.inf, np.nan, -np.inf, 1e38, -3e38, 1, 0.5, 2**-9, F32(1e-30)
    same(w, "nvfp4", global_scale=rows)
    ordinary = rng.standard_normal((64, 1024)).astype(w.dtype)
    scale = np.array(abs(ordinary.astype(F32)).max() / F32(2688))
    assert same(ordinary, "nvfp4", global_scale=scale) < 0.05


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_mantissa_and_scale(same, mode, dtype):
    """Where 16-bit values are not negligible in their group, all of them, at every scale."""
    group = FP[mode][1]
    places = 7 if dtype == "bfloat16" else 10
    mantissas = 1 + np.arange(2**places) / 2**places
    span = 12 if mode == "mxfp8" else 6
    values = (mantissas[:, None] * 2.0 ** -np.arange(span)).reshape(-1)
    if mode == "nvfp4":
        largest = 6 * E4M3[1:127].astype(np.float64)
    else:
        low, high = (-130, 120) if dtype == "bfloat16" else (-20, 15)
        largest = 2.0 ** np.arange(low, high)[:: 1 if places == 7 else 5]
    per_group = np.concatenate([np.zeros((-values.size % (group - 1),)), values])
    per_group = per_group.reshape(-1, group - 1)
    tops = np.broadcast_to(largest[:, None, None], (largest.size, len(per_group), 1))
    below = per_group / 2 * largest[:, None, None]
    w = np.concatenate([tops, below], axis=-1).reshape(largest.size, -1)
    with np.errstate(all="ignore"):
        assert same(w.astype(DTYPES[dtype]), mode) == 0


def around_thresholds(rng, columns: int, factor: float) -> np.ndarray:
    """Products of scales with the middles between codes, and float32 neighbours of those."""
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0.5, 1, 4], F32)
    scales = E4M3[1:127, None]
    w = rng.choice(middles, (126, columns)) * scales * F32(factor)
    w = (w.astype(F32).view(np.int32) + rng.integers(-2, 3, w.shape, np.int32)).view(F32)
    w *= rng.choice([-1, 1], w.shape)
    w[:, ::16] = 6 * scales * F32(factor)
    return w.astype(F32)


@pytest.mark.parametrize("scale", [None, 1.0, 0.37, -1 / 2688])
def test_float32_around_thresholds(rng, same, scale):
    w = around_thresholds(rng, 1024, 1 if scale is None else abs(scale))
    same(w, "nvfp4", global_scale=None if scale is None else np.array(scale, F32))
    same(w, "mxfp4")
    same(w, "mxfp8")


def test_divisions(library):
    """What kernels compute instead of dividing is rounded as division is."""
    assert library.wrong_quotients_by_constants() == 0
    assert (
        library.wrong_quotients(ctypes.c_long(3_000_000), ctypes.c_uint64(88172645463325252)) == 0
    )
