"""What ``jax.checkpoint`` keeps of products, counted in the program of the gradient."""

import collections
import functools

import jax
import jax.numpy as jnp
import oracle
import pytest
from jax.extend.core import jaxprs_in_params

import jax_groupgemm as jgg
from jax_groupgemm._core import composed, primitive

POLICY = jgg.checkpoint_policies.grouped_products_saveable
SIZES = jnp.array([3, 5])
X = jnp.ones((8, 64))
WEIGHTS = jnp.ones((2, 64, 64)), jnp.ones((2, 64, 64))
LOW_RANK = jnp.ones((2, 8, 64)), jnp.ones((2, 64, 8))


@pytest.fixture(params=[False, True], ids=["", "remat3"], autouse=True)
def remat3(request):
    """Every test runs with and without ``jax_remat3``."""
    if jax.__version_info__ < (0, 12):
        if request.param:
            pytest.skip("rules of jax 0.11 are of another form")
        yield
        return
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param)
    yield
    jax.config.update("jax_remat3", before)


@functools.cache
def quantized():
    return jgg.quantize(jnp.ones((2, 64, 64)), contract=-1)


def counts(f, *args) -> collections.Counter:
    """How often each of our products is in the program of a gradient."""
    found: collections.Counter = collections.Counter()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name.startswith("jgg_"):
                found[name.removesuffix("_outer")] += 1
            elif not name.startswith("again_jgg_"):  # whose results are among its operands
                high = eqn.params.get("_prim")  # under jax_remat3 a program is in one of those
                for inner in jaxprs_in_params(eqn.params if high is None else high.params):
                    visit(inner)

    visit(jax.make_jaxpr(jax.grad(f))(*args).jaxpr)
    # A product that also gives what its activation is of is one, too, and so are those of tokens.
    # Under jax_remat3 a value that is not kept is that of one whole call.
    fused = "fused_mm", "fused_mm_preactivation", "experts_up", "experts_down", "experts_rows"
    for name in fused:
        found["jgg_mm"] += found.pop(f"jgg_{name}", 0)
    found["jgg_mm"] += 2 * found.pop("jgg_experts", 0)
    found["jgg_wgrad"] += found.pop("jgg_experts_weight", 0)
    return collections.Counter({name: found[name] for name in found if "activation" not in name})


def two_products(weights, x):
    up, down = weights
    h = jgg.grouped_mm(x, up, SIZES, activation="silu")
    return jnp.sin(jgg.grouped_mm(h, down, SIZES)).sum()


def test_products_are_not_computed_again():
    """Forward two, one for each of the gradients of h and (XLA drops it) of x; one for a weight."""
    plain = counts(two_products, WEIGHTS, X)
    assert plain == {"jgg_mm": 4, "jgg_wgrad": 2}
    again = counts(jax.checkpoint(two_products), WEIGHTS, X)
    assert again["jgg_mm"] == 4 + 2
    dots = jax.checkpoint(two_products, policy=jax.checkpoint_policies.dots_saveable)
    assert counts(dots, WEIGHTS, X) == again
    kept = jax.checkpoint(two_products, policy=POLICY)
    assert counts(kept, WEIGHTS, X) == plain
    for got, want in zip(
        jax.grad(kept)(WEIGHTS, X), jax.grad(two_products)(WEIGHTS, X), strict=True
    ):
        oracle.assert_close(got, want)


def test_the_name_in_a_mixture_of_experts():
    """What is before h is not computed again; a policy of products keeps it, too."""
    index = jnp.arange(8).reshape(8, 1) % 2
    weight = jnp.full((8, 1), 0.5)

    def layer(weights, x, weight):
        up, down = weights
        y = jgg.moe_mlp(x, up, down, index, weight, activation="silu")
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

    def products(f):
        found = counts(lambda args: f(*args), (WEIGHTS, X, weight))
        return found["jgg_mm"], found["jgg_wgrad"]

    names = jax.checkpoint_policies.save_only_these_names("moe_h")
    plain = products(layer)
    assert plain == (4, 2)
    assert products(jax.checkpoint(layer)) == (4 + 1, 2)  # nothing needs y
    assert products(jax.checkpoint(layer, policy=names)) == plain
    assert products(jax.checkpoint(layer, policy=POLICY)) == plain
    kept = jax.checkpoint(layer, policy=names)
    for got, want in zip(
        jax.grad(kept)(WEIGHTS, X, weight), jax.grad(layer)(WEIGHTS, X, weight), strict=True
    ):
        oracle.assert_close(got, want)


