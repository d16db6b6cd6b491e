"""Messages for bad input, word for word."""

import jax
import jax.export
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._core.segments import MAX_ROWS

X, W, S = jnp.ones((16, 8)), jnp.ones((3, 8, 4)), jnp.array([4, 0, 9])
A, B = jnp.ones((5, 20)), jnp.ones((20, 4))
Numbers = jax.lax.RaggedDotDimensionNumbers
KEPT = Numbers((([1], [1]), ([], [])), [0], [0])

LISTED = "list of parts that differ in shape, are not numbers or are too large"


def standard(f, *args):
    with jax.numpy_dtype_promotion("standard"):
        return f(*args)


CASES = [
    (
        lambda: jgg.grouped_mm(X, W.swapaxes(1, 2), S), ValueError,
        "jgg.grouped_mm: w has shape (3, 4, 8), expected (G, K, N) = (3, 8, 8) because x is "
        "(16, 8). Pass transpose_w=True if w is (G, N, K).",
    ),
    (
        lambda: jgg.grouped_mm(X, W, S, transpose_w=True), ValueError,
        "jgg.grouped_mm: w has shape (3, 8, 4), expected (G, N, K) = (3, 8, 8) because x is "
        "(16, 8). Pass transpose_w=False if w is (G, K, N).",
    ),
    (
        lambda: jgg.grouped_mm(X[None], W, S), ValueError,
        "jgg.grouped_mm: x has shape (1, 16, 8), expected 2 axes (T, K)",
    ),
    (
        lambda: jgg.grouped_mm(X, W, S[:2]), ValueError,
        "jgg.grouped_mm: group_sizes has shape (2,), expected (G,) = (3,) because w is (3, 8, 4). "
        "Pass group_offset if w holds only some of the groups.",
    ),
    (
        lambda: jgg.grouped_mm(X, W, S[None]), ValueError,
        "jgg.grouped_mm: group_sizes has shape (1, 3), expected 1 axis (G,) = (3,) because "
        "w is (3, 8, 4). Pass group_offset if w holds only some of the groups.",
    ),
    (
        lambda: jgg.grouped_mm(X, W[0], S), ValueError,
        "jgg.grouped_mm: w has shape (8, 4), expected 3 axes (G, K, N)",
    ),
    (
        lambda: jgg.grouped_mm(
            X.astype(complex), W.astype(complex), S, preferred_element_type=jnp.float32
        ),
        TypeError,
        "jgg.grouped_mm: preferred_element_type=float32 would drop the imaginary part of "
        "complex64 operands",
    ),
    (
        lambda: jgg.route(S[:, None], 4, max_rows=2**40), ValueError,
        f"jgg.route: max_rows={2**40} is more than {MAX_ROWS}",
    ),
    (
        lambda: jgg.grouped_mm(X, W, S.astype(jnp.float32)), TypeError,
        "jgg.grouped_mm: group_sizes must hold integers, got dtype float32",
    ),
    (
        lambda: jgg.grouped_mm(X, W, S, group_offset=jnp.zeros((2,), jnp.int32)), ValueError,
        "jgg.grouped_mm: group_offset has shape (2,), expected () or (1,)",
    ),
    (
        lambda: jgg.grouped_mm(X, W, S, activation="selu"), ValueError,
        f"jgg.grouped_mm: activation='selu' is not one of None, {moe_oracle.NAMES}",
    ),
    (
        lambda: jgg.grouped_mm(X, W[..., :3], S, activation="swiglu"), ValueError,
        "jgg.grouped_mm: activation='swiglu' takes gate and up as the two halves of N, but N is 3",
    ),
    (
        lambda: jgg.grouped_mm(X, W, S, bias=jnp.ones((3, 5))), ValueError,
        "jgg.grouped_mm: bias has shape (3, 5), expected (G, N) = (3, 4) because w is (3, 8, 4)",
    ),
    (
        lambda: jgg.grouped_mm(X, W, S, row_scale=jnp.ones((15,))), ValueError,
        "jgg.grouped_mm: row_scale has shape (15,), expected (T,) = (16,) because x is (16, 8)",
    ),
    (
        lambda: jgg.grouped_mm(X, W, S, existing_out=jnp.ones((16, 5))), ValueError,
        "jgg.grouped_mm: existing_out has shape (16, 5), expected (T, N) = (16, 4) because the "
        "result has this shape",
    ),
    (
        lambda: jgg.grouped_mm(X, W, S, implementation="sm70"), ValueError,
        "jgg.grouped_mm: implementation='sm70' is not one of None, 'sm100', 'sm90', "
        "'sm89', 'sm80', 'cpu', 'reference'",
    ),
    (
        lambda: jgg.grouped_mm(X, W, S, precision="best"), ValueError,
        "jgg.grouped_mm: precision='best' is not a jax.lax.Precision, its name, or "
        "'tensorfloat32'",
    ),
    *(
        (
            lambda p=p: jgg.grouped_mm(X, W, S, precision=p), ValueError,
            "jgg.grouped_mm: precision=F64_F64_F64 is not done for float32 and float32; algorithms "
            "that are done, at least as exactly: DEFAULT, F32_F32_F32, TF32_TF32_F32_X3, "
            "BF16_BF16_F32_X3, BF16_BF16_F32_X6, BF16_BF16_F32_X9, TF32_TF32_F32, BF16_BF16_F32, "
            "BF16_BF16_BF16. Convert operands to float64",
        )
        for p in ("F64_F64_F64", jax.lax.DotAlgorithmPreset.F64_F64_F64)
    ),
    (
        lambda: jgg.grouped_mm(X, W, S, preferred_element_type=jnp.int32), TypeError,
        "jgg.grouped_mm: preferred_element_type=int32 cannot hold a product of float32 operands",
    ),
    (
        lambda: jgg.grouped_mm("x", W, S), TypeError,
        "jgg.grouped_mm: x must be an array, got str",
    ),
    *(
        (call, TypeError, f"jgg.{argument} must be an array, got {what}")
        for what, value in (
            ("NoneType", None),
            ("dict", {"a": 1}),
            (
                "ndarray of dtype object, which JAX does not have. Convert it to numbers",
                np.array([None]),
            ),
            (
                "ndarray of dtype >f4, in another byte order. Convert it: "
                "a.astype(a.dtype.newbyteorder('='))",
                np.ones((2, 2), ">f4"),
            ),
            (LISTED, [[0, 1], [2]]),
            (LISTED, [np.arange(2), np.arange(3)]),
            (LISTED, [jnp.arange(2), 3]),
            (LISTED, [4, None, 9]),
            (LISTED, [[0, 2**70]]),
        )
        for argument, call in (
            ("grouped_mm: x", lambda value=value: jgg.grouped_mm(value, W, S)),
            ("grouped_mm: group_sizes", lambda value=value: jgg.grouped_mm(X, W, value)),
            ("segmented_mm: segments", lambda value=value: jgg.segmented_mm(A, B, value)),
            ("gather_mm: rhs_indices", lambda value=value: jgg.gather_mm(A, B, None, value)),
            ("ragged_dot: rhs", lambda value=value: jgg.ragged_dot(X, value, S)),
            ("quantize: w", lambda value=value: jgg.quantize(value)),
        )
        if value is not None or argument != "gather_mm: rhs_indices"
    ),
    (
        lambda: jgg.grouped_mm(X.astype("bfloat16"), W, S), TypeError,
        "jgg.grouped_mm: x of dtype bfloat16 and w of dtype float32 have no common dtype where "
        "jax_numpy_dtype_promotion is 'strict'. Convert one of them",
    ),
    (
        lambda: standard(jgg.segmented_mm, A.astype("int4"), B, [[0, 3]]), TypeError,
        "jgg.segmented_mm: a of dtype int4 and b of dtype float32 have no common dtype. Convert "
        "one of them",
    ),
    (
        lambda: jgg.ragged_dot(X[None], W, S), ValueError,
        "jgg.ragged_dot: lhs has shape (1, 16, 8), expected 2 axes (m, k)",
    ),
    (
        lambda: jgg.ragged_dot(X, W.swapaxes(1, 2), S), ValueError,
        "jgg.ragged_dot: rhs has shape (3, 4, 8), expected (g, k, n) = (3, 8, 8) because lhs is "
        "(16, 8)",
    ),
    (
        lambda: jgg.ragged_dot(X, W, S[:2]), ValueError,
        "jgg.ragged_dot: group_sizes has shape (2,), expected (g,) = (3,) because rhs is "
        "(3, 8, 4). Pass group_offset if rhs holds only some of the groups.",
    ),
    (
        lambda: jgg.ragged_dot(X, W, S, group_offset=jnp.zeros((2,), jnp.int32)), ValueError,
        "jgg.ragged_dot: group_offset has shape (2,), expected () or (1,)",
    ),
    *(
        (
            lambda f=f, more=more: getattr(jgg, f)(X, W, S, *more, out_sharding="x"), TypeError,
            f"jgg.{f}: out_sharding must be a jax.sharding.NamedSharding, a PartitionSpec or None, "
            "got 'x'",
        )
        for f, more in (("ragged_dot", ()), ("ragged_dot_general", (KEPT,)))
    ),
    (
        lambda: jgg.ragged_dot_general(X, W, S, KEPT, group_offset=S[:2]), ValueError,
        "jgg.ragged_dot_general: group_offset has shape (2,), expected () or (1,)",
    ),
    (
        lambda: jgg.ragged_dot_general(X, W, S, 3), TypeError,
        "jgg.ragged_dot_general: ragged_dot_dimension_numbers must be a "
        "jax.lax.RaggedDotDimensionNumbers, got 3",
    ),
    *(
        (
            lambda axes=axes: jgg.ragged_dot_general(X, W, S, Numbers(axes, [0], [0])), TypeError,
            "jgg.ragged_dot_general: ragged_dot_dimension_numbers must hold axes, two lists "
            f"contracted and two of batches, got {Numbers(axes, [0], [0])}",
        )
        for axes in (((["k"], [1]), ([], [])), (([1],), ([], [])))
    ),
    (
        lambda: jgg.prepack(jgg.quantize(jnp.ones((2, 32)), group_size=32), strict="x"), TypeError,
        "jgg.prepack: strict must be True or False, got 'x'",
    ),
    (
        lambda: jgg.grouped_mm(X > 0, W, S), TypeError,
        "jgg.grouped_mm: x must hold numbers, got dtype bool",
    ),
    (
        lambda: jgg.segmented_mm(A, B.T, jnp.array([[0, 3]])), ValueError,
        "jgg.segmented_mm: b has shape (4, 20), expected (K, N) = (20, 20) because a is (5, 20). "
        "Pass transpose_b=True if b is (N, K).",
    ),
    (
        lambda: jgg.segmented_mm(A, B, jnp.array([0, 3, 5])), ValueError,
        "jgg.segmented_mm: segments has shape (3,), expected (..., 2): half-open [start, end) "
        "along K",
    ),
    (
        lambda: jgg.segmented_mm(A, B, jnp.array([[0.0, 3.0]])), TypeError,
        "jgg.segmented_mm: segments must hold integers, got dtype float32",
    ),
    (
        lambda: jgg.gather_mm(A, jnp.ones((3, 8, 4))), ValueError,
        "jgg.gather_mm: b has shape (3, 8, 4), expected (B..., K, N) with K = 20 because a is "
        "(5, 20)",
    ),
    (
        lambda: jgg.gather_mm(A[0], B), ValueError,
        "jgg.gather_mm: a has shape (20,), expected (A..., M, K)",
    ),
    (
        lambda: jgg.gather_mm(A, B, jnp.zeros((2,), jnp.int32), jnp.zeros((3,), jnp.int32)),
        ValueError,
        "jgg.gather_mm: lhs_indices (2,) and rhs_indices (3,) do not broadcast",
    ),
    (
        lambda: jgg.gather_mm(A, B, rhs_indices=jnp.zeros((2,))), TypeError,
        "jgg.gather_mm: rhs_indices must hold integers, got dtype float32",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), CASES)
