"""A small set of cases for compute-sanitizer, through every tile and operand layout of the kernels:

compute-sanitizer --tool TOOL python tests/lib/sanitize.py [PART ...]

TOOL is memcheck, racecheck, initcheck or synccheck. PART is the beginning of a part's name, such as
``quantized`` or ``quantized_nvfp4``.

racecheck reports the rings of the Hopper kernels, presumably since one lane of a warp arrives at
their barriers for all. For builds in which every lane does:

CUDAFLAGS=-DJGG_EVERY_LANE_ARRIVES JGG_CUDA=ON pip install .
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import sanitized_layers as layers

import jax_groupgemm as jgg
from jax_groupgemm._core import segments
from jax_groupgemm._core.products import Mm
from jax_groupgemm._fp8 import convert
from jax_groupgemm._grouped import fused
from jax_groupgemm._kernels import extension, tuned

# rows, K, N, group sizes: of the three tile sizes, aligned for wide copies or for none
GROUPED = (
    (129, 33, 65, [0, 1, 127]),
    (64, 16, 64, [64, 0, 0]),
    (7, 1, 1, [9]),
    (40, 72, 136, [3, 0, 9, 0, 12, 1]),
    (700, 40, 136, [0, 383, 260]),
)


def grouped(rng, dtype, precision):
    for t, k, n, sizes in GROUPED:
        for transpose_w in (False, True):
            x, w = oracle.random(rng, (t, k), dtype), oracle.random(rng, (len(sizes), k, n), dtype)
            stored = w.swapaxes(1, 2) if transpose_w else w
            f = lambda x, w, s, t=transpose_w: jgg.grouped_mm(
                x, w, s, transpose_w=t, precision=precision
            )
            # Sizes are operands: initcheck does not see a program's constants being loaded.
            given = jnp.array(sizes)
            out, vjp = jax.jit(lambda x, w, s, f=f: jax.vjp(lambda x, w: f(x, w, s), x, w))(
                x, stored, given
            )
            if precision is None:
                oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))
            jax.block_until_ready(jax.jit(lambda vjp, out: vjp(out))(vjp, out))
    t, k, n, sizes = GROUPED[3]
    x, w = oracle.random(rng, (t, k), dtype), oracle.random(rng, (len(sizes), k, n), dtype)
    for activation in ("silu", "swiglu"):
        old = oracle.random(rng, (t, n // 2 if activation == "swiglu" else n), dtype)
        bias, scale = oracle.random(rng, (len(sizes), n), dtype), oracle.random(rng, (t,), dtype)
        fused = jax.jit(
            lambda x, w, g, b, s, old, a=activation: jgg.grouped_mm(
                x, w, g, bias=b, row_scale=s, existing_out=old, activation=a
            )
        )
        assert np.isfinite(oracle.f64(fused(x, w, jnp.array(sizes), bias, scale, old))).all()


def segmented(rng, dtype, precision):
    for m, k in ((37, 100), (136, 328)):
        a = oracle.random(rng, (m, k), dtype)
        segments = jnp.array([[0, 40], [30, 71], [99, 100], [50, 20], [-3, 2 * k]])
        f = lambda a, s: jgg.segmented_mm(a, a.T, s, precision=precision)
        out, vjp = jax.jit(lambda a, s, f=f: jax.vjp(lambda a: f(a, s), a))(a, segments)
        if precision is None:
            oracle.assert_close(out, oracle.segmented_mm(a, a.T, segments))
        jax.block_until_ready(jax.jit(lambda vjp, out: vjp(out))(vjp, out))


def hopper(rng, dtype, implementation=None):
    """Tiles of 32 to 256 rows of the Hopper kernel, by its rule; cuts at every residue of 16."""
    for mean in (8, 30, 70, 130, 300):
        sizes = np.array([0, 1, mean, 0, 2 * mean - 1, 129, 0])
        x = oracle.random(rng, (int(sizes.sum()) + 9, 72), dtype)
        w = oracle.random(rng, (len(sizes), 72, 136), dtype)
        product = lambda x, w, s: jgg.grouped_mm(x, w, s, implementation=implementation)
        forward = lambda x, w, s, f=product: jax.vjp(lambda x, w: f(x, w, s), x, w)
        out, vjp = jax.jit(forward)(x, w, jnp.array(sizes))
        oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))
        jax.block_until_ready(jax.jit(lambda vjp, out: vjp(out))(vjp, out))
    cuts = np.append(0, np.cumsum(np.arange(1, 18)))
    spans = np.stack([cuts[:-1], cuts[1:]], 1).astype(np.int32)
    a, b = oracle.random(rng, (136, 160), dtype), oracle.random(rng, (160, 264), dtype)
    for transpose_a in (False, True):
        f = jax.jit(
            lambda a, b, s, t=transpose_a: jgg.segmented_mm(
                a, b, s, transpose_a=t, implementation=implementation
            )
        )
        out = f(a.T if transpose_a else a, b, spans)
        oracle.assert_close(out, oracle.segmented_mm(a, b, spans))


def tails(rng, dtype):
    """Every tile of the Hopper kernel with every number of rows from 1 to 129 as a group's last
    ones; tiles of 288 rows by its own rule, and those of gated activations."""
    sizes = np.arange(1, 130)
    x = oracle.random(rng, (int(sizes.sum()), 24), dtype)
    w = oracle.random(rng, (len(sizes), 24, 40), dtype)
    ct = oracle.random(rng, (len(x), 40), dtype)
    want, (dx, dw) = oracle.grouped_mm(x, w, sizes), oracle.grouped_mm_grads(x, w, sizes, ct)
    for tile in tuned.TILES:

        def step(x, w, s, ct):  # one of its own for every tile: what is compiled stays as it is
            out, vjp = jax.vjp(lambda x, w: jgg.grouped_mm(x, w, s), x, w)
            return out, *vjp(ct)

        with tuned.forced(tile):
            got = jax.jit(step)(x, w, jnp.array(sizes), ct)
        for value, exact in zip(got, (want, dx, dw), strict=True):
            oracle.assert_close(value, exact)
    sizes = np.array([288, 0, 577, 1, 454])  # 264 on average
    x, w = oracle.random(rng, (1325, 72), dtype), oracle.random(rng, (len(sizes), 72, 136), dtype)
    for transpose_w in (False, True):
        f = functools.partial(jgg.grouped_mm, transpose_w=transpose_w)
        out = jax.jit(f)(x, w.swapaxes(1, 2) if transpose_w else w, jnp.array(sizes))
        oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))
    for mean in (8, 130):
        gated(rng, dtype, np.array([0, 1, mean, 0, 2 * mean - 1, 3 * mean]))


def gated(rng, dtype, sizes):
    """A gated epilogue; both halves of w's 144 columns begin at whole 16 bytes."""
    x = oracle.random(rng, (int(sizes.sum()) + 5, 72), dtype)
    w = oracle.random(rng, (len(sizes), 72, 144), dtype) / 8
    bias, scale = oracle.random(rng, (len(sizes), 144), dtype), oracle.random(rng, (len(x),), dtype)
    old = oracle.random(rng, (len(x), 72), dtype)
    want = oracle.grouped_mm(x, w, sizes)
    for g, (first, last) in enumerate(oracle.bounds(sizes, len(x))):
        want[first:last] += oracle.f64(bias)[g]
    gate, up = np.split(want, 2, axis=1)
    want = oracle.f64(scale)[:, None] * (gate / (1 + np.exp(-gate))) * up
    for transpose_w in (False, True):
        f = lambda x, w, s, b, r, old, t=transpose_w: jgg.grouped_mm(
            x, w, s, bias=b, row_scale=r, existing_out=old, activation="swiglu", transpose_w=t
        )
        stored = w.swapaxes(1, 2) if transpose_w else w
        out = jax.jit(f)(x, stored, jnp.array(sizes), bias, scale, old)
        oracle.assert_close(out, want + oracle.f64(old))


