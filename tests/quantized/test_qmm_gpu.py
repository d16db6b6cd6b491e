"""What only a GPU can show of products with quantized weights: which kernels run, command buffers,
determinism, sizes beyond 16 and 32 bits."""

import collections
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
from handler_watch import CALLS, Watch, needs_compiler, watched
from qmm_problems import BYTE_SCALES, assert_values, every_scale_and_code
from test_graph_safety import CAPTURED, EAGER, SETTLED, same_bits
from thunks import custom_calls

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension

pytestmark = pytest.mark.gpu
HOPPER = 90 in extension.live_capabilities()
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

# Parts of names: the Hopper kernel with weights as they are stored and with prepacked ones, the
# kernel of few rows of weights as they are stored, and the one that takes everything.
LINEAR, PACKED, FEW, ANY = (
    "LinearWeights", "PackedWeights", "FewRowsSm80Kernel", "QuantizedGemmSm80Kernel",
)  # fmt: skip


def assert_ran(kernels, counts) -> None:
    """So many products, on a Hopper GPU."""
    found = collections.Counter(
        kind for name in kernels for kind in (LINEAR, PACKED, FEW, ANY) if kind in name
    )
    assert not HOPPER or found == collections.Counter(counts), kernels


def repeated(w, count: int):
    """``count`` times the same matrix."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), w)


# ---- values, by kernel -----------------------------------------------------------------------


@needs_hopper
@pytest.mark.parametrize("mode", BYTE_SCALES)
def test_every_scale_and_code(mode):
    """As in test_qmm.py. With weights as they are stored and prepacked, for rows that make every
    tile of the Hopper kernel, or few enough for kernels of their own; and in the largest tiles of
    the other kernel."""
    q = every_scale_and_code(mode, 320)
    units, most = jnp.eye(256, 320), 132  # times 256 rows and 256 columns: enough tiles

    def products(q, packed):
        x, found = units.astype(jnp.bfloat16), {}
        for rows in (8, 16, 32, 64, 256):
            sizes = jnp.full(256 // rows, rows)
            for name, w in (("stored", q), ("packed", packed)):
                many = repeated(w, 256 // rows)
                found[f"{name} {rows}"] = jgg.grouped_qmm(x, many, sizes, implementation="sm90")
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            x = jnp.tile(units.astype(dtype), (most, 1))
            out = jgg.quantized_matmul(x, q, implementation="sm80").reshape(most, 256, 256)
            found[f"first {x.dtype}"], found[f"last {x.dtype}"] = out[0], out[-1]
        return found

    found, kernels = run(jax.jit(products), q, jgg.prepack(q))
    assert_ran(kernels, {PACKED: 5, LINEAR: 5, ANY: 3})
    assert len(found) == 16
    for out in found.values():
        assert_values(out.T, oracle.dequantize(q, out.dtype))


@needs_hopper
@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [
        *((m, *of) for m, of in BYTE_SCALES.items()),
        *(("affine", b, 64) for b in (2, 3, 4, 5, 6, 8)),
    ],
)
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 4, 7, 8, 9, 0, 16, 17, 1, 25, 3, 0),  # 8 rows on average: warps multiply
        (1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 0),  # 18: tiles of 32 rows
        (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 0),  # 35: of 64 rows
    ],
    ids=("warps", "32", "64"),
)
def test_rows_of_a_tile(rng, mode, bits, group_size, sizes):
    """Of few rows no more are copied than a half or a quarter of a tile has. Also gated; and of K
    there are nine slices, or eighteen, so that lines are whole 16 bytes."""
    sizes = np.array(sizes)
    n, k = 384, 9 * (128 if bits in (3, 5) else 64)
    q = oracle.random_quantized(rng, (len(sizes), n, k), mode, bits, group_size, "bfloat16")
    x = oracle.random(rng, (sizes.sum(), k), "bfloat16")

    def products(x, *weights):
        same = {"preferred_element_type": "float32", "implementation": "sm90"}
        f = lambda w, **more: jgg.grouped_qmm(x, w, jnp.asarray(sizes), **same, **more)
        return [(f(w), f(w, activation="swiglu")) for w in weights]

    found, kernels = run(jax.jit(products), x, q, jgg.prepack(q))
    assert_ran(kernels, {LINEAR: 2, PACKED: 2})
    want = oracle.grouped_qmm(x, q, sizes)
    gate, value = np.split(want, 2, axis=1)
    for out, gated in found:
        oracle.assert_close(out, want, k=k)
        oracle.assert_close(gated, gate / (1 + np.exp(-gate)) * value, tolerance=1e-5)


@needs_hopper
@pytest.mark.parametrize(
    ("bits", "group_size"),
    [(2, 64), (3, 128), (4, 32), (4, 64), (4, 128), (5, 128), (6, 64), (8, 64)],
)
def test_affine_as_stored(rng, bits, group_size):
    """With more than 32 rows per matrix, in tiles of 64 rows and more; K not of whole 64s, too."""
    shape = 4, 200, 9 * group_size
    q = oracle.random_quantized(rng, shape, "affine", bits, group_size, "bfloat16")
    problems = [
        (oracle.random(rng, (4 * mean, shape[2]), "bfloat16"), np.array([2 * mean - 3, 0, mean, 1]))
        for mean in (40, 90, 200)
    ]
    f = jax.jit(lambda problems, q: [jgg.grouped_qmm(x, q, sizes) for x, sizes in problems])
    results, kernels = run(f, problems, q)
    assert_ran(kernels, {LINEAR: 3})
    for out, (x, sizes) in zip(results, problems, strict=True):
        oracle.assert_close(out, oracle.grouped_qmm(x, q, sizes), k=shape[2])
        assert not np.asarray(out)[sizes.sum() :].any()


@needs_hopper
@pytest.mark.parametrize(
    ("bits", "group_size"), [(2, 32), (2, 64), (3, 64), (3, 128), (4, 64), (4, 128), (5, 64)]
)
def test_affine_scales_of_any_size(rng, bits, group_size):
    """Ordinary in the first 16 rows, of any size in the next, by turns along k in the others: where
    warps multiply (up to 8 rows per matrix on average) up to 16 rows of x take a shorter way where
    all of a part are ordinary, to the same values."""
    n, k = 64, 4096
    groups = n, k // group_size
    ordinary = np.arange(n) < 16
    turns = np.arange(groups[1]) * group_size // 256 % 2 == 0
    ordinary = ordinary[:, None] | (np.arange(n) >= 32)[:, None] & turns
    exponent = np.where(ordinary, rng.integers(-9, 2, groups), rng.integers(-118, 98, groups))
    scale = 2.0**exponent * rng.choice([-1.5, -1, 1, 1.25], groups)
    bias = scale * 2.0 ** rng.integers(-4, 7, groups) * rng.choice([-1.75, -1, 1], groups)
    zero = ~ordinary & (rng.random((2, *groups)) < 0.2)
    zero[0] &= zero[1]
    scale, bias = (
        jnp.asarray(np.where(z, 0, v), "bfloat16") for z, v in zip(zero, (scale, bias), strict=True)
    )
    codes = rng.integers(0, 2**32, (n, k * bits // 32), dtype=np.uint32)
    q = jgg.Quantized(
        jnp.asarray(codes), scale, bias, mode="affine", bits=bits, group_size=group_size
    )
    sizes = np.array([8, 16, 5, 0, 27, 0, 0, 0])
    columns = rng.choice(k, sizes.sum(), replace=False)
    x = jnp.asarray(np.eye(k)[columns], "bfloat16")
    f = jax.jit(lambda x, w: jgg.grouped_qmm(x, w, jnp.asarray(sizes)))
    want = oracle.dequantize(q, jnp.bfloat16)[:, columns].T
    for w in (q, jgg.prepack(q)):
        out = oracle.f64(f(x, repeated(w, len(sizes))))
        tiny = abs(want) < 2.0**-126
        np.testing.assert_array_equal(out[~tiny], want[~tiny])
        assert (abs(out[tiny]) < 2.0**-126).all()


@pytest.mark.parametrize(
    ("mode", "bits", "group_size", "kernel"),
    [
        *((m, *of, "sm80") for m, of in BYTE_SCALES.items()),
        *(("affine", b, 32, "sm80") for b in (2, 3, 4, 5, 6, 8)),
        *(
            pytest.param(*of, "sm90", marks=needs_hopper)
            for of in (
                *((m, *of) for m, of in BYTE_SCALES.items()),
                *(("affine", b, g) for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)),
            )
        ),
    ],
)
def test_many_tiles_of_few_rows(rng, mode, bits, group_size, kernel):
    """Several for every thread block, which begins one while it ends another: of 1 to 9 steps of k;
    experts without rows, experts of others, rows that are zeros."""
    groups, n = 400, 264
    sizes = rng.integers(0, 11, groups)
    sizes[rng.integers(0, groups, 40)] = 0
    sizes[7], sizes[301] = 45, 17
    x = oracle.random(rng, (int(sizes.sum()) + 90, 2112), "bfloat16")
    with_offset = {"group_offset": jnp.int32(60)}
    same = {"preferred_element_type": "float32", "implementation": kernel}
    whole = group_size == 128 or bits in (3, 5)  # lines of whole 16 bytes
    for k in (128, 256, 768, 896, 2048) if whole else (64, 256, 768, 832, 2112):
        q = oracle.random_quantized(rng, (groups, n, k), mode, bits, group_size, "bfloat16")
        some = jax.tree.map(lambda leaf: leaf[60:-90], q)
        products = lambda x, q, some, s: (
            jgg.grouped_qmm(x, q, s, **same), jgg.grouped_qmm(x, some, s, **with_offset, **same)
        )  # fmt: skip
        found, kernels = run(jax.jit(products), x[:, :k], q, some, jnp.asarray(sizes))
        assert sum((FEW if kernel == "sm80" else LINEAR) in n for n in kernels) == 2, kernels
        for out, w, options in zip(found, (q, some), ({}, with_offset), strict=True):
            w = jgg.dequantize(w, "bfloat16").astype("float32")
            want = jgg.grouped_mm(
                x[:, :k].astype("float32"), w, jnp.asarray(sizes), transpose_w=True,
                precision="highest", **options,
            )  # fmt: skip
            oracle.assert_close(out, want, tolerance=1e-5)
            assert not np.asarray(out)[np.asarray(want == 0).all(1)].any()


# ---- every product, again and again ----------------------------------------------------------

FORMATS = {"nvfp4": ("nvfp4", 4, 16), "affine": ("affine", 4, 64)}
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
        # Of few pairs: those of many are scattered by XLA, in any order.
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
    """Of runs of the products, captured once: how many handlers are called, and whether their bits
    are those without capture. Operands stay where they are, as in test_graph_safety.replays."""
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
    one = lambda a: a * a.dtype.type(1)
    refill = jax.jit(lambda old, new: jax.tree.map(one, new), donate_argnums=0, keep_unused=True)
    held, found = jax.device_put(different[0]), []
    for i in [0] * SETTLED + 2 * list(range(1, len(different))):
        held = jax.block_until_ready(refill(held, different[i]))
        with watch.recorded() as calls:
            got = jax.device_get(captured(*fixed, held))
        handlers = sum(functions[CALLS] for functions in calls.values())
        found.append((handlers, same_bits(got, wants[i])))
    return found


@needs_compiler
def test_replays_with_other_sizes_and_indices():
    """XLA captures every call, and what it has captured runs again with sizes and indices that it
    has not seen, without a handler."""
    runs = watched("CUDA", replays)
    handlers, right = zip(*runs, strict=True)
    assert all(right), runs
    assert handlers[0] > 0, runs
    assert 0 in handlers[SETTLED:], runs


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
import test_qmm_gpu
test_qmm_gpu.on_two_streams(sys.argv[2])
"""


