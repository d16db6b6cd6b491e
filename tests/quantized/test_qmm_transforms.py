"""Gradients and transformations of products with quantized weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from qmm_problems import SIZES, problem
from test_qmm_lowering import results

import jax_groupgemm as jgg
from jax_groupgemm._quantized.format import FORMATS

pytestmark = pytest.mark.default_device


def dense(w, dtype, transpose_w):
    """The (..., K, N) that activations of a dtype are multiplied with."""
    scale = w.global_scale
    full = jgg.dequantize(dataclasses.replace(w, global_scale=None), dtype)
    if scale is not None:
        full = full * (scale[:, None, None] if scale.ndim else scale)
    return full.swapaxes(-1, -2) if transpose_w else full


def dequantized(x, w, sizes, transpose_w):
    """The product of the dequantized weight, which JAX differentiates."""
    return jgg.grouped_mm(x, dense(w, x.dtype, transpose_w), sizes)


def indexed(x, w, indices, transpose_w, rows):
    return jgg.gather_qmm(
        x.reshape(-1, rows, x.shape[1]), w, indices[0], indices[1], transpose_w=transpose_w
    )


def indexed_dense(x, w, indices, transpose_w, rows):
    """In plain JAX."""
    x, full = x.reshape(-1, rows, x.shape[1]), dense(w, x.dtype, transpose_w)
    lhs, rhs = jnp.asarray(indices)
    exists = (lhs >= 0) & (lhs < len(x)) & (rhs >= 0) & (rhs < len(full))
    out = jnp.matmul(x[lhs % len(x)], full[rhs % len(full)], precision="highest")
    return jnp.where(exists[:, None, None], out, jnp.zeros_like(out))


def broadcast(x, w, _, transpose_w):
    return jgg.quantized_matmul(x.reshape(2, 1, 10, -1), w, transpose_w=transpose_w)


def broadcast_dense(x, w, _, transpose_w):
    full = dense(w, x.dtype, transpose_w)
    return jnp.matmul(x.reshape(2, 1, 10, -1), full, precision="highest")


def second(x, w, _, transpose_w):
    one = jax.tree.map(lambda leaf: leaf[1] if leaf.ndim else leaf, w)
    return jgg.quantized_matmul(x, one, transpose_w=transpose_w)


def second_dense(x, w, _, transpose_w):
    return jnp.matmul(x, dense(w, x.dtype, transpose_w)[1], precision="highest")


# Products of x, a weight and indices, beside grouped_qmm, and what they mean. Of five pairs those
# of five rows are sorted by matrix, those of one are not; one block and one matrix do not exist.
OTHERS = {
    "blocks": tuple(functools.partial(f, rows=5) for f in (indexed, indexed_dense)),
    "rows": tuple(functools.partial(f, rows=1) for f in (indexed, indexed_dense)),
    "broadcast": (broadcast, broadcast_dense),
    "one matrix": (second, second_dense),
}
INDICES = {
    "blocks": np.array([[2, 0, 3, 1, 4], [1, 2, 1, -1, 0]]),
    "rows": np.array([[0, 19, 7, 3, 20], [2, 0, 2, -1, 1]]),
    "broadcast": None,
    "one matrix": None,
}
OTHER_CASES = [
    ("blocks", "affine"), ("rows", "affine N"), ("rows", "nvfp4"), ("broadcast", "nvfp4 scalar N"),
    ("one matrix", "affine"), ("one matrix", "mxfp4 N"),
]  # fmt: skip


assert_trees_close = functools.partial(oracle.assert_trees_close, tolerance=3e-6)


@pytest.mark.parametrize("name", ["affine", "affine N", "nvfp4 scalar N"])
@pytest.mark.one_in(2)
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


@pytest.mark.parametrize("name", ["affine", "affine N", "nvfp4", "mxfp4 N", "mxfp8"])
@pytest.mark.one_in(2)
def test_derivatives_of_every_order(rng, name):
    """Gradients, and Hessian-vector products both ways, as of the dequantized product."""
    x, p, f, _ = problem(name)
    v = oracle.random(rng, x.shape), jax.tree.map(lambda a: oracle.random(rng, a.shape), p)

    def derivatives(x, p, v, product=jgg.grouped_qmm):
        loss = lambda x, p: jnp.sin(f(x, p, product=product)).sum()
        grad = jax.grad(loss, (0, 1))
        return jax.jvp(grad, (x, p), v)

    def reverse_over_forward(x, p, v):
        loss = lambda x, p: jnp.sin(f(x, p)).sum()
        return jax.grad(lambda *xp: jax.jvp(loss, xp, v)[1], (0, 1))(x, p)

    got = jax.jit(derivatives)(x, p, v)
    want = jax.jit(functools.partial(derivatives, product=dequantized))(x, p, v)
    assert_trees_close(got, want, tolerance=1e-5)
    if "affine" in name:
        assert_trees_close(jax.jit(reverse_over_forward)(x, p, v), got[1], tolerance=1e-5)


@pytest.mark.parametrize(
    ("mode", "transpose_w"),
    [("mxfp4", True), ("mxfp8", True), *((mode, False) for mode in FORMATS if mode != "fp8")],
)
@pytest.mark.one_in(5)
def test_experts_are_not_dequantized_as_a_whole(rng, mode, transpose_w):
    """As in test_qmm_lowering.py, of the other modes and of weights that are quantized along N. A
    product may pack them: a copy of codes and scales."""
    g, n = 4, 2048
    q = oracle.random_quantized(rng, (g, n, n), mode)
    x = jnp.ones((16, n), jnp.bfloat16)
    f = functools.partial(jgg.grouped_qmm, group_sizes=np.array([3, 4, 0, 9]))
    loss = lambda x, q: (f(x, q, transpose_w=transpose_w) ** 2).sum()
    grad = jax.value_and_grad(loss, allow_int=True)
    compiled = jax.jit(grad).lower(x, q).compile()
    packed, one = q.weight.nbytes + 2 * q.scales.nbytes, 2 * n * n  # bytes; of one in bfloat16
    assert compiled.memory_analysis().temp_size_in_bytes < packed + one
    sizes = [int(np.prod(v.aval.shape)) for v in results(jax.make_jaxpr(grad)(x, q).jaxpr)]
    assert max(sizes) < q.weight.size


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
@pytest.mark.one_in(6)
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


# ---- gather_qmm and quantized_matmul ---------------------------------------------------------


def value_and_gradients(which, name, means=False):
    """Of x, the differentiable leaves and indices."""
    *_, f, _ = problem(name)
    product = OTHERS[which][means]

    def run(x, p, indices):
        out, vjp = jax.vjp(lambda x, p: f(x, p, indices, product=product), x, p)
        return out, vjp(jnp.cos(out))

    return run


@pytest.mark.parametrize(("which", "name"), OTHER_CASES)
@pytest.mark.one_in(3)
def test_derivatives_of_other_products(rng, which, name):
    """Value, gradients and the tangents of both: as of the dequantized product."""
    x, p, *_ = problem(name)
    v = oracle.random(rng, x.shape), jax.tree.map(lambda a: oracle.random(rng, a.shape), p)

    def derivatives(x, p, v, means):
        f = value_and_gradients(which, name, means)
        return jax.jvp(lambda x, p: f(x, p, INDICES[which]), (x, p), v)

    got, want = (jax.jit(functools.partial(derivatives, means=m))(x, p, v) for m in (False, True))
    assert_trees_close(got, want, tolerance=3e-5)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(got))


# in_axes of x, the differentiable leaves and the indices.
OTHER_AXES = [
    ("blocks", "nvfp4 scalar N", (0, 0, 0)), ("rows", "affine", (None, 0, 0)),
    ("rows", "mxfp8", (0, None, None)), ("broadcast", "affine N", (0, 0, None)),
]  # fmt: skip


@pytest.mark.parametrize(("which", "name", "axes"), OTHER_AXES)
@pytest.mark.one_in(4)
def test_vmap_of_other_products(which, name, axes):
    """Of value and gradients, against the dequantized product of one example at a time."""
    x, p, *_ = problem(name)
    two = lambda a: np.stack([a, np.roll(a, 1)])
    args = [
        a if d is None else jax.tree.map(two, a)
        for a, d in zip((x, p, INDICES[which]), axes, strict=True)
    ]
    got = jax.jit(jax.vmap(value_and_gradients(which, name), axes))(*args)
    single = jax.jit(value_and_gradients(which, name, means=True))
    examples = [
        [a if d is None else jax.tree.map(lambda v, i=i: v[i], a)
         for a, d in zip(args, axes, strict=True)]
        for i in range(2)
    ]  # fmt: skip
    want = jax.tree.map(lambda *v: np.stack(v), *(single(*e) for e in examples))
    assert_trees_close(got, want, tolerance=3e-5)


@pytest.mark.parametrize(("which", "name"), OTHER_CASES[:4:3])
@pytest.mark.one_in(2)
def test_export_of_other_products(which, name):
    """For two platforms, with a Quantized argument and a gradient."""
    x, _, _, q = problem(name)
    rest = INDICES[which], "N" not in name
    f, means = (lambda x, q, product=product: product(x, q, *rest) for product in OTHERS[which])
    exported = jax.export.export(
        jax.jit(f), platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(x, q)
    assert "@jgg_qmm(" in exported.mlir_module()
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1)).call
    got, want = (
        jax.value_and_grad(lambda x, f=f: jnp.sin(f(x, q)).sum())(x) for f in (loaded, means)
    )
    assert_trees_close(got, want, tolerance=3e-5)