def test_message(call, kind, message):
    oracle.assert_raises(call, kind, message)


def test_symbolic_shapes():
    """What is exported is for shapes that are known."""
    (rows,) = jax.export.symbolic_shape("T")
    types = [jax.ShapeDtypeStruct((rows, *X.shape[1:]), X.dtype), *map(jax.typeof, (W, S))]
    oracle.assert_raises(
        lambda: jax.export.export(jax.jit(jgg.grouped_mm))(*types), ValueError,
        f"jgg.grouped_mm: x has shape (T, {X.shape[1]}), expected sizes that are numbers: a "
        "function is exported for shapes that are known. Pad rows to the most there are; sizes "
        "are data",
    )  # fmt: skip


@pytest.mark.parametrize("f", ["ragged_dot", "ragged_dot_general"])
def test_a_sharding_that_does_not_fit(f):
    """What JAX says of it, behind our name."""
    more = () if f == "ragged_dot" else (KEPT,)
    spec = jax.sharding.PartitionSpec("x")
    with pytest.raises(ValueError, match="mesh context") as caught:
        getattr(jgg, f)(X, W, S, *more, out_sharding=spec)
    start = f"jgg.{f}: out_sharding={spec} does not fit the result: "
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize(("call", "kind", "message"), CASES[:3])
def test_same_message_under_jit(call, kind, message):
    oracle.assert_raises(jax.jit(call), kind, message)


