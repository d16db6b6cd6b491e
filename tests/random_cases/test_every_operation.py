"""Every operation with random shapes, dtypes, layouts, metadata and options, under random
transformations, against float64 in numpy.

A program is compiled once and tried with several draws. ``--fuzz N`` compiles N of them, otherwise
one for each operation runs daily and the rest weekly. A failure names its seed:
``JGG_CASE=operation:seed pytest tests/random_cases/test_every_operation.py`` runs it alone.
"""

import os
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import random_calls

PATTERNS = 3  # draws that one compiled program is tried with
CASES = 10  # programs of one test
WEEKLY = 60  # programs of each operation
SLOW = ("nvfp4_grouped_linear", "nvfp4_quantize", "fp8_grouped_linear", "fp8_quantize")
STEP = 1e-6  # of first differences


def pytest_generate_tests(metafunc):
    if "first" not in metafunc.fixturenames:
        return
    named = os.environ.get("JGG_CASE")
    if named:
        name, _, seed = named.partition(":")
        metafunc.parametrize(("name", "first", "count"), [(name, int(seed), 1)])
        return
    total = metafunc.config.getoption("--fuzz")
    per_operation = WEEKLY if total is None else -(-total // len(random_calls.CALLS))
    weekly = [] if total is not None else [pytest.mark.weekly]
    cases = [
        pytest.param(name, first, min(CASES, per_operation - first), marks=weekly)
        for name in random_calls.CALLS
        for first in range(1 if total is None else 0, per_operation, CASES)
    ]
    if total is None:  # one program daily, but where it takes seconds to compile
        cases += [
            pytest.param(name, 0, 1, marks=weekly if name in SLOW else [])
            for name in random_calls.CALLS
        ]
    metafunc.parametrize(("name", "first", "count"), cases)


def test_random_cases(name, first, count):
    for seed in range(first, first + count):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        call = None
        try:
            with jax.numpy_dtype_promotion("standard"):
                call = random_calls.CALLS[name](rng)
                how = one_case(rng, call)
        except Exception as error:
            error.add_note(f"JGG_CASE={name}:{seed}  ({'' if call is None else call.name})")
            raise
        assert how


def one_case(rng, call) -> str:
    """Values, alone or under one transformation, of which most compare values too."""
    how = random_calls.pick(rng, TRANSFORMS[call.transforms])
    if how in (jvp, vjp, vjp_of_batch, second) and not call.draw(True)[0]:
        how = batch if call.transforms != "alone" else plain
    if how is second and not call.smooth:
        how = vjp
    try:
        how(rng, call)
    except Exception as error:
        error.add_note(how.__name__)
        raise
    return how.__name__


def arrays(p, m):
    return [jnp.asarray(a) for a in p], [jnp.asarray(a) for a in m]


def compare(call, got, p, m):
    if call.dtype is None:
        return call.want([np.asarray(a) for a in got], p, m)
    want = call.want(p, m)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == call.dtype, (got.dtype, call.dtype)
    close(got, want, call.dtype, call)
    return None


def close(got, want, dtype, call, floor=0.0, slack=1.0):
    """The norm of the error, against that of the result, or what it usually is."""
    got = oracle.f64(got)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    got, want = got[~nan], want[~nan]
    if jnp.dtype(dtype).name == "float16":  # which saturates
        far = abs(want) > 6e4
        got, want = got[~far], want[~far]
    assert np.isfinite(got).all()
    usual = np.sqrt(np.count_nonzero(want)) * 1e-1 + floor
    tolerance = oracle.TOLERANCE[jnp.dtype(dtype).name] * max(1, (call.k / 512) ** 0.5)
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), usual, 1e-30)
    allowed = 4 * tolerance * call.tolerance * slack
    assert error <= allowed, (error, allowed)


def plain(rng, call):
    run = call.run if rng.integers(3) == 0 else jax.jit(call.run)
    for _ in range(PATTERNS):
        p, m = call.draw(True)
        compare(call, run(*arrays(p, m)), p, m)


def jvp(rng, call):
    @jax.jit
    def run(x, v, data):
        f = lambda *x: call.run(list(x), data)
        return jax.jvp(f, tuple(x), tuple(v))

    for _ in range(PATTERNS):
        p, m = call.draw(True)
        v = [rounded(d, np.asarray(a).dtype) for a, d in zip(p, directions(rng, p), strict=True)]
        x, data = arrays(p, m)
        out, dot = run(x, [jnp.asarray(d) for d in v], data)
        compare(call, out, p, m)
        v = [oracle.f64(d) for d in v]
        want = (call.want(along(p, v, STEP), m) - call.want(along(p, v, -STEP), m)) / (2 * STEP)
        close(dot, want, narrowest(call, p), call, floor=1.0, slack=4.0)


def vjp(rng, call):
    def both(x, ct, data):
        out, back = jax.vjp(lambda x: call.run(x, data), x)
        return out, back(ct)[0]

    run = both if rng.integers(4) == 0 else jax.jit(both)
    for _ in range(PATTERNS):
        p, m = call.draw(True)
        x, data = arrays(p, m)
        ct = cotangent(rng, call, p, m)
        out, grads = run(x, jnp.asarray(ct), data)
        compare(call, out, p, m)
        check_gradient(rng, call, p, m, ct, grads)


