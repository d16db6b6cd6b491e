"""The kernel of FP8 products by mma.sync (ffi/fp8/device/gemm_sm89.cuh), run on the host: copies,
ldmatrix and products are plain C++, everything else is the kernel's own."""

import ctypes
from pathlib import Path

import host_program
import ml_dtypes
import numpy as np
import pytest
from host_program import pointer

pytestmark = host_program.needs_compiler
POINTERS = ("a", "b", "a_scales", "b_scales", "out", "sizes", "offset")
SHAPE = ("rows", "n", "k", "count", "weights")
FLAGS = ("wgrad", "e5m2", "accumulate", "dtype", "blocks")
ERRORS = {"float32": 1e-6, "bfloat16": 2.0**-8}


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in SHAPE),
        *((name, ctypes.c_int32) for name in FLAGS),
    ]


@pytest.fixture(scope="module")
def program():
    return host_program.build_kernels(
        "fp8_gemm_sm89", "-O1", "-Wno-maybe-uninitialized", "-Itests/lib/stand_in"
    )


def random_codes(rng, shape, e5m2=False):
    """Any finite codes, and what they stand for."""
    dtype = ml_dtypes.float8_e5m2 if e5m2 else ml_dtypes.float8_e4m3fn
    signs = rng.integers(0, 2, shape, np.uint8) << 7
    codes = rng.integers(0, 124 if e5m2 else 127, shape, np.uint8) | signs
    return codes, codes.view(dtype).astype(np.float64)


def random_scales(rng, shape):
    return (rng.uniform(0.5, 2, shape) / 1e4).astype(np.float32)


def along(scales, length):
    return np.repeat(scales.astype(np.float64), 128, -1)[..., :length]


