"""``moe_mlp`` with experts on several devices, in ``shard_map``: against one device and float64."""

import functools
import re

import expert_parallel as ep
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from expert_parallel import TOKENS, K
from jax.sharding import PartitionSpec as P
from meshes import COLLECTIVES

import jax_groupgemm as jgg
from jax_groupgemm._moe import expert_parallel, transport

weekly = pytest.mark.weekly


@functools.cache
def program(devices: int, name: str, **options):
    return ep.pulled(ep.across(devices, transport=name, **options))


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        (4, "gather"), (8, "all_to_all"), pytest.param(2, "gather", marks=weekly),
        pytest.param(2, "all_to_all", marks=weekly), pytest.param(4, "all_to_all", marks=weekly),
        pytest.param(8, "gather", marks=weekly),
    ],
)  # fmt: skip
def test_values_and_gradients(rng, devices, name):
    """Every routing; twice, to the last bit."""
    tokens = TOKENS * devices
    args, ct = ep.problem(rng, tokens), oracle.random(rng, (tokens, ep.D))
    run = program(devices, name)
    for index in ep.indices(rng, tokens, devices):
        got = run(args, index, ct)
        ep.assert_like_float64(got, args, index, ct)
        for one, other in zip(
            jax.tree.leaves(got), jax.tree.leaves(ep.one_device()(args, index, ct)), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        ep.assert_equal(run(args, index, ct), got)


def test_axis_of_one_device(rng):
    """It is the local layer, and nothing travels."""
    args, ct = ep.problem(rng, TOKENS), oracle.random(rng, (TOKENS, ep.D))
    (index, *_) = ep.indices(rng, TOKENS, 1)
    run = ep.pulled(ep.across(1))
    ep.assert_equal(run(args, index, ct), ep.one_device()(args, index, ct))
    assert not re.findall(COLLECTIVES, run.lower(args, index, ct).compile().as_text())


def test_transports_agree_to_the_last_bit(rng):
    """In bfloat16, where every order of a sum gives another result."""
    devices, tokens = 4, TOKENS * 4
    args = ep.problem(rng, tokens, dtype="bfloat16")
    ct = oracle.random(rng, (tokens, ep.D), "bfloat16")
    for index in ep.indices(rng, tokens, devices)[:3]:
        got = [program(devices, name)(args, index, ct) for name in ep.TRANSPORTS]
        ep.assert_equal(*got)
        ep.assert_like_float64(got[0], args, index, ct, tolerance=0.03)


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        (8, "gather"), (8, "all_to_all"), pytest.param(4, "gather", marks=weekly),
        pytest.param(4, "all_to_all", marks=weekly), pytest.param(2, "all_to_all", marks=weekly),
    ],
)  # fmt: skip
def test_tokens_that_devices_do_not_divide(rng, devices, name):
    """13, with others behind them that meet no expert: of one device, a part of it or all of it.
    What stands there changes nothing, and has no gradient."""
    tokens = 13
    more = -tokens % devices
    args, ct = ep.problem(rng, tokens), oracle.random(rng, (tokens, ep.D))
    add = lambda a, value: jnp.pad(a, ((0, more), (0, 0)), constant_values=value)
    padded = {n: add(a, 3.0) if n in ("x", "weight") else a for n, a in args.items()}
    run = program(devices, name)
    for index in ep.indices(rng, tokens, devices):
        y, grads = run(padded, add(index, -1), add(ct, 3.0))
        for n in ("x", "weight"):
            assert not np.asarray(grads[n][tokens:]).any()
            grads[n] = grads[n][:tokens]
        assert not np.asarray(y[tokens:]).any()
        got = y[:tokens], grads
        ep.assert_like_float64(got, args, index, ct)
        for one, other in zip(
            jax.tree.leaves(got), jax.tree.leaves(ep.one_device()(args, index, ct)), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_many_rounds(rng, monkeypatch):
    """A chunk of one token: as many rounds as the fullest pair of devices has tokens."""
    monkeypatch.setattr(expert_parallel, "chunk_of", lambda *_: 1)
    tokens = TOKENS * 4
    args = ep.problem(rng, tokens)
    run, one = jax.jit(ep.across(4, transport="all_to_all")), jax.jit(ep.layer)
    for index in ep.indices(rng, tokens, 4):
        np.testing.assert_allclose(run(args, index), one(args, index), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["all_to_all", pytest.param("gather", marks=weekly)])
def test_room_for_fewer_rows(rng, name):
    """Where every device has room nothing changes. Where one has none, all results are NaN."""
    tokens = TOKENS * 4
    args, ct = ep.problem(rng, tokens), oracle.random(rng, (tokens, ep.D))
    run = program(4, name, max_rows=tokens - 1)
    each = jnp.full((tokens, K), -1).at[:, 0].set(5)  # a pair of each token, on the third device
    got = run(args, each.at[0].set(-1), ct)
    want = ep.one_device()(args, each.at[0].set(-1), ct)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    # Two pairs of half as many tokens: there is room for tokens, but not for pairs.
    pairs = jnp.full((tokens, K), -1).at[::2, :2].set(jnp.array([4, 5]))
    for index in (each, pairs):
        y, grads = run(args, index, ct)
        assert np.isnan(y).all()
        assert np.isnan(grads["x"][::2]).all()
        assert np.isnan(grads["weight"][::2, 0]).all()
        assert np.isnan(grads["up"][5]).all()
        assert jgg.route(index, 2, expert_offset=4, max_rows=tokens - 1).overflow == 1


@pytest.mark.parametrize("name", ["gather", pytest.param("all_to_all", marks=weekly)])
def test_forward_mode_and_second_order(rng, name):
    tokens = TOKENS * 2
    args = ep.problem(rng, tokens)
    (index, *_) = ep.indices(rng, tokens, 2)
    tangents = jax.tree.map(lambda a: oracle.random(rng, a.shape), args)

    def twice(f):
        gradient = jax.grad(lambda args: jnp.sin(f(args, index)).sum())
        return jax.jit(lambda args: jax.jvp(gradient, (args,), (tangents,)))

    got, want = (twice(f)(args) for f in (ep.across(2, transport=name), ep.layer))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("inside", "gather"), pytest.param("outside", "gather", marks=weekly),
        pytest.param("inside", "all_to_all", marks=weekly),
        pytest.param("outside", "all_to_all", marks=weekly),
    ],
)  # fmt: skip
def test_vmap(rng, where, name):
    """A batch of routings and tokens that shares its experts."""
    tokens = TOKENS * 2
    args = ep.problem(rng, tokens)
    many = jnp.stack(ep.indices(rng, tokens, 2)[:3])
    batch = {**args, "x": jnp.stack([args["x"], -args["x"], args["x"] / 2])}
    axes = ({n: 0 if n == "x" else None for n in args}, 0)
    if where == "outside":
        f = jax.vmap(ep.across(2, transport=name), axes)
    else:
        local = functools.partial(ep.layer, axis_name="e", transport=name)
        specs = {n: P(None, "e") if n == "x" else P("e") for n in args}
        f = jax.shard_map(
            jax.vmap(local, axes), mesh=ep.mesh_of(2), in_specs=(specs, P(None, "e")),
            out_specs=P(None, "e"),
        )  # fmt: skip
    loss = lambda f: lambda args, index: jnp.sin(f(args, index)).sum()
    got = jax.jit(jax.value_and_grad(loss(f)))(batch, many)
    want = jax.jit(jax.value_and_grad(loss(jax.vmap(ep.layer, axes))))(batch, many)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ep.TRANSPORTS)
