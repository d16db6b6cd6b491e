"""The CUDA kernels' arithmetic of fp8_quantize, compiled for the host, against numpy's."""

import ctypes

import fp8_oracle
import host_program
import ml_dtypes
import numpy as np
import pytest
from host_program import pointer

F32 = np.float32
ELEMENTS = ("e4m3", "e5m2")

pytestmark = host_program.needs_compiler


@pytest.fixture(scope="module")
def library():
    library = host_program.build("fp8_quantize")
    library.stochastic_codes.argtypes = [ctypes.c_float, ctypes.c_int, ctypes.c_void_p]
    return library


def any_magnitudes(rng, count) -> np.ndarray:
    """Of any finite bits, and every bfloat16."""
    bits = np.concatenate([np.arange(0x7F80) << 16, rng.integers(0, 0x7F800000, count)])
    return bits.astype(np.uint32).view(F32)


@pytest.mark.parametrize("element", ELEMENTS)
def test_scales(rng, library, element):
    mantissas = np.arange(2**23, 2**24).astype(F32)  # all that there are
    largest = [any_magnitudes(rng, 100000), mantissas, F32([np.inf, np.nan])]
    largest = np.concatenate(largest)
    want = np.maximum(largest / fp8_oracle.LARGEST[element], F32(2.0**-126))
    want[largest == 0] = 1
    want[~np.isfinite(largest)] = np.nan
    got = np.empty_like(want)
    for power_of_two in (0, 1):
        library.scales(pointer(largest), ctypes.c_long(got.size), ELEMENTS.index(element),
                       power_of_two, pointer(got))  # fmt: skip
        np.testing.assert_array_equal(got, want)
        mantissa, exponent = np.frexp(want)
        want = np.where(largest == 0, want, np.ldexp(F32(1), exponent - (mantissa == 0.5)))
        want[~np.isfinite(largest)] = np.nan


def quotients(rng, element, count):
    """Elements (count, 4) and scales. Most quotients are next to the middle between two codes,
    where a unit in the last place decides."""
    scales = rng.choice(any_magnitudes(rng, count), count)
    scales = np.clip(scales, F32(2.0**-126), F32(2.0**119 if element == "e4m3" else 2.0**112))
    codes = np.arange(128).astype(np.uint8).view(fp8_oracle.DTYPES[element]).astype(np.float64)
    codes = codes[np.isfinite(codes)]
    middles = rng.choice(codes[:-1] + np.diff(codes) / 2, (count, 4))
    middles *= 1 + rng.integers(-3, 4, middles.shape) * 2.0**-24
    middles[:, 3] = 2.0 ** rng.uniform(-45, 8, count)
    x = (middles * scales[:, None].astype(np.float64)).astype(F32)
    return x * rng.choice([F32(-1), F32(1)], x.shape), scales


@pytest.mark.parametrize("element", ELEMENTS)
def test_codes(rng, library, element):
    x, scales = quotients(rng, element, 100000)
    got = np.empty(len(x), np.uint32)
    library.codes(pointer(x), pointer(scales), ctypes.c_long(len(x)), ELEMENTS.index(element),
                  pointer(got))  # fmt: skip
    with np.errstate(under="ignore"):
        want = (x / scales[:, None]).astype(fp8_oracle.DTYPES[element])
    np.testing.assert_array_equal(got.view(np.uint8).reshape(x.shape), want.view(np.uint8))


def near_middles(dtype, element, scales):
    """For each scale, the elements of a dtype next to each middle between two codes: all whose
    codes a quotient's last place may decide. And those of the codes themselves, zeros among them.
    """
    codes = np.arange(128).astype(np.uint8).view(fp8_oracle.DTYPES[element]).astype(np.float64)
    codes = codes[np.isfinite(codes)]
    values = np.concatenate([codes, codes[:-1] + np.diff(codes) / 2])
    values = np.concatenate([values, values[::16] * 2.0**-30])
    with np.errstate(over="ignore"):
        near = (scales.astype(np.float64)[:, None] * values).astype(dtype).view(np.uint16)
    near = near[..., None].astype(np.int32) + [-1, 0, 0, 1]
    x = np.maximum(near, 0).astype(np.uint16)
    x[..., 2] |= 0x8000
    return x.view(dtype).astype(F32).reshape(len(scales), -1)


