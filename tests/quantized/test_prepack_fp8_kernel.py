"""The CUDA kernel of ``prepack`` of mode "fp8": run on the host lane by lane, against its
definition; where it is called, also by products; and on a GPU what it makes, byte for byte."""

import ctypes
import dataclasses
import functools

import host_program
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from host_memory import GUARD, aligned, copied, guarded
from host_program import pointer
from qmm_problems import needs
from test_prepack_call import live, names
from test_prepack_fp8 import BLOCKS, made, raw, weight
from test_quantize_call import calls, lowered, on_cpu, same_bytes

import jax_groupgemm as jgg
from jax_groupgemm._fp8 import blocks, prepack

CALLS = ["jgg_prepack_fp8", "jgg_qmm_packed"]
CALLS_AS_STORED = ["jgg_qmm_fp8"]
KINDS = ("sizes", "spans", "segments")


@pytest.fixture(scope="module")
def program():
    return host_program.build_kernels("prepack_fp8")


def run(program, q, kind=None, data=None, offset=None):
    """The bytes of what the kernel makes of (G, N, K), and 64 bytes behind each."""
    w = prepack.in_two_axes(q)
    groups, n, k = q.shape
    sizes = groups * n * k, groups * n * k // 32
    out = [aligned(size, GUARD) for size in sizes]
    longs = lambda values: (ctypes.c_long * len(values))(*values)
    array = lambda a: None if a is None else np.ascontiguousarray(a, np.int32)
    data, offset = array(data), array(offset)
    program.prepack_fp8_kernel(
        longs(q.shape), longs(w.scales.shape[1:]), longs(w.block), pointer(copied(raw(w))),
        pointer(copied(np.asarray(w.scales))), -1 if kind is None else KINDS.index(kind),
        pointer(data), ctypes.c_long(0 if data is None else len(data)), pointer(offset),
        *map(pointer, out),
    )  # fmt: skip
    return out


def packed_bytes(q):
    return [np.asarray(a).reshape(-1).view(np.uint8) for a in (q.weight, q.scales)]


# ---- on the host ---------------------------------------------------------------------------------


@host_program.needs_compiler
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.one_in(3)
def test_any_codes(program, rng, block):
    """Any codes; k that does not fill a block of threads, and more than one; scales of blocks."""
    for shape, nan in (((2, 128, 128), 0.002), ((1, 64, 640), 0.0), ((1, 192, 1024), 0.002)):
        if block is not None and shape[2] > block[1] and block[1] % 128:
            continue
        q = weight(rng, shape, block, nan)
        for got, want in zip(run(program, q), packed_bytes(jgg.prepack(q)), strict=True):
            guarded(got, want)


@host_program.needs_compiler
def test_every_pair_of_codes(program):
    """In every place of a row."""
    codes = np.arange(2**16, dtype=np.uint16).view(np.uint8).reshape(128, 1024)
    q = made(jnp.asarray(np.stack([codes, np.roll(codes, 1)])), jnp.ones(2), None)
    q = jgg.Quantized(
        jax.lax.bitcast_convert_type(q.weight, jnp.float8_e4m3fn), q.scales, mode="fp8", bits=8,
        group_size=0,
    )  # fmt: skip
    for got, want in zip(run(program, q), packed_bytes(jgg.prepack(q)), strict=True):
        guarded(got, want)


