"""``moe_mlp`` under transformations, what they scatter, and its export."""

import functools
import re

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
from jaxlib.mlir import ir
from test_moe_mlp import D, E, F, problem

import jax_groupgemm as jgg

pytestmark = pytest.mark.default_device


def loss(args, index):
    x, up, down, weight = args
    return jnp.sin(jgg.moe_mlp(x, up, down, index, weight)).sum()


def dense(args, index):
    """The same of every expert and token, for JAX to differentiate as often as it likes."""
    x, up, down, weight = args
    h = jnp.einsum("td,edf->etf", x, up, precision="highest")
    a = jax.nn.silu(h[..., :F]) * h[..., F:]
    y = jnp.einsum("etf,efd->etd", a, down, precision="highest")
    share = (jax.nn.one_hot(index, E) * weight[..., None]).sum(1)
    return jnp.sin(jnp.einsum("te,etd->td", share, y, precision="highest")).sum()


def test_forward_mode_and_second_order(rng):
    x, up, down, index, weight = problem(rng)
    args = (x, up, down, weight)
    tangents = jax.tree.map(lambda a: oracle.random(rng, a.shape), args)
    for f in (loss, jax.grad(loss)):
        reference = dense if f is loss else jax.grad(dense)
        got = jax.jit(lambda a, f=f: jax.jvp(lambda a: f(a, index), (a,), (tangents,)))(args)
        want = jax.jit(lambda a, r=reference: jax.jvp(lambda a: r(a, index), (a,), (tangents,)))(
            args
        )
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("mapped", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
@pytest.mark.one_in(3)
def test_vmap(rng, mapped):
    x, up, down, index, weight = problem(rng)
    args = [x, up, down, weight]
    batch = [jnp.stack([a, a[::-1] / 2]) if i in mapped else a for i, a in enumerate(args)]
    axes = [0 if i in mapped else None for i in range(4)]
    f = lambda *args: loss(args, index)
    got = jax.jit(jax.vmap(jax.value_and_grad(f, mapped), axes))(*batch)
    single = jax.jit(jax.value_and_grad(f, mapped))
    for b in range(2):
        want = single(*(a[b] if i in mapped else a for i, a in enumerate(batch)))
        for have, value in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(have[b], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", [None, "composed"])
@pytest.mark.parametrize("mapped", ["x", "i", "xwi", "ud", "xudwi", "b"])
@pytest.mark.one_in(3)
def test_gradients_of_a_batch(rng, mapped, implementation):
    """grad(vmap): as of a loop, and no rows are scattered. A batch of x lies along its tokens."""
    x, up, down, index, weight = problem(rng)
    biases = [jnp.asarray(rng.normal(size=(E, w.shape[2])), "float32") for w in (up, down)]
    args = dict(zip("xudwi", (x, up, down, weight, index), strict=True)) | {"b": biases[1]}
    axes = {name: int(name == "x") if name in mapped else None for name in args}
    batch = {
        name: a if axes[name] is None else jnp.stack([a, a[::-1]], axes[name])
        for name, a in args.items()
    }

    def f(args):
        x, up, down, weight, index, bias = (args[name] for name in "xudwib")
        return jgg.moe_mlp(
            x, up, down, index, weight, up_bias=biases[0], down_bias=bias,
            implementation=implementation,
        )  # fmt: skip

    def total(floats, index, run):
        return jnp.sin(run(floats | {"i": index})).sum()

    def looped(given):
        of = lambda n, b: given[n] if axes[n] is None else jnp.take(given[n], b, axes[n])
        each = [{n: of(n, b) for n in given} for b in range(2)]
        return jnp.stack([f(one) for one in each])

    index = batch.pop("i")
    floats = batch
    of_batch = jax.jit(jax.value_and_grad(functools.partial(total, run=jax.vmap(f, (axes,)))))
    want = jax.jit(jax.value_and_grad(functools.partial(total, run=looped)))(floats, index)
    got = of_batch(floats, index)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    types = scattered(of_batch.lower(floats, index))
    assert all(re.fullmatch(r"tensor<(2x)?\d+xu?i\d+>", found) for found in types), types


@pytest.mark.parametrize("mode", ["affine", "nvfp4"])
def test_gradients_of_a_batch_of_quantized_experts(rng, mode):
    """Shared ones, with rows for some pairs alone, and ones of each."""
    x, up, down, index, weight = problem(rng, d=64, f=32)
    of = lambda w: jgg.quantize(
        w, mode=mode, group_size=32 if mode == "affine" else 16, contract=-2
    )
    up, down = of(up), of(down)
    xs, twice = jnp.stack([x, x[::-1]], 1), lambda q: jax.tree.map(lambda a: jnp.stack([a, a]), q)

    def layer(x, up, down, **options):
        return jgg.moe_mlp(x, up, down, index, weight, **options)

    single = jax.grad(lambda x: layer(x, up, down).sum())(x)
    for axes, weights, options in (
        ((1, None, None), (up, down), {"max_rows": 2 * len(x) - 1}),
        ((1, 0, 0), (twice(up), twice(down)), {}),
    ):
        run = jax.vmap(functools.partial(layer, **options), axes)
        grad = jax.jit(jax.grad(lambda xs, run=run, w=weights: run(xs, *w).sum()))(xs)
        np.testing.assert_allclose(grad[:, 0], single, rtol=1e-4, atol=1e-4)


def test_a_batch_does_not_copy_experts():
    """Not even with fewer rows than pairs: their gradients are those of all, at once."""
    of = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype)
    weights = of(16, 128, 256), of(16, 128, 128)
    layer = lambda x, up, down, index, weight: jgg.moe_mlp(x, up, down, index, weight, max_rows=30)
    batch = jax.vmap(layer, (0, None, None, 0, 0))
    grad = jax.jit(jax.grad(lambda *args: batch(*args).sum(), (0, 1, 2)))
    args = of(8, 16, 128), *weights, of(8, 16, 2, dtype="int32"), of(8, 16, 2)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        taken = grad.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert taken < 4 * 16 * 128 * (256 + 128)


def test_a_batch_with_shared_experts_is_one_layer():
    """Its program has the kernels of as many tokens."""
    of = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)
    weights = of(8, 64, 128), of(8, 64, 64)
    rest = of(3, 40, 2, dtype="int32"), of(3, 40, 2, dtype="float32")

    def grad(layer):
        loss = lambda x, up, down, index, weight: layer(x, up, down, index, weight).sum()
        return jax.jit(jax.grad(loss, (0, 1, 2, 4)))

    batch = jax.vmap(jgg.moe_mlp, (0, None, None, 0, 0))
    texts = [
        grad(f).trace(of(3, 40, 64), *weights, *rest).lower(lowering_platforms=("cuda",)).as_text()
        for f in (jgg.moe_mlp, batch)
    ]
    calls = [re.findall(r"custom_call @(jgg_\w+)", text) for text in texts]
    assert calls[0] == calls[1]
    assert "jgg_moe_combine" in calls[0]


