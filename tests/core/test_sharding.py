"""Sharding on four devices (virtual ones on CPU), or two: user shard_map, Auto and Explicit.
Collectives are read from the compiled HLO."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, collectives, mesh_of, needs_two_devices

import jax_groupgemm as jgg

pytestmark = needs_two_devices

T, K, N, G = 32, 16, 24, 4
SIZES = np.array([9, 0, 11, 7], np.int32)


@pytest.fixture
def problem(rng):
    return oracle.random(rng, (T, K)), oracle.random(rng, (G, K, N)), jnp.asarray(SIZES)


def loss(x, w, sizes):
    return jnp.sin(jgg.grouped_mm(x, w, sizes)).sum()


def want_grads(x, w, sizes):
    ct = np.cos(oracle.grouped_mm(x, w, sizes))
    return oracle.grouped_mm_grads(x, w, sizes, ct)


# ---- user shard_map --------------------------------------------------------------------------


# Expert parallel, each device a shard of the experts; data parallel; columns; contracted.
def expert_parallel(x, w, sizes):
    offset = jax.lax.axis_index("d") * w.shape[0]
    return jax.lax.psum(jgg.grouped_mm(x, w, sizes, group_offset=offset), "d")


def contracted(x, w, sizes):
    return jax.lax.psum(jgg.grouped_mm(x, w, sizes), "d")


SHARD_MAPS = {
    "columns": (jgg.grouped_mm, (P(), P(None, None, "d"), P()), P(None, "d")),
    "experts": (expert_parallel, (P(), P("d"), P()), P()),
    "contracted": (contracted, (P(None, "d"), P(None, "d"), P()), P()),
    "replicated": (jgg.grouped_mm, (P(), P(), P()), P()),
}


@pytest.mark.parametrize("name", SHARD_MAPS)
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.one_in(5)
def test_shard_map(problem, name, partial):
    """With check_vma: right specs pass, and gradients of replicated operands are summed."""
    body, in_specs, out_specs = SHARD_MAPS[name]
    mesh = (
        mesh_of((2, DEVICES // 2), ("d", "e"), AxisType.Auto)
        if partial
        else mesh_of((DEVICES,), ("d",), AxisType.Auto)
    )
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={"d"}, check_vma=True
    )
    x, w, sizes = problem
    oracle.assert_close(jax.jit(mapped)(x, w, sizes), oracle.grouped_mm(x, w, sizes))
    grads = jax.jit(jax.grad(lambda x, w: jnp.sin(mapped(x, w, sizes)).sum(), (0, 1)))(x, w)
    for got, want in zip(grads, want_grads(x, w, sizes), strict=True):
        oracle.assert_close(got, want)


def test_shard_map_data_parallel(rng):
    """Each device has its own rows and sizes; the weights' gradient is summed automatically."""
    x, w = oracle.random(rng, (DEVICES * 8, K)), oracle.random(rng, (G, K, N))
    sizes = jnp.array([[1, 1, 2, 0], [4, 0, 0, 4], [0, 0, 0, 0], [1, 1, 1, 1]][:DEVICES])
    mapped = jax.shard_map(
        lambda x, w, s: jgg.grouped_mm(x, w, s[0]), mesh=mesh_of((DEVICES,), ("d",), AxisType.Auto),
        in_specs=(P("d"), P(), P("d")), out_specs=P("d"),
    )  # fmt: skip
    out = jax.jit(mapped)(x, w, sizes)
    dw = jax.jit(jax.grad(lambda w: jnp.sin(mapped(x, w, sizes)).sum()))(w)
    want_dw = np.zeros(w.shape)
    for i in range(DEVICES):
        rows = slice(8 * i, 8 * i + 8)
        oracle.assert_close(out[rows], oracle.grouped_mm(x[rows], w, sizes[i]))
        want_dw += want_grads(x[rows], w, sizes[i])[1]
    oracle.assert_close(dw, want_dw)


