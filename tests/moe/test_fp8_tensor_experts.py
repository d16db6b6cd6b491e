"""The experts in FP8 with a scale for each tensor: errors, states, and devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_two_devices

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import activation_cast, tensors
from jax_groupgemm._moe.fp8_tensor import FP8Tensor

T, D, F, E, K = 24, 16, 32, 4, 2
TENSOR, DELAYED = (jgg.FP8Recipe(scaling=scaling) for scaling in ("tensor", "delayed"))
NEW = jgg.FP8State.new(), jgg.FP8State.new()


@pytest.fixture
def problem(rng):
    """x, up, down and weight; experts; and a cotangent."""
    x, ct = oracle.random(rng, (T, D)), oracle.random(rng, (T, D))
    up, down = oracle.random(rng, (E, D, 2 * F)) / 4, oracle.random(rng, (E, F, D)) / 6
    index = jnp.asarray(rng.integers(-1, E, (T, K)), jnp.int32)
    return (x, up, down, jnp.asarray(rng.random((T, K)), "float32")), index, ct


def step(args, index, ct, state=None, **options):
    """The result, all gradients, and what the states have seen."""

    def layer(args, state):
        return jgg.moe_mlp(*args[:3], index, args[3], state=state, **options)

    out, pull = jax.vjp(layer, args, state)
    return out, *pull(ct)


def of_recipe(recipe=DELAYED, **options):
    # Less work for the compiler.
    return jax.jit(
        functools.partial(step, recipe=recipe, **options),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def run(problem, state=None, **options):
    options.setdefault("recipe", TENSOR if state is None else DELAYED)
    return of_recipe(**options)(*problem, state)


def ranges(seen):
    return [np.nonzero(np.asarray(leaf) > 0)[-1].tolist() for leaf in jax.tree.leaves(seen)]


def test_errors_are_those_of_eight_bits(problem):
    """Of the result and of each gradient; a first state has the scales of the tensors."""
    exact, got = run(problem, recipe=None), run(problem)
    for one, want in zip(*map(jax.tree.leaves, (got, exact)), strict=True):
        assert one.dtype == want.dtype
        assert 0.02 < oracle.error(one, want) < 0.1
    *delayed, seen = run(problem, NEW)
    for one, want in zip(*map(jax.tree.leaves, (delayed, got)), strict=True):
        np.testing.assert_array_equal(one, want)
    assert [len(of) for of in ranges(seen)] == [1] * 4
    amax = np.abs(oracle.f64(problem[0][0])[(np.asarray(problem[1]) >= 0).any(1)]).max()
    assert ranges(seen)[0] == [int(np.ceil(np.log2(amax / 1.75))) + 127]


@pytest.mark.parametrize("accumulate", ["fast", "exact"])
@pytest.mark.parametrize("scaling", ["tensor", "delayed"])
def test_passes_of_kernels(monkeypatch, problem, scaling, accumulate):
    """Made of definitions, as of kernels: the same bits, with scales that are too small, too. Every
    token has experts, because all tokens' numbers make the scale here."""
    (args, index, ct), state = problem, None
    if scaling == "delayed":
        ages = jnp.full(256, jnp.inf)
        of = lambda x, dy: jgg.FP8State(ages.at[x].set(0), ages.at[dy].set(3))
        state = of(126, 125), of(120, 127)
    recipe = jgg.FP8Recipe(scaling=scaling, accumulate=accumulate)
    given = (args, jnp.maximum(index, 0), ct)
    want = run(given, state, recipe=recipe)
    ran = []
    for module, name in ((activation_cast, "takes"), (tensors, "takes"), (FP8Tensor, "_takes")):
        monkeypatch.setattr(module, name, lambda *_: ran.append(1) or True)
    got = run(given, state, recipe=recipe)
    assert ran
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_that_are_quantized_beforehand(problem):
    (x, up, down, weight), index, ct = problem
    cast = lambda w: jgg.fp8_quantize(w.swapaxes(1, 2), block=None, scale_format="e8m0")
    unread = x, jnp.full_like(up, jnp.nan), jnp.full_like(down, jnp.nan), weight
    got = run((unread, index, ct), quantized=(cast(up), cast(down)))
    for one, want in zip(*map(jax.tree.leaves, (got, run(problem))), strict=True):
        oracle.assert_close(one, want, tolerance=1e-5)


