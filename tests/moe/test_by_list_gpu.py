"""Products of tokens by list on Hopper, against copies of their rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_groupgemm._kernels import lists
from jax_groupgemm._moe import dense
from jax_groupgemm._moe.products import Linear
from jax_groupgemm._moe.routing import Routing

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Also where a copy would be faster."""
    monkeypatch.setattr(lists, "MOST_COLUMNS_FORWARD", 10**6)
    monkeypatch.setattr(lists, "MOST_COLUMNS_BACK", 10**6)


SIZES = {
    "around tiles": [256, 257, 255, 0, 511, 512, 513, 768, 1],
    "few of some": [0, 1, 7, 8, 9, 0, 64, 65, 3000],
    "all in one": [0, 0, 4001, 0],
    "many": [130 + 7 * i % 300 for i in range(40)],
}


PAIRS = 16  # of a token


def routing_of(sizes, tokens: int, more: int, seed: int) -> Routing:
    """Rows of random tokens, and so many rows behind the last."""
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    order = np.full(count + more, -1, np.int32)
    order[:count] = rng.integers(0, PAIRS * tokens, count)
    place = np.full((tokens, PAIRS), -1, np.int32)
    return Routing(
        order=jnp.asarray(order), place=jnp.asarray(place),
        group_sizes=jnp.asarray(sizes, jnp.int32), overflow=jnp.int32(0),
    )  # fmt: skip


def normal(seed, *shape, dtype, scale=1.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(scale * rng.normal(size=shape), dtype)


def close(got, want, dtype):
    tolerance = 2e-2 if dtype == "bfloat16" else 3e-3
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = np.float64(one), np.float64(other)
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= tolerance * max(np.abs(other).max(), 1e-3)


def live_rows(out, routing):
    """Without what stands in rows behind the last, which nobody reads."""
    rows = routing.order.shape[0]
    there = jnp.arange(rows) < routing.group_sizes.sum()
    live = lambda a: jnp.where(there.reshape(-1, *[1] * (a.ndim - 1)), a, 0)
    return jax.tree.map(lambda a: live(a) if a.shape[0] == rows else a, out)


def compare(run, composed, target, args, routing, dtype, repeats=3):
    """``run`` is lowered to ``target`` and copies nothing; its results are those of ``composed``,
    and the same bits each time."""
    ours = jax.jit(lambda *args: live_rows(run(*args), routing))
    theirs = jax.jit(lambda *args: live_rows(composed(*args), routing))
    text = ours.lower(*args).as_text()
    assert target in text
    assert "dispatch" not in text
    got = ours(*args)
    close(got, theirs(*args), dtype)
    for _ in range(repeats):
        for one, other in zip(*map(jax.tree.leaves, (got, ours(*args))), strict=True):
            assert (np.asarray(one) == np.asarray(other)).all()


CASES = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
BOTH = pytest.mark.parametrize("transpose_w", [False, True])
HALVES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
WIDTHS = pytest.mark.parametrize(("d", "f"), [(192, 200), (8, 136), (1000, 320), (64, 1024)])


def problem(sizes, d, f, transpose_w, dtype, more=77, activation="swiglu"):
    tokens, groups = 999, len(sizes)
    routing = routing_of(sizes, tokens, more, seed=d + f)
    products = dense.Dense(activation, *[jnp.dtype(dtype)] * 3, transpose_w)
    x = normal(1, tokens, d, dtype=dtype)
    up = normal(2, groups, d, 2 * f, dtype=dtype, scale=d**-0.5)
    down = normal(3, groups, f, d, dtype=dtype, scale=f**-0.5)
    if transpose_w:
        up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
    return routing, products, x, up, down


@CASES
@BOTH
@HALVES
@WIDTHS
def test_up(sizes, d, f, transpose_w, dtype):
    routing, products, x, up, _ = problem(sizes, d, f, transpose_w, dtype)
    run = lambda x, w: products.up(x, Linear(w), routing, None, True)
    composed = lambda x, w: dense._up(x, w, None, routing, products=products, keeps=True)
    compare(run, composed, "jgg_mm", (x, up), routing, dtype)


@CASES
@BOTH
@WIDTHS
def test_up_without_h(sizes, d, f, transpose_w):
    routing, products, x, up, _ = problem(sizes, d, f, transpose_w, "bfloat16", activation="geglu")
    run = lambda x, w: products.up(x, Linear(w), routing, None, False)[0]
    composed = lambda x, w: dense._up(x, w, None, routing, products=products, keeps=False)
    compare(run, composed, "jgg_mm", (x, up), routing, "bfloat16")


@CASES
@BOTH
@HALVES
@WIDTHS
def test_rows_cotangent(sizes, d, f, transpose_w, dtype):
    routing, products, ct, _, down = problem(sizes, d, f, transpose_w, dtype)
    run = lambda ct, w: dense._ROWS(ct, w, routing, products=products)
    composed = lambda ct, w: dense._rows_cotangent(ct, w, routing, products=products)
    compare(run, composed, "jgg_mm", (ct, down), routing, dtype)


@CASES
@BOTH
@HALVES
@WIDTHS
def test_down_backward(sizes, d, f, transpose_w, dtype):
    routing, products, ct, _, down = problem(sizes, d, f, transpose_w, dtype)
    rows = routing.order.shape[0]
    h = normal(4, rows, 2 * f, dtype=dtype)
    scale = jnp.abs(normal(5, rows, dtype="float32"))

    def run(ct, h, w, scale):
        return products.down_backward(ct, h, Linear(w), scale, routing, None, (None, None))

    def composed(ct, h, w, scale):
        return dense._down_backward(ct, h, w, scale, routing, products=products)

    compare(run, composed, "jgg_moe_down_backward", (ct, h, down, scale), routing, dtype)


@CASES
@BOTH
@HALVES
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("d", "f"), [(192, 200), (136, 1024), (1000, 320)])
def test_weight_cotangent(sizes, d, f, transpose_w, dtype, first):
    routing, products, x, up, down = problem(sizes, d, f, transpose_w, dtype)
    w = up if first else down
    rows = normal(6, routing.order.shape[0], 2 * f if first else f, dtype=dtype)

    def run(w, x, rows):
        return products.weight_cotangent(Linear(w), x, rows, routing, None, first=first)

    def composed(w, x, rows):
        return dense._weight_cotangent(w, x, rows, routing, products=products, first=first)

    compare(run, composed, "jgg_wgrad", (w, x, rows), routing, dtype)


