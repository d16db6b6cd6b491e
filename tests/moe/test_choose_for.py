"""jgg.router.choose_for: the choice of a product's logits, its derivatives and batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_router import CHOICES, LOGITS, E, choose

from jax_groupgemm import router


def product_of(rng, *lead, dtype="float32", transpose_w=False):
    """x, w, a bias of logits, and the logits in float64."""
    x = jnp.asarray(rng.normal(size=(*lead, 24)), dtype)
    w = jnp.asarray(rng.normal(size=(24, E)), dtype)
    logit_bias = jnp.asarray(rng.normal(size=E), dtype)
    x64, w64, bias64 = (np.asarray(a, np.float64) for a in (x, w, logit_bias))
    return x, w.T if transpose_w else w, logit_bias, x64 @ w64 + bias64


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.one_in(3)
def test_choose_for(rng, name, dtype):
    """The same choice of logits that are a product, either way that w is stored."""
    for transpose_w in (False, True):
        x, w, logit_bias, exact = product_of(rng, 2, 9, dtype=dtype, transpose_w=transpose_w)
        options = {"transpose_w": transpose_w, **CHOICES[name]}
        f = functools.partial(router.choose_for, top_k=3, **options)
        got, logits = jax.jit(f)(x, w, logit_bias=logit_bias)
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)
        for one, other in zip(got, choose(logits, 3, **CHOICES[name]), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("transpose_w", [False, True])
def test_gradients_of_choose_for(rng, transpose_w):
    """Those of the parts, of a batch, too; float32 and float64."""
    x, w, logit_bias, _ = product_of(rng, 3, 5, transpose_w=transpose_w)
    of = lambda w: w.T if transpose_w else w

    def loss(x, w, logit_bias):
        choice, logits = router.choose_for(
            x, w, 3, logit_bias=logit_bias, transpose_w=transpose_w, scores="sigmoid"
        )
        return (choice.weight**2).sum() + (choice.probabilities**2).sum() + (logits**2).sum()

    def parts(x, w, logit_bias):
        logits = jnp.matmul(x, of(w), precision="highest") + logit_bias
        choice = router.choose(logits, 3, scores="sigmoid")
        return (choice.weight**2).sum() + (choice.probabilities**2).sum() + (logits**2).sum()

    each = lambda f: jax.jit(jax.grad(f, (0, 1, 2)))(x, w, logit_bias)
    sums = lambda f: lambda *a: jax.vmap(f, (0, None, None))(*a).sum()
    for got in (each(loss), each(sums(loss))):
        for one, other in zip(got, each(parts), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    with jax.enable_x64(True):
        choice, logits = router.choose_for(x.astype("float64"), w, 3, transpose_w=transpose_w)
        assert logits.dtype == choice.weight.dtype == jnp.float64


def test_batches_of_choose_for(rng):
    """A batch of tokens is more tokens; one of weights is composed."""
    x, w, logit_bias, _ = product_of(rng, 3, 5)
    f = lambda x, w: router.choose_for(x, w, 3, logit_bias=logit_bias)
    want = f(x, w)
    last = jnp.moveaxis(x, 0, 2)
    for got in (jax.vmap(f, (0, None))(x, w), jax.vmap(f, (2, None))(last, w)):
        for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    got = jax.vmap(f)(x, jnp.stack([w, 2 * w, -w]))
    for i, factor in enumerate((1, 2, -1)):
        for one, other in zip(*map(jax.tree.leaves, (got, f(x[i], factor * w))), strict=True):
            np.testing.assert_allclose(one[i], other, rtol=1e-5, atol=1e-5)


def test_choose_for_of_tokens_that_do_not_exist(rng):
    """Neither choices nor gradients know what they hold."""
    x, w, logit_bias, _ = product_of(rng, 9)
    where = np.arange(9) < 6
    garbage = jnp.where(where[:, None], x, np.nan)

    def f(x, w, where=None):
        choice, logits = router.choose_for(x, w, 2, logit_bias=logit_bias, where=where)
        of = router.report(logits, choice, where=where)
        return of.balance_loss + of.z_loss + choice.weight.sum(), (choice, logits)

    run = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))
    (got, (choice, logits)), grads = run(garbage, w, where)
    (want, _), wanted = run(x[:6], w)
    assert (choice.expert[6:] == -1).all()
    assert not choice.weight[6:].any()
    assert not logits[6:].any()
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert not grads[0][6:].any()
    np.testing.assert_allclose(grads[0][:6], wanted[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads[1], wanted[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_choose_for_divided_among_devices(rng, axis_type):
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    x, w, logit_bias, _ = product_of(rng, 16)
    f = jax.jit(lambda x, w: router.choose_for(x, w, 2, logit_bias=logit_bias))
    want = f(x, w)
    with jax.set_mesh(mesh):
        got = f(
            jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("data"))),
            jax.device_put(w, jax.sharding.NamedSharding(mesh, jax.P())),
        )
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    if axis_type == "Explicit":
        return
    local = jax.shard_map(f, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P("data"))
    for one, other in zip(*map(jax.tree.leaves, (local(x, w), want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


ERRORS = [
    (lambda: router.choose_for(jnp.zeros(()), LOGITS, 2), ValueError,
     "jgg.router.choose_for: x has shape (), expected (..., D)"),
    (lambda: router.choose_for(LOGITS, LOGITS, 2), ValueError,
     "jgg.router.choose_for: w has shape (3, 8), expected (D, E) = (8, 8) because x is (3, 8)"),
    (lambda: router.choose_for(LOGITS, LOGITS.T, 2, transpose_w=True), ValueError,
     "jgg.router.choose_for: w has shape (8, 3), expected (E, D) = (8, 8) because x is (3, 8)"),
    (lambda: router.choose_for(LOGITS, LOGITS.T.astype(int), 2), TypeError,
     "jgg.router.choose_for: w must hold floats, got int32"),
    (lambda: router.choose_for(LOGITS, LOGITS.T, 4), ValueError,
     "jgg.router.choose_for: top_k=4 is more than the 3 experts in 1 of 1 groups"),
    (lambda: router.choose_for(LOGITS, LOGITS.T, 2, logit_bias=jnp.zeros(8)), ValueError,
     "jgg.router.choose_for: logit_bias has shape (8,), expected (E,) = (3,) because w is (8, 3)"),
    (lambda: router.choose_for(LOGITS, LOGITS.T, 2, logit_bias=jnp.zeros(3, int)), TypeError,
     "jgg.router.choose_for: logit_bias must hold floats, got int32"),
    (lambda: router.choose_for(LOGITS, LOGITS.T, 2, bias=jnp.zeros(8)), ValueError,
     "jgg.router.choose_for: bias has shape (8,), expected (E,) = (3,) because w is (8, 3)"),
    (lambda: router.choose_for(LOGITS, LOGITS.T, 2, transpose_w="yes"), TypeError,
     "jgg.router.choose_for: transpose_w must be True or False, got 'yes'"),
    (lambda: router.choose_for(LOGITS, LOGITS.T, 2, precision="low"), ValueError,
     "jgg.router.choose_for: precision='low' is not a jax.lax.Precision, its name, or "
     "'tensorfloat32'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[e[2][4:50] for e in ERRORS])
def test_errors(call, kind, message):
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value) == message
