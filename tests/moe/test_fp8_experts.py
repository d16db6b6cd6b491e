"""The experts in FP8 as one operation: what its kernels are given means the composition."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fp8_quantize_cases import SQUARES_BOTH
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, needs_two_devices

import jax_groupgemm as jgg
from jax_groupgemm._fp8.grouped_linear import codes_of
from jax_groupgemm._moe import experts
from jax_groupgemm._moe.fp8 import FP8, FP8Kernels
from jax_groupgemm._moe.products import Linear, Weights
from jax_groupgemm._moe.routing import route

T, D, F, E, K = 60, 32, 128, 4, 2
NEAREST = jgg.FP8Recipe(stochastic_rounding=False)


def problem(rng, tokens=T, d=D, f=F, dtype="bfloat16"):
    """x, up, down, weight, and what is static of the routing; a cotangent of the result."""
    x, ct = (oracle.random(rng, (tokens, d), dtype) for _ in range(2))
    up = oracle.random(rng, (E, d, 2 * f), dtype) * jnp.asarray(d**-0.5, dtype)
    down = oracle.random(rng, (E, f, d), dtype) * jnp.asarray(f**-0.5, dtype)
    index = jnp.asarray(rng.integers(-1, E, (tokens, K)), jnp.int32)
    return (x, up, down, jnp.asarray(rng.random((tokens, K)), "float32")), index, ct


def gradients(args, index, ct, **options):
    """The result and all gradients."""

    def layer(x, up, down, weight):
        return jgg.moe_mlp(x, up, down, index, weight, **options)

    out, pull = jax.vjp(layer, *args)
    return out, *pull(ct)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.one_in(2)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels are not their definitions")
def test_fused_is_composed(rng, transpose_w):
    """Where kernels are not, their definitions run: then both are the same, to the last bit."""
    (x, up, down, weight), index, ct = problem(rng)
    if transpose_w:
        up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
    weights = Weights(
        *(Linear(w, None, codes_of(w, NEAREST, columns=not transpose_w)) for w in (up, down))
    )
    composed, kernels = (
        kind("swiglu", *[jnp.dtype(x.dtype)] * 3, transpose_w, NEAREST)
        for kind in (FP8, FP8Kernels)
    )
    routing = route(index, E)
    live = int(routing.group_sizes.sum())

    def both(products):
        forward, backward = (
            jax.jit(functools.partial(run, products=products))
            for run in (experts._pass_forward, experts._pass_backward)
        )
        out, h, _ = forward(x, weights, routing, weight, None)
        return out, h, backward(x, weights, routing, ct, h, None, weight, None)

    (out, h, got), (want, want_h, grads) = both(kernels), both(composed)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(h[:live], want_h[:live])
    for one, other in zip(*map(jax.tree.leaves, (got, grads)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.one_in(2)
def test_gradients(rng, dtype):
    """As near to the layer without a recipe as the composition of public operations is."""
    args, index, ct = problem(rng, dtype=dtype)
    run = lambda **options: jax.jit(functools.partial(gradients, **options))(args, index, ct)
    exact, own = run(), run(recipe=NEAREST)
    composed = run(recipe=NEAREST, implementation="composed")
    np.testing.assert_array_equal(own[0], composed[0])
    for one, other, want in zip(own, composed, exact, strict=True):
        assert one.dtype == want.dtype
        assert 1e-3 < oracle.error(one, want) < 1.15 * oracle.error(other, want) < 0.1


@pytest.mark.parametrize("names", [("forward", "dgrad"), ("forward",), ("dgrad",)])
@pytest.mark.one_in(2)
def test_products_in_bfloat16(rng, names):
    """Where none needs codes of weights, there are none."""
    args, index, ct = problem(rng, tokens=20)
    recipe = jgg.FP8Recipe(stochastic_rounding=False, **dict.fromkeys(names, "bfloat16"))
    exact, got, composed = (
        jax.jit(functools.partial(gradients, **options))(args, index, ct)
        for options in ({}, {"recipe": recipe}, {"recipe": recipe, "implementation": "composed"})
    )
    np.testing.assert_array_equal(got[0], composed[0])
    for one, want in zip(got, exact, strict=True):
        assert oracle.error(one, want) < 0.1


def codes(up, down, transpose_w=False):
    axis = -1 if transpose_w else -2
    return tuple(jgg.quantize(w, mode="fp8", contract=axis) for w in (up, down))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.one_in(2)
def test_weights_that_are_quantized_beforehand(rng, biased):
    """Are not read, and have the gradients."""
    args, index, ct = problem(rng, tokens=20)
    _, up, down, _ = args
    bias = {"up_bias": jnp.ones((E, 2 * F), up.dtype)} if biased else {}
    run = jax.jit(functools.partial(gradients, recipe=NEAREST, **bias))
    unread = args[0], jnp.full_like(up, jnp.nan), jnp.full_like(down, jnp.nan), args[3]
    got = run(unread, index, ct, quantized=codes(up, down))
    for one, want in zip(got, run(args, index, ct), strict=True):
        np.testing.assert_array_equal(one, want)


@needs_two_devices
@pytest.mark.parametrize("axis", ["F", "E"])
@pytest.mark.one_in(2)
def test_codes_are_sharded_as_weights(rng, axis):
    (x, up, down, weight), index, ct = problem(rng, f=256)
    mesh = mesh_of((2,), ("m",), jax.sharding.AxisType.Explicit)
    specs = {"F": (P(None, None, "m"), P(None, "m")), "E": (P("m"), P("m"))}[axis]
    run = jax.jit(functools.partial(gradients, recipe=NEAREST))
    want = run((x, up, down, weight), index, ct, quantized=codes(up, down))
    with jax.set_mesh(mesh):
        put = lambda a, spec: jax.device_put(a, jax.sharding.NamedSharding(mesh, spec))
        placed = put(up, specs[0]), put(down, specs[1])
        whole = [put(a, P()) for a in (x, weight, index, ct)]
        sharded = jax.jit(codes)(*placed)
        args = whole[0], *placed, whole[1]
        got = run(args, *whole[2:], quantized=sharded)
    for one, other in zip(got, want, strict=True):
        assert oracle.error(one, other) < 2e-2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quantized": 1, "recipe": None}, ValueError, "for a jgg.FP8Recipe"),
        ({"quantized": 1}, TypeError, "must be two jgg.Quantized, of up and down"),
        ({"quantized": (1, 2)}, TypeError, "quantized up must be a jgg.Quantized, got int"),
        (
            {"contract": -1},
            ValueError,
            "quantized up has shape (4, 32, 256), expected (4, 256, 32)",
        ),
    ],
)
def test_codes_that_do_not_fit(rng, options, error, message):
    (x, up, down, weight), index, _ = problem(rng, tokens=4)
    options = {"recipe": NEAREST} | options
    if "contract" in options:
        options.pop("contract")
        options["quantized"] = codes(up, down, transpose_w=True)
    with pytest.raises(error, match=re.escape(message)):
        jgg.moe_mlp(x, up, down, index, weight, **options)


@pytest.mark.weekly
def test_rounding_at_random(rng):
    """Another key, another gradient; their mean is nearer to the exact one than each is."""
    args, index, ct = problem(rng)
    run = jax.jit(lambda key: gradients(args, index, ct, recipe=jgg.FP8Recipe(), key=key))
    several = [run(key) for key in jax.random.split(jax.random.key(1), 6)]
    nearest = jax.jit(lambda: gradients(args, index, ct, recipe=NEAREST))()
    for place in (1, 2, 3):
        each = [oracle.f64(found[place]) for found in several]
        assert (each[0] != each[1]).any()
        errors = [oracle.error(one, nearest[place]) for one in each]
        assert oracle.error(sum(each) / len(each), nearest[place]) < 0.8 * min(errors)


def test_second_order(rng):
    """A gradient's gradient is not that of constants."""
    args, index, ct = problem(rng, tokens=24)

    def norm(args, implementation):
        found = gradients(args, index, ct, recipe=NEAREST_PLAIN, implementation=implementation)
        return sum(jnp.vdot(g, g).astype("float32") for g in found[1:])

    got, want = (jax.jit(jax.grad(functools.partial(norm, implementation=i)))(args)
                 for i in (None, "composed"))  # fmt: skip
    for one, other in zip(got, want, strict=True):
        assert oracle.error(one, other) < 0.15


