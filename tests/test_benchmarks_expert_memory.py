"""benchmarks.expert_memory: its table is that of the guide, and true of what is kept."""

import sys
from pathlib import Path

import expert_parallel as ep
import jax
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # last: an installed jax_groupgemm comes first

from benchmarks import expert_memory  # noqa: E402


def test_the_guide_has_this_table():
    page = expert_memory.PAGE.read_text()
    assert expert_memory.written(page) == page
    with pytest.raises(ValueError, match="the page has 0 times <!-- python -m"):
        expert_memory.written("# Another page")


@pytest.mark.parametrize("model", expert_memory.MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("devices", [2, 4, 8, 16, 32, 64])
def test_what_the_guide_says_beside_it(model, devices):
    """The worst case is proportional to the devices; room for twice an even routing is that of
    two devices, on any number of them."""
    if devices > model.experts:
        pytest.skip("fewer experts than devices")
    two, worst = (expert_memory.memory(model, n, None) for n in (2, devices))
    assert worst.kept + worst.passing == (two.kept + two.passing) * devices // 2
    assert expert_memory.shown(model, devices, 2.0) == expert_memory.shown(model, 2, None)


@pytest.mark.parametrize(("name", "k"), [("gather", 4), ("all_to_all", 1)])
@pytest.mark.parametrize("max_rows", [None, 96])
def test_what_is_kept(name, k, max_rows):
    """Of the backward pass' operands, those that are neither weights nor this device's tokens."""
    devices, tokens, hidden = 4, 48, 64
    if len(jax.devices()) < devices:
        pytest.skip("needs four devices")
    model = expert_memory.Model("toy", 32, hidden, ep.E, k)
    args = {
        name: jax.ShapeDtypeStruct(shape, dtype)
        for name, shape, dtype in (
            ("x", (devices * tokens, 32), jnp.bfloat16),
            ("up", (ep.E, 32, 2 * hidden), jnp.bfloat16),
            ("down", (ep.E, hidden, 32), jnp.bfloat16),
            ("weight", (devices * tokens, k), jnp.float32),
            ("up_bias", (ep.E, 2 * hidden), jnp.bfloat16),
            ("down_bias", (ep.E, 32), jnp.bfloat16),
        )
    }
    index = jnp.zeros((devices * tokens, k), jnp.int32)
    f = ep.across(devices, transport=name, max_rows=max_rows)
    pull = jax.eval_shape(lambda args: jax.vjp(lambda args: f(args, index), args)[1], args)
    size = lambda leaves: sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    kept = size(jax.tree.leaves(pull)) - size(args.values())
    of = expert_memory.Memory(model, devices, tokens, max_rows)
    assert kept / devices == pytest.approx(of.kept, rel=0.1)
    rows = of.rows * devices
    assert (rows, 2 * hidden) in [leaf.shape for leaf in jax.tree.leaves(pull)]
