"""What ``Quantized``, ``quantize`` and ``dequantize`` take: defaults, errors, the axis that is
contracted, and the warning where it was not said."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._quantized.format import FORMATS

W = jnp.ones((4, 128))
PACKED, SCALES = jnp.zeros((4, 16), jnp.uint32), jnp.ones((4, 2))
STATIC = {"mode": "affine", "bits": 4, "group_size": 64}

ERRORS = [
    (
        lambda: jgg.quantize(W, mode="int4"), ValueError,
        "jgg.quantize: mode='int4' is not one of 'affine', 'mxfp4', 'mxfp8', 'nvfp4', 'fp8'",
    ),
    (
        lambda: jgg.quantize(W, mode=["affine"]), ValueError,  # pyright: ignore
        "jgg.quantize: mode=['affine'] is not one of 'affine', 'mxfp4', 'mxfp8', 'nvfp4', 'fp8'",
    ),
    (
        lambda: jgg.quantize(W, bits=7), ValueError,
        "jgg.quantize: bits=7, expected 2 or 3 or 4 or 5 or 6 or 8 in mode 'affine'",
    ),
    (
        lambda: jgg.quantize(W, mode="nvfp4", group_size=32), ValueError,
        "jgg.quantize: group_size=32, expected 16 in mode 'nvfp4'",
    ),
    (
        lambda: jgg.quantize(W[:, :100]), ValueError,
        "jgg.quantize: w has shape (4, 100), expected (..., K) with K a multiple of group_size=64",
    ),
    (
        lambda: jgg.quantize(W.astype(jnp.int32)), TypeError,
        "jgg.quantize: w must be float32, bfloat16 or float16, got dtype int32",
    ),
    (
        lambda: jgg.quantize(W, global_scale=jnp.float32(1)), ValueError,
        "jgg.quantize: global_scale is for mode 'nvfp4', not 'affine'",
    ),
    (
        lambda: jgg.quantize(W, mode="nvfp4", global_scale=jnp.ones(3)), ValueError,
        "jgg.quantize: global_scale has shape (3,), expected () or the leading axes of (4, 128)",
    ),
    (
        lambda: jgg.Quantized(PACKED, SCALES, SCALES, axis=0, **STATIC), ValueError,
        "jgg.Quantized: axis=0 is not -1 or -2",
    ),
    (
        lambda: jgg.Quantized(PACKED, SCALES, SCALES, layout="tiled", **STATIC), ValueError,
        "jgg.Quantized: layout='tiled' is not one of 'grouped', 'linear', 'sm90', "
        "'swizzled'",
    ),
    (
        lambda: jgg.dequantize(W), TypeError,  # pyright: ignore
        "jgg.dequantize: q must be a jgg.Quantized, got array float32[4,128]",
    ),
    (
        lambda: jgg.dequantize(jgg.Quantized(PACKED, SCALES, **STATIC)), ValueError,
        "jgg.dequantize: q.biases: mode 'affine' needs biases",
    ),
    (
        lambda: jgg.dequantize(jgg.Quantized(PACKED, SCALES[:, :1], SCALES, **STATIC)), ValueError,
        "jgg.dequantize: q.scales has shape (4, 1), expected (..., K/group_size) = (4, 2) because "
        "q.weight is (4, 16), bits=4 and group_size=64",
    ),
    (
        lambda: jgg.dequantize(jgg.Quantized(PACKED, SCALES, SCALES[:2], **STATIC)), ValueError,
        "jgg.dequantize: q.biases is float32[2,2], expected float32[4,2] as q.scales",
    ),
    (
        lambda: jgg.dequantize(jgg.Quantized(PACKED[:, :3], SCALES, SCALES, **STATIC)), ValueError,
        "jgg.dequantize: q.weight has shape (4, 3), expected (..., K*bits/32) with K a multiple of "
        "group_size=64 and bits=4",
    ),
    (
        lambda: jgg.dequantize(jgg.Quantized(W, SCALES, SCALES, **STATIC)), TypeError,
        "jgg.dequantize: q.weight must be uint32, got dtype float32",
    ),
    (
        lambda: jgg.dequantize(
            jgg.Quantized(PACKED, SCALES, mode="mxfp4", bits=4, group_size=32)
        ), TypeError,
        "jgg.dequantize: q.scales must be uint8 in mode 'mxfp4', got dtype float32",
    ),
    (
        lambda: jgg.dequantize(jgg.quantize(W), jnp.int8), TypeError,
        "jgg.dequantize: dtype=int8 is not float32, bfloat16 or float16",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message


def test_numbers_by_default():
    """None stands for the first of the mode, as where it is quantized."""
    for mode in FORMATS:
        q = jgg.quantize(jnp.ones((4, 128)), mode=mode)
        leaves = dict(
            zip(("weight", "scales", "biases"), (q.weight, q.scales, q.biases), strict=True)
        )
        made = jgg.Quantized(**leaves, mode=mode, bits=None, group_size=None, block=q.block)
        assert (made.bits, made.group_size, made.shape) == (q.bits, q.group_size, (4, 128))
        np.testing.assert_array_equal(jgg.dequantize(made), jgg.dequantize(q))


@pytest.mark.parametrize("mode", ["affine", "nvfp4"])
@pytest.mark.one_in(2)
def test_contract(rng, mode):
    """Of (G, K, N), square or not: the Quantized of (G, N, K), which grouped_qmm multiplies by."""
    for n in (64, 32):
        w = oracle.random(rng, (2, 64, n))
        q = jgg.quantize(w, mode=mode, contract=-2)
        want = jgg.quantize(w.swapaxes(1, 2), mode=mode, contract=-1)
        assert q.shape == (2, n, 64)
        jax.tree.map(np.testing.assert_array_equal, q, want)
        x = oracle.random(rng, (5, 64))
        dense = jgg.grouped_mm(x, jgg.dequantize(q, "float32").swapaxes(1, 2), [2, 3])
        oracle.assert_close(jgg.grouped_qmm(x, q, [2, 3]), dense)


@pytest.mark.parametrize(
    ("shape", "contract", "message"),
    [
        ((2, 64, 48), -1, "w has shape (2, 64, 48), expected (..., K) with K a multiple of "
         "group_size=64. Pass contract=-2 if K is axis -2"),
        ((2, 48, 64), -2, "w has shape (2, 48, 64), expected (..., K, N) with K a multiple of "
         "group_size=64. Pass contract=-1 if K is axis -1"),
        ((64,), -2, "w has shape (64,), expected (..., K, N) with K a multiple of group_size=64"),
        ((64, 64), 0, "contract=0 is not -1 or -2"),
    ],
)  # fmt: skip
def test_contract_is_checked(shape, contract, message):
    oracle.assert_raises(
        lambda: jgg.quantize(jnp.ones(shape), contract=contract), ValueError,
        f"jgg.quantize: {message}",
    )  # fmt: skip


SQUARE = (
    "jgg.quantize: w has shape {}, whose last two axes are equal, so nothing tells which of them "
    "products sum over. It is taken for the last one. Pass contract=-1 if that is right, w being "
    "(..., N, K), or contract=-2 if w is (..., K, N), as grouped_mm takes it"
)


@pytest.mark.parametrize(
    ("run", "shape", "seen"),
    [
        (lambda f: f, (3, 192, 192), (3, 192, 192)),  # a program that no other test has traced
        (jax.jit, (2, 128, 128), (2, 128, 128)),
        (jax.vmap, (2, 256, 256), (256, 256)),
    ],
    ids=["alone", "jit", "vmap"],
)
def test_a_square_weight_whose_axis_was_not_said(run, shape, seen):
    """A warning about the line of the caller, also where JAX traces it."""
    with pytest.warns(UserWarning, match="last two axes") as caught:
        run(jgg.quantize)(jnp.ones(shape))
    assert [str(one.message) for one in caught] == [SQUARE.format(seen)]
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 64, 64), {"contract": -1}),
        ((2, 64, 64), {"contract": -2}),
        ((2, 64, 128), {}),
        ((64,), {}),
        ((0, 64, 64), {}),
        ((64, 64, 128), {}),
    ],
)
def test_no_warning_where_the_axis_is_known(shape, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jgg.quantize(jnp.ones(shape), **options)
