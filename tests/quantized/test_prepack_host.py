"""The CUDA kernel of prepack, run on the host lane by lane, against its definition."""

import ctypes

import host_program
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from host_memory import GUARD, aligned, copied, guarded
from host_program import dtype_number, mode_number, pointer
from test_prepack import AFFINE, KERNELS

import jax_groupgemm as jgg
from jax_groupgemm._quantized import prepack

pytestmark = host_program.needs_compiler


@pytest.fixture(scope="module")
def kernel():
    return host_program.build_kernels("prepack").prepack_kernel


def any_bits(rng, mode, bits, group_size, n, k, dtype=ml_dtypes.bfloat16):
    codes = rng.integers(0, 2**32, (n, k * bits // 32), dtype=np.uint32)
    groups = k // group_size * np.dtype(dtype).itemsize // 2
    scales = rng.integers(0, 2**16, (2, n, groups), dtype=np.uint16)
    if mode == "affine":
        scales, biases = (jnp.asarray(s.view(dtype)) for s in scales)
    else:
        scales, biases = jnp.asarray(scales[0].astype(np.uint8)), None
    return jgg.Quantized(
        jnp.asarray(codes), scales, biases, mode=mode, bits=bits, group_size=group_size
    )


def check(kernel, q):
    want = prepack._packed(q, prepack._PREPACK)
    results = [np.asarray(a).reshape(-1).view(np.uint8) for a in (want.weight, want.scales)]
    got = [aligned(r.size, GUARD) for r in results]
    leaves = [None if a is None else copied(np.asarray(a)) for a in (q.weight, q.scales, q.biases)]
    weight, scales, biases = leaves
    long = ctypes.c_long
    kernel(
        mode_number(q.mode), q.bits, q.group_size,
        dtype_number(q.scales.dtype if q.mode == "affine" else "float32"),
        *map(long, q.shape), pointer(weight), long(weight.size), pointer(scales),
        long(scales.size), pointer(biases), *map(pointer, got),
    )  # fmt: skip
    for g, r in zip(got, results, strict=True):
        guarded(g, r)


@pytest.mark.parametrize(("mode", "bits", "group_size"), KERNELS)
@pytest.mark.one_in(6)
def test_any_bits(kernel, rng, mode, bits, group_size):
    """Any codes and scales; tiles of 64 k that do not fill a block, and more blocks than one."""
    for n, k in ((64, 64), (128, 192), (192, 320), (64, 576), (128, 1024)):
        if k % group_size == 0:
            check(kernel, any_bits(rng, mode, bits, group_size, n, k))


OTHERS = [(bits, group, np.float32) for _, bits, group in AFFINE if group != 32]
OTHERS += [(bits, 16, ml_dtypes.bfloat16) for bits in (2, 3, 4, 5, 6, 8)]


@pytest.mark.parametrize(("bits", "group_size", "dtype"), OTHERS)
@pytest.mark.one_in(6)
def test_scales_by_a_kernel_of_their_own(kernel, rng, bits, group_size, dtype):
    for n, k in ((64, 128), (128, 384)):
        check(kernel, any_bits(rng, "affine", bits, group_size, n, k, dtype))


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
def test_every_scale_of_every_code(kernel, mode):
    """Row n has scale byte n; each pair of codes, in each place of a word."""
    group_size, k = (16, 2048) if mode == "nvfp4" else (32, 2048)
    pairs = np.arange(256, dtype=np.uint8)
    codes = np.concatenate([np.roll(pairs, i) for i in range(4)])
    codes = np.broadcast_to(codes, (256, k // 2)).copy().view(np.uint32)
    scales = np.arange(256, dtype=np.uint8)[:, None].repeat(k // group_size, axis=1)
    q = jgg.Quantized(
        jnp.asarray(codes), jnp.asarray(scales), mode=mode, bits=4, group_size=group_size
    )
    check(kernel, q)
