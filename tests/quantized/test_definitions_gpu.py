"""Quantizers' definitions, which XLA compiles for a GPU where arrays are sharded or batched: they
make the bytes that kernels make, and numpy or a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from nvfp4_quantize_cases import (
    KEY,
    SIZES,
    G,
    K,
    T,
    grouped_rows,
    same,
    tensors,
    want_of,
)
from test_prepack import weight
from test_quantize_call import calls, lowered, on_cpu, same_bytes
from test_quantized import BITS, DTYPES, FP, inputs

import jax_groupgemm as jgg
from jax_groupgemm._quantized import in_groups

pytestmark = pytest.mark.gpu

# Every option, axis and dtype.
NVFP4 = [
    ("float32", {"axis": -1}),
    ("bfloat16", {"axis": -2, "scale_2d": True}),
    ("float32", {"axis": -2, "hadamard": True}),
    ("float16", {"axis": -1, "hadamard": True, "stochastic_rounding_key": KEY}),
    ("float32", {"axis": -1, "scale_2d": True, "stochastic_rounding_key": KEY}),
]


def test_nvfp4_quantize(rng):
    """Of each tensor alone, and of all as a batch; tiny, huge, without numbers, with NaN."""
    given = [jnp.stack(list(tensors(rng, dtype))) for dtype, _ in NVFP4]
    functions = [functools.partial(jgg.nvfp4_quantize, **options) for _, options in NVFP4]
    kernels = lambda xs: [[f(x) for x in a] for f, a in zip(functions, xs, strict=True)]
    batches = lambda xs: [jax.vmap(f)(a) for f, a in zip(functions, xs, strict=True)]
    assert len(calls(lowered(kernels, given))) >= len(NVFP4)
    assert not calls(lowered(batches, given))
    by_kernel, by_definition = jax.device_get((jax.jit(kernels)(given), jax.jit(batches)(given)))
    for (_, options), xs, ones, batch in zip(NVFP4, given, by_kernel, by_definition, strict=True):
        for i, (x, one) in enumerate(zip(xs, ones, strict=True)):
            of_batch = jax.tree.map(lambda a, i=i: a[i], batch)
            same(of_batch, want_of(np.asarray(x), **options))
            oracle.assert_leaves_equal(of_batch, one)


def test_nvfp4_quantize_of_groups(rng):
    """Sizes of each example are its own."""
    x, sizes = (
        np.stack(a) for a in zip(*(grouped_rows(rng, s) for s in SIZES.values()), strict=True)
    )
    assert (x.shape[1:], sizes.shape[1:]) == ((T, K), (G,))
    for options in ({"axis": -2, "hadamard": True}, {}):
        f = lambda x, sizes, o=options: jgg.nvfp4_quantize(x, group_sizes=sizes, **o)
        assert calls(lowered(f, x[0], sizes[0]))
        assert not calls(lowered(jax.vmap(f), x, sizes))
        kernel, batch = jax.jit(f), jax.device_get(jax.jit(jax.vmap(f))(x, sizes))
        for i in range(len(x)):
            of_batch = jax.tree.map(lambda a, i=i: a[i], batch)
            same(of_batch, want_of(x[i], sizes=sizes[i], **options))
            oracle.assert_leaves_equal(of_batch, jax.device_get(kernel(x[i], sizes[i])))


def formats_of(dtype):
    """Static parameters and a global scale: every mode, and some widths of affine."""
    for i, bits in enumerate(BITS):
        if DTYPES[(i + i // 3) % 3] == dtype:
            yield {"mode": "affine", "bits": bits, "group_size": (32, 64, 128)[i % 3]}, None
        if i % 3 != DTYPES.index(dtype):
            yield {"mode": "affine", "bits": bits, "group_size": 16}, None
    for mode, (bits, group_size) in FP.items():
        yield {"mode": mode, "bits": bits, "group_size": group_size}, None
    yield {"mode": "nvfp4", "bits": 4, "group_size": 16}, np.float32(0.0123)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_and_dequantize(rng, dtype):
    """One program of all definitions, and one of all kernels."""
    w = inputs(rng, dtype)
    # A CPU takes subnormal scales and biases for zeros when it dequantizes.
    plain = np.where(abs(w.astype(np.float32)) < 2.0**-90, w.dtype.type(0), w)

    def run(quantize, dequantize, w, plain):
        for static, factor in formats_of(dtype):
            array = plain if static["mode"] == "affine" else w
            factor = None if factor is None else jnp.asarray(factor)
            weight, scales, *biases = quantize(array, factor, **static)
            leaves = weight, scales, biases[0] if biases else None
            yield (
                leaves,
                [
                    dequantize(*leaves, factor, **static, dtype=jnp.dtype(to))
                    for to in sorted({dtype, "float32"})
                ],
            )

    def quantized(w, factor, **static):
        q = jgg.quantize(w, global_scale=factor, **static, contract=-1)
        return q.weight, q.scales, *([] if q.biases is None else [q.biases])

    def dequantized(*leaves, dtype, **static):
        return jgg.dequantize(jgg.Quantized(*leaves, **static), dtype)

    kernels = lambda *ws: list(run(quantized, dequantized, *ws))
    definitions = lambda *ws: list(run(in_groups.quantize, in_groups.dequantize, *ws))
    count = len(list(formats_of(dtype))) * (2 if dtype == "float32" else 3)
    assert len(calls(lowered(kernels, w, plain))) == count
    assert not calls(lowered(definitions, w, plain))
    want, got = jax.device_get((jax.jit(kernels)(w, plain), jax.jit(definitions)(w, plain)))
    for (static, _), one, other in zip(formats_of(dtype), got, want, strict=True):
        assert oracle.f64(other[1][0]).any(), static
        same_bytes(one, other)


def test_prepack_of_mxfp8(rng):
    """No kernel makes that."""
    q = weight(rng, "mxfp8", 8, 32)
    assert not calls(lowered(jgg.prepack, q))
    same_bytes(jax.device_get(jgg.prepack(q)), on_cpu(jgg.prepack, q))
