"""Gradients and transformations of products with quantized weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from qmm_problems import SIZES, problem

import jax_groupgemm as jgg


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
