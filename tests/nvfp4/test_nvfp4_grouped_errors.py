"""Products of two NVFP4 operands that are refused: layouts, shapes, dtypes and options."""

import dataclasses

import jax.numpy as jnp
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._kernels import choose


def like(*shape, mode="nvfp4", group=16, **static):
    *lead, k = shape
    return jgg.Quantized(
        jnp.zeros((*lead, k // 8), "uint32"), jnp.ones((*lead, k // group), "uint8"),
        mode=mode, bits=4, group_size=group, **static,
    )  # fmt: skip


def like_grouped(columns, rows=20, groups=3):
    q = like(columns, 64 * ((rows + 63 * groups) // 64), axis=-2, layout="grouped")
    return dataclasses.replace(q, positions=jnp.zeros(rows, jnp.int32))


X, W, S = like(20, 32), like(3, 8, 32), jnp.array([9, 0, 8])
A, B, OLD = like_grouped(8), like_grouped(6), jnp.ones((3, 6, 8))

ERRORS = [
    (
        lambda: jgg.nvfp4_grouped_mm(jnp.ones((20, 32)), W, S), TypeError,  # pyright: ignore
        "jgg.nvfp4_grouped_mm: x must be a jgg.Quantized, got array float32[20,32]",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(like(20, 32, mode="mxfp4", group=32), W, S), ValueError,
        "jgg.nvfp4_grouped_mm: x has mode 'mxfp4', expected 'nvfp4'",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, like(3, 8, 32, axis=-2), S), ValueError,
        "jgg.nvfp4_grouped_mm: w has axis=-2, expected -1: blocks along K, the contracted axis of "
        "(G, N, K). dataclasses.replace(w, axis=-1) is what it stores, (3, 8, 32)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(A, W, S), ValueError,
        "jgg.nvfp4_grouped_mm: x has axis=-2, expected -1: blocks along K, the contracted axis of "
        "(T, K)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(W, W, S), ValueError,
        "jgg.nvfp4_grouped_mm: x has shape (3, 8, 32), expected 2 axes (T, K)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, like(3, 8, 64), S), ValueError,
        "jgg.nvfp4_grouped_mm: w has shape (3, 8, 64), expected (G, N, K) = (3, 8, 32) because x "
        "is (20, 32)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, S[:2]), ValueError,
        "jgg.nvfp4_grouped_mm: group_sizes has shape (2,), expected (G,) = (3,) because w is "
        "(3, 8, 32)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, jnp.ones(3)), TypeError,
        "jgg.nvfp4_grouped_mm: group_sizes must hold integers, got dtype float32",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, S, alpha=jnp.ones(2)), ValueError,
        "jgg.nvfp4_grouped_mm: alpha has shape (2,), expected () or (G,) = (3,) because w is "
        "(3, 8, 32)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, S, alpha=1j), TypeError,
        "jgg.nvfp4_grouped_mm: alpha must hold real numbers, got dtype complex64",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, S, bias=jnp.ones((3, 7))), ValueError,
        "jgg.nvfp4_grouped_mm: bias has shape (3, 7), expected (G, N) = (3, 8) because w is "
        "(3, 8, 32)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(
            X, dataclasses.replace(W, global_scale=jnp.ones((3, 8))), S
        ),
        ValueError,
        "jgg.nvfp4_grouped_mm: w.global_scale has shape (3, 8), expected () or (G,) = (3,) because "
        "w is (3, 8, 32)",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, S, preferred_element_type="float64"), TypeError,
        "jgg.nvfp4_grouped_mm: preferred_element_type must be float32, bfloat16 or float16, got "
        "dtype float64",
    ),
    (
        lambda: jgg.nvfp4_grouped_mm(X, W, S, implementation="triton"), ValueError,
        "jgg.nvfp4_grouped_mm: implementation='triton' is not one of None, "
        + ", ".join(map(repr, choose.IMPLEMENTATIONS)),
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(like(8, 192), B, S), ValueError,
        "jgg.nvfp4_grouped_wgrad: x has layout 'linear', expected 'grouped': "
        "nvfp4_quantize(x, axis=0, group_sizes=group_sizes)",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, like(6, 192, mode="mxfp4", group=32), S), ValueError,
        "jgg.nvfp4_grouped_wgrad: dy has mode 'mxfp4', expected 'nvfp4'",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, like_grouped(6, 21), S), ValueError,
        "jgg.nvfp4_grouped_wgrad: dy has 21 rows, expected T = 20 as x",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, B, jnp.array([4, 0])), ValueError,
        "jgg.nvfp4_grouped_wgrad: x is stored as (8, 192), expected (8, 128) because it has 20 "
        "rows and group_sizes is (2,)",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(
            A, dataclasses.replace(B, global_scale=jnp.ones(6)), S
        ),
        ValueError, "jgg.nvfp4_grouped_wgrad: dy.global_scale has shape (6,), expected ()",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, B, S, beta=0), ValueError,
        "jgg.nvfp4_grouped_wgrad: beta needs existing_out, which it multiplies",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, B, S, beta=jnp.ones(2), existing_out=OLD), ValueError,
        "jgg.nvfp4_grouped_wgrad: beta has shape (2,), expected () or (G,) = (3,) because "
        "group_sizes is (3,)",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, B, S, existing_out=OLD[:2]), ValueError,
        "jgg.nvfp4_grouped_wgrad: existing_out has shape (2, 6, 8), expected (G, N, K) = (3, 6, 8) "
        "because the result has this shape",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, B, S, existing_out=OLD.astype("bfloat16")), TypeError,
        "jgg.nvfp4_grouped_wgrad: existing_out must be float32, got dtype bfloat16",
    ),
    (
        lambda: jgg.nvfp4_grouped_wgrad(A, B, S, implementation="triton"), ValueError,
        "jgg.nvfp4_grouped_wgrad: implementation='triton' is not one of None, "
        + ", ".join(map(repr, choose.IMPLEMENTATIONS)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(ERRORS)))
def test_errors(case):
    oracle.assert_raises(*ERRORS[case])
