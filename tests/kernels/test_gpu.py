"""What only a GPU can show: command buffers, recycled memory, determinism, sizes beyond 32 bits."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import (
    assert_overlap,
    kernel_runs,
    needs_hopper,
    profile_on_two_streams,
)
from thunks import custom_calls

import jax_groupgemm as jgg

pytestmark = pytest.mark.gpu


def chain(x, w, sizes, spans):
    """Ten custom calls, forward and backward, that depend on each other."""

    def loss(x, w):
        for i in range(3):
            x = jnp.tanh(jgg.grouped_mm(x, w[i], sizes[i], transpose_w=i == 1))
        gram = jgg.segmented_mm(x, x, spans, transpose_a=True)
        return (x**2).sum() + gram.sum()

    return jax.value_and_grad(loss, (0, 1))(x, w)


def chain_operands(rng):
    x, w = oracle.random(rng, (200, 48)), oracle.random(rng, (3, 4, 48, 48)) / 7
    sizes = [
        jnp.asarray(np.stack([oracle.random_sizes(rng, 4, 200) for _ in range(3)]))
        for _ in range(4)
    ]
    spans = [jnp.asarray(rng.integers(-5, 210, (3, 2)), jnp.int32) for _ in range(4)]
    return x, w, sizes, spans


def test_command_buffer_replay_with_other_sizes(rng, tmp_path):
    """One executable, captured once, replayed with sizes and spans that it has not seen."""
    x, w, sizes, spans = chain_operands(rng)
    options = {"xla_gpu_graph_min_graph_size": 1}
    compiled = jax.jit(chain).lower(x, w, sizes[0], spans[0]).compile(compiler_options=options)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        wants = [
            jax.jit(chain)(*jax.device_get((x, w, s, p))) for s, p in zip(sizes, spans, strict=True)
        ]
    for _ in range(3):
        for s, p, want in zip(sizes, spans, wants, strict=True):
            got = compiled(x, w, s, p)
            for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                oracle.assert_close(g, e, tolerance=1e-5)


CAPTURED = """
import sys
import jax, numpy as np
sys.path[:] = sys.argv[1].split(':')
import test_gpu
x, w, sizes, spans = test_gpu.chain_operands(np.random.default_rng(0))
for s, p in zip(sizes, spans):
    jax.block_until_ready(jax.jit(test_gpu.chain)(x, w, s, p))
