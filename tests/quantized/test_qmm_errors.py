"""Products with quantized weights that are refused: shapes, dtypes and options."""

import dataclasses

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

X, S = jnp.ones((16, 64)), jnp.array([4, 0, 9])


def like(*shape, mode="mxfp4"):
    """A Quantized that stands for an array of this shape."""
    bits, group = {"affine": (4, 32), "mxfp4": (4, 32), "nvfp4": (4, 16)}[mode]
    *lead, k = shape
    scales = jnp.ones((*lead, k // group), "float32" if mode == "affine" else "uint8")
    return jgg.Quantized(
        jnp.zeros((*lead, k * bits // 32), "uint32"), scales, scales if mode == "affine" else None,
        mode=mode, bits=bits, group_size=group,
    )  # fmt: skip


W = like(3, 8, 64)

ERRORS = [
    (
        lambda: jgg.gather_qmm(jnp.ones((32, 512)), like(8, 512, 480)), ValueError,
        "jgg.gather_qmm: w has shape (8, 512, 480), expected (G, N, K) = (8, 512, 512) "
        "because x is (32, 512). Of (G, K, N), "
        "jgg.quantize(w, contract=-2) makes one.",
    ),
    (
        lambda: jgg.grouped_qmm(X, W, S, transpose_w=False), ValueError,
        "jgg.grouped_qmm: w has shape (3, 8, 64), expected (G, K, N) = (3, 64, 64) because "
        "x is (16, 64). Pass transpose_w=True if w is (G, N, K).",
    ),
    (
        lambda: jgg.quantized_matmul(X, like(8, 32)), ValueError,
        "jgg.quantized_matmul: w has shape (8, 32), expected (N, K) = (8, 64) because x is "
        "(16, 64). Of (K, N), "
        "jgg.quantize(w, contract=-2) makes one.",
    ),
    (
        lambda: jgg.gather_qmm(X, like(2, 3, 8, 32)), ValueError,
        "jgg.gather_qmm: w has shape (2, 3, 8, 32), expected (B..., N, K) = (2, 3, 8, 64) "
        "because x is (16, 64). Of (B..., K, N), "
        "jgg.quantize(w, contract=-2) makes one.",
    ),
    (
        lambda: jgg.grouped_qmm(X[:, :50], W, S), ValueError,
        "jgg.grouped_qmm: w has shape (3, 8, 64), expected (G, N, K) = (3, 8, 50) because x is "
        "(16, 50). Of (G, K, N), jgg.quantize(w, contract=-2) makes one.",
    ),
    (
        lambda: jgg.grouped_qmm(X, like(8, 64), S), ValueError,
        "jgg.grouped_qmm: w has shape (8, 64), expected (G, N, K)",
    ),
    (
        lambda: jgg.grouped_qmm(X[0], W, S), ValueError,
        "jgg.grouped_qmm: x has shape (64,), expected 2 axes (T, K)",
    ),
    (
        lambda: jgg.gather_qmm(X[0], W), ValueError,
        "jgg.gather_qmm: x has shape (64,), expected (A..., M, K)",
    ),
    (
        lambda: jgg.quantized_matmul(jnp.ones(()), W), ValueError,
        "jgg.quantized_matmul: x has shape (), expected (..., K)",
    ),
    (
        lambda: jgg.quantized_matmul(jnp.ones((2, 5, 64)), W), ValueError,
        "jgg.quantized_matmul: the batch axes of x (2, 5, 64) and w (3, 8, 64) do not broadcast",
    ),
    (
        lambda: jgg.grouped_qmm(X, X, S), TypeError,  # pyright: ignore
        "jgg.grouped_qmm: w must be a jgg.Quantized, got array float32[16,64]",
    ),
    (
        lambda: jgg.grouped_qmm(X.astype(jnp.int8), W, S), TypeError,
        "jgg.grouped_qmm: x must be float32, bfloat16 or float16, got dtype int8",
    ),
    (
        lambda: jgg.grouped_qmm(np.ones((16, 64)), W, S, preferred_element_type="int32"), TypeError,
        "jgg.grouped_qmm: preferred_element_type must be float32, bfloat16 or float16, got dtype "
        "int32",
    ),
    (
        lambda: jgg.grouped_qmm(X, dataclasses.replace(W, scales=W.scales[:2]), S), ValueError,
        "jgg.grouped_qmm: w.scales has shape (2, 8, 2), expected (..., K/group_size) = (3, 8, 2) "
        "because w.weight is (3, 8, 8), bits=4 and group_size=32",
    ),
    (
        lambda: jgg.grouped_qmm(
            X, dataclasses.replace(like(3, 8, 64, mode="nvfp4"), global_scale=jnp.ones((3, 7))), S
        ),
        ValueError,
        "jgg.grouped_qmm: w.global_scale has shape (3, 7), expected () or the leading axes of "
        "(3, 8, 64)",
    ),
    (
        lambda: jgg.grouped_qmm(
            jnp.ones((20, 8)),
            dataclasses.replace(like(3, 8, 64, mode="nvfp4"), global_scale=jnp.ones((3, 8))), S,
            transpose_w=False,
        ),
        ValueError,
        "jgg.grouped_qmm: w.global_scale has shape (3, 8), expected () or leading axes of (3,) "
        "with transpose_w=False",
    ),
    (
        lambda: jgg.grouped_qmm(X, W, S[:2]), ValueError,
        "jgg.grouped_qmm: group_sizes has shape (2,), expected (G,) = (3,) because w is "
        "(3, 8, 64). Pass group_offset if w holds only some of the groups.",
    ),
    (
        lambda: jgg.grouped_qmm(X, W, S, bias=jnp.ones((3, 7))), ValueError,
        "jgg.grouped_qmm: bias has shape (3, 7), expected (G, N) = (3, 8) because w is (3, 8, 64)",
    ),
    (
        lambda: jgg.grouped_qmm(X, W, S, activation="selu"), ValueError,
        f"jgg.grouped_qmm: activation='selu' is not one of None, {moe_oracle.NAMES}",
    ),
    (
        lambda: jgg.gather_qmm(X, W, jnp.zeros(2, int), jnp.zeros(3, int)), ValueError,
        "jgg.gather_qmm: lhs_indices (2,) and rhs_indices (3,) do not broadcast",
    ),
    (
        lambda: jgg.gather_qmm(X, W, None, jnp.ones(3)), TypeError,
        "jgg.gather_qmm: rhs_indices must hold integers, got dtype float32",
    ),
    (
        lambda: jgg.quantized_matmul(X, like(8, 64), implementation="triton"), ValueError,
        "jgg.quantized_matmul: implementation='triton' is not one of None, 'sm100', 'sm90', "
        "'sm89', 'sm80', 'cpu', 'reference'",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(ERRORS)))
def test_errors(case):
    oracle.assert_raises(*ERRORS[case])


def test_64_bits(rng):
    """float64 is an error; where it exists, other products are what they were."""
    q, x = oracle.random_quantized(rng, (3, 8, 64), "affine"), np.ones((16, 64), "float32")
    with jax.enable_x64(True):
        with pytest.raises(TypeError, match="got dtype float64"):
            jgg.grouped_qmm(x.astype("float64"), q, np.array([4, 0, 9]))
        out = jax.jit(jgg.grouped_qmm)(x, q, np.array([4, 0, 9]))
    assert out.dtype == "float32"
    oracle.assert_close(out, oracle.grouped_qmm(x, q, [4, 0, 9]))