def test_layers_in_a_scan_with_checkpoints(rng):
    x, up, down, index, weight = problem(rng)
    layers = jnp.arange(3.0)

    @jax.checkpoint
    def layer(x, scale):
        return x + scale * jgg.moe_mlp(x, up, down, index, weight), None

    def scanned(x):
        return jnp.sin(jax.lax.scan(layer, x, layers)[0]).sum()

    def unrolled(x):
        for scale in layers:
            x = x + scale * jgg.moe_mlp(x, up, down, index, weight)
        return jnp.sin(x).sum()

    np.testing.assert_allclose(
        jax.jit(jax.grad(scanned))(x), jax.jit(jax.grad(unrolled))(x), rtol=1e-5, atol=1e-5
    )


def test_export(rng):
    args = problem(rng)
    f = jax.jit(jgg.moe_mlp)
    exported = jax.export.export(f, disabled_checks=jgg.EXPORT_DISABLED_CHECKS)(*args)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(*args), f(*args))


def scattered(lowered) -> list[str]:
    """The types of what the program's scatters give."""
    types = []

    def visit(op):
        if op.name == "stablehlo.scatter":
            types.extend(str(result.type) for result in op.results)
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        module.operation.walk(visit)
    return types


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("implementation", [None, "composed"])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.one_in(3)
def test_no_rows_are_scattered(rng, platform, implementation, activation, dtype, biased):
    """Forward or backward, by any platform's program: lists of integers at most."""
    gated = activation in moe_oracle.GATED
    x, up, down, index, weight = problem(rng, gated=gated, dtype=dtype)
    biases = [jnp.ones((E, w.shape[2]), dtype) for w in (up, down)] if biased else [None, None]

    def layer(x, up, down, weight, up_bias, down_bias):
        return jgg.moe_mlp(
            x, up, down, index, weight, up_bias=up_bias, down_bias=down_bias,
            activation=activation, implementation=implementation,
        )  # fmt: skip

    def step(*floats):
        out, pull = jax.vjp(layer, *floats)
        return out, pull(out)

    for f in (layer, step):
        traced = jax.jit(f).trace(x, up, down, weight, *biases)
        types = scattered(traced.lower(lowering_platforms=(platform,)))
        assert all(re.fullmatch(r"tensor<\d+xu?i\d+>", found) for found in types), types


def test_scattered_rows_are_found():
    """By what the test above looks for them with."""
    f = jax.jit(lambda x, at: (jnp.zeros((9, D)).at[at].add(x), jnp.zeros(9, int).at[at].add(1)))
    found = scattered(f.lower(jnp.ones((4, D)), jnp.arange(4)))
    assert found == [f"tensor<9x{D}xf32>", "tensor<9xi32>"]
