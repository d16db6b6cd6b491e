"""Adapters of low rank that Hopper's kernels of prepacked weights add to a tile's sums."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import needs_hopper, run
from qmm_problems import PACKED, TRANSPOSED

import jax_groupgemm as jgg

pytestmark = [pytest.mark.gpu, needs_hopper]

FORMATS = [
    ("fp8", 8, 128), ("nvfp4", 4, 16), ("mxfp4", 4, 32), ("mxfp8", 8, 32),
    *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
]  # fmt: skip
# Groups of no row, of one, of a tile and one beside; tiles of 192 rows, and of 128.
SIZES = {
    192: np.array([192, 0, 193, 1, 385, 16, 17, 160, 96, 97, 33, 64, 129]),
    128: np.array([64, 0, 128, 1, 129, 16, 17, 100, 96, 97, 33, 64, 129]),
}


def problem(rng, mode, bits, group, tile=192, rank=16, dtype="bfloat16"):
    """x, w, the two factors and a cotangent, with rows of no group, and odd numbers of tiles along
    both axes."""
    sizes = SIZES[tile]
    groups, rows = len(sizes), sizes.sum() + 5
    n, k = (64 * 9, 128 * 3) if group == 128 else (64 * 11, 64 * 5)
    scale = jnp.asarray(rng.uniform(0.5, 2, groups), "float32") if mode == "nvfp4" else None
    q = oracle.random_quantized(rng, (groups, n, k), mode, bits, group, dtype, scale)
    shapes = (rows, k), (groups, k, rank), (groups, rank, n), (rows, n)
    x, down, up, ct = (oracle.random(rng, shape, dtype) for shape in shapes)
    return x, q, (down / 8, up / 4), ct


def by_group(sizes, a, w):
    """Rows times their group's matrix."""
    ends = np.cumsum(sizes)
    spans = zip(ends - sizes, ends, w, strict=True)
    return np.concatenate([a[begin:end] @ one for begin, end, one in spans])


def factor(sizes, x, w):
    """The same, as the kernels round them."""
    return oracle.f64(jnp.asarray(by_group(sizes, oracle.f64(x), oracle.f64(w)), x.dtype))


def kinds(kernels):
    return [kind for name in kernels for kind in (TRANSPOSED, PACKED) if kind in name]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("tile", "rank"), [(192, 16), (192, 64), (192, 24), (128, 8), (128, 32)])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.one_in(4)
def test_values(rng, form, tile, rank, dtype):
    """Two kernels make the result: no other adds to it."""
    x, q, (down, up), _ = problem(rng, *form, tile, rank, dtype)
    sizes = SIZES[tile]
    f = lambda x, q, *a: jgg.grouped_qmm(
        x, q, jnp.asarray(sizes), adapter=a, preferred_element_type="float32"
    )
    out, kernels = run(jax.jit(f), x, jgg.prepack(q, scales_dtype=scales_of(q, dtype)), down, up)
    assert len(kernels) == 2, kernels
    assert kinds(kernels) == [PACKED]
    covered = sizes.sum()
    want = oracle.grouped_qmm(x[:covered], q, sizes)
    want += by_group(sizes, factor(sizes, x[:covered], down), oracle.f64(up))
    tolerance = 4e-3 if form[0] == "fp8" else 2e-4  # its weights are rounded to 16 bits
    oracle.assert_close(out[:covered], want, tolerance=tolerance)
    assert not np.asarray(out)[covered:].any()


def scales_of(q, dtype):
    return dtype if q.mode == "affine" else None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rank", [16, 40, 64])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.one_in(4)
