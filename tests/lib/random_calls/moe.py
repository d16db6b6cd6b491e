"""Random calls of mixtures of experts."""

import moe_oracle
import numpy as np
from oracle import f64

import jax_groupgemm as jgg

from .call import ACTIVATIONS, GATED, KINKED, Call, fixed_dtype, floats, floats_of, pick, size


def routed(index, experts, offset=0, max_rows=None):
    """order, place, sizes and overflow, pair by pair."""
    index = np.asarray(index).astype(np.int64) - offset
    pairs = index.size
    rows = pairs if max_rows is None else min(max_rows, pairs)
    order, sizes = [], np.zeros(experts, np.int32)
    for e in range(experts):
        mine = np.flatnonzero(index.reshape(-1) == e)
        sizes[e] = len(mine)
        order += mine.tolist()
    place = np.full(pairs, -1, np.int32)
    place[order[:rows]] = np.arange(min(rows, len(order)))
    filled = np.full(rows, -1, np.int32)
    filled[: len(order)] = order[:rows]
    return filled, place.reshape(index.shape), sizes, np.int32(max(len(order) - rows, 0))


def some_index(rng, tokens, k, experts, cast):
    low, high = pick(rng, [(0, experts), (-2, experts + 3), (0, 1), (0, experts)])
    return cast(rng.integers(low, max(high, low + 1), (tokens, k)))


def route(rng) -> Call:
    tokens, k, experts = size(rng), int(rng.integers(1, 5)), int(rng.integers(1, 9))
    offset = pick(rng, [None, None, 2, -1])
    max_rows = pick(rng, [None, 0, 3, tokens * k + 5])
    cast = fixed_dtype(rng)

    def run(p, m):
        r = jgg.route(m[0], experts, expert_offset=offset, max_rows=max_rows)
        return [r.order, r.place, r.group_sizes, r.overflow]

    def check(got, p, m):
        for a, b in zip(got, routed(m[0], experts, offset or 0, max_rows), strict=True):
            np.testing.assert_array_equal(a, b)

    draw = lambda alone: ([], [some_index(rng, tokens, k, experts, cast)])
    return Call(f"route {tokens} {k} {experts} {offset} {max_rows}", run, check, draw,
                transforms="checked")  # fmt: skip


def dispatch_and_combine(rng) -> Call:
    tokens, k, experts, d = size(rng), int(rng.integers(1, 5)), int(rng.integers(1, 9)), size(rng)
    max_rows, dtype = pick(rng, [None, 5]), pick(rng, floats())
    weighted, which = bool(rng.integers(2)), pick(rng, ["dispatch", "combine", "both"])
    rows = tokens * k if max_rows is None else min(max_rows, tokens * k)
    cast = fixed_dtype(rng)
    weighted = weighted and which != "dispatch"

    def run(p, m):
        r = jgg.route(m[0], experts, max_rows=max_rows)
        y = p[0] if which == "combine" else jgg.dispatch(p[0], r)
        return y if which == "dispatch" else jgg.combine(y, r, *p[1:])

    def want(p, m):
        order, place, _, _ = routed(m[0], experts, 0, max_rows)
        y = f64(p[0])
        if which != "combine":
            y = np.stack([y[o // k] if o >= 0 else np.zeros(d) for o in order] or [np.zeros(d)])
            y = y[: len(order)]
        if which == "dispatch":
            return y
        out = np.zeros((tokens, d))
        for t in range(tokens):
            for j in range(k):
                if place[t, j] >= 0:
                    out[t] += y[place[t, j]] * (f64(p[1])[t, j] if weighted else 1)
        return out

    def draw(alone):
        m = [some_index(rng, tokens, k, experts, cast)]
        shapes = [(rows if which == "combine" else tokens, d)] + [(tokens, k)] * weighted
        p = floats_of(rng, shapes, [dtype, pick(rng, ["float32", dtype])][: len(shapes)])
        return p, m

    # The weights' dtype is that of the first draw.
    dtypes = [a.dtype for a in draw(False)[0]]
    cast_all = lambda drawn: ([a.astype(d) for a, d in zip(drawn[0], dtypes)], drawn[1])  # noqa: B905
    return Call(f"{which} {dtype} {dtypes} {max_rows}", run, want,
                lambda alone: cast_all(draw(alone)), max(k, d), dtype, tolerance=2.0)  # fmt: skip


def moe_mlp(rng) -> Call:
    tokens, k, experts = size(rng, 16), int(rng.integers(1, 4)), int(rng.integers(1, 6))
    d, f = size(rng, 16), size(rng, 16)
    activation = pick(rng, ACTIVATIONS)
    wide = 2 * f if activation in GATED else f
    dtype, transpose_w = pick(rng, floats()), bool(rng.integers(2))
    biases = [name for name in ("up_bias", "down_bias") if rng.integers(2)]
    offset, max_rows = pick(rng, [None, 1, -2]), pick(rng, [None, None, tokens * k, 4])
    lead = (tokens,) if rng.integers(2) else (1, tokens)
    shapes = {"up_bias": (experts, wide), "down_bias": (experts, d)}
    cast = fixed_dtype(rng)

    def run(p, m):
        x, up, down, weight, *rest = p
        if transpose_w:
            up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
        return jgg.moe_mlp(
            x, up, down, m[0], weight, activation=activation, expert_offset=offset,
            transpose_w=transpose_w, max_rows=max_rows, **dict(zip(biases, rest, strict=True)),
        )  # fmt: skip

    def want(p, m):
        x, up, down, weight, *rest = p
        index = np.asarray(m[0]).reshape(tokens, k)
        given = dict(zip(biases, rest, strict=True))
        y = moe_oracle.moe_mlp(
            f64(x).reshape(tokens, d), up, down, index, f64(weight).reshape(tokens, k),
            activation=activation, offset=offset or 0, **given,
        )  # fmt: skip
        if max_rows is not None and routed(index, experts, offset or 0, max_rows)[3]:
            y = np.full_like(y, np.nan)
        return y.reshape(*lead, d)

    def draw(alone):
        p = floats_of(
            rng,
            [(*lead, d), (experts, d, wide), (experts, f, d), (*lead, k),
             *(shapes[b] for b in biases)],
            [dtype, dtype, dtype, "float32", *[dtype] * len(biases)],
            [1, d**-0.5, f**-0.5, 1, *[1] * len(biases)],
        )  # fmt: skip
        m = [some_index(rng, tokens, k, experts, cast).reshape(*lead, k)]
        return p, m

    tokens_word = "." * (len(lead) - 1) + "T"
    wide_letter = "H" if activation in GATED else "F"
    words = [f"{tokens_word}.", f"E.{wide_letter}", "EF.", f"{tokens_word}."]
    words += [{"up_bias": f"E{wide_letter}", "down_bias": "E."}[b] for b in biases]
    return Call(
        f"moe_mlp {dtype} {activation} {biases} {offset} {max_rows} {transpose_w} {lead}", run,
        want, draw, max(d, f) * k, dtype, tolerance=6.0, smooth=activation not in KINKED,
        # What max_rows means is of each device.
        letters=[*words, f"{tokens_word}."] if max_rows is None else None,
    )  # fmt: skip
