"""The CUDA kernels of quantize and dequantize, run on the host lane by lane: where they read and
write, tails, and what lanes tell each other. Their arithmetic is compared with the definition in
test_quantize_host.py and test_dequantize_host.py; here with itself."""

import ctypes
import subprocess

import ml_dtypes
import numpy as np
import pytest
from test_dequantize_host import COMPILER, MODES, ROOT
from test_quantized import BITS, FP, GROUPS

F32 = np.float32
DTYPES = {"float32": F32, "bfloat16": ml_dtypes.bfloat16}  # numbers 0 and 1
GUARD = 64  # bytes after a result that must stay as they are

pytestmark = pytest.mark.skipif(
    COMPILER is None or not (ROOT / "ffi").exists(), reason="needs a C++ compiler and the sources"
)


class Operands(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("w", "global_scale", "weight", "scales", "biases", "out")],
        ("sizes", ctypes.c_int64 * 6),
        *[(n, ctypes.c_int64) for n in ("elements", "global_scales", "most")],
        *[
            (n, ctypes.c_int32)
            for n in ("mode", "bits", "group_size", "scale_dtype", "dtype", "processors")
        ],
    ]

    def set(self, **arrays):
        for name, array in arrays.items():
            index = [n for n, _ in self._fields_].index(name)
            size = 0 if array is None else array.nbytes
            setattr(self, name, None if array is None else array.ctypes.data)
            self.sizes[index] = size


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The kernels, and the arithmetic of theirs that the other tests compare."""
    assert COMPILER is not None
    folder, libraries = tmp_path_factory.mktemp("kernels"), {}
    for name in ("quantize_kernels", "quantize", "dequantize"):
        path = folder / f"{name}.so"
        flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror"]
        files = [ROOT / f"tests/{name}.cc", "-I", ROOT / "ffi", "-I", ROOT / "tests", "-o", path]
        done = subprocess.run(
            [COMPILER, *flags, "-pthread", *files], capture_output=True, text=True, check=False
        )
        if "#include <barrier>" in done.stderr:
            pytest.skip("needs a C++20 library")
        assert done.returncode == 0, done.stderr
        libraries[name] = ctypes.CDLL(path)
    return libraries


def aligned(nbytes, guard=0):
    """Bytes from a multiple of 16 on."""
    memory = np.full(nbytes + guard + 16, 0xAB, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + nbytes + guard]


def copied(array):
    memory = aligned(array.nbytes)
    memory[:] = array.reshape(-1).view(np.uint8)
    return memory


def guarded(got, want):
    np.testing.assert_array_equal(got[: want.size], want)
    assert (got[want.size :] == 0xAB).all()


def at(array):
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def check(libraries, rng, mode, bits, group, dtype, groups, scales, processors, most):
    number, word = list(DTYPES).index(dtype), np.dtype(DTYPES[dtype]).itemsize
    n, affine = groups * group, mode == "affine"
    w = copied(rng.standard_normal(n).astype(F32).astype(DTYPES[dtype]))
    each = None if scales is None else (0.01 * rng.standard_normal(scales)).astype(F32)
    sizes = n * bits // 8, groups * (word if affine else 1), groups * word if affine else 0
    want = [np.zeros(size, np.uint8) for size in sizes]
    long = ctypes.c_long
    libraries["quantize"].quantize(
        MODES.index(mode), bits, number, at(w), at(each), long(n), long(group),
        long(n // (scales or 1)), 0, *map(at, want),
    )  # fmt: skip
    o = Operands(
        elements=n, global_scales=scales or 0, most=most, mode=MODES.index(mode), bits=bits,
        group_size=group, scale_dtype=number, dtype=number, processors=processors,
    )  # fmt: skip
    got = [aligned(size, GUARD) for size in sizes]
    weight, first, second = (g if size else None for g, size in zip(got, sizes, strict=True))
    o.set(w=w, global_scale=each, weight=weight, scales=first, biases=second)
    assert libraries["quantize_kernels"].quantize_kernel(ctypes.byref(o)) == 0
    for g, e in zip(got, want, strict=True):
        guarded(g, e)

    # Units of 32 codes, of which nvfp4 may have half of one.
    units = -(-n // 32)
    packed, unit_scales = np.zeros(units * bits * 4, np.uint8), np.zeros((units, 4), np.uint32)
    packed[: sizes[0]] = want[0]
    as_word = {1: np.uint8, 2: np.uint16, 4: np.uint32}[word if affine else 1]
    for i, part in enumerate(want[1:]):
        if mode == "nvfp4":
            both = np.zeros(2 * units, np.uint32)
            both[:groups] = want[1]
            unit_scales[:, :2] = both.reshape(-1, 2)
        elif part.size:
            unit_scales[:, i] = np.repeat(part.view(as_word), group // 32)
    if each is not None:
        both = np.zeros(2 * units, F32)
        both[:groups] = np.repeat(each, groups // each.size)
        unit_scales[:, 2:] = both.view(np.uint32).reshape(-1, 2)
    values = np.zeros(units * 32 * word, np.uint8)
    libraries["dequantize"].dequantize(
        MODES.index(mode), bits, number, number, int(each is not None), at(packed),
        at(unit_scales), long(units), at(values),
    )  # fmt: skip
    out = aligned(n * word, GUARD)
    leaves = [copied(e) if e.size else None for e in want]
    o.set(w=None, weight=leaves[0], scales=leaves[1], biases=leaves[2], out=out)
    assert libraries["quantize_kernels"].dequantize_kernel(ctypes.byref(o)) == 0
    guarded(out, values[: n * word])


CASES = [*[("affine", bits, GROUPS[i % 3]) for i, bits in enumerate(BITS)]]
CASES += [(mode, *FP[mode]) for mode in FP]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mode", "bits", "group"), CASES)
def test_any_number_of_groups(libraries, rng, mode, bits, group, dtype):
    """Tails of units, warps and blocks; blocks that come round again; several launches."""
    for groups in (1, 2, 5, 31, 33, 65, int(rng.integers(250, 270)), int(rng.integers(800, 1500))):
        divisors = [d for d in range(1, groups + 1) if groups % d == 0]
        scales = int(rng.choice(divisors)) if mode == "nvfp4" and rng.random() < 0.7 else None
        most = int(rng.choice([2**13, 2**32]))
        check(libraries, rng, mode, bits, group, dtype, groups, scales, 1, most)
