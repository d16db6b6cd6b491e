"""jgg.router: choices and losses against numpy in float64, loop by loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_groupgemm import router

E = 12
BIAS = np.random.default_rng(7).normal(size=E).astype(np.float32)

CHOICES = {
    "mixtral": {},
    "olmoe": {"renormalize": False},
    "deepseek_v2": {"renormalize": False, "scale": 16.0, "groups": 4, "top_groups": 2},
    "deepseek_v3": {
        "scores": "sigmoid", "bias": BIAS, "scale": 2.5, "groups": 4, "top_groups": 2,
    },
    "kimi_k2": {"scores": "sigmoid", "bias": BIAS, "scale": 2.827},
    "llama4": {"scores": "sigmoid", "renormalize": False},
    "groups of one": {"bias": BIAS, "groups": 12, "top_groups": 5},
}  # fmt: skip


def choose(logits, top_k, **options):
    """In one program, which takes a fraction of the time of its parts."""
    return jax.jit(functools.partial(router.choose, top_k=top_k, **options))(logits)


@jax.jit
def report(logits, choice, where=None):
    return router.report(logits, choice, where=where)


def chosen(logits, k, scores="softmax", bias=None, renormalize=True, scale=1.0, groups=1,
           top_groups=None):  # fmt: skip
    """The experts of one token and their weights, in float64."""
    logits = np.asarray(logits, np.float64)
    powers = np.exp(logits - logits.max())
    score = powers / powers.sum() if scores == "softmax" else 1 / (1 + np.exp(-logits))
    wanted = score if bias is None else score + bias
    size = len(logits) // groups
    marks = []
    for g in range(groups):
        best = sorted(wanted[g * size : (g + 1) * size], reverse=True)
        marks.append(best[0] if bias is None else sum(best[:2]))
    kept = sorted(range(groups), key=lambda g: -marks[g])[:top_groups]
    experts = [e for g in kept for e in range(g * size, (g + 1) * size)]
    experts = sorted(experts, key=lambda e: -wanted[e])[:k]
    weight = score[experts]
    return experts, scale * (weight / weight.sum() if renormalize else weight), score / score.sum()


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.one_in(2)
def test_choose(rng, name):
    logits = rng.normal(size=(2, 9, E)).astype(np.float32)
    got = choose(logits, 3, **CHOICES[name])
    assert got.expert.dtype == jnp.int32
    for t in np.ndindex(2, 9):
        expert, weight, probabilities = chosen(logits[t], 3, **CHOICES[name])
        assert got.expert[t].tolist() == expert
        np.testing.assert_allclose(got.weight[t], weight, rtol=1e-5)
        np.testing.assert_allclose(got.probabilities[t], probabilities, rtol=1e-5)


def test_a_softmax_of_the_chosen_logits_is_the_same(rng):
    logits = rng.normal(size=(9, E)).astype(np.float32)
    expert = np.argsort(-logits)[:, :4]
    best = np.take_along_axis(logits, expert, axis=1)
    choice = choose(logits, 4)
    np.testing.assert_array_equal(choice.expert, expert)
    powers = np.exp(np.asarray(best, np.float64))
    np.testing.assert_allclose(choice.weight, powers / powers.sum(1, keepdims=True), rtol=1e-5)


def test_chosen_shares_of_a_softmax_that_underflow():
    """The best logits are chosen where the softmax of all has many zeros; it is not computed."""
    logits = jnp.zeros((1, E)).at[0, jnp.array([7, 3, 9])].set(jnp.array([300.0, 150.0, 149.0]))
    choice = choose(logits, 3)
    assert choice.expert.tolist() == [[7, 3, 9]]
    assert choice.weight.tolist() == [[1, 0, 0]]
    bias = jnp.zeros(E).at[jnp.array([3, 9])].set(2.0)
    share = choose(logits, 2, bias=bias).weight[0, 0]
    np.testing.assert_allclose(share, 1 / (1 + np.exp(-1.0)), rtol=1e-6)
    text = jax.jit(lambda a: router.choose(a, 3)[:2]).lower(logits).compile().as_text()
    assert f"f32[1,{E}]{{1,0}} exponential" not in text
    assert "f32[1,3]{1,0} exponential" in text


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "olmoe"])
@pytest.mark.one_in(3)
def test_gradients(rng, name):
    """Gradients of weights and probabilities, against differences in float64."""
    logits, ct = rng.normal(size=(5, E)), rng.normal(size=(5, 3))
    options = CHOICES[name]
    f = lambda a: (router.choose(a, 3, **options).weight * ct.astype(np.float32)).sum()
    grad = jax.jit(jax.grad(f))(jnp.asarray(logits, jnp.float32))
    want, step = np.zeros_like(logits), 1e-6
    for t, e in np.ndindex(5, E):
        values = []
        for sign in (1, -1):
            moved = logits[t].copy()
            moved[e] += sign * step
            values.append(chosen(moved, 3, **options)[1] @ ct[t])
        want[t, e] = (values[0] - values[1]) / (2 * step)
    np.testing.assert_allclose(grad, want, atol=1e-5)


def test_a_bias_chooses_and_does_not_weigh(rng):
    logits = rng.normal(size=(9, E)).astype(np.float32)
    bias = jnp.zeros(E).at[5].set(100.0)
    choice = choose(logits, 2, bias=bias)
    assert (choice.expert[:, 0] == 5).all()
    pair = np.take_along_axis(*map(np.asarray, (choice.probabilities, choice.expert)), axis=1)
    first, pair = pair[:, 0], pair.sum(axis=1)
    np.testing.assert_allclose(choice.weight[:, 0], first / pair, rtol=1e-5)
    grad = jax.jit(jax.grad(lambda b: router.choose(logits, 2, bias=b).weight.sum()))(bias)
    assert not grad.any()


def test_low_precision_is_computed_in_float32(rng):
    logits = jnp.asarray(rng.normal(size=(9, E)), jnp.bfloat16)
    choice, want = choose(logits, 2), choose(logits.astype(jnp.float32), 2)
    assert choice.weight.dtype == choice.probabilities.dtype == jnp.float32
    for got, other in zip(choice, want, strict=True):
        np.testing.assert_array_equal(got, other)


def test_scores_of_zero():
    """Sigmoids of which all underflow give zeros, also as gradients, and no NaN."""
    logits = jnp.full((1, E), -200.0)
    f = lambda a: router.choose(a, 2, scores="sigmoid").weight.sum()
    value, grad = jax.jit(jax.value_and_grad(f))(logits)
    assert value == 0
    assert not grad.any()


def test_nan_is_seen():
    logits = jnp.zeros((2, E)).at[0, 3].set(jnp.nan)
    choice = choose(logits, 2)
    assert jnp.isnan(choice.weight[0]).all()
    np.testing.assert_array_equal(choice.weight[1], [0.5, 0.5])


@pytest.mark.parametrize("nan", [np.nan, -np.nan], ids=["NaN", "-NaN"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [{}, {"groups": 4, "top_groups": 2}], ids=["", "groups"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_nan_is_the_largest_and_stays(scores, groups, biased, nan):
    logits = np.array([7, 1, 2, nan, 0.5, 3, 8, 6], np.float32)
    bias = np.zeros(8, np.float32) if biased else None
    choice = choose(logits, 2, scores=scores, bias=bias, **groups)
    assert choice.expert.tolist() == [3, 6]
    assert jnp.isnan(choice.weight).all()


def test_nothing_but_minus_infinity_keeps_to_the_first_groups():
    for bias in (None, np.zeros(8, np.float32)):
        choice = choose(jnp.full((8,), -jnp.inf), 6, groups=4, top_groups=3, bias=bias)
        assert choice.expert.tolist() == [0, 1, 2, 3, 4, 5]
    bias = np.full(8, -np.inf, np.float32)  # and of the best groups, where nothing is better
    assert choose(jnp.zeros(8), 2, groups=4, top_groups=1, bias=bias).expert.tolist() == [0, 1]


@pytest.mark.parametrize("level", [0, -18, -38, -80, 30])
def test_sigmoids_of_any_size_have_exact_shares(rng, level):
    logits = (level - 2 * rng.random((6, E))).astype(np.float32)
    of = lambda a: choose(a, 3, scores="sigmoid", scale=2.5, bias=12 + BIAS)
    got = of(logits)
    wide = 1 / (1 + np.exp(-logits.astype(np.float64)))
    want = np.take_along_axis(wide, np.asarray(got.expert), 1)
    np.testing.assert_allclose(got.weight, 2.5 * want / want.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(got.probabilities, wide / wide.sum(1, keepdims=True), rtol=2e-6)
    ct = rng.normal(size=(6, 3)).astype(np.float32)
    grad = jax.jit(jax.grad(lambda a: (of(a).weight * ct).sum()))(logits)
    share = want / want.sum(1, keepdims=True)
    slope = 2.5 * share * (ct - (share * ct).sum(1, keepdims=True)) * (1 - want)
    expected = np.zeros((6, E))
    np.put_along_axis(expected, np.asarray(got.expert), slope, 1)
    np.testing.assert_allclose(grad, expected, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"scores": "sigmoid"}, {"renormalize": False},
                                     {"groups": 2, "top_groups": 1}])  # fmt: skip
def test_of_equal_scores_the_first_is_chosen(options):
    zeros = jnp.array([-1.0, -0.0, 0.0, -0.0, -1.0, 0.0])
    assert choose(zeros, 2, **options).expert.tolist() == [1, 2]
    # Exact scores of these differ, in whatever numbers they underflow or are rounded to 1.
    for far in ([-300.0, -200.0, -250.0, -400.0], [100.0, 300.0, 200.0, 0.0]):
        assert choose(jnp.array(far), 2, **options | {"groups": 1}).expert.tolist() == [1, 2]


def test_tokens_that_do_not_exist(rng):
    """They meet no expert and change no loss, whatever they hold."""
    logits = rng.normal(size=(9, E)).astype(np.float32)
    where = np.arange(9) < 6
    garbage = np.where(where[:, None], logits, np.nan)
    choice = choose(garbage, 2, where=where)
    got_report = report(garbage, choice, where)
    want = choose(logits[:6], 2)
    assert (choice.expert[6:] == -1).all()
    assert not choice.weight[6:].any()
    np.testing.assert_array_equal(choice.expert[:6], want.expert)
    for got, other in zip(got_report, report(logits[:6], want), strict=True):
        np.testing.assert_allclose(got, other, rtol=1e-6)

    @jax.jit
    @jax.grad
    def grad(logits):
        choice = router.choose(logits, 2, where=where)
        of = router.report(logits, choice, where=where)
        return of.balance_loss + of.z_loss + choice.weight[..., 0].sum()

    assert jnp.isfinite(grad(garbage)).all()
    assert not grad(garbage)[6:].any()


def test_load():
    expert = jnp.array([[0, 2], [2, 1], [-1, 3], [5, 2]], jnp.int8)
    load, none = jax.jit(lambda a: (router.load(a, 3), router.load(a[:0], 3)))(expert)
    assert load.tolist() == [1, 1, 3]
    assert load.dtype == none.dtype == jnp.int32
    assert none.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_load_of_any_integers(dtype):
    info = jnp.iinfo(dtype)
    expert = np.array([1, 2, 127, 200, 1, info.max, info.min], dtype="int64").astype(dtype)
    for experts in (128, 256, 300):
        inside = [int(e) for e in expert if 0 <= int(e) < experts]
        want = np.bincount(inside, minlength=experts)
        np.testing.assert_array_equal(router.load(expert, experts), want)


def test_losses(rng):
    logits = rng.normal(size=(2, 9, E)).astype(np.float32)
    choice = choose(logits, 3)
    got = report(logits, choice)
    tokens = np.asarray(choice.probabilities, np.float64).reshape(-1, E)
    load = np.bincount(np.ravel(choice.expert), minlength=E)
    assert got.load.tolist() == load.tolist()
    want = E * (load / load.sum() * tokens.mean(axis=0)).sum()
    np.testing.assert_allclose(got.balance_loss, want, rtol=1e-5)
    sums = np.log(np.exp(np.asarray(logits, np.float64)).sum(axis=-1))
    np.testing.assert_allclose(got.z_loss, (sums**2).mean(), rtol=1e-5)


def test_balance_loss_is_one_where_all_is_even_and_e_where_nothing_is():
    loss = jax.jit(jax.value_and_grad(lambda p, load: router.balance_loss(p, load)))
    one = np.eye(4, dtype=np.float32)[np.zeros(8, int)]
    np.testing.assert_allclose(loss(np.full_like(one, 0.25), np.array([9, 0, 0, 0]))[0], 1.0)
    np.testing.assert_allclose(loss(one, np.array([9, 0, 0, 0]))[0], 4.0)
    grad = loss(one, np.array([3, 1, 0, 0]))[1]
    np.testing.assert_allclose(grad[0], [4 * 0.75 / 8, 4 * 0.25 / 8, 0, 0], rtol=1e-6)


def test_losses_of_no_tokens_are_zero():
    nothing = report(jnp.zeros((0, E)), choose(jnp.zeros((0, E)), 2))
    none = jnp.zeros(3, bool)
    padding = report(jnp.zeros((3, E)), choose(jnp.zeros((3, E)), 2, where=none), none)
    for of in (nothing, padding):
        assert of.balance_loss == of.z_loss == 0
        assert of.load.tolist() == [0] * E


def test_a_shifted_bias_evens_loads(rng):
    """Loads of a skewed router come together, and weights stay those of the scores."""
    logits = rng.normal(size=(512, E)).astype(np.float32) + np.linspace(0, 3, E, dtype=np.float32)
    bias, spread = jnp.zeros(E), []

    @jax.jit
    def step(bias):
        load = router.load(router.choose(logits, 2, scores="sigmoid", bias=bias).expert, E)
        return router.shifted_bias(bias, load, rate=0.02), load

    for _ in range(60):
        bias, load = step(bias)
        spread.append(max(load.tolist()) / (1024 / E))
    assert spread[0] > 3
    assert spread[-1] < 1.5
    moved = router.shifted_bias(jnp.zeros(3), jnp.array([4, 2, 0]), rate=0.5)
    assert moved.tolist() == [-0.5, 0.0, 0.5]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint32", "float32"])
def test_loads_that_are_the_mean_move_nothing(rng, dtype):
    """63 million tokens of 8 of 256 experts, all alike; and any integers, exactly."""
    alike = np.full(256, min(63_000_000 * 8 // 256, np.iinfo("uint8").max if dtype == "uint8" else
                             np.iinfo("int16").max if dtype == "int16" else 2**31))  # fmt: skip
    assert not router.shifted_bias(jnp.zeros(256), alike.astype(dtype)).any()
    if dtype == "float32":
        return
    for _ in range(20):
        most = int(jnp.iinfo(dtype).max)
        load = rng.integers(max(most - 3, 0), most, 33, dtype=dtype, endpoint=True)
        exact = [int(x) for x in load]
        want = [np.sign(sum(exact) - 33 * x) for x in exact]
        moved = router.shifted_bias(jnp.zeros(33), load, rate=1.0)
        np.testing.assert_array_equal(moved, want)


def test_nothing_is_transferred():
    logits, bias, ct = jax.device_put((jnp.ones((8, E)), jnp.zeros(E), jnp.ones((8, 2))))
    with jax.transfer_guard("disallow"):
        for options in ({}, {"scores": "sigmoid", "bias": bias}, {"groups": 4, "top_groups": 2}):
            weight = lambda a, options=options: router.choose(a, 2, scale=2.0, **options).weight
            if jax.__version_info__ >= (0, 12):  # before, JAX's own zeros are transferred
                jax.vjp(weight, logits)[1](ct)
            choice = router.choose(logits, 2, **options)
            of = router.report(logits, choice)
            router.balance_loss(choice.probabilities, of.load)
            router.z_loss(logits)
            router.shifted_bias(bias, router.load(choice.expert, E), rate=0.5)


def test_vmap_is_of_each_sequence(rng):
    logits = rng.normal(size=(3, 8, E)).astype(np.float32)
    f = lambda a: router.report(a, router.choose(a, 2)).balance_loss
    one = jax.jit(f)
    want = [one(a) for a in logits]
    np.testing.assert_allclose(jax.jit(jax.vmap(f))(logits), want, rtol=1e-6)


def test_explicit_sharding(rng):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    logits = rng.normal(size=(16, E)).astype(np.float32)
    where = np.arange(16) < 13

    def f(a, where):
        choice = router.choose(a, 2, **CHOICES["deepseek_v3"], where=where)
        of = router.report(a, choice, where=where)
        return of.balance_loss + of.z_loss + choice.weight[..., 0].sum(), of.load

    f = jax.jit(jax.value_and_grad(f, has_aux=True))
    want = f(logits, where)
    with jax.set_mesh(mesh):
        of = jax.sharding.NamedSharding(mesh, jax.P("data"))
        got = f(*jax.device_put((logits, where), of))
        assert jax.typeof(got[1]).sharding.spec == jax.P("data", None)
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


LOGITS = jnp.zeros((3, 8))
ERRORS = [
    (lambda: router.choose(LOGITS.astype(int), 2), TypeError,
     "jgg.router.choose: logits must hold floats, got int32"),
    (lambda: router.choose(jnp.zeros(()), 2), ValueError,
     "jgg.router.choose: logits has shape (), expected (..., E)"),
    (lambda: router.choose(LOGITS, 9), ValueError,
     "jgg.router.choose: top_k=9 is more than the 8 experts in 1 of 1 groups"),
    (lambda: router.choose(LOGITS, 5, groups=4, top_groups=2), ValueError,
     "jgg.router.choose: top_k=5 is more than the 4 experts in 2 of 4 groups"),
    (lambda: router.choose(LOGITS, 1, groups=3), ValueError,
     "jgg.router.choose: 8 experts cannot be in groups=3 groups of one size, of which a token "
     "meets top_groups=3"),
    (lambda: router.choose(LOGITS, 1, groups=2, top_groups=3), ValueError,
     "jgg.router.choose: 8 experts cannot be in groups=2 groups of one size, of which a token "
     "meets top_groups=3"),
    (lambda: router.choose(LOGITS, 2.0), TypeError,
     "jgg.router.choose: top_k must be an int, got 2.0"),
    (lambda: router.choose(LOGITS, 2, scores="tanh"), ValueError,
     "jgg.router.choose: scores='tanh' is not 'softmax' or 'sigmoid'"),
    (lambda: router.choose(LOGITS, 2, renormalize="yes"), TypeError,
     "jgg.router.choose: renormalize must be True or False, got 'yes'"),
    (lambda: router.choose(LOGITS, 2, bias=jnp.zeros(7)), ValueError,
     "jgg.router.choose: bias has shape (7,), expected (E,) = (8,) because logits are (3, 8)"),
    (lambda: router.choose(LOGITS, 2, where=jnp.ones(3)), TypeError,
     "jgg.router.choose: where must be bool, got float32"),
    (lambda: router.choose(LOGITS, 2, where=jnp.ones((3, 2), bool)), ValueError,
     "jgg.router.choose: where has shape (3, 2), expected (3,) for tokens of (3, 8)"),
    (lambda: router.load(LOGITS, 8), TypeError,
     "jgg.router.load: expert must hold integers, got dtype float32"),
    (lambda: router.load(jnp.zeros(3, int), -1), ValueError,
     "jgg.router.load: num_experts=-1 is negative"),
    (lambda: router.balance_loss(LOGITS, jnp.zeros(3)), ValueError,
     "jgg.router.balance_loss: load has shape (3,), expected (E,) = (8,) because probabilities are "
     "(3, 8)"),
    (lambda: router.choose(LOGITS, 2, scale=None), TypeError,
     "jgg.router.choose: scale must be a finite number, got None"),
    (lambda: router.choose(LOGITS, 2, scale=float("nan")), TypeError,
     "jgg.router.choose: scale must be a finite number, got nan"),
    (lambda: router.shifted_bias(jnp.zeros(3), jnp.zeros(3), rate=None), TypeError,
     "jgg.router.shifted_bias: rate must be a number, got None"),
    (lambda: router.shifted_bias(jnp.zeros(3), jnp.zeros(3), rate=jnp.ones(2)), TypeError,
     "jgg.router.shifted_bias: rate must be a number, got float32[2]"),
    (lambda: router.shifted_bias(jnp.zeros(3, int), jnp.zeros(3)), TypeError,
     "jgg.router.shifted_bias: bias must hold floats, got int32"),
    (lambda: router.shifted_bias(jnp.zeros(3), jnp.zeros(4)), ValueError,
     "jgg.router.shifted_bias: load has shape (4,), expected (E,) = (3,) because bias is (3,)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[e[2][4:40] for e in ERRORS])
def test_errors(call, kind, message):
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value) == message


def test_every_public_name_has_a_docstring():
    for name in router.__all__:
        assert getattr(router, name).__doc__
    functions = [getattr(router, name) for name in router.__all__ if name[0].islower()]
    for f in functions:
        assert "``" in f.__doc__.splitlines()[0]
        for part in ("Args:", "Returns:", "Raises:"):
            assert part in f.__doc__, (f, part)
