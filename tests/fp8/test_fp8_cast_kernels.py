"""The CUDA kernels of matrices with one scale each, run on the host thread by thread, against the
definition: codes both ways, largest magnitudes, groups, lists; and those of activations."""

import ctypes

import host_program
import jax.numpy as jnp
import ml_dtypes
import moe_oracle
import numpy as np
import pytest
from fp8_quantize_cases import edges, sums
from host_memory import aligned, copied, guarded
from host_program import dtype_number

from jax_groupgemm._fp8 import cast
from jax_groupgemm._quantized import padding

pytestmark = host_program.needs_compiler

BF16, F32 = ml_dtypes.bfloat16, np.float32
SIZES = np.array([0, 130, 1, 0, 128, -4, 3], np.int32)
LIVE, PADDED = 262, 5 * 128  # rows of groups, and those of padded ones


class Operands(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("x", "d", "row_scale", "scales", "sizes", "list")],
        *[(n, ctypes.c_void_p) for n in ("wanted", "codes", "turned", "activated", "largest")],
        ("sums", ctypes.c_void_p),
        *[(n, ctypes.c_int64) for n in ("matrices", "rows", "columns", "x_lines", "along")],
        *[(n, ctypes.c_int64) for n in ("groups", "parts", "bytes")],
        *[(n, ctypes.c_int32) for n in ("dtype", "e5m2")],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def kernels():
    return host_program.build_kernels("fp8_cast_kernels", "-Itests/lib/stand_in")


