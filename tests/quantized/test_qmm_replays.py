"""Every product with quantized weights again and again on a GPU: from command buffers with other
sizes and indices, its bits every time, on two streams."""

import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import (
    assert_overlap,
    compiled_with_streams,
    kernel_runs,
    on_stream,
    profile_on_two_streams,
    run,
)
from handler_watch import Watch, needs_compiler, watched
from qmm_problems import ANY, FEW, FORMATS, HOPPER, LINEAR, PACKED
from replays import CAPTURED, EAGER, assert_replayed, replayed, same_bits
from thunks import custom_calls

import jax_groupgemm as jgg

pytestmark = pytest.mark.gpu

# An odd number of slices of 64 k, so many that thread blocks share out the k of few rows. Of rows:
# few, some, many, and so many that weights are prepacked first.
GROUPS, N, K = 4, 192, 4160
ROWS = (20, 80, 800, 4096)
PAIRS = {"few": 7, "many": 40}  # not sorted by matrix, and sorted
BLOCKS = 5  # of x, that pairs name: several name the same one


def operands(rng):
    """x, and weights by format, as they are stored and prepacked."""
    x, weights = oracle.random(rng, (ROWS[-1], K), "bfloat16"), {}
    for name, (mode, bits, group) in FORMATS.items():
        scale = jnp.asarray(rng.uniform(0.5, 2, GROUPS), "float32") if mode == "nvfp4" else None
        q = oracle.random_quantized(rng, (GROUPS, N, K), mode, bits, group, "bfloat16", scale)
        weights[f"{name} linear"], weights[f"{name} sm90"] = q, jgg.prepack(q)
    assert all(w.layout in name for name, w in weights.items())
    return x, weights


def batches(rng):
    """Sizes for each number of rows, and indices of pairs. Sizes are any, all in one group, none,
    negative and more than there are rows; some indices do not exist."""
    found = []
    for special in (None, [0, 0, 1, 0], None, [0, 0, 0, 0], [-1, 0.5, 0.1, 2], None):
        if special is None:
            sizes = [oracle.random_sizes(rng, GROUPS, rows) for rows in ROWS]
        else:
            sizes = [(np.array(special) * rows).astype(np.int32) for rows in ROWS]
        pairs = {
            name: np.stack([rng.integers(0, most, count) for most in (BLOCKS, GROUPS)])
            for name, count in PAIRS.items()
        }
        for indices in pairs.values():
            indices[:, rng.permutation(5)[:2]] = [[BLOCKS, 0], [1, -1]]
        found.append((sizes, jax.tree.map(np.int32, pairs)))
    return found


def products(x, weights, batch):
    """Of every kernel, by name."""
    (sizes, pairs), found = batch, {}
    for name, w in weights.items():
        for rows, s in zip(ROWS, sizes, strict=True):
            found[f"{name} {rows}"] = jgg.grouped_qmm(x[:rows], w, s)
            if w.layout == "linear":
                back = jgg.grouped_qmm(x[:rows, :N], w, s, transpose_w=False)
                found[f"{name} {rows} along N"] = back
        if w.layout == "linear":  # which "sm90" has another kernel for
            few = x[: ROWS[0]], w, sizes[0]
            found[f"{name} few rows"] = jgg.grouped_qmm(*few, implementation="sm80")
        gather = lambda x, pairs, w=w: jgg.gather_qmm(x[:, None], w, *pairs)[:, 0]
        for which, indices in pairs.items():
            found[f"{name} {which}"] = gather(x[:BLOCKS], indices)
        # Few pairs: XLA scatters the gradients of many in any order.
        dx = jax.vjp(lambda x, gather=gather: gather(x, pairs["few"]), x[:BLOCKS])[1]
        (found[f"{name} dx"],) = dx(x[: PAIRS["few"], :N])
    return found


def assert_right(found, x, weights, batch) -> None:
    (sizes, pairs), wants = batch, {}
    a = oracle.f64(x)
    for name in FORMATS:
        w = oracle.scaled(weights[f"{name} linear"], "bfloat16")
        for rows, s in zip(ROWS, sizes, strict=True):
            wants[name, f"{rows}"] = oracle.grouped_mm(a[:rows], w, s, transpose_w=True)
            wants[name, f"{rows} along N"] = oracle.grouped_mm(a[:rows, :N], w, s)
        wants[name, "few rows"] = wants[name, f"{ROWS[0]}"]
        for which, (lhs, rhs) in pairs.items():
            wants[name, which] = out = np.zeros((len(lhs), N))
            dx = np.zeros((BLOCKS, K))
            for i, (p, q) in enumerate(zip(lhs, rhs, strict=True)):
                if 0 <= p < BLOCKS and 0 <= q < GROUPS:
                    out[i] = a[p] @ w[q].T
                    dx[p] += a[i, :N] @ w[q]
            if which == "few":
                wants[name, "dx"] = dx
    for name, got in found.items():
        mode, _, what = name.split(" ", 2)
        oracle.assert_close(got, wants[mode, what], k=K)


