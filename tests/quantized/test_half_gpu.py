"""float16 x on Hopper's kernels, with prepacked weights and affine ones as they are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import needs_hopper, run
from qmm_problems import LINEAR, PACKED

import jax_groupgemm as jgg

pytestmark = [pytest.mark.gpu, needs_hopper]

FORMATS = [
    ("fp8", 8, 128), ("nvfp4", 4, 16), ("mxfp4", 4, 32), ("mxfp8", 8, 32),
    *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
    ("affine", 4, 32), ("affine", 4, 128), ("affine", 5, 32), ("affine", 6, 128), ("affine", 8, 32),
]  # fmt: skip
# On average 8 rows, 18, 35 and 100: warps, and tiles of 64 and 192 rows.
SIZES = {
    "warps": (2, 4, 7, 8, 9, 0, 16, 17, 1, 25, 3, 0),
    "more": (1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 0),
    "64": (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 0),
    "192": (1, 0, 191, 192, 193, 33, 65, 97, 145, 161, 177, 20),
}


def weight(rng, mode, bits, group, groups, n, k):
    scale = jnp.asarray(rng.uniform(0.5, 2, groups), "float32") if mode == "nvfp4" else None
    return oracle.random_quantized(rng, (groups, n, k), mode, bits, group, "float16", scale)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
def test_values(rng, mode, bits, group, sizes):
    """Plain and gated; and from a weight as it is stored, which a call packs where no kernel reads
    its lines."""
    sizes = np.array(SIZES[sizes])
    n, k = 384, 9 * (128 if group == 128 else 64)
    q = weight(rng, mode, bits, group, len(sizes), n, k)
    x = oracle.random(rng, (sizes.sum() + 3, k), "float16")

    def products(x, *weights):
        f = lambda w, **more: jgg.grouped_qmm(
            x, w, jnp.asarray(sizes), preferred_element_type="float32", **more
        )
        return [(f(w), f(w, activation="swiglu")) for w in weights]

    found, kernels = run(jax.jit(products), x, jgg.prepack(q), q)
    ran = {of: sum(of in name and "Kernel" in name for name in kernels) for of in (PACKED, LINEAR)}
    lines = 2 if mode == "fp8" or (mode == "affine" and k * bits % 128 == 0) else 0
    if mode in ("affine", "fp8"):
        assert ran == {PACKED: 4 - lines, LINEAR: lines}, kernels
    else:
        assert ran[PACKED] >= 2, kernels
    want = oracle.grouped_qmm(x[:-3], q, sizes)
    gate, value = np.split(want, 2, axis=1)
    for out, gated in found:
        # Weights of mode fp8 are rounded to float16; affine ones once, not to float32 first.
        near = {"fp8": 4e-4, "affine": 4e-6}.get(mode)
        oracle.assert_close(out[:-3], want, k=k, tolerance=near)
        swiglu = gate / (1 + np.exp(-gate)) * value
        oracle.assert_close(gated[:-3], swiglu, tolerance=6e-4 if mode == "fp8" else 1e-5)
        assert not np.asarray(out)[-3:].any()


def test_parts_of_k(rng):
    """Few tiles of a long K: two blocks share it out."""
    q = weight(rng, "affine", 4, 64, 2, 192, 4160 + 64)
    x = oracle.random(rng, (7, 4224), "float16")
    f = jax.jit(
        lambda x, q: jgg.grouped_qmm(x, q, jnp.array([3, 4]), preferred_element_type="float32")
    )
    out, kernels = run(f, x, jgg.prepack(q))
    assert sum(PACKED in name for name in kernels) == 1
    oracle.assert_close(out, oracle.grouped_qmm(x, q, [3, 4]), k=4224)


@pytest.mark.parametrize("mode", ["affine", "nvfp4", "fp8"])
def test_large_and_small_values(rng, mode):
    """Products of code and scale that float16 does not hold are no sums of that size: with biases
    they fit. Small scales are subnormal."""
    q = weight(rng, mode, 8 if mode != "nvfp4" else 4, {"nvfp4": 16, "fp8": 128}.get(mode, 64),
               3, 128, 256)  # fmt: skip
    if mode == "affine":
        scales = jnp.full_like(q.scales, 400)  # times 255: 102 000
        q = jgg.Quantized(
            q.weight | jnp.uint32(0x80808080), scales, jnp.full_like(q.biases, -60000),
            mode="affine", bits=8, group_size=64,
        )  # fmt: skip
        assert np.isfinite(oracle.dequantize(q, "float16")).all()
    x = oracle.random(rng, (30, 256), "float16") / 64
    out = jax.jit(lambda x, q: jgg.grouped_qmm(
        x, q, jnp.array([10, 10, 10]), preferred_element_type="float32"
    ))(x, jgg.prepack(q))  # fmt: skip
    want = oracle.grouped_qmm(x, q, [10, 10, 10])
    oracle.assert_close(out, want, k=256, tolerance=4e-4 if mode == "fp8" else None)


def test_options(rng):
    sizes = np.array(SIZES["64"])
    q = weight(rng, "affine", 4, 64, len(sizes), 192, 320)
    x = oracle.random(rng, (sizes.sum(), 320), "float16")
    bias, scale = oracle.random(rng, (len(sizes), 192), "float16"), oracle.random(rng, len(x))
    f = lambda x, q, bias, scale: jgg.grouped_qmm(
        x, q, jnp.asarray(sizes), bias=bias, activation="silu", row_scale=scale
    )
    out, kernels = run(jax.jit(f), x, jgg.prepack(q), bias, scale)
    assert sum(PACKED in name for name in kernels) == 1
    want = oracle.grouped_qmm(x, q, sizes) + np.repeat(oracle.f64(bias), sizes, axis=0)
    want = want / (1 + np.exp(-want)) * oracle.f64(scale)[:, None]
    assert out.dtype == jnp.float16
    oracle.assert_close(out, want)