def check_gradient(rng, call, p, m, ct, grads):
    """By its product with random directions, of one operand or one line of it at a time."""
    grads, y = [oracle.f64(g) for g in grads], call.want(p, m)
    assert [g.shape for g in grads] == [np.shape(a) for a in p]
    if not np.isfinite(y).all():  # max_rows was too few: all is NaN
        return
    assert all(np.isfinite(g).all() for g in grads)
    phi = lambda p: float((call.want(p, m) * oracle.f64(ct)).sum())
    tolerance = oracle.TOLERANCE[narrowest(call, p)] * max(1, (call.k / 512) ** 0.5)
    usual = np.linalg.norm(oracle.f64(ct))
    for i, g in enumerate(grads):
        v = [np.zeros(np.shape(a)) for a in p]
        v[i] = rng.standard_normal(np.shape(p[i]))
        if v[i].ndim and len(v[i]) and rng.integers(2):
            v[i][np.arange(len(v[i])) != rng.integers(len(v[i]))] = 0
        want = (phi(along(p, v, STEP)) - phi(along(p, v, -STEP))) / (2 * STEP)
        got = float((g * v[i]).sum())
        # Or as much as ct alone may make of one unit in every direction.
        size = max(np.linalg.norm(g[v[i] != 0]), 0.1 * usual * min(1, np.linalg.norm(v[i])))
        allowed = 6 * call.tolerance * tolerance * size + 1e-6 * max(abs(want), usual)
        assert abs(got - want) <= allowed, (i, got, want, allowed)


def mapping(rng, call):
    """The size of a batch and how each operand is mapped; there are so many that are
    differentiated."""
    p, m = call.draw(False)
    dims = [random_calls.pick(rng, [None, 0, 0, -1]) for _ in [*p, *m]]
    if call.tied:
        dims[len(p) :] = [dims[-1]] * len(m)
    if all(d is None for d in dims):
        dims[: len(p) or None] = [0] * (len(p) or len(dims))
    return int(rng.integers(1, 4)), dims, len(p)


def examples(call, count, dims):
    """The operands of each example, and of all: those that are not mapped are the first's."""
    parts = [[*p, *m] for p, m in (call.draw(False) for _ in range(count))]
    for i, d in enumerate(dims):
        for one in parts if d is None else ():
            one[i] = parts[0][i]
    stacked = [
        jnp.asarray(of[0] if d is None else np.stack(of, axis=d))
        for of, d in zip(zip(*parts, strict=True), dims, strict=True)
    ]
    return parts, stacked


def batch(rng, call):
    count, dims, floats = mapping(rng, call)
    f = lambda *a: call.run(list(a[:floats]), list(a[floats:]))
    run = jax.jit(jax.vmap(f, in_axes=tuple(dims)))
    for _ in range(2):
        parts, stacked = examples(call, count, dims)
        out = run(*stacked)
        for i, one in enumerate(parts):
            compare(call, jax.tree.map(lambda a, i=i: a[i], out), one[:floats], one[floats:])


def vjp_of_batch(rng, call):
    """Each example's own gradient, also in what examples share."""
    count, dims, floats = mapping(rng, call)

    def grads(ct, *a):
        return jax.vjp(lambda p: call.run(p, list(a[floats:])), list(a[:floats]))[1](ct)[0]

    run = jax.jit(jax.vmap(grads, in_axes=(0, *dims)))
    for _ in range(2):
        parts, stacked = examples(call, count, dims)
        cts = np.stack([cotangent(rng, call, one[:floats], one[floats:]) for one in parts])
        out = run(jnp.asarray(cts), *stacked)
        for i, one in enumerate(parts):
            check_gradient(rng, call, one[:floats], one[floats:], cts[i], [a[i] for a in out])


def second(rng, call):
    """The derivative of a gradient along a direction, by second differences."""
    p, m = call.draw(False)
    if any(np.asarray(a).dtype != np.float32 for a in p) or call.dtype != "float32":
        return vjp(rng, call)  # differences of what is rounded say little
    x, data = arrays(p, m)
    ct = cotangent(rng, call, p, m)
    v, u = directions(rng, p), directions(rng, p)
    phi = lambda x: (call.run(x, data) * ct).sum()
    tangents = [jnp.asarray(d, jnp.float32) for d in v]
    _, dots = jax.jit(lambda x, t: jax.jvp(jax.grad(phi), (x,), (t,)))(x, tangents)
    got = sum(float((oracle.f64(d) * e).sum()) for d, e in zip(dots, u, strict=True))
    at = lambda a, b: float((call.want(along(along(p, v, a), u, b), m) * oracle.f64(ct)).sum())
    h = 1e-4
    want = (at(h, h) - at(h, -h) - at(-h, h) + at(-h, -h)) / (4 * h**2)
    if np.isfinite(want):
        size = np.sqrt(sum(np.linalg.norm(oracle.f64(d)) ** 2 for d in dots))
        allowed = 1e-4 * call.tolerance * size + 1e-6 * (abs(at(0, 0)) + np.linalg.norm(ct))
        assert abs(got - want) <= allowed, (got, want, allowed)
    return None


def directions(rng, p):
    return [rng.standard_normal(np.shape(a)) for a in p]


def rounded(values, dtype):
    return values.astype(np.float32).astype(jnp.dtype(dtype))


def cotangent(rng, call, p, m):
    return rounded(rng.standard_normal(call.want(p, m).shape), call.dtype)


def along(p, v, step):
    """``p + step * v``; NaN stays."""
    return [oracle.f64(a) + step * d for a, d in zip(p, v, strict=True)]


def narrowest(call, p) -> str:
    """The dtype that a derivative is rounded to, at worst."""
    names = [call.dtype, *(np.asarray(a).dtype.name for a in p)]
    return max(names, key=lambda name: oracle.TOLERANCE[jnp.dtype(name).name])


TRANSFORMS = {
    "all": [plain, plain, jvp, vjp, batch, vjp_of_batch, second],
    "reverse": [plain, vjp, batch, vjp_of_batch],
    "checked": [batch, plain],
    "alone": [plain],
}