#: Weight gradients of arrays, which have derivatives in x.
NEAREST_PLAIN = jgg.FP8Recipe(stochastic_rounding=False, wgrad="bfloat16")


def test_vmap(rng):
    """Of layers beside each other, and of one layer's gradients for several batches."""
    args, index, ct = problem(rng, tokens=20)
    run = functools.partial(gradients, recipe=NEAREST)
    batch = [(args, index, ct), problem(rng, tokens=20)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *batch)
    got = jax.jit(jax.vmap(run))(*stacked)
    for i, one in enumerate(batch):
        for found, want in zip(got, jax.jit(run)(*one), strict=True):
            assert oracle.error(found[i], want) < 1e-2


def rounded(a):
    """What its codes stand for."""
    return jgg.dequantize(jgg.fp8_quantize(a), dtype=a.dtype)


@needs_two_devices
@pytest.mark.parametrize("implementation", [None, "composed"])
@pytest.mark.parametrize("dispatch", ["bfloat16", "fp8"])
@pytest.mark.parametrize("transport", ["gather", "all_to_all"])
@pytest.mark.one_in(3)
def test_experts_of_several_devices(rng, transport, dispatch, implementation):
    """Tokens and cotangents that travel in FP8 are what their codes stand for."""
    args, index, ct = problem(rng)
    recipe = dataclasses.replace(NEAREST, dispatch=dispatch)
    run = functools.partial(gradients, recipe=recipe, implementation=implementation)
    specs = (P("e"),) * 4, P("e"), P("e")
    across = jax.shard_map(
        functools.partial(run, axis_name="e", transport=transport),
        mesh=mesh_of((2,), ("e",), jax.sharding.AxisType.Auto), in_specs=specs, out_specs=P("e"),
    )  # fmt: skip
    run = jax.jit(run)
    got, want = jax.jit(across)(args, index, ct), run(args, index, ct)
    if dispatch == "fp8":
        before, want = want, run((rounded(args[0]), *args[1:]), index, rounded(ct))
        assert max(map(oracle.error, before, want)) > 1e-2
    for one, other in zip(got, want, strict=True):
        assert oracle.error(one, other) < 2e-2
    moved = set()
    for line in jax.jit(across).lower(args, index, ct).as_text().splitlines():
        found = re.search(rf'"stablehlo.(all_\w+)".*-> tensor<[0-9x]*x{D}x(\w+)>', line)
        moved |= {found.groups()} if found else set()
    sent = "all_gather" if transport == "gather" else "all_to_all"
    assert moved == {(sent, "ui8" if dispatch == "fp8" else "bf16"), ("all_to_all", "bf16")}


