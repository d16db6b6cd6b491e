"""Few float32 rows and a weight as it is stored, quantized along the axis of the result
(ffi/quantized/device/scaled_x_lines.cuh), run on the host lane by lane."""

import ctypes

import host_program
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from host_memory import copied
from host_program import mode_number, pointer

import jax_groupgemm as jgg

pytestmark = host_program.needs_compiler
# Rows, bits and group size.
CASES = [
    *((1, bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
    *((8, bits, 32) for bits in (2, 3, 4, 5, 6, 8)),
    (2, 4, 32), (3, 4, 64), (2, 4, 128), (7, 8, 128), (1, 3, 32), (2, 5, 128),
]  # fmt: skip


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "out")),
        *((name, ctypes.c_int32) for name in ("rows", "n", "k", "group_size")),
    ]


def product(x, q):
    """x (rows, N) @ q (N, K), float32."""
    n, k = q.shape
    out = np.full((len(x), k), np.nan, np.float32)
    floats = [q.scales] if q.biases is None else [q.scales, q.biases]
    if q.mode == "fp8":  # of each line
        floats = [jnp.repeat(q.scales, q.block[0], 0)[:n]]
    beside = np.stack([np.asarray(a, np.float32) for a in floats], -1)
    arrays = copied(x), copied(np.asarray(q.weight)), copied(beside), out
    problem = Problem(*map(pointer, arrays), rows=len(x), n=n, k=k, group_size=q.group_size)
    program = host_program.build_kernels("scaled_x_lines")
    assert program.scaled_x_lines(ctypes.byref(problem), mode_number(q.mode), q.bits) == 0
    return out


@pytest.mark.parametrize(
    ("rows", "mode", "bits", "group"),
    [*((rows, "affine", *of) for rows, *of in CASES), (2, "fp8", 8, 128), (5, "fp8", 8, 128)],
)
@pytest.mark.one_in(3)
def test_values(rng, rows, mode, bits, group):
    q = oracle.random_quantized(rng, (160, 384 if group == 128 else 320), mode, bits, group)
    x = rng.standard_normal((rows, 160), np.float32)
    want = oracle.f64(x) @ oracle.dequantize(q)
    oracle.assert_close(product(x, q), want, tolerance=4e-7)


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("group", [32, 64])
def test_nan_stays_in_its_row_and_columns(rng, group, rows):
    q = oracle.random_quantized(rng, (128, 320), "affine", 4, group, "bfloat16")
    bad = jgg.Quantized(
        q.weight, q.scales.at[70, 1].set(jnp.nan), q.biases, mode="affine", bits=4, group_size=group
    )
    x = rng.standard_normal((rows, 128), np.float32)
    x[1, 5] = np.nan
    nan = np.zeros((rows, 320), bool)
    nan[1] = nan[:, group : 2 * group] = True
    np.testing.assert_array_equal(np.isnan(product(x, bad)), nan)


def test_a_nan_code_stays_in_its_column(rng):
    q = oracle.random_quantized(rng, (128, 256), "fp8", 8, 128)
    codes = np.asarray(q.weight).view(np.uint8).copy()
    codes[70, 130] = 0x7F
    bad = jgg.Quantized(
        jnp.asarray(codes.view(q.weight.dtype)), q.scales, mode="fp8", bits=8, group_size=128,
        block=q.block,
    )  # fmt: skip
    x = rng.standard_normal((2, 128), np.float32)
    np.testing.assert_array_equal(np.isnan(product(x, bad)), np.tile(np.arange(256) == 130, (2, 1)))
