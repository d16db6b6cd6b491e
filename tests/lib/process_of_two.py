"""One of two processes with two CPU devices each, that run ``moe_mlp`` over the four together.

python process_of_two.py HOST:PORT PROCESS OUT: a file of numpy arrays, value and gradients.
"""

import sys

import jax

HOST, PROCESS, OUT = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.distributed.initialize(HOST, 2, PROCESS, initialization_timeout=60)

import expert_parallel as ep  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402

assert len(jax.devices()) == 4
assert len(jax.local_devices()) == 2


def everywhere(a):
    """From numpy, sharded along the first axis over all devices."""
    a = np.asarray(a)
    at = NamedSharding(ep.mesh_of(4), ep.PER_DEVICE)
    return jax.make_array_from_callback(a.shape, at, lambda index: a[index])


def gathered(a):
    """To numpy, where one process has a part of it only."""
    parts = sorted(a.addressable_shards, key=lambda shard: shard.index[0].start)
    return np.concatenate([np.asarray(part.data) for part in parts])


args, index, ct = ep.problem_of_processes()
args, index, ct = jax.tree.map(everywhere, (args, index, ct))
results = {}
for name in ep.TRANSPORTS:
    f = ep.across(4, transport=name)
    if name == "gather":
        y, grads = ep.pulled(f)(args, index, ct)
    else:
        y, grads = jax.jit(f)(args, index), {}
    results |= {f"{name} {n}": gathered(a) for n, a in {"y": y, **grads}.items()}
np.savez(OUT, **results)
