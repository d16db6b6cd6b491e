"""The CUDA kernels of quantize and dequantize, run on the host lane by lane: where they read and
write, tails, and what lanes tell each other. Their arithmetic is compared with the definition in
test_quantize_host.py and test_dequantize_host.py; here with itself."""

import ctypes

import host_program
import numpy as np
import pytest
from host_memory import GUARD, aligned, copied, guarded
from host_program import dtype_number, mode_number, pointer
from test_quantized import BITS, FP, GROUPS

from jax_groupgemm._quantized import ordered

F32 = np.float32
DTYPES = {name: host_program.DTYPES[name] for name in ("float32", "bfloat16")}

pytestmark = host_program.needs_compiler


class Operands(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("w", "global_scale", "weight", "scales", "biases", "out")],
        ("sizes", ctypes.c_int64 * 6),
        *[(n, ctypes.c_int64) for n in ("elements", "global_scales", "most")],
        *[
            (n, ctypes.c_int32)
            for n in (
                "mode", "bits", "group_size", "scale_dtype", "dtype", "processors", "ordered",
            )
        ],
    ]  # fmt: skip

    def set(self, **arrays):
        for name, array in arrays.items():
            index = [n for n, _ in self._fields_].index(name)
            size = 0 if array is None else array.nbytes
            setattr(self, name, None if array is None else array.ctypes.data)
            self.sizes[index] = size


@pytest.fixture(scope="module")
def kernels():
    return host_program.build_kernels("quantize_kernels")


def check(kernels, rng, mode, bits, group, dtype, groups, scales, processors, most):
    number, word = dtype_number(dtype), np.dtype(DTYPES[dtype]).itemsize
    n, affine = groups * group, mode == "affine"
    w = copied(rng.standard_normal(n).astype(F32).astype(DTYPES[dtype]))
    each = None if scales is None else (0.01 * rng.standard_normal(scales)).astype(F32)
    sizes = n * bits // 8, groups * (word if affine else 1), groups * word if affine else 0
    want = [np.zeros(size, np.uint8) for size in sizes]
    long = ctypes.c_long
    quantizes = group > 16 or dtype == "float32" or not affine  # or float32 is quantized
    if quantizes:
        host_program.build("quantize").quantize(
            mode_number(mode), bits, number, pointer(w), pointer(each), long(n), long(group),
            long(n // (scales or 1)), 0, *map(pointer, want),
        )  # fmt: skip
    else:
        want[0][:] = rng.integers(0, 256, sizes[0])
        for leaf in want[1:]:
            leaf.view(DTYPES[dtype])[:] = rng.standard_normal(groups)
    o = Operands(
        elements=n, global_scales=scales or 0, most=most, mode=mode_number(mode), bits=bits,
        group_size=group, scale_dtype=number, dtype=number, processors=processors,
    )  # fmt: skip
    got = [aligned(size, GUARD) for size in sizes]
    weight, first, second = (g if size else None for g, size in zip(got, sizes, strict=True))
    o.set(w=w, global_scale=each, weight=weight, scales=first, biases=second)
    if quantizes:
        assert kernels.quantize_kernel(ctypes.byref(o)) == 0
        for g, e in zip(got, want, strict=True):
            guarded(g, e)

    # Units of 32 codes, of which groups of 16 may have half of one.
    units = -(-n // 32)
    packed, unit_scales = np.zeros(units * bits * 4, np.uint8), np.zeros((units, 6), np.uint32)
    packed[: sizes[0]] = want[0]
    as_word = {1: np.uint8, 2: np.uint16, 4: np.uint32}[word if affine else 1]
    for i, part in enumerate(want[1:]):
        if mode == "nvfp4":
            both = np.zeros(2 * units, np.uint32)
            both[:groups] = want[1]
            unit_scales[:, :2] = both.reshape(-1, 2)
        elif part.size:
            of_halves = np.zeros(2 * units, np.uint32)
            of_halves[: n // 16] = np.repeat(part.view(as_word), group // 16)
            unit_scales[:, [i, 4 + i]] = of_halves.reshape(-1, 2)
    if each is not None:
        both = np.zeros(2 * units, F32)
        both[:groups] = np.repeat(each, groups // each.size)
        unit_scales[:, 2:4] = both.view(np.uint32).reshape(-1, 2)
    values = np.zeros(units * 32 * word, np.uint8)
    host_program.build("dequantize").dequantize(
        mode_number(mode), bits, number, number, int(each is not None),
        int(affine and group == 16), pointer(packed), pointer(unit_scales), long(units),
        pointer(values),
    )  # fmt: skip
    out = aligned(n * word, GUARD)
    leaves = [copied(e) if e.size else None for e in want]
    o.set(w=None, weight=leaves[0], scales=leaves[1], biases=leaves[2], out=out)
    assert kernels.dequantize_kernel(ctypes.byref(o)) == 0
    guarded(out, values[: n * word])


CASES = [*[("affine", bits, GROUPS[i % 4]) for i, bits in enumerate(BITS)]]
CASES += [(mode, *FP[mode]) for mode in FP]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mode", "bits", "group"), CASES)
@pytest.mark.one_in(10)
def test_any_number_of_groups(kernels, rng, mode, bits, group, dtype):
    """Tails of units, warps and blocks; blocks that come round again; several launches."""
    for groups in (1, 2, 5, 31, 33, 65, int(rng.integers(250, 270)), int(rng.integers(800, 1500))):
        if group * groups * bits % 32 or (mode == "affine" and group == 16 and bits % 2):
            groups += groups % 2  # whole words
        divisors = [d for d in range(1, groups + 1) if groups % d == 0]
        scales = int(rng.choice(divisors)) if mode == "nvfp4" and rng.random() < 0.7 else None
        most = int(rng.choice([2**13, 2**32]))
        check(kernels, rng, mode, bits, group, dtype, groups, scales, 1, most)


def test_columns_in_order(kernels, rng):
    """Every code and scale, where the Hopper kernel wants it."""
    codes = rng.permutation(np.arange(37 * 256).astype(np.uint8))
    n = 2 * codes.size
    scales = copied(np.arange(n // 16).astype(np.uint8))
    weight, out = copied(codes), aligned(2 * n, GUARD)
    o = Operands(
        elements=n, most=2**13, mode=mode_number("nvfp4"), bits=4, group_size=16,
        dtype=dtype_number("bfloat16"), processors=1,
    )  # fmt: skip
    o.set(weight=weight, scales=scales, out=out)
    assert kernels.dequantize_kernel(ctypes.byref(o)) == 0
    values = out[: 2 * n].view(DTYPES["bfloat16"]).reshape(-1, 256).copy()
    o.ordered = 1
    assert kernels.dequantize_kernel(ctypes.byref(o)) == 0
    want = np.asarray(ordered.ordered(values, 4))
    got = out[: 2 * n].view(DTYPES["bfloat16"]).reshape(want.shape)
    np.testing.assert_array_equal(got.astype(F32), want.astype(F32))
    assert (out[2 * n :] == 0xAB).all()