def many_tiles(rng, dtype):
    """More than there are clusters: a tile's last rows are stored while the next is multiplied."""
    sizes = np.full(90, 256)
    sizes[::7] = 9
    x = oracle.random(rng, (int(sizes.sum()), 72), dtype)
    w = oracle.random(rng, (len(sizes), 72, 136), dtype)
    f = lambda x, w, s: jgg.grouped_mm(x, w, s, implementation="sm90")
    with tuned.forced(256):
        out = jax.jit(f)(x, w, jnp.array(sizes))
    oracle.assert_close(out, oracle.grouped_mm(x, w, sizes))
    a, sizes = oracle.random(rng, (264 * 80, 136), dtype), np.full(264, 80)
    gradient = lambda a, s: jax.vjp(
        lambda w: jgg.grouped_mm(a, w, s, implementation="sm90"), jnp.zeros((264, 136, 136), dtype)
    )[1](a)[0]
    got = jax.jit(gradient)(a, jnp.array(sizes))
    groups = oracle.f64(a).reshape(264, 80, 136)
    oracle.assert_close(got, groups.swapaxes(1, 2) @ groups)
    # Clusters share out matrices by what they have had to do.
    some = np.array([0, 130, 3, 0, 65, 64, 1, 90, 0])
    wide = oracle.random(rng, (int(some.sum()), 1032), dtype)
    gradient = lambda a, s: jax.vjp(
        lambda w: jgg.grouped_mm(a, w, s, implementation="sm90"),
        jnp.zeros((len(some), 1032, 1032), dtype),
    )[1](a)[0]
    got = jax.jit(gradient)(wide, jnp.array(some))
    ends = np.cumsum(some)
    parts = [oracle.f64(wide[i:j]) for i, j in zip(ends - some, ends, strict=True)]
    oracle.assert_close(got, np.stack([part.T @ part for part in parts]))
    # Matrices are put in order.
    b = oracle.random(rng, (len(a), 264), dtype)
    f = jax.jit(lambda a, b, s: jgg.segmented_mm(a.T, b, s, implementation="sm90"))
    spans = np.stack([np.arange(40) * 90, np.arange(40) * 91], 1)
    one_long = spans.copy()
    one_long[7] = 3, 2000
    for given in (spans, one_long):  # whose tiles are halved
        out = f(a, b, jnp.asarray(given, jnp.int32))
        oracle.assert_close(out, oracle.segmented_mm(a.T, b, given), k=2000)
    # float32 results, added to what is there.
    old = oracle.random(rng, (264, 136, 136))

    def twice(a, s, old):
        q = jgg.nvfp4_quantize(a, axis=0, group_sizes=s)
        wgrad = functools.partial(jgg.nvfp4_grouped_wgrad, q, q, s, implementation="sm90")
        return wgrad(), wgrad(existing_out=old)

    out, added = jax.jit(twice)(a, jnp.array(sizes), old)
    oracle.assert_close(added, oracle.f64(out) + oracle.f64(old), tolerance=1e-6)