def test_with_a_policy_of_jax():
    def f(weights, x):
        return two_products(weights, jnp.sin(x @ weights[0][0]))

    both = jax.checkpoint_policies.save_from_both_policies(
        POLICY, jax.checkpoint_policies.dots_saveable
    )
    dots = lambda policy: str(
        jax.make_jaxpr(jax.grad(jax.checkpoint(f, policy=policy)))(WEIGHTS, X)
    ).count("dot_general[")
    assert counts(jax.checkpoint(f, policy=both), WEIGHTS, X)["jgg_mm"] == 4
    assert dots(POLICY) == dots(both) + 1


@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("jgg_qmm", lambda x: jnp.sin(jgg.grouped_qmm(x, quantized(), SIZES)).sum()),
        (
            "jgg_mm",
            lambda x: jnp.sin(jgg.gather_mm(x[:, None], WEIGHTS[0], None, jnp.arange(8) % 2)).sum(),
        ),
        ("jgg_mm", lambda x: jnp.sin(jgg.ragged_dot(x, WEIGHTS[0], SIZES)).sum()),
        ("jgg_wgrad", lambda x: jnp.sin(jgg.segmented_mm(x.T, x, [[0, 8]])).sum()),
        (
            "jgg_nvfp4_grouped_mm",
            lambda x: jnp.sin(jgg.nvfp4_grouped_linear(x, WEIGHTS[0], SIZES)).sum(),
        ),
    ],
)
def test_other_operations(name, f):
    plain, kept = counts(f, X)[name], counts(jax.checkpoint(f, policy=POLICY), X)[name]
    assert kept == plain
    assert counts(jax.checkpoint(f), X)[name] == plain + 1


def test_products_of_low_rank():
    """One forward, one of the gradient of x."""
    f = lambda x: jnp.sin(jgg.lora_mm(x, *LOW_RANK, jnp.arange(8) % 2)).sum()
    names = ("jgg_lora_mm", "jgg_lora_mm_kept")
    total = lambda f: sum(counts(f, X)[name] for name in names)
    assert total(f) == total(jax.checkpoint(f, policy=POLICY)) == 2
    assert total(jax.checkpoint(f)) == 3


def test_every_primitive_is_a_product_or_a_conversion():
    products = {"mm", "wgrad", "qmm", "fused_mm", "fused_qmm", "experts", "router"}
    products |= {"fused_mm_preactivation", "fused_qmm_preactivation"}
    products |= {"lora_mm", "lora_mm_kept", "lora_wgrad"}
    products |= {"adapted_qmm", "qmm_beside", "fp8_grouped_wgrad_of_matrices"}
    products |= {f"experts_{name}" for name in ("up", "up_alone", "down", "rows", "weight")}
    products |= {f"experts_{name}" for name in ("forward", "backward")}
    products |= {f"{of}_grouped_{name}" for of in ("nvfp4", "fp8") for name in ("mm", "wgrad")}
    ours = {*composed.PRIMITIVES, *primitive.INNER.values(), *primitive.OUTER.values()}
    ours = {p for p in ours if p.name != "jgg_test"}  # of another test
    saved = {p.name.removeprefix("jgg_").removesuffix("_outer") for p in ours if POLICY(p)}
    assert saved <= products
    assert {"mm", "wgrad", "qmm", "fused_mm", "nvfp4_grouped_mm"} <= saved
    assert {p.name for p in ours if not POLICY(p)} == {
        "jgg_quantize", "jgg_quantize_across", "jgg_dequantize", "jgg_prepack",
        "jgg_nvfp4_quantize", "jgg_route",
        "jgg_fp8_cast", "jgg_fp8_largest", "jgg_fp8_activation_cast",
        "jgg_fp8_activation_cast_backward",
        "jgg_dispatch", "jgg_combine", "jgg_combine_backward", "jgg_activation_backward",
        "jgg_activation", "jgg_send", "jgg_collect", "jgg_fp8_quantize",
        "jgg_fp8_dequantize", "jgg_fp8_activation", "jgg_fp8_activation_backward", "jgg_top_k",
    }  # fmt: skip


def test_names():
    assert dir(jgg.checkpoint_policies) == sorted(jgg.checkpoint_policies.__all__)
