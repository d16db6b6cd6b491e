"""The CUDA kernels of nvfp4_quantize, run on the host thread by thread, against the definition:
where they read and write, edges, groups, and what threads tell each other."""

import ctypes

import host_program
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_memory import aligned, copied, guarded
from host_program import dtype_number
from nvfp4_quantize_cases import KEY

import jax_groupgemm as jgg

pytestmark = host_program.needs_compiler


class Operands(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_void_p) for n in ("x", "sizes", "seed", "weight", "scales", "global_scale")],
        *[
            (n, ctypes.c_int64)
            for n in ("matrices", "rows", "columns", "blocks", "groups", "bytes")
        ],
        *[(n, ctypes.c_int32) for n in ("dtype", "along_rows", "scale_2d", "hadamard")],
    ]


@pytest.fixture(scope="module")
def kernels():
    return host_program.build_kernels("nvfp4_quantize_kernels")


SIZES = np.array([0, 70, 1, 0, 129, 16, 3], np.int32)
OPTIONS = {
    "rows": {},
    "rows, Hadamard": {"hadamard": True},
    "rows, 2D": {"scale_2d": True},
    "columns": {"axis": -2},
    "columns, Hadamard": {"axis": -2, "hadamard": True},
    "columns, 2D": {"axis": -2, "scale_2d": True},
    "columns of groups": {"axis": -2, "grouped": True},
    "columns of groups, Hadamard": {"axis": -2, "grouped": True, "hadamard": True},
    "rows of groups": {"grouped": True},
    "rows of groups, Hadamard": {"grouped": True, "hadamard": True},
}
# Matrices, rows, columns: edges of warps, of words and of pieces; more than a thread block has.
SHAPES = {"wide": (1, 240, 176), "batch": (3, 32, 48), "odd": (1, 240, 33), "tall": (1, 336, 136)}


def cases():
    for name, options in OPTIONS.items():
        for shape, (matrices, _, columns) in SHAPES.items():
            odd = columns % 16 > 0 and (options.get("axis") != -2 or "scale_2d" in options)
            if odd or ("grouped" in options and matrices > 1):
                continue
            yield name, shape, "float32", True
            yield name, shape, "bfloat16", False
            if shape == "wide":
                yield name, shape, "float32", False
                yield name, shape, "bfloat16", True


@pytest.mark.parametrize(("name", "shape", "dtype", "stochastic"), [*cases()])
@pytest.mark.one_in(12)
def test_kernels(rng, kernels, name, shape, dtype, stochastic):
    given = dict(OPTIONS[name])
    matrices, rows, columns = SHAPES[shape]
    along_rows, grouped = given.get("axis") == -2, given.pop("grouped", False)
    word = np.dtype(host_program.DTYPES[dtype])
    values = rng.standard_normal((matrices, rows, columns)) * 10.0 ** rng.integers(-3, 3, (rows, 1))
    last = (SIZES.sum() if grouped else rows) - 1
    values[0, last, -1], values[0, 12, :3] = 9e4, [np.nan, np.inf, 0]
    x = values.astype(word)
    if grouped:
        x[:, SIZES.sum() :] = 1e9  # rows of no group
    x = x[0] if matrices == 1 else x
    if grouped:
        given["group_sizes"] = jnp.asarray(SIZES)
    if stochastic:
        given["stochastic_rounding_key"] = KEY
    q = jgg.nvfp4_quantize(jnp.asarray(x), **given)
    want = [np.asarray(a) for a in (q.weight, q.scales, q.global_scale)]
    memory = copied(x)
    results = [aligned(a.nbytes, 64) for a in want]
    seed = np.asarray(jax.random.bits(KEY, (2,), "uint32"))
    o = Operands(
        x=memory.ctypes.data, sizes=SIZES.ctypes.data if grouped else None,
        seed=seed.ctypes.data if stochastic else None, weight=results[0].ctypes.data,
        scales=results[1].ctypes.data, global_scale=results[2].ctypes.data, matrices=matrices,
        rows=rows, columns=columns, blocks=want[1].shape[-1], groups=len(SIZES) if grouped else 0,
        bytes=memory.size, dtype=dtype_number(word), along_rows=along_rows,
        scale_2d="scale_2d" in given, hadamard="hadamard" in given,
    )  # fmt: skip
    kernels.quantize_kernels(ctypes.byref(o))
    for got, expected in zip(results, want, strict=True):
        guarded(got, expected.reshape(-1).view(np.uint8))