@pytest.mark.parametrize("power_of_two", [0, 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_codes_of_16_bits(library, element, dtype, power_of_two):
    """Quotients are not always the nearest float32, but codes are as if they were: of the scale of
    each largest magnitude that there is."""
    dtype = host_program.DTYPES[dtype]
    largest = np.arange(0x8000).astype(np.uint16).view(dtype).astype(F32)
    largest = largest[(largest > 0) & np.isfinite(largest)]
    scales = np.empty_like(largest)
    library.scales(pointer(largest), ctypes.c_long(largest.size), ELEMENTS.index(element),
                   power_of_two, pointer(scales))  # fmt: skip

    def check(x, scales):
        x, scales = np.ascontiguousarray(x), np.ascontiguousarray(scales)
        got = np.empty(len(x), np.uint32)
        library.split_codes(pointer(x), pointer(scales), ctypes.c_long(len(x)),
                            ELEMENTS.index(element), pointer(got))  # fmt: skip
        limit = fp8_oracle.LARGEST[element]
        with np.errstate(under="ignore", over="ignore"):
            want = np.clip(x / scales[:, None], -limit, limit).astype(fp8_oracle.DTYPES[element])
        np.testing.assert_array_equal(got.view(np.uint8).reshape(x.shape), want.view(np.uint8))

    scales = np.unique(scales)
    for part in np.array_split(scales, max(1, len(scales) // 2000)):
        x = near_middles(dtype, element, part)
        # None is larger than the largest of its block.
        largest = part[:, None].astype(np.float64) * fp8_oracle.LARGEST[element]
        x[~(np.abs(x) <= largest * (1 + 2.0**-20))] = 0
        check(x.reshape(-1, 4), np.repeat(part, x.shape[1] // 4))


@pytest.mark.parametrize("element", ELEMENTS)
def test_stochastic_codes(rng, library, element):
    """Of each random number, floor(|q| / step + (number + 0.5) / 2**16) steps."""
    mantissa, emin, limit = {"e4m3": (3, -6, 0x7E), "e5m2": (2, -14, 0x7B)}[element]
    largest = fp8_oracle.LARGEST[element]
    edges = [0, largest, np.nextafter(largest, F32(np.inf)), 2.0**emin, 2.0 ** (emin - mantissa)]
    edges += [np.nextafter(F32(2.0**emin), F32(0)), 2.0 ** (emin - mantissa - 17)]
    edges += [2.0 ** (emin - mantissa - 18), 1e-30, 1.0, 1.999]
    u = (np.arange(2**16) + 0.5) / 2**16
    got = np.empty(2**16, np.uint8)
    for q in [*edges, *2.0 ** rng.uniform(emin - 12, 8, 20)]:
        q = F32(q)
        library.stochastic_codes(q, ELEMENTS.index(element), pointer(got))
        exponent = max(int(np.frexp(q)[1]) - 1, emin) if q > 0 else emin
        steps = np.ldexp(np.longdouble(q), mantissa - exponent) + u
        want = np.minimum((exponent - emin) * 2**mantissa + np.floor(steps), limit)
        np.testing.assert_array_equal(got, want.astype(np.uint8))


def test_dtypes_of_ml_dtypes_round_as_codes_do():
    """numpy's conversion is the reference here: to nearest even."""
    x = F32([464, 449, 2.0**-10, 1.5 * 2.0**-9, 17 / 16, 19 / 16])
    got = x[1:].astype(ml_dtypes.float8_e4m3fn).astype(F32)
    np.testing.assert_array_equal(got, F32([448, 0, 2.0**-8, 1, 1.25]))
