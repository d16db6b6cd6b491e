"""``moe_mlp`` under Explicit sharding where tokens and experts share mesh axes, and beside data and
tensor parallel axes; also in a ``shard_map`` over some of an Explicit mesh's axes."""

import functools
import re

import expert_parallel as ep
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from expert_parallel import NAMES, D, E, F, K
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import COLLECTIVES, mesh_of, mesh_of_twos, names_in

import jax_groupgemm as jgg

weekly = pytest.mark.weekly

T = 24
EXPERTS = P("e")
#: Specs of tokens, up, down, up_bias and down_bias on a mesh of data, expert and tensor axes.
SHARDED = {
    "e": (P("e"), *[EXPERTS] * 4),
    "d, e": (P(("d", "e")), *[EXPERTS] * 4),
    "e, d": (P(("e", "d")), *[EXPERTS] * 4),
    "d, e, m": (
        P(("d", "e")), P("e", None, None, "m"), P("e", "m"), P("e", None, "m"), EXPERTS
    ),
    "all tokens": (P(("d", "e", "m")), *[EXPERTS] * 4),
    "two axes": (P(("d", "e", "m")), *[P(("e", "m"))] * 4),
}  # fmt: skip


def mesh(used):
    """``used``: axes that need two devices each."""
    return mesh_of_twos(("d", "e", "m"), AxisType.Explicit, used)


def put(a, spec):
    """On the mesh of ``jax.set_mesh``."""
    return jax.device_put(a, NamedSharding(jax.sharding.get_mesh(), spec))


def sharded(args, index, specs):
    x, up, down, up_bias, down_bias = specs
    of = dict(zip(NAMES, (x, up, down, x, up_bias, down_bias), strict=True))
    args = dict(args)
    if len(up) == 4:
        args["up"] = args["up"].reshape(E, D, 2, F)
        args["up_bias"] = args["up_bias"].reshape(E, 2, F)
    put_all = lambda name: jax.tree.map(lambda leaf: put(leaf, of[name]), args[name])
    return {name: put_all(name) for name in args}, put(index, x)


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        pytest.param(
            name, transport,
            marks=[] if (name, transport) in (("d, e, m", "gather"), ("two axes", "all_to_all"))
            else [weekly],
        )
        for name in SHARDED
        for transport in ep.TRANSPORTS
    ],
)  # fmt: skip
def test_explicit(rng, name, transport):
    args, ct = ep.problem(rng, T), oracle.random(rng, (T, D))
    specs = SHARDED[name]
    run = ep.pulled(functools.partial(ep.layer, transport=transport))
    with jax.set_mesh(mesh(names_in(specs))):
        for index in ep.indices(rng, T, 2)[:4]:
            want, wanted = ep.one_device()(args, index, ct)
            given = sharded(args, index, specs)
            out, grads = run(*given, put(ct, specs[0]))
            assert jax.typeof(out).sharding.spec == jax.typeof(given[0]["x"]).sharding.spec
            np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
            for operand, of in grads.items():
                flat = np.asarray(of).reshape(wanted[operand].shape)
                np.testing.assert_allclose(flat, wanted[operand], rtol=1e-5, atol=2e-5)
                assert jax.typeof(of).sharding.spec == jax.typeof(given[0][operand]).sharding.spec


