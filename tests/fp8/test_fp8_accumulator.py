"""What the contract of FP8 products is worth: sums as Hopper's instructions make them break it, and
with promotion to float32 they keep it."""

import fp8_accumulator
import fp8_oracle
import numpy as np
import oracle
import pytest
from test_fp8_gpu import CONTRACT

PROMOTED = 128  # of k
KS = 2048, 7168, 16384
M, N = 12, 8


def codes(rng, rows, k, block):
    """Of normal data, and their scales."""
    return fp8_oracle.quantize(rng.standard_normal((rows, k)), block)


def sums(rng, k, every):
    """The error of codes that have one scale for each row: it does not matter where."""
    x, w = (oracle.f64(codes(rng, rows, k, (1, k))[0]) for rows in (M, N))
    return oracle.error(fp8_accumulator.product(x, w, every), x @ w.T)


def test_promotion_keeps_the_contract(rng):
    """Sums that are not promoted miss it, by more the longer k is: test_fp8_gpu.test_contract finds
    a kernel that forgets to."""
    alone = [sums(rng, k, None) for k in KS]
    assert 3 * CONTRACT < alone[0] < alone[1] < alone[2]
    for k in KS:
        assert 0.1 * CONTRACT < sums(rng, k, PROMOTED) < 0.8 * CONTRACT
    assert sums(rng, KS[-1], 4 * PROMOTED) > CONTRACT


def test_promotion_of_blocks(rng):
    """With a scale for each block, each partial sum times both."""
    k = KS[-1]
    x, x_scales = codes(rng, M, k, (1, PROMOTED))
    w, w_scales = codes(rng, N, k, (PROMOTED, PROMOTED))
    scales = x_scales.T[:, :, None] * w_scales.T[:, :, None]  # N is in one block
    assert scales.shape == (k // PROMOTED, M, 1)
    got = fp8_accumulator.product(oracle.f64(x), oracle.f64(w), PROMOTED, scales)
    values = (fp8_oracle.dequantize(*a) for a in (
        (x, x_scales, (1, PROMOTED)), (w, w_scales, (PROMOTED, PROMOTED)),
    ))  # fmt: skip
    want = next(values) @ next(values).T
    assert 0.1 * CONTRACT < oracle.error(got, want) < CONTRACT


@pytest.mark.parametrize("sign", [1, -1])
def test_what_an_addition_drops(sign):
    """All behind the 14th bit of the largest, toward zero; and behind the 14th of the sum."""
    large, last = sign * 1.0, sign * 2.0**-13
    of = lambda *addends: fp8_accumulator.added(np.array(addends))
    assert of(large, last) == large + last
    assert of(large, last / 2, last / 2) == large  # each alone
    assert of(large, -last / 2) == large
    assert of(large, large, last) == 2 * large
    assert of(large, -large, last / 2) == 0  # of the largest addend, not of what is left
    assert of(0.0, 0.0) == 0


def test_sums_of_many_bits_are_exact(rng):
    """Nothing but bits is in the way."""
    x, w = (rng.integers(-8, 9, (rows, 256)).astype(float) for rows in (M, N))
    for every in (None, PROMOTED):
        got = fp8_accumulator.product(x, w, every, bits=40)
        np.testing.assert_array_equal(got, x @ w.T)
