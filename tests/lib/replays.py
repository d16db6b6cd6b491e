"""Programs that XLA captures into command buffers, and that are replayed while operands change."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from handler_watch import CALLS, Watch

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
