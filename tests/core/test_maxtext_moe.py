"""MaxText's RoutedMoE with moe_mlp, of a stand-in for its class; tests/lib/other_libraries.py has
the real one."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import needs

import jax_groupgemm as jgg
from jax_groupgemm.integrations import _maxtext_moe, maxtext

nnx = pytest.importorskip("flax.nnx")
E, D, F, K = 4, 16, 24, 2


class Routed:
    """As much of ``RoutedMoE`` as the layer reads, and MaxText's settings by default."""

    _expert_parallelism_name = "expert"
    dtype, rngs = jnp.float32, None

    def __init__(self, devices=(1, 1), **settings):
        self.mesh = jax.make_mesh(devices, ("fsdp", "expert"), (jax.sharding.AxisType.Auto,) * 2)
        values = {name: allowed[0] for name, allowed in _maxtext_moe.ONLY.items()}
        values |= {
            "decoder_block": "mixtral", "mlp_activations": ["silu", "linear"],
            "load_balance_loss_weight": 0.0, "routed_bias_update_rate": 0.0, "tensor": 1,
        }  # fmt: skip
        self.config = types.SimpleNamespace(**values | settings)
        self.sown = []

    def get_expert_parallelism_size(self):
        return self.mesh.shape["expert"]

    def get_tensor_parallelism_size(self):
        return self.config.tensor

    def should_update_load_balance(self):
        return self.config.routed_bias_update_rate > 0

    def _logical_to_mesh_axes(self, names):
        return P(*({"activation_batch": ("fsdp", "expert")}.get(name) for name in names))

    def get_topk(self, logits, *_):
        weight, chosen = jax.lax.top_k(logits, K)
        return jax.nn.softmax(weight), chosen

    def load_balance_loss(self, chosen, scores):
        return (
            scores.sum() + chosen.sum().astype(scores.dtype)
        ) * self.config.load_balance_loss_weight

    def sow(self, kind, name, value):
        self.sown.append((name, value.shape))

    def sparse_matmul(self, *args):
        return "theirs"


def operands(batch=4):
    shapes = ((batch, 6, D), (batch, 6, E), (E, D, F), (E, D, F), (E, F, D))
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def every_expert(x, logits, gate, up, down):
    weight, chosen = Routed().get_topk(logits)
    h = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, gate)) * jnp.einsum("bsd,edf->bsef", x, up)
    y = jnp.einsum("bsef,efd->bsed", h, down)
    each = jnp.einsum("bsk,bske->bse", weight, jax.nn.one_hot(chosen, E))
    return jnp.einsum("bsed,bse->bsd", y, each)


def ours(routed, x, logits, *kernels, **options):
    return _maxtext_moe.sparse_matmul(routed, x, logits, None, *kernels, **options)


def gradients(layer, args):
    loss = lambda *args: (layer(*args) ** 2).sum()
    return jax.jit(jax.value_and_grad(loss, tuple(range(len(args)))))(*args)


@pytest.mark.parametrize("devices", [(1, 1), (2, 2)], ids=str)
def test_values_and_gradients(devices):
    """Whole experts, and divided ones, with tokens on all devices."""
    needs(devices[0] * devices[1])
    routed = Routed(devices)
    got = gradients(lambda *args: ours(routed, *args)[0], operands())
    with jax.default_matmul_precision("highest"):
        want = gradients(every_expert, operands())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(jnp.abs(b).max()))
    assert ("moe_has_overflow", ()) in routed.sown


def test_a_batch_that_devices_do_not_divide():
    """MaxText replicates it, too."""
    needs(2)
    routed = Routed((2, 1))
    assert _maxtext_moe.token_spec(routed, (3, 6)) == P(None, None)
    assert _maxtext_moe.token_spec(routed, (4, 6)) == P(("fsdp", "expert"), None)
    args = operands(3)
    np.testing.assert_allclose(ours(routed, *args)[0], ours(Routed(), *args)[0], rtol=1e-6)


