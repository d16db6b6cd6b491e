"""Transformations under which a ``Call`` is compiled once and tried with several draws."""

import jax
import jax.numpy as jnp
import numpy as np

from .call import pick
from .compare import (
    along,
    check_gradient,
    check_tangent,
    compare,
    cotangent,
    directions,
    num,
    rounded,
)

PATTERNS = 3  # draws that one compiled program is tried with


def one_case(rng, call) -> str:
    """Values, alone or under one transformation, of which most compare values too."""
    how = pick(rng, TRANSFORMS[call.transforms])
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
        check_tangent(call, dot, p, m, v)


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


def mapping(rng, call):
    """The size of a batch and how each operand is mapped; there are so many that are
    differentiated."""
    p, m = call.draw(False)
    dims = [pick(rng, [None, 0, 0, -1]) for _ in [*p, *m]]
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
    wide = ("float32", "float64")
    if any(np.asarray(a).dtype not in wide for a in p) or call.dtype not in wide:
        return vjp(rng, call)  # differences of what is rounded say little
    x, data = arrays(p, m)
    ct = cotangent(rng, call, p, m)
    v, u = directions(rng, p), directions(rng, p)
    phi = lambda x: (call.run(x, data) * ct).sum()
    tangents = [jnp.asarray(d, a.dtype) for d, a in zip(v, x, strict=True)]
    _, dots = jax.jit(lambda x, t: jax.jvp(jax.grad(phi), (x,), (t,)))(x, tangents)
    got = sum(float((num(d) * e).sum()) for d, e in zip(dots, u, strict=True))
    at = lambda a, b: float((call.want(along(along(p, v, a), u, b), m) * num(ct)).sum())
    h = 1e-4
    want = (at(h, h) - at(h, -h) - at(-h, h) + at(-h, -h)) / (4 * h**2)
    if np.isfinite(want):
        size = np.sqrt(sum(np.linalg.norm(num(d)) ** 2 for d in dots))
        allowed = 1e-4 * call.tolerance * size + 1e-6 * (abs(at(0, 0)) + np.linalg.norm(ct))
        assert abs(got - want) <= allowed, (got, want, allowed)
    return None


TRANSFORMS = {
    "all": [plain, plain, jvp, vjp, batch, vjp_of_batch, second],
    "reverse": [plain, vjp, batch, vjp_of_batch],
    "checked": [batch, plain],
    "alone": [plain],
}
