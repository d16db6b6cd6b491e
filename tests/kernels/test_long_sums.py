"""Sums over many k, or rows, on a GPU, of positive numbers: an error of one sign is not lost in a
random one.

docs/semantics.md states the bounds that are tested here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension

SIZES = np.array([5, 11], np.int32)
#: Relative errors: what tensor cores cut off in 2**14 k, and what FMA rounds in 2**16.
TENSOR_CORES, FMA = 1.2e-4, 1.2e-5
#: For each term: of 16 in an instruction, or 8 of TensorFloat-32, whose operands are rounded, too.
TERM, TERM_TF32, ROUNDED = 7.5e-9, 1.5e-8, 2.0**-10
HALF = {"bfloat16": 2**-8, "float16": 2**-11}


def problem(rng, k, dtype, n=16):
    x = jnp.asarray(np.abs(rng.standard_normal((16, k))), dtype)
    return x, jnp.asarray(rng.random((2, k, n)), dtype)


def calls(f, *args) -> int:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text().count("@jgg_")


@pytest.mark.parametrize(
    ("k", "dtype", "out", "count"),
    [
        (2**14, "bfloat16", "float32", 1), (2**14 + 512, "bfloat16", "float32", 2),
        (2**17, "bfloat16", "bfloat16", 1), (2**15, "float16", "float16", 1),
        (2**16, "float32", "float32", 1), (2**18, "float32", "float32", 4),
    ],
)  # fmt: skip
def test_parts(k, dtype, out, count):
    """Products of models' K are one call. Longer ones are as many as their dtype needs."""
    x, w = jax.ShapeDtypeStruct((16, k), dtype), jax.ShapeDtypeStruct((2, k, 16), dtype)
    f = lambda x, w: jgg.grouped_mm(x, w, SIZES, preferred_element_type=out, implementation="sm80")
    assert calls(f, x, w) == count


def relative(got, want) -> float:
    return float(np.max(np.abs(oracle.f64(got) - want) / want))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [7168, 2**14, 2**17, 2**20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_mm(rng, kernel, dtype, k):
    if kernel == "sm90" and 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    x, w = problem(rng, k, dtype)
    want = oracle.grouped_mm(x, w, SIZES)
    bound = TENSOR_CORES if dtype != "float32" else FMA
    got = jgg.grouped_mm(x, w, SIZES, preferred_element_type="float32", implementation=kernel)
    assert relative(got, want) <= bound
    if dtype == "bfloat16":
        got = jgg.grouped_mm(x, w, SIZES, implementation=kernel)
        assert relative(got, want) <= HALF[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("k", [7168, 2**14, 3 * 2**14])
@pytest.mark.parametrize("mode", ["nvfp4", "affine"])
def test_quantized(rng, mode, k):
    x, w = problem(rng, k, "bfloat16", 64)
    q = jgg.quantize(w.swapaxes(1, 2), mode=mode)
    want = oracle.grouped_mm(x, jgg.dequantize(q, dtype="bfloat16").swapaxes(1, 2), SIZES)
    for weight in (q, jgg.prepack(q)):
        got = jgg.grouped_qmm(x, weight, SIZES, preferred_element_type="float32")
        assert relative(got, want) <= TENSOR_CORES


@pytest.mark.gpu
@pytest.mark.parametrize("k", [7168, 2**14, 2**17])
def test_mm_of_tensorfloat32(rng, k):
    x, w = problem(rng, k, "float32")
    got = jgg.grouped_mm(x, w, SIZES, precision="tensorfloat32", implementation="sm80")
    assert relative(got, oracle.grouped_mm(x, w, SIZES)) <= 2 * TENSOR_CORES + ROUNDED


# ---- over rows ---------------------------------------------------------------------------------


def wgrad(x, dy, kernel, **options):
    whole = jnp.array([[0, x.shape[0]]])
    return jgg.segmented_mm(
        x, dy, whole, transpose_a=True, preferred_element_type="float32", implementation=kernel,
        **options,
    )[0]  # fmt: skip


@pytest.mark.parametrize(("columns", "parts"), [(16, True), (768, False)])
def test_rows_in_parts(columns, parts):
    """Of few small results, so that all processors have some; the others are one sum."""
    x = jax.ShapeDtypeStruct((2**17, columns), "bfloat16")
    text = jax.jit(lambda x, dy: wgrad(x, dy, "sm80")).trace(x, x).lower(
        lowering_platforms=("cuda",)
    ).as_text()  # fmt: skip
    (call,) = [line for line in text.splitlines() if "@jgg_wgrad" in line]
    assert (f"-> tensor<1x{columns}x{columns}xf32>" not in call) == parts


def positive_rows(rng, rows, columns, dtype):
    """Sixteen different columns, again and again: so is the result."""
    x, dy = np.abs(rng.standard_normal((rows, 16))), rng.random((rows, 16))
    x, dy = (jnp.asarray(a, dtype) for a in (x, dy))
    want = oracle.f64(x).T @ oracle.f64(dy)
    times = columns // 16
    return jnp.tile(x, (1, times)), jnp.tile(dy, (1, times)), np.tile(want, (times, times))


def bound(kernel, dtype, tf32, rows) -> float:
    if tf32:
        return TERM_TF32 * rows + ROUNDED
    if dtype != "float32":
        return TERM * rows
    return FMA if kernel == "sm90" else max(FMA, 3e-10 * rows)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [16, 768])
@pytest.mark.parametrize("rows", [2**11, 2**14, 2**17])
@pytest.mark.parametrize(
    ("dtype", "tf32"),
    [("bfloat16", False), ("float16", False), ("float32", False), ("float32", True)],
)
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_wgrad(rng, kernel, dtype, tf32, rows, columns):
    if kernel == "sm90" and (tf32 or 90 not in extension.live_capabilities()):
        pytest.skip("needs a Hopper GPU, whose kernel has planes instead of TensorFloat-32")
    x, dy, want = positive_rows(rng, rows, columns, dtype)
    got = wgrad(x, dy, kernel, precision="tensorfloat32" if tf32 else "highest")
    assert relative(got, want) <= bound(kernel, dtype, tf32, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_longest_wgrad(rng, kernel, dtype):
    """The gradient of a group of 2**20 rows."""
    if kernel == "sm90" and 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    x, dy, want = positive_rows(rng, 2**20, 16, dtype)
    w, sizes = jnp.zeros((1, 16, 16), dtype), jnp.array([2**20])
    f = lambda w: jgg.grouped_mm(
        x, w, sizes, preferred_element_type="float32", implementation=kernel
    )
    dw = jax.vjp(f, w)[1](dy.astype("float32"))[0]
    rounded = HALF.get(dtype, 0)
    assert relative(dw[0], want) <= bound(kernel, dtype, False, 2**20) + rounded


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2**11, 2**15])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_nvfp4_wgrad(rng, kernel, rows):
    if kernel == "sm90" and 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    sizes = jnp.array([rows])
    of = [jnp.asarray(np.abs(rng.standard_normal((rows, 64))), "float32") for _ in range(2)]
    x, dy = (jgg.nvfp4_quantize(a, axis=0, group_sizes=sizes) for a in of)
    want = oracle.f64(jgg.dequantize(dy)).T @ oracle.f64(jgg.dequantize(x))
    got = jgg.nvfp4_grouped_wgrad(x, dy, sizes, implementation=kernel)
    # The factor of the sums, and each value that dequantize rounds, to float32.
    assert relative(got[0], want) <= TERM * rows + 1e-6
