"""A whole layer in bfloat16 with all gradients, again and again on a Hopper GPU: from command
buffers with routing that changes every step, its bits every time, on two streams."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_runs import (
    WHOLE_STREAMS,
    assert_overlap,
    compiled_with_streams,
    kernel_runs,
    on_stream,
    profile_on_two_streams,
)
from handler_watch import Watch, needs_compiler, watched
from replays import CAPTURED, EAGER, assert_replayed, replayed
from test_determinism import assert_same_bytes, bits, hopper
from test_experts_gpu import close, operands
from thunks import custom_calls

import jax_groupgemm as jgg

RUNS = 50
TOKENS, K, E = 4000, 3, 8
CASES = {"lists": (192, 256), "copies": (192, 1032)}  # D and F: few columns, and many
NAMES = pytest.mark.parametrize("name", CASES)


@functools.cache
def problem(name: str):
    """x, up, down, weight and a cotangent; and indices."""
    x, up, down, _, weight, ct = operands(TOKENS, K, E, *CASES[name], "bfloat16")
    rng = np.random.default_rng(1)
    any_of = lambda low, high: rng.integers(low, high, (TOKENS, K))
    one = np.full((TOKENS, K), 5)
    lonely = np.where(np.arange(TOKENS)[:, None] == 7, 3, any_of(5, E))
    cut = np.where(np.arange(TOKENS)[:, None] < 1234, any_of(0, E), -1)
    indices = [any_of(-1, E + 1), one, 0 * one - 1, lonely, cut, any_of(0, 2)]
    return (x, up, down, weight, ct), [jnp.asarray(index, jnp.int32) for index in indices]


def layer(floats, index, **options):
    x, up, down, weight = floats
    return jgg.moe_mlp(x, up, down, index, weight, **options)


def step(floats, index, **options):
    """The layer and all gradients."""
    *floats, ct = floats
    out, pull = jax.vjp(lambda *floats: layer(floats, index, **options), *floats)
    return out, *pull(ct)


def lowered(name: str, **platforms):
    """Rows are copied by a kernel of its own, or not at all."""
    floats, indices = problem(name)
    found = jax.jit(step).trace(floats, indices[0]).lower(**platforms)
    text = found.as_text()
    assert ("jgg_moe_dispatch" in text) == (name == "copies")
    assert ("x_rows = true" in text) == (name == "lists")
    return found


@hopper
@NAMES
def test_captured(tmp_path, name):
    """Captured and replayed with routings that it has not seen, a step has the bits that it has
    without capture, and is right."""
    floats, indices = problem(name)
    eager = lowered(name).compile(compiler_options=EAGER)
    captured = lowered(name).compile(compiler_options=CAPTURED | {"xla_dump_to": str(tmp_path)})
    inside, outside = custom_calls(tmp_path, "jit_step")
    targets = re.findall(r'custom_call_target="(jgg_\w+)"', str(captured.as_text()))
    assert len(inside) >= len(targets) >= 9  # route, six products, two sums of rows
    assert not outside
    composed = jax.jit(functools.partial(step, implementation="composed"))
    wants = [eager(floats, index) for index in indices]
    for index, want in zip(indices, wants, strict=True):
        close(want, composed(floats, index), 2e-2)
    for _ in range(3):
        for index, want in zip(indices, wants, strict=True):
            assert_same_bytes(captured(floats, index), want)


def replays(watch: Watch):
    """Runs of a captured step, by case."""
    found = {}
    for name in CASES:
        floats, indices = problem(name)
        captured, eager = (lowered(name).compile(compiler_options=o) for o in (CAPTURED, EAGER))
        wants = [jax.device_get(eager(floats, index)) for index in indices]
        run = functools.partial(captured, floats)
        found[name] = replayed(watch, run, indices, wants)
    return found


@hopper
@needs_compiler
def test_replays_call_no_handler():
    """The device reads the routing: with another, what was captured runs again, and no handler."""
    for name, runs in watched("CUDA", replays).items():
        assert_replayed(runs, name)


@hopper
@NAMES
def test_same_bits_every_time(name):
    """Also of routings in turns, in one program."""
    floats, indices = problem(name)
    run = lowered(name).compile()
    wants = [run(floats, index) for index in indices[:2]]
    for i in range(2 * RUNS):
        assert_same_bytes(run(floats, indices[i % 2]), wants[i % 2])


def flat(floats, index):
    """All bits in one array."""
    if WHOLE_STREAMS:
        results = step(floats, index)
    else:  # no barrier, which gradients have, and a count of rows that is no constant
        results = [layer(floats[:-1], index, max_rows=TOKENS * K - 1)]
    return jnp.concatenate([bits(a, 16).reshape(-1) for a in results])


def beside(floats, a, b):
    return on_stream(1, flat)(floats, a), on_stream(2, flat)(floats, b)


def two_streams(profile):
    """Steps beside each other, of different routings."""
    together = []
    for name in CASES:
        floats, indices = problem(name)
        pair = indices[0], indices[4]
        wants = tuple(jax.jit(flat)(floats, index) for index in pair)
        both = compiled_with_streams(jax.jit(beside), floats, *pair)
        for _ in range(RUNS):
            assert_same_bytes(both(floats, *pair), wants)
        together.append(functools.partial(both, floats, *pair))
    with jax.profiler.trace(profile):
        for run in 5 * together:
            jax.block_until_ready(run())


TWO_STREAMS = """
import sys
sys.path[:] = sys.argv[1].split(':')
import test_experts_replays_gpu
test_experts_replays_gpu.two_streams(sys.argv[2])
"""


@hopper
def test_on_two_streams(tmp_path):
    """Steps that run at the same time give the bits that they give alone."""
    planes = profile_on_two_streams(tmp_path, TWO_STREAMS, "beside", len(CASES))
    assert_overlap(kernel_runs(planes, "Sm90Kernel"))