def test_batch_of_too_many_rows():
    x, w, s = jnp.ones((3, 2, 1)), jnp.ones((1, 1, 1)), jnp.ones((1,), jnp.int32)
    shapes = jax.ShapeDtypeStruct((2**20, 2**12, 1), "float32")
    with pytest.raises(ValueError, match=r"4294967296 rows; row indices are int32"):
        jax.eval_shape(jax.vmap(lambda x: jgg.grouped_mm(x, w, s)), shapes)
    assert jax.vmap(lambda x: jgg.grouped_mm(x, w, s))(x).shape == (3, 2, 1)


@pytest.mark.parametrize("name", ["bias", "row_scale", "existing_out"])
@pytest.mark.parametrize(
    ("operands", "dtype"),
    [("int32", "float32"), ("float32", "complex64"), ("bfloat16", "complex64")],
)
def test_what_the_result_cannot_hold(name, operands, dtype):
    x, w = jnp.ones((6, 4), operands), jnp.ones((3, 4, 5), operands)
    shape = {"bias": (3, 5), "row_scale": (6,), "existing_out": (6, 5)}[name]
    oracle.assert_raises(
        lambda: jgg.grouped_mm(x, w, [1, 2, 3], **{name: jnp.ones(shape, dtype)}), TypeError,
        f"jgg.grouped_mm: {name} has dtype {dtype}, which the result, {operands}, cannot hold",
    )  # fmt: skip


