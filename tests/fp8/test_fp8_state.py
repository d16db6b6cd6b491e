"""Delayed scaling: what a state is, what it makes of a step, and every transformation of both."""

import functools
import io
import re

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fp8_shardings import CLOSE, SHARDED, assert_trees_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_two_devices

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device

T, G, N, K = 20, 4, 16, 16
SIZES = [9, 0, 3, 6]
DELAYED = jgg.FP8Recipe(scaling="delayed")
NEW = jgg.FP8State.new()
# Less work for the compiler.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def step(x, w, ct, sizes, state, key=None, recipe=DELAYED):
    """out, dx, dw, and what the state has seen."""
    f = lambda x, w, state: jgg.fp8_grouped_linear(x, w, sizes, recipe=recipe, state=state, key=key)
    out, vjp = jax.vjp(f, x, w, state)
    return out, *vjp(ct)


one = jit(step, static_argnames="recipe")


@pytest.fixture
def problem(rng):
    """x, w, a cotangent and sizes."""
    shapes = (T, K), (G, N, K), (T, N)
    return *(oracle.random(rng, s) for s in shapes), jnp.array(SIZES, jnp.int32)


def ranges(state):
    """Those that were seen, of x and of dy."""
    return [np.nonzero(np.asarray(leaf) > 0)[-1].tolist() for leaf in (state.x, state.dy)]


def range_of(a):
    """Of rows that have a group."""
    amax = np.abs(oracle.f64(a)[: sum(SIZES)]).max()
    return int(np.ceil(np.log2(amax / 1.75))) + 127


def seen_of(x, dy):
    """A step that had these ranges."""
    return jgg.FP8State(*(jnp.zeros((256,)).at[place].set(1) for place in (x, dy)))


def known(x, dy):
    """A state whose last step had them."""
    return NEW.updated(seen_of(x, dy))


def test_updated():
    """Ages count updates; what was never seen stays infinite."""
    state = known(3, 200).updated(jgg.FP8State(jnp.zeros(256), jnp.zeros(256).at[7].set(0.25)))
    assert {i: float(v) for i, v in enumerate(state.x) if np.isfinite(v)} == {3: 1}
    assert {i: float(v) for i, v in enumerate(state.dy) if np.isfinite(v)} == {7: 0, 200: 1}
    assert jgg.FP8State.new((2, 3)).x.shape == (2, 3, 256)
    assert jgg.FP8State.new(5).dy.shape == (5, 256)


def test_first_step_has_scales_of_its_own(problem):
    """And says what they were."""
    x, w, ct, sizes = problem
    *got, seen = one(*problem, NEW)
    want = one(x, w, ct, sizes, None, recipe=jgg.FP8Recipe(scaling="tensor"))
    for value, expected in zip(got, want, strict=False):
        np.testing.assert_array_equal(value, expected)
    assert ranges(seen) == [[range_of(x)], [range_of(ct)]]


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.one_in(2)
def test_scales_of_the_last_steps(problem, format):
    """Against float64: codes saturate where a scale is too small; older steps do not count."""
    x, w, ct, _ = problem
    recipe = jgg.FP8Recipe(scaling="delayed", history=2, gradient_format=format)
    state = known(127 + 9, 127 + 9).updated(seen_of(126, 130)).updated(seen_of(125, 120))
    out, dx, dw, seen = one(*problem, state, recipe=recipe)
    xs, cts = delayed(x, 126, "e4m3"), delayed(ct, 130, format)
    ws = fp8_oracle.dequantize(*fp8_oracle.quantize(w, None, "e4m3", "e8m0"), None)
    assert np.abs(xs).max() == 1.75 / 2  # that of the range 126: x is cut
    want_dx, _ = oracle.grouped_mm_grads(xs, ws.swapaxes(1, 2), SIZES, cts)
    want_dw = [cts[a:b].T @ xs[a:b] for a, b in oracle.bounds(SIZES, T)]
    oracle.assert_close(out, oracle.grouped_mm(xs, ws, SIZES, transpose_w=True), tolerance=CLOSE)
    oracle.assert_close(dx, want_dx, tolerance=CLOSE)
    oracle.assert_close(dw, np.stack(want_dw), tolerance=CLOSE)
    assert ranges(seen) == [[range_of(x)], [range_of(ct)]]  # of what was cut, too


