"""``nvfp4_quantize`` under jit, vmap, scan, differentiation, export and sharding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import nvfp4_oracle
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from nvfp4_quantize_cases import F32

import jax_groupgemm as jgg
from jax_groupgemm._nvfp4 import layouts

pytestmark = pytest.mark.default_device


def both_axes(x, sizes):
    """Grouped, and swizzled groups."""
    return (
        jgg.nvfp4_quantize(x, axis=0, group_sizes=sizes, hadamard=True),
        jgg.nvfp4_quantize(x, group_sizes=sizes, layout="swizzled"),
    )


def stored(codes, scales, global_scale, positions, **static):
    pairs = np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4, np.uint8)
    return jgg.Quantized(
        pairs.view(np.uint32), scales, None, global_scale, positions=positions,
        mode="nvfp4", bits=4, group_size=16, **static,
    )  # fmt: skip


def both_axes_in_numpy(x, sizes):
    sizes = np.asarray(sizes)
    codes, scales, positions, scale = nvfp4_oracle.quantize(x, axis=-2, sizes=sizes, hadamard=True)
    grouped = stored(codes, scales, scale, positions, axis=-2, layout="grouped")
    codes, scales, _, scale = nvfp4_oracle.quantize(x, sizes=sizes)
    scales, positions = oracle.pad_groups(scales, sizes, 128)
    tiles = np.asarray(layouts.swizzle(scales))
    return grouped, stored(codes, tiles, scale, positions, layout="swizzled")


BATCH = np.array([[5, 0, 20], [32, 0, 0], [1, 17, 3]], np.int32)


@pytest.fixture
def batch(rng):
    x = rng.standard_normal((3, 32, 64)).astype(F32)
    return x, BATCH, [both_axes_in_numpy(x[i], BATCH[i]) for i in range(3)]


@pytest.mark.weekly
def test_jit_vmap_scan_checkpoint(batch):
    x, sizes, want = batch
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *want)
    oracle.assert_leaves_equal(jax.jit(jax.vmap(both_axes))(x, sizes), stacked)
    run = jax.checkpoint(both_axes)
    _, scanned = jax.jit(lambda *a: jax.lax.scan(lambda c, b: (c, run(*b)), None, a))(x, sizes)
    oracle.assert_leaves_equal(scanned, stacked)
    grouped = jax.vmap(jgg.dequantize)(stacked[0])
    for i in range(3):
        np.testing.assert_array_equal(grouped[i], jgg.dequantize(want[i][0]))


def test_gradients_are_zero(rng):
    x, sizes = rng.standard_normal((32, 64)).astype(F32), jnp.array([5, 0, 20])

    def loss(x, factor):
        q = jgg.nvfp4_quantize(x, axis=0, group_sizes=sizes, hadamard=True)
        return jnp.sum(jgg.dequantize(dataclasses.replace(q, global_scale=q.global_scale * factor)))

    dx, dfactor = jax.grad(loss, (0, 1))(x, F32(1))
    np.testing.assert_array_equal(dx, np.zeros_like(x))
    np.testing.assert_allclose(dfactor, loss(x, F32(1)), rtol=1e-4)
    assert not np.asarray(jax.jvp(lambda x: loss(x, F32(1)), (x,), (x,))[1]).any()


def test_pytree(batch):
    x, sizes, want = batch
    export = jax.export.export(
        jax.jit(both_axes), platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )
    exported = export(x[0], sizes[0])
    assert "@jgg_nvfp4_quantize(" in exported.mlir_module()
    got = jax.export.deserialize(exported.serialize()).call(x[0], sizes[0])
    oracle.assert_leaves_equal(got, want[0])
    grouped = got[0]
    assert jax.tree.structure(grouped).num_leaves == 4
    linear = dataclasses.replace(grouped, positions=None, layout="linear")
    assert jax.tree.structure(linear).num_leaves == 3
    assert repr(grouped) == (
        "Quantized(mode='nvfp4', bits=4, group_size=16, axis=-2, layout='grouped', "
        "weight=uint32[64,24], scales=uint8[64,12], global_scale=float32[], positions=int32[32])"
    )


def mesh_of(kind):
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    devices = jax.devices()[:4]
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=devices)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.one_in(2)
def test_shard_map(rng, partial):
    """Each device has rows and sizes of its own; ``partial``: another mesh axis is Auto."""
    shape, names = ((2, 2), ("d", "e")) if partial else ((2,), ("d",))
    if len(jax.devices()) < 2 ** len(shape):
        pytest.skip("needs more devices")
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    x, sizes = rng.standard_normal((64, 64)).astype(F32), jnp.array([[5, 20, 0], [1, 2, 29]])

    def run(x, sizes):
        return jax.tree.map(lambda a: a[None], both_axes(x, sizes[0]))

    specs = {"in_specs": (P("d"), P("d")), "out_specs": P("d"), "axis_names": {"d"}}
    mapped = jax.shard_map(run, mesh=mesh, **specs)
    got = jax.jit(mapped)(x, sizes)
    for i in range(2):
        want = both_axes_in_numpy(x[32 * i : 32 * i + 32], sizes[i])
        oracle.assert_leaves_equal(jax.tree.map(lambda a, i=i: a[i], got), want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.one_in(2)
def test_sharded(batch, kind):
    (x, *_), (sizes, *_), (want, *_) = batch
    mesh = mesh_of(kind)
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    args = put(x, P("a", "b")), put(sizes, P())
    with jax.set_mesh(mesh):
        got = jax.jit(both_axes)(*args)
    oracle.assert_leaves_equal(got, want)
    np.testing.assert_array_equal(jgg.dequantize(got[0]), jgg.dequantize(want[0]))
    if kind == AxisType.Explicit:
        kept = [str(jax.typeof(q.weight)) for q in got]
        assert kept == ["uint32[64@b,24]", "uint32[32@a,8@b]"]


@pytest.mark.parametrize("spec", [P("a"), P(None, ("a", "b"))])
@pytest.mark.one_in(2)
def test_explicit_without_jit(batch, spec):
    (x, *_), (sizes, *_), (want, *_) = batch
    mesh = mesh_of(AxisType.Explicit)
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, spec), (sizes, P()))]
    q = jgg.nvfp4_quantize(args[0], axis=0, group_sizes=args[1], hadamard=True)
    oracle.assert_leaves_equal(q, want[0])
    np.testing.assert_array_equal(jgg.dequantize(q), jgg.dequantize(want[0]))


def test_explicit_keeps_what_divides(rng):
    mesh = mesh_of(AxisType.Explicit)
    w = rng.standard_normal((2, 32, 48)).astype(F32)
    sharded = jax.device_put(w, NamedSharding(mesh, P("a", None, "b")))
    specs = lambda q: [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(q)]
    parts = mesh.shape["b"]
    q = jgg.nvfp4_quantize(sharded)  # three blocks do not divide among two devices
    last = "" if 3 % parts else "@b"
    assert specs(q) == [f"uint32[2@a,32,6{last}]", f"uint8[2@a,32,3{last}]", "float32[2@a]"]
    oracle.assert_leaves_equal(q, jgg.nvfp4_quantize(w))