def gathered(rng, dtype):
    """Lists of rows, out of range here and there, through every tile; both layouts of w."""
    for mean in (8, 70, 150):
        sizes = np.array([0, 1, mean, 0, 2 * mean - 1, 129 if mean > 8 else 0, 0])
        count = int(sizes.sum()) + 9
        x = oracle.random(rng, (50, 1, 72), dtype)
        w = oracle.random(rng, (len(sizes), 72, 136), dtype)
        index, to = rng.integers(-1, 51, count), rng.permutation(count)
        there = (index >= 0) & (index < 50)
        rows = np.where(there[:, None], oracle.f64(x)[np.clip(index, 0, 49), 0], 0)
        want = np.zeros((count, 1, 136))
        want[to, 0] = oracle.grouped_mm(rows, w, sizes)
        for transpose_w in (False, True):
            product = Mm(
                rows=count, out_dtype=x.dtype, transpose_w=transpose_w, implementation="sm90"
            )
            f = lambda x, w, s, i, j, product=product: fused.MM(
                x, w, segments.sizes(s), product, lists=fused.Lists(i, j)
            )
            stored = w.swapaxes(1, 2) if transpose_w else w
            given = (jnp.asarray(v, jnp.int32) for v in (sizes, index, to))
            oracle.assert_close(jax.jit(f)(x, stored, *given), want)


