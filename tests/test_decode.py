"""The CUDA kernels' decoding of quantized weights, compiled for the host: every code and scale."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_groupgemm as jgg
from jax_groupgemm import _quantized

ROOT = Path(__file__).parent.parent
COMPILER = shutil.which("c++")
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

pytestmark = pytest.mark.skipif(
    COMPILER is None or not (ROOT / "ffi").exists(), reason="needs a C++ compiler and the sources"
)


@pytest.fixture(scope="module")
def decode(tmp_path_factory):
    path = tmp_path_factory.mktemp("decode") / "decode.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror"]
    files = [ROOT / "tests/decode.cc", "-I", ROOT / "ffi", "-o", path]
    subprocess.run([COMPILER, *flags, *files], check=True)
    function = ctypes.CDLL(path).decode
    function.restype = ctypes.c_long

    def call(mode, bits, scale_dtype, to, packed, first, second, fast):
        """Values of units of 32 codes, and how many of those were not decoded one by one."""
        arrays = [np.ascontiguousarray(a, np.uint32) for a in (packed, first, second)]
        assert arrays[0].shape == (first.size, bits)
        out = np.empty((first.size, 32), DTYPES[to])
        numbers = [MODES.index(mode), bits, *(list(DTYPES).index(d) for d in (scale_dtype, to))]
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*arrays, out)]
        count = function(*numbers, *pointers[:3], ctypes.c_long(first.size), int(fast), pointers[3])
        return out, count

    return call


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("mode", MODES[1:])
def test_every_code_and_scale(decode, rng, mode, to, fast):
    bits, group = (8, 32) if mode == "mxfp8" else (4, 16 if mode == "nvfp4" else 32)
    codes = np.arange(256, dtype=np.uint32) % 2**bits
    codes = np.stack([codes, np.where(codes & 0x7F == 0x7F, 0, codes)])  # without NaN, too
    codes = np.broadcast_to(codes, (256, 2, 256))
    scales = np.empty((256, 2, 256 // group), np.uint8)
    scales[:] = np.arange(256, dtype=np.uint8)[:, None, None]
    if mode == "nvfp4":  # two for 32 codes
        scales[..., 1::2] = rng.integers(0, 256, scales[..., 1::2].shape)
    packed = np.asarray(_quantized.pack(jnp.asarray(codes), bits))
    q = jgg.Quantized(packed, scales, mode=mode, bits=bits, group_size=group)
    want = np.asarray(jgg.dequantize(q, to)).reshape(-1, 32)
    first, second = scales.reshape(-1, 32 // group)[:, [0, -1]].T
    got, count = decode(mode, bits, "float32", to, packed.reshape(-1, bits), first, second, fast)
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    bits_of = lambda x: np.where(nan, 0, x.view({2: np.uint16, 4: np.uint32}[x.itemsize]))
    np.testing.assert_array_equal(bits_of(got), bits_of(want))
    assert count == 0 or count > first.size * (0.4 if mode == "mxfp8" else 0.99)
    assert fast == (count > 0)


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_affine(decode, rng, bits, scale_dtype):
    dtype = np.dtype(DTYPES[scale_dtype])
    count, word = 16384, {2: np.uint16, 4: np.uint32}[dtype.itemsize]
    any_bits = rng.integers(0, 2 ** (8 * dtype.itemsize), (2, count), np.uint64).astype(word)
    scales, biases = any_bits.view(dtype)
    usual = slice(None, count // 2)
    scales[usual] = (rng.normal(size=count // 2) / 64).astype(dtype)
    biases[usual] = (scales[usual].astype(np.float32) * rng.integers(-20, 20, count // 2)).astype(
        dtype
    )
    codes = rng.integers(0, 2**bits, (count, 32)).astype(np.uint32)
    packed = np.asarray(_quantized.pack(jnp.asarray(codes), bits))
    with np.errstate(all="ignore"):
        product = codes.astype(np.float32) * scales.astype(np.float32)[:, None]
        exact = product + biases.astype(np.float32)[:, None]
    for to in DTYPES:
        with np.errstate(all="ignore"):
            want = exact.astype(DTYPES[to]).astype(np.float32)
        for fast in (False, True):
            got, decoded = decode(
                "affine", bits, scale_dtype, to, packed, scales.view(word), biases.view(word), fast
            )
            np.testing.assert_array_equal(got.astype(np.float32), want)
            assert (decoded > 0.9 * count) == fast
