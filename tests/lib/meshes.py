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


def mapped_linear(layer, mesh, examples, single, jit):
    """Results and gradients of a grouped linear layer in a shard_map, and what they should be. Each
    device has rows and sizes of its own; gradients of what is replicated are summed, with
    check_vma.

    Args:
      layer: ``layer(x, w, sizes, bias=, key=)``.
      examples: two of each: x, w, bias, the cotangent, sizes and key.
      single: out and gradients of one example, without any transformation.
    """
    x, w, bias, ct, sizes, keys = examples
    axis = P(*mesh.axis_names)
    mapped = jax.shard_map(
        lambda x, w, b, s, k: layer(x, w, s[0], bias=b, key=k),
        mesh=mesh, in_specs=(axis, P(), P(), axis, P()), out_specs=axis, check_vma=True,
    )  # fmt: skip
    rows = lambda a: a.reshape(-1, a.shape[-1])

    def f(x, w, bias, ct):
        out, vjp = jax.vjp(lambda x, w, b: mapped(x, w, b, sizes, keys[0]), x, w, bias)
        return out, *vjp(ct)

    got = jit(f)(rows(x), w[0], bias[0], rows(ct))
    a, b = (single(x[i], w[0], bias[0], ct[i], sizes[i], keys[0]) for i in range(2))
    joined = [jax.numpy.concatenate(pair) for pair in zip(a[:2], b[:2], strict=True)]
    return got, (*joined, *(p + q for p, q in zip(a[2:], b[2:], strict=True)))


def put(mesh, tree, *spec):
    """Leaves with fewer axes have the first of them."""
    sharding = lambda leaf: NamedSharding(mesh, P(*spec[: leaf.ndim]))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding(leaf)), tree)


def collectives(function, *args) -> list[str]:
    """Of a jitted function, from the compiled HLO."""
    return sorted(re.findall(COLLECTIVES, function.lower(*args).compile().as_text()))
