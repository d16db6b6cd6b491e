"""Products with quantized weights against numpy: values, gradients, transformations, errors."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import GPU_KERNELS

import jax_groupgemm as jgg
from jax_groupgemm import _call, _qmm_reference

# Mode, bits and group size; with K or N, whichever is quantized, of every remainder.
MODES = [
    ("affine", 4, 64, 576), ("affine", 8, 128, 640), ("affine", 2, 32, 608), ("affine", 3, 64, 64),
    ("affine", 5, 32, 96), ("affine", 6, 128, 128),
    ("mxfp4", 4, 32, 544), ("mxfp8", 8, 32, 608), ("nvfp4", 4, 16, 48),
]  # fmt: skip
DTYPES = ["float32", "bfloat16", "float16"]
ODD = (1, 3, 33, 129)  # the other of K and N


def needs(kernel: str) -> str:
    """The kernel, where the device and the build have it."""
    if kernel != "reference" and "jgg_qmm" not in _call.TARGETS:
        pytest.skip("has no kernel yet")
    if kernel == "sm90" and 90 not in _call.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    return kernel


@pytest.fixture(params=["reference", *GPU_KERNELS])
def implementation(request) -> str:
    return needs(request.param)


# Kernels take every dtype; the reference, whose compilation is slow, one of each combination.
VALUES = [
    pytest.param(
        kernel, i, transpose_w, dtype, marks=marks, id=f"{kernel}-{i}-{transpose_w}-{dtype}"
    )
    for kernel, marks in (("reference", ()), *((k.values[0], k.marks) for k in GPU_KERNELS))
    for i in range(len(MODES))
    for transpose_w in (True, False)
    for d, dtype in enumerate(DTYPES)
    if kernel != "reference" or (i + transpose_w + d) % 3 == 0
]


@pytest.mark.parametrize(("kernel", "case", "transpose_w", "dtype"), VALUES)
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


@pytest.mark.parametrize(("k", "dtype"), [(128, "bfloat16"), (2048, "float32")])
@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_every_scale_and_code(implementation, mode, k, dtype):
    """Row n has scale byte n and every code: rows of a unit matrix give the values themselves."""
    bits, group = (8, 32) if mode == "mxfp8" else (4, 16 if mode == "nvfp4" else 32)
    codes = np.arange(k) % 2**bits
    if mode == "mxfp8":
        codes = np.where(codes % 128 == 127, 5, codes)  # NaN would fill its row
    bytes_ = codes if bits == 8 else codes[::2] | codes[1::2] << 4
    weight = np.broadcast_to(bytes_.astype(np.uint8).view(np.uint32), (256, k * bits // 32))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], k // group, 1)
    q = jgg.Quantized(weight, scales, mode=mode, bits=bits, group_size=group)
    x = np.eye(256, k).astype(jnp.dtype(dtype))
    out = jax.jit(functools.partial(jgg.quantized_matmul, implementation=implementation))(x, q)
    want = oracle.dequantize(q, dtype)
    finite = np.isfinite(want).all(1)
    assert finite.sum() > 30
    seen = min(k, 256)  # units there are
    got, want = oracle.f64(out).T[:, :seen], want[:, :seen]
    assert not np.isfinite(got[~finite]).any()
    tiny = abs(want) < 2.0**-126  # products may be flushed
    got, want, tiny = got[finite], want[finite], tiny[finite]
    np.testing.assert_array_equal(got[~tiny], want[~tiny])
    assert (abs(got[tiny]) < 2.0**-126).all()


@pytest.mark.parametrize(("bits", "transpose_w"), [(3, True), (5, False), (8, True)])
def test_affine_values_are_rounded_once(rng, implementation, bits, transpose_w):
    q = oracle.random_quantized(rng, (32, 64), "affine", bits, 32, "bfloat16")
    x = jnp.eye(64 if transpose_w else 32, dtype="bfloat16")
    out = jgg.quantized_matmul(x, q, transpose_w=transpose_w, implementation=implementation)
    want = oracle.dequantize(q, "bfloat16")
    np.testing.assert_array_equal(oracle.f64(out), want.T if transpose_w else want)


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


ACTIVATIONS = {
    "relu": lambda y: np.maximum(y, 0),
    "swiglu": lambda y: y[:, :35] / (1 + np.exp(-y[:, :35])) * y[:, 35:],
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
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
    want = ACTIVATIONS[activation](y) * oracle.f64(scale)[:, None]
    oracle.assert_close(jax.jit(f)(x, q, sizes), want, tolerance=2e-6)


@pytest.mark.parametrize("transpose_w", [True, False])
def test_weights_in_parts(rng, monkeypatch, transpose_w):
    """A few columns are dequantized at a time; the last part overlaps the one before, also where
    sums are accumulated (the gradient of rows that a batch shares)."""
    monkeypatch.setattr(_qmm_reference, "_PART", 3000)
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


# ---- gather_qmm and quantized_matmul ---------------------------------------------------------


def gather_oracle(x, q, lhs=None, rhs=None, transpose_w=True):
    w = oracle.dequantize(q, x.dtype)
    scale = 1.0 if q.global_scale is None else oracle.f64(q.global_scale)
    w = w * np.reshape(scale, np.shape(scale) + (1,) * (w.ndim - np.ndim(scale)))
    return oracle.gather_mm(x, w.swapaxes(-1, -2) if transpose_w else w, lhs, rhs)


@pytest.mark.parametrize("m", [1, 130])
@pytest.mark.parametrize("transpose_w", [True, False])
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
    w = oracle.dequantize(q) * oracle.f64(scale)[..., None, None]
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


# ---- transformations -------------------------------------------------------------------------

SIZES = np.array([9, 0, 8], np.int32)
# What is differentiated beside x.
CASES = {
    "affine": ("affine", 3, 32, ("scales", "biases")),
    "affine N": ("affine", 4, 64, ("scales", "biases")),
    "nvfp4": ("nvfp4", 4, 16, ("global_scale",)),
    "nvfp4 scalar N": ("nvfp4", 4, 16, ("global_scale",)),
}


@functools.cache
def problem(name):
    """x, the differentiable leaves, and f of them, of sizes and of the packed weight."""
    rng, lead = np.random.default_rng(list(name.encode())), (3,)
    mode, bits, group, leaves = CASES[name]
    transpose_w = "N" not in name
    scale = None
    if mode == "nvfp4":
        scale = jnp.asarray(rng.uniform(0.5, 2, () if "scalar" in name else lead), jnp.float32)
    q = oracle.random_quantized(rng, (*lead, 5, 128), mode, bits, group, scale=scale)
    x = oracle.random(rng, (20, 128 if transpose_w else 5)) / 4

    def f(x, p, sizes=SIZES, weight=q.weight, product=None):
        w = dataclasses.replace(q, weight=weight, **p)
        return (product or jgg.grouped_qmm)(x, w, sizes, transpose_w=transpose_w)

    return x, {leaf: getattr(q, leaf) for leaf in leaves}, f, q


def dequantized(x, w, sizes, transpose_w):
    """The product of the dequantized weight, which JAX differentiates."""
    scale = w.global_scale
    full = jgg.dequantize(dataclasses.replace(w, global_scale=None), x.dtype)
    if scale is not None:
        full = full * (scale[:, None, None] if scale.ndim else scale)
    return jgg.grouped_mm(x, full, sizes, transpose_w=transpose_w)


def assert_trees_close(got, want, tolerance=3e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.assert_close(g, w, tolerance=tolerance)


@pytest.mark.parametrize("name", ["affine", "affine N", "nvfp4 scalar N"])
def test_gradients_by_finite_differences(rng, name):
    """The loss is linear in x and in the leaves, so differences are exact but for rounding."""
    x, p, f, _ = problem(name)
    ct = oracle.random(rng, f(x, p).shape)
    loss = jax.jit(lambda x, p: (f(x, p) * ct).sum())
    for argument, gradient in enumerate(jax.jit(jax.grad(loss, (0, 1)))(x, p)):
        for leaf in jax.tree.leaves_with_path(gradient):
            path, g = leaf
            v = oracle.random(rng, g.shape)
            at = (x, p)[argument]
            step = jax.tree.map_with_path(
                lambda q, a, path=path, v=v: v if q == path else jnp.zeros_like(a), at
            )
            up, down = (
                loss(*(jax.tree.map(lambda a, s, e=e: a + e * s, at, step) if i == argument else o
                       for i, o in enumerate((x, p))))
                for e in (1, -1)
            )  # fmt: skip
            want = float(up - down) / 2
            scale = np.linalg.norm(g) * np.linalg.norm(v)
            assert abs(float((g * v).sum()) - want) <= 3e-5 * scale, (path, want)


@pytest.mark.parametrize("name", ["affine", "nvfp4"])
def test_derivatives_of_every_order(rng, name):
    """Gradients, and Hessian-vector products both ways, as of the dequantized product."""
    x, p, f, _ = problem(name)
    v = oracle.random(rng, x.shape), jax.tree.map(lambda a: oracle.random(rng, a.shape), p)

    def derivatives(x, p, v, product=None):
        loss = lambda x, p: jnp.sin(f(x, p, product=product)).sum()
        grad = jax.grad(loss, (0, 1))
        return jax.jvp(grad, (x, p), v)

    def reverse_over_forward(x, p, v):
        loss = lambda x, p: jnp.sin(f(x, p)).sum()
        return jax.grad(lambda *xp: jax.jvp(loss, xp, v)[1], (0, 1))(x, p)

    got = jax.jit(derivatives)(x, p, v)
    want = jax.jit(functools.partial(derivatives, product=dequantized))(x, p, v)
    assert_trees_close(got, want, tolerance=1e-5)
    if name == "affine":
        assert_trees_close(jax.jit(reverse_over_forward)(x, p, v), got[1], tolerance=1e-5)


def test_integer_operands_get_float0(rng):
    x, _, _, q = problem("nvfp4")
    gradient = jax.grad(lambda *args: jgg.grouped_qmm(*args).sum(), (0, 1, 2), allow_int=True)
    _, dq, dsizes = jax.eval_shape(gradient, x, q, jnp.asarray(SIZES))
    float0 = jax.dtypes.float0
    assert (dq.weight.dtype, dq.scales.dtype, dsizes.dtype) == (float0, float0, float0)
    assert dq.global_scale.dtype == "float32"


def test_half_precision_gradients(rng):
    """bfloat16 x, float16 scales: cotangents have the dtypes of what they belong to."""
    q = oracle.random_quantized(rng, (3, 5, 128), "affine", 4, 64, "float16")
    x, ct = oracle.random(rng, (20, 128), "bfloat16"), oracle.random(rng, (20, 5), "bfloat16")
    f = lambda x, s, b: jgg.grouped_qmm(x, dataclasses.replace(q, scales=s, biases=b), SIZES)
    dx, ds, db = jax.jit(lambda *a: jax.vjp(f, *a)[1](ct))(x, q.scales, q.biases)
    assert (dx.dtype, ds.dtype, db.dtype) == ("bfloat16", "float16", "float16")
    w = oracle.dequantize(q, "bfloat16")
    want_dx, dw = oracle.grouped_mm_grads(x, w.swapaxes(1, 2), SIZES, ct)
    dw = dw.swapaxes(1, 2).reshape(3, 5, 2, 64)
    oracle.assert_close(dx, want_dx)
    oracle.assert_close(db, dw.sum(-1))
    oracle.assert_close(ds, (dw * oracle.codes(q).reshape(dw.shape)).sum(-1))


# in_axes of x, the differentiable leaves, sizes and the packed weight.
AXES = [
    ("affine", (0, None, None, None)), ("affine", (None, 0, None, None)),
    ("affine", (None, None, 0, None)), ("affine", (None, None, None, 1)),
    ("affine", (1, 0, 0, 0)), ("nvfp4", (None, 0, 0, None)),
    ("nvfp4 scalar N", (None, 0, None, None)), ("nvfp4 scalar N", (0, None, None, 0)),
]  # fmt: skip


@functools.cache
def value_and_grad(name):
    *_, f, _ = problem(name)
    loss = lambda x, p, s, w: jnp.sin(f(x, p, s, w)).sum()
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


@pytest.mark.parametrize(("name", "axes"), AXES)
def test_vmap_of_value_and_grad(name, axes):
    """Over each operand, against one example at a time."""
    x, p, _, q = problem(name)
    sizes = np.array([SIZES, [0, 20, 0]])

    def batch(a, d, new):
        return a if d is None else np.stack([a, new], axis=d)

    args = (
        batch(x, axes[0], 2 * x), jax.tree.map(lambda a: batch(a, axes[1], a / 2), p),
        sizes if axes[2] == 0 else sizes[0], batch(q.weight, axes[3], ~q.weight),
    )  # fmt: skip
    single = value_and_grad(name)
    examples = [
        [a if d is None else jax.tree.map(lambda v, d=d, i=i: np.take(v, i, d), a)
         for a, d in zip(args, axes, strict=True)]
        for i in range(2)
    ]  # fmt: skip
    want = jax.tree.map(lambda *v: np.stack(v), *(single(*e) for e in examples))
    assert_trees_close(jax.jit(jax.vmap(single, axes))(*args), want, tolerance=1e-5)


def test_grad_of_vmap_shares_the_weight(rng):
    """A shared weight is not copied, and collects the gradients of the whole batch."""
    x, p, f, q = problem("affine")
    xs = jnp.stack([x, 2 * x])
    batched = jax.vmap(f, (0, None))
    shapes = str(jax.make_jaxpr(batched)(xs, p))
    assert f"u32[{q.weight.shape[0]}," in shapes.replace(" ", "")
    assert "u32[6," not in shapes
    assert "u32[2,3," not in shapes
    got = jax.jit(jax.grad(lambda xs, p: jnp.sin(batched(xs, p)).sum(), (0, 1)))(xs, p)
    one_by_one = lambda xs, p: sum(jnp.sin(f(x, p)).sum() for x in xs)
    assert_trees_close(got, jax.jit(jax.grad(one_by_one, (0, 1)))(xs, p), tolerance=1e-5)


def test_scan_over_layers_with_checkpoint(rng):
    """Layers of quantized weights, adapters beside them trained; donated as well."""
    q = oracle.random_quantized(rng, (2, 3, 64, 64), "affine")
    x, lora = oracle.random(rng, (20, 64)), oracle.random(rng, (2, 3, 64, 64)) / 30

    def layer(x, weights):
        q, lora = weights
        y = jgg.grouped_qmm(x, q, SIZES) / 30 + jgg.grouped_mm(x, lora, SIZES)
        return jnp.tanh(x + y), None

    def loss(lora, x, q, body):
        return (jax.lax.scan(body, x, (q, lora))[0] ** 2).sum()

    def unrolled(lora, x, q):
        for i in range(2):
            x, _ = layer(x, (jax.tree.map(lambda a, i=i: a[i], q), lora[i]))
        return (x**2).sum()

    want = jax.jit(jax.grad(unrolled, (0, 1)))(lora, x, q)
    step = jax.jit(
        lambda lora, x, q: (jax.grad(loss, (0, 1))(lora, x, q, jax.checkpoint(layer)), q),
        donate_argnums=2,
    )
    copy = jax.tree.map(jnp.copy, q)
    got, kept = step(lora, x, copy)
    assert_trees_close(got, want, tolerance=1e-5)
    assert copy.weight.is_deleted()
    np.testing.assert_array_equal(kept.weight, q.weight)


# ---- lowering --------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch):
    """As if there were a CUDA kernel."""
    monkeypatch.setitem(_call.TARGETS, "jgg_qmm", ("cuda",))


def cuda_text(function, *args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_lowering_without_a_kernel(rng):
    x, _, _, q = problem("nvfp4")
    if "jgg_qmm" not in _call.TARGETS:
        assert "custom_call @jgg" not in cuda_text(lambda x, q: jgg.grouped_qmm(x, q, SIZES), x, q)
        reason = "'sm80' cannot run: there is no jgg_qmm for cuda"
        with pytest.raises(ValueError, match=reason):
            cuda_text(lambda x: jgg.grouped_qmm(x, q, SIZES, implementation="sm80"), x)
    with pytest.raises(ValueError, match="'cpu' cannot run: there is no jgg_qmm for cpu"):
        jax.jit(lambda x: jgg.grouped_qmm(x, q, SIZES, implementation="cpu")).trace(x).lower(
            lowering_platforms=("cpu",)
        )


@pytest.mark.usefixtures("kernel")
def test_cuda_lowering_is_one_custom_call(rng):
    """Operands in order, metadata as it is, options fused."""
    q = oracle.random_quantized(rng, (3, 6, 64), "nvfp4", scale=jnp.ones(3))
    x, sizes, bias, row_scale = jnp.ones((16, 64)), jnp.ones(5, "int32"), jnp.ones((3, 6)), None

    def f(x, q, sizes, offset, bias, row_scale):
        return jgg.grouped_qmm(
            x, q, sizes, group_offset=offset, bias=bias, activation="swiglu", row_scale=row_scale
        )

    row_scale = jnp.ones(16, "bfloat16")
    text = cuda_text(f, x, q, sizes, jnp.int32(1), bias, row_scale)
    (line,) = re.findall(r"custom_call @jgg_qmm.*", text)
    assert set(re.findall(r"stablehlo\.(\w+)", text)) <= {"custom_call", "reshape", "constant"}
    assert re.findall(r"tensor<(\w+)>", line)[-9:] == [
        "16x64xf32", "3x6x8xui32", "3x6x4xui8", "5xi32", "3xf32", "i32", "3x6xf32", "16xbf16",
        "16x3xf32",
    ]  # fmt: skip
    for attribute in ('mode = "nvfp4"', "bits = 4 : i32", "group_size = 16 : i32",
                      'layout = "linear"', "global_scale = true", "transpose_w = true",
                      'activation = "swiglu"', "tf32 = false", 'kind = "sizes"'):  # fmt: skip
        assert attribute in line, attribute
    with jax.default_matmul_precision("tensorfloat32"):
        assert "tf32 = true" in cuda_text(lambda x, q: jgg.quantized_matmul(x[:3], q), x, q)
    grad = cuda_text(
        jax.grad(lambda x, q: jnp.sin(jgg.grouped_qmm(x, q, SIZES)).sum(), allow_int=True), x, q
    )
    assert re.findall(r"custom_call @(jgg_\w+)", grad) == ["jgg_qmm"] * 2
    assert len(re.findall("transpose_w = false", grad)) == 1


def test_export_round_trip():
    """For two platforms, with a Quantized argument and a gradient."""
    x, _, _, q = problem("affine")
    f = jax.jit(jgg.grouped_qmm)
    exported = jax.export.export(
        f, platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(x, q, SIZES)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1)).call
    out, dx = loaded(x, q, SIZES), jax.grad(lambda x: jnp.sin(loaded(x, q, SIZES)).sum())(x)
    oracle.assert_close(out, oracle.grouped_qmm(x, q, SIZES))
    w = oracle.dequantize(q).swapaxes(1, 2)
    oracle.assert_close(dx, oracle.grouped_mm_grads(x, w, SIZES, np.cos(oracle.f64(out)))[0])


@pytest.mark.parametrize("mode", ["affine", "nvfp4"])
def test_experts_are_not_dequantized_as_a_whole(rng, mode):
    """Forward and for x's gradient, temporaries are a fraction of one expert."""
    g, n, k = 4, 2048, 2048
    q = oracle.random_quantized(rng, (g, n, k), mode)
    x = jnp.ones((16, k), jnp.bfloat16)
    loss = lambda x, q: (jgg.grouped_qmm(x, q, jnp.array([3, 4, 0, 9])) ** 2).sum()
    compiled = jax.jit(jax.grad(loss, allow_int=True)).lower(x, q).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * n * k * 2
    sizes = [int(np.prod(v.aval.shape)) for v in results(jax.make_jaxpr(loss)(x, q).jaxpr)]
    assert max(sizes) < g * n * k // 32 * 33  # words, at most