QUANTIZED = (
    ("nvfp4", None, None), ("mxfp4", None, None), ("mxfp8", None, None), ("affine", 4, 32),
    ("affine", 4, 128), ("affine", 8, 64), ("affine", 3, 64), ("affine", 2, 64), ("affine", 5, 128),
    ("affine", 6, 32),
)  # fmt: skip


def quantized(rng, which):
    """Both layouts of weights, along K and along N, tiles of few and of many rows, parts of k; and
    what else a product may have."""
    mode, bits, group_size = which
    quantize = functools.partial(
        jgg.quantize, mode=mode, bits=bits, group_size=group_size, contract=-1
    )
    for k, sizes in (
        (256, [5, 0, 9]),
        (256, [64, 1, 24]),
        (256, [0, 200, 130]),
        (4224, [2, 0, 17]),
    ):
        x = oracle.random(rng, (sum(sizes) + 3, k), "bfloat16")
        for shape, transpose_w in (((3, 192, k), True), ((3, k, 128), False)):
            q = quantize(oracle.random(rng, shape, "bfloat16"))
            want = jgg.dequantize(q, jnp.bfloat16)
            want = want.swapaxes(1, 2) if transpose_w else want
            for weight in (q, jgg.prepack(q)):
                f = lambda x, w, s, t=transpose_w: jgg.grouped_qmm(x, w, s, transpose_w=t)
                out = jax.jit(f)(x, weight, jnp.array(sizes))
                oracle.assert_close(out, oracle.grouped_mm(x, want, sizes))
    more_of_quantized(rng, quantize(oracle.random(rng, (3, 192, 256), "bfloat16")))


DIRECTIONS = (
    ("fp8", 8, 128), ("affine", 4, 64), ("affine", 5, 64), ("affine", 8, 32), ("nvfp4", 4, 16),
    ("mxfp4", 4, 32), ("mxfp8", 8, 32),
)  # fmt: skip
# Few rows and many; rows of no group, stages that are part empty, and groups of several tiles.
MEETINGS = [5, 0, 9, 17], [64, 1, 0, 24], [0, 200, 130, 33]


def directions(rng, which, dtype):
    """x @ W^T and x @ W with weights as they are stored and prepacked. float32 rows meet scales of
    16 bits."""
    mode, bits, group = which
    scales = "bfloat16" if dtype == "float32" else dtype
    q = oracle.random_quantized(rng, (4, 192, 384), mode, bits, group, scales)
    w = oracle.f64(jgg.dequantize(q, "float32" if mode == "fp8" else dtype))
    for sizes in MEETINGS:
        for weight in (q, jgg.prepack(q)):
            for transpose_w in (True, False):
                width = 384 if transpose_w else 192
                x = oracle.random(rng, (sum(sizes) + 3, width), dtype)
                f = lambda x, w, s, t=transpose_w: jgg.grouped_qmm(x, w, s, transpose_w=t)
                out = jax.jit(f)(x, weight, jnp.array(sizes))
                want = oracle.grouped_mm(x, w.swapaxes(1, 2) if transpose_w else w, sizes)
                oracle.assert_close(out, want, tolerance=1e-5 if dtype == "float32" else 1e-2)
            gated = lambda x, w, s: jgg.grouped_qmm(x, w, s, activation="swiglu")
            x = oracle.random(rng, (sum(sizes), 384), dtype)
            jax.block_until_ready(jax.jit(gated)(x, weight, jnp.array(sizes)))