@host_program.needs_compiler
def test_every_kind_of_scale(program, rng):
    """Any bits of float32, and those where rounding decides; beside codes that are NaN or not."""
    edges = np.concatenate([np.arange(-3, 4) + (e << 23) for e in range(1, 256)])
    halves = (edges[:, None] + np.array([0x7FFF, 0x8000, 0x100, 0xFF])).reshape(-1)
    some = rng.integers(0, 2**32, 10_000)
    bits = np.concatenate([edges, halves, some, [0, 1, 0x7FFFFF]]).astype(np.uint32)
    bits = np.concatenate([bits, bits ^ 0x80000000])[: len(bits) * 2 // 64 * 64]
    for nan in (0, 0x7F):
        codes = np.zeros((len(bits), 128), np.uint8)
        codes[:, 5] = nan
        q = made(jnp.asarray(codes), jnp.asarray(bits.view(np.float32))[:, None], (1, 128))
        q = jgg.Quantized(
            jax.lax.bitcast_convert_type(q.weight, jnp.float8_e4m3fn), q.scales, mode="fp8",
            bits=8, group_size=128, block=(1, 128),
        )  # fmt: skip
        _, want = prepack.codes_and_words(q)
        got, marks = np.empty(len(bits), np.uint32), np.full(len(bits), nan != 0)
        values = bits.view(np.float32)
        count = ctypes.c_long(len(bits))
        program.scale_words(count, pointer(values), pointer(marks), pointer(got))
        np.testing.assert_array_equal(got, np.asarray(want)[:, 0])


SOME = [
    ("sizes", [0, 3, 0, 1], None, [1, 3]),
    ("sizes", [-1, 0, 2, 0], None, [2]),
    ("sizes", [2, 3], None, [0, 1]),  # of matrices behind the last size
    ("sizes", [1, 0, 0, 5, 0, 7, 1], 2, [1, 3]),
    ("sizes", [1, 1, 1], -2, [2, 3]),
    ("sizes", [1, 1, 1], 2**31 - 1, []),
    ("spans", [[0, 4], [4, 4], [5, 3], [7, 9]], None, [0, 3]),
    ("spans", [[0, 4]], None, [0]),
    ("segments", [[0, 0, 2, 3], [0, 0, 0, 1], [5, 0, 1, 0], [0, 0, -1, 2]], None, [0, 3]),
    ("segments", [[0, 0, 0, 0]] * 100 + [[0, 0, 1, 2]], None, [2]),
    ("segments", [[0, 0, 0, 0]] * 513, None, [0, 1, 2, 3]),  # too many to look at
]


@host_program.needs_compiler
@pytest.mark.parametrize(("kind", "data", "offset", "there"), SOME)
def test_matrices_with_rows(program, rng, kind, data, offset, there):
    """Others are left as they were."""
    q = weight(rng, (4, 64, 256), (128, 128))
    for got, all_ in zip(run(program, q, kind, data, offset), packed_bytes(jgg.prepack(q)),
                         strict=True):  # fmt: skip
        want = all_.reshape(4, -1).copy()
        want[[g for g in range(4) if g not in there]] = 0xAB
        guarded(got, want.reshape(-1))


# ---- lowering ------------------------------------------------------------------------------------

SIZES = jnp.array([3, 0, 5])


def grouped_qmm(x, w, **options):
    return jgg.grouped_qmm(x, w, SIZES, **options)


def like(q):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), q)


def spec(*shape, block=(128, 128), dtype="float8_e4m3fn"):
    scales = blocks.scales_shape(shape, block)
    return made(
        jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(scales, jnp.float32), block
    )


def attributes(block, kind="", offset="false"):
    rows, columns = block
    return (
        f"block = {{columns = {columns} : i32, rows = {rows} : i32}}, "
        f'metadata = {{group_offset = {offset}, kind = "{kind}", swapped = false}}'
    )


def test_operands_and_results():
    """Blocks are no larger than a matrix, and a scale for a matrix is a block."""
    for block, scales, rows_and_columns in (
        ((128, 128), "6x2x2xf32", (128, 128)),
        ((1, 128), "6x192x2xf32", (1, 128)),
        ((1, 256), "6x192x1xf32", (1, 256)),
        ((1, 2**40), "6x192x1xf32", (1, 256)),
        (None, "6x1x1xf32", (192, 256)),
    ):
        (call,) = calls(lowered(jgg.prepack, spec(2, 3, 192, 256, block=block)))
        results = ["6x3x4x1024xui32", "6x3x2x64xui32"]
        expected = ["6x192x256xf8E4M3FN", scales], results, attributes(rows_and_columns)
        assert call == ("jgg_prepack_fp8", *expected)
    (call,) = calls(lowered(jgg.prepack, spec(64, 128)))
    assert call[1:3] == (["1x64x128xf8E4M3FN", "1x1x1xf32"], ["1x1x2x1024xui32", "1x1x1x64xui32"])
    ((name, operands, _, _),) = calls(lowered(jgg.prepack, spec(64, 128, dtype="uint8")))
    assert (name, operands[0]) == ("jgg_prepack_fp8", "1x64x128xf8E4M3FN")
    for axis in (0, 1):
        q = jax.tree.map(lambda a: jnp.zeros((3, 2, *a.shape), a.dtype), spec(64, 128))
        ((_, operands, _, _),) = calls(lowered(jax.vmap(jgg.prepack, axis), q))
        assert operands == ["6x64x128xf8E4M3FN", "6x1x1xf32"]
    assert not calls(lowered(jgg.prepack, spec(64, 128), platform="cpu"))


