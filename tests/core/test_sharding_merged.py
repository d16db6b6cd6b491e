"""Explicit sharding of axes that an operation makes one: batches, rows, contracted axes. Values and
gradients are those of operands that are not sharded, which others compare with float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives, mesh_of, needs_two_devices, put

import jax_groupgemm as jgg
from jax_groupgemm._core import partition

pytestmark = needs_two_devices

Numbers = lax.RaggedDotDimensionNumbers
SIZES = np.array([3, 0, 5], np.int32)
# lhs, rhs, the axes of group_sizes before (g,), dimension numbers
GENERAL = {
    "batch": ((2, 12, 4), (2, 4, 8), (2,), Numbers((([2], [1]), ([0], [0])), [0], [])),
    "kept": ((2, 12, 4), (3, 2, 4, 8), (2,), Numbers((([2], [2]), ([0], [1])), [1], [0])),
    "kept, outer": ((2, 4, 12, 4), (3, 2, 4, 8), (2, 4),
                    Numbers((([3], [2]), ([0], [1])), [2], [0])),
    "kept, inner": ((2, 12, 2, 4), (3, 2, 4, 8), (2,),
                    Numbers((([3], [2]), ([0], [1])), [1], [0])),
    "kept, two of each": ((2, 2, 12, 4, 2), (3, 2, 2, 4, 2, 8), (2, 2),
                          Numbers((([3, 4], [3, 4]), ([0, 1], [1, 2])), [2], [0])),
    "contracted": ((2, 4, 12), (2, 12, 8), (2,), Numbers((([2], [1]), ([0], [0])), [2], [])),
    "contracted, outer": ((2, 4, 2, 12), (2, 2, 12, 8), (2, 2),
                          Numbers((([2, 3], [1, 2]), ([0], [0])), [3], [])),
}  # fmt: skip


def mesh_of_two():
    return mesh_of((2, DEVICES // 2), ("i", "j"), AxisType.Explicit)


def assert_as_unsharded(f, args, specs):
    """Of the first two operands also the gradients, which are sharded as they are."""
    mesh = mesh_of_two()
    given = [put(mesh, a, *spec(letters)) for a, letters in zip(args, specs, strict=True)]
    step = lambda *args: (f(*args), jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1))(*args))
    want, want_grads = jax.jit(step)(*args)
    with jax.set_mesh(mesh):
        out, grads = jax.jit(step)(*given)
    oracle.assert_close(out, want, tolerance=2e-6)
    for got, expected, of in zip(grads, want_grads, given, strict=False):
        oracle.assert_close(got, expected, tolerance=4e-6)
        assert got.sharding.is_equivalent_to(of.sharding, of.ndim)
    return out


def spec(letters: str) -> list[str | None]:
    return [None if letter == "." else letter for letter in letters]


def is_sharded_as(a, letters: str) -> bool:
    return a.sharding.is_equivalent_to(NamedSharding(mesh_of_two(), P(*spec(letters))), a.ndim)


@pytest.mark.parametrize("sizes_spec", [None, "", "i"], ids=["(g,)", "replicated", "sharded"])
@pytest.mark.parametrize(
    ("name", "lhs", "rhs", "out"),
    [
        ("batch", "i", "", "i"),
        ("batch", "", "i.j", "i.j"),
        ("kept", "i", ".i", "i"),
        ("kept", "i", "", "i"),
        ("kept", "", ".i", "i"),
        ("kept", "", "", ""),
        ("kept", ".i", "...j", ".ij"),
        ("contracted", "i", "i", ".i"),
        ("contracted", "i", "", ".i"),
        ("contracted", "", "i", ".i"),
        ("contracted", ".i", "", "..i"),
        ("contracted", "..i", ".ij", "...j"),
    ],
)
@pytest.mark.one_in(10)
def test_ragged_dot_general_batch(rng, name, lhs, rhs, out, sizes_spec):
    """Sharded in one operand or both, whatever the sizes are sharded as."""
    lhs_shape, rhs_shape, _, numbers = GENERAL[name]
    sizes = SIZES if sizes_spec is None else np.stack([SIZES, SIZES[::-1]])
    f = lambda lhs, rhs, sizes: jgg.ragged_dot_general(lhs, rhs, sizes, numbers)
    args = oracle.random(rng, lhs_shape), oracle.random(rng, rhs_shape), jnp.asarray(sizes)
    got = assert_as_unsharded(f, args, [lhs, rhs, sizes_spec or ""])
    assert is_sharded_as(got, out)


@pytest.mark.parametrize(
    ("name", "lhs", "rhs"),
    [
        ("kept, outer", "ij", ""),
        ("kept, outer", "i", ".i.j"),
        ("kept, outer", ".i", ".j"),
        ("kept, outer", "..j", ".i"),
        ("kept, inner", "i.j", ""),
        ("kept, two of each", "ij", ""),
        ("kept, two of each", ".j..i", "..j"),
        ("kept, two of each", "...ij", "...i"),
        ("contracted, outer", "i.j", "ij"),
        ("contracted, outer", ".i", "..j"),
    ],
)
@pytest.mark.one_in(6)
def test_ragged_dot_general_merged(rng, name, lhs, rhs):
    lhs_shape, rhs_shape, prefix, numbers = GENERAL[name]
    sizes = rng.integers(0, 6, (*prefix, 3)).astype(np.int32)
    args = oracle.random(rng, lhs_shape), oracle.random(rng, rhs_shape), jnp.asarray(sizes)
    f = lambda lhs, rhs, sizes: jgg.ragged_dot_general(lhs, rhs, sizes, numbers)
    assert_as_unsharded(f, args, [lhs, rhs, "i"])


def test_ragged_dot_general_offset(rng):
    """Two of three groups, of a sharded batch with an outer axis."""
    lhs_shape, (_, *rhs_shape), prefix, numbers = GENERAL["kept, outer"]
    sizes = rng.integers(0, 6, (*prefix, 3)).astype(np.int32)
    args = oracle.random(rng, lhs_shape), oracle.random(rng, (2, *rhs_shape)), jnp.asarray(sizes)
    f = lambda lhs, rhs, sizes: jgg.ragged_dot_general(
        lhs, rhs, sizes, numbers, group_offset=jnp.int32(1)
    )
    assert_as_unsharded(f, args, ["ij", "", ""])


@pytest.mark.parametrize("name", ["kept", "kept, outer", "contracted"])
@pytest.mark.one_in(3)
def test_a_batch_costs_nothing(rng, name):
    lhs_shape, rhs_shape, _, numbers = GENERAL[name]
    mesh = mesh_of_two()
    f = lambda lhs, rhs, sizes: jgg.ragged_dot_general(lhs, rhs, sizes, numbers)
    lhs, rhs = oracle.random(rng, lhs_shape), oracle.random(rng, rhs_shape)
    args = put(mesh, lhs, "i"), put(mesh, rhs), put(mesh, jnp.asarray(SIZES))
    with jax.set_mesh(mesh):
        assert collectives(jax.jit(f), *args) == []
        eager = f(*args)
    oracle.assert_close(eager, f(lhs, rhs, SIZES))


@pytest.mark.parametrize(
    ("name", "lhs", "rhs", "why"),
    [
        ("kept", "i", ".j", "rhs shards it over ('j',)"),
        ("batch", "i", "j", "rhs shards it over ('j',)"),
        ("kept", "i", "..i", "that mesh axis already shards another axis of rhs"),
        ("contracted", "..i", "i", "that mesh axis already shards another axis of lhs"),
    ],
)
def test_contradictory_batches(rng, name, lhs, rhs, why):
    lhs_shape, rhs_shape, _, numbers = GENERAL[name]
    mesh = mesh_of_two()
    lhs = put(mesh, oracle.random(rng, lhs_shape), *spec(lhs))
    rhs = put(mesh, oracle.random(rng, rhs_shape), *spec(rhs))
    with jax.set_mesh(mesh):
        oracle.assert_raises(
            lambda: jgg.ragged_dot_general(lhs, rhs, SIZES, numbers), ValueError,
            f"jgg.ragged_dot_general: the batch of lhs {jax.typeof(lhs)} and rhs {jax.typeof(rhs)} "
            f"is sharded over ('i',), but {why}. Use jax.sharding.reshard first.",
        )  # fmt: skip


def test_out_sharding_of_plain_batches(rng):
    """Without it JAX does not say where a sum over a mesh axis goes."""
    lhs_shape, rhs_shape, _, numbers = GENERAL["batch"]
    mesh = mesh_of_two()
    lhs, rhs = oracle.random(rng, lhs_shape), oracle.random(rng, rhs_shape)
    args = put(mesh, lhs, None, None, "i"), put(mesh, rhs, None, "i"), SIZES
    with jax.set_mesh(mesh):
        out = jgg.ragged_dot_general(*args, numbers, out_sharding=P("j"))
    assert is_sharded_as(out, "j")
    oracle.assert_close(out, oracle.f64(lhs) @ oracle.f64(rhs))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ["batch", "kept", "contracted"])
def test_out_sharding_without_a_mesh_in_context(rng, name, jit):
    """As JAX's own: operands bring their mesh, and those of none stay on one device."""
    lhs_shape, rhs_shape, _, numbers = GENERAL[name]
    mesh = mesh_of_two()
    lhs, rhs = oracle.random(rng, lhs_shape), oracle.random(rng, rhs_shape)
    sharding = NamedSharding(mesh, P(None, None, "j"))
    results = []
    # XLA's ragged_dot_rewriter for GPUs makes an invalid product of JAX's own (jax 0.11.2).
    theirs = [lax] if jax.default_backend() == "cpu" else []
    for module in (jgg, *theirs):
        f = lambda *a, module=module: module.ragged_dot_general(
            *a, SIZES, numbers, out_sharding=sharding
        )
        run = jax.jit(f) if jit else f
        alone, placed = run(lhs, rhs), run(put(mesh, lhs), put(mesh, rhs))
        results.append([alone.sharding, jax.typeof(alone), placed.sharding, jax.typeof(placed)])
        oracle.assert_close(placed, alone)
    assert all(found == results[0] for found in results)
    assert is_sharded_as(placed, "..j")
    assert len(alone.devices()) == 1


