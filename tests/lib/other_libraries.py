"""Other libraries' layers with JAX's ragged_dot and with ours: ``python other_libraries.py NAME``.

Each function takes a program of a library, once outside of ``jgg.replace_ragged_dot()`` and once
within. A process of its own runs it, because these libraries do not run under the tests' settings.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_groupgemm as jgg

if sys.argv[1:] == ["maxtext"]:  # before there is an array
    jax.config.update("jax_num_cpu_devices", 4)

SIZES = jnp.array([4, 0, 26, 10], jnp.int32)


def compare(function, *args) -> None:
    """The same values and gradients; products are JAX's outside, and ours within."""

    def run():
        values = jax.jit(jax.value_and_grad(function, tuple(range(len(args)))))(*args)
        return jax.tree.leaves(values), str(jax.make_jaxpr(jax.grad(function))(*args))

    theirs, before = run()
    with jgg.replace_ragged_dot():
        ours, within = run()
    assert "ragged_dot_general[" in before
    assert "jgg_" not in before
    assert "ragged_dot_general[" not in within
    assert "jgg_" in within
    for got, want in zip(ours, theirs, strict=True):
        assert float(jnp.abs(want).max()) > 0
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max()))


def operands():
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (40, 16)), jax.random.normal(keys[1], (4, 16, 24))


def haliax() -> None:
    import haliax as hax

    x, w = operands()
    axes = [hax.Axis(*pair) for pair in (("expert", 4), ("embed", 16), ("mlp", 24), ("token", 40))]
    linear = hax.nn.MoELinear.init(*axes[:3], key=jax.random.key(2), use_bias=False)

    def loss(x, w):
        import equinox as eqx

        layer = eqx.tree_at(lambda layer: layer.weight.array, linear, w)
        y = layer(hax.named(x, (axes[3], axes[1])), hax.named(SIZES, axes[0]))
        return (y.array**2).sum()

    compare(loss, x, w)


def ejkernel() -> None:
    from ejkernel.modules import grouped_matmul

    options = {"preferred_element_type": jnp.float32, "platform": "xla"}
    compare(lambda x, w: (grouped_matmul(x, w, SIZES, **options) ** 2).sum(), *operands())


def qwix() -> None:
    """Int8 products, forward and backward."""
    import qwix
    from flax import nnx

    x, w = operands()

    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(w)

        def __call__(self, x):
            return jax.lax.ragged_dot(x, self.w[...], SIZES)

    rule = qwix.QtRule(
        module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8, bwd_qtype=jnp.int8
    )
    layer = qwix.quantize_model(Layer(), qwix.QtProvider([rule]), x)
    text = str(jax.make_jaxpr(lambda x: layer(x))(x))
    assert "i8[" in text
    compare(lambda x: (layer(x) ** 2).sum(), x)


def maxtext() -> None:
    """Ten training steps of a small Mixtral, with tokens and parameters on four devices; with
    moe_mlp also with experts on two."""
    import maxtext
    from maxtext.trainers.pre_train import train

    from jax_groupgemm.integrations import maxtext as with_ours

    config = Path(maxtext.__file__).parent / "configs/base.yml"
    settings = (
        "run_name=tiny hardware=cpu skip_jax_distributed_system=true decoder_block=mixtral "
        "base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=2 head_dim=16 base_mlp_dim=128 "
        "base_moe_mlp_dim=128 base_num_decoder_layers=2 vocab_size=256 num_experts=8 "
        "num_experts_per_tok=2 attention=dot_product "
        "dataset_type=synthetic steps=10 per_device_batch_size=1 max_target_length=64 "
        "enable_checkpointing=false dtype=float32 weight_dtype=float32 matmul_precision=highest "
        "log_config=false enable_goodput_recording=false"
    )

    def losses(name: str, run, *more: str, **options) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder) / f"{name}.jsonl"
            out = [f"base_output_directory={folder}", f"metrics_file={metrics}"]
            run([str(config), *settings.split(), *out, *more], **options)
            return [json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()]

    called = []

    def counted(*args, **kwargs):
        called.append(1)
        return jgg.ragged_dot(*args, **kwargs)

    from jax_groupgemm._grouped import replace

    replace._OURS["ragged_dot"] = counted
    alone = [f"{key}={value}" for key, value in with_ours.SETTINGS.items()]
    as_it_is = lambda arguments: train.main(["train", *arguments])
    balance = "load_balance_loss_weight=0.01"
    balanced = losses("balanced", as_it_is, *alone, balance)
    theirs = losses("theirs", as_it_is, *alone)
    assert not called
    ours = losses("ours", with_ours.train, balance)
    assert called
    assert len(ours) == 10
    assert ours[-1] < ours[0]
    np.testing.assert_allclose(ours, balanced, rtol=1e-6)
    # With a layer of ours the balancing loss is that of all tokens, with theirs of one device's.
    experts = ("ici_expert_parallelism=2", "ici_fsdp_parallelism=2")
    layer = losses("layer", with_ours.train, layer=True)
    travel = losses("travel", with_ours.train, *experts, layer=True)
    fp8 = losses("fp8", with_ours.train, *experts, layer=True, recipe=jgg.FP8Recipe())
    print(theirs, ours, layer, travel, fp8, sep="\n")
    np.testing.assert_allclose(layer, theirs, rtol=1e-6)
    np.testing.assert_allclose(travel, theirs, rtol=1e-6)
    np.testing.assert_allclose(fp8, theirs, rtol=1e-3)
    assert not np.allclose(fp8, theirs, rtol=1e-6)
    layer = losses("layer", with_ours.train, balance, layer=True)
    travel = losses("travel", with_ours.train, balance, *experts, layer=True)
    np.testing.assert_allclose(travel, layer, rtol=1e-6)
    np.testing.assert_allclose(layer, balanced, rtol=1e-4)
    assert not np.allclose(layer, theirs, rtol=1e-4)


if __name__ == "__main__":
    {f.__name__: f for f in (haliax, ejkernel, qwix, maxtext)}[sys.argv[1]]()
