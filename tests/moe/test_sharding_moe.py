"""``moe_mlp`` of sharded operands: Explicit, Auto and a user's shard_map, against one device.
Collectives are read from the compiled HLO."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from expert_parallel import NAMES, layer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import COLLECTIVES, mesh_of, mesh_of_twos, names_in, needs, needs_two_devices

import jax_groupgemm as jgg

T, K, E, D, F = 24, 2, 4, 12, 8
ALL = ("d", "m")
# Specs of x, of up (with gate and up as an axis of its own where it has four entries), of down and
# of both biases; collectives of the forward pass, and of both, where XLA makes one of neighbours.
CUT, ROWS, EXPERTS = P(None, None, None, "m"), P(None, "m"), P("m")
SHARDED = {
    "tokens": ((P("d"), P(), P(), P(), P()), [], ["all-reduce"]),
    "tokens over all": ((P(ALL), P(), P(), P(), P()), [], ["all-reduce"]),
    "F": ((P(), CUT, ROWS, P(None, None, "m"), P()), ["all-reduce"], ["all-reduce"] * 2),
    "F over all": (
        (P(), P(None, None, None, ALL), P(None, ALL), P(None, None, ALL), P()),
        ["all-reduce"], ["all-reduce"] * 2,
    ),
    "F of down only": ((P(), P(), ROWS, P(), P()), ["all-reduce"], None),
    "tokens and F": (
        (P("d"), CUT, ROWS, P(None, None, "m"), P()), ["all-reduce"], ["all-reduce"] * 3
    ),
    "halves": (
        (P(), P(None, None, "m"), ROWS, P(), P()), ["all-reduce", *["collective-permute"] * 2], None
    ),
    "halves over all": ((P(), P(None, None, ALL), P(None, ALL), P(None, ALL), P()), None, None),
    "experts": ((P(), *[EXPERTS] * 4), ["all-reduce"], ["all-reduce"] * 2),
    "tokens and experts": ((P("d"), *[EXPERTS] * 4), ["all-reduce"], ["all-reduce"] * 3),
}  # fmt: skip


def problem(rng, dtype="float32", d=D, f=F):
    """Operands by name, and the experts' indices, some of which are nobody's."""
    shapes = {
        "x": (T, d), "up": (E, d, 2 * f), "down": (E, f, d), "weight": (T, K),
        "up_bias": (E, 2 * f), "down_bias": (E, d),
    }  # fmt: skip
    scale = {"up": d**-0.5, "down": f**-0.5}
    args = {
        name: (oracle.random(rng, shape) * scale.get(name, 1)).astype(dtype)
        for name, shape in shapes.items()
    }
    return args, jnp.asarray(rng.integers(-1, E + 1, (T, K)), jnp.int32)


def loss(args, index, **options):
    return jnp.sin(layer(args, index, **options)).sum()


def put(mesh, a, spec):
    return jax.device_put(a, NamedSharding(mesh, spec))


def sharded(mesh, args, index, specs):
    x, up, down, up_bias, down_bias = specs
    of = dict(zip(NAMES, (x, up, down, x, up_bias, down_bias), strict=True))
    args = dict(args)
    if len(up) == 4:
        args["up"] = args["up"].reshape(E, -1, 2, args["down"].shape[1])
    if len(up_bias) == 3:
        args["up_bias"] = args["up_bias"].reshape(E, 2, -1)
    return {name: put(mesh, a, of[name]) for name, a in args.items()}, put(mesh, index, x)


def compiled(function, *args):
    """A function's program, its text, and the collectives in it."""
    program = jax.jit(function).lower(*args).compile()
    text = program.as_text()
    return program, text, sorted(re.findall(COLLECTIVES, text))


def two_axes(kind, used=ALL):
    """``used``: axes that need two devices each."""
    return mesh_of_twos(ALL, kind, used)


def some(names, daily):
    """The others are weekly: along more axes, or beside those of another test."""
    weekly = pytest.mark.weekly
    return [name if name in daily else pytest.param(name, marks=weekly) for name in names]


DAILY = ("tokens", "F", "F of down only", "tokens and F", "halves over all", "tokens and experts")


@pytest.mark.parametrize("name", some(SHARDED, DAILY))
def test_explicit(rng, name):
    specs, forward, both = SHARDED[name]
    args, index = problem(rng)
    mesh = two_axes(AxisType.Explicit, names_in(specs))
    want, wanted = jax.jit(layer)(args, index), jax.jit(jax.grad(loss))(args, index)
    with jax.set_mesh(mesh):
        given = sharded(mesh, args, index, specs)
        f, _, in_forward = compiled(layer, *given)
        grad, _, in_both = compiled(jax.grad(loss), *given)
        out, grads = f(*given), grad(*given)
    assert forward is None or in_forward == forward
    assert both is None or in_both == both
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, specs[0]), 2)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    for operand, of in grads.items():
        np.testing.assert_allclose(
            np.asarray(of).reshape(wanted[operand].shape), wanted[operand], rtol=1e-5, atol=2e-5
        )
        assert jax.typeof(of).sharding.spec == jax.typeof(given[0][operand]).sharding.spec