def test_tokens_that_x_has_not_are_zeros():
    """A forged list reads nothing outside of x."""
    routing, products, x, _, down = problem(SIZES["many"], 192, 200, False, "bfloat16")
    order = np.asarray(routing.order).copy()
    order[::3] = PAIRS * 10**6
    order[1::7] = -5
    forged = Routing(jnp.asarray(order), routing.place, routing.group_sizes, routing.overflow)
    out = jax.jit(lambda x, w: dense._ROWS(x, w, forged, products=products))(x, down)
    out, order = (np.asarray(a)[: sum(SIZES["many"])] for a in (out, order))
    bad = (order < 0) | (order >= PAIRS * x.shape[0])
    assert (out[bad] == 0).all()
    assert (out[~bad] != 0).any(1).all()


def test_others_nan_stay_out_of_a_segment():
    """Weight gradients: lines of other segments are multiplied by nothing."""
    sizes = SIZES["around tiles"]
    routing, products, x, up, _ = problem(sizes, 192, 200, False, "bfloat16")
    rows = normal(6, routing.order.shape[0], 400, dtype="bfloat16")

    @jax.jit
    def run(x, rows):
        return products.weight_cotangent(Linear(up), x, rows, routing, None, first=True)

    want = np.asarray(run(x, rows))
    begin = sum(sizes[:2])
    got = np.asarray(run(x, rows.at[begin : begin + sizes[2]].set(jnp.nan)))
    others = np.arange(len(sizes)) != 2
    assert (got[others] == want[others]).all()
    assert np.isnan(np.float32(got[2])).all()