def test_loss_and_recipe(monkeypatch):
    module = types.SimpleNamespace(uses_megatron_seq_aux_loss=lambda config: False)
    monkeypatch.setitem(sys.modules, _maxtext_moe.MODULE, module)
    args = operands()
    y, none, bias = ours(Routed(), *args)
    assert none is None
    assert bias is None
    y8, loss, _ = ours(Routed(load_balance_loss_weight=0.5), *args, recipe=jgg.FP8Recipe())
    chosen = jax.lax.top_k(args[1], K)[1]
    np.testing.assert_allclose(loss, 0.5 * (4 * 6 + int(chosen.sum())), rtol=1e-5)
    off = float(jnp.linalg.norm(y8 - y) / jnp.linalg.norm(y))
    assert 1e-3 < off < 0.1


REFUSED = [
    ({"mlp_bias": True}, "no mlp_bias=True"),
    ({"quantization": "int8"}, "no quantization='int8'"),
    ({"ragged_buffer_factor": 1.5}, "no ragged_buffer_factor=1.5"),
    ({"decoder_block": "gpt_oss"}, "no decoder_block=gpt_oss"),
    ({"mlp_activations": ["tanh", "linear"]}, r"no mlp_activations=\['tanh', 'linear'\]"),
    ({"mlp_activations": ["silu"]}, r"no mlp_activations=\['silu'\]"),
    ({"routed_bias_update_rate": 0.1}, "no routed_bias_update_rate=0.1"),
    ({"tensor": 2}, "no experts divided by tensor parallelism"),
    ({"mlp_bias": True, "tensor": 2}, "no mlp_bias=True, no experts divided"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=lambda v: str(v)[:30])
def test_what_it_does_not_do(settings, message):
    with pytest.raises(NotImplementedError, match=f"with moe_mlp there is {message}"):
        ours(Routed(**settings), *operands())


def test_operands_that_it_does_not_take():
    args = operands()
    bias = jnp.zeros((E, F))
    with pytest.raises(NotImplementedError, match="no biases of experts"):
        _maxtext_moe.sparse_matmul(Routed(), *args[:2], None, *args[2:], w0_bias=bias)
    with pytest.raises(NotImplementedError, match="no quantized weights"):
        ours(Routed(), *args[:2], None, *args[3:])
    needs(2)
    with pytest.raises(NotImplementedError, match="no expert parallelism with a batch of one"):
        ours(Routed((1, 2)), *operands(1))


def test_it_is_replaced_within_the_block_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, _maxtext_moe.MODULE, types.SimpleNamespace(RoutedMoE=Routed))
    x, logits, *kernels = operands()

    def use():
        with _maxtext_moe.replaced():
            y, _, _ = Routed().sparse_matmul(x, logits, None, *kernels, None, None, None)
            np.testing.assert_allclose(y, every_expert(x, logits, *kernels), rtol=1e-3, atol=1e-3)
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert Routed().sparse_matmul() == "theirs"


def test_arguments_of_train():
    with pytest.raises(TypeError, match="recipe must be an FP8Recipe, got str"):
        maxtext.train([], layer=True, recipe="fp8")
    with pytest.raises(ValueError, match="a recipe is of layer=True"):
        maxtext.train([], recipe=jgg.FP8Recipe())
    with pytest.raises(ValueError, match='no state of scaling="delayed"'):
        maxtext.train([], layer=True, recipe=jgg.FP8Recipe(scaling="delayed"))


@pytest.mark.parametrize(
    ("words", "layer", "recipe"),
    [([], False, None), (["--layer"], True, None), (["--layer", "fp8"], True, jgg.FP8Recipe())],
    ids=str,
)
def test_the_command(monkeypatch, words, layer, recipe):
    seen = []
    monkeypatch.setattr(maxtext, "_trainer", lambda: None)
    monkeypatch.setattr(maxtext, "train", lambda *args, **kwargs: seen.append((args, kwargs)))
    maxtext._main([*words, "base.yml", "steps=3"])
    assert seen == [((["base.yml", "steps=3"],), {"layer": layer, "recipe": recipe})]