"""


def test_custom_calls_are_captured(tmp_path):
    """XLA puts our calls into a command buffer: its own list of thunks says so."""
    flags = f"--xla_dump_to={tmp_path} --xla_gpu_graph_min_graph_size=1"
    command = [sys.executable, "-c", CAPTURED, ":".join(sys.path)]
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, check=True)
    inside, outside = custom_calls(tmp_path, "jit_chain")
    assert len(inside) >= 8
    assert not outside


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_recycled_memory(rng, garbage):
    """Results are written in full even where the allocator hands out memory full of garbage."""
    x, w = oracle.random(rng, (300, 40)), oracle.random(rng, (6, 40, 72))
    sizes = jnp.array([0, 100, 0, 1, 67, 0])
    ct = oracle.random(rng, (300, 72))

    @jax.jit
    def both(x, w, ct):
        out, vjp = jax.vjp(lambda x, w: jgg.grouped_mm(x, w, sizes), x, w)
        return out, *vjp(ct)

    wants = oracle.grouped_mm(x, w, sizes), *oracle.grouped_mm_grads(x, w, sizes, ct)
    for _ in range(5):
        blocks = [jnp.full((300 * 72 + i,), garbage) for i in range(64)]
        jax.block_until_ready(blocks)
        del blocks
        for got, want in zip(both(x, w, ct), wants, strict=True):
            oracle.assert_close(got, want)


def test_same_bits_every_time(rng):
    x, w = oracle.random(rng, (300, 40)), oracle.random(rng, (6, 40, 72))
    segments = jnp.asarray(rng.integers(0, 300, (9, 2)), jnp.int32)
    grad = jax.jit(
        jax.grad(lambda x: jnp.sin(jgg.segmented_mm(x, x, segments, transpose_a=True)).sum())
    )
    first = np.asarray(grad(x))
    for _ in range(50):
        np.testing.assert_array_equal(grad(x), first)
    f = jax.jit(lambda x, w: jgg.grouped_mm(x, w, jnp.array([100, 1, 0, 99, 50, 50])))
    first = np.asarray(f(x, w))
    for _ in range(50):
        np.testing.assert_array_equal(f(x, w), first)


def test_operand_over_four_gib(rng):
    """Row offsets beyond 2**32 bytes, in x, in the weights and in the result."""
    t, k = 2**20 + 77, 1100
    x = jax.random.normal(jax.random.key(0), (t, k), jnp.float32)
    w = jax.random.normal(jax.random.key(1), (3, k, 8), jnp.float32)
    sizes = jnp.array([5, t - 100, 90])
    out = jgg.grouped_mm(x, w, sizes)
    for rows, group in ((slice(0, 5), 0), (slice(t - 300, t - 95), 1), (slice(t - 95, t - 5), 2)):
        oracle.assert_close(out[rows], oracle.f64(x[rows]) @ oracle.f64(w[group]), k=k)
    assert not np.asarray(out[-5:]).any()
    tail = jgg.segmented_mm(x, out, jnp.array([[t - 200, t]]), transpose_a=True)
    oracle.assert_close(tail[0], oracle.f64(x[-200:]).T @ oracle.f64(out[-200:]))


def mm_flags(**plan):
    """Attributes of jgg_mm as its call makes them, with another plan."""
    no = lambda *names: dict.fromkeys(names, np.bool_(False))
    same = {"kernel": "", "rows": "in order", "planes": np.int32(1), "tile": np.int32(32)}
    return {
        "metadata": {"kind": "sizes"} | no("swapped", "group_offset"),
        "mm": no("transpose_x", "transpose_w", "transpose_out", "clears_rest")
        | {"in_order": np.bool_(True)},
        "rows": no("x_rows", "y_rows"),
        "epilogue": {"activation": ""}
        | no("bias", "row_scale", "existing_out", "preactivation", "rounds_preactivation"),
        "plan": same | plan | no("tf32", "pairs"),
    }


def run_mm(x, w, sizes, **plan):
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[-1]), x.dtype)
    call = jax.ffi.ffi_call("jgg_mm", out)
    return jax.block_until_ready(
        jax.jit(lambda *args: call(*args, **mm_flags(**plan)))(x, w, sizes)
    )


def test_errors_of_a_handler_reach_python():
    """A handler called with shapes that do not fit says so in one line."""
    x, w, sizes = jnp.ones((4, 8)), jnp.ones((2, 9, 4)), jnp.zeros(2, jnp.int32)
    with pytest.raises(
        (RuntimeError, ValueError), match=r"jgg.mm: w has shape \(2, 9, 4\), expected"
    ):
        run_mm(x, w, sizes)


@pytest.mark.parametrize("m", [8, 16, 24])
@pytest.mark.parametrize("implementation", [None, pytest.param("sm90", marks=needs_hopper), "sm80"])
def test_a_product_over_one_row(rng, m, implementation):
    """Which lies as one column does."""
    a, b = oracle.random(rng, (m, 1), "bfloat16"), oracle.random(rng, (1, 64), "bfloat16")
    spans = jnp.array([[0, 1], [0, 0]])
    out = jgg.segmented_mm(a, b, spans, implementation=implementation)
    oracle.assert_close(out[0], oracle.f64(a) @ oracle.f64(b))
    assert not out[1].any()


@needs_hopper
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"tile": np.int32(48)}, "no kernel follows the plan: rows 'in order', tile 48"),
        ({"rows": "by list"}, "the plan and the operands differ in lists"),
        ({"rows": "at random"}, "unknown plan of rows 'at random'"),
    ],
)
def test_a_handler_refuses_a_plan_that_no_kernel_follows(plan, why):
    x, w = jnp.ones((8, 64), "bfloat16"), jnp.ones((2, 64, 64), "bfloat16")
    sizes = jnp.array([5, 3], jnp.int32)
    np.testing.assert_array_equal(run_mm(x, w, sizes), 64)
    with pytest.raises((RuntimeError, ValueError), match=why):
        run_mm(x, w, sizes, **plan)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_more_rows_than_a_grid_dimension(rng, dtype):
    """70 001 rows, most in one group, cut anywhere."""
    t, k, n = 70_001, 24, 40
    x, w, ct = (oracle.random(rng, s, dtype) for s in ((t, k), (3, k, n), (t, n)))
    sizes = jnp.array([17, 65_537, 4_000])
    out, vjp = jax.vjp(lambda x, w: jgg.grouped_mm(x, w, sizes), x, w)
    oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))
    for got, want in zip(vjp(ct), oracle.grouped_mm_grads(x, w, sizes, ct), strict=True):
        oracle.assert_close(got, want, k=65_537)


@pytest.mark.parametrize("live", [0, 1, 8, 4096])
def test_4096_groups(rng, live):
    t, k, n, g = 4_500, 16, 24, 4096
    x, w, ct = oracle.random(rng, (t, k)), oracle.random(rng, (g, k, n)), oracle.random(rng, (t, n))
    sizes = np.zeros(g, np.int32)
    sizes[np.sort(rng.choice(g, live, replace=False))] = t // max(live, 1)
    out, vjp = jax.vjp(lambda x, w: jgg.grouped_mm(x, w, sizes), x, w)
    oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))
    for got, want in zip(vjp(ct), oracle.grouped_mm_grads(x, w, sizes, ct), strict=True):
        oracle.assert_close(got, want, k=t)


def test_weights_over_four_gib(rng):
    """The last of many weights begins beyond 2**32 bytes, as does the last row of the result."""
    g, k, n, t = 70, 4096, 8192, 2**18 + 5
    w = jax.jit(lambda: jax.random.normal(jax.random.key(0), (g, k, n), jnp.bfloat16))()
    x = jax.jit(lambda: jax.random.normal(jax.random.key(1), (t, k), jnp.bfloat16))()
    assert w.nbytes > 2**32
    assert 2 * t * n > 2**32
    sizes = np.zeros(g, np.int32)
    sizes[[0, 1, g - 1]] = 3, t - 200, 190
    out = jgg.grouped_mm(x, w, sizes)
    for rows, group in (
        (slice(0, 3), 0),
        (slice(t - 210, t - 197), 1),
        (slice(t - 197, t - 7), g - 1),
    ):
        want = jnp.dot(x[rows], w[group], preferred_element_type=jnp.float32)
        oracle.assert_close(out[rows], want)
    assert not np.asarray(out[-7:]).any()


def test_existing_out_is_accumulated_in_place(rng):
    x, w = oracle.random(rng, (64, 32)), oracle.random(rng, (3, 32, 48))
    old = oracle.random(rng, (64, 48))
    want = oracle.f64(old) + oracle.grouped_mm(x, w, [20, 0, 30])
    f = jax.jit(
        lambda x, w, old: jgg.grouped_mm(x, w, jnp.array([20, 0, 30]), existing_out=old),
        donate_argnums=2,
    )
    assert "jgg_mm" in f.lower(x, w, old).as_text()
    address = old.unsafe_buffer_pointer()
    out = f(x, w, old)
    assert out.unsafe_buffer_pointer() == address
    assert old.is_deleted()
    oracle.assert_close(out, want)
    keep = oracle.random(rng, (64, 48))
    before = np.asarray(keep).copy()
    g = jax.jit(lambda x, w, old: jgg.grouped_mm(x, w, jnp.array([20, 0, 30]), existing_out=old))
    oracle.assert_close(g(x, w, keep), before + oracle.grouped_mm(x, w, [20, 0, 30]))
    np.testing.assert_array_equal(keep, before)


def test_existing_out_of_a_scan(rng):
    """XLA has the calls read and write slices of what is scanned: the result's memory is then not
    that of existing_out, whatever the call asks for."""
    x, w = oracle.random(rng, (5, 64, 24), "bfloat16"), oracle.random(rng, (3, 24, 40), "bfloat16")
    old, sizes = (
        oracle.random(rng, (5, 64, 40), "bfloat16"),
        [[20, 0, 30], [64, 0, 0]] * 2 + [[0] * 3],
    )
    step = lambda _, a: (None, jgg.grouped_mm(a[0], w, a[2], existing_out=a[1]))
    scanned = jax.jit(lambda *a: jax.lax.scan(step, None, a)[1])
    for dtype in ("bfloat16", "float32"):
        w = w.astype(dtype)
        operands = x.astype(dtype), old.astype(dtype), jnp.array(sizes)
        for got, rows, before, of in zip(scanned(*operands), *operands, strict=True):
            oracle.assert_close(got, oracle.f64(before) + oracle.grouped_mm(rows, w, of))


TWO_STREAMS = """
import sys
sys.path[:] = sys.argv[1].split(':')
import jax, jax.numpy as jnp, numpy as np, oracle
from device_runs import on_stream
import jax_groupgemm as jgg
rng = np.random.default_rng(0)
x, w = oracle.random(rng, (3000, 512), "bfloat16"), oracle.random(rng, (8, 512, 768), "bfloat16")
sizes = [jnp.asarray(oracle.random_sizes(rng, 8, 3000)) for _ in range(2)]

