"""What the Blackwell kernels of NVFP4 products are told, compiled for the host: shapes, addresses,
swizzled scales and workspace of every group, against brute force and CuTe's own layouts."""

import ctypes
import os
import shutil
import subprocess

import host_program
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from host_program import ROOT, pointer

import jax_groupgemm as jgg
from jax_groupgemm._nvfp4 import call as nvfp4_call

TILE = 512

pytestmark = host_program.needs_compiler


class Product:
    """ffi/nvfp4/layout.h's: mm of x (T, K) and w (G, N, K), or wgrad of dy (N, P) and x (K, P)."""

    def __init__(self, *, groups, tokens, n, k, m=0, ragged_k=False, out_size=4):
        self.groups, self.tokens, self.m, self.n, self.k = groups, tokens, m, n, k
        self.ragged_k, self.out_size = ragged_k, out_size

    def __iter__(self):
        return iter(
            (self.ragged_k, self.groups, self.tokens, self.m, self.n, self.k, self.out_size)
        )

    @property
    def fields(self):
        return pointer(np.array(list(self), np.int32))


@pytest.fixture(scope="module")
def library():
    return host_program.build("nvfp4_layout")


def scan(library, product, sizes):
    starts, tiles = np.full((2, product.groups + 1), -1, np.int32)
    problems = np.full((product.groups, 8), -1, np.int64)
    sizes = np.ascontiguousarray(sizes, np.int32)
    library.groups(product.fields, *map(pointer, (sizes, starts, tiles, problems)))
    return starts, tiles, problems


def swizzle(library, product, b, starts, tiles, scales):
    """The swizzled scales of A or B; bytes that nothing writes are 0xEE."""
    library.scale_bytes.restype = ctypes.c_int64
    out = np.full(library.scale_bytes(product.fields, int(b)), 0xEE, np.uint8)
    scales = np.ascontiguousarray(scales)
    arrays = (pointer(a) for a in (starts, tiles, scales, out))
    library.swizzle(product.fields, int(b), *arrays)
    return out


def offset(r, s, columns):
    """The byte of a scale in a group's own grid of tiles, as the format's documentation has it."""
    tile = r // 128 * -(-columns // 4) + s // 4
    return tile * TILE + r % 32 * 16 + r % 128 // 32 * 4 + s % 4


def scales_of(swizzled, begin, rows, columns):
    r, s = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    return swizzled[begin + offset(r, s, columns)]


