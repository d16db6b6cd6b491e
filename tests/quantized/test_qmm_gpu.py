"""What only a GPU can show of products with quantized weights: which kernels run, and sizes beyond
16 and 32 bits. The same products again and again: test_qmm_replays.py."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import run
from qmm_problems import (
    ANY,
    BYTE_SCALES,
    DIRECT,
    FEW,
    FORMATS,
    HOPPER,
    LINEAR,
    PACKED,
    TRANSPOSED,
    assert_values,
    every_scale_and_code,
)

import jax_groupgemm as jgg

pytestmark = pytest.mark.gpu
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def assert_ran(kernels, counts) -> None:
    """So many products, on a Hopper GPU."""
    found = collections.Counter(
        kind for name in kernels for kind in (LINEAR, PACKED, TRANSPOSED, FEW, ANY) if kind in name
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


EVERY_FORMAT = pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [
        ("fp8", 8, 128),
        *((m, *of) for m, of in BYTE_SCALES.items()),
        *(("affine", b, 64) for b in (2, 3, 4, 5, 6, 8)),
    ],
)


def of_whole_values(rng, shape, mode, bits, group_size):
    """A random weight whose values bfloat16 holds: fp8 scales are powers of two."""
    weight = oracle.random_quantized(rng, shape, mode, bits, group_size, "bfloat16")
    if mode != "fp8":
        return weight
    powers = np.ldexp(np.float32(1), np.frexp(np.asarray(weight.scales))[1])
    return dataclasses.replace(weight, scales=jnp.asarray(powers))


@needs_hopper
@EVERY_FORMAT
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
    n, k = 384, 9 * (128 if bits in (3, 5) or mode == "fp8" else 64)
    q = of_whole_values(rng, (len(sizes), n, k), mode, bits, group_size)
    x = oracle.random(rng, (sizes.sum(), k), "bfloat16")

    def products(x, *weights):
        same = {"preferred_element_type": "float32", "implementation": "sm90"}
        f = lambda w, **more: jgg.grouped_qmm(x, w, jnp.asarray(sizes), **same, **more)
        return [(f(w), f(w, activation="swiglu")) for w in weights]

    weights = {LINEAR: q, PACKED: jgg.prepack(q)}
    found, kernels = run(jax.jit(products), x, *weights.values())
    assert_ran(kernels, dict.fromkeys(weights, 2))
    want = oracle.grouped_qmm(x, q, sizes)
    gate, value = np.split(want, 2, axis=1)
    for out, gated in found:
        oracle.assert_close(out, want, k=k)
        oracle.assert_close(gated, gate / (1 + np.exp(-gate)) * value, tolerance=1e-5)


@needs_hopper
@EVERY_FORMAT
@pytest.mark.parametrize("slices", [3, 37])
def test_few_rows_in_all(rng, mode, bits, group_size, slices):
    """A step of a token or two has a kernel without tiles. Groups that are empty, have more rows
    than eight or than there are, and rows of none; and of one group, whose size nothing waits
    for."""
    n, k, groups = 384, (128 if mode == "fp8" else 64) * slices, 5
    weights = of_whole_values(rng, (groups, n, k), mode, bits, group_size)
    cases = {
        "some": (9, (0, 3, 0, 1, 2)), "many": (16, (2, 11, 0, 9, 1)), "last": (16, (0, 0, 0, 0, 1)),
        "none": (5, (0, 0, 0, 0, 0)), "one": (8, (8,)), "alone": (1, (1,)), "too many": (3, (70,)),
        "too few": (7, (2,)), "matrix": (40, (37,)), "wide": (90, (90,)),
    }  # fmt: skip
    plain, bias = {"preferred_element_type": "float32"}, oracle.random(rng, (groups, n))
    problems = {}
    for case, (rows, sizes) in cases.items():
        options = {
            "plain": plain,
            "scaled": plain | {"row_scale": oracle.random(rng, (rows,))},
            "gated": plain | {"activation": "swiglu_oai"},
            "rounded": {"activation": "silu"},
            "everything": plain | {"bias": bias[: len(sizes)], "activation": "geglu"},
        }
        if len(sizes) > 1:
            options["offset"] = plain | {"group_offset": jnp.int32(2)}
        x = oracle.random(rng, (rows, k), "bfloat16")
        problems |= {f"{case} {kind}": (x, sizes, more) for kind, more in options.items()}

    first = lambda w, n: jax.tree.map(lambda leaf: leaf[:n], w)

    def products(w, implementation):
        found = {}
        for name, (x, sizes, options) in problems.items():
            some = first(w, len(sizes))
            options = options | {"implementation": implementation}
            found[name] = jgg.grouped_qmm(x, some, jnp.array(sizes), **options)
        return found

    packed = jgg.prepack(weights)
    found, kernels = run(jax.jit(lambda w: products(w, "sm90")), packed)
    assert sum(DIRECT in name for name in kernels) == len(found), kernels
    want = jax.jit(lambda w: products(w, "reference"))(weights)
    for case, out in found.items():
        tolerance = 6e-3 if out.dtype.name == "bfloat16" else 2e-5
        norm = np.linalg.norm(oracle.f64(want[case]))
        difference = np.linalg.norm(oracle.f64(out) - oracle.f64(want[case]))
        assert difference <= tolerance * norm, (case, difference, norm)


@needs_hopper
@pytest.mark.parametrize("rows", [9, 24, 64, 96])
@pytest.mark.parametrize(("mode", "bits"), [("nvfp4", 4), ("mxfp8", 8), ("affine", 4)])
def test_rows_of_a_matrix(rng, mode, bits, rows):
    """Without tiles, in pairs of columns where there are many; and in tiles where k is short."""
    size = {"nvfp4": 16, "mxfp8": 32, "affine": 64}[mode]
    draw = lambda n, k: oracle.random_quantized(rng, (n, k), mode, bits, size, "bfloat16")
    for n, k, direct in ((2048, 4096, True), (320, 448, True), (8192, 1024, rows <= 32)):
        w = draw(n, k)
        x = oracle.random(rng, (rows, k), "bfloat16")
        out, kernels = run(jax.jit(jgg.quantized_matmul), x, jgg.prepack(w))
        assert any(DIRECT in name for name in kernels) == direct, (n, k, kernels)
        want = oracle.f64(x) @ oracle.f64(jgg.dequantize(w, "float32")).T
        oracle.assert_close(out, want, k=k)


@needs_hopper
@pytest.mark.parametrize(("n", "direct"), [(1024, True), (2048, False)])
def test_few_rows_of_large_weights_are_multiplied_in_tiles(rng, n, direct):
    w = jgg.prepack(oracle.random_quantized(rng, (8, n, 2048), "nvfp4", 4, 16, "bfloat16"))
    x = oracle.random(rng, (8, 2048), "bfloat16")
    _, kernels = run(jax.jit(jgg.grouped_qmm), x, w, jnp.ones(8, jnp.int32))
    assert any(DIRECT in name for name in kernels) == direct, kernels


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


@needs_hopper
@pytest.mark.parametrize("n", [1152, 1280])
def test_tiles_of_sixteen_rows(rng, n):
    """Columns of both halves in one tile, plain and gated: halves that are no whole tiles, matrices
    without rows, with more than a tile has, and of others; zeros behind the last."""
    groups = 128
    sizes = rng.integers(0, 9, groups)
    sizes[::40] = 0
    sizes[7], sizes[101] = 45, 17
    x = oracle.random(rng, (int(sizes.sum()) + 50, 320), "bfloat16")

    def products(x, q, some, sizes):
        f = functools.partial(jgg.grouped_qmm, x, preferred_element_type="float32")
        of_some = f(some, sizes, group_offset=jnp.int32(20))
        return f(q, sizes), of_some, f(q, sizes, activation="swiglu")

    for k in (64, 320):
        q = oracle.random_quantized(rng, (groups, n, k), "nvfp4", 4, 16, "bfloat16")
        some = jax.tree.map(lambda leaf: leaf[20:-10], q)
        packed = [jgg.prepack(w, strict=True) for w in (q, some)]
        found, kernels = run(jax.jit(products), x[:, :k], *packed, jnp.asarray(sizes))
        assert sum("Rows16Sm90" in name for name in kernels) == 3, kernels
        want = oracle.grouped_qmm(x[:, :k], q, sizes)
        of_some = oracle.grouped_qmm(x[:, :k], some, sizes, offset=20)
        gate, value = np.split(want, 2, axis=1)
        oracle.assert_close(found[0], want, k=k)
        oracle.assert_close(found[1], of_some, k=k)
        oracle.assert_close(found[2], gate / (1 + np.exp(-gate)) * value, tolerance=1e-5)


# ---- sizes beyond 16 and 32 bits -------------------------------------------------------------


def assert_rows_close(got, want) -> None:
    """Each row by itself: of so many, one would not be noticed."""
    distance, norm = (np.linalg.norm(a, axis=1) for a in (oracle.f64(got) - want, want))
    tolerance = {"bfloat16": 6e-3, "float32": 3e-6}[got.dtype.name]
    wrong = np.flatnonzero(~(distance <= tolerance * norm))
    assert not wrong.size, (wrong, distance[wrong], norm[wrong])


@pytest.mark.parametrize(
    ("dtype", "n", "kernel"),
    [("bfloat16", 64, PACKED), ("bfloat16", 72, LINEAR), ("float32", 40, LINEAR)],
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
    assert_ran(kernels, {kernel: 2, TRANSPOSED: 1})
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
    assert_ran(kernels, {LINEAR: 3, PACKED: 3, TRANSPOSED: 2})
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
