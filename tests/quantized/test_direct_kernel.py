"""The kernel of few rows in all (ffi/quantized/device/direct_sm90.cuh), run on the host lane by
lane."""

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
FORMATS = [
    ("nvfp4", 4, 16), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("fp8", 8, 128),
    *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)), ("affine", 4, 32), ("affine", 4, 128),
]  # fmt: skip


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in
          ("sizes", "offset", "x", "codes", "scales", "global_scale", "out")),
        *((name, ctypes.c_int32) for name in
          ("count", "groups", "rows", "n", "k", "tile_scales", "clears_rest", "gated", "eights",
           "pairs")),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def kernel():
    return host_program.build_kernels("direct_kernel").direct_kernel


def product(kernel, x, q, sizes, *, offset=None, gated=False, clears_rest=True, eights=1,
            pairs=False):  # fmt: skip
    """The float32 sums of x (T, K) and q (G, N, K), (T, N); 7 where nothing is written. A block has
    so many times 8 rows, and perhaps pairs of columns."""
    packed = jgg.prepack(q)
    assert packed.layout == "sm90"
    groups, n, k = q.shape
    scale = None if q.global_scale is None else np.asarray(q.global_scale, np.float32)
    out = np.full((len(x), n), 7, np.float32)
    arrays = {
        "sizes": np.array(sizes, np.int32), "x": copied(x.view(np.uint16)),
        "offset": None if offset is None else np.array([offset], np.int32),
        "codes": copied(np.asarray(packed.weight)), "scales": copied(np.asarray(packed.scales)),
        "global_scale": scale, "out": out,
    }  # fmt: skip
    per_tile = packed.scales.nbytes // (groups * (n // 64) * (k // 64))
    numbers = (len(sizes), groups, len(x), n, k, per_tile, clears_rest, gated, eights, pairs)
    problem = Problem(*(pointer(a) for a in _in_order(arrays)), *numbers)
    assert kernel(ctypes.byref(problem), mode_number(q.mode), q.bits) == 0
    return out


def _in_order(arrays):
    return [arrays[name] for name, kind in Problem._fields_ if kind is ctypes.c_void_p]


def of(rng, mode, bits, group_size, shape, rows):
    scale = jnp.asarray(rng.uniform(0.5, 2, shape[:1]), jnp.float32) if mode == "nvfp4" else None
    q = oracle.random_quantized(rng, shape, mode, bits, group_size, "bfloat16", scale=scale)
    return q, oracle.random(rng, (rows, shape[-1]), "bfloat16")


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.one_in(4)
def test_values(kernel, rng, mode, bits, group_size, gated):
    """More k than the warps take at a time, and less than a tile for each warp; a group of more
    than eight rows, an empty one, rows of none."""
    for slices, sizes, rows in ((34, (2,), 2), (6, (0, 10, 1), 12)):
        q, x = of(rng, mode, bits, group_size, (len(sizes), 128, 64 * slices), rows)
        out = product(kernel, x, q, sizes, gated=gated)
        oracle.assert_close(out, oracle.grouped_qmm(x, q, np.array(sizes)), k=64 * slices)
        assert not out[sum(sizes) :].any()


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
@pytest.mark.parametrize("kind", ["plain", "gated", "pairs"])
@pytest.mark.one_in(8)
def test_sixteen_rows(kernel, rng, mode, bits, group_size, kind):
    for rows, slices in ((9, 34), (20, 6)):
        q, x = of(rng, mode, bits, group_size, (1, 128, 64 * slices), rows)
        out = product(kernel, x, q, (rows,), eights=2, gated=kind == "gated", pairs=kind == "pairs")
        oracle.assert_close(out, oracle.grouped_qmm(x, q, np.array([rows])), k=64 * slices)


@pytest.mark.parametrize(
    ("sizes", "offset"),
    [((3, 0, 5), None), ((3, 0, 5), 1), ((0, 0, 0), None), ((2**31 - 1, 1, 1), 0), ((-4, 2, 2), 9)],
)
def test_rows_of_no_group(kernel, rng, sizes, offset):
    """They are zeros, or left as they are; weights are some of the groups'."""
    groups = 3 if offset is None else 2
    q, x = of(rng, "nvfp4", 4, 16, (groups, 64, 192), 9)
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), 9)
    want = np.zeros((9, 64))
    here = np.zeros(9, bool)
    w = oracle.f64(jgg.dequantize(q, "float32"))
    for g, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if 0 <= g - (offset or 0) < groups:
            want[begin:end] = oracle.f64(x[begin:end]) @ w[g - (offset or 0)].T
            here[begin:end] = True
    for clears_rest in (True, False):
        out = product(kernel, x, q, sizes, offset=offset, clears_rest=clears_rest)
        oracle.assert_close(out[here], want[here], k=192)
        assert (out[~here] == (0 if clears_rest else 7)).all()


@pytest.mark.parametrize(("eights", "pairs"), [(1, False), (2, False), (2, True)])
def test_rows_of_the_only_group(kernel, rng, eights, pairs):
    """Nothing waits for its size, which may be too large, too small or negative."""
    count = 11 + 16 * (eights - 1)
    q, x = of(rng, "nvfp4", 4, 16, (1, 128, 128), count)
    want = oracle.grouped_qmm(x, q, np.array([count]))
    for size, clears_rest in (
        (count, True),
        (40, False),
        (9, True),
        (9, False),
        (-2, True),
        (0, False),
    ):
        rows = min(max(size, 0), count)
        out = product(kernel, x, q, (size,), clears_rest=clears_rest, eights=eights, pairs=pairs)
        oracle.assert_close(out[:rows], want[:rows], k=128)
        assert (out[rows:] == (0 if clears_rest else 7)).all()


def test_nan_stays_in_its_row_and_its_weight(kernel, rng):
    q, x = of(rng, "mxfp4", 4, 32, (3, 64, 128), 6)
    x = x.at[2, 5].set(np.nan)
    scales = np.asarray(q.scales).copy()
    scales[2, 7, 1] = 255
    q = dataclasses.replace(q, scales=jnp.asarray(scales))
    out = product(kernel, x, q, (2, 2, 2))
    bad = np.zeros((6, 64), bool)
    bad[2] = True
    bad[4:, 7] = True
    np.testing.assert_array_equal(np.isnan(out), bad)