def more_of_quantized(rng, q):
    """Other dtypes, rows by index, an epilogue, groups of which w has some."""
    sizes, given = [5, 0, 40], jnp.array([5, 0, 40])
    x = oracle.random(rng, (50, 256))
    for dtype in ("float32", "float16"):
        rows = (x / 16).astype(dtype)
        want = oracle.f64(jgg.dequantize(q, dtype)).swapaxes(1, 2)
        out = jax.jit(jgg.grouped_qmm)(rows, q, given)
        oracle.assert_close(out, oracle.grouped_mm(rows, want, sizes))
    rows, want = x.astype("bfloat16"), oracle.f64(jgg.dequantize(q, "bfloat16")).swapaxes(1, 2)
    lhs, rhs = rng.integers(-1, 51, 12), rng.integers(-1, 4, 12)
    out = jax.jit(jgg.gather_qmm)(rows[:, None], q, jnp.array(lhs), jnp.array(rhs))
    oracle.assert_close(out, oracle.gather_mm(rows[:, None], want, lhs, rhs))
    bias, scale = oracle.random(rng, (3, 192), "bfloat16"), oracle.random(rng, (50,))
    fused = lambda x, q, s, b, r: jgg.grouped_qmm(x, q, s, bias=b, row_scale=r, activation="swiglu")
    assert np.isfinite(oracle.f64(jax.jit(fused)(rows, q, given, bias, scale))).all()
    of_some = lambda x, q, s, offset: jgg.grouped_qmm(x, q, s, group_offset=offset)
    more = [7, *sizes, 2]
    for weight in (q, jgg.prepack(q)):
        out = jax.jit(of_some)(rows, weight, jnp.array(more), jnp.int32(1))
        oracle.assert_close(out, oracle.grouped_mm(rows, want, more, offset=1))


def conversions(rng):
    """quantize and dequantize: every width, half a unit, tails of warps, a global scale per row."""
    for dtype in ("float32", "bfloat16", "float16"):
        w = oracle.random(rng, (37, 7 * 128), dtype)
        for bits in (2, 3, 4, 5, 6, 8):
            converted(w, bits=bits, group_size=128)
        for mode in ("mxfp4", "mxfp8"):
            converted(w, mode=mode)
        odd = w[:, : 7 * 16]
        converted(odd, mode="nvfp4")
        converted(odd, mode="nvfp4", global_scale=jnp.full((37,), 0.01))
    for mode, bits, group_size in QUANTIZED:
        q = jgg.quantize(oracle.random(rng, (192, 640), "bfloat16"), mode=mode, bits=bits,
                         group_size=group_size)  # fmt: skip
        np.testing.assert_array_equal(jgg.dequantize(jgg.prepack(q)), jgg.dequantize(q))
    jax.block_until_ready(jax.jit(jgg.prepack)(oracle.random_quantized(rng, (192, 640), "fp8")))


def converted(w, **options):
    round_trip = lambda w, **options: jgg.dequantize(jgg.quantize(w, **options, contract=-1))
    out = jax.jit(round_trip, static_argnames=("mode", "bits", "group_size"))(w, **options)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = round_trip(jax.device_get(w), **jax.device_get(options))
    np.testing.assert_array_equal(out, want)