def most(memory, want):
    """The numbers that thread blocks found."""
    found = memory[: memory.size // 8 * 8].view(np.uint32)
    found = found.reshape(len(want), -1, 2).max(1)
    np.testing.assert_array_equal(found, np.asarray(want))


# Matrices, rows, columns; how codes are stored; groups; a list.
CASES = {
    "rows": ((1, 272, 256), (-1,), False, False),
    "rows of groups": ((1, 272, 208), (-1,), True, False),
    "turned": ((3, 48, 80), (-2,), False, False),
    "both": ((3, 144, 400), (-1, -2), False, False),
    "both of groups": ((1, 300, 144), (-1, -2), True, False),
    "turned, by list": ((1, 272, 656), (-2,), True, True),
    "both, by list": ((1, 272, 400), (-1, -2), True, True),
}


def cases():
    for i, name in enumerate(CASES):
        for j, dtype in enumerate(host_program.DTYPES):
            yield name, dtype, (i + j) % 2 == 0, (i + j) % 3 == 0


@pytest.mark.parametrize(("name", "dtype", "e5m2", "of_two"), [*cases()])
@pytest.mark.one_in(3)
def test_codes(rng, kernels, name, dtype, e5m2, of_two):
    """Scales are too small for some elements, and one is NaN."""
    shape, axes, grouped, listed = CASES[name]
    matrices, rows, columns = shape
    x = edges(rng, dtype, shape)
    of_two = of_two or dtype == "float32"
    scales = (2.0 ** np.array([3, -9, 120])[:matrices]).astype(F32)
    if not of_two:  # such a scale is NaN where an element is not finite
        x = np.where(np.isfinite(x.astype(F32)), x, x.dtype.type(1))
        scales *= F32(1 / 448)
    if matrices > 2 and not of_two:
        scales[2] = np.nan
    index = rng.integers(-1, rows, rows).astype(np.int32)
    given = {"axes": axes, "measures": True, "element": "e5m2" if e5m2 else "e4m3"}
    one = (lambda a: a[0]) if matrices == 1 else (lambda a: a)
    *want, largest = cast.codes(
        jnp.asarray(one(x)), jnp.asarray(one(scales)), **given, power_of_two=of_two,
        group_sizes=jnp.asarray(SIZES) if grouped else None,
        row_index=jnp.asarray(index) if listed else None,
    )  # fmt: skip
    want = [np.asarray(a) for a in want]
    along = padding.padded_rows(rows, len(SIZES), 128) if grouped else rows
    tiles = -(-(along if -2 in axes else rows) // 128)
    parts = tiles * -(-columns // 128)
    memory, results = copied(x), [aligned(a.nbytes, 64) for a in want]
    found = aligned(8 * matrices * parts)
    places = dict(zip(axes, results, strict=True))
    o = Operands(
        x=memory.ctypes.data, scales=scales.ctypes.data, bytes=memory.size,
        sizes=SIZES.ctypes.data if grouped else None, groups=len(SIZES) if grouped else 0,
        list=index.ctypes.data if listed else None, x_lines=rows, largest=found.ctypes.data,
        matrices=matrices, rows=rows, columns=columns, along=along, dtype=dtype_number(x.dtype),
        codes=places[-1].ctypes.data if -1 in places else None,
        turned=places[-2].ctypes.data if -2 in places else None, e5m2=e5m2,
    )  # fmt: skip
    kernels.cast_kernels(ctypes.byref(o))
    for got, expected in zip(results, want, strict=True):
        guarded(got, np.ascontiguousarray(expected).reshape(-1).view(np.uint8))
    most(found, np.reshape(largest, (matrices, 2)))


@pytest.mark.parametrize("name", ["turned", "turned, by list", "both, by list"])
def test_codes_in_another_order(rng, kernels, name):
    """Every byte. Rows of no group are left as they are."""
    (_, rows, columns), axes, grouped, listed = CASES[name]
    x = rng.integers(0, 256, (rows, columns), np.uint8)
    index = rng.integers(-1, rows, rows).astype(np.int32)
    want = cast.reordered(
        jnp.asarray(x.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(SIZES) if grouped else None,
        jnp.asarray(index) if listed else None, axes,
    )  # fmt: skip
    want = [np.array(a).view(np.uint8) for a in want]
    memory, results = copied(x), [aligned(a.nbytes, 64) for a in want]
    places = dict(zip(axes, results, strict=True))
    o = Operands(
        x=memory.ctypes.data, bytes=memory.size, rows=rows, columns=columns, matrices=1,
        sizes=SIZES.ctypes.data if grouped else None, groups=len(SIZES) if grouped else 0,
        list=index.ctypes.data if listed else None, x_lines=rows,
        along=padding.padded_rows(rows, len(SIZES), 128) if grouped else rows,
        codes=places[-1].ctypes.data if -1 in places else None,
        turned=places[-2].ctypes.data if -2 in places else None,
    )  # fmt: skip
    kernels.codes_kernel(ctypes.byref(o))
    if -1 in places:
        want[0][LIVE:] = 0xAB
    for got, expected in zip(results, want, strict=True):
        guarded(got, np.ascontiguousarray(expected).reshape(-1))


@pytest.mark.parametrize("dtype", host_program.DTYPES)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("wanted", [None, 0, 1])
def test_largest(rng, kernels, dtype, wanted):
    """Alone, of several matrices, or of groups; where nobody asks, zeros."""
    for shape, grouped in (((3, 37, 400), False), ((1, 272, 144), True)):
        x = edges(rng, dtype, shape)
        if grouped:
            x[:, LIVE:] = np.nan  # of no group
            x[0, :LIVE] = np.where(np.isfinite(x[0, :LIVE]), x[0, :LIVE], 1)
        sizes = jnp.asarray(SIZES) if grouped else None
        want = np.reshape(cast.largest(jnp.asarray(x[0] if grouped else x), sizes), (-1, 2))
        memory, asked = copied(x), np.array([wanted or 0], np.int32)
        found = aligned(8 * shape[0] * 3)
        o = Operands(
            x=memory.ctypes.data, bytes=memory.size, dtype=dtype_number(x.dtype), parts=3,
            **dict(zip(("matrices", "rows", "columns"), shape, strict=True)), along=0,
            sizes=SIZES.ctypes.data if grouped else None, groups=len(SIZES) if grouped else 0,
            largest=found.ctypes.data, wanted=None if wanted is None else asked.ctypes.data,
        )  # fmt: skip
        kernels.cast_kernels(ctypes.byref(o))
        most(found, 0 * want if wanted == 0 else want)


R, F = 300, 256
ALONG = padding.padded_rows(R, len(SIZES), 128)


def operands(rng):
    """h, d and scales of rows, some not finite; those of no group are NaN."""
    h, d = rng.standard_normal((R, 2 * F)), rng.standard_normal((R, F)) * 4
    scale = rng.standard_normal(R).astype(F32)
    h[132, 30], h[133, F + 40], h[140], d[3, 7] = np.inf, np.nan, -1e30, 1e30
    scale[[3, 131]] = 0, 2.0**-120
    with np.errstate(over="ignore"):
        h, d = h.astype(F32).astype(BF16), d.astype(F32).astype(BF16)
    h[LIVE:] = d[LIVE:] = scale[LIVE:] = np.nan
    return h, d, scale


@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("activation", moe_oracle.GATED)
@pytest.mark.one_in(2)
def test_activations(rng, kernels, activation, e5m2):
    h, d, row_scale = operands(rng)
    given = [copied(a) for a in (h, d, row_scale)]
    values = [np.empty((R, n), BF16) for n in (F, 2 * F, F)]
    o = Operands(
        *[a.ctypes.data for a in given], sizes=SIZES.ctypes.data, rows=R, columns=F, along=ALONG,
        groups=len(SIZES), parts=2, e5m2=e5m2,
    )  # fmt: skip
    name = activation.encode()
    assert kernels.activation_values(
        ctypes.byref(o), name, *(ctypes.c_void_p(a.ctypes.data) for a in values)
    )
    of, dh, scaled = map(jnp.asarray, values)
    sizes = jnp.asarray(SIZES)
    element = "e5m2" if e5m2 else "e4m3"

    def codes(a, scale, axes, element="e4m3"):
        found = cast.codes(a, jnp.float32(scale), group_sizes=sizes, axes=axes, element=element)
        return [np.array(v) for v in found]

    # The activation, then without a scale.
    scale = np.array([2.0**-6], F32)
    (want,) = codes(of, scale[0], (-1,))
    result, found = aligned(want.nbytes, 64), aligned(8 * 2)
    o.codes, o.scales, o.largest = result.ctypes.data, scale.ctypes.data, found.ctypes.data
    with np.errstate(invalid="ignore", over="ignore"):
        assert kernels.activated_kernel(ctypes.byref(o), name)
        guarded(result[: LIVE * F], want[:LIVE].reshape(-1).view(np.uint8))
        assert (result[LIVE * F :] == 0xAB).all()
        most(found, cast.largest(of, sizes)[None])
        found[:] = 0xAB
        o.codes = o.scales = None
        kernels.activated_kernel(ctypes.byref(o), name)
        most(found, cast.largest(of, sizes)[None])
        # Its backward pass.
        scales = np.array([2.0**-5, 2.0**-7], F32)
        *want, activated = (
            *codes(dh, scales[0], (-1, -2), element),
            *codes(scaled, scales[1], (-2,)),
        )
        want = [*want, activated, sums(d, values[0])]
        results = [aligned(a.nbytes, 64) for a in want]
        blocks = ALONG // 128 * F // 128
        found = aligned(16 * blocks)
        o.scales, o.largest = scales.ctypes.data, found.ctypes.data
        o.codes, o.turned, o.activated, o.sums = (a.ctypes.data for a in results)
        assert kernels.backward_kernel(ctypes.byref(o), name)
        largest = np.stack([cast.largest(a, sizes) for a in (dh, scaled)])
    want[0][LIVE:].view(np.uint8)[:] = 0xAB
    for a in want[1:3]:
        a.view(np.uint8)[:, PADDED:] = 0xAB
    for got, a in zip(results[:3], want[:3], strict=True):
        guarded(got, a.reshape(-1).view(np.uint8))
    got_sums = results[3][: want[3].nbytes].view(F32).reshape(want[3].shape)
    np.testing.assert_array_equal(got_sums[:, :LIVE], want[3][:, :LIVE])
    of_blocks = found.view(np.uint32).reshape(blocks, 2, 2)
    np.testing.assert_array_equal(of_blocks.max(0), largest)
    found[:] = 0xAB
    o.scales = None
    kernels.backward_kernel(ctypes.byref(o), name)
    parts = found[: 16 * o.parts].view(np.uint32).reshape(-1, 2, 2)
    np.testing.assert_array_equal(parts.max(0), largest)
    assert (found[16 * o.parts :] == 0xAB).all()
