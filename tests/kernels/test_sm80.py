"""The generic kernel's large tiles of 16-bit elements: shapes for which they are chosen, rests of
every kind, and every option of an epilogue."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import names

import jax_groupgemm as jgg

# What reads and writes is tested on a CPU too, of fewer columns.
IMPLEMENTATIONS = ["reference", pytest.param("sm80", marks=pytest.mark.gpu)]
ON_GPU = pytest.mark.gpu
SIZES = np.array([130, 0, 257, 3, 97, 200])  # and 41 rows of no group
ROWS = int(SIZES.sum()) + 41
# K, for which of an H200's tiles: two blocks of 128 x 128, or 128 x 256.
SHORT, LONG = 72, 1032


def product(x, w, implementation, **options):
    f = lambda x, w, s, o: jgg.grouped_mm(x, w, s, implementation=implementation, **o)
    arrays = {name: of for name, of in options.items() if isinstance(of, jax.Array)}
    rest = {name: of for name, of in options.items() if name not in arrays}
    return jax.jit(lambda x, w, s, o: f(x, w, s, {**o, **rest}))(x, w, jnp.asarray(SIZES), arrays)


def operands(rng, implementation, k, dtype, transpose_w):
    n = 8208 if implementation == "sm80" else 80
    x, w = oracle.random(rng, (ROWS, k), dtype), oracle.random(rng, (len(SIZES), k, n), dtype)
    return x, (w.swapaxes(1, 2) if transpose_w else w), n


@ON_GPU
@pytest.mark.parametrize("k", [SHORT, LONG])
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_this_kernel_runs(rng, k, transpose_w, dtype):
    x, w, _ = operands(rng, "sm80", k, dtype, transpose_w)
    f = functools.partial(jgg.grouped_mm, transpose_w=transpose_w, implementation="sm80")
    ran = names(f, x, w, jnp.asarray(SIZES))
    assert any("PipelinedSm80Kernel" in name for name in ran), ran


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("k", [SHORT, LONG])
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(("dtype", "result"), [("bfloat16", None), ("float16", "float32")])
@pytest.mark.one_in(4)
def test_products(rng, implementation, k, transpose_w, dtype, result):
    x, w, _ = operands(rng, implementation, k, dtype, transpose_w)
    out = product(
        x, w, implementation, transpose_w=transpose_w, preferred_element_type=result or dtype
    )
    want = oracle.grouped_mm(x, w, SIZES, transpose_w=transpose_w)
    oracle.assert_close(out, want, k=k, tolerance=1e-5 if result else None)
    assert not np.asarray(out[-41:]).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("k", [SHORT, LONG])
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@pytest.mark.one_in(4)
def test_epilogues(rng, implementation, k, transpose_w, activation):
    """Bias, activation, row scale and existing result; a gated one reads two columns in turns."""
    x, w, n = operands(rng, implementation, k, "bfloat16", transpose_w)
    x = x / k**0.5
    columns = n // 2 if activation == "swiglu" else n
    options = {
        "bias": oracle.random(rng, (len(SIZES), n)),
        "row_scale": oracle.random(rng, (ROWS,)),
        "existing_out": oracle.random(rng, (ROWS, columns), "bfloat16"),
    }
    out = product(x, w, implementation, transpose_w=transpose_w, activation=activation, **options)
    y = oracle.grouped_mm(x, w, SIZES, transpose_w=transpose_w)
    group = np.repeat(np.arange(len(SIZES)), SIZES)
    y = y[: len(group)] + oracle.f64(options["bias"])[group]
    if activation == "swiglu":
        y = oracle.f64(jax.nn.silu(y[:, :columns])) * y[:, columns:]
    elif activation == "gelu":
        y = oracle.f64(jax.nn.gelu(y))
    want = oracle.f64(options["existing_out"])
    want[: len(group)] += oracle.f64(options["row_scale"])[: len(group), None] * y
    oracle.assert_close(out, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("columns", [8200, 8203])
@pytest.mark.one_in(4)
def test_columns_that_end_anywhere(rng, implementation, columns):
    """Weights with rows of K: the number of columns need not be a multiple of anything."""
    n = columns if implementation == "sm80" else columns - 8128
    x, w = (oracle.random(rng, shape, "bfloat16") for shape in ((ROWS, LONG), (6, n, LONG)))
    out = product(x, w, implementation, transpose_w=True)
    oracle.assert_close(out, oracle.grouped_mm(x, w, SIZES, transpose_w=True), k=LONG)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("groups", [48, 100])
@pytest.mark.parametrize("mean", [0, 5, 20, 90])
@pytest.mark.one_in(4)
def test_weight_gradients(rng, implementation, groups, mean):
    """Sums of no rows, of less than half a slice, of one slice and more; tiles side by side."""
    few = implementation != "sm80"
    groups, m, n = (5, 24, 40) if few else (groups, 520, 776)
    sizes = rng.integers(0, 2 * mean + 1, groups) * rng.integers(0, 2, groups)
    rows = int(sizes.sum()) + 7
    x, ct = oracle.random(rng, (rows, m), "bfloat16"), oracle.random(rng, (rows, n), "bfloat16")
    w = jnp.zeros((groups, m, n), "bfloat16")
    f = lambda w: jgg.grouped_mm(x, w, jnp.asarray(sizes), implementation=implementation)
    (out,) = jax.jit(lambda w, ct: jax.vjp(f, w)[1](ct))(w, ct)
    ends = np.cumsum(sizes)
    want = [
        oracle.f64(x)[e - s : e].T @ oracle.f64(ct)[e - s : e]
        for e, s in zip(ends, sizes, strict=True)
    ]
    oracle.assert_close(out, np.stack(want))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.one_in(4)
def test_spans(rng, implementation, overlapping):
    """The gradients of products of spans, which may overlap and come in any order."""
    few = implementation != "sm80"
    k, m, n = 700, *((16, 24) if few else (2056, 1032))
    ends = np.array([130, 131, 400, 520, 600])
    spans = np.stack([ends - [130, 0, 250, 100, 80], ends], 1)
    if overlapping:
        spans = np.concatenate([spans, [[50, 450], [0, 700]]])[::-1]
    a, b = oracle.random(rng, (m, k), "bfloat16"), oracle.random(rng, (k, n), "bfloat16")
    ct = oracle.random(rng, (len(spans), m, n), "bfloat16")
    f = lambda a, b: jgg.segmented_mm(a, b, jnp.asarray(spans), implementation=implementation)
    out, vjp = jax.vjp(f, a, b)
    oracle.assert_close(out, oracle.segmented_mm(a, b, spans), k=k)
    wants = oracle.segmented_mm_grads(a, b, spans, ct)
    for got, want in zip(vjp(ct), wants, strict=True):
        oracle.assert_close(got, want, k=7 * n)