SIZES = {
    "uneven": [5, 0, 130, 64, 1, 0, 200],
    "negative and too many": [-3, 100, 2**31 - 1, -(2**31), 2**31 - 1, 7, 1],
    "no tokens": [0] * 7,
    "one group": [0, 0, 0, 0, 300, 0, 0],
    "whole tiles": [128, 64, 0, 256, 128, 0, 64],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("ragged_k", [False, True])
def test_groups(library, sizes, ragged_k):
    tokens, unit = 1000, 64 if ragged_k else 128
    padded = (tokens + 63 * 7) // 64 * 64
    product = Product(groups=7, tokens=tokens, m=40, n=24, k=padded if ragged_k else 96,
                      ragged_k=ragged_k)  # fmt: skip
    starts, tiles, problems = scan(library, product, sizes)
    bounds = oracle.bounds(sizes, tokens)
    np.testing.assert_array_equal(starts, [b[0] for b in bounds] + [bounds[-1][1]])
    own_tiles = [-(-(end - start) // unit) for start, end in bounds]
    np.testing.assert_array_equal(tiles, np.concatenate([[0], np.cumsum(own_tiles)]))
    for (start, end), tile, count, problem in zip(bounds, tiles, own_tiles, problems, strict=False):
        size = end - start
        m, n, k = problem[:3]
        if size == 0:
            assert (m, n, k) == (0, 0, 0)
        else:
            assert (m, n, k) == ((40, 24, 64 * count) if ragged_k else (size, 24, 96))
            assert k > 0
        if ragged_k:
            assert problem[3] == problem[4] == tile * 32
            assert problem[5] == problem[6] == tile * TILE  # one tile of rows
        else:
            assert problem[3] == start * 48
            assert problem[5] == tile * 2 * TILE
            assert problem[7] == start * 24 * 4


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000, 4096])
def test_many_groups(library, rng, count):
    sizes = rng.integers(-2, 9, count) * (rng.random(count) < 0.7)
    tokens = int(np.maximum(sizes, 0).sum()) - 3 if count > 1 else 5
    product = Product(groups=count, tokens=tokens, n=8, k=64)
    starts, tiles, problems = scan(library, product, sizes)
    bounds = np.array(oracle.bounds(sizes, tokens))
    lengths = bounds[:, 1] - bounds[:, 0]
    np.testing.assert_array_equal(starts[:-1], bounds[:, 0])
    np.testing.assert_array_equal(np.diff(tiles), -(-lengths // 128))
    np.testing.assert_array_equal(problems[:, 0], lengths)
    assert starts[-1] == bounds[-1, 1]


def test_groups_that_the_padded_axis_has_no_room_for(library):
    """Sizes other than those the operands were quantized with stay inside them."""
    product = Product(groups=3, tokens=1000, m=8, n=8, k=256, ragged_k=True)
    _, tiles, problems = scan(library, product, [100, 300, 500])
    np.testing.assert_array_equal(tiles, [0, 2, 4, 4])
    np.testing.assert_array_equal(problems[:, 2], [128, 128, 0])
    np.testing.assert_array_equal(problems[:, 0], [8, 8, 0])


def quantized(rng, *shape):
    """Codes, two to a byte, and scales."""
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    return codes, rng.integers(1, 0x7F, (*shape[:-1], shape[-1] // 16), dtype=np.uint8)


def values(codes, scales):
    """(..., K) of codes (..., K/2) and scales (..., K/16)."""
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    elements = oracle.f64(pairs.view(ml_dtypes.float4_e2m1fn))
    return elements * np.repeat(oracle.f64(scales.view(ml_dtypes.float8_e4m3fn)), 16, axis=-1)


def codes_at(codes, begin, rows, line, k):
    """(rows, k/2) of rows of ``line`` bytes, from byte ``begin`` on."""
    flat = codes.reshape(-1)[begin:]
    return np.stack([flat[r * line : r * line + k // 2] for r in range(rows)])


def multiply(library, product, sizes, a, b, out):
    """What the kernel makes of its arrays: one product after another, in float64."""
    starts, tiles, problems = scan(library, product, sizes)
    swizzled = [swizzle(library, product, i, starts, tiles, q[1]) for i, q in enumerate((a, b))]
    for m, n, k, at_a, at_b, scales_a, scales_b, at_out in problems.tolist():
        if 0 in (m, n):
            continue
        sides = []
        for (codes, _), begin, rows, scales, at in (
            (a, at_a, m, swizzled[0], scales_a), (b, at_b, n, swizzled[1], scales_b)
        ):  # fmt: skip
            own = scales_of(scales, at, rows, k // 16)
            sides.append(values(codes_at(codes, begin, rows, product.k // 2, k), own))
        first = at_out // product.out_size
        flat = out.reshape(-1)
        flat[first : first + m * n] = (sides[0] @ sides[1].T).reshape(-1)
    return swizzled


@pytest.mark.parametrize("k", [32, 96, 256, 544])
@pytest.mark.parametrize("sizes", [[5, 0, 130, 64, 1, 0, 200], [0, 300, -1, 0, 129, 0, 0]])
def test_grouped_mm(library, rng, sizes, k):
    tokens, n = 420, 136
    product = Product(groups=7, tokens=tokens, n=n, k=k, out_size=2)
    x, w = quantized(rng, tokens, k), quantized(rng, 7, n, k)
    out = np.zeros((tokens, n))
    swizzled = multiply(library, product, sizes, x, w, out)
    oracle.assert_close(out, oracle.grouped_mm(values(*x), values(*w), sizes, transpose_w=True))
    # Padding inside tiles is zeros; of B every tile is written.
    padding = np.pad(w[1], [(0, 0), (0, -n % 128), (0, -(k // 16) % 4)]).reshape(-1)
    np.testing.assert_array_equal(np.sort(swizzled[1]), np.sort(padding))


@pytest.mark.parametrize("sizes", [[5, 0, 130, 64, 1, 0, 200], [0, 300, -1, 0, 129, 0, 0]])
def test_grouped_wgrad(library, rng, sizes):
    tokens, n, k = 420, 136, 140
    padded = (tokens + 63 * 7) // 64 * 64
    product = Product(groups=7, tokens=tokens, m=n, n=k, k=padded, ragged_k=True)
    dy, x = quantized(rng, n, padded), quantized(rng, k, padded)
    # Each group's tokens lie at the next multiple of 64, and the rest of that are zeros.
    inside, position, ranges = np.zeros(padded, bool), 0, []
    for start, end in oracle.bounds(sizes, tokens):
        ranges.append((position, position + end - start))
        inside[position : position + end - start] = True
        position += -(-(end - start) // 64) * 64
    for codes, _ in (dy, x):
        keep = np.where(inside[::2], 0x0F, 0) | np.where(inside[1::2], 0xF0, 0)
        codes &= keep.astype(np.uint8)
    out = np.zeros((7, n, k))
    multiply(library, product, sizes, dy, x, out)
    want = np.stack([values(*dy)[:, s:e] @ values(*x)[:, s:e].T for s, e in ranges])
    assert (np.abs(want).max((1, 2)) > 0).sum() == sum(e > s for s, e in ranges) > 1
    oracle.assert_close(out, want)


def test_signs_of_scales_are_dropped(library, rng):
    product = Product(groups=1, tokens=4, n=8, k=64)
    starts, tiles, _ = scan(library, product, [4])
    scales = rng.integers(0, 256, (4, 4), dtype=np.uint8)
    got = scales_of(swizzle(library, product, 0, starts, tiles, scales), 0, 4, 4)
    np.testing.assert_array_equal(got, scales & 0x7F)


def test_byte_in_tile(library):
    r, s = np.meshgrid(np.arange(128), np.arange(4), indexing="ij")
    got = np.vectorize(lambda r, s: library.byte_in_tile(int(r), int(s)))(r, s)
    np.testing.assert_array_equal(got, offset(r, s, 4))
    assert sorted(got.reshape(-1)) == list(range(TILE))
    # The tile as a transposition of (row // 32, row % 32, scale).
    turned = np.arange(TILE).reshape(4, 32, 4).transpose(1, 0, 2).reshape(-1)
    np.testing.assert_array_equal(turned[got.reshape(-1)], np.arange(TILE))


@pytest.mark.parametrize("ragged_k", [False, True])
def test_workspace(library, ragged_k):
    """Parts are aligned, in order and apart, and of the sizes that are written."""
    library.workspace.restype = ctypes.c_int64
    for groups, tokens in ((1, 1), (7, 420), (33, 20), (1000, 5000)):
        k = (tokens + 63 * groups) // 64 * 64 if ragged_k else 544
        product = Product(groups=groups, tokens=tokens, m=24, n=136, k=k, ragged_k=ragged_k)
        offsets = np.zeros(16, np.int64)
        total = library.workspace(product.fields, pointer(offsets))
        assert not (offsets % 256).any()
        scales = [library.scale_bytes(product.fields, b) for b in (0, 1)]
        needed = [12 * groups, *[8 * groups] * 8, *[20 * groups] * 2, *[4 * (groups + 1)] * 2,
                  6 * 128 * 160, *scales]  # fmt: skip
        ends = np.append(offsets[1:], total - 256)
        np.testing.assert_array_equal(-(-np.array(needed) // 256) * 256, ends - offsets)
        assert offsets[0] == 0


@pytest.mark.parametrize("shape", [(1, 1, 4, 64), (7, 420, 136, 96), (300, 20, 8, 544)])
def test_workspace_of_a_call(library, shape):
    """What Python reserves is what the handlers take."""
    groups, tokens, n, k = shape
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    along_t = lambda a, sizes: jgg.nvfp4_quantize(a, axis=0, group_sizes=sizes)

    def mm(x, w, sizes):
        x, w = jgg.nvfp4_quantize(x), jgg.nvfp4_quantize(w)
        alpha = sizes.astype(jnp.float32)
        return nvfp4_call.nvfp4_grouped_mm(x, w, sizes, alpha, out_dtype=jnp.float32)

    def wgrad(x, dy, sizes):
        x, dy = along_t(x, sizes), along_t(dy, sizes)
        return nvfp4_call.nvfp4_grouped_wgrad(x, dy, sizes, sizes.astype(jnp.float32))

    padded = (tokens + 63 * min(groups, tokens)) // 64 * 64
    for function, operands, product in (
        (mm, (like(tokens, k), like(groups, n, k)),
         Product(groups=groups, tokens=tokens, n=n, k=k)),
        (wgrad, (like(tokens, k), like(tokens, n)),
         Product(groups=groups, tokens=tokens, m=n, n=k, k=padded, ragged_k=True)),
    ):  # fmt: skip
        jaxpr = jax.make_jaxpr(function)(*operands, sizes)
        (call,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "ffi_call")
        library.workspace.restype = ctypes.c_int64
        total = library.workspace(product.fields, pointer(np.zeros(16, np.int64)))
        assert call.outvars[1].aval.shape == (total,)


@pytest.mark.parametrize(
    ("product", "problem"),
    [
        (Product(groups=1, tokens=3, n=8, k=544, out_size=2), ""),
        (Product(groups=1, tokens=3, n=8, k=48, out_size=2), "needs K % 32 == 0, got K=48"),
        (Product(groups=1, tokens=3, n=12, k=64, out_size=2), "needs N % 8 == 0, got N=12"),
        (Product(groups=1, tokens=3, n=12, k=64, out_size=4), ""),
        (Product(groups=1, tokens=3, n=10, k=64, out_size=4), "needs N % 4 == 0, got N=10"),
        (Product(groups=1, tokens=3, m=7, n=12, k=64, ragged_k=True), ""),
        (Product(groups=1, tokens=3, m=8, n=7, k=64, ragged_k=True), "needs K % 4 == 0, got K=7"),
    ],
)
def test_shapes_that_the_kernel_cannot_take(library, product, problem):
    text = ctypes.create_string_buffer(200)
    library.shape_problem(product.fields, text, 200)
    assert text.value.decode() == problem


def test_scale_layout_is_cutes():
    found = host_program.cutlass_headers()
    if found is None:
        pytest.skip("needs the headers of CUTLASS and CUDA")
    library = host_program.build("nvfp4_layout", "-DJGG_CUTE", *found)
    library.cute_offset.restype = ctypes.c_int64
    size = ctypes.c_int64()
    for rows in (1, 7, 128, 200, 384):
        for k in (32, 64, 96, 544, 1024):
            columns = -(-k // 16)
            for b in (0, 1):
                m, n = (rows, 8) if b == 0 else (8, rows)
                for r in range(0, rows, 3):
                    for s in range(columns):
                        got = library.cute_offset(m, n, k, b, r, 16 * s + 5, ctypes.byref(size))
                        assert got == offset(r, s, columns)
                assert size.value == -(-rows // 128) * -(-columns // 4) * TILE


PREPARE = "JGG_NVFP4_PREPARE"


@pytest.mark.gpu
def test_kernels_that_prepare(tmp_path):
    """JGG_NVFP4_PREPARE may name a program that was built of this tree where there is nvcc: see
    tests/lib/nvfp4_prepare.cu for the command."""
    program, nvcc, found = (
        os.environ.get(PREPARE),
        shutil.which("nvcc"),
        host_program.cutlass_headers(),
    )
    if program is None:
        if nvcc is None or found is None:
            pytest.skip(f"needs nvcc and the headers of CUTLASS, or {PREPARE}")
        program = tmp_path / "prepare"
        flags = ["-std=c++17", "-arch=native", "--expt-relaxed-constexpr", *found[:2], "-I", "ffi"]
        subprocess.run(
            [nvcc, *flags, "tests/lib/nvfp4_prepare.cu", "-o", program], check=True, cwd=ROOT
        )
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "300 cases\n"), done.stdout + done.stderr