def test_a_module_passes_states_on(rng):
    """The gradient of states is what nnx.MoE's experts have seen."""
    nnx = pytest.importorskip("flax.nnx")
    module = pytest.importorskip("jax_groupgemm.nnx").MoE
    layer = module(D, F, E, K, rngs=nnx.Rngs(0), recipe=DELAYED)
    x = oracle.random(rng, (T, D))
    seen = jax.jit(jax.grad(lambda state: layer(x, state=state)[0].sum()))(NEW)
    assert [len(of) for of in ranges(seen)] == [1] * 4
    amax = np.abs(oracle.f64(x)).max()
    assert ranges(seen)[0] == [int(np.ceil(np.log2(amax / 1.75))) + 127]


SPECS = {
    "T": (P("d"), P(), P(), P("d")),
    "F": (P(), P(None, None, "d"), P(None, "d"), P()),
    "E": (P(), P("d"), P("d"), P()),
    "T and E": (P("d"), P("d"), P("d"), P("d")),
}


@needs_two_devices
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (AxisType.Explicit, "T"), (AxisType.Explicit, "T and E"),
        pytest.param(AxisType.Auto, "T", marks=pytest.mark.weekly),
        *(pytest.param(AxisType.Explicit, n, marks=pytest.mark.weekly) for n in ("F", "E")),
    ],
)  # fmt: skip
def test_sharded(problem, kind, name):
    """With known scales the layer is that of one device, and states see what they see there: of an
    Explicit mesh with one all-reduce of a number for each of four tensors."""
    args, index, ct = problem
    args = args[0].at[0].set(9.0), *args[1:]  # the largest token is on one device
    state = tuple(s.updated(g) for s, g in zip(NEW, run((args, index, ct), NEW)[2], strict=True))
    want = run((args, index, ct), state)
    mesh, specs = mesh_of((2,), ("d",), kind), SPECS[name]
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        placed = tuple(put(a, spec) for a, spec in zip(args, specs, strict=True))
        tokens = [put(a, specs[0]) for a in (index, ct)]
        given = (placed, *tokens), jax.device_put(state, NamedSharding(mesh, P()))
        program = of_recipe().lower(*given[0], given[1]).compile()
        got = program(*given[0], given[1])
    for one, other in zip(*map(jax.tree.leaves, (got[:2], want[:2])), strict=True):
        oracle.assert_close(one, other, tolerance=1e-5)
    for leaf, of_one in zip(*map(jax.tree.leaves, (got[2], want[2])), strict=True):
        assert leaf.sharding.is_fully_replicated
        np.testing.assert_array_equal(leaf, of_one)
    if kind == AxisType.Explicit and jax.default_backend() == "cpu":
        sums = re.findall(r"= (\S+) all-reduce\(", program.as_text())
        assert sum(of.startswith("s32[4]") for of in sums) == 1
        assert not any("[256]" in of for of in sums)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": None, "state": NEW}, ValueError, "state is of a jgg.FP8Recipe(scaling="),
        ({"recipe": DELAYED}, ValueError, "needs a state. Begin with a pair of jgg.FP8State.new()"),
        (
            {"recipe": DELAYED, "state": NEW[0]}, TypeError,
            "state must be two jgg.FP8State, of up and down",
        ),
        (
            {"recipe": DELAYED, "state": (NEW[0], jgg.FP8State.new(2))}, ValueError,
            "state of down.x has shape (2, 256), expected 1 axis (256): of one layer",
        ),
    ],
)  # fmt: skip
def test_states_that_do_not_fit(problem, options, error, message):
    (x, up, down, weight), index, _ = problem
    with pytest.raises(error, match=re.escape(message)):
        jgg.moe_mlp(x, up, down, index, weight, **options)