def results(jaxpr):
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from results(inner)


# ---- cost ------------------------------------------------------------------------------------


def test_cost():
    """Packed weights and scales of the experts that meet a row are read."""
    shape = lambda *s, dtype="float32": jax.ShapeDtypeStruct(s, dtype)
    q = jgg.Quantized(
        shape(3, 6, 16, dtype="uint32"), shape(3, 6, 2, dtype="bfloat16"),
        shape(3, 6, 2, dtype="bfloat16"), mode="affine", bits=4, group_size=64,
    )  # fmt: skip
    x, sizes = shape(16, 128, dtype="bfloat16"), np.array([4, 0, 9])
    expert = 6 * 128 // 2 + 2 * 2 * 6 * 2
    want = jgg.cost.Cost(2 * 13 * 6 * 128, 2 * (13 * 128 + 16 * 6) + 2 * expert + 3 * 4)
    assert jgg.cost.grouped_qmm(x, q, sizes) == want
    biased = jgg.cost.grouped_qmm(x, q, sizes, bias=shape(3, 6))
    assert biased.flops == want.flops + 2 * 13 * 6
    one = jax.tree.map(lambda a: shape(*a.shape[1:], dtype=a.dtype), q)
    assert jgg.cost.quantized_matmul(x, one).flops == 2 * 16 * 6 * 128
    assert jgg.cost.gather_qmm(x, q, None, np.array([2, 0, 9])).flops == 2 * 2 * 16 * 6 * 128
    scaled = jgg.Quantized(
        shape(3, 6, 16, dtype="uint32"), shape(3, 6, 8, dtype="uint8"), None, shape(),
        mode="nvfp4", bits=4, group_size=16,
    )  # fmt: skip
    read = 2 * (6 * 64 + 6 * 8) + 4
    cost = jgg.cost.grouped_qmm(x, scaled, sizes)
    assert cost.bytes_accessed == 2 * (13 * 128 + 16 * 6) + read + 3 * 4