def test_gradient_of_a_result_without_a_mesh(rng):
    lhs, rhs = oracle.random(rng, (8, 4)), oracle.random(rng, (3, 4, 8))
    sharding = NamedSharding(mesh_of_two(), P("i"))
    f = lambda **given: lambda a: jgg.ragged_dot(a, rhs, SIZES, **given).sum()
    got = jax.grad(f(out_sharding=sharding))(lhs)
    np.testing.assert_array_equal(got, jax.grad(f())(lhs))
    batched = jax.vmap(lambda a: jgg.ragged_dot(a, rhs, SIZES, out_sharding=sharding))
    assert batched(jnp.stack([lhs, lhs])).shape == (2, 8, 8)


def test_an_out_sharding_that_fits_no_result(rng):
    lhs, rhs = oracle.random(rng, (9, 4)), oracle.random(rng, (3, 4, 8))
    sharding = NamedSharding(mesh_of_two(), P("i"))
    with pytest.raises(ValueError, match=r"jgg.ragged_dot: out_sharding=.*does not fit the result"):
        jgg.ragged_dot(lhs, rhs, SIZES, out_sharding=sharding)


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "a", "b"),
    [
        ((4, 2, 8), (4, 8, 16), ".i", ""),
        ((4, 40, 8), (4, 8, 16), ".i", ""),
        ((4, 2, 8), (4, 8, 16), ".i", "i"),  # M is gathered: the mesh axis is free
        ((4, 40, 8), (4, 8, 16), ".ij", ".j"),
        ((4, 40, 8), (4, 8, 16), "ij", "..j"),
        ((1, 40, 8), (4, 8, 16), ".i", "..j"),
        ((2, 2, 1, 8), (4, 8, 16), ".i", "..j"),
        ((2, 2, 40, 8), (4, 8, 16), ".i", ""),
        ((2, 2, 2, 8), (4, 8, 16), "i..j", ".j"),
        ((4, 2, 8), (2, 2, 8, 16), "", ".i.j"),
        ((4, 40, 8), (2, 2, 8, 16), "", "ij"),
        ((4, 40, 8), (2, 2, 8, 16), "..j", ".ij"),
    ],
)
@pytest.mark.one_in(10)
def test_gather_mm(rng, a_shape, b_shape, a, b):
    index = jnp.array([[0, 3, 9, 2], [1, 1, -1, 0]])
    f = lambda a, b: jgg.gather_mm(a, b, index, index[::-1])
    args = oracle.random(rng, a_shape), oracle.random(rng, b_shape)
    out = assert_as_unsharded(f, args, [a, b])
    assert is_sharded_as(out, "..." + ("j" if b.endswith("..j") or b == ".i.j" else ""))