def test_nothing_to_do(rng):
    """No token, and tokens of no expert."""
    args, index, ct = problem(rng, tokens=8)
    none = [a[:0] for a in (args[0], args[3], index, ct)]
    for found in (
        gradients((none[0], *args[1:3], none[1]), none[2], none[3], recipe=NEAREST),
        gradients(args, jnp.full_like(index, -1), ct, recipe=NEAREST),
    ):
        for value in found:
            assert not np.asarray(value).any()


@pytest.mark.usefixtures("hopper")
def test_export(rng):
    """The layer and its gradients, for both platforms, of which one has kernels."""
    args, index, ct = problem(rng, tokens=20)
    run = jax.jit(functools.partial(gradients, recipe=NEAREST))
    exported = jax.export.export(
        run, platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(args, index, ct)
    assert set(re.findall(r"@(jgg_fp8_\w+)\(", exported.mlir_module())) == {
        "jgg_fp8_quantize", "jgg_fp8_grouped_mm", "jgg_fp8_activation",
        "jgg_fp8_activation_backward", "jgg_fp8_grouped_wgrad",
    }  # fmt: skip
    got = jax.export.deserialize(exported.serialize()).call(args, index, ct)
    for one, want in zip(got, run(args, index, ct), strict=True):
        assert one.dtype == want.dtype
        np.testing.assert_array_equal(one, want)


@pytest.mark.usefixtures("hopper")
def test_kernels_run_it():
    """As custom calls: nothing of R rows is quantized from an array of its own."""
    shape = lambda *s, dtype="bfloat16": jax.ShapeDtypeStruct(s, dtype)
    tokens, d, f = 512, 512, 256
    args = shape(tokens, d), shape(E, d, 2 * f), shape(E, f, d), shape(tokens, K, dtype="float32")
    run = jax.jit(functools.partial(gradients, recipe=NEAREST))
    text = run.trace(args, shape(tokens, K, dtype="int32"), shape(tokens, d)).lower(
        lowering_platforms=("cuda",)
    ).as_text()  # fmt: skip
    names = set(re.findall(r"@(jgg_[a-z0-9_]+)\(", text))
    assert names >= {
        "jgg_fp8_quantize", "jgg_moe_dispatch", "jgg_fp8_grouped_mm", "jgg_fp8_activation",
        "jgg_moe_combine", "jgg_fp8_activation_backward", "jgg_fp8_grouped_wgrad",
    }  # fmt: skip
    assert not names & {"jgg_moe_combine_backward", "jgg_activation_backward", "jgg_mm"}
    quantized = re.findall(r"custom_call @jgg_fp8_quantize\((.*?: \(tensor<(\w+)>)", text)
    assert {x for call, x in quantized if SQUARES_BOTH not in call} == {f"1x{tokens}x{d}xbf16"}
    both = [x for call, x in quantized if SQUARES_BOTH in call]
    assert sorted(both) == sorted([f"4x{d}x{2 * f}xbf16", f"4x{f}x{d}xbf16"])
    copied = re.findall(r"custom_call @jgg_moe_dispatch\(.*?: \(tensor<(\w+)>", text)
    assert set(copied) == {f"{tokens}x{d}xf8E4M3FN", f"{tokens}x{d // 128}xf32"}
