"""Random calls of products of arrays, with epilogues."""

import math

import moe_oracle
import numpy as np
import oracle

import jax_groupgemm as jgg

from .call import (
    ACTIVATIONS,
    GATED,
    KINKED,
    Call,
    as_drawn,
    fixed_dtype,
    floats_of,
    group_data,
    index_data,
    is_inexact,
    num,
    pick,
    poison_groups,
    poison_rows,
    size,
    some_operands,
    sometimes,
    with_operands,
)

# ---- epilogues ---------------------------------------------------------------------------------


def options_of(rng, t, g, n, dtype, out, existing=True, activations=True):
    """Names, shapes and dtypes of options, the activation and the columns of the result."""
    activation = sometimes(rng, pick(rng, ACTIVATIONS)) if activations else None
    if activation in GATED and n % 2:
        activation = None
    columns = n // 2 if activation in GATED else n
    given = {"bias": (g, n), "row_scale": (t,)}
    if existing:
        given["existing_out"] = (t, columns)
    names = [name for name in given if rng.integers(2)]
    dtypes = {"bias": dtype, "row_scale": dtype, "existing_out": out}
    return names, {n: given[n] for n in names}, dtypes, activation


def option_letters(names, activation) -> list[str]:
    """Gate and up are halves of N, which is not cut then."""
    n = "." if activation in GATED else "N"
    return [{"bias": f"G{n}", "row_scale": "T", "existing_out": f"T{n}"}[name] for name in names]


def epilogue(y, ranges, options, activation):
    y = y.astype(np.result_type(y, *map(num, options.values())))
    if "bias" in options:
        for (start, end), b in zip(ranges, num(options["bias"]), strict=True):
            y[start:end] += b
    with np.errstate(over="ignore"):
        y = moe_oracle.activate(y, activation)
    if "row_scale" in options:
        covered = np.zeros(len(y), bool)
        for start, end in ranges:
            covered[start:end] = True
        y = y * np.where(covered, num(options["row_scale"]), 0)[:, None]
    return y + num(options["existing_out"]) if "existing_out" in options else y


def some_precision(rng):
    return pick(rng, [None, None, "highest", "float32", "F32_F32_F32"])


# ---- products ----------------------------------------------------------------------------------


def by_group(x, w, ranges):
    """Rows of each range times its matrix, zeros elsewhere."""
    x, w = num(x), num(w)
    out = np.zeros((len(x), w.shape[2]), np.result_type(x, w))
    for (start, end), of in zip(ranges, w, strict=True):
        out[start:end] = x[start:end] @ of
    return out


def grouped_mm(rng) -> Call:
    t, k, n, g = size(rng), size(rng), size(rng), int(rng.integers(1, 7))
    of = some_operands(rng)
    transpose_w, precision = bool(rng.integers(2)), some_precision(rng)
    # An option has no more than the result holds.
    dtype = of.left if of.left == of.right and is_inexact(of.left) else of.result
    dtype = dtype if of.are_floats else of.result
    names, shapes, dtypes, activation = options_of(
        rng, t, g, n, dtype, of.result, activations=of.has_options
    )
    w_shape = (g, n, k) if transpose_w else (g, k, n)
    data, has_offset = group_data(rng, g, t)
    integers = not is_inexact(of.result)
    w_word = {True: "GNK", False: "GKN"}[transpose_w].replace(
        "N", "." if activation in GATED else "N"
    )

    def run(p, m):
        (x, w, *rest), m = ordered(p, m)
        return jgg.grouped_mm(
            x, w, m[0], group_offset=m[1] if has_offset else None, transpose_w=transpose_w,
            activation=activation, precision=precision, preferred_element_type=of.out,
            **dict(zip(names, rest, strict=True)),
        )  # fmt: skip

    def ordered(p, m):
        """Operands and options, and data. Where operands are data, so are integer options."""
        if of.are_floats:
            return p, m
        options = len(names) if integers else 0
        return [*m[:2], *m[2 : 2 + options], *p], m[2 + options :]

    def ranges_of(m):
        return oracle.local_bounds(m[0], t, g, m[1] if has_offset else None)

    def want(p, m):
        (x, w, *rest), m = ordered(p, m)
        w = num(w).swapaxes(1, 2) if transpose_w else w
        y = by_group(x, w, ranges_of(m))
        return epilogue(y, ranges_of(m), dict(zip(names, rest, strict=True)), activation)

    def draw(alone):
        m = data()
        a, b, *rest = floats_of(
            rng, [(t, k), w_shape, *shapes.values()],
            [of.left, of.right, *(dtypes[n] for n in names)], [1, k**-0.5, *[1] * len(names)],
            small=not integers,
        )  # fmt: skip
        if alone and rng.integers(2):
            a, b = poison_rows(a, ranges_of(m)), poison_groups(b, ranges_of(m))
            if "row_scale" in names:
                i = names.index("row_scale")
                rest[i] = poison_rows(rest[i], ranges_of(m))
        if of.are_floats:
            return [a, b, *rest], m
        return ([], [a, b, *rest, *m]) if integers else (rest, [a, b, *m])

    words, rest_words = ["TK", w_word], option_letters(names, activation)
    letters = [*words, *rest_words] if of.are_floats or integers else [*rest_words, *words]
    return Call(
        f"grouped_mm {of} {names} {activation}", run, want, draw, k, of.result,
        tolerance=3.0 if names or activation else 1.0, smooth=activation not in KINKED,
        letters=letters,
    )  # fmt: skip


