"""Every transformation of every operation, against the same thing done one example at a time."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device

B = 3
SIZES = np.array([[4, 0, 9], [0, 0, 0], [20, 1, 1]], np.int32)
SPANS = np.array(
    [[[0, 4], [2, 9], [9, 3]], [[0, 12], [1, 2], [5, 5]], [[7, 7], [-4, 3], [6, 99]]], np.int32
)

INDICES = np.array([[0, 2, 2, 1], [1, 1, 9, -1], [2, 1, 0, 0]], np.int32)


def grouped(x, w, sizes):
    return jgg.grouped_mm(x, w, sizes)


def grouped_transposed(x, w, sizes):
    return jgg.grouped_mm(x, w, sizes, transpose_w=True)


def segmented(a, b, spans):
    return jgg.segmented_mm(a, b, spans)


def segmented_transposed(a, b, spans):
    return jgg.segmented_mm(a, b, spans, transpose_a=True, transpose_b=True)


def gathered(a, b, index):
    return jgg.gather_mm(a, b, None, index)


def low_rank(x, w, index):
    return jgg.lora_mm(x, w, w.swapaxes(1, 2)[:, :3], index, row_scale=x[:, 0])


def full_epilogue(x, w, sizes):
    return jgg.grouped_mm(
        x, w, sizes, bias=w[:, 0], activation="swiglu", row_scale=x[:, 0], existing_out=x[:, :2]
    )


# Unbatched shapes of the two operands, and a batch of metadata.
CASES = {
    "grouped_mm": (grouped, (16, 5), (3, 5, 4), SIZES),
    "grouped_mm transposed": (grouped_transposed, (16, 5), (3, 4, 5), SIZES),
    "grouped_mm epilogue": (full_epilogue, (16, 5), (3, 5, 4), SIZES),
    "segmented_mm": (segmented, (5, 12), (12, 4), SPANS),
    "segmented_mm transposed": (segmented_transposed, (12, 5), (4, 12), SPANS),
    "gather_mm": (gathered, (4, 1, 5), (3, 5, 4), INDICES),
    "gather_mm tall": (gathered, (4, 40, 5), (3, 5, 4), INDICES),
    "lora_mm epilogue": (low_rank, (4, 5), (3, 4, 5), INDICES),
    "ragged_dot": (jgg.ragged_dot, (16, 5), (3, 5, 4), SIZES),
}  # fmt: skip
AXES = [axes for axes in itertools.product([None, 0], repeat=3) if any(a is not None for a in axes)]


def operands(rng, case, axes):
    """Operands batched along the given axes (None: shared)."""
    function, a_shape, b_shape, meta = CASES[case]
    shapes = [
        s if d is None else (*s[:d], B, *s[d:])
        for s, d in zip((a_shape, b_shape), axes[:2], strict=True)
    ]
    a, b = (oracle.random(rng, s) for s in shapes)
    return (
        function,
        a,
        b,
        jnp.asarray(meta[0] if axes[2] is None else np.moveaxis(meta, 0, axes[2])),
    )


def one_by_one(function, axes, args):
    """vmap by hand."""
    examples = [
        [a if d is None else jnp.take(a, i, axis=d) for a, d in zip(args, axes, strict=True)]
        for i in range(B)
    ]
    outs = [function(*example) for example in examples]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


assert_trees_close = functools.partial(oracle.assert_trees_close, tolerance=3e-6)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(12)
def test_vmap(rng, case, axes):
    function, *args = operands(rng, case, axes)
    assert_trees_close(jax.vmap(function, axes)(*args), one_by_one(function, axes, args))


@pytest.mark.parametrize("axes", [(1, 2, 1), (2, None, None), (None, 1, 1), (1, 0, None)])
@pytest.mark.parametrize("case", ["grouped_mm", "grouped_mm transposed", "gather_mm"])
@pytest.mark.one_in(6)
def test_vmap_over_inner_axes(rng, case, axes):
    function, *args = operands(rng, case, axes)
    assert_trees_close(jax.vmap(function, axes)(*args), one_by_one(function, axes, args))


@pytest.mark.parametrize("axes", [(1, 1, 1), (2, None, None), (None, 1, None), (2, 2, 2)])
@pytest.mark.parametrize("case", ["segmented_mm", "segmented_mm transposed"])
@pytest.mark.one_in(5)
def test_vmap_over_inner_axes_of_segments(rng, case, axes):
    function, *args = operands(rng, case, axes)
    assert_trees_close(jax.vmap(function, axes)(*args), one_by_one(function, axes, args))


def gradient(function):
    return jax.grad(lambda a, b, m: jnp.sin(function(a, b, m)).sum(), argnums=(0, 1))


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(13)
def test_vmap_of_grad(rng, case, axes):
    function, *args = operands(rng, case, axes)
    grad = gradient(function)
    assert_trees_close(jax.vmap(grad, axes)(*args), one_by_one(grad, axes, args))


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(16)
def test_grad_of_vmap(rng, case, axes):
    """Shared operands collect the gradients of the whole batch."""
    function, *args = operands(rng, case, axes)
    got = gradient(jax.vmap(function, axes))(*args)
    want = gradient(lambda *a: one_by_one(function, axes, a))(*args)
    assert_trees_close(got, want)


@pytest.mark.parametrize("inner", [(0, None, None), (None, 0, 0), (0, 0, None)])
@pytest.mark.parametrize("outer", [(None, None, 0), (0, 0, 0), (None, 0, None)])
@pytest.mark.parametrize("case", ["grouped_mm", "segmented_mm"])
@pytest.mark.one_in(8)
def test_nested_vmap(rng, case, inner, outer):
    function, a_shape, b_shape, meta = CASES[case]
    lead = [tuple(B for axes in (outer, inner) if axes[i] is not None) for i in range(3)]
    a, b = oracle.random(rng, (*lead[0], *a_shape)), oracle.random(rng, (*lead[1], *b_shape))
    picks = rng.integers(0, B, lead[2])
    args = a, b, jnp.asarray(meta[picks])
    batched = jax.vmap(jax.vmap(function, inner), outer)
    want = one_by_one(lambda *x: one_by_one(function, inner, x), outer, args)
    assert_trees_close(batched(*args), want)
    got = gradient(batched)(*args)
    assert_trees_close(
        got,
        gradient(lambda *x: one_by_one(lambda *y: one_by_one(function, inner, y), outer, x))(*args),
    )


@pytest.mark.parametrize("case", [case for case in CASES if "epilogue" not in case])
def test_jvp_is_linear(rng, case):
    function, a, b, meta = operands(rng, case, (None, None, None))
    da, db = oracle.random(rng, a.shape), oracle.random(rng, b.shape)
    out, tangent = jax.jvp(lambda a, b: function(a, b, meta), (a, b), (da, db))
    oracle.assert_close(out, function(a, b, meta))
    oracle.assert_close(
        tangent, oracle.f64(function(da, b, meta)) + oracle.f64(function(a, db, meta))
    )
    _, tangent = jax.jvp(lambda a: function(a, b, meta), (a,), (da,))
    oracle.assert_close(tangent, function(da, b, meta))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(2)
def test_second_derivatives(rng, case):
    """Hessian-vector products, forward over reverse and reverse over forward."""
    function, a, b, meta = operands(rng, case, (None, None, None))
    loss = lambda ab: jnp.sin(function(*ab, meta)).sum()
    v = oracle.random(rng, a.shape), oracle.random(rng, b.shape)
    forward_reverse = jax.jvp(jax.grad(loss), ((a, b),), (v,))[1]
    reverse_forward = jax.grad(lambda ab: jax.jvp(loss, (ab,), (v,))[1])((a, b))
    assert_trees_close(forward_reverse, reverse_forward, tolerance=1e-5)
    # A central difference of first derivatives, which other tests check against numpy.
    eps = 1e-2
    up, down = (jax.grad(loss)((a + s * v[0], b + s * v[1])) for s in (eps, -eps))
    difference = jax.tree.map(lambda u, d: (u - d) / (2 * eps), up, down)
    assert_trees_close(forward_reverse, difference, tolerance=2e-2)


@pytest.mark.parametrize("case", CASES)
def test_integer_operands_get_float0(rng, case):
    function, a, b, meta = operands(rng, case, (None, None, None))
    out, vjp = jax.vjp(function, a, b, meta)
    assert vjp(out)[2].dtype == jax.dtypes.float0


@pytest.mark.parametrize("policy", [None, "dots_saveable", "nothing_saveable"])
@pytest.mark.one_in(3)
def test_checkpoint_in_scan(rng, policy):
    policy = policy and getattr(jax.checkpoint_policies, policy)
    w, x = oracle.random(rng, (4, 3, 6, 6)), oracle.random(rng, (20, 6))
    sizes = jnp.asarray(oracle.random_sizes(rng, 12, 20).reshape(4, 3))

    def layer(x, w_sizes):
        w, sizes = w_sizes
        return jnp.tanh(x + jgg.grouped_mm(x, w, sizes)), None

    def loss(x, w, body):
        return (jax.lax.scan(body, x, (w, sizes))[0] ** 2).sum()

    saved = jax.checkpoint(layer, policy=policy)
    got = jax.jit(jax.grad(functools.partial(loss, body=saved), (0, 1)))(x, w)
    unrolled = lambda x, w: (
        functools.reduce(lambda x, i: layer(x, (w[i], sizes[i]))[0], range(4), x) ** 2
    ).sum()
    assert_trees_close(got, jax.grad(unrolled, (0, 1))(x, w))


def shapes_made(function, *args) -> list[tuple[int, ...]]:
    """Shapes of every intermediate of a jitted function, before and after XLA's passes."""
    traced = jax.jit(function).trace(*args)
    shapes = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            shapes.extend(tuple(v.aval.shape) for v in eqn.outvars)
            for sub in (
                jax.core.jaxprs_in_params(eqn.params)
                if hasattr(jax.core, "jaxprs_in_params")
                else ()
            ):
                visit(sub)

    visit(traced.jaxpr.jaxpr)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for found in re.findall(r"-> tensor<([0-9x]+)xf32>", text):
        shapes.append(tuple(map(int, found.split("x"))))
    return shapes


