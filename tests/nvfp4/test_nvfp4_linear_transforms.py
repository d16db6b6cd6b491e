"""Transformations of the NVFP4 training operation with its own quantizer, which XLA compiles into
them: test_nvfp4_transforms.py has more of them, of a quantizer that compiles at once."""

import jax
import jax.numpy as jnp
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_nvfp4_transforms import (
    KEYS,
    SHARDED,
    assert_trees_close,
    check_shard_map,
    jit,
    mesh_of,
    step,
)

import jax_groupgemm as jgg

pytestmark = [pytest.mark.default_device, pytest.mark.slow, pytest.mark.weekly]

G, SIZES = 4, [[9, 0, 3, 6], [0, 20, 0, 0]]


@pytest.fixture
def examples(rng):
    """Two of each: x, w, bias, the cotangent, sizes and key."""
    a = [oracle.random(rng, (2, *s)) for s in ((20, 32), (G, 32, 32), (G, 32), (20, 32))]
    return *a, jnp.array(SIZES, jnp.int32), KEYS


def one(args, i: int = 0):
    """Of one example, without any transformation."""
    return step(*(a[i] for a in args))


def stacked(args):
    return jax.tree.map(lambda *v: jnp.stack(v), one(args, 0), one(args, 1))


def test_vmap(examples):
    assert_trees_close(jit(jax.vmap(step))(*examples), stacked(examples))


def test_checkpoint_in_scan(examples):
    body = lambda carry, args: (carry, jax.checkpoint(step)(*args))
    got = jit(lambda *args: jax.lax.scan(body, None, args)[1])(*examples)
    assert_trees_close(got, stacked(examples))


def test_shard_map(examples):
    check_shard_map(examples, step)


@pytest.mark.parametrize(
    ("kind", "name"), [(AxisType.Auto, "T"), (AxisType.Explicit, "N"), (AxisType.Explicit, "K")]
)
def test_sharded(examples, kind, name):
    x_spec, w_spec, out_spec = SHARDED[name]
    specs = x_spec, w_spec, P(*w_spec[:2]), out_spec, P(), P()
    args = [a[0] for a in examples]
    with jax.set_mesh(mesh_of(kind)):
        put = lambda a, spec: jax.device_put(a, NamedSharding(mesh_of(kind), spec))
        got = jit(step)(*map(put, args, specs))
    assert_trees_close(got, one(examples))


def test_export(examples):
    args = [a[0] for a in examples]
    exported = jax.export.export(
        jit(step), platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(*args)
    loaded = jax.export.deserialize(exported.serialize()).call
    assert_trees_close(loaded(*args), one(examples))