def test_two_streams(tmp_path):
    """As in test_gpu.py: on two streams products give the bits that they give alone."""
    planes = profile_on_two_streams(tmp_path, STREAMS, "two_streams", 3)
    found = [kernel_runs(planes, kind) for kind in ((LINEAR, PACKED) if HOPPER else (FEW, ANY))]
    assert all(found), "the profile has no run of a kernel"
    assert_overlap([run for runs in found for run in runs])


# ---- sizes beyond 16 and 32 bits -------------------------------------------------------------


def assert_rows_close(got, want) -> None:
    """Each row by itself: of so many, one would not be noticed."""
    distance, norm = (np.linalg.norm(a, axis=1) for a in (oracle.f64(got) - want, want))
    tolerance = {"bfloat16": 6e-3, "float32": 3e-6}[got.dtype.name]
    wrong = np.flatnonzero(~(distance <= tolerance * norm))
    assert not wrong.size, (wrong, distance[wrong], norm[wrong])


@pytest.mark.parametrize(
    ("dtype", "n", "kernel"),
    [("bfloat16", 64, PACKED), ("bfloat16", 72, LINEAR), ("float32", 40, ANY)],
)
def test_more_rows_than_a_grid_dimension(rng, dtype, n, kernel):
    """70 001 rows, most in one group, and as many pairs."""
    t, k, sizes = 70_001, 64, np.array([17, 65_537, 4_000])
    q = oracle.random_quantized(rng, (3, n, k), "nvfp4", scale=jnp.array([1, 0.5, 3], "float32"))
    x, y = oracle.random(rng, (t, k), dtype), oracle.random(rng, (t, n), dtype)
    matrix = rng.integers(-1, 4, t).astype(np.int32)

    def products(x, y, q, sizes, matrix):
        along_n = jgg.grouped_qmm(y, q, sizes, transpose_w=False)
        pairs = jgg.gather_qmm(x[:, None], q, None, matrix)[:, 0]
        return jgg.grouped_qmm(x, q, sizes), along_n, pairs

    (out, along_n, pairs), kernels = run(jax.jit(products), x, y, q, sizes, matrix)
    assert_ran(kernels, collections.Counter([kernel, kernel, ANY]))
    w = oracle.scaled(q, dtype)
    assert_rows_close(out, oracle.grouped_mm(x, w, sizes, transpose_w=True))
    assert_rows_close(along_n, oracle.grouped_mm(y, w, sizes))
    want, a = np.zeros((t, n)), oracle.f64(x)
    for g in range(3):
        want[matrix == g] = a[matrix == g] @ w[g].T
    assert_rows_close(pairs, want)


