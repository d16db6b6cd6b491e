"""Few float32 rows and an affine weight as it is stored (ffi/quantized/device/scaled_lines.cuh),
and lines as pairs of float16, run on the host lane by lane."""

import ctypes

import host_program
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from host_memory import copied
from host_program import DTYPES, mode_number, pointer

import jax_groupgemm as jgg
from jax_groupgemm._grouped.planes import as_planes
from jax_groupgemm._quantized import call, ordered

pytestmark = host_program.needs_compiler
# Rows of a tile (a float32 row has three), bits, K, group size and the dtype of scales.
CASES = [
    *((3, bits, 256, 64, "bfloat16") for bits in (2, 3, 4, 5, 6, 8)),
    *((8, bits, 320, 64, "float32") for bits in (2, 3, 4, 5, 6, 8)),
    *((6, 4, 384, group, scales) for group in (32, 64, 128) for scales in DTYPES),
    (1, 4, 128, 64, "float16"),
    (5, 8, 96, 32, "float16"),
]
NAMES = "rows", "n", "k", "group_size", "half_scales", "float_scales"
FLOATS = "codes", "scales", "biases"


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "floats", "x_sums", *FLOATS, "out")),
        *((name, ctypes.c_int32) for name in NAMES),
    ]


def product(x, q):
    """x (rows, K) @ q (N, K).T, float32. x is bfloat16, or float32, whose rows become four each."""
    (rows, k), n = x.shape, q.shape[0]
    out = np.full((rows, n), np.nan, np.float32)
    sums = call._sums_of(x, 32)
    if x.dtype == jnp.float32:
        rows_of_x, rows = (None, x), 4 * rows
        sums = jnp.stack([sums, *(jnp.zeros_like(sums),) * 3], 2).reshape(-1, rows, 4)
    else:
        rows_of_x = ordered.ordered(x, q.bits, by_threads=True), None
    arrays = *rows_of_x, sums, q.weight, q.scales, q.biases
    kept = [None if a is None else copied(np.asarray(a)) for a in arrays]
    problem = Problem(
        *map(pointer, (*kept, out)), rows=rows, n=n, k=k, group_size=q.group_size,
        half_scales=q.scales.dtype == jnp.float16, float_scales=q.scales.dtype == jnp.float32,
    )  # fmt: skip
    program = host_program.build_kernels("scaled_lines")
    assert program.scaled_lines(ctypes.byref(problem), q.bits) == 0
    return out


@pytest.mark.parametrize(("rows", "bits", "k", "group", "scales"), CASES)
@pytest.mark.one_in(4)
def test_values(rng, rows, bits, k, group, scales):
    q = oracle.random_quantized(rng, (80, k), "affine", bits, group, scales)
    x = jnp.asarray(rng.standard_normal((rows, k)), jnp.bfloat16)
    want = oracle.f64(x) @ oracle.dequantize(q).T
    oracle.assert_close(product(x, q), want, tolerance=3e-7)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("rows", "group"), [(1, 64), (2, 64), (1, 32), (2, 32)])
@pytest.mark.one_in(6)
def test_rows_of_float32(rng, rows, bits, group):
    q = oracle.random_quantized(rng, (80, 320), "affine", bits, group, "float32")
    x = jnp.asarray(rng.standard_normal((rows, 320)), jnp.float32)
    want = oracle.f64(x) @ oracle.dequantize(q).T
    oracle.assert_close(product(x, q), want, tolerance=3e-7)


def test_parts_of_float32_rows(rng):
    q = oracle.random_quantized(rng, (64, 256), "affine", 4, 64, "float32")
    x = jnp.asarray(rng.standard_normal((2, 256)), jnp.float32)
    sums = product(as_planes(x, 3).reshape(6, 256), q).reshape(2, 3, 64)
    oracle.assert_close(sums.sum(1), oracle.f64(x) @ oracle.dequantize(q).T, tolerance=3e-7)


def test_nan_stays_in_its_row_and_column(rng):
    q = oracle.random_quantized(rng, (64, 256), "affine", 4, 64, "bfloat16")
    bad = jgg.Quantized(
        q.weight, q.scales.at[7, 1].set(jnp.nan), q.biases, mode="affine", bits=4, group_size=64
    )
    x = rng.standard_normal((6, 256))
    x[3, 70] = np.inf
    got = product(jnp.asarray(x, jnp.bfloat16), bad)
    wrong = np.zeros((6, 64), bool)
    wrong[3] = wrong[:, 7] = True
    np.testing.assert_array_equal(~np.isfinite(got), wrong)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_lines_in_float16(rng, mode):
    """Every code beside every scale, as ``dequantize`` rounds them."""
    q = host_program.every_code_and_scale(rng, mode)
    codes = np.ascontiguousarray(np.asarray(q.weight).reshape(-1, q.bits), np.uint32)
    scales = np.ascontiguousarray(q.scales)
    out = np.empty((len(codes), 32), np.float16)
    small = np.full(out.shape, np.inf, np.float16)
    halves = host_program.build_kernels("scaled_lines").halves_of_lines
    halves.restype = ctypes.c_float
    unit = halves(
        mode_number(mode), pointer(codes), pointer(scales), ctypes.c_long(len(codes)), pointer(out),
        pointer(small),
    )  # fmt: skip
    want = np.asarray(jgg.dequantize(q, "float16")).reshape(-1, 32)
    np.testing.assert_array_equal(out.astype(np.float32) * unit, want.astype(np.float32))
    taken = np.isfinite(small).all(1)
    np.testing.assert_array_equal(small[taken], want[taken])
    assert taken.sum() == (16 * 29 if mode == "mxfp4" else 0)  # scales from 2^-28 to 1