def test_shard_map_rejects_wrong_out_specs(problem):
    mesh = mesh_of((DEVICES,), ("d",), AxisType.Auto)
    mapped = jax.shard_map(
        jgg.grouped_mm, mesh=mesh, in_specs=(P(), P(None, None, "d"), P()), out_specs=P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(mapped)(*problem)


@pytest.mark.parametrize("name", ["segmented_mm", "gather_mm", "ragged_dot", "epilogue"])
def test_shard_map_of_other_ops(rng, name):
    mesh = mesh_of((DEVICES,), ("d",), AxisType.Auto)
    if name == "segmented_mm":
        args = (
            oracle.random(rng, (8, 30)),
            oracle.random(rng, (30, 12)),
            jnp.array([[0, 9], [5, 30]]),
        )
        f, specs, out = jgg.segmented_mm, (P("d"), P(), P()), P(None, "d")
    elif name == "gather_mm":
        args = oracle.random(rng, (8, 1, 6)), oracle.random(rng, (3, 6, 4)), jnp.arange(8) % 3
        f, specs, out = (
            (lambda a, b, i: jgg.gather_mm(a, b, None, i)),
            (P("d"), P(), P("d")),
            P("d"),
        )
    elif name == "ragged_dot":
        args = oracle.random(rng, (8, 6)), oracle.random(rng, (3, 6, 8)), jnp.array([3, 0, 4])
        f, specs, out = jgg.ragged_dot, (P(), P(None, None, "d"), P()), P(None, "d")
    else:
        args = oracle.random(rng, (8, 6)), oracle.random(rng, (3, 6, 8)), jnp.array([3, 0, 4])
        f = lambda x, w, s: jgg.grouped_mm(
            x, w, s, bias=w[:, 0], activation="gelu", row_scale=x[:, 0]
        )
        specs, out = (P(), P(None, None, "d"), P()), P(None, "d")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out)
    oracle.assert_close(jax.jit(mapped)(*args), f(*args))
    total = lambda f: jax.jit(jax.grad(lambda a, b: jnp.sin(f(a, b, args[2])).sum(), (0, 1)))
    for got, want in zip(total(mapped)(*args[:2]), total(f)(*args[:2]), strict=True):
        # Each is within 1e-6 of float64 or a few of it: activations' derivatives are rounded as
        # XLA vectorizes them, which differs between shapes and processors.
        oracle.assert_close(got, want, tolerance=1e-5)


# ---- Auto and Explicit -----------------------------------------------------------------------

# Specs of x and w; spec of the result; collectives of the product, and of its two gradients.
SHARDED = {
    "N": ((P(), P(None, None, "d")), P(None, "d"), [], ["all-reduce"]),
    "K": ((P(None, "d"), P(None, "d")), P(), ["all-reduce"], ["all-reduce"]),
    "T": ((P("d"), P()), P("d"), [], ["all-reduce"]),
    "G": ((P(), P("d")), P(), ["all-reduce"], ["all-reduce"] * 2),
    "replicated": ((P(), P()), P(), [], []),
}


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.one_in(5)
def test_collectives(problem, kind, name):
    (x_spec, w_spec), out_spec, forward, backward = SHARDED[name]
    mesh = mesh_of((DEVICES,), ("d",), kind)
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    args = put(problem[0], x_spec), put(problem[1], w_spec), put(problem[2], P())
    f, grad = jax.jit(jgg.grouped_mm), jax.jit(jax.grad(loss, (0, 1)))
    with jax.set_mesh(mesh):
        out, grads = f(*args), grad(*args)
        assert collectives(f, *args) == forward
        assert collectives(grad, *args) == backward
        eager = jgg.grouped_mm(*args)
    oracle.assert_close(out, oracle.grouped_mm(*problem))
    oracle.assert_close(eager, oracle.grouped_mm(*problem))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, out_spec), 2)
    for got, want in zip(grads, want_grads(*problem), strict=True):
        oracle.assert_close(got, want)
    if kind == AxisType.Explicit:
        assert jax.typeof(out).sharding.spec == P(*out_spec, *[None] * (2 - len(out_spec)))
        for got, given in zip(grads, args, strict=False):
            assert jax.typeof(got).sharding.spec == jax.typeof(given).sharding.spec