def test_types_of_a_batch(rng, name):
    """A vmap around the devices' program, and its gradient."""
    args, tokens = ep.problem(rng, TOKENS * 2), TOKENS * 2
    f = jax.vmap(ep.across(2, transport=name), (None, 0))
    loss = lambda args, index: f(args, index).sum()
    index = jax.ShapeDtypeStruct((3, tokens, K), jnp.int32)
    assert jax.eval_shape(f, args, index).shape == (3, tokens, ep.D)
    grads = jax.eval_shape(jax.grad(loss), args, index)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, args)


@pytest.mark.parametrize("devices", [2, 5])
def test_each_device_once(rng, devices):
    """A token goes to a device once, however many of its experts are there; ``devices`` is none."""
    owner = rng.integers(0, devices + 1, (50, 4))
    got = np.asarray(transport._once(jnp.asarray(owner), devices))
    assert got.shape == (50, min(4, devices))
    for row, given in zip(got, owner, strict=True):
        assert [*row[row < devices]] == sorted({*given} - {devices})


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="XLA 0.11's compiler dies of it")
def test_no_tokens(rng):
    args, ct = ep.problem(rng, 0), jnp.zeros((0, ep.D))

    def local(args, index, ct):
        layer = functools.partial(ep.layer, index=index, axis_name="e")
        y, pull = jax.vjp(layer, args)
        # XLA refuses a shard_map that uses nothing but empty arrays.
        return y, pull(ct)[0], args["down_bias"] + 1

    y, grads, _ = jax.jit(
        jax.shard_map(local, mesh=ep.mesh_of(2), in_specs=P("e"), out_specs=P("e"))
    )(args, jnp.zeros((0, K), jnp.int32), ct)
    assert y.shape == (0, ep.D)
    assert grads["up"].shape == args["up"].shape
    assert not any(np.asarray(grad).any() for grad in jax.tree.leaves(grads))