@pytest.mark.parametrize("transform", ["vmap", "vmap of vmap", "vmap of grad", "grad of vmap"])
def test_shared_weights_are_never_copied(rng, transform):
    """No value as large as a batch of the weights appears, but where the result is one."""
    x, w = oracle.random(rng, (B, B, 16, 5)), oracle.random(rng, (3, 500, 5))
    sizes = jnp.asarray(SIZES[0])
    f = lambda x: jgg.grouped_mm(x, w, sizes, transpose_w=True)
    loss = lambda x, w: jgg.grouped_mm(x, w, sizes, transpose_w=True).sum()
    batched = jax.vmap(jax.vmap(lambda x: loss(x, w)))
    function, args = {
        "vmap": (jax.vmap(f), (x[0],)),
        "vmap of vmap": (jax.vmap(jax.vmap(f)), (x,)),
        "vmap of grad": (jax.vmap(jax.vmap(jax.grad(lambda x: loss(x, w)))), (x,)),
        "grad of vmap": (jax.grad(lambda x: batched(x).sum()), (x,)),
    }[transform]
    largest = max(int(np.prod(s)) for s in shapes_made(function, *args))
    assert largest <= max(w.size, B * B * 16 * 500), largest
    limit = [s for s in shapes_made(function, *args) if np.prod(s) >= 2 * w.size and 500 in s]
    assert all(s[-1] == 500 and 5 not in s for s in limit), limit  # activations, not weights


def test_donation_and_dead_code(rng):
    x, w, sizes = oracle.random(rng, (16, 5)), oracle.random(rng, (3, 5, 4)), jnp.asarray(SIZES[0])
    f = lambda x, w: jax.vjp(lambda x, w: jgg.grouped_mm(x, w, sizes), x, w)[1](jnp.ones((16, 4)))[
        0
    ]
    text = jax.jit(f).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    # The unused forward product is dropped; the unused dw too, once XLA has seen it.
    assert len(re.findall(r"custom_call @jgg_mm", text)) == 1
