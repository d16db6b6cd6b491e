"""Operations that one call may run: what holds of every one, whatever it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.interpreters import ad

import jax_groupgemm as jgg
from jax_groupgemm._core import composed
from jax_groupgemm._core.composed import PRIMITIVES, Composed
from jax_groupgemm._core.primitive import INNER, OUTER

pytestmark = pytest.mark.default_device

SIZES = jnp.array([3, 0, 5], jnp.int32)


def problem(rng, name):
    """A function of arrays, and the arrays, whose jaxpr has one equation of ours."""
    x, w = oracle.random(rng, (8, 32)), oracle.random(rng, (3, 32, 16))
    if name == "mm":
        return lambda x, w: jgg.grouped_mm(x, w, SIZES), (x, w)
    if name == "wgrad":
        spans = jnp.array([[0, 3], [3, 8]], jnp.int32)
        return lambda x, y: jgg.segmented_mm(x, y, spans, transpose_a=True), (x, x)
    if name == "epilogue":
        return lambda x, w: jgg.grouped_mm(x, w, SIZES, activation="relu"), (x, w)
    if name == "qmm":
        q = jgg.quantize(w.swapaxes(1, 2), mode="mxfp4")
        return lambda x, q: jgg.grouped_qmm(x, q, SIZES), (x, q)
    return lambda x: jgg.quantize(x, group_size=32), (x,)


def equations(jaxpr):
    ours = {*PRIMITIVES, *INNER.values(), *OUTER.values()}
    for eqn in jaxpr.eqns:
        if eqn.primitive in ours:
            yield eqn
        else:
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from equations(inner)


@pytest.mark.parametrize("name", ["mm", "wgrad", "epilogue", "qmm", "quantize"])
def test_no_tangents(rng, name):
    """JAX asks a rule only where something moves; should it ask otherwise, nothing moves."""
    function, args = problem(rng, name)
    (eqn,) = equations(jax.make_jaxpr(function)(*args).jaxpr)
    primals = [jnp.ones(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    zeros = [ad.Zero(jax.typeof(p).to_tangent_aval()) for p in primals]
    outs, dots = ad.primitive_jvps[eqn.primitive](primals, zeros, **eqn.params)
    if not eqn.primitive.multiple_results:
        outs, dots = [outs], [dots]
    assert len(outs) == len(dots) == len(eqn.outvars)
    for out, dot in zip(outs, dots, strict=True):
        assert type(dot) is ad.Zero
        assert dot.aval == jax.typeof(out).to_tangent_aval()


def test_codes_do_not_move(rng):
    """Results of integers have no tangents, where others have."""
    x = oracle.random(rng, (4, 32))
    q, dq = jax.jvp(lambda x: jgg.quantize(x, group_size=32), (x,), (jnp.ones_like(x),))
    assert dq.weight.dtype == jax.dtypes.float0
    assert dq.scales.shape == q.scales.shape
    assert dq.scales.dtype == q.scales.dtype


def test_compiled_once_for_each_shape(rng):
    """Outside jit, too, a call is traced and compiled once."""
    x, w = oracle.random(rng, (8, 32)), oracle.random(rng, (3, 32, 16))
    traced = []

    def composed(x, w):
        traced.append(x.shape)
        return (x @ w[0]).astype(jnp.float32)

    op = Composed("jgg_test", composed, lambda *_: None)
    for _ in range(3):
        np.testing.assert_allclose(op(x, w), x @ w[0], rtol=1e-6)
    assert traced == [(8, 32)]
    op(x[:4], w)
    assert traced == [(8, 32), (4, 32)]


def test_linear_transpose(rng):
    """Of what is linear in an operand, without differentiating it first."""
    x, w = oracle.random(rng, (8, 32)), oracle.random(rng, (3, 32, 16))
    scale, ct = oracle.random(rng, (8,)), oracle.random(rng, (8, 16))
    f = lambda x, w: jgg.grouped_mm(x, w, SIZES, row_scale=scale)
    scaled = ct * scale[:, None]
    for i, want in enumerate(oracle.grouped_mm_grads(x, w, SIZES, scaled)):
        of_one = (lambda x: f(x, w)) if i == 0 else (lambda w: f(x, w))
        (got,) = jax.jit(jax.linear_transpose(of_one, (x, w)[i]))(ct)
        oracle.assert_close(got, want)
    index = jnp.array([2, 0, 2, 5])
    gathered = lambda x: jgg.gather_mm(x[:, None], w, None, index[jnp.arange(8) % 4])[:, 0]
    (got,) = jax.linear_transpose(gathered, x)(ct)
    (want,) = jax.vjp(gathered, x)[1](ct)
    oracle.assert_close(got, want)
    relu = lambda x: jgg.grouped_mm(x, w, SIZES, activation="relu")
    with pytest.raises(NotImplementedError):
        jax.linear_transpose(relu, x)(ct)


SQUARES = jnp.arange(1.0, 7).reshape(2, 3)


def squares_with_own_backward():
    """``a * x**2``, whose backward pass doubles what it returns for x, so that it can be told."""
    runs = []

    def forward(x, a, *, power):
        runs.append("forward")
        return a * x**power, {"x": x * 1.0}

    def backward(saved, operands, cts, *, power):
        runs.append("backward")
        (ct,), (_, a) = cts, operands
        return 2 * ct * a * power * saved["x"] ** (power - 1), ct * saved["x"] ** power

    op = Composed(
        "jgg_test", lambda x, a, *, power: a * x**power, lambda *_, **__: None,
        vjp=(forward, backward),
    )  # fmt: skip
    return lambda x, a: op(x, a, power=2), runs


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "ck"])
def test_own_backward(wrap):
    f, runs = squares_with_own_backward()
    a = SQUARES + 1
    loss = wrap(lambda x, a: f(x, a).sum())
    assert not runs
    da, dx = jax.grad(loss, 1)(SQUARES, a), jax.grad(loss)(SQUARES, a)
    np.testing.assert_allclose(da, SQUARES**2)
    np.testing.assert_allclose(dx, 2 * 2 * a * SQUARES)
    assert {"forward", "backward"} == set(runs)
    got = jax.value_and_grad(loss, (0, 1))(SQUARES, a)
    np.testing.assert_allclose(got[0], (a * SQUARES**2).sum())
    np.testing.assert_allclose(got[1][0], dx)


def test_derivatives_that_are_the_compositions():
    """Forward mode, batches, and what is differentiated again."""
    f, runs = squares_with_own_backward()
    a = SQUARES + 1
    out, dot = jax.jvp(f, (SQUARES, a), (jnp.ones_like(a), jnp.zeros_like(a)))
    np.testing.assert_allclose(out, a * SQUARES**2)
    np.testing.assert_allclose(dot, 2 * a * SQUARES)
    assert "backward" not in runs
    batch = jnp.stack([SQUARES, -SQUARES])
    np.testing.assert_allclose(jax.vmap(f, (0, None))(batch, a), a * batch**2)
    of_batch = jax.vmap(jax.grad(lambda x: f(x, a).sum()))(batch)
    np.testing.assert_allclose(of_batch, 2 * 2 * a * batch)
    by_batch = jax.grad(lambda x: jax.vmap(f, (0, None))(x, a).sum())(batch)
    np.testing.assert_allclose(by_batch, 2 * a * batch)
    # The own backward pass is differentiated as the function that it is.
    twice = jax.grad(lambda x: jax.grad(lambda x: f(x, a).sum())(x).sum())(SQUARES)
    np.testing.assert_allclose(twice, 2 * 2 * a)
    forward_twice = jax.jvp(lambda x: jax.jvp(lambda x: f(x, a), (x,), (jnp.ones_like(x),))[1],
                            (SQUARES,), (jnp.ones_like(SQUARES),))[1]  # fmt: skip
    np.testing.assert_allclose(forward_twice, 2 * a)


def test_own_backward_in_loops_and_maps():
    f, _ = squares_with_own_backward()
    a = SQUARES + 1

    def scanned(x):
        step = lambda carry, x: (carry + f(x, a).sum(), None)
        return jax.lax.scan(step, jnp.float32(0), x)[0]

    batch = jnp.stack([SQUARES, -SQUARES])
    np.testing.assert_allclose(jax.jit(jax.grad(scanned))(batch), 2 * 2 * a * batch)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: mapped(x, a).sum()))(SQUARES), 2 * 2 * a * SQUARES
    )


@pytest.mark.parametrize("axes", [(0, None), (None, 1), (1, 0)])
def test_a_batch_is_a_call_of_each(monkeypatch, axes):
    """Where one fills a GPU, and a kernel takes it. What is not batched is the same for all."""
    called = []

    def call(platform, x, w, *, taken):
        called.append((x.shape, w.shape))
        return x @ w + 1 if taken else None  # to tell it from the composition

    product = Composed("jgg_test", lambda x, w, *, taken: x @ w, call, each=True)
    PRIMITIVES.discard(product.primitive)
    x = {0: jnp.arange(60.0).reshape(3, 4, 5), 1: jnp.arange(60.0).reshape(4, 3, 5),
         None: jnp.arange(20.0).reshape(4, 5)}[axes[0]]  # fmt: skip
    w = {0: jnp.arange(30.0).reshape(3, 5, 2), 1: jnp.arange(30.0).reshape(5, 3, 2),
         None: jnp.arange(10.0).reshape(5, 2)}[axes[1]]  # fmt: skip
    want = jax.vmap(jnp.matmul, axes)(x, w)
    for fills, taken in ((20, True), (20, False), (21, True)):
        monkeypatch.setattr(composed, "_FILLS", fills)
        called.clear()
        run = lambda x, w, taken=taken: product(x, w, taken=taken)
        got = jax.jit(jax.vmap(run, axes))(x, w)
        by_call = taken and fills == 20
        np.testing.assert_array_equal(got, want + float(by_call))
        assert bool(called) == (fills == 20)
        assert set(called) <= {((4, 5), (5, 2))}
    monkeypatch.setattr(composed, "_FILLS", 20)
    dots = jax.jvp(lambda x: jax.vmap(lambda x, w: product(x, w, taken=True), axes)(x, w), [x], [x])
    np.testing.assert_array_equal(dots[0], want + 1)
    np.testing.assert_array_equal(dots[1], want)
