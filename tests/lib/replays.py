"""Programs that XLA captures into command buffers, and that are replayed while operands change."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import oracle
from handler_watch import CALLS, Watch

import jax_groupgemm as jgg

# XLA captures as many thunks as this or more. Tuning, which may choose another kernel in every
# compilation, is off.
CAPTURED = {"xla_gpu_graph_min_graph_size": 1, "xla_gpu_autotune_level": 0}
EAGER = CAPTURED | {"xla_gpu_graph_min_graph_size": 2**30}
SETTLED = 6  # runs after which neither XLA nor its allocator should do anything anew


def same_bits(got, want) -> bool:
    leaves = (jax.tree.leaves(jax.device_get(tree)) for tree in (got, want))
    return all(g.tobytes() == w.tobytes() for g, w in zip(*leaves, strict=True))


@jax.jit(donate_argnums=0, keep_unused=True)
def refill(old, new):
    """A copy of ``new`` where ``old`` was."""
    del old
    return jax.tree.map(lambda a: a * a.dtype.type(1), new)


def replayed(
    watch: Watch, run: Callable[[Any], Any], batches: Sequence[Any], wants: Sequence[Any],
    rounds: int = 2,
) -> list[tuple[int, bool]]:  # fmt: skip
    """How many handlers each run of what is captured calls, and whether its bits are wanted.

    First some with one batch, then each of the others ``rounds`` times. Where an address changes
    XLA captures again, so operands stay where they are, and all else is allocated and freed in one
    order.
    """
    held, found = jax.tree.map(jnp.copy, batches[0]), []
    for i in [0] * SETTLED + rounds * [*range(1, len(batches))]:
        held = jax.block_until_ready(refill(held, batches[i]))
        with watch.recorded() as calls:
            got = jax.device_get(run(held))
        handlers = sum(functions[CALLS] for functions in calls.values())
        found.append((handlers, same_bits(got, wants[i])))
    return found


def assert_replayed(runs: Sequence[tuple[int, bool]], name: str = "") -> None:
    """Bits are right, and a batch that the capture has not seen runs without a handler."""
    handlers, right = zip(*runs, strict=True)
    assert all(right), (name, runs)
    assert handlers[0] > 0, (name, runs)
    assert 0 in handlers[SETTLED:], (name, runs)


def assert_chained(problem, depth: int, options: dict[str, Any]) -> None:
    """Layers one after the other, which write where the ones before have read, are what each is
    alone; 50 runs, and other operands at the same place between them."""
    x, up, down, index, weight = problem

    def one(x, i, index, weight, up, down):
        y = jgg.moe_mlp(x, up, down, (index + i) % up.shape[0], weight)
        return (y / jnp.sqrt(jnp.square(y).mean())).astype(x.dtype)

    def layers(x, index, weight, up, down):
        for i in range(depth):
            x = one(x, i, index, weight, up, down)
        return x

    compiled = jax.jit(layers).lower(x, index, weight, up, down).compile(compiler_options=options)
    sets = [(x, index, weight), (jnp.roll(x, 3, 1), (index + 5) % up.shape[0], weight[:, ::-1])]
    want = x
    for i in range(depth):
        want = jax.jit(one)(want, i, index, weight, up, down)
    firsts = [compiled(*given, up, down) for given in sets]
    assert oracle.error(firsts[0], oracle.f64(want)) < 3e-2
    held = jax.tree.map(jnp.copy, sets[0])
    for i in range(50):
        held = refill(held, sets[i % 2])
        assert same_bits(compiled(*held, up, down), firsts[i % 2])
