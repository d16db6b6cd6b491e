"""A mixture of experts: the layer, its gradients, and the steps beside its products."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import numpy as np

from .._fp8.recipe import FP8Recipe
from .._moe.moe_mlp import moe_mlp
from .._moe.permute import combine, dispatch
from .._moe.routing import Routing, route
from .._quantized.prepack import prepack
from ..router import choose, choose_for
from . import oracle
from .line import Line, Run, Trial, Want
from .oracle import f64, normal
from .products import FLOATS
from .quantized import random, values

# Shares of the largest number of a result that may be wrong: h and the activation are rounded
# between products. A recipe rounds to eight bits.
_ALLOWED = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 3e-5}
_FP8_ALLOWED = 0.15
# Tokens, experts, choices, D, F. The second is a step of few tokens.
_LAYERS = (
    (64, 4, 2, 64, 96), (5, 8, 2, 256, 128), (300, 8, 2, 128, 64), (700, 4, 2, 256, 192),
    (2048, 16, 4, 512, 256),
)  # fmt: skip


def lines(packs: bool) -> list[Line]:
    """``packs``: also of prepacked weights."""
    found = []
    for dtype in FLOATS:
        found += [
            Line("moe_mlp", dtype, _bound(_layer, dtype), _timed(dtype)),
            Line("moe_mlp gradients", dtype, _bound(_gradients, dtype)),
            Line("dispatch, combine", dtype, _bound(_permuted, dtype)),
            Line("router.choose", dtype, _bound(_choice, dtype)),
        ]
    for dtype in ("float32", "bfloat16"):
        found.append(Line("router.choose_for", dtype, _bound(_choice_for, dtype)))
    for mode in ("affine", "nvfp4"):
        found.append(Line(f"moe_mlp {mode}", "bfloat16", _bound(_quantized, mode, packs)))
    for name, recipe in (
        ("FP8", FP8Recipe()), ("FP8 tensor", FP8Recipe(scaling="tensor", accumulate="fast")),
    ):  # fmt: skip
        found.append(Line(f"moe_mlp {name} gradients", "bfloat16", _bound(_fp8, recipe)))
    return [*found, Line("route", "int32", _route)]


def _bound(function, *given):
    return lambda rng, quick: function(*given, rng, quick)


# ---- routing -----------------------------------------------------------------------------------


def _indices(rng, tokens, experts, choices) -> Iterator[tuple[str, np.ndarray]]:
    """Balanced, all to one expert, and pairs that do not exist."""
    index = rng.integers(0, experts, (tokens, choices)).astype(np.int32)
    yield "random", index
    yield "one expert", np.full_like(index, experts - 1)
    some = index.copy()
    some[rng.random(some.shape) < 0.3] = -1
    some[-1] = experts
    yield "missing pairs", some


def _routed(index, experts: int):
    """order, place and group_sizes of ``route``."""
    flat = index.reshape(-1)
    there = (flat >= 0) & (flat < experts)
    found = np.argsort(np.where(there, flat, experts), kind="stable").astype(np.int32)
    order = np.where(np.arange(flat.size) < there.sum(), found, -1).astype(np.int32)
    place = np.full(flat.size, -1, np.int32)
    place[order[: there.sum()]] = np.arange(there.sum())
    sizes = np.bincount(flat[there], minlength=experts).astype(np.int32)
    return order, place.reshape(index.shape), sizes


def _route(rng, quick) -> Iterator[Trial]:
    for tokens, experts, choices in ((33, 4, 2), (700, 60, 8), (3000, 256, 8))[
        : 1 + 2 * (not quick)
    ]:
        runs = []
        for name, index in _indices(rng, tokens, experts, choices):
            order, place, sizes = _routed(index, experts)
            wants = [[Want(v) for v in (order, place, sizes, np.zeros((), np.int32))]]
            runs.append(Run(name, (index,), lambda wants=wants: wants))
        function = functools.partial(_route_call, experts=experts)
        yield Trial(f"T={tokens} E={experts} k={choices}", function, runs)


def _route_call(index, *, experts: int):
    routing: Routing = route(index, experts)
    return routing.order, routing.place, routing.group_sizes, routing.overflow


def _permuted(dtype, rng, quick) -> Iterator[Trial]:
    """Rows to their experts and back, with weights, and the cotangents of both."""
    for tokens, experts, choices, d in ((40, 4, 2, 64), (300, 16, 8, 256))[: 1 + (not quick)]:
        x, ct = normal(rng, (tokens, d), dtype), normal(rng, (tokens, d), dtype)
        weight = rng.random((tokens, choices)).astype(np.float32)
        runs = []
        for name, index in _indices(rng, tokens, experts, choices):
            want = functools.partial(_permuted_wants, x, ct, weight, index, experts, dtype)
            runs.append(Run(name, (x, ct, weight, index), want))
        function = functools.partial(_permute, experts=experts)
        yield Trial(f"T={tokens} E={experts} k={choices} D={d}", function, runs)


def _permute(x, ct, weight, index, *, experts: int):
    routing = route(index, experts)
    rows, back = jax.vjp(lambda x: dispatch(x, routing), x)
    out, both = jax.vjp(lambda rows, weight: combine(rows, routing, weight), rows, weight)
    drows, dweight = both(ct)
    return rows, out, drows, dweight, back(drows)[0]


def _permuted_wants(x, ct, weight, index, experts, dtype):
    x, ct, weight = f64(x), f64(ct), f64(weight)
    order, place, _ = _routed(index, experts)
    choices, there = index.shape[1], (place >= 0)
    token = np.maximum(order, 0) // choices
    rows = np.where(order[:, None] >= 0, x[token], 0.0)
    share = (weight * there).sum(1)[:, None]
    drows = np.where(order[:, None] >= 0, ct[token] * weight.reshape(-1)[order][:, None], 0.0)
    drows = oracle.rounded(drows, dtype)
    dweight = np.where(there, (ct * x).sum(1)[:, None], 0.0)
    dx = np.where(there[..., None], drows[place], 0.0).sum(1)
    digit = 1.02 * oracle.ROUNDING[dtype]
    near = lambda v, terms: Want(v, digit * np.abs(v) + 1e-6 * terms, np.abs(v).max() or 1.0)
    size = (np.abs(ct) * np.abs(x)).sum(1)[:, None]
    # A row's cotangent may be the neighbouring number, and its token adds up several.
    rounds = 4 * digit * np.where(there[..., None], np.abs(drows[place]), 0.0).sum(1)
    return [[
        Want(rows), near(share * x, np.abs(x).max() * choices),
        Want(drows, 2 * digit * np.abs(drows) + 1e-6, np.abs(drows).max() or 1.0),
        Want(dweight, 2e-5 * size + 1e-6, size.max()),
        Want(dx, digit * np.abs(dx) + rounds + 1e-5, np.abs(dx).max() or 1.0),
    ]]  # fmt: skip


# ---- routers -----------------------------------------------------------------------------------


def _chosen(logits, k: int):
    """Experts and weights of a softmax; logits of a token differ from each other."""
    expert = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    of = np.take_along_axis(logits, expert, -1)
    share = np.exp(of - of.max(-1, keepdims=True))
    return expert.astype(np.int32), share / share.sum(-1, keepdims=True)


def _choice(dtype, rng, quick) -> Iterator[Trial]:
    for tokens, experts, k in ((50, 8, 2), (1, 64, 8), (300, 256, 8))[: 2 + (not quick)]:
        # Multiples of 1/32 below 8 are exact in every dtype, and no two of a token are equal.
        logits = np.stack([rng.permutation(256)[:experts] for _ in range(tokens)]) / 32 - 4
        expert, weight = _chosen(logits, k)
        wants = [[Want(expert), Want(weight, 2e-6 + 4 * oracle.ROUNDING["float32"])]]
        operands = (logits.astype(oracle.DTYPES[dtype]),)

        def function(logits, k=k):
            choice = choose(logits, k)
            return choice.expert, choice.weight

        run = Run("random", operands, lambda wants=wants: wants)
        yield Trial(f"T={tokens} E={experts} k={k}", function, [run])


def _choice_for(dtype, rng, quick) -> Iterator[Trial]:
    for tokens, d, experts, k in ((1, 256, 8, 2), (8, 512, 64, 8), (100, 128, 16, 4)):
        # Logits are whole multiples of 1/32: x is whole numbers with one large element.
        x = rng.integers(-2, 3, (tokens, d)).astype(oracle.DTYPES[dtype])
        w = (rng.integers(-2, 3, (d, experts)) / 8).astype(np.float32)
        logits = f64(x) @ f64(w)
        want = functools.partial(_choice_wants, logits, k)

        def function(x, w, k=k):
            choice, logits = choose_for(x, w, k)
            return choice.expert, choice.weight, logits

        yield Trial(f"T={tokens} D={d} E={experts} k={k}", function, [Run("random", (x, w), want)])


def _choice_wants(logits, k: int):
    expert, weight = _chosen(logits, k)
    size = max(np.abs(logits).max(), 1.0)
    return [[Want(expert), Want(weight, 1e-5), Want(logits, 2e-5 * size, size)]]


# ---- the layer ---------------------------------------------------------------------------------


def _problem(rng, dtype, tokens, experts, choices, d, f):
    """x, up, down, weight and a cotangent; numbers of h are of order one."""
    scaled = lambda shape, k: (rng.standard_normal(shape, np.float32) / k**0.5).astype(
        oracle.DTYPES[dtype]
    )
    x, ct = normal(rng, (tokens, d), dtype), normal(rng, (tokens, d), dtype)
    weight = rng.random((tokens, choices)).astype(np.float32)
    return x, scaled((experts, d, 2 * f), d), scaled((experts, f, d), f), weight, ct


def _value(x, up, down, index, weight, ct=None):
    """The layer in float64, and with ``ct`` gradients of x, up, down and weight."""
    x, up, down, weight = map(f64, (x, up, down, weight))
    y = np.zeros((len(x), down.shape[2]))
    grads = [np.zeros_like(a) for a in (x, up, down, weight)]
    dx, dup, ddown, dweight = grads
    for e in range(len(up)):
        token, choice = np.nonzero(index == e)
        gate, value = np.split(x[token] @ up[e], 2, -1)
        a = oracle.silu(gate) * value
        out, factor = a @ down[e], weight[token, choice][:, None]
        np.add.at(y, token, factor * out)
        if ct is None:
            continue
        of = f64(ct)[token]
        dweight[token, choice] = (of * out).sum(-1)
        ddown[e] = a.T @ (factor * of)
        da = (factor * of) @ down[e].T
        dh = np.concatenate([oracle.silu_slope(gate) * value * da, oracle.silu(gate) * da], -1)
        dup[e] = x[token].T @ dh
        np.add.at(dx, token, dh @ up[e].T)
    return y, *([] if ct is None else grads)


def _near(found, allowed: float) -> list[list[Want]]:
    wants = []
    for value in found:
        largest = max(np.abs(value).max(initial=0.0), 1e-6)
        wants.append(Want(value, allowed * largest, largest))
    return [wants]


def _layer(dtype, rng, quick) -> Iterator[Trial]:
    for tokens, experts, choices, d, f in _LAYERS[: 2 if quick else None]:
        x, up, down, weight, _ = _problem(rng, dtype, tokens, experts, choices, d, f)
        runs = []
        for name, index in _indices(rng, tokens, experts, choices):
            want = lambda o=(x, up, down, index, weight): _near(_value(*o), _ALLOWED[dtype])
            runs.append(Run(name, (x, up, down, index, weight), want))
        yield Trial(f"T={tokens} E={experts} k={choices} D={d} F={f}", moe_mlp, runs)


def _gradients(dtype, rng, quick) -> Iterator[Trial]:
    for tokens, experts, choices, d, f in _LAYERS[: 1 if quick else None]:
        x, up, down, weight, ct = _problem(rng, dtype, tokens, experts, choices, d, f)
        runs = []
        for name, index in _indices(rng, tokens, experts, choices):
            o = x, up, down, index, weight, ct
            want = lambda o=o: _near(_value(*o)[1:], _ALLOWED[dtype])
            runs.append(Run(name, o, want))
        yield Trial(f"T={tokens} E={experts} k={choices} D={d} F={f}", _back, runs)


def _back(x, up, down, index, weight, ct, **options):
    layer = lambda x, up, down, weight: moe_mlp(x, up, down, index, weight, **options)
    return jax.vjp(layer, x, up, down, weight)[1](ct)


def _fp8(recipe, rng, quick) -> Iterator[Trial]:
    for tokens, experts, choices, d, f in ((300, 4, 2, 256, 128), (700, 8, 2, 512, 256))[
        : 1 + (not quick)
    ]:
        x, up, down, weight, ct = _problem(rng, "bfloat16", tokens, experts, choices, d, f)
        runs = []
        for name, index in _indices(rng, tokens, experts, choices):
            o = x, up, down, index, weight, ct
            runs.append(Run(name, o, lambda o=o: _near(_value(*o)[1:], _FP8_ALLOWED)))
        function = functools.partial(_back, recipe=recipe)
        yield Trial(f"T={tokens} E={experts} k={choices} D={d} F={f}", function, runs)


def _quantized(mode, packed, rng, quick) -> Iterator[Trial]:
    """Few tokens, as in a decode step, and many."""
    for tokens, experts, choices, d, f in ((4, 8, 2, 256, 128), (1, 16, 8, 512, 256),
                                           (300, 8, 2, 128, 128))[: 3 - quick]:  # fmt: skip
        up = random(rng, (experts, 2 * f, d), mode, dtype="bfloat16")
        down = random(rng, (experts, d, f), mode, dtype="bfloat16")
        small = (rng.standard_normal((tokens, d), np.float32) / 16).astype(
            oracle.DTYPES["bfloat16"]
        )
        weight = rng.random((tokens, choices)).astype(np.float32)
        wide = [values(q, "bfloat16")[0].swapaxes(1, 2) for q in (up, down)]
        runs = []
        for name, index in _indices(rng, tokens, experts, choices):
            want = lambda o=(small, *wide, index, weight): _near(_value(*o), _ALLOWED["bfloat16"])
            runs.append(Run(name, (small, up, down, index, weight), want))

        def function(x, up, down, index, weight, packed=packed):
            up, down = (prepack(w) if packed else w for w in (up, down))
            return moe_mlp(x, up, down, index, weight)

        yield Trial(f"T={tokens} E={experts} k={choices} D={d} F={f}", function, runs)


def _timed(dtype):
    """2048 tokens, 2 of 8 experts each."""

    def timed(rng):
        x, up, down, weight, _ = _problem(rng, dtype, 2048, 8, 2, 2048, 1024)
        index = rng.integers(0, 8, (2048, 2)).astype(np.int32)
        return moe_mlp, (x, up, down, index, weight)

    return timed