@pytest.mark.parametrize("mode", ["mxfp4", pytest.param("affine", marks=weekly)])
def test_quantized(rng, mode):
    """Leaves are sharded along the experts; x has its gradient."""
    tokens = TOKENS * 4
    (index, *_) = ep.indices(rng, tokens, 4)
    args = ep.problem(rng, tokens, d=64, f=32)
    ep.assert_quantized(ep.pulled_to_x(ep.across(4)), args, index, mode)


@pytest.mark.parametrize("name", [pytest.param(n, marks=weekly) for n in ep.TRANSPORTS])
def test_composed_layer(rng, name):
    """Other public operations between sending and collecting."""
    tokens = TOKENS * 2
    args, ct = ep.problem(rng, tokens), oracle.random(rng, (tokens, ep.D))
    (index, *_) = ep.indices(rng, tokens, 2)
    got = program(2, name, implementation="composed")(args, index, ct)
    ep.assert_like_float64(got, args, index, ct)


@weekly
def test_recipe(rng):
    """Which quantizes the tokens that arrived: an error that is NVFP4's, in x's gradient, too."""
    tokens = 16 * 2
    args = ep.problem(rng, tokens, dtype="bfloat16", d=64, f=32)
    (index, *_) = ep.indices(rng, tokens, 2)
    ct = oracle.random(rng, (tokens, 64), "bfloat16")
    recipe = jgg.NVFP4Recipe(stochastic_rounding=False, hadamard=False)
    got = ep.pulled_to_x(ep.across(2, recipe=recipe))(args, index, ct)
    want = ep.pulled_to_x(ep.layer)(args, index, ct)
    for one, other in zip(got, want, strict=True):
        error = np.linalg.norm(oracle.f64(one) - oracle.f64(other))
        assert 1e-3 < error / np.linalg.norm(oracle.f64(other)) < 0.4


# ---- what travels, and what is kept ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("gather", ["all-gather"] * 3 + ["all-to-all"]),
        pytest.param("all_to_all", None, marks=weekly),
    ],
)
def test_weights_do_not_travel(rng, name, forward):
    tokens = TOKENS * 4
    args, ct = ep.problem(rng, tokens), oracle.random(rng, (tokens, ep.D))
    (index, *_) = ep.indices(rng, tokens, 4)
    f = jax.jit(ep.across(4, transport=name))
    found = sorted(re.findall(COLLECTIVES, f.lower(args, index).compile().as_text()))
    if forward is None:
        assert set(found) == {"all-gather", "all-reduce", "all-to-all"}
    else:
        assert found == forward
    text = program(4, name).lower(args, index, ct).compile().as_text()
    moved = [line for line in text.splitlines() if re.search(COLLECTIVES, line)]
    assert moved
    of_weights = rf"\[(\d+,)*({2 * ep.F}|{ep.F})[,\]]"
    assert not [line for line in moved if re.search(of_weights, re.split(COLLECTIVES, line)[0])]