def nvfp4(rng):
    """nvfp4_quantize along both axes, with each of its options; a step of the linear layer, and its
    products, which are large enough for the Hopper kernels."""
    sizes = np.array([0, 1, 17, 33, 0, 16, 5])
    x = oracle.random(rng, (int(sizes.sum()), 80), "bfloat16")
    given = jnp.array(sizes)
    key = jax.random.key(1)
    for options in ({}, {"hadamard": True}, {"stochastic_rounding_key": key}):
        columns = lambda x, s, o=options: jgg.nvfp4_quantize(x, axis=-2, group_sizes=s, **o)
        rows = lambda x, o=options: jgg.nvfp4_quantize(x, **o)
        jax.block_until_ready((jax.jit(columns)(x, given), jax.jit(rows)(x)))
    # Several spans; columns at their edge, and read one by one.
    for shape, dtype in (
        ((3, 192, 264), "bfloat16"),
        ((2, 80, 131), "float16"),
        ((96, 33), "float32"),
    ):
        some = oracle.random(rng, shape, dtype)
        for options in ({}, {"hadamard": True, "stochastic_rounding_key": key}):
            columns = lambda x, o=options: jgg.nvfp4_quantize(x, axis=-2, **o)
            jax.block_until_ready(jax.jit(columns)(some))
    swizzled = lambda x, s: jgg.nvfp4_quantize(x, group_sizes=s, layout="swizzled")
    q, linear = jax.jit(swizzled)(x, given), jax.jit(jgg.nvfp4_quantize)(x)
    np.testing.assert_array_equal(jgg.dequantize(q), jgg.dequantize(linear))
    w = oracle.random(rng, (len(sizes), 48, 80), "bfloat16")
    for axis in (-1, -2):
        f = lambda w, axis=axis: jgg.nvfp4_quantize(w, axis=axis, scale_2d=True)
        jax.block_until_ready(jax.jit(f)(w))
    x, w = oracle.random(rng, (len(x) + 9, 128), "bfloat16"), oracle.random(rng, (7, 192, 128))
    layer = lambda x, w, s: jgg.nvfp4_grouped_linear(x, w, s, key=key)
    loss = lambda x, w, s: jnp.sum(jnp.square(layer(x, w, s).astype(jnp.float32)))
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w, given)
    assert all(np.isfinite(oracle.f64(g)).all() for g in gradients)
    # Weights as they are stored, prepacked, and, where rows are many, repacked.
    f = functools.partial(jgg.nvfp4_grouped_mm, preferred_element_type="float32")
    scales, bias = np.array([2, 0.5], "float32"), oracle.random(rng, (2, 64))
    for k, sizes in (
        (64, [3, 9]),
        (64, [60, 1]),
        (64, [1400, 660]),
        (256, [3, 9]),
        (256, [70, 33]),
    ):
        w = oracle.random_quantized(rng, (2, 64, k), "nvfp4", scale=jnp.asarray(scales))
        want = oracle.dequantize(w).swapaxes(1, 2) * scales[:, None, None]
        x = oracle.random_quantized(rng, (sum(sizes) + 5, k), "nvfp4")
        for weight in (w, jgg.prepack(w)):
            out = np.array(jax.jit(f)(x, weight, jnp.array(sizes), bias=bias))
            for g, (first, last) in enumerate(oracle.bounds(sizes, len(out))):
                out[first:last] -= np.asarray(bias[g])
            oracle.assert_close(
                out, oracle.grouped_mm(oracle.dequantize(x), want, sizes), tolerance=1e-5
            )


def every_dtype(part, f):
    """Parts of their own, each of which can be a process: the tools rewrite what it loads."""
    of = {"float32": ("float32", None), "tensorfloat32": ("float32", "tensorfloat32")}
    of |= {dtype: (dtype, None) for dtype in ("bfloat16", "float16")}
    return {
        f"{part}_{name}": functools.partial(f, dtype=dtype, precision=precision)
        for name, (dtype, precision) in of.items()
    }


def on_hopper(f):
    def run(rng, **kw):
        if 90 not in extension.live_capabilities():
            return "needs a Hopper GPU"
        return f(rng, **kw)

    return run


