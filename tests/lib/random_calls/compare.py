"""What a result and a derivative of a ``Call`` are compared with, and by how much they may differ.

Derivatives are compared with differences of ``Call.want``, along random directions.
"""

import jax.numpy as jnp
import numpy as np
import oracle

from .call import is_inexact, num, wrapped

STEP = 1e-6  # of first differences
# A dtype's own rounding, as in oracle.TOLERANCE. Differences of float64 say no more than 1e-8.
TOLERANCE = {
    **oracle.TOLERANCE, "complex64": 1e-6, "complex128": 1e-14, "float8_e4m3fn": 0.04,
    "float8_e5m2": 0.08,
}  # fmt: skip
DIFFERENCES = 1e-8


def tolerance_of(dtype, call) -> float:
    return TOLERANCE[jnp.dtype(dtype).name] * max(1, (call.k / 512) ** 0.5)


def compare(call, got, p, m):
    if call.dtype is None:
        return call.want([np.asarray(a) for a in got], p, m)
    want = call.want(p, m)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == call.dtype, (got.dtype, call.dtype)
    if is_inexact(call.dtype):
        close(got, want, call.dtype, call)
    else:
        np.testing.assert_array_equal(num(got), wrapped(want, call.dtype))
    return None


def close(got, want, dtype, call, floor=0.0, slack=1.0, least=0.0):
    """The norm of the error, against that of the result, or what it usually is."""
    got = num(got)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    got, want = got[~nan], want[~nan]
    if jnp.dtype(dtype).name == "float16":  # which saturates
        far = abs(want) > 6e4
        got, want = got[~far], want[~far]
    assert np.isfinite(got).all()
    usual = np.sqrt(np.count_nonzero(want)) * 1e-1 + floor
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), usual, 1e-30)
    allowed = 4 * max(tolerance_of(dtype, call), least) * call.tolerance * slack
    assert error <= allowed, (error, allowed)


def check_tangent(call, dot, p, m, v):
    v = [num(d) for d in v]
    want = (call.want(along(p, v, STEP), m) - call.want(along(p, v, -STEP), m)) / (2 * STEP)
    close(dot, want, narrowest(call, p), call, floor=1.0, slack=4.0, least=DIFFERENCES)


def check_gradient(rng, call, p, m, ct, grads):
    """By its product with random directions, of one operand or one line of it at a time. JAX's
    gradient of a complex operand is the transpose, without conjugation; a real operand's is the
    real part."""
    grads, y = [num(g) for g in grads], call.want(p, m)
    assert [g.shape for g in grads] == [np.shape(a) for a in p]
    if not np.isfinite(y).all():  # max_rows was too few: all is NaN
        return
    assert all(np.isfinite(g).all() for g in grads)
    phi = lambda p: (call.want(p, m) * num(ct)).sum()
    tolerance = max(tolerance_of(narrowest(call, p), call), DIFFERENCES)
    usual = np.linalg.norm(num(ct))
    for i, g in enumerate(grads):
        v = [np.zeros(np.shape(a)) for a in p]
        v[i] = direction(rng, p[i])
        if v[i].ndim and len(v[i]) and rng.integers(2):
            v[i][np.arange(len(v[i])) != rng.integers(len(v[i]))] = 0
        want = (phi(along(p, v, STEP)) - phi(along(p, v, -STEP))) / (2 * STEP)
        got = (g * v[i]).sum()
        if not np.iscomplexobj(g):
            want = want.real
        # Or as much as ct alone may make of one unit in every direction.
        size = max(np.linalg.norm(g[v[i] != 0]), 0.1 * usual * min(1, np.linalg.norm(v[i])))
        allowed = 6 * call.tolerance * tolerance * size + 1e-6 * max(abs(want), usual)
        assert abs(got - want) <= allowed, (i, got, want, allowed)


def direction(rng, a) -> np.ndarray:
    v = np.asarray(rng.standard_normal(np.shape(a)))
    return v + 1j * rng.standard_normal(v.shape) if np.asarray(a).dtype.kind == "c" else v


def directions(rng, p) -> list[np.ndarray]:
    return [direction(rng, a) for a in p]


def rounded(values, dtype) -> np.ndarray:
    dtype = jnp.dtype(dtype)
    if dtype.kind == "c" or dtype == np.float64:
        return np.asarray(values).astype(dtype)
    return np.asarray(values).astype(np.float32).astype(dtype)


def cotangent(rng, call, p, m) -> np.ndarray:
    return rounded(direction(rng, np.zeros(call.want(p, m).shape, call.dtype)), call.dtype)


def along(p, v, step) -> list[np.ndarray]:
    """``p + step * v``; NaN stays."""
    return [num(a) + step * d for a, d in zip(p, v, strict=True)]


def narrowest(call, p) -> str:
    """The dtype that a derivative is rounded to, at worst."""
    names = [call.dtype, *(np.asarray(a).dtype.name for a in p)]
    return max(names, key=lambda name: TOLERANCE[jnp.dtype(name).name])