def test_gather_qmm(rng):
    q = oracle.random_quantized(rng, (2, 2, 16, 64), "affine", 4, 32)
    x, index = oracle.random(rng, (4, 2, 64)), jnp.array([0, 3, 9, 2])
    f = lambda x, q: jgg.gather_qmm(x, q, index, index[::-1])
    mesh = mesh_of_two()
    with jax.set_mesh(mesh):
        out = jax.jit(f)(put(mesh, x, None, "i"), put(mesh, q, None, "i", "j"))
    oracle.assert_close(out, f(x, q), tolerance=2e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_vmap_of_vmap(rng, shared):
    """Over an axis that is sharded, and within over one that is, or is not."""
    mesh = mesh_of_two()
    x, w = oracle.random(rng, (2, 4, 12, 6)), oracle.random(rng, (2, 3, 6, 8))
    sizes = rng.integers(0, 6, (2, 4, 3)).astype(np.int32)
    f = lambda x, w, s: (
        jgg.grouped_mm(x, w, s),
        jax.grad(lambda w: jnp.sin(jgg.grouped_mm(x, w, s)).sum())(w),
    )
    axes = (0, None, None if shared else 0)
    f = jax.vmap(jax.vmap(f, axes), (0, 0, 0))
    args = x, w, jnp.asarray(sizes[:, 0] if shared else sizes)
    want = f(*args)
    for inner in ("j", None):
        sizes_spec = "i", None if shared else inner
        with jax.set_mesh(mesh):
            got = jax.jit(f)(
                put(mesh, x, "i", inner), put(mesh, w, "i"), put(mesh, args[2], *sizes_spec)
            )
        for g, expected in zip(got, want, strict=True):
            oracle.assert_close(g, expected, tolerance=2e-6)


@pytest.mark.parametrize(
    ("shape", "counts", "given", "kept", "merged"),
    [
        ((4, 6, 8), (2, 1), "i.j", "i.j", "ij"),
        ((4, 6, 8), (2, 1), ".ij", "..j", ".j"),
        ((4, 6, 8), (2, 1), "ij", "i", "i"),
        ((1, 6, 8), (2, 1), ".i", ".i", "i"),
        ((2, 6, 8), (2, 1), "ij", "ij", ("ij",)),
        ((4, 6, 8), (1, 0, 2), "i.j", "i", "i"),
    ],
)
def test_merge_and_split(rng, shape, counts, given, kept, merged):
    """Every device has consecutive indices of its own, and nothing of the reshape moves."""
    if DEVICES < 4:
        pytest.skip("needs two mesh axes of two")
    mesh = mesh_of_two()
    a = oracle.random(rng, shape)
    ends = np.cumsum(counts)
    shapes = [shape[end - count : end] for end, count in zip(ends, counts, strict=True)]
    with jax.set_mesh(mesh):
        one = jax.jit(lambda a: partition.merge(a, counts))(put(mesh, a, *spec(given)))
        back = jax.jit(lambda a: partition.split(a, shapes))
        assert collectives(back, one) == []
        again = back(one)
    np.testing.assert_array_equal(one, np.reshape(a, [np.prod(s, dtype=int) for s in shapes]))
    np.testing.assert_array_equal(again, a)
    wanted = P(*(letter if isinstance(merged, str) else tuple(letter) for letter in merged))
    wanted = P(*(None if entry == "." else entry for entry in wanted))
    assert one.sharding.is_equivalent_to(NamedSharding(mesh, wanted), one.ndim)
    assert is_sharded_as(again, kept)
