"""Transformations and sharding of FP8 products, and what they cost."""

import dataclasses
import functools

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fp8_shardings import KINDS, SHARDED, check_sharded
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_two_devices

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device

G = 4
# Less work for the compiler.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def test_export(rng):
    """An operation whose operands are Quantized, with their blocks."""
    x, w, sizes = oracle.random(rng, (20, 24)), oracle.random(rng, (G, 40, 24)), [9, 0, 3, 5]
    sizes = jnp.array(sizes)
    args = fp8_oracle.stored(x, (1, 128)), fp8_oracle.stored(w), sizes
    f = jit(jgg.fp8_grouped_mm)
    exported = jax.export.export(
        f, platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(*args)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(*args), f(*args))


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0)])
@pytest.mark.one_in(3)
def test_vmap_of_products(rng, axes):
    x = fp8_oracle.stored(oracle.random(rng, (2, 20, 136)), (1, 128))
    w = fp8_oracle.stored(oracle.random(rng, (2, G, 40, 136)))
    sizes = jnp.array([[9, 0, 3, 5], [0, 20, 0, 0]])
    args = [a if d == 0 else jax.tree.map(lambda v: v[0], a)
            for a, d in zip((x, w, sizes), axes, strict=True)]  # fmt: skip
    got = jit(jax.vmap(jgg.fp8_grouped_mm, axes))(*args)
    for i in range(2):
        xi, wi, si = (
            jax.tree.map(lambda v, i=i: v[i], a) if d == 0 else a
            for a, d in zip(args, axes, strict=True)
        )
        want = oracle.grouped_mm(fp8_oracle.values(xi), fp8_oracle.values(wi), si, transpose_w=True)
        oracle.assert_close(got[i], want)


# ---- several devices -----------------------------------------------------------------------------


@needs_two_devices
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(8)
def test_qmm_sharded(rng, kind, name):
    """In whole blocks; values and gradients of x and scales."""
    x_spec, w_spec, out_spec = SHARDED[name]
    x = oracle.random(rng, (20, 256))
    q = fp8_oracle.stored(oracle.random(rng, (G, 512, 256)), (128, 64))

    @jit
    def f(x, q, sizes):
        def loss(x, scales):
            w = dataclasses.replace(q, scales=scales)
            out = jgg.grouped_qmm(x, w, sizes)
            return jnp.sin(out).sum(), out

        grads, out = jax.grad(loss, (0, 1), has_aux=True)(x, q.scales)
        return out, *grads

    args = x, q, jnp.array([9, 0, 3, 6])
    check_sharded(f, args, (x_spec, w_spec, P()), kind, (out_spec, x_spec, w_spec), 1e-5)


@needs_two_devices
@pytest.mark.parametrize("block", [(128, 128), None, (1, 200)])
@pytest.mark.one_in(3)
def test_blocks_that_are_cut(rng, block):
    """N and K that blocks do not divide are divided among devices all the same."""
    x, w = oracle.random(rng, (20, 200)), oracle.random(rng, (G, 200, 200))
    q = fp8_oracle.stored(w, block)
    args = x, q.weight, q.scales, jnp.array([9, 0, 3, 6])

    @jit
    def f(x, weight, scales, sizes):
        q = jgg.Quantized(weight, scales, mode="fp8", bits=8, group_size=None, block=block)  # pyright: ignore
        return jgg.grouped_qmm(x, q, sizes)

    for spec, x_spec, out in ((P(None, "d"), P(), P(None, "d")), (P(None, None, "d"), P(None, "d"),
                                                                 P())):  # fmt: skip
        check_sharded(f, args, (x_spec, spec, P(), P()), AxisType.Auto, (out,), 1e-5)