def delayed(a, place, element):
    """What codes with the scale of that range stand for."""
    a = oracle.f64(a)
    a[sum(SIZES) :] = 0
    scale = 2.0 ** (place - 127 - {"e4m3": 8, "e5m2": 15}[element])
    largest = float(fp8_oracle.LARGEST[element])
    codes = np.clip(a / scale, -largest, largest).astype(np.float32)
    return codes.astype(fp8_oracle.DTYPES[element]).astype(np.float64) * scale


def test_recovery(problem):
    """From a step that is a thousand times as large as those before, and from one with NaN: the
    next step is as if it had always been so, or as if it had not been."""
    x, w, ct, sizes = problem
    right = one(1000 * x, w, ct, sizes, NEW)
    state = NEW.updated(one(*problem, NEW)[-1])
    *cut, seen = one(1000 * x, w, ct, sizes, state)
    assert np.abs(cut[0]).max() < np.abs(right[0]).max() / 100
    *after, _ = one(1000 * x, w, ct, sizes, state.updated(seen))
    for got, want in zip(after, right, strict=False):
        np.testing.assert_array_equal(got, want)

    broken = x.at[2, 3].set(jnp.nan).at[10].set(jnp.inf)
    out, dx, dw, seen = one(broken, w, ct.at[1].set(-jnp.inf), sizes, state)
    rows = ~np.isin(np.arange(T), [2, 10])
    assert np.isnan(out[~rows]).all()
    assert np.isfinite(out[rows]).all()
    assert np.isnan(dx[1]).all()
    assert np.isfinite(np.delete(dx, 1, 0)).all()
    assert [bool(np.isnan(dw[g]).any()) for g in range(G)] == [True, False, True, False]
    assert [len(of) for of in ranges(seen)] == [1, 1]
    clean = state.updated(seen)
    assert not np.isnan(clean.x).any()
    for got in one(*problem, clean)[:3]:
        assert np.isfinite(got).all()


