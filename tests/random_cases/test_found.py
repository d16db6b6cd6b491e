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
from jax_groupgemm._grouped import activations


def put(a, *spec):
    mesh = mesh_of((2, DEVICES // 2), ("a", "b"), AxisType.Explicit)
    return jax.device_put(a, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize(
    ("dtype", "out"),
    [("int16", "bfloat16"), ("int32", "bfloat16"), ("int32", "float32"), ("int64", "float32"),
     ("int64", "complex64"), ("complex128", "complex64")],
)  # fmt: skip
def test_a_result_narrower_than_operands(rng, dtype, out):
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


@needs_two_devices
@pytest.mark.parametrize("what", ["route", "dequantize", "several axes at once"])
@pytest.mark.one_in(3)
def test_a_mapped_axis_without_a_mesh_in_context(rng, what):
    """Only operands have one, and within a vmap JAX looks for it in the context."""
    if what == "route":
        index = rng.integers(0, 5, (2, 3, 2)).astype(np.int32)
        f, given = lambda i: jgg.route(i, 4), (index,)
    elif what == "dequantize":
        w = jnp.asarray(rng.standard_normal((2, 128, 64)), "bfloat16")
        q = jgg.prepack(jgg.quantize(w, group_size=64, bits=4))
        assert q.layout != "linear"
        given, tree = jax.tree.flatten(q)
        f = lambda *leaves: jgg.dequantize(tree.unflatten(leaves), "float32")
    else:
        numbers = jax.lax.RaggedDotDimensionNumbers((([2, 3], [2, 3]), ([0, 1], [0, 1])), [2], [])
        shape = (2, 2, 3, 4, 2)
        sizes, lhs, rhs = jnp.array([1, 3]), *(rng.standard_normal((2, *shape)) for _ in range(2))
        f = lambda a, b: jgg.ragged_dot_general(a, b, sizes, numbers)
        given = [a.astype(np.float32) for a in (lhs, rhs)]
    want = jax.device_get(jax.jit(jax.vmap(f))(*map(jnp.asarray, given)))
    for run in (jax.jit(jax.vmap(f)), jax.vmap(f)):  # the latter outside of any program
        got = jax.device_get(run(*(put(a, "a") for a in given)))
        jax.tree.map(np.testing.assert_array_equal, got, want)


@needs_two_devices
def test_an_offset_of_a_mapped_axis(rng):
    """The sizes are those of all."""
    x, w, sizes = oracle.random(rng, (9, 4)), oracle.random(rng, (2, 4, 5)), jnp.array([3, 2, 4])
    scale, offsets = oracle.random(rng, (9,)), np.array([-1, 1], np.int32)
    f = jax.jit(jax.vmap(lambda i: jgg.grouped_mm(x, w, sizes, group_offset=i, row_scale=scale)))
    oracle.assert_close(jax.device_get(f(put(offsets, "a"))), f(jnp.asarray(offsets)))


@needs_two_devices
def test_tokens_that_a_mapped_routing_shares(rng):
    x, up, down = (oracle.random(rng, s) for s in ((8, 4), (2, 4, 12), (2, 6, 4)))
    index, weight = rng.integers(0, 3, (2, 8, 2)).astype(np.int32), oracle.random(rng, (8, 2))
    f = jax.jit(jax.vmap(lambda i: jgg.moe_mlp(x, up, down, i, weight)))
    oracle.assert_close(jax.device_get(f(put(index, "a"))), f(jnp.asarray(index)))


@needs_two_devices
@pytest.mark.parametrize("quantized", [False, True])
def test_a_batch_within_a_mapped_axis(rng, quantized):
    """Both are sharded: rows and weights of the inner one cannot both be."""
    x, w = oracle.random(rng, (2, 2, 5, 32)), oracle.random(rng, (2, 3, 32, 16))
    sizes = jnp.array([2, 0, 3])
    if quantized:
        w = jgg.quantize(w.swapaxes(2, 3), group_size=32)
    op = jgg.grouped_qmm if quantized else jgg.grouped_mm
    inner = jax.vmap(lambda x, w: op(x, w, sizes))
    run = jax.jit(jax.vmap(inner, in_axes=(0, None)))
    want = run(x, w)
    got = run(put(x, "a", "b"), jax.tree.map(lambda a: put(a, "b"), w))
    oracle.assert_close(jax.device_get(got), want)


@needs_two_devices
def test_contracted_axes_that_are_sharded_alike(rng):
    """A plain batch is JAX's product: it asks where the result goes."""
    lhs, rhs = oracle.random(rng, (2, 3, 4)), oracle.random(rng, (2, 4, 5))
    numbers = jax.lax.RaggedDotDimensionNumbers((([2], [1]), ([0], [0])), [0], [])
    f = jax.jit(lambda a, b: jgg.ragged_dot_general(a, b, jnp.array([1, 1]), numbers))
    out = f(put(lhs, "b", None, "a"), put(rhs, "b", "a"))
    oracle.assert_close(out, f(lhs, rhs))
    assert jax.typeof(out).sharding.spec == P("b", None, None)


@needs_two_devices
def test_gradient_of_an_exact_gelu_on_several_devices(rng):
    x, up, down = (oracle.random(rng, s) for s in ((8, 4), (2, 4, 6), (2, 6, 4)))
    index, weight = jnp.asarray(rng.integers(0, 2, (8, 2))), oracle.random(rng, (8, 2))
    f = lambda x, index, weight: jgg.moe_mlp(
        x, up, down, index, weight, activation="gelu_erf"
    ).sum()
    gradient = jax.jit(jax.grad(f))
    got = gradient(*(put(a, "a") for a in (x, index, weight)))
    oracle.assert_close(got, gradient(x, index, weight), tolerance=2e-6)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_derivatives_of_an_exact_gelu(order):
    """Those of JAX's."""
    mine = lambda y: activations.activate(y, "gelu_erf")
    theirs = lambda y: jax.nn.gelu(y, approximate=False)
    for _ in range(order):
        mine, theirs = jax.grad(mine), jax.grad(theirs)
    y = jnp.linspace(-9, 9, 181)
    np.testing.assert_allclose(jax.vmap(mine)(y), jax.vmap(theirs)(y), rtol=2e-6, atol=1e-7)


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
