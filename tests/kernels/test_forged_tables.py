"""Segment tables that nobody checked, as an exported module may hold.

On a GPU, a segment that names rows or a weight that do not exist contributes nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_groupgemm._core.products import Mm, Wgrad
from jax_groupgemm._core.segments import Form, Metadata
from jax_groupgemm._grouped import primitives
from jax_groupgemm._kernels import extension

BIG = 2**31 - 1
ROWS_X, ROWS_Y, G, K, N = 96, 80, 3, 64, 72
#: [x_start, y_start, length, weight]; the first is whole.
FORGED = [
    [0, 0, 40, 1], [-8, 40, 10, 0], [ROWS_X - 3, 40, 4, 0], [BIG, 40, 8, 0], [5, -1, 7, 0],
    [5, ROWS_Y - 1, 2, 0], [5, 40, BIG, 0], [5, 40, -4, 0], [5, 40, 8, G], [5, 40, 8, -1],
    [-(2**31), -(2**31), -(2**31), -(2**31)], [50, 48, 16, 2],
]  # fmt: skip


def live():
    """Those that the operands have."""
    for x, y, length, weight in FORGED:
        exists = 0 <= x <= ROWS_X - length and 0 <= y <= ROWS_Y - length and 0 <= weight < G
        if exists and length > 0:
            yield slice(x, x + length), slice(y, y + length), weight


@pytest.mark.gpu
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_on_gpus(rng, kernel, dtype, ordered):
    if kernel == "sm90" and 90 not in extension.live_capabilities():
        pytest.skip("needs a Hopper GPU")
    if kernel == "sm90" and not ordered:
        pytest.skip("it takes segments in order")
    table = Metadata(
        Form("segments", ordered_x=ordered, ordered_y=ordered, aligned=False), jnp.array(FORGED)
    )
    x, y = oracle.random(rng, (ROWS_X, K), dtype), oracle.random(rng, (ROWS_Y, N), dtype)
    w = oracle.random(rng, (G, K, N), dtype)
    mm = Mm(rows=ROWS_Y, out_dtype="float32", implementation=kernel)
    want = np.zeros((ROWS_Y, N))
    for of_x, of_y, weight in live():
        want[of_y] += oracle.f64(x)[of_x] @ oracle.f64(w)[weight]
    got = jax.jit(lambda x, w: primitives.mm(x, w, table, mm))(x, w)
    oracle.assert_close(got, want, tolerance=1e-5)
    wgrad = Wgrad(groups=G, out_dtype="float32", implementation=kernel)
    want = np.zeros((G, K, N))
    for of_x, of_y, weight in live():
        want[weight] += oracle.f64(x)[of_x].T @ oracle.f64(y)[of_y]
    if kernel == "sm80":
        got = jax.jit(lambda x, y: primitives.wgrad(x, y, table, wgrad))(x, y)
        oracle.assert_close(got, want, tolerance=1e-5)


def test_a_table_names_what_is_there():
    """Two of them, so the test above has something to find."""
    assert len(list(live())) == 2