def across(x, w, **options):
    return grouped_qmm(x, w, transpose_w=False, **options)


def test_products_pack_first(monkeypatch):
    """Many rows of float32 on Hopper, along N. Matrices without rows are left alone."""
    live(monkeypatch, 90)
    w = spec(3, 128, 256)
    x = jnp.ones((5000, 128), jnp.float32)
    for options in ({}, {"implementation": "sm90"}):
        pack, product = calls(lowered(functools.partial(across, **options), x, w))
        assert [pack[0], product[0]] == CALLS
        assert pack[1] == ["3x128x256xf8E4M3FN", "3x1x2xf32", "3xi32"]
        assert pack[3] == attributes((128, 128), "sizes")
        assert product[1][1:3] == pack[2] == ["3x2x4x1024xui32", "3x2x2x64xui32"]
    for rows, called in ((5000, CALLS), (8, CALLS_AS_STORED)):
        assert names(across, x[:rows], w) == called
        assert names(across, x[:rows], w, implementation="reference") == []
        with pytest.raises(ValueError, match="reads no codes of mode 'fp8'"):
            names(across, x[:rows], w, implementation="sm80")


def test_float32_rows_meet_it_as_it_is_stored(monkeypatch):
    """Along K."""
    live(monkeypatch, 90)
    w = spec(3, 128, 256)
    for rows in (1, 8, 5000):
        x = jnp.ones((rows, 256), jnp.float32)
        for options in ({}, {"activation": "swiglu"}, {"implementation": "sm90"}):
            assert names(grouped_qmm, x, w, **options) == CALLS_AS_STORED
    assert names(lambda x, w: grouped_qmm(x, jgg.prepack(w)), x, w) == CALLS
    assert names(jgg.quantized_matmul, x, spec(128, 256)) == CALLS  # many rows of a matrix
    assert names(jgg.quantized_matmul, x[:8], spec(128, 256)) == CALLS_AS_STORED
    # A gate of 96 columns is not the kernel's: the activation comes after the product.
    assert names(grouped_qmm, x, spec(3, 192, 256), activation="swiglu") == CALLS_AS_STORED
    for block in ((1, 256), None, (1, 128)):
        assert names(grouped_qmm, x, spec(3, 64, 256, block=block)) == CALLS_AS_STORED
    for n, k in ((96, 256), (128, 192)):
        x = jnp.ones((8, k), jnp.float32)
        assert names(grouped_qmm, x, spec(3, n, k)) == CALLS_AS_STORED


def test_forms_of_metadata(monkeypatch):
    """With an offset, of a batch, and by index: sorted or not."""
    live(monkeypatch, 90)
    x, w = jnp.ones((5000, 128), jnp.float32), spec(3, 128, 256)
    offset = lambda x, w: jgg.grouped_qmm(
        x, w, jnp.ones(6, jnp.int32), group_offset=jnp.int32(3), transpose_w=False
    )
    pack, product = calls(lowered(offset, x, w))
    assert pack[1][2:] == product[1][3:] == ["6xi32", "i32"]
    assert pack[3] == attributes((128, 128), "sizes", "true")
    pack, product = calls(lowered(jax.vmap(across, (0, None)), jnp.stack([x, x]), w))
    assert [pack[0], product[0]] == CALLS
    assert pack[1][2:] == ["6x4xi32"]
    assert pack[3] == attributes((128, 128), "segments")
    many = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), w)
    pack, product = calls(lowered(jax.vmap(across), jnp.stack([x, x]), many))
    assert pack[1][0] == "6x128x256xf8E4M3FN"
    gathered = lambda x, w, i: jgg.gather_qmm(x[:, None], w, rhs_indices=i)
    for pairs in (2, 8, 1000):
        rows, index = jnp.ones((pairs, 256), jnp.float32), jnp.zeros(pairs, jnp.int32)
        assert names(gathered, rows, w, index) == CALLS_AS_STORED


def test_moe_mlp(monkeypatch):
    live(monkeypatch, 90)
    x, index = jnp.ones((6, 256), jnp.float32), jnp.zeros((6, 2), jnp.int32)
    found = names(jgg.moe_mlp, x, spec(4, 512, 256), spec(4, 256, 256), index, jnp.ones((6, 2)))
    assert [name for name in found if "moe" not in name] == CALLS_AS_STORED * 2


