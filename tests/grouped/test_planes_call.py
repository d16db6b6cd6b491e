"""jgg_planes against the definition of planes, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_groupgemm._grouped import call as grouped_call
from jax_groupgemm._grouped import planes

AXES = [(-1, -1), (-1, -2), (None, None), (-1, None)]


def special(rng, shape):
    a = rng.standard_normal(shape).astype(np.float32) * 10.0 ** rng.integers(-25, 30, shape)
    flat = a.reshape(-1).astype(np.float32)
    flat[:6] = np.inf, -np.inf, np.nan, 0.0, -0.0, np.finfo(np.float32).max
    flat[6:9] = 1.0, 1.5, -(2.0**-100)  # rests that are zero
    return flat.reshape(shape)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("axes", AXES)
def test_planes(rng, count, axes):
    shapes = [(37, 104), (3, 30, 40)]
    if axes[0] == -1:
        shapes[0] = (37, 101)
    if axes[1] == -1:
        shapes[1] = (3, 30, 37)
    operands = [special(rng, shape) for shape in shapes]
    multiple = 64
    call = jax.jit(lambda a, b: grouped_call.in_planes(count, multiple, (a, axes[0]), (b, axes[1])))
    got = call(*operands)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = [
            planes.as_planes(jnp.asarray(a), count, multiple, axis)
            for a, axis in zip(operands, axes, strict=True)
        ]
    for g, w in zip(got, want, strict=True):
        assert g.dtype == jnp.bfloat16
        g, w = (np.asarray(v).view(np.uint16) for v in (g, w))
        nan = (w & 0x7FFF) > 0x7F80
        np.testing.assert_array_equal((g & 0x7FFF) > 0x7F80, nan)
        np.testing.assert_array_equal(g[~nan], w[~nan])
