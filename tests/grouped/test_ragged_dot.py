"""ragged_dot and ragged_dot_general: drop-in for JAX's own, and right where those refuse."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device

Numbers = lax.RaggedDotDimensionNumbers


def of_jax(f, *args, **kw):
    """What JAX's own gives on a CPU: for GPUs, XLA does not compile some of these cases, and others
    are wrong there (jax 0.11.2)."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return f(*jax.device_get(args), **kw)


@pytest.mark.parametrize("name", ["ragged_dot", "ragged_dot_general"])
def test_signature_is_jaxs(name):
    ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in (jgg, lax))
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


@pytest.mark.parametrize("preferred", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [[4, 0, 9], [5, 5, 6], [0, 0, 0], [9, 9, 9]])
@pytest.mark.one_in(10)
def test_ragged_dot(rng, sizes, dtype, preferred):
    lhs, rhs = oracle.random(rng, (16, 8), dtype), oracle.random(rng, (3, 8, 6), dtype)
    sizes = jnp.array(sizes, jnp.int32)
    args = lhs, rhs, sizes, lax.Precision.HIGHEST, preferred
    got, want = jgg.ragged_dot(*args), of_jax(lax.ragged_dot, *args)
    assert got.dtype == want.dtype
    oracle.assert_close(got, want)


def test_ragged_dot_gradients(rng):
    lhs, rhs = oracle.random(rng, (16, 8)), oracle.random(rng, (3, 8, 6))
    sizes = jnp.array([4, 0, 9])
    gradients = lambda f: jax.grad(lambda a, b, s: jnp.sin(f(a, b, s)).sum(), (0, 1))
    ours = gradients(jgg.ragged_dot)(lhs, rhs, sizes)
    theirs = of_jax(gradients(lax.ragged_dot), lhs, rhs, sizes)
    for got, want in zip(ours, theirs, strict=True):
        oracle.assert_close(got, want)


def test_where_jax_refuses(rng):
    """Shared weights under vmap, second order in the weights, group_offset, wrapping sizes."""
    lhs, rhs = oracle.random(rng, (3, 16, 8)), oracle.random(rng, (4, 8, 6))
    sizes = jnp.array([[4, 0, 9, 1], [1, 1, 1, 1], [0, 0, 0, 16]])
    out = jax.vmap(jgg.ragged_dot, (0, None, 0))(lhs, rhs, sizes)
    with pytest.raises(NotImplementedError):
        jax.vmap(lax.ragged_dot, (0, None, 0))(lhs, rhs, sizes)
    for got, x, s in zip(out, lhs, sizes, strict=True):
        oracle.assert_close(got, oracle.grouped_mm(x, rhs, s))
    hessian = jax.hessian(lambda w: (jgg.ragged_dot(lhs[0], w, sizes[0]) ** 2).sum())(rhs)
    assert hessian.shape == (4, 8, 6, 4, 8, 6)
    want = 2 * np.stack([oracle.f64(lhs[0, a:b]).T @ oracle.f64(lhs[0, a:b])
                         for a, b in oracle.bounds(sizes[0], 16)])  # fmt: skip
    oracle.assert_close(np.asarray(hessian)[0, :, 0, 0, :, 0], want[0])
    oracle.assert_close(np.asarray(hessian)[2, :, 3, 2, :, 3], want[2])
    local = jgg.ragged_dot(lhs[0], rhs[1:3], sizes[0], group_offset=jnp.array([1]))
    oracle.assert_close(local, oracle.grouped_mm(lhs[0], rhs[1:3], sizes[0], offset=1))
    wrapping = jnp.array([200, 200], jnp.uint8)
    x = oracle.random(rng, (500, 8))
    oracle.assert_close(
        jgg.ragged_dot(x, rhs[:2], wrapping), oracle.grouped_mm(x, rhs[:2], wrapping)
    )


