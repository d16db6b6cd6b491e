"""Products with quantized weights for tests: small ones, and the kernels that take them."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_groupgemm as jgg
from jax_groupgemm._kernels import extension

HOPPER = 90 in extension.live_capabilities()
FORMATS = {"nvfp4": ("nvfp4", 4, 16), "affine": ("affine", 4, 64)}
# Parts of names: the Hopper kernel with weights as they are stored and with prepacked ones, the
# kernel of few rows of weights as they are stored, and the one that takes everything. The kernel
# without tiles is one of those with prepacked weights.
LINEAR, PACKED, FEW, ANY = (
    "LinearWeights", "PackedWeights", "FewRowsSm80Kernel", "QuantizedGemmSm80Kernel",
)  # fmt: skip
DIRECT = "DirectGemmSm90Kernel"
# The kernel of weights that are quantized along N.
TRANSPOSED = "TransposedGemmSm90Kernel"
# Kernels in which scales multiply sums: of prepacked weights, and of lines and few rows.
SCALED, SCALED_LINES = "ScaledWeights", "ScaledLines"

SIZES = np.array([9, 0, 8], np.int32)
# What is differentiated beside x.
CASES = {
    "affine": ("affine", 3, 32, ("scales", "biases")),
    "affine N": ("affine", 4, 64, ("scales", "biases")),
    "nvfp4": ("nvfp4", 4, 16, ("global_scale",)),
    "nvfp4 scalar N": ("nvfp4", 4, 16, ("global_scale",)),
    "mxfp4 N": ("mxfp4", 4, 32, ()),
    "mxfp8": ("mxfp8", 8, 32, ()),
}
# Bits and group size.
BYTE_SCALES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def needs(kernel: str) -> str:
    """The kernel, where the device has it."""
    if kernel == "sm90" and 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    return kernel


@functools.cache
def problem(name):
    """x, the differentiable leaves, and f of them, of sizes or indices and of the packed
    weight."""
    rng, lead = np.random.default_rng(list(name.encode())), (3,)
    mode, bits, group, leaves = CASES[name]
    transpose_w = "N" not in name
    scale = None
    if mode == "nvfp4":
        scale = jnp.asarray(rng.uniform(0.5, 2, () if "scalar" in name else lead), jnp.float32)
    q = oracle.random_quantized(rng, (*lead, 5, 128), mode, bits, group, scale=scale)
    x = oracle.random(rng, (20, 128 if transpose_w else 5)) / 4

    def f(x, p, meta=SIZES, weight=q.weight, product=jgg.grouped_qmm):
        w = dataclasses.replace(q, weight=weight, **p)
        return product(x, w, meta, transpose_w=transpose_w)

    return x, {leaf: getattr(q, leaf) for leaf in leaves}, f, q


def _of_codes(mode, codes, scales):
    bits, group = BYTE_SCALES[mode]
    if mode == "mxfp8":
        codes = np.where(codes % 128 == 127, 5, codes)  # NaN would fill its row or column
    bytes_ = (codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    weight = np.ascontiguousarray(bytes_).view(np.uint32)
    return jgg.Quantized(weight, scales, mode=mode, bits=bits, group_size=group)


def every_scale_and_code(mode, k):
    """(256, k): row n has scale byte n and every code but NaN."""
    bits, group = BYTE_SCALES[mode]
    codes = np.broadcast_to(np.arange(k) % 2**bits, (256, k))
    return _of_codes(mode, codes, np.repeat(np.arange(256, dtype=np.uint8)[:, None], k // group, 1))


def every_scale_and_code_along_n(mode):
    """(16, 256 groups): group n of every row has scale byte n; together they have every code."""
    bits, group = BYTE_SCALES[mode]
    codes = (np.arange(16)[:, None] * (group - 1) + np.arange(group)) % 2**bits
    assert len(np.unique(codes)) == 2**bits
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8), (16, 256))
    return _of_codes(mode, np.tile(codes, 256), scales)


def assert_values(got, want, fills: bool = True):
    """``got`` (N, some units) is a product of units with a weight (N, K). A value that is not
    finite ``fills`` its row, or may; a tiny one may be flushed."""
    finite = np.isfinite(want).all(1)
    assert finite.mean() > 0.5
    assert not finite.all()
    got, want = oracle.f64(got), want[:, : got.shape[1]]
    assert not np.isfinite(got[~finite] if fills else got[~np.isfinite(want)]).any()
    got, want = got[finite], want[finite]
    tiny = abs(want) < 2.0**-126
    np.testing.assert_array_equal(got[~tiny], want[~tiny])
    assert (abs(got[tiny]) < 2.0**-126).all()