def test_saved_and_restored(problem):
    """The same bits, of the state and of what comes after."""
    state = known(128, 126).updated(one(*problem, known(128, 126))[-1])
    file = io.BytesIO()
    np.savez(file, *jax.tree.leaves(state))
    file.seek(0)
    arrays = np.load(file)
    again = jax.tree.unflatten(jax.tree.structure(state), [jnp.asarray(arrays[f]) for f in arrays])
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(*(jax.tree.leaves(one(*problem, s)) for s in (again, state)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_training(rng):
    """Forty steps towards other weights: the error left is that without FP8, within a tenth."""
    xs, target = oracle.random(rng, (40, T, K)), oracle.random(rng, (G, N, K)) / 4
    sizes = jnp.array(SIZES)

    @functools.partial(jit, static_argnames="scaling")
    def trained(scaling):
        recipe = None if scaling is None else jgg.FP8Recipe(scaling=scaling)

        def loss(w, state, x):
            y = jgg.grouped_mm(x, target, sizes, transpose_w=True)
            if recipe is None:
                got = jgg.grouped_mm(x, w, sizes, transpose_w=True)
            else:
                got = jgg.fp8_grouped_linear(x, w, sizes, recipe=recipe, state=state)
            return ((got - y) ** 2).sum()

        def body(carry, x):
            w, state = carry
            value, (dw, seen) = jax.value_and_grad(loss, (0, 1))(w, state, x)
            state = None if state is None else state.updated(seen)
            return (w - 0.01 * dw, state), value

        state = NEW if scaling == "delayed" else None
        (w, state), losses = jax.lax.scan(body, (jnp.zeros_like(target), state), xs)
        return ((w - target) ** 2).sum(), losses, state

    left, losses, _ = trained(None)
    assert losses[-1] < losses[0] / 10
    for scaling in ("tensor", "delayed"):
        of_fp8, _, state = trained(scaling)
        assert 0 < abs(of_fp8 / left - 1) < 0.1
        if state is not None:
            assert np.isfinite(state.x).sum() >= 1
            assert np.isfinite(state.dy).sum() > 1  # gradients become smaller


# ---- transformations ---------------------------------------------------------------------------

SHARED, OWN = (0, None, 0, 0, None), (0, None, 0, 0, 0)


@pytest.mark.parametrize("axes", [SHARED, OWN])
def test_vmap(problem, axes):
    """One state of all sees what each has seen; a batch of states, its own."""
    x, w, ct, sizes = problem
    xs, cts = jnp.stack([x, 64 * x]), jnp.stack([ct, ct / 8])
    both = jnp.stack([sizes, sizes])
    states = known(128, 128), known(133, 126)
    state = states[0] if axes == SHARED else jax.tree.map(lambda *a: jnp.stack(a), *states)
    got = jit(jax.vmap(lambda *a: step(*a)[:3], axes))(xs, w, cts, both, state)
    singles = [one(xs[i], w, cts[i], sizes, states[0 if axes == SHARED else i]) for i in (0, 1)]
    want = jax.tree.map(lambda *v: jnp.stack(v), *(s[:3] for s in singles))
    assert_trees_close(got, want)

    def loss(state):
        f = lambda x, ct, state: (
            jgg.fp8_grouped_linear(x, w, sizes, recipe=DELAYED, state=state) * ct
        ).sum()
        return jax.vmap(f, (0, 0, axes[4]))(xs, cts, state).sum()

    seen = jit(jax.grad(loss))(state)
    seen_alone = [s[3] for s in singles]
    if axes == SHARED:
        want = [sorted(a + b) for a, b in zip(*map(ranges, seen_alone), strict=True)]
        assert ranges(seen) == want
    else:
        for i in range(2):
            assert ranges(jax.tree.map(lambda a, i=i: a[i], seen)) == ranges(seen_alone[i])


def test_microbatches_and_checkpoint(problem):
    """One state of several calls sees all of them: in a scan that adds gradients, with and without
    ``jax.checkpoint``, and in a mean."""
    x, w, ct, sizes = problem
    xs, cts = jnp.stack([x, 64 * x, x / 4]), jnp.stack([ct, ct / 8, ct * 32])
    state = known(130, 130)

    def loss(w, state, x, ct):
        return (jgg.fp8_grouped_linear(x, w, sizes, recipe=DELAYED, state=state) * ct).sum()

    def added(wrapped):
        def body(total, batch):
            f = jax.checkpoint(loss) if wrapped else loss
            grads = jax.grad(f, (0, 1))(w, state, *batch)
            return jax.tree.map(lambda a, b: a + b / 3, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, (w, state))
        return jax.lax.scan(body, zeros, (xs, cts))[0]

    added = jit(added, static_argnums=0)
    singles = [one(xs[i], w, cts[i], sizes, state) for i in range(3)]
    for wrapped in (False, True):
        dw, seen = added(wrapped)
        assert_trees_close(dw, sum(s[2] for s in singles) / 3)
        assert ranges(seen) == [
            sorted({range_of(a) for a in xs}), sorted({range_of(a) for a in cts})
        ]  # fmt: skip


def test_layers_in_a_scan(rng):
    """Each has its own state, a row of one pytree."""
    w, x = oracle.random(rng, (2, G, K, K)), oracle.random(rng, (T, K))
    sizes, states = jnp.array(SIZES), jgg.FP8State.new(2)

    def layer(x, of):
        w, state = of
        return jnp.tanh(jgg.fp8_grouped_linear(x, w, sizes, recipe=DELAYED, state=state)), None

    def loss(w, states, body=layer):
        return jax.lax.scan(body, x, (w, states))[0].sum()

    def unrolled(w, states):
        y = x
        for i in range(2):
            y, _ = layer(y, (w[i], jax.tree.map(lambda a, i=i: a[i], states)))
        return y.sum()

    got = jit(jax.grad(functools.partial(loss, body=jax.checkpoint(layer)), (0, 1)))(w, states)
    want = jit(jax.grad(unrolled, (0, 1)))(w, states)
    assert_trees_close(got[0], want[0])
    for one_leaf, other in zip(*map(jax.tree.leaves, (got[1], want[1])), strict=True):
        np.testing.assert_array_equal(one_leaf, other)
    states = states.updated(got[1])
    assert [int((leaf == 0).sum()) for leaf in jax.tree.leaves(states)] == [2, 2]


@needs_two_devices
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (AxisType.Explicit, "T"),
        pytest.param(AxisType.Auto, "T", marks=pytest.mark.weekly),
        pytest.param(AxisType.Explicit, "K", marks=pytest.mark.weekly),
        pytest.param(AxisType.Explicit, "N", marks=pytest.mark.weekly),
        pytest.param(AxisType.Explicit, "G", marks=pytest.mark.weekly),
        pytest.param(AxisType.Auto, "K", marks=pytest.mark.weekly),
    ],
)  # fmt: skip
def test_sharded(problem, kind, name):
    """One maximum over devices: results and what is seen are those of one device."""
    x_spec, w_spec, out_spec = SHARDED[name]
    specs = x_spec, w_spec, out_spec, P(), P()
    x, w, ct, sizes = problem
    # The largest numbers are on one device.
    args = x.at[0, 0].set(99), w.at[0, 0, 0].set(50), ct.at[0, 0].set(77), sizes
    mesh = mesh_of((2,), ("d",), kind)
    for state in (NEW, known(134, 134)):
        want = one(*args, state)
        with jax.set_mesh(mesh):
            placed = jax.device_put((*args, state), tuple(NamedSharding(mesh, s) for s in specs))
            got = one(*placed)
        assert_trees_close(got, want)
        assert ranges(got[3]) == ranges(want[3])
        for leaf in jax.tree.leaves(got[3]):
            assert leaf.sharding.is_fully_replicated


