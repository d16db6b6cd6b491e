"""The CUDA kernels of fp8_quantize, run on the host thread by thread, against the definition: where
they read and write, edges, groups, and what threads tell each other."""

import ctypes

import fp8_oracle
import host_program
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_quantize_cases import KEY, any_codes, edges
from host_memory import aligned, copied, guarded
from host_program import dtype_number

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import convert

pytestmark = host_program.needs_compiler


class Operands(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("x", "sizes", "seed", "codes", "scales")],
        *[(n, ctypes.c_int64) for n in ("matrices", "rows", "columns", "along", "groups", "bytes")],
        *[
            (n, ctypes.c_int32)
            for n in ("dtype", "e5m2", "along_rows", "square", "power_of_two")
        ],
        *[(n, ctypes.c_void_p) for n in ("list", "turned", "turned_scales")],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def kernels():
    return host_program.build_kernels("fp8_quantize_kernels")


SIZES = np.array([0, 130, 1, 0, 128, -4, 3], np.int32)
OPTIONS = {
    "rows": {},
    "rows of groups": {"grouped": True},
    "columns": {"axis": -2},
    "columns of groups": {"axis": -2, "grouped": True},
    "columns of groups, by list": {"axis": -2, "grouped": True, "listed": True},
    "squares": {"block": (128, 128)},
    "squares, transposed": {"block": (128, 128), "axis": -2},
}
# Matrices, rows, columns: edges of blocks and of tiles; more than a thread block has.
SHAPES = {"wide": (1, 272, 256), "batch": (3, 48, 72), "cut": (1, 272, 200), "one": (1, 16, 8)}


def cases():
    for i, name in enumerate(OPTIONS):
        for j, (shape, (matrices, rows, _)) in enumerate(SHAPES.items()):
            if "groups" in name and (matrices > 1 or rows < 100):
                continue
            for k, dtype in enumerate(host_program.DTYPES):
                at = i + j + k
                yield name, shape, dtype, at % 2 == 0, at % 3 == 0, at % 5 < 2