def test_sequences(rng):
    """Tokens of two axes: sequences over data, their positions over experts. The index is cut to
    match, and begins at another expert than the first; the transport is left out."""
    args = ep.problem(rng, T)
    (index, *_) = ep.indices(rng, T, 2)
    want = ep.layer(args, index)
    split = lambda a: a.reshape(4, T // 4, a.shape[-1])
    with jax.set_mesh(mesh("de")):
        given = {
            name: put(split(a), P("d", "e")) if name in ("x", "weight") else put(a, EXPERTS)
            for name, a in args.items()
        }
        f = jax.jit(functools.partial(ep.layer, expert_offset=7))
        index = put(split(index + 7), P("d"))
        out, text = f(given, index), f.lower(given, index).compile().as_text()
    assert jax.typeof(out).sharding.spec == P("d", "e", None)
    np.testing.assert_allclose(np.asarray(out).reshape(want.shape), want, rtol=1e-5, atol=1e-5)
    assert re.findall(COLLECTIVES, text).count("all-to-all") == 1  # two devices: everything goes


@pytest.mark.parametrize("mode", ["mxfp4", pytest.param("affine", marks=weekly)])
def test_explicit_quantized(rng, mode):
    args = ep.problem(rng, T, d=64, f=32)
    (index, *_) = ep.indices(rng, T, 2)
    run = ep.pulled_to_x(ep.layer)
    of = SHARDED["d, e"]

    def placed(args, index, ct):
        with jax.set_mesh(mesh("de")):
            return run(*sharded(args, index, of), put(ct, of[0]))

    ep.assert_quantized(placed, args, index, mode)


@weekly
def test_explicit_second_derivative(rng):
    args = ep.problem(rng, T)
    (index, *_) = ep.indices(rng, T, 2)

    def hvp(args, index):
        loss = lambda args: jnp.sin(ep.layer(args, index, transport="all_to_all")).sum()
        return jax.jvp(jax.grad(loss), (args,), (args,))[1]

    want = jax.jit(hvp)(args, index)
    with jax.set_mesh(mesh("de")):
        got = jax.jit(hvp)(*sharded(args, index, SHARDED["d, e"]))
    for operand, of in got.items():
        np.testing.assert_allclose(of, want[operand], rtol=1e-4, atol=1e-4)


@weekly
def test_explicit_recipe(rng):
    """Every device has random numbers of its own; errors are as large as those of one device."""
    args = ep.problem(rng, 64, dtype="bfloat16", d=64, f=32)
    (index, *_) = ep.indices(rng, 64, 2)

    def gradient(args, index, key=None, **options):
        return jax.grad(lambda a: (ep.layer(a, index, key=key, **options) ** 2).mean())(args)

    want = gradient(args, index)
    f = functools.partial(gradient, recipe=jgg.NVFP4Recipe())
    alone = jax.jit(f)(args, index, jax.random.key(0))
    with jax.set_mesh(mesh("de")):
        f = functools.partial(f, transport="all_to_all")
        got = jax.jit(f)(*sharded(args, index, SHARDED["d, e"]), put(jax.random.key(0), P()))
    for operand, of in want.items():
        errors = [np.linalg.norm(oracle.f64(g[operand]) - oracle.f64(of)) for g in (got, alone)]
        assert 0 < errors[0] < 1.5 * errors[1], (operand, errors)


@pytest.mark.parametrize("transport", [pytest.param(n, marks=weekly) for n in ep.TRANSPORTS])
def test_shard_map_of_one_axis(rng, transport):
    """A user's, over the expert axis; tokens are explicitly sharded along another. JAX does not
    transpose a shard_map in a shard_map, so there is no gradient."""
    args = ep.problem(rng, T)
    (index, *_) = ep.indices(rng, T, 2)
    want = ep.layer(args, index)
    local = functools.partial(ep.layer, axis_name="e", transport=transport)
    mapped = jax.shard_map(
        local, mesh=mesh("de"), axis_names={"e"}, in_specs=(P("e"), P("e")), out_specs=P("e")
    )
    with jax.set_mesh(mesh("de")):
        given = sharded(args, index, (P(("e", "d")), *[EXPERTS] * 4))
        got = jax.jit(mapped)(*given)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transport", [pytest.param(n, marks=weekly) for n in ep.TRANSPORTS])
def test_shard_map_of_two_axes(rng, transport):
    """Data and experts, with rounds of their own for each group of devices that share tokens."""
    args, ct = ep.problem(rng, T), oracle.random(rng, (T, D))
    flat = mesh_of((2, 4), ("d", "e"), AxisType.Auto)
    index = np.array(ep.anywhere(rng, (T, K), 4))
    index[: T // 2] = 7  # the first half of data: all to one device
    index = jnp.asarray(index, jnp.int32)
    both = P(("d", "e"))
    specs = {name: both if name in ("x", "weight") else EXPERTS for name in NAMES}
    mapped = jax.shard_map(
        functools.partial(ep.layer, axis_name="e", transport=transport), mesh=flat,
        in_specs=(specs, both), out_specs=both,
    )  # fmt: skip
    got, want = ep.pulled(mapped)(args, index, ct), ep.one_device()(args, index, ct)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


@weekly
@pytest.mark.parametrize("name", ["e", "d, e"])
def test_auto(rng, name):
    """The layer sees no sharding, so no token travels to its experts: the values are right."""
    args, ct = ep.problem(rng, T), oracle.random(rng, (T, D))
    specs, run = SHARDED[name], ep.pulled(ep.layer)
    with jax.set_mesh(mesh_of_twos(("d", "e", "m"), AxisType.Auto, names_in(specs))):
        for index in ep.indices(rng, T, 2)[:2]:
            given = sharded(args, index, specs)
            got = run(*given, put(ct, specs[0]))
            want = ep.one_device()(args, index, ct)
            for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


def test_errors(rng):
    args = ep.problem(rng, T)
    (index, *_) = ep.indices(rng, T, 2)
    with jax.set_mesh(mesh("dem")):
        given = sharded(args, index, (P("e"), *[P(("e", "m"))] * 4))
        message = (
            "jgg.moe_mlp: experts are sharded over ('e', 'm'), but tokens over ('e',) of them "
            "only. Shard tokens over all of them, or over none, with jax.sharding.reshard."
        )
        oracle.assert_raises(lambda: ep.layer(*given), ValueError, message)
        given = sharded(args, index, (P(("e", "d")), *[P(("e", "m"))] * 4))
        mapped = jax.shard_map(
            functools.partial(ep.layer, axis_name="e"), mesh=mesh("dem"), axis_names={"e"},
            in_specs=(P("e"), P("e")), out_specs=P("e"),
        )  # fmt: skip
        message = (
            "jgg.moe_mlp: axis_name='e' says where experts are, but they are sharded over ('m',), "
            "too. Leave one of them out."
        )
        oracle.assert_raises(lambda: mapped(*given), ValueError, message)
