"""A ``Call`` whose operands are divided among eight devices, whose mesh has explicit axes.

Either axes of one letter are divided alike, which has to work, or some operand's are not, which may
also be an error of the package that says so.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .call import Call, pick
from .compare import check_gradient, compare, cotangent
from .transforms import PATTERNS, mapping

DEVICES = 8
MESHES = [(8,), (2, 4), (4, 2), (2, 2, 2)]


def may_be_sharded(call: Call) -> bool:
    return call.letters is not None and call.transforms != "alone"


def one_case(rng, call: Call) -> str:
    """What was compared, or "refused" where an error was right."""
    shape = pick(rng, MESHES)
    names = tuple("abc"[: len(shape)])
    mesh = jax.make_mesh(
        shape, names, axis_types=(AxisType.Explicit,) * len(shape),
        devices=jax.devices()[:DEVICES],
    )  # fmt: skip
    differentiate = call.transforms in ("all", "reverse") and len(call.draw(True)[0]) > 0
    how = pick(rng, [values, gradients, gradients] if differentiate else [values])
    if call.transforms != "reverse" and rng.integers(4) == 0:
        how = of_batch
    specs, contradict = some_specs(rng, call, dict(zip(names, shape, strict=True)))
    # Within the mesh, what is on one device is whole on every one.
    within = jax.set_mesh(mesh) if rng.integers(2) else contextlib.nullcontext()
    note = f"{how.__name__} {dict(mesh.shape)} {specs}"
    try:
        with within:
            how(rng, call, mesh, specs)
    except (TypeError, ValueError) as error:
        # Nothing is packed for each device alone.
        packs = "within a vmap over an axis that is explicitly sharded" in str(error)
        if (contradict or packs) and str(error).startswith("jgg."):
            return "refused"
        # JAX drops operands that nothing depends on, as there are with no index, and the mesh goes
        # with the last of them.
        empty = any(0 in np.shape(a) for of in call.draw(True) for a in of)
        if empty and "Please enter your `jit` into a mesh context" in str(error):
            return "refused"
        error.add_note(note)
        raise
    except Exception as error:
        error.add_note(note)
        raise
    return how.__name__


def some_specs(rng, call: Call, mesh: dict[str, int]) -> tuple[list[list], bool]:
    """Mesh axes of each axis of each operand, and whether operands contradict each other."""
    p, m = call.draw(True)
    shapes = [np.shape(a) for a in (*p, *m)]
    words = [w + "." * len(s) for w, s in zip([*call.letters, *[""] * len(shapes)], shapes)]  # noqa: B905
    sizes: dict[str, list[int]] = {letter: [most] for letter, most in call.units.items()}
    for word, shape in zip(words, shapes, strict=True):
        for letter, n in zip(word, shape, strict=False):
            # Gate and up, of which each device has the same columns, are halves of H.
            of, n = ("F", n // 2 if n % 2 == 0 else 1) if letter == "H" else (letter, n)
            sizes.setdefault(of, []).append(n)
    owners: dict[str, list[str]] = {}
    for name, parts in mesh.items():
        held = lambda letter: int(np.prod([mesh[a] for a in owners.get(letter, [])], dtype=int))
        fit = [
            letter
            for letter, of in sizes.items()
            if letter != "." and all(n and n % (parts * held(letter)) == 0 for n in of)
        ]
        if fit and rng.integers(5):
            owners.setdefault(pick(rng, fit), []).append(name)
    entry = lambda letter: tuple(owners.get("F" if letter == "H" else letter, ())) or None
    specs = [[entry(a) for a in word[: len(s)]] for word, s in zip(words, shapes, strict=True)]
    used = [(i, j) for i, of in enumerate(specs) for j, e in enumerate(of) if e]
    if used and rng.integers(4) == 0:
        i, j = pick(rng, used)
        specs[i][j] = None
        return specs, True
    return specs, False


def put(rng, mesh, arrays, specs):
    """Operands; what is not sharded may stay on one device where a mesh is set."""
    alone = not jax.sharding.get_abstract_mesh().empty and rng.integers(2)
    return [
        jnp.asarray(a)
        if alone and not any(spec)
        else jax.device_put(np.asarray(a), NamedSharding(mesh, P(*spec)))
        for a, spec in zip(arrays, specs, strict=True)
    ]


def values(rng, call: Call, mesh, specs) -> None:
    floats = len(call.draw(True)[0])
    run = lambda *a: call.run(list(a[:floats]), list(a[floats:]))
    run = run if rng.integers(4) == 0 else jax.jit(run)
    for _ in range(PATTERNS):
        p, m = call.draw(True)
        compare(call, run(*put(rng, mesh, [*p, *m], specs)), p, m)


def gradients(rng, call: Call, mesh, specs) -> None:
    """Gradients are sharded as their operands are."""

    @jax.jit
    def run(p, ct, m):
        out, back = jax.vjp(lambda p: call.run(p, m), p)
        where = jax.typeof(out).sharding
        return out, back(ct if where.mesh.empty else jax.sharding.reshard(ct, where))[0]

    for _ in range(PATTERNS):
        p, m = call.draw(True)
        ct = cotangent(rng, call, p, m)
        given = put(rng, mesh, [*p, *m], specs)
        whole = jax.device_put(ct, NamedSharding(mesh, P()))
        out, grads = run(given[: len(p)], whole, given[len(p) :])
        compare(call, out, p, m)
        check_gradient(rng, call, p, m, ct, grads)
        for a, grad in zip(given, grads, strict=False):
            if any(jax.typeof(a).sharding.spec):
                assert grad.sharding.is_equivalent_to(a.sharding, a.ndim), (grad.sharding, a)


def of_batch(rng, call: Call, mesh, specs) -> None:
    """Mapped over an axis that is sharded: each device has problems of its own."""
    _, dims, floats = mapping(rng, call)
    axis, count = pick(rng, list(mesh.shape.items()))
    dims = [None if d is None else 0 for d in dims]
    # The axis that is mapped shards no other one.
    rest = [[None if e and axis in e else e for e in spec] for spec in specs]
    mapped = [spec if d is None else [axis, *spec] for d, spec in zip(dims, rest, strict=True)]
    f = lambda *a: call.run(list(a[:floats]), list(a[floats:]))
    run = jax.jit(jax.vmap(f, in_axes=tuple(dims)))
    parts = [[*p, *m] for p, m in (call.draw(False) for _ in range(count))]
    for i, d in enumerate(dims):
        for one in parts if d is None else ():
            one[i] = parts[0][i]
    stacked = [
        of[0] if d is None else np.stack(of)
        for of, d in zip(zip(*parts, strict=True), dims, strict=True)
    ]
    out = jax.device_get(run(*put(rng, mesh, stacked, mapped)))
    for i, one in enumerate(parts):
        compare(call, jax.tree.map(lambda a, i=i: a[i], out), one[:floats], one[floats:])