@needs_two_devices
@pytest.mark.parametrize("spec", [P(None, "d"), P("d")])
@pytest.mark.one_in(2)
def test_quantize_sharded(rng, spec):
    """As x is, where blocks stay whole."""
    mesh = mesh_of((2,), ("d",), AxisType.Explicit)
    x = oracle.random(rng, (20, 256))
    want = jgg.fp8_quantize(x)
    with jax.set_mesh(mesh):
        q = jax.jit(jgg.fp8_quantize)(jax.device_put(x, NamedSharding(mesh, spec)))
        values = jax.jit(jgg.dequantize)(q)
    for got, leaf in zip(jax.tree.leaves(q), jax.tree.leaves(want), strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        np.testing.assert_array_equal(got, leaf)
    np.testing.assert_array_equal(values, jgg.dequantize(want))


@needs_two_devices
@pytest.mark.parametrize("n", [1, 16])
def test_groups_of_existing_out_divided(n):
    """With one column the condition of a group has existing_out's shape."""
    sizes = jnp.array([9, 0, 3, 6])
    x, dy = (
        jgg.fp8_quantize(jnp.zeros((20, columns)), axis=0, group_sizes=sizes) for columns in (1, n)
    )
    old = jnp.arange(4.0 * n).reshape(4, n, 1)
    f = jit(lambda x, dy, sizes, old: jgg.fp8_grouped_wgrad(x, dy, sizes, existing_out=old))
    specs = P(), P(), P(), P("d")
    check_sharded(f, (x, dy, sizes, old), specs, AxisType.Explicit, (P("d"),), 0)


@pytest.mark.parametrize("transpose_w", [True, False])
@pytest.mark.one_in(2)
def test_experts_are_not_dequantized_as_a_whole(transpose_w):
    g, n = 4, 2048
    codes = jnp.ones((g, n, n), jnp.float8_e4m3fn)
    q = jgg.Quantized(codes, jnp.ones((g, 16, 16)), mode="fp8", bits=8, group_size=None,  # pyright: ignore
                      block=(128, 128))  # fmt: skip
    x = jnp.ones((16, n), jnp.bfloat16)
    sizes = np.array([3, 4, 0, 9])
    loss = lambda x, q: (jgg.grouped_qmm(x, q, sizes, transpose_w=transpose_w) ** 2).sum()
    compiled = jax.jit(jax.value_and_grad(loss)).lower(x, q).compile()
    # The codes as bytes, and a part of one expert in float32.
    assert compiled.memory_analysis().temp_size_in_bytes < codes.size + 4 * n * n // 2


# ---- what it costs, and nothing to do ------------------------------------------------------------


def test_cost(rng):
    """Three products of the rows in groups; those of the weight gradient are padded to 128."""
    x, w = oracle.random(rng, (20, 24)), oracle.random(rng, (G, 40, 24))
    sizes = np.array([9, 0, 3, 5], np.int32)
    flops = 2 * 40 * 24  # of a row
    cost = jgg.cost.fp8_grouped_linear(x, w, sizes)
    assert cost.flops == 17 * flops
    loss = lambda x, w: jgg.fp8_grouped_linear(x, w, sizes).sum()
    assert jgg.cost.of(jax.grad(loss, (0, 1)), x, w).flops == (17 + 3 * 128) * flops
    q, qw = fp8_oracle.stored(x, (1, 128)), fp8_oracle.stored(w)
    alone = jgg.cost.fp8_grouped_mm(q, qw, sizes)
    read = 17 * 24 + 17 * 4 + 3 * (40 * 24 + 4) + sizes.nbytes + 20 * 40 * 2
    assert (alone.flops, alone.bytes_accessed) == (17 * flops, read)


@needs_two_devices
@pytest.mark.parametrize(("f", "size"), [(128, 64), (200, 128)])
def test_hidden_columns_of_moe_sharded(rng, f, size):
    """Every device has whole blocks of gate and of up, or it is an error."""
    x, weight = oracle.random(rng, (20, 128)), oracle.random(rng, (20, 2))
    index = jnp.asarray(rng.integers(0, G, (20, 2)))
    up, down = (
        fp8_oracle.stored(oracle.random(rng, s) / 12, (size, size))
        for s in ((G, 2 * f, 128), (G, 128, f))
    )
    layer = jit(lambda x, up, down, weight: jgg.moe_mlp(x, up, down, index, weight))
    mesh = mesh_of((2,), ("d",), AxisType.Explicit)
    put = lambda tree, *spec: jax.tree.map(
        lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P(*spec))), tree
    )
    with jax.set_mesh(mesh):
        args = put(x), put(up, None, "d"), put(down, None, None, "d"), put(weight)
        if 2 * f % size:
            with pytest.raises(ValueError, match="25 of it do not divide into one part"):
                layer(*args)
            return
        got = layer(*args)
    oracle.assert_close(got, layer(x, up, down, weight), tolerance=1e-5)
