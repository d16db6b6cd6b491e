"""vmap over axes that are explicitly sharded: every device has problems of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType
from meshes import DEVICES, collectives, mesh_of, needs_two_devices, put
from test_sharding import loss, want_grads

import jax_groupgemm as jgg

pytestmark = needs_two_devices

B, T, K, N, G = 4, 32, 16, 24, 4
SIZES = np.array([[9, 0, 11, 7], [0, 0, 0, 0], [32, 0, 0, 0], [1, 2, 3, 4]], np.int32)


def sharded_mesh():
    return mesh_of((2, DEVICES // 2), ("d", "e"), AxisType.Explicit)


def of_batch(f, args, axes):
    """A function of each problem's operands, stacked."""
    take = lambda i: [a if d is None else a[i] for a, d in zip(args, axes, strict=True)]
    outs = [f(*take(i)) for i in range(B)]
    return jax.tree.map(lambda *a: np.stack(a), *outs)


MAPPED = [(0, None, None), (None, 0, None), (0, 0, None), (0, None, 0), (None, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize("rest", ["", "T", "N", "K"])
@pytest.mark.parametrize("axes", MAPPED)
@pytest.mark.one_in(15)
def test_products_and_gradients(rng, axes, rest):
    """Of a batch over one mesh axis, and one axis of the operands over another; no communication
    but of the sums over that."""
    shapes = [(T, K), (G, K, N)]
    args = [
        oracle.random(rng, (shape if d is None else (B, *shape)))
        for shape, d in zip(shapes, axes, strict=False)
    ]
    args.append(jnp.asarray(SIZES[0] if axes[2] is None else SIZES))
    over = {"T": ({0: "e"}, {}), "N": ({}, {2: "e"}), "K": ({1: "e"}, {1: "e"}), "": ({}, {})}[rest]
    mesh = sharded_mesh()

    def spec(i, rank):
        inner = [over[i].get(j) if i < 2 else None for j in range(rank)]
        return inner if axes[i] is None else ["d", *inner]

    ranks = (2, 3, 1)
    given = [
        put(mesh, a, *spec(i, rank)) for i, (a, rank) in enumerate(zip(args, ranks, strict=True))
    ]
    f = jax.vmap(lambda *a: (jgg.grouped_mm(*a), jax.grad(loss, (0, 1))(*a)), axes)
    with jax.set_mesh(mesh):
        out, grads = jax.jit(f)(*given)
        eager = jax.vmap(jgg.grouped_mm, axes)(*given)
        found = collectives(jax.jit(jax.vmap(jgg.grouped_mm, axes)), *given)
    assert found == (["all-reduce"] if rest == "K" and mesh.shape["e"] > 1 else [])
    for value in (out, eager, *grads):
        assert jax.typeof(value).sharding.spec[0] in ("d", ("d",))
    want = of_batch(oracle.grouped_mm, args, axes)
    oracle.assert_close(out, want)
    oracle.assert_close(eager, want)
    for got, expected in zip(grads, of_batch(want_grads, args, axes), strict=True):
        oracle.assert_close(got, expected)


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.weekly), True])
def test_other_operations(rng, compiled):
    mesh = sharded_mesh()
    xs, w = oracle.random(rng, (B, T, K)), oracle.random(rng, (G, K, N))
    ws, bias, row_scale = (
        w[None] * np.arange(1.0, B + 1, dtype=np.float32)[:, None, None, None],
        w[:, 0],
        xs[0, :, 0],
    )
    q = oracle.random_quantized(rng, (B, G, N, 32), "mxfp4")
    x_q, x_packed = oracle.random(rng, (B, T, 32)), oracle.random(rng, (B, T, 128))
    packed = [
        jgg.prepack(oracle.random_quantized(rng, (B, G, 64, 128), mode, bits, dtype="bfloat16"))
        for mode, bits in (("nvfp4", 4), ("mxfp8", 8), ("affine", 3))
    ]
    assert all(w.layout == "sm90" for w in packed)
    segments = jnp.array([[0, 9], [9, 9], [5, 32]])
    fused = lambda x, w, s: jgg.grouped_mm(
        x, w, s, bias=bias, activation="silu", row_scale=row_scale
    )
    gradient = lambda x, w, s: jax.grad(lambda w: fused(x, w, s).sum())(w)
    f = {
        "fused": (fused, (xs, ws, SIZES)),
        "fused, gradient": (gradient, (xs, ws, SIZES)),
        "quantized": (jgg.grouped_qmm, (x_q, q, SIZES)),
        **{f"packed {w.mode}": (jgg.grouped_qmm, (x_packed, w, SIZES)) for w in packed},
        "segmented": (lambda x: jgg.segmented_mm(x.T, x, segments), (xs,)),
        "gathered": (
            lambda x, w, i: jgg.gather_mm(x[:, None], w, None, i),
            (xs, ws, np.resize(SIZES, (B, T))),
        ),
    }
    run = jax.jit if compiled else lambda f: f
    for name, (one, args) in f.items():
        args = [a if isinstance(a, jgg.Quantized) else jnp.asarray(a) for a in args]
        want = [one(*(jax.tree.map(lambda leaf, i=i: leaf[i], a) for a in args)) for i in range(B)]
        with jax.set_mesh(mesh):
            out = run(jax.vmap(one))(*(put(mesh, a, "d") for a in args))
        assert jax.typeof(out).sharding.spec[0] in ("d", ("d",)), name
        for got, expected in zip(out, want, strict=True):
            oracle.assert_close(got, expected, tolerance=2e-6)


def test_shared_weights_get_one_gradient(rng):
    mesh = sharded_mesh()
    xs, w, sizes = oracle.random(rng, (B, T, K)), oracle.random(rng, (G, K, N)), SIZES[0]

    def total(w, xs):
        return jax.vmap(functools.partial(jgg.grouped_mm, w=w, group_sizes=jnp.asarray(sizes)))(
            xs
        ).sum()

    with jax.set_mesh(mesh):
        dw = jax.jit(jax.grad(total))(put(mesh, w), put(mesh, xs, "d", "e"))
    ones = np.ones((T, N))
    oracle.assert_close(dw, sum(oracle.grouped_mm_grads(x, w, sizes, ones)[1] for x in xs))
