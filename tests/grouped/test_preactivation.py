"""A gated product that also gives what its activation is of, and the backward passes of an
activation and of a row's scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._core import segments
from jax_groupgemm._core.products import Mm
from jax_groupgemm._grouped import activation_backward, activations, fused
from jax_groupgemm._grouped.call import Epilogue

BOTH = list(activations.ACTIVATIONS)
GATED = [name for name in BOTH if activations.is_gated(name)]


def operands(sizes, k, n, dtype, transpose_w, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes) + 5, k))
    shape = (len(sizes), n, k) if transpose_w else (len(sizes), k, n)
    w, bias = rng.normal(size=shape) / k**0.5, rng.normal(size=(len(sizes), n))
    cast = lambda a: jnp.asarray(a, dtype)
    return cast(x), cast(w), cast(bias), jnp.asarray(sizes, jnp.int32)


def product(x, w, transpose_w):
    return Mm(rows=x.shape[0], out_dtype=x.dtype, transpose_w=transpose_w)


def close(got, want, dtype):
    tolerance = {"float32": 2e-5, "bfloat16": 1.2e-2, "float16": 2e-3}[jnp.dtype(dtype).name]
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    scale = np.abs(want).max() if want.size else 1
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * max(scale, 1e-3) / 4)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize(
    ("sizes", "k", "n"),
    [((300, 0, 128, 77), 192, 512), ((5, 9, 1), 64, 272), ((700, 64, 63, 65), 128, 304)],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernel(sizes, k, n, dtype, transpose_w, with_bias, rounds, activation):
    x, w, bias, group_sizes = operands(sizes, k, n, dtype, transpose_w)
    epilogue = Epilogue(bias if with_bias else None, activation, rounds=rounds)
    run = functools.partial(
        fused.MM.preactivated, metadata=segments.sizes(group_sizes),
        product=product(x, w, transpose_w), epilogue=epilogue,
    )  # fmt: skip
    called = jax.jit(run)
    assert "jgg_mm" in called.lower(x, w).as_text()
    out, h = called(x, w)
    # The composition's products are kernels that are tested by themselves.
    want_out, want_h = jax.jit(
        lambda x, w: fused.MM._composed_preactivated(
            x, w, segments.sizes(group_sizes), epilogue, product=product(x, w, transpose_w)
        )
    )(x, w)
    close(h, want_h, dtype)
    close(out, want_out, dtype)
    if rounds:  # exactly of what is stored, but for the activation's own rounding
        wide = activations.activate(h.astype(jnp.float32), activation)
        np.testing.assert_allclose(
            np.float32(out), wide, rtol=2**-7 if dtype == "bfloat16" else 2**-9, atol=4e-6
        )
    alone = jax.jit(lambda x, w: fused.MM(
        x, w, segments.sizes(group_sizes), product(x, w, transpose_w), epilogue))(x, w)  # fmt: skip
    assert (alone == out).all()
    again = called(x, w)
    assert (again[0] == out).all()
    assert (again[1] == h).all()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("options", ["row_scale", "existing_out", "both"])
def test_options_in_registers(activation, options):
    x, w, bias, sizes = operands((300, 0, 128, 77), 192, 512, "bfloat16", False)
    rng = np.random.default_rng(1)
    scale = jnp.asarray(rng.normal(size=x.shape[0]), jnp.bfloat16)
    existing = jnp.asarray(rng.normal(size=(x.shape[0], 256)), jnp.bfloat16)
    epilogue = Epilogue(
        bias, activation, None if options == "existing_out" else scale,
        None if options == "row_scale" else existing,
    )  # fmt: skip
    run = lambda f: jax.jit(
        lambda x, w, e: f(x, w, segments.sizes(sizes), product(x, w, False), e)
    )(x, w, epilogue)
    got = run(fused.MM)
    want = run(functools.partial(fused.MM, fused=False))
    close(got, want, "bfloat16")


def test_gradients_of_a_scale_alone(rng, implementation):
    """What the scale is of is kept where the scale moves, and the tail may hold anything."""
    t, k, n, g = 20, 8, 24, 3
    x = oracle.random(rng, (t, k)).at[12:].set(jnp.nan)
    w, old = oracle.random(rng, (g, k, n)), oracle.random(rng, (t, n))
    scale = oracle.random(rng, (t,)).at[12:].set(jnp.nan)
    sizes, ct = jnp.array([5, 0, 7]), oracle.random(rng, (t, n)).at[12:].set(jnp.nan)
    f = lambda x, w, scale, old: jgg.grouped_mm(
        x, w, sizes, row_scale=scale, existing_out=old, implementation=implementation
    )
    out, vjp = jax.vjp(f, x, w, scale, old)
    products = oracle.grouped_mm(x, w, sizes)
    oracle.assert_close(
        out[:12], products[:12] * oracle.f64(scale)[:12, None] + oracle.f64(old)[:12]
    )
    np.testing.assert_array_equal(out[12:], old[12:])
    if implementation is None:
        for moves, f_of in (
            ("x", lambda x: f(x, w, scale, None)),
            ("s", lambda s: f(x, w, s, None)),
        ):
            _, pull = jax.vjp(f_of, x if moves == "x" else scale)
            kept = [leaf.shape for leaf in jax.tree.leaves(pull)]
            assert ((t, n) in kept) == (moves == "s")
    dx, dw, dscale, dold = vjp(ct)
    live, rows = oracle.f64(ct)[:12], [(0, 5, 0), (5, 12, 2)]
    scaled = live * oracle.f64(scale)[:12, None]
    for begin, end, group in rows:
        oracle.assert_close(dx[begin:end], scaled[begin:end] @ oracle.f64(w)[group].T)
        oracle.assert_close(dw[group], oracle.f64(x)[begin:end].T @ scaled[begin:end])
    oracle.assert_close(dscale[:12], (live * products[:12]).sum(1))
    for tail in (dx[12:], dscale[12:], dw[1]):
        assert not np.asarray(tail).any()
    np.testing.assert_array_equal(dold, ct)


@pytest.mark.parametrize("biased", [False, True])
def test_with_a_gradient_the_activation_is_of_what_is_kept(biased):
    x, w, bias, sizes = operands((30, 0, 12), 64, 48, "bfloat16", False)
    options = {"bias": bias} if biased else {}
    value, _ = jax.vjp(lambda x: jgg.grouped_mm(x, w, sizes, activation="silu", **options), x)
    h = jgg.grouped_mm(x, w, sizes, **options).astype(jnp.float32)
    want = (h * jax.nn.sigmoid(h)).astype(jnp.bfloat16)
    np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (value, want)), rtol=2**-7)


@pytest.mark.parametrize("activation", BOTH)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("columns", [8, 264])
@pytest.mark.one_in(7)
def test_activation_backward(activation, dtype, scaled, columns):
    rng = np.random.default_rng(2)
    n = columns * (2 if activation in GATED else 1)
    h = jnp.asarray(3 * rng.normal(size=(37, n)), dtype)
    d = jnp.asarray(rng.normal(size=(37, columns)), dtype)
    scale = jnp.asarray(rng.normal(size=37), jnp.float32)
    act = lambda h: activations.activate(h, activation)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(v, np.float64)) for v in (h, d, scale)]
        value, pull = jax.vjp(act, wide[0])
        factor = wide[2][:, None] if scaled else 1
        want = pull(wide[1] * factor)[0], value * factor, (wide[1] * value).sum(1)
    if not scaled:
        got = jax.jit(activation_backward.activation_backward, static_argnums=2)(h, d, activation)
        close(got, want[0], dtype)
        return
    run = jax.jit(activation_backward.scaled_activation_backward, static_argnums=3)
    for one, other in zip(run(h, d, scale, activation), want, strict=True):
        close(one, other, dtype)


@pytest.mark.parametrize("activation", BOTH)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.one_in(3)
def test_gradient_of_grouped_mm_is_of_its_rounded_preactivation(activation, dtype):
    x, w, bias, sizes = operands((12, 0, 9), 16, 32, dtype, False)
    columns = 16 if activation in GATED else 32
    ct = jnp.asarray(np.random.default_rng(4).normal(size=(x.shape[0], columns)), jnp.float32)

    def run(f):
        def loss(x, w, b):
            metadata, epilogue = segments.sizes(sizes), Epilogue(b, activation)
            out = f(x, w, metadata, product(x, w, False), epilogue)
            return (out.astype(jnp.float32) * ct).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(x, w, bias)

    got = run(fused.MM)
    want = run(functools.partial(fused.MM, fused=False))
    for one, other in zip(got, want, strict=True):
        assert oracle.error(one, other) < {"float32": 1e-6, "bfloat16": 8e-3}[dtype]


def test_jacobians(rng):
    """Of forward mode, which maps tangents, and of reverse mode, which maps cotangents."""
    x, w = oracle.random(rng, (3, 2)), oracle.random(rng, (2, 2, 2))
    f = lambda w: jgg.grouped_mm(x, w, jnp.array([1, 2]), activation="silu")
    oracle.assert_close(jax.jit(jax.jacfwd(f))(w), jax.jit(jax.jacrev(f))(w))