@pytest.mark.parametrize("name", ep.TRANSPORTS)
def test_tokens_of_others_are_not_kept(rng, name):
    """The backward pass has x of this device, h, the routing and weights; it sends x again."""
    tokens = TOKENS * 4
    args = ep.problem(rng, tokens)
    (index, *_) = ep.indices(rng, tokens, 4)
    f = ep.across(4, transport=name)
    kept = jax.eval_shape(lambda args: jax.vjp(lambda args: f(args, index), args)[1], args)
    shapes = [leaf.shape for leaf in jax.tree.leaves(kept)]
    rows = 4 * tokens * K
    assert (rows, 2 * ep.F) in shapes
    wide = [shape for shape in shapes if shape[0] > tokens and shape[-1] == ep.D]
    assert not wide


def test_which_transport():
    """Half of the devices, or more, and all of the tokens might as well go everywhere."""
    share = expert_parallel.share_of_devices
    rng = np.random.default_rng(0)
    for k, experts, devices in ((8, 32, 4), (8, 16, 8), (2, 1, 8), (8, 2, 64)):
        drawn = [
            len({e // experts for e in rng.choice(experts * devices, k, replace=False)})
            for _ in range(2000)
        ]
        assert share(k, experts, devices) == pytest.approx(np.mean(drawn) / devices, rel=0.05)
    assert share(3, 2, 1) == 1  # more than there are
    assert share(8, 32, 4) == pytest.approx(0.9, abs=0.02)

    def chosen(k, experts, devices, tokens=1 << 14):
        index = jnp.zeros((devices * tokens, k), jnp.int32)
        found = []

        def local(index):
            axis = expert_parallel.Axis("e")
            found.append(expert_parallel.arrive(index, None, experts, axis, None).plan)
            return index

        jax.eval_shape(
            jax.shard_map(local, mesh=ep.mesh_of(devices), in_specs=P("e"), out_specs=P("e")),
            index,
        )
        return type(found[0])

    assert chosen(8, 16, 4) is transport.Gather
    assert chosen(1, 1, 8) is transport.Exchange
    assert chosen(2, 1, 2) is transport.Gather
    # Few tokens: rounds take longer than all of them.
    assert chosen(1, 1, 8, 1300) is transport.Gather
    assert chosen(1, 1, 8, 1400) is transport.Exchange


# ---- errors ----------------------------------------------------------------------------------


def test_errors(rng):
    args = ep.problem(rng, TOKENS * 2)
    (index, *_) = ep.indices(rng, TOKENS * 2, 2)
    message = "jgg.moe_mlp: transport='ring' is not 'gather' or 'all_to_all'"
    oracle.assert_raises(lambda: ep.layer(args, index, transport="ring"), ValueError, message)
    message = "jgg.moe_mlp: axis_name='e' is no axis of a jax.shard_map around this call"
    oracle.assert_raises(lambda: ep.layer(args, index, axis_name="e"), ValueError, message)
    message = (
        "jgg.moe_mlp: axis_name='e' is an axis of a jax.vmap, and experts are on devices: name a "
        "mesh axis of a jax.shard_map around this call"
    )
    for name in ep.TRANSPORTS:
        batch = jax.tree.map(lambda a: jnp.stack([a, a]), (args, index))
        run = jax.vmap(functools.partial(ep.layer, axis_name="e", transport=name), axis_name="e")
        oracle.assert_raises(lambda run=run, batch=batch: run(*batch), ValueError, message)
    message = (
        "jgg.moe_mlp: with axis_name, expert_index holds experts of all devices and each device "
        "knows which are its own. Leave out expert_offset."
    )
    run = ep.across(2, expert_offset=jnp.int32(0))
    oracle.assert_raises(lambda: run(args, index), ValueError, message)