@pytest.mark.parametrize("mode", FORMATS)
def test_packed_weights_over_four_gib(mode):
    """The last matrix, which is unlike all others, begins beyond 2**32 bytes; one in the middle
    beyond 2**31."""
    groups, n = 130, 8192
    middle, dtype = groups // 2 + 1, jnp.bfloat16
    some = [jax.random.normal(jax.random.key(i), (n, n), dtype) for i in range(3)]
    usual, other, last = (jgg.quantize(a, mode=mode, contract=-1) for a in some)
    place = {0: 0, middle: 1, groups - 1: 2}  # of matrices that have rows

    @jax.jit
    def stack(*leaves):
        return jax.tree.map(lambda a, b, c: a.at[middle].set(b).at[-1].set(c), *leaves)

    w = stack(repeated(usual, groups), other, last)
    assert w.weight.nbytes * (groups - 1) // groups > 2**32
    assert w.weight.nbytes * middle // groups > 2**31
    packed = jgg.prepack(w)
    for g, q in zip(place, (usual, other, last), strict=True):
        for got, want in zip(*map(jax.tree.leaves, (packed, jgg.prepack(q))), strict=True):
            assert bool(jnp.array_equal(got[g], want))
    counts = {24: (3, 5, 9), 2000: (3, 90, 1900)}
    sizes = {rows: np.zeros(groups, np.int32) for rows in counts}
    for rows, own in counts.items():
        sizes[rows][list(place)] = own
    x = jax.random.normal(jax.random.key(3), (2000, n), dtype)

    def products(x, w, packed, sizes, matrix):
        found = {}
        for rows, s in sizes.items():
            a = x[:rows]
            found[f"{rows} stored"] = jgg.grouped_qmm(a, w, s)
            found[f"{rows} packed"] = jgg.grouped_qmm(a, packed, s)
            found[f"{rows} along N"] = jgg.grouped_qmm(a, w, s, transpose_w=False)
        pairs = [jgg.gather_qmm(x[:3, None], v, None, matrix)[:, 0] for v in (w, packed)]
        return found, pairs

    matrix = np.array([groups - 1, middle, 0], np.int32)
    (found, pairs), kernels = run(jax.jit(products), x, w, packed, sizes, matrix)
    assert_ran(kernels, {LINEAR: 3, PACKED: 3, ANY: 2})
    values = [jgg.dequantize(q, dtype) for q in (usual, other, last)]
    dot = lambda a, v: jnp.dot(a, v, preferred_element_type=jnp.float32)
    for name, out in found.items():
        rows, start = int(name.split()[0]), 0
        for v, count in zip(values, counts[rows], strict=True):
            part = slice(start, start + count)
            oracle.assert_close(out[part], dot(x[part], v if "along N" in name else v.T))
            start += count
        assert not np.asarray(out[start:]).any()
    for out in pairs:
        for i, v in enumerate(reversed(values)):
            oracle.assert_close(out[i], dot(x[i], v.T))