def fp8_quantize(rng):
    """Along both axes, of groups and of squares, at the edges of tiles."""
    sizes, key = jnp.array([0, 1, 130, 33, 0, 128, 5]), jax.random.key(1)
    for shape, dtype in (((304, 200), "bfloat16"), ((320, 72), "float16"), ((304, 136), "float32")):
        x = oracle.random(rng, shape, dtype)
        for options in ({}, {"format": "e5m2", "stochastic_rounding_key": key}):
            for axis in (-1, -2):
                f = functools.partial(jgg.fp8_quantize, axis=axis, **options)
                squares = functools.partial(f, block=(128, 128))
                jax.block_until_ready((jax.jit(f)(x), jax.jit(squares)(jnp.stack([x, x]))))
                jax.block_until_ready(jax.jit(lambda x, s, f=f: f(x, group_sizes=s))(x, sizes))
        both = functools.partial(convert.quantized_both, "fp8_quantize", block=(128, 128), axis=-1)
        for columns in (16, x.shape[1] // 16 * 16):
            if dtype == "bfloat16":
                jax.block_until_ready(jax.jit(convert.quantized_lines)(x[:, :columns], sizes))
            q, _ = jax.jit(both)(jnp.stack([x, x])[..., :columns])
            jax.block_until_ready(jax.jit(functools.partial(jgg.dequantize, dtype=dtype))(q))


PARTS = {
    **every_dtype("grouped", grouped),
    **every_dtype("segmented", segmented),
    "hopper_bfloat16": functools.partial(hopper, dtype="bfloat16"),
    "hopper_float16": functools.partial(hopper, dtype="float16"),
    "hopper_float32": functools.partial(on_hopper(hopper), dtype="float32", implementation="sm90"),
    "tails_bfloat16": functools.partial(on_hopper(tails), dtype="bfloat16"),
    "tails_float16": functools.partial(on_hopper(tails), dtype="float16"),
    "gathered_bfloat16": functools.partial(on_hopper(gathered), dtype="bfloat16"),
    "gathered_float16": functools.partial(on_hopper(gathered), dtype="float16"),
    "many_tiles_bfloat16": functools.partial(on_hopper(many_tiles), dtype="bfloat16"),
    "many_tiles_float16": functools.partial(on_hopper(many_tiles), dtype="float16"),
    **{
        "_".join(map(str, filter(None, ("quantized", *which)))): functools.partial(
            quantized, which=which
        )
        for which in QUANTIZED
    },
    **{
        "_".join(map(str, ("directions", *which, dtype))): functools.partial(
            on_hopper(directions), which=which, dtype=dtype
        )
        for dtype in ("bfloat16", "float16", "float32")
        for which in DIRECTIONS
    },
    "conversions": conversions,
    "nvfp4": nvfp4,
    "fp8_quantize": fp8_quantize,
    "router": layers.router,
    "few_tokens_router": on_hopper(layers.few_tokens_router),
    "experts": layers.experts,
    "fp8_experts": on_hopper(layers.fp8_experts),
    "fp8_rows": on_hopper(layers.fp8_rows),
    "few_tokens": on_hopper(layers.few_tokens),
    "few_dense": layers.few_dense,
    "some_tokens": on_hopper(layers.some_tokens),
    "fp8_tensors": on_hopper(layers.fp8_tensors),
    "packed_sm80": on_hopper(layers.packed_sm80),
    "lora": layers.lora,
    "fp8_weights": on_hopper(layers.fp8_weights),
    "adapters": layers.adapters,
}


def main():
    wanted = sys.argv[1:] or [""]
    for name in wanted:
        if not any(part.startswith(name) for part in PARTS):
            raise SystemExit(f"no part begins with {name!r}; there are {', '.join(PARTS)}")
    for part in PARTS:
        if not part.startswith(tuple(wanted)):
            continue
        said = PARTS[part](np.random.default_rng(0))
        print(f"sanitize: {part} {said or 'right'}", flush=True)


if __name__ == "__main__":
    main()
