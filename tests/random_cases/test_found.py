"""What random programs found, each as small as it gets."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, mesh_of, needs_two_devices

import jax_groupgemm as jgg


def put(a, *spec):
    mesh = mesh_of((2, DEVICES // 2), ("a", "b"), AxisType.Explicit)
    return jax.device_put(a, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("out", ["bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_a_result_narrower_than_integers(rng, dtype, out):
    """JAX's own products have none. Sums are as wide as operands."""
    with jax.enable_x64(True):
        values = lambda *shape: jnp.asarray(rng.integers(-9, 9, shape), dtype)
        a, b = values(8, 70), values(2, 70, 3)
        x, w = np.asarray(a), np.asarray(b)
        got = jgg.grouped_mm(a, b, jnp.array([3, 5]), preferred_element_type=out)
        numbers = jax.lax.RaggedDotDimensionNumbers((([2], [1]), ([0], [0])), [0], [])
        batch = jgg.ragged_dot_general(
            a[None], b[:1], jnp.array([1]), numbers, preferred_element_type=out
        )
    assert got.dtype == batch.dtype == out
    want = np.concatenate([x[:3] @ w[0], x[3:] @ w[1]])
    np.testing.assert_array_equal(got, want.astype(jnp.dtype(out)))
    np.testing.assert_array_equal(batch[0], (x @ w[0]).astype(jnp.dtype(out)))


@needs_two_devices
@pytest.mark.parametrize("quantized", [False, True])
def test_gradient_of_sharded_columns(rng, quantized):
    """Rows are put back in order, which JAX does not differentiate where columns are sharded."""
    a, w = oracle.random(rng, (4, 2, 32)), oracle.random(rng, (3, 8, 32))
    rhs = jnp.array([2, 0, 1, 0])
    w = jgg.quantize(w, group_size=32) if quantized else w.swapaxes(1, 2)
    op = jgg.gather_qmm if quantized else jgg.gather_mm
    f = lambda a, w: op(a, w, None, rhs)
    gradient = jax.jit(lambda a, w: jax.grad(lambda a: jnp.sin(f(a, w)).sum())(a))
    want, wanted = f(a, w), gradient(a, w)
    cut = ("b", None) if quantized else (None, "b")
    given = put(a), jax.tree.map(lambda leaf: put(leaf, None, *cut), w)
    oracle.assert_close(jax.jit(f)(*given), want)
    oracle.assert_close(gradient(*given), wanted, tolerance=2e-6)


@needs_two_devices
@pytest.mark.parametrize("promised", [False, True])
def test_indices_of_a_mapped_axis(rng, promised):
    a, b = oracle.random(rng, (3, 2, 5)), oracle.random(rng, (4, 5, 6))
    rhs = np.sort(rng.integers(-1, 5, (2, 3)), axis=1).astype(np.int32)
    f = lambda i: jgg.gather_mm(a, b, None, i, sorted_indices=promised)
    out = jax.device_get(jax.jit(jax.vmap(f))(put(rhs, "a")))
    for got, i in zip(out, rhs, strict=True):
        oracle.assert_close(got, oracle.gather_mm(a, b, None, i))


@needs_two_devices
@pytest.mark.weekly
def test_wgrad_of_a_mapped_axis(rng):
    sizes = jnp.array([[3, 5], [8, 0]])
    x, dy = oracle.random(rng, (8, 16)), oracle.random(rng, (8, 32))

    def f(sizes):
        q = [jgg.nvfp4_quantize(a, axis=0, group_sizes=sizes) for a in (x, dy)]
        return jgg.nvfp4_grouped_wgrad(*q, sizes)

    want = np.stack([f(s) for s in sizes])
    oracle.assert_close(jax.device_get(jax.jit(jax.vmap(f))(put(sizes, "a"))), want)


@needs_two_devices
@pytest.mark.parametrize("groups", [2, 3])
def test_quantize_where_k_is_sharded(rng, groups):
    """Groups are not cut: three of them are gathered from two devices."""
    w = oracle.random(rng, (8, 64 * groups))
    want = jgg.quantize(w)
    got = jax.jit(jgg.quantize)(put(w, None, "a"))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert jax.typeof(got.weight).sharding.spec[-1] == ("a" if groups == 2 else None)


@needs_two_devices
def test_an_offset_that_is_a_number(rng):
    """Of experts, where tokens are sharded."""
    x, up, down = (oracle.random(rng, s) for s in ((8, 4), (2, 4, 12), (2, 6, 4)))
    index, weight = jnp.asarray(rng.integers(0, 4, (8, 2))), oracle.random(rng, (8, 2))
    f = lambda x, index, weight: jgg.moe_mlp(x, up, down, index, weight, expert_offset=1)
    given = (put(a, "a") for a in (x, index, weight))
    with jax.set_mesh(mesh_of((2, DEVICES // 2), ("a", "b"), AxisType.Explicit)):
        out = f(*given)
    oracle.assert_close(out, f(x, index, weight))


@needs_two_devices
@pytest.mark.weekly
def test_gradient_of_a_recipe_outside_of_a_mesh(rng):
    """Operands are on a mesh, and none is set."""
    x, w, sizes = oracle.random(rng, (8, 16)), oracle.random(rng, (2, 16, 16)), jnp.array([3, 5])
    gradient = jax.jit(jax.grad(lambda w, x: jgg.nvfp4_grouped_linear(x, w, sizes).sum()))
    oracle.assert_close(gradient(put(w), put(x)), gradient(w, x))


@pytest.mark.parametrize("swapped", [False, True])
def test_gradient_of_a_real_operand(rng, swapped):
    """With a complex one: the real part, without a warning of JAX."""
    real = oracle.random(rng, (4, 3))
    other = jnp.asarray(rng.standard_normal((4, 3)) + 1j * rng.standard_normal((4, 3)), "complex64")
    ct = jnp.asarray(rng.standard_normal((3, 3)) + 1j * rng.standard_normal((3, 3)), "complex64")
    first, second = (other, real) if swapped else (real, other)
    f = lambda a, b: jgg.segmented_mm(a, b, jnp.array([0, 4]), transpose_a=True)
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("error")
        grads = jax.vjp(f, first, second)[1](ct)
    ct = np.asarray(ct).T if swapped else np.asarray(ct)
    want = (np.asarray(other) @ ct.T).real
    got = grads[swapped]
    assert got.dtype == real.dtype
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