def test_sizes_of_the_host_do_not_wrap():
    x, w, most = jnp.ones((6, 4)), jnp.ones((3, 4, 5)), np.iinfo(np.int64).max
    for sizes in (np.array([most, 1, 1]), [2**40, 1, 1], np.array([2**63, 1, 1], np.uint64)):
        np.testing.assert_array_equal(jgg.grouped_mm(x, w, sizes), 4)
    np.testing.assert_array_equal(jgg.segmented_mm(x.T, x, np.array([[0, most]])), 6)
    assert not np.asarray(jgg.segmented_mm(x.T, x, np.array([[2**32, most]]))).any()
    assert jgg.grouped_mm(x, w[:0], []).shape == (6, 5)


def test_disable_jit():
    x, w, sizes = jnp.ones((6, 64)), jnp.ones((3, 64, 5)), jnp.array([1, 2, 3])
    f = lambda x: jgg.grouped_mm(x, w, sizes, activation="silu").sum()
    want = jax.value_and_grad(f)(x)
    q = jgg.quantize(w.swapaxes(1, 2))
    with jax.disable_jit():
        jax.tree.map(np.testing.assert_allclose, jax.value_and_grad(f)(x), want)
        np.testing.assert_allclose(jgg.grouped_qmm(x, q, sizes), 64, rtol=1e-2)


def test_an_algorithm_of_float64():
    """It is done where there are float64 operands."""
    with jax.enable_x64(True):
        x, w = X.astype("float64"), W.astype("float64")
        text = jax.jit(lambda x, w: jgg.grouped_mm(x, w, S, precision="F64_F64_F64"))
        assert jax.eval_shape(text, x, w).dtype == "float64"
