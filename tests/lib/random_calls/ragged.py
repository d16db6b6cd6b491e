"""Random calls of ``ragged_dot_general`` in its three modes, with axes in any order.

An axis has a letter: b of batches, x and i before and behind the ragged one (m or, where it is
contracted, k), k of what is contracted, n of columns, g of groups. Of axes that may be several the
second is the capital letter.
"""

import fuzz
import numpy as np
import oracle
from jax import lax

import jax_groupgemm as jgg

from .call import Call, as_drawn, fixed_dtype, has_nan, num, pick, some_operands, with_operands


def some_axes(rng, letters: str, most: int) -> str:
    return letters[: int(rng.integers(0, most + 1))]


def some_words(rng, mode: str) -> tuple[str, str, str, dict[str, str]]:
    """Axes of lhs and rhs as they are stored, the ragged one, and those of each part."""
    batch = some_axes(rng, "bB", 2)
    columns, contracted = some_axes(rng, "nN", 2), pick(rng, ["k", "kK"])
    if mode == "kept":
        outer, inner = some_axes(rng, "x", 1), some_axes(rng, "i", 1)
        left, right, ragged = (
            batch + outer + "m" + inner + contracted,
            "g" + batch + contracted,
            "m",
        )
    elif mode == "contracted":
        outer, inner = some_axes(rng, "x", 1), some_axes(rng, "i", 1)
        contracted = outer + "k" + inner
        left, right, ragged = batch + contracted + some_axes(rng, "mM", 2), batch + contracted, "k"
    else:
        batch, outer, inner = batch or "b", "", ""
        left, right, ragged = batch + some_axes(rng, "mM", 2) + contracted, batch + contracted, ""
        ragged = pick(rng, list(batch))
    mixed = lambda word: "".join(rng.permutation(list(word)).tolist())
    left, right = mixed(left), mixed(right + columns)
    if mode == "kept":  # which axes are outer follows from their order in lhs
        rows = "".join(a for a in left if a in outer + "m" + inner)
        outer, inner = rows.split("m")
    parts = {"batch": mixed(batch), "contracted": contracted, "outer": outer, "inner": inner}
    if mode != "contracted":  # where their order says which of them are outer
        parts["contracted"] = mixed(contracted)
    return left, right, ragged, parts


def dimension_numbers(left, right, ragged, parts) -> lax.RaggedDotDimensionNumbers:
    at = lambda word, axes: [word.index(a) for a in axes]
    both = lambda axes: (at(left, axes), at(right, axes))
    return lax.RaggedDotDimensionNumbers(
        (both(parts["contracted"]), both(parts["batch"])), [left.index(ragged)],
        [right.index("g")] if "g" in right else [],
    )  # fmt: skip


def ragged_dot_general(rng) -> Call:
    mode = pick(rng, ["kept", "kept", "contracted", "contracted", "batch"])
    left, right, ragged, parts = some_words(rng, mode)
    sizes = {a: int(pick(rng, [1, 2, 2, 3, 4, 5, 8])) for a in left + right}
    sizes[ragged] = int(pick(rng, [1, 4, 7, 8, 16, 17]))
    shape = lambda word: tuple(sizes[a] for a in word)
    of, cast = some_operands(rng, of_jax=True), fixed_dtype(rng)
    numbers = dimension_numbers(left, right, ragged, parts)
    groups = sizes.get("g", int(rng.integers(1, 5)))
    total, offset = fuzz.some_offset(rng, groups) if mode != "batch" else (groups, None)
    lead = shape(parts["batch"] + parts["outer"]) if rng.integers(2) and mode != "batch" else ()
    rows = sizes[ragged]
    count = int(np.prod(lead, dtype=int))

    def data():
        drawn = [fuzz.some_sizes(rng, total, rows) for _ in range(count)]
        m = [cast(np.reshape(drawn, (*lead, total)))]
        if offset is not None:
            m.append(np.int32(rng.integers(-4, groups + 6)))
        return m

    def members(m):
        """Whether a group here has a row: (batch, outer, group, row)."""
        first = None if offset is None else int(m[1])
        here = groups if mode == "kept" else total
        problems = np.reshape(m[0], (count, -1))
        out = np.zeros((count, here, rows), np.int64)
        for i, of_one in enumerate(problems):
            for j, (start, end) in enumerate(oracle.local_bounds(of_one, rows, here, first)):
                out[i, j, start:end] = 1
        out = out.reshape(*(lead or [1] * len(parts["batch"] + parts["outer"])), here, rows)
        return np.broadcast_to(out, (*shape(parts["batch"] + parts["outer"]), here, rows))

    @lambda function: as_drawn(of, function)
    def run(p, m):
        return jgg.ragged_dot_general(
            p[0], p[1], m[0], numbers, preferred_element_type=of.out,
            group_offset=m[1] if offset is not None else None,
        )  # fmt: skip

    @lambda function: as_drawn(of, function)
    def want(p, m):
        kept = "".join(a for a in left if a not in parts["contracted"] + parts["batch"])
        columns = "".join(a for a in right if a not in left and a != "g")
        out = parts["batch"] + kept + columns
        a, b = num(p[0]), num(p[1])
        if mode == "batch":
            return np.einsum(f"{left},{right}->{out}", a, b)
        word = parts["batch"] + parts["outer"] + "g" + ragged
        one = members(m)
        # What is in no group is nowhere.
        a = of_members(a, left, one.any(-2), word.replace("g", ""))
        if mode == "kept":
            return np.einsum(f"{left},{right},{word}->{out}", a, b, one)
        b = of_members(b, right, one.any(-2), word.replace("g", ""))
        return np.einsum(f"{left},{right},{word}->g{out}", a, b, one)

    def poison(a, b, m):
        word = parts["batch"] + parts["outer"] + ragged
        there = members(m).any(-2)
        if mode == "batch":
            return a, b
        spoil = lambda v, axes: (
            v if not has_nan(v.dtype) else of_members(v, axes, there, word, np.nan)
        )
        return spoil(a, left), b if mode == "kept" else spoil(b, right)

    k = int(np.prod(shape(parts["contracted"]), dtype=int)) * groups
    return Call(
        f"ragged_dot_general {mode} {left},{right} ragged {ragged} {parts} {of} {lead}", run, want,
        with_operands(rng, of, [shape(left), shape(right)], data, poison, [1, k**-0.5]),
        k * sizes[ragged], of.result, letters=[left, right],
    )  # fmt: skip


def of_members(values, axes: str, there, word: str, other=0):
    """``values`` where ``there`` (with axes ``word``) says so, ``other`` elsewhere."""
    order = [word.index(a) for a in axes if a in word]
    there = there.transpose(order)
    there = there.reshape([n if a in word else 1 for a, n in zip(axes, values.shape, strict=True)])
    return np.where(there, values, np.asarray(other).astype(values.dtype))
