"""NVFP4 products on Hopper: every way that a weight may take, weight gradients whole and in parts,
and which kernels run. Elsewhere K and N are too small for them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_runs import needs_hopper
from nvfp4_grouped_problems import (
    along_t,
    extreme,
    mm_oracle,
    positive,
    profiled,
    random,
    wgrad_oracle,
)
from test_quantize_call import lowered

import jax_groupgemm as jgg

pytestmark = [
    pytest.mark.gpu,
    needs_hopper,
]

# Sums of tensor cores are truncated. Rounded to bfloat16, numbers change by at most 2^-9.
SUMS, ROUNDED = 1e-5, 2e-3
N, K = 320, 192
# Sizes, rows past their sum, and what multiplies weights as they are stored. The mean number of
# rows chooses a tile; from 1024 on weights are repacked first, but where x is decoded in the order
# that the kernel of linear weights takes: K in whole 128, no scale of its own for each row.
STORED, PACKED = "LinearWeights", "PackedWeights"
CASES = {
    "few": ([0, 1, 15, 17, 0, 2, 0, 3], 6, STORED),
    "32": ([0, 1, 15, 17, 127, 0, 0, 5], 7, STORED),
    "64": ([0, 1, 15, 17, 127, 0, 90, 20], 10, STORED),
    "128": ([0, 1, 15, 17, 127, 0, 300, 90], 10, STORED),
    "most": ([0, 1, 15, 17, 127, 0, 900, 340], 9, STORED),
    "repacked": ([0, 1, 15, 17, 127, 0, 6000, 2000], 40, PACKED),
}


def times(part: str, names) -> int:
    return sum(part in name for name in names)


@pytest.mark.parametrize("k", [K, 384])
@pytest.mark.parametrize("case", CASES)
def test_mm(rng, case, k):
    """As stored and prepacked; results of both dtypes; NaN stays in its row or column."""
    sizes, tail, stored = CASES[case]
    end = sum(sizes)
    x = random(rng, end + tail, k, scale=positive(rng))
    w = random(rng, 8, N, k, scale=positive(rng, 8))
    # NaN in matrices 2, 3 and 0, which has no rows; in x in group 2's last row and in the tail.
    x = extreme(rng, x, nan=[(15, 5), (end, 0)], faint=20)
    w = extreme(rng, w, nan=[(2, 0, 0), (3, 9, 11), (0, 5, 5)], faint=(3, 7))
    alpha, bias = positive(rng, 8), oracle.random(rng, (8, N))
    own = dataclasses.replace(x, global_scale=positive(rng, end + tail))

    def products(x, own, packed, w, sizes, alpha, bias):
        mm = functools.partial(jgg.nvfp4_grouped_mm, group_sizes=sizes, alpha=alpha)
        return [
            (
                mm(x, w, bias=bias, preferred_element_type="float32"),
                mm(x, w, bias=bias),
                mm(own, w, preferred_element_type="float32"),
            )
            for w in (w, packed)
        ]

    packed = jgg.prepack(w)
    assert packed.layout == "sm90"
    results, ran = profiled(products, x, own, packed, w, jnp.array(sizes), alpha, bias)
    ordered = k % 128 == 0
    repacked = (1 if ordered else 3) if stored == PACKED else 0
    assert times(STORED, ran) == 3 - repacked, ran
    assert times(PACKED, ran) == 3 + repacked, ran
    assert (times("PrepackKernel", ran) > 0) == (repacked > 0), ran
    assert (times("OrderedDecoder", ran) > 0) == ordered, ran
    assert times("GemmSm80Kernel", ran) == 0, ran
    want, unbiased = mm_oracle(x, w, sizes, alpha, bias), mm_oracle(own, w, sizes, alpha)
    nan = np.zeros(want.shape, bool)
    nan[15] = nan[1:16, 0] = nan[16:33, 9] = True
    np.testing.assert_array_equal(np.isnan(want), nan)
    for biased, rounded, plain in results:
        assert rounded.dtype == "bfloat16"
        oracle.assert_close_but_nan(biased, want, SUMS)
        oracle.assert_close_but_nan(rounded, want, ROUNDED)
        oracle.assert_close_but_nan(plain, unbiased, SUMS)
        oracle.assert_close_but_nan(plain[20], unbiased[20], SUMS)
        oracle.assert_close_but_nan(plain[16:33, 7], unbiased[16:33, 7], SUMS)
        assert not any(np.asarray(out[end:]).any() for out in (biased, rounded, plain))


def test_mm_of_zeros(rng):
    """Of tensors whose largest magnitude is 0, and of others beside them."""
    sizes, rows = [0, 1, 15, 17, 127, 40], 205
    x, w = oracle.random(rng, (rows, K)), oracle.random(rng, (6, N, K)).at[3].set(0)

    def products(x, w, sizes):
        q = jgg.nvfp4_quantize(w)
        mm = lambda x, w: jgg.nvfp4_grouped_mm(x, w, sizes, preferred_element_type="float32")
        a, zeros = jgg.nvfp4_quantize(x), jgg.nvfp4_quantize(jnp.zeros_like(x))
        return a, q, [(mm(a, w), mm(zeros, w)) for w in (q, jgg.prepack(q))]

    (a, q, results), ran = profiled(products, x, w, jnp.array(sizes))
    assert (times(STORED, ran), times(PACKED, ran)) == (2, 2), ran
    assert float(q.global_scale[3]) == 0
    want = mm_oracle(a, q, sizes)
    for out, of_zeros in results:
        oracle.assert_close(out, want, tolerance=SUMS)
        assert not np.asarray(out)[16:33].any()
        assert not np.asarray(of_zeros).any()


def wgrad(x, dy, sizes, **options):
    return jgg.nvfp4_grouped_wgrad(x, dy, sizes, **options)


@pytest.mark.parametrize(
    ("n", "k", "sizes"),
    [
        (N, K, [0, 1, 15, 17, 127, 0, 300, 90]),
        (72, 40, [127, 17, 15, 1, 0]),
        (64, 128, [2500]),  # cut in parts, which are added up
    ],
)
def test_wgrad(rng, n, k, sizes):
    """NaN stays in its group's column; nothing comes from rows of no group."""
    rows, groups = sum(sizes) + 100, len(sizes)
    x, dy = (along_t(rng, columns, sizes, rows, positive(rng)) for columns in (k, n))
    big = int(np.argmax(sizes))
    block = int(np.asarray(x.positions)[sum(sizes[:big])]) // 16  # its first
    x = extreme(rng, x, nan=[(3, block), (4, -1)], faint=7)
    dy = extreme(rng, dy, nan=[(9, block)], faint=8)
    alpha = positive(rng, groups)
    out, ran = profiled(wgrad, x, dy, jnp.array(sizes), alpha=alpha)
    assert times("GemmSm90Kernel", ran) == 1, ran
    assert times("GemmSm80Kernel", ran) == times("QuantizedGemm", ran) == 0, ran
    text = lowered(functools.partial(wgrad, alpha=alpha), x, dy, jnp.array(sizes))
    assert ("scale = true" in text) == (groups > 1)
    want = wgrad_oracle(x, dy, sizes) * oracle.f64(alpha)[:, None, None]
    nan = np.zeros(want.shape, bool)
    nan[big, :, 3] = nan[big, 9] = True
    np.testing.assert_array_equal(np.isnan(want), nan)
    oracle.assert_close_but_nan(out, want, SUMS)
    oracle.assert_close_but_nan(out[..., 7], want[..., 7], SUMS)
    oracle.assert_close_but_nan(out[:, 8], want[:, 8], SUMS)
    assert not np.asarray(out)[np.array(sizes) == 0].any()


def test_wgrad_of_zeros(rng):
    sizes = jnp.array([0, 1, 15, 17, 127, 40])
    x, dy = oracle.random(rng, (205, K)), oracle.random(rng, (205, N))
    old = oracle.random(rng, (6, N, K))

    def gradients(x, dy, old, sizes):
        q = functools.partial(jgg.nvfp4_quantize, axis=0, group_sizes=sizes)
        zeros = q(jnp.zeros_like(x))
        return wgrad(zeros, q(dy), sizes), wgrad(zeros, q(dy), sizes, existing_out=old)

    (out, added), ran = profiled(gradients, x, dy, old, sizes)
    assert times("GemmSm90Kernel", ran) == 2, ran
    assert not np.asarray(out).any()
    np.testing.assert_array_equal(added, jax.device_get(old))