def run(program, operands, out, sizes, offset=None, **of):
    """The kernel's results in what `out` holds, which has more room behind it."""
    aligned = np.zeros(out.size + 64, out.dtype)
    aligned = aligned[-aligned.ctypes.data % 16 // out.itemsize :][: out.size + 32]
    aligned[: out.size], aligned[out.size :] = out.ravel(), 77
    sizes = np.asarray(sizes, np.int32)
    offset = None if offset is None else np.array([offset], np.int32)
    of = {"count": len(sizes), "accumulate": 0, "blocks": 3, **of}
    of["dtype"] = host_program.dtype_number(out.dtype)
    operands = (*operands, aligned, sizes, offset)
    program.fp8_gemm_sm89(
        ctypes.byref(Problem(*map(pointer, operands), *(int(of[n]) for n in SHAPE + FLAGS)))
    )
    assert (aligned[out.size :] == 77).all()
    return aligned[: out.size].reshape(out.shape)


def assert_right(got, want):
    error = np.linalg.norm(got.astype(np.float64) - want)
    assert error <= ERRORS[got.dtype.name] * np.linalg.norm(want)


# Rows: two tiles that share a group's; one row; 97 of a tile, whose warps take 64; none; and some
# that belong to no group.
SIZES = [130, 0, 1, 97, 0, 20]


@pytest.mark.parametrize(
    ("n", "k", "dtype", "e5m2"),
    [
        (264, 272, "float32", False),
        (8, 16, "bfloat16", True),
        pytest.param(136, 400, "float32", True, marks=pytest.mark.weekly),
        pytest.param(520, 128, "bfloat16", False, marks=pytest.mark.weekly),
    ],
)
@pytest.mark.parametrize("first", [None, 2])
def test_mm(program, rng, n, k, dtype, e5m2, first):
    """With an offset, the first weight is that of group 2, and there are two."""
    rows, blocks = sum(SIZES) + 9, -(-k // 128)
    weights = len(SIZES) if first is None else 2
    x, x_values = random_codes(rng, (rows, k), e5m2)
    w, w_values = random_codes(rng, (weights, n, k))
    x_scales, w_scales = (
        random_scales(rng, (rows, blocks)), random_scales(rng, (weights, -(-n // 128), blocks))
    )  # fmt: skip
    x_scales[140] = np.nan  # of a row of group 3 alone
    out = np.full((rows, n), 5, host_program.DTYPES[dtype])
    got = run(
        program, (x, w, x_scales, w_scales), out, SIZES, first, rows=rows, n=n, k=k,
        weights=weights, wgrad=False, e5m2=e5m2,
    )  # fmt: skip
    x_values = x_values * along(x_scales, k)
    w_values = w_values * np.repeat(along(w_scales, k), 128, 1)[:, :n]
    want, start = np.zeros((rows, n)), 0
    for group, size in enumerate(SIZES):
        weight = group - (first or 0)
        if 0 <= weight < weights:
            want[start : start + size] = x_values[start : start + size] @ w_values[weight].T
        start += size
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), np.isnan(want))
    assert_right(np.nan_to_num(got.astype(np.float32)).astype(got.dtype), np.nan_to_num(want))
    assert not got[(want == 0).all(1)].any()


@pytest.mark.parametrize(
    ("n", "k", "dtype", "e5m2", "accumulate"),
    [
        (136, 264, "float32", True, False),
        (136, 264, "float32", True, True),
        pytest.param(40, 8, "bfloat16", False, False, marks=pytest.mark.weekly),
    ],
)
def test_wgrad(program, rng, n, k, dtype, e5m2, accumulate):
    """An empty group's matrix keeps every bit of what it is added to."""
    sizes = np.array([128, 0, 256])
    rows = sum(sizes) + 128
    dy, dy_values = random_codes(rng, (n, rows), e5m2)
    x, x_values = random_codes(rng, (k, rows))
    dy_scales, x_scales = (random_scales(rng, (lines, rows // 128)) for lines in (n, k))
    dy_scales[:, -1] = np.nan  # of rows of no group
    out = np.full((3, n, k), -0.0 if accumulate else 5, host_program.DTYPES[dtype])
    if accumulate:
        out[2] = rng.normal(size=(n, k)) / 100
    got = run(
        program, (dy, x, dy_scales, x_scales), out, sizes // 2, rows=rows, n=n, k=k, weights=3,
        wgrad=True, e5m2=e5m2, accumulate=accumulate,
    )  # fmt: skip
    dy_values, x_values = dy_values * along(dy_scales, rows), x_values * along(x_scales, rows)
    want = np.zeros(out.shape) + (out.astype(np.float64) if accumulate else 0)
    for group, (start, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes, strict=True)):
        part = slice(start, start + size)
        want[group] += dy_values[:, part] @ x_values[:, part].T
    assert_right(got, want)
    zeros = np.full((n, k), -0.0 if accumulate else 0.0, out.dtype)
    assert got[1].tobytes() == zeros.tobytes()


def test_blocks_that_have_no_tile(program, rng):
    """More blocks than tiles, and no rows at all."""
    w, _ = random_codes(rng, (2, 8, 16))
    x, _ = random_codes(rng, (4, 16))
    scales = random_scales(rng, (4, 1)), random_scales(rng, (2, 1, 1))
    out = np.full((4, 8), 5, np.float32)
    got = run(
        program, (x, w, *scales), out, [0, 0], rows=4, n=8, k=16, weights=2, wgrad=False,
        e5m2=False, blocks=4,
    )  # fmt: skip
    assert not got.any()


def test_what_tests_replace():
    """The host has these instructions, and no others, of the two files that it does not compile."""
    root = Path(__file__).parents[2]
    ours = (root / "tests/lib/fp8_gemm_sm89.cc").read_text()
    for file in ("grouped_mm/device/instructions_sm80.cuh", "fp8/device/instructions_sm89.cuh"):
        text = (root / "ffi" / file).read_text()
        names = {line.split("(")[0].split()[-1] for line in text.splitlines()
                 if line.startswith("__device__")}  # fmt: skip
        assert names
        assert all(f" {name}(" in ours for name in names), names
