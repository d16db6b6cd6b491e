"""The kernels of packed weights on every GPU (ffi/quantized/device/packed_sm80.cuh, of few rows
packed_few_product_sm80.cuh), run on the host lane by lane."""

import ctypes
import dataclasses

import host_program
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from host_memory import copied
from host_program import mode_number, pointer

import jax_groupgemm as jgg

pytestmark = host_program.needs_compiler
FORMATS = [("nvfp4", 16), ("mxfp4", 32), ("affine", 32), ("affine", 64), ("affine", 128)]
SIZES, SEGMENTS = 0, 2  # MetadataKind


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in
          ("data", "offset", "x", "codes", "scales", "global_scale", "out")),
        *((name, ctypes.c_int64) for name in ("x_bytes", "codes_bytes", "scales_bytes")),
        *((name, ctypes.c_int32) for name in
          ("kind", "count", "groups", "rows_x", "rows", "n", "k", "tile_scales", "gated",
           "half", "global_columns", "tile", "blocks")),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def kernel():
    stand_in = f"-I{host_program.ROOT}/tests/lib/stand_in"
    return host_program.build_kernels("packed_kernel", stand_in).packed_kernel


def product(kernel, x, q, data, *, kind=SIZES, gated=False, tile=128, blocks=2):
    """The float32 sums of x (T, K) and q (G, N, K), (T, N); 7 where nothing is written."""
    packed = jgg.prepack(q)
    assert packed.layout == "sm90"
    groups, n, k = q.shape
    scale = None if q.global_scale is None else np.asarray(q.global_scale, np.float32)
    out = np.full((len(x), n), 7, np.float32)
    x, half = x.view(np.uint16), x.dtype == np.float16
    codes, scales = np.asarray(packed.weight), np.asarray(packed.scales)
    data = np.array(data, np.int32)
    arrays = (data, None, copied(x), copied(codes), copied(scales), scale, out)
    per_tile = scales.nbytes // (groups * (n // 64) * (k // 64))
    columns = scale is not None and scale.size > groups
    problem = Problem(
        *(pointer(a) for a in arrays), x.nbytes, codes.nbytes, scales.nbytes, kind, len(data),
        groups, len(x), len(x), n, k, per_tile, gated, half, columns, tile, blocks,
    )  # fmt: skip
    assert kernel(ctypes.byref(problem), mode_number(q.mode)) == 0
    return out


def of(rng, mode, group_size, shape, rows, dtype="bfloat16", scale_shape=None):
    scale = None
    if mode == "nvfp4":
        scale = jnp.asarray(rng.uniform(0.5, 2, scale_shape or shape[:1]), jnp.float32)
    q = oracle.random_quantized(rng, shape, mode, 4, group_size, dtype, scale=scale)
    return q, oracle.random(rng, (rows, shape[-1]), dtype)


TILES = [8, 64, 128]  # rows; the first is of few rows


@pytest.mark.parametrize(("mode", "group_size"), FORMATS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.one_in(4)
def test_values(kernel, rng, mode, group_size, tile):
    """A segment of more than a tile, an empty one, rows of none; a part of a tile's columns; more
    slices than a ring has, and more than its warps."""
    sizes, k, n = (tile + 9, 0, 5), 384 if tile > 8 else 1152, 192
    q, x = of(rng, mode, group_size, (3, n, k), sum(sizes) + 3)
    out = product(kernel, x, q, sizes, tile=tile)
    oracle.assert_close(out, _want(x, q, sizes, tile), k=k)
    assert not out[sum(sizes) :].any()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("mode", "group_size"), [("affine", 32), ("nvfp4", 16), ("mxfp4", 32)])
@pytest.mark.one_in(4)
def test_gates_and_float16(kernel, rng, tile, mode, group_size):
    """Both halves of a gated product's columns, of which a tile has a part of each; few slices."""
    sizes, n = (20, 3), 384
    q, x = of(rng, mode, group_size, (2, n, 128), 24, "float16", scale_shape=(2, n))
    out = product(kernel, x, q, sizes, tile=tile, gated=True)
    oracle.assert_close(out, _want(x, q, sizes, tile), k=128)


@pytest.mark.parametrize("tile", [8, 64])
def test_a_table_of_segments(kernel, rng, tile):
    """Rows of x that come in any order, rows of the result that no segment has."""
    q, x = of(rng, "affine", 64, (2, 128, 128), 30)
    table = np.array([[4, 2, 9, 1], [0, 12, 6, 0], [21, 18, 3, 1]], np.int32)
    out = product(kernel, x, q, table, kind=SEGMENTS, tile=tile)
    w, want = oracle.f64(jgg.dequantize(q, "bfloat16")), np.zeros((30, 128))
    for start, to, length, weight in table:
        want[to : to + length] = oracle.f64(x[start : start + length]) @ w[weight].T
    oracle.assert_close(out, want, k=128)


def _want(x, q, sizes, tile):
    """The kernel of few rows leaves global scales to its epilogue."""
    if tile == 8:
        q = dataclasses.replace(q, global_scale=None)
    return oracle.grouped_qmm(x, q, np.array(sizes))
