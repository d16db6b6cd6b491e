"""Devices to divide operands among, and what they say to each other."""

import functools
import re

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 4 if len(jax.devices()) >= 4 else 2
needs_two_devices = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
#: In a compiled HLO.
COLLECTIVES = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


@functools.cache
def mesh_of(shape, names, kind) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def put(mesh, tree, *spec):
    """Leaves with fewer axes have the first of them."""
    sharding = lambda leaf: NamedSharding(mesh, P(*spec[: leaf.ndim]))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding(leaf)), tree)


def collectives(function, *args) -> list[str]:
    """Of a jitted function, from the compiled HLO."""
    return sorted(re.findall(COLLECTIVES, function.lower(*args).compile().as_text()))