@pytest.mark.parametrize("parts", some((2, 3, 4), (3,)))
def test_halves_are_exchanged(rng, parts):
    """Each device's block of gate and up becomes its columns of both, of any number of devices."""
    needs(parts)
    devices = jax.devices()[:parts]
    mesh = jax.make_mesh((parts,), ("m",), axis_types=(AxisType.Explicit,), devices=devices)
    args, index = problem(rng, f=12)
    want = layer(args, index)
    with jax.set_mesh(mesh):
        given = sharded(
            mesh, args, index, (P(), P(None, None, "m"), P(None, "m"), P(None, "m"), P())
        )
        np.testing.assert_allclose(jax.jit(layer)(*given), want, rtol=1e-5, atol=1e-5)


def test_explicit_batches_without_set_mesh(rng):
    """Tokens of two axes, one of them sharded; operands bring their mesh; eager as jitted."""
    args, index = problem(rng)
    want = layer(args, index)
    mesh = two_axes(AxisType.Explicit)
    split = lambda a: a.reshape(4, T // 4, a.shape[-1])
    given = {
        name: put(mesh, split(a), P("d", "m")) if name in ("x", "weight") else put(mesh, a, P())
        for name, a in args.items()
    }
    index = put(mesh, split(index), P())  # cut to match
    for f in (layer, jax.jit(layer)):
        out = f(given, index)
        assert jax.typeof(out).sharding.spec == P("d", "m", None)
        np.testing.assert_allclose(np.asarray(out).reshape(want.shape), want, rtol=1e-5, atol=1e-5)


def test_explicit_ungated_and_transposed(rng):
    args, index = problem(rng)
    args["up"] = args["up"].swapaxes(1, 2)
    args["down"] = args["down"].swapaxes(1, 2)
    run = functools.partial(layer, transpose_w=True)
    want = run(args, index)
    mesh = two_axes(AxisType.Explicit)
    with jax.set_mesh(mesh):
        given, where = sharded(mesh, args, index, (P("d"), P(), P(None, None, "m"), P(), P()))
        given["up"] = put(mesh, args["up"].reshape(E, 2, F, D), P(None, None, "m"))
        np.testing.assert_allclose(jax.jit(run)(given, where), want, rtol=1e-5, atol=1e-5)
    args["up"], args["up_bias"] = args["up"][:, :F], args["up_bias"][:, :F]
    run = functools.partial(layer, transpose_w=True, activation="relu2")
    want = run(args, index)
    with jax.set_mesh(mesh):
        specs = (P("d"), P(None, "m"), P(None, None, "m"), P(None, "m"), P())
        given = sharded(mesh, args, index, specs)
        f, _, found = compiled(run, *given)
        assert found == ["all-reduce"]
        np.testing.assert_allclose(f(*given), want, rtol=1e-5, atol=1e-5)


def test_partial_sums_travel_as_float32(rng):
    args, index = problem(rng, "bfloat16")
    want = layer(args, index)
    mesh = two_axes(AxisType.Explicit, names_in(SHARDED["F"][0]))
    with jax.set_mesh(mesh):
        given = sharded(mesh, args, index, SHARDED["F"][0])
        f, text, _ = compiled(layer, *given)
        out = f(*given)
    assert out.dtype == jnp.bfloat16
    assert re.search(r"= f32\[24,12\]\S* all-reduce\(", text)
    oracle.assert_close(out, oracle.f64(want), tolerance=0.02)


def test_room_for_fewer_rows(rng):
    """``max_rows`` is of each device: where its tokens need more, they are NaN."""
    args, index = problem(rng)
    index = jnp.where(jnp.arange(T)[:, None] < T // 2, 1, -1)  # all are the first device's
    index = jnp.broadcast_to(index, (T, K)).astype(jnp.int32)
    mesh = two_axes(AxisType.Explicit, names_in(SHARDED["tokens"][0]))
    with jax.set_mesh(mesh):
        given = sharded(mesh, args, index, SHARDED["tokens"][0])
        for rows, enough in ((T // 2 * K, True), (T // 2 * K - 1, False)):
            out = np.asarray(jax.jit(functools.partial(layer, max_rows=rows))(*given))
            assert np.isfinite(out[: T // 2]).all() == enough
            assert np.isfinite(out[T // 2 :]).all()


@pytest.mark.parametrize("mode", ["mxfp4", "affine"])
@pytest.mark.parametrize("name", ["F", "tokens and F", "experts"])
@pytest.mark.one_in(3)
def test_explicit_quantized(rng, mode, name):
    args, index = problem(rng, d=64, f=128)
    specs = {
        "F": (P(), P(None, "m"), P(None, None, "m"), P(), P()),
        "tokens and F": (P("d"), P(None, "m"), P(None, None, "m"), P(), P()),
        "experts": (P(), *[EXPERTS] * 4),
    }[name]
    for operand in ("up", "down"):
        shape = args[operand].swapaxes(1, 2).shape
        args[operand] = oracle.random_quantized(rng, shape, mode, group_size=32)
    want = layer(args, index)
    mesh = two_axes(AxisType.Explicit, names_in(specs))
    with jax.set_mesh(mesh):
        of = dict(zip(NAMES, (*specs[:3], specs[0], *specs[3:]), strict=True))
        given = {
            n: jax.tree.map(lambda leaf, s=of[n]: put(mesh, leaf, s), a) for n, a in args.items()
        }
        out = jax.jit(layer)(given, put(mesh, index, specs[0]))
    oracle.assert_close(out, oracle.f64(want), tolerance=1e-5)


@pytest.mark.weekly
def test_explicit_recipe(rng):
    """Every device quantizes what it has, with random numbers of its own."""
    args, index = problem(rng, "bfloat16", d=64, f=64)
    recipe = jgg.NVFP4Recipe()
    run = functools.partial(loss, recipe=recipe)
    want = jax.grad(loss)(args, index)
    mesh = two_axes(AxisType.Explicit)
    with jax.set_mesh(mesh):
        given = sharded(mesh, args, index, SHARDED["tokens and F"][0])
        key = put(mesh, jax.random.key(0), P())
        got = jax.jit(jax.grad(lambda a, i, k: run(a, i, key=k)))(*given, key)
    for operand, grad in got.items():
        wanted = oracle.f64(want[operand])
        error = np.linalg.norm(oracle.f64(grad).reshape(wanted.shape) - wanted)
        assert 1e-3 < error / np.linalg.norm(wanted) < 0.6, operand


def test_explicit_second_derivative(rng):
    args, index = problem(rng)
    mesh = two_axes(AxisType.Explicit)
    hvp = lambda args, index: jax.jvp(jax.grad(lambda a: loss(a, index)), (args,), (args,))[1]
    want = jax.jit(hvp)(args, index)
    specs = (P("d"), P(), P(None, "m"), P(), P())
    with jax.set_mesh(mesh):
        got = jax.jit(hvp)(*sharded(mesh, args, index, specs))
    for operand, of in got.items():
        np.testing.assert_allclose(of, want[operand], rtol=1e-4, atol=1e-4)


def test_explicit_conflicts_are_errors(rng):
    args, index = problem(rng)
    mesh = two_axes(AxisType.Explicit)
    cases = [
        ((P(), P(None, "d"), P(), P(), P()), r"up f.* shards D over \('d',\), but this layer has"),
        (
            (P("d"), P(None, None, "d"), P(None, "d"), P(), P()),
            r"shards F over .* that mesh axis shards tokens, too",
        ),
        ((P(), P(None, None, "d"), P(None, "m"), P(), P()), r"another operand shards it over"),
        ((P(), P(None, None, "d", None), P(), P(), P()), "shards gate and up over"),
        ((P(None, "m"), P(), P(), P(), P()), "x f.* shards D over"),
    ]
    with jax.set_mesh(mesh):
        for specs, message in cases:
            given, where = sharded(mesh, args, index, (P(), *specs[1:]))
            given["x"] = put(mesh, args["x"], specs[0])
            with pytest.raises(ValueError, match=message) as caught:
                layer(given, where)
            assert str(caught.value).startswith("jgg.moe_mlp: ")
            assert str(caught.value).endswith("Use jax.sharding.reshard first.")


@pytest.mark.parametrize("name", some(("tokens", "halves", "tokens and experts"), ("halves",)))
def test_auto(rng, name):
    """XLA divides what the layer is made of: the values are right, whatever it costs."""
    args, index = problem(rng)
    mesh = two_axes(AxisType.Auto, names_in(SHARDED[name][0]))
    want, wanted = layer(args, index), jax.grad(loss)(args, index)
    with jax.set_mesh(mesh):
        given = sharded(mesh, args, index, SHARDED[name][0])
        out, grads = jax.jit(layer)(*given), jax.jit(jax.grad(loss))(*given)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    for operand, of in grads.items():
        np.testing.assert_allclose(of, wanted[operand], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", some(("tokens", "F", "tokens and F"), ("tokens and F",)))
def test_shard_map(rng, name):
    """A user's, over an Auto mesh. Sums are of tokens, never of their pairs with experts."""
    specs, forward, both = SHARDED[name]
    args, index = problem(rng)
    mesh = two_axes(AxisType.Auto, names_in(specs))
    want, wanted = layer(args, index), jax.grad(loss)(args, index)
    given = sharded(mesh, args, index, specs)
    x, up, down, up_bias, down_bias = specs
    of = dict(zip(NAMES, (x, up, down, x, up_bias, down_bias), strict=True))
    divided = len(up) == 4

    def local(args, index):
        if divided:  # down's bias is added once
            first = jax.lax.axis_index("m") == 0
            args = {**args, "down_bias": jnp.where(first, args["down_bias"], 0)}
        y = layer(args, index)
        return jax.lax.psum(y, "m") if divided else y

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(of, x), out_specs=x)
    f, _, in_forward = compiled(mapped, *given)
    grad, text, in_both = compiled(
        jax.grad(lambda args, index: jnp.sin(mapped(args, index)).sum()), *given
    )
    assert in_forward == forward
    assert in_both == both
    sums = [line for line in text.splitlines() if " all-reduce(" in line]
    rows = T * K // (2 if name != "F" else 1)
    assert sums or jax.default_backend() != "cpu"  # elsewhere they may be called otherwise
    assert not any(f"[{rows}," in line.split(" all-reduce(")[0] for line in sums)
    np.testing.assert_allclose(f(*given), want, rtol=1e-5, atol=1e-5)
    for operand, got in grad(*given).items():
        np.testing.assert_allclose(
            np.asarray(got).reshape(wanted[operand].shape), wanted[operand], rtol=1e-5, atol=2e-5
        )


@needs_two_devices
@pytest.mark.weekly
def test_prepacked_weights(rng):
    """They are whole on every device, or divided by expert."""
    mesh = mesh_of((2,), ("d",), AxisType.Explicit)
    put = lambda tree, *spec: jax.tree.map(
        lambda a: jax.device_put(a, NamedSharding(mesh, P(*spec[: a.ndim]))), tree
    )
    f = jgg.prepack(jgg.quantize(oracle.random(rng, (E, 128, 64), "bfloat16")))
    down = jgg.prepack(jgg.quantize(oracle.random(rng, (E, 64, 64), "bfloat16"), contract=-1))
    assert f.layout == down.layout == "sm90"
    x, index = oracle.random(rng, (6, 64), "bfloat16"), jnp.arange(12).reshape(6, 2) % E
    weight = oracle.random(rng, (6, 2))
    layer = jax.jit(lambda x, up, down: jgg.moe_mlp(x, up, down, index, weight))
    want = layer(x, f, down)
    with jax.set_mesh(mesh):
        for spec in ((), ("d",)):
            got = layer(put(x), put(f, *spec), put(down, *spec))
            oracle.assert_close(got, want, tolerance=1e-2)


@needs_two_devices
def test_tiles_are_not_cut():
    """Whole on every device, or divided by expert, they are taken."""
    mesh = mesh_of((2,), ("d",), AxisType.Explicit)
    place = lambda tree, *spec: jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P(*spec))),
        tree,
    )
    quantized = lambda *shape: jax.eval_shape(
        lambda w: jgg.quantize(w, contract=-1), jnp.zeros(shape, "bfloat16")
    )
    up, down = quantized(E, 256, 64), quantized(E, 64, 128)
    tiles = jax.eval_shape(jgg.prepack, up)
    x, index = jnp.zeros((6, 64), "bfloat16"), jnp.zeros((6, 2), jnp.int32)
    layer = lambda up, down: jgg.moe_mlp(x, up, down, index, jnp.zeros((6, 2)))
    remedy = "Shard the linear layout, or prepack in jax.shard_map."
    with jax.set_mesh(mesh):
        for operands, message in (
            (
                (place(tiles, None, "d"), place(down)),
                "up uint32[4,4@d,1,512] is sharded, but tiles of layout 'sm90' are not cut here",
            ),
            (
                (place(tiles), place(down, None, None, "d")),
                "up uint32[4,4,1,512] has tiles of layout 'sm90', which are not cut here, but "
                "another operand shards F over ('d',)",
            ),
        ):
            oracle.assert_raises(
                lambda operands=operands: jax.eval_shape(layer, *operands), ValueError,
                f"jgg.moe_mlp: {message}. {remedy}",
            )  # fmt: skip
        for spec in ((), ("d",)):
            assert jax.eval_shape(layer, place(tiles, *spec), place(down, *spec)).shape == x.shape