def test_constant_operands(problem):
    """A cotangent of ones, and operands that are closed over."""
    mesh = mesh_of((DEVICES,), ("d",), AxisType.Auto)
    x, w, sizes = problem
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    x, w, sizes = put(x, P()), put(w, P(None, None, "d")), put(sizes, P())
    with jax.set_mesh(mesh):
        dw = jax.jit(jax.grad(lambda w: jgg.grouped_mm(x, w, sizes).sum()))(w)
    oracle.assert_close(dw, oracle.grouped_mm_grads(*problem, np.ones((T, N)))[1])


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.one_in(3)
def test_two_mesh_axes(problem, kind, transpose_w):
    """Rows over one mesh axis, columns over the other: nothing is communicated."""
    mesh = mesh_of((2, DEVICES // 2), ("d", "m"), kind)
    x, w, sizes = problem
    w_spec = P(None, "m") if transpose_w else P(None, None, "m")
    w = w.swapaxes(1, 2) if transpose_w else w
    args = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in ((x, P("d")), (w, w_spec), (sizes, P()))
    ]
    f = jax.jit(functools.partial(jgg.grouped_mm, transpose_w=transpose_w))
    with jax.set_mesh(mesh):
        assert collectives(f, *args) == []
        out = f(*args)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("d", "m")), 2)
    oracle.assert_close(out, oracle.grouped_mm(*problem))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_bfloat16_partial_sums_travel_as_float32(rng, kind):
    mesh = mesh_of((DEVICES,), ("d",), kind)
    x, w = oracle.random(rng, (T, 64), "bfloat16"), oracle.random(rng, (G, 64, N), "bfloat16")
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    args = put(x, P(None, "d")), put(w, P(None, "d")), put(jnp.asarray(SIZES), P())
    f, grad = (
        jax.jit(jgg.grouped_mm),
        jax.jit(jax.grad(lambda x, w, s: jgg.grouped_mm(x, w, s).sum(), (0, 1))),
    )
    with jax.set_mesh(mesh):
        out, grads = f(*args), grad(*args)
        text = grad.trace(*args).jaxpr
    assert out.dtype == "bfloat16"
    single = jgg.grouped_mm(x, w, SIZES)
    assert np.mean(np.asarray(out) == np.asarray(single)) > 0.98
    # The backward products run on bfloat16 operands, not on float32 cotangents.
    assert "f32" not in " ".join(re.findall(r"\w+:(\w+)\[[^]]*\][^=]*= jgg_wgrad", str(text)))
    for got, want in zip(grads, oracle.grouped_mm_grads(x, w, SIZES, np.ones((T, N))), strict=True):
        oracle.assert_close(got, want)


@pytest.mark.parametrize("spec", [P("d"), P(None, "d")])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.one_in(3)
def test_segmented_mm(rng, kind, spec):
    mesh = mesh_of((DEVICES,), ("d",), kind)
    a, b = oracle.random(rng, (8, 32)), oracle.random(rng, (32, 12))
    segments = jnp.array([[0, 9], [5, 32], [30, 2]])
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    columns = spec == P("d")
    args = put(a, spec), put(b, P() if columns else P("d")), put(segments, P())
    f = jax.jit(jgg.segmented_mm)
    with jax.set_mesh(mesh):
        assert collectives(f, *args) == ([] if columns else ["all-reduce"])
        oracle.assert_close(f(*args), oracle.segmented_mm(a, b, segments))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("name", ["A", "K", "N", "G", "replicated"])
