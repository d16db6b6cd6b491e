"""A training step captured by XLA into command buffers, and replayed while group sizes change."""

import functools
import re

import jax
import numpy as np
import oracle
import pytest
from handler_watch import Watch, needs_compiler, watched
from moe_step import EXPERTS, LINEAR, dense, jitted, problem
from replays import CAPTURED, EAGER, assert_replayed, replayed, same_bits
from thunks import custom_calls

ROUNDS = 3


@functools.cache
def on_cpu(precision: str):
    """The step compiled for the CPU, quickly."""
    state, batches, _ = problem()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        lowered = jitted.lower(state, *batches[0], precision=precision)
        return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})


def gradient_errors(got, want) -> list[float]:
    return [oracle.error(got[name], want[name]) for name in ("up", "gate", "down", "gain")]


def relative(got, want) -> float:
    return abs(float(got) / float(want) - 1)


# Loss and gradients differ from those of `dense` by, measured over four rounds, at most 1.2e-3 and
# 9.6e-3 in bfloat16; 6e-3, and from 0.013 to 0.12, in FP8; 3e-2, and from 0.07 to 0.45, in NVFP4.
OF_DENSE = {
    "bfloat16": (2e-3, 0, 0.012),
    "fp8": (1e-2, 0.01, 0.15),
    "nvfp4": (5e-2, 0.03, 0.5),
}
SLOW = [
    *(pytest.param(p, marks=[pytest.mark.slow, pytest.mark.weekly]) for p in ("nvfp4", "fp8")),
    "bfloat16",
]


@pytest.mark.parametrize("precision", SLOW)
def test_step_against_dense(precision):
    """In every routing: group sizes, losses and gradients; and the losses fall."""
    state, batches, plans = problem()
    exact = jax.jit(jax.value_and_grad(dense))
    most, least, highest = OF_DENSE[precision]
    losses = []
    for _ in range(ROUNDS):
        for batch, (first, second) in zip(batches, plans, strict=True):
            params = state[0]
            state, (loss, grads, sizes) = on_cpu(precision)(state, *batch)
            chosen = np.append(first, second)
            want = np.bincount(chosen[chosen >= 0], minlength=EXPERTS)
            np.testing.assert_array_equal(sizes, want)
            wanted_loss, wanted_grads = exact(params, *batch[:2], first, second)
            assert relative(loss, wanted_loss) < most
            for error in gradient_errors(grads, wanted_grads):
                assert least < error < highest
            losses.append(float(loss))
    losses = np.reshape(losses, (ROUNDS, -1))
    assert (losses[1:] < 0.9 * losses[:-1]).all()


# ---- on a GPU --------------------------------------------------------------------------------

# Between a GPU and a CPU, from the same state: of loss and gradients. Sums in another order change
# some roundings to bfloat16, and through them some to four bits. On a CPU, noise of 2**-14 in the
# tokens, more than such sums differ by, makes 2.6e-4 and 4.5e-3 in bfloat16, 1.6e-3 and 0.023 in
# FP8, and 2.6e-3 and 0.19 in NVFP4, whose gradients differ from those of bfloat16 by 0.26 and more.
OF_CPU = {"bfloat16": (5e-4, 6e-3), "fp8": (3e-3, 0.05), "nvfp4": (5e-3, 0.2)}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", LINEAR)
def test_captured_step(tmp_path, precision):
    """Captured and replayed with sizes that it has not seen, a step has the bits that it has
    without capture, and is what the CPU makes of the same state but for roundings."""
    state, batches, _ = problem()
    lowered = jitted.lower(state, *batches[0], precision=precision)
    runs = {}
    for name, options in (("captured", CAPTURED), ("eager", EAGER)):
        dump = {"xla_dump_to": str(tmp_path / name)}
        compiled = lowered.compile(compiler_options=options | dump)
        inside, outside = custom_calls(tmp_path / name, "jit_step")
        if name == "captured":
            targets = re.findall(r'custom_call_target="(jgg_\w+)"', str(compiled.as_text()))
            assert len(inside) >= len(targets) >= 9  # three products and their gradients
            assert not outside
            for kind in ("nvfp4", "fp8"):
                assert (f"jgg_{kind}_quantize" in targets) == (precision == kind)
        else:
            assert not inside
        runs[name], new = [], state
        for batch in batches * ROUNDS:
            old, (new, results) = new, compiled(new, *batch)
            runs[name].append(jax.device_get((old, results)))
    assert same_bits(runs["captured"], runs["eager"])
    most, highest = OF_CPU[precision]
    for batch, (old, (loss, grads, sizes)) in zip(batches * ROUNDS, runs["eager"], strict=True):
        _, (want_loss, want_grads, want_sizes) = on_cpu(precision)(old, *batch)
        np.testing.assert_array_equal(sizes, want_sizes)
        assert relative(loss, want_loss) < most
        assert max(gradient_errors(grads, want_grads)) < highest


def replays(watch: Watch):
    """Runs of a captured step, by precision."""
    state, batches, _ = problem()
    on_gpu, found = jax.device_put(state), {}
    for precision in LINEAR:
        lowered = jitted.lower(state, *batches[0], precision=precision)
        captured, eager = (lowered.compile(compiler_options=o) for o in (CAPTURED, EAGER))
        wants = [jax.device_get(eager(on_gpu, *batch)) for batch in batches]
        run = lambda batch, captured=captured: captured(on_gpu, *batch)
        found[precision] = replayed(watch, run, batches, wants, rounds=1)
    return found


@pytest.mark.gpu
@needs_compiler
def test_replays_call_no_handler():
    """The device reads group sizes: with others, what was captured runs again, and no handler."""
    for precision, runs in watched("CUDA", replays).items():
        assert_replayed(runs, precision)