# name: lhs shape, rhs shape, group_sizes shapes, dimension numbers
GENERAL = {
    "kept": ((11, 5), (3, 5, 4), [(3,)], Numbers((([1], [1]), ([], [])), [0], [0])),
    "kept, transposed rhs": ((11, 5), (4, 5, 3), [(3,)], Numbers((([1], [1]), ([], [])), [0], [2])),
    "kept, transposed lhs": ((5, 11), (3, 5, 4), [(3,)], Numbers((([0], [1]), ([], [])), [1], [0])),
    "kept, batched": (
        (2, 11, 5), (3, 2, 5, 4), [(3,), (2, 3)], Numbers((([2], [2]), ([0], [1])), [1], [0]),
    ),
    "kept, outer": (
        (2, 11, 5), (3, 5, 4), [(3,), (2, 3)], Numbers((([2], [1]), ([], [])), [1], [0]),
    ),
    "kept, inner": ((11, 2, 5), (3, 5, 4), [(3,)], Numbers((([2], [1]), ([], [])), [0], [0])),
    "kept, batched and outer": (
        (2, 3, 11, 5), (3, 2, 5, 4), [(3,), (2, 3, 3)],
        Numbers((([3], [2]), ([0], [1])), [2], [0]),
    ),
    "kept, two contracted, two columns": (
        (11, 5, 2), (3, 2, 4, 5, 6), [(3,)], Numbers((([1, 2], [3, 1]), ([], [])), [0], [0]),
    ),
    "contracted": ((11, 5), (11, 4), [(3,)], Numbers((([0], [0]), ([], [])), [0], [])),
    "contracted, last": ((5, 11), (4, 11), [(3,)], Numbers((([1], [1]), ([], [])), [1], [])),
    "contracted, batched": (
        (2, 11, 5), (2, 11, 4), [(3,), (2, 3)], Numbers((([1], [1]), ([0], [0])), [1], []),
    ),
    "contracted, outer": (
        (2, 11, 5), (2, 11, 4), [(3,), (2, 3)], Numbers((([0, 1], [0, 1]), ([], [])), [1], []),
    ),
    "contracted, outer, permuted": (
        (11, 2, 5), (2, 4, 11), [(3,), (2, 3)], Numbers((([1, 0], [0, 2]), ([], [])), [0], []),
    ),
    "contracted, inner, permuted": (
        (2, 11, 5), (11, 4, 2), [(3,)], Numbers((([1, 0], [0, 2]), ([], [])), [1], []),
    ),
    "contracted, inner": (
        (11, 2, 5), (11, 2, 4), [(3,)], Numbers((([0, 1], [0, 1]), ([], [])), [0], []),
    ),
    "batch": ((3, 5, 6), (3, 6, 4), [(3,)], Numbers((([2], [1]), ([0], [0])), [0], [])),
}  # fmt: skip
CASES = [(name, i) for name, case in GENERAL.items() for i in range(len(case[2]))]


@pytest.mark.parametrize(("name", "which"), CASES)
@pytest.mark.one_in(6)
def test_ragged_dot_general(rng, name, which):
    lhs_shape, rhs_shape, sizes_shapes, numbers = GENERAL[name]
    lhs, rhs = oracle.random(rng, lhs_shape), oracle.random(rng, rhs_shape)
    sizes = jnp.asarray(rng.integers(0, 5, sizes_shapes[which]), jnp.int32)
    args = lhs, rhs, sizes, numbers, lax.Precision.HIGHEST
    got, want = jgg.ragged_dot_general(*args), of_jax(lax.ragged_dot_general, *args)
    assert got.dtype == want.dtype
    oracle.assert_close(got, want)
    assert not np.isnan(got).any()


@pytest.mark.parametrize("name", ["kept", "kept, transposed rhs", "kept, batched"])
def test_general_gradients(rng, name):
    lhs_shape, rhs_shape, sizes_shapes, numbers = GENERAL[name]
    lhs, rhs = oracle.random(rng, lhs_shape), oracle.random(rng, rhs_shape)
    sizes = jnp.asarray(rng.integers(0, 4, sizes_shapes[-1]), jnp.int32)
    gradients = lambda f: jax.grad(lambda a, b, s: jnp.sin(f(a, b, s, numbers)).sum(), (0, 1))
    ours = gradients(jgg.ragged_dot_general)(lhs, rhs, sizes)
    theirs = of_jax(gradients(lax.ragged_dot_general), lhs, rhs, sizes)
    for got, want in zip(ours, theirs, strict=True):
        oracle.assert_close(got, want, tolerance=2e-6)


def test_contracted_mode_is_differentiable(rng):
    """JAX's own is not."""
    lhs, rhs = oracle.random(rng, (11, 5)), oracle.random(rng, (11, 4))
    sizes, numbers = jnp.array([4, 0, 6]), GENERAL["contracted"][3]
    ct = oracle.random(rng, (3, 5, 4))
    f = lambda a, b: jgg.ragged_dot_general(a, b, sizes, numbers)
    da, db = jax.vjp(f, lhs, rhs)[1](ct)
    spans = oracle.bounds(sizes, 11)
    want_da, want_db = oracle.segmented_mm_grads(lhs.T, rhs, spans, ct)
    oracle.assert_close(da, want_da.T)
    oracle.assert_close(db, want_db)


