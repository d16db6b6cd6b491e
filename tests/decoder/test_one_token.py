"""A step of one token on a CPU: what it must not copy, and where its weights lie."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_runs import example

from jax_groupgemm import router

SLOTS = 48


def attention(rng, dtype, sequences, heads, n, size=16):
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    cache = [normal(sequences, heads, SLOTS, size) for _ in range(2)]
    seen = jnp.arange(SLOTS) < 30
    return normal(sequences, 1, n, size), *cache, seen[None, None, None]


def attend(q, keys, values, mask, bias=None):
    in_order = (a.swapaxes(1, 2) for a in (keys, values))
    run = example("decoder.attention").attend
    return run(q, *in_order, bias, mask, "xla", joins=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("biases", [None, 1, 6])
@pytest.mark.parametrize(("sequences", "heads"), [(1, 6), (3, 2)])
def test_attention(rng, dtype, biases, sequences, heads):
    """As jax.nn has it, of heads that share keys, too."""
    q, keys, values, mask = attention(rng, dtype, sequences, heads, 6)
    bias = None
    if biases is not None:
        bias = jnp.asarray(rng.normal(size=(1, biases, 1, SLOTS)), jnp.float32)
    got = attend(q, keys, values, mask, bias)
    assert got.dtype == q.dtype
    wide = [a.astype(jnp.float32) for a in (q, keys.swapaxes(1, 2), values.swapaxes(1, 2))]
    want = jax.nn.dot_product_attention(*wide, bias, mask)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=tolerance, atol=tolerance)


def remembered(cache, x, mask):
    """Attention of a token that is written into the cache first."""
    attention = example("decoder.attention")
    cache, keys, values = attention.remember(
        cache, 0, mask.sum(dtype=jnp.int32), False, key=x + 1, value=x + 2
    )
    return cache, attention.attend(x, keys, values, None, mask, "xla", joins=False)


def copies(f, *args, donated=()) -> bool:
    """Whether there are any of 1000 numbers or more."""
    text = jax.jit(f, donate_argnums=donated).lower(*args).compile().as_text()
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text)
    return any(math.prod(map(int, shape.split(","))) >= 1000 for shape in shapes)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of CPUs")
def test_nothing_is_copied(rng):
    """Neither the cache nor a router's weight, of which jnp.matmul would make a transposed copy."""
    q, keys, values, mask = attention(rng, "float32", 1, 4, 4)
    assert not copies(remembered, {"key": keys[None], "value": values[None]}, q, mask, donated=0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, 64), (16, 64)))
    choose = functools.partial(router.choose_for, top_k=2, transpose_w=True)
    assert not copies(lambda x, w: choose(x, w)[1], x, w)
    linear = lambda x, w: example("decoder.layers").Linear(w)(x)
    assert not copies(linear, x, w)
    assert copies(lambda x, w: jnp.matmul(x, w.T), x, w), "this test sees no copies"


def test_pages():
    pages = example("decoder.pages")
    size = pages.PAGE
    assert pages.whole_pages(size, size) == (size, 2 * size)
    assert pages.whole_pages(size + 64, 3 * size) == (2 * size, 4 * size)
    begin, end = pages.whole_pages(size + 64, size)
    assert begin >= end
    array = jnp.arange(3 * size // 4, dtype=jnp.int32).at[0].set(7)
    pages.enlarge([array, jnp.float32(1)])
    np.testing.assert_array_equal(array[1:], np.arange(1, array.size))
    assert array[0] == 7
