"""Ways to shard the operands of FP8 products, and how results are compared."""

import functools

import jax
import oracle
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

#: Of products of the same codes. On a GPU a batch is another kernel, and each errs by 2e-4 at most.
CLOSE = 1e-5 if jax.default_backend() == "cpu" else 4e-4


assert_trees_close = functools.partial(oracle.assert_trees_close, tolerance=CLOSE)


def check_sharded(f, args, specs, kind, out_specs, tolerance):
    want = f(*args)
    mesh = mesh_of((2,), ("d",), kind)
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        placed = [
            jax.tree.map(lambda leaf, spec=spec: put(leaf, P(*spec[: leaf.ndim])), a)
            for a, spec in zip(args, specs, strict=True)
        ]
        got = f(*placed)
    oracle.assert_trees_close(got, want, tolerance)
    for value, spec in zip(jax.tree.leaves(got), out_specs, strict=False):
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec), value.ndim)


# Specs of x, of w and bias, and of the result.
SHARDED = {
    "T": (P("d"), P(), P("d")),
    "N": (P(), P(None, "d"), P(None, "d")),
    "K": (P(None, "d"), P(None, None, "d"), P()),
    "G": (P(), P("d"), P()),
}
KINDS = (AxisType.Auto, AxisType.Explicit)
