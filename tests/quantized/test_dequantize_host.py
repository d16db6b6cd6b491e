"""The CUDA kernels' arithmetic of dequantize, compiled for the host, against its definition."""

import ctypes
import dataclasses

import host_program
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from host_program import DTYPES, MODES, dtype_number, mode_number, pointer
from test_quantized import bits_of

import jax_groupgemm as jgg
from jax_groupgemm._quantized.codes import pack

F32 = np.float32

pytestmark = host_program.needs_compiler


@pytest.fixture(scope="module")
def dequantize():
    """Assert that the kernels' bytes are the definition's; the part that is decoded fast."""
    function = host_program.build("dequantize").dequantize
    function.restype = ctypes.c_long

    def check(q, to, want=None):
        """``want`` is the definition's value, unless given."""
        want = jgg.dequantize(q, to) if want is None else want
        units = q.weight.size // q.bits
        scales = np.zeros((units, 6), np.uint32)  # as UnitScales
        group, per_unit = q.group_size, q.scales.size / units
        first = np.asarray(bits_of(q.scales), np.uint32).reshape(-1)
        if q.mode == "affine":
            second = np.asarray(bits_of(q.biases), np.uint32).reshape(-1)
            for i, leaf in enumerate((first, second)):
                of_halves = np.repeat(leaf, max(group, 32) // 16 // max(32 // group, 1))
                scales[:, [i, 4 + i]] = of_halves.reshape(units, 2)
        else:
            scales[:, : round(per_unit)] = first.reshape(units, -1)
        if q.global_scale is not None:
            each = np.repeat(np.asarray(q.global_scale).reshape(-1), units // q.global_scale.size)
            scales[:, 2:4] = each.view(np.uint32)[:, None]
        out = np.empty(want.shape, DTYPES[to])
        scale_dtype = "float32" if q.mode != "affine" else q.scales.dtype.name
        fast = function(
            mode_number(q.mode), q.bits, dtype_number(scale_dtype), dtype_number(to),
            int(q.global_scale is not None), int(q.mode == "affine" and group == 16),
            pointer(np.asarray(q.weight)), pointer(scales), ctypes.c_long(units), pointer(out),
        )  # fmt: skip
        np.testing.assert_array_equal(bits_of(out), bits_of(want))
        return fast / units

    return check


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("mode", sorted({*MODES} - {"affine", "fp8"}))  # each in its own test
@pytest.mark.one_in(4)
def test_every_code_and_scale(dequantize, rng, mode, to):
    q = host_program.every_code_and_scale(rng, mode)
    assert dequantize(q, to) > (0.4 if mode == "mxfp8" else 0.95)
    if mode == "nvfp4":
        globals_ = [0.37, -1e-3, 0, -0.0, np.inf, -np.inf, np.nan, 1e38, 1e-40, 2.0**-140]
        rows = np.array([globals_[i % 10] for i in range(256)], F32)
        rows[:128] = rng.standard_normal(128)
        assert dequantize(dataclasses.replace(q, global_scale=rows), to) > 0.8


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.one_in(5)
def test_affine(dequantize, rng, bits, scale_dtype):
    dtype = np.dtype(DTYPES[scale_dtype])
    count = 16384
    scales, biases = host_program.affine_parameters(rng, dtype, count)
    odd = rng.choice([0, -0.0, np.inf, -np.inf, np.nan, 1e-7, -1e-7], (2, 64)).astype(dtype)
    scales[-64:], biases[-64:] = odd
    biases[-128:-64] = -0.0
    for a in (scales, biases):  # a CPU takes subnormal numbers for zeros: see test_tiny
        a[abs(a.astype(F32)) < F32(2**-100)] *= dtype.type(0)
    codes = rng.integers(0, 2**bits, (count, 32)).astype(np.uint32)
    codes[::7] = 0
    packed = np.asarray(pack(jnp.asarray(codes), bits))
    for group in (32, 16):
        q = jgg.Quantized(
            packed[: count * group // 32], scales.reshape(-1, 32 // group),
            biases.reshape(-1, 32 // group), mode="affine", bits=bits, group_size=group,
        )  # fmt: skip
        for to in DTYPES:
            assert dequantize(q, to) > (0.9 if group == 32 else 0.8)


@pytest.mark.parametrize("bits", [3, 8])
def test_tiny(dequantize, rng, bits):
    """Subnormal scales, biases, products and sums count."""
    tiny = rng.standard_normal((2, 4096)) * 2.0 ** rng.integers(-150, -100, 4096)
    scales, biases = tiny.astype(F32) + F32(0)  # no bias is - 0
    codes = rng.integers(0, 2**bits, (4096, 32)).astype(np.uint32)
    packed = np.asarray(pack(jnp.asarray(codes), bits))
    q = jgg.Quantized(
        packed, scales[:, None], biases[:, None], mode="affine", bits=bits, group_size=32
    )
    want = codes.astype(F32) * scales[:, None] + biases[:, None]
    dequantize(q, "float32", want + F32(0))


@pytest.mark.parametrize("group", [16, 64, 128])
def test_other_groups(dequantize, rng, group):
    w = rng.standard_normal((8, 512)).astype(ml_dtypes.bfloat16)
    assert dequantize(jgg.quantize(w, bits=3, group_size=group), "bfloat16") == 1