def test_gradients(monkeypatch):
    """The transposed product packs the weight for many rows."""
    live(monkeypatch, 90)
    loss = lambda x, w: grouped_qmm(x, w).astype(jnp.float32).sum()
    for rows, transposed in ((8, CALLS_AS_STORED), (5000, CALLS)):
        x = jnp.ones((rows, 256), jnp.float32)
        found = names(jax.value_and_grad(loss), x, spec(3, 128, 256))
        assert found == CALLS_AS_STORED + transposed


@pytest.mark.parametrize("capabilities", [(), (80,), (80, 90), (100,)])
def test_on_hopper_only(monkeypatch, capabilities):
    live(monkeypatch, *capabilities)
    assert names(grouped_qmm, jnp.ones((8, 256), jnp.float32), spec(3, 128, 256)) == []


NOT = {
    "blocks": (spec(3, 128, 256, block=(64, 64)), {}),
    "e5m2": (spec(3, 128, 256, dtype="float8_e5m2"), {}),
    "long sums": (spec(3, 64, 2**20), {}),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("w", [
    spec(3, 128, 256), spec(3, 100, 144, block=(48, 10**6)), spec(3, 96, 192, block=None),
    spec(3, 128, 384, block=(1, 128)),
])  # fmt: skip
def test_16_bit_rows_meet_it_as_it_is_stored(monkeypatch, w, dtype):
    """... in blocks of whole 128 columns; many rows pack it."""
    live(monkeypatch, 90)
    x = lambda rows: jnp.ones((rows, w.shape[2]), dtype)
    for options in ({}, {"activation": "swiglu"}, {"implementation": "sm90"}):
        (call,) = calls(lowered(functools.partial(grouped_qmm, **options), x(8), w))
        assert call[0] == "jgg_qmm_fp8"
        rows, columns = (
            min(sizes) for sizes in zip(w.block or w.shape[1:], w.shape[1:], strict=True)
        )
        assert f"block = {{columns = {columns} : i32, rows = {rows} : i32}}" in call[3]
    huge = spec(*w.shape, block=(2**33, 2**33))
    (call,) = calls(lowered(grouped_qmm, x(8), huge))
    assert f"columns = {w.shape[2]} : i32" in call[3]
    many = CALLS if w.shape[1] % 64 == 0 and w.shape[2] % 128 == 0 else ["jgg_qmm_fp8"]
    assert names(grouped_qmm, x(3 * 2048), w) == many


@pytest.mark.parametrize("case", NOT)
def test_composed_as_before(monkeypatch, case):
    live(monkeypatch, 90)
    w, options = NOT[case]
    options = dict(options)
    k = w.shape[-1 if options.get("transpose_w", True) else -2]
    x = jax.ShapeDtypeStruct((8, k), options.pop("dtype", "float32"))
    assert names(grouped_qmm, x, w, **options) == []


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(128, 128), (1, 128), (1, 10**6), None, (48, 256)])
def test_bytes(rng, block):
    for shape in ((64, 128), (3, 128, 640), (2, 2, 192, 256), (2880, 2944), (5, 64, 7168)):
        q = weight(rng, shape, block, 0.002)
        assert names(jgg.prepack, q) == ["jgg_prepack_fp8"]
        want = on_cpu(jgg.prepack, q)
        same_bytes(jax.device_get(jgg.prepack(q)), want)
        same_bytes(jax.device_get(jax.jit(jgg.prepack)(q)), want)
        if len(shape) > 2:
            same_bytes(jax.device_get(jax.vmap(jgg.prepack)(q)), want)


@pytest.mark.gpu
def test_over_four_gib(rng):
    """More than 2^32 codes."""
    q = weight(rng, (1, 64, 16_384), (128, 128), 0.002)
    several = jax.jit(lambda q: jax.tree.map(lambda a: jnp.tile(a, (4100, 1, 1)), q))(q)
    assert several.weight.size > 2**32
    got = jax.jit(jgg.prepack)(several)
    want = on_cpu(jgg.prepack, q)
    for at in (0, 4099):
        same_bytes(jax.device_get(jax.tree.map(lambda a, at=at: a[at : at + 1], got)), want)