# ---- errors ----------------------------------------------------------------------------------

X, S = jnp.ones((16, 64)), jnp.array([4, 0, 9])


def like(*shape, mode="mxfp4"):
    """A Quantized that stands for an array of this shape."""
    bits, group = {"affine": (4, 32), "mxfp4": (4, 32), "nvfp4": (4, 16)}[mode]
    *lead, k = shape
    scales = jnp.ones((*lead, k // group), "float32" if mode == "affine" else "uint8")
    return jgg.Quantized(
        jnp.zeros((*lead, k * bits // 32), "uint32"), scales, scales if mode == "affine" else None,
        mode=mode, bits=bits, group_size=group,
    )  # fmt: skip


W = like(3, 8, 64)

ERRORS = [
    (
        lambda: jgg.gather_qmm(jnp.ones((32, 512)), like(8, 512, 480)), ValueError,
        "jgg.gather_qmm: w has shape (8, 512, 60), expected (G, N, K*bits/32) = (8, 512, 64) "
        "because x is (32, 512) and bits=4. Pass transpose_w=False if w is (G, K, N).",
    ),
    (
        lambda: jgg.grouped_qmm(X, W, S, transpose_w=False), ValueError,
        "jgg.grouped_qmm: w has shape (3, 8, 8), expected (G, K, N*bits/32) = (3, 64, 8) because "
        "x is (16, 64). Pass transpose_w=True if w is (G, N, K).",
    ),
    (
        lambda: jgg.quantized_matmul(X, like(8, 32)), ValueError,
        "jgg.quantized_matmul: w has shape (8, 4), expected (N, K*bits/32) = (8, 8) because x is "
        "(16, 64) and bits=4. Pass transpose_w=False if w is (K, N).",
    ),
    (
        lambda: jgg.gather_qmm(X, like(2, 3, 8, 32)), ValueError,
        "jgg.gather_qmm: w has shape (2, 3, 8, 4), expected (B..., N, K*bits/32) = (2, 3, 8, 8) "
        "because x is (16, 64) and bits=4. Pass transpose_w=False if w is (B..., K, N).",
    ),
    (
        lambda: jgg.grouped_qmm(X[:, :50], W, S), ValueError,
        "jgg.grouped_qmm: x has shape (16, 50), expected K, its last axis, to be a multiple of "
        "w.group_size=32",
    ),
    (
        lambda: jgg.grouped_qmm(X, like(8, 64), S), ValueError,
        "jgg.grouped_qmm: w has shape (8, 8), expected (G, N, K*bits/32)",
    ),
    (
        lambda: jgg.grouped_qmm(X[0], W, S), ValueError,
        "jgg.grouped_qmm: x has shape (64,), expected 2 axes (T, K)",
    ),
    (
        lambda: jgg.gather_qmm(X[0], W), ValueError,
        "jgg.gather_qmm: x has shape (64,), expected (A..., M, K)",
    ),
    (
        lambda: jgg.quantized_matmul(jnp.ones(()), W), ValueError,
        "jgg.quantized_matmul: x has shape (), expected (..., K)",
    ),
    (
        lambda: jgg.quantized_matmul(jnp.ones((2, 5, 64)), W), ValueError,
        "jgg.quantized_matmul: the batch axes of x (2, 5, 64) and w (3, 8, 64) do not broadcast",
    ),
    (
        lambda: jgg.grouped_qmm(X, X, S), TypeError,  # pyright: ignore
        "jgg.grouped_qmm: w must be a jgg.Quantized, got ArrayImpl",
    ),
    (
        lambda: jgg.grouped_qmm(X.astype(jnp.int8), W, S), TypeError,
        "jgg.grouped_qmm: x must be float32, bfloat16 or float16, got dtype int8",
    ),
    (
        lambda: jgg.grouped_qmm(np.ones((16, 64)), W, S, preferred_element_type="int32"), TypeError,
        "jgg.grouped_qmm: preferred_element_type must be float32, bfloat16 or float16, got dtype "
        "int32",
    ),
    (
        lambda: jgg.grouped_qmm(X, dataclasses.replace(W, scales=W.scales[:2]), S), ValueError,
        "jgg.grouped_qmm: w.scales has shape (2, 8, 2), expected (..., K/group_size) = (3, 8, 2) "
        "because w.weight is (3, 8, 8), bits=4 and group_size=32",
    ),
    (
        lambda: jgg.grouped_qmm(
            X, dataclasses.replace(like(3, 8, 64, mode="nvfp4"), global_scale=jnp.ones((3, 8))), S
        ),
        ValueError,
        "jgg.grouped_qmm: w.global_scale has shape (3, 8), expected () or leading axes of (3,)",
    ),
    (
        lambda: jgg.grouped_qmm(X, W, S[:2]), ValueError,
        "jgg.grouped_qmm: group_sizes has shape (2,), expected (G,) = (3,) because w is "
        "(3, 8, 64). Pass group_offset if w holds only some of the groups.",
    ),
    (
        lambda: jgg.grouped_qmm(X, W, S, bias=jnp.ones((3, 7))), ValueError,
        "jgg.grouped_qmm: bias has shape (3, 7), expected (G, N) = (3, 8) because w is (3, 8, 64)",
    ),
    (
        lambda: jgg.grouped_qmm(X, W, S, activation="selu"), ValueError,
        "jgg.grouped_qmm: activation='selu' is not one of None, 'silu', 'gelu', 'relu', 'tanh', "
        "'swiglu', 'geglu'",
    ),
    (
        lambda: jgg.gather_qmm(X, W, jnp.zeros(2, int), jnp.zeros(3, int)), ValueError,
        "jgg.gather_qmm: lhs_indices (2,) and rhs_indices (3,) do not broadcast",
    ),
    (
        lambda: jgg.gather_qmm(X, W, None, jnp.ones(3)), TypeError,
        "jgg.gather_qmm: rhs_indices must hold integers, got dtype float32",
    ),
    (
        lambda: jgg.quantized_matmul(X, like(8, 64), implementation="triton"), ValueError,
        "jgg.quantized_matmul: implementation='triton' is not one of None, 'sm100', 'sm90', "
        "'sm80', 'cpu', 'reference'",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(ERRORS)))
def test_errors(case):
    call, kind, message = ERRORS[case]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_64_bits(rng):
    """float64 is an error; where it exists, other products are what they were."""
    q, x = oracle.random_quantized(rng, (3, 8, 64), "affine"), np.ones((16, 64), "float32")
    with jax.enable_x64(True):
        with pytest.raises(TypeError, match="got dtype float64"):
            jgg.grouped_qmm(x.astype("float64"), q, np.array([4, 0, 9]))
        out = jax.jit(jgg.grouped_qmm)(x, q, np.array([4, 0, 9]))
    assert out.dtype == "float32"
    oracle.assert_close(out, oracle.grouped_qmm(x, q, [4, 0, 9]))
