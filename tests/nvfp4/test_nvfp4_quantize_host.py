"""The CUDA kernels' arithmetic of nvfp4_quantize, compiled for the host, against its definition."""

import ctypes

import host_program
import jax
import numpy as np
import nvfp4_oracle
import pytest
from host_program import dtype_number, pointer
from nvfp4_quantize_cases import KEY, tensors
from test_quantized import E4M3, bits_of

import jax_groupgemm as jgg

F32 = np.float32
OPTIONS = {
    "plain": {},
    "hadamard": {"hadamard": True},
    "stochastic": {"stochastic_rounding_key": KEY},
    "both": {"hadamard": True, "stochastic_rounding_key": KEY},
}

pytestmark = host_program.needs_compiler


@pytest.fixture(scope="module")
def library():
    return host_program.build("nvfp4_quantize")


@pytest.fixture(scope="module")
def same(library):
    """Assert that the kernels' bytes are the definition's."""

    def same(x, stochastic_rounding_key=None, hadamard=False):
        key = stochastic_rounding_key
        q = jgg.nvfp4_quantize(x, stochastic_rounding_key=key, hadamard=hadamard)
        want = [np.asarray(a) for a in (q.weight, q.scales, q.global_scale)]
        got = [np.full_like(a, 99) for a in want]
        seed = None if key is None else np.asarray(jax.random.bits(key, (2,), "uint32"))
        library.quantize(
            dtype_number(x.dtype), pointer(x), ctypes.c_long(x.size // 16), pointer(seed),
            int(hadamard), *map(pointer, got),
        )  # fmt: skip
        for g, e in zip(got, want, strict=True):
            np.testing.assert_array_equal(bits_of(g), bits_of(e))

    return same


# Widening is exact: what is done with the values of narrow types is tried on float32.
CASES = [*(("float32", name) for name in OPTIONS), ("bfloat16", "plain"), ("float16", "plain")]


@pytest.mark.parametrize(("dtype", "options"), CASES)
def test_block(rng, same, options, dtype):
    for x in tensors(rng, dtype):
        same(x, **OPTIONS[options])


@pytest.mark.parametrize(("dtype", "options"), CASES)
def test_any_bits(rng, same, options, dtype):
    """Magnitudes of every exponent, NaN and infinities among them."""
    like = next(tensors(rng, dtype))
    word = bits_of(like).dtype
    x = rng.integers(0, np.iinfo(word).max, like.shape, word, True).view(like.dtype)
    same(x, **OPTIONS[options])
    exponents = {"float32": (-149, 128), "bfloat16": (-133, 128), "float16": (-24, 16)}[dtype]
    for exponent in range(*exponents, 12 if options == "plain" else 40):
        one = np.ldexp(rng.standard_normal(like.shape) / 8, exponent)
        same(one.astype(x.dtype), **OPTIONS[options])


def test_what_amax_leaves_out(rng, library):
    """A rotated block whose largest value is a quarter of the sum of all magnitudes, or nearly so,
    is not left out where what was found before is any less than that value."""

    def largest_of(x, least):
        found = np.zeros(len(x), np.uint32)
        library.raised(pointer(x), ctypes.c_long(len(x)), pointer(least), pointer(found))
        return found

    signs = np.sign(nvfp4_oracle.rotate(np.eye(16, dtype=F32))).T  # of each value's terms
    magnitudes = np.concatenate([np.ones((400, 16)), rng.uniform(0, 1, (400, 16)),
                                 10.0 ** rng.integers(-9, 9, (400, 16))])  # fmt: skip
    x = magnitudes * signs[rng.integers(0, 16, len(magnitudes))]
    for exponent in range(-140, 90, 3):
        blocks = np.ldexp(x, exponent).astype(F32)
        largest = largest_of(blocks, np.zeros(len(x), np.uint32))
        some = largest > 0
        assert some.mean() > (0.3 if exponent < -100 else 0.999)
        np.testing.assert_array_equal(largest_of(blocks, largest - some), largest)


@pytest.mark.parametrize("amax", [2688, 1, 0.37, 3e38, 1e-30])
def test_around_thresholds(rng, same, amax):
    """Products of scales with the middles between codes, and float32 neighbours of those."""
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0.5, 1, 4], F32)
    scales = E4M3[1:127, None] * F32(amax / 2688)
    x = rng.choice(middles, (126, 1024)) * scales
    x = (x.astype(F32).view(np.int32) + rng.integers(-2, 3, x.shape, np.int32)).view(F32)
    x *= rng.choice([-1, 1], x.shape)
    x[:, ::16] = 6 * scales
    same(x.astype(F32))


def test_philox(rng, library):
    for block in (0, 1, 2**32 - 1, 2**32, *rng.integers(0, 2**63, 20).tolist()):
        key = rng.integers(0, 2**32, 2).tolist()
        words = np.zeros(8, np.uint32)
        library.random_bits(ctypes.c_uint64(block), *map(ctypes.c_uint32, key), pointer(words))
        got = np.stack([words & 0xFFFF, words >> 16], -1).reshape(-1)
        np.testing.assert_array_equal(got, nvfp4_oracle.sixteen_bits(block, key))


def test_every_random_number(rng, library):
    """Of values between all codes, and of codes and their neighbours."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
    near = [np.nextafter(grid, F32(v)) for v in (0, 7)]
    values = [grid, *near, rng.uniform(0, 6, 40), [1e-40, 1e-9, 7, 1e30, np.inf]]
    u = (np.arange(2**16) + 0.5) / 2**16
    for y in np.concatenate(values).astype(F32):
        codes = np.zeros(2**16, np.uint8)
        library.stochastic_codes(ctypes.c_float(y), pointer(codes))
        t = np.float64(min(y, F32(6)))
        step = 0.5 if t < 2 else 1 if t < 4 else 2
        want = np.searchsorted(grid, t + u * step, side="right") - 1
        np.testing.assert_array_equal(codes, want)
