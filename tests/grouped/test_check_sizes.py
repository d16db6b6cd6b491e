"""check_sizes, for debugging: outside of a program, and in one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_groupgemm as jgg

WRONG = [
    ([3, -2, 1], "group_sizes[1] is -2, a number of rows"),
    ([3, 9], "group_sizes add up to 12, more than the 10 rows"),
    (np.full(3, 100, np.int8), "group_sizes add up to 300, more than the 10 rows"),
]


@pytest.mark.parametrize("sizes", [[3, 0, 5], [10], [], np.array([5, 5], np.uint8)])
def test_right_sizes_come_back(sizes):
    np.testing.assert_array_equal(jgg.check_sizes(sizes, 10), sizes)
    f = jax.jit(lambda s: jgg.check_sizes(s, 10))
    np.testing.assert_array_equal(f(jnp.asarray(sizes, jnp.int32)), sizes)
    jax.effects_barrier()


@pytest.mark.parametrize(("sizes", "sentence"), WRONG)
def test_wrong_sizes(sizes, sentence):
    with pytest.raises(ValueError, match=f"^jgg.check_sizes: {re.escape(sentence)}$"):
        jgg.check_sizes(sizes, 10)


@pytest.mark.parametrize(("sizes", "sentence"), WRONG)
def test_wrong_sizes_in_a_program(sizes, sentence):
    x, w = jnp.ones((10, 2)), jnp.ones((len(sizes), 2, 3))

    @jax.jit
    def f(sizes):
        return jgg.grouped_mm(x, w, jgg.check_sizes(sizes, x.shape[0]))

    def run():
        jax.block_until_ready(f(jnp.asarray(sizes)))
        jax.effects_barrier()

    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(sentence)):
        run()


def test_errors():
    with pytest.raises(TypeError, match=r"^jgg.check_sizes: rows must be an int, got 2.0$"):
        jgg.check_sizes([1], 2.0)
    with pytest.raises(TypeError, match=r"group_sizes must hold integers, got dtype float32$"):
        jgg.check_sizes([1.0], 2)