def replays(watch: Watch):
    """Runs of the products, captured once. Their bits should be those without capture."""
    rng = np.random.default_rng(0)
    fixed, different = jax.device_put(operands(rng)), batches(rng)
    lowered = jax.jit(products).lower(*fixed, different[0])
    eager = lowered.compile(compiler_options=EAGER)
    wants = [jax.device_get(eager(*fixed, batch)) for batch in different]
    for want, batch in zip(wants, different, strict=True):
        assert_right(want, *fixed, batch)
    with tempfile.TemporaryDirectory() as folder:
        captured = lowered.compile(compiler_options=CAPTURED | {"xla_dump_to": folder})
        inside, outside = custom_calls(Path(folder), "jit_products")
    targets = re.findall(r'custom_call_target="(jgg_\w+)"', str(captured.as_text()))
    assert len(inside) >= len(targets) >= len(wants[0])
    assert not outside
    assert not HOPPER or set(targets) == {"jgg_qmm", "jgg_qmm_packed", "jgg_prepack"}, targets
    return replayed(watch, lambda batch: captured(*fixed, batch), different, wants)


@needs_compiler
def test_replays_with_other_sizes_and_indices():
    """XLA captures every call, and what it has captured runs again with sizes and indices that it
    has not seen, without a handler."""
    assert_replayed(watched("CUDA", replays))


def test_same_bits_every_time(rng):
    """In 50 runs; by kernels of every kind."""
    fixed, batch = operands(rng), batches(rng)[0]
    f = jax.jit(products)
    first, kernels = run(f, *fixed, batch)
    assert_right(first, *fixed, batch)
    for kind in (LINEAR, PACKED, FEW, ANY):
        assert not HOPPER or any(kind in name for name in kernels), (kind, kernels)
    first = jax.device_get(first)
    for _ in range(50):
        assert same_bits(f(*fixed, batch), first)


def on_two_streams(profile: str) -> None:
    """Products at the same time as others, against the same ones alone."""

    def product(x, w, packed, sizes):
        y = jgg.grouped_qmm(x, w, sizes)
        matrix = jnp.arange(4, dtype=jnp.int32) * sizes[0] % w.shape[0]
        pairs = jgg.gather_qmm(x[:4, None], w, None, matrix)
        back = jgg.grouped_qmm(y, w, sizes, transpose_w=False)
        return jnp.concatenate([jgg.grouped_qmm(back, packed, sizes), pairs[:, 0]])

    first, second = on_stream(1, product), on_stream(2, product)

    @jax.jit
    def two_streams(x, w, packed, a, b):
        return first(x, w, packed, a), second(x, w, packed, b)

    def check(rng, rows, groups, n, k, mode, times):
        """Runs of both, alone and together."""
        q = oracle.random_quantized(rng, (groups, n, k), *FORMATS[mode], "bfloat16")
        x, packed = oracle.random(rng, (rows, k), "bfloat16"), jgg.prepack(q)
        sizes = [jnp.asarray(oracle.random_sizes(rng, groups, rows, empty=0)) for _ in range(2)]
        wants = [jax.device_get(jax.jit(product)(x, q, packed, s)) for s in sizes]
        assert all(np.isfinite(oracle.f64(want)).all() and want.any() for want in wants)
        both = compiled_with_streams(two_streams, x, q, packed, *sizes)
        jax.block_until_ready(both(x, q, packed, *sizes))

        def together():
            for _ in range(times):
                assert same_bits(both(x, q, packed, *sizes), wants)

        return together

    rng = np.random.default_rng(0)
    check(rng, 1000, 8, 768, 512, "affine", 50)()
    # Few tiles, each of a long K: kernels that leave room for another, and time for its launch.
    few = check(rng, 16, 2, 64, 2**16, "nvfp4", 10), check(rng, 64, 2, 64, 2**16, "nvfp4", 10)
    with jax.profiler.trace(profile):
        for together in few:
            together()


STREAMS = """
import sys
sys.path[:] = sys.argv[1].split(':')
import test_qmm_replays
test_qmm_replays.on_two_streams(sys.argv[2])
"""


def test_two_streams(tmp_path):
    """As in test_gpu.py: on two streams products give the bits that they give alone."""
    planes = profile_on_two_streams(tmp_path, STREAMS, "two_streams", 3)
    found = [kernel_runs(planes, kind) for kind in ((LINEAR, PACKED) if HOPPER else (FEW, ANY))]
    assert all(found), "the profile has no run of a kernel"
    assert_overlap([run for runs in found for run in runs])