@pytest.mark.parametrize(("name", "shape", "dtype", "stochastic", "e5m2", "e8m0"), [*cases()])
@pytest.mark.one_in(5)
def test_kernels(rng, kernels, name, shape, dtype, stochastic, e5m2, e8m0):
    given = dict(OPTIONS[name])
    matrices, rows, columns = SHAPES[shape]
    along_rows, grouped = given.get("axis") == -2, given.pop("grouped", False)
    listed = given.pop("listed", False)
    x = edges(rng, dtype, (matrices, rows, columns))
    if grouped:
        x[:, np.maximum(SIZES, 0).sum() :] = np.nan  # rows of no group
    x = x[0] if matrices == 1 else x
    if grouped:
        given["group_sizes"] = jnp.asarray(SIZES)
    if stochastic:
        given["stochastic_rounding_key"] = KEY
    options = {"format": "e5m2" if e5m2 else "e4m3", "scale_format": "e8m0" if e8m0 else "float32"}
    q = jgg.fp8_quantize(jnp.asarray(x), **options, **given)
    want = [np.asarray(a) for a in (q.weight, q.scales)]
    index = rng.permutation(rows).astype(np.int32)  # where each row is stored
    memory = copied(x[np.argsort(index)] if listed else x)
    results = [aligned(a.nbytes, 64) for a in want]
    seed = np.asarray(jax.random.bits(KEY, (2,), "uint32"))
    o = Operands(
        x=memory.ctypes.data, sizes=SIZES.ctypes.data if grouped else None,
        seed=seed.ctypes.data if stochastic else None, codes=results[0].ctypes.data,
        scales=results[1].ctypes.data, matrices=matrices, rows=rows, columns=columns,
        along=want[0].shape[-1], groups=len(SIZES) if grouped else 0, bytes=memory.size,
        dtype=dtype_number(x.dtype), e5m2=e5m2, along_rows=along_rows, square="block" in given,
        power_of_two=e8m0, list=index.ctypes.data if listed else None,
    )  # fmt: skip
    kernels.quantize_kernels(ctypes.byref(o))
    for got, expected, unit in zip(results, want, (1, 128), strict=True):
        if listed:  # what no group has is left as it is
            live = (-(-np.maximum(SIZES, 0) // 128) * 128).sum() // unit
            expected = expected.copy()
            expected.view(np.uint8)[..., live * expected.itemsize :] = 0xAB
        guarded(got, expected.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("shape", [(1, 272, 256), (3, 48, 80), (2, 144, 400), (1, 16, 16)])
@pytest.mark.parametrize("dtype", host_program.DTYPES)
@pytest.mark.one_in(3)
def test_kernel_of_both(rng, kernels, dtype, shape):
    """The bytes of x as it is stored, and of its transpose."""
    x = edges(rng, dtype, shape)
    q = jgg.fp8_quantize(jnp.asarray(x), block=(128, 128))
    codes, scales = np.asarray(q.weight), np.asarray(q.scales)
    want = [codes, scales, codes.swapaxes(1, 2), scales.swapaxes(1, 2)]
    memory, results = copied(x), [aligned(a.nbytes, 64) for a in want]
    places = zip(("codes", "scales", "turned", "turned_scales"), results, strict=True)
    o = Operands(
        x=memory.ctypes.data, bytes=memory.size, dtype=dtype_number(x.dtype),
        **dict(zip(("matrices", "rows", "columns"), shape, strict=True)),
        **{name: result.ctypes.data for name, result in places},
    )  # fmt: skip
    kernels.quantize_both_kernel(ctypes.byref(o))
    for got, expected in zip(results, want, strict=True):
        guarded(got, np.ascontiguousarray(expected).reshape(-1).view(np.uint8))


@pytest.mark.parametrize("shape", [(272, 256), (265, 208), (300, 16)])
def test_kernel_of_lines(rng, kernels, shape):
    """The bytes of both results of fp8_quantize."""
    x = edges(rng, "bfloat16", shape)
    rows = np.maximum(SIZES, 0).sum()
    x[rows:] = np.nan  # of no group
    q = convert.quantized_lines(jnp.asarray(x), jnp.asarray(SIZES))
    want = [np.array(a) for a in (q[0].weight, q[0].scales, q[1].weight, q[1].scales)]
    memory, results = copied(x), [aligned(a.nbytes, 64) for a in want]
    places = zip(("codes", "scales", "turned", "turned_scales"), results, strict=True)
    o = Operands(
        x=memory.ctypes.data, bytes=memory.size, dtype=dtype_number(x.dtype), rows=shape[0],
        columns=shape[1], sizes=SIZES.ctypes.data, groups=len(SIZES), along=want[2].shape[1],
        **{name: result.ctypes.data for name, result in places},
    )  # fmt: skip
    kernels.quantize_lines_kernel(ctypes.byref(o))
    for got, expected in zip(results, want, strict=True):
        guarded(got, expected.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("shape", [(2, 144, 264), (3, 40, 8), (1, 17, 400)])
@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
@pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", host_program.DTYPES)
@pytest.mark.one_in(5)
def test_dequantizing(rng, kernels, dtype, element, block, shape):
    """All codes, and scales that are extreme."""
    codes, scales = any_codes(rng, jnp.dtype(element), shape, block)
    q = convert.made(jnp.asarray(codes), jnp.asarray(scales), block=block)
    want = np.asarray(jgg.dequantize(q, dtype))
    memory, of_scales, result = copied(codes), copied(scales), aligned(want.nbytes, 64)
    o = Operands(
        x=memory.ctypes.data, bytes=memory.size, scales=of_scales.ctypes.data,
        codes=result.ctypes.data, dtype=dtype_number(want.dtype), e5m2=element.endswith("e5m2"),
        square=block[0] > 1, **dict(zip(("matrices", "rows", "columns"), shape, strict=True)),
    )  # fmt: skip
    kernels.dequantize_kernel(ctypes.byref(o))
    guarded(result, want.reshape(-1).view(np.uint8))


def test_edges_are_what_they_say(rng):
    """Blocks of every kind: without any, whatever is found of them would be nothing."""
    x = edges(rng, "float32", (1, 272, 256))[0]
    scales = fp8_oracle.quantize(x, (1, 128))[1]
    assert np.isnan(scales).any()
    assert (scales == 1).any()
    assert (scales == 2.0**-126).any()
    assert ((scales < 2.0**-60) & (scales > 2.0**-126)).any()
    assert (scales > 2.0**100).any()
