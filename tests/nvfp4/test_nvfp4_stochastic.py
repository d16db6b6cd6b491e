"""Stochastic rounding of ``nvfp4_quantize``: its random numbers, its mean, its keys."""

import jax
import jax.numpy as jnp
import numpy as np
import nvfp4_oracle
import oracle
import pytest
from nvfp4_quantize_cases import F32, SHAPE

import jax_groupgemm as jgg
from jax_groupgemm._quantized import philox

pytestmark = pytest.mark.default_device


def test_philox():
    """Random123's known answers, and Python's integers."""
    ones = 0xFFFFFFFF
    for counter, key, want in (
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ones,) * 4, (ones,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ):  # fmt: skip
        got = philox.philox(*(tuple(map(np.uint32, v)) for v in (counter, key)))
        assert tuple(map(int, got)) == tuple(nvfp4_oracle.philox(counter, key)) == want


def test_random_bits_and_block_numbers(rng):
    key = rng.integers(0, 2**32, 2, np.uint32)
    got = np.asarray(jax.jit(philox.sixteen_bits, static_argnums=0)((5, 3, 7), tuple(key)))
    want = [nvfp4_oracle.sixteen_bits(b, key.tolist()) for b in range(105)]
    np.testing.assert_array_equal(got.reshape(105, 16), want)
    row, column = rng.integers(0, 2**32, (2, 99), np.uint32)
    for columns in (1, 7, 2**20 + 3, 2**32 - 1):
        low, high = philox.number(row, columns, column)
        got = [int(a) << 32 | int(b) for a, b in zip(high, low, strict=True)]
        assert got == [int(r) * columns + int(c) for r, c in zip(row, column, strict=True)]


def test_stochastic_rounding_is_unbiased():
    """Blocks whose scale is 256: elements are 256 times a number between two of e2m1."""
    constants = np.array([6, 0.01, 0.25, 0.3, 0.7, 1.2, 1.9, 2.1, 2.75, 3.3, 3.9, 4.2, 5, 5.9, -2.5,
                          -0.05])  # fmt: skip
    exact = np.array([6, 0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
    x = np.tile(np.stack([constants, exact]), (2048, 1)) * 256
    x[0, 0] = 2688  # so that the global scale is 1
    x = x.astype(F32)
    draws = [jgg.nvfp4_quantize(x, stochastic_rounding_key=jax.random.key(i)) for i in range(4)]
    values = np.stack([oracle.f64(jgg.dequantize(q)) for q in draws])[:, 2:] / 256
    np.testing.assert_array_equal(values[:, 1::2], np.broadcast_to(exact, values[:, 1::2].shape))
    values = values[:, ::2].reshape(-1, 16)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for value, drawn in zip(constants[1:], values.T[1:], strict=True):
        low, high = grid[grid <= abs(value)][-1], grid[grid > abs(value)][0]
        assert set(np.unique(abs(drawn))) == {low, high}
        error = np.sqrt((abs(value) - low) * (high - abs(value)) / len(drawn))
        assert abs(drawn.mean() - value) < 4.5 * error, value
    # Neighbours are independent: as often both up as their chances say.
    up = values[:, 8] == 3
    for other, value in ((values[:, 9] == 4, 0.3), (values[:, 7] == 3, 0.1)):
        both = 0.75 * value
        assert abs((up & other).mean() - both) < 4.5 * np.sqrt(both * (1 - both) / len(up))


def test_keys(rng):
    x = rng.standard_normal(SHAPE).astype(F32)
    quantize = lambda key: jgg.nvfp4_quantize(x, axis=0, stochastic_rounding_key=key).weight
    one, two = (np.asarray(quantize(jax.random.key(i))) for i in (1, 2))
    np.testing.assert_array_equal(one, quantize(jax.random.key(1)))
    np.testing.assert_array_equal(one, quantize(jax.random.PRNGKey(1)))
    assert (one != two).mean() > 0.5
    keys = jnp.stack([jax.random.key(1), jax.random.key(2)])
    np.testing.assert_array_equal(jax.vmap(quantize)(keys), np.stack([one, two]))
