"""Devices to divide operands among, and what they say to each other."""

import functools
import math
import re

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 4 if len(jax.devices()) >= 4 else 2
needs_two_devices = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
#: In a compiled HLO.
COLLECTIVES = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def needs(devices: int) -> None:
    """Skips the test where there are fewer."""
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} devices")


@functools.cache
def mesh_of(shape, names, kind) -> jax.sharding.Mesh:
    needs(math.prod(shape))
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def names_in(specs) -> frozenset[str]:
    """Mesh axes that some of the specs name."""
    parts = [part for spec in specs for part in spec if part is not None]
    return frozenset(n for part in parts for n in (part if isinstance(part, tuple) else (part,)))


def mesh_of_twos(names, kind, used) -> jax.sharding.Mesh:
    """Axes of two devices each. Where there are not as many devices, those that are not ``used``
    have one."""
    shape = (2,) * len(names)
    if len(jax.devices()) < math.prod(shape):
        shape = tuple(2 if name in used else 1 for name in names)
    return mesh_of(shape, names, kind)


def put(mesh, tree, *spec):
    """Leaves with fewer axes have the first of them."""
    sharding = lambda leaf: NamedSharding(mesh, P(*spec[: leaf.ndim]))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding(leaf)), tree)


def collectives(function, *args) -> list[str]:
    """Of a jitted function, from the compiled HLO."""
    return sorted(re.findall(COLLECTIVES, function.lower(*args).compile().as_text()))
