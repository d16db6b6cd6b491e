"""The CUDA kernels of ``route``, ``dispatch`` and ``combine`` against numpy, and twice alike."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import needs_hopper
from replays import CAPTURED, EAGER, same_bits
from test_moe_lowering import names
from test_route import check, expected
from test_top_k_kernel import OPTIONS as router_options
from thunks import custom_calls

import jax_groupgemm as jgg
from jax_groupgemm._moe.permute import _COMBINE_BACKWARD, combined, dispatched

pytestmark = pytest.mark.gpu

RUNS = 50


def routed(index, experts, **options):
    return jax.jit(functools.partial(jgg.route, num_experts=experts, **options))(index)


def routing_of(rng, tokens, k, experts, max_rows=None):
    index = rng.integers(-1, experts + 1, (tokens, k)).astype(np.int32)
    return jgg.route(index, experts, max_rows=max_rows)


def on_host(routing):
    return np.asarray(routing.order), np.asarray(routing.place)


def dispatch_oracle(x, routing, weight=None):
    order, place = on_host(routing)
    pair = np.maximum(order, 0)
    rows = oracle.f64(x)[pair // place.shape[1]]
    if weight is not None:
        rows = rows * oracle.f64(weight).reshape(-1)[pair][:, None]
    return np.where(order[:, None] >= 0, rows, 0)


def combine_oracle(rows, routing, weight=None):
    _, place = on_host(routing)
    picked = np.where((place >= 0)[..., None], oracle.f64(rows)[np.maximum(place, 0)], 0)
    return (picked if weight is None else picked * oracle.f64(weight)[..., None]).sum(1)


# ---- route ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [1, 2, 5, 128, 255, 256, 257, 512, 1024])
@pytest.mark.parametrize("k", [1, 2, 8, 16])
@pytest.mark.parametrize("tokens", [1, 31, 127, 2048, 5003])
def test_route(rng, tokens, k, experts):
    index = rng.integers(-2, experts + 2, (tokens, k)).astype(np.int32)
    assert names(functools.partial(jgg.route, num_experts=experts), index) == ["jgg_moe_route"]
    check(routed(index, experts), expected(index, experts))


@pytest.mark.parametrize("pairs", [2047, 2048, 2049, 4096, 4097, 2048 * 33, 2048 * 130 + 1])
def test_route_of_several_blocks(rng, pairs):
    """Random experts, one expert for all, and experts in order."""
    index = rng.integers(0, 70, (pairs, 1)).astype(np.int32)
    for given in (index, np.full_like(index, 69), np.sort(index, axis=0)):
        check(routed(given, 70), expected(given, 70))


# ---- top_k ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [8, 60, 128, 256, 1000])
@pytest.mark.parametrize("tokens", [1, 7, 64, 5003])
@pytest.mark.parametrize("name", router_options)
def test_choices_of_a_router(rng, name, tokens, experts):
    """As composed, where no two scores are as close as float32 sums differ."""
    options = dict(router_options[name])
    if options.pop("bias", False):
        options["bias"] = jnp.asarray(rng.normal(size=experts), jnp.float32)
    k = min(experts // 2, 8)
    logits = jnp.asarray(rng.normal(size=(tokens, experts)), jnp.float32)
    choose = lambda logits: jgg.router.choose(logits, k, **options)[:2]
    assert names(choose, logits) == ["jgg_moe_top_k"]
    got = jax.jit(choose)(logits)
    want = jax.jit(jax.vmap(choose))(logits[None])
    same = (got[0] == want[0][0]).all(1)
    assert same.mean() > 0.999
    np.testing.assert_allclose(got[1][same], want[1][0][same], rtol=1e-5)
    loss = lambda logits: (choose(logits)[1] ** 2).sum()
    of_batch = lambda logits: (jax.vmap(choose)(logits[None])[1] ** 2).sum()
    got, want = (jax.jit(jax.grad(f))(logits) for f in (loss, of_batch))
    np.testing.assert_allclose(got[same], want[same], rtol=1e-4, atol=1e-6)


# ---- a router of few tokens ---------------------------------------------------------------------


def router_problem(rng, tokens, d, experts, x_dtype="bfloat16", w_dtype="float32", transpose=False):
    w = oracle.random(rng, (experts, d) if transpose else (d, experts), w_dtype)
    return oracle.random(rng, (tokens, d), x_dtype), w


def check_router(x, w, k, *, transpose_w=False, logit_bias=None, **options):
    """Logits beside those in float64, and the choice beside that of these logits."""
    f = functools.partial(
        jgg.router.choose_for, top_k=k, transpose_w=transpose_w, logit_bias=logit_bias, **options
    )
    assert names(f, x, w) == ["jgg_moe_router"]
    got, logits = jax.jit(f)(x, w)
    wide = oracle.f64(w).T if transpose_w else oracle.f64(w)
    want = oracle.f64(x) @ wide + (0 if logit_bias is None else oracle.f64(logit_bias))
    size = np.abs(oracle.f64(x)) @ np.abs(wide)
    assert (np.abs(np.asarray(logits) - want) <= 2e-6 * size + 1e-6).all()
    of_these = jax.jit(functools.partial(jgg.router.choose, top_k=k, **options))(logits)
    np.testing.assert_array_equal(got.expert, of_these.expert)
    np.testing.assert_array_equal(got.weight, of_these.weight)
    return got, logits


@needs_hopper
@pytest.mark.parametrize("experts", [8, 60, 128, 256, 512])
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_router(rng, transpose_w, tokens, experts):
    x, w = router_problem(rng, tokens, 1000, experts, transpose=transpose_w)
    check_router(x, w, min(experts, 8), transpose_w=transpose_w)


@needs_hopper
@pytest.mark.parametrize("name", router_options)
@pytest.mark.parametrize("tokens", [1, 8])
def test_choices_of_a_router_of_few_tokens(rng, tokens, name):
    options = dict(router_options[name])
    if options.pop("bias", False):
        options["bias"] = jnp.asarray(rng.normal(size=128), jnp.float32)
    x, w = router_problem(rng, tokens, 2048, 128)
    check_router(x, w, 8, logit_bias=oracle.random(rng, (128,), "float32"), **options)


@needs_hopper
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("w_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("d", [8, 2048, 2880, 8192])
def test_dtypes_and_widths_of_a_router(rng, d, w_dtype, x_dtype):
    for tokens, transpose in itertools.product((2, 7), (False, True)):
        x, w = router_problem(rng, tokens, d, 64, x_dtype, w_dtype, transpose)
        check_router(x, w, 4, transpose_w=transpose)


@needs_hopper
def test_nan_and_ties_of_a_router(rng):
    x, w = router_problem(rng, 20, 256, 64)
    f = jax.jit(functools.partial(jgg.router.choose_for, top_k=4))
    choice, logits = f(x.at[3, 7].set(jnp.nan), w)
    others = np.arange(20) != 3
    assert np.isnan(np.asarray(choice.weight)[3]).all()
    assert np.isfinite(np.asarray(choice.weight)[others]).all()
    np.testing.assert_array_equal(np.asarray(logits)[others], np.asarray(f(x, w)[1])[others])
    choice, _ = f(x, jnp.ones_like(w))
    np.testing.assert_array_equal(choice.expert, np.tile(np.arange(4), (20, 1)))


@needs_hopper
@pytest.mark.parametrize("options", [EAGER, CAPTURED], ids=["eager", "captured"])
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_a_router_twice_alike(rng, tokens, options):
    """50 runs, bit for bit, each with another x, and the first once more."""
    x, w = router_problem(rng, tokens, 2048, 128)
    f = jax.jit(functools.partial(jgg.router.choose_for, top_k=8))
    compiled = f.lower(x, w).compile(compiler_options=options)
    first = compiled(x, w)
    for i in range(RUNS):
        compiled(jnp.roll(x, i, axis=1), w)
        assert same_bits(compiled(x, w), first)


@pytest.mark.parametrize("tokens", [6, 3000])
def test_every_pattern_of_empty_experts(rng, tokens):
    for used in itertools.chain.from_iterable(
        itertools.combinations(range(5), count) for count in range(6)
    ):
        choices = np.array(used or (-1,))
        index = choices[rng.integers(0, len(choices), (tokens, 2))].astype(np.int32)
        check(routed(index, 5), expected(index, 5))


@pytest.mark.parametrize("max_rows", [1, 700, 2048, 5000, 9999, 10**6])
def test_max_rows(rng, max_rows):
    index = rng.integers(-1, 9, (2501, 4)).astype(np.int32)
    check(routed(index, 8, max_rows=max_rows), expected(index, 8, max_rows=max_rows))


@pytest.mark.parametrize("offset", [0, 3, -4, 100, 2**31 - 1, -(2**31)])
def test_offset(rng, offset):
    index = rng.integers(-9, 9, (1200, 2)).astype(np.int32)
    index[0] = [2**31 - 1, -(2**31)]
    index[1] = offset
    route = jax.jit(lambda index, offset: jgg.route(index, 5, expert_offset=offset))
    check(route(index, jnp.int32(offset)), expected(index.astype(np.int64), 5, offset))


# ---- dispatch and combine ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8, 16, 33])
@pytest.mark.parametrize("d", [8, 264, 1536, 2056, 7168])
def test_rows(rng, d, k, dtype):
    """Values, both dtypes of results, and both gradients."""
    tokens = 150
    routing = routing_of(rng, tokens, k, 7)
    order, _ = on_host(routing)
    x, ct = (oracle.random(rng, (tokens, d), dtype) for _ in range(2))
    rows = oracle.random(rng, (tokens * k, d), dtype)
    rows = jnp.where(routing.order[:, None] >= 0, rows, jnp.array(jnp.nan, dtype))  # nobody's
    weight = oracle.random(rng, (tokens, k))
    np.testing.assert_array_equal(oracle.f64(jgg.dispatch(x, routing)), dispatch_oracle(x, routing))
    weighted = jax.jit(dispatched)(x, routing, weight)
    oracle.assert_close(weighted, dispatch_oracle(x, routing, weight))
    assert not np.asarray(weighted.astype("float32"))[order < 0].any()
    oracle.assert_close(jgg.combine(rows, routing), combine_oracle(rows, routing))
    want = combine_oracle(rows, routing, weight)
    oracle.assert_close(jgg.combine(rows, routing, weight), want)
    wide = jax.jit(functools.partial(combined, dtype=jnp.float32))(rows, routing, weight)
    assert wide.dtype == np.float32
    oracle.assert_close(wide, want)
    for of in (ct, ct.astype("float32")):
        drows, dweight = jax.jit(_COMBINE_BACKWARD)(of, rows, routing, weight)
        assert drows.dtype == rows.dtype
        oracle.assert_close(drows, dispatch_oracle(ct, routing, weight))
        _, place = on_host(routing)
        picked = np.where((place >= 0)[..., None], oracle.f64(rows)[np.maximum(place, 0)], 0)
        dots = np.einsum("td,tkd->tk", oracle.f64(ct), picked)
        oracle.assert_close(dweight, dots, k=d)
        assert not np.asarray(dweight)[place < 0].any()


def test_no_rows(rng):
    """Pairs none of which exists: zeros, and nothing is read."""
    routing = jgg.route(jnp.full((40, 2), -1, jnp.int32), 3)
    nan = jnp.full((80, 64), jnp.nan, "bfloat16")
    weight = jnp.full((40, 2), jnp.nan)
    assert not np.asarray(jgg.dispatch(nan[:40], routing)).any()
    assert not np.asarray(jgg.combine(nan, routing, weight)).any()
    drows, dweight = _COMBINE_BACKWARD(nan[:40], nan, routing, weight)
    assert not np.asarray(drows).any()
    assert not np.asarray(dweight).any()


@pytest.mark.parametrize("max_rows", [1, 100, 250])
def test_rows_with_overflow(rng, max_rows):
    routing = routing_of(rng, 100, 4, 6, max_rows)
    x, ct = (oracle.random(rng, (100, 128)) for _ in range(2))
    rows, weight = oracle.random(rng, (max_rows, 128)), oracle.random(rng, (100, 4))
    np.testing.assert_array_equal(oracle.f64(jgg.dispatch(x, routing)), dispatch_oracle(x, routing))
    want = combine_oracle(rows, routing, weight)
    oracle.assert_close(jgg.combine(rows, routing, weight), want)
    drows, _ = _COMBINE_BACKWARD(ct, rows, routing, weight)
    oracle.assert_close(drows, dispatch_oracle(ct, routing, weight))


def test_nan_stays_in_its_token(rng):
    routing = routing_of(rng, 300, 8, 16)
    order, place = on_host(routing)
    x = oracle.random(rng, (300, 256), "bfloat16").at[7].set(jnp.nan)
    rows = jgg.dispatch(x, routing)
    of_seven = (order >= 0) & (np.maximum(order, 0) // 8 == 7)
    np.testing.assert_array_equal(np.isnan(oracle.f64(rows)).any(1), of_seven)
    back = oracle.f64(jgg.combine(rows, routing))
    met = np.zeros(300, bool)
    met[7] = (place[7] >= 0).any()
    np.testing.assert_array_equal(np.isnan(back).any(1), met)


def test_lists_that_route_did_not_make(rng):
    """Whatever they hold, nothing outside is read or written, and ``order`` says what rows are."""
    tokens, k, rows, d = 64, 4, 200, 136
    x, ct = (oracle.random(rng, (tokens, d)) for _ in range(2))
    y, weight = oracle.random(rng, (rows, d)), oracle.random(rng, (tokens, k))
    sizes, none = jnp.zeros((3,), jnp.int32), jnp.int32(0)
    edges = np.array([-(2**31), -1, 0, rows, tokens * k, 2**30, 2**31 - 1])
    for trial in range(20):
        order = rng.integers(-5, tokens * k + 5, rows)
        place = rng.integers(-5, rows + 5, (tokens, k))
        if trial % 2:
            order = rng.choice(edges, rows)
            place = rng.choice(edges, (tokens, k))
        forged = jgg.Routing(
            jnp.asarray(order, jnp.int32), jnp.asarray(place, jnp.int32), sizes, none
        )
        pair = np.clip(order, 0, tokens * k - 1)
        want = np.where((order >= 0)[:, None], oracle.f64(x)[pair // k], 0)
        np.testing.assert_array_equal(oracle.f64(jgg.dispatch(x, forged)), want)
        picked = oracle.f64(y)[np.clip(place, 0, rows - 1)] * (place >= 0)[..., None]
        want = (picked * oracle.f64(weight)[..., None]).sum(1)
        oracle.assert_close(jgg.combine(y, forged, weight), want)
        drows, dweight = _COMBINE_BACKWARD(ct, y, forged, weight)
        scaled = oracle.f64(ct)[pair // k] * oracle.f64(weight).reshape(-1)[pair][:, None]
        oracle.assert_close(drows, np.where((order >= 0)[:, None], scaled, 0))
        assert np.isfinite(np.asarray(dweight)).all()


def test_odd_rows_are_composed(rng):
    routing = routing_of(rng, 50, 2, 4)
    x, weight = oracle.random(rng, (50, 13), "bfloat16"), oracle.random(rng, (50, 2))
    assert names(jgg.dispatch, x, routing) == []
    np.testing.assert_array_equal(oracle.f64(jgg.dispatch(x, routing)), dispatch_oracle(x, routing))
    rows = oracle.random(rng, (100, 13), "bfloat16")
    want = combine_oracle(rows, routing, weight)
    oracle.assert_close(jgg.combine(rows, routing, weight), want)


def layer(index, x, weight):
    """All four kernels, and the changes of a routing within one program."""
    routing = jgg.route(index, 16)

    def f(x, weight):
        return jgg.combine(jgg.dispatch(x, routing), routing, weight)

    out, pull = jax.vjp(f, x, weight)
    return routing, out, *pull(out)


def test_the_same_in_every_run(rng):
    """Also of changing routings in one compiled program, between its runs."""
    x, weight = oracle.random(rng, (3000, 512), "bfloat16"), oracle.random(rng, (3000, 8))
    indices = [rng.integers(-1, 17, (3000, 8)).astype(np.int32) for _ in range(2)]
    run = jax.jit(layer)
    first = [jax.tree.map(np.asarray, run(index, x, weight)) for index in indices]
    check(first[0][0], expected(indices[0], 16))
    for _ in range(RUNS):
        for index, want in zip(indices, first, strict=True):
            assert same_bits(run(index, x, weight), want)


def test_in_a_loop(rng):
    """Many runs in one program, which XLA may record as a command buffer."""
    x, weight = oracle.random(rng, (500, 64)), oracle.random(rng, (500, 4))
    indices = rng.integers(-1, 9, (12, 500, 4)).astype(np.int32)

    def step(total, index):
        routing = jgg.route(index, 8)
        out = jgg.combine(jgg.dispatch(x, routing), routing, weight)
        return total + out, out

    _, outs = jax.jit(lambda indices: jax.lax.scan(step, jnp.zeros_like(x), indices))(indices)
    for index, out in zip(indices, outs, strict=True):
        there = (index >= 0) & (index < 8)
        share = (oracle.f64(weight) * there).sum(1)[:, None]
        oracle.assert_close(out, oracle.f64(x) * share)


def test_captured(tmp_path, rng):
    """Recorded in command buffers and replayed with other routings: the bits are those of a run
    without."""
    x, weight = oracle.random(rng, (700, 128), "bfloat16"), oracle.random(rng, (700, 8))
    indices = [rng.integers(-1, 17, (700, 8)).astype(np.int32) for _ in range(3)]
    lowered = jax.jit(layer).lower(indices[0], x, weight)
    dump = {"xla_dump_to": str(tmp_path)}
    captured, eager = lowered.compile(CAPTURED | dump), lowered.compile(EAGER)
    inside, outside = custom_calls(tmp_path, "jit_layer")
    assert len(inside) >= 4
    assert not outside
    for index in indices * 3:
        assert same_bits(captured(index, x, weight), eager(index, x, weight))