def test_bad_dimension_numbers():
    lhs, rhs, sizes = jnp.ones((11, 5)), jnp.ones((3, 5, 4)), jnp.ones((3,), jnp.int32)
    run = lambda *n, s=sizes: jgg.ragged_dot_general(lhs, rhs, s, Numbers(*n))
    with pytest.raises(TypeError, match="exactly one lhs ragged"):
        run((([1], [1]), ([], [])), [0, 1], [0])
    with pytest.raises(TypeError, match="not an axis of lhs"):
        run((([1], [1]), ([], [])), [2], [0])
    with pytest.raises(TypeError, match="one rhs group dimension"):
        run((([1], [1]), ([], [])), [0], [])
    with pytest.raises(TypeError, match="contracting axes differ"):
        run((([1], [2]), ([], [])), [0], [0])
    for numbers, message in (
        (
            ((([1], [5]), ([], [])), [0], [0]),
            r"dimension number 5 is not an axis of rhs, \(3, 5, 4\)",
        ),
        (((([-1], [1]), ([], [])), [0], [0]), "dimension number -1 is not an axis of lhs"),
        (((([1], [1]), ([], [])), [0], [7]), "dimension number 7 is not an axis of rhs"),
        (
            ((([1, 1], [1, 2]), ([], [])), [0], [0]),
            r"lhs dimension numbers are not distinct: \(1, 1",
        ),
        (((([1], [1]), ([], [])), [0], [1]), r"rhs dimension numbers are not distinct: \(1, 1"),
    ):
        with pytest.raises(TypeError, match=message):
            run(*numbers)
    with pytest.raises(TypeError, match=r"has 3 groups at axis 0, group_sizes has 4"):
        run((([1], [1]), ([], [])), [0], [0], s=jnp.ones((4,), jnp.int32))
    with pytest.raises(TypeError, match=r"expected \(g,\) or"):
        run((([1], [1]), ([], [])), [0], [0], s=jnp.ones((2, 3), jnp.int32))


NARROW = [
    ("int4", "int4"), ("bfloat16", "int4"), ("float4_e2m1fn", "float4_e2m1fn"),
    ("float8_e4m3fn", "int4"), ("int8", "uint8"), ("bool", "float32"), ("bool", "bool"),
    ("float16", "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), NARROW)
@pytest.mark.one_in(3)
def test_operands_that_jax_takes(rng, left, right):
    """Of few bits, and of two dtypes: its values, and its result's dtype."""
    lhs = jnp.asarray(rng.integers(-6, 6, (5, 4))).astype(left)
    rhs = jnp.asarray(rng.integers(-6, 6, (2, 4, 3))).astype(right)
    sizes = jnp.array([2, 1])
    for preferred in (None, "float32"):
        args = lhs, rhs, sizes, None, preferred
        got, want = jgg.ragged_dot(*args), of_jax(lax.ragged_dot, *args)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(*(v.astype("float32") for v in (got, want)))
    batch = Numbers((([1], [1]), ([0], [0])), [0], [])
    args = lhs[:2], rhs[:, :, 0], sizes, batch
    got, want = jgg.ragged_dot_general(*args), of_jax(lax.ragged_dot_general, *args)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(*(v.astype("float32") for v in (got, want)))


def test_gradient_beside_integers(rng):
    lhs = oracle.random(rng, (5, 4), "bfloat16")
    rhs = jnp.asarray(rng.integers(-6, 6, (2, 4, 3))).astype("int4")
    dx = jax.grad(lambda x: jgg.ragged_dot(x, rhs, [2, 1]).astype("float32").sum())(lhs)
    want = oracle.grouped_mm(np.ones((5, 3)), np.asarray(rhs, np.float64).swapaxes(1, 2), [2, 1])
    oracle.assert_close(dx, want)


@pytest.mark.parametrize(("batches", "outers"), [(0, 2), (2, 0), (1, 0), (0, 1)])
def test_empty_batches(batches, outers):
    """In every mode, an axis that is mapped may have no index; gradients too."""
    lhs, rhs = jnp.ones((batches, outers, 4, 3)), jnp.ones((2, batches, 3, 5))
    sizes = jnp.ones((batches, outers, 2), jnp.int32)
    kept = Numbers((([3], [2]), ([0], [1])), [2], [0])
    contracted = Numbers((([1, 2], [1, 2]), ([0], [0])), [2], [])
    batch = Numbers((([3], [3]), ([0, 1], [0, 1])), [0], [])
    for args in (
        (lhs, rhs, sizes, kept),
        (lhs, lhs, jnp.ones((batches, outers, 2), jnp.int32), contracted),
        (lhs, lhs, jnp.ones((2,), jnp.int32), batch),
    ):
        got, want = jgg.ragged_dot_general(*args), of_jax(lax.ragged_dot_general, *args)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert not np.asarray(got).any()
        f = lambda a, b, rest=args[2:]: jgg.ragged_dot_general(a, b, *rest).sum()
        grads = jax.grad(f, (0, 1))(*args[:2])
        assert [g.shape for g in grads] == [a.shape for a in args[:2]]