def segmented_mm(rng) -> Call:
    m_, k, n = size(rng), size(rng), size(rng)
    lead = pick(rng, [(1,), (3,), (7,), (2, 3), (), (0,)])
    ta, tb = bool(rng.integers(2)), bool(rng.integers(2))
    of, cast, precision = some_operands(rng), fixed_dtype(rng), some_precision(rng)

    def spans():
        kind = rng.integers(4)
        if kind == 0:
            s = rng.integers(-5, k + 6, (*lead, 2))
        elif kind == 1:
            s = np.sort(rng.integers(0, k + 1, (*lead, 2)), axis=-1)
        elif kind == 2:
            s = np.broadcast_to(np.sort(rng.integers(0, k + 1, 2)), (*lead, 2))
        else:
            s = rng.integers(0, k + 1, (*lead, 1)) + np.array([0, 0])
        return [cast(s)]

    @as_drawn_by(of)
    def run(p, m):
        return jgg.segmented_mm(
            p[0], p[1], m[0], transpose_a=ta, transpose_b=tb, precision=precision,
            preferred_element_type=of.out,
        )  # fmt: skip

    @as_drawn_by(of)
    def want(p, m):
        a, b = (num(v).T if t else num(v) for v, t in zip(p, (ta, tb), strict=True))
        segments = np.asarray(m[0])
        out = np.zeros((math.prod(lead), m_, n), np.result_type(a, b))
        for i, (start, end) in enumerate(oracle.clamp(segments.reshape(-1, 2), k)):
            out[i] = a[:, start:end] @ b[start:end]
        return out.reshape(*lead, m_, n)

    def poison(a, b, m):
        inside = oracle.clamp(m[0].reshape(-1, 2), k)
        a, b = poison_rows(a if ta else a.T, inside), poison_rows(b.T if tb else b, inside)
        return a if ta else a.T.copy(), b.T.copy() if tb else b

    shapes = [(k, m_) if ta else (m_, k), (n, k) if tb else (k, n)]
    return Call(
        f"segmented_mm {of} {lead} {ta} {tb}", run, want,
        with_operands(rng, of, shapes, spans, poison), k * max(1, math.prod(lead)), of.result,
        letters=["KM" if ta else "MK", "NK" if tb else "KN"],
    )  # fmt: skip


def as_drawn_by(of):
    return lambda function: as_drawn(of, function)


def gather_mm(rng) -> Call:
    lead = pick(rng, [(3,), (1,), (2, 2), (), (5,), (8,)])
    batch = pick(rng, [(3,), (1,), (2, 2), (), (5,), (8,)])
    m_, k, n = size(rng, 12), size(rng), size(rng)
    of = some_operands(rng)
    data, both, promised = index_data(rng, math.prod(lead), math.prod(batch), lead, batch)

    @as_drawn_by(of)
    def run(p, m):
        lhs, rhs = both(m)
        return jgg.gather_mm(
            p[0], p[1], lhs, rhs, sorted_indices=promised, preferred_element_type=of.out
        )

    @as_drawn_by(of)
    def want(p, m):
        return gathered(p[0], p[1], *both(m))

    return Call(
        f"gather_mm {of} {lead} {batch} m={m_} {promised}", run, want,
        with_operands(rng, of, [(*lead, m_, k), (*batch, k, n)], data), k * 14, of.result,
        letters=["AB"[: len(lead)] + "MK", "CD"[: len(batch)] + "KN"],
    )  # fmt: skip


def gathered(a, b, lhs, rhs):
    a, b = num(a), num(b)
    batch_of = lambda v: np.arange(math.prod(v.shape[:-2])).reshape(v.shape[:-2])
    lhs, rhs = (batch_of(v) if i is None else i for v, i in ((a, lhs), (b, rhs)))
    lhs, rhs = np.broadcast_arrays(np.asarray(lhs), np.asarray(rhs))
    x, w = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    out = np.zeros((lhs.size, a.shape[-2], b.shape[-1]), np.result_type(a, b))
    for i, (p, q) in enumerate(zip(lhs.ravel().tolist(), rhs.ravel().tolist(), strict=True)):
        if 0 <= p < len(x) and 0 <= q < len(w):
            out[i] = x[p] @ w[q]
    return out.reshape(*lhs.shape, *out.shape[1:])


def ragged_dot(rng) -> Call:
    t, k, n, g = size(rng), size(rng), size(rng), int(rng.integers(1, 7))
    of = some_operands(rng, of_jax=True)
    data, has_offset = group_data(rng, g, t)

    @as_drawn_by(of)
    def run(p, m):
        return jgg.ragged_dot(
            p[0], p[1], m[0], group_offset=m[1] if has_offset else None,
            preferred_element_type=of.out,
        )  # fmt: skip

    def ranges_of(m):
        return oracle.local_bounds(m[0], t, g, m[1] if has_offset else None)

    @as_drawn_by(of)
    def want(p, m):
        return by_group(p[0], p[1], ranges_of(m))

    def poison(a, b, m):
        return poison_rows(a, ranges_of(m)), poison_groups(b, ranges_of(m))

    return Call(
        f"ragged_dot {of}", run, want,
        with_operands(rng, of, [(t, k), (g, k, n)], data, poison, [1, k**-0.5]), max(k, t),
        of.result, letters=["TK", "GKN"],
    )  # fmt: skip
