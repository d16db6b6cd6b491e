"""jax_groupgemm.nnx.MoE: what a module adds to router and moe_mlp."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg

nnx = pytest.importorskip("flax.nnx")

from jax_groupgemm.nnx import BalanceBias, MoE  # noqa: E402

D, F, E, K = 8, 12, 6, 2
DEEPSEEK = {
    "scores": "sigmoid", "scale": 2.5, "groups": 3, "top_groups": 2, "balance_bias": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # flax does not run under "strict"
        yield


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.normal(size=(3, 5, D)), jnp.float32)


def new(**options) -> MoE:
    return MoE(D, F, num_experts=E, top_k=K, rngs=nnx.Rngs(0), **options)


def test_only_the_module_imports_flax():
    package = Path(jgg.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{'.' * node.level}{node.module or ''}"]
                assert path == package / "nnx.py" or "nnx" not in [a.name for a in node.names], path
            flax = [name for name in names if name.split(".")[0] == "flax"]
            assert not flax or path == package / "nnx.py", path


@pytest.mark.parametrize("options", [DEEPSEEK, {}], ids=["deepseek_v3", "mixtral"])
@pytest.mark.one_in(2)
def test_it_is_router_and_moe_mlp(x, options):

    @jax.jit
    def both(x):
        layer = new(**options)
        rest = {name: value for name, value in options.items() if name != "balance_bias"}
        bias = None if layer.bias is None else layer.bias[...]
        logits = x @ layer.router.kernel[...]
        choice = jgg.router.choose(logits, K, bias=bias, **rest)
        y = jgg.moe_mlp(x, layer.w_up[...], layer.w_down[...], choice.expert, choice.weight)
        return layer(x), (y, jgg.router.report(logits, choice))

    got, want = both(x)
    assert got[0].shape == x.shape
    assert int(got[1].load.sum()) == 15 * K
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_training_step_with_a_balance_bias(x):
    """Every parameter has a gradient; the bias has none, and moves by the load."""

    @nnx.jit
    def step(x):
        layer = new(**DEEPSEEK, use_bias=True, router_bias=True, activation="relu2")

        def loss(layer):
            y, report = layer(x)
            return (y**2).sum() + report.z_loss, report.load

        (_, load), grads = nnx.value_and_grad(loss, has_aux=True)(layer)
        layer.balance(load, rate=0.5)
        return layer, load, grads

    layer, load, grads = step(x)
    assert layer.w_up.shape == (E, D, F)
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(grads)}
    assert names == {"router.kernel", "router.bias", "w_up", "w_down", "up_bias", "down_bias"}
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))
    np.testing.assert_array_equal(layer.bias[...], 0.5 * np.sign(5.0 - np.asarray(load)))
    assert [*nnx.state(layer, BalanceBias)] == ["bias"]
    assert "bias" not in nnx.state(layer, nnx.Param)


def test_there_is_nothing_to_balance():
    with pytest.raises(ValueError, match=r"^jgg\.nnx\.MoE\.balance: there is no bias\. Pass "):
        nnx.eval_shape(new).balance(jnp.zeros(E))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"features": "a"}, TypeError, "features must be an int, got 'a'"),
        ({"features": -1}, ValueError, "features=-1 is negative"),
        ({"hidden_features": 0}, ValueError, "hidden_features=0, expected 1 or more"),
        ({"num_experts": 2.0}, TypeError, "num_experts must be an int, got 2.0"),
        ({"top_k": 7}, ValueError, "top_k=7 is more than the 6 experts in 1 of 1 groups"),
        ({"top_k": None}, TypeError, "top_k must be an int, got None"),
        ({"scores": "tanh"}, ValueError, "scores='tanh' is not 'softmax' or 'sigmoid'"),
        ({"scale": None}, TypeError, "scale must be a finite number, got None"),
        ({"renormalize": "no"}, TypeError, "renormalize must be True or False, got 'no'"),
        ({"use_bias": None}, TypeError, "use_bias must be True or False, got None"),
        (
            {"groups": 4}, ValueError,
            "6 experts cannot be in groups=4 groups of one size, of which a token meets "
            "top_groups=4",
        ),
        (
            {"activation": jax.nn.silu}, ValueError,
            "activation is the function silu, and kernels know activations by name: write "
            "activation='silu'",
        ),
        (
            {"activation": "selu"}, ValueError,
            f"activation='selu' is not one of None, {moe_oracle.NAMES}",
        ),
        ({"dtype": "fp32"}, TypeError, "dtype='fp32' is not a dtype"),
        ({"param_dtype": "int8"}, TypeError, "param_dtype must be of floats, got int8"),
        ({"kernel_init": 1}, TypeError, "kernel_init must be a function, got 1"),
        ({"experts_fn": None}, TypeError, "experts_fn must be a function, got None"),
        ({"rngs": 0}, TypeError, "rngs must be an nnx.Rngs, got 0"),
        ({"recipes": None}, TypeError, "recipes is no argument of it or of jgg.moe_mlp"),
    ],
)  # fmt: skip
def test_errors(options, kind, message):
    arguments = {
        "features": D, "hidden_features": F, "num_experts": E, "top_k": K, "rngs": nnx.Rngs(0),
    }  # fmt: skip
    oracle.assert_raises(lambda: MoE(**{**arguments, **options}), kind, f"jgg.nnx.MoE: {message}")


def test_no_transfers(x):
    """Outside of any program, forward and backward."""
    layer, where = new(use_bias=True, max_rows=30), jnp.arange(15).reshape(3, 5) < 11
    run = lambda x: layer(x, where=where)
    ones = jnp.ones_like(x)
    with jax.transfer_guard("disallow"):
        y, _ = run(x)
    assert y.shape == x.shape
    if jax.__version_info__ < (0, 12):
        return  # JAX's own derivative of a slice brings a zero to the device
    with jax.transfer_guard("disallow"):
        y, pull = jax.vjp(lambda x: run(x)[0], x)
        (dx,) = pull(ones)
    assert y.shape == dx.shape == x.shape


def test_padding_gives_zeros(x):
    where = np.arange(15).reshape(3, 5) < 11
    tokens = np.where(where[..., None], x, np.nan)

    @jax.jit
    def run(x):
        def loss(layer):
            y, report = layer(x, where=where)
            return (y**2).sum() + report.balance_loss + report.z_loss, (y, report)

        return nnx.grad(loss, has_aux=True)(new())

    grads, (y, report) = run(tokens)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert not y[2, 1:].any()
    assert int(report.load.sum()) == 11 * K
    assert jnp.isfinite(report.balance_loss)
    assert jnp.isfinite(report.z_loss)


def test_dtypes(x):
    """Weights follow the tokens, or dtype; the router is in float32."""
    tokens = x.astype(jnp.bfloat16)
    results = jax.eval_shape(lambda: (new()(tokens), new(dtype=jnp.bfloat16)(x)))
    for y, report in results:
        assert y.dtype == jnp.bfloat16
        assert report.balance_loss.dtype == jnp.float32


@pytest.mark.weekly
def test_weights_may_be_quantized(rng):
    x = jnp.asarray(rng.normal(size=(5, 64)), jnp.float32)

    @jax.jit
    def both(x):
        layer = MoE(64, 64, E, K, rngs=nnx.Rngs(0))
        want = layer(x)[0]
        for w in (layer.w_up, layer.w_down):
            w.set_value(jgg.quantize(w[...], bits=8, group_size=64, contract=-2))
        return layer(x)[0], want

    got, want = both(x)
    assert float(jnp.abs(got - want).max()) > 0
    np.testing.assert_allclose(got, want, atol=0.03 * float(jnp.abs(want).max()))


def test_options_reach_moe_mlp(x):
    """A recipe among them; and its key."""
    seen = {}

    def experts_fn(x, *_, **options):
        seen.update(options)
        return x

    options = {"recipe": jgg.FP8Recipe(), "precision": "highest"}
    key = jax.random.key(3)
    jax.eval_shape(lambda: new(**options, experts_fn=experts_fn)(x, key))
    assert seen == {"key": key, "recipe": jgg.FP8Recipe(), "precision": "highest"}
    with pytest.raises(ValueError, match="implementation='sm60' is not one of"):
        jax.eval_shape(lambda: new(implementation="sm60")(x))


def test_graphs_of_equal_modules_are_equal():
    """So that a program that was compiled for one serves the other."""
    graph = lambda **more: nnx.graphdef(nnx.eval_shape(lambda: new(**DEEPSEEK, **more)))
    one, other = (graph(recipe=jgg.FP8Recipe()) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != graph()


def test_parameters_may_carry_shardings():
    init = nnx.with_partitioning(nnx.initializers.normal(), ("expert", None, None))
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        layer = nnx.eval_shape(lambda: new(kernel_init=init))
    spec = nnx.get_partition_spec(nnx.state(layer, nnx.Param))
    assert spec["w_up"].get_value() == jax.P("expert", None, None)
