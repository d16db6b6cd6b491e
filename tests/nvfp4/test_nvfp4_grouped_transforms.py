"""Products of two NVFP4 operands under vmap, sharding and export, and their cost."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from nvfp4_grouped_problems import (
    FEW,
    ODD,
    mm_case,
    mm_oracle,
    positive,
    random,
    wgrad_case,
    wgrad_oracle,
    wgrad_problem,
)

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device

stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
MM_AXES = [(0, None, None, None), (None, 0, 0, None), (0, 0, 0, 0)]
VMAP = [
    *((mm_case, axes) for axes in MM_AXES), (wgrad_case, (0, 0, 0, None)),
    (wgrad_case, (None, None, None, 0)),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(VMAP)))
@pytest.mark.one_in(4)
def test_vmap_of_value_and_grad(rng, case):
    make, axes = VMAP[case]
    f, examples = make(rng)
    grad = jax.value_and_grad(lambda *a: jnp.sin(f(*a)).sum(), 3)
    args = [stack(*both) if d == 0 else both[0] for both, d in zip(examples, axes, strict=True)]
    got = jax.jit(jax.vmap(grad, axes))(*args)
    one = jax.jit(grad)
    want = stack(
        *(one(*(both[i] if d == 0 else both[0] for both, d in zip(examples, axes, strict=True)))
          for i in range(2))
    )  # fmt: skip
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.assert_close(g, w, tolerance=1e-5)


@pytest.mark.gpu
def test_with_the_quantizer_on_a_gpu(rng):
    """In a size that matters there, values and gradients of one example are numpy's; those of a
    batch, and of a scan over checkpointed steps, are those of one after the other."""
    t, g, n, k = 300, 3, 192, 128
    x, dy, w = (oracle.random(rng, (2, *shape)) for shape in ((t, k), (t, n), (g, n, k)))
    old, ct_out, ct_dw = (oracle.random(rng, s) for s in ((2, g, n, k), (t, n), (g, n, k)))
    sizes, alpha = jnp.array([[127, 1, 160], [0, 200, 17]]), positive(rng, 2, g)
    q = jgg.nvfp4_quantize

    def step(x, dy, w, sizes, alpha, old):
        by_row, along_t = (
            functools.partial(q, group_sizes=sizes),
            functools.partial(q, axis=0, group_sizes=sizes),
        )
        operands = by_row(x), q(w), along_t(x), along_t(dy)

        def products(alpha, old):
            rows, weight, columns, dy_columns = operands
            out = jgg.nvfp4_grouped_mm(
                rows, weight, sizes, alpha=alpha, preferred_element_type="float32"
            )
            dw = jgg.nvfp4_grouped_wgrad(columns, dy_columns, sizes, alpha=alpha, existing_out=old)
            return out, dw

        values, vjp = jax.vjp(products, alpha, old)
        return operands, values, vjp((ct_out, ct_dw))

    args = x, dy, w, sizes, alpha, old
    one = jax.jit(step)
    alone = [one(*(a[i] for a in args)) for i in range(2)]
    for i, (operands, (out, dw), (dalpha, dold)) in enumerate(alone):
        rows, weight, columns, dy_columns = operands
        want_out = mm_oracle(rows, weight, sizes[i], alpha[i])
        product = wgrad_oracle(columns, dy_columns, sizes[i])
        oracle.assert_close(out, want_out, tolerance=1e-5)
        factors = oracle.f64(alpha[i])
        added = product * factors[:, None, None] + oracle.f64(old[i])
        oracle.assert_close(dw, added, tolerance=1e-5)
        terms = want_out * oracle.f64(ct_out)
        sums = [terms[a:b].sum() for a, b in oracle.bounds(sizes[i], t)] / factors
        sums += (product * oracle.f64(ct_dw)).sum((1, 2))
        oracle.assert_close(dalpha, sums, tolerance=1e-4)
        np.testing.assert_array_equal(dold, ct_dw)
    want = stack(*alone)
    scanned = lambda *a: jax.lax.scan(lambda c, a: (c, jax.checkpoint(step)(*a)), None, a)[1]
    for got in (jax.jit(jax.vmap(step))(*args), jax.jit(scanned)(*args)):
        for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(jax.tree.leaves(got[1:]), jax.tree.leaves(want[1:]), strict=True):
            oracle.assert_close(a, b, tolerance=1e-4 if b.ndim == 2 else 3e-5)


@functools.cache
def mesh_of(kind) -> jax.sharding.Mesh:
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    return jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])


def put(kind, tree, *spec):
    """Leaves on the mesh, sharded along their first axes as ``spec`` says."""
    mesh = mesh_of(kind)
    return jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P(*spec[: a.ndim]))), tree)


def collectives(compiled) -> list[str]:
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return sorted(re.findall(rf" ({names})(?:-start)?\(", compiled.as_text()))


# Specs of x and w and of the result; how many all-reduces.
SHARDED = {
    "T": (("d",), (), P("d"), 0),
    "N": ((), (None, "d"), P(None, "d"), 0),
    "K": ((None, "d"), (None, None, "d"), P(), 1),
    "G": ((), ("d",), P(), 1),
}


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.one_in(3)
def test_mm_sharded(rng, kind, name):
    x_spec, w_spec, out_spec, all_reduces = SHARDED[name]
    x, w = random(rng, 20, 64, scale=positive(rng)), random(rng, 4, 16, 64, scale=positive(rng, 4))
    sizes, alpha = jnp.array([9, 0, 3, 6]), positive(rng, 4)
    f = jax.jit(
        lambda x, w, sizes, alpha: jgg.nvfp4_grouped_mm(
            x, w, sizes, alpha=alpha, preferred_element_type="float32"
        )
    )
    args = put(kind, x, *x_spec), put(kind, w, *w_spec), put(kind, sizes), put(kind, alpha)
    with jax.set_mesh(mesh_of(kind)):
        compiled = f.lower(*args).compile()
        out = f(*args)
    assert collectives(compiled) == ["all-reduce"] * all_reduces
    oracle.assert_close(out, mm_oracle(x, w, sizes, alpha))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh_of(kind), out_spec), 2)


@pytest.mark.parametrize("name", ["N", "K"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.one_in(3)
def test_wgrad_sharded(rng, kind, name):
    """Columns of either operand: no communication."""
    x, dy, old = wgrad_problem(rng)
    place = lambda q, *spec: dataclasses.replace(
        put(kind, q, *spec), positions=put(kind, q.positions)
    )
    spec = (None, "d") if name == "N" else (None, None, "d")
    args = (
        place(x, *("d",) * (name == "K")), place(dy, *("d",) * (name == "N")),
        put(kind, jnp.array(ODD)), put(kind, old, *spec),
    )  # fmt: skip
    f = jax.jit(lambda x, dy, s, old: jgg.nvfp4_grouped_wgrad(x, dy, s, existing_out=old))
    with jax.set_mesh(mesh_of(kind)):
        assert collectives(f.lower(*args).compile()) == []
        out = f(*args)
    oracle.assert_close(out, wgrad_oracle(x, dy, ODD) + oracle.f64(old))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh_of(kind), P(*spec)), 3)


@pytest.mark.parametrize("n", [1, 16])
def test_groups_of_existing_out_divided(n):
    """With one column the condition of a group has existing_out's shape."""
    zeros = lambda columns: jgg.nvfp4_quantize(
        jnp.zeros((20, columns)), axis=0, group_sizes=jnp.array([9, 0, 3, 6])
    )
    x, dy, old = zeros(1), zeros(n), jnp.arange(4.0 * n).reshape(4, n, 1)
    kind = AxisType.Explicit
    place = lambda q: jax.tree.map(functools.partial(put, kind), q)
    args = place(x), place(dy), put(kind, jnp.array([9, 0, 3, 6])), put(kind, old, "d")
    with jax.set_mesh(mesh_of(kind)):
        f = jax.jit(lambda x, dy, s, old: jgg.nvfp4_grouped_wgrad(x, dy, s, existing_out=old))
        out = f(*args)
    np.testing.assert_array_equal(out, old)