product = lambda x, w, s: jnp.tanh(jgg.grouped_mm(jgg.grouped_mm(x, w, s), w, s, transpose_w=True))
first, second = on_stream(1, product), on_stream(2, product)

@jax.jit
def two_streams(x, w, a, b):
    return first(x, w, a), second(x, w, b)

wants = [np.asarray(jax.jit(product)(x, w, s)) for s in sizes]
for _ in range(50):
    for got, want in zip(two_streams(x, w, *sizes), wants):
        np.testing.assert_array_equal(got, want)

# Few tiles, each of a long K: kernels that leave room for another, and time for its launch.
x, w = oracle.random(rng, (64, 2**16), "bfloat16"), oracle.random(rng, (2, 2**16, 64), "bfloat16")
sizes = jnp.array([30, 20]), jnp.array([40, 24])
wants = [np.asarray(jax.jit(product)(x, w, s)) for s in sizes]
jax.block_until_ready(two_streams(x, w, *sizes))
with jax.profiler.trace(sys.argv[2]):
    results = [jax.block_until_ready(two_streams(x, w, *sizes)) for _ in range(10)]
for result in results:
    for got, want in zip(result, wants):
        np.testing.assert_array_equal(got, want)
"""


def test_two_streams(tmp_path):
    """Calls that run at the same time, on two streams, give the bits that they give alone."""
    planes = profile_on_two_streams(tmp_path, TWO_STREAMS, "two_streams", 2)
    runs = kernel_runs(planes, "GemmSm")
    assert runs, "the profile has no run of our kernels: CUPTI recorded nothing"
    assert_overlap(runs)
