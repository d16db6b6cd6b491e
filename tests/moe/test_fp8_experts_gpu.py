"""The experts in FP8 captured by XLA into command buffers, and replayed while tokens choose other
experts."""

import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from handler_watch import Watch, needs_compiler, watched
from replays import CAPTURED, EAGER, assert_replayed, replayed
from thunks import custom_calls

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension

pytestmark = pytest.mark.gpu

T, D, F, E, K = 700, 256, 384, 5, 2
KERNELS = {
    "jgg_fp8_quantize", "jgg_fp8_grouped_mm", "jgg_fp8_activation",
    "jgg_fp8_activation_backward", "jgg_fp8_grouped_wgrad",
}  # fmt: skip


def operands(rng):
    """x, up, down, weight and a cotangent."""
    of = lambda *shape: oracle.random(rng, shape, "bfloat16")
    up, down = of(E, D, 2 * F) / D**0.5, of(E, F, D) / F**0.5
    return of(T, D), up, down, jnp.asarray(rng.random((T, K)), "float32"), of(T, D)


def batches(rng):
    """Choices, -1 for none, and a seed: any, all of one expert, none, all of two, few, any."""
    any_ = lambda: rng.integers(-1, E, (T, K))
    few = np.full((T, K), -1)
    few[5:9] = [[0, 4], [4, 1], [4, -1], [0, 0]]
    pairs = np.broadcast_to([0, 3], (T, K))
    chosen = any_(), np.full((T, K), 2), np.full((T, K), -1), pairs, few, any_()
    return [(index.astype(np.int32), np.uint32(i)) for i, index in enumerate(chosen)]


def step(x, up, down, weight, ct, index, seed):
    """The result and all gradients, rounded at random."""
    key = jax.random.key(seed)

    def layer(x, up, down, weight):
        return jgg.moe_mlp(x, up, down, index, weight, recipe=jgg.FP8Recipe(), key=key)

    out, pull = jax.vjp(layer, x, up, down, weight)
    return out, *pull(ct)


def dense(x, up, down, weight, index):
    """Every expert of every token, in float64."""
    x, up, down, out = *map(oracle.f64, (x, up, down)), np.zeros((T, D))
    for e in range(E):
        gate, value = np.split(x @ up[e], 2, axis=1)
        of_token = (oracle.f64(weight) * (index == e)).sum(1)
        out += of_token[:, None] * ((gate / (1 + np.exp(-gate)) * value) @ down[e])
    return out


def replays(watch: Watch):
    """Runs of the step, captured once. Their bits should be those without capture."""
    rng = np.random.default_rng(0)
    fixed, different = jax.device_put(operands(rng)), batches(rng)
    lowered = jax.jit(step).lower(*fixed, *different[0])
    eager = lowered.compile(compiler_options=EAGER)
    wants = [jax.device_get(eager(*fixed, *batch)) for batch in different]
    for (out, *gradients), (index, _) in zip(wants, different, strict=True):
        want = dense(*fixed[:4], index)
        assert oracle.error(out, want) < 0.1
        assert all(np.isfinite(oracle.f64(g)).all() for g in gradients)
        assert all(g.any() == want.any() for g in gradients)
    with tempfile.TemporaryDirectory() as folder:
        captured = lowered.compile(compiler_options=CAPTURED | {"xla_dump_to": folder})
        inside, outside = custom_calls(Path(folder), "jit_step")
    targets = re.findall(r'custom_call_target="(jgg_\w+)"', str(captured.as_text()))
    assert len(inside) >= len(targets) > 0
    assert not outside
    if 90 in extension.live_capabilities():
        assert set(targets) >= KERNELS, targets
    return replayed(watch, lambda batch: captured(*fixed, *batch), different, wants)


@needs_compiler
def test_replays_with_other_routing():
    """The device reads how many tokens an expert has: with others, what was captured runs again
    without a handler, and has the bits that it has without capture."""
    assert_replayed(watched("CUDA", replays))