def test_shard_map(rng):
    """Each device has rows and sizes of its own; with check_vma."""
    _, (x, dy, sizes, _) = wgrad_case(rng)
    f, (rows, w, _, _) = mm_case(rng)
    row = stack(*rows)

    def both(row, w, x, dy, sizes):
        mine = lambda q: jax.tree.map(lambda a: a[0], q)
        out = f(mine(row), w, sizes[0], None)
        return out, jax.lax.psum(jgg.nvfp4_grouped_wgrad(mine(x), mine(dy), sizes[0]), "d")

    mapped = jax.shard_map(
        both, mesh=mesh_of(AxisType.Auto), in_specs=(P("d"), P(), P("d"), P("d"), P("d")),
        out_specs=(P("d"), P()), check_vma=True,
    )  # fmt: skip
    out, dw = jax.jit(mapped)(row, w[0], stack(*x), stack(*dy), jnp.stack(sizes))
    wants = [mm_oracle(rows[i], w[0], sizes[i]) for i in range(2)]
    oracle.assert_close(out, np.concatenate(wants))
    oracle.assert_close(dw, sum(wgrad_oracle(x[i], dy[i], sizes[i]) for i in range(2)))


def test_export(rng):
    x, dy, old = wgrad_problem(rng)
    row, w, sizes = random(rng, 20, 32), random(rng, 5, 8, 32), jnp.array(ODD)

    def f(row, w, x, dy, old, sizes):
        wgrad = jgg.nvfp4_grouped_wgrad(x, dy, sizes, existing_out=old)
        return jgg.nvfp4_grouped_mm(row, w, sizes), wgrad

    exported = jax.export.export(
        jax.jit(f), platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(row, w, x, dy, old, sizes)
    out, dw = jax.export.deserialize(exported.serialize()).call(row, w, x, dy, old, sizes)
    oracle.assert_close(out, mm_oracle(row, w, ODD))
    oracle.assert_close(dw, wgrad_oracle(x, dy, ODD) + oracle.f64(old))


def test_cost(rng):
    x, dy, _ = wgrad_problem(rng)
    # Rows in groups; the gradient's rows are those of the padded operands.
    assert jgg.cost.nvfp4_grouped_wgrad(x, dy, np.array(ODD)).flops == 2 * (64 * 3) * 6 * 8
    row, w = random(rng, 20, 32), random(rng, 3, 8, 32)
    assert jgg.cost.nvfp4_grouped_mm(row, w, FEW[0]).flops == 2 * 17 * 8 * 32
