"""The order of the Hopper kernel's tiles: long matrices first, halved, or shared out; of many
groups few that have rows; offsets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import needs_hopper
from test_sm90 import product

import jax_groupgemm as jgg
from jax_groupgemm._kernels import tuned

pytestmark = [
    pytest.mark.gpu,
    needs_hopper,
]


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize(
    ("count", "m", "n"), [(128, 40, 136), (128, 136, 264), (33, 264, 264), (16, 1032, 1032)]
)
def test_longest_first(rng, transpose_a, count, m, n):
    """So many tiles that the matrices are put in order: equal lengths, none, out of order."""
    lengths = rng.integers(0, 9, count) * 17
    spans = rng.integers(0, 200, count)[:, None] + np.stack([lengths * 0, lengths], 1)
    a, b = oracle.random(rng, (m, 336), "bfloat16"), oracle.random(rng, (336, n), "bfloat16")
    f = functools.partial(jgg.segmented_mm, transpose_a=transpose_a, implementation="sm90")
    out = jax.jit(f)(a.T if transpose_a else a, b, jnp.asarray(spans, jnp.int32))
    oracle.assert_close(out, oracle.segmented_mm(a, b, spans), k=136)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize(
    ("count", "m", "n"),
    # In halves; of 64 rows; too many halves; more tiles than half of the clusters have.
    [(64, 1032, 1032), (40, 520, 520), (40, 1032, 1544), (8, 1032, 4104)],
)
@pytest.mark.parametrize("longer", [[1300], [700, 0, 650], []])
def test_few_much_longer(rng, transpose_a, count, m, n, longer, dtype):
    """Of the longest matrices tiles are halved, and who has one sits out some rounds."""
    lengths = rng.integers(0, 70, count)
    lengths[5 : 5 + len(longer)] = longer
    ends = np.cumsum(lengths)
    spans = np.stack([ends - lengths, ends], 1)
    a = oracle.random(rng, (m, int(ends[-1])), dtype)
    b = oracle.random(rng, (int(ends[-1]), n), dtype)
    precision = "highest" if dtype == "float32" else None
    f = functools.partial(jgg.segmented_mm, transpose_a=transpose_a, precision=precision)
    out = jax.jit(f)(a.T if transpose_a else a, b, jnp.asarray(spans, jnp.int32))
    oracle.assert_close(out, oracle.segmented_mm(a, b, spans), k=1300)


@pytest.mark.parametrize("groups", [256, 257, 512, 1000, 4096, 5001])
@pytest.mark.parametrize("full", ["first", "last", "some", "none"])
@pytest.mark.parametrize("offset", [None, 120])
def test_few_groups_with_rows(rng, groups, full, offset):
    """Of many; windows of empty ones are passed over."""
    sizes = np.zeros(groups, np.int32)
    where = {"first": [0, 1], "last": [groups - 1], "none": []}.get(full)
    if where is None:
        where = rng.choice(groups, 8, replace=False)
    sizes[where] = rng.integers(1, 90, len(where))
    local = groups if offset is None else 136
    x = oracle.random(rng, (int(sizes.sum()) + 37, 72), "bfloat16")
    w = oracle.random(rng, (local, 72, 40), "bfloat16")
    here = np.arange(groups) if offset is None else np.arange(offset, offset + local)
    options = {} if offset is None else {"group_offset": jnp.array(offset, jnp.int32)}
    out = product(x, w, sizes, **options)
    ends = np.cumsum(sizes)
    want = np.zeros((len(x), 40))
    for i, g in enumerate(here):
        rows = slice(ends[g] - sizes[g], ends[g])
        want[rows] = oracle.f64(x[rows]) @ oracle.f64(w[i])
    oracle.assert_close(out, want)
    inside = (np.arange(len(x)) < ends[-1]) & np.isin(
        np.searchsorted(ends, np.arange(len(x)), "right"), here
    )
    assert not np.asarray(out)[~inside].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n", [1032, 776])
def test_balanced(rng, dtype, n):
    """Matrices of so many tiles that clusters share out each by what they have had to do."""
    sizes = np.array([0, 700, 3, 90, 0, 64, 65, 300, 1, 129, 0, 17, 0])
    x = oracle.random(rng, (int(sizes.sum()) + 50, 1032), dtype)
    y = oracle.random(rng, (len(x), n), dtype)
    ends = np.cumsum(sizes)
    wide_x, wide_y = oracle.f64(x), oracle.f64(y)
    want = np.stack([wide_x[i:j].T @ wide_y[i:j] for i, j in zip(ends - sizes, ends, strict=True)])
    gradient = lambda x, y, s: jax.vjp(
        lambda w: jgg.grouped_mm(x, w, s, implementation="sm90"), jnp.zeros(want.shape, dtype)
    )[1](y)[0]
    with tuned.forced(256):
        out = jax.jit(gradient)(x, y, jnp.array(sizes))
    oracle.assert_close(out, want, k=700)
    assert not np.asarray(out)[sizes == 0].any()
    if dtype == "float16":
        return
    old = oracle.random(rng, want.shape)
    quantized = lambda v, s: jgg.nvfp4_quantize(v, axis=0, group_sizes=s)
    wgrad = lambda x, y, s, **old: jgg.nvfp4_grouped_wgrad(
        quantized(y, s), quantized(x, s), s, implementation="sm90", **old
    )
    inside = lambda v: v[: ends[-1]]
    args = inside(x), inside(y), jnp.array(sizes)
    added = jax.jit(lambda *args: wgrad(*args, existing_out=old))(*args)
    oracle.assert_close(added, oracle.f64(jax.jit(wgrad)(*args)) + old, tolerance=1e-6)
    np.testing.assert_array_equal(np.asarray(added)[sizes == 0], old[sizes == 0])


def test_large_result(rng):
    """Several times what L2 holds, of short sums; matrices too many to be put in order."""
    lengths = rng.integers(0, 40, 129)
    starts = rng.integers(0, 160, 129)
    spans = np.stack([starts, starts + lengths], 1).astype(np.int32)
    a, b = oracle.random(rng, (200, 1032), "bfloat16"), oracle.random(rng, (200, 776), "bfloat16")
    f = functools.partial(jgg.segmented_mm, transpose_a=True, implementation="sm90")
    out = np.asarray(jax.jit(f)(a, b, spans))
    assert out.size > 1 << 26
    for one, (i, j) in zip(out, spans, strict=True):
        oracle.assert_close(one, oracle.f64(a)[i:j].T @ oracle.f64(b)[i:j], k=40)


@pytest.mark.parametrize("full", [range(20, 28), range(36, 44), range(56, 64)])
@pytest.mark.parametrize(("form", "offset"), [("spans", 0), ("sizes", 0), ("sizes", 20)])
def test_many_matrices_without_rows(rng, form, offset, full):
    """More tiles without slices, one after the other, than there are places for works: what is late
    of the tile before must not wait for another tile."""
    sizes = np.zeros(64, np.int32)
    sizes[list(full)] = 80
    a, b = oracle.random(rng, (640, 1032), "bfloat16"), oracle.random(rng, (640, 1032), "bfloat16")
    ends = np.cumsum(sizes)
    spans = np.stack([ends - sizes, ends], 1)
    if form == "spans":
        f = lambda a, b: jgg.segmented_mm(
            a, b, jnp.asarray(spans), transpose_a=True, implementation="sm90"
        )
    else:
        product = lambda a, w: jgg.grouped_mm(
            a, w, jnp.asarray(sizes), group_offset=offset, implementation="sm90"
        )
        zeros = jnp.zeros((64 - offset, 1032, 1032), "bfloat16")
        f = lambda a, b: jax.vjp(lambda w: product(a, w), zeros)[1](b)[0]
    with tuned.forced(256):
        out = oracle.f64(jax.jit(f)(a, b))
    x, y = oracle.f64(a), oracle.f64(b)
    want = np.stack([x[i:j].T @ y[i:j] for i, j in spans[offset:]])
    oracle.assert_close(out, want, tolerance=oracle.TOLERANCE["bfloat16"])
    assert not out[sizes[offset:] == 0].any()


@pytest.mark.parametrize("result", ["bfloat16", "float32"])
def test_offsets_of_no_group(rng, result):
    """The first group that there is none of is as far away as int32 goes."""
    x, y = oracle.random(rng, (640, 256), "bfloat16"), oracle.random(rng, (640, 264), "bfloat16")
    sizes = jnp.full(8, 80)

    def gradients(w, offset):
        product = lambda w: jgg.grouped_mm(
            x, w, sizes, group_offset=offset, implementation="sm90", preferred_element_type=result
        )
        out, pullback = jax.vjp(product, w)
        return out, pullback(y.astype(result))[0]

    f = jax.jit(gradients)
    w = jnp.ones((5, 256, 264), "bfloat16")
    with tuned.forced(256):
        for offset in (-(2**31), -(2**31) + 3, -(2**31) + 8, -5, 8, 2**31 - 1):
            for got in f(w, jnp.int32(offset)):
                assert not np.asarray(got).any()
        out, dw = f(w, jnp.int32(-4))  # one of them, the last, is the first group
    assert np.asarray(out)[:80].any()
    assert not np.asarray(out)[80:].any()
    assert np.asarray(dw)[4].any()
    assert not np.asarray(dw)[:4].any()