def test_gradients(rng, form, rank, dtype):
    """dx is one kernel's, too."""
    x, q, (down, up), ct = problem(rng, *form, 192, rank, dtype)
    sizes = SIZES[192]
    f = lambda x, q, *a: jgg.grouped_qmm(x, q, jnp.asarray(sizes), adapter=a)

    def gradients(x, q, down, up, ct):
        return jax.vjp(lambda x, down, up: f(x, q, down, up), x, down, up)[1](ct)

    packed = jgg.prepack(q, scales_dtype=scales_of(q, dtype))
    (dx, ddown, dup), kernels = run(jax.jit(gradients), x, packed, down, up, ct)
    assert kinds(kernels) == [TRANSPOSED]
    covered = sizes.sum()
    x, ct = x[:covered], ct[:covered]
    low, dlow = factor(sizes, x, down), factor(sizes, ct, up.swapaxes(1, 2))
    want = oracle.grouped_qmm(ct, q, sizes, transpose_w=False)
    want += by_group(sizes, dlow, oracle.f64(down).swapaxes(1, 2))
    oracle.assert_close(dx[:covered], want, tolerance=1e-2)
    assert not np.asarray(dx)[covered:].any()
    ends = np.cumsum(sizes)
    for got, a, b in ((ddown, oracle.f64(x), dlow), (dup, low, oracle.f64(ct))):
        spans = zip(ends - sizes, ends, strict=True)
        sums = np.stack([a[begin:end].T @ b[begin:end] for begin, end in spans])
        oracle.assert_close(got, sums, tolerance=1e-2)


def test_options_and_an_offset(rng):
    """Sums have the adapter's product before their bias; w and the adapter hold some groups."""
    sizes = SIZES[192]
    x, q, adapter, _ = problem(rng, "nvfp4", 4, 16)
    some = lambda tree: jax.tree.map(lambda a: a[3:9], tree)
    bias = oracle.random(rng, (6, q.shape[1]), "bfloat16")
    f = lambda x, q, adapter, bias: jgg.grouped_qmm(
        x, q, jnp.asarray(sizes), group_offset=3, adapter=adapter, bias=bias,
        preferred_element_type="float32",
    )  # fmt: skip
    out = jax.jit(f)(x, jgg.prepack(some(q)), some(adapter), bias)
    begin, end = sizes[:3].sum(), sizes[:9].sum()
    here, x = sizes[3:9], x[begin:end]
    want = oracle.grouped_qmm(x, some(q), here) + np.repeat(oracle.f64(bias), here, axis=0)
    want += by_group(here, factor(here, x, adapter[0][3:9]), oracle.f64(adapter[1][3:9]))
    oracle.assert_close(out[begin:end], want, tolerance=2e-4)
    assert not np.asarray(out)[:begin].any()
    assert not np.asarray(out)[end:].any()


def test_a_nan_stays_in_its_row(rng):
    """Rows beside each other in a tile, and what a tile has from the one before, do not mix."""
    x, q, (down, up), _ = problem(rng, "affine", 4, 64)
    f = jax.jit(
        lambda x: jgg.grouped_qmm(x, jgg.prepack(q), jnp.asarray(SIZES[192]), adapter=(down, up))
    )
    good, bad = oracle.f64(f(x)), oracle.f64(f(x.at[200, 7].set(jnp.nan)))
    assert np.isnan(bad[200]).all()
    np.testing.assert_array_equal(np.delete(bad, 200, 0), np.delete(good, 200, 0))


@pytest.mark.parametrize("transpose_w", [True, False])
def test_the_same_bits(rng, transpose_w):
    x, q, (down, up), ct = problem(rng, "nvfp4", 4, 16)
    rows, adapter = (
        (x, (down, up)) if transpose_w else (ct, tuple(a.swapaxes(1, 2) for a in (up, down)))
    )
    f = jax.jit(
        lambda x, q, adapter: jgg.grouped_qmm(
            x, q, jnp.asarray(SIZES[192]), adapter=adapter, transpose_w=transpose_w
        )
    )
    packed = jgg.prepack(q)
    first = np.asarray(f(rows, packed, adapter))
    for _ in range(50):
        assert np.asarray(f(rows, packed, adapter)).tobytes() == first.tobytes()