# Products have so many rows that they pack.
PRODUCTS = {
    "many": (6200, [2700, 3, 3400], {}),
    "none": (6200, [0, 0, 0], {}),
    "long": (6200, [30, 0, 6100], {}),
    "gated": (6200, [3, 0, 6100], {"activation": "swiglu"}),
}


def small(rng, shape, block):
    """A weight whose products are not large."""
    w = weight(rng, shape, block)
    return dataclasses.replace(w, scales=jnp.minimum(w.scales, 0.1))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(128, 128), (1, 384), None])
@pytest.mark.parametrize("case", PRODUCTS)
def test_products_as_of_prepacked(rng, case, block):
    """Bit for bit, jitted or not."""
    needs("sm90")
    rows, sizes, options = PRODUCTS[case]
    x, w = oracle.random(rng, (rows, 384), "bfloat16"), small(rng, (3, 128, 384), block)
    f = lambda x, w, s: jgg.grouped_qmm(x, w, s, **options)
    given = jnp.array(sizes)
    assert names(f, x, w, given) == CALLS
    want = np.asarray(jax.jit(f)(x, jgg.prepack(w), given), np.float32)
    for run in (f, jax.jit(f)):
        np.testing.assert_array_equal(np.asarray(run(x, w, given), np.float32), want)
    if not options:
        oracle.assert_close(want, oracle.grouped_mm(x, jgg.dequantize(w).swapaxes(1, 2), sizes),
                            tolerance=2e-2)  # fmt: skip


@pytest.mark.gpu
def test_many_groups_without_rows(rng):
    """What is left unwritten is never read: memory that XLA lends holds NaN before."""
    needs("sm90")
    w, x = small(rng, (64, 128, 256), (128, 128)), oracle.random(rng, (64, 256), "float32")
    f, prepacked = jax.jit(jgg.grouped_qmm), jgg.prepack(w)
    for _ in range(20):
        sizes = np.zeros(64, np.int32)
        np.add.at(sizes, rng.integers(0, 64, 40), 1)
        jax.block_until_ready(jnp.full((2**20,), jnp.nan) + 1)
        oracle.assert_close(f(x, w, sizes), oracle.f64(f(x, prepacked, sizes)), tolerance=1e-5)


@pytest.mark.gpu
def test_other_products_as_of_prepacked(rng):
    """Mapped, with an offset, by index, and a layer."""
    needs("sm90")
    w, x = small(rng, (4, 256, 256), (128, 128)), oracle.random(rng, (2, 9, 256), "float32")
    down = small(rng, (4, 256, 128), (128, 128))
    sizes = jnp.array([[3, 0, 5, 1], [0, 0, 2, 9]])
    index = jnp.asarray(rng.integers(-1, 5, 9), jnp.int32)
    experts = jnp.asarray(rng.integers(0, 4, (9, 2)), jnp.int32)
    share = jnp.asarray(rng.random((9, 2)), jnp.float32)
    offset = jnp.array([2, 3, 0, 5, 1, 8])
    of_some = lambda x, w: jgg.grouped_qmm(x, w, offset, group_offset=jnp.int32(1))
    two = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), w)
    own = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), jgg.prepack(w))
    for f, q, packed in (
        (lambda w: jax.vmap(jgg.grouped_qmm, (0, None, 0))(x, w, sizes), w, jgg.prepack(w)),
        (lambda w: jax.vmap(jgg.grouped_qmm)(x, w, sizes), two, own),
        (lambda w: of_some(x[0], w), w, jgg.prepack(w)),
        (lambda w: jgg.gather_qmm(x[0][:, None], w, rhs_indices=index), w, jgg.prepack(w)),
        (lambda w: jgg.gather_qmm(x[0][:2, None], w, rhs_indices=index[:2]), w, jgg.prepack(w)),
        (lambda w: jgg.quantized_matmul(x[0], w), w[1], jgg.prepack(w[1])),
    ):
        got, want = (jax.jit(f)(q) for q in (q, packed))
        oracle.assert_close(got, oracle.f64(want), tolerance=1e-5)
    layer = jax.jit(lambda up, down: jgg.moe_mlp(x[0], up, down, experts, share))
    got, want = layer(w, down), layer(jgg.prepack(w), jgg.prepack(down))
    oracle.assert_close(got, oracle.f64(want), tolerance=2e-2)