@needs_two_devices
def test_shard_map(problem):
    """A state that is on every device sees the largest ranges of all."""
    x, w, ct, sizes = problem
    state, xs, cts = known(133, 130), jnp.concatenate([x, 64 * x]), jnp.concatenate([ct, ct / 8])

    def loss(w, state, x, ct):
        return (jgg.fp8_grouped_linear(x, w, sizes, recipe=DELAYED, state=state) * ct).sum()

    mapped = jax.shard_map(
        lambda *args: jax.lax.psum(loss(*args), "d"),
        mesh=mesh_of((2,), ("d",), AxisType.Auto), in_specs=(P(), P(), P("d"), P("d")),
        out_specs=P(), check_vma=True,
    )  # fmt: skip
    dw, seen = jit(jax.grad(mapped, (0, 1)))(w, state, xs, cts)
    a, b = one(x, w, ct, sizes, state), one(64 * x, w, ct / 8, sizes, state)
    assert_trees_close(dw, a[2] + b[2])
    assert ranges(seen) == [max(p, q) for p, q in zip(ranges(a[3]), ranges(b[3]), strict=True)]
    for leaf in jax.tree.leaves(seen):
        assert leaf.max() == 1  # as on one device


def test_export(problem):
    """A step may be exported, and donates its state."""
    donated = jax.jit(step, donate_argnums=4)
    exported = jax.export.export(
        donated, disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(*problem, NEW)  # fmt: skip
    again = jax.export.deserialize(exported.serialize())
    assert_trees_close(again.call(*problem, NEW), one(*problem, NEW))


@pytest.mark.parametrize(
    ("error", "message", "given"),
    [
        (
            ValueError, "FP8Recipe(scaling='delayed') needs a state. Begin with jgg.FP8State.new()",
            {"state": None},
        ),
        (
            ValueError,
            "state is of FP8Recipe(scaling='delayed'), and this recipe has scaling='block'",
            {"recipe": jgg.FP8Recipe()},
        ),
        (TypeError, "state must be a jgg.FP8State, got 3", {"state": 3}),
        (
            ValueError, "state.x has shape (2, 256), expected 1 axis (256): of one layer",
            {"state": jgg.FP8State.new(2)},
        ),
        (
            TypeError, "state.x must be float32, got dtype bfloat16",
            {"state": jax.tree.map(lambda a: a.astype(jnp.bfloat16), NEW)},
        ),
    ],
)  # fmt: skip
def test_what_is_wrong(problem, error, message, given):
    x, w, _, sizes = problem
    with pytest.raises(error, match=re.escape(f"jgg.fp8_grouped_linear: {message}")):
        jgg.fp8_grouped_linear(x, w, sizes, **({"recipe": DELAYED, "state": NEW} | given))


def test_updates_that_are_wrong():
    with pytest.raises(TypeError, match=r"jgg.FP8State.updated: seen must be a jgg.FP8State"):
        NEW.updated(3)  # pyright: ignore
    with pytest.raises(ValueError, match=r"seen\.x has shape \(2, 256\)"):
        NEW.updated(jgg.FP8State.new(2))
    with pytest.raises(ValueError, match=r"jgg.FP8State.new: shape=-1 is negative"):
        jgg.FP8State.new(-1)
