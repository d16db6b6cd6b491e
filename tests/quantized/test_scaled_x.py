"""Few float32 rows and a weight that is quantized along the axis of their sums
(ffi/quantized/device/scaled_x_sm90.cuh), run on the host lane by lane."""

import ctypes

import host_program
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from host_memory import copied
from host_program import DTYPES, mode_number, pointer

import jax_groupgemm as jgg

pytestmark = host_program.needs_compiler
# Bits, group size and the dtype of scales.
AFFINE = [
    *((bits, 64, "bfloat16") for bits in (2, 3, 4, 5, 6, 8)),
    *((4, group, scales) for group in (16, 32, 64, 128) for scales in DTYPES),
]
SIZES = "n", "k", "tile_scales", "half_scales", "float_scales", "tiles_share", "tile_groups"


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "out")),
        *((name, ctypes.c_int32) for name in SIZES),
    ]


def product(x, q):
    """x (8, N) @ q (N, K), float32."""
    packed = jgg.prepack(q)
    assert packed.layout == "sm90"
    n, k = q.shape
    out = np.zeros((8, k), np.float32)
    arrays = copied(x), copied(np.asarray(packed.weight)), copied(np.asarray(packed.scales)), out
    problem = Problem(
        *map(pointer, arrays), n=n, k=k,
        tile_scales=packed.scales.nbytes // (n // 64 * (k // 64)),
        half_scales=packed.scales.dtype == jnp.uint16,
        float_scales=q.mode == "affine" and q.scales.dtype == jnp.float32,
        tiles_share=q.group_size >= 128, tile_groups=max(64 // q.group_size, 1),
    )  # fmt: skip
    program = host_program.build_kernels("scaled_x")
    assert program.scaled_x(ctypes.byref(problem), mode_number(q.mode), q.bits) == 0
    return out


@pytest.mark.parametrize(
    ("mode", "bits", "group", "scales"),
    [*(("affine", *of) for of in AFFINE), ("fp8", 8, 128, "float32")],
)
@pytest.mark.one_in(4)
def test_values(rng, mode, bits, group, scales):
    q = oracle.random_quantized(rng, (192, 384 if group == 128 else 320), mode, bits, group, scales)
    x = rng.standard_normal((8, 192), np.float32)
    want = oracle.f64(x) @ oracle.dequantize(q)
    oracle.assert_close(product(x, q), want, tolerance=4e-7)


@pytest.mark.parametrize("group", [16, 64])
def test_nan_stays_in_its_row_and_columns(rng, group):
    q = oracle.random_quantized(rng, (128, 320), "affine", 4, group, "bfloat16")
    bad = jgg.Quantized(
        q.weight, q.scales.at[70, 1].set(jnp.nan), q.biases, mode="affine", bits=4, group_size=group
    )
    x = rng.standard_normal((8, 128), np.float32)
    x[3, 5] = np.nan
    nan = np.zeros((8, 320), bool)
    nan[3] = nan[:, group : 2 * group] = True
    np.testing.assert_array_equal(np.isnan(product(x, bad)), nan)
