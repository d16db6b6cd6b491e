"""Products with quantized weights against numpy: values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
from conftest import GPU_KERNELS
from qmm_problems import (
    BYTE_SCALES,
    assert_values,
    every_scale_and_code,
    every_scale_and_code_along_n,
    needs,
)

import jax_groupgemm as jgg
from jax_groupgemm._quantized import reference as qmm_reference

# Mode, bits and group size; with K or N, whichever is quantized, of every remainder.
MODES = [
    ("affine", 4, 64, 576), ("affine", 8, 128, 640), ("affine", 2, 32, 608), ("affine", 3, 64, 64),
    ("affine", 5, 32, 96), ("affine", 6, 128, 128), ("affine", 3, 16, 160), ("affine", 6, 16, 48),
    ("mxfp4", 4, 32, 544), ("mxfp8", 8, 32, 608), ("nvfp4", 4, 16, 48),
]  # fmt: skip
DTYPES = ["float32", "bfloat16", "float16"]
ODD = (1, 3, 33, 129)  # the other of K and N


@pytest.fixture(params=["reference", "cpu", *GPU_KERNELS])
def implementation(request) -> str:
    return needs(request.param)


# Kernels take every dtype; the reference, whose compilation is slow, one of each combination.
VALUES = [
    pytest.param(
        kernel, i, transpose_w, dtype, marks=marks, id=f"{kernel}-{i}-{transpose_w}-{dtype}"
    )
    for kernel, marks in (
        ("reference", ()),
        ("cpu", ()),
        *((k.values[0], k.marks) for k in GPU_KERNELS),
    )
    for i in range(len(MODES))
    for transpose_w in (True, False)
    for d, dtype in enumerate(DTYPES)
    if kernel != "reference" or (i + transpose_w + d) % 3 == 0
]


@pytest.mark.parametrize(("kernel", "case", "transpose_w", "dtype"), VALUES)
@pytest.mark.one_in(6)
def test_grouped_qmm(rng, kernel, case, transpose_w, dtype):
    """Groups of 0, 1, some and 129 rows, a tail, and more rows than there are."""
    mode, bits, group_size, length = MODES[case]
    odd = ODD[(case + transpose_w) % 4]
    scale = jnp.array([0.5, 3, 1, 0.1, 2], jnp.float32) if mode == "nvfp4" else None
    q = oracle.random_quantized(
        rng, (5, odd, length), mode, bits, group_size, DTYPES[case % 3], scale
    )
    x = oracle.random(rng, (180, length if transpose_w else odd), dtype)
    f = functools.partial(jgg.grouped_qmm, transpose_w=transpose_w, implementation=needs(kernel))
    f = jax.jit(f)
    for sizes in ([1, 0, 129, 7, 33], [0, 40, 0, 100, 0], [-3, 90, 1, 60, 99], [0] * 5):
        out = f(x, q, np.array(sizes))
        assert out.dtype == dtype
        want = oracle.grouped_qmm(x, q, sizes, transpose_w=transpose_w)
        oracle.assert_close(out, want, k=x.shape[1])
        assert not np.asarray(out)[sum(max(s, 0) for s in sizes) :].any()


@pytest.mark.parametrize(("k", "dtype"), [(320, "bfloat16"), (320, "float16"), (2048, "float32")])
@pytest.mark.parametrize("mode", BYTE_SCALES)
@pytest.mark.parametrize("rows", [256, 16, 8])
@pytest.mark.one_in(10)
def test_every_scale_and_code(implementation, mode, k, dtype, rows):
    """Row n has scale byte n and every code: rows of a unit matrix give the values themselves, all
    at once or a few at a time, for which there are other kernels."""
    q = every_scale_and_code(mode, k)
    x = np.eye(256, k).astype(jnp.dtype(dtype))
    f = jax.jit(functools.partial(jgg.quantized_matmul, implementation=implementation))
    out = np.concatenate([f(part, q) for part in np.split(x, 256 // rows)])
    # Beside float16 rows Hopper's kernel of lines does not round values to float16.
    fills = not (dtype == "float16" and implementation in (None, "sm90"))
    assert_values(out.T, oracle.dequantize(q, dtype), fills)


# There is no other kernel for these.
@pytest.mark.parametrize("kernel", ["reference", "cpu", GPU_KERNELS[0]])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", BYTE_SCALES)
@pytest.mark.one_in(8)
def test_every_scale_and_code_along_n(kernel, mode, dtype):
    """Likewise of weights that are quantized along N; with each unit once, or more often, for tiles
    of every height."""
    q = every_scale_and_code_along_n(mode)
    want = oracle.dequantize(q, dtype).T
    f = functools.partial(jgg.quantized_matmul, transpose_w=False, implementation=kernel)
    for times in (1, 16) if kernel == "reference" else (1, 16, 144):
        x = np.tile(np.eye(16), (times, 1)).astype(jnp.dtype(dtype))
        out = np.asarray(jax.jit(f)(x, q)).reshape(times, 16, -1)
        for part in out[:: max(times - 1, 1)]:  # the first and the last
            assert_values(part.T, want)


@pytest.mark.parametrize("parts", [1, 4, 8])
@pytest.mark.parametrize(
    ("bits", "transpose_w"), [(2, True), (3, True), (5, False), (5, True), (6, True), (8, True)]
)
@pytest.mark.one_in(8)
def test_affine_values_are_rounded_once(rng, implementation, bits, transpose_w, parts):
    q = oracle.random_quantized(rng, (32, 64), "affine", bits, 32, "bfloat16")
    x = jnp.eye(64 if transpose_w else 32, dtype="bfloat16")
    f = functools.partial(
        jgg.quantized_matmul, transpose_w=transpose_w, implementation=implementation
    )
    out = jnp.concatenate([f(part, q) for part in jnp.split(x, parts)])
    want = oracle.dequantize(q, "bfloat16")
    np.testing.assert_array_equal(oracle.f64(out), want.T if transpose_w else want)


@pytest.mark.parametrize("kernel", GPU_KERNELS)
@pytest.mark.parametrize("k", [64, 96, 192, 704, 1024])
@pytest.mark.parametrize("mode", range(len(MODES)))
def test_few_rows(rng, kernel, mode, k):
    """At most 8 rows a group on average, of which one has 16. Whole 64 codes to a line and, where
    there are other kernels for them, 32."""
    mode, bits, group_size, _ = MODES[mode]
    while k % group_size:
        group_size //= 2
    q = oracle.random_quantized(rng, (5, 140, k), mode, bits, group_size, "bfloat16")
    x = oracle.random(rng, (32, k), "bfloat16")
    sizes = np.array([3, 0, 16, 9, 1])
    f = jax.jit(functools.partial(jgg.grouped_qmm, implementation=needs(kernel)))
    oracle.assert_close(f(x, q, sizes), oracle.grouped_qmm(x, q, sizes), k=k)


def test_nan_stays_in_its_expert(rng, implementation):
    """A NaN scale, or weights of an empty group, or rows of the tail: forward and backward."""
    q = oracle.random_quantized(
        rng, (4, 6, 64), "nvfp4", scale=jnp.array([1, np.nan, 1, 2], "float32")
    )
    scales = np.array(q.scales)
    scales[2, 3, 1] = scales[1, 0, 0] = 0x7F
    q = dataclasses.replace(q, scales=jnp.asarray(scales))
    x = oracle.random(rng, (20, 64)).at[17:].set(np.nan)
    sizes = jnp.array([5, 0, 4, 8])
    f = lambda x, scale: jgg.grouped_qmm(
        x, dataclasses.replace(q, global_scale=scale), sizes, implementation=implementation
    )
    out, (dx, dscale) = jax.jit(
        lambda x, scale: (f(x, scale), jax.vjp(f, x, scale)[1](jnp.ones((20, 6))))
    )(x, q.global_scale)
    bad = np.zeros((20, 6), bool)
    bad[5:9, 3] = True
    np.testing.assert_array_equal(np.isnan(out), bad)
    np.testing.assert_array_equal(np.isnan(dx).any(1), [5 <= i < 9 for i in range(20)])
    np.testing.assert_array_equal(np.isnan(dscale), [False, False, True, False])
    assert not np.asarray(dx)[17:].any()
    assert np.asarray(dscale)[1] == 0


def test_a_global_scale_for_every_column(rng, implementation):
    """As of gate and up in one: forward, backward, in a batch and with an epilogue; NaN of an
    expert that has no rows stays there."""
    scale = rng.uniform(0.1, 3, (4, 128)).astype("float32")
    scale[2] = np.nan
    q = oracle.random_quantized(rng, (4, 128, 64), "nvfp4", scale=jnp.asarray(scale))
    x, sizes = oracle.random(rng, (20, 64)), jnp.array([5, 3, 0, 8])
    row_scale, bias = oracle.random(rng, (20,)), oracle.random(rng, (4, 128))
    same = {"implementation": implementation}
    f = lambda x, scale: jgg.grouped_qmm(
        x, dataclasses.replace(q, global_scale=scale), sizes, **same
    )
    indices = jnp.array([0, 3, -1, 1, 0, 4])
    one, whole = jax.tree.map(lambda leaf: leaf[3], q), jgg.prepack(q)

    @jax.jit
    def products(x, scale):
        out, pullback = jax.vjp(f, x, scale)
        return {
            "out": out,
            "gradients": pullback(out),
            "of a batch": jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), scale),
            "prepacked": jgg.grouped_qmm(x, whole, sizes, **same),
            "epilogue": jgg.grouped_qmm(
                x, whole, sizes, bias=bias, activation="swiglu", row_scale=row_scale, **same
            ),
            "gathered": jgg.gather_qmm(x[:6, None], q, None, indices, **same),
            "one": jgg.quantized_matmul(x, one, **same),
            "batched": jgg.quantized_matmul(x, jax.tree.map(lambda leaf: leaf[:2], q), **same),
        }

    got = products(x, q.global_scale)
    want = oracle.grouped_qmm(x, q, sizes)
    w, rows, group = oracle.scaled(q, "float32"), oracle.f64(x), np.repeat(np.arange(4), sizes)
    dx, dscale = np.zeros((20, 64)), np.zeros((4, 128))
    dx[:16] = np.einsum("tn,tnk->tk", want[:16], w[group])
    np.add.at(dscale, group, want[:16] ** 2 / scale[group])
    picked = np.array([0, 3, 0, 1, 0, 0])
    gathered = np.einsum("tk,tnk->tn", rows[:6], w[picked])
    gathered[np.asarray(indices) != picked] = 0
    before = want + np.concatenate([oracle.f64(bias)[group], np.zeros((4, 128))])
    gate, up = before[:, :64], before[:, 64:]
    wants = {
        "out": want,
        "gradients": (dx, dscale),
        "of a batch": np.stack([want, 2 * want]),
        "prepacked": want,
        "epilogue": gate / (1 + np.exp(-gate)) * up * oracle.f64(row_scale)[:, None],
        "gathered": gathered[:, None],
        "one": rows @ w[3].T,
        "batched": rows @ w[:2].swapaxes(1, 2),
    }
    for name, value in wants.items():
        jax.tree.map(oracle.assert_close, got[name], value)
    assert not np.asarray(got["out"])[16:].any()
    with pytest.raises(ValueError, match=r"or leading axes of .* with transpose_w=False"):
        jgg.grouped_qmm(jnp.ones((20, 128)), q, sizes, transpose_w=False)


@pytest.mark.parametrize("activation", [*moe_oracle.ACTIVATIONS, *moe_oracle.GATED])
@pytest.mark.one_in(3)
def test_epilogue(rng, implementation, activation):
    """The options of grouped_mm, with a group offset."""
    q = oracle.random_quantized(rng, (3, 70, 96), "affine", 4, 32)
    x = oracle.random(rng, (40, 96)) / 10
    bias, scale = oracle.random(rng, (3, 70)), oracle.random(rng, (40,))
    sizes = np.array([4, 10, 0, 9, 3])
    options = {"group_offset": np.array([1]), "bias": bias, "row_scale": scale}
    f = functools.partial(
        jgg.grouped_qmm, implementation=implementation, activation=activation, **options
    )
    y = oracle.grouped_qmm(x, q, sizes, offset=1)
    y[4:14] += oracle.f64(bias)[0]
    y[14:23] += oracle.f64(bias)[2]
    want = moe_oracle.activate(y, activation) * oracle.f64(scale)[:, None]
    oracle.assert_close(jax.jit(f)(x, q, sizes), want, tolerance=2e-6)


@pytest.mark.parametrize("transpose_w", [True, False])
def test_weights_in_parts(rng, monkeypatch, transpose_w):
    """A few columns are dequantized at a time; the last part overlaps the one before, also where
    sums are accumulated (the gradient of rows that a batch shares)."""
    monkeypatch.setattr(qmm_reference, "_PART", 3000)
    q = oracle.random_quantized(rng, (3, 65, 224), "affine", 5, 32)
    x = oracle.random(rng, (30, 224 if transpose_w else 65))
    sizes = np.array([[11, 0, 9], [0, 30, 0]])
    f = lambda x: jax.vmap(
        lambda s: jgg.grouped_qmm(x, q, s, transpose_w=transpose_w, implementation="reference")
    )(sizes)
    ct = oracle.random(rng, (2, 30, 65 if transpose_w else 224))
    out, dx = jax.jit(lambda x: (f(x), jax.vjp(f, x)[1](ct)[0]))(x)
    w = oracle.dequantize(q)
    w = w.swapaxes(1, 2) if transpose_w else w
    want_dx = np.zeros(x.shape)
    for i in range(2):
        oracle.assert_close(out[i], oracle.grouped_mm(x, w, sizes[i]))
        want_dx += oracle.grouped_mm_grads(x, w, sizes[i], ct[i])[0]
    oracle.assert_close(dx, want_dx)


@pytest.mark.parametrize("mode", ["affine", "nvfp4"])
def test_long_sums_of_positive_data(rng, mode):
    """Columns are few where K is long, but never one alone, which XLA sums less exactly."""
    k = 2**20
    x, w = rng.random((2, k), np.float32), rng.random((1, 2, k), np.float32)
    q = jgg.quantize(w, mode=mode)
    want = oracle.f64(x) @ oracle.f64(jgg.dequantize(q, jnp.float32))[0].T
    for name in ("reference", "cpu") if jax.default_backend() == "cpu" else ("reference",):
        out = jgg.grouped_qmm(x, q, [2], implementation=name)
        assert np.max(np.abs(oracle.f64(out) / want - 1)) <= 2e-6


# ---- gather_qmm and quantized_matmul ---------------------------------------------------------


def gather_oracle(x, q, lhs=None, rhs=None, transpose_w=True):
    w = oracle.scaled(q, x.dtype)
    return oracle.gather_mm(x, w.swapaxes(-1, -2) if transpose_w else w, lhs, rhs)


@pytest.mark.parametrize("m", [1, 130])
@pytest.mark.parametrize("transpose_w", [True, False])
@pytest.mark.one_in(3)
def test_gather_qmm(rng, implementation, transpose_w, m):
    """Any rank with broadcasting, indices that do not exist, a missing one."""
    q = oracle.random_quantized(rng, (2, 3, 64, 64), "nvfp4", scale=jnp.array([0.5, 2], "float32"))
    x = oracle.random(rng, (5, m, 64), "bfloat16")
    lhs, rhs = np.array([[0], [4], [2]]), np.array([5, 0, 6, -1, 2])
    same = {"transpose_w": transpose_w, "implementation": implementation}
    f = jax.jit(functools.partial(jgg.gather_qmm, **same))
    out = f(x, q, lhs, rhs)
    assert out.shape == (3, 5, m, 64)
    oracle.assert_close(out, gather_oracle(x, q, lhs, rhs, transpose_w))
    assert not np.asarray(out)[:, 2:4].any()
    if m == 1:
        lhs = lhs[:, :, None] if transpose_w else None
        rhs = None if transpose_w else rhs
        out = f(x, q, lhs, rhs)
        oracle.assert_close(out, gather_oracle(x, q, lhs, rhs, transpose_w))


def test_sorted_indices(rng, implementation):
    """A promise kept changes no bit, one that is broken gives NaN; another order changes no more
    than the order of sums."""
    q = oracle.random_quantized(rng, (6, 40, 64), "affine")
    x = oracle.random(rng, (24, 1, 64), "bfloat16")
    lhs, rhs = rng.permutation(24), np.sort(rng.integers(0, 6, 24))
    f = jax.jit(
        functools.partial(jgg.gather_qmm, implementation=implementation),
        static_argnames="sorted_indices",
    )
    ordered = f(x, q, lhs, rhs, sorted_indices=True)
    np.testing.assert_array_equal(ordered, f(x, q, lhs, rhs))
    mixed = rng.permutation(24)
    oracle.assert_close(f(x, q, lhs[mixed], rhs[mixed]), oracle.f64(ordered)[mixed])
    oracle.assert_close(ordered, gather_oracle(x, q, lhs, rhs))
    assert np.isnan(oracle.f64(f(x, q, lhs, rhs[::-1], sorted_indices=True))).all()


@pytest.mark.parametrize("transpose_w", [True, False])
def test_quantized_matmul(rng, implementation, transpose_w):
    """One matrix and rows of any rank; batches broadcast as in matmul, weights are not copied."""
    f = functools.partial(
        jgg.quantized_matmul, transpose_w=transpose_w, implementation=implementation
    )
    q = oracle.random_quantized(rng, (64, 64), "mxfp8")
    w = oracle.dequantize(q).T if transpose_w else oracle.dequantize(q)
    for shape in ((64,), (2, 3, 5, 64)):
        x = oracle.random(rng, shape)
        out = jax.jit(functools.partial(f, preferred_element_type="float16"))(x, q)
        assert out.dtype == "float16"
        oracle.assert_close(out, oracle.f64(x) @ w)
    scale = jnp.array([[1], [2]], jnp.float32)
    q = oracle.random_quantized(rng, (2, 1, 64, 64), "nvfp4", scale=scale)
    w = oracle.scaled(q, "float32")
    w = w.swapaxes(-1, -2) if transpose_w else w
    for shape in ((64,), (3, 5, 64)):
        x = oracle.random(rng, shape)
        oracle.assert_close(jax.jit(f)(x, q), np.matmul(oracle.f64(x), w))


@pytest.mark.parametrize("empty", ["rows", "columns", "groups", "contracted"])
def test_nothing_to_multiply(implementation, empty):
    t, g, n, k = (0 if empty == e else size for e, size in
                  (("rows", 5), ("groups", 2), ("columns", 3), ("contracted", 32)))  # fmt: skip
    q = jgg.Quantized(
        jnp.zeros((g, n, k // 8), jnp.uint32), jnp.zeros((g, n, k // 32), jnp.uint8),
        mode="mxfp4", bits=4, group_size=32,
    )  # fmt: skip
    f = lambda x: jgg.grouped_qmm(x, q, jnp.full(g, 2), implementation=implementation)
    out, vjp = jax.vjp(f, jnp.ones((t, k)))
    assert out.shape == (t, n)
    assert not np.asarray(out).any()
    assert not np.asarray(vjp(out)[0]).any()
