"""Sharding of quantized weights, as test_sharding.py has that of others."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives, mesh_of, needs_two_devices, put

import jax_groupgemm as jgg

pytestmark = needs_two_devices

T, G = 32, 4
SIZES = np.array([9, 0, 11, 7], np.int32)

# transpose_w, the axis of the weight that is sharded, the spec of x and of the result; collectives
# of value and gradients in one program (a sum over T is one of dW, whatever is made of it).
QUANTIZED = {
    "N": (True, 1, P(), P(None, "d"), 1),
    "K, quantized": (True, 2, P(None, "d"), P(), 1),
    "N, quantized": (False, 2, P(), P(None, "d"), 1),
    "K": (False, 1, P(None, "d"), P(), 1),
    "T": (True, None, P("d"), P("d"), 1),
    "G": (True, 0, P(), P(), 2),
}


def quantized_problem(rng, transpose_w, quantized=256):
    other = 16
    q = oracle.random_quantized(rng, (G, other, quantized), "affine", 4, 32)
    x = oracle.random(rng, (T, quantized if transpose_w else other)) / 4

    def step(x, scales, biases, q, sizes):
        q = dataclasses.replace(q, scales=scales, biases=biases)
        out = jgg.grouped_qmm(x, q, sizes, transpose_w=transpose_w)
        return jnp.sin(out).sum(), out

    return x, q, jax.jit(jax.grad(step, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.one_in(24)
def test_quantized_collectives(rng, kind, name):
    transpose_w, axis, x_spec, out_spec, all_reduces = QUANTIZED[name]
    x, q, step = quantized_problem(rng, transpose_w)
    want = step(x, q.scales, q.biases, q, SIZES)
    oracle.assert_close(want[1], oracle.grouped_qmm(x, q, SIZES, transpose_w=transpose_w))
    mesh = mesh_of((DEVICES,), ("d",), kind)
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    w_spec = P(*("d" if i == axis else None for i in range(3)))
    sharded = jax.tree.map(lambda leaf: put(leaf, w_spec), q)
    args = put(x, x_spec), sharded.scales, sharded.biases, sharded, put(jnp.asarray(SIZES), P())
    with jax.set_mesh(mesh):
        got = step(*args)
        assert collectives(step, *args) == ["all-reduce"] * all_reduces
    assert got[1].sharding.is_equivalent_to(NamedSharding(mesh, out_spec), 2)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.assert_close(g, w, tolerance=5e-6)
    for g, given in zip(got[0], args, strict=False):
        assert g.sharding.is_equivalent_to(given.sharding, g.ndim)


@pytest.mark.parametrize("transpose_w", [True, False])
def test_quantization_groups_stay_whole(rng, transpose_w):
    """Six groups do not divide among the devices, though their words do: replicated, or refused."""
    if DEVICES != 4:
        pytest.skip("needs four devices")
    x, q, _ = quantized_problem(rng, transpose_w, 192)
    f = jax.jit(functools.partial(jgg.grouped_qmm, transpose_w=transpose_w))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of((4,), ("d",), kind)
        put = lambda a, spec, mesh=mesh: jax.device_put(a, NamedSharding(mesh, spec))
        leaves = jax.tree.map(lambda leaf, put=put: put(leaf, P()), q)
        sharded = dataclasses.replace(leaves, weight=put(q.weight, P(None, None, "d")))
        args = put(x, P()), sharded, put(jnp.asarray(SIZES), P())
        with jax.set_mesh(mesh):
            if kind == AxisType.Auto:
                want = oracle.grouped_qmm(x, q, SIZES, transpose_w=transpose_w)
                oracle.assert_close(f(*args), want)
            else:
                match = "its 6 quantization groups do not divide into 4. Use jax.sharding.reshard"
                with pytest.raises(ValueError, match=match):
                    f(*args)


@pytest.mark.parametrize("name", ["experts", "contracted"])
def test_quantized_shard_map(rng, name):
    """With check_vma; gradients of what is replicated are summed."""
    x, q, step = quantized_problem(rng, True)
    if name == "experts":
        specs, out = (P(), P("d")), P()
        offset = lambda q: {"group_offset": jax.lax.axis_index("d") * q.weight.shape[0]}
    else:
        specs, out = (P(None, "d"), P(None, None, "d")), P()
        offset = lambda q: {}
    mapped = jax.shard_map(
        lambda x, q: jax.lax.psum(jgg.grouped_qmm(x, q, SIZES, **offset(q)), "d"),
        mesh=mesh_of((DEVICES,), ("d",), AxisType.Auto), in_specs=specs, out_specs=out,
        check_vma=True,
    )  # fmt: skip

    def loss(x, scales, biases):
        out = mapped(x, dataclasses.replace(q, scales=scales, biases=biases))
        return jnp.sin(out).sum(), out

    got = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, q.scales, q.biases)
    want = step(x, q.scales, q.biases, q, SIZES)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.assert_close(g, w, tolerance=5e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gather_qmm(rng, kind):
    """Experts of any batch rank, their columns sharded: no communication."""
    mesh = mesh_of((DEVICES,), ("d",), kind)
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    q = oracle.random_quantized(rng, (2, 2, 8, 64), "mxfp4")
    x, index = oracle.random(rng, (6, 1, 64)), np.array([3, 0, 9, 1, 1, 2])
    sharded = jax.tree.map(lambda leaf: put(leaf, P(None, None, "d")), q)
    f = jax.jit(jgg.gather_qmm)
    with jax.set_mesh(mesh):
        args = put(x, P()), sharded, None, put(index, P())
        assert collectives(f, *args) == []
        out = f(*args)
    w = oracle.dequantize(q).swapaxes(-1, -2)
    oracle.assert_close(out, oracle.gather_mm(x, w, None, index))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, None, "d")), 3)


@pytest.mark.parametrize(
    "spec", [(None, "a"), ("a",), ("a", "b"), (None, None, "b"), ("a", None, "b")]
)
@pytest.mark.parametrize(
    ("name", "compiled"),
    [(n, True) for n in ("nvfp4", "mxfp8", "affine 4 128", "affine 3 32")] + [("nvfp4", False)],
)
@pytest.mark.one_in(14)
def test_explicit_prepacked(rng, name, spec, compiled):
    """Tiles of N, of K and experts stay where they are."""
    mode, *numbers = name.split()
    bits, group_size = map(int, numbers) if numbers else (None, None)
    q = oracle.random_quantized(rng, (G, 128, 512), mode, bits, group_size, "bfloat16")
    x, packed = oracle.random(rng, (T, 512), "bfloat16"), jgg.prepack(q)
    assert packed.layout == "sm90"
    mesh = mesh_of((2, DEVICES // 2), ("a", "b"), AxisType.Explicit)
    f = lambda x, q, s: jgg.grouped_qmm(x, q, s, preferred_element_type="float32")
    args = put(mesh, x, None, *spec[2:]), put(mesh, packed, *spec), put(mesh, jnp.asarray(SIZES))
    with jax.set_mesh(mesh):
        f = jax.jit(f) if compiled else f
        out = f(*args)
        values = jgg.dequantize(args[1])
        if compiled:
            assert "all-gather" not in collectives(f, *args)
    oracle.assert_close(out, oracle.grouped_qmm(x, q, SIZES))
    np.testing.assert_array_equal(values, jgg.dequantize(q))


def test_explicit_prepacked_groups_stay_whole(rng):
    """Three groups do not divide among two devices, though their six tiles of codes do."""
    q = oracle.random_quantized(rng, (G, 64, 384), "affine", 4, 128, "bfloat16")
    mesh = mesh_of((2, DEVICES // 2), ("a", "b"), AxisType.Explicit)
    packed = jgg.prepack(q)
    weight, scales = put(mesh, packed.weight, None, None, "a"), put(mesh, packed.scales)
    sharded = dataclasses.replace(packed, weight=weight, scales=scales)
    message = (
        "jgg: a prepacked weight (4, 64, 384) shards axis K over ('a',), but its 3 quantization "
    )
    message += "groups do not divide into 2. Use jax.sharding.reshard first."
    with jax.set_mesh(mesh):
        oracle.assert_raises(lambda: jgg.dequantize(sharded), ValueError, message)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("spec", [("a",), (None, "a"), (None, None, "a"), ("a", "b", None), ()])
@pytest.mark.parametrize("name", ["nvfp4", "affine 4 128"])
@pytest.mark.one_in(14)
def test_prepack_explicitly_sharded(rng, name, spec, compiled):
    """Each device packs its part, whether a mesh is set or not: no communication."""
    mode, *numbers = name.split()
    bits, group_size = map(int, numbers) if numbers else (None, None)
    q = oracle.random_quantized(rng, (G, 128, 512), mode, bits, group_size, "bfloat16")
    if mode == "nvfp4":
        q = dataclasses.replace(q, global_scale=jnp.arange(1.0, G + 1))
    want = jgg.prepack(q)
    mesh = mesh_of((2, DEVICES // 2), ("a", "b"), AxisType.Explicit)
    f = jax.jit(jgg.prepack) if compiled else jgg.prepack
    sharded = put(mesh, q, *spec)
    for context in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with context:
            got = f(sharded)
            if compiled:
                assert collectives(f, sharded) == []
        expected = (want, want.global_scale)
        for g, w in zip(
            jax.tree.leaves((got, got.global_scale)), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(g, w)
            assert g.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec[: g.ndim])), g.ndim)


@pytest.mark.parametrize(
    ("group_size", "axis", "message"),
    [
        (64, 1, "shards axis N over ('a',), in 2 parts that are not multiples of 64"),
        (128, 2, "shards axis K over ('a',), in 2 parts that are not multiples of 128"),
        (64, 0, None),
    ],
)
def test_prepack_of_parts_of_tiles(rng, group_size, axis, message):
    """Three tiles of N, three groups of K; and a vmap, within which parts cannot be named."""
    q = oracle.random_quantized(rng, (G, 192, 384), "affine", 4, group_size, "bfloat16")
    mesh = mesh_of((2, DEVICES // 2), ("a", "b"), AxisType.Explicit)
    spec = P(*("a" if i == axis else None for i in range(3)))
    weight = jax.device_put(q.weight, NamedSharding(mesh, spec))
    sharded = dataclasses.replace(put(mesh, q), weight=weight)
    f, text = jgg.prepack, f"w (4, 192, 384) {message}. Use jax.sharding.reshard first."
    if message is None:
        f, sharded = jax.vmap(jgg.prepack), put(mesh, q, "a")
        text = "within a vmap over an axis that is explicitly sharded. Call it outside: w may "
        text += "have any leading axes."
    with jax.set_mesh(mesh):
        oracle.assert_raises(lambda: f(sharded), ValueError, f"jgg.prepack: {text}")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_prepacked_global_scale(rng, kind):
    """Its gradient, of packed weights of which each device has some experts."""
    q = oracle.random_quantized(rng, (G, 64, 128), "nvfp4")
    scale, x = jnp.arange(1.0, G + 1), oracle.random(rng, (T, 128), "bfloat16")

    def loss(scale, x, q, sizes):
        q = dataclasses.replace(q, global_scale=scale)
        return jgg.grouped_qmm(x, q, sizes, preferred_element_type="float32").sum()

    step = jax.jit(jax.grad(loss))
    want = step(scale, x, q, jnp.asarray(SIZES))
    mesh = mesh_of((DEVICES,), ("d",), kind)
    args = put(mesh, scale, "d"), put(mesh, x), put(mesh, jgg.prepack(q), "d")
    with jax.set_mesh(mesh):
        oracle.assert_close(step(*args, put(mesh, jnp.asarray(SIZES))), oracle.f64(want))


@pytest.mark.parametrize(
    "shape", [{"d": AxisType.Explicit}, {"a": AxisType.Auto, "e": AxisType.Explicit}]
)
@pytest.mark.one_in(2)
def test_operands_of_no_mesh(rng, shape):
    """Of one device, made before a mesh with Explicit axes is set: whole, as those of ``x @ w``."""
    sizes = (DEVICES,) if len(shape) == 1 else (2, DEVICES // 2)
    mesh = jax.make_mesh(sizes, tuple(shape), axis_types=tuple(shape.values()))
    q = oracle.random_quantized(rng, (G, 64, 128), "nvfp4")
    x, w = oracle.random(rng, (T, 128), "bfloat16"), oracle.random(rng, (G, 128, 64), "bfloat16")
    packed, sizes = jgg.prepack(q), jnp.asarray(SIZES)

    def all_products(x, w, q, packed, sizes):
        return (
            jgg.grouped_mm(x, w, sizes),
            jgg.grouped_qmm(x, q, sizes),
            jgg.grouped_qmm(x, packed, sizes),
            jgg.grouped_qmm(x, q, sizes, activation="silu"),
            jgg.dequantize(q),
            jax.grad(lambda x: jgg.grouped_mm(x, w, sizes).astype("float32").sum())(x),
        )

    f = jax.jit(all_products)
    want = f(x, w, q, packed, sizes)
    with jax.set_mesh(mesh):
        for got in (f(x, w, q, packed, sizes), all_products(x, w, q, packed, sizes)):
            jax.tree.map(np.testing.assert_array_equal, got, want)
        assert collectives(f, x, w, q, packed, sizes) == []
    jax.tree.map(np.testing.assert_array_equal, f(x, w, q, packed, sizes), want)


@needs_two_devices
@pytest.mark.parametrize("group", [32, 128])
def test_prepack_keeps_the_group_size(rng, group):
    """Over an Explicit mesh, of whole weights and of those sharded by matrix."""
    mesh = mesh_of((2,), ("d",), AxisType.Explicit)
    q = oracle.random_quantized(rng, (2, 64, 128), "affine", 4, group, "bfloat16")
    want = jgg.prepack(q, strict=True)
    for spec in (P(), P("d")):
        got = jgg.prepack(jax.device_put(q, NamedSharding(mesh, spec)), strict=True)
        assert got.group_size == want.group_size == group
        np.testing.assert_array_equal(got.scales, want.scales)
        np.testing.assert_array_equal(jgg.dequantize(got), jgg.dequantize(want))