@pytest.mark.one_in(5)
def test_gather_mm(rng, kind, m, name):
    mesh = mesh_of((DEVICES,), ("d",), kind)
    a_spec, b_spec = {
        "A": (P("d"), P()),
        "K": (P(None, None, "d"), P(None, "d")),
        "N": (P(), P(None, None, "d")),
        "G": (P(), P("d")),
        "replicated": (P(), P()),
    }[name]
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    a, b = oracle.random(rng, (8, m, 8)), oracle.random(rng, (4, 8, 12))
    lhs, rhs = jnp.array([0, 2, 7, 1]), jnp.array([3, 0, 9, 1])
    args = put(a, a_spec), put(b, b_spec), put(lhs, P()), put(rhs, P())
    with jax.set_mesh(mesh):
        out = jax.jit(jgg.gather_mm)(*args)
        grad = jax.jit(jax.grad(lambda a, b: jgg.gather_mm(a, b, *args[2:]).sum(), (0, 1)))
        grads = grad(*args[:2])
    oracle.assert_close(out, oracle.gather_mm(a, b, lhs, rhs))
    wants = jax.grad(lambda a, b: jgg.gather_mm(a, b, lhs, rhs).sum(), (0, 1))(a, b)
    for got, want in zip(grads, wants, strict=True):
        oracle.assert_close(got, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axes", [(0, None, 0), (0, None, None), (None, 0, None), (None, None, 0)])
@pytest.mark.one_in(5)
def test_vmap(problem, kind, axes):
    """A batch over operands that are sharded along their columns."""
    mesh = mesh_of((DEVICES,), ("d",), kind)
    values = [
        a if d is None else jnp.stack([a, a[::-1]]) for a, d in zip(problem, axes, strict=True)
    ]
    specs = [P(None, None), P(None, None, "d"), P(None)]
    args = [
        jax.device_put(a, NamedSharding(mesh, s if d is None else P(None, *s)))
        for a, s, d in zip(values, specs, axes, strict=True)
    ]
    f = jax.jit(jax.vmap(jgg.grouped_mm, axes))
    with jax.set_mesh(mesh):
        out = f(*args)
        assert collectives(f, *args) == []
    for i in range(2):
        one = [a if d is None else a[i] for a, d in zip(values, axes, strict=True)]
        oracle.assert_close(out[i], oracle.grouped_mm(*one))


def test_sharded_indices(rng):
    """A router's, which are sharded as its tokens."""
    mesh = mesh_of((DEVICES,), ("d",), AxisType.Explicit)
    x, w = oracle.random(rng, (16, K)), oracle.random(rng, (G, K, N))
    with jax.set_mesh(mesh):
        args = jax.device_put(x, NamedSharding(mesh, P("d"))), w
        out = jax.jit(lambda x, w: jgg.gather_mm(x[:, None], w, None, jnp.argmax(x, 1) % G))(*args)
    want = oracle.gather_mm(x[:, None], w, None, np.asarray(jnp.argmax(x, 1)) % G)
    oracle.assert_close(out, want)


def test_explicit_epilogue(problem):
    """Bias, activation, scale and accumulation follow the product's sharding."""
    mesh = mesh_of((2, DEVICES // 2), ("d", "m"), AxisType.Explicit)
    x, w, sizes = problem
    bias, scale, old = w[:, 0], x[:, 0], jnp.ones((T, N))
    f = lambda x, w, s, bias, scale, old: jgg.grouped_mm(
        x, w, s, bias=bias, activation="silu", row_scale=scale, existing_out=old
    )
    want = f(x, w, sizes, bias, scale, old)
    specs = (P("d"), P(None, None, "m"), P(), P(None, "m"), P("d"), P("d", "m"))
    args = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip((x, w, sizes, bias, scale, old), specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        out = jax.jit(f)(*args)
        assert collectives(jax.jit(f), *args) == []
    assert jax.typeof(out).sharding.spec == P("d", "m")
    oracle.assert_close(out, want)


def test_explicit_conflicts_are_errors(problem):
    mesh = mesh_of((2, DEVICES // 2), ("a", "b"), AxisType.Explicit)
    x, w, sizes = problem
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"shards axis K .* another operand shards it over"):
            jgg.grouped_mm(put(x, P(None, "a")), put(w, P(None, "b")), put(sizes, P()))
        with pytest.raises(ValueError, match=r"shards axis N .* already shards another axis"):
            jgg.grouped_mm(put(x, P("a")), put(w, P(None, None, "a")), put(sizes, P()))
        says = (
            r"shards axis G over \('a',\), but that mesh axis already shards another axis of this "
            r"product\. jgg\.moe_mlp is the layer for that: .*; the guide 'Several GPUs'"
        )
        with pytest.raises(ValueError, match=says):
            jgg.grouped_mm(put(x, P("a")), put(w, P("a")), put(sizes, P()))


def test_explicit_conflicts_name_arguments(problem):
    """As the operation's signature and docstring call them and their axes."""
    mesh = mesh_of((2, DEVICES // 2), ("a", "b"), AxisType.Explicit)
    x, w, sizes = problem
    wide, rows = jnp.ones((T, 128)), jnp.ones((T, N))
    q = oracle.random_quantized(np.random.default_rng(0), (G, 8, 128), "mxfp4", 4, 32)
    put = lambda tree, *spec: jax.tree.map(
        lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P(*spec))), tree
    )
    gather = lambda a, b, index: jgg.gather_mm(a, b, index, index)
    last, middle = (None, "a"), (None, "b")
    cases = [
        (jgg.grouped_mm, put(x, *last), put(w, *middle), put(sizes), "grouped_mm: w float", "K"),
        (jgg.ragged_dot, put(x, *last), put(w, *middle), put(sizes), "ragged_dot: rhs floa", "k"),
        (jgg.segmented_mm, put(x.T, *last), put(rows, "b"), put(jnp.ones((1, 2), int)),
         "segmented_mm: b float32", "K"),
        (gather, put(x[None], None, *last), put(w, *middle), put(sizes), "gather_mm: b float", "K"),
        (jgg.grouped_qmm, put(wide, *last), put(q, None, *middle), put(sizes),
         "grouped_qmm: w.weight uint32", "K"),
    ]  # fmt: skip
    with jax.set_mesh(mesh):
        for call, first, second, meta, start, axis in cases:
            with pytest.raises(ValueError, match="another operand shards it over") as caught:
                call(first, second, meta)
            message = str(caught.value)
            assert message.startswith(f"jgg.{start}"), message
            assert f"shards axis {axis} over" in message, message


def test_explicit_one_sided_contraction(problem):
    """Only x is sharded along K: w is cut to match, which costs nothing."""
    mesh = mesh_of((DEVICES,), ("d",), AxisType.Explicit)
    x, w, sizes = problem
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    f = jax.jit(jgg.grouped_mm)
    args = put(x, P(None, "d")), put(w, P()), put(sizes, P())
    with jax.set_mesh(mesh):
        assert collectives(f, *args) == ["all-reduce"]
        oracle.assert_close(f(*args), oracle.grouped_mm(*problem))
